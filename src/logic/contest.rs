//! The contest for one occurrence, as one instance fights it: the caller passes in what the instance knows, and gets
//! what to do next.
//!
//! [`Contest`] is one claim to the store, from the moment at which an occurrence is due on this instance until its
//! decision is known. [`JobState`] is what the instance knows of the job meanwhile. Neither waits, sends requests or
//! reads a clock: the caller carries out a [`Step`] and reports the result.
//!
//! ```text
//! new ── Pause ──▶ look ──▶ something is missing: Rest, TakeSlot, TakePermit, FindGrant ──▶ look
//!                   │
//!                   ▼ nothing is
//!                  Ask ──▶ answered ──▶ not decided yet: Rest, First ──▶ look
//!                   │          └──────▶ End
//!                   └────▶ failed ───▶ Pause ──▶ look, or End
//! ```

mod epoch;
mod job;
mod queue;
mod rank;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

pub use self::{
    epoch::{Epoch, EpochChange, EpochName, EpochWatch},
    job::{Absence, Account, Changes, JobState, Next, Registered, Standing},
    queue::{Due, Segment, unfold},
    rank::rank,
};
use super::{
    backoff,
    belief::{Belief, SLACK},
    claim::{self, Answer, Claim, Grant, Last, Missed, Observed, Overlap, Target},
};
use crate::model::{
    Boottime, InstanceId, Occurrence, Outcome, Run, RunId, Trigger, Wait, job::Job,
};

/// An instance delays its claim by this for each instance that ranks before it for the occurrence. The first claims at
/// once; a dead instance delays the others by no more than this.
const HANDICAP: Duration = Duration::from_millis(3);
const HANDICAP_MAX: Duration = Duration::from_millis(45);
/// This long after the last moment for a start, that moment has passed on the store's clock too.
pub const START_MARGIN: Duration = Duration::from_millis(20);
/// The longest wait for a slot before a contest looks again.
const LONGEST_WAIT_FOR_SLOT: Duration = Duration::from_secs(3600);
/// How often one contest asks again when the answer says to ask again soon: at first as soon as the answer says, then
/// at growing intervals. Otherwise, while the store's clock is behind the decided occurrences, a contest would ask a
/// thousand times a second.
const PACE: (u32, Duration) = (3, Duration::from_secs(1));
/// How long a contest waits before it looks again whether a run of its job that ended on this instance is settled.
const SETTLED_YET: Duration = Duration::from_secs(1);

/// What a contest is about.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    pub target: Target,
    /// Earlier occurrences that the claim gives up.
    pub missed: Vec<Missed>,
    pub trigger: Trigger,
    /// The last moment for a start, Unix ms of the store's clock.
    pub start_by: i64,
    /// The occurrence was decided before, and is claimed again: for its next attempt, or because its holder is gone.
    pub next_attempt: bool,
}

impl Ask {
    pub fn next_attempt(at: Occurrence) -> Self {
        Self::again(Target::Scheduled(at))
    }

    /// Asks once more for what this instance, or another one, may have been granted.
    pub fn again(target: Target) -> Self {
        Self {
            missed: vec![],
            trigger: match target {
                Target::Scheduled(_) => Trigger::Schedule,
                Target::Manual { .. } => Trigger::Manual,
            },
            target,
            start_by: i64::MAX,
            next_attempt: true,
        }
    }

    /// The key of a manual trigger.
    pub fn key(&self) -> Option<&str> {
        match &self.target {
            Target::Manual { key, .. } => Some(key),
            Target::Scheduled(_) => None,
        }
    }
}

/// Why this instance must not claim anything now.
#[derive(Debug, Clone)]
pub enum Halt {
    /// The instance takes nothing new: it drains, or it stops.
    Draining,
    /// The store must not be relied on; the reason as a decision, and in words.
    Unreliable(&'static str, Arc<str>),
}

/// A slot: the right to one of the runs that this instance may have at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// The number of runs is not limited.
    Needless,
    Held,
    Missing,
}

