//! Which attempt follows a run that did not succeed. The store keeps it until an instance claims it.

use super::{
    backoff,
    claim::{DelayedAttempt, OnCrash, Open, State},
    guard_life::{Cause, Stop},
};
use crate::model::{Occurrence, Outcome, RunRecord, Trigger, job::Job};

/// A fencing token has three digits for the attempt.
const MOST: u32 = 999;
/// So many attempts of one occurrence may end before their command was started because its start took too long: on a
/// host where every start takes longer than a lease, the occurrences behind it would wait for ever.
const SLOW_STARTS: u32 = 5;

/// What the next attempt depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// No attempt follows.
    End,
    Failure,
    Crash,
    /// The command was not executed, for a reason that has nothing to do with it.
    NoStart,
}

impl After {
    /// `started`: the command was executed, or that is not known.
    pub fn of(outcome: Outcome, cause: Option<Cause>, started: bool) -> Self {
        match (outcome, cause) {
            (_, Some(Cause::GuardGone)) => Self::Crash,
            (Outcome::Crashed | Outcome::LeaseLost, _)
            | (_, Some(Cause::Stopped(Stop::Shutdown))) => match started {
                true => Self::Crash,
                false => Self::NoStart,
            },
            (Outcome::Failed | Outcome::TimedOut, _) => Self::Failure,
            _ => Self::End,
        }
    }

    pub fn next_attempt(self, job: &Job, attempt: u32) -> Option<DelayedAttempt> {
        match self {
            Self::End => None,
            Self::Failure => after_failure(job, attempt),
            Self::Crash => after_crash(job, attempt),
            Self::NoStart if attempt >= SLOW_STARTS => after_crash(job, attempt),
            Self::NoStart => after_no_start(attempt),
        }
    }
}

/// A job that no instance has enabled any more has been so for this time, before its next attempt counts as dropped: an
/// instance that has it all the same says so, ms.
pub const OFF_MS: i64 = 10_000;

/// So long after a run was ended to make room for another one, that one counts as not to come, ms.
const REPLACED_MS: i64 = 60_000;

/// What is known of a job when somebody asks what became of an attempt that another one was to follow.
#[derive(Debug, Clone, Copy)]
pub struct Sight<'a> {
    /// Read before the records were read.
    pub state: Option<&'a State>,
    /// The instance that asks has the job. An instance makes the next attempt also if it has the job disabled.
    pub has: bool,
    /// Unix ms.
    pub now: i64,
}

impl Sight<'_> {
    /// A run of the occurrence goes on, or its next attempt waits for an instance that has the job.
    pub fn is_open(self, at: Occurrence) -> bool {
        let open = self.open(at);
        open.is_some_and(|o| o.next_attempt.is_none() || self.is_had())
    }

    /// Whether the job went on after an attempt, so that its end says nothing any more. `newer`: what was recorded
    /// since. None: the next attempt, or the run that replaces it, is still to come.
    pub fn is_followed(self, newer: &[RunRecord], ended: &RunRecord) -> Option<bool> {
        let (at, attempt) = (ended.occurrence, ended.attempt);
        if ended.outcome == Outcome::Replaced {
            return self.is_replaced(newer, ended);
        }
        if let Some(open) = self.open(at) {
            let waits = open.next_attempt.is_some() && open.run.attempt == attempt;
            return match waits {
                true if self.is_had() => None,
                // It waits in vain.
                true => Some(false),
                false => Some(true),
            };
        }
        // A later occurrence does not follow it, but may have made good for it.
        let follows = |r: &RunRecord| match r.occurrence == at {
            true => r.attempt > attempt,
            false => r.outcome == Outcome::Succeeded,
        };
        Some(newer.iter().any(follows))
    }

    /// The same of a run that another one was to replace.
    fn is_replaced(self, newer: &[RunRecord], ended: &RunRecord) -> Option<bool> {
        let later = |at: Occurrence| at > ended.occurrence;
        let mut open = self.state.iter().flat_map(|st| &st.open);
        if open.any(|o| later(o.run.occurrence)) {
            return Some(true);
        }
        if let Some(r) = newer.iter().find(|r| later(r.occurrence)) {
            return Some(r.attempt > 0);
        }
        let since = ended.finished_at.unwrap_or(self.now);
        (self.now.saturating_sub(since) >= REPLACED_MS).then_some(false)
    }

    fn open(&self, at: Occurrence) -> Option<&Open> {
        self.state?.open.iter().find(|o| o.run.occurrence == at)
    }

    /// Some instance has the job, as far as anybody knows.
    fn is_had(self) -> bool {
        let off = self.state.map_or(0, |st| st.off);
        self.has || off == 0 || self.now.saturating_sub(off) < OFF_MS
    }
}

