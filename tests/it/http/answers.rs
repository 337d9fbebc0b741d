//! What the API answers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{
    client::{Event, get, post},
    schema::wrong,
};
use crate::support::{
    GENEROUS,
    fleet::{Fleet, fleet},
    wait_for, wait_until,
};

/// A fleet whose jobs have run, failed and been paused.
fn busy() -> Fleet {
    let fleet = fleet(1)
        .sqlite()
        .http("listen = \"unix:{id}.sock\"\npublic_url = \"https://soloist.example.org/x/\"")
        .job("each", "schedule = \"* * * * * *\"\ncommand = \"echo hello\"\ntags = [\"a\", \"b\"]\ndescription = \"Says it\"")
        .job("fails", "schedule = \"* * * * * *\"\ncommand = \"exit 3\"\nretry = { attempts = 1, interval = \"1h\" }")
        .job("hourly", "schedule = \"0 * * * *\"\ncommand = \"true\"\ntimezone = \"Europe/Berlin\"\ntags = [\"a\"]")
        .job("long", "command = \"echo begun; sleep 600\"\ngrace = \"100ms\"\nlease = \"1m\"")
        .start();
    let at = fleet.http(0);
    wait_until("each job is known", GENEROUS, || {
        let jobs = get(&at, "/api/v1/jobs").of(200);
        jobs["jobs"]
            .as_array()
            .is_some_and(|all| all.iter().all(|j| j["known"] == true))
    });
    post(&at, "/api/v1/jobs/long/trigger", "{}").of(202);
    wait_until("a run, a failure, and one that is active", GENEROUS, || {
        let jobs = get(&at, "/api/v1/jobs").of(200);
        let ran = |n: usize| {
            jobs["jobs"][n]["recent"]
                .as_array()
                .is_some_and(|r| !r.is_empty())
        };
        let active = jobs["jobs"][3]["running"]
            .as_array()
            .is_some_and(|r| !r.is_empty());
        ran(0) && ran(1) && active
    });
    post(
        &at,
        "/api/v1/jobs/hourly/pause",
        r#"{"until": "2h", "reason": "moving"}"#,
    )
    .of(200);
    fleet
}

/// The first attempt fails at once; the second waits three seconds for its turn, and then for the test.
#[test]
fn a_retry_is_late_only_from_when_it_was_due() {
    let fleet = fleet(1)
        .sqlite()
        .http("listen = \"unix:{id}.sock\"")
        .job(
            "again",
            "command = 'test $SOLOIST_ATTEMPT -gt 1 || exit 1; until test -e go; do sleep 0.02; done'\n\
            retry = { attempts = 1, interval = \"3s\" }",
        )
        .start();
    let at = fleet.http(0);
    wait_until("the job is known", GENEROUS, || {
        get(&at, "/api/v1/jobs").of(200)["jobs"][0]["known"] == true
    });
    post(&at, "/api/v1/jobs/again/trigger", "{}").of(202);
    let second = |all: &Value| {
        let all = all.as_array()?.iter();
        all.clone().find(|r| r["attempt"] == 2).cloned()
    };
    let running = wait_for("the second attempt", GENEROUS, || {
        second(&fleet.json(&["status", "--json"])["jobs"][0]["running"])
    });
    let instant = crate::support::fleet::occurrence_ms(&running);
    let late = |what: &str, run: &Value| {
        let ms = run["lateness_ms"].as_i64();
        assert!(
            ms.is_some_and(|ms| (0..2500).contains(&ms)),
            "{what}: {run}"
        );
        ms
    };
    let granted = time(&running["started_at"]);
    assert!(granted - instant >= 3000, "{running}");
    // Only its instance knows when it was started.
    let unknown =
        |what: &str, run: &Value| assert_eq!(run["lateness_ms"], Value::Null, "{what}: {run}");
    unknown("status", &running);
    let of_board = wait_for("the board knows it", GENEROUS, || {
        second(&get(&at, "/api/v1/jobs").of(200)["jobs"][0]["running"])
    });
    unknown("the board", &of_board);
    unknown(
        "active runs",
        &second(&get(&at, "/api/v1/jobs/again/runs").of(200)["runs"]).expect("it"),
    );
    let why = get(&at, &format!("/api/v1/jobs/again/why/{instant}")).of(200);
    unknown("why", &second(&why["runs"]).expect("it"));
    std::fs::write(fleet.file("go"), "").expect("a file");
    fleet.wait_record("again", "succeeded");
    let recent = wait_for("its mark", GENEROUS, || {
        second(&get(&at, "/api/v1/jobs").of(200)["jobs"][0]["recent"])
    });
    let ms = late("recent", &recent);
    let id = recent["run_id"].as_str().expect("a run");
    for (what, run) in [
        (
            "history",
            second(&fleet.json(&["history", "again", "--json"])),
        ),
        (
            "runs",
            second(&get(&at, "/api/v1/jobs/again/runs").of(200)["runs"]),
        ),
        (
            "all runs",
            second(&get(&at, "/api/v1/runs").of(200)["runs"]),
        ),
        (
            "a run",
            Some(get(&at, &format!("/api/v1/runs/{id}?job=again")).of(200)),
        ),
    ] {
        assert_eq!(late(what, &run.expect(what)), ms, "{what}");
    }
    let stats = get(&at, "/api/v1/jobs/again").of(200);
    assert!(
        stats["stats"]["lateness_p95_ms"].as_i64() < Some(2500),
        "{stats}"
    );
}