/// The job of a contest.
#[derive(Debug)]
pub enum Subject<'a> {
    Here(&'a mut JobState),
    /// The job is not in this instance's configuration any more; only its account is left.
    Removed(&'a mut Account),
}

impl Subject<'_> {
    fn account(&mut self) -> &mut Account {
        match self {
            Self::Here(job) => &mut job.account,
            Self::Removed(account) => account,
        }
    }
    fn decided(&mut self, at: Occurrence) {
        if let Self::Here(job) = self {
            job.decided(at);
        }
    }
}

/// The instance that claims.
#[derive(Debug)]
pub struct Me {
    pub instance: InstanceId,
    pub host: String,
}

/// What a contest sees at one moment.
pub struct View<'a> {
    pub me: &'a Me,
    pub now: Boottime,
    pub clock: &'a Belief,
    pub subject: Subject<'a>,
    pub halt: Option<Halt>,
    pub slot: Slot,
    /// The instance has room for one more claim.
    pub permit: bool,
    /// The proof that the holder in our way is gone.
    pub lapsed: Option<Observed>,
    /// Makes the run id for a claim that was not sent before.
    pub fresh: &'a dyn Fn() -> RunId,
}

impl View<'_> {
    /// The instance drains, or the job is removed or disabled. A disabled job still has triggers, and further attempts
    /// of what was decided before.
    fn claims_nothing_new(&self, target: &Target) -> bool {
        let gone = match &self.subject {
            Subject::Removed(_) => true,
            Subject::Here(job) => {
                !job.definition.enabled
                    && matches!(target, Target::Scheduled(at) if *at > job.newest())
            }
        };
        gone || matches!(self.halt, Some(Halt::Draining))
    }
    /// Unix ms of the store's clock; None before its first answer.
    fn store_ms(&self) -> Option<i64> {
        Some(self.clock.at(self.now)?.div_euclid(1000))
    }
}

/// What comes with an answer.
#[derive(Debug, Clone)]
pub struct AnswerInfo {
    /// The store's incarnation.
    pub incarnation: Arc<str>,
    /// Unix ms of the store's clock, when it answered.
    pub store_ms: i64,
    /// The lease that the answer shows was seen unchanged for its whole length.
    pub lapsed: bool,
    /// When the lease that the answer shows lapses, if it does not change.
    pub expires_in: Duration,
}

/// What to do next.
#[derive(Debug)]
pub enum Step {
    /// Look again.
    Look,
    /// Look again after this time, whatever changes meanwhile. With what it waits for, if it is long enough to count.
    Pause(Duration, Option<Wait>),
    /// Look again after this time, or when something about the job has changed since the last look.
    Rest(Duration, Wait),
    /// Get a slot, for at most this time; then look again.
    TakeSlot(Duration),
    /// Get the permit for one more claim under way, `first`: before those that were never claimed; then look again.
    TakePermit {
        first: bool,
    },
    /// See in the store whether this run was granted; then [`Contest::found`].
    FindGrant(RunId),
    /// Ask the store; then [`Contest::answered`] or [`Contest::failed`].
    Ask(Box<Claim>),
    /// Have this occurrence decided; then [`Contest::first_was_decided`].
    First(Occurrence),
    End(ContestEnd),
}

impl Step {
    /// What a contest waits for in this step. A [`Step::Ask`] counts for itself: a run is started at its end.
    pub fn waits_for(&self) -> Option<Wait> {
        match self {
            Self::Pause(_, wait) => *wait,
            Self::Rest(_, wait) => Some(*wait),
            Self::First(_) => Some(Wait::Overlap),
            Self::TakeSlot(_) => Some(Wait::Slot),
            Self::TakePermit { .. } | Self::FindGrant(_) => Some(Wait::StoreAway),
            Self::Look | Self::Ask(_) | Self::End(_) => None,
        }
    }
}

