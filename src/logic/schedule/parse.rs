//! Schedule text -> what it asks for; every refusal points at the part it is about and says what is allowed.

use std::{ops::Range, time::Duration};

use jiff::{Timestamp, civil::DateTime, fmt::temporal::Pieces};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    Error,
    calendar::{Calendar, Days, Weekdays},
};
use crate::model::duration;

/// A schedule's text, understood but not yet tied to a time zone.
#[derive(Debug, PartialEq)]
pub(super) enum Parsed {
    Cron {
        calendar: Calendar,
        /// The minute or hour field begins with `*`.
        follows_clock: bool,
        /// `H` occurs.
        hashed: bool,
    },
    Every {
        period_ms: i64,
    },
    AtInstant {
        ms: i64,
    },
    AtLocal {
        time: DateTime,
        span: Range<usize>,
    },
}

/// Reads `text`; `job` is the name that `H` stands for.
pub(super) fn parse(text: &str, job: &str) -> Result<Parsed, Error> {
    let words = words(text);
    let Some(&(start, first)) = words.first() else {
        return Err(Error::new("the schedule is empty", 0..text.len())
            .hint("five fields, for example `0 12 * * *`, or a nickname such as `@daily`"));
    };
    if first.starts_with('@') {
        let rest = Word {
            at: start + first.len(),
            text: &text[start + first.len()..],
        }
        .trim();
        return nickname(
            Word {
                at: start,
                text: first,
            },
            rest,
            job,
        );
    }
    cron(text, &words, job)
}

/// A piece of the schedule's text and where it begins in it.
#[derive(Clone, Copy)]
pub(super) struct Word<'t> {
    pub(super) at: usize,
    pub(super) text: &'t str,
}

impl<'t> Word<'t> {
    pub(super) fn span(self) -> Range<usize> {
        self.at..self.at + self.text.len()
    }
    fn trim(self) -> Self {
        let text = self.text.trim_start();
        Self {
            at: self.at + self.text.len() - text.len(),
            text: text.trim_end(),
        }
    }
    fn slice(self, range: Range<usize>) -> Self {
        Self {
            at: self.at + range.start,
            text: &self.text[range],
        }
    }
    /// Before and after the first `separator`.
    pub(super) fn split_once(self, separator: char) -> Option<(Self, Self)> {
        let at = self.text.find(separator)?;
        Some((
            self.slice(0..at),
            self.slice(at + separator.len_utf8()..self.text.len()),
        ))
    }
    fn error(self, message: impl Into<String>) -> Error {
        Error::new(message, self.span())
    }
}

fn words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut from = 0;
    for word in text.split_whitespace() {
        let at = from + text[from..].find(word).unwrap_or(0);
        words.push((at, word));
        from = at + word.len();
    }
    words
}

