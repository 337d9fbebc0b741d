//! A schedule in plain words, for people who do not read cron. The text was checked before: what this does not
//! understand is shown as it is written.

use std::fmt::Write as _;

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

/// `0 12 * * 1-5` as `at 12:00, on Monday to Friday`.
pub fn words(text: &str) -> String {
    let text = text.trim();
    let nickname = text
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase();
    match nickname.as_str() {
        "@hourly" => return words("0 * * * *"),
        "@daily" | "@midnight" => return words("0 0 * * *"),
        "@weekly" => return words("0 0 * * 0"),
        "@monthly" => return words("0 0 1 * *"),
        "@yearly" | "@annually" => return words("0 0 1 1 *"),
        "@every" => {
            let period = text[nickname.len()..].trim();
            return format!("every {period}, counted from 1970");
        }
        "@at" => {
            let at = text[nickname.len()..].trim();
            return format!("once, at {at}");
        }
        _ => {}
    }
    let fields: Vec<&str> = text.split_whitespace().collect();
    let (second, rest) = match fields[..] {
        [_, _, _, _, _] => ("0", &fields[..]),
        [second, _, _, _, _, _] => (second, &fields[1..]),
        _ => return text.to_owned(),
    };
    let [minute, hour, day, month, weekday] = rest[..] else {
        return text.to_owned();
    };
    let mut out = time(second, minute, hour);
    let days = days(day, weekday);
    if !days.is_empty() {
        let _ = write!(out, ", {days}");
    } else if out.starts_with("at ") && out.as_bytes().get(5) == Some(&b':') {
        out.push_str(", every day");
    }
    if !any(month) {
        let _ = write!(out, ", in {}", list(month, &|m| name(m, &MONTHS, 1)));
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

fn any(field: &str) -> bool {
    field == "*" || field == "?"
}

fn number(field: &str) -> Option<u32> {
    field.parse().ok()
}

/// `*/15` as 15.
fn step(field: &str) -> Option<u32> {
    field.strip_prefix("*/").and_then(number)
}

/// A list of numbers, if it is one.
fn numbers(field: &str) -> Option<Vec<u32>> {
    field.split(',').map(number).collect()
}

fn every(n: u32, unit: &str) -> String {
    match n {
        1 => format!("every {unit}"),
        n => format!("every {n} {unit}s"),
    }
}

fn time(second: &str, minute: &str, hour: &str) -> String {
    let exact = number(second);
    // Times of day.
    if let (Some(s), Some(minutes), Some(hours)) = (exact, numbers(minute), numbers(hour))
        && minutes.len() * hours.len() <= TIMES_MOST
    {
        let one = |h: u32, m: u32| match s {
            0 => format!("{h:02}:{m:02}"),
            s => format!("{h:02}:{m:02}:{s:02}"),
        };
        let times: Vec<String> = hours
            .iter()
            .flat_map(|h| minutes.iter().map(move |m| one(*h, *m)))
            .collect();
        return format!("at {}", joined(&times));
    }
    let hours = match hour {
        h if any(h) => String::new(),
        h => match (step(h), h.split_once('-'), number(h)) {
            (Some(n), ..) => format!(" of {} hour", ordinal_every(n)),
            (_, Some((from, to)), _) if number(from).is_some() && number(to).is_some() => {
                format!(
                    ", from {:02}:00 to {:02}:59",
                    number(from).unwrap_or(0),
                    number(to).unwrap_or(0)
                )
            }
            (_, _, Some(h)) => format!(", from {h:02}:00 to {h:02}:59"),
            _ => format!(" past hour {}", list(h, &str::to_owned)),
        },
    };
    let minutes = match (number(minute), step(minute)) {
        _ if any(minute) => "every minute".to_owned(),
        (_, Some(n)) => every(n, "minute"),
        (Some(m), _) if hours.is_empty() => format!("every hour at minute {m}"),
        (Some(0), _) if step(hour).is_some() => {
            return with_second(exact, second, every(step(hour).unwrap_or(1), "hour"));
        }
        (Some(m), _) => format!("at minute {m}"),
        (None, None) if minute.contains(['H', 'h']) && hours.is_empty() => {
            "every hour at a minute that the job's name chooses".to_owned()
        }
        (None, None) if minute.contains(['H', 'h']) => {
            "at a minute that the job's name chooses".to_owned()
        }
        (None, None) => format!("at minute {}", list(minute, &str::to_owned)),
    };
    with_second(exact, second, format!("{minutes}{hours}"))
}

fn with_second(exact: Option<u32>, second: &str, rest: String) -> String {
    match (exact, step(second)) {
        (Some(0), _) => rest,
        (Some(s), _) => format!("at second {s} of {rest}"),
        (None, step) => {
            let each = match step {
                Some(n) => every(n, "second"),
                None if any(second) => "every second".to_owned(),
                None => format!("at second {}", list(second, &str::to_owned)),
            };
            match rest.as_str() {
                "every minute" => each,
                rest => format!("{each} of {rest}"),
            }
        }
    }
}

fn ordinal_every(n: u32) -> String {
    match n {
        1 => "every".to_owned(),
        n => format!("every {}", ordinal(n)),
    }
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
pub(super) fn days(day: &str, weekday: &str) -> String {
    let of_month = (!any(day)).then(|| {
        let one = |d: &str| match d {
            "L" | "l" => "the last day of the month".to_owned(),
            "LW" | "lw" => "the last working day of the month".to_owned(),
            d => match d.strip_suffix(['W', 'w']) {
                Some(d) => format!("the working day nearest to day {d} of the month"),
                None => format!("day {d} of the month"),
            },
        };
        match step(day) {
            Some(n) => format!("on {} day of the month", ordinal_every(n)),
            None => format!("on {}", list(day, &one)),
        }
    });
    let of_week = (!any(weekday)).then(|| {
        let one = |d: &str| match (d.split_once('#'), d.strip_suffix(['L', 'l'])) {
            (Some((d, n)), _) => {
                let n = number(n).map_or_else(|| n.to_owned(), ordinal);
                format!("the {n} {} of the month", name(d, &DAYS, 0))
            }
            (None, Some(d)) if !d.is_empty() => {
                format!("the last {} of the month", name(d, &DAYS, 0))
            }
            _ => name(d, &DAYS, 0),
        };
        format!("on {}", list(weekday, &one))
    });
    match (of_month, of_week) {
        (Some(month), Some(week)) => {
            // As the schedule itself decides: a field that begins with `*` narrows the other one.
            let both = day.starts_with('*') || weekday.starts_with('*');
            let how = if both { "if it is also one" } else { "and" };
            format!("{month} {how} {week}")
        }
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => String::new(),
    }
}

/// The name of a day or month: by its number, counted from `first`, or by three letters.
fn name(field: &str, names: &[&str], first: u32) -> String {
    let by_number =
        number(field).and_then(|n| names.get((n.checked_sub(first)? as usize) % names.len()));
    let by_letters = || {
        let short = field.get(..3)?.to_ascii_lowercase();
        names
            .iter()
            .find(|n| field.len() == 3 && n.to_ascii_lowercase().starts_with(&short))
    };
    by_number
        .or_else(by_letters)
        .map_or_else(|| field.to_owned(), |n| (*n).to_owned())
}

/// The items of a list in words; `a-b` as `a to b`, `a-b/n` as written.
fn list(field: &str, one: &dyn Fn(&str) -> String) -> String {
    let item = |text: &str| match text.split_once('-') {
        Some((from, to)) if !text.contains('/') && !from.is_empty() => {
            format!("{} to {}", one(from), one(to))
        }
        _ => one(text),
    };
    let items: Vec<String> = field.split(',').map(item).collect();
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
    use super::*;

    #[test]
    fn schedules_are_told_in_words() {
        for (text, want) in [
            ("0 12 * * *", "at 12:00, every day"),
            ("30 6 * * MON-FRI", "at 06:30, on Monday to Friday"),
            ("0 6,12,18 * * *", "at 06:00, 12:00 and 18:00, every day"),
            ("5 0 12 * * *", "at 12:00:05, every day"),
            ("* * * * *", "every minute"),
            ("* * * * * *", "every second"),
            ("*/10 * * * * *", "every 10 seconds"),
            ("*/15 * * * *", "every 15 minutes"),
            (
                "*/15 9-17 * * 1-5",
                "every 15 minutes, from 09:00 to 17:59, on Monday to Friday",
            ),
            ("0 * * * *", "every hour at minute 0"),
            ("@hourly", "every hour at minute 0"),
            ("0 */6 * * *", "every 6 hours"),
            ("7 */6 * * *", "at minute 7 of every 6th hour"),
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
            (
                "0 0 13 * FRI",
                "at 00:00, on day 13 of the month and on Friday",
            ),
            (
                "0 0 * JAN,jul *",
                "at 00:00, every day, in January and July",
            ),
            (
                "H * * * *",
                "every hour at a minute that the job's name chooses",
            ),
            ("@every 90s", "every 90s, counted from 1970"),
            ("@at 2026-12-24T18:00:00", "once, at 2026-12-24T18:00:00"),
            ("@every", "every , counted from 1970"),
            ("5 30 * * * *", "at second 5 of every hour at minute 30"),
            ("1,2 * * * * *", "at second 1 and 2"),
            (
                "*/5 30 * * * *",
                "every 5 seconds of every hour at minute 30",
            ),
            (
                "H 4 * * *",
                "at a minute that the job's name chooses, from 04:00 to 04:59",
            ),
            ("* 4 * * *", "every minute, from 04:00 to 04:59"),
            ("* 1,3 * * *", "every minute past hour 1 and 3"),
            ("* 1-L * * *", "every minute past hour 1 to L"),
            ("7 H-5 * * *", "at minute 7 past hour H to 5"),
            // Too long a list of times to be read.
            (
                "0,10,20,30 1,2 * * *",
                "at minute 0, 10, 20 and 30 past hour 1 and 2",
            ),
            ("0 0 */21 * *", "at 00:00, on every 21st day of the month"),
            ("0 0 */3 * *", "at 00:00, on every 3rd day of the month"),
            (
                "0 0 */2 * MON",
                "at 00:00, on every 2nd day of the month if it is also one on Monday",
            ),
            ("0 0 * * L", "at 00:00, on L"),
            ("0 0 * FEBRUARY *", "at 00:00, every day, in FEBRUARY"),
            ("odd", "odd"),
            ("", ""),
        ] {
            assert_eq!(words(text), want, "{text}");
        }
        // Whatever it is, it is told, and not refused.
        for text in [
            "1-59/2 * * * *",
            "0 H H(0-7) * *",
            "0 0 1-7 * */7",
            "-,/ #L W- ,, ##",
            "ä ö ü ß é",
        ] {
            assert!(!words(text).is_empty(), "{text}");
        }
    }
}