/// How a contest ended, for this instance. Every caller that waited for the contest gets the same value.
#[derive(Debug, Clone, PartialEq)]
pub enum ContestEnd {
    /// This instance won; the lease is with the run's holder.
    Won(RunId),
    Lost {
        to: InstanceId,
    },
    /// Decided, and over.
    Settled,
    /// Decided without a run.
    Recorded(Outcome),
    /// Not decided: the store cannot be reached, or is quarantined.
    Undecided,
    /// This instance claims nothing at present.
    Draining,
    /// The job is not in this instance's configuration any more.
    Gone,
    /// Not decided: others have already decided some of the occurrences that the claim gives up.
    Behind,
}

/// A lease that was won.
#[derive(Debug, Clone)]
pub struct Win {
    /// The job's definition when the claim was sent.
    pub job: Arc<Job>,
    pub run: Run,
    /// Of the store, when it granted the run.
    pub incarnation: Arc<str>,
    /// Unix ms of the store's clock: a first attempt is not started later than this.
    pub start_by: i64,
    /// The claim was sent again, and its answer came after the last moment for a start: the run is to be settled as
    /// missed, for this reason.
    pub too_late: Option<&'static str>,
}

/// What the caller has to do besides the step.
#[derive(Debug)]
pub enum Effect {
    /// For the command `why`: what this instance decided about an occurrence; None: the contest's own.
    Note(Option<Occurrence>, &'static str, String),
    /// Stop watching this occurrence: nobody holds it any more, or this instance does.
    Unwatch(Occurrence),
    Start(Box<Win>),
    /// Decided without a run.
    NotRun(Outcome, String),
    /// The store refuses the claim, or cannot be reached; reported once, until a claim works again.
    CannotClaim(String),
}

/// One claim of one instance.
#[derive(Debug, Clone)]
pub struct Contest {
    pub ask: Ask,
    phase: Phase,
    failures: u32,
    /// Answers in a row that said to ask again soon.
    soon: u32,
}

#[derive(Debug, Clone)]
enum Phase {
    /// The store has not answered this contest yet. A claim of an earlier contest may have been granted.
    New,
    /// An earlier claim of this instance was granted: the grant counts also while the instance drains, and when the job
    /// is removed.
    Granted,
    /// The store has the claim.
    Asked {
        job: Arc<Job>,
        run: RunId,
        /// The time of a trigger was over on this instance's own clock.
        passed: bool,
    },
    /// The store has answered, and nothing was granted.
    Answered,
}

impl Contest {
    /// `rank`: see [`rank()`].
    pub fn new(ask: Ask, rank: usize) -> (Self, Step) {
        let contest = Self {
            ask,
            phase: Phase::New,
            failures: 0,
            soon: 0,
        };
        let first = match u32::try_from(rank).unwrap_or(u32::MAX) {
            0 => Step::Look,
            rank => Step::Pause(HANDICAP.saturating_mul(rank).min(HANDICAP_MAX), None),
        };
        (contest, first)
    }

