//! The built binary's command line: what it prints, and its exit codes. Commands that ask the store ask a real
//! redis-server, which is filled through the Store contract; no daemon is needed.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use soloist::{
    clock,
    config::{self, Config, Sends},
    logic::claim::{
        Answer, Claim, DelayedAttempt, OnCrash, Overlap, Register, Registration, Settle,
        Settlement, Target,
    },
    model::{InstanceId, JobName, Marks, Occurrence, Outcome, RunId, RunRecord, Trigger},
    store::{self, Beat, Decision, Info, Store, Tail},
};
use tempfile::TempDir;

use crate::support::{
    GENEROUS,
    proxy::{Fault, Proxy},
    registration,
    server::RedisServer,
};

const JOBS: &str = r#"
[jobs.draw]
schedule = "0 12 * * *"
timezone = "Asia/Shanghai"
command = "true"

[jobs.often]
schedule = "@every 10s"
command = "true"
grace = "1s"
start_within = "1s"

[jobs.off]
schedule = "@daily"
command = "true"
enabled = false
"#;

/// A directory with a jobs.toml.
struct Files {
    dir: TempDir,
}

impl Files {
    fn new(text: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("jobs.toml"), text).expect("jobs.toml is written");
        Self { dir }
    }

    fn command(&self, args: &[&str]) -> Command {
        // A command that waits for ever is to fail its test, not to hang it.
        let mut c = Command::new("timeout");
        c.args(["120", env!("CARGO_BIN_EXE_soloist")])
            .args(args)
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
        for name in ["SOLOIST_CONFIG", "SOLOIST_LOG", "SOLOIST_INSTANCE"] {
            c.env_remove(name);
        }
        c
    }

    fn run(&self, args: &[&str]) -> Ran {
        Ran::of(self.command(args).output().expect("soloist starts"))
    }

    /// Its stdout and stderr are pipes.
    fn spawn(&self, args: &[&str]) -> Child {
        let mut command = self.command(args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("soloist starts")
    }
}

#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn of(o: Output) -> Self {
        Self {
            code: o.status.code(),
            out: String::from_utf8(o.stdout).expect("stdout is UTF-8"),
            err: String::from_utf8(o.stderr).expect("stderr is UTF-8"),
        }
    }
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(
            (self.code, self.err.as_str()),
            (Some(0), ""),
            "{}",
            self.out
        );
        self.out
    }
    #[track_caller]
    fn json(self) -> Value {
        serde_json::from_str(&self.ok()).expect("stdout is JSON")
    }
    /// Asserts that it failed with `code`, with nothing on stdout, and one line and one hint on stderr.
    #[track_caller]
    fn failed(self, code: i32) -> (String, String) {
        assert_eq!(
            (self.code, self.out.as_str()),
            (Some(code), ""),
            "{}",
            self.err
        );
        let lines: Vec<&str> = self.err.lines().collect();
        let [chain, hint] = lines[..] else {
            panic!("not a chain and a hint: {}", self.err);
        };
        let chain = chain.strip_prefix("soloist: ").expect("the chain");
        let hint = hint.strip_prefix("hint: ").expect("the hint");
        (chain.to_owned(), hint.to_owned())
    }
}

/// Whoever asks for the history of a job need not know the passwords with which the daemon tells people.
#[test]
fn what_sends_nothing_needs_no_address_or_key_of_a_channel() {
    const TABLES: &str = r#"
        [store]
        url = 'sqlite:store.db'
        [notify.ops]
        type = "command"
        command = ["true", "${SOLOIST_TEST_OPS}"]
        after = 2
        [notify.pager]
        type = "pagerduty"
        routing_key_file = "no-such-file"
        [notify.hook]
        type = "webhook"
        url = "${SOLOIST_TEST_HOOK}"
        [defaults]
        notify = ["ops", "pager", "hook"]
        heartbeat_url = "https://hc/${SOLOIST_TEST_PING}/{job}"
        [jobs.a]
        schedule = "0 12 * * *"
        command = "true"
    "#;
    let files = Files::new(TABLES);
    assert!(files.run(&["next", "-n", "1"]).ok().contains("12:00"));
    // A command gets no secret of a channel, as ever.
    let hidden = [
        "exec",
        "--lock",
        "a",
        "--",
        "sh",
        "-c",
        "test -z \"$SOLOIST_TEST_HOOK\"",
    ];
    let mut held = files.command(&hidden);
    Ran::of(held.env("SOLOIST_TEST_HOOK", "x").output().expect("runs")).ok();
    for args in [
        &["history", "a"][..],
        &["status"],
        &["why", "a"],
        &["logs", "a"],
        &["pause", "a"],
        &["notify", "undelivered"],
    ] {
        let ran = files.run(args);
        assert_ne!(ran.code, Some(78), "{args:?}: {}", ran.err);
        assert!(!ran.err.contains("SOLOIST_TEST"), "{args:?}: {}", ran.err);
    }
    // A test needs what its own channel needs.
    let mut ops = files.command(&["notify", "test", "ops"]);
    let sent = Ran::of(ops.env("SOLOIST_TEST_OPS", "x").output().expect("runs"));
    assert!(sent.ok().starts_with("sent over `ops` (command)"));
    for (args, lacks) in [
        (&["notify", "test", "ops"][..], &["SOLOIST_TEST_OPS"][..]),
        (&["notify", "test", "pager"], &["no-such-file"]),
        (
            &["check"],
            &[
                "SOLOIST_TEST_OPS",
                "no-such-file",
                "SOLOIST_TEST_HOOK",
                "SOLOIST_TEST_PING",
            ],
        ),
        (&["run"], &["SOLOIST_TEST_HOOK"]),
    ] {
        let ran = files.run(args);
        assert_eq!(ran.code, Some(78), "{args:?}: {}", ran.err);
        for name in lacks {
            assert!(ran.err.contains(name), "{args:?}: {}", ran.err);
        }
        let all = ran.err.matches("error:").count();
        assert!(
            lacks.len() == all || args[0] == "run",
            "{args:?}: {}",
            ran.err
        );
    }
    // Any other mistake in such a table is one for each command.
    let files = Files::new(&TABLES.replace("after = 2", "aftr = 2"));
    assert_eq!(files.run(&["history", "a"]).code, Some(78));
}

/// The message says what to do, and nothing contradicts it.
#[test]
fn a_refused_database_is_told_once() {
    let files = Files::new("[store]\nurl = 'sqlite:.'\n[jobs.a]\ncommand = 'x'\n");
    let ran = files.run(&["status"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(69), ""), "{}", ran.err);
    assert!(
        ran.err.contains("it is a directory; name a file"),
        "{}",
        ran.err
    );
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
}

