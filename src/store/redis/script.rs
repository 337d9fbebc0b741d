//! The scripts of lua/. The text of each script consists of the constants below, lib.lua, the file that it shares with
//! some others (if any), and its own file.

use std::sync::LazyLock;

use crate::{
    logic::{belief, claim},
    store::{
        FORGET_INSTANCE, HISTORY_KEPT, OUTPUT_MOST, OUTPUT_TTL, RECORDS_TTL, STATE_MOST,
        connection::Script,
        output::{OUTPUT_PATIENCE, PIECE},
    },
};

type Lazy = LazyLock<Script>;

macro_rules! script {
    ($($name:literal)*) => {
        LazyLock::new(|| {
            Script::new(constants() + concat!(
                include_str!("../../../lua/lib.lua"),
                $(include_str!(concat!("../../../lua/", $name, ".lua"))),*
            ))
        })
    };
}
pub(super) static CLAIM: Lazy = script!("claim");
pub(super) static RENEW: Lazy = script!("renew");
pub(super) static SETTLE: Lazy = script!("pieces" "settle");
pub(super) static OBSERVE: Lazy = script!("observe");
pub(super) static JOBS: Lazy = script!("jobs");
pub(super) static LINES: Lazy = script!("lines");
pub(super) static COMPARE_AND_SET: Lazy = script!("compare_and_set");
pub(super) static HEARTBEAT: Lazy = script!("heartbeat");
pub(super) static NOTICES: Lazy = script!("notices");
pub(super) static NOTE: Lazy = script!("note");
pub(super) static WRONG_TYPE: Lazy = script!("wrong_type");
pub(super) static OUTPUT: Lazy = script!("pieces" "output");
pub(super) static READ_OUTPUT: Lazy = script!("pieces" "read_output");

/// The constants that a rule needs both in Rust and in Lua: defined in Rust, and written here as Lua. Times are in
/// milliseconds.
fn constants() -> String {
    let numbers = [
        ("BEHIND", belief::SLACK.as_millis()),
        ("AHEAD", belief::ON_ITS_WAY.as_millis()),
        ("NEAR", belief::NEAR.as_millis()),
        ("PAUSED_WAIT", claim::PAUSED_WAIT_MS as u128),
        ("SEQ_MOST", u128::from(u32::MAX)),
        ("HISTORY_KEPT", HISTORY_KEPT as u128),
        ("HISTORY_TTL", RECORDS_TTL.as_millis()),
        ("FORGET_INSTANCE", FORGET_INSTANCE.as_millis()),
        ("STATE_MOST", STATE_MOST as u128),
        ("OUTPUT_TTL", OUTPUT_TTL.as_millis()),
        ("OUTPUT_PATIENCE", OUTPUT_PATIENCE.as_millis()),
        ("PIECE", u128::from(PIECE)),
        ("PIECES_MOST", OUTPUT_MOST as u128 / u128::from(PIECE)),
    ];
    let words = [
        ("LOST", claim::LOST),
        ("LAPSED", claim::LAPSED),
        ("NEVER_RENEWED", claim::NEVER_RENEWED),
        ("TOO_LATE", claim::TOO_LATE),
        ("IN_DOUBT", claim::IN_DOUBT),
        ("OVERDUE", claim::OVERDUE),
        ("AFTER_LOSS", claim::AFTER_LOSS),
        ("JOB_REMOVED", claim::JOB_REMOVED),
        ("OVERLAPS", claim::OVERLAPS),
    ];
    let numbers = numbers.map(|(name, n)| format!("local {name} = {n}\n"));
    // Rust's notation is valid Lua here: the words contain no character that the two languages escape differently.
    let words = words.map(|(name, text)| format!("local {name} = {text:?}\n"));
    numbers.concat() + &words.concat()
}

/// The whole text of the script `name`, for tests and benches.
#[doc(hidden)]
pub fn script(name: &str) -> Option<&'static str> {
    let script = match name {
        "claim" => &CLAIM,
        "settle" => &SETTLE,
        "compare_and_set" => &COMPARE_AND_SET,
        _ => return None,
    };
    Some(&script.text)
}
