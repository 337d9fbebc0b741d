//! Slow, simple programs that say when a job is due, to compare with. They share nothing with the code under test:
//! own field matcher, own calendar, and time passes minute by minute (or second by second). Only the zones'
//! offsets come from the same place.
//!
//! [`vixie`] is the main loop of ISC cron with its virtual clock. [`by_policy`] takes the words of [`Gap`] and
//! [`Fold`] literally.

use std::collections::{BTreeSet, HashMap};

use jiff::{Timestamp, tz::TimeZone};

use super::{Dst, Fold, Gap, Schedule, tests::zone};
use crate::model::Occurrence;

const MINUTE: i64 = 60;
const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// Five or six fields of numbers, `*`, ranges, steps and lists.
struct Pattern {
    /// second, minute, hour, day, month, weekday
    sets: [BTreeSet<i64>; 6],
    day_star: bool,
    wild: bool,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let mut fields: Vec<&str> = text.split(' ').collect();
        if fields.len() == 5 {
            fields.insert(0, "0");
        }
        let limits = [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7)];
        let sets = std::array::from_fn(|i| {
            let mut set = BTreeSet::new();
            for item in fields[i].split(',') {
                let (range, step) = item.split_once('/').unwrap_or((item, "1"));
                let (low, high) = match range.split_once('-') {
                    Some((low, high)) => (low.parse().unwrap(), high.parse().unwrap()),
                    None if range == "*" => limits[i],
                    None => (range.parse().unwrap(), range.parse().unwrap()),
                };
                set.extend((low..=high).step_by(step.parse().unwrap()));
            }
            if i == 5 && set.contains(&7) {
                set.insert(0);
            }
            set
        });
        Self {
            sets,
            day_star: fields[3].starts_with('*') || fields[5].starts_with('*'),
            wild: fields[1].starts_with('*') || fields[2].starts_with('*'),
        }
    }

    /// `local`: seconds on the wall clock.
    fn matches(&self, local: i64) -> bool {
        self.matches_minute(local) && self.sets[0].contains(&local.rem_euclid(60))
    }

    fn matches_minute(&self, local: i64) -> bool {
        let second = local.rem_euclid(DAY);
        self.sets[1].contains(&(second / 60 % 60))
            && self.sets[2].contains(&(second / 3600))
            && self.matches_day(local.div_euclid(DAY))
    }

    fn matches_day(&self, days: i64) -> bool {
        let (_, month, day) = date(days);
        let weekday = (days + 4).rem_euclid(7); // 1 January 1970 was a Thursday
        let (by_date, by_weekday) = (self.sets[3].contains(&day), self.sets[5].contains(&weekday));
        self.sets[4].contains(&month)
            && if self.day_star {
                by_date && by_weekday
            } else {
                by_date || by_weekday
            }
    }
}

/// Year, month and day of a day counted from 1970, by counting.
fn date(mut days: i64) -> (i64, i64, i64) {
    let leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let mut year = 1970;
    while days >= 365 + i64::from(leap(year)) {
        days -= 365 + i64::from(leap(year));
        year += 1;
    }
    let lengths = [
        31,
        28 + i64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month as i64 + 1, days + 1)
}

/// What the wall clock shows at each step of a window: (instant, local), both in seconds.
fn wall_clock(zone: &TimeZone, from: i64, to: i64, step: i64) -> Vec<(i64, i64)> {
    let offset = |at| {
        i64::from(
            zone.to_offset(Timestamp::from_second(at).unwrap())
                .seconds(),
        )
    };
    (from..to)
        .step_by(step as usize)
        .map(|at| (at, at + offset(at)))
        .collect()
}

