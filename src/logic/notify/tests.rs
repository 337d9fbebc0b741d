//! The rules of notifications by examples, and the protocol of notifiers in all orders of a few steps.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use super::{
    stand::{LENGTH, Lease, Stand, TRUST, Write, allows},
    *,
};
use crate::logic::claim::{NextAttempt, Open, Pause};
use crate::model::Boottime;

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
fn told(rules: &Rules, runs: &[(i64, Outcome)], end: i64) -> Vec<(i64, Kind)> {
    let mut notes = Notes::new(0);
    let mut out = vec![];
    for now in 0..=end {
        let channels = || [("ops", rules)].into_iter();
        for v in notes.passes(channels(), None, now * 1000) {
            out.push((now, v.kind));
        }
        for (_, outcome) in runs.iter().filter(|(at, _)| *at == now) {
            let verdicts = notes.judge(channels(), &ended(now, *outcome, 5), now * 1000);
            out.extend(verdicts.iter().map(|v| (now, v.kind)));
        }
    }
    out
}

use Outcome::{Cancelled, Failed, Missed, Skipped, Succeeded, TimedOut};

#[test]
fn only_a_change_of_state_is_told() {
    let all = rules(&ALL, 1);
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
    assert_eq!(
        told(&all, &runs, 200),
        [(2, Kind::Failed), (7, Kind::Recovered)]
    );
}

