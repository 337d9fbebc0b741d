//! What the store keeps of one job.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{AFTER_LOSS, Answer, Claim, Grant, Missed, Observed, PAUSED, PAUSED_WAIT_MS, REMOVED};
use crate::model::{
    InstanceId, JobName, Occurrence, Outcome, Run, RunId, RunRecord, Trigger, ms, ms_or_none,
};

/// What becomes of an occurrence that is due while a run of the same job goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub enum Overlap {
    /// It is recorded as skipped.
    Skip,
    /// It waits until the run has ended, within `start_within`.
    Queue,
    /// It ends the run and takes its place.
    Replace,
    /// It runs beside it.
    Allow,
}

impl Overlap {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Queue => "queue",
            Self::Replace => "replace",
            Self::Allow => "allow",
        }
    }
}

/// What becomes of an occurrence whose holder died.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub enum OnCrash {
    /// At most once: recorded, not run again.
    Fail,
    /// At least once: another instance makes the next attempt.
    Rerun,
}

/// What the store keeps of one job. Has no expiry. Empty fields are not written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    /// The incarnation of the store (its replication id, see lua/lib.lua) in which this state was last confirmed.
    pub incarnation: String,
    /// Digest of the schedule that was registered last.
    pub schedule: String,
    /// Digest of the definition that was registered last.
    pub definition: String,
    /// Occurrences up to here are not owed: the job, or this schedule of it, did not exist yet.
    #[serde(deserialize_with = "ms")]
    pub since: i64,
    /// The newest decided occurrence; 0: none.
    #[serde(deserialize_with = "ms")]
    pub newest: i64,
    /// The store lost what it knew of the job, and an instance that knew nothing of it began it anew: which of the
    /// occurrences up to here ran, nobody knows. 0: nothing was lost, or newer ones are decided since.
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "ms")]
    pub lost_before: i64,
    /// The state was adopted then, after a loss of the store's data. What was planned up to here and came to no run was
    /// kept back by that loss. 0: nothing was lost, or all that was planned until then is decided.
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "ms")]
    pub lost_until: i64,
    /// The error of the records of what was kept back so, with that time. Empty: nothing was, or an older version
    /// adopted the state.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub lost_why: String,
    /// The store knew nothing of the job before, nor did an instance: what was planned up to `lost_until` does not run,
    /// because it may have run in data that nobody remembers; it is recorded as skipped.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub first_wait: bool,
    /// Decided occurrences that have not ended. More than one only with [`Overlap::Allow`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub open: Vec<Open>,
    /// The run that ended last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<Last>,
    /// The entry of the run that was found dead last and got no further attempt: its guard may still say that the
    /// command was never executed, and `settle` then plans one. It counts while `last` is of that run. In a box,
    /// because nearly all states have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lapsed: Option<Box<Open>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<Pause>,
    /// When a pause was ended last; see [`Remembered`](super::Remembered).
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "ms")]
    pub resumed: i64,
    /// So many coming occurrences are to be skipped.
    pub skip: u32,
    /// When that was asked for.
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "ms")]
    pub skip_at: i64,
    /// Since then no instance has the job, or all have it disabled; 0: some instance has it. What would have been
    /// planned meanwhile is not owed.
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "ms")]
    pub off: i64,
    /// Occurrences after `newest` that ran all the same, before their time: [`Control::Rewind`](super::Control::Rewind)
    /// put `newest` back.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub early: Vec<Occurrence>,
    /// Manual triggers that nobody has claimed yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub triggers: Vec<Pending>,
    /// Manual triggers that were decided, oldest first: the same key is not run again. Kept for [`KEYS_KEPT_MS`], and
    /// those with a key of soloist's own for [`OWN_KEYS_KEPT_MS`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub triggered: Vec<Triggered>,
    /// An instance waits for the open run to end, and is to be told.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub waiting: bool,
    /// Who asked for `skip`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip_by: Option<String>,
    /// Who ended a pause last, or wanted to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed_by: Option<String>,
    /// Who put the watermark back last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rewound_by: Option<String>,
}

/// How long the key of a trigger is remembered after it was decided, by the store's clock, in ms: 7 days.
pub const KEYS_KEPT_MS: i64 = 7 * 24 * 3_600_000;
/// How long a key that soloist made up is remembered: long enough for the caller to learn which run it became, and for
/// a request that is repeated because its answer was lost.
pub const OWN_KEYS_KEPT_MS: i64 = 600_000;
/// The most keys of one job that are remembered or wait. A trigger with one more is refused: a forgotten key could run
/// twice.
pub const KEYS_MOST: usize = 10_000;
/// The most keys of soloist's own that are remembered beyond their run.
pub const OWN_KEYS_MOST: usize = 1000;
/// How a key begins that soloist made up, for a trigger without a key. People's keys do not begin like this.
pub const OWN_KEY: char = '~';

