use super::*;
use crate::{
    config,
    logic::{
        claim::{self, Pause},
        guard_life::{self, Cause, Stop},
    },
    model::{Occurrence, Run, RunId, RunRecord, Trigger, Wait},
};

const NOW: i64 = 1_795_233_605_000;

/// The text of a message, as it is sent now. `states`: what the store has.
fn text(message: &Message, states: &[State]) -> Text {
    let text = "[http]\nlisten = '127.0.0.1:1'\npublic_url = 'https://soloist.example.org'\n\
                [jobs.lottery-draw]\ncommand = 'x'\nschedule = '0 12 * * *'\ntimezone = 'Asia/Shanghai'\n";
    let config = config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
    let states = states
        .iter()
        .map(|st| (JobName::new("lottery-draw"), st.clone()));
    let surroundings = Surroundings {
        config: &config.expect("sound"),
        states: &states.collect(),
        from: &InstanceId::new("web2-9c41"),
        now: NOW,
    };
    Text::of(message, "1", &surroundings)
}

fn shown(item: Item, states: &[State]) -> String {
    let text = text(&Message::new(item, "ops", NOW), states);
    let body = text.body(Links::InTheText, usize::MAX);
    format!("{}\n\n{body}", text.title)
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
        attempt: 1,
        instance: Some(InstanceId::new("web1-a1b2")),
        host: Some("web1".to_owned()),
        exit_code: (outcome == Outcome::Failed).then_some(3),
        ..r.lasting(Some(at.0 + 12), Some(at.0 + 1252))
    }
}

fn one(kind: Kind, run: Option<Outcome>) -> Item {
    let job = JobName::new("lottery-draw");
    let bad = kind != Kind::Recovered;
    Item {
        streak: u64::from(run.is_some()),
        run: run.map(record),
        ..Item::new(job, kind, bad, 1_795_233_601_252)
    }
}

fn failed(output: &str) -> Item {
    let mut item = one(Kind::Failed, Some(Outcome::Failed));
    if let Some(run) = &mut item.run {
        run.output_tail = last_lines(output);
    }
    item
}

/// Several jobs, to which this happened.
fn joined(all: &[(&str, Kind)]) -> Message {
    let of = |(name, kind): &(&str, Kind)| Item {
        job: JobName::new(name),
        kind: *kind,
        bad: *kind != Kind::Recovered,
        ..failed("1\n2\n3\n4")
    };
    let mut m = Message::new(of(&all[0]), "ops", NOW);
    all[1..].iter().for_each(|what| m.join(of(what), NOW));
    m
}

/// A run of the job that goes on, a pause, and a skip.
fn state() -> State {
    State {
        open: vec![claim::Open {
            run: Run {
                instance: InstanceId::new("web1-a1b2"),
                ..Run::first(NOW - 25 * 3_600_000)
            },
            ..claim::Open::first(NOW - 25 * 3_600_000)
        }],
        ..State::default()
    }
}