/// After a run whose holder died, or lost its lease.
fn after_crash(job: &Job, attempt: u32) -> Option<DelayedAttempt> {
    (job.on_crash == OnCrash::Rerun && attempt < job.max_attempts).then_some(DelayedAttempt {
        delay_ms: 0,
        trigger: Trigger::Takeover,
    })
}

/// After a run whose command failed, or was ended by its timeout.
pub fn after_failure(job: &Job, attempt: u32) -> Option<DelayedAttempt> {
    let retry = job.retry.as_ref()?;
    // The configuration allows no fewer `max_attempts` than these.
    if attempt > retry.attempts {
        return None;
    }
    let nth = if retry.exponential { attempt } else { 1 };
    let wait = backoff::nth(retry.interval, nth, retry.max_interval);
    Some(DelayedAttempt {
        delay_ms: wait.as_millis() as i64,
        trigger: Trigger::Retry,
    })
}

/// After a run whose command was never started: the next one repeats nothing, whatever the job says of repeats.
///
/// The next attempt counts as a takeover, because a newer occurrence replaces a waiting retry but not a waiting
/// takeover.
pub fn after_no_start(attempt: u32) -> Option<DelayedAttempt> {
    (attempt < MOST).then_some(DelayedAttempt {
        delay_ms: 0,
        trigger: Trigger::Takeover,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    #[test]
    fn an_attempt_is_followed_by_what_the_store_has_begun_since() {
        use crate::{
            logic::claim::NextAttempt,
            model::{InstanceId, JobName, Run, RunId},
        };
        let (at, later) = (Occurrence(60_000), Occurrence(120_000));
        let open = |at: Occurrence, attempt: u32, waits: bool| Open {
            run: Run {
                occurrence: at,
                attempt,
                trigger: Trigger::Schedule,
                key: None,
                id: RunId(uuid::Uuid::nil()),
                instance: InstanceId::new("a"),
                host: String::new(),
                lease: 15_000,
                definition: String::new(),
                granted_at: at.0,
            },
            seq: 0,
            incarnation: String::new(),
            renewed_at: at.0,
            stop: None,
            next_attempt: waits.then_some(NextAttempt {
                at: at.0,
                trigger: Trigger::Retry,
            }),
        };
        fn sight(state: Option<&State>) -> Sight<'_> {
            Sight {
                state,
                has: false,
                now: 7 + OFF_MS,
            }
        }
        let ended = |outcome| RunRecord {
            attempt: 2,
            finished_at: Some(7),
            ..RunRecord::without_run(&JobName::new("x"), at, Trigger::Retry, outcome)
        };
        let followed = |newer: &[(Occurrence, u32, Outcome)], open: Vec<Open>, off| {
            let state = State {
                open,
                off,
                ..State::default()
            };
            let record = |(at, attempt, outcome)| RunRecord {
                attempt,
                ..RunRecord::without_run(&JobName::new("x"), at, Trigger::Schedule, outcome)
            };
            let newer: Vec<RunRecord> = newer.iter().copied().map(record).collect();
            sight(Some(&state)).is_followed(&newer, &ended(Outcome::Failed))
        };
        let waits = || open(at, 2, true);
        assert_eq!(followed(&[], vec![waits()], 0), None);
        // Nobody has the job; it was cancelled; the store has forgotten it.
        assert_eq!(followed(&[], vec![waits()], 7), Some(false));
        assert_eq!(followed(&[], vec![], 0), Some(false));
        let failed = ended(Outcome::Failed);
        assert_eq!(sight(None).is_followed(&[], &failed), Some(false));
        // Until it is sure that nobody has the job, the next one may come; and an instance that has it disabled makes
        // it, too.
        let off = State {
            open: vec![waits()],
            off: 7,
            ..State::default()
        };
        for (has, now, open) in [(false, 6, true), (false, 7, false), (true, 7, true)] {
            let sight = Sight {
                state: Some(&off),
                has,
                now: now + OFF_MS,
            };
            assert_eq!(sight.is_open(at), open);
            let followed = (!open).then_some(false);
            assert_eq!(sight.is_followed(&[], &failed), followed);
        }
        // A run that another one was to replace: that has begun; it came to no run; it does not come.
        let replaced = ended(Outcome::Replaced);
        let begun = |open| State {
            open,
            ..State::default()
        };
        let newer = |attempt, outcome| RunRecord {
            attempt,
            ..RunRecord::without_run(&JobName::new("x"), later, Trigger::Schedule, outcome)
        };
        for (open, newer, waited, followed) in [
            (vec![open(later, 1, false)], vec![], 0, Some(true)),
            (vec![], vec![newer(1, Outcome::Failed)], 0, Some(true)),
            (vec![], vec![newer(0, Outcome::Missed)], 0, Some(false)),
            (vec![], vec![], REPLACED_MS - 1, None),
            (vec![], vec![], REPLACED_MS, Some(false)),
        ] {
            let state = begun(open);
            let sight = Sight {
                now: 7 + waited,
                ..sight(Some(&state))
            };
            assert_eq!(sight.is_followed(&newer, &replaced), followed);
        }
        // The record of the attempt itself follows nothing.
        for outcome in [Outcome::Failed, Outcome::Succeeded] {
            assert_eq!(followed(&[(at, 2, outcome)], vec![], 0), Some(false));
        }
        // The next attempt goes on, or has ended.
        assert_eq!(followed(&[], vec![open(at, 3, false)], 0), Some(true));
        assert_eq!(followed(&[], vec![open(at, 3, true)], 0), Some(true));
        let newer = open(later, 1, false);
        for outcome in [Outcome::Failed, Outcome::Succeeded, Outcome::Cancelled] {
            let third = (at, 3, outcome);
            assert_eq!(followed(&[third], vec![], 0), Some(true));
            assert_eq!(followed(&[third], vec![newer.clone()], 0), Some(true));
            // A newer occurrence came in its place.
            let succeeded = outcome == Outcome::Succeeded;
            let newer = &[(later, 1, outcome)];
            assert_eq!(followed(newer, vec![], 0), Some(succeeded));
        }
        assert_eq!(followed(&[], vec![newer], 0), Some(false));
    }

    #[test]
    fn what_follows_an_attempt() {
        let stopped = |stop| Some(Cause::Stopped(stop));
        for (outcome, cause, started, expected) in [
            (Outcome::Succeeded, None, true, After::End),
            (Outcome::Failed, None, true, After::Failure),
            (Outcome::Failed, None, false, After::Failure),
            (
                Outcome::TimedOut,
                Some(Cause::Timeout),
                true,
                After::Failure,
            ),
            (
                Outcome::TimedOut,
                Some(Cause::Timeout),
                false,
                After::Failure,
            ),
            (
                Outcome::Crashed,
                Some(Cause::DaemonGone),
                true,
                After::Crash,
            ),
            (
                Outcome::Crashed,
                Some(Cause::DaemonGone),
                false,
                After::NoStart,
            ),
            // Whether the command was executed, only the guard knew.
            (
                Outcome::Crashed,
                Some(Cause::GuardGone),
                false,
                After::Crash,
            ),
            (
                Outcome::LeaseLost,
                Some(Cause::Deadline),
                true,
                After::Crash,
            ),
            (
                Outcome::LeaseLost,
                Some(Cause::Deadline),
                false,
                After::NoStart,
            ),
            (
                Outcome::Cancelled,
                stopped(Stop::Shutdown),
                true,
                After::Crash,
            ),
            (
                Outcome::Cancelled,
                stopped(Stop::Shutdown),
                false,
                After::NoStart,
            ),
            (
                Outcome::Cancelled,
                stopped(Stop::Cancelled),
                true,
                After::End,
            ),
            (
                Outcome::Cancelled,
                stopped(Stop::Cancelled),
                false,
                After::End,
            ),
            (Outcome::Replaced, stopped(Stop::Replaced), true, After::End),
        ] {
            let after = After::of(outcome, cause, started);
            assert_eq!(after, expected, "{outcome} {cause:?} {started}");
        }
    }

    #[test]
    fn a_command_that_was_not_executed_is_tried_again_a_few_times() {
        let next = |lines: &str| {
            let job = job(lines);
            (1..20)
                .take_while(|n| After::NoStart.next_attempt(&job, *n).is_some())
                .count()
        };
        assert_eq!(next(""), 4);
        assert_eq!(next("on_crash = \"rerun\"\nmax_attempts = 9"), 8);
        // A token has room for no more.
        let last = [998, 999].map(|attempt| after_no_start(attempt).is_some());
        assert_eq!(last, [true, false]);
    }

    use super::*;
    use crate::config;

    fn job(lines: &str) -> Arc<Job> {
        let text = format!("store.url = \"memory:\"\n[jobs.a]\ncommand = \"true\"\n{lines}\n");
        let config = config::parse(&text, std::path::Path::new("/jobs.toml"), &|_| None);
        let config = config.unwrap_or_else(|e| panic!("{e}"));
        config.jobs.values().next().expect("a job").clone()
    }

    /// The delay of the next attempt (ms) after each attempt from the first on, until there is none.
    fn delays(job: &Job, after: fn(&Job, u32) -> Option<DelayedAttempt>) -> Vec<i64> {
        let next = (1..20).map_while(|attempt| after(job, attempt));
        next.map(|a| a.delay_ms).collect()
    }

    #[test]
    fn a_failed_command_is_tried_again_as_often_as_it_says() {
        for (lines, wanted) in [
            ("", &[][..]),
            ("retry = { attempts = 0 }", &[]),
            (
                "retry = { attempts = 3, interval = \"1s\", backoff = \"fixed\" }",
                &[1000, 1000, 1000],
            ),
            (
                "retry = { attempts = 4, interval = \"1s\", max_interval = \"5s\" }",
                &[1000, 2000, 4000, 5000],
            ),
            (
                "retry = { attempts = 2, interval = \"1s\" }\nmax_attempts = 5",
                &[1000, 2000],
            ),
        ] {
            assert_eq!(delays(&job(lines), after_failure), wanted, "{lines}");
        }
    }

    #[test]
    fn a_crashed_run_is_taken_over_up_to_the_last_attempt() {
        for (lines, wanted) in [
            ("", 0),
            ("on_crash = \"fail\"\nmax_attempts = 5", 0),
            ("on_crash = \"rerun\"\nmax_attempts = 1", 0),
            ("on_crash = \"rerun\"\nmax_attempts = 4", 3),
        ] {
            let job = job(lines);
            assert_eq!(delays(&job, after_crash), vec![0; wanted], "{lines}");
            let trigger = after_crash(&job, 1).map(|a| a.trigger);
            assert_eq!(trigger, (wanted > 0).then_some(Trigger::Takeover));
        }
    }
}
