//! One instance of a world: it drives the daemon's machines as the daemon does, without a runtime.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use super::{
    BEGIN, Body, Command, CommandState, Plan, SETTLE_AGAIN, Sender, Settling, TIMEOUT, World,
    server::{Reply, Request},
};
use crate::{
    logic::{
        attempts, backoff,
        belief::{Belief, Estimate, Sampled},
        claim::{
            self, Answer, DelayedAttempt, EpochBeat, Event, Open, Registration, Renew, Renewal,
            Settle, State, Target,
        },
        contest::{
            Account, AnswerInfo, Ask, Contest, Due, Effect, Ended, Epoch, EpochChange, EpochWatch,
            Halt, JobState, Me, Next, Slot, Step, Subject, View, Win, rank, unfold,
        },
        hold::{self, Do, Hold, Renewed},
        life::{Cause, Life, Stop},
        observe::{self, WatchedLease},
        schedule::next_of,
    },
    model::{Boottime, InstanceId, JobName, Occurrence, Outcome, RunId, RunRecord, job::Job},
};

const HEARTBEAT: Duration = Duration::from_secs(1);
const REGISTER_AGAIN: Duration = Duration::from_millis(200);
/// As the daemon's: before a job is registered again whose next attempt could not be claimed.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// As the daemon's: between two rounds while the store does not answer.
const AWAY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
const CLAIMABLE_RECHECK: Duration = Duration::from_millis(250);

pub(super) struct Instance {
    pub(super) me: Arc<Me>,
    /// Which of its processes this is.
    pub(super) generation: u32,
    /// The store's clock was wrong when it saw it first.
    pub(super) misled: bool,
    pub(super) alive: bool,
    /// Its process is stopped; its guards are not.
    pub(super) frozen: bool,
    /// Nothing gets from it to the store, or back.
    pub(super) cut: bool,
    pub(super) draining: bool,
    /// It was told to end.
    pub(super) stopping: bool,
    /// Its host's wall clock is so far ahead of the truth, ms.
    pub(super) wall_ahead: i64,
    pub(super) messages: u32,
    runs: u32,
    belief: Belief,
    epoch: EpochWatch,
    /// The longest quarantine that any of its jobs needs.
    quarantine: Duration,
    away: bool,
    beat_at: Boottime,
    pub(super) jobs: BTreeMap<JobName, Here>,
}

impl Clone for Instance {
    fn clone(&self) -> Self {
        Self {
            me: self.me.clone(),
            belief: self.belief.clone(),
            epoch: self.epoch.clone(),
            jobs: self.jobs.clone(),
            ..*self
        }
    }
}

impl Instance {
    pub(super) fn shown(&self, out: &mut impl std::fmt::Write) -> std::fmt::Result {
        let Self {
            me: _,
            misled: _,
            generation,
            alive,
            frozen,
            cut,
            draining,
            stopping,
            wall_ahead,
            messages,
            runs,
            belief,
            epoch,
            quarantine,
            away,
            beat_at,
            jobs,
        } = self;
        write!(
            out,
            "{generation}{alive}{frozen}{cut}{draining}{stopping}{wall_ahead}{messages}{runs}{belief:?}{epoch:?}\
            {quarantine:?}{away}{beat_at:?}{jobs:?}"
        )
    }
}

/// One job of an instance.
#[derive(Debug, Clone)]
pub(super) struct Here {
    pub(super) state: JobState,
    /// Its occurrences after this one are to be handed in.
    planned: Option<Occurrence>,
    flights: Vec<Flight>,
    /// What its driver has asked for.
    driven: Option<Target>,
    driver: Pause,
    undecided: u32,
    watches: Vec<Watch>,
    pub(super) held: Vec<Held>,
    /// A registration under way.
    registering: Option<(u32, Boottime)>,
    /// And adopts what the store has of the job.
    adopting: bool,
    register_at: Boottime,
}

/// Until when somebody waits, unless the job changes.
#[derive(Debug, Clone, Copy)]
struct Pause {
    until: Boottime,
    /// How often the job had changed before.
    seen: Option<u64>,
}

impl Pause {
    const NONE: Self = Self {
        until: Boottime(0),
        seen: None,
    };
    fn is_over(self, now: Boottime, changed: u64) -> bool {
        now >= self.until || self.seen.is_some_and(|seen| seen != changed)
    }
}

