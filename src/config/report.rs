//! The problems of a configuration, each with its place, for people and for `--json`.
//!
//! No problem shows a secret: [`quote`] says what of the file a problem may quote, and masks what a message names. No
//! hint has anything of the file that may be a secret.

use std::{
    collections::{BTreeSet, HashSet},
    fmt, iter,
    ops::Range,
    path::{Path, PathBuf},
};

use super::quote::{self, Quotable};
use crate::text;
use annotate_snippets::{AnnotationKind, Group, Level, Origin, Renderer, Snippet};

/// Reports do not quote longer lines: nobody could read them, and a report may have very many.
const LONGEST_QUOTE: usize = 2000;

/// All problems of a configuration, in the order of the file.
#[derive(Debug, Clone)]
pub struct Report {
    file: PathBuf,
    problems: Vec<Problem>,
    /// They are warnings: the file is valid.
    advice: bool,
}

/// One problem. Serialised as `file`, `line`, `column`, `message`, `hint`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    pub file: PathBuf,
    /// From 1. None: the problem is the file as a whole.
    pub line: Option<usize>,
    /// From 1, in characters.
    pub column: Option<usize>,
    /// The problem and its place in the configuration, in one line.
    pub message: String,
    /// The hint: how to correct it.
    pub hint: Option<String>,
    /// The rule's name, if this is advice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<&'static str>,
    #[serde(skip)]
    quote: Option<Quote>,
}

/// The lines of a problem, without secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Quote {
    lines: String,
    first_line: usize,
    marked: Range<usize>,
}

impl Report {
    /// The report of a file that cannot be used at all.
    pub(super) fn of_file(path: &Path, message: String, hint: Option<String>) -> Self {
        let problem = Problem {
            file: path.into(),
            line: None,
            column: None,
            message,
            hint,
            rule: None,
            quote: None,
        };
        Self {
            file: path.into(),
            problems: vec![problem],
            advice: false,
        }
    }

    pub(super) fn into_advice(mut self) -> Self {
        self.advice = true;
        self
    }

    /// Never empty.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// One block per problem, in the form of the Rust compiler, and a last line that counts them. No newline at the
    /// end. Colours are ANSI sequences.
    pub fn render(&self, color: bool) -> String {
        let renderer = if color {
            Renderer::styled()
        } else {
            Renderer::plain()
        };
        let (level, noun) = match self.advice {
            true => (Level::WARNING, "warning"),
            false => (Level::ERROR, "problem"),
        };
        let mut out = String::new();
        for problem in &self.problems {
            let path = text::line(&problem.file.to_string_lossy());
            let title = text::line(&problem.message);
            let mut group = Group::with_title(level.clone().primary_title(title));
            if let Some(quote) = &problem.quote {
                let mark = AnnotationKind::Primary.span(quote.marked.clone());
                group = group.element(
                    Snippet::source(quote.lines.as_str())
                        .line_start(quote.first_line)
                        .path(path.as_str())
                        .annotation(mark),
                );
            } else {
                let mut origin = Origin::path(path.as_str());
                if let Some(line) = problem.line {
                    origin = origin.line(line);
                    if let Some(column) = problem.column {
                        origin = origin.char_column(column);
                    }
                }
                group = group.element(origin);
            }
            if let Some(hint) = &problem.hint {
                group = group.element(Level::HELP.message(text::line(hint)));
            }
            out.push_str(&renderer.render(&[group]));
            out.push_str("\n\n");
        }
        let count = crate::words::count(self.problems.len(), noun);
        let file = text::line(&self.file.to_string_lossy());
        out.push_str(&format!("{count} in {file}"));
        out
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for Report {}

/// Where in the configuration a problem belongs; the first words of its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place<'a> {
    Top,
    Store,
    Limits,
    Http,
    Notify,
    /// A channel.
    Channel(&'a str),
    Defaults,
    Jobs,
    Job(&'a str),
}

impl Place<'_> {
    /// The strings there may name variables of the environment, whose values may be secret.
    pub(super) fn expands(self) -> bool {
        matches!(self, Self::Store | Self::Http | Self::Channel(_))
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Top => Ok(()),
            Self::Store => f.write_str("[store]: "),
            Self::Limits => f.write_str("[limits]: "),
            Self::Http => f.write_str("[http]: "),
            Self::Notify => f.write_str("[notify]: "),
            Self::Channel(name) => write!(f, "channel `{}`: ", name.escape_debug()),
            Self::Defaults => f.write_str("[defaults]: "),
            Self::Jobs => f.write_str("[jobs]: "),
            // Debug escapes what would break the one line of a message.
            Self::Job(name) => write!(f, "job `{}`: ", name.escape_debug()),
        }
    }
}

/// The parser's message for a key or table that is defined twice.
pub(super) fn is_duplicate(message: &str) -> bool {
    message.starts_with("duplicate key")
}

/// The problem of a string that a newline cuts.
const CUT: &str = "the string does not end in this line";

/// Gathers problems while the configuration is read.
pub(super) struct Collector<'a> {
    file: PathBuf,
    text: &'a str,
    found: Vec<Found>,
    /// Span and text without the place, so that a wrong default is reported once, not for each job.
    seen: HashSet<(usize, usize, String)>,
    /// Problems in other files: path, line and text.
    seen_elsewhere: HashSet<(PathBuf, usize, String)>,
}

