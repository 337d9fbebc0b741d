//! Data in a store that no soloist wrote: it hides nothing else, its output is bounded, and it does nothing to a
//! terminal.

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::support::{
    GENEROUS,
    fleet::{Fleet, fleet},
    process, wait_for, wait_until,
};

/// Clears the screen, sets the title, hides and reorders text, and begins what looks like a line of its own.
const EVIL: &str = "x\x1b[2J\x1b]0;t\x07\u{9b}31m\u{202e}\u{2066}\x7f\u{200b}\u{feff}\u{2028}\r\n2099-01-01T00:00:00Z forged";
/// What of it would act on a terminal, or not be seen.
const ACTS: [char; 9] = [
    '\x1b', '\x07', '\x7f', '\u{9b}', '\u{202e}', '\u{2066}', '\u{200b}', '\u{feff}', '\u{2028}',
];

/// A fleet with two jobs; the state of the second is replaced by foreign data.
fn ran(sqlite: bool) -> Fleet {
    let plan = fleet(1)
        .witness("good", "for=5", "")
        .witness("odd", "for=5", "");
    // For megabytes, on a busy machine.
    let plan = plan.store("timeout = \"2s\"").default("lease", "\"6s\"");
    let fleet = match sqlite {
        true => plan.sqlite().start(),
        false => plan.start(),
    };
    fleet.wait_runs(1);
    for job in ["good", "odd"] {
        fleet.wait_record(job, "succeeded");
    }
    fleet
}

fn sqlite(fleet: &Fleet) -> rusqlite::Connection {
    let db = rusqlite::Connection::open(fleet.file("soloist.db")).expect("the store's file");
    db.busy_timeout(GENEROUS).expect("a patient connection");
    db
}

/// `status` shows the others, and what to do about this one.
fn judge(fleet: &Fleet, place: &str) {
    let status = fleet.json(&["status", "--json"]);
    let jobs = status["jobs"].as_array().expect("jobs");
    let of = |name: &str| jobs.iter().find(|j| j["job"] == name).expect("a job");
    assert!(of("good")["last"].is_object(), "{status:#}");
    assert!(of("good")["unreadable"].is_null(), "{status:#}");
    let why = of("odd")["unreadable"].as_str().expect("a reason");
    assert!(why.contains(place), "{why}");
    let text = fleet.said(&["status"]);
    assert!(text.contains("cannot be read: see below"), "{text}");
    assert!(text.contains(&format!("wrote to {place}")), "{text}");
    // The job's records are there all the same, and those of the others.
    let history = fleet.said(&["history"]);
    assert!(history.contains("good"), "{history}");
    assert!(history.contains("odd"), "{history}");
    let why = fleet.cli(&["why", "odd"]);
    let said = String::from_utf8_lossy(&why.stderr);
    assert_eq!(why.status.code(), Some(70), "{said}");
    assert!(said.contains(place), "{said}");
}

#[test]
fn a_state_that_cannot_be_read_hides_no_other() {
    let mut fleet = ran(false);
    fleet.instances[0].urge();
    let key = "soloist:{odd}:state";
    fleet
        .server()
        .command::<()>(&["HSET", key, "newest", "some day"]);
    judge(&fleet, key);
    fleet
        .server()
        .command::<()>(&["HSET", key, "newest", "9223372036854775807"]);
    judge(&fleet, key);
    fleet.server().command::<()>(&["DEL", key]);
    fleet.server().command::<()>(&["SET", key, "mine"]);
    judge(&fleet, key);
    fleet.server().command::<()>(&["DEL", key]);
    let much = "x".repeat(20 << 20);
    fleet.server().command::<()>(&["HSET", key, "junk", &much]);
    judge(&fleet, key);
    assert!(fleet.said(&["status"]).contains("it has 209715"));
    // So many, or so much, that the server would answer nobody for a while are not read at all.
    for (fill, has) in [
        (
            "for i = 1, 30000 do redis.call('HSET', KEYS[1], i, '') end",
            "it has 30001 fields",
        ),
        (
            "redis.call('HSET', KEYS[1], 'junk', string.rep('x', 60000000))",
            "it has 6710",
        ),
    ] {
        let server = fleet.server();
        server.command::<()>(&["DEL", key]);
        server.command::<()>(&["HSET", key, "junk", "x"]);
        server.command::<()>(&["EVAL", fill, "1", key]);
        judge(&fleet, key);
        let said = fleet.said(&["status"]);
        assert!(said.contains(has), "{said}");
    }
}

