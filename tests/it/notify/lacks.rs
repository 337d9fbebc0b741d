//! Instances whose configurations have different jobs.

use std::fs;

use super::{
    channel, failing, kinds,
    reloads::noted,
    servers::{Hook, Mode},
};
use crate::{
    http::client::get,
    support::{
        GENEROUS,
        fleet::{Fleet, Plan, fleet},
        wait_for, wait_until,
    },
};

/// A fleet of two in which only the one that does not send the notifications has the job `other`. Returns the place of
/// the one that sends.
fn of_different_files(plan: Plan, job: &str) -> (Fleet, usize) {
    let good = "command = \"true\"\nschedule = \"@every 1s\"";
    let mut fleet = plan.http("").job("good", good).start();
    let lease = wait_for("a notifier", GENEROUS, || noted(&mut fleet, "lease"));
    let notifier = fleet.index(lease["holder"].as_str().expect("a name"));
    fleet.set_job("other", Some(job));
    fleet.reload(1 - notifier);
    (fleet, notifier)
}

/// What the notifier lacks, as its lease says.
fn wait_lacking(fleet: &mut Fleet) -> serde_json::Value {
    wait_for("the notifier says what it lacks", GENEROUS * 3, || {
        let lease = noted(fleet, "lease")?;
        Some(lease["lacks"].clone()).filter(|lacks| !lacks.is_null())
    })
}

#[test]
fn a_job_that_the_notifier_lacks_is_told_over_the_channels_of_its_defaults() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Takes);
    let plan = fleet(2)
        .tables(&channel("ops", &hook, "on = [\"failed\", \"recovered\"]"))
        .default("notify", "[\"ops\"]");
    let (mut fleet, notifier) = of_different_files(plan, &failing(dir.path(), ""));
    let lacks = wait_lacking(&mut fleet);
    assert_eq!(
        lacks,
        serde_json::json!({"jobs": ["other"], "more": 0, "channels": ["ops"]})
    );
    let heard = hook.wait("ops", 1);
    assert_eq!(kinds(&heard[0]), [("other", "failed")]);
    let text = heard[0]["text"].as_str().expect("text");
    assert!(
        text.contains("lacks the job") && text.contains("about to fail"),
        "{text}"
    );
    // It is known wherever somebody looks.
    let told = "they are told over ops";
    let log = fleet.instances[notifier].log_text();
    let warning = "other instances have jobs that the configuration of this instance";
    assert!(log.contains(warning) && log.contains(told), "{log}");
    let said = fleet.said(&["status"]);
    let line = format!("lacks jobs that other instances have: other: {told}");
    assert!(said.contains(&line), "{said}");
    assert_eq!(
        fleet.json(&["status", "--json"])["notifier_lacks"]["jobs"][0],
        "other"
    );
    for i in 0..2 {
        let at = fleet.http(i);
        let event = wait_for("an event", GENEROUS, || {
            let all = get(&at, "/api/v1/events?feed=true").of(200);
            let events = all["events"].as_array().expect("events");
            events.iter().find(|e| e["kind"] == "lacks_jobs").cloned()
        });
        assert_eq!(
            (&event["job"], &event["count"]),
            (&"other".into(), &1.into())
        );
        assert!(
            event["reason"].as_str().expect("words").contains(told),
            "{event}"
        );
    }
    // Its file gets the job: what was told is known, and the recovery is told once.
    fleet.reload(notifier);
    wait_until("it lacks nothing", GENEROUS, || {
        noted(&mut fleet, "lease").is_some_and(|lease| lease["lacks"].is_null())
    });
    fs::write(dir.path().join("ok"), "").expect("write");
    let heard = hook.wait("ops", 2);
    assert_eq!(kinds(&heard[1]), [("other", "recovered")], "{heard:#?}");
    assert!(!fleet.said(&["status"]).contains("lacks"));
}

#[test]
fn a_job_of_which_nobody_is_told_because_the_notifier_lacks_it_is_shown() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Takes);
    // An instance that uses no channel would not be the notifier.
    let plan = fleet(2)
        .tables(&channel("ops", &hook, ""))
        .job("told", "command = \"true\"\nnotify = [\"ops\"]");
    let job = failing(dir.path(), "notify = [\"ops\"]");
    let (mut fleet, notifier) = of_different_files(plan, &job);
    let lacks = wait_lacking(&mut fleet);
    assert_eq!(lacks["channels"], serde_json::json!([]));
    let log = fleet.instances[notifier].log_text();
    assert!(
        log.contains("nobody is told of them, because `[defaults]` there names no channel"),
        "{log}"
    );
    let said = fleet.said(&["status"]);
    assert!(said.contains("other: nobody is told of them"), "{said}");
    // A job that is removed everywhere is no job that somebody has.
    fleet.set_job("other", None);
    fleet.reload(1 - notifier);
    wait_until("it lacks nothing", GENEROUS * 3, || {
        noted(&mut fleet, "lease").is_some_and(|lease| lease["lacks"].is_null())
    });
    assert_eq!(hook.heard("ops").len(), 0);
}
