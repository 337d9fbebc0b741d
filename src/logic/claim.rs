//! State of one job + request -> answer. This is the reference for the Lua (compared on random sequences) and is
//! itself what SQLite and the in-memory store run.
//!
//! What decides once-per-occurrence is one register: `newest`, the newest decided occurrence, which only grows. An
//! occurrence at or before it was decided: it is open (running, or waiting for its next attempt) or it is settled.
//!
//! Times are Unix milliseconds of the store's clock unless they say `_us` (microseconds). The store's clock decides
//! *when* an occurrence is due and labels records. It never ends a lease: a lease ends when a contender has seen
//! the same (run, seq) for its whole length on the contender's own monotonic clock and the store still has it.

use serde::{Deserialize, Serialize};

use super::belief;
use crate::model::{
    FencingToken, InstanceId, JobName, LAST_MS, Occurrence, Outcome, RunId, RunRecord, Trigger, ms,
    ms_or_none,
};

/// What becomes of an occurrence that is due while a run of the same job goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
    /// The incarnation of the store (server run id) in which this state was last confirmed.
    pub inc: String,
    /// Digest of the schedule that was registered last.
    pub sched: String,
    /// Digest of the definition that was registered last.
    pub def: String,
    /// Occurrences up to here are not owed: the job, or this schedule of it, did not exist yet.
    #[serde(deserialize_with = "ms")]
    pub since: i64,
    /// The newest decided occurrence; 0: none.
    #[serde(deserialize_with = "ms")]
    pub newest: i64,
    /// Decided occurrences that have not ended. More than one only with [`Overlap::Allow`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub open: Vec<Open>,
    /// The run that ended last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<Last>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<Pause>,
    /// When a pause was ended last; see [`Told`].
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
    /// Occurrences after `newest` that ran all the same, before their time: [`Control::Rewind`] put `newest` back.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub early: Vec<Occurrence>,
    /// Manual triggers nobody has claimed yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub triggers: Vec<Pending>,
    /// Manual triggers that were decided, oldest first: the same key is not run again. Kept for [`KEYS_KEPT_MS`], and
    /// those with a key of soloist's own for [`OWN_KEYS_KEPT_MS`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub triggered: Vec<Triggered>,
    /// Somebody waits for the open run to end: tell when it does.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub waiting: bool,
}

/// How long the key of a trigger is remembered after it was decided, by the store's clock, in ms: 7 days.
pub const KEYS_KEPT_MS: i64 = 7 * 24 * 3_600_000;
/// How long a key that soloist made up is: long enough for whoever asked to learn which run it became, and for a
/// request that is repeated because its answer was lost.
pub const OWN_KEYS_KEPT_MS: i64 = 600_000;
/// Keys of one job that are remembered or wait. A trigger with one more is refused: to forget one would run it twice.
pub const KEYS_MOST: usize = 10_000;
/// Keys of soloist's own that are remembered beyond their run.
pub const OWN_KEYS_MOST: usize = 1000;
/// How a key of soloist's own begins, for a trigger that was given none. People's keys do not.
pub const OWN_KEY: char = '~';

fn own_key(key: &str) -> bool {
    key.starts_with(OWN_KEY)
}

fn is_zero(n: &i64) -> bool {
    *n == 0
}

/// A decided occurrence that has not ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Open {
    pub occurrence: Occurrence,
    pub attempt: u32,
    pub trigger: Trigger,
    /// Key of the manual trigger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The holder; of the attempt before while the next one is awaited.
    pub run: RunId,
    pub instance: InstanceId,
    pub host: String,
    /// Changes with every renewal.
    pub seq: u32,
    /// The lease's length.
    #[serde(deserialize_with = "ms")]
    pub lease: i64,
    /// The definition that runs.
    pub def: String,
    pub inc: String,
    #[serde(deserialize_with = "ms")]
    pub granted_at: i64,
    #[serde(deserialize_with = "ms")]
    pub renewed_at: i64,
    /// The holder is asked to end the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<Stop>,
    /// Set: nobody holds it, the next attempt may start from then on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<Again>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    Cancelled,
    Replaced,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Again {
    #[serde(deserialize_with = "ms")]
    pub at: i64,
    /// [`Trigger::Retry`] or [`Trigger::Takeover`].
    pub trigger: Trigger,
}

/// The run that ended last: from when to when the job was busy, and how it ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Last {
    pub occurrence: Occurrence,
    pub attempt: u32,
    pub run: RunId,
    pub instance: InstanceId,
    pub outcome: Outcome,
    #[serde(deserialize_with = "ms")]
    pub from: i64,
    #[serde(deserialize_with = "ms")]
    pub to: i64,
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
    #[serde(deserialize_with = "ms")]
    pub at: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    pub key: String,
    #[serde(deserialize_with = "ms")]
    pub at: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Triggered {
    pub key: String,
    pub occurrence: Occurrence,
    /// When it was decided.
    #[serde(default, deserialize_with = "ms")]
    pub at: i64,
}

/// Which occurrence is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    Scheduled(Occurrence),
    /// A manual trigger. Its occurrence is given by the store when it is granted: now, but after every decided one
    /// and before `before`, the first scheduled one that is not decided (which may have passed: it waits for its
    /// jitter, or in a queue), so that tokens keep growing and no scheduled one is lost.
    Manual {
        key: String,
        before: Option<Occurrence>,
    },
}

impl Target {
    /// What names it, however it is asked for.
    pub fn id(&self) -> TargetId {
        match self {
            Self::Scheduled(at) => TargetId::Scheduled(*at),
            Self::Manual { key, .. } => TargetId::Manual(key.clone()),
        }
    }
}

/// What names a [`Target`]: without what those who ask for it may see differently.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TargetId {
    Scheduled(Occurrence),
    /// The key of a manual trigger.
    Manual(String),
}

/// Occurrences that nobody can start any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The newest occurrence that this instance knows to be decided. A record that survives a loss of the store's.
    pub known: Occurrence,
    /// Every occurrence between `known` and the target that is given up.
    pub missed: Vec<Missed>,
    /// The nonce too.
    pub run: RunId,
    pub instance: InstanceId,
    pub host: String,
    pub trigger: Trigger,
    /// Not later than this; [`NEVER`], [`REMOVED`]: not at all, it is only to be recorded as missed.
    pub start_by: i64,
    pub lease: i64,
    pub overlap: Overlap,
    pub on_crash: OnCrash,
    pub max_attempts: u32,
    pub def: String,
    /// This lease was seen unchanged for its whole length.
    pub observed: Option<Observed>,
    /// Runs of this job that go on at the claimant.
    pub holds: Vec<RunId>,
}

/// What identifies one state of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    pub run: RunId,
    pub seq: u32,
    pub inc: String,
}