/// `SOLOIST_WRITE_DOCS=1 cargo test --lib the_page_has_messages` writes them.
#[test]
fn the_page_has_messages() {
    let mut late = one(Kind::Late, Some(Outcome::Succeeded));
    if let Some(run) = &mut late.run {
        (run.lateness_ms, run.waited) = (Some(43_000), Some((Wait::Slot, 41_000)));
    }
    late.expected = Some(10_000);
    let mut recovered = one(Kind::Recovered, Some(Outcome::Succeeded));
    (recovered.streak, recovered.since) = (3, recovered.since - 3 * 86_400_000);
    (recovered.changes, recovered.quiet_until) = (1, Some(NOW + 1_800_000));
    let mut overdue = one(Kind::Overdue, None);
    overdue.since = NOW - 26 * 3_600_000;
    overdue.expected = Some(26 * 3_600_000);
    let some: Vec<String> = (1..=3).map(|n| format!("report-{n}")).collect();
    let mut some: Vec<(&str, Kind)> = some.iter().map(|job| (&**job, Kind::Failed)).collect();
    some.push(("lottery-draw", Kind::Failed));
    let mut many = joined(&some);
    many.items.truncate(4);
    let many = text(&many, &[]);
    let many = format!("{}\n\n{}", many.title, many.body(Links::InTheText, 1050));
    let output = "reading 1423 entrants\nentrant 77 has no address\ndraw: cannot pick 10 winners\n";
    let written: String = [
        ("A run failed", shown(failed(output), &[])),
        (
            "The host of a run vanished",
            shown(one(Kind::Unknown, Some(Outcome::Unknown)), &[]),
        ),
        (
            "An occurrence was missed",
            shown(one(Kind::Missed, Some(Outcome::Missed)), &[]),
        ),
        ("A run started late", shown(late, &[])),
        (
            "The job recovered, after its sixth message within an hour",
            shown(recovered, &[]),
        ),
        ("No success for too long", shown(overdue, &[state()])),
        ("Several jobs at once (shortened)", many),
    ]
    .iter()
    .map(|(what, text)| format!("### {what}\n\n```text\n{}\n```\n\n", text.trim_end()))
    .collect();
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

#[test]
fn each_kind_of_message_says_what_happened() {
    let unusual = |kind, took| {
        let mut item = one(kind, Some(Outcome::Succeeded));
        item.run.as_mut().expect("a run").duration_ms = Some(took);
        item.expected = Some(41_000);
        item
    };
    let mut killed = one(Kind::Failed, Some(Outcome::Failed));
    let run = killed.run.as_mut().expect("a run");
    (run.exit_code, run.signal) = (None, Some(libc::SIGTERM));
    let mut never = one(Kind::Overdue, None);
    (never.never, never.since) = (true, NOW - 7_200_000);
    for (item, title, line) in [
        (
            killed,
            "failed (SIGTERM)",
            "outcome:     failed, SIGTERM, after 1.24 s",
        ),
        (
            one(Kind::TimedOut, Some(Outcome::TimedOut)),
            "timed out",
            "error:       it ran for longer than its `timeout`, so it was ended",
        ),
        (
            one(Kind::Crashed, Some(Outcome::Crashed)),
            "crashed",
            "error:       the daemon or the guard that ran it died, so the command was ended",
        ),
        (
            one(Kind::LeaseLost, Some(Outcome::LeaseLost)),
            "lost its lease",
            "outcome:     lease lost, after 1.24 s",
        ),
        (
            unusual(Kind::TooLong, 1_264_000),
            "took unusually long: after 21 min 4 s, usually 41.0 s",
            "usually:     41.0 s, the median of its last successes; more than three times that is told",
        ),
        (
            unusual(Kind::TooShort, 1240),
            "ended unusually soon: after 1.24 s, usually 41.0 s",
            "usually:     41.0 s, the median of its last successes; less than a third of that is told",
        ),
        (
            never,
            "no success so far, for 2 h",
            "why:         no run of it has started since then",
        ),
    ] {
        let text = shown(item, &[State::default()]);
        let (first, _) = text.split_once('\n').expect("a title");
        assert!(first.ends_with(title), "{text}");
        assert!(text.lines().any(|l| l == line), "{text}");
    }
}

/// A message may have waited: it says how the job is when it is sent.
#[test]
fn a_message_says_how_its_job_is_when_it_is_sent() {
    let at_rest = shown(failed(""), &[State::default()]);
    assert!(
        at_rest.contains("next:        Sun 2026-11-22 12:00:00 +08:00, in 23 h 59 min\n"),
        "{at_rest}"
    );
    let pause = Pause {
        until: None,
        reason: Some("disks\nare full".to_owned()),
        at: NOW - 5000,
        by: None,
    };
    let state = State {
        pause: Some(pause),
        skip: 2,
        ..State::default()
    };
    let paused = shown(failed(""), &[state]);
    assert!(
        paused.contains("until somebody resumes it: disks\\nare full\n"),
        "{paused}"
    );
    assert!(paused.contains("skipped:     the next 2 occurrences, on request\n"));
    assert!(!paused.contains("next:"), "{paused}");
    let mut waited = Message::new(failed(""), "ops", NOW - 3_600_000);
    waited.perhaps_sent = true;
    let intro = text(&waited, &[]).intro;
    assert!(intro.contains("This may be a repetition"), "{intro}");
    assert!(intro.contains("This message is 1 h late"), "{intro}");
}

#[test]
fn the_heading_of_many_counts_them() {
    let title = |m: &Message| text(m, &[]).title;
    let (bad, good) = (Kind::Failed, Kind::Recovered);
    let thousand: Vec<String> = (0..1000).map(|n| format!("j{n:03}")).collect();
    let thousand: Vec<(&str, Kind)> = thousand.iter().map(|job| (&**job, bad)).collect();
    assert_eq!(
        title(&joined(&thousand)),
        "1,000 jobs: 120 failed, 880 more: j000, j001, j002, …"
    );
    // Each job counts once, by the last that happened to it.
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

/// The jobs that are bad now come first. What is told of one job stays in its order, because a service may open and end
/// an incident by it.
#[test]
fn the_jobs_of_a_message_have_an_order() {
    let (bad, good) = (Kind::Failed, Kind::Recovered);
    let m = joined(&[
        ("b", good),
        ("a", bad),
        ("m", good),
        ("m", bad),
        ("a", good),
    ]);
    let text = text(&m, &[]);
    let order: Vec<(&str, bool)> = text.jobs.iter().map(|j| (&*j.job, j.bad)).collect();
    assert_eq!(
        order,
        [
            ("m", false),
            ("m", true),
            ("a", true),
            ("a", false),
            ("b", false)
        ]
    );
}

/// The names of the jobs come first, and of an output the end says most.
#[test]
fn a_text_that_is_cut_says_what_matters() {
    let many: Vec<String> = (0..1000)
        .map(|n| format!("j{n}-{}", "x".repeat(50)))
        .collect();
    let many: Vec<(&str, Kind)> = many.iter().map(|job| (&**job, Kind::Failed)).collect();
    let many = text(&joined(&many), &[]);
    let said = many.body(Links::InTheText, 1700);
    assert_eq!(units(&said), 1700);
    assert!(said.starts_with("failed: j0-x"), "{said}");
    assert!(
        said.contains("…\nand 880 more\nmore:        soloist status\n"),
        "{said}"
    );
    let three = "the end of its output (3 lines; `soloist logs j0-";
    assert!(many.body(Links::InTheText, usize::MAX).contains(three));
    let long = ("😀".repeat(60) + "\n").repeat(30) + "the reason";
    let text = text(&Message::new(failed(&long), "ops", NOW), &[]);
    let whole = text.body(Links::InTheText, usize::MAX);
    for most in (900..units(&whole)).step_by(7) {
        let said = text.body(Links::InTheText, most);
        assert!(units(&said) <= most, "{said}");
        assert!(said.ends_with("\n  the reason\n"), "{most}: {said}");
        assert!(said.contains("the end of its output:\n  …"), "{said}");
    }
}

#[test]
fn output_is_cut_at_its_begin_and_acts_on_nothing() {
    let cut = last_lines(&("é".repeat(5000) + "\n\x1b[2J\u{202e}last\r\n"));
    assert!(cut.starts_with('…') && cut.ends_with("\n\\x1b[2J\\u{202e}last"));
    assert_eq!(units(&cut), 1500);
    let many: String = (0..100).map(|n| format!("{n}\n")).collect();
    assert_eq!(last_lines(&many).lines().count(), 15);
    assert_eq!(last_lines(""), "");
    assert_eq!(
        (super::cut("ééé", 2), super::cut("a😀b", 3)),
        ("é…".to_owned(), "a…".to_owned())
    );
}

/// It is about no job, also if one is called `test`.
#[test]
fn a_test_is_about_no_job() {
    let item = Item::new(JobName::new("test"), Kind::Test, false, NOW);
    let test = text(&Message::new(item, "ops", NOW), &[]);
    assert_eq!(test.title, "soloist: a test");
    assert_eq!(test.jobs[0].key, "soloist/soloist//test");
    assert_eq!((&test.link, &test.jobs[0].link), (&None, &None));
    let body = test.body(Links::InTheText, usize::MAX);
    assert!(
        body.contains("sent by:     web2-9c41 (soloist)\n"),
        "{body}"
    );
}
