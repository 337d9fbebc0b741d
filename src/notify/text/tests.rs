use std::{collections::BTreeMap, fmt::Write as _};

use super::{
    item::{OUTPUT_LINES, OUTPUT_MOST, last_lines},
    *,
};
use crate::{
    config::{self, Job},
    logic::{
        claim::{self, State},
        guard_life::{self, Cause, Stop},
        notify::{Standstill, Verdict},
    },
    model::{JobName, Occurrence, Outcome, RunId, RunRecord, Trigger, Wait},
};

const NOW: i64 = 1_795_233_605_000;

fn surroundings() -> Surroundings {
    Surroundings {
        namespace: "soloist".to_owned(),
        public_url: Some("https://soloist.example.org".to_owned()),
        from: InstanceId::new("web2-9c41"),
        now: NOW,
    }
}

fn job() -> std::sync::Arc<Job> {
    let text =
        "[jobs.lottery-draw]\ncommand = 'x'\nschedule = '0 12 * * *'\ntimezone = 'Asia/Shanghai'\n";
    let config = config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
    let config = config.expect("sound");
    config.jobs.values().next().expect("a job").clone()
}

fn record(outcome: Outcome) -> RunRecord {
    let job = JobName::new("lottery-draw");
    let at = Occurrence(1_795_233_600_000);
    let r = RunRecord::without_run(&job, at, Trigger::Schedule, outcome);
    let r = RunRecord {
        error: match outcome {
            Outcome::Missed => Some(claim::TOO_LATE.to_owned()),
            Outcome::Unknown => Some(claim::LAPSED.to_owned()),
            Outcome::LeaseLost => guard_life::reason(Some(Cause::Stopped(Stop::LeaseLost))),
            _ => None,
        },
        ..r
    };
    if outcome == Outcome::Missed {
        return r;
    }
    RunRecord {
        run_id: Some(RunId(uuid::Uuid::from_u128(
            0x01a2_1348_253a_71b7_825a_4d60_e547_2a9e,
        ))),
        attempt: 2,
        trigger: Trigger::Retry,
        instance: Some(InstanceId::new("web1-a1b2")),
        host: Some("web1".to_owned()),
        exit_code: (outcome == Outcome::Failed).then_some(3),
        ..r.lasting(Some(at.0 + 12), Some(at.0 + 1252))
    }
}

fn one(kind: Kind, bad: bool, run: Option<(Outcome, &str)>) -> Item {
    let verdict = Verdict {
        channel: "ops".to_owned(),
        kind,
        bad,
        streak: u64::from(bad && run.is_some()),
        since: 1_795_233_601_252,
        changes: 0,
        last_bad: None,
        again_at: None,
    };
    let run = run.map(|(outcome, output)| about(&record(outcome), output));
    let job = job();
    item(&job.name, Some(&job), &verdict, run, NOW)
}

/// A run that was planned and succeeded, with the time that it took, and its lateness, ms.
fn planned(kind: Kind, took: i64, late: i64, expected: i64) -> Item {
    let mut item = one(kind, true, Some((Outcome::Succeeded, "")));
    if let Some(run) = &mut item.run {
        (run.attempt, run.trigger) = (1, Trigger::Schedule);
        (run.duration_ms, run.lateness_ms) = (Some(took), Some(late));
    }
    item.expected = Some(expected);
    item
}

fn late() -> Item {
    let mut item = planned(Kind::Late, 1240, 43_000, 10_000);
    if let Some(run) = &mut item.run {
        run.waited = Some((Wait::Slot, 41_000));
    }
    item
}

fn shown(item: Item) -> String {
    let message = Message::new(item, "ops", NOW);
    let text = Text::of(&message, "1", &surroundings());
    format!("{}\n\n{}", text.title, text.body.whole(Links::InTheText))
}

