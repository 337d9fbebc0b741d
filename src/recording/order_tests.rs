//! Decisions are put into the order in which the store made them, whatever order their answers suggest.

use std::sync::Arc;

use super::*;
use crate::{
    logic::claim::{Claim, Control, Missed, OnCrash, Overlap, Presence, Renew, Target},
    model::{InstanceId, JobName, Occurrence, Run, RunId, Trigger},
};

/// Unix µs, and the same moment on the only host.
const T: i64 = 1_800_000_000_000_000;
const MS: i64 = 1000;

/// A store that decides by the rules, and the record of what it was asked.
struct Told {
    state: Option<State>,
    incarnation: &'static str,
    operations: Vec<Operation>,
    states: States,
}

/// When a question leaves, is decided and is answered; ms.
type Times = (i64, i64, i64);

fn told() -> Told {
    Told {
        state: Some(State {
            incarnation: "a".to_owned(),
            since: T / 1000,
            ..State::default()
        }),
        incarnation: "a",
        operations: vec![],
        states: States::default(),
    }
}

fn skip(count: u32) -> Question {
    Question::Control(JobName::new("job"), Control::Skip { count })
}

/// Of an instance with this definition: the state comes back when another one with the former definition asks.
fn register(definition: &str) -> Question {
    Question::Register(Box::new(Register {
        definition: definition.to_owned(),
        counted_from: 0,
        presence: Presence::Kept,
        ..Register::first(JobName::new("job"))
    }))
}

/// Changes nothing.
fn cancel() -> Question {
    Question::Control(JobName::new("job"), Control::Cancel)
}

/// A holder puts its lease back, where the store has lost it.
fn reclaim(run: u64, incarnation: &str) -> Question {
    Question::Renew(Box::new(Renew {
        job: JobName::new("job"),
        run: Run {
            id: RunId(uuid::Uuid::from_u128(u128::from(run))),
            occurrence: Occurrence(T / 1000 + run as i64 * 1000),
            attempt: 1,
            trigger: Trigger::Schedule,
            key: None,
            instance: InstanceId::new("i"),
            host: String::new(),
            lease: 2000,
            definition: String::new(),
            granted_at: T / 1000,
        },
        seq: 1,
        late: false,
        reclaim: incarnation.to_owned(),
    }))
}

/// Asks for an occurrence, and gives one up; seconds from the beginning.
pub(in crate::recording) fn claim(run: u64, at: i64, given_up: Option<i64>) -> Question {
    let occurrence = |s: i64| Occurrence(T / 1000 + s * 1000);
    Question::Claim(Box::new(Claim {
        job: JobName::new("job"),
        target: Target::Scheduled(occurrence(at)),
        known: occurrence(given_up.unwrap_or(at) - 1),
        missed: given_up
            .map(occurrence)
            .map(Missed::one)
            .into_iter()
            .collect(),
        run: RunId(uuid::Uuid::from_u128(u128::from(run))),
        instance: InstanceId::new("i"),
        host: String::new(),
        trigger: Trigger::Schedule,
        start_by: i64::MAX,
        lease: 2000,
        overlap: Overlap::Skip,
        on_crash: OnCrash::Fail,
        max_attempts: 1,
        definition: String::new(),
        observed: None,
        holds: vec![],
        cause: None,
    }))
}

impl Told {
    /// Asks, and returns the number of the operation. `answered`: false, the answer was lost.
    fn ask(&mut self, question: Question, times: Times, answered: bool) -> usize {
        let boot = |ms: i64| Boottime(((T + ms * MS) * 1000) as u64);
        let now_us = T + times.1 * MS;
        let (before, mut effects) = (self.state.clone(), Effects::default());
        let answer = question.decide(&mut self.state, now_us, self.incarnation, &mut effects);
        let around = Around {
            now_us,
            incarnation: Arc::from(self.incarnation),
            before,
            after: self.state.clone(),
        };
        let step = self.states.step(&around, Some(effects.records));
        let sent_us = T + times.0 * MS;
        self.operations.push(Operation {
            place: (0, self.operations.len()),
            process: self.operations.len(),
            boot: 0,
            sent: boot(times.0),
            sent_us,
            // As of an answer whose time was changed on the way: about the middle of what is possible.
            about_us: i64::midpoint(sent_us, T + times.2 * MS),
            question,
            done: answered.then(|| Done {
                left: None,
                received: boot(times.2),
                now_us,
                answer,
                step: Some(step),
            }),
        });
        self.operations.len() - 1
    }

    fn loses_its_data(&mut self) {
        self.state = None;
    }

