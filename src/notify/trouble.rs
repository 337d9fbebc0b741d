//! Why a server did not take a message, in plain words: what a library says of it helps only who knows that library.

use std::error::Error;

use rustls::CertificateError;

/// An error, and those that caused it. What an error of the system holds is a cause, too.
fn causes<'e>(e: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(e), |&e| {
        let held = e.downcast_ref::<std::io::Error>().and_then(|e| e.get_ref());
        match held {
            Some(held) => Some(held as &(dyn Error + 'static)),
            None => e.source(),
        }
    })
}

/// What was wrong with the encryption of a connection, if that was what went wrong.
pub(super) fn of_tls(e: &(dyn Error + 'static)) -> Option<String> {
    const NO_TLS: &str =
        "it does not speak TLS at this port; look at the scheme and the port of the address";
    let Some(e) = causes(e).find_map(|e| e.downcast_ref::<rustls::Error>()) else {
        // As tokio-rustls says it: what waits for a line of text closes the connection.
        let ended = causes(e).any(|e| e.to_string() == "tls handshake eof");
        return ended.then(|| format!("it closed the connection: perhaps {NO_TLS}"));
    };
    let words = match e {
        rustls::Error::InvalidCertificate(why) => match why {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "its certificate has expired, or the clock of this host is wrong"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "its certificate is not valid yet, or the clock of this host is wrong"
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "its certificate is for another name than that of the address"
            }
            CertificateError::UnknownIssuer => {
                "its certificate is not from an authority that this host trusts; `SSL_CERT_FILE` can name others"
            }
            CertificateError::Revoked => "its certificate was revoked",
            CertificateError::BadEncoding => "its certificate cannot be read",
            CertificateError::BadSignature => {
                "its certificate was not signed by the authority that it names"
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                "its certificate is not one for servers"
            }
            CertificateError::UnhandledCriticalExtension => {
                "its certificate has an extension that soloist does not know and must not pass over"
            }
            // Webpki, whose types are not ours.
            CertificateError::Other(why) if format!("{why:?}").contains("CaUsedAsEndEntity") => {
                "its certificate is that of an authority, and not of a server: give the server one that the authority \
                 has signed"
            }
            why => {
                return Some(format!(
                    "its certificate is not valid ({})",
                    plain(&format!("{why:?}"))
                ));
            }
        },
        rustls::Error::InvalidMessage(_) => NO_TLS,
        rustls::Error::AlertReceived(_) => {
            return Some(format!("it refuses this TLS ({})", plain(&e.to_string())));
        }
        rustls::Error::PeerIncompatible(_) => "it speaks no version of TLS that soloist speaks",
        _ => return Some(format!("TLS does not work ({})", plain(&e.to_string()))),
    };
    Some(words.to_owned())
}

/// The names of errors as words: `HandshakeFailure` is `handshake failure`. Of names in each other the innermost says
/// what it is about.
fn plain(text: &str) -> String {
    let innermost = text.rsplit('(').next().unwrap_or(text);
    let mut out = String::new();
    let mut before = ' ';
    for c in innermost.trim_end_matches(')').chars() {
        if c.is_uppercase() && before.is_lowercase() {
            out.push(' ');
        }
        out.extend(c.to_lowercase());
        before = c;
    }
    out
}

/// How far the talk with a mail server has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Connecting,
    /// It does not have the mail.
    Talking,
    /// It has the whole mail, and has not answered yet.
    Sent,
}