#[derive(Debug, Clone)]
struct Watch {
    occurrence: Occurrence,
    lease: WatchedLease,
    look_at: Boottime,
}

#[derive(Debug, Clone)]
struct Flight {
    contest: Contest,
    wait: Wait,
}

#[derive(Debug, Clone)]
enum Wait {
    Pause(Pause),
    /// For the answer to this message, until then.
    Answer(u32, Boottime),
    /// Until the next attempt of this occurrence was contested.
    First(Occurrence),
    Over(Ended),
    /// It was not decided: before the job is looked at again.
    Linger(Boottime),
}

/// A run that was granted.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) win: Arc<Win>,
    hold: Hold,
    renewal: Option<(u32, Boottime, Boottime)>,
    wake: Boottime,
    started: bool,
    settling: Option<Settling>,
    awaited: Option<DelayedAttempt>,
}

impl Instance {
    pub(super) fn new(i: usize, plan: &Plan) -> Self {
        Self {
            me: Arc::new(Me {
                instance: InstanceId::new(&format!("i{i}")),
                host: format!("h{i}"),
            }),
            generation: 0,
            misled: false,
            alive: true,
            frozen: false,
            cut: false,
            draining: false,
            stopping: false,
            wall_ahead: 0,
            messages: 0,
            runs: 0,
            belief: Belief::default(),
            epoch: EpochWatch::default(),
            quarantine: longest(&plan.jobs),
            away: false,
            beat_at: BEGIN,
            jobs: plan.jobs.iter().map(here).collect(),
        }
    }

    /// Its next process, under the same name or another one.
    pub(super) fn start_again(&mut self, renamed: bool, plan: &Plan, now: Boottime) {
        let mut name = self.me.instance.as_str().to_owned();
        if renamed {
            name.push('x');
        }
        self.me = Arc::new(Me {
            instance: InstanceId::new(&name),
            host: self.me.host.clone(),
        });
        (self.generation, self.misled) = (self.generation + 1, false);
        (self.alive, self.frozen, self.draining, self.stopping) = (true, false, false, false);
        (self.belief, self.epoch) = (Belief::default(), EpochWatch::default());
        (self.quarantine, self.away, self.beat_at) = (longest(&plan.jobs), false, now);
        self.jobs = plan.jobs.iter().map(here).collect();
    }

    /// It knows the epoch, and all of its jobs are registered in it.
    pub(super) fn has_found(&self, epoch: Option<&str>) -> bool {
        let known = self.epoch.known().map(|e| &*e.id);
        known == epoch && self.jobs.values().all(|h| h.state.is_registered())
    }
    pub(super) fn is_idle(&self) -> bool {
        self.jobs
            .values()
            .all(|h| h.held.is_empty() && h.flights.is_empty())
    }
    pub(super) fn believed(&self, now: Boottime) -> Option<i64> {
        self.belief.at(now)
    }
    fn believed_ms(&self, now: Boottime) -> Option<i64> {
        Some(self.belief.at(now)?.div_euclid(1000))
    }
    fn works(&self) -> bool {
        self.alive && !self.frozen
    }
}

fn longest(jobs: &[Arc<Job>]) -> Duration {
    jobs.iter()
        .map(|j| j.lease.quarantine)
        .max()
        .unwrap_or_default()
}

fn here(definition: &Arc<Job>) -> (JobName, Here) {
    let here = Here {
        state: JobState::new(definition.clone(), Account::default()),
        planned: None,
        flights: vec![],
        driven: None,
        driver: Pause::NONE,
        undecided: 0,
        watches: vec![],
        held: vec![],
        registering: None,
        adopting: false,
        register_at: Boottime(0),
    };
    (definition.name.clone(), here)
}

impl Here {
    fn changed(&self) -> u64 {
        self.state.changes().changed
    }
}

impl World {
    fn here(&mut self, i: usize, job: &JobName) -> &mut Here {
        self.instances[i]
            .jobs
            .get_mut(job)
            .expect("a job of the plan")
    }
    fn names(&self) -> Vec<JobName> {
        self.plan.jobs.iter().map(|j| j.name.clone()).collect()
    }
    fn reachable(&self, i: usize) -> bool {
        self.server.up && !self.instances[i].cut
    }

