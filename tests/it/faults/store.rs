//! A Redis server that is killed, emptied, rolled back, stopped or gone.

use super::LEASE_NS;
use crate::support::{
    GENEROUS,
    fleet::{Fleet, LATE_RATHER_THAN_SKIPPED, fleet},
    now_ms,
    process::boottime_ns,
    proxy::Fault,
    server::{RedisServer, Snapshot},
    trace::{ONCE, RERUN, Run},
    wait_for, wait_until,
};

/// The lease of [`holding`].
const HELD_NS: i64 = 2 * LEASE_NS;
const QUICK: [&str; 4] = ["q1", "q2", "q3", "q4"];

/// Three instances under load: four short jobs each second and a long one.
fn loaded() -> Fleet {
    let mut plan = fleet(3).witness("long", "for=2500 beat=5", "");
    for job in QUICK {
        plan = plan.witness(job, "for=5", LATE_RATHER_THAN_SKIPPED);
    }
    let fleet = plan.start();
    fleet.wait_runs(10);
    fleet.wait_holder("long");
    fleet
}

/// Waits until every job runs an occurrence from after `lost` (Unix ms), a few times.
fn wait_recovery(fleet: &Fleet, lost: i64) {
    for job in QUICK.iter().chain(&["long"]) {
        wait_until(&format!("{job} runs again"), GENEROUS, || {
            let runs = fleet.trace().runs_of(job);
            runs.iter().filter(|r| r.occurrence > lost).count() >= 2
        });
    }
}

