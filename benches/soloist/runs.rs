//! What a run costs beside a spawn of the same program: CPU time, lateness, memory, and many at one instant.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use soloist::{clock::wall_us, logic::claim::Control, model::JobName, store::Store};

use crate::{
    daemon::{self, Daemon},
    idle::{cpu_ms, memory_kib},
    program::{self, NOW},
    support::{Redis, Sample, Table, directory, establish, runtime, seconds, wait_for},
};

const EACH_SECOND: usize = 20;
const AT_ONCE: [usize; 2] = [300, 1000];
const INSTANTS: usize = 3;
const HELD: [usize; 2] = [50, 1000];

/// Some jobs of this schedule, each of which writes a line into `starts`.
fn jobs(count: usize, schedule: &str, starts: &Path) -> String {
    let mut text = String::new();
    for i in 0..count {
        let _ = write!(
            text,
            "[jobs.run-{i:04}]\nschedule = \"{schedule}\"\ncommand = [\"{}\", \"{NOW}\", \"{}\"]\n",
            program::path().display(),
            starts.display()
        );
    }
    text
}

/// Lateness of each start in ms, by planned instant in ms.
fn read(starts: &Path) -> BTreeMap<i64, Vec<f64>> {
    let text = std::fs::read_to_string(starts).unwrap_or_default();
    let mut all: BTreeMap<i64, Vec<f64>> = BTreeMap::new();
    // The last line may be on its way.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    for line in whole.lines() {
        let (planned, started) = line.split_once(' ').expect("two figures");
        let (planned, started): (i64, i64) =
            (planned.parse().expect("ms"), started.parse().expect("us"));
        let late = (started - planned * 1000) as f64 / 1000.0;
        all.entry(planned).or_default().push(late);
    }
    all
}

/// Starts the program so often, as fast as possible, once the wall clock shows `at_ms`, and waits for all.
fn spawn_at(at_ms: i64, count: usize, starts: &Path) {
    let left = at_ms * 1000 - wall_us();
    std::thread::sleep(Duration::from_micros(left.max(0).cast_unsigned()));
    let spawn = |_| {
        Command::new(program::path())
            .args([NOW.as_ref(), starts.as_os_str()])
            .env("SOLOIST_OCCURRENCE_MS", at_ms.to_string())
            .stdin(Stdio::null())
            .spawn()
            .expect("a process")
    };
    let all: Vec<Child> = (0..count).map(spawn).collect();
    for mut child in all {
        assert!(child.wait().is_ok_and(|s| s.success()));
    }
}

/// CPU time in ms of the processes that this one has waited for.
fn of_children_ms() -> f64 {
    // SAFETY: all zeros are a valid value, and the structure lives during the call.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let ms = |t: libc::timeval| t.tv_sec as f64 * 1000.0 + t.tv_usec as f64 / 1000.0;
    ms(usage.ru_utime) + ms(usage.ru_stime)
}

/// CPU time in ms of a daemon with all that it has waited for, and of its children that live.
fn of_daemon_ms(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    let ticks = fields.split_ascii_whitespace().skip(13).take(2);
    let waited_for: f64 = ticks.map(|t| t.parse::<f64>().expect("ticks")).sum();
    // SAFETY: a plain system call.
    let second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    let living: f64 = children(pid).into_iter().map(cpu_ms).sum();
    cpu_ms(pid) + waited_for * 1000.0 / second + living
}

fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let lists = tasks
        .flatten()
        .filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    let text: Vec<String> = lists.collect();
    let pids = text.iter().flat_map(|t| t.split_ascii_whitespace());
    pids.map(|pid| pid.parse().expect("a pid")).collect()
}

fn fleet(dir: &Path, config: &Path, instances: usize) -> Vec<Daemon> {
    let names = ["a", "b", "c"].into_iter().take(instances);
    names.map(|name| Daemon::start(dir, config, name)).collect()
}

