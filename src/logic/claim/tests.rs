//! Keys of triggers, and what a loss of the store's data leaves.

use std::collections::BTreeSet;

use super::*;
use crate::model::JobName;

fn job() -> JobName {
    JobName::new("backup")
}

fn put(state: &mut Option<State>, key: &str, now: i64) -> Controlled {
    let what = Control::Trigger {
        key: key.to_owned(),
    };
    control(state, &job(), &what, now * 1000, &mut Effects::default())
}

#[test]
fn keys_are_remembered_for_a_time_and_not_for_a_number_of_triggers() {
    let t = 1_800_000_000_000;
    let mut state = Some(State::default());
    let used = |state: &mut Option<State>, key: &str, at: i64| {
        assert_eq!(put(state, key, at), Controlled::Done, "{key}");
        let st = state.as_mut().unwrap();
        st.remember_trigger(key, Occurrence(at), at);
    };
    let own = |i: usize| format!("{OWN_KEY}{i}");
    used(&mut state, "first", t);
    for i in 0..3 * OWN_KEYS_MOST {
        used(&mut state, &own(i), t + 1 + i as i64);
    }
    assert_eq!(
        put(&mut state, "first", t + 5000),
        Controlled::Triggered(Occurrence(t))
    );
    let st = state.as_ref().unwrap();
    assert!(st.triggered.len() <= OWN_KEYS_MOST + 2);
    // soloist's own keys are gone soon, people's keys when their time is over.
    let last = own(3 * OWN_KEYS_MOST - 1);
    assert!(matches!(
        put(&mut state, &last, t + OWN_KEYS_KEPT_MS),
        Controlled::Triggered(_)
    ));
    assert_eq!(
        put(&mut state, &own(0), t + 2 * OWN_KEYS_KEPT_MS),
        Controlled::Done
    );
    assert_eq!(state.as_ref().unwrap().triggered.len(), 1);
    assert!(matches!(
        put(&mut state, "first", t + KEYS_KEPT_MS - 1),
        Controlled::Triggered(_)
    ));
    assert_eq!(put(&mut state, "first", t + KEYS_KEPT_MS), Controlled::Done);
}

/// A restarted store kept what ran early; the instance that counted the range did not know of it.
#[test]
fn what_ran_early_is_not_recorded_as_lost() {
    let t = 1_800_000_000_000;
    let at = |s: i64| Occurrence(t + s * 1000);
    let range = |first: i64, last: i64| Missed {
        first: at(first),
        last: at(last),
        count: (last - first + 1) as u64,
    };
    let mut state = Some(State {
        incarnation: "before".to_owned(),
        newest: t,
        early: vec![at(4), at(40)],
        ..State::default()
    });
    let mut ask = Register {
        adopt: Some("now".to_owned()),
        lost: vec![range(1, 9)],
        ..Register::first(job())
    };
    let mut effects = Effects::default();
    let now = at(20).0 * 1000;
    let answer = register(&mut state, &ask, now, "now", &mut effects);
    assert_eq!(
        (answer, effects.records.len()),
        (Registration::Quarantined, 0)
    );
    ask.lost = vec![range(1, 3), range(5, 9)];
    let answer = register(&mut state, &ask, now, "now", &mut effects);
    assert_eq!(answer, Registration::Ready);
    let all: Vec<_> = effects
        .records
        .iter()
        .map(|r| (r.occurrence, r.count))
        .collect();
    assert_eq!(all, [(at(3), 3), (at(9), 5)]);
    assert_eq!(state.unwrap().newest, at(9).0);
}

fn registration(known: i64) -> Register {
    Register {
        schedule: "every 2 s".to_owned(),
        known: Occurrence(known),
        ..Register::first(job())
    }
}

/// A settlement or a renewal made a state in a store that had lost all, after the caller had looked at it.
#[test]
fn what_was_lost_is_counted_anew_if_the_store_knows_of_more_by_then() {
    let t = 1_800_000_000_000;
    let mut state = Some(State {
        newest: t - 9000,
        ..State::default()
    });
    let mut ask = Register {
        adopt: Some("now".to_owned()),
        counted_from: 0,
        ..registration(0)
    };
    let mut effects = Effects::default();
    let answer = register(&mut state, &ask, t * 1000, "now", &mut effects);
    assert_eq!(answer, Registration::Quarantined);
    ask.counted_from = t - 9000;
    ask.lost = vec![Missed::one(Occurrence(t - 7000))];
    let answer = register(&mut state, &ask, t * 1000, "now", &mut effects);
    assert_eq!((answer, effects.records.len()), (Registration::Ready, 1));
    assert_eq!(state.map(|s| s.newest), Some(t - 7000));
}

/// A store that went back to an older copy of its data does not know which triggers have run since.
#[test]
fn a_trigger_from_before_a_loss_is_recorded_and_not_run() {
    let t = 1_800_000_000_000;
    let pending = |key: &str, at| Pending {
        key: key.to_owned(),
        at,
        by: None,
    };
    let mut state = Some(State {
        incarnation: "before".to_owned(),
        schedule: "every 2 s".to_owned(),
        triggers: vec![
            pending("old", t - 5000),
            pending("older", t - 6000),
            pending("new", t + 1),
        ],
        ..State::default()
    });
    let ask = Register {
        adopt: Some("now".to_owned()),
        lost_before: t,
        ..registration(0)
    };
    let mut effects = Effects::default();
    let answer = register(&mut state, &ask, (t + 999) * 1000, "now", &mut effects);
    assert_eq!(answer, Registration::Ready);
    let st = state.expect("a state");
    assert_eq!(st.triggers, [pending("new", t + 1)]);
    let keys: Vec<&str> = st.triggered.iter().map(|t| t.key.as_str()).collect();
    assert_eq!(keys, ["old", "older"]);
    let at: BTreeSet<i64> = effects.records.iter().map(|r| r.occurrence.0).collect();
    assert_eq!(at.len(), 2, "{at:?}");
    assert!(
        effects
            .records
            .iter()
            .all(|r| r.outcome == Outcome::Unknown)
    );
    assert!(at.iter().all(|at| at % 1000 != 0), "{at:?}");
}

#[test]
fn a_key_too_many_is_refused_and_none_is_forgotten() {
    let t = 1_800_000_000_000;
    let mut state = Some(State::default());
    for i in 0..KEYS_MOST as i64 {
        let st = state.as_mut().unwrap();
        st.remember_trigger(&format!("k{i}"), Occurrence(t + i), t + i);
    }
    let now = t + KEYS_MOST as i64;
    assert_eq!(put(&mut state, "more", now), Controlled::TooMany);
    assert_eq!(
        put(&mut state, "k0", now),
        Controlled::Triggered(Occurrence(t))
    );
    let own = format!("{OWN_KEY}1");
    assert_eq!(put(&mut state, &own, now), Controlled::Done);
    // There is room when the first is forgotten.
    state.as_mut().unwrap().triggers.clear();
    assert_eq!(put(&mut state, "more", t + KEYS_KEPT_MS), Controlled::Done);
}
