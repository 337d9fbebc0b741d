//! Occurrences against `tests/oracle/next.py`: another language, another time zone database, another algorithm.
//!
//! The two databases are of different versions, and governments change their minds. So a case counts only when
//! both give its zone the same offsets over its whole window; how many did is printed, and too few is a failure.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use jiff::{Timestamp, tz::TimeZoneDatabase};
use serde::{Deserialize, Serialize};
use soloist::{
    logic::schedule::{Dst, Schedule},
    model::Occurrence,
};

use crate::support::skip;

#[derive(Serialize)]
struct Case {
    zone: String,
    pattern: String,
    /// Unix seconds, on a whole minute.
    from: i64,
    n: usize,
    until: i64,
}

#[derive(Deserialize)]
struct Answer {
    times: Vec<i64>,
    /// (Unix seconds, offset in seconds) at `from` and after each change.
    offsets: Vec<(i64, i64)>,
}

const DAY: i64 = 86_400;
/// 2024-01-01T00:00:00Z and three years on.
const FROM: i64 = 1_704_067_200;
const TO: i64 = FROM + 1096 * DAY;

/// None when there is no Python 3.9 or newer here, which is said.
fn ask_python(cases: &[Case]) -> Option<Vec<Option<Answer>>> {
    let usable = Command::new("python3")
        .args([
            "-c",
            "import sys, zoneinfo; sys.exit(not zoneinfo.available_timezones())",
        ])
        .stderr(Stdio::null())
        .status();
    if !usable.is_ok_and(|status| status.success()) {
        skip("no python3 (3.9 or newer, with tzdata) to compare with");
        return None;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/next.py");
    let mut python = Command::new("python3")
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It reads everything before it writes, so the pipes cannot block each other.
    python
        .stdin
        .take()
        .unwrap()
        .write_all(&serde_json::to_vec(cases).unwrap())
        .unwrap();
    let output = python.wait_with_output().unwrap();
    assert!(output.status.success(), "next.py: {}", output.status);
    let answers: Vec<Option<Answer>> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answers.len(), cases.len());
    Some(answers)
}

/// Patterns that jumps of the clock matter to, and others.
fn pattern(random: &mut fastrand::Rng) -> String {
    let mut pick = |choices: &[&str]| choices[random.usize(0..choices.len())].to_owned();
    let second = pick(&["", "", "", "", "15 ", "*/30 ", "0,45 "]);
    let minute = pick(&["0", "30", "*/15", "0,30", "10-50/20", "59", "5"]);
    let hour = pick(&[
        "*", "*/2", "0", "1", "2", "3", "1-3", "0,12", "23", "*/6", "4", "17",
    ]);
    let day = pick(&["*", "*", "*", "*/2", "1-15", "29-31"]);
    let weekday = pick(&["*", "*", "*", "0", "1-5", "6,7"]);
    format!("{second}{minute} {hour} {day} * {weekday}")
}

/// Two windows for each zone: around a change of its clock where it has one, else anywhere.
fn cases() -> Vec<Case> {
    let database = TimeZoneDatabase::bundled();
    let mut random = fastrand::Rng::with_seed(31);
    let mut names: Vec<String> = database.available().map(|name| name.to_string()).collect();
    names.sort();
    let mut cases = Vec::new();
    for name in names {
        let zone = database.get(&name).unwrap();
        let changes: Vec<i64> = zone
            .following(Timestamp::from_second(FROM + 3 * DAY).unwrap())
            .map(|change| change.timestamp().as_second())
            .take_while(|at| *at < TO - 3 * DAY)
            .collect();
        for _ in 0..2 {
            let middle = match changes.len() {
                0 => random.i64(FROM + 2 * DAY..TO - 2 * DAY),
                count => changes[random.usize(0..count)],
            };
            let from = (middle - DAY - random.i64(0..DAY)).div_euclid(60) * 60;
            cases.push(Case {
                zone: name.clone(),
                pattern: pattern(&mut random),
                from,
                n: 200,
                until: from + 4 * DAY,
            });
        }
    }
    cases
}

