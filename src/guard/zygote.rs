//! The zygote: a process that has loaded this program once, and from which the guards of a daemon are forked.
//!
//! To execute this program again for each run costs more than the rest of a start: the loader relocates megabytes. The
//! zygote is executed, so it has neither the threads nor the memory of the daemon. It has one thread, keeps nothing
//! between two requests, and does nothing but fork: its guards are children of the daemon (CLONE_PARENT), so its end
//! concerns none of them. It ends with its daemon; of a daemon that was killed it executes the last will first
//! ([`last_will`]). The daemon's side is `runner::zygote`.
//!
//! Descriptor 1 is the will, or /dev/null. Descriptor 0 is a socket to the daemon (SOCK_SEQPACKET). The zygote sends a
//! zero once it is ready. A request is the command line of a guard, with its descriptors 0, 1 and 2 beside it; the
//! reply is the guard's pid, or a negative error number.

use std::{
    fs::File,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{ExitCode, Stdio},
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send},
    process::{Pid, Signal},
};

use super::{
    Guard, block_signals, cgroup, ignore_signals, spawn::reset_signals, sweep, unblock_signals,
};
use crate::{clock::Boottime, last_will, model::JobName};

/// The hidden first argument that makes this binary a zygote. A word of padding follows, and then its daemon's pid.
pub const ZYGOTE_ARGUMENT: &str = "__zygote";

/// How long a daemon may take to be dead after it has closed its descriptors.
const DYING: Duration = Duration::from_secs(60);

/// The longest command line of a guard: `soloist __guard JOB RUN of=PID`, each with a NUL.
const LONGEST: usize = "soloist ".len() + "__guard ".len() + JobName::LONGEST + 1 + 37 + 14;

/// Makes room for the command line of a guard, which replaces that of the zygote in memory, so that `ps` shows it.
pub(crate) fn padding() -> String {
    "-".repeat(LONGEST)
}

/// The whole zygote process. Call it first in `main`, while the process has one thread.
pub fn main() -> ExitCode {
    // SAFETY: descriptor 0 is open (std ensures that) and nothing else in this process uses it.
    let socket = unsafe { OwnedFd::from_raw_fd(0) };
    let daemon = std::env::args().nth(3);
    let daemon = daemon.and_then(|pid| Pid::from_raw(pid.parse().ok()?));
    let ended = match prepare(&socket).and_then(|title| serve(socket, &title)) {
        Ok(Some(guard)) => super::run(guard),
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    // Also if the daemon has died before this process was ready. If it fails, those runs are found dead, as of a host
    // that was lost.
    match ended.and(survive(daemon)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("soloist: zygote: {}", crate::text::line(&error.to_string()));
            ExitCode::from(70)
        }
    }
}

fn prepare(socket: &OwnedFd) -> io::Result<Title> {
    rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC)?;
    // A zygote that is stopped does not see its daemon's end.
    rustix::process::set_parent_process_death_signal(Some(Signal::CONT))?;
    // Ctrl-C in the daemon's terminal is not meant for it.
    let _ = rustix::process::setsid();
    // Executed as /proc/self/exe, it is called "exe" otherwise; `pgrep soloist` finds its guards by this name.
    let _ = rustix::thread::set_name(c"soloist");
    // Guards inherit both.
    reset_signals();
    block_signals();
    cgroup::remember_mounts();
    find_out_about_cpu();
    let title = Title::find().ok_or_else(|| io::Error::other("/proc/self/stat has no argv"))?;
    title.set(format!("soloist\0{ZYGOTE_ARGUMENT}\0").as_bytes());
    send(socket, &0_i32.to_ne_bytes(), SendFlags::NOSIGNAL)?;
    Ok(title)
}

/// The guards keep what the standard library finds out. Otherwise each would ask anew, and CPUID traps in a virtual
/// machine: some 20 µs.
fn find_out_about_cpu() {
    #[cfg(target_arch = "x86_64")]
    std::hint::black_box(std::is_x86_feature_detected!("avx2"));
}

