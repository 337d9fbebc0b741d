//! Ends the processes that a dead guard left behind.

use std::{cell::RefCell, collections::HashSet, path::PathBuf};

use super::children::reap;
use crate::guard::{self, Cgroup, Proc, RUN_ID, below, descend, kill_pass, soon_below};

/// The tree of a guard that was killed.
///
/// The kernel killed the command itself (PDEATHSIG). This process, the next subreaper, became the parent of the rest.
/// It recognises them by the run's cgroup, the command's session or group, or the run's id in their environment. A
/// process without any of these (`env -i` and setsid, without a cgroup) looks like an unrelated child of this process,
/// unless this process has none.
pub(super) struct Orphans {
    pub(super) marker: String,
    command: Option<i32>,
    /// The process group of a transparent command, which is that of this process.
    pub(super) group: Option<i32>,
    /// All children of this process are of this run.
    pub(super) sole: bool,
    /// The guard, if it was killed and cannot die yet. It does nothing any more, and reaps nobody.
    pub(super) guard: Option<i32>,
    cgroup: Option<Cgroup>,
    /// Processes that were found once: a zombie no longer has an environment by which it could be recognised.
    known: RefCell<HashSet<(i32, u64)>>,
}

impl Orphans {
    pub(super) fn new(run: &str, command: Option<i32>, cgroup: Option<PathBuf>) -> Self {
        Self {
            marker: format!("{RUN_ID}={run}"),
            command,
            group: None,
            sole: false,
            guard: None,
            cgroup: cgroup.map(Cgroup::at).or_else(|| guard::cgroup_of_run(run)),
            known: RefCell::default(),
        }
    }

    /// What a command without a guard started.
    #[cfg(feature = "notify")]
    pub(super) fn of_command(marker: String, command: Option<i32>) -> Self {
        Self {
            marker,
            command,
            group: None,
            sole: false,
            guard: None,
            cgroup: None,
            known: RefCell::default(),
        }
    }

    /// Kills all processes of the tree, for so long at most, and reaps none. Blocks for milliseconds.
    #[cfg(feature = "notify")]
    pub(super) fn kill(&self, patience: std::time::Duration) {
        crate::blocking::within(patience, || {
            if self.members().iter().any(Proc::alive) {
                kill_pass(|| self.members());
                None
            } else {
                Some(())
            }
        });
    }

    pub(super) fn members(&self) -> Vec<Proc> {
        self.among(below(std::process::id().cast_signed()))
    }

    /// Those of the tree among the descendants of this process.
    fn among(&self, ours: Vec<Proc>) -> Vec<Proc> {
        let guard = |p: &Proc| self.guard == Some(p.pid);
        if self.sole {
            return ours.into_iter().filter(|p| !guard(p)).collect();
        }
        let mut known = self.known.borrow_mut();
        let roots: Vec<Proc> = ours
            .iter()
            .filter(|p| {
                known.contains(&p.key())
                    || self.group == Some(p.group)
                    || guard(p)
                    || belongs(p, &self.marker, self.command)
            })
            .cloned()
            .collect();
        let mut tree = descend(ours, roots.iter().map(|p| p.pid).collect());
        tree.extend(roots.into_iter().filter(|p| !guard(p)));
        known.extend(tree.iter().map(Proc::key));
        tree
    }

    /// True: nothing is left to be done for it, although it may be there.
    fn gone(&self, process: &Proc) -> bool {
        reaped(process) || (self.guard == Some(process.parent) && !process.alive())
    }

    /// Kills all processes of the tree and reaps the dead. Returns the pids of those that are left. Blocks for
    /// milliseconds.
    pub(super) fn pass(&self) -> Vec<i32> {
        // Nearly all, and at once, however many processes the host has.
        kill_pass(|| self.among(soon_below(std::process::id().cast_signed())));
        // Examine them while they are alive: their zombies look like all others.
        let found = self.members();
        if let Some(cgroup) = &self.cgroup {
            cgroup.kill();
        }
        if found.iter().any(Proc::alive) {
            kill_pass(|| self.members());
        }
        let mut left: Vec<i32> = self
            .members()
            .iter()
            .filter(|p| !self.gone(p))
            .map(|p| p.pid)
            .collect();
        if let Some(cgroup) = &self.cgroup {
            if cgroup.populated() {
                left.extend(cgroup.members());
            } else if left.is_empty() {
                cgroup.remove();
            }
        }
        left
    }
}

/// Reaps a zombie child of this process by its pid, so that no other child is reaped by mistake.
fn reaped(process: &Proc) -> bool {
    process.parent == std::process::id().cast_signed() && !process.alive() && reap(process.pid)
}

