//! The output of a run: keeps its end in memory, sends each line to the log, and keeps nothing else.

use std::collections::VecDeque;

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncReadExt};

/// The target of the log events that carry output; their fields are `job`, `run` and `stream`.
pub const LOG_TARGET: &str = "soloist::output";

/// The most bytes of a line in the log, which cuts longer lines; the kept output has them whole.
pub const LONGEST_LOG_LINE: usize = 8 << 10;

/// The last bytes of stdout and stderr together, in the order in which the daemon read them.
#[derive(Debug)]
pub struct Tail {
    keep: usize,
    ring: Mutex<Ring>,
}

#[derive(Debug, Default)]
struct Ring {
    bytes: VecDeque<u8>,
    /// How many bytes were written in all.
    total: u64,
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub bytes: Vec<u8>,
    /// Where it begins, counted from the first byte of the output. Later than requested if older bytes are no longer
    /// kept.
    pub offset: u64,
}

impl Piece {
    /// Where the next piece begins.
    pub fn next(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

impl Tail {
    pub(super) fn new(keep: usize) -> Self {
        Self {
            keep,
            ring: Mutex::default(),
        }
    }

    /// The kept output from `offset` on, also while the command runs.
    pub fn since(&self, offset: u64) -> Piece {
        self.piece(offset, usize::MAX)
    }

    /// Like [`Tail::since`], at most `most` bytes.
    pub fn piece(&self, offset: u64, most: usize) -> Piece {
        let ring = self.lock();
        let first = ring.total - ring.bytes.len() as u64;
        let offset = offset.clamp(first, ring.total);
        let skip = usize::try_from(offset - first).unwrap_or(usize::MAX);
        Piece {
            bytes: ring.bytes.iter().skip(skip).take(most).copied().collect(),
            offset,
        }
    }

    /// The number of bytes written so far, kept or not.
    pub fn total(&self) -> u64 {
        self.lock().total
    }

    fn push(&self, bytes: &[u8]) {
        let mut ring = self.lock();
        ring.total += bytes.len() as u64;
        let new = &bytes[bytes.len().saturating_sub(self.keep)..];
        let excess = (ring.bytes.len() + new.len()).saturating_sub(self.keep);
        ring.bytes.drain(..excess);
        ring.bytes.extend(new);
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock()
    }
}

/// Cuts a stream of bytes into lines for the log.
#[derive(Debug, Default)]
struct Lines {
    line: Vec<u8>,
    /// The log skips the rest of this line.
    cut: bool,
}

impl Lines {
    /// Calls `log` with each line that `bytes` complete, without its newline.
    fn push(&mut self, bytes: &[u8], mut log: impl FnMut(&str)) {
        for part in bytes.split_inclusive(|&b| b == b'\n') {
            let (text, ended) = match part.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (part, false),
            };
            if !self.cut {
                let room = LONGEST_LOG_LINE - self.line.len();
                self.line.extend_from_slice(&text[..text.len().min(room)]);
                self.cut = text.len() > room;
                // Do not wait for the newline: an endless line should appear too.
                if ended || self.cut {
                    self.flush(&mut log);
                }
            }
            if ended {
                self.cut = false;
            }
        }
    }

    fn flush(&mut self, log: &mut impl FnMut(&str)) {
        let text = String::from_utf8_lossy(&self.line);
        let text = text.strip_suffix('\r').unwrap_or(&text);
        if self.cut {
            log(&format!("{text} [line cut here]"));
        } else {
            log(text);
        }
        self.line.clear();
    }
}

/// Reads `pipe` until its end, however much comes, even if `tail` keeps nothing.
pub(super) async fn drain(
    mut pipe: impl AsyncRead + Unpin,
    tail: &Tail,
    log: bool,
    stream: &'static str,
    job: &str,
    run: &str,
) {
    let mut lines = Lines::default();
    let mut log_line = |line: &str| tracing::info!(target: LOG_TARGET, job, run, stream, "{line}");
    // Small enough that the lines of one chunk do not hold a worker for long.
    let mut chunk = vec![0; 8 << 10];
    loop {
        match pipe.read(&mut chunk).await {
            Ok(0) | Err(_) => break,
            Ok(n) => {
                tail.push(&chunk[..n]);
                if log {
                    lines.push(&chunk[..n], &mut log_line);
                    tokio::task::yield_now().await;
                }
            }
        }
    }
    if !lines.line.is_empty() {
        lines.flush(&mut log_line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_keeps_the_last_bytes_and_counts_all() {
        let tail = Tail::new(5);
        tail.push(b"abc");
        assert_eq!(
            tail.since(0),
            Piece {
                bytes: b"abc".into(),
                offset: 0
            }
        );
        assert_eq!(
            tail.since(2),
            Piece {
                bytes: b"c".into(),
                offset: 2
            }
        );
        tail.push(b"defg");
        assert_eq!(
            tail.since(0),
            Piece {
                bytes: b"cdefg".into(),
                offset: 2
            }
        );
        tail.push(b"0123456789");
        assert_eq!(
            tail.since(3),
            Piece {
                bytes: b"56789".into(),
                offset: 12
            }
        );
        assert_eq!((tail.total(), tail.since(99).next()), (17, 17));
        let piece = tail.piece(13, 2);
        assert_eq!((&piece.bytes[..], piece.next()), (&b"67"[..], 15));

        let none = Tail::new(0);
        none.push(b"abc");
        assert_eq!((none.total(), none.since(0).bytes.len()), (3, 0));
    }

    #[test]
    fn lines_are_whole_bounded_and_lossy() {
        let mut lines = Lines::default();
        let mut logged = Vec::new();
        let mut log = |line: &str| logged.push(line.to_owned());
        lines.push(b"one\r\ntw", &mut log);
        lines.push(b"o\n\n\xff\xfe!\n", &mut log);
        for _ in 0..1000 {
            lines.push(&[b'x'; 1000], &mut log);
        }
        lines.push(b"rest\nlast", &mut log);
        lines.flush(&mut log);
        assert_eq!(logged[..4], ["one", "two", "", "\u{fffd}\u{fffd}!"]);
        assert_eq!(
            logged[4],
            format!("{} [line cut here]", "x".repeat(LONGEST_LOG_LINE))
        );
        assert_eq!(logged[5..], ["last"]);
    }
}