#[test]
fn next_prints_exactly_what_is_planned_in_the_order_of_time() {
    let files = Files::new(JOBS);
    let list = files
        .run(&[
            "next",
            "draw",
            "-n",
            "2",
            "--from",
            "2026-11-21T04:00:00Z",
            "--json",
        ])
        .json();
    assert_eq!(
        list,
        json!([
            {"job": "draw", "occurrence": "2026-11-22T04:00:00.000Z", "local": "2026-11-22T12:00:00+08:00",
             "schedule_words": "at 12:00, every day"},
            {"job": "draw", "occurrence": "2026-11-23T04:00:00.000Z", "local": "2026-11-23T12:00:00+08:00",
             "schedule_words": "at 12:00, every day"},
        ])
    );
    let all = files
        .run(&["next", "-n", "3", "--from", "1795233591000", "--json"])
        .json();
    let brief: Vec<String> = all
        .as_array()
        .expect("a list")
        .iter()
        .map(|o| format!("{} {}", o["job"], o["occurrence"]))
        .collect();
    assert_eq!(
        brief,
        [
            r#""draw" "2026-11-21T04:00:00.000Z""#,
            r#""often" "2026-11-21T04:00:00.000Z""#,
            r#""often" "2026-11-21T04:00:10.000Z""#,
        ]
    );
    let text = files.run(&["next", "-n", "2"]).ok();
    assert!(
        text.starts_with("JOB    OCCURRENCE            LOCAL TIME "),
        "{text}"
    );
    let words: Vec<&str> = text.lines().skip(3).collect();
    assert!(!words.is_empty(), "{text}");
    for line in words {
        let known = [
            "",
            "draw: at 12:00, every day; Asia/Shanghai",
            "often: every 10s, counted from 1970; UTC",
        ];
        assert!(known.contains(&line), "{text}");
    }
    let one = files.run(&["next", "draw", "-n", "1"]).ok();
    assert!(
        one.starts_with("draw: at 12:00, every day; Asia/Shanghai\nJOB "),
        "{one}"
    );
    assert!(
        !text.contains('\x1b'),
        "colours where no terminal is: {text}"
    );
}

#[test]
fn a_disabled_job_is_not_planned_and_says_so_when_asked_for() {
    let files = Files::new(JOBS);
    let all = files.run(&["next", "-n", "100000", "--from", "0", "--json"]);
    assert!(!all.out.contains("\"off\""));
    let off = files.run(&["next", "off", "-n", "1"]);
    assert_eq!(off.code, Some(0));
    assert!(off.err.contains("disabled"), "{}", off.err);
}

/// Nothing is wrong with a job that only people start.
/// The schedule alone says why nothing ran then.
#[test]
fn why_names_the_field_that_does_not_match_while_the_store_is_away() {
    for url in ["redis://127.0.0.1:1", "sqlite:none.db"] {
        let files = Files::new(&format!(
            "[store]\nurl = '{url}'\ntimeout = '100ms'\n[jobs.a]\ncommand = 'x'\nschedule = '0 3 * * *'\n"
        ));
        let ran = files.run(&["why", "a", "2026-11-20T03:07:00Z"]);
        assert_eq!(ran.code, Some(69), "{}", ran.err);
        assert_eq!(
            ran.out,
            "a 2026-11-20T03:07:00Z\nNothing was planned for that time: the schedule wants the minute to be 0, and this \
             is 03:07 in UTC.\n"
        );
        // As the job's zone has it, as one word or as several.
        let local = [
            &["Fri 2026-11-20 03:07:00 +00:00"][..],
            &["Fri", "2026-11-20", "03:07:00", "+00:00"],
            &["2026-11-20", "03:07"],
        ];
        for words in local {
            let same = files.run(&[&["why", "a"], words].concat());
            assert_eq!((same.code, &same.out), (Some(69), &ran.out), "{words:?}");
        }
        let (chain, hint) = files.run(&["why", "a", "noon"]).failed(64);
        assert_eq!(chain, "`noon` is not understood as an instant");
        assert!(hint.contains("local time in UTC"), "{hint}");
        let planned = files.run(&["why", "a", "2026-11-20T03:00:00Z"]);
        assert_eq!((planned.code, planned.out.as_str()), (Some(69), ""));
    }
}

#[test]
fn a_job_without_a_schedule_is_told_as_such() {
    let files = Files::new(
        "[store]\nurl = 'sqlite:store.db'\n[jobs.by-hand]\ncommand = 'x'\n\
         [jobs.over]\ncommand = 'x'\nschedule = '@at 2020-01-01T00:00:00Z'\n",
    );
    let next = files.run(&["next", "by-hand"]).ok();
    assert_eq!(
        next,
        "`by-hand` has no schedule: it runs only when somebody triggers it (`soloist trigger by-hand`)\n"
    );
    let over = files.run(&["next", "over"]).ok();
    assert!(over.ends_with("nothing is planned any more\n"), "{over}");
    assert_eq!(files.run(&["next"]).ok(), "nothing is planned\n");
    std::fs::write(files.dir.path().join("store.db"), "").expect("a file");
    let (chain, hint) = files.run(&["why", "by-hand"]).failed(64);
    // Before a fleet there is nothing to lose.
    let never =
        "`by-hand` is not known to have run: it has no schedule, and nobody has triggered it";
    assert!(chain.starts_with(never), "{chain}");
    assert_eq!(hint, "`soloist trigger by-hand` starts it now");
}

#[test]
fn check_lists_the_jobs_of_a_good_file() {
    let files = Files::new(JOBS);
    let text = files.run(&["check"]).ok();
    assert!(
        text.starts_with("jobs.toml is valid: 3 jobs (1 disabled), store sqlite:"),
        "{text}"
    );
    let json = files.run(&["check", "--json"]).json();
    assert_eq!(json["ok"], true);
    assert_eq!(json["jobs"][0]["job"], "draw");
    assert_eq!(json["jobs"][0]["timezone"], "Asia/Shanghai");
    assert_eq!(json["jobs"][0]["next"].as_array().map(Vec::len), Some(3));
    assert_eq!(json["jobs"][1]["next"], json!([]));
}

#[test]
fn advice_goes_to_stderr_or_into_the_json_and_can_be_turned_off() {
    let files = Files::new("[jobs.a]\nschedule = '*/7 * * * *'\ncommand = 'x'\n");
    let told = files.run(&["check"]);
    assert_eq!(told.code, Some(0), "{}", told.err);
    assert!(
        told.out.starts_with("jobs.toml is valid: 1 job,"),
        "{}",
        told.out
    );
    for part in [
        "warning: job `a`: `schedule`: `*/7` is not every 7 minutes",
        "jobs.toml:2:13",
        "1 warning in jobs.toml",
    ] {
        assert!(told.err.contains(part), "{}", told.err);
    }
    let json = files.run(&["check", "--json"]).json();
    let advice = &json["advice"][0];
    assert_eq!(json["ok"], true);
    assert_eq!(json["store_asked"], false);
    assert_eq!(
        (&advice["rule"], &advice["line"], &advice["column"]),
        (&json!("uneven_step"), &json!(2), &json!(13))
    );
    assert!(
        advice["hint"]
            .as_str()
            .is_some_and(|h| h.contains("@every 7m"))
    );
    files.run(&["check", "--no-lint"]).ok();
    let json = files.run(&["check", "--no-lint", "--json"]).json();
    assert_eq!(json["advice"], json!([]));
    // To look makes no database, and a problem comes alone.
    assert!(!files.dir.path().join("soloist.db").exists());
    let files = Files::new("[jobs.a]\nschedule = '*/7 * * * *'\ncommand = 1\n");
    let told = files.run(&["check"]);
    assert_eq!(told.code, Some(78));
    assert!(!told.err.contains("warning"), "{}", told.err);
}

