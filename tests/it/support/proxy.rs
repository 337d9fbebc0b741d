//! A TCP proxy with faults that are switched while it runs; no privileges needed.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

/// What happens to bytes, both on connections that exist and on new ones.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    None,
    /// Requests arrive so much later.
    DelayRequests(Duration),
    /// Replies arrive so much later.
    DelayReplies(Duration),
    /// So many bytes pass in a second, each way.
    Slow(u32),
    /// The first reply with this text never arrives: the server has done its work, the connection is reset.
    /// Afterwards there is no fault.
    LoseReply(&'static str),
    /// Like `LoseReply`, for every such reply until the fault ends.
    LoseEachReply(&'static str),
    /// Requests vanish. A connection that lost some is reset afterwards: TCP passes nothing behind a gap.
    BlackHoleUp,
    /// Replies vanish, as requests do.
    BlackHoleDown,
    /// Nothing moves, nothing is lost: bytes wait for the end of the fault.
    Stall,
    /// Every connection is reset at its first reply.
    Reset,
    /// Of each hundred replies so many are lost with their connection.
    Lossy(u32),
    /// The server's side ends the connection in good order, at each reply.
    HalfClose,
    /// Connections are refused, existing ones reset.
    Refuse,
    /// In so many replies that tell the store's clock, the clock is ahead by so many microseconds. Afterwards there is
    /// no fault.
    WrongTime(i64, u32),
    /// Of each hundred numbers of a reply that may be times, so many are replaced.
    Garble(u32),
}

struct Shared {
    fault: Mutex<Fault>,
    /// How often a fault struck.
    struck: AtomicUsize,
    /// Connections so far, and how many of them are dead without their ends knowing it.
    made: AtomicUsize,
    dead: AtomicUsize,
    /// The ends of those that are dead.
    kept_open: Mutex<Vec<(TcpStream, TcpStream)>>,
    /// Where new connections go.
    server: AtomicU16,
    stop: AtomicBool,
}

impl Shared {
    fn fault(&self) -> MutexGuard<'_, Fault> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

const POLL: Duration = Duration::from_millis(5);

impl Proxy {
    pub fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("its address");
        let shared = Arc::new(Shared {
            fault: Mutex::new(Fault::None),
            struck: AtomicUsize::new(0),
            made: AtomicUsize::new(0),
            dead: AtomicUsize::new(0),
            kept_open: Mutex::default(),
            server: AtomicU16::new(server_port),
            stop: AtomicBool::new(false),
        });
        let acceptor = {
            let shared = shared.clone();
            std::thread::spawn(move || accept(listener, address, &shared))
        };
        Self {
            address,
            shared,
            acceptor: Some(acceptor),
        }
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }
    pub fn set(&self, fault: Fault) {
        *self.shared.fault() = fault;
    }
    pub fn fault(&self) -> Fault {
        self.shared.fault().clone()
    }
    /// Nothing moves any more on the existing connections, for ever; what is sent on them is acknowledged. New ones
    /// work.
    pub fn forget_connections(&self) {
        self.shared
            .dead
            .store(self.shared.made.load(SeqCst), SeqCst);
    }
    /// New connections go to another server; existing ones stay where they are.
    pub fn redirect(&self, server_port: u16) {
        self.shared.server.store(server_port, SeqCst);
    }
    pub fn struck(&self) -> usize {
        self.shared.struck.load(SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().ok();
        }
    }
}

fn accept(listener: TcpListener, address: SocketAddr, shared: &Arc<Shared>) {
    let mut listener = Some(listener);
    while !shared.stop.load(SeqCst) {
        if *shared.fault() == Fault::Refuse {
            listener = None;
        } else if listener.is_none() {
            listener = TcpListener::bind(address).ok();
        }
        let Some(open) = &listener else {
            std::thread::sleep(POLL);
            continue;
        };
        open.set_nonblocking(true).expect("a listening socket");
        let Ok((client, _)) = open.accept() else {
            std::thread::sleep(POLL);
            continue;
        };
        client.set_nonblocking(false).expect("an open socket");
        let Ok(server) = TcpStream::connect(("127.0.0.1", shared.server.load(SeqCst))) else {
            reset(&client);
            continue;
        };
        for stream in [&client, &server] {
            stream.set_nodelay(true).ok();
            stream.set_read_timeout(Some(POLL)).ok();
        }
        let (c, s, up, down) = (
            client.try_clone().expect("a descriptor"),
            server.try_clone().expect("a descriptor"),
            shared.clone(),
            shared.clone(),
        );
        let number = shared.made.fetch_add(1, SeqCst);
        std::thread::spawn(move || pump(c, s, true, number, &up));
        std::thread::spawn(move || pump(server, client, false, number, &down));
    }
}

/// Closing with RST instead of FIN.
fn reset(stream: &TcpStream) {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO)).ok();
    stream.shutdown(Shutdown::Both).ok();
}