/// A way to lose data, and what it is called.
type Way = (&'static str, fn(&mut Fleet));

/// Loses state in each way, one after the other, and looks for second runs, overlaps, and occurrences without a start
/// or a record.
#[test]
fn redis_that_lost_its_data_or_has_older_runs_nothing_twice() {
    let ways: [Way; 4] = [
        ("restarted empty", |fleet| fleet.server().restart_empty()),
        ("rolled back to an older snapshot", |fleet| {
            let old = fleet.server().snapshot();
            fleet.wait_more_runs(10);
            fleet.server().kill();
            fleet.server().revive(Some(&old));
        }),
        ("replaced under it", |fleet| {
            let copy = fleet.server().snapshot();
            fleet.wait_more_runs(8);
            replace_data(fleet, &copy);
        }),
        ("restarted with all of it", |fleet| {
            fleet.server().append_only();
            fleet.wait_more_runs(5);
            fleet.server().kill();
            fleet.server().revive(None);
        }),
    ];
    let mut fleet = loaded();
    let mut lost = 0;
    for (way, lose) in ways {
        println!("the data is {way}");
        lose(&mut fleet);
        lost = now_ms();
        wait_recovery(&fleet, lost);
    }
    fleet.stop();
    // The history of what was before is lost too.
    fleet.judge(ONCE, &["long", "q1", "q2", "q3", "q4"], Some(lost + 1000));
}

#[test]
fn a_flush_right_after_a_run_does_not_bring_its_occurrence_back() {
    // The moment when a naive claim would be granted again: the run is over, its record gone, its second not.
    let mut fleet = fleet(3).witness("a", "for=5", "").start();
    fleet.wait_runs(3);
    for _ in 0..3 {
        let run = fleet.wait_more_runs(1).pop().expect("a run");
        fleet.server().command::<()>(&["FLUSHALL"]);
        fleet.wait_run("the fleet recovers", |r| r.occurrence > run.occurrence);
    }
    fleet.stop();
    fleet.judge(ONCE, &[], None);
}

/// A trigger's key is remembered by the instances: one that runs through the loss tells the store, also if another one
/// claimed the trigger and is gone.
#[test]
fn a_key_that_was_used_before_a_flush_runs_nothing_after_it() {
    let mut fleet = fleet(2)
        .default("lease", "\"1s\"")
        .job("asked", "command = [\"{witness}\", \"{trace}\", \"for=5\"]")
        .start();
    let trigger = |fleet: &Fleet, key: &str| {
        wait_for("the job is known", GENEROUS, || {
            let out = fleet.cli(&["trigger", "asked", "--key", key, "--wait"]);
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            (!said.contains("not registered")).then_some((out.status.code(), said))
        })
    };
    assert_eq!(trigger(&fleet, "k").0, Some(0));
    let run = fleet.trace().runs_of("asked").remove(0);
    let winner = fleet.index(&run.instance);
    let other = fleet.instances[1 - winner].id.clone();
    wait_until("the other one has heard of it", GENEROUS, || {
        let words = ["why", "asked", &run.occurrence.to_string(), "--json"];
        let why = fleet.json(&words);
        let decisions = why["decisions"].as_array().expect("a list");
        decisions.iter().any(|d| d["instance"] == other.as_str())
    });
    // Only the other one knows the key now.
    fleet.instances[winner].kill();
    for round in 0..2 {
        fleet.server().command::<()>(&["FLUSHALL"]);
        let (code, said) = trigger(&fleet, "k");
        assert!(said.contains("was used before"), "{code:?} {said}");
        assert_eq!(trigger(&fleet, &round.to_string()).0, Some(0));
    }
    fleet.stop();
    let runs = fleet.trace().runs_of("asked");
    assert_eq!(runs.len(), 3, "{runs:?}");
}

/// Its holder hears that the run is not known, and has its lease put back.
#[test]
fn a_run_longer_than_its_lease_outlives_the_loss_of_all_data() {
    // For the lease see `holding`.
    let mut fleet = fleet(3)
        .default("lease", "\"4s\"")
        .witness("long", "for=9000 beat=5", "")
        .start();
    for round in 0..2 {
        let (_, run) = fleet.wait_holder("long");
        match round {
            0 => fleet.server().command::<()>(&["FLUSHALL"]),
            _ => {
                fleet.server().kill();
                fleet.server().revive(None);
            }
        }
        wait_until("the run comes to its end", GENEROUS, || {
            let runs = fleet.trace().runs_of("long");
            runs.iter().any(|r| r.run == run.run && r.ended)
        });
        wait_until("its end is recorded", GENEROUS, || {
            let records = fleet.history("long");
            let of = records.iter().find(|r| r["run_id"] == *run.run);
            of.is_some_and(|r| r["outcome"] == "succeeded")
        });
    }
    fleet.stop();
}

#[test]
fn script_flush_under_load_is_not_noticed() {
    let mut fleet = loaded();
    for _ in 0..3 {
        fleet.server().command::<()>(&["SCRIPT", "FLUSH"]);
        fleet.wait_more_runs(1);
    }
    fleet.stop();
    fleet.judge_all_started(&QUICK);
    fleet.judge(ONCE, &["long"], None);
}

/// A job that holds its lease longer than any outage here.
fn holding() -> (Fleet, Run) {
    // On a busy host a guard may get no CPU for half a second, which is all that a lease of 2 s leaves it.
    let fleet = fleet(3)
        .default("lease", "\"4s\"")
        .proxied()
        .witness(
            "held",
            "for=20000 beat=5 ignore-term daemon",
            "on_crash = \"rerun\"\nmax_attempts = 9",
        )
        .witness("quick", "for=5", "")
        .start();
    fleet.wait_runs(4);
    let (_, run) = fleet.wait_holder("held");
    (fleet, run)
}

#[test]
fn redis_away_for_longer_than_the_lease_ends_the_holders_and_starts_nothing() {
    let (mut fleet, run) = holding();
    let gone = boottime_ns();
    for proxy in &fleet.proxies {
        proxy.set(Fault::Refuse);
    }
    let lived = fleet.wait_gone(&run, gone);
    println!(
        "store gone: the holder's tree lived {} ms more, lease 4000 ms",
        lived.as_millis()
    );
    fleet.accept(&fleet.trace().orphans(&run.instance, gone + HELD_NS));
    // Longer than a quarantine too, so that nothing but the store's absence holds the fleet back.
    wait_until("twice the lease has passed", GENEROUS, || {
        boottime_ns() - gone > 2 * HELD_NS
    });
    // A claim that the store granted just before it went may still start.
    let late = fleet
        .trace()
        .runs()
        .into_iter()
        .find(|r| r.start_ns > gone + HELD_NS / 4);
    assert_eq!(late, None, "nothing starts without a store");
    let back = now_ms();
    for proxy in &fleet.proxies {
        proxy.set(Fault::None);
    }
    fleet.wait_run("quick runs again", |r| {
        r.job == "quick" && r.occurrence > back
    });
    fleet.wait_run("held runs again", |r| {
        r.job == "held" && r.start_wall_us > back * 1000
    });
    fleet.stop_all_now();
    fleet.judge(RERUN, &["quick"], None);
}

#[test]
fn a_redis_that_hangs_for_less_than_the_lease_costs_no_run() {
    let mut fleet = fleet(3)
        .default("lease", "\"3s\"")
        .witness("long", "for=2500 beat=5", "")
        .witness("quick", "for=5", "")
        .start();
    fleet.wait_runs(4);
    for round in 0..3 {
        let (_, run) = fleet.wait_holder("long");
        let begun = boottime_ns();
        match round {
            0 => fleet.server().stop(),
            1 => fleet
                .server()
                .command::<()>(&["CLIENT", "PAUSE", "700", "ALL"]),
            _ => fleet
                .server()
                .command::<()>(&["CLIENT", "PAUSE", "700", "WRITE"]),
        }
        wait_until("the hang has lasted 700 ms", GENEROUS, || {
            boottime_ns() - begun > 700_000_000
        });
        fleet.server().cont();
        wait_until(
            "the run that was going on comes to its end",
            GENEROUS,
            || {
                let runs = fleet.trace().runs_of("long");
                runs.iter().any(|r| r.run == run.run && r.ended)
            },
        );
    }
    fleet.wait_more_runs(3);
    fleet.stop();
    fleet.judge(ONCE, &["long", "quick"], None);
    let lost: Vec<_> = fleet
        .history("long")
        .into_iter()
        .filter(|r| r["outcome"] == "lease_lost" || r["outcome"] == "unknown")
        .collect();
    assert!(lost.is_empty(), "{lost:#?}");
}

#[test]
fn an_outage_of_the_store_is_named_for_what_was_planned_in_it() {
    let mut fleet = fleet(1).witness("quick", "for=5", "").start();
    fleet.wait_runs(2);
    let asked = |fleet: &Fleet, at: i64| {
        fleet.json(&["why", "quick", &at.to_string(), "--json"])["unanswered"].clone()
    };
    let before = soloist::clock::wall_us() / 1000;
    assert_eq!(asked(&fleet, before), serde_json::json!([]));
    let begun = boottime_ns();
    fleet.server().stop();
    wait_until("the outage has lasted 3 s", GENEROUS, || {
        boottime_ns() - begun > 3_000_000_000
    });
    let within = soloist::clock::wall_us() / 1000 - 1_000;
    fleet.server().cont();
    let named = wait_for("the outage is reported", GENEROUS, || {
        Some(asked(&fleet, within)).filter(|a| *a != serde_json::json!([]))
    });
    assert_eq!(named.as_array().map(Vec::len), Some(1), "{named}");
    assert_eq!(asked(&fleet, before - 1_000), serde_json::json!([]));
    fleet.stop();
}

#[test]
fn a_daemon_that_starts_without_its_store_waits_for_it() {
    let mut fleet = fleet(3)
        .store_comes_later()
        .witness("a", "for=5", "")
        .start();
    for i in &fleet.instances {
        wait_until(
            "the log says that the store cannot be reached",
            GENEROUS,
            || {
                let text = i.log_text();
                text.contains("redis.sock")
            },
        );
    }
    // Neither needs the store.
    let check = fleet.cli(&["check"]);
    assert!(check.status.success(), "{check:?}");
    let next = fleet.json(&["next", "a", "-n", "3", "--json"]);
    assert_eq!(next.as_array().map(Vec::len), Some(3), "{next}");
    // A reading command that does need one says so, with its own code.
    assert_eq!(fleet.cli(&["history", "a"]).status.code(), Some(69));
    for i in &mut fleet.instances {
        assert!(i.ended().is_none(), "{} keeps trying", i.id);
    }
    assert!(
        fleet.trace().runs().is_empty(),
        "nothing starts without a store"
    );
    fleet.server().revive(None);
    fleet.wait_runs(3);
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

/// A replica takes the place of its primary, which lives on as the replica: every connection that there is ends at a
/// server that is read-only now, and new ones at the new primary.
#[test]
fn a_promoted_replica_is_gone_on_with() {
    let mut fleet = fleet(3)
        .proxied()
        .witness("long", "for=1500 beat=5", "")
        .witness("q1", "for=5", LATE_RATHER_THAN_SKIPPED)
        .start();
    let port = fleet.server().port().to_string();
    let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &port]);
    wait_until("the replica follows", GENEROUS, || {
        let info: String = fleet.server().command(&["INFO", "replication"]);
        info.contains("state=online")
    });
    fleet.wait_more_runs(4);
    fleet.wait_holder("long");
    let port = replica.port().to_string();
    for proxy in &fleet.proxies {
        proxy.redirect(replica.port());
    }
    fleet
        .server()
        .command::<()>(&["REPLICAOF", "127.0.0.1", &port]);
    replica.command::<()>(&["REPLICAOF", "NO", "ONE"]);
    let promoted = now_ms();
    for job in ["q1", "long"] {
        wait_until(&format!("{job} runs again"), GENEROUS, || {
            let runs = fleet.trace().runs_of(job);
            runs.iter().filter(|r| r.occurrence > promoted).count() >= 2
        });
    }
    fleet.stop();
    fleet.judge(ONCE, &[], None);
    // On the new primary, and with what the old one knew.
    let state: Vec<String> = replica.command(&["HKEYS", "soloist:{q1}:state"]);
    assert!(!state.is_empty());
    let known: i64 = replica.command(&["LLEN", "soloist:{q1}:history"]);
    let ran = fleet.trace().runs_of("q1").len();
    assert!(known >= 4 && ran >= 4, "{known} records, {ran} runs");
}