#[test]
fn advice_knows_how_long_runs_take_and_how_fast_the_store_is() {
    let mut fleet = Fleet::start();
    let last = due();
    for back in (0..5).rev() {
        let mut held = fleet.claim(
            "often",
            Target::Scheduled(Occurrence(last.0 - back * 10_000)),
        );
        held.took = 12_345;
        held.settle(Outcome::Succeeded, Some(0), None, "");
    }
    let json = fleet.run(&["check", "--json"]).json();
    assert_eq!(json["store_asked"], true);
    assert_eq!(json["advice"].as_array().map(Vec::len), Some(1), "{json}");
    let said = json["advice"][0]["message"].as_str().unwrap_or_default();
    assert!(
        said.contains(
            "a run usually takes 12 s (5 runs), so it lasts beyond the next occurrence, 10 s later"
        ),
        "{said}"
    );
    assert_eq!(
        fleet.run(&["check", "--json", "--no-lint"]).json()["store_asked"],
        false
    );

    let proxy = Proxy::start(fleet.server.port());
    proxy.set(Fault::DelayReplies(Duration::from_millis(200)));
    fleet.files = Files::new(&format!(
        "[store]\nurl = '{}'\n[defaults]\nlease = '2s'\n{JOBS}",
        proxy.url()
    ));
    let told = fleet.run(&["check"]);
    assert_eq!(told.code, Some(0));
    assert!(
        told.err.contains("`lease` (2s): the store takes 2") && told.err.contains("`lease = \""),
        "{}",
        told.err
    );
    // Whatever happens to the store, the file is checked.
    proxy.set(Fault::BlackHoleDown);
    let json = fleet.run(&["check", "--json"]).json();
    assert_eq!(
        (&json["ok"], &json["store_asked"]),
        (&json!(true), &json!(false))
    );
}

#[test]
fn a_broken_file_is_refused_with_all_its_problems() {
    let files = Files::new(
        "[jobs.a]\nschedul = '* * * * *'\ncommand = 'x'\n[jobs.b]\nschedule = 'x'\ncommand = 1\n",
    );
    let told = files.run(&["check"]);
    assert_eq!((told.code, told.out.as_str()), (Some(78), ""));
    assert!(told.err.contains("jobs.toml:2:1"), "{}", told.err);
    assert!(told.err.contains("jobs.toml:5:"), "{}", told.err);
    assert!(told.err.contains("jobs.toml:6:"), "{}", told.err);
    let json = files.run(&["check", "--json"]);
    assert_eq!((json.code, json.err.as_str()), (Some(78), ""));
    let json: Value = serde_json::from_str(&json.out).expect("JSON");
    assert_eq!(json["ok"], false);
    assert_eq!(json["problems"][0]["line"], 2);
    assert!(
        json["problems"].as_array().map_or(0, Vec::len) >= 3,
        "{json}"
    );
    for args in [&["run"][..], &["next"], &["status"], &["trigger", "a"]] {
        let ran = files.run(args);
        assert_eq!((ran.code, ran.out.as_str()), (Some(78), ""), "{args:?}");
    }
}

#[test]
fn the_configuration_is_found_by_option_environment_and_place() {
    let empty = tempfile::tempdir().expect("a temporary directory");
    let files = Files::new(JOBS);
    let path = files.dir.path().join("jobs.toml");
    let path = path.to_str().expect("a UTF-8 path");
    let elsewhere = |args: &[&str], env: Option<&str>| {
        let mut c = files.command(args);
        c.current_dir(empty.path());
        if let Some(v) = env {
            c.env("SOLOIST_CONFIG", v);
        }
        c.output().expect("soloist starts").status.code()
    };
    assert_eq!(elsewhere(&["check", "--config", path], None), Some(0));
    assert_eq!(elsewhere(&["check"], Some(path)), Some(0));
    assert_eq!(
        elsewhere(&["--config", path, "check"], Some("/nowhere")),
        Some(0)
    );
    assert_eq!(elsewhere(&["check"], Some("/nowhere")), Some(78));
    if !Path::new("/etc/soloist/jobs.toml").exists() {
        assert_eq!(elsewhere(&["check"], None), Some(78));
    }
}

/// The next place is not taken for it.
#[test]
fn a_configuration_that_is_a_link_to_nothing_is_an_error() {
    let files = Files::new(JOBS);
    let place = files.dir.path();
    std::fs::rename(place.join("jobs.toml"), place.join("other")).expect("moved");
    std::os::unix::fs::symlink("gone.toml", place.join("jobs.toml")).expect("a link");
    for args in [&["status"][..], &["--config", "jobs.toml", "status"]] {
        let ran = files.run(args);
        assert_eq!(ran.code, Some(78), "{}", ran.err);
        assert!(ran.err.contains("no such file"), "{}", ran.err);
        assert!(ran.err.contains("jobs.toml"), "{}", ran.err);
    }
}

#[test]
fn wrong_usage_exits_64_and_help_0() {
    let files = Files::new(JOBS);
    for args in [
        &[][..],
        &["nonsense"],
        &["next", "-n", "x"],
        &["next", "--from", "noon"],
        &["history", "--outcome", "great"],
        &["pause"],
        &["run", "--instance", "a b"],
        &["check", "--log", "soloist=loudly"],
        &["trigger", "draw", "--key", ""],
    ] {
        let ran = files.run(args);
        assert_eq!(
            (ran.code, ran.out.as_str()),
            (Some(64), ""),
            "{args:?}: {}",
            ran.err
        );
        assert!(!ran.err.is_empty());
    }
    // What is quoted of them is written out, in the parser's colours too.
    let odd = "x\x1b[2J\x1b[31my\n\u{202e}forged: a line of its own";
    let option = format!("--{odd}");
    for args in [
        &[odd][..],
        &["status", &option],
        &["history", &option],
        &["next", "-n", odd],
        &["next", "--from", odd],
        &["history", "--outcome", odd],
        &["trigger", "draw", "--key", odd],
        &["why", "draw", odd],
        &["run", "--instance", odd],
        &["check", "--log", odd],
        &["exec", "--lock", "a", "--once-per", odd, "true"],
        &["--config", odd, "status"],
        &["--config", odd, "check"],
    ] {
        let quoted: String = args.iter().map(|arg| format!(" '{arg}'")).collect();
        let mut terminal = Command::new("script");
        let words = env!("CARGO_BIN_EXE_soloist").to_owned() + &quoted;
        terminal
            .args(["-qec", &words, "/dev/null"])
            .env("TERM", "xterm");
        terminal.current_dir(files.dir.path()).stdin(Stdio::null());
        let shown = Ran::of(terminal.output().expect("script starts"));
        for text in [shown.out, files.run(args).err] {
            let said = text.contains("\\x1b[2J\\x1b[31my\\n\\u{202e}forged");
            let acts = ["\x1b[2J", "\x1b[31my", "\u{202e}"]
                .into_iter()
                .any(|c| text.contains(c));
            assert!(said && !acts, "{args:?}: {text:?}");
        }
    }
    let (chain, hint) = files.run(&["next", "drwa"]).failed(64);
    assert_eq!(chain, "no job `drwa` in jobs.toml");
    assert_eq!(hint, "did you mean `draw`?");
    let help = files.run(&["--help"]).ok();
    for code in ["64", "69", "70", "75", "78"] {
        assert!(help.contains(&format!("  {code}  ")), "{help}");
    }
    assert!(files.run(&["help", "trigger"]).ok().contains("128+N"));
    let version = files.run(&["--version"]).ok();
    assert_eq!(version, format!("soloist {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let files = Files::new(JOBS);
    let mut child = files.spawn(&["next", "-n", "50000"]);
    let mut first = String::new();
    let mut out = BufReader::new(child.stdout.take().expect("stdout"));
    out.read_line(&mut first).expect("a first line");
    assert!(first.starts_with("JOB"));
    drop(out);
    let mut err = String::new();
    child
        .stderr
        .take()
        .expect("stderr")
        .read_to_string(&mut err)
        .expect("stderr is UTF-8");
    assert_eq!(
        (child.wait().expect("it ends").code(), err.as_str()),
        (Some(0), "")
    );
}

#[test]
fn a_store_that_is_not_there_exits_69_with_one_chain_and_one_hint() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let url = format!(
        "redis+unix://{}/none.sock?user=me&pass=",
        dir.path().display()
    );
    let files = Files::new(&format!(
        "[store]\nurl = '{url}secret'\ntimeout = '50ms'\nretry = {{ attempts = 1, interval = '10ms' }}\n{JOBS}"
    ));
    // These need no store, but name it, as all do.
    let store = files.run(&["check", "--json"]).json()["store"].clone();
    assert_eq!(store, format!("{url}***"));
    files.run(&["check"]).ok();
    let next = files.run(&["next", "draw", "-n", "2"]);
    assert_eq!(
        (next.code, next.out.lines().count()),
        (Some(0), 4),
        "{next:?}"
    );
    let unknown = format!(
        "soloist: pauses and skips are not shown: the store at {url}*** is not available: "
    );
    assert!(
        next.err.starts_with(&unknown) && next.err.lines().count() == 1,
        "{}",
        next.err
    );
    for args in [
        &["status"][..],
        &["history"],
        &["logs", "draw"],
        &["why", "draw"],
        &["trigger", "draw"],
        &["trigger", "draw", "--wait"],
        &["pause", "draw"],
        &["resume", "draw"],
        &["skip", "draw"],
        &["cancel", "draw"],
        &["drain"],
        &["undrain"],
    ] {
        let (chain, hint) = files.run(args).failed(69);
        assert!(
            chain.starts_with(&format!("the store at {url}*** is not available: ")),
            "{args:?}: {chain}"
        );
        assert!(hint.contains("the store that jobs.toml names"), "{hint}");
    }
}

/// A store that never answers is waited for a second, not for as long as `timeout` says.
#[test]
fn next_does_not_wait_for_a_store_that_hangs() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = silent.local_addr().expect("an address");
    let files = Files::new(&format!(
        "[store]\nurl = 'redis://{at}'\ntimeout = '10s'\n[defaults]\nlease = '1h'\n{JOBS}"
    ));
    let next = files.run(&["next", "-n", "1", "--json"]);
    assert_eq!(
        next.err,
        "soloist: pauses and skips are not shown: the store does not answer within 1 s\n"
    );
    let list: Value = serde_json::from_str(&next.out).expect("JSON");
    assert_eq!(
        (next.code, list[0].get("passed_over")),
        (Some(0), None),
        "{list}"
    );
}