/// ISC cron's main loop: it wakes up each minute, compares the wall clock with its virtual clock, and decides by
/// the difference which jobs to look for in which minutes.
fn vixie(pattern: &Pattern, clock: &[(i64, i64)]) -> BTreeSet<i64> {
    let mut due = BTreeSet::new();
    let mut virtual_minute = clock[0].1.div_euclid(60) - 1;
    for &(at, local) in clock {
        let now = local.div_euclid(60);
        let difference = now - virtual_minute;
        let mut find_jobs = |minute: i64, wild: bool, fixed: bool| {
            if (if pattern.wild { wild } else { fixed }) && pattern.matches_minute(minute * 60) {
                due.insert(at);
            }
        };
        match difference {
            1 => {
                virtual_minute = now;
                find_jobs(now, true, true);
            }
            2..=5 => {
                while virtual_minute < now {
                    virtual_minute += 1;
                    find_jobs(virtual_minute, true, true);
                }
            }
            6..=180 => {
                find_jobs(now, true, false);
                while virtual_minute < now {
                    virtual_minute += 1;
                    find_jobs(virtual_minute, false, true);
                }
            }
            -180..=0 => find_jobs(now, true, false),
            _ => {
                virtual_minute = now;
                find_jobs(now, true, true);
            }
        }
    }
    due
}

/// The words of [`Gap`] and [`Fold`], taken literally, in steps of `step` seconds.
fn by_policy(
    pattern: &Pattern,
    clock: &[(i64, i64)],
    step: i64,
    gap: Gap,
    fold: Fold,
) -> BTreeSet<i64> {
    let mut shown: HashMap<i64, Vec<i64>> = HashMap::new();
    for &(at, local) in clock {
        shown.entry(local).or_default().push(at);
    }
    let mut due = BTreeSet::new();
    for (&local, instants) in &shown {
        if pattern.matches(local) {
            match fold {
                Fold::First => due.extend(instants.first()),
                Fold::Second => due.extend(instants.last()),
                Fold::Both => due.extend(instants),
            }
        }
    }
    if gap == Gap::Shift {
        for pair in clock.windows(2) {
            let swallowed = (pair[0].1 + step..pair[1].1).step_by(step as usize);
            if swallowed.into_iter().any(|local| pattern.matches(local)) {
                due.insert(pair[1].0);
            }
        }
    }
    due
}

fn walk(schedule: &Schedule, from: i64, to: i64) -> BTreeSet<i64> {
    let mut due = BTreeSet::new();
    let mut t = Occurrence(from * 1000 - 1);
    while let Some(next) = schedule.next_after(t)
        && next.0 < to * 1000
    {
        assert_eq!(next.0 % 1000, 0);
        due.insert(next.0 / 1000);
        t = next;
    }
    due
}

fn random_field(random: &mut fastrand::Rng, low: i64, high: i64, star: bool) -> String {
    let mut number = || random.i64(low..=high);
    let (a, b, c) = (number(), number(), number());
    let (from, to) = (a.min(b), a.max(b));
    match random.u32(0..10) {
        0 | 1 if star => "*".to_owned(),
        2 if star => format!("*/{}", random.i64(2..=(high - low).min(20))),
        3 => format!("{from}-{to}/{}", random.i64(1..=4.min(to - from + 1))),
        4 if to - from < 10 => format!("{from}-{to}"),
        5 | 6 => format!("{a},{b},{c}"),
        7 => format!("{a},{b}"),
        _ => a.to_string(),
    }
}

fn random_pattern(random: &mut fastrand::Rng) -> String {
    let minute = match random.u32(0..6) {
        0 => "*/15".to_owned(),
        1 => ["0", "30", "0,30", "59"][random.usize(0..4)].to_owned(),
        2 if random.u32(0..8) == 0 => "*".to_owned(),
        _ => random_field(random, 0, 59, false),
    };
    let hour = match random.u32(0..5) {
        0 => "*".to_owned(),
        1 => "*/2".to_owned(),
        // where most clocks jump
        2 | 3 => random_field(random, 0, 4, false),
        _ => random_field(random, 0, 23, true),
    };
    let (day, month, weekday) = match random.u32(0..4) {
        0 => (
            random_field(random, 1, 31, true),
            "*".to_owned(),
            random_field(random, 0, 7, true),
        ),
        _ => ("*".to_owned(), "*".to_owned(), "*".to_owned()),
    };
    format!("{minute} {hour} {day} {month} {weekday}")
}

