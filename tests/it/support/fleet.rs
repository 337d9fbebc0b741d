//! Several instances of the built program on one store, with witnesses as jobs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, OpenOptions},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;
use soloist::model::rfc3339_ms;

use super::{
    GENEROUS, Slots,
    cgroup::TestCgroup,
    process,
    proxy::Proxy,
    server::RedisServer,
    trace::{Expect, Run, Trace, Violation},
    wait_for, wait_until, witness,
};

/// The program under test; `SOLOIST_TEST_BINARY` names another build of it, for example one with a mechanism taken
/// out, which the tests must notice.
pub fn soloist() -> PathBuf {
    std::env::var_os("SOLOIST_TEST_BINARY")
        .map_or_else(|| env!("CARGO_BIN_EXE_soloist").into(), PathBuf::from)
}

const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

#[derive(Clone, Copy, PartialEq)]
enum Meeting {
    Redis,
    /// Each instance through a proxy of its own.
    Proxied,
    Sqlite,
}

/// A fleet to be started.
pub struct Plan {
    size: usize,
    meeting: Meeting,
    sqlite_file: Option<PathBuf>,
    server_up: bool,
    own_clock: bool,
    slots: usize,
    drain: &'static str,
    limits: String,
    /// The lines of `[http]`, if it is there.
    http: Option<String>,
    /// Further tables.
    tables: String,
    store: String,
    defaults: BTreeMap<String, String>,
    jobs: BTreeMap<String, String>,
    files: BTreeMap<String, String>,
    env: Vec<Vec<(String, String)>>,
    server: Option<RedisServer>,
    logs: Option<PathBuf>,
    cgroups: Vec<Vec<PathBuf>>,
}

pub fn fleet(size: usize) -> Plan {
    let defaults = [("lease", "\"2s\""), ("grace", "\"1s\"")];
    Plan {
        size,
        meeting: Meeting::Redis,
        sqlite_file: None,
        server_up: true,
        own_clock: false,
        slots: 1,
        drain: "5s",
        limits: String::new(),
        http: None,
        tables: String::new(),
        store: String::new(),
        defaults: defaults.map(|(k, v)| (k.into(), v.into())).into(),
        jobs: BTreeMap::new(),
        files: BTreeMap::new(),
        env: vec![vec![]; size],
        server: None,
        logs: None,
        cgroups: vec![vec![]; size],
    }
}

