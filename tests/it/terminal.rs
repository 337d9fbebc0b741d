//! `soloist run` on a terminal, as a person sees it.

use std::{
    fs,
    process::{Command, Stdio},
};

use rustix::process::Signal;

use crate::support::{GENEROUS, process, skip, wait_until};

const JOBS: &str = "[jobs.tick]\nschedule = '@every 1s'\ncommand = 'echo told; echo wrong >&2'\n\
    [jobs.fails]\nschedule = '@every 1s'\ncommand = 'exit 3'\n";

/// What `soloist run` shows on a terminal with these variables, until both jobs have run.
fn shown(variables: &[(&str, &str)], args: &str) -> Option<String> {
    if Command::new("script").arg("--version").output().is_err() {
        skip("there is no program `script`");
        return None;
    }
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join("jobs.toml"), JOBS).expect("a file");
    let screen = dir.path().join("screen");
    let command = format!("exec {} run {args}", env!("CARGO_BIN_EXE_soloist"));
    let mut terminal = Command::new("script");
    terminal
        .args(["-q", "-f", "-e", "-c", &command])
        .arg(&screen)
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    for name in [
        "SOLOIST_CONFIG",
        "SOLOIST_LOG",
        "NO_COLOR",
        "LC_ALL",
        "LC_CTYPE",
        "LANG",
        "JOURNAL_STREAM",
    ] {
        terminal.env_remove(name);
    }
    terminal
        .env("TERM", "xterm-256color")
        .env("TZ", "Asia/Kolkata");
    terminal.envs(variables.iter().copied());
    let mut terminal = terminal.spawn().expect("script starts");
    let text = || fs::read(&screen).map(|b| String::from_utf8_lossy(&b).into_owned());
    wait_until("both jobs have run", GENEROUS, || {
        text().is_ok_and(|t| {
            t.contains("(exit 3)") && t.contains("wrong") || t.contains("exit_code=3")
        })
    });
    // The daemon is told by its terminal's end.
    process::signal(terminal.id(), Signal::TERM);
    let _ = terminal.wait();
    Some(text().expect("a screen").replace('\r', ""))
}

#[test]
fn a_terminal_gets_lines_for_eyes() {
    let Some(text) = shown(&[("LANG", "C.UTF-8")], "") else {
        return;
    };
    let plain = anstream::adapter::strip_str(&text).to_string();
    let lines: Vec<&str> = plain.lines().filter(|l| l.get(2..3) == Some(":")).collect();
    let has = |end: &str| {
        lines
            .iter()
            .any(|l| l.get(8..).is_some_and(|rest| rest.starts_with(end)))
    };
    assert!(has("  tick            │ told"), "{plain}");
    assert!(has("  tick            ┃ wrong"), "{plain}");
    assert!(has("  tick            started for "), "{plain}");
    assert!(has("  fails           failed (exit 3) after "), "{plain}");
    assert!(has("  soloist         soloist "), "{plain}");
    // No ids of runs, no dates, no modules; local time, which is half an hour off from UTC.
    assert!(
        !plain.contains("run=") && !plain.contains("soloist::"),
        "{plain}"
    );
    let minutes = |hour: &str| {
        let mut parts = hour.split(':').map(|n| n.parse::<i64>().expect("a number"));
        parts.next().unwrap_or(0) * 60 + parts.next().unwrap_or(0)
    };
    let utc = soloist::clock::wall_us() / 60_000_000;
    let first = lines.first().and_then(|l| l.get(..8)).expect("a time");
    let apart = (minutes(first) - (utc + 330)).rem_euclid(24 * 60);
    assert!(!(2..=24 * 60 - 30).contains(&apart), "{first}");
    // One colour of its own for each job, and no control sequence but colours.
    let colour = |job: &str| {
        let at = text.find(&format!("m{job}\x1b[")).expect("a coloured name");
        text[..at]
            .rsplit('\x1b')
            .next()
            .expect("a colour")
            .to_owned()
    };
    assert!(colour("tick").starts_with("[38;5;"), "{}", colour("tick"));
    assert_eq!(colour("tick"), colour("tick"));
}

#[test]
fn a_terminal_without_colours_or_utf8_gets_plain_ascii() {
    let Some(text) = shown(&[("LANG", "C"), ("NO_COLOR", "1")], "") else {
        return;
    };
    let ours: Vec<&str> = text.lines().filter(|l| l.get(2..3) == Some(":")).collect();
    assert!(
        ours.iter().any(|l| l.ends_with("  tick            | told")),
        "{text}"
    );
    assert!(
        ours.iter()
            .any(|l| l.ends_with("  tick            ! wrong")),
        "{text}"
    );
    assert!(
        ours.iter().all(|l| l.is_ascii() && !l.contains('\x1b')),
        "{text}"
    );
}

#[test]
fn who_asks_for_another_format_gets_it_on_a_terminal_too() {
    let Some(text) = shown(&[("NO_COLOR", "1")], "--log-format text") else {
        return;
    };
    assert!(
        text.contains("INFO soloist::holder: started job="),
        "{text}"
    );
}
