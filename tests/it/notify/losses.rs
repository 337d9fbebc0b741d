//! The store stops, loses its data, or shows another time while a message is under way.

use std::{fs, time::Duration};

use serde_json::Value;

use super::{
    channel, failing, kinds,
    servers::{Hook, Mode},
};
use crate::support::{
    GENEROUS,
    fleet::{Fleet, Plan, fleet},
    wait_until,
};

/// A job fails, and what its message says is on its way when `act` is called with it. Then the job recovers. Returns
/// the messages that came until that was told.
fn meanwhile(plan: Plan, act: impl FnOnce(&mut Fleet, &Hook, &Value)) -> Vec<Value> {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Holds);
    let mut fleet = plan
        .tables(&channel("ops", &hook, "timeout = \"120s\""))
        .default("notify", "[\"ops\"]")
        .job("bad", &failing(dir.path(), ""))
        .start();
    let held = hook.wait_held("ops");
    assert_eq!(kinds(&held), [("bad", "failed")]);
    act(&mut fleet, &hook, &held);
    wait_until("the failure is told", GENEROUS, || {
        !failures(&hook.heard("ops")).is_empty()
    });
    fs::write(dir.path().join("ok"), "").expect("write");
    let recovered = |m: &Value| kinds(m).contains(&("bad", "recovered"));
    wait_until("that it recovered is told", GENEROUS, || {
        hook.heard("ops").iter().any(recovered)
    });
    hook.heard("ops")
}

/// The ids of messages that say that the job is bad, and whether they may be repetitions. After a loss of data it may
/// be bad because an occurrence was missed.
fn failures(heard: &[Value]) -> Vec<(&str, bool)> {
    let bad = heard.iter().filter(|m| m["bad"] == true);
    bad.map(|m| {
        let id = m["id"].as_str().expect("an id");
        (id, m["perhaps_sent"] == true)
    })
    .collect()
}

#[test]
fn a_message_under_way_when_the_store_loses_its_data_is_told_anew() {
    let mut lost = Value::Null;
    let heard = meanwhile(fleet(1), |fleet, hook, held| {
        lost = held["id"].clone();
        fleet.server().restart_empty();
        // Nobody sends a message that nobody can record any more.
        fleet.wait_log(0, "another instance sends the fleet's notifications now");
        hook.set(Mode::Takes);
    });
    let failures = failures(&heard);
    assert_eq!((failures.len(), heard.len()), (1, 2), "{heard:#?}");
    assert!(failures[0].0 != lost && !failures[0].1, "{heard:#?}");
}

#[test]
fn a_store_that_is_away_for_a_moment_makes_no_repetition() {
    let plan = fleet(1).env(0, "SOLOIST_LOG", "info,soloist=debug");
    let heard = meanwhile(plan, |fleet, hook, _| {
        let all = fleet.server().snapshot();
        fleet.server().kill();
        hook.set(Mode::Takes);
        hook.wait("ops", 1);
        fleet.wait_log(0, "cannot write notes of notifications; retrying");
        fleet.server().revive(Some(&all));
    });
    assert_eq!((failures(&heard).len(), heard.len()), (1, 2), "{heard:#?}");
}

#[test]
fn a_store_that_is_away_for_long_makes_a_repetition_that_says_so() {
    let heard = meanwhile(fleet(1), |fleet, hook, _| {
        let all = fleet.server().snapshot();
        fleet.server().kill();
        hook.set(Mode::Takes);
        hook.wait("ops", 1);
        fleet.wait_log(0, "another instance may send the notifications now");
        // It has its data, in which the message is on its way.
        fleet.server().revive(Some(&all));
        hook.wait("ops", 2);
    });
    let failures = failures(&heard);
    assert_eq!((failures.len(), heard.len()), (2, 3), "{heard:#?}");
    assert_eq!(failures[0].0, failures[1].0, "{heard:#?}");
    assert!(!failures[0].1 && failures[1].1, "{heard:#?}");
}

/// Messages that are an hour old are given up: by the time that instances believe, not by what the store shows.
#[test]
fn a_store_whose_clock_jumps_gives_no_message_up() {
    let plan = fleet(1).store_with_own_clock();
    let heard = meanwhile(plan, |fleet, hook, held| {
        hook.set(Mode::Status(503));
        fleet.wait_log(0, "cannot send a notification; retrying");
        fleet.server().step_clock(Duration::from_secs(2 * 3600));
        fleet.wait_log(0, "the store's clock is 7200.0s ahead");
        let tries = || hook.paths().len();
        let before = tries();
        wait_until("two more tries", GENEROUS, || tries() >= before + 2);
        hook.set(Mode::Takes);
        assert_eq!(hook.wait("ops", 1)[0]["id"], held["id"]);
        fleet.server().set_clock(0);
    });
    assert_eq!((failures(&heard).len(), heard.len()), (1, 2), "{heard:#?}");
}