pub fn run(table: &mut Table, server: &Redis) {
    runtime().block_on(async { establish(&*server.store()).await });
    for instances in [1, 3] {
        each_second(table, server, instances);
    }
    let mut alone = BTreeMap::new();
    for (count, instances) in AT_ONCE.into_iter().flat_map(|n| [(n, 1), (n, 3)]) {
        let last = at_once(table, server, count, instances);
        if instances == 1 {
            alone.insert(count, last);
        } else {
            let name = format!("{count} at one instant, 3 instances / 1: last start");
            let from = format!("{last:.0} / {:.0} ms", alone[&count]);
            table.row(&name, last / alone[&count], "", 1.0, from);
        }
    }
}

/// Many commands that run at one time.
pub fn held(table: &mut Table, server: &Redis) {
    runtime().block_on(async { establish(&*server.store()).await });
    for count in HELD {
        held_at_once(table, server, count);
    }
}

fn each_second(table: &mut Table, server: &Redis, instances: usize) {
    let (_keep, dir) = directory();
    let (starts, floor) = (dir.join("starts"), dir.join("floor"));
    let text = jobs(EACH_SECOND, "* * * * * *", &starts);
    let fleet = fleet(
        &dir,
        &daemon::config(&dir, &server.url(), 0, &text),
        instances,
    );
    wait_for("three rounds", || read(&starts).len() >= 3);
    let first = wall_us() / 1_000_000 + 1;
    let cpu = || -> f64 { fleet.iter().map(|d| of_daemon_ms(d.pid())).sum() };
    let (mut ours, mut own) = (0.0, 0.0);
    for second in first..first + seconds().cast_signed() {
        // The floor in the middle of the second, when the fleet is at rest.
        let before = of_children_ms();
        spawn_at(second * 1000 + 500, EACH_SECOND, &floor);
        own += of_children_ms() - before;
        if second == first {
            ours = -cpu();
            own = 0.0;
        }
    }
    ours += cpu();
    fleet.into_iter().for_each(Daemon::stop);
    let measured = first * 1000 + 1000..(first + seconds().cast_signed()) * 1000;
    let late: Vec<f64> = read(&starts)
        .range(measured)
        .flat_map(|(_, late)| late.clone())
        .collect();
    let floor_late: Vec<f64> = read(&floor).into_values().flatten().collect();
    let rounds = seconds() - 1;
    let planned = rounds as usize * EACH_SECOND;
    assert_eq!(late.len(), planned, "each occurrence once");
    let (ours, own) = (ours / planned as f64, own / planned as f64);
    let each = if instances == 1 {
        "1 instance".to_owned()
    } else {
        format!("{instances} instances")
    };
    let name = format!("{EACH_SECOND} jobs each second, {each}");
    let from = format!("{ours:.2} ms, of them the command {own:.2}; {planned} runs");
    table.row(
        &format!("{name}: CPU per run, guard and daemons"),
        ours - own,
        "ms",
        0.6,
        from,
    );
    let (late, floor) = (Sample::new(late), Sample::new(floor_late));
    let show = |s: &Sample| format!("p50 {:.1}, p99 {:.1} ms", s.p50(), s.p99());
    table.row(
        &format!("{name}: lateness / spawn floor, p50"),
        late.p50() / floor.p50(),
        "",
        1.6,
        format!("{} / floor {}", show(&late), show(&floor)),
    );
}

/// How late the last of so many starts at one instant is, in ms: the median of some instants.
fn at_once(table: &mut Table, server: &Redis, count: usize, instances: usize) -> f64 {
    let (_keep, dir) = directory();
    let (starts, floor) = (dir.join("starts"), dir.join("floor"));
    let text = jobs(count, "*/10 * * * * *", &starts);
    let fleet = fleet(
        &dir,
        &daemon::config(&dir, &server.url(), 0, &text),
        instances,
    );
    let whole = |path: &Path| -> Vec<f64> {
        let all = read(path).into_values().filter(|late| late.len() == count);
        all.map(|late| late.into_iter().fold(0.0, f64::max))
            .collect()
    };
    for round in 1..=INSTANTS {
        wait_for("an instant", || whole(&starts).len() >= round);
        spawn_at(wall_us() / 1000 + 100, count, &floor);
    }
    fleet.into_iter().for_each(Daemon::stop);
    let (ours, floor) = (Sample::new(whole(&starts)), Sample::new(whole(&floor)));
    let last = ours.p50();
    if instances == 1 {
        table.row(
            &format!("{count} at one instant, 1 instance: last start / spawn floor"),
            last / floor.p50(),
            "",
            1.3,
            format!("{last:.0} / {:.0} ms, median of {INSTANTS}", floor.p50()),
        );
    }
    last
}

