//! A small client: each request has a connection of its own, and sends exactly what it is told to.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
};

use serde_json::Value;

use crate::support::GENEROUS;

pub enum Connection {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Connection {
    /// To `127.0.0.1:PORT`, or to a socket at a path.
    #[track_caller]
    pub fn open(address: &str) -> Self {
        if address.starts_with('/') {
            let stream = UnixStream::connect(address).expect("connect to a socket");
            stream.set_read_timeout(Some(GENEROUS)).expect("a timeout");
            return Self::Unix(stream);
        }
        let stream = TcpStream::connect(address).expect("connect");
        stream.set_read_timeout(Some(GENEROUS)).expect("a timeout");
        Self::Tcp(stream)
    }
}

impl Read for Connection {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Tcp(s) => s.read(buf),
            Self::Unix(s) => s.read(buf),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::Tcp(s) => s.write(buf),
            Self::Unix(s) => s.write(buf),
        }
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
    /// The JSON of an answer with this status; a problem must say what it is.
    #[track_caller]
    pub fn of(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        let value = self.json();
        if status >= 400 {
            let kind = self.header("content-type");
            assert_eq!(kind, Some("application/problem+json"), "{value}");
            assert_eq!(value["status"], status, "{value}");
            let detail = value["detail"].as_str().unwrap_or_default();
            assert!(!detail.is_empty(), "{value}");
        }
        value
    }
}

/// A request to be sent.
#[derive(Clone)]
pub struct Ask {
    address: String,
    method: &'static str,
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

pub fn get(address: &str, path: &str) -> Ask {
    Ask {
        address: address.into(),
        method: "GET",
        path: path.into(),
        headers: vec![],
        body: vec![],
    }
}

/// A POST of JSON.
pub fn post(address: &str, path: &str, body: &str) -> Ask {
    Ask {
        method: "POST",
        body: body.into(),
        ..get(address, path)
    }
    .header("Content-Type", "application/json")
}

impl Ask {
    pub fn method(mut self, method: &'static str) -> Self {
        self.method = method;
        self
    }
    /// Replaces a header, or adds it. An empty value removes it.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
        if !value.is_empty() {
            self.headers.push((name.into(), value.into()));
        }
        self
    }
    pub fn token(self, token: &str) -> Self {
        self.header("Authorization", &format!("Bearer {token}"))
    }

    fn head(&self, keep: bool) -> String {
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.path);
        if !self
            .headers
            .iter()
            .any(|(n, _)| n.eq_ignore_ascii_case("host"))
        {
            head += "Host: localhost\r\n";
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        if !keep {
            head += "Connection: close\r\n";
        }
        if self.method == "POST" || !self.body.is_empty() {
            head += &format!("Content-Length: {}\r\n", self.body.len());
        }
        head + "\r\n"
    }

    #[track_caller]
    pub fn send(&self) -> Reply {
        let mut c = Connection::open(&self.address);
        let mut bytes = self.head(false).into_bytes();
        bytes.extend_from_slice(&self.body);
        // The server may answer, and close, before it has read all.
        let _ = c.write_all(&bytes);
        read(&mut BufReader::new(c)).expect("an answer")
    }

    /// The JSON of an answer with this status.
    #[track_caller]
    pub fn of(&self, status: u16) -> Value {
        self.send().of(status)
    }

    /// A stream of events, whose head must have this status 200.
    #[track_caller]
    pub fn stream(self) -> Stream {
        let ask = self.header("Accept", "text/event-stream");
        let mut c = Connection::open(&ask.address);
        c.write_all(ask.head(true).as_bytes()).expect("send");
        let mut lines = BufReader::new(c);
        let (status, headers) = head(&mut lines).expect("a head");
        let kind = headers.iter().find(|(n, _)| n == "content-type");
        assert_eq!(
            (status, kind.map(|(_, v)| v.as_str())),
            (200, Some("text/event-stream"))
        );
        Stream {
            lines: Chunked {
                from: lines,
                left: 0,
            },
        }
    }
}

