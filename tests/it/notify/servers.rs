//! Servers that soloist sends to, each in a thread of this process.

use std::{
    io::{BufRead as _, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustix::net::{RecvFlags, recv};
use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use serde_json::Value;

use crate::support::{GENEROUS, wait_for};

/// What a server speaks TLS with: `NAME.pem` and `NAME.key` of this directory.
pub(super) fn identity(dir: &Path, name: &str) -> Arc<ServerConfig> {
    let file = |end: &str| dir.join(format!("{name}.{end}"));
    let chain = CertificateDer::pem_file_iter(file("pem")).expect("a certificate");
    let chain = chain.map(|c| c.expect("a certificate")).collect();
    let key = PrivateKeyDer::from_pem_file(file("key")).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions of TLS")
        .with_no_client_auth()
        .with_single_cert(chain, key);
    Arc::new(config.expect("a key that fits the certificate"))
}

fn encrypted(
    stream: TcpStream,
    identity: &Arc<ServerConfig>,
) -> StreamOwned<ServerConnection, TcpStream> {
    let connection = ServerConnection::new(identity.clone()).expect("a connection");
    StreamOwned::new(connection, stream)
}

/// What the server does with a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Mode {
    Takes,
    /// Reads it and says nothing.
    Hangs,
    /// Reads it, and waits for another mode to answer by.
    Holds,
    /// Says what is no HTTP.
    Babbles,
    /// Closes the connection without a word.
    Closes,
    /// Takes it, and sends its answer byte by byte, for ever.
    Drips,
    Redirects,
    /// 429, with `Retry-After`.
    Busy(u64),
    Status(u16),
}

#[derive(Debug, Clone)]
struct Request {
    path: String,
    /// Each line as it came.
    headers: Vec<String>,
    body: String,
    taken: bool,
    held: bool,
}

/// A server of HTTP. Takes what it is sent once it has done what it was told first.
pub(crate) struct Hook {
    port: u16,
    heard: Arc<Mutex<Vec<Request>>>,
    modes: Arc<Mutex<Vec<Mode>>>,
    identity: Arc<Mutex<Option<Arc<ServerConfig>>>>,
}

fn locked<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hook {
    pub(crate) fn start(mode: Mode) -> Self {
        Self::start_with(&[mode])
    }

    /// The n-th request is treated as the n-th of these says; the last goes for all others.
    pub(crate) fn start_with(modes: &[Mode]) -> Self {
        Self::listen(TcpListener::bind("127.0.0.1:0").expect("a port"), modes)
    }

    pub(crate) fn listen(listener: TcpListener, modes: &[Mode]) -> Self {
        let port = listener.local_addr().expect("an address").port();
        let hook = Self {
            port,
            heard: Arc::default(),
            modes: Arc::new(Mutex::new(modes.to_vec())),
            identity: Arc::default(),
        };
        let (h, m, i) = (
            hook.heard.clone(),
            hook.modes.clone(),
            hook.identity.clone(),
        );
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (h, m, identity) = (h.clone(), m.clone(), locked(&i).clone());
                std::thread::spawn(move || match (identity, stream.try_clone()) {
                    (Some(identity), Ok(peer)) => {
                        serve(encrypted(stream, &identity), &peer, &h, &m)
                    }
                    (None, Ok(peer)) => serve(stream, &peer, &h, &m),
                    (_, Err(_)) => {}
                });
            }
        });
        hook
    }

    /// From now on it speaks TLS with this.
    pub(super) fn identify(&self, identity: Arc<ServerConfig>) {
        *locked(&self.identity) = Some(identity);
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn set(&self, mode: Mode) {
        *locked(&self.modes) = vec![mode];
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/{path}", self.port)
    }

    /// The messages that were taken there, in order.
    pub(crate) fn heard(&self, path: &str) -> Vec<Value> {
        let path = format!("/{path}");
        let all = locked(&self.heard);
        all.iter()
            .filter(|r| r.taken && r.path == path)
            .map(|r| serde_json::from_str(&r.body).expect("JSON"))
            .collect()
    }

    /// The headers of all requests, in order.
    pub(crate) fn headers(&self) -> Vec<Vec<String>> {
        let all = locked(&self.heard);
        all.iter().map(|r| r.headers.clone()).collect()
    }

    /// Waits until it holds a message there. Returns that.
    #[track_caller]
    pub(super) fn wait_held(&self, path: &str) -> Value {
        let path = format!("/{path}");
        let body = wait_for("a message on its way", GENEROUS, || {
            let all = locked(&self.heard);
            let held = all.iter().find(|r| r.held && r.path == path);
            held.map(|r| r.body.clone())
        });
        serde_json::from_str(&body).expect("JSON")
    }

    /// The paths of all requests, in order.
    pub(crate) fn paths(&self) -> Vec<String> {
        locked(&self.heard).iter().map(|r| r.path.clone()).collect()
    }

    #[track_caller]
    pub(crate) fn wait(&self, path: &str, n: usize) -> Vec<Value> {
        wait_for("a message", GENEROUS, || {
            let heard = self.heard(path);
            (heard.len() >= n).then_some(heard)
        })
    }
}

