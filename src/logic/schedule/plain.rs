//! A schedule in plain words, for people who do not read cron. The words follow from the values of the fields, not from
//! how they are written: `every 7 minutes` is said of no schedule that begins anew each hour.

use std::fmt::Write as _;

use super::{
    calendar::{Calendar, Days, Weekdays},
    parse::{self, Parsed},
};

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// A longer list of times would not be read.
const TIMES_MOST: usize = 6;

/// `0 12 * * 1-5` as `at 12:00, on Monday to Friday`. `job`: the name that `H` stands for. What is no schedule is
/// returned as it is written.
pub fn words(text: &str, job: &str) -> String {
    let text = text.trim();
    match parse::parse(text, job) {
        Ok(Parsed::Cron { calendar, .. }) => calendar_words(&calendar),
        Ok(Parsed::Every { .. }) => format!("every {}, counted from 1970", after_nickname(text)),
        Ok(Parsed::AtInstant { .. } | Parsed::AtLocal { .. }) => {
            format!("once, at {}", after_nickname(text))
        }
        Err(_) => text.to_owned(),
    }
}

fn after_nickname(text: &str) -> &str {
    text.split_once(char::is_whitespace)
        .map_or("", |(_, rest)| rest.trim())
}

fn calendar_words(c: &Calendar) -> String {
    let mut out = time(&bits(c.seconds), &bits(c.minutes), &bits(c.hours.into()));
    let days = days(c);
    if !days.is_empty() {
        let _ = write!(out, ", {days}");
    } else if out.starts_with("at ") && out.as_bytes().get(5) == Some(&b':') {
        out.push_str(", every day");
    }
    let months = bits(c.months.into());
    if months.len() < MONTHS.len() {
        let _ = write!(out, ", in {}", listed(&months, &|m| month(m).to_owned()));
    }
    out
}

/// The name of a day of the week; 0 is Sunday.
pub(super) fn weekday(n: u32) -> &'static str {
    DAYS[n as usize % DAYS.len()]
}

/// The name of a month, from 1 on.
pub(super) fn month(n: u32) -> &'static str {
    MONTHS[(n as usize + MONTHS.len() - 1) % MONTHS.len()]
}

/// The values of a set, ascending.
fn bits(set: u64) -> Vec<u32> {
    (0..64).filter(|n| set & (1 << n) != 0).collect()
}

/// The step of a set that has every `n`th value from 0 on, all around: after the last one 0 comes again as soon. A set
/// with one value has none.
fn around(set: &[u32], all: u32) -> Option<u32> {
    let n = progression(set)?;
    (set.first() == Some(&0) && all.is_multiple_of(n) && set.len() == (all / n) as usize)
        .then_some(n)
}

/// The step of values that are equally far from each other.
fn progression(set: &[u32]) -> Option<u32> {
    let [first, second, ..] = set else {
        return None;
    };
    let n = second - first;
    set.windows(2)
        .all(|pair| pair[1] - pair[0] == n)
        .then_some(n)
}

fn every(n: u32, unit: &str) -> String {
    match n {
        1 => format!("every {unit}"),
        n => format!("every {n} {unit}s"),
    }
}

/// `minute`, of several values `minutes`.
fn plural(unit: &str, set: &[u32]) -> String {
    let s = if set.len() > 1 { "s" } else { "" };
    format!("{unit}{s}")
}

/// What happens of these `unit`s: `every 15 minutes`, `at minutes 0 and 20`, `at every 7th minute from 0 to 56`.
fn units(set: &[u32], unit: &str) -> String {
    if let Some(n) = around(set, 60) {
        return every(n, unit);
    }
    match progression(set) {
        Some(n) if n > 1 && set.len() > TIMES_MOST => {
            let (first, last) = (set.first().unwrap_or(&0), set.last().unwrap_or(&0));
            format!("at every {} {unit} from {first} to {last}", ordinal(n))
        }
        _ => format!(
            "at {} {}",
            plural(unit, set),
            listed(set, &|n| n.to_string())
        ),
    }
}

