//! Cgroups of the tests' own.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::GENEROUS;

/// A cgroup below our own, removed at the end. A daemon ends what others that were killed left in its cgroup.
pub struct TestCgroup(pub PathBuf);

impl TestCgroup {
    pub fn new() -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|l| l.strip_prefix("0::/"))?.to_owned();
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mount = mounts
            .lines()
            .find(|l| l.contains(" - cgroup2 "))?
            .split(' ')
            .nth(4)?
            .to_owned();
        let name = format!("test-{}", uuid::Uuid::new_v4());
        let path = Path::new(&mount).join(own).join(name);
        fs::create_dir(&path).ok()?;
        Some(Self(path))
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("cgroup.freeze"), "0");
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        // What a failed test left.
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        let removed = || {
            for below in fs::read_dir(&self.0).into_iter().flatten().flatten() {
                let _ = fs::remove_dir(below.path());
            }
            fs::remove_dir(&self.0).is_ok() || !self.0.exists()
        };
        let end = Instant::now() + GENEROUS;
        while !removed() {
            if Instant::now() > end {
                // A second panic would end all tests.
                assert!(std::thread::panicking(), "the cgroup cannot be removed");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
