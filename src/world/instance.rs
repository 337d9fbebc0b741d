//! One instance of a world: it drives the daemon's machines as the daemon does, without a runtime.

mod contest;
mod register;
mod run;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use super::{BEGIN, Plan, Settling, World, server::Reply};
use crate::{
    logic::{
        belief::Belief,
        claim::{Answer, Answered, DelayedAttempt, Renewal, Target},
        contest::{Account, AnswerInfo, Contest, ContestEnd, Epoch, EpochWatch, JobState, Me, Win},
        hold::{Hold, Renewed},
        observe::WatchedLease,
        schedule::next_of,
    },
    model::{Boottime, InstanceId, JobName, Occurrence, RunId, job::Job},
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
    /// When this process began.
    pub(super) begun: Boottime,
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
    /// What guards of this process were told to run: its will does not speak of it.
    told: BTreeSet<RunId>,
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
            told: self.told.clone(),
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
            begun: _,
            alive,
            frozen,
            cut,
            draining,
            stopping,
            wall_ahead,
            messages,
            runs,
            told,
            belief,
            epoch,
            quarantine,
            away,
            beat_at,
            jobs,
        } = self;
        write!(
            out,
            "{generation}{alive}{frozen}{cut}{draining}{stopping}{wall_ahead}{messages}{runs}{told:?}{belief:?}{epoch:?}\
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
    /// The epoch that the request is about.
    registering_in: Option<Epoch>,
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
    Over(ContestEnd),
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
            begun: BEGIN,
            misled: false,
            alive: true,
            frozen: false,
            cut: false,
            draining: false,
            stopping: false,
            wall_ahead: 0,
            messages: 0,
            runs: 0,
            told: BTreeSet::new(),
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
        (self.generation, self.misled, self.begun) = (self.generation + 1, false, now);
        (self.alive, self.frozen, self.draining, self.stopping) = (true, false, false, false);
        self.told.clear();
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
        registering_in: None,
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

    pub(in crate::world) fn answered(&mut self, i: usize, id: u32, sent: Boottime, reply: Reply) {
        let now_us = reply.now_us;
        for job in self.names() {
            let h = self.here(i, &job);
            match &reply.answered {
                Answered::Register(answer) if h.registering.is_some_and(|(of, _)| of == id) => {
                    self.sample(i, now_us, sent);
                    let (state, of) = (reply.state.map(|st| *st), &reply.incarnation);
                    return self.told_of_registration(i, &job, *answer, state, of);
                }
                Answered::Claim(answer) => {
                    let waits = |f: &Flight| matches!(f.wait, Wait::Answer(of, _) if of == id);
                    if let Some(f) = h.flights.iter().position(waits) {
                        self.sample(i, now_us, sent);
                        let by = (now_us, &*reply.incarnation);
                        return self.told_of_claim(i, &job, f, sent, answer.clone(), by);
                    }
                }
                Answered::Renew(answer) => {
                    let waits = |r: &Held| r.renewal.is_some_and(|(of, ..)| of == id);
                    if let Some(r) = h.held.iter().position(waits) {
                        self.sample(i, now_us, sent);
                        let answer = (*answer, &*reply.incarnation);
                        return self.told_of_renewal(i, &job, r, sent, answer);
                    }
                }
                Answered::Settle(_) => {
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
                Answered::Register(_) | Answered::Control(_) => {}
            }
        }
    }

    pub(super) fn told_of_claim(
        &mut self,
        i: usize,
        job: &JobName,
        f: usize,
        sent: Boottime,
        answer: Answer,
        (now_us, incarnation): (i64, &str),
    ) {
        let mut info = AnswerInfo {
            incarnation: incarnation.into(),
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

    pub(super) fn told_of_renewal(
        &mut self,
        i: usize,
        job: &JobName,
        r: usize,
        sent: Boottime,
        (answer, incarnation): (Renewal, &str),
    ) {
        let now = self.now;
        let held = &mut self.here(i, job).held[r];
        (held.renewal, held.wake) = (None, Boottime(0));
        let (run, started) = (held.win.run.id, held.started);
        let follows = held.hold.renewed(Some((answer, incarnation)), sent, now);
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
}
