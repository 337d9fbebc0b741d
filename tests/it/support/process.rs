//! Processes by id: their state, children, signals. Zombies count as dead.

use std::{
    ffi::{CStr, CString, OsStr},
    os::unix::{ffi::OsStrExt, process::CommandExt},
    path::Path,
    process::Command,
    sync::Once,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use super::{GENEROUS, wait_until};

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

/// A command that is killed when the thread that starts it ends: a test run that is killed leaves none behind. By
/// setpriv, because a closure before the exec makes std copy the page tables of all tests.
pub fn mortal(program: impl AsRef<OsStr>) -> Command {
    static ONCE: Once = Once::new();
    ONCE.call_once(default_signals);
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program.as_ref());
    command
}

/// Makes `command` see this file or directory in `place`, in a mount namespace of its own. It does not start where we
/// may not mount.
pub fn show_in_place(command: &mut Command, what: &Path, place: &'static CStr) {
    let what = CString::new(what.as_os_str().as_bytes()).expect("a path");
    let ok = |result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    // SAFETY: system calls alone, and nothing is allocated; all pointers are to strings that live on.
    unsafe {
        command.pre_exec(move || {
            let none = std::ptr::null();
            ok(libc::unshare(libc::CLONE_NEWNS))?;
            let private = libc::MS_REC | libc::MS_PRIVATE;
            ok(libc::mount(none, c"/".as_ptr(), none, private, none.cast()))?;
            let (what, place) = (what.as_ptr(), place.as_ptr());
            ok(libc::mount(what, place, none, libc::MS_BIND, none.cast()))
        });
    }
}

/// Whatever the tests themselves were started with: a shell without job control has what it puts into the background
/// ignore SIGINT and SIGQUIT, and soloist hands on what is ignored. Async-signal-safe.
pub fn default_signals() {
    for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGTERM] {
        // SAFETY: a valid signal, and the default or what was there.
        unsafe {
            let before = libc::signal(signal, libc::SIG_DFL);
            if before != libc::SIG_IGN {
                libc::signal(signal, before);
            }
        }
    }
}

pub fn alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

/// Whether it has a handler for the signal.
pub fn catches(pid: u32, signal: Signal) -> bool {
    is_in(pid, "SigCgt:", signal)
}

/// Whether the signal waits, or has a handler: soon after its begin, a program's; before, it would end it.
pub fn outlives(pid: u32, signal: Signal) -> bool {
    catches(pid, signal) || is_in(pid, "SigBlk:", signal)
}

fn is_in(pid: u32, mask: &str, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix(mask));
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

/// Children that have ended and were not waited for.
pub fn zombies(of: u32) -> usize {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&pid| stat(pid).is_some_and(|(state, parent)| parent == of && state == 'Z'))
        .count()
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
    kib(pid, "VmRSS:")
}

fn kib(pid: u32, what: &str) -> Option<u64> {
    std::fs::read_to_string(format!("/proc/{pid}/status"))
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix(what))?
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

/// Ends every soloist that was started in this directory or names it, with all processes that these started. That
/// includes those that outlive their starter: guards, and processes that offer an outcome to a store that is gone.
pub fn end_soloists_in(dir: &std::path::Path) {
    wait_until("no process of the test is left", GENEROUS, || {
        let left = of_directory(dir);
        left.iter().for_each(|&pid| signal(pid, Signal::KILL));
        left.is_empty()
    });
}

/// The soloists that work in this directory, or have it in their arguments or their environment.
fn of_directory(dir: &std::path::Path) -> Vec<u32> {
    let deleted = format!("{} (deleted)", dir.display());
    soloists(|path| {
        let works_there = std::fs::read_link(path.join("cwd"))
            .is_ok_and(|cwd| cwd == dir || cwd.as_os_str() == deleted.as_str());
        let name = dir.as_os_str().as_encoded_bytes();
        works_there || has(&path.join("cmdline"), name) || has(&path.join("environ"), name)
    })
}

/// Living processes that have this file among their arguments.
pub fn with_argument(file: &std::path::Path) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let line = std::path::PathBuf::from(format!("/proc/{pid}/cmdline"));
            has(&line, file.as_os_str().as_encoded_bytes())
        })
        .collect()
}