fn pump(mut from: TcpStream, mut to: TcpStream, up: bool, number: usize, shared: &Shared) {
    let mut buffer = vec![0; 64 << 10];
    let client = if up { from.try_clone() } else { to.try_clone() };
    let Ok(client) = client else { return };
    let mut gap = false;
    let end_all = |from: &TcpStream, to: &TcpStream| {
        shared.struck.fetch_add(1, SeqCst);
        reset(&client);
        from.shutdown(Shutdown::Both).ok();
        to.shutdown(Shutdown::Both).ok();
    };
    while !shared.stop.load(SeqCst) {
        if number < shared.dead.load(SeqCst) {
            let kept = shared.kept_open.lock();
            let mut kept = kept.unwrap_or_else(PoisonError::into_inner);
            return kept.push((from, to));
        }
        match *shared.fault() {
            Fault::Refuse => return end_all(&from, &to),
            Fault::Stall => {
                std::thread::sleep(POLL);
                continue;
            }
            Fault::BlackHoleUp | Fault::BlackHoleDown => {}
            _ if gap => return end_all(&from, &to),
            _ => {}
        }
        let n = match from.read(&mut buffer) {
            Ok(0) => {
                to.shutdown(Shutdown::Write).ok();
                return;
            }
            Ok(n) => n,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(_) => {
                to.shutdown(Shutdown::Both).ok();
                return;
            }
        };
        let mut changed = None;
        let mut fault = shared.fault();
        match &*fault {
            Fault::BlackHoleUp if up => {
                gap = true;
                shared.struck.fetch_add(1, SeqCst);
                continue;
            }
            Fault::BlackHoleDown if !up => {
                gap = true;
                shared.struck.fetch_add(1, SeqCst);
                continue;
            }
            // What was read while the fault changed.
            _ if gap => return end_all(&from, &to),
            Fault::LoseReply(text) if !up && contains(&buffer[..n], text.as_bytes()) => {
                *fault = Fault::None;
                return end_all(&from, &to);
            }
            Fault::LoseEachReply(text) if !up && contains(&buffer[..n], text.as_bytes()) => {
                return end_all(&from, &to);
            }
            Fault::Reset if !up => return end_all(&from, &to),
            Fault::Lossy(percent) if !up && fastrand::u32(0..100) < *percent => {
                return end_all(&from, &to);
            }
            Fault::HalfClose if !up => {
                shared.struck.fetch_add(1, SeqCst);
                to.shutdown(Shutdown::Write).ok();
                return;
            }
            Fault::DelayReplies(by) if !up => {
                let by = *by;
                drop(fault);
                shared.struck.fetch_add(1, SeqCst);
                std::thread::sleep(by);
            }
            Fault::DelayRequests(by) if up => {
                let by = *by;
                drop(fault);
                shared.struck.fetch_add(1, SeqCst);
                std::thread::sleep(by);
            }
            Fault::Slow(rate) => {
                let time = Duration::from_secs_f64(n as f64 / f64::from(*rate));
                drop(fault);
                shared.struck.fetch_add(1, SeqCst);
                std::thread::sleep(time);
            }
            // Bytes that were read just before the stall began wait for its end too.
            Fault::Stall => {
                drop(fault);
                while *shared.fault() == Fault::Stall && !shared.stop.load(SeqCst) {
                    std::thread::sleep(POLL);
                }
            }
            Fault::WrongTime(by, left) if !up => {
                if let Some(wrong) = wrong_time(&buffer[..n], *by) {
                    *fault = match *left {
                        0 | 1 => Fault::None,
                        n => Fault::WrongTime(*by, n - 1),
                    };
                    changed = Some(wrong);
                    shared.struck.fetch_add(1, SeqCst);
                }
                drop(fault);
            }
            Fault::Garble(percent) if !up => {
                changed = Some(garbled(&buffer[..n], *percent));
                drop(fault);
                shared.struck.fetch_add(1, SeqCst);
            }
            _ => drop(fault),
        }
        if to
            .write_all(changed.as_deref().unwrap_or(&buffer[..n]))
            .is_err()
        {
            return end_all(&from, &to);
        }
    }
    from.shutdown(Shutdown::Both).ok();
    to.shutdown(Shutdown::Both).ok();
}

/// The reply with each of its times (microseconds, as in the scripts' answers) moved; None: it has none.
fn wrong_time(reply: &[u8], by: i64) -> Option<Vec<u8>> {
    let mut moved = false;
    let other = with_numbers(reply, |digits, whole| {
        let us: i64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
        (whole && digits.len() == 16).then(|| {
            moved = true;
            us.saturating_add(by).to_string()
        })
    });
    moved.then_some(other)
}