/// Not that of the job that the store has refused first.
#[test]
fn each_state_that_cannot_be_read_has_its_own_error() {
    let mut fleet = ran(false);
    fleet.instances[0].urge();
    for (job, newest) in [("good", "this one"), ("odd", "that one")] {
        let key = format!("soloist:{{{job}}}:state");
        let server = fleet.server();
        server.command::<()>(&["HSET", &key, "newest", newest]);
    }
    std::fs::write(&fleet.instances[0].log, "").expect("an empty log");
    fleet.instances[0].start();
    for job in ["good", "odd"] {
        let line = wait_for("a warning about the job", GENEROUS, || {
            let log = fleet.instances[0].log_text();
            let mut lines = log
                .lines()
                .filter(|l| l.contains("the store refuses to register"));
            lines
                .find(|l| l.contains(&format!("job={job} ")))
                .map(str::to_owned)
        });
        assert!(line.contains(&format!("soloist:{{{job}}}:state")), "{line}");
    }
}

#[test]
fn a_row_that_cannot_be_read_hides_no_other() {
    let mut fleet = ran(true);
    fleet.instances[0].urge();
    let place = "the row `odd` of the table `jobs`";
    for state in ["{", "{\"newest\": -1}"] {
        sqlite(&fleet)
            .execute("UPDATE jobs SET state = ?1 WHERE job = 'odd'", [state])
            .expect("another state");
        judge(&fleet, place);
    }
    let db = sqlite(&fleet);
    // Output that claims to begin at the end of all numbers.
    db.execute("UPDATE output SET start = -9, base = -8, stop = -7", [])
        .expect("another output");
    let logs = fleet.cli(&["logs", "good"]);
    let said = String::from_utf8_lossy(&logs.stderr);
    assert!(matches!(logs.status.code(), Some(0 | 70)), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    // Lines that are no records, and one that is very long.
    for line in ["{", "[1]", &"x".repeat(20 << 20)] {
        db.execute(
            "INSERT INTO history (job, at, record) VALUES ('good', 1, ?1)",
            [line],
        )
        .expect("another record");
        db.execute(
            "INSERT INTO decisions (job, at, decision) VALUES ('good', 1, ?1)",
            [line],
        )
        .expect("another decision");
    }
    some_are_left_out(&fleet);
}

/// The records and decisions of `good` that can be read are shown, and it is said that some are not.
fn some_are_left_out(fleet: &Fleet) {
    for words in [
        &["history", "good"][..],
        &["why", "good"],
        &["logs", "good"],
    ] {
        let out = fleet.cli(words);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{words:?}: {said}");
        if words[0] != "logs" {
            assert!(
                said.contains("that cannot be read are left out"),
                "{words:?}: {said}"
            );
        }
        if words[0] == "history" {
            assert!(String::from_utf8_lossy(&out.stdout).contains("succeeded"));
        }
    }
}

#[test]
fn lines_that_cannot_be_read_hide_no_others() {
    let mut fleet = ran(false);
    fleet.instances[0].urge();
    for key in ["soloist:{good}:history", "soloist:{good}:decisions"] {
        for line in ["{", "[1]", &"x".repeat(20 << 20)] {
            fleet.server().command::<()>(&["LPUSH", key, line]);
        }
    }
    some_are_left_out(&fleet);
    // A list that is not read at all, or is none, is named, and hides no other job's either.
    let key = "soloist:{good}:history";
    for (fill, says) in [
        (
            "redis.call('LPUSH', KEYS[1], string.rep('x', 60000000))",
            "bytes, more than soloist reads",
        ),
        (
            "redis.call('DEL', KEYS[1]) redis.call('SET', KEYS[1], 'x')",
            "a value of another type than soloist's: rename or delete that key",
        ),
    ] {
        fleet.server().command::<()>(&["EVAL", fill, "1", key]);
        for (words, code) in [
            (&["history"][..], 0),
            (&["history", "good"], 70),
            (&["why", "good"], 70),
        ] {
            let out = fleet.cli(words);
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(code), "{words:?}: {said}");
            assert!(
                said.contains(key) && said.contains(says),
                "{words:?}: {said}"
            );
            assert_eq!(
                code == 0,
                String::from_utf8_lossy(&out.stdout).contains("odd"),
                "{words:?}"
            );
        }
    }
    fleet.instances[0].start();
    fleet.wait_log(
        0,
        "another program gave soloist:{good}:history a value of another type",
    );
    fleet.server().command::<()>(&["DEL", key]);
    fleet.wait_record("good", "succeeded");
    fleet.instances[0].urge();
    // Nor does the entry of an instance that is none hide the others.
    fleet
        .server()
        .command::<()>(&["HSET", "soloist:instances", "odd", "{"]);
    fleet.instances[0].start();
    fleet.wait_more_runs(2);
}

