//! The daemon's side of its zygote ([`crate::guard`]): starts it, asks it for guards, and replaces it.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Command, Stdio},
    sync::Arc,
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

use tracing::warn;

use super::children::OwnChild;
use crate::{clock::Boottime, guard, last_will::LastWill, logic::backoff::Throttle};

/// How long a zygote may take to fork a guard. One that somebody has stopped or frozen never does.
const PATIENCE: Duration = Duration::from_millis(250);

/// How long a zygote may take to be ready. Guards are executed meanwhile.
const BEGINNING: Duration = Duration::from_secs(10);

/// Not more than one zygote is started in this time: where none can be of use, guards are executed at no greater cost.
const PAUSE: Duration = Duration::from_secs(1);

/// A zygote that is lost again and again is told so often.
const WARN_AGAIN: Duration = Duration::from_secs(60);

/// Has the zygote, if there is one.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    zygote: Option<Zygote>,
    /// When another one may be started.
    again: Option<Boottime>,
    told: Throttle,
    /// The pid of the zygote that the last look found so.
    helpless: Option<u32>,
}

impl Keeper {
    /// As [`Keeper::start`]; and replaces the zygote if somebody keeps it stopped or frozen: it could do nothing if
    /// this process was killed. `helpless` has its pid if a look has found it so. After one look it may be about to go
    /// on, as this process has.
    pub(super) fn keep(
        &mut self,
        helpless: Option<u32>,
        command: impl FnOnce() -> Command,
        will: Option<&Arc<LastWill>>,
    ) {
        let pid = self.zygote.as_ref().and_then(Zygote::pid);
        if helpless.is_some() && helpless == self.helpless && helpless == pid {
            self.give_up();
        }
        self.helpless = helpless;
        self.start(command, will);
    }

    /// Starts a zygote from `command`, which starts this binary, if there is none, and gives it the `will`. Does not
    /// wait until it is ready. Needs a Tokio runtime.
    pub(super) fn start(
        &mut self,
        command: impl FnOnce() -> Command,
        will: Option<&Arc<LastWill>>,
    ) {
        match self.zygote.as_mut().map(Zygote::ready) {
            Some(Ok(_)) => return,
            Some(Err(_)) => self.give_up(),
            None => {}
        }
        let now = Boottime::now();
        if self.again.is_none_or(|again| now >= again) {
            self.again = Some(now + PAUSE);
            // Without one, guards are executed, which costs more.
            self.zygote = Zygote::start(command(), will).ok();
        }
    }

    /// The zygote, if guards can be forked from it now.
    pub(super) fn ready(&mut self) -> Option<&Zygote> {
        let zygote = self.zygote.as_mut()?;
        matches!(zygote.ready(), Ok(true)).then_some(&*zygote)
    }

    /// It is no use any more.
    pub(super) fn give_up(&mut self) {
        self.zygote = None;
        if self.told.lets(Boottime::now(), WARN_AGAIN) {
            warn!(
                "the process from which guards are forked (soloist __zygote) has died or does not answer; until \
                 another one is ready, each run has a guard executed, which costs more"
            );
        }
    }
}

/// A zygote. Dropped, it ends.
#[derive(Debug)]
pub(super) struct Zygote {
    child: OwnChild,
    socket: OwnedFd,
    /// When it was started, until it is ready.
    begun: Option<Boottime>,
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
    fn start(mut command: Command, will: Option<&Arc<LastWill>>) -> io::Result<Self> {
        let will = will.map(|will| will.file()).transpose()?;
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        command
            .args([guard::ZYGOTE_ARGUMENT, &guard::zygote_padding()])
            .arg(std::process::id().to_string())
            .stdin(theirs)
            .stdout(will.map_or_else(Stdio::null, Stdio::from))
            .stderr(Stdio::null());
        Ok(Self {
            child: OwnChild::spawn(command)?,
            socket: ours,
            begun: Some(Boottime::now()),
        })
    }

    /// Whether guards can be forked from it now.
    ///
    /// # Errors
    /// It is dead, or takes too long: another one may be of use.
    fn ready(&mut self) -> Result<bool, Failed> {
        match (self.reply(), self.begun) {
            (Ok(0), Some(_)) => {
                self.begun = None;
                Ok(true)
            }
            (Err(Errno::AGAIN), None) => Ok(true),
            (Err(Errno::AGAIN), Some(begun)) if Boottime::now().since(begun) < BEGINNING => {
                Ok(false)
            }
            _ => Err(Failed::Zygote),
        }
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
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
        match self.reply() {
            Ok(pid @ 1..) => Ok(pid),
            Ok(0) | Err(_) => Err(Failed::Zygote),
            Ok(error) => Err(Failed::Guard(io::Error::from_raw_os_error(-error))),
        }
    }

    fn reply(&self) -> Result<i32, Errno> {
        let mut reply = [0; 4];
        match recv(&self.socket, &mut reply, RecvFlags::DONTWAIT)? {
            (_, 4) => Ok(i32::from_ne_bytes(reply)),
            _ => Err(Errno::CONNRESET),
        }
    }

