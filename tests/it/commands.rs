//! What operators do to a running fleet, and how it talks to them.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    os::unix::{fs::MetadataExt as _, net::UnixDatagram},
    process::{Command, Stdio},
};

use rustix::process::Signal;
use serde_json::Value;

use crate::http::client::get;
use crate::support::{
    GENEROUS,
    fleet::{Fleet, fleet},
    full_pipe, now_ms, process, skip,
    trace::{ONCE, RERUN},
    wait_for, wait_until,
};

#[test]
fn a_drained_instance_claims_nothing_more_and_finishes_what_it_runs() {
    let mut plan = fleet(2).witness("long", "for=4000 beat=5", "");
    for job in ["a", "b", "c", "d"] {
        plan = plan.witness(job, "for=5", "");
    }
    let mut fleet = plan.start();
    let both = |fleet: &Fleet, since: i64| {
        let runs = fleet.trace().runs();
        let on = |id: &str| (runs.iter()).any(|r| r.instance == id && r.occurrence > since);
        on("i1") && on("i2")
    };
    wait_until("both instances run something", GENEROUS, || both(&fleet, 0));
    let (holder, run) = fleet.wait_holder("long");
    let id = fleet.instances[holder].id.clone();
    let other = &fleet.instances[1 - holder].id;
    fleet.said(&["drain", &id]);
    fleet.wait_log(holder, "drain: it claims nothing more");
    // A run that was granted before may still start.
    let drained = now_ms() + 1000;
    let later = |fleet: &Fleet, id: &str| {
        let runs = fleet.trace().runs();
        runs.iter()
            .filter(|r| r.instance == id && r.occurrence > drained)
            .count()
    };
    wait_until("the other one runs what is due", GENEROUS, || {
        later(&fleet, other) >= 16
    });
    assert_eq!(later(&fleet, &id), 0, "a drained instance has claimed");
    let status = fleet.json(&["status", "--json"]);
    let draining: Vec<&Value> = (status["instances"].as_array().expect("instances").iter())
        .filter(|i| i["draining"] == true)
        .map(|i| &i["instance"])
        .collect();
    assert_eq!(draining, [id.as_str()]);
    let finished = |fleet: &Fleet| fleet.trace().runs().into_iter().find(|r| r.run == run.run);
    wait_until("what it ran came to its own end", GENEROUS, || {
        finished(&fleet).is_some_and(|r| r.ended)
    });
    fleet.said(&["undrain", &id]);
    wait_until("both run something again", GENEROUS, || {
        both(&fleet, drained)
    });
    fleet.stop();
    fleet.judge(ONCE, &["a", "b", "c", "d", "long"], None);
}

/// People look for a trigger where they put it in.
#[test]
fn a_trigger_that_all_drained_instances_miss_is_found_at_its_time() {
    let fleet = fleet(2)
        .job("rare", "command = \"true\"\nstart_within = \"1s\"")
        .job("often", "command = \"true\"\nschedule = \"@every 1s\"")
        .start();
    fleet.wait_record("often", "succeeded");
    for i in 0..2 {
        fleet.said(&["drain", &fleet.instances[i].id]);
        fleet.wait_log(i, "drain: it claims nothing more");
    }
    let key = ["trigger", "rare", "--key", "k"];
    fleet.said(&key);
    let put_in = now_ms();
    let why = fleet.said(&["why", "rare"]);
    let waits = "It is a trigger that no instance has started yet: all live instances drain";
    assert!(why.contains(waits), "{why}");
    wait_until("its time is over", GENEROUS, || now_ms() > put_in + 3000);
    fleet.said(&["undrain", "i1"]);
    let record = fleet.wait_record("rare", "missed");
    let at = record["occurrence"].as_str().expect("an instant");
    let error = record["error"].as_str().expect("a reason");
    assert!(error.contains(": no instance could start it"), "{error}");
    // An instance writes its decisions down once a second.
    let why = || fleet.said(&["why", "rare", at]);
    wait_until("the decision is recorded", GENEROUS, || {
        why().contains("recorded it as missed")
    });
    let why = why();
    assert!(why.contains("did not claim it: draining"), "{why}");
    assert!(!why.contains("recorded no decision"), "{why}");
    let at_ms = at.parse::<jiff::Timestamp>().expect("an instant");
    let late = at_ms.as_millisecond() - put_in;
    assert!(late < 1000, "{late} ms after the trigger");
    // Without the instant it is the latest.
    let latest = fleet.said(&["why", "rare"]);
    assert!(latest.contains("it was missed"), "{latest}");
    let again = fleet.said(&key);
    assert!(again.contains(at), "{again}");
}

