//! A cgroup (v2) for one run, if this process may make one: the fastest and most reliable way to end a process tree.
//!
//! It is optional. Without cgroup v2, without the right to write to the guard's own cgroup, or if that cgroup cannot
//! have processes, the guard finds the tree through /proc instead ([`super::tree`]).

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use rustix::process::Signal;

use super::tree::{Proc, process_of_thread};
use crate::blocking;

const PREFIX: &str = "soloist-";

/// A process that checks whether a cgroup is abandoned holds its lock for a moment. If that process is stopped, or
/// another keeps the lock, the start must not wait long: then the run has no cgroup.
const LOCK_PATIENCE: Duration = Duration::from_millis(100);
/// All users may use the names in it (a run may read its own limits), but only its owner can open and lock it.
const MODE: u32 = 0o711;

/// The cgroup `soloist-<run id>` below that of the process that made it.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
    /// The guard keeps it open with a lock on it, which the kernel releases when the guard dies.
    directory: Option<File>,
}

impl Cgroup {
    /// Makes a cgroup; None: no cgroup can be used here.
    pub(crate) fn create(run_id: &str) -> Option<Self> {
        let path = own()?.join(format!("{PREFIX}{run_id}"));
        match fs::DirBuilder::new().mode(MODE).create(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(_) => return None,
        }
        let mut cgroup = Self::at(path);
        cgroup.directory = File::open(&cgroup.path).ok();
        let locked = cgroup.directory.as_ref().is_some_and(lock_shared);
        // Linux before 5.14 has no cgroup.kill.
        if locked && cgroup.path.join("cgroup.kill").exists() {
            return Some(cgroup);
        }
        cgroup.remove();
        None
    }

    /// A cgroup that a guard reported, or that its run would have; it need not exist.
    pub(crate) fn at(path: PathBuf) -> Self {
        Self {
            path,
            directory: None,
        }
    }

    /// True: the process that made it is dead, in whichever pid namespace it ran.
    pub(crate) fn abandoned(&self) -> bool {
        File::open(&self.path).is_ok_and(|directory| directory.try_lock().is_ok())
    }

    /// The user who made it.
    pub(crate) fn owner(&self) -> Option<u32> {
        fs::metadata(&self.path).map(|meta| meta.uid()).ok()
    }

    /// Moves this process into it. False: the process stays where it is.
    pub(crate) fn enter(&self) -> bool {
        fs::write(self.path.join("cgroup.procs"), "0").is_ok()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// For a process to be forked into it.
    pub(super) fn directory(&self) -> Option<&File> {
        self.directory.as_ref()
    }

    /// The pids in it and below it.
    pub(crate) fn members(&self) -> Vec<i32> {
        fn add(path: &Path, pids: &mut Vec<i32>) {
            let read = |file: &str| fs::read_to_string(path.join(file));
            let numbers = |text: &str| -> Vec<i32> {
                text.lines().filter_map(|line| line.parse().ok()).collect()
            };
            match read("cgroup.procs") {
                Ok(text) => pids.extend(numbers(&text)),
                // A threaded cgroup, as root may make one, lists only its threads.
                Err(_) => {
                    let threads = numbers(&read("cgroup.threads").unwrap_or_default());
                    pids.extend(threads.into_iter().filter_map(process_of_thread));
                }
            }
            directories(path).for_each(|below| add(&below, pids));
        }
        let mut pids = Vec::new();
        add(&self.path, &mut pids);
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// True: a process in it, or below it, is alive.
    pub(crate) fn populated(&self) -> bool {
        fs::read_to_string(self.path.join("cgroup.events"))
            .is_ok_and(|text| text.contains("populated 1"))
    }

    /// Sends SIGKILL to all processes in it and below it, even to frozen ones and to those that are forking.
    pub(crate) fn kill(&self) {
        let killed = fs::write(self.path.join("cgroup.kill"), "1").is_ok();
        // The kernel signals first threads only, and misses a process whose first thread has ended. In a threaded
        // cgroup it signals nobody.
        let others = self.members().into_iter().filter_map(Proc::read);
        let others: Vec<Proc> = others.filter(|p| !killed || p.headless()).collect();
        if !others.is_empty() {
            // A process that is still in the cgroup still has its pid, so the signal cannot reach a stranger.
            let members = self.members();
            for process in others.iter().filter(|p| members.contains(&p.pid)) {
                process.signal(Signal::KILL);
            }
        }
    }

    /// Removes it and the cgroups that the command made below it; without effect while a process is in it.
    pub(crate) fn remove(&self) {
        fn remove(path: &Path) {
            // Most have none below them, and to list them takes longer than to try.
            if fs::remove_dir(path).is_err() {
                directories(path).for_each(|below| remove(&below));
                let _ = fs::remove_dir(path);
            }
        }
        remove(&self.path);
    }
}

fn directories(path: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let directories = entries.filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()));
    directories.map(|entry| entry.path())
}