/// Jumps of `zone` in the years 1990 to 2037: (instant, seconds).
fn jumps(zone: &TimeZone) -> Vec<(i64, i64)> {
    let from = Timestamp::from_second(631_152_000).unwrap();
    let offset = |at| {
        i64::from(
            zone.to_offset(Timestamp::from_second(at).unwrap())
                .seconds(),
        )
    };
    zone.following(from)
        .map(|transition| transition.timestamp().as_second())
        .take_while(|at| *at < 2_145_916_800)
        .map(|at| (at, offset(at) - offset(at - 1)))
        .filter(|(_, by)| *by != 0)
        .collect()
}

/// A zone's name, the zone and its [`jumps`].
type Moving = (String, TimeZone, Vec<(i64, i64)>);

/// Zones that change their clocks.
fn moving_zones() -> Vec<Moving> {
    let mut zones: Vec<_> = jiff::tz::TimeZoneDatabase::bundled()
        .available()
        .map(|name| name.to_string())
        .map(|name| {
            let zone = zone(&name);
            let jumps = jumps(&zone);
            (name, zone, jumps)
        })
        .filter(|(_, _, jumps)| !jumps.is_empty())
        .collect();
    zones.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(zones.len() > 300, "{} zones with jumps", zones.len());
    zones
}

/// Promise 2 of docs/guarantees.md: each planned instant, in every zone.
#[test]
fn instants_equal_those_of_a_simulated_vixie_cron_in_all_zones() {
    let mut random = fastrand::Rng::with_seed(2026);
    let mut cases = 0;
    for (name, zone, jumps) in moving_zones() {
        for _ in 0..2 {
            let (jump, by) = jumps[random.usize(0..jumps.len())];
            let (from, to) = (jump - DAY, jump + DAY + 6 * HOUR);
            if jumps
                .iter()
                .any(|(other, _)| (from - DAY..from + 4 * HOUR).contains(other))
            {
                continue; // the simulation would start within the effects of the other one
            }
            let clock = wall_clock(&zone, from, to, MINUTE);
            for _ in 0..4 {
                let text = random_pattern(&mut random);
                let schedule = match Schedule::parse(&text, &zone, Dst::default(), "job") {
                    Ok(schedule) => schedule,
                    Err(error) => panic!("{text}: {error}"),
                };
                let expected = vixie(&Pattern::new(&text), &clock);
                let got = walk(&schedule, from, to);
                assert_eq!(
                    got,
                    expected,
                    "`{text}` in {name} around {} (jump of {by} s)",
                    Timestamp::from_second(jump).unwrap()
                );
                cases += 1;
            }
        }
    }
    assert!(cases > 2000, "only {cases} cases");
}

#[test]
fn overrides_do_what_their_words_say_in_all_zones() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut cases = 0;
    for (name, zone, jumps) in moving_zones() {
        let (jump, by) = jumps[random.usize(0..jumps.len())];
        let (from, to) = (jump - 9 * HOUR, jump + 9 * HOUR);
        let alone = jumps
            .iter()
            .filter(|(other, _)| (other - jump).abs() < 2 * DAY)
            .count()
            == 1;
        if by.abs() >= 3 * HOUR || !alone {
            continue;
        }
        let clock = wall_clock(&zone, from, to, MINUTE);
        let text = random_pattern(&mut random);
        let pattern = Pattern::new(&text);
        for gap in [Gap::Shift, Gap::Skip] {
            for overlap in [Fold::First, Fold::Second, Fold::Both] {
                let dst = Dst {
                    gap: Some(gap),
                    overlap: Some(overlap),
                };
                let schedule = Schedule::parse(&text, &zone, dst, "job").unwrap();
                assert_eq!(
                    walk(&schedule, from, to),
                    by_policy(&pattern, &clock, MINUTE, gap, overlap),
                    "`{text}` in {name} around {} (jump of {by} s), {dst:?}",
                    Timestamp::from_second(jump).unwrap()
                );
                cases += 1;
            }
        }
    }
    assert!(cases > 1250, "only {cases} cases");
}