/// Every kind of message, once. `SOLOIST_WRITE_DOCS=1 cargo test --lib the_page_has_each` writes them.
#[test]
fn the_page_has_each_kind_of_message() {
    let output = "reading 1423 entrants\nentrant 77 has no address\ndraw: cannot pick 10 winners\n";
    let failed = one(Kind::Failed, true, Some((Outcome::Failed, output)));
    let mut killed = one(Kind::Failed, true, Some((Outcome::Failed, "")));
    if let Some(run) = &mut killed.run {
        (run.exit_code, run.signal) = (None, Some(libc::SIGTERM));
    }
    let mut recovered = one(Kind::Recovered, false, Some((Outcome::Succeeded, "")));
    recovered.streak = 3;
    recovered.since -= 3 * 86_400_000;
    let mut overdue = one(Kind::Overdue, true, None);
    overdue.since = NOW - 26 * 3_600_000;
    overdue.expected = Some(26 * 3_600_000);
    let mut never = overdue.clone();
    never.never = true;
    never.now.standstill = Some(Standstill::Idle);
    let mut hangs = overdue.clone();
    hangs.now.standstill = Some(Standstill::Runs {
        since: NOW - 25 * 3_600_000,
        on: InstanceId::new("web1-a1b2"),
    });
    overdue.now.standstill = Some(Standstill::Ended {
        outcome: Outcome::Failed,
        at: NOW - 2 * 3_600_000,
    });
    let mut paused = failed.clone();
    paused.now.paused = Some((NOW - 60_000, None, Some("disks".to_owned())));
    paused.next = None;
    let mut lacked = failed.clone();
    (lacked.lacked, lacked.zone, lacked.next) = (true, "UTC".to_owned(), None);
    let mut flapping = one(Kind::Flapping, true, Some((Outcome::Failed, "")));
    flapping.again_at = Some(NOW + 120_000);
    flapping.since = NOW - 120_000;
    flapping.changes = 37;
    let mut many = Message::new(failed.clone(), "ops", NOW);
    for n in 1..1000 {
        let job = JobName::new(&format!("report-{n}"));
        many.join(
            Item {
                job,
                ..failed.clone()
            },
            NOW,
        );
    }
    // Of so many the page shows two.
    many.items.truncate(2);
    many.others.truncate(2);
    *many.unnamed.entry(Kind::Failed).or_default() = 996;
    many.more = 998;
    let many = Text::of(&many, "1", &surroundings());
    let test = Text::of(&test_message("ops", NOW), "test", &surroundings());
    // A job may be called `test`.
    assert_eq!(test.subjects[0].key, "soloist/soloist//test");
    let all = [
        ("A run failed", shown(failed)),
        ("A signal ended a run", shown(killed)),
        (
            "A run reached its time limit",
            shown(one(Kind::TimedOut, true, Some((Outcome::TimedOut, output)))),
        ),
        (
            "The daemon of a run died",
            shown(one(Kind::Crashed, true, Some((Outcome::Crashed, "")))),
        ),
        (
            "The host of a run vanished",
            shown(one(Kind::Unknown, true, Some((Outcome::Unknown, "")))),
        ),
        (
            "A run lost its lease",
            shown(one(Kind::LeaseLost, true, Some((Outcome::LeaseLost, "")))),
        ),
        (
            "An occurrence was missed",
            shown(one(Kind::Missed, true, Some((Outcome::Missed, "")))),
        ),
        ("A run started late", shown(late())),
        (
            "A run took unusually long",
            shown(planned(Kind::TooLong, 1_264_000, 12, 41_000)),
        ),
        (
            "A run ended unusually soon",
            shown(planned(Kind::TooShort, 1240, 12, 41_000)),
        ),
        ("The job recovered", shown(recovered)),
        ("No success for too long", shown(overdue)),
        ("No success for too long: it hangs", shown(hangs)),
        ("No success so far", shown(never)),
        ("A job that keeps changing", shown(flapping)),
        ("A job that is paused now", shown(paused)),
        ("A job that the sender's configuration lacks", shown(lacked)),
        (
            "Several jobs at once (shortened)",
            format!("{}\n\n{}", many.title, many.body.whole(Links::InTheText)),
        ),
        (
            "A test",
            format!("{}\n\n{}", test.title, test.body.whole(Links::InTheText)),
        ),
    ];
    let mut written = String::new();
    for (what, text) in all {
        let _ = write!(
            written,
            "### {what}\n\n```text\n{}\n```\n\n",
            text.trim_end()
        );
    }
    let page = include_str!("../../../docs/notifications.md");
    let (before, rest) = page.split_once("<!-- messages -->\n").expect("a mark");
    let (_, after) = rest.split_once("<!-- end of messages -->").expect("a mark");
    let new = format!("{before}<!-- messages -->\n{written}<!-- end of messages -->{after}");
    if std::env::var_os("SOLOIST_WRITE_DOCS").is_some() {
        std::fs::write("docs/notifications.md", &new).expect("write");
    }
    assert!(
        new == page,
        "docs/notifications.md is old: write it with SOLOIST_WRITE_DOCS=1"
    );
}

