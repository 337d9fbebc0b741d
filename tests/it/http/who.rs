//! Who may do what: hosts, tokens, roles, sites.

use std::{
    io::{BufReader, Write as _},
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::Path,
    process::Command,
    time::Instant,
};

use super::client::{Ask, Connection, get, post, read};
use crate::support::{
    GENEROUS,
    fleet::{Fleet, fleet},
    wait_until,
};

const JOB: &str = "command = \"true\"";

fn known(at: &str, ask: impl Fn(Ask) -> Ask) {
    wait_until("the job is known", GENEROUS, || {
        ask(get(at, "/api/v1/jobs")).of(200)["jobs"][0]["known"] == true
    });
}

/// A token and its line.
fn token(fleet: &Fleet, name: &str, role: &str) -> (String, String) {
    let made = fleet.json(&["http", "token", name, role, "--json"]);
    let text = |key: &str| made[key].as_str().expect("a text").to_owned();
    (text("token"), text("line"))
}

/// As an editor does, which readers find whole.
fn put(file: &Path, lines: &[&str]) {
    let new = file.with_extension("new");
    std::fs::write(&new, lines.join("\n")).expect("write");
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    std::fs::rename(new, file).expect("rename");
}

#[test]
fn without_tokens_an_address_can_be_read_and_a_socket_written() {
    let reads = fleet(1).sqlite().http("").job("job", JOB).start();
    let at = reads.http(0);
    known(&at, |ask| ask);
    let session = get(&at, "/api/v1/session").of(200);
    assert_eq!(
        (&session["role"], &session["tokens"]),
        (&"read".into(), &false.into())
    );
    let refused = post(&at, "/api/v1/jobs/job/trigger", "{}").of(403);
    assert!(
        refused["hint"]
            .as_str()
            .is_some_and(|h| h.contains("tokens_file")),
        "{refused}"
    );
    let writes = fleet(1)
        .sqlite()
        .http("listen = \"unix:{id}.sock\"")
        .job("job", JOB)
        .start();
    let at = writes.http(0);
    known(&at, |ask| ask);
    let meta = std::fs::symlink_metadata(&at).expect("a socket");
    assert!(meta.file_type().is_socket());
    assert_eq!(meta.permissions().mode() & 0o777, 0o660);
    assert_eq!(get(&at, "/api/v1/session").of(200)["role"], "operate");
    post(&at, "/api/v1/jobs/job/trigger", "{}").of(202);
    let mut writes = writes;
    writes.stop();
    assert!(!Path::new(&at).exists(), "it leaves its socket behind");
}

#[test]
fn whoever_only_reads_changes_nothing_nor_does_anybody_where_that_is_said() {
    let mut plan = fleet(1).sqlite().job("job", JOB);
    plan = plan.http("listen = \"unix:{id}.sock\"\nread_only = true");
    let fleet = plan.start();
    let at = fleet.http(0);
    known(&at, |ask| ask);
    assert_eq!(get(&at, "/api/v1/session").of(200)["read_only"], true);
    for path in [
        "/api/v1/jobs/job/trigger",
        "/api/v1/jobs/job/pause",
        "/api/v1/jobs/job/resume",
        "/api/v1/jobs/job/skip",
        "/api/v1/jobs/job/cancel",
        "/api/v1/instances/i1/drain",
        "/api/v1/instances/i1/undrain",
    ] {
        let refused = post(&at, path, "{}").of(403);
        assert!(
            refused["hint"]
                .as_str()
                .is_some_and(|h| h.contains("read_only")),
            "{refused}"
        );
    }
}

