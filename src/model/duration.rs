//! The form in which people write durations everywhere: `250ms`, `15s`, `1h30m`, `2d`.

use std::time::Duration;

/// The units in milliseconds, the largest first.
const UNITS: [(&str, u64); 5] = [
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1000),
    ("ms", 1),
];

/// No longer duration makes sense here, and no sum of a few durations up to this one overflows.
const LONGEST: Duration = Duration::from_secs(3650 * 86_400);

/// The problem with a value, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    pub message: String,
    pub hint: Option<String>,
}

impl Wrong {
    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: Some(hint.into()),
        }
    }
}

const DURATIONS: &str = "write it as `250ms`, `15s`, `5m`, `1h30m` or `2d`";

/// Reads `250ms`, `15s`, `5m`, `1h30m`, `2d`: whole numbers, each with a unit, the largest unit first.
///
/// # Errors
/// The text has another form, or is longer than 3650 days.
pub fn parse(text: &str) -> Result<Duration, Wrong> {
    let not =
        |hint: String| Wrong::new(format!("`{}` is not a duration", text.escape_debug()), hint);
    let joined: String = text.split_whitespace().collect();
    if joined != text && parse(&joined).is_ok() {
        return Err(not(format!("write it without spaces: `{joined}`")));
    }
    if text.starts_with('-') {
        return Err(Wrong::new(
            format!("a duration cannot be negative: `{}`", text.escape_debug()),
            DURATIONS,
        ));
    }
    let mut rest = text;
    let mut total: u128 = 0;
    let mut next_unit = 0;
    while !rest.is_empty() || total == 0 && next_unit == 0 {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, tail) = rest.split_at(digits);
        let letters = tail
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        if digits == 0 {
            return Err(not(DURATIONS.into()));
        }
        if unit.is_empty() {
            return Err(not(format!("add a unit, such as `{number}s`; {DURATIONS}")));
        }
        if unit.starts_with('.') {
            return Err(not(
                "use whole numbers: `1500ms` for 1.5 s, `90s` for 1.5 min, `1h30m` for 1.5 h"
                    .into(),
            ));
        }
        let Some(at) = UNITS.iter().position(|(name, _)| *name == unit) else {
            return Err(not(match unit.trim().to_ascii_lowercase().as_str() {
                "millis" | "msec" | "msecs" | "millisecond" | "milliseconds" => {
                    "write `ms` for milliseconds".into()
                }
                "s" | "sec" | "secs" | "second" | "seconds" => {
                    "write `s` for seconds, without spaces".into()
                }
                "m" | "min" | "mins" | "minute" | "minutes" => {
                    "write `m` for minutes, without spaces".into()
                }
                "h" | "hr" | "hrs" | "hour" | "hours" => {
                    "write `h` for hours, without spaces".into()
                }
                "d" | "day" | "days" => "write `d` for days, without spaces".into(),
                "w" | "week" | "weeks" => "weeks are not supported: write `7d`".into(),
                _ => DURATIONS.into(),
            }));
        };
        if at < next_unit {
            return Err(not(
                "write each unit once, the largest first, as in `1h30m`".into(),
            ));
        }
        next_unit = at + 1;
        // A number that does not fit into a u64 is too long in any unit.
        let number: u128 = number.parse::<u64>().unwrap_or(u64::MAX).into();
        total += number * u128::from(UNITS[at].1);
        rest = tail;
    }
    match u64::try_from(total).map(Duration::from_millis) {
        Ok(d) if d <= LONGEST => Ok(d),
        _ => Err(Wrong::new(
            format!("`{}` is too long", text.escape_debug()),
            "the longest duration is `3650d`",
        )),
    }
}

/// The duration in the form that [`parse`] reads, rounded down to whole milliseconds.
pub fn show(d: Duration) -> String {
    let mut ms = d.as_millis();
    if ms == 0 {
        return "0s".into();
    }
    let mut out = String::new();
    for (unit, size) in UNITS {
        let size = u128::from(size);
        if ms >= size {
            out.push_str(&format!("{}{unit}", ms / size));
            ms %= size;
        }
    }
    out
}
