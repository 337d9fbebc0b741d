//! What HTTP takes, how quick it answers, and how soon an event of another instance is here.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use soloist::{
    clock::wall_us,
    logic::claim::{Answer, Settle},
    store::{Store as _, Tail},
};

use crate::{
    claim,
    daemon::{self, Daemon},
    idle::{cpu_ms, memory_kib},
    lateness::{self, Kind, Turn},
    program::{self, NOW},
    support::{Redis, Sample, Table, directory, establish, runtime, seconds, wait_for},
};

pub const JOBS: usize = 1000;
/// As many runs of each job as an answer shows.
const RUNS: usize = 24;
const ASKED: usize = 500;
pub const LINES: &str = "[http]\nlisten = \"127.0.0.1:0\"\n";

pub fn run(table: &mut Table, server: &Redis) {
    jobs(table, server);
    server.flush();
    events(table, server);
    for jobs in [1, JOBS] {
        memory(table, server, jobs);
    }
    starts(table);
}

/// Whether HTTP moves the starts of commands.
fn starts(table: &mut Table) {
    let servers = [(); 3].map(|()| Redis::start());
    for server in &servers {
        runtime().block_on(async { establish(&*server.store()).await });
    }
    let urls = servers.each_ref().map(Redis::url);
    let kinds = [
        Kind {
            name: "Redis",
            url: &urls[0],
            more: "",
            beside: |_, _| {},
        },
        Kind {
            name: "Redis with HTTP followed",
            url: &urls[1],
            more: LINES,
            beside: |dir, _| follow(dir),
        },
        Kind {
            name: "Redis with HTTP followed and asked",
            url: &urls[2],
            more: LINES,
            beside: |dir, turn| {
                follow(dir);
                ask_on(dir, turn);
            },
        },
    ];
    let above = lateness::in_turns(table, JOBS, &kinds);
    for (kind, with) in kinds.iter().zip(&above).skip(1) {
        let more = with - above[0];
        let from = format!("{with:.2} / {:.2} ms above the floor", above[0]);
        let what = format!("start lateness, {}, over that without HTTP: p50", kind.name);
        table.row(&what, more, "ms", 1.0, from);
    }
}

/// A connection that asks one thing after the other.
pub struct Client(BufReader<TcpStream>);

impl Client {
    /// To the instance that logs in `dir` as `a`.
    pub fn new(dir: &Path) -> Self {
        let log = dir.join("a.log");
        let mut address = None;
        wait_for("the address of HTTP", || {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let found = text.split("serving HTTP at http://").nth(1);
            address = found.and_then(|rest| rest.split_whitespace().next().map(str::to_owned));
            address.is_some()
        });
        let stream = TcpStream::connect(address.unwrap_or_default()).expect("a connection");
        let patience = Some(Duration::from_secs(60));
        stream.set_read_timeout(patience).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        Self(BufReader::new(stream))
    }

    pub fn url(&self) -> String {
        let address = self.0.get_ref().peer_addr().expect("a connection");
        format!("http://{address}")
    }

    /// Sends a request, and reads the head of the answer: how long its body is. None: it comes in pieces.
    fn ask(&mut self, path: &str, accept: &str) -> std::io::Result<Option<usize>> {
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n");
        self.0.get_mut().write_all(head.as_bytes())?;
        let mut length = None;
        loop {
            let line = self.line()?;
            match line.to_lowercase().split_once(": ") {
                Some(("content-length", n)) => length = Some(n.parse().expect("a number")),
                None if line.is_empty() => return Ok(length),
                _ => {}
            }
        }
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }

    fn get(&mut self, path: &str) -> std::io::Result<Vec<u8>> {
        let mut body = vec![];
        if let Some(length) = self.ask(path, "application/json")? {
            body.resize(length, 0);
            self.0.read_exact(&mut body)?;
            return Ok(body);
        }
        loop {
            let length = usize::from_str_radix(&self.line()?, 16).expect("a length");
            let before = body.len();
            body.resize(before + length, 0);
            self.0.read_exact(&mut body[before..])?;
            self.line()?;
            if length == 0 {
                return Ok(body);
            }
        }
    }
}

