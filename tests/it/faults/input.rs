//! Configurations and commands that cannot work.

use crate::support::{GENEROUS, fleet::fleet, trace::ONCE, wait_until};

#[test]
fn a_broken_configuration_ends_with_78_and_starts_nothing() {
    let broken = [
        (
            "schedule = \"* * * * * *\"\ncommand = [\"{witness}\", \"{trace}\"]\ntimezon = \"UTC\"",
            "timezone",
        ),
        (
            "schedule = \"* * * * * * * *\"\ncommand = [\"{witness}\", \"{trace}\"]",
            "schedule",
        ),
        ("schedule = \"* * * * * *\"\ncommand = []", "command"),
        (
            "schedule = \"* * * * * *\"\ncommand = [\"{witness}\", \"{trace}\"]\nlease = \"soon\"",
            "lease",
        ),
        (
            "schedule = \"* * * * * *\"\ncommand = [\"{witness}\", \"{trace}\"\n",
            "command",
        ),
    ];
    for (lines, named) in broken {
        let mut fleet = fleet(1)
            .witness("good", "for=5", "")
            .job("bad", lines)
            .start();
        let status = fleet.instances[0].wait_end();
        let log = fleet.instances[0].log_text();
        assert_eq!(status.code(), Some(78), "{lines}: {log}");
        assert!(log.contains("i1.toml"), "the file is named: {log}");
        assert!(log.contains(named), "{named} is named: {log}");
        assert!(
            fleet.trace().runs().is_empty(),
            "nothing was started: {log}"
        );
        assert_eq!(fleet.cli(&["check"]).status.code(), Some(78));
    }
}

#[test]
fn a_missing_configuration_is_an_error_with_its_path() {
    let mut fleet = fleet(1).start();
    fleet.instances[0].kill();
    std::fs::remove_file(&fleet.instances[0].config).expect("remove the configuration");
    fleet.instances[0].start();
    let status = fleet.instances[0].wait_end();
    let log = fleet.instances[0].log_text();
    assert_eq!(status.code(), Some(78), "{log}");
    assert!(log.contains("i1.toml"), "{log}");
}

#[test]
fn commands_that_cannot_start_are_recorded_as_failed_with_the_reason() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let plain = dir.path().join("plain.txt");
    std::fs::write(&plain, "not a program").expect("write a file");
    let each = "schedule = \"* * * * * *\"\n";
    let mut fleet = fleet(3)
        .witness("good", "for=5", "")
        .job(
            "not-found",
            &format!("{each}command = [\"/nowhere/at-all\"]"),
        )
        .job(
            "not-executable",
            &format!("{each}command = [{:?}]", plain.display().to_string()),
        )
        .job(
            "no-directory",
            &format!("{each}command = [\"true\"]\nworking_dir = \"/nowhere/at-all\""),
        )
        .job("shell-code", &format!("{each}command = \"exit 7\""))
        .job("by-signal", &format!("{each}command = \"kill -9 $$\""))
        .start();
    for (job, reasons) in [
        ("not-found", &["/nowhere/at-all", "does not exist"][..]),
        ("not-executable", &["plain.txt", "ermission denied"]),
        ("no-directory", &["/nowhere/at-all", "working"]),
        ("shell-code", &["7"]),
        ("by-signal", &["9"]),
    ] {
        let record = fleet.wait_record(job, "failed");
        let text = record.to_string();
        for reason in reasons {
            assert!(text.contains(reason), "{job}: {reason:?} is in {text}");
        }
    }
    assert_eq!(fleet.wait_record("shell-code", "failed")["exit_code"], 7);
    assert_eq!(fleet.wait_record("by-signal", "failed")["signal"], 9);
    fleet.stop();
    fleet.judge(ONCE, &["good"], None);
}

#[test]
fn an_unknown_user_is_reported_and_nothing_runs_as_somebody_else() {
    let mut fleet = fleet(1)
        .witness("a", "for=5", "user = \"nobody-of-this-name\"")
        .start();
    // Refused with the configuration, or recorded with the first run: never silent, never as another user.
    wait_until("the user is named", GENEROUS, || {
        fleet.instances[0]
            .log_text()
            .contains("nobody-of-this-name")
    });
    if fleet.instances[0].ended().is_none() {
        let record = fleet.wait_record("a", "failed");
        assert!(
            record.to_string().contains("nobody-of-this-name"),
            "{record}"
        );
    }
    assert!(fleet.trace().runs().is_empty());
}
