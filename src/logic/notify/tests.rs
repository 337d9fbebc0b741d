//! The rules of notifications by examples, and the protocol of notifiers in random orders of a few steps.

use std::time::Duration;

use super::{
    lease::{LENGTH, Lease, Role, TRUST, Write, allows},
    *,
};
use crate::{
    logic::claim::{NextAttempt, Open},
    model::{Boottime, InstanceId, RunId},
};
use Outcome::{Cancelled, Failed, Missed, Replaced, Skipped, Succeeded, TimedOut};

const ALL: [Kind; 10] = [
    Kind::Failed,
    Kind::TimedOut,
    Kind::Crashed,
    Kind::Unknown,
    Kind::LeaseLost,
    Kind::Missed,
    Kind::Late,
    Kind::TooLong,
    Kind::TooShort,
    Kind::Recovered,
];

fn rules(on: &[Kind], after: u32) -> Rules {
    Rules {
        on: on.iter().copied().collect(),
        after,
        late_after_ms: 10_000,
    }
}

/// The record of a run that ended at `at` s and took `took` ms.
fn ended(at: i64, outcome: Outcome, took: i64) -> RunRecord {
    let job = JobName::new("x");
    let at = at * 1000;
    let r = RunRecord::without_run(&job, Occurrence(at), Trigger::Schedule, outcome);
    let r = r.lasting(Some(at), Some(at + took));
    RunRecord {
        run_id: Some(RunId(uuid::Uuid::from_u128(at as u128))),
        attempt: 1,
        ..r
    }
}

/// What a channel is told of runs that end at these seconds, with when it is told; until `end`.
fn told(rules: &Rules, runs: &[(i64, Outcome)], end: i64) -> Vec<(i64, Item)> {
    let (mut notes, mut out) = (Notes::new(0), vec![]);
    let channels = [("ops", rules)];
    for now in 0..=end {
        let items = notes.time_passes(&JobName::new("x"), &channels, None, now * 1000);
        out.extend(items.into_iter().map(|(_, item)| (now, item)));
        for (_, outcome) in runs.iter().filter(|(at, _)| *at == now) {
            let items = notes.judge(&channels, &ended(now, *outcome, 5), now * 1000);
            out.extend(items.into_iter().map(|(_, item)| (now, item)));
        }
    }
    out
}

fn kinds(told: &[(i64, Item)]) -> Vec<(i64, Kind)> {
    told.iter().map(|(at, item)| (*at, item.kind)).collect()
}

#[test]
fn only_a_change_of_state_is_told() {
    let runs = [
        (1, Succeeded),
        (2, Failed),
        (3, Failed),
        (4, TimedOut),
        (5, Cancelled),
        (6, Skipped),
        (7, Succeeded),
        (8, Succeeded),
    ];
    let told = told(&rules(&ALL, 1), &runs, 200);
    assert_eq!(kinds(&told), [(2, Kind::Failed), (7, Kind::Recovered)]);
    let recovered = &told[1].1;
    assert_eq!((recovered.streak, recovered.since), (3, 2005));
}

#[test]
fn a_channel_is_told_what_it_wants() {
    let runs = [(1, Missed), (100, Failed), (200, Succeeded), (300, Failed)];
    let of = |on: &[Kind], after| kinds(&told(&rules(on, after), &runs, 400));
    assert_eq!(
        of(&[Kind::Failed], 1),
        [(100, Kind::Failed), (300, Kind::Failed)]
    );
    assert_eq!(
        of(&[Kind::Missed, Kind::Recovered], 1),
        [(1, Kind::Missed), (200, Kind::Recovered)]
    );
    // Two in a row of either kind.
    assert_eq!(
        of(&[Kind::Missed, Kind::Failed, Kind::Recovered], 2),
        [(100, Kind::Failed), (200, Kind::Recovered)]
    );
}

#[test]
fn each_bad_outcome_has_its_kind() {
    for (outcome, kind) in [
        (Outcome::Crashed, Kind::Crashed),
        (Outcome::Unknown, Kind::Unknown),
        (Outcome::LeaseLost, Kind::LeaseLost),
        (TimedOut, Kind::TimedOut),
    ] {
        let of = |on: &[Kind]| kinds(&told(&rules(on, 1), &[(1, outcome)], 2));
        assert_eq!(of(&ALL), [(1, kind)]);
        let others: Vec<Kind> = ALL.into_iter().filter(|other| *other != kind).collect();
        assert_eq!(of(&others), []);
    }
}

