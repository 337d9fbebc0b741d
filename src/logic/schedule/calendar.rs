//! Which local dates and times a cron pattern means. Knows nothing of zones: time here is *local seconds*, what a
//! wall clock shows, counted as if it were UTC.
//!
//! A pattern is kept as bit sets, 48 bytes in all, because jobs that use `H` rarely share their expressions: ten
//! thousand of them must cost megabytes at most. (A parsed `croner::Cron` has 5.7 KB; it is the yardstick of the
//! tests.)

use jiff::{
    Timestamp,
    civil::{Date, DateTime},
    tz::Offset,
};

/// The days of a Gregorian calendar repeat after this many months: what has not matched by then never will.
const CYCLE_MONTHS: u32 = 400 * 12;

/// A parsed pattern. Each set holds value `n` as bit `n`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Calendar {
    pub seconds: u64,
    pub minutes: u64,
    pub hours: u32,
    pub months: u16,
    pub days: Days,
    pub weekdays: Weekdays,
    /// Vixie's day rule: when day of month or day of week *begins* with `*`, a day must match both, else either.
    pub both_days: bool,
}

/// The day-of-month field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Days {
    pub plain: u32,
    /// `15W`: the weekday (Monday to Friday) nearest to these, within the month.
    pub nearest_weekday: u32,
    /// `L`
    pub last: bool,
    /// `LW`
    pub last_weekday: bool,
}

/// The day-of-week field; 0 is Sunday, 7 is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Weekdays {
    pub plain: u8,
    /// `5#2` is day 5 in `nth[1]`.
    pub nth: [u8; 5],
    /// `5L`
    pub last: u8,
}

impl Calendar {
    /// The first matching local second at or after `from`; None when there is none before the year 10000.
    pub(super) fn next(&self, from: i64) -> Option<i64> {
        let shown = to_civil(from)?;
        let (mut year, mut month, today) = (shown.year(), shown.month(), shown.day());
        let mut days = self.matching_days(year, month)?;
        if days & (1 << today) != 0
            && let Some(second) = self.next_second_of_day(shown)
        {
            return Some(from - second_of_day(shown) + second);
        }
        days &= u32::MAX
            .checked_shl(u32::from(today as u8) + 1)
            .unwrap_or(0);
        for _ in 0..=CYCLE_MONTHS {
            if days != 0 {
                let day = Date::new(year, month, days.trailing_zeros() as i8).ok()?;
                return Some(from_civil(day.at(0, 0, 0, 0))? + self.first_second_of_day());
            }
            (year, month) = if month == 12 {
                (year + 1, 1)
            } else {
                (year, month + 1)
            };
            days = self.matching_days(year, month)?;
        }
        None
    }

    /// The month and the day fields have this date.
    pub(super) fn matches_day(&self, date: Date) -> bool {
        self.matching_days(date.year(), date.month())
            .is_some_and(|days| days & (1 << date.day()) != 0)
    }

    /// None beyond the last year.
    fn matching_days(&self, year: i16, month: i8) -> Option<u32> {
        if self.months & (1 << month) == 0 {
            return (year <= 9999).then_some(0);
        }
        let first = Date::new(year, month, 1).ok()?;
        let length = u32::from(first.days_in_month() as u8);
        let weekday_of_first = u32::from(first.weekday().to_sunday_zero_offset() as u8);
        let by_date = self.days.in_month(length, weekday_of_first);
        let by_weekday = self.weekdays.in_month(length, weekday_of_first);
        Some(if self.both_days {
            by_date & by_weekday
        } else {
            by_date | by_weekday
        })
    }

    /// The first matching second of the day at or after the time that `shown` has.
    fn next_second_of_day(&self, shown: DateTime) -> Option<i64> {
        let (hour, minute, second) = (
            shown.hour() as u32,
            shown.minute() as u32,
            shown.second() as u32,
        );
        if has(self.hours.into(), hour) {
            if has(self.minutes, minute)
                && let Some(second) = first_from(self.seconds, second)
            {
                return Some(at(hour, minute, second));
            }
            if let Some(minute) = first_from(self.minutes, minute + 1) {
                return Some(at(hour, minute, self.seconds.trailing_zeros()));
            }
        }
        let hour = first_from(self.hours.into(), hour + 1)?;
        Some(at(
            hour,
            self.minutes.trailing_zeros(),
            self.seconds.trailing_zeros(),
        ))
    }

