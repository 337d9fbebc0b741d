//! Data in a store that no soloist wrote: one error about its job, the others go on, and nothing acts on a terminal.

use rusqlite::Connection;
use serde_json::{Value, json};

use crate::support::{
    GENEROUS,
    fleet::{Fleet, fleet},
};

/// Clears the screen, sets the title, hides and reorders text, and begins what looks like a line of its own.
const EVIL: &str = "x\x1b[2J\x1b]0;t\x07\u{9b}31m\u{202e}\u{2066}\x7f\u{200b}\u{feff}\u{2028}\r\n2099-01-01T00:00:00Z forged";
/// What of it would act on a terminal, or not be seen.
const ACTS: [char; 9] = [
    '\x1b', '\x07', '\x7f', '\u{9b}', '\u{202e}', '\u{2066}', '\u{200b}', '\u{feff}', '\u{2028}',
];
const STATE: &str = "soloist:{odd}:state";

/// A fleet whose jobs `good` and `odd` have run, and whose instance has gone.
fn ran(sqlite: bool) -> Fleet {
    let plan = fleet(1)
        .witness("good", "for=5", "")
        .witness("odd", "for=5", "");
    // For megabytes, on a busy machine.
    let plan = plan.store("timeout = \"2s\"").default("lease", "\"6s\"");
    let mut fleet = if sqlite { plan.sqlite() } else { plan }.start();
    for job in ["good", "odd"] {
        fleet.wait_record(job, "succeeded");
    }
    fleet.instances[0].urge();
    fleet
}

