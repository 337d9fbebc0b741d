//! Claim and settle of one occurrence through [`RedisStore`], against two raw EVALSHA on the same kind of connection.

use std::{future::Future, sync::Arc, time::Instant};

use bb8_redis::{RedisConnectionManager, bb8::Pool};
use redis::Cmd;
use soloist::{
    clock::wall_us,
    logic::claim::{Answer, Claim, OnCrash, Overlap, Settle, Settlement, Target},
    model::{InstanceId, JobName, Occurrence, Outcome, RunId, RunRecord, Trigger},
    store::{HISTORY_KEPT, Store, Tail, redis::RedisStore},
};

use crate::support::{Redis, Sample, Table, establish, runtime};

/// The least that takes a lock and releases it.
pub const TAKE: &str =
    "if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end return 0";
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// A script of the program's own.
pub fn script(name: &str) -> &'static str {
    soloist::store::redis::script(name).expect("a script of this name")
}

/// Jobs that take turns, so that each rests for some milliseconds between two occurrences, as real ones do.
const JOBS: usize = 24;
const ROUNDS: usize = 3000;

pub fn run(table: &mut Table, server: &Redis) {
    let runtime = runtime();
    let (take, release) = (server.load(TAKE), server.load(RELEASE));
    let (claim, settle) = (server.load(script("claim")), server.load(script("settle")));
    let url = server.url();
    let _inside = runtime.enter();
    let store = server.store();
    // On a worker, where the daemon's tasks are too.
    let task = runtime.spawn(async move {
        let ours = Ours::new(store).await;
        let raw = Raw {
            pool: pool(&url).await,
            take,
            release,
        };
        let scripts = Scripts {
            pool: raw.pool.clone(),
            claim,
            settle,
        };
        // Until the histories are full: from then on each settlement drops an old record, for ever.
        for i in 0..JOBS * HISTORY_KEPT + JOBS {
            ours.cycle(i).await;
            scripts.cycle(i).await;
            raw.cycle(i).await;
        }
        let mut times: [Vec<f64>; 3] = std::array::from_fn(|_| Vec::with_capacity(ROUNDS));
        for i in 0..ROUNDS {
            // In turns, so that whatever else the machine does hits all of them alike.
            for k in 0..3 {
                let which = (i + k) % 3;
                times[which].push(match which {
                    0 => timed(raw.cycle(i)).await,
                    1 => timed(scripts.cycle(i)).await,
                    _ => timed(ours.cycle(i)).await,
                });
            }
        }
        times.map(Sample::new)
    });
    let [raw, scripts, ours] = runtime.block_on(task).expect("measured");
    let show = |s: &Sample| format!("p50 {:.0} us, p99 {:.0} us", s.p50(), s.p99());
    table.row(
        "claim + settle / the same two scripts, raw",
        ours.p50() / scripts.p50(),
        "",
        1.10,
        format!("{} / {}", show(&ours), show(&scripts)),
    );
    table.row(
        "claim + settle / SET NX and owner-checked DEL, raw",
        ours.p50() / raw.p50(),
        "",
        1.10,
        format!("{} / {}", show(&ours), show(&raw)),
    );
    table.note(
        "the same two scripts, raw / SET NX and DEL, raw",
        scripts.p50() / raw.p50(),
        "",
        "what the scripts themselves cost".to_owned(),
    );
}

async fn timed(f: impl Future<Output = ()>) -> f64 {
    let began = Instant::now();
    f.await;
    began.elapsed().as_secs_f64() * 1e6
}

async fn pool(url: &str) -> Pool<RedisConnectionManager> {
    Pool::builder()
        .max_size(8)
        .min_idle(Some(1))
        .test_on_check_out(false)
        .build(RedisConnectionManager::new(url).expect("a URL"))
        .await
        .expect("a pool")
}

async fn eval(pool: &Pool<RedisConnectionManager>, call: &Cmd) -> redis::Value {
    let mut c = pool.get().await.expect("a connection");
    call.query_async(&mut *c).await.expect("an answer")
}

fn call(sha: &str, keys: &[&str], args: &[&str]) -> Cmd {
    let mut c = redis::cmd("EVALSHA");
    c.arg(sha).arg(keys.len()).arg(keys).arg(args);
    c
}

struct Raw {
    pool: Pool<RedisConnectionManager>,
    take: String,
    release: String,
}

impl Raw {
    async fn cycle(&self, i: usize) {
        let key = format!("floor:{{job-{:02}}}:lock", i % JOBS);
        let owner = RunId::random().to_string();
        let got = eval(&self.pool, &call(&self.take, &[&key], &[&owner, "15000"])).await;
        assert_eq!(got, redis::Value::Int(1), "taken");
        let got = eval(&self.pool, &call(&self.release, &[&key], &[&owner])).await;
        assert_eq!(got, redis::Value::Int(1), "released");
    }
}

/// What [`RedisStore`] sends, byte for byte, without it.
struct Scripts {
    pool: Pool<RedisConnectionManager>,
    claim: String,
    settle: String,
}

impl Scripts {
    async fn cycle(&self, i: usize) {
        let claimed = self.claim(i).await;
        self.settle(claimed).await;
    }

