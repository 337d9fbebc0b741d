//! What can happen next in a world, and what follows from it.

use std::time::Duration;

use super::{BEGIN, Body, CommandState, SLOW, Sender, World};
use crate::{logic::claim::Control, model::Boottime};

/// After the last fault, for so long nothing goes wrong, before it is judged what has come to an end.
const CALM: Duration = Duration::from_secs(25);

/// Kinds of what can go wrong, or be asked by people. A plan says how often each may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// A message gets lost.
    Lose,
    /// A message arrives after its sender has given it up.
    Slow,
    /// An instance is killed; later it is started again.
    Kill,
    /// As [`Fault::Kill`], and its next process has another name.
    KillAndRename,
    /// A guard is killed, and its command with it.
    KillGuard,
    /// An instance is stopped for a while, its guards are not.
    Freeze,
    /// An instance is cut off from the store for a while.
    Cut,
    /// The store does not answer for a while.
    Down,
    /// The store is restarted with its data.
    Reboot,
    /// The store's data is lost, while it goes on.
    Flush,
    /// The store's data is replaced by a copy from some time ago; once more: by what it was before.
    Rollback,
    /// The store's clock is wrong for a while.
    Clock,
    /// An instance's wall clock is wrong from now on.
    Wall,
    /// People pause the job for a while.
    Pause,
    Skip,
    Trigger,
    Cancel,
    /// An instance is drained for a while.
    Drain,
    /// An instance is told to end; later it is started again.
    Terminate,
}

impl Fault {
    pub(crate) const ALL: &[Self] = &[
        Self::Lose,
        Self::Slow,
        Self::Kill,
        Self::KillAndRename,
        Self::KillGuard,
        Self::Freeze,
        Self::Cut,
        Self::Down,
        Self::Reboot,
        Self::Flush,
        Self::Rollback,
        Self::Clock,
        Self::Wall,
        Self::Pause,
        Self::Skip,
        Self::Trigger,
        Self::Cancel,
        Self::Drain,
        Self::Terminate,
    ];
}

/// One thing that happens. Numbers are places in the lists of the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Choice {
    /// Nothing, until the next moment at which something is due.
    Time,
    Deliver(usize),
    /// Something goes wrong, or people ask for something: with which message, instance, command or job, and how.
    Fault(Fault, usize, i64),
    /// It is over again.
    Over(Fault, usize),
}

impl World {
    /// All that can happen next; empty at the end.
    pub(crate) fn choices(&self) -> Vec<Choice> {
        if self.broken.is_some() || self.over {
            return vec![];
        }
        let mut choices = self.deliveries();
        if choices.is_empty() {
            choices.push(Choice::Time);
        }
        if !self.calm {
            self.faults(&mut choices);
        }
        choices
    }

    /// The messages that can arrive now.
    pub(super) fn deliveries(&self) -> Vec<Choice> {
        let arrives = |m: &super::Message| m.arrives <= self.now && self.can_arrive(m);
        let all = self.mail.iter().enumerate().filter(|(_, m)| arrives(m));
        if self.plan.all_orders {
            return all.map(|(at, _)| Choice::Deliver(at)).collect();
        }
        // What comes from the store, and starts, come one after the other: they are not in each other's way.
        let mut requests = vec![];
        for (at, m) in all {
            match m.body {
                Body::Reply(..) | Body::Exec(_) => return vec![Choice::Deliver(at)],
                Body::Request(..) => requests.push(Choice::Deliver(at)),
            }
        }
        requests
    }

    fn faults(&self, choices: &mut Vec<Choice>) {
        let ended = |choices: &mut Vec<Choice>| {
            for (i, here) in self.instances.iter().enumerate() {
                if here.frozen {
                    choices.push(Choice::Over(Fault::Freeze, i));
                }
                if here.cut {
                    choices.push(Choice::Over(Fault::Cut, i));
                }
                if !here.alive {
                    choices.push(Choice::Over(Fault::Kill, i));
                }
                if here.draining {
                    choices.push(Choice::Over(Fault::Drain, i));
                }
            }
            if !self.server.up {
                choices.push(Choice::Over(Fault::Down, 0));
            }
            if self.server.ahead_us != 0 {
                choices.push(Choice::Over(Fault::Clock, 0));
            }
            for (j, job) in self.plan.jobs.iter().enumerate() {
                if self.truth.paused.contains(&job.name) {
                    choices.push(Choice::Over(Fault::Pause, j));
                }
            }
        };
        // What began ends: not while something can arrive, which would try each order of things that do not matter to
        // each other.
        if choices.contains(&Choice::Time) {
            ended(choices);
        }
        if self.most == 0 {
            return;
        }
        let left = |f: Fault| self.left.get(&f).is_some_and(|n| *n > 0);
        for fault in self.left.keys().copied().filter(|f| left(*f)) {
            self.ways(fault, choices);
        }
    }

