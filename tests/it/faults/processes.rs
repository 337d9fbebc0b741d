//! Daemons, guards and jobs that are killed, stopped, frozen, or do not end.

use std::{
    os::unix::{fs::OpenOptionsExt as _, process::ExitStatusExt as _},
    time::Duration,
};

use rustix::process::Signal;

use super::LEASE_NS;
use crate::{
    guard::TestCgroup,
    support::{
        GENEROUS,
        fleet::{Fleet, fleet, soloist},
        process::{self, boottime_ns},
        proxy::Fault,
        skip,
        trace::{ONCE, RERUN, Run},
        wait_for, wait_until, witness,
    },
};

/// Ignores SIGTERM, has a child in a session of its own and a daemon.
const STUBBORN: &str = "for=4000 beat=5 ignore-term setsid daemon";
/// The same, and does not end by itself while a test lasts.
const ENDLESS: &str = "for=300000 beat=5 life=300000 ignore-term setsid daemon";

/// The holder of `job` when its whole tree is there: command, setsid child, daemon.
fn wait_tree(fleet: &Fleet, job: &str) -> (usize, Run) {
    wait_for("the whole tree of a run is alive", GENEROUS, || {
        let run = fleet.trace().runs_of(job).pop()?;
        let whole =
            !run.ended && run.pids.len() == 3 && run.pids.iter().all(|&pid| process::alive(pid));
        whole.then(|| (fleet.index(&run.instance), run))
    })
}

/// The next attempt that was started: on a machine that is busy, one may end before its command is there.
fn takeover_of(fleet: &Fleet, run: &Run) -> Run {
    fleet.wait_run("the next attempt of the occurrence", |r| {
        r.job == run.job && r.occurrence == run.occurrence && r.attempt > run.attempt
    })
}

/// The process from which the guards of a daemon are forked.
fn zygote(daemon: u32) -> u32 {
    wait_for("a zygote", GENEROUS, || {
        let mut children = process::children(daemon).into_iter();
        children.find(|pid| process::command_line(*pid).contains("__zygote"))
    })
}

fn wait_dead<const N: usize>(pids: [u32; N]) {
    wait_until("guards and zygote are gone", GENEROUS, || {
        !pids.iter().any(|&pid| process::alive(pid))
    });
}

fn ms(ns: i64) -> i64 {
    ns / 1_000_000
}

#[test]
fn a_sigkilled_holder_leaves_no_process_and_is_taken_over() {
    let mut fleet = fleet(3)
        .default("grace", "\"50ms\"")
        // The guard tells the end long before it lapses, also on a busy host.
        .default("lease", "\"6s\"")
        .witness("long", STUBBORN, "on_crash = \"rerun\"\nmax_attempts = 5")
        .start();
    for round in 0..2 {
        let (holder, run) = wait_tree(&fleet, "long");
        let killed = boottime_ns();
        fleet.instances[holder].kill();
        let lived = fleet.wait_gone(&run, killed);
        let next = takeover_of(&fleet, &run);
        println!(
            "round {round}: SIGKILL of the daemon: its stubborn tree lived {} ms more, the takeover began after {} ms",
            lived.as_millis(),
            ms(next.start_ns - killed)
        );
        fleet.accept(&fleet.trace().orphans(&run.instance, killed + LEASE_NS));
        assert!(next.instance != run.instance);
        assert_eq!(next.trigger, "takeover");
        // Its guard settled for the dead daemon: an instance that finds a lapsed lease would record `unknown`.
        wait_until("the attempt is recorded as crashed", GENEROUS, || {
            let history = fleet.history("long");
            history
                .iter()
                .any(|r| r["outcome"] == "crashed" && r["fencing_token"] == run.token)
        });
        fleet.instances[holder].start();
    }
    fleet.stop();
    fleet.judge(RERUN, &["long"], None);
}

#[test]
fn a_crashed_run_is_recorded_and_not_repeated_by_default() {
    let mut fleet = fleet(3).witness("long", "for=3000 beat=5", "").start();
    let (holder, run) = fleet.wait_holder("long");
    let killed = boottime_ns();
    fleet.instances[holder].kill();
    fleet.wait_gone(&run, killed);
    let record = fleet.wait_record("long", "crashed");
    assert_eq!(record["fencing_token"], run.token, "{record}");
    // By the store's clock, which is this host's.
    let ms = |key: &str| -> i64 {
        let time = record[key].as_str().and_then(|t| t.parse().ok());
        time.map(jiff::Timestamp::as_millisecond)
            .unwrap_or_else(|| panic!("no {key} in {record}"))
    };
    let (started, finished) = (ms("started_at"), ms("finished_at"));
    assert!(
        (started - run.start_wall_us / 1000).abs() < 1000,
        "{record}"
    );
    let age = soloist::clock::wall_us() / 1000 - finished;
    assert!(finished > started && (0..60_000).contains(&age), "{record}");
    assert_eq!(record["duration_ms"], finished - started, "{record}");
    assert_eq!(record["lateness_ms"], started - run.occurrence, "{record}");
    fleet.wait_run("a later occurrence runs", |r| r.occurrence > run.occurrence);
    fleet.stop();
    fleet.judge(ONCE, &["long"], None);
}

