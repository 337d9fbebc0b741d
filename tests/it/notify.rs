//! Notifications and heartbeats, with real servers: what is told, once for the fleet, also when the notifier dies or a
//! channel does not work.

mod channels;
mod losses;
mod reloads;
pub(crate) mod servers;
mod undelivered;
mod wires;

use std::fs;

use serde_json::Value;

use self::servers::{Hook, Mode};
use crate::support::{
    GENEROUS,
    fleet::{LATE_RATHER_THAN_SKIPPED, Plan, fleet},
    now_ms, wait_until,
};

/// A job that fails as long as there is no file `ok`.
fn failing(dir: &std::path::Path, lines: &str) -> String {
    let ok = dir.join("ok");
    format!(
        "command = \"echo about to fail; test -e {}\"\nschedule = \"@every 1s\"\n{lines}\n",
        ok.display()
    )
}

fn channel(name: &str, hook: &Hook, lines: &str) -> String {
    let url = hook.url(name);
    format!("[notify.{name}]\ntype = \"webhook\"\nurl = \"{url}\"\n{lines}\n")
}

fn kinds(message: &Value) -> Vec<(&str, &str)> {
    let items = message["items"].as_array().expect("items");
    items
        .iter()
        .map(|i| {
            (
                i["job"].as_str().unwrap_or_default(),
                i["kind"].as_str().unwrap_or_default(),
            )
        })
        .collect()
}

fn told_once(plan: Plan) {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Takes);
    let fleet = plan
        .tables(&channel("ops", &hook, ""))
        .default("notify", "[\"ops\"]")
        .job("bad", &failing(dir.path(), "timezone = \"Asia/Shanghai\""))
        .job("good", "command = \"true\"\nschedule = \"@every 1s\"")
        .start();
    let first = hook.wait("ops", 1);
    assert_eq!(kinds(&first[0]), [("bad", "failed")]);
    let run = &first[0]["items"][0]["run"];
    assert_eq!(run["exit_code"], 1);
    assert_eq!(run["output"], "about to fail");
    assert!(
        run["local"].as_str().expect("a time").ends_with("+08:00"),
        "{run}"
    );
    let text = first[0]["text"].as_str().expect("text");
    for part in ["about to fail", "soloist logs bad ", "outcome: ", "next: "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // It goes on failing, which is told nobody again.
    let fails = |n: usize| {
        let runs = fleet.history("bad");
        runs.iter().filter(|r| r["outcome"] == "failed").count() >= n
    };
    wait_until("more failures", GENEROUS, || fails(5));
    fs::write(dir.path().join("ok"), "").expect("write");
    let both = hook.wait("ops", 2);
    assert_eq!(kinds(&both[1]), [("bad", "recovered")]);
    let text = both[1]["text"].as_str().expect("text");
    assert!(text.contains(" bad ends in a row\n"), "{text}");
    wait_until("more successes", GENEROUS, || {
        let runs = fleet.history("bad");
        runs.iter().filter(|r| r["outcome"] == "succeeded").count() >= 5
    });
    assert_eq!(hook.heard("ops").len(), 2, "{:#?}", hook.heard("ops"));
}

#[test]
fn a_failure_and_a_recovery_are_told_once_by_a_fleet_on_redis() {
    told_once(fleet(3));
}

#[test]
fn a_failure_and_a_recovery_are_told_once_by_a_fleet_on_sqlite() {
    told_once(fleet(1).sqlite());
}

