//! The fleet on its stage: starts it, reads what its witnesses and its store say, begins faults and undoes them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Write as _,
    os::unix::{fs::FileExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use rustix::process::Signal;
use soloist::{clock::wall_us, model::RunRecord};

use super::{
    Options,
    cgroup::Cgroup,
    comings::Comings,
    disk::SmallDisk,
    effect::{Effect, Struck},
    jobs::{self, Planned, TRIGGERED},
    judge::{Evidence, MS, SECOND, Seen, Verdict, judge},
};
use crate::support::{
    fleet::{Fleet, fleet},
    process::{self, boottime_ns},
    server::RedisServer,
    trace::{Run, Trace},
    witness,
};

/// Of a record: job, occurrence, attempt, run, outcome.
type RecordName = (String, i64, u32, String, String);

/// What ends a fault.
pub type Undo = Box<dyn FnOnce(&mut Stage)>;

/// What follows a command; true: it succeeded.
type Then = Box<dyn FnOnce(&mut Stage, bool)>;

/// A fault that was begun.
pub struct Begun {
    pub effects: Vec<Effect>,
    /// For the log: whom it strikes.
    pub whom: String,
    pub lasts: Duration,
    /// What it keeps busy, if that is more than what it was given.
    pub keeps_busy: Vec<Busy>,
    pub undo: Undo,
}

impl Begun {
    /// One that is over at once.
    pub fn once(effect: Effect, whom: impl Into<String>) -> Self {
        Self {
            effects: vec![effect],
            whom: whom.into(),
            lasts: Duration::ZERO,
            keeps_busy: vec![],
            undo: Box::new(|_| {}),
        }
    }
}

struct Active {
    name: &'static str,
    until_ns: i64,
    undo: Undo,
    /// Where its effects are in `Stage::struck`.
    rows: Vec<usize>,
    /// What it keeps busy.
    busy: Vec<Busy>,
}

/// What at most one fault strikes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    Instance(usize),
    Server,
    Commands,
    File,
}

/// A command of soloist that is under way.
struct Operation {
    words: Vec<String>,
    child: Child,
    then: Then,
    until_ns: i64,
}

pub struct Stage {
    pub fleet: Fleet,
    pub rng: fastrand::Rng,
    pub size: usize,
    pub jobs: Vec<Planned>,
    /// Those that are in the files now, and enabled.
    present: BTreeSet<String>,
    comings: Comings,
    few_keys: BTreeMap<String, BTreeSet<String>>,
    /// The disks of the server, and of the instances' logs; None where we may not mount.
    pub server_disk: Option<SmallDisk>,
    pub logs_disk: Option<SmallDisk>,
    /// Of each instance: for freezing, and to count processes. None where we may not make any.
    pub cgroups: Vec<Option<Cgroup>>,
    pub pids: Vec<Option<Cgroup>>,
    /// Jobs that are to be paused now.
    pub pauses: BTreeSet<&'static str>,
    walls: Vec<PathBuf>,
    operator: PathBuf,
    log: File,
    begun_ns: i64,
    active: Vec<Active>,
    operations: Vec<Operation>,
    pub struck: Vec<Struck>,
    pub faults: BTreeMap<&'static str, usize>,
    trace: Trace,
    records: BTreeMap<RecordName, Seen>,
    decided: BTreeMap<String, i64>,
    keys: BTreeSet<String>,
    accepted: BTreeSet<String>,
    pulse: Pulse,
}

