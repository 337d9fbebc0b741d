//! The library's locks beside rslock and the floor (raw commands on one multiplexed connection), in one run and in turns, so
//! that what the machine does otherwise hits all alike. `cargo bench --bench locks`. Ratios are what to keep.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use redis::aio::MultiplexedConnection;
use soloist::{LockClient, NoRetry};

const LEASE: Duration = Duration::from_secs(60);
const ROUNDS: usize = 7;
const TASKS: usize = 64;

struct Server {
    dir: tempfile::TempDir,
    process: Child,
}

impl Server {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--unixsocket"])
            .arg(dir.path().join("redis.sock"))
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        Self { dir, process }
    }
    fn url(&self) -> String {
        format!(
            "redis+unix://{}",
            self.dir.path().join("redis.sock").display()
        )
    }
    async fn connect(&self) -> MultiplexedConnection {
        let client = redis::Client::open(self.url()).expect("a URL");
        loop {
            if let Ok(c) = client.get_multiplexed_async_connection().await {
                return c;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn raw(c: &mut MultiplexedConnection, key: &str) {
    let mut set = redis::cmd("SET");
    set.arg(key).arg("owner").arg("NX").arg("PX").arg(60_000);
    let _: redis::Value = set.query_async(c).await.expect("an answer");
    let _: i64 = redis::cmd("DEL")
        .arg(key)
        .query_async(c)
        .await
        .expect("an answer");
}

async fn ours(c: &LockClient, key: &str) {
    let lock = c.try_lock(key, LEASE, NoRetry).await.expect("an answer");
    let lock = lock.taken().expect("a free lock");
    lock.release().await.expect("a release");
}

async fn theirs(c: &rslock::LockManager, key: &str) {
    let lock = c.lock(key, LEASE).await.expect("a free lock");
    c.unlock(&lock).await;
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Microseconds for one, of `n` one after the other.
macro_rules! one_by_one {
    ($n:expr, $work:expr) => {{
        let begun = Instant::now();
        for _ in 0..$n {
            $work;
        }
        begun.elapsed().as_secs_f64() * 1e6 / $n as f64
    }};
}

/// Cycles in a second of 64 tasks that do `n` each; `$work` has a name for its key.
macro_rules! together {
    ($n:expr, $c:expr, |$client:ident, $key:ident| $work:expr) => {{
        let begun = Instant::now();
        let tasks: Vec<_> = (0..TASKS)
            .map(|i| {
                #[allow(unused_mut)]
                let mut $client = $c.clone();
                tokio::spawn(async move {
                    let $key = format!("key-{i}");
                    for _ in 0..$n {
                        $work;
                    }
                })
            })
            .collect();
        for t in tasks {
            t.await.expect("a task");
        }
        (TASKS * $n) as f64 / begun.elapsed().as_secs_f64()
    }};
}

async fn evals(c: &mut MultiplexedConnection) -> f64 {
    let stats: String = redis::cmd("INFO")
        .arg("commandstats")
        .query_async(c)
        .await
        .expect("stats");
    let calls = stats.lines().find_map(|l| {
        l.strip_prefix("cmdstat_evalsha:calls=")?
            .split(',')
            .next()?
            .parse()
            .ok()
    });
    calls.unwrap_or(0.0)
}

#[tokio::main]
async fn main() {
    let server = Server::start();
    let mut floor = server.connect().await;
    let client = LockClient::open(&server.url()).expect("a client");
    let rslock = rslock::LockManager::new(vec![server.url()]);
    for _ in 0..1000 {
        raw(&mut floor, "warm").await;
        ours(&client, "warm").await;
        theirs(&rslock, "warm").await;
    }

    let (mut a, mut b, mut c) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        a.push(one_by_one!(3000, raw(&mut floor, "one").await));
        b.push(one_by_one!(3000, ours(&client, "one").await));
        c.push(one_by_one!(3000, theirs(&rslock, "one").await));
    }
    let (raw_us, ours_us, theirs_us) = (median(a), median(b), median(c));
    println!("uncontended, lock and release, one after the other (median of {ROUNDS} rounds)");
    println!("  raw SET and DEL {raw_us:7.1} us");
    println!(
        "  soloist         {ours_us:7.1} us  {:.2} x raw",
        ours_us / raw_us
    );
    println!(
        "  rslock          {theirs_us:7.1} us  {:.2} x raw",
        theirs_us / raw_us
    );

    let (mut a, mut b, mut c) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        a.push(together!(200, floor, |c, key| raw(&mut c, &key).await));
        b.push(together!(200, client, |c, key| ours(&c, &key).await));
        c.push(together!(200, rslock, |c, key| theirs(&c, &key).await));
    }
    let (raw_s, ours_s, theirs_s) = (median(a), median(b), median(c));
    println!("{TASKS} tasks on keys of their own");
    println!("  raw             {raw_s:9.0} cycles/s");
    println!(
        "  soloist         {ours_s:9.0} cycles/s  {:.2} x rslock",
        ours_s / theirs_s
    );
    println!("  rslock          {theirs_s:9.0} cycles/s");

    let before = evals(&mut floor).await;
    let wins = (TASKS * 50) as f64;
    let rate = together!(50, client, |c, _key| {
        let lock = c.lock("same", LEASE, LEASE).await.expect("an answer");
        let lock = lock.taken().expect("a lock");
        lock.release().await.expect("a release");
    });
    let tries = (evals(&mut floor).await - before - wins) / wins;
    println!("{TASKS} tasks on one key");
    println!("  soloist lock()  {rate:9.0} cycles/s  {tries:.3} tries for each win");

    let other = LockClient::open(&server.url()).expect("a client");
    let mut late = vec![];
    for _ in 0..200 {
        let lock = client
            .try_lock("hand", LEASE, NoRetry)
            .await
            .expect("an answer")
            .taken()
            .expect("a lock");
        let waiting = {
            let other = other.clone();
            tokio::spawn(async move {
                let lock = other.lock("hand", LEASE, LEASE).await.expect("an answer");
                (lock.taken().expect("a lock"), Instant::now())
            })
        };
        let channel = "soloist:{hand}:released";
        loop {
            let (_, n): (String, i64) = redis::cmd("PUBSUB")
                .arg("NUMSUB")
                .arg(channel)
                .query_async(&mut floor)
                .await
                .expect("a count");
            if n == 1 {
                break;
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        let released = Instant::now();
        lock.release().await.expect("a release");
        let (got, at) = waiting.await.expect("a task");
        late.push(at.duration_since(released).as_secs_f64() * 1e6);
        got.release().await.expect("a release");
    }
    late.sort_by(f64::total_cmp);
    println!("a waiter of another client has the lock so long after its release was asked for");
    println!(
        "  soloist         {:7.0} us median, {:.0} us p99",
        late[100], late[197]
    );
}
