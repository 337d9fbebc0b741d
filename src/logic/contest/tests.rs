//! Contests in virtual time: several instances against the store's own rules, over a network that loses, delays and
//! repeats, with instances that die. No runtime, no clock; a seed gives the same world each time.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use proptest::prelude::*;

use super::*;
use crate::{
    config,
    logic::{
        attempts,
        belief::{self, Estimate, Sampled},
        claim::{
            Control, Controlled, DelayedAttempt, Effects, OnCrash, Open, Register, Registration,
            Renew, Settle, State, TargetId,
        },
        observe::ObservedLease,
        schedule::next_of,
        trust::HeldLease,
    },
    model::{FencingToken, JobName, RunRecord},
};

/// Noon of a day, Unix ms: what the store's clock shows at the beginning.
const NOON: i64 = 1_795_348_800_000;
/// One step of the world.
const TICK: Duration = Duration::from_millis(20);

fn job(lines: &str) -> Arc<Job> {
    let text = format!(
        "[jobs.draw]\ncommand = [\"true\"]\nschedule = \"@every 2s\"\nlease = \"2s\"\n{lines}\n"
    );
    let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None).expect("valid");
    config.jobs.values().next().expect("a job").clone()
}

struct World {
    rng: fastrand::Rng,
    now: Boottime,
    state: Option<State>,
    records: Vec<RunRecord>,
    nodes: Vec<Node>,
    /// By occurrence and attempt: whose run it is, from when to when its command ran.
    ran: BTreeMap<FencingToken, (usize, i64, Option<i64>)>,
    /// By the key of a trigger that people put in: how often it was begun.
    triggers: BTreeMap<String, usize>,
    /// How many of a hundred messages get lost.
    lost: u8,
    /// How far the store's clock is ahead of the truth, which the hosts' clocks show.
    ahead_us: i64,
    reached: BTreeSet<&'static str>,
}

struct Node {
    me: Me,
    alive: bool,
    /// Its process is stopped until then; its guards are not.
    stopped_until: Boottime,
    draining: bool,
    belief: Belief,
    beat_at: Boottime,
    job: JobState,
    planned: Option<Occurrence>,
    flights: Vec<Flight>,
    /// The target of the flight that the job's queue waits for.
    driven: Option<Target>,
    undecided_until: Boottime,
    watches: BTreeMap<Occurrence, ObservedLease>,
    look_at: Boottime,
    runs: Vec<Run>,
}

struct Flight {
    contest: Contest,
    wait: Wait,
}

enum Wait {
    Until(Boottime),
    /// The request is on its way to the store until then, and its answer from there until the next.
    Request(Boottime, Boottime, Box<Claim>),
    Reply(Boottime, Boottime, Option<Box<Answer>>, i64),
    Over(Ended),
}

struct Run {
    win: Win,
    lease: HeldLease,
    ends_at: Boottime,
    /// The outcome, while the store has to be told.
    over: Option<Outcome>,
    failed: bool,
}

impl Run {
    /// How its command has ended by now, if it has.
    fn ended(&self, now: Boottime) -> Option<Outcome> {
        if now >= self.lease.trusted_until() {
            Some(Outcome::LeaseLost)
        } else if now < self.ends_at {
            None
        } else if self.failed {
            Some(Outcome::Failed)
        } else {
            Some(Outcome::Succeeded)
        }
    }
}

impl World {
    fn new(seed: u64, nodes: usize, definition: &Arc<Job>, lost: u8) -> Self {
        let now = Boottime(3_600_000_000_000);
        let mut world = Self {
            rng: fastrand::Rng::with_seed(seed),
            now,
            state: None,
            records: vec![],
            nodes: vec![],
            ran: BTreeMap::new(),
            triggers: BTreeMap::new(),
            lost,
            ahead_us: 0,
            reached: BTreeSet::new(),
        };
        for i in 0..nodes {
            world.nodes.push(Node {
                me: Me {
                    instance: InstanceId::new(&format!("i{i}")),
                    host: format!("h{i}"),
                },
                alive: true,
                stopped_until: now,
                draining: false,
                belief: Belief::default(),
                beat_at: now,
                job: JobState::new(definition.clone(), Account::default()),
                planned: None,
                flights: vec![],
                driven: None,
                undecided_until: now,
                watches: BTreeMap::new(),
                look_at: now,
                runs: vec![],
            });
        }
        world
    }

