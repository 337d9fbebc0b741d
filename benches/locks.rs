//! The library's locks beside rslock and two floors on one multiplexed connection, in one run and in turns, so that
//! what the machine does otherwise hits all alike. `cargo bench --bench locks`. Ratios are what to keep.
//!
//! The floors: `SET NX` and `DEL`, which is no lock that can be released safely; and two EVALSHA with as little in them
//! as a lock can have (take if free, free if mine), without token, repeated request, or anybody who is told.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use redis::aio::MultiplexedConnection;
use soloist::{LockClient, NoRetry};

const LEASE: Duration = Duration::from_secs(60);
const ROUNDS: usize = 21;
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

/// The two smallest scripts, by their SHA-1.
#[derive(Clone)]
struct Scripts {
    c: MultiplexedConnection,
    take: String,
    free: String,
}

impl Scripts {
    async fn load(mut c: MultiplexedConnection) -> Self {
        let mut shas = vec![];
        for text in [
            "return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])",
            "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
        ] {
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(text);
            shas.push(load.query_async(&mut c).await.expect("a digest"));
        }
        let [take, free] = shas.try_into().expect("two");
        Self { c, take, free }
    }
}

async fn evalsha(s: &mut Scripts, key: &str) {
    const OWNER: &str = "hostname:12345#0123456789abcdef0123456789abcdef.12345";
    let mut take = redis::cmd("EVALSHA");
    take.arg(&s.take).arg(1).arg(key).arg(OWNER).arg(60_000);
    let _: redis::Value = take.query_async(&mut s.c).await.expect("an answer");
    let mut free = redis::cmd("EVALSHA");
    free.arg(&s.free).arg(1).arg(key).arg(OWNER);
    let _: i64 = free.query_async(&mut s.c).await.expect("an answer");
}

async fn ours(c: &LockClient, key: &str) {
    let lock = c.try_lock(key, LEASE, NoRetry).await.expect("an answer");
    let lock = lock.acquired().expect("a free lock");
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

/// What a cycle took, in microseconds.
#[derive(Clone, Copy)]
struct Cost {
    wall: f64,
    /// CPU time of this process, and of the server.
    client: f64,
    server: f64,
}

fn cpu() -> f64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `t` is a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut t) };
    t.tv_sec as f64 * 1e6 + t.tv_nsec as f64 / 1e3
}

async fn server_cpu(c: &mut MultiplexedConnection) -> f64 {
    let text: String = redis::cmd("INFO")
        .arg("cpu")
        .query_async(c)
        .await
        .expect("an answer");
    let used = ["used_cpu_sys:", "used_cpu_user:"];
    let of = |name| {
        text.lines()
            .find_map(|l| l.strip_prefix(name)?.trim().parse::<f64>().ok())
    };
    used.into_iter().filter_map(of).sum::<f64>() * 1e6
}

/// One row for each of the four. `against` compares it with others of the same round: the median of the rounds' ratios
/// is less at the mercy of what else the machine does than the ratio of medians.
fn table(all: &[Vec<Cost>; 4], against: &[(&str, usize, bool)]) {
    let of = |costs: &[Cost], f: fn(&Cost) -> f64| median(costs.iter().map(f).collect());
    for (name, costs) in ["raw SET and DEL", "raw EVALSHA", "soloist", "rslock"]
        .into_iter()
        .zip(all)
    {
        let wall = of(costs, |c| c.wall);
        print!(
            "  {name:<16}{wall:7.1} us  {:9.0} cycles/s  CPU {:5.1} us here, {:5.1} us in the server",
            1e6 / wall,
            of(costs, |c| c.client),
            of(costs, |c| c.server),
        );
        for (what, other, rate) in against {
            let ratio = |(c, o): (&Cost, &Cost)| match rate {
                true => o.wall / c.wall,
                false => c.wall / o.wall,
            };
            print!(
                "  {:.2} x {what}",
                median(costs.iter().zip(&all[*other]).map(ratio).collect())
            );
        }
        println!();
    }
}