/// Whoever reads a message may be woken by it: times are said as they are when it is sent.
#[test]
fn a_message_that_waited_says_when_the_job_comes_next_from_now_on() {
    let job = job();
    let text =
        "[jobs.lottery-draw]\ncommand = 'x'\nschedule = '* * * * *'\n[jobs.off]\ncommand = 'x'\n";
    let config = config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
    let config = config.expect("sound");
    let mut failed = one(Kind::Failed, true, Some((Outcome::Failed, "")));
    failed.next = Some(NOW - 2000);
    let mut gone = failed.clone();
    gone.job = JobName::new("gone");
    let mut message = Message::new(failed.clone(), "ops", NOW - 60_000);
    message.join(gone, NOW - 60_000);
    let none = BTreeMap::new();
    let fresh = refreshed(&message, &config, &none, false, NOW);
    assert_eq!(fresh.items[1].next, Some(NOW - NOW % 60_000 + 60_000));
    assert_eq!(fresh.items[0].next, None, "nobody plans it here");
    assert_eq!(job.name, fresh.items[1].job);
    // What is due says so.
    let mut next = |at: i64| {
        failed.next = Some(at);
        let text = shown(failed.clone());
        let line = text.lines().find(|l| l.starts_with("next:"));
        line.expect("a line").to_owned()
    };
    assert!(next(NOW - 2000).contains("due since Sat 2026-11-21"));
    assert!(next(NOW + 500).ends_with(", now"));
    assert!(next(NOW + 2000).ends_with(", in 2 s"));
}

#[test]
fn an_alarm_says_that_all_instances_drain_and_names_no_next_run() {
    let text = "[jobs.lottery-draw]\ncommand = 'x'\nschedule = '* * * * *'\n";
    let config = config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
    let config = config.expect("sound");
    let message = Message::new(one(Kind::Overdue, true, None), "ops", NOW);
    let states = BTreeMap::from([(JobName::new("lottery-draw"), State::default())]);
    let said = |drained| {
        let fresh = refreshed(&message, &config, &states, drained, NOW);
        let of = Text::of(&fresh, "1", &surroundings());
        of.body.whole(Links::InTheText)
    };
    let why =
        "why:         all live instances drain or stop, so no job starts until one is undrained";
    let (moving, still) = (said(false), said(true));
    assert!(
        !moving.contains(why) && moving.contains("next:"),
        "{moving}"
    );
    assert!(still.contains(why) && !still.contains("next:"), "{still}");
}

#[test]
fn a_message_says_that_its_job_is_paused_when_it_is_sent() {
    let text = "[jobs.lottery-draw]\ncommand = 'x'\nschedule = '0 * * * *'\n";
    let config = config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
    let config = config.expect("sound");
    let failed = one(Kind::Failed, true, Some((Outcome::Failed, "")));
    let message = Message::new(failed.clone(), "ops", NOW - 60_000);
    let said = |state: State| {
        let states = BTreeMap::from([(failed.job.clone(), state)]);
        let fresh = refreshed(&message, &config, &states, false, NOW);
        let of = Text::of(&fresh, "1", &surroundings());
        assert_eq!(
            of.json["items"][0]["paused"],
            fresh.items[0].now.paused.is_some()
        );
        of.body.whole(Links::InTheText)
    };
    let pause = |until: Option<i64>| {
        Some(crate::logic::claim::Pause {
            until,
            reason: Some("disks\nare full".to_owned()),
            at: NOW - 5000,
            by: None,
        })
    };
    let at_rest = said(State::default());
    assert!(!at_rest.contains("paused:"), "{at_rest}");
    assert!(
        at_rest.contains("next:        Sat 2026-11-21 13:00:00 +08:00"),
        "{at_rest}"
    );
    let mut state = State {
        pause: pause(None),
        ..State::default()
    };
    let for_ever = said(state.clone());
    let line = "until somebody resumes it: disks\\nare full\n";
    assert!(
        for_ever.contains("paused:      since Sat 2026-11-21 12:00:00"),
        "{for_ever}"
    );
    assert!(
        for_ever.contains(line) && !for_ever.contains("next:"),
        "{for_ever}"
    );
    // The pause ends at 14:00: what is planned then runs.
    state.pause = pause(Some(NOW - NOW % 3_600_000 + 2 * 3_600_000));
    let later = said(state.clone());
    assert!(
        later.contains("next:        Sat 2026-11-21 14:00:00 +08:00"),
        "{later}"
    );
    (state.pause, state.skip) = (None, 2);
    let skipped = said(state);
    assert!(
        skipped.contains("skipped:     the next 2 occurrences, on request"),
        "{skipped}"
    );
    assert!(
        skipped.contains("next:        Sat 2026-11-21 15:00:00 +08:00"),
        "{skipped}"
    );
}