/// A fleet whose first holder of `a` kills itself at this point.
fn dying_at(point: &str, lines: &str) -> (Fleet, usize, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let once = dir.path().join("once").display().to_string();
    let mut plan = fleet(3).witness("a", "for=5", lines);
    for i in 0..3 {
        plan = plan
            .env(i, "SOLOIST_FAILPOINT", point)
            .env(i, "SOLOIST_FAILPOINT_ONCE", &once);
    }
    let mut fleet = plan.start();
    let dead = wait_for("an instance kills itself", GENEROUS, || {
        (0..3).find(|&i| fleet.instances[i].ended().is_some())
    });
    (fleet, dead, dir)
}

/// The record of the occurrence whose holder died.
fn record_of_death(fleet: &Fleet) -> serde_json::Value {
    wait_for("a record of the death", GENEROUS, || {
        fleet
            .history("a")
            .into_iter()
            .find(|r| r["outcome"] == "crashed" || r["outcome"] == "unknown")
    })
}

/// Its zygote outlives the daemon, and tells the store that the command was never executed.
#[test]
fn sigkill_between_grant_and_start_has_another_instance_start_it() {
    let (mut fleet, dead, _dir) = dying_at("after_grant", "");
    let next = fleet.wait_run("a second attempt", |r| r.attempt > 1);
    let record = record_of_death(&fleet);
    assert_eq!(record["outcome"], "crashed", "{record}");
    assert_eq!(record["started_at"], serde_json::Value::Null, "{record}");
    let error = record["error"].as_str().unwrap_or_default();
    assert!(error.contains("never executed"), "{record}");
    assert_eq!(
        (crate::support::fleet::occurrence_ms(&record), next.attempt),
        (next.occurrence, 2)
    );
    fleet.instances[dead].kill();
    fleet.wait_more_runs(2);
    fleet.stop();
    let starts = fleet.trace().runs().into_iter();
    assert_eq!(
        starts.filter(|r| r.occurrence == next.occurrence).count(),
        1
    );
    fleet.judge(ONCE, &["a"], None);
}

