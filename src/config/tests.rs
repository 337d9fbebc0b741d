//! Tests with whole files: which are accepted, and the exact report about the others.

use std::{fmt::Write as _, path::Path, sync::Arc, time::Duration};

use proptest::prelude::*;

use super::{keys::Keys as _, *};
use crate::model::JobName;

pub(super) fn environment(name: &str) -> Option<String> {
    match name {
        "SECRET_URL" => Some("redis://:hunter2@host:0/0".into()),
        "HOST" => Some("redis.example".into()),
        "EMPTY" => Some(String::new()),
        "WORD" => Some("hunter2".into()),
        _ => None,
    }
}

fn read(text: &str) -> Result<Config, Report> {
    parse(text, Path::new("jobs.toml"), &environment)
}

#[track_caller]
fn good(text: &str) -> Config {
    read(text).unwrap_or_else(|report| panic!("{report}"))
}

#[track_caller]
fn bad(text: &str) -> Report {
    match read(text) {
        Ok(_) => panic!("accepted: {text}"),
        Err(report) => report,
    }
}

fn job(config: &Config, name: &str) -> Arc<Job> {
    config.jobs[&JobName::new(name)].clone()
}

/// `line:column message` and the hint, for tables of many cases.
fn brief(report: &Report) -> Vec<String> {
    let brief = |p: &Problem| {
        let at = (p.line.unwrap_or(0), p.column.unwrap_or(0));
        let hint = p
            .hint
            .as_deref()
            .map(|h| format!(" ({h})"))
            .unwrap_or_default();
        format!("{}:{} {}{hint}", at.0, at.1, p.message)
    };
    report.problems().iter().map(brief).collect()
}

/// A job with `line`, which stands at line 3.
fn with(line: &str) -> String {
    format!("[jobs.a]\ncommand = \"true\"\n{line}\n")
}

/// `line` under `[store]`, at line 2.
fn with_store(line: &str) -> String {
    format!("[store]\n{line}\n")
}

#[test]
fn a_report_shows_every_problem_with_its_line_and_a_caret() {
    let text = r#"[store]
url = "reds://host"

[jobs.backup]
schedule = "0 3 * * *"
timezome = "Europe/Berlin"
timeout = 5

[jobs."bad name"]
command = "true"
timezone = "Europe/Brelin"
overlap = "que"
"#;
    let expected = r#"error: [store]: `url`: unknown kind of store
 --> jobs.toml:2:7
  |
2 | url = ...
  |       ^^^
  |
  = help: did you mean `redis:`?

error: job `backup`: `command` is missing
 --> jobs.toml:4:7
  |
4 | [jobs.backup]
  |       ^^^^^^
  |
  = help: write `command = ["/usr/bin/program", "argument"]`, or a string for the shell

error: job `backup`: unknown key `timezome`
 --> jobs.toml:6:1
  |
6 | timezome = ...
  | ^^^^^^^^
  |
  = help: did you mean `timezone`?

error: job `backup`: `timeout`: expected a duration, found an integer
 --> jobs.toml:7:11
  |
7 | timeout = 5
  |           ^
  |
  = help: add a unit, such as "5s"

error: [jobs]: `bad name` cannot be the name of a job
 --> jobs.toml:9:7
  |
9 | [jobs."bad name"]
  |       ^^^^^^^^^^
  |
  = help: use letters, digits, `-`, `_` and `.`, 1 to 100 of them, and not `.` or `..`

error: job `bad name`: `timezone`: unknown time zone `Europe/Brelin`
  --> jobs.toml:11:12
   |
11 | timezone = "Europe/Brelin"
   |            ^^^^^^^^^^^^^^^
   |
   = help: did you mean `Europe/Berlin`?

error: job `bad name`: `overlap`: unknown value `que`
  --> jobs.toml:12:11
   |
12 | overlap = "que"
   |           ^^^^^
   |
   = help: use `skip`, `queue`, `replace` or `allow`

7 problems in jobs.toml"#;
    let report = bad(text);
    assert_eq!(report.to_string(), expected);
    assert_eq!(report.render(false), expected);
    let colored = report.render(true);
    assert!(colored.contains("\x1b["), "{colored}");
    assert!(!expected.contains('\x1b'));
}

#[test]
fn errors_of_the_syntax_come_all_at_once_and_alone() {
    let text = "[store]\nurl = \"redis://:hunter2@host\nnamespace = 1\n\n[jobs.a]\ncommand = [\"x\" \"y\"]\n\
                lease = 15s\n[jobs.a]\ncommand = 7\nbogus = 1\n";
    let report = bad(text);
    let lines: Vec<_> = report.problems().iter().map(|p| p.line.unwrap()).collect();
    assert_eq!(lines, [2, 6, 7, 8, 9], "{report}");
    let shown = report.to_string();
    assert!(
        shown.contains("\n2 | url = ...") && !shown.contains("hunter2"),
        "{shown}"
    );
}

#[test]
fn the_structured_view_has_file_line_column_message_and_hint() {
    let report = bad("[jobs.a]\ncommand = \"ü\"\ntags = [\"ü\", 1]\n");
    assert_eq!(
        serde_json::to_string(report.problems()).unwrap(),
        r#"[{"file":"jobs.toml","line":3,"column":14,"message":"job `a`: `tags`: expected a string, found an integer","hint":"put it in quotes"}]"#
    );
}

#[test]
fn every_key_is_accepted_and_lands_where_it_belongs() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("pw"), "hunter2\n").unwrap();
    std::fs::write(
        dir.path().join("vars"),
        "# who\n\nexport A = \"1 2\"\nB='x'\nC=\n",
    )
    .unwrap();
    let text = r#"
[store]
url = "rediss://${HOST}:6380/1"
namespace = "prod:${NONE:-eu}"
username = "cron"
password_file = "pw"
tls = { ca = "ca.pem", cert = "cert.pem", key = "/dir/key.pem" }
timeout = "250ms"
pool_size = 4
min_replicas = 1
retry = { attempts = 5, interval = "50ms", backoff = "fixed", max_interval = "1s", jitter = false }

[limits]
max_parallel = 16
drain = "2m"
clock_drift = 0.02

[defaults]
timezone = "asia/shanghai"
env = { B = "default", D = "default" }
env_file = "vars"
grace = "3s"

[jobs.lottery-draw]
description = "Pick ten winners"
tags = ["money", "daily"]
enabled = false
schedule = ["0 12 * * *", "30 12 * * 7"]
dst = { gap = "skip", overlap = "both" }
jitter = "30s"
command = ["./draw.sh", "--winners", "10"]
env = { D = "job" }
working_dir = "work"
user = "lottery"
group = "games"
timeout = "5m"
grace = "1s"
lease = "20s"
renew_every = "2s"
overlap = "queue"
on_crash = "rerun"
on_state_loss = "rerun"
max_attempts = 9
retry = { attempts = 4, interval = "1s", backoff = "fixed", max_interval = "4s" }
start_within = "1h30m"
catch_up = "all"
success_codes = [3, 0, 3]
output = { keep = "1MiB", log = false }

