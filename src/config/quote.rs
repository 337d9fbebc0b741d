//! What a report may quote of the file: headers, keys, and values of keys that hold no secret. Everything else is
//! replaced by `*`: a file with an error may have a secret at any place, in any form.

use std::{collections::HashSet, iter, ops::Range};

use super::keys;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// The text with all that a report may not quote replaced by `*`, byte for byte, so that positions do not change; and
/// the lines that most likely belong to a string that began in an earlier line and was cut there. Works on any text,
/// even if it is not TOML.
///
/// Quoted are headers of soloist's tables, its keys, and the values of those keys that hold no secret (see
/// [`keys::quotable`]), unless the value names or looks like one. Never quoted are comments, and strings with escapes
/// or of several lines, also if a newline cuts a string that may have only one.
pub(super) fn masked(text: &str) -> (String, Vec<Range<usize>>) {
    let mut bytes = text.as_bytes().to_vec();
    fill(&mut bytes, 0..text.len());
    let (parsed, errors) = DeTable::parse_recoverable(text);
    // Of a text that is not TOML nobody knows what a line belongs to.
    let tree = errors.is_empty().then(|| parsed.get_ref());
    let lists = tree.map_or_else(Vec::new, |tree| lines_of_lists(text, tree));
    let mut lists = lists.iter().peekable();
    let inline = tree.map_or_else(HashSet::new, |tree| lines_of_inline_tables(text, tree));
    let mut table = Vec::new();
    for line in spans_of_lines(text) {
        while lists.next_if(|start| **start < line.start).is_some() {}
        let part = &text[line.clone()];
        let blank = part.len() - part.trim_start_matches([' ', '\t']).len();
        let shown = if let Some(path) = header(part) {
            table = path;
            shown_of_header(part, &table)
        } else {
            let key = shown_of_key(part, &table, tree.is_some());
            let element = lists.peek() == Some(&&line.start);
            match key {
                // More than the element may be in its line.
                0 if element && !betrays(part, &[]) => part.len(),
                _ if inline.contains(&line.start) => part.len(),
                key => key,
            }
        };
        let shown = line.start..line.start + shown.max(blank);
        bytes[shown.clone()].copy_from_slice(&text.as_bytes()[shown]);
    }
    mask_values(parsed.get_ref(), &mut Vec::new(), &mut bytes);
    let cut = mask_strings_and_comments(text, &mut bytes);
    // Whole characters are replaced by ASCII, so this cannot fail.
    (String::from_utf8(bytes).unwrap_or_default(), cut)
}

/// A message with the secrets of URLs masked: it may name a value of the file, which may be in the wrong place.
pub(super) fn message(message: &str) -> String {
    let mut bytes = message.as_bytes().to_vec();
    for line in spans_of_lines(message) {
        mask_user_info(message, line.clone(), &mut bytes);
        mask_query(message, line, &mut bytes);
    }
    String::from_utf8(bytes).unwrap_or_default()
}

/// The path of the table whose header a line is.
fn header(line: &str) -> Option<Vec<String>> {
    if !line.trim_start_matches([' ', '\t']).starts_with('[') {
        return None;
    }
    let (parsed, errors) = DeTable::parse_recoverable(line);
    let mut path = Vec::new();
    let mut table = parsed.get_ref();
    while let Some((name, node)) = table.iter().next() {
        path.push(name.get_ref().to_string());
        match node.get_ref() {
            DeValue::Table(inner) => table = inner,
            // A header of `[[…]]`, which no table of soloist has.
            _ => return Some(Vec::new()),
        }
    }
    (errors.is_empty() && !path.is_empty()).then_some(path)
}

/// How much of a header is quoted.
fn shown_of_header(line: &str, table: &[String]) -> usize {
    let ours = match table {
        [jobs] if jobs == "jobs" => true,
        [above @ .., name] if name == "env" => keys::quotable(above).is_some(),
        table => keys::quotable(table).is_some(),
    };
    let end = line.rfind(']').map_or(0, |end| end + 1);
    if ours && !line[..end].contains([':', '@', '\\']) {
        end
    } else {
        0
    }
}

