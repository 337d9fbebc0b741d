//! Text from elsewhere, made safe for a terminal or a text log: what a store, a command, a file or the environment says
//! must not move the cursor, hide or reorder what stands beside it, or look like a line of its own.

use std::{fmt::Write as _, ops::RangeInclusive};

use jiff::{civil, fmt::temporal::Pieces, tz::TimeZone};

/// What a terminal may take for a command, or what changes how the text around it is read.
pub(crate) fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c,
            // Marks, embeddings, overrides and isolates of bidirectional text; separators of lines.
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            // What nobody sees, and no script needs between its letters: spaces without a width, hidden signs, tags.
            | '\u{ad}' | '\u{180e}' | '\u{200b}' | '\u{2060}'..='\u{2065}' | '\u{206a}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// They join or divide letters, as Persian, Hindi and emoji of several parts need them; nobody sees them elsewhere.
const JOINERS: [char; 2] = ['\u{200c}', '\u{200d}'];

fn escape(out: &mut String, c: char) {
    let _ = match c {
        '\n' => out.write_str("\\n"),
        '\r' => out.write_str("\\r"),
        ..='\u{7f}' => write!(out, "\\x{:02x}", u32::from(c)),
        _ => write!(out, "\\u{{{:x}}}", u32::from(c)),
    };
}

fn shown(text: &str, stays: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match acts(c) && c != '\t' && !stays(c) {
            true => escape(&mut out, c),
            false => out.push(c),
        }
    }
    out
}

/// As one line: whatever acts on a terminal is written out, as in `\x1b`, `\u{202e}`, `\n`. A tab stays.
pub(crate) fn line(text: &str) -> String {
    shown(text, |_| false)
}

/// The same, and newlines stay.
pub(crate) fn lines(text: &str) -> String {
    shown(&text.replace("\r\n", "\n"), |c| c == '\n')
}

/// The same JSON, in which nothing acts on a terminal: that stands in strings alone, and may be written as `\u202e`.
pub(crate) fn json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c != '\n' && acts(c) || JOINERS.contains(&c) {
            true => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            false => out.push(c),
        }
    }
    out
}

/// The same for text with colours of our own: nothing but those passes.
pub(crate) fn coloured(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\x1b') {
        out.push_str(&lines(&rest[..at]));
        match colour(&rest[at..]) {
            Some(n) => {
                out.push_str(&rest[at..at + n]);
                rest = &rest[at + n..];
            }
            None => {
                escape(&mut out, '\x1b');
                rest = &rest[at + 1..];
            }
        }
    }
    out.push_str(&lines(rest));
    out
}

/// The length of the colour that `text` begins with.
fn colour(text: &str) -> Option<usize> {
    let codes = text.strip_prefix("\x1b[")?;
    let n = codes.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    // 8 would hide what follows.
    let hides = codes[..n].split(';').any(|code| code == "8");
    (codes[n..].starts_with('m') && n <= 12 && !hides).then_some(n + 3)
}

/// Bytes that come piece by piece, as [`lines`]. What is no UTF-8 is shown as a replacement character.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// The beginning of a character, or of an end of line, whose rest is still to come.
    begun: Vec<u8>,
}

impl Stream {
    pub(crate) fn push(&mut self, data: &[u8]) -> String {
        self.begun.extend_from_slice(data);
        let mut whole = self.begun.len() - usize::from(self.begun.ends_with(b"\r"));
        let last = self.begun[..whole].utf8_chunks().last();
        // Cut in the middle of a character.
        whole -= last.map_or(0, |chunk| match std::str::from_utf8(chunk.invalid()) {
            Err(e) if e.error_len().is_none() => chunk.invalid().len(),
            _ => 0,
        });
        let text = lines(&String::from_utf8_lossy(&self.begun[..whole]));
        self.begun.drain(..whole);
        text
    }

    /// What was begun and has no rest.
    pub(crate) fn end(&mut self) -> String {
        lines(&String::from_utf8_lossy(&std::mem::take(&mut self.begun)))
    }
}

/// The instants, in Unix milliseconds, that can be asked for: from the year 1, because RFC 3339 knows none before the
/// year 0, to the last one that jiff makes of milliseconds.
const INSTANTS: RangeInclusive<i64> = -62_135_596_800_000..=253_402_207_200_000;

