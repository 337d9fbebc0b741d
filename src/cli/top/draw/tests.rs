use std::{collections::BTreeMap, path::Path, time::Duration};

use ratatui::{Terminal, backend::TestBackend, style::Color};

use super::*;
use crate::{
    cli::top::{
        keys::Key,
        state::{Act, Found, News},
    },
    config::{self, Config},
    logic::claim::{self, Last, Open, Pause},
    model::{InstanceId, JobName, Occurrence, Run, RunId, Trigger},
    store::{Fleet, Info, Output},
};

const NOW: i64 = 1_795_187_561_318; // 2026-11-20T15:12:41.318Z
const WEB: &str = "web-1";

fn configured() -> Config {
    let text = "[jobs.backup]\nschedule = '*/5 * * * *'\ncommand = 'x'\ndescription = 'of the database'\n\
        [jobs.draw]\nschedule = '* * * * *'\ncommand = 'x'\n\
        [jobs.report]\nschedule = '0 6 * * *'\ncommand = 'x'\n\
        [jobs.tidy]\nschedule = []\ncommand = 'x'\n";
    config::parse(text, Path::new("jobs.toml"), &|_| None).expect("valid")
}

fn record(job: &str, before: i64, outcome: Outcome) -> RunRecord {
    let at = NOW - before;
    let record = RunRecord::without_run(
        &JobName::new(job),
        Occurrence(at),
        Trigger::Schedule,
        outcome,
    );
    RunRecord {
        run_id: Some(RunId::random()),
        attempt: 1,
        instance: Some(InstanceId::new(WEB)),
        exit_code: Some(i32::from(outcome != Outcome::Succeeded)),
        ..record.lasting(Some(at + 12), Some(at + 1_252))
    }
}

fn fleet(names: &[(&str, i64)]) -> Fleet {
    let info = |seen| Info {
        seen,
        host: "web".into(),
        pid: 1,
        process: 1,
        version: "0.1.0".into(),
        config: "c".into(),
        clock_offset_ms: 3.0,
        wall: 0,
        clock_doubt_ms: None,
        started_at: 0,
        running: vec![],
        draining: false,
        jobs: 4,
        outages: vec![],
    };
    let instances = names
        .iter()
        .map(|(id, ago)| (InstanceId::new(id), info(NOW - ago)));
    Fleet {
        id: "e".into(),
        before: None,
        born: 0,
        quarantine: Duration::ZERO,
        open: true,
        instances: instances.collect::<BTreeMap<_, _>>(),
        drains: vec![],
    }
}

fn open(id: RunId) -> Open {
    Open {
        run: Run {
            occurrence: Occurrence(NOW - 41_318),
            attempt: 1,
            trigger: Trigger::Schedule,
            key: None,
            id,
            instance: InstanceId::new(WEB),
            host: "web".into(),
            lease: 15_000,
            definition: String::new(),
            granted_at: NOW - 41_300,
        },
        seq: 1,
        incarnation: "i".into(),
        renewed_at: NOW - 100,
        stop: None,
        next_attempt: None,
    }
}

fn last(record: &RunRecord) -> Option<Last> {
    Some(Last {
        occurrence: record.occurrence,
        attempt: 1,
        run: record.run_id?,
        instance: record.instance.clone()?,
        outcome: record.outcome,
        from: record.started_at?,
        to: record.finished_at?,
    })
}

