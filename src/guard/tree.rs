//! Process trees as /proc shows them: who descends from whom, and signals that reach exactly those.
//!
//! A tree is found by its parents. That is complete for the descendants of a subreaper, however often they fork
//! and whatever sessions they make, because whoever loses its parent falls back to the subreaper.

use std::collections::HashSet;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// PF_EXITING of the kernel's task flags: the process is on its way out, its files may be closed already.
const EXITING: u64 = 0x4;
/// PF_FORKNOEXEC: forked, and has not executed a program since.
const NOT_EXECUTED: u64 = 0x40;

/// One line of /proc/PID/stat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Proc {
    pub pid: i32,
    pub parent: i32,
    pub group: i32,
    pub session: i32,
    state: char,
    flags: u64,
    threads: u64,
    /// Start time in clock ticks since boot: with the pid it names a process for good.
    started: u64,
}

impl Proc {
    /// None when there is no such process.
    pub(crate) fn read(pid: i32) -> Option<Self> {
        Self::parse(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        // The name stands in parentheses and may hold anything, also parentheses and newlines.
        let name_end = stat.iter().rposition(|&b| b == b')')?;
        let pid = std::str::from_utf8(&stat[..stat.iter().position(|&b| b == b' ')?])
            .ok()?
            .parse()
            .ok()?;
        let rest = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        Some(Self {
            pid,
            state: fields.first()?.chars().next()?,
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            session: fields.get(3)?.parse().ok()?,
            flags: fields.get(6)?.parse().ok()?,
            threads: fields.get(17)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
        })
    }

    /// Neither a zombie nor dead. One whose first thread has ended shows as a zombie, and runs for as long as it has
    /// others: it can be signalled, and cannot be waited for.
    pub(crate) fn alive(&self) -> bool {
        !matches!(self.state, 'Z' | 'X' | 'x') || self.threads > 1
    }

    /// Its first thread has ended, and others run.
    pub(crate) fn headless(&self) -> bool {
        self.state == 'Z' && self.alive()
    }

    /// By SIGSTOP, or by a debugger.
    pub(crate) fn stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// It has begun to exit, or is dead.
    pub(crate) fn exiting(&self) -> bool {
        self.flags & EXITING != 0 || !self.alive()
    }

    /// It has executed a program since it was forked. That stays known until it is waited for.
    pub(crate) fn executed(&self) -> bool {
        self.flags & NOT_EXECUTED == 0
    }

    /// Sends `signal` to this very process: never to a later one that was given its number.
    pub(crate) fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return;
        };
        let fd = pidfd_open(pid, PidfdFlags::empty());
        // After that: whom the descriptor means is the one that is looked at, or dead. A number may also have become that of
        // a thread, which has no such descriptor; a signal that is sent to it reaches the whole process.
        if Self::read(self.pid).is_none_or(|p| p.started != self.started) {
            return;
        }
        // A process that is gone, or that we may not signal: the caller looks again and sees.
        let _ = match fd {
            Ok(fd) => pidfd_send_signal(fd, signal),
            // No descriptor left (or none allowed) must not save anybody's life.
            Err(_) => rustix::process::kill_process(pid, signal),
        };
    }

    /// Names this process for good.
    pub(crate) fn key(&self) -> (i32, u64) {
        (self.pid, self.started)
    }
}

/// All processes that /proc shows.
pub(super) fn all() -> Vec<Proc> {
    let Ok(dir) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    dir.filter_map(|entry| Proc::read(entry.ok()?.file_name().to_str()?.parse().ok()?))
        .collect()
}

/// The descendants of `root`, without itself; zombies are among them.
pub(crate) fn below(root: i32) -> Vec<Proc> {
    descend(all(), [root].into())
}