#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub enum Answer {
    /// Ours. Also the answer to the same claim asked again, which renews the lease too.
    Granted(Grant),
    /// This occurrence runs elsewhere; watch it.
    Taken(Open),
    /// Another occurrence of the job is still running, and this one has to wait for it.
    Held(Open),
    /// Decided, and over; by whom, when it is the run that ended last.
    Settled(Option<Last>),
    /// Still in the future of the store's clock, by so many microseconds.
    Early { wait_us: i64 },
    /// An attempt is awaited, and its time is not there yet: the next one of this occurrence, or of one before it.
    Later { wait_ms: i64 },
    /// An earlier occurrence has to be run again first.
    RunFirst(Occurrence),
    /// Decided by this claim, without a run.
    Recorded { outcome: Outcome, reason: String },
    /// Some of a range that the claim gives up is decided: everything up to `newest`, and those that ran `early`. Nothing
    /// was done. Only the claimant, who knows the schedule, can tell what is left of the range.
    Behind {
        newest: Occurrence,
        early: Vec<Occurrence>,
    },
    /// The store's state is from another incarnation: nothing is granted until it was adopted.
    Quarantined,
    /// The store knows nothing of this job: new, or lost.
    Absent,
    /// The store's clock is not where the caller believes it to be: nothing is decided. Not of this module: the stores
    /// give it, see [`crate::logic::belief::in_doubt`].
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

/// What a step leaves to be done in the same transaction.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Effects {
    /// For the history.
    pub records: Vec<RunRecord>,
    /// For whoever listens.
    pub events: Vec<Event>,
}

/// A hint to all instances. It may get lost; nothing depends on it but speed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// An open occurrence has ended and somebody waited for it.
    Ended { job: JobName },
    /// An occurrence waits for its next attempt.
    Again {
        job: JobName,
        occurrence: Occurrence,
    },
    /// Its holder is to look for a stop request.
    Stop { job: JobName },
    /// A manual trigger was put in.
    Triggered { job: JobName, key: String },
    /// A pause, a skip or the register was changed by hand: every instance is to look, and to remember.
    Controlled { job: JobName },
    /// Drain requests changed.
    Drain,
    /// Never sent: whoever listens may have lost hints before this, because the connection for them is a new one.
    Gap,
    /// A lock of the library was given back.
    Unlocked { lock: String, owner: String },
}

impl Event {
    pub fn job(&self) -> Option<&JobName> {
        match self {
            Self::Ended { job }
            | Self::Again { job, .. }
            | Self::Stop { job }
            | Self::Triggered { job, .. }
            | Self::Controlled { job } => Some(job),
            Self::Drain | Self::Gap | Self::Unlocked { .. } => None,
        }
    }
}

impl State {
    /// The open entry that is held by `run`.
    pub fn held_by(&self, run: RunId) -> Option<&Open> {
        self.open.iter().find(|o| o.run == run && o.again.is_none())
    }
    /// Some of the range is decided, and some is not.
    fn decided_in(&self, m: &Missed) -> bool {
        let early = || self.early.iter().any(|at| m.first <= *at && *at <= m.last);
        m.last.0 > self.newest && (m.first.0 <= self.newest || early())
    }
    /// A trigger is decided, at `now`. Old ones are forgotten when the next is put in.
    fn remember_trigger(&mut self, key: &str, occurrence: Occurrence, now: i64) {
        self.triggers.retain(|t| t.key != key);
        self.triggered.push(Triggered {
            key: key.to_owned(),
            occurrence,
            at: now,
        });
    }
    fn forget_triggers(&mut self, now: i64) {
        let own = self.triggered.iter().filter(|t| own_key(&t.key)).count();
        let mut excess = own.saturating_sub(OWN_KEYS_MOST);
        self.triggered.retain(|t| {
            if !own_key(&t.key) {
                return now - t.at < KEYS_KEPT_MS;
            }
            let keep = excess == 0 && now - t.at < OWN_KEYS_KEPT_MS;
            excess = excess.saturating_sub(1);
            keep
        });
    }
    /// The job is paused: for so many milliseconds more, or until somebody resumes it.
    fn paused(&self, now: i64) -> Option<Option<i64>> {
        let pause = self.pause.as_ref();
        let pause = pause.filter(|p| p.until.is_none_or(|until| now < until));
        pause.map(|p| p.until.map(|until| until - now))
    }
    /// The answer for an attempt that may not start before the job's pause is over.
    fn until_resumed(&self, now: i64) -> Option<Answer> {
        self.paused(now).map(|left| Answer::Later {
            wait_ms: left.unwrap_or(PAUSED_WAIT_MS),
        })
    }
}

impl Open {
    fn granted(c: &Claim, g: Grant, key: Option<String>, now: i64, inc: &str) -> Self {
        Self {
            occurrence: g.occurrence,
            attempt: g.attempt,
            trigger: g.trigger,
            key,
            run: c.run,
            instance: c.instance.clone(),
            host: c.host.clone(),
            seq: 0,
            lease: c.lease,
            def: c.def.clone(),
            inc: inc.to_owned(),
            granted_at: now,
            renewed_at: now,
            stop: None,
            again: None,
        }
    }
    fn is(&self, observed: Option<&Observed>) -> bool {
        observed.is_some_and(|o| o.run == self.run && o.seq == self.seq && o.inc == self.inc)
    }
    fn grant(&self) -> Grant {
        Grant {
            occurrence: self.occurrence,
            attempt: self.attempt,
            trigger: self.trigger,
        }
    }
    /// The record of this attempt, ended at `now`.
    fn record(&self, job: &JobName, outcome: Outcome, now: i64, error: &str) -> RunRecord {
        RunRecord {
            run_id: Some(self.run),
            job: job.clone(),
            occurrence: self.occurrence,
            trigger: self.trigger,
            attempt: self.attempt,
            fencing_token: Some(self.occurrence.token(self.attempt)),
            instance: Some(self.instance.clone()),
            host: Some(self.host.clone()),
            started_at: Some(self.granted_at),
            finished_at: Some(now),
            lateness_ms: Some(self.granted_at - self.occurrence.0),
            duration_ms: Some(now - self.granted_at),
            outcome,
            exit_code: None,
            signal: None,
            output_tail: String::new(),
            output_truncated: false,
            error: Some(error.to_owned()),
            count: 1,
        }
    }
}

/// The record of an occurrence, or of `count` of them, that no run was made for.
fn not_run(
    claim: &Claim,
    occurrence: Occurrence,
    outcome: Outcome,
    count: u64,
    error: &str,
) -> RunRecord {
    RunRecord {
        run_id: None,
        job: claim.job.clone(),
        occurrence,
        trigger: claim.trigger,
        attempt: 0,
        fencing_token: None,
        instance: Some(claim.instance.clone()),
        host: Some(claim.host.clone()),
        started_at: None,
        finished_at: None,
        lateness_ms: None,
        duration_ms: None,
        outcome,
        exit_code: None,
        signal: None,
        output_tail: String::new(),
        output_truncated: false,
        error: Some(error.to_owned()),
        count,
    }
}

pub const LAPSED: &str = "its host vanished: the lease was not renewed for its whole length";
pub const TOO_LATE: &str = "nobody could start it within start_within";
pub const IN_DOUBT: &str =
    "nobody could start it within start_within: the store's clock was wrong, and not believed";
pub const OVERDUE: &str = "overdue, and not caught up";
pub const JOB_REMOVED: &str = "the job was removed from the configuration before it was started";
pub const OVERLAPS: &str = "the run before was still going on";
pub const PAUSED: &str = "paused";
/// When to ask again for an attempt of a job that is paused until somebody resumes it.
const PAUSED_WAIT_MS: i64 = 30_000;
pub const SKIPPED: &str = "skipped by request";