fn has(file: &std::path::Path, part: &[u8]) -> bool {
    let text = std::fs::read(file).unwrap_or_default();
    text.windows(part.len()).any(|window| window == part)
}

/// Living processes of the program that `wanted` accepts by their directories in /proc.
fn soloists(wanted: impl Fn(&std::path::Path) -> bool) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let path = entry.path();
        // One that becomes another by exec has no arguments for a moment, but its program all the time.
        let exe = std::fs::read_link(path.join("exe")).unwrap_or_default();
        let exe = exe.file_name().unwrap_or_default().as_encoded_bytes();
        let is_soloist = exe == b"soloist" || command_line(pid).contains("soloist __");
        (is_soloist && alive(pid) && wanted(&path)).then_some(pid)
    })
    .collect()
}

/// Marks every process that this test process starts.
const MARK: &std::ffi::CStr = c"SOLOIST_TEST_PROCESS";

/// To be called before `main`: all processes that this one started end with it, also those that no test ended.
pub fn leave_nothing_behind() {
    extern "C" fn at_exit() {
        let mark = format!("{}={}\0", MARK.to_string_lossy(), std::process::id());
        for pid in soloists(|path| has(&path.join("environ"), mark.as_bytes())) {
            if parent(pid) != Some(std::process::id()) {
                eprintln!("a test left a process behind: {pid}: {}", command_line(pid));
            }
            signal(pid, Signal::KILL);
        }
    }
    let pid = std::ffi::CString::new(std::process::id().to_string()).expect("digits");
    // SAFETY: there is one thread yet, and all pointers are valid.
    unsafe {
        libc::setenv(MARK.as_ptr(), pid.as_ptr(), 1);
        libc::atexit(at_exit);
    }
}

/// The CPU time that the process has used, in ticks of 10 ms.
pub fn cpu_ticks(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = text
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace();
    fields
        .skip(11)
        .take(2)
        .filter_map(|n| n.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use soloist::{
        clock::Boottime,
        config,
        guard::{HandOver, KnownEnd, Moment},
        model::Outcome,
        settle::ReleaseOnDeath,
    };

    use super::*;

    const ROLE: &str = "SOLOIST_TEST_LEAVES";

    /// A process that runs for a day, because its store does not exist.
    fn settles() -> u32 {
        let release = ReleaseOnDeath {
            store: config::Store::from_url("redis+unix:///nowhere/redis.sock").expect("a store"),
            key: "k".into(),
            owner: "o".into(),
            patience: Duration::from_secs(24 * 3600),
        };
        let now = Moment {
            wall_us: 0,
            boottime: Boottime::now(),
        };
        let hand_over = HandOver {
            settle: serde_json::to_value(release).expect("JSON"),
            end: KnownEnd {
                outcome: Outcome::Crashed,
                cause: None,
                usage: soloist::model::Usage::default(),
                exit_code: None,
                signal: None,
                error: None,
                started: None,
                ended: now,
            },
        };
        let child = Command::new(env!("CARGO_BIN_EXE_soloist"))
            .arg("__settle")
            .env_remove(ROLE)
            .current_dir("/")
            .stdin(hand_over.to_file().expect("a file"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        child.expect("it starts").id()
    }

    #[test]
    fn what_no_test_looked_after_ends_with_the_tests() {
        if let Some(file) = std::env::var_os(ROLE) {
            return std::fs::write(file, settles().to_string()).expect("the pid");
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = dir.path().join("pid");
        let name = "support::process::tests::what_no_test_looked_after_ends_with_the_tests";
        let ran = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", name])
            .env(ROLE, &file)
            .output()
            .expect("it starts");
        assert!(ran.status.success(), "{ran:?}");
        let pid = std::fs::read_to_string(&file).expect("the pid");
        let pid = pid.parse().expect("a pid");
        let left = (0..500).all(|_| {
            std::thread::sleep(Duration::from_millis(10));
            alive(pid)
        });
        if left {
            signal(pid, Signal::KILL);
        }
        assert!(!left, "{pid} was left behind");
        let err = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(!err.contains("panicked"), "{err}");
    }
}
