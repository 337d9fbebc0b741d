//! What is due at an instance: the driver of each job, its contests, and the leases of others that it watches.

use std::time::Duration;

use super::{AWAY, CLAIMABLE_RECHECK, Flight, LOOK_AGAIN, Pause, Wait, Watch};
use crate::{
    logic::{
        backoff,
        claim::{Event, Open, Question, Target},
        contest::{
            Ask, Contest, ContestEnd, Due, Effect, Halt, Next, Slot, Step, Subject, View, rank,
            unfold,
        },
        observe::{self, WatchedLease},
        schedule::next_of,
    },
    model::{Boottime, InstanceId, JobName, Occurrence, RunId},
    world::{TIMEOUT, World},
};

impl World {
    pub(super) fn dispatch(&mut self, i: usize, job: &JobName) -> bool {
        let Some(now_ms) = self.instances[i].believed_ms(self.now) else {
            return false;
        };
        let h = self.here(i, job);
        let mut busy = false;
        while let Some(after) = h.planned
            && let Some(at) = next_of(&h.state.definition.schedules, after)
            && at.0 <= now_ms
        {
            h.planned = Some(at);
            let within = h.state.definition.start_within.as_millis() as i64;
            let due = Due {
                job: job.clone(),
                target: Target::Scheduled(at),
                start_at: at.0,
                start_by: at.0 + within,
                overdue: false,
                missed: vec![],
            };
            h.state.due(due, now_ms);
            h.driver = Pause::NONE;
            busy = true;
        }
        busy
    }

    pub(super) fn triggered(&mut self, i: usize, job: &JobName, key: &str, at_ms: i64) {
        let now = self.now;
        let Some(now_ms) = self.instances[i].believed_ms(now) else {
            return;
        };
        let h = self.here(i, job);
        let due = h.state.triggered(key, at_ms, now);
        h.state.due(due, now_ms);
        h.driver = Pause::NONE;
    }

    pub(super) fn drive(&mut self, i: usize, job: &JobName) -> bool {
        let now = self.now;
        let Some(now_ms) = self.instances[i].believed_ms(now) else {
            return false;
        };
        let h = self.here(i, job);
        if h.driven.is_some() || !h.driver.is_over(now, h.changed()) {
            return false;
        }
        match h.state.next(now_ms) {
            Next::Idle => {
                h.driver.until = Boottime(u64::MAX);
                h.driver.seen = None;
                false
            }
            Next::Wait => {
                h.driver = Pause {
                    until: now + CLAIMABLE_RECHECK,
                    seen: Some(h.changed()),
                };
                true
            }
            Next::Unfold(definition, segments, newest) => {
                let unfolded = unfold(segments, &definition, now_ms, newest);
                h.state.unfolded(unfolded, now_ms);
                true
            }
            Next::Ask(ask) => {
                h.driven = Some(ask.target.clone());
                self.begin(i, job, ask);
                true
            }
        }
    }

    // ---- contests ----

    pub(super) fn begin(&mut self, i: usize, job: &JobName, ask: Ask) {
        let live: Vec<InstanceId> = self
            .instances
            .iter()
            .map(|n| n.me.instance.clone())
            .collect();
        let rank = rank(
            &live,
            &self.instances[i].me.instance,
            job,
            &ask.target,
            None,
        );
        let (contest, first) = Contest::new(ask, rank);
        // A handicap of some milliseconds is less than a step of time here: every order of the claims is tried anyway.
        debug_assert!(matches!(first, Step::Look | Step::Pause(..)));
        let wait = Wait::Pause(Pause::NONE);
        self.here(i, job).flights.push(Flight { contest, wait });
    }

    pub(super) fn next_attempt(&mut self, i: usize, job: &JobName, at: Occurrence) {
        if self.here(i, job).state.await_next_attempt(at) {
            self.begin(i, job, Ask::next_attempt(at));
        }
    }

    pub(super) fn fly_all(&mut self, i: usize, job: &JobName) -> bool {
        let mut busy = false;
        for f in 0..self.instances[i].jobs[job].flights.len() {
            busy |= self.fly(i, job, f);
        }
        self.land(i, job) || busy
    }

