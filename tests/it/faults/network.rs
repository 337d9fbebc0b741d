//! Requests and replies that are lost, late, cut or reset, between instances and Redis.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use soloist::{
    logic::claim::{Control, Event, State},
    model::{InstanceId, JobName},
    store::{Store as _, redis::RedisStore},
};
use tokio::sync::broadcast;

use super::LEASE_NS;
use crate::support::{
    GENEROUS,
    fleet::{Fleet, LATE_RATHER_THAN_SKIPPED, each_second, fleet},
    process::{self, boottime_ns},
    proxy::{Fault, Proxy},
    server::RedisServer,
    server::settings,
    skip,
    trace::{ONCE, RERUN},
    wait_until,
};

fn proxied() -> Fleet {
    with_long("for=1500 beat=5")
}

fn with_long(long: &str) -> Fleet {
    let fleet = fleet(3)
        .proxied()
        .witness("long", long, "")
        .witness("q1", "for=5", LATE_RATHER_THAN_SKIPPED)
        .witness("q2", "for=5", LATE_RATHER_THAN_SKIPPED)
        .start();
    fleet.wait_runs(4);
    fleet
}

/// Only a subscriber that asks notices the dead connection: then the hints of others come again.
#[tokio::test]
async fn hints_come_again_after_a_connection_that_died_in_silence() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let store = |url: &str| {
        let mut settings = settings(url);
        settings.timeout = Duration::from_millis(500);
        RedisStore::open(url, &settings).expect("a store")
    };
    let (subscriber, publisher) = (store(&proxy.url()), store(&server.url()));
    let receives = async |mut events: broadcast::Receiver<Event>| {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < GENEROUS, "no hint is received");
            let id = InstanceId::new("a");
            publisher
                .drain(&id, true, "")
                .await
                .expect("the server is there");
            let next = tokio::time::timeout(Duration::from_millis(20), events.recv());
            if let Ok(Ok(Event::Drain)) = next.await {
                return;
            }
        }
    };
    receives(subscriber.events()).await;
    proxy.forget_connections();
    // Requests that were under way before may still arrive.
    tokio::time::sleep(Duration::from_millis(200)).await;
    receives(subscriber.events()).await;
}

/// The fault on some of the instances until it has struck so often; then all is well again.
fn survives(fault: &Fault, instances: &[usize], strikes: usize) {
    let mut fleet = proxied();
    let before: Vec<usize> = fleet.proxies.iter().map(|p| p.struck()).collect();
    for &i in instances {
        fleet.proxies[i].set(fault.clone());
    }
    for &i in instances {
        wait_until(
            &format!("{fault:?} has struck i{} {strikes} times", i + 1),
            GENEROUS,
            || fleet.proxies[i].struck() - before[i] >= strikes,
        );
    }
    for proxy in &fleet.proxies {
        proxy.set(Fault::None);
    }
    let now = fleet
        .trace()
        .runs()
        .iter()
        .map(|r| r.occurrence)
        .max()
        .unwrap_or(0);
    for job in ["long", "q1", "q2"] {
        wait_until(&format!("{job} runs again"), GENEROUS, || {
            let runs = fleet.trace().runs_of(job);
            runs.iter().filter(|r| r.occurrence > now).count() >= 2
        });
    }
    for i in &mut fleet.instances {
        assert!(i.ended().is_none(), "{} outlives the fault", i.id);
    }
    fleet.stop();
    fleet.judge(ONCE, &["long", "q1", "q2"], None);
}

