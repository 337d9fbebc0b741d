//! Tests of the reader: values at its limits, and the hints for wrong words.

use std::{path::Path, time::Duration};

use super::{tests::environment, *};

fn hints(text: &str) -> Vec<String> {
    match parse(text, Path::new("jobs.toml"), &environment) {
        Ok(_) => vec![],
        Err(report) => {
            let problems = report.problems().iter();
            problems
                .map(|p| p.hint.clone().unwrap_or_default())
                .collect()
        }
    }
}

fn with(line: &str) -> String {
    format!("[jobs.a]\ncommand = \"true\"\n{line}\n")
}

fn with_store(line: &str) -> String {
    format!("[store]\n{line}\n")
}

#[track_caller]
fn is_read(text: &str) {
    assert_eq!(hints(text), [""; 0], "{text}");
}

#[track_caller]
fn is_wrong(text: &str) {
    assert_ne!(hints(text), [""; 0], "{text}");
}

#[test]
fn what_is_just_allowed_is_allowed() {
    let name = |n: usize| format!("[jobs.{}]\ncommand = \"true\"\n", "a".repeat(n));
    is_read(&name(100));
    is_wrong(&name(101));
    let namespace = |n: usize| with_store(&format!("namespace = \"{}\"", "a".repeat(n)));
    is_read(&namespace(100));
    is_wrong(&namespace(101));
    is_read(&with_store("timeout = \"10ms\""));
    is_wrong(&with_store("timeout = \"9ms\""));
    is_read(&with("output.keep = \"16MiB\""));
    is_wrong(&with("output.keep = 16777217"));
    let retry = |most: &str| {
        with_store(&format!(
            "retry = {{ interval = \"2s\", max_interval = \"{most}\" }}"
        ))
    };
    is_read(&retry("2s"));
    is_wrong(&retry("1999ms"));
}

/// Names and notations of other programs.
#[test]
fn each_hint_names_what_was_meant() {
    for (line, hint) in [
        ("tz = \"UTC\"", "did you mean `timezone`?"),
        ("cwd = \"/\"", "did you mean `working_dir`?"),
        ("workdir = \"/\"", "did you mean `working_dir`?"),
        ("concurrency = 1", "did you mean `overlap`?"),
        ("retries = 1", "did you mean `retry`?"),
        ("timeout = \"5 millis\"", "write `ms` for milliseconds"),
        ("timeout = \"5secs\"", "write `s` for seconds"),
        ("timeout = \"5min\"", "write `m` for minutes"),
        ("timeout = \"5 hours\"", "write `h` for hours"),
        ("timeout = \"5days\"", "write `d` for days"),
        ("timeout = \"5w\"", "weeks are not supported"),
        ("output.keep = \"1.5MiB\"", "use whole numbers"),
        ("schedule = \"* * X * *\"", "`L`, `LW`, `15W`, `?`"),
        ("schedule = \"* * * * X\"", "`5L`, `5#2`, `?`"),
        ("schedule = \"* * * * MONDAY\"", "did you mean `MON`?"),
        (
            "schedule = \"* * 9-3 * *\"",
            "a range that wraps is a list: `9-31,1-3`",
        ),
    ] {
        let all = hints(&with(line));
        assert!(
            all.iter().any(|h| h.contains(hint)) && !all.is_empty(),
            "{line}: {all:?}"
        );
    }
    is_read(&with("schedule = \"* */30 * * *\""));
    is_read(&with("schedule = \"*/60 * * * *\""));
    is_read(&with("schedule = \"* * 5-5 * *\""));
    is_read(&with("schedule = \"* * * * FRI-SUN\""));
    is_wrong(&with("schedule = \"* * * * 5-1\""));
    for (line, hint) in [
        ("password = \"x\"", "put the password into a file"),
        ("url = \"valkey://a\"", "did you mean `redis:`?"),
        ("url = \"tcp://a\"", "did you mean `redis:`?"),
        ("url = \"valkeys://a\"", "did you mean `rediss:`?"),
        ("url = \"tls://a\"", "did you mean `rediss:`?"),
        ("url = \"unix:///a\"", "did you mean `redis+unix:`?"),
        ("url = \"file:///a\"", "did you mean `sqlite:`?"),
        ("url = \"sqlite3:a\"", "did you mean `sqlite:`?"),
        ("url = \"sqlite:a\\u0000b\"", "use `sqlite:PATH`"),
        ("url = \"://a\"", "use `sqlite:PATH`"),
        ("url = \"/var/a b:c\"", "use `sqlite:PATH`"),
    ] {
        let all = hints(&with_store(line));
        assert!(all.iter().any(|h| h.contains(hint)), "{line}: {all:?}");
    }
    assert_eq!(value::size("3GB").ok(), Some(3_000_000_000));
    assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
    assert_eq!(
        duration("5 m"),
        Err("`5 m` is not a duration; write it without spaces: `5m`".to_owned())
    );
    assert_eq!(show_duration(Duration::from_secs(5400)), "1h30m");
}

