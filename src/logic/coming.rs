//! Tells people what comes next of a job: which planned occurrence will run, and which earlier ones will not, and why.
//!
//! An instance decides the occurrences of a job in order, and whatever keeps some of them from running (a pause, a
//! skip) ends some time. So all those that will not run come before the next one that will.

use serde::Serialize;

use super::{belief, claim::State, jitter::jitter_ms, schedule::next_of};
use crate::model::{Occurrence, job::Job};

/// So many skips are counted out. More of them are most likely meant to last until somebody takes them back.
pub const SKIPS_COUNTED: u32 = 1000;

/// Why a planned occurrence will not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub enum PassedOver {
    Disabled,
    Paused,
    Skipped,
    /// It counts as decided already, because the store's clock was wrong.
    Decided,
}

/// What comes next of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Coming {
    /// The next occurrence that will run, without jitter.
    pub next: Option<Occurrence>,
    now: i64,
    disabled: bool,
    /// What starts before this instant is paused.
    paused_until: i64,
    /// What is planned up to here counts as decided.
    decided: i64,
    /// These ran before their time.
    early: Vec<Occurrence>,
}

impl Coming {
    /// `now`: Unix ms of the store's clock.
    pub fn of(job: &Job, state: Option<&State>, now: i64) -> Self {
        let decided = state.map_or(0, |st| st.newest.max(st.since));
        let ahead = decided.saturating_sub(now) > belief::SLACK.as_millis() as i64;
        let pause = state.and_then(|st| st.pause.as_ref());
        let mut coming = Self {
            next: None,
            now,
            disabled: !job.enabled,
            paused_until: pause.map_or(i64::MIN, |p| p.until.unwrap_or(i64::MAX)),
            decided: if ahead { decided } else { i64::MIN },
            early: state.map_or_else(Vec::new, |st| st.early.clone()),
        };
        let skip = state.map_or(0, |st| st.skip);
        if coming.disabled || coming.paused_until == i64::MAX || skip > SKIPS_COUNTED {
            return coming;
        }
        let jitter = i64::try_from(job.jitter.as_millis()).unwrap_or(i64::MAX);
        // Some that are planned before `now` start later.
        let due = now.saturating_sub(jitter).max(decided).min(now);
        let resumed = coming.paused_until.saturating_sub(jitter).saturating_sub(1);
        let after = due.max(resumed).max(coming.decided);
        coming.next = planned(job, Occurrence(after))
            .filter(|o| !coming.early.contains(o) && starts(job, *o) > now)
            .filter(|o| starts(job, *o) >= coming.paused_until)
            .skip(skip as usize)
            .find(|o| o.0 > now);
        coming
    }

    /// Why this planned occurrence will not run. None: it will, or its time has passed.
    pub fn passes_over(&self, job: &Job, o: Occurrence) -> Option<PassedOver> {
        if o.0 <= self.now || self.next.is_some_and(|next| next <= o) {
            return None;
        }
        Some(if self.disabled {
            PassedOver::Disabled
        } else if o.0 <= self.decided || self.early.contains(&o) {
            PassedOver::Decided
        } else if starts(job, o) < self.paused_until {
            PassedOver::Paused
        } else {
            PassedOver::Skipped
        })
    }

    /// The next planned occurrence, if it will not run, and why not.
    pub fn passed_over(&self, job: &Job) -> Option<(Occurrence, PassedOver)> {
        let first = next_of(&job.schedules, Occurrence(self.now))?;
        Some((first, self.passes_over(job, first)?))
    }

    /// Those that will run, in order.
    pub fn runs<'a>(&self, job: &'a Job) -> impl Iterator<Item = Occurrence> + use<'a> {
        let next = self.next.map(|o| Occurrence(o.0 - 1));
        next.into_iter().flat_map(|after| planned(job, after))
    }
}

/// What the schedules have after an instant.
fn planned(job: &Job, after: Occurrence) -> impl Iterator<Item = Occurrence> + use<'_> {
    let next = |o: &Occurrence| next_of(&job.schedules, *o);
    std::iter::successors(next(&after), next)
}

