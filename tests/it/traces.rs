//! Traces, with a real receiver: what a span of a run says, that the command's own spans belong to it, and that no run
//! waits for a receiver that hangs, refuses or is not there.

use std::{collections::BTreeSet, fs, time::Instant};

use serde_json::Value;

use crate::{
    http::client::get,
    notify::servers::{Hook, Mode},
    support::{
        GENEROUS,
        fleet::{Fleet, Plan, fleet},
        wait_for, wait_until,
    },
};

const PATH: &str = "v1/traces";

/// The spans that were taken, in order.
fn spans(hook: &Hook) -> Vec<Value> {
    let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let requests = hook.heard(PATH).into_iter();
    let resources = requests.flat_map(move |r| list(&r["resourceSpans"]));
    let scopes = resources.flat_map(move |r| list(&r["scopeSpans"]));
    scopes.flat_map(move |s| list(&s["spans"])).collect()
}

fn of_job(hook: &Hook, job: &str) -> Vec<Value> {
    let mut spans = spans(hook);
    spans.retain(|s| s["name"] == job);
    spans
}

#[track_caller]
fn wait_spans(hook: &Hook, job: &str, n: usize) -> Vec<Value> {
    wait_for(&format!("{n} spans of {job}"), GENEROUS, || {
        let spans = of_job(hook, job);
        (spans.len() >= n).then_some(spans)
    })
}

/// The value of an attribute, as text.
fn attribute(of: &Value, key: &str) -> Option<String> {
    let all = of["attributes"].as_array().expect("attributes");
    let found = all.iter().find(|a| a["key"] == key)?;
    let value = found["value"].as_object()?.values().next()?;
    Some(value.as_str().expect("text").to_owned())
}

#[track_caller]
fn has(span: &Value, expected: &[(&str, &str)]) {
    for (key, value) in expected {
        assert_eq!(
            attribute(span, key).as_deref(),
            Some(*value),
            "{key}: {span:#}"
        );
    }
}

/// All instances send to the receiver.
fn traced(size: usize, plan: Plan, hook: &Hook) -> Plan {
    (0..size).fold(plan, |plan, i| {
        plan.env(i, "OTEL_EXPORTER_OTLP_ENDPOINT", &hook.url(""))
    })
}

/// A number of `/metrics` of the first instance.
fn metric(fleet: &Fleet, name: &str) -> u64 {
    let text = get(&fleet.http(0), "/metrics").send().text();
    let line = text.lines().find_map(|l| l.strip_prefix(name));
    line.and_then(|l| l.trim().parse().ok())
        .unwrap_or_else(|| panic!("{name} is not in {text}"))
}

/// Waits until the jobs can be triggered.
#[track_caller]
fn wait_known(fleet: &Fleet) {
    wait_until("all jobs are known", GENEROUS, || {
        let status = fleet.json(&["status", "--json"]);
        let mut jobs = status["jobs"].as_array().expect("jobs").iter();
        jobs.all(|job| job["known"] == true)
    });
}

fn each_second(command: &str) -> String {
    format!("command = \"{command}\"\nschedule = \"@every 1s\"")
}

