//! The store's URL: which store it names, what is wrong with it, and how to show it without its password.

use std::{fmt, net::Ipv6Addr, time::Duration};

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
    pub message: String,
    pub hint: String,
}

impl super::Store {
    /// The store that a URL names, with the defaults of `[store]`. A relative path of a SQLite file starts at the
    /// working directory.
    ///
    /// # Errors
    /// The problem with the URL, and a hint. They repeat no part of the URL except a known scheme.
    pub fn from_url(text: &str) -> Result<Self, String> {
        let wrong = |e: Error| format!("{}; {}", e.message, e.hint);
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

const SCHEMES: [&str; 5] = ["sqlite", "redis", "rediss", "redis+unix", "memory"];
const FORMS: &str = "use `sqlite:PATH`, `redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, `rediss://…` (TLS) or \
                     `redis+unix:///PATH[?db=N&user=U&pass=P]`; percent-encode what is special in them, as `%2F` for `/`";

pub(super) fn parse(text: &str) -> Result<Kind, Error> {
    let (scheme, rest) = text.split_once(':').unwrap_or(("", text));
    let redis = |tls, of: fn(&str) -> Option<(bool, bool)>| {
        let rest = rest.strip_prefix("//")?;
        // Of a URL without these each part is known.
        let odd = |c: char| c.is_whitespace() || c.is_control() || c == '#';
        let (user, password) = of(rest).filter(|_| !rest.contains(odd))?;
        Some(Kind::Redis {
            tls,
            user,
            password,
        })
    };
    let kind = match scheme {
        "sqlite" => {
            let wrong = rest.is_empty() || rest.starts_with("//") || rest.contains('\0');
            // Several instances cannot share this one.
            (!wrong && rest != ":memory:").then_some(Kind::Sqlite)
        }
        "memory" => rest.is_empty().then_some(Kind::Memory),
        "redis" => redis(false, tcp),
        "rediss" => redis(true, tcp),
        "redis+unix" => redis(false, unix),
        _ => {
            let near = nearest(scheme, SCHEMES);
            return Err(Error {
                message: "unknown kind of store".into(),
                hint: near.map_or(FORMS.into(), |known| format!("did you mean `{known}:`?")),
            });
        }
    };
    kind.ok_or_else(|| Error {
        message: format!("not a valid URL of the kind `{scheme}:`"),
        hint: FORMS.into(),
    })
}

/// `[USER[:PASSWORD]@]HOST[:PORT][/DB][?protocol=P]`: whether it has a user and a password.
fn tcp(rest: &str) -> Option<(bool, bool)> {
    let (login, server) = rest.rsplit_once('@').unwrap_or(("", rest));
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    let (server, query) = server.split_once('?').unwrap_or((server, ""));
    let (place, db) = server.split_once('/').unwrap_or((server, ""));
    let (host, port) = match place.strip_prefix('[') {
        Some(inner) => {
            let (v6, port) = inner.split_once(']')?;
            v6.parse::<Ipv6Addr>().ok()?;
            ("v6", port)
        }
        None => place.split_at(place.find(':').unwrap_or(place.len())),
    };
    let is_port = |port: &str| {
        let port = port.strip_prefix(':').map(str::parse::<u16>);
        port.is_some_and(|port| port.is_ok_and(|port| port > 0))
    };
    let protocol = [
        "",
        "protocol=2",
        "protocol=3",
        "protocol=resp2",
        "protocol=resp3",
    ];
    let sound = !login.contains(['/', '?', '@'])
        && plain(host)
        && (port.is_empty() || is_port(port))
        && (db.is_empty() || db.parse::<u16>().is_ok())
        && protocol.contains(&query);
    sound.then_some((!user.is_empty(), !password.is_empty()))
}

/// `/PATH[?db=N&user=U&pass=P]`, the same.
fn unix(rest: &str) -> Option<(bool, bool)> {
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (mut user, mut password) = (false, false);
    for parameter in query.split('&').filter(|_| !query.is_empty()) {
        match parameter.split_once('=')? {
            ("db", db) => drop(db.parse::<u16>().ok()?),
            ("user", name) if plain(&name.replace('%', "")) => user = true,
            ("pass", text) => password = !text.is_empty(),
            _ => return None,
        }
    }
    // A misspelt `?` would make a password a part of the path, which is shown.
    let sound =
        path.starts_with('/') && path.len() > 1 && !path.contains([':', ';', ',', '&', '=']);
    sound.then_some((user, password))
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

/// The one function that makes a Redis URL safe to show. Of a URL that is not valid no part is known.
fn shown(url: &str) -> String {
    let (Ok(Kind::Redis { password, .. }), Some((scheme, rest))) =
        (parse(url), url.split_once("://"))
    else {
        return "***".to_owned();
    };
    // A user name without a password is most likely a password.
    let user = |name: &str| match password && plain(name) {
        true => name.to_owned(),
        false => "***".to_owned(),
    };
    if scheme == "redis+unix" {
        let Some((path, query)) = rest.split_once('?') else {
            return url.to_owned();
        };
        let parameter = |part: &str| match part.split_once('=') {
            Some(("user", name)) => format!("user={}", user(name)),
            Some(("pass", _)) => "pass=***".to_owned(),
            _ => part.to_owned(),
        };
        let query: Vec<String> = query.split('&').map(parameter).collect();
        return format!("{scheme}://{path}?{}", query.join("&"));
    }
    match rest.rsplit_once('@') {
        Some((login, server)) => match login.split_once(':').filter(|_| password) {
            Some(("", _)) => format!("{scheme}://:***@{server}"),
            Some((name, _)) => format!("{scheme}://{}:***@{server}", user(name)),
            None => format!("{scheme}://***@{server}"),
        },
        None => url.to_owned(),
    }
}

fn plain(text: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    !text.is_empty() && text.bytes().all(fits)
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
    fn wrong_store_urls_say_of_which_kind_they_are() {
        for (text, message) in [
            ("", "unknown kind of store"),
            ("localhost", "unknown kind of store"),
            ("reds://h", "unknown kind of store"),
            ("redis:h", "not a valid URL of the kind `redis:`"),
            ("redis://", "not a valid URL of the kind `redis:`"),
            ("redis://:6379", "not a valid URL of the kind `redis:`"),
            ("redis://h:70000/0", "not a valid URL of the kind `redis:`"),
            ("redis://h:0/0", "not a valid URL of the kind `redis:`"),
            ("redis://::1", "not a valid URL of the kind `redis:`"),
            ("redis://[::1", "not a valid URL of the kind `redis:`"),
            ("redis://h/x", "not a valid URL of the kind `redis:`"),
            ("redis://h/0?db=1", "not a valid URL of the kind `redis:`"),
            (
                "redis://h/0#insecure",
                "not a valid URL of the kind `redis:`",
            ),
            ("redis://u:p/w@h", "not a valid URL of the kind `redis:`"),
            ("redis://u:p w@h", "not a valid URL of the kind `redis:`"),
            ("redis://a,b/0", "not a valid URL of the kind `redis:`"),
            ("rediss://h;pass=x", "not a valid URL of the kind `rediss:`"),
            (
                "redis+unix://run/s",
                "not a valid URL of the kind `redis+unix:`",
            ),
            (
                "redis+unix:///s;pass=x",
                "not a valid URL of the kind `redis+unix:`",
            ),
            (
                "redis+unix:///a b.sock",
                "not a valid URL of the kind `redis+unix:`",
            ),
            (
                "redis+unix:///s?passwd=x",
                "not a valid URL of the kind `redis+unix:`",
            ),
            ("sqlite:", "not a valid URL of the kind `sqlite:`"),
            ("sqlite://x.db", "not a valid URL of the kind `sqlite:`"),
            ("sqlite::memory:", "not a valid URL of the kind `sqlite:`"),
            ("memory:x", "not a valid URL of the kind `memory:`"),
        ] {
            assert_eq!(parse(text).expect_err(text).message, message, "{text}");
        }
        assert_eq!(
            parse("reds://h").unwrap_err().hint,
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
            ("redis+unix:///s?pass=hunter2&user=a@b", "***"),
            (
                "redis+unix:///s?user=hunter2&db=1",
                "redis+unix:///s?user=***&db=1",
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
