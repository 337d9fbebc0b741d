//! Which attempt follows a run that did not succeed. The store keeps it until an instance claims it.

use super::{
    backoff,
    claim::{DelayedAttempt, OnCrash},
};
use crate::model::{Trigger, job::Job};

/// A fencing token has three digits for the attempt.
const MOST: u32 = 999;

/// After a run whose holder died, or lost its lease.
pub fn after_crash(job: &Job, attempt: u32) -> Option<DelayedAttempt> {
    (job.on_crash == OnCrash::Rerun && attempt < job.max_attempts).then_some(DelayedAttempt {
        delay_ms: 0,
        trigger: Trigger::Takeover,
    })
}

/// After a run whose command failed, or was ended by its timeout.
pub fn after_failure(job: &Job, attempt: u32) -> Option<DelayedAttempt> {
    let retry = job.retry.as_ref()?;
    if attempt > retry.attempts || attempt >= job.max_attempts {
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
