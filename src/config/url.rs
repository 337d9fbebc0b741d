//! The store's URL: which store it names, what is wrong with it, and how to show it without its password.

use std::{fmt, ops::Range, time::Duration};

use super::{StoreUrl, nearest};

/// The store that a URL names, as far as the configuration needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The path after `sqlite:`.
    Sqlite,
    Redis {
        tls: bool,
        user: bool,
        password: bool,
    },
    Memory,
}

/// A problem with a URL. Its texts repeat no part of the URL except a known scheme, because every part may come from a
/// secret.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Error {
    pub span: Range<usize>,
    pub message: String,
    pub hint: Option<String>,
}

impl super::Store {
    /// The store that a URL names, with the defaults of `[store]`. A relative path of a SQLite file starts at the
    /// working directory.
    ///
    /// # Errors
    /// The problem with the URL, and a hint. They repeat no part of the URL except a known scheme.
    pub fn from_url(text: &str) -> Result<Self, String> {
        let wrong = |e: Error| match e.hint {
            Some(hint) => format!("{}; {hint}", e.message),
            None => e.message,
        };
        Ok(Self::of(match parse(text).map_err(wrong)? {
            Kind::Sqlite => {
                let path = text.strip_prefix("sqlite:").unwrap_or(text);
                StoreUrl::Sqlite(std::path::absolute(path).map_err(|e| {
                    format!("there is no working directory ({e}); give an absolute path")
                })?)
            }
            Kind::Redis { .. } => StoreUrl::Redis(super::Secret::new(text)),
            Kind::Memory => StoreUrl::Memory,
        }))
    }

    /// A store with the defaults of `[store]`.
    pub(crate) fn of(url: StoreUrl) -> Self {
        Self {
            url,
            namespace: "soloist".to_owned(),
            username: None,
            password: None,
            tls: None,
            timeout: TIMEOUT,
            pool_size: 8,
            min_replicas: 0,
            retry: super::StoreRetry::default(),
        }
    }
}

/// The default of `timeout`.
pub(super) const TIMEOUT: Duration = Duration::from_millis(500);

const SCHEMES: [&str; 7] = [
    "sqlite",
    "redis",
    "rediss",
    "redis+unix",
    "redis+sentinel",
    "redis+cluster",
    "memory",
];
const FORMS: &str = "use `sqlite:PATH`, `redis://HOST:PORT/DB`, `rediss://HOST:PORT/DB` (TLS) or `redis+unix:///PATH`";