    /// Signals to this process do not make it longer.
    fn wait(&self) -> Result<(), Failed> {
        let end = Boottime::now() + PATIENCE;
        let mut fds = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)];
        loop {
            let left = end.since(Boottime::now());
            let timeout = Timespec {
                tv_sec: 0,
                tv_nsec: left.subsec_nanos().into(),
            };
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    extern "C" fn nothing(_: libc::c_int) {}

    #[tokio::test]
    async fn signals_do_not_prolong_the_wait_for_a_zygote_that_does_not_answer() {
        let mut sleeps = Command::new("sleep");
        sleeps.arg("1000");
        let (socket, _theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket");
        let mut zygote = Zygote {
            child: OwnChild::spawn(sleeps).expect("a process"),
            socket,
            begun: None,
        };
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(libc::SIGUSR2, nothing as *const () as libc::sighandler_t) };
        // SAFETY: names this thread.
        let waiting = unsafe { libc::pthread_self() };
        let (over, end) = mpsc::channel::<()>();
        let signals = std::thread::spawn(move || {
            for n in 0.. {
                if end.recv_timeout(PATIENCE / 10) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return n;
                }
                // SAFETY: that thread waits until this one has ended.
                unsafe { libc::pthread_kill(waiting, libc::SIGUSR2) };
                assert!(n < 1000, "it still waits");
            }
            0
        });
        let begun = Boottime::now();
        assert!(matches!(zygote.wait(), Err(Failed::Zygote)));
        assert!(Boottime::now().since(begun) >= PATIENCE);
        drop(over);
        let signals = signals.join().expect("it ends");
        assert!(signals > 0);
        zygote.child.kill();
    }
    /// One that answers what the test sends through the other end.
    fn played() -> (Zygote, OwnedFd) {
        let mut sleeps = Command::new("sleep");
        sleeps.arg("100");
        let (socket, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket");
        let zygote = Zygote {
            child: OwnChild::spawn(sleeps).expect("a process"),
            socket,
            begun: Some(Boottime::now()),
        };
        (zygote, theirs)
    }

    fn says(theirs: &OwnedFd, number: i32) {
        let sent = rustix::net::send(theirs, &number.to_ne_bytes(), SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(4));
    }

    #[tokio::test]
    async fn a_zygote_is_waited_for_while_it_may_still_come() {
        let (mut zygote, theirs) = played();
        assert!(matches!(zygote.ready(), Ok(false)));
        let long_ago = Boottime::now()
            .0
            .saturating_sub(BEGINNING.as_nanos() as u64);
        zygote.begun = Some(Boottime(long_ago));
        assert!(matches!(zygote.ready(), Err(Failed::Zygote)));
        says(&theirs, 0);
        assert!(matches!(zygote.ready(), Ok(true)));
        // It stays so, and that is no answer to anything else.
        assert!(matches!(zygote.ready(), Ok(true)));
        // Until it dies.
        drop(theirs);
        while matches!(zygote.ready(), Ok(true)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(matches!(zygote.ready(), Err(Failed::Zygote)));
        for begins in [1, -1] {
            let (mut zygote, theirs) = played();
            says(&theirs, begins);
            assert!(matches!(zygote.ready(), Err(Failed::Zygote)));
        }
        let (mut zygote, theirs) = played();
        drop(theirs);
        // A process that another test is starting may have it open for a moment.
        while matches!(zygote.ready(), Ok(false)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(matches!(zygote.ready(), Err(Failed::Zygote)));
    }

    #[tokio::test]
    async fn a_zygote_says_a_pid_or_why_there_is_none() {
        let (zygote, theirs) = played();
        let null = std::fs::File::open("/dev/null").expect("there");
        let ask = || zygote.ask(&["a", "bc"], [null.as_fd(); 3]);
        says(&theirs, 42);
        assert!(matches!(ask(), Ok(42)));
        let mut line = [0; 16];
        let (_, length) = recv(&theirs, &mut line, RecvFlags::DONTWAIT).expect("a request");
        assert_eq!(&line[..length], b"a\0bc\0");
        says(&theirs, 0);
        assert!(matches!(ask(), Err(Failed::Zygote)));
        says(&theirs, -libc::EAGAIN);
        let refused = ask();
        assert!(matches!(refused, Err(Failed::Guard(e)) if e.raw_os_error() == Some(libc::EAGAIN)));
        // One that reads nothing takes no more some time.
        let mut taken = 0;
        loop {
            says(&theirs, 42);
            match ask() {
                Ok(42) => taken += 1,
                refused => break assert!(matches!(refused, Err(Failed::Zygote))),
            }
            assert!(taken < 1_000_000);
        }
        assert!(taken > 0);
        drop(theirs);
        assert!(matches!(ask(), Err(Failed::Zygote)));
    }
}