#[test]
fn a_run_is_a_span_of_which_its_command_knows() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Takes);
    let (seen, named) = (dir.path().join("seen"), dir.path().join("named"));
    let good = format!("env > {}", seen.display());
    let own = format!("echo $TRACEPARENT > {}", named.display());
    let mut fleet = traced(1, fleet(1).sqlite(), &hook)
        .env(0, "OTEL_EXPORTER_OTLP_HEADERS", "api-key=hunter%202")
        .env(0, "OTEL_SERVICE_NAME", "nightly")
        .env(
            0,
            "TRACEPARENT",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )
        .env(0, "TRACESTATE", "vendor=1")
        .job("good", &format!("command = \"{good}\""))
        .job("bad", "command = \"exit 3\"")
        .job("none", "command = [\"/there/is/none\"]")
        .job(
            "own",
            &format!("command = \"{own}\"\nenv = {{ TRACEPARENT = \"mine\" }}"),
        )
        .start();
    fleet.wait_log(0, "sending traces to 127.0.0.1:");
    wait_known(&fleet);
    fleet.said(&["trigger", "good", "--key", "k1", "--wait"]);
    fleet.said(&["trigger", "own", "--wait"]);
    assert_eq!(
        fleet.cli(&["trigger", "bad", "--wait"]).status.code(),
        Some(3)
    );
    assert!(!fleet.cli(&["trigger", "none", "--wait"]).status.success());
    // What waits is sent before the end.
    fleet.stop();
    let [good, bad, none, own] = ["good", "bad", "none", "own"].map(|job| {
        let mut all = of_job(&hook, job);
        assert_eq!(all.len(), 1, "{job}: {all:#?}");
        all.remove(0)
    });

    // The command's own spans become children of this one.
    let env = fs::read_to_string(&seen).expect("what the command saw");
    let text = |v: &Value| v.as_str().expect("text").to_owned();
    let (trace, span) = (text(&good["traceId"]), text(&good["spanId"]));
    let given: Vec<&str> = env.lines().filter(|l| l.starts_with("TRACE")).collect();
    assert_eq!(given, [format!("TRACEPARENT=00-{trace}-{span}-01")]);
    assert_eq!((trace.len(), span.len()), (32, 16));
    assert_eq!(fs::read_to_string(named).expect("its own"), "mine\n");

    let record = fleet.history("good").remove(0);
    let of = |key: &str| record[key].as_str().expect("text").to_owned();
    let token = record["fencing_token"].to_string();
    has(
        &good,
        &[
            ("soloist.job", "good"),
            ("soloist.occurrence", &of("occurrence")),
            ("soloist.trigger", "manual"),
            ("soloist.trigger.key", "k1"),
            ("soloist.run_id", &of("run_id")),
            ("soloist.instance", "i1"),
            ("soloist.attempt", "1"),
            ("soloist.fencing_token", &token),
            ("soloist.outcome", "succeeded"),
            ("process.exit.code", "0"),
        ],
    );
    assert_eq!(
        (&good["status"]["code"], attribute(&good, "error.type")),
        (&Value::Null, None)
    );
    let ns = |s: &Value, key: &str| {
        s[key]
            .as_str()
            .expect("text")
            .parse::<i64>()
            .expect("a number")
    };
    let (begin, end) = (ns(&good, "startTimeUnixNano"), ns(&good, "endTimeUnixNano"));
    assert!(0 < begin && begin <= end, "{good:#}");

    assert_eq!(bad["status"]["code"], 2);
    assert_eq!(bad["status"]["message"], "failed");
    has(
        &bad,
        &[("process.exit.code", "3"), ("error.type", "failed")],
    );
    let words = none["status"]["message"].as_str().expect("words");
    assert!(words.contains("/there/is/none"), "{words}");
    let traces: BTreeSet<String> = [&good, &bad, &none, &own]
        .map(|s| text(&s["traceId"]))
        .into();
    assert_eq!(traces.len(), 4);

    let resource = &hook.heard(PATH)[0]["resourceSpans"][0]["resource"];
    has(
        resource,
        &[
            ("service.name", "nightly"),
            ("service.instance.id", "i1"),
            ("soloist.namespace", "soloist"),
        ],
    );
    for headers in hook.headers() {
        let headers = headers.join("\n").to_ascii_lowercase();
        for line in ["api-key: hunter 2", "content-type: application/json"] {
            assert!(headers.contains(line), "{headers}");
        }
    }
    for said in [env, fleet.instances[0].log_text()] {
        assert!(!said.contains("hunter"), "{said}");
    }
}

#[test]
fn without_a_receiver_the_command_learns_that_nobody_keeps_its_parent() {
    let fleet = fleet(1)
        .sqlite()
        .job("a", "command = \"echo parent=$TRACEPARENT.\"")
        .start();
    wait_known(&fleet);
    let said = fleet.said(&["trigger", "a", "--wait"]);
    let (_, parent) = said.split_once("parent=").expect("what it saw");
    let parent: Vec<&str> = parent
        .split('.')
        .next()
        .unwrap_or_default()
        .split('-')
        .collect();
    let lengths: Vec<usize> = parent.iter().map(|part| part.len()).collect();
    assert_eq!(
        (lengths, parent[0], parent[3]),
        (vec![2, 32, 16, 2], "00", "00"),
        "{said}"
    );
    assert!(!fleet.instances[0].log_text().contains("traces"));
}

