//! Formats output for people: aligned tables, relative times, and colours (which only make it faster to read).

use anstyle::{AnsiColor, Style};

use crate::model::Outcome;

/// Whether to use colours on a stream; `terminal`: it is a terminal.
pub(super) fn colours(terminal: bool) -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|v| !v.is_empty());
    terminal && !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
}

pub(super) const PLAIN: Style = Style::new();
pub(super) const DIM: Style = Style::new().dimmed();
pub(super) const BOLD: Style = Style::new().bold();
pub(super) const GOOD: Style = AnsiColor::Green.on_default();
pub(super) const BAD: Style = AnsiColor::Red.on_default().bold();
pub(super) const WARN: Style = AnsiColor::Yellow.on_default();
pub(super) const BUSY: Style = AnsiColor::Cyan.on_default();

pub(super) fn style_of(outcome: Outcome) -> Style {
    match outcome {
        Outcome::Succeeded => GOOD,
        Outcome::Running => BUSY,
        Outcome::Skipped | Outcome::Cancelled | Outcome::Replaced => WARN,
        _ => BAD,
    }
}

/// `text` in a style, as ANSI sequences.
pub(super) fn paint(style: Style, text: &str) -> String {
    if style == PLAIN || text.is_empty() {
        return text.to_owned();
    }
    format!("{style}{text}{style:#}")
}

/// What is wrong with the store, a line each.
pub(super) fn problems(problems: &[String]) -> String {
    let one = |p: &String| paint(BAD, &format!("the store: {}", line(p))) + "\n";
    problems.iter().map(one).collect()
}

/// Shortens a text to one line that is safe to show.
pub(super) fn line(text: &str) -> String {
    let text = text.trim();
    let mut out: String = text.chars().take(300).collect();
    if text.chars().nth(300).is_some() {
        out.push('…');
    }
    // Tables count their columns in characters.
    crate::text::line(&out).replace('\t', " ")
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    pub(super) fn new(style: Style, text: impl Into<String>) -> Self {
        Self {
            text: line(&text.into()),
            style,
        }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(PLAIN, text)
    }
}