    fn first_second_of_day(&self) -> i64 {
        at(
            self.hours.trailing_zeros(),
            self.minutes.trailing_zeros(),
            self.seconds.trailing_zeros(),
        )
    }
}

impl Days {
    /// Days 1 to `length` as bits; `weekday_of_first` is that of day 1 (0 is Sunday).
    fn in_month(&self, length: u32, weekday_of_first: u32) -> u32 {
        let weekday = |day: u32| (weekday_of_first + day - 1) % 7;
        let mut days = self.plain;
        if self.last {
            days |= 1 << length;
        }
        if self.last_weekday {
            days |= match weekday(length) {
                0 => 1 << (length - 2),
                6 => 1 << (length - 1),
                _ => 1 << length,
            };
        }
        let mut wanted = self.nearest_weekday & up_to(length);
        while wanted != 0 {
            let day = wanted.trailing_zeros();
            wanted &= wanted - 1;
            days |= match weekday(day) {
                6 if day > 1 => 1 << (day - 1),
                6 => 1 << (day + 2),
                0 if day < length => 1 << (day + 1),
                0 => 1 << (day - 2),
                _ => 1 << day,
            };
        }
        days & up_to(length)
    }
}

impl Weekdays {
    fn in_month(&self, length: u32, weekday_of_first: u32) -> u32 {
        // Weekday sets are laid out over the days of the month: bit 1 is day 1.
        let lay = |set: u8| {
            const WEEKS: u64 = 1 | 1 << 7 | 1 << 14 | 1 << 21 | 1 << 28 | 1 << 35;
            ((((u64::from(set) * WEEKS) >> weekday_of_first) << 1) & u64::from(u32::MAX)) as u32
        };
        let mut days = lay(self.plain);
        for (week, set) in self.nth.into_iter().enumerate() {
            if set != 0 {
                days |= lay(set) & ((0b1111_1110_u64 << (7 * week)) as u32);
            }
        }
        if self.last != 0 {
            days |= lay(self.last) & !up_to(length - 7);
        }
        days & up_to(length)
    }
}

/// Bits 1 to `day`.
fn up_to(day: u32) -> u32 {
    ((1_u64 << (day + 1)) - 2) as u32
}

fn has(set: u64, value: u32) -> bool {
    set & (1 << value) != 0
}

fn first_from(set: u64, value: u32) -> Option<u32> {
    let rest = set & u64::MAX.checked_shl(value)?;
    (rest != 0).then(|| rest.trailing_zeros())
}

fn at(hour: u32, minute: u32, second: u32) -> i64 {
    i64::from(hour * 3600 + minute * 60 + second)
}

fn second_of_day(t: DateTime) -> i64 {
    at(t.hour() as u32, t.minute() as u32, t.second() as u32)
}

/// `Timestamp` ends some hours before the years that clocks can show: so local seconds are taken as an instant in a
/// zone that is a day away.
fn zone_of(later_than_1970: bool) -> (Offset, i64) {
    match later_than_1970 {
        true => (Offset::constant(24), 86_400),
        false => (Offset::constant(-24), -86_400),
    }
}

/// None outside the years -9999 to 9999.
pub(super) fn to_civil(local: i64) -> Option<DateTime> {
    let (zone, ahead) = zone_of(local >= 0);
    let instant = Timestamp::from_second(local.checked_sub(ahead)?).ok()?;
    Some(zone.to_datetime(instant))
}

pub(super) fn from_civil(t: DateTime) -> Option<i64> {
    let (zone, ahead) = zone_of(t.year() >= 1970);
    Some(zone.to_timestamp(t).ok()?.as_second() + ahead)
}