#[test]
fn an_occurrence_that_finds_no_slot_in_time_says_so() {
    let fleet = fleet(1)
        .limits("max_parallel = 1")
        .job("long", "command = \"sleep 60\"\nschedule = \"@at {soon}\"")
        .job(
            "late",
            "command = \"true\"\nschedule = \"@at {later}\"\nstart_within = \"1s\"",
        )
        .start();
    let record = fleet.wait_record("late", "missed");
    let error = record["error"].as_str().expect("a reason");
    assert!(error.contains("start_within: no slot was free"), "{error}");
}

/// The pause is why, and not that the instance was down: nothing was missed.
#[test]
fn what_comes_late_in_a_pause_is_recorded_as_paused_and_together() {
    let mut fleet = fleet(1)
        .job(
            "busy",
            "command = \"true\"\nschedule = \"@every 1s\"\nstart_within = \"1s\"",
        )
        .start();
    fleet.wait_record("busy", "succeeded");
    fleet.said(&["pause", "busy"]);
    let last = fleet.wait_record("busy", "skipped");
    fleet.instances[0].kill();
    let killed = now_ms();
    wait_until("five instants pass", GENEROUS, || now_ms() > killed + 5500);
    fleet.instances[0].start();
    let several = |r: &Value| r["count"].as_u64() >= Some(4);
    wait_until("what came late is recorded", GENEROUS, || {
        fleet.history("busy").iter().any(several)
    });
    let all = fleet.history("busy");
    let after = |r: &&Value| r["occurrence"].as_str() > last["occurrence"].as_str();
    for r in all.iter().filter(after) {
        assert_eq!(
            (&r["outcome"], &r["error"]),
            (&"skipped".into(), &"paused".into())
        );
    }
    assert_eq!(all.iter().filter(|r| several(r)).count(), 1, "{all:#?}");
}

#[test]
fn cancel_ends_the_run_wherever_it_is_and_nothing_of_it_comes_again() {
    for plan in [fleet(2), fleet(2).sqlite()] {
        let mut fleet = plan
            .default("grace", "\"100ms\"")
            .job(
                "long",
                "command = [\"{witness}\", \"{trace}\", \"for=600000\", \"beat=5\", \"ignore-term\", \"setsid\"]\n\
                 on_crash = \"rerun\"\nretry = { attempts = 3, interval = \"10ms\" }\n",
            )
            .start();
        for round in 1..=2 {
            wait_until("the job is known", GENEROUS, || {
                fleet
                    .cli(&["trigger", "long", "--key", &round.to_string()])
                    .status
                    .success()
            });
            let run = wait_for("the whole tree of a run", GENEROUS, || {
                let run = fleet.trace().runs().pop()?;
                (run.pids.len() == 2 && process::alive(run.root)).then_some(run)
            });
            // The command runs on the other host.
            let from = 1 - fleet.index(&run.instance);
            let told = fleet.instances[from]
                .command()
                .args(["cancel", "long", "--json"])
                .output();
            let told = told.expect("soloist starts");
            assert_eq!(told.status.code(), Some(0), "{told:?}");
            let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
            assert_eq!(
                (&told["ended"], &told["runs"][0]["outcome"]),
                (&true.into(), &"cancelled".into())
            );
            assert!(!run.pids.iter().any(|&pid| process::alive(pid)), "{run}");
            let history = fleet.history("long");
            assert_eq!(history.len(), round, "{history:#?}");
            assert!(
                history
                    .iter()
                    .all(|r| r["outcome"] == "cancelled" && r["attempt"] == 1)
            );
        }
        assert_eq!(
            fleet.said(&["cancel", "long"]),
            "no run of `long` is active\n"
        );
        let skip = fleet.cli(&["skip", "long"]);
        let said = String::from_utf8_lossy(&skip.stderr).into_owned();
        assert_eq!(skip.status.code(), Some(64), "{said}");
        assert!(said.contains("has no schedule"), "{said}");
        fleet.stop();
        fleet.judge(RERUN, &[], None);
    }
}

