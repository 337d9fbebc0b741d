//! `[notify.NAME]`: the channels over which soloist tells people that the state of a job has changed.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use super::Secret;
use crate::logic::notify::{Kind, Rules};

/// The channels by their names.
pub type Channels = BTreeMap<String, Arc<Channel>>;

/// A channel, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Channel {
    pub name: String,
    /// `type`, as written.
    pub kind: &'static str,
    pub way: Way,
    pub rules: Rules,
    /// The time limit of one try to deliver a message.
    pub timeout: Duration,
}

/// How a message leaves.
#[derive(Debug, Clone, PartialEq)]
pub enum Way {
    /// A POST of JSON.
    Http { form: Form, url: Secret },
    /// PagerDuty's events, version 2.
    PagerDuty { url: Secret, routing_key: Secret },
    Email {
        /// With the password, if there is one.
        smtp: Secret,
        from: String,
        to: Vec<String>,
    },
    /// The message comes on stdin, as JSON.
    Command(Vec<String>),
    /// This process does not send over it ([`Sends`]).
    Unread,
}

impl Way {
    /// To whom a mail goes. Other ways have no receivers of their own.
    pub fn receivers(&self) -> &[String] {
        match self {
            Self::Email { to, .. } => to,
            _ => &[],
        }
    }
}

/// Over which channels a process sends. Only for these it reads where they lead: the addresses and keys of the others,
/// and the variables and files that have them, it need not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sends<'a> {
    /// The daemon, and who checks its configuration. It sends heartbeats, too.
    All,
    Over(&'a str),
    Nothing,
}

impl Sends<'_> {
    pub(super) fn over(self, channel: &str) -> bool {
        match self {
            Self::All => true,
            Self::Over(name) => name == channel,
            Self::Nothing => false,
        }
    }
}

/// What stands in the body of a POST.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Webhook,
    Slack,
    Discord,
    Teams,
}

/// `type`, as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Type {
    Http(Form),
    PagerDuty,
    Email,
    Command,
}

impl Type {
    pub(super) const WORDS: &'static [(&'static str, Self)] = &[
        ("webhook", Self::Http(Form::Webhook)),
        ("slack", Self::Http(Form::Slack)),
        ("discord", Self::Http(Form::Discord)),
        ("teams", Self::Http(Form::Teams)),
        ("pagerduty", Self::PagerDuty),
        ("email", Self::Email),
        ("command", Self::Command),
    ];

    pub(super) fn word(self) -> &'static str {
        let found = Self::WORDS.iter().find(|(_, t)| *t == self);
        found.map_or("", |(word, _)| word)
    }
}

/// The words of `on`.
pub(super) const KINDS: &[(&str, Kind)] = &[
    ("failed", Kind::Failed),
    ("timed_out", Kind::TimedOut),
    ("crashed", Kind::Crashed),
    ("unknown", Kind::Unknown),
    ("lease_lost", Kind::LeaseLost),
    ("missed", Kind::Missed),
    ("late", Kind::Late),
    ("too_long", Kind::TooLong),
    ("too_short", Kind::TooShort),
    ("recovered", Kind::Recovered),
];

/// Where PagerDuty takes events.
pub(super) const PAGERDUTY: &str = "https://events.pagerduty.com/v2/enqueue";