    /// One flight, when its time has come.
    pub(super) fn fly(&mut self, i: usize, job: &JobName, f: usize) -> bool {
        let now = self.now;
        let h = self.here(i, job);
        let changed = h.changed();
        let step = match &h.flights[f].wait {
            Wait::Pause(p) if p.is_over(now, changed) => self.see(i, job, f, None, Contest::look),
            Wait::Answer(_, until) if now >= *until => {
                let pause = |n| Duration::from_millis(100) * n;
                self.reached.insert("lost");
                self.see(i, job, f, None, |c, v, effects| {
                    c.failed("no answer", true, 2, pause, v, effects)
                })
            }
            Wait::First(at) => {
                let at = *at;
                let is_it = |f: &Flight| {
                    f.contest.ask.next_attempt && f.contest.ask.target == Target::Scheduled(at)
                };
                if h.flights.iter().any(is_it) {
                    return false;
                }
                h.flights[f].contest.first_was_decided()
            }
            _ => return false,
        };
        self.carry_on(i, job, f, step);
        true
    }

    pub(super) fn carry_on(&mut self, i: usize, job: &JobName, f: usize, step: Step) {
        let now = self.now;
        let changed = self.here(i, job).changed();
        let wait = match step {
            Step::Look => Wait::Pause(Pause::NONE),
            Step::Pause(time, _) => Wait::Pause(Pause {
                until: now + time,
                seen: None,
            }),
            Step::Rest(time, _) => Wait::Pause(Pause {
                until: now + time,
                seen: Some(changed),
            }),
            Step::FindGrant(run) => {
                let states = &self.server.data.states;
                let granted = self
                    .reachable(i)
                    .then(|| states.get(job).is_some_and(|s| s.held_by(run).is_some()));
                self.reached.insert("drained before the answer");
                let stopping = self.instances[i].stopping;
                let step = self.see(i, job, f, None, |c, v, effects| {
                    c.found(granted, stopping, v, effects)
                });
                return self.carry_on(i, job, f, step);
            }
            Step::First(at) => {
                self.next_attempt(i, job, at);
                Wait::First(at)
            }
            Step::Ask(claim) => {
                let id = self.request(i, Question::Claim(claim));
                Wait::Answer(id, now + TIMEOUT)
            }
            Step::End(ended) => Wait::Over(ended),
            Step::TakeSlot(_) | Step::TakePermit { .. } => panic!("nothing of it is missing here"),
        };
        self.here(i, job).flights[f].wait = wait;
    }

