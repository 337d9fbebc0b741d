//! A healthy fleet, and one whose clocks are wrong: each occurrence once, none early, none lost.

use std::time::Duration;

use rustix::process::Signal;

use crate::support::{
    GENEROUS,
    fleet::{Fleet, each_second, fleet},
    test_seconds,
    trace::ONCE,
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
        plan = plan.witness(job, "for=5 beat=2", "");
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
fn twelve_contenders_at_one_instant_are_granted_once() {
    let mut fleet = fleet(12).alone().witness("a", "for=5", "").start();
    // All of them are there, not the first one alone.
    wait_until("all twelve instances are seen", GENEROUS, || {
        let cli = fleet.cli(&["status", "--json"]);
        let text = String::from_utf8_lossy(&cli.stdout).into_owned();
        (1..=12).all(|i| text.contains(&format!("\"i{i}\"")))
    });
    let after = fleet.trace().runs().len();
    fleet.wait_runs(after + 4);
    fleet.stop();
    fleet.judge_all_started(&["a"]);
}

#[test]
fn nothing_starts_early_by_the_stores_clock() {
    // Every instance is fast: only the store's clock can hold them back.
    let mut fleet = fleet(3)
        .clock(0, "+3s")
        .clock(1, "+3s")
        .clock(2, "+400ms")
        .witness("a", "for=5", "")
        .start();
    fleet.wait_runs(5);
    fleet.stop();
    fleet.judge_all_started(&["a"]);
}

#[test]
fn a_stepped_wall_clock_neither_repeats_nor_loses() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let clocks = [dir.path().join("one"), dir.path().join("two")];
    let step = |to: [&str; 2]| {
        for (clock, to) in clocks.iter().zip(to) {
            let new = clock.with_extension("new");
            std::fs::write(&new, to).expect("write a clock file");
            std::fs::rename(new, clock).expect("step the clock");
        }
    };
    step(["+0", "+0"]);
    let mut fleet = fleet(3)
        .clock_file(0, &clocks[0])
        .clock_file(1, &clocks[1])
        .witness("a", "for=5", "")
        .start();
    fleet.wait_runs(3);
    for to in [
        ["+3600", "+0"],
        ["+3600", "-3600"],
        ["-3600", "+3600"],
        ["+0", "+0"],
    ] {
        step(to);
        fleet.wait_more_runs(3);
    }
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

#[test]
fn a_lone_instance_survives_steps_of_its_wall_clock() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let clock = dir.path().join("clock");
    let step = |to: &str| {
        let new = clock.with_extension("new");
        std::fs::write(&new, to).expect("write a clock file");
        std::fs::rename(new, &clock).expect("step the clock");
    };
    step("+0");
    let mut fleet = fleet(1)
        .clock_file(0, &clock)
        .witness("a", "for=5", "")
        .start();
    fleet.wait_runs(2);
    for to in ["+3600", "-3600", "+0"] {
        step(to);
        fleet.wait_more_runs(3);
    }
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

#[test]
fn three_instances_on_one_file_run_every_occurrence_once() {
    let jobs = names(20);
    let mut plan = fleet(3).alone().sqlite();
    for job in &jobs {
        plan = plan.witness(job, "for=5 beat=2", "");
    }
    let mut fleet = plan.start();
    wait_span(&fleet, test_seconds());
    fleet.stop();
    let jobs: Vec<&str> = jobs.iter().map(String::as_str).collect();
    fleet.judge_all_started(&jobs);
    let wins = fleet.trace().wins();
    assert!(wins.len() > 1, "wins spread over the instances: {wins:?}");
}

#[test]
fn a_file_survives_the_sigkill_of_its_writers() {
    let mut fleet = fleet(3)
        .sqlite()
        .witness("a", "for=5", "")
        .witness("b", "for=5", "")
        .witness("c", "for=300", "on_crash = \"rerun\"")
        .start();
    fleet.wait_runs(4);
    for i in [0, 1, 2, 0] {
        fleet.instances[i].kill();
        fleet.instances[i].start();
        fleet.wait_more_runs(4);
    }
    fleet.stop();
    let found = fleet.trace().violations(crate::support::trace::RERUN);
    fleet.accept(&found);
    fleet.judge(crate::support::trace::RERUN, &["a", "b", "c"], None);
}

#[test]
fn an_idle_instance_that_is_sigkilled_costs_no_occurrence() {
    let mut fleet = fleet(3).witness("a", "for=5", "").start();
    fleet.wait_runs(3);
    let run = fleet.wait_more_runs(1).pop().expect("a run");
    let idle = (fleet.index(&run.instance) + 1) % 3;
    fleet.instances[idle].kill();
    fleet.wait_more_runs(4);
    fleet.instances[idle].start();
    fleet.wait_more_runs(3);
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

#[test]
fn sighup_at_the_instant_neither_repeats_nor_loses() {
    let mut fleet = fleet(3)
        .witness("kept", "for=5", "")
        .witness("changed", "for=5", "")
        .start();
    fleet.wait_runs(4);
    for round in 0..10_i64 {
        // From 5 ms before the instant to 4 ms after it.
        let offset_us = (round - 5) * 1000;
        // The same instants, said in another way, are another schedule.
        let description = format!("description = \"round {round}\"");
        let changed = each_second("for=5", &description);
        let changed = changed.replacen("* *", ["* *", "*/1 *"][(round % 2) as usize], 1);
        fleet.set_job("changed", Some(&changed));
        let added = each_second("for=5", "");
        fleet.set_job("added", (round % 2 == 0).then_some(&*added));
        for i in 0..3 {
            fleet.write_config(i);
        }
        let now = now_us();
        let next = (now / 1_000_000 + 1) * 1_000_000 + offset_us;
        let next = if next - now < 50_000 {
            next + 1_000_000
        } else {
            next
        };
        std::thread::sleep(Duration::from_micros(
            u64::try_from(next - now).expect("later"),
        ));
        fleet.signal_all(Signal::HUP);
    }
    fleet.set_job("added", Some(&each_second("for=5", "")));
    for i in 0..3 {
        fleet.write_config(i);
    }
    fleet.signal_all(Signal::HUP);
    let last = now_us() / 1000;
    for job in ["kept", "changed", "added"] {
        wait_until(&format!("{job} runs on"), GENEROUS, || {
            let runs = fleet.trace().runs_of(job);
            runs.iter().filter(|r| r.occurrence > last).count() >= 2
        });
    }
    fleet.stop();
    fleet.judge(ONCE, &["kept", "changed"], None);
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