#[test]
fn a_channel_is_told_what_it_wants() {
    let runs = [(1, Missed), (100, Failed), (200, Succeeded), (300, Failed)];
    let of = |on: &[Kind], after| told(&rules(on, after), &runs, 400);
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

/// After two changes within a minute the next ones are held. A single one is told as what it was, to who wants that.
#[test]
fn a_single_held_change_is_told_to_those_who_want_it() {
    let failed = rules(&[Kind::Failed], 1);
    let runs = [(1, Failed), (2, Succeeded), (3, Failed)];
    let more = |then: &[(i64, Outcome)]| {
        let all: Vec<_> = runs.iter().chain(then).copied().collect();
        told(&failed, &all, 400)
    };
    let two = [(1, Kind::Failed), (3, Kind::Failed)];
    assert_eq!(more(&[]), two);
    assert_eq!(more(&[(4, Succeeded)]), two);
    let third = [&two[..], &[(65, Kind::Failed)]].concat();
    assert_eq!(more(&[(4, Succeeded), (5, Failed)]), third);
    // After a summary: one recovery, of which this channel hears nothing, and others do.
    for (on, hears) in [(&[Kind::Failed][..], false), (&ALL, true)] {
        let rules = rules(on, 1);
        let mut notes = Notes::new(0);
        let told = Told {
            bad: true,
            streak: 1,
            held: Some(Held {
                since: 0,
                until: 60_000,
                changes: 0,
                kind: Kind::Failed,
                last_bad: None,
            }),
            ..Told::default()
        };
        notes.told.insert("ops".to_owned(), told);
        let channels = || [("ops", &rules)].into_iter();
        assert_eq!(notes.judge(channels(), &ended(9, Succeeded, 5), 9000), []);
        let passed = notes.passes(channels(), None, 60_000);
        let kinds: Vec<_> = passed.iter().map(|v| (v.kind, v.changes)).collect();
        let recovered = [(Kind::Recovered, 1)];
        assert_eq!(kinds, recovered[..usize::from(hears)]);
    }
}

fn item(job: &str, bad: bool) -> Item {
    let kind = if bad { Kind::Failed } else { Kind::Recovered };
    Item::new(JobName::new(job), kind, bad, 0)
}

/// Whatever came first: those that are bad, by their names, then the others; what is told of one job stays in its order,
/// because a service may open and end an incident by it.
#[test]
fn the_jobs_of_a_message_have_an_order_that_does_not_change() {
    let what = [
        ("z", true),
        ("b", false),
        ("m", false),
        ("a", true),
        ("m", true),
        ("a", false),
    ];
    let mut m = Message::new(item("c", true), "ops", 0);
    for (job, bad) in what {
        m.join(item(job, bad), 0);
    }
    m.others = vec![
        (JobName::new("q"), Kind::Recovered),
        (JobName::new("y"), Kind::Missed),
        (JobName::new("x"), Kind::Failed),
    ];
    m.arrange();
    let shown: Vec<(&str, bool)> = m.items.iter().map(|i| (i.job.as_str(), i.bad)).collect();
    assert_eq!(
        shown,
        [
            ("c", true),
            ("m", false),
            ("m", true),
            ("z", true),
            ("a", true),
            ("a", false),
            ("b", false)
        ]
    );
    let others: Vec<&str> = m.others.iter().map(|(job, _)| job.as_str()).collect();
    assert_eq!(others, ["x", "y", "q"]);
}

/// A server that says when it takes messages again says so for all of them.
#[test]
fn what_a_server_asks_of_one_message_holds_for_its_channel() {
    let message = |job: &str, channel: &str, due| Message {
        due,
        ..Message::new(item(job, true), channel, 0)
    };
    let asked = Message {
        channel_rests: 90,
        ..message("a", "ops", 90)
    };
    let all = BTreeMap::from([
        ("1".to_owned(), asked),
        ("2".to_owned(), message("b", "ops", 5)),
        ("3".to_owned(), message("a", "ops", 6)),
        ("4".to_owned(), message("a", "other", 7)),
        ("5".to_owned(), message("c", "ops", 95)),
    ]);
    let turn: Vec<(&str, i64)> = (in_turn(&all, |_| None)
        .into_iter()
        .map(|(id, turn)| (id.as_str(), turn.due)))
    .collect();
    assert_eq!(turn, [("1", 90), ("2", 90), ("4", 7), ("5", 95)]);
}

/// Who lacks a mail waits with it for no other, and hears of each job in order.
#[test]
fn a_receiver_who_lacks_an_earlier_mail_alone_waits_for_it() {
    let message = |job: &str, left: &[&str]| Message {
        left: left.iter().map(ToString::to_string).collect(),
        ..Message::new(item(job, true), "mail", 0)
    };
    let all = BTreeMap::from([
        ("1".to_owned(), message("a", &["bob"])),
        ("2".to_owned(), message("a", &[])),
        ("3".to_owned(), message("a", &["bob"])),
        ("4".to_owned(), message("b", &[])),
        ("5".to_owned(), message("a", &["gone"])),
        ("6".to_owned(), message("a", &["cid"])),
    ]);
    let receivers = |m: &Message| {
        let mut all = vec!["ann".to_owned(), "bob".to_owned(), "cid".to_owned()];
        all.retain(|r| m.left.is_empty() || m.left.contains(r));
        Some(all)
    };
    let turn: Vec<(&str, Vec<String>)> = (in_turn(&all, receivers).into_iter())
        .map(|(id, turn)| (id.as_str(), turn.to))
        .collect();
    let to = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(
        turn,
        [
            ("1", to(&["bob"])),
            ("2", to(&["ann", "cid"])),
            ("4", to(&["ann", "bob", "cid"])),
            ("5", to(&[])),
        ]
    );
}

#[test]
fn a_refusal_is_given_time_to_be_mended() {
    let pauses = (0..6).map(|n| refused_again(n).map(|p| p.as_secs()));
    let pauses: Vec<Option<u64>> = pauses.collect();
    assert_eq!(pauses, [Some(2), Some(2), Some(30), Some(120), None, None]);
}

fn run(granted_at: i64) -> crate::model::Run {
    crate::model::Run {
        id: RunId(uuid::Uuid::from_u128(1)),
        ..crate::model::Run::first(granted_at)
    }
}

fn open(at: i64) -> Open {
    Open {
        run: run(at),
        ..Open::first(at)
    }
}

/// An attempt that another one was to follow is the last one if that is dropped: a newer occurrence replaced it, or a
/// person cancelled it.
#[test]
fn an_attempt_is_told_once_nothing_follows_it() {
    let rules = rules(&ALL, 1);
    let attempt = |at: i64, attempt: u32, outcome| {
        let r = ended(at, outcome, 5);
        RunRecord {
            attempt,
            run_id: Some(RunId(uuid::Uuid::from_u128(
                at as u128 * 10 + u128::from(attempt),
            ))),
            ..r
        }
    };
    // The state has these occurrences open, whose next attempts wait.
    let waits = |open_at: &[i64], off| State {
        open: (open_at.iter())
            .map(|at| Open {
                next_attempt: Some(NextAttempt {
                    at: 0,
                    trigger: Trigger::Retry,
                }),
                ..open(at * 1000)
            })
            .collect(),
        off,
        ..State::default()
    };
    // The notifier's configuration lacks the job, and it looks when others had time to say that they have it.
    let look = |notes: &mut Notes, new: &[RunRecord], state: &State| {
        let sight = Sight {
            state: Some(state),
            has: false,
            now: 9 + OFF_MS,
        };
        // Another notifier may go on.
        let text = serde_json::to_string(notes).expect("JSON");
        *notes = serde_json::from_str(&text).expect("notes");
        let mut judged = notes.dropped(new, sight);
        for (n, r) in new.iter().enumerate() {
            if !notes.passes_over(r, &new[n + 1..], sight) {
                judged.push(r.clone());
            }
        }
        let mut out = vec![];
        for r in &judged {
            let verdicts = notes.judge([("ops", &rules)].into_iter(), r, 0);
            assert!(verdicts.len() <= 1);
            out.push((r.occurrence.0 / 1000, r.attempt));
        }
        assert_eq!(
            notes.unjudged(new.last().map_or(&[], std::slice::from_ref)),
            new.last().map(|_| 0)
        );
        out
    };
    let first = attempt(1, 1, Failed);
    let awaiting = || {
        let mut notes = Notes::new(0);
        let new = std::slice::from_ref(&first);
        assert_eq!(look(&mut notes, new, &waits(&[1], 0)), []);
        assert_eq!(look(&mut notes, &[], &waits(&[1], 0)), []);
        notes
    };
    let none = State::default();
    // Cancelled; or nobody has the job any more; once.
    assert_eq!(look(&mut awaiting(), &[], &none), [(1, 1)]);
    // Until it is sure that nobody has it, the next one may come; and who has it makes that also if it is disabled.
    let off = waits(&[1], 9);
    for (has, now, told) in [(false, 8, 0), (false, 9, 1), (true, 9, 0)] {
        let sight = Sight {
            state: Some(&off),
            has,
            now: now + OFF_MS,
        };
        assert_eq!(awaiting().dropped(&[], sight).len(), told);
    }
    let mut notes = awaiting();
    let ops = ["ops".to_owned()];
    notes.watched_by(&ops);
    assert_eq!(notes.awaited_for, ops);
    assert_eq!(look(&mut notes, &[], &waits(&[1], 9)), [(1, 1)]);
    notes.watched_by(&ops);
    assert!(notes.awaited_for.is_empty(), "nothing is awaited");
    assert_eq!(look(&mut notes, &[], &none), []);
    assert!(notes.told["ops"].bad);
    // A newer occurrence came in its place, and goes on, or has an attempt to follow; or it has ended, after it.
    let second = attempt(2, 1, Failed);
    assert_eq!(look(&mut awaiting(), &[], &waits(&[2], 0)), [(1, 1)]);
    let mut notes = awaiting();
    assert_eq!(look(&mut notes, &[second], &waits(&[2], 0)), [(1, 1)]);
    assert_eq!(look(&mut notes, &[], &none), [(2, 1)]);
    let second = [attempt(2, 1, Succeeded)];
    assert_eq!(look(&mut awaiting(), &second, &none), [(1, 1), (2, 1)]);
    // A newer occurrence replaced the next attempt: nobody knows how it would have ended.
    let replaced = attempt(1, 2, Outcome::Replaced);
    let new = std::slice::from_ref(&replaced);
    assert_eq!(look(&mut awaiting(), new, &none), [(1, 1), (1, 2)]);
    let new = [first.clone(), replaced];
    assert_eq!(look(&mut Notes::new(0), &new, &none), [(1, 1), (1, 2)]);
    // The next attempt has ended: the last one counts.
    for outcome in [Failed, Succeeded, Cancelled] {
        let next = [attempt(1, 2, outcome)];
        assert_eq!(look(&mut awaiting(), &next, &none), [(1, 2)]);
    }
    let mut notes = awaiting();
    let next = [attempt(1, 2, Failed)];
    assert_eq!(look(&mut notes, &next, &waits(&[1], 0)), []);
    assert_eq!(look(&mut notes, &[], &none), [(1, 2)]);
    let both = [attempt(1, 1, Failed), attempt(1, 2, Failed)];
    assert_eq!(look(&mut Notes::new(0), &both, &none), [(1, 2)]);
    // A pause holds the next one back: the first is told at once, and counts once with those that follow it.
    let paused = State {
        pause: Some(Pause {
            until: None,
            reason: None,
            at: 0,
            by: None,
        }),
        ..waits(&[1], 0)
    };
    let mut notes = awaiting();
    assert_eq!(look(&mut notes, &[], &paused), [(1, 1)]);
    assert_eq!(look(&mut notes, &[], &paused), []);
    assert_eq!(look(&mut notes, &[], &waits(&[1], 0)), []);
    assert_eq!(look(&mut notes, &next, &none), [(1, 2)]);
    assert_eq!(notes.told["ops"].streak, 1);
    assert_eq!(look(&mut notes, &[attempt(2, 1, Failed)], &none), [(2, 1)]);
    assert_eq!(notes.told["ops"].streak, 2);
    let new = std::slice::from_ref(&first);
    assert_eq!(look(&mut Notes::new(0), new, &paused), [(1, 1)]);
    // There is room for some of them.
    let many: Vec<RunRecord> = (1..=30).map(|at| attempt(at, 1, Failed)).collect();
    let all: Vec<i64> = (1..=30).collect();
    let mut notes = Notes::new(0);
    assert_eq!(look(&mut notes, &many, &waits(&all, 0)), []);
    assert_eq!(look(&mut notes, &[], &waits(&all, 0)).len(), 10);
    assert_eq!(notes.awaited.len(), AWAITED);
}

#[test]
fn what_keeps_a_job_from_a_success_is_what_it_does_now() {
    use crate::logic::claim::{Last, Pause};
    let last = |outcome, to| {
        let run = run(to - 1);
        Some(Last {
            occurrence: run.occurrence,
            attempt: 1,
            run: run.id,
            instance: run.instance,
            outcome,
            from: to - 1,
            started: Some(to - 1),
            to,
            ended: None,
        })
    };
    let of = |st: &State| Now::of(st, 100, 1000).standstill.expect("known");
    let ended = |outcome, at| Standstill::Ended { outcome, at };
    let mut st = State::default();
    assert_eq!(of(&st), Standstill::Idle);
    // What ended before the last success says nothing.
    st.last = last(Outcome::Failed, 100);
    assert_eq!(of(&st), Standstill::Idle);
    st.last = last(Outcome::Succeeded, 200);
    assert_eq!(of(&st), Standstill::Idle);
    st.last = last(Outcome::TimedOut, 200);
    assert_eq!(of(&st), ended(Outcome::TimedOut, 200));
    st.off = 300;
    assert_eq!(of(&st), Standstill::Nobody);
    // It waits for its next attempt: it does not run.
    let waits = NextAttempt {
        at: 2000,
        trigger: Trigger::Retry,
    };
    st.off = 0;
    st.open = vec![Open {
        next_attempt: Some(waits),
        ..open(400)
    }];
    assert_eq!(of(&st), ended(Outcome::TimedOut, 200));
    st.open.extend([open(600), open(500)]);
    let on = InstanceId::new("a");
    assert_eq!(of(&st), Standstill::Runs { since: 500, on });
    // A pause that is over is none.
    for (until, paused) in [(None, true), (Some(1001), true), (Some(1000), false)] {
        let reason = None;
        st.pause = Some(Pause {
            until,
            reason,
            at: 7,
            by: None,
        });
        assert_eq!(
            Now::of(&st, 100, 1000).paused.is_some(),
            paused,
            "{until:?}"
        );
    }
}

#[test]
fn nothing_joins_a_message_that_was_tried() {
    let about = |kind| Item::new(JobName::new("x"), kind, true, 0);
    let message = Message::new(about(Kind::Failed), "ops", 1000);
    assert!(message.takes("ops", 2000));
    let tried = Message {
        tries: 1,
        ..message.clone()
    };
    assert!(!tried.takes("ops", 2000), "its receiver may have had it");
    assert!(!message.takes("others", 2000));
    assert!(!message.takes("ops", 1000 + JOIN_MOST_MS));
}

/// A success ends what was told as overdue, also where no run was bad.
#[test]
fn a_success_after_an_overdue_one_is_a_recovery() {
    let all = rules(&ALL, 1);
    let mut notes = Notes::new(0);
    let channels = || [("ops", &all)].into_iter();
    let passed = notes.passes(channels(), Some(50_000), 60_000);
    assert_eq!(passed.len(), 1, "{passed:?}");
    assert_eq!((passed[0].kind, passed[0].bad), (Kind::Overdue, true));
    let judged = notes.judge(channels(), &ended(70, Succeeded, 5), 70_000);
    assert_eq!(judged.len(), 1, "{judged:?}");
    assert_eq!((judged[0].kind, judged[0].bad), (Kind::Recovered, false));
    assert!(!notes.overdue);
}

/// How long it took is not known, and a run that people started has no planned instant to be late for.
#[test]
fn what_is_not_known_is_not_unusual() {
    let all = rules(&ALL, 1);
    let mut notes = Notes::new(0);
    let mut told = |r: &RunRecord| {
        let channels = [("ops", &all)].into_iter();
        notes
            .judge(channels, r, 0)
            .iter()
            .map(|v| v.kind)
            .collect::<Vec<_>>()
    };
    let run = |trigger, attempt| {
        let mut r = RunRecord {
            trigger,
            attempt,
            lateness_ms: Some(60_000),
            duration_ms: None,
            ..ended(100, Succeeded, 5)
        };
        // Nobody knows how its first attempt started.
        Notes::new(0).start_as_first(&mut r);
        r
    };
    assert_eq!(told(&run(Trigger::Manual, 1)), []);
    assert_eq!(told(&run(Trigger::Retry, 2)), []);
    assert_eq!(told(&run(Trigger::Schedule, 1)), [Kind::Late]);
    assert_eq!(notes.durations, [0; 0]);
}

#[test]
fn each_bad_outcome_has_its_kind() {
    for (outcome, kind) in [
        (Outcome::Crashed, Kind::Crashed),
        (Outcome::Unknown, Kind::Unknown),
        (Outcome::LeaseLost, Kind::LeaseLost),
        (TimedOut, Kind::TimedOut),
    ] {
        assert_eq!(told(&rules(&ALL, 1), &[(1, outcome)], 2), [(1, kind)]);
        let others: Vec<Kind> = ALL.into_iter().filter(|other| *other != kind).collect();
        assert_eq!(told(&rules(&others, 1), &[(1, outcome)], 2), []);
    }
}

/// With `overlap = "allow"` an older run may end after a newer one.
#[test]
fn an_older_run_that_ends_late_does_not_make_a_newer_bad_end_good() {
    let all = rules(&ALL, 1);
    let mut notes = Notes::new(0);
    let mut kinds = |at, outcome| {
        let verdicts = notes.judge([("ops", &all)].into_iter(), &ended(at, outcome, 5), 99_000);
        verdicts.iter().map(|v| v.kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(30, Failed), [Kind::Failed]);
    assert_eq!(kinds(15, Succeeded), []);
    assert_eq!(kinds(45, Succeeded), [Kind::Recovered]);
}

#[test]
fn a_summary_has_the_last_bad_end_and_says_when_the_next_one_comes() {
    let all = rules(&ALL, 1);
    let channels = || [("ops", &all)].into_iter();
    let mut notes = Notes::new(0);
    for (at, outcome) in [
        (1, Failed),
        (2, Succeeded),
        (3, Failed),
        (4, Succeeded),
        (5, TimedOut),
        (6, Succeeded),
    ] {
        let _ = notes.judge(channels(), &ended(at, outcome, 5), at * 1000);
    }
    let [summary] = &notes.passes(channels(), None, 63_000)[..] else {
        panic!("one summary");
    };
    assert_eq!((summary.kind, summary.changes), (Kind::Flapping, 4));
    assert_eq!(summary.last_bad.as_deref(), Some(&ended(5, TimedOut, 5)));
    assert_eq!(summary.again_at, Some(183_000));
}

#[test]
fn a_job_that_flaps_is_told_at_first_and_then_summed_up() {
    let all = rules(&ALL, 1);
    let runs: Vec<(i64, Outcome)> = (1..600)
        .map(|s| (s, if s % 2 == 1 { Failed } else { Succeeded }))
        .collect();
    let told = told(&all, &runs, 10_000);
    assert_eq!(told[..2], [(1, Kind::Failed), (2, Kind::Recovered)]);
    let rest: Vec<i64> = told[2..]
        .iter()
        .map(|(at, kind)| {
            assert_eq!(*kind, Kind::Flapping);
            *at
        })
        .collect();
    // Each summary comes later than the one before.
    assert_eq!(rest, [63, 183, 423, 903]);
    // When it is calm again, changes are told at once.
    let calm = [(1, Failed), (2, Succeeded), (3, Failed), (500, Succeeded)];
    assert_eq!(
        self::told(&all, &calm, 600),
        [
            (1, Kind::Failed),
            (2, Kind::Recovered),
            (63, Kind::Failed),
            (500, Kind::Recovered)
        ]
    );
}

#[test]
fn no_success_for_too_long_is_told_once() {
    let rules = rules(&ALL, 1);
    let channels = || [("ops", &rules)].into_iter();
    let mut notes = Notes::new(0);
    let within = Some(5000);
    assert_eq!(notes.due(within), Some(5000));
    assert!(notes.passes(channels(), within, 4999).is_empty());
    let late = notes.passes(channels(), within, 5000);
    assert_eq!((late[0].kind, late.len()), (Kind::Overdue, 1));
    assert!(notes.passes(channels(), within, 9000).is_empty());
    // A failure is told beside it, and one success ends both.
    let failed = notes.judge(channels(), &ended(10, Failed, 5), 10_000);
    assert_eq!(failed[0].kind, Kind::Failed);
    let good = notes.judge(channels(), &ended(100, Succeeded, 5), 100_000);
    assert_eq!((good[0].kind, good.len()), (Kind::Recovered, 1));
    assert_eq!(notes.due(within), Some(105_005));
}

#[test]
fn what_is_unusual_is_told_to_those_who_want_it() {
    let all = rules(&ALL, 1);
    let usual = rules(&[Kind::Failed, Kind::Recovered], 1);
    let of = |rules: &Rules, took: i64| {
        let mut notes = Notes::new(0);
        for n in 1..=9 {
            notes.judge(
                [("ops", rules)].into_iter(),
                &ended(n, Succeeded, 60_000),
                0,
            );
        }
        let said = notes.judge([("ops", rules)].into_iter(), &ended(99, Succeeded, took), 0);
        said.first().map(|v| v.kind)
    };
    assert_eq!(of(&all, 60_000), None);
    assert_eq!(of(&all, 180_000), None);
    assert_eq!(of(&all, 180_001), Some(Kind::TooLong));
    assert_eq!(of(&all, 19_999), Some(Kind::TooShort));
    assert_eq!(of(&usual, 999_000), None);
    let late = |ms| {
        let r = RunRecord {
            lateness_ms: Some(ms),
            ..ended(1, Succeeded, 5)
        };
        complaint(&r, &all, None)
    };
    assert_eq!((late(9_999), late(10_000)), (None, Some(Kind::Late)));
}

#[test]
fn records_are_judged_once_also_when_another_replaces_one() {
    let mut notes = Notes::new(0);
    let records: Vec<RunRecord> = (1..=9).rev().map(|n| ended(n, Succeeded, 1)).collect();
    assert_eq!(notes.unjudged(&records), None);
    for r in records.iter().rev() {
        notes.note(r);
    }
    assert_eq!(notes.unjudged(&records), Some(0));
    // The true record of the newest run takes the place of an earlier one.
    let mut other = records.clone();
    other[0] = ended(9, Failed, 1);
    assert_eq!(notes.unjudged(&other), Some(1));
    let text = serde_json::to_string(&notes).expect("JSON");
    assert_eq!(serde_json::from_str::<Notes>(&text).expect("notes"), notes);
}

#[test]
fn what_happens_together_is_one_message_of_bounded_size() {
    let item = |n: u32| Item::new(JobName::new(&format!("j{n}")), Kind::Failed, true, 0);
    let mut m = Message::new(item(0), "ops", 0);
    for n in 1..1000 {
        assert!(m.takes("ops", i64::from(n)) && !m.takes("other", i64::from(n)));
        m.join(item(n), i64::from(n));
    }
    assert_eq!(
        (m.items.len(), m.others.len(), m.more, m.due),
        (ITEMS, NAMES, 980, 2999)
    );
    m.join(item(1), 9_999);
    assert_eq!(m.due, JOIN_MOST_MS);
    assert!(!m.takes("ops", JOIN_MOST_MS));
    m.sending = Some(InstanceId::new("a"));
    assert!(!m.takes("ops", 5));
}

#[test]
fn notes_of_a_job_that_is_gone_end_after_a_week() {
    let notes = Notes::new(5);
    assert_eq!(notes.watch(true, 10), Watch::Same);
    let Watch::Becomes(gone) = notes.watch(false, 10) else {
        panic!("that it is gone is noted");
    };
    assert_eq!(gone.unwatched, Some(10));
    assert_eq!(gone.watch(false, 9 + FORGET_MS), Watch::Same);
    assert_eq!(gone.watch(false, 10 + FORGET_MS), Watch::Forget);
    // It comes back: all that was known of it is known again.
    assert_eq!(gone.watch(true, 10 + FORGET_MS), Watch::Becomes(notes));
    let text = serde_json::to_string(&gone).expect("JSON");
    assert_eq!(serde_json::from_str::<Notes>(&text).expect("notes"), gone);
}

#[test]
fn what_was_given_up_is_remembered_within_bounds() {
    let item = |n: u32| {
        Item::new(
            JobName::new(&format!("{n:0>100}")),
            Kind::LeaseLost,
            true,
            0,
        )
    };
    let mut m = Message::new(item(0), &"c".repeat(100), 0);
    for n in 1..1000 {
        m.join(item(n), 0);
    }
    m.left = vec!["\"".repeat(200); 50];
    let why = "\"".repeat(10_000);
    let one = |at: i64| GivenUp::new("1790000000000-01234567", &m, &why, at);
    let first = one(0);
    assert_eq!(first.why.chars().count(), GIVEN_UP_WHY);
    assert!(first.why.ends_with(" alone)"));
    assert_eq!(
        (first.about.len() as u64 + first.more, first.tries),
        (1000, 0)
    );
    let mut known = vec![];
    for at in 0..1000 {
        known = remembered(known, &[one(at)], at);
    }
    let times: Vec<i64> = known.iter().map(|g| g.at).collect();
    assert_eq!(times, (980..1000).collect::<Vec<i64>>());
    let later = remembered(known, &[], 990 + FORGET_MS);
    assert_eq!(later.len(), 9);
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
        /// How late the first attempt of its newest occurrence started, ms.
        late: i64,
        /// What its occurrences were, as far as they count.
        ends: Vec<Kind>,
        /// A bad end that counts unless its next attempt says otherwise.
        pending: bool,
        /// No instance has it any more, or it is paused: its next attempt does not come. Otherwise it may be disabled,
        /// which keeps none from coming.
        removed: bool,
    }
    impl World {
        fn count(&mut self, ends: Option<Kind>) {
            self.pending = false;
            self.ends.extend(ends);
        }
        fn happens(&mut self, random: &mut fastrand::Rng) {
            self.now += 3_600_000;
            let now = self.now;
            if self.removed {
                return;
            }
            self.state.off = if random.bool() { now } else { 0 };
            match self.state.open.first().cloned() {
                Some(o) if o.next_attempt.is_none() => {
                    let outcomes = [Failed, Failed, Succeeded, Cancelled, Outcome::Replaced];
                    let outcome = outcomes[random.usize(..outcomes.len())];
                    let again = outcome == Failed && random.bool();
                    self.records.insert(
                        0,
                        RunRecord {
                            occurrence: o.run.occurrence,
                            attempt: self.attempt,
                            trigger: match self.attempt {
                                1 => Trigger::Schedule,
                                _ => Trigger::Retry,
                            },
                            // A later attempt is always late, which says nothing.
                            lateness_ms: Some(match self.attempt {
                                1 => self.late,
                                _ => 7_200_000,
                            }),
                            ..ended(now / 1000, outcome, 5)
                        },
                    );
                    match outcome {
                        Failed if again => self.pending = true,
                        Failed => self.count(Some(Kind::Failed)),
                        Succeeded if self.late > 0 => self.count(Some(Kind::Late)),
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
                    self.late = if random.u8(..4) == 0 { 60_000 } else { 0 };
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
            late: 0,
            ends: vec![],
            pending: false,
            removed: false,
        };
        let (mut notes, mut told) = (Notes::new(0), vec![]);
        // So slow that nothing is summed up.
        let mut clock = 0;
        for step in 0..40 {
            let last = step >= 38;
            if step == 38 && random.u8(..3) > 0 {
                // Removed, or paused: nothing comes any more.
                match random.bool() {
                    true => w.state.off = w.now,
                    false => {
                        let (until, reason, at) = (None, None, w.now);
                        w.state.pause = Some(Pause {
                            until,
                            reason,
                            at,
                            by: None,
                        });
                    }
                }
                w.removed = true;
                // A run that goes on may yet end well.
                let waits = w.state.open.iter().any(|o| o.next_attempt.is_some());
                if waits {
                    w.count(Some(Kind::Failed));
                }
            }
            // As the notifier does it: records, the state, records again.
            let unjudged = |w: &World, notes: &Notes| -> Vec<RunRecord> {
                let n = notes.unjudged(&w.records).unwrap_or(w.records.len());
                w.records.iter().take(n).rev().cloned().collect()
            };
            let meanwhile = |w: &mut World, random: &mut fastrand::Rng| {
                while !last && random.u8(..3) == 0 {
                    w.happens(random);
                }
            };
            meanwhile(&mut w, &mut random);
            let first = unjudged(&w, &notes);
            meanwhile(&mut w, &mut random);
            let state = w.state.clone();
            meanwhile(&mut w, &mut random);
            let later = unjudged(&w, &notes);
            let upto = later.iter().position(|r| !first.contains(r));
            let upto = upto.unwrap_or(later.len());
            let sight = Sight {
                state: Some(&state),
                has: !w.removed || w.state.pause.is_some(),
                now: w.now + OFF_MS,
            };
            let mut ends = notes.dropped(&later, sight);
            for (n, r) in later[..upto].iter().enumerate() {
                if !notes.passes_over(r, &later[n + 1..], sight) {
                    ends.push(r.clone());
                }
            }
            for mut r in ends {
                clock += SELDOM_MS;
                notes.start_as_first(&mut r);
                let verdicts = notes.judge([("ops", &rules)].into_iter(), &r, clock);
                told.extend(verdicts.iter().map(|v| v.kind));
            }
            let text = serde_json::to_string(&notes).expect("JSON");
            notes = serde_json::from_str(&text).expect("notes");
        }
        let mut wanted = vec![Kind::Recovered];
        wanted.extend(w.ends);
        wanted.dedup_by_key(|kind| *kind == Kind::Recovered);
        assert_eq!(told, wanted[1..], "seed {seed}: {:#?}", w.records);
        changes += told.len();
    }
    assert!(changes > 3000, "{changes}");
}

/// A store, notifiers, and one message, in all orders of what may happen. A notifier may be killed at any moment, its
/// requests may arrive late or twice, and its replies may be lost.
mod protocol {
    use super::*;

    /// Seconds.
    const STEP: u64 = 10;
    const END: u64 = 60;

    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct One {
        alive: bool,
        stand: Stand,
        /// As the store answered it: the message, and that somebody was sending it.
        message: Option<bool>,
        /// It has the message on its way to the channel.
        sending: bool,
        /// Its request that has no answer yet, with when it left, and whether the store made the write, if it came there.
        asked: Option<(Write2, u64, Option<bool>)>,
    }

    /// A write, with what it makes of the message.
    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct Write2 {
        was: Option<String>,
        lease: Lease,
        message: Becomes,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    enum Becomes {
        Same,
        Sending,
        Gone,
    }

    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
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
                        stand: Stand::new(),
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
                match &one.stand {
                    Stand::By { .. } => step(&mut |w| {
                        let lease = w.lease.clone();
                        let one = &mut w.all[n];
                        one.stand.saw(lease, now);
                        let me = InstanceId::new(&n.to_string());
                        if let Some(lease) = one.stand.may_take(&me, n as u64, now) {
                            let write = Write2 {
                                was: one.stand.known(),
                                lease,
                                message: Becomes::Same,
                            };
                            one.asked = Some((write, w.now, None));
                        }
                    }),
                    Stand::Notifier { .. } => {
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
            broken == Broken::NoTrust || self.all[n].stand.trusts(at(self.now))
        }

        fn ask(&mut self, n: usize, message: Becomes, broken: Broken) {
            let trusts = self.trusts(n, broken);
            let one = &mut self.all[n];
            let lease = match (&one.stand, trusts) {
                (Stand::Notifier { lease, .. }, true) => Lease {
                    seq: lease.seq + 1,
                    ..lease.clone()
                },
                _ => {
                    one.stand = Stand::new();
                    return;
                }
            };
            let write = Write2 {
                was: one.stand.known(),
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
                one.stand = Stand::new();
                one.message = None;
                return;
            }
            let new = !matches!(one.stand, Stand::Notifier { .. });
            one.stand.wrote(write.lease.clone(), at(sent));
            if new {
                one.message = message;
            }
            match write.message {
                Becomes::Same => {}
                Becomes::Sending => {
                    // Only as long as nobody else can be the notifier.
                    one.sending = broken == Broken::NoTrust || one.stand.trusts(at(self.now));
                    let sending = one.sending;
                    let others = self.all.iter().enumerate().filter(|(m, _)| *m != n);
                    let mut sure = others.filter(|(_, o)| o.alive && o.stand.trusts(at(self.now)));
                    self.together |= sending && sure.next().is_some();
                }
                Becomes::Gone => one.message = None,
            }
        }

        /// What is wrong here, if something is.
        fn wrong(&self) -> Option<String> {
            let now = at(self.now);
            let sure = self.all.iter().filter(|o| o.alive && o.stand.trusts(now));
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

    /// Visits all worlds from `n` notifiers on. Returns what went wrong first, and how many were visited.
    fn explore(n: usize, broken: Broken, most: usize) -> (Option<String>, usize, bool) {
        let mut seen = HashSet::new();
        let mut next = vec![World::new(n)];
        let mut sent = false;
        while let Some(w) = next.pop() {
            if let Some(wrong) = w.wrong() {
                return (Some(format!("{wrong}: {w:#?}")), seen.len(), sent);
            }
            sent |= w.message.is_none();
            // Sequence numbers go up without an end, and a message that came twice has told us all.
            let deep = w.got.len() > 2 || w.lease.as_deref().is_some_and(too_far);
            if deep || seen.len() >= most || !seen.insert(w.clone()) {
                continue;
            }
            next.extend(w.next(broken));
        }
        (None, seen.len(), sent)
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

    fn too_far(lease: &str) -> bool {
        Lease::read(lease).is_some_and(|l| l.seq > 3 || l.token > 2)
    }

    #[test]
    fn no_two_notifiers_no_lost_message_no_secret_repetition() {
        for (n, most) in [(2, 20_000), (3, 20_000)] {
            let (wrong, worlds, sent) = explore(n, Broken::Nothing, most);
            assert_eq!(wrong, None);
            assert!(sent && worlds > 1000, "{worlds}");
            assert_eq!(walk(n, Broken::Nothing, 2000), None);
        }
    }

    #[test]
    fn the_exploration_notices_what_is_broken() {
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
        let mut first = Stand::new();
        first.saw(None, at(0));
        let lease = first.may_take(&a, 1, at(0)).expect("free");
        first.wrote(lease.clone(), at(0));
        let mut second = Stand::new();
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

    #[test]
    fn a_notifier_asks_for_no_lease_and_renews_its_own_while_it_trusts_it() {
        let a = InstanceId::new("a");
        let mut stand = Stand::default();
        assert_eq!((stand.renewed(at(0)), stand.known()), (None, None));
        stand.saw(None, at(0));
        let lease = stand.may_take(&a, 1, at(0)).expect("free");
        stand.wrote(lease.clone(), at(0));
        assert_eq!(stand.may_take(&a, 1, at(0)), None, "it has it");
        let next = stand.renewed(at(7)).expect("trusted");
        assert_eq!((next.token, next.seq), (lease.token, lease.seq + 1));
        assert_eq!(stand.renewed(at(8)), None, "it trusts it no longer");
        // Given back: it is one of the others, and has to look first.
        stand.wrote(Lease { over: true, ..next }, at(7));
        assert_eq!(stand.may_take(&a, 1, at(99)), None);
        assert!(!stand.trusts(at(7)));
    }

    #[test]
    fn kinds_have_names() {
        let names: BTreeSet<&str> = ALL.iter().map(|kind| kind.as_str()).collect();
        assert_eq!(names.len(), ALL.len());
    }
}

/// A job that was removed seems for a moment to be somebody's, and one that somebody has seems for a moment to be
/// nobody's.
#[test]
fn a_job_is_lacking_from_its_second_look_to_the_second_without_it() {
    use stand::{LACKS_NAMES, Lacks, lacking};
    let set = |has: bool| match has {
        true => BTreeSet::from([JobName::new("x")]),
        false => BTreeSet::new(),
    };
    let (mut known, mut before) = (set(false), set(false));
    let mut shown = vec![];
    for look in [true, false, true, true, false, true, false, false, true] {
        let now = set(look);
        known = lacking(&known, &before, &now);
        before = now;
        shown.push(!known.is_empty());
    }
    assert_eq!(
        shown,
        [false, false, false, true, true, true, true, false, false]
    );
    assert_eq!(Lacks::of(&set(false), &["ops".to_owned()]), None);
    let many = (0..LACKS_NAMES + 3).map(|n| JobName::new(&format!("j{n:02}")));
    let lacks = Lacks::of(&many.collect(), &[]).expect("some");
    assert!(
        lacks.names().ends_with("j09 and 3 more"),
        "{}",
        lacks.names()
    );
    // The lease has it, and one of an earlier version does not.
    let lease = r#"{"holder":"a","process":1,"token":2,"seq":3}"#;
    let lease = stand::Lease::read(lease).expect("a lease");
    assert_eq!(lease.lacks, None);
    let lease = stand::Lease {
        lacks: Some(lacks),
        ..lease
    };
    assert_eq!(stand::Lease::read(&lease.text()), Some(lease));
}