#[test]
fn to_look_makes_no_database() {
    let files = Files::new(JOBS);
    let (chain, _) = files.run(&["status"]).failed(69);
    assert!(
        chain.ends_with("soloist.db: no instance has run yet"),
        "{chain}"
    );
    let left: Vec<_> = std::fs::read_dir(files.dir.path())
        .expect("a directory")
        .map(|f| f.expect("a file").file_name())
        .collect();
    assert_eq!(left, ["jobs.toml"]);
}

/// The store's answer is lost, and the command asks again: it has used the key itself.
#[test]
fn a_key_that_the_command_itself_has_used_is_not_one_that_was_used_before() {
    let fleet = Fleet::start();
    let config = std::fs::read_to_string(fleet.files.dir.path().join("jobs.toml")).expect("read");
    let proxy = Proxy::start(fleet.server.port());
    let through = config.replace(&fleet.server.url(), &proxy.url());
    assert_ne!(through, config);
    std::fs::write(fleet.files.dir.path().join("through.toml"), through).expect("written");
    let asked = |words: &[&str]| {
        let config = &["--config", "through.toml", "trigger", "draw"][..];
        fleet.run(&[config, words].concat())
    };
    // What the script answers that writes the trigger.
    let look = (fleet.runtime).block_on(async { fleet.store.heartbeat(None).await });
    let incarnation = look.expect("a look").incarnation;
    let done: &'static str = format!("{incarnation}\r\n:1\r\n").leak();
    for (words, new) in [
        (&["--key", "k", "--json"][..], true),
        // Now it was used before, whatever is lost.
        (&["--key", "k", "--json"], false),
        (&["--key", "k2", "--json"], true),
    ] {
        let lost = proxy.struck();
        proxy.set(Fault::LoseReply(done));
        let said = asked(words).json();
        assert_eq!(said["new"], new, "{said}");
        assert_eq!(
            proxy.struck() - lost,
            usize::from(new),
            "the reply was lost"
        );
    }
    proxy.set(Fault::LoseReply(done));
    let said = asked(&["--key", "k3"]).ok();
    assert!(
        said.starts_with("`draw` is triggered with key `k3`; "),
        "{said}"
    );
}

/// Nobody may start it any more, and nobody has recorded that yet.
#[test]
fn a_trigger_whose_time_is_over_is_told_as_such() {
    let fleet = Fleet::start();
    let beside = |args: &[&str]| fleet.run_beside("web-1", true, args);
    let over = "no instance started it within `start_within` (1.00 s); the next one that may start jobs records it as \
                missed: all live instances drain";
    let time_is_over = |key: &str| {
        let asks = ["trigger", "often", "--key", key];
        let said = beside(&asks).ok();
        let new = format!("is triggered with key `{key}`");
        assert!(said.contains(&new), "{said}");
        let before = format!("was triggered with key `{key}` before, and ");
        let said = wait_for("its time is over", || {
            let said = beside(&asks).ok();
            said.contains(&before).then_some(said)
        });
        assert!(said.contains(over), "{said}");
        assert!(said.ends_with("; use another --key to run it\n"), "{said}");
    };
    time_is_over("k");
    // It tells of the newest occurrence, and one that was planned may have come since.
    let mut tries = 1;
    wait_for("`why` tells it", || {
        let why = beside(&["why", "often"]).ok();
        let told = why.contains(over);
        if !told {
            assert!(why.contains("It is undecided: all live"), "{why}");
            tries += 1;
            time_is_over(&format!("k{tries}"));
        }
        told.then_some(())
    });
    let status = beside(&["status"]).ok();
    let count = match tries {
        1 => "1 trigger".to_owned(),
        n => format!("{n} triggers"),
    };
    let note = format!(
        "{count} not started within `start_within`: to be recorded as missed, see `soloist why often`"
    );
    assert!(
        status.contains(&note) && !status.contains("trigger waiting"),
        "{status}"
    );
    let (chain, hint) = beside(&["trigger", "often", "--key", "k", "--wait"]).failed(75);
    assert!(
        chain.starts_with("no instance claimed `often` within "),
        "{chain}"
    );
    assert!(hint.contains("use another --key"), "{hint}");
}

