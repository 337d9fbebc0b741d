//! Many at once: a thousand wake-ups of one occurrence, and ten thousand occurrences at one instant.

use std::{
    collections::HashSet,
    fmt::Write as _,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use redis::Cmd;
use soloist::{
    clock::{StoreClock, wall_us},
    config::Config,
    contender::{Ask, Contender, ContestEnd, Due, Epoch, Parts, PlanUpdate},
    logic::claim::Target,
    model::{InstanceId, JobName, Occurrence, RunId, Trigger},
    store::Decision,
};
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    claim::{TAKE, script},
    support::{self, Redis, Row, Table, Used, establish, runtime},
};

const OCCURRENCES: usize = 10_000;
const WAKEUPS: usize = 1000;
const ROUNDS: usize = 5;

/// An instance without what runs commands: it only notes what it was granted.
struct Instance {
    contender: Arc<Contender>,
    granted: Arc<Mutex<Vec<(JobName, Occurrence)>>>,
    tasks: TaskTracker,
    // Their other ends would complain if these were gone.
    _journal: mpsc::Receiver<Decision>,
    _plans: mpsc::UnboundedReceiver<PlanUpdate>,
}

impl Instance {
    async fn start(name: &str, server: &Redis, config: &Config, epoch: &Epoch) -> Self {
        let granted = Arc::new(Mutex::new(vec![]));
        let (journal, journal_end) = mpsc::channel(20_000);
        let (plans, plans_end) = mpsc::unbounded_channel();
        let tasks = TaskTracker::new();
        let parts = Parts {
            store: server.store(),
            clock: Arc::new(StoreClock::default()),
            instance: InstanceId::new(name),
            host: name.to_owned(),
            retry: config.store.retry.clone(),
            max_parallel: None,
            journal,
            plans,
            health: std::sync::Arc::default(),
            last_will: None,
            stop: CancellationToken::new(),
            tasks: tasks.clone(),
        };
        let note = granted.clone();
        let contender = Arc::new(Contender::build(
            parts,
            Box::new(move |g| {
                note.lock()
                    .expect("nobody panics with it")
                    .push((g.job.name.clone(), g.run.occurrence));
            }),
        ));
        for job in config.jobs.values() {
            contender.set_job(job.clone());
        }
        let left = contender.register(epoch).await.expect("registered");
        assert_eq!(left, 0, "all jobs are registered");
        Self {
            contender,
            granted,
            tasks,
            _journal: journal_end,
            _plans: plans_end,
        }
    }
}

fn config(jobs: usize) -> Config {
    let mut text = String::from("[defaults]\nschedule = \"@yearly\"\ncommand = [\"true\"]\n");
    for i in 0..jobs {
        let _ = writeln!(text, "[jobs.job-{i:05}]");
    }
    support::config(&text)
}

pub fn wakeups(table: &mut Table, server: &Redis) {
    let runtime = runtime();
    let (calls, grants) = runtime.block_on(async {
        let epoch = establish(&*server.store()).await;
        let one = Instance::start("a", server, &config(1), &epoch).await;
        // Else the first EVALSHA is answered that the script is not there, and sent again.
        server.load(script("claim"));
        let job = JobName::new("job-00000");
        let at = wall_us() / 1000;
        let before = server.used().calls;
        let callers: Vec<_> = (0..WAKEUPS)
            .map(|_| {
                let ask = Ask {
                    target: Target::Scheduled(Occurrence(at)),
                    missed: vec![],
                    trigger: Trigger::Schedule,
                    start_by: at + 60_000,
                    next_attempt: false,
                };
                let contest = one.contender.contest(&job, ask);
                tokio::spawn(contest)
            })
            .collect();
        for caller in callers {
            let outcome = caller.await.expect("no panic");
            // Settled: came when it was won already.
            let known = matches!(outcome, ContestEnd::Won(_) | ContestEnd::Settled);
            assert!(known, "{outcome:?}");
        }
        let grants = one.granted.lock().expect("no panic").len();
        (server.used().calls - before, grants)
    });
    assert_eq!(grants, 1, "the lease went to one of them");
    table.row(
        "1,000 wake-ups of one occurrence",
        calls as f64,
        "claims",
        1.0,
        format!("{WAKEUPS} callers of Contender::contest, {grants} grant"),
    );
}

pub fn run(table: &mut Table, server: &Redis) {
    let runtime = runtime();
    let config = config(OCCURRENCES);
    for instances in [1, 3] {
        let (mut ours, mut floor, mut like) = (vec![], vec![], vec![]);
        for _ in 0..ROUNDS {
            server.flush();
            ours.push(runtime.block_on(contest(server, &config, instances)));
            floor.push(runtime.block_on(raw(server, instances, TAKE)));
            like.push(runtime.block_on(raw(server, instances, RECORDING)));
        }
        // The best of each: what the machine does besides can only add.
        let [ours, floor, like] = [ours, floor, like].map(|runs| best(&runs));
        let name = format!("10,000 occurrences at one instant, {instances} instance(s)");
        let show = |u: &Spent| {
            format!(
                "cpu {:.0} ms, in scripts {:.0} ms, wall {:.0} ms, {} calls",
                u.used.cpu_us / 1e3,
                u.used.script_us / 1e3,
                u.wall.as_secs_f64() * 1e3,
                u.used.calls
            )
        };
        let n = OCCURRENCES * instances;
        table.row(
            &format!("{name}: server busy / {n} SET NX, pipelined"),
            ours.used.cpu_us / floor.used.cpu_us,
            "",
            1.5,
            format!("{} / {}", show(&ours), show(&floor)),
        );
        table.note(
            &format!("{name}: server busy / {n} recording claims, pipelined"),
            ours.used.cpu_us / like.used.cpu_us,
            "",
            show(&like),
        );
        table.note(
            &format!("{name}: wall time / {n} SET NX, pipelined"),
            ours.wall.as_secs_f64() / floor.wall.as_secs_f64(),
            "",
            "client and server share the cores".to_owned(),
        );
        table.add(Row {
            what: format!("{name}: granted"),
            figure: "each once".to_owned(),
            target: "each once".to_owned(),
            met: Some(true), // `contest` gives up otherwise
            from: format!("{ROUNDS} rounds"),
        });
    }
}

