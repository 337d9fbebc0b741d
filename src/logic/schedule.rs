//! Schedule text and time zone -> occurrences. What the text may say is in docs/schedules.md.
//!
//! `schedule/parse.rs` reads the text, `schedule/calendar.rs` knows which local times a pattern means, and this file
//! lays them over a zone's real time. There Vixie cron is the measure: its main loop is simulated minute by minute
//! in the tests and must give the same instants.
//!
//! # Daylight saving
//!
//! A zone's time is a row of stretches of constant offset. Where one follows the other the wall clock jumps. A jump
//! forward swallows local times (*gap*), a jump back shows some again (*overlap*). What becomes of those is all
//! that the rules are about, so a pattern needs two answers, a [`Gap`] and a [`Fold`], and Vixie's rules are just a
//! choice of them:
//!
//! | pattern | in the gap | in the overlap |
//! |---|---|---|
//! | minute or hour begins with `*`: follows the clock | [`Gap::Skip`] | [`Fold::Both`] |
//! | any other: fixed times | [`Gap::Shift`] | [`Fold::First`] |
//!
//! [`Dst`] replaces either answer, for patterns of both kinds. The seconds field does not take part: `* 30 2 * * *`
//! is a fixed time (a minute long), as `30 2 * * *` is.
//!
//! A jump forward of 3 h or more, or back by more than 3 h, is a correction of the clock and not daylight saving
//! (Apia left out 30 December 2011): swallowed times are lost, repeated ones repeated, whatever [`Dst`] says.

mod advice;
mod calendar;
mod differs;
#[cfg(test)]
mod oracle;
mod parse;
mod plain;
#[cfg(test)]
mod tests;

use std::{fmt, ops::Range, sync::Arc};

use jiff::{
    Timestamp,
    civil::DateTime,
    tz::{AmbiguousOffset, TimeZone},
};
use serde::{Deserialize, Serialize};

pub use self::{
    advice::{Advice, advise, longest_gap, shortened_interval, shortest_interval},
    differs::differs,
    plain::{joined, words},
};
use self::{calendar::Calendar, parse::Parsed};
use crate::model::Occurrence;

/// When a job is due. About 80 bytes; its time zone is shared.
#[derive(Debug)]
pub struct Schedule {
    zone: TimeZone,
    dst: Dst,
    hashed: bool,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Cron {
        calendar: Calendar,
        gap: Gap,
        fold: Fold,
    },
    Every {
        period_ms: i64,
    },
    At {
        ms: i64,
        again_ms: Option<i64>,
    },
}

/// Overrides of Vixie's daylight-saving rules; None keeps Vixie's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Dst {
    pub gap: Option<Gap>,
    pub overlap: Option<Fold>,
}

/// Local times that a jump forward swallowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gap {
    /// Run once, right after the gap, however many were swallowed.
    Shift,
    /// Do not run.
    Skip,
}

/// Local times that a jump back shows twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fold {
    First,
    Second,
    Both,
}

/// Why a schedule was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    pub message: String,
    /// The faulty part: byte range in the schedule's text.
    pub span: Option<Range<usize>>,
    /// What to write instead.
    pub hint: Option<String>,
}

impl Error {
    fn new(message: impl Into<String>, span: Range<usize>) -> Self {
        Self {
            message: message.into(),
            span: Some(span),
            hint: None,
        }
    }
    fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

const MINUTE: i64 = 60;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;
/// Days and zone rules repeat after this time.
const CYCLE: i64 = 400 * 366 * DAY;

impl Schedule {
    /// Reads `text`, with local times in `tz` and `job` as the name that `H` is derived from.
    ///
    /// # Errors
    /// The text is not understood, or can never come true (`0 0 31 2 *`).
    pub fn parse(text: &str, tz: &TimeZone, dst: Dst, job: &str) -> Result<Schedule, Error> {
        let mut hashed_job = false;
        let kind = match parse::parse(text, job)? {
            Parsed::Cron {
                calendar,
                follows_clock,
                hashed,
            } => {
                hashed_job = hashed;
                let (gap, fold) = match follows_clock {
                    true => (Gap::Skip, Fold::Both),
                    false => (Gap::Shift, Fold::First),
                };
                Kind::Cron {
                    calendar,
                    gap: dst.gap.unwrap_or(gap),
                    fold: dst.overlap.unwrap_or(fold),
                }
            }
            Parsed::Every { period_ms } => Kind::Every { period_ms },
            Parsed::AtInstant { ms } => Kind::At { ms, again_ms: None },
            Parsed::AtLocal { time, span } => at_local(time, tz, dst, span)?,
        };
        Ok(Schedule {
            zone: tz.clone(),
            dst,
            hashed: hashed_job,
            kind,
        })
    }

