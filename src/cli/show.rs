//! Formats output for people: aligned tables, relative times, and colours (which only make it faster to read).

use anstyle::{AnsiColor, Style};

use crate::model::Outcome;
pub(super) use crate::words::{apart, count, instant, line, local, relative, span, took};

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
/// The mark of a line that a job wrote to stderr.
pub(super) const STDERR: Style = AnsiColor::Red.on_default();
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

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cell {
    pub text: String,
    pub style: Style,
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
    pub rows: Vec<Vec<Cell>>,
}

/// A column that has text.
pub(super) struct Column {
    /// Which cell of each row.
    pub cell: usize,
    pub title: &'static str,
    pub right: bool,
    pub width: usize,
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

    pub(super) fn columns(&self) -> Vec<Column> {
        let column = |(cell, head): (usize, &&'static str)| {
            let title = head.trim_start_matches('>');
            let cells = self.rows.iter().filter_map(|r| r.get(cell));
            let width = cells.map(|c| c.text.chars().count()).max().unwrap_or(0);
            (width > 0).then(|| Column {
                cell,
                title,
                right: head.starts_with('>'),
                width: width.max(title.len()),
            })
        };
        self.head.iter().enumerate().filter_map(column).collect()
    }

    /// Each line ends with a newline.
    pub(super) fn render(&self) -> String {
        let columns = self.columns();
        let mut out = String::new();
        let mut put = |cells: &[(&str, Style)]| {
            let mut text = String::new();
            // Lines have no trailing spaces.
            let mut owed = 0;
            for (&(cell, style), column) in cells.iter().zip(&columns) {
                let fill = column.width.saturating_sub(cell.chars().count());
                if !cell.is_empty() {
                    let before = if column.right { fill } else { 0 };
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
        let heads: Vec<_> = columns.iter().map(|c| (c.title, DIM)).collect();
        put(&heads);
        for row in &self.rows {
            let cells: Vec<_> = columns
                .iter()
                .map(|c| row.get(c.cell).map_or(("", PLAIN), |x| (&*x.text, x.style)))
                .collect();
            put(&cells);
        }
        out
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
}