    /// What the store's clock shows.
    fn store_us(&self) -> i64 {
        self.ms() * 1000 + self.ahead_us
    }
    /// What the store's clock should show.
    fn ms(&self) -> i64 {
        NOON + (self.now.0 / 1_000_000) as i64 - 3_600_000
    }
    /// The store's time for a request of `i`, as in Redis: the caller's time if the clock is in doubt.
    fn time_for(&self, i: usize, sent: Boottime) -> (i64, bool) {
        let shown = self.store_us();
        let believed = self.nodes[i].belief.at(sent).expect("it was asked");
        match belief::in_doubt(believed / 1000, shown / 1000) {
            true => (believed, true),
            false => (shown, false),
        }
    }
    /// What `i` believes.
    fn believed_ms(&self, i: usize) -> i64 {
        self.nodes[i].belief.at(self.now).map_or(0, |us| us / 1000)
    }
    fn is_lost(&mut self) -> bool {
        self.rng.u8(0..100) < self.lost
    }
    fn delay(&mut self) -> Duration {
        Duration::from_millis(self.rng.u64(1..if self.lost == 0 { 10 } else { 400 }))
    }
    fn kill(&mut self, i: usize) {
        self.nodes[i].alive = false;
        for run in std::mem::take(&mut self.nodes[i].runs) {
            // Its guard ends the command.
            self.command_ended(&run.win);
        }
    }
    fn command_ended(&mut self, win: &Win) {
        let now = self.ms();
        if let Some((_, _, end)) = self.ran.get_mut(&win.run.token()) {
            end.get_or_insert(now);
        }
    }

    fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.now + TICK;
            for i in 0..self.nodes.len() {
                if self.nodes[i].alive && self.now >= self.nodes[i].stopped_until {
                    self.tick(i);
                } else {
                    self.guard(i);
                }
            }
        }
    }

    /// The guards end the commands that have no lease any more.
    fn guard(&mut self, i: usize) {
        for r in 0..self.nodes[i].runs.len() {
            let run = &mut self.nodes[i].runs[r];
            if run.over.is_none() {
                run.over = run.ended(self.now);
            }
            if run.over.is_some() {
                let win = run.win.clone();
                self.command_ended(&win);
            }
        }
    }

    /// Somebody triggers the job; each instance hears of it, unless the hint gets lost.
    fn trigger(&mut self) {
        let (mut effects, us, now) = (Effects::default(), self.store_us(), self.now);
        let key = format!("k{}", self.triggers.len());
        let what = Control::Trigger { key: key.clone() };
        let job = JobName::new("draw");
        let done = claim::control(&mut self.state, &job, &what, us, &mut effects);
        if done != Controlled::Done {
            return;
        }
        self.reached.insert("trigger");
        self.triggers.insert(key.clone(), 0);
        for i in 0..self.nodes.len() {
            if self.nodes[i].alive && !self.is_lost() {
                self.heard_of(i, &key, us / 1000, now);
            }
        }
    }

    fn heard_of(&mut self, i: usize, key: &str, at_ms: i64, now: Boottime) {
        let now_ms = self.believed_ms(i);
        let job = &mut self.nodes[i].job;
        let due = job.triggered(key, at_ms, now);
        job.due(due, now_ms);
    }

    fn drain(&mut self, i: usize, on: bool) {
        let node = &mut self.nodes[i];
        if std::mem::replace(&mut node.draining, on) && !on {
            node.job.look_anew();
        }
        if on {
            self.reached.insert("drain");
        }
    }

    fn tick(&mut self, i: usize) {
        self.beat(i);
        let now_ms = self.believed_ms(i);
        let node = &mut self.nodes[i];
        if self.rng.u8(0..200) == 0 {
            // A connection for hints was lost.
            node.job.resync();
        }
        if !node.job.is_registered() {
            self.register(i);
        }
        let node = &mut self.nodes[i];
        // What is due, as the dispatcher hands it in.
        while let Some(after) = node.planned
            && let Some(at) = next_of(&node.job.definition.schedules, after)
            && at.0 <= now_ms
        {
            node.planned = Some(at);
            let within = node.job.definition.start_within.as_millis() as i64;
            let due = Due {
                job: JobName::new("draw"),
                target: Target::Scheduled(at),
                start_at: at.0,
                start_by: at.0 + within,
                overdue: false,
                missed: vec![],
            };
            node.job.due(due, now_ms);
        }
        self.drive(i);
        for f in 0..self.nodes[i].flights.len() {
            self.fly(i, f);
        }
        self.land(i);
        self.hold(i);
        self.watch(i);
    }

    /// Once a second: what the store's clock shows, and the wall clocks of the hosts, this one's first.
    fn beat(&mut self, i: usize) {
        let (now, us) = (self.now, self.store_us());
        let first = self.nodes[i].belief.offset_us().is_none();
        if now < self.nodes[i].beat_at || !first && self.is_lost() {
            return;
        }
        self.nodes[i].beat_at = now + Duration::from_secs(1);
        self.sample(i, us, now);
        let walls = self.nodes.iter().filter(|n| n.alive).count();
        let walls = vec![-self.ahead_us / 1000; walls];
        let node = &mut self.nodes[i];
        let _ = node.belief.vote(&walls, now);
        let now_ms = self.believed_ms(i);
        let job = &mut self.nodes[i].job;
        if job.ahead(Occurrence(now_ms)) {
            job.stale();
        }
    }

    fn sample(&mut self, i: usize, us: i64, sent: Boottime) {
        let estimate = Estimate::new(us, sent, self.now);
        match self.nodes[i].belief.sample(estimate) {
            Sampled::Doubted(_) => _ = self.reached.insert("doubt"),
            Sampled::Restored => _ = self.reached.insert("restored"),
            _ => {}
        }
    }

    fn register(&mut self, i: usize) {
        let ((us, in_doubt), now_ms) = (self.time_for(i, self.now), self.believed_ms(i));
        if self.is_lost() || in_doubt {
            return;
        }
        let node = &mut self.nodes[i];
        let mut ask: Register = node.job.registration(&node.me);
        let mut effects = Effects::default();
        let mut answer = claim::register(&mut self.state, &ask, us, "incarnation", &mut effects);
        if answer != Registration::Ready {
            ask.adopt = Some("incarnation".to_owned());
            ask.epoch = Some("epoch".to_owned());
            answer = claim::register(&mut self.state, &ask, us, "incarnation", &mut effects);
        }
        self.records.append(&mut effects.records);
        assert_eq!(answer, Registration::Ready);
        let state = self.state.clone().expect("it was registered");
        let definition = node.job.definition.clone();
        let follows = node.job.registered(&definition, &state, now_ms);
        let follows = follows.expect("the same definition");
        if follows.plan_after.is_some() {
            node.planned = follows.plan_after;
        }
        if follows.catch_up.is_some() {
            self.reached.insert("catch-up");
        }
        for open in &follows.watch {
            see(node, open, self.now);
        }
        for at in follows.ask_again {
            self.next_attempt(i, at);
        }
        for pending in follows.triggers {
            self.heard_of(i, &pending.key, pending.at, self.now);
        }
    }

    fn drive(&mut self, i: usize) {
        let (now, now_ms) = (self.now, self.believed_ms(i));
        let node = &mut self.nodes[i];
        if node.driven.is_some() || now < node.undecided_until {
            return;
        }
        match node.job.next(now_ms) {
            Next::Idle | Next::Wait => {}
            Next::Unfold(definition, segments, newest) => {
                let unfolded = unfold(segments, &definition, now_ms, newest);
                node.job.unfolded(unfolded, now_ms);
            }
            Next::Ask(plan) => {
                node.driven = Some(plan.target.clone());
                let ask = Ask {
                    target: plan.target,
                    missed: plan.missed,
                    trigger: plan.trigger,
                    start_by: plan.start_by,
                    next_attempt: false,
                };
                self.begin(i, ask);
            }
        }
    }

    fn begin(&mut self, i: usize, ask: Ask) {
        let live: Vec<InstanceId> = self.nodes.iter().map(|n| n.me.instance.clone()).collect();
        let me = &self.nodes[i].me.instance;
        let rank = rank(&live, me, &JobName::new("draw"), &ask.target, None);
        let (contest, first) = Contest::new(ask, rank);
        let wait = match first {
            Step::Pause(time) => Wait::Until(self.now + time),
            _ => Wait::Until(self.now),
        };
        self.nodes[i].flights.push(Flight { contest, wait });
    }

    fn next_attempt(&mut self, i: usize, at: Occurrence) {
        if self.nodes[i].job.await_next_attempt(at) {
            self.begin(i, Ask::next_attempt(at));
        }
    }

    /// One step of one flight, when its time has come.
    fn fly(&mut self, i: usize, f: usize) {
        let now = self.now;
        loop {
            let wait = std::mem::replace(&mut self.nodes[i].flights[f].wait, Wait::Until(now));
            let step = match wait {
                Wait::Until(at) if at <= now => self.see(i, f, None, Contest::look),
                Wait::Request(arrives, sent, claim) if arrives <= now => {
                    let mut effects = Effects::default();
                    let answer = match self.time_for(i, sent) {
                        (_, true) => Answer::InDoubt,
                        (us, false) => {
                            claim::claim(&mut self.state, &claim, us, "incarnation", &mut effects)
                        }
                    };
                    let us = self.store_us();
                    self.records.append(&mut effects.records);
                    let answer = (!self.is_lost()).then(|| Box::new(answer));
                    let back = now + self.delay();
                    self.nodes[i].flights[f].wait = Wait::Reply(back, sent, answer, us);
                    return;
                }
                Wait::Reply(arrives, sent, answer, us) if arrives <= now => match answer {
                    Some(answer) => {
                        self.sample(i, us, sent);
                        let info = self.info(i, &answer, us);
                        self.see(i, f, Some(sent), |c, v, effects| {
                            c.answered(*answer, info, v, effects)
                        })
                    }
                    None => self.fail(i, f),
                },
                waiting => {
                    self.nodes[i].flights[f].wait = waiting;
                    return;
                }
            };
            let wait = match step {
                Step::Look => Wait::Until(now),
                Step::Pause(time) | Step::Rest(time) => Wait::Until(now + time.max(TICK)),
                Step::FindGrant(run) => {
                    let held = |s: &State| s.held_by(run).is_some();
                    let granted = self.state.as_ref().is_some_and(held);
                    let granted = (!self.is_lost()).then_some(granted);
                    self.reached.insert("granted to one that drains");
                    let step = self.see(i, f, Some(now), |c, v, effects| {
                        c.found(granted, false, v, effects)
                    });
                    match step {
                        Step::Pause(time) | Step::Rest(time) => Wait::Until(now + time.max(TICK)),
                        Step::End(ended) => Wait::Over(ended),
                        _ => Wait::Until(now),
                    }
                }
                Step::First(at) => {
                    self.next_attempt(i, at);
                    match self.nodes[i].flights[f].contest.first_was_decided() {
                        Step::Rest(time) => Wait::Until(now + time.max(TICK)),
                        step => panic!("{step:?}"),
                    }
                }
                Step::Ask(_) if self.is_lost() => Wait::Reply(now + self.delay(), now, None, 0),
                Step::Ask(claim) => Wait::Request(now + self.delay(), now, claim),
                Step::End(ended) => Wait::Over(ended),
                step => panic!("nothing of this is missing: {step:?}"),
            };
            self.nodes[i].flights[f].wait = wait;
        }
    }

    fn info(&mut self, i: usize, answer: &Answer, us: i64) -> AnswerInfo {
        let mut info = AnswerInfo {
            store_ms: us / 1000,
            lapsed: false,
            expires_in: Duration::MAX,
        };
        if let Answer::Running(open) | Answer::Blocked(open) = answer {
            let node = &mut self.nodes[i];
            see(node, open, self.now);
            let seen = &node.watches[&open.run.occurrence];
            info.lapsed = seen.lapsed(self.now).is_some();
            info.expires_in = seen.expiry().since(self.now) + Duration::from_millis(1);
        }
        info
    }

    fn fail(&mut self, i: usize, f: usize) -> Step {
        self.reached.insert("lost");
        let pause = |_| Duration::from_millis(100);
        self.see(i, f, None, |c, v, effects| {
            c.failed("lost", true, 2, pause, v, effects)
        })
    }

    fn see(
        &mut self,
        i: usize,
        f: usize,
        sent: Option<Boottime>,
        decide: impl FnOnce(&mut Contest, &mut View<'_>, &mut Vec<Effect>) -> Step,
    ) -> Step {
        let now = self.now;
        let node = &mut self.nodes[i];
        let flight = &mut node.flights[f];
        let lapsed = match flight.contest.ask.target {
            Target::Scheduled(at) if node.watches.contains_key(&at) => {
                node.watches[&at].lapsed(now)
            }
            _ => node.watches.values().find_map(|s| s.lapsed(now)),
        };
        let run = RunId(uuid::Uuid::from_u128(self.rng.u128(..)));
        let mut effects = vec![];
        let mut view = View {
            me: &node.me,
            now,
            clock: &node.belief,
            subject: Subject::Here(&mut node.job),
            halt: match node.belief.doubt_us() {
                _ if node.draining => Some(Halt::Draining),
                Some(_) => Some(Halt::Unreliable("clock", "it jumps".into())),
                None => None,
            },
            slot: Slot::Needless,
            permit: true,
            lapsed: lapsed.cloned(),
            fresh: &|| run,
        };
        let step = decide(&mut flight.contest, &mut view, &mut effects);
        for effect in effects {
            match effect {
                Effect::Unwatch(at) => {
                    self.nodes[i].watches.remove(&at);
                }
                Effect::Start(win) => self.start(i, *win, sent.expect("an answer")),
                Effect::Note(..) | Effect::NotRun(..) | Effect::CannotClaim(_) => {}
            }
        }
        step
    }

    /// Starts a run as the holder does: not without trust, not too late.
    fn start(&mut self, i: usize, win: Win, sent: Boottime) {
        let lease = HeldLease::new(*win.job.lease, sent);
        let token = win.run.token();
        assert!(!self.ran.contains_key(&token), "{token} was granted twice");
        let late = win.too_late || !lease.may_start(self.now);
        if !late {
            let now = self.ms();
            // A step of a second at most is taken for the truth.
            assert!(
                win.run.occurrence.0 <= now + belief::SLACK.as_millis() as i64,
                "{token} starts before its time, {now}"
            );
            self.ran.insert(token, (i, now, None));
            if win.run.trigger == Trigger::Retry {
                self.reached.insert("retry");
            } else if win.run.attempt > 1 {
                self.reached.insert("next attempt");
            } else if let Some(key) = &win.run.key {
                *self.triggers.entry(key.clone()).or_default() += 1;
            }
        }
        let ends_at = self.now + Duration::from_millis(self.rng.u64(10..3000));
        let failed = self.rng.u8(0..4) == 0;
        self.nodes[i].runs.push(Run {
            ends_at,
            lease,
            over: late.then_some(if win.too_late {
                Outcome::Missed
            } else {
                Outcome::LeaseLost
            }),
            failed,
            win,
        });
    }

    /// Flights that are over.
    fn land(&mut self, i: usize) {
        let now = self.now;
        let node = &mut self.nodes[i];
        let over = node
            .flights
            .extract_if(.., |f| matches!(f.wait, Wait::Over(_)));
        for flight in over.collect::<Vec<_>>() {
            let (Wait::Over(ended), ask) = (flight.wait, flight.contest.ask) else {
                continue;
            };
            if ask.next_attempt {
                if let Target::Scheduled(at) = ask.target {
                    node.job.awaits_no_longer(at);
                    if ended == Ended::Undecided {
                        node.job.stale();
                    }
                }
                continue;
            }
            node.job.ended(&ask.target, &ended, node.draining);
            node.driven = None;
            if ended == Ended::Undecided {
                node.undecided_until = now + Duration::from_millis(200);
            }
        }
    }

    /// Renews, ends and settles the runs.
    fn hold(&mut self, i: usize) {
        let now = self.now;
        let (us, _) = self.time_for(i, now);
        for r in (0..self.nodes[i].runs.len()).rev() {
            let run = &mut self.nodes[i].runs[r];
            if run.over.is_none() {
                run.over = run.ended(now);
            }
            if run.over.is_none() && now >= run.lease.renew_at() {
                let seq = run.lease.next_seq();
                let renew = renewal(&self.nodes[i].runs[r].win, seq);
                if !self.is_lost() {
                    let _ = claim::renew(&mut self.state, &renew, us, "incarnation");
                    if !self.is_lost() {
                        let run = &mut self.nodes[i].runs[r];
                        run.lease.renewed(now, now);
                    }
                }
            }
            let run = &self.nodes[i].runs[r];
            if let Some(outcome) = run.over {
                let win = run.win.clone();
                self.command_ended(&win);
                self.nodes[i].job.account.run_is_over(win.run.id);
                if !self.is_lost() {
                    self.settle(i, &win, outcome);
                    self.nodes[i].runs.remove(r);
                }
            }
        }
    }

    fn settle(&mut self, i: usize, win: &Win, outcome: Outcome) {
        let started = self.ran.contains_key(&win.run.token());
        let mut effects = Effects::default();
        let (us, _) = self.time_for(i, self.now);
        let next = match (outcome, started) {
            (Outcome::LeaseLost, false) => attempts::after_no_start(win.run.attempt),
            (Outcome::LeaseLost, true) => attempts::after_crash(&win.job, win.run.attempt),
            (Outcome::Failed, _) => attempts::after_failure(&win.job, win.run.attempt),
            _ => None,
        };
        if !started && next.is_some() {
            self.reached.insert("not started");
        }
        let settle = settlement(win, outcome, self.ms(), next);
        let _ = claim::settle(&mut self.state, &settle, us, "incarnation", &mut effects);
        self.records.append(&mut effects.records);
        self.nodes[i].job.run_has_ended(win.run.id);
    }

    /// Looks at the leases of others.
    fn watch(&mut self, i: usize) {
        let now = self.now;
        if now < self.nodes[i].look_at || self.is_lost() {
            return;
        }
        let node = &mut self.nodes[i];
        node.look_at = now + Duration::from_millis(170);
        let open = self.state.as_ref().map_or(vec![], |s| s.open.clone());
        node.watches
            .retain(|at, _| open.iter().any(|o| o.run.occurrence == *at));
        let mut due = vec![];
        for open in open {
            if node.job.account.is_running(open.run.id) && open.next_attempt.is_none() {
                continue;
            }
            see(node, &open, now);
            if open.next_attempt.is_some()
                || node.watches[&open.run.occurrence].lapsed(now).is_some()
            {
                due.push(open.run.occurrence);
            }
        }
        for at in due {
            self.next_attempt(i, at);
        }
    }

    /// Checks what must hold whatever has happened.
    fn judge(&self, definition: &Job, until: Occurrence) {
        let mut records: BTreeMap<(Occurrence, u32), Vec<&RunRecord>> = BTreeMap::new();
        for r in &self.records {
            records
                .entry((r.occurrence, r.attempt))
                .or_default()
                .push(r);
        }
        for of_one in records.values() {
            // A holder that was stopped records how its run ended after another has found the lease lapsed.
            let same = |r: &&RunRecord| r.run_id == of_one[0].run_id;
            let found = of_one[0].outcome == Outcome::Unknown && of_one.iter().all(same);
            assert!(
                of_one.len() == 1 || of_one.len() == 2 && found,
                "one is recorded twice: {of_one:#?}"
            );
        }
        let mut ran: Vec<(i64, i64, FencingToken)> = vec![];
        for (token, (_, from, to)) in &self.ran {
            ran.push((*from, to.unwrap_or(self.ms()), *token));
        }
        ran.sort_unstable();
        for pair in ran.windows(2) {
            assert!(pair[0].1 <= pair[1].0, "two run at once: {pair:?}");
            assert!(pair[0].2 < pair[1].2, "tokens do not grow: {pair:?}");
        }
        if definition.on_crash == OnCrash::Fail && definition.retry.is_none() {
            let occurrences: BTreeSet<i64> = ran.iter().map(|r| r.2.0 / 1000).collect();
            assert_eq!(occurrences.len(), ran.len(), "an occurrence started twice");
        }
        for (key, begun) in &self.triggers {
            assert!(*begun <= 1, "{key} was begun {begun} times");
        }
        let waiting = self.state.as_ref().map_or(&[][..], |s| &s.triggers);
        assert!(waiting.is_empty(), "{waiting:?} wait for ever");
        // From the first that was owed on, each has an end.
        let first = self.records.iter().map(|r| r.occurrence).min();
        let mut at = first.expect("something was decided");
        while at <= until {
            // A record of several stands for those before it, which are two seconds apart.
            let stands_for = |r: &RunRecord| {
                r.occurrence.0 - 2000 * (r.count as i64 - 1) <= at.0 && at <= r.occurrence
            };
            let ended = self.records.iter().any(stands_for);
            assert!(ended, "{at} has no end: {:#?}", self.state);
            at = next_of(&definition.schedules, at).expect("there is always a next");
        }
    }
}

