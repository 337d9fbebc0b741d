//! What a daemon takes that has nothing to do, and how soon after its start it claims.

use std::{path::Path, sync::Arc, time::Duration};

use soloist::{
    clock::wall_us,
    logic::claim::Control,
    model::JobName,
    store::{Store, sqlite::SqliteStore},
};
use tokio::runtime::Runtime;

use crate::{
    daemon::{self, Daemon},
    program::{self, NOW},
    support::{Redis, Sample, Table, directory, establish, runtime, seconds, wait_for},
};

const JOBS: usize = 10_000;
const STARTS: usize = 7;

pub fn run(table: &mut Table, server: &Redis) {
    let runtime = runtime();
    let _inside = runtime.enter();
    let store = server.store();
    runtime.block_on(establish(&*store));
    one(table, &runtime, "Redis", &server.url(), 1, |_| {
        store.clone()
    });
    one(table, &runtime, "Redis", &server.url(), JOBS, |_| {
        store.clone()
    });
    one(
        table,
        &runtime,
        "SQLite",
        "sqlite:soloist.db",
        JOBS,
        |dir| Arc::new(SqliteStore::open(&dir.join("soloist.db")).expect("the same database")),
    );
}

fn one(
    table: &mut Table,
    runtime: &Runtime,
    name: &str,
    url: &str,
    jobs: usize,
    open: impl Fn(&Path) -> Arc<dyn Store>,
) {
    let (_keep, dir) = directory();
    let config = daemon::config(&dir, url, jobs, "");
    let daemon = Daemon::start(&dir, &config, "a");
    {
        let store = open(&dir);
        let all: Vec<JobName> = (0..jobs)
            .map(|i| JobName::new(&format!("idle-{i:05}")))
            .collect();
        wait_for("all jobs in the store", || {
            let states = runtime.block_on(store.observe(&all));
            states.is_ok_and(|s| s.value.iter().all(Option::is_some))
        });
    }
    // What the start took has passed.
    std::thread::sleep(Duration::from_secs(4));
    let pid = daemon.pid();
    let (cpu, wall) = (cpu_ms(pid), wall_us());
    std::thread::sleep(Duration::from_secs(seconds()));
    let share = (cpu_ms(pid) - cpu) / ((wall_us() - wall) as f64 / 1000.0) * 100.0;
    let kib = |field: &str| memory_kib(pid, field) / 1024.0;
    let rss = kib("Rss:");
    let name = format!("idle daemon, {} jobs, {name}", jobs);
    let from = format!(
        "{:.1} MiB anonymous, {:.1} MiB of files (the program itself), {:.1} MiB private",
        kib("Anonymous:"),
        kib("Rss:") - kib("Anonymous:"),
        kib("Private_Dirty:") + kib("Private_Clean:")
    );
    daemon.stop();
    if jobs == 1 {
        table.note(&format!("{name}: RSS"), rss, "MiB", from);
        return;
    }
    table.row(&format!("{name}: RSS"), rss, "MiB", 25.0, from);
    table.row(
        &format!("{name}: CPU"),
        share,
        "%",
        0.5,
        format!("{share:.3} % of a core over {} s", seconds()),
    );
}

/// User and system time that a process has used.
pub fn cpu_ms(pid: u32) -> f64 {
    // In nanoseconds, of the main thread only; so summed over the threads. /proc/PID/stat counts in 10 ms.
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    tasks
        .flatten()
        .filter_map(|t| std::fs::read_to_string(t.path().join("schedstat")).ok())
        .filter_map(|s| s.split(' ').next()?.parse::<f64>().ok())
        .sum::<f64>()
        / 1e6
}

pub fn memory_kib(pid: u32, field: &str) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it runs");
    let line = text.lines().find_map(|l| l.strip_prefix(field));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok())
        .expect("a figure")
}

/// From the start of the process to its first claim, of something that waits for it.
pub fn start(table: &mut Table, server: &Redis) {
    let runtime = runtime();
    let _inside = runtime.enter();
    let store = server.store();
    runtime.block_on(async { establish(&*store).await });
    for idle in [1, 1000, JOBS] {
        let (_keep, dir) = directory();
        let starts = dir.join("starts");
        let job = format!(
            "[jobs.waiting]\ncommand = [\"{}\", \"{NOW}\", \"{}\"]\n",
            program::path().display(),
            starts.display()
        );
        let config = daemon::config(&dir, &server.url(), idle - 1, &job);
        let waiting = JobName::new("waiting");
        let last = JobName::new(&format!("idle-{:05}", idle.saturating_sub(2)));
        let daemon = Daemon::start(&dir, &config, "a");
        wait_for("all jobs in the store", || {
            let asked = [
                if idle == 1 {
                    waiting.clone()
                } else {
                    last.clone()
                },
                waiting.clone(),
            ];
            let states = runtime.block_on(store.observe(&asked));
            states.is_ok_and(|s| s.value.iter().all(Option::is_some))
        });
        daemon.stop();
        let (mut claims, mut commands) = (vec![], vec![]);
        for i in 0..STARTS {
            let trigger = Control::Trigger {
                key: format!("start-{idle}-{i}"),
            };
            let _ = runtime
                .block_on(store.control(&waiting, &trigger))
                .expect("an answer");
            let began = wall_us();
            let daemon = Daemon::start(&dir, &config, "a");
            let lines = || std::fs::read_to_string(&starts).unwrap_or_default();
            wait_for("the run", || lines().lines().count() > i);
            let started: i64 = lines()
                .lines()
                .last()
                .and_then(|l| l.split_once(' ')?.1.parse().ok())
                .expect("us");
            commands.push((started - began) as f64 / 1000.0);
            let mut granted = None;
            wait_for("its settlement", || {
                let states = runtime
                    .block_on(store.observe(std::slice::from_ref(&waiting)))
                    .expect("an answer");
                let state = states.value.into_iter().next().flatten();
                granted = state
                    .filter(|s| s.open.is_empty())
                    .and_then(|s| s.last)
                    .map(|l| l.from);
                granted.is_some()
            });
            claims.push((granted.unwrap_or(0) * 1000 - began) as f64 / 1000.0);
            daemon.stop();
        }
        let (claims, commands) = (Sample::new(claims), Sample::new(commands));
        let from = format!(
            "max {:.0} ms of {STARTS}; to the command's first line p50 {:.0} ms",
            claims.max(),
            commands.p50()
        );
        let name = format!("start to first claim, {idle} jobs: p50");
        if idle == 1000 {
            table.row(&name, claims.p50(), "ms", 100.0, from);
        } else {
            table.note(&name, claims.p50(), "ms", from);
        }
    }
}