/// What the schedule plans is no more than a plan: `next` says what people have made of it.
#[test]
fn next_says_what_will_not_run() {
    let fleet = Fleet::start();
    // Somebody is up, so that stderr has nothing to say.
    let run = |args: &[&str]| fleet.run_beside("web-1", false, args);
    let plan = run(&["next", "often", "-n", "3", "--json"]).json();
    assert!(
        plan.as_array().is_some_and(|all| all
            .iter()
            .all(|o| o["passed_over"].is_null() && o.get("passed_over").is_some())),
        "{plan}"
    );
    fleet
        .run(&["pause", "draw", "--until", "2h", "--reason", "new disks"])
        .ok();
    run(&["skip", "often", "-n", "100"]).ok();
    let draw = run(&["next", "draw", "-n", "1", "--json"]).json();
    let paused = run(&["status", "--json"]).json()["jobs"][0]["paused"].clone();
    let far = run(&["next", "draw", "-n", "1"]).ok();
    // Only what is planned within the next two hours is paused.
    match draw[0]["passed_over"].is_null() {
        true => assert!(!far.contains("paused"), "{far}"),
        false => {
            let want = json!({"why": "paused", "until": paused["until"], "reason": "new disks"});
            assert_eq!(draw[0]["passed_over"], want);
            assert!(
                far.contains("paused until ") && far.contains(": new disks"),
                "{far}"
            );
        }
    }
    run(&["pause", "draw"]).ok();
    let draw = run(&["next", "draw", "-n", "2"]).ok();
    assert_eq!(
        draw.matches("  paused until resumed by ").count(),
        2,
        "{draw}"
    );
    let often = run(&["next", "often", "-n", "2"]).ok();
    assert_eq!(
        often
            .matches("  will be skipped, as somebody asked\n")
            .count(),
        2,
        "{often}"
    );
    let often = run(&["next", "often", "-n", "1", "--json"]).json();
    assert_eq!(often[0]["passed_over"], json!({"why": "skipped"}));
    // Of the past nothing is said.
    let past = run(&["next", "draw", "-n", "1", "--from", "0"]).ok();
    assert!(!past.contains("paused"), "{past}");
    let nobody = Fleet::start();
    nobody
        .runtime
        .block_on(async { nobody.store.leave(&InstanceId::new("web-1"), 1).await })
        .expect("it leaves");
    let next = nobody.run(&["next", "-n", "1"]);
    assert_eq!(
        next.err,
        "soloist: no instance is up, so no job starts: `soloist run` starts one\n"
    );
    let status = nobody.run(&["status"]).ok();
    assert!(
        status
            .lines()
            .any(|line| format!("soloist: {line}\n") == next.err),
        "{status}"
    );
}

/// A store of its own, and an instance's side of the Store contract.
struct Fleet {
    files: Files,
    server: RedisServer,
    runtime: tokio::runtime::Runtime,
    store: Arc<dyn Store>,
    config: Config,
}

impl Fleet {
    /// One live instance, `web-1`, which has registered all jobs.
    fn start() -> Self {
        let fleet = Self::empty();
        fleet.beat("web-1", &[]);
        fleet.register();
        fleet
    }

    fn empty() -> Self {
        let server = RedisServer::start();
        let files = Files::new(&format!("[store]\nurl = '{}'\n{JOBS}", server.url()));
        let config =
            config::load(&files.dir.path().join("jobs.toml"), Sends::All).expect("a good file");
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let store = runtime.block_on(async { store::open(&config.store).expect("a store") });
        Self {
            files,
            server,
            runtime,
            store,
            config,
        }
    }

    fn run(&self, args: &[&str]) -> Ran {
        self.files.run(args)
    }

    fn beat(&self, instance: &str, running: &[(&str, Occurrence)]) {
        self.runtime
            .block_on(self.heartbeat(instance, running, false));
    }

    /// Acts as an instance that is up while `command` runs, and does nothing.
    fn run_beside(&self, instance: &str, draining: bool, args: &[&str]) -> Ran {
        let beats = async {
            loop {
                self.heartbeat(instance, &[], draining).await;
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        };
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let mut command = self.files.command(&[]);
        let ran = self.runtime.spawn_blocking(move || {
            let out = command.args(args).output().expect("it runs");
            Ran::of(out)
        });
        self.runtime.block_on(async {
            tokio::select! {
                ran = ran => ran.expect("it ends"),
                () = beats => unreachable!(),
            }
        })
    }

    async fn heartbeat(&self, instance: &str, running: &[(&str, Occurrence)], draining: bool) {
        let host = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
        let info = Info {
            host,
            process: 1,
            version: "0.1.0".into(),
            config: self.config.digest.clone(),
            clock_offset_ms: if instance == "web-1" { 2.0 } else { -1200.0 },
            running: running.iter().map(|(j, o)| (JobName::new(j), *o)).collect(),
            draining,
            jobs: 3,
            ..Info::default()
        };
        let look = self.store.heartbeat(None).await.expect("a look");
        let beat = Beat {
            instance: InstanceId::new(instance),
            info,
            quarantine: Duration::from_secs(17),
            open: Some((look.incarnation.clone(), look.value.id.clone())),
        };
        self.store
            .heartbeat(Some(&beat))
            .await
            .expect("a heartbeat");
    }

    fn register(&self) {
        self.runtime.block_on(async {
            let incarnation = self
                .store
                .heartbeat(None)
                .await
                .expect("a look")
                .incarnation;
            let jobs: Vec<Register> = self
                .config
                .jobs
                .values()
                .map(|j| Register {
                    schedule: j.schedule_digest.to_string(),
                    definition: j.digest.clone(),
                    instance: InstanceId::new("web-1"),
                    host: "web".into(),
                    max_attempts: 3,
                    ..registration(&j.name, Some(incarnation.to_string()))
                })
                .collect();
            let answers = self.store.register(&jobs).await.expect("registered").value;
            assert!(answers.iter().all(|(a, _)| *a == Registration::Ready));
        });
    }

    /// The run of a claim that must be granted.
    fn claim(&self, job: &str, target: Target) -> Held<'_> {
        let now = clock::wall_us() / 1000;
        let run = RunId::random();
        let claim = Claim {
            job: JobName::new(job),
            trigger: match target {
                Target::Scheduled(_) => Trigger::Schedule,
                Target::Manual { .. } => Trigger::Manual,
            },
            target,
            known: Occurrence(0),
            missed: vec![],
            run,
            instance: InstanceId::new("web-1"),
            host: "web".into(),
            start_by: now + 60_000,
            lease: 15_000,
            overlap: Overlap::Skip,
            on_crash: OnCrash::Fail,
            max_attempts: 3,
            definition: self.config.jobs[&JobName::new(job)].digest.clone(),
            observed: None,
            holds: vec![],
            cause: None,
        };
        let reply = self
            .runtime
            .block_on(self.store.claim(std::slice::from_ref(&claim)))
            .expect("an answer");
        let Answer::Granted(grant) = &reply.value[0] else {
            panic!("not granted: {:?}", reply.value);
        };
        Held {
            fleet: self,
            claim,
            occurrence: grant.occurrence,
            took: 31,
        }
    }

    fn journal(&self, instance: &str, occurrence: Occurrence, decision: &str, detail: &str) {
        let d = Decision {
            job: JobName::new("often"),
            occurrence,
            instance: InstanceId::new(instance),
            at: occurrence.0 + 3,
            decision: decision.into(),
            detail: detail.into(),
        };
        self.runtime
            .block_on(self.store.journal(&[d]))
            .expect("journalled");
    }

    /// Waits until a trigger is put in, and takes it.
    fn take_trigger(&self, job: &str) -> Held<'_> {
        let name = [JobName::new(job)];
        wait_for("a trigger", || {
            let reply = self
                .runtime
                .block_on(self.store.observe(&name))
                .expect("a state");
            let key = reply.value[0].as_ref()?.triggers.first()?.key.clone();
            Some(self.claim(job, Target::Manual { key, before: None }))
        })
    }
}

