//! Ends what guards left behind that were killed, and the runs of guards that can do nothing and have no daemon.

use std::{collections::HashSet, time::Duration};

use rustix::process::Signal;

use super::{
    ARGUMENT,
    cgroup::{self, Cgroup},
    tree::{self, Proc, descend, kill_pass},
};
use crate::{blocking, clock::Boottime};

/// How long a sweep tries to end what it has found.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// So long after its daemon's death a guard has killed its tree, unless somebody keeps it from doing so: the kernel has
/// continued it if it was stopped.
const HELPLESS: Duration = Duration::from_millis(250);

/// How long what was killed may take to be dead before others are looked after.
const DYING: Duration = Duration::from_millis(50);

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
}

/// All guards on this host.
fn guards() -> Vec<Found> {
    tree::all().into_iter().filter_map(Found::of).collect()
}

/// Ends the runs of other daemons that were killed together with their guards, and returns how many such runs there
/// were. It finds only trees in a cgroup below that of this process; others look like unrelated processes that
/// inherited the environment of a run (`at`, `sbatch`). Blocks; costs almost nothing while every run has its guard.
pub(crate) fn sweep() -> usize {
    let cgroups = orphaned();
    let runs = cgroups.iter().filter(|c| c.populated()).count();
    end(&cgroups, PATIENCE);
    runs
}

fn orphaned() -> Vec<Cgroup> {
    // Look for cgroups first and for guards second: a guard exists before its cgroup does, and longer.
    let mut cgroups = cgroup::of_all_runs();
    cgroups.retain(|(_, cgroup)| cgroup.abandoned());
    if cgroups.is_empty() {
        return vec![];
    }
    // A guard that has just made its cgroup has not locked it yet.
    let guards = guards();
    let orphaned = cgroups.into_iter().filter(|(run, cgroup)| {
        let owner = cgroup.owner();
        let guarded = |g: &Found| g.run == *run && owner.is_none_or(|o| o == g.user);
        !guards.iter().any(guarded)
    });
    orphaned.map(|(_, cgroup)| cgroup).collect()
}

/// All at once: one of them may have a process that does not die.
fn end(cgroups: &[Cgroup], patience: Duration) {
    blocking::within(patience, || {
        let populated = cgroups.iter().filter(|c| c.populated());
        (populated.map(Cgroup::kill).count() == 0).then_some(())
    });
    cgroups.iter().for_each(Cgroup::remove);
}

/// Of a daemon that has just died, in the session of its guards: until no guard is left, ends the runs of those that
/// are stopped or frozen, because nobody else is there to see it, and sweeps, because guards may have been killed
/// together with their daemon.
pub(super) fn after_daemon(session: i32) {
    let helpless_from = Boottime::now() + HELPLESS;
    let mut pause = Duration::from_millis(10);
    // One that was once seen so stays so: what it would do if it went on is done here.
    let (mut helpless, mut ended) = (HashSet::new(), HashSet::new());
    loop {
        end(&orphaned(), DYING);
        let ours = |p: &Proc| p.session == session && p.alive() && !ended.contains(&p.key());
        let guards = tree::all().into_iter().filter(ours);
        let guards: Vec<Found> = guards.filter_map(Found::of).collect();
        if guards.is_empty() {
            return;
        }
        if Boottime::now() >= helpless_from {
            let new = guards.iter().filter(|guard| guard.helpless());
            helpless.extend(new.map(|guard| guard.process.key()));
            let theirs = (guards.into_iter()).filter(|g| helpless.contains(&g.process.key()));
            ended.extend(end_runs_of(&theirs.collect::<Vec<_>>()));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

/// Kills the commands of these guards, with all descendants, and then the guards. Returns those whose trees are dead:
/// one that a freezer of cgroup v1 holds dies only when it is let go.
fn end_runs_of(guards: &[Found]) -> Vec<(i32, u64)> {
    let below = |of: &[&Found]| descend(tree::all(), of.iter().map(|g| g.process.pid).collect());
    let cgroups = |g: &&Found| cgroup::of_run(&g.run);
    let mut left: Vec<&Found> = guards.iter().collect();
    blocking::within(DYING, || {
        kill_pass(|| below(&left));
        end(
            &left.iter().filter_map(cgroups).collect::<Vec<_>>(),
            Duration::ZERO,
        );
        let alive = |g: &&Found| {
            below(&[g]).iter().any(Proc::alive) || cgroups(g).is_some_and(|c| c.populated())
        };
        left.retain(alive);
        left.is_empty().then_some(())
    });
    let left: HashSet<i32> = left.iter().map(|g| g.process.pid).collect();
    let dead = guards.iter().filter(|g| !left.contains(&g.process.pid));
    dead.map(|g| {
        g.process.signal(Signal::KILL);
        g.process.key()
    })
    .collect()
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