impl Plan {
    pub fn sqlite(mut self) -> Self {
        self.meeting = Meeting::Sqlite;
        self
    }
    pub fn sqlite_at(mut self, file: &Path) -> Self {
        self.sqlite_file = Some(file.into());
        self.sqlite()
    }
    pub fn proxied(mut self) -> Self {
        self.meeting = Meeting::Proxied;
        self
    }
    /// The clock of the Redis server can be stepped.
    pub fn store_with_own_clock(mut self) -> Self {
        self.own_clock = true;
        self
    }
    /// The store does not run yet when the instances start.
    pub fn store_comes_later(mut self) -> Self {
        self.server_up = false;
        self
    }
    /// No other fleet runs meanwhile.
    pub fn alone(mut self) -> Self {
        self.slots = 2;
        self
    }
    /// How long runs may go on after SIGTERM; 5 s if not said.
    pub fn drain(mut self, drain: &'static str) -> Self {
        self.drain = drain;
        self
    }
    /// Further lines of `[limits]`.
    pub fn limits(mut self, lines: &str) -> Self {
        self.limits = lines.into();
        self
    }
    /// Each instance serves HTTP at a free port of this host, with these further lines of `[http]`. A line `listen`
    /// takes the place of that port; `{id}` stands for the name of the instance.
    pub fn http(mut self, lines: &str) -> Self {
        self.http = Some(lines.into());
        self
    }
    /// Further tables of the configuration.
    pub fn tables(mut self, text: &str) -> Self {
        self.tables += text;
        self
    }
    /// Further lines of `[store]`.
    pub fn store(mut self, lines: &str) -> Self {
        self.store = lines.into();
        self
    }
    /// A key of `[defaults]`, its value as TOML.
    pub fn default(mut self, key: &str, value: &str) -> Self {
        self.defaults.insert(key.into(), value.into());
        self
    }
    /// A job: the lines of its table. `{witness}` and `{trace}` stand for the paths, `{soon}` for an instant 20 s after
    /// this fleet had its turn to start, `{later}` for that one second after it.
    pub fn job(mut self, name: &str, lines: &str) -> Self {
        self.jobs.insert(name.into(), lines.into());
        self
    }
    /// A witness each second, with these options of it, and further lines of its table.
    pub fn witness(self, name: &str, options: &str, lines: &str) -> Self {
        self.job(name, &each_second(options, lines))
    }
    /// A file beside the configurations.
    pub fn file(mut self, name: &str, text: &str) -> Self {
        self.files.insert(name.into(), text.into());
        self
    }
    /// An environment variable of the i-th instance.
    pub fn env(mut self, i: usize, name: &str, value: &str) -> Self {
        self.env[i].push((name.into(), value.into()));
        self
    }
    /// The wall clock of the i-th instance, as libfaketime writes it: `+3s`.
    pub fn clock(self, i: usize, faketime: &str) -> Self {
        self.faketime(i).env(i, "FAKETIME", faketime)
    }
    /// The wall clock of the i-th instance follows a file.
    pub fn clock_file(self, i: usize, file: &Path) -> Self {
        self.faketime(i)
            .env(i, "FAKETIME_TIMESTAMP_FILE", &file.display().to_string())
            .env(i, "FAKETIME_NO_CACHE", "1")
    }
    /// This server, which runs already.
    pub fn on(mut self, server: RedisServer) -> Self {
        self.server = Some(server);
        self
    }
    /// What the instances write goes to files here.
    pub fn logs(mut self, dir: &Path) -> Self {
        self.logs = Some(dir.into());
        self
    }
    /// The i-th instance starts in this cgroup.
    pub fn cgroup(mut self, i: usize, dir: &Path) -> Self {
        self.cgroups[i].push(dir.into());
        self
    }
    fn faketime(self, i: usize) -> Self {
        assert!(
            Path::new(FAKETIME).exists(),
            "{FAKETIME} is missing; the tests need it (./test.sh installs it)"
        );
        self.env(i, "LD_PRELOAD", FAKETIME)
            .env(i, "FAKETIME_DONT_FAKE_MONOTONIC", "1")
    }

