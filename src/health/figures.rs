//! What this instance did, counted since it started. HTTP shows it as metrics.

use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::{
    logic::{
        claim::{
            self, Answer, IN_DOUBT, JOB_REMOVED, LAPSED, LOST, NEVER_RENEWED, OVERDUE, OVERLAPS,
            PAUSED, Renewal, TOO_LATE,
        },
        delays::{self, Delays},
    },
    model::{Outcome, RunRecord, Trigger, Wait},
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
const NOT_RUN: [(Outcome, &str); 14] = [
    (Outcome::Missed, "clock"),
    (Outcome::Missed, "job_removed"),
    (Outcome::Missed, "overdue"),
    (Outcome::Missed, "overlap"),
    (Outcome::Missed, "slot"),
    (Outcome::Missed, "state_loss"),
    (Outcome::Missed, "store_away"),
    (Outcome::Missed, "too_late"),
    (Outcome::Skipped, "overlap"),
    (Outcome::Skipped, "paused"),
    (Outcome::Skipped, "skipped"),
    (Outcome::Skipped, "state_loss"),
    (Outcome::Unknown, "host_lost"),
    (Outcome::Unknown, "state_loss"),
];

/// Counts by one label, or by several.
type Counts<const N: usize> = Family<[(&'static str, String); N], Counter>;

fn add<const N: usize>(counts: &Counts<N>, labels: [(&'static str, &str); N], n: u64) {
    let labels = labels.map(|(name, value)| (name, value.to_owned()));
    counts.get_or_create(&labels).inc_by(n);
}

fn outcome_and_cause(outcome: Outcome, cause: &str) -> [(&'static str, &str); 2] {
    [("outcome", outcome.as_str()), ("cause", cause)]
}

#[derive(Debug)]
pub struct Figures {
    runs: Counts<2>,
    /// From the planned instant to the start of first attempts.
    lateness: Histogram,
    durations: Histogram,
    late: Counts<1>,
    not_run: Counts<2>,
    claims: Counts<1>,
    renewals: Counts<1>,
    takeovers: Counter,
    leases_lost: Counter,
    pub(super) heartbeats_failed: Counter,
    pub(crate) spans: Counts<1>,
    notifications: Counts<2>,
}

/// What became of a message that this instance sent.
#[cfg(feature = "notify")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    Sent,
    /// A try.
    Failed,
    /// Nobody was told, and it is not tried again.
    GivenUp,
}

#[cfg(feature = "notify")]
impl Told {
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
        let figures = Self {
            runs: Counts::default(),
            lateness: Histogram::new(LATENESS),
            durations: Histogram::new(DURATION),
            late: Counts::default(),
            not_run: Counts::default(),
            claims: Counts::default(),
            renewals: Counts::default(),
            takeovers: Counter::default(),
            leases_lost: Counter::default(),
            heartbeats_failed: Counter::default(),
            spans: Counts::default(),
            notifications: Counts::default(),
        };
        // They are shown from the start: whoever reads them sees the step from 0 to 1.
        let of = |counts, name, words: &[&str]| {
            words
                .iter()
                .for_each(|word| add(counts, [(name, *word)], 0));
        };
        of(&figures.late, "cause", &LATE_CAUSES);
        of(
            &figures.claims,
            "answer",
            &["granted", "running", "settled", "failed"],
        );
        of(&figures.renewals, "answer", &["renewed", "lost", "failed"]);
        of(&figures.spans, "result", &["sent", "refused", "dropped"]);
        for (outcome, cause) in NOT_RUN {
            add(&figures.not_run, outcome_and_cause(outcome, cause), 0);
        }
        figures
    }
}

impl Figures {
    /// Shows them.
    pub fn register(&self, r: &mut Registry) {
        let help = "Runs that ended on this instance, by outcome";
        r.register("runs", help, self.runs.clone());
        let help = "From the planned instant to the start of the command, of first attempts on this instance";
        r.register_with_unit("start_lateness", help, Unit::Seconds, self.lateness.clone());
        let help = "How long runs on this instance took";
        r.register_with_unit("run_duration", help, Unit::Seconds, self.durations.clone());
        let help = "First attempts that started more than a second late on this instance, by cause";
        r.register("late_starts", help, self.late.clone());
        let help = "Occurrences that this instance recorded as not run, by cause";
        r.register("not_run", help, self.not_run.clone());
        let help = "Claims of this instance, by the answer of the store";
        r.register("claims", help, self.claims.clone());
        let help = "Renewals of leases by this instance, by the answer of the store";
        r.register("renewals", help, self.renewals.clone());
        let help = "Runs of this instance that ended because their lease was lost";
        r.register("leases_lost", help, self.leases_lost.clone());
        let help =
            "Occurrences that this instance took over because the lease of another one lapsed";
        r.register("takeovers", help, self.takeovers.clone());
        let help = "Heartbeats of this instance that the store did not answer";
        r.register("heartbeats_failed", help, self.heartbeats_failed.clone());
        let help = "Spans of runs that this instance sent, that were refused, or for which there was no room";
        r.register("spans", help, self.spans.clone());
        let help =
            "Tries of this instance to deliver messages to channels, and messages that it gave up";
        r.register("notifications", help, self.notifications.clone());
    }

    /// A run of this instance has ended.
    pub fn ended(&self, r: &RunRecord) {
        let outcome = ("outcome", r.outcome.as_str());
        add(&self.runs, [("job", r.job.as_str()), outcome], 1);
        if r.outcome == Outcome::LeaseLost {
            self.leases_lost.inc();
        }
        let seconds = |ms: i64| ms.max(0) as f64 / 1000.0;
        if r.started_at.is_some() {
            if let Some(ms) = r.duration_ms {
                self.durations.observe(seconds(ms));
            }
            // Triggers and later attempts have no lateness.
            if let (Some(ms), 1) = (r.lateness_ms, r.attempt)
                && r.trigger != Trigger::Manual
            {
                self.lateness.observe(seconds(ms));
            }
        }
    }

    /// There are these channels: they are shown before anything was sent.
    #[cfg(feature = "notify")]
    pub fn channels<'a>(&self, names: impl Iterator<Item = &'a String>) {
        for name in names {
            for told in Told::ALL {
                let result = ("result", told.as_str());
                add(&self.notifications, [("channel", name), result], 0);
            }
        }
    }

    #[cfg(feature = "notify")]
    pub fn notification(&self, channel: &str, told: Told) {
        let result = ("result", told.as_str());
        add(&self.notifications, [("channel", channel), result], 1);
    }

    /// This instance was granted a run, which has waited for `waits`. `lapsed`: it has seen the lease of the attempt
    /// before lapse. Other takeovers follow what the guard of that attempt, or its instance, told the store.
    pub fn granted(
        &self,
        attempt: u32,
        trigger: Trigger,
        lapsed: bool,
        lateness_ms: i64,
        waits: &Delays,
    ) {
        if trigger == Trigger::Takeover && lapsed {
            self.takeovers.inc();
        }
        if !delays::need_a_reason(attempt, trigger, Some(lateness_ms)) {
            return;
        }
        let cause = waits.longest().map_or("other", |(wait, _)| wait.as_str());
        add(&self.late, [("cause", cause)], 1);
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
        add(&self.claims, [("answer", word)], 1);
        if let Answer::Recorded { outcome, reason } = answer {
            add(&self.not_run, outcome_and_cause(*outcome, cause(reason)), 1);
        }
        // The same step records what the claim gives up.
        if decided && given_up > 0 {
            let (outcome, cause) = match answer {
                Answer::Recorded { outcome, reason }
                    if matches!(cause(reason), "paused" | "state_loss") =>
                {
                    (*outcome, cause(reason))
                }
                _ => (Outcome::Missed, wait.map_or("overdue", Wait::as_str)),
            };
            add(&self.not_run, outcome_and_cause(outcome, cause), given_up);
        }
    }

    /// This instance recorded so many occurrences as `unknown`, because the store lost its data.
    pub fn lost(&self, n: u64) {
        add(
            &self.not_run,
            outcome_and_cause(Outcome::Unknown, cause(LOST)),
            n,
        );
    }

    /// So many spans were sent, refused by their receiver, or dropped because too many waited.
    #[cfg(feature = "notify")]
    pub(crate) fn spans(&self, result: &'static str, n: u64) {
        add(&self.spans, [("result", result)], n);
    }

    pub fn claim_failed(&self) {
        add(&self.claims, [("answer", "failed")], 1);
    }

    /// None: the renewal failed.
    pub fn renewed(&self, answer: Option<&Renewal>) {
        let word = match answer {
            Some(Renewal::Renewed(_)) => "renewed",
            Some(Renewal::Lost) => "lost",
            Some(Renewal::Unknown) => "unknown",
            None => "failed",
        };
        add(&self.renewals, [("answer", word)], 1);
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

    fn count<const N: usize>(counts: &Counts<N>, labels: [(&'static str, &str); N]) -> u64 {
        let labels = labels.map(|(name, value)| (name, value.to_owned()));
        counts.get(&labels).map_or(0, |n| n.get())
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
            let labels = [("outcome", outcome), ("cause", cause)];
            assert_eq!(count(&f.not_run, labels), n, "{answer:?}");
        }
    }

    #[test]
    fn a_late_start_has_one_cause() {
        let f = Figures::default();
        let waits = |all: &[(Wait, u64)]| {
            let mut waits = Delays::default();
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
        let late = || LATE_CAUSES.map(|cause| count(&f.late, [("cause", cause)]));
        assert_eq!((late(), f.takeovers.get()), ([0; 6], 1));
        f.granted(1, Trigger::Schedule, false, 1000, &slot);
        f.granted(1, Trigger::Schedule, false, 1000, &none);
        f.granted(
            1,
            Trigger::CatchUp,
            false,
            1000,
            &waits(&[(Wait::Overdue, 1)]),
        );
        assert_eq!(late(), [0, 1, 0, 1, 0, 1]);
    }
}
