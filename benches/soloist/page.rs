//! How quick the page is in a browser, with many jobs and many runs.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use serde::Deserialize;

use crate::{
    daemon::{self, Daemon},
    http::{Client, JOBS, LINES, all_runs, drain, have_run},
    program::{self, NOW},
    support::{Redis, Sample, Table, directory},
};

/// Of each job.
const RUNS: usize = 100;
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/page/run.sh");
/// A screen shows one each 16.7 ms; with this one of them is left out. Chromium's times are rounded to 0.1 ms.
const FRAME: f64 = 33.5;

/// What the script has measured: times in ms, the heap in bytes.
#[derive(Deserialize)]
struct Found {
    first: Vec<f64>,
    again: Vec<f64>,
    scroll: Vec<f64>,
    /// The frames of a page with as many rows of plain text, scrolled in the same way, in turns with ours.
    floor: Vec<f64>,
    filter: Vec<f64>,
    heap: f64,
    /// When the page said that the job runs, since 1970.
    seen: Vec<f64>,
}

pub fn run(table: &mut Table, server: &Redis) {
    have_run(server, JOBS, RUNS);
    let (_keep, dir) = directory();
    let starts = dir.join("starts");
    let job = format!(
        "[jobs.each-second]\nschedule = \"* * * * * *\"\ncommand = \"'{}' {NOW} '{}'; sleep 0.4\"\n",
        program::path().display(),
        starts.display()
    );
    let config = daemon::config(&dir, &server.url(), JOBS, &format!("{LINES}{job}"));
    let (a, b) = (
        Daemon::start(&dir, &config, "a"),
        Daemon::start(&dir, &config, "b"),
    );
    let mut client = Client::new(&dir);
    all_runs(&mut client, JOBS);
    // So that the other one runs it.
    drain(&dir, &config, "a");
    let found = measured(&client.url());
    a.stop();
    b.stop();
    if let Some(found) = found {
        rows(table, found, &starts);
    }
}

/// None: something that it needs is not installed.
fn measured(url: &str) -> Option<Found> {
    let output = Command::new("sh")
        .args([SCRIPT, "speed", url])
        .env("SOLOIST", env!("CARGO_BIN_EXE_soloist"))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .expect("sh");
    let said = String::from_utf8_lossy(&output.stdout);
    if said.starts_with("skipped") {
        eprint!("  {said}");
        return None;
    }
    assert!(output.status.success(), "{SCRIPT}: {}", output.status);
    Some(serde_json::from_str(&said).expect("what the script found"))
}

fn rows(table: &mut Table, found: Found, starts: &Path) {
    let opened = [
        ("nothing in the cache", found.first),
        ("with the cache", found.again),
    ];
    for (with, times) in opened {
        let times = Sample::new(times);
        let name =
            format!("page, {JOBS} jobs with {RUNS} runs: opened until its rows are seen, {with}");
        let from = format!(
            "least {:.0}, most {:.0} ms of {}",
            times.quantile(0.0),
            times.max(),
            times.len()
        );
        table.row(&name, times.p50(), "ms", 300.0, from);
    }
    for (what, times) in [("scroll", found.scroll), ("filter", found.filter)] {
        let times = Sample::new(times);
        let name = format!("page: frames while it {what}s, p99");
        let from = format!(
            "p50 {:.1}, most {:.1} ms of {}",
            times.p50(),
            times.max(),
            times.len()
        );
        table.row(&name, times.p99(), "ms", FRAME, from);
    }
    let floor = Sample::new(found.floor);
    let name = "… while this browser scrolls as many rows of plain text, p99";
    let from = format!("most {:.1} ms of {}", floor.max(), floor.len());
    table.note(name, floor.p99(), "ms", from);
    let name = "a command's first line on another instance to the page: max";
    let times = Sample::new(after(&found.seen, starts));
    let from = format!("p50 {:.0} ms of {}", times.p50(), times.len());
    table.row(name, times.max(), "ms", 200.0, from);
    let name = "page: memory of its script";
    table.note(name, found.heap / 1e6, "MB", String::new());
}

/// How long after the start next to it each was seen.
fn after(seen: &[f64], starts: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(starts).unwrap_or_default();
    let started: Vec<f64> = text
        .lines()
        .filter_map(|line| line.split_once(' ')?.1.parse().ok())
        .map(|us: f64| us / 1000.0)
        .collect();
    // It may be seen before its first line.
    let next_to = |seen: f64| started.iter().map(|at| seen - at).find(|d| *d < 500.0);
    seen.iter().filter_map(|seen| next_to(*seen)).collect()
}
