//! The fleet, what goes wrong with it, and what must hold all the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

use serde::{Deserialize, Serialize};

use super::{
    host::{self, EPOCH_US, Host},
    network::{LEAST, Net},
    server::Server,
};
use crate::{
    clock::Boottime,
    config::{self, Config},
    daemon::Daemon,
    last_will::{self, Destination, LastWill},
    logic::{
        claim::{Control, Controlled},
        schedule::next_of,
    },
    model::{InstanceId, JobName, Occurrence, RunRecord},
    runner::{Behaviour, Guards, Runner},
    settle, store,
};

const JOBS: &str = r#"
[store]
url = "redis://server:6379"

[defaults]
lease = "2s"
grace = "300ms"
command = ["true"]

[jobs.quick]
schedule = "@every 1s"

[jobs.queues]
schedule = "@every 2s"
overlap = "queue"
catch_up = "all"
on_crash = "rerun"
max_attempts = 9

[jobs.skips]
schedule = "@every 3s"
overlap = "skip"

[jobs.retries]
schedule = "@every 4s"
retry = { attempts = 2, interval = "300ms" }

[jobs.replaces]
schedule = "@every 5s"
overlap = "replace"

[jobs.hand]
overlap = "queue"
"#;

const SCHEDULED: [&str; 5] = ["quick", "queues", "skips", "retries", "replaces"];

/// The jobs that people pause.
const PAUSED: [&str; 3] = ["quick", "queues", "skips"];

const SECOND: u64 = 1_000_000_000;
/// What ended so shortly before the end of the simulation need not be settled yet, ns.
const SETTLING: u64 = SECOND;
const MS: u64 = 1_000_000;

/// What decides all that happens.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Options {
    pub(super) seed: u64,
    pub(super) hosts: usize,
    /// How long things go wrong, s.
    pub(super) stormy: u64,
    /// How long all is well after that, s.
    pub(super) calm: u64,
    /// The faults that do not strike.
    pub(super) without: BTreeSet<usize>,
}

/// What came of it.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Outcome {
    pub(super) trace: String,
    pub(super) broken: Vec<String>,
    pub(super) faults: usize,
    /// The faults have numbers below this.
    pub(super) last_fault: usize,
    pub(super) starts: usize,
    /// Jobs that somebody had to rewind.
    pub(super) rewound: usize,
    pub(super) questions: u64,
}

struct Instance {
    daemons: Host,
    guards: Host,
    daemon: Option<Daemon>,
    name: String,
    start_at: Option<u64>,
}

type Undo = Box<dyn FnOnce(&mut Fleet)>;

struct Fleet {
    rng: fastrand::Rng,
    now: u64,
    net: Arc<Mutex<Net>>,
    guards: Arc<Mutex<Guards>>,
    server: Server,
    instances: Vec<Instance>,
    config: Config,
    trace: String,
    /// What ends a fault, and when.
    undo: Vec<(u64, String, Undo)>,
    operator: Host,
    /// Keys of triggers that people gave.
    keys: usize,
    lost_at: Vec<u64>,
    /// The server's clock was wrong until then.
    clock_right_since: u64,
    /// An instance started when the server's clock was wrong, and not enough hosts could contradict it.
    misled: bool,
    /// When somebody rewound each of these jobs.
    rewound: Arc<Mutex<BTreeMap<&'static str, u64>>>,
}

