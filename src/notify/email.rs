//! Messages by mail.

use std::time::Duration;

use lettre::{
    Address, AsyncSmtpTransport, AsyncTransport as _, Message, Tokio1Executor,
    address::Envelope,
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
    let (envelope, mail) = (message.envelope(), message.formatted());
    let whole = one(&transport, envelope, &mail, limit).await;
    let Err((_, true)) = &whole else {
        return whole.map_err(|(e, _)| e);
    };
    // One receiver who is refused keeps the mail from all: each gets one of his own.
    let (mut said, mut refused) = (None, Vec::new());
    for receiver in envelope.to() {
        let alone = Envelope::new(envelope.from().cloned(), vec![receiver.clone()]);
        let Ok(alone) = alone else { continue };
        match one(&transport, &alone, &mail, limit).await {
            Ok(answer) => said = Some(answer),
            Err((e, _)) => refused.push((receiver, e)),
        }
    }
    match (said, refused.is_empty()) {
        (None, _) => whole.map_err(|(e, _)| e),
        (Some(said), true) => Ok(said),
        (Some(_), false) => Err(Undelivered {
            partly: true,
            ..Undelivered::new(in_words(&refused, envelope.to().len()))
        }),
    }
}

fn in_words(refused: &[(&Address, Undelivered)], all: usize) -> String {
    let each: Vec<String> = refused
        .iter()
        .map(|(receiver, e)| crate::words::line(&format!("not {receiver}: {}", e.why)))
        .collect();
    let taken = all - refused.len();
    format!(
        "{taken} of {all} receivers have the mail; {}",
        each.join("; ")
    )
}

/// One mail to the receivers of this envelope. If it fails: whether that may be because of one of several receivers.
async fn one(
    transport: &AsyncSmtpTransport<Tokio1Executor>,
    envelope: &Envelope,
    mail: &[u8],
    limit: Duration,
) -> Result<String, (Undelivered, bool)> {
    match tokio::time::timeout(limit, transport.send_raw(envelope, mail)).await {
        Err(_) => {
            let limit = show_duration(limit);
            let late = Undelivered {
                perhaps: true,
                ..Undelivered::new(format!("the mail server did not answer within {limit}"))
            };
            Err((late, false))
        }
        Ok(Ok(response)) => Ok(crate::words::line(
            &response.message().collect::<Vec<_>>().join(" "),
        )),
        Ok(Err(e)) => {
            let (why, before) = trouble::of_mail(&e);
            let undelivered = Undelivered {
                refused: e.is_permanent(),
                // Without an answer to the mail itself, nobody knows whether the server took it.
                perhaps: !e.is_permanent() && !e.is_transient() && !before,
                ..Undelivered::new(crate::words::line(&format!("the mail server: {why}")))
            };
            let of_one = e.status().map(u16::from);
            let of_one = of_one.is_some_and(|code| (550..=554).contains(&code));
            Err((undelivered, of_one && envelope.to().len() > 1))
        }
    }
}