/// Decides one claim. `now_us` is the store's clock, `inc` its present incarnation.
///
/// Promises: attempt `n` of an occurrence is granted to one run, ever; attempts of one job overlap only with
/// [`Overlap::Allow`]; tokens of granted attempts strictly increase, but for [`Overlap::Allow`].
pub fn claim(
    state: &mut Option<State>,
    c: &Claim,
    now_us: i64,
    inc: &str,
    fx: &mut Effects,
) -> Answer {
    let Some(st) = state.as_mut() else {
        return Answer::Absent;
    };
    let now = now_us.div_euclid(1000);
    know(st, c.known, now);
    if st.inc != inc {
        return Answer::Quarantined;
    }
    let open = st.open.iter().position(|o| match &c.target {
        Target::Scheduled(at) => o.occurrence == *at,
        Target::Manual { key, .. } => o.key.as_ref() == Some(key),
    });
    if let Some(i) = open {
        return claim_open(st, i, c, now, inc, fx);
    }
    let late = match c.start_by {
        PASSED_IN_DOUBT => IN_DOUBT,
        _ => TOO_LATE,
    };
    let at = match &c.target {
        Target::Scheduled(at) => {
            if at.0 <= st.newest {
                return Answer::Settled(st.last.clone().filter(|l| l.occurrence == *at));
            }
            if now_us < at.0 * 1000 {
                return Answer::Early {
                    wait_us: at.0 * 1000 - now_us,
                };
            }
            // Somebody has the job, and it is enabled.
            st.off = 0;
            *at
        }
        Target::Manual { key, before } => {
            if !st.triggers.iter().any(|t| t.key == *key) {
                let at = st
                    .triggered
                    .iter()
                    .find(|t| t.key == *key)
                    .map(|t| t.occurrence);
                return Answer::Settled(st.last.clone().filter(|l| Some(l.occurrence) == at));
            }
            // Where `before` has passed and is not decided, there must be room for more than one trigger.
            let at = match before {
                Some(b) if b.0 <= now => (st.newest + 1).max(b.0 - 1000),
                _ => now,
            };
            if at <= st.newest || before.is_some_and(|b| at >= b.0) {
                if now > c.start_by {
                    // To be recorded it needs no room, only an instant that is no scheduled one.
                    let at = Occurrence(if now % 1000 == 0 { now + 1 } else { now });
                    return not_started(st, c, at, now, Outcome::Missed, late.to_owned(), fx);
                }
                // Where the clock stands behind what is decided, there is room when it has come that far.
                let room_us = (st.newest + 1) * 1000 - now_us;
                let wait_us = if at <= st.newest { room_us } else { 1000 };
                return Answer::Early { wait_us };
            }
            Occurrence(at)
        }
    };
    let never = match c.start_by {
        REMOVED => JOB_REMOVED,
        _ => OVERDUE,
    };
    if c.missed.iter().any(|m| m.last < at && st.decided_in(m)) {
        return Answer::Behind {
            newest: Occurrence(st.newest),
            early: st.early.clone(),
        };
    }
    for m in c.missed.iter().filter(|m| m.last < at) {
        if m.last.0 > st.newest {
            st.newest = m.last.0;
            fx.records
                .push(not_run(c, m.last, Outcome::Missed, m.count, never));
        }
    }
    let manual = matches!(c.target, Target::Manual { .. });
    let ran = !manual && st.early.contains(&at);
    if ran {
        st.newest = at.0;
    }
    st.early.retain(|e| e.0 > st.newest);
    if ran {
        return Answer::Settled(st.last.clone().filter(|l| l.occurrence == at));
    }
    if !manual && let Some(p) = &st.pause {
        if p.until.is_none_or(|until| now < until) {
            let reason = p
                .reason
                .as_ref()
                .map_or_else(|| PAUSED.to_owned(), |r| format!("{PAUSED}: {r}"));
            return decide(st, c, at, now, Outcome::Skipped, reason, fx);
        }
        st.pause = None;
    }
    if !manual && st.skip > 0 {
        st.skip -= 1;
        fx.events.push(Event::Controlled { job: c.job.clone() });
        return decide(st, c, at, now, Outcome::Skipped, SKIPPED.to_owned(), fx);
    }
    if now > c.start_by {
        let reason = if c.start_by <= NEVER { never } else { late };
        return decide(st, c, at, now, Outcome::Missed, reason.to_owned(), fx);
    }
    let until_resumed = st.until_resumed(now);
    if c.overlap != Overlap::Allow {
        if !manual
            && c.overlap == Overlap::Skip
            && st
                .last
                .as_ref()
                .is_some_and(|l| l.from <= at.0 && at.0 < l.to)
        {
            return decide(st, c, at, now, Outcome::Skipped, OVERLAPS.to_owned(), fx);
        }
        if let Some(e) = st.open.first()
            && e.again.is_none()
            && e.is(c.observed.as_ref())
        {
            lapse(st, 0, c, now, fx);
        }
        // More than one only where the policy was Allow before.
        while let Some(e) = st.open.first_mut() {
            match e.again {
                Some(again) if again.trigger == Trigger::Takeover => {
                    return until_resumed.unwrap_or(Answer::RunFirst(e.occurrence));
                }
                Some(again) if c.overlap == Overlap::Queue => {
                    if now >= again.at {
                        return until_resumed.unwrap_or(Answer::RunFirst(e.occurrence));
                    }
                    return Answer::Later {
                        wait_ms: again.at - now,
                    };
                }
                // A pending retry gives way to a newer occurrence: its attempt would carry an older token.
                Some(_) => {
                    st.open.remove(0);
                }
                None => {
                    // Proof that the run was going on when this occurrence was due. Without it the run before may be
                    // dead, and skipping for a dead run's sake would lose this one; or it is overdue itself, and
                    // only began later.
                    let alive =
                        e.granted_at <= at.0 && (e.renewed_at >= at.0 || c.holds.contains(&e.run));
                    if !manual && c.overlap == Overlap::Skip && alive {
                        return decide(st, c, at, now, Outcome::Skipped, OVERLAPS.to_owned(), fx);
                    }
                    if c.overlap == Overlap::Replace && e.stop.is_none() {
                        e.stop = Some(Stop::Replaced);
                        fx.events.push(Event::Stop { job: c.job.clone() });
                    }
                    let e = e.clone();
                    st.waiting = true;
                    return Answer::Held(e);
                }
            }
        }
    }
    let key = match &c.target {
        Target::Manual { key, .. } => {
            st.remember_trigger(key, at, now);
            Some(key.clone())
        }
        Target::Scheduled(_) => None,
    };
    st.newest = at.0;
    let first = Grant {
        occurrence: at,
        attempt: 1,
        trigger: c.trigger,
    };
    let open = Open::granted(c, first, key, now, inc);
    let grant = open.grant();
    st.open.push(open);
    Answer::Granted(grant)
}

/// The register only grows: whatever anybody knows to be decided stays decided, also where a server that took over is some
/// seconds behind. What lies further in the future is no knowledge: it was learned by a clock that was wrong, and must not
/// come back after [`Control::Rewind`].
fn know(st: &mut State, known: Occurrence, now: i64) {
    if known.0 <= now + belief::NEAR.as_millis() as i64 {
        st.newest = st.newest.max(known.0);
    }
}