fn see(node: &mut Node, open: &Open, received: Boottime) {
    let seen = node.watches.entry(open.run.occurrence);
    seen.or_insert_with(|| ObservedLease::new(open, received))
        .update(open, received);
}

fn renewal(win: &Win, seq: u32) -> Renew {
    Renew {
        job: win.job.name.clone(),
        run: win.run.clone(),
        seq,
    }
}

fn settlement(win: &Win, outcome: Outcome, now_ms: i64, next: Option<DelayedAttempt>) -> Settle {
    let record = RunRecord {
        outcome,
        ..RunRecord::of(&win.job.name, &win.run).lasting(None, Some(now_ms))
    };
    Settle {
        run: win.run.id,
        record,
        next_attempt: next,
    }
}

/// What goes wrong meanwhile.
#[derive(Debug, Clone, Copy, Default)]
struct Weather {
    /// How many of a hundred messages get lost.
    lost: u8,
    /// Instances die, and come back; others are stopped for some seconds.
    kills: bool,
    /// People trigger the job, and let instances drain.
    people: bool,
    /// The store's clock is wrong for some seconds.
    clock: bool,
}

/// A minute of good and bad weather, and a while of good weather at its end.
fn live(seed: u64, lines: &str, nodes: usize, weather: Weather) -> World {
    let definition = job(lines);
    let mut world = World::new(seed, nodes, &definition, weather.lost);
    world.run_for(Duration::from_secs(10));
    for _ in 0..4 {
        if weather.people {
            let i = world.rng.usize(0..nodes);
            world.drain(i, true);
            for _ in 0..world.rng.u8(0..4) {
                let time = world.rng.u64(0..700);
                world.run_for(Duration::from_millis(time));
                world.trigger();
            }
            let time = world.rng.u64(0..3000);
            world.run_for(Duration::from_millis(time));
            world.drain(i, false);
        }
        if weather.kills {
            let i = world.rng.usize(0..nodes);
            world.kill(i);
            world.reached.insert("killed");
            let (i, time) = (world.rng.usize(0..nodes), world.rng.u64(0..4000));
            world.nodes[i].stopped_until = world.now + Duration::from_millis(time);
        }
        if weather.clock {
            let ahead = [800, 5_000, 3_600_000][world.rng.usize(0..3)];
            world.ahead_us = 1000 * if world.rng.bool() { ahead } else { -ahead };
            let time = world.rng.u64(0..8000);
            world.run_for(Duration::from_millis(time));
            world.ahead_us = 0;
        }
        world.run_for(Duration::from_secs(5));
        for i in 0..nodes {
            if !world.nodes[i].alive {
                let fresh = JobState::new(definition.clone(), Account::default());
                let node = &mut world.nodes[i];
                (node.job, node.alive, node.planned, node.driven) = (fresh, true, None, None);
                node.flights.clear();
                node.watches.clear();
            }
        }
        world.run_for(Duration::from_secs(5));
    }
    world.lost = 0;
    world.run_for(Duration::from_secs(30));
    // What came due towards the end may still wait or run.
    world.judge(&definition, Occurrence(world.ms() - 20_000));
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn each_occurrence_is_run_by_one_or_recorded(
        seed: u64, nodes in 1..4usize, lost in 0..40u8, (kills, people, clock) in any::<(bool, bool, bool)>(),
        policy in 0..5usize,
    ) {
        let lines = [
            "",
            "overlap = \"queue\"\nstart_within = \"4s\"",
            "on_crash = \"rerun\"\nmax_attempts = 4",
            "on_crash = \"rerun\"\nmax_attempts = 4\noverlap = \"queue\"\nstart_within = \"4s\"",
            "retry = { attempts = 2, interval = \"300ms\" }",
        ];
        live(seed, lines[policy], nodes, Weather { lost, kills, people, clock });
    }
}

