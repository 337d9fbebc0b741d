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
    let wrong =
        |what: &str, hint: &str| Wrong::new(format!("`{}` is {what}", text.escape_debug()), hint);
    let (mut rest, mut total, mut units) = (text, 0, UNITS.iter());
    loop {
        let length = |of: &str, part: fn(&char) -> bool| -> usize {
            of.chars().take_while(part).map(char::len_utf8).sum()
        };
        let (number, tail) = rest.split_at(length(rest, char::is_ascii_digit));
        let (unit, tail) = tail.split_at(length(tail, char::is_ascii_lowercase));
        // Those that are larger are passed over, so none comes twice.
        let Some((_, ms)) = units.find(|(name, _)| !number.is_empty() && *name == unit) else {
            return Err(wrong("not a duration", DURATIONS));
        };
        // A number that does not fit into a u64 is too long in any unit.
        total += u128::from(number.parse::<u64>().unwrap_or(u64::MAX)) * u128::from(*ms);
        rest = tail;
        if rest.is_empty() {
            break;
        }
    }
    match u64::try_from(total).map(Duration::from_millis) {
        Ok(d) if d <= LONGEST => Ok(d),
        _ => Err(wrong("too long", "the longest duration is `3650d`")),
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
