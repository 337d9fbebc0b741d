//! A healthy fleet, and one whose clocks are wrong: each occurrence once, none early, none lost.

use std::{path::PathBuf, time::Duration};

use rustix::process::Signal;

use crate::support::{
    GENEROUS,
    fleet::{Fleet, Instance, LATE_RATHER_THAN_SKIPPED, each_second, fleet, occurrence_ms},
    proxy::Fault,
    test_seconds,
    trace::{ONCE, Run},
    wait_until,
};

/// Waits until the occurrences that ran span so many seconds.
fn wait_span(fleet: &Fleet, seconds: u64) {
    let ms = i64::try_from(seconds).expect("a few seconds") * 1000;
    wait_until(
        &format!("runs of {seconds} seconds"),
        Duration::from_secs(seconds) + GENEROUS,
        || {
            let runs = fleet.trace().runs();
            let first = runs.iter().map(|r| r.occurrence).min();
            let last = runs.iter().map(|r| r.occurrence).max();
            first.zip(last).is_some_and(|(f, l)| l - f >= ms)
        },
    );
}

fn names(n: usize) -> Vec<String> {
    (1..=n).map(|i| format!("job{i:02}")).collect()
}

#[test]
fn every_occurrence_runs_once_on_five_instances_with_wrong_clocks() {
    let jobs = names(20);
    let mut plan = fleet(5).alone().default("lease", "\"3s\"");
    for (i, clock) in [(1, "+1s"), (2, "-1s"), (3, "+3s"), (4, "-3s")] {
        plan = plan.clock(i, clock);
    }
    for job in &jobs {
        plan = plan.witness(job, "for=5 beat=2", LATE_RATHER_THAN_SKIPPED);
    }
    let mut fleet = plan.start();
    wait_span(&fleet, test_seconds());
    fleet.stop();
    let jobs: Vec<&str> = jobs.iter().map(String::as_str).collect();
    fleet.judge_all_started(&jobs);
    let wins = fleet.trace().wins();
    println!("runs of each instance: {wins:?}");
    assert_eq!(wins.len(), 5, "each instance wins now and then: {wins:?}");
}

#[test]
fn nothing_starts_early_by_the_stores_clock() {
    // Every instance is fast: only the store's clock can hold them back.
    let mut fleet = fleet(3)
        .clock(0, "+3s")
        .clock(1, "+3s")
        .clock(2, "+400ms")
        .witness("a", "for=5", LATE_RATHER_THAN_SKIPPED)
        .start();
    fleet.wait_runs(5);
    fleet.stop();
    fleet.judge_all_started(&["a"]);
}

/// Wall clocks of instances, in files that libfaketime reads.
struct WallClocks(tempfile::TempDir);

impl WallClocks {
    fn right() -> Self {
        let clocks = Self(tempfile::tempdir().expect("a temporary directory"));
        clocks.step(&[0; 3]);
        clocks
    }

    fn file(&self, i: usize) -> PathBuf {
        self.0.path().join(format!("clock{i}"))
    }

    /// Sets how many seconds each is ahead from now on.
    fn step(&self, ahead: &[i64]) {
        for (i, ahead) in ahead.iter().enumerate() {
            let new = self.file(i).with_extension("new");
            std::fs::write(&new, format!("{ahead:+}")).expect("write a clock file");
            std::fs::rename(new, self.file(i)).expect("step the clock");
        }
    }

    /// The same so many milliseconds before an instant: the answer that would put an instance right comes after it
    /// has looked for what is due.
    fn step_before_an_instant(&self, ahead: &[i64], ms: i64) {
        sleep_until_instant(-ms * 1000);
        self.step(ahead);
    }
}

