//! Control groups of the instances: one to freeze an instance with all its runs, one to bound its processes.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

pub struct Cgroup(PathBuf);

impl Cgroup {
    /// One of cgroup v2; None where we may not make one.
    pub fn unified(i: usize) -> Option<Self> {
        let below = mount(|kind, _| kind == "cgroup2")?;
        Self::make(&below, i).filter(|c| c.0.join("cgroup.freeze").exists())
    }

    /// One that bounds the number of processes, of cgroup v1; None where we may not make one.
    pub fn pids(i: usize) -> Option<Self> {
        let below = mount(|kind, options| {
            kind == "cgroup" && options.split(',').any(|option| option == "pids")
        })?;
        Self::make(&below, i).filter(|c| c.0.join("pids.max").exists())
    }

    fn make(below: &Path, i: usize) -> Option<Self> {
        // Not `soloist-…`: a daemon of another test would take it for what an abandoned run left.
        let name = format!("harness-{}-i{}", std::process::id(), i + 1);
        let path = below.join(name);
        fs::create_dir(&path).ok()?;
        Some(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn freeze(&self, frozen: bool) {
        fs::write(self.0.join("cgroup.freeze"), if frozen { "1" } else { "0" }).ok();
    }

    /// Freezes the processes of one run, which its guard has put into a cgroup below.
    pub fn freeze_run(&self, run: &str, frozen: bool) {
        let file = self.0.join(format!("soloist-{run}/cgroup.freeze"));
        fs::write(file, if frozen { "1" } else { "0" }).ok();
    }

    /// At most so many processes more than there are; None: any number.
    pub fn limit(&self, more: Option<u64>) {
        let now = fs::read_to_string(self.0.join("pids.current")).unwrap_or_default();
        let now: u64 = now.trim().parse().unwrap_or(0);
        let most = more.map_or_else(|| "max".into(), |more| (now + more).to_string());
        fs::write(self.0.join("pids.max"), most).ok();
    }
}

impl Drop for Cgroup {
    /// What is still in it is killed.
    fn drop(&mut self) {
        self.freeze(false);
        fs::write(self.0.join("cgroup.kill"), "1").ok();
        let begun = Instant::now();
        while self.0.exists() && begun.elapsed() < Duration::from_secs(5) {
            for below in fs::read_dir(&self.0).into_iter().flatten().flatten() {
                fs::remove_dir(below.path()).ok();
            }
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Where a file system of cgroups is mounted that `wanted` accepts by its type and its options.
fn mount(wanted: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        (words.len() > 3 && wanted(words[2], words[3])).then(|| PathBuf::from(words[1]))
    })
}
