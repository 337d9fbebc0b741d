//! Why an instant is no occurrence: which field of the schedule does not match, in words.

use std::{sync::Arc, time::Duration};

use jiff::civil::DateTime;

use super::{Fold, Kind, Schedule, calendar::Calendar, plain};
use crate::model::{Occurrence, duration::show};

/// A longer list of values would not be read.
const VALUES_MOST: usize = 8;

/// Why `at` is no occurrence of any of the schedules: one clause, about the schedule that it differs from in the fewest
/// fields. None: it is an occurrence, or there is no schedule.
pub fn differs(schedules: &[Arc<Schedule>], at: Occurrence) -> Option<String> {
    let each = schedules.iter().map(|schedule| schedule.differs(at));
    // A schedule that has the instant ends it.
    let all: Vec<(usize, String)> = each.collect::<Option<_>>()?;
    let (_, nearest) = all.into_iter().min_by_key(|(fields, _)| *fields)?;
    Some(nearest)
}

impl Schedule {
    /// In how many fields `at` differs, and the clause. None: it does not differ.
    fn differs(&self, at: Occurrence) -> Option<(usize, String)> {
        if self.next_after(Occurrence(at.0.checked_sub(1)?)) == Some(at) {
            return None;
        }
        match &self.kind {
            Kind::Every { period_ms } => {
                let length = |ms: i64| show(Duration::from_millis(ms.unsigned_abs()));
                let after = at.0.rem_euclid(*period_ms);
                let (period, after) = (length(*period_ms), length(after));
                Some((
                    1,
                    format!(
                        "the schedule wants whole multiples of {period} since 1970, and this is {after} after one"
                    ),
                ))
            }
            Kind::At { ms, .. } => Some((
                5,
                format!(
                    "the schedule wants one instant, {}",
                    self.local(Occurrence(*ms))
                ),
            )),
            Kind::Cron { calendar, fold, .. } => {
                let begun = Occurrence(at.0.div_euclid(1000).checked_mul(1000)?);
                let after = at.0 - begun.0;
                if after != 0 && self.differs(begun).is_none() {
                    return Some((
                        1,
                        format!(
                            "occurrences are at whole seconds, and this is {after} ms after one"
                        ),
                    ));
                }
                let instant = at.timestamp();
                let shown = self.zone.to_datetime(instant);
                let wants = wants(calendar, shown);
                if wants.is_empty() {
                    return Some((1, by_the_clock(shown, *fold)));
                }
                let clauses: Vec<String> = wants.iter().map(|(clause, _)| clause.clone()).collect();
                let of_date = wants.iter().any(|(_, date)| *date);
                let of_time = wants.iter().any(|(_, date)| !date);
                let mut shows = vec![];
                if of_date {
                    let weekday = plain::weekday(shown.weekday().to_sunday_zero_offset() as u32);
                    shows.push(format!("{weekday}, {}", shown.date()));
                }
                if of_time {
                    let time = match (calendar.seconds, shown.second()) {
                        (1, 0) => format!("{:02}:{:02}", shown.hour(), shown.minute()),
                        _ => shown.time().strftime("%H:%M:%S").to_string(),
                    };
                    shows.push(time);
                }
                let zone = self.zone.iana_name().unwrap_or("its time zone");
                Some((
                    wants.len(),
                    format!(
                        "the schedule wants {}, and this is {} in {zone}",
                        plain::joined(&clauses),
                        shows.join(", ")
                    ),
                ))
            }
        }
    }
}

/// What the pattern wants in each field that `shown` does not match, largest first; true: it is about the date.
fn wants(calendar: &Calendar, shown: DateTime) -> Vec<(String, bool)> {
    let mut wants = vec![];
    let has = |set: u64, value: i8| set & (1 << value) != 0;
    let listed = |set: u64| values(set, &|v| v.to_string());
    if !has(calendar.months.into(), shown.month()) {
        let months = values(calendar.months.into(), &|v| plain::month(v).to_owned());
        wants.push((format!("the month to be {months}"), true));
    } else if !calendar.matches_day(shown.date()) {
        wants.push((format!("the day to be {}", days(calendar)), true));
    }
    if !has(calendar.hours.into(), shown.hour()) {
        wants.push((
            format!("the hour to be {}", listed(calendar.hours.into())),
            false,
        ));
    }
    if !has(calendar.minutes, shown.minute()) {
        wants.push((
            format!("the minute to be {}", listed(calendar.minutes)),
            false,
        ));
    }
    if !has(calendar.seconds, shown.second()) {
        wants.push((
            format!("the second to be {}", listed(calendar.seconds)),
            false,
        ));
    }
    wants
}

/// The day fields in words.
fn days(calendar: &Calendar) -> String {
    let said = plain::days(calendar);
    let said = said.strip_prefix("on ").unwrap_or(&said);
    let either = |days: &str| {
        let days = days
            .strip_prefix("days ")
            .map_or(days.to_owned(), |n| format!("day {n}"));
        days.replace(", or on ", " or ").replace(" and ", " or ")
    };
    match said.split_once(" if it is also one on ") {
        Some((month, week)) => format!("{} and also {}", either(month), either(week)),
        None => either(said),
    }
}

