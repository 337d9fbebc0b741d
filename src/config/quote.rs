//! What a report may quote of the file: headers, keys, and the values of keys that hold no secret.

use std::ops::Range;

use super::keys;
use toml::de::{DeTable, DeValue};

/// What of a text may be quoted, whether it is TOML or not.
pub(super) struct Quotable<'t> {
    text: &'t str,
    is_toml: bool,
    /// The keys with their values, in the order of the text, and whether the value may be quoted.
    values: Vec<(Range<usize>, bool)>,
}

impl<'t> Quotable<'t> {
    pub(super) fn of(text: &'t str) -> Self {
        let (tree, errors) = DeTable::parse_recoverable(text);
        let is_toml = errors.is_empty();
        let mut values = Vec::new();
        if is_toml {
            collect(tree.get_ref(), &mut Vec::new(), &mut values);
            values.sort_by_key(|(span, _)| span.start);
        }
        Self {
            text,
            is_toml,
            values,
        }
    }

    /// What a report shows of a line: its keys and values if none can be a secret, or else its key. None: nothing.
    pub(super) fn line(&self, line: Range<usize>) -> Option<String> {
        let part = self.text.get(line.clone())?;
        let first = self
            .values
            .partition_point(|(span, _)| span.end <= line.start);
        let here = &self.values[first..];
        let here = &here[..here.partition_point(|(span, _)| span.start < line.end)];
        let word = part.trim_start_matches([' ', '\t']);
        match here {
            [(first, _), ..] if first.start < line.start => return None,
            [.., (last, _)] if last.end <= line.end && here.iter().all(|(_, open)| *open) => {
                // A comment may have anything.
                let (shown, rest) = part.split_at(last.end - line.start);
                let closing = rest.find(|c| !" \t}".contains(c)).unwrap_or(rest.len());
                return Some(part[..shown.len() + closing].trim_end().to_owned());
            }
            [] if self.is_toml && word.starts_with('[') => {
                let shown = part.split('#').next().unwrap_or_default();
                return Some(shown.trim_end().to_owned());
            }
            _ => {}
        }
        let end = word.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'));
        let key = &word[..end.unwrap_or(word.len())];
        // In a text that is not TOML another word may belong to a string.
        if key.is_empty() || !(self.is_toml || keys::is_known(key)) {
            return None;
        }
        let indent = &part[..part.len() - word.len()];
        Some(format!("{indent}{key} = ..."))
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