/// The occurrence asked for is open: ours already, somebody's, lapsed, or waiting for its next attempt.
fn claim_open(
    st: &mut State,
    i: usize,
    c: &Claim,
    now: i64,
    inc: &str,
    fx: &mut Effects,
) -> Answer {
    if st.open[i].again.is_none() {
        let e = &mut st.open[i];
        if e.run == c.run {
            // Asked again after a lost reply: the claimant counts its trust from this request, so whoever watches
            // has to begin anew.
            e.seq = e.seq.saturating_add(1);
            e.renewed_at = now;
            return Answer::Granted(e.grant());
        }
        if !st.open[i].is(c.observed.as_ref()) {
            return Answer::Taken(st.open[i].clone());
        }
        if !lapse(st, i, c, now, fx) {
            return Answer::Recorded {
                outcome: Outcome::Unknown,
                reason: LAPSED.to_owned(),
            };
        }
    }
    let e = &st.open[i];
    let Some(again) = e.again else {
        return Answer::Taken(e.clone());
    };
    // The run whose attempt just ended asks again after a lost reply: it has had its turn.
    if e.run == c.run {
        return Answer::Settled(None);
    }
    if now < again.at {
        return Answer::Later {
            wait_ms: again.at - now,
        };
    }
    if let Some(later) = st.until_resumed(now) {
        return later;
    }
    // Another one is held only where the policy was Allow before.
    let mut i = i;
    while c.overlap != Overlap::Allow
        && let Some(j) = st.open.iter().position(|o| o.again.is_none())
    {
        if !st.open[j].is(c.observed.as_ref()) {
            st.waiting = true;
            return Answer::Held(st.open[j].clone());
        }
        if !lapse(st, j, c, now, fx) && j < i {
            i -= 1;
        }
    }
    let e = &mut st.open[i];
    let next = Grant {
        occurrence: e.occurrence,
        attempt: e.attempt.saturating_add(1),
        trigger: again.trigger,
    };
    *e = Open::granted(c, next, e.key.take(), now, inc);
    Answer::Granted(e.grant())
}

/// The holder of open entry `i` is gone, nobody knows how its run ended. True: another attempt is due.
fn lapse(st: &mut State, i: usize, c: &Claim, now: i64, fx: &mut Effects) -> bool {
    let e = &mut st.open[i];
    fx.records
        .push(e.record(&c.job, Outcome::Unknown, now, LAPSED));
    // A run that nobody saw ending was busy as far as its last renewal shows, not until it was found dead.
    st.last = Some(last(e, Outcome::Unknown, e.renewed_at));
    if c.on_crash == OnCrash::Rerun && e.attempt < c.max_attempts && e.stop.is_none() {
        e.again = Some(Again {
            at: now,
            trigger: Trigger::Takeover,
        });
        true
    } else {
        st.open.remove(i);
        false
    }
}

fn last(e: &Open, outcome: Outcome, to: i64) -> Last {
    Last {
        occurrence: e.occurrence,
        attempt: e.attempt,
        run: e.run,
        instance: e.instance.clone(),
        outcome,
        from: e.granted_at,
        to,
    }
}

/// `at` is decided without a run.
fn decide(
    st: &mut State,
    c: &Claim,
    at: Occurrence,
    now: i64,
    outcome: Outcome,
    reason: String,
    fx: &mut Effects,
) -> Answer {
    st.newest = st.newest.max(at.0);
    not_started(st, c, at, now, outcome, reason, fx)
}

/// As [`decide`], but what is undecided before `at` stays so.
fn not_started(
    st: &mut State,
    c: &Claim,
    at: Occurrence,
    now: i64,
    outcome: Outcome,
    reason: String,
    fx: &mut Effects,
) -> Answer {
    if let Target::Manual { key, .. } = &c.target {
        st.remember_trigger(key, at, now);
    }
    fx.records.push(not_run(c, at, outcome, 1, &reason));
    Answer::Recorded { outcome, reason }
}

/// [`Register::sched`] and [`Register::def`] of a job that the library's electors have: no configuration knows it.
pub const LIBRARY: &str = "library";

/// Prolongs a lease. Carries all that is needed to reclaim it in a new incarnation of the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Renew {
    pub job: JobName,
    pub occurrence: Occurrence,
    pub attempt: u32,
    pub trigger: Trigger,
    pub key: Option<String>,
    pub run: RunId,
    pub instance: InstanceId,
    pub host: String,
    pub lease: i64,
    pub def: String,
    /// Counts the renewals sent for this run, from 1.
    pub seq: u32,
    pub granted_at: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Renewal {
    /// Still ours; with a request to end the run, if there is one.
    Renewed(Option<Stop>),
    /// Another has it, or it was ended: stop at once.
    Lost,
}

/// Prolongs the lease of exactly this run, or reclaims it when the store's state is from another incarnation.
pub fn renew(state: &mut Option<State>, r: &Renew, now_us: i64, inc: &str) -> Renewal {
    let now = now_us.div_euclid(1000);
    if let Some(st) = state.as_mut() {
        if let Some(e) = st
            .open
            .iter_mut()
            .find(|e| e.run == r.run && e.again.is_none())
        {
            e.seq = e.seq.saturating_add(1).max(r.seq);
            e.renewed_at = now;
            e.inc = inc.to_owned();
            return Renewal::Renewed(e.stop);
        }
        let ended = |l: &Last| l.run == r.run && l.outcome != Outcome::Unknown;
        if st.inc == inc || st.last.as_ref().is_some_and(ended) {
            return Renewal::Lost;
        }
    }
    // Whoever still trusts its lease may put it back into a store that lost it. A later attempt that is already
    // there was granted after ours ended.
    let st = state.get_or_insert_default();
    if st
        .open
        .iter()
        .any(|e| e.occurrence == r.occurrence && e.attempt > r.attempt)
    {
        return Renewal::Lost;
    }
    st.open.retain(|e| e.occurrence != r.occurrence);
    st.newest = st.newest.max(r.occurrence.0);
    if let Some(key) = &r.key
        && !st.triggered.iter().any(|t| t.key == *key)
    {
        // Its key would run once more otherwise, when this run has ended.
        st.remember_trigger(key, r.occurrence, now);
    }
    st.open.push(Open {
        occurrence: r.occurrence,
        attempt: r.attempt,
        trigger: r.trigger,
        key: r.key.clone(),
        run: r.run,
        instance: r.instance.clone(),
        host: r.host.clone(),
        seq: r.seq,
        lease: r.lease,
        def: r.def.clone(),
        inc: inc.to_owned(),
        granted_at: r.granted_at,
        renewed_at: now,
        stop: None,
        again: None,
    });
    Renewal::Renewed(None)
}

/// Records how a run ended and gives its lease back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settle {
    pub run: RunId,
    /// Names job, occurrence, attempt and all that the history shall keep.
    pub record: RunRecord,
    /// Another attempt is to follow, after so many milliseconds.
    pub again: Option<Again>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Settlement {
    /// Recorded, and the lease is back. Also the answer to the same settlement sent again.
    Done,
    /// The lease was no longer ours. The record stands in the history all the same.
    Lost,
}