    // Long: one field after the other.
    pub fn start(mut self) -> Fleet {
        let slots = Slots::take(self.slots);
        let soon = super::now_ms() / 1000 * 1000 + 20_000;
        let (soon, later) = (rfc3339_ms(soon), rfc3339_ms(soon + 1000));
        for lines in self.jobs.values_mut() {
            *lines = lines.replace("{soon}", &soon).replace("{later}", &later);
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        let server = match (self.meeting, self.server_up) {
            (Meeting::Sqlite, _) => None,
            _ if self.server.is_some() => self.server.take(),
            (_, true) if self.own_clock => Some(RedisServer::start_with_own_clock()),
            (_, false) if self.own_clock => {
                let mut server = RedisServer::start_with_own_clock();
                server.kill();
                Some(server)
            }
            (_, true) => Some(RedisServer::start()),
            (_, false) => Some(RedisServer::start_later()),
        };
        let proxies: Vec<Proxy> = match (self.meeting, &server) {
            (Meeting::Proxied, Some(server)) => (0..self.size)
                .map(|_| Proxy::start(server.port()))
                .collect(),
            _ => vec![],
        };
        // Else daemons of other tests would end what is left when this one's are killed, and these what others leave.
        let cgroup = match self.cgroups.iter().all(Vec::is_empty) {
            true => TestCgroup::new(),
            false => None,
        };
        if let Some(cgroup) = &cgroup {
            self.cgroups.fill(vec![cgroup.0.clone()]);
        }
        let instances = (0..self.size)
            .map(|i| Instance {
                id: format!("i{}", i + 1),
                config: dir.path().join(format!("i{}.toml", i + 1)),
                log: self
                    .logs
                    .as_deref()
                    .unwrap_or(dir.path())
                    .join(format!("i{}.log", i + 1)),
                cgroups: self.cgroups[i].clone(),
                url: match (proxies.get(i), &server) {
                    (Some(proxy), _) => proxy.url(),
                    (_, Some(server)) => server.url(),
                    (_, None) => match &self.sqlite_file {
                        Some(file) => format!("sqlite:{}", file.display()),
                        None => "sqlite:soloist.db".into(),
                    },
                },
                env: self.env[i].clone(),
                child: None,
            })
            .collect();
        let mut fleet = Fleet {
            plan: self,
            instances,
            proxies,
            server,
            dir,
            trace: Mutex::default(),
            _cgroup: cgroup,
            _slots: slots,
        };
        for (name, text) in &fleet.plan.files {
            std::fs::write(fleet.file(name), text).expect("write a file");
        }
        for i in 0..fleet.instances.len() {
            fleet.write_config(i);
            fleet.instances[i].start();
        }
        fleet
    }
}

/// For a job whose every occurrence is to start, also if the machine is so busy that a run of 5 ms is not over at the
/// next one, or if the store does not answer for a second.
pub const LATE_RATHER_THAN_SKIPPED: &str = "overlap = \"queue\"\ncatch_up = \"all\"\n";

/// The table of a job that is a witness each second.
pub fn each_second(options: &str, lines: &str) -> String {
    let options: Vec<String> = options
        .split_whitespace()
        .map(|o| format!(", {o:?}"))
        .collect();
    let options = options.concat();
    format!(
        "schedule = \"* * * * * *\"\ncommand = [\"{{witness}}\", \"{{trace}}\"{options}]\n{lines}"
    )
}

pub struct Instance {
    pub id: String,
    pub config: PathBuf,
    pub log: PathBuf,
    pub url: String,
    env: Vec<(String, String)>,
    cgroups: Vec<PathBuf>,
    child: Option<Child>,
}

pub struct Fleet {
    plan: Plan,
    pub instances: Vec<Instance>,
    /// One for each instance of a proxied fleet.
    pub proxies: Vec<Proxy>,
    server: Option<RedisServer>,
    dir: tempfile::TempDir,
    /// As far as it was read.
    trace: Mutex<Trace>,
    _cgroup: Option<TestCgroup>,
    _slots: Slots,
}

impl Instance {
    fn output(&self) -> File {
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .expect("a log file")
    }

    /// The program with this instance's configuration, as a person on its host would start it.
    pub fn command(&self) -> Command {
        self.configured(Command::new(soloist()))
    }

    fn configured(&self, mut command: Command) -> Command {
        command
            .arg("--config")
            .arg(&self.config)
            .current_dir(self.config.parent().expect("a directory"))
            .env("SOLOIST_INSTANCE", &self.id)
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null());
        command
    }

    pub fn start(&mut self) {
        self.start_with(|_| {});
    }