// Long: one check after the other, each with its own message.
pub(super) fn parse(text: &str) -> Result<Kind, Error> {
    let whole = 0..text.len();
    let fail = |span: Range<usize>, message: &str, hint: &str| {
        Err(Error {
            span,
            message: message.into(),
            hint: Some(hint.into()),
        })
    };
    let scheme_like = |s: &&str| {
        s.len() <= 32
            && s.bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"+.-".contains(&b))
    };
    let Some((scheme, rest)) = text
        .split_once(':')
        .filter(|(scheme, _)| !scheme.is_empty() && scheme_like(scheme))
    else {
        return fail(whole, "a store URL starts with its kind and a colon", FORMS);
    };
    let scheme_span = 0..scheme.len();
    let authority = || match rest.strip_prefix("//") {
        Some(after) => Ok((after, scheme.len() + 3)),
        None => Err(Error {
            span: whole.clone(),
            message: format!("`{scheme}:` must be followed by `//`"),
            hint: Some(FORMS.into()),
        }),
    };
    match scheme {
        "sqlite" if rest.is_empty() => fail(
            whole,
            "the path of the SQLite file is missing",
            "write `sqlite:soloist.db`",
        ),
        "sqlite" if rest.starts_with("//") => fail(
            whole,
            "`sqlite:` is followed by a path, without `//`",
            "write `sqlite:soloist.db` or `sqlite:/var/lib/soloist/soloist.db`",
        ),
        "sqlite" if rest == ":memory:" => fail(
            whole,
            "several instances cannot share `:memory:`",
            "name a file: `sqlite:soloist.db`",
        ),
        "sqlite" if rest.contains('\0') => {
            fail(whole, "a path cannot contain a NUL character", FORMS)
        }
        "sqlite" => Ok(Kind::Sqlite),
        "memory" if rest.is_empty() => Ok(Kind::Memory),
        "memory" => fail(whole, "nothing may follow `memory:`", "write `memory:`"),
        "redis" | "rediss" => {
            let (rest, at) = authority()?;
            let (user, password) = tcp(rest, at)?;
            Ok(Kind::Redis {
                tls: scheme == "rediss",
                user,
                password,
            })
        }
        "redis+unix" => {
            let (rest, at) = authority()?;
            let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
            if !path.starts_with('/') || path.len() < 2 {
                return fail(
                    whole,
                    "`redis+unix://` is followed by the absolute path of a socket",
                    "write `redis+unix:///run/redis/redis.sock`",
                );
            }
            no_blanks(rest, at)?;
            no_fragment(rest, at)?;
            // A misspelt `?` would make a password a part of the path, which is shown.
            if let Some(n) = path.find([':', ';', ',', '&', '=']) {
                return fail(
                    at + n..at + n + 1,
                    "this character must be percent-encoded in the path of a socket",
                    "`:` is `%3A`, `;` is `%3B`, `,` is `%2C`, `&` is `%26`, `=` is `%3D`; parameters begin with `?`",
                );
            }
            parameters(query, at + path.len() + 1, &["db", "user", "pass"])?;
            let has = |name: &str| query.split('&').any(|p| p.split('=').next() == Some(name));
            Ok(Kind::Redis {
                tls: false,
                user: has("user"),
                password: has("pass"),
            })
        }
        "redis+sentinel" => fail(
            scheme_span,
            "this version does not support Redis Sentinel yet",
            "name one Redis server: `redis://HOST:6379/0`",
        ),
        "redis+cluster" => fail(
            scheme_span,
            "this version does not support Redis Cluster yet",
            "name one Redis server: `redis://HOST:6379/0`",
        ),
        _ => {
            let known = match scheme.to_ascii_lowercase().as_str() {
                "valkey" | "tcp" => Some("redis"),
                "valkeys" | "tls" => Some("rediss"),
                "unix" => Some("redis+unix"),
                "file" | "sqlite3" => Some("sqlite"),
                _ => nearest(scheme, SCHEMES),
            };
            let hint = known.map_or(FORMS.into(), |known| format!("did you mean `{known}:`?"));
            fail(scheme_span, "unknown kind of store", &hint)
        }
    }
}

/// `[USER[:PASSWORD]@]HOST[:PORT][/DB]`: returns whether it has a user and a password. `at` is the position of `rest`.
// Long: one check after the other, each with its own message.
fn tcp(rest: &str, at: usize) -> Result<(bool, bool), Error> {
    let fail = |span: Range<usize>, message: String, hint: &str| {
        Err(Error {
            span: at + span.start..at + span.end,
            message,
            hint: Some(hint.into()),
        })
    };
    no_blanks(rest, at)?;
    let host_at = rest.rfind('@').map_or(0, |n| n + 1);
    let info = &rest[..host_at.saturating_sub(1)];
    if let Some(n) = info.find(['/', '?', '#', '@']) {
        return fail(
            n..n + 1,
            "this character must be percent-encoded in a user name or password".into(),
            "`/` is `%2F`, `@` is `%40`, `#` is `%23`, `?` is `%3F`; or use `password_file`",
        );
    }
    let (user, password) = info.split_once(':').unwrap_or((info, ""));
    let host = &rest[host_at..];
    let end = host.find(['/', '?', '#']).unwrap_or(host.len());
    let (place, tail) = host.split_at(end);
    let (name, port) = match place.strip_prefix('[') {
        Some(inner) => match inner.split_once(']') {
            Some((v6, after))
                if v6.parse::<std::net::Ipv6Addr>().is_ok()
                    && (after.is_empty() || after.starts_with(':')) =>
            {
                (v6, after.strip_prefix(':'))
            }
            _ => {
                return fail(
                    host_at..host_at + end,
                    "not an IPv6 address".into(),
                    "write `[::1]:6379`",
                );
            }
        },
        None => match place.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (place, None),
        },
    };
    if name.is_empty() {
        return fail(
            0..rest.len(),
            "the host is missing".into(),
            "write `redis://HOST:6379/0`; an IPv6 address needs brackets",
        );
    }
    if name.contains(',') {
        return fail(
            host_at..host_at + end,
            "name one host only: this version does not support several masters yet".into(),
            "name one Redis server",
        );
    }
    if !name.contains(':') && !plain(name) {
        return fail(
            host_at..host_at + name.len(),
            "not the name of a host".into(),
            "it has letters, digits, `-`, `_` and `.`",
        );
    }
    if let Some(port) = port
        && port
            .parse::<u16>()
            .is_ok_and(|p| p > 0)
            .then_some(())
            .is_none()
    {
        let start = host_at + end - port.len();
        return fail(
            start..host_at + end,
            "the port must be a number from 1 to 65535".into(),
            "Redis listens on 6379 by default; an IPv6 address needs brackets: `[::1]:6379`",
        );
    }
    let tail_at = host_at + end;
    no_fragment(tail, at + tail_at)?;
    let (path, query) = tail.split_once('?').unwrap_or((tail, ""));
    let db = path.strip_prefix('/').unwrap_or(path);
    if !db.is_empty() && db.parse::<u16>().is_err() {
        return fail(
            tail_at + 1..tail_at + path.len(),
            "the database must be a number".into(),
            "write `redis://HOST:6379/0`",
        );
    }
    parameters(query, at + tail_at + path.len() + 1, &["protocol"])?;
    Ok((!user.is_empty(), !password.is_empty()))
}