#[test]
fn the_span_of_a_run_whose_daemon_was_killed_is_sent_by_its_guard() {
    let hook = Hook::start(Mode::Takes);
    let dir = tempfile::tempdir().expect("a directory");
    let flag = dir.path().join("second");
    // Ends only in its second attempt.
    let command = format!(
        "test -e {0} || {{ echo $SOLOIST_INSTANCE > {0}; sleep 600; }}",
        flag.display()
    );
    let mut fleet = traced(2, fleet(2), &hook)
        .env(0, "OTEL_EXPORTER_OTLP_HEADERS", "api-key=a")
        .env(1, "OTEL_EXPORTER_OTLP_HEADERS", "api-key=a")
        .job(
            "a",
            &format!("command = \"{command}\"\non_crash = \"rerun\""),
        )
        .start();
    wait_known(&fleet);
    fleet.said(&["trigger", "a", "--key", "k"]);
    let holder = wait_for("a run", GENEROUS, || {
        let name = fs::read_to_string(&flag).ok()?;
        name.strip_suffix('\n').map(str::to_owned)
    });
    let at = fleet.index(&holder);
    fleet.instances[at].kill();
    wait_spans(&hook, "a", 2);
    fleet.stop();
    let mut all = of_job(&hook, "a");
    all.sort_by_key(|s| attribute(s, "soloist.attempt"));
    let [crashed, second] = &all[..] else {
        panic!("{all:#?}");
    };
    has(
        crashed,
        &[
            ("soloist.outcome", "crashed"),
            ("soloist.instance", &holder),
            ("soloist.trigger.key", "k"),
            ("error.type", "crashed"),
        ],
    );
    has(
        second,
        &[
            ("soloist.outcome", "succeeded"),
            ("soloist.trigger", "takeover"),
        ],
    );
    assert_eq!(crashed["traceId"], second["traceId"]);
    assert_ne!(second["spanId"], crashed["spanId"]);
    let known = |headers: &Vec<String>| headers.iter().any(|h| h == "api-key: a");
    assert!(hook.headers().iter().all(known), "{:#?}", hook.headers());
}

#[test]
fn no_run_and_no_stop_waits_for_a_receiver_that_hangs() {
    let hook = Hook::start(Mode::Hangs);
    let mut fleet = traced(1, fleet(1).sqlite(), &hook)
        .job("a", &each_second("true"))
        .start();
    wait_until("the receiver has a request", GENEROUS, || {
        !hook.paths().is_empty()
    });
    let before = fleet.history("a").len();
    wait_until("runs go on", GENEROUS, || {
        let runs = fleet.history("a");
        runs.len() >= before + 3 && runs.iter().all(|r| r["outcome"] == "succeeded")
    });
    let begun = Instant::now();
    fleet.stop();
    assert!(begun.elapsed() < GENEROUS, "{:?}", begun.elapsed());
    fleet.wait_log(0, "stopping without sending the last");
    assert_eq!(hook.paths().len(), 1);
}

#[test]
fn spans_are_sent_again_after_what_may_pass_and_only_then() {
    let modes = [
        Mode::Busy(1),
        Mode::Status(503),
        Mode::Status(500),
        Mode::Takes,
    ];
    let hook = Hook::start_with(&modes);
    let fleet = traced(1, fleet(1).sqlite(), &hook)
        .http("")
        .job("first", "command = \"true\"")
        .job("second", "command = \"true\"")
        .start();
    wait_known(&fleet);
    fleet.said(&["trigger", "first", "--wait"]);
    // Refused for good by the third answer.
    wait_until("three tries", GENEROUS, || hook.paths().len() >= 3);
    wait_until("it is counted", GENEROUS, || {
        metric(&fleet, "soloist_spans_total{result=\"refused\"}") == 1
    });
    fleet.said(&["trigger", "second", "--wait"]);
    wait_spans(&hook, "second", 1);
    wait_until("it is counted", GENEROUS, || {
        metric(&fleet, "soloist_spans_total{result=\"sent\"}") == 1
    });
    assert_eq!(hook.paths().len(), 4);
    assert_eq!(of_job(&hook, "first").len(), 0);
    let log = fleet.instances[0].log_text();
    for words in ["takes no traces", "429"] {
        assert!(log.contains(words), "{log}");
    }
}