/// Fails and succeeds in turn: six changes are told in an hour, and then how the job is.
#[test]
fn a_job_that_keeps_changing_is_told_six_times_an_hour() {
    let turns = |n: i64| -> Vec<(i64, Outcome)> {
        let outcome = |s: i64| if s % 2 == 1 { Failed } else { Succeeded };
        (1..=n).map(|s| (s, outcome(s))).collect()
    };
    let all = told(&rules(&ALL, 1), &turns(99), 10_000);
    let (first, later) = all.split_at(HOURLY);
    assert!(first.iter().map(|(at, _)| *at).eq(1..=6));
    let quiet: Vec<_> = first.iter().map(|(_, item)| item.quiet_until).collect();
    let until = Some(3_601_000);
    assert_eq!(quiet, [None, None, None, None, None, until]);
    // It is bad since, and that is not what was told last.
    assert_eq!(kinds(later), [(3601, Kind::Failed)]);
    assert_eq!(later[0].1.changes, 93);
    // If it is as it was told, nothing is told.
    assert_eq!(told(&rules(&ALL, 1), &turns(100), 10_000).len(), HOURLY);
}

/// The first says that nobody knows how it ended, the second how it did.
#[test]
fn two_records_of_one_run_are_one_bad_end() {
    let twice = rules(&ALL, 2);
    let mut notes = Notes::new(0);
    let mut told = |at, outcome| {
        let items = notes.judge(&[("ops", &twice)], &ended(at, outcome, 5), 99_000);
        items.len()
    };
    assert_eq!((told(1, Outcome::Unknown), told(1, Failed)), (0, 0));
    assert_eq!(told(2, Failed), 1);
}

/// It was told beyond the six.
#[test]
fn the_end_of_an_overdue_job_is_told_however_often_it_changes() {
    let (rules, job) = (rules(&ALL, 1), JobName::new("x"));
    let channels = [("ops", &rules)];
    let mut notes = Notes::new(0);
    for s in 1..=6 {
        let outcome = if s % 2 == 1 { Failed } else { Succeeded };
        assert_eq!(
            notes
                .judge(&channels, &ended(s, outcome, 5), s * 1000)
                .len(),
            1
        );
    }
    let overdue = notes.time_passes(&job, &channels, Some(5000), 60_000);
    assert_eq!(overdue[0].1.kind, Kind::Overdue);
    for (s, outcome) in [(61, Succeeded), (62, Failed), (63, Succeeded)] {
        assert!(
            notes
                .judge(&channels, &ended(s, outcome, 5), s * 1000)
                .is_empty()
        );
    }
    assert!(notes.is_due(&channels, None, 3_700_000) && !notes.is_due(&[], None, 3_700_000));
    let told = notes.time_passes(&job, &channels, None, 3_700_000);
    assert_eq!(told[0].1.kind, Kind::Recovered);
}

