//! The guard's end of the socket to its daemon.

use std::{io, os::fd::OwnedFd};

use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
};

use super::message::{Control, Report};
#[cfg(any(test, fuzzing))]
use super::{LONGEST_SPEC, Spec};

/// The guard's end of the socket.
pub(super) struct ControlSocket {
    pub(super) socket: OwnedFd,
    pub(super) buffer: Vec<u8>,
    /// Bytes that the socket has not accepted yet.
    pub(super) unsent: Vec<u8>,
    /// The daemon's end is closed.
    pub(super) closed: bool,
    pub(super) settled: bool,
}

impl ControlSocket {
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self {
            socket,
            buffer: Vec::new(),
            unsent: Vec::new(),
            closed: false,
            settled: false,
        })
    }

    /// The next message that has arrived; skips messages that cannot be parsed.
    pub(super) fn next(&mut self) -> Option<Control> {
        loop {
            let line = self.next_line(1 << 20)?;
            match serde_json::from_slice(&line) {
                Ok(Control::Settled) => self.settled = true,
                Ok(control) => return Some(control),
                Err(_) => {}
            }
        }
    }

    /// A line that has arrived, or None; sets `closed` at the end, or if a line is longer than `longest`.
    pub(super) fn next_line(&mut self, longest: usize) -> Option<Vec<u8>> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|&b| b == b'\n') {
                let rest = self.buffer.split_off(searched + end + 1);
                return Some(std::mem::replace(&mut self.buffer, rest));
            }
            searched = self.buffer.len();
            if self.closed {
                return None;
            }
            let mut chunk = [0; 8192];
            match rustix::io::read(&self.socket, &mut chunk) {
                Ok(n @ 1..) if searched <= longest => self.buffer.extend_from_slice(&chunk[..n]),
                // The daemon closed the socket with unread reports: its earlier messages can still be read.
                Err(Errno::CONNRESET | Errno::INTR) => {}
                Err(Errno::AGAIN) => return None,
                Ok(_) | Err(_) => self.closed = true,
            }
        }
    }

    /// Sends a report; has no effect if the daemon is gone. Never waits: a daemon that hangs gets the report later.
    pub(super) fn report(&mut self, report: &Report) {
        // Only these reports may pile up: somebody stops and continues the command while the daemon does not read.
        if matches!(report, Report::Stopped { .. }) && !self.unsent.is_empty() {
            return;
        }
        if let Ok(mut line) = serde_json::to_vec(report) {
            self.unsent.append(&mut line);
            self.unsent.push(b'\n');
            self.flush();
        }
    }

    pub(super) fn flush(&mut self) {
        while !self.unsent.is_empty() {
            match rustix::io::write(&self.socket, &self.unsent) {
                Ok(n) => drop(self.unsent.drain(..n)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // The daemon is gone.
                Err(_) => self.unsent.clear(),
            }
        }
    }

    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        let mut events = PollFlags::IN;
        if !self.unsent.is_empty() {
            events |= PollFlags::OUT;
        }
        PollFd::new(&self.socket, events)
    }
}

/// What a guard parses from these pieces of input, and whether its daemon reported the settlement.
#[cfg(any(test, fuzzing))]
pub(crate) fn understood<'d>(
    pieces: impl Iterator<Item = &'d [u8]>,
) -> (Option<Spec>, Vec<Control>, bool) {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a socket");
    let mut socket = ControlSocket::new(theirs.into()).expect("a guard's end of it");
    let (mut line, mut spec, mut controls) = (None, None, vec![]);
    for piece in pieces.map(Some).chain([None]) {
        match piece {
            Some(piece) => io::Write::write_all(&mut &ours, piece).expect("room"),
            None => ours.shutdown(std::net::Shutdown::Write).expect("an end"),
        }
        if line.is_none() {
            line = socket.next_line(LONGEST_SPEC);
            spec = line
                .as_ref()
                .and_then(|line| serde_json::from_slice(line).ok());
        }
        if line.is_some() {
            controls.extend(std::iter::from_fn(|| socket.next()));
        }
    }
    (spec, controls, socket.settled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_does_not_end_is_read_up_to_its_limit() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a socket");
        let mut socket = ControlSocket::new(theirs.into()).expect("a guard's end of it");
        io::Write::write_all(&mut &ours, &[b'a'; 3 * 8192]).expect("room");
        assert_eq!(socket.next_line(8192), None);
        assert!(socket.closed);
    }
    #[test]
    fn messages_are_taken_whole_and_what_is_none_is_skipped() {
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a socket");
        let mut socket = ControlSocket::new(theirs.into()).expect("a guard's end of it");
        let mut say = |text: &str| io::Write::write_all(&mut ours, text.as_bytes()).expect("room");
        say("no message\n{\"signal\":1");
        assert_eq!((socket.next(), socket.closed), (None, false));
        say("0}\n\"settled\"\n{\"signal\":2}\n");
        assert_eq!(socket.next(), Some(Control::Signal(10)));
        assert!(!socket.settled);
        assert_eq!(socket.next(), Some(Control::Signal(2)));
        assert!(socket.settled);
        assert_eq!((socket.next(), socket.closed), (None, false));
        say("{\"signal\":3}\n");
        // Not by a close: a process that another test forks just now has a copy of the descriptor.
        ours.shutdown(std::net::Shutdown::Both).expect("its end");
        assert_eq!(socket.next(), Some(Control::Signal(3)));
        assert_eq!((socket.next(), socket.closed), (None, true));
    }

    /// What `src/fuzz.rs` judges by.
    #[test]
    fn a_run_is_understood_however_it_is_cut() {
        let spec = super::super::tests::spec(None, "true");
        let mut text = serde_json::to_vec(&spec).expect("JSON");
        text.extend_from_slice(b"\n{\"signal\":2}\n\"settled\"\n");
        for length in [1, 7, text.len()] {
            let (read, controls, settled) = understood(text.chunks(length));
            let read = read.map(|spec| (spec.run_id, spec.argv));
            assert_eq!(read, Some((spec.run_id, spec.argv.clone())));
            assert_eq!((controls, settled), (vec![Control::Signal(2)], true));
        }
    }

    /// A daemon that hangs gets each report later, but not all stops of a command.
    #[test]
    fn reports_wait_for_a_daemon_that_does_not_read() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a socket");
        let mut socket = ControlSocket::new(theirs.into()).expect("a guard's end of it");
        let (stopped, stuck) = (
            Report::Stopped { signal: 19 },
            Report::Stuck { pids: vec![7] },
        );
        socket.report(&stopped);
        assert!(socket.unsent.is_empty());
        socket.unsent = vec![b'x'; 8 << 20];
        socket.flush();
        let waits = socket.unsent.len();
        assert!(waits > 0);
        socket.report(&stopped);
        assert_eq!(socket.unsent.len(), waits);
        socket.report(&stuck);
        assert!(socket.unsent.len() > waits && socket.unsent.ends_with(b"}\n"));
        ours.shutdown(std::net::Shutdown::Both).expect("its end");
        socket.flush();
        assert!(socket.unsent.is_empty());
    }
}
