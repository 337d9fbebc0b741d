//! Bad clients: garbage, too much, too slow, too many. None of them harms the daemon, or other clients.

use std::{
    io::{BufReader, Read as _, Write as _},
    time::Instant,
};

use super::client::{Connection, get, post, read};
use crate::support::{
    GENEROUS,
    fleet::{Fleet, fleet},
    process, wait_for, wait_until,
};

fn served() -> (Fleet, String) {
    let fleet = fleet(1)
        .sqlite()
        .http("listen = \"unix:{id}.sock\"")
        .witness("a", "for=5", "")
        .start();
    let at = fleet.http(0);
    wait_until("the job is known", GENEROUS, || {
        get(&at, "/api/v1/jobs").of(200)["jobs"][0]["known"] == true
    });
    (fleet, at)
}

fn memory(pid: u32) -> u64 {
    process::resident_kib(pid).expect("it runs")
}

/// It answers, and its jobs run.
#[track_caller]
fn unharmed(fleet: &Fleet, at: &str) {
    assert_eq!(get(at, "/healthz").of(200)["alive"], true);
    fleet.wait_more_runs(2);
    let log = fleet.instances[0].log_text();
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let (fleet, at) = served();
    let long = "x".repeat(20_000);
    let many = "A: b\r\n".repeat(500);
    for bytes in [
        &b"\0\0\0\0\r\n\r\n"[..],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost : x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /api/v1/jobs/a/trigger HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /api/v1/jobs/a/trigger HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /api/v1/jobs/a/trigger HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
        b"POST /api/v1/jobs/a/trigger HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nZZ\r\n",
        format!("GET /{long} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes(),
        format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n").as_bytes(),
        format!("GET / HTTP/1.1\r\nHost: localhost\r\n{many}\r\n").as_bytes(),
    ] {
        let mut c = Connection::open(&at);
        let _ = c.write_all(bytes);
        let mut lines = BufReader::new(c);
        let reply = read(&mut lines);
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]).into_owned();
        if let Some(reply) = reply {
            assert!((400..500).contains(&reply.status), "{shown}: {reply:?}");
        }
    }
    for (path, body) in [
        ("/api/v1/jobs/a/trigger", "["),
        ("/api/v1/jobs/a/trigger", " "),
        ("/api/v1/jobs/a/resume", "\n"),
        ("/api/v1/jobs/a/trigger", "null"),
        ("/api/v1/jobs/a/trigger", "[]"),
        ("/api/v1/jobs/a/pause", "[null, null]"),
        ("/api/v1/jobs/a/trigger", "\u{0}"),
        ("/api/v1/jobs/a/trigger", r#"{"key": 1}"#),
        ("/api/v1/jobs/a/trigger", r#"{"key": ""}"#),
        ("/api/v1/jobs/a/trigger", r#"{"key": "\n"}"#),
        ("/api/v1/jobs/a/skip", r#"{"n": -1}"#),
        ("/api/v1/jobs/a/skip", r#"{"n": 1e99}"#),
        ("/api/v1/jobs/a/pause", r#"{"until": "yesterday"}"#),
        ("/api/v1/jobs/a/pause", r#"{"until": ""}"#),
        (
            "/api/v1/jobs/a/pause",
            r#"{"until": "2020-01-01T00:00:00Z"}"#,
        ),
        ("/api/v1/jobs/a/resume", r#"{"x": 1}"#),
        ("/api/v1/jobs/a/cancel", "[[[[[[[[[[[[[[[["),
    ] {
        post(&at, path, body).of(400);
    }
    let deep = "[".repeat(30_000);
    post(&at, "/api/v1/jobs/a/trigger", &deep).of(400);
    let reason = format!("{{\"reason\": \"{}\"}}", "x".repeat(2000));
    post(&at, "/api/v1/jobs/a/pause", &reason).of(400);
    let huge = format!("{{\"key\": \"{}\"}}", "x".repeat(100_000));
    post(&at, "/api/v1/jobs/a/trigger", &huge).of(413);
    // One that is only announced is not asked for.
    let mut c = Connection::open(&at);
    let head = "POST /api/v1/jobs/a/trigger HTTP/1.1\r\nHost: localhost\r\n\
        Content-Type: application/json\r\nContent-Length: 65537\r\nExpect: 100-continue\r\n\r\n";
    c.write_all(head.as_bytes()).expect("send");
    let mut said = [0; 13];
    c.read_exact(&mut said).expect("an answer");
    assert_eq!(&said, b"HTTP/1.1 413 ");
    unharmed(&fleet, &at);
}

#[test]
fn slow_requests_end_and_hold_up_nobody() {
    let (fleet, at) = served();
    let begun = Instant::now();
    // Nothing at all, half a head, and half a body.
    let mut slow: Vec<Connection> = vec![];
    for part in [
        "",
        "GET /api/v1/jobs HTTP/1.1\r\nHost: local",
        "POST /api/v1/jobs/a/trigger HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{",
    ] {
        for _ in 0..20 {
            let mut c = Connection::open(&at);
            c.write_all(part.as_bytes()).expect("send");
            slow.push(c);
        }
    }
    unharmed(&fleet, &at);
    assert!(begun.elapsed() < GENEROUS);
    let mut late = 0;
    for c in &mut slow {
        let mut rest = vec![];
        // To the end of the connection: within ten seconds, or with an answer within thirty.
        let _ = c.read_to_end(&mut rest);
        let text = String::from_utf8_lossy(&rest);
        assert!(
            rest.is_empty() || text.starts_with("HTTP/1.1 408 "),
            "{text}"
        );
        late += usize::from(!rest.is_empty());
    }
    assert_eq!(late, 20, "whose body does not arrive is told so");
    unharmed(&fleet, &at);
}

/// Silent clients hold all places for as long as they may be silent.
#[test]
fn who_comes_while_too_many_connections_are_open_is_told_so() {
    let (fleet, at) = served();
    let silent: Vec<Connection> = (0..280).map(|_| Connection::open(&at)).collect();
    let refused = wait_for("a refusal", GENEROUS, || {
        let reply = get(&at, "/api/v1/jobs").send();
        (reply.status == 503).then_some(reply)
    });
    assert_eq!(refused.of(503)["detail"], "256 connections are open");
    assert_eq!(refused.header("retry-after"), Some("2"));
    assert_eq!(get(&at, "/healthz").of(200)["alive"], true);
    let metrics = get(&at, "/metrics").send().text();
    assert!(metrics.contains("\nsoloist_store_up 1\n"), "{metrics}");
    // Jobs do not notice, and it passes.
    fleet.wait_more_runs(2);
    wait_until("it answers again", GENEROUS, || {
        get(&at, "/api/v1/jobs").send().status == 200
    });
    assert_eq!(silent.len(), 280);
    unharmed(&fleet, &at);
}

#[test]
fn streams_are_bounded_and_thousands_leave_nothing_behind() {
    let (fleet, at) = served();
    let pid = fleet.instances[0].pid();
    let descriptors = || std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let streams: Vec<_> = (0..64)
        .map(|_| get(&at, "/api/v1/events").stream())
        .collect();
    let refused = get(&at, "/api/v1/events")
        .header("Accept", "text/event-stream")
        .of(503);
    assert!(
        (refused["hint"].as_str()).is_some_and(|h| h.contains("close pages") && h.contains("poll")),
        "{refused}"
    );
    // Pollers are served all the same.
    get(&at, "/api/v1/events").of(200);
    drop(streams);
    let before = std::cell::Cell::new(0);
    wait_until("a stream is free", GENEROUS, || {
        let mut c = Connection::open(&at);
        let _ = c.write_all(
            b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n",
        );
        let mut head = [0; 12];
        let open = c.read_exact(&mut head).is_ok() && &head[9..] == b"200";
        before.set(descriptors());
        open
    });
    let used = memory(pid);
    // Ten thousand: a half is dropped at once, of the others the beginning is read.
    let opened = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| {
                for n in 0..1000 {
                    let mut c = Connection::open(&at);
                    let _ = c.write_all(
                        b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n",
                    );
                    let mut head = [0; 12];
                    if n % 2 == 0 && c.read_exact(&mut head).is_ok() && &head[9..] == b"200" {
                        opened.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let opened = opened.into_inner();
    assert!(opened > 1000, "only {opened} of them were streams");
    wait_until("all are gone", GENEROUS, || {
        descriptors() <= before.get() + 3
    });
    wait_until("all streams are free", GENEROUS, || {
        let metrics = get(&at, "/metrics").send().text();
        metrics.contains("\nsoloist_http_streams 0\n")
    });
    let grown = memory(pid).saturating_sub(used);
    assert!(grown < 8 << 10, "{grown} KiB more");
    unharmed(&fleet, &at);
}

#[test]
fn a_client_that_does_not_read_costs_little() {
    let (fleet, at) = served();
    let pid = fleet.instances[0].pid();
    let used = memory(pid);
    // Each asks again and again, and takes nothing.
    let mut clients: Vec<Connection> = (0..20).map(|_| Connection::open(&at)).collect();
    for c in &mut clients {
        if let Connection::Unix(s) = c {
            s.set_nonblocking(true).expect("a mode");
        }
        let ask = b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n";
        while c.write(ask).is_ok_and(|n| n == ask.len()) {}
    }
    unharmed(&fleet, &at);
    let grown = memory(pid).saturating_sub(used);
    assert!(grown < 16 << 10, "{grown} KiB more");
}

/// The list of all jobs is written piece by piece, as it is taken. What changes meanwhile comes after its cursor.
#[test]
fn a_long_list_that_is_not_read_costs_little_and_is_whole_once_it_is() {
    let mut plan = fleet(1).sqlite().http("listen = \"unix:{id}.sock\"");
    let description = format!(
        "description = \"{}\"\ncommand = \"true\"",
        "x".repeat(10_000)
    );
    for n in 0..200 {
        plan = plan.job(&format!("job-{n:03}"), &description);
    }
    let fleet = plan.witness("a", "for=5", "").start();
    let at = fleet.http(0);
    let pid = fleet.instances[0].pid();
    wait_until("the jobs are known", GENEROUS, || {
        get(&at, "/api/v1/jobs/job-199").of(200)["known"] == true
    });
    let used = memory(pid);
    let mut clients: Vec<_> = (0..20)
        .map(|_| {
            let mut c = Connection::open(&at);
            let ask = "GET /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n";
            // All but the first in advance.
            c.write_all(ask.repeat(10).as_bytes()).expect("send");
            let mut begin = [0; 12];
            c.read_exact(&mut begin).expect("the begin of an answer");
            std::io::Cursor::new(begin).chain(c)
        })
        .collect();
    unharmed(&fleet, &at);
    let grown = memory(pid).saturating_sub(used);
    assert!(grown < 16 << 10, "{grown} KiB more");
    post(&at, "/api/v1/jobs/job-199/pause", "{}").of(200);
    wait_until("the pause is shown", GENEROUS, || {
        !get(&at, "/api/v1/jobs/job-199").of(200)["paused"].is_null()
    });
    let reply = read(&mut BufReader::new(clients.remove(0))).expect("an answer");
    let (list, cursor) = (reply.of(200), reply.header("x-cursor").expect("a cursor"));
    assert_eq!(list["cursor"], cursor);
    let names = list["jobs"].as_array().expect("jobs");
    let names: Vec<_> = names.iter().filter_map(|job| job["job"].as_str()).collect();
    let all = (0..200).map(|n| format!("job-{n:03}"));
    let all: Vec<_> = std::iter::once("a".to_owned()).chain(all).collect();
    assert_eq!(names, all);
    let since = get(&at, &format!("/api/v1/events?since={cursor}")).of(200);
    let since = since["events"].as_array().expect("events");
    let paused = |e: &serde_json::Value| e["kind"] == "job" && e["job"]["job"] == "job-199";
    assert!(since.iter().any(paused), "{cursor}");
    // Of a part of them, too.
    let found = get(&at, "/api/v1/jobs?q=JOB-1").of(200);
    assert_eq!(found["jobs"].as_array().map(Vec::len), Some(100));
}

/// A stream that is not read holds up nobody, takes no memory for what it has not taken, and, once it is read again,
/// goes on or begins anew.
#[test]
fn a_stream_that_is_not_read_costs_little_and_goes_on() {
    let mut plan = fleet(1).sqlite().http("listen = \"unix:{id}.sock\"");
    // A long description makes the events large.
    let description = format!("description = \"{}\"", "x".repeat(1000));
    for n in 0..8 {
        plan = plan.witness(&format!("job-{n}"), "for=1", &description);
    }
    let fleet = plan.start();
    let at = fleet.http(0);
    let pid = fleet.instances[0].pid();
    let mut asleep: Vec<_> = (0..60)
        .map(|_| get(&at, "/api/v1/events").stream())
        .collect();
    let mut awake = get(&at, "/api/v1/events").stream();
    let ended = |stream: &mut super::client::Stream, n: usize| {
        for _ in 0..n {
            stream.wait("the end of a run", |e| e.kind == "ended");
        }
    };
    ended(&mut awake, 40);
    let used = memory(pid);
    // Each second 60 streams do not take 50 KB each.
    ended(&mut awake, 100);
    let grown = memory(pid).saturating_sub(used);
    assert!(grown < 16 << 10, "{grown} KiB more");
    // It has all that it missed, or is told to begin anew; then it is live.
    let late = &mut asleep[0];
    let now = get(&at, "/api/v1/jobs").of(200)["now"].clone();
    late.wait("what happens now", |e| {
        e.kind == "ended" && e.data["at"].as_str() > now.as_str()
    });
    unharmed(&fleet, &at);
}
