//! `${NAME}` and `${NAME:-default}` in the strings of `[store]`, `[http]` and `[notify]`.

use std::ops::Range;

/// An expansion that failed: its place in the text, and the reason.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Error {
    pub span: Range<usize>,
    pub message: String,
    pub hint: String,
}

/// The text with every `${NAME}` replaced by its value in `env`; as in a shell, the default of `${NAME:-default}` also
/// replaces an empty value. `$${` is a literal `${`; inserted values are not expanded again.
///
/// # Errors
/// All unset variables without a default, and each `${` that starts no variable.
pub(super) fn expand(
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<String, Vec<Error>> {
    let mut out = String::with_capacity(text.len());
    let mut errors = Vec::new();
    let mut from = 0;
    while let Some(at) = text[from..].find("${").map(|n| from + n) {
        if text[from..at].ends_with('$') {
            out.push_str(&text[from..at]);
            out.push('{');
            from = at + 2;
            continue;
        }
        out.push_str(&text[from..at]);
        let Some(end) = text[at..].find('}').map(|n| at + n) else {
            errors.push(Error {
                span: at..at + 2,
                message: "`${` without `}`".into(),
                hint: "write `${NAME}`, or `$${` for the characters themselves".into(),
            });
            break;
        };
        let inner = &text[at + 2..end];
        let (name, default) = match inner.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (inner, None),
        };
        let good = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
            && name.bytes().next().is_some_and(|b| !b.is_ascii_digit());
        if !good {
            errors.push(Error {
                span: at..end + 1,
                message: "not the name of an environment variable".into(),
                hint: "letters, digits and `_`: `${NAME}` or `${NAME:-default}`".into(),
            });
        } else {
            match (env(name), default) {
                (Some(value), Some(default)) if value.is_empty() => out.push_str(default),
                (Some(value), _) => out.push_str(&value),
                (None, Some(default)) => out.push_str(default),
                (None, None) => errors.push(Error {
                    span: at..end + 1,
                    message: format!("the environment variable `{name}` is not set"),
                    hint: format!("set it, or give a default: `${{{name}:-default}}`"),
                }),
            }
        }
        from = end + 1;
    }
    out.push_str(&text[from.min(text.len())..]);
    if errors.is_empty() {
        Ok(out)
    } else {
        Err(errors)
    }
}