/// Each occurrence has a run that ends by itself, or is skipped because of such a run.
fn assert_nothing_was_given_up(world: &World, of: &str) {
    let well = |r: &&RunRecord| {
        matches!(
            r.outcome,
            Outcome::Succeeded | Outcome::Failed | Outcome::Skipped
        )
    };
    let ill: Vec<_> = world.records.iter().filter(|r| !well(r)).collect();
    assert!(ill.is_empty(), "{of}: {ill:#?}");
}

/// If no instance dies and few messages get lost, no granted run is lost.
#[test]
fn few_losses_cost_no_run() {
    for seed in 0..60 {
        for lost in [0, 8] {
            let weather = Weather {
                lost,
                ..Weather::default()
            };
            let world = live(seed, "", 3, weather);
            assert_nothing_was_given_up(&world, &format!("seed {seed}, {lost} % lost"));
        }
    }
}

/// A store's clock that is wrong for some seconds costs no occurrence that may start that much later.
#[test]
fn a_wrong_clock_costs_no_run() {
    for seed in 0..60 {
        let weather = Weather {
            clock: true,
            ..Weather::default()
        };
        let world = live(
            seed,
            "start_within = \"30s\"\ncatch_up = \"all\"",
            2,
            weather,
        );
        assert_nothing_was_given_up(&world, &format!("seed {seed}"));
    }
}

