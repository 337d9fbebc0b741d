//! The children of this process: those that it started, and orphans that became its children.
//!
//! A subreaper becomes the parent of the orphans of killed guards; the first process of a container becomes the parent
//! of all its orphans. No other code here reaps these orphans, and each would stay a zombie until this process ends.
//! But this code must not take the exit status of a child that other code waits for. So this module lists each child
//! that this program starts, from before it can end until it is reaped.

use std::{io, process::ExitStatus, time::Duration};

use crate::logic::backoff::Pauses;
use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Pid, WaitOptions};
use tokio::{
    process::{Child, ChildStderr, ChildStdout, Command},
    signal::unix::{SignalKind, signal},
};

/// How many zombies a task reaps before other tasks get their turn.
const AT_ONCE: usize = 64;

/// Pause before checking again while an ended child that this program started hides the zombies behind it: the first,
/// and the longest.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(512));

/// A pid may be listed twice for a moment, if the kernel reuses it at once.
static OWN: Mutex<Vec<i32>> = Mutex::new(Vec::new());

fn own() -> MutexGuard<'static, Vec<i32>> {
    OWN.lock()
}

/// A child that this program reaps, even after this value is dropped.
#[derive(Debug)]
pub(super) struct OwnChild {
    /// None: moved to the task that waits for it.
    child: Option<Child>,
    /// None: it has been reaped.
    listed: Option<i32>,
}

impl OwnChild {
    /// Needs a Tokio runtime.
    pub(super) fn spawn(command: std::process::Command) -> io::Result<Self> {
        // Hold the list meanwhile: the child may end before this thread continues.
        let mut own = own();
        let child = Command::from(command).spawn()?;
        let listed = child.id().and_then(|pid| i32::try_from(pid).ok());
        own.extend(listed);
        Ok(Self {
            child: Some(child),
            listed,
        })
    }

    /// None if it has been reaped.
    pub(super) fn id(&self) -> Option<u32> {
        self.child.as_ref()?.id()
    }

    /// It has ended.
    pub(super) fn ended(&mut self) -> bool {
        let child = self.child.as_mut();
        child.is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }

    pub(super) fn take_output(&mut self) -> (Option<ChildStdout>, Option<ChildStderr>) {
        match &mut self.child {
            Some(child) => (child.stdout.take(), child.stderr.take()),
            None => (None, None),
        }
    }

    pub(super) fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.start_kill();
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

fn forget(listed: Option<i32>) {
    let mut own = own();
    if let Some(at) = own.iter().position(|pid| Some(*pid) == listed) {
        own.swap_remove(at);
    }
}

/// Reaps one ended orphan, if there is one. True: it did.
pub(super) fn reap(pid: i32) -> bool {
    let own = own();
    !own.contains(&pid)
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
    /// The kernel shows only the first zombie, and that is a child that this program started.
    Hidden,
}

fn reap_some() -> Reaped {
    for _ in 0..AT_ONCE {
        let own = own();
        match first_ended() {
            None => return Reaped::Nobody,
            Some(pid) if own.contains(&pid) => return Reaped::Hidden,
            Some(pid) => {
                let _ = rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::NOHANG);
            }
        }
    }
    Reaped::Some
}

/// A child that has ended, if there is one. Does not reap it.
fn first_ended() -> Option<i32> {
    // SAFETY: an all-zero siginfo_t is valid, and the kernel writes no more than that.
    let (done, pid) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let look = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        let done = libc::waitid(libc::P_ALL, 0, &raw mut info, look);
        (done, info.si_pid())
    };
    (done == 0 && pid > 0).then_some(pid)
}