/// How much of a line below the header of `table` is quoted: its key, and its value. In a text that is not TOML only
/// known keys are: another word may belong to a string.
fn shown_of_key(line: &str, table: &[String], is_toml: bool) -> usize {
    let trimmed = line.trim_start_matches([' ', '\t']);
    let word = name_at(trimmed);
    let rest = trimmed[word.len()..].trim_start_matches([' ', '\t']);
    if !(is_toml || keys::is_known(word)) || !rest.starts_with(['=', '.']) {
        return 0;
    }
    let value = rest.trim_start_matches(['=', ' ', '\t']);
    let key = line.len() - value.trim_start_matches('.').len();
    let (name, value) = trimmed.split_once('=').unwrap_or((trimmed, ""));
    let mut path = table.to_vec();
    path.extend(name.split('.').map(|name| name.trim().to_owned()));
    let inner = keys::quotable(&path).unwrap_or_default();
    let quotable = path.pop().is_some_and(|name| {
        keys::quotable(&path).is_some_and(|names| names.contains(&name.as_str()))
    });
    if quotable && !betrays(value, &inner) {
        line.len()
    } else {
        key
    }
}

/// The bare key at the beginning of a text.
fn name_at(text: &str) -> &str {
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'));
    &text[..end.unwrap_or(text.len())]
}

/// Whether a value may have a secret: a URL, an escape, a word that names one, or a key which is none of `names`.
fn betrays(value: &str, names: &[&str]) -> bool {
    // `@daily` is a schedule.
    let address =
        |(at, _)| value[..at].ends_with(|c: char| !c.is_whitespace() && !"'\"".contains(c));
    if value.contains('\\') || value.contains("://") || value.match_indices('@').any(address) {
        return true;
    }
    let mut rest = value;
    while let Some(at) = rest.find(|c: char| c.is_ascii_alphanumeric() || c == '_') {
        let word = name_at(&rest[at..]);
        rest = &rest[at + word.len()..];
        let assigns = rest
            .trim_start_matches(['"', '\'', ' ', '\t'])
            .starts_with(['=', ':']);
        let known = assigns && names.contains(&word);
        if !known && (assigns && !is_number(word) || names_secret(word)) {
            return true;
        }
    }
    false
}

/// What may stand before a colon in a time: digits, or a date with its hour.
fn is_number(word: &str) -> bool {
    let date = |(i, b): (usize, u8)| match i {
        4 | 7 => b == b'-',
        10 => b == b'T',
        _ => b.is_ascii_digit(),
    };
    word.bytes().all(|b| b.is_ascii_digit())
        || word.len() == 13 && word.bytes().enumerate().all(date)
}

/// Whether a word names a secret. Short names count as words alone: `api-key`, `apiKey` and `API_KEY1` do, and
/// `monkey-backup` and `author` do not.
fn names_secret(word: &str) -> bool {
    const ANYWHERE: [&str; 10] = [
        "password",
        "passwd",
        "passphrase",
        "sshpass",
        "pgpass",
        "secret",
        "token",
        "credential",
        "apikey",
        "privkey",
    ];
    const ALONE: [&str; 8] = ["pass", "pw", "pwd", "cred", "creds", "auth", "key", "keys"];
    let mut apart = String::with_capacity(word.len() + 4);
    let mut before = ' ';
    for c in word.chars() {
        if c.is_ascii_uppercase() && before.is_ascii_lowercase() {
            apart.push('_');
        }
        apart.push(c.to_ascii_lowercase());
        before = c;
    }
    let alone = |part: &str| ALONE.contains(&part.trim_end_matches(|c: char| c.is_ascii_digit()));
    ANYWHERE
        .iter()
        .any(|secret| apart.replace('_', "").contains(secret))
        || apart.split(['_', '-']).any(alone)
}

/// Where the lines begin that have only elements of lists which are quoted.
fn lines_of_lists(text: &str, tree: &DeTable<'_>) -> Vec<usize> {
    let mut elements = Vec::new();
    collect_elements(text, tree, &mut Vec::new(), &mut elements);
    let starts: Vec<usize> = spans_of_lines(text).map(|line| line.start).collect();
    let mut lines: Vec<usize> = elements
        .into_iter()
        .filter(|span| !text[span.clone()].contains('\n'))
        .map(|span| starts[starts.partition_point(|start| *start <= span.start) - 1])
        .collect();
    lines.sort_unstable();
    lines.dedup();
    lines
}