    /// The first occurrence strictly after `t`; None when there is none any more (`@at` has passed, year 9999).
    pub fn next_after(&self, t: Occurrence) -> Option<Occurrence> {
        let ms = match self.kind {
            Kind::Every { period_ms } => {
                t.0.div_euclid(period_ms)
                    .checked_add(1)?
                    .checked_mul(period_ms)?
            }
            Kind::At { ms, .. } if t.0 < ms => ms,
            Kind::At { again_ms, .. } => again_ms.filter(|again| t.0 < *again)?,
            Kind::Cron {
                ref calendar,
                gap,
                fold,
            } => {
                let from = t.0.div_euclid(1000).checked_add(1)?;
                next_in_zone(&self.zone, calendar, gap, fold, from)?.checked_mul(1000)?
            }
        };
        Timestamp::from_millisecond(ms).ok()?;
        Some(Occurrence(ms))
    }

    /// RFC 3339 with the offset that the schedule's zone has at `o`: `2026-03-29T03:00:00+02:00`.
    pub fn local(&self, o: Occurrence) -> String {
        let instant = o.timestamp();
        instant
            .display_with_offset(self.zone.to_offset(instant))
            .to_string()
    }

    /// The overrides that it was parsed with.
    pub fn dst(&self) -> Dst {
        self.dst
    }

