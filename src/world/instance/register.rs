//! An instance's heartbeat, and how it registers its jobs.

use std::time::Duration;

use super::{HEARTBEAT, Instance, REGISTER_AGAIN};
use crate::{
    logic::{
        belief::{Estimate, Sampled},
        claim::{self, EpochBeat, Question, Registration, State},
        contest::{Epoch, EpochChange, JobState},
    },
    model::{Boottime, JobName, Occurrence},
    world::{Body, Sender, TIMEOUT, World, ms_at},
};

impl World {
    pub(super) fn beat(&mut self, i: usize) {
        let now = self.now;
        self.instances[i].beat_at = now + HEARTBEAT;
        if !self.reachable(i) {
            self.instances[i].away = true;
            return;
        }
        let shown = self.store_us();
        let believed = self.instances[i].believed(now);
        self.sample(i, shown, now);
        if std::mem::take(&mut self.instances[i].away) {
            self.instances[i]
                .jobs
                .values_mut()
                .for_each(|h| h.state.resync());
        }
        let shown_ms = shown.div_euclid(1000);
        let truth = self.ms();
        let wall = |of: &Instance| truth + of.wall_ahead - shown_ms;
        let others = (0..self.instances.len()).filter(|o| *o != i && self.instances[*o].alive);
        let mut walls = vec![wall(&self.instances[i])];
        walls.extend(others.map(|o| wall(&self.instances[o])));
        let here = &mut self.instances[i];
        let _ = here.belief.vote(&walls, now);
        let vouched = here.epoch.vouched(here.quarantine, now);
        let quarantine = here.quarantine;
        let beat = EpochBeat {
            quarantine,
            vouched: vouched.as_ref().map(|(of, id)| (&**of, &**id)),
        };
        let seen = self.epoch(Some(beat), believed);
        let mut others = (0..self.instances.len()).filter(|o| *o != i && self.reachable(*o));
        let others_know = others.any(|o| ms_at(self.instances[o].begun) < seen.born);
        let here = &mut self.instances[i];
        let change = here.epoch.learn(Epoch {
            incarnation: seen.incarnation.as_str().into(),
            id: seen.id.as_str().into(),
            born: seen.born,
            open: seen.open,
            quarantine: seen.quarantine,
            first_seen: now,
            open_seen: None,
            others_know,
        });
        if change == EpochChange::Replaced {
            self.reached.insert("quarantine");
            here.jobs.values_mut().for_each(|h| h.state.resync());
        }
        let now_ms = here.believed_ms(now).unwrap_or(shown_ms);
        for h in here.jobs.values_mut() {
            if h.state.ahead(Occurrence(now_ms)) {
                h.state.stale();
            }
        }
    }

    pub(super) fn sample(&mut self, i: usize, us: i64, sent: Boottime) {
        let estimate = Estimate::new(us, sent, self.now);
        if self.instances[i].belief.offset_us().is_none() {
            self.instances[i].misled = self.server.ahead_us != 0;
        }
        match self.instances[i].belief.sample(estimate) {
            Sampled::Doubted(_) => _ = self.reached.insert("doubt"),
            Sampled::Restored => _ = self.reached.insert("believed again"),
            _ => {}
        }
    }

    // ---- registration ----

    pub(super) fn register(&mut self, i: usize, job: &JobName) -> bool {
        let now = self.now;
        let here = &self.instances[i];
        let Some(epoch) = here.epoch.known().filter(|_| !here.away) else {
            return false;
        };
        let h = &here.jobs[job];
        if let Some((_, until)) = h.registering {
            if now < until {
                return false;
            }
            let h = self.here(i, job);
            (h.registering, h.register_at) = (None, now + REGISTER_AGAIN);
            return true;
        }
        if now < h.register_at || h.state.register_in(epoch, now) != Some(Duration::ZERO) {
            return false;
        }
        let ask = h.state.registration(&here.me, epoch);
        let epoch = epoch.clone();
        self.ask_to_register(i, job, ask, epoch);
        true
    }

    pub(super) fn ask_to_register(
        &mut self,
        i: usize,
        job: &JobName,
        ask: claim::Register,
        epoch: Epoch,
    ) {
        let adopting = ask.adopt.is_some();
        let id = self.request(i, Question::Register(Box::new(ask)));
        let until = self.now + TIMEOUT;
        let h = self.here(i, job);
        (h.registering, h.adopting) = (Some((id, until)), adopting);
        h.registering_in = Some(epoch);
    }

    pub(super) fn request(&mut self, i: usize, request: Question) -> u32 {
        let here = &self.instances[i];
        let (from, believed) = (
            Sender::Instance(i, here.generation),
            here.believed(self.now),
        );
        self.send(from, Body::Request(request, believed))
    }

    pub(super) fn told_of_registration(
        &mut self,
        i: usize,
        job: &JobName,
        answer: Registration,
        state: Option<State>,
        incarnation: &str,
    ) {
        let now = self.now;
        let h = self.here(i, job);
        let adopting = h.adopting;
        (h.registering, h.register_at) = (None, now + REGISTER_AGAIN);
        if answer == Registration::Ready {
            self.registered(i, job, &state.unwrap_or_default());
            return;
        }
        let here = &self.instances[i];
        let Some(epoch) = here.epoch.known().filter(|_| !adopting).cloned() else {
            return;
        };
        if *epoch.incarnation != *incarnation {
            return;
        }
        let h = &here.jobs[job];
        if !h.state.adoptable_in(&epoch, now).is_zero() {
            let now_ms = here.believed_ms(now);
            let h = self.here(i, job);
            h.state.register_after_quarantine(&epoch, now_ms);
            return;
        }
        let born = here.belief.at(epoch.first_seen);
        let born = born.map_or(epoch.born, |us| epoch.born.min(us.div_euclid(1000)));
        let ask = h.state.registration(&here.me, &epoch);
        let ask = JobState::adoption(&h.state.definition, ask, &epoch, born, state.as_ref());
        // As the daemon looks once more before it adopts.
        let believed = here.believed(now);
        let look = self.reachable(i).then(|| self.epoch(None, believed));
        if look.is_some_and(|e| e.incarnation == *epoch.incarnation && e.id == *epoch.id) {
            self.ask_to_register(i, job, ask, epoch);
        }
    }

    pub(super) fn registered(&mut self, i: usize, job: &JobName, state: &State) {
        let now = self.now;
        let Some(now_ms) = self.instances[i].believed_ms(now) else {
            return;
        };
        let h = self.here(i, job);
        let definition = h.state.definition.clone();
        let Some(epoch) = h.registering_in.take() else {
            return;
        };
        let Some(follows) = h.state.registered(&definition, state, &epoch, now_ms) else {
            return;
        };
        if follows.plan_after.is_some() {
            h.planned = follows.plan_after.filter(|_| definition.enabled);
        }
        if follows.catch_up.is_some() {
            self.reached.insert("catch-up");
        }
        for open in &follows.watch {
            self.see_lease(i, job, open);
        }
        for at in follows.ask_again {
            self.next_attempt(i, job, at);
        }
        for pending in follows.triggers {
            self.triggered(i, job, &pending.key, pending.at);
        }
    }
}