/// The heartbeat of the one instance is shown, and the instance goes on to run its jobs.
fn goes_on(mut fleet: Fleet) {
    let status = fleet.json(&["status", "--json"]);
    assert_eq!(status["jobs"].as_array().map(Vec::len), Some(2));
    let instances = status["instances"].as_array().expect("instances");
    assert!(instances.len() <= 1, "{status:#}");
    fleet.said(&["history"]);
    fleet.instances[0].start();
    fleet.wait_more_runs(2);
    let status = fleet.json(&["status", "--json"]);
    assert_eq!(status["instances"][0]["draining"], false, "{status:#}");
}

#[test]
fn names_that_are_no_text_hide_no_others() {
    let mut fleet = ran(false);
    fleet.instances[0].urge();
    // Among others, an instance that was last seen in the year 9999.
    let script = r#"local info = '{"seen":253402300799999,"host":"\255"}'
        redis.call('HSET', 'soloist:instances', '\255', info, 'i2', info)
        redis.call('HSET', 'soloist:drains', '\255', '\255')
        redis.call('SADD', 'soloist:jobs', '\255')"#;
    fleet.server().command::<()>(&["EVAL", script, "0"]);
    goes_on(fleet);
}

#[test]
fn names_in_a_file_that_are_no_text_hide_no_others() {
    let mut fleet = ran(true);
    fleet.instances[0].urge();
    let db = sqlite(&fleet);
    let info = json!({"host": "h", "pid": 1, "version": "1", "config": "c", "clock_offset_ms": 0.0, "started_at": 1,
        "running": [], "draining": false, "jobs": 1});
    let odd = "CAST(x'ff' AS TEXT)";
    for sql in [
        format!("INSERT INTO drains (instance, at) VALUES ({odd}, 253402300799999)"),
        format!("INSERT INTO jobs (job, state) VALUES ({odd}, '{{}}')"),
        format!("INSERT INTO instances VALUES ({odd}, 253402300799999, '{info}')"),
        format!("INSERT INTO instances VALUES ('i2', 9223372036854775807, '{info}')"),
    ] {
        db.execute(&sql, []).expect(&sql);
    }
    goes_on(fleet);
}

