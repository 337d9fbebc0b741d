//! Channels and jobs that come, change and go while messages are under way or wait.

use std::fs;

use rustix::process::Signal;
use serde_json::Value;

use super::{
    channel, failing, kinds,
    servers::{Hook, Mode},
};
use crate::support::{
    GENEROUS,
    fleet::{Fleet, fleet},
    wait_for, wait_until,
};

/// What the store has noted for notifications under this name.
fn noted(fleet: &mut Fleet, name: &str) -> Option<Value> {
    let key: Vec<String> = fleet.server().command(&["KEYS", "*notices*"]);
    let key = key.first()?;
    let text: Option<String> = fleet.server().command(&["HGET", key, name]);
    text.map(|text| serde_json::from_str(&text).expect("JSON"))
}

#[test]
fn a_channel_that_changes_while_it_is_sent_to_gets_the_message_at_its_new_address() {
    let dir = tempfile::tempdir().expect("a directory");
    let (old, new) = (Hook::start(Mode::Holds), Hook::start(Mode::Takes));
    let mut fleet = fleet(1)
        .tables(&channel("ops", &old, "timeout = \"60s\""))
        .default("notify", "[\"ops\"]")
        .job("bad", &failing(dir.path(), ""))
        .start();
    let held = old.wait_held("ops");
    // A second channel comes at the same time: it is told what it has not been told of yet.
    let tables = channel("ops", &new, "") + &channel("two", &new, "");
    fleet.set_tables(&tables, ("notify", "[\"ops\", \"two\"]"));
    fleet.reload(0);
    assert_eq!(kinds(&new.wait("two", 1)[0]), [("bad", "failed")]);
    assert_eq!(new.heard("ops").len(), 0, "it is still on its way");
    old.set(Mode::Status(500));
    let heard = new.wait("ops", 1);
    assert_eq!(
        (&heard[0]["id"], &heard[0]["tries"]),
        (&held["id"], &1.into())
    );
    fs::write(dir.path().join("ok"), "").expect("write");
    for name in ["ops", "two"] {
        let heard = new.wait(name, 2);
        assert_eq!(kinds(&heard[1]), [("bad", "recovered")]);
    }
    assert_eq!(old.heard("ops").len(), 0);
}

#[test]
fn a_channel_that_goes_while_it_is_sent_to_gets_the_message_if_it_comes_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let (ops, two) = (Hook::start(Mode::Holds), Hook::start(Mode::Takes));
    let both = channel("ops", &ops, "timeout = \"60s\"") + &channel("two", &two, "");
    let mut fleet = fleet(1)
        .tables(&both)
        .default("notify", "[\"ops\", \"two\"]")
        .job("bad", &failing(dir.path(), ""))
        .start();
    let id = ops.wait_held("ops")["id"].clone();
    fleet.set_tables(&channel("two", &two, ""), ("notify", "[\"two\"]"));
    fleet.reload(0);
    ops.set(Mode::Status(500));
    fleet.wait_log(0, "cannot send a notification; retrying");
    ops.set(Mode::Takes);
    // The other channel is told meanwhile of what happens later.
    fs::write(dir.path().join("ok"), "").expect("write");
    assert_eq!(kinds(&two.wait("two", 2)[1]), [("bad", "recovered")]);
    assert_eq!(ops.heard("ops").len(), 0);
    fleet.set_tables(&both, ("notify", "[\"ops\", \"two\"]"));
    fleet.reload(0);
    let heard = ops.wait("ops", 1);
    assert_eq!(heard[0]["id"], id);
    assert_eq!(kinds(&heard[0]), [("bad", "failed")]);
}

