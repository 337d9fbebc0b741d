//! What this instance did, counted since it started. HTTP shows it as metrics.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;

use crate::{
    logic::{
        claim::{
            self, Answer, IN_DOUBT, JOB_REMOVED, LAPSED, LOST, NEVER_RENEWED, OVERDUE, OVERLAPS,
            PAUSED, Renewal, TOO_LATE,
        },
        waits::{self, Waits},
    },
    model::{JobName, Outcome, RunRecord, Trigger, Wait},
};

/// Upper ends of the buckets, in seconds.
const LATENESS: [f64; 14] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 60.0, 600.0,
];
const DURATION: [f64; 14] = [
    0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0,
];

const LATE_CAUSES: [&str; 6] = [
    "store_away",
    "slot",
    "overlap",
    "overdue",
    "jitter",
    "other",
];
/// What is not run, and why, in a fleet that works; other pairs are shown once there is one.
const NOT_RUN: [(&str, &str); 14] = [
    ("missed", "clock"),
    ("missed", "job_removed"),
    ("missed", "overdue"),
    ("missed", "overlap"),
    ("missed", "slot"),
    ("missed", "state_loss"),
    ("missed", "store_away"),
    ("missed", "too_late"),
    ("skipped", "overlap"),
    ("skipped", "paused"),
    ("skipped", "skipped"),
    ("skipped", "state_loss"),
    ("unknown", "host_lost"),
    ("unknown", "state_loss"),
];

/// How often a value fell into each bucket.
#[derive(Debug)]
pub struct Histogram<const N: usize> {
    bounds: [f64; N],
    /// The last one has what is above all bounds.
    counts: Mutex<(Vec<u64>, f64)>,
}

impl<const N: usize> Histogram<N> {
    const fn new(bounds: [f64; N]) -> Self {
        Self {
            bounds,
            counts: Mutex::new((vec![], 0.0)),
        }
    }

    fn observe_ms(&self, ms: i64) {
        let seconds = ms.max(0) as f64 / 1000.0;
        let at = self.bounds.partition_point(|bound| *bound < seconds);
        let mut counts = self.counts.lock();
        counts.0.resize(N + 1, 0);
        counts.0[at] += 1;
        counts.1 += seconds;
    }

    /// The sum, the number of values, and how many are in each bucket; the last bucket has no upper end.
    pub fn read(&self) -> (f64, u64, Vec<(f64, u64)>) {
        let counts = self.counts.lock();
        let ends = self.bounds.iter().copied().chain([f64::INFINITY]);
        let all = counts.0.iter().copied().chain(std::iter::repeat(0));
        let buckets: Vec<(f64, u64)> = ends.zip(all).collect();
        let count = buckets.iter().map(|(_, n)| n).sum();
        (counts.1, count, buckets)
    }
}

/// Counts by a word, or by several.
#[derive(Debug)]
pub struct Counts<K>(Mutex<BTreeMap<K, u64>>);

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord + Clone> Counts<K> {
    /// Counts that are shown from the start: whoever reads them sees the step from 0 to 1.
    fn from_zero(keys: impl IntoIterator<Item = K>) -> Self {
        Self(Mutex::new(keys.into_iter().map(|key| (key, 0)).collect()))
    }

    fn add(&self, key: K, n: u64) {
        *self.0.lock().entry(key).or_default() += n;
    }

    pub fn read(&self) -> Vec<(K, u64)> {
        self.0
            .lock()
            .iter()
            .map(|(key, n)| (key.clone(), *n))
            .collect()
    }
}

#[derive(Debug)]
pub struct Figures {
    /// Ended runs of this instance.
    pub runs: Counts<(JobName, &'static str)>,
    /// From the planned instant to the start of first attempts.
    pub lateness: Histogram<14>,
    pub durations: Histogram<14>,
    /// First attempts that started late, by cause.
    pub late: Counts<&'static str>,
    /// Occurrences that this instance recorded as not run: outcome and cause.
    pub not_run: Counts<(&'static str, &'static str)>,
    /// Claims by the store's answer.
    pub claims: Counts<&'static str>,
    /// Renewals by the store's answer.
    pub renewals: Counts<&'static str>,
    /// Runs that took over from a holder that died.
    pub takeovers: AtomicU64,
    /// Leases that this instance lost during a run.
    pub leases_lost: AtomicU64,
    /// Heartbeats that the store did not answer.
    pub heartbeats_failed: AtomicU64,
    /// Spans of runs, by what became of them.
    pub spans: Counts<&'static str>,
    /// What became of tries to deliver messages, by channel.
    pub notifications: Counts<(String, &'static str)>,
}

/// What became of a message that this instance sent.
#[cfg(feature = "notify")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    Sent,
    /// A try.
    Failed,
    /// Nobody was told, and it is not tried again.
    GivenUp,
}

#[cfg(feature = "notify")]
impl Delivery {
    const ALL: [Self; 3] = [Self::Sent, Self::Failed, Self::GivenUp];

    fn as_str(self) -> &'static str {
        match self {
            Self::Sent => "sent",
            Self::Failed => "failed",
            Self::GivenUp => "given_up",
        }
    }
}