/// Waits until the fleet knows that the clocks of its instances are wrong by so many seconds: they were stepped.
fn wait_stepped(fleet: &Fleet, ahead: &[i64]) {
    wait_until("the steps of the clocks are noticed", GENEROUS, || {
        let status = fleet.json(&["status", "--json"]);
        let instances = status["instances"].as_array().expect("instances");
        ahead.iter().enumerate().all(|(i, ahead)| {
            let id = format!("i{}", i + 1);
            instances.iter().any(|instance| {
                let ms = instance["clock_offset_ms"].as_f64().expect("an offset");
                instance["instance"] == id.as_str() && (ms - *ahead as f64 * 1000.0).abs() < 6e4
            })
        })
    });
}

/// Waits until each of these jobs has run two occurrences that lie after this moment.
fn wait_runs_from_now(fleet: &Fleet, jobs: &[&str]) {
    let now = now_us() / 1000;
    wait_until(&format!("{jobs:?} run on"), GENEROUS, || {
        let runs = fleet.trace().runs();
        jobs.iter().all(|job| {
            let later = |r: &&Run| r.job == *job && r.occurrence > now;
            runs.iter().filter(later).count() >= 2
        })
    });
}

/// Nothing was given up: an occurrence that did not start was held up by a run before it.
fn nothing_missed(fleet: &Fleet, job: &str) {
    let missed: Vec<_> = fleet
        .history(job)
        .into_iter()
        .filter(|r| r["outcome"] == "missed")
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn a_stepped_wall_clock_neither_repeats_nor_loses() {
    let clocks = WallClocks::right();
    let mut plan = fleet(3).witness("a", "for=5", "catch_up = \"all\"");
    for i in 0..3 {
        plan = plan.clock_file(i, &clocks.file(i));
    }
    let mut fleet = plan.start();
    fleet.wait_runs(3);
    for (ahead, ms) in [(3600, 40), (-3600, 20), (0, 60)] {
        // All of them, so that none can do it for the others.
        let ahead = [ahead, ahead, -ahead];
        clocks.step_before_an_instant(&ahead, ms);
        wait_stepped(&fleet, &ahead);
        wait_runs_from_now(&fleet, &["a"]);
    }
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
    nothing_missed(&fleet, "a");
}

#[test]
fn a_job_that_is_due_now_and_then_is_not_forgotten_when_the_wall_clock_is_stepped_back() {
    // Further apart than the timetable looks ahead: no alarm is set meanwhile, and the tick is silent for an hour.
    let clocks = WallClocks::right();
    let lines = each_second("for=5", "").replacen("* ", "*/4 ", 1);
    let mut fleet = fleet(1)
        .clock_file(0, &clocks.file(0))
        .job("a", &lines)
        .start();
    fleet.wait_runs(1);
    clocks.step(&[-3600]);
    wait_stepped(&fleet, &[-3600]);
    wait_runs_from_now(&fleet, &["a"]);
    fleet.stop();
    let missed = (fleet.trace()).misses("a", 4000, None, &fleet.recorded("a", 4000));
    fleet.accept(&missed);
    fleet.judge(ONCE, &[], None);
}

#[test]
fn three_instances_on_one_file_run_every_occurrence_once() {
    let jobs = names(20);
    let mut plan = fleet(3).alone().sqlite();
    for job in &jobs {
        plan = plan.witness(job, "for=5 beat=2", LATE_RATHER_THAN_SKIPPED);
    }
    let mut fleet = plan.start();
    wait_span(&fleet, test_seconds());
    fleet.stop();
    let jobs: Vec<&str> = jobs.iter().map(String::as_str).collect();
    fleet.judge_all_started(&jobs);
    let wins = fleet.trace().wins();
    assert!(wins.len() > 1, "wins spread over the instances: {wins:?}");
}

/// Reloads `fleet` again and again around some instants: one job is kept, of one the definition changes, of one the
/// schedule too, one comes and goes.
#[test]
fn sighup_at_the_instant_neither_repeats_nor_loses() {
    fn write(fleet: &mut Fleet, round: usize, added: bool) {
        let described = each_second("for=5", &format!("description = \"round {round}\""));
        fleet.set_job("described", Some(&described));
        // The same instants, said in another way, are another schedule.
        let changed = each_second("for=5", "").replacen("* *", ["* *", "*/1 *"][round % 2], 1);
        fleet.set_job("changed", Some(&changed));
        let lines = each_second("for=5", "");
        fleet.set_job("added", added.then_some(&*lines));
        for i in 0..fleet.instances.len() {
            fleet.write_config(i);
        }
    }
    let mut fleet = fleet(3)
        .alone()
        .witness("kept", "for=5", "")
        .witness("described", "for=5", "")
        .witness("changed", "for=5", "")
        .start();
    fleet.wait_runs(9);
    for instant in 0..10 {
        // From 30 ms before the instant (to read the file takes a few) until 5 ms after it.
        sleep_until_instant(-30_000);
        let until = now_us() + 35_000;
        let mut round = instant;
        while now_us() < until {
            write(&mut fleet, round, round % 3 == 0);
            fleet.signal_all(Signal::HUP);
            // Two signals that wait are one, so that more of them do not make it denser.
            std::thread::sleep(Duration::from_millis(2));
            round += 1;
        }
        if instant % 3 == 2 {
            wait_runs_from_now(&fleet, &["kept"]);
        }
    }
    write(&mut fleet, 1000, true);
    fleet.signal_all(Signal::HUP);
    wait_runs_from_now(&fleet, &["kept", "described", "changed", "added"]);
    fleet.stop();
    fleet.judge(ONCE, &["kept", "described", "changed"], None);
    // Signals that wait are one; but at each instant there were some.
    for i in &fleet.instances {
        let reloads = i.log_text().matches("configuration reloaded").count();
        println!("{}: {reloads} reloads", i.id);
        assert!(
            reloads >= 5,
            "{}: {reloads} reloads around ten instants",
            i.id
        );
    }
}

#[test]
fn sighup_forgets_nothing_that_waits_for_the_store() {
    let mut fleet = fleet(1)
        .proxied()
        .witness("changed", "for=5", "")
        .witness("described", "for=5", "")
        .start();
    fleet.wait_runs(4);
    for round in 0..2 {
        fleet.proxies[0].set(Fault::Refuse);
        // Some occurrences are due and cannot be claimed.
        for _ in 0..3 {
            sleep_until_instant(200_000);
        }
        let changed = each_second("for=5", "").replacen("* *", ["*/1 *", "* *"][round], 1);
        fleet.set_job("changed", Some(&changed));
        let described = each_second("for=5", &format!("description = \"round {round}\""));
        fleet.set_job("described", Some(&described));
        fleet.write_config(0);
        fleet.signal_all(Signal::HUP);
        let log = fleet.instances[0].log.clone();
        wait_until("the configuration is reloaded", GENEROUS, || {
            let log = std::fs::read_to_string(&log).unwrap_or_default();
            log.matches("configuration reloaded").count() > round
        });
        fleet.proxies[0].set(Fault::None);
        wait_runs_from_now(&fleet, &["changed", "described"]);
    }
    fleet.stop();
    fleet.judge(ONCE, &["changed", "described"], None);
}

/// Sleeps until so long after a full second, at least 50 ms from now: where a fault is to strike. On a machine that is
/// late the test says less, and does not fail.
fn sleep_until_instant(offset_us: i64) {
    let now = now_us();
    let mut at = (now / 1_000_000) * 1_000_000 + offset_us;
    while at - now < 50_000 {
        at += 1_000_000;
    }
    std::thread::sleep(Duration::from_micros(
        u64::try_from(at - now).expect("later"),
    ));
}

fn now_us() -> i64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    t.tv_sec * 1_000_000 + t.tv_nsec / 1000
}