    /// What an instance does at this moment. True: something has changed.
    pub(super) fn work_of(&mut self, i: usize) -> bool {
        if !self.instances[i].works() {
            return false;
        }
        let mut busy = false;
        if self.now >= self.instances[i].beat_at {
            self.beat(i);
            busy = true;
        }
        for job in self.names() {
            busy |= self.register(i, &job);
            busy |= self.dispatch(i, &job);
            busy |= self.drive(i, &job);
            busy |= self.fly_all(i, &job);
            busy |= self.hold_all(i, &job);
            busy |= self.watch(i, &job);
        }
        if self.instances[i].stopping && self.instances[i].is_idle() {
            self.instances[i].alive = false;
            self.say(|w| format!("{} has ended", w.instances[i].me.instance));
            busy = true;
        }
        busy
    }

    /// When an instance has something to do next.
    pub(super) fn next_of_instance(&self, i: usize) -> Boottime {
        let here = &self.instances[i];
        let mut next = here.beat_at;
        let mut at = |t: Boottime| next = next.min(t);
        for h in here.jobs.values() {
            if !h.state.is_registered() && h.registering.is_none() {
                at(h.register_at.max(self.now + REGISTER_AGAIN));
            }
            if let Some((_, until)) = h.registering {
                at(until);
            }
            if let Some(after) = h.planned
                && let Some(due) = next_of(&h.state.definition.schedules, after)
                && let Some(due) = here.belief.when(due.0)
            {
                at(due);
            }
            if h.driven.is_none() && h.driver.until > self.now {
                at(h.driver.until);
            }
            for f in &h.flights {
                match f.wait {
                    Wait::Pause(p) => at(p.until),
                    Wait::Answer(_, until) | Wait::Linger(until) => at(until),
                    Wait::First(_) | Wait::Over(_) => {}
                }
            }
            for held in &h.held {
                if let Some((_, _, until)) = held.renewal {
                    at(until);
                }
                match &held.settling {
                    Some(s) => at(s.asked.map_or(s.again_at, |(_, until)| until)),
                    None => at(held.wake),
                }
            }
            h.watches.iter().for_each(|w| at(w.look_at));
        }
        next
    }

    // ---- the heartbeat ----