// Long: everything is made once, in order.
pub(super) fn run(options: &Options) -> Outcome {
    let seed = options.seed;
    host::seed(seed);
    let mut rng = fastrand::Rng::with_seed(seed);
    let net = Arc::new(Mutex::new(Net::new(options.hosts + 1, rng.u64(..))));
    let guards = Arc::new(Mutex::new(Guards::default()));
    let mut of_commands = fastrand::Rng::with_seed(rng.u64(..));
    guards.lock().behave = Some(Box::new(move |_| Behaviour {
        start: Duration::from_millis(of_commands.u64(1..60)),
        lasts: Duration::from_millis(match of_commands.u8(..) {
            0..30 => of_commands.u64(2000..6000),
            _ => of_commands.u64(1..600),
        }),
        fails: of_commands.u8(..) < 40,
        stubborn: of_commands.u8(..) < 60,
    }));
    let config = config::parse(JOBS, Path::new("/jobs.toml"), &|_| None).expect("a configuration");
    let server = Server::new(&net);
    let instances = (0..options.hosts).map(|n| {
        let rate = 0.996 + rng.f64() * 0.008;
        Instance {
            daemons: Host::new(n, rate, &net, &guards),
            guards: Host::new(n, rate, &net, &guards),
            daemon: None,
            name: format!("i{n}"),
            start_at: Some(0),
        }
    });
    let instances = instances.collect();
    let mut fleet = Fleet {
        operator: Host::new(options.hosts, 1.0, &net, &guards),
        rng,
        now: 0,
        net,
        guards,
        server,
        instances,
        config,
        trace: String::new(),
        undo: vec![],
        keys: 0,
        lost_at: vec![],
        clock_right_since: 0,
        misled: false,
        rewound: Arc::default(),
    };
    let mut outcome = Outcome::default();
    let mut next_fault = 6 * SECOND;
    let storm = options.stormy * SECOND;
    let mut number = 0;
    while fleet.now < storm {
        fleet.step();
        if fleet.now >= next_fault {
            // Each fault has a source of its own, so that the others stay as they are without it.
            let mut source = fastrand::Rng::with_seed(fleet.rng.u64(..));
            next_fault = fleet.now + fleet.rng.u64(100..4000) * MS;
            if !options.without.contains(&number) {
                std::mem::swap(&mut fleet.rng, &mut source);
                fleet.fault(number);
                std::mem::swap(&mut fleet.rng, &mut source);
                outcome.faults += 1;
            }
            number += 1;
        }
    }
    outcome.last_fault = number;
    fleet.undo_all();
    let end = storm + options.calm * SECOND;
    let mut resume_at = storm + 2 * SECOND;
    while fleet.now < end {
        fleet.step();
        // A pause that was ended right before a loss of data may be told again (docs/guarantees.md).
        if fleet.now >= resume_at {
            PAUSED
                .iter()
                .for_each(|job| fleet.ask(job, Control::Resume));
            if fleet.misled {
                SCHEDULED.iter().for_each(|job| fleet.rewind(job));
            }
            resume_at += 5 * SECOND;
        }
    }
    fleet.judge(&mut outcome);
    outcome.questions = fleet.server.questions;
    for i in 0..fleet.instances.len() {
        fleet.kill(i);
    }
    outcome.trace = fleet.trace;
    outcome
}

impl Fleet {
    fn say(&mut self, text: &str) {
        self.trace += &format!("{:9.3} {text}\n", self.now as f64 / 1e9);
    }

    fn start(&mut self, i: usize) {
        self.misled |= self.server.ahead_us != 0 && self.right(i) < 2;
        let (now, config) = (self.now, self.config.clone());
        let instance = &mut self.instances[i];
        let name = instance.name.clone();
        let daemon = instance.daemons.run(now, async {
            let store = store::open(&config.store).expect("a store");
            let who = (InstanceId::new(&name), name.clone());
            let destination = Destination {
                store: config.store.clone(),
            };
            let will = LastWill::new(&destination).expect("memory");
            let runner = Runner::simulated().leaving(Some(will));
            let parts = (store, runner);
            Daemon::assemble("/jobs.toml".into(), config, who, parts).expect("a daemon")
        });
        instance.daemon = Some(daemon);
    }

    /// How many hosts know the time and can say so when `i` starts, itself among them.
    fn right(&self, i: usize) -> usize {
        let net = self.net.lock();
        let all = self.instances.iter().enumerate();
        let right = all.filter(|(n, instance)| {
            let host = &instance.daemons;
            let heard = instance.daemon.is_some()
                && host.stopped_until <= self.now
                && !net.cut[*n]
                && net.slow[*n] == 0;
            host.wall_ahead_us == 0 && (heard || *n == i)
        });
        right.count()
    }

    fn kill(&mut self, i: usize) {
        let now = self.now;
        let instance = &mut self.instances[i];
        let daemon = instance.daemon.take();
        // Read before anything is dropped: a killed process drops nothing.
        let will = daemon.as_ref().and_then(Daemon::last_will);
        instance.daemons.kill(now, daemon);
        instance.daemons.stopped_until = 0;
        if let Some(will) = will {
            instance.guards.spawn(last_will::settle::simulated(will));
        }
    }