/// What a command writes to a terminal, stderr and stdout together.
fn on_terminal(fleet: &Fleet, words: &str) -> String {
    let program = fleet.instances[0].command();
    let words = format!("{} {words}", program.get_program().display());
    let output = std::process::Command::new("script")
        .args(["-qec", &words, "/dev/null"])
        .env_remove("CI")
        .env("NO_COLOR", "1")
        .env("TERM", "xterm")
        .env("SOLOIST_CONFIG", &fleet.instances[0].config)
        .stdin(std::process::Stdio::null())
        .output()
        .expect("script starts; the tests need it (apt-get install bsdutils)");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asserts that nothing of [`EVIL`] acts on a reader's terminal.
#[track_caller]
fn harmless(what: &str, text: &str) {
    for c in ACTS {
        assert!(!text.contains(c), "{what}: {c:?} in {text:?}");
    }
    assert!(
        !text.lines().any(|l| l.starts_with("2099")),
        "{what}: {text:?}"
    );
    let seen = |part: &str| text.contains(part);
    assert!(
        seen("\\x1b[2J") && seen("\\u{202e}"),
        "{what}: not shown: {text:?}"
    );
}

/// Asserts that [`EVIL`] stands in this JSON, and that nothing of it acts on a reader's terminal.
#[track_caller]
fn harmless_json(what: &str, text: &str) {
    for c in ACTS {
        assert!(!text.contains(c), "{what}: {c:?} in {text:?}");
    }
    // Each document, or each line of a log.
    let mut documents = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let said = |value: &Value| has(value, EVIL);
    assert!(
        documents.any(|value| said(&value.expect("JSON"))),
        "{what}: not said: {text:?}"
    );
}

/// Whether a string of this value has `part`.
fn has(value: &Value, part: &str) -> bool {
    match value {
        Value::String(text) => text.contains(part),
        Value::Array(items) => items.iter().any(|v| has(v, part)),
        Value::Object(fields) => fields.iter().any(|(k, v)| k.contains(part) || has(v, part)),
        _ => false,
    }
}

// Long: one text, in all places where it may be shown.
#[test]
fn nothing_that_a_store_says_acts_on_a_terminal() {
    let mut fleet = fleet(1)
        .witness("good", "for=5", "")
        .job(
            "loud",
            "schedule = []\ncommand = [\"sh\", \"-c\", 'printf \"a\\033[2Jb\\342\\200\\256c\\nnext\\n\"']",
        )
        .start();
    fleet.wait_record("good", "succeeded");
    let shown = on_terminal(&fleet, "trigger loud --wait");
    assert!(shown.contains("a\\x1b[2Jb\\u{202e}c\r\nnext"), "{shown:?}");
    fleet.wait_record("loud", "succeeded");
    let shown = on_terminal(&fleet, "logs loud");
    assert!(shown.contains("a\\x1b[2Jb\\u{202e}c\r\nnext"), "{shown:?}");
    let raw = "a\x1b[2Jb\u{202e}c\nnext\n";
    assert!(on_terminal(&fleet, "logs loud --raw").contains("a\x1b[2Jb\u{202e}c\r\nnext"));
    assert_eq!(fleet.said(&["logs", "loud"]), raw);
    let chunk = fleet.json(&["logs", "loud", "--json"]);
    assert_eq!(chunk["output"], raw);

    fleet.instances[0].urge();
    let server = fleet.server();
    let line: String = server.command(&["LINDEX", "soloist:{good}:history", "0"]);
    let mut record: Value = serde_json::from_str(&line).expect("a record");
    record["run_id"] = json!("01a202e8-f7ce-71ef-ad22-79af87e53a58");
    record["outcome"] = json!("failed");
    for field in ["error", "instance", "host"] {
        record[field] = json!(EVIL);
    }
    server.command::<()>(&["LPUSH", "soloist:{good}:history", &record.to_string()]);
    let at = record["occurrence"].to_string();
    let decision = json!({"job": "good", "occurrence": record["occurrence"], "instance": EVIL,
        "at": record["occurrence"], "decision": EVIL, "detail": EVIL});
    server.command::<()>(&["LPUSH", "soloist:{good}:decisions", &decision.to_string()]);
    let infos: std::collections::HashMap<String, String> =
        server.command(&["HGETALL", "soloist:instances"]);
    let mut info: Value = match infos.values().next() {
        Some(info) => serde_json::from_str(info).expect("an instance"),
        None => {
            json!({"pid": 1, "version": "1", "config": "c", "clock_offset_ms": 0.0, "started_at": 1,
            "running": [], "draining": false, "jobs": 1})
        }
    };
    info["host"] = json!(EVIL);
    info["config"] = json!(EVIL);
    info["seen"] = record["finished_at"].clone();
    server.command::<()>(&["HSET", "soloist:instances", EVIL, &info.to_string()]);
    server.command::<()>(&[
        "HSET",
        "soloist:{good}:state",
        "pause",
        &json!({"reason": EVIL, "at": 1}).to_string(),
    ]);
    for words in [
        "status".to_owned(),
        "history good".to_owned(),
        format!("why good {at}"),
        "drain nobody".to_owned(),
        "resume good".to_owned(),
    ] {
        let text = on_terminal(&fleet, &words);
        if words.starts_with("resume") {
            assert!(
                !text.contains('\x1b') && !text.contains('\u{202e}'),
                "{text:?}"
            );
        } else {
            harmless(&words, &text);
        }
    }
    for words in [
        &["status", "--json"][..],
        &["history", "good", "--json"],
        &["why", "good", &at, "--json"],
        &["history", "good", "--log-format", "json", "--json"],
    ] {
        harmless_json(&words.join(" "), &fleet.said(words));
    }
    let out = fleet.cli(&[
        "--log-format",
        "json",
        "--log",
        "debug",
        "--config",
        EVIL,
        "status",
    ]);
    assert!(!String::from_utf8_lossy(&out.stderr).contains(ACTS));
    // And the message about data that cannot be read.
    let server = fleet.server();
    server.command::<()>(&["HSET", "soloist:{good}:state", "newest", EVIL]);
    harmless("status", &on_terminal(&fleet, "status"));
    harmless("why", &on_terminal(&fleet, "why good"));
    std::fs::write(&fleet.instances[0].log, "").expect("an empty log");
    fleet.instances[0].start();
    fleet.wait_log(0, "the store refuses to register this job");
    let log = wait_for("the end of its line", GENEROUS, || {
        let log = fleet.instances[0].log_text();
        log.contains("forged").then_some(log)
    });
    harmless("the log", &log);
    fleet.instances[0].urge();
    std::fs::write(&fleet.instances[0].log, "").expect("an empty log");
    fleet.instances[0].start_with(|command| {
        command.args(["--log-format", "json"]);
    });
    let log = wait_for("the end of its line", GENEROUS, || {
        let log = fleet.instances[0].log_text();
        let end = log.find("forged").and_then(|at| log[at..].find('\n'));
        end.and_then(|_| log.rfind('\n').map(|n| log[..n].to_owned()))
    });
    harmless_json("the log", &log);
    let names = [EVIL, "\u{202e}"];
    for name in names {
        let out = fleet.cli(&["--config", name, "status"]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(
            !said.contains('\u{202e}') && !said.contains('\x1b'),
            "{said:?}"
        );
    }
    wait_until("it still runs", GENEROUS, || {
        process::resident_kib(fleet.instances[0].pid()).is_some()
    });
}

/// A server that answers each command with OK, as often as `polite` says, and from then on begins with `first` and
/// goes on with `more` for ever. Returns its port.
fn endless(polite: usize, first: &'static str, more: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for mut peer in listener.incoming().flatten() {
            std::thread::spawn(move || -> std::io::Result<()> {
                let mut asked = [0; 65_536];
                for _ in 0..polite {
                    let n = peer.read(&mut asked)?;
                    let text = String::from_utf8_lossy(&asked[..n]);
                    let commands = text.lines().filter(|l| l.starts_with('*')).count();
                    peer.write_all("+OK\r\n".repeat(commands).as_bytes())?;
                }
                let _ = peer.read(&mut asked)?;
                peer.write_all(first.as_bytes())?;
                let more = more.repeat(65_536 / more.len());
                loop {
                    peer.write_all(more.as_bytes())?;
                }
            });
        }
    });
    port
}