impl Stage {
    // Long: one field after the other.
    pub fn new(options: &Options, log: File) -> Self {
        let (size, seed) = (options.instances, options.seed);
        let jobs = match (options.bursts, options.come_and_go) {
            (Some(n), _) => jobs::that_start_at_once(n),
            (None, true) => jobs::that_come_and_go(),
            (None, false) => jobs::all(),
        };
        let (server_disk, logs_disk) = (SmallDisk::mount(64), SmallDisk::mount(128));
        let temp = std::env::temp_dir();
        let server = RedisServer::start_in(server_disk.as_ref().map_or(&temp, SmallDisk::path));
        let scratch = tempfile::tempdir().expect("a temporary directory").keep();
        let mut plan = fleet(size).proxied().on(server).drain("3s").default(
            "start_within",
            &format!("\"{}s\"", jobs::START_WITHIN_MS / 1000),
        );
        if let Some(disk) = &logs_disk {
            plan = plan.logs(disk.path());
        }
        let (mut cgroups, mut pids, mut walls) = (vec![], vec![], vec![]);
        for i in 0..size {
            let wall = scratch.join(format!("wall{}", i + 1));
            std::fs::write(&wall, 0i64.to_ne_bytes()).expect("write a clock");
            for (name, value) in witness::stepped(&wall) {
                plan = plan.env(i, name, &value);
            }
            walls.push(wall);
            for (all, made) in [
                (&mut cgroups, Cgroup::unified(i)),
                (&mut pids, Cgroup::pids(i)),
            ] {
                if let Some(made) = &made {
                    plan = plan.cgroup(i, made.path());
                }
                all.push(made);
            }
        }
        for job in &jobs {
            plan = plan.job(job.judged.name, &job.lines);
        }
        let present: BTreeSet<String> = jobs.iter().map(|j| j.judged.name.to_owned()).collect();
        let mut comings = Comings::new(size, present.clone());
        let begun_ns = boottime_ns();
        let fleet = plan.start();
        for i in 0..size {
            comings.starts(i, begun_ns);
        }
        let mut stage = Self {
            operator: scratch.join("operator.toml"),
            fleet,
            rng: fastrand::Rng::with_seed(seed),
            size,
            jobs,
            present,
            comings,
            few_keys: BTreeMap::new(),
            server_disk,
            logs_disk,
            cgroups,
            pids,
            pauses: BTreeSet::new(),
            walls,
            log,
            begun_ns: boottime_ns(),
            active: vec![],
            operations: vec![],
            struck: vec![],
            faults: BTreeMap::new(),
            trace: Trace::default(),
            records: BTreeMap::new(),
            decided: BTreeMap::new(),
            keys: BTreeSet::new(),
            accepted: BTreeSet::new(),
            pulse: Pulse::start(),
        };
        let text = stage.fleet.config_text(0);
        let (proxied, own) = (stage.fleet.proxies[0].url(), stage.fleet.server().url());
        let text = text.replace(&proxied, &own);
        std::fs::write(&stage.operator, text).expect("write a configuration");
        stage
    }

    /// Since the begin.
    pub fn elapsed(&self) -> Duration {
        let ns = boottime_ns() - self.begun_ns;
        Duration::from_nanos(u64::try_from(ns).unwrap_or(0))
    }

    pub fn say(&mut self, text: &str) {
        let at = self.elapsed().as_secs_f64();
        writeln!(self.log, "{at:9.3} {text}").expect("write the log");
    }

    // ---- faults ----

    pub fn is_busy(&self, what: Busy) -> bool {
        self.active.iter().any(|a| a.busy.contains(&what))
    }

    /// Instances that no fault strikes.
    pub fn free(&self) -> Vec<usize> {
        (0..self.size)
            .filter(|&i| !self.is_busy(Busy::Instance(i)))
            .collect()
    }

    pub fn active(&self) -> usize {
        self.active.len()
    }

    /// Notes an effect that begins now and lasts until [`Stage::over`].
    pub fn note(&mut self, name: &'static str, effect: Effect) -> usize {
        let now = boottime_ns();
        self.struck.push(Struck {
            name,
            effect,
            from_ns: now,
            done_ns: now,
            to_ns: i64::MAX,
        });
        self.struck.len() - 1
    }

    pub fn over(&mut self, row: usize) {
        self.struck[row].to_ns = boottime_ns();
    }