/// Our zone has the offsets that Python saw, minute by minute.
fn same_offsets(zone: &jiff::tz::TimeZone, case: &Case, seen: &[(i64, i64)]) -> bool {
    let mut ours: Vec<(i64, i64)> = Vec::new();
    for at in (case.from..case.until).step_by(60) {
        let offset = zone
            .to_offset(Timestamp::from_second(at).unwrap())
            .seconds()
            .into();
        if ours.last().is_none_or(|(_, last)| *last != offset) {
            ours.push((at, offset));
        }
    }
    ours == seen
}

fn ours(zone: &jiff::tz::TimeZone, case: &Case) -> Vec<i64> {
    let schedule = Schedule::parse(&case.pattern, zone, Dst::default(), "job").unwrap();
    let mut t = Occurrence(case.from * 1000 - 1);
    let mut times = Vec::new();
    while times.len() < case.n
        && let Some(next) = schedule.next_after(t)
        && next.0 < case.until * 1000
    {
        times.push(next.0 / 1000);
        t = next;
    }
    times
}

#[test]
fn occurrences_equal_those_of_the_python_oracle() {
    let cases = cases();
    let Some(answers) = ask_python(&cases) else {
        return;
    };
    let database = TimeZoneDatabase::bundled();
    let (mut compared, mut moved, mut zones) = (0, 0, BTreeSet::new());
    let (mut unknown, mut other_rules) = (0, BTreeSet::new());
    for (case, answer) in cases.iter().zip(answers) {
        let Some(answer) = answer else {
            unknown += 1;
            continue;
        };
        let zone = database.get(&case.zone).unwrap();
        if !same_offsets(&zone, case, &answer.offsets) {
            other_rules.insert(&case.zone);
            continue;
        }
        assert_eq!(
            ours(&zone, case),
            answer.times,
            "`{}` in {} from {}",
            case.pattern,
            case.zone,
            Timestamp::from_second(case.from).unwrap()
        );
        compared += 1;
        moved += usize::from(answer.offsets.len() > 1);
        zones.insert(&case.zone);
    }
    println!(
        "compared {compared} of {} cases in {} zones, {moved} of them across a change of the clock; \
         left out: {unknown} in zones unknown to Python, zones with other rules there: {other_rules:?}",
        cases.len(),
        zones.len()
    );
    assert!(
        compared >= 1000 && zones.len() >= 300 && moved >= 300,
        "too little was compared"
    );
}

/// What `soloist next` prints.
#[derive(Deserialize)]
struct Upcoming {
    job: String,
    occurrence: Timestamp,
    /// RFC 3339 with the offset in the job's zone.
    local: String,
}

/// Evenings before clocks change somewhere: in 2024 in North America, in 2025 in Europe, in 2026 in the south; and one
/// week in which (almost) none does.
const WINDOWS: [&str; 5] = [
    "2024-03-09T20:00:00Z",
    "2024-11-02T20:00:00Z",
    "2025-10-25T12:00:00Z",
    "2026-04-04T06:00:00Z",
    "2025-07-08T00:00:00Z",
];
const WINDOW: i64 = DAY + DAY / 2;

