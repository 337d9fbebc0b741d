//! A small HTTP client: one request on one connection, with a time limit, a limited answer, and no redirects.

use std::{
    error::Error as _,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use http_body_util::{BodyExt as _, Collected, Full, Limited};
use hyper::{
    Method, Request, StatusCode, Uri,
    body::Bytes,
    header::{
        AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER, USER_AGENT,
    },
    http::response,
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::{Undelivered, trouble};
use crate::{
    clock::{self, Boottime},
    config::show_duration,
};

/// A text of more bytes is not shown.
const ANSWER_MOST: usize = 16 << 10;
/// How long it is read once its head has come: the head says whether the message was taken.
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// The authorities that the host trusts are read again after this time.
const AUTHORITIES_AGAIN: Duration = Duration::from_secs(60);
/// A server may not ask for a longer pause.
const RETRY_AFTER_MOST: Duration = Duration::from_secs(15 * 60);

/// What came back.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    /// Its begin.
    pub(super) text: String,
}

pub(crate) type Inner = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// As soloist names itself.
pub(crate) const AGENT: &str = concat!("soloist/", env!("CARGO_PKG_VERSION"));

/// How to speak TLS: with the authorities that this host trusts.
fn tls() -> Result<rustls::ClientConfig, Undelivered> {
    // To read a hundred certificates takes longer than to send a message.
    static KNOWN: Mutex<Option<(Boottime, rustls::ClientConfig)>> = Mutex::new(None);
    let mut known = KNOWN.lock();
    let now = Boottime::now();
    if let Some((read, tls)) = &*known
        && now.since(*read) < AUTHORITIES_AGAIN
    {
        return Ok(tls.clone());
    }
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| Undelivered::new(format!("cannot use TLS: {e}")))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    *known = Some((now, tls.clone()));
    Ok(tls)
}

/// A client that trusts the authorities that this host trusts.
pub(crate) fn client() -> Result<Inner, Undelivered> {
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(tls()?)
        .https_or_http()
        .enable_http1()
        .build();
    // Without a pool: an old connection may be dead, and messages are rare.
    Ok(Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .build(connector))
}

/// Sends `body` to `url`, and returns what came back if that says that it was taken.
pub(super) async fn post(
    url: &str,
    content_type: &'static str,
    body: Vec<u8>,
    limit: Duration,
) -> Result<Answer, Undelivered> {
    let invalid = || Undelivered::refused("the address is not valid; look at the channel's `url`");
    let (uri, login) = login(url).ok_or_else(invalid)?;
    let host = shown(&uri);
    let mut secret = parts_of(&uri);
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(uri)
        .header(CONTENT_TYPE, content_type)
        .header(USER_AGENT, AGENT);
    if let Some((header, secrets)) = login {
        request = request.header(AUTHORIZATION, header);
        secret.extend(secrets);
    }
    let request = request.body(Full::from(body)).map_err(|_| invalid())?;
    secret.sort_by_key(|p| std::cmp::Reverse(p.len()));
    let (head, text) = exchange(&client()?, request, limit).await?;
    judge(&host, &head, without(text, &secret))
}

/// A header, and what of it no message may show.
type Login = (HeaderValue, Vec<String>);

/// The address without user and password (`https://USER:PASSWORD@HOST/PATH`), and these as a header (Basic, RFC 7617).
fn login(url: &str) -> Option<(Uri, Option<Login>)> {
    let mut url = Url::parse(url).ok()?;
    let decoded = |text: &str| percent_decode_str(text).collect::<Vec<u8>>();
    let password = url.password().unwrap_or_default().to_owned();
    let plain = decoded(&password);
    let both = [&decoded(url.username()), &b":"[..], &plain].concat();
    url.set_username("").ok()?;
    url.set_password(None).ok()?;
    let uri = url.as_str().parse().ok()?;
    if both.len() == 1 {
        return Some((uri, None));
    }
    let code = BASE64.encode(both);
    let mut header = HeaderValue::from_str(&format!("Basic {code}")).ok()?;
    header.set_sensitive(true);
    let mut secrets = vec![password, String::from_utf8_lossy(&plain).into_owned(), code];
    // A shorter one stands in any text.
    secrets.retain(|text| text.len() >= 4);
    Some((uri, Some((header, secrets))))
}

/// Sends a request, and returns what came back, whatever it says, with its text if that is short and comes soon.
pub(crate) async fn exchange(
    client: &Inner,
    request: Request<Full<Bytes>>,
    limit: Duration,
) -> Result<(response::Parts, String), Undelivered> {
    let host = shown(request.uri());
    let until = Instant::now() + limit;
    let Ok(answer) = timeout_at(until, client.request(request)).await else {
        return Err(Undelivered {
            perhaps: true,
            ..Undelivered::new(format!(
                "{host} did not answer within {}",
                show_duration(limit)
            ))
        });
    };
    let (head, body) = answer.map_err(|e| failed(&host, &e))?.into_parts();
    // The status is enough: what else the server says is only shown.
    let until = until.min(Instant::now() + ANSWER_WAIT);
    let text = timeout_at(until, Limited::new(body, ANSWER_MOST).collect()).await;
    let text = text.map(|read| read.map(Collected::to_bytes));
    let text =
        String::from_utf8_lossy(&text.unwrap_or(Ok(Bytes::new())).unwrap_or_default()).into();
    Ok((head, text))
}

/// The server, without the path, which may be secret.
pub(crate) fn shown(uri: &Uri) -> String {
    let host = uri.host().unwrap_or_default();
    match uri.port_u16() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    }
}

