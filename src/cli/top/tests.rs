use std::{collections::HashMap, path::Path};

use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    style::Color,
};

use super::{
    draw::draw,
    state::{Act, News, Screen, State, Text, Wanted},
};
use crate::{
    config::{self, Config},
    logic::claim::{self, Last, Open, Pause},
    model::{InstanceId, JobName, Occurrence, Outcome, Run, RunId, RunRecord, Trigger},
    store::{Fleet, Info, Output},
    view::{self, StatusView},
};

const NOW: i64 = 1_795_187_561_318; // 2026-11-20T15:12:41.318Z
const WEB: &str = "web-1";
const SIZES: [(u16, u16); 7] = [
    (1, 1),
    (20, 5),
    (21, 6),
    (40, 10),
    (79, 3),
    (80, 24),
    (300, 9),
];

fn configured() -> Config {
    let text = "[jobs.backup]\nschedule = '*/5 * * * *'\ncommand = 'x'\ndescription = 'of the database'\n\
        [jobs.draw]\nschedule = '* * * * *'\ncommand = 'x'\n\
        [jobs.report]\nschedule = '0 6 * * *'\ncommand = 'x'\n\
        [jobs.tidy]\nschedule = []\ncommand = 'x'\n";
    config::parse(text, Path::new("jobs.toml"), &|_| None).expect("valid")
}