const NICKNAMES: [(&str, &str); 7] = [
    ("@hourly", "0 * * * *"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@weekly", "0 0 * * 0"),
    ("@monthly", "0 0 1 * *"),
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
];

fn nickname(name: Word, rest: Word, job: &str) -> Result<Parsed, Error> {
    let lower = name.text.to_ascii_lowercase();
    if let Some((_, pattern)) = NICKNAMES.iter().find(|(known, _)| *known == lower) {
        if !rest.text.is_empty() {
            return Err(rest.error(format!("nothing may follow `{lower}`")));
        }
        return cron(pattern, &words(pattern), job);
    }
    match lower.as_str() {
        "@every" => every(name, rest),
        "@at" => once(name, rest),
        "@reboot" => Err(name
            .error("`@reboot` is not supported: a fleet has no common boot to run at")
            .hint(
                "for each boot of one host use a systemd unit; for one run after a deployment \
                 `soloist trigger JOB --key VERSION`",
            )),
        _ => {
            let known = NICKNAMES
                .iter()
                .map(|(known, _)| *known)
                .chain(["@every", "@at", "@reboot"]);
            let all = "allowed are @hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually, \
                       @every DURATION and @at TIME";
            Err(name
                .error(format!("unknown nickname `{}`", name.text))
                .hint(match closest(&lower, known) {
                    Some(known) => format!("did you mean `{known}`? {all}"),
                    None => all.to_owned(),
                }))
        }
    }
}

fn every(name: Word, rest: Word) -> Result<Parsed, Error> {
    const EXAMPLE: &str = "a duration such as `90s`, `15m`, `1h30m` or `1d`";
    if rest.text.is_empty() {
        return Err(name.error("`@every` needs a duration").hint(EXAMPLE));
    }
    let period = duration::parse(rest.text).map_err(|wrong| {
        let hint = wrong.hint.unwrap_or_else(|| EXAMPLE.to_owned());
        rest.error(wrong.message).hint(hint)
    })?;
    if period < Duration::from_secs(1) {
        return Err(rest
            .error("`@every` needs at least one second")
            .hint(EXAMPLE));
    }
    let period_ms = period.as_millis() as i64;
    Ok(Parsed::Every { period_ms })
}

fn once(name: Word, rest: Word) -> Result<Parsed, Error> {
    const EXAMPLE: &str =
        "`@at 2026-12-24T18:00:00+01:00`, or without an offset for the job's own time zone";
    if rest.text.is_empty() {
        return Err(name.error("`@at` needs a date and time").hint(EXAMPLE));
    }
    let bad = || {
        rest.error(format!(
            "`{}` is not a date and time that exists",
            rest.text
        ))
        .hint(EXAMPLE)
    };
    if rest.text.contains('[') {
        return Err(rest
            .error("a zone in brackets is not allowed here")
            .hint("write the offset alone, or no offset and the zone as the job's `timezone`"));
    }
    let Some((_, time)) = rest
        .split_once('T')
        .or(rest.split_once('t'))
        .or(rest.split_once(' '))
    else {
        return Err(match rest.text.parse::<jiff::civil::Date>() {
            Ok(date) => rest
                .error("`@at` needs a time, too")
                .hint(format!("for example `@at {date}T18:00:00`")),
            Err(_) => bad(),
        });
    };
    // A date and time with a wrong offset must not pass as one without.
    if time.text.contains(['Z', 'z', '+', '-']) {
        let instant: Timestamp = rest.text.parse().map_err(|_| match exists(rest.text) {
            true => beyond(rest.text, rest.span()),
            false => bad(),
        })?;
        if instant.subsec_nanosecond() % 1_000_000 != 0 {
            return Err(rest.error("`@at` counts whole milliseconds").hint(EXAMPLE));
        }
        return Ok(Parsed::AtInstant {
            ms: instant.as_millisecond(),
        });
    }
    let time: DateTime = rest.text.parse().map_err(|_| bad())?;
    if time.subsec_nanosecond() % 1_000_000 != 0 {
        return Err(rest.error("`@at` counts whole milliseconds").hint(EXAMPLE));
    }
    Ok(Parsed::AtLocal {
        time,
        span: rest.span(),
    })
}

/// Whether it is a date and time with an offset, though perhaps one for which there is no [`Timestamp`].
fn exists(text: &str) -> bool {
    Pieces::parse(text).is_ok_and(|pieces| pieces.time().is_some() && pieces.offset().is_some())
}

/// What to say about a date and time that exists but is no [`Timestamp`]: those end a little before the year does,
/// so that they can be written with every offset.
pub(super) fn beyond(written: &str, span: Range<usize>) -> Error {
    let until = Timestamp::MAX.strftime("%Y-%m-%dT%H:%M:%SZ");
    Error::new(
        format!("`{written}` is outside of the calendar, which ends at {until}"),
        span,
    )
    .hint(NEVER)
}

const NEVER: &str = "for a job that starts only when it is triggered, leave `schedule` out; `enabled = false` turns a \
                     schedule off";

/// What a field may hold.
pub(super) struct Field {
    pub(super) name: &'static str,
    min: u32,
    max: u32,
    /// The largest value that a bare `H` may stand for.
    hash_max: u32,
    names: &'static [&'static str],
    /// Value of the first of `names`.
    first_name: u32,
}

const SECOND: Field = Field::number("second", 0, 59, 59);
const MINUTE: Field = Field::number("minute", 0, 59, 59);
const HOUR: Field = Field::number("hour", 0, 23, 23);
/// `H` stays within the days that every month has.
const DAY: Field = Field::number("day of month", 1, 31, 28);
const MONTH: Field = Field {
    names: &[
        "JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC",
    ],
    first_name: 1,
    ..Field::number("month", 1, 12, 12)
};
/// 0 and 7 are both Sunday.
const WEEKDAY: Field = Field {
    names: &["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"],
    ..Field::number("day of week", 0, 7, 6)
};

impl Field {
    const fn number(name: &'static str, min: u32, max: u32, hash_max: u32) -> Self {
        Self {
            name,
            min,
            max,
            hash_max,
            names: &[],
            first_name: 0,
        }
    }

    pub(super) fn is_day(&self) -> bool {
        self.name == DAY.name
    }

