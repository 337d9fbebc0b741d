//! A redis-server of a test's own: on a Unix socket in a temporary directory, gone when dropped.

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use redis::{Connection, FromRedisValue};
use soloist::{config, store::redis::RedisStore};
use tempfile::TempDir;

pub struct RedisServer {
    dir: TempDir,
    process: Option<Child>,
}

impl RedisServer {
    /// Started and answering.
    pub fn start() -> Self {
        let mut server = Self {
            dir: TempDir::new().expect("a temporary directory"),
            process: None,
        };
        server.start_again();
        server
    }

    /// With the data of the last [`RedisServer::save`], if there was one: as after a crash or a power cut.
    pub fn start_again(&mut self) {
        assert!(self.process.is_none(), "it runs already");
        let child = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no"])
            .args(["--enable-debug-command", "local", "--unixsocket"])
            .arg(self.path())
            .arg("--dir")
            .arg(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        self.process = Some(child);
        let began = Instant::now();
        while self.try_run::<String>(&["PING"]).is_err() {
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "no answer from redis-server"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Writes what there is to the disk.
    pub fn save(&self) {
        self.run::<()>(&["SAVE"]);
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.process.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(self.path());
    }

    /// Starts again with all that it knew.
    pub fn restart(&mut self) {
        self.save();
        self.kill();
        self.start_again();
    }

    /// Starts again with nothing.
    pub fn restart_empty(&mut self) {
        self.kill();
        let _ = std::fs::remove_file(self.dir.path().join("dump.rdb"));
        self.start_again();
    }

    pub fn flush(&self) {
        self.run::<()>(&["FLUSHALL"]);
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("redis.sock")
    }
    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.path().display())
    }

    pub fn run<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_run(words)
            .unwrap_or_else(|e| panic!("{words:?}: {e}"))
    }

    fn try_run<T: FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        let mut connection: Connection =
            redis::Client::open(self.url())?.get_connection_with_timeout(Duration::from_secs(5))?;
        let mut cmd = redis::Cmd::new();
        for w in words {
            cmd.arg(*w);
        }
        cmd.query(&mut connection)
    }

    /// One more client of it, as another process would have.
    pub fn store(&self) -> RedisStore {
        RedisStore::open(&self.url(), &settings(&self.url())).expect("a store")
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn settings(url: &str) -> config::Store {
    config::Store {
        url: config::StoreUrl::Redis(url.to_owned()),
        namespace: "soloist".to_owned(),
        username: None,
        password: None,
        tls: None,
        timeout: Duration::from_secs(10),
        pool_size: 4,
        min_replicas: 0,
        retry: config::StoreRetry {
            attempts: 0,
            interval: Duration::ZERO,
            exponential: false,
            max_interval: Duration::ZERO,
            jitter: false,
        },
    }
}