/// As `notify` and the page judge: what a person, or a newer occurrence, ends is no failure.
#[test]
fn a_run_that_was_ended_on_purpose_has_not_failed() {
    let fleet = fleet(1)
        .sqlite()
        .http("listen = \"unix:{id}.sock\"")
        .job("fails", "command = \"exit 3\"")
        .job("long", "command = \"sleep 600\"\ngrace = \"100ms\"")
        .job(
            "newest",
            "command = \"sleep 600\"\ngrace = \"100ms\"\noverlap = \"replace\"",
        )
        .start();
    let at = fleet.http(0);
    let jobs = || get(&at, "/api/v1/jobs").of(200)["jobs"].clone();
    wait_until("the jobs are known", GENEROUS, || {
        let jobs = jobs();
        jobs.as_array()
            .is_some_and(|all| all.iter().all(|j| j["known"] == true))
    });
    let trigger = |job: &str| post(&at, &format!("/api/v1/jobs/{job}/trigger"), "{}").of(202);
    let runs = |n: usize| !jobs()[n]["running"][0].is_null();
    let ended = |n: usize, outcome: &str| {
        wait_until(outcome, GENEROUS, || {
            jobs()[n]["last"]["outcome"] == outcome
        });
    };
    trigger("fails");
    trigger("long");
    trigger("newest");
    wait_until("both run", GENEROUS, || runs(1) && runs(2));
    post(&at, "/api/v1/jobs/long/cancel", "{}").of(200);
    trigger("newest");
    ended(0, "failed");
    ended(1, "cancelled");
    ended(2, "replaced");
    let metrics = get(&at, "/metrics").send().text();
    let status = fleet.json(&["status", "--json"]);
    for (n, (job, failed)) in [("fails", 1), ("long", 0), ("newest", 0)]
        .iter()
        .enumerate()
    {
        for name in ["job_last_run_failed", "job_needs_attention"] {
            let line = format!("\nsoloist_{name}{{job=\"{job}\"}} {failed}\n");
            assert!(metrics.contains(&line), "{line}{metrics}");
        }
        let why = if *failed == 1 {
            "failed".into()
        } else {
            serde_json::Value::Null
        };
        for of in [&status["jobs"], &jobs()] {
            assert_eq!(of[n]["attention"], why, "{of}");
        }
    }
}

/// From its start, not from its grant, which is a little earlier.
#[test]
fn a_run_has_one_start_and_one_duration_wherever_it_is_shown() {
    let fleet = fleet(1)
        .http("listen = \"unix:{id}.sock\"")
        .job("never", "command = [\"/no/such/program\"]")
        .job("runs", "command = \"true\"")
        .start();
    let at = fleet.http(0);
    let jobs = || get(&at, "/api/v1/jobs").of(200)["jobs"].clone();
    wait_until("the jobs are known", GENEROUS, || {
        (0..2).all(|n| jobs()[n]["known"] == true)
    });
    for (n, name) in ["never", "runs"].into_iter().enumerate() {
        post(&at, &format!("/api/v1/jobs/{name}/trigger"), "{}").of(202);
        wait_until("it ended", GENEROUS, || {
            let job = jobs()[n].clone();
            !job["last"].is_null() && !job["recent"][0].is_null()
        });
        let job = jobs()[n].clone();
        let status = fleet.json(&["status", "--json"])["jobs"][n]["last"].clone();
        let history = fleet.json(&["history", name, "--json"])[0].clone();
        let times = |run: &Value| (run["started_at"].clone(), run["duration_ms"].clone());
        let recent = times(&job["recent"][0]);
        assert_eq!(recent.0.is_null(), name == "never", "{job}");
        for run in [&job["last"], &status, &history] {
            assert_eq!(times(run), recent, "{run}");
        }
    }
}

