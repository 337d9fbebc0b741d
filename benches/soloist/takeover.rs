//! How soon another instance runs an occurrence again whose holder died, and how long the old command lived.

use std::{collections::BTreeMap, path::Path, time::Duration};

use rustix::process::{Pid, Signal, kill_process};
use soloist::{
    clock::wall_us,
    logic::claim::Control,
    model::JobName,
    store::{Store, redis::RedisStore},
};

use crate::{
    daemon::{self, Daemon},
    program::{self, HOLD},
    support::{Redis, Sample, Table, directory, establish, runtime, wait_for},
};

const LEASE: Duration = Duration::from_secs(3);
const DAEMONS: usize = 10;
const HOSTS: usize = 4;

#[derive(Clone, Copy, PartialEq)]
enum Dies {
    Daemon,
    Host,
}

pub fn run(table: &mut Table, server: &Redis) {
    let runtime = runtime();
    let _inside = runtime.enter();
    let store = server.store();
    runtime.block_on(async { establish(&*store).await });
    let (_keep, dir) = directory();
    let job = format!(
        "[jobs.held]\ncommand = [\"{}\", \"{HOLD}\", \"{}\"]\non_crash = \"rerun\"\nmax_attempts = 9\nlease = \"{}s\"\n",
        program::path().display(),
        dir.display(),
        LEASE.as_secs()
    );
    let config = daemon::config(&dir, &server.url(), 0, &job);
    let mut fleet: BTreeMap<String, Daemon> = ["a", "b", "c"]
        .map(|name| (name.to_owned(), Daemon::start(&dir, &config, name)))
        .into();
    let held = JobName::new("held");
    let mut results = BTreeMap::new();
    for (what, rounds) in [(Dies::Daemon, DAEMONS), (Dies::Host, HOSTS)] {
        let (mut takeovers, mut lived) = (vec![], vec![]);
        for _ in 0..rounds {
            wait_for("three instances", || {
                let fleet = runtime.block_on(store.heartbeat(None));
                fleet.is_ok_and(|f| {
                    f.value
                        .instances
                        .values()
                        .filter(|i| i.seen * 1000 > wall_us() - 2_000_000)
                        .count()
                        == 3
                })
            });
            let known = starts(&dir).len();
            trigger(&runtime, &store, &held);
            wait_for("the first attempt", || starts(&dir).len() > known);
            let first = starts(&dir)[known].clone();
            assert_eq!(first.attempt, 1);
            // Some renewals.
            std::thread::sleep(LEASE / 2);
            let victim = fleet.remove(&first.instance).expect("one of ours");
            let killed = match what {
                Dies::Daemon => {
                    let now = wall_us();
                    victim.kill();
                    now
                }
                Dies::Host => {
                    // All at once: none of them sees another one die.
                    let all = [first.guard, victim.pid() as i32, first.pid]
                        .map(|pid| Pid::from_raw(pid).expect("a pid"));
                    for pid in all {
                        let _ = kill_process(pid, Signal::STOP);
                    }
                    let now = wall_us();
                    for pid in all {
                        let _ = kill_process(pid, Signal::KILL);
                    }
                    victim.kill();
                    now
                }
            };
            wait_for("the second attempt", || starts(&dir).len() > known + 1);
            let second = starts(&dir)[known + 1].clone();
            assert_eq!(second.attempt, 2);
            assert_ne!(second.instance, first.instance);
            takeovers.push((second.at - killed) as f64 / 1000.0);
            let beat = std::fs::read(dir.join(format!("beat-{}", first.pid))).expect("beats");
            let beat = i64::from_le_bytes(beat.try_into().expect("eight bytes"));
            assert!(beat < second.at, "the two attempts overlapped");
            lived.push((beat - killed).max(0) as f64 / 1000.0);
            wait_for("its end", || {
                let states = runtime
                    .block_on(store.observe(std::slice::from_ref(&held)))
                    .expect("an answer");
                states.value[0].as_ref().is_some_and(|s| s.open.is_empty())
            });
            let again = Daemon::start(&dir, &config, &first.instance);
            fleet.insert(first.instance, again);
        }
        results.insert(
            what == Dies::Host,
            (Sample::new(takeovers), Sample::new(lived)),
        );
    }
    for (_, daemon) in fleet {
        daemon.stop();
    }
    let (takeover, lived) = &results[&false];
    let show = |s: &Sample| {
        format!(
            "p50 {:.0} ms, max {:.0} ms of {}",
            s.p50(),
            s.max(),
            s.len()
        )
    };
    table.row(
        "SIGKILL of the holder's daemon to the second attempt: max",
        takeover.max(),
        "ms",
        250.0,
        format!("{}; the old command lived {}", show(takeover), show(lived)),
    );
    table.row("the same: p50", takeover.p50(), "ms", 14.0, String::new());
    let (takeover, _) = &results[&true];
    table.row(
        "loss of the holder's host to the second attempt: max / lease",
        takeover.max() / 1000.0 / LEASE.as_secs_f64(),
        "",
        1.10,
        format!("{}, lease {LEASE:?}", show(takeover)),
    );
}

fn trigger(runtime: &tokio::runtime::Runtime, store: &RedisStore, job: &JobName) {
    let key = wall_us().to_string();
    // Refused until a daemon has registered the job.
    wait_for("the job in the store", || {
        let trigger = Control::Trigger { key: key.clone() };
        let answer = runtime
            .block_on(store.control(job, &trigger))
            .expect("an answer");
        answer.value == soloist::logic::claim::Controlled::Done
    });
}

#[derive(Debug, Clone)]
struct Started {
    attempt: u32,
    instance: String,
    pid: i32,
    guard: i32,
    at: i64,
}

fn starts(dir: &Path) -> Vec<Started> {
    let text = std::fs::read_to_string(dir.join("starts")).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            Some(Started {
                attempt: words.next()?.parse().ok()?,
                instance: words.next()?.to_owned(),
                pid: words.next()?.parse().ok()?,
                guard: words.next()?.parse().ok()?,
                at: words.next()?.parse().ok()?,
            })
        })
        .collect()
}