/// Whatever the answers say: a contest asks once a second in the end, and at once in the beginning.
#[test]
fn a_contest_asks_less_and_less_often() {
    let (mut contest, _) = Contest::new(Ask::next_attempt(Occurrence(1)), 0);
    let waits: Vec<u128> = (0..16)
        .map(|_| contest.pace(Duration::from_micros(50)).as_millis())
        .collect();
    assert_eq!(waits[..5], [0, 0, 0, 0, 2]);
    assert_eq!(waits[15], 1000);
    assert_eq!(contest.pace(Duration::from_secs(4)).as_secs(), 4);
}

/// One look of a job's only contest at `job`.
fn look(job: &mut JobState, ask: Ask, halt: Option<Halt>, slot: Slot, permit: bool) -> Step {
    let mut belief = Belief::default();
    let now = Boottime(1_000_000_000);
    belief.sample(Estimate::new(NOON * 1000, now, now));
    let me = Me {
        instance: InstanceId::new("a"),
        host: "a".to_owned(),
    };
    let mut view = View {
        me: &me,
        now,
        clock: &belief,
        subject: Subject::Here(job),
        halt,
        slot,
        permit,
        lapsed: None,
        fresh: &|| RunId(uuid::Uuid::nil()),
    };
    Contest::new(ask, 0).0.look(&mut view, &mut vec![])
}