/// With `overlap = "allow"` an older run may end after a newer one.
#[test]
fn an_older_run_that_ends_late_does_not_make_a_newer_bad_end_good() {
    let all = rules(&ALL, 1);
    let mut notes = Notes::new(0);
    let mut kinds = |at, outcome| {
        let items = notes.judge(&[("ops", &all)], &ended(at, outcome, 5), 99_000);
        items.iter().map(|(_, i)| i.kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(30, Failed), [Kind::Failed]);
    assert_eq!(kinds(15, Succeeded), []);
    assert_eq!(kinds(45, Succeeded), [Kind::Recovered]);
}

#[test]
fn no_success_for_too_long_is_told_once_and_a_success_ends_it() {
    let (rules, job) = (rules(&ALL, 1), JobName::new("x"));
    let channels = [("ops", &rules)];
    for fails in [false, true] {
        let (mut notes, within) = (Notes::new(0), Some(5000));
        assert!(!notes.is_due(&channels, within, 4999) && notes.is_due(&channels, within, 5000));
        assert!(notes.time_passes(&job, &channels, within, 4999).is_empty());
        let late = notes.time_passes(&job, &channels, within, 5000);
        assert_eq!((late[0].1.kind, late.len()), (Kind::Overdue, 1));
        assert!(late[0].1.never && late[0].1.bad);
        assert!(notes.time_passes(&job, &channels, within, 9000).is_empty());
        // A failure is told beside it.
        if fails {
            let failed = notes.judge(&channels, &ended(10, Failed, 5), 10_000);
            assert_eq!(failed[0].1.kind, Kind::Failed);
        }
        let good = notes.judge(&channels, &ended(100, Succeeded, 5), 100_000);
        assert_eq!((good[0].1.kind, good.len()), (Kind::Recovered, 1));
        assert!(
            !notes.is_due(&channels, within, 105_004) && notes.is_due(&channels, within, 105_005)
        );
    }
}

#[test]
fn what_is_unusual_is_told_to_those_who_want_it() {
    let all = rules(&ALL, 1);
    let usual = rules(&[Kind::Failed, Kind::Recovered], 1);
    let of = |rules: &Rules, took: i64| {
        let mut notes = Notes::new(0);
        let mut judge = |at, took| {
            let r = ended(at, Succeeded, took);
            notes.judge(&[("ops", rules)], &r, 0)
        };
        (1..=9).for_each(|n| drop(judge(n, 60_000)));
        judge(99, took).first().map(|(_, i)| (i.kind, i.expected))
    };
    assert_eq!(of(&all, 180_000), None);
    assert_eq!(of(&all, 180_001), Some((Kind::TooLong, Some(60_000))));
    assert_eq!(of(&all, 19_999), Some((Kind::TooShort, Some(60_000))));
    assert_eq!(of(&usual, 999_000), None);
    let late = |lateness, trigger, attempt| {
        let r = RunRecord {
            lateness_ms: Some(lateness),
            trigger,
            attempt,
            ..ended(1, Succeeded, 5)
        };
        complaint(&r, &all, None)
    };
    assert_eq!(late(9_999, Trigger::Schedule, 1), None);
    let told = Some((Kind::Late, Some(10_000)));
    assert_eq!(late(10_000, Trigger::Schedule, 1), told);
    // A run that people started has no planned instant, and another attempt is planned anew.
    assert_eq!(late(10_000, Trigger::Manual, 1), None);
    assert_eq!(late(10_000, Trigger::Retry, 2), None);
}

#[test]
fn records_are_judged_once_also_when_another_replaces_one() {
    let mut notes = Notes::new(0);
    let records: Vec<RunRecord> = (1..=9).rev().map(|n| ended(n, Succeeded, 1)).collect();
    assert_eq!(notes.unseen(&records), None);
    let oldest_first: Vec<RunRecord> = records.iter().rev().cloned().collect();
    assert_eq!(notes.take_in(oldest_first, None).len(), 9);
    assert_eq!(notes.unseen(&records), Some(0));
    // The true record of the newest run takes the place of an earlier one.
    let mut other = records.clone();
    other[0] = ended(9, Failed, 1);
    assert_eq!(notes.unseen(&other), Some(1));
}

fn item(job: &str, kind: Kind) -> Item {
    Item::new(JobName::new(job), kind, kind != Kind::Recovered, 0)
}

#[test]
fn what_happens_together_is_one_message_of_bounded_size() {
    let item = |n: u32| item(&format!("j{n}"), Kind::Failed);
    let mut m = Message::new(item(0), "ops", 0);
    for n in 1..1000 {
        assert!(m.takes("ops") && !m.takes("other"));
        m.join(item(n), i64::from(n));
    }
    assert_eq!(
        (m.items.len(), m.others.len(), m.more, m.due),
        (ITEMS, NAMES, 880, 2999)
    );
    m.join(item(1), 9_999);
    assert_eq!(m.due, JOIN_MOST_MS);
    m.tries = 1;
    assert!(!m.takes("ops"), "its receiver may have had it");
    (m.tries, m.sending) = (0, true);
    assert!(!m.takes("ops"));
    (m.sending, m.perhaps_sent) = (false, true);
    assert!(!m.takes("ops"), "another notifier was sending it");
}

#[test]
fn what_was_given_up_is_remembered_within_bounds() {
    let mut m = Message::new(item(&"x".repeat(100), Kind::LeaseLost), &"c".repeat(100), 0);
    for n in 1..1000 {
        m.join(item(&format!("{n:0>100}"), Kind::LeaseLost), 0);
    }
    let why = "\"".repeat(10_000);
    let one = |at: i64| GivenUp::new("1790000000000-01234567", &m, &why, at);
    assert_eq!(one(0).about.len() as u64 + one(0).more, 1000);
    let mut known = vec![];
    (0..1000).for_each(|at| remember(&mut known, one(at)));
    assert!(known.iter().map(|g| g.at).eq(980..1000));
    remember(&mut known, one(990 + FORGET_MS));
    assert_eq!(known.len(), 10);
}

fn open(at: i64) -> Open {
    Open::first(at)
}

/// An attempt that another one was to follow is the last one if that is dropped: a newer occurrence replaced it, or a
/// person cancelled it.
#[test]
fn an_attempt_is_told_once_nothing_follows_it() {
    let attempt = |at: i64, attempt: u32, outcome| RunRecord {
        attempt,
        run_id: Some(RunId(uuid::Uuid::from_u128(
            at as u128 * 10 + u128::from(attempt),
        ))),
        ..ended(at, outcome, 5)
    };
    let state = |at: &[i64]| State {
        open: at.iter().map(|at| open(at * 1000)).collect(),
        ..State::default()
    };
    let look = |notes: &mut Notes, new: &[RunRecord], at: &[i64]| -> Vec<(i64, u32)> {
        // Another notifier may go on.
        let text = serde_json::to_string(notes).expect("JSON");
        *notes = serde_json::from_str(&text).expect("notes");
        let ends = notes.take_in(new.to_vec(), Some(&state(at))).into_iter();
        ends.map(|r| (r.occurrence.0 / 1000, r.attempt)).collect()
    };
    let awaiting = || {
        let mut notes = Notes::new(0);
        assert_eq!(look(&mut notes, &[attempt(1, 1, Failed)], &[1]), []);
        assert_eq!(look(&mut notes, &[], &[1]), []);
        notes
    };
    // Cancelled: once.
    let mut notes = awaiting();
    assert_eq!(look(&mut notes, &[], &[]), [(1, 1)]);
    assert_eq!(look(&mut notes, &[], &[]), []);
    // A newer occurrence came in its place, which goes on, or has ended; its record may be that of the next attempt.
    assert_eq!(look(&mut awaiting(), &[], &[2]), [(1, 1)]);
    let second = [attempt(2, 1, Succeeded)];
    assert_eq!(look(&mut awaiting(), &second, &[]), [(1, 1), (2, 1)]);
    let replaced = [attempt(1, 2, Replaced)];
    assert_eq!(look(&mut awaiting(), &replaced, &[]), [(1, 1), (1, 2)]);
    // While the first waits, others are told.
    assert_eq!(look(&mut awaiting(), &second, &[1]), [(2, 1)]);
    // The next attempt has ended: the last one counts.
    for outcome in [Failed, Succeeded, Cancelled] {
        let next = [attempt(1, 2, outcome)];
        assert_eq!(look(&mut awaiting(), &next, &[]), [(1, 2)]);
    }
    let both = [attempt(1, 1, Failed), attempt(1, 2, Failed)];
    assert_eq!(look(&mut Notes::new(0), &both, &[]), [(1, 2)]);
}

/// A job with retries, and a notifier that looks at it at any moment, between whose reads anything may happen, and that
/// another one follows now and then. In the end each change between good and bad was told once, in order.
// Long: one block for each kind of event.
#[test]
fn each_change_of_a_job_is_told_once_whenever_the_notifier_looks() {
    struct World {
        now: i64,
        attempt: u32,
        state: State,
        /// Newest first, as the store has them.
        records: Vec<RunRecord>,
        /// What its occurrences were, as far as they count.
        ends: Vec<Kind>,
        /// A bad end that counts unless its next attempt says otherwise.
        pending: bool,
    }
    impl World {
        fn count(&mut self, ends: Option<Kind>) {
            self.pending = false;
            self.ends.extend(ends);
        }
        fn happens(&mut self, random: &mut fastrand::Rng) {
            self.now += 3_600_000;
            let now = self.now;
            match self.state.open.first().cloned() {
                Some(o) if o.next_attempt.is_none() => {
                    let outcomes = [Failed, Failed, Succeeded, Cancelled, Replaced];
                    let outcome = outcomes[random.usize(..outcomes.len())];
                    let again = outcome == Failed && random.bool();
                    self.records.insert(
                        0,
                        RunRecord {
                            occurrence: o.run.occurrence,
                            attempt: self.attempt,
                            ..ended(now / 1000, outcome, 5)
                        },
                    );
                    match outcome {
                        Failed if again => self.pending = true,
                        Failed => self.count(Some(Kind::Failed)),
                        Succeeded => self.count(Some(Kind::Recovered)),
                        // A person ended it: that counts, and is neither good nor bad.
                        Cancelled => self.count(None),
                        _ => self.count(self.pending.then_some(Kind::Failed)),
                    }
                    let next_attempt = Some(NextAttempt {
                        at: now,
                        trigger: Trigger::Retry,
                    });
                    self.state.open = match again {
                        true => vec![Open { next_attempt, ..o }],
                        false => vec![],
                    };
                }
                Some(o) if random.bool() => {
                    self.attempt += 1;
                    let next_attempt = None;
                    self.state.open = vec![Open { next_attempt, ..o }];
                }
                // Cancelled; or a newer occurrence comes first.
                Some(_) => {
                    self.count(self.pending.then_some(Kind::Failed));
                    self.state.open = vec![];
                }
                None => {
                    self.attempt = 1;
                    self.state.open = vec![open(now)];
                }
            }
        }
    }
    let rules = rules(&ALL, 1);
    let mut changes = 0;
    for seed in 0..3000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut w = World {
            now: 0,
            attempt: 1,
            state: State::default(),
            records: vec![],
            ends: vec![],
            pending: false,
        };
        let (mut notes, mut told) = (Notes::new(0), vec![]);
        // So slow that each change is told.
        let mut clock = 0;
        for step in 0..40 {
            let last = step >= 38;
            // As the notifier does it: records, the state, records again.
            let unseen = |w: &World, notes: &Notes| -> Vec<RunRecord> {
                let n = notes.unseen(&w.records).unwrap_or(w.records.len());
                w.records.iter().take(n).rev().cloned().collect()
            };
            let meanwhile = |w: &mut World, random: &mut fastrand::Rng| {
                while !last && random.u8(..3) == 0 {
                    w.happens(random);
                }
            };
            meanwhile(&mut w, &mut random);
            let first = unseen(&w, &notes);
            meanwhile(&mut w, &mut random);
            let state = w.state.clone();
            meanwhile(&mut w, &mut random);
            if unseen(&w, &notes) != first {
                continue;
            }
            for r in notes.take_in(first, Some(&state)) {
                clock += HOUR_MS;
                let items = notes.judge(&[("ops", &rules)], &r, clock);
                told.extend(items.iter().map(|(_, i)| i.kind));
            }
            let text = serde_json::to_string(&notes).expect("JSON");
            notes = serde_json::from_str(&text).expect("notes");
        }
        // What may still be followed is not told yet.
        let mut wanted = vec![Kind::Recovered];
        wanted.extend(w.ends);
        wanted.dedup_by_key(|kind| *kind == Kind::Recovered);
        assert_eq!(told, wanted[1..], "seed {seed}: {:#?}", w.records);
        changes += told.len();
    }
    assert!(changes > 3000, "{changes}");
}