/// As of a host that was lost.
#[test]
fn a_grant_of_a_daemon_and_a_zygote_that_died_is_recorded_and_not_repeated() {
    let (mut fleet, dead, _dir) = dying_at("after_grant,no_last_will", "");
    let record = record_of_death(&fleet);
    assert_eq!(record["outcome"], "unknown", "{record}");
    assert_eq!(
        record["instance"],
        fleet.instances[dead].id.as_str(),
        "{record}"
    );
    let lost = crate::support::fleet::occurrence_ms(&record);
    fleet.wait_run("a later occurrence runs", |r| r.occurrence > lost);
    assert!(
        fleet.trace().runs().iter().all(|r| r.occurrence != lost),
        "it was granted and not started, and is not granted again: {record}"
    );
    fleet.instances[dead].kill();
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

#[test]
fn sigkill_between_end_and_settle_repeats_nothing_that_succeeded() {
    let (mut fleet, dead, _dir) = dying_at("before_settle", "on_crash = \"rerun\"");
    let id = fleet.instances[dead].id.clone();
    let ran = wait_for("the run of the dead instance", GENEROUS, || {
        fleet.trace().runs().into_iter().rfind(|r| r.instance == id)
    });
    fleet.wait_run("a later occurrence runs", |r| r.occurrence > ran.occurrence);
    fleet.instances[dead].kill();
    fleet.stop();
    let records = fleet.history("a");
    let of_it = records
        .iter()
        .filter(|r| crate::support::fleet::occurrence_ms(r) == ran.occurrence);
    let outcomes: Vec<_> = of_it.map(|r| &r["outcome"]).collect();
    assert_eq!(outcomes, ["succeeded"], "its guard told how it ended");
    // Not even by another attempt.
    fleet.judge(ONCE, &["a"], None);
}

#[test]
fn a_stopped_daemon_loses_its_job_at_the_deadline() {
    let mut fleet = fleet(3)
        .witness("long", STUBBORN, "on_crash = \"rerun\"\nmax_attempts = 5")
        .start();
    for round in 0..2 {
        let (holder, run) = wait_tree(&fleet, "long");
        let stopped = boottime_ns();
        fleet.instances[holder].signal(Signal::STOP);
        let lived = fleet.wait_gone(&run, stopped);
        let next = takeover_of(&fleet, &run);
        println!(
            "round {round}: SIGSTOP of the daemon: its stubborn tree lived {} ms more, the takeover began after {} ms, lease 2000 ms",
            lived.as_millis(),
            ms(next.start_ns - stopped)
        );
        fleet.accept(&fleet.trace().orphans(&run.instance, stopped + LEASE_NS));
        assert!(next.instance != run.instance);
        fleet.instances[holder].signal(Signal::CONT);
        // When the old holder wakes up, its record of the lost run changes nothing for the new holder.
        let id = run.instance.clone();
        fleet.wait_run(
            "the thawed instance runs again, or the next attempt ends",
            |r| r.start_ns > next.start_ns && (r.instance == id || r.occurrence > next.occurrence),
        );
    }
    fleet.stop();
    fleet.judge(RERUN, &["long"], None);
}

/// A cgroup of our own where freezing works; None where it does not.
struct Freezer(std::path::PathBuf);

impl Freezer {
    fn create() -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
        let root = mounts
            .lines()
            .map(|l| l.split(' ').collect::<Vec<_>>())
            .find(|w| w.len() > 2 && w[2] == "cgroup2")?[1]
            .to_owned();
        let dir = std::path::Path::new(&root).join(format!(
            "frozen-by-a-test-{}-{}",
            std::process::id(),
            boottime_ns()
        ));
        std::fs::create_dir(&dir).ok()?;
        let freezer = Self(dir);
        freezer.0.join("cgroup.freeze").exists().then_some(freezer)
    }
    fn add(&self, pid: u32) -> std::io::Result<()> {
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string())
    }
    fn set(&self, frozen: bool) {
        let text = if frozen { "1" } else { "0" };
        std::fs::write(self.0.join("cgroup.freeze"), text).expect("write cgroup.freeze");
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        std::fs::write(self.0.join("cgroup.freeze"), "0").ok();
        std::fs::write(self.0.join("cgroup.kill"), "1").ok();
        let begun = std::time::Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && begun.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A holder whose daemon is frozen, and apart from it its guard and job.
struct Frozen {
    // Thawed before the fleet is stopped.
    daemon: Freezer,
    guard: Freezer,
    fleet: Fleet,
    run: Run,
    holder: usize,
}

/// Freezes the holder of a fleet of so many, for two and a half leases. None where that does not work.
fn frozen(size: usize) -> Option<Frozen> {
    let (Some(daemon), Some(guard)) = (Freezer::create(), Freezer::create()) else {
        skip("no cgroup v2 with cgroup.freeze that we may write");
        return None;
    };
    let lines = "on_crash = \"rerun\"\nmax_attempts = 5";
    let fleet = fleet(size).witness("long", ENDLESS, lines).start();
    let (holder, run) = wait_tree(&fleet, "long");
    let mut moved = daemon.add(fleet.instances[holder].pid());
    for pid in std::iter::once(fleet.guard(&run)).chain(run.pids.iter().copied()) {
        moved = moved.and_then(|()| guard.add(pid));
    }
    if let Err(e) = moved {
        skip(&format!("a process cannot be moved to a cgroup: {e}"));
        return None;
    }
    daemon.set(true);
    guard.set(true);
    let begun = boottime_ns();
    wait_until("two and a half leases have passed", GENEROUS, || {
        boottime_ns() - begun > LEASE_NS * 5 / 2
    });
    Some(Frozen {
        daemon,
        guard,
        fleet,
        run,
        holder,
    })
}

impl Frozen {
    /// The tree is dead, and was so soon after it thawed.
    fn dies(&self, thawed: i64) {
        let lived = self.fleet.wait_gone(&self.run, thawed);
        println!(
            "frozen past its lease: alive for {} ms after the thaw",
            lived.as_millis()
        );
        // At once, for which a busy host needs a while; nothing else would ever end it.
        let late = self
            .fleet
            .trace()
            .orphans(&self.run.instance, thawed + 5 * LEASE_NS);
        self.fleet.accept(&late);
    }
}

#[test]
fn a_job_that_was_frozen_with_its_daemon_and_guard_dies_when_it_thaws() {
    let Some(f) = frozen(3) else { return };
    let next = takeover_of(&f.fleet, &f.run);
    assert!(next.token > f.run.token);
    let thawed = boottime_ns();
    f.daemon.set(false);
    f.guard.set(false);
    f.dies(thawed);
    let mut fleet = f.fleet;
    assert!(process::alive(next.root), "the next attempt goes on");
    fleet.stop_all_now();
}

#[test]
fn a_guard_that_thaws_ends_its_job_although_the_daemon_stays_frozen() {
    let Some(f) = frozen(1) else { return };
    let thawed = boottime_ns();
    f.guard.set(false);
    f.dies(thawed);
    f.daemon.set(false);
    let mut fleet = f.fleet;
    takeover_of(&fleet, &f.run);
    fleet.stop_all_now();
    fleet.judge(RERUN, &[], None);
}

#[test]
fn a_daemon_that_thaws_gives_its_lease_up_although_the_store_would_renew_it() {
    let Some(f) = frozen(1) else { return };
    f.daemon.set(false);
    let log = f.fleet.instances[f.holder].log.clone();
    wait_until("the daemon says that it gives up", GENEROUS, || {
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        log.contains("could not be renewed in time")
    });
    f.guard.set(false);
    f.dies(boottime_ns());
    let mut fleet = f.fleet;
    takeover_of(&fleet, &f.run);
    fleet.stop_all_now();
    fleet.judge(RERUN, &[], None);
}

#[test]
fn a_killed_guard_costs_its_tree_and_is_reported() {
    let mut fleet = fleet(3).witness("long", STUBBORN, "").start();
    let (holder, run) = wait_tree(&fleet, "long");
    let guard = fleet.guard(&run);
    let killed = boottime_ns();
    process::signal(guard, Signal::KILL);
    let lived = fleet.wait_gone(&run, killed);
    println!("guard killed: its tree lived {} ms more", lived.as_millis());
    fleet.accept(&fleet.trace().orphans(&run.instance, killed + LEASE_NS));
    let record = wait_for("a record of the run", GENEROUS, || {
        fleet
            .history("long")
            .into_iter()
            .find(|r| r["fencing_token"] == run.token && r["outcome"] != "running")
    });
    assert!(record["outcome"] != "succeeded", "{record}");
    let error = record["error"].as_str().unwrap_or_default();
    assert!(
        error.contains("guard"),
        "the record says what happened: {record}"
    );
    assert!(
        fleet.instances[holder].ended().is_none(),
        "the daemon goes on"
    );
    fleet.wait_run("the fleet goes on", |r| r.occurrence > run.occurrence);
    fleet.stop();
    fleet.judge(ONCE, &["long"], None);
}

/// As in a container: orphans of all that runs there fall to soloist.
fn reap_as_first_process(fleet: &Fleet, words: &[&str]) -> (std::process::Child, u32) {
    let mut outside = std::process::Command::new("unshare");
    let log = std::fs::File::create(fleet.file("container.log")).expect("a log");
    outside.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    let inside = fleet.instances[0].command();
    let outside = outside
        .arg(inside.get_program())
        .args(inside.get_args())
        .args(words)
        .current_dir(inside.get_current_dir().expect("a directory"))
        .env("SOLOIST_INSTANCE", "container")
        .stderr(log)
        .spawn()
        .expect("unshare");
    let first = wait_for("soloist with a guard", GENEROUS, || {
        let first = process::children(outside.id()).pop()?;
        (!process::children(first).is_empty()).then_some(first)
    });
    for _ in 0..5 {
        let entered = std::process::Command::new("nsenter")
            .args(["--target", &first.to_string(), "--pid", "--mount", "sh"])
            .args([
                "-c",
                "for i in 1 2 3 4 5 6 7 8 9 10; do setsid sleep 1234 & done",
            ])
            .stdout(std::process::Stdio::null())
            .status();
        assert!(entered.expect("nsenter").success());
    }
    let sleepers = || {
        let mut all = process::children(first);
        all.retain(|&pid| process::command_line(pid).starts_with("sleep 1234"));
        all
    };
    wait_until("the orphans are there", GENEROUS, || sleepers().len() == 50);
    for pid in sleepers() {
        process::signal(pid, Signal::KILL);
    }
    wait_until("all are gone", GENEROUS, || {
        sleepers().is_empty() && process::zombies(first) == 0
    });
    (outside, first)
}

#[test]
fn the_first_process_of_a_container_waits_for_the_orphans_of_others() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can make a pid namespace");
    }
    let mut fleet = fleet(1).sqlite().witness("a", "for=5", "").start();
    fleet.instances[0].kill();
    let (mut outside, first) = reap_as_first_process(&fleet, &["run"]);
    let runs = fleet.trace().runs().len();
    wait_until("it goes on", GENEROUS, || {
        fleet.trace().runs().len() >= runs + 2
    });
    process::signal(first, Signal::TERM);
    assert!(outside.wait().expect("it ends").success());
    fleet.judge(ONCE, &["a"], None);

    let command = ["exec", "--lock", "a", "--", "sleep", "1000"];
    let (mut outside, first) = reap_as_first_process(&fleet, &command);
    process::signal(first, Signal::TERM);
    assert_eq!(outside.wait().expect("it ends").code(), Some(128 + 15));
}

