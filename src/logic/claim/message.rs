//! What instances ask the store about one job, what the store answers, and what it tells all instances.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::{Last, OnCrash, Open, Overlap};
use crate::model::{
    FencingToken, InstanceId, JobName, Occurrence, Outcome, Run, RunId, RunRecord, Trigger, Wait,
};

/// Which occurrence is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    Scheduled(Occurrence),
    /// A manual trigger. The store chooses its occurrence when it grants it: now, but after every decided one and
    /// before `before`, the first scheduled one that is not decided (which may have passed: it waits for its jitter, or
    /// in a queue), so that tokens keep growing and no scheduled one is lost.
    Manual {
        key: String,
        before: Option<Occurrence>,
    },
}

impl Target {
    /// The name of the target.
    pub fn id(&self) -> TargetId {
        match self {
            Self::Scheduled(at) => TargetId::Scheduled(*at),
            Self::Manual { key, .. } => TargetId::Manual(key.clone()),
        }
    }
}

/// The name of a [`Target`], without what may differ from claim to claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TargetId {
    Scheduled(Occurrence),
    /// The key of a manual trigger.
    Manual(String),
}

impl TargetId {
    /// A target of this name.
    pub fn target(&self) -> Target {
        match self {
            Self::Scheduled(at) => Target::Scheduled(*at),
            Self::Manual(key) => Target::Manual {
                key: key.clone(),
                before: None,
            },
        }
    }
}

/// Occurrences that nobody can start any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Missed {
    pub first: Occurrence,
    pub last: Occurrence,
    pub count: u64,
}

impl Missed {
    pub fn one(at: Occurrence) -> Self {
        Self {
            first: at,
            last: at,
            count: 1,
        }
    }
}

/// A [`Claim::start_by`]: overdue, and not to be caught up.
pub const NEVER: i64 = 0;
/// A [`Claim::start_by`]: its job was taken out of the configuration.
pub const REMOVED: i64 = -1;
/// A [`Claim::start_by`]: its time is over by the claimant's own clock, whatever the store's shows.
pub const PASSED: i64 = 1;
/// A [`Claim::start_by`]: as [`PASSED`], and the store's clock was in doubt at that time.
pub const PASSED_IN_DOUBT: i64 = 2;

/// Asks for the right to run one occurrence.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    pub job: JobName,
    pub target: Target,
    /// The newest occurrence that this instance knows to be decided. The instance remembers it through a loss of the
    /// store's data.
    pub known: Occurrence,
    /// Every occurrence between `known` and the target that is given up.
    pub missed: Vec<Missed>,
    /// Also the claim's nonce.
    pub run: RunId,
    pub instance: InstanceId,
    pub host: String,
    pub trigger: Trigger,
    /// The last moment for a start; [`NEVER`], [`REMOVED`]: do not start, only record as missed.
    pub start_by: i64,
    pub lease: i64,
    pub overlap: Overlap,
    pub on_crash: OnCrash,
    pub max_attempts: u32,
    pub definition: String,
    /// The claimant saw this lease unchanged for its whole length.
    pub observed: Option<Observed>,
    /// Runs of this job that go on at the claimant.
    pub holds: Vec<RunId>,
    /// What kept the target, and what is given up with it, from a start in time, as far as the claimant knows.
    pub cause: Option<Wait>,
}

impl Claim {
    pub(super) fn is_manual(&self) -> bool {
        matches!(self.target, Target::Manual { .. })
    }

    /// The run that the claim was granted, at `granted_at`.
    pub fn run(&self, grant: Grant, granted_at: i64) -> Run {
        Run {
            id: self.run,
            occurrence: grant.occurrence,
            attempt: grant.attempt,
            trigger: grant.trigger,
            key: match &self.target {
                Target::Scheduled(_) => None,
                Target::Manual { key, .. } => Some(key.clone()),
            },
            instance: self.instance.clone(),
            host: self.host.clone(),
            lease: self.lease,
            definition: self.definition.clone(),
            granted_at,
        }
    }
}

/// What identifies one state of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Observed {
    pub run: RunId,
    pub seq: u32,
    pub incarnation: String,
}

