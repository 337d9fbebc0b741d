//! Planned instant to the first line of the command, with one and with ten thousand other jobs loaded.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use soloist::clock::wall_us;

use crate::{
    daemon::{self, Daemon},
    program::{self, NOW},
    support::{Redis, Sample, Table, directory, establish, runtime, seconds, wait_for},
};

const IDLE: [usize; 2] = [0, 10_000];

pub fn run(table: &mut Table, server: &Redis) {
    for idle in IDLE {
        server.flush();
        runtime().block_on(async { establish(&*server.store()).await });
        one(table, &server.url(), "Redis", idle, "", |_| {});
        one(table, "sqlite:soloist.db", "SQLite", idle, "", |_| {});
    }
}

/// With these further lines of the configuration, and with what `beside` begins once the daemon runs.
pub fn one(
    table: &mut Table,
    url: &str,
    store: &str,
    idle: usize,
    more: &str,
    beside: impl FnOnce(&Path),
) {
    let (_keep, dir) = directory();
    let (starts, floor) = (dir.join("starts"), dir.join("floor"));
    let job = format!(
        "[jobs.even-seconds]\nschedule = \"*/2 * * * * *\"\ncommand = [\"{}\", \"{NOW}\", \"{}\"]\n",
        program::path().display(),
        starts.display()
    );
    let config = daemon::config(&dir, url, idle, &format!("{more}{job}"));
    let daemon = Daemon::start(&dir, &config, "a");
    wait_for("a first run", || lines(&starts) >= 2);
    beside(&dir);
    let skip = lines(&starts);
    // At the odd seconds the same program is started without soloist: the same machine, the same minute, and whatever
    // else happens on full seconds.
    for _ in 0..seconds().div_ceil(2) {
        let at = (wall_us() / 2_000_000 + 1) * 2_000_000 + 1_000_000;
        until(at);
        let status = Command::new(program::path())
            .args([NOW.as_ref(), floor.as_os_str()])
            .env("SOLOIST_OCCURRENCE_MS", (at / 1000).to_string())
            .stdin(Stdio::null())
            .status();
        assert!(status.is_ok_and(|s| s.success()));
    }
    daemon.stop();
    let (ours, floor) = (read(&starts, skip), read(&floor, 0));
    let show = |s: &Sample| {
        format!(
            "p50 {:.2}, p99 {:.2}, max {:.2} ms of {}",
            s.p50(),
            s.p99(),
            s.max(),
            s.len()
        )
    };
    let name = format!(
        "start lateness above the spawn floor, {store}, {} jobs",
        idle + 1
    );
    let from = format!("{} / floor {}", show(&ours), show(&floor));
    table.row(
        &format!("{name}: p50"),
        ours.p50() - floor.p50(),
        "ms",
        2.0,
        from.clone(),
    );
    table.row(
        &format!("{name}: p99"),
        ours.p99() - floor.p99(),
        "ms",
        5.0,
        from,
    );
}

/// Sleeps until the wall clock shows `at` (Unix microseconds), exactly.
fn until(at: i64) {
    let when = libc::timespec {
        tv_sec: at / 1_000_000,
        tv_nsec: at % 1_000_000 * 1000,
    };
    // SAFETY: a valid timespec, and nobody wants to know how much is left.
    while unsafe {
        libc::clock_nanosleep(
            libc::CLOCK_REALTIME,
            libc::TIMER_ABSTIME,
            &raw const when,
            std::ptr::null_mut(),
        )
    } == libc::EINTR
    {}
}

fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).map_or(0, |t| t.lines().count())
}

/// Lateness in ms of each start after the first `skip`, each planned instant once.
fn read(path: &Path, skip: usize) -> Sample {
    let began = Instant::now();
    let text = loop {
        match std::fs::read_to_string(path) {
            Ok(text) => break text,
            Err(e) => assert!(
                began.elapsed() < Duration::from_secs(1),
                "{}: {e}",
                path.display()
            ),
        }
    };
    let mut seen = std::collections::HashSet::new();
    let values = text.lines().skip(skip).map(|line| {
        let (planned, started) = line.split_once(' ').expect("two figures");
        assert!(seen.insert(planned), "{planned} was started twice");
        let (planned, started): (f64, f64) =
            (planned.parse().expect("ms"), started.parse().expect("us"));
        started / 1000.0 - planned
    });
    Sample::new(values.collect())
}
