//! The store of a world: the rules that decide, and data that can be lost, rolled back and replaced.

use std::collections::BTreeMap;

use super::{World, cases};
use crate::{
    logic::{
        belief,
        claim::{
            self, Answer, Answered, Control, Controlled, Effects, EpochBeat, Question, Register,
            Registration, State, StoredEpoch,
        },
    },
    model::{JobName, Occurrence},
};

/// What is lost with the data.
#[derive(Debug, Clone, Default)]
pub(super) struct Data {
    pub(super) states: BTreeMap<JobName, State>,
    pub(super) epoch: Option<StoredEpoch>,
}

#[derive(Debug, Clone)]
pub(super) struct Server {
    pub(super) up: bool,
    pub(super) data: Data,
    /// An older copy of the data, or what it was replaced by.
    pub(super) copy: Option<Box<Data>>,
    /// Names the data: a new one after each restart or replacement.
    pub(super) incarnations: u32,
    pub(super) epochs: u32,
    /// Its clock is so far ahead of the truth.
    pub(super) ahead_us: i64,
}

impl Server {
    pub(super) fn new() -> Self {
        Self {
            up: true,
            data: Data::default(),
            copy: None,
            incarnations: 1,
            epochs: 0,
            ahead_us: 0,
        }
    }

    pub(super) fn incarnation(&self) -> String {
        format!("data-{}", self.incarnations)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Reply {
    pub(super) answered: Answered,
    /// After a registration: what the store has of the job.
    pub(super) state: Option<Box<State>>,
    /// The time that the store's clock showed, Unix µs, and its incarnation.
    pub(super) now_us: i64,
    pub(super) incarnation: String,
}

impl World {
    /// The time for a request of somebody who believes `believed`, as Redis has it, Unix µs; and whether the clock is
    /// in doubt.
    pub(super) fn time_for(&self, believed: Option<i64>) -> (i64, bool) {
        let shown = self.store_us();
        match believed {
            Some(us) if belief::in_doubt(us / 1000, shown / 1000) => (us, true),
            _ => (shown, false),
        }
    }

    /// The answer to a question of somebody who believes `believed`.
    pub(super) fn serve(&mut self, question: Question, believed: Option<i64>) -> Reply {
        let (us, in_doubt) = self.time_for(believed);
        let (answered, state) = match question {
            Question::Claim(_) if in_doubt => (Answered::Claim(Answer::InDoubt), None),
            Question::Register(_) if in_doubt => {
                (Answered::Register(Registration::Quarantined), None)
            }
            Question::Register(r) => {
                let question = Question::Register(self.checked(r));
                let answered = self.decide(&question, us);
                let state = self.server.data.states.get(question.job());
                (answered, state.cloned().map(Box::new))
            }
            question => (self.decide(&question, us), None),
        };
        Reply {
            answered,
            state,
            now_us: self.store_us(),
            incarnation: self.server.incarnation(),
        }
    }

    /// A registration, without what it may not do any more in this epoch.
    fn checked(&mut self, r: Box<Register>) -> Box<Register> {
        let epoch = self.server.data.epoch.as_ref();
        let same = epoch.is_some_and(|e| {
            e.incarnation == self.server.incarnation()
                && r.epoch.as_ref().is_none_or(|id| *id == e.id)
        });
        match same {
            true => r,
            false => Box::new(Register { adopt: None, ..*r }),
        }
    }

    fn decide(&mut self, question: &Question, us: i64) -> Answered {
        let incarnation = self.server.incarnation();
        let states = &mut self.server.data.states;
        let mut state = states.remove(question.job());
        let mut effects = Effects::default();
        let answered = cases::decide(question, &mut state, us, &incarnation, &mut effects);
        if let Some(state) = state {
            states.insert(question.job().clone(), state);
        }
        self.say(|_| words(question, &answered, us));
        if let (Question::Claim(c), Answered::Claim(answer)) = (question, &answered) {
            self.granted(c, answer);
        }
        self.effects(effects);
        answered
    }

    /// What somebody asks of a job.
    pub(super) fn control(&mut self, job: &JobName, what: &Control) -> Controlled {
        if !self.server.up {
            return Controlled::Nothing;
        }
        let question = Question::Control(job.clone(), what.clone());
        match self.decide(&question, self.store_us()) {
            Answered::Control(done) => done,
            other => unreachable!("{other:?} to a control"),
        }
    }

    /// Records are kept, and hints reach all who can hear them.
    fn effects(&mut self, effects: Effects) {
        for record in effects.records {
            self.recorded(record);
        }
        for event in effects.events {
            for i in 0..self.instances.len() {
                let here = &self.instances[i];
                if here.alive && !here.frozen && !here.cut {
                    self.on_event(i, &event);
                }
            }
        }
    }

    /// One heartbeat, as far as the store's epoch goes.
    pub(super) fn epoch(
        &mut self,
        beat: Option<EpochBeat<'_>>,
        believed: Option<i64>,
    ) -> StoredEpoch {
        let (us, _) = self.time_for(believed);
        let incarnation = self.server.incarnation();
        let epochs = &mut self.server.epochs;
        let fresh = || {
            *epochs += 1;
            format!("epoch-{epochs}")
        };
        let times = (us / 1000, believed.map(|us| us / 1000));
        claim::heartbeat(
            &mut self.server.data.epoch,
            beat,
            times,
            &incarnation,
            fresh,
        )
        .clone()
    }
}

/// A question and its answer, in one line.
fn words(question: &Question, answered: &Answered, us: i64) -> String {
    match question {
        Question::Claim(c) => {
            let answer = match answered {
                Answered::Claim(Answer::Granted(g)) => {
                    format!("granted {} attempt {}", g.occurrence, g.attempt)
                }
                Answered::Claim(Answer::Running(o)) => format!("{} runs it", o.run.instance),
                Answered::Claim(Answer::Blocked(o)) => {
                    format!("blocked by {}", super::short(o.run.id))
                }
                other => format!("{other:?}"),
            };
            format!("{} claims {:?}: {answer}", c.instance, c.target.id())
        }
        Question::Register(r) => {
            let how = match r.adopt {
                Some(_) => "adopts",
                None => "registers",
            };
            let lost = r.lost.iter().map(|l| format!("{} x{}", l.last, l.count));
            let lost: Vec<String> = lost.collect();
            let (known, now) = (r.known, Occurrence(us / 1000));
            format!(
                "{} {how} {} (knows {known}, {lost:?}, {now}): {answered:?}",
                r.instance, r.job
            )
        }
        Question::Renew(r) => {
            let run = super::short(r.run.id);
            format!("{} renews {run}: {answered:?}", r.run.instance)
        }
        Question::Settle(s) => {
            let (run, outcome) = (super::short(s.run), s.record.outcome);
            format!("{run} is settled as {outcome}: {answered:?}")
        }
        Question::Control(job, what) => format!("people ask of {job}: {what:?}: {answered:?}"),
    }
}