/// A's data is replaced by B's, which is an older copy, and A is a primary again before anybody looks: its process and
/// its run id stay.
fn replace_data(fleet: &mut Fleet, by: &Snapshot) {
    let mut older = RedisServer::start_later();
    older.revive(Some(by));
    older.command::<()>(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    let port = older.port().to_string();
    let server = fleet.server();
    server.command::<()>(&["REPLICAOF", "127.0.0.1", &port]);
    wait_until("the data is the other's", GENEROUS, || {
        let info: String = server.command(&["INFO", "replication"]);
        info.contains("master_link_status:up")
    });
    server.command::<()>(&["REPLICAOF", "NO", "ONE"]);
}

#[test]
fn a_pause_and_a_drain_outlive_the_stores_data() {
    let mut fleet = fleet(2)
        .witness("work", "for=5", LATE_RATHER_THAN_SKIPPED)
        .witness("other", "for=5", LATE_RATHER_THAN_SKIPPED)
        .start();
    fleet.wait_runs(4);
    fleet.said(&["pause", "work", "--reason", "the disks are moved"]);
    fleet.said(&["drain", "i2"]);
    fleet.wait_record("work", "skipped");
    fleet.wait_log(1, "this instance was asked to drain");
    let before = fleet.trace().runs_of("work").len();
    fleet.server().flush();
    let lost = now_ms();
    // The fleet goes on, and the paused job does not.
    wait_until("the other job runs again", GENEROUS, || {
        let runs = fleet.trace().runs_of("other");
        runs.iter().filter(|r| r.occurrence > lost).count() >= 3
    });
    let record = fleet.wait_record("work", "skipped");
    assert_eq!(record["error"], "paused: the disks are moved");
    assert_eq!(fleet.trace().runs_of("work").len(), before);
    let by = |r: &Run| r.instance == "i2" && r.occurrence > lost;
    assert!(!fleet.trace().runs().iter().any(by), "i2 was to drain");
    let log = fleet.instances[1].log_text();
    assert!(
        !log.contains("this instance was asked to claim again"),
        "{log}"
    );
    // The later request counts.
    fleet.said(&["resume", "work"]);
    fleet.said(&["undrain", "i2"]);
    wait_until("the job runs again, and i2 works", GENEROUS, || {
        let trace = fleet.trace();
        trace.runs_of("work").len() >= before + 3 && trace.runs().iter().any(by)
    });
    fleet.stop();
}
