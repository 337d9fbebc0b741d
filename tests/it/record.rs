//! `--record` and `check-record`: what a fleet wrote down is judged, and a changed record is found out.
//! Every fleet of these tests keeps a record, which `Fleet::judge` checks.

use std::{cell::Cell, path::PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::support::{
    GENEROUS,
    fleet::{Fleet, each_second, fleet},
    process,
    trace::ONCE,
    wait_until,
};

/// A fleet that has run for some seconds and has stopped, with its records.
fn recorded() -> (Fleet, Vec<PathBuf>) {
    let mut fleet = fleet(2).witness("work", "for=300", "").start();
    let files = fleet.instances.iter();
    let files: Vec<PathBuf> = files.map(|i| i.config.with_extension("record")).collect();
    fleet.wait_runs(4);
    fleet.said(&["trigger", "work"]);
    fleet.wait_runs(6);
    let told = || files.iter().any(was_told_of_another);
    wait_until("an instance is told of a run of the other", GENEROUS, told);
    fleet.stop();
    fleet.judge(ONCE, &[], None);
    (fleet, files)
}

/// Whether an instance was told that another runs what it asked for.
fn was_told_of_another(file: &PathBuf) -> bool {
    any_line(file, |line| {
        line.pointer("/answers/answer/claim/running").is_some()
    })
}

fn any_line(file: &PathBuf, wanted: impl Fn(&Value) -> bool) -> bool {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3));
    lines.any(|json| serde_json::from_str(json).is_ok_and(|line| wanted(&line)))
}