    pub(super) fn is_weekday(&self) -> bool {
        self.name == WEEKDAY.name
    }

    /// The values that `*` has: the first and the last.
    pub(super) fn whole(&self) -> (u32, u32) {
        (self.min, if self.is_weekday() { 6 } else { self.max })
    }

    fn with_article(&self) -> String {
        let n = if self.name == HOUR.name { "n" } else { "" };
        format!("a{n} {}", self.name)
    }

    fn allowed(&self) -> String {
        let names = match self.names {
            [] => String::new(),
            [first, .., last] => format!(" or {first}-{last}"),
            [one] => format!(" or {one}"),
        };
        let special = match (self.is_day(), self.is_weekday()) {
            (true, _) => ", `L`, `LW`, `15W`, `?`",
            (_, true) => ", `5L`, `5#2`, `?`",
            _ => "",
        };
        format!(
            "{} is {}-{}{names}, `*`, a range `a-b`, steps `*/n` or `a-b/n`, `H`{special}, or a list of these with commas",
            self.name, self.min, self.max
        )
    }

    /// The value of a number or name.
    pub(super) fn value(&self, word: Word) -> Result<u32, Error> {
        if !word.text.is_empty() && word.text.bytes().all(|b| b.is_ascii_digit()) {
            return match word.text.parse() {
                Ok(value) if (self.min..=self.max).contains(&value) => Ok(value),
                _ => Err(word.error(format!(
                    "{} {} is outside {}-{}",
                    self.name, word.text, self.min, self.max
                ))),
            };
        }
        let upper = word.text.to_ascii_uppercase();
        if let Some(index) = self.names.iter().position(|name| *name == upper) {
            return Ok(self.first_name + index as u32);
        }
        let error = if word.text.is_empty() {
            word.error(format!("{} is missing here", self.with_article()))
        } else {
            word.error(format!("`{}` is not {}", word.text, self.with_article()))
        };
        let long = upper
            .get(..3)
            .filter(|head| upper.len() > 3 && self.names.contains(head));
        Err(
            match long.or_else(|| closest(&upper, self.names.iter().copied())) {
                Some(name) => error.hint(format!("did you mean `{name}`? {}", self.allowed())),
                None => error.hint(self.allowed()),
            },
        )
    }

    /// A number from 0 on that depends on the job and the field alone, on every host and in every version.
    pub(super) fn hash(&self, job: &str) -> u64 {
        let mut key = Vec::with_capacity(job.len() + 1 + self.name.len());
        key.extend_from_slice(job.as_bytes());
        key.push(0);
        key.extend_from_slice(self.name.as_bytes());
        xxh3_64(&key)
    }
}

/// What one field asks for.
#[derive(Default)]
struct Values {
    plain: u64,
    hashed: bool,
    nearest_weekday: u32,
    last: bool,
    last_weekday: bool,
    nth: [u8; 5],
    weekday_last: u8,
}

/// The fields of a text that is understood; None: it is a nickname.
pub(super) fn fields(text: &str) -> Option<Vec<(&'static Field, Word<'_>)>> {
    const ALL: [&Field; 6] = [&SECOND, &MINUTE, &HOUR, &DAY, &MONTH, &WEEKDAY];
    let words = words(text);
    let all = match words.len() {
        5 => &ALL[1..],
        6 => &ALL[..],
        _ => return None,
    };
    let words = words.iter().map(|&(at, text)| Word { at, text });
    (!text.trim_start().starts_with('@')).then(|| all.iter().copied().zip(words).collect())
}

/// What people write beside the fields: a time zone before them, a year after them, blanks inside a list.
fn not_a_field(words: &[(usize, &str)]) -> Result<(), Error> {
    let first = Word {
        at: words[0].0,
        text: words[0].1,
    };
    if let Some((key, zone)) = first.split_once('=')
        && ["TZ", "CRON_TZ"].contains(&key.text)
    {
        return Err(first.error("a schedule has no time zone").hint(format!(
            "that is a key of the job: `timezone = \"{}\"`",
            zone.text
        )));
    }
    for pair in words.windows(2) {
        let ((at, before), (after, next)) = (pair[0], pair[1]);
        if before.ends_with(',') || next.starts_with(',') {
            return Err(
                Error::new("a list has no blanks", at..after + next.len()).hint(format!(
                    "a blank begins the next field: write `{before}{next}`"
                )),
            );
        }
    }
    if let [_, _, _, _, _, _, (at, text)] = *words {
        let hint = match text {
            "*" | "?" => "leave it out: every year is meant without it",
            _ => "for a single date write `@at 2026-12-24T18:00:00`",
        };
        let year = Word { at, text };
        return Err(year
            .error("a seventh field (year) is not supported")
            .hint(hint));
    }
    Ok(())
}

