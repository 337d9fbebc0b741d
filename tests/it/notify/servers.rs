//! Servers that soloist sends to, each in a thread of this process.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::Value;

use crate::support::{GENEROUS, wait_for};

/// What the server does with a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Mode {
    Takes,
    /// Reads it and says nothing.
    Hangs,
    /// Says what is no HTTP.
    Babbles,
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
}

/// A server of HTTP. Takes what it is sent once it has done what it was told first.
pub(crate) struct Hook {
    port: u16,
    heard: Arc<Mutex<Vec<Request>>>,
    modes: Arc<Mutex<Vec<Mode>>>,
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
        let heard: Arc<Mutex<Vec<Request>>> = Arc::default();
        let modes = Arc::new(Mutex::new(modes.to_vec()));
        let (h, m) = (heard.clone(), modes.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (h, m) = (h.clone(), m.clone());
                std::thread::spawn(move || serve(stream, &h, &m));
            }
        });
        Self { port, heard, modes }
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

fn serve(stream: TcpStream, heard: &Mutex<Vec<Request>>, modes: &Mutex<Vec<Mode>>) {
    let mut reader = BufReader::new(&stream);
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
    let mode = {
        let mut modes = locked(modes);
        match modes.len() {
            1 => modes[0],
            _ => modes.remove(0),
        }
    };
    locked(heard).push(Request {
        path,
        headers,
        body: String::from_utf8_lossy(&body).into_owned(),
        taken: mode == Mode::Takes,
    });
    let mut out = &stream;
    let text = match mode {
        Mode::Takes => "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_owned(),
        Mode::Hangs => {
            std::thread::sleep(Duration::from_secs(600));
            return;
        }
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
    let _ = out.write_all(text.as_bytes());
}

/// A mail server. The first `dies` mails are taken, and then it closes the connection without a word.
pub(crate) struct MailServer {
    port: u16,
    mails: Arc<Mutex<Vec<String>>>,
}

impl MailServer {
    pub(crate) fn start(dies: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let mails: Arc<Mutex<Vec<String>>> = Arc::default();
        let (m, left) = (mails.clone(), Arc::new(AtomicUsize::new(dies)));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (m, left) = (m.clone(), left.clone());
                std::thread::spawn(move || mail(&stream, &m, &left));
            }
        });
        Self { port, mails }
    }

    pub(crate) fn url(&self) -> String {
        format!("smtp://127.0.0.1:{}", self.port)
    }

    pub(crate) fn mails(&self) -> Vec<String> {
        locked(&self.mails).clone()
    }
}

fn mail(stream: &TcpStream, mails: &Mutex<Vec<String>>, dies: &AtomicUsize) {
    let mut reader = BufReader::new(stream);
    let mut out = stream;
    let _ = out.write_all(b"220 test\r\n");
    let mut line = String::new();
    while reader.read_line(&mut line).is_ok_and(|n| n > 0) {
        let word = line
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_ascii_uppercase();
        let answer: &[u8] = match word.as_str() {
            "DATA" => {
                let _ = out.write_all(b"354 go on\r\n");
                let mut text = String::new();
                loop {
                    let mut line = String::new();
                    if reader.read_line(&mut line).is_err() || line.is_empty() || line == ".\r\n" {
                        break;
                    }
                    text += &line;
                }
                locked(mails).push(text);
                let left =
                    dies.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
                if left.is_ok() {
                    return;
                }
                b"250 taken\r\n"
            }
            "QUIT" => return,
            _ => b"250 fine\r\n",
        };
        let _ = out.write_all(answer);
        line.clear();
    }
}