/// The exit code of `check-record`, and what it says.
fn check(fleet: &Fleet, files: &[PathBuf]) -> (Option<i32>, String) {
    let files: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
    let mut words = vec!["check-record"];
    words.extend(files.iter().map(String::as_str));
    let output = fleet.cli(&words);
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.code(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[test]
fn a_file_without_an_end_is_no_record() {
    let mut command = std::process::Command::new("sh");
    // With more memory than that it would be aborted.
    command.args(["-c", "ulimit -d 524288 && exec \"$@\"", "sh"]);
    command.args([env!("CARGO_BIN_EXE_soloist"), "check-record", "/dev/zero"]);
    let o = command.output().expect("it starts");
    let said = String::from_utf8_lossy(&o.stderr).into_owned();
    assert_eq!(o.status.code(), Some(65), "{said}");
    assert!(
        said.contains("/dev/zero") && said.contains("a line has more than 64 MiB"),
        "{said}"
    );
}

#[test]
fn a_record_that_was_changed_is_refused() {
    let (fleet, files) = recorded();
    let (code, text) = check(&fleet, &files);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("no promise is broken"), "{text}");
    // The same through a pipe, which is read to its end.
    let script = r#"cat "$@" | "$SOLOIST" check-record /dev/stdin"#;
    let mut piped = std::process::Command::new("sh");
    piped.args(["-c", script, "sh"]).args(&files);
    let piped = piped.env("SOLOIST", env!("CARGO_BIN_EXE_soloist")).output();
    let piped = String::from_utf8_lossy(&piped.expect("sh starts").stdout).into_owned();
    assert_eq!(piped, text);
    // Neither the daemons nor the commands.
    assert!(!text.contains("did not end in order"), "{text}");
    let whole = std::fs::read_to_string(&files[0]).expect("a record");
    let lines: Vec<&str> = whole.lines().collect();
    assert!(lines.len() > 20, "{whole}");
    // Commands write to the same file: two lines of the daemon, one after the other, and not its last.
    let of_daemon = |n: &usize| lines[*n].split(' ').nth(1) == lines[0].split(' ').nth(1);
    let middle = (2..lines.len() - 2)
        .filter(|n| {
            [*n, n + 1].iter().all(of_daemon) && (n + 2..lines.len()).any(|n| of_daemon(&n))
        })
        .min_by_key(|n| n.abs_diff(lines.len() / 2))
        .expect("lines of the daemon");
    let put = |lines: &[&str]| {
        std::fs::write(&files[0], lines.join("\n") + "\n").expect("write the record");
    };
    let mut changed: Vec<(&str, Vec<String>)> = vec![];
    let owned = || lines.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>();
    let mut one_digit = owned();
    let at = one_digit[middle].rfind(|c: char| c.is_ascii_digit());
    let at = at.expect("a digit in the line");
    let digit = if &one_digit[middle][at..=at] == "7" {
        "8"
    } else {
        "7"
    };
    one_digit[middle].replace_range(at..=at, digit);
    changed.push(("digest", one_digit));
    let mut one_less = owned();
    one_less.remove(middle);
    changed.push(("missing or out of place", one_less));
    let mut swapped = owned();
    swapped.swap(middle, middle + 1);
    changed.push(("missing or out of place", swapped));
    let mut twice = owned();
    twice.insert(middle, lines[middle].to_owned());
    changed.push(("missing or out of place", twice));
    let mut foreign = owned();
    foreign.insert(middle, "hello".to_owned());
    changed.push(("not a line of a record", foreign));
    for (says, lines) in changed {
        put(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        let (code, text) = check(&fleet, &files);
        assert_eq!(code, Some(65), "{text}");
        assert!(text.contains(says), "{text}");
    }
    for none in ["", "hello", "[[[["] {
        std::fs::write(&files[0], none).expect("write the record");
        let (code, text) = check(&fleet, &files);
        assert_eq!(code, Some(65), "{text}");
        assert!(text.contains("this is not a record"), "{text}");
    }
    // A process that was killed may not have finished its last line, however long that is; others may go on there.
    let longest = (1..lines.len()).max_by_key(|n| lines[*n].len());
    for last in [lines.len() - 1, longest.expect("a line")] {
        let cut = &lines[last][..lines[last].len() - 9];
        let before = lines[..last].join("\n");
        std::fs::write(&files[0], format!("{before}\n{cut}")).expect("write the record");
        let said = check(&fleet, &files).1;
        assert!(said.contains("without a last line"), "{said}");
        fleet.said(&["pause", "work"]);
        let said = check(&fleet, &files).1;
        assert!(said.contains("without a last line"), "{said}");
    }
}

/// The data is lost, holders put their leases back, and it is lost again before any heartbeat finds the first loss: no
/// record can tell the first one from a state that somebody removed.
#[test]
fn a_loss_that_ends_before_a_heartbeat_finds_it_is_not_taken_for_a_breach() {
    let lines = "overlap = \"skip\"\n";
    let mut fleet = fleet(2).witness("work", "for=60000", lines).start();
    fleet.wait_holder("work");
    let key = "soloist:{work}:state";
    wait_until("the first loss ends unseen", GENEROUS, || {
        wait_until("the job runs and the epoch is found", GENEROUS, || {
            let found: i64 = fleet.server().command(&["EXISTS", "soloist:epoch", key]);
            let runs = fleet.trace().runs();
            found == 2 && runs.iter().any(|r| !r.ended && process::alive(r.root))
        });
        fleet.server().flush();
        wait_until("the holder puts its lease back", GENEROUS, || {
            fleet.server().command::<i64>(&["EXISTS", key]) == 1
        });
        let found: i64 = fleet.server().command(&["EXISTS", "soloist:epoch"]);
        fleet.server().restart_empty();
        found == 0
    });
    // The job is adopted again, and its run goes on.
    fleet.wait_record("work", "skipped");
    fleet.stop_all_now();
    let files = fleet.instances.iter();
    let files: Vec<PathBuf> = files.map(|i| i.config.with_extension("record")).collect();
    let (code, text) = check(&fleet, &files);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("this cannot be judged"), "{text}");
}

/// Only the times that somebody changed on their way are wrong, not the answers.
#[test]
fn an_answer_whose_time_was_changed_is_told_apart() {
    let retry = "retry = { attempts = 2, interval = \"1s\" }\n";
    let mut fleet = fleet(2).witness("work", "for=5 exit=1", retry).start();
    let files = fleet.instances.iter();
    let files: Vec<PathBuf> = files.map(|i| i.config.with_extension("record")).collect();
    let has_to_wait = |line: &Value| line.pointer("/answers/answer/claim/later").is_some();
    wait_until("an instance is told when a retry is due", GENEROUS, || {
        files.iter().any(|file| any_line(file, has_to_wait))
    });
    fleet.wait_runs(4);
    fleet.stop();
    let whole: Vec<Vec<u8>> = (files.iter().map(std::fs::read))
        .collect::<Result<_, _>>()
        .expect("the records");
    for times in [
        &["/answers/now_us", "/answers/around/now_us"][..],
        &["/answers/around/now_us"],
    ] {
        // The answer says how long from now, and no state shows when that was. One: most tell what time it was.
        let changed = Cell::new(false);
        forge(&files, |line| {
            line.pointer("/answers/answer/claim/later")?;
            (!changed.replace(true)).then_some(())?;
            // It was on its way for longer than its way to the store.
            let received = line.pointer_mut("/answers/received")?;
            *received = (received.as_u64()? + 300_000_000).into();
            for at in times {
                let at = line.pointer_mut(at)?;
                *at = (at.as_i64()? + 3_600_000_000).into();
            }
            Some(())
        });
        let (code, text) = check(&fleet, &files);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("with a time that cannot be right"), "{text}");
        for (file, text) in files.iter().zip(&whole) {
            std::fs::write(file, text).expect("write the record");
        }
    }
}