#[test]
fn a_report_quotes_what_cannot_be_a_secret() {
    for (table, line, shown) in [
        (
            "[store]",
            r#"url = "redis://me:hunter2@host:6379/0""#,
            Some("url = ..."),
        ),
        (
            "[store]",
            r#"url: redis://me:hunter2@host"#,
            Some("url: ..."),
        ),
        ("[store]", r#"{"password": "hunter2"}"#, None),
        ("[store]", r#"password := "hunter2""#, None),
        (
            "[store]",
            r#"pasword = "hunter2" # a"#,
            Some("pasword = ..."),
        ),
        ("[store]", "hunter2", None),
        ("[store]", "hunter2 5", None),
        ("[store]", r#""hunter2","#, None),
        ("[store]", r#"# password = "hunter2""#, None),
        (
            "[store]",
            r#"username = "me:hunter2""#,
            Some("username = ..."),
        ),
        (
            "[store]",
            r#"password_file = "hunter2""#,
            Some("password_file = ..."),
        ),
        (
            "[store]",
            r#"  timeout = "500ms" # hunter2"#,
            Some(r#"  timeout = "500ms""#),
        ),
        (
            "[store]",
            r#"timeout = "500ms", password = "hunter2""#,
            Some(r#"timeout = "500ms""#),
        ),
        (
            "[store]",
            r#"timeout = "redis://hunter2@h""#,
            Some("timeout = ..."),
        ),
        ("[store]", r#"user = "hunter2""#, Some("user = ...")),
        (
            "[store]",
            r#"retry = { attempts = 3, interval = "2s" }"#,
            Some(r#"retry = { attempts = 3, interval = "2s" }"#),
        ),
        (
            "[store]",
            r#"retry = { attempts = 3, phrase = "hunter2" }"#,
            Some("retry = ..."),
        ),
        ("[store]", "retry.attempts = 3", Some("retry.attempts = 3")),
        ("[store]", r#"retry.phrase = "hunter2""#, Some("retry...")),
        (
            "[store.tls]",
            r#"ca = "all.pem""#,
            Some(r#"ca = "all.pem""#),
        ),
        (
            "[store.unknown]",
            r#"timeout = "hunter2""#,
            Some("timeout = ..."),
        ),
        ("[[store]]", r#"timeout = "hunter2""#, Some("timeout = ...")),
        ("", "[jobs.'a:hunter2']", None),
        ("[store", "hunter2 = 5", None),
        ("[store", "url = 'hunter2'", Some("url = ...")),
        ("", "[store] # hunter2", Some("[store]")),
        ("", "[jobs.a.env]", Some("[jobs.a.env]")),
        ("x = 1", "[jobs.a", Some("[jobs.a")),
        ("x = 1", r#"["hunter2"#, None),
        (
            "[jobs.a]",
            r#"command = ["draw", "--password", "hunter2"]"#,
            Some("command = ..."),
        ),
        (
            "[jobs.a]",
            r#"schedule: "0 0 * * *""#,
            Some("schedule: ..."),
        ),
        (
            "[jobs.a]",
            r#"schedule = ["@at 2026-12-24T18:00", '5#2'] # x"#,
            Some(r#"schedule = ["@at 2026-12-24T18:00", '5#2']"#),
        ),
        (
            "[jobs.a]",
            "description = \"a\tb\" ",
            Some("description = \"a\tb\""),
        ),
        (
            "[jobs.a]",
            r#"env = { API = "hunter2" }"#,
            Some("env = ..."),
        ),
        ("[jobs.a]", r#"env.API = "hunter2""#, Some("env...")),
        (
            "[jobs.a]",
            "pass_env = ['API=hunter2']",
            Some("pass_env = ..."),
        ),
        (
            "[jobs.a.env]",
            r#"timeout = "hunter2""#,
            Some("timeout = ..."),
        ),
        ("[jobs]", r#"a = { command = "true" }"#, Some("a = ...")),
        // Lines within a value.
        (
            "[jobs.a]\ncommand = [\n  'draw',",
            "  'hunter2', # a\n]",
            None,
        ),
        (
            "[jobs.a]\nschedule = [\n  '@daily',",
            "  '@dayly', # hunter2\n]",
            Some("  '@dayly',"),
        ),
        ("[jobs.a]\ncommand = \"\"\"", "hunter2 = 5\n\"\"\"", None),
        (
            "[jobs.a]\nenv = {",
            "  user = 'hunter2',\n}",
            Some("  user = ..."),
        ),
        (
            "[store]\nnamespace = \"\"\"\n[jobs.x]\n\"\"\"",
            "user = 'hunter2'",
            Some("user = ..."),
        ),
    ] {
        let text = format!("{table}\n{line}\n");
        let start = table.len() + 1;
        let end = start + line.find('\n').unwrap_or(line.len());
        let quoted = quote::Quotable::of(&text).line(start..end);
        assert_eq!(quoted.as_deref(), shown, "{text}");
    }
}

/// Reported where the user can change it: in the job, if the job has one of the keys.
#[test]
fn a_contradiction_is_shown_where_it_was_written() {
    for (text, line, place) in [
        (
            "[defaults]\nmax_attempts = 1\nretry.attempts = 2\n[jobs.a]\ncommand = \"true\"\n",
            2,
            "[defaults]",
        ),
        (
            "[defaults]\nmax_attempts = 1\n[jobs.a]\ncommand = \"true\"\nretry.attempts = 2\n",
            5,
            "job `a`",
        ),
        (
            "[jobs.a]\ncommand = \"true\"\nmax_attempts = 1\nretry.attempts = 2\n",
            3,
            "job `a`",
        ),
        (
            "[defaults]\nrenew_every = \"14s\"\n[jobs.a]\ncommand = \"true\"\n",
            2,
            "[defaults]",
        ),
        (
            "[defaults]\nrenew_every = \"3s\"\n[jobs.a]\ncommand = \"true\"\nlease = \"5s\"\n",
            5,
            "job `a`",
        ),
        (
            "[jobs.a]\ncommand = \"true\"\nlease = \"5s\"\nrenew_every = \"4s\"\n",
            4,
            "job `a`",
        ),
    ] {
        let report = parse(text, Path::new("jobs.toml"), &environment).unwrap_err();
        let [problem] = report.problems() else {
            panic!("{report}");
        };
        assert_eq!(problem.line, Some(line), "{report}");
        assert!(problem.message.starts_with(place), "{report}");
    }
}

/// A message names the value that it is about, which may be a URL in the wrong place.
#[test]
fn no_message_shows_the_password_of_a_misplaced_url() {
    const URL: &str = "redis://me:hunter2@h";
    for text in [
        format!("[store]\nurl = 'redis://h'\ntimeout = '{URL}'\n"),
        format!("[store]\nurl = 'redis://h'\npassword_file = '{URL}'\n"),
        format!("[store]\nurl = 'redis://h'\n'{URL}' = 5\n"),
        format!("[jobs.'{URL}']\n"),
        format!("[jobs.a]\ncommand = 'x'\noverlap = '{URL}'\noutput.keep = '{URL}'\n"),
        format!("[jobs.a]\ncommand = 'x'\nschedule = '{URL}'\nuser = '{URL}'\n"),
        format!("[jobs.a]\ncommand = 'x'\nenv_file = '{URL}'\non_crash = '{URL}?pass=hunter2'\n"),
    ] {
        let report = parse(&text, Path::new("jobs.toml"), &environment).unwrap_err();
        let told = format!("{report}{:?}", report.problems());
        assert!(!told.contains("hunter2"), "{told}");
    }
}

/// Of a file with another form, or of a key that stands where its path should.
#[test]
fn no_message_shows_what_was_taken_for_a_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("env");
    std::fs::write(
        &file,
        "DB: hunter2=\nexport 'hunter2' = 1\nSOLOIST_JOB=hunter2\n",
    )
    .unwrap();
    for text in [
        format!("[jobs.a]\ncommand = 'x'\nenv_file = {file:?}\n"),
        "[store]\nurl = 'rediss://h'\ntls = { ca = \"\"\"-----BEGIN\nhunter2\"\"\" }\n".to_owned(),
        format!(
            "[store]\nurl = 'redis://h'\npassword_file = '{}'\n",
            "hunter2".repeat(600)
        ),
        "[jobs]\n'redis://me:hunter2@h' = 5\n".to_owned(),
        "[jobs.a]\ncommand = 'x'\npass_env = ['API=hunter2']\n".to_owned(),
    ] {
        let report = parse(&text, Path::new("/nowhere/jobs.toml"), &environment).unwrap_err();
        let told = format!("{report}{:?}", report.problems());
        assert!(!told.contains("hunter2"), "{told}");
    }
}

#[test]
fn no_message_shows_what_a_variable_has() {
    let env = |name: &str| (name == "PW").then(|| "hunter2".to_owned());
    for line in [
        "password_file = '${PW}'",
        "password_file = \"a/${PW}\"",
        "url = 'rediss://h'\ntls = { ca = '${PW}.pem' }",
        "timeout = '${PW}'",
        "retry = { backoff = '${PW}' }",
        "namespace = '${PW}/'",
        "url = '${PW}'",
    ] {
        let text = format!("[store]\n{line}\n");
        let report = parse(&text, Path::new("/nowhere/jobs.toml"), &env).unwrap_err();
        let told = format!("{report}{:?}", report.problems());
        assert!(!told.contains("hunter2"), "{told}");
    }
}

/// A quarter of a megabyte in one line, with as many secrets as it can have.
#[test]
fn a_message_of_one_long_line_stays_linear() {
    for piece in [
        "://", "://@", "://?", "://\\", "://a:b", "pass=", "pass= a", "\"", "'\n",
    ] {
        let text = piece.repeat((1 << 18) / piece.len());
        assert!(!quote::message(&text).is_empty(), "{piece}");
    }
}

/// No line and no message of the report shows a part of a secret that a newline cuts.
#[test]
fn a_report_about_a_cut_string_shows_no_secret() {
    for text in [
        "[store]\nurl = \"redis://u:hunter2\n",
        "[store]\nurl = \"redis://u:hun\nter2@host/0\"\nnamespace = 1\n",
        "[store]\nurl = 'redis://u:hun\nter2@host/0'\n",
        "[store]\nurl = \"redis://u:hun\nter2 = 5\n@host/0\"\n",
        "[store]\nurl = \"redis://u:hun\n[ter2]\nx@host/0\"\n",
        "[store]\npassword = \"hun\nter2\"\n",
        "[jobs.a]\ncommand = 'x'\nenv = { A = \"hun\nter2\", B = \"x\" }\n",
        "[jobs.a]\ncommand = ['x', \"db://u:hun\nter2@h\"]\nenv.A = \"hun\nter2\"\n",
    ] {
        let report = parse(text, Path::new("jobs.toml"), &environment).unwrap_err();
        let shown = format!("{report}{:?}", report.problems());
        assert!(shown.contains("does not end in this line"), "{shown}");
        assert!(!shown.contains("hun") && !shown.contains("ter2"), "{shown}");
    }
}
