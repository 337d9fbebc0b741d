//! The real daemon, as a process of its own.

use std::{
    fmt::Write as _,
    fs::File,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

/// A running daemon; ended when dropped. Its guards end what it ran.
pub struct Daemon {
    process: Option<Child>,
}

impl Daemon {
    /// Its log goes to `<dir>/<instance>.log`.
    pub fn start(dir: &Path, config: &Path, instance: &str) -> Self {
        let log = File::create(dir.join(format!("{instance}.log"))).expect("a log file");
        let process = Command::new(env!("CARGO_BIN_EXE_soloist"))
            .arg("--config")
            .arg(config)
            .arg("run")
            .env("SOLOIST_INSTANCE", instance)
            .current_dir(dir)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log)
            .spawn()
            .expect("the daemon starts");
        Self {
            process: Some(process),
        }
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.pid() as i32).filter(|_| self.process.is_some()) {
            let _ = kill_process(pid, signal);
        }
    }

    /// As an operator stops it.
    pub fn stop(mut self) {
        self.signal(Signal::TERM);
        self.wait();
    }

    /// SIGKILL.
    pub fn kill(mut self) {
        self.signal(Signal::KILL);
        self.wait();
    }

    fn wait(&mut self) {
        if let Some(mut process) = self.process.take() {
            for _ in 0..2000 {
                if !matches!(process.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        self.wait();
    }
}

/// A configuration file with `idle` jobs that are due at other times of the day, and `more` at its end.
///
/// The idle ones have some 1,300 different schedules, as the jobs of a large site do.
pub fn config(dir: &Path, url: &str, idle: usize, more: &str) -> PathBuf {
    let hour = soloist::clock::wall_us() / 3_600_000_000 % 24;
    let mut text = format!("[store]\nurl = \"{url}\"\n[defaults]\noutput = {{ log = false }}\n");
    text += more;
    for i in 0..idle as i64 {
        // Not in this hour nor in the next.
        let (minute, h) = (i % 60, (hour + 2 + i / 60 % 22) % 24);
        let _ = write!(
            text,
            "[jobs.idle-{i:05}]\nschedule = \"{minute} {h} * * *\"\n\
             command = [\"/usr/local/bin/report\", \"--customer\", \"{i}\"]\n"
        );
    }
    let path = dir.join("jobs.toml");
    std::fs::write(&path, text).expect("a configuration file");
    path
}
