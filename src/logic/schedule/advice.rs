//! What is allowed in a schedule, and yet most likely not what was meant. Nothing here is an error.

use std::{ops::Range, sync::Arc};

use jiff::{
    civil::DateTime,
    tz::{AmbiguousOffset, TimeZone},
};

use super::{
    DAY, Dst, Fold, Gap, Kind, Schedule,
    calendar::to_civil,
    jump_at, next_of, offset_at,
    parse::{self, Field, Parsed, Word},
    plain,
};
use crate::model::Occurrence;

/// One piece of advice about a schedule's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The name of the rule, for programs.
    pub rule: &'static str,
    /// What will happen.
    pub message: String,
    /// The part that it is about: byte range in the schedule's text.
    pub span: Range<usize>,
    /// What would be better.
    pub hint: String,
}

/// What comes later than this has probably a mistake in it.
const SOON_MS: i64 = 2 * 366 * DAY * 1000;
/// How far ahead changes of the clock are looked for: each zone that has them has one of both kinds within it.
const AHEAD_MS: i64 = 2 * 366 * DAY * 1000;
/// How many occurrences are looked at to find the shortest time between two.
const LOOKED_AT: usize = 100;

/// All advice about one schedule of `job`; `text` is what `schedule` was read from.
pub fn advise(text: &str, schedule: &Schedule, job: &str, now: Occurrence) -> Vec<Advice> {
    let mut all = vec![];
    if let Some(fields) = parse::fields(text) {
        for (at, (field, word)) in fields.iter().enumerate() {
            let mut rest = Some(*word);
            while let Some(list) = rest {
                let item = list.split_once(',');
                rest = item.map(|(_, after)| after);
                let item = item.map_or(list, |(item, _)| item);
                all.extend(uneven(field, item, &fields, at, job));
            }
        }
        all.extend(both_days(&fields));
        all.extend(quartz(&fields));
        all.extend(each_minute(text, &fields, job));
    }
    let whole = 0..text.len();
    match schedule.next_after(now) {
        None => all.push(Advice {
            rule: "never",
            message: "this time has passed: it never comes again".to_owned(),
            span: whole,
            hint: "remove it, or write a time in the future".to_owned(),
        }),
        Some(next) if next.0.saturating_sub(now.0) > SOON_MS => {
            let date = schedule.local(next);
            let date = date.split('T').next().unwrap_or_default();
            let years = (next.0 - now.0) / (365 * DAY * 1000);
            all.push(Advice {
                rule: "rare",
                message: format!("this comes next on {date}, in {years} years"),
                span: whole,
                hint: "`soloist next` shows what else it gives; check the day of month, the month and the day of week"
                    .to_owned(),
            });
        }
        Some(next) => {
            all.extend(clock_change(text, schedule, job, now));
            all.extend(days_in_utc(text, schedule, next));
        }
    }
    all
}

/// The shortest time between two of the next occurrences, in milliseconds, and the earlier one of the two. None: there
/// are not two. Where the clocks go forward it may be shorter: [`shortened_interval`].
pub fn shortest_interval(
    schedules: &[Arc<Schedule>],
    now: Occurrence,
) -> Option<(i64, Occurrence)> {
    let mut before = next_of(schedules, now)?;
    let mut shortest: Option<(i64, Occurrence)> = None;
    for _ in 0..LOOKED_AT {
        let Some(next) = next_of(schedules, before) else {
            break;
        };
        let distance = next.0 - before.0;
        if shortest.is_none_or(|(least, _)| distance < least)
            && !goes_forward(schedules, before, next)
        {
            shortest = Some((distance, before));
        }
        before = next;
    }
    shortest
}

fn goes_forward(schedules: &[Arc<Schedule>], from: Occurrence, to: Occurrence) -> bool {
    schedules
        .first()
        .is_some_and(|s| offset_at(&s.zone, to.timestamp()) > offset_at(&s.zone, from.timestamp()))
}

/// The same for the two occurrences between which the clocks go forward next.
pub fn shortened_interval(
    schedules: &[Arc<Schedule>],
    now: Occurrence,
) -> Option<(i64, Occurrence)> {
    /// Schedules with fewer occurrences have longer intervals than a run lasts.
    const BEFORE_MS: i64 = 8 * DAY * 1000;
    let zone = &schedules.first()?.zone;
    let mut jumps = zone
        .following(now.timestamp())
        .filter_map(|transition| jump_at(zone, transition.timestamp()))
        .take_while(|jump| jump.at * 1000 < now.0 + AHEAD_MS);
    let jump = jumps.find(|jump| jump.after > jump.before)?;
    let mut before = next_of(schedules, Occurrence(jump.at * 1000 - BEFORE_MS))?;
    for _ in 0..2 * LOOKED_AT {
        let next = next_of(schedules, before)?;
        if next.0 >= jump.at * 1000 {
            let between = before.0 < jump.at * 1000;
            return between.then_some((next.0 - before.0, before));
        }
        before = next;
    }
    None
}

