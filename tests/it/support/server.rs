//! A Redis server of one test: on a Unix socket and a TCP port, killed on drop.

use std::{
    ops::Range,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::FileExt,
            net::{SocketAddr, UnixListener},
        },
    },
    path::PathBuf,
    process::{Child, Stdio},
    sync::Mutex,
    time::Duration,
};

use rustix::process::Signal;
use soloist::{config, store::redis::RedisStore};

use super::{GENEROUS, process, wait_for, witness};

pub struct RedisServer {
    dir: tempfile::TempDir,
    child: Child,
    port: u16,
    /// Writes go to an append-only file, which a restart reads.
    append_only: bool,
    /// Further arguments, which stand last.
    args: Vec<String>,
}

/// What the server knew at one moment, as a file that it can be started from again.
pub struct Snapshot(Vec<u8>);

impl RedisServer {
    /// A server whose clock can be stepped: [`RedisServer::step_clock`].
    pub fn start_with_own_clock() -> Self {
        let mut server = Self::start_later();
        std::fs::write(server.clock_file(), [0; 16]).expect("write the clock");
        server.revive(None);
        server
    }

    fn clock_file(&self) -> PathBuf {
        self.dir.path().join("clock")
    }

    /// From now on its clock is wrong by so much.
    pub fn step_clock(&self, by: Duration) {
        self.set_clock(i64::try_from(by.as_micros()).expect("a short time"));
    }

    /// By so many microseconds, ahead or behind.
    pub fn set_clock(&self, us: i64) {
        self.write_clock(us, 0);
    }

    /// From now on its clock stands still at this time, Unix microseconds.
    pub fn stop_clock(&self, at_us: i64) {
        self.write_clock(at_us, 8);
    }

    fn write_clock(&self, us: i64, at: u64) {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(self.clock_file());
        file.and_then(|f| f.write_all_at(&us.to_ne_bytes(), at))
            .expect("write the clock");
    }

    /// An empty server that persists nothing by itself.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// With further arguments.
    pub fn start_with(args: &[&str]) -> Self {
        let server = Self::prepare(args);
        server.await_ready();
        server
    }

    /// A place for a server that is not running yet.
    pub fn start_later() -> Self {
        let mut server = Self::prepare(&[]);
        server.kill();
        server
    }

    /// An empty server whose files are below `place`, and whose clock can be stepped. What it acknowledges is in an
    /// append-only file.
    pub fn start_in(place: &std::path::Path) -> Self {
        let dir = tempfile::tempdir_in(place).expect("a temporary directory");
        std::fs::write(dir.path().join("clock"), 0i64.to_ne_bytes()).expect("write the clock");
        let port = free_port();
        // Small enough for the place.
        let args = ["--auto-aof-rewrite-min-size", "4mb"]
            .map(ToOwned::to_owned)
            .to_vec();
        let child = spawn(&dir, port, true, &args);
        let server = Self {
            dir,
            child,
            port,
            append_only: true,
            args,
        };
        server.await_ready();
        server
    }

    fn prepare(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let port = free_port();
        let args: Vec<String> = args.iter().map(|&a| a.to_owned()).collect();
        let child = spawn(&dir, port, false, &args);
        Self {
            dir,
            child,
            port,
            append_only: false,
            args,
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("redis.sock")
    }
    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }
    pub fn port(&self) -> u16 {
        self.port
    }

    fn try_connect(&self) -> ::redis::RedisResult<::redis::Connection> {
        ::redis::Client::open(self.url())?.get_connection()
    }

    pub fn await_ready(&self) {
        let ping = || ::redis::cmd("PING").query::<String>(&mut self.try_connect()?);
        wait_for("redis-server answers", GENEROUS, || ping().ok());
    }

    /// Runs one command; its answer must be readable as `T`.
    #[track_caller]
    pub fn command<T: ::redis::FromRedisValue>(&self, words: &[&str]) -> T {
        let mut c = self.try_connect().expect("the server answers");
        let mut cmd = ::redis::cmd(words[0]);
        for word in &words[1..] {
            cmd.arg(*word);
        }
        cmd.query(&mut c)
            .unwrap_or_else(|e| panic!("{words:?} failed: {e}"))
    }

    /// Runs one command, if the server answers within a second.
    ///
    /// # Errors
    /// It does not, or refuses.
    pub fn try_command<T: ::redis::FromRedisValue>(
        &self,
        words: &[&str],
    ) -> ::redis::RedisResult<T> {
        let second = Duration::from_secs(1);
        let client = ::redis::Client::open(self.url())?;
        let mut c = client.get_connection_with_timeout(second)?;
        c.set_read_timeout(Some(second))?;
        let mut cmd = ::redis::cmd(words[0]);
        for word in &words[1..] {
            cmd.arg(*word);
        }
        cmd.query(&mut c)
    }

    /// SIGKILL: nothing is saved.
    pub fn kill(&mut self) {
        process::signal(self.child.id(), Signal::CONT);
        self.child.kill().ok();
        self.child.wait().ok();
        std::fs::remove_file(self.socket()).ok();
    }

