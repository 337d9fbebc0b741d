//! Disks that are full or read-only, descriptors that run out, commands that flood their output.

use std::{path::Path, process::Command};

use rustix::process::{Resource, Rlimit, Signal, prlimit};

use crate::{
    guard::TestCgroup,
    support::{
        GENEROUS,
        fleet::{Fleet, Instance, fleet, occurrence_ms},
        process, skip, test_seconds,
        trace::ONCE,
        wait_for, wait_until,
    },
};

fn descriptors(pid: u32) -> u64 {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |d| d.count() as u64)
}

fn limit_descriptors(pid: u32, limit: Option<u64>) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).expect("a process id"));
    let max = rustix::process::getrlimit(Resource::Nofile).maximum;
    let new = Rlimit {
        current: limit.or(max),
        maximum: max,
    };
    prlimit(pid, Resource::Nofile, new).expect("limit another process of ours");
}

#[test]
fn a_daemon_out_of_descriptors_leaves_occurrences_to_the_others() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can count the descriptors of a daemon");
    }
    let mut fleet = fleet(2).witness("a", "for=5", "").start();
    fleet.wait_runs(4);
    let poor = fleet.instances[0].pid();
    limit_descriptors(poor, Some(descriptors(poor) + 1));
    fleet.wait_log(0, "this instance cannot start anything");
    let failed = |fleet: &Fleet| {
        let all = fleet.history("a");
        let failed = all.iter().filter(|r| r["outcome"] == "failed");
        failed.map(|r| r["error"].to_string()).collect::<Vec<_>>()
    };
    let at_first = failed(&fleet);
    fleet.wait_more_runs(6);
    assert_eq!(failed(&fleet), at_first);
    let status = fleet.json(&["status", "--json"]);
    let why = status["instances"][0]["halted"].to_string().to_lowercase();
    assert!(why.contains("too many open files"), "{status}");
    let said = fleet.said(&["status"]);
    assert!(
        said.contains("starts nothing: cannot start the guard"),
        "{said}"
    );
    limit_descriptors(poor, None);
    fleet.wait_log(0, "this instance can start guards again");
    let (id, again) = (fleet.instances[0].id.clone(), process::boottime_ns());
    fleet.wait_run("one of the first instance", |run| {
        run.instance == id && run.start_ns > again
    });
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

/// What runs could leave behind of a daemon: its descriptors, its children with what they are, the cgroups below its
/// own, and the files of its temporary directory.
fn held(daemon: u32, cgroup: &Path, tmp: &Path) -> (u64, Vec<String>, usize, usize) {
    let mut children: Vec<String> = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| process::parent(*pid) == Some(daemon))
        // The zygote has a long command line, so that it can show another one.
        .map(|pid| {
            process::command_line(pid)
                .split(' ')
                .take(2)
                .collect::<Vec<_>>()
                .join(" ")
        })
        .collect();
    children.sort();
    let directories = |dir: &Path| {
        let all = std::fs::read_dir(dir).into_iter().flatten().flatten();
        all.filter(|e| e.path().is_dir()).count()
    };
    let files = std::fs::read_dir(tmp).into_iter().flatten().count();
    (descriptors(daemon), children, directories(cgroup), files)
}

/// A stopped zygote holds up each start for a quarter of a second, until it is replaced.
#[test]
fn an_instance_whose_starts_are_slow_claims_less_at_one_time() {
    let mut plan = fleet(1);
    for i in 0..12 {
        let lines = "schedule = \"* * * * * *\"\nlease = \"1s\"\ncommand = [\"true\"]\n";
        plan = plan.job(&format!("quick-{i}"), lines);
    }
    let mut fleet = plan.start();
    let daemon = fleet.instances[0].pid();
    let zygote = || {
        let mut children = process::children(daemon).into_iter();
        children.find(|pid| process::command_line(*pid).contains("__zygote"))
    };
    wait_until("fewer claims at one time", GENEROUS, || {
        if let Some(pid) = zygote() {
            process::signal(pid, Signal::STOP);
        }
        fleet.instances[0]
            .log_text()
            .contains("for now it claims at most")
    });
    fleet.stop();
}

