//! Puts the decisions about one job into the order in which the store made them.
//!
//! Each answer shows the job's state right before its decision and right after it, so the state after one decision is
//! the state before the next. Where that is not so, questions without an answer may have been decided in between, or
//! the store's data was lost or replaced by older data.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use serde_json::Value;

use crate::{
    logic::claim::{Answered, Effects, Question, Register, State},
    model::{Boottime, RunRecord},
    store::Around,
};

/// A question, with its answer if one came.
#[derive(Debug)]
pub(super) struct Operation {
    /// Where it stands: of which file, and in which line.
    pub(super) place: (usize, usize),
    /// Which process asked.
    pub(super) process: usize,
    /// Which life of a kernel its [`Boottime`]s belong to.
    pub(super) boot: usize,
    pub(super) sent: Boottime,
    /// What the store's clock shows when it is sent, as the other questions tell; Unix µs.
    pub(super) sent_us: i64,
    /// Where it stands among the others, as far as is known: the store's time, Unix µs.
    pub(super) about_us: i64,
    pub(super) question: Question,
    pub(super) done: Option<Done>,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Done {
    /// When the question left: told with each answer that grants or renews a lease, because the lease counts from then.
    pub(super) left: Option<Boottime>,
    pub(super) received: Boottime,
    /// What the store's clock showed, Unix µs.
    pub(super) now_us: i64,
    pub(super) answer: Answered,
    /// None: the store's clock was in doubt, and it decided nothing.
    pub(super) step: Option<Transition>,
}

/// What one decision did to the state.
#[derive(Debug, Clone)]
pub(super) struct Transition {
    /// The time by which it was decided, Unix µs.
    pub(super) now_us: i64,
    pub(super) incarnation: std::sync::Arc<str>,
    pub(super) before: Id,
    pub(super) after: Id,
    /// What it recorded, by the rules; None: no rule gives the answer.
    pub(super) records: Option<Vec<RunRecord>>,
}

/// Names a state by its content.
pub(super) type Id = u64;

/// All states of a record, each once.
#[derive(Debug, Default, Clone)]
pub(super) struct States(HashMap<Id, Box<str>>);

impl States {
    pub(super) fn id(&mut self, state: Option<&State>) -> Id {
        // Cannot fail: a state consists of strings, numbers and lists of them.
        let text = serde_json::to_string(&state).unwrap_or_default();
        let id = xxhash_rust::xxh3::xxh3_64(text.as_bytes());
        self.0.entry(id).or_insert_with(|| text.into());
        id
    }

    pub(super) fn step(&mut self, around: &Around, records: Option<Vec<RunRecord>>) -> Transition {
        Transition {
            now_us: around.now_us,
            incarnation: around.incarnation.clone(),
            before: self.id(around.before.as_ref()),
            after: self.id(around.after.as_ref()),
            records,
        }
    }

    fn text(&self, id: Id) -> &str {
        self.0.get(&id).map_or("null", |text| text)
    }

    pub(super) fn get(&self, id: Id) -> Option<State> {
        serde_json::from_str(self.text(id)).unwrap_or_default()
    }
}

/// One question, decided.
#[derive(Debug, Clone)]
pub(super) struct Decided {
    /// Which operation.
    pub(super) operation: usize,
    /// The time by which the store decided.
    pub(super) now_us: i64,
    pub(super) answer: Answered,
    pub(super) records: Vec<RunRecord>,
    /// What the state before this does not follow from.
    pub(super) jump: Option<Jump>,
    /// `since`, `newest` and `off` of the state after it.
    pub(super) since: i64,
    pub(super) newest: i64,
    pub(super) off: i64,
}

/// What the heartbeats tell of losses of data. Times are of the store's clock, Unix µs, ascending.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// After each of these the store had other data, under the same incarnation.
    pub(super) found: Vec<i64>,
    /// Times in which the data may have been lost once more, and no heartbeat could tell.
    pub(super) unseen: Vec<Unseen>,
}

