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
    use CertificateError as Wrong;
    Some(match e {
        rustls::Error::InvalidCertificate(wrong) => match wrong {
            Wrong::Expired
            | Wrong::ExpiredContext { .. }
            | Wrong::NotValidYet
            | Wrong::NotValidYetContext { .. } => {
                "its certificate has expired or is not valid yet, or the clock of this host is wrong"
                    .to_owned()
            }
            Wrong::NotValidForName | Wrong::NotValidForNameContext { .. } => {
                "its certificate is for another name than that of the address".to_owned()
            }
            Wrong::UnknownIssuer => "its certificate is not from an authority that this host trusts; \
                                     `SSL_CERT_FILE` can name others"
                .to_owned(),
            other => format!("its certificate is not valid ({other})"),
        },
        rustls::Error::InvalidMessage(_) => NO_TLS.to_owned(),
        e => format!("TLS does not work ({e})"),
    })
}

/// What went wrong with a mail.
pub(super) fn of_mail(e: &lettre::transport::smtp::Error) -> String {
    let said = causes(e)
        .last()
        .map_or_else(String::new, ToString::to_string);
    if let Some(why) = of_tls(e) {
        return why;
    }
    let Some(status) = e.status() else {
        // As lettre says it.
        return match said.as_str() {
            text if e.is_client() && text.contains("STARTTLS") => {
                "it offers no STARTTLS, so neither the password nor the mail is sent; for TLS from the beginning write \
                 `smtps://` in `smtp`"
                    .to_owned()
            }
            text if e.is_client() && text.contains("authentication mechanism") => {
                "it offers no way to log in: many servers do so only over TLS (`smtps://`, `smtp+starttls://`)"
                    .to_owned()
            }
            "incomplete response" => "it closed the connection without an answer".to_owned(),
            _ if e.is_client() => said,
            _ if e.is_response() => "it does not speak SMTP at this port".to_owned(),
            _ => format!("cannot connect, or the connection broke: {said}"),
        };
    };
    let code = u16::from(status);
    let what = match code {
        // RFC 4954
        530 | 534 | 535 | 538 => "it refuses user or password of `smtp`, or the way to log in",
        551 | 553 => "it refuses an address of `from` or `to`",
        // RFC 3463: 5.1 is about addresses. Without it 550 may be about anything.
        550 if said.starts_with("5.1.") => "it refuses an address of `from` or `to`",
        421 | 450..=452 => "it takes no mail at present",
        _ => "it refuses the mail",
    };
    format!("{what} ({code}: {said})")
}