    /// The ways in which a fault can happen now.
    fn ways(&self, fault: Fault, choices: &mut Vec<Choice>) {
        let mut way = |which: usize, how: i64| choices.push(Choice::Fault(fault, which, how));
        let jobs = 0..self.plan.jobs.len();
        let can_arrive = |(at, m): (usize, &super::Message)| {
            (m.arrives <= self.now && !m.slow && self.can_arrive(m)).then_some(at)
        };
        let exec = |m: &super::Message| matches!(m.body, Body::Exec(_));
        let idle = self.deliveries().is_empty();
        match fault {
            Fault::Lose => {
                let all = self.mail.iter().enumerate().filter(|(_, m)| !exec(m));
                all.filter_map(can_arrive).for_each(|at| way(at, 0));
            }
            Fault::Slow => self
                .mail
                .iter()
                .enumerate()
                .filter_map(can_arrive)
                .for_each(|at| way(at, 0)),
            Fault::Kill | Fault::KillAndRename => {
                let alive = self.instances.iter().enumerate().filter(|(_, i)| i.alive);
                alive.for_each(|(i, _)| way(i, 0));
            }
            Fault::Freeze => {
                let works = self.instances.iter().enumerate();
                works
                    .filter(|(_, i)| i.alive && !i.frozen)
                    .for_each(|(i, _)| way(i, 0));
            }
            Fault::Cut => {
                let works = self.instances.iter().enumerate();
                works
                    .filter(|(_, i)| i.alive && !i.cut)
                    .for_each(|(i, _)| way(i, 0));
            }
            Fault::KillGuard => {
                let alive = |c: &super::Command| !matches!(c.state, CommandState::Gone(..));
                let all = self.commands.iter().enumerate();
                all.filter(|(_, c)| alive(c)).for_each(|(c, _)| way(c, 0));
            }
            Fault::Down if self.server.up => way(0, 0),
            Fault::Reboot | Fault::Flush if self.server.up => way(0, 0),
            // A copy is made, and later it is what the data is.
            Fault::Rollback if self.server.up => way(0, 0),
            Fault::Clock if self.server.ahead_us == 0 && idle => [3_600_000, -3_600_000, 5000, 700]
                .iter()
                .for_each(|by| way(0, *by)),
            Fault::Wall if idle => (0..self.instances.len()).for_each(|i| way(i, 3_600_000)),
            Fault::Pause if idle => jobs.for_each(|j| way(j, 0)),
            Fault::Skip | Fault::Cancel if idle => jobs.for_each(|j| way(j, 0)),
            Fault::Trigger => jobs.for_each(|j| way(j, 0)),
            Fault::Drain => {
                let all = self.instances.iter().enumerate();
                all.filter(|(_, i)| i.alive && !i.draining && !i.stopping)
                    .for_each(|(i, _)| way(i, 0));
            }
            Fault::Terminate => {
                let all = self.instances.iter().enumerate();
                all.filter(|(_, i)| i.alive && !i.stopping)
                    .for_each(|(i, _)| way(i, 0));
            }
            _ => {}
        }
    }

    pub(super) fn carry_out(&mut self, choice: Choice) {
        match choice {
            Choice::Time => self.pass(),
            Choice::Deliver(at) => {
                self.deliveries += 1;
                if self.deliveries > 500 {
                    self.breaks("nothing spins", "500 messages at one moment");
                }
                self.deliver(at);
            }
            Choice::Fault(fault, which, how) => {
                self.most -= 1;
                if let Some(n) = self.left.get_mut(&fault) {
                    *n -= 1;
                }
                self.go_wrong(fault, which, how);
            }
            Choice::Over(fault, which) => self.mend(fault, which),
        }
        self.work();
    }