/// The whole way: `jobs.toml`, the built program, its JSON.
#[test]
fn what_the_program_plans_equals_the_python_oracle() {
    let database = TimeZoneDatabase::bundled();
    let mut random = fastrand::Rng::with_seed(7);
    let mut zones: Vec<String> = database.available().map(|name| name.to_string()).collect();
    zones.sort();
    let changes = |zone: &str| {
        let from = Timestamp::from_second(FROM).unwrap();
        let zone = database.get(zone).unwrap();
        let next = zone.following(from).next();
        next.is_some_and(|change| change.timestamp().as_second() < TO)
    };
    // All whose clocks change, and some of the others.
    let jobs: Vec<(String, String)> = zones
        .into_iter()
        .enumerate()
        .filter(|(i, zone)| i % 4 == 0 || changes(zone))
        .map(|(_, zone)| (zone, pattern(&mut random)))
        .collect();
    let starts: Vec<i64> = WINDOWS
        .iter()
        .map(|t| t.parse::<Timestamp>().unwrap().as_second())
        .collect();
    let cases: Vec<Case> = starts
        .iter()
        .flat_map(|from| jobs.iter().map(move |job| (*from, job)))
        .map(|(from, (zone, pattern))| Case {
            zone: zone.clone(),
            pattern: pattern.clone(),
            from,
            n: usize::MAX >> 1,
            until: from + WINDOW,
        })
        .collect();
    let Some(answers) = ask_python(&cases) else {
        return;
    };

    let dir = tempfile::tempdir().unwrap();
    let mut text = String::from("[defaults]\ncommand = \"true\"\n");
    for (i, (zone, pattern)) in jobs.iter().enumerate() {
        text += &format!("[jobs.j{i:03}]\nschedule = {pattern:?}\ntimezone = {zone:?}\n");
    }
    let config = dir.path().join("jobs.toml");
    std::fs::write(&config, text).unwrap();

    let (mut compared, mut occurrences, mut moved) = (0, 0, 0);
    let mut other_rules = BTreeSet::new();
    for (w, from) in starts.iter().enumerate() {
        let window = w * jobs.len()..(w + 1) * jobs.len();
        let (cases, answers) = (&cases[window.clone()], &answers[window]);
        // More than there are, so that none in the window is cut off.
        let n: usize = answers
            .iter()
            .flatten()
            .map(|a| a.times.len())
            .sum::<usize>()
            * 2
            + 1000;
        let output = Command::new(env!("CARGO_BIN_EXE_soloist"))
            .arg("--config")
            .arg(&config)
            .args(["next", "--json", "-n", &n.to_string(), "--from"])
            // `next` prints what comes after that instant.
            .arg(
                Timestamp::from_millisecond(from * 1000 - 1)
                    .unwrap()
                    .to_string(),
            )
            .env_remove("SOLOIST_LOG")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{said}");
        let list: Vec<Upcoming> = serde_json::from_slice(&output.stdout).unwrap();
        assert!(list.is_sorted_by_key(|u| u.occurrence));
        let until = from + WINDOW;
        assert!(
            list.last().unwrap().occurrence.as_second() >= until,
            "too few were asked for"
        );
        let mut planned: BTreeMap<&str, Vec<&Upcoming>> = BTreeMap::new();
        for u in &list {
            if u.occurrence.as_second() < until {
                planned.entry(&u.job).or_default().push(u);
            }
        }
        for (i, (case, answer)) in cases.iter().zip(answers).enumerate() {
            let Some(answer) = answer else { continue };
            let zone = database.get(&case.zone).unwrap();
            if !same_offsets(&zone, case, &answer.offsets) {
                other_rules.insert(&case.zone);
                continue;
            }
            let ours = planned
                .remove(format!("j{i:03}").as_str())
                .unwrap_or_default();
            let times: Vec<i64> = ours.iter().map(|u| u.occurrence.as_second()).collect();
            assert_eq!(
                times, answer.times,
                "`{}` in {} from {}",
                case.pattern, case.zone, WINDOWS[w]
            );
            for u in ours {
                assert_eq!(u.local.parse::<Timestamp>().unwrap(), u.occurrence);
                let at = u.occurrence.as_second();
                let seen = answer.offsets.iter().rev().find(|(since, _)| *since <= at);
                let local = jiff::civil::DateTime::from_parts(
                    u.local[..10].parse().unwrap(),
                    u.local[11..19].parse().unwrap(),
                );
                let shown = local
                    .to_zoned(jiff::tz::TimeZone::UTC)
                    .unwrap()
                    .timestamp()
                    .as_second();
                assert_eq!(
                    Some(shown - at),
                    seen.map(|(_, offset)| *offset),
                    "{}",
                    u.local
                );
                occurrences += 1;
            }
            compared += 1;
            moved += usize::from(answer.offsets.len() > 1);
        }
    }
    println!(
        "compared {occurrences} occurrences in {compared} of {} cases of {} jobs, {moved} of them across a change \
         of the clock; zones with other rules in Python: {other_rules:?}",
        cases.len(),
        jobs.len()
    );
    assert!(
        compared >= 1000 && occurrences >= 10_000 && moved >= 200,
        "too little was compared"
    );
}
