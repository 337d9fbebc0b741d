//! What the parts share: a redis-server, its counters, quantiles, the table.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use soloist::{
    clock::Boottime,
    config,
    model::InstanceId,
    store::{Beat, Info, Store, redis::RedisStore},
};
use tempfile::TempDir;

/// A redis-server on a Unix socket in a temporary directory, without persistence; ends when dropped.
pub struct Redis {
    dir: TempDir,
    process: Child,
}

impl Redis {
    pub fn start() -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no"])
            .arg("--unixsocket")
            .arg(dir.path().join("redis.sock"))
            .arg("--dir")
            .arg(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        let server = Self { dir, process };
        wait_for("an answer from redis-server", || {
            redis::Client::open(server.url())
                .and_then(|c| c.get_connection())
                .is_ok()
        });
        server
    }

    pub fn url(&self) -> String {
        format!(
            "redis+unix://{}",
            self.dir.path().join("redis.sock").display()
        )
    }

    pub fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url())
            .and_then(|c| c.get_connection())
            .expect("a connection")
    }

    fn info(&self, section: &str) -> String {
        redis::cmd("INFO")
            .arg(section)
            .query(&mut self.connection())
            .expect("INFO")
    }

    pub fn version(&self) -> String {
        field(&self.info("server"), "redis_version:").to_owned()
    }

    pub fn load(&self, script: &str) -> String {
        redis::cmd("SCRIPT")
            .arg("LOAD")
            .arg(script)
            .query(&mut self.connection())
            .expect("SCRIPT LOAD")
    }

    pub fn flush(&self) {
        redis::cmd("FLUSHALL")
            .query::<()>(&mut self.connection())
            .expect("FLUSHALL");
    }

    /// Counters since the server's start.
    pub fn used(&self) -> Used {
        let stats = self.info("commandstats");
        // Absent before the first one: cmdstat_evalsha:calls=1,usec=2,...
        let line = field(&stats, "cmdstat_evalsha:");
        let number = |name: &str| -> f64 {
            let value = line.split(',').find_map(|part| part.strip_prefix(name));
            value.and_then(|v| v.parse().ok()).unwrap_or(0.0)
        };
        let cpu = self.info("cpu");
        let seconds = |name: &str| -> f64 { field(&cpu, name).parse().unwrap_or(0.0) };
        Used {
            calls: number("calls=") as u64,
            script_us: number("usec="),
            cpu_us: (seconds("used_cpu_user_main_thread:") + seconds("used_cpu_sys_main_thread:"))
                * 1e6,
        }
    }

    /// As the daemon opens it.
    pub fn store(&self) -> Arc<RedisStore> {
        Arc::new(RedisStore::open(&self.url(), &store_config(&self.url())).expect("a store"))
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What the server has spent.
#[derive(Debug, Clone, Copy)]
pub struct Used {
    /// EVALSHA alone.
    pub calls: u64,
    /// Inside EVALSHA, as the server counts it.
    pub script_us: f64,
    /// User and system time of the thread that serves: reading, parsing, running, answering.
    pub cpu_us: f64,
}

impl std::ops::Sub for Used {
    type Output = Self;
    fn sub(self, before: Self) -> Self {
        Self {
            calls: self.calls - before.calls,
            script_us: self.script_us - before.script_us,
            cpu_us: self.cpu_us - before.cpu_us,
        }
    }
}

fn field<'a>(info: &'a str, name: &str) -> &'a str {
    info.lines()
        .find_map(|l| l.strip_prefix(name))
        .unwrap_or("")
        .trim()
}

/// The defaults of the configuration, with a timeout that a busy machine does not reach.
pub fn store_config(url: &str) -> config::Store {
    let text = format!(
        "[store]\nurl = \"{url}\"\ntimeout = \"5s\"\n[jobs.j]\nschedule = \"@daily\"\ncommand = \"true\"\n"
    );
    config(&text).store
}

pub fn config(text: &str) -> config::Config {
    config::parse(text, Path::new("bench.toml"), &|_| None)
        .unwrap_or_else(|problems| panic!("{problems}"))
}

/// Two workers, as the daemon has.
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Makes the store one that a fleet has used for long: nobody waits for a quarantine, because no lease from before can
/// be left in a server that has just been started here.
pub async fn establish(store: &dyn Store) -> soloist::contender::Epoch {
    let first = store.heartbeat(None).await.expect("a heartbeat");
    let id = InstanceId::new("bench");
    let beat = Beat {
        instance: id.clone(),
        info: Info {
            host: "bench".to_owned(),
            pid: std::process::id(),
            process: 1,
            draining: true,
            ..Info::default()
        },
        quarantine: Duration::ZERO,
        open: Some((first.incarnation.clone(), first.value.id.clone())),
    };
    let reply = store.heartbeat(Some(&beat)).await.expect("a heartbeat");
    store.leave(&id, 1).await.expect("leaving");
    soloist::contender::Epoch {
        incarnation: reply.incarnation.clone(),
        id: first.value.id.clone(),
        born: reply.value.born,
        open: true,
        quarantine: Duration::ZERO,
        first_seen: Boottime::now(),
        open_seen: None,
        others_know: false,
    }
}