    /// Starts it with a changed command: other environment, limits.
    pub fn start_with(&mut self, change: impl FnOnce(&mut Command)) {
        assert!(self.child.is_none(), "{} runs already", self.id);
        let mut command = self.configured(process::mortal(soloist()));
        command
            .arg("run")
            .envs(self.env.iter().map(|(k, v)| (k, v)))
            .stdout(self.output())
            .stderr(self.output());
        let cgroups = self.cgroups.iter().map(|dir| {
            let file = File::options().write(true).open(dir.join("cgroup.procs"));
            file.expect("a cgroup of the tests")
        });
        let cgroups: Vec<File> = cgroups.collect();
        if !cgroups.is_empty() {
            // SAFETY: write is async-signal-safe and nothing is allocated.
            unsafe {
                command.pre_exec(move || {
                    for members in &cgroups {
                        rustix::io::write(members, b"0")?;
                    }
                    Ok(())
                });
            }
        }
        change(&mut command);
        self.child = Some(command.spawn().expect("start soloist"));
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("a running instance").id()
    }
    /// A reload waits until the program is far enough not to be ended by it.
    pub fn signal(&self, signal: Signal) {
        if signal == Signal::HUP {
            wait_until("it holds SIGHUP back", GENEROUS, || {
                process::outlives(self.pid(), signal)
            });
        }
        process::signal(self.pid(), signal);
    }
    /// SIGKILL; returns when it is dead.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }
    /// Sends SIGTERM until the instance ends: the first drains, a later one ends the runs. Two in quick succession may
    /// count as one.
    #[track_caller]
    pub fn urge(&mut self) -> std::process::ExitStatus {
        wait_for("the end after repeated SIGTERM", GENEROUS, || {
            self.signal(Signal::TERM);
            std::thread::sleep(Duration::from_millis(100));
            self.ended()
        });
        self.wait_end()
    }
    /// Waits for the instance to end by itself.
    #[track_caller]
    pub fn wait_end(&mut self) -> std::process::ExitStatus {
        let mut child = self.child.take().expect("a running instance");
        let begun = Instant::now();
        loop {
            if let Some(status) = child.try_wait().expect("wait for a child") {
                return status;
            }
            if begun.elapsed() > GENEROUS {
                child.kill().ok();
                child.wait().ok();
                panic!("{} has not ended within {GENEROUS:?}", self.id);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    /// None while it runs.
    pub fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.as_mut()?.try_wait().expect("wait for a child")
    }
    pub fn runs(&self) -> bool {
        self.child.is_some()
    }
    pub fn log_text(&self) -> String {
        std::fs::read(&self.log)
            .map(|b| String::from_utf8_lossy(&b).into_owned())
            .unwrap_or_default()
    }
}

impl Fleet {
    pub fn server(&mut self) -> &mut RedisServer {
        self.server.as_mut().expect("a fleet on Redis")
    }
    /// A file beside the configurations, where relative paths in them begin.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    pub fn trace_file(&self) -> PathBuf {
        self.dir.path().join("trace")
    }
    pub fn trace(&self) -> Trace {
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        trace.read_on(&self.trace_file());
        trace.clone()
    }

    /// Another table for a job, or none; takes effect with `write_config` and a SIGHUP.
    pub fn set_job(&mut self, name: &str, lines: Option<&str>) {
        match lines {
            Some(lines) => self.plan.jobs.insert(name.into(), lines.into()),
            None => self.plan.jobs.remove(name),
        };
    }

    /// Other further tables, and another value of this key of `[defaults]`; takes effect as [`Fleet::set_job`].
    pub fn set_tables(&mut self, text: &str, default: (&str, &str)) {
        self.plan.tables = text.into();
        let (key, value) = default;
        self.plan.defaults.insert(key.into(), value.into());
    }

    /// Has the i-th instance read its configuration again, and waits until it is in force.
    #[track_caller]
    pub fn reload(&self, i: usize) {
        let reloads = |i: usize| {
            let text = self.instances[i].log_text();
            text.matches("configuration reloaded").count()
        };
        let before = reloads(i);
        self.write_config(i);
        self.instances[i].signal(Signal::HUP);
        wait_until("the new configuration is in force", GENEROUS, || {
            reloads(i) > before
        });
    }

    pub fn config_text(&self, i: usize) -> String {
        let witness = witness::program().display().to_string();
        let trace = self.trace_file().display().to_string();
        let timeout = match self.plan.store.contains("timeout =") {
            true => "",
            false => "timeout = \"250ms\"\n",
        };
        let mut text = format!(
            "[store]\nurl = {:?}\n{}{}\n\n[limits]\ndrain = {:?}\n{}\n\n[defaults]\n",
            self.instances[i].url, timeout, self.plan.store, self.plan.drain, self.plan.limits
        );
        for (key, value) in &self.plan.defaults {
            text += &format!("{key} = {value}\n");
        }
        if let Some(lines) = &self.plan.http {
            let listen = match lines.contains("listen =") {
                true => "",
                false => "listen = \"127.0.0.1:0\"\n",
            };
            let lines = lines.replace("{id}", &self.instances[i].id);
            text += &format!("\n[http]\n{listen}{lines}\n");
        }
        text += &format!("\n{}\n", self.plan.tables);
        for (name, lines) in &self.plan.jobs {
            let lines = lines
                .replace("{witness}", &witness)
                .replace("{trace}", &trace);
            text += &format!("\n[jobs.{name}]\n{lines}\n");
        }
        text
    }

    /// As an editor saves it: whole or not at all.
    pub fn write_config(&self, i: usize) {
        let file = &self.instances[i].config;
        let new = file.with_extension("new");
        std::fs::write(&new, self.config_text(i)).expect("write the configuration");
        std::fs::rename(new, file).expect("put the configuration in place");
    }

    /// Where the i-th instance serves HTTP now: `127.0.0.1:PORT`, or a path.
    #[track_caller]
    pub fn http(&self, i: usize) -> String {
        wait_for(&format!("i{} serves HTTP", i + 1), GENEROUS, || {
            let text = self.instances[i].log_text();
            let (_, at) = text.rsplit_once("serving HTTP at ")?;
            let at = at.lines().next()?.trim();
            let plain = at
                .strip_prefix("unix:")
                .or_else(|| at.strip_prefix("http://"));
            plain
                .or_else(|| at.strip_prefix("https://"))
                .map(str::to_owned)
        })
    }

    /// Runs a command of soloist beside the fleet, with the first instance's configuration.
    pub fn cli(&self, words: &[&str]) -> Output {
        self.instances[0]
            .command()
            .env_remove("SOLOIST_INSTANCE")
            .args(words)
            .output()
            .expect("run soloist")
    }

    /// What [`Fleet::cli`] prints on stdout, of a command that must succeed.
    #[track_caller]
    pub fn said(&self, words: &[&str]) -> String {
        let output = self.cli(words);
        assert!(
            output.status.success(),
            "soloist {words:?} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).expect("stdout is UTF-8")
    }

    /// Waits until the log of this instance has this text.
    #[track_caller]
    pub fn wait_log(&self, i: usize, text: &str) {
        wait_until(
            &format!("{text:?} in the log of i{}", i + 1),
            GENEROUS,
            || self.instances[i].log_text().contains(text),
        );
    }

    /// JSON of a reading command that must succeed. A busy host may let it wait too long for the store: then it is
    /// tried again.
    #[track_caller]
    pub fn json(&self, words: &[&str]) -> Value {
        const STORE_UNREACHABLE: i32 = 69;
        let output = wait_for(&format!("an answer to soloist {words:?}"), GENEROUS, || {
            let output = self.cli(words);
            (output.status.code() != Some(STORE_UNREACHABLE)).then_some(output)
        });
        assert!(
            output.status.success(),
            "soloist {words:?} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| {
            let text = String::from_utf8_lossy(&output.stdout);
            panic!("soloist {words:?} printed no JSON: {e}: {text}")
        })
    }

    /// Run records of a job, newest first, without that of what was planned while the fleet waited for a new store.
    #[track_caller]
    pub fn history(&self, job: &str) -> Vec<Value> {
        let mut all = self.whole_history(job);
        let first_wait = |r: &Value| {
            r["error"]
                .as_str()
                .is_some_and(|e| e.starts_with("the store was new, "))
        };
        all.retain(|r| !first_wait(r));
        all
    }

    #[track_caller]
    fn whole_history(&self, job: &str) -> Vec<Value> {
        match self.json(&["history", job, "--json", "-n", "200"]) {
            Value::Array(records) => records,
            other => panic!("history --json is no array: {other}"),
        }
    }

    /// Waits for the first record with this outcome.
    #[track_caller]
    pub fn wait_record(&self, job: &str, outcome: &str) -> Value {
        wait_for(
            &format!("a record of {job} with outcome {outcome}"),
            GENEROUS,
            || {
                // Each look starts a process: that many leave the fleet no core.
                std::thread::sleep(Duration::from_millis(40));
                self.history(job)
                    .into_iter()
                    .find(|r| r["outcome"] == outcome)
            },
        )
    }

    /// Occurrences (Unix ms) of a job that the history accounts for, whatever their outcome.
    #[track_caller]
    pub fn recorded(&self, job: &str, period_ms: i64) -> BTreeSet<i64> {
        let mut found = BTreeSet::new();
        for record in self.whole_history(job) {
            let newest = occurrence_ms(&record);
            let count = record["count"].as_i64().unwrap_or(1);
            found.extend((0..count).map(|n| newest - n * period_ms));
        }
        found
    }

    /// Waits until so many runs have started.
    #[track_caller]
    pub fn wait_runs(&self, n: usize) -> Vec<Run> {
        wait_for(&format!("{n} runs"), GENEROUS, || {
            let runs = self.trace().runs();
            (runs.len() >= n).then_some(runs)
        })
    }

    /// Waits for so many more runs than there are now.
    #[track_caller]
    pub fn wait_more_runs(&self, n: usize) -> Vec<Run> {
        self.wait_runs(self.trace().runs().len() + n)
    }

    /// Waits for a run that begins after now and has this property.
    #[track_caller]
    pub fn wait_run(&self, what: &str, wanted: impl Fn(&Run) -> bool) -> Run {
        wait_for(what, GENEROUS, || {
            self.trace().runs().into_iter().find(&wanted)
        })
    }

    /// A run that is alive: its instance's index, and the run.
    #[track_caller]
    pub fn wait_holder(&self, job: &str) -> (usize, Run) {
        let run = wait_for(&format!("a run of {job} is alive"), GENEROUS, || {
            let run = self.trace().runs_of(job).pop()?;
            (!run.ended && process::alive(run.root)).then_some(run)
        });
        (self.index(&run.instance), run)
    }

    pub fn index(&self, id: &str) -> usize {
        self.instances
            .iter()
            .position(|i| i.id == id)
            .unwrap_or_else(|| panic!("{id} is no instance of this fleet"))
    }

    /// The guard of a run: the parent of its command.
    pub fn guard(&self, run: &Run) -> u32 {
        let guard = process::parent(run.root).expect("the command is alive");
        assert!(
            self.instances.iter().all(|i| !i.runs() || i.pid() != guard),
            "the command's parent is the daemon itself, there is no guard"
        );
        guard
    }

    /// Waits until none of these processes is alive; returns for how long the last one was, since `since_ns`
    /// (CLOCK_BOOTTIME).
    #[track_caller]
    pub fn wait_gone(&self, run: &Run, since_ns: i64) -> Duration {
        let pids = self
            .trace()
            .runs()
            .into_iter()
            .find(|r| r.run == run.run)
            .map_or_else(|| run.pids.clone(), |r| r.pids);
        wait_until("the process tree is gone", GENEROUS, || {
            !pids.iter().any(|&pid| process::alive(pid))
        });
        let last = self
            .trace()
            .runs()
            .into_iter()
            .find(|r| r.run == run.run)
            .map_or(since_ns, |r| r.last_ns);
        Duration::from_nanos(u64::try_from(last - since_ns).unwrap_or(0))
    }

    pub fn signal_all(&self, signal: Signal) {
        for i in self.instances.iter().filter(|i| i.runs()) {
            i.signal(signal);
        }
    }

    /// Sends SIGTERM to all, and waits for their end, which must be a success.
    #[track_caller]
    pub fn stop(&mut self) {
        // One that was started a moment ago does not know yet what to do about it.
        wait_until("all are ready to be stopped", GENEROUS, || {
            let mut living = self.instances.iter().filter(|i| i.runs());
            living.all(|i| process::catches(i.pid(), Signal::TERM) || !process::alive(i.pid()))
        });
        self.signal_all(Signal::TERM);
        for i in 0..self.instances.len() {
            if self.instances[i].runs() {
                let status = self.instances[i].wait_end();
                assert!(
                    status.success(),
                    "{} ended with {status}",
                    self.instances[i].id
                );
            }
        }
    }

    /// Ends all instances without waiting for their runs.
    #[track_caller]
    pub fn stop_all_now(&mut self) {
        self.signal_all(Signal::TERM);
        for i in self.instances.iter_mut().filter(|i| i.runs()) {
            i.urge();
        }
    }

    /// Asserts that no promise was broken, and that each occurrence of these jobs, which are due each second, started
    /// or stands in the history: from `since` (Unix ms), or else from the first start on.
    ///
    /// # Panics
    /// When a promise was broken.
    #[track_caller]
    pub fn judge(&self, expect: Expect, jobs: &[&str], since: Option<i64>) {
        let trace = self.trace();
        let mut found = trace.violations(expect);
        for job in jobs {
            found.extend(trace.misses(job, 1000, since, &self.recorded(job, 1000)));
        }
        self.accept(&found);
    }

    /// As [`Fleet::judge`], and asserts that each occurrence from the first to the last start of a job did start,
    /// except where the machine stood still for a lease.
    #[track_caller]
    pub fn judge_all_started(&self, jobs: &[&str]) {
        let trace = self.trace();
        let mut found = trace.violations(super::trace::ONCE);
        for job in jobs {
            let mut late = self.history(job);
            late.retain(|r| r["outcome"] == "lease_lost");
            let late = late.iter().map(occurrence_ms).collect();
            found.extend(trace.misses(job, 1000, None, &late));
        }
        self.accept(&found);
    }

    #[track_caller]
    pub fn accept(&self, found: &[Violation]) {
        assert!(
            found.is_empty(),
            "broken promises: {found:#?}\n{}",
            self.listing(found)
        );
    }

    fn listing(&self, found: &[Violation]) -> String {
        let text = format!("{found:?}");
        let runs = self.trace().runs();
        let mut out = String::new();
        for run in runs
            .iter()
            .filter(|r| text.contains(&r.occurrence.to_string()))
            .take(40)
        {
            out += &format!(
                "  {run}, started {} us after it was due\n",
                run.start_wall_us - run.occurrence * 1000
            );
        }
        out
    }
}

/// `occurrence` of a run record, Unix ms.
#[track_caller]
pub fn occurrence_ms(record: &Value) -> i64 {
    record["occurrence"]
        .as_str()
        .and_then(|t| t.parse::<jiff::Timestamp>().ok())
        .unwrap_or_else(|| panic!("no occurrence in {record}"))
        .as_millisecond()
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for i in &self.instances {
                let text = i.log_text();
                let lines: Vec<&str> = text.lines().collect();
                let shown = &lines[lines.len().saturating_sub(60)..];
                eprintln!("--- the end of what {} wrote:\n{}", i.id, shown.join("\n"));
            }
        }
        let mut guards = vec![];
        for i in &mut self.instances {
            if let Some(child) = &mut i.child {
                if child.try_wait().is_ok_and(|ended| ended.is_none()) {
                    guards.extend(process::children(child.id()));
                }
                process::signal(child.id(), Signal::CONT);
                process::signal(child.id(), Signal::TERM);
            }
        }
        for i in &mut self.instances {
            if let Some(child) = &mut i.child {
                process::reap(child, Duration::from_secs(8));
            }
        }
        // Only processes that this fleet started, and whose id is not another's by now.
        let ours = witness::program().display().to_string();
        for run in self.trace().runs() {
            for pid in run.pids {
                if process::alive(pid) && process::command_line(pid).contains(&ours) {
                    process::signal(pid, Signal::KILL);
                }
            }
        }
        for pid in guards {
            if process::alive(pid) && process::command_line(pid).contains("soloist") {
                process::signal(pid, Signal::KILL);
            }
        }
        process::end_soloists_in(self.dir.path());
    }
}