#[test]
fn people_see_who_asked() {
    let fleet = fleet(1)
        .sqlite()
        .job("job", "command = 'true'\nschedule = '@every 1s'")
        .start();
    fleet.wait_record("job", "succeeded");
    fleet.said(&["pause", "job", "--reason", "moving"]);
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy().into_owned();
    let skipped = fleet.wait_record("job", "skipped");
    let by = skipped["by"].as_str().expect("a name").to_owned();
    assert!(by.ends_with(&format!("@{host}")), "{by}");
    let asked = format!("asked for by {by}");
    let at = skipped["occurrence"].as_str().expect("an instant");
    for (words, said) in [
        (&["status"][..], &*format!("until resumed by {by}: moving")),
        (&["history", "job"], &asked),
        (&["why", "job", at], &asked),
    ] {
        let text = fleet.said(words);
        assert!(text.contains(said), "{words:?}: {text}");
    }
    fleet.said(&["trigger", "job"]);
    let manual = |r: &Value| r["trigger"] == "manual" && r["by"] == *by;
    wait_until("the run says who triggered it", GENEROUS, || {
        fleet.history("job").iter().any(manual)
    });
}

/// cron leaves them alone, so people who come from it have to be told.
#[test]
fn what_a_command_left_in_the_background_is_ended_and_told() {
    let fleet = fleet(1)
        .sqlite()
        .job("early", "command = '(sleep 1000) & echo early'")
        .start();
    wait_until("the job is known", GENEROUS, || {
        fleet.cli(&["trigger", "early"]).status.success()
    });
    let record = fleet.wait_record("early", "succeeded");
    assert_eq!(record["left_processes"], 1, "{record}");
    let words = "ended 1 process that the command left in the background";
    for told in [&["history", "early"], &["why", "early"]] {
        let said = fleet.said(told);
        assert!(said.contains(words), "{told:?}: {said}");
    }
    fleet.wait_log(0, words);
}

#[test]
fn the_output_of_another_hosts_run_is_followed_while_it_goes_on() {
    for plan in [fleet(2), fleet(2).sqlite()] {
        let fleet = plan
            .job(
                "talks",
                "command = 'echo one; until test -e go; do sleep 0.02; done; echo two >&2; exit 3'",
            )
            .start();
        wait_until("the job is known", GENEROUS, || {
            fleet
                .cli(&["trigger", "talks", "--key", "k"])
                .status
                .success()
        });
        let running = wait_for("it runs", GENEROUS, || {
            let status = fleet.json(&["status", "--json"]);
            Some(
                status["jobs"][0]["running"][0]["instance"]
                    .as_str()?
                    .to_owned(),
            )
        });
        let from = 1 - fleet.index(&running);
        let mut following = (fleet.instances[from].command())
            .args(["logs", "talks", "-f"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("soloist starts");
        let mut out = BufReader::new(following.stdout.take().expect("stdout"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        // The command waits for us, so that it is still running.
        assert_eq!(line, "one\n");
        std::fs::write(fleet.file("go"), "").expect("a file");
        let mut rest = String::new();
        out.read_to_string(&mut rest).expect("the rest");
        assert_eq!(rest, "two\n");
        assert!(following.wait().expect("it ends").success());
        fleet.wait_record("talks", "failed");
        assert_eq!(fleet.said(&["logs", "talks"]), "one\ntwo\n");
    }
}

#[test]
fn an_interrupt_lets_runs_finish_as_a_termination_does() {
    let mut fleet = fleet(1).witness("a", "for=1500 beat=5", "").start();
    let (_, run) = fleet.wait_holder("a");
    fleet.instances[0].signal(Signal::INT);
    assert!(fleet.instances[0].wait_end().success());
    let runs = fleet.trace().runs();
    assert!(
        runs.iter().all(|r| r.ended && !process::alive(r.root)),
        "{runs:#?}"
    );
    assert!(runs.iter().any(|r| r.run == run.run));
    assert_eq!(fleet.history("a")[0]["outcome"], "succeeded");
}

/// What a daemon on SQLite writes to its stderr until its job has run.
fn log_of(options: &[&str], change: impl Fn(&mut Command, &std::path::Path)) -> String {
    let mut fleet = fleet(1).sqlite().witness("a", "for=5", "").start();
    let i = &mut fleet.instances[0];
    i.kill();
    let log = i.log.clone();
    std::fs::remove_file(&log).expect("its log");
    i.start_with(|command| {
        command.args(options);
        command.env_remove("JOURNAL_STREAM");
        change(command, &log);
    });
    fleet.wait_more_runs(2);
    fleet.stop();
    fleet.instances[0].log_text()
}

#[test]
fn the_log_has_the_format_that_was_asked_for() {
    // A file is no terminal, and no journal either.
    for options in [
        &[][..],
        &["--log-format", "auto"],
        &["--log-format", "text"],
    ] {
        let text = log_of(options, |_, _| {});
        assert!(
            text.contains(" INFO soloist::holder: started job=a "),
            "{options:?}: {text}"
        );
        assert!(
            !text.contains('\x1b'),
            "{options:?}: colours in a file: {text}"
        );
    }
    let in_variable = |format: &'static str| {
        log_of(&[], move |command, _| {
            command.env("SOLOIST_LOG_FORMAT", format);
        })
    };
    assert!(in_variable("").contains(" started job=a "), "as without it");
    let json = in_variable("json");
    let lines: Vec<Value> = json
        .lines()
        .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("no JSON: {e}: {l}")))
        .collect();
    let started = lines
        .iter()
        .find(|l| l["message"] == "started")
        .expect("its start");
    assert_eq!(
        (&started["job"], &started["level"]),
        (&"a".into(), &"INFO".into()),
        "{started}"
    );
    assert!(
        started["occurrence"].is_string() && started["timestamp"].is_string(),
        "{started}"
    );
    let told = fleet(1)
        .sqlite()
        .start()
        .cli(&["--log-format", "xml", "check"]);
    assert_eq!(told.status.code(), Some(64));
}

/// A journal at the usual place, in a mount namespace that only some commands are in.
struct Journal {
    dir: tempfile::TempDir,
    socket: UnixDatagram,
}

impl Journal {
    /// None where we may not mount.
    fn start() -> Option<Self> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let place = dir.path().join("there/systemd/journal");
        std::fs::create_dir_all(&place).expect("a directory");
        std::fs::create_dir(dir.path().join("absent")).expect("a directory");
        let socket = UnixDatagram::bind(place.join("socket")).expect("a socket");
        socket.set_nonblocking(true).expect("a socket");
        let journal = Self { dir, socket };
        let mut probe = Command::new("true");
        journal.show(&mut probe, true);
        let works = probe.status().is_ok_and(|s| s.success());
        works.then_some(journal)
    }

    /// Makes `command` see this journal, or no journal at all.
    fn show(&self, command: &mut Command, there: bool) {
        let run = self.dir.path().join(if there { "there" } else { "absent" });
        process::show_in_place(command, &run, c"/run");
    }

    fn take(&self) -> Vec<String> {
        let mut found = vec![];
        let mut buffer = vec![0; 64 << 10];
        while let Ok(n) = self.socket.recv(&mut buffer) {
            if n == 0 {
                continue;
            }
            found.push(String::from_utf8_lossy(&buffer[..n]).into_owned());
        }
        found
    }
}