/// From the last heartbeat of an epoch to the first one of the next epoch, or to the end of the record.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unseen {
    /// That of the epoch which ended.
    pub(super) incarnation: String,
    pub(super) from_us: i64,
    pub(super) to_us: i64,
}

/// Why a state does not follow from the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Jump {
    /// The store lost its data, or had other data.
    Lost,
    /// The state is gone, and no heartbeat can tell whether the store lost its data.
    Unseen,
    /// Questions without an answer were decided in between; which ones, and what they recorded, is not known.
    Unanswered,
    /// Nothing explains it.
    Unexplained,
}

/// The decisions in order.
#[derive(Debug)]
pub(super) struct Ordered {
    pub(super) decided: Vec<Decided>,
    /// The state at the end.
    pub(super) state: Option<State>,
}

/// Among how many questions the next one is looked for.
const WINDOW: usize = 64;
/// How many of the newest states a question that changed nothing may have seen.
const RECENT: usize = 64;
/// How many questions without an answer may have been decided in a row.
const IN_A_ROW: usize = 8;
/// How many jumps one question without an answer may excuse. It was decided once, but where it is missing, the answers
/// around it may be put into a wrong order, which makes further jumps.
const JUMPS: usize = 4;
/// From how many places it is looked further where more than one question may have been decided next.
const TRIES: usize = 1000;
/// How many states are followed that they may lead to.
const BEAM: usize = 12;

/// Finds the order. `operations` are those of one job.
pub(super) fn order(operations: &[Operation], losses: &Losses, states: &mut States) -> Ordered {
    let with_step = |i: &usize| {
        operations[*i]
            .done
            .as_ref()
            .is_some_and(|d| d.step.is_some())
    };
    let mut answered: Vec<usize> = (0..operations.len()).filter(with_step).collect();
    // Questions of one request have one time, and were decided in the order in which they were written.
    answered.sort_by_key(|&i| (operations[i].about_us, operations[i].process, i));
    let open = (0..operations.len()).filter(|&i| operations[i].done.is_none());
    let walk = Walk {
        at: Place {
            operations,
            left: answered.into(),
            state: None,
            incarnation: None,
            left_states: VecDeque::new(),
        },
        losses,
        open: open.collect(),
        losses_used: 0,
        decided: vec![],
        excused: 0,
    };
    walk.run(states)
}

/// How far the walk has come.
#[derive(Clone)]
struct Place<'a> {
    operations: &'a [Operation],
    /// The answered ones that have no place yet, by the store's time.
    left: VecDeque<usize>,
    /// None: the record begins later than the store's data.
    state: Option<Id>,
    incarnation: Option<&'a str>,
    /// States that were left, the newest first, and the answered operation that left them, if it was one.
    left_states: VecDeque<(Id, Option<usize>)>,
}

struct Walk<'a> {
    at: Place<'a>,
    losses: &'a Losses,
    /// Those without an answer that were not decided yet, as far as is known.
    open: Vec<usize>,
    losses_used: usize,
    decided: Vec<Decided>,
    /// How many jumps questions without an answer have excused.
    excused: usize,
}