/// Writes records anew, with the digests that their lines need then. `None` leaves a line as it is.
fn forge(files: &[PathBuf], change: impl Fn(&mut Value) -> Option<()>) {
    let changed: usize = files.iter().map(|file| forge_one(file, &change)).sum();
    assert_ne!(changed, 0, "no line that this test could change");
}

/// The number of lines that were changed in this file.
fn forge_one(file: &PathBuf, change: &impl Fn(&mut Value) -> Option<()>) -> usize {
    let mut changed = 0;
    let text = std::fs::read_to_string(file).expect("a record");
    let mut out = String::new();
    let mut chains: std::collections::HashMap<String, u64> = std::collections::HashMap::new();
    for line in text.lines() {
        let parts: Vec<&str> = line.splitn(4, ' ').collect();
        let (by, n) = (parts[1], parts[2]);
        let mut value: Value = serde_json::from_str(parts[3]).expect("JSON");
        let json = match change(&mut value) {
            Some(()) => {
                changed += 1;
                value.to_string()
            }
            None => parts[3].to_owned(),
        };
        let before = chains.entry(by.to_owned()).or_default();
        *before = xxh3_64_with_seed(format!("{by} {n} {json}").as_bytes(), *before);
        out += &format!("{:016x} {by} {n} {json}\n", *before);
    }
    std::fs::write(file, out).expect("write the record");
    changed
}

/// A state that follows from nothing is a breach. If the stop left a question without an answer, that question could
/// explain a few states: then `check-record` says that it could not follow.
fn is_unexplained(code: Option<i32>, text: &str) -> bool {
    code == Some(1) && text.contains("follows from no other answer")
        || text.contains("could not be followed")
}

/// Whoever makes up digests cannot make up what the rules say.
#[test]
fn answers_that_no_rule_gives_and_broken_promises_are_found() {
    let (fleet, files) = recorded();
    let whole: Vec<Vec<u8>> = files
        .iter()
        .map(|f| std::fs::read(f).expect("a record"))
        .collect();
    let restore = || {
        for (file, text) in files.iter().zip(&whole) {
            std::fs::write(file, text).expect("write the record");
        }
    };
    // Both instances are told that they may run.
    forge(&files, |line| {
        let answer = line.pointer_mut("/answers/answer/claim")?;
        let at = answer.pointer("/running/occurrence")?.clone();
        *answer =
            serde_json::json!({"granted": {"occurrence": at, "attempt": 1, "trigger": "schedule"}});
        Some(())
    });
    let (code, text) = check(&fleet, &files);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("by the rules the answer is"), "{text}");
    restore();
    // A settlement that left another state behind than the rules do.
    forge(&files, |line| {
        line.pointer("/answers/answer/settle")?;
        *line.pointer_mut("/answers/around/after/skip")? = 7.into();
        Some(())
    });
    let (code, text) = check(&fleet, &files);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("in another way than the rules do"), "{text}");
    restore();
    // A settlement by the rules, in a state that nothing led to.
    forge(&files, |line| {
        line.pointer("/answers/answer/settle")?;
        for at in ["before", "after"] {
            *line.pointer_mut(&format!("/answers/around/{at}/skip"))? = 7.into();
        }
        Some(())
    });
    // A question that the stop left without an answer cannot explain them all.
    let (code, text) = check(&fleet, &files);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("follows from no other answer"), "{text}");
    restore();
    // All answers came before their questions left.
    forge(&files, |line| {
        *line.pointer_mut("/answers/received")? = 1.into();
        Some(())
    });
    assert!(check(&fleet, &files).0.is_some());
    restore();
    // Every command has begun an hour earlier.
    forge(&files, |line| {
        let started = line.pointer_mut("/ran/started")?;
        *started = started.as_u64()?.saturating_sub(3_600_000_000_000).into();
        Some(())
    });
    let (code, text) = check(&fleet, &files);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("promise 2 broken"), "{text}");
    assert!(text.contains("promise 3 broken"), "{text}");
    restore();
    // The record of one instance alone does not explain what it was told of the other.
    let told = files.iter().find(|file| was_told_of_another(file));
    let told = told.expect("an instance that was told of the other");
    let (code, text) = check(&fleet, std::slice::from_ref(told));
    assert!(is_unexplained(code, &text), "{text}");
    restore();
    let (code, text) = check(&fleet, &files);
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn a_record_that_cannot_be_written_is_told_at_the_start() {
    let fleet = fleet(1).job("work", &each_second("for=5", "")).start();
    let output = fleet.cli(&["--record", "/nowhere/record", "pause", "work"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("cannot write the record /nowhere/record"),
        "{text}"
    );
    let output = fleet.cli(&["check-record", "/nowhere/record"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(65), "{text}");
    assert!(text.contains("cannot read /nowhere/record"), "{text}");
}
