//! Times, lengths of time and counts in words for people.

const UNITS: [(&str, i64); 5] = [
    ("y", 365 * 86_400),
    ("d", 86_400),
    ("h", 3600),
    ("min", 60),
    ("s", 1),
];

/// How far a clock is ahead, in milliseconds: `1 h 2 min ahead`, `3 s behind`.
pub(crate) fn apart(ahead_ms: i64) -> String {
    let side = if ahead_ms < 0 { "behind" } else { "ahead" };
    format!("{} {side}", span(ahead_ms.saturating_abs()))
}

/// The two largest units of a length of time, rounded down to seconds: `2 h 14 min`, `3 s`.
pub(crate) fn span(ms: i64) -> String {
    let mut rest = ms.max(0) / 1000;
    let mut parts = vec![];
    for (unit, size) in UNITS {
        if rest >= size {
            parts.push(format!("{} {unit}", rest / size));
            rest %= size;
        } else if !parts.is_empty() {
            break;
        }
        if parts.len() == 2 {
            break;
        }
    }
    if parts.is_empty() {
        parts.push("0 s".to_owned());
    }
    parts.join(" ")
}

/// `3 s ago`, `in 2 h 14 min`, `now`.
pub(crate) fn relative(at: i64, now: i64) -> String {
    match at - now {
        d if d >= 1000 => format!("in {}", span(d)),
        d if d > -1000 => "now".to_owned(),
        d => format!("{} ago", span(-d)),
    }
}

/// How long something took: `31 ms`, `1.24 s`, `12.3 s`, `2 min 5 s`.
pub(crate) fn took(ms: i64) -> String {
    match ms {
        ..1000 => format!("{} ms", ms.max(0)),
        1000..10_000 => format!("{:.2} s", (ms / 10) as f64 / 100.0),
        10_000..60_000 => format!("{:.1} s", (ms / 100) as f64 / 10.0),
        _ => span(ms),
    }
}

/// The same in a column of this width, whole: [`span`] or [`took`] (`long`), where that is too wide `1m 30s`, at last
/// `1m`. What is cut would be another length of time.
pub(crate) fn fitting(ms: i64, width: usize, long: fn(i64) -> String) -> String {
    let text = long(ms);
    if text.len() <= width {
        return text;
    }
    // `1 min 30 s` by its words.
    let words: Vec<&str> = text.split(' ').collect();
    let parts: Vec<String> = words
        .chunks(2)
        .map(|pair| match pair {
            [n, "min"] => format!("{n}m"),
            pair => pair.concat(),
        })
        .collect();
    let short = parts.join(" ");
    match short.len() <= width {
        true => short,
        false => parts.into_iter().next().unwrap_or_default(),
    }
}

/// A command of soloist as somebody may type it: what begins with `-` is no option, and what a shell would read as
/// something else is quoted.
pub(crate) fn command(name: &str, arguments: &[&str]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/@%+,=".contains(c);
    let mut out = format!("soloist {name}");
    if arguments.iter().any(|argument| argument.starts_with('-')) {
        out += " --";
    }
    for argument in arguments {
        out.push(' ');
        // zsh takes `=ls` for the path of ls.
        let plain = argument.chars().all(plain) && !argument.starts_with('=');
        match !argument.is_empty() && plain {
            true => out += argument,
            false => out += &format!("'{}'", argument.replace('\'', "'\\''")),
        }
    }
    out
}

/// RFC 3339 in UTC, with milliseconds only if they are not zero. `why` accepts it.
pub(crate) fn instant(ms: i64) -> String {
    let text = crate::model::rfc3339_ms(ms);
    text.strip_suffix(".000Z")
        .map_or_else(|| text.clone(), |short| format!("{short}Z"))
}

/// A schedule's local time for people: `Sat 2026-11-21 12:00:00 +08:00`.
pub(crate) fn local(rfc3339: &str) -> String {
    // Date, `T`, time with an optional fraction, then the offset.
    let zone = rfc3339.rfind(['+', '-', 'Z']).unwrap_or(rfc3339.len());
    let (date_time, offset) = rfc3339.split_at(zone);
    match date_time.parse::<jiff::civil::DateTime>() {
        Ok(t) => format!("{} {offset}", t.strftime("%a %Y-%m-%d %H:%M:%S%.f")),
        Err(_) => rfc3339.to_owned(),
    }
}

/// `1 job`, `2 jobs`, `1,000 jobs`.
pub(crate) fn count(n: usize, noun: &str) -> String {
    let many = number(n as u64);
    match noun {
        _ if n == 1 => format!("1 {noun}"),
        _ if noun.ends_with(['s', 'h']) => format!("{many} {noun}es"),
        _ => format!("{many} {noun}s"),
    }
}