#[test]
fn an_invalid_file_on_sighup_leaves_the_jobs_in_force() {
    let mut fleet = fleet(3).witness("a", "for=5", "").start();
    fleet.wait_runs(2);
    std::fs::write(&fleet.instances[0].config, "[jobs.a\nnonsense").expect("write");
    fleet.instances[0].signal(Signal::HUP);
    fleet.wait_more_runs(3);
    let (log, file) = (fleet.instances[0].log.clone(), "i1.toml");
    wait_until("the log names the invalid file", GENEROUS, || {
        std::fs::read_to_string(&log)
            .unwrap_or_default()
            .contains(file)
    });
    assert!(fleet.instances[0].ended().is_none(), "it goes on");
    fleet.write_config(0);
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

/// Runs every planned occurrence, however late, except those that are not owed.
const EVERYTHING: &str = "catch_up = \"all\"\nstart_within = \"10m\"\noverlap = \"queue\"\n";

/// Waits until nothing of the job has been due for so many seconds, and returns when that began (Unix ms).
fn idle_for(fleet: &Fleet, seconds: i64) -> i64 {
    let from = idle(seconds);
    assert!(fleet.instances.iter().all(|i| i.runs()));
    from
}

/// Waits for so many seconds, and returns when that began (Unix ms).
fn idle(seconds: i64) -> i64 {
    let from = now_us() / 1000;
    wait_until("time passes", GENEROUS, || {
        now_us() / 1000 > from + seconds * 1000
    });
    from
}

/// Asserts that nothing that was planned between these times (Unix ms) ran, but for a second at each end.
#[track_caller]
fn nothing_of(fleet: &Fleet, job: &str, from: i64, to: i64) {
    let runs = fleet.trace().runs_of(job);
    let mut wrong = runs
        .iter()
        .filter(|r| r.occurrence > from + 1000 && r.occurrence < to - 1000);
    assert!(wrong.next().is_none(), "run later: {runs:?}");
}

#[test]
fn what_is_planned_while_a_job_is_disabled_or_absent_is_never_run() {
    // What waits for its jitter is decided, too, when the job goes: the record of the fleet is checked.
    let lines = &format!("{EVERYTHING}jitter = \"900ms\"\n");
    let mut fleet = fleet(2).witness("work", "for=5", lines).start();
    fleet.wait_runs(2);
    let table = each_second("for=5", lines);
    for without in [Some(format!("{table}enabled = false\n")), None] {
        fleet.set_job("work", without.as_deref());
        for i in 0..2 {
            // Their files may differ otherwise.
            if without.is_none() && i == 1 {
                fleet.set_job("other", Some(&each_second("for=5", "")));
            }
            fleet.write_config(i);
            fleet.instances[i].signal(Signal::HUP);
        }
        wait_until("nobody has it", GENEROUS, || {
            let reloaded = |i: usize| fleet.instances[i].log_text().contains("reloaded");
            reloaded(0) && reloaded(1)
        });
        if without.is_some() {
            // Its instant is after some that were planned meanwhile.
            idle(2);
            fleet.said(&["trigger", "work"]);
        }
        let from = idle_for(&fleet, 4);
        // One instance is started again, the other reads the file again.
        fleet.instances[0].urge();
        fleet.set_job("work", Some(&table));
        for i in 0..2 {
            fleet.write_config(i);
        }
        let to = now_us() / 1000;
        fleet.instances[0].start();
        fleet.instances[1].signal(Signal::HUP);
        wait_until("it runs again", GENEROUS, || {
            let runs = fleet.trace().runs_of("work");
            runs.iter().filter(|r| r.occurrence > to).count() >= 3
        });
        nothing_of(&fleet, "work", from, to);
        let between = (from / 1000 + 2) * 1000;
        let why = fleet.cli(&["why", "work", &between.to_string()]);
        let why = String::from_utf8_lossy(&why.stdout).into_owned();
        assert!(why.contains("or was enabled again"), "{why}");
        for i in &fleet.instances {
            std::fs::write(&i.log, "").expect("an empty log");
        }
    }
    fleet.stop();
    // All instances are down, but the job was not removed: everything is caught up.
    let from = now_us() / 1000;
    wait_until("time passes", GENEROUS, || now_us() / 1000 > from + 3000);
    fleet.instances[0].start();
    wait_until("what was planned meanwhile runs", GENEROUS, || {
        let runs = fleet.trace().runs_of("work");
        let of = |r: &&Run| r.occurrence > from && r.occurrence < from + 3000;
        runs.iter().filter(of).count() >= 2
    });
    fleet.stop();
    fleet.judge(ONCE, &[], None);
}

/// The same if instances are started again with another file, instead of reading it again.
#[test]
fn what_is_planned_while_a_restart_has_disabled_or_removed_a_job_is_never_run() {
    let mut fleet = fleet(2).witness("work", "for=5", EVERYTHING).start();
    let table = each_second("for=5", EVERYTHING);
    let restart = |fleet: &mut Fleet, lines: Option<&str>| {
        fleet.stop();
        fleet.set_job("work", lines);
        for i in 0..fleet.instances.len() {
            std::fs::write(&fleet.instances[i].log, "").expect("an empty log");
            fleet.write_config(i);
            fleet.instances[i].start();
        }
    };
    for without in [Some(format!("{table}enabled = false\n")), None] {
        let since = now_us() / 1000;
        wait_until("it runs", GENEROUS, || {
            let runs = fleet.trace().runs_of("work");
            runs.iter().filter(|r| r.occurrence > since).count() >= 2
        });
        restart(&mut fleet, without.as_deref());
        wait_until("the store is told so", GENEROUS, || {
            let told = |i: &Instance| i.log_text().contains("does not have this job enabled");
            fleet.instances.iter().any(told)
        });
        let from = idle_for(&fleet, 4);
        let to = now_us() / 1000;
        restart(&mut fleet, Some(&table));
        wait_until("it runs again", GENEROUS, || {
            let runs = fleet.trace().runs_of("work");
            runs.iter().filter(|r| r.occurrence > to).count() >= 3
        });
        nothing_of(&fleet, "work", from, to);
    }
    fleet.stop();
    fleet.judge(ONCE, &[], None);
}

/// Daemon, guard and job are killed at once, and the daemon is started again under its name: its run from before is
/// dead, whatever its name says.
#[test]
fn a_run_of_a_former_process_of_this_name_is_not_taken_for_a_living_one() {
    let mut fleet = fleet(1)
        .default("lease", "\"6s\"")
        .witness(
            "work",
            "for=60000",
            "start_within = \"5m\"\ntimeout = \"5m\"\n",
        )
        .start();
    let (i, run) = fleet.wait_holder("work");
    let guard = fleet.guard(&run);
    fleet.instances[i].signal(Signal::STOP);
    crate::support::process::signal(guard, Signal::KILL);
    fleet.instances[i].kill();
    fleet.wait_gone(&run, 0);
    let dead = now_us() / 1000;
    fleet.instances[i].start();
    fleet.wait_record("work", "unknown");
    fleet.wait_run("the next one", |r| r.occurrence > dead);
    let skipped: Vec<_> = fleet
        .history("work")
        .into_iter()
        .filter(|r| r["outcome"] == "skipped" && occurrence_ms(r) > dead)
        .collect();
    // An occurrence may be skipped because of the next run, but not because of the dead one.
    let first = fleet.trace().runs_of("work")[1].occurrence;
    assert!(
        skipped.iter().all(|r| occurrence_ms(r) > first),
        "skipped for a dead run's sake: {skipped:?}"
    );
    fleet.stop_all_now();
}

#[test]
fn two_daemons_of_one_name_are_told_so() {
    let mut fleet = fleet(2)
        .witness("work", "for=5", LATE_RATHER_THAN_SKIPPED)
        .start();
    fleet.wait_runs(2);
    let name = fleet.instances[0].id.clone();
    fleet.instances[1].kill();
    fleet.instances[1].start_with(|c| {
        c.env("SOLOIST_INSTANCE", &name);
    });
    for i in 0..2 {
        fleet.wait_log(i, "another soloist process uses this instance's name");
    }
    fleet.stop();
    fleet.judge(ONCE, &["work"], None);
}