[jobs.other]
command = "echo $A"
timezone = "UTC"
"#;
    for name in ["ca.pem", "cert.pem", "key.pem"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    let text = text.replace("/dir/", &format!("{}/", dir.path().display()));
    let config =
        parse(&text, &dir.path().join("jobs.toml"), &environment).unwrap_or_else(|r| panic!("{r}"));
    let store = &config.store;
    assert_eq!(
        store.url,
        StoreUrl::Redis(Secret::new("rediss://redis.example:6380/1"))
    );
    assert_eq!(
        (store.namespace.as_str(), store.username.as_deref()),
        ("prod:eu", Some("cron"))
    );
    assert_eq!(store.password, Some(Secret::new("hunter2")));
    let tls = Tls {
        ca: Some(dir.path().join("ca.pem")),
        cert: Some(dir.path().join("cert.pem")),
        key: Some(dir.path().join("key.pem")),
    };
    assert_eq!(store.tls, Some(tls));
    assert_eq!(
        (store.timeout, store.pool_size, store.min_replicas),
        (Duration::from_millis(250), 4, 1)
    );
    let retry = StoreRetry {
        attempts: 5,
        interval: Duration::from_millis(50),
        exponential: false,
        max_interval: Duration::from_secs(1),
        jitter: false,
    };
    assert_eq!(store.retry, retry);
    assert_eq!(config.limits.max_parallel, Some(16));
    assert_eq!(
        (config.limits.drain, config.limits.clock_drift),
        (Duration::from_secs(120), 0.02)
    );

    let job = job(&config, "lottery-draw");
    assert_eq!(job.description.as_deref(), Some("Pick ten winners"));
    assert_eq!(*job.tags, ["money", "daily"]);
    assert!(!job.enabled);
    assert_eq!(*job.schedule_text, ["0 12 * * *", "30 12 * * 7"]);
    assert_eq!(job.schedules.len(), 2);
    assert_eq!(&*job.timezone, "Asia/Shanghai");
    assert_eq!(job.jitter, Duration::from_secs(30));
    assert_eq!(
        job.command,
        Command::Argv(vec!["./draw.sh".into(), "--winners".into(), "10".into()])
    );
    let env: Vec<_> = job.env.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(env, ["A=1 2", "B=default", "C=", "D=job"]);
    assert_eq!(job.working_dir.as_deref(), Some(&*dir.path().join("work")));
    assert_eq!(
        (job.user.as_deref(), job.group.as_deref()),
        (Some("lottery"), Some("games"))
    );
    assert_eq!(
        (job.timeout, job.grace),
        (Some(Duration::from_secs(300)), Duration::from_secs(1))
    );
    let lease = Lease::new(Duration::from_secs(20), 0.02)
        .and_then(|lease| lease.renewed_every(Duration::from_secs(2)))
        .unwrap();
    assert_eq!(*job.lease, lease);
    assert_eq!(
        (job.overlap, job.on_crash),
        (
            crate::logic::claim::Overlap::Queue,
            crate::logic::claim::OnCrash::Rerun
        )
    );
    assert_eq!(
        (job.on_state_loss, job.max_attempts),
        (OnStateLoss::Rerun, 9)
    );
    let retry = JobRetry {
        attempts: 4,
        interval: Duration::from_secs(1),
        exponential: false,
        max_interval: Duration::from_secs(4),
    };
    assert_eq!(job.retry.as_deref(), Some(&retry));
    assert_eq!(
        (job.start_within, job.catch_up),
        (Duration::from_secs(5400), CatchUp::All)
    );
    assert_eq!(*job.success_codes, [0, 3]);
    assert_eq!(
        job.output,
        Output {
            keep: 1 << 20,
            log: false
        }
    );

    let other = self::job(&config, "other");
    assert_eq!(other.command, Command::Shell("echo $A".into()));
    assert_eq!(
        (&*other.timezone, other.grace),
        ("UTC", Duration::from_secs(3))
    );
    assert_eq!(other.env["D"], "default");
}

#[test]
fn max_attempts_follows_from_what_makes_attempts() {
    let attempts = |line: &str| {
        let job = job(&good(&with(line)), "a");
        (job.max_attempts, job.retry.as_ref().map(|r| r.attempts))
    };
    assert_eq!(attempts("on_crash = 'rerun'"), (3, None));
    assert_eq!(attempts("retry = {}"), (3, Some(2)));
    assert_eq!(attempts("retry = { attempts = 1 }"), (3, Some(1)));
    assert_eq!(attempts("retry = { attempts = 7 }"), (8, Some(7)));
    assert_eq!(attempts("retry = { attempts = 0 }"), (1, None));
    assert_eq!(
        attempts("max_attempts = 999\nretry = { attempts = 998 }"),
        (999, Some(998))
    );
    let config = good("[defaults]\nretry = {}\n[jobs.a]\ncommand = 'x'\nretry = { attempts = 0 }");
    assert_eq!(job(&config, "a").retry, None);
    // The longest wait is never shorter than the first.
    let retry = job(&good(&with("retry = { interval = '1h' }")), "a")
        .retry
        .clone()
        .unwrap();
    assert_eq!(
        (retry.interval, retry.max_interval),
        (Duration::from_secs(3600), Duration::from_secs(3600))
    );
}

#[test]
fn a_channel_has_what_its_type_needs_and_nothing_else() {
    let hook = "[notify.ops]\ntype = 'webhook'\nurl = 'https://x/y'\n";
    for (text, said) in [
        (
            "[notify.ops]\nurl = 'https://x'\n",
            "channel `ops`: `type` is missing",
        ),
        ("[notify.ops]\ntype = 'slak'\n", "did you mean `slack`?"),
        ("[notify.ops]\ntype = 'slack'\n", "`url` is missing"),
        (
            "[notify.ops]\ntype = 'slack'\nurl = 'hunter2'\n",
            "`url`: not the address of a server",
        ),
        (
            "[notify.ops]\ntype = 'slack'\nurl = 'https://me:hunter2@x@y/z'\n",
            "`url`: not the address of a server",
        ),
        (
            "[notify.ops]\ntype = 'slack'\nurl = 'https://me:hunter2/x@y/z'\n",
            "`url`: not the address of a server",
        ),
        (
            "[notify.ops]\ntype = 'slack'\nurl = 'https://:hunter2@y/z'\n",
            "`url`: not the address of a server",
        ),
        (
            "[notify.ops]\ntype = 'slack'\nurl = 'https://y:hunter2/z'\n",
            "`url`: not the address of a server",
        ),
        (
            "[notify.ops]\ntype = 'slack'\nurl = 'https://me:hunter2@/z'\n",
            "`url`: not the address of a server",
        ),
        (
            "[notify.ops]\ntype = 'slack'\nurl = 'https://x'\nto = 'a@b'\n",
            "`to` is not used with the type `slack`",
        ),
        (
            "[notify.ops]\ntype = 'pagerduty'\n",
            "`routing_key` is missing",
        ),
        (
            "[notify.ops]\ntype = 'email'\nto = 'a@b'\n",
            "`smtp` is missing",
        ),
        (
            "[notify.ops]\ntype = 'email'\nsmtp = 'mail.example.org'\n",
            "`smtp`: not the address of a mail server",
        ),
        (
            "[notify.ops]\ntype = 'email'\nsmtp = 'smtp://u:hunter2@h:99999'\n",
            "`smtp`: not the address of a mail server",
        ),
        (
            "[notify.ops]\ntype = 'email'\nsmtp = 'smtp://u:hunter2@h?tls=required'\n",
            "`smtp`: not the address of a mail server",
        ),
        (
            "[notify.ops]\ntype = 'email'\nto = ['ann']\n",
            "`to`: not a mail address",
        ),
        ("[notify.ops]\ntype = 'command'\n", "`command` is missing"),
        (
            "[notify.ops]\ntype = 'webhook'\non = ['fail']\n",
            "did you mean `failed`?",
        ),
        (
            "[notify.ops]\ntype = 'webhook'\non = []\n",
            "`on`: must not be empty",
        ),
        (
            "[notify.ops]\ntype = 'webhook'\nurl = 'https://x'\nurl_file = 'y'\n",
            "`url` and `url_file` are both given",
        ),
        (
            "[notify.\"a b\"]\ntype = 'webhook'\n",
            "`a b` cannot be the name of a channel",
        ),
        ("[notify]\nops = 1\n", "expected a table"),
    ] {
        let report = bad(text).to_string();
        assert!(
            report.contains(said) && !report.contains("hunter2"),
            "{text}: {report}"
        );
    }
    let unknown = format!("{hook}[jobs.a]\ncommand = 'x'\nnotify = ['opps']\n");
    let report = bad(&unknown).to_string();
    assert!(
        report.contains("there is no channel `opps`") && report.contains("did you mean `ops`?"),
        "{report}"
    );
    let defaults = format!("{hook}[defaults]\nnotify = ['ops']\n[jobs.a]\ncommand = 'x'\n");
    let config = good(&(defaults.clone() + "[jobs.b]\ncommand = 'x'\nnotify = []\n"));
    assert_eq!(job(&config, "a").alarms.notify, ["ops"]);
    assert!(job(&config, "b").alarms.notify.is_empty());
    for sound in [
        "https://me:hunter2@x/y",
        "https://me@x:1/y?z=a@b",
        "http://me:%40%2F@[::1]:8080",
        "http://[::1]",
    ] {
        good(&format!(
            "[notify.ops]\ntype = 'webhook'\nurl = '{sound}'\n"
        ));
    }
    // Shown, it has no secret.
    let shown = format!("{:?}", config.channels);
    assert!(!shown.contains("https://x/y"), "{shown}");
    // A file without channels has the digest that it always had, and a job's channel is part of it.
    let with = good(&defaults).digest;
    let without = good(&format!("{hook}[jobs.a]\ncommand = 'x'\n")).digest;
    assert_ne!(with, without);
}