fn cron(text: &str, words: &[(usize, &str)], job: &str) -> Result<Parsed, Error> {
    let word = |index: usize| Word {
        at: words[index].0,
        text: words[index].1,
    };
    let whole = words[0].0
        ..words
            .last()
            .map_or(text.len(), |(at, last)| at + last.len());
    not_a_field(words)?;
    let first = match words.len() {
        5 => 0,
        6 => 1,
        n => {
            return Err(Error::new(
                format!(
                    "found {n} field{}, expected five (minute, hour, day of month, month, day of week) \
                     or six with seconds first",
                    if n == 1 { "" } else { "s" }
                ),
                whole,
            )
            .hint("every day at noon is `0 12 * * *`"));
        }
    };
    let seconds = match first {
        0 => Values {
            plain: 1,
            ..Values::default()
        },
        _ => values(&SECOND, word(0), job)?,
    };
    let minutes = values(&MINUTE, word(first), job)?;
    let hours = values(&HOUR, word(first + 1), job)?;
    let days = values(&DAY, word(first + 2), job)?;
    let months = values(&MONTH, word(first + 3), job)?;
    let weekdays = values(&WEEKDAY, word(first + 4), job)?;

    let star = |index: usize| word(index).text.starts_with('*');
    let any = |index: usize| star(index) || word(index).text == "?";
    let calendar = Calendar {
        seconds: seconds.plain,
        minutes: minutes.plain,
        hours: hours.plain as u32,
        months: months.plain as u16,
        days: Days {
            plain: days.plain as u32,
            nearest_weekday: days.nearest_weekday,
            last: days.last,
            last_weekday: days.last_weekday,
        },
        weekdays: Weekdays {
            // 7 is 0
            plain: (weekdays.plain as u8 & 0x7f) | (weekdays.plain >> 7) as u8,
            nth: weekdays.nth,
            last: weekdays.weekday_last,
        },
        both_days: any(first + 2) || any(first + 4),
    };
    // Any date will do: days repeat after 400 years.
    if calendar.next(0).is_none() {
        return Err(Error::new(
            "this never happens: no such day exists in the months named",
            word(first + 2).at..whole.end,
        )
        .hint(format!(
            "February has 28 or 29 days; April, June, September and November have 30; {NEVER}"
        )));
    }
    Ok(Parsed::Cron {
        calendar,
        follows_clock: star(first) || star(first + 1),
        hashed: [&seconds, &minutes, &hours, &days, &months, &weekdays]
            .iter()
            .any(|values| values.hashed),
    })
}

fn values(field: &Field, word: Word, job: &str) -> Result<Values, Error> {
    let mut values = Values::default();
    let mut rest = Some(word);
    while let Some(list) = rest {
        let item = match list.split_once(',') {
            Some((item, after)) => {
                rest = Some(after);
                item
            }
            None => {
                rest = None;
                list
            }
        };
        if item.text.is_empty() {
            return Err(word
                .error(format!(
                    "{} is missing beside a comma",
                    field.with_article()
                ))
                .hint(field.allowed()));
        }
        if item.text == "?" && (field.is_day() || field.is_weekday()) && word.text != "?" {
            return Err(item.error("`?` stands alone").hint(field.allowed()));
        }
        add_item(field, item, job, &mut values)?;
    }
    Ok(values)
}

/// What to write for a step behind a single value.
fn steps(field: &Field, value: u32, step: &str) -> String {
    let (min, max) = (field.min, field.max);
    let all = format!("write `*/{step}` to begin at {min}");
    match value == min {
        true => all,
        false => format!("{all}, or `{value}-{max}/{step}` to begin at {value}"),
    }
}

