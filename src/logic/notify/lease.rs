//! Which instance is the fleet's notifier. It has a lease in the store: the other instances see it renewed, and one of
//! them takes it over once it has not changed for its whole length on their own clocks. Every write of the notifier
//! carries the lease that it believes to have and the next one, so that the write of a notifier that was replaced
//! changes nothing.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::{Boottime, InstanceId};

/// How long the lease lasts.
pub const LENGTH: Duration = Duration::from_secs(10);
/// Its holder relies on it this long after it asked for it: less than its length, because clocks differ in rate.
pub const TRUST: Duration = Duration::from_secs(8);
/// The time between two renewals, and between two looks of the others.
pub const EVERY: Duration = Duration::from_secs(2);

/// The lease, as the store has it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lease {
    pub holder: InstanceId,
    /// A random number that distinguishes this process from another one of the same name.
    pub process: u64,
    /// Grows with each holder.
    pub token: u64,
    /// Grows with each write of its holder.
    pub seq: u64,
    /// Its holder has given it back.
    #[serde(default)]
    pub over: bool,
}

impl Lease {
    pub fn text(&self) -> String {
        // Cannot fail: it consists of strings and numbers.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// None: another program wrote it.
    pub fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

/// What the store has of notifications: the lease, and notes by their names.
pub const LEASE: &str = "lease";
/// The names of the notes of jobs begin so.
pub const OF_JOB: &str = "job:";
/// The note of the messages that were given up. It is read together with the lease, by every instance that shows it.
pub const GIVEN_UP: &str = "given_up";

/// A write of the notifier, or of who wants to be it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Write {
    /// The lease that the store must have; None: it must have none.
    pub was: Option<String>,
    /// The lease that the store then has; no other write has the same.
    pub lease: String,
    pub set: Vec<(String, String)>,
    pub remove: Vec<String>,
}

/// What became of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Written {
    Done,
    /// Another lease is in force; nothing was written.
    Not(Option<String>),
}

/// Whether the store makes a write, given the lease that it has. The same write may be asked for again.
pub fn allows(lease: Option<&str>, write: &Write) -> bool {
    lease == write.was.as_deref() || lease == Some(&write.lease)
}

/// Whether an instance is the notifier, and what it knows of the lease.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Role {
    /// Another instance, or nobody yet.
    Follower {
        /// The lease as it was seen last, as text, and since when it has not changed.
        seen: Option<(Option<String>, Boottime)>,
    },
    /// This one.
    Notifier {
        lease: Lease,
        /// When the last answered write of it left.
        confirmed: Boottime,
    },
}

impl Role {
    pub fn new() -> Self {
        Self::Follower { seen: None }
    }

    /// The store was asked, and has this lease.
    pub fn saw(&mut self, lease: Option<String>, received: Boottime) {
        match self {
            Self::Follower {
                seen: Some((known, _)),
            } if *known == lease => {}
            _ => {
                *self = Self::Follower {
                    seen: Some((lease, received)),
                };
            }
        }
    }

    /// The lease to ask for, in place of the one that was seen, if this instance may now.
    pub fn may_take(&self, me: &InstanceId, process: u64, now: Boottime) -> Option<Lease> {
        let Self::Follower {
            seen: Some((lease, since)),
        } = self
        else {
            return None;
        };
        let read = lease.as_deref().and_then(Lease::read);
        let over = lease.is_none() || read.as_ref().is_some_and(|lease| lease.over);
        (over || now.since(*since) >= LENGTH).then(|| Lease {
            holder: me.clone(),
            process,
            token: read.map_or(0, |lease| lease.token).saturating_add(1),
            seq: 0,
            over: false,
        })
    }

    /// The lease that is in force if this instance writes now, as far as it knows.
    pub fn known(&self) -> Option<String> {
        match self {
            Self::Follower { seen } => seen.as_ref()?.0.clone(),
            Self::Notifier { lease, .. } => Some(lease.text()),
        }
    }

    /// The lease that the next write of the notifier carries. None: it is not the notifier, or may be so no longer.
    pub fn renewed(&self, now: Boottime) -> Option<Lease> {
        match self {
            Self::Notifier { lease, .. } if self.trusts(now) => Some(Lease {
                seq: lease.seq.saturating_add(1),
                ..lease.clone()
            }),
            _ => None,
        }
    }

    /// The store made a write that left at `sent`.
    pub fn wrote(&mut self, lease: Lease, sent: Boottime) {
        *self = match lease.over {
            true => Self::new(),
            false => Self::Notifier {
                lease,
                confirmed: sent,
            },
        };
    }

    /// This instance is the notifier, and no other can be.
    pub fn trusts(&self, now: Boottime) -> bool {
        self.until().is_some_and(|until| now < until)
    }

    /// How long it may count on that.
    pub fn until(&self) -> Option<Boottime> {
        match self {
            Self::Notifier { confirmed, .. } => Some(*confirmed + TRUST),
            Self::Follower { .. } => None,
        }
    }
}

impl Default for Role {
    fn default() -> Self {
        Self::new()
    }
}