fn time(seconds: &[u32], minutes: &[u32], hours: &[u32]) -> String {
    let whole = |rest: String| match seconds {
        [0] => rest,
        seconds => match (units(seconds, "second"), rest.as_str()) {
            (each, "every minute") => each,
            (each, rest) => format!("{each} of {}", rest.strip_prefix("at ").unwrap_or(rest)),
        },
    };
    if let ([0], [0], Some(n)) = (seconds, minutes, around(hours, 24))
        && hours.len() > 2
        && n > 1
    {
        return every(n, "hour");
    }
    // Times of day.
    if seconds.len() * minutes.len() * hours.len() <= TIMES_MOST {
        let mut times = vec![];
        for h in hours {
            for m in minutes {
                times.extend(seconds.iter().map(|s| match seconds {
                    [0] => format!("{h:02}:{m:02}"),
                    _ => format!("{h:02}:{m:02}:{s:02}"),
                }));
            }
        }
        return format!("at {}", joined(&times));
    }
    let of_hours = match (hours, around(hours, 24)) {
        (_, Some(1)) => String::new(),
        (_, Some(n)) if hours.len() > 2 => format!(" of every {} hour from 00:00 on", ordinal(n)),
        ([first, .., last], _) if progression(hours) == Some(1) => {
            format!(", from {first:02}:00 to {last:02}:59")
        }
        ([hour], _) => format!(", from {hour:02}:00 to {hour:02}:59"),
        _ => format!(" of the hours {}", listed(hours, &|h| h.to_string())),
    };
    let of_minutes = match minutes {
        [minute] if of_hours.is_empty() => format!("every hour at minute {minute}"),
        minutes => units(minutes, "minute"),
    };
    whole(format!("{of_minutes}{of_hours}"))
}

fn ordinal(n: u32) -> String {
    let end = match (n % 10, n % 100) {
        (1, 1 | 21..) => "st",
        (2, 2 | 22..) => "nd",
        (3, 3 | 23..) => "rd",
        _ => "th",
    };
    format!("{n}{end}")
}

/// The two day fields; empty: every day.
pub(super) fn days(c: &Calendar) -> String {
    match (of_month(&c.days), of_week(&c.weekdays), c.both_days) {
        (None, None, _) => String::new(),
        (None, Some(one), true) | (Some(one), None, true) => one,
        // A day has to match one of them, and each matches one that allows all.
        (None, Some(_), false) | (Some(_), None, false) => String::new(),
        (Some(month), Some(week), true) => format!("{month} if it is also one {week}"),
        (Some(month), Some(week), false) => format!("{month}, or {week}"),
    }
}

/// None: all days of a month.
fn of_month(days: &Days) -> Option<String> {
    let plain = bits(days.plain.into());
    if plain.len() == 31 {
        return None;
    }
    let mut all = vec![];
    match progression(&plain) {
        Some(n) if n > 1 && plain.len() > TIMES_MOST => {
            let (first, last) = (plain.first().unwrap_or(&0), plain.last().unwrap_or(&0));
            all.push(format!(
                "every {} day from day {first} to day {last} of the month",
                ordinal(n)
            ));
        }
        _ if plain.is_empty() => {}
        _ => all.push(format!(
            "{} {} of the month",
            plural("day", &plain),
            listed(&plain, &|d| d.to_string())
        )),
    }
    for d in bits(days.nearest_weekday.into()) {
        all.push(format!("the working day nearest to day {d} of the month"));
    }
    if days.last {
        all.push("the last day of the month".to_owned());
    }
    if days.last_weekday {
        all.push("the last working day of the month".to_owned());
    }
    Some(format!("on {}", joined(&all)))
}