/// The daemon is killed with its guard and its zygote; returns what is left of the run.
fn leave_behind(fleet: &mut Fleet, holder: usize, run: &Run) -> Vec<u32> {
    let guard = fleet.guard(run);
    let zygote = zygote(fleet.instances[holder].pid());
    // None is to see another die.
    fleet.instances[holder].signal(Signal::STOP);
    process::signal(zygote, Signal::KILL);
    process::signal(guard, Signal::KILL);
    fleet.instances[holder].kill();
    let all = run.pids.iter().copied();
    let left: Vec<u32> = all.filter(|&pid| process::alive(pid)).collect();
    assert!(
        left.len() >= 2,
        "the command's descendants outlive its guard: {left:?}"
    );
    left
}

#[test]
fn a_living_daemon_ends_what_another_left_that_was_killed_with_its_guard_and_its_zygote() {
    if TestCgroup::new().is_none() {
        return skip("no cgroup v2 that we may write to");
    }
    let mut fleet = fleet(2)
        .witness(
            "long",
            "for=600000 beat=5 ignore-term setsid daemon",
            "on_crash = \"rerun\"\nmax_attempts = 9",
        )
        .start();
    let (holder, run) = wait_tree(&fleet, "long");
    let left = leave_behind(&mut fleet, holder, &run);
    wait_until("the other daemon has ended them", GENEROUS, || {
        let log = fleet.instances[1 - holder].log_text();
        log.contains("ended runs that a dead soloist process left behind on this host")
    });
    assert!(!left.iter().any(|&pid| process::alive(pid)), "{left:?}");
    takeover_of(&fleet, &run);
    fleet.stop();
}

/// `ulimit -f`, LimitFSIZE=: also files in memory count.
#[test]
fn a_daemon_that_may_write_no_files_starts_its_jobs() {
    let mut fleet = fleet(1).witness("a", "for=5", "").start();
    fleet.wait_runs(1);
    let daemon = fleet.instances[0].pid().to_string();
    let mut limit = std::process::Command::new("prlimit");
    let limited = limit.args(["--pid", &daemon, "--fsize=0:"]).status();
    assert!(limited.expect("prlimit").success());
    fleet.wait_more_runs(2);
    assert!(fleet.instances[0].runs());
    fleet.stop();
}

