//! The stream of events: it can be resumed, tells of reloads, and of a store that goes and comes back.

use std::time::Duration;

use rustix::process::Signal;

use super::client::get;
use crate::support::{GENEROUS, fleet::fleet, wait_for, wait_until};

const JOB: &str = "schedule = \"* * * * * *\"\ncommand = \"true\"";

#[test]
fn a_stream_goes_on_where_it_broke_off() {
    let fleet = fleet(1).http("").job("job", JOB).start();
    let at = fleet.http(0);
    let mut stream = get(&at, "/api/v1/events").stream();
    let seen = stream.of_job("ended", "job");
    // What happens while nobody listens comes first.
    let missed = stream.of_job("granted", "job");
    drop(stream);
    for ask in [
        get(&at, "/api/v1/events").header("Last-Event-ID", &seen.id),
        get(&at, &format!("/api/v1/events?since={}", seen.id)),
    ] {
        let mut again = ask.stream();
        let first = again.wait("the next of the feed", |e| {
            e.kind == "granted" || e.kind == "ended"
        });
        assert_eq!(
            (first.id, first.data["run_id"].clone()),
            (missed.id.clone(), missed.data["run_id"].clone())
        );
    }
    // Pollers get the same.
    let polled = get(&at, &format!("/api/v1/events?since={}", seen.id)).of(200);
    let of_feed = |e: &&serde_json::Value| e["kind"] == "granted";
    let events = polled["events"].as_array().expect("events");
    assert_eq!(
        events.iter().find(of_feed).map(|e| &e["cursor"]),
        Some(&missed.data["cursor"])
    );
    let later = get(
        &at,
        &format!(
            "/api/v1/events?since={}",
            polled["cursor"].as_str().expect("a cursor")
        ),
    )
    .of(200);
    assert_eq!(
        (&polled["reset"], &later["reset"]),
        (&false.into(), &false.into())
    );
    // Nobody knows what happened since a cursor of another process, or one that never was.
    for cursor in ["0.1", "of.another", "%ff", &format!("{}9999", seen.id)] {
        let mut stream = get(&at, &format!("/api/v1/events?since={cursor}")).stream();
        let first = stream.next().expect("an event");
        assert_eq!(first.kind, "reset", "{cursor}");
        // From there it goes on.
        stream.of_job("ended", "job");
        let polled = get(&at, &format!("/api/v1/events?since={cursor}")).of(200);
        assert_eq!(polled["reset"], true, "{cursor}");
    }
    for id in ["of another", "\u{1f4a5}"] {
        let mut stream = get(&at, "/api/v1/events")
            .header("Last-Event-ID", id)
            .stream();
        assert_eq!(stream.next().expect("an event").kind, "reset", "{id}");
    }
    // The answer with the jobs says from where on to listen.
    let jobs = get(&at, "/api/v1/jobs").send();
    let cursor = jobs.header("x-cursor").expect("a cursor").to_owned();
    assert_eq!(jobs.json()["cursor"], cursor.as_str());
    let mut stream = get(&at, &format!("/api/v1/events?since={cursor}")).stream();
    assert_ne!(stream.next().expect("an event").kind, "reset");
}

#[test]
fn a_reload_is_told_and_shown() {
    let mut fleet = fleet(1)
        .sqlite()
        .http("")
        .job("job", "command = \"true\"")
        .start();
    let at = fleet.http(0);
    let known = |fleet_at: &str, job: &str| {
        let jobs = get(fleet_at, "/api/v1/jobs").of(200);
        let all = jobs["jobs"].as_array().expect("jobs").clone();
        all.into_iter().find(|j| j["job"] == job)
    };
    wait_until("the job is known", GENEROUS, || {
        known(&at, "job").is_some_and(|j| j["known"] == true)
    });
    let mut stream = get(&at, "/api/v1/events").stream();
    fleet.set_job("more", Some("command = \"true\"\ndescription = \"new\""));
    fleet.set_job("job", Some("command = \"true\"\ndescription = \"another\""));
    fleet.write_config(0);
    fleet.instances[0].signal(Signal::HUP);
    stream.wait("the job as it is now", |e| {
        e.kind == "job" && e.data["job"]["description"] == "another"
    });
    stream.of_job("job", "more");
    stream.wait("the configuration", |e| {
        e.kind == "configuration" && e.data["instance"] == "i1"
    });
    wait_until("the new job is known", GENEROUS, || {
        known(&at, "more").is_some_and(|j| j["known"] == true)
    });
    fleet.set_job("more", None);
    fleet.write_config(0);
    fleet.instances[0].signal(Signal::HUP);
    stream.of_job("job_removed", "more");
    assert!(known(&at, "more").is_none());
    get(&at, "/api/v1/jobs/more").of(404);
}