/// A reader of events, until the instance ends.
fn follow(dir: &Path) {
    let mut reader = Client::new(dir);
    std::thread::spawn(move || {
        let _ = reader.ask("/api/v1/events", "text/event-stream");
        let _ = std::io::copy(&mut reader.0, &mut std::io::sink());
    });
}

/// One that asks for all jobs ten times a second while a start is near, until the instance ends: the other daemons are
/// not to feel it.
fn ask_on(dir: &Path, turn: Turn) {
    let mut poller = Client::new(dir);
    std::thread::spawn(move || {
        while !turn.is_near() || poller.get("/api/v1/jobs").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
}

/// New data, in which each of so many jobs has run so often.
pub fn have_run(server: &Redis, jobs: usize, runs: usize) {
    server.flush();
    let names: Vec<String> = (0..jobs).map(|i| format!("idle-{i:05}")).collect();
    runtime().block_on(async {
        let store = server.store();
        let epoch = establish(&*store).await;
        let all: Vec<_> = names
            .iter()
            .map(|name| claim::registration(name, &epoch.incarnation))
            .collect();
        store.register(&all).await.expect("registered");
        for _ in 0..runs {
            // Each has a millisecond of its own.
            tokio::time::sleep(Duration::from_millis(2)).await;
            let at = wall_us() / 1000;
            let claims: Vec<_> = names
                .iter()
                .map(|name| claim::claim(name, at, "bench"))
                .collect();
            let reply = store.claim(&claims).await.expect("an answer");
            for (claim, answer) in claims.iter().zip(&reply.value) {
                assert!(matches!(answer, Answer::Granted(_)), "{answer:?}");
                let settle = Settle {
                    run: claim.run,
                    record: claim::record(claim.job.as_str(), at, &claim.run.to_string()),
                    next_attempt: None,
                };
                store
                    .settle(&settle, &Tail::default())
                    .await
                    .expect("an answer");
            }
        }
    });
}

/// All jobs with as many runs as are shown, as soon as the daemon knows them.
pub fn all_runs(client: &mut Client, jobs: usize) -> Vec<u8> {
    let mut body = vec![];
    wait_for("all runs of all jobs", || {
        body = client.get("/api/v1/jobs").expect("an answer");
        let text = String::from_utf8_lossy(&body);
        text.matches("\"outcome\":\"succeeded\"").count() >= jobs * RUNS
    });
    body
}

/// All jobs, each with its last runs, in one answer.
fn jobs(table: &mut Table, server: &Redis) {
    have_run(server, JOBS, RUNS);
    let (_keep, dir) = directory();
    let config = daemon::config(&dir, &server.url(), JOBS, LINES);
    let daemon = Daemon::start(&dir, &config, "a");
    let mut client = Client::new(&dir);
    let body = all_runs(&mut client, JOBS);
    let before = cpu_ms(daemon.pid());
    let times = (0..ASKED).map(|_| {
        let began = Instant::now();
        client.get("/api/v1/jobs").expect("an answer");
        began.elapsed().as_secs_f64() * 1000.0
    });
    let times = Sample::new(times.collect());
    let from = format!(
        "p50 {:.1}, max {:.1} ms of {ASKED}; {:.1} ms of CPU time and {:.1} MB each",
        times.p50(),
        times.max(),
        (cpu_ms(daemon.pid()) - before) / ASKED as f64,
        body.len() as f64 / 1e6
    );
    let name = format!("GET /api/v1/jobs, {JOBS} jobs with {RUNS} runs: p99");
    table.row(&name, times.p99(), "ms", 20.0, from);
    daemon.stop();
}

pub fn drain(dir: &Path, config: &Path, instance: &str) {
    wait_for("the drain", || {
        let drain = Command::new(env!("CARGO_BIN_EXE_soloist"))
            .arg("--config")
            .arg(config)
            .args(["drain", instance])
            .current_dir(dir)
            .output();
        drain.is_ok_and(|o| o.status.success())
    });
}

/// From the first line of a command on another instance until the event of its grant is here.
fn events(table: &mut Table, server: &Redis) {
    runtime().block_on(async { establish(&*server.store()).await });
    let (_keep, dir) = directory();
    let starts = dir.join("starts");
    let job = format!(
        "[jobs.each-second]\nschedule = \"* * * * * *\"\ncommand = [\"{}\", \"{NOW}\", \"{}\"]\n",
        program::path().display(),
        starts.display()
    );
    let config = daemon::config(&dir, &server.url(), 0, &format!("{LINES}{job}"));
    let (a, b) = (
        Daemon::start(&dir, &config, "a"),
        Daemon::start(&dir, &config, "b"),
    );
    let mut client = Client::new(&dir);
    let lines = || std::fs::read_to_string(&starts).unwrap_or_default();
    wait_for("a first run", || lines().lines().count() > 0);
    // So that the other one runs it.
    drain(&dir, &config, "a");
    client
        .ask("/api/v1/events", "text/event-stream")
        .expect("a stream");
    let mut here = vec![];
    let mut line = String::new();
    while here.len() < seconds().min(30) as usize {
        line.clear();
        let n = client.0.read_line(&mut line).expect("an event");
        assert!(n > 0, "the stream has ended");
        let of = |name: &str| {
            line.split(&format!("\"{name}\":\""))
                .nth(1)?
                .split('"')
                .next()
        };
        if of("kind") == Some("granted") && of("instance") == Some("b") {
            here.push((of("occurrence").expect("an instant").to_owned(), wall_us()));
        }
    }
    a.stop();
    b.stop();
    let starts = lines();
    let times = here.iter().filter_map(|(occurrence, arrived)| {
        let planned: jiff::Timestamp = occurrence.parse().ok()?;
        let planned = format!("{} ", planned.as_millisecond());
        let started: i64 = starts
            .lines()
            .find_map(|l| l.strip_prefix(&planned))?
            .parse()
            .ok()?;
        Some((arrived - started) as f64 / 1000.0)
    });
    let times = Sample::new(times.collect());
    let from = format!(
        "p50 {:.1} ms of {}; below 0: it came first",
        times.p50(),
        times.len()
    );
    let name = "a command's first line on another instance to the event here: max";
    table.row(name, times.max(), "ms", 200.0, from);
}

/// What a daemon takes more with HTTP, after somebody has looked at everything and follows the events.
fn memory(table: &mut Table, server: &Redis, jobs: usize) {
    let taken = ["", LINES].map(|lines| {
        have_run(server, jobs, RUNS);
        let (_keep, dir) = directory();
        let config = daemon::config(&dir, &server.url(), jobs, lines);
        let daemon = Daemon::start(&dir, &config, "a");
        if !lines.is_empty() {
            let mut client = Client::new(&dir);
            all_runs(&mut client, jobs);
            for path in ["/", "/api/v1/instances", "/api/v1/openapi.json", "/metrics"] {
                client.get(path).expect("an answer");
            }
            client
                .ask("/api/v1/events", "text/event-stream")
                .expect("a stream");
            std::thread::sleep(Duration::from_secs(8));
        } else {
            std::thread::sleep(Duration::from_secs(8));
        }
        let taken = memory_kib(daemon.pid(), "Anonymous:") / 1024.0;
        daemon.stop();
        taken
    });
    let [without, with] = taken;
    let name = format!(
        "memory (Anonymous) with HTTP, looked at, over that without, {jobs} jobs with {RUNS} runs"
    );
    let from = format!("{with:.1} / {without:.1} MiB");
    table.row(&name, with - without, "MiB", 3.0, from);
}
