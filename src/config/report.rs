//! The problems of a configuration, each with its place, for people and for `--json`.
//!
//! No problem shows a secret: quoted lines come from a copy of the text with masked passwords (see [`mask`]), and in
//! messages the same is masked, because they name the values of the file.

use std::{
    collections::{BTreeSet, HashSet},
    fmt, iter,
    ops::Range,
    path::{Path, PathBuf},
};

use super::keys;
use crate::text;
use annotate_snippets::{AnnotationKind, Group, Level, Origin, Renderer, Snippet};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// Reports do not quote longer lines: nobody could read them, and a report may have very many.
const LONGEST_QUOTE: usize = 2000;

/// All problems of a configuration, in the order of the file.
#[derive(Debug, Clone)]
pub struct Report {
    file: PathBuf,
    problems: Vec<Problem>,
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
            quote: None,
        };
        Self {
            file: path.into(),
            problems: vec![problem],
        }
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
        let mut out = String::new();
        for problem in &self.problems {
            let path = text::line(&problem.file.to_string_lossy());
            let title = text::line(&problem.message);
            let mut group = Group::with_title(Level::ERROR.primary_title(title));
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
        let count = self.problems.len();
        let noun = if count == 1 { "problem" } else { "problems" };
        let file = text::line(&self.file.to_string_lossy());
        out.push_str(&format!("{count} {noun} in {file}"));
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
    Defaults,
    Jobs,
    Job(&'a str),
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Top => Ok(()),
            Self::Store => f.write_str("[store]: "),
            Self::Limits => f.write_str("[limits]: "),
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
            (
                "the string does not end in this line",
                Some("close it with the quote that opened it"),
            )
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
        let (masked, cut) = mask_and_cut(self.text);
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
        for span in cut {
            broken.extend(line_of(span.start)..=line_of(span.end));
        }
        let mut repeated = 0..0;
        let mut kept: Vec<Found> = Vec::with_capacity(self.found.len());
        for found in self.found {
            let line = line_of(found.span.start);
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
                ..
            } = found;
            let message = mask_message(&message);
            if let Some((file, line)) = elsewhere {
                problems.push(Problem {
                    file,
                    line: Some(line),
                    column: Some(1),
                    message,
                    hint,
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
            let quote = masked
                .get(start..end)
                .filter(|line| line.len() <= LONGEST_QUOTE)
                .map(|line| {
                    let line = line.trim_end_matches('\r').to_owned();
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
                quote,
            });
        }
        Report {
            file: self.file,
            problems,
        }
    }
}

/// The text with everything that looks like a secret replaced by `*`, byte for byte, so that positions do not change.
/// Works on any text, even if it is not TOML: an error must not print text that it failed to read.
///
/// Treated as secrets: in a URL the parts before `@` and after `?`, and a port that is not a number; the text between
/// the first `:` of a word and `@`; the text after `pass=`; a `url` that begins as no URL does; what follows `:` in a
/// `username`; the values of keys whose name contains `pass`, `secret`, `token`, `key` or the like (see
/// [`names_a_secret`]) and does not end in `file`, also after `:` or a blank instead of `=`; all values of `env`;
/// strings with escapes or of several lines, also if a newline cuts a string that may have only one.
#[cfg(test)]
pub(super) fn mask(text: &str) -> String {
    mask_and_cut(text).0
}

/// [`mask`], and the lines that most likely belong to a string that began in an earlier line and was cut there.
fn mask_and_cut(text: &str) -> (String, Vec<Range<usize>>) {
    let mut bytes = text.as_bytes().to_vec();
    for (_, node) in DeTable::parse_recoverable(text).0.get_ref() {
        mask_env(node, false, &mut bytes);
    }
    let cut = mask_strings(text, &mut bytes);
    mask_env_tables(text, &mut bytes);
    for line in spans_of_lines(text) {
        mask_user_info(text, line.clone(), &mut bytes);
        mask_query(text, line.clone(), &mut bytes);
        mask_misspelt_url(text, line.clone(), &mut bytes);
        mask_username(text, line.clone(), &mut bytes);
        mask_bare_value(text, line.clone(), &mut bytes);
        mask_env_of_line(text, line.clone(), &mut bytes);
    }
    mask_values(text, &mut bytes);
    // Whole characters are replaced by ASCII, so this cannot fail.
    (String::from_utf8(bytes).unwrap_or_default(), cut)
}

fn spans_of_lines(text: &str) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    text.split_inclusive('\n').map(move |line| {
        let span = start..start + line.len();
        start = span.end;
        span
    })
}

/// Variables of commands may have any value: only parsed TOML shows all their places.
fn mask_env(node: &Spanned<DeValue<'_>>, variable: bool, bytes: &mut [u8]) {
    match node.get_ref() {
        DeValue::Table(table) => {
            for (key, node) in table {
                mask_env(node, variable || key.get_ref() == "env", bytes);
            }
        }
        DeValue::Array(items) => {
            for node in items {
                mask_env(node, variable, bytes);
            }
        }
        _ if variable => fill(bytes, node.span()),
        _ => {}
    }
}

/// As [`mask_env`], for what the parser leaves out (a key given twice) or does not understand: masks what
/// follows the first word of each line below a header `[….env]`.
fn mask_env_tables(text: &str, bytes: &mut [u8]) {
    let mut inside = false;
    for span in spans_of_lines(text) {
        let line = &text[span.clone()];
        let trimmed = line.trim();
        if trimmed.starts_with('[') && trimmed.ends_with(']') {
            inside = trimmed.ends_with("env]");
        } else if inside && !trimmed.starts_with('#') {
            let word = line.trim_start_matches([' ', '\t']);
            if let Some(end) = word.find(['=', ':']).or_else(|| word.find([' ', '\t'])) {
                fill(bytes, span.end - word.len() + end + 1..span.end);
            }
        }
    }
}

/// As [`mask_env`], for a text that is not TOML: masks the rest of the line after the word `env` and `=` or `.`.
fn mask_env_of_line(text: &str, line: Range<usize>, bytes: &mut [u8]) {
    let part = &text[line.clone()];
    for (at, name) in part.match_indices("env") {
        let rest = part[at + name.len()..].trim_start_matches(['"', '\'', ' ', '\t']);
        let whole = !part[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        if whole && rest.starts_with(['=', '.']) {
            return fill(bytes, line.end - rest.len() + 1..line.end);
        }
    }
}

/// Masks strings of several lines, and strings with escapes, which may hide a secret. Returns the further lines of the
/// strings that a newline cuts.
fn mask_strings(text: &str, bytes: &mut [u8]) -> Vec<Range<usize>> {
    let mut cut = Vec::new();
    let mut from = 0;
    while let Some(n) = text[from..].find(['"', '\'', '#']) {
        let rest = &text[from + n..];
        from += n;
        if rest.starts_with('#') {
            from += rest.find('\n').unwrap_or(rest.len());
            continue;
        }
        let quote = ["\"\"\"", "'''", "\"", "'"]
            .into_iter()
            .find(|q| rest.starts_with(q))
            .unwrap_or("\"");
        let inner = &rest[quote.len()..];
        let length = match quote.len() {
            3 => inner.find(quote).unwrap_or(inner.len()),
            _ => closing(inner, quote),
        };
        let string = &inner[..length];
        from += quote.len();
        if string.contains('\n') || quote.starts_with('"') && string.contains('\\') {
            fill(bytes, from..from + length);
        }
        let begin = from;
        from += length;
        let close = text[from..]
            .bytes()
            .take(quote.len())
            .take_while(|b| quote.as_bytes()[0] == *b)
            .count();
        from += close;
        if close == 0 && quote.len() == 1 {
            cut.extend(mask_cut(text, begin..from, quote, bytes));
            from = cut.last().map_or(from, |more| from.max(more.end));
        }
    }
    cut
}

/// Masks a string that does not end in its line, and returns its further lines: everything up to the line with its
/// quote, unless a line looks like soloist's configuration. Then the string most likely only lacks its quote.
fn mask_cut(
    text: &str,
    string: Range<usize>,
    quote: &str,
    bytes: &mut [u8],
) -> Option<Range<usize>> {
    // The quote may be the last one of a string that began in an earlier line.
    let line = text[..string.start].rfind('\n').map_or(0, |n| n + 1);
    let before = text[line..string.start - 1].trim_end_matches([' ', '\t']);
    if !before.is_empty() && !before.ends_with(['=', '[', ',', '{', '.']) {
        fill(bytes, line..string.end);
    }
    let from = (string.end + 1).min(text.len());
    let mut end = from;
    for line in text[from..].split_inclusive('\n') {
        if is_ours(line) {
            break;
        }
        end += line.len();
        if closing(line, quote) < line.trim_end_matches('\n').len() {
            break;
        }
    }
    let more = from..from + text[from..end].trim_end().len();
    if more.is_empty() {
        return None;
    }
    fill(bytes, string.start..more.end);
    Some(more)
}

/// Whether the line is the header of a table, or begins with one of soloist's keys.
fn is_ours(line: &str) -> bool {
    let line = line.trim();
    let end = line.find(|c: char| !(c.is_ascii_lowercase() || c == '_'));
    let (word, rest) = line.split_at(end.unwrap_or(line.len()));
    let header = line
        .strip_prefix('[')
        .and_then(|l| l.split(['.', ']']).next());
    header.is_some_and(|table| ["store", "limits", "defaults", "jobs"].contains(&table))
        || rest.trim_start().starts_with(['=', '.']) && keys::is_known(word)
}

/// The secrets of a URL, and `x:y@z` without blanks.
fn mask_user_info(text: &str, line: Range<usize>, bytes: &mut [u8]) {
    let part = &text[line.clone()];
    for secret in secrets(part) {
        fill(bytes, line.start + secret.start..line.start + secret.end);
    }
    let mut from = 0;
    for piece in part.split_inclusive(|c: char| c.is_whitespace() || c == '"' || c == '\'') {
        if let Some(at) = piece.rfind('@')
            && let Some(colon) = piece[..at].find(':')
        {
            let slashes = piece[colon + 1..at]
                .bytes()
                .take_while(|b| *b == b'/')
                .count();
            fill(
                bytes,
                line.start + from + colon + 1 + slashes..line.start + from + at,
            );
        }
        from += piece.len();
    }
}

/// The secrets of the URLs in a line. Each URL lasts until the end of the line: a password may contain the quote that
/// would end the string, and then the string may end anywhere. So the last `@` and the first `?` belong to all URLs.
fn secrets(line: &str) -> Vec<Range<usize>> {
    let Some(first) = line.find("://").map(|at| at + 3) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    // From here on, all of the line is a secret.
    let mut rest = line[first..].find('?').map(|n| first + n + 1);
    if line[first..].contains('\\') {
        rest = Some(first);
    }
    let mut place = first;
    if let Some(at) = line[first..].rfind('@').map(|n| first + n) {
        found.push(first..at);
        place = at + 1;
    }
    let later = line[place..].match_indices("://");
    for place in iter::once(place).chain(later.map(|(at, _)| place + at + 3)) {
        rest = port(line, place).into_iter().chain(rest).min();
    }
    found.extend(rest.map(|from| from..line.len()));
    found
}

/// Where the port of the host at `place` begins, if it is not a number: most likely it is a password whose host is
/// missing.
fn port(line: &str, place: usize) -> Option<usize> {
    let url = &line[place..];
    let host = &url[..url
        .find(['/', '?', '#', '"', '\'', ' ', ',', '\n', '\r'])
        .unwrap_or(url.len())];
    // After the brackets of an IPv6 address.
    let name = match host.rfind(']') {
        Some(n) if host.starts_with('[') => n,
        _ => 0,
    };
    let colon = name + host[name..].find(':')?;
    let port = &host[colon + 1..];
    let number = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    (!number).then_some(place + colon + 1)
}

fn mask_query(text: &str, line: Range<usize>, bytes: &mut [u8]) {
    let part = &text[line.clone()];
    let mut masked = 0;
    for (at, name) in part.match_indices("pass=") {
        let start = at + name.len();
        if start < masked {
            continue;
        }
        masked = part[start..]
            .find(['"', '\'', '\n'])
            .map_or(part.len(), |n| start + n);
        fill(bytes, line.start + start..line.start + masked);
    }
}

/// The value of `url`, and what follows in its line, if it does not begin as a URL does: nobody knows then which part
/// of it is the password. A variable is quoted by its name.
fn mask_misspelt_url(text: &str, line: Range<usize>, bytes: &mut [u8]) {
    let part = &text[line.clone()];
    let value = part.match_indices("url").find_map(|(at, name)| {
        let rest = part[at + name.len()..].trim_start_matches(['s', '"', '\'', ' ', '\t']);
        let value = rest.strip_prefix(['=', ':'])?;
        Some(value.trim_start_matches(['[', '"', '\'', ' ', '\t']))
    });
    let Some(value) = value else {
        return;
    };
    let begins = |c: char| c.is_ascii_alphanumeric() || "+-._${}".contains(c);
    let begins_well = match value.split_once("://") {
        Some((scheme, _)) => scheme.chars().all(begins),
        None => value.starts_with("sqlite:") || value.starts_with("memory:") || is_variable(value),
    };
    if !begins_well {
        fill(bytes, line.end - value.len()..line.end);
    }
}

/// Whether a value is `${NAME}` and nothing more, up to its quote.
fn is_variable(value: &str) -> bool {
    let inner = value.strip_prefix("${").and_then(|v| v.split_once('}'));
    inner.is_some_and(|(name, rest)| {
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && rest.starts_with(['"', '\''])
    })
}

/// What follows `:` in a `username`: most likely somebody wrote the password there too.
fn mask_username(text: &str, line: Range<usize>, bytes: &mut [u8]) {
    let part = &text[line.clone()];
    let Some(value) = part.find("username").map(|at| at + "username".len()) else {
        return;
    };
    let after = part[value..].find(['=', ':']).map(|n| value + n + 1);
    if let Some(after) = after
        && let Some(colon) = part[after..].find(':').map(|n| after + n + 1)
    {
        let end = part[colon..]
            .find(['"', '\''])
            .map_or(part.len(), |n| colon + n);
        fill(bytes, line.start + colon..line.start + end);
    }
}

/// As [`mask_values`], for a line that is not TOML: masks what follows a key that names a secret, without `=`.
fn mask_bare_value(text: &str, line: Range<usize>, bytes: &mut [u8]) {
    let part = &text[line.clone()];
    let trimmed = part.trim_start_matches([' ', '\t', '"', '\'', '-', '{']);
    let key = trimmed
        .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'))
        .unwrap_or(trimmed.len());
    let rest = trimmed[key..].trim_start_matches([' ', '\t', '"', '\'', ':']);
    if names_a_secret(&trimmed[..key]) && !rest.starts_with('=') {
        fill(bytes, line.end - rest.len()..line.end);
    }
}

/// A message with the secrets of URLs masked: it may name a value of the file, which may be in the wrong place.
fn mask_message(message: &str) -> String {
    let mut bytes = message.as_bytes().to_vec();
    for line in spans_of_lines(message) {
        mask_user_info(message, line.clone(), &mut bytes);
        mask_query(message, line, &mut bytes);
    }
    String::from_utf8(bytes).unwrap_or_default()
}

/// Whether the value of a key with this name is a secret.
fn names_a_secret(key: &str) -> bool {
    const SECRET: [&str; 10] = [
        "pass", "pasw", "psw", "pssw", "pw", "secret", "token", "cred", "auth", "key",
    ];
    let key = key.to_ascii_lowercase();
    !key.ends_with("file") && !keys::is_known(&key) && SECRET.iter().any(|word| key.contains(word))
}

fn mask_values(text: &str, bytes: &mut [u8]) {
    // Where the last value without quotes ends.
    let mut masked = 0;
    for (at, _) in text.match_indices('=') {
        let name = text[..at].trim_end_matches([' ', '\t', '"', '\'']);
        let start = name
            .rfind(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'))
            .map_or(0, |n| n + 1);
        // With a multi-byte character before the name, `rfind` returned the start of that character.
        if !name.get(start..).is_some_and(names_a_secret) {
            continue;
        }
        let rest = text[at + 1..].trim_start_matches([' ', '\t']);
        let open = text.len() - rest.len();
        let Some(quote) = ["\"\"\"", "'''", "\"", "'"]
            .into_iter()
            .find(|q| rest.starts_with(q))
        else {
            if open >= masked {
                let end = rest.find(['\n', ',', '}', '#']).unwrap_or(rest.len());
                masked = open + end;
                fill(bytes, open..open + rest[..end].trim_end().len());
            }
            continue;
        };
        let inner = &rest[quote.len()..];
        let end = match quote.len() {
            3 => inner.find(quote).unwrap_or(inner.len()),
            _ => closing(inner, quote),
        };
        fill(bytes, open + quote.len()..open + quote.len() + end);
    }
}

/// Where a one-line string ends: at its quote, at the end of the line, or of the text.
fn closing(inner: &str, quote: &str) -> usize {
    let mut escaped = false;
    for (at, c) in inner.char_indices() {
        match c {
            '\n' => return at,
            _ if escaped => escaped = false,
            '\\' if quote == "\"" => escaped = true,
            _ if quote.starts_with(c) => return at,
            _ => {}
        }
    }
    inner.len()
}

/// Masks `span`. Newlines stay, so that line numbers do not change.
fn fill(bytes: &mut [u8], span: Range<usize>) {
    for byte in &mut bytes[span] {
        if *byte != b'\n' && *byte != b'\r' {
            *byte = b'*';
        }
    }
}