impl<'a> Place<'a> {
    fn step(&self, i: usize) -> &'a Transition {
        let done = self.operations[i].done.as_ref();
        // Only such operations are in `left`.
        done.and_then(|d| d.step.as_ref())
            .unwrap_or_else(|| unreachable!("it was decided"))
    }

    /// Which answered questions may have been decided next.
    fn next(&self) -> Vec<usize> {
        let window: Vec<usize> = self.left.iter().copied().take(WINDOW).collect();
        // Nothing that was answered before another was sent comes after it.
        let earliest = |boot: usize| {
            let of = window.iter().map(|&i| &self.operations[i]);
            let received = of
                .filter(|o| o.boot == boot)
                .filter_map(|o| Some(o.done.as_ref()?.received));
            received.min()
        };
        let may_be_next = |i: &usize| {
            let o = &self.operations[*i];
            earliest(o.boot).is_none_or(|received| o.sent <= received)
        };
        let next: Vec<usize> = window.iter().copied().filter(may_be_next).collect();
        // A record may tell of answers that came before their questions left.
        match next.is_empty() {
            true => window.into_iter().take(1).collect(),
            false => next,
        }
    }

    /// The state before `i` is the one now; or `i` changed nothing, and saw a state that was left at the same time.
    fn follows(&self, i: usize) -> bool {
        let Transition { before, after, .. } = self.step(i);
        let Some(state) = self.state else { return true };
        let saw = |(state, by): &(Id, Option<usize>)| {
            state == before && by.is_none_or(|by| !self.surely_before(by, i))
        };
        *before == state
            || before == after && !self.other_data(i) && self.left_states.iter().any(saw)
    }

    /// `j` was answered before `i` was sent.
    fn surely_before(&self, j: usize, i: usize) -> bool {
        let (p, o) = (&self.operations[j], &self.operations[i]);
        let answered = p.done.as_ref().is_some_and(|done| done.received < o.sent);
        p.boot == o.boot && answered
    }

    /// `i` was decided in another incarnation than what came before.
    fn other_data(&self, i: usize) -> bool {
        let incarnation = &*self.step(i).incarnation;
        self.incarnation.is_some_and(|before| before != incarnation)
    }

    /// Those of `next` that may be taken now, but for those that need not come first: one that changes nothing can
    /// always be taken before all others, and of those that do the same, the one that was answered first.
    fn followers(&self, next: &[usize]) -> Vec<usize> {
        let mut all: Vec<usize> = next.iter().copied().filter(|&i| self.follows(i)).collect();
        if self.state.is_none() {
            return all;
        }
        let received = |i: usize| self.operations[i].done.as_ref().map(|done| done.received);
        all.sort_by_key(|&i| received(i));
        let mut seen = BTreeSet::new();
        all.retain(|&i| {
            let Transition { before, after, .. } = *self.step(i);
            seen.insert((self.operations[i].boot, before, after))
        });
        let idle = |&&i: &&usize| self.step(i).before == self.step(i).after;
        match all.iter().find(idle) {
            Some(&i) => vec![i],
            None => all,
        }
    }

    fn take(&mut self, i: usize, jumps: bool) {
        let step = self.step(i);
        self.left.retain(|&j| j != i);
        self.incarnation = Some(&*step.incarnation);
        if step.before != step.after || self.state.is_none() || jumps {
            self.move_to(step.after, Some(i));
        }
    }

    fn move_to(&mut self, state: Id, by: Option<usize>) {
        if let Some(before) = self.state.replace(state) {
            self.left_states.push_front((before, by));
            self.left_states.truncate(RECENT);
        }
    }

    /// Which of several may be taken: a state can come back (a job that is removed and added again), and then more than
    /// one question that changes it has seen it. The one from which most others follow.
    fn best(&self, followers: &[usize]) -> Option<usize> {
        if followers.len() < 2 {
            return followers.first().copied();
        }
        let near = self.near();
        let mut seen = HashSet::new();
        // The first of the best.
        let mut best = None;
        for &i in followers {
            let reach = near.reach(i, None, &mut seen);
            if best.is_none_or(|(most, _)| reach > most) {
                best = Some((reach, i));
            }
        }
        best.map(|(_, i)| i)
    }

    /// The same, without what is far from being next.
    fn near(&self) -> Self {
        Self {
            left: self.left.iter().copied().take(WINDOW).collect(),
            left_states: self.left_states.clone(),
            ..*self
        }
    }

    /// How many follow one upon the other if `i` is taken, by the best way that is found. `again`: when none follows,
    /// this one may come next, after a loss; true: also in the same incarnation. `seen`: from where it was looked
    /// before, which is not looked at again.
    fn reach(
        &self,
        i: usize,
        mut again: Option<(usize, bool)>,
        seen: &mut HashSet<(VecDeque<usize>, Option<Id>)>,
    ) -> usize {
        let mut at = self.clone();
        at.take(i, false);
        let mut far = 1;
        loop {
            let next = at.next();
            match at.followers(&next)[..] {
                [] => match again.take() {
                    Some((j, found)) if next.contains(&j) && (found || at.other_data(j)) => {
                        at.take(j, true);
                    }
                    _ => return far,
                },
                [one] => at.take(one, false),
                ref some => {
                    let further =
                        match seen.len() < TRIES && seen.insert((at.left.clone(), at.state)) {
                            true => some.iter().map(|&i| at.reach(i, again, seen)).max(),
                            false => None,
                        };
                    return far + further.unwrap_or(0);
                }
            }
            far += 1;
        }
    }
}