struct Held<'a> {
    fleet: &'a Fleet,
    claim: Claim,
    occurrence: Occurrence,
    /// How long the run took, in milliseconds.
    took: i64,
}

impl Held<'_> {
    fn write(&self, at: u64, text: &str) {
        let f = self.fleet;
        f.runtime
            .block_on(f.store.append_output(
                &self.claim.job,
                self.claim.run,
                at,
                text.as_bytes(),
                65_536,
                &Marks::default(),
            ))
            .expect("output is kept");
    }

    fn settle(&self, outcome: Outcome, exit_code: Option<i32>, signal: Option<i32>, output: &str) {
        self.settle_attempt(1, outcome, exit_code, signal, output, None);
    }

    fn settle_attempt(
        &self,
        attempt: u32,
        outcome: Outcome,
        exit_code: Option<i32>,
        signal: Option<i32>,
        output: &str,
        next_attempt: Option<DelayedAttempt>,
    ) {
        let f = self.fleet;
        let now = clock::wall_us() / 1000;
        let record = RunRecord {
            run_id: Some(self.claim.run),
            job: self.claim.job.clone(),
            occurrence: self.occurrence,
            trigger: self.claim.trigger,
            attempt,
            fencing_token: None,
            instance: Some(self.claim.instance.clone()),
            host: Some("web".into()),
            started_at: Some(now - self.took),
            finished_at: Some(now),
            lateness_ms: Some(4),
            duration_ms: Some(self.took),
            outcome,
            exit_code,
            signal,
            output_tail: String::new(),
            output_truncated: false,
            error: None,
            count: 1,
            usage: soloist::model::Usage::default(),
            waited: None,
            by: None,
        };
        let settle = Settle {
            run: self.claim.run,
            record,
            next_attempt,
        };
        let tail = Tail {
            data: output.into(),
            ..Tail::default()
        };
        let reply = f
            .runtime
            .block_on(f.store.settle(&settle, &tail))
            .expect("an answer");
        assert_eq!(reply.value, Settlement::Done);
    }
}

