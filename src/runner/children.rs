//! Children of this process: its own, and those that nobody waits for.
//!
//! The orphans of killed guards fall to their subreaper, and all orphans of a container to its first process. Nobody in
//! this program waits for them, and each would stay as a zombie for as long as it lives. Whoever reaps them must not take
//! the end of a child that somebody here waits for. So a child of our own is listed before anybody can see it end, until it was waited for.

use std::{io, process::ExitStatus, time::Duration};

use crate::logic::backoff::Pauses;
use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Pid, WaitOptions};
use tokio::{
    process::{Child, ChildStderr, ChildStdout, Command},
    signal::unix::{SignalKind, signal},
};

/// How many are reaped before others get their turn.
const AT_ONCE: usize = 64;

/// How long one of our own that has ended may hide those behind it from us, until we look again: at first and at most.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(512));

/// A number stands in it twice for a moment, when it is given again at once.
static OWN: Mutex<Vec<i32>> = Mutex::new(Vec::new());

fn own() -> MutexGuard<'static, Vec<i32>> {
    OWN.lock()
}

/// A child that this program waits for, also when this is dropped.
#[derive(Debug)]
pub(super) struct OwnChild {
    /// None: handed to whoever waits for it.
    child: Option<Child>,
    /// None: it has been waited for.
    listed: Option<i32>,
}

impl OwnChild {
    /// Needs a Tokio runtime.
    pub(super) fn spawn(command: std::process::Command) -> io::Result<Self> {
        // Held meanwhile: it may end before this thread goes on.
        let mut own = own();
        let child = Command::from(command).spawn()?;
        let listed = child.id().and_then(|pid| i32::try_from(pid).ok());
        own.extend(listed);
        Ok(Self {
            child: Some(child),
            listed,
        })
    }

    /// None when it has been waited for.
    pub(super) fn id(&self) -> Option<u32> {
        self.child.as_ref()?.id()
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

    /// Cancel safe; may be asked again.
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
        // Without a runtime nobody reaps anybody any more.
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

/// Waits for one that is nobody's, if it has ended. True: it has.
pub(super) fn reap(pid: i32) -> bool {
    let own = own();
    !own.contains(&pid)
        && matches!(
            rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::NOHANG),
            Ok(Some(_))
        )
}

/// Reaps whoever falls to this process, for ever. Only for a program all of whose children are started here, or are
/// waited for by nobody.
///
/// # Errors
/// The signal that children have ended cannot be waited for.
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
    /// The kernel shows the first one only, and that is our own.
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

/// Some child that has ended; it is not waited for yet.
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