/// Those of the first claim of an occurrence, of one that is asked again, of renewals and of settlements.
#[test]
fn replies_that_are_lost_cost_no_run_and_repeat_none() {
    // Longer than trust lasts: without another renewal each of these runs would be lost.
    let mut fleet = with_long("for=3500 beat=5");
    // A first claim is granted with the number 1 behind the store's incarnation; one that is asked again, or has more
    // to it, with a word.
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let server = fleet.server();
    let look = runtime.block_on(async { server.store().observe(&[]).await });
    let look = look.expect("the store answers");
    let first = format!("{}\r\n:1\r\n", look.incarnation);
    let first: &'static str = first.leak();
    for reply in [first, "granted", "renewed", "done"] {
        for i in 0..3 {
            fleet.proxies[i].set(Fault::LoseReply(reply));
            wait_until(&format!("{reply:?} is lost"), GENEROUS, || {
                fleet.proxies[i].fault() == Fault::None
            });
        }
    }
    fleet.wait_more_runs(4);
    fleet.stop();
    fleet.judge_all_started(&["q1", "q2"]);
    fleet.judge(ONCE, &["long"], None);
    let lost: Vec<_> = fleet
        .history("long")
        .into_iter()
        .filter(|r| r["outcome"] == "lease_lost" || r["outcome"] == "unknown")
        .collect();
    assert!(lost.is_empty(), "{lost:#?}");
    // A busy host may let a lease run out before its command starts: such a command has no end.
    let runs = fleet.trace().runs().into_iter();
    let ended: BTreeSet<String> = runs.filter(|r| r.ended).map(|r| r.run).collect();
    for job in ["q1", "q2"] {
        for record in fleet.history(job) {
            let ended = ended.contains(record["run_id"].as_str().unwrap_or_default());
            assert_eq!(record["outcome"] == "succeeded", ended, "{record}");
        }
    }
}

/// The classic fault of a bare lock: the job is over and the lock free again when the slow instance asks for it.
#[test]
fn a_claim_that_arrives_when_the_run_is_over_repeats_nothing() {
    let mut fleet = proxied();
    for i in [1, 2] {
        fleet.proxies[i].set(Fault::DelayRequests(Duration::from_millis(180)));
    }
    let before = fleet.trace().runs().len();
    fleet.wait_runs(before + 12);
    for proxy in &fleet.proxies {
        proxy.set(Fault::None);
    }
    fleet.stop();
    fleet.judge(ONCE, &["long", "q1", "q2"], None);
}

#[test]
fn replies_that_come_two_leases_late_start_nothing_late() {
    survives(&Fault::DelayReplies(Duration::from_secs(4)), &[0, 1], 3);
}

#[test]
fn a_storm_of_resets_is_outlived() {
    survives(&Fault::Reset, &[0, 1, 2], 40);
}

#[test]
fn a_network_that_loses_four_of_ten_replies_is_outlived() {
    survives(&Fault::Lossy(40), &[0, 1, 2], 40);
}

/// Jobs that run when they are triggered only, and a client of their store.
struct Triggered {
    fleet: Fleet,
    store: RedisStore,
    runtime: tokio::runtime::Runtime,
    names: Vec<JobName>,
}

impl Triggered {
    /// One instance behind a proxy, with so many jobs that run `command`.
    fn start(jobs: usize, command: &str) -> Self {
        let mut plan = fleet(1).alone().proxied().drain("60s");
        for i in 0..jobs {
            let lines = format!("command = {command:?}\noutput = {{ log = false }}");
            plan = plan.job(&format!("j{i}"), &lines);
        }
        let mut fleet = plan.start();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let store = runtime.block_on(async { fleet.server().store() });
        let names = (0..jobs).map(|i| JobName::new(&format!("j{i}"))).collect();
        let all = Self {
            fleet,
            store,
            runtime,
            names,
        };
        wait_until("all jobs are registered", GENEROUS, || {
            all.states().iter().all(Option::is_some)
        });
        all
    }

    fn states(&self) -> Vec<Option<State>> {
        let seen = self.runtime.block_on(self.store.observe(&self.names));
        seen.expect("the server is there").value
    }

    fn trigger_all(&self) {
        for name in &self.names {
            let key = "k".to_owned();
            let ask = Control::Trigger { key };
            let done = self.runtime.block_on(self.store.control(name, &ask));
            done.expect("the server is there");
        }
    }

    /// How the runs ended.
    fn outcomes(&self) -> BTreeMap<String, usize> {
        wait_until("all have run", GENEROUS * 2, || {
            let all = self.states();
            all.iter()
                .flatten()
                .all(|s| s.last.is_some() && s.open.is_empty())
        });
        let states = self.states();
        let last = states.iter().flatten().filter_map(|s| s.last.as_ref());
        let mut ended = BTreeMap::new();
        for l in last {
            let how = format!("{} at attempt {}", l.outcome, l.attempt);
            *ended.entry(how).or_default() += 1;
        }
        ended
    }
}

