//! The parts of the file that a report may quote: headers, keys, and the values of keys that hold no secret. A file
//! with an error may have a secret at any place, in any form.

use std::ops::Range;

use super::keys;
use toml::de::{DeTable, DeValue};

/// The parts of a text that a report may quote, whether it is TOML or not.
pub(super) struct Quotable<'t> {
    text: &'t str,
    is_toml: bool,
    /// The keys with their values, in the order of the text, and whether the value may be quoted.
    values: Vec<(Range<usize>, bool)>,
}

impl<'t> Quotable<'t> {
    pub(super) fn of(text: &'t str) -> Self {
        let (tree, errors) = DeTable::parse_recoverable(text);
        let mut values = Vec::new();
        collect(tree.get_ref(), &mut Vec::new(), &mut values);
        values.sort_by_key(|(span, _)| span.start);
        let is_toml = errors.is_empty();
        Self {
            text,
            is_toml,
            values,
        }
    }

    /// A line as a report shows it, with dots in place of a possible secret. None: nothing.
    pub(super) fn line(&self, line: Range<usize>) -> Option<String> {
        let part = self.text.get(line.clone())?;
        let first = self
            .values
            .partition_point(|(span, _)| span.end <= line.start);
        let here = || {
            self.values[first..]
                .iter()
                .take_while(|(span, _)| span.start < line.end)
        };
        if let Some((last, _)) = here().last()
            && here().all(|(_, open)| *open)
        {
            let (shown, rest) = part.split_at((last.end - line.start).min(part.len()));
            let closing = rest.find(|c| !" \t}".contains(c)).unwrap_or(rest.len());
            let shown = part[..shown.len() + closing].trim_end();
            // A list goes on, perhaps behind a comment.
            let shown = if last.end > line.end {
                without_comment(shown)
            } else {
                shown
            };
            if message(shown) == shown {
                return Some(shown.to_owned());
            }
        }
        if here().any(|(span, _)| span.start < line.start) {
            return None;
        }
        let word = part.trim_start_matches([' ', '\t']);
        let shown = word.split('#').next().unwrap_or_default().trim_end();
        if word.starts_with('[') && here().next().is_none() && !shown.contains([':', '@', '\\']) {
            let shown = &part[..part.len() - word.len() + shown.len()];
            return (self.is_toml || is_ours(word)).then(|| shown.to_owned());
        }
        let key = name_at(word);
        let rest = &word[key.len()..];
        // Unparsed lines have no known table: another word may belong to a string.
        if key.is_empty() || !(self.is_toml || keys::is_known(key)) {
            return None;
        }
        let value = rest.trim_start_matches([' ', '\t', '=', ':']);
        Some(format!("{}...", &part[..part.len() - value.len()]))
    }

    /// From the end of the line at `start`, which cuts a string, to the end of the string's last line: the next one
    /// with a quote, unless a line before it looks like soloist's configuration. Then most likely only the quote is
    /// missing.
    pub(super) fn cut(&self, start: usize) -> Range<usize> {
        let rest = self.text.get(start..).unwrap_or_default();
        let mut lines = rest.split_inclusive('\n');
        let from = start
            + lines
                .next()
                .map_or(0, |line| line.trim_end_matches('\n').len());
        let mut end = from;
        for line in lines.take_while(|line| !is_ours(line)) {
            end += line.len();
            if line.contains(['"', '\'']) {
                break;
            }
        }
        from..end
    }
}

fn collect(table: &DeTable<'_>, path: &mut Vec<String>, values: &mut Vec<(Range<usize>, bool)>) {
    for (name, node) in table {
        if let DeValue::Table(inner) = node.get_ref() {
            path.push(name.get_ref().to_string());
            collect(inner, path, values);
            path.pop();
        } else {
            let open = keys::quotable(path).is_some_and(|all| all.contains(&&**name.get_ref()));
            values.push((name.span().start..node.span().end, open));
        }
    }
}

fn without_comment(line: &str) -> &str {
    line.split(" #").next().unwrap_or_default().trim_end()
}

/// A message with the secrets of URLs masked: it may name a value of the file, which may be in the wrong place.
pub(super) fn message(message: &str) -> String {
    message.split_inclusive('\n').map(masked).collect()
}

/// A line without the secrets of its URLs, and of `x:y@z` without blanks.
fn masked(line: &str) -> String {
    if let Some(at) = line.find("://").map(|at| at + 3) {
        let (before, url) = line.split_at(at);
        // A password may contain the quote that would end the string, so the last `@` belongs to the URL.
        let end = url.rfind('@').filter(|_| !url.contains(['?', '\\']));
        let odd_port = |part: &str| !part.starts_with(|c: char| c.is_ascii_digit());
        return match end {
            Some(end) => format!("{before}***{}", &url[end..]),
            None if url.contains(['@', '?', '\\']) || url.split(':').skip(1).any(odd_port) => {
                format!("{before}***")
            }
            None => line.to_owned(),
        };
    }
    let pieces = line.split_inclusive(|c: char| c.is_whitespace() || "\"'`".contains(c));
    let masked = |piece: &str| match piece
        .rfind('@')
        .and_then(|at| Some((piece[..at].find(':')?, at)))
    {
        Some((colon, at)) => format!("{}***{}", &piece[..=colon], &piece[at..]),
        None => piece.to_owned(),
    };
    pieces.map(masked).collect()
}

/// The bare key at the beginning of a text.
fn name_at(text: &str) -> &str {
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'));
    &text[..end.unwrap_or(text.len())]
}

/// The key of soloist's at the begin of a text, whose value may be a list.
pub(super) fn key_of(text: &str) -> Option<&str> {
    let key = name_at(text.trim_start_matches([' ', '\t']));
    let line = text.lines().next().unwrap_or_default();
    Some(key).filter(|key| keys::is_known(key) && line.contains('['))
}

/// Whether the line is the header of a table, or begins with one of soloist's keys.
fn is_ours(line: &str) -> bool {
    let line = line.trim();
    let end = line.find(|c: char| !(c.is_ascii_lowercase() || c == '_'));
    let (word, rest) = line.split_at(end.unwrap_or(line.len()));
    let header = line
        .strip_prefix('[')
        .and_then(|l| l.split(['.', ']']).next());
    header.is_some_and(|table| {
        ["store", "limits", "http", "notify", "defaults", "jobs"].contains(&table)
    }) || rest.trim_start().starts_with(['=', '.']) && keys::is_known(word)
}
