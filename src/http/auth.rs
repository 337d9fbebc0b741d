//! Who may do what: hosts, tokens, roles, and requests that another site's page sends.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::http::{HeaderMap, Method, Request, StatusCode, Uri, Version, header};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use parking_lot::Mutex;
use ring::digest;
use tracing::{error, info};

use super::problem::Problem;
use crate::{
    clock::Boottime,
    config::{
        self, Listen, named, rights,
        tokens::{self, Role, Token},
    },
};

/// The file of tokens is looked at no more often than this.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Who asks, and what they may do.
#[derive(Debug, Clone, Default)]
pub(super) struct Caller {
    /// None: a token is needed.
    pub(super) role: Option<Role>,
    /// The name of the token, for the log.
    pub(super) name: Option<Arc<str>>,
    /// Its hash.
    token: Option<[u8; 32]>,
}

/// Decides what each request may do.
pub(super) struct Gate {
    http: config::Http,
    tokens: Option<TokensFile>,
    /// Names that the header `Host` may have; None: any.
    hosts: Option<Vec<String>>,
}

impl Gate {
    pub(super) fn new(http: config::Http) -> Self {
        let checked = match &http.listen {
            Listen::Tcp(address) => address.ip().to_canonical().is_loopback(),
            // A proxy may be in front of a socket.
            Listen::Unix(_) => http.tokens_file.is_none(),
        };
        // A page of another site may give its own name this host's address (DNS rebinding), and would be asked with its
        // name. Without tokens nothing else would tell it from ours.
        let hosts = checked.then(|| {
            let own = ["localhost", "127.0.0.1", "[::1]"].map(str::to_owned);
            let public = http
                .public_url
                .as_deref()
                .map(|url| host_of(authority(url)).to_owned());
            own.into_iter().chain(public).collect()
        });
        Self {
            tokens: http.tokens_file.clone().map(TokensFile::new),
            hosts,
            http,
        }
    }

    pub(super) fn has_tokens(&self) -> bool {
        self.tokens.is_some()
    }

    pub(super) fn read_only(&self) -> bool {
        self.http.read_only
    }

    /// Judges a request by its head. The caller's role is None where none is needed.
    pub(super) fn judge<B>(&self, request: &Request<B>) -> Result<Caller, Problem> {
        let (method, uri, headers) = (request.method(), request.uri(), request.headers());
        self.check_host(request.version(), uri, headers)?;
        let reads = matches!(*method, Method::GET | Method::HEAD);
        let basic = reads && is_calendar(uri.path());
        let offered = |problem: Problem| Problem { basic, ..problem };
        let caller = self.caller(headers, basic).map_err(offered);
        let open = is_public(uri.path());
        if open && reads {
            return Ok(caller.unwrap_or_default());
        }
        let caller = caller?;
        let Some(role) = caller.role else {
            let hint = match basic {
                true => {
                    "give it as the password, with any user name; `soloist http token NAME read` makes one"
                }
                false => {
                    "send it as `Authorization: Bearer TOKEN`; `soloist http token NAME ROLE` makes one"
                }
            };
            let problem = Problem::new(StatusCode::UNAUTHORIZED, "a token is needed");
            return Err(offered(problem.hint(hint)));
        };
        if reads {
            return Ok(caller);
        }
        self.check_site(headers)?;
        if self.http.read_only {
            return Err(Problem::new(
                StatusCode::FORBIDDEN,
                "this instance serves HTTP to readers only",
            )
            .hint("`read_only` in [http] says so; use the command line, or another instance"));
        }
        if role < Role::Operate {
            let (detail, hint) = match self.has_tokens() {
                true => (
                    "this token has the role `read`",
                    "use a token with the role `operate`",
                ),
                false => (
                    "without tokens, an address can only be read",
                    "name a `tokens_file` in [http], or listen on a socket (`unix:PATH`)",
                ),
            };
            return Err(Problem::new(StatusCode::FORBIDDEN, detail).hint(hint));
        }
        Ok(caller)
    }

    /// `basic`: the token may also be the password of HTTP's Basic authentication.
    fn caller(&self, headers: &HeaderMap, basic: bool) -> Result<Caller, Problem> {
        let Some(file) = &self.tokens else {
            let role = match self.http.listen {
                Listen::Unix(_) => Role::Operate,
                Listen::Tcp(_) => Role::Read,
            };
            return Ok(Caller {
                role: Some(role),
                ..Caller::default()
            });
        };
        let mut all = headers.get_all(header::AUTHORIZATION).iter();
        let (Some(value), None) = (all.next(), all.next()) else {
            return Ok(Caller::default());
        };
        let wrong = || {
            Problem::new(
                StatusCode::UNAUTHORIZED,
                "this token is not valid (any more)",
            )
            .hint("`soloist http token NAME ROLE` makes one, and the line for the tokens file")
        };
        let sent = value.to_str().ok().and_then(|value| sent(value, basic));
        let sent = sent.ok_or_else(wrong)?;
        let known = file.current()?;
        let token = find(&known, &sent).ok_or_else(wrong)?;
        Ok(Caller {
            role: Some(token.role),
            name: Some(token.name.as_str().into()),
            token: Some(token.sha256),
        })
    }

