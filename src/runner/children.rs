//! The children of this process: those that it started, and orphans that became its children.
//!
//! A subreaper becomes the parent of the orphans of killed guards; the first process of a container becomes the parent
//! of all its orphans. No other code here reaps these orphans, and each would stay a zombie until this process ends.
//! But this code must not take the exit status of a child that other code waits for. So this module lists each child
//! that this program starts, from before it can end until it is reaped.

use std::{
    io,
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    process::ExitStatus,
    time::Duration,
};

use crate::logic::backoff::Pauses;
use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal};
use tokio::{
    io::{Interest, unix::AsyncFd},
    process::{Child, ChildStderr, ChildStdout, Command},
    signal::unix::{SignalKind, signal},
};

/// How many zombies a task reaps before other tasks get their turn.
const AT_ONCE: usize = 64;

/// Pause before checking again while an ended child that this program started hides the zombies behind it: the first,
/// and the longest.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(512));

/// Held while a child is started and not listed yet: it may have ended by then. A start may take long on a busy host,
/// so those that reap do not wait for it.
static STARTING: Mutex<()> = Mutex::new(());

/// A pid may be listed twice for a moment, if the kernel reuses it at once.
static OWN: Mutex<Vec<i32>> = Mutex::new(Vec::new());

fn own() -> MutexGuard<'static, Vec<i32>> {
    OWN.lock()
}

/// A child that this program reaps, even after this value is dropped.
#[derive(Debug)]
pub(super) struct OwnChild {
    /// None: moved to the task that waits for it.
    child: Option<Kind>,
    /// None: it has been reaped.
    listed: Option<i32>,
}

impl OwnChild {
    /// Needs a Tokio runtime.
    pub(super) fn spawn(command: std::process::Command) -> io::Result<Self> {
        let _starting = STARTING.lock();
        let child = Command::from(command).spawn()?;
        let listed = child.id().and_then(|pid| i32::try_from(pid).ok());
        own().extend(listed);
        Ok(Self {
            child: Some(Kind::Spawned(child)),
            listed,
        })
    }

    /// A child of this process that another process forked: `fork` asks for it and returns its pid. Needs a Tokio
    /// runtime.
    pub(super) fn forked<E: From<io::Error>>(
        fork: impl FnOnce() -> Result<i32, E>,
        output: [OwnedFd; 2],
    ) -> Result<Self, E> {
        let _starting = STARTING.lock();
        let pid = fork()?;
        // If this fails, nobody keeps the guard's socket, so that it ends; it is reaped as orphans are.
        let child = Forked::new(pid, output)?;
        own().push(pid);
        Ok(Self {
            child: Some(Kind::Forked(child)),
            listed: Some(pid),
        })
    }

    /// None if it has been reaped.
    pub(super) fn id(&self) -> Option<u32> {
        match self.child.as_ref()? {
            Kind::Spawned(child) => child.id(),
            Kind::Forked(child) => child.id(),
        }
    }

    /// It has ended.
    pub(super) fn ended(&mut self) -> bool {
        !match &mut self.child {
            None => false,
            Some(Kind::Spawned(child)) => matches!(child.try_wait(), Ok(None)),
            Some(Kind::Forked(child)) => matches!(child.try_wait(), Ok(None)),
        }
    }

    pub(super) fn take_output(&mut self) -> (Option<ChildStdout>, Option<ChildStderr>) {
        match &mut self.child {
            Some(Kind::Spawned(child)) => (child.stdout.take(), child.stderr.take()),
            Some(Kind::Forked(child)) => (child.stdout.take(), child.stderr.take()),
            None => (None, None),
        }
    }

    pub(super) fn kill(&mut self) {
        match &mut self.child {
            Some(Kind::Spawned(child)) => drop(child.start_kill()),
            Some(Kind::Forked(child)) => child.kill(),
            None => {}
        }
    }

    /// Cancel safe; later calls return the same.
    pub(super) async fn wait(&mut self) -> io::Result<ExitStatus> {
        let Some(child) = &mut self.child else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let status = child.wait().await;
        forget(self.listed.take());
        status
    }
}

impl Drop for OwnChild {
    fn drop(&mut self) {
        let (Some(mut child), listed @ Some(_)) = (self.child.take(), self.listed.take()) else {
            return;
        };
        // Without a runtime nothing reaps orphans any more.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = child.wait().await;
                forget(listed);
            });
        }
    }
}

