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
        process: 1,
        version: "0.1.0".into(),
        config: "c".into(),
        clock_offset_ms: 3.0,
        jobs: 4,
        ..Info::default()
    };
    let instances = names
        .iter()
        .map(|(id, ago)| (InstanceId::new(id), info(NOW - ago)));
    Fleet::of(instances)
}

fn open(id: RunId) -> Open {
    Open {
        run: Run {
            id,
            instance: InstanceId::new(WEB),
            granted_at: NOW - 41_300,
            ..Run::first(NOW - 41_318)
        },
        renewed_at: NOW - 100,
        ..Open::first(NOW - 41_318)
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
        started: record.started_at,
        to: record.finished_at?,
        ended: None,
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
        by: None,
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
            "1 job needs attention: report: failed",
            "not heard from: web-2",
            "4 jobs, 1 running, 1 paused; 1 live instance",
            "  JOB      STATE            NEXT IN LAST RUNS      TOOK     LATE RUN BY",
            "  report   ✗ failed     14 h 47 min ✗            1.24 s    12 ms web-1",
            "› backup   ‖ paused          paused ✓✓✓✓✓✓✓✓✓✓   1.24 s    12 ms web-1",
            "  draw     ▶ running           19 s ✓✓✓✓✓✓✓✓✓✓   41.0 s          web-1",
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
            "1 job needs attention: report: failed",
            "  JOB      STATE             NEXT IN",
            "  report   ✗ failed      14 h 47 min",
            "› backup   ‖ paused           paused",
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

/// A state in which `report` ended so, `lasted` ms after it began, `late` ms after its time.
fn ended(outcome: Outcome, lasted: i64, late: i64, error: Option<&str>) -> State {
    let mut s = state();
    let at = NOW - lasted - late - 1_000;
    let record = RunRecord {
        occurrence: Occurrence(at),
        lateness_ms: Some(late),
        error: error.map(str::to_owned),
        ..record("report", NOW - at, outcome).lasting(Some(at + late), Some(at + late + lasted))
    };
    s.take(News::Found {
        found: vec![Found {
            job: JobName::new("report"),
            state: Ok(Some(claim::State {
                incarnation: "i".into(),
                newest: record.occurrence.0,
                last: last(&record),
                ..claim::State::default()
            })),
            records: Some(vec![record]),
        }],
        incarnation: "i".into(),
    });
    s
}

/// `1 min 3…` reads as another length of time.
#[test]
fn a_length_of_time_is_never_cut() {
    const HOUR: i64 = 3_600_000;
    let lengths = [
        (999, "999 ms", "999 ms"),
        (59_949, "59.9 s", "59.9 s"),
        (63_000, "1m 3s", "1 min 3 s"),
        (90_000, "1m 30s", "1m 30s"),
        (2 * HOUR + 300_000, "2h 5m", "2 h 5 min"),
        (14 * HOUR + 47 * 60_000, "14h 47m", "14h 47m"),
        (76 * HOUR, "3 d 4 h", "3 d 4 h"),
        (364 * 24 * HOUR + 23 * HOUR, "364d 23h", "364d 23h"),
    ];
    for (ms, short, wider) in lengths {
        let mut s = ended(Outcome::Succeeded, ms, ms, None);
        press(&mut s, "G");
        for keys in ["k", "\n"] {
            press(&mut s, keys);
            let told = if keys == "k" { short } else { wider };
            for width in [80, 100, 120] {
                let text = screen(&s, width, 24);
                let row = text.lines().find(|l| l.starts_with('›'));
                let row = row.unwrap_or_else(|| panic!("no row is selected: {text}"));
                assert_eq!(row.matches(told).count(), 2, "{width}: {row}");
                assert!(!row.contains('…'), "{width}: {row}");
            }
        }
    }
}

#[test]
fn a_small_screen_shows_the_whole_state_and_countdown() {
    let s = ended(Outcome::LeaseLost, 1_000, 0, None);
    for (width, countdown) in [(70, "14 h 47 min"), (40, "14 h 47 min"), (33, "14h 47m")] {
        let text = screen(&s, width, 10);
        let row = text.lines().find(|l| l.contains("report   ✗"));
        let row = row.unwrap_or_else(|| panic!("no row: {text}"));
        assert!(
            row.contains("✗ lease lost ") && row.contains(countdown),
            "{text}"
        );
    }
    // Each state and countdown is whole or absent, whatever the width.
    for width in 24..80 {
        let text = screen(&s, width, 10);
        let cut = text.lines().skip(2).find(|l| l.contains('…'));
        assert!(cut.is_none(), "{width}: {text}");
    }
}

#[test]
fn the_error_of_the_selected_run_is_shown_in_full() {
    let why = "the lease ran out before the store answered, and the guard ended the whole process tree of the run";
    let mut s = ended(Outcome::LeaseLost, 1_000, 0, Some(why));
    press(&mut s, "/rep\n\n");
    let text = screen(&s, 80, 24);
    let lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(|l| l.starts_with("error: "));
    let at = at.unwrap_or_else(|| panic!("no error: {text}"));
    assert_eq!(
        format!("{}{}", lines[at], lines[at + 1]),
        format!("error: {why}")
    );
    assert!(lines[at + 2].starts_with("output of "), "{text}");
    // Of a longer one, two rows that say that it is cut; where there is little room, one.
    let mut s = ended(Outcome::LeaseLost, 1_000, 0, Some(&why.repeat(3)));
    press(&mut s, "/rep\n\n");
    let text = screen(&s, 80, 24);
    let rest = text.split_once("error: ").expect("an error").1;
    let cut = rest.lines().nth(1).expect("a second row");
    assert!(cut.ends_with('…') && cut.chars().count() == 80, "{text}");
    let text = screen(&s, 40, 10);
    assert!(
        text.contains("error: the lease") && text.contains("output of "),
        "{text}"
    );
    // Without an error there is no row of it.
    let mut s = ended(Outcome::Succeeded, 1_000, 0, None);
    press(&mut s, "/rep\n\n");
    assert!(!screen(&s, 80, 24).contains("error: "));
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
fn a_store_that_never_answered_is_said_and_answers() {
    let mut s = State::new(&configured(), "redis://store:6379/0", 1000, NOW);
    assert!(screen(&s, 80, 24).contains("asking the store at redis://store:6379/0 ..."));
    s.take(News::Away(
        "the store at redis://store:6379/0 is not available: refused; check that it is up".into(),
    ));
    s.tick(6000);
    let text = screen(&s, 80, 24);
    let lines: Vec<&str> = text.lines().skip(1).take(3).collect();
    assert_eq!(
        lines,
        [
            "no answer from the store yet, for 5 s, and it is asked again each second: the",
            "store at redis://store:6379/0 is not available: refused; check that it is up",
            "4 jobs",
        ],
        "{text}"
    );
    let small = screen(&s, 40, 10);
    assert!(
        small.contains("\nno answer from the store yet, for 5 s, …\n"),
        "{small}"
    );
    s.take(News::Fleet {
        fleet: Box::new(fleet(&[(WEB, -5_000)])),
        shown: NOW + 5_000,
        local_ms: 6000,
    });
    let text = screen(&s, 80, 24);
    assert!(!text.contains("no answer"), "{text}");
    assert!(
        text.contains("4 jobs, 0 running; 1 live instance"),
        "{text}"
    );
}

/// As `status` says it, on as many lines as it takes.
#[test]
fn a_fleet_that_waits_says_why() {
    let mut s = state();
    let waits = Fleet {
        born: NOW - 5_000,
        quarantine: Duration::from_secs(17),
        open: false,
        ..fleet(&[(WEB, 500)])
    };
    s.take(News::Fleet {
        fleet: Box::new(waits),
        shown: NOW,
        local_ms: 1000,
    });
    let text = screen(&s, 80, 24);
    let lines: Vec<&str> = text.lines().skip(1).take(7).collect();
    assert_eq!(
        lines,
        [
            "jobs wait up to 12 s more, until 2026-11-20T15:12:54Z: the store is new, was",
            "restarted or lost its data, and runs from before may still be alive; if nothing",
            "of this fleet runs anywhere else, there is no need to wait: stop web-1, and",
            "start it once with --new-fleet",
            "1 job needs attention: report: failed",
            "4 jobs, 1 running, 1 paused; 1 live instance",
            "  JOB      STATE            NEXT IN LAST RUNS      TOOK     LATE RUN BY",
        ],
        "{text}"
    );
    // Where it does not fit, it says so.
    let small = screen(&s, 80, 17);
    let fifth = small.lines().nth(5).expect("a line");
    assert!(fifth.ends_with("report: failed …"), "{small}");
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
    assert!(text.contains("not heard from: web-2"), "{text}");
    assert!(!text.contains("silent"), "{text}");
}

/// On the smallest screen all of the help can be scrolled to.
#[test]
fn the_help_is_complete_on_every_screen() {
    let mut state = state();
    press(&mut state, "?");
    for (width, height) in [(40, 10), (80, 24), (30, 6)] {
        let mut seen = String::new();
        press(&mut state, "g");
        for _ in 0..60 {
            let shown = screen(&state, width, height);
            // Below the headline.
            let cut = shown.lines().skip(2).any(|line| line.contains('…'));
            assert!(!cut, "{shown}");
            seen += &shown;
            press(&mut state, "j");
        }
        for part in [
            "overview",
            "trigger",
            "quit",
            "suspend",
            "lease lost",
            "replaced",
        ] {
            let part = if part == "trigger" { "once now" } else { part };
            assert!(seen.contains(part), "{width} x {height}: {part}: {seen}");
        }
        assert!(state.help);
    }
    assert!(screen(&state, 40, 10).contains("Up Down more  Esc back  q quit"));
    press(&mut state, "x");
    assert!(!state.help);
}

#[test]
fn q_quits_from_everywhere_but_where_text_is_typed() {
    for keys in ["", "?", "2", "3", "\n", "t", "\n?", "c"] {
        let mut state = state();
        press(&mut state, keys);
        assert_eq!(press(&mut state, "q"), Some(Act::Quit), "{keys:?}");
    }
    for keys in ["/", "p", "s"] {
        let mut state = state();
        press(&mut state, keys);
        assert_eq!(press(&mut state, "q"), None, "{keys:?}");
    }
}

/// One job and one instance.
fn with_draw(lines: &str) -> State {
    let text = format!("[jobs.draw]\nschedule = '* * * * *'\ncommand = 'x'\n{lines}\n");
    let config = config::parse(&text, Path::new("jobs.toml"), &|_| None).expect("valid");
    let mut state = State::new(&config, "redis://h", 0, NOW);
    state.take(News::Fleet {
        fleet: Box::new(fleet(&[(WEB, 100)])),
        shown: NOW,
        local_ms: 0,
    });
    state
}

/// What the screen shows once the store has told this of the job.
fn found_of_draw(state: &mut State, st: Option<claim::State>, records: Vec<RunRecord>) -> String {
    let found = Found {
        job: JobName::new("draw"),
        state: Ok(st),
        records: Some(records),
    };
    state.take(News::Found {
        found: vec![found],
        incarnation: "i".into(),
    });
    screen(state, 100, 20)
}

#[test]
fn an_overdue_job_is_shown_as_such() {
    let mut state = with_draw("expect_success_within = '1h'");
    let found = |state: &mut State, records: Vec<RunRecord>| found_of_draw(state, None, records);
    let (hour, failed) = (3_600_000, Outcome::Failed);
    let ok = |before| record("draw", before, Outcome::Succeeded);
    let fine = found(
        &mut state,
        vec![record("draw", 60_000, failed), ok(hour - 60_000)],
    );
    assert!(!fine.contains("overdue"), "{fine}");
    let late = found(
        &mut state,
        vec![record("draw", 60_000, failed), ok(hour + 60_000)],
    );
    assert!(late.contains("! overdue"), "{late}");
    assert!(late.contains("draw: no success for too long"), "{late}");
    // Of the records that are left none is a success.
    let none = found(&mut state, vec![record("draw", hour + 1000, failed)]);
    assert!(none.contains("! overdue"), "{none}");
    // By what the notifier noted it counts from another time, as in `status`; also without any record.
    let noted = |state: &mut State, since| {
        state.take(News::Noted(BTreeMap::from([(JobName::new("draw"), since)])));
        screen(state, 100, 20)
    };
    let fine = noted(&mut state, NOW - hour + 60_000);
    assert!(!fine.contains("overdue"), "{fine}");
    let late = noted(&mut state, NOW - hour - 1);
    assert!(late.contains("! overdue"), "{late}");
    found(&mut state, vec![]);
    let none = noted(&mut state, NOW - hour + 60_000);
    assert!(!none.contains("overdue"), "{none}");
    // Nothing but the time has to pass.
    state.tick(61_000);
    let late = screen(&state, 100, 20);
    assert!(late.contains("! overdue"), "{late}");
}

/// As `status` and the page: what is tried again has not failed yet. Its lateness counts from when it was due.
#[test]
fn a_job_that_is_tried_again_does_not_fail_and_its_retry_is_not_late() {
    let mut state = with_draw("retry = { attempts = 2, interval = '10s' }");
    let first = record("draw", 41_318, Outcome::Failed);
    let mut show = |records: Vec<RunRecord>, next_attempt: Option<claim::NextAttempt>| {
        let open = next_attempt.map(|next| Open {
            next_attempt: Some(next),
            ..open(RunId::random())
        });
        let st = claim::State {
            incarnation: "i".into(),
            newest: first.occurrence.0,
            last: records.first().and_then(last),
            open: open.into_iter().collect(),
            ..claim::State::default()
        };
        found_of_draw(&mut state, Some(st), records)
    };
    let next = claim::NextAttempt {
        at: NOW + 5000,
        trigger: Trigger::Retry,
    };
    let waits = show(vec![first.clone()], Some(next));
    assert!(
        waits.contains("retries") && !waits.contains("attention"),
        "{waits}"
    );
    let given_up = show(vec![first.clone()], None);
    assert!(
        given_up.contains("1 job needs attention: draw"),
        "{given_up}"
    );
    let due = first.finished_at.expect("an end") + 10_000;
    let retry = RunRecord {
        run_id: Some(RunId::random()),
        attempt: 2,
        trigger: Trigger::Retry,
        ..first.clone().lasting(Some(due + 7), Some(due + 1_000))
    };
    let late = show(vec![retry, first.clone()], None);
    let row = late.lines().find(|l| l.contains("draw  ")).expect("a row");
    assert!(row.contains("    7 ms web-1"), "{row}");
}
