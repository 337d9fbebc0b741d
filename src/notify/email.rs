//! Messages by mail.

use std::time::Duration;

use lettre::{
    AsyncSmtpTransport, AsyncTransport as _, Message, Tokio1Executor,
    message::{
        Mailbox,
        header::{ContentType, HeaderName, HeaderValue, MIME_VERSION_1_0},
    },
};

use super::{
    Undelivered,
    text::{Links, Text},
    trouble,
};
use crate::config::{Secret, show_duration};

pub(super) async fn send(
    smtp: &Secret,
    from: &str,
    to: &[String],
    text: &Text,
    limit: Duration,
) -> Result<String, Undelivered> {
    let refused = |why: String| Undelivered {
        refused: true,
        ..Undelivered::new(why)
    };
    let mailbox = |address: &str| {
        address
            .parse::<Mailbox>()
            .map_err(|_| refused("an address of `from` or `to` is not valid".to_owned()))
    };
    let from = mailbox(from)?;
    let domain = from.email.domain().to_owned();
    let mut message = Message::builder()
        .from(from)
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
        .body(text.body.whole(Links::InTheText))
        .map_err(|e| refused(format!("cannot write the mail: {e}")))?;
    let url = match smtp.expose().strip_prefix("smtp+starttls://") {
        Some(rest) if rest.contains('?') => format!("smtp://{rest}&tls=required"),
        Some(rest) => format!("smtp://{}?tls=required", rest.trim_end_matches('/')),
        None => smtp.expose().to_owned(),
    };
    let transport = AsyncSmtpTransport::<Tokio1Executor>::from_url(&url)
        // Without the cause, which may quote the password.
        .map_err(|_| {
            refused("the address of the mail server is not valid; look at `smtp`".to_owned())
        })?
        .timeout(Some(limit))
        .build();
    let late = || Undelivered {
        perhaps: true,
        ..Undelivered::new(format!(
            "the mail server did not answer within {}",
            show_duration(limit)
        ))
    };
    match tokio::time::timeout(limit, transport.send(message)).await {
        Err(_) => Err(late()),
        Ok(Ok(response)) => Ok(crate::words::line(
            &response.message().collect::<Vec<_>>().join(" "),
        )),
        Ok(Err(e)) => {
            let (why, before) = trouble::of_mail(&e);
            Err(Undelivered {
                refused: e.is_permanent(),
                // Without an answer to the mail itself, nobody knows whether the server took it.
                perhaps: !e.is_permanent() && !e.is_transient() && !before,
                ..Undelivered::new(crate::words::line(&format!("the mail server: {why}")))
            })
        }
    }
}