/// Neither before nor after the login.
#[test]
fn a_reply_without_an_end_costs_little_memory() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = dir.path().join("jobs.toml");
    for (first, more) in [
        ("+", "x"),
        ("$999999999\r\n", "x"),
        ("*9223372036854775807\r\n", "_\r\n"),
        ("*99999999\r\n", "$3\r\nabc\r\n"),
        ("%99999999\r\n", ":1\r\n"),
        ("=99999999\r\n", "txt:x"),
        ("", "*9\r\n"),
    ] {
        for polite in [0, 1] {
            let port = endless(polite, first, more);
            // Time enough for gigabytes.
            let text = format!(
                "[store]\nurl = \"redis://127.0.0.1:{port}\"\ntimeout = \"5s\"\nretry = {{ attempts = 0 }}\n\
                 [jobs.a]\nschedule = []\ncommand = \"true\"\n[defaults]\nlease = \"1m\"\n"
            );
            std::fs::write(&config, text).expect("a configuration");
            // With more memory than that it would be aborted.
            let mut command = Command::new("sh");
            command.args(["-c", "ulimit -d 262144 && exec \"$@\"", "sh"]);
            command.args([env!("CARGO_BIN_EXE_soloist"), "status", "--config"]);
            let o = command.arg(&config).stdin(Stdio::null()).output();
            let o = o.expect("it starts");
            let said = String::from_utf8_lossy(&o.stderr).into_owned();
            assert_eq!(
                o.status.code(),
                Some(69),
                "{first:?} {more:?} {polite}: {said}"
            );
            let why = ["larger than soloist reads", "does not speak the protocol"];
            assert!(
                why.iter().any(|w| said.contains(w)),
                "{first:?} {more:?}: {said}"
            );
        }
    }
}