/// Whatever happens to the processes from which guards are forked.
#[test]
fn zygotes_that_are_killed_stopped_or_frozen_cost_no_run_and_repeat_none() {
    let freezers: Vec<_> = std::iter::from_fn(Freezer::create).take(2).collect();
    if freezers.is_empty() {
        return skip("no cgroup v2 with cgroup.freeze that we may write");
    }
    let mut fleet = fleet(2).witness("a", "for=5", "").start();
    let runs = fleet.wait_runs(2).len();
    // Each of them once: what is stopped stays so.
    let mut hit = Vec::new();
    wait_until("another zygote each time", GENEROUS, || {
        for (instance, freezer) in fleet.instances.iter().zip(&freezers) {
            let zygote = process::children(instance.pid())
                .into_iter()
                .find(|pid| !hit.contains(pid) && process::command_line(*pid).contains("__zygote"));
            let Some(zygote) = zygote else { continue };
            match hit.len() % 3 {
                0 => process::signal(zygote, Signal::KILL),
                1 => process::signal(zygote, Signal::STOP),
                _ => {
                    freezer.add(zygote).expect("our own cgroup");
                    freezer.set(true);
                }
            }
            hit.push(zygote);
        }
        hit.len() >= 9
    });
    drop(freezers);
    wait_until("runs went on", GENEROUS, || {
        fleet.trace().runs().len() >= runs + 3
    });
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

#[test]
fn a_job_that_ignores_sigterm_and_daemonizes_is_gone_after_grace() {
    let mut fleet = fleet(3)
        .default("grace", "\"500ms\"")
        .witness("long", ENDLESS, "timeout = \"2s\"")
        .start();
    let (_, run) = wait_tree(&fleet, "long");
    let record = fleet.wait_record("long", "timed_out");
    fleet.wait_gone(&run, boottime_ns());
    assert_eq!(record["fencing_token"], run.token, "{record}");
    fleet.stop();
    for run in fleet.trace().runs() {
        assert!(!run.pids.iter().any(|&pid| process::alive(pid)), "{run}");
    }
    fleet.judge(ONCE, &["long"], None);
}

#[test]
fn sigterm_lets_runs_finish_and_starts_nothing() {
    let mut fleet = fleet(3).witness("long", "for=3000 beat=5", "").start();
    let (holder, run) = fleet.wait_holder("long");
    fleet.signal_all(Signal::TERM);
    for i in &mut fleet.instances {
        let status = i.wait_end();
        assert!(status.success(), "{} ended with {status}", i.id);
    }
    let runs = fleet.trace().runs();
    let last = runs.last().expect("a run");
    assert_eq!(
        last.run, run.run,
        "nothing was started during the drain: {runs:#?}"
    );
    assert!(last.ended, "the run came to its end");
    let record = fleet.wait_record("long", "succeeded");
    assert_eq!(record["fencing_token"], run.token, "{record}");
    assert_eq!(record["instance"], fleet.instances[holder].id.as_str());
}

#[test]
fn what_a_shutdown_ends_is_run_again_elsewhere_if_it_is_to_be() {
    let mut fleet = fleet(2)
        .drain("300ms")
        .witness("long", ENDLESS, "on_crash = \"rerun\"\nmax_attempts = 5")
        .witness("once", "for=300000 beat=5", "on_crash = \"fail\"")
        .start();
    let (holder, run) = wait_tree(&fleet, "long");
    let (_, once) = fleet.wait_holder("once");
    fleet.instances[holder].signal(Signal::TERM);
    let status = fleet.instances[holder].wait_end();
    assert!(status.success(), "{status}");
    fleet.wait_gone(&run, boottime_ns());
    let next = takeover_of(&fleet, &run);
    assert_eq!((next.attempt, next.trigger.as_str()), (2, "takeover"));
    assert!(next.instance != run.instance);
    let records = fleet.history("long");
    let record = records
        .iter()
        .find(|r| r["fencing_token"] == run.token)
        .expect("a record of the first attempt");
    assert_eq!(record["outcome"], "cancelled", "{record}");
    assert_eq!(record["error"], "the instance stopped", "{record}");
    fleet.stop_all_now();
    let trace = fleet.trace();
    assert!(
        !trace
            .runs_of("once")
            .iter()
            .any(|r| r.occurrence == once.occurrence && r.attempt > 1),
        "`on_crash = \"fail\"` is for shutdowns, too"
    );
    fleet.judge(RERUN, &[], None);
}

#[test]
fn an_outcome_that_the_store_could_not_hear_of_before_the_daemon_stopped_is_told_later() {
    let mut fleet = fleet(1)
        .proxied()
        .drain("100ms")
        .default("lease", "\"8s\"")
        .default("on_crash", "\"rerun\"")
        .default("max_attempts", "5")
        .witness("ends", "for=2000 beat=20", "")
        .witness("ended", "for=300000 beat=20", "")
        .start();
    let (_, ended) = fleet.wait_holder("ended");
    let (_, ends) = fleet.wait_holder("ends");
    fleet.proxies[0].set(Fault::Refuse);
    let succeeded = fleet.wait_run("the command ends while the store is away", |r| {
        r.run == ends.run && r.ended
    });
    fleet.instances[0].signal(Signal::TERM);
    let status = fleet.instances[0].wait_end();
    assert!(status.success(), "{status}");
    let log = fleet.instances[0].log_text();
    assert!(log.contains("the run's guard keeps trying"), "{log}");
    fleet.proxies[0].set(Fault::None);

    let told = |job: &str, run: &Run, outcome: &str| {
        let record = fleet.wait_record(job, outcome);
        assert_eq!(record["fencing_token"], run.token, "{record}");
        assert_eq!(record["attempt"], 1, "{record}");
    };
    told("ends", &succeeded, "succeeded");
    told("ended", &ended, "cancelled");
    // A run that succeeded is not repeated; a run that a shutdown ended is.
    fleet.instances[0].start();
    let next = takeover_of(&fleet, &ended);
    assert_eq!((next.attempt, next.trigger.as_str()), (2, "takeover"));
    fleet.wait_run("a later occurrence runs", |r| {
        r.job == "ends" && r.occurrence > ends.occurrence
    });
    fleet.stop_all_now();
    let again = |r: &Run| r.occurrence == ends.occurrence && r.attempt > 1;
    assert!(!fleet.trace().runs_of("ends").iter().any(again));
    fleet.judge(RERUN, &[], None);
}

/// A guard that is frozen when its daemon is killed; one that is stopped after that; one that is killed together with
/// its daemon.
#[test]
fn what_the_guard_of_a_killed_daemon_cannot_end_is_ended_by_its_zygote() {
    for how in ["frozen", "stopped", "killed"] {
        let Some(freezer) = TestCgroup::new() else {
            return skip("no cgroup v2 that we may write to");
        };
        let mut fleet = fleet(1).witness("a", ENDLESS, "").start();
        let (_, run) = wait_tree(&fleet, "a");
        let guard = fleet.guard(&run);
        let daemon = fleet.instances[0].pid();
        let zygote = zygote(daemon);
        if how == "killed" {
            process::signal(daemon, Signal::STOP);
            process::signal(guard, Signal::KILL);
        } else {
            if let Err(e) = freezer.add(guard) {
                return skip(&format!("a process cannot be moved to a cgroup: {e}"));
            }
            freezer.freeze(true);
        }
        let killed = boottime_ns();
        fleet.instances[0].kill();
        if how == "stopped" {
            process::signal(guard, Signal::STOP);
            freezer.freeze(false);
        }
        let lived = fleet.wait_gone(&run, killed);
        println!("{how}: alive for {} ms after the kill", lived.as_millis());
        freezer.freeze(false);
        wait_dead([guard, zygote]);
    }
}

/// Nobody else is left who could: the zygote is frozen, too, and `exec` has none. What only looks like such a guard
/// costs nobody else's run.
#[test]
fn what_a_frozen_guard_cannot_end_is_ended_by_the_next_daemon_at_its_start() {
    let Some(freezer) = TestCgroup::new() else {
        return skip("no cgroup v2 that we may write to");
    };
    let other = fleet(1).sqlite().default("lease", "\"1m\"");
    let other = other.witness("b", ENDLESS, "").start();
    let (_, stays) = wait_tree(&other, "b");
    let mut fleet = fleet(1).witness("a", ENDLESS, "").start();
    let (_, run) = wait_tree(&fleet, "a");
    let [daemon, guard] = [fleet.instances[0].pid(), fleet.guard(&run)];
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("__guard"), "sleep 1000 & wait").expect("a script");
    let mut fake = process::mortal("sh");
    fake.args(["__guard", "b", &stays.run, "of=4194305"])
        .current_dir(dir.path());
    let mut fake = fake.spawn().expect("a shell");
    let zygote = zygote(daemon);
    let mut exec = process::mortal(soloist());
    exec.arg("--config").arg(&fleet.instances[0].config);
    exec.args(["exec", "--lock", "b", "--", "sleep", "1000"]);
    let mut exec = exec.spawn().expect("soloist exec");
    let child = |of: u32, what: &str| {
        wait_for("a child", GENEROUS, || {
            let mut children = process::children(of).into_iter();
            children.find(|pid| process::command_line(*pid).contains(what))
        })
    };
    let guard_of_exec = child(exec.id(), "__guard");
    let command = child(guard_of_exec, "sleep");
    // It is not to see that its zygote can do nothing.
    process::signal(daemon, Signal::STOP);
    let mut pids = [guard, zygote, guard_of_exec].into_iter();
    let moved = pids.try_for_each(|pid| freezer.add(pid));
    freezer.freeze(true);
    child(fake.id(), "sleep");
    process::signal(fake.id(), Signal::STOP);
    let since = boottime_ns();
    fleet.instances[0].kill();
    exec.kill().expect("it lives");
    exec.wait().expect("it ends");
    if let Err(e) = moved {
        fake.kill().and_then(|()| fake.wait()).expect("it ends");
        return skip(&format!("a process cannot be moved to a cgroup: {e}"));
    }
    fleet.instances[0].start_with(|daemon| {
        daemon.env("SOLOIST_FAILPOINT", "end_helpless");
    });
    fleet.wait_gone(&run, since);
    wait_until("the command of exec is gone", GENEROUS, || {
        !process::alive(command)
    });
    wait_until("the pretender is gone", GENEROUS, || {
        fake.try_wait().is_ok_and(|status| status.is_some())
    });
    assert!(stays.pids.iter().all(|&pid| process::alive(pid)));
    fleet.wait_log(
        0,
        "ended runs that a dead soloist process left behind on this host",
    );
    freezer.freeze(false);
    wait_dead([guard, guard_of_exec, zygote]);
    fleet.stop();
}