/// A store, notifiers, and one message, in random orders of what may happen. A notifier may be killed at any moment, its
/// requests may arrive late or twice, and its replies may be lost.
mod protocol {
    use super::*;

    /// Seconds.
    const STEP: u64 = 10;
    const END: u64 = 60;

    #[derive(Debug, Clone)]
    struct One {
        alive: bool,
        role: Role,
        /// As the store answered it: the message, and that somebody was sending it.
        message: Option<bool>,
        /// It has the message on its way to the channel.
        sending: bool,
        /// Its request that has no answer yet, with when it left, and whether the store made the write, if it came there.
        asked: Option<(Write2, u64, Option<bool>)>,
    }

    /// A write, with what it makes of the message.
    #[derive(Debug, Clone)]
    struct Write2 {
        was: Option<String>,
        lease: Lease,
        message: Becomes,
    }

    #[derive(Debug, Clone, Copy)]
    enum Becomes {
        Same,
        Sending,
        Gone,
    }

    #[derive(Debug, Clone)]
    struct World {
        now: u64,
        lease: Option<String>,
        /// None: it was sent. Some(true): somebody is sending it.
        message: Option<bool>,
        all: Vec<One>,
        /// Requests whose sender no longer waits: they may still arrive.
        late: Vec<Write2>,
        /// How often the channel got it, and whether each said that it may be a repetition.
        got: Vec<bool>,
        /// A notifier began to send while another one was sure to be it.
        together: bool,
        kills: u32,
        losses: u32,
    }