    // Long: one arm for each fault.
    fn go_wrong(&mut self, fault: Fault, which: usize, how: i64) {
        let now = self.now;
        self.say(|w| format!("** {fault:?} {}", w.which(fault, which, how)));
        match fault {
            Fault::Lose => _ = self.mail.remove(which),
            Fault::Slow => {
                let m = &mut self.mail[which];
                (m.arrives, m.slow) = (now + SLOW, true);
            }
            Fault::Kill => self.kill(which),
            Fault::KillAndRename => {
                self.kill(which);
                self.instances[which].start_again(true, &self.plan, now);
            }
            Fault::KillGuard => {
                let run = self.commands[which].run.id;
                // The kernel ends the command with its guard, and the daemon sees that.
                let _ = self.commands[which].life.on_time(now);
                self.command_gone(run, None);
                if let Some(command) = self.command(run)
                    && let CommandState::Gone(outcome, cause, _) = &mut command.state
                    && cause.is_none()
                {
                    *outcome = crate::model::Outcome::Crashed;
                    *cause = Some(crate::logic::guard_life::Cause::GuardGone);
                }
            }
            Fault::Freeze => self.instances[which].frozen = true,
            Fault::Cut => self.instances[which].cut = true,
            Fault::Down => self.server.up = false,
            Fault::Reboot => {
                self.server.incarnations += 1;
                self.truth.data_lost = true;
            }
            Fault::Flush => {
                self.outcomes_lost();
                self.server.data = super::server::Data::default();
                self.truth.data_lost = true;
            }
            Fault::Rollback => match self.server.copy.take() {
                None => {
                    self.server.copy = Some(Box::new(self.server.data.clone()));
                    // To make the copy is no fault yet.
                    self.most += 1;
                    *self.left.entry(Fault::Rollback).or_default() +=
                        u8::from(!self.truth.data_lost);
                }
                Some(copy) => {
                    self.outcomes_lost();
                    let was = std::mem::replace(&mut self.server.data, *copy);
                    self.server.copy = Some(Box::new(was));
                    self.server.incarnations += 1;
                    self.truth.data_lost = true;
                }
            },
            Fault::Clock => {
                self.server.ahead_us = how * 1000;
                self.truth.clock_wrong_since.get_or_insert(now);
                self.truth.clock_was_wrong = true;
            }
            Fault::Wall => {
                self.instances[which].wall_ahead = how;
                self.truth.walls_wrong = true;
            }
            Fault::Pause => {
                let job = self.plan.jobs[which].name.clone();
                let what = Control::Pause {
                    until: None,
                    reason: None,
                };
                if self.control(&job, &what) == crate::logic::claim::Controlled::Done {
                    self.truth.paused.insert(job);
                }
            }
            Fault::Skip => {
                let job = self.plan.jobs[which].name.clone();
                let _ = self.control(&job, &Control::Skip { count: 1 });
            }
            Fault::Trigger => {
                let job = self.plan.jobs[which].name.clone();
                self.people += 1;
                // Each second time people use the key once more.
                let key = format!("k{}", self.people.div_ceil(2));
                let what = Control::Trigger { key };
                let _ = self.control(&job, &what);
            }
            Fault::Cancel => {
                let job = self.plan.jobs[which].name.clone();
                if self.server.up {
                    self.cancelled(&job);
                }
                let _ = self.control(&job, &Control::Cancel);
            }
            Fault::Drain => self.drain(which, true),
            Fault::Terminate => {
                self.instances[which].stopping = true;
                self.wake(which);
            }
        }
    }

    fn mend(&mut self, fault: Fault, which: usize) {
        self.say(|w| format!("** no more {fault:?} {}", w.which(fault, which, 0)));
        match fault {
            Fault::Freeze => {
                self.instances[which].frozen = false;
                self.hear_again(which);
            }
            Fault::Cut => {
                self.instances[which].cut = false;
                self.hear_again(which);
            }
            Fault::Down => {
                self.server.up = true;
                (0..self.instances.len()).for_each(|i| self.hear_again(i));
            }
            Fault::Clock => {
                self.judge_the_clock();
                self.server.ahead_us = 0;
            }
            Fault::Kill => {
                let (plan, now) = (self.plan.clone(), self.now);
                self.instances[which].start_again(false, &plan, now);
            }
            Fault::Drain => self.drain(which, false),
            Fault::Pause => {
                let job = self.plan.jobs[which].name.clone();
                if self.server.up {
                    let _ = self.control(&job, &Control::Resume);
                    self.truth.paused.remove(&job);
                }
            }
            _ => {}
        }
    }