impl Default for Figures {
    fn default() -> Self {
        Self {
            runs: Counts::default(),
            lateness: Histogram::new(LATENESS),
            durations: Histogram::new(DURATION),
            late: Counts::from_zero(LATE_CAUSES),
            not_run: Counts::from_zero(NOT_RUN),
            claims: Counts::from_zero(["granted", "running", "settled", "failed"]),
            renewals: Counts::from_zero(["renewed", "lost", "failed"]),
            takeovers: AtomicU64::new(0),
            leases_lost: AtomicU64::new(0),
            heartbeats_failed: AtomicU64::new(0),
            spans: Counts::from_zero(["sent", "refused", "dropped"]),
            notifications: Counts::default(),
        }
    }
}

impl Figures {
    /// A run of this instance has ended.
    pub fn ended(&self, r: &RunRecord) {
        self.runs.add((r.job.clone(), r.outcome.as_str()), 1);
        if r.outcome == Outcome::LeaseLost {
            self.leases_lost.fetch_add(1, Ordering::Relaxed);
        }
        if r.started_at.is_some() {
            if let Some(ms) = r.duration_ms {
                self.durations.observe_ms(ms);
            }
            // Of a trigger the occurrence is when it was claimed; of another attempt it says nothing of its start.
            if let (Some(ms), 1) = (r.lateness_ms, r.attempt)
                && r.trigger != Trigger::Manual
            {
                self.lateness.observe_ms(ms);
            }
        }
    }

    /// There are these channels: they are shown before anything was sent.
    #[cfg(feature = "notify")]
    pub fn channels<'a>(&self, names: impl Iterator<Item = &'a String>) {
        for name in names {
            for of in Delivery::ALL {
                self.notifications.add((name.clone(), of.as_str()), 0);
            }
        }
    }

    #[cfg(feature = "notify")]
    pub fn notification(&self, channel: &str, of: Delivery) {
        let key = (channel.to_owned(), of.as_str());
        self.notifications.add(key, 1);
    }

    /// This instance was granted a run, which has waited for `waits`. `lapsed`: it has seen the lease of the attempt
    /// before lapse. Other takeovers follow what the guard of that attempt, or its instance, told the store.
    pub fn granted(
        &self,
        attempt: u32,
        trigger: Trigger,
        lapsed: bool,
        lateness_ms: i64,
        waits: &Waits,
    ) {
        if trigger == Trigger::Takeover && lapsed {
            self.takeovers.fetch_add(1, Ordering::Relaxed);
        }
        if !waits::need_a_reason(attempt, trigger, Some(lateness_ms)) {
            return;
        }
        let cause = waits.longest().map_or("other", |(wait, _)| wait.as_str());
        self.late.add(cause, 1);
    }

    /// The store answered a claim of this instance, which gives up so many occurrences, because of that wait.
    pub fn claimed(&self, given_up: u64, wait: Option<Wait>, answer: &Answer) {
        let (word, decided) = match answer {
            Answer::Granted(_) => ("granted", true),
            Answer::Running(_) => ("running", false),
            Answer::Blocked(_) => ("blocked", false),
            Answer::Settled(_) => ("settled", false),
            Answer::Early { .. } => ("early", false),
            Answer::Later { .. } => ("later", false),
            Answer::RunFirst(_) => ("run_first", false),
            Answer::Recorded { .. } => ("recorded", true),
            Answer::Behind { .. } => ("behind", false),
            Answer::Quarantined => ("quarantined", false),
            Answer::Absent => ("absent", false),
            Answer::InDoubt => ("in_doubt", false),
        };
        self.claims.add(word, 1);
        if let Answer::Recorded { outcome, reason } = answer {
            self.not_run.add((outcome.as_str(), cause(reason)), 1);
        }
        // The same step records what the claim gives up.
        if decided && given_up > 0 {
            let why = match answer {
                Answer::Recorded { outcome, reason }
                    if matches!(cause(reason), "paused" | "state_loss") =>
                {
                    (outcome.as_str(), cause(reason))
                }
                _ => (
                    Outcome::Missed.as_str(),
                    wait.map_or("overdue", Wait::as_str),
                ),
            };
            self.not_run.add(why, given_up);
        }
    }

    /// This instance recorded so many occurrences as `unknown`, because the store lost its data.
    pub fn lost(&self, n: u64) {
        self.not_run
            .add((Outcome::Unknown.as_str(), cause(LOST)), n);
    }

    /// So many spans were sent, refused by their receiver, or dropped because too many waited.
    #[cfg(feature = "notify")]
    pub(crate) fn spans(&self, what: &'static str, n: u64) {
        self.spans.add(what, n);
    }

    pub fn claim_failed(&self) {
        self.claims.add("failed", 1);
    }

    /// None: the renewal failed.
    pub fn renewed(&self, answer: Option<&Renewal>) {
        let word = match answer {
            Some(Renewal::Renewed(_)) => "renewed",
            Some(Renewal::Lost) => "lost",
            Some(Renewal::Unknown) => "unknown",
            None => "failed",
        };
        self.renewals.add(word, 1);
    }
}