/// The status and the headers; None: the connection ended.
fn head(from: &mut impl BufRead) -> Option<(u16, Vec<(String, String)>)> {
    let mut line = String::new();
    from.read_line(&mut line).ok()?;
    let status = line.split(' ').nth(1)?.parse().ok()?;
    let mut headers = vec![];
    loop {
        let mut line = String::new();
        from.read_line(&mut line).ok()?;
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.push((name.to_lowercase(), value.trim().to_owned())),
            None => return Some((status, headers)),
        }
    }
}

/// The answer to one request; None: the connection ended before it.
pub fn read(from: &mut impl BufRead) -> Option<Reply> {
    let (status, headers) = head(from)?;
    let find = |name: &str| {
        headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.clone())
    };
    let mut body = vec![];
    if find("transfer-encoding").is_some_and(|v| v.contains("chunked")) {
        let mut chunked = Chunked { from, left: 0 };
        chunked.read_to_end(&mut body).ok()?;
    } else if let Some(length) = find("content-length").and_then(|v| v.parse().ok()) {
        body.resize(length, 0);
        from.read_exact(&mut body).ok()?;
    } else {
        from.read_to_end(&mut body).ok()?;
    }
    Some(Reply {
        status,
        headers,
        body,
    })
}

struct Chunked<R> {
    from: R,
    left: usize,
}

impl<R: BufRead> Read for Chunked<R> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        if self.left == 0 {
            let mut line = String::new();
            self.from.read_line(&mut line)?;
            if line.trim().is_empty() {
                line.clear();
                self.from.read_line(&mut line)?;
            }
            self.left = usize::from_str_radix(line.trim(), 16).unwrap_or(0);
            if self.left == 0 {
                return Ok(0);
            }
        }
        let most = buf.len().min(self.left);
        let n = self.from.read(&mut buf[..most])?;
        self.left -= n;
        Ok(n)
    }
}

/// An open stream of events.
pub struct Stream {
    lines: Chunked<BufReader<Connection>>,
}

#[derive(Debug, Clone)]
pub struct Event {
    pub id: String,
    pub kind: String,
    pub data: Value,
}

impl Stream {
    fn line(&mut self) -> Option<String> {
        let mut line = vec![];
        loop {
            let mut byte = [0];
            match self.lines.read(&mut byte) {
                Ok(1) if byte[0] == b'\n' => return Some(String::from_utf8(line).expect("UTF-8")),
                Ok(1) => line.push(byte[0]),
                _ => return None,
            }
        }
    }

    /// The next event; None: the stream has ended.
    #[track_caller]
    pub fn next(&mut self) -> Option<Event> {
        let (mut id, mut kind, mut data) = (String::new(), String::new(), String::new());
        loop {
            let line = self.line()?;
            match line.split_once(": ") {
                _ if line.is_empty() && data.is_empty() => {}
                _ if line.is_empty() => {
                    let data =
                        serde_json::from_str(&data).unwrap_or_else(|e| panic!("{e}: {data}"));
                    return Some(Event { id, kind, data });
                }
                Some(("id", value)) => id = value.into(),
                Some(("event", value)) => kind = value.into(),
                Some(("data", value)) => data += value,
                Some(("", _) | ("retry", _)) => {}
                _ => panic!("not a line of a stream: {line:?}"),
            }
        }
    }

    /// The first event that is wanted.
    #[track_caller]
    pub fn wait(&mut self, what: &str, wanted: impl Fn(&Event) -> bool) -> Event {
        let begun = std::time::Instant::now();
        loop {
            let event = self
                .next()
                .unwrap_or_else(|| panic!("the stream ended before this: {what}"));
            if wanted(&event) {
                return event;
            }
            assert!(
                begun.elapsed() < GENEROUS,
                "waited in vain for this: {what}"
            );
        }
    }

    /// The first event of this kind about this job.
    #[track_caller]
    pub fn of_job(&mut self, kind: &str, job: &str) -> Event {
        let about = |e: &Event| {
            let named = &e.data["job"];
            *named == job || named["job"] == job
        };
        self.wait(&format!("{kind} of {job}"), |e| e.kind == kind && about(e))
    }
}