/// As systemd says it of a stream that it connected to the journal.
fn journal_stream(file: &std::path::Path) -> String {
    let stat = std::fs::metadata(file).expect("the file of stderr");
    format!("{}:{}", stat.dev(), stat.ino())
}

#[test]
fn the_journal_is_written_to_when_it_is_there_and_stderr_is_it_or_it_is_asked_for() {
    let Some(journal) = Journal::start() else {
        return skip("no right to mount: the log in the journal");
    };
    let stream = Some("JOURNAL_STREAM");
    for (options, stderr_is_it, there) in [
        (&["--log-format", "journald"][..], None, true),
        (&["--log-format", "auto"], stream, true),
        (&[], stream, true),
        // It is there, and stderr is something else.
        (&["--log-format", "auto"], None, true),
        // Without a journal, the log goes to stderr rather than nowhere.
        (&["--log-format", "journald"], None, false),
        (&["--log-format", "text"], stream, true),
    ] {
        let text = log_of(options, |command, log| {
            journal.show(command, there);
            if let Some(name) = stderr_is_it {
                command.env(name, journal_stream(log));
            }
        });
        let entries = journal.take();
        let asked = options == ["--log-format", "journald"];
        let in_journal =
            there && (asked || stderr_is_it.is_some() && options != ["--log-format", "text"]);
        let context = format!("{options:?} {there}: {text} {entries:?}");
        if in_journal {
            let begun = |what: &str| entries.iter().find(|e| e.contains(what)).expect(&context);
            let started = begun("started `a` for 20");
            assert!(started.contains("PRIORITY\n") && started.contains("F_OCCURRENCE\n"));
            assert!(begun("ended `a`: succeeded after ").contains("F_JOB\n"));
            assert_eq!(text, "", "{context}");
        } else {
            assert!(
                text.contains(" INFO soloist::holder: started job=a "),
                "{context}"
            );
            assert_eq!(entries, [""; 0], "{context}");
        }
    }
}