/// The values of a set: `0 or 30`, `9 to 17`, `0, 7, 14, …, or 56`.
fn values(set: u64, name: &dyn Fn(u32) -> String) -> String {
    let all: Vec<u32> = (0..64).filter(|v| set & (1 << v) != 0).collect();
    let (Some(first), Some(last)) = (all.first(), all.last()) else {
        return "none".to_owned();
    };
    if all.len() > 2 && (last - first) as usize + 1 == all.len() {
        return format!("{} to {}", name(*first), name(*last));
    }
    let mut names: Vec<String> = all.iter().map(|v| name(*v)).collect();
    if names.len() > VALUES_MOST {
        names.truncate(VALUES_MOST - 2);
        names.push("…".to_owned());
    } else {
        names.pop();
    }
    match names.is_empty() {
        true => name(*last),
        false => format!("{} or {}", names.join(", "), name(*last)),
    }
}

/// All fields match, but the clock shows this time twice.
fn by_the_clock(shown: DateTime, fold: Fold) -> String {
    let time = shown.time().strftime("%H:%M:%S");
    let which = match fold {
        Fold::First => "the first time",
        Fold::Second => "the second time",
        Fold::Both => "both times",
    };
    format!("the clock shows {time} twice on that day, and the job runs {which}")
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;

    use super::*;
    use crate::logic::schedule::Dst;

    #[track_caller]
    fn told(texts: &[&str], zone: &str, at: &str) -> Option<String> {
        let tz = TimeZone::get(zone).unwrap();
        let parse =
            |text: &&str| Arc::new(Schedule::parse(text, &tz, Dst::default(), "j").unwrap());
        let schedules: Vec<_> = texts.iter().map(parse).collect();
        let at: jiff::Timestamp = at.parse().unwrap();
        differs(&schedules, Occurrence(at.as_millisecond()))
    }

    #[test]
    fn the_fields_that_do_not_match_are_named() {
        for (text, at, want) in [
            (
                "0,30 * * * *",
                "2026-11-20T11:07:00Z",
                "the schedule wants the minute to be 0 or 30, and this is 12:07 in Europe/Berlin",
            ),
            (
                "15 3 * * MON-FRI",
                "2026-11-21T02:15:00Z",
                "the schedule wants the day to be Monday to Friday, and this is Saturday, 2026-11-21 in Europe/Berlin",
            ),
            (
                "0 9-17 * * *",
                "2026-11-20T20:30:00Z",
                "the schedule wants the hour to be 9 to 17 and the minute to be 0, and this is 21:30 in Europe/Berlin",
            ),
            (
                "0 0 13 * FRI",
                "2026-11-11T23:00:00Z",
                "the schedule wants the day to be day 13 of the month or Friday, and this is Thursday, 2026-11-12 in \
                 Europe/Berlin",
            ),
            (
                "0 0 1,15 * 0,6",
                "2026-11-11T23:00:00Z",
                "the schedule wants the day to be day 1 or 15 of the month or Saturday or Sunday, and this is Thursday, \
                 2026-11-12 in Europe/Berlin",
            ),
            (
                "0 0 */30 * FRI",
                "2026-11-11T23:00:00Z",
                "the schedule wants the day to be day 1 or 31 of the month and also Friday, and this is Thursday, \
                 2026-11-12 in Europe/Berlin",
            ),
            (
                "@yearly",
                "2026-11-20T11:00:00Z",
                "the schedule wants the month to be January and the hour to be 0, and this is Friday, 2026-11-20, 12:00 \
                 in Europe/Berlin",
            ),
            (
                "*/7 * * * *",
                "2026-11-20T11:03:00Z",
                "the schedule wants the minute to be 0, 7, 14, 21, 28, 35, … or 56, and this is 12:03 in Europe/Berlin",
            ),
            (
                "*/20 0 12 * * *",
                "2026-11-20T11:00:30Z",
                "the schedule wants the second to be 0, 20 or 40, and this is 12:00:30 in Europe/Berlin",
            ),
            (
                "0 12 * * *",
                "2026-11-20T11:00:00.250Z",
                "occurrences are at whole seconds, and this is 250 ms after one",
            ),
            (
                "@every 90s",
                "2026-11-20T11:00:10Z",
                "the schedule wants whole multiples of 1m30s since 1970, and this is 10s after one",
            ),
            (
                "@at 2026-12-24T18:00:00",
                "2026-11-20T11:00:00Z",
                "the schedule wants one instant, 2026-12-24T18:00:00+01:00",
            ),
            (
                "30 2 * * *",
                "2026-10-25T01:30:00Z",
                "the clock shows 02:30:00 twice on that day, and the job runs the first time",
            ),
        ] {
            assert_eq!(
                told(&[text], "Europe/Berlin", at).as_deref(),
                Some(want),
                "{text}"
            );
        }
    }

    #[test]
    fn of_several_schedules_the_nearest_is_named_and_an_occurrence_differs_from_none() {
        let both = ["0 3 1 1 *", "0 3 * * *"];
        assert_eq!(
            told(&both, "UTC", "2026-11-20T03:05:00Z").as_deref(),
            Some("the schedule wants the minute to be 0, and this is 03:05 in UTC")
        );
        assert_eq!(told(&both, "UTC", "2026-11-20T03:00:00Z"), None);
        assert_eq!(told(&[], "UTC", "2026-11-20T03:00:00Z"), None);
        // Right after the gap, in place of what it swallowed.
        assert_eq!(
            told(&["30 2 * * *"], "Europe/Berlin", "2026-03-29T01:00:00Z"),
            None
        );
    }
}