/// None: all days of a week.
fn of_week(days: &Weekdays) -> Option<String> {
    let mut plain = bits(days.plain.into());
    if plain.len() == DAYS.len() {
        return None;
    }
    // A week-end is one.
    if plain.first() == Some(&0) && plain.last() == Some(&6) {
        plain.rotate_left(1);
    }
    let mut all = vec![];
    if !plain.is_empty() {
        all.push(listed(&plain, &|d| weekday(d).to_owned()));
    }
    for (week, set) in (1..).zip(days.nth) {
        let each = bits(set.into()).into_iter();
        all.extend(each.map(|d| format!("the {} {} of the month", ordinal(week), weekday(d))));
    }
    for d in bits(days.last.into()) {
        all.push(format!("the last {} of the month", weekday(d)));
    }
    Some(format!("on {}", joined(&all)))
}

/// Values in words; three or more in a row as `a to b`.
fn listed(values: &[u32], name: &dyn Fn(u32) -> String) -> String {
    let mut runs: Vec<(u32, u32)> = vec![];
    for &value in values {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == value => *last = value,
            _ => runs.push((value, value)),
        }
    }
    let mut items = vec![];
    for (first, last) in runs {
        match last - first {
            0 => items.push(name(first)),
            1 => items.extend([name(first), name(last)]),
            _ => items.push(format!("{} to {}", name(first), name(last))),
        }
    }
    joined(&items)
}

