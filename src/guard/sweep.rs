//! Kills what killed guards left, and runs of stopped or frozen guards whose daemon is dead.

use std::{collections::HashSet, time::Duration};

use rustix::process::{Pid, Signal};

use super::{
    ARGUMENT, OF,
    cgroup::{self, Cgroup},
    tree::{self, Proc, descend, kill_pass},
};
use crate::{blocking, clock::Boottime, model::RunId};

/// How long a sweep tries to end what it has found.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// A guard alive this long after its daemon is stopped or frozen: the kernel continues a stopped guard once, at that
/// death.
const HELPLESS: Duration = Duration::from_millis(250);

/// How long what was killed may take to be dead before others are looked after.
const DYING: Duration = Duration::from_millis(50);

/// What looks like a guard. Any user may start a process that does.
#[derive(Debug, PartialEq)]
struct Found {
    process: Proc,
    run: String,
    user: u32,
    /// The pid of the daemon, or of `soloist exec`.
    daemon: Option<i32>,
    /// It is in another namespace of pids.
    elsewhere: bool,
}

impl Found {
    fn of(process: Proc) -> Option<Self> {
        let place = std::path::PathBuf::from(format!("/proc/{}", process.pid));
        // Everybody may read both files, also of a process that is not dumpable.
        let line = std::fs::read(place.join("cmdline")).ok()?;
        let mut args = line.split(|&b| b == 0).skip(1);
        (args.next() == Some(ARGUMENT.as_bytes())).then_some(())?;
        let run = std::str::from_utf8(args.nth(1)?).ok()?.to_owned();
        // It becomes part of a path.
        run.parse::<RunId>()
            .ok()
            .filter(|id| id.to_string() == run)?;
        let daemon = (args.next())
            .and_then(|word| std::str::from_utf8(word.strip_prefix(OF.as_bytes())?).ok());
        let daemon = daemon.and_then(|pid| pid.parse().ok());
        // The owner of the directory is root for a process that is not dumpable.
        let status = std::fs::read_to_string(place.join("status")).ok()?;
        let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        let user = uids.split_ascii_whitespace().next()?.parse().ok()?;
        let elsewhere = nested(&status);
        Some(Self {
            process,
            run,
            user,
            daemon,
            elsewhere,
        })
    }

    /// Somebody keeps it from doing anything.
    fn helpless(&self) -> bool {
        let now = Proc::read(self.process.pid).filter(|now| now.key() == self.process.key());
        now.is_some_and(|now| cgroup::helpless(now.pid))
    }

    /// It still is that process, and a guard: it has not begun to tell an outcome.
    fn remains(&self) -> bool {
        let now = Proc::read(self.process.pid).filter(|now| now.key() == self.process.key());
        now.and_then(Self::of).is_some()
    }

    /// What is below it, of `all` processes.
    fn below(&self, all: &[Proc]) -> Vec<Proc> {
        // The number may be that of another process by now.
        let there = all.iter().any(|p| p.key() == self.process.key());
        let root = there.then_some(self.process.pid);
        descend(all.to_vec(), root.into_iter().collect())
    }
}

/// What /proc/PID/status says has a number for each namespace of pids that the process is in, from that of /proc on.
fn nested(status: &str) -> bool {
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    pids.is_none_or(|pids| pids.split_ascii_whitespace().count() != 1)
}

/// The guards among those processes of this host that are `wanted`.
fn find(wanted: impl Fn(&Proc) -> bool) -> Vec<Found> {
    let found = tree::all().into_iter().filter(wanted);
    found.filter_map(Found::of).collect()
}

/// All guards on this host.
fn guards() -> Vec<Found> {
    find(|_| true)
}

/// The guards of this user whose daemon is dead: their parent is another process.
fn orphans() -> Vec<Found> {
    let user = rustix::process::getuid().as_raw();
    let mut guards = guards();
    let known: HashSet<_> = (guards.iter().map(|g| (g.process.pid, g.run.clone()))).collect();
    guards.retain(|g| {
        let parent = g.process.parent;
        // What is to become a command is a copy of its guard until then.
        let copy = known.contains(&(parent, g.run.clone()));
        // The parent of a process may be in another namespace, as 0.
        g.user == user
            && !copy
            && !g.elsewhere
            && parent != 0
            && g.daemon.is_some_and(|daemon| daemon != parent)
    });
    guards
}

