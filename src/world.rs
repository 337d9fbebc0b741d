//! A whole fleet in virtual time, for tests: the pure machines that the daemon and its guards run, and around them a
//! network, clocks, processes and a store's data that go wrong.
//!
//! [`World`] is a state, [`World::choices`] says what can happen next, and [`World::apply`] makes it happen. Nothing
//! in it is random and nothing waits, so that a list of choices always gives the same world. `explore` makes the
//! choices: it lets stateright try all of them, or draws them from a seed.
//!
//! [`World::work`] does at once whatever needs no choice: an instance never hesitates. Time stands still while
//! something can be delivered, and [`Choice::Time`] moves it to the next moment at which something is due.

pub(crate) mod cases;
mod choice;
mod explore;
mod instance;
mod judge;
mod server;

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{Hash, Hasher},
    path::Path,
    sync::Arc,
    time::Duration,
};

pub(crate) use self::choice::{Choice, Fault};
use self::{
    instance::Instance,
    judge::Truth,
    server::{Reply, Server},
};
use crate::{
    config,
    logic::{
        bent::{self, Rule},
        claim::{Question, Settle},
        guard_life::{self, Cause, Life, Stop},
    },
    model::{Boottime, JobName, Outcome, Run, RunId, job::Job},
};

/// Noon of a day, Unix ms: what the clocks show at the beginning.
const NOON: i64 = 1_795_348_800_000;
/// The beginning, on the hosts' monotonic clocks.
const BEGIN: Boottime = Boottime(3_600_000_000_000);
/// A request that was not answered for so long has failed, for its caller.
const TIMEOUT: Duration = Duration::from_millis(200);
/// A message that is slow takes so long: its caller has given it up by then.
const SLOW: Duration = Duration::from_millis(900);
/// A settlement that failed is sent again after this.
const SETTLE_AGAIN: Duration = Duration::from_millis(300);

/// What a world begins with, and what may happen in it.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) jobs: Vec<Arc<Job>>,
    pub(crate) instances: usize,
    /// After this nothing goes wrong any more, and what was begun has to come to an end.
    pub(crate) lasts: Duration,
    /// Time moves in steps of this.
    pub(crate) grid: Duration,
    /// How often each fault may happen, and how many of them together.
    pub(crate) faults: BTreeMap<Fault, u8>,
    pub(crate) most: u8,
    /// Whether messages arrive in every order, or what the store sends in the order in which it sends it.
    pub(crate) all_orders: bool,
    /// A rule that is taken out.
    pub(crate) bent: Option<Rule>,
}

impl Plan {
    /// `jobs`: lines of each job's definition.
    pub(crate) fn new(name: &'static str, jobs: &[&str], instances: usize) -> Self {
        let job = |(i, lines): (usize, &&str)| {
            let text = format!(
                "store.url = \"memory:\"\nstore.timeout = \"200ms\"\n[jobs.j{i}]\ncommand = [\"true\"]\nschedule = \"@every 2s\"\nlease = \"1500ms\"\n{lines}\n"
            );
            let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None);
            let config = config.unwrap_or_else(|e| panic!("{e}"));
            config.jobs.values().next().expect("a job").clone()
        };
        Self {
            name,
            jobs: jobs.iter().enumerate().map(job).collect(),
            instances,
            lasts: Duration::from_secs(5),
            grid: Duration::from_millis(100),
            faults: BTreeMap::new(),
            most: 0,
            all_orders: false,
            bent: None,
        }
    }

    pub(crate) fn with(mut self, most: u8, faults: &[Fault]) -> Self {
        self.faults = faults.iter().map(|f| (*f, most)).collect();
        self.most = most;
        self
    }

    pub(crate) fn lasting(mut self, lasts: Duration) -> Self {
        self.lasts = lasts;
        self
    }

    fn job(&self, name: &JobName) -> &Arc<Job> {
        let job = self.jobs.iter().find(|j| j.name == *name);
        job.expect("a job of the plan")
    }
}