/// What so many running commands take, whether each has one run, and what they do to a start beside them.
fn held_at_once(table: &mut Table, server: &Redis, count: usize) {
    let (_keep, dir) = directory();
    let starts = dir.join("starts");
    let mut text = jobs(1, "* * * * * *", &starts);
    for i in 0..count {
        let _ = write!(
            text,
            "[jobs.held-{count}-{i}]\ncommand = [\"sleep\", \"3600\"]\n"
        );
    }
    let config = daemon::config(&dir, &server.url(), 0, &text);
    let daemon = Daemon::start(&dir, &config, "a");
    let runtime = runtime();
    let _inside = runtime.enter();
    let store = server.store();
    let names: Vec<JobName> = (0..count)
        .map(|i| JobName::new(&format!("held-{count}-{i}")))
        .collect();
    wait_for("the jobs in the store", || {
        let states = runtime.block_on(store.observe(&names));
        states.is_ok_and(|s| s.value.iter().all(Option::is_some))
    });
    wait_for("three rounds", || read(&starts).len() >= 3);
    let late = || {
        let first = wall_us() / 1000;
        std::thread::sleep(Duration::from_secs(seconds()));
        let mut late = read(&starts);
        Sample::new(late.split_off(&first).into_values().flatten().collect())
    };
    let alone = late();
    let private = |pid| memory_kib(pid, "Private_Dirty:") + memory_kib(pid, "Private_Clean:");
    let before = private(daemon.pid());
    for name in &names {
        let trigger = Control::Trigger { key: "once".into() };
        let _ = runtime
            .block_on(store.control(name, &trigger))
            .expect("an answer");
    }
    // Each guard with its command.
    let running = || {
        let all = children(daemon.pid()).into_iter().filter_map(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let sleeps = line.starts_with(b"soloist\0__guard\0held-");
            sleeps.then(|| Some((pid, children(pid).pop()?))).flatten()
        });
        all.collect::<Vec<(u32, u32)>>()
    };
    wait_for("the runs", || running().len() == count);
    std::thread::sleep(Duration::from_secs(2));
    let guards = running().into_iter().map(|(guard, _)| private(guard));
    let of_guards = guards.sum::<f64>() / count as f64;
    let of_daemon = (private(daemon.pid()) - before) / count as f64;
    let beside = late();
    let still = running();
    assert_eq!(still.len(), count, "none was lost");
    for (_, command) in still {
        let command = Pid::from_raw(command.cast_signed()).expect("a pid");
        let _ = kill_process(command, Signal::TERM);
    }
    wait_for("one record of each", || {
        let records = |name| runtime.block_on(store.records(name, 2));
        let ended = names
            .iter()
            .map(|name| records(name).map_or(0, |r| r.len()));
        let ended: Vec<usize> = ended.collect();
        assert!(ended.iter().all(|records| *records < 2), "each ran once");
        ended.iter().sum::<usize>() == count
    });
    daemon.stop();
    let name = format!("{count} commands at once");
    table.row(
        &format!("{name}: private memory of each, guard and daemon"),
        (of_guards + of_daemon) / 1024.0,
        "MiB",
        0.5,
        format!("guard {of_guards:.0} KiB, daemon {of_daemon:.0} KiB"),
    );
    let show = |s: &Sample| format!("p50 {:.1}, p99 {:.1} ms of {}", s.p50(), s.p99(), s.len());
    table.note(
        &format!("{name}: lateness of a start beside them / without them, p50"),
        beside.p50() / alone.p50(),
        "",
        format!("{} / {}", show(&beside), show(&alone)),
    );
}