    /// Notes an effect that is over at once.
    pub fn note_once(&mut self, name: &'static str, effect: Effect) {
        let row = self.note(name, effect);
        self.over(row);
    }

    /// From now on the job may start again.
    pub fn end_pause(&mut self, job: &str) {
        let now = boottime_ns();
        let of =
            |s: &&mut Struck| matches!(&s.effect, Effect::Paused { job: paused } if paused == job);
        for struck in self.struck.iter_mut().filter(of) {
            struck.to_ns = now.min(struck.to_ns);
        }
    }

    /// `from_ns` is when the fault's function was called: its effects may have begun then.
    pub fn begin(&mut self, name: &'static str, begun: Begun, from_ns: i64) {
        *self.faults.entry(name).or_default() += 1;
        self.say(&format!(
            "{name}: {} for {:.1}s",
            begun.whom,
            begun.lasts.as_secs_f64()
        ));
        let rows = begun.effects.into_iter().map(|e| self.note(name, e));
        let rows: Vec<usize> = rows.collect();
        for &row in &rows {
            self.struck[row].from_ns = from_ns;
        }
        let lasts = i64::try_from(begun.lasts.as_nanos()).expect("a short time");
        self.active.push(Active {
            name,
            until_ns: boottime_ns() + lasts,
            undo: begun.undo,
            rows,
            busy: begun.keeps_busy,
        });
    }

    /// Undoes what has lasted long enough, or all.
    pub fn undo(&mut self, all: bool) {
        let now = boottime_ns();
        let mut left = vec![];
        let mut ended = vec![];
        for active in std::mem::take(&mut self.active) {
            if all || active.until_ns <= now {
                ended.push(active);
            } else {
                left.push(active);
            }
        }
        self.active = left;
        for active in ended {
            (active.undo)(self);
            self.say(&format!("{}: over", active.name));
            for row in active.rows {
                self.over(row);
            }
        }
    }

    /// A time from `from` to `to` ms, shorter ones more often.
    pub fn some_time(&mut self, from: u64, to: u64) -> Duration {
        let share = self.rng.f64();
        Duration::from_millis(from + ((to - from) as f64 * share * share) as u64)
    }

    pub fn start_instance(&mut self, i: usize) {
        if !self.fleet.instances[i].runs() {
            self.comings.starts(i, boottime_ns());
            self.fleet.instances[i].start();
            self.note_once("start", Effect::Started { instance: i });
        }
    }

    // ---- files ----

    /// Takes effect with [`Stage::write_configs`].
    pub fn set_job(&mut self, name: &str, lines: Option<&str>, present: bool) {
        self.fleet.set_job(name, lines);
        match present {
            true => self.present.insert(name.to_owned()),
            false => self.present.remove(name),
        };
    }

    /// Writes the files of all instances. Some are told at once, the others within two seconds.
    pub fn write_configs(&mut self) {
        let after: Vec<i64> = (0..self.size)
            .map(|_| match self.rng.bool() {
                true => 0,
                false => self.rng.i64(0..2000) * MS,
            })
            .collect();
        // Whoever starts meanwhile may read either file.
        let present = self.present.clone();
        self.comings.written(present, boottime_ns(), |i| after[i]);
        for i in 0..self.size {
            self.fleet.write_config(i);
        }
    }

    /// SIGHUP to those whose time has come, if they are ready for it; and a look at who has read its file.
    fn tell_of_files(&mut self) {
        for i in 0..self.size {
            if !self.fleet.instances[i].runs() {
                self.comings.ends(i, boottime_ns());
            }
        }
        for i in self.comings.to_be_told(boottime_ns()) {
            let instance = &self.fleet.instances[i];
            if process::catches(instance.pid(), Signal::HUP) {
                let log = std::fs::metadata(&instance.log).map_or(0, |file| file.len());
                self.comings.told(i, boottime_ns(), log);
                instance.signal(Signal::HUP);
            }
        }
        let instances = &self.fleet.instances;
        self.comings.look(|i| &instances[i].log);
    }