/// The instance that sends is killed at `place`, once. Returns the messages that came until another has told the
/// failure, and then until the recovery.
fn killed_at(place: &str, wanted: usize) -> Vec<Value> {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Takes);
    let once = dir.path().join("once").display().to_string();
    let mut plan = fleet(3)
        .tables(&channel("ops", &hook, ""))
        .default("notify", "[\"ops\"]")
        .job("bad", &failing(dir.path(), ""));
    for i in 0..3 {
        plan = plan
            .env(i, "SOLOIST_FAILPOINT", place)
            .env(i, "SOLOIST_FAILPOINT_ONCE", &once);
    }
    let mut fleet = plan.start();
    wait_until("the notifier is killed", GENEROUS, || {
        fleet.instances.iter_mut().any(|i| i.ended().is_some())
    });
    hook.wait("ops", wanted);
    fs::write(dir.path().join("ok"), "").expect("write");
    let recovered = |m: &Value| kinds(m).contains(&("bad", "recovered"));
    wait_until("that it recovered is told", GENEROUS, || {
        hook.heard("ops").iter().any(recovered)
    });
    hook.heard("ops")
}

#[test]
fn a_message_that_was_claimed_by_a_notifier_that_died_is_sent_by_another() {
    let heard = killed_at("notify_claimed", 1);
    assert_eq!(heard.len(), 2, "{heard:#?}");
    assert_eq!(heard[0]["perhaps_sent"], true);
    let text = heard[0]["text"].as_str().expect("text");
    assert!(text.starts_with("This may be a repetition"), "{text}");
    assert_eq!(heard[1]["perhaps_sent"], false);
}

#[test]
fn a_message_that_was_sent_by_a_notifier_that_died_comes_again_and_says_so() {
    let heard = killed_at("notify_sent", 2);
    assert_eq!(heard.len(), 3, "{heard:#?}");
    assert_eq!(heard[0]["id"], heard[1]["id"]);
    assert_eq!(
        (&heard[0]["perhaps_sent"], &heard[1]["perhaps_sent"]),
        (&false.into(), &true.into())
    );
}

/// Only what comes to its end more than ten seconds after the first may be in another message.
#[test]
fn a_thousand_jobs_that_fail_at_once_are_one_message_for_each_channel() {
    const JOBS: u64 = 1000;
    let hook = Hook::start(Mode::Takes);
    let channels = channel("ops", &hook, "") + &channel("two", &hook, "");
    let mut plan = fleet(2)
        .tables(&channels)
        .default("notify", "[\"ops\", \"two\"]")
        .alone()
        .default("output", "{ log = false }");
    for n in 0..JOBS {
        let job = "command = [\"false\"]\nschedule = \"@at {soon}\"";
        plan = plan.job(&format!("j{n}"), job);
    }
    let fleet = plan.start();
    let told = |name: &str| hook.heard(name).iter().map(told_in).sum::<u64>();
    wait_until("all jobs are told", GENEROUS * 3, || {
        told("ops") >= JOBS && told("two") >= JOBS
    });
    let all_told = now_ms();
    let runs = fleet.json(&["history", "--json", "-n", "1000"]);
    let runs = runs.as_array().expect("runs").iter();
    let took = all_told
        - runs
            .map(|r| millis(&r["finished_at"]))
            .min()
            .expect("an end");
    let most = 1 + usize::try_from(took / 8_000).expect("a short time");
    for name in ["ops", "two"] {
        let heard = hook.heard(name);
        assert_eq!(told(name), JOBS, "each job once");
        assert!(heard.len() <= most, "{took} ms: {} messages", heard.len());
        let first = heard[0]["title"].as_str().expect("a title");
        let jobs = format!("{} jobs", told_in(&heard[0]));
        assert!(first.replace(',', "").starts_with(&jobs), "{first}");
    }
}

/// The time of an instant as JSON has it, Unix ms.
fn millis(t: &Value) -> i64 {
    let t: jiff::Timestamp = t.as_str().expect("a time").parse().expect("a time");
    t.as_millisecond()
}