#[test]
fn seconds_equal_a_second_by_second_simulation() {
    let mut random = fastrand::Rng::with_seed(99);
    let zones = moving_zones();
    let mut cases = 0;
    while cases < 60 {
        let (name, zone, jumps) = &zones[random.usize(0..zones.len())];
        let (jump, by) = jumps[random.usize(0..jumps.len())];
        let (from, to) = (jump - 4 * HOUR, jump + 4 * HOUR);
        let alone = jumps
            .iter()
            .filter(|(other, _)| (other - jump).abs() < 2 * DAY)
            .count()
            == 1;
        if by.abs() >= 3 * HOUR || !alone {
            continue;
        }
        let second = match random.u32(0..4) {
            0 => "*/20".to_owned(),
            _ => random_field(&mut random, 0, 59, false),
        };
        let hour = match random.u32(0..3) {
            0 => "*".to_owned(),
            _ => random_field(&mut random, 0, 4, false),
        };
        let text = format!(
            "{second} {} {hour} * * *",
            random_field(&mut random, 0, 59, true)
        );
        let pattern = Pattern::new(&text);
        let (gap, fold) = match pattern.wild {
            true => (Gap::Skip, Fold::Both),
            false => (Gap::Shift, Fold::First),
        };
        let schedule = Schedule::parse(&text, zone, Dst::default(), "job").unwrap();
        let clock = wall_clock(zone, from, to, 1);
        assert_eq!(
            walk(&schedule, from, to),
            by_policy(&pattern, &clock, 1, gap, fold),
            "`{text}` in {name} around {}",
            Timestamp::from_second(jump).unwrap()
        );
        cases += 1;
    }
}

/// Months and years, and what the simulations leave out (`L`, `W`, `#`), against another implementation.
#[test]
fn civil_times_equal_those_of_croner() {
    use croner::parser::{CronParser, Year};

    let mut random = fastrand::Rng::with_seed(4);
    let utc = TimeZone::UTC;
    for case in 0..800 {
        let day = match random.u32(0..6) {
            0 => "L".to_owned(),
            1 => "LW".to_owned(),
            2 => format!("{}W", random.u32(1..=31)),
            3 => "?".to_owned(),
            _ => random_field(&mut random, 1, 31, true),
        };
        let weekday = match random.u32(0..6) {
            0 => format!("{}L", random.u32(0..=7)),
            1 => format!("{}#{}", random.u32(0..=7), random.u32(1..=5)),
            2 => "MON-FRI".to_owned(),
            _ => random_field(&mut random, 0, 7, true),
        };
        let text = format!(
            "{} {} {} {day} {} {weekday}",
            random_field(&mut random, 0, 59, false),
            random_field(&mut random, 0, 59, true),
            random_field(&mut random, 0, 23, true),
            random_field(&mut random, 1, 12, true),
        );
        let any = |field: &str| field.starts_with('*') || field == "?";
        let croner = CronParser::builder()
            .year(Year::Disallowed)
            .dom_and_dow(any(&day) || any(&weekday))
            .build()
            .parse(&text)
            .unwrap();
        let mut at = random.i64(0..4_102_444_800);
        let schedule = Schedule::parse(&text, &utc, Dst::default(), "job");
        for _ in 0..4 {
            let from = Timestamp::from_second(at)
                .unwrap()
                .to_zoned(utc.clone())
                .datetime();
            let expected = croner.find_next_occurrence(&from, false).ok();
            let Ok(schedule) = &schedule else {
                assert_eq!(expected, None, "case {case}: `{text}` was refused");
                break;
            };
            let got = schedule.next_after(Occurrence(at * 1000)).unwrap();
            assert_eq!(
                Some(got.timestamp().to_zoned(utc.clone()).datetime()),
                expected,
                "case {case}: `{text}` after {from}"
            );
            at = got.0 / 1000;
        }
    }
}
