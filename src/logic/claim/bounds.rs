//! The rules at their bounds: the very millisecond, an entry more or less, a field of the state alone. What they do
//! together is shown by the interleavings of `claim/tests.rs` and by tests/it/model.rs.

use super::*;
use crate::model::{InstanceId, JobName, Run, RunId, Trigger, Wait};

const T: i64 = 1_800_000_000_000;

fn job() -> JobName {
    JobName::new("backup")
}

fn asks(at: i64) -> Claim {
    Claim {
        job: job(),
        target: Target::Scheduled(Occurrence(at)),
        known: Occurrence(0),
        missed: vec![],
        run: RunId::random(),
        instance: InstanceId::new("a"),
        host: "a.example".to_owned(),
        trigger: Trigger::Schedule,
        start_by: i64::MAX,
        lease: 1000,
        overlap: Overlap::Skip,
        on_crash: OnCrash::Fail,
        max_attempts: 1,
        definition: String::new(),
        observed: None,
        holds: vec![],
        cause: None,
    }
}

fn triggers(key: &str, before: Option<i64>) -> Claim {
    Claim {
        target: Target::Manual {
            key: key.to_owned(),
            before: before.map(Occurrence),
        },
        trigger: Trigger::Manual,
        ..asks(0)
    }
}

/// Claimed at `now`, in ms.
fn claimed(st: &mut State, c: &Claim, now: i64) -> (Answer, Effects) {
    claimed_us(st, c, now * 1000)
}

fn claimed_us(st: &mut State, c: &Claim, now_us: i64) -> (Answer, Effects) {
    let (mut state, mut effects) = (Some(std::mem::take(st)), Effects::default());
    let answer = claim(&mut state, c, now_us, "incarnation", &mut effects);
    *st = state.expect("it is known");
    (answer, effects)
}

fn granted(st: &mut State, c: &Claim, now: i64) -> Grant {
    match claimed(st, c, now).0 {
        Answer::Granted(g) => g,
        other => panic!("{other:?}"),
    }
}

fn known() -> State {
    State {
        incarnation: "incarnation".to_owned(),
        ..State::default()
    }
}

fn waits_for(st: &mut State, key: &str) {
    st.triggers.push(Pending {
        key: key.to_owned(),
        at: T,
        by: None,
    });
}

fn entry(c: &Claim, at: i64, attempt: u32, granted_at: i64) -> Open {
    let first = Grant {
        occurrence: Occurrence(at),
        attempt,
        trigger: Trigger::Schedule,
    };
    Open::granted(c, first, (None, None), granted_at, "incarnation")
}

/// `e` has ended at `to`.
fn last(e: &Open, outcome: Outcome, started: Option<i64>, to: i64) -> Last {
    let record = e.record(&job(), outcome, to, "");
    super::last(e, &record.lasting(started, Some(to)), to, to)
}

fn seen(e: &Open) -> Option<Observed> {
    Some(Observed {
        run: e.run.id,
        seq: e.seq,
        incarnation: e.incarnation.clone(),
    })
}