    /// The next step, as things stand: get the first thing that is missing, or send the claim.
    // Long: what a claim needs, in the order in which it is looked for.
    pub fn look(&mut self, v: &mut View<'_>, effects: &mut Vec<Effect>) -> Step {
        let id = self.ask.target.id();
        let granted = matches!(self.phase, Phase::Granted);
        if !granted && v.claims_nothing_new(&self.ask.target) {
            // A claim of before may have been granted.
            let asked = v.subject.account().asked(&id);
            return match asked.filter(|_| !matches!(self.phase, Phase::Answered)) {
                Some(run) => Step::FindGrant(run),
                None => self.claims_no_more(v, effects),
            };
        }
        if let Some(Halt::Unreliable(decision, why)) = v.halt.clone() {
            if let Subject::Here(job) = &mut v.subject
                && job.noted_unreliable.first_for(&id)
            {
                // The daemon logs it; this note is for `why`, once for each occurrence.
                effects.push(Effect::Note(None, decision, why.to_string()));
            }
            return Step::End(ContestEnd::Undecided);
        }
        let times = self.times(v);
        let store_ms = v.store_ms();
        if let Subject::Here(job) = &mut v.subject {
            let asked = job.account.asked(&id).is_some();
            if let Target::Scheduled(at) = self.ask.target
                && at <= job.newest()
                && !self.ask.next_attempt
                // An unanswered claim of ours may have been granted: then the occurrence is decided, and ours.
                && !asked
            {
                return Step::End(ContestEnd::Settled);
            }
            if !self.ask.next_attempt && !job.may_claim(&self.ask) {
                // Overdue occurrences before the target are not in the queue yet, or came in after this claim was
                // planned.
                return Step::End(ContestEnd::Undecided);
            }
            if job.definition.overlap != Overlap::Allow && job.account.settling() {
                return Step::Rest(SETTLED_YET, Wait::Overlap);
            }
            if let Target::Manual { before, .. } = &mut self.ask.target {
                *before = job.next_undecided();
            }
        }
        if v.slot == Slot::Missing && !times.too_late {
            // A slot first: while this instance is busy, another one may run the occurrence. If none does in time,
            // recording it as missed needs no slot.
            let left = store_ms.map_or(LONGEST_WAIT_FOR_SLOT, |now| {
                let left = self.ask.start_by.saturating_sub(now).max(0) as u64;
                Duration::from_millis(left.saturating_add(1)).saturating_add(START_MARGIN)
            });
            return Step::TakeSlot(left.min(LONGEST_WAIT_FOR_SLOT));
        }
        if !v.permit {
            // What may be granted already goes first: its lease goes on only if it is asked for again.
            return Step::TakePermit {
                first: v.subject.account().is_unheard(&id),
            };
        }
        let (known, (run, definition)) = match &mut v.subject {
            Subject::Here(job) => {
                let run = job.account.ask(id, &job.definition, v.fresh);
                (job.newest(), (run, job.definition.clone()))
            }
            Subject::Removed(account) => match account.asked_as(&id) {
                Some(asked) => (Occurrence(0), asked),
                None => return Step::End(ContestEnd::Gone),
            },
        };
        let claim = Claim {
            job: definition.name.clone(),
            target: self.ask.target.clone(),
            known,
            missed: self.ask.missed.clone(),
            run,
            instance: v.me.instance.clone(),
            host: v.me.host.clone(),
            trigger: self.ask.trigger,
            start_by: match times {
                Times { doubted: true, .. } => claim::PASSED_IN_DOUBT,
                Times { passed: true, .. } => claim::PASSED,
                _ => self.ask.start_by,
            },
            lease: definition.lease.length.as_millis() as i64,
            overlap: definition.overlap,
            on_crash: definition.on_crash,
            max_attempts: definition.max_attempts,
            definition: definition.digest.clone(),
            observed: v.lapsed.take(),
            holds: v.subject.account().active().collect(),
            cause: None,
        };
        self.phase = Phase::Asked {
            job: definition,
            run,
            passed: times.passed,
        };
        Step::Ask(Box::new(claim))
    }

    fn times(&self, v: &View<'_>) -> Times {
        // The time of a trigger is counted on this instance's own clock: the store's may be behind.
        let waits = match &v.subject {
            Subject::Here(job) => self.ask.key().and_then(|key| job.trigger_is_over(key)),
            Subject::Removed(_) => None,
        };
        let left = waits.map(|over| (over + START_MARGIN).since(v.now));
        let passed = left == Some(Duration::ZERO);
        let last = self
            .ask
            .start_by
            .saturating_add(START_MARGIN.as_millis() as i64);
        let too_late = passed || v.store_ms().is_some_and(|now| now > last);
        let over = waits.or_else(|| v.clock.when(self.ask.start_by));
        Times {
            left,
            passed,
            too_late,
            doubted: too_late
                && self.ask.start_by > claim::NEVER
                && over.is_some_and(|over| v.clock.doubted_at(over)),
        }
    }