/// `at` is the position of `part`, as below.
fn no_blanks(part: &str, at: usize) -> Result<(), Error> {
    let blank = |(_, c): &(usize, char)| c.is_whitespace() || c.is_control();
    part.char_indices().find(blank).map_or(Ok(()), |(n, c)| {
        Err(Error {
            span: at + n..at + n + c.len_utf8(),
            message: "a URL cannot contain blanks".into(),
            hint: Some("percent-encode it, a blank is `%20`".into()),
        })
    })
}

fn no_fragment(part: &str, at: usize) -> Result<(), Error> {
    part.find('#').map_or(Ok(()), |n| {
        Err(Error {
            span: at + n..at + part.len(),
            message: "a store URL has no `#` part".into(),
            hint: Some("remove it; in a password it is `%23`".into()),
        })
    })
}

fn parameters(query: &str, at: usize, known: &[&str]) -> Result<(), Error> {
    let mut from = 0;
    for parameter in query.split('&').filter(|_| !query.is_empty()) {
        let name = parameter.split('=').next().unwrap_or_default();
        if !known.contains(&name) {
            let hint = nearest(name, known.iter().copied()).map_or_else(
                || format!("known parameters: {}", known.join(", ")),
                |n| format!("did you mean `{n}`?"),
            );
            // Do not repeat the name: after a stray `?` it is a piece of a password.
            let span = at + from..at + from + name.len();
            return Err(Error {
                span,
                message: "unknown URL parameter".into(),
                hint: Some(hint),
            });
        }
        from += parameter.len() + 1;
    }
    Ok(())
}

/// The URL as written, with `***` in place of possible secrets.
impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Redis(url) => f.write_str(&shown(url.expose())),
            Self::Memory => f.write_str("memory:"),
        }
    }
}

/// Like [`fmt::Display`]: a password never gets into a log.
impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