    pub fn set_wall(&mut self, i: usize, us: i64) {
        let file = File::options().write(true).open(&self.walls[i]);
        file.and_then(|f| f.write_all_at(&us.to_ne_bytes(), 0))
            .expect("write a clock");
    }

    /// Commands that run, of instances that no fault strikes, with their guards.
    pub fn live_runs(&mut self) -> Vec<(usize, Run, u32)> {
        self.read_trace();
        let free = self.free();
        let daemons: Vec<u32> = self
            .fleet
            .instances
            .iter()
            .filter(|i| i.runs())
            .map(|i| i.pid())
            .collect();
        let runs = self
            .trace
            .so_far
            .since(boottime_ns() - 2 * SECOND)
            .into_iter();
        runs.filter(|r| !r.ended && process::alive(r.root))
            .filter_map(|r| {
                let i = self.fleet.index(&r.instance);
                let guard = process::parent(r.root)?;
                let is_guard = guard > 1
                    && !daemons.contains(&guard)
                    && process::command_line(guard).contains("soloist");
                (free.contains(&i) && is_guard).then_some((i, r, guard))
            })
            .collect()
    }

    // ---- commands of soloist ----

    /// Begins a command; `then` learns whether it succeeded.
    pub fn operate(&mut self, words: &[&str], then: impl FnOnce(&mut Self, bool) + 'static) {
        let mut command: Command = self.fleet.instances[0].command();
        let program = command.get_program().to_owned();
        command = Command::new(program);
        command
            .arg("--config")
            .arg(&self.operator)
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = command.spawn().expect("run soloist");
        self.operations.push(Operation {
            words: words.iter().map(|&word| word.to_owned()).collect(),
            child,
            then: Box::new(then),
            until_ns: boottime_ns() + 10 * SECOND,
        });
    }

    /// Such a command has not ended yet.
    pub fn is_under_way(&self, words: &[&str]) -> bool {
        self.operations.iter().any(|op| op.words == words)
    }

    fn operated(&mut self) {
        for mut op in std::mem::take(&mut self.operations) {
            match op.child.try_wait().expect("wait for a child") {
                Some(status) => (op.then)(self, status.success()),
                None if op.until_ns < boottime_ns() => {
                    process::reap(&mut op.child, Duration::ZERO);
                    (op.then)(self, false);
                }
                None => self.operations.push(op),
            }
        }
    }

    pub fn give_few(&mut self, job: &str, key: &str) {
        if job == TRIGGERED {
            return self.give_key(key);
        }
        let keys = self.few_keys.entry(job.to_owned()).or_default();
        keys.insert(key.to_owned());
    }
    pub fn give_key(&mut self, key: &str) {
        self.keys.insert(key.to_owned());
    }
    pub fn accepted(&mut self, key: String) {
        self.accepted.insert(key);
    }

    // ---- what is seen ----

    /// Reads what the witnesses wrote since.
    pub fn read_trace(&mut self) {
        self.trace.read_on(&self.fleet.trace_file());
    }

    /// Reads the trace, then the store's records: whatever the lines tell of, the records of its decision are there.
    /// False: the store does not answer.
    pub fn look(&mut self) -> bool {
        self.read_trace();
        let planned: Vec<&'static str> = self.jobs.iter().map(|j| j.judged.name).collect();
        let mut newest: BTreeMap<String, i64> = BTreeMap::new();
        for run in self.trace.so_far.iter() {
            let n = newest.entry(run.job.clone()).or_default();
            *n = run.occurrence.max(*n);
        }
        for job in &planned {
            let key = format!("soloist:{{{job}}}:history");
            let words = ["LRANGE", key.as_str(), "0", "-1"];
            let Ok(texts) = self.fleet.server().try_command::<Vec<String>>(&words) else {
                return false;
            };
            let seen_ns = boottime_ns();
            for text in texts {
                let Ok(record) = serde_json::from_str::<RunRecord>(&text) else {
                    self.say(&format!("a record that cannot be read: {text}"));
                    continue;
                };
                let name = (
                    record.job.as_str().to_owned(),
                    record.occurrence.0,
                    record.attempt,
                    record.run_id.map_or_else(String::new, |id| id.to_string()),
                    record.outcome.to_string(),
                );
                self.records.entry(name).or_insert(Seen { record, seen_ns });
            }
        }
        for (job, at) in newest {
            let n = self.decided.entry(job).or_default();
            *n = at.max(*n);
        }
        true
    }