pub fn seconds() -> u64 {
    std::env::var("SOLOIST_BENCH_SECONDS")
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(30)
}

/// Waits for a condition, and gives up the whole bench when it does not come.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "no sign of {what} within a minute"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Values in the order of their size.
pub struct Sample(Vec<f64>);

impl Sample {
    pub fn new(mut values: Vec<f64>) -> Self {
        assert!(!values.is_empty(), "nothing was measured");
        values.sort_by(f64::total_cmp);
        Self(values)
    }
    /// The smallest value that `part` of them do not exceed.
    pub fn quantile(&self, part: f64) -> f64 {
        let rank = (self.0.len() as f64 * part).ceil() as usize;
        self.0[rank.clamp(1, self.0.len()) - 1]
    }
    pub fn p50(&self) -> f64 {
        self.quantile(0.5)
    }
    pub fn p99(&self) -> f64 {
        self.quantile(0.99)
    }
    pub fn max(&self) -> f64 {
        self.quantile(1.0)
    }
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

#[derive(Debug)]
pub struct Machine {
    cores: usize,
    cpu: String,
    kernel: String,
    load: String,
    pub redis: String,
}

pub fn machine() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let cpu = cpu
        .lines()
        .find(|l| l.starts_with("model name"))
        .and_then(|l| l.split(':').nth(1));
    Machine {
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        cpu: cpu.unwrap_or("unknown processor").trim().to_owned(),
        kernel: rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned(),
        load: read("/proc/loadavg")
            .split(' ')
            .next()
            .unwrap_or("?")
            .to_owned(),
        redis: String::new(),
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\nsoloist {} | {} cores, {} | Linux {} | Redis {} on a Unix socket | load before: {}\n",
            env!("CARGO_PKG_VERSION"),
            self.cores,
            self.cpu,
            self.kernel,
            self.redis,
            self.load
        )
    }
}

/// One line of the result.
pub struct Row {
    pub what: String,
    /// The figure that counts: a ratio, or a difference.
    pub figure: String,
    /// Empty: nothing was promised.
    pub target: String,
    pub met: Option<bool>,
    /// What it was computed from.
    pub from: String,
}

#[derive(Default)]
pub struct Table(Vec<Row>);

impl Table {
    /// With a target: `value` may be `most` at the most.
    pub fn row(&mut self, what: &str, value: f64, unit: &str, most: f64, from: String) {
        let digits = if unit.is_empty() || unit == "ms" {
            2
        } else {
            1
        };
        self.add(Row {
            what: what.to_owned(),
            figure: format!("{value:.digits$} {unit}"),
            target: format!("<= {most} {unit}"),
            met: Some(value <= most),
            from,
        });
    }
    /// For comparison.
    pub fn note(&mut self, what: &str, value: f64, unit: &str, from: String) {
        self.add(Row {
            what: what.to_owned(),
            figure: format!("{value:.2} {unit}"),
            target: String::new(),
            met: None,
            from,
        });
    }
    pub fn add(&mut self, row: Row) {
        eprintln!("  {}: {} ({})", row.what, row.figure.trim(), row.from);
        self.0.push(row);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |cell: fn(&Row) -> &str, head: &str| {
            self.0
                .iter()
                .map(|r| cell(r).trim().chars().count())
                .chain([head.len()])
                .max()
                .unwrap_or(0)
        };
        let (a, b, c) = (
            width(|r| &r.what, "what"),
            width(|r| &r.figure, "figure"),
            width(|r| &r.target, "target"),
        );
        writeln!(
            f,
            "| {:a$} | {:>b$} | {:>c$} | met | from",
            "what", "figure", "target"
        )?;
        writeln!(
            f,
            "|{:-<1$}|{2:->3$}|{4:->5$}|-----|-----",
            "",
            a + 2,
            ":",
            b + 2,
            ":",
            c + 2
        )?;
        for r in &self.0 {
            let met = match r.met {
                Some(true) => "yes",
                Some(false) => "NO",
                None => "",
            };
            writeln!(
                f,
                "| {:a$} | {:>b$} | {:>c$} | {met:3} | {}",
                r.what,
                r.figure.trim(),
                r.target.trim(),
                r.from
            )?;
        }
        Ok(())
    }
}

/// A directory for a daemon's files.
pub fn directory() -> (TempDir, PathBuf) {
    let dir = TempDir::new().expect("a temporary directory");
    let path = dir.path().to_owned();
    (dir, path)
}
