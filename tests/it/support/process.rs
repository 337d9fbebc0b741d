//! Processes by id: their state, children, signals. Zombies count as dead.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Now on CLOCK_BOOTTIME, nanoseconds: the witness's clock.
pub fn boottime_ns() -> i64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}

/// State letter and parent of a process; None when there is none.
fn stat(pid: u32) -> Option<(char, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in parentheses and may contain anything.
    let mut rest = text[text.rfind(')')? + 1..].split_whitespace();
    Some((rest.next()?.chars().next()?, rest.next()?.parse().ok()?))
}

pub fn alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

/// Whether it has a handler for this signal.
pub fn catches(pid: u32, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal.as_raw() - 1) != 0)
}

pub fn parent(pid: u32) -> Option<u32> {
    stat(pid).map(|(_, parent)| parent)
}

pub fn children(of: u32) -> Vec<u32> {
    let Ok(all) = std::fs::read_dir("/proc") else {
        return vec![];
    };
    all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&pid| stat(pid).is_some_and(|(state, parent)| parent == of && state != 'Z'))
        .collect()
}

/// Arguments of a process, joined by blanks.
pub fn command_line(pid: u32) -> String {
    std::fs::read(format!("/proc/{pid}/cmdline")).map_or_else(
        |_| String::new(),
        |bytes| String::from_utf8_lossy(&bytes).replace('\0', " "),
    )
}

/// Resident memory in KiB; None when the process is gone.
pub fn resident_kib(pid: u32) -> Option<u64> {
    std::fs::read_to_string(format!("/proc/{pid}/status"))
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .ok()
}

/// Sends a signal; a process that is gone is not an error.
pub fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a process id")).expect("not 0");
    match kill_process(pid, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(e) => panic!("cannot signal {pid:?}: {e}"),
    }
}

/// Waits for a child to end, and ends it when it does not.
pub fn reap(child: &mut std::process::Child, patience: Duration) {
    let begun = std::time::Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if begun.elapsed() > patience {
            child.kill().ok();
            child.wait().ok();
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Ends every soloist that was started in this directory, also those that go on after the one that was started:
/// guards, and what offers an outcome to a store that is gone.
pub fn end_soloists_in(dir: &std::path::Path) {
    let deleted = format!("{} (deleted)", dir.display());
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let there = std::fs::read_link(entry.path().join("cwd"))
            .is_ok_and(|cwd| cwd == dir || cwd.as_os_str() == deleted.as_str());
        if there && command_line(pid).contains("soloist __") {
            signal(pid, Signal::KILL);
        }
    }
}