/// What went wrong with a mail.
pub(super) fn of_mail(e: &lettre::transport::smtp::Error, stage: Stage) -> String {
    let said = causes(e)
        .last()
        .map_or_else(String::new, ToString::to_string);
    if let Some(why) = of_tls(e) {
        return why;
    }
    // What the client itself refuses is in its text alone.
    if e.is_client() {
        return match said.as_str() {
            text if text.contains("STARTTLS") => {
                "it offers no STARTTLS, so neither the password nor the mail is sent; for TLS from the beginning write \
                 `smtps://` in `smtp`"
                    .to_owned()
            }
            text if text.contains("authentication mechanism") => {
                "it offers no way to log in: many servers do so only over TLS (`smtps://`, `smtp+starttls://`)"
                    .to_owned()
            }
            _ => said,
        };
    }
    // As lettre says it.
    if said == "incomplete response" {
        return match stage {
            Stage::Connecting => {
                "it closed the connection: perhaps it does not speak SMTP at this port"
            }
            Stage::Talking => "it closed the connection before it had the mail",
            Stage::Sent => "it closed the connection without an answer: it may have taken the mail",
        }
        .to_owned();
    }
    let Some(status) = e.status() else {
        let connecting = e.to_string().starts_with("Connection error");
        let what = match (connecting, e.is_response()) {
            (true, _) => "cannot connect",
            (_, true) => "it does not speak SMTP at this port",
            _ => "the connection broke",
        };
        return format!("{what}: {said}");
    };
    let code = u16::from(status);
    match code {
        // RFC 4954
        530 | 534 | 535 | 538 => {
            format!("it refuses user or password of `smtp`, or the way to log in ({code}: {said})")
        }
        551 | 553 => format!("it refuses an address of `from` or `to` ({code}: {said})"),
        // RFC 3463: 5.1 is about addresses. Without it 550 may be about anything.
        550 if said.starts_with("5.1.") => {
            format!("it refuses an address of `from` or `to` ({code}: {said})")
        }
        550 | 552 | 554 => format!("it refuses the mail ({code}: {said})"),
        421 | 450..=452 => format!("it takes no mail at present ({code}: {said})"),
        _ => format!("it refuses ({code}: {said})"),
    }
}

#[cfg(test)]
mod tests {
    use rustls::InvalidMessage;

    use super::*;

    #[test]
    fn what_is_wrong_with_a_certificate_is_said_in_plain_words() {
        use CertificateError as Wrong;
        /// As the library says it that checks certificates: by a name.
        #[derive(thiserror::Error)]
        #[error("")]
        struct Named(&'static str);
        impl std::fmt::Debug for Named {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.0)
            }
        }
        let other = |name| Wrong::Other(rustls::OtherError(std::sync::Arc::new(Named(name))));
        let of = |e: rustls::Error| {
            // As the libraries wrap it.
            let inner = std::io::Error::other(e);
            let outer = std::io::Error::new(std::io::ErrorKind::InvalidData, inner);
            of_tls(&outer).expect("an error of TLS")
        };
        for (wrong, words) in [
            (Wrong::Expired, "its certificate has expired"),
            (Wrong::NotValidYet, "is not valid yet"),
            (Wrong::NotValidForName, "is for another name"),
            (
                Wrong::UnknownIssuer,
                "from an authority that this host trusts",
            ),
            (Wrong::Revoked, "its certificate was revoked"),
            (
                Wrong::BadSignature,
                "not signed by the authority that it names",
            ),
            (Wrong::InvalidPurpose, "is not one for servers"),
            (
                Wrong::UnknownRevocationStatus,
                "its certificate is not valid (unknown revocation status)",
            ),
            (other("CaUsedAsEndEntity"), "is that of an authority"),
            (
                other("MaximumPathDepthExceeded"),
                "its certificate is not valid (maximum path depth exceeded)",
            ),
        ] {
            let said = of(rustls::Error::InvalidCertificate(wrong));
            assert!(said.contains(words), "{said}");
        }
        let plain = of(InvalidMessage::InvalidContentType.into());
        assert!(plain.contains("does not speak TLS at this port"), "{plain}");
        let refused = of(rustls::Error::AlertReceived(
            rustls::AlertDescription::HandshakeFailure,
        ));
        assert!(refused.ends_with("handshake failure)"), "{refused}");
        assert_eq!(of_tls(&std::io::Error::other("refused")), None);
    }
}