#[test]
fn a_job_that_only_others_have_is_shown_with_a_mark() {
    let mut fleet = fleet(2)
        .http("listen = \"unix:{id}.sock\"")
        .job("job", JOB)
        .start();
    let at = fleet.http(1);
    let known = |job: &str| {
        let jobs = get(&at, "/api/v1/jobs").of(200);
        let all = jobs["jobs"].as_array().expect("jobs").clone();
        all.into_iter().find(|j| j["job"] == job)
    };
    fleet.set_job("more", Some(JOB));
    fleet.write_config(0);
    fleet.instances[0].signal(Signal::HUP);
    wait_until("its runs are shown", GENEROUS, || {
        known("more").is_some_and(|j| j["elsewhere"] == true && !j["last"].is_null())
    });
    let more = known("more").expect("shown");
    assert_eq!(
        (&more["other_definition"], &more["next"]),
        (&false.into(), &serde_json::Value::Null)
    );
    let detail = get(&at, "/api/v1/jobs/more").of(200);
    assert_eq!(detail["definition"], serde_json::Value::Null);
    assert_eq!(known("job").expect("shown")["elsewhere"], false);
    let metrics = get(&at, "/metrics").send().text();
    for line in ["soloist_jobs 2", "soloist_job_running{job=\"more\"} "] {
        assert!(metrics.contains(&format!("\n{line}")), "{line}: {metrics}");
    }
    super::client::post(&at, "/api/v1/jobs/more/skip", "{}").of(200);
    // It has it now, too.
    fleet.write_config(1);
    fleet.instances[1].signal(Signal::HUP);
    wait_until("it is one of its own", GENEROUS, || {
        known("more").is_some_and(|j| j["elsewhere"] == false && !j["next"].is_null())
    });
    // Nobody has it any more.
    fleet.set_job("more", None);
    for i in [0, 1] {
        fleet.write_config(i);
        fleet.instances[i].signal(Signal::HUP);
    }
    wait_until("it is gone", GENEROUS, || known("more").is_none());
}

#[test]
fn a_store_that_is_gone_is_told_and_what_was_known_stays() {
    let mut fleet = fleet(2)
        .http("listen = \"unix:{id}.sock\"")
        .job("job", JOB)
        .start();
    let at = fleet.http(0);
    let mut stream = get(&at, "/api/v1/events").stream();
    stream.of_job("ended", "job");
    wait_until("both are there", GENEROUS, || {
        get(&at, "/api/v1/instances").of(200)["instances"]
            .as_array()
            .is_some_and(|all| all.len() == 2)
    });
    fleet.server().kill();
    let gone = stream.wait("the store is gone", |e| {
        e.kind == "store" && e.data["reachable"] == false
    });
    assert!(
        gone.data["error"].is_string() && gone.data["since"].is_string(),
        "{gone:?}"
    );
    // Whoever asks: where the store is stays hidden.
    let why = get(&at, "/readyz").of(503)["detail"].clone();
    assert_eq!(why, "the store does not answer");
    assert_eq!(get(&at, "/healthz").of(200)["alive"], true);
    let jobs = get(&at, "/api/v1/jobs").of(200);
    assert!(jobs["store_error"].is_string(), "{jobs}");
    assert!(
        !jobs["jobs"][0]["recent"]
            .as_array()
            .expect("runs")
            .is_empty()
    );
    let instances = get(&at, "/api/v1/instances").of(200);
    assert_eq!(instances["store"]["reachable"], false);
    let silent = instances["instances"]
        .as_array()
        .expect("instances")
        .iter()
        .filter(|i| i["silent"] == true);
    assert_eq!(silent.count(), 0, "nobody can report now");
    // What needs the store is refused at once, and says when to come again.
    for ask in [
        super::client::post(&at, "/api/v1/jobs/job/trigger", "{}"),
        super::client::post(&at, "/api/v1/jobs/job/pause", "{}"),
        super::client::post(&at, "/api/v1/instances/i2/drain", "{}"),
        get(&at, "/api/v1/jobs/job/runs"),
        get(&at, "/api/v1/runs"),
        get(&at, "/api/v1/jobs/job/why/latest"),
    ] {
        let reply = ask.send();
        reply.of(503);
        assert!(reply.header("retry-after").is_some(), "{reply:?}");
    }
    // What does not need it is answered.
    for path in [
        "/",
        "/api/v1/plan",
        "/api/v1/load",
        "/calendar.ics",
        "/metrics",
        "/api/v1/jobs/job",
    ] {
        assert_eq!(get(&at, path).send().status, 200, "{path}");
    }
    assert!(
        get(&at, "/metrics")
            .send()
            .text()
            .contains("\nsoloist_store_up 0\n")
    );
    fleet.server().revive(None);
    stream.wait("the store is back", |e| {
        e.kind == "store" && e.data["reachable"] == true
    });
    // The same stream goes on.
    let ended = stream.of_job("ended", "job");
    assert_eq!(ended.data["outcome"], "succeeded");
    wait_for("it is ready", GENEROUS, || {
        (get(&at, "/readyz").send().status == 200).then_some(())
    });
    let jobs = get(&at, "/api/v1/jobs").of(200);
    assert_eq!(jobs["store_error"], serde_json::Value::Null);
}