/// The store takes connections and answers nothing. Each request of a daemon waits long for its answer.
#[test]
fn a_store_that_hangs_does_not_hold_up_the_end_of_a_daemon() {
    let mut fleet = fleet(1)
        .store("timeout = \"2500ms\"")
        .drain("1s")
        .default("lease", "\"8s\"")
        .witness("ends", "for=1000 beat=20", "")
        .witness("ended", "for=300000 beat=20", "")
        .start();
    let (_, ended) = fleet.wait_holder("ended");
    let (_, ends) = fleet.wait_holder("ends");
    fleet.server().stop();
    let succeeded = fleet.wait_run("the command ends while the store hangs", |r| {
        r.run == ends.run && r.ended
    });
    let begun = std::time::Instant::now();
    fleet.instances[0].signal(Signal::TERM);
    let status = fleet.instances[0].wait_end();
    let took = begun.elapsed();
    assert!(status.success(), "{status}");
    // A second for the drain, and two for the last requests.
    assert!(took < Duration::from_secs(8), "it took {took:?}");
    fleet.server().cont();
    let record = fleet.wait_record("ends", "succeeded");
    assert_eq!(record["fencing_token"], succeeded.token, "{record}");
    wait_until("the other outcome is told too", GENEROUS, || {
        let all = fleet.history("ended");
        let told =
            |r: &serde_json::Value| r["fencing_token"] == ended.token && r["outcome"] != "running";
        all.iter().any(told)
    });
}