    /// Whether somebody who was let in may still read: their token may have been taken away meanwhile.
    pub(super) fn still_lets(&self, caller: &Caller) -> bool {
        let Some(file) = &self.tokens else {
            return true;
        };
        file.current()
            .is_ok_and(|all| all.iter().any(|t| Some(t.sha256) == caller.token))
    }

    fn check_host(&self, version: Version, uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
        let Some(hosts) = &self.hosts else {
            return Ok(());
        };
        let mut named = headers
            .get_all(header::HOST)
            .iter()
            .map(|v| v.to_str().unwrap_or_default());
        let first = named.next();
        // HTTP/1.0 knows no `Host`, and each browser sends it: who leaves it out is a simple probe.
        let missing = first.is_none() && version != Version::HTTP_10;
        if missing || named.next().is_some() {
            return Err(Problem::bad("the header `Host` must be there once"));
        }
        let in_uri = uri.authority().map(|a| a.as_str());
        for name in first.into_iter().chain(in_uri) {
            let host = host_of(name);
            if !hosts.iter().any(|h| h.eq_ignore_ascii_case(host)) {
                return Err(Problem::new(
                    StatusCode::MISDIRECTED_REQUEST,
                    "this address does not serve a host of that name",
                )
                .hint("ask for localhost, or set `public_url` in [http] to the address that people use"));
            }
        }
        Ok(())
    }

    /// Refuses what a page of another site has a browser send.
    fn check_site(&self, headers: &HeaderMap) -> Result<(), Problem> {
        // Browsers send `Sec-Fetch-Site` and `Origin` once; whoever sends more must be right with all of them.
        let all = |name: &str| {
            let values = headers.get_all(name).iter();
            values.map(|v| v.to_str().unwrap_or("?"))
        };
        let scheme = if self.http.tls.is_some() {
            "https"
        } else {
            "http"
        };
        let host = all("host").next().unwrap_or_default();
        let ours = format!("{scheme}://{host}");
        let public = self.http.public_url.as_deref().map(|url| {
            let end = url.find("://").map_or(0, |n| n + 3) + authority(url).len();
            &url[..end]
        });
        let of_own_site = all("sec-fetch-site").all(|site| ["same-origin", "none"].contains(&site))
            && all("origin").all(|origin| {
                origin.eq_ignore_ascii_case(&ours)
                    || public.is_some_and(|url| origin.eq_ignore_ascii_case(url))
            });
        if of_own_site {
            return Ok(());
        }
        Err(Problem::new(
            StatusCode::FORBIDDEN,
            "a page of another site sent this request",
        )
        .hint("use soloist's own page, or a program that sends no `Origin`"))
    }
}

/// What everybody may see: whether the instance lives, and the page without any data.
pub(super) fn is_public(path: &str) -> bool {
    [
        "/",
        "/healthz",
        "/readyz",
        "/favicon.ico",
        "/api/v1/session",
    ]
    .contains(&path)
        || path.starts_with("/static/")
}

/// The calendars, for programs that know no other way to send a token than as a password.
fn is_calendar(path: &str) -> bool {
    let of_job = path
        .strip_prefix("/api/v1/jobs/")
        .and_then(|rest| rest.strip_suffix("/calendar.ics"));
    path == "/calendar.ics" || of_job.is_some_and(|job| !job.contains('/'))
}

/// The token in a header `Authorization`; `basic`: it may also be sent as a password. The name before it says nothing.
/// Blanks around a token do not count.
fn sent(header: &str, basic: bool) -> Option<String> {
    let (scheme, rest) = header.split_once(' ')?;
    let rest = rest.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.to_owned());
    }
    if !basic || !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let both = String::from_utf8(BASE64.decode(rest).ok()?).ok()?;
    Some(both.split_once(':')?.1.trim().to_owned())
}

/// `host:port` of a URL.
fn authority(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split('/').next().unwrap_or(rest)
}

/// The host of `host:port`; an address of IPv6 keeps its brackets.
pub(super) fn host_of(authority: &str) -> &str {
    let port = authority
        .rfind(':')
        .filter(|at| !authority[*at..].contains(']'));
    port.map_or(authority, |at| &authority[..at])
}