/// What [`INSTANTS`] are, in words.
const RANGE: &str = "it is out of range: write an instant from the year 1 to 9999-12-30T22:00:00Z";

/// Parses RFC 3339 or Unix milliseconds; returns Unix milliseconds, rounded down.
pub(crate) fn instant(text: &str) -> Result<i64, String> {
    let want = |text: &str| match Pieces::parse(text) {
        Ok(parts) if parts.time().is_none() => {
            "a date alone is no instant: write the time, too, as in 2026-03-01T03:00:00Z".to_owned()
        }
        Ok(parts) if parts.offset().is_some() => RANGE.to_owned(),
        _ => "write RFC 3339, as in 2026-03-01T03:00:00Z, or Unix milliseconds".to_owned(),
    };
    let ms = match text.parse() {
        Ok(ms) => ms,
        Err(_) => {
            let t: jiff::Timestamp = text.parse().map_err(|_| want(text))?;
            t.as_nanosecond().div_euclid(1_000_000) as i64
        }
    };
    match INSTANTS.contains(&ms) {
        true => Ok(ms),
        false => Err(RANGE.to_owned()),
    }
}

/// An instant, also as the commands print it for people: a date and a time of the zone, with or without the day of the
/// week before it and the offset behind it.
///
/// # Errors
/// Says how to write it.
pub(crate) fn instant_or_local(text: &str, zone: &str) -> Result<i64, String> {
    const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
    let want = || {
        format!(
            "write it as 2026-03-01T03:00:00Z, as `2026-03-01 11:00` or `Sun 2026-03-01 11:00:00 +08:00` (local time in \
             {}), or as Unix milliseconds",
            line(zone)
        )
    };
    let mut words: Vec<&str> = text.split_whitespace().collect();
    if words.first().is_some_and(|word| DAYS.contains(word)) {
        words.remove(0);
    }
    let offset = words.pop_if(|word| word.starts_with(['+', '-']));
    let local = words.join(" ");
    let at = instant(&(local.clone() + offset.unwrap_or_default()));
    let Ok(local) = local.parse::<civil::DateTime>() else {
        return at.map_err(|_| want());
    };
    // Something with an offset or a `Z` is a local time, too, for that parser.
    if at.is_ok() || offset.is_some() {
        return at.map_err(|_| want());
    }
    let zoned = TimeZone::get(zone)
        .unwrap_or(TimeZone::UTC)
        .to_ambiguous_zoned(local);
    let zoned = zoned.unambiguous().map_err(|_| {
        format!(
            "in {} the clocks are changed then, so that this time comes twice, or never: write it with its offset, as \
             2026-10-25T02:30:00+02:00",
            line(zone)
        )
    })?;
    let ms = zoned.timestamp().as_millisecond();
    INSTANTS.contains(&ms).then_some(ms).ok_or_else(want)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_is_read_as_it_is_printed() {
        let berlin = |text: &str| instant_or_local(text, "Europe/Berlin");
        let at = 1_795_258_800_000; // 2026-11-21T11:00:00Z
        for text in [
            "2026-11-21T11:00:00Z",
            "2026-11-21T12:00:00+01:00",
            "1795258800000",
            "Sat 2026-11-21 12:00:00 +01:00",
            "Sat 2026-11-21 19:00:00 +08:00",
            "Sat 2026-11-21 06:00:00 -05:00",
            "2026-11-21 12:00:00 +01:00",
            "Sat 2026-11-21 12:00:00",
            "2026-11-21 12:00:00.000",
            "2026-11-21 12:00",
            "2026-11-21T12:00",
        ] {
            assert_eq!(berlin(text), Ok(at), "{text}");
        }
        assert_eq!(berlin("2026-11-21 12:00:00.007"), Ok(at + 7));
        assert_eq!(instant_or_local("2026-11-21 11:00", "UTC"), Ok(at));
        for text in ["", "noon", "Sat", "12:00", "2026-11-21 25:00", "+01:00"] {
            let said = berlin(text).expect_err(text);
            for form in [
                "Z, ",
                "`Sun 2026-03-01 11:00:00 +08:00`",
                "Berlin",
                "Unix ms",
            ] {
                assert!(
                    said.contains(&form.replace("Unix ms", "Unix milliseconds")),
                    "{said}"
                );
            }
        }
        // The hour that comes twice, and the one that never comes.
        for text in ["2026-10-25 02:30", "2026-03-29 02:30"] {
            let said = berlin(text).expect_err(text);
            assert!(said.contains("twice, or never"), "{said}");
        }
        assert!(berlin("2026-10-25 02:30:00 +02:00").is_ok());
    }

    #[test]
    fn what_acts_on_a_terminal_is_written_out() {
        for (text, safe) in [
            ("a\tb ä 日本", "a\tb ä 日本"),
            ("a\x1b[2Jb\x07\r\n", "a\\x1b[2Jb\\x07\\r\\n"),
            ("\u{7f}\u{9b}2J", "\\x7f\\u{9b}2J"),
            (
                "abc\u{202e}txt\u{2066}\u{2069}\u{200f}\u{2028}",
                "abc\\u{202e}txt\\u{2066}\\u{2069}\\u{200f}\\u{2028}",
            ),
            (
                "ro\u{200b}ot\u{2060}\u{feff}\u{ad}\u{180e}\u{206f}\u{fffb}\u{e0041}",
                "ro\\u{200b}ot\\u{2060}\\u{feff}\\u{ad}\\u{180e}\\u{206f}\\u{fffb}\\u{e0041}",
            ),
            // Persian, Hindi, emoji of several parts, and accents of their own need these.
            (
                "می\u{200c}خواهم क्\u{200d}ष 👩\u{200d}👧 ❤\u{fe0f} e\u{301}",
                "می\u{200c}خواهم क्\u{200d}ष 👩\u{200d}👧 ❤\u{fe0f} e\u{301}",
            ),
        ] {
            assert_eq!(line(text), safe);
        }
        assert_eq!(lines("a\r\nb\nc\rd"), "a\nb\nc\\rd");
        assert_eq!(
            coloured("\x1b[1m\x1b[31mbad\x1b[0m\n\x1b[2J\x1b]0;x\x07\x1b[8mhidden\x1b"),
            "\x1b[1m\x1b[31mbad\x1b[0m\n\\x1b[2J\\x1b]0;x\\x07\\x1b[8mhidden\\x1b"
        );
    }

    #[test]
    fn json_stays_the_same_json() {
        let value = serde_json::json!({"a\u{7f}": ["\u{9b}2J\u{85}\x1b\u{202e}\n\t\"", "\u{e0041}\u{200d}ä日👩"]});
        for text in [value.to_string(), format!("{value:#}")] {
            let safe = json(&text);
            assert_eq!(
                serde_json::from_str::<serde_json::Value>(&safe).ok(),
                Some(value.clone())
            );
            assert_eq!(safe.lines().count(), text.lines().count());
            assert!(
                !safe.contains(|c: char| c != '\n' && (acts(c) || JOINERS.contains(&c))),
                "{safe:?}"
            );
            assert!(safe.contains("ä日👩"), "{safe}");
        }
        assert_eq!(json("\"\u{7f}\u{e0041}\""), "\"\\u007f\\udb40\\udc41\"");
    }

    #[test]
    fn what_is_wrong_with_an_instant_is_said() {
        for (text, why) in [
            ("9999-12-31", "a date alone"),
            ("2026-03-01", "a date alone"),
            ("9999-12-31T00:00:00Z", "it is out of range"),
            ("9999-12-31T00:00:00+01:00", "it is out of range"),
            ("253402207200001", "it is out of range"),
            ("2026-03-01T03:00:00", "write RFC 3339"),
            ("tomorrow", "write RFC 3339"),
        ] {
            let said = instant(text).expect_err(text);
            assert!(said.starts_with(why), "{text}: {said}");
        }
    }

    #[test]
    fn pieces_are_shown_as_the_whole_would_be() {
        let all = "ä日\u{202e}\r\nb\x1b[0m\r".as_bytes();
        let all = [all, b"\xff\xe6\x97"].concat();
        let whole = lines(&String::from_utf8_lossy(&all));
        for at in 0..all.len() {
            let mut s = Stream::default();
            let shown = s.push(&all[..at]) + &s.push(&all[at..]) + &s.end();
            assert_eq!(shown, whole, "cut at {at}");
        }
    }
}