#[derive(Debug)]
enum Kind {
    Spawned(Child),
    Forked(Forked),
}

impl Kind {
    async fn wait(&mut self) -> io::Result<ExitStatus> {
        match self {
            Self::Spawned(child) => child.wait().await,
            Self::Forked(child) => child.wait().await,
        }
    }
}

/// A child of this process that another process forked.
#[derive(Debug)]
struct Forked {
    pid: Pid,
    /// A pidfd: readable once the child has ended.
    ended: AsyncFd<OwnedFd>,
    status: Option<ExitStatus>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
}

impl Forked {
    fn new(pid: i32, [stdout, stderr]: [OwnedFd; 2]) -> io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        // SAFETY: the descriptor is this one's, stays open and is the same until that is dropped.
        let ended = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
        Ok(Self {
            pid,
            ended: ended?,
            status: None,
            stdout: Some(ChildStdout::from_std(stdout.into())?),
            stderr: Some(ChildStderr::from_std(stderr.into())?),
        })
    }

    fn id(&self) -> Option<u32> {
        let pid = self.pid.as_raw_nonzero().get().cast_unsigned();
        self.status.is_none().then_some(pid)
    }

    fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            let ended = rustix::process::waitpid(Some(self.pid), WaitOptions::NOHANG)?;
            self.status = ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw()));
        }
        Ok(self.status)
    }

    async fn wait(&mut self) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            // Look again after that: if it ends from here on, it becomes readable again.
            self.ended.readable().await?.clear_ready();
        }
    }

    fn kill(&self) {
        if self.status.is_none() {
            // An error: it has ended.
            let _ = pidfd_send_signal(self.ended.get_ref(), Signal::KILL);
        }
    }
}

fn forget(listed: Option<i32>) {
    let mut own = own();
    if let Some(at) = own.iter().position(|pid| Some(*pid) == listed) {
        own.swap_remove(at);
    }
}

/// Reaps one ended orphan, if there is one, and no child is being started. True: it did.
pub(super) fn reap(pid: i32) -> bool {
    let starting = STARTING.try_lock();
    starting.is_some()
        && !own().contains(&pid)
        && matches!(
            rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::NOHANG),
            Ok(Some(_))
        )
}

/// Reaps orphans that become children of this process, for ever. Only for a program that starts all its children
/// through this module, or that waits for none of the others.
///
/// # Errors
/// SIGCHLD cannot be caught.
pub async fn reap_strangers() -> io::Result<std::convert::Infallible> {
    let mut ended = signal(SignalKind::child())?;
    let mut pauses = Pauses::from(LOOK_AGAIN.0);
    loop {
        match reap_some() {
            Reaped::Nobody => {
                pauses.reset();
                ended.recv().await;
            }
            Reaped::Some => tokio::task::yield_now().await,
            Reaped::Hidden => {
                tokio::time::sleep(pauses.after_failure(LOOK_AGAIN.1)).await;
            }
        }
    }
}

enum Reaped {
    Nobody,
    Some,
    /// The kernel shows only the first zombie, and that is, or may be, a child that this program started.
    Hidden,
}

fn reap_some() -> Reaped {
    for _ in 0..AT_ONCE {
        let starting = STARTING.try_lock();
        match first_ended() {
            None => return Reaped::Nobody,
            Some(pid) if starting.is_none() || own().contains(&pid) => return Reaped::Hidden,
            Some(pid) => {
                let _ = rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::NOHANG);
            }
        }
    }
    Reaped::Some
}

/// True: this process has no child, not even one that has ended.
pub fn childless() -> bool {
    matches!(look(), Err(e) if e.raw_os_error() == Some(libc::ECHILD))
}

/// A child that has ended, if there is one. Does not reap it.
fn first_ended() -> Option<i32> {
    look().ok().filter(|pid| *pid > 0)
}