#[test]
fn a_heartbeat_names_the_job_and_may_have_a_variable() {
    let text = "[defaults]\nheartbeat_url = 'https://hc/${KEY}/{job}'\n[jobs.a]\ncommand = 'x'\n";
    let env = |name: &str| (name == "KEY").then(|| "k1".to_owned());
    let config = super::parse(text, std::path::Path::new("jobs.toml"), &env).expect("sound");
    let alarms = &job(&config, "a").alarms;
    let url = alarms.heartbeat.as_ref().expect("an address");
    assert_eq!(url.expose(), "https://hc/k1/a");
    assert_eq!(format!("{url:?}"), "***");
    let report = bad("[jobs.a]\ncommand = 'x'\nheartbeat_url = 'https://hc/{name}'\n");
    assert!(report.to_string().contains("not the address"), "{report}");
    let login = "[jobs.a]\ncommand = 'x'\nheartbeat_url = 'https://me:hunter2@hc/{job}'\n";
    assert!(job(&good(login), "a").alarms.heartbeat.is_some());
    let bare = bad(&login.replace("hunter2", "hunter2/x")).to_string();
    assert!(
        bare.contains("not the address") && !bare.contains("hunter2"),
        "{bare}"
    );
}

/// As an editor of Windows writes it.
#[test]
fn a_command_of_several_lines_has_no_carriage_returns() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.toml");
    let text = "[jobs.a]\r\ncommand = \"\"\"\r\ncd /srv\r\n./backup\r\n\"\"\"\r\n";
    std::fs::write(&path, text).unwrap();
    let config = super::load(&path, Sends::All).unwrap_or_else(|r| panic!("{r}"));
    let command = Command::Shell("cd /srv\n./backup\n".into());
    assert_eq!(job(&config, "a").command, command);
    std::fs::write(&path, format!("{text}lease = 5\r\n")).unwrap();
    let report = super::load(&path, Sends::All).unwrap_err().to_string();
    assert!(
        report.contains("jobs.toml:6:9\n") && report.contains("6 | lease = 5\n"),
        "{report}"
    );
}

/// Editors of Windows put it there. It hides nothing, and moves no column.
#[test]
fn a_byte_order_mark_at_the_begin_is_no_part_of_the_text() {
    let sound = "[jobs.a]\ncommand = 'x'\n";
    assert_eq!(good(&format!("\u{feff}{sound}")).digest, good(sound).digest);
    for text in [
        "[store]\nurl = 'redis://me:hunter2@h:x'\n[jobs.a]\ncommand = 'x'\nshedule = 'y'\n",
        "jbos = 1\n[jobs.a]\n",
        "password = 'hunter2\n",
        "url = 'hunter2'\n[store]\npassword = 'hunter2'\n",
        "x\n",
    ] {
        let (marked, plain) = (bad(&format!("\u{feff}{text}")), bad(text));
        assert_eq!(marked.to_string(), plain.to_string());
        assert_eq!(brief(&marked), brief(&plain));
        assert!(!marked.to_string().contains("hunter2"), "{marked}");
    }
    // Elsewhere it is a sign like another.
    assert!(read("[jobs.a]\n\u{feff}command = 'x'\n").is_err());
}

#[test]
fn http_is_served_where_and_to_whom_the_file_says() {
    assert_eq!(good("").http, None);
    let http = good("[http]\n").http.unwrap();
    assert_eq!(http.listen, Listen::Tcp("127.0.0.1:7878".parse().unwrap()));
    assert_eq!(
        (http.tokens_file, http.tls, http.public_url, http.read_only),
        (None, None, None, false)
    );
    let listen = |text: &str| {
        good(&format!("[http]\nlisten = '{text}'\n"))
            .http
            .unwrap()
            .listen
            .to_string()
    };
    assert_eq!(listen("[::1]:0"), "[::1]:0");
    assert_eq!(listen("localhost:80"), "127.0.0.1:80");
    assert_eq!(
        listen("unix:/run/soloist/http.sock"),
        "unix:/run/soloist/http.sock"
    );
    let here = std::env::current_dir().unwrap();
    assert_eq!(
        listen("unix:a/b"),
        format!("unix:{}", here.join("a/b").display())
    );
    let url = |text: &str| {
        good(&format!("[http]\npublic_url = '{text}'\n"))
            .http
            .unwrap()
            .public_url
            .unwrap()
    };
    assert_eq!(
        url("https://soloist.example.org/"),
        "https://soloist.example.org"
    );
    assert_eq!(
        url("http://[2001:db8::1]:8080/cron/"),
        "http://[2001:db8::1]:8080/cron"
    );
    // Neither the jobs nor the store: instances may serve at different places.
    assert_eq!(
        good("[http]\nlisten = '127.0.0.1:1'\n").digest,
        good("").digest
    );
    let others = good("[http]\nlisten = '[::ffff:127.0.0.1]:1'\n")
        .http
        .unwrap();
    assert!(!others.listen.is_reached_by_others());
}

#[test]
fn what_is_wrong_with_http_is_said_at_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (empty, broken, pem) = (
        file("empty", ""),
        file("broken", "# a\nhunter2\n"),
        file("pem", "x"),
    );
    let needs = "`listen`: other hosts reach this address, and there is no `tokens_file` (name a file of tokens in \
        `tokens_file`; or listen on 127.0.0.1, [::1] or a socket (`unix:PATH`))";
    let no_address = |hint: &str| {
        format!("2:10 [http]: `listen`: not an address with a port, and not `unix:PATH` ({hint})")
    };
    let all = "write `127.0.0.1:7878`, `[::1]:7878`, `[::]:7878` or `unix:/run/soloist/http.sock`";
    let no_socket = "2:10 [http]: `listen`: the path of a socket must name a file, and have at most 99 bytes (use a \
        shorter path, as `unix:/run/soloist/http.sock`)";
    let no_page = "2:14 [http]: `public_url`: not the address of a page (write `https://soloist.example.org`)";
    for (lines, want) in [
        ("listen = '0.0.0.0:1'".to_owned(), format!("2:10 [http]: {needs}")),
        ("listen = '[::]:1'".to_owned(), format!("2:10 [http]: {needs}")),
        ("listen = '10.0.0.1:1'".to_owned(), format!("2:10 [http]: {needs}")),
        ("listen = ':7878'".to_owned(), no_address("write `127.0.0.1:7878` for this host alone, or `[::]:7878`")),
        ("listen = '127.0.0.1'".to_owned(), no_address(all)),
        ("listen = '127.0.0.1:99999'".to_owned(), no_address(all)),
        ("listen = 'example.org:80'".to_owned(), no_address(all)),
        (
            "listen = ''".to_owned(),
            "2:10 [http]: `listen`: must not be empty (leave the key out instead)".to_owned(),
        ),
        (
            "listen = 7878".to_owned(),
            "2:10 [http]: `listen`: expected a string, found an integer (put it in quotes)".to_owned(),
        ),
        (format!("listen = 'unix:/{}'", "x".repeat(110)), no_socket.to_owned()),
        ("listen = 'unix:'".to_owned(), no_socket.to_owned()),
        ("listen = 'unix:/run/soloist/'".to_owned(), no_socket.to_owned()),
        ("public_url = 'soloist.example.org'".to_owned(), no_page.to_owned()),
        ("public_url = 'ftp://soloist.example.org'".to_owned(), no_page.to_owned()),
        ("public_url = 'https://a@b'".to_owned(), no_page.to_owned()),
        ("public_url = 'https://b?token=x'".to_owned(), no_page.to_owned()),
        ("public_url = 'https:///x'".to_owned(), no_page.to_owned()),
        (
            format!("tls = {{ cert = {pem:?} }}"),
            "2:7 [http]: `tls.key` is missing (name the PEM files of both: `tls = { cert = \"…\", key = \"…\" }`)"
                .to_owned(),
        ),
        (
            format!("listen = 'unix:/x'\ntls = {{ cert = {pem:?}, key = {pem:?} }}"),
            "3:7 [http]: `tls` is not used with a socket (remove it)".to_owned(),
        ),
        (
            format!("tokens_file = {broken:?}"),
            format!(
                "2:15 [http]: `tokens_file`: cannot read `{broken}`: line 2: not `NAME ROLE sha256:HEX` (`soloist http \
                 token NAME ROLE` prints a line for it)"
            ),
        ),
    ] {
        assert_eq!(brief(&bad(&format!("[http]\n{lines}\n"))), [want], "{lines}");
    }
    let missing = bad("[http]\ntokens_file = '/nowhere/tokens'\n");
    assert!(brief(&missing)[0].contains("no such file"), "{missing}");
    good(&format!(
        "[http]\nlisten = '0.0.0.0:1'\ntokens_file = {empty:?}\n"
    ));
    // As in the store, a variable may be a secret.
    let env = |name: &str| (name == "PW").then(|| "hunter2".to_owned());
    for line in [
        "listen = '${PW}'",
        "tokens_file = '${PW}'",
        "public_url = '${PW}'",
    ] {
        let report = parse(
            &format!("[http]\n{line}\n"),
            Path::new("/nowhere/jobs.toml"),
            &env,
        )
        .unwrap_err();
        let told = format!("{report}{:?}", report.problems());
        assert!(!told.contains("hunter2"), "{told}");
    }
}