/// Fails and succeeds in turn, each second.
#[test]
fn a_job_that_changes_each_second_is_told_six_times_an_hour() {
    let hook = Hook::start(Mode::Takes);
    let turns =
        "command = \"exit $((SOLOIST_OCCURRENCE_MS / 1000 % 2))\"\nschedule = \"* * * * * *\"\n";
    let fleet = fleet(2)
        .tables(&channel("ops", &hook, ""))
        .default("notify", "[\"ops\"]")
        .job("flaps", &format!("{turns}{LATE_RATHER_THAN_SKIPPED}"))
        .start();
    let told = || hook.heard("ops").iter().map(told_in).sum::<u64>();
    wait_until("six changes are told", GENEROUS, || told() == 6);
    let last = hook.heard("ops").pop().expect("a message");
    let text = last["text"].as_str().expect("text").to_owned();
    assert!(
        text.contains("quiet:       no further change is told before"),
        "{text}"
    );
    let before = fleet.history("flaps").len();
    wait_until("it goes on changing", GENEROUS, || {
        fleet.history("flaps").len() >= before + 8
    });
    assert_eq!(told(), 6, "{:#?}", hook.heard("ops"));
}

fn told_in(message: &Value) -> u64 {
    let items = message["items"].as_array().expect("items").len() as u64;
    items + message["more"].as_u64().expect("a number")
}

#[test]
fn an_attempt_that_another_one_follows_is_told_nobody() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Takes);
    let flaky = dir.path().join("flaky");
    // Its first attempt fails, its second succeeds.
    let lines = format!(
        "command = \"test $SOLOIST_ATTEMPT = 2 || test -e {}\"\nschedule = \"@every 2s\"\n\
         retry = {{ attempts = 1, interval = \"100ms\" }}",
        flaky.display()
    );
    let never = "command = \"false\"\nschedule = \"@every 2s\"\nretry = { attempts = 1, interval = \"100ms\" }";
    let fleet = fleet(1)
        .tables(&channel("ops", &hook, ""))
        .default("notify", "[\"ops\"]")
        .job("flaky", &lines)
        .job("never", never)
        .start();
    let heard = hook.wait("ops", 1);
    assert_eq!(kinds(&heard[0]), [("never", "failed")]);
    assert_eq!(heard[0]["items"][0]["run"]["attempt"], 2);
    wait_until("second attempts", GENEROUS, || {
        let runs = fleet.history("flaky");
        runs.iter().filter(|r| r["outcome"] == "succeeded").count() >= 3
    });
    assert_eq!(hook.heard("ops").len(), 1, "{:#?}", hook.heard("ops"));
}

#[test]
fn a_job_without_a_success_for_too_long_is_told_also_if_nothing_runs_it() {
    let hook = Hook::start(Mode::Takes);
    let fleet = fleet(2)
        .tables(&channel("ops", &hook, ""))
        .default("notify", "[\"ops\"]")
        .job("idle", "command = \"true\"\nexpect_success_within = \"3s\"")
        .start();
    let heard = hook.wait("ops", 1);
    assert_eq!(kinds(&heard[0]), [("idle", "overdue")]);
    fleet.said(&["trigger", "idle"]);
    let heard = hook.wait("ops", 2);
    assert_eq!(kinds(&heard[1])[0], ("idle", "recovered"));
}

#[test]
fn heartbeats_say_when_a_run_starts_and_how_it_ends() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Takes);
    let url = hook.url("beat/{job}");
    let _fleet = fleet(1)
        .default("heartbeat_url", &format!("\"{url}?x=1\""))
        .job("bad", "command = \"exit 3\"\nschedule = \"@every 1s\"")
        .job("good", &failing(dir.path(), "").replace("test -e", "true"))
        .start();
    wait_until("each has come", GENEROUS, || {
        let paths = hook.paths();
        let came = |path: &str| paths.iter().any(|p| p == path);
        [
            "/beat/bad/start?x=1",
            "/beat/bad/3?x=1",
            "/beat/good/start?x=1",
            "/beat/good?x=1",
        ]
        .iter()
        .all(|path| came(path))
    });
    let paths = hook.paths();
    let of_bad: Vec<&String> = paths.iter().filter(|p| p.contains("bad")).collect();
    assert!(of_bad[0].contains("start"), "{paths:?}");
}