    fn step(&mut self) {
        let (from, until) = (self.now, self.now + LEAST);
        let due = |at: &u64| *at <= from;
        while let Some(n) = self.undo.iter().position(|(at, ..)| due(at)) {
            let (_, what, undo) = self.undo.remove(n);
            undo(self);
            self.say(&format!("over: {what}"));
        }
        for i in 0..self.instances.len() {
            if self.instances[i].start_at.as_ref().is_some_and(due) {
                self.instances[i].start_at = None;
                self.start(i);
                self.say(&format!("i{i} starts"));
            }
        }
        for instance in &mut self.instances {
            instance.daemons.step(from, until);
            instance.guards.step(from, until);
        }
        self.operator.step(from, until);
        self.now = until;
        self.step_guards();
        self.server.step(until);
        self.net.lock().arrive_at_hosts(until);
    }

    fn step_guards(&mut self) {
        let now = self.now;
        let mut guards = self.guards.lock();
        let known = guards.seen.len();
        for instance in &self.instances {
            let host = &instance.daemons;
            let wall = EPOCH_US + host.wall_ahead_us + (now / 1000) as i64;
            guards.step(host.number, now, Boottime(host.boot_at(now)), wall);
        }
        let news: Vec<_> = guards.seen[known..].to_vec();
        let to_settle = std::mem::take(&mut guards.to_settle);
        drop(guards);
        for seen in news {
            let r = &seen.record;
            let what = match seen.ended {
                None => "starts".to_owned(),
                Some(outcome) => format!("ends: {outcome}"),
            };
            self.say(&format!(
                "i{} {} {} attempt {} {what}",
                seen.host, r.job, r.occurrence, r.attempt
            ));
        }
        for (host, handed) in to_settle {
            self.say(&format!("i{host} a guard settles"));
            self.instances[host].guards.spawn(settle::simulated(handed));
        }
    }

    fn later(&mut self, from_ms: u64, to_ms: u64) -> u64 {
        let share = self.rng.f64();
        let ms = from_ms + ((to_ms - from_ms) as f64 * share * share) as u64;
        self.now + ms * MS
    }

    fn undo_at(&mut self, at: u64, what: &str, undo: impl FnOnce(&mut Self) + 'static) {
        self.undo.push((at, what.to_owned(), Box::new(undo)));
    }

    fn undo_all(&mut self) {
        for (_, what, undo) in std::mem::take(&mut self.undo) {
            undo(self);
            self.say(&format!("over: {what}"));
        }
        let now = self.now;
        for instance in &mut self.instances {
            instance.start_at = instance.start_at.map(|at| at.min(now));
            instance.daemons.stopped_until = instance.daemons.stopped_until.min(now);
        }
        self.say("the end of all faults");
    }

