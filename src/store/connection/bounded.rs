//! Bounds what a reply may cost, as its bytes arrive and before they are parsed: a server that announces or sends more
//! than soloist reads ends its connection, instead of filling the memory until a time limit ends it.

use std::{
    io::{self, ErrorKind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What a reply to the login may cost, and a hint: neither has more than some hundred bytes.
const LOGIN_MOST: usize = 64 << 10;
/// What any other reply may cost. The largest are those of a fleet's instances and of some jobs' states.
const MOST: usize = 64 << 20;
/// No line is longer: soloist's own data comes in strings of a known length.
const LINE_MOST: usize = 64 << 10;
/// No string is longer: the longest are parts of a job's state, which has 16 MiB.
const STRING_MOST: u64 = 16 << 20;
/// What a value costs beside its bytes: memory for it, and for its place in a list.
const VALUE: usize = 128;

/// A stream from and to a server, whose replies are bounded.
pub(super) struct Bounded<S> {
    stream: S,
    replies: Replies,
}

/// How much the replies of one connection may cost; 0: it is to end.
#[derive(Clone)]
pub(super) struct Limit(Arc<AtomicUsize>);

impl Limit {
    /// The login was successful: from now on the replies are those to soloist's own questions.
    pub(super) fn logged_in(&self) {
        self.0.store(MOST, Ordering::Relaxed);
    }

    /// Nothing more leaves over the connection.
    #[cfg(feature = "daemon")]
    pub(super) fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// The connection is there.
    pub(super) fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl<S> Bounded<S> {
    pub(super) fn new(stream: S) -> (Self, Limit) {
        let most = Arc::new(AtomicUsize::new(LOGIN_MOST));
        let replies = Replies {
            most: most.clone(),
            spent: 0,
            open: vec![],
            at: At::Start,
            #[cfg(all(feature = "daemon", any(test, fuzzing)))]
            ends: 0,
        };
        (Self { stream, replies }, Limit(most))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if let Poll::Ready(Ok(())) = read {
            self.replies.arrived(&buf.filled()[before..])?;
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Bounded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.replies.most.load(Ordering::Relaxed) == 0 {
            return Poll::Ready(Err(ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Where in the replies the next byte is. It follows the protocol only as far as lengths matter; the parser judges the
/// rest, and ends the connection if it does not understand a reply.
struct Replies {
    most: Arc<AtomicUsize>,
    /// What the reply that has begun costs so far.
    spent: usize,
    /// Of each list that has begun: how many values are still to come.
    open: Vec<u64>,
    at: At,
    /// How many have ended.
    #[cfg(all(feature = "daemon", any(test, fuzzing)))]
    ends: usize,
}

enum At {
    /// A value begins.
    Start,
    /// In the first line of a value of this kind.
    Line(u8, Vec<u8>),
    /// In a string, of which so many bytes are still to come, with its end of line.
    String(usize),
    /// This is not the protocol: the parser will say so.
    Lost,
}

impl Replies {
    fn arrived(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while let Some(&first) = bytes.first() {
            match std::mem::replace(&mut self.at, At::Start) {
                At::Start => {
                    bytes = &bytes[1..];
                    self.spend(VALUE)?;
                    self.at = match first {
                        b'+' | b'-' | b':' | b'$' | b'*' | b'%' | b'|' | b'~' | b'_' | b','
                        | b'#' | b'!' | b'=' | b'(' | b'>' => At::Line(first, vec![]),
                        _ => At::Lost,
                    };
                }
                At::Line(kind, mut line) => {
                    let end = bytes.iter().position(|b| *b == b'\n');
                    let piece = &bytes[..end.map_or(bytes.len(), |n| n + 1)];
                    bytes = &bytes[piece.len()..];
                    if line.len() + piece.len() > LINE_MOST {
                        return Err(too_large());
                    }
                    self.spend(piece.len())?;
                    line.extend_from_slice(piece);
                    match line.strip_suffix(b"\r\n") {
                        Some(text) => self.line(kind, text)?,
                        None => self.at = At::Line(kind, line),
                    }
                }
                At::String(left) => {
                    let n = left.min(bytes.len());
                    bytes = &bytes[n..];
                    match left - n {
                        0 => self.ended(),
                        left => self.at = At::String(left),
                    }
                }
                At::Lost => {
                    self.at = At::Lost;
                    return self.spend(bytes.len());
                }
            }
        }
        Ok(())
    }

    /// The first line of a value has ended.
    fn line(&mut self, kind: u8, text: &[u8]) -> io::Result<()> {
        if matches!(kind, b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(') {
            self.ended();
            return Ok(());
        }
        // As the parser reads it.
        let number = std::str::from_utf8(text)
            .ok()
            .and_then(|text| text.trim().parse::<i64>().ok());
        let Some(number) = number else {
            self.at = At::Lost;
            return Ok(());
        };
        let length = match u64::try_from(number) {
            Ok(length) => length,
            // Nothing, where the parser knows that.
            Err(_) if matches!(kind, b'$' | b'*' | b'~' | b'>') => {
                self.ended();
                return Ok(());
            }
            Err(_) => return Err(too_large()),
        };
        if matches!(kind, b'$' | b'!' | b'=') {
            if length > STRING_MOST {
                return Err(too_large());
            }
            let length = usize::try_from(length).map_err(|_| too_large())?;
            self.spend(length)?;
            self.at = At::String(length + 2);
            return Ok(());
        }
        let values = match kind {
            b'%' => length.saturating_mul(2),
            b'|' => length.saturating_mul(2).saturating_add(1),
            _ => length,
        };
        // Each will cost at least this.
        let cost = usize::try_from(values)
            .ok()
            .and_then(|n| n.checked_mul(VALUE));
        self.affordable(cost.ok_or_else(too_large)?)?;
        match values {
            0 => self.ended(),
            _ => self.open.push(values),
        }
        Ok(())
    }

    /// A value has ended, and with it the lists whose last it was.
    fn ended(&mut self) {
        while let Some(left) = self.open.last_mut() {
            *left -= 1;
            if *left > 0 {
                return;
            }
            self.open.pop();
        }
        self.spent = 0;
        #[cfg(all(feature = "daemon", any(test, fuzzing)))]
        {
            self.ends += 1;
        }
    }

    fn spend(&mut self, cost: usize) -> io::Result<()> {
        self.affordable(cost)?;
        self.spent += cost;
        Ok(())
    }

    fn affordable(&self, cost: usize) -> io::Result<()> {
        match self.spent.checked_add(cost) {
            Some(sum) if sum <= self.most.load(Ordering::Relaxed) => Ok(()),
            _ => Err(too_large()),
        }
    }
}

fn too_large() -> io::Error {
    io::Error::new(
        ErrorKind::InvalidData,
        "the server's reply is larger than soloist reads",
    )
}

/// How many replies end in these bytes, which arrive in pieces of this length; None: a reply costs more than `most`.
#[cfg(all(feature = "daemon", any(test, fuzzing)))]
pub(crate) fn ended(most: usize, sent: &[u8], piece: usize) -> Option<usize> {
    let (Bounded { mut replies, .. }, limit) = Bounded::new(());
    limit.0.store(most, Ordering::Relaxed);
    for piece in sent.chunks(piece) {
        replies.arrived(piece).ok()?;
        assert!(replies.spent <= most);
    }
    Some(replies.ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replies(most: usize) -> Replies {
        let (bounded, limit) = Bounded::new(());
        limit.0.store(most, Ordering::Relaxed);
        bounded.replies
    }

    /// In one piece, byte by byte, and cut at each place.
    fn arrive(most: usize, bytes: &[u8]) -> Vec<Result<Replies, ErrorKind>> {
        let ways = (0..bytes.len()).map(|at| vec![&bytes[..at], &bytes[at..]]);
        let ways = ways.chain([bytes.chunks(1).collect()]);
        ways.map(|pieces| {
            let mut r = replies(most);
            for piece in pieces {
                r.arrived(piece).map_err(|e| e.kind())?;
            }
            Ok(r)
        })
        .collect()
    }

    #[test]
    fn each_whole_reply_counts_by_itself() {
        for reply in [
            "+OK\r\n",
            "-ERR a\rb\nc\r\n",
            ":-1\r\n",
            "$0\r\n\r\n",
            "$-1\r\n",
            "$8\r\na\r\n$9\r\nb\r\n",
            "*-1\r\n",
            "*0\r\n",
            "*3\r\n$1\r\na\r\n*2\r\n:1\r\n*0\r\n$1\r\nb\r\n",
            "*1\r\n*1\r\n*1\r\n_\r\n",
            "%2\r\n+a\r\n:1\r\n+b\r\n~1\r\n#t\r\n",
            "|1\r\n+a\r\n,1.5\r\n+data\r\n",
            "=7\r\ntxt:abc\r\n",
            "!3\r\nERR\r\n",
            "(12345678901234567890\r\n",
            ">2\r\n+message\r\n$1\r\na\r\n",
            ">0\r\n",
        ] {
            // Room for one of them, and not for two.
            let most = reply.len() + VALUE * 9;
            for (n, r) in arrive(most, reply.repeat(20).as_bytes())
                .into_iter()
                .enumerate()
            {
                let r = r.unwrap_or_else(|e| panic!("{reply:?} {n}: {e}"));
                assert!(
                    matches!(r.at, At::Start) && r.open.is_empty(),
                    "{reply:?} {n}"
                );
                assert_eq!(r.spent, 0, "{reply:?} {n}");
            }
        }
    }

    #[test]
    fn what_costs_more_is_refused_as_soon_as_that_is_known() {
        for (begun, more) in [
            ("$9000\r\n", ""),
            ("$9223372036854775807\r\n", ""),
            ("!9223372036854775807\r\n", ""),
            ("=-1\r\n", ""),
            ("*90\r\n", ""),
            ("*9223372036854775807\r\n", ""),
            ("%9223372036854775807\r\n", ""),
            ("|-5\r\n", ""),
            ("+", "aaaaaaaa"),
            ("+", "a\r"),
            (":1", "                "),
            (
                "*60\r\n",
                "$100\r\n1234567890123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890\r\n",
            ),
            ("", "*1\r\n"),
            ("", "*2\r\n_\r\n"),
            ("H", "TTP/1.1 "),
            ("$x\r\n", "abcdefgh"),
        ] {
            let bytes = begun.to_owned() + &more.repeat(9000 / more.len().max(1));
            for r in arrive(8000, bytes.as_bytes())
                .into_iter()
                .step_by(1 + bytes.len() / 50)
            {
                assert_eq!(r.err(), Some(ErrorKind::InvalidData), "{begun:?} {more:?}");
            }
        }
        // However much a reply may cost.
        for begun in [
            "+".to_owned() + &"a".repeat(LINE_MOST + 1),
            format!("${}\r\n", STRING_MOST + 1),
        ] {
            assert!(replies(usize::MAX).arrived(begun.as_bytes()).is_err());
        }
    }

    /// What a script of soloist may say, and a server to a client that logs in.
    #[test]
    fn the_largest_replies_that_soloist_asks_for_are_read() {
        let list = |items: usize, bytes: usize| {
            let item = format!("${bytes}\r\n{}\r\n", "x".repeat(bytes));
            format!("*{items}\r\n{}", item.repeat(items))
        };
        for reply in [list(402, 64 << 10), list(100_002, 100), list(9, 4 << 20)] {
            assert!(replies(MOST).arrived(reply.as_bytes()).is_ok());
        }
        let hello = "%7\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n99.9.9\r\n$5\r\nproto\r\n:3\r\n$2\r\nid\r\n\
                     :9\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n";
        let module = "%4\r\n$4\r\nname\r\n$6\r\nsearch\r\n$3\r\nver\r\n:1\r\n$4\r\npath\r\n$9\r\n/x/y/z.so\r\n$4\r\nargs\r\n*0\r\n";
        let hello = format!("{hello}*20\r\n{}", module.repeat(20));
        assert!(replies(LOGIN_MOST).arrived(hello.as_bytes()).is_ok());
    }
}