#[test]
fn unknown_keys_are_refused_everywhere_with_what_was_meant() {
    let cases = [
        (
            "[job.a]\n".into(),
            "1:2 unknown key `job` (did you mean `jobs`?)",
        ),
        (
            "schedule = '@daily'\n".into(),
            "1:1 unknown key `schedule` (job keys belong below `[jobs.NAME]` or `[defaults]`)",
        ),
        (
            with_store("ulr = 'memory:'"),
            "2:1 [store]: unknown key `ulr` (did you mean `url`?)",
        ),
        (
            with_store("retry = { atempts = 1 }"),
            "2:11 [store]: unknown key `retry.atempts` (did you mean `retry.attempts`?)",
        ),
        (
            with_store("url = 'rediss://h'\ntls = { certificate = 'x' }"),
            "3:9 [store]: unknown key `tls.certificate` (known keys: `tls.ca`, `tls.cert` or `tls.key`)",
        ),
        (
            "[limits]\nmax-parallel = 3\n".into(),
            "2:1 [limits]: unknown key `max-parallel` (did you mean `max_parallel`?)",
        ),
        (
            "[defaults]\ntimezones = 'UTC'\n".into(),
            "2:1 [defaults]: unknown key `timezones` (did you mean `timezone`?)",
        ),
        (
            with("Timeout = '5m'"),
            "3:1 job `a`: unknown key `Timeout` (did you mean `timeout`?)",
        ),
        (
            with("retry = { jitter = true }"),
            "3:11 job `a`: unknown key `retry.jitter` (known keys: `retry.attempts`, `retry.interval`, `retry.backoff` or `retry.max_interval`)",
        ),
        (
            with("output = { kep = 1 }"),
            "3:12 job `a`: unknown key `output.kep` (did you mean `output.keep`?)",
        ),
        (
            with("dst = { gaps = 'skip' }"),
            "3:9 job `a`: unknown key `dst.gaps` (did you mean `dst.gap`?)",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(brief(&bad(&text)), [expected], "{text}");
    }
    // No key is near: the hint lists all known keys.
    let far = brief(&bad("[limits]\nxyzzy = 1\n"));
    assert_eq!(
        far,
        [
            "2:1 [limits]: unknown key `xyzzy` (known keys: `max_parallel`, `drain` or `clock_drift`)"
        ]
    );
}

#[test]
fn wrong_values_are_refused_with_what_is_right() {
    let long = "a".repeat(101);
    let cases: Vec<(String, String)> = [
        ("enabled = 'true'", "3:11 job `a`: `enabled`: expected true or false, found a string (remove the quotes)"),
        ("enabled = 1", "3:11 job `a`: `enabled`: expected true or false, found an integer"),
        ("description = 2026-01-01", "3:15 job `a`: `description`: expected a string, found a date or time"),
        ("tags = 'x'", "3:8 job `a`: `tags`: expected a list of strings, found a string"),
        ("schedule = 5", "3:12 job `a`: `schedule`: expected a string or a list of strings, found an integer"),
        ("schedule = ''", "3:13 job `a`: `schedule`: the schedule is empty (five fields, for example `0 12 * * *`, or a nickname such as `@daily`)"),
        ("timezone = 'Shanghai'", "3:12 job `a`: `timezone`: unknown time zone `Shanghai` (did you mean `Asia/Shanghai`?)"),
        ("timezone = 'New York'", "3:12 job `a`: `timezone`: unknown time zone `New York` (did you mean `America/New_York`?)"),
        ("timezone = 'Eurpoe/Berlin'", "3:12 job `a`: `timezone`: unknown time zone `Eurpoe/Berlin` (did you mean `Europe/Berlin`?)"),
        ("timezone = 'America/Indianapols'", "3:12 job `a`: `timezone`: unknown time zone `America/Indianapols` (did you mean `America/Indianapolis`?)"),
        ("timezone = 'GMT+2'", "3:12 job `a`: `timezone`: unknown time zone `GMT+2` (use an IANA name such as `Europe/Berlin` or `UTC`)"),
        ("timezone = 'PST'", "3:12 job `a`: `timezone`: unknown time zone `PST` (use an IANA name such as `Europe/Berlin` or `UTC`)"),
        ("timezone = 'Etc/Unknown'", "3:12 job `a`: `timezone`: unknown time zone `Etc/Unknown` (use an IANA name such as `Europe/Berlin` or `UTC`)"),
        ("dst = 'skip'", "3:7 job `a`: `dst`: expected a table, found a string"),
        ("dst = { overlap = 'twice' }", "3:19 job `a`: `dst.overlap`: unknown value `twice` (use `first`, `second` or `both`)"),
        ("jitter = '-5s'", "3:10 job `a`: `jitter`: `-5s` is not a duration (write it as `250ms`, `15s`, `5m`, `1h30m` or `2d`)"),
        ("timeout = '0s'", "3:11 job `a`: `timeout`: must be longer than zero"),
        ("timeout = 1.5", "3:11 job `a`: `timeout`: expected a duration, found a float (write it as \"15s\" or \"1h30m\")"),
        ("timeout = '4000d'", "3:11 job `a`: `timeout`: `4000d` is too long (the longest duration is `3650d`)"),
        ("env = { A = 1 }", "3:13 job `a`: `env.A`: expected a string, found an integer (put it in quotes)"),
        ("env = { 'A B' = 'x' }", "3:9 job `a`: `env`: `A B` cannot be the name of an environment variable (use letters, digits and `_`)"),
        ("env = { SOLOIST_JOB = 'x' }", "3:9 job `a`: `env`: `SOLOIST_JOB` is set by soloist itself (use a name that does not start with `SOLOIST_`)"),
        ("env_file = 'none/such'", "3:12 job `a`: `env_file`: cannot read `{HERE}/none/such`: no such file (a relative path is taken from the directory of the configuration file)"),
        ("env_file = '/dev/zero'", "3:12 job `a`: `env_file`: cannot read `/dev/zero`: it is not a regular file (a relative path is taken from the directory of the configuration file)"),
        ("user = ''", "3:8 job `a`: `user`: must not be empty (leave the key out instead)"),
        ("working_dir = \"a\\u0000b\"", "3:15 job `a`: `working_dir`: must not contain a NUL character"),
        ("overlap = 'Skip'", "3:11 job `a`: `overlap`: unknown value `Skip` (did you mean `skip`?)"),
        ("on_crash = 'restart'", "3:12 job `a`: `on_crash`: unknown value `restart` (use `fail` or `rerun`)"),
        ("on_state_loss = 'skp'", "3:17 job `a`: `on_state_loss`: unknown value `skp` (did you mean `skip`?)"),
        ("catch_up = 'last'", "3:12 job `a`: `catch_up`: unknown value `last` (did you mean `latest`?)"),
        ("max_attempts = 0", "3:16 job `a`: `max_attempts`: must be between 1 and 999, not 0"),
        ("max_attempts = 1000", "3:16 job `a`: `max_attempts`: must be between 1 and 999, not 1000"),
        ("max_attempts = '3'", "3:16 job `a`: `max_attempts`: expected an integer, found a string (remove the quotes)"),
        ("max_attempts = 99999999999999999999", "3:16 job `a`: `max_attempts`: must be between 1 and 999, not 99999999999999999999"),
        ("retry = 3", "3:9 job `a`: `retry`: expected a table, found an integer"),
        ("retry = { backoff = 'linear' }", "3:21 job `a`: `retry.backoff`: unknown value `linear` (use `exponential` or `fixed`)"),
        ("retry = { interval = '5s', max_interval = '1s' }", "3:43 job `a`: `retry.max_interval` is shorter than `retry.interval`"),
        ("max_attempts = 3\nretry = { attempts = 3 }", "3:16 job `a`: `max_attempts` (3) is too small for the first attempt and 3 more (`retry.attempts`) (set `max_attempts` to 4 or more)"),
        ("success_codes = [0, 256]", "3:21 job `a`: `success_codes`: must be between 0 and 255, not 256"),
        ("success_codes = []", "3:17 job `a`: `success_codes`: must not be empty: no run could succeed (write `[0]`)"),
        ("success_codes = 0", "3:17 job `a`: `success_codes`: expected a list of exit codes, found an integer"),
        ("output = { keep = '64k' }", "3:19 job `a`: `output.keep`: `64k` is not a size (write it as `64KiB`, `1MB` or a number of bytes)"),
        ("output = { keep = '1GiB' }", "3:19 job `a`: `output.keep`: must be at most 16MiB"),
        ("output = { keep = -1 }", "3:19 job `a`: `output.keep`: `-1` is not a size (write it as `64KiB`, `1MB` or a number of bytes)"),
        ("lease = '400ms'", "3:9 job `a`: `lease`: must be at least 500ms, not 400ms (a shorter one leaves no time to end a command before another instance may start it)"),
        ("lease = '15s'\nrenew_every = '4s'", "4:15 job `a`: renew_every (4s) must be at most a fifth of the lease \
        (15s), which is 3s (leave `renew_every` out: soloist derives it from `lease`)"),
        ("renew_every = '5s'", "3:15 job `a`: renew_every (5s) must be at most a fifth of the lease (15s), which is \
        3s (leave `renew_every` out: soloist derives it from `lease`)"),
    ]
    .map(|(line, expected)| (with(line), expected.to_owned()))
    .into_iter()
    .chain([
        ("[jobs.a]\ncommand = []\n".into(), "2:11 job `a`: `command`: the program to run is missing (write `[\"/usr/bin/program\", \"argument\"]`)".into()),
        ("[jobs.a]\ncommand = ' '\n".into(), "2:11 job `a`: `command`: must not be empty".into()),
        ("[jobs.a]\ncommand = ['x', 1]\n".into(), "2:17 job `a`: `command`: expected a string, found an integer (put it in quotes)".into()),
        ("[jobs.a]\ncommand = [\"x\\u0000\"]\n".into(), "2:12 job `a`: `command`: must not contain a NUL character".into()),
        ("[jobs]\na = 'x'\n".into(), "2:5 [jobs]: `a`: expected a table, found a string (write `[jobs.NAME]`, with `command` and `schedule` below it)".into()),
        ("jobs = 1\n".into(), "1:8 `jobs`: expected a table, found an integer".into()),
        ("[jobs.'']\ncommand = 'x'\n".into(), "1:7 [jobs]: `` cannot be the name of a job (use letters, digits, `-`, `_` and `.`, 1 to 100 of them, and not `.` or `..`)".into()),
        (
            format!("[jobs.{long}]\ncommand = 'x'\n"),
            format!("1:7 [jobs]: `{}…` cannot be the name of a job (use letters, digits, `-`, `_` and `.`, 1 to 100 of them, and not `.` or `..`)", &long[..60]),
        ),
        ("[jobs.'a/b']\ncommand = 'x'\n".into(), "1:7 [jobs]: `a/b` cannot be the name of a job (use letters, digits, `-`, `_` and `.`, 1 to 100 of them, and not `.` or `..`)".into()),
        ("[jobs.'..']\ncommand = 'x'\n".into(), "1:7 [jobs]: `..` cannot be the name of a job (use letters, digits, `-`, `_` and `.`, 1 to 100 of them, and not `.` or `..`)".into()),
        (with_store("namespace = '{x}'"), "2:13 [store]: `namespace`: cannot be the prefix of keys (use letters, digits, `-`, `_`, `.` and `:`, up to 100 of them)".into()),
        (with_store("timeout = '9ms'"), "2:11 [store]: `timeout`: must be at least 10ms, not 9ms (no store can \
        always answer that soon, so commands would time out)".into()),
        (with_store("pool_size = 0"), "2:13 [store]: `pool_size`: must be between 1 and 1000, not 0".into()),
        (with_store("username = 'x'"), "2:12 [store]: `username` is only used with Redis (remove it, or name a Redis \
        server in `url`)".into()),
        (with_store("min_replicas = 1"), "2:16 [store]: `min_replicas` is only used with Redis (remove it, or name a \
        Redis server in `url`)".into()),
        (with_store("url = 'redis://h'\ntls = {}"), "3:7 [store]: `tls` is only used with a `rediss://` URL (write \
        `rediss://` in `url`, or remove `tls`)".into()),
        (with_store("url = 'rediss://h'\ntls = { cert = 'Cargo.toml' }"), "3:7 [store]: `tls.cert` and `tls.key` belong together (give both, or none)".into()),
        (with_store("url = 'redis://h'\nusername = 'me'"), "3:12 [store]: `username` needs a password (name the file that contains it in `password_file`)".into()),
        (with_store("url = 'redis://me@h'"), "2:7 [store]: `url` has a user name but no password (name the file that contains it in `password_file`)".into()),
        (with_store("url = 'rediss://h'\ntls = { ca = 'none' }"), "3:14 [store]: `tls.ca`: cannot read `{HERE}/none`: no such file (a relative path is taken from the directory of the configuration file)".into()),
        (with_store("url = 'rediss://h'\ntls = { cert = '/dev/zero', key = 'Cargo.toml' }"), "3:16 [store]: `tls.cert`: cannot read `/dev/zero`: it is not a regular file (a relative path is taken from the directory of the configuration file)".into()),
        (with_store("url = 'rediss://h'\ntls = { cert = 'Cargo.toml', key = '/dev' }"), "3:36 [store]: `tls.key`: cannot read `/dev`: it is not a regular file (a relative path is taken from the directory of the configuration file)".into()),
        (with_store("url = 'redis://h'\npassword_file = 'none'"), "3:17 [store]: `password_file`: cannot read `{HERE}/none`: no such file (name a file relative to the configuration file, or a systemd credential)".into()),
        ("[limits]\nclock_drift = 0.3\n".into(), "2:15 [limits]: `clock_drift`: must be between 0 and 0.2, not 0.3 (it is the share by which the rates of two clocks differ: 0.01 is one percent)".into()),
        ("[limits]\nclock_drift = nan\n".into(), "2:15 [limits]: `clock_drift`: must be between 0 and 0.2, not NaN (it is the share by which the rates of two clocks differ: 0.01 is one percent)".into()),
        ("[limits]\nmax_parallel = 0\n".into(), "2:16 [limits]: `max_parallel`: must be between 1 and 1000000, not 0".into()),
    ])
    .collect();
    let here = std::env::current_dir().unwrap().display().to_string();
    let mut failures = String::new();
    for (text, expected) in cases {
        let found = brief(&bad(&text));
        if found != [expected.replace("{HERE}", &here)] {
            writeln!(
                failures,
                "{text}expected {expected}\nfound    {}\n",
                found.join("\n         ")
            )
            .unwrap();
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn every_problem_of_one_value_is_reported() {
    let cases = [
        ("schedule = ['', '0 3 ! * *', 5, '0 25 * * *']", 4),
        ("timezone = 'x'\nschedule = '0 25 * * *'", 2),
        ("env = { 'A B' = 'x', B = 1, SOLOIST_X = '' }", 3),
        ("lease = '1s'\nrenew_every = '5s'", 2),
        ("lease = '1s'\nrenew_every = '5ms'", 2),
        (
            "on_crash = 'x'\nmax_attempts = 2\nretry = { attempts = 2, interval = 5 }",
            3,
        ),
    ];
    for (line, expected) in cases {
        let found = brief(&bad(&with(line)));
        assert_eq!(found.len(), expected, "{line}\n{found:#?}");
    }
    let found = brief(&bad("[jobs.a]\ncommand = ['', 1, \"\\u0000\"]"));
    assert_eq!(found.len(), 3, "{found:#?}");
    // A default that no job uses, and one that every job uses.
    for job in [
        "[jobs.a]\ncommand = 'x'\nschedule = '@daily'\n",
        "[jobs.a]\ncommand = 'x'\n",
        "",
    ] {
        let found = brief(&bad(&format!("[defaults]\nschedule = '0 25 * * *'\n{job}")));
        assert_eq!(found.len(), 1, "{found:#?}");
        assert!(
            found[0].starts_with("2:15 [defaults]: `schedule`: "),
            "{found:#?}"
        );
    }
}

#[test]
fn a_wrong_default_is_reported_once_and_nothing_is_concluded_from_it() {
    let jobs = "[jobs.a]\ncommand = 'x'\n[jobs.b]\ncommand = 'x'\n";
    let text = format!(
        "[defaults]\ntimezone = 'Nowhere/Nowhere'\nschedule = '0 3 * * *'\nlease = '1s'\n{jobs}"
    );
    let found = brief(&bad(&text));
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(
        found[0].starts_with("2:12 [defaults]: `timezone`: unknown time zone"),
        "{found:#?}"
    );
    assert!(
        found[1].starts_with("4:9 [defaults]: lease (1s) is too short for the store's timeout"),
        "{found:#?}"
    );
    // A wrong `password_file` is not a missing one.
    let found = brief(&bad(&with_store(
        "url = 'redis://h'\nusername = 'me'\npassword_file = 1",
    )));
    assert_eq!(found.len(), 1, "{found:#?}");
    // A wrong `lease` is not also too short for its `renew_every`.
    let found = brief(&bad(&with("lease = 'x'\nrenew_every = '1h'")));
    assert_eq!(found.len(), 1, "{found:#?}");
    // Defaults are checked even without a job.
    let found = brief(&bad("[defaults]\nlease = '1s'\n"));
    assert_eq!(found.len(), 1, "{found:#?}");
}

#[test]
fn a_wrong_schedule_is_marked_inside_its_string() {
    let bad_field = |text: &str| {
        let report = bad(text);
        let problem = &report.problems()[0];
        assert_eq!(report.problems().len(), 1, "{report}");
        assert!(
            problem.message.starts_with("job `a`: `schedule`: "),
            "{report}"
        );
        (problem.line, problem.column.unwrap())
    };
    let (line, column) = bad_field(&with("schedule = ['0 3 * * *', '0 3 ! * *']"));
    assert_eq!(line, Some(3));
    // The mark is inside the second string, wherever the schedule's own parser puts it.
    assert!((26..37).contains(&column), "{column}");
    // The mark is the whole string if the file does not have the value literally.
    assert_eq!(
        bad_field(&with("schedule = \"0 3 \\u0021 * *\"")),
        (Some(3), 12)
    );
}

#[test]
fn variables_are_expanded_in_store_strings_only() {
    let url = |text: &str| match good(&with_store(&format!("url = '{text}'"))).store.url {
        StoreUrl::Redis(url) => url.expose().to_owned(),
        other => panic!("{other}"),
    };
    assert_eq!(url("redis://${HOST}:6379"), "redis://redis.example:6379");
    assert_eq!(url("redis://${NONE:-fallback}"), "redis://fallback");
    assert_eq!(url("redis://${EMPTY:-fallback}"), "redis://fallback");
    assert_eq!(url("redis://:$${x}$y@h"), "redis://:${x}$y@h");
    let config = good(&with("description = '${NONE}'\nenv = { A = '${NONE}' }"));
    assert_eq!(job(&config, "a").env["A"], "${NONE}");

    let found = brief(&bad(&with_store(
        "url = \"redis://${NONE}:${1X}/${\"\nnamespace = \"${NONE}\"\n",
    )));
    assert_eq!(
        found,
        [
            "2:16 [store]: `url`: the environment variable `NONE` is not set (set it, or give a default: `${NONE:-default}`)",
            "2:24 [store]: `url`: not the name of an environment variable (letters, digits and `_`: `${NAME}` or `${NAME:-default}`)",
            "2:30 [store]: `url`: `${` without `}` (write `${NAME}`, or `$${` for the characters themselves)",
            "3:14 [store]: `namespace`: the environment variable `NONE` is not set (set it, or give a default: `${NONE:-default}`)",
        ]
    );
}

#[test]
fn no_password_is_shown_whatever_goes_wrong() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("pw"), "hunter2\n").unwrap();
    std::fs::write(dir.path().join("vars"), "A=1\nhunter2\nB C=hunter2\n").unwrap();
    let path = dir.path().join("jobs.toml");
    let lines = [
        "url = 'redis://:hunter2@host:99999'",
        "url = 'redis://me:hunter2@host/x'",
        "url = \"redis://me:hun'hunter2@host/x\"",
        "url = 'redis://me:hunter2 @host'",
        "url = 'redis:/me:hunter2@host'",
        "url = 'hunter2'\nurl = 'redis://:hunter2@host'",
        "url = 'redi://me:hunter2@host' # nothing",
        "url = redis://me:hunter2@host",
        "url = \"redis://me:hunter2@host\nnamespace = 1",
        "url = 'redis+unix:///s?pass=hunter2&x=1'",
        "url = 'redis://host/0?pass=hunter2'",
        "url = '${SECRET_URL}'",
        "url = '${NONE}://me:${NONE:-hunter2}@host'",
        "timeout = '${WORD}'",
        "namespace = '{${WORD}}'",
        "retry = { backoff = '${WORD}' }",
        "url = '${WORD}:x'",
        "password = 'hunter2'",
        "password = hunter2",
        "password = \"\"\"hunter2\"\"\"\nPASS_WORD = '''\nhunter2'''",
        "secret = 'hunter2",
        "url = 'redis://me:hunter2@host'\npassword_file = 'pw'\nusername = 'x'\ntimeout = 1",
        "url = 'redis://host'\npassword_file = 'pw'\n[jobs.x]\ncommand = 'x'\nenv_file = 'vars'",
        "url = 'memory:'\n[jobs.x]\ncommand = 'x'\nenv = { DB_PASSWORD = 'hunter2', X = 1 }",
    ];
    for (n, line) in lines.into_iter().enumerate() {
        let Err(report) = parse(&with_store(line), &path, &environment) else {
            panic!("accepted: {line}")
        };
        let all = format!(
            "{report}{report:?}{}",
            serde_json::to_string(report.problems()).unwrap()
        );
        // A bare word is not a password; in the other cases it is.
        if n != 5 {
            assert!(!all.contains("hunter2"), "{line}\n{all}");
        }
    }
    let good = parse(
        &with_store("url = 'redis://me:hunter2@host'"),
        &path,
        &environment,
    )
    .unwrap();
    assert!(!format!("{good:?}").contains("hunter2"), "{good:?}");
    let good = parse(
        &with_store("url = 'redis://host'\npassword_file = 'pw'"),
        &path,
        &environment,
    )
    .unwrap();
    assert!(!format!("{good:?}").contains("hunter2"), "{good:?}");
    assert_eq!(good.store.password.unwrap().expose(), "hunter2");
}

/// What separates the parts of a URL, and what people write in its place.
const SEPARATORS: &str = ":/@?&=#;, ";

/// Every URL that differs from `form` in one separator: without it, with another one in its place, or with one more.
fn misspelt(form: &str) -> Vec<String> {
    let mut all = vec![];
    for (at, c) in form.match_indices(|c| SEPARATORS.contains(c)) {
        let (before, after) = (&form[..at], &form[at + c.len()..]);
        all.push(format!("{before}{after}"));
        for other in SEPARATORS.chars() {
            for put in [
                format!("{other}"),
                format!("{other}{c}"),
                format!("{c}{other}"),
            ] {
                all.push(format!("{before}{put}{after}"));
            }
        }
    }
    all
}

/// Nor if a separator is missing, another one, or twice, and the password has a character that a URL cannot have.
#[test]
fn a_misspelt_url_shows_no_password() {
    let secrets = [
        "hunter2 hunter3",
        "hunter2",
        "hunter2;hunter3",
        "hunter2'hunter3",
        "hunter2%40hunter3",
    ];
    let mut shown = vec![];
    for form in [
        "redis://:P@host:6379/0",
        "rediss://me:P@[::1]:6379/0?protocol=resp3",
        "redis+unix:///run/s.sock?pass=P",
        "redis+unix:///run/s.sock?db=1&user=me&pass=P",
        "redis:/me:P@host",
        "redis//me:P@host:6379",
        "redis:/:P@host",
    ] {
        for (url, secret) in misspelt(form)
            .iter()
            .flat_map(|url| secrets.map(|s| (url.replace('P', s), s)))
        {
            let alone = Store::from_url(&url);
            let mut all = format!("{alone:?}");
            if let Ok(store) = &alone {
                all += &store.url.to_string();
                if let Err(e) = crate::LockClient::with_config(store) {
                    all += &format!("{e} {e:?}");
                }
            }
            match read(&format!(
                "[store]\nurl = \"{url}\"\n[jobs.a]\ncommand = 1\n"
            )) {
                Ok(config) => all += &format!("{config:?}"),
                Err(report) => {
                    let json = serde_json::to_string(report.problems()).unwrap();
                    all += &format!("{report} {report:?} {json}");
                }
            }
            if ["hunter2", "hunter3"].iter().any(|part| all.contains(part)) {
                shown.push(format!("{url} ({secret}):\n{all}"));
            }
        }
    }
    assert!(shown.is_empty(), "{}: {}", shown.len(), shown.join("\n\n"));
}

#[test]
fn a_credential_of_systemd_comes_before_a_file_beside_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let credentials = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.toml");
    std::fs::write(dir.path().join("pw"), "beside\r\n").unwrap();
    let text = with_store("url = 'redis://h'\npassword_file = 'pw'");
    let place = credentials.path().display().to_string();
    let env = |name: &str| (name == "CREDENTIALS_DIRECTORY").then(|| place.clone());
    let password = || {
        parse(&text, &path, &env)
            .map(|c| c.store.password.unwrap().expose().to_owned())
            .unwrap()
    };
    assert_eq!(password(), "beside");
    std::fs::write(credentials.path().join("pw"), "credential\n\n").unwrap();
    // Only the last newline is not part of the password.
    assert_eq!(password(), "credential\n");
    for (password, wrong) in [
        ("\n", "the file is empty"),
        ("a\0b", "it contains a NUL byte"),
    ] {
        std::fs::write(credentials.path().join("pw"), password).unwrap();
        let report = parse(&text, &path, &env).unwrap_err().to_string();
        assert!(report.contains(wrong), "{report}");
    }
}

#[test]
fn a_wrong_env_file_is_reported_at_its_own_lines_and_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vars");
    std::fs::write(&file, "GOOD=1\nno value\n\nSOLOIST_X=1\n").unwrap();
    let text = "[defaults]\nenv_file = 'vars'\n[jobs.a]\ncommand = 'x'\n[jobs.b]\ncommand = 'x'\nenv_file = 'vars'\n";
    let report = parse(text, &dir.path().join("jobs.toml"), &environment).unwrap_err();
    let expected = format!(
        "error: `env_file`: expected KEY=VALUE\n--> {0}:2:1\n = help: one variable on each line; `#` starts a comment\n\n\
         error: `env_file`: `SOLOIST_X` is set by soloist itself\n--> {0}:4:1\n = help: use a name that does not start with `SOLOIST_`\n\n\
         2 problems in {1}",
        file.display(),
        dir.path().join("jobs.toml").display()
    );
    assert_eq!(report.to_string(), expected);
}