impl<'a> Walk<'a> {
    fn run(mut self, states: &mut States) -> Ordered {
        while !self.at.left.is_empty() {
            let next = self.at.next();
            match self.at.best(&self.at.followers(&next)) {
                Some(i) => match self.same_again(&next, i) {
                    Some(j) => self.jump(&[j], states),
                    None => self.take(i, None, states),
                },
                None => self.jump(&next, states),
            }
        }
        Ordered {
            state: self.at.state.and_then(|id| states.get(id)),
            decided: self.decided,
        }
    }

    fn take(&mut self, i: usize, jump: Option<Jump>, states: &mut States) {
        self.at.take(i, jump.is_some());
        let step = self.at.step(i);
        let state = states.get(step.after).unwrap_or_default();
        let done = self.at.operations[i].done.as_ref();
        self.decided.extend(done.map(|done| Decided {
            operation: i,
            now_us: step.now_us,
            answer: done.answer.clone(),
            records: step.records.clone().unwrap_or_default(),
            jump,
            since: state.since,
            newest: state.newest,
            off: state.off,
        }));
    }

    /// `i` follows, but a loss may have come before it: by the same store's clock, one of `next` may have put the same
    /// state there again after the loss and before `i`. If more follows so, `i` comes after that one.
    fn same_again(&self, next: &[usize], i: usize) -> Option<usize> {
        let state = self.at.state.filter(|_| self.maybe_lost_before(i))?;
        let then = self.at.step(i);
        let again = |&j: &usize| {
            let step = self.at.step(j);
            let there = step.before != step.after && step.after == state;
            there
                && step.incarnation == then.incarnation
                && step.now_us <= then.now_us
                && !self.at.follows(j)
                && self.maybe_lost_before(j)
        };
        let j = next.iter().copied().find(again)?;
        let near = self.at.near();
        // What was decided before the loss, and that one after it.
        let otherwise = Some((j, self.found_before(j)));
        let reach = |i, again| near.reach(i, again, &mut HashSet::new());
        (reach(j, None) > reach(i, otherwise)).then_some(j)
    }

    /// Another incarnation or the heartbeats tell of a loss, and the data may have been lost before `i`.
    fn maybe_lost_before(&self, i: usize) -> bool {
        self.at.other_data(i) || self.found_before(i)
    }

    /// The heartbeats tell of a loss, and it may have come before `i`.
    fn found_before(&self, i: usize) -> bool {
        let loss = self.losses.found.get(self.losses_used);
        loss.is_some_and(|from| *from <= self.at.step(i).now_us)
    }

    /// None of `next` follows.
    fn jump(&mut self, next: &[usize], states: &mut States) {
        let Some(state) = self.at.state else { return };
        // What another one that is left leads to comes after that one.
        let led_to: BTreeSet<Id> = (self.at.left.iter().take(WINDOW))
            .map(|&i| self.at.step(i))
            .filter(|s| s.before != s.after)
            .map(|s| s.after)
            .collect();
        let (mut heads, others): (Vec<usize>, Vec<usize>) = next
            .iter()
            .partition(|&&i| !led_to.contains(&self.at.step(i).before));
        heads.extend(others);
        for &i in &heads {
            if self.take_unanswered(state, i, states) {
                self.at.move_to(self.at.step(i).before, None);
                return self.take(i, None, states);
            }
        }
        let Some(&i) = heads.first() else { return };
        let jump = if self.maybe_lost_before(i) {
            Jump::Lost
        } else if self.may_be_lost(i) && self.began_anew(i, states) {
            Jump::Unseen
        } else if self.excused < JUMPS * self.open_before(i) {
            self.excused += 1;
            Jump::Unanswered
        } else {
            Jump::Unexplained
        };
        self.jump_to(i, jump, states);
    }