/// The longest time without an occurrence of those that last `least` at least, in milliseconds, and its begin, as far
/// as `asks` questions to the schedule show. None: there is none so long.
pub fn longest_gap(
    schedules: &[Arc<Schedule>],
    now: Occurrence,
    least: i64,
    mut asks: u32,
) -> Option<(i64, Occurrence)> {
    let half = (least / 2).max(1);
    let mut longest: Option<(i64, Occurrence)> = None;
    let mut at = next_of(schedules, now)?;
    while asks > 0 {
        asks -= 1;
        let Some(mut next) = next_of(schedules, at) else {
            break;
        };
        let mut from = at;
        if next.0 - at.0 < half {
            // Occurrences are frequent here: if the first one after half of that time comes within the other half, then
            // nothing before it lasts so long.
            let middle = Occurrence(at.0 + half);
            asks = asks.saturating_sub(1);
            let Some(later) = next_of(schedules, middle) else {
                break;
            };
            if later.0 - middle.0 >= half {
                let (last, asked) = last_until(schedules, next, middle);
                (from, asks) = (last, asks.saturating_sub(asked));
            } else {
                from = later;
            }
            next = later;
        }
        let gap = next.0 - from.0;
        if gap >= least && longest.is_none_or(|(most, _)| gap > most) {
            longest = Some((gap, from));
        }
        at = next;
    }
    longest
}

/// The last occurrence up to `until`, to the second, and how often the schedule was asked. `known` is one.
fn last_until(
    schedules: &[Arc<Schedule>],
    known: Occurrence,
    until: Occurrence,
) -> (Occurrence, u32) {
    let (mut last, mut none_after, mut asked) = (known, until.0, 0);
    while none_after - last.0 > 1000 {
        let middle = Occurrence(last.0 + (none_after - last.0) / 2);
        asked += 1;
        match next_of(schedules, middle).filter(|o| *o <= until) {
            Some(later) => last = later,
            None => none_after = middle.0,
        }
    }
    (last, asked)
}