/// A fleet in which `draw` runs, `report` failed, and `backup` is paused.
fn state() -> State {
    let mut state = State::new(&configured(), "redis://store:6379/0", 1000, NOW);
    state.take(News::Fleet {
        fleet: Box::new(fleet(&[(WEB, 500), ("web-2", 60_000)])),
        shown: NOW,
        local_ms: 1000,
    });
    let found = |job: &str, open: Vec<Open>, pause: Option<Pause>, records: Vec<RunRecord>| Found {
        job: JobName::new(job),
        state: Ok(Some(claim::State {
            incarnation: "i".into(),
            newest: records.first().map_or(0, |r| r.occurrence.0),
            last: records.first().and_then(last),
            open,
            pause,
            ..claim::State::default()
        })),
        records: Some(records),
    };
    let pause = Pause {
        until: None,
        reason: Some("moving \x1b[2Jdisks".into()),
        at: NOW - 1,
    };
    let many = |job: &str| -> Vec<RunRecord> {
        let one = |n: i64| record(job, n * 60_000 + 41_318, Outcome::Succeeded);
        (1..20).map(one).collect()
    };
    let failed = record("report", 33_161_318, Outcome::Failed);
    state.take(News::Found {
        found: vec![
            found("backup", vec![], Some(pause), many("backup")),
            found("draw", vec![open(RunId::random())], None, many("draw")),
            found("report", vec![], None, vec![failed]),
            found("tidy", vec![], None, vec![]),
        ],
        incarnation: "i".into(),
    });
    state
}

fn terminal(state: &State, width: u16, height: u16) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| draw(state, frame)).expect("drawn");
    terminal
}

/// The screen as text, its lines without the spaces at their ends.
fn screen(state: &State, width: u16, height: u16) -> String {
    let terminal = terminal(state, width, height);
    let buffer = terminal.backend().buffer();
    let line = |y| {
        let cells = (0..width).map(|x| buffer[(x, y)].symbol());
        cells.collect::<String>().trim_end().to_owned()
    };
    (0..height).map(line).collect::<Vec<_>>().join("\n")
}

fn press(state: &mut State, keys: &str) -> Option<Act> {
    let mut act = None;
    for c in keys.chars() {
        act = state.key(match c {
            '\n' => Key::Enter,
            '\t' => Key::Tab,
            '\x1b' => Key::Esc,
            '<' => Key::Back,
            c => Key::Char(c),
        });
    }
    act
}

#[test]
fn the_overview_at_80_by_24() {
    let text = screen(&state(), 80, 24);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[..10],
        [
            "soloist   1 overview   2 timeline   3 instances                     15:12:41 UTC",
            "1 job fails: report",
            "silent: web-2",
            "4 jobs, 1 running, 1 paused; 1 live instance",
            "  JOB      STATE            NEXT IN LAST RUNS      TOOK     LATE RUN BY",
            "› backup   ‖ paused          paused ✓✓✓✓✓✓✓✓✓✓   1.24 s    12 ms web-1",
            "  draw     ▶ running           19 s ✓✓✓✓✓✓✓✓✓✓   41.0 s    18 ms web-1",
            "  report   ✗ failed     14 h 47 min ✗            1.24 s    12 ms web-1",
            "  tidy       not yet         manual",
            "",
        ],
        "{text}"
    );
    assert!(
        lines[23].starts_with("? keys  Enter job  t trigger"),
        "{text}"
    );
}

#[test]
fn a_wide_screen_says_more_and_a_small_one_is_still_sane() {
    let mut s = state();
    let wide = screen(&s, 200, 50);
    assert!(
        wide.contains("redis://store:6379/0 soloist  15:12:41 UTC"),
        "{wide}"
    );
    // What others wrote cannot act on the terminal.
    assert!(wide.contains("moving \\x1b[2Jdisks"), "{wide}");
    let small = screen(&s, 40, 10);
    let lines: Vec<&str> = small.lines().collect();
    assert_eq!(
        lines[..5],
        [
            " 1 jobs  2 time  3 inst         15:12:41",
            "1 job fails: report",
            "  JOB      STATE           NEXT IN",
            "› backup   ‖ paused         paused",
            "  draw     ▶ running          19 s",
        ],
        "{small}"
    );
    // Each screen at each size is drawn, and nothing outside of it.
    for keys in ["1", "2", "3", "1\n", "1?", "?1p", "\x1b3d"] {
        press(&mut s, keys);
        for (width, height) in [
            (1, 1),
            (20, 5),
            (21, 6),
            (40, 10),
            (79, 3),
            (80, 24),
            (300, 9),
        ] {
            let _ = screen(&s, width, height);
        }
    }
}