pub(super) fn own_key(key: &str) -> bool {
    key.starts_with(OWN_KEY)
}

fn is_zero(n: &i64) -> bool {
    *n == 0
}

/// A decided occurrence that has not ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Open {
    /// While the next attempt is awaited: the run of the attempt before.
    #[serde(flatten)]
    pub run: Run,
    /// Changes with every renewal.
    pub seq: u32,
    pub incarnation: String,
    #[serde(deserialize_with = "ms")]
    pub renewed_at: i64,
    /// The holder is asked to end the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<StopRequest>,
    /// Set: nobody holds the occurrence, and its next attempt may start from then on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_attempt: Option<NextAttempt>,
    /// Who triggered it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Who cancelled it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<String>,
}

#[cfg(test)]
impl Open {
    /// [`Run::first`], which was not renewed yet.
    pub(crate) fn first(at: i64) -> Self {
        Self::new(Run::first(at), 0, "i", at)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopRequest {
    Cancelled,
    Replaced,
}

/// The attempt that follows, as the store has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextAttempt {
    /// Unix ms of the store's clock: not before.
    #[serde(deserialize_with = "ms")]
    pub at: i64,
    /// [`Trigger::Retry`] or [`Trigger::Takeover`].
    pub trigger: Trigger,
}

/// The run that ended last: from when to when the job was busy, and how it ended, as the history says it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Last {
    pub occurrence: Occurrence,
    pub attempt: u32,
    pub run: RunId,
    pub instance: InstanceId,
    pub outcome: Outcome,
    #[serde(deserialize_with = "ms")]
    pub from: i64,
    /// When its command was started, which is later than `from`; None: it never was, nobody knows, or an older version
    /// wrote this.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "ms_or_none"
    )]
    pub started: Option<i64>,
    #[serde(deserialize_with = "ms")]
    pub to: i64,
    /// When it ended, if not at `to`: that of a run whose end nobody saw is when it was found dead.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "ms_or_none"
    )]
    pub ended: Option<i64>,
}

impl Last {
    /// When it ended, as the history says it.
    pub fn ended(&self) -> i64 {
        self.ended.unwrap_or(self.to)
    }

    pub(super) fn ended_at(&mut self, ended: i64) {
        self.ended = (ended != self.to).then_some(ended);
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pause {
    /// None: until resumed.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "ms_or_none"
    )]
    pub until: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    #[serde(deserialize_with = "ms")]
    pub at: i64,
}

/// Who asked; None: nobody, or nobody knows.
pub(super) type By = Option<String>;

/// How an occurrence is recorded that something kept from running: the outcome, why, and who asked for that.
pub(super) type Kept = (Outcome, String, By);