#[test]
fn tokens_decide_and_change_without_a_restart() {
    let plan = fleet(1)
        .sqlite()
        .job("job", JOB)
        .file("tokens", "# none yet\n");
    let fleet = plan.http("tokens_file = \"tokens\"").start();
    let at = fleet.http(0);
    let file = fleet.file("tokens");
    let (reader, of_reader) = token(&fleet, "ann", "read");
    let (operator, of_operator) = token(&fleet, "bob", "operate");
    assert!(
        !of_reader.contains(&reader),
        "the line has the token itself"
    );
    let status = |ask: Ask| ask.send().status;
    let jobs = || get(&at, "/api/v1/jobs");
    let trigger = || post(&at, "/api/v1/jobs/job/trigger", "{}");
    // Nobody but who asks for what everybody may see.
    for path in ["/healthz", "/readyz", "/", "/api/v1/session"] {
        wait_until(path, GENEROUS, || status(get(&at, path)) == 200);
    }
    let session = get(&at, "/api/v1/session").of(200);
    assert_eq!(
        (&session["role"], &session["tokens"]),
        (&serde_json::Value::Null, &true.into())
    );
    for path in [
        "/api/v1/jobs",
        "/api/v1/events",
        "/metrics",
        "/calendar.ics",
        "/api/v1/openapi.json",
        "/no/such/thing",
    ] {
        let reply = get(&at, path).send();
        reply.of(401);
        assert!(
            reply
                .header("www-authenticate")
                .is_some_and(|v| v.starts_with("Bearer"))
        );
    }
    trigger().of(401);
    let known_token = |token: &str, path: &str| status(get(&at, path).token(token));
    assert_eq!(known_token(&reader, "/api/v1/jobs"), 401);
    put(&file, &[&of_reader, &of_operator]);
    wait_until("the new tokens count", GENEROUS, || {
        known_token(&reader, "/api/v1/jobs") == 200
    });
    known(&at, |ask| ask.token(&reader));
    assert_eq!(
        get(&at, "/api/v1/session").token(&reader).of(200)["name"],
        "ann"
    );
    let refused = trigger().token(&reader).of(403);
    assert!(
        refused["hint"]
            .as_str()
            .is_some_and(|h| h.contains("operate")),
        "{refused}"
    );
    trigger().token(&operator).of(202);
    fleet.wait_log(0, "by=\"bob\"");
    // What is almost a token is none.
    for wrong in [
        "",
        "x",
        &operator[1..],
        &format!("{operator}0"),
        &operator.to_uppercase(),
        &of_operator[of_operator.len() - 64..],
        &"x".repeat(4000),
    ] {
        assert_eq!(status(jobs().token(wrong)), 401, "{wrong}");
    }
    for header in [
        operator.clone(),
        format!("Basic {operator}"),
        format!("Bearer\t{operator}"),
    ] {
        assert_eq!(
            status(jobs().header("Authorization", &header)),
            401,
            "{header}"
        );
    }
    // Programs for calendars send it as a password; for anything else that is no way.
    let password = |path: &str, user: &str| {
        let both = base64::Engine::encode(
            &base64::engine::general_purpose::STANDARD,
            format!("{user}:{reader}"),
        );
        get(&at, path).header("Authorization", &format!("Basic {both}"))
    };
    for path in ["/calendar.ics", "/api/v1/jobs/job/calendar.ics"] {
        for user in ["", "ann", "anybody"] {
            assert_eq!(status(password(path, user)), 200, "{user} {path}");
        }
        assert_eq!(status(get(&at, path).token(&reader)), 200);
        let refused = get(&at, path).send();
        let offers = refused
            .headers
            .iter()
            .filter(|(n, _)| n == "www-authenticate");
        let offers: Vec<_> = offers.map(|(_, v)| v.split(' ').next()).collect();
        assert_eq!(offers, [Some("Bearer"), Some("Basic")], "{refused:?}");
        assert_eq!(refused.status, 401);
    }
    for path in [
        "/api/v1/jobs",
        "/metrics",
        "/api/v1/jobs/job/why/calendar.ics",
    ] {
        let refused = password(path, "ann").send();
        assert_eq!(refused.status, 401, "{path}");
        let challenge = refused.header("www-authenticate").unwrap_or_default();
        assert!(challenge.starts_with("Bearer"), "{path}: {challenge}");
    }
    let in_path = get(&at, &format!("/api/v1/jobs?token={operator}"));
    assert_eq!(status(in_path), 401);
    // One is taken away, and another role given. Whoever reads a stream by it reads no more.
    let mut streams = [&reader, &operator].map(|t| get(&at, "/api/v1/events").token(t).stream());
    put(&file, &[&of_operator.replace("operate", "read")]);
    wait_until("it is taken away", GENEROUS, || {
        status(jobs().token(&reader)) == 401
    });
    trigger().token(&operator).of(403);
    let [of_gone, of_changed] = &mut streams;
    let begun = Instant::now();
    while of_gone.next().is_some() {
        assert!(begun.elapsed() < GENEROUS, "the stream goes on");
    }
    assert!(
        of_changed.next().is_some(),
        "a stream ended with its reader's role"
    );
    // A file that cannot be understood lets nobody in, and says so.
    put(&file, &[&of_operator, "nonsense"]);
    wait_until("nobody may", GENEROUS, || {
        status(jobs().token(&operator)) == 503
    });
    fleet.wait_log(0, "line 2: not `NAME ROLE sha256:HEX`");
    let hint = jobs().token(&operator).of(503)["hint"].to_string();
    assert!(hint.contains("soloist check"), "{hint}");
    std::fs::remove_file(&file).expect("remove");
    wait_until("it is gone", GENEROUS, || {
        // The file is looked at for requests.
        assert_eq!(status(jobs().token(&operator)), 503);
        fleet.instances[0].log_text().contains("no such file")
    });
    put(&file, &[&of_operator]);
    wait_until("it is back", GENEROUS, || {
        status(jobs().token(&operator)) == 200
    });
    let log = fleet.instances[0].log_text();
    assert!(
        !log.contains(&operator) && !log.contains(&reader),
        "the log has a token"
    );
}