    /// Whatever ran on this host may have been late.
    pub fn stood_still(&mut self, from_ns: i64, to_ns: i64) {
        let ms = (to_ns - from_ns) / MS;
        self.say(&format!("this host stood still for {ms} ms"));
        self.struck.push(Struck {
            name: "this host stood still",
            effect: Effect::HostStalled,
            from_ns,
            done_ns: from_ns,
            to_ns,
        });
    }

    /// What happened since then (CLOCK_BOOTTIME).
    fn evidence(&mut self, since: i64, over: bool) -> Evidence {
        let stalls = self.pulse.take();
        for (from_ns, to_ns) in stalls {
            self.stood_still(from_ns, to_ns);
        }
        Evidence {
            jobs: self.jobs.iter().map(|j| j.judged.clone()).collect(),
            few_keys: self.few_keys.clone(),
            comings: self.comings.clone(),
            runs: self.trace.so_far.since(since),
            records: self
                .records
                .values()
                .filter(|seen| seen.seen_ns >= since - 60 * SECOND)
                .cloned()
                .collect(),
            struck: self
                .struck
                .iter()
                .filter(|s| s.to_ns >= since - 120 * SECOND)
                .cloned()
                .collect(),
            since_ns: since,
            keys: self.keys.clone(),
            accepted: self.accepted.clone(),
            now_ns: boottime_ns(),
            decided: self.decided.clone(),
            wall_less_boot_ns: wall_less_boot_ns(),
            instances: self.size,
            over,
            left_over: if over { self.left_over() } else { vec![] },
        }
    }

    /// Judges all that happened.
    pub fn judge(&mut self, over: bool) -> Verdict {
        judge(&self.evidence(i64::MIN / 2, over))
    }

    /// Judges what happened lately, which takes no longer after an hour than after a minute.
    pub fn judge_lately(&mut self) -> Verdict {
        judge(&self.evidence(boottime_ns() - 120 * SECOND, false))
    }

    /// What is always to be done.
    pub fn tick(&mut self) {
        self.operated();
        self.undo(false);
        self.tell_of_files();
        for i in 0..self.size {
            // A daemon may end by itself when its descriptors or processes are used up.
            let ended = self.fleet.instances[i].ended();
            if let Some(status) = ended
                && !self.is_busy(Busy::Instance(i))
            {
                self.say(&format!("i{} ended by itself: {status}", i + 1));
                self.fleet.instances[i].wait_end();
                self.note_once("ended by itself", Effect::Killed { instance: i });
                self.start_instance(i);
            }
        }
    }

    pub fn runs(&self) -> usize {
        self.trace.so_far.len()
    }

    /// Sends SIGTERM to all, and waits for their end.
    pub fn stop_all(&mut self) {
        let operations = std::mem::take(&mut self.operations);
        for mut op in operations {
            process::reap(&mut op.child, Duration::from_secs(1));
        }
        for i in 0..self.size {
            self.start_instance(i);
        }
        self.fleet.stop();
    }