/// The token of this text. Takes as long for each text, whatever it has in common with a token.
fn find<'t>(all: &'t [Token], text: &str) -> Option<&'t Token> {
    let hash = digest::digest(&digest::SHA256, text.as_bytes());
    let mut found = None;
    for token in all {
        let differs = token
            .sha256
            .iter()
            .zip(hash.as_ref())
            .fold(0, |all, (a, b)| all | (a ^ b));
        if std::hint::black_box(differs) == 0 {
            found = Some(token);
        }
    }
    found
}

/// A new token: 256 bits from the system's generator, which begin with a word that scanners for secrets can look for.
pub(crate) fn random_token() -> std::io::Result<String> {
    let mut bits = [0; 32];
    let rng = ring::rand::SystemRandom::new();
    ring::rand::SecureRandom::fill(&rng, &mut bits)
        .map_err(|_| std::io::Error::other("the system gives no random numbers"))?;
    let hex: String = bits.iter().map(|b| format!("{b:02x}")).collect();
    Ok(format!("soloist_{hex}"))
}

/// The hash of a token, as the file has it.
pub(crate) fn sha256_hex(text: &str) -> String {
    let hash = digest::digest(&digest::SHA256, text.as_bytes());
    hash.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

/// A file of tokens, which is read again when it has changed.
struct TokensFile {
    path: PathBuf,
    read: Mutex<Read>,
}

#[derive(Default)]
struct Read {
    looked: Option<Boottime>,
    version: Option<named::Version>,
    /// Err: why the file cannot be used.
    tokens: Option<Result<Arc<[Token]>, String>>,
}

impl TokensFile {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            read: Mutex::default(),
        }
    }

    fn current(&self) -> Result<Arc<[Token]>, Problem> {
        let mut read = self.read.lock();
        let now = Boottime::now();
        if read.looked.is_none_or(|at| now.since(at) >= LOOK_AGAIN) {
            read.looked = Some(now);
            let version = named::version(&self.path);
            if read.tokens.is_none() || version.is_none() || version != read.version {
                let before = read.tokens.take();
                let tokens = load(&self.path);
                match &tokens {
                    Ok(all) if before.is_some() => {
                        info!(tokens = all.len(), "the file of tokens was read again")
                    }
                    Err(why) if !matches!(&before, Some(Err(told)) if told == why) => {
                        error!("nobody can use HTTP with a token: {why}");
                    }
                    _ => {}
                }
                read.version = version;
                read.tokens = Some(tokens);
            }
        }
        match &read.tokens {
            Some(Ok(all)) => Ok(all.clone()),
            // Whoever removes the file takes all tokens away.
            _ => Err(Problem::unavailable(
                "the file of tokens cannot be used; the log says why",
            )
            .hint("mend the file, which is `tokens_file` in [http]: `soloist check` says what is wrong with it; no \
                restart is needed")),
        }
    }
}

fn load(path: &Path) -> Result<Arc<[Token]>, String> {
    let named = |why: String| format!("{}: {why}", path.display());
    rights::trusted(path).map_err(|f| format!("{}: {}", f.message, f.fix))?;
    let bytes = named::read(path).map_err(named)?;
    let text = String::from_utf8(bytes).map_err(|_| named("it is not UTF-8 text".to_owned()))?;
    let all = tokens::parse(&text).map_err(|e| named(e.to_string()))?;
    Ok(all.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_may_be_a_password_for_calendars_alone() {
        let encoded = |both: &str| format!("Basic {}", BASE64.encode(both));
        let basic_of = |name: &str| encoded(&format!("{name}:to:ken"));
        for (header, basic, said) in [
            ("Bearer to:ken", false, true),
            ("bearer  to:ken ", true, true),
            ("Bearer", false, false),
            ("Token to:ken", true, false),
            (&basic_of("ann"), true, true),
            (&basic_of(""), true, true),
            (&encoded("ann: to:ken\n"), true, true),
            (&encoded("ann"), true, false),
            (&basic_of("ann").to_uppercase(), true, false),
            (&basic_of("ann"), false, false),
            ("Basic to:ken", true, false),
        ] {
            let token = sent(header, basic);
            assert_eq!(token.as_deref(), said.then_some("to:ken"), "{header}");
        }
        for (path, is) in [
            ("/calendar.ics", true),
            ("/api/v1/jobs/a/calendar.ics", true),
            ("/api/v1/jobs/a/why/calendar.ics", false),
            ("/api/v1/jobs//calendar.ics/runs", false),
            ("/api/v1/jobs", false),
            ("/x/calendar.ics", false),
        ] {
            assert_eq!(is_calendar(path), is, "{path}");
        }
    }

    #[test]
    fn hosts_and_origins_are_taken_apart() {
        assert_eq!(authority("https://a.example:8443/x/y"), "a.example:8443");
        for (authority, host) in [
            ("localhost:7878", "localhost"),
            ("localhost", "localhost"),
            ("[::1]:7878", "[::1]"),
            ("[::1]", "[::1]"),
        ] {
            assert_eq!(host_of(authority), host);
        }
    }
}