    /// Starts again after [`RedisServer::kill`], without data or from a snapshot.
    pub fn revive(&mut self, from: Option<&Snapshot>) {
        let file = self.dir.path().join("dump.rdb");
        match from {
            Some(Snapshot(data)) => std::fs::write(file, data).expect("write dump.rdb"),
            None => drop(std::fs::remove_file(file)),
        }
        self.child = spawn(&self.dir, self.port, self.append_only, &self.args);
        self.await_ready();
    }

    /// Starts again with all that it knew.
    pub fn restart(&mut self) {
        let all = self.snapshot();
        self.kill();
        self.revive(Some(&all));
    }

    /// Starts again with nothing.
    pub fn restart_empty(&mut self) {
        self.kill();
        self.revive(None);
    }

    /// Further arguments of the next start, in place of those of before.
    pub fn args(&mut self, args: &[&str]) {
        self.args = args.iter().map(|&a| a.to_owned()).collect();
    }

    /// Starts again with other data than the append-only file has: that of a snapshot, or none.
    pub fn replace_data(&mut self, with: Option<&Snapshot>) {
        self.kill();
        std::fs::remove_dir_all(self.dir.path().join("appendonlydir")).ok();
        self.append_only = false;
        self.revive(with);
        self.append_only();
    }

    /// From now on, written data survives [`RedisServer::kill`].
    pub fn append_only(&mut self) {
        self.command::<()>(&["CONFIG", "SET", "appendonly", "yes"]);
        self.append_only = true;
        self.await_rewrite();
    }

    fn await_rewrite(&self) {
        wait_for("the append-only file is complete", GENEROUS, || {
            let info: String = self.command(&["INFO", "persistence"]);
            (info.contains("aof_rewrite_in_progress:0")
                && info.contains("aof_rewrite_scheduled:0")
                && info.contains("aof_last_bgrewrite_status:ok"))
            .then_some(())
        });
    }

    /// Writes the append-only file anew. Redis cannot read one that was written on a full disk.
    pub fn rewrite(&self) {
        wait_for("the append-only file is written anew", GENEROUS, || {
            let words = ["BGREWRITEAOF"];
            self.try_command::<String>(&words).ok()
        });
        self.await_rewrite();
    }

    /// The data as it is now.
    pub fn snapshot(&self) -> Snapshot {
        self.command::<()>(&["SAVE"]);
        Snapshot(std::fs::read(self.dir.path().join("dump.rdb")).expect("dump.rdb after SAVE"))
    }

    pub fn flush(&self) {
        self.command::<()>(&["FLUSHALL"]);
    }

    /// One more client of it, as another process would have.
    pub fn store(&self) -> RedisStore {
        RedisStore::open(&self.url(), &settings(&self.url())).expect("a store")
    }

    pub fn stop(&self) {
        process::signal(self.child.id(), Signal::STOP);
    }
    pub fn cont(&self) {
        process::signal(self.child.id(), Signal::CONT);
    }
}

/// A port that nobody listens on, outside of the range that the kernel gives to connections, and that no other test
/// gets, of any process: so it stays free until the server has it.
pub fn free_port() -> u16 {
    const BLOCK: u16 = 100;
    // The ports of a block, and the socket that keeps other processes from it for as long as this one lives.
    static MINE: Mutex<(Range<u16>, Vec<UnixListener>)> = Mutex::new((0..0, vec![]));
    let mut mine = MINE.lock().expect("nobody panics with it");
    loop {
        if let Some(port) = mine.0.next() {
            if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
                return port;
            }
            continue;
        }
        let blocks = (12_000..32_000).step_by(usize::from(BLOCK));
        let took = blocks.into_iter().find_map(|first| {
            let name = format!("soloist-test-ports-{first}");
            let address = SocketAddr::from_abstract_name(name).ok()?;
            Some((first, UnixListener::bind_addr(&address).ok()?))
        });
        let (first, socket) = took.expect("a block of ports that no other process has");
        mine.0 = first..first + BLOCK;
        mine.1.push(socket);
    }
}

/// The settings of a patient client without retries.
pub fn settings(url: &str) -> config::Store {
    let mut settings = config::Store::from_url(url).expect("the URL of a server");
    settings.timeout = Duration::from_secs(10);
    settings.pool_size = 4;
    settings.retry.attempts = 0;
    settings
}

fn spawn(dir: &tempfile::TempDir, port: u16, append_only: bool, args: &[String]) -> Child {
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(match std::env::var_os("SOLOIST_TEST_REDIS_LOGS") {
            Some(kept) => PathBuf::from(kept).join(format!("{}-{port}.log", std::process::id())),
            None => dir.path().join("redis.log"),
        })
        .expect("redis.log");
    let clock = dir.path().join("clock");
    // Each test owns its server from one thread.
    let mut command = process::mortal("redis-server");
    command
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ])
        .args(["--unixsocket", "redis.sock", "--appendonly"])
        .arg(if append_only { "yes" } else { "no" })
        .args(["--maxmemory-policy", "noeviction"])
        .args(["--enable-debug-command", "local"])
        .args(args)
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .envs(
            clock
                .exists()
                .then(|| witness::stepped(&clock))
                .into_iter()
                .flatten(),
        )
        .stdout(log)
        .stderr(Stdio::null());
    command.spawn().unwrap_or_else(|e| {
        panic!("cannot start redis-server: {e}; the tests need it (./test.sh installs it)")
    })
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}