/// `again.at` of the request is a delay from now; the store turns it into an instant.
pub fn settle(
    state: &mut Option<State>,
    s: &Settle,
    now_us: i64,
    inc: &str,
    fx: &mut Effects,
) -> Settlement {
    let now = now_us.div_euclid(1000);
    let (job, occurrence) = (&s.record.job, s.record.occurrence);
    let fresh = state.as_ref().is_some_and(|st| st.inc == inc);
    let st = state.get_or_insert_default();
    if st
        .last
        .as_ref()
        .is_some_and(|l| l.run == s.run && l.outcome != Outcome::Unknown)
    {
        return Settlement::Done;
    }
    fx.records.push(s.record.clone());
    let i = st
        .open
        .iter()
        .position(|e| e.run == s.run && e.again.is_none());
    if i.is_none() && fresh {
        // Whoever found it lapsed could not know how it ended.
        if let Some(l) = st.last.as_mut().filter(|l| l.run == s.run) {
            l.outcome = s.record.outcome;
        }
        return Settlement::Lost;
    }
    st.newest = st.newest.max(occurrence.0);
    let again = s.again.map(|a| Again {
        at: now + a.at,
        trigger: a.trigger,
    });
    if let Some(i) = i {
        let e = &mut st.open[i];
        // It may have ended long before this could be told: nothing that was due in between overlapped with it.
        let ended = s.record.finished_at.unwrap_or(now).min(now);
        st.last = Some(last(e, s.record.outcome, ended));
        // Asked to end on purpose: no further attempt.
        match again.filter(|_| e.stop.is_none()) {
            Some(again) => {
                e.again = Some(again);
                fx.events.push(Event::Again {
                    job: job.clone(),
                    occurrence: e.occurrence,
                });
            }
            None => {
                st.open.remove(i);
            }
        }
    }
    if i.is_none() {
        // An attempt from before ours, in a state that is older than our grant.
        st.open
            .retain(|e| e.occurrence != occurrence || e.attempt > s.record.attempt);
    }
    if st.waiting {
        st.waiting = false;
        fx.events.push(Event::Ended { job: job.clone() });
    }
    Settlement::Done
}

/// Makes a job known, learns where it stands, and adopts its state into the present incarnation.
#[derive(Debug, Clone, PartialEq)]
pub struct Register {
    pub job: JobName,
    pub sched: String,
    pub def: String,
    /// As in [`Claim::known`]; 0 when nothing is known.
    pub known: Occurrence,
    /// The caller has seen this incarnation for a whole quarantine, or knows that nothing was lost in it.
    pub adopt: Option<String>,
    /// The epoch in that incarnation that `adopt` is about. A store that can lose its data between two steps adopts only
    /// if it still is this one; None: not looked at.
    pub epoch: Option<String>,
    /// Planned before the store lost its state, and nobody knows what became of them: record as unknown. Ascending.
    pub lost: Vec<Missed>,
    /// The job is enabled at the caller.
    pub enabled: bool,
    /// What the caller knows people to have asked for.
    pub told: Told,
    pub instance: InstanceId,
    pub host: String,
    /// What becomes of attempts that were under way, or awaited, in the incarnation before: with
    /// [`OnCrash::Rerun`] the next one follows, which may repeat one that the store has lost.
    pub on_crash: OnCrash,
    pub max_attempts: u32,
}

/// What people asked of a job, as one instance remembers it: after a loss of the store's data the instances tell it again.
/// A request that is newer than what is told has the last word.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Told {
    pub pause: Option<Pause>,
    pub skip: u32,
    /// When `skip` was asked for; 0: never.
    pub skip_at: i64,
}