    fn which(&self, fault: Fault, which: usize, how: i64) -> String {
        match fault {
            Fault::Lose | Fault::Slow => self
                .mail
                .get(which)
                .map_or(String::new(), |m| format!("{:?}: {:?}", m.from, m.body)),
            Fault::KillGuard => self
                .commands
                .get(which)
                .map_or(String::new(), |c| super::short(c.run.id)),
            Fault::Clock => format!("by {how} ms"),
            Fault::Pause | Fault::Skip | Fault::Trigger | Fault::Cancel => {
                format!("of {}", self.plan.jobs[which].name)
            }
            Fault::Down | Fault::Reboot | Fault::Flush | Fault::Rollback => {
                "of the store".to_owned()
            }
            _ => self.instances[which].me.instance.to_string(),
        }
    }

    fn kill(&mut self, i: usize) {
        self.daemon_gone(i);
        self.leave_will(i);
        self.instances[i].alive = false;
        self.instances[i].frozen = false;
        let of = Sender::Instance(i, self.instances[i].generation);
        // What it has sent may still arrive; nobody hears the answers, and no start goes on.
        self.mail
            .retain(|m| m.from != of || matches!(m.body, Body::Request(..)));
        self.reached.insert("killed");
    }

    fn drain(&mut self, i: usize, on: bool) {
        self.instances[i].draining = on;
        if !on {
            self.instances[i]
                .jobs
                .values_mut()
                .for_each(|h| h.state.look_anew());
        }
        self.wake(i);
    }

    /// Hints came late, or the connection for them is a new one.
    fn hear_again(&mut self, i: usize) {
        self.instances[i]
            .jobs
            .values_mut()
            .for_each(|h| h.state.resync());
    }

    /// Whoever waits for a job here looks again.
    fn wake(&mut self, i: usize) {
        self.instances[i]
            .jobs
            .values_mut()
            .for_each(|h| h.state.ended_elsewhere());
    }

    /// Time goes on to the next moment at which something is due.
    fn pass(&mut self) {
        let next = self.next_moment().max(self.now + Duration::from_nanos(1));
        let grid = self.plan.grid.as_nanos() as u64;
        self.now = Boottime(next.0.div_ceil(grid) * grid);
        self.deliveries = 0;
        self.judge_the_clock();
        self.judge_the_memory();
        self.judge_the_pauses();
        self.judge_the_orphans();
        let lasts = BEGIN + Duration::from_secs(5) + self.plan.lasts;
        if !self.calm && self.now >= lasts {
            self.calm_down();
        }
        if self.calm && self.now >= lasts + CALM {
            self.over = true;
            self.judge_the_end();
        }
    }

    fn next_moment(&self) -> Boottime {
        let wills = self.wills.iter().map(|w| w.until);
        let works = |i: &usize| self.instances[*i].alive && !self.instances[*i].frozen;
        let instances = (0..self.instances.len())
            .filter(works)
            .map(|i| self.next_of_instance(i));
        let mail = self
            .mail
            .iter()
            .filter(|m| self.can_arrive(m))
            .map(|m| m.arrives);
        let guards = self.commands.iter().map(|c| match c.state {
            CommandState::Starting => c.life.wake_at().unwrap_or(Boottime(u64::MAX)),
            CommandState::Runs { ends_at } => {
                c.life.wake_at().map_or(ends_at, |at| at.min(ends_at))
            }
            CommandState::Gone(..) => c
                .settle
                .as_ref()
                .map_or(Boottime(u64::MAX), |s| s.wake_at()),
        });
        let all = instances
            .chain(mail.filter(|at| *at > self.now))
            .chain(guards)
            .chain(wills);
        let beat = self.now + Duration::from_secs(1);
        all.filter(|at| *at > self.now)
            .min()
            .unwrap_or(beat)
            .min(beat)
    }

    /// From now on nothing goes wrong, and what did is mended.
    fn calm_down(&mut self) {
        self.calm = true;
        self.say(|_| "** all is well from here on".to_owned());
        let mut choices = vec![Choice::Time];
        self.most = 0;
        self.faults(&mut choices);
        for choice in choices {
            if let Choice::Over(fault, which) = choice {
                self.mend(fault, which);
            }
        }
        let (plan, now) = (self.plan.clone(), self.now);
        for here in &mut self.instances {
            here.wall_ahead = 0;
            if !here.alive {
                here.start_again(false, &plan, now);
            }
        }
    }
}