/// All of them are granted in a moment, and take longer to start than a lease is trusted.
#[test]
fn what_is_due_at_once_after_a_stall_is_started_with_a_lease() {
    let mut all = Triggered::start(500, "true");
    all.fleet.proxies[0].set(Fault::Stall);
    let stalled = Instant::now();
    all.trigger_all();
    wait_until("the stall has lasted two leases", GENEROUS, || {
        stalled.elapsed() > Duration::from_secs(4)
    });
    all.fleet.proxies[0].set(Fault::None);
    // A busy host may need longer than a lease for some of so many starts. Nothing was executed then, so that another
    // attempt may follow.
    let ended = all.outcomes();
    let well = ended.iter().filter(|(how, _)| how.starts_with("succeeded"));
    assert_eq!(well.map(|(_, n)| n).sum::<usize>(), 500, "{ended:?}");
    all.fleet.stop();
}

/// Their renewals, one after the other, would take longer than the lease lasts.
#[test]
fn many_runs_keep_their_leases_over_a_long_way() {
    let keep = || {
        let mut all = Triggered::start(60, "sleep 7");
        all.fleet.proxies[0].set(Fault::DelayRequests(Duration::from_millis(20)));
        all.trigger_all();
        let ended = all.outcomes();
        all.fleet.stop();
        println!("{ended:?}");
        // A busy host may lose some.
        ended
            .get("succeeded at attempt 1")
            .is_some_and(|n| *n >= 45)
    };
    // Two thirds would be lost each time; and a host that is too busy may lose as many, but hardly again and again.
    assert!((0..3).any(|_| keep()));
}

/// The holder alone is cut off: its job is dead by the deadline, and not taken over before.
#[test]
fn a_holder_whose_replies_vanish_loses_its_job_before_the_takeover() {
    let mut fleet = fleet(3)
        .proxied()
        .witness(
            "held",
            "for=20000 beat=5 ignore-term setsid daemon",
            "on_crash = \"rerun\"\nmax_attempts = 9",
        )
        .start();
    let (holder, run) = fleet.wait_holder("held");
    let cut = boottime_ns();
    fleet.proxies[holder].set(Fault::BlackHoleDown);
    let lived = fleet.wait_gone(&run, cut);
    let next = fleet.wait_run("the next attempt", |r| {
        r.occurrence == run.occurrence && r.attempt > run.attempt
    });
    println!(
        "holder cut off: its tree lived {} ms more, the takeover began after {} ms, lease 2000 ms",
        lived.as_millis(),
        (next.start_ns - cut) / 1_000_000
    );
    fleet.accept(&fleet.trace().orphans(&run.instance, cut + LEASE_NS));
    assert!(next.instance != run.instance);
    fleet.proxies[holder].set(Fault::None);
    fleet.stop_all_now();
    let found = fleet.trace().violations(RERUN);
    fleet.accept(&found);
}

/// What a quarantine is for: the new store knows nothing of a holder that cannot tell it. The holder trusts its lease
/// for longer than the others need to come to terms with the new store.
const LONG_LEASE: &str = "\"6s\"";

#[test]
fn a_flush_while_the_holder_is_cut_off_lets_nobody_in_before_its_job_is_dead() {
    let mut fleet = fleet(3)
        .proxied()
        .default("lease", LONG_LEASE)
        .witness("held", "for=20000 beat=5 ignore-term daemon", "")
        .start();
    let (holder, run) = fleet.wait_holder("held");
    fleet.proxies[holder].set(Fault::BlackHoleUp);
    let lost = boottime_ns();
    fleet.server().command::<()>(&["FLUSHALL"]);
    let next = fleet.wait_run("the job runs elsewhere", |r| r.occurrence > run.occurrence);
    println!(
        "state lost with the holder cut off: the next run began after {} ms, lease 6000 ms",
        (next.start_ns - lost) / 1_000_000
    );
    fleet.proxies[holder].set(Fault::None);
    fleet.stop_all_now();
    fleet.judge(ONCE, &[], None);
}