#[test]
fn a_configuration_without_an_end_is_refused() {
    let report = load(Path::new("/dev/zero"), Sends::All).unwrap_err();
    let message = &report.problems()[0].message;
    assert_eq!(
        message,
        "cannot read the configuration: it is larger than 16MiB"
    );
}

/// As from `<(...)` of a shell.
#[test]
fn a_configuration_may_come_through_a_pipe() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
    let writing = std::thread::spawn(move || {
        use std::io::Write;
        for piece in ["[jobs.a]\n", "schedule = []\n", "command = 'true'\n"] {
            writer.write_all(piece.as_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let config = load(Path::new(&path), Sends::All).unwrap_or_else(|report| panic!("{report}"));
    writing.join().unwrap();
    assert!(config.jobs.contains_key(&JobName::new("a")));
}

#[test]
fn a_file_that_cannot_be_read_is_a_report_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("jobs.toml");
    let report = load(&path, Sends::All).unwrap_err();
    assert!(
        report
            .to_string()
            .contains("cannot read the configuration: no such file"),
        "{report}"
    );
    assert_eq!(
        (report.problems()[0].line, report.problems()[0].column),
        (None, None)
    );
    std::fs::write(&path, b"[jobs.a]\ncommand = '\xff'\n").unwrap();
    assert!(
        load(&path, Sends::All)
            .unwrap_err()
            .to_string()
            .contains("line 2 is not UTF-8")
    );
    std::fs::write(&path, "[jobs.a]\ncommand = 'x'\n").unwrap();
    assert_eq!(load(&path, Sends::All).unwrap().jobs.len(), 1);
}

#[test]
fn a_lease_is_renewed_often_enough_for_the_timeout_of_the_store() {
    let config = good("[store]\ntimeout = '500ms'\n[jobs.a]\ncommand = 'x'\nlease = '2s'\n");
    let lease = *job(&config, "a").lease;
    assert!(lease.renew_every < Duration::from_millis(400), "{lease:?}");
    assert!(
        lease.renew_every + Duration::from_millis(500) < lease.trust / 2,
        "{lease:?}"
    );
    let found = brief(&bad("[store]\ntimeout = '7s'\n[jobs.a]\ncommand = 'x'\n"));
    assert_eq!(
        found,
        [
            "2:11 [store]: lease (15s) is too short for the store's timeout (7s), which must be well below half of the time for which the holder trusts the lease; with this timeout it must be at least 16s400ms (set a longer `lease`, or a shorter `timeout` in `[store]`)"
        ]
    );
}

#[test]
fn equal_schedules_are_shared_unless_they_depend_on_the_job() {
    let text = "[jobs.a]\ncommand='x'\nschedule='0 3 * * THU'\n[jobs.b]\ncommand='y'\nschedule=['1 * * * *', '0 3 * * THU']\n\
                [jobs.c]\ncommand='x'\nschedule='0 3 * * THU'\ntimezone='Asia/Tokyo'\n\
                [jobs.d]\ncommand='x'\nschedule='H 3 * * *'\n[jobs.e]\ncommand='x'\nschedule='H 3 * * *'\n";
    let config = good(text);
    let schedule = |name: &str, n: usize| job(&config, name).schedules[n].clone();
    assert!(Arc::ptr_eq(&schedule("a", 0), &schedule("b", 1)));
    assert!(!Arc::ptr_eq(&schedule("a", 0), &schedule("c", 0)));
    assert!(!Arc::ptr_eq(&schedule("d", 0), &schedule("e", 0)));
}

#[test]
fn digests_tell_what_changed() {
    let digests = |text: &str| {
        let config = good(text);
        let job = job(&config, "a");
        (
            config.digest.clone(),
            job.digest.clone(),
            job.schedule_digest.to_string(),
        )
    };
    let base = "[jobs.a]\ncommand = 'x'\nschedule = '0 3 * * *'\n";
    let before = digests(base);
    // Literal digests: another build or host must compute the same.
    assert_eq!(before, (FIXED.0.into(), FIXED.1.into(), FIXED.2.into()));
    assert_eq!(
        digests(&format!("# a comment\n\n{}", base.replace('\'', "\""))),
        before
    );
    assert_eq!(
        digests(&format!("{base}timezone = 'utc'\ngrace = '10s'\n")),
        before
    );

    let when = [
        "timezone = 'Asia/Tokyo'",
        "dst = { gap = 'skip' }",
        "dst = { overlap = 'both' }",
    ];
    let mut seen = std::collections::HashSet::from([before.1.clone()]);
    for line in when {
        let after = digests(&format!("{base}{line}\n"));
        assert!(seen.insert(after.1), "{line}");
        assert_ne!(after.0, before.0, "{line}");
        assert_ne!(after.2, before.2, "{line}");
    }
    let value = |value: &str| digests(&format!("{base}env = {{ PIN = '{value}' }}\n"));
    assert_eq!(value("1234"), value("4321"), "a digest is no oracle");
    for line in ["description = 'x'", "tags = ['x']"] {
        let after = digests(&format!("{base}{line}\n"));
        assert_eq!((&after.1, &after.2), (&before.1, &before.2), "{line}");
        assert_ne!(after.0, before.0, "{line}");
    }
    // A shell line is not the same as a program of that name.
    assert_ne!(digests(&base.replace("'x'", "['x']")).1, before.1);
    assert_ne!(
        digests(&format!("[store]\nnamespace = 'x'\n{base}")).0,
        before.0
    );
    // The password is not part of the digest.
    let store =
        |password: &str| digests(&format!("[store]\nurl = 'redis://:{password}@h'\n{base}")).0;
    assert_eq!(store("a"), store("b"));
}

const FIXED: (&str, &str, &str) = ("c3b51ff441c3135a", "493606f8dfbb77b1", "80ab7ab1e0f722e2");

#[test]
fn durations_and_sizes_are_read_exactly() {
    let ms = Duration::from_millis;
    let cases = [
        ("250ms", ms(250)),
        ("15s", ms(15_000)),
        ("5m", ms(300_000)),
        ("1h30m", ms(5_400_000)),
        ("2d", ms(172_800_000)),
        ("1d2h3m4s5ms", ms(93_784_005)),
        ("0s", ms(0)),
        ("3650d", Duration::from_secs(3650 * 86_400)),
    ];
    for (text, expected) in cases {
        assert_eq!(crate::model::duration::parse(text), Ok(expected), "{text}");
    }
    for text in [
        "",
        "s",
        "5",
        "5 s",
        "1.5s",
        "-1s",
        "1s1h",
        "1s1s",
        "5sec",
        "3651d",
        "99999999999999999999d",
        "1h30",
        "٣s",
        "5ms ",
    ] {
        assert!(crate::model::duration::parse(text).is_err(), "{text}");
    }
    let sizes = [
        ("64KiB", 65_536),
        ("1MB", 1_000_000),
        ("512", 512),
        ("512B", 512),
        ("2MiB", 2 << 20),
        ("1kB", 1000),
    ];
    for (text, expected) in sizes {
        assert_eq!(value::size(text), Ok(expected), "{text}");
    }
    for text in [
        "",
        "KiB",
        "-1",
        "1.5MiB",
        "1 MiB",
        "1Kib",
        "99999999999999999999",
        "18446744073709551615GiB",
    ] {
        assert!(value::size(text).is_err(), "{text}");
    }
}

fn pieces() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-z_]{1,8} = ",
        Just("[jobs.a]\n".to_owned()),
        Just("[store]\n".to_owned()),
        Just("[defaults]\n".to_owned()),
        Just("command = 'x'\n".to_owned()),
        Just("url = ".to_owned()),
        Just("schedule = ".to_owned()),
        Just("retry = {".to_owned()),
        Just("${".to_owned()),
        Just("'redis://:x@h:1'".to_owned()),
        Just("lease = '1s'\n".to_owned()),
        Just("\"\"\"".to_owned()),
        "[\"'\\[\\]{}=,.#\n\r\t -]{1,3}",
        "[0-9]{1,3}(s|ms|h|KiB)?",
        "\\PC{0,4}",
    ];
    proptest::collection::vec(piece, 0..30).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Any text gives a configuration or a report that can be shown, with places inside the text.
    #[test]
    fn no_text_makes_it_panic(text in prop_oneof![pieces(), any::<String>()]) {
        if let Err(report) = read(&text) {
            prop_assert!(!report.problems().is_empty());
            prop_assert!(report.to_string().contains("jobs.toml"));
            prop_assert!(!report.render(true).is_empty());
            for problem in report.problems() {
                prop_assert!(problem.line.is_none_or(|line| line >= 1 && line <= text.split('\n').count()));
            }
        }
    }

    #[test]
    fn no_duration_or_size_makes_it_panic(text in "[0-9]{0,25}(ms|s|m|h|d|KiB|ü|\\.)?[0-9a-z]{0,4}") {
        if let Ok(d) = crate::model::duration::parse(&text) {
            prop_assert_eq!(crate::model::duration::parse(&crate::model::duration::show(d)), Ok(d));
        }
        let _ = value::size(&text);
    }
}