/// The one function that makes a Redis URL safe to show. It does not remove secrets: it joins the parts that are known
/// not to be secret. Of a URL that is not valid no part is known.
fn shown(url: &str) -> String {
    let (Ok(Kind::Redis { .. }), Some((scheme, rest))) = (parse(url), url.split_once("://")) else {
        return "***".to_owned();
    };
    let mut out = format!("{scheme}://");
    let rest = match rest.rfind('@') {
        Some(at) if scheme != "redis+unix" => {
            // A user name without a password is most likely a password.
            match rest[..at].split_once(':') {
                Some((user, password)) if !password.is_empty() => {
                    out.push_str(&format!("{}:***", user_shown(user)));
                }
                _ => out.push_str("***"),
            }
            &rest[at..]
        }
        _ => rest,
    };
    let end = rest.find('?').unwrap_or(rest.len());
    out.push_str(&rest[..end]);
    let query = rest[end..].strip_prefix('?').unwrap_or_default();
    let has_password = query.split('&').any(|p| p.starts_with("pass="));
    for (n, parameter) in query.split('&').filter(|_| !query.is_empty()).enumerate() {
        out.push(if n == 0 { '?' } else { '&' });
        match parameter.split_once('=') {
            Some(("db", value)) if value.parse::<u16>().is_ok() => out.push_str(parameter),
            Some(("protocol", "2" | "3" | "resp2" | "resp3")) => out.push_str(parameter),
            Some(("user", user)) if has_password => {
                out.push_str(&format!("user={}", user_shown(user)))
            }
            Some((name @ ("db" | "protocol" | "user" | "pass"), _)) => {
                out.push_str(&format!("{name}=***"))
            }
            _ => out.push_str("***"),
        }
    }
    out
}

/// With other characters it may be a password in the wrong place.
fn user_shown(user: &str) -> &str {
    if plain(user) { user } else { "***" }
}