    /// The operations in the order that is found, and what each state before does not follow from.
    fn order(&mut self, losses: &Losses) -> Vec<(usize, Option<Jump>)> {
        let ordered = order(&self.operations, losses, &mut self.states);
        assert_eq!(ordered.state, self.state, "the state at the end");
        let of = |d: Decided| (d.operation, d.jump);
        ordered.decided.into_iter().map(of).collect()
    }
}

/// A loss between these heartbeats, ms.
fn found(from: i64) -> Losses {
    Losses {
        found: vec![T + from * MS],
        unseen: vec![],
    }
}

fn unseen(incarnation: &str, from: i64, to: i64) -> Losses {
    let unseen = Unseen {
        incarnation: incarnation.to_owned(),
        from_us: T + from * MS,
        to_us: T + to * MS,
    };
    Losses {
        found: vec![],
        unseen: vec![unseen],
    }
}

#[test]
fn questions_that_were_under_way_together_stand_in_the_order_of_their_states() {
    let mut told = told();
    let begin = told.ask(cancel(), (0, 1, 2), true);
    // The one that was decided first was answered last.
    let first = told.ask(skip(1), (5, 10, 90), true);
    let second = told.ask(skip(2), (5, 11, 60), true);
    let third = told.ask(skip(3), (5, 12, 30), true);
    let order = told.order(&Losses::default());
    let expected = [(begin, None), (first, None), (second, None), (third, None)];
    assert_eq!(order, expected);
}

#[test]
fn a_state_that_comes_back_may_be_left_twice() {
    let mut told = told();
    let begin = told.ask(cancel(), (0, 1, 2), true);
    let leaves = told.ask(register("x"), (5, 10, 90), true);
    let back = told.ask(register(""), (5, 11, 60), true);
    let leaves_again = told.ask(skip(1), (5, 12, 30), true);
    let order = told.order(&Losses::default());
    let expected = [
        (begin, None),
        (leaves, None),
        (back, None),
        (leaves_again, None),
    ];
    assert_eq!(order, expected);
}

proptest::proptest! {
    /// However long questions and answers are under way, and whatever states come back.
    #[test]
    fn an_order_is_found_whatever_was_under_way_together(
        asked in proptest::collection::vec((0..5, 0_i64..40, 0_i64..40), 1..60)
    ) {
        let mut told = told();
        told.ask(cancel(), (0, 0, 0), true);
        for (n, (what, way, back)) in asked.into_iter().enumerate() {
            let at = n as i64 + 1;
            let question = match what {
                0 => register(""),
                1 => register("x"),
                2 => Question::Control(JobName::new("job"), Control::Off),
                3 => skip(1),
                _ => cancel(),
            };
            told.ask(question, ((at - way).max(1), at, at + back), true);
        }
        let jumps: Vec<_> = told.order(&Losses::default());
        proptest::prop_assert!(jumps.iter().all(|(_, jump)| jump.is_none()), "{jumps:?}");
    }
}

#[test]
fn what_was_decided_before_a_loss_stands_before_it_though_it_was_answered_later() {
    let mut told = told();
    let first = told.ask(skip(1), (0, 10, 20), true);
    // Under way during the loss, and decided before it.
    let late = told.ask(skip(2), (21, 22, 900), true);
    let later = told.ask(skip(3), (21, 23, 800), true);
    told.loses_its_data();
    let back = told.ask(reclaim(1, "a"), (100, 110, 120), true);
    let after = told.ask(skip(4), (130, 140, 150), true);
    let order = told.order(&found(50));
    let expected = [
        (first, None),
        (late, None),
        (later, None),
        (back, Some(Jump::Lost)),
        (after, None),
    ];
    assert_eq!(order, expected);
    // The same, and no heartbeat tells of a loss: that a state is gone follows from no rule.
    let order = told.order(&Losses::default());
    let jumps: Vec<_> = order.iter().filter(|(_, jump)| jump.is_some()).collect();
    assert_eq!(jumps, [&(back, Some(Jump::Unexplained))]);
}

#[test]
fn what_was_asked_after_an_answer_stands_after_it() {
    let mut told = told();
    let first = told.ask(skip(1), (0, 10, 20), true);
    let read = told.ask(cancel(), (12, 13, 14), true);
    let second = told.ask(skip(2), (30, 40, 50), true);
    // It sees the state that the second one left; it could not, after the answer of that, if that state were gone.
    let stale = told.ask(cancel(), (60, 70, 80), true);
    let order = told.order(&Losses::default());
    let expected = [(first, None), (read, None), (second, None), (stale, None)];
    assert_eq!(order, expected);
    // Shown the state of before, though the change of it was answered: it was told something that was over.
    let old = told.operations[read]
        .done
        .as_ref()
        .and_then(|d| d.step.clone());
    let old = old.expect("it was decided");
    let done = told.operations[stale].done.as_mut().expect("an answer");
    let now_us = done.now_us;
    done.step = Some(Transition {
        now_us,
        ..old.clone()
    });
    told.state = told.states.get(old.after);
    let order = told.order(&Losses::default());
    assert_eq!(order.last(), Some(&(stale, Some(Jump::Unexplained))));
}