/// Whether the client of the connection has gone away.
fn gone(peer: &TcpStream) -> bool {
    let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    match recv(peer, &mut [0; 1], look) {
        Ok((_, n)) => n == 0,
        Err(e) => e != rustix::io::Errno::AGAIN,
    }
}

fn serve(
    stream: impl Read + Write,
    peer: &TcpStream,
    heard: &Mutex<Vec<Request>>,
    modes: &Mutex<Vec<Mode>>,
) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    if reader.read_line(&mut line).is_err() {
        return;
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let (mut length, mut headers) = (0, vec![]);
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header).is_err() || header.trim().is_empty() {
            break;
        }
        headers.push(header.trim().to_owned());
        if let Some(n) = header.to_ascii_lowercase().strip_prefix("content-length:") {
            length = n.trim().parse().unwrap_or(0);
        }
    }
    let mut body = vec![0; length];
    if reader.read_exact(&mut body).is_err() {
        return;
    }
    let next = || {
        let mut modes = locked(modes);
        match modes.len() {
            1 => modes[0],
            _ => modes.remove(0),
        }
    };
    let mut mode = next();
    let number = {
        let mut heard = locked(heard);
        heard.push(Request {
            path,
            headers,
            body: String::from_utf8_lossy(&body).into_owned(),
            taken: false,
            held: mode == Mode::Holds,
        });
        heard.len() - 1
    };
    while mode == Mode::Holds {
        std::thread::sleep(Duration::from_millis(10));
        if gone(peer) {
            locked(heard)[number].held = false;
            return;
        }
        mode = next();
    }
    let mut out = reader.into_inner();
    let text = match mode {
        Mode::Takes => "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_owned(),
        Mode::Hangs => {
            std::thread::sleep(Duration::from_secs(600));
            return;
        }
        Mode::Holds | Mode::Closes => return,
        Mode::Drips => "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_owned(),
        Mode::Babbles => "SSH-2.0-OpenSSH_9.9\r\n\x00\x01\x02".to_owned(),
        Mode::Redirects => {
            "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
                .to_owned()
        }
        Mode::Busy(seconds) => {
            format!(
                "HTTP/1.1 429 Too Many Requests\r\nretry-after: {seconds}\r\ncontent-length: 0\r\n\r\n"
            )
        }
        Mode::Status(status) => format!("HTTP/1.1 {status} No\r\ncontent-length: 2\r\n\r\nno"),
    };
    // Who sees that the message was taken may rely on it that the answer has left.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    {
        let mut heard = locked(heard);
        heard[number].taken = matches!(mode, Mode::Takes | Mode::Drips);
        heard[number].held = false;
    }
    // The client ends it.
    while mode == Mode::Drips
        && out
            .write_all(b"1\r\nx\r\n")
            .and_then(|()| out.flush())
            .is_ok()
    {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How a mail server speaks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Wire {
    Plain,
    Tls,
    StartTls,
}

/// What a mail server does, once, at a command; `.` is the end of a mail.
#[derive(Debug, Clone, Copy)]
pub(super) enum Oddity {
    /// Closes the connection without a word.
    Dies,
    /// Says nothing more.
    Hangs,
}

/// A mail server. It refuses `bad@`.
pub(crate) struct MailServer {
    port: u16,
    heard: Arc<Post>,
}

struct Post {
    /// To whom, and what.
    mails: Mutex<Vec<(Vec<String>, String)>>,
    /// The commands that came in clear, and those that came encrypted.
    clear: Mutex<Vec<String>>,
    secret: Mutex<Vec<String>>,
    odd: Mutex<Vec<(&'static str, Oddity)>>,
    wire: Wire,
    identity: Option<Arc<ServerConfig>>,
}

impl MailServer {
    pub(crate) fn start() -> Self {
        Self::start_odd(&[])
    }

    pub(super) fn start_odd(odd: &[(&'static str, Oddity)]) -> Self {
        Self::listen(Wire::Plain, None, odd)
    }

    /// Without an identity it offers no STARTTLS.
    pub(super) fn start_with(wire: Wire, identity: Option<Arc<ServerConfig>>) -> Self {
        Self::listen(wire, identity, &[])
    }

    fn listen(
        wire: Wire,
        identity: Option<Arc<ServerConfig>>,
        odd: &[(&'static str, Oddity)],
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let heard = Arc::new(Post {
            mails: Mutex::default(),
            clear: Mutex::default(),
            secret: Mutex::default(),
            odd: Mutex::new(odd.to_vec()),
            wire,
            identity,
        });
        let post = heard.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let post = post.clone();
                std::thread::spawn(move || post.serve(stream));
            }
        });
        Self { port, heard }
    }

    pub(crate) fn url(&self) -> String {
        format!("smtp://127.0.0.1:{}", self.port)
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn mails(&self) -> Vec<String> {
        let mails = locked(&self.heard.mails);
        mails.iter().map(|(_, text)| text.clone()).collect()
    }

    /// The mails that it took, and to whom they go: the part of each address before the `@`.
    pub(super) fn taken(&self) -> Vec<(Vec<String>, String)> {
        locked(&self.heard.mails).clone()
    }

    /// The first words of the commands that came in clear, and of those that came encrypted.
    pub(super) fn commands(&self) -> (Vec<String>, Vec<String>) {
        let heard = &self.heard;
        (locked(&heard.clear).clone(), locked(&heard.secret).clone())
    }
}

impl Post {
    fn serve(&self, stream: TcpStream) {
        match (self.wire, &self.identity) {
            (Wire::Tls, Some(identity)) => {
                self.talk(&mut encrypted(stream, identity), true, true);
            }
            (_, identity) => {
                let mut stream = stream;
                if self.talk(&mut stream, false, true)
                    && let Some(identity) = identity
                {
                    self.talk(&mut encrypted(stream, identity), true, false);
                }
            }
        }
    }

    /// True: the client wants TLS now.
    fn talk<S: Read + Write>(&self, stream: &mut S, secret: bool, greets: bool) -> bool {
        let mut reader = BufReader::new(stream);
        if greets {
            let _ = reader.get_mut().write_all(b"220 test\r\n");
            let _ = reader.get_mut().flush();
        }
        let (mut line, mut to) = (String::new(), vec![]);
        while reader.read_line(&mut line).is_ok_and(|n| n > 0) {
            let word = line.split_whitespace().next().unwrap_or_default();
            let word = word.to_ascii_uppercase();
            let all = if secret { &self.secret } else { &self.clear };
            locked(all).push(word.clone());
            let receiver = line.split(['<', '@']).nth(1).unwrap_or_default();
            let mut answer = match word.as_str() {
                "EHLO" if self.wire == Wire::StartTls && self.identity.is_some() && !secret => {
                    "250-test\r\n250-AUTH PLAIN\r\n250 STARTTLS"
                }
                "EHLO" => "250-test\r\n250 AUTH PLAIN",
                "STARTTLS" => "220 go on",
                "AUTH" => "235 welcome",
                "DATA" => "354 go on",
                "QUIT" => return false,
                "RCPT" if receiver == "bad" => "550 5.1.1 no such user",
                "RCPT" => {
                    to.push(receiver.to_owned());
                    "250 fine"
                }
                "MAIL" | "RSET" => {
                    to.clear();
                    "250 fine"
                }
                _ => "250 fine",
            };
            let mut odd = self.odd(&word);
            if word == "DATA" && odd.is_none() {
                let _ = reader.get_mut().write_all(b"354 go on\r\n");
                let _ = reader.get_mut().flush();
                let text = text(&mut reader);
                odd = self.odd(".");
                answer = "250 taken";
                locked(&self.mails).push((std::mem::take(&mut to), text));
            }
            match odd {
                None => {}
                Some(Oddity::Dies) => return false,
                Some(Oddity::Hangs) => std::thread::sleep(Duration::from_secs(600)),
            }
            let _ = reader
                .get_mut()
                .write_all(format!("{answer}\r\n").as_bytes());
            let _ = reader.get_mut().flush();
            if word == "STARTTLS" {
                return true;
            }
            line.clear();
        }
        false
    }

    fn odd(&self, word: &str) -> Option<Oddity> {
        let mut odd = locked(&self.odd);
        let at = odd.iter().position(|(at, _)| *at == word)?;
        Some(odd.remove(at).1)
    }
}

/// A mail, up to the line that ends it.
fn text(reader: &mut impl std::io::BufRead) -> String {
    let mut text = String::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).is_err() || line.is_empty() || line == ".\r\n" {
            return text;
        }
        text += &line;
    }
}
