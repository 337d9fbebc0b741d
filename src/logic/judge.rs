//! Whether a person should look at a job. The page, `top`, `status`, the metrics and the alerts all say what is judged
//! here. It follows from records alone: a job that goes wrong now and then neither comes nor goes with each run.

use crate::model::{Occurrence, Outcome};

/// So many of its last records tell how a job is.
pub const RECORDS: usize = 24;
/// So many of its last decided occurrences count.
const LAST: usize = 10;
/// If so many of them went wrong, one success makes nothing well.
const WRONG: usize = 2;

/// The states beside the outcomes.
pub const WORDS: &str =
    "unreadable ahead lapsed overdue paused off retry elsewhere new quarantined manual none";

/// What a record says: of an attempt, or of so many occurrences that did not run.
pub type Decided = (Occurrence, Outcome, u64);

/// What is known of a job beside its records.
#[derive(Debug, Default)]
pub struct Facts {
    pub unreadable: bool,
    /// Everything up to an instant in the future counts as decided.
    pub ahead: bool,
    pub lapsed: bool,
    /// Without a success for longer than its `expect_success_within`.
    pub overdue: bool,
    pub paused: bool,
    pub enabled: bool,
    /// The occurrences that run, or wait for their next attempt: they are not decided.
    pub open: Vec<Occurrence>,
    /// One waits for its next attempt.
    pub retries: bool,
    /// Only other instances have it.
    pub elsewhere: bool,
    pub known: bool,
    pub quarantined: bool,
    pub manual: bool,
}

/// The state of a job in a word, and why a person should look at it: as `missed 3 of the last 10`. `records`: newest
/// first.
///
/// Whether it runs now is no part of it. Whoever paused or disabled it knows about it.
pub fn judge(job: &Facts, records: &[Decided]) -> (&'static str, Option<String>) {
    let mut decided: Vec<Decided> = vec![];
    for d in records.iter().filter(|(at, ..)| !job.open.contains(at)) {
        // The last attempt says what became of its occurrence.
        if decided.iter().all(|(at, ..)| *at != d.0) {
            decided.push(*d);
        }
    }
    let well = match decided.first().map(|d| d.1.as_str()) {
        _ if job.retries => "retry",
        None if job.elsewhere => "elsewhere",
        _ if !job.known => "new",
        _ if job.quarantined => "quarantined",
        Some(outcome) => outcome,
        None if job.manual => "manual",
        None => "none",
    };
    let why = |state, why: &str| (state, Some(why.to_owned()));
    match wrong(&decided) {
        _ if job.unreadable => why("unreadable", "cannot be read: see `soloist status`"),
        _ if job.ahead => why("ahead", "it does not start: the store's clock was wrong"),
        _ if job.lapsed => why("lapsed", "nobody renews its lease: its holder may be gone"),
        _ if job.overdue => why("overdue", "no success for too long"),
        _ if job.paused => ("paused", None),
        _ if !job.enabled => ("off", None),
        Some((outcome, words)) => (outcome.as_str(), Some(words)),
        None => (well, None),
    }
}

/// How the newest of these occurrences that went wrong did so, and how many did, if that is reason to look at the job.
/// What people did counts neither way.
fn wrong(decided: &[Decided]) -> Option<(Outcome, String)> {
    let went_wrong = |o: Outcome| o.is_bad() || o == Outcome::Missed;
    let counts = |d: &&Decided| d.1 == Outcome::Succeeded || went_wrong(d.1);
    let counted = decided.iter().filter(counts);
    let each = counted.flat_map(|(_, outcome, n)| (0..(*n).max(1)).map(|_| *outcome));
    let last: Vec<Outcome> = each.take(LAST).collect();
    let bad: Vec<Outcome> = last.iter().copied().filter(|o| went_wrong(*o)).collect();
    if !went_wrong(*last.first()?) && bad.len() < WRONG {
        return None;
    }
    let of = |o: Outcome| match bad.iter().filter(|b| **b == o).count() {
        0 => None,
        n => Some(format!("{} {n}", o.as_str().replace('_', " "))),
    };
    let words: Vec<String> = Outcome::ALL.into_iter().filter_map(of).collect();
    let words = match last.len() {
        1 => last[0].as_str().replace('_', " "),
        all => format!("{} of the last {all}", words.join(", ")),
    };
    Some((bad[0], words))
}

#[cfg(test)]
mod tests {
    use Outcome::{Cancelled, Crashed, Failed, Missed, Replaced, Skipped, Succeeded, TimedOut};

    use super::*;

    fn job() -> Facts {
        Facts {
            enabled: true,
            known: true,
            ..Facts::default()
        }
    }

    /// Occurrences, newest first: the newest is the one at 100.
    fn records(outcomes: &[Outcome]) -> Vec<Decided> {
        let each = (0..).zip(outcomes);
        each.map(|(n, outcome)| (Occurrence(100 - n), *outcome, 1))
            .collect()
    }