/// Whoever reads a text that was cut sees which jobs it is about, and which command says more.
#[test]
fn the_names_and_the_last_line_survive_a_cut() {
    let failed = one(
        Kind::Failed,
        true,
        Some((Outcome::Failed, &"x\n".repeat(100))),
    );
    for length in [1, 90] {
        let mut m = Message::new(failed.clone(), "ops", NOW);
        for n in 0..1000 {
            let job = JobName::new(&format!("j{n}-{}", "x".repeat(length)));
            let kind = if n % 7 == 0 {
                Kind::Missed
            } else {
                Kind::Failed
            };
            let item = Item {
                job,
                kind,
                ..failed.clone()
            };
            m.join(item, NOW);
        }
        m.arrange();
        let text = Text::of(&m, "1", &surroundings());
        for most in [1700, 3500, 26_000] {
            let cut = text.body.within(Links::InTheText, most, letters, cut);
            assert!(letters(&cut) <= most, "{}", letters(&cut));
            assert!(cut.ends_with("\nmore:        soloist status\n"), "{cut}");
            let first = cut.lines().next().expect("a line");
            assert!(first.starts_with("failed: j1-x"), "{cut}");
            // All are accounted for.
            let names = cut.split("\n\n").next().expect("names");
            let named = names.matches("-x").count() + names.matches("lottery-draw").count();
            let words = names.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
            let words: Vec<&str> = words.collect();
            let left: usize = (words.windows(2))
                .filter(|pair| pair[1] == "more")
                .map(|pair| pair[0].parse::<usize>().expect("a number"))
                .sum();
            assert_eq!(named + left, 1001, "{most}: {names}");
            assert!(named > 5, "{names}");
        }
    }
}

/// The end of an output says most.
#[test]
fn the_last_line_of_an_output_survives_a_cut() {
    let long = "y".repeat(60) + "\n";
    let output = last_lines(&(long.repeat(30) + "the reason"));
    let failed = one(Kind::Failed, true, Some((Outcome::Failed, &output)));
    let text = Text::of(&Message::new(failed, "ops", NOW), "1", &surroundings());
    let whole = text.body.whole(Links::InTheText);
    for most in 800..letters(&whole) {
        let said = text.body.within(Links::InTheText, most, letters, cut);
        assert!(letters(&said) <= most, "{said}");
        assert!(said.ends_with("\n  the reason\n"), "{most}: {said}");
        assert!(said.contains("the end of its output:\n  …\n"), "{said}");
    }
}

/// Whoever misses something sees that it was left out, and where it is.
#[test]
fn what_a_message_about_several_jobs_leaves_out_is_said() {
    let told = |output: &str| {
        let failed = one(Kind::Failed, true, Some((Outcome::Failed, output)));
        let other = Item {
            job: JobName::new("b"),
            ..failed.clone()
        };
        let mut m = Message::new(failed, "ops", NOW);
        m.join(other, NOW);
        Text::of(&m, "1", &surroundings())
    };
    let whole = |output: &str| told(output).body.whole(Links::InTheText);
    assert!(whole("1\n2\n3").contains("\nthe end of its output:\n  1\n"));
    let id = "01a21348-253a-71b7-825a-4d60e5472a9e";
    let more = format!(
        "the end of its output (3 lines; `soloist logs b {id}` shows more):\n  2\n  3\n  4\n"
    );
    assert!(
        whole("1\n2\n3\n4").contains(&more),
        "{}",
        whole("1\n2\n3\n4")
    );
    assert!(whole("…2\n3").contains("shows more):\n  …2\n"));
    let cut = told("x").body.within(Links::InTheText, 700, letters, cut);
    let end = "…\n\ncut:         this channel takes no longer text\nmore:        soloist status\n";
    assert!(cut.ends_with(end), "{cut}");
}