    /// Processes of runs that are alive. What is being ended gets a moment.
    fn left_over(&self) -> Vec<String> {
        let until = boottime_ns() + 2 * SECOND;
        loop {
            let mut left = process::with_argument(&self.fleet.trace_file());
            left.retain(|&pid| process::alive(pid));
            if left.is_empty() || boottime_ns() > until {
                let line = |pid: u32| format!("{pid} {}", process::command_line(pid));
                return left.into_iter().map(line).collect();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The faults that struck from five seconds before.
    pub fn lately(&self, at_ns: i64) -> String {
        let near = self.struck.iter();
        let near = near.filter(|s| s.touches(at_ns - 5 * SECOND, at_ns));
        let name = |s: &Struck| {
            let since = (at_ns - s.from_ns) as f64 / SECOND as f64;
            format!("{} {:?} {since:.3}s before", s.name, s.effect)
        };
        near.map(name).collect::<Vec<_>>().join("; ")
    }

    pub fn keep_files(&self, out: &Path) {
        std::fs::copy(self.fleet.trace_file(), out.join("trace")).ok();
        let records = self.records.values().map(|seen| {
            let record = serde_json::to_string(&seen.record).expect("JSON");
            format!(
                "{:.3} {record}\n",
                (seen.seen_ns - self.begun_ns) as f64 / 1e9
            )
        });
        std::fs::write(out.join("records"), records.collect::<String>()).ok();
        for i in &self.fleet.instances {
            let name = i.log.file_name().expect("a file name");
            std::fs::copy(&i.log, out.join(name)).ok();
        }
    }
}

fn wall_less_boot_ns() -> i64 {
    wall_us() * 1000 - boottime_ns()
}

impl Drop for Stage {
    fn drop(&mut self) {
        for mut op in std::mem::take(&mut self.operations) {
            process::reap(&mut op.child, Duration::ZERO);
        }
        for cgroup in self.cgroups.iter().flatten() {
            cgroup.freeze(false);
        }
        if let Some(scratch) = self.operator.parent() {
            std::fs::remove_dir_all(scratch).ok();
        }
    }
}

/// A thread that starts a process again and again, and notices when this host takes long for that.
struct Pulse {
    stop: Arc<AtomicBool>,
    stalls: Arc<Mutex<Vec<(i64, i64)>>>,
    /// When it began to start the process that it waits for.
    since: Arc<AtomicI64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Pulse {
    /// Longer than this is a stall: a trust of 1.5 s has to be long enough for the start of a guard and a command.
    const STALL: i64 = 250 * MS;
    const PAUSE: Duration = Duration::from_millis(100);

    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stalls = Arc::new(Mutex::new(vec![]));
        let since = Arc::new(AtomicI64::new(boottime_ns()));
        let thread = {
            let (stop, stalls, since) = (stop.clone(), stalls.clone(), since.clone());
            std::thread::spawn(move || {
                while !stop.load(SeqCst) {
                    let before = boottime_ns();
                    since.store(before, SeqCst);
                    std::thread::sleep(Self::PAUSE);
                    start_as_a_run_is();
                    let now = boottime_ns();
                    if now - before > Self::STALL {
                        let mut all = stalls.lock().unwrap_or_else(PoisonError::into_inner);
                        all.push((before, now));
                    }
                }
            })
        };
        Self {
            stop,
            stalls,
            since,
            thread: Some(thread),
        }
    }

    /// Those since the last call, and one that goes on: what it delays is judged now.
    fn take(&self) -> Vec<(i64, i64)> {
        let mut stalls =
            std::mem::take(&mut *self.stalls.lock().unwrap_or_else(PoisonError::into_inner));
        let (since, now) = (self.since.load(SeqCst), boottime_ns());
        if now - since > Self::STALL {
            stalls.push((since, now));
        }
        stalls
    }
}

/// In a session of its own: the kernel may group processes by session, and let those of a new one wait.
fn start_as_a_run_is() {
    let mut command = Command::new("true");
    // SAFETY: setsid is async-signal-safe and nothing is allocated.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::setsid().map(drop)?));
    }
    command.status().ok();
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}