/// A step over a whole field that does not divide it: the last distance is another one. Also where it begins later in
/// the field, but no later than a step that is counted on from the end: `1-59/7`.
fn uneven(
    field: &Field,
    item: Word<'_>,
    fields: &[(&Field, Word<'_>)],
    at: usize,
    job: &str,
) -> Option<Advice> {
    let (range, step) = item.split_once('/')?;
    let n: u32 = step.text.parse().ok()?;
    let (low, high) = field.whole();
    let width = high - low + 1;
    let hashed = range.text.eq_ignore_ascii_case("h");
    let (begin, end) = match range.split_once('-') {
        _ if hashed || range.text == "*" => (low, high),
        Some((from, to)) => match (field.value(from).ok()?, field.value(to).ok()?) {
            (from, 0) if field.is_weekday() && from > 0 => (from, 7),
            both => both,
        },
        None => return None,
    };
    let first = match hashed {
        true => low + (field.hash(job) % u64::from(n.clamp(1, width))) as u32,
        false => begin,
    };
    let every = evenly(fields, at);
    if n > end - begin + 1 {
        return Some(wide(field, item, (first, n), every));
    }
    let last = first + (end - first) / n.max(1) * n;
    // A week may also begin with Monday.
    let spans = match field.is_weekday() {
        true => first == low || (first, end) == (1, 7),
        false => first < low + n,
    };
    // A step of `width` is a single value.
    if n < 2 || n >= width || last + n <= high || !spans {
        return None;
    }
    let unit = match field.name {
        "day of month" => "day",
        "day of week" => "day",
        name => name,
    };
    if field.is_day() {
        return Some(Advice {
            rule: "uneven_step",
            message: format!(
                "`{}` is not every {n} days: it begins again with each month, and months have 28 to 31 days",
                item.text
            ),
            span: item.span(),
            hint: "name the days of the month (`1,15`), or days of the week (`MON,THU`), in the field after the next"
                .to_owned(),
        });
    }
    if width.is_multiple_of(n) {
        return None;
    }
    let distance = width - last + first;
    let value = |v: u32| match field.is_weekday() {
        true => plain::weekday(v).to_owned(),
        false => format!("{} {v}", field.name),
    };
    Some(Advice {
        rule: "uneven_step",
        message: format!(
            "`{}` is not every {n} {unit}s: after {} comes {}, {distance} {unit}{} later",
            item.text,
            value(last),
            value(first),
            if distance == 1 { "" } else { "s" },
        ),
        span: item.span(),
        hint: even_steps(range.text, (n, width), every),
    })
}

/// A step that is longer than its range, of which only the first value is left; `every`: the unit of an `@every` that
/// counts so.
fn wide(field: &Field, item: Word<'_>, (first, n): (u32, u32), every: Option<char>) -> Advice {
    let every = every.map_or(String::new(), |unit| {
        format!("; `@every {n}{unit}` counts evenly, from 1970 in UTC")
    });
    Advice {
        rule: "wide_step",
        message: format!(
            "`{}` is {} {first} alone: the step is longer than the range that it counts in",
            item.text, field.name
        ),
        span: item.span(),
        hint: format!("if you mean this, write `{first}`{every}"),
    }
}

/// What counts evenly in place of the step `n` over `width` values; `every`: the unit of an `@every` that would.
fn even_steps(range: &str, (n, width): (u32, u32), every: Option<char>) -> String {
    let divides = |m: &u32| width.is_multiple_of(*m);
    let less = (2..n).rev().find(divides);
    let more = (n + 1..width).find(divides);
    let steps: Vec<String> = [less, more]
        .into_iter()
        .flatten()
        .map(|m| format!("`{}/{m}`", range))
        .collect();
    let mut hints = vec![];
    if let Some(unit) = every {
        hints.push(format!(
            "`@every {n}{unit}` counts evenly, from 1970 in UTC"
        ));
    }
    hints.push(match steps.as_slice() {
        [] => "name the values in a list".to_owned(),
        [one] => format!("the nearest that divides {width} is {one}"),
        all => format!("the nearest that divide {width} are {}", all.join(" and ")),
    });
    hints.join("; ")
}

/// The unit of `@every`, if all other fields leave the step in field `at` alone to decide.
fn evenly(fields: &[(&Field, Word<'_>)], at: usize) -> Option<char> {
    let unit = match fields[at].0.name {
        "second" => 's',
        "minute" => 'm',
        "hour" => 'h',
        _ => return None,
    };
    let before = fields[..at].iter().all(|(_, word)| word.text == "0");
    let after = fields[at + 1..]
        .iter()
        .all(|(_, word)| ["*", "?"].contains(&word.text));
    let alone = !fields[at].1.text.contains(',');
    (before && after && alone).then_some(unit)
}

/// Day of month together with day of week, of which people expect either meaning.
fn both_days(fields: &[(&Field, Word<'_>)]) -> Option<Advice> {
    let [.., (_, day), _, (field, weekday)] = fields else {
        return None;
    };
    let any = |word: &Word<'_>| ["*", "?"].contains(&word.text);
    if any(day) || any(weekday) {
        return None;
    }
    let both = day.text.starts_with('*') || weekday.text.starts_with('*');
    // For the example; `*` begins with Sunday.
    let first = weekday.text.split(['-', '/', ',', '#', 'L']).next();
    let named = first.unwrap_or_default();
    let named = Word {
        text: named,
        ..*weekday
    };
    let n = match named.text {
        "*" => 0,
        _ => field.value(named).map_or(5, |n| n % 7),
    };
    let name = plain::weekday(n);
    let (message, hint) = if both {
        let star = if day.text.starts_with('*') {
            day
        } else {
            weekday
        };
        (
            format!(
                "a day must match day of month `{}` and also day of week `{}`, because `{}` begins with `*`",
                day.text, weekday.text, star.text
            ),
            format!(
                "if either is enough, give `schedule` a list of two; the first {name} of the month is also `{n}#1` in \
                 day of week"
            ),
        )
    } else {
        (
            format!(
                "a day need match only one of day of month `{}` and day of week `{}`, as in cron",
                day.text, weekday.text
            ),
            format!(
                "if you mean this, a list of two schedules says it plainly; for days that match both, the command has to \
                 look at the date{}",
                nth_of_month(day.text, n, name)
            ),
        )
    };
    Some(Advice {
        rule: "both_days",
        message,
        span: day.at..weekday.at + weekday.text.len(),
        hint,
    })
}

/// Days of the week as Quartz counts them, whose schedules have six fields and a `?`.
fn quartz(fields: &[(&Field, Word<'_>)]) -> Option<Advice> {
    const NAMES: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];
    let [_, _, _, (_, day), _, (_, weekday)] = fields else {
        return None;
    };
    let (mut named, mut before) = (String::new(), ' ');
    for c in weekday.text.chars() {
        match c.to_digit(10) {
            Some(n) if !['#', '/'].contains(&before) => {
                named.push_str(NAMES.get(n.checked_sub(1)? as usize)?);
            }
            _ => named.push(c),
        }
        before = c;
    }
    (day.text == "?" && named != weekday.text).then(|| Advice {
        rule: "quartz_weekdays",
        message: format!(
            "`{}` counts days of the week from 0 = Sunday; Quartz, which has this form with `?`, counts from 1 = Sunday",
            weekday.text
        ),
        span: weekday.span(),
        hint: format!("names mean the same in both: `{named}`, if it was written for Quartz"),
    })
}

/// Every minute of an hour (or every second of a minute), where most likely one start was meant.
fn each_minute(text: &str, fields: &[(&Field, Word<'_>)], job: &str) -> Option<Advice> {
    let days = fields.len() - 3;
    let at = fields.iter().position(|(_, word)| word.text != "*")?;
    let fixed = fields[at]
        .1
        .text
        .bytes()
        .all(|b| b.is_ascii_digit() || b == b',');
    (0 < at && at < days && fixed).then(|| {
        let last = fields[at - 1].1.span().end;
        let rest = text[last..].trim();
        Advice {
            rule: "each_minute",
            message: format!("this runs {}", plain::words(text, job)),
            span: fields[0].1.at..fields[at].1.span().end,
            hint: format!("for one start in that time: `{}{rest}`", "0 ".repeat(at)),
        }
    })
}

/// An `@every` of whole days, which has no time zone, for a job that has one.
fn days_in_utc(text: &str, schedule: &Schedule, next: Occurrence) -> Option<Advice> {
    let Kind::Every { period_ms } = schedule.kind else {
        return None;
    };
    let zone = schedule.zone.iana_name().unwrap_or("UTC");
    let local = schedule.local(next);
    (period_ms % (DAY * 1000) == 0 && !zone.contains("UTC")).then(|| Advice {
        rule: "days_in_utc",
        message: format!(
            "`@every` counts from 1970 in UTC, whatever `timezone` says: this comes next at {} in {zone}",
            local.get(11..16).unwrap_or_default()
        ),
        span: 0..text.len(),
        hint: "`0 0 * * *` is every day at midnight in the time zone of the job".to_owned(),
    })
}

/// What may be meant by day of month `day` together with the weekday `n`: the week of the month.
fn nth_of_month(day: &str, n: u32, name: &str) -> String {
    match day.parse::<u32>() {
        Ok(day @ 1..=28) => {
            let week = (day - 1) / 7;
            let (first, last) = (week * 7 + 1, week * 7 + 7);
            format!(
                "; `{n}#{}` in day of week is the {name} from day {first} to {last}",
                week + 1
            )
        }
        _ => String::new(),
    }
}

/// A time that a change of the clock jumps over, or shows twice, unless `dst` says what is meant.
fn clock_change(text: &str, schedule: &Schedule, job: &str, now: Occurrence) -> Option<Advice> {
    let (gap, overlap) = match schedule.kind {
        Kind::Cron { .. } => changes_of_cron(schedule, now),
        Kind::At { .. } => match parse::parse(text, job).ok()? {
            Parsed::AtLocal { time, .. } => change_of_instant(&schedule.zone, schedule.dst, time),
            _ => return None,
        },
        Kind::Every { .. } => return None,
    };
    let zone = schedule.zone.iana_name().unwrap_or("its time zone");
    let mut said = vec![];
    let mut keys = vec![];
    if let Some((missing, instead)) = gap {
        let what = match instead {
            Some(instead) => format!("the job runs at {} instead", time(instead)),
            None => "the job does not run".to_owned(),
        };
        let (on, missing) = (missing.date(), time(missing));
        said.push(format!(
            "on {on} the clock in {zone} jumps over {missing}: {what}"
        ));
        keys.push(match instead {
            Some(_) => "gap = \"shift\"",
            None => "gap = \"skip\"",
        });
    }
    if let Some((twice, runs)) = overlap {
        let (what, key) = match runs {
            Fold::First => ("the first time", "overlap = \"first\""),
            Fold::Second => ("the second time", "overlap = \"second\""),
            Fold::Both => ("both times", "overlap = \"both\""),
        };
        let (on, twice) = (twice.date(), time(twice));
        said.push(format!(
            "on {on} the clock in {zone} shows {twice} twice: the job runs {what}"
        ));
        keys.push(key);
    }
    (!said.is_empty()).then(|| Advice {
        rule: "clock_change",
        message: said.join("; "),
        span: 0..text.len(),
        hint: format!(
            "take another time of day; or confirm this with `dst = {{ {} }}`",
            keys.join(", ")
        ),
    })
}

/// A local time that is jumped over, and when the job runs instead.
type Missing = Option<(DateTime, Option<DateTime>)>;
/// A local time that comes twice, and which of the two counts.
type Twice = Option<(DateTime, Fold)>;

fn changes_of_cron(schedule: &Schedule, now: Occurrence) -> (Missing, Twice) {
    let (mut missing, mut twice) = (None, None);
    let Kind::Cron {
        ref calendar,
        gap,
        fold,
    } = schedule.kind
    else {
        return (missing, twice);
    };
    // A job of every hour is not about the time of day.
    if calendar.hours.count_ones() == 24 {
        return (missing, twice);
    }
    let until = now.0.saturating_add(AHEAD_MS);
    let jumps = schedule
        .zone
        .following(now.timestamp())
        .map(|transition| transition.timestamp())
        .take_while(|at| at.as_millisecond() < until)
        .filter_map(|at| jump_at(&schedule.zone, at))
        .filter(|jump| !jump.is_correction());
    for jump in jumps {
        let (from, to) = (jump.shown_until(), jump.shows());
        let within = |from: i64, to: i64| {
            let at = calendar.next(from).filter(|at| *at < to);
            at.and_then(to_civil)
        };
        if from < to && missing.is_none() && schedule.dst.gap.is_none() {
            let instead = (gap == Gap::Shift).then(|| to_civil(to)).flatten();
            missing = within(from, to).map(|at| (at, instead));
        }
        if to < from && twice.is_none() && schedule.dst.overlap.is_none() {
            twice = within(to, from).map(|at| (at, fold));
        }
    }
    (missing, twice)
}

fn change_of_instant(zone: &TimeZone, dst: Dst, time: DateTime) -> (Missing, Twice) {
    match zone.to_ambiguous_timestamp(time).offset() {
        AmbiguousOffset::Gap { before, .. } if dst.gap.is_none() => {
            let shifted = before.to_timestamp(time).ok();
            let jump = shifted.and_then(|at| zone.preceding(at).next());
            let instead = jump.map(|jump| zone.to_datetime(jump.timestamp()));
            (Some((time, instead)), None)
        }
        AmbiguousOffset::Fold { .. } if dst.overlap.is_none() => (None, Some((time, Fold::First))),
        _ => (None, None),
    }
}

/// `02:30`, with seconds only if there are some.
fn time(t: DateTime) -> String {
    match t.second() {
        0 => format!("{:02}:{:02}", t.hour(), t.minute()),
        s => format!("{:02}:{:02}:{s:02}", t.hour(), t.minute()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_795_187_561_318; // 2026-11-20T15:12:41.318Z

    fn told(text: &str, zone: &str, dst: Dst) -> Vec<(String, String, String)> {
        let tz = TimeZone::get(zone).unwrap();
        let schedule = Schedule::parse(text, &tz, dst, "backup").unwrap();
        advise(text, &schedule, "backup", Occurrence(NOW))
            .into_iter()
            .map(|a| (text[a.span].to_owned(), a.message, a.hint))
            .collect()
    }

    #[track_caller]
    fn one(text: &str, zone: &str, marked: &str, message: &str, hint: &str) {
        let all = told(text, zone, Dst::default());
        assert_eq!(
            all,
            [(marked.to_owned(), message.to_owned(), hint.to_owned())],
            "{text}"
        );
    }

    #[test]
    fn what_most_people_write_needs_no_advice() {
        for text in [
            "* * * * *",
            "*/5 * * * *",
            "0 */6 * * *",
            "H H * * *",
            "H/15 * * * *",
            "9-17/3 * * * *",
            "7-59/5 * * * *",
            "4-59/5 * * * *",
            "0 9-23/5 * * *",
            "0 0 * * 1-6/2",
            "0 0 * * FRI-SUN/2",
            "0 9-17/8 * * *",
            "* 9-17 * * MON-FRI",
            "0 0 9 ? * MON-FRI",
            "0 0 9 1,15 * ?",
            "@every 24h",
            "0 9-17/4 * * MON-FRI",
            "0 12 13 * ?",
            "0 0 * */3 *",
            "0 0 29 2 *",
            "0 0 * * */7",
            "@daily",
            "@every 7m",
            "@at 2026-12-24T18:00:00",
            "*/15 * * * * *",
        ] {
            assert_eq!(told(text, "UTC", Dst::default()), [], "{text}");
        }
        for text in ["30 4 * * *", "*/20 * * * *", "@hourly", "@weekly"] {
            assert_eq!(told(text, "Europe/Berlin", Dst::default()), [], "{text}");
        }
    }

    #[test]
    fn a_step_that_does_not_divide_is_named_with_the_distance_that_is_left() {
        one(
            "*/7 * * * *",
            "UTC",
            "*/7",
            "`*/7` is not every 7 minutes: after minute 56 comes minute 0, 4 minutes later",
            "`@every 7m` counts evenly, from 1970 in UTC; the nearest that divide 60 are `*/6` and `*/10`",
        );
        one(
            "5 */5 * * *",
            "UTC",
            "*/5",
            "`*/5` is not every 5 hours: after hour 20 comes hour 0, 4 hours later",
            "the nearest that divide 24 are `*/4` and `*/6`",
        );
        one(
            "0 0-59/45 9 * * *",
            "UTC",
            "0-59/45",
            "`0-59/45` is not every 45 minutes: after minute 45 comes minute 0, 15 minutes later",
            "the nearest that divides 60 is `0-59/30`",
        );
        one(
            "1-59/7 * * * *",
            "UTC",
            "1-59/7",
            "`1-59/7` is not every 7 minutes: after minute 57 comes minute 1, 4 minutes later",
            "`@every 7m` counts evenly, from 1970 in UTC; the nearest that divide 60 are `1-59/6` and `1-59/10`",
        );
        one(
            "0 1-23/5 * * *",
            "UTC",
            "1-23/5",
            "`1-23/5` is not every 5 hours: after hour 21 comes hour 1, 4 hours later",
            "`@every 5h` counts evenly, from 1970 in UTC; the nearest that divide 24 are `1-23/4` and `1-23/6`",
        );
        one(
            "0 0 */2 * *",
            "UTC",
            "*/2",
            "`*/2` is not every 2 days: it begins again with each month, and months have 28 to 31 days",
            "name the days of the month (`1,15`), or days of the week (`MON,THU`), in the field after the next",
        );
        one(
            "0 0 * * */2",
            "UTC",
            "*/2",
            "`*/2` is not every 2 days: after Saturday comes Sunday, 1 day later",
            "name the values in a list",
        );
        // The range ends before the field does, but no further step fits.
        one(
            "0 1-21/5 * * *",
            "UTC",
            "1-21/5",
            "`1-21/5` is not every 5 hours: after hour 21 comes hour 1, 4 hours later",
            "`@every 5h` counts evenly, from 1970 in UTC; the nearest that divide 24 are `1-21/4` and `1-21/6`",
        );
        one(
            "0 0 * * 1-7/2",
            "UTC",
            "1-7/2",
            "`1-7/2` is not every 2 days: after Sunday comes Monday, 1 day later",
            "name the values in a list",
        );
        for text in [
            "*/40 * * * * *",
            "*/7 */5 * * *",
            "0 0 2-31/2 * *",
            "0 0 1 */5 *",
        ] {
            let all = told(text, "UTC", Dst::default());
            assert_eq!(all.len(), text.matches('/').count(), "{text}: {all:?}");
            assert!(
                all.iter().all(|(_, said, _)| said.contains("is not every")),
                "{all:?}"
            );
        }
        // The job's name decides where the steps begin.
        let hashed = told("H/25 * * * *", "UTC", Dst::default());
        assert_eq!(hashed.len(), 1);
        let tz = TimeZone::UTC;
        let schedule = Schedule::parse("H/25 * * * *", &tz, Dst::default(), "backup").unwrap();
        let minutes = |o: Occurrence| o.0 / 60_000 % 60;
        let mut at = schedule
            .next_after(Occurrence(NOW / 3_600_000 * 3_600_000 - 1))
            .unwrap();
        let first = minutes(at);
        let mut last = first;
        while let Some(next) = schedule.next_after(at).filter(|o| minutes(*o) > last) {
            (at, last) = (next, minutes(next));
        }
        let said = format!(
            "after minute {last} comes minute {first}, {} minutes later",
            60 - last + first
        );
        assert!(hashed[0].1.contains(&said), "{hashed:?}: {said}");
    }

    #[test]
    fn a_step_that_is_longer_than_its_range_is_its_first_value_and_is_named() {
        one(
            "4 2-23/24 * * *",
            "UTC",
            "2-23/24",
            "`2-23/24` is hour 2 alone: the step is longer than the range that it counts in",
            "if you mean this, write `2`",
        );
        one(
            "*/90 * * * *",
            "UTC",
            "*/90",
            "`*/90` is minute 0 alone: the step is longer than the range that it counts in",
            "if you mean this, write `0`; `@every 90m` counts evenly, from 1970 in UTC",
        );
        let all = told("H/90 * * * *", "UTC", Dst::default());
        assert!(all.len() == 1 && all[0].1.contains(" alone"), "{all:?}");
    }

    #[test]
    fn days_of_the_week_as_quartz_counts_them_are_named() {
        one(
            "0 0 9 ? * 2-6",
            "UTC",
            "2-6",
            "`2-6` counts days of the week from 0 = Sunday; Quartz, which has this form with `?`, counts from 1 = Sunday",
            "names mean the same in both: `MON-FRI`, if it was written for Quartz",
        );
        for (weekday, names) in [("6L", "FRIL"), ("6#3", "FRI#3"), ("1,7", "SUN,SAT")] {
            let all = told(&format!("0 0 9 ? * {weekday}"), "UTC", Dst::default());
            assert!(
                all.len() == 1 && all[0].2.contains(&format!("`{names}`")),
                "{all:?}"
            );
        }
        // Quartz has no day 0.
        assert_eq!(told("0 0 9 ? * 0", "UTC", Dst::default()), []);
    }

    #[test]
    fn every_minute_of_an_hour_is_named() {
        one(
            "* 6 * * 7",
            "UTC",
            "* 6",
            "this runs every minute, from 06:00 to 06:59, on Sunday",
            "for one start in that time: `0 6 * * 7`",
        );
        one(
            "* 30 2 * * *",
            "UTC",
            "* 30",
            "this runs every second of minute 30, from 02:00 to 02:59",
            "for one start in that time: `0 30 2 * * *`",
        );
        let all = told("* * 6 * * *", "UTC", Dst::default());
        assert!(
            all.len() == 1 && all[0].2.ends_with("`0 0 6 * * *`"),
            "{all:?}"
        );
    }

    #[test]
    fn whole_days_of_every_are_not_those_of_a_time_zone() {
        one(
            "@every 24h",
            "Asia/Tokyo",
            "@every 24h",
            "`@every` counts from 1970 in UTC, whatever `timezone` says: this comes next at 09:00 in Asia/Tokyo",
            "`0 0 * * *` is every day at midnight in the time zone of the job",
        );
        assert_eq!(told("@every 90m", "Asia/Tokyo", Dst::default()), []);
    }

    #[test]
    fn both_days_say_which_meaning_they_have() {
        one(
            "0 0 13 * FRI",
            "UTC",
            "13 * FRI",
            "a day need match only one of day of month `13` and day of week `FRI`, as in cron",
            "if you mean this, a list of two schedules says it plainly; for days that match both, the command has to look \
             at the date; `5#2` in day of week is the Friday from day 8 to 14",
        );
        one(
            "0 0 1-7 * */7",
            "UTC",
            "1-7 * */7",
            "a day must match day of month `1-7` and also day of week `*/7`, because `*/7` begins with `*`",
            "if either is enough, give `schedule` a list of two; the first Sunday of the month is also `0#1` in day of \
             week",
        );
    }

    #[test]
    fn the_example_has_the_weekday_of_the_schedule() {
        for (text, example) in [
            (
                "0 0 13 * MON",
                "`1#2` in day of week is the Monday from day 8 to 14",
            ),
            (
                "0 0 7 * sun",
                "`0#1` in day of week is the Sunday from day 1 to 7",
            ),
            (
                "0 0 28 * 7",
                "`0#4` in day of week is the Sunday from day 22 to 28",
            ),
            ("0 0 29 2 SUN", "has to look at the date"),
            ("0 0 1,15 * 1-5", "has to look at the date"),
            ("0 0 13 * TUE-THU", "`2#2` in day of week is the Tuesday"),
            ("0 0 13 * 3,5", "`3#2` in day of week is the Wednesday"),
            ("0 0 13 * 4L", "`4#2` in day of week is the Thursday"),
            ("0 0 13 * 6#3", "`6#2` in day of week is the Saturday"),
            (
                "0 0 */2 * MON",
                "the first Monday of the month is also `1#1`",
            ),
        ] {
            let all = told(text, "UTC", Dst::default());
            let both = all
                .iter()
                .find(|(_, said, _)| said.contains("day of month"));
            let (_, _, hint) = both.expect("advice");
            assert!(hint.contains(example), "{text}: {hint}");
            // No week has a day 29, nor two days.
            assert_eq!(hint.contains('#'), example.contains('#'), "{text}: {hint}");
        }
    }

    #[test]
    fn times_that_the_clock_jumps_over_or_shows_twice_are_named() {
        one(
            "30 2 * * *",
            "Europe/Berlin",
            "30 2 * * *",
            "on 2027-03-28 the clock in Europe/Berlin jumps over 02:30: the job runs at 03:00 instead; on 2027-10-31 the \
             clock in Europe/Berlin shows 02:30 twice: the job runs the first time",
            "take another time of day; or confirm this with `dst = { gap = \"shift\", overlap = \"first\" }`",
        );
        one(
            "*/30 1-2 * * *",
            "America/New_York",
            "*/30 1-2 * * *",
            "on 2027-03-14 the clock in America/New_York jumps over 02:00: the job does not run; on 2027-11-07 the clock \
             in America/New_York shows 01:00 twice: the job runs both times",
            "take another time of day; or confirm this with `dst = { gap = \"skip\", overlap = \"both\" }`",
        );
        one(
            "@at 2027-03-28T02:30:00",
            "Europe/Berlin",
            "@at 2027-03-28T02:30:00",
            "on 2027-03-28 the clock in Europe/Berlin jumps over 02:30: the job runs at 03:00 instead",
            "take another time of day; or confirm this with `dst = { gap = \"shift\" }`",
        );
        one(
            "@at 2027-10-31T02:30:05",
            "Europe/Berlin",
            "@at 2027-10-31T02:30:05",
            "on 2027-10-31 the clock in Europe/Berlin shows 02:30:05 twice: the job runs the first time",
            "take another time of day; or confirm this with `dst = { overlap = \"first\" }`",
        );
        // Who says what is meant needs no advice.
        let meant = Dst {
            gap: Some(Gap::Shift),
            overlap: Some(Fold::First),
        };
        assert_eq!(told("30 2 * * *", "Europe/Berlin", meant), []);
        // It never happens on such a day.
        assert_eq!(told("30 2 * JAN *", "Europe/Berlin", Dst::default()), []);
    }

    #[test]
    fn what_never_comes_or_comes_in_years_is_named() {
        one(
            "@at 2020-01-01T00:00:00Z",
            "UTC",
            "@at 2020-01-01T00:00:00Z",
            "this time has passed: it never comes again",
            "remove it, or write a time in the future",
        );
        let all = told("0 0 29 2 */7", "UTC", Dst::default());
        let rare: Vec<&str> = all.iter().map(|a| a.1.as_str()).collect();
        assert_eq!(
            rare[1], "this comes next on 2032-02-29, in 5 years",
            "{rare:?}"
        );
    }

    #[test]
    fn the_longest_gap_is_found_among_frequent_and_rare_occurrences() {
        let zone = |text: &str, zone: &str| -> Arc<Schedule> {
            let tz = jiff::tz::TimeZone::get(zone).expect("a zone");
            Arc::new(Schedule::parse(text, &tz, Dst::default(), "x").expect("a schedule"))
        };
        let gap = |texts: &[&str], in_zone: &str, least: i64| {
            let all: Vec<_> = texts.iter().map(|text| zone(text, in_zone)).collect();
            let found = longest_gap(&all, Occurrence(NOW), least * 60_000, 1000);
            found.map(|(ms, at)| (ms / 60_000, crate::model::rfc3339_ms(at.0)))
        };
        let hour = 60;
        // NOW is a Friday.
        assert_eq!(
            gap(&["0 3 * * *"], "UTC", 24 * hour),
            Some((24 * hour, "2026-11-21T03:00:00.000Z".to_owned()))
        );
        assert_eq!(gap(&["0 3 * * *"], "UTC", 24 * hour + 1), None);
        assert_eq!(
            gap(&["0 3 * * *"], "Europe/Berlin", 24 * hour + 1),
            Some((25 * hour, "2027-10-30T01:00:00.000Z".to_owned()))
        );
        // Each minute of office hours, and the weekend between them; the last of Friday is at 17:59.
        let weekend = (
            2 * 24 * hour + 15 * hour + 1,
            "2026-11-20T17:59:00.000Z".to_owned(),
        );
        for least in [20 * hour, 2 * 24 * hour, weekend.0] {
            assert_eq!(
                gap(&["* 9-17 * * 1-5"], "UTC", least),
                Some(weekend.clone()),
                "{least}"
            );
        }
        assert_eq!(gap(&["* 9-17 * * 1-5"], "UTC", weekend.0 + 1), None);
        // A second schedule fills it.
        let filled = ["* 9-17 * * 1-5", "0 */6 * * *"];
        assert_eq!(gap(&filled, "UTC", 20 * hour), None);
        assert_eq!(gap(&["* * * * *"], "UTC", 2), None);
        assert_eq!(gap(&["@at 2027-01-01T00:00:00Z"], "UTC", 1), None);
        assert_eq!(gap(&[], "UTC", 1), None);
    }

    /// At whatever time of the year it is asked.
    #[test]
    fn the_day_of_23_hours_is_known_and_is_not_the_usual_one() {
        const HOUR: i64 = 3_600_000;
        let daily = |zone: &str| {
            let zone = TimeZone::get(zone).expect("a zone");
            let s = Schedule::parse("0 12 * * *", &zone, Dst::default(), "a");
            [Arc::new(s.expect("a schedule"))]
        };
        for month in 0..24 {
            let now = Occurrence(NOW + month * 30 * DAY * 1000);
            let all = daily("Europe/Berlin");
            let (ms, from) = shortened_interval(&all, now).expect("one");
            assert_eq!(ms, 23 * HOUR, "{month}");
            assert!(all[0].local(from).contains("-03-"));
            let usual = shortest_interval(&all, now).map(|(ms, _)| ms);
            assert_eq!(usual, Some(24 * HOUR), "{month}");
            assert_eq!(shortened_interval(&daily("UTC"), now), None);
        }
    }

    #[test]
    fn the_shortest_interval_is_that_of_all_schedules_together() {
        let parse =
            |text| Arc::new(Schedule::parse(text, &TimeZone::UTC, Dst::default(), "j").unwrap());
        let shortest = |all: &[Arc<Schedule>]| shortest_interval(all, Occurrence(NOW)).map(|s| s.0);
        assert_eq!(shortest(&[parse("0 * * * *")]), Some(3_600_000));
        assert_eq!(
            shortest(&[parse("0 * * * *"), parse("50 3 * * *")]),
            Some(600_000)
        );
        assert_eq!(shortest(&[parse("0 9,11 * * MON")]), Some(7_200_000));
        assert_eq!(shortest(&[parse("@at 2026-12-24T18:00:00Z")]), None);
        assert_eq!(shortest(&[]), None);
    }
}