#[test]
fn output_is_cut_at_its_begin_and_acts_on_nothing() {
    let long = "é".repeat(5000) + "\n\x1b[2J\u{202e}last\r\n";
    let cut = last_lines(&long);
    assert!(cut.ends_with("\n\\x1b[2J\\u{202e}last"), "{cut}");
    assert_eq!(cut.chars().count(), OUTPUT_MOST);
    assert!(cut.starts_with('…'));
    let many: String = (0..100).map(|n| format!("{n}\n")).collect();
    assert_eq!(last_lines(&many).lines().count(), OUTPUT_LINES);
    assert_eq!(last_lines(""), "");
    assert_eq!(super::cut("ééé", 2), "é…");
}

#[test]
fn the_heading_of_many_counts_them() {
    let failed = one(Kind::Failed, true, Some((Outcome::Failed, "")));
    let of = |name: &str, kind: Kind| Item {
        job: JobName::new(name),
        kind,
        bad: kind != Kind::Recovered,
        ..failed.clone()
    };
    let title = |m: &Message| Text::of(m, "1", &surroundings()).title;
    let joined = |all: &[(&str, Kind)]| {
        let mut m = Message::new(of(all[0].0, all[0].1), "ops", NOW);
        for (job, kind) in &all[1..] {
            m.join(of(job, *kind), NOW);
        }
        m
    };
    let thousand: Vec<String> = (0..1000).map(|n| format!("j{}", 999 - n)).collect();
    let mut m = joined(
        &thousand
            .iter()
            .map(|j| (&**j, Kind::Failed))
            .collect::<Vec<_>>(),
    );
    // Of those that came first it knows the names.
    assert_eq!(title(&m), "1,000 jobs failed: j880, j881, j882, …");
    let length = Text::of(&m, "1", &surroundings())
        .body
        .whole(Links::InTheText)
        .len();
    assert!(length < 30_000, "{length}");
    m.join(of("a", Kind::Missed), NOW);
    assert_eq!(
        title(&m),
        "1,001 jobs: 1,000 failed, 1 was missed: j880, j881, j882, …"
    );
    // As an older version noted it.
    m.unnamed.clear();
    assert_eq!(
        title(&m),
        "1,001 jobs: 120 failed, 881 more: j880, j881, j882, …"
    );
    m.perhaps_sent = true;
    let intro = Text::of(&m, "1", &surroundings()).body.intro;
    assert!(intro.starts_with("This may be a repetition"), "{intro}");
    // Each job counts once, by the last that happened to it.
    let (bad, good) = (Kind::Failed, Kind::Recovered);
    for (all, words) in [
        (
            &[("b", bad), ("a", good), ("b", good)][..],
            "2 jobs recovered: a, b",
        ),
        (
            &[
                ("c", good),
                ("b", bad),
                ("b", good),
                ("b", bad),
                ("a", Kind::LeaseLost),
            ],
            "3 jobs: 1 failed, 1 lost its lease, 1 recovered: b, a, c",
        ),
        (
            &[("b", Kind::LeaseLost), ("a", Kind::LeaseLost)],
            "2 jobs lost their leases: a, b",
        ),
        (&[("a", bad), ("a", good)], "a failed, then recovered"),
    ] {
        assert_eq!(title(&joined(all)), words);
    }
}

/// It is about no job.
#[test]
fn a_test_has_no_link_to_a_job() {
    let test = Text::of(&test_message("ops", NOW), "test", &surroundings());
    assert_eq!((&test.link, &test.subjects[0].link), (&None, &None));
    assert_eq!(test.json["items"][0]["link"], Json::Null);
    assert!(!test.json.to_string().contains("#/job/"), "{}", test.json);
}