/// Where the lines begin that have an inline table of soloist, as `retry = { attempts = 3 }`, in which the values of
/// all known keys may be quoted. Those of other keys are masked one by one.
fn lines_of_inline_tables(text: &str, tree: &DeTable<'_>) -> HashSet<usize> {
    let mut tables = Vec::new();
    collect_inline_tables(text, tree, &mut Vec::new(), &mut tables);
    let begin = |span: Range<usize>| text[..span.start].rfind('\n').map_or(0, |n| n + 1);
    tables.into_iter().map(begin).collect()
}

fn collect_inline_tables(
    text: &str,
    table: &DeTable<'_>,
    path: &mut Vec<String>,
    tables: &mut Vec<Range<usize>>,
) {
    for (name, node) in table {
        let DeValue::Table(inner) = node.get_ref() else {
            continue;
        };
        // A whole job in a line is not quoted.
        let of_table = keys::quotable(path).is_some_and(|names| names.contains(&&**name.get_ref()));
        path.push(name.get_ref().to_string());
        let written = &text[node.span()];
        match keys::quotable(path) {
            Some(names) if of_table && written.starts_with('{') && !written.contains('\n') => {
                let may = |(key, value): (&Spanned<_>, &Spanned<DeValue<'_>>)| {
                    let key = &text[key.span()];
                    let bare = name_at(key) == key;
                    bare && (!names.contains(&key) || !betrays(&text[value.span()], &[]))
                };
                if inner.iter().all(may) {
                    tables.push(node.span());
                }
            }
            _ => collect_inline_tables(text, inner, path, tables),
        }
        path.pop();
    }
}

/// The elements of those lists below `table` that are quoted. A list is quoted as a whole, or not at all: one element
/// may name the secret that follows in the next line.
fn collect_elements(
    text: &str,
    table: &DeTable<'_>,
    path: &mut Vec<String>,
    elements: &mut Vec<Range<usize>>,
) {
    for (name, node) in table {
        let quotable = keys::quotable(path).is_some_and(|names| names.contains(&&**name.get_ref()));
        path.push(name.get_ref().to_string());
        match node.get_ref() {
            DeValue::Table(inner) => collect_elements(text, inner, path, elements),
            DeValue::Array(items) if quotable && !betrays(&text[node.span()], &[]) => {
                elements.extend(items.iter().map(Spanned::span));
            }
            _ => {}
        }
        path.pop();
    }
}

/// Masks all values of keys that may hold a secret. Lines do not show whose keys they are: they may belong to an inline
/// table, or to a string that has what looks like a header.
fn mask_values(table: &DeTable<'_>, path: &mut Vec<String>, bytes: &mut [u8]) {
    for (name, node) in table {
        if let DeValue::Table(inner) = node.get_ref() {
            path.push(name.get_ref().to_string());
            mask_values(inner, path, bytes);
            path.pop();
        } else if !keys::quotable(path).is_some_and(|names| names.contains(&&**name.get_ref())) {
            fill(bytes, node.span());
        }
    }
}

fn spans_of_lines(text: &str) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    text.split_inclusive('\n').map(move |line| {
        let span = start..start + line.len();
        start = span.end;
        span
    })
}

/// Masks comments, strings of several lines, and strings with escapes. Returns the further lines of the strings that a
/// newline cuts.
fn mask_strings_and_comments(text: &str, bytes: &mut [u8]) -> Vec<Range<usize>> {
    let mut cut = Vec::new();
    let mut from = 0;
    while let Some(n) = text[from..].find(['"', '\'', '#']) {
        let rest = &text[from + n..];
        from += n;
        if rest.starts_with('#') {
            let end = from + rest.find('\n').unwrap_or(rest.len());
            fill(bytes, from + 1..end);
            from = end;
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
    header.is_some_and(|table| ["store", "limits", "http", "defaults", "jobs"].contains(&table))
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