/// A part of a word may be another word: `paus`, `runs ba`.
#[test]
fn a_text_that_is_cut_ends_with_an_ellipsis() {
    let mut s = state();
    let small = screen(&s, 40, 10);
    // The hints below are whole ones.
    let hints = small.lines().last().expect("a line").trim_end();
    assert_eq!(hints, "? keys  Enter job  t trigger  p pause");
    // A column that has room for a part of a note only is not there.
    let narrow = screen(&s, 80, 24);
    assert!(
        !narrow.contains("NOTE") && !narrow.contains('…'),
        "{narrow}"
    );
    let wider = screen(&s, 90, 24);
    assert!(wider.contains("NOTE"), "{wider}");
    s.said = Some((
        "the job was asked to end, and its output is kept".to_owned(),
        true,
    ));
    let said = |s: &State| screen(s, 40, 10).lines().last().expect("a line").to_owned();
    assert_eq!(said(&s), "the job was asked to end, and its outpu…");
    s.unicode = false;
    assert_eq!(said(&s), "the job was asked to end, and its outpu~");
    s.said = Some(("x".repeat(40), true));
    assert_eq!(said(&s), "x".repeat(40));
    assert_eq!(super::whole("a  bc", 5), "a  bc");
    assert_eq!(super::whole("a  bc", 4), "a");
    assert_eq!(super::whole("a  bc  d", 5), "a  bc");
    assert_eq!(super::whole("abc", 2), "");
}

#[test]
fn without_utf8_all_is_ascii_and_without_colours_there_are_none() {
    let mut s = state();
    (s.unicode, s.colours) = (false, false);
    for keys in ["1", "2", "3", "1\n", "p", "\x1b?"] {
        press(&mut s, keys);
        let text = screen(&s, 80, 24);
        assert!(text.is_ascii(), "{text}");
        let terminal = terminal(&s, 80, 24);
        let cells = &terminal.backend().buffer().content;
        let plain = cells
            .iter()
            .all(|c| c.fg == Color::Reset && c.bg == Color::Reset);
        assert!(plain, "{text}");
    }
    let s = state();
    let coloured = terminal(&s, 80, 24);
    let cells = &coloured.backend().buffer().content;
    assert!(cells.iter().any(|c| c.fg == Color::Red));
}

#[test]
fn the_timeline_shows_what_ran_what_runs_and_what_is_planned() {
    let mut s = state();
    press(&mut s, "2+");
    let text = screen(&s, 80, 24);
    let row = |name: &str| {
        let found = text.lines().find(|l| l.contains(name));
        found.unwrap_or_default().to_owned()
    };
    let draw = row("draw");
    assert!(
        draw.matches('✓').count() >= 6 && draw.contains('▶'),
        "{text}"
    );
    assert!(draw.matches('○').count() >= 3, "{text}");
    // Paused until resumed: what is planned will not run.
    assert!(!row("backup").contains('○'), "{text}");
    assert!(row("tidy").matches('│').count() == 1, "{text}");
}

#[test]
fn a_job_shows_its_runs_and_the_output_is_followed() {
    let mut s = state();
    press(&mut s, "j\n");
    let run = s.output.run.expect("the run that is active");
    let say = |s: &mut State, from: u64, data: &str, done| {
        let output = Output {
            from,
            data: data.into(),
            done,
            ..Output::default()
        };
        s.take(News::Output(run, Some(output)));
    };
    say(&mut s, 0, "one\ntwo\x1b[2J\n", false);
    // Repeated after an error: nothing is shown twice.
    say(&mut s, 4, "two\x1b[2J\nthree\n", false);
    let text = screen(&s, 80, 24);
    assert!(text.contains("draw  ▶ running"), "{text}");
    assert!(text.contains("output of 15:12:00, followed"), "{text}");
    assert!(text.contains("\none\ntwo\\x1b[2J\nthree\n"), "{text}");
    assert!(text.contains("next in 18 s:  15:13:00 15:14:00"), "{text}");
    let rest: String = (0..500).map(|n| format!("line {n}\n")).collect();
    let at = s.output.at;
    say(&mut s, at, &rest, true);
    assert!(screen(&s, 80, 24).contains("line 499"));
    let _ = s.key(Key::PageUp);
    let text = screen(&s, 80, 24);
    assert!(
        !text.contains("line 499") && text.contains("above the end"),
        "{text}"
    );
    // Another run has another output.
    let _ = s.key(Key::Down);
    assert!(s.output.run.is_some() && s.output.run != Some(run));
    let _ = s.key(Key::Esc);
    assert_eq!(s.screen, Screen::Overview);
}