    fn beat(&mut self, i: usize) {
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
        let here = &mut self.instances[i];
        let change = here.epoch.learn(Epoch {
            incarnation: seen.incarnation.as_str().into(),
            id: seen.id.as_str().into(),
            born: seen.born,
            open: seen.open,
            quarantine: seen.quarantine,
            first_seen: now,
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

    fn sample(&mut self, i: usize, us: i64, sent: Boottime) {
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

    fn register(&mut self, i: usize, job: &JobName) -> bool {
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
        let ask = h.state.registration(&here.me);
        self.ask_to_register(i, job, ask);
        true
    }

    fn ask_to_register(&mut self, i: usize, job: &JobName, ask: claim::Register) {
        let adopting = ask.adopt.is_some();
        let id = self.request(i, Request::Register(Box::new(ask)));
        let until = self.now + TIMEOUT;
        let h = self.here(i, job);
        (h.registering, h.adopting) = (Some((id, until)), adopting);
    }

    fn request(&mut self, i: usize, request: Request) -> u32 {
        let here = &self.instances[i];
        let (from, believed) = (
            Sender::Instance(i, here.generation),
            here.believed(self.now),
        );
        self.send(from, Body::Request(request, believed))
    }

    fn told_of_registration(
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
            self.here(i, job).state.register_after_quarantine(&epoch);
            return;
        }
        let born = here.belief.at(epoch.first_seen);
        let born = born.map_or(epoch.born, |us| epoch.born.min(us.div_euclid(1000)));
        let ask = h.state.registration(&here.me);
        let ask = JobState::adoption(&h.state.definition, ask, &epoch, born, state.as_ref());
        // As the daemon looks once more before it adopts.
        let believed = here.believed(now);
        let look = self.reachable(i).then(|| self.epoch(None, believed));
        if look.is_some_and(|e| e.incarnation == *epoch.incarnation && e.id == *epoch.id) {
            self.ask_to_register(i, job, ask);
        }
    }

    fn registered(&mut self, i: usize, job: &JobName, state: &State) {
        let now = self.now;
        let Some(now_ms) = self.instances[i].believed_ms(now) else {
            return;
        };
        let h = self.here(i, job);
        let definition = h.state.definition.clone();
        let Some(follows) = h.state.registered(&definition, state, now_ms) else {
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

    // ---- what is due ----

    fn dispatch(&mut self, i: usize, job: &JobName) -> bool {
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

    fn triggered(&mut self, i: usize, job: &JobName, key: &str, at_ms: i64) {
        let now = self.now;
        let Some(now_ms) = self.instances[i].believed_ms(now) else {
            return;
        };
        let h = self.here(i, job);
        let due = h.state.triggered(key, at_ms, now);
        h.state.due(due, now_ms);
        h.driver = Pause::NONE;
    }

    fn drive(&mut self, i: usize, job: &JobName) -> bool {
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
            Next::Ask(claim) => {
                h.driven = Some(claim.target.clone());
                let ask = Ask {
                    target: claim.target,
                    missed: claim.missed,
                    trigger: claim.trigger,
                    start_by: claim.start_by,
                    next_attempt: false,
                };
                self.begin(i, job, ask);
                true
            }
        }
    }

    // ---- contests ----

    fn begin(&mut self, i: usize, job: &JobName, ask: Ask) {
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
        debug_assert!(matches!(first, Step::Look | Step::Pause(_)));
        let wait = Wait::Pause(Pause::NONE);
        self.here(i, job).flights.push(Flight { contest, wait });
    }

    fn next_attempt(&mut self, i: usize, job: &JobName, at: Occurrence) {
        if self.here(i, job).state.await_next_attempt(at) {
            self.begin(i, job, Ask::next_attempt(at));
        }
    }

    fn fly_all(&mut self, i: usize, job: &JobName) -> bool {
        let mut busy = false;
        for f in 0..self.instances[i].jobs[job].flights.len() {
            busy |= self.fly(i, job, f);
        }
        self.land(i, job) || busy
    }

    /// One flight, when its time has come.
    fn fly(&mut self, i: usize, job: &JobName, f: usize) -> bool {
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

    fn carry_on(&mut self, i: usize, job: &JobName, f: usize, step: Step) {
        let now = self.now;
        let changed = self.here(i, job).changed();
        let wait = match step {
            Step::Look => Wait::Pause(Pause::NONE),
            Step::Pause(time) => Wait::Pause(Pause {
                until: now + time,
                seen: None,
            }),
            Step::Rest(time) => Wait::Pause(Pause {
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
                let id = self.request(i, Request::Claim(claim));
                Wait::Answer(id, now + TIMEOUT)
            }
            Step::End(ended) => Wait::Over(ended),
            Step::TakeSlot(_) | Step::TakePermit => panic!("nothing of it is missing here"),
        };
        self.here(i, job).flights[f].wait = wait;
    }

    fn see(
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
    fn land(&mut self, i: usize, job: &JobName) -> bool {
        let now = self.now;
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
            if next_attempt && ended == Ended::Undecided {
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
            h.state.ended(&ask.target, &ended, draining);
            h.driven = None;
            h.driver = Pause::NONE;
            match ended {
                Ended::Undecided => {
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
    fn see_lease(&mut self, i: usize, job: &JobName, open: &Open) -> bool {
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

    fn watch(&mut self, i: usize, job: &JobName) -> bool {
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

    pub(super) fn on_event(&mut self, i: usize, event: &Event) {
        match event {
            Event::Ended { job } => self.here(i, job).state.ended_elsewhere(),
            Event::AttemptAwaited { job, occurrence } => {
                self.here(i, job).state.ended_elsewhere();
                self.next_attempt(i, job, *occurrence);
            }
            Event::Triggered { job, key } => {
                let at = self.instances[i].believed_ms(self.now);
                if let Some(at) = at {
                    self.triggered(i, job, key, at);
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

    // ---- runs ----

    fn won(&mut self, i: usize, job: &JobName, win: Win, sent: Boottime) {
        let start_by = (win.run.attempt == 1).then_some(win.start_by);
        let mut held = Held {
            hold: Hold::new(*win.job.lease, sent, start_by, 1),
            win: Arc::new(win),
            renewal: None,
            wake: Boottime(0),
            started: false,
            settling: None,
            awaited: None,
        };
        let late = held.win.too_late;
        if late {
            self.reached.insert("granted too late");
            held.settling = Some(self.settling(&held.win, Outcome::Missed, None));
        }
        self.here(i, job).held.push(held);
        if late {
            let run = self
                .here(i, job)
                .held
                .last()
                .expect("it was pushed")
                .win
                .run
                .id;
            self.here(i, job).state.account.run_is_over(run);
        }
    }

    fn settling(&self, win: &Win, outcome: Outcome, next: Option<DelayedAttempt>) -> Settling {
        let ms = self.ms();
        let record = RunRecord {
            outcome,
            ..RunRecord::of(&win.job.name, &win.run).lasting(None, Some(ms))
        };
        Settling {
            settle: Settle {
                run: win.run.id,
                record,
                next_attempt: next,
            },
            asked: None,
            again_at: self.now,
            until: Boottime(u64::MAX),
            failures: 0,
        }
    }

    fn hold_all(&mut self, i: usize, job: &JobName) -> bool {
        let mut busy = false;
        for r in (0..self.instances[i].jobs[job].held.len()).rev() {
            busy |= self.hold(i, job, r);
        }
        busy
    }

    fn hold(&mut self, i: usize, job: &JobName, r: usize) -> bool {
        let now = self.now;
        let store_ms = self.instances[i].believed_ms(now);
        let held = &mut self.here(i, job).held[r];
        let run = held.win.run.id;
        if held.settling.is_some() {
            return self.settle(i, job, r);
        }
        if let Some((_, _, until)) = held.renewal
            && now >= until
        {
            held.renewal = None;
            held.wake = Boottime(0);
            let follows = held.hold.renewed(None, now, now);
            debug_assert_eq!(follows, Renewed::Nothing);
            return true;
        }
        if held.started
            && let Some((outcome, cause)) = self.gone(run)
        {
            return self.ended(i, job, r, outcome, cause);
        }
        let held = &mut self.here(i, job).held[r];
        if now < held.wake {
            return false;
        }
        let next = held.hold.next(hold::View {
            now,
            store_ms,
            turn: true,
            killed: false,
        });
        match next {
            Do::Wait(at) => {
                held.wake = at;
                return false;
            }
            Do::Renew(seq) => {
                let ask = Renew {
                    job: job.clone(),
                    run: held.win.run.clone(),
                    seq,
                };
                let id = self.request(i, Request::Renew(Box::new(ask)));
                self.here(i, job).held[r].renewal = Some((id, now, now + TIMEOUT));
            }
            Do::Start => self.start(i, job, r),
            Do::Abandon {
                outcome,
                another_attempt,
                ..
            } => {
                let win = held.win.clone();
                self.reached.insert("granted, not started");
                let next = another_attempt.then(|| attempts::after_no_start(win.run.attempt));
                let settling = self.settling(&win, outcome, next.flatten());
                let h = self.here(i, job);
                h.held[r].awaited = settling.settle.next_attempt;
                h.held[r].settling = Some(settling);
                h.state.account.run_is_over(run);
            }
            Do::Stop(stop, grace) => {
                if !held.hold.awaits_renewal() {
                    held.renewal = None;
                }
                self.stop_command(run, stop, grace);
            }
            Do::Show(_) => held.hold.shown(true, false, now),
        }
        true
    }

    fn start(&mut self, i: usize, job: &JobName, r: usize) {
        let now = self.now;
        let of = (i, self.instances[i].generation);
        let held = &mut self.here(i, job).held[r];
        held.started = true;
        let (win, trusted_until) = (held.win.clone(), held.hold.trusted_until());
        let (definition, run) = (&win.job, win.run.clone());
        let (lasts, fails, stubborn) = how_it_runs(definition, &run);
        let life = Life::new(
            now,
            trusted_until,
            definition.timeout,
            definition.grace,
            definition.lease.kill_budget,
        );
        let id = run.id;
        self.commands.push(Command {
            job: job.clone(),
            run,
            of,
            life,
            state: CommandState::Starting,
            lasts,
            fails,
            stubborn,
            offset_us: self.instances[i].belief.offset_us().unwrap_or(0),
            settle: None,
        });
        self.send(Sender::Instance(i, of.1), Body::Exec(id));
    }

    /// How a command ended, once its guard says so.
    fn gone(&self, run: RunId) -> Option<(Outcome, Option<Cause>)> {
        let command = self.commands.iter().find(|c| c.run.id == run)?;
        match command.state {
            CommandState::Gone(outcome, cause, _) => Some((outcome, cause)),
            _ => None,
        }
    }

    fn ended(
        &mut self,
        i: usize,
        job: &JobName,
        r: usize,
        outcome: Outcome,
        cause: Option<Cause>,
    ) -> bool {
        let win = self.here(i, job).held[r].win.clone();
        let next = after(&win.job, win.run.attempt, outcome, cause);
        let mut settling = self.settling(&win, outcome, next);
        settling.settle.record.finished_at = Some(self.ended_at(win.run.id));
        let h = self.here(i, job);
        h.held[r].awaited = next;
        h.held[r].settling = Some(settling);
        h.state.account.run_is_over(win.run.id);
        true
    }

    fn ended_at(&self, run: RunId) -> i64 {
        let command = self.commands.iter().find(|c| c.run.id == run);
        match command.map(|c| c.state) {
            Some(CommandState::Gone(_, _, at)) => self.ms() - self.now.since(at).as_millis() as i64,
            _ => self.ms(),
        }
    }

    fn settle(&mut self, i: usize, job: &JobName, r: usize) -> bool {
        let now = self.now;
        let settling = self.here(i, job).held[r].settling.as_mut();
        let Some(request) = settling.and_then(|s| s.next(now)) else {
            return false;
        };
        let id = self.request(i, Request::Settle(Box::new(request)));
        let settling = self.here(i, job).held[r].settling.as_mut();
        settling.expect("it was there").asked = Some((id, now + TIMEOUT));
        true
    }

    // ---- answers ----

    pub(super) fn answered(
        &mut self,
        i: usize,
        id: u32,
        sent: Boottime,
        reply: Reply,
        now_us: i64,
        incarnation: &str,
    ) {
        for job in self.names() {
            let h = self.here(i, &job);
            match &reply {
                Reply::Register(answer, state) if h.registering.is_some_and(|(of, _)| of == id) => {
                    self.sample(i, now_us, sent);
                    let state = state.as_deref().cloned();
                    return self.told_of_registration(i, &job, *answer, state, incarnation);
                }
                Reply::Claim(answer) => {
                    let waits = |f: &Flight| matches!(f.wait, Wait::Answer(of, _) if of == id);
                    if let Some(f) = h.flights.iter().position(waits) {
                        self.sample(i, now_us, sent);
                        return self.told_of_claim(i, &job, f, sent, (**answer).clone(), now_us);
                    }
                }
                Reply::Renew(answer) => {
                    let waits = |r: &Held| r.renewal.is_some_and(|(of, ..)| of == id);
                    if let Some(r) = h.held.iter().position(waits) {
                        self.sample(i, now_us, sent);
                        return self.told_of_renewal(i, &job, r, sent, *answer);
                    }
                }
                Reply::Settle => {
                    let waits = |r: &Held| {
                        let asked = r.settling.as_ref().and_then(|s| s.asked);
                        asked.is_some_and(|(of, _)| of == id)
                    };
                    if let Some(r) = h.held.iter().position(waits) {
                        let held = h.held.remove(r);
                        h.state.run_has_ended(held.win.run.id);
                        self.sample(i, now_us, sent);
                        if held.awaited.is_some() {
                            self.next_attempt(i, &job, held.win.run.occurrence);
                        }
                        // The guard is told that all is settled.
                        self.commands.retain(|c| c.run.id != held.win.run.id);
                        return;
                    }
                }
                Reply::Register(..) => {}
            }
        }
    }

    fn told_of_claim(
        &mut self,
        i: usize,
        job: &JobName,
        f: usize,
        sent: Boottime,
        answer: Answer,
        now_us: i64,
    ) {
        let mut info = AnswerInfo {
            store_ms: now_us / 1000,
            lapsed: false,
            expires_in: Duration::MAX,
        };
        if let Answer::Running(open) | Answer::Blocked(open) = &answer {
            info.lapsed = self.see_lease(i, job, open);
            let now = self.now;
            let h = self.here(i, job);
            let seen = h
                .watches
                .iter()
                .find(|w| w.occurrence == open.run.occurrence);
            info.expires_in = seen.map_or(Duration::MAX, |w| {
                w.lease.expiry().since(now) + Duration::from_millis(1)
            });
        }
        let step = self.see(i, job, f, Some(sent), |c, v, effects| {
            c.answered(answer, info, v, effects)
        });
        self.carry_on(i, job, f, step);
    }

    fn told_of_renewal(
        &mut self,
        i: usize,
        job: &JobName,
        r: usize,
        sent: Boottime,
        answer: Renewal,
    ) {
        let now = self.now;
        let held = &mut self.here(i, job).held[r];
        (held.renewal, held.wake) = (None, Boottime(0));
        let (run, started) = (held.win.run.id, held.started);
        let follows = held.hold.renewed(Some(answer), sent, now);
        match follows {
            Renewed::Extended(until) if started => {
                if let Some(command) = self.command(run) {
                    let step = command.life.on_renewal(now, until);
                    self.step(run, step);
                }
            }
            Renewed::Lost(stop, grace) => {
                self.reached.insert("lease lost");
                self.stop_command(run, stop, grace);
            }
            Renewed::Extended(_) | Renewed::Nothing => {}
        }
    }

    // ---- guards without a daemon ----

    /// What the guard of a command that is gone does. True: something has changed.
    pub(super) fn guard_settles(&mut self, c: usize) -> bool {
        let (now, of) = (self.now, self.commands[c].of);
        let here = &self.instances[of.0];
        if here.alive && here.generation == of.1 {
            return false;
        }
        let command = &self.commands[c];
        let CommandState::Gone(outcome, cause, at) = command.state else {
            return false;
        };
        if command.settle.is_none() {
            let definition = self.plan.job(&command.job).clone();
            let patience = match outcome {
                Outcome::Crashed | Outcome::LeaseLost => definition.lease.length,
                _ => Duration::from_secs(3600),
            };
            let next = after(&definition, command.run.attempt, outcome, cause);
            let record = RunRecord {
                outcome,
                ..RunRecord::of(&command.job, &command.run).lasting(None, Some(self.ms()))
            };
            self.commands[c].settle = Some(Settling {
                settle: Settle {
                    run: record.run_id.expect("a run's"),
                    record,
                    next_attempt: next,
                },
                asked: None,
                again_at: now,
                until: at + patience,
                failures: 0,
            });
        }
        let settling = self.commands[c].settle.as_mut().expect("it was made");
        if now >= settling.until && settling.asked.is_none() {
            self.commands.remove(c);
            // The others have another place now: the round begins anew.
            return true;
        }
        let Some(request) = settling.next(now) else {
            return false;
        };
        let from = Sender::Guard(request.run);
        let believed = self.commands[c].offset_us + (now.0 / 1000) as i64;
        let request = Request::Settle(Box::new(request));
        let id = self.send(from, Body::Request(request, Some(believed)));
        let settling = self.commands[c].settle.as_mut();
        settling.expect("it was made").asked = Some((id, now + TIMEOUT));
        true
    }

    pub(super) fn guard_answered(&mut self, run: RunId) {
        self.reached.insert("settled by a guard");
        self.commands.retain(|c| c.run.id != run);
    }
}

impl Settling {
    /// The request that is to be sent now.
    fn next(&mut self, now: Boottime) -> Option<Settle> {
        if let Some((_, until)) = self.asked {
            if now >= until {
                self.asked = None;
                self.failures += 1;
                self.again_at = now + SETTLE_AGAIN;
            }
            return None;
        }
        (now >= self.again_at).then(|| self.settle.clone())
    }
    pub(super) fn wake_at(&self) -> Boottime {
        self.asked.map_or(self.again_at, |(_, until)| until)
    }
}

/// As the holder and the guard have it.
fn after(
    job: &Job,
    attempt: u32,
    outcome: Outcome,
    cause: Option<Cause>,
) -> Option<DelayedAttempt> {
    match (outcome, cause) {
        (Outcome::Failed | Outcome::TimedOut, _) => attempts::after_failure(job, attempt),
        (Outcome::Crashed | Outcome::LeaseLost, _) | (_, Some(Cause::Stopped(Stop::Shutdown))) => {
            attempts::after_crash(job, attempt)
        }
        _ => None,
    }
}

/// Every third occurrence has a command that runs into the next one and ignores SIGTERM; the first attempt of every
/// second one fails.
fn how_it_runs(job: &Job, run: &crate::model::Run) -> (Duration, bool, bool) {
    let n = run.occurrence.0 / 2000;
    let long = n % 3 == 0;
    let lasts = match long {
        true => Duration::from_millis(2500),
        false => Duration::from_millis(300),
    };
    let fails = job.retry.is_some() && n % 2 == 0 && run.attempt == 1;
    (lasts, fails, long)
}