/// The exit code of a command, and all that it says.
fn says(fleet: &Fleet, words: &[&str]) -> (Option<i32>, String) {
    let out = fleet.cli(words);
    let said = [out.stdout, out.stderr].concat();
    (
        out.status.code(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

/// What a command writes to a terminal.
fn on_terminal(fleet: &Fleet, words: &str) -> String {
    let program = fleet.instances[0].command();
    let words = format!("{} {words}", program.get_program().display());
    let output = std::process::Command::new("script")
        .args(["-qec", &words, "/dev/null"])
        .env_remove("CI")
        .envs([("NO_COLOR", "1"), ("TERM", "xterm")])
        .env("SOLOIST_CONFIG", &fleet.instances[0].config)
        .stdin(std::process::Stdio::null())
        .output()
        .expect("script starts; the tests need it (apt-get install bsdutils)");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// `status` shows `good`, and says what is wrong with `odd`, as `why` does.
#[track_caller]
fn one_error(fleet: &Fleet, place: &str) {
    let status = fleet.json(&["status", "--json"]);
    let jobs = status["jobs"].as_array().expect("jobs");
    let of = |name: &str| jobs.iter().find(|j| j["job"] == name).expect("a job");
    assert!(of("good")["last"].is_object(), "{status:#}");
    assert!(of("good")["unreadable"].is_null(), "{status:#}");
    let why = of("odd")["unreadable"].as_str().expect("a reason");
    assert!(why.contains(place), "{why}");
    let (code, said) = says(fleet, &["why", "odd"]);
    assert!(code == Some(70) && said.contains(place), "{said}");
}

/// Lines of `good` that cannot be read are left out, and the instance, which comes back, runs `good` all the same.
fn goes_on(mut fleet: Fleet) {
    let (code, said) = says(&fleet, &["history", "good"]);
    assert!(code == Some(0) && said.contains("succeeded"), "{said}");
    assert!(said.contains("that cannot be read are left out"), "{said}");
    fleet.instances[0].start();
    fleet.wait_log(0, "the store refuses to register this job");
    fleet.wait_more_runs(2);
}

#[test]
fn a_key_that_cannot_be_read_is_one_error_and_the_others_go_on() {
    let mut fleet = ran(false);
    let huge = "x".repeat(20 << 20);
    let line = "soloist:{good}:history";
    let server = fleet.server();
    for junk in ["{", "[1]", &huge] {
        server.command::<()>(&["LPUSH", line, junk]);
    }
    let names = r#"local info = '{"seen":253402300799999,"host":"\255"}'
        redis.call('HSET', 'soloist:instances', '\255', info, 'i2', info, 'i3', '{')
        redis.call('HSET', 'soloist:drains', '\255', '\255') redis.call('SADD', 'soloist:jobs', '\255')"#;
    server.command::<()>(&["EVAL", names, "0"]);
    server.command::<()>(&["DEL", "soloist:{odd}:history"]);
    server.command::<()>(&["SET", "soloist:{odd}:history", "mine"]);
    for write in [
        &["HSET", STATE, "newest", "some day"][..],
        &["HSET", STATE, "newest", "9223372036854775807"],
        &["HSET", STATE, "junk", &huge],
        &["SET", STATE, "mine"],
    ] {
        if write[0] == "SET" {
            fleet.server().command::<()>(&["DEL", STATE]);
        }
        fleet.server().command::<()>(write);
        one_error(&fleet, STATE);
    }
    let (code, said) = says(&fleet, &["history"]);
    let named = "gave soloist:{odd}:history a value of another type";
    assert!(code == Some(0) && said.contains(named), "{said}");
    goes_on(fleet);
}

#[test]
fn a_row_that_cannot_be_read_is_one_error_and_the_others_go_on() {
    let fleet = ran(true);
    let db = Connection::open(fleet.file("soloist.db")).expect("the store's file");
    db.busy_timeout(GENEROUS).expect("a patient connection");
    let odd = "CAST(x'ff' AS TEXT)";
    for sql in [
        "INSERT INTO history (job, at, record) VALUES ('good', 1, '{'), ('good', 1, hex(zeroblob(10000000)))",
        "UPDATE output SET start = -9, base = -8, stop = -7",
        &format!("INSERT INTO drains (instance, at) VALUES ({odd}, 253402300799999)"),
        &format!("INSERT INTO jobs (job, state) VALUES ({odd}, '{{}}')"),
        &format!("INSERT INTO instances VALUES ({odd}, 9223372036854775807, '{{')"),
    ] {
        db.execute(sql, []).expect(sql);
    }
    assert!(!says(&fleet, &["logs", "good"]).1.contains("panicked"));
    let mine = "'{\"newest\": -1}'";
    for state in ["'{'", mine, "hex(zeroblob(10000000))"] {
        let sql = format!("UPDATE jobs SET state = {state} WHERE job = 'odd'");
        db.execute(&sql, []).expect("another state");
        one_error(&fleet, "the row `odd` of the table `jobs`");
    }
    goes_on(fleet);
}

#[test]
fn nothing_that_a_store_says_acts_on_a_terminal() {
    let mut fleet = ran(false);
    let server = fleet.server();
    let line: String = server.command(&["LINDEX", "soloist:{good}:history", "0"]);
    let mut record: Value = serde_json::from_str(&line).expect("a record");
    let at = record["occurrence"].clone();
    record["outcome"] = json!("failed");
    for field in ["error", "instance", "host"] {
        record[field] = json!(EVIL);
    }
    let decision = json!({"job": "good", "occurrence": at, "instance": EVIL, "at": at, "decision": EVIL, "detail": EVIL});
    let pause = json!({"reason": EVIL, "at": 1}).to_string();
    server.command::<()>(&["LPUSH", "soloist:{good}:history", &record.to_string()]);
    server.command::<()>(&["LPUSH", "soloist:{good}:decisions", &decision.to_string()]);
    server.command::<()>(&["HSET", "soloist:{good}:state", "pause", &pause]);
    server.command::<()>(&["HSET", STATE, "newest", EVIL]);
    for words in [
        "status",
        "history good",
        &format!("why good {at}"),
        "why odd",
    ] {
        let said = on_terminal(&fleet, words);
        assert!(!said.contains(ACTS), "{words}: {said:?}");
        let forged = said.lines().any(|l| l.starts_with("2099"));
        assert!(!forged && said.contains("\\x1b[2J"), "{words}: {said:?}");
    }
}