/// A run goes on with the lease that it was granted with; then the store forgets it, and its holder cannot tell.
#[test]
fn a_shorter_lease_after_a_reload_makes_no_shorter_quarantine() {
    const HELD: &str = "for=60000 beat=5 ignore-term daemon";
    let mut fleet = fleet(3)
        .proxied()
        .witness("held", HELD, "lease = \"8s\"")
        .start();
    let (holder, run) = fleet.wait_holder("held");
    fleet.set_job("held", Some(&each_second(HELD, "")));
    for i in 0..3 {
        fleet.write_config(i);
        fleet.instances[i].signal(Signal::HUP);
        fleet.wait_log(i, "configuration reloaded");
    }
    fleet.proxies[holder].set(Fault::BlackHoleUp);
    fleet.server().command::<()>(&["FLUSHALL"]);
    fleet.wait_run("the job runs elsewhere", |r| r.occurrence > run.occurrence);
    fleet.proxies[holder].set(Fault::None);
    fleet.stop_all_now();
    fleet.judge(ONCE, &[], None);
}

#[test]
fn a_rollback_while_the_holder_is_cut_off_lets_nobody_in_before_its_job_is_dead() {
    // The snapshot is from before the run.
    let mut fleet = fleet(3)
        .proxied()
        .default("lease", LONG_LEASE)
        .witness(
            "held",
            "for=20000 beat=5 ignore-term daemon",
            "overlap = \"skip\"",
        )
        .store_comes_later()
        .start();
    fleet.server().revive(None);
    let old = fleet.server().snapshot();
    let (holder, run) = fleet.wait_holder("held");
    fleet.proxies[holder].set(Fault::BlackHoleUp);
    fleet.server().kill();
    fleet.server().revive(Some(&old));
    fleet.wait_run("the job runs elsewhere", |r| r.occurrence > run.occurrence);
    fleet.proxies[holder].set(Fault::None);
    fleet.stop_all_now();
    fleet.judge(ONCE, &[], None);
}

/// The old server goes on: an instance that stayed there would run what those run that start now.
#[test]
fn an_instance_follows_the_name_of_the_server_and_takes_its_lease_along() {
    let old = RedisServer::start();
    let port = old.port().to_string();
    let new = RedisServer::start_with(&["--bind", "127.0.0.2", "--port", &port]);
    let mut fleet = fleet(1)
        .job(
            "long",
            "schedule = \"* * * * * *\"\ncommand = \"until test -e {trace}.end; do sleep 0.05; done\"\n",
        )
        .on(old)
        .start();
    let hosts = fleet.file("hosts");
    // In place: the mount is of this very file.
    let means = |ip: &str| std::fs::write(&hosts, format!("{ip} store.test\n")).expect("hosts");
    means("127.0.0.1");
    let mut probe = std::process::Command::new("true");
    process::show_in_place(&mut probe, &hosts, c"/etc/hosts");
    if !probe.status().is_ok_and(|status| status.success()) {
        return skip("cannot mount another /etc/hosts");
    }
    fleet.instances[0].urge();
    fleet.instances[0].url = format!("redis://store.test:{port}");
    fleet.write_config(0);
    fleet.instances[0].start_with(|run| process::show_in_place(run, &hosts, c"/etc/hosts"));
    let running = |server: &RedisServer| {
        let instances: Vec<String> = server.command(&["HVALS", "soloist:instances"]);
        instances.iter().any(|info| info.contains("long"))
    };
    wait_until("a run begins", GENEROUS, || running(fleet.server()));
    means("127.0.0.2");
    fleet.wait_log(
        0,
        "now means 127.0.0.2, this instance is connected to 127.0.0.1",
    );
    wait_until("its run goes on at the new server", GENEROUS, || {
        running(&new)
    });
    std::fs::write(fleet.trace_file().with_extension("end"), "").expect("a file");
    wait_until("the new server has its end", GENEROUS, || {
        let all: Vec<String> = new.command(&["LRANGE", "soloist:{long}:history", "0", "-1"]);
        all.iter().any(|record| record.contains("\"succeeded\""))
    });
    fleet.instances[0].urge();
}
