//! Finds the descendants of a process in /proc, and signals exactly those.
//!
//! It finds a tree by parent pids. For a subreaper that finds all descendants, however often they fork and whatever
//! sessions they make, because the subreaper becomes the parent of every orphan.

use std::collections::HashSet;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// PF_EXITING of the kernel's task flags: the process is exiting, and its files may be closed already.
const EXITING: u64 = 0x4;
/// PF_FORKNOEXEC: the process was forked, and has not executed a program since.
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
    /// Start time in clock ticks since boot: together with the pid it identifies a process for ever.
    started: u64,
}

impl Proc {
    /// None when there is no such process.
    pub(crate) fn read(pid: i32) -> Option<Self> {
        Self::parse(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        // The name is in parentheses and may contain anything, also parentheses and newlines.
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

    /// True: it is neither a zombie nor dead. A process whose first thread has ended looks like a zombie, but runs
    /// while it has other threads: it can be signalled, and cannot be reaped.
    pub(crate) fn alive(&self) -> bool {
        !matches!(self.state, 'Z' | 'X' | 'x') || self.threads > 1
    }

    /// Its first thread has ended, but others still run.
    pub(crate) fn headless(&self) -> bool {
        self.state == 'Z' && self.alive()
    }

    /// Stopped by a signal or by a debugger.
    pub(crate) fn stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// It has begun to exit, or is dead.
    pub(crate) fn exiting(&self) -> bool {
        self.flags & EXITING != 0 || !self.alive()
    }

    /// It has executed a program since it was forked. A zombie still shows this.
    pub(crate) fn executed(&self) -> bool {
        self.flags & NOT_EXECUTED == 0
    }

    /// Sends `signal` to exactly this process, never to a later one with the same pid.
    pub(crate) fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return;
        };
        let fd = pidfd_open(pid, PidfdFlags::empty());
        // Compare after opening the descriptor: it then refers to the same process, or to a dead one. The pid may also
        // be a thread's by now, for which there is no such descriptor; a signal to it would reach its whole process.
        if Self::read(self.pid).is_none_or(|p| p.started != self.started) {
            return;
        }
        // Ignore an error: the process is gone, or this process may not signal it. The caller's next walk shows which.
        let _ = match fd {
            Ok(fd) => pidfd_send_signal(fd, signal),
            // Without a free (or permitted) descriptor, the process must still be killed.
            Err(_) => rustix::process::kill_process(pid, signal),
        };
    }

    /// Identifies this process for ever, unlike its pid.
    pub(crate) fn key(&self) -> (i32, u64) {
        (self.pid, self.started)
    }
}