/// The daemon has closed its end: if that is because it is dead, does what is left to do. A daemon that gives its
/// zygote up kills it before it closes its end.
fn survive(daemon: Option<Pid>) -> io::Result<()> {
    let end = Boottime::now() + DYING;
    while rustix::process::getppid() == daemon {
        if Boottime::now() >= end {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let will = File::from(rustix::stdio::stdout().try_clone_to_owned()?);
    if !will.metadata()?.is_file() || last_will::read(&will)?.1.is_empty() {
        sweep::after_daemon(daemon)?;
        return Ok(());
    }
    crate::failpoint::panics("no_last_will");
    if fork_sibling() == 0 {
        drop(will);
        sweep::after_daemon(daemon)?;
        return Ok(());
    }
    ignore_signals();
    unblock_signals();
    Err(std::process::Command::new("/proc/self/exe")
        .arg0("soloist")
        .arg(last_will::ARGUMENT)
        .stdin(will)
        .stdout(Stdio::null())
        .exec())
}

/// Forks guards until the daemon closes the socket (None). In a forked guard, returns that guard.
fn serve(socket: OwnedFd, title: &Title) -> io::Result<Option<io::Result<Guard>>> {
    loop {
        let mut words = [0; LONGEST];
        let Some((length, descriptors)) = receive(&socket, &mut words)? else {
            return Ok(None);
        };
        let reply = match <[OwnedFd; 3]>::try_from(descriptors) {
            Err(_) => -libc::EBADF,
            Ok(descriptors) => match fork_sibling() {
                0 => {
                    drop(socket);
                    title.set(&words[..length]);
                    return Ok(Some(begin(descriptors)));
                }
                pid => pid,
            },
        };
        crate::failpoint::here("after_fork");
        match send(&socket, &reply.to_ne_bytes(), SendFlags::NOSIGNAL) {
            Ok(_) => {}
            // The daemon is gone, or has given this zygote up.
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The next request. None: the daemon is gone.
fn receive(socket: &OwnedFd, words: &mut [u8]) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(words)];
        let length = match recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.bytes == 0 => return Ok(None),
            Ok(message) => message.bytes,
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        return Ok(Some((length, rights.flatten().collect())));
    }
}

/// Forks a child of this process's parent. Returns 0 in that child, its pid here, or a negative error number.
fn fork_sibling() -> i32 {
    // SAFETY: without CLONE_VM and with no new stack this is a fork; this process has one thread, so the child is a
    // full copy of it. The order of the arguments after the flags differs between machines; all are zero.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone,
            libc::CLONE_PARENT | libc::SIGCHLD,
            0,
            0,
            0,
            0,
        )
    };
    match i32::try_from(pid) {
        Ok(pid @ 0..) => pid,
        _ => -io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
    }
}

/// In the forked guard: its descriptors get their numbers.
fn begin(descriptors: [OwnedFd; 3]) -> io::Result<Guard> {
    for (number, descriptor) in (0..).zip(&descriptors) {
        // SAFETY: 0 belonged to the zygote's socket, which is closed here; nothing owns 1 and 2. What was received has
        // higher numbers.
        if unsafe { libc::dup2(descriptor.as_raw_fd(), number) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    drop(descriptors);
    // A signal to its process group is for it alone. Its session stays that of the zygote.
    let _ = rustix::process::setpgid(None, None);
    Guard::prepare(None)
}

/// The memory of this process's command line, which /proc shows.
struct Title {
    begin: *mut u8,
    length: usize,
}

impl Title {
    fn find() -> Option<Self> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        // Fields 48 and 49; the third follows the name, which is in parentheses.
        let (_, rest) = stat.rsplit_once(')')?;
        let mut fields = rest.split_ascii_whitespace().skip(45);
        let begin: usize = fields.next()?.parse().ok()?;
        let end: usize = fields.next()?.parse().ok()?;
        let length = end.checked_sub(begin).filter(|l| *l >= LONGEST)?;
        Some(Self {
            begin: std::ptr::with_exposed_provenance_mut(begin),
            length,
        })
    }

    /// Shows `words`, each with a NUL at its end, in place of what is there.
    fn set(&self, words: &[u8]) {
        // SAFETY: the kernel wrote the arguments there; they stay writable, and nothing here reads them any more.
        unsafe {
            std::ptr::write_bytes(self.begin, 0, self.length);
            std::ptr::copy_nonoverlapping(words.as_ptr(), self.begin, words.len().min(self.length));
        }
    }
}