    /// `H` occurs: the schedule is another one for a job of another name.
    pub fn uses_job_name(&self) -> bool {
        self.hashed
    }
}

/// The next occurrence of a job with several schedules: the earliest; equal instants are one.
pub fn next_of(schedules: &[Arc<Schedule>], t: Occurrence) -> Option<Occurrence> {
    schedules
        .iter()
        .filter_map(|schedule| schedule.next_after(t))
        .min()
}

/// `@at` without an offset is a fixed time.
fn at_local(time: DateTime, zone: &TimeZone, dst: Dst, span: Range<usize>) -> Result<Kind, Error> {
    let unusable = || parse::beyond(&time.to_string(), span.clone());
    let ms = |offset: jiff::tz::Offset| {
        offset
            .to_timestamp(time)
            .map(Timestamp::as_millisecond)
            .map_err(|_| unusable())
    };
    Ok(match zone.to_ambiguous_timestamp(time).offset() {
        AmbiguousOffset::Unambiguous { offset } => Kind::At {
            ms: ms(offset)?,
            again_ms: None,
        },
        AmbiguousOffset::Gap { .. } if dst.gap == Some(Gap::Skip) => {
            return Err(Error::new(
                format!("{time} does not exist in this time zone: the clock jumps over it"),
                span.clone(),
            )
            .hint("take another time, or `dst = {gap = \"shift\"}` to run right after the gap"));
        }
        AmbiguousOffset::Gap { before, .. } => {
            // Read with the offset before, a swallowed time is an instant after the jump.
            let after = before.to_timestamp(time).map_err(|_| unusable())?;
            let end = after.checked_add(NANOSECOND).map_err(|_| unusable())?;
            let jump = zone.preceding(end).next();
            let ms = jump.map_or(after, |jump| jump.timestamp()).as_millisecond();
            Kind::At { ms, again_ms: None }
        }
        AmbiguousOffset::Fold { before, after } => {
            let (first, second) = (ms(before)?, ms(after)?);
            match dst.overlap.unwrap_or(Fold::First) {
                Fold::First => Kind::At {
                    ms: first,
                    again_ms: None,
                },
                Fold::Second => Kind::At {
                    ms: second,
                    again_ms: None,
                },
                Fold::Both => Kind::At {
                    ms: first,
                    again_ms: Some(second),
                },
            }
        }
    })
}

const NANOSECOND: jiff::SignedDuration = jiff::SignedDuration::from_nanos(1);

/// A change of a zone's offset, in seconds.
#[derive(Debug, Clone, Copy)]
struct Jump {
    at: i64,
    before: i64,
    after: i64,
}

impl Jump {
    /// The local second that would have been shown at the jump without it: all earlier ones have been shown.
    fn shown_until(self) -> i64 {
        self.at + self.before
    }
    /// The local second that is shown at the jump.
    fn shows(self) -> i64 {
        self.at + self.after
    }
    fn is_correction(self) -> bool {
        let by = self.after - self.before;
        !(-3 * HOUR..3 * HOUR).contains(&by)
    }
}

fn offset_at(zone: &TimeZone, instant: Timestamp) -> i64 {
    i64::from(zone.to_offset(instant).seconds())
}

/// None when the offset stays (only the zone's abbreviation changes).
fn jump_at(zone: &TimeZone, at: Timestamp) -> Option<Jump> {
    let before = offset_at(zone, at.checked_sub(NANOSECOND).ok()?);
    let after = offset_at(zone, at);
    (before != after).then_some(Jump {
        at: at.as_second(),
        before,
        after,
    })
}

/// The jump that ended the stretch of `from` (at or before it) within a day, and the local second up to which the
/// clock had shown everything by then. After a jump back that is ahead of the clock for a while.
fn shown_before(zone: &TimeZone, from: Timestamp) -> Option<(Jump, i64)> {
    let mut latest = None;
    let mut shown = i64::MIN;
    let jumps = zone
        .preceding(from.checked_add(NANOSECOND).ok()?)
        .map(|transition| transition.timestamp())
        .take_while(|at| from.as_second() - at.as_second() < DAY)
        .filter_map(|at| jump_at(zone, at));
    for jump in jumps {
        latest = latest.or(Some(jump));
        if jump.is_correction() {
            break;
        }
        shown = shown.max(jump.shown_until());
    }
    latest.map(|jump| (jump, shown))
}

/// The first instant at or after `from` (Unix seconds) that `calendar` means in `zone`.
fn next_in_zone(
    zone: &TimeZone,
    calendar: &Calendar,
    gap: Gap,
    fold: Fold,
    mut from: i64,
) -> Option<i64> {
    let horizon = from.checked_add(CYCLE)?;
    // Each round looks at the stretch of constant offset that `from` lies in.
    while from < horizon {
        let instant = Timestamp::from_second(from).ok()?;
        let offset = offset_at(zone, instant);
        let end = zone
            .following(instant)
            .find_map(|transition| jump_at(zone, transition.timestamp()));
        let mut local = from + offset;
        if (gap, fold) != (Gap::Skip, Fold::Both)
            && let Some((jump, shown)) = shown_before(zone, instant)
        {
            let just_jumped = jump.at == from && !jump.is_correction();
            if gap == Gap::Shift
                && just_jumped
                && calendar
                    .next(shown)
                    .is_some_and(|swallowed| swallowed < jump.shows())
            {
                return Some(from);
            }
            if fold == Fold::First {
                local = local.max(shown);
            }
        }
        let wanted = calendar.next(local)?;
        let at = wanted - offset;
        let Some(end) = end else { return Some(at) };
        let shown_again = fold == Fold::Second && !end.is_correction() && wanted >= end.shows();
        if at < end.at && !shown_again {
            return Some(at);
        }
        from = if end.at - from > 2 * DAY && at - 2 * DAY > end.at {
            // The clock showed two days without a match, so it cannot fall back before `local`, and later stretches
            // have none before `wanted` either: no need to visit them one by one.
            at - 2 * DAY
        } else {
            end.at
        };
    }
    None
}
