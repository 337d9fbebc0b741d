//! The store of a world: the rules that decide, and data that can be lost, rolled back and replaced.

use std::collections::BTreeMap;

use super::World;
use crate::{
    logic::{
        belief,
        claim::{
            self, Answer, Claim, Control, Controlled, Effects, EpochBeat, Register, Registration,
            Renew, Renewal, Settle, State, StoredEpoch,
        },
    },
    model::JobName,
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
pub(super) enum Request {
    Claim(Box<Claim>),
    Register(Box<Register>),
    Renew(Box<Renew>),
    Settle(Box<Settle>),
}

#[derive(Debug, Clone)]
pub(super) enum Reply {
    Claim(Box<Answer>),
    Register(Registration, Option<Box<State>>),
    Renew(Renewal),
    Settle,
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

    /// The answer to a request.
    // Long: one arm for each request.
    pub(super) fn serve(&mut self, request: Request, believed: Option<i64>) -> Reply {
        let (us, in_doubt) = self.time_for(believed);
        let incarnation = self.server.incarnation();
        let mut effects = Effects::default();
        let reply = match request {
            Request::Claim(_) if in_doubt => Reply::Claim(Box::new(Answer::InDoubt)),
            Request::Register(_) if in_doubt => Reply::Register(Registration::Quarantined, None),
            Request::Claim(c) => {
                let answer = self.with(&c.job, |st| {
                    claim::claim(st, &c, us, &incarnation, &mut effects)
                });
                self.say(|_| {
                    format!(
                        "{} claims {:?}: {}",
                        c.instance,
                        c.target.id(),
                        words(&answer)
                    )
                });
                self.granted(&c, &answer);
                Reply::Claim(Box::new(answer))
            }
            Request::Register(r) => {
                let epoch = self.server.data.epoch.as_ref();
                let same = epoch.is_some_and(|e| {
                    e.incarnation == incarnation && r.epoch.as_ref().is_none_or(|id| *id == e.id)
                });
                let r = match same {
                    true => *r,
                    false => Register { adopt: None, ..*r },
                };
                let nothing = |st: &State| st.newest.max(st.since) == 0;
                let lost = self.server.data.states.get(&r.job).is_none_or(nothing);
                if lost && r.adopt.is_some() && r.known.0 == 0 {
                    self.begun_anew(&r.job);
                }
                let (answer, state) = self.with(&r.job, |st| {
                    let answer = claim::register(st, &r, us, &incarnation, &mut effects);
                    (answer, st.clone().map(Box::new))
                });
                self.say(|_| {
                    let how = if r.adopt.is_some() {
                        "adopts"
                    } else {
                        "registers"
                    };
                    let lost: Vec<String> = r
                        .lost
                        .iter()
                        .map(|l| format!("{} x{}", l.last, l.count))
                        .collect();
                    let (known, now) = (r.known, crate::model::Occurrence(us / 1000));
                    format!(
                        "{} {how} {} (knows {known}, {lost:?}, {now}): {answer:?}",
                        r.instance, r.job
                    )
                });
                Reply::Register(answer, state)
            }
            Request::Renew(r) => {
                let answer = self.with(&r.job, |st| claim::renew(st, &r, us, &incarnation));
                self.say(|_| {
                    format!(
                        "{} renews {}: {answer:?}",
                        r.run.instance,
                        super::short(r.run.id)
                    )
                });
                Reply::Renew(answer)
            }
            Request::Settle(s) => {
                let job = s.record.job.clone();
                let answer = self.with(&job, |st| {
                    claim::settle(st, &s, us, &incarnation, &mut effects)
                });
                self.say(|_| {
                    format!(
                        "{} is settled as {}: {answer:?}",
                        super::short(s.run),
                        s.record.outcome
                    )
                });
                Reply::Settle
            }
        };
        self.effects(effects);
        reply
    }

    /// What somebody asks of a job.
    pub(super) fn control(&mut self, job: &JobName, what: &Control) -> Controlled {
        if !self.server.up {
            return Controlled::Nothing;
        }
        let us = self.store_us();
        let mut effects = Effects::default();
        let done = self.with(job, |st| claim::control(st, job, what, us, &mut effects));
        self.effects(effects);
        done
    }

    fn with<T>(&mut self, job: &JobName, f: impl FnOnce(&mut Option<State>) -> T) -> T {
        let states = &mut self.server.data.states;
        let mut state = states.remove(job);
        let out = f(&mut state);
        if let Some(state) = state {
            states.insert(job.clone(), state);
        }
        out
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

fn words(answer: &Answer) -> String {
    match answer {
        Answer::Granted(g) => format!("granted {} attempt {}", g.occurrence, g.attempt),
        Answer::Running(o) => format!("{} runs it", o.run.instance),
        Answer::Blocked(o) => format!("blocked by {}", super::short(o.run.id)),
        other => format!("{other:?}"),
    }
}