#[track_caller]
fn wait_for<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + GENEROUS;
    loop {
        if let Some(v) = f() {
            return v;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// The newest instant of `@every 10s` that is due, which after a register is not always owed; still it may be claimed.
fn due() -> Occurrence {
    let now = clock::wall_us() / 1000;
    Occurrence(now - now % 10_000)
}

#[test]
fn a_fleet_without_instances_says_that_nothing_is_granted() {
    let fleet = Fleet::empty();
    let text = fleet.run(&["status"]).ok();
    let nobody =
        "no instance is up, so no job starts; `soloist run` starts one, and jobs then wait ";
    assert!(text.contains(nobody), "{text}");
    assert!(text.contains("waits, as said above"), "{text}");
    for args in [
        &["trigger", "draw"][..],
        &["pause", "draw"],
        &["skip", "draw"],
        &["trigger", "draw", "--wait"],
    ] {
        let (chain, _) = fleet.run(args).failed(75);
        assert_eq!(chain, "job `draw` is not registered with the store yet");
    }
    for (args, out) in [
        (&["history"][..], "no runs yet, as far as is known: at 20"),
        (&["history", "--json"], "[]\n"),
    ] {
        let ran = fleet.run(args);
        assert_eq!(ran.code, Some(0));
        assert!(ran.out.starts_with(out), "{}", ran.out);
        assert!(
            ran.err.starts_with(&format!("soloist: {nobody}")),
            "{}",
            ran.err
        );
    }
    let (chain, _) = fleet.run(&["logs", "often"]).failed(64);
    let known = "`often` has not run yet, as far as is known: at 20";
    assert!(chain.starts_with(known), "{chain}");
    let why = fleet.run(&["why", "often"]).ok();
    assert!(
        why.contains(&format!("Nothing is recorded of it yet: {nobody}")),
        "{why}"
    );
    let (_, hint) = fleet.run(&["drain"]).failed(64);
    assert_eq!(hint, "no instance has ever used this store");
}

#[test]
fn status_shows_who_lives_what_runs_and_what_ended() {
    let fleet = Fleet::start();
    let first = fleet.claim("often", Target::Scheduled(due()));
    fleet.beat("web-1", &[("often", first.occurrence)]);
    fleet.beat("web-2", &[]);
    let json = fleet.run(&["status", "--json"]).json();
    assert_eq!(json["epoch"]["open"], true);
    assert_eq!(
        json["store"],
        fleet.run(&["check", "--json"]).json()["store"]
    );
    let web2 = &json["instances"][1];
    assert_eq!(web2["instance"], "web-2");
    assert_eq!(web2["clock_warning"], true);
    assert_eq!(json["instances"][0]["running"][0]["job"], "often");
    let often = &json["jobs"][2];
    assert_eq!(often["job"], "often");
    assert_eq!(often["running"][0]["outcome"], "running");
    assert_eq!(often["running"][0]["run_id"], first.claim.run.to_string());
    assert_eq!(often["other_definition"], false);
    assert_eq!(often["last"], Value::Null);
    first.settle(Outcome::Failed, Some(3), None, "");
    let json = fleet.run(&["status", "--json"]).json();
    assert_eq!(json["jobs"][2]["last"]["outcome"], "failed");
    assert_eq!(json["jobs"][2]["running"], json!([]));
    let text = fleet.run(&["status"]).ok();
    assert!(text.contains("2 live instances on "), "{text}");
    assert!(text.contains("-1.200 s"), "{text}");
    assert!(text.contains("@every 10s  failed"), "{text}");
}

#[test]
fn history_has_the_contracts_keys_and_the_newest_first() {
    let fleet = Fleet::start();
    let one = fleet.claim("often", Target::Scheduled(Occurrence(due().0 - 10_000)));
    one.settle(Outcome::Failed, Some(3), None, "oh\n");
    let two = fleet.claim("often", Target::Scheduled(due()));
    let list = fleet.run(&["history", "--json"]).json();
    assert_eq!(list.as_array().map(Vec::len), Some(2));
    let keys: Vec<&str> = list[1]
        .as_object()
        .expect("a record")
        .keys()
        .map(String::as_str)
        .collect();
    let mut wanted = [
        "run_id",
        "job",
        "occurrence",
        "trigger",
        "attempt",
        "fencing_token",
        "instance",
        "host",
        "started_at",
        "finished_at",
        "lateness_ms",
        "duration_ms",
        "outcome",
        "exit_code",
        "signal",
        "output_tail",
        "output_truncated",
        "error",
        "cpu_ms",
        "peak_memory_bytes",
        "output_bytes",
    ];
    wanted.sort_unstable();
    assert_eq!(keys, wanted);
    assert_eq!(list[0]["outcome"], "running");
    assert_eq!(list[0]["run_id"], two.claim.run.to_string());
    assert_eq!(list[1]["outcome"], "failed");
    assert_eq!(list[1]["occurrence"], one.occurrence.to_string());
    assert_eq!(list[1]["fencing_token"], one.occurrence.0 * 1000 + 1);
    assert_eq!(list[1]["output_tail"], "oh\n");
    let failed = fleet
        .run(&["history", "often", "--outcome", "failed", "--json"])
        .json();
    assert_eq!(failed, json!([list[1]]));
    let newest = fleet.run(&["history", "-n", "1", "--json"]).json();
    assert_eq!(newest, json!([list[0]]));
    let none = fleet.run(&["history", "-n", "0"]);
    assert_eq!(none.code, Some(64));
    assert!(
        none.err.contains("expected a number from 1 to 100000"),
        "{}",
        none.err
    );
    let none = fleet.run(&["history", "draw"]).out;
    let known = "no runs yet, as far as is known: at 20";
    assert!(none.starts_with(known), "{none}");
}

#[test]
fn why_names_each_instances_decision() {
    let fleet = Fleet::start();
    let held = fleet.claim("often", Target::Scheduled(due()));
    let at = held.occurrence;
    held.settle(Outcome::Succeeded, Some(0), None, "");
    fleet.journal("web-1", at, "won", "");
    fleet.journal("web-2", at, "lost", "to web-1");
    let json = fleet
        .run(&["why", "often", &at.0.to_string(), "--json"])
        .json();
    assert_eq!(json["planned"], true);
    assert_eq!(json["runs"][0]["outcome"], "succeeded");
    assert_eq!(json["decisions"][0]["decision"], "won");
    assert_eq!(json["decisions"][1]["instance"], "web-2");
    let text = fleet.run(&["why", "often", &at.to_string()]).ok();
    assert!(text.contains("It ran once on web-1"), "{text}");
    assert!(text.contains("lost to web-1"), "{text}");
    let text = fleet.run(&["why", "often", &(at.0 + 1).to_string()]).ok();
    assert!(
        text.contains("whole multiples of 10s since 1970, and this is 1ms after one"),
        "{text}"
    );
    assert!(text.contains("the one before: "), "{text}");
}

#[test]
fn logs_come_from_any_host_and_follow_until_the_end() {
    let fleet = Fleet::start();
    let held = fleet.claim("often", Target::Scheduled(due()));
    let quiet = fleet.run(&["logs", "often"]);
    assert_eq!((quiet.code, quiet.out.as_str()), (Some(0), ""));
    assert!(
        quiet.err.contains("the run has written nothing yet"),
        "{}",
        quiet.err
    );
    held.write(0, "one\n");
    assert_eq!(fleet.run(&["logs", "often"]).ok(), "one\n");
    let mut following = fleet.files.spawn(&["logs", "often", "-f"]);
    let mut out = BufReader::new(following.stdout.take().expect("stdout"));
    let mut line = String::new();
    out.read_line(&mut line).expect("the first line");
    assert_eq!(line, "one\n");
    held.write(4, "two\n");
    line.clear();
    out.read_line(&mut line).expect("the second line");
    assert_eq!(line, "two\n", "before the run has ended");
    held.settle(Outcome::Succeeded, Some(0), None, "one\ntwo\nthree\n");
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("the rest");
    assert_eq!(rest, "three\n");
    assert_eq!(following.wait().expect("it ends").code(), Some(0));
    let run = held.claim.run.to_string();
    assert_eq!(
        fleet.run(&["logs", "often", &run]).ok(),
        "one\ntwo\nthree\n"
    );
    let json = fleet.run(&["logs", "often", &run[..20], "--json"]).json();
    assert_eq!(json["output"], "one\ntwo\nthree\n");
    assert_eq!(json["done"], true);
    let (chain, _) = fleet.run(&["logs", "often", "ffff"]).failed(64);
    assert_eq!(chain, "the store has no run `ffff` of `often`");
}

#[test]
fn following_a_run_that_wrote_nothing_ends_with_it() {
    let fleet = Fleet::start();
    let held = fleet.claim("often", Target::Scheduled(due()));
    let mut following = fleet
        .files
        .command(&["logs", "often", "-f"])
        .spawn()
        .expect("soloist starts");
    held.settle(Outcome::Succeeded, Some(0), None, "");
    wait_for("logs -f to end", || following.try_wait().expect("a status"))
        .success()
        .then_some(())
        .expect("exit code 0");
}

#[test]
fn trigger_waits_prints_the_output_and_exits_as_the_command_did() {
    let fleet = Fleet::start();
    for (outcome, exit, signal, want) in [
        (Outcome::Failed, Some(3), None, 3),
        (Outcome::Succeeded, Some(0), None, 0),
        (Outcome::TimedOut, None, Some(9), 137),
        (Outcome::LeaseLost, None, Some(9), 79),
    ] {
        let key = format!("k{want}");
        let args = ["trigger", "draw", "--key", &key, "--wait"];
        let child = fleet.files.spawn(&args);
        let held = fleet.take_trigger("draw");
        held.write(0, "hello\n");
        held.settle(outcome, exit, signal, "hello\nworld\n");
        let out = child.wait_with_output().expect("it ends");
        let err = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(want), "{err}");
        assert_eq!(
            String::from_utf8_lossy(&out.stdout),
            "hello\nworld\n",
            "{err}"
        );
        let used = "was used before";
        assert!(!err.contains(used), "{err}");
        // The same key again runs nothing, says so, and shows the same.
        let again = fleet.run(&args);
        assert!(again.err.contains(used), "{}", again.err);
        assert_eq!(
            (again.code, again.out.as_str()),
            (Some(want), "hello\nworld\n")
        );
    }
    let runs = fleet.run(&["history", "draw", "--json"]).json();
    assert_eq!(runs.as_array().map(Vec::len), Some(4));
    assert_eq!(runs[0]["trigger"], "manual");
    let again = fleet
        .run(&["trigger", "draw", "--key", "k3", "--json"])
        .json();
    assert_eq!(
        (&again["new"], &again["key"]),
        (&json!(false), &json!("k3"))
    );
    assert!(again["occurrence"].is_string());
    let record = fleet
        .run(&["trigger", "draw", "--key", "k0", "--json", "--wait"])
        .json();
    assert_eq!(record["run"]["outcome"], "succeeded");
    assert_eq!(record["run"]["output_tail"], "hello\nworld\n");
}

#[test]
fn the_output_of_each_attempt_of_a_trigger_is_shown() {
    let fleet = Fleet::start();
    let mut child = fleet
        .files
        .spawn(&["trigger", "draw", "--key", "k", "--wait"]);
    let first = fleet.take_trigger("draw");
    let next_attempt = DelayedAttempt {
        delay_ms: 0,
        trigger: Trigger::Retry,
    };
    // Too quick to be seen running.
    first.settle_attempt(
        1,
        Outcome::Failed,
        Some(1),
        None,
        "first\n",
        Some(next_attempt),
    );
    let mut out = BufReader::new(child.stdout.take().expect("stdout"));
    let mut line = String::new();
    out.read_line(&mut line).expect("a line");
    assert_eq!(line, "first\n");
    // Not before it has seen the gap between the two attempts.
    let mut err = BufReader::new(child.stderr.take().expect("stderr"));
    let gap = "attempt 1 of draw on web-1 has ended; the next one (retry) is due";
    let mut said = String::new();
    while !said.contains(gap) {
        let read = err.read_line(&mut said).expect("stderr is UTF-8");
        assert!(read > 0, "it ended without a word about attempt 1: {said}");
    }
    let second = fleet.claim(
        "draw",
        Target::Manual {
            key: "k".into(),
            before: None,
        },
    );
    assert_eq!(second.occurrence, first.occurrence);
    second.settle_attempt(2, Outcome::Failed, Some(4), None, "second\n", None);
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("the rest");
    assert_eq!(rest, "second\n");
    assert_eq!(child.wait().expect("it ends").code(), Some(4));
}

#[test]
fn the_output_of_attempts_that_nobody_saw_running_is_shown_too() {
    let fleet = Fleet::start();
    let args = ["trigger", "draw", "--key", "k"];
    fleet.run(&args).ok();
    let next_attempt = Some(DelayedAttempt {
        delay_ms: 0,
        trigger: Trigger::Retry,
    });
    let key = || Target::Manual {
        key: "k".into(),
        before: None,
    };
    let first = fleet.take_trigger("draw");
    first.settle_attempt(1, Outcome::Failed, Some(1), None, "first\n", next_attempt);
    let second = fleet.claim("draw", key());
    second.settle_attempt(2, Outcome::Failed, Some(2), None, "second\n", next_attempt);
    let third = fleet.claim("draw", key());
    third.write(0, "third");
    // It finds the third attempt running.
    let mut child = fleet.files.spawn(&[&args[..], &["--wait"]].concat());
    let mut out = BufReader::new(child.stdout.take().expect("stdout"));
    let mut lines = String::new();
    for _ in 0..2 {
        out.read_line(&mut lines).expect("a line");
    }
    assert_eq!(lines, "first\nsecond\n");
    third.settle_attempt(3, Outcome::Failed, Some(4), None, "third\n", None);
    out.read_to_string(&mut lines).expect("the rest");
    assert_eq!(lines, "first\nsecond\nthird\n");
    assert_eq!(child.wait().expect("it ends").code(), Some(4));
    // It finds all of it over.
    let ran = fleet.run(&[&args[..], &["--wait"]].concat());
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(4), "first\nsecond\nthird\n")
    );
}