struct Found {
    span: Range<usize>,
    message: String,
    hint: Option<String>,
    kind: Kind,
    elsewhere: Option<(PathBuf, usize)>,
    rule: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Not TOML.
    Syntax,
    /// A key or table is defined twice; the parser keeps the first.
    Duplicate,
    /// Something is missing; ignored if the table around it is not TOML.
    Absence,
    Meaning,
}

impl<'a> Collector<'a> {
    pub(super) fn new(file: &Path, text: &'a str) -> Self {
        Self {
            file: file.into(),
            text,
            found: Vec::new(),
            seen: HashSet::new(),
            seen_elsewhere: HashSet::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Adds an error of the parser, and rewords the most common messages.
    pub(super) fn syntax(&mut self, span: Range<usize>, message: &str) {
        let duplicate = is_duplicate(message);
        let (message, hint) = if message.starts_with("string values must be quoted") {
            match span.is_empty() {
                true => ("the value is missing", None),
                false => (
                    "a string must be in quotes",
                    Some("put it between `\"` and `\"`"),
                ),
            }
        } else if duplicate {
            (
                "this key or table is already defined",
                Some("remove one of them"),
            )
        } else if message == "invalid basic string, expected `\"`"
            || message == "invalid literal string, expected `'`"
        {
            (CUT, Some("close it with the quote that opened it"))
        } else {
            (message, None)
        };
        self.push(
            if duplicate {
                Kind::Duplicate
            } else {
                Kind::Syntax
            },
            Place::Top,
            span,
            message.to_owned(),
            hint.map(str::to_owned),
        );
    }

    pub(super) fn absent(
        &mut self,
        place: Place<'_>,
        span: Range<usize>,
        message: String,
        hint: String,
    ) {
        self.push(Kind::Absence, place, span, message, Some(hint));
    }

    pub(super) fn add(
        &mut self,
        place: Place<'_>,
        span: Range<usize>,
        message: String,
        hint: Option<String>,
    ) {
        self.push(Kind::Meaning, place, span, message, hint);
    }

    /// A warning, by the rule of this name.
    pub(super) fn advise(
        &mut self,
        rule: &'static str,
        place: Place<'_>,
        span: Range<usize>,
        message: String,
        hint: String,
    ) {
        let before = self.found.len();
        self.push(Kind::Meaning, place, span, message, Some(hint));
        for found in &mut self.found[before..] {
            found.rule = Some(rule);
        }
    }

    /// A problem in another file, which the text at `span` names. That file's text is not quoted: it may have secrets.
    pub(super) fn elsewhere(
        &mut self,
        span: Range<usize>,
        file: PathBuf,
        line: usize,
        message: String,
        hint: &str,
    ) {
        if self
            .seen_elsewhere
            .insert((file.clone(), line, message.clone()))
        {
            let hint = Some(hint.to_owned());
            self.found.push(Found {
                span,
                message,
                hint,
                kind: Kind::Meaning,
                elsewhere: Some((file, line)),
                rule: None,
            });
        }
    }

    fn push(
        &mut self,
        kind: Kind,
        place: Place<'_>,
        span: Range<usize>,
        text: String,
        hint: Option<String>,
    ) {
        let end = span.end.min(self.text.len());
        let span = span.start.min(end)..end;
        let message = format!("{place}{text}");
        if self.seen.insert((span.start, span.end, text)) {
            self.found.push(Found {
                span,
                message,
                hint,
                kind,
                elsewhere: None,
                rule: None,
            });
        }
    }

    /// The report, in the order of the file.
    ///
    /// After a syntax error the parser guesses what was meant: problems that follow only from the guess (a second error
    /// in the same line, something missing in the same table) are left out. So are the keys of a table that is itself
    /// defined twice.
    // Long: each problem passes one filter after the other.
    pub(super) fn finish(mut self) -> Report {
        let quotable = Quotable::of(self.text);
        let starts: Vec<usize> = iter::once(0)
            .chain(self.text.match_indices('\n').map(|(at, _)| at + 1))
            .collect();
        let line_of = |at: usize| starts.partition_point(|start| *start <= at).max(1) - 1;
        self.found
            .sort_by_key(|found| (found.kind != Kind::Syntax, found.span.start, found.span.end));
        // The lines from a table's header to the next header. A line of a string may look like a header: then fewer
        // problems are left out.
        let text = self.text;
        let is_table = |line: usize| {
            text.get(starts[line]..)
                .is_some_and(|rest| rest.trim_start_matches([' ', '\t']).starts_with('['))
        };
        let below = |table: usize| {
            let end = (table + 1..starts.len()).find(|line| is_table(*line));
            table + 1..end.unwrap_or(starts.len())
        };
        // What the rest of a cut string seems to say was not meant; an unknown key would be a part of a secret.
        let mut broken: BTreeSet<usize> = BTreeSet::new();
        for found in &self.found {
            if found.message == CUT {
                let more = quotable.cut(found.span.start);
                broken.extend(line_of(more.start) + 1..=line_of(more.end));
            }
        }
        let (mut repeated, mut unclosed) = (0..0, None);
        let mut kept: Vec<Found> = Vec::with_capacity(self.found.len());
        for mut found in self.found {
            let line = line_of(found.span.start);
            // Most likely the bracket is missing that ends the list, and all that follows seems to belong to it.
            if found
                .message
                .starts_with("missing comma between array elements")
            {
                let begun = |at: usize| quote::key_of(&text[starts[at]..]).map(|key| (key, at));
                let list = (0..=line)
                    .rev()
                    .find_map(begun)
                    .filter(|(_, at)| *at < line);
                if list.is_some() && std::mem::replace(&mut unclosed, list) == list {
                    continue;
                }
                let hint = |(key, at)| {
                    format!(
                        "does the list `{key}`, which begins in line {}, lack its `]`?",
                        at + 1
                    )
                };
                found.hint = list.map(hint);
            }
            match found.kind {
                Kind::Syntax if !broken.insert(line) => continue,
                Kind::Absence | Kind::Meaning if broken.contains(&line) => continue,
                Kind::Absence if broken.range(below(line)).next().is_some() => continue,
                Kind::Duplicate if repeated.contains(&line) => continue,
                Kind::Duplicate if is_table(line) => repeated = below(line),
                _ => {}
            }
            kept.push(found);
        }
        kept.sort_by_key(|found| (found.span.start, found.span.end));
        let mut problems = Vec::with_capacity(kept.len());
        // Count columns from the previous problem on, so that a long line is counted once.
        let (mut counted, mut column, mut counted_line) = (0, 1, usize::MAX);
        for found in kept {
            let Found {
                span,
                message,
                hint,
                elsewhere,
                rule,
                ..
            } = found;
            let message = quote::message(&message);
            if let Some((file, line)) = elsewhere {
                problems.push(Problem {
                    file,
                    line: Some(line),
                    column: Some(1),
                    message,
                    hint,
                    rule,
                    quote: None,
                });
                continue;
            }
            let line = line_of(span.start);
            if line != counted_line {
                (counted, column, counted_line) = (starts[line], 1, line);
            }
            column += self
                .text
                .get(counted..span.start)
                .map_or(0, |s| s.chars().count());
            counted = span.start;
            let start = starts[line];
            let end = starts
                .get(line + 1)
                .map_or(self.text.len(), |next| next - 1);
            let quote = (end - start <= LONGEST_QUOTE)
                .then(|| quotable.line(start..end))
                .flatten()
                .map(|mut line| {
                    // The mark has the column of the file.
                    let missing = (span.start - start).saturating_sub(line.len());
                    line.push_str(&" ".repeat(missing.min(LONGEST_QUOTE)));
                    // A mark over several lines is shown on the first; one after the end of the text, at the end.
                    let marked =
                        (span.start - start).min(line.len())..(span.end - start).min(line.len());
                    Quote {
                        lines: line,
                        first_line: line_of(start) + 1,
                        marked,
                    }
                });
            problems.push(Problem {
                file: self.file.clone(),
                line: Some(line + 1),
                column: Some(column),
                message,
                hint,
                rule,
                quote,
            });
        }
        Report {
            file: self.file,
            problems,
            advice: false,
        }
    }
}