/// What of an address may be secret, the longest first: all after the host, and each part of that.
fn parts_of(uri: &Uri) -> Vec<String> {
    let all = uri.path_and_query().map_or("", |p| p.as_str());
    let pieces = all.split(['/', '?', '&', '=']).chain([all, uri.path()]);
    // A short part is no secret, and may stand in any text.
    let mut parts: Vec<String> = pieces.filter(|p| p.len() >= 6).map(str::to_owned).collect();
    // A value may be short and secret: where it stands with its name, it is not shown.
    let query = uri.query().unwrap_or_default().split('&');
    let named = query.filter_map(|pair| Some((pair, pair.split_once('=')?.1)));
    for (pair, value) in named.filter(|(_, value)| !value.is_empty()) {
        parts.push(pair.to_owned());
        parts.extend((value.len() >= 4).then(|| value.to_owned()));
    }
    parts.sort_by_key(|p| std::cmp::Reverse(p.len()));
    parts
}

/// The answer, in which servers like to quote the path that they were asked for.
fn without(mut text: String, secret: &[String]) -> String {
    for part in secret {
        text = text.replace(part, "***");
    }
    text
}

fn failed(host: &str, e: &hyper_util::client::legacy::Error) -> Undelivered {
    // The outermost error says no more than at which step it was.
    let causes: Vec<&dyn std::error::Error> =
        std::iter::successors(e.source(), |&e| e.source()).collect();
    let last = causes.last().map_or_else(String::new, |e| e.to_string());
    let mut of_http = causes
        .iter()
        .filter_map(|e| e.downcast_ref::<hyper::Error>());
    let why = match of_http.next() {
        _ if let Some(why) = trouble::of_tls(e) => why,
        _ if e.is_connect() => format!("cannot connect: {last}"),
        Some(e) if e.is_incomplete_message() => {
            "the server closed the connection without an answer".to_owned()
        }
        Some(e) if e.is_parse() => {
            format!(
                "the server did not answer in HTTP/1.1 ({last}); look at the scheme and the port"
            )
        }
        _ => format!("the connection broke before the answer: {last}"),
    };
    Undelivered {
        perhaps: !e.is_connect(),
        ..Undelivered::new(crate::words::line(&format!("{host}: {why}")))
    }
}

/// Whether the server took the message.
fn judge(host: &str, head: &response::Parts, text: String) -> Result<Answer, Undelivered> {
    let status = head.status;
    if status.is_success() {
        return Ok(Answer { status, text });
    }
    let why = match status.is_redirection() && head.headers.contains_key(LOCATION) {
        true => format!(
            "{host} answered {status}: soloist follows no redirects; write the new address into `url`"
        ),
        _ => format!("{host} answered {status}: {}", crate::words::line(&text)),
    };
    let soon = matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT
    );
    Err(Undelivered {
        refused: !soon && !status.is_server_error(),
        retry_after: retry_after(&head.headers),
        ..Undelivered::new(why.trim_end_matches(": ").to_owned())
    })
}

/// The pause that a server asks for, if it does: in seconds, or until a date.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let asked = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let pause = match asked.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let until = httpdate::parse_http_date(asked).ok()?;
            let now = UNIX_EPOCH + Duration::from_micros(clock::wall_us().max(0) as u64);
            until.duration_since(now).unwrap_or_default()
        }
    };
    Some(pause.min(RETRY_AFTER_MOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_says_in_seconds_or_by_a_date_when_to_try_again() {
        let asks = |after: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, after.parse().expect("a value"));
            retry_after(&headers).map(|d| d.as_secs())
        };
        assert_eq!(asks("7"), Some(7));
        assert_eq!(asks(" 86400 "), Some(900), "15 min at most");
        assert_eq!(asks("Fri, 21 Nov 1997 04:00:00 GMT"), Some(0));
        assert_eq!(asks("Fri, 21 Nov 2200 04:00:00 GMT"), Some(900));
        assert_eq!(asks("soon"), None);
    }

    #[test]
    fn user_and_password_are_taken_out_of_an_address() {
        for (url, without, header) in [
            ("https://h/a@b?c@d", "https://h/a@b?c@d", None),
            // `Aladdin:open sesame`, as in the RFC.
            (
                "https://Aladdin:open%20sesame@h:1/a",
                "https://h:1/a",
                Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="),
            ),
            ("http://me@h/", "http://h/", Some("Basic bWU6")),
        ] {
            let (uri, login) = login(url).expect("an address");
            assert_eq!(uri.to_string(), without);
            let value = login.map(|(header, _)| header);
            assert!(value.as_ref().is_none_or(HeaderValue::is_sensitive));
            assert_eq!(value.as_ref().map(|v| v.to_str().expect("text")), header);
        }
        let (_, login_of) = login("http://me:hunter%40@h").expect("an address");
        let (_, secrets) = login_of.expect("one");
        assert_eq!(secrets, ["hunter%40", "hunter@", "bWU6aHVudGVyQA=="]);
    }

    #[test]
    fn a_path_that_a_server_quotes_is_not_shown() {
        let uri: Uri = "https://h.example/api/hooks/T0Ken99/x?key=s3cret-k&v=1&pin=4711"
            .parse()
            .expect("an address");
        let secret = parts_of(&uri);
        for (answer, shown) in [
            ("Cannot POST /api/hooks/T0Ken99/x", "Cannot POST ***"),
            (
                "no /api/hooks/T0Ken99/x?key=s3cret-k&v=1&pin=4711 here",
                "no *** here",
            ),
            (
                "unknown token T0Ken99, key s3cret-k",
                "unknown token ***, key ***",
            ),
            ("ok, v 1", "ok, v 1"),
            ("bad query: v=1", "bad query: ***"),
            ("no pin 4711", "no pin ***"),
        ] {
            assert_eq!(without(answer.to_owned(), &secret), shown);
        }
    }
}