    fn jump_to(&mut self, i: usize, jump: Jump, states: &mut States) {
        if jump == Jump::Lost && !self.at.other_data(i) {
            self.losses_used += 1;
        }
        // Others may have seen that state, too.
        self.at.move_to(self.at.step(i).before, None);
        self.take(i, Some(jump), states);
    }

    /// The store may have lost its data between the question before `i` and `i`, and no heartbeat could tell.
    fn may_be_lost(&self, i: usize) -> bool {
        let step = self.at.step(i);
        let before = self.decided.last().map_or(i64::MIN, |d| d.now_us);
        (self.losses.unseen.iter()).any(|unseen| {
            unseen.incarnation == *step.incarnation
                && unseen.from_us <= step.now_us
                && before <= unseen.to_us
        })
    }

    /// `i` found nothing of the job, or no more than what questions without an answer have put there. No rule removes a
    /// state: only a loss of data does.
    fn began_anew(&mut self, i: usize, states: &mut States) -> bool {
        let nothing = states.id(None);
        self.at.step(i).before == nothing || self.take_unanswered(nothing, i, states)
    }

    /// Takes questions without an answer that lead from a state to that before `i`, if there are such.
    fn take_unanswered(&mut self, from: Id, i: usize, states: &States) -> bool {
        let Some(between) = self.unanswered(from, i, states) else {
            return false;
        };
        for decided in between {
            self.open.retain(|&j| j != decided.operation);
            self.decided.push(decided);
        }
        true
    }

    /// `j`, which has no answer, may have been decided before `i`.
    fn may_be_before(&self, j: usize, i: usize) -> bool {
        let (p, o) = (&self.at.operations[j], &self.at.operations[i]);
        match &o.done {
            Some(done) if p.boot == o.boot => p.sent <= done.received,
            _ => p.sent_us <= o.about_us + super::check::INEXACT_US,
        }
    }

    /// How many questions without an answer may have been decided before `i`.
    fn open_before(&self, i: usize) -> usize {
        let before = |j: &&usize| self.may_be_before(**j, i);
        self.open.iter().filter(before).count()
    }

    /// Questions without an answer that lead from a state to that before `i`, if there are such.
    fn unanswered(&self, from: Id, i: usize, states: &States) -> Option<Vec<Decided>> {
        let step = self.at.step(i);
        let (now, then) = (states.text(from), states.text(step.before));
        let target: Value = serde_json::from_str(then).unwrap_or_default();
        // Their times are dates in the state that they led to.
        let mut dates = vec![];
        dates_of(&target, &mut dates);
        dates.retain(|ms| !now.contains(&ms.to_string()));
        let concerns = |question: &Question| {
            let names = |text: &str| now.contains(text) || then.contains(text);
            match question {
                Question::Claim(c) => match &c.target {
                    // Also where it waits behind a run, it gives up what comes before it.
                    crate::logic::claim::Target::Scheduled(at) => {
                        let given_up = c.missed.last().map(|missed| missed.last);
                        names(&c.run.to_string())
                            || names(&at.0.to_string())
                            || given_up.is_some_and(|last| names(&last.0.to_string()))
                    }
                    crate::logic::claim::Target::Manual { key, .. } => {
                        names(&c.run.to_string()) || names(key)
                    }
                },
                Question::Renew(r) => names(&r.run.id.to_string()),
                Question::Settle(s) => names(&s.run.to_string()),
                Question::Register(_) | Question::Control(..) => true,
            }
        };
        let able =
            |&&j: &&usize| self.may_be_before(j, i) && concerns(&self.at.operations[j].question);
        let able: Vec<usize> = self.open.iter().filter(able).copied().collect();
        if able.is_empty() {
            return None;
        }
        let mut reached = HashSet::from([from]);
        let mut beam: Vec<(Option<State>, Vec<Decided>)> = vec![(states.get(from), vec![])];
        for _ in 0..IN_A_ROW {
            let mut further: Vec<(usize, Option<State>, Vec<Decided>)> = vec![];
            for (state, path) in &beam {
                for &j in &able {
                    if path.iter().any(|d| d.operation == j) {
                        continue;
                    }
                    for (after, decided) in self.led_to(j, state.as_ref(), step, &dates) {
                        let text = serde_json::to_string(&after).unwrap_or_default();
                        let id = xxhash_rust::xxh3::xxh3_64(text.as_bytes());
                        if !reached.insert(id) {
                            continue;
                        }
                        let path = [&path[..], &[decided]].concat();
                        if id == step.before {
                            return Some(path);
                        }
                        let shown = serde_json::from_str(&text).unwrap_or_default();
                        further.push((difference(&shown, &target), after, path));
                    }
                }
            }
            further.sort_by_key(|(difference, ..)| *difference);
            further.truncate(BEAM);
            beam = further
                .into_iter()
                .map(|(_, state, path)| (state, path))
                .collect();
        }
        None
    }