/// See the head of this file.
#[derive(Clone)]
pub(crate) struct World {
    plan: Arc<Plan>,
    now: Boottime,
    server: Server,
    instances: Vec<Instance>,
    commands: Vec<Command>,
    /// What killed instances had claimed and not started: each until it is said.
    wills: Vec<Willed>,
    mail: Vec<Message>,
    /// Of each fault, how often it may happen still.
    left: BTreeMap<Fault, u8>,
    most: u8,
    /// Counts what people did, for the keys of their triggers.
    people: u32,
    truth: Truth,
    /// Nothing goes wrong any more.
    calm: bool,
    over: bool,
    /// Messages that have arrived at this moment.
    deliveries: u32,
    /// The promise that was broken, and how.
    pub(crate) broken: Option<String>,
    /// What has happened that not every world has.
    pub(crate) reached: BTreeSet<&'static str>,
    /// What happened, line by line; None: nobody reads it.
    pub(crate) story: Option<Vec<String>>,
}

/// Who has sent a message, and waits for its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sender {
    /// An instance, in its nth process.
    Instance(usize, u32),
    /// The guard of a run whose daemon is gone.
    Guard(RunId),
}

/// Something on its way.
#[derive(Debug, Clone)]
struct Message {
    id: u32,
    from: Sender,
    sent: Boottime,
    /// Not before.
    arrives: Boottime,
    slow: bool,
    body: Body,
}

#[derive(Debug, Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "few are on their way at one time"
)]
enum Body {
    /// With the time that its sender believes, Unix µs.
    Request(Question, Option<i64>),
    Reply(Reply),
    /// A guard is about to execute the command of this run.
    Exec(RunId),
}

/// A command with its guard. Both outlive their daemon.
#[derive(Debug, Clone)]
struct Command {
    job: JobName,
    run: Run,
    /// Of the instance that started it, and which of its processes.
    of: (usize, u32),
    life: Life,
    state: CommandState,
    /// How long the command runs, how it ends then, and whether it ignores SIGTERM.
    lasts: Duration,
    fails: bool,
    stubborn: bool,
    /// What its daemon believed of the store's clock: Unix µs minus the host's monotonic time.
    offset_us: i64,
    executed: bool,
    /// Of a guard whose daemon is gone: what it tells the store, and when.
    settle: Option<Settling>,
}

/// See [`crate::last_will`].
#[derive(Debug, Clone)]
struct Willed {
    job: JobName,
    run: RunId,
    of: (usize, u32),
    offset_us: i64,
    /// Until when it is looked for in the store.
    until: Boottime,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CommandState {
    Starting,
    Runs { ends_at: Boottime },
    Gone(Outcome, Option<Cause>, Boottime),
}

/// A settlement that has to be told.
#[derive(Debug, Clone)]
struct Settling {
    settle: Settle,
    /// The request under way, and until when it is waited for.
    asked: Option<(u32, Boottime)>,
    again_at: Boottime,
    /// Until when it is tried.
    until: Boottime,
    failures: u32,
}

/// The true time at a moment, Unix ms.
fn ms_at(at: Boottime) -> i64 {
    NOON + ((at.0 - BEGIN.0) / 1_000_000) as i64
}

impl World {
    pub(crate) fn new(plan: Arc<Plan>) -> Self {
        let mut world = Self {
            now: BEGIN,
            server: Server::new(),
            instances: (0..plan.instances)
                .map(|i| Instance::new(i, &plan))
                .collect(),
            commands: vec![],
            wills: vec![],
            mail: vec![],
            left: plan.faults.clone(),
            most: plan.most,
            people: 0,
            truth: Truth::default(),
            calm: false,
            over: false,
            deliveries: 0,
            broken: None,
            reached: BTreeSet::new(),
            story: None,
            plan,
        };
        world.guarded(Self::warm_up);
        world
    }

    /// Until the fleet has taken the store over, and the first occurrences have run: without a fault.
    fn warm_up(&mut self) {
        let start = BEGIN + Duration::from_secs(5);
        self.work();
        while self.now < start && self.broken.is_none() {
            let choices = self.deliveries();
            self.carry_out(choices.first().copied().unwrap_or(Choice::Time));
        }
    }

    /// Makes `choice` happen, and all that follows from it at once.
    pub(crate) fn apply(&mut self, choice: Choice) {
        if self.broken.is_none() {
            self.guarded(|world| world.carry_out(choice));
        }
    }

    fn guarded(&mut self, f: impl FnOnce(&mut Self)) {
        let bent = self.plan.bent;
        bent::while_out(bent, || f(self));
    }