/// A table: each column is as wide as its longest cell, and two spaces separate columns. Columns without any text are
/// left out; a heading that starts with `>` aligns its column to the right.
#[derive(Debug)]
pub(super) struct Table {
    head: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub(super) fn new(head: &[&'static str]) -> Self {
        Self {
            head: head.to_vec(),
            rows: vec![],
        }
    }

    /// Missing cells are empty.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Each line ends with a newline.
    pub(super) fn render(&self) -> String {
        let mut columns = vec![];
        for (i, head) in self.head.iter().enumerate() {
            let width = self
                .rows
                .iter()
                .filter_map(|r| r.get(i))
                .map(|c| c.text.chars().count())
                .max()
                .unwrap_or(0);
            if width > 0 {
                let title = head.trim_start_matches('>');
                columns.push((
                    i,
                    title,
                    head.starts_with('>'),
                    width.max(title.chars().count()),
                ));
            }
        }
        let mut out = String::new();
        let mut put = |cells: &[(&str, Style)]| {
            let mut text = String::new();
            // Lines have no trailing spaces.
            let mut owed = 0;
            for (&(cell, style), &(_, _, right, width)) in cells.iter().zip(&columns) {
                let fill = width.saturating_sub(cell.chars().count());
                if !cell.is_empty() {
                    let before = if right { fill } else { 0 };
                    text.push_str(&" ".repeat(owed + before));
                    text.push_str(&paint(style, cell));
                    owed = fill - before;
                } else {
                    owed += fill;
                }
                owed += 2;
            }
            text.push('\n');
            out.push_str(&text);
        };
        let heads: Vec<_> = columns.iter().map(|c| (c.1, DIM)).collect();
        put(&heads);
        for row in &self.rows {
            let cells: Vec<_> = columns
                .iter()
                .map(|c| row.get(c.0).map_or(("", PLAIN), |x| (&*x.text, x.style)))
                .collect();
            put(&cells);
        }
        out
    }
}

const UNITS: [(&str, i64); 5] = [
    ("y", 365 * 86_400),
    ("d", 86_400),
    ("h", 3600),
    ("min", 60),
    ("s", 1),
];

/// How far a clock is ahead, in milliseconds: `1 h 2 min ahead`, `3 s behind`.
pub(super) fn apart(ahead_ms: i64) -> String {
    let side = if ahead_ms < 0 { "behind" } else { "ahead" };
    format!("{} {side}", span(ahead_ms.saturating_abs()))
}

/// The two largest units of a length of time, rounded down to seconds: `2 h 14 min`, `3 s`.
pub(super) fn span(ms: i64) -> String {
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
pub(super) fn relative(at: i64, now: i64) -> String {
    match at - now {
        d if d >= 1000 => format!("in {}", span(d)),
        d if d > -1000 => "now".to_owned(),
        d => format!("{} ago", span(-d)),
    }
}

/// How long something took: `31 ms`, `1.24 s`, `12.3 s`, `2 min 5 s`.
pub(super) fn took(ms: i64) -> String {
    match ms {
        ..1000 => format!("{} ms", ms.max(0)),
        1000..10_000 => format!("{:.2} s", (ms / 10) as f64 / 100.0),
        10_000..60_000 => format!("{:.1} s", (ms / 100) as f64 / 10.0),
        _ => span(ms),
    }
}

/// RFC 3339 in UTC, with milliseconds only if they are not zero. `why` accepts it.
pub(super) fn instant(ms: i64) -> String {
    let text = crate::model::rfc3339_ms(ms);
    text.strip_suffix(".000Z")
        .map_or_else(|| text.clone(), |short| format!("{short}Z"))
}

/// A schedule's local time for people: `Sat 2026-11-21 12:00:00 +08:00`.
pub(super) fn local(rfc3339: &str) -> String {
    // Date, `T`, time with an optional fraction, then the offset.
    let zone = rfc3339.rfind(['+', '-', 'Z']).unwrap_or(rfc3339.len());
    let (date_time, offset) = rfc3339.split_at(zone);
    match date_time.parse::<jiff::civil::DateTime>() {
        Ok(t) => format!("{} {offset}", t.strftime("%a %Y-%m-%d %H:%M:%S%.f")),
        Err(_) => rfc3339.to_owned(),
    }
}

/// `1 job`, `2 jobs`.
pub(super) fn count(n: usize, noun: &str) -> String {
    match noun {
        _ if n == 1 => format!("1 {noun}"),
        _ if noun.ends_with(['s', 'h']) => format!("{n} {noun}es"),
        _ => format!("{n} {noun}s"),
    }
}

/// Parses the number of lines to print; limited, because the lines are collected in memory first.
pub(super) fn lines(text: &str) -> Result<usize, String> {
    const MOST: usize = 100_000;
    match text.parse() {
        Ok(n) if (1..=MOST).contains(&n) => Ok(n),
        _ => Err(format!("expected a number from 1 to {MOST}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn tables_align_leave_out_empty_columns_and_end_no_line_with_spaces() {
        let mut t = Table::new(&["JOB", ">TOOK", "NOTE", "ERROR"]);
        t.row(["a".into(), "31 ms".into(), "".into(), "".into()]);
        t.row([
            "longer".into(),
            "1.24 s".into(),
            "".into(),
            "bad\x1bend".into(),
        ]);
        t.row(["b".into()]);
        let plain = anstream::adapter::strip_str(&t.render()).to_string();
        assert_eq!(
            plain,
            "JOB       TOOK  ERROR\n\
             a        31 ms\n\
             longer  1.24 s  bad\\x1bend\n\
             b\n"
        );
    }

    #[test]
    fn what_a_command_wrote_cannot_move_the_cursor() {
        assert_eq!(line(" a\x1b[2J\tb\nc\r\n"), "a\\x1b[2J b\\nc");
        assert_eq!(line(&"x".repeat(301)).chars().count(), 301);
    }
}