/// Neither while it runs, nor while it opens the file.
#[test]
fn a_locked_file_does_not_hold_up_the_end_of_a_daemon() {
    let mut fleet = fleet(1).sqlite().witness("a", "for=5", "").start();
    fleet.wait_runs(1);
    let db = rusqlite::Connection::open(fleet.file("soloist.db")).expect("the store's file");
    db.busy_timeout(GENEROUS).expect("a patient connection");
    db.execute_batch("BEGIN IMMEDIATE").expect("a lock");
    // A run that has ended may still wait for its settlement, and is waited for.
    fleet.instances[0].signal(Signal::TERM);
    fleet.wait_log(0, "stopping: this instance claims nothing more");
    if fleet.instances[0].log_text().contains("running=0") {
        let status = fleet.instances[0].wait_end();
        assert!(status.success(), "{status}");
        let log = fleet.instances[0].log_text();
        assert!(!log.contains("without signing off"), "{log}");
    } else {
        fleet.instances[0].urge();
    }
    fleet.instances[0].start();
    let pid = fleet.instances[0].pid();
    wait_until("it catches signals", GENEROUS, || {
        process::catches(pid, Signal::TERM)
    });
    fleet.instances[0].signal(Signal::TERM);
    let status = fleet.instances[0].wait_end();
    let log = fleet.instances[0].log_text();
    assert!(status.success(), "{status}: {log}");
    assert!(log.contains("nothing has been started yet"), "{log}");
}

/// The guards of a dead daemon end their commands all at once, and must leave the CPUs to them.
#[test]
fn a_guard_whose_daemon_is_dead_has_no_real_time_priority_any_more() {
    // The 41st number is the scheduling policy.
    let script = "trap 'read -ra of < /proc/$PPID/stat; echo ${of[40]} > $POLICY; exit' TERM
        sleep 1000 & wait";
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("policy");
    let mut fleet = fleet(1)
        .sqlite()
        .job(
            "a",
            &format!(
                "schedule = \"* * * * * *\"\non_crash = \"rerun\"\nmax_attempts = 9\n\
                command = ['/bin/bash', '-c', {script:?}]\nenv.POLICY = {file:?}\n"
            ),
        )
        .start();
    let policy = wait_for("a command says its guard's policy", GENEROUS, || {
        let sleeps = |pid: u32| process::command_line(pid).starts_with("sleep");
        wait_until("its command waits", GENEROUS, || {
            let guards = process::children(fleet.instances[0].pid());
            let commands = guards.into_iter().flat_map(process::children);
            commands.flat_map(process::children).any(sleeps)
        });
        fleet.instances[0].kill();
        fleet.instances[0].start();
        // On a busy machine SIGKILL may come first.
        let said = std::fs::read_to_string(&file).ok()?;
        (!said.is_empty()).then_some(said)
    });
    assert_eq!(policy.trim(), libc::SCHED_OTHER.to_string());
}

/// The process that is being made into a command, of the instance whose guard has one.
fn starting(fleet: &Fleet) -> Option<(usize, u32)> {
    (0..fleet.instances.len()).find_map(|i| {
        let guards = process::children(fleet.instances[i].pid());
        let mut children = guards.into_iter().flat_map(process::children);
        let child = children.find(|&pid| process::command_line(pid).contains("__guard"))?;
        Some((i, child))
    })
}

#[test]
fn a_start_is_made_up_for_although_its_run_was_recorded_as_unknown_before() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let once = dir.path().join("slow");
    let lines = "schedule = \"0 0 29 2 *\"\ncommand = [\"{witness}\", \"{trace}\", \"for=20\"]";
    let mut plan = fleet(2).job("a", lines);
    for i in 0..2 {
        for (name, value) in witness::slow("execve", 100_000, &once) {
            plan = plan.env(i, &name, &value);
        }
    }
    let mut fleet = plan.start();
    wait_until("the job is known", GENEROUS, || {
        fleet.cli(&["trigger", "a", "--key", "k"]).status.success()
    });
    let (holder, child) = wait_for("a start is under way", GENEROUS, || {
        once.exists().then(|| starting(&fleet)).flatten()
    });
    let guard = process::parent(child).expect("its guard");
    process::signal(guard, Signal::STOP);
    // If it were killed, the kernel would continue its stopped guard, whose process group is orphaned then.
    fleet.instances[holder].signal(Signal::STOP);
    fleet.wait_record("a", "unknown");
    process::signal(guard, Signal::CONT);
    fleet.instances[holder].kill();
    let run = fleet.wait_run("the next attempt", |r| r.job == "a");
    assert_eq!((run.attempt, fleet.index(&run.instance)), (2, 1 - holder));
    fleet.wait_record("a", "succeeded");
    fleet.stop();
    fleet.judge(ONCE, &[], None);
}