#[test]
fn a_message_of_any_size_is_not_read_into_memory() {
    let mut fleet = fleet(1)
        .job("a", "schedule = []\ncommand = [\"true\"]")
        .start();
    wait_until("the job is registered", GENEROUS, || {
        let key = "soloist:{a}:state";
        fleet.server().command::<usize>(&["EXISTS", key]) == 1
    });
    fleet.said(&["trigger", "a", "--wait"]);
    let pid = fleet.instances[0].pid();
    let before = process::most_resident_kib(pid).expect("it runs");
    let publish = "return redis.call('PUBLISH', 'soloist:events', string.rep('x', 25000000))";
    for _ in 0..3 {
        wait_until("it is subscribed", GENEROUS, || {
            fleet.server().command::<usize>(&["EVAL", publish, "0"]) == 1
        });
    }
    fleet.said(&["trigger", "a", "--wait"]);
    let after = process::most_resident_kib(pid).expect("it runs");
    assert!(
        after < before + (20 << 10),
        "{before} KiB, then {after} KiB"
    );
}

/// Together they are larger than a reply may be.
#[test]
fn large_states_hide_no_others() {
    let mut plan = fleet(1)
        .store("timeout = \"2s\"")
        .default("lease", "\"6s\"");
    let names = ["a", "b", "c", "d", "e", "f"];
    for name in names {
        plan = plan.job(name, "schedule = []\ncommand = [\"true\"]");
    }
    let mut fleet = plan.start();
    for name in names {
        wait_until("the job is registered", GENEROUS, || {
            let key = format!("soloist:{{{name}}}:state");
            fleet.server().command::<usize>(&["EXISTS", &key]) == 1
        });
    }
    fleet.instances[0].urge();
    let fill = "for _, key in ipairs(KEYS) do redis.call('HSET', key, 'of_a_later_version', string.rep('x', 12000000)) end";
    let keys = names.map(|name| format!("soloist:{{{name}}}:state"));
    let mut words = vec!["EVAL", fill, "6"];
    words.extend(keys.iter().map(String::as_str));
    fleet.server().command::<()>(&words);
    let status = fleet.json(&["status", "--json"]);
    let jobs = status["jobs"].as_array().expect("jobs");
    assert_eq!(jobs.len(), names.len(), "{status:#}");
    assert!(jobs.iter().all(|j| j["unreadable"].is_null()), "{status:#}");
    // And an instance registers them anew.
    fleet.instances[0].start();
    fleet.wait_log(0, "jobs=6");
    wait_until("it is there", GENEROUS, || {
        let status = fleet.json(&["status", "--json"]);
        status["instances"]
            .as_array()
            .is_some_and(|all| !all.is_empty())
    });
    let log = fleet.instances[0].log_text();
    assert!(
        !log.contains("ERROR") && !log.contains("larger than"),
        "{log}"
    );
}