#[test]
fn a_question_that_changed_nothing_may_have_seen_a_state_that_was_left_meanwhile() {
    let mut told = told();
    let first = told.ask(skip(1), (0, 10, 20), true);
    let read = told.ask(cancel(), (21, 22, 900), true);
    let second = told.ask(skip(2), (21, 23, 30), true);
    let third = told.ask(skip(3), (40, 41, 50), true);
    let order = told.order(&Losses::default());
    let expected = [(first, None), (second, None), (third, None), (read, None)];
    let mut sorted = order.clone();
    sorted.retain(|(i, _)| *i != read);
    assert_eq!(sorted, expected[..3]);
    assert!(order.contains(&(read, None)), "{order:?}");
}

#[test]
fn a_question_without_an_answer_stands_where_its_effect_is_seen() {
    let mut told = told();
    let first = told.ask(skip(1), (0, 10, 20), true);
    let silent = told.ask(skip(2), (21, 22, 23), false);
    let third = told.ask(skip(3), (30, 40, 50), true);
    let never = told.ask(skip(3), (60, 70, 80), true);
    let order = told.order(&Losses::default());
    let expected = [(first, None), (silent, None), (third, None), (never, None)];
    assert_eq!(order, expected);
}

/// It waits behind the run, so the state does not show the occurrence that it asks for.
#[test]
fn a_claim_without_an_answer_is_known_by_what_it_gave_up() {
    let mut told = told();
    let first = told.ask(claim(1, 1, None), (0, 1001, 1002), true);
    let silent = told.ask(claim(2, 3, Some(2)), (3000, 3010, 3020), false);
    let third = told.ask(skip(1), (3100, 3110, 3120), true);
    // A heartbeat tells of a loss that came later.
    let order = told.order(&found(3000));
    assert_eq!(order, [(first, None), (silent, None), (third, None)]);
}

#[test]
fn other_data_is_a_loss_without_any_heartbeat() {
    let mut told = told();
    let first = told.ask(skip(1), (0, 10, 20), true);
    told.loses_its_data();
    told.incarnation = "b";
    let back = told.ask(reclaim(1, "b"), (30, 40, 50), true);
    let order = told.order(&Losses::default());
    assert_eq!(order, [(first, None), (back, Some(Jump::Lost))]);
}

/// The data is lost twice, and no heartbeat finds the epoch in between.
#[test]
fn a_loss_that_no_heartbeat_can_tell_of_is_not_judged() {
    let mut told = told();
    let first = told.ask(skip(1), (0, 10, 20), true);
    told.loses_its_data();
    let back = told.ask(reclaim(1, "a"), (110, 120, 130), true);
    told.loses_its_data();
    told.incarnation = "b";
    let again = told.ask(reclaim(1, "b"), (210, 220, 230), true);
    let lost = Some(Jump::Lost);
    for (losses, jump) in [
        (unseen("a", 100, 200), Jump::Unseen),
        // A heartbeat after it found the epoch that was there all the time, or it came in another incarnation.
        (unseen("a", 121, 200), Jump::Unexplained),
        // It came before the question, or before the state was seen last.
        (unseen("a", 90, 119), Jump::Unseen),
        (unseen("a", 1, 9), Jump::Unexplained),
        (unseen("b", 100, 200), Jump::Unexplained),
    ] {
        let order = told.order(&losses);
        assert_eq!(order, [(first, None), (back, Some(jump)), (again, lost)]);
    }
}

#[test]
fn what_was_put_back_without_an_answer_is_known_after_a_loss_that_no_heartbeat_can_tell_of() {
    let mut told = told();
    let first = told.ask(skip(1), (0, 10, 20), true);
    told.loses_its_data();
    let silent = told.ask(reclaim(1, "a"), (110, 120, 130), false);
    let next = told.ask(reclaim(1, "a"), (140, 150, 160), true);
    let order = told.order(&unseen("a", 100, 200));
    let expected = [(first, None), (silent, None), (next, Some(Jump::Unseen))];
    assert_eq!(order, expected);
}