/// Unix ms.
fn time(text: &Value) -> i64 {
    let at: jiff::Timestamp = text.as_str().expect("a time").parse().expect("RFC 3339");
    at.as_millisecond()
}

/// The schema of the answer with this status.
fn described<'d>(document: &'d Value, path: &str, method: &str, status: &str) -> &'d Value {
    let operation = &document["paths"][path][method];
    assert!(
        operation.is_object(),
        "{method} {path} is not in the document"
    );
    let answers = &operation["responses"];
    let answer = if answers[status].is_null() {
        &answers["default"]
    } else {
        &answers[status]
    };
    let kinds = answer["content"]
        .as_object()
        .unwrap_or_else(|| panic!("{path} {status}: {answer}"));
    let json = kinds.iter().find(|(kind, _)| kind.ends_with("json"));
    json.map_or(&Value::Null, |(_, content)| &content["schema"])
}

#[test]
fn each_answer_is_as_the_document_of_the_api_describes_it() {
    let fleet = busy();
    let at = fleet.http(0);
    let document = get(&at, "/api/v1/openapi.json").of(200);
    let run = get(&at, "/api/v1/jobs/each/runs?limit=1&outcome=succeeded").of(200);
    let run = run["runs"][0]["run_id"].as_str().expect("a run").to_owned();
    let cursor = get(&at, "/api/v1/events").of(200);
    let cursor = cursor["cursor"].as_str().expect("a cursor").to_owned();
    // The path in the document, and a path to ask for.
    let reads = [
        ("/healthz", "/healthz".to_owned()),
        ("/readyz", "/readyz".to_owned()),
        ("/api/v1/session", "/api/v1/session".to_owned()),
        ("/api/v1/jobs", "/api/v1/jobs?tag=a&q=SAYS".to_owned()),
        ("/api/v1/jobs", "/api/v1/jobs".to_owned()),
        ("/api/v1/jobs/{job}", "/api/v1/jobs/each".to_owned()),
        ("/api/v1/jobs/{job}", "/api/v1/jobs/hourly".to_owned()),
        ("/api/v1/jobs/{job}", "/api/v1/jobs/fails".to_owned()),
        (
            "/api/v1/jobs/{job}/runs",
            "/api/v1/jobs/fails/runs?outcome=failed,running".to_owned(),
        ),
        (
            "/api/v1/jobs/{job}/runs",
            "/api/v1/jobs/long/runs".to_owned(),
        ),
        (
            "/api/v1/jobs/{job}/why/{occurrence}",
            "/api/v1/jobs/each/why/latest".to_owned(),
        ),
        ("/api/v1/jobs/{job}/why", "/api/v1/jobs/each/why".to_owned()),
        (
            "/api/v1/jobs/{job}/why/{occurrence}",
            "/api/v1/jobs/hourly/why/2026-01-01T00:00:00Z".to_owned(),
        ),
        (
            "/api/v1/runs",
            "/api/v1/runs?job=each&job=fails&limit=5".to_owned(),
        ),
        (
            "/api/v1/runs",
            "/api/v1/runs?from=2026-01-01T00:00:00Z".to_owned(),
        ),
        ("/api/v1/runs/{id}", format!("/api/v1/runs/{run}?job=each")),
        (
            "/api/v1/runs/{id}/output",
            format!("/api/v1/runs/{run}/output?job=each&from=0"),
        ),
        ("/api/v1/instances", "/api/v1/instances".to_owned()),
        ("/api/v1/events", format!("/api/v1/events?since={cursor}")),
        (
            "/api/v1/events",
            "/api/v1/events?since=of.another".to_owned(),
        ),
        ("/api/v1/plan", "/api/v1/plan?limit=3".to_owned()),
        ("/api/v1/load", "/api/v1/load?day=2026-11-25".to_owned()),
        ("/api/v1/openapi.json", "/api/v1/openapi.json".to_owned()),
        ("/calendar.ics", "/calendar.ics".to_owned()),
        (
            "/api/v1/jobs/{job}/calendar.ics",
            "/api/v1/jobs/hourly/calendar.ics".to_owned(),
        ),
        ("/metrics", "/metrics".to_owned()),
    ];
    let mut asked: BTreeSet<(&str, &str)> = BTreeSet::new();
    for (path, ask) in &reads {
        asked.insert((path, "get"));
        let reply = get(&at, ask).send();
        assert_eq!(reply.status, 200, "{ask}: {}", reply.text());
        let kind = reply.header("content-type").unwrap_or_default().to_owned();
        let kinds = document["paths"][*path]["get"]["responses"]["200"]["content"].as_object();
        let kinds = kinds.unwrap_or_else(|| panic!("{path} has no content"));
        assert!(
            kinds.keys().any(|k| kind.starts_with(k.as_str())),
            "{ask}: {kind} is none of {kinds:?}"
        );
        let schema = described(&document, path, "get", "200");
        if kind == "application/json" && !schema.is_null() {
            assert_eq!(wrong(&document, schema, &reply.json()), [""; 0], "{ask}");
        }
    }
    let writes = [
        (
            "/api/v1/jobs/{job}/trigger",
            "/api/v1/jobs/each/trigger",
            r#"{"key": "k"}"#,
            202,
        ),
        (
            "/api/v1/jobs/{job}/pause",
            "/api/v1/jobs/each/pause",
            "{}",
            200,
        ),
        (
            "/api/v1/jobs/{job}/resume",
            "/api/v1/jobs/each/resume",
            "",
            200,
        ),
        (
            "/api/v1/jobs/{job}/skip",
            "/api/v1/jobs/each/skip",
            r#"{"n": 0}"#,
            200,
        ),
        (
            "/api/v1/jobs/{job}/cancel",
            "/api/v1/jobs/long/cancel",
            "{}",
            200,
        ),
        (
            "/api/v1/instances/{instance}/drain",
            "/api/v1/instances/i1/drain",
            "{}",
            200,
        ),
        (
            "/api/v1/instances/{instance}/undrain",
            "/api/v1/instances/i1/undrain",
            "{}",
            200,
        ),
    ];
    for (path, ask, body, status) in writes {
        asked.insert((path, "post"));
        let answer = post(&at, ask, body).of(status);
        let schema = described(&document, path, "post", &status.to_string());
        assert_eq!(wrong(&document, schema, &answer), [""; 0], "{ask}");
    }
    // Nothing is described that was not asked for, and no two operations have one name: OpenAPI demands that, and
    // programs that make a client of the document name its functions so.
    let all = document["paths"].as_object().expect("paths");
    let mut names = BTreeMap::new();
    for (path, operations) in all {
        for (method, operation) in operations.as_object().expect("operations") {
            assert!(
                asked.contains(&(path.as_str(), method.as_str())),
                "{method} {path} was not asked for"
            );
            // Whoever has no token learns that as described, too.
            let answers = &operation["responses"];
            let security = operation["security"].as_array();
            let open = security.is_some_and(|all| all.contains(&serde_json::json!({})));
            assert!(
                open || !answers["default"].is_null(),
                "{path} describes no 401"
            );
            let name = operation["operationId"].as_str().expect("a name");
            let other = names.insert(name, path);
            assert_eq!(other, None, "{path} is named {name}, too");
        }
    }
    // Nor anything else answered: the problems are described, too.
    for (path, ask, status) in [
        ("/api/v1/jobs/{job}", "/api/v1/jobs/eac", 404),
        ("/api/v1/jobs", "/api/v1/jobs?tags=a", 400),
        ("/api/v1/jobs", "/api/v1/jobs?recent=25", 400),
        ("/api/v1/jobs", "/api/v1/jobs?recent=", 400),
        (
            "/api/v1/jobs/{job}/runs",
            "/api/v1/jobs/each/runs?limit=0",
            400,
        ),
        (
            "/api/v1/jobs/{job}/runs",
            "/api/v1/jobs/each/runs?limit=1&limit=2",
            400,
        ),
        ("/api/v1/load", "/api/v1/load?tz=UTC&tz=UTC", 400),
        (
            "/api/v1/jobs/{job}/runs",
            "/api/v1/jobs/each/runs?cursor=x",
            400,
        ),
        (
            "/api/v1/jobs/{job}/runs",
            "/api/v1/jobs/each/runs?outcome=good",
            400,
        ),
        ("/api/v1/runs/{id}", "/api/v1/runs/x?job=each", 400),
        (
            "/api/v1/runs/{id}",
            "/api/v1/runs/01a2123f-f07e-7516-b19b-9071aae62be9?job=each",
            404,
        ),
        (
            "/api/v1/runs/{id}",
            "/api/v1/runs/01a2123f-f07e-7516-b19b-9071aae62be9",
            400,
        ),
        ("/api/v1/runs", "/api/v1/runs?from=2&to=1", 400),
        (
            "/api/v1/jobs/{job}/runs",
            "/api/v1/jobs/each/runs?from=2&to=1",
            400,
        ),
        ("/api/v1/plan", "/api/v1/plan?from=noon", 400),
        ("/api/v1/load", "/api/v1/load?day=2026-02-30", 400),
    ] {
        let answer = get(&at, ask).of(status);
        let schema = described(&document, path, "get", &status.to_string());
        assert_eq!(wrong(&document, schema, &answer), [""; 0], "{ask}");
    }
    // The document and the handlers agree on what must be there.
    for (path, ask, ..) in writes {
        let body = &document["paths"][path]["post"]["requestBody"];
        assert_eq!(body["required"], true, "{path}: {body}");
        let problem = get(&at, ask).method("POST").of(415);
        let schema = described(&document, path, "post", "415");
        assert_eq!(wrong(&document, schema, &problem), [""; 0], "{ask}");
    }
    bodies_are_bounded(&at);
    let wrong = post(&at, "/api/v1/jobs/each/skip", r#"{"n": "two"}"#).of(400);
    assert_eq!(
        wrong["detail"],
        "`n` must be a whole number from 0 to 4294967295"
    );
    let near = get(&at, "/api/v1/jobs/eac").of(404);
    assert_eq!(near["hint"], "did you mean `each`?");
    assert_eq!(get(&at, "/no/such/thing").of(404)["status"], 404);
    assert_eq!(post(&at, "/api/v1/jobs", "{}").of(405)["status"], 405);
}

fn bodies_are_bounded(at: &str) {
    let long = |n: usize| serde_json::json!("ä".repeat(n));
    let bodies = [
        ("trigger", "key", long(200), 202),
        ("trigger", "key", long(201), 400),
        ("pause", "reason", long(1000), 200),
        ("pause", "reason", long(1001), 400),
        ("skip", "n", serde_json::json!(0), 200),
        ("resume", "n", serde_json::json!(0), 400),
    ];
    for (act, field, value, status) in bodies {
        let path = format!("/api/v1/jobs/each/{act}");
        let body = serde_json::json!({field: value});
        post(at, &path, &body.to_string()).of(status);
    }
    for key in ["~mine", "a\\u0007b", "\\u0085"] {
        let body = format!("{{\"key\": \"{key}\"}}");
        post(at, "/api/v1/jobs/each/trigger", &body).of(400);
    }
    get(at, "/api/v1/events?since=").of(400);
    // Whoever has no schedule cannot skip.
    post(at, "/api/v1/jobs/long/skip", "{}").of(409);
    for instant in ["-62135596800001", "253402207200001"] {
        get(at, &format!("/api/v1/plan?from={instant}")).of(400);
    }
    let east = get(at, "/api/v1/plan?from=2026-11-26T11:00:00+01:00").of(400);
    let hint = east["hint"].as_str().unwrap_or_default();
    assert!(hint.contains("%2B"), "{east}");
    get(at, "/api/v1/plan?from=2026-11-26T11:00:00%2B01:00").of(200);
    for instant in [
        "-62135596800000",
        "-1",
        "253402207200000",
        "2026-11-26T11:00:00.5-01:00",
    ] {
        for ask in [
            "plan?limit=1&to=",
            "jobs/each/runs?from=",
            "runs?to=",
            "jobs/each/why/",
        ] {
            get(at, &format!("/api/v1/{ask}{instant}")).of(200);
        }
    }
}

#[test]
fn what_is_shown_is_what_the_commands_show() {
    let fleet = busy();
    let at = fleet.http(0);
    let status = fleet.json(&["status", "--json"]);
    let steady = |j: &Value| {
        [
            "job",
            "description",
            "tags",
            "schedule",
            "timezone",
            "enabled",
            "known",
            "paused",
            "skip",
        ]
        .map(|k| j[k].clone())
    };
    let of = |v: &Value| {
        v["jobs"]
            .as_array()
            .expect("jobs")
            .iter()
            .map(steady)
            .collect::<Vec<_>>()
    };
    // What was changed over the store a moment ago is shown a moment later.
    wait_until("what the commands show", GENEROUS, || {
        of(&get(&at, "/api/v1/jobs").of(200)) == of(&status)
    });
    let jobs = get(&at, "/api/v1/jobs").of(200);
    assert_eq!(jobs["config"], status["config"]);
    let hourly = get(&at, "/api/v1/jobs/hourly").of(200);
    assert_eq!(hourly["schedule_words"], "every hour at minute 0");
    assert_eq!(hourly["upcoming"].as_array().map(Vec::len), Some(5));
    let next = fleet.json(&["next", "hourly", "-n", "5", "--json"]);
    // It is paused for two hours: what comes next is what runs after that.
    let until = hourly["paused"]["until"].as_str().expect("an end");
    let all = next.as_array().expect("occurrences");
    let runs = all.iter().map(|n| &n["occurrence"]);
    let first = runs
        .clone()
        .find(|at| at.as_str() >= Some(until))
        .expect("one");
    assert_eq!(
        (&hourly["next"], &hourly["upcoming"][0]["at"]),
        (first, first)
    );
    let passed = serde_json::json!({ "occurrence": all[0]["occurrence"], "why": "paused" });
    assert_eq!(hourly["passed_over"], passed);
    let plan = get(&at, "/api/v1/plan?job=hourly").of(200);
    for p in plan["planned"].as_array().expect("a plan") {
        let paused = p["occurrence"].as_str() < Some(until);
        assert_eq!(p["passed_over"].as_str(), paused.then_some("paused"), "{p}");
    }
    let calendar = get(&at, "/api/v1/jobs/hourly/calendar.ics").send().text();
    let starts = calendar.lines().find_map(|l| l.strip_prefix("DTSTART:"));
    let first = first.as_str().expect("a time").split('.').next();
    let first = first.unwrap_or_default().replace(['-', ':'], "") + "Z";
    assert_eq!(starts, Some(first.as_str()));
    // Nothing of the command, and nothing of the environment.
    let text =
        hourly.to_string() + &jobs.to_string() + &get(&at, "/api/v1/jobs/each").of(200).to_string();
    assert!(
        !text.contains("echo hello") && !text.contains("sleep 600"),
        "{text}"
    );
    // By any filter that fits, and only by one that fits.
    let names = |query: &str| {
        let found = get(&at, &format!("/api/v1/jobs?{query}")).of(200);
        let all = found["jobs"].as_array().expect("jobs").iter();
        all.map(|j| j["job"].as_str().expect("a name").to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names("tag=a"), ["each", "hourly"]);
    assert_eq!(names("tag=a&tag=b"), ["each"]);
    assert_eq!(names("q=says+it"), ["each"]);
    assert_eq!(names("q=%F0%9F%92%A9"), [""; 0]);
    // And no more of its runs than are asked for.
    for most in [0, 1, 24] {
        let found = get(&at, &format!("/api/v1/jobs?recent={most}")).of(200);
        let shown = |j: &Value| j["recent"].as_array().map(Vec::len);
        let all = jobs["jobs"].as_array().expect("jobs").iter();
        for (job, all) in found["jobs"].as_array().expect("jobs").iter().zip(all) {
            let (shown, all) = (shown(job).expect("runs"), shown(all).expect("runs"));
            assert!(shown <= most && shown >= all.min(most), "{job}");
        }
    }
    // The output, while the run is active.
    let long = get(&at, "/api/v1/jobs/long").of(200);
    let id = long["running"][0]["run_id"]
        .as_str()
        .expect("an active run")
        .to_owned();
    let output = wait_for("its output", GENEROUS, || {
        let piece = get(&at, &format!("/api/v1/runs/{id}/output?job=long")).of(200);
        (piece["data"] != "").then_some(piece)
    });
    assert_eq!(
        (output["data"].as_str(), output["ended"].as_bool()),
        (Some("begun\n"), Some(false))
    );
    let follows = get(&at, &format!("/api/v1/runs/{id}/output?job=long&follow=1"));
    let mut stream = follows.stream();
    let first = stream.next().expect("its output");
    assert_eq!(
        (first.kind.as_str(), &first.data["data"]),
        ("output", &output["data"])
    );
    post(&at, "/api/v1/jobs/long/cancel", "{}").of(200);
    let last = stream.wait("the end of the output", |e| e.data["ended"] == true);
    assert_eq!(last.data["next"], 6);
    assert!(stream.next().is_none(), "the stream goes on after the end");
}

#[test]
fn the_runs_of_a_job_come_in_pages_and_each_once() {
    let fleet = busy();
    let at = fleet.http(0);
    wait_until("some runs", GENEROUS, || {
        let all = get(&at, "/api/v1/jobs/each/runs?limit=1000").of(200);
        all["runs"].as_array().is_some_and(|runs| runs.len() > 5)
    });
    post(&at, "/api/v1/jobs/each/pause", "{}").of(200);
    wait_until("nothing of it is active", GENEROUS, || {
        get(&at, "/api/v1/jobs/each").of(200)["running"]
            .as_array()
            .is_some_and(Vec::is_empty)
    });
    // During a pause the history goes on with skipped occurrences; what had run does not change.
    let ran = "outcome=succeeded,failed,unknown";
    let id = |r: &Value| r["run_id"].as_str().expect("an id").to_owned();
    let list = |v: &Value| {
        v["runs"]
            .as_array()
            .expect("runs")
            .iter()
            .map(id)
            .collect::<Vec<_>>()
    };
    let all = list(&get(&at, &format!("/api/v1/jobs/each/runs?limit=1000&{ran}")).of(200));
    let (mut pages, mut next) = (vec![], String::new());
    loop {
        let page = get(&at, &format!("/api/v1/jobs/each/runs?limit=2&{ran}{next}")).of(200);
        pages.extend(list(&page));
        match page["next"].as_str() {
            Some(cursor) => next = format!("&cursor={cursor}"),
            None => break,
        }
    }
    assert_eq!(pages, all);
    // Also if a job is named twice.
    let everything = get(&at, &format!("/api/v1/runs?job=each&job=each&{ran}")).of(200);
    assert_eq!(
        (list(&everything), &everything["truncated"]),
        (all, &Value::Bool(false))
    );
    // One that goes on was active from its planned instant until now.
    let jobs = get(&at, "/api/v1/jobs").of(200);
    let planned = time(&jobs["jobs"][3]["running"][0]["occurrence"]);
    let hour = 3_600_000;
    for (asked, found) in [
        (format!("from={}", planned + 1), 1),
        (format!("from={}", time(&jobs["now"]) + hour), 0),
        (format!("to={planned}"), 1),
        (format!("to={}", planned - 1), 0),
    ] {
        for path in ["/api/v1/runs?job=long&", "/api/v1/jobs/long/runs?"] {
            let runs = get(&at, &format!("{path}{asked}")).of(200);
            assert_eq!(list(&runs).len(), found, "{path}{asked}");
        }
    }
}

/// Nobody knows more of one who writes to a socket without a token.
fn over_http(said: &Value) -> bool {
    let by = said["by"].as_str();
    by.is_some_and(|by| by.starts_with("http@"))
}

#[test]
fn any_instance_shows_and_does_what_concerns_the_whole_fleet() {
    let fleet = fleet(2)
        .http("listen = \"unix:{id}.sock\"")
        .job(
            "job",
            "command = \"sleep 600\"\ngrace = \"100ms\"\ntags = [\"x\"]",
        )
        .start();
    let (one, two) = (fleet.http(0), fleet.http(1));
    wait_until("both know the job and each other", GENEROUS, || {
        [&one, &two].iter().all(|at| {
            let known = get(at, "/api/v1/jobs").of(200)["jobs"][0]["known"] == true;
            let live = get(at, "/api/v1/instances").of(200);
            known
                && live["instances"]
                    .as_array()
                    .is_some_and(|all| all.len() == 2)
        })
    });
    let mut streams = [
        get(&one, "/api/v1/events").stream(),
        get(&two, "/api/v1/events").stream(),
    ];
    post(&one, "/api/v1/jobs/job/trigger", r#"{"key": "by hand"}"#).of(202);
    for stream in &mut streams {
        let triggered = stream.of_job("triggered", "job").data;
        assert_eq!(triggered["key"], "by hand");
        assert!(over_http(&triggered), "{triggered}");
        let granted = stream.of_job("granted", "job");
        assert_eq!(granted.data["attempt"], 1);
        let shown = stream.of_job("job", "job");
        assert_eq!(
            shown.data["job"]["running"][0]["run_id"],
            granted.data["run_id"]
        );
    }
    post(&two, "/api/v1/jobs/job/cancel", "{}").of(200);
    for stream in &mut streams {
        let cancelled = stream.of_job("cancelled", "job").data;
        assert!(over_http(&cancelled), "{cancelled}");
        assert_eq!(stream.of_job("ended", "job").data["outcome"], "cancelled");
    }
    let runs = get(&one, "/api/v1/jobs/job/runs").of(200);
    assert!(over_http(&runs["runs"][0]), "{runs}");
    post(
        &two,
        "/api/v1/jobs/job/pause",
        r#"{"reason": "moving", "until": "1h"}"#,
    )
    .of(200);
    for stream in &mut streams {
        let paused = stream.of_job("paused", "job");
        assert!(over_http(&paused.data), "{paused:?}");
        assert_eq!(paused.data["reason"], "moving");
        assert!(paused.data["until"].is_string());
    }
    post(&one, "/api/v1/jobs/job/resume", "{}").of(200);
    for stream in &mut streams {
        let resumed = stream.of_job("resumed", "job").data;
        assert!(over_http(&resumed), "{resumed}");
    }
    post(&one, "/api/v1/instances/i2/drain", "{}").of(200);
    for stream in &mut streams {
        let of = |kind: &'static str| move |e: &Event| e.kind == kind && e.data["instance"] == "i2";
        let drains = stream.wait("i2 drains", of("draining")).data;
        assert!(over_http(&drains), "{drains}");
        stream.wait("the instances", |e| {
            let i2 = &e.data["instances"][1];
            e.kind == "instances" && i2["draining"] == true && i2["drained_by"] == drains["by"]
        });
    }
    post(&two, "/api/v1/instances/i2/undrain", "{}").of(200);
    for stream in &mut streams {
        let again = stream.wait("i2 claims again", |e| e.kind == "undrained");
        assert!(over_http(&again.data), "{}", again.data);
    }
    let refused = post(&one, "/api/v1/instances/i3/drain", "{}").of(404);
    assert!(
        refused["hint"]
            .as_str()
            .is_some_and(|h| h.contains("did you mean")),
        "{refused}"
    );
}

#[test]
fn hostile_names_texts_and_output_stay_what_they_are() {
    let evil = "<img src=x onerror=alert(1)> \u{202e}txt \u{1b}[2J \"quoted\" \\ & \u{2028}";
    let toml = serde_json::to_string(evil)
        .expect("JSON")
        .replace("\\u2028", "\u{2028}");
    let fleet = fleet(1)
        .sqlite()
        .http("listen = \"unix:{id}.sock\"")
        .job(
            "job",
            &format!(
                "command = [\"printf\", \"<b>\\\\033[31m\\\\377\\\\360\\\\237\\\\222\\n\"]\ndescription = {toml}\ntags = [{toml}]"
            ),
        )
        .start();
    let at = fleet.http(0);
    wait_until("the job is known", GENEROUS, || {
        get(&at, "/api/v1/jobs").of(200)["jobs"][0]["known"] == true
    });
    let mut stream = get(&at, "/api/v1/events").stream();
    let body = serde_json::json!({"reason": evil}).to_string();
    post(&at, "/api/v1/jobs/job/pause", &body).of(200);
    assert_eq!(stream.of_job("paused", "job").data["reason"], evil);
    let shown = stream.of_job("job", "job").data["job"].clone();
    assert_eq!(
        (shown["description"].as_str(), shown["tags"][0].as_str()),
        (Some(evil), Some(evil))
    );
    let key = evil.replace('\u{1b}', "");
    post(
        &at,
        "/api/v1/jobs/job/trigger",
        &serde_json::json!({"key": key}).to_string(),
    )
    .of(202);
    assert_eq!(stream.of_job("triggered", "job").data["key"], key.as_str());
    let ended = stream.of_job("ended", "job");
    let id = ended.data["run_id"].as_str().expect("an id");
    let output = wait_for("the output", GENEROUS, || {
        let piece = get(&at, &format!("/api/v1/runs/{id}/output?job=job")).of(200);
        (piece["ended"] == true).then_some(piece)
    });
    assert_eq!(output["data"], "<b>\u{1b}[31m\u{fffd}\u{fffd}\n");
    // A calendar, and metrics, in which nothing begins a line of its own.
    let metrics = get(&at, "/metrics").send().text();
    assert!(
        metrics
            .lines()
            .all(|l| l.starts_with('#') || l.starts_with("soloist_")),
        "{metrics}"
    );
    let page = get(&at, "/").send();
    let policy = page.header("content-security-policy").unwrap_or_default();
    assert!(
        policy.contains("default-src 'none'") && policy.contains("script-src 'self'"),
        "{policy}"
    );
    for name in [
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "..%2f..%2fetc/passwd",
        "%00",
        "%ff%fe",
        "<script>",
        "a%0d%0aSet-Cookie:%20x=1",
    ] {
        for path in [format!("/static/{name}"), format!("/api/v1/jobs/{name}")] {
            let reply = get(&at, &path).send();
            assert!(
                [400, 404].contains(&reply.status),
                "{path}: {}",
                reply.status
            );
            assert_eq!(reply.header("set-cookie"), None, "{path}");
        }
    }
}

#[test]
fn a_file_of_the_page_is_sent_once() {
    let fleet = fleet(1)
        .sqlite()
        .http("")
        .job("job", "command = \"true\"")
        .start();
    let at = fleet.http(0);
    let first = get(&at, "/").send();
    assert_eq!(first.status, 200);
    let tag = first.header("etag").expect("a tag").to_owned();
    let again = get(&at, "/").header("If-None-Match", &tag).send();
    assert_eq!((again.status, again.body.len()), (304, 0));
    let other = get(&at, "/").header("If-None-Match", "\"other\"").send();
    assert_eq!(other.body, first.body);
    for header in [
        "x-content-type-options",
        "referrer-policy",
        "cross-origin-resource-policy",
    ] {
        assert!(first.header(header).is_some(), "{header}");
    }
    let api = get(&at, "/api/v1/jobs").send();
    assert_eq!(api.header("cache-control"), Some("no-store"));
}
