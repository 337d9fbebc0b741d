//! Part of the tests of `tests/it`: the harness runs for a moment, so that it does not rot.

use std::time::Duration;

use super::{Options, judge::Kind, run};

#[test]
fn the_harness_finds_no_broken_promise_in_a_moment() {
    a_moment(false);
}

#[test]
fn the_harness_finds_no_broken_promise_while_jobs_come_and_go() {
    a_moment(true);
}

fn a_moment(come_and_go: bool) {
    let out = tempfile::tempdir().expect("a temporary directory");
    let report = run(&Options {
        lasts: Duration::from_secs(13),
        least_faults: 3,
        calm: Duration::from_secs(8),
        seed: 1,
        instances: 3,
        at_once: 2,
        out: out.path().into(),
        only: vec![],
        come_and_go,
        bursts: None,
        every: None,
        until_broken: false,
        quiet: true,
    });
    let log = || std::fs::read_to_string(out.path().join("log")).unwrap_or_default();
    // What counts seconds is for a host that has nothing else to do.
    let counts_seconds = [Kind::Orphan, Kind::Lost, Kind::Silence, Kind::NotEnded];
    let broken = report.verdict.broken();
    let broken: Vec<_> = broken
        .filter(|f| !counts_seconds.contains(&f.kind))
        .collect();
    assert!(broken.is_empty() || report.first_broken.is_some());
    assert!(broken.is_empty(), "{broken:#?}\n{}", log());
    assert!(report.faults >= 3, "{}", log());
    // Of a job that comes and goes few must have a record.
    assert!(
        report.verdict.judged >= 10 || come_and_go,
        "{}",
        report.table
    );
}