/// Of `n` cycles.
macro_rules! cost {
    ($control:ident, $n:expr, $work:expr) => {{
        let (server, client, begun) = (server_cpu(&mut $control).await, cpu(), Instant::now());
        $work;
        let n = $n as f64;
        Cost {
            wall: begun.elapsed().as_secs_f64() * 1e6 / n,
            client: (cpu() - client) / n,
            server: (server_cpu(&mut $control).await - server) / n,
        }
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

/// Tries of what another has: each asks how long that will last, and nothing else does.
async fn tries_in_vain(c: &mut MultiplexedConnection) -> f64 {
    let stats: String = redis::cmd("INFO")
        .arg("commandstats")
        .query_async(c)
        .await
        .expect("stats");
    let calls = stats.lines().find_map(|l| {
        l.strip_prefix("cmdstat_pttl:calls=")?
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
    let mut control = server.connect().await;
    let client = LockClient::open(&server.url()).expect("a client");
    let rslock = rslock::LockManager::new(vec![server.url()]);
    let mut scripts = Scripts::load(floor.clone()).await;
    for _ in 0..1000 {
        raw(&mut floor, "warm").await;
        evalsha(&mut scripts, "warm").await;
        ours(&client, "warm").await;
        theirs(&rslock, "warm").await;
    }

    println!("uncontended, lock and release, one after the other (median of {ROUNDS} rounds)");
    let mut all: [Vec<Cost>; 4] = Default::default();
    for _ in 0..ROUNDS {
        let n = 700;
        all[0].push(cost!(
            control,
            n,
            for _ in 0..n {
                raw(&mut floor, "one").await
            }
        ));
        all[1].push(cost!(
            control,
            n,
            for _ in 0..n {
                evalsha(&mut scripts, "one").await
            }
        ));
        all[2].push(cost!(
            control,
            n,
            for _ in 0..n {
                ours(&client, "one").await
            }
        ));
        all[3].push(cost!(
            control,
            n,
            for _ in 0..n {
                theirs(&rslock, "one").await
            }
        ));
    }
    table(&all, &[("SET/DEL", 0, false), ("EVALSHA", 1, false)]);

    println!("{TASKS} tasks on keys of their own");
    let mut all: [Vec<Cost>; 4] = Default::default();
    for _ in 0..ROUNDS {
        let n = TASKS * 200;
        all[0].push(cost!(control, n, {
            let _rate = together!(200, floor, |c, key| raw(&mut c, &key).await);
        }));
        all[1].push(cost!(control, n, {
            let _rate = together!(200, scripts, |c, key| evalsha(&mut c, &key).await);
        }));
        all[2].push(cost!(control, n, {
            let _rate = together!(200, client, |c, key| ours(&c, &key).await);
        }));
        all[3].push(cost!(control, n, {
            let _rate = together!(200, rslock, |c, key| theirs(&c, &key).await);
        }));
    }
    table(&all, &[("the cycles/s of rslock", 3, true)]);

    let before = tries_in_vain(&mut floor).await;
    let wins = (9 * TASKS * 50) as f64;
    let mut rates = vec![];
    for _ in 0..9 {
        rates.push(together!(50, client, |c, _key| {
            let lock = c.lock("same", LEASE, LEASE).await.expect("an answer");
            let lock = lock.acquired().expect("a lock");
            lock.release().await.expect("a release");
        }));
    }
    let tries = 1.0 + (tries_in_vain(&mut floor).await - before) / wins;
    let rate = median(rates);
    println!("{TASKS} tasks on one key (median of 9 rounds)");
    println!("  soloist lock()  {rate:9.0} cycles/s  {tries:.3} tries for each win");

    let other = LockClient::open(&server.url()).expect("a client");
    let mut late = vec![];
    for _ in 0..200 {
        let lock = client
            .try_lock("hand", LEASE, NoRetry)
            .await
            .expect("an answer")
            .acquired()
            .expect("a lock");
        let waiting = {
            let other = other.clone();
            tokio::spawn(async move {
                let lock = other.lock("hand", LEASE, LEASE).await.expect("an answer");
                (lock.acquired().expect("a lock"), Instant::now())
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