    pub(super) fn see(
        &mut self,
        i: usize,
        job: &JobName,
        f: usize,
        sent: Option<Boottime>,
        decide: impl FnOnce(&mut Contest, &mut View<'_>, &mut Vec<Effect>) -> Step,
    ) -> Step {
        let now = self.now;
        let here = &mut self.instances[i];
        let h = here.jobs.get_mut(job).expect("a job of the plan");
        let flight = &mut h.flights[f];
        let of = |at: Occurrence| h.watches.iter().find(|w| w.occurrence == at);
        let own = match flight.contest.ask.target {
            Target::Scheduled(at) => of(at),
            Target::Manual { .. } => None,
        };
        let lapsed = match own {
            Some(w) => w.lease.lapsed(now),
            None => h.watches.iter().find_map(|w| w.lease.lapsed(now)),
        };
        let n = here.runs + 1;
        let id = (i as u128) << 64 | u128::from(here.generation) << 32 | u128::from(n);
        let fresh = std::cell::Cell::new(false);
        let mut effects = vec![];
        let halt = match here.belief.doubt_us() {
            _ if here.draining || here.stopping => Some(Halt::Draining),
            Some(_) => Some(Halt::Unreliable("clock", "it jumps".into())),
            None => None,
        };
        let mut view = View {
            me: &here.me,
            now,
            clock: &here.belief,
            subject: Subject::Here(&mut h.state),
            halt,
            slot: Slot::Needless,
            permit: true,
            lapsed: lapsed.cloned(),
            fresh: &|| {
                fresh.set(true);
                RunId(uuid::Uuid::from_u128(id))
            },
        };
        let step = decide(&mut flight.contest, &mut view, &mut effects);
        here.runs += u32::from(fresh.get());
        for effect in effects {
            match effect {
                Effect::Unwatch(at) => self.here(i, job).watches.retain(|w| w.occurrence != at),
                Effect::Start(win) => self.won(i, job, *win, sent.unwrap_or(Boottime(0))),
                Effect::Note(..) | Effect::NotRun(..) | Effect::CannotClaim(_) => {}
            }
        }
        step
    }

    /// Flights that are over.
    pub(super) fn land(&mut self, i: usize, job: &JobName) -> bool {
        let now = self.now;
        let now_ms = self.instances[i].believed_ms(now).unwrap_or_default();
        let draining = self.instances[i].draining || self.instances[i].stopping;
        let h = self.here(i, job);
        let mut busy = false;
        let mut f = 0;
        while f < h.flights.len() {
            let next_attempt = h.flights[f].contest.ask.next_attempt;
            let ended = match &h.flights[f].wait {
                Wait::Over(ended) => ended.clone(),
                Wait::Linger(until) if now >= *until => {
                    let flight = h.flights.remove(f);
                    if let Target::Scheduled(at) = flight.contest.ask.target {
                        h.state.awaits_no_longer(at);
                    }
                    h.state.stale();
                    busy = true;
                    continue;
                }
                _ => {
                    f += 1;
                    continue;
                }
            };
            busy = true;
            if next_attempt && ended == ContestEnd::Undecided {
                h.flights[f].wait = Wait::Linger(now + LOOK_AGAIN);
                continue;
            }
            let ask = h.flights.remove(f).contest.ask;
            if next_attempt {
                if let Target::Scheduled(at) = ask.target {
                    h.state.awaits_no_longer(at);
                }
                continue;
            }
            h.state.ended(&ask.target, &ended, draining, now_ms);
            h.driven = None;
            h.driver = Pause::NONE;
            match ended {
                ContestEnd::Undecided => {
                    h.undecided += 1;
                    h.driver = Pause {
                        until: now + backoff::nth(AWAY.0, h.undecided, AWAY.1),
                        seen: Some(h.changed()),
                    };
                }
                _ => h.undecided = 0,
            }
        }
        busy
    }

    // ---- leases of others ----

    /// Takes a lease in. True: it has lapsed.
    pub(super) fn see_lease(&mut self, i: usize, job: &JobName, open: &Open) -> bool {
        let now = self.now;
        let h = self.here(i, job);
        let quarantine = h.state.note_lease(open);
        let at = open.run.occurrence;
        let w = match h.watches.iter().position(|w| w.occurrence == at) {
            Some(w) => w,
            None => {
                h.watches.push(Watch {
                    occurrence: at,
                    lease: WatchedLease::new(open, now),
                    look_at: now,
                });
                h.watches.len() - 1
            }
        };
        let w = &mut h.watches[w];
        w.lease.look(open, now);
        let lapsed = w.lease.lapsed(now).is_some();
        let every = observe::length(open) / 2;
        w.look_at = match &open.next_attempt {
            Some(_) => now + w.lease.length(),
            None if lapsed => now + every,
            None => (now + every).min(w.lease.expiry()),
        };
        let here = &mut self.instances[i];
        here.quarantine = here.quarantine.max(quarantine);
        lapsed
    }

    pub(super) fn watch(&mut self, i: usize, job: &JobName) -> bool {
        let now = self.now;
        if self.instances[i].jobs[job]
            .watches
            .iter()
            .all(|w| w.look_at > now)
        {
            return false;
        }
        if !self.reachable(i) {
            for w in &mut self.here(i, job).watches {
                w.look_at = w.look_at.max(now + Duration::from_millis(200));
            }
            return true;
        }
        let us = self.store_us();
        self.sample(i, us, now);
        let open = self
            .server
            .data
            .states
            .get(job)
            .map_or(vec![], |s| s.open.clone());
        let h = self.here(i, job);
        let before = h.watches.len();
        h.watches
            .retain(|w| open.iter().any(|o| o.run.occurrence == w.occurrence));
        if h.watches.len() < before {
            h.state.ended_elsewhere();
        }
        for open in open {
            let h = self.here(i, job);
            if !h
                .watches
                .iter()
                .any(|w| w.occurrence == open.run.occurrence)
            {
                continue;
            }
            let lapsed = self.see_lease(i, job, &open);
            if open.next_attempt.is_some() || lapsed {
                self.next_attempt(i, job, open.run.occurrence);
            }
        }
        true
    }

    pub(in crate::world) fn on_event(&mut self, i: usize, event: &Event) {
        match event {
            Event::Ended { job } => self.here(i, job).state.ended_elsewhere(),
            Event::AttemptAwaited { job, occurrence } => {
                self.here(i, job).state.ended_elsewhere();
                self.next_attempt(i, job, *occurrence);
            }
            Event::Triggered { job, key, at } => {
                if self.instances[i].believed_ms(self.now).is_some() {
                    self.triggered(i, job, key, *at);
                }
            }
            Event::Controlled { job } => self.here(i, job).state.stale(),
            Event::Stop { job } => {
                for held in &mut self.here(i, job).held {
                    held.hold.nudged();
                    held.wake = Boottime(0);
                }
            }
            Event::Gap | Event::Drain | Event::Unlocked { .. } => {}
        }
    }
}