#[test]
fn a_page_of_another_site_changes_nothing_and_reads_nothing() {
    let fleet = fleet(1)
        .sqlite()
        .http("public_url = \"https://soloist.example.org/x\"")
        .job("job", JOB)
        .start();
    let at = fleet.http(0);
    let port = at.rsplit(':').next().expect("a port");
    let status = |ask: Ask| ask.send().status;
    for (host, want) in [
        ("localhost", 200),
        (&format!("localhost:{port}"), 200),
        (&format!("127.0.0.1:{port}"), 200),
        ("[::1]:80", 200),
        ("soloist.example.org", 200),
        ("SOLOIST.example.org:443", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("soloist.example.org.evil.example", 421),
        ("evil.example:7878", 421),
        ("127.0.0.1.evil.example", 421),
    ] {
        for path in ["/", "/api/v1/jobs", "/healthz", "/api/v1/session"] {
            assert_eq!(
                status(get(&at, path).header("Host", host)),
                want,
                "{host} {path}"
            );
        }
    }
    // A probe of HTTP/1.0 names none; later versions must.
    let raw = |request: &str| {
        let mut c = Connection::open(&at);
        c.write_all(request.as_bytes()).expect("send");
        read(&mut BufReader::new(c)).expect("an answer").status
    };
    assert_eq!(raw("GET /healthz HTTP/1.0\r\n\r\n"), 200);
    let evil = "GET /healthz HTTP/1.0\r\nHost: evil.example\r\n\r\n";
    assert_eq!(raw(evil), 421);
    assert_eq!(raw("GET /healthz HTTP/1.1\r\n\r\n"), 400);
    // In the request line, too.
    assert_eq!(status(get(&at, "http://evil.example/api/v1/jobs")), 421);
    let by_socket = self::fleet(1)
        .sqlite()
        .http("listen = \"unix:{id}.sock\"")
        .job("job", JOB)
        .start();
    let at = by_socket.http(0);
    known(&at, |ask| ask);
    // A proxy may be in front of the socket.
    assert_eq!(
        status(get(&at, "/api/v1/jobs").header("Host", "evil.example")),
        421
    );
    let trigger = || post(&at, "/api/v1/jobs/job/trigger", "{}");
    for (name, value) in [
        ("Origin", "https://evil.example"),
        ("Origin", "null"),
        ("Origin", "http://localhost.evil.example"),
        ("Origin", "https://localhost"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
        // Twice.
        ("Origin", "http://localhost\r\nOrigin: https://evil.example"),
        ("Sec-Fetch-Site", "none\r\nSec-Fetch-Site: cross-site"),
    ] {
        assert_eq!(
            status(trigger().header(name, value)),
            403,
            "{name}: {value}"
        );
    }
    for (name, value) in [
        ("Origin", "http://localhost"),
        ("Sec-Fetch-Site", "same-origin"),
        ("Sec-Fetch-Site", "none"),
    ] {
        assert_eq!(
            status(trigger().header(name, value)),
            202,
            "{name}: {value}"
        );
    }
    // What a form can send.
    for kind in [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonx",
    ] {
        assert_eq!(
            status(trigger().header("Content-Type", kind)),
            415,
            "{kind}"
        );
    }
    assert_eq!(
        status(trigger().header("Content-Type", "application/json; charset=utf-8")),
        202
    );
    for method in ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"] {
        let reply = trigger().method(method).send();
        assert_eq!(reply.status, 405, "{method}");
        assert!(
            reply
                .headers
                .iter()
                .all(|(name, _)| !name.starts_with("access-control"))
        );
    }
}

#[test]
fn an_address_that_others_reach_needs_tokens() {
    let fleet = fleet(1).sqlite().http("").job("job", JOB).start();
    let text = fleet.config_text(0);
    for (listen, line) in [("0.0.0.0:0", 4), ("[::]:0", 4), ("192.0.2.1:80", 4)] {
        let file = fleet.file("other.toml");
        let changed = text.replace(
            "listen = \"127.0.0.1:0\"",
            &format!("listen = \"{listen}\""),
        );
        std::fs::write(&file, &changed).expect("write");
        let at = changed
            .lines()
            .position(|l| l.starts_with("listen"))
            .expect("a line")
            + 1;
        assert!(at > line, "{changed}");
        for command in ["check", "run"] {
            let output = Command::new(env!("CARGO_BIN_EXE_soloist"))
                .arg("--config")
                .arg(&file)
                .arg(command)
                .current_dir(fleet.file("."))
                .output()
                .expect("it starts");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(78), "{said}");
            assert!(said.contains(&format!("other.toml:{at}:10")), "{said}");
            assert!(said.contains("tokens_file"), "{said}");
        }
    }
}

