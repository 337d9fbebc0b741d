//! The signals of a transparent command (`exec`): which ones this process catches, who sent them, and which it passes
//! on.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
};

use tokio::io::unix::AsyncFd;

/// The signals that people send on purpose, and those that a terminal sends.
const CAUGHT: [i32; 11] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
    libc::SIGTSTP,
    libc::SIGCONT,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// A signal that this process received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Caught {
    pub number: i32,
    /// Sent by the terminal, to each process of its foreground group.
    pub by_terminal: bool,
}

impl Caught {
    /// True: the command has not received this signal yet. `reached`: the command has joined our process group.
    pub(crate) fn to_be_passed_on(self, reached: bool) -> bool {
        match self.number {
            // The command gets these from the kernel itself when it uses a terminal that it may not.
            libc::SIGTTIN | libc::SIGTTOU => false,
            // A terminal that hangs up signals only its session's leader, which may be this process. A second signal
            // does no harm.
            libc::SIGHUP | libc::SIGCONT => true,
            _ => !(self.by_terminal && reached),
        }
    }

    /// True: who sent it wants the program to end, and not to do something else.
    pub(crate) fn asks_for_end(self) -> bool {
        matches!(
            self.number,
            libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT
        )
    }

    /// True: the signal ends a program that does not handle it.
    pub(crate) fn ends(self) -> bool {
        !matches!(
            self.number,
            libc::SIGWINCH | libc::SIGTSTP | libc::SIGCONT | libc::SIGTTIN | libc::SIGTTOU
        )
    }
}

/// Whether this process started with SIGPIPE ignored. Rust ignores it before `main`, so only [`before_main`] can see
/// this.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

/// The loader calls this before everything else.
pub(crate) fn before_main() {
    // SAFETY: all-zero is a valid sigaction, the call writes it only.
    let ignored = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    };
    PIPE_IGNORED.store(ignored, Ordering::Relaxed);
}

/// The signals that this process started with ignored, as from `nohup`, or from systemd (SIGPIPE).
pub(crate) fn ignored() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0);
    (1..=64)
        .filter(|n| match *n {
            libc::SIGPIPE => PIPE_IGNORED.load(Ordering::Relaxed),
            n => mask >> (n - 1) & 1 == 1,
        })
        .collect()
}

/// Blocks the signals for this thread and the threads that it starts, and returns the descriptor on which they arrive.
///
/// # Errors
/// The process has no free descriptor.
pub(crate) fn block(ignored: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset before use, all pointers are valid, and the new descriptor is
    // owned by nobody else.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in CAUGHT.into_iter().filter(|s| !ignored.contains(s)) {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

pub(crate) struct Signals(AsyncFd<OwnedFd>);

impl Signals {
    /// Reads the signals from the descriptor that [`block`] returned.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: an owned descriptor stays open, and is this one, for as long as the AsyncFd has it.
        Ok(Self(unsafe { AsyncFd::register(fd)? }))
    }

    /// Waits for the next signal. Cancel safe.
    pub(crate) async fn next(&self) -> Caught {
        loop {
            let Ok(mut ready) = self.0.readable().await else {
                return std::future::pending().await;
            };
            let size = std::mem::size_of::<libc::signalfd_siginfo>();
            let mut info = std::mem::MaybeUninit::<libc::signalfd_siginfo>::zeroed();
            // SAFETY: the buffer has the size that is given.
            let n = unsafe {
                libc::read(
                    self.0.as_raw_fd(),
                    info.as_mut_ptr().cast::<libc::c_void>(),
                    size,
                )
            };
            if n == size as isize {
                // SAFETY: filled by the kernel, and plain numbers in any case.
                let info = unsafe { info.assume_init() };
                return Caught {
                    number: info.ssi_signo.cast_signed(),
                    by_terminal: info.ssi_code == libc::SI_KERNEL,
                };
            }
            ready.clear_ready();
        }
    }
}

/// Stops this process, as its command was stopped; returns when somebody continues it.
pub(crate) fn stop_ourselves() {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_terminal_sent_to_the_whole_group_is_not_sent_again() {
        let caught = |number, by_terminal| Caught {
            number,
            by_terminal,
        };
        for (number, by_terminal, reached, passed) in [
            (libc::SIGINT, true, true, false),
            (libc::SIGINT, true, false, true),
            (libc::SIGINT, false, true, true),
            (libc::SIGTSTP, true, true, false),
            (libc::SIGTERM, false, true, true),
            (libc::SIGHUP, true, true, true),
            (libc::SIGCONT, false, true, true),
            (libc::SIGTTIN, true, true, false),
        ] {
            assert_eq!(
                caught(number, by_terminal).to_be_passed_on(reached),
                passed,
                "{number} {by_terminal} {reached}"
            );
        }
        assert!(caught(libc::SIGTERM, false).ends() && !caught(libc::SIGWINCH, true).ends());
    }
}