    /// Whether the store granted the run of [`Step::FindGrant`]; None: the store cannot be reached.
    pub fn found(
        &mut self,
        granted: Option<bool>,
        stopping: bool,
        v: &mut View<'_>,
        effects: &mut Vec<Effect>,
    ) -> Step {
        match granted {
            Some(true) => {
                self.phase = Phase::Granted;
                Step::Look
            }
            None if !stopping => Step::End(ContestEnd::Undecided),
            Some(false) | None => self.claims_no_more(v, effects),
        }
    }

    fn claims_no_more(&self, v: &mut View<'_>, effects: &mut Vec<Effect>) -> Step {
        self.forget_claim(v);
        Step::End(match v.halt {
            Some(Halt::Draining) => {
                effects.push(Effect::Note(None, "draining", String::new()));
                ContestEnd::Draining
            }
            _ => ContestEnd::Gone,
        })
    }

    /// The store could not be reached, or refused the claim. `tries`: how often the contest asks again; `pause`: the
    /// wait before the next try, by the number of failures.
    pub fn failed(
        &mut self,
        error: &str,
        transient: bool,
        tries: u32,
        pause: impl Fn(u32) -> Duration,
        v: &mut View<'_>,
        effects: &mut Vec<Effect>,
    ) -> Step {
        // The store may have granted the claim all the same.
        self.phase = Phase::New;
        (v.subject.account()).set_unheard(&self.ask.target.id(), transient);
        self.failures += 1;
        if transient && self.failures <= tries {
            return Step::Pause(pause(self.failures), Some(Wait::StoreAway));
        }
        // Noted once for each occurrence: an outage must not fill the log.
        if let Subject::Here(job) = &mut v.subject {
            if job.trouble.is_new() {
                effects.push(Effect::CannotClaim(error.to_owned()));
            }
            if job.trouble.first_for(&self.ask.target.id()) {
                effects.push(Effect::Note(None, "store_error", error.to_owned()));
            }
        }
        Step::End(ContestEnd::Undecided)
    }

    /// The store has answered.
    // Long: one arm for each answer.
    pub fn answered(
        &mut self,
        answer: Answer,
        info: AnswerInfo,
        v: &mut View<'_>,
        effects: &mut Vec<Effect>,
    ) -> Step {
        self.failures = 0;
        (v.subject.account()).set_unheard(&self.ask.target.id(), false);
        let asked = std::mem::replace(&mut self.phase, Phase::Answered);
        let at = match self.ask.target {
            Target::Scheduled(at) => Some(at),
            Target::Manual { .. } => None,
        };
        match answer {
            Answer::Granted(grant) => return self.granted(grant, asked, info, v, effects),
            Answer::Running(_) if info.lapsed => return Step::Look,
            Answer::Running(open) => {
                let lost = format!("to {}", open.run.instance);
                effects.push(Effect::Note(Some(open.run.occurrence), "lost", lost));
                v.subject.decided(open.run.occurrence);
                self.trigger_is_decided(open.run.occurrence, info.store_ms, v);
                self.forget_claim(v);
                return Step::End(ContestEnd::Lost {
                    to: open.run.instance,
                });
            }
            Answer::Settled(last) => {
                self.decided(at, v, effects);
                let occurrence = last
                    .as_ref()
                    .map_or(Occurrence(info.store_ms), |l| l.occurrence);
                self.trigger_is_decided(occurrence, info.store_ms, v);
                effects.push(match last {
                    Some(Last {
                        occurrence,
                        instance,
                        outcome,
                        ..
                    }) => Effect::Note(
                        Some(occurrence),
                        "lost",
                        format!("to {instance}, which has {outcome}"),
                    ),
                    None => Effect::Note(None, "settled", String::new()),
                });
                return Step::End(ContestEnd::Settled);
            }
            Answer::Recorded { outcome, reason } => {
                self.decided(at, v, effects);
                let never = match (self.ask.key(), &v.subject) {
                    (Some(key), Subject::Here(job)) => job.planned_never(key),
                    _ => None,
                };
                let occurrence = never.unwrap_or(Occurrence(info.store_ms));
                self.trigger_is_decided(occurrence, info.store_ms, v);
                effects.push(Effect::Note(None, outcome.as_str(), reason.clone()));
                effects.push(Effect::NotRun(outcome, reason));
                return Step::End(ContestEnd::Recorded(outcome));
            }
            Answer::Behind { newest, early } => {
                v.subject.decided(newest);
                if let Subject::Here(job) = &mut v.subject {
                    job.ran_early(early);
                }
                self.forget_claim(v);
                return Step::End(ContestEnd::Behind);
            }
            // The occurrence was due by a wrong clock, which has been corrected since.
            Answer::Early { wait_us }
                if at.is_some()
                    && wait_us > SLACK.as_micros() as i64
                    && !self.ask.next_attempt
                    && v.clock.offset_us().is_some() =>
            {
                self.forget_claim(v);
                if let Subject::Here(job) = &mut v.subject {
                    job.plan_anew();
                }
                return Step::End(ContestEnd::Undecided);
            }
            Answer::Quarantined | Answer::Absent => {
                let why = "the store lost or changed its data";
                effects.push(Effect::Note(None, "quarantined", why.to_owned()));
                if let Subject::Here(job) = &mut v.subject {
                    job.lost();
                }
                return Step::End(ContestEnd::Undecided);
            }
            Answer::RunFirst(first) if at != Some(first) => return Step::First(first),
            Answer::Blocked(_)
            | Answer::Early { .. }
            | Answer::Later { .. }
            | Answer::RunFirst(_)
            | Answer::InDoubt => {}
        }
        self.wait_for(answer, info, v)
    }