/// The reply with numbers that look like a time replaced by any other number.
fn garbled(reply: &[u8], percent: u32) -> Vec<u8> {
    with_numbers(reply, |digits, whole| {
        (digits.len() >= 13 && fastrand::u32(0..100) < percent).then(|| {
            let wild = [0, 1, -1, i64::MIN, i64::MAX, -1 << 53, 1 << 53];
            match (whole, fastrand::u32(0..3)) {
                (true, 0) => wild[fastrand::usize(0..wild.len())].to_string(),
                (true, 1) => fastrand::i64(..).to_string(),
                // Inside of a text, whose length must not change.
                _ => digits
                    .iter()
                    .map(|_| char::from(fastrand::u8(b'1'..=b'9')))
                    .collect(),
            }
        })
    })
}

/// The reply with some of its numbers replaced. `other` gets a number, and whether it is a whole answer by itself.
fn with_numbers(all: &[u8], mut other: impl FnMut(&[u8], bool) -> Option<String>) -> Vec<u8> {
    let (mut out, mut at) = (vec![], 0);
    while at < all.len() {
        let n = all[at..].iter().take_while(|b| b.is_ascii_digit()).count();
        let length = format!("${n}\r\n");
        let whole = out.ends_with(length.as_bytes());
        match Some(n)
            .filter(|n| *n > 0)
            .and_then(|n| other(&all[at..at + n], whole))
        {
            Some(text) => {
                if whole {
                    out.truncate(out.len() - length.len());
                    out.extend(format!("${}\r\n", text.len()).into_bytes());
                }
                out.extend(text.into_bytes());
            }
            None => out.extend(&all[at..at + n.max(1)]),
        }
        at += n.max(1);
    }
    out
}

fn contains(all: &[u8], part: &[u8]) -> bool {
    all.windows(part.len()).any(|w| w == part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support::server::RedisServer;

    fn ping(proxy: &Proxy) -> ::redis::RedisResult<String> {
        let client = ::redis::Client::open(proxy.url())?;
        let mut c = client.get_connection_with_timeout(Duration::from_millis(500))?;
        c.set_read_timeout(Some(Duration::from_millis(500)))?;
        ::redis::cmd("ECHO").arg("hello").query(&mut c)
    }

    #[test]
    fn each_fault_strikes_and_ends_when_it_is_switched_off() {
        let server = RedisServer::start();
        let proxy = Proxy::start(server.port());
        assert_eq!(ping(&proxy).expect("no fault"), "hello");
        for fault in [
            Fault::BlackHoleUp,
            Fault::BlackHoleDown,
            Fault::Stall,
            Fault::Reset,
            Fault::Lossy(100),
            Fault::HalfClose,
            Fault::Refuse,
            Fault::LoseReply("hello"),
            Fault::LoseEachReply("hello"),
            Fault::DelayReplies(Duration::from_secs(1)),
            Fault::DelayRequests(Duration::from_secs(1)),
        ] {
            proxy.set(fault.clone());
            std::thread::sleep(4 * POLL);
            ping(&proxy).expect_err(&format!("{fault:?} struck"));
            proxy.set(Fault::None);
            super::super::wait_for("the proxy passes again", super::super::GENEROUS, || {
                ping(&proxy).ok()
            });
        }
    }

    /// It would be given the answer of the question before.
    #[test]
    fn nothing_passes_behind_what_vanished() {
        let server = RedisServer::start();
        let proxy = Proxy::start(server.port());
        let client = ::redis::Client::open(proxy.url()).expect("an address");
        let echo = |text: &str| ::redis::cmd("ECHO").arg(text).clone();
        for fault in [Fault::BlackHoleUp, Fault::BlackHoleDown] {
            let mut c = client.get_connection().expect("a connection");
            let short = Some(Duration::from_millis(500));
            c.set_read_timeout(short).expect("an open socket");
            assert_eq!(echo("0").query::<String>(&mut c).expect("no fault"), "0");
            let before = proxy.struck();
            proxy.set(fault.clone());
            std::thread::sleep(4 * POLL);
            c.send_packed_command(&echo("1").get_packed_command())
                .expect("an open socket");
            super::super::wait_for("it vanishes", super::super::GENEROUS, || {
                (proxy.struck() > before).then_some(())
            });
            proxy.set(Fault::None);
            let got = c
                .send_packed_command(&echo("2").get_packed_command())
                .and_then(|()| c.recv_response());
            got.expect_err(&format!("after {fault:?}"));
        }
    }

    #[test]
    fn a_connection_that_is_forgotten_is_neither_answered_nor_closed() {
        let server = RedisServer::start();
        let proxy = Proxy::start(server.port());
        let client = ::redis::Client::open(proxy.url()).expect("an address");
        let mut old = client.get_connection().expect("a connection");
        let short = Some(Duration::from_millis(500));
        old.set_read_timeout(short).expect("an open socket");
        let echo = ::redis::cmd("ECHO").arg("hello").clone();
        assert_eq!(echo.query::<String>(&mut old).expect("an answer"), "hello");
        proxy.forget_connections();
        std::thread::sleep(4 * POLL);
        let nothing = echo.query::<String>(&mut old).expect_err("no answer");
        assert!(nothing.is_timeout(), "{nothing}");
        assert_eq!(ping(&proxy).expect("a new connection works"), "hello");
    }
}