/// The same after each loss.
fn remember() -> Question {
    let Question::Register(mut question) = register("") else {
        unreachable!("it registers a job")
    };
    question.remembered.skip = 1;
    Question::Register(question)
}

/// After the second loss, another question sees or changes it before the one that put it back is answered.
#[test]
fn a_state_that_is_there_again_after_another_loss_is_left_after_that_loss() {
    for (incarnation, next) in [("a", skip(2)), ("b", skip(2)), ("b", cancel())] {
        let mut told = told();
        let first = told.ask(skip(1), (0, 10, 20), true);
        told.loses_its_data();
        let put = told.ask(remember(), (60, 70, 80), true);
        told.loses_its_data();
        told.incarnation = incarnation;
        let put_again = told.ask(remember(), (101, 110, 900), true);
        let leaves = told.ask(next, (100, 111, 800), true);
        let later = told.ask(skip(3), (1000, 1010, 1020), true);
        let mut losses = found(50);
        if incarnation == "a" {
            losses.found.push(T + 90 * MS);
        }
        let (order, lost) = (told.order(&losses), Some(Jump::Lost));
        let expected = [
            (first, None),
            (put, lost),
            (put_again, lost),
            (leaves, None),
            (later, None),
        ];
        assert_eq!(order, expected, "{incarnation}");
    }
}

#[test]
fn what_left_a_state_before_a_loss_stands_before_it_though_that_state_is_there_again() {
    for seen in [false, true] {
        let mut told = told();
        let first = told.ask(skip(1), (0, 10, 20), true);
        told.loses_its_data();
        let put = told.ask(remember(), (60, 70, 80), true);
        let leaves = told.ask(skip(2), (85, 95, 800), true);
        told.loses_its_data();
        let put_again = told.ask(remember(), (101, 110, if seen { 900 } else { 120 }), true);
        if seen {
            told.ask(cancel(), (100, 111, 800), true);
        }
        let later = told.ask(skip(3), (1000, 1010, 1020), true);
        let mut losses = found(50);
        losses.found.push(T + 90 * MS);
        let mut order = told.order(&losses);
        order.retain(|(i, _)| [first, put, leaves, put_again, later].contains(i));
        let lost = Some(Jump::Lost);
        let expected = [
            (first, None),
            (put, lost),
            (leaves, None),
            (put_again, lost),
            (later, None),
        ];
        assert_eq!(order, expected, "{seen}");
    }
}

/// The server was restarted with its data, and then somebody changed that.
#[test]
fn a_state_that_was_seen_in_another_incarnation_is_not_put_there_by_what_came_later() {
    let mut told = told();
    let first = told.ask(skip(1), (0, 10, 20), true);
    told.incarnation = "b";
    let seen = told.ask(cancel(), (30, 40, 800), true);
    told.state.as_mut().expect("a state").off = 9;
    let odd = told.ask(register(""), (45, 50, 60), true);
    let later = told.ask(skip(3), (900, 910, 920), true);
    let order = told.order(&Losses::default());
    let odd = (odd, Some(Jump::Unexplained));
    assert_eq!(order, [(first, None), (seen, None), odd, (later, None)]);
}

/// What this job never needed excuses one change that follows from nothing, and no more.
#[test]
fn a_loss_from_before_the_first_answer_does_not_undo_a_change_of_the_incarnation() {
    let mut told = told();
    told.loses_its_data();
    let put = told.ask(remember(), (5, 10, 20), true);
    let leaves = told.ask(skip(2), (30, 40, 800), true);
    told.loses_its_data();
    told.incarnation = "b";
    let put_again = told.ask(remember(), (45, 50, 60), true);
    let mut odd = |times| {
        told.state.as_mut().expect("a state").off += 9;
        told.ask(skip(3), times, true)
    };
    let odd = [(70, 80, 90), (100, 110, 120)].map(&mut odd);
    let lost = Some(Jump::Lost);
    let expected = [
        (put, None),
        (leaves, None),
        (put_again, lost),
        (odd[0], lost),
        (odd[1], Some(Jump::Unexplained)),
    ];
    assert_eq!(told.order(&found(1)), expected);
}

/// A loss takes everything: a state that is there, and follows from nothing, is none.
#[test]
fn a_state_that_is_not_gone_is_judged_whatever_the_heartbeats_can_tell() {
    let mut told = told();
    let first = told.ask(skip(1), (0, 10, 20), true);
    told.state.as_mut().expect("a state").skip = 9;
    let odd = told.ask(skip(2), (110, 120, 130), true);
    let order = told.order(&unseen("a", 100, 200));
    assert_eq!(order, [(first, None), (odd, Some(Jump::Unexplained))]);
}
