//! The output of a run: keeps its end in memory, sends each line to the log, and keeps nothing else.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, ReadBuf};
use tokio_util::sync::CancellationToken;

use crate::model::{Marks, Stream};

/// The target of the log events that carry output; their fields are `job`, `run` and `stream`.
pub const LOG_TARGET: &str = "soloist::output";

/// The most bytes of a line in the log, which cuts longer lines; the kept output has them whole.
pub const LONGEST_LOG_LINE: usize = 8 << 10;

/// The last bytes of stdout and stderr together, in the order in which the daemon read them.
#[derive(Debug)]
pub struct Tail {
    keep: usize,
    ring: Mutex<Ring>,
    /// Cancelled once the tree is gone, which then writes no more.
    pub(super) gone: CancellationToken,
}

#[derive(Debug, Default)]
struct Ring {
    bytes: VecDeque<u8>,
    /// How many bytes were written in all.
    total: u64,
    stderr: Marks,
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
            gone: CancellationToken::new(),
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

    /// Which of the kept bytes came from stderr.
    pub fn stderr(&self) -> Marks {
        self.lock().stderr.clone()
    }

    fn push(&self, bytes: &[u8], stream: Stream) {
        let mut ring = self.lock();
        let from = ring.total;
        ring.total += bytes.len() as u64;
        let (total, first) = (ring.total, ring.total.saturating_sub(self.keep as u64));
        if stream == Stream::Stderr {
            ring.stderr.add(from, total);
        }
        ring.stderr.forget(first);
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

    /// The stream has ended, perhaps in the middle of a line.
    fn end(&mut self, mut log: impl FnMut(&str)) {
        if !self.line.is_empty() {
            self.flush(&mut log);
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

/// Once the tree is gone, the pipes are read until nothing has come for so long. Only a process outside the tree that
/// got a descriptor can keep them open.
const SILENCE: Duration = Duration::from_millis(500);

/// Two pipes hold no more than this when the tree is gone, unless the command made them larger.
const LEFT_MOST: usize = 2 * (64 << 10);

/// Reads both pipes until their ends, however much comes, even if `tail` keeps nothing; once the tree is gone, only
/// what it left in them, however long a busy host takes for that. What arrives first is read first. Of what arrives
/// between two looks, nobody knows the order: then stdout goes first, and neither keeps the other waiting.
pub(super) async fn drain<A, B>(
    mut stdout: Option<A>,
    mut stderr: Option<B>,
    tail: &Tail,
    log: bool,
    job: &str,
    run: &str,
) where
    A: AsyncRead + Unpin,
    B: AsyncRead + Unpin,
{
    const STREAMS: [&str; 2] = ["stdout", "stderr"];
    let mut lines = [Lines::default(), Lines::default()];
    let log_line = |from: usize, line: &str| {
        let stream = STREAMS[from];
        tracing::info!(target: LOG_TARGET, job, run, stream, "{line}");
    };
    // Small enough that the lines of one chunk do not hold a worker for long.
    let mut chunk = vec![0; 8 << 10];
    let mut stdout_was_read = false;
    let mut left = LEFT_MOST;
    while left > 0 && (stdout.is_some() || stderr.is_some()) {
        let read = poll_fn(|cx| {
            let order = if stdout_was_read { [1, 0] } else { [0, 1] };
            for from in order {
                let read = match from {
                    0 => poll_read(&mut stdout, cx, &mut chunk),
                    _ => poll_read(&mut stderr, cx, &mut chunk),
                };
                if let Poll::Ready(n) = read {
                    return Poll::Ready((from, n));
                }
            }
            stdout_was_read = false;
            Poll::Pending
        });
        let silence = async {
            tail.gone.cancelled().await;
            tokio::time::sleep(SILENCE).await;
        };
        let (from, n) = tokio::select! {
            biased;
            read = read => read,
            () = silence => break,
        };
        if tail.gone.is_cancelled() {
            left = left.saturating_sub(n);
        }
        stdout_was_read = from == 0;
        if n > 0 {
            let stream = if from == 0 {
                Stream::Stdout
            } else {
                Stream::Stderr
            };
            tail.push(&chunk[..n], stream);
            if log {
                lines[from].push(&chunk[..n], |line| log_line(from, line));
                tokio::task::yield_now().await;
            }
            continue;
        }
        match from {
            0 => stdout = None,
            _ => stderr = None,
        }
        lines[from].end(|line| log_line(from, line));
    }
}

/// How many bytes were read; 0: the pipe has ended.
fn poll_read(
    pipe: &mut Option<impl AsyncRead + Unpin>,
    cx: &mut Context<'_>,
    chunk: &mut [u8],
) -> Poll<usize> {
    let Some(pipe) = pipe else {
        return Poll::Pending;
    };
    let mut read = ReadBuf::new(chunk);
    match Pin::new(pipe).poll_read(cx, &mut read) {
        Poll::Ready(Ok(())) => Poll::Ready(read.filled().len()),
        Poll::Ready(Err(_)) => Poll::Ready(0),
        Poll::Pending => Poll::Pending,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn output_is_kept_in_the_order_in_which_it_arrives() {
        use tokio::io::AsyncWriteExt as _;
        let (tail, (mut out, stdout), (mut err, stderr)) = (
            Tail::new(1000),
            tokio::io::duplex(100),
            tokio::io::duplex(100),
        );
        // Both before anybody looks; then one after the other.
        out.write_all(b"out 1\n").await.expect("room");
        err.write_all(b"err 1\n").await.expect("room");
        let reading = drain(Some(stdout), Some(stderr), &tail, false, "j", "r");
        let writing = async {
            for (stream, text) in [
                (1, "err 2\n"),
                (0, "out 2\n"),
                (1, "err 3\n"),
                (1, "err 4\n"),
            ] {
                while tail.total() < 12 {
                    tokio::task::yield_now().await;
                }
                let all = tail.total();
                let stream = if stream == 0 { &mut out } else { &mut err };
                stream.write_all(text.as_bytes()).await.expect("room");
                while tail.total() == all {
                    tokio::task::yield_now().await;
                }
            }
            // Again at once.
            out.write_all(b"out 3\n").await.expect("room");
            err.write_all(b"err 5\n").await.expect("room");
            drop((out, err));
        };
        tokio::join!(reading, writing);
        let kept = String::from_utf8(tail.since(0).bytes).expect("text");
        assert_eq!(
            kept,
            "out 1\nerr 1\nerr 2\nout 2\nerr 3\nerr 4\nout 3\nerr 5\n"
        );
        assert_eq!(tail.stderr().to_text(), "6-18 24-36 42-48");
    }

    #[tokio::test]
    async fn what_comes_after_the_end_of_the_other_is_read_too() {
        use tokio::io::{AsyncWriteExt as _, empty};
        for late_is_stdout in [false, true] {
            let (tail, (mut late, pipe)) = (Tail::new(100), tokio::io::duplex(100));
            let writing = async {
                for _ in 0..10 {
                    tokio::task::yield_now().await;
                }
                late.write_all(b"late").await.expect("room");
                drop(late);
            };
            let reading = async {
                match late_is_stdout {
                    true => drain(Some(pipe), Some(empty()), &tail, false, "j", "r").await,
                    false => drain(Some(empty()), Some(pipe), &tail, false, "j", "r").await,
                }
            };
            tokio::join!(reading, writing);
            assert_eq!(tail.since(0).bytes, b"late");
        }
    }

    #[tokio::test]
    async fn an_endless_stdout_does_not_keep_stderr_waiting() {
        let (tail, mut err) = (Tail::new(100_000), &b"wrong"[..]);
        let reading = drain(
            Some(tokio::io::repeat(b'x')),
            Some(&mut err),
            &tail,
            true,
            "j",
            "r",
        );
        let seen = async {
            let there = || tail.since(0).bytes.windows(5).any(|w| w == b"wrong");
            while !there() && tail.total() < 1_000_000 {
                tokio::task::yield_now().await;
            }
            tail.total()
        };
        tokio::select! {
            () = reading => unreachable!("it is endless"),
            total = seen => assert!(total < 1_000_000),
        }
    }

    /// A process outside the tree has the other ends.
    #[tokio::test]
    async fn once_the_tree_is_gone_only_what_it_left_is_read() {
        use tokio::io::{AsyncWriteExt as _, empty, repeat};
        let tail = Tail::new(100);
        tail.gone.cancel();
        drain(Some(repeat(b'x')), Some(empty()), &tail, false, "j", "r").await;
        let (mut other, pipe) = tokio::io::duplex(100);
        other.write_all(b"left").await.expect("room");
        drain(Some(pipe), Some(empty()), &tail, false, "j", "r").await;
        assert!(tail.since(0).bytes.ends_with(b"xleft"));
    }

    #[test]
    fn a_tail_keeps_the_last_bytes_and_counts_all() {
        let tail = Tail::new(5);
        tail.push(b"abc", Stream::Stdout);
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
        tail.push(b"defg", Stream::Stdout);
        assert_eq!(
            tail.since(0),
            Piece {
                bytes: b"cdefg".into(),
                offset: 2
            }
        );
        tail.push(b"0123456789", Stream::Stdout);
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

        // What is not kept needs no marks.
        tail.push(b"x", Stream::Stderr);
        assert_eq!(tail.stderr().to_text(), "17-18");
        tail.push(b"12345", Stream::Stdout);
        assert!(tail.stderr().is_empty());

        let none = Tail::new(0);
        none.push(b"abc", Stream::Stdout);
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
        lines.end(&mut log);
        lines.end(&mut log);
        lines.push(&[b'y'; LONGEST_LOG_LINE], &mut log);
        lines.push(b"\n", &mut log);
        assert_eq!(logged[..4], ["one", "two", "", "\u{fffd}\u{fffd}!"]);
        assert_eq!(
            logged[4],
            format!("{} [line cut here]", "x".repeat(LONGEST_LOG_LINE))
        );
        assert_eq!(logged[5..], ["last", &"y".repeat(LONGEST_LOG_LINE)]);
    }
}