#[test]
fn https_needs_no_more_than_two_files() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    crate::options::certificates(dir.path());
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).expect("a file");
    let fleet = fleet(1)
        .sqlite()
        .file("server.pem", &read("server.pem"))
        .file("server.key", &read("server.key"))
        .http("tls = { cert = \"server.pem\", key = \"server.key\" }")
        .job("job", JOB)
        .start();
    let at = fleet.http(0);
    let port = at.rsplit(':').next().expect("a port");
    let curl = |more: &[&str]| {
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "60", "--cacert"])
            .arg(dir.path().join("ca.pem"))
            .args(more)
            .arg(format!("https://localhost:{port}/healthz"))
            .output();
        match output {
            Ok(output) => Some(String::from_utf8_lossy(&output.stdout).into_owned()),
            Err(_) => {
                crate::support::skip("curl is not there");
                None
            }
        }
    };
    let Some(said) = curl(&[]) else { return };
    assert_eq!(said, "{\"alive\":true}");
    // Who does not speak TLS is told so, and harms nobody.
    let mut plain = super::client::Connection::open(&at);
    std::io::Write::write_all(&mut plain, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .expect("send");
    let mut answer = vec![];
    let _ = std::io::Read::read_to_end(&mut plain, &mut answer);
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("this port speaks https"), "{answer}");
    assert_eq!(curl(&[]).as_deref(), Some("{\"alive\":true}"));
}

#[test]
fn jobs_run_where_the_address_is_taken_and_it_is_served_once_it_is_free() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = taken.local_addr().expect("an address");
    let fleet = fleet(1)
        .sqlite()
        .http(&format!("listen = \"{at}\""))
        .witness("a", "for=5", "")
        .start();
    fleet.wait_log(0, "another program listens there");
    fleet.wait_runs(2);
    drop(taken);
    let at = fleet.http(0);
    assert_eq!(get(&at, "/healthz").of(200)["alive"], true);
}