/// Locks it (shared), to show other processes that the owner is alive. False: another process has the lock.
fn lock_shared(directory: &File) -> bool {
    let locked = blocking::within(LOCK_PATIENCE, || match directory.try_lock_shared() {
        Ok(()) => Some(true),
        Err(TryLockError::WouldBlock) => None,
        Err(_) => Some(false),
    });
    locked == Some(true)
}

/// The cgroup of `run_id`, if its guard runs in this process's cgroup and made one.
pub(crate) fn of_run(run_id: &str) -> Option<Cgroup> {
    let path = own()?.join(format!("{PREFIX}{run_id}"));
    path.exists().then(|| Cgroup::at(path))
}

/// The cgroups of runs below this process's own cgroup, with their run ids.
pub(crate) fn of_all_runs() -> Vec<(String, Cgroup)> {
    let entries = own().and_then(|path| fs::read_dir(path).ok());
    entries
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            // Somebody else's cgroup may begin alike: only a run's id is a run.
            let run = name.strip_prefix(PREFIX)?;
            uuid::Uuid::try_parse(run).ok()?;
            Some((run.to_owned(), Cgroup::at(entry.path())))
        })
        .collect()
}

/// What is mounted, read once by a process from which guards are forked: it costs the kernel much to write that down.
static MOUNTS: OnceLock<String> = OnceLock::new();

/// For this process and those that are forked from it.
pub(super) fn remember_mounts() {
    if let Some(mounts) = mounts() {
        MOUNTS.get_or_init(|| mounts);
    }
}

fn mounts() -> Option<String> {
    fs::read_to_string("/proc/self/mountinfo").ok()
}

/// Somebody has stopped this process (a debugger counts, too), or frozen it: it can do nothing.
pub(crate) fn helpless(pid: i32) -> bool {
    Proc::read(pid).is_some_and(|process| process.stopped()) || frozen(pid)
}

/// As [`helpless`], for one who looks again and again: what was mounted at the first look counts.
pub(crate) fn helpless_again(pid: i32) -> bool {
    static OF_CGROUPS: OnceLock<String> = OnceLock::new();
    let of_cgroups = OF_CGROUPS.get_or_init(|| {
        let mounts = mounts().unwrap_or_default();
        let lines = mounts.lines().filter(|line| line.contains(" - cgroup"));
        lines.flat_map(|line| [line, "\n"]).collect()
    });
    Proc::read(pid).is_some_and(|process| process.stopped()) || frozen_in(pid, of_cgroups)
}

/// Somebody has frozen a cgroup that holds this process (v2, or the freezer of v1), so the kernel lets it do nothing,
/// or soon will. In /proc it looks as if it slept.
pub(crate) fn frozen(pid: i32) -> bool {
    match MOUNTS.get() {
        Some(mounts) => frozen_in(pid, mounts),
        None => mounts().is_some_and(|mounts| frozen_in(pid, &mounts)),
    }
}

fn frozen_in(pid: i32, mounts: &str) -> bool {
    let Ok(membership) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else {
        return false;
    };
    let says = |file: PathBuf, word: &str| {
        fs::read_to_string(file).is_ok_and(|text| text.lines().any(|line| line == word))
    };
    let v2 = locate(&membership, mounts, &V2).is_some_and(|path| {
        // All is frozen, or, where one process in it cannot be, what can be.
        says(path.join("cgroup.events"), "frozen 1")
            || path
                .ancestors()
                .any(|dir| says(dir.join("cgroup.freeze"), "1"))
    });
    v2 || locate(&membership, mounts, &FREEZER).is_some_and(|path| {
        let state = path.join("freezer.state");
        says(state.clone(), "FROZEN") || says(state, "FREEZING")
    })
}

/// One of the trees of cgroups.
struct Hierarchy {
    /// As in /proc/PID/cgroup; v2 has none.
    controller: &'static str,
    filesystem: &'static str,
}

const V2: Hierarchy = Hierarchy {
    controller: "",
    filesystem: "cgroup2",
};