    fn granted(
        &mut self,
        grant: Grant,
        asked: Phase,
        info: AnswerInfo,
        v: &mut View<'_>,
        effects: &mut Vec<Effect>,
    ) -> Step {
        let Phase::Asked { job, run, passed } = asked else {
            return Step::Look;
        };
        v.subject.decided(grant.occurrence);
        self.trigger_is_decided(grant.occurrence, info.store_ms, v);
        let start_by = match grant.trigger {
            // Also where it is found long after it was granted: its contest does not know how late it may start.
            Trigger::Schedule => {
                let within = job.jitter + job.start_within;
                let last = grant.occurrence.0.saturating_add(within.as_millis() as i64);
                self.ask.start_by.min(last)
            }
            _ => self.ask.start_by,
        };
        if v.subject.account().begin(&self.ask.target.id(), run) {
            effects.push(Effect::Unwatch(grant.occurrence));
            let attempt = format!("attempt {}", grant.attempt);
            effects.push(Effect::Note(Some(grant.occurrence), "won", attempt));
            effects.push(Effect::Start(Box::new(Win {
                run: Run {
                    id: run,
                    occurrence: grant.occurrence,
                    attempt: grant.attempt,
                    trigger: grant.trigger,
                    key: self.ask.key().map(ToOwned::to_owned),
                    instance: v.me.instance.clone(),
                    host: v.me.host.clone(),
                    lease: job.lease.length.as_millis() as i64,
                    definition: job.digest.clone(),
                    granted_at: info.store_ms,
                },
                job,
                incarnation: info.incarnation,
                start_by,
                // The store grants nothing new after that moment.
                too_late: (grant.attempt == 1 && (passed || info.store_ms > start_by)).then_some(
                    match self.ask.start_by <= claim::NEVER {
                        true => claim::OVERDUE,
                        false => claim::TOO_LATE,
                    },
                ),
            })));
        }
        Step::End(ContestEnd::Won(run))
    }