    /// Unix ms: the truth, which good clocks show.
    fn ms(&self) -> i64 {
        ms_at(self.now)
    }
    /// What the store's clock shows, Unix µs.
    fn store_us(&self) -> i64 {
        self.ms() * 1000 + self.server.ahead_us
    }

    fn say(&mut self, line: impl FnOnce(&Self) -> String) {
        let Some(mut story) = self.story.take() else {
            return;
        };
        let at = Duration::from_nanos(self.now.0 - BEGIN.0).as_secs_f64();
        story.push(format!("{at:7.2} s  {}", line(self)));
        self.story = Some(story);
    }

    fn breaks(&mut self, promise: &str, how: &str) {
        self.say(|_| format!("BROKEN: {promise}: {how}"));
        self.broken
            .get_or_insert_with(|| format!("{promise}: {how}"));
    }

    fn send(&mut self, from: Sender, body: Body) -> u32 {
        let id = match from {
            Sender::Instance(i, _) => {
                self.instances[i].messages += 1;
                self.instances[i].messages << 4 | i as u32
            }
            // One request at a time.
            Sender::Guard(_) => u32::MAX,
        };
        self.mail.push(Message {
            id,
            from,
            sent: self.now,
            arrives: self.now,
            slow: false,
            body,
        });
        id
    }

    /// Whether a message can arrive: its way is open, and nobody is dead or stopped at its end.
    fn can_arrive(&self, m: &Message) -> bool {
        match (&m.body, m.from) {
            (Body::Request(..), _) => true,
            (Body::Reply(..), Sender::Instance(i, _)) => !self.instances[i].frozen,
            (Body::Reply(..), Sender::Guard(_)) | (Body::Exec(_), _) => true,
        }
    }

    fn deliver(&mut self, at: usize) {
        let m = self.mail.remove(at);
        match m.body {
            Body::Request(request, believed) => {
                self.at_server(m.id, m.from, m.sent, request, believed)
            }
            Body::Reply(reply) => match m.from {
                Sender::Instance(i, generation) => {
                    let here = &self.instances[i];
                    if here.alive && here.generation == generation && !here.cut {
                        self.answered(i, m.id, m.sent, reply);
                    }
                }
                Sender::Guard(run) => self.guard_answered(run),
            },
            Body::Exec(run) => self.exec(run),
        }
    }

    fn at_server(
        &mut self,
        id: u32,
        from: Sender,
        sent: Boottime,
        request: Question,
        believed: Option<i64>,
    ) {
        let cut = match from {
            Sender::Instance(i, _) => self.instances[i].cut,
            Sender::Guard(_) => false,
        };
        if cut || !self.server.up {
            return;
        }
        let body = Body::Reply(self.serve(request, believed));
        self.mail.push(Message {
            id,
            from,
            sent,
            arrives: self.now,
            slow: false,
            body,
        });
    }

    /// All that happens at this moment without a choice.
    fn work(&mut self) {
        for _ in 0..1000 {
            let mut busy = false;
            for i in 0..self.instances.len() {
                busy |= self.work_of(i);
            }
            // A guard that is done leaves the list.
            let mut c = 0;
            while c < self.commands.len() {
                busy |= self.guard(c);
                c += 1;
            }
            busy |= self.execute_wills();
            if !busy {
                return;
            }
        }
        self.breaks(
            "nothing spins",
            "an instance is busy for ever at one moment",
        );
    }

    // ---- commands and their guards ----

    fn command(&mut self, run: RunId) -> Option<&mut Command> {
        self.commands.iter_mut().find(|c| c.run.id == run)
    }

    /// A guard executes its command, unless something has ended the start.
    fn exec(&mut self, run: RunId) {
        let now = self.now;
        let Some(command) = self.command(run) else {
            return;
        };
        if command.state != CommandState::Starting {
            return;
        }
        let step = command.life.on_time(now);
        if step == guard_life::Step::Kill || command.life.killing() {
            self.command_gone(run, None);
            return;
        }
        command.life.on_started();
        command.executed = true;
        command.state = CommandState::Runs {
            ends_at: now + command.lasts,
        };
        self.started(run);
    }