#[test]
fn sigint_drains_and_a_second_one_ends_the_runs() {
    let mut fleet = fleet(1)
        .drain("10m")
        .witness("short", "for=1500 beat=5", "")
        .witness("long", "for=300000 beat=5", "")
        .start();
    let (_, long) = fleet.wait_holder("long");
    let (_, short) = fleet.wait_holder("short");
    // Two signals at once count as one: `timeout` and shells signal a process and its group.
    fleet.instances[0].signal(Signal::INT);
    fleet.instances[0].signal(Signal::TERM);
    let short_record = wait_for("a record of the short run", GENEROUS, || {
        let mut all = fleet.history("short").into_iter();
        all.find(|r| r["fencing_token"] == short.token && r["outcome"] != "running")
    });
    assert_eq!(short_record["outcome"], "succeeded", "{short_record}");
    assert!(process::alive(long.root), "the first lets it go on");
    let begun = boottime_ns();
    fleet.instances[0].signal(Signal::INT);
    let status = fleet.instances[0].wait_end();
    assert!(status.success(), "{status}");
    assert!(!process::alive(long.root));
    assert!(boottime_ns() - begun < 60 * LEASE_NS);
    let log = fleet.instances[0].log_text();
    assert!(log.contains("second signal"), "{log}");
    let record = fleet.wait_record("long", "cancelled");
    assert_eq!(record["fencing_token"], long.token, "{record}");
    fleet.judge(ONCE, &[], None);
}

/// The daemon reads its configuration, and its handlers are not there yet.
#[test]
fn a_signal_in_the_first_moment_of_a_daemon_is_not_lost_on_it() {
    use std::io::Write;
    let mut fleet = fleet(1).job("a", "command = [\"true\"]").start();
    fleet.stop();
    let config = fleet.instances[0].config.clone();
    let text = fleet.config_text(0);
    std::fs::remove_file(&config).expect("removed");
    let made = std::process::Command::new("mkfifo").arg(&config).status();
    assert!(made.expect("mkfifo").success());
    let reader = || {
        wait_for("it reads the configuration", GENEROUS, || {
            // To open it for writing, a process waits for a reader.
            let mut options = std::fs::File::options();
            let opened = options
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(&config);
            opened.ok()
        })
    };

    let daemon = &mut fleet.instances[0];
    std::fs::write(&daemon.log, "").expect("an empty log");
    daemon.start();
    let mut first = reader();
    daemon.signal(Signal::HUP);
    first.write_all(text.as_bytes()).expect("it is read");
    drop(first);
    fleet.wait_log(0, "jobs=1");
    let more = format!("{text}\n[jobs.b]\ncommand = [\"true\"]\n");
    reader()
        .write_all(more.as_bytes())
        .expect("it is read again");
    fleet.wait_log(0, "configuration reloaded removed=0 altered=0 added=1");
    fleet.stop();

    for signal in [Signal::TERM, Signal::INT] {
        let daemon = &mut fleet.instances[0];
        daemon.start();
        let unread = reader();
        daemon.signal(signal);
        let status = daemon.wait_end();
        assert_eq!(status.signal(), Some(signal.as_raw()), "nothing had begun");
        drop(unread);
    }
}

#[test]
fn an_outcome_that_is_told_when_the_store_is_back_comes_before_a_takeover() {
    let mut fleet = fleet(3)
        .proxied()
        .default("lease", "\"6s\"")
        .default("on_crash", "\"rerun\"")
        .default("max_attempts", "5")
        .witness("a", "for=1500 beat=20", "")
        .start();
    let (holder, run) = fleet.wait_holder("a");
    for proxy in &fleet.proxies {
        proxy.set(Fault::Refuse);
    }
    fleet.wait_run("the command ends while the store is away", |r| {
        r.run == run.run && r.ended
    });
    let cut = boottime_ns();
    wait_until("the lease is over for everybody", GENEROUS, || {
        boottime_ns() - cut > 9_000_000_000
    });
    // The others first, who have seen the lease unchanged for its whole length.
    for (i, proxy) in fleet.proxies.iter().enumerate() {
        if i != holder {
            proxy.set(Fault::None);
        }
    }
    fleet.proxies[holder].set(Fault::None);
    fleet.wait_run("a later occurrence runs", |r| r.occurrence > run.occurrence);
    let records = fleet.history("a");
    let mut of_it = records
        .iter()
        .filter(|r| crate::support::fleet::occurrence_ms(r) == run.occurrence);
    let record = of_it.next().expect("a record");
    assert_eq!(
        (&record["outcome"], of_it.count()),
        (&"succeeded".into(), 0),
        "{record}"
    );
    fleet.stop();
    let runs = fleet.trace().runs();
    let again = |r: &&Run| r.occurrence == run.occurrence && r.attempt > 1;
    assert!(!runs.iter().any(|r| again(&r)), "{runs:#?}");
    fleet.judge(RERUN, &[], None);
}