/// Those of `rest` that descend from one of `found`, without these.
pub(crate) fn descend(mut rest: Vec<Proc>, mut found: HashSet<i32>) -> Vec<Proc> {
    let mut tree = Vec::new();
    // A child may be listed before its parent: repeat until nothing is added.
    loop {
        let (children, others): (Vec<_>, Vec<_>) = rest
            .into_iter()
            .partition(|p| found.contains(&p.parent) && !found.contains(&p.pid));
        if children.is_empty() {
            return tree;
        }
        found.extend(children.iter().map(|p| p.pid));
        tree.extend(children);
        rest = others;
    }
}

/// Kills all that `members` lists, one pass: stops them first, so that none can fork away while the others are
/// being killed. What still stands afterwards needs another pass.
pub(crate) fn kill_pass(members: impl Fn() -> Vec<Proc>) {
    let mut stopped = HashSet::new();
    // Each round either meets a process forked during the one before, or is the last. A fork bomb makes no end
    // of rounds, but each kills more of it than it can grow once its parents are stopped.
    for _ in 0..16 {
        let new: Vec<_> = members()
            .into_iter()
            .filter(|p| p.alive() && stopped.insert(p.key()))
            .collect();
        if new.is_empty() {
            break;
        }
        for process in new {
            process.signal(Signal::STOP);
        }
    }
    for process in members().into_iter().filter(Proc::alive) {
        process.signal(Signal::KILL);
    }
}

/// Kills the children of this process; false: the kernel does not say who they are. For a process with one thread, which
/// alone waits for its children: until then their numbers are theirs.
pub(super) fn kill_children() -> bool {
    let Ok(list) = std::fs::read_to_string("/proc/thread-self/children") else {
        return false;
    };
    let pids = list.split_ascii_whitespace();
    for pid in pids.filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_hold_anything() {
        let stat = b"42 (a) R 1 (\n) S 7 8 9 0 -1 4194564 1 0 0 0 2 3 0 0 20 0 1 0 12345 1 1";
        let process = Proc::parse(stat).expect("a process");
        assert_eq!(
            (process.pid, process.parent, process.group, process.session),
            (42, 7, 8, 9)
        );
        assert_eq!(
            (process.state, process.started, process.flags),
            ('S', 12345, 4_194_564)
        );
        assert_eq!(process.threads, 1);
        assert!(process.alive() && process.exiting() && process.executed());
        assert_eq!(Proc::parse(b""), None);
        assert_eq!(Proc::parse(b"1 (x) S"), None);
    }

    #[test]
    fn a_zombie_with_threads_is_alive() {
        for (state, threads, alive) in [("S", 1, true), ("Z", 1, false), ("Z", 3, true)] {
            let stat = format!("42 (a) {state} 1 7 8 9 0 0 1 0 0 0 2 3 0 0 20 0 {threads} 0 5 1 1");
            let process = Proc::parse(stat.as_bytes()).expect("a process");
            assert_eq!(process.alive(), alive, "{stat}");
        }
    }

    /// In a process of its own, which a signal would end.
    #[test]
    fn a_number_that_became_that_of_a_thread_is_not_signalled() {
        const ROLE: &str = "SOLOIST_TEST_THREAD_SIGNALLED";
        if std::env::var_os(ROLE).is_none() {
            let name = "guard::tree::tests::a_number_that_became_that_of_a_thread_is_not_signalled";
            let status = std::process::Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", name])
                .env(ROLE, "1")
                .stdout(std::process::Stdio::null())
                .status();
            let status = status.expect("it starts");
            return assert!(status.success(), "{status}");
        }
        // Tests have threads of their own.
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        assert_ne!(thread, std::process::id().cast_signed());
        let mut process = Proc::read(thread).expect("the number is there");
        process.started -= 1;
        process.signal(Signal::KILL);
    }

    #[test]
    fn we_are_below_our_parent() {
        let me = Proc::read(std::process::id().cast_signed()).expect("us");
        assert!(me.alive() && !me.exiting());
        assert!(below(me.parent).iter().any(|p| p.key() == me.key()));
        assert!(!below(me.pid).iter().any(|p| p.key() == me.key()));
    }
}
