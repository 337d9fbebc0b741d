//! Ends what guards left behind that were killed, and the runs of guards that can do nothing and have no daemon.

use std::time::Duration;

use rustix::process::Signal;

use super::{
    ARGUMENT,
    cgroup::{self, Cgroup},
    tree::{self, Proc, below, kill_pass},
};
use crate::{blocking, clock::Boottime};

/// How long a sweep tries to end one run.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// So long after its daemon's death a guard has killed its tree, unless somebody keeps it from doing so: the kernel has
/// continued it if it was stopped.
const HELPLESS: Duration = Duration::from_millis(250);

/// What looks like a guard.
#[derive(Debug, PartialEq)]
struct Found {
    process: Proc,
    run: String,
    /// Any user may start a process that looks like a guard.
    user: u32,
}

impl Found {
    fn of(process: Proc) -> Option<Self> {
        let place = std::path::PathBuf::from(format!("/proc/{}", process.pid));
        let line = std::fs::read(place.join("cmdline")).ok()?;
        let mut args = line.split(|&b| b == 0).skip(1);
        (args.next() == Some(ARGUMENT.as_bytes())).then_some(())?;
        let run = String::from_utf8_lossy(args.nth(1)?).into_owned();
        // The owner of the directory is root for a process that is not dumpable.
        let status = std::fs::read_to_string(place.join("status")).ok()?;
        let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        let user = uids.split_ascii_whitespace().next()?.parse().ok()?;
        Some(Self { process, run, user })
    }

    /// Somebody keeps it from doing anything.
    fn helpless(&self) -> bool {
        let now = Proc::read(self.process.pid).filter(|now| now.key() == self.process.key());
        now.is_some_and(|now| now.stopped() || cgroup::frozen(now.pid))
    }

    /// Kills its command, all descendants, and then the guard.
    fn end_run(&self) {
        let tree = || below(self.process.pid);
        blocking::within(PATIENCE, || {
            kill_pass(tree);
            (!tree().iter().any(Proc::alive)).then_some(())
        });
        if let Some(cgroup) = cgroup::of_run(&self.run) {
            end(&cgroup);
        }
        self.process.signal(Signal::KILL);
    }
}

/// All guards on this host.
fn guards() -> Vec<Found> {
    tree::all().into_iter().filter_map(Found::of).collect()
}

/// Ends the runs of other daemons that were killed together with their guards, and returns how many such runs there
/// were. It finds only trees in a cgroup below that of this process; others look like unrelated processes that
/// inherited the environment of a run (`at`, `sbatch`). Blocks; costs almost nothing while every run has its guard.
pub(crate) fn sweep() -> usize {
    // Look for cgroups first and for guards second: a guard exists before its cgroup does, and longer.
    let mut cgroups = cgroup::of_all_runs();
    cgroups.retain(|(_, cgroup)| cgroup.abandoned());
    if cgroups.is_empty() {
        return 0;
    }
    // A guard that has just made its cgroup has not locked it yet.
    let guards = guards();
    let orphaned = cgroups.into_iter().filter(|(run, cgroup)| {
        let owner = cgroup.owner();
        let guarded = |g: &Found| g.run == *run && owner.is_none_or(|o| o == g.user);
        !guards.iter().any(guarded)
    });
    orphaned
        .filter(|(_, cgroup)| {
            let populated = cgroup.populated();
            end(cgroup);
            populated
        })
        .count()
}

fn end(cgroup: &Cgroup) {
    blocking::within(PATIENCE, || {
        cgroup.kill();
        (!cgroup.populated()).then_some(())
    });
    cgroup.remove();
}

/// Of a daemon that has just died, in the session of its guards: waits until no guard is left, and ends the runs of
/// those that are stopped or frozen, because nobody else is there to see it. Then sweeps: guards may have been killed
/// together with their daemon.
pub(super) fn after_daemon(session: i32) {
    let helpless_from = Boottime::now() + HELPLESS;
    let mut pause = Duration::from_millis(10);
    loop {
        let ours = |p: &Proc| p.session == session && p.alive();
        let guards: Vec<Found> = (tree::all().into_iter().filter(ours))
            .filter_map(Found::of)
            .collect();
        if guards.is_empty() {
            break;
        }
        if Boottime::now() >= helpless_from {
            for guard in guards.iter().filter(|guard| guard.helpless()) {
                guard.end_run();
            }
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_secs(1));
    }
    sweep();
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::model::RunId;

    /// They are known by their command line, and by who runs them.
    #[test]
    fn whatever_looks_like_a_guard_counts_as_one_of_its_user() {
        let dir = tempfile::tempdir().expect("a directory");
        let (guarded, other) = (RunId::random().to_string(), RunId::random().to_string());
        let mut waiting = vec![];
        for (script, run) in [(ARGUMENT, &guarded), ("other", &other)] {
            std::fs::write(dir.path().join(script), "read x").expect("a script");
            let mut sh = Command::new("sh");
            sh.args([script, "job", run]).current_dir(dir.path());
            waiting.push(sh.stdin(Stdio::piped()).spawn().expect("a process"));
        }
        let user = rustix::process::getuid().as_raw();
        // The kernel shows the words of a new process after a moment.
        let end = Boottime::now() + Duration::from_secs(60);
        let is = |g: &Found| g.run == guarded && g.user == user;
        while !guards().iter().any(is) {
            assert!(Boottime::now() < end, "it is not found");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!guards().iter().any(|g| g.run == other));
        for mut child in waiting {
            drop(child.stdin.take());
            assert!(child.wait().is_ok());
        }
    }
}