/// One word for the reason of a record.
fn cause(reason: &str) -> &'static str {
    // What it waited for says more than that the time was over.
    let named = |wait: &Wait| {
        let rest = reason.strip_suffix(wait.cause())?.strip_suffix(": ")?;
        [TOO_LATE, OVERDUE].contains(&rest).then_some(wait.as_str())
    };
    if let Some(wait) = Wait::ALL.iter().find_map(named) {
        return wait;
    }
    match reason {
        IN_DOUBT => "clock",
        JOB_REMOVED => "job_removed",
        OVERLAPS => "overlap",
        LOST => "state_loss",
        LAPSED | NEVER_RENEWED => "host_lost",
        reason if reason.starts_with(TOO_LATE) => "too_late",
        reason if reason.starts_with(OVERDUE) => "overdue",
        reason if reason.starts_with(PAUSED) => "paused",
        reason if claim::is_state_loss(reason) => "state_loss",
        reason if reason.starts_with("skipped by request") => "skipped",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_value_is_in_the_first_bucket_that_has_room_for_it() {
        let h = Histogram::new([0.001, 0.01]);
        for ms in [-5, 0, 1, 2, 10, 11, 100_000] {
            h.observe_ms(ms);
        }
        let (sum, count, buckets) = h.read();
        assert_eq!(count, 7);
        assert!((sum - 100.024).abs() < 1e-9, "{sum}");
        let counts: Vec<u64> = buckets.iter().map(|(_, n)| *n).collect();
        assert_eq!(counts, [3, 2, 2]);
        assert_eq!(
            Histogram::new([1.0]).read().2,
            [(1.0, 0), (f64::INFINITY, 0)]
        );
    }

    #[test]
    fn what_a_loss_of_data_leaves_unknown_has_its_cause() {
        let f = Figures::default();
        f.lost(3);
        let of = |pair| f.not_run.read().into_iter().find(|(key, _)| *key == pair);
        assert_eq!(
            of(("unknown", "state_loss")),
            Some((("unknown", "state_loss"), 3))
        );
    }

    #[test]
    fn what_was_missed_has_the_cause_that_its_record_names() {
        let waited = |what: &str| {
            let of = |wait: &Wait| cause(&format!("{what}: {}", wait.cause())) == wait.as_str();
            Wait::ALL.iter().all(of)
        };
        assert!(waited(TOO_LATE) && waited(OVERDUE));
        for (reason, want) in [
            (TOO_LATE, "too_late"),
            (IN_DOUBT, "clock"),
            (OVERDUE, "overdue"),
            (claim::AFTER_LOSS, "state_loss"),
            ("cancelled", "other"),
        ] {
            assert_eq!(cause(reason), want, "{reason}");
        }
    }

    #[test]
    fn what_a_claim_gives_up_has_its_cause() {
        let recorded = |reason: &str| Answer::Recorded {
            outcome: Outcome::Missed,
            reason: reason.to_owned(),
        };
        for (answer, wait, want) in [
            (
                recorded(claim::AFTER_LOSS),
                None,
                ("missed", "state_loss", 4),
            ),
            (recorded(PAUSED), None, ("missed", "paused", 4)),
            (
                recorded(JOB_REMOVED),
                Some(Wait::StoreAway),
                ("missed", "store_away", 3),
            ),
            (recorded(JOB_REMOVED), None, ("missed", "overdue", 3)),
        ] {
            let f = Figures::default();
            f.claimed(3, wait, &answer);
            let (outcome, cause, n) = want;
            let all = f.not_run.read();
            assert!(all.contains(&((outcome, cause), n)), "{answer:?}: {all:?}");
        }
    }

    #[test]
    fn a_late_start_has_one_cause() {
        let f = Figures::default();
        let waits = |all: &[(Wait, u64)]| {
            let mut waits = Waits::default();
            for (wait, s) in all {
                waits.add(*wait, Duration::from_secs(*s));
            }
            waits
        };
        let slot = waits(&[(Wait::Slot, 3), (Wait::StoreAway, 1), (Wait::Overlap, 2)]);
        let none = waits(&[]);
        f.granted(1, Trigger::Schedule, false, 999, &slot);
        f.granted(2, Trigger::Retry, false, 60_000, &none);
        f.granted(1, Trigger::Manual, false, 60_000, &none);
        f.granted(2, Trigger::Takeover, true, 60_000, &none);
        f.granted(2, Trigger::Takeover, false, 60_000, &none);
        let late = || -> Vec<(&str, u64)> {
            let all = f.late.read().into_iter();
            all.filter(|(_, n)| *n > 0).collect()
        };
        assert_eq!((late(), f.takeovers.load(Ordering::Relaxed)), (vec![], 1));
        f.granted(1, Trigger::Schedule, false, 1000, &slot);
        f.granted(1, Trigger::Schedule, false, 1000, &none);
        f.granted(
            1,
            Trigger::CatchUp,
            false,
            1000,
            &waits(&[(Wait::Overdue, 1)]),
        );
        assert_eq!(late(), [("other", 1), ("overdue", 1), ("slot", 1)]);
    }
}