fn scheduled(at: i64) -> Ask {
    Ask {
        target: Target::Scheduled(Occurrence(at)),
        missed: vec![],
        trigger: Trigger::Schedule,
        start_by: at + 60_000,
        next_attempt: false,
    }
}

fn registered() -> JobState {
    let definition = job("");
    let mut job = JobState::new(definition.clone(), Account::default());
    let state = State {
        newest: NOON - 2000,
        ..State::default()
    };
    assert!(job.registered(&definition, &state, NOON - 1).is_some());
    job
}

#[test]
fn what_is_missing_is_got_first_one_thing_after_the_other() {
    let mut job = registered();
    let ask = || scheduled(NOON);
    let step = look(&mut job, ask(), None, Slot::Missing, false);
    assert!(
        matches!(step, Step::TakeSlot(t) if t > Duration::from_secs(60)),
        "{step:?}"
    );
    let step = look(&mut job, ask(), None, Slot::Held, false);
    assert!(matches!(step, Step::TakePermit), "{step:?}");
    let step = look(&mut job, ask(), None, Slot::Needless, true);
    assert!(matches!(step, Step::Ask(_)), "{step:?}");
    // When its time is over, recording it needs no slot.
    let late = Ask {
        start_by: NOON - 1000,
        ..ask()
    };
    let step = look(&mut job, late, None, Slot::Missing, true);
    assert!(matches!(step, Step::Ask(_)), "{step:?}");
}