    /// After an answer that decides nothing: how long to wait before the next claim.
    fn wait_for(&mut self, answer: Answer, info: AnswerInfo, v: &mut View<'_>) -> Step {
        let soon = Duration::from_millis(1);
        let waits_for = match answer {
            // For its clock, or until instances believe that.
            Answer::Early { .. } | Answer::InDoubt => Wait::StoreAway,
            _ => Wait::Overlap,
        };
        let wait = match answer {
            Answer::Blocked(open) => {
                if v.lapsed.is_some() {
                    // Its holder is dead: the occurrences behind it are overdue, not queued.
                    if let Subject::Here(job) = &mut v.subject {
                        job.outage();
                    }
                    self.pace(soon)
                } else {
                    // For a proof that the holder lives, look soon after its next renewal.
                    let lease = super::observe::length(&open);
                    self.until_too_late(info.store_ms, (lease / 10).min(info.expires_in))
                }
            }
            Answer::Early { wait_us } => match &self.ask.target {
                Target::Manual { before, .. } => {
                    if before.is_some_and(|before| before.0 <= info.store_ms) {
                        // Others have decided past the instant that the trigger would take: learn what they decided.
                        if let Subject::Here(job) = &mut v.subject {
                            job.stale();
                        }
                        self.pace(Duration::from_millis(20))
                    } else {
                        // The clock is behind the decided occurrences. It may be corrected at any moment.
                        let wait = Duration::from_micros(wait_us.max(50) as u64);
                        self.pace(wait.min(PACE.1))
                    }
                }
                Target::Scheduled(_) => {
                    self.pace(Duration::from_micros(wait_us.clamp(50, 5_000_000) as u64))
                }
            },
            Answer::Later { wait_ms } => {
                let wait = Duration::from_millis(wait_ms.clamp(1, 30_000) as u64);
                self.until_too_late(info.store_ms, wait)
            }
            // Either the claim was too long on its way, and is sent again, or the clock is in doubt from now on.
            Answer::InDoubt => self.pace(Duration::from_millis(20)),
            _ => self.pace(soon),
        };
        let left = self.times(v).left;
        let wait = wait.min(left.map_or(Duration::MAX, |left| left.max(soon)));
        Step::Rest(wait, waits_for)
    }

    /// The occurrence of [`Step::First`] was decided, or could not be.
    pub fn first_was_decided(&mut self) -> Step {
        Step::Rest(self.pace(Duration::from_millis(1)), Wait::Overlap)
    }

    fn decided(&self, at: Option<Occurrence>, v: &mut View<'_>, effects: &mut Vec<Effect>) {
        if let Some(at) = at {
            effects.push(Effect::Unwatch(at));
            v.subject.decided(at);
        }
        self.forget_claim(v);
    }

    /// This instance remembers the key, in case the store forgets it. `at`: the occurrence, or where the answer does
    /// not name it, the moment of the answer.
    fn trigger_is_decided(&self, at: Occurrence, now_ms: i64, v: &mut View<'_>) {
        if let (Some(key), Subject::Here(job)) = (self.ask.key(), &mut v.subject) {
            job.trigger_is_decided(key, at, now_ms);
        }
    }

    fn forget_claim(&self, v: &mut View<'_>) {
        v.subject.account().forget(&self.ask.target.id());
    }

    /// `wait`, but not past the last moment for a start.
    fn until_too_late(&self, store_ms: i64, wait: Duration) -> Duration {
        match self.ask.start_by.saturating_sub(store_ms) {
            left if left < 0 => wait,
            left => wait.min(Duration::from_millis((left as u64).saturating_add(1))),
        }
    }

    /// How long to wait before asking again: at least `wait`, and each time longer than before when there were several
    /// such answers in a row.
    fn pace(&mut self, wait: Duration) -> Duration {
        let more = self.soon.saturating_sub(PACE.0);
        self.soon = self.soon.saturating_add(1);
        match more {
            0 => wait,
            more => wait.max(backoff::nth(Duration::from_millis(2), more, PACE.1)),
        }
    }
}

/// Where a contest stands in time.
struct Times {
    /// How long until the time of a trigger is over on our own clock.
    left: Option<Duration>,
    /// That time is over.
    passed: bool,
    /// Nobody may start it any more, by the store's clock or by ours.
    too_late: bool,
    /// It is too late, and the store's clock was in doubt at the last moment for a start.
    doubted: bool,
}