#[test]
fn every_act_is_asked_about_first() {
    let mut s = state();
    let name = JobName::new("backup");
    assert_eq!(press(&mut s, "t"), None);
    let text = screen(&s, 80, 24);
    assert!(
        text.contains("Run backup once now, on one instance?"),
        "{text}"
    );
    assert_eq!(press(&mut s, "n"), None);
    assert_eq!(press(&mut s, "ty"), Some(Act::Trigger(name.clone())));
    assert_eq!(press(&mut s, "ry"), Some(Act::Resume(name.clone())));
    assert_eq!(press(&mut s, "cy"), Some(Act::Cancel(name.clone())));
    let skip = |count| {
        Some(Act::Skip {
            job: JobName::new("backup"),
            count,
        })
    };
    assert_eq!(press(&mut s, "s\n"), skip(1));
    assert_eq!(press(&mut s, "s<3\n"), skip(3));
    assert_eq!(press(&mut s, "s<x\n"), None);
    assert!(screen(&s, 80, 24).contains("write a number"));
    assert_eq!(
        press(&mut s, "\x1bpmoving q\t2h\n"),
        Some(Act::Pause {
            job: name,
            until: "2h".into(),
            reason: "moving q".into(),
        })
    );
    assert_eq!(press(&mut s, "3"), None);
    assert_eq!(
        press(&mut s, "dy"),
        Some(Act::Drain(InstanceId::new(WEB), true))
    );
    assert_eq!(
        press(&mut s, "juy"),
        Some(Act::Drain(InstanceId::new("web-2"), false))
    );
    assert_eq!(press(&mut s, "q"), Some(Act::Quit));
}

#[test]
fn what_is_found_is_selected() {
    let mut s = state();
    press(&mut s, "/rep");
    let text = screen(&s, 80, 24);
    assert!(
        text.contains("› report") && !text.contains("backup"),
        "{text}"
    );
    assert_eq!(
        press(&mut s, "\nty"),
        Some(Act::Trigger(JobName::new("report")))
    );
    press(&mut s, "/zzz\n");
    assert!(screen(&s, 80, 24).contains("no job has this in its name"));
    // Nothing is done to what nobody sees.
    assert_eq!(press(&mut s, "ty"), None);
    press(&mut s, "\x1b");
    assert!(screen(&s, 80, 24).contains("backup"));
}

#[test]
fn a_store_that_is_gone_is_said_and_comes_back() {
    let mut s = state();
    s.take(News::Away(
        "the store at redis://store:6379/0 is not available: refused".into(),
    ));
    s.tick(6000);
    let text = screen(&s, 80, 24);
    assert!(text.contains("no answer from the store for 5 s"), "{text}");
    assert!(text.contains("draw "), "{text}");
    s.take(News::Fleet {
        fleet: Box::new(fleet(&[(WEB, -5_000)])),
        shown: NOW + 5_000,
        local_ms: 6000,
    });
    let text = screen(&s, 80, 24);
    assert!(!text.contains("no answer"), "{text}");
}

#[test]
fn an_instance_is_shown_with_what_is_odd_about_it() {
    let mut s = state();
    press(&mut s, "3");
    let text = screen(&s, 80, 24);
    assert!(text.contains("› web-1"), "{text}");
    assert!(text.contains("web, silent"), "{text}");
}