/// How soloist ended the processes that a command left, in words.
pub(crate) fn left_behind(n: u32) -> String {
    let these = count(n as usize, "process");
    format!("ended {these} that the command left in the background")
}

/// `999`, `1,000`, `12,345,678`.
pub(crate) fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Shortens a text to one line that is safe to show.
pub(crate) fn line(text: &str) -> String {
    let text = text.trim();
    let mut out: String = text.chars().take(300).collect();
    if text.chars().nth(300).is_some() {
        out.push('…');
    }
    // Tables count their columns in characters.
    crate::text::line(&out).replace('\t', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_can_be_typed_as_it_is_shown() {
        for (arguments, shown) in [
            (&["backup"][..], "soloist why backup"),
            (
                &["backup", "2026-11-20T03:00:00Z"],
                "soloist why backup 2026-11-20T03:00:00Z",
            ),
            (&["-backup"], "soloist why -- -backup"),
            (&["--help", "x"], "soloist why -- --help x"),
            (&["it's", "a b", ""], "soloist why 'it'\\''s' 'a b' ''"),
            (&["$(x)"], "soloist why '$(x)'"),
            (&["=ls", "a=b"], "soloist why '=ls' a=b"),
        ] {
            assert_eq!(command("why", arguments), shown);
        }
    }

    #[test]
    fn thousands_are_set_apart() {
        for (n, text) in [
            (0, "0 jobs"),
            (1, "1 job"),
            (999, "999 jobs"),
            (1000, "1,000 jobs"),
            (12_345_678, "12,345,678 jobs"),
        ] {
            assert_eq!(count(n, "job"), text);
        }
    }

    #[test]
    fn times_are_told_in_two_units() {
        for (ms, text) in [
            (0, "0 s"),
            (-5, "0 s"),
            (999, "0 s"),
            (3000, "3 s"),
            (60_000, "1 min"),
            (61_500, "1 min 1 s"),
            (3_600_000, "1 h"),
            (3_601_000, "1 h"),
            (8_040_000, "2 h 14 min"),
            (36 * 3_600_000, "1 d 12 h"),
            (400 * 86_400_000, "1 y 35 d"),
        ] {
            assert_eq!(span(ms), text, "{ms}");
        }
        assert_eq!(relative(10_000, 7_000), "in 3 s");
        assert_eq!(relative(7_000, 10_000), "3 s ago");
        assert_eq!(relative(10_900, 10_000), "now");
        assert_eq!(relative(9_001, 10_000), "now");
        for (ms, text) in [
            (31, "31 ms"),
            (1240, "1.24 s"),
            (9_999, "9.99 s"),
            (12_345, "12.3 s"),
            (125_000, "2 min 5 s"),
        ] {
            assert_eq!(took(ms), text, "{ms}");
        }
    }

    #[test]
    fn a_length_of_time_is_shorter_where_there_is_less_room() {
        for (ms, width, text) in [
            (90_000, 10, "1 min 30 s"),
            (90_000, 9, "1m 30s"),
            (90_000, 5, "1m"),
            (63_000, 9, "1 min 3 s"),
            (63_000, 8, "1m 3s"),
            (3_600_000, 3, "1 h"),
            (7_500_000, 8, "2h 5m"),
            (53_220_000, 8, "14h 47m"),
            (76 * 3_600_000, 6, "3d 4h"),
            (364 * 86_400_000 + 23 * 3_600_000, 8, "364d 23h"),
            (10_000, 8, "10.0 s"),
            (31, 4, "31ms"),
        ] {
            assert_eq!(fitting(ms, width, took), text, "{ms} {width}");
        }
        assert_eq!(fitting(53_220_000, 11, span), "14 h 47 min");
        assert_eq!(fitting(53_220_000, 9, span), "14h 47m");
    }

    #[test]
    fn instants_are_short_and_local_times_name_the_day() {
        assert_eq!(instant(1_795_233_600_000), "2026-11-21T04:00:00Z");
        assert_eq!(instant(1_795_233_600_042), "2026-11-21T04:00:00.042Z");
        for (rfc3339, text) in [
            (
                "2026-11-21T12:00:00+08:00",
                "Sat 2026-11-21 12:00:00 +08:00",
            ),
            (
                "2026-11-20T22:00:00.5-06:00",
                "Fri 2026-11-20 22:00:00.5 -06:00",
            ),
            ("2026-11-21T04:00:00Z", "Sat 2026-11-21 04:00:00 Z"),
        ] {
            assert_eq!(local(rfc3339), text);
        }
    }

    #[test]
    fn what_a_command_wrote_cannot_move_the_cursor() {
        assert_eq!(line(" a\x1b[2J\tb\nc\r\n"), "a\\x1b[2J b\\nc");
        assert_eq!(line(&"x".repeat(301)).chars().count(), 301);
    }
}