/// Of v1: what holds a process in it keeps even SIGKILL waiting.
const FREEZER: Hierarchy = Hierarchy {
    controller: "freezer",
    filesystem: "cgroup",
};

impl Hierarchy {
    /// The cgroup in a line of /proc/PID/cgroup: `6:freezer:/a`, `3:cpu,cpuacct:/b`, `0::/c`.
    fn path<'l>(&self, line: &'l str) -> Option<&'l str> {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers
            .split(',')
            .any(|c| c == self.controller)
            .then_some(path)
    }

    /// Whether it is what is mounted here: `cgroup cgroup rw,freezer`, `cgroup2 cgroup2 rw`.
    fn is_mounted(&self, filesystem: &str) -> bool {
        let mut words = filesystem.split(' ');
        words.next() == Some(self.filesystem)
            && (self.controller.is_empty()
                || (words.nth(1)).is_some_and(|o| o.split(',').any(|o| o == self.controller)))
    }
}

/// The directory of this process's own v2 cgroup.
fn own() -> Option<PathBuf> {
    of_process("self", &V2)
}

/// The directory of a process's cgroup; `pid` may be "self".
fn of_process(pid: &str, hierarchy: &Hierarchy) -> Option<PathBuf> {
    let membership = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    match MOUNTS.get() {
        Some(mounts) => locate(&membership, mounts, hierarchy),
        None => locate(&membership, &mounts()?, hierarchy),
    }
}

/// `membership` is /proc/self/cgroup, `mounts` /proc/self/mountinfo.
fn locate(membership: &str, mounts: &str, hierarchy: &Hierarchy) -> Option<PathBuf> {
    let path = membership.lines().find_map(|line| hierarchy.path(line))?;
    mounts.lines().find_map(|line| {
        // 41 31 0:38 ROOT MOUNT-POINT OPTIONS [optional fields] - FSTYPE SOURCE OPTIONS
        let (place, filesystem) = line.split_once(" - ")?;
        if !hierarchy.is_mounted(filesystem) {
            return None;
        }
        let mut fields = place.split(' ').skip(3);
        let (root, mount_point) = (unescape(fields.next()?), unescape(fields.next()?));
        // The mount may show only a part of the hierarchy, without this process's cgroup.
        let below = Path::new(path).strip_prefix(root).ok()?;
        let inside = below
            .components()
            .all(|c| matches!(c, std::path::Component::Normal(_)));
        inside.then(|| Path::new(&mount_point).join(below))
    })
}

/// mountinfo writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &str) -> String {
    [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ]
    .into_iter()
    .fold(field.to_owned(), |text, (code, char)| {
        text.replace(code, char)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_cgroup_is_found_in_unified_hybrid_and_partial_mounts() {
        let unified =
            "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        let hybrid = "37 31 0:34 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      41 31 0:38 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw\n";
        let partial = "41 31 0:38 /docker/abc /sys/fs/cgroup ro master:3 - cgroup2 cgroup rw\n";
        for (membership, mounts, expected) in [
            (
                "0::/system.slice/a.service\n",
                unified,
                Some("/sys/fs/cgroup/system.slice/a.service"),
            ),
            ("1:cpu:/x\n0::/\n", hybrid, Some("/sys/fs/cgroup/uni fied")),
            ("0::/docker/abc/x\n", partial, Some("/sys/fs/cgroup/x")),
            ("0::/docker/abcdef\n", partial, None),
            ("0::/../other\n", unified, None),
            ("1:cpu:/x\n", hybrid, None),
            (
                "0::/\n",
                "37 31 0:34 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n",
                None,
            ),
        ] {
            assert_eq!(
                locate(membership, mounts, &V2),
                expected.map(PathBuf::from),
                "{membership}"
            );
        }
        let freezer = "37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n\
                       38 31 0:35 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        for (membership, expected) in [
            (
                "6:freezer:/a\n5:cpu:/b\n0::/c\n",
                Some("/sys/fs/cgroup/freezer/a"),
            ),
            ("6:cpu,freezer:/a b\n", Some("/sys/fs/cgroup/freezer/a b")),
            ("5:cpu:/b\n0::/c\n", None),
        ] {
            let found = locate(membership, freezer, &FREEZER);
            assert_eq!(found, expected.map(PathBuf::from), "{membership}");
        }
        assert_eq!(locate("6:freezer:/a\n", unified, &FREEZER), None);
    }
}