impl Told {
    pub fn of(st: &State) -> Self {
        Self {
            pause: st.pause.clone(),
            skip: st.skip,
            skip_at: st.skip_at,
        }
    }
    fn is_nothing(&self) -> bool {
        self.pause.is_none() && self.skip == 0
    }
    fn tell(&self, st: &mut State) {
        if let Some(p) = &self.pause
            && st.pause.is_none()
            && p.at > st.resumed
        {
            st.pause = Some(p.clone());
        }
        if self.skip_at > st.skip_at {
            (st.skip, st.skip_at) = (self.skip, self.skip_at);
        } else if self.skip_at == st.skip_at && self.skip_at > 0 {
            st.skip = st.skip.min(self.skip);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Registration {
    /// Known and of this incarnation; the state says the rest.
    Ready,
    Quarantined,
    Absent,
}

pub fn register(
    state: &mut Option<State>,
    r: &Register,
    now_us: i64,
    inc: &str,
    fx: &mut Effects,
) -> Registration {
    let now = now_us.div_euclid(1000);
    let adopt = r.adopt.as_deref() == Some(inc);
    let Some(st) = state.as_mut() else {
        if !adopt {
            // Before anybody adopts it: nothing starts under a pause that a living instance knows.
            if !r.told.is_nothing() {
                r.told.tell(state.get_or_insert_default());
            }
            return Registration::Absent;
        }
        *state = Some(State {
            inc: inc.to_owned(),
            sched: r.sched.clone(),
            def: r.def.clone(),
            since: if r.known.0 > 0 {
                r.known.0.min(now)
            } else {
                now
            },
            ..State::default()
        });
        if let Some(st) = state.as_mut() {
            forget_lost(st, r, now, fx);
            r.told.tell(st);
        }
        return Registration::Ready;
    };
    know(st, r.known, now);
    r.told.tell(st);
    if st.inc != inc {
        // A holder took its lease back since the range was counted: it has to be counted anew.
        if !adopt || r.lost.iter().any(|l| st.decided_in(l)) {
            return Registration::Quarantined;
        }
        st.inc = inc.to_owned();
        // Holders that live have reclaimed by now; the leases of the others died with them.
        let mut i = 0;
        while i < st.open.len() {
            let e = &st.open[i];
            if e.inc == inc {
                i += 1;
                continue;
            }
            if e.again.is_some() {
                // The attempt that is awaited here may have been made, and lost: its token must not be given twice.
                if r.on_crash == OnCrash::Fail {
                    st.open.remove(i);
                } else {
                    i += 1;
                }
                continue;
            }
            let c = Claim {
                job: r.job.clone(),
                target: Target::Scheduled(e.occurrence),
                known: r.known,
                missed: vec![],
                run: e.run,
                instance: r.instance.clone(),
                host: r.host.clone(),
                trigger: Trigger::Takeover,
                start_by: 0,
                lease: e.lease,
                overlap: Overlap::Skip,
                on_crash: r.on_crash,
                max_attempts: r.max_attempts,
                def: r.def.clone(),
                observed: None,
                holds: vec![],
            };
            if lapse(st, i, &c, now, fx) {
                i += 1;
            }
        }
        forget_lost(st, r, now, fx);
    }
    if r.enabled && st.off > 0 {
        // Nobody had it until now.
        (st.since, st.off) = (st.since.max(now), 0);
    }
    if st.sched != r.sched {
        // Another schedule: what it would have planned before today was never owed.
        st.since = if st.sched.is_empty() && st.newest > 0 {
            st.since
        } else {
            now
        };
        st.sched = r.sched.clone();
    }
    st.def = r.def.clone();
    Registration::Ready
}

fn forget_lost(st: &mut State, r: &Register, now: i64, fx: &mut Effects) {
    know(st, r.known, now);
    for l in &r.lost {
        if l.last.0 <= st.newest || l.last.0 > now {
            continue;
        }
        st.newest = l.last.0;
        fx.records.push(RunRecord {
            run_id: None,
            job: r.job.clone(),
            occurrence: l.last,
            trigger: Trigger::Schedule,
            attempt: 0,
            fencing_token: None,
            instance: Some(r.instance.clone()),
            host: Some(r.host.clone()),
            started_at: None,
            finished_at: None,
            lateness_ms: None,
            duration_ms: None,
            outcome: Outcome::Unknown,
            exit_code: None,
            signal: None,
            output_tail: String::new(),
            output_truncated: false,
            error: Some(
                "the store lost its state, and no record of this occurrence survived".to_owned(),
            ),
            count: l.count,
        });
    }
}

/// What a person asks of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Control {
    Pause {
        until: Option<i64>,
        reason: Option<String>,
    },
    Resume,
    /// So many coming occurrences; 0 takes a request back.
    Skip {
        count: u32,
    },
    /// Ends what runs and drops what waits for another attempt.
    Cancel,
    Trigger {
        key: String,
    },
    /// No instance has the job any more, or all have it disabled. Of instances, not of people.
    Off,
    /// Puts the register back to now, where a wrong clock has moved it into the future. `ran`: occurrences that lie in
    /// the future and ran all the same, which stay decided.
    Rewind {
        ran: Vec<Occurrence>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Controlled {
    Done,
    /// Nothing to do: it was not paused, nothing runs, the key was used.
    Nothing,
    /// The runs that were asked to end.
    Stopping(Vec<RunId>),
    /// The trigger was decided before, as this occurrence.
    Triggered(Occurrence),
    /// [`KEYS_MOST`] keys of the job are remembered or wait: this one was not taken.
    TooMany,
    /// The store knows nothing of this job: no instance has it in its configuration.
    Absent,
}

pub fn control(
    state: &mut Option<State>,
    job: &JobName,
    what: &Control,
    now_us: i64,
    fx: &mut Effects,
) -> Controlled {
    let now = now_us.div_euclid(1000);
    let Some(st) = state.as_mut() else {
        return Controlled::Absent;
    };
    match what {
        Control::Pause { until, reason } => {
            st.pause = Some(Pause {
                until: *until,
                reason: reason.clone(),
                at: now.max(st.resumed + 1).min(LAST_MS),
            });
            fx.events.push(Event::Controlled { job: job.clone() });
            Controlled::Done
        }
        Control::Resume => {
            let paused = st.paused(now).is_some();
            if let Some(p) = st.pause.take() {
                st.resumed = now.max(p.at);
                fx.events.push(Event::Controlled { job: job.clone() });
            }
            if !paused {
                return Controlled::Nothing;
            }
            for e in st.open.iter().filter(|e| e.again.is_some()) {
                fx.events.push(Event::Again {
                    job: job.clone(),
                    occurrence: e.occurrence,
                });
            }
            Controlled::Done
        }
        Control::Skip { count } => {
            (st.skip, st.skip_at) = (*count, now.max(st.skip_at + 1).min(LAST_MS));
            fx.events.push(Event::Controlled { job: job.clone() });
            Controlled::Done
        }
        Control::Off => {
            // Who has a job of the library is not in the fleet's list, and plans it by itself.
            if st.off > 0 || st.sched == LIBRARY {
                return Controlled::Nothing;
            }
            st.off = now;
            Controlled::Done
        }
        Control::Rewind { ran } => {
            if st.newest <= now && st.since <= now {
                return Controlled::Nothing;
            }
            let open = st.open.iter().map(|o| o.occurrence);
            let last = st.last.iter().map(|l| l.occurrence);
            let mut early: Vec<Occurrence> = ran.iter().copied().chain(open).chain(last).collect();
            early.append(&mut st.early);
            early.retain(|at| at.0 > now);
            early.sort_unstable();
            early.dedup();
            st.early = early;
            st.newest = st.newest.min(now);
            st.since = st.since.min(now);
            if let Some(l) = &mut st.last {
                (l.from, l.to) = (l.from.min(now), l.to.min(now));
            }
            fx.events.push(Event::Controlled { job: job.clone() });
            Controlled::Done
        }
        Control::Cancel => {
            let waiting = st.open.len();
            st.open.retain(|e| e.again.is_none());
            let dropped = waiting != st.open.len();
            let mut stopping = vec![];
            for e in &mut st.open {
                e.stop.get_or_insert(Stop::Cancelled);
                stopping.push(e.run);
            }
            if !stopping.is_empty() {
                fx.events.push(Event::Stop { job: job.clone() });
                Controlled::Stopping(stopping)
            } else if dropped {
                Controlled::Done
            } else {
                Controlled::Nothing
            }
        }
        Control::Trigger { key } => {
            st.forget_triggers(now);
            if let Some(t) = st.triggered.iter().find(|t| t.key == *key) {
                return Controlled::Triggered(t.occurrence);
            }
            if st.triggers.iter().any(|t| t.key == *key) {
                return Controlled::Nothing;
            }
            let people = st.triggered.iter().filter(|t| !own_key(&t.key)).count();
            let kept = if own_key(key) { 0 } else { people };
            if st.triggers.len() + kept >= KEYS_MOST {
                return Controlled::TooMany;
            }
            st.triggers.push(Pending {
                key: key.clone(),
                at: now,
            });
            fx.events.push(Event::Triggered {
                job: job.clone(),
                key: key.clone(),
            });
            Controlled::Done
        }
    }
}

#[cfg(test)]
mod bounds;

#[cfg(test)]
mod tests {
    //! Honest instances in random interleavings, in virtual time: they claim, lose replies, renew, watch, crash and
    //! settle; the store restarts, forgets, and goes back to an older state.

    use std::collections::{BTreeMap, HashMap};

    use fastrand::Rng;

    use super::*;

    /// Of the lease, of a holder's trust in it, of the time to kill, of a quarantine; milliseconds.
    const LEASE: i64 = 1000;
    const TRUST: i64 = 700;
    const KILL: i64 = 200;
    const QUARANTINE: i64 = LEASE + KILL;
    const EVERY: i64 = 250;
    const MAX_ATTEMPTS: u32 = 3;

    fn job() -> JobName {
        JobName::new("backup")
    }

    fn put(state: &mut Option<State>, key: &str, now: i64) -> Controlled {
        let what = Control::Trigger {
            key: key.to_owned(),
        };
        control(state, &job(), &what, now * 1000, &mut Effects::default())
    }

    #[test]
    fn keys_are_remembered_for_a_time_and_not_for_a_number_of_triggers() {
        let t = 1_800_000_000_000;
        let mut state = Some(State::default());
        let used = |state: &mut Option<State>, key: &str, at: i64| {
            assert_eq!(put(state, key, at), Controlled::Done, "{key}");
            let st = state.as_mut().unwrap();
            st.remember_trigger(key, Occurrence(at), at);
        };
        let own = |i: usize| format!("{OWN_KEY}{i}");
        used(&mut state, "first", t);
        for i in 0..3 * OWN_KEYS_MOST {
            used(&mut state, &own(i), t + 1 + i as i64);
        }
        assert_eq!(
            put(&mut state, "first", t + 5000),
            Controlled::Triggered(Occurrence(t))
        );
        let st = state.as_ref().unwrap();
        assert!(st.triggered.len() <= OWN_KEYS_MOST + 2);
        // Our own ones are gone soon, those of people when their time is over.
        let last = own(3 * OWN_KEYS_MOST - 1);
        assert!(matches!(
            put(&mut state, &last, t + OWN_KEYS_KEPT_MS),
            Controlled::Triggered(_)
        ));
        assert_eq!(
            put(&mut state, &own(0), t + 2 * OWN_KEYS_KEPT_MS),
            Controlled::Done
        );
        assert_eq!(state.as_ref().unwrap().triggered.len(), 1);
        assert!(matches!(
            put(&mut state, "first", t + KEYS_KEPT_MS - 1),
            Controlled::Triggered(_)
        ));
        assert_eq!(put(&mut state, "first", t + KEYS_KEPT_MS), Controlled::Done);
    }

    /// A store that was restarted kept what ran early; who counted the range did not know of it.
    #[test]
    fn what_ran_early_is_not_recorded_as_lost() {
        let t = 1_800_000_000_000;
        let at = |s: i64| Occurrence(t + s * 1000);
        let range = |first: i64, last: i64| Missed {
            first: at(first),
            last: at(last),
            count: (last - first + 1) as u64,
        };
        let mut state = Some(State {
            inc: "before".to_owned(),
            newest: t,
            early: vec![at(4), at(40)],
            ..State::default()
        });
        let mut ask = Register {
            job: job(),
            sched: String::new(),
            def: String::new(),
            known: Occurrence(0),
            adopt: Some("now".to_owned()),
            epoch: None,
            lost: vec![range(1, 9)],
            enabled: true,
            told: Told::default(),
            instance: InstanceId::new("i"),
            host: String::new(),
            on_crash: OnCrash::Fail,
            max_attempts: 1,
        };
        let mut fx = Effects::default();
        let now = at(20).0 * 1000;
        let answer = register(&mut state, &ask, now, "now", &mut fx);
        assert_eq!((answer, fx.records.len()), (Registration::Quarantined, 0));
        ask.lost = vec![range(1, 3), range(5, 9)];
        let answer = register(&mut state, &ask, now, "now", &mut fx);
        assert_eq!(answer, Registration::Ready);
        let all: Vec<_> = fx.records.iter().map(|r| (r.occurrence, r.count)).collect();
        assert_eq!(all, [(at(3), 3), (at(9), 5)]);
        assert_eq!(state.unwrap().newest, at(9).0);
    }

    #[test]
    fn a_key_too_many_is_refused_and_none_is_forgotten() {
        let t = 1_800_000_000_000;
        let mut state = Some(State::default());
        for i in 0..KEYS_MOST as i64 {
            let st = state.as_mut().unwrap();
            st.remember_trigger(&format!("k{i}"), Occurrence(t + i), t + i);
        }
        let now = t + KEYS_MOST as i64;
        assert_eq!(put(&mut state, "more", now), Controlled::TooMany);
        assert_eq!(
            put(&mut state, "k0", now),
            Controlled::Triggered(Occurrence(t))
        );
        let own = format!("{OWN_KEY}1");
        assert_eq!(put(&mut state, &own, now), Controlled::Done);
        // There is room when the first is forgotten.
        state.as_mut().unwrap().triggers.clear();
        assert_eq!(put(&mut state, "more", t + KEYS_KEPT_MS), Controlled::Done);
    }

    /// A run as its instance knows it.
    #[derive(Clone)]
    struct Held {
        claim: Claim,
        grant: Grant,
        trusted_until: i64,
        seq: u32,
    }

    #[derive(Default)]
    struct Instance {
        held: Vec<Held>,
        /// Claims whose replies were lost, and that will be asked again.
        asked: Vec<Claim>,
        /// Leases of others, and since when each was seen like this.
        watched: Vec<(Observed, i64)>,
        known: i64,
        /// The incarnation, and since when it is seen.
        inc: (String, i64),
    }

    struct World {
        rng: Rng,
        now: i64,
        state: Option<State>,
        inc: u32,
        instances: Vec<Instance>,
        overlap: Overlap,
        on_crash: OnCrash,
        retries: bool,
        // What is judged.
        grants: HashMap<(Occurrence, u32), RunId>,
        token: i64,
        /// Until when each run's processes may live.
        alive: BTreeMap<RunId, i64>,
        newest: i64,
        recorded: u32,
    }

    impl World {
        fn new(seed: u64) -> Self {
            let mut rng = Rng::with_seed(seed);
            let overlap = [
                Overlap::Skip,
                Overlap::Queue,
                Overlap::Replace,
                Overlap::Allow,
            ];
            Self {
                now: 1_800_000_000_000,
                state: None,
                inc: 1,
                instances: (0..3).map(|_| Instance::default()).collect(),
                overlap: overlap[rng.usize(..4)],
                on_crash: [OnCrash::Fail, OnCrash::Rerun][rng.usize(..2)],
                retries: rng.bool(),
                grants: HashMap::new(),
                token: 0,
                alive: BTreeMap::new(),
                newest: 0,
                recorded: 0,
                rng,
            }
        }

        fn inc(&self) -> String {
            format!("inc-{}", self.inc)
        }

        fn attempts(&self) -> u32 {
            if self.on_crash == OnCrash::Rerun {
                MAX_ATTEMPTS
            } else {
                1
            }
        }

        fn run(&mut self, steps: usize) {
            for _ in 0..steps {
                self.now += self.rng.i64(0..120);
                for instance in &mut self.instances {
                    instance.held.retain(|h| self.now < h.trusted_until);
                }
                let i = self.rng.usize(..self.instances.len());
                match self.rng.u32(..100) {
                    0..35 => self.claim(i),
                    35..62 => self.renew(i),
                    62..72 => self.settle(i),
                    72..95 => self.watch(i),
                    95..98 => self.crash(i),
                    _ => self.restart(),
                }
                if let Some(st) = &self.state {
                    assert!(st.newest >= self.newest, "the register went back");
                    self.newest = st.newest;
                }
            }
        }

        fn claim(&mut self, i: usize) {
            let grid = self.now - self.now.rem_euclid(EVERY);
            let known = Occurrence(self.instances[i].known);
            let (state, now) = (&self.state, self.now);
            let me = &mut self.instances[i];
            let claim = if !me.asked.is_empty() && self.rng.bool() {
                me.asked.remove(self.rng.usize(..me.asked.len()))
            } else {
                let waits = state.as_ref().and_then(|st| st.open.first());
                let at = match waits {
                    Some(open) if self.rng.bool() => open.occurrence,
                    _ => Occurrence(grid + EVERY * self.rng.i64(-3..=1)),
                };
                // Decided here, or held here: an instance does not ask for that again.
                if me.held.iter().any(|h| h.grant.occurrence == at)
                    || me.asked.iter().any(|c| c.target == Target::Scheduled(at))
                {
                    return;
                }
                let lapsed = me.watched.iter().find(|(_, since)| now - since >= LEASE);
                Claim {
                    job: job(),
                    target: Target::Scheduled(at),
                    known,
                    missed: vec![],
                    run: RunId::random(),
                    instance: InstanceId::new(&format!("i{i}")),
                    host: String::new(),
                    trigger: Trigger::Schedule,
                    start_by: at.0 + 5 * EVERY,
                    lease: LEASE,
                    overlap: self.overlap,
                    on_crash: self.on_crash,
                    max_attempts: if self.on_crash == OnCrash::Rerun {
                        MAX_ATTEMPTS
                    } else {
                        1
                    },
                    def: String::new(),
                    observed: lapsed.map(|(o, _)| o.clone()),
                    holds: me.held.iter().map(|h| h.claim.run).collect(),
                }
            };
            let (inc, mut fx) = (self.inc(), Effects::default());
            let answer = super::claim(&mut self.state, &claim, now * 1000, &inc, &mut fx);
            self.recorded += fx.records.len() as u32;
            if let Answer::Granted(g) = answer {
                let first = self.grants.insert((g.occurrence, g.attempt), claim.run);
                assert!(
                    first.is_none_or(|run| run == claim.run),
                    "{g:?} was granted twice"
                );
                if first.is_none() && self.overlap != Overlap::Allow {
                    assert!(g.token().0 > self.token, "{g:?} has an older token");
                    self.token = g.token().0;
                }
            }
            if self.rng.u32(..4) == 0 {
                // The reply is lost.
                self.instances[i].asked.push(claim);
                return;
            }
            match answer {
                Answer::Granted(grant) => {
                    let me = &mut self.instances[i];
                    me.known = me.known.max(grant.occurrence.0);
                    me.held.push(Held {
                        trusted_until: now + TRUST,
                        claim,
                        grant,
                        seq: 0,
                    });
                    let run = me.held[me.held.len() - 1].claim.run;
                    self.trust(run, now + TRUST + KILL);
                    if self.overlap != Overlap::Allow {
                        for (other, until) in &self.alive {
                            assert!(
                                *other == run || *until <= now,
                                "{grant:?} overlaps {other} at {now}"
                            );
                        }
                    }
                }
                Answer::Absent | Answer::Quarantined => self.register(i),
                Answer::Settled(_) | Answer::Recorded { .. } => {
                    let Target::Scheduled(at) = claim.target else {
                        return;
                    };
                    let me = &mut self.instances[i];
                    me.known = me.known.max(at.0);
                }
                _ => {}
            }
        }

        fn trust(&mut self, run: RunId, until: i64) {
            self.alive.insert(run, until);
        }

        fn renew(&mut self, i: usize) {
            let n = self.instances[i].held.len();
            if n == 0 {
                return;
            }
            let h = self.rng.usize(..n);
            let inc = self.inc();
            let held = &mut self.instances[i].held[h];
            held.seq += 1;
            let renew = Renew {
                job: job(),
                occurrence: held.grant.occurrence,
                attempt: held.grant.attempt,
                trigger: held.grant.trigger,
                key: None,
                run: held.claim.run,
                instance: held.claim.instance.clone(),
                host: String::new(),
                lease: LEASE,
                def: String::new(),
                seq: held.seq,
                granted_at: self.now,
            };
            let answer = super::renew(&mut self.state, &renew, self.now * 1000, &inc);
            if self.rng.u32(..4) == 0 {
                return;
            }
            match answer {
                Renewal::Renewed(None) => {
                    held.trusted_until = self.now + TRUST;
                    self.trust(renew.run, self.now + TRUST + KILL);
                }
                Renewal::Renewed(Some(_)) => {}
                Renewal::Lost => drop(self.end(i, h)),
            }
        }

        /// The processes of this run are gone now.
        fn end(&mut self, i: usize, h: usize) -> Held {
            let held = self.instances[i].held.remove(h);
            self.alive.insert(held.claim.run, self.now);
            held
        }

        fn settle(&mut self, i: usize) {
            let n = self.instances[i].held.len();
            if n == 0 {
                return;
            }
            let h = self.rng.usize(..n);
            let held = self.end(i, h);
            let (g, c) = (held.grant, held.claim);
            let again = self.retries && g.attempt < MAX_ATTEMPTS && self.rng.bool();
            let settle = Settle {
                run: c.run,
                record: RunRecord {
                    run_id: Some(c.run),
                    trigger: g.trigger,
                    attempt: g.attempt,
                    ..not_run(&c, g.occurrence, Outcome::Failed, 1, "")
                },
                again: again.then(|| Again {
                    at: self.rng.i64(0..400),
                    trigger: Trigger::Retry,
                }),
            };
            let inc = self.inc();
            for _ in 0..self.rng.u32(1..3) {
                let before = self.state.clone();
                let mut fx = Effects::default();
                let _ = super::settle(&mut self.state, &settle, self.now * 1000, &inc, &mut fx);
                let held =
                    |st: &Option<State>| st.as_ref().is_some_and(|st| st.held_by(c.run).is_some());
                assert!(!held(&self.state), "settled, and still open: {before:?}");
            }
        }

        /// Looks at the leases; each is watched from when it was first seen as it is.
        fn watch(&mut self, i: usize) {
            let now = self.now;
            let me = &mut self.instances[i];
            let open = self.state.iter().flat_map(|st| &st.open);
            let seen = open.filter(|o| o.again.is_none()).map(|o| Observed {
                run: o.run,
                seq: o.seq,
                inc: o.inc.clone(),
            });
            me.watched = seen
                .map(|o| {
                    let since = me
                        .watched
                        .iter()
                        .find(|(w, _)| *w == o)
                        .map_or(now, |(_, t)| *t);
                    (o, since)
                })
                .collect();
            let newest = self.state.as_ref().map_or(0, |st| st.newest);
            me.known = me.known.max(newest);
            self.register(i);
        }

        /// With the right to adopt when the incarnation was seen for a whole quarantine.
        fn register(&mut self, i: usize) {
            let (inc, now) = (self.inc(), self.now);
            let me = &mut self.instances[i];
            if me.inc.0 != inc {
                me.inc = (inc.clone(), now);
            }
            let last = Occurrence(now - now.rem_euclid(EVERY));
            let register = Register {
                job: job(),
                sched: "s".to_owned(),
                def: "d".to_owned(),
                known: Occurrence(me.known),
                adopt: (now - me.inc.1 >= QUARANTINE).then(|| inc.clone()),
                epoch: None,
                lost: vec![Missed {
                    first: last,
                    last,
                    count: 1,
                }],
                enabled: true,
                told: Told::default(),
                instance: InstanceId::new(&format!("i{i}")),
                host: String::new(),
                on_crash: self.on_crash,
                max_attempts: self.attempts(),
            };
            let mut fx = Effects::default();
            let _ = super::register(&mut self.state, &register, now * 1000, &inc, &mut fx);
        }

        fn crash(&mut self, i: usize) {
            while !self.instances[i].held.is_empty() {
                self.end(i, 0);
            }
            self.instances[i] = Instance::default();
        }

        /// Without the data, or with it.
        fn restart(&mut self) {
            self.inc += 1;
            if self.rng.bool() {
                self.state = None;
                self.newest = 0;
            }
        }
    }

    /// Attempt n of an occurrence is granted to one run, no two runs of a job live at one time, tokens strictly
    /// increase, and what is decided stays decided.
    #[test]
    fn honest_instances_never_meet() {
        let (mut grants, mut takeovers, mut overlaps) = (0, 0, 0);
        for seed in 0..1500 {
            let result = std::panic::catch_unwind(|| {
                let mut world = World::new(seed);
                world.run(300);
                world
            });
            let world = result.unwrap_or_else(|e| {
                let text = e.downcast_ref::<String>().cloned().unwrap_or_default();
                panic!("seed {seed}: {text}")
            });
            grants += world.grants.len();
            takeovers += world
                .grants
                .keys()
                .filter(|(_, attempt)| *attempt > 1)
                .count();
            overlaps += world.recorded;
        }
        // What is never met is not judged.
        assert!(
            grants > 8000 && takeovers > 800 && overlaps > 3000,
            "{grants} {takeovers} {overlaps}"
        );
    }
}