fn plain(text: &str) -> bool {
    text.bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_urls_are_taken_apart() {
        let redis = |tls, user, password| {
            Ok(Kind::Redis {
                tls,
                user,
                password,
            })
        };
        let cases = [
            ("sqlite:soloist.db", Ok(Kind::Sqlite)),
            ("sqlite:/var/lib/soloist.db", Ok(Kind::Sqlite)),
            ("memory:", Ok(Kind::Memory)),
            ("redis://host", redis(false, false, false)),
            ("redis://host:6379/0", redis(false, false, false)),
            ("redis://:pw@host/", redis(false, false, true)),
            (
                "redis://me:p%40w@[::1]:6379/3?protocol=resp3",
                redis(false, true, true),
            ),
            ("rediss://me@host", redis(true, true, false)),
            ("redis+unix:///run/redis.sock", redis(false, false, false)),
            (
                "redis+unix:///run/redis.sock?db=1&user=me&pass=pw",
                redis(false, true, true),
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text), expected, "{text}");
        }
    }

    #[test]
    fn a_url_alone_is_a_store_with_the_defaults_of_the_file() {
        let file = crate::config::parse("", std::path::Path::new("/nowhere/jobs.toml"), &|_| None)
            .unwrap();
        let store = crate::config::Store::from_url("sqlite:/nowhere/soloist.db").unwrap();
        assert_eq!(format!("{store:?}"), format!("{:?}", file.store));
        let e = crate::config::Store::from_url("reds://h").unwrap_err();
        assert_eq!(e, "unknown kind of store; did you mean `redis:`?");
    }

    #[test]
    fn wrong_store_urls_say_where_and_why() {
        let cases = [
            ("", "", "a store URL starts with its kind and a colon"),
            (
                "localhost",
                "localhost",
                "a store URL starts with its kind and a colon",
            ),
            ("reds://h", "reds", "unknown kind of store"),
            ("valkey://h", "valkey", "unknown kind of store"),
            ("redis:h", "redis:h", "`redis:` must be followed by `//`"),
            ("redis://", "", "the host is missing"),
            ("redis://:6379", ":6379", "the host is missing"),
            (
                "redis://h:70000/0",
                "70000",
                "the port must be a number from 1 to 65535",
            ),
            ("redis://::1", "::1", "the host is missing"),
            ("redis://[::1", "[::1", "not an IPv6 address"),
            ("redis://h/x", "x", "the database must be a number"),
            ("redis://h/0?db=1", "db", "unknown URL parameter"),
            (
                "redis://h/0#insecure",
                "#insecure",
                "a store URL has no `#` part",
            ),
            (
                "redis://u:p/w@h",
                "/",
                "this character must be percent-encoded in a user name or password",
            ),
            ("redis://u:p w@h", " ", "a URL cannot contain blanks"),
            (
                "redis://a,b/0",
                "a,b",
                "name one host only: this version does not support several masters yet",
            ),
            (
                "redis+sentinel://a,b/m/0",
                "redis+sentinel",
                "this version does not support Redis Sentinel yet",
            ),
            (
                "redis+cluster://a,b",
                "redis+cluster",
                "this version does not support Redis Cluster yet",
            ),
            (
                "redis+unix://run/redis.sock",
                "redis+unix://run/redis.sock",
                "`redis+unix://` is followed by the absolute path of a socket",
            ),
            (
                "redis+unix:///s.sock;pass=x",
                ";",
                "this character must be percent-encoded in the path of a socket",
            ),
            (
                "redis+unix:///s.sock&pass=x",
                "&",
                "this character must be percent-encoded in the path of a socket",
            ),
            (
                "redis+unix:///me:x@run/s.sock",
                ":",
                "this character must be percent-encoded in the path of a socket",
            ),
            ("redis+unix:///a b.sock", " ", "a URL cannot contain blanks"),
            (
                "redis+unix:///s?pass=a#b",
                "#b",
                "a store URL has no `#` part",
            ),
            (
                "redis://host;pass=x",
                "host;pass=x",
                "not the name of a host",
            ),
            (
                "redis+unix:///s?passwd=x",
                "passwd",
                "unknown URL parameter",
            ),
            (
                "sqlite:",
                "sqlite:",
                "the path of the SQLite file is missing",
            ),
            (
                "sqlite://x.db",
                "sqlite://x.db",
                "`sqlite:` is followed by a path, without `//`",
            ),
            (
                "sqlite::memory:",
                "sqlite::memory:",
                "several instances cannot share `:memory:`",
            ),
            ("memory:x", "memory:x", "nothing may follow `memory:`"),
        ];
        for (text, marked, message) in cases {
            let error = parse(text).expect_err(text);
            assert_eq!(
                (&text[error.span.clone()], error.message.as_str()),
                (marked, message),
                "{text}"
            );
            assert!(error.hint.is_some(), "{text}");
        }
        assert_eq!(
            parse("reds://h").unwrap_err().hint.unwrap(),
            "did you mean `redis:`?"
        );
    }

    #[test]
    fn no_form_of_a_url_shows_its_password() {
        let cases = [
            ("redis://:hunter2@host:6379/0", "redis://:***@host:6379/0"),
            ("redis://me:hunter2@host", "redis://me:***@host"),
            (
                "redis://me:hunter2@host?protocol=resp3",
                "redis://me:***@host?protocol=resp3",
            ),
            ("redis://me:hunter2@hunter2@host?protocol=resp3", "***"),
            ("redis://me:hunter2?@host", "***"),
            ("redis://host:hunter2", "***"),
            ("redis://host;pass=hunter2", "***"),
            ("redis+unix:///s;pass=hunter2", "***"),
            ("redis+unix:///s?pass=hunter2", "redis+unix:///s?pass=***"),
            (
                "redis+unix:///s?db=1&pass=hunter2&user=me",
                "redis+unix:///s?db=1&pass=***&user=me",
            ),
            ("redis://host", "redis://host"),
            ("rediss://hunter2@host:1/2", "rediss://***@host:1/2"),
            ("redis://a/hunter2:pw@host", "***"),
            ("redis+unix:///s?pass=hun@ter2", "redis+unix:///s?pass=***"),
            (
                "redis+unix:///s?db=1&pass=hun?ter2",
                "redis+unix:///s?db=1&pass=***",
            ),
            (
                "redis+unix:///s?pass=hunter2&user=a@b",
                "redis+unix:///s?pass=***&user=***",
            ),
            (
                "redis+unix:///s?user=hunter2&db=hun@ter2",
                "redis+unix:///s?user=***&db=***",
            ),
            ("redis+unix:///s?hunter2&pass=hun&ter2", "***"),
            ("redis+unix:///s?pass=hun#ter2", "***"),
            ("redis+unix:///run/a@b?db=1", "redis+unix:///run/a@b?db=1"),
            ("hunter2", "***"),
            ("hunter2://host", "***"),
        ];
        for (url, shown) in cases {
            let url = StoreUrl::Redis(crate::config::Secret::new(url));
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), format!("StoreUrl({shown})"));
        }
    }
}