/// The state of its job is as it was: the instance that holds the run settles it long after the store has lost the run.
#[test]
fn a_run_whose_lease_the_store_lost_is_shown_when_it_is_recorded() {
    let mut fleet = fleet(2)
        .http("listen = \"unix:{id}.sock\"")
        .job(
            "job",
            "command = \"sleep 600\"\ngrace = \"100ms\"\nlease = \"2s\"",
        )
        .start();
    let at = [fleet.http(0), fleet.http(1)];
    let shown = |i: usize| get(&at[i], "/api/v1/jobs").of(200)["jobs"][0].clone();
    wait_until("the job is known to both", GENEROUS, || {
        [0, 1].iter().all(|i| shown(*i)["known"] == true)
    });
    super::client::post(&at[0], "/api/v1/jobs/job/trigger", "{}").of(202);
    let holder = wait_for("both show its run", GENEROUS, || {
        let [one, other] = [0, 1].map(|i| shown(i)["running"][0]["instance"].clone());
        (one.is_string() && one == other).then(|| one.as_str().map(|id| fleet.index(id)))?
    });
    let other = 1 - holder;
    fleet.server().kill();
    fleet.instances[holder].signal(Signal::STOP);
    fleet.server().revive(None);
    wait_until("the other one has begun the job anew", GENEROUS, || {
        let job = shown(other);
        job["known"] == true && job["quarantined"] == false && job["running"][0].is_null()
    });
    let mut stream = get(&at[other], "/api/v1/events").stream();
    fleet.instances[holder].signal(Signal::CONT);
    fleet.wait_record("job", "lease_lost");
    let ended = stream.of_job("ended", "job");
    assert_eq!(ended.data["outcome"], "lease_lost");
    // Wherever it is asked for.
    let job = shown(other);
    assert_eq!(job["recent"][0]["outcome"], "lease_lost");
    assert_eq!(job["last"]["outcome"], "lease_lost");
    let status = fleet.json(&["status", "--json"]);
    assert_eq!(status["jobs"][0]["last"], job["last"]);
    let metrics = get(&at[other], "/metrics").send().text();
    let failed = "\nsoloist_job_last_run_failed{job=\"job\"} 1\n";
    assert!(metrics.contains(failed), "{metrics}");
}

/// What was planned while the store was away, and came back with nothing.
#[test]
fn what_a_loss_of_data_leaves_unknown_is_told_and_counted() {
    let mut fleet = fleet(1)
        .http("listen = \"unix:{id}.sock\"")
        .job("job", &format!("{JOB}\nlease = \"2s\""))
        .start();
    let at = fleet.http(0);
    let mut stream = get(&at, "/api/v1/events").stream();
    stream.of_job("ended", "job");
    fleet.server().kill();
    stream.wait("the store is gone", |e| {
        e.kind == "store" && e.data["reachable"] == false
    });
    std::thread::sleep(Duration::from_secs(2));
    fleet.server().revive(None);
    let told = stream.of_job("unknown", "job");
    assert_eq!(told.data["outcome"], "unknown", "{told:?}");
    let document = get(&at, "/api/v1/openapi.json").of(200);
    let kinds = &document["components"]["schemas"]["EventKind"]["enum"];
    assert!(
        kinds
            .as_array()
            .is_some_and(|all| all.contains(&"unknown".into()))
    );
    let records = fleet.history("job");
    let unknown = records.iter().filter(|r| r["outcome"] == "unknown");
    let count: u64 = unknown.map(|r| r["count"].as_u64().unwrap_or(1)).sum();
    assert!(count > 1, "{records:?}");
    let labels = "{outcome=\"unknown\",cause=\"state_loss\"}";
    let counted = format!("\nsoloist_not_run_total{labels} {count}\n");
    wait_until("its instance counts them", GENEROUS, || {
        get(&at, "/metrics").send().text().contains(&counted)
    });
}