/// Ends the runs of guards that can do nothing and whose daemons are dead, and returns how many it has ended. A
/// daemon's zygote does that first ([`after_daemon`]), unless it is dead or can do nothing itself. Looks at each
/// process of the host, and again a moment later if there is such a guard. Blocks.
pub(crate) fn end_helpless() -> usize {
    let here = std::fs::read_to_string("/proc/self/status").is_ok_and(|status| !nested(&status));
    if !here || !crate::failpoint::lets("end_helpless") {
        return 0;
    }
    let look = || {
        let mut guards = orphans();
        guards.retain(Found::helpless);
        guards
    };
    let before: HashSet<_> = look().iter().map(|g| g.process.key()).collect();
    if before.is_empty() {
        return 0;
    }
    std::thread::sleep(HELPLESS);
    let mut left = look();
    left.retain(|guard| before.contains(&guard.process.key()));
    let mut ending = Ending::default();
    blocking::within(PATIENCE, || {
        ending.end_runs_of(&left);
        left.retain(|g| !ending.over.contains(&g.process.key()) && g.helpless());
        left.is_empty().then_some(())
    });
    ending.ended
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

/// Of a daemon that has just died: until it has no guard left, ends the runs of those that are stopped or frozen,
/// because nobody else is there to see it, and sweeps, because guards may have been killed together with their daemon.
/// Knows the guards of this process's session, and those that the daemon started otherwise.
pub(super) fn after_daemon(daemon: Option<Pid>) -> std::io::Result<()> {
    let session = rustix::process::getsid(None)?.as_raw_nonzero().get();
    let daemon = daemon.map(|pid| pid.as_raw_nonzero().get());
    let user = rustix::process::getuid().as_raw();
    let helpless_from = Boottime::now() + HELPLESS;
    let mut pause = Duration::from_millis(10);
    // One that was once seen so stays so: what it would do if it went on is done here.
    let mut helpless = HashSet::new();
    let mut ending = Ending {
        session: Some(session),
        ..Ending::default()
    };
    loop {
        end(&orphaned(), DYING);
        // The kernel gives all children of a process that has died to the same new parent.
        let parent = rustix::process::getppid();
        let siblings = |p: &Proc| parent.is_some_and(|pid| pid.as_raw_nonzero().get() == p.parent);
        let mut guards = find(|p| {
            (p.session == session || siblings(p)) && p.alive() && !ending.over.contains(&p.key())
        });
        guards.retain(|g| {
            let told = g.daemon.is_some() && g.daemon == daemon && g.user == user;
            g.process.session == session || told
        });
        let now = Boottime::now();
        // The children of a thread get the new parent when that thread is dead: not all need to have it by now.
        if guards.is_empty() && now >= helpless_from && rustix::process::getppid() == parent {
            return Ok(());
        }
        if now >= helpless_from {
            let new = guards.iter().filter(|guard| guard.helpless());
            helpless.extend(new.map(|guard| guard.process.key()));
            guards.retain(|guard| helpless.contains(&guard.process.key()));
            ending.end_runs_of(&guards);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

/// What was done about guards that can do nothing.
#[derive(Default)]
struct Ending {
    /// That of the guards of a zygote: nobody can fake a guard there.
    session: Option<i32>,
    /// Guards whose runs were still going on.
    begun: HashSet<(i32, u64)>,
    /// Guards about which nothing is left to do.
    over: HashSet<(i32, u64)>,
    /// How many runs are ended.
    ended: usize,
}

impl Ending {
    /// Kills the commands of these guards, with all descendants, and then the guards. One that a freezer of cgroup v1
    /// holds dies only when it is let go: call it again until all are `over`. A guard whose run has ended is left
    /// alone: it keeps the outcome, and tells it when it goes on.
    fn end_runs_of(&mut self, guards: &[Found]) {
        let mut left = self.with_cgroups(guards);
        let all = tree::all();
        left.retain(|(guard, cgroup)| {
            let key = guard.process.key();
            // All processes could not be listed, or it is dead.
            if !all.iter().any(|p| p.key() == key) {
                return false;
            }
            let below = guard.below(&all);
            let own = std::process::id().cast_signed();
            if runs(&below, cgroup.as_ref()) && !below.iter().any(|p| p.pid == own) {
                self.begun.insert(key);
            } else if !self.begun.contains(&key) {
                self.over.insert(key);
                return false;
            }
            true
        });
        blocking::within(DYING, || {
            kill_pass(|| {
                let all = tree::all();
                left.iter().flat_map(|(g, _)| g.below(&all)).collect()
            });
            for cgroup in left.iter().filter_map(|(_, cgroup)| cgroup.as_ref()) {
                if cgroup.populated() {
                    cgroup.kill();
                }
                cgroup.remove();
            }
            let all = tree::all();
            left.retain(|(guard, cgroup)| {
                if runs(&guard.below(&all), cgroup.as_ref()) {
                    return true;
                }
                if guard.remains() {
                    guard.process.signal(Signal::KILL);
                }
                self.over.insert(guard.process.key());
                self.ended += 1;
                false
            });
            left.is_empty().then_some(())
        });
    }

    /// Each with its run's cgroup, if that is not another guard's, too.
    fn with_cgroups<'g>(&self, of: &'g [Found]) -> Vec<(&'g Found, Option<Cgroup>)> {
        let ours = |g: &Found| self.session == Some(g.process.session);
        let all = match of.iter().all(ours) {
            true => vec![],
            false => guards(),
        };
        let alone = |g: &Found| {
            let same = all.iter().filter(|other| other.run == g.run);
            same.map(|other| other.process.key()).eq([g.process.key()])
        };
        let with = |g| {
            (
                g,
                (ours(g) || alone(g))
                    .then(|| cgroup::of_run(&g.run))
                    .flatten(),
            )
        };
        of.iter().map(with).collect()
    }
}

/// Something of a run is alive.
fn runs(below: &[Proc], cgroup: Option<&Cgroup>) -> bool {
    below.iter().any(Proc::alive) || cgroup.is_some_and(Cgroup::populated)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// One whose parent started it has its daemon. One of another user, or in another namespace of pids, says nothing;
    /// nor does a copy of a guard.
    #[test]
    fn a_guard_of_this_user_whose_parent_did_not_start_it_has_no_daemon() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(dir.path(), open).expect("it is ours");
        // The second process of each is a fork that executes nothing, and has a part of its own in the pipe.
        std::fs::write(dir.path().join(ARGUMENT), "(read x) <&3 & read x").expect("a script");
        let (us, other) = (std::process::id().to_string(), 4_194_305);
        let user: &[&str] = &["setpriv", "--reuid", "65534", "--clear-groups"];
        let cases: [(&[&str], String, bool); 5] = [
            (&[], us, false),
            (&[], other.to_string(), true),
            (&[], String::new(), false),
            (user, other.to_string(), false),
            (&["unshare", "--pid", "--fork"], other.to_string(), false),
        ];
        let mut waiting = vec![];
        for (wrapped, daemon, orphan) in cases {
            let run = RunId::random().to_string();
            let mut sh = Command::new("env");
            let script = format!("exec 3<&0 && exec sh {ARGUMENT} job {run} {OF}{daemon}");
            sh.args(wrapped).args(["sh", "-c", &script]);
            sh.current_dir(dir.path()).stdin(Stdio::piped());
            let mut child = sh.spawn().expect("a process");
            // Who may not change user or namespace cannot see that case.
            let end = Boottime::now() + Duration::from_secs(60);
            let both = loop {
                let found = guards().iter().filter(|g| g.run == run).count();
                if found == 2 || child.try_wait().expect("our child").is_some() {
                    break found == 2;
                }
                assert!(Boottime::now() < end, "{wrapped:?} is not found");
                std::thread::sleep(Duration::from_millis(1));
            };
            assert!(both || !wrapped.is_empty());
            waiting.push((child, run, both && orphan));
        }
        let all = orphans();
        for (_, run, orphan) in &waiting {
            let found = all.iter().filter(|guard| guard.run == *run);
            let daemons: Vec<_> = found.map(|guard| guard.daemon).collect();
            assert_eq!(daemons, vec![Some(other); usize::from(*orphan)]);
        }
        for (mut child, ..) in waiting {
            drop(child.stdin.take());
            assert!(child.wait().is_ok());
        }
    }

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