    #[test]
    fn a_job_is_judged_by_its_last_ten_decided_occurrences() {
        let (good, bad) = (Succeeded, Failed);
        for (outcomes, state, why) in [
            (&[][..], "none", None),
            (&[good], "succeeded", None),
            (&[bad], "failed", Some("failed")),
            (&[good, bad], "succeeded", None),
            (&[bad, good], "failed", Some("failed 1 of the last 2")),
            (&[good, bad, bad], "failed", Some("failed 2 of the last 3")),
            (
                &[good, Missed, good, Missed],
                "missed",
                Some("missed 2 of the last 4"),
            ),
            (
                &[good, Missed, bad],
                "missed",
                Some("failed 1, missed 1 of the last 3"),
            ),
            (
                &[TimedOut, Crashed],
                "timed_out",
                Some("timed out 1, crashed 1 of the last 2"),
            ),
            // What people did counts neither way, and is no success.
            (&[Cancelled, bad], "failed", Some("failed")),
            (&[Skipped, Replaced, good, bad], "skipped", None),
            (&[Cancelled], "cancelled", None),
        ] {
            let judged = judge(&job(), &records(outcomes));
            assert_eq!(judged, (state, why.map(str::to_owned)), "{outcomes:?}");
        }
        // The eleventh is forgotten.
        let mut long = vec![good; 10];
        long.insert(1, bad);
        long.push(bad);
        assert_eq!(judge(&job(), &records(&long)), ("succeeded", None));
        long.remove(2);
        let why = Some("failed 2 of the last 11".to_owned());
        assert_ne!(judge(&job(), &records(&long)).1, why);
        long.remove(2);
        let why = Some("failed 2 of the last 10".to_owned());
        assert_eq!(judge(&job(), &records(&long)), ("failed", why));
    }

    /// Of `*/15 * * * * *`, `sleep 40`, `overlap = "queue"`, `start_within = "5s"` two of three are missed.
    #[test]
    fn a_job_that_misses_most_is_sick_whatever_it_does_now() {
        let mut now = job();
        let all = [Succeeded, Missed, Missed].repeat(4);
        for from in 0..3 {
            let records = records(&all[from..]);
            for running in [false, true] {
                now.open = vec![Occurrence(101); usize::from(running)];
                let (state, why) = judge(&now, &records);
                assert_eq!(state, "missed", "{from} {running}");
                let why = why.expect("a reason");
                assert!(
                    ["missed 6 of the last 10", "missed 7 of the last 10"].contains(&&*why),
                    "{why}"
                );
            }
        }
    }

    #[test]
    fn the_last_attempt_says_what_became_of_an_occurrence_and_an_open_one_is_not_decided() {
        let attempt = |outcome| (Occurrence(100), outcome, 1);
        let failed = [attempt(Failed), attempt(Failed)];
        let then = [attempt(Succeeded), attempt(Failed), attempt(Failed)];
        assert_eq!(judge(&job(), &then), ("succeeded", None));
        assert_eq!(judge(&job(), &failed).1.as_deref(), Some("failed"));
        let open = || vec![Occurrence(100)];
        let runs = Facts {
            open: open(),
            ..job()
        };
        assert_eq!(judge(&runs, &failed), ("none", None));
        let waits = Facts {
            open: open(),
            retries: true,
            ..job()
        };
        assert_eq!(judge(&waits, &failed), ("retry", None));
    }

    #[test]
    fn a_record_stands_for_as_many_occurrences_as_it_says() {
        let mut of = records(&[Succeeded, Missed, Succeeded]);
        of[1].2 = 500;
        let why = Some("missed 9 of the last 10".to_owned());
        assert_eq!(judge(&job(), &of), ("missed", why));
    }

    #[test]
    fn what_somebody_did_to_a_job_comes_before_its_records_and_what_it_lacks_before_that() {
        let sick = records(&[Failed]);
        let paused = || Facts {
            paused: true,
            ..job()
        };
        for (facts, state, needs) in [
            (paused(), "paused", false),
            (
                Facts {
                    enabled: false,
                    ..job()
                },
                "off",
                false,
            ),
            (
                Facts {
                    lapsed: true,
                    ..paused()
                },
                "lapsed",
                true,
            ),
            (
                Facts {
                    overdue: true,
                    ..paused()
                },
                "overdue",
                true,
            ),
            (
                Facts {
                    ahead: true,
                    lapsed: true,
                    ..job()
                },
                "ahead",
                true,
            ),
            (
                Facts {
                    unreadable: true,
                    ahead: true,
                    ..job()
                },
                "unreadable",
                true,
            ),
            (
                Facts {
                    known: false,
                    ..job()
                },
                "failed",
                true,
            ),
        ] {
            let (is, why) = judge(&facts, &sick);
            assert!(WORDS.split(' ').chain(["failed"]).any(|word| word == is));
            assert_eq!((is, why.is_some()), (state, needs));
        }
        for (facts, state) in [
            (
                Facts {
                    known: false,
                    ..job()
                },
                "new",
            ),
            (
                Facts {
                    quarantined: true,
                    ..job()
                },
                "quarantined",
            ),
            (
                Facts {
                    elsewhere: true,
                    ..job()
                },
                "elsewhere",
            ),
            (
                Facts {
                    manual: true,
                    ..job()
                },
                "manual",
            ),
        ] {
            assert_eq!(judge(&facts, &[]), (state, None));
            assert!(WORDS.split(' ').any(|word| word == state));
        }
    }
}