fn add_item(field: &Field, item: Word, job: &str, values: &mut Values) -> Result<(), Error> {
    if add_special(field, item, values)? {
        return Ok(());
    }
    let (range, step) = match item.split_once('/') {
        Some((range, step)) => (range, Some(step)),
        None => (item, None),
    };
    let hash = range.text.starts_with(['H', 'h']);
    let (low, high) = if range.text == "*" {
        field.whole()
    } else if range.text.eq_ignore_ascii_case("h") {
        (field.min, field.hash_max)
    } else if hash {
        let inner = (range.text.starts_with(['H', 'h']) && range.text[1..].starts_with('('))
            .then(|| range.slice(2..range.text.len()))
            .filter(|inner| inner.text.ends_with(')'))
            .map(|inner| inner.slice(0..inner.text.len() - 1));
        match inner.map(|inner| (inner, inner.split_once('-'))) {
            Some((inner, Some((low, high)))) => bounds(field, inner, low, high)?,
            _ => {
                return Err(range
                    .error(format!("`{}` is not understood", range.text))
                    .hint("`H`, `H/15`, `H(0-29)` and `H(0-29)/10` are the forms of `H`"));
            }
        }
    } else if let Some((low, high)) = range.split_once('-') {
        bounds(field, range, low, high)?
    } else {
        let value = field.value(range)?;
        if let Some(step) = step {
            let hint = steps(field, value, step.text);
            return Err(item.error("a step needs a range to count in").hint(hint));
        }
        (value, value)
    };
    let width = high - low + 1;
    let step = match step {
        Some(step) => match step.text.parse::<u32>() {
            // As in other crons: of a wider step only the first value is left.
            Ok(n) if step.text.bytes().all(|b| b.is_ascii_digit()) && n > 0 => Some(n.min(width)),
            _ => {
                return Err(step.error(format!(
                    "the step `{}` must be a number from 1 to {width}, the values that `{}` has",
                    step.text, range.text
                )));
            }
        },
        None => None,
    };
    let (from, to, step) = if hash {
        values.hashed = true;
        match step {
            Some(step) => (low + (field.hash(job) % u64::from(step)) as u32, high, step),
            None => {
                let value = low + (field.hash(job) % u64::from(width)) as u32;
                (value, value, 1)
            }
        }
    } else {
        (low, high, step.unwrap_or(1))
    };
    for value in (from..=to).step_by(step as usize) {
        values.plain |= 1 << value;
    }
    Ok(())
}

fn bounds(field: &Field, range: Word, low: Word, high: Word) -> Result<(u32, u32), Error> {
    let from = field.value(low)?;
    let mut to = field.value(high)?;
    // `FRI-SUN` goes to the Sunday after.
    if field.is_weekday() && to == 0 && from > 0 {
        to = 7;
    }
    if from > to {
        return Err(range
            .error(format!("the range `{}` runs backwards", range.text))
            .hint(format!(
                "a range that wraps is a list: `{from}-{},{}-{to}`",
                field.max, field.min
            )));
    }
    Ok((from, to))
}

/// `?`, `L`, `LW`, `15W`, `5L`, `5#2`: true when `item` was one of them.
fn add_special(field: &Field, item: Word, values: &mut Values) -> Result<bool, Error> {
    let upper = item.text.to_ascii_uppercase();
    let head = |tail: usize| item.slice(0..item.text.len() - tail);
    if field.is_day() {
        match upper.as_str() {
            "?" => values.plain |= 0xffff_fffe,
            _ if upper.starts_with("L-") => {
                return Err(item
                    .error(format!("`{}`, a day before the last one, is not supported", item.text))
                    .hint(
                        "`L` is the last day of the month, `LW` its last working day; for another one run on each day \
                         that it may be (`25-28`), and let the command look at the date",
                    ));
            }
            "L" => values.last = true,
            "LW" => values.last_weekday = true,
            _ if upper.ends_with('W') => {
                values.nearest_weekday |= 1 << field.value(head(1))?;
            }
            _ => return Ok(false),
        }
        return Ok(true);
    }
    if field.is_weekday() {
        match upper.as_str() {
            "?" => values.plain |= 0x7f,
            "L" => {
                return Err(item
                    .error("`L` needs a day of week before it")
                    .hint("the last Friday of the month is `5L` or `FRIL`"));
            }
            _ if upper.ends_with('L') => {
                values.weekday_last |= 1 << (field.value(head(1))? % 7);
            }
            _ => {
                let Some((day, nth)) = item.split_once('#') else {
                    return Ok(false);
                };
                let day = field.value(day)? % 7;
                match nth.text.as_bytes() {
                    [n @ b'1'..=b'5'] => values.nth[usize::from(n - b'1')] |= 1 << day,
                    _ => {
                        return Err(nth
                            .error(format!("`#{}` is outside #1-#5", nth.text))
                            .hint("the second Friday of the month is `5#2`, the last `5L`"));
                    }
                }
            }
        }
        return Ok(true);
    }
    Ok(false)
}

/// The candidate that a misspelling most likely meant.
fn closest<'c>(word: &str, candidates: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= candidate.len() / 3)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}