    /// What a guard does by itself. True: something has changed.
    fn guard(&mut self, c: usize) -> bool {
        let (now, command) = (self.now, &mut self.commands[c]);
        let run = command.run.id;
        match command.state {
            CommandState::Gone(..) => self.guard_settles(c),
            CommandState::Starting => {
                let step = command.life.on_time(now);
                self.step(run, step)
            }
            CommandState::Runs { ends_at } => {
                let step = command.life.on_time(now);
                if self.step(run, step) {
                    return true;
                }
                if now < ends_at {
                    return false;
                }
                let command = &mut self.commands[c];
                let code = i32::from(command.fails);
                let _ = command.life.on_command_end(now, false);
                self.command_gone(run, Some(code));
                true
            }
        }
    }

    /// Does to a command what its guard's life says. True: it is gone.
    fn step(&mut self, run: RunId, step: guard_life::Step) -> bool {
        let Some(command) = self.command(run) else {
            return false;
        };
        let gone = match (step, command.state) {
            (_, CommandState::Gone(..)) | (guard_life::Step::Nothing, _) => false,
            (guard_life::Step::Terminate, _) => !command.stubborn,
            (guard_life::Step::Kill, _) => true,
        };
        if gone {
            self.command_gone(run, None);
        }
        gone
    }

    fn command_gone(&mut self, run: RunId, code: Option<i32>) {
        let (now, ms) = (self.now, self.ms());
        let Some(command) = self.command(run) else {
            return;
        };
        let cause = command.life.cause();
        let outcome = guard_life::outcome(cause, code, &[0]);
        command.state = CommandState::Gone(outcome, cause, now);
        self.truth.ended(run, ms);
        self.say(|_| format!("the command of run {} is gone: {outcome}", short(run)));
    }

    /// The daemon tells the guard of a run to stop it.
    fn stop_command(&mut self, run: RunId, stop: Stop, grace: Option<Duration>) {
        let now = self.now;
        if let Some(command) = self.command(run) {
            let step = command.life.on_stop(now, stop, grace);
            self.step(run, step);
        }
    }

    /// The guards of this process have lost their daemon.
    fn daemon_gone(&mut self, i: usize) {
        let (now, of) = (self.now, (i, self.instances[i].generation));
        for c in 0..self.commands.len() {
            if self.commands[c].of != of {
                continue;
            }
            let run = self.commands[c].run.id;
            if !matches!(self.commands[c].state, CommandState::Gone(..)) {
                let step = self.commands[c].life.on_daemon_gone(now);
                self.step(run, step);
            }
        }
    }
}

/// The end of an id, which tells the runs of one world apart.
fn short(run: RunId) -> String {
    let n = run.0.as_u128();
    format!("i{}.{}.{}", n >> 64, n >> 32 & 0xffff_ffff, n & 0xffff_ffff)
}

/// Feeds what `Debug` shows to a hasher: the machines have no other common form.
struct Digest<'h, H>(&'h mut H);

impl<H: Hasher> std::fmt::Write for Digest<'_, H> {
    fn write_str(&mut self, s: &str) -> std::fmt::Result {
        self.0.write(s.as_bytes());
        Ok(())
    }
}

impl World {
    fn shown(&self, out: &mut impl std::fmt::Write) -> std::fmt::Result {
        let Self {
            plan: _,
            now,
            server,
            instances,
            commands,
            wills,
            mail,
            left,
            most,
            people,
            truth,
            calm,
            over,
            deliveries: _,
            broken,
            reached: _,
            story: _,
        } = self;
        write!(
            out,
            "{now:?}{server:?}{commands:?}{wills:?}{mail:?}{left:?}{most}{people}{truth:?}{calm}{over}{broken:?}"
        )?;
        instances.iter().try_for_each(|i| i.shown(out))
    }
}

impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let _ = self.shown(&mut Digest(state));
    }
}

impl PartialEq for World {
    fn eq(&self, other: &Self) -> bool {
        let show = |w: &Self| {
            let mut text = String::new();
            let _ = w.shown(&mut text);
            text
        };
        show(self) == show(other)
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = Duration::from_nanos(self.now.0 - BEGIN.0);
        write!(f, "{} after {at:?}", self.plan.name)?;
        self.broken
            .as_ref()
            .map_or(Ok(()), |b| write!(f, ", broken: {b}"))
    }
}
