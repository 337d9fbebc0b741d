//! The arguments of the scripts. Some of them are JSON.

use serde::Serialize;

use crate::{
    logic::claim::{Claim, Missed, Observed, OnCrash, Target},
    model::{InstanceId, RunId, RunRecord, Wait},
    store::connection::Script,
};

/// A script's argument.
#[derive(Debug)]
pub(super) enum Arg<'a> {
    Str(&'a str),
    String(String),
    Bytes(&'a [u8]),
    Int(i64),
}

impl<'a> From<&'a str> for Arg<'a> {
    fn from(s: &'a str) -> Self {
        Self::Str(s)
    }
}

impl Arg<'_> {
    pub(super) fn write(&self, call: &mut redis::Cmd) {
        match self {
            Self::Str(s) => call.arg(*s),
            Self::String(s) => call.arg(s.as_str()),
            Self::Bytes(b) => call.arg(*b),
            Self::Int(n) => call.arg(*n),
        };
    }
}

/// A call without its last argument, which is the time that the caller believes the server's clock to show.
pub(super) fn call(script: &Script, keys: &[String], args: &[Arg<'_>]) -> redis::Cmd {
    let mut call = script.call(keys.iter(), args.len());
    args.iter().for_each(|a| a.write(&mut call));
    call
}

/// The members of an open entry that the claimant fills in.
#[derive(Serialize)]
pub(super) struct Holder<'a> {
    pub(super) run: RunId,
    pub(super) instance: &'a InstanceId,
    pub(super) host: &'a str,
    pub(super) lease: i64,
    pub(super) definition: &'a str,
}

/// Members that few claims need.
#[derive(Serialize)]
struct Extra<'a> {
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    missed: &'a [Missed],
    #[serde(skip_serializing_if = "Option::is_none")]
    observed: Option<&'a Observed>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    holds: &'a [RunId],
    on_crash: OnCrash,
    max_attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'static str>,
}

pub(super) fn extra(c: &Claim) -> String {
    let (key, before) = match &c.target {
        Target::Scheduled(_) => (None, None),
        Target::Manual { key, before } => (Some(key.as_str()), before.map(|b| b.0)),
    };
    if c.missed.is_empty()
        && c.observed.is_none()
        && c.holds.is_empty()
        && key.is_none()
        && c.cause.is_none()
    {
        return String::new();
    }
    to_json(&Extra {
        missed: &c.missed,
        observed: c.observed.as_ref(),
        holds: &c.holds,
        on_crash: c.on_crash,
        max_attempts: c.max_attempts,
        key,
        before,
        cause: c.cause.map(Wait::cause),
    })
}

pub(super) fn to_json<T: Serialize>(v: &T) -> String {
    // Cannot fail: soloist's own types consist of strings, numbers and lists of them.
    serde_json::to_string(v).unwrap_or_default()
}

/// The members of a JSON object, without its braces.
pub(super) fn members<T: Serialize>(v: &T) -> String {
    let s = to_json(v);
    s[1..s.len() - 1].to_owned()
}

/// A record in the form in which it is stored: without the token, which its reader computes because Lua's JSON would
/// round it, and without the output, which has its own key.
pub(super) fn stored(r: &RunRecord) -> String {
    to_json(&RunRecord {
        fencing_token: None,
        output_tail: String::new(),
        ..r.clone()
    })
}
