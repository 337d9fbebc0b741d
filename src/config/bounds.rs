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
        ("timeout = \"5 min\"", "write it as `250ms`"),
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
        ("url = \"unix:///a\"", "use `sqlite:PATH`"),
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
        Err(
            "`5 m` is not a duration; write it as `250ms`, `15s`, `5m`, `1h30m` or `2d`".to_owned()
        )
    );
    assert_eq!(show_duration(Duration::from_secs(5400)), "1h30m");
}

#[test]
fn a_report_quotes_what_cannot_be_a_secret() {
    for (table, line, shown) in [
        (
            "[store]",
            r#"url = "redis://me:hunter2@host""#,
            Some("url = ..."),
        ),
        ("[store]", "url: redis://me:hunter2@host", Some("url = ...")),
        ("[store]", r#"{"password": "hunter2"}"#, None),
        ("[store]", r#"password := "hunter2""#, None),
        (
            "[store]",
            r#"pasword = "hunter2" # a"#,
            Some("pasword = ..."),
        ),
        ("[store]", "hunter2 5", None),
        ("[store]", r#"# password = "hunter2""#, None),
        (
            "[store]",
            r#"username = "me:hunter2""#,
            Some("username = ..."),
        ),
        (
            "[store]",
            r#"  timeout = "500ms" # hunter2"#,
            Some(r#"  timeout = "500ms""#),
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
        (
            "[store]",
            r#"retry.phrase = "hunter2""#,
            Some("retry = ..."),
        ),
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
        ("[store", "hunter2 = 5", None),
        ("[store", "url = 'hunter2'", Some("url = ...")),
        ("", "[store] # hunter2", Some("[store]")),
        ("x = ", "[jobs.a]", None),
        (
            "[jobs.a]",
            r#"command = ["draw", "hunter2"]"#,
            Some("command = ..."),
        ),
        (
            "[jobs.a]",
            r#"schedule = ["@at 2026-12-24T18:00", '5#2'] # x"#,
            Some(r#"schedule = ["@at 2026-12-24T18:00", '5#2']"#),
        ),
        (
            "[jobs.a]",
            r#"env = { API = "hunter2" }"#,
            Some("env = ..."),
        ),
        ("[jobs.a]", r#"env.API = "hunter2""#, Some("env = ...")),
        (
            "[jobs.a.env]",
            r#"timeout = "hunter2""#,
            Some("timeout = ..."),
        ),
        ("[jobs]", r#"a = { command = "true" }"#, Some("a = ...")),
        // Lines within a value, and the first of several.
        (
            "[jobs.a]\ncommand = [\n  'draw',",
            "  'hunter2', # a\n]",
            None,
        ),
        ("[jobs.a]\nschedule = [", "  '@dayly', # hunter2\n]", None),
        (
            "[jobs.a]",
            "schedule = [ # hunter2\n  '@dayly']",
            Some("schedule = ..."),
        ),
        ("[jobs.a]\ncommand = \"\"\"", "hunter2 = 5\n\"\"\"", None),
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
        assert!(!shown.contains("hun") && !shown.contains("ter2"), "{shown}");
    }
}
