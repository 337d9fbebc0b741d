//! The fleet, what goes wrong with it, and what must hold all the same.

use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};

use parking_lot::Mutex;

use serde::{Deserialize, Serialize};

use super::{
    host::{self, EPOCH_US, Host},
    judge::Story,
    network::{LEAST, Net},
    server::Server,
};
use crate::{
    clock::Boottime,
    config::{self, Config},
    daemon::Daemon,
    last_will::{self, Destination, LastWill},
    logic::claim::{Control, Controlled},
    model::{InstanceId, JobName},
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
    /// What is judged at the end.
    story: Arc<Mutex<Story>>,
    /// An instance started when the server's clock was wrong, and not enough hosts could contradict it.
    misled: bool,
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
        story: Arc::default(),
        misled: false,
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
    fleet.judged(&mut outcome);
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
        let mut story = self.story.lock();
        let died = story.deaths.iter_mut().rfind(|(host, ..)| *host == i);
        if let Some((_, _, next)) = died {
            *next = Some(now);
        }
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
        if daemon.is_some() {
            self.story.lock().deaths.push((i, now, None));
        }
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
        let story = self.story.clone();
        if what == Control::Resume {
            story.lock().resumes.push((job, now));
        }
        self.operator.run(now, async {
            tokio::spawn(async move {
                let Ok(store) = store::open(&config) else {
                    return;
                };
                while store.control(&JobName::new(job), &what).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                }
                if matches!(what, Control::Pause { .. }) {
                    let confirmed = host::world_now();
                    story.lock().pauses.push((job, now, confirmed));
                }
            });
        });
    }

    /// What `soloist rewind` does, for a job that counts the future as decided.
    fn rewind(&mut self, job: &'static str) {
        let (now, config) = (self.now, self.config.store.clone());
        let story = self.story.clone();
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
                    story.lock().rewound.entry(job).or_insert(now);
                }
                Some(())
            });
        });
    }

    // Long: one arm for each fault.
    fn fault(&mut self, number: usize) {
        let i = self.rng.usize(..self.instances.len());
        let what = match self.rng.u8(..19) {
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
                self.lost(false);
                "the server starts again".to_owned()
            }
            10 => {
                self.server.flush();
                self.server.restart();
                self.lost(true);
                "the server loses its data".to_owned()
            }
            11 => {
                let copy = self.server.copy();
                let at = self.later(200, 5000);
                self.undo_at(at, "the server has an older copy", move |f| {
                    f.server.roll_back(&copy);
                    f.lost(true);
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
                self.story.lock().clock_right_since = u64::MAX;
                self.undo_at(until, "the server's clock is wrong", |f| {
                    f.server.ahead_us = 0;
                    f.story.lock().clock_right_since = f.now;
                });
                format!("the server's clock is {} s ahead", by as f64 / 1e6)
            }
            14 => {
                let keys = self.story.lock().keys + 1;
                self.story.lock().keys = keys;
                let key = format!("k{keys}");
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
            16 => {
                let job = SCHEDULED[self.rng.usize(..SCHEDULED.len())];
                self.ask(job, Control::Cancel);
                format!("{job} is cancelled")
            }
            17 => {
                for i in 0..self.instances.len() {
                    let at = self.later(500, 8000);
                    if self.instances[i].daemon.is_some() {
                        self.kill(i);
                        self.instances[i].start_at = Some(at);
                    }
                }
                "all are killed".to_owned()
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

    /// The server has started again; `data`: and lost some of what it had.
    fn lost(&mut self, data: bool) {
        let mut story = self.story.lock();
        story.lost_at.push(self.now);
        story.data_lost |= data;
    }

    fn judged(&mut self, outcome: &mut Outcome) {
        let mut story = std::mem::take(&mut *self.story.lock());
        story.now = self.now;
        story.seen = std::mem::take(&mut self.guards.lock().seen);
        let histories = self.config.jobs.keys();
        let histories = histories.map(|job| (job.to_string(), self.server.history(job)));
        story.histories = histories.collect();
        outcome.starts = story.seen.iter().filter(|s| s.ended.is_none()).count();
        outcome.rewound = story.rewound.len();
        outcome.broken = story.judge(&self.config);
    }
}