/// The others do not wait until it says so itself: it has stopped.
#[test]
fn an_instance_is_undrained_as_soon_as_somebody_asks() {
    let fleet = fleet(2)
        .http("listen = \"unix:{id}.sock\"")
        .job("job", "command = \"true\"")
        .start();
    let at = fleet.http(0);
    let second = || get(&at, "/api/v1/instances").of(200)["instances"][1].clone();
    wait_until("both are there", GENEROUS, || !second().is_null());
    let mut stream = get(&at, "/api/v1/events").stream();
    super::client::post(&at, "/api/v1/instances/i2/drain", "{}").of(200);
    stream.wait("i2 drains", |e| e.kind == "draining");
    for _ in 0..3 {
        let seen = second()["last_seen"].clone();
        wait_until("another heartbeat", GENEROUS, || {
            second()["last_seen"] != seen
        });
    }
    fleet.instances[1].signal(Signal::STOP);
    super::client::post(&at, "/api/v1/instances/i2/undrain", "{}").of(200);
    stream.wait("i2 claims again", |e| {
        e.kind == "undrained" && e.data["instance"] == "i2"
    });
    assert_eq!(second()["draining"], false);
    fleet.instances[1].signal(Signal::CONT);
}

/// Its last heartbeat had the run, and is kept for a day.
#[test]
fn a_dead_instance_runs_nothing_once_its_runs_are_over() {
    let mut fleet = fleet(2)
        .http("listen = \"unix:{id}.sock\"")
        .job("job", "command = \"sleep 600\"\ngrace = \"100ms\"")
        .start();
    let at = fleet.http(0);
    let second = || get(&at, "/api/v1/instances").of(200)["instances"][1].clone();
    let running = || second()["running"][0]["job"].clone();
    wait_until("both are there, and the job is known", GENEROUS, || {
        let jobs = get(&at, "/api/v1/jobs").of(200);
        !second().is_null() && jobs["jobs"][0]["known"] == true
    });
    super::client::post(&at, "/api/v1/instances/i1/drain", "{}").of(200);
    super::client::post(&at, "/api/v1/jobs/job/trigger", "{}").of(202);
    wait_until("i2 runs it", GENEROUS, || running() == "job");
    fleet.instances[1].kill();
    fleet.wait_record("job", "crashed");
    wait_until("it runs nothing", GENEROUS, || running().is_null());
    let status = fleet.json(&["status", "--json"]);
    assert_eq!(second()["instance"], "i2");
    assert_eq!(status["instances"][1]["running"], serde_json::json!([]));
}

#[test]
fn an_instance_that_dies_is_told() {
    let mut fleet = fleet(2).http("").job("job", JOB).start();
    let at = fleet.http(0);
    wait_until("both are there", GENEROUS, || {
        get(&at, "/api/v1/instances").of(200)["instances"]
            .as_array()
            .is_some_and(|all| all.len() == 2)
    });
    let mut stream = get(&at, "/api/v1/events").stream();
    fleet.instances[1].kill();
    stream.wait("i2 is silent", |e| {
        e.kind == "instance_silent" && e.data["instance"] == "i2"
    });
    stream.wait("the instances", |e| {
        e.kind == "instances" && e.data["instances"][1]["silent"] == true
    });
    fleet.instances[1].start();
    stream.wait("i2 is up", |e| {
        e.kind == "instance_up" && e.data["instance"] == "i2"
    });
    fleet.instances[1].signal(Signal::TERM);
    stream.wait("i2 is gone", |e| {
        e.kind == "instance_gone" && e.data["instance"] == "i2"
    });
}