/// Ten thousand runs: `SOLOIST_TEST_SECONDS=250`.
#[test]
fn many_runs_one_after_another_leave_nothing_behind() {
    const JOBS: usize = 40;
    let Some(cgroup) = TestCgroup::new() else {
        return skip("no cgroup v2 that we may write to");
    };
    let tmp = tempfile::tempdir().expect("a directory");
    let lines = |enabled: bool| {
        format!("schedule = \"* * * * * *\"\nenabled = {enabled}\ncommand = [\"true\"]\n")
    };
    let name = |i: usize| format!("quick-{i}");
    let path = tmp.path().to_str().expect("a path");
    let mut plan = fleet(1).env(0, "TMPDIR", path).cgroup(0, &cgroup.0);
    for i in 0..JOBS {
        plan = plan.job(&name(i), &lines(true));
    }
    let mut fleet = plan.start();
    let daemon = fleet.instances[0].pid();
    let last = |fleet: &Fleet| {
        let all = fleet.history(&name(JOBS - 1));
        all.first().map_or(0, occurrence_ms)
    };
    let switch = |fleet: &mut Fleet, enabled: bool| {
        for i in 0..JOBS {
            fleet.set_job(&name(i), Some(&lines(enabled)));
        }
        fleet.reload(0);
        let before = last(fleet);
        match enabled {
            true => wait_until("runs again", GENEROUS, || last(fleet) > before + 2_000),
            false => wait_until("only the zygote is left", GENEROUS, || {
                held(daemon, &cgroup.0, tmp.path()).1.len() == 1
            }),
        }
    };
    wait_until("runs", GENEROUS, || last(&fleet) > 0);
    switch(&mut fleet, false);
    let before = held(daemon, &cgroup.0, tmp.path());
    switch(&mut fleet, true);
    std::thread::sleep(std::time::Duration::from_secs(test_seconds()));
    switch(&mut fleet, false);
    // A guard of an instant right before the reload may still come and go.
    let mut last = None;
    wait_until("nothing is held beyond that of before", GENEROUS, || {
        let now = held(daemon, &cgroup.0, tmp.path());
        // A failure shows it.
        if last.replace(now.clone()).as_ref() != Some(&now) {
            println!("before: {before:?}; now: {now:?}");
        }
        // Connections to the store stay open: the pool has at most so many.
        // Before, the last cgroup of a run may not have been removed yet.
        now.0 <= before.0 + 8 && now.1.len() == 1 && now.2 <= before.2 && now.3 <= before.3
    });
    let ends = fleet.history(&name(0));
    assert!(ends.iter().all(|r| r["outcome"] != "failed"), "{ends:?}");
    fleet.stop();
}

/// A file system of four megabytes, where we may mount one; unmounted on drop.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().ok()?;
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=4m", "soloist-test"])
            .arg(dir.path())
            .output()
            .is_ok_and(|o| o.status.success());
        done.then_some(Self(dir))
    }
    fn path(&self) -> &Path {
        self.0.path()
    }
    fn remount(&self, how: &str) -> bool {
        Command::new("mount")
            .args(["-o", &format!("remount,{how}")])
            .arg(self.path())
            .status()
            .is_ok_and(|s| s.success())
    }
    fn fill(&self) {
        use std::io::Write;
        let mut file = std::fs::File::create(self.path().join("ballast")).expect("a file");
        let block = vec![1; 4096];
        while file.write_all(&block).is_ok() {}
    }
    fn free(&self) {
        std::fs::remove_file(self.path().join("ballast")).expect("remove the ballast");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        Command::new("umount")
            .arg("-l")
            .arg(self.path())
            .status()
            .ok();
    }
}

#[test]
fn a_full_disk_below_sqlite_stops_the_runs_and_repeats_none() {
    let Some(disk) = SmallDisk::mount() else {
        return skip("no right to mount a small file system");
    };
    let file = disk.path().join("soloist.db");
    let mut fleet = fleet(3)
        .sqlite_at(&file)
        .witness("a", "for=5", "")
        .witness("b", "for=5", "")
        .start();
    fleet.wait_runs(4);
    disk.fill();
    // All of them have asked in vain; one that had registered its jobs by then, for an occurrence.
    let full = |i: &Instance, what: &str| {
        let log = i.log_text();
        let mut lines = log.lines().filter(|l| l.contains("disk is full"));
        lines.any(|l| l.contains(what))
    };
    for i in &fleet.instances {
        wait_until("it says that the disk is full", GENEROUS, || full(i, ""));
    }
    wait_until("one can neither claim nor record", GENEROUS, || {
        let vain = |i| full(i, "cannot claim") || full(i, "cannot record the outcome");
        fleet.instances.iter().any(vain)
    });
    disk.free();
    let freed = fleet.trace().runs().len();
    fleet.wait_runs(freed + 6);
    for i in &mut fleet.instances {
        assert!(i.ended().is_none(), "{} goes on", i.id);
    }
    fleet.stop();
    fleet.judge(ONCE, &["a", "b"], None);
}

