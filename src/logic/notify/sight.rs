//! What became of an attempt that another one was to follow, or to replace: whether its end is to be told.

use crate::{
    logic::claim::{Open, State},
    model::{Occurrence, Outcome, RunId, RunRecord},
};

/// A job that no instance has enabled any more has been so for this time, before its next attempt counts as dropped: an
/// instance that has it all the same says so, ms.
pub const OFF_MS: i64 = 10_000;

/// So long after a run was ended to make room for another one, that one counts as not to come, ms.
const REPLACED_MS: i64 = 60_000;

/// A pause that keeps a next attempt from starting for longer than this after it was due holds it back, ms.
const HELD_MS: i64 = 60_000;

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

/// Of the records of a job, newest first, those that are newer than that of this run.
pub fn recorded_since(all: Vec<RunRecord>, run: Option<RunId>) -> Vec<RunRecord> {
    all.into_iter().take_while(|r| r.run_id != run).collect()
}

impl Sight<'_> {
    /// A run of the occurrence goes on, or its next attempt is to start soon: an instance has the job, and no pause
    /// holds the attempt back.
    pub fn is_open(self, at: Occurrence) -> bool {
        let soon = || self.is_had() && !self.is_held_back(at);
        let open = self.open(at);
        open.is_some_and(|o| o.next_attempt.is_none() || soon())
    }

    /// The next attempt of the occurrence is due, and the job is paused: whether and when it comes is up to people, who
    /// have to know of the end that it was to follow.
    pub fn is_held_back(self, at: Occurrence) -> bool {
        let next = self.open(at).and_then(|o| o.next_attempt);
        let pause = self.state.and_then(|st| st.pause.as_ref());
        let (Some(next), Some(pause)) = (next, pause) else {
            return false;
        };
        let for_long = |until: i64| self.now < until && until.saturating_sub(next.at) > HELD_MS;
        self.now >= next.at && pause.until.is_none_or(for_long)
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
                true if self.is_had() && !self.is_held_back(at) => None,
                // It waits in vain, or for long.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        logic::claim::{NextAttempt, Pause},
        model::{JobName, Run, RunId, Trigger},
    };

    #[test]
    fn what_was_recorded_since_a_run_is_what_is_newer() {
        let [first, second, third] = [1, 2, 3].map(|n| Some(RunId(uuid::Uuid::from_u128(n))));
        let record = |run_id| RunRecord {
            run_id,
            ..RunRecord::without_run(
                &JobName::new("x"),
                Occurrence(1),
                Trigger::Schedule,
                Outcome::Failed,
            )
        };
        let since = |run| -> Vec<_> {
            let all = [third, second, first].map(record).to_vec();
            let newer = recorded_since(all, run).into_iter();
            newer.map(|r| r.run_id).collect()
        };
        assert_eq!(since(third), []);
        assert_eq!(since(first), [third, second]);
        assert_eq!(since(Some(RunId(uuid::Uuid::nil()))).len(), 3);
    }

    #[test]
    fn an_attempt_is_followed_by_what_the_store_has_begun_since() {
        let (at, later) = (Occurrence(60_000), Occurrence(120_000));
        let open = |at: Occurrence, attempt: u32, waits: bool| Open {
            run: Run {
                attempt,
                ..Run::first(at.0)
            },
            next_attempt: waits.then_some(NextAttempt {
                at: at.0,
                trigger: Trigger::Retry,
            }),
            ..Open::first(at.0)
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
        // It is due, and a pause holds it back for long.
        let pause = |until| Pause {
            until,
            reason: None,
            at: 0,
            by: None,
        };
        let long = at.0 + HELD_MS + 1;
        for (until, now, held) in [
            (None, at.0 - 1, false),
            (None, at.0, true),
            (Some(long), at.0, true),
            (Some(long), long - 1, true),
            (Some(long), long, false),
            (Some(long - 1), at.0, false),
        ] {
            let mut paused = State {
                open: vec![waits()],
                pause: Some(pause(until)),
                ..State::default()
            };
            let told = |state: &State| {
                let sight = Sight {
                    state: Some(state),
                    has: true,
                    now,
                };
                (sight.is_open(at), sight.is_followed(&[], &failed))
            };
            assert_eq!(
                told(&paused),
                (!held, held.then_some(false)),
                "{until:?} {now}"
            );
            // A run that goes on ends whatever is paused.
            paused.open = vec![open(at, 2, false)];
            assert!(told(&paused).0);
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
}