/// The messages of a job that is removed are still sent, and a job that comes back is not told anew.
#[test]
fn a_job_that_goes_and_comes_back_is_told_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Status(503));
    let job = failing(dir.path(), "");
    let mut fleet = fleet(1)
        .tables(&channel("ops", &hook, ""))
        .default("notify", "[\"ops\"]")
        .job("bad", &job)
        .job("good", "command = \"true\"\nschedule = \"@every 1s\"")
        .start();
    fleet.wait_log(0, "cannot send a notification; retrying");
    fleet.set_job("bad", None);
    fleet.reload(0);
    wait_until("that it is gone is noted", GENEROUS, || {
        noted(&mut fleet, "job:bad").is_some_and(|n| n["unwatched"].is_i64())
    });
    hook.set(Mode::Takes);
    assert_eq!(kinds(&hook.wait("ops", 1)[0]), [("bad", "failed")]);
    fleet.set_job("bad", Some(&job));
    fleet.reload(0);
    wait_until("that it is back is noted", GENEROUS, || {
        noted(&mut fleet, "job:bad").is_some_and(|n| n["unwatched"].is_null())
    });
    let before = fleet.history("bad").len();
    wait_until("it fails again", GENEROUS, || {
        fleet.history("bad").len() >= before + 3
    });
    fs::write(dir.path().join("ok"), "").expect("write");
    let heard = hook.wait("ops", 2);
    assert_eq!(kinds(&heard[1]), [("bad", "recovered")], "{heard:#?}");
    assert_eq!(heard.len(), 2, "{heard:#?}");
}

/// Notes of jobs of which nobody is told any more go after a week.
#[test]
fn the_notes_of_jobs_that_are_gone_are_removed() {
    let hook = Hook::start(Mode::Takes);
    let mut fleet = fleet(1)
        .tables(&channel("ops", &hook, ""))
        .default("notify", "[\"ops\"]")
        .job("good", "command = \"true\"\nschedule = \"@every 1s\"")
        .start();
    let now = super::now_ms();
    let (week, day) = (7 * 86_400_000, 86_400_000);
    wait_until("there is a notifier", GENEROUS, || {
        noted(&mut fleet, "job:good").is_some()
    });
    // As a notifier of last week left them.
    fleet.instances[0].kill();
    let keys: Vec<String> = fleet.server().command(&["KEYS", "*notices*"]);
    for (name, since) in [("old", now - week - day), ("young", now - day)] {
        let note = format!("{{\"seen\":[],\"first\":0,\"unwatched\":{since}}}");
        let field = format!("job:{name}");
        fleet
            .server()
            .command::<i64>(&["HSET", &keys[0], &field, &note]);
    }
    fleet.instances[0].start();
    wait_until("old notes are gone", GENEROUS, || {
        noted(&mut fleet, "job:old").is_none()
    });
    let young = noted(&mut fleet, "job:young").expect("young notes");
    assert_eq!(young["unwatched"], now - day);
    assert!(noted(&mut fleet, "job:good").is_some());
}

#[test]
fn a_notifier_without_channels_gives_its_place_to_another() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Takes);
    let mut fleet = fleet(2)
        .tables(&channel("ops", &hook, ""))
        .default("notify", "[\"ops\"]")
        .job("bad", &failing(dir.path(), ""))
        .start();
    hook.wait("ops", 1);
    let lease = noted(&mut fleet, "lease").expect("a lease");
    let first = fleet.index(lease["holder"].as_str().expect("a name"));
    let other = 1 - first;
    // Stopped: it takes nothing over before the lease was given back.
    fleet.instances[other].signal(Signal::STOP);
    fleet.set_tables("", ("notify", "[]"));
    fleet.reload(first);
    let back = wait_for("the lease is given back", GENEROUS, || {
        noted(&mut fleet, "lease").filter(|lease| lease["over"] == true)
    });
    assert_eq!(back["token"], lease["token"]);
    fleet.instances[other].signal(Signal::CONT);
    let id = fleet.instances[other].id.clone();
    wait_until("the other one has it", GENEROUS, || {
        noted(&mut fleet, "lease").is_some_and(|l| l["holder"] == id && l["over"] == false)
    });
    fs::write(dir.path().join("ok"), "").expect("write");
    let heard = hook.wait("ops", 2);
    assert_eq!(kinds(&heard[1]), [("bad", "recovered")], "{heard:#?}");
    assert_eq!(heard[1]["sent_by"], id);
}