    fn at(s: u64) -> Boottime {
        Boottime(s * 1_000_000_000)
    }

    /// What a broken notifier does.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Broken {
        Nothing,
        /// The store makes any write.
        NoCompare,
        /// It sends without a mark.
        NoMark,
        /// It relies on its lease for ever.
        NoTrust,
        /// It forgets that somebody was sending.
        NoRepetition,
    }

    impl World {
        fn new(n: usize) -> Self {
            Self {
                now: 0,
                lease: None,
                message: Some(false),
                all: vec![
                    One {
                        alive: true,
                        role: Role::new(),
                        message: None,
                        sending: false,
                        asked: None,
                    };
                    n
                ],
                late: vec![],
                got: vec![],
                together: false,
                kills: 0,
                losses: 0,
            }
        }

        /// The store makes a write, or not.
        fn arrives(&mut self, w: &Write2, broken: Broken) -> bool {
            let write = Write {
                was: w.was.clone(),
                lease: w.lease.text(),
                ..Write::default()
            };
            if broken != Broken::NoCompare && !allows(self.lease.as_deref(), &write) {
                return false;
            }
            self.lease = Some(write.lease);
            match w.message {
                Becomes::Same => {}
                Becomes::Sending => self.message = self.message.map(|_| true),
                Becomes::Gone => self.message = None,
            }
            true
        }

        /// All that may come next.
        // Long: one block for each kind of event.
        fn next(&self, broken: Broken) -> Vec<Self> {
            let mut out = vec![];
            let mut step = |f: &mut dyn FnMut(&mut Self)| {
                let mut w = self.clone();
                f(&mut w);
                out.push(w);
            };
            if self.now < END {
                step(&mut |w| w.now += STEP);
            }
            for n in 0..self.late.len() {
                step(&mut |w| {
                    let write = w.late.remove(n);
                    w.arrives(&write, broken);
                });
            }
            for (n, one) in self.all.iter().enumerate().filter(|(_, one)| one.alive) {
                let now = at(self.now);
                if self.kills < 1 {
                    step(&mut |w| {
                        w.kills += 1;
                        let one = &mut w.all[n];
                        one.alive = false;
                        // What it sends may still arrive there, or not.
                        let asked = one.asked.take();
                        let open = asked.filter(|(.., arrived)| arrived.is_none());
                        w.late.extend(open.map(|(write, ..)| write));
                    });
                }
                if one.sending {
                    let repeats = one.message == Some(true) && broken != Broken::NoRepetition;
                    step(&mut |w| {
                        w.all[n].sending = false;
                        w.got.push(repeats);
                        w.ask(n, Becomes::Gone, broken);
                    });
                    continue;
                }
                if let Some((write, sent, Some(done))) = &one.asked {
                    step(&mut |w| w.answered(n, write, *sent, *done, broken));
                    continue;
                }
                if let Some((write, sent, None)) = &one.asked {
                    // It arrives; or the answer is lost, after the store made the write or before.
                    step(&mut |w| {
                        let done = w.arrives(write, broken);
                        w.all[n].asked = Some((write.clone(), *sent, Some(done)));
                    });
                    if self.losses < 1 {
                        step(&mut |w| {
                            w.losses += 1;
                            w.arrives(write, broken);
                            w.late.push(write.clone());
                        });
                        step(&mut |w| {
                            w.losses += 1;
                            w.late.push(write.clone());
                        });
                    }
                    continue;
                }
                match &one.role {
                    Role::Follower { .. } => step(&mut |w| {
                        let lease = w.lease.clone();
                        let one = &mut w.all[n];
                        one.role.saw(lease, now);
                        let me = InstanceId::new(&n.to_string());
                        if let Some(lease) = one.role.may_take(&me, n as u64, now) {
                            let write = Write2 {
                                was: one.role.known(),
                                lease,
                                message: Becomes::Same,
                            };
                            one.asked = Some((write, w.now, None));
                        }
                    }),
                    Role::Notifier { .. } => {
                        if one.message.is_some() && self.trusts(n, broken) {
                            step(&mut |w| match broken {
                                Broken::NoMark => w.all[n].sending = true,
                                _ => w.ask(n, Becomes::Sending, broken),
                            });
                        }
                        step(&mut |w| w.ask(n, Becomes::Same, broken));
                    }
                }
            }
            out
        }

        fn trusts(&self, n: usize, broken: Broken) -> bool {
            broken == Broken::NoTrust || self.all[n].role.trusts(at(self.now))
        }

        fn ask(&mut self, n: usize, message: Becomes, broken: Broken) {
            let trusts = self.trusts(n, broken);
            let one = &mut self.all[n];
            let lease = match (&one.role, trusts) {
                (Role::Notifier { lease, .. }, true) => Lease {
                    seq: lease.seq + 1,
                    ..lease.clone()
                },
                _ => {
                    one.role = Role::new();
                    return;
                }
            };
            let write = Write2 {
                was: one.role.known(),
                lease,
                message,
            };
            one.asked = Some((write, self.now, None));
        }

        fn answered(&mut self, n: usize, write: &Write2, sent: u64, done: bool, broken: Broken) {
            let message = self.message;
            let one = &mut self.all[n];
            one.asked = None;
            if !done {
                one.role = Role::new();
                one.message = None;
                return;
            }
            let new = !matches!(one.role, Role::Notifier { .. });
            one.role.wrote(write.lease.clone(), at(sent));
            if new {
                one.message = message;
            }
            match write.message {
                Becomes::Same => {}
                Becomes::Sending => {
                    // Only as long as nobody else can be the notifier.
                    one.sending = broken == Broken::NoTrust || one.role.trusts(at(self.now));
                    let sending = one.sending;
                    let others = self.all.iter().enumerate().filter(|(m, _)| *m != n);
                    let mut sure = others.filter(|(_, o)| o.alive && o.role.trusts(at(self.now)));
                    self.together |= sending && sure.next().is_some();
                }
                Becomes::Gone => one.message = None,
            }
        }

        /// What is wrong here, if something is.
        fn wrong(&self) -> Option<String> {
            let now = at(self.now);
            let sure = self.all.iter().filter(|o| o.alive && o.role.trusts(now));
            if sure.count() > 1 {
                return Some("two notifiers at one time".to_owned());
            }
            if self.together {
                return Some("two send at one time".to_owned());
            }
            if self.message.is_none() && self.got.is_empty() {
                return Some("the message is lost".to_owned());
            }
            // One of them may come late, from a notifier that slept: that one does not know.
            if self.got.iter().filter(|repeats| !**repeats).count() > 1 {
                return Some("a repetition does not say so".to_owned());
            }
            None
        }
    }

    /// What goes wrong first in many random ways through these worlds.
    fn walk(n: usize, broken: Broken, ways: u64) -> Option<String> {
        for seed in 0..ways {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut w = World::new(n);
            for _ in 0..80 {
                if let Some(wrong) = w.wrong() {
                    return Some(format!("{wrong}, seed {seed}: {w:#?}"));
                }
                let Some(next) = random.choice(w.next(broken)) else {
                    break;
                };
                // Rarely, so that some ways are long.
                let harm = next.kills > w.kills || next.losses > w.losses;
                if !harm || random.u8(..20) == 0 {
                    w = next;
                }
            }
        }
        None
    }

    #[test]
    fn no_two_notifiers_no_lost_message_no_secret_repetition() {
        for n in [2, 3] {
            assert_eq!(walk(n, Broken::Nothing, 4000), None);
        }
    }

    #[test]
    fn the_walk_notices_what_is_broken() {
        for broken in [
            Broken::NoCompare,
            Broken::NoMark,
            Broken::NoTrust,
            Broken::NoRepetition,
        ] {
            assert!(walk(2, broken, 20_000).is_some(), "{broken:?}");
        }
    }

    #[test]
    fn trust_ends_before_the_lease_can_be_taken() {
        assert!(TRUST + Duration::from_secs(1) < LENGTH);
        let (a, b) = (InstanceId::new("a"), InstanceId::new("b"));
        let mut first = Role::new();
        first.saw(None, at(0));
        let lease = first.may_take(&a, 1, at(0)).expect("free");
        first.wrote(lease.clone(), at(0));
        let mut second = Role::new();
        second.saw(Some(lease.text()), at(1));
        assert_eq!(second.may_take(&b, 2, at(10)), None);
        second.saw(Some(lease.text()), at(10));
        let taken = second.may_take(&b, 2, at(11)).expect("lapsed");
        assert_eq!(taken.token, 2);
        assert!(first.trusts(at(7)) && !first.trusts(at(8)));
        // Given back, it is free at once.
        let over = Lease {
            over: true,
            ..lease
        };
        second.saw(Some(over.text()), at(12));
        assert!(second.may_take(&b, 2, at(12)).is_some());
    }
}
