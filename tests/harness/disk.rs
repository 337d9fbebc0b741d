//! A small file system that can be filled.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

pub struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    /// Of so many megabytes; None where we may not mount one.
    pub fn mount(megabytes: u32) -> Option<Self> {
        let dir = tempfile::tempdir().ok()?;
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={megabytes}m")])
            .arg("soloist-harness")
            .arg(dir.path())
            .output();
        done.is_ok_and(|o| o.status.success())
            .then_some(Self { dir })
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    fn ballast(&self) -> PathBuf {
        self.path().join("ballast")
    }

    /// Until nothing more can be written.
    pub fn fill(&self) {
        let mut file = std::fs::File::create(self.ballast()).expect("a file");
        for size in [1 << 20, 4096, 1] {
            let block = vec![1; size];
            while file.write_all(&block).is_ok() {}
        }
    }

    pub fn free(&self) {
        std::fs::remove_file(self.ballast()).ok();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let umount = Command::new("umount").arg("-l").arg(self.path()).status();
        umount.ok();
    }
}