#[test]
fn the_example_of_the_documentation_is_right() {
    let page = include_str!("../../docs/configuration.md");
    let example = page
        .split("```toml\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    assert_eq!(good(example).jobs.len(), 1);
}

/// The tables of the page are those of the keys. `SOLOIST_WRITE_DOCS=1 cargo test --lib the_documentation_has` writes
/// them.
#[test]
fn the_documentation_has_a_row_for_every_key() {
    let page = include_str!("../../docs/configuration.md");
    let mut written = String::new();
    let mut named = Vec::new();
    let mut lines = page.split_inclusive('\n').peekable();
    while let Some(line) = lines.next() {
        written.push_str(line);
        let Some(what) = line.strip_prefix("<!-- keys ") else {
            continue;
        };
        let what = what.trim_end().strip_suffix(" -->").unwrap();
        let (of, range) = what.split_once(": ").unwrap_or((what, ""));
        let keys = match of {
            "store" => keys::Store::keys(),
            "limits" => keys::Limits::keys(),
            "http" => keys::Http::keys(),
            "notify" => keys::Notify::keys(),
            "job" => keys::Job::keys(),
            _ => panic!("{line}"),
        };
        let place = |name: &str| keys.iter().position(|key| key.name == name);
        let (first, last) = match range.split_once(" to ") {
            Some((first, last)) => (place(first).unwrap(), place(last).unwrap()),
            None => (0, keys.len() - 1),
        };
        written.push_str("| key | value | default | meaning |\n|---|---|---|---|\n");
        for key in &keys[first..=last] {
            named.push(format!("{of}.{}", key.name));
            rows(&mut written, "", key);
        }
        while lines.next_if(|line| line.starts_with('|')).is_some() {}
    }
    let all = [
        ("store", keys::Store::NAMES),
        ("limits", keys::Limits::NAMES),
        ("http", keys::Http::NAMES),
        ("notify", keys::Notify::NAMES),
        ("job", keys::Job::NAMES),
    ];
    let all: Vec<String> = all
        .into_iter()
        .flat_map(|(of, names)| names.iter().map(move |name| format!("{of}.{name}")))
        .collect();
    assert_eq!(named, all, "each once, in the order of the reader");
    if std::env::var_os("SOLOIST_WRITE_DOCS").is_some() {
        std::fs::write("docs/configuration.md", &written).unwrap();
    }
    assert!(
        written == page,
        "docs/configuration.md is not what src/config/keys.rs says; write it with SOLOIST_WRITE_DOCS=1"
    );
}

fn rows(page: &mut String, prefix: &str, key: &keys::Key) {
    let absent = match key.absent {
        keys::Absent::Is(toml) => match toml.strip_prefix('\'') {
            Some(text) => format!("`{}`", text.trim_end_matches('\'')),
            None => format!("`{toml}`"),
        },
        keys::Absent::Means(words) => words.to_owned(),
    };
    let cell = |text: &str| match text {
        "" => " ".to_owned(),
        text => format!(" {} ", text.replace('|', "\\|")),
    };
    let name = format!("`{prefix}{}`", key.name);
    let cells = [&name, &key.shape.to_string(), &absent, key.meaning].map(cell);
    writeln!(page, "|{}|", cells.join("|")).unwrap();
    if let form::Shape::Table(keys) = &key.shape {
        for inner in keys {
            rows(page, &format!("{prefix}{}.", key.name), inner);
        }
    }
}

/// Locks, which read no file, have the same defaults as the tables.
#[test]
fn defaults_are_read_and_are_those_of_locks() {
    let config = good("[jobs.a]\ncommand = 'x'\n");
    assert_eq!(config.store, Store::of(config.store.url.clone()));
    // Each call asserts that its defaults have no problem.
    keys::Store::usual();
    keys::StoreRetry::usual();
    keys::Tls::usual();
    keys::Limits::usual();
    keys::Job::usual();
    keys::JobRetry::usual();
    keys::Output::usual();
    keys::DstWords::usual();
}

/// The digest differs for each value of a key, unless the key is only for people.
#[test]
fn every_key_of_a_job_is_part_of_its_digest() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("env");
    std::fs::write(&file, "A=1\n").unwrap();
    let file = format!("'{}'", file.display());
    let others: &[(&str, &str)] = &[
        ("command", "'y'"),
        ("env", "{ A = '1' }"),
        ("env_file", &file),
        ("pass_env", "['A']"),
        ("working_dir", "'/'"),
        ("user", "'x'"),
        ("group", "'x'"),
        ("new_privileges", "true"),
        ("timeout", "'1s'"),
        ("grace", "'1s'"),
        ("success_codes", "[1]"),
        ("output", "{ keep = 1 }"),
        ("schedule", "'@daily'"),
        ("timezone", "'Asia/Tokyo'"),
        ("dst", "{ gap = 'skip' }"),
        ("jitter", "'1s'"),
        ("start_within", "'2m'"),
        ("catch_up", "'none'"),
        ("enabled", "false"),
        ("overlap", "'allow'"),
        ("on_crash", "'rerun'"),
        ("on_state_loss", "'rerun'"),
        ("retry", "{}"),
        ("max_attempts", "4"),
        ("lease", "'16s'"),
        ("renew_every", "'1s'"),
        ("notify", "['ops']"),
        ("heartbeat_url", "'https://a/b'"),
        ("expect_success_within", "'1h'"),
        ("description", "'x'"),
        ("tags", "['x']"),
    ];
    assert_eq!(
        others.iter().map(|(key, _)| *key).collect::<Vec<_>>(),
        keys::Job::NAMES
    );
    let digest = |key: &str, value: &str| {
        let command = if key == "command" {
            ""
        } else {
            "command = 'x'"
        };
        let text = format!(
            "[notify.ops]\ntype = 'webhook'\nurl = 'https://x/y'\n[jobs.a]\n{command}\n{key} = {value}\n"
        );
        job(&good(&text), "a").digest.clone()
    };
    let usual = digest("enabled", "true");
    for (key, value) in others {
        let for_people = [
            "notify",
            "heartbeat_url",
            "expect_success_within",
            "description",
            "tags",
        ];
        let for_people = for_people.contains(key);
        assert_eq!(digest(key, value) == usual, for_people, "{key}");
    }
}

#[test]
fn what_a_file_holds_cannot_steer_the_terminal() {
    let text = "[jobs.\"a\\u001b[2J\"]\ncommand = 'x'\ntimezone = \"\\u001b]0;x\"\n'k\\e[1m' = 1\n# \u{202e}\n";
    let report = bad(text);
    assert!(report.problems().len() >= 3, "{report}");
    assert!(
        !report.render(false).contains(['\u{1b}', '\u{202e}']),
        "{report}"
    );
}
