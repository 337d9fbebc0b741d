//! Which attempt follows a run that did not succeed. The store keeps it until an instance claims it.

use super::{
    backoff,
    claim::{DelayedAttempt, OnCrash},
    guard_life::{Cause, Stop},
};
use crate::model::{Outcome, Trigger, job::Job};

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
            Self::Crash => after_crash(job.on_crash, job.max_attempts, attempt),
            Self::NoStart => after_unstarted(job.on_crash, job.max_attempts, attempt),
        }
    }
}

/// After a run whose holder died, or lost its lease.
fn after_crash(on_crash: OnCrash, max_attempts: u32, attempt: u32) -> Option<DelayedAttempt> {
    (on_crash == OnCrash::Rerun && attempt < max_attempts).then_some(DelayedAttempt {
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

/// After a run whose holder died, or lost its lease, before the command was started.
pub fn after_unstarted(
    on_crash: OnCrash,
    max_attempts: u32,
    attempt: u32,
) -> Option<DelayedAttempt> {
    match attempt < SLOW_STARTS {
        true => after_no_start(attempt),
        false => after_crash(on_crash, max_attempts, attempt),
    }
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
            let after = |job: &Job, attempt| after_crash(job.on_crash, job.max_attempts, attempt);
            assert_eq!(delays(&job, after), vec![0; wanted], "{lines}");
            let trigger = after(&job, 1).map(|a| a.trigger);
            assert_eq!(trigger, (wanted > 0).then_some(Trigger::Takeover));
        }
    }
}