#[test]
fn a_run_that_ends_while_the_disk_is_full_is_recorded_when_there_is_room() {
    let Some(disk) = SmallDisk::mount() else {
        return skip("no right to mount a small file system");
    };
    let mut fleet = fleet(1)
        .sqlite_at(&disk.path().join("soloist.db"))
        .default("lease", "\"60s\"")
        .witness("long", "for=2000 beat=5 exit=3", "")
        .start();
    let (_, run) = fleet.wait_holder("long");
    disk.fill();
    wait_until(
        "it says that it cannot record the outcome",
        GENEROUS,
        || {
            fleet.instances[0]
                .log_text()
                .contains("cannot record the outcome")
        },
    );
    disk.free();
    let record = wait_for("the record of that run", GENEROUS, || {
        let mut all = fleet.history("long").into_iter();
        all.find(|r| r["fencing_token"] == run.token && r["outcome"] != "running")
    });
    assert_eq!(record["outcome"], "failed", "{record}");
    assert_eq!(record["exit_code"], 3, "{record}");
    fleet.wait_run("the job runs on", |r| r.occurrence > run.occurrence);
    fleet.stop();
    fleet.judge(ONCE, &["long"], None);
}

#[test]
fn a_read_only_disk_below_sqlite_is_named_and_starts_nothing() {
    let Some(disk) = SmallDisk::mount() else {
        return skip("no right to mount a small file system");
    };
    let file = disk.path().join("soloist.db");
    // Nobody writes yet, or the file system could not change.
    assert!(disk.remount("ro"), "remount read-only");
    let mut fleet = fleet(3).sqlite_at(&file).witness("a", "for=5", "").start();
    // This cannot get well by itself: the daemon exits, so that its supervisor starts it again.
    for i in &mut fleet.instances {
        let status = i.wait_end();
        let log = i.log_text();
        assert_eq!(status.code(), Some(69), "{log}");
        assert!(log.contains("soloist.db"), "the file is named: {log}");
        assert!(log.contains("writable"), "and what to do: {log}");
    }
    assert!(fleet.trace().runs().is_empty(), "no store, no run");
    assert!(disk.remount("rw"), "remount writable");
    for i in &mut fleet.instances {
        i.start();
    }
    fleet.wait_runs(3);
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

/// Runs a flood of output once and looks at the memory of daemons and guards meanwhile.
fn flood(command: &str, outcome: &str) -> serde_json::Value {
    // No busy host takes the lease of a run that only writes. A new file of SQLite does not wait for one.
    let mut fleet = fleet(3)
        .sqlite()
        .default("lease", "\"1m\"")
        .alone()
        .job(
            "flood",
            &format!("schedule = \"* * * * * *\"\ncommand = {command:?}\ntimeout = \"120s\"\noutput = {{ keep = \"16KiB\", log = false }}"),
        )
        .start();
    let mut most = 0;
    let record = wait_for("the flood has ended", 3 * GENEROUS, || {
        for i in &fleet.instances {
            for pid in std::iter::once(i.pid()).chain(process::children(i.pid())) {
                if process::command_line(pid).contains("soloist") {
                    most = most.max(process::resident_kib(pid).unwrap_or(0));
                }
            }
        }
        fleet
            .history("flood")
            .into_iter()
            .find(|r| r["outcome"] != "running" && r["attempt"] == 1)
    });
    println!("{command:?}: at most {most} KiB resident in any process of ours");
    assert!(
        most > 0 && most < 64 << 10,
        "memory stays bounded: {most} KiB"
    );
    assert_eq!(record["outcome"], outcome, "{record}");
    assert_eq!(record["output_truncated"], true);
    let tail = record["output_tail"].as_str().expect("a tail").len();
    // Each invalid byte becomes a replacement character of three.
    assert!(tail <= 3 * (16 << 10), "{tail} bytes are kept");
    // A run that goes on is ended by the second SIGTERM.
    fleet.stop_all_now();
    record
}

#[test]
fn a_flood_of_lines_costs_bounded_memory() {
    let record = flood("yes | head -c 268435456", "succeeded");
    assert!(
        record["output_tail"]
            .as_str()
            .expect("a tail")
            .ends_with("y\n")
    );
}

#[test]
fn a_long_line_without_end_costs_bounded_memory() {
    flood("head -c 134217728 /dev/zero | tr '\\0' x", "succeeded");
}

#[test]
fn a_job_that_floods_its_output_is_still_ended_on_time() {
    let mut fleet = fleet(3)
        .alone()
        .job("flood", "schedule = \"* * * * * *\"\ncommand = [\"yes\"]\ntimeout = \"1s\"\noutput = { log = false }")
        .start();
    let record = fleet.wait_record("flood", "timed_out");
    // Only its timeout ends it.
    assert!(record["signal"].is_number(), "{record}");
    fleet.stop_all_now();
}