/// `a, b and c`
pub fn joined(items: &[String]) -> String {
    match items {
        [] => String::new(),
        [one] => one.clone(),
        [all @ .., last] => format!("{} and {last}", all.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use jiff::civil::date;

    use super::*;

    #[test]
    fn schedules_are_told_in_words() {
        for (text, want) in [
            ("0 12 * * *", "at 12:00, every day"),
            ("30 6 * * MON-FRI", "at 06:30, on Monday to Friday"),
            ("0 6,12,19 * * *", "at 06:00, 12:00 and 19:00, every day"),
            ("0 0,6,12,18 * * *", "every 6 hours"),
            ("0 0,12 * * *", "at 00:00 and 12:00, every day"),
            ("5 0 12 * * *", "at 12:00:05, every day"),
            ("* * * * *", "every minute"),
            ("0-59 0-23 * * *", "every minute"),
            ("* * * * * *", "every second"),
            ("*/10 * * * * *", "every 10 seconds"),
            ("*/15 * * * *", "every 15 minutes"),
            ("0,15,30,45 * * * *", "every 15 minutes"),
            // Not all around the hour.
            ("*/25 * * * *", "at minutes 0, 25 and 50"),
            ("*/7 * * * *", "at every 7th minute from 0 to 56"),
            ("5-59/10 * * * *", "at minutes 5, 15, 25, 35, 45 and 55"),
            (
                "*/15 9-17 * * 1-5",
                "every 15 minutes, from 09:00 to 17:59, on Monday to Friday",
            ),
            ("0 * * * *", "every hour at minute 0"),
            ("@hourly", "every hour at minute 0"),
            ("0 */6 * * *", "every 6 hours"),
            (
                "0 */5 * * *",
                "at 00:00, 05:00, 10:00, 15:00 and 20:00, every day",
            ),
            ("7 */3 * * *", "at minute 7 of every 3rd hour from 00:00 on"),
            ("0 0 1 * *", "at 00:00, on day 1 of the month"),
            ("@yearly", "at 00:00, on day 1 of the month, in January"),
            ("@weekly", "at 00:00, on Sunday"),
            ("0 3 L * *", "at 03:00, on the last day of the month"),
            (
                "0 3 15W * *",
                "at 03:00, on the working day nearest to day 15 of the month",
            ),
            ("0 3 * * 5#2", "at 03:00, on the 2nd Friday of the month"),
            ("0 3 * * 5L", "at 03:00, on the last Friday of the month"),
            ("0 3 * * 0,6", "at 03:00, on Saturday and Sunday"),
            (
                "0 0 13 * FRI",
                "at 00:00, on day 13 of the month, or on Friday",
            ),
            // Either field is enough, and one of them has every day.
            ("0 0 1-31 * FRI", "at 00:00, every day"),
            (
                "0 0 * JAN,jul *",
                "at 00:00, every day, in January and July",
            ),
            ("0 0 * 1-12 *", "at 00:00, every day"),
            ("@every 90s", "every 90s, counted from 1970"),
            ("@at 2026-12-24T18:00:00", "once, at 2026-12-24T18:00:00"),
            ("5 30 * * * *", "at second 5 of every hour at minute 30"),
            ("1,2 * * * * *", "at seconds 1 and 2"),
            (
                "*/5 30 * * * *",
                "every 5 seconds of every hour at minute 30",
            ),
            ("* 4 * * *", "every minute, from 04:00 to 04:59"),
            ("* 1,3 * * *", "every minute of the hours 1 and 3"),
            // Too long a list of times to be read.
            (
                "0,10,20,30 1,2 * * *",
                "at minutes 0, 10, 20 and 30, from 01:00 to 02:59",
            ),
            ("0 0 */21 * *", "at 00:00, on days 1 and 22 of the month"),
            (
                "0 0 */3 * *",
                "at 00:00, on every 3rd day from day 1 to day 31 of the month",
            ),
            ("odd", "odd"),
            ("@every", "@every"),
            ("", ""),
        ] {
            assert_eq!(words(text, "j"), want, "{text}");
        }
        // By the name of the job, as it is planned.
        assert_ne!(words("H * * * *", "a"), words("H * * * *", "b"));
        assert!(words("H * * * *", "a").starts_with("every hour at minute "));
    }

    fn number(text: &str) -> u32 {
        let end = text.find(|c: char| !c.is_ascii_digit());
        let digits = &text[..end.unwrap_or(text.len())];
        digits
            .parse()
            .unwrap_or_else(|_| panic!("no number: {text}"))
    }

    /// `1, 3 to 5 and 9`
    fn values(text: &str, value: &dyn Fn(&str) -> u32) -> BTreeSet<u32> {
        let items = text.split(", ").flat_map(|items| items.split(" and "));
        let runs = items.map(|item| match item.split_once(" to ") {
            Some((from, to)) => value(from)..=value(to),
            None => value(item)..=value(item),
        });
        runs.flatten().collect()
    }

    /// `every 15 minutes`, `at minutes 3 and 9`, `at every 7th minute from 0 to 56`
    fn of_unit(text: &str, unit: &str) -> Option<BTreeSet<u32>> {
        if text == format!("every {unit}") {
            return Some((0..60).collect());
        }
        if let Some(list) = text.strip_prefix(&format!("at {unit}s ")) {
            return Some(values(list, &number)).filter(|all| all.len() > 1);
        }
        if let Some(one) = text.strip_prefix(&format!("at {unit} ")) {
            return Some(values(one, &number)).filter(|all| all.len() == 1);
        }
        if let Some(rest) = text.strip_prefix("at every ")
            && let Some((n, range)) = rest.split_once(&format!(" {unit} from "))
        {
            let (from, to) = range.split_once(" to ").expect("a range");
            return Some(
                (number(from)..=number(to))
                    .step_by(number(n) as usize)
                    .collect(),
            );
        }
        let n = text
            .strip_prefix("every ")?
            .strip_suffix(&format!(" {unit}s"))?;
        // From any instant on, as often in any hour: else the words are wrong.
        assert_eq!(60 % number(n), 0, "{text}");
        Some((0..60).step_by(number(n) as usize).collect())
    }

    /// The times of a day that the words mean: each second, minute and hour, or single times.
    fn times(text: &str) -> BTreeSet<u32> {
        let product = |seconds: &BTreeSet<u32>, minutes: &BTreeSet<u32>, hours: &BTreeSet<u32>| {
            let mut all = BTreeSet::new();
            for h in hours {
                for m in minutes {
                    all.extend(seconds.iter().map(|s| h * 3600 + m * 60 + s));
                }
            }
            all
        };
        let one = |n: u32| BTreeSet::from([n]);
        if let Some(list) = text.strip_suffix(", every day") {
            let list = list.strip_prefix("at ").expect("times");
            return values(list, &|time| {
                let parts: Vec<u32> = time.split(':').map(number).collect();
                parts[0] * 3600 + parts[1] * 60 + parts.get(2).unwrap_or(&0)
            });
        }
        if let Some(n) = text
            .strip_prefix("every ")
            .and_then(|t| t.strip_suffix(" hours"))
        {
            assert_eq!(24 % number(n), 0, "{text}");
            let hours = (0..24).step_by(number(n) as usize).collect();
            return product(&one(0), &one(0), &hours);
        }
        let (mut rest, mut hours) = (text, (0..24).collect());
        if let Some((before, list)) = text.split_once(" of the hours ") {
            (rest, hours) = (before, values(list, &number));
        } else if let Some((before, from)) = text.split_once(", from ") {
            let (from, to) = from.split_once(":00 to ").expect("a range");
            (rest, hours) = (before, (number(from)..=number(to)).collect());
        } else if let Some(before) = text.strip_suffix(" hour from 00:00 on") {
            let (before, n) = before.rsplit_once(" of every ").expect("a step");
            (rest, hours) = (before, (0..24).step_by(number(n) as usize).collect());
        }
        let (seconds, minutes) = match rest.split_once(" of ") {
            Some((seconds, minutes)) => (of_unit(seconds, "second"), minutes),
            None => match of_unit(rest, "second") {
                Some(seconds) => (Some(seconds), "every minute"),
                None => (Some(one(0)), rest),
            },
        };
        let minutes = match minutes.strip_prefix("every hour at minute ") {
            Some(minute) => one(number(minute)),
            None => of_unit(minutes, "minute")
                .or_else(|| of_unit(&format!("at {minutes}"), "minute"))
                .unwrap_or_else(|| panic!("not understood: {text}")),
        };
        product(&seconds.expect("seconds"), &minutes, &hours)
    }

    fn calendar(text: &str) -> Calendar {
        match parse::parse(text, "j") {
            Ok(Parsed::Cron { calendar, .. }) => calendar,
            _ => panic!("no pattern: {text}"),
        }
    }

    /// Read back, the words mean the times that the schedule has.
    #[test]
    fn the_words_mean_the_times_of_the_schedule() {
        let seconds = [
            "0", "*", "*/5", "*/7", "*/20", "7", "3,9", "10-20", "1-59/2", "5-59/10",
        ];
        let minutes = [
            "0",
            "*",
            "*/15",
            "*/7",
            "*/25",
            "*/30",
            "5",
            "0,30",
            "10-20",
            "1-59/2",
            "3-58/5",
            "0,10,20,30,40,50",
            "7,8",
            "0-59/1",
            "H/10",
        ];
        let hours = [
            "*",
            "0",
            "3",
            "*/2",
            "*/6",
            "*/5",
            "*/12",
            "9-17",
            "1,3",
            "0-23",
            "0,6,12,18",
            "20-23",
            "1-23/2",
            "H",
        ];
        let mut all = 0;
        for s in seconds {
            for m in minutes {
                for h in hours {
                    let text = format!("{s} {m} {h} * * *");
                    let c = calendar(&text);
                    let mut wanted = BTreeSet::new();
                    for h in bits(c.hours.into()) {
                        for m in bits(c.minutes) {
                            wanted.extend(bits(c.seconds).iter().map(|s| h * 3600 + m * 60 + s));
                        }
                    }
                    let said = words(&text, "j");
                    assert!(times(&said) == wanted, "{text}: {said}");
                    all += 1;
                }
            }
        }
        assert!(all > 2000, "{all}");
    }

    /// Whether the words mean this date.
    fn has(said: &str, day: jiff::civil::Date) -> bool {
        let name =
            |names: &[&str], text: &str| names.iter().position(|n| *n == text).map(|n| n as u32);
        let (mut days, mut months) = (said, None);
        if let Some((before, list)) = said.split_once(", in ") {
            days = before;
            months = Some(values(list, &|m| name(&MONTHS, m).expect("a month") + 1));
        }
        if months.is_some_and(|m| !m.contains(&(day.month() as u32))) {
            return false;
        }
        let (n, length) = (day.day() as u32, day.days_in_month() as u32);
        let week = day.weekday().to_sunday_zero_offset() as u32;
        let working = |d: u32| {
            !matches!(
                day.with().day(d as i8).build().expect("a day").weekday(),
                jiff::civil::Weekday::Saturday | jiff::civil::Weekday::Sunday
            )
        };
        let nearest = |d: u32| {
            let near = [d, d.wrapping_sub(1), d + 1, d.wrapping_sub(2), d + 2];
            let mut near = near.into_iter().filter(|d| (1..=length).contains(d));
            (d <= length).then(|| near.find(|d| working(*d)).expect("one"))
        };
        let item = |item: &str| -> bool {
            let item = item
                .trim_start_matches("days ")
                .trim_start_matches("day ")
                .trim_end_matches(" of the month");
            let weekday = |text: &str| name(&DAYS, text);
            if let Some(rest) = item.strip_prefix("every ") {
                let (step, range) = rest.split_once(" day from day ").expect("a range");
                let (from, to) = range.split_once(" to day ").expect("a range");
                return (number(from)..=number(to))
                    .step_by(number(step) as usize)
                    .any(|d| d == n);
            }
            if let Some(rest) = item.strip_prefix("the ") {
                return match rest.split_once(' ').expect("words") {
                    ("last", "day") => n == length,
                    ("last", "working day") => {
                        n == (1..=length).rev().find(|d| working(*d)).unwrap()
                    }
                    ("last", name) => weekday(name) == Some(week) && n + 7 > length,
                    ("working", rest) => {
                        nearest(number(rest.trim_start_matches("day nearest to day "))) == Some(n)
                    }
                    (nth, name) => weekday(name) == Some(week) && n.div_ceil(7) == number(nth),
                };
            }
            match (item.split_once(" to "), weekday(item)) {
                (_, Some(day)) => day == week,
                (Some((from, to)), _) => match (weekday(from), weekday(to)) {
                    (Some(from), Some(to)) => (from..=to).contains(&week),
                    _ => (number(from)..=number(to)).contains(&n),
                },
                (None, None) => number(item) == n,
            }
        };
        let one = |list: &str| {
            let list = list.trim_start_matches("on ");
            let mut items = list.split(", ").flat_map(|items| items.split(" and "));
            items.any(item)
        };
        match (
            days.split_once(" if it is also one on "),
            days.split_once(", or on "),
        ) {
            _ if days.is_empty() || days == "every day" => true,
            (Some((a, b)), _) => one(a) && one(b),
            (_, Some((a, b))) => one(a) || one(b),
            _ => one(days),
        }
    }

    #[test]
    fn the_words_mean_the_days_of_the_schedule() {
        let days = [
            "*", "1", "L", "15W", "*/3", "1-7", "1,15", "LW", "*/2", "1-31", "10-20/2", "1,L", "31",
        ];
        let weekdays = [
            "*", "MON", "1-5", "0,6", "5#2", "5L", "*/2", "MON-SUN", "1,3,5", "7", "6-7,1",
        ];
        let months = ["*", "1", "JAN-MAR", "*/6", "1-12", "2,4-6"];
        let mut all = 0;
        for day in days {
            for weekday in weekdays {
                for month in months {
                    let text = format!("0 0 {day} {month} {weekday}");
                    if parse::parse(&text, "j").is_err() {
                        continue;
                    }
                    let (c, said) = (calendar(&text), words(&text, "j"));
                    let rest = said.strip_prefix("at 00:00, ").expect("a time");
                    let mut date = date(2027, 6, 1);
                    while date < jiff::civil::date(2028, 7, 1) {
                        assert_eq!(
                            has(rest, date),
                            c.matches_day(date),
                            "{text} on {date}: {said}"
                        );
                        date = date.tomorrow().expect("a day");
                    }
                    all += 1;
                }
            }
        }
        assert!(all > 700, "{all}");
    }
}