#[test]
fn a_trigger_that_nobody_can_take_is_given_up() {
    let fleet = Fleet::start();
    fleet
        .runtime
        .block_on(fleet.store.leave(&InstanceId::new("web-1"), 1))
        .expect("it left");
    let text = fleet.run(&["trigger", "often", "--key", "a"]).ok();
    assert!(text.contains("no instance is up to claim it"), "{text}");
    let ran = fleet.run(&["trigger", "often", "--wait"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(75), ""), "{}", ran.err);
    assert!(
        ran.err.contains("no instance is up; waiting"),
        "{}",
        ran.err
    );
    assert!(
        ran.err.contains("no instance claimed `often` within"),
        "{}",
        ran.err
    );
}

fn given_up(ran: &Ran, reason: &str, hint: &str) {
    assert_eq!((ran.code, ran.out.as_str()), (Some(75), ""), "{}", ran.err);
    for text in [reason, hint] {
        assert!(ran.err.contains(text), "no `{text}` in {}", ran.err);
    }
}

#[test]
fn to_wait_for_a_trigger_ends_when_nobody_claims_it() {
    for (drains, reason, hint) in [
        (true, "every live instance is draining", "soloist undrain"),
        (false, "no live instance claims it", "soloist why often"),
    ] {
        let ran = Fleet::start().run_beside("web-1", drains, &["trigger", "often", "--wait"]);
        given_up(&ran, reason, hint);
    }
}

#[test]
fn to_wait_for_a_run_ends_when_its_instance_and_all_others_are_gone() {
    let fleet = Fleet::start();
    fleet.run(&["trigger", "draw", "--key", "k"]).ok();
    let held = fleet.take_trigger("draw");
    let gone = InstanceId::new("web-1");
    let leave = fleet.store.leave(&gone, 1);
    fleet.runtime.block_on(leave).expect("it left");
    let ran = fleet.run(&["trigger", "draw", "--key", "k", "--wait"]);
    assert_eq!(ran.code, Some(79), "{}", ran.err);
    assert!(
        ran.err.contains("no longer renews its lease"),
        "{}",
        ran.err
    );
    drop(held);
}

#[test]
fn to_wait_for_a_retry_ends_when_the_job_is_paused() {
    let fleet = Fleet::start();
    fleet.run(&["trigger", "often", "--key", "k"]).ok();
    let next_attempt = Some(DelayedAttempt {
        delay_ms: 0,
        trigger: Trigger::Retry,
    });
    let first = fleet.take_trigger("often");
    first.settle_attempt(1, Outcome::Failed, Some(1), None, "", next_attempt);
    fleet.run(&["pause", "often"]).ok();
    let occurrence = first.occurrence.to_string();
    let why = fleet.run(&["why", "often", &occurrence]).ok();
    assert!(
        why.contains("but the job is paused until somebody resumes it"),
        "{why}"
    );
    let ran = fleet.run_beside(
        "web-1",
        false,
        &["trigger", "often", "--key", "k", "--wait"],
    );
    given_up(&ran, "the job is paused", "soloist resume often");
}

#[test]
fn pause_resume_and_skip_are_seen_by_the_whole_fleet() {
    let fleet = Fleet::start();
    let text = fleet
        .run(&["pause", "draw", "--until", "2h", "--reason", "moving disks"])
        .ok();
    assert!(
        text.starts_with("`draw` is paused on all instances until "),
        "{text}"
    );
    let draw = |args: &[&str]| fleet.run(args).json()["jobs"][0].clone();
    let paused = draw(&["status", "--json"])["paused"].clone();
    assert_eq!(paused["reason"], "moving disks");
    assert!(paused["until"].is_string());
    let by = paused["by"].as_str().expect("a name");
    assert!(
        fleet
            .run(&["status"])
            .ok()
            .contains(&format!("(in 1 h 59 min) by {by}: moving disks"))
    );
    let (chain, _) = fleet
        .run(&["pause", "draw", "--until", "2020-01-01T00:00:00Z"])
        .failed(64);
    assert!(chain.contains("not in the future"), "{chain}");
    let resumed = fleet.run(&["resume", "draw", "--json"]).json();
    assert_eq!(
        resumed,
        json!({"job": "draw", "paused": false, "changed": true})
    );
    assert_eq!(draw(&["status", "--json"])["paused"], Value::Null);
    assert_eq!(
        fleet.run(&["resume", "draw"]).ok(),
        "`draw` was not paused\n"
    );
    let skip = fleet.run(&["skip", "draw", "-n", "2", "--json"]).json();
    assert_eq!(skip["occurrences"].as_array().map(Vec::len), Some(2));
    assert_eq!(draw(&["status", "--json"])["skip"], 2);
    assert_eq!(
        fleet.run(&["skip", "draw", "-n", "0"]).ok(),
        "`draw` will skip no occurrence\n"
    );
    let (_, hint) = fleet.run(&["pause", "drow"]).failed(64);
    assert_eq!(hint, "did you mean `draw`?");
}

#[test]
fn drain_takes_the_instance_of_this_host() {
    let fleet = Fleet::start();
    fleet.beat("web-1", &[("often", due())]);
    let text = fleet.run(&["drain"]).ok();
    assert_eq!(
        text,
        "web-1 claims nothing more and finishes often; no other instance is up to run jobs\n"
    );
    let status = fleet.run(&["status", "--json"]).json();
    assert_eq!(status["instances"][0]["draining"], true);
    assert_eq!(fleet.run(&["undrain"]).ok(), "web-1 claims again\n");
    let status = fleet.run(&["status", "--json"]).json();
    assert_eq!(status["instances"][0]["draining"], false);
    fleet.beat("web-2", &[]);
    let (chain, _) = fleet.run(&["drain"]).failed(64);
    assert_eq!(chain, "several instances are up on this host: web-1, web-2");
    let json = fleet.run(&["drain", "web-2", "--json"]).json();
    assert_eq!(
        json,
        json!({"instance": "web-2", "draining": true, "running": []})
    );
    let (_, hint) = fleet.run(&["drain", "web2"]).failed(64);
    assert_eq!(hint, "did you mean `web-2`?");
}