/// A claim that does what once per occurrence needs and nothing else: decided by the server's clock and incarnation,
/// recorded with its holder in one step, the same answer for the same nonce.
const RECORDING: &str = r"
local t = redis.call('TIME')
local incarnation = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local st = redis.call('HMGET', KEYS[1], 'newest', 'incarnation', 'run', 'holder')
if st[2] and st[2] ~= incarnation then return {'quarantined'} end
local at, now = tonumber(ARGV[2]), tonumber(t[1]) * 1000 + tonumber(t[2]) / 1000
if now < at then return {'early', at - now} end
if st[1] and at <= tonumber(st[1]) then
  if st[3] == ARGV[1] then return {'granted'} end
  return {'running', st[4]}
end
redis.call('HSET', KEYS[1], 'newest', ARGV[2], 'incarnation', incarnation, 'run', ARGV[1], 'holder', ARGV[3])
return {'granted'}";

#[derive(Clone, Copy)]
struct Spent {
    used: Used,
    wall: Duration,
}

fn best(runs: &[Spent]) -> Spent {
    let least = |f: fn(&Spent) -> f64| runs.iter().map(f).fold(f64::INFINITY, f64::min);
    Spent {
        used: Used {
            calls: runs[0].used.calls,
            script_us: least(|s| s.used.script_us),
            cpu_us: least(|s| s.used.cpu_us),
        },
        wall: Duration::from_secs_f64(least(|s| s.wall.as_secs_f64())),
    }
}

/// All occurrences become due on all instances at once, until all of them know how each was decided.
async fn contest(server: &Redis, config: &Config, n: usize) -> Spent {
    let epoch = establish(&*server.store()).await;
    let mut fleet = vec![];
    for i in 0..n {
        fleet.push(Instance::start(&format!("instance-{i}"), server, config, &epoch).await);
    }
    let live: Arc<[InstanceId]> = fleet
        .iter()
        .map(|i| i.contender.me.instance.clone())
        .collect();
    let at = wall_us() / 1000;
    let due: Vec<Due> = config
        .jobs
        .keys()
        .map(|job| Due {
            job: job.clone(),
            target: Target::Scheduled(Occurrence(at)),
            start_at: at,
            start_by: at + 60_000,
            overdue: false,
            missed: vec![],
        })
        .collect();
    let dues = vec![due; n];
    let before = server.used();
    let began = Instant::now();
    for (instance, due) in fleet.iter().zip(dues) {
        instance.contender.set_live(live.clone());
        let contender = instance.contender.clone();
        instance.tasks.spawn(async move { contender.due(due) });
        instance.tasks.close();
    }
    for instance in &fleet {
        instance.tasks.wait().await;
    }
    let wall = began.elapsed();
    let used = server.used() - before;
    let mut granted = HashSet::new();
    for instance in &fleet {
        for (job, occurrence) in instance.granted.lock().expect("no panic").iter() {
            assert_eq!(*occurrence, Occurrence(at));
            assert!(granted.insert(job.clone()), "{job} was granted twice");
        }
    }
    assert_eq!(granted.len(), OCCURRENCES, "each was granted");
    Spent { used, wall }
}

/// As many raw claims, each an EVALSHA of its own, pipelined on a connection for each instance.
async fn raw(server: &Redis, n: usize, script: &str) -> Spent {
    server.flush();
    let sha = server.load(script);
    let client = redis::Client::open(server.url()).expect("a client");
    let settings = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let at = (wall_us() / 1000).to_string();
    let mut fleet = vec![];
    for i in 0..n {
        let connection = client
            .get_multiplexed_async_connection_with_config(&settings)
            .await
            .expect("a connection");
        let mut pipe = redis::pipe();
        for job in 0..OCCURRENCES {
            let owner = RunId::random().to_string();
            let mut call = Cmd::new();
            call.arg("EVALSHA")
                .arg(&sha)
                .arg(1)
                .arg(format!("floor:{{job-{job:05}}}:state"))
                .arg(owner);
            if script == TAKE {
                call.arg("15000");
            } else {
                call.arg(&at).arg(format!("instance-{i}"));
            }
            pipe.add_command(call);
        }
        fleet.push((connection, pipe));
    }
    let before = server.used();
    let began = Instant::now();
    let asks: Vec<_> = fleet
        .into_iter()
        .map(|(mut connection, pipe)| {
            tokio::spawn(async move {
                let answers: Vec<redis::Value> =
                    pipe.query_async(&mut connection).await.expect("answers");
                assert_eq!(answers.len(), OCCURRENCES);
            })
        })
        .collect();
    for ask in asks {
        ask.await.expect("no panic");
    }
    Spent {
        wall: began.elapsed(),
        used: server.used() - before,
    }
}