/// The pid of the process to which a thread belongs.
pub(super) fn process_of_thread(thread: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    line.trim().parse().ok()
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

/// The most processes that [`listed_below`] finds: a tree may grow faster than it is listed.
const MOST: usize = 4096;

/// As [`below`], by reading as many files as the tree has threads instead of one for each process of the host: on a
/// host with thousands of processes that is faster by far. What forks or ends meanwhile may be missing, and more than
/// in a walk: to find nothing proves nothing.
pub(crate) fn soon_below(root: i32) -> Vec<Proc> {
    listed_below(root, MOST).unwrap_or_else(|| below(root))
}

/// The descendants of `root` that the kernel lists as children of their parents' threads; None: it lists none, or there
/// are more than `most`.
fn listed_below(root: i32, most: usize) -> Option<Vec<Proc>> {
    std::fs::read_to_string("/proc/thread-self/children").ok()?;
    let (mut tree, mut parents) = (Vec::new(), vec![root]);
    while let Some(parent) = parents.pop() {
        let threads = std::fs::read_dir(format!("/proc/{parent}/task"));
        for thread in threads.into_iter().flatten().flatten() {
            let list = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            let children = list.split_ascii_whitespace();
            // A number that was reused since belongs to a child of somebody else.
            let children = children
                .filter_map(|pid| Proc::read(pid.parse().ok()?))
                .filter(|p| p.parent == parent);
            for child in children {
                parents.push(child.pid);
                tree.push(child);
            }
        }
        if tree.len() > most {
            return None;
        }
    }
    Some(tree)
}

/// The processes of `rest` that descend from one of `found`, without `found` itself.
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

/// Kills the processes that `members` lists, in one pass: stops them first, so that none can fork while the others are
/// being killed. Survivors need another pass.
pub(crate) fn kill_pass(members: impl Fn() -> Vec<Proc>) {
    let mut stopped = HashSet::new();
    // Each round either finds a process that was forked during the previous one, or is the last. A fork bomb does not
    // cause endless rounds: once its parents are stopped, each round kills more processes than it can add.
    for _ in 0..16 {
        let new: Vec<_> = members()
            .into_iter()
            .filter(Proc::alive)
            .filter(|p| stopped.insert(p.key()))
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

/// Kills the children of this process; false: the kernel does not list them. Only for a process whose single thread
/// reaps its children: their pids stay theirs until then.
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
        for (state, threads, alive, headless) in [
            ("S", 1, true, false),
            ("S", 3, true, false),
            ("Z", 1, false, false),
            ("Z", 3, true, true),
        ] {
            let stat = format!("42 (a) {state} 1 7 8 9 0 0 1 0 0 0 2 3 0 0 20 0 {threads} 0 5 1 1");
            let process = Proc::parse(stat.as_bytes()).expect("a process");
            assert_eq!(
                (process.alive(), process.headless()),
                (alive, headless),
                "{stat}"
            );
        }
    }

    #[test]
    fn the_kernel_says_who_exits_and_who_executed_nothing_yet() {
        for (flags, state, exiting, executed) in [
            (0, "S", false, true),
            (EXITING, "S", true, true),
            (NOT_EXECUTED, "R", false, false),
            (NOT_EXECUTED | EXITING, "Z", true, false),
            (0, "Z", true, true),
        ] {
            let stat = format!("42 (a) {state} 1 7 8 9 0 {flags} 1 0 0 0 2 3 0 0 20 0 1 0 5 1 1");
            let process = Proc::parse(stat.as_bytes()).expect("a process");
            let says = (process.exiting(), process.executed());
            assert_eq!(says, (exiting, executed), "{stat}");
        }
    }

    #[test]
    fn what_a_signal_or_a_debugger_stopped_is_stopped_and_nothing_else() {
        for (state, stopped) in [
            ("T", true),
            ("t", true),
            ("S", false),
            ("R", false),
            ("Z", false),
        ] {
            let stat = format!("42 (a) {state} 1 7 8 9 0 0 1 0 0 0 2 3 0 0 20 0 1 0 5 1 1");
            let process = Proc::parse(stat.as_bytes()).expect("a process");
            assert_eq!(process.stopped(), stopped, "{stat}");
        }
    }

    /// Runs the test in another process, because a wrong signal would end it.
    #[test]
    fn a_number_that_became_that_of_a_thread_is_not_signalled() {
        let name = "guard::tree::tests::a_number_that_became_that_of_a_thread_is_not_signalled";
        if super::super::tests::ran_elsewhere(name) {
            return;
        }
        // Each test runs in its own thread, so this is not the process's first.
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        assert_ne!(thread, std::process::id().cast_signed());
        let mut process = Proc::read(thread).expect("the number is there");
        process.started -= 1;
        process.signal(Signal::KILL);
    }

    /// Also the child of a thread, and a child of it in a session of its own.
    #[test]
    fn the_kernel_lists_the_same_tree_as_a_walk_over_all_processes() {
        let thread = std::thread::spawn(|| {
            let mut child = std::process::Command::new("setsid")
                .args(["--fork", "sh", "-c", "sleep 60 & echo $!; wait"])
                .stdout(std::process::Stdio::piped())
                .spawn()
                .expect("setsid");
            let mut line = String::new();
            let mut stdout = std::io::BufReader::new(child.stdout.take().expect("its output"));
            std::io::BufRead::read_line(&mut stdout, &mut line).expect("the pid of a sleep");
            child.wait().expect("the end of setsid");
            (line.trim().parse().expect("a pid"), stdout)
        });
        let (sleeper, _stdout): (i32, _) = thread.join().expect("a thread");
        let shell = Proc::read(Proc::read(sleeper).expect("it").parent).expect("its shell");
        let keys = |list: Vec<Proc>| list.iter().map(Proc::key).collect::<HashSet<_>>();
        // A kernel without CONFIG_PROC_CHILDREN lists none; then there is the walk alone.
        let listed = |root| keys(soon_below(root));
        let all = listed(shell.parent);
        assert!(all.contains(&shell.key()) && all.iter().any(|(pid, _)| *pid == sleeper));
        assert_eq!(listed(shell.pid), keys(below(shell.pid)));
        let lists = std::fs::exists("/proc/thread-self/children").expect("an answer");
        for (most, found) in [(0, None), (1, Some(1)), (2, Some(1))] {
            let found = found.filter(|_| lists);
            assert_eq!(listed_below(shell.pid, most).map(|l| l.len()), found);
        }
        for pid in [shell.pid, sleeper] {
            Proc::read(pid).expect("it").signal(Signal::KILL);
        }
    }

    #[test]
    fn we_are_below_our_parent() {
        let me = Proc::read(std::process::id().cast_signed()).expect("us");
        assert!(me.alive() && !me.exiting());
        assert!(below(me.parent).iter().any(|p| p.key() == me.key()));
        assert!(!below(me.pid).iter().any(|p| p.key() == me.key()));
    }
}
