//! The file of tokens: who may read or operate over HTTP. It has only the hashes of the tokens.

use std::fmt;

use super::file::unmarked;

/// What a token allows; each role includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) enum Role {
    Read,
    Operate,
}

#[cfg(feature = "http")]
impl Role {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
        }
    }
}

impl std::str::FromStr for Role {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "read" => Ok(Self::Read),
            "operate" => Ok(Self::Operate),
            _ => Err("the role must be `read` or `operate`".to_owned()),
        }
    }
}

/// One line of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) sha256: [u8; 32],
}

/// A line that is not understood. The message shows none of it: it may have a token in it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    line: usize,
    why: String,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.why)
    }
}

/// The names of tokens, as those of instances.
pub(crate) fn name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
    if text.is_empty() || text.len() > 100 || !text.chars().all(fits) {
        return Err(
            "the name must have letters, digits, `-`, `_`, `.` and `@`, at most 100 of them"
                .to_owned(),
        );
    }
    Ok(text.to_owned())
}

/// Reads lines `NAME ROLE sha256:HEX`; empty ones and those that begin with `#` are skipped.
///
/// # Errors
/// The first line that is not understood.
pub(crate) fn parse(text: &str) -> Result<Vec<Token>, Wrong> {
    let mut all: Vec<Token> = vec![];
    for (at, line) in unmarked(text).lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let token = one(line).and_then(|token| match all.iter().any(|t| t.name == token.name) {
            true => Err("an earlier line has the same name".to_owned()),
            false => Ok(token),
        });
        all.push(token.map_err(|why| Wrong { line: at + 1, why })?);
    }
    Ok(all)
}

fn one(line: &str) -> Result<Token, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [text, role, hash] = words[..] else {
        return Err("not `NAME ROLE sha256:HEX`".to_owned());
    };
    let hex = hash
        .strip_prefix("sha256:")
        .ok_or("the third word must begin with `sha256:`")?;
    Ok(Token {
        name: name(text)?,
        role: role.parse()?,
        sha256: unhex(hex).ok_or("`sha256:` must be followed by 64 hexadecimal digits")?,
    })
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> = text
        .chars()
        .map(|c| c.to_digit(16).map(|d| d as u8))
        .collect::<Option<_>>()?;
    let (pairs, []) = digits.as_chunks::<2>() else {
        return None;
    };
    let bytes: Vec<u8> = pairs.iter().map(|[high, low]| high << 4 | low).collect();
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_name_a_role_and_a_hash() {
        let hash = "0f".repeat(32);
        let text = format!(
            "\u{feff}# who\n\nann operate sha256:{hash}\n  bob\tread sha256:{}\n",
            hash.to_uppercase()
        );
        let all = parse(&text).expect("sound");
        let said: Vec<_> = all
            .iter()
            .map(|t| (t.name.as_str(), t.role, t.sha256))
            .collect();
        assert_eq!(
            said,
            [
                ("ann", Role::Operate, [15; 32]),
                ("bob", Role::Read, [15; 32])
            ]
        );
        for (line, why) in [
            ("hunter2", "not `NAME"),
            ("ann admin sha256:00", "the role"),
            ("ann read md5:00", "the third word"),
            ("ann read sha256:00", "64 hex"),
            (&format!("ann read sha256:{}zz", "00".repeat(31)), "64 hex"),
            (&format!("a/b read sha256:{hash}"), "the name"),
            (
                &format!("ann read sha256:{hash}\nann read sha256:{hash}"),
                "same name",
            ),
        ] {
            let e = parse(&format!("# x\n{line}")).unwrap_err().to_string();
            assert!(
                e.contains(why) && e.starts_with("line ") && !e.contains("hunter2"),
                "{line}: {e}"
            );
        }
    }
}