/// When the occurrence is claimed, unless something delays it.
fn starts(job: &Job, o: Occurrence) -> i64 {
    o.0.saturating_add(jitter_ms(job.name.as_str(), o, job.jitter))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logic::claim::Pause;

    const NOON: i64 = 1_795_176_000_000; // 2026-11-20T12:00:00Z
    const HOUR: i64 = 3_600_000;

    fn job(more: &str) -> std::sync::Arc<Job> {
        let text = format!("[jobs.a]\nschedule = '@hourly'\ncommand = 'x'\n{more}\n");
        let config = crate::config::parse(&text, std::path::Path::new("jobs.toml"), &|_| None);
        let config = config.expect("valid");
        config.jobs.values().next().expect("a job").clone()
    }

    fn paused(until: Option<i64>) -> State {
        State {
            pause: Some(Pause {
                until,
                reason: None,
                at: NOON,
                by: None,
            }),
            ..State::default()
        }
    }

    /// The next one that runs, in hours after noon, and what comes before it.
    fn coming(job: &Job, st: &State) -> (Option<i64>, Option<(i64, PassedOver)>) {
        let c = Coming::of(job, Some(st), NOON + 1);
        let hours = |o: Occurrence| (o.0 - NOON) / HOUR;
        let passed = c.passed_over(job).map(|(o, why)| (hours(o), why));
        (c.next.map(hours), passed)
    }

    #[test]
    fn what_comes_next_is_what_will_run() {
        use PassedOver::{Decided, Disabled, Paused, Skipped};
        let job_a = job("");
        let skip = |skip, st: State| State { skip, ..st };
        for (st, next, passed) in [
            (State::default(), Some(1), None),
            (paused(None), None, Some((1, Paused))),
            (paused(Some(NOON + 2 * HOUR)), Some(2), Some((1, Paused))),
            (
                paused(Some(NOON + 2 * HOUR + 1)),
                Some(3),
                Some((1, Paused)),
            ),
            // A pause that is over passes nothing over.
            (paused(Some(NOON)), Some(1), None),
            (skip(2, State::default()), Some(3), Some((1, Skipped))),
            // What is paused does not count as skipped.
            (
                skip(2, paused(Some(NOON + 2 * HOUR))),
                Some(4),
                Some((1, Paused)),
            ),
            (
                skip(SKIPS_COUNTED + 1, State::default()),
                None,
                Some((1, Skipped)),
            ),
            (
                State {
                    newest: NOON + 5 * HOUR,
                    ..State::default()
                },
                Some(6),
                Some((1, Decided)),
            ),
            (
                State {
                    early: vec![Occurrence(NOON + HOUR)],
                    ..State::default()
                },
                Some(2),
                Some((1, Decided)),
            ),
        ] {
            assert_eq!(coming(&job_a, &st), (next, passed), "{st:?}");
        }
        assert_eq!(
            coming(&job("enabled = false"), &State::default()),
            (None, Some((1, Disabled)))
        );
        let c = Coming::of(
            &job_a,
            Some(&skip(1, paused(Some(NOON + 2 * HOUR)))),
            NOON + 1,
        );
        let fates: Vec<_> = (0..5)
            .map(|h| c.passes_over(&job_a, Occurrence(NOON + h * HOUR)))
            .collect();
        assert_eq!(fates, [None, Some(Paused), Some(Skipped), None, None]);
        let runs: Vec<i64> = c
            .runs(&job_a)
            .take(3)
            .map(|o| (o.0 - NOON) / HOUR)
            .collect();
        assert_eq!(runs, [3, 4, 5]);
    }

    #[test]
    fn an_occurrence_that_waits_for_its_jitter_is_the_first_to_be_skipped() {
        let job = job("jitter = '50m'");
        let delay = jitter_ms("a", Occurrence(NOON), job.jitter);
        assert!(delay > 1000, "{delay}");
        let next = |st: &State, now: i64| {
            Coming::of(&job, Some(st), now)
                .next
                .map(|o| (o.0 - NOON) / HOUR)
        };
        let skip = State {
            skip: 1,
            ..State::default()
        };
        assert_eq!(
            next(&skip, NOON + delay - 1),
            Some(1),
            "the one of noon is skipped"
        );
        assert_eq!(next(&skip, NOON + delay), Some(2), "its time has passed");
        let decided = State {
            newest: NOON,
            ..skip.clone()
        };
        assert_eq!(next(&decided, NOON + 1), Some(2), "it is decided");
        // The start counts for a pause, not the planned instant.
        let later = jitter_ms("a", Occurrence(NOON + HOUR), job.jitter);
        assert_eq!(next(&paused(Some(NOON + HOUR + later)), NOON + 1), Some(1));
        assert_eq!(
            next(&paused(Some(NOON + HOUR + later + 1)), NOON + 1),
            Some(2)
        );
    }
}