    /// What somebody asks of the fleet.
    fn ask(&mut self, job: &'static str, what: Control) {
        let (now, config) = (self.now, self.config.store.clone());
        self.operator.run(now, async {
            tokio::spawn(async move {
                let Ok(store) = store::open(&config) else {
                    return;
                };
                while store.control(&JobName::new(job), &what).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                }
            });
        });
    }

    /// What `soloist rewind` does, for a job that counts the future as decided.
    fn rewind(&mut self, job: &'static str) {
        let (now, config) = (self.now, self.config.store.clone());
        let rewound = self.rewound.clone();
        self.operator.run(now, async {
            tokio::spawn(async move {
                let (name, store) = (JobName::new(job), store::open(&config).expect("a store"));
                let history = store.history(&name, store::HISTORY_KEPT).await.ok()?;
                let clock = store.observe(&[]).await.ok()?.now_us / 1000;
                let ran = history.iter().filter(|r| r.run_id.is_some());
                let ran = ran.map(|r| r.occurrence).filter(|at| at.0 > clock);
                let what = Control::Rewind { ran: ran.collect() };
                let done = store.control(&name, &what).await.ok()?.value;
                if done == Controlled::Done {
                    rewound.lock().entry(job).or_insert(now);
                }
                Some(())
            });
        });
    }

    // Long: one arm for each fault.
    fn fault(&mut self, number: usize) {
        let i = self.rng.usize(..self.instances.len());
        let what = match self.rng.u8(..17) {
            0 | 1 => {
                let at = self.later(50, 8000);
                if self.instances[i].daemon.is_some() {
                    self.kill(i);
                    self.instances[i].start_at = Some(at);
                }
                format!("i{i} is killed")
            }
            2 | 3 => {
                let until = self.later(100, 9000);
                self.instances[i].daemons.stopped_until = until;
                format!("i{i} is stopped")
            }
            4 | 5 => {
                self.net.lock().cut[i] = true;
                let until = self.later(100, 12_000);
                self.undo_at(until, &format!("i{i} is cut off"), move |f| {
                    f.net.lock().cut[i] = false
                });
                format!("i{i} is cut off")
            }
            6 => {
                self.net.lock().slow[i] = self.rng.u64(50..1500) * MS;
                let until = self.later(500, 12_000);
                self.undo_at(until, &format!("i{i} is slow"), move |f| {
                    f.net.lock().slow[i] = 0
                });
                format!("i{i} is slow")
            }
            7 => {
                self.net.lock().reset(Some(i));
                format!("the connections of i{i} are reset")
            }
            8 => {
                let mut net = self.net.lock();
                net.up = false;
                net.reset(None);
                drop(net);
                let until = self.later(100, 8000);
                self.undo_at(until, "the server is away", |f| f.net.lock().up = true);
                "the server is away".to_owned()
            }
            9 => {
                self.server.restart();
                self.lost_at.push(self.now);
                "the server starts again".to_owned()
            }
            10 => {
                self.server.flush();
                self.server.restart();
                self.lost_at.push(self.now);
                "the server loses its data".to_owned()
            }
            11 => {
                let copy = self.server.copy();
                let at = self.later(200, 5000);
                self.undo_at(at, "the server has an older copy", move |f| {
                    f.server.roll_back(&copy);
                    let now = f.now;
                    f.lost_at.push(now);
                });
                "a copy is made of the server's data".to_owned()
            }
            12 => {
                self.server.forget_scripts();
                "the server forgets the scripts".to_owned()
            }
            13 => {
                let by = [700_000, 5_000_000, 3_600_000_000][self.rng.usize(..3)];
                self.server.ahead_us = by;
                let until = self.later(200, 10_000);
                self.clock_right_since = u64::MAX;
                self.undo_at(until, "the server's clock is wrong", |f| {
                    f.server.ahead_us = 0;
                    f.clock_right_since = f.now;
                });
                format!("the server's clock is {} s ahead", by as f64 / 1e6)
            }
            14 => {
                self.keys += 1;
                let key = format!("k{}", self.keys);
                let what = format!("somebody triggers hand with {key}");
                self.ask("hand", Control::Trigger { key });
                what
            }
            15 => {
                let job = PAUSED[self.rng.usize(..PAUSED.len())];
                let pause = Control::Pause {
                    until: None,
                    reason: None,
                };
                self.ask(job, pause);
                let until = self.later(500, 9000);
                self.undo_at(until, &format!("{job} is paused"), move |f| {
                    f.ask(job, Control::Resume)
                });
                format!("{job} is paused")
            }
            _ => {
                let by = self.rng.i64(-3_600_000_000..3_600_000_000);
                self.instances[i].daemons.wall_ahead_us = by;
                self.instances[i].guards.wall_ahead_us = by;
                format!("the wall clock of i{i} is {} s ahead", by / 1_000_000)
            }
        };
        self.say(&format!("fault {number}: {what}"));
    }

    /// What must hold, of all that was seen.
    // Long: one look at each start, for each promise.
    fn judge(&mut self, outcome: &mut Outcome) {
        let seen = std::mem::take(&mut self.guards.lock().seen);
        let mut attempts = BTreeSet::new();
        let mut occurrences: BTreeMap<(String, i64), u32> = BTreeMap::new();
        let mut alive: BTreeMap<String, String> = BTreeMap::new();
        let mut settling: BTreeSet<(String, i64, u32)> = BTreeSet::new();
        let mut newest: BTreeMap<String, (i64, u32)> = BTreeMap::new();
        // Of what was started when it was due.
        let mut timely: BTreeMap<String, (i64, u32)> = BTreeMap::new();
        let rewound = self.rewound.lock().clone();
        outcome.rewound = rewound.len();
        let mut last: BTreeMap<String, u64> = BTreeMap::new();
        let mut early: Vec<(String, i64)> = vec![];
        let broken = &mut outcome.broken;
        for s in &seen {
            let r: &RunRecord = &s.record;
            let job = r.job.as_str().to_owned();
            let at = s.world as f64 / 1e9;
            let name = format!(
                "{at:.3} {job} {} attempt {} on i{}",
                r.occurrence, r.attempt, s.host
            );
            if s.ended.is_some() {
                alive.retain(|_, run| *run != s.run.to_string());
                if s.world + SETTLING > self.now {
                    settling.insert((job, r.occurrence.0, r.attempt));
                }
                continue;
            }
            outcome.starts += 1;
            // A wrong clock may be believed for a while, by those who know no other. What ran before its time is
            // decided in the future, which nobody remembers after a loss.
            let is_early = r.occurrence.0 * 1000 > EPOCH_US + (s.world / 1000) as i64;
            let lost = self.lost_at.iter().any(|at| *at <= s.world);
            let forgotten = lost
                && early
                    .iter()
                    .any(|(of, at)| *of == job && *at >= r.occurrence.0);
            if is_early && self.clock_right_since != 0 {
                early.push((job.clone(), r.occurrence.0));
            } else if is_early {
                broken.push(format!("{name} starts before its time"));
            }
            last.insert(job.clone(), s.world);
            if !attempts.insert((job.clone(), r.occurrence.0, r.attempt)) && !forgotten {
                broken.push(format!("{name} starts twice"));
            }
            let before = occurrences.insert((job.clone(), r.occurrence.0), r.attempt);
            if before.is_some() && !forgotten && !["queues", "retries"].contains(&&*job) {
                broken.push(format!("{name}: the occurrence starts again"));
            }
            if let Some(run) = alive.insert(job.clone(), s.run.to_string()) {
                broken.push(format!("{name} starts while run {run} is alive"));
            }
            let token = (r.occurrence.0, r.attempt);
            // An attempt that is repeated after a loss may come after a newer occurrence (docs/faults.md).
            let repeated = r.attempt > 1 && lost || forgotten;
            // Nor does one that ran early count after somebody has rewound the job (docs/guarantees.md).
            let back = rewound.get(&*job).is_some_and(|at| *at <= s.world);
            let of = |map: &BTreeMap<String, (i64, u32)>| map.get(&job).copied();
            let before = if back { of(&timely) } else { of(&newest) };
            if let Some(greatest) = before.filter(|n| *n >= token && !repeated) {
                broken.push(format!("{name} starts after {greatest:?}"));
            }
            if !is_early {
                let most = token.max(of(&timely).unwrap_or_default());
                timely.insert(job.clone(), most);
            }
            let most = token.max(of(&newest).unwrap_or_default());
            newest.insert(job.clone(), most);
        }
        // What was decided in data that was lost has no outcome; nor is it known what a wrong clock decided.
        if self.lost_at.is_empty() && self.clock_right_since == 0 {
            for job in self.config.jobs.values() {
                let (mut decided, mut ended) = (BTreeSet::new(), BTreeSet::new());
                let period = next_of(&job.schedules, Occurrence(0)).map_or(0, |at| at.0);
                for r in self.server.history(&job.name) {
                    let count = i64::try_from(r.count).expect("a number");
                    decided.extend((0..count).map(|n| Occurrence(r.occurrence.0 - n * period)));
                    if r.outcome != crate::model::Outcome::Running {
                        ended.insert((r.occurrence.0, r.attempt));
                    }
                }
                let started = attempts.iter().filter(|(of, ..)| *of == job.name.as_str());
                let started: Vec<(i64, u32)> = started.map(|(_, at, n)| (*at, *n)).collect();
                for (at, n) in &started {
                    let alive = alive.contains_key(job.name.as_str());
                    let still = alive && newest[job.name.as_str()] == (*at, *n)
                        || settling.contains(&(job.name.to_string(), *at, *n));
                    if !still && !ended.contains(&(*at, *n)) {
                        broken.push(format!(
                            "{} {} attempt {n} has no outcome",
                            job.name,
                            Occurrence(*at)
                        ));
                    }
                }
                let Some((first, _)) = started.first() else {
                    continue;
                };
                let last = (EPOCH_US + (self.now / 1000) as i64) / 1000 - 12_000;
                let mut at = Occurrence(*first);
                while let Some(next) = next_of(&job.schedules, at).filter(|next| next.0 <= last) {
                    at = next;
                    if !decided.contains(&at) && !started.iter().any(|(of, _)| *of == at.0) {
                        broken.push(format!("{} {at} has no outcome", job.name));
                    }
                }
            }
        }
        let hand = attempts.iter().filter(|(job, ..)| job == "hand").count();
        if hand > self.keys {
            broken.push(format!("hand starts {hand} times for {} keys", self.keys));
        }
        for job in self.config.jobs.keys().filter(|job| job.as_str() != "hand") {
            let silent = self.now - last.get(job.as_str()).copied().unwrap_or(0);
            if silent > 12 * SECOND {
                broken.push(format!(
                    "{job} does not run: {} s without a start",
                    silent / SECOND
                ));
            }
        }
    }
}