/// A service that watches a job would wake people for an attempt that is tried again.
#[test]
fn a_heartbeat_says_only_how_the_last_attempt_ended() {
    let hook = Hook::start(Mode::Takes);
    let url = hook.url("beat");
    let fleet = fleet(1)
        .default("heartbeat_url", &format!("\"{url}\""))
        .job(
            "bad",
            "command = \"exit $SOLOIST_ATTEMPT\"\nschedule = \"@at {soon}\"\n\
             retry = { attempts = 2, interval = \"100ms\" }",
        )
        .start();
    let heard = |path: &str| hook.paths().iter().filter(|p| *p == path).count();
    wait_until("the last attempt has ended", GENEROUS, || {
        heard("/beat/3") > 0
    });
    assert_eq!(fleet.history("bad").len(), 3);
    assert_eq!(hook.paths().last().map(String::as_str), Some("/beat/3"));
    assert_eq!((heard("/beat/start"), hook.paths().len()), (3, 4));
}

/// The service would tell its people that the run never ended.
#[test]
fn heartbeats_tell_how_a_run_ended_that_the_end_of_its_instance_ended() {
    let hook = Hook::start(Mode::Takes);
    let url = hook.url("beat");
    // A start that is ended before its command was executed is tried again.
    let began = tempfile::NamedTempFile::new().expect("a file");
    let command = format!(
        "command = \"echo > {}; while :; do sleep 1; done\"\ngrace = \"1s\"",
        began.path().display()
    );
    let mut fleet = fleet(1)
        .drain("0s")
        .default("heartbeat_url", &format!("\"{url}\""))
        .job("long", &format!("{command}\nschedule = \"@at {{soon}}\""))
        .start();
    wait_until("its start is told", GENEROUS, || {
        hook.paths().len() == 1 && std::fs::metadata(began.path()).is_ok_and(|m| m.len() > 0)
    });
    fleet.instances[0].signal(rustix::process::Signal::TERM);
    fleet.instances[0].wait_end();
    assert_eq!(hook.paths(), ["/beat/start", "/beat/fail"]);
}

/// A message that a run was late names the one thing that it waited for longest.
#[test]
fn a_late_start_has_its_reason() {
    let hook = Hook::start(Mode::Takes);
    let lines = "on = [\"late\"]\nlate_after = \"1s\"";
    let _fleet = fleet(1)
        .limits("max_parallel = 1")
        .tables(&channel("ops", &hook, lines))
        .job("long", "command = \"sleep 4\"\nschedule = \"@at {soon}\"")
        .job(
            "late",
            "notify = [\"ops\"]\ncommand = \"true\"\nschedule = \"@at {later}\"",
        )
        .start();
    let heard = hook.wait("ops", 1);
    assert_eq!(kinds(&heard[0]), [("late", "late")]);
    assert_eq!(heard[0]["items"][0]["run"]["waited_for"], "slot");
    let text = heard[0]["text"].as_str().expect("text");
    let why = text.lines().find(|l| l.starts_with("why:"));
    let why = why.expect("a reason");
    assert!(
        why.contains("for a free slot") && !why.contains("store"),
        "{why}"
    );
}

/// Secrets of channels are shown nowhere.
#[test]
fn no_secret_of_a_channel_is_shown() {
    let hook = Hook::start(Mode::Status(500));
    let url = hook.url("hunter2secret");
    let tables = format!("[notify.ops]\ntype = \"slack\"\nurl = \"{url}\"\n");
    let fleet = fleet(1)
        .tables(&tables)
        .default("notify", "[\"ops\"]")
        .job("bad", "command = \"false\"\nschedule = \"@every 1s\"")
        .start();
    fleet.wait_log(0, "cannot send a notification");
    let out = fleet.cli(&["notify", "test", "ops"]);
    assert_eq!(out.status.code(), Some(75), "{out:?}");
    let shown = [
        String::from_utf8_lossy(&out.stderr).into_owned(),
        fleet.said(&["check"]),
        fleet.said(&["status"]),
        fleet.instances[0].log_text(),
    ];
    for text in shown {
        assert!(!text.contains("hunter2secret"), "{text}");
    }
}