/// `status` refuses to read the key, which the script makes large, and says so.
fn refused(fleet: &mut Fleet, script: &str, key: &str, size: &str) {
    fleet.server().command::<()>(&["EVAL", script, "0"]);
    let out = fleet.cli(&["status"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success(), "{key}");
    assert!(
        said.contains(&format!("the key {key} has {size}")),
        "{said}"
    );
    fleet.server().command::<()>(&["DEL", key]);
}

#[test]
fn a_key_of_any_size_is_not_read_into_memory() {
    let mut fleet = ran(false);
    fleet.instances[0].urge();
    for (script, key, size) in [
        (
            "for i = 1, 9 do redis.call('HSET', 'soloist:instances', i, string.rep('x', 4194304)) end",
            "soloist:instances",
            "377487",
        ),
        (
            "for i = 1, 33 do redis.call('HSET', 'soloist:drains', i .. string.rep('x', 1048576), 1) end",
            "soloist:drains",
            "346",
        ),
        (
            "for i = 1, 30000 do redis.call('HSET', 'soloist:instances', i, '{}') end",
            "soloist:instances",
            "30000 fields",
        ),
        (
            "redis.call('HSET', 'soloist:epoch', 'born', string.rep('x', 1048576))",
            "soloist:epoch",
            "a value of 1048576 bytes",
        ),
    ] {
        refused(&mut fleet, script, key, size);
    }
    assert!(fleet.cli(&["status"]).status.success());
    let many = "for i = 1, 100000 do redis.call('SADD', 'soloist:jobs', 'j' .. i) end";
    fleet.server().command::<()>(&["EVAL", many, "0"]);
    fleet.instances[0].start();
    fleet.wait_log(0, "the key soloist:jobs has 100002 names");
    fleet.wait_more_runs(2);
}

#[test]
fn a_table_of_any_size_is_not_read_into_memory() {
    let mut fleet = ran(true);
    fleet.instances[0].urge();
    let fill = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) \
                INSERT INTO jobs (job, state) SELECT 'j' || i, '{}' FROM n";
    sqlite(&fleet).execute(fill, []).expect("more rows");
    fleet.instances[0].start();
    fleet.wait_log(0, "the table jobs has more than 100000 rows");
    fleet.wait_more_runs(2);
}

/// Who may write the file puts in what never ends. It does nothing, to the daemon or to a command.
#[test]
fn triggers_and_views_of_others_in_a_file_do_nothing() {
    const LOOP: &str =
        "(WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c)";
    let mut fleet = ran(true);
    for table in ["history", "decisions", "events", "jobs"] {
        let trigger =
            format!("CREATE TRIGGER t_{table} BEFORE INSERT ON {table} BEGIN SELECT {LOOP}; END");
        sqlite(&fleet).execute_batch(&trigger).expect("a trigger");
    }
    fleet.wait_more_runs(2);
    fleet.stop();
    let file = fleet.file("soloist.db");
    let view =
        format!("DROP TABLE meta; CREATE VIEW meta AS SELECT 'uuid' AS key, {LOOP} AS value;");
    sqlite(&fleet).execute_batch(&view).expect("a view");
    for words in [&["status"][..], &["trigger", "good"]] {
        let output = fleet.cli(words);
        assert!(!output.status.success(), "{output:?}");
    }
    // To open a pipe waits for its writer.
    let journal = format!("{}-journal", file.display());
    let made = std::process::Command::new("mkfifo").arg(&journal).status();
    assert!(made.expect("mkfifo").success());
    let output = fleet.cli(&["status"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("soloist.db-journal is not a regular file"),
        "{said}"
    );
}
