//! The problems of a configuration, each with its place, for people and for `--json`.
//!
//! No problem shows a secret: [`quote`](super::quote) says what of the file a problem may quote.

use std::{
    collections::HashSet,
    fmt, iter,
    ops::Range,
    path::{Path, PathBuf},
};

use super::quote::Quotable;
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
    /// What to do about it.
    pub hint: Option<String>,
    /// Of advice: the name of the rule.
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
    elsewhere: Option<(PathBuf, usize)>,
    rule: Option<&'static str>,
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

    pub(super) fn add(
        &mut self,
        place: Place<'_>,
        span: Range<usize>,
        message: String,
        hint: Option<String>,
    ) {
        self.push(place, span, message, hint);
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
        self.push(place, span, message, Some(hint));
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
                elsewhere: Some((file, line)),
                rule: None,
            });
        }
    }

    fn push(&mut self, place: Place<'_>, span: Range<usize>, text: String, hint: Option<String>) {
        let end = span.end.min(self.text.len());
        let span = span.start.min(end)..end;
        let message = format!("{place}{text}");
        if self.seen.insert((span.start, span.end, text)) {
            self.found.push(Found {
                span,
                message,
                hint,
                elsewhere: None,
                rule: None,
            });
        }
    }

    /// The report, in the order of the file.
    pub(super) fn finish(self) -> Report {
        let quotable = Quotable::of(self.text);
        let starts: Vec<usize> = iter::once(0)
            .chain(self.text.match_indices('\n').map(|(at, _)| at + 1))
            .collect();
        let line_of = |at: usize| starts.partition_point(|start| *start <= at).max(1) - 1;
        let mut kept = self.found;
        kept.sort_by_key(|found| (found.span.start, found.span.end));
        let mut problems = Vec::with_capacity(kept.len());
        for found in kept {
            let Found {
                span,
                message,
                hint,
                elsewhere,
                rule,
            } = found;
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
            let start = starts[line];
            let before = self.text.get(start..span.start).unwrap_or_default();
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
                column: Some(before.chars().count() + 1),
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