fn belongs(process: &Proc, marker: &str, command: Option<i32>) -> bool {
    command.is_some_and(|pid| process.pid == pid || process.session == pid || process.group == pid)
        || words(process.pid, "environ", |var| var == marker.as_bytes())
        // A child before its exec is still a copy of its guard, with the run id in its arguments.
        || marker.split_once('=').is_some_and(|(_, run)| {
            words(process.pid, "cmdline", |word| word == run.as_bytes())
                && words(process.pid, "cmdline", |word| word == guard::ARGUMENT.as_bytes())
        })
}

/// True if one of the NUL-terminated words in this file of /proc fits `wanted`.
fn words(pid: i32, file: &str, wanted: impl Fn(&[u8]) -> bool) -> bool {
    let has = |path: PathBuf| {
        std::fs::read(path.join(file)).is_ok_and(|text| text.split(|&b| b == 0).any(&wanted))
    };
    // If the first thread has ended, /proc shows nothing here, although other threads may still run.
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    let headless = Proc::read(pid).is_some_and(|p| p.headless());
    match threads {
        Ok(threads) if headless => threads.flatten().any(|thread| has(thread.path())),
        _ => has(format!("/proc/{pid}").into()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::clock::Boottime;

    /// A process that ends when its stdin is closed, with these arguments and this variable.
    fn waiting(args: &[&str], variable: (&str, &str)) -> (std::process::Child, Proc) {
        let mut command = Command::new("sh");
        command.args(["-c", "read x"]).args(args);
        command.env(variable.0, variable.1).stdin(Stdio::piped());
        let child = command.spawn().expect("a child");
        let pid = child.id().cast_signed();
        // It has executed its program; the kernel shows its words a moment later.
        while std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|text| text.is_empty()) {
            std::thread::yield_now();
        }
        (child, Proc::read(pid).expect("it waits"))
    }

    /// By its variables, its session or group, or the command line of a guard; by none of these it is a stranger.
    #[test]
    fn a_process_is_known_by_what_its_guard_gave_it() {
        let (mut child, process) = waiting(&["a", "7-b"], ("MARK", "7-a"));
        let known = |marker: &str, command| belongs(&process, marker, command);
        assert!(known("MARK=7-a", None));
        for other in ["MARK=7-b", "MARK=7-", "MAR=7-a", "X=7-b", "X"] {
            assert!(!known(other, None), "{other}");
        }
        for command in [process.pid, process.session, process.group] {
            assert!(known("MARK=other", Some(command)));
        }
        assert!(!known("MARK=other", Some(-7)));
        drop(child.stdin.take());
        assert!(child.wait().is_ok());
        for (args, fits) in [
            (["__guard", "job", "7-a"], true),
            (["__guard", "job", "7-b"], false),
            (["guard", "job", "7-a"], false),
        ] {
            let (mut child, process) = waiting(&args, ("MARK", ""));
            assert_eq!(belongs(&process, "RUN=7-a", None), fits, "{args:?}");
            drop(child.stdin.take());
            assert!(child.wait().is_ok());
        }
    }

    #[test]
    fn of_what_is_dead_a_pass_leaves_nothing() {
        let (mut child, process) = waiting(&[], ("MARK", "of a pass"));
        let orphans = Orphans {
            marker: "MARK=of a pass".to_owned(),
            command: None,
            group: None,
            sole: false,
            guard: None,
            cgroup: None,
            known: RefCell::default(),
        };
        let found: Vec<i32> = orphans.members().iter().map(|p| p.pid).collect();
        assert_eq!(found, [process.pid]);
        child.kill().expect("it waits");
        let end = Boottime::now() + std::time::Duration::from_secs(60);
        while Proc::read(process.pid).is_some_and(|p| p.alive()) {
            assert!(Boottime::now() < end);
        }
        assert_eq!(orphans.pass(), Vec::<i32>::new());
        assert_eq!(Proc::read(process.pid), None);
    }

    #[test]
    fn only_what_is_dead_and_ours_is_reaped() {
        let (mut child, mut process) = waiting(&[], ("MARK", ""));
        assert!(!reaped(&process));
        drop(child.stdin.take());
        let end = Boottime::now() + std::time::Duration::from_secs(60);
        while process.alive() {
            assert!(Boottime::now() < end);
            process = Proc::read(process.pid).expect("a zombie");
        }
        let mut stranger = process.clone();
        stranger.parent += 1;
        assert!(!reaped(&stranger));
        while !reaped(&process) {
            assert!(Boottime::now() < end);
        }
        assert_eq!(Proc::read(process.pid), None);
    }
}
