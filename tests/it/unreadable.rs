//! What a store says that no soloist wrote: it hides nothing else, and is bounded.

use crate::support::{
    GENEROUS,
    fleet::{Fleet, fleet},
};

/// Two jobs, of which the second's state is another's.
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
    // Its records are there all the same, and those of the others.
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
    // One that wants to be read from the end of all numbers.
    db.execute("UPDATE output SET start = -9, base = -8, stop = -7", [])
        .expect("another output");
    let logs = fleet.cli(&["logs", "good"]);
    let said = String::from_utf8_lossy(&logs.stderr);
    assert!(matches!(logs.status.code(), Some(0 | 70)), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    // Lines that are no records, and one that is much.
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
    // Nor does an instance that is none keep the others from telling of themselves.
    fleet
        .server()
        .command::<()>(&["HSET", "soloist:instances", "odd", "{"]);
    fleet.instances[0].start();
    fleet.wait_more_runs(2);
}