    async fn claim(&self, i: usize) -> Claimed {
        let job = format!("raw-{:02}", i % JOBS);
        let [state, history] = ["state", "history"].map(|what| format!("soloist:{{{job}}}:{what}"));
        let at = wall_us() / 1000;
        let run = RunId::random().to_string();
        let (at_text, by) = (at.to_string(), (at + 60_000).to_string());
        let entry = format!(
            r#""run":"{run}","instance":"bench","host":"bench","lease":15000,"definition":"0123456789abcdef""#
        );
        let args = [
            "bench",
            "bench",
            "soloist:events",
            &job,
            &at_text,
            "0",
            &run,
            &by,
            "skip",
            "schedule",
            &entry,
            "",
            "",
        ];
        let claim = call(&self.claim, &[&state, &history], &args);
        // 1: granted as asked.
        assert_eq!(word(&eval(&self.pool, &claim).await), "1");
        Claimed {
            job,
            state,
            history,
            at,
            run,
        }
    }

    async fn settle(&self, c: Claimed) {
        let output = format!("soloist:{{{}}}:output:{}", c.job, c.run);
        let record = serde_json::to_string(&record(&c.job, c.at, &c.run)).expect("JSON");
        let at = c.at.to_string();
        let args = [
            &c.run,
            &at,
            "succeeded",
            &record,
            "soloist:events",
            "",
            "0",
            &c.job,
            "",
            "0",
            "0",
            "1",
            "",
            "",
        ];
        let settle = call(&self.settle, &[&c.state, &c.history, &output], &args);
        assert_eq!(word(&eval(&self.pool, &settle).await), "done");
    }
}

struct Claimed {
    job: String,
    state: String,
    history: String,
    at: i64,
    run: String,
}

/// The third part of a script's answer, or the first word of that.
fn word(answer: &redis::Value) -> String {
    let redis::Value::Array(parts) = answer else {
        return format!("{answer:?}");
    };
    match parts.get(2) {
        Some(redis::Value::Array(words)) => word_of(words.first()),
        other => word_of(other),
    }
}
fn word_of(value: Option<&redis::Value>) -> String {
    value
        .and_then(|v| redis::from_redis_value(v.clone()).ok())
        .unwrap_or_default()
}

struct Ours {
    store: Arc<RedisStore>,
}

impl Ours {
    async fn new(store: Arc<RedisStore>) -> Self {
        let epoch = establish(&*store).await;
        let jobs: Vec<_> = (0..JOBS)
            .flat_map(|i| [format!("job-{i:02}"), format!("raw-{i:02}")])
            .map(|name| registration(&name, &epoch.incarnation))
            .collect();
        store.register(&jobs).await.expect("registered");
        Self { store }
    }

    async fn cycle(&self, i: usize) {
        let job = format!("job-{:02}", i % JOBS);
        let at = wall_us() / 1000;
        let claim = claim(&job, at, "bench");
        let reply = self
            .store
            .claim(std::slice::from_ref(&claim))
            .await
            .expect("an answer");
        assert!(
            matches!(reply.value[0], Answer::Granted(_)),
            "{:?}",
            reply.value
        );
        let settle = Settle {
            run: claim.run,
            record: record(&job, at, &claim.run.to_string()),
            next_attempt: None,
        };
        let reply = self
            .store
            .settle(&settle, &Tail::default())
            .await
            .expect("an answer");
        assert_eq!(reply.value, Settlement::Done);
    }
}

pub fn registration(job: &str, incarnation: &str) -> soloist::logic::claim::Register {
    soloist::logic::claim::Register {
        job: JobName::new(job),
        schedule: "bench".to_owned(),
        definition: "0123456789abcdef".to_owned(),
        known: Occurrence(0),
        adopt: Some(incarnation.to_owned()),
        epoch: None,
        lost: vec![],
        counted_from: i64::MAX,
        lost_before: 0,
        presence: soloist::logic::claim::Presence::New,
        owed: vec![],
        back_at: 0,
        waits_since: 0,
        remembered: Default::default(),
        instance: InstanceId::new("bench"),
        host: "bench".to_owned(),
        on_crash: OnCrash::Fail,
        max_attempts: 1,
    }
}

pub fn claim(job: &str, at: i64, instance: &str) -> Claim {
    Claim {
        job: JobName::new(job),
        target: Target::Scheduled(Occurrence(at)),
        known: Occurrence(0),
        missed: vec![],
        run: RunId::random(),
        instance: InstanceId::new(instance),
        host: instance.to_owned(),
        trigger: Trigger::Schedule,
        start_by: at + 60_000,
        lease: 15_000,
        overlap: Overlap::Skip,
        on_crash: OnCrash::Fail,
        max_attempts: 1,
        definition: "0123456789abcdef".to_owned(),
        observed: None,
        holds: vec![],
        cause: None,
    }
}

pub fn record(job: &str, at: i64, run: &str) -> RunRecord {
    RunRecord {
        run_id: run.parse().ok(),
        job: JobName::new(job),
        occurrence: Occurrence(at),
        trigger: Trigger::Schedule,
        attempt: 1,
        fencing_token: None,
        instance: Some(InstanceId::new("bench")),
        host: Some("bench".to_owned()),
        started_at: Some(at + 1),
        finished_at: Some(at + 2),
        lateness_ms: Some(1),
        duration_ms: Some(1),
        outcome: Outcome::Succeeded,
        exit_code: Some(0),
        signal: None,
        output_tail: String::new(),
        output_truncated: false,
        error: None,
        count: 1,
        usage: soloist::model::Usage::default(),
        waited: None,
        by: None,
    }
}