/// What a command writes to a terminal, stderr and stdout together.
fn on_terminal(fleet: &Fleet, words: &str, env: &[(&str, &str)]) -> String {
    let program = fleet.instances[0].command();
    let words = format!("{} {words}", program.get_program().display());
    let mut script = Command::new("script");
    script
        .args(["-qec", &words, "/dev/null"])
        .env_remove("NO_COLOR")
        // If it is set, terminals are taken to know colours whatever TERM says.
        .env_remove("CI")
        .env("TERM", "xterm")
        .env("SOLOIST_CONFIG", &fleet.instances[0].config)
        .envs(env.iter().copied())
        .stdin(Stdio::null());
    let output = script.output().unwrap_or_else(|e| {
        panic!("cannot start script: {e}; the tests need it (apt-get install bsdutils)")
    });
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The command writes to one stream and to the other in turn, and goes on when the store has what it wrote.
#[test]
fn logs_tell_stderr_from_stdout() {
    const WORDS: [&str; 4] = ["one\n", "TWO\n", "three\n", "FOUR\n"];
    let command = "command = 'echo one; until test -e 1; do sleep 0.02; done; echo TWO >&2; \
        until test -e 2; do sleep 0.02; done; echo three; until test -e 3; do sleep 0.02; done; echo FOUR >&2; \
        until test -e 4; do sleep 0.02; done'";
    for plan in [fleet(1), fleet(1).sqlite()] {
        let fleet = plan.job("talks", command).start();
        wait_until("the job is known", GENEROUS, || {
            let told = fleet.cli(&["trigger", "talks", "--key", "k"]);
            told.status.success()
        });
        let marked = "one\r\n┃ TWO\r\nthree\r\n┃ FOUR\r\n";
        for n in 1..=WORDS.len() {
            wait_until("the store has it", GENEROUS, || {
                fleet.cli(&["logs", "talks"]).stdout == WORDS[..n].concat().as_bytes()
            });
            if n == WORDS.len() {
                // Also while the command runs.
                let env = [("LC_ALL", "C.UTF-8"), ("NO_COLOR", "1")];
                assert_eq!(on_terminal(&fleet, "logs talks", &env), marked);
            }
            std::fs::write(fleet.file(&n.to_string()), "").expect("a file");
        }
        fleet.wait_record("talks", "succeeded");
        assert_eq!(fleet.said(&["logs", "talks"]), WORDS.concat());
        let of = |stream: &str| fleet.said(&["logs", "talks", "--stream", stream]);
        assert_eq!(of("stdout"), "one\nthree\n");
        assert_eq!(of("stderr"), "TWO\nFOUR\n");
        let json = fleet.json(&["logs", "talks", "--json"]);
        assert_eq!(json["output"], WORDS.concat());
        assert_eq!(json["stderr"], serde_json::json!([[4, 8], [14, 19]]));
        let json = fleet.json(&["logs", "talks", "--json", "--stream", "stderr"]);
        assert_eq!(json["output"], "TWO\nFOUR\n");
        let coloured = on_terminal(&fleet, "logs talks", &[("LC_ALL", "C")]);
        assert!(
            coloured.contains("\u{1b}[31m!\u{1b}[0m TWO"),
            "{coloured:?}"
        );
        let raw = on_terminal(&fleet, "logs talks --raw", &[("LC_ALL", "C.UTF-8")]);
        assert_eq!(raw, WORDS.concat().replace('\n', "\r\n"));
    }
}

#[test]
fn colours_are_for_terminals_and_never_with_no_color() {
    let fleet = fleet(1).sqlite().witness("a", "for=5 exit=1", "").start();
    fleet.wait_runs(1);
    fleet.wait_record("a", "failed");
    let wrong = fleet.file("wrong.toml").display().to_string();
    std::fs::write(&wrong, "[jobs.a]\nschedul = 1\n").expect("a file");
    for words in [
        "status".to_owned(),
        "history a".to_owned(),
        format!("--config {wrong} check"),
        "--help".to_owned(),
    ] {
        let coloured = on_terminal(&fleet, &words, &[]);
        assert!(
            coloured.contains("\x1b["),
            "{words}: no colours on a terminal: {coloured}"
        );
        for plain in [("NO_COLOR", "1"), ("TERM", "dumb")] {
            let text = on_terminal(&fleet, &words, &[plain]);
            assert!(!text.contains('\x1b'), "{words} with {plain:?}: {text:?}");
        }
        // No terminal, no colours.
        let piped = fleet.cli(&words.split(' ').collect::<Vec<_>>());
        let text = [piped.stdout, piped.stderr].concat();
        assert!(
            !text.contains(&0x1b),
            "{words}: {}",
            String::from_utf8_lossy(&text)
        );
    }
}

/// The rest of a character may come later; at the end of the output none comes any more.
#[test]
fn a_character_that_a_command_wrote_half_of_is_shown_too() {
    let fleet = fleet(1)
        .sqlite()
        .job("half", "command = \"printf 'good\\\\346\\\\227'\"")
        .start();
    wait_until("the job is known", GENEROUS, || {
        fleet
            .cli(&["trigger", "half", "--key", "k"])
            .status
            .success()
    });
    fleet.wait_record("half", "succeeded");
    for words in ["logs half", "logs half -f", "trigger half --wait"] {
        let shown = on_terminal(&fleet, words, &[]);
        assert!(shown.contains("good\u{fffd}"), "{words}: {shown:?}");
    }
}

/// A daemon on a terminal colours its log, and does not where it must not.
#[test]
fn the_daemons_log_on_a_terminal_is_coloured_but_with_no_color() {
    for (env, coloured) in [(None, true), (Some(("NO_COLOR", "1")), false)] {
        let mut fleet = fleet(1).sqlite().witness("a", "for=5", "").start();
        fleet.instances[0].kill();
        let program = fleet.instances[0].command();
        let words = format!("exec {} run", program.get_program().display());
        let log = fleet.file("terminal");
        let mut child = Command::new("script")
            .args(["-qefc", &words])
            .arg(&log)
            .env_remove("NO_COLOR")
            .env("TERM", "xterm")
            .env("SOLOIST_CONFIG", &fleet.instances[0].config)
            .env("SOLOIST_INSTANCE", "i1")
            .envs(env)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("script starts");
        let text = || std::fs::read_to_string(&log).unwrap_or_default();
        wait_until("it logs a start", GENEROUS, || text().contains("started"));
        // The daemon is the only child of `script`.
        wait_until("it ends", GENEROUS, || {
            for pid in process::children(child.id()) {
                process::signal(pid, Signal::TERM);
            }
            child.try_wait().expect("a child").is_some()
        });
        assert_eq!(text().contains("\x1b["), coloured, "{env:?}: {}", text());
    }
}

#[test]
fn a_log_that_nobody_reads_stops_neither_a_start_nor_the_end() {
    // Each second more than the lines that may wait.
    let loud = "schedule = \"* * * * * *\"\ncommand = \"seq -f %0999g 2000\"";
    let mut fleet = fleet(1)
        .sqlite()
        .http("")
        .witness("a", "for=5", "")
        .job("loud", loud)
        .start();
    fleet.instances[0].kill();
    let again = |fleet: &mut Fleet| {
        let (unread, log) = full_pipe();
        fleet.instances[0].start_with(|command| {
            command.stderr(log);
        });
        fleet.wait_more_runs(3);
        unread
    };
    let unread = again(&mut fleet);
    fleet.instances[0].signal(Signal::TERM);
    assert!(fleet.instances[0].wait_end().success());
    drop(unread);

    let mut log = BufReader::new(again(&mut fleet)).lines();
    let mut until = |text: &str| {
        let line = log.find(|line| line.as_ref().is_ok_and(|line| line.contains(text)));
        line.expect("a line").expect("a line")
    };
    let serves = until("serving HTTP at ");
    let counted = until(" log lines were dropped: nobody read them");
    let reads = std::thread::spawn(move || log.for_each(drop));
    let told: u64 = (counted
        .split_whitespace()
        .find_map(|word| word.parse().ok()))
    .expect("a number");
    let at = serves.rsplit_once("http://").expect("an address").1.trim();
    let metrics = get(at, "/metrics").send().text();
    let metric = |line: &str| {
        line.strip_prefix("soloist_log_lines_dropped_total ")?
            .parse()
            .ok()
    };
    let dropped: u64 = metrics.lines().find_map(metric).expect(&metrics);
    assert!(told > 0 && dropped >= told, "{dropped}: {counted}");
    fleet.stop();
    reads.join().expect("read to the end");
}
