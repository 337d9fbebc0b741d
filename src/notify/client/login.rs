//! User and password in an address, as `https://USER:PASSWORD@HOST/PATH`: they leave as a header (Basic, RFC 7617).

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use hyper::header::HeaderValue;
use percent_encoding::percent_decode_str;

/// User and password, as the address has them.
pub(super) struct Login {
    written: String,
    /// `USER:PASSWORD`, decoded.
    plain: Vec<u8>,
}

/// The address without user and password, and these.
pub(super) fn of(url: &str) -> (String, Option<Login>) {
    let start = url.find("://").map_or(0, |at| at + 3);
    let (scheme, rest) = url.split_at(start);
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let Some((written, host)) = authority.rsplit_once('@') else {
        return (url.to_owned(), None);
    };
    let (user, password) = written.split_once(':').unwrap_or((written, ""));
    let plain = [&decoded(user), &b":"[..], &decoded(password)].concat();
    let login = Login {
        written: written.to_owned(),
        plain,
    };
    (format!("{scheme}{host}{path}"), Some(login))
}

impl Login {
    pub(super) fn header(&self) -> Option<HeaderValue> {
        let mut value =
            HeaderValue::from_str(&format!("Basic {}", BASE64.encode(&self.plain))).ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// What no message may show: the password and the header, as an answer may quote them.
    pub(super) fn secrets(self) -> Vec<String> {
        let plain = String::from_utf8_lossy(&self.plain).into_owned();
        let password = |text: &str| {
            text.split_once(':')
                .map(|(_, password)| password.to_owned())
        };
        let all = [
            password(&self.written),
            password(&plain),
            Some(BASE64.encode(&self.plain)),
        ];
        // A shorter one stands in any text.
        let long = |text: &String| text.len() >= 4;
        all.into_iter().flatten().filter(long).collect()
    }
}

/// With each `%40` as the byte that it stands for.
fn decoded(text: &str) -> Vec<u8> {
    percent_decode_str(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("http://me@h", "http://h", Some("Basic bWU6")),
            (
                "http://me:p%40:%@h?x",
                "http://h?x",
                Some("Basic bWU6cEA6JQ=="),
            ),
        ] {
            let (rest, login) = of(url);
            assert_eq!(rest, without);
            let value = login.and_then(|l| l.header());
            assert!(value.as_ref().is_none_or(HeaderValue::is_sensitive));
            assert_eq!(value.as_ref().map(|v| v.to_str().expect("text")), header);
        }
        let (_, login) = of("http://me:hunter%40@h");
        let secrets = login.expect("one").secrets();
        assert_eq!(secrets, ["hunter%40", "hunter@", "bWU6aHVudGVyQA=="]);
    }
}
