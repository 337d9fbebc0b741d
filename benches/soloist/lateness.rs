//! Planned instant to the first line of the command, with one and with ten thousand other jobs loaded.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use soloist::clock::wall_us;
use tempfile::TempDir;

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
        one(table, &server.url(), "Redis", idle, "");
        one(table, "sqlite:soloist.db", "SQLite", idle, "");
    }
}

/// With these further lines of the configuration.
pub fn one(table: &mut Table, url: &str, store: &str, idle: usize, more: &str) {
    in_turns(
        table,
        idle,
        &[Kind {
            name: store,
            url,
            more,
            beside: |_, _| {},
        }],
    );
}

/// One of the daemons that are compared.
pub struct Kind<'a> {
    pub name: &'a str,
    pub url: &'a str,
    /// Further lines of its configuration.
    pub more: &'a str,
    /// Begun once the daemon runs, with its directory.
    pub beside: fn(&Path, Turn),
}

/// Which seconds are a daemon's: the `nth` of each `of`.
#[derive(Clone, Copy)]
pub struct Turn {
    nth: usize,
    of: usize,
}

impl Turn {
    /// Its instant is near, or has just been.
    pub fn is_near(self) -> bool {
        let (nth, of) = (self.nth as i64, self.of as i64);
        (wall_us() / 1000 - 1000 * nth + 400).rem_euclid(1000 * of) < 800
    }

    /// The next one, Unix seconds.
    fn next(self) -> i64 {
        let (nth, of) = (self.nth as i64, self.of as i64);
        ((wall_us() / 1_000_000 - nth).div_euclid(of) + 1) * of + nth
    }

    fn schedule(self) -> String {
        let seconds = (self.nth..60).step_by(self.of);
        let seconds: Vec<String> = seconds.map(|s| s.to_string()).collect();
        format!("{} * * * * *", seconds.join(","))
    }
}

struct Running {
    keep: TempDir,
    starts: PathBuf,
    skip: usize,
    daemon: Daemon,
}

/// Daemons that start something in turns, so that they have the same minutes of the machine; at the last second of each
/// turn the same program is started without soloist: the same minutes, and whatever else happens on full seconds. A
/// minute is divided by the number of daemons and one. Returns how much later each starts it, p50, ms.
pub fn in_turns(table: &mut Table, idle: usize, kinds: &[Kind]) -> Vec<f64> {
    let of = kinds.len() + 1;
    assert_eq!(60 % of, 0);
    let turn = |nth| Turn { nth, of };
    let mut running: Vec<Running> = kinds
        .iter()
        .enumerate()
        .map(|(n, kind)| {
            let (keep, dir) = directory();
            let starts = dir.join("starts");
            let job = format!(
                "[jobs.in-turn]\nschedule = \"{}\"\ncommand = [\"{}\", \"{NOW}\", \"{}\"]\n",
                turn(n).schedule(),
                program::path().display(),
                starts.display()
            );
            let config = daemon::config(&dir, kind.url, idle, &format!("{}{job}", kind.more));
            let daemon = Daemon::start(&dir, &config, "a");
            Running {
                keep,
                starts,
                skip: 0,
                daemon,
            }
        })
        .collect();
    for (n, r) in running.iter().enumerate() {
        wait_for("a first run", || lines(&r.starts) >= 2);
        (kinds[n].beside)(r.keep.path(), turn(n));
    }
    for r in &mut running {
        r.skip = lines(&r.starts);
    }
    let (_keep, dir) = directory();
    let floor = dir.join("floor");
    for _ in 0..(seconds() * kinds.len() as u64).div_ceil(of as u64) {
        let at = turn(kinds.len()).next() * 1_000_000;
        until(at);
        let status = Command::new(program::path())
            .args([NOW.as_ref(), floor.as_os_str()])
            .env("SOLOIST_OCCURRENCE_MS", (at / 1000).to_string())
            .stdin(Stdio::null())
            .status();
        assert!(status.is_ok_and(|s| s.success()));
    }
    let floor = read(&floor, 0);
    let ours: Vec<Sample> = running.iter().map(|r| read(&r.starts, r.skip)).collect();
    for r in running {
        r.daemon.stop();
    }
    let told = kinds.iter().zip(&ours);
    told.map(|(kind, ours)| tell(table, kind.name, idle, ours, &floor))
        .collect()
}

fn tell(table: &mut Table, kind: &str, idle: usize, ours: &Sample, floor: &Sample) -> f64 {
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
        "start lateness above the spawn floor, {kind}, {} jobs",
        idle + 1
    );
    let from = format!("{} / floor {}", show(ours), show(floor));
    let above = ours.p50() - floor.p50();
    table.row(&format!("{name}: p50"), above, "ms", 2.0, from.clone());
    table.row(
        &format!("{name}: p99"),
        ours.p99() - floor.p99(),
        "ms",
        5.0,
        from,
    );
    above
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
