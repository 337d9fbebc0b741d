//! The daemon's side of its zygote ([`crate::guard`]): starts it, asks it for guards, and replaces it.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Command, Stdio},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
        SocketFlags, SocketType, recv, sendmsg, socketpair,
    },
    pipe::{PipeFlags, pipe_with},
};

use super::children::OwnChild;
use crate::guard;

/// How long a zygote may take to fork a guard. One that somebody has stopped or frozen never does.
const PATIENCE: Duration = Duration::from_millis(250);

/// A running zygote. Dropped, it ends.
#[derive(Debug)]
pub(super) struct Zygote {
    child: OwnChild,
    socket: OwnedFd,
}

/// Why there is no guard.
pub(super) enum Failed {
    /// The zygote is no use any more: another one may be.
    Zygote,
    /// The kernel refuses a guard.
    Guard(io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Guard(error)
    }
}

impl Zygote {
    /// `command` starts this binary.
    pub(super) fn start(mut command: Command) -> io::Result<Self> {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        command
            .args([guard::ZYGOTE_ARGUMENT, &guard::zygote_padding()])
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Ok(Self {
            child: OwnChild::spawn(command)?,
            socket: ours,
        })
    }

    /// Has a guard forked, with this command line, and `socket` as its descriptor 0. Needs a Tokio runtime, and blocks
    /// its thread for a fraction of a millisecond, but not longer than [`PATIENCE`].
    pub(super) fn fork(&self, words: &[&str], socket: BorrowedFd<'_>) -> Result<OwnChild, Failed> {
        let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from);
        let ((stdout, out), (stderr, err)) = (pipe()?, pipe()?);
        let given = [socket, out.as_fd(), err.as_fd()];
        OwnChild::forked(|| self.ask(words, given), [stdout, stderr])
    }

    /// The pid of the forked guard.
    fn ask(&self, words: &[&str], descriptors: [BorrowedFd<'_>; 3]) -> Result<i32, Failed> {
        let mut line = Vec::new();
        for word in words {
            line.extend_from_slice(word.as_bytes());
            line.push(0);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.socket, &[IoSlice::new(&line)], &mut control, flags)
            .map_err(|_| Failed::Zygote)?;
        self.wait()?;
        let mut reply = [0; 4];
        match recv(&self.socket, &mut reply, RecvFlags::DONTWAIT) {
            Ok((_, 4)) => match i32::from_ne_bytes(reply) {
                pid @ 1.. => Ok(pid),
                error => Err(Failed::Guard(io::Error::from_raw_os_error(-error))),
            },
            _ => Err(Failed::Zygote),
        }
    }

    fn wait(&self) -> Result<(), Failed> {
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: PATIENCE.subsec_nanos().into(),
        };
        let mut fds = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)];
        loop {
            match poll(&mut fds, Some(&timeout)) {
                Ok(1..) => return Ok(()),
                Err(Errno::INTR) => {}
                _ => return Err(Failed::Zygote),
            }
        }
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        // It may be stopped, and must not fork what it was asked for when it is continued.
        self.child.kill();
    }
}
