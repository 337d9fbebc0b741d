//! A Redis server of one test: on a Unix socket and a TCP port, killed on drop.

use std::{
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use rustix::process::{Signal, set_parent_process_death_signal};

use super::{GENEROUS, process, wait_for};

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
        let mut c = ::redis::Client::open(self.url())?.get_connection()?;
        ::redis::cmd("PING").query::<String>(&mut c)?;
        Ok(c)
    }

    pub fn await_ready(&self) {
        wait_for("redis-server answers", GENEROUS, || self.try_connect().ok());
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

    /// Further arguments of the next start, in place of those of before.
    pub fn args(&mut self, args: &[&str]) {
        self.args = args.iter().map(|&a| a.to_owned()).collect();
    }

    /// From now on what was written survives [`RedisServer::kill`].
    pub fn append_only(&mut self) {
        self.command::<()>(&["CONFIG", "SET", "appendonly", "yes"]);
        self.append_only = true;
        wait_for("the append-only file is complete", GENEROUS, || {
            let info: String = self.command(&["INFO", "persistence"]);
            (info.contains("aof_rewrite_in_progress:0")
                && info.contains("aof_rewrite_scheduled:0")
                && info.contains("aof_last_bgrewrite_status:ok"))
            .then_some(())
        });
    }

    /// The data as it is now.
    pub fn snapshot(&self) -> Snapshot {
        self.command::<()>(&["SAVE"]);
        Snapshot(std::fs::read(self.dir.path().join("dump.rdb")).expect("dump.rdb after SAVE"))
    }

    pub fn stop(&self) {
        process::signal(self.child.id(), Signal::STOP);
    }
    pub fn cont(&self) {
        process::signal(self.child.id(), Signal::CONT);
    }
}

/// The port is free now and, being out of the range that the kernel hands out next, most likely then too.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|l| l.local_addr())
        .expect("a free port")
        .port()
}

fn spawn(dir: &tempfile::TempDir, port: u16, append_only: bool, args: &[String]) -> Child {
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(dir.path().join("redis.log"))
        .expect("redis.log");
    let mut command = Command::new("redis-server");
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
        .args(args)
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(Stdio::null());
    // Each test owns its server from one thread; a test run that is killed leaves none behind.
    // SAFETY: prctl is async-signal-safe and nothing is allocated.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
    command.spawn().unwrap_or_else(|e| {
        panic!("cannot start redis-server: {e}; the tests need it (./test.sh installs it)")
    })
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}