#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub enum Answer {
    /// Ours. Also the answer to the same claim asked again, which renews the lease too.
    Granted(Grant),
    /// This occurrence runs elsewhere; watch it.
    Running(Open),
    /// Another occurrence of the job is still running, and this one has to wait for it.
    Blocked(Open),
    /// Decided, and over; with its run, if that is the run that ended last.
    Settled(Option<Last>),
    /// Still in the future of the store's clock, by so many microseconds.
    Early { wait_us: i64 },
    /// An attempt is awaited whose time has not come yet: the next one of this occurrence, or of one before it.
    Later { wait_ms: i64 },
    /// An earlier occurrence has to be run again first.
    RunFirst(Occurrence),
    /// Decided by this claim, without a run.
    Recorded { outcome: Outcome, reason: String },
    /// Some of a range that the claim gives up is decided: everything up to `newest`, and those that ran `early`.
    /// Nothing was done. Only the claimant, who knows the schedule, can tell what is left of the range.
    Behind {
        newest: Occurrence,
        early: Vec<Occurrence>,
    },
    /// The store's state is from another incarnation: nothing is granted until it was adopted.
    Quarantined,
    /// The store knows nothing of this job: new, or lost.
    Absent,
    /// The store's clock is not where the caller believes it to be: nothing is decided. Not this module but the stores
    /// answer this, see [`crate::logic::belief::in_doubt`].
    InDoubt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    pub occurrence: Occurrence,
    pub attempt: u32,
    pub trigger: Trigger,
}

impl Grant {
    pub fn token(&self) -> FencingToken {
        self.occurrence.token(self.attempt)
    }
}

/// What the store has to do in the same transaction.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Effects {
    /// For the history.
    pub records: Vec<RunRecord>,
    /// Which of `records` go on with one that the history has.
    pub joined: Vec<Joined>,
    /// For the instances that listen.
    pub events: Vec<Event>,
}

/// The record of `at` says, of more occurrences, what the history says of those up to `before`, and none lies between:
/// if the history still has that record, the new one takes its place, and counts its occurrences, too.
#[derive(Debug, Clone, PartialEq)]
pub struct Joined {
    pub job: JobName,
    pub before: Occurrence,
    pub at: Occurrence,
    /// What both say.
    pub why: String,
}

impl Joined {
    /// `old` is the record to be replaced.
    pub fn replaces(&self, old: &RunRecord) -> bool {
        old.occurrence == self.before && old.attempt == 0 && old.error.as_ref() == Some(&self.why)
    }
}

impl Effects {
    /// What the history has to have before `record`, which is one of `records`, so that `record` takes its place.
    pub fn joined(&self, record: &RunRecord) -> Option<&Joined> {
        let of = |j: &&Joined| j.job == record.job && j.at == record.occurrence;
        let mut joined = self.joined.iter().filter(of);
        joined.find(|j| record.attempt == 0 && record.error.as_ref() == Some(&j.why))
    }
    /// Puts `record`, which is one of `records`, into its job's history, newest first.
    pub fn put(&self, mut record: RunRecord, history: &mut VecDeque<RunRecord>) {
        if let Some(joined) = self.joined(&record)
            && let Some(old) = (history.iter().position(|old| joined.replaces(old)))
                .and_then(|i| history.remove(i))
        {
            record.count = record.count.saturating_add(old.count);
        }
        history.push_front(record);
    }
}

/// A hint to all instances. It may get lost; nothing depends on it but speed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// An open occurrence that somebody waited for has ended.
    Ended { job: JobName },
    /// An occurrence waits for its next attempt.
    AttemptAwaited {
        job: JobName,
        occurrence: Occurrence,
    },
    /// The holder of the job's run is to look for a stop request.
    Stop { job: JobName },
    /// A manual trigger was put in, at `at` (Unix ms of the store's clock; 0: an older version does not say).
    Triggered {
        job: JobName,
        key: String,
        #[serde(default)]
        at: i64,
    },
    /// A pause, a skip or the watermark was changed by hand: every instance is to look, and to remember.
    Controlled { job: JobName },
    /// Drain requests changed.
    Drain,
    /// Never sent: the listener may have lost hints before this, because its connection for them is a new one.
    Gap,
    /// A lock of the library was released.
    Unlocked { lock: String, owner: String },
}

impl Event {
    pub fn job(&self) -> Option<&JobName> {
        match self {
            Self::Ended { job }
            | Self::AttemptAwaited { job, .. }
            | Self::Stop { job }
            | Self::Triggered { job, .. }
            | Self::Controlled { job } => Some(job),
            Self::Drain | Self::Gap | Self::Unlocked { .. } => None,
        }
    }
}