impl Pause {
    /// The range was planned while the pause lasted.
    fn covers(&self, m: &Missed) -> bool {
        self.at <= m.first.0 && self.until.is_none_or(|until| m.last.0 < until)
    }
    /// What it keeps from running.
    pub(super) fn kept(&self) -> Kept {
        let reason = self.reason.as_ref();
        let reason = reason.map_or(String::new(), |r| format!(": {r}"));
        let why = format!("{PAUSED}{reason}");
        (Outcome::Skipped, why, self.by.clone())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    pub key: String,
    #[serde(deserialize_with = "ms")]
    pub at: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Triggered {
    pub key: String,
    pub occurrence: Occurrence,
    /// When it was decided.
    #[serde(default, deserialize_with = "ms")]
    pub at: i64,
}

/// Whether nobody may start a trigger any more that was put in at `since`. `within`: the job's `start_within`.
pub fn trigger_is_over(since: i64, within: Duration, now: i64) -> bool {
    since.saturating_add(i64::try_from(within.as_millis()).unwrap_or(i64::MAX)) < now
}

/// Forgets the keys whose time is over.
pub fn forget_keys(triggered: &mut Vec<Triggered>, now: i64) {
    let own = triggered.iter().filter(|t| own_key(&t.key)).count();
    let mut excess = own.saturating_sub(OWN_KEYS_MOST);
    triggered.retain(|t| {
        if !own_key(&t.key) {
            return now - t.at < KEYS_KEPT_MS;
        }
        let keep = excess == 0 && now - t.at < OWN_KEYS_KEPT_MS;
        excess = excess.saturating_sub(1);
        keep
    });
}

impl State {
    /// The open entry that is held by `run`.
    pub fn held_by(&self, run: RunId) -> Option<&Open> {
        self.open
            .iter()
            .find(|o| o.run.id == run && o.next_attempt.is_none())
    }
    /// Why the range does not run, and how that is recorded: the loss of the store's data kept it (or its begin) from
    /// running, or the job was paused. None: neither.
    pub(super) fn why_late(&self, c: &Claim, m: &Missed) -> Option<Kept> {
        if c.start_by == REMOVED {
            return None;
        }
        if m.first.0 <= self.lost_until && m.last.0 > self.lost_before {
            return Some(self.kept_back());
        }
        Some(self.pause.as_ref().filter(|p| p.covers(m))?.kept())
    }
    /// What the loss of the store's data kept from running.
    pub(super) fn kept_back(&self) -> Kept {
        // Nothing was expected of a store that is new: to wait for it is no fault.
        let outcome = match self.first_wait {
            true => Outcome::Skipped,
            false => Outcome::Missed,
        };
        (outcome, self.why_kept_back().to_owned(), None)
    }
    /// Why that range did not run.
    pub fn why_kept_back(&self) -> &str {
        match self.lost_why.as_str() {
            "" => AFTER_LOSS,
            why => why,
        }
    }
    /// The wait is over, or was dated by a wrong clock.
    pub(super) fn forget_loss(&mut self) {
        (self.lost_until, self.first_wait) = (0, false);
        self.lost_why.clear();
    }
    /// Some of the range is decided, and some is not.
    pub(super) fn decided_in(&self, m: &Missed) -> bool {
        let early = || self.early.iter().any(|at| m.first <= *at && *at <= m.last);
        m.last.0 > self.newest && (m.first.0 <= self.newest || early())
    }
    /// A trigger with this key was put in before: it waits, or is decided, and its key is remembered.
    pub fn knows_key(&self, key: &str) -> bool {
        self.waits_since(key).is_some() || self.triggered.iter().any(|t| t.key == key)
    }
    /// When the trigger with this key was put in, if it waits.
    pub fn waits_since(&self, key: &str) -> Option<i64> {
        Some(self.triggers.iter().find(|t| t.key == key)?.at)
    }
    /// A trigger is decided, at `now`. Returns who put it in. Old keys are forgotten when the next one is put in.
    pub(super) fn remember_trigger(&mut self, key: &str, at: Occurrence, now: i64) -> By {
        let waited = self.triggers.iter().find(|t| t.key == key);
        let by = waited.and_then(|t| t.by.clone());
        self.triggers.retain(|t| t.key != key);
        self.triggered.push(Triggered {
            key: key.to_owned(),
            occurrence: at,
            at: now,
        });
        by
    }
    /// The job is paused: for so many milliseconds more, or until somebody resumes it.
    pub(super) fn paused(&self, now: i64) -> Option<Option<i64>> {
        let pause = self.pause.as_ref();
        let pause = pause.filter(|p| p.until.is_none_or(|until| now < until));
        pause.map(|p| p.until.map(|until| until - now))
    }
    /// The answer for an attempt that may not start before the job's pause is over.
    pub(super) fn until_resumed(&self, now: i64) -> Option<Answer> {
        self.paused(now).map(|left| Answer::Later {
            wait_ms: left.unwrap_or(PAUSED_WAIT_MS),
        })
    }
}

impl Open {
    pub(super) fn granted(
        c: &Claim,
        g: Grant,
        (key, by): (Option<String>, By),
        now: i64,
        incarnation: &str,
    ) -> Self {
        // A further attempt keeps the key of its trigger, whichever instance claims it.
        let run = Run {
            key,
            ..c.run(g, now)
        };
        Self {
            by,
            ..Self::new(run, 0, incarnation, now)
        }
    }
    pub(super) fn new(run: Run, seq: u32, incarnation: &str, now: i64) -> Self {
        Self {
            run,
            seq,
            incarnation: incarnation.to_owned(),
            renewed_at: now,
            stop: None,
            next_attempt: None,
            by: None,
            stopped_by: None,
        }
    }
    pub(super) fn is(&self, observed: Option<&Observed>) -> bool {
        observed.is_some_and(|o| {
            o.run == self.run.id && o.seq == self.seq && o.incarnation == self.incarnation
        })
    }
    pub(super) fn grant(&self) -> Grant {
        Grant {
            occurrence: self.run.occurrence,
            attempt: self.run.attempt,
            trigger: self.run.trigger,
        }
    }
    /// The record of this attempt, ended at `now`.
    pub(super) fn record(
        &self,
        job: &JobName,
        outcome: Outcome,
        now: i64,
        error: &str,
    ) -> RunRecord {
        RunRecord {
            outcome,
            error: Some(error.to_owned()),
            by: self.by.clone(),
            ..RunRecord::of(job, &self.run).lasting(Some(self.run.granted_at), Some(now))
        }
    }
}
