//! Connections between the hosts and the server: bytes arrive late, and in order; a way can be cut, and a connection
//! reset.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{Error, ErrorKind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// No byte arrives earlier, ns. A step of the simulation is as long: what a host sends in one arrives in a later one.
pub(super) const LEAST: u64 = 5_000_000;

type Bytes = (u64, Vec<u8>);

#[derive(Debug, Default)]
pub(super) struct Conn {
    pub(super) host: usize,
    to_server: VecDeque<Bytes>,
    to_host: VecDeque<Bytes>,
    readable: VecDeque<u8>,
    waker: Option<Waker>,
    /// The server's end was closed: the host reads what is there, and then that.
    reset: bool,
    /// What the server has received and not yet understood.
    pub(super) inbox: Vec<u8>,
    pub(super) subscribed: bool,
    /// The host's end was closed.
    gone: bool,
}

#[derive(Debug)]
pub(super) struct Net {
    rng: fastrand::Rng,
    pub(super) conns: BTreeMap<u64, Conn>,
    next: u64,
    /// Of each host: nothing gets through.
    pub(super) cut: Vec<bool>,
    /// Of each host: how much longer a message takes at most, ns.
    pub(super) slow: Vec<u64>,
    pub(super) up: bool,
}

impl Net {
    pub(super) fn new(hosts: usize, seed: u64) -> Self {
        Self {
            rng: fastrand::Rng::with_seed(seed),
            conns: BTreeMap::new(),
            next: 0,
            cut: vec![false; hosts],
            slow: vec![0; hosts],
            up: true,
        }
    }

    fn arrival(&mut self, host: usize, sent: u64, before: Option<&Bytes>) -> u64 {
        let most = LEAST / 5 + self.slow[host];
        let at = sent + LEAST + self.rng.u64(0..=most);
        before.map_or(at, |(before, _)| at.max(*before))
    }

    /// The server sends `bytes` at `now`.
    pub(super) fn send_to_host(&mut self, id: u64, now: u64, bytes: Vec<u8>) {
        let Some(conn) = self.conns.get(&id) else {
            return;
        };
        let (host, last) = (conn.host, conn.to_host.back().map(|(at, _)| (*at, vec![])));
        let at = self.arrival(host, now, last.as_ref());
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.to_host.push_back((at, bytes));
        }
    }

    /// What arrives at the server before `until`, in the order of its arrival: at, connection, bytes.
    pub(super) fn arrive_at_server(&mut self, until: u64) -> Vec<(u64, u64, Vec<u8>)> {
        let mut all = vec![];
        for (id, conn) in &mut self.conns {
            if self.cut[conn.host] {
                continue;
            }
            while conn.to_server.front().is_some_and(|(at, _)| *at < until) {
                all.extend(
                    conn.to_server
                        .pop_front()
                        .map(|(at, bytes)| (at, *id, bytes)),
                );
            }
        }
        all.sort_by_key(|(at, id, _)| (*at, *id));
        all
    }

    /// Gives the hosts what arrives there before `until`.
    pub(super) fn arrive_at_hosts(&mut self, until: u64) {
        self.conns
            .retain(|_, c| !(c.gone && c.to_server.is_empty()));
        for conn in self.conns.values_mut() {
            if self.cut[conn.host] {
                continue;
            }
            let mut news = false;
            while conn.to_host.front().is_some_and(|(at, _)| *at < until) {
                if let Some((_, bytes)) = conn.to_host.pop_front() {
                    conn.readable.extend(bytes);
                    news = true;
                }
            }
            if news && let Some(waker) = conn.waker.take() {
                waker.wake();
            }
        }
    }

    /// Ends connections: those of a host, or all.
    pub(super) fn reset(&mut self, host: Option<usize>) {
        for conn in self.conns.values_mut() {
            if host.is_none_or(|h| h == conn.host) {
                conn.reset = true;
                (conn.to_server, conn.to_host) = (VecDeque::new(), VecDeque::new());
                conn.inbox.clear();
                if let Some(waker) = conn.waker.take() {
                    waker.wake();
                }
            }
        }
    }
}

/// The host's end of a connection.
#[derive(Debug)]
pub(crate) struct Stream {
    net: Arc<Mutex<Net>>,
    id: u64,
}

impl Stream {
    pub(super) fn connect(net: &Arc<Mutex<Net>>, host: usize) -> std::io::Result<Self> {
        let mut all = net.lock();
        if !all.up && !all.cut[host] {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        let id = all.next;
        all.next += 1;
        let conn = Conn {
            host,
            ..Conn::default()
        };
        all.conns.insert(id, conn);
        Ok(Self {
            net: net.clone(),
            id,
        })
    }
}

fn reset() -> Error {
    ErrorKind::ConnectionReset.into()
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let mut all = self.net.lock();
        let Some(conn) = all.conns.get_mut(&self.id) else {
            return Poll::Ready(Err(reset()));
        };
        if conn.readable.is_empty() {
            if conn.reset {
                return Poll::Ready(Err(reset()));
            }
            conn.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let n = conn.readable.len().min(buf.remaining());
        let bytes: Vec<u8> = conn.readable.drain(..n).collect();
        buf.put_slice(&bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let now = super::host::world_now();
        let mut all = self.net.lock();
        let Some(conn) = all.conns.get(&self.id).filter(|c| !c.reset) else {
            return Poll::Ready(Err(reset()));
        };
        let (host, last) = (
            conn.host,
            conn.to_server.back().map(|(at, _)| (*at, vec![])),
        );
        let at = all.arrival(host, now, last.as_ref());
        if let Some(conn) = all.conns.get_mut(&self.id) {
            conn.to_server.push_back((at, bytes.to_vec()));
        }
        Poll::Ready(Ok(bytes.len()))
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(conn) = self.net.lock().conns.get_mut(&self.id) {
            (conn.gone, conn.waker) = (true, None);
        }
    }
}