/// The pid of a child that has ended; 0: none has.
fn look() -> io::Result<i32> {
    // SAFETY: an all-zero siginfo_t is valid, and the kernel writes no more than that.
    let (done, pid) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let look = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        let done = libc::waitid(libc::P_ALL, 0, &raw mut info, look);
        (done, info.si_pid())
    };
    match done {
        0 => Ok(pid),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waited for, or dropped.
    #[tokio::test]
    async fn a_child_is_listed_until_it_is_reaped_and_nobody_else_reaps_it() {
        for dropped in [false, true] {
            let mut child = OwnChild::spawn(std::process::Command::new("true")).expect("a child");
            let pid = child.listed.expect("a pid");
            while !std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .is_ok_and(|stat| stat.contains(") Z "))
            {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(own().contains(&pid) && !reap(pid));
            if dropped {
                drop(child);
            } else {
                assert!(child.wait().await.expect("a status").success());
            }
            while own().contains(&pid) {
                assert!(dropped);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
    fn pipe() -> (OwnedFd, OwnedFd) {
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe")
    }

    /// A process that ends when its stdin is closed.
    fn waiting() -> std::process::Child {
        let mut cat = std::process::Command::new("cat");
        cat.stdin(std::process::Stdio::piped());
        cat.spawn().expect("a child")
    }

    /// Started here, or by the zygote.
    #[tokio::test]
    async fn a_child_is_told_from_one_that_has_ended() {
        for forked in [false, true] {
            let mut child = if forked {
                let ((out, _out), (err, _err)) = (pipe(), pipe());
                let pid = waiting_for_ever().spawn().expect("a child").id();
                let fork = || Ok::<_, io::Error>(pid.cast_signed());
                OwnChild::forked(fork, [out, err]).expect("a child")
            } else {
                OwnChild::spawn(waiting_for_ever()).expect("a child")
            };
            let pid = child.listed.expect("a pid");
            assert_eq!(child.id(), Some(pid.cast_unsigned()));
            assert!(!child.ended() && own().contains(&pid));
            let output = child.take_output();
            assert_eq!((output.0.is_some(), output.1.is_some()), (forked, forked));
            child.kill();
            for _ in 0..2 {
                let status = child.wait().await.expect("a status");
                assert_eq!(status.signal(), Some(libc::SIGKILL));
                assert_eq!((child.id(), child.ended()), (None, true));
                assert!(!own().contains(&pid));
            }
            // Nobody is there any more.
            child.kill();
        }
    }

    fn waiting_for_ever() -> std::process::Command {
        let mut sleeps = std::process::Command::new("sleep");
        sleeps.arg("100");
        sleeps
    }

    /// In another process, which has no other children.
    #[tokio::test]
    #[expect(clippy::zombie_processes, reason = "it is reaped by its number")]
    async fn who_has_ended_is_seen_and_reaped_unless_somebody_waits_for_it() {
        let name = "who_has_ended_is_seen_and_reaped_unless_somebody_waits_for_it";
        if crate::guard::tests::ran_elsewhere(&format!("runner::children::tests::{name}")) {
            return;
        }
        assert!(childless() && first_ended().is_none());
        let ended = || {
            let end = crate::clock::Boottime::now() + Duration::from_secs(60);
            while first_ended().is_none() {
                assert!(crate::clock::Boottime::now() < end, "it is not seen");
                std::thread::sleep(Duration::from_millis(1));
            }
            first_ended()
        };
        let child = waiting();
        let pid = child.id().cast_signed();
        assert!(!childless() && first_ended().is_none());
        assert!(matches!(reap_some(), Reaped::Nobody));
        drop(child.stdin);
        assert_eq!(ended(), Some(pid));
        assert!(!childless(), "it was only looked at");
        let starting = STARTING.lock();
        assert!(matches!(reap_some(), Reaped::Hidden));
        drop(starting);
        assert!(matches!(reap_some(), Reaped::Nobody));
        assert!(childless() && first_ended().is_none());

        let mut known = OwnChild::spawn(std::process::Command::new("true")).expect("a child");
        assert_eq!(ended(), known.listed);
        assert!(matches!(reap_some(), Reaped::Hidden));
        assert!(known.wait().await.expect("a status").success());
        assert!(childless());
    }

    /// Only what has ended is reaped, and only what nobody else waits for.
    #[test]
    #[expect(clippy::zombie_processes, reason = "it is reaped by its number")]
    fn an_orphan_is_reaped_once_it_has_ended() {
        let child = waiting();
        let pid = child.id().cast_signed();
        assert!(!reap(pid) && !childless());
        drop(child.stdin);
        let end = crate::clock::Boottime::now() + Duration::from_secs(60);
        while !reap(pid) {
            assert!(crate::clock::Boottime::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!reap(pid));
        let status = rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::NOHANG);
        assert!(status.is_err(), "{status:?}");
    }
}