#[test]
fn a_contest_waits_for_the_settlement_of_its_own_instances_run() {
    let mut job = registered();
    let run = RunId(uuid::Uuid::max());
    assert!(
        job.account
            .begin(&TargetId::Scheduled(Occurrence(NOON - 2000)), run)
    );
    let asked = |job: &mut JobState| {
        matches!(
            look(job, scheduled(NOON), None, Slot::Needless, true),
            Step::Ask(_)
        )
    };
    assert!(asked(&mut job), "while it runs the store decides");
    job.account.run_is_over(run);
    assert!(!asked(&mut job));
    job.run_has_ended(run);
    assert!(asked(&mut job));
}

#[test]
fn what_was_asked_and_not_heard_is_neither_decided_nor_given_up() {
    let mut job = registered();
    let ended =
        |job: &mut JobState, halt| match look(job, scheduled(NOON), halt, Slot::Needless, true) {
            Step::End(ended) => Some(ended),
            _ => None,
        };
    let drain = || Some(Halt::Draining);
    assert_eq!(ended(&mut job, drain()), Some(Ended::Draining));
    // The answer is awaited: the claim has the same run id again, also when others tell that the occurrence is decided.
    let first = look(&mut job, scheduled(NOON), None, Slot::Needless, true);
    job.decided(Occurrence(NOON));
    let again = look(&mut job, scheduled(NOON), None, Slot::Needless, true);
    match (first, again) {
        (Step::Ask(first), Step::Ask(again)) => assert_eq!(first.run, again.run),
        other => panic!("{other:?}"),
    }
    let step = look(&mut job, scheduled(NOON), drain(), Slot::Needless, true);
    assert!(matches!(step, Step::FindGrant(_)), "{step:?}");
    job.account.forget(&TargetId::Scheduled(Occurrence(NOON)));
    assert_eq!(ended(&mut job, None), Some(Ended::Settled));
}

#[test]
fn nothing_is_asked_that_would_jump_over_what_is_due() {
    let mut job = registered();
    let due = Due {
        job: JobName::new("draw"),
        target: Target::Scheduled(Occurrence(NOON)),
        start_at: NOON,
        start_by: NOON + 60_000,
        overdue: false,
        missed: vec![],
    };
    assert!(job.due(due, NOON));
    let step = look(&mut job, scheduled(NOON + 2000), None, Slot::Needless, true);
    assert!(matches!(step, Step::End(Ended::Undecided)), "{step:?}");
}

#[test]
fn a_run_is_begun_once_however_often_it_is_granted() {
    let (mut account, id) = (Account::default(), TargetId::Scheduled(Occurrence(1)));
    let run = RunId(uuid::Uuid::max());
    assert!(account.begin(&id, run));
    assert!(!account.begin(&id, run));
    account.run_has_ended(run);
    assert!(!account.begin(&id, run));
}

/// What these worlds are to test does happen in them.
#[test]
fn the_weather_is_bad_enough() {
    let rerun =
        "on_crash = \"rerun\"\nmax_attempts = 4\nretry = { attempts = 1, interval = \"300ms\" }";
    let weather = Weather {
        lost: 30,
        kills: true,
        people: true,
        clock: true,
    };
    let worlds = (0..20).map(|seed| live(seed, rerun, 3, weather));
    let reached: BTreeSet<&str> = worlds.flat_map(|w| w.reached).collect();
    let all = [
        "catch-up",
        "doubt",
        "drain",
        "granted to one that drains",
        "killed",
        "lost",
        "next attempt",
        "not started",
        "restored",
        "retry",
        "trigger",
    ];
    assert_eq!(reached.into_iter().collect::<Vec<_>>(), all);
}

#[test]
fn a_world_of_one_seed_is_the_same_each_time() {
    let weather = Weather {
        lost: 20,
        kills: true,
        people: true,
        clock: true,
    };
    let [a, b] = [7, 7].map(|seed| live(seed, "", 3, weather));
    assert_eq!(a.records, b.records);
    assert_eq!(a.ran, b.ran);
}