fn recorded(answer: &Answer) -> (Outcome, &str) {
    match answer {
        Answer::Recorded { outcome, reason } => (*outcome, reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_occurrence_is_due_at_its_very_microsecond() {
    let early = claimed_us(&mut known(), &asks(T), T * 1000 - 1).0;
    assert!(matches!(early, Answer::Early { wait_us: 1 }), "{early:?}");
    let due = claimed_us(&mut known(), &asks(T), T * 1000).0;
    assert!(matches!(due, Answer::Granted(_)), "{due:?}");
}

#[test]
fn the_last_moment_for_a_start_counts() {
    let c = Claim {
        start_by: T + 5,
        ..asks(T)
    };
    granted(&mut known(), &c, T + 5);
    let late = claimed(&mut known(), &c, T + 6).0;
    assert_eq!(recorded(&late), (Outcome::Missed, TOO_LATE));
    // Also for a trigger without room.
    let mut st = known();
    waits_for(&mut st, "k");
    st.newest = T + 100;
    let c = Claim {
        start_by: T + 5,
        ..triggers("k", None)
    };
    let waits = claimed(&mut st, &c, T + 5).0;
    assert!(
        matches!(waits, Answer::Early { wait_us: 96_000 }),
        "{waits:?}"
    );
    let late = claimed(&mut st, &c, T + 6).0;
    assert_eq!(recorded(&late), (Outcome::Missed, TOO_LATE));
}

#[test]
fn a_pause_is_over_in_its_last_moment() {
    let paused = || State {
        pause: Some(Pause {
            until: Some(T + 10),
            reason: None,
            at: T,
            by: None,
        }),
        ..known()
    };
    let skipped = claimed(&mut paused(), &asks(T), T + 9).0;
    assert_eq!(recorded(&skipped), (Outcome::Skipped, PAUSED));
    granted(&mut paused(), &asks(T), T + 10);
    // A claim for an awaited attempt is told how long the pause lasts.
    let awaited = |now| {
        let mut st = paused();
        let next_attempt = NextAttempt {
            at: T,
            trigger: Trigger::Retry,
        };
        st.open.push(Open {
            next_attempt: Some(next_attempt),
            ..entry(&asks(T), T, 1, T)
        });
        claimed(&mut st, &asks(T), now).0
    };
    assert_eq!(awaited(T + 3), Answer::Later { wait_ms: 7 });
    assert!(matches!(awaited(T + 10), Answer::Granted(g) if g.attempt == 2));
}

#[test]
fn a_trigger_takes_an_instant_before_what_is_undecided() {
    let mut st = known();
    waits_for(&mut st, "k");
    // Less than a second before it, because the second before it may be planned, too.
    let g = granted(&mut st, &triggers("k", Some(T - 5000)), T);
    assert_eq!(g.occurrence, Occurrence(T - 5999));
}

#[test]
fn what_a_removed_job_left_says_so() {
    let c = Claim {
        start_by: REMOVED,
        ..asks(T)
    };
    let said = claimed(&mut known(), &c, T).0;
    assert_eq!(recorded(&said), (Outcome::Missed, JOB_REMOVED));
    let c = Claim {
        start_by: NEVER,
        ..asks(T)
    };
    let said = claimed(&mut known(), &c, T).0;
    assert_eq!(recorded(&said), (Outcome::Missed, OVERDUE));
}

/// One record, whatever number of claims it takes to decide what was planned between a loss and the adoption.
#[test]
fn what_a_loss_keeps_from_running_is_one_record() {
    let mut st = State {
        newest: T - 9000,
        lost_before: T - 8000,
        lost_until: T,
        ..known()
    };
    let mut history = std::collections::VecDeque::new();
    let mut ask = |st: &mut State, start_by, missed: &[i64], at: i64, now: i64| {
        let c = Claim {
            start_by,
            missed: missed
                .iter()
                .map(|at| Missed::one(Occurrence(*at)))
                .collect(),
            ..asks(at)
        };
        let (answer, mut effects) = claimed(st, &c, now);
        for r in std::mem::take(&mut effects.records) {
            effects.put(r, &mut history);
        }
        let told = |r: &RunRecord| (r.occurrence.0 - T, r.count, r.error.clone().expect("why"));
        (answer, history.iter().map(told).collect::<Vec<_>>())
    };
    let one = |at: i64, count: u64| (at, count, AFTER_LOSS.to_owned());
    // What was due before the loss is none of it.
    let before = (-8000, 1, OVERDUE.to_owned());
    let (answer, all) = ask(&mut st, NEVER, &[T - 8000, T - 7000], T - 6000, T + 1);
    assert_eq!(recorded(&answer), (Outcome::Missed, AFTER_LOSS));
    assert_eq!(all, [one(-6000, 2), before.clone()]);
    // Another claim, too late for its target.
    let (answer, all) = ask(&mut st, PASSED, &[], T - 5000, T + 2);
    assert_eq!(recorded(&answer), (Outcome::Missed, AFTER_LOSS));
    assert_eq!(all, [one(-5000, 3), before.clone()]);
    // A run comes in between: from there on it is another record.
    let run = ask(&mut st, i64::MAX, &[T - 4000], T - 3000, T + 3);
    assert!(matches!(run.0, Answer::Granted(_)), "{run:?}");
    assert_eq!(run.1, [one(-4000, 4), before.clone()]);
    st.open.clear();
    let (_, all) = ask(&mut st, NEVER, &[T - 2000, T - 1000, T], T + 1000, T + 2000);
    // What was due after the adoption is none of it either.
    let after = (1000, 1, OVERDUE.to_owned());
    assert_eq!(all, [after, one(0, 3), one(-4000, 4), before]);
    assert_eq!(st.lost_until, T);
    let _ = ask(&mut st, i64::MAX, &[], T + 2000, T + 2000);
    assert_eq!(st.lost_until, 0);
}

/// A job that the store knew nothing of is owed from when an instance asked for it; but what was planned while it waited
/// may have run in data that is lost.
#[test]
fn what_the_first_wait_keeps_from_running_is_one_record() {
    let ask = Register {
        waits_since: T - 5000,
        lost_before: T - 6000,
        adopt: Some("incarnation".to_owned()),
        presence: Presence::New,
        ..registration(0)
    };
    let adopted = |ask: &Register| {
        let (said, state, effects) = asks_to_register(None, ask, T);
        assert_eq!((said, effects.records.len()), (Registration::Ready, 0));
        state
    };
    let mut st = adopted(&ask);
    assert_eq!(
        (st.since, st.lost_until, st.first_wait),
        (T - 5000, T, true)
    );
    let until = format!("until {}", Occurrence(T));
    assert!(st.lost_why.starts_with("the store was new, ") && st.lost_why.ends_with(&until));
    let mut history = std::collections::VecDeque::new();
    let mut ask_for = |st: &mut State, missed: &[i64], at: i64, now: i64| {
        let c = Claim {
            missed: missed
                .iter()
                .map(|at| Missed::one(Occurrence(*at)))
                .collect(),
            trigger: Trigger::CatchUp,
            ..asks(at)
        };
        let (answer, mut effects) = claimed(st, &c, now);
        for r in std::mem::take(&mut effects.records) {
            effects.put(r, &mut history);
        }
        let told = |r: &RunRecord| (r.occurrence.0 - T, r.count, r.error.clone());
        (answer, history.iter().map(told).collect::<Vec<_>>())
    };
    let why = st.lost_why.clone();
    // Neither a pause nor a skip is the reason, and none is used up.
    st.skip = 1;
    let (answer, all) = ask_for(&mut st, &[T - 4000, T - 3000], T - 2000, T);
    assert_eq!(recorded(&answer), (Outcome::Skipped, &*why));
    assert_eq!((all, st.skip), (vec![(-2000, 3, Some(why.clone()))], 1));
    let (answer, all) = ask_for(&mut st, &[T - 1000], T, T + 1);
    assert_eq!(recorded(&answer), (Outcome::Skipped, &*why));
    assert_eq!(all, [(0, 5, Some(why))]);
    // What comes after it runs.
    st.skip = 0;
    let (answer, _) = ask_for(&mut st, &[], T + 1000, T + 1000);
    assert!(matches!(answer, Answer::Granted(_)), "{answer:?}");
    assert_eq!(
        (st.lost_until, st.first_wait, &*st.lost_why),
        (0, false, "")
    );
    // Who remembers the job knows that the store has lost it; who did not wait was not kept back.
    let remembers = adopted(&Register {
        known: Occurrence(T - 9000),
        ..ask.clone()
    });
    assert_eq!((remembers.since, remembers.first_wait), (T - 9000, false));
    assert!(
        remembers
            .lost_why
            .starts_with("the store had lost its data, ")
    );
    let later = adopted(&Register {
        waits_since: 0,
        ..ask
    });
    assert_eq!((later.since, later.first_wait), (T, false));
}

#[test]
fn what_a_loss_kept_back_has_no_other_reason() {
    let lost = || State {
        newest: T - 2000,
        lost_before: T - 1000,
        lost_until: T,
        ..known()
    };
    let said = |mut st: State, start_by, at: i64, now: i64| {
        let answer = claimed(
            &mut st,
            &Claim {
                start_by,
                ..asks(at)
            },
            now,
        )
        .0;
        recorded(&answer).1.to_owned()
    };
    assert_eq!(said(lost(), NEVER, T, T), AFTER_LOSS);
    assert_eq!(said(lost(), PASSED, T, T), AFTER_LOSS);
    assert_eq!(said(lost(), NEVER, T + 1, T + 1), OVERDUE);
    assert_eq!(said(lost(), PASSED, T + 1, T + 1), TOO_LATE);
    assert_eq!(said(lost(), NEVER, T - 1000, T), LOST);
    // Its job was removed; the clock was in doubt; the clock that dated the adoption was wrong.
    assert_eq!(said(lost(), REMOVED, T, T), JOB_REMOVED);
    assert_eq!(said(lost(), PASSED_IN_DOUBT, T, T), IN_DOUBT);
    let wrong = State {
        lost_until: T + 1,
        ..lost()
    };
    assert_eq!(said(wrong, NEVER, T, T), OVERDUE);
}

/// Nothing was missed, and what a pause kept from running is one record, however late it comes.
#[test]
fn what_a_pause_kept_from_running_is_skipped_also_if_it_comes_late() {
    use Outcome::{Missed as Miss, Skipped as Skip};
    let paused = |until: Option<i64>| State {
        newest: T - 9000,
        pause: Some(Pause {
            until: until.map(|until| T + until),
            reason: Some("night".to_owned()),
            at: T - 8000,
            by: None,
        }),
        ..known()
    };
    let late = (-8500, 1, Miss);
    for (until, start_by, wanted) in [
        (None, NEVER, vec![late, (-4000, 4, Skip)]),
        (None, PASSED, vec![late, (-4000, 4, Skip)]),
        // It comes in time: it is skipped as each other.
        (None, T, vec![late, (-5000, 3, Skip), (-4000, 1, Skip)]),
        // It is over: what was planned meanwhile is not owed, what was planned later is.
        (
            Some(-4000),
            NEVER,
            vec![late, (-5000, 3, Skip), (-4000, 1, Miss)],
        ),
        (Some(-3999), NEVER, vec![late, (-4000, 4, Skip)]),
        (
            Some(-5000),
            NEVER,
            vec![late, (-6000, 2, Skip), (-5000, 1, Miss), (-4000, 1, Miss)],
        ),
    ] {
        let mut st = paused(until);
        let missed = [-8500, -7000, -6000, -5000].map(|at| Missed::one(Occurrence(T + at)));
        let c = Claim {
            start_by,
            missed: missed.to_vec(),
            ..asks(T - 4000)
        };
        let (answer, effects) = claimed(&mut st, &c, T);
        let told = effects.records.iter();
        let told: Vec<_> = told
            .map(|r| (r.occurrence.0 - T, r.count, r.outcome))
            .collect();
        assert_eq!(told, wanted, "{until:?} {start_by}");
        let of = |outcome| match outcome {
            Skip => "paused: night",
            _ => OVERDUE,
        };
        let why = |r: &RunRecord| r.error.as_deref() == Some(of(r.outcome));
        assert!(effects.records.iter().all(why), "{:?}", effects.records);
        let last = wanted.last().expect("some").2;
        assert_eq!(recorded(&answer), (last, of(last)));
        assert_eq!(st.newest, T - 4000);
    }
    // The history has what was skipped in time.
    let c = Claim {
        start_by: NEVER,
        ..asks(T - 4000)
    };
    let joined = claimed(&mut paused(None), &c, T).1.joined;
    let joined: Vec<_> = joined
        .iter()
        .map(|j| (j.before.0 - T, j.at.0 - T))
        .collect();
    assert_eq!(joined, [(-9000, -4000)]);
    // That its job was removed decides it.
    let removed = Claim {
        start_by: REMOVED,
        missed: vec![Missed::one(Occurrence(T - 5000))],
        ..asks(T - 4000)
    };
    let records = claimed(&mut paused(None), &removed, T).1.records;
    assert_eq!(records[0].error.as_deref(), Some(JOB_REMOVED));
}

#[test]
fn what_kept_something_from_a_start_in_time_stands_in_its_record() {
    // An instance that is up, and has just enabled the job, could not start it either.
    let nobody = Wait::Overdue.cause();
    assert!(nobody.ends_with("or had been enabled again"), "{nobody}");
    for wait in Wait::ALL {
        let c = |start_by, target: Claim| Claim {
            start_by,
            cause: Some(wait),
            missed: vec![Missed::one(Occurrence(T - 5000))],
            ..target
        };
        let mut st = known();
        st.newest = T - 9000;
        let (answer, effects) = claimed(&mut st, &c(T - 1, asks(T - 1000)), T);
        let wanted = |what: &str| format!("{what}: {}", wait.cause());
        assert_eq!(recorded(&answer).1, wanted(TOO_LATE));
        let given_up = effects.records[0].error.clone();
        assert_eq!(given_up, Some(wanted(OVERDUE)));
        let answer = claimed(&mut st, &c(NEVER, asks(T - 500)), T).0;
        assert_eq!(recorded(&answer).1, wanted(OVERDUE));
        // These say all that there is to say.
        for (start_by, what) in [(REMOVED, JOB_REMOVED), (PASSED_IN_DOUBT, IN_DOUBT)] {
            let mut st = known();
            let answer = claimed(&mut st, &c(start_by, asks(T)), T).0;
            assert_eq!(recorded(&answer).1, what);
        }
    }
}

/// People look for it where they put it in. A job is planned at whole seconds.
#[test]
fn a_trigger_that_nobody_started_in_time_is_recorded_at_its_own_time() {
    for (put, at) in [(-60_001, -60_001), (-60_000, -59_999), (90_000, 1)] {
        let mut st = known();
        st.triggers = vec![waits("k", T + put)];
        let before = st.newest;
        let c = Claim {
            start_by: PASSED,
            ..triggers("k", Some(T - 70_000))
        };
        let (answer, effects) = claimed(&mut st, &c, T);
        assert_eq!(recorded(&answer), (Outcome::Missed, TOO_LATE));
        assert_eq!(effects.records[0].occurrence, Occurrence(T + at));
        assert_eq!(st.triggered[0].occurrence, Occurrence(T + at));
        assert_eq!((st.newest, st.triggers), (before, vec![]));
    }
}

#[test]
fn what_ran_early_is_settled_with_its_own_outcome_alone() {
    let run = |at: i64| last(&entry(&asks(at), at, 1, at), Outcome::Succeeded, None, at);
    let early = |last| {
        let mut st = State {
            early: vec![Occurrence(T)],
            last: Some(last),
            ..known()
        };
        (claimed(&mut st, &asks(T), T).0, st.newest, st.early)
    };
    let (answer, newest, left) = early(run(T));
    assert!(
        matches!(answer, Answer::Settled(Some(l)) if l.occurrence.0 == T),
        "its own"
    );
    assert_eq!((newest, left), (T, vec![]));
    assert!(matches!(early(run(T + 1000)).0, Answer::Settled(None)));
}

#[test]
fn a_run_is_asked_to_give_way_once_and_by_no_other_policy() {
    let asked = |overlap, stop| {
        let mut st = State {
            newest: T - 1000,
            ..known()
        };
        st.open.push(Open {
            stop,
            ..entry(&asks(T - 1000), T - 1000, 1, T + 1)
        });
        let (answer, effects) = claimed(&mut st, &Claim { overlap, ..asks(T) }, T + 2);
        assert!(matches!(answer, Answer::Blocked(_)), "{answer:?}");
        (st.open[0].stop, effects.events.len())
    };
    let cancelled = Some(StopRequest::Cancelled);
    assert_eq!(
        asked(Overlap::Replace, None),
        (Some(StopRequest::Replaced), 1)
    );
    assert_eq!(asked(Overlap::Replace, cancelled), (cancelled, 0));
    assert_eq!(asked(Overlap::Queue, None), (None, 0));
}

/// Two are open, as after a change of the policy: the dead one goes, and the awaited attempt is the one that is
/// granted.
#[test]
fn an_awaited_attempt_behind_a_dead_run_is_granted_as_itself() {
    for dead_first in [true, false] {
        let awaited = Open {
            next_attempt: Some(NextAttempt {
                at: T,
                trigger: Trigger::Takeover,
            }),
            ..entry(&asks(T), T, 1, T)
        };
        let dead = entry(&asks(T - 1000), T - 1000, 1, T - 1000);
        let other = Open {
            next_attempt: awaited.next_attempt,
            ..entry(&asks(T - 2000), T - 2000, 1, T - 2000)
        };
        let mut open = vec![awaited.clone(), other.clone()];
        open.insert(if dead_first { 0 } else { 2 }, dead.clone());
        let mut st = State {
            newest: T,
            open,
            ..known()
        };
        let c = Claim {
            observed: seen(&dead),
            ..asks(T)
        };
        let g = granted(&mut st, &c, T + 5000);
        assert_eq!((g.occurrence.0, g.attempt), (T, 2));
        assert_eq!((st.open.len(), &st.open[1]), (2, &other));
        assert_eq!((st.open[0].run.id, st.open[0].run.attempt), (c.run, 2));
    }
}

fn renewal(run: RunId, at: i64, attempt: u32) -> Renew {
    Renew {
        late: false,
        reclaim: "incarnation".to_owned(),
        run: Run {
            occurrence: Occurrence(at),
            attempt,
            trigger: Trigger::Manual,
            key: Some("k".to_owned()),
            id: run,
            instance: InstanceId::new("a"),
            host: String::new(),
            lease: 1000,
            definition: String::new(),
            granted_at: at,
        },
        job: job(),
        seq: 3,
    }
}

/// Its holder was stopped for longer than its lease, and asks again after the server was restarted.
#[test]
fn a_lease_that_was_taken_over_or_is_not_trusted_is_not_put_back() {
    let run = asks(T).run;
    let newer = entry(&asks(T + 2000), T + 2000, 1, T + 2000);
    // The data; what the holder asks; whether it has its lease back.
    for (newest, incarnation, open, late, back) in [
        (T - 2000, "before", vec![], false, true),
        (T + 2000, "before", vec![], false, false),
        (T + 2000, "before", vec![newer.clone()], false, false),
        (T, "before", vec![], false, false),
        (T, "before", vec![entry(&asks(T), T, 1, T)], false, true),
        // No more than what instances have told again.
        (T + 2000, "", vec![], false, true),
        (T - 2000, "before", vec![], true, false),
        (0, "", vec![], true, false),
    ] {
        let mut state = Some(State {
            newest,
            incarnation: incarnation.to_owned(),
            open: open.clone(),
            ..State::default()
        });
        let ask = Renew {
            late,
            ..renewal(run, T, 1)
        };
        let before = state.clone();
        let answer = renew(&mut state, &ask, (T + 9000) * 1000, "incarnation");
        let expected = if back {
            Renewal::Renewed(None)
        } else {
            Renewal::Lost
        };
        assert_eq!(answer, expected, "{newest} {incarnation} {open:?} {late}");
        assert!(back || state == before);
    }
    let mut nothing = None;
    let ask = Renew {
        late: true,
        ..renewal(run, T, 1)
    };
    let answer = renew(&mut nothing, &ask, (T + 9000) * 1000, "incarnation");
    assert_eq!((answer, nothing), (Renewal::Lost, None));
}

/// What was on its way since before a loss does not put back what ended meanwhile, with a later attempt, in data that is
/// gone. The holder of a run that goes on asks again.
#[test]
fn a_lease_is_put_back_by_a_renewal_alone_that_follows_the_loss() {
    let run = asks(T).run;
    for (named, answer) in [
        ("", Renewal::Unknown),
        ("before", Renewal::Unknown),
        ("incarnation", Renewal::Renewed(None)),
    ] {
        for lost in [
            None,
            Some(State {
                incarnation: "before".to_owned(),
                ..State::default()
            }),
        ] {
            let mut state = lost.clone();
            let ask = Renew {
                reclaim: named.to_owned(),
                ..renewal(run, T, 1)
            };
            assert_eq!(renew(&mut state, &ask, T * 1000, "incarnation"), answer);
            assert_eq!(state == lost, answer == Renewal::Unknown, "{named}");
        }
        // What the data knows is renewed, as after a failover that lost nothing.
        let mut state = Some(State {
            incarnation: "before".to_owned(),
            newest: T,
            open: vec![entry(&asks(T), T, 1, T)],
            ..State::default()
        });
        let ask = Renew {
            reclaim: named.to_owned(),
            ..renewal(state.as_ref().expect("a state").open[0].run.id, T, 1)
        };
        let said = renew(&mut state, &ask, T * 1000, "incarnation");
        assert_eq!(said, Renewal::Renewed(None), "{named}");
    }
}

#[test]
fn a_lease_is_put_back_unless_its_run_ended_or_a_later_attempt_is_there() {
    let older = || State {
        incarnation: "before".to_owned(),
        ..State::default()
    };
    let c = asks(T);
    let back = |mut st: State| {
        let mut state = Some(std::mem::take(&mut st));
        let said = renew(&mut state, &renewal(c.run, T, 2), T * 1000, "incarnation");
        (said, state.expect("a state"))
    };
    let ended = |run, outcome| State {
        last: Some(Last {
            run,
            outcome,
            ..last(&entry(&c, T, 2, T), outcome, None, T)
        }),
        ..older()
    };
    assert_eq!(back(ended(c.run, Outcome::Failed)).0, Renewal::Lost);
    for st in [
        older(),
        ended(c.run, Outcome::Unknown),
        ended(RunId::random(), Outcome::Failed),
    ] {
        let (said, st) = back(st);
        assert_eq!(said, Renewal::Renewed(None));
        assert_eq!((st.newest, st.open.len(), st.open[0].seq), (T, 1, 3));
    }
    // Attempts of the same occurrence and of another one; ours is the second.
    for (at, attempt, lost, left) in [
        (T, 1, false, 1),
        (T, 2, false, 1),
        (T, 3, true, 1),
        (T - 1000, 1, false, 2),
        (T - 1000, 3, false, 2),
    ] {
        let (said, st) = back(State {
            open: vec![entry(&asks(at), at, attempt, at)],
            ..older()
        });
        assert_eq!(said == Renewal::Lost, lost, "{at} {attempt}");
        assert_eq!(st.open.len(), left, "{at} {attempt}");
    }
    // Its key is known again, and only once.
    let (_, st) = back(older());
    let keys: Vec<_> = st.triggered.iter().map(|t| t.key.as_str()).collect();
    assert_eq!(keys, ["k"]);
    let (_, st) = back(st_of(&["x"]));
    assert_eq!(st.triggered.len(), 2);
    let (_, st) = back(st_of(&["k"]));
    assert_eq!(st.triggered.len(), 1);
}

/// A state of another incarnation, with these keys.
fn st_of(keys: &[&str]) -> State {
    let mut st = State {
        incarnation: "before".to_owned(),
        ..State::default()
    };
    for key in keys {
        st.remember_trigger(key, Occurrence(T - 1000), T - 1000);
    }
    st
}

#[test]
fn the_end_of_a_run_that_the_store_lost_ends_its_older_attempts_alone() {
    let c = asks(T);
    for (at, attempt, left) in [
        (T, 1, 0),
        (T, 2, 0),
        (T, 3, 1),
        (T - 1000, 1, 1),
        (T - 1000, 3, 1),
    ] {
        let mut state = Some(State {
            open: vec![entry(&asks(at), at, attempt, at)],
            ..st_of(&[])
        });
        let mut record = entry(&c, T, 2, T).record(&job(), Outcome::Succeeded, T + 10, "");
        record.error = None;
        let s = Settle {
            run: c.run,
            record,
            next_attempt: None,
        };
        let said = settle(
            &mut state,
            &s,
            (T + 20) * 1000,
            "incarnation",
            &mut Effects::default(),
        );
        assert_eq!(said, Settlement::Done);
        let st = state.expect("a state");
        assert_eq!((st.open.len(), st.newest), (left, T), "{at} {attempt}");
    }
}

/// What is granted waits for its turn to start.
#[test]
fn of_a_run_that_was_never_renewed_nobody_says_that_it_was_started() {
    for (renewals, started, reason) in [(0, None, NEVER_RENEWED), (1, Some(T), LAPSED)] {
        let (mut st, c) = (known(), asks(T));
        granted(&mut st, &c, T);
        st.open[0].seq = renewals;
        let finds = Claim {
            observed: seen(&st.open[0]),
            ..asks(T)
        };
        let (answer, effects) = claimed(&mut st, &finds, T + 1000);
        assert_eq!(recorded(&answer), (Outcome::Unknown, reason));
        let r = &effects.records[0];
        let said = (
            r.started_at,
            r.lateness_ms,
            r.finished_at,
            r.error.as_deref(),
        );
        let last = st.last.as_ref().map(|l| (l.started, l.ended()));
        assert_eq!(last, Some((started, T + 1000)));
        let late = started.map(|at| at - T);
        assert_eq!(said, (started, late, Some(T + 1000), Some(reason)));
    }
}

/// A run has one end, wherever it is shown: that of its newest record.
#[test]
fn who_saw_how_a_run_ended_that_was_found_dead_has_the_last_word() {
    let (mut st, c) = (known(), asks(T));
    granted(&mut st, &c, T);
    let e = st.open[0].clone();
    let finds = Claim {
        observed: seen(&e),
        ..asks(T)
    };
    let _ = claimed(&mut st, &finds, T + 5000);
    let record = e.record(&job(), Outcome::Crashed, T, "");
    for (started, finished) in [(Some(T + 20), Some(T + 900)), (None, None)] {
        let s = Settle {
            run: c.run,
            record: record.clone().lasting(started, finished),
            next_attempt: None,
        };
        let (mut state, mut effects) = (Some(st.clone()), Effects::default());
        let now = T + 7000;
        let said = settle(&mut state, &s, now * 1000, "incarnation", &mut effects);
        assert_eq!(said, Settlement::Lost);
        let l = state.and_then(|st| st.last).expect("it ended");
        let ended = finished.unwrap_or(now);
        assert_eq!(
            (l.outcome, l.started, l.ended(), l.to),
            (Outcome::Crashed, started, ended, T)
        );
    }
}

#[test]
fn a_run_that_was_found_dead_is_made_up_for_once_if_its_command_was_never_executed() {
    let dead = |stop| {
        let (mut st, c) = (known(), asks(T));
        granted(&mut st, &c, T);
        st.open[0].stop = stop;
        let finds = Claim {
            observed: seen(&st.open[0]),
            ..asks(T)
        };
        let answer = claimed(&mut st, &finds, T + 1000).0;
        assert_eq!(recorded(&answer), (Outcome::Unknown, NEVER_RENEWED));
        (st, c)
    };
    let says = |st: &mut State, c: &Claim, next_attempt| {
        let s = Settle {
            run: c.run,
            record: entry(c, T, 1, T).record(&job(), Outcome::Crashed, T, ""),
            next_attempt,
        };
        let (mut state, mut effects) = (Some(std::mem::take(st)), Effects::default());
        let said = settle(
            &mut state,
            &s,
            (T + 2000) * 1000,
            "incarnation",
            &mut effects,
        );
        *st = state.expect("it is known");
        let told = effects.events.len();
        (said, effects.records.len(), told)
    };
    let next = crate::logic::attempts::after_no_start(1);
    let (mut st, c) = dead(None);
    assert_eq!(says(&mut st, &c, next), (Settlement::Lost, 1, 1));
    let second = granted(&mut st, &asks(T), T + 2000);
    assert_eq!((second.attempt, second.trigger), (2, Trigger::Takeover));
    // Its guard asks again, because the answer was lost.
    assert_eq!(says(&mut st, &c, next), (Settlement::Done, 0, 0));
    assert_eq!(st.open.len(), 1);
    // Its command was executed.
    let (mut st, c) = dead(None);
    assert_eq!(says(&mut st, &c, None), (Settlement::Lost, 1, 0));
    assert!(st.open.is_empty());
    // Somebody asked it to end.
    let (mut st, c) = dead(Some(StopRequest::Cancelled));
    assert_eq!(says(&mut st, &c, next), (Settlement::Lost, 1, 0));
    assert!(st.open.is_empty());
    // A newer occurrence was granted: its token is higher.
    for overlap in [Overlap::Skip, Overlap::Allow] {
        let (mut st, c) = dead(None);
        let newer = Claim {
            overlap,
            ..asks(T + 1000)
        };
        granted(&mut st, &newer, T + 1000);
        assert_eq!(says(&mut st, &c, next), (Settlement::Lost, 1, 0));
        assert_eq!(st.open.len(), 1, "{overlap:?}");
    }
    // The data is another's: what followed may have been lost with the other half of it.
    let (mut st, c) = dead(None);
    st.incarnation = "before".to_owned();
    let (mut st, _) = registered(Some(st), &registration(T), T + 1500);
    assert_eq!(st.incarnation, "incarnation");
    assert_eq!(says(&mut st, &c, next), (Settlement::Lost, 1, 0));
    assert!(st.open.is_empty());
}

#[test]
fn what_people_asked_for_is_decided_by_the_newest_request() {
    let pause = |at| Pause {
        until: None,
        reason: None,
        at,
        by: None,
    };
    let nothing = Remembered::default();
    assert!(nothing.is_nothing());
    let skips = |skip, skip_at| Remembered {
        skip,
        skip_at,
        ..nothing.clone()
    };
    assert!(!skips(1, T).is_nothing());
    let pauses = |at| Remembered {
        pause: Some(pause(at)),
        ..nothing.clone()
    };
    assert!(!pauses(T).is_nothing());
    let restored = |remembered: Remembered, skip, skip_at, resumed| {
        let mut st = State {
            skip,
            skip_at,
            resumed,
            ..known()
        };
        remembered.restore(&mut st, T);
        (st.skip, st.skip_at, st.pause.is_some())
    };
    // A pause that was ended in the same moment is over.
    assert_eq!(restored(pauses(T), 0, 0, T - 1), (0, 0, true));
    assert_eq!(restored(pauses(T), 0, 0, T), (0, 0, false));
    // The newer request; of one request, the fewest that are left.
    assert_eq!(restored(skips(3, T), 5, T - 1, 0), (3, T, false));
    assert_eq!(restored(skips(3, T), 5, T, 0), (3, T, false));
    assert_eq!(restored(skips(3, T), 2, T, 0), (2, T, false));
    assert_eq!(restored(skips(3, T), 5, T + 1, 0), (5, T + 1, false));
    // A skip that nobody asked for, and one from before requests had a time.
    assert_eq!(restored(skips(0, 0), 5, 0, 0), (5, 0, false));
    assert_eq!(restored(skips(0, 0), 5, T, 0), (5, T, false));
}

fn registration(known: i64) -> Register {
    Register {
        known: Occurrence(known),
        adopt: Some("incarnation".to_owned()),
        ..Register::first(job())
    }
}

fn registered(state: Option<State>, r: &Register, now: i64) -> (State, Effects) {
    let (said, state, effects) = asks_to_register(state, r, now);
    assert_eq!(said, Registration::Ready);
    (state, effects)
}

fn asks_to_register(
    mut state: Option<State>,
    r: &Register,
    now: i64,
) -> (Registration, State, Effects) {
    let mut effects = Effects::default();
    let said = register(&mut state, r, now * 1000, "incarnation", &mut effects);
    (said, state.expect("a state"), effects)
}

#[test]
fn what_is_owed_begins_with_what_is_known() {
    let since = |state, known, now| registered(state, &registration(known), now).0.since;
    assert_eq!(since(None, 0, T), T);
    assert_eq!(since(None, T - 5000, T), T - 5000);
    assert_eq!(since(None, T + 5000, T), T);
    // Another schedule owes nothing from before; a lease that was put back has none, and owes what it owed.
    let before = |schedule: &str, newest| {
        Some(State {
            schedule: schedule.to_owned(),
            newest,
            since: T - 9000,
            ..known()
        })
    };
    assert_eq!(since(before("s", T - 1000), 0, T), T - 9000);
    assert_eq!(since(before("other", T - 1000), 0, T), T);
    assert_eq!(since(before("other", 0), 0, T), T);
    assert_eq!(since(before("", T - 1000), 0, T), T - 9000);
    assert_eq!(since(before("", 0), 0, T), T - 9000);
    // No instance had the job for a while; or some instance always had it.
    let off = |off, presence| {
        let st = State {
            off,
            ..before("s", T - 1000).expect("one")
        };
        let r = Register {
            presence,
            ..registration(0)
        };
        let (st, _) = registered(Some(st), &r, T);
        (st.since, st.off)
    };
    let was_off = T - 4000;
    assert_eq!(off(was_off, Presence::New), (T, 0));
    assert_eq!(off(was_off, Presence::Kept), (T - 9000, 0));
    assert_eq!(off(was_off, Presence::Disabled), (T - 9000, was_off));
    assert_eq!(off(0, Presence::New), (T - 9000, 0));
    // The store lost that nobody has the job, or all that it knew of it.
    let other_data = || State {
        incarnation: "before".to_owned(),
        ..before("s", T - 1000).expect("one")
    };
    for (presence, was_off) in [
        (Presence::Disabled, T),
        (Presence::New, 0),
        (Presence::Kept, 0),
    ] {
        let r = Register {
            presence,
            ..registration(0)
        };
        for state in [None, Some(other_data())] {
            assert_eq!(registered(state, &r, T).0.off, was_off);
        }
    }
    // What is planned after its return is owed, however late the store hears of the return.
    let back = |off| {
        let st = State {
            off,
            ..before("s", T - 1000).expect("one")
        };
        let r = Register {
            back_at: T - 300,
            ..registration(0)
        };
        registered(Some(st), &r, T).0.since
    };
    assert_eq!(back(0), T - 9000);
    assert_eq!(back(was_off), T - 300);
    // Another instance got the job later, and registered it first.
    let later = State {
        since: T - 100,
        ..before("s", T - 1000).expect("one")
    };
    let r = Register {
        back_at: T - 300,
        ..registration(0)
    };
    assert_eq!(registered(Some(later), &r, T).0.since, T - 300);
    // Also while the store has another server's data, an instance that always had the job says so.
    let st = State {
        off: was_off,
        incarnation: "before".to_owned(),
        ..before("s", T - 1000).expect("one")
    };
    let r = Register {
        presence: Presence::Kept,
        adopt: None,
        ..registration(0)
    };
    let (said, st, _) = asks_to_register(Some(st), &r, T);
    assert_eq!((said, st.off), (Registration::Quarantined, 0));
    // The same where the store knows nothing, or no more than what instances told it to remember.
    let lost = |state, known, back_at| {
        let r = Register {
            back_at,
            lost_before: T - 100,
            ..registration(known)
        };
        let (st, _) = registered(state, &r, T);
        (st.since, st.lost_before)
    };
    let remembered = || {
        Some(State {
            skip: 1,
            ..State::default()
        })
    };
    for state in [|| None, remembered] {
        assert_eq!(lost(state(), T - 5000, T - 300).0, T - 300);
        assert_eq!(lost(state(), 0, T - 300), (T - 300, T - 100));
        assert_eq!(lost(state(), 0, 0), (T, T - 100));
    }
    // An old copy may have forgotten what ran before the loss.
    let copy = State {
        incarnation: "before".to_owned(),
        ..before("s", T - 1000).expect("one")
    };
    assert_eq!(lost(Some(copy), T - 700, T - 300), (T - 9000, T - 100));
    // What the caller owes is recorded, unless another instance has the job.
    let owes = |off| {
        let st = State {
            off,
            ..before("s", T - 1000).expect("one")
        };
        let r = Register {
            owed: vec![Missed::one(Occurrence(T - 500))],
            ..registration(0)
        };
        let (st, effects) = registered(Some(st), &r, T);
        (st.newest, effects.records.len())
    };
    assert_eq!(owes(0), (T - 1000, 0));
    assert_eq!(owes(was_off), (T - 500, 1));
}

#[test]
fn an_adopted_state_keeps_what_is_alive_and_what_may_run_twice() {
    let before = |e: Open| Open {
        incarnation: "before".to_owned(),
        ..e
    };
    let next_attempt = Some(NextAttempt {
        at: T,
        trigger: Trigger::Retry,
    });
    let alive = entry(&asks(T), T, 1, T);
    let dead = before(entry(&asks(T - 1000), T - 1000, 1, T - 1000));
    let awaited = before(Open {
        next_attempt,
        ..entry(&asks(T - 2000), T - 2000, 1, T - 2000)
    });
    let adopted = |open: &[&Open], on_crash| {
        let st = State {
            newest: T,
            open: open.iter().map(|e| (*e).clone()).collect(),
            ..st_of(&[])
        };
        let r = Register {
            on_crash,
            max_attempts: 3,
            ..registration(0)
        };
        let (st, effects) = registered(Some(st), &r, T + 10);
        let left: Vec<_> = st
            .open
            .iter()
            .map(|e| (e.run.occurrence.0 - T, e.next_attempt.is_some()))
            .collect();
        (left, effects.records.len())
    };
    let all = [&dead, &awaited, &alive];
    assert_eq!(adopted(&all, OnCrash::Fail), (vec![(0, false)], 1));
    assert_eq!(
        adopted(&all, OnCrash::Rerun),
        (vec![(-1000, true), (-2000, true), (0, false)], 1)
    );
    assert_eq!(
        adopted(&[&alive, &dead], OnCrash::Fail),
        (vec![(0, false)], 1)
    );
}

#[test]
fn what_was_lost_is_recorded_up_to_now_and_after_what_is_decided() {
    let range = |last: i64| Missed {
        first: Occurrence(T - 8000),
        last: Occurrence(last),
        count: 2,
    };
    let lost = |newest, last: i64| {
        let r = Register {
            lost: vec![range(last)],
            ..registration(0)
        };
        let st = State {
            newest,
            ..st_of(&[])
        };
        let (st, effects) = registered(Some(st), &r, T);
        (st.newest, effects.records.len())
    };
    assert_eq!(lost(T - 9000, T), (T, 1));
    assert_eq!(lost(T - 9000, T + 1), (T - 9000, 0));
    assert_eq!(lost(T - 1000, T - 1000), (T - 1000, 0));
    assert_eq!(lost(T - 500, T - 1000), (T - 500, 0));
}

#[test]
fn requests_of_one_moment_are_told_apart() {
    let mut state = Some(known());
    let mut ask = |what: &Control, now: i64| {
        let _ = control(
            &mut state,
            &job(),
            what,
            now * 1000,
            &mut Effects::default(),
        );
        let st = state.as_ref().expect("a state");
        (st.pause.as_ref().map(|p| p.at), st.resumed, st.skip_at)
    };
    let pause = Control::Pause {
        until: None,
        reason: None,
    };
    assert_eq!(ask(&pause, T), (Some(T), 0, 0));
    assert_eq!(ask(&Control::Resume, T), (None, T, 0));
    // Also where the clock has gone back meanwhile.
    assert_eq!(ask(&pause, T), (Some(T + 1), T, 0));
    assert_eq!(ask(&Control::Resume, T - 5), (None, T + 1, 0));
    assert_eq!(ask(&pause, T - 5), (Some(T + 2), T + 1, 0));
    assert_eq!(ask(&Control::Skip { count: 2 }, T), (Some(T + 2), T + 1, T));
    assert_eq!(ask(&Control::Skip { count: 2 }, T).2, T + 1);
    assert_eq!(ask(&Control::Skip { count: 2 }, T - 5).2, T + 2);
}

#[test]
fn what_ran_up_to_now_is_not_early() {
    let mut state = Some(State {
        newest: T + 60_000,
        ..known()
    });
    let what = Control::Rewind {
        ran: [T - 1, T, T + 1].map(Occurrence).to_vec(),
    }
    .by("alice");
    let mut effects = Effects::default();
    assert_eq!(
        control(&mut state, &job(), &what, T * 1000, &mut effects),
        Controlled::Done
    );
    let st = state.expect("a state");
    assert_eq!((st.newest, st.early), (T, vec![Occurrence(T + 1)]));
    assert_eq!(st.rewound_by.as_deref(), Some("alice"));
}

fn used(key: &str, at: i64) -> Triggered {
    Triggered {
        key: key.to_owned(),
        occurrence: Occurrence(at),
        at,
    }
}

fn waits(key: &str, at: i64) -> Pending {
    Pending {
        key: key.to_owned(),
        at,
        by: None,
    }
}

/// Registers with what the caller remembers. Returns the keys that are used, those that wait, and the records.
fn told(
    state: Option<State>,
    triggered: Vec<Triggered>,
    triggers: Vec<Pending>,
    adopt: Option<&str>,
) -> (Vec<String>, Vec<String>, Vec<RunRecord>) {
    let remembered = Remembered {
        triggered,
        triggers,
        ..Remembered::default()
    };
    assert!(!remembered.is_nothing());
    let r = Register {
        remembered,
        adopt: adopt.map(ToOwned::to_owned),
        lost_before: T,
        ..registration(0)
    };
    let (_, st, effects) = asks_to_register(state, &r, T);
    let used = st.triggered.into_iter().map(|t| t.key).collect();
    let waiting = st.triggers.into_iter().map(|t| t.key).collect();
    (used, waiting, effects.records)
}

/// The states that a store may have of a job before an instance tells it of triggers.
#[test]
fn a_store_that_forgot_keys_is_told_them_again() {
    let other = || State {
        incarnation: "before".to_owned(),
        newest: T - 10,
        ..State::default()
    };
    let adopt = Some("incarnation");
    for (state, adopt) in [
        (None, None),
        (None, adopt),
        (Some(other()), None),
        (Some(other()), adopt),
        (Some(known()), None),
    ] {
        let name = format!("{state:?} {adopt:?}");
        let keys = || vec![used("a", T - 20)];
        let (used_keys, waiting, records) = told(state.clone(), keys(), vec![], adopt);
        assert_eq!(used_keys, ["a"], "{name}");
        assert_eq!((waiting.len(), records.len()), (0, 0), "{name}");
        // What waits with that key was put in after the loss.
        if let Some(mut st) = state.clone() {
            st.triggers = vec![waits("a", T - 1), waits("b", T)];
            let (used_keys, waiting, records) = told(Some(st), keys(), vec![], adopt);
            assert_eq!(used_keys, ["a"], "{name}");
            assert_eq!(
                (&waiting[..], records.len()),
                (&["b".into()][..], 0),
                "{name}"
            );
        }
        // A trigger that waited may have run: it is kept until an instance adopts, and is recorded then.
        let adopted = adopt.is_some() || state == Some(known());
        let (used_keys, waiting, records) = told(state, vec![], vec![waits("w", T - 5)], adopt);
        match adopted {
            true => {
                assert_eq!((used_keys, waiting.len()), (vec!["w".into()], 0), "{name}");
                assert_eq!(records.len(), 1, "{name}");
                assert_eq!(records[0].outcome, Outcome::Unknown, "{name}");
            }
            false => assert_eq!((used_keys.len(), &*waiting[0]), (0, "w"), "{name}"),
        }
    }
}

#[test]
fn a_key_that_the_store_knows_is_not_told_twice() {
    let st = || State {
        triggered: vec![used("a", T - 30), used("c", T - 5)],
        triggers: vec![waits("w", T - 5)],
        ..known()
    };
    let keys = vec![used("a", T - 20), used("b", T - 10), used("d", T + 60_000)];
    let waiting = ["a", "b", "w"].map(|key| waits(key, T - 5)).to_vec();
    let (used_keys, waiting, records) = told(Some(st()), keys, waiting, None);
    // Oldest first, and none in the future: it would be kept for too long.
    assert_eq!(used_keys, ["a", "b", "c", "d"]);
    assert_eq!((&waiting[..], records.len()), (&["w".into()][..], 0));
}

#[test]
fn keys_of_our_own_are_forgotten_in_their_last_moment() {
    let kept = |age: i64| {
        let mut st = known();
        st.remember_trigger(&format!("{OWN_KEY}1"), Occurrence(T), T);
        forget_keys(&mut st.triggered, T + age);
        st.triggered.len()
    };
    assert_eq!(kept(OWN_KEYS_KEPT_MS - 1), 1);
    assert_eq!(kept(OWN_KEYS_KEPT_MS), 0);
}

/// One control of a state, at `now`: the answer, the state after it, the events.
fn controlled(st: State, what: &Control, now: i64) -> (Controlled, State, Vec<Event>) {
    let (mut state, mut effects) = (Some(st), Effects::default());
    let answer = control(&mut state, &job(), what, now * 1000, &mut effects);
    (answer, state.expect("a state"), effects.events)
}

#[test]
fn a_job_is_off_from_the_first_word_on_and_one_of_the_library_never() {
    let changed = vec![Event::Controlled { job: job() }];
    let (answer, st, events) = controlled(known(), &Control::Off, T);
    assert_eq!((answer, st.off, events), (Controlled::Done, T, changed));
    let (answer, st, events) = controlled(st, &Control::Off, T + 5);
    assert_eq!((answer, st.off, events), (Controlled::Nothing, T, vec![]));
    let library = State {
        schedule: LIBRARY.to_owned(),
        ..known()
    };
    let (answer, st, events) = controlled(library, &Control::Off, T);
    assert_eq!((answer, st.off, events), (Controlled::Nothing, 0, vec![]));
}

/// What is planned begins in the future, or is decided there: both were learned by a wrong clock.
#[test]
fn a_watermark_is_put_back_from_the_future_alone() {
    let rewind = Control::Rewind { ran: vec![] };
    let at = |newest, since| {
        let st = State {
            newest,
            since,
            ..known()
        };
        let (answer, st, events) = controlled(st, &rewind, T);
        (answer, st.newest, st.since, events.len())
    };
    assert_eq!(at(T, T), (Controlled::Nothing, T, T, 0));
    assert_eq!(at(T + 1, T - 1), (Controlled::Done, T, T - 1, 1));
    assert_eq!(at(T - 1, T + 1), (Controlled::Done, T - 1, T, 1));
    // A run that lasted until then must not overlap with what comes due until then.
    let run = entry(&asks(T), T, 1, T - 5);
    let mut last = last(&run, Outcome::Succeeded, None, T + 9000);
    for (from, wanted) in [(T - 5, (T - 5, T - 4, T)), (T + 5, (T, T, T))] {
        (last.from, last.started) = (from, Some(from + 1));
        let st = State {
            newest: T + 60_000,
            last: Some(last.clone()),
            ..known()
        };
        let st = controlled(st, &rewind, T).1;
        let times = st.last.and_then(|l| Some((l.from, l.started?, l.to)));
        assert_eq!(times, Some(wanted));
    }
}

/// The clock that dated the loss was ahead, and has been corrected.
#[test]
fn a_loss_in_the_future_keeps_nothing_back() {
    let mut st = State {
        newest: T - 2000,
        lost_before: T + 60_000,
        lost_until: T + 60_000,
        ..known()
    };
    granted(&mut st, &asks(T), T);
    assert_eq!((st.lost_before, st.lost_until), (0, 0));
}

#[test]
fn a_claim_that_gives_up_what_is_decided_in_part_is_behind() {
    let range = |first: i64, last: i64| Missed {
        first: Occurrence(first),
        last: Occurrence(last),
        count: 3,
    };
    let gives_up = |m: Missed| Claim {
        missed: vec![m],
        ..asks(T)
    };
    for (newest, early) in [(T - 3000, vec![]), (T - 9000, vec![Occurrence(T - 2000)])] {
        let st = State {
            newest,
            early: early.clone(),
            ..known()
        };
        let mut asked = st.clone();
        let (answer, effects) = claimed(&mut asked, &gives_up(range(T - 3000, T - 1000)), T);
        assert_eq!(
            answer,
            Answer::Behind {
                newest: Occurrence(newest),
                early,
            }
        );
        assert_eq!((asked, effects.records), (st, vec![]), "nothing is decided");
    }
    // All of it is decided, or none.
    for newest in [T - 1000, T - 3001] {
        let mut st = State { newest, ..known() };
        granted(&mut st, &gives_up(range(T - 3000, T - 1000)), T);
    }
}

/// What an instance knows to be decided counts, but nothing that a wrong clock told it.
#[test]
fn a_claimant_is_believed_up_to_ten_seconds_ahead() {
    let near = belief::NEAR.as_millis() as i64;
    for (known_at, newest) in [(T + near, T + near), (T + near + 1, T - 5000)] {
        let mut st = State {
            newest: T - 5000,
            ..known()
        };
        let c = Claim {
            known: Occurrence(known_at),
            ..asks(T - 5000)
        };
        let answer = claimed(&mut st, &c, T).0;
        assert_eq!((answer, st.newest), (Answer::Settled(None), newest));
    }
    // In the moment of the loss it is not in the future.
    let mut st = State {
        lost_before: T,
        ..known()
    };
    let lost = claimed(&mut st, &asks(T), T).0;
    assert_eq!(recorded(&lost), (Outcome::Unknown, LOST));
}

/// A run, or an attempt that is awaited, is in the way of the next occurrence: which of them gives way.
#[test]
fn each_policy_says_what_gives_way() {
    let before = T - 1000;
    let held = |granted_at, renewed_at| Open {
        renewed_at,
        ..entry(&asks(before), before, 1, granted_at)
    };
    let awaited = |trigger, at| Open {
        next_attempt: Some(NextAttempt { at, trigger }),
        ..held(before, before)
    };
    let (retry, takeover) = (
        |at| awaited(Trigger::Retry, at),
        awaited(Trigger::Takeover, T + 60_000),
    );
    let told = |open: &Open, overlap, holds: bool, pause: Option<i64>| {
        let mut st = State {
            newest: before,
            open: vec![open.clone()],
            pause: pause.map(|until| Pause {
                until: Some(until),
                reason: None,
                at: before,
                by: None,
            }),
            ..known()
        };
        st.triggers.push(Pending {
            key: "k".to_owned(),
            at: T,
            by: None,
        });
        let c = Claim {
            overlap,
            holds: holds.then_some(open.run.id).into_iter().collect(),
            ..if pause.is_some() {
                triggers("k", None)
            } else {
                asks(T)
            }
        };
        let answer = claimed(&mut st, &c, T + 1).0;
        let word = match &answer {
            Answer::Granted(_) => "granted",
            Answer::Blocked(_) => "blocked",
            Answer::RunFirst(at) if at.0 == before => "first",
            Answer::Recorded { reason, .. } if reason == OVERLAPS => "skipped",
            Answer::Later { wait_ms } => return (format!("later {wait_ms}"), st.waiting),
            other => panic!("{other:?}"),
        };
        (word.to_owned(), st.waiting)
    };
    for (open, overlap, word) in [
        // It was alive when the next one was due.
        (held(before, T), Overlap::Skip, "skipped"),
        (held(T, T), Overlap::Skip, "skipped"),
        (held(T + 1, T + 1), Overlap::Skip, "blocked"),
        // Nobody knows whether it was.
        (held(before, T - 1), Overlap::Skip, "blocked"),
        (held(before, T), Overlap::Queue, "blocked"),
        (held(before, T), Overlap::Replace, "blocked"),
        (held(before, T), Overlap::Allow, "granted"),
        (retry(T + 2), Overlap::Skip, "granted"),
        (retry(T + 2), Overlap::Replace, "granted"),
        (retry(T + 2), Overlap::Queue, "later 1"),
        (retry(T + 1), Overlap::Queue, "first"),
        (takeover.clone(), Overlap::Skip, "first"),
        (takeover.clone(), Overlap::Queue, "first"),
        (takeover.clone(), Overlap::Allow, "granted"),
    ] {
        let (said, waits) = told(&open, overlap, false, None);
        assert_eq!(said, word, "{open:?} {overlap:?}");
        assert_eq!(waits, word == "blocked");
    }
    // Its holder asks itself.
    assert_eq!(
        told(&held(before, T - 1), Overlap::Skip, true, None).0,
        "skipped"
    );
    // What goes first waits for the end of a pause, and a trigger behind it does, too.
    let pause = Some(T + 10);
    assert_eq!(told(&takeover, Overlap::Queue, false, pause).0, "later 9");
    assert_eq!(told(&retry(T), Overlap::Queue, false, pause).0, "later 9");
    assert_eq!(
        told(&retry(T + 3), Overlap::Queue, false, pause).0,
        "later 2"
    );
}

/// The run before was busy from its grant to its end: what is due within that is skipped, and by no other policy.
#[test]
fn what_was_due_during_the_run_before_is_skipped() {
    let run = |from: i64| Last {
        from,
        ..last(
            &entry(&asks(T - 9000), T - 9000, 1, from),
            Outcome::Failed,
            None,
            T + 5,
        )
    };
    for (from, overlap, skipped) in [
        (T, Overlap::Skip, true),
        (T + 1, Overlap::Skip, false),
        (T, Overlap::Queue, false),
        (T, Overlap::Replace, false),
    ] {
        let mut st = State {
            newest: T - 9000,
            last: Some(run(from)),
            ..known()
        };
        let answer = claimed(&mut st, &Claim { overlap, ..asks(T) }, T + 10).0;
        let granted = matches!(answer, Answer::Granted(_));
        assert_eq!(!granted, skipped, "{from} {overlap:?}");
    }
}

#[test]
fn a_dead_run_gives_way_to_the_next_occurrence_with_proof_alone() {
    let dead = entry(&asks(T - 1000), T - 1000, 1, T - 1000);
    for (proof, granted) in [(true, true), (false, false)] {
        let mut st = State {
            newest: T - 1000,
            open: vec![dead.clone()],
            ..known()
        };
        let c = Claim {
            observed: seen(&dead).filter(|_| proof),
            ..asks(T)
        };
        let (answer, effects) = claimed(&mut st, &c, T + 1);
        assert_eq!(matches!(answer, Answer::Granted(_)), granted, "{answer:?}");
        assert_eq!(effects.records.len(), usize::from(proof));
        assert_eq!((st.open.len(), st.waiting), (1, !granted));
    }
    // Each part of the proof counts.
    let right = seen(&dead).expect("one");
    let mut wrong = [right.clone(), right.clone(), right.clone()];
    wrong[0].run = RunId::random();
    wrong[1].seq += 1;
    wrong[2].incarnation = "before".to_owned();
    assert!(dead.is(Some(&right)) && !dead.is(None));
    assert!(!wrong.iter().any(|w| dead.is(Some(w))));
}

/// Whoever watches the lease has to begin anew.
#[test]
fn a_claim_that_is_asked_again_renews_its_lease() {
    let (mut st, c) = (known(), asks(T));
    let first = granted(&mut st, &c, T);
    assert_eq!(granted(&mut st, &c, T + 700), first);
    let e = &st.open[0];
    assert_eq!((e.seq, e.renewed_at, e.run.granted_at), (1, T + 700, T));
    // As a renewal does, which has a number of its own.
    let mut state = Some(State {
        open: vec![Open {
            stop: Some(StopRequest::Replaced),
            ..e.clone()
        }],
        ..st
    });
    let mut ask = renewal(c.run, T, 1);
    for (number, seq) in [(1, 2), (9, 9), (9, 10)] {
        ask.seq = number;
        let said = renew(&mut state, &ask, (T + 900) * 1000, "incarnation");
        assert_eq!(said, Renewal::Renewed(Some(StopRequest::Replaced)));
        let e = &state.as_ref().expect("a state").open[0];
        assert_eq!((e.seq, e.renewed_at), (seq, T + 900));
    }
    // Its next attempt is awaited: it is no lease.
    let st = state.as_mut().expect("a state");
    st.open[0].next_attempt = Some(NextAttempt {
        at: T,
        trigger: Trigger::Retry,
    });
    let said = renew(&mut state, &ask, (T + 900) * 1000, "incarnation");
    assert_eq!(said, Renewal::Lost);
}

/// What the store has of a job after a run, and whom it tells.
#[test]
fn a_run_that_ends_leaves_its_times_and_wakes_who_waits() {
    let settled = |finished: Option<i64>, stop, retry: bool, waiting| {
        let c = asks(T);
        let e = Open {
            stop,
            ..entry(&c, T, 1, T + 10)
        };
        let record = RunRecord {
            started_at: Some(T + 20),
            finished_at: finished,
            ..e.record(&job(), Outcome::Failed, T, "")
        };
        let mut state = Some(State {
            newest: T,
            open: vec![e],
            waiting,
            ..known()
        });
        let s = Settle {
            run: c.run,
            record,
            next_attempt: retry.then_some(DelayedAttempt {
                delay_ms: 300,
                trigger: Trigger::Retry,
            }),
        };
        let mut effects = Effects::default();
        let said = settle(
            &mut state,
            &s,
            (T + 500) * 1000,
            "incarnation",
            &mut effects,
        );
        assert_eq!(said, Settlement::Done);
        let st = state.expect("a state");
        assert!(!st.waiting);
        let l = st.last.expect("it ended");
        assert_eq!(
            (l.from, l.started, l.outcome),
            (T + 10, Some(T + 20), Outcome::Failed)
        );
        let next = st.open.first().and_then(|e| e.next_attempt);
        (l.to - T, next.map(|n| n.at - T), effects.events)
    };
    let ended = || Event::Ended { job: job() };
    let awaited = || Event::AttemptAwaited {
        job: job(),
        occurrence: Occurrence(T),
    };
    assert_eq!(
        settled(Some(T + 400), None, false, false),
        (400, None, vec![])
    );
    assert_eq!(settled(None, None, false, true), (500, None, vec![ended()]));
    // By a clock that is ahead.
    assert_eq!(settled(Some(T + 501), None, false, false).0, 500);
    let (_, next, events) = settled(Some(T + 400), None, true, true);
    assert_eq!((next, events), (Some(800), vec![awaited(), ended()]));
    // It was asked to end.
    let cancelled = Some(StopRequest::Cancelled);
    assert_eq!(settled(None, cancelled, true, false), (500, None, vec![]));
}

#[test]
fn the_end_of_a_pause_wakes_what_waits_for_its_next_attempt() {
    let paused = |until| State {
        pause: Some(Pause {
            until,
            reason: None,
            at: T - 500,
            by: None,
        }),
        open: vec![
            entry(&asks(T), T, 1, T),
            Open {
                next_attempt: Some(NextAttempt {
                    at: T,
                    trigger: Trigger::Retry,
                }),
                ..entry(&asks(T - 1000), T - 1000, 1, T)
            },
        ],
        ..known()
    };
    let changed = || Event::Controlled { job: job() };
    let awaited = || Event::AttemptAwaited {
        job: job(),
        occurrence: Occurrence(T - 1000),
    };
    for (st, answer, events) in [
        (paused(None), Controlled::Done, vec![changed(), awaited()]),
        (
            paused(Some(T + 1)),
            Controlled::Done,
            vec![changed(), awaited()],
        ),
        // It was over by itself.
        (paused(Some(T)), Controlled::Nothing, vec![changed()]),
        (known(), Controlled::Nothing, vec![]),
    ] {
        let (said, st, told) = controlled(st, &Control::Resume, T);
        assert_eq!((said, told, st.pause), (answer, events, None));
    }
    // Until somebody resumes it, nobody knows how long that takes.
    let later = claimed(&mut paused(None), &asks(T - 1000), T).0;
    let wait_ms = PAUSED_WAIT_MS;
    assert_eq!(later, Answer::Later { wait_ms });
}

/// An epoch lasts until the server is another one; it opens with the word of who saw this very epoch long enough.
#[test]
fn an_epoch_is_begun_vouched_for_and_lost() {
    let mut stored = None;
    let mut beats = 0;
    let mut beat = |quarantine: Option<u64>, vouched, clocks, incarnation: &str| {
        beats += 1;
        let beat = quarantine.map(|s| EpochBeat {
            quarantine: std::time::Duration::from_secs(s),
            vouched,
        });
        let fresh = || format!("epoch {beats}");
        let e = heartbeat(&mut stored, beat, clocks, incarnation, fresh);
        (e.id.clone(), e.born, e.quarantine.as_secs(), e.open)
    };
    let says = |id: &str, born, quarantine, open| (id.to_owned(), born, quarantine, open);
    let now = (5, None);
    assert_eq!(beat(None, None, now, "a"), says("epoch 1", 5, 0, false));
    assert_eq!(
        beat(Some(9), None, (6, None), "a"),
        says("epoch 1", 5, 9, false)
    );
    for wrong in [("a", "epoch 2"), ("b", "epoch 1")] {
        let said = beat(Some(3), Some(wrong), now, "a");
        assert_eq!(said, says("epoch 1", 5, 9, false));
    }
    let right = Some(("a", "epoch 1"));
    for vouched in [right, right, None] {
        let said = beat(Some(10), vouched, now, "a");
        assert_eq!(said, says("epoch 1", 5, 10, true));
    }
    // The later of both clocks.
    let said = beat(Some(1), right, (8, Some(7)), "b");
    assert_eq!(said, says("epoch 8", 8, 1, false));
    let said = beat(None, None, (8, Some(9)), "c");
    assert_eq!(said, says("epoch 9", 9, 0, false));
}