    /// What `j` may have led to, at each time at which it may have been decided.
    fn led_to(
        &self,
        j: usize,
        state: Option<&State>,
        until: &Transition,
        dates: &[i64],
    ) -> Vec<(Option<State>, Decided)> {
        let p = &self.at.operations[j];
        let times = dates
            .iter()
            .map(|ms| ms * 1000)
            .chain([p.sent_us, until.now_us]);
        let mut all = vec![];
        for now_us in times {
            for question in variants(&p.question) {
                let (mut after, mut effects) = (state.cloned(), Effects::default());
                let incarnation = self.at.incarnation.unwrap_or(&until.incarnation);
                let answer = question.decide(&mut after, now_us, incarnation, &mut effects);
                if after.as_ref() == state {
                    continue;
                }
                let (since, newest, off) =
                    (after.as_ref()).map_or((0, 0, 0), |s| (s.since, s.newest, s.off));
                let decided = Decided {
                    operation: j,
                    now_us,
                    answer,
                    records: effects.records,
                    jump: None,
                    since,
                    newest,
                    off,
                };
                all.push((after, decided));
            }
        }
        all
    }
}

/// The question as it was asked, and as a store decides it whose epoch is not the one that it names.
pub(super) fn variants(question: &Question) -> Vec<Question> {
    let mut all = vec![question.clone()];
    if let Question::Register(r) = question
        && r.adopt.is_some()
    {
        all.push(Question::Register(Box::new(Register {
            adopt: None,
            ..(**r).clone()
        })));
    }
    all
}

/// All numbers that can be dates, Unix ms.
pub(super) fn dates_of(v: &Value, all: &mut Vec<i64>) {
    const LEAST: i64 = 1_000_000_000_000;
    match v {
        Value::Object(members) => members.values().for_each(|v| dates_of(v, all)),
        Value::Array(some) => some.iter().for_each(|v| dates_of(v, all)),
        Value::Number(n) => all.extend(n.as_i64().filter(|n| *n >= LEAST && !all.contains(n))),
        _ => {}
    }
}

/// In how many members two values differ, at any depth.
fn difference(a: &Value, b: &Value) -> usize {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let of_a = a
                .iter()
                .map(|(k, v)| b.get(k).map_or(1, |w| difference(v, w)));
            of_a.sum::<usize>() + b.keys().filter(|k| !a.contains_key(*k)).count()
        }
        (Value::Array(a), Value::Array(b)) => {
            let both = a.iter().zip(b).map(|(v, w)| difference(v, w));
            both.sum::<usize>() + 3 * a.len().abs_diff(b.len())
        }
        _ => usize::from(a != b),
    }
}

#[cfg(test)]
#[path = "order_tests.rs"]
pub(super) mod tests;
