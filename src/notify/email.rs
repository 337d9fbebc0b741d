//! Messages by mail. Each receiver gets his own, so that one who is refused keeps the mail from no other.

use std::time::Duration;

use lettre::{
    AsyncSmtpTransport, AsyncTransport as _, Message, Tokio1Executor,
    address::Envelope,
    message::{
        Mailbox,
        header::{ContentType, HeaderName, HeaderValue, MIME_VERSION_1_0},
    },
    transport::smtp::{
        Error, SMTP_PORT, SUBMISSION_PORT, SUBMISSIONS_PORT,
        authentication::Credentials,
        client::{Tls, TlsParameters},
    },
};
use percent_encoding::percent_decode_str;
use tokio::time::timeout;
use url::Url;

use super::{
    Undelivered,
    text::{Links, Text},
    trouble,
};
use crate::{
    config::{Secret, show_duration},
    words,
};

type Transport = AsyncSmtpTransport<Tokio1Executor>;

/// `all`: whom the mail names as its receivers; `to`: those of them who are to get it now.
pub(super) async fn send(
    smtp: &Secret,
    from: &str,
    (all, to): (&[String], &[&String]),
    text: &Text,
    limit: Duration,
) -> Result<String, Undelivered> {
    // Without the cause, which may quote the password.
    let invalid = "the address of the mail server is not valid; look at `smtp`";
    let transport = transport(smtp.expose(), limit).ok_or_else(|| Undelivered::refused(invalid))?;
    let from = mailbox(from)?;
    let mail = written(text, &from, all)?;
    let (mut said, mut left, mut failures) = (String::new(), to.to_vec(), vec![]);
    let sending = async {
        for receiver in to {
            match deliver(&transport, &from, &mailbox(receiver)?, &mail).await {
                Ok(answer) => said = answer,
                Err(e) => failures.push((*receiver, e)),
            }
            left.remove(0);
        }
        Ok(())
    };
    match timeout(limit, sending).await {
        Ok(result) => result?,
        Err(_) => {
            let limit = show_duration(limit);
            let why = format!("the mail server did not answer within {limit}");
            let late = Undelivered {
                perhaps: true,
                ..Undelivered::new(why)
            };
            failures.extend(left.into_iter().map(|receiver| (receiver, late.clone())));
        }
    }
    if failures.is_empty() {
        return Ok(said);
    }
    let partly = failures.len() < all.len();
    let why = |(receiver, e): &(&String, Undelivered)| match all.len() {
        1 => e.why.clone(),
        _ => words::line(&format!("not {receiver}: {}", e.why)),
    };
    let whys = failures.iter().map(why).collect::<Vec<_>>().join("; ");
    let have = all.len() - failures.len();
    let have = partly.then(|| format!("{have} of {} receivers have the mail; ", all.len()));
    Err(Undelivered {
        // The others wait for the end of it.
        refused: partly || failures.iter().all(|(_, e)| e.refused),
        perhaps: failures.iter().any(|(_, e)| e.perhaps),
        lacking: failures
            .iter()
            .map(|(receiver, _)| (*receiver).clone())
            .collect(),
        ..Undelivered::new(have.unwrap_or_default() + &whys)
    })
}

fn mailbox(address: &str) -> Result<Mailbox, Undelivered> {
    let refused = |_| Undelivered::refused("an address of `from` or `to` is not valid");
    address.parse().map_err(refused)
}

async fn deliver(
    transport: &Transport,
    from: &Mailbox,
    to: &Mailbox,
    mail: &[u8],
) -> Result<String, Undelivered> {
    let envelope = Envelope::new(Some(from.email.clone()), vec![to.email.clone()]);
    let envelope = envelope.map_err(|e| Undelivered::refused(e.to_string()))?;
    match transport.send_raw(&envelope, mail).await {
        Ok(answer) => Ok(words::line(&answer.message().collect::<Vec<_>>().join(" "))),
        Err(e) => {
            let why = words::line(&format!("the mail server: {}", trouble::of_mail(&e)));
            Err(match e.is_permanent() {
                true => Undelivered::refused(why),
                false => Undelivered {
                    // Without an answer, nobody knows whether the server took it.
                    perhaps: e.status().is_none() && !is_before_the_mail(&e),
                    ..Undelivered::new(why)
                },
            })
        }
    }
}

fn is_before_the_mail(e: &Error) -> bool {
    e.is_client() || e.is_tls() || e.to_string().starts_with("Connection error")
}

/// The mail as it leaves.
fn written(text: &Text, from: &Mailbox, to: &[String]) -> Result<Vec<u8>, Undelivered> {
    let domain = from.email.domain();
    let mut message = Message::builder()
        .from(from.clone())
        .subject(text.title.clone())
        // The same for each try, so that a reader sees which mails are one message.
        .message_id(Some(format!("<{}@{domain}>", text.id)))
        // Without it a reader need not decode the text.
        .header(MIME_VERSION_1_0)
        // RFC 3834: no out-of-office reply comes back.
        .raw_header(HeaderValue::new(
            HeaderName::new_from_ascii_str("Auto-Submitted"),
            "auto-generated".to_owned(),
        ))
        .header(ContentType::TEXT_PLAIN);
    for address in to {
        message = message.to(mailbox(address)?);
    }
    let message = message
        .body(text.body(Links::InTheText, usize::MAX))
        .map_err(|e| Undelivered::refused(format!("cannot write the mail: {e}")))?;
    Ok(message.formatted())
}

/// To the mail server that `smtp` names.
fn transport(address: &str, limit: Duration) -> Option<Transport> {
    let url = Url::parse(address).ok()?;
    let host = url.host_str()?.trim_matches(['[', ']']);
    let tls = || TlsParameters::new(host.to_owned()).ok();
    let (tls, port) = match url.scheme() {
        "smtp" => (Tls::None, SMTP_PORT),
        "smtp+starttls" => (Tls::Required(tls()?), SUBMISSION_PORT),
        "smtps" => (Tls::Wrapper(tls()?), SUBMISSIONS_PORT),
        _ => return None,
    };
    let mut builder = Transport::builder_dangerous(host)
        .port(url.port().unwrap_or(port))
        .tls(tls)
        .timeout(Some(limit));
    if let Some(password) = url.password() {
        let decoded = |text: &str| {
            let text = percent_decode_str(text).decode_utf8().ok();
            text.map(std::borrow::Cow::into_owned)
        };
        let login = Credentials::new(decoded(url.username())?, decoded(password)?);
        builder = builder.credentials(login);
    }
    Some(builder.build())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mail_server_is_named_by_an_address() {
        let is_valid = |address| transport(address, Duration::from_secs(1)).is_some();
        for address in [
            "smtp://h.example",
            "smtp://127.0.0.1:2525/",
            "smtp+starttls://h",
            "smtps://[::1]",
            "smtps://me%40h:p%3A%2F%25@h",
        ] {
            assert!(is_valid(address), "{address}");
        }
        for address in ["http://h", "smtp:", "smtp://u:%ff@h"] {
            assert!(!is_valid(address), "{address}");
        }
    }
}