fn record(job: &str, before: i64, outcome: Outcome) -> RunRecord {
    let at = NOW - before;
    let name = JobName::new(job);
    let record = RunRecord::without_run(&name, Occurrence(at), Trigger::Schedule, outcome);
    RunRecord {
        run_id: Some(RunId::random()),
        attempt: 1,
        instance: Some(InstanceId::new(WEB)),
        exit_code: Some(i32::from(outcome != Outcome::Succeeded)),
        error: (outcome != Outcome::Succeeded).then(|| "bad \x1b[2Jend".to_owned()),
        ..record.lasting(Some(at + 12), Some(at + 1_252))
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

/// A fleet in which `draw` runs, `report` failed, `backup` is paused, and one of two instances is silent.
fn news() -> News {
    let many = |job: &str| -> Vec<RunRecord> {
        let one = |n: i64| record(job, n * 60_000 + 41_318, Outcome::Succeeded);
        (1..20).map(one).collect()
    };
    let failed = vec![record("report", 33_161_318, Outcome::Failed)];
    let mut records: Vec<(JobName, Vec<RunRecord>)> = vec![];
    let mut states = HashMap::new();
    let mut job = |name: &str, open: Vec<Open>, pause: Option<Pause>, ended: Vec<RunRecord>| {
        let state = claim::State {
            incarnation: "i".into(),
            newest: ended.first().map_or(0, |r| r.occurrence.0),
            last: ended.first().and_then(last),
            open,
            pause,
            ..claim::State::default()
        };
        states.insert(JobName::new(name), state);
        records.push((JobName::new(name), ended));
    };
    let pause = Pause {
        until: None,
        reason: Some("moving \x1b[2Jdisks".into()),
        at: NOW - 1,
        by: None,
    };
    let open = Open {
        run: Run {
            instance: InstanceId::new(WEB),
            granted_at: NOW - 41_300,
            ..Run::first(NOW - 41_318)
        },
        renewed_at: NOW - 100,
        ..Open::first(NOW - 41_318)
    };
    job("backup", vec![], Some(pause), many("backup"));
    job("draw", vec![open], None, many("draw"));
    job("report", vec![], None, failed);
    job("tidy", vec![], None, vec![]);
    let config = configured();
    let info = |ago| Info {
        seen: NOW - ago,
        host: "web".into(),
        process: 1,
        config: config.digest.clone(),
        jobs: 4,
        ..Info::default()
    };
    let fleet = [(WEB, info(500)), ("web-2", info(60_000))];
    let fleet = Fleet::of(fleet.map(|(id, info)| (InstanceId::new(id), info)));
    let mut status = view::status(&config, "redis://store:6379/0", &fleet, &states, NOW, "i");
    for (j, (_, records)) in status.jobs.iter_mut().zip(&records) {
        j.judge(false, records.iter().map(RunRecord::decided));
    }
    News {
        status,
        records,
        text: Text::default(),
    }
}

fn state_of(change: impl FnOnce(&mut StatusView)) -> State {
    let mut state = State::new(&configured(), "redis://store:6379/0");
    let mut news = news();
    change(&mut news.status);
    state.take(news, 1000);
    state
}

fn state() -> State {
    state_of(|_| {})
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

#[track_caller]
fn has(state: &State, parts: &[&str], lacks: &[&str]) {
    let text = screen(state, 80, 24);
    let all = parts.iter().all(|part| text.contains(part));
    assert!(
        all && !lacks.iter().any(|part| text.contains(part)),
        "{text}"
    );
}

fn press(state: &mut State, keys: &str) -> Option<Act> {
    let mut act = None;
    for c in keys.chars() {
        let code = match c {
            '\n' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            '\x1b' => KeyCode::Esc,
            '<' => KeyCode::Backspace,
            '^' => KeyCode::PageUp,
            c => KeyCode::Char(c),
        };
        act = state.key(KeyEvent::new(code, KeyModifiers::NONE));
    }
    act
}

#[test]
fn the_jobs_at_80_by_24() {
    let text = screen(&state(), 80, 24);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[..10],
        [
            " 1 jobs  2 timeline  3 instances      redis://store:6379/0  2026-11-20T15:12:41Z",
            "1 job needs attention: report: failed",
            "not heard from: web-2",
            "4 jobs, 1 running, 1 paused; 1 live instance",
            "  JOB    STATE     NEXT           LAST RUNS    TOOK RUNNING ON",
            "› report ✗ failed  in 14 h 47 min ✗          1.24 s",
            "  backup ‖ paused  when resumed   ✓✓✓✓✓✓✓✓✓✓ 1.24 s",
            "  draw   ▶ running in 18 s        ✓✓✓✓✓✓✓✓✓✓ 1.24 s web-1 for 41.3 s",
            "  tidy   not yet   when triggered",
            "",
        ],
        "{text}"
    );
    assert!(lines[23].starts_with("? keys  / find  t trigger"), "{text}");
}

#[test]
fn the_timeline_has_a_mark_for_each_run_and_each_planned_occurrence() {
    let mut s = state();
    press(&mut s, "\t+");
    let text = screen(&s, 80, 24);
    let row = |text: &str, job: &str| {
        let mut lines = text.lines().skip(4);
        let line = lines.find(|line| line.contains(job)).expect("its row");
        line.chars().skip(11).collect::<String>()
    };
    let count = |row: &str, mark: char| row.chars().filter(|c| *c == mark).count();
    // Of 10 minutes, six and a half are past: `draw` runs each minute, and `backup` is paused.
    let draw = row(&text, "draw");
    let (past, coming) = draw.split_once('▶').expect("it runs");
    assert_eq!((count(past, '✓'), count(coming, '○')), (6, 3), "{text}");
    assert_eq!((count(past, '○'), count(coming, '✓')), (0, 0), "{text}");
    let backup = row(&text, "backup");
    let (past, coming) = backup.split_once('│').expect("now");
    assert_eq!((count(past, '✓'), count(coming, '-')), (6, 1), "{text}");
    assert_eq!(count(&row(&text, "report"), '✗'), 0, "{text}");
    // Its failed run was nine hours ago.
    press(&mut s, "---");
    let text = screen(&s, 80, 24);
    assert_eq!(count(&row(&text, "report"), '✗'), 1, "{text}");
    // A job that is opened from here comes back here.
    press(&mut s, "\n\x1b");
    assert_eq!(s.screen, Screen::Timeline);
}

#[test]
fn each_screen_is_drawn_at_each_size_and_hostile_text_is_escaped() {
    let mut s = state();
    for keys in ["1", "2", "3", "2-\n", "\x1b?", "?p", "\x1b3d", "\x1b1/x"] {
        press(&mut s, keys);
        for (width, height) in SIZES {
            let text = screen(&s, width, height);
            assert!(!text.contains('\x1b'), "{text}");
        }
    }
    let wide = screen(&state(), 200, 50);
    assert!(wide.contains("moving \\x1b[2Jdisks"), "{wide}");
    // A name that is too long for its column says so.
    let long = state_of(|s| s.jobs[1].job = JobName::new(&"x".repeat(90)));
    has(&long, &["xxx… ▶ running"], &[]);
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
        let mut cells = terminal.backend().buffer().content.iter();
        assert!(cells.all(|c| (c.fg, c.bg) == (Color::Reset, Color::Reset)));
    }
    let coloured = terminal(&state(), 80, 24);
    let mut cells = coloured.backend().buffer().content.iter();
    assert!(cells.any(|c| c.fg == Color::Red));
}

#[test]
fn a_job_shows_its_runs_and_the_output_of_the_one_that_is_selected() {
    let mut s = state();
    assert_eq!(s.wanted(), Wanted::default());
    press(&mut s, "jj\n");
    let run = s.wanted().run.expect("the run that is active");
    let mut text = Text {
        run: Some(run),
        ..Text::default()
    };
    let mut say = |s: &mut State, said: &str, done| {
        let output = Output {
            done,
            ..Output::default()
        };
        text.add(said, &output);
        let text = text.clone();
        s.take(News { text, ..news() }, 1000);
    };
    // The run of every other state is another one: this one is selected by its occurrence.
    s.text.run = Some(run);
    has(
        &s,
        &[
            "draw  ▶ running  * * * * * UTC",
            "it has written nothing yet",
        ],
        &[],
    );
    has(
        &s,
        &["next: in 18 s  2026-11-20T15:13:00Z  2026-11-20T15:14:00Z"],
        &[],
    );
    say(&mut s, "one\ntwo\n", false);
    s.text.run = s.wanted().run;
    has(&s, &["output of 2026-11-20T15:12:00Z", "\none\ntwo\n"], &[]);
    let rest: String = (0..20_000).map(|n| format!("line {n}\n")).collect();
    say(&mut s, &rest, true);
    assert!(s.text.text.len() <= 64 << 10);
    s.text.run = s.wanted().run;
    has(&s, &["line 19999"], &[]);
    press(&mut s, "^");
    has(&s, &["line 19989"], &["line 19999"]);
    // Another run has another output, and an occurrence without a run is explained.
    let before = s.wanted().run;
    press(&mut s, "j");
    assert!(s.wanted().run.is_some() && s.wanted().run != before);
    let at = Occurrence(NOW - 101_318);
    assert_eq!(press(&mut s, "w"), Some(Act::Why(JobName::new("draw"), at)));
    s.why = Some("It ran once on web-1.\n\nINSTANCE".to_owned());
    has(&s, &["It ran once on web-1."], &["output of"]);
    press(&mut s, "\x1b");
    has(&s, &["output of"], &[]);
    press(&mut s, "\x1b");
    assert_eq!(s.screen, Screen::Jobs);
    // The whole error of the selected run is shown, for which the table has no room.
    press(&mut s, "g\n");
    has(&s, &["\nbad \\x1b[2Jend\n"], &[]);
}

#[test]
fn every_act_is_asked_about_first() {
    let mut s = state();
    let name = JobName::new("report");
    assert_eq!(press(&mut s, "t"), None);
    has(&s, &["Run report once now, on one instance?"], &[]);
    assert_eq!(press(&mut s, "n"), None);
    for (keys, act) in [
        ("ty", Act::Trigger(name.clone())),
        ("r\n", Act::Resume(name.clone())),
        ("cy", Act::Cancel(name.clone())),
        ("s1\n", Act::Skip(name.clone(), 1)),
        ("s2<3\n", Act::Skip(name.clone(), 3)),
        (
            "pmoving q\t2h\n",
            Act::Pause(name, "moving q".into(), "2h".into()),
        ),
        ("3dy", Act::Drain(InstanceId::new(WEB), true)),
        ("juy", Act::Drain(InstanceId::new("web-2"), false)),
    ] {
        assert_eq!(press(&mut s, keys), Some(act), "{keys:?}");
    }
    assert_eq!(press(&mut s, "1sx\n"), None);
    has(&s, &["write a number"], &[]);
}

#[test]
fn what_is_found_is_selected_and_nothing_is_done_to_what_nobody_sees() {
    let mut s = state();
    press(&mut s, "/bac\n");
    has(&s, &["› backup"], &["draw"]);
    assert_eq!(
        press(&mut s, "ty"),
        Some(Act::Trigger(JobName::new("backup")))
    );
    press(&mut s, "/<<<zzz\n");
    has(&s, &["no job has this in its name"], &[]);
    assert_eq!(press(&mut s, "ty"), None);
    press(&mut s, "\x1b");
    has(&s, &["backup"], &[]);
}

#[test]
fn a_store_that_does_not_answer_is_said_and_comes_back() {
    let mut s = State::new(&configured(), "redis://store:6379/0");
    has(&s, &["asking the store at redis://store:6379/0 ..."], &[]);
    s.tick(1000);
    s.away("refused".into(), 1000);
    s.tick(6000);
    s.away("refused; check that it is up".into(), 5000);
    let said = "no answer from the store yet, for 5 s, and it is asked again each second";
    has(&s, &[said, "refused; check that it is up"], &[]);
    s.take(news(), 7000);
    has(&s, &["4 jobs, 1 running"], &["no answer"]);
    s.away("refused".into(), 7000);
    s.tick(12_000);
    let said = "no answer from the store for 5 s, this is what was known then: refused";
    has(&s, &[said, "draw "], &[]);
}

/// As `status` says it, on as many lines as it takes.
#[test]
fn a_fleet_that_waits_says_why() {
    let why = "jobs wait up to 12 s more, until 2026-11-20T15:12:54Z: the store is new, was restarted or lost its data";
    let s = state_of(|s| {
        s.epoch.open = false;
        s.epoch.words = why.to_owned();
    });
    let text = screen(&s, 80, 24);
    assert!(text.replace('\n', " ").contains(why), "{text}");
    // Where it does not fit, it says so.
    let small = screen(&s, 40, 9);
    assert!(
        small.lines().nth(3).is_some_and(|l| l.ends_with('…')),
        "{small}"
    );
}

#[test]
fn instances_are_shown_as_status_shows_them() {
    let mut s = state_of(|s| s.instances[0].draining = true);
    press(&mut s, "3");
    has(
        &s,
        &["› web-1", "draining", "not heard from: web-2"],
        &["silent"],
    );
}

#[test]
fn keys_are_listed_and_q_quits_from_everywhere_but_where_text_is_typed() {
    for keys in ["", "?", "2", "\n", "t", "\n?", "c"] {
        let mut s = state();
        press(&mut s, keys);
        assert_eq!(press(&mut s, "q"), Some(Act::Quit), "{keys:?}");
    }
    for keys in ["/", "p", "s"] {
        let mut s = state();
        press(&mut s, keys);
        assert_eq!(press(&mut s, "q"), None, "{keys:?}");
    }
    let mut s = state();
    press(&mut s, "?");
    has(
        &s,
        &["run the job once now", "✗ failed", "- skipped"],
        &["STATE"],
    );
    press(&mut s, "x");
    assert!(!s.help);
    let control = |c| KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL);
    for (key, act) in [('c', Act::Quit), ('z', Act::Suspend), ('l', Act::Redraw)] {
        assert_eq!(s.key(control(key)), Some(act));
    }
}
