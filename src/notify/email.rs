//! Messages by mail: one connection for all receivers. Each is asked for by himself, so that one who is refused keeps
//! the mail from no other.

use std::time::Duration;

use lettre::{
    Address, Message,
    message::{
        Mailbox,
        header::{ContentType, HeaderName, HeaderValue, MIME_VERSION_1_0},
    },
    transport::smtp::{
        Error, SMTP_PORT, SUBMISSION_PORT, SUBMISSIONS_PORT,
        authentication::{Credentials, Mechanism},
        client::{AsyncSmtpConnection, TlsParameters},
        commands::{Data, Mail, Rcpt, Rset},
        extension::{ClientId, Extension, MailBodyParameter, MailParameter},
    },
};
use percent_encoding::percent_decode_str;
use tokio::time::timeout;
use url::{Host, Url};

use super::{
    Undelivered,
    text::{Links, Text},
    trouble::{self, Stage},
};
use crate::{
    config::{Secret, show_duration},
    words,
};

/// How long the end of a connection may take, once all is said.
const QUIT_WAIT: Duration = Duration::from_secs(1);

/// `all`: whom the mail names as its receivers; `to`: those of them who are to get it now.
pub(super) async fn send(
    smtp: &Secret,
    (from, all, to): (&str, &[String], &[String]),
    text: &Text,
    limit: Duration,
) -> Result<String, Undelivered> {
    // The configuration has changed meanwhile.
    if to.is_empty() {
        return Ok("`to` has none any more of those who lack it".to_owned());
    }
    // Without the cause, which may quote the password.
    let server = Server::of(smtp.expose())
        .ok_or_else(|| refused("the address of the mail server is not valid; look at `smtp`"))?;
    let from = mailbox(from)?;
    let text = written(text, from.clone(), all)?;
    let mut letter = Letter {
        from: from.email,
        text,
        to: vec![],
        taken: vec![],
        refused: vec![],
        stage: Stage::Connecting,
    };
    for receiver in to {
        letter.to.push((receiver, mailbox(receiver)?.email));
    }
    let late = || {
        let limit = show_duration(limit);
        Undelivered::new(format!("the mail server did not answer within {limit}"))
    };
    let result = timeout(limit, letter.deliver(&server, limit)).await;
    letter.told(result.unwrap_or_else(|_| Err(late())))
}

fn refused(why: impl Into<String>) -> Undelivered {
    Undelivered {
        refused: true,
        ..Undelivered::new(why)
    }
}

fn mailbox(address: &str) -> Result<Mailbox, Undelivered> {
    address
        .parse::<Mailbox>()
        .map_err(|_| refused("an address of `from` or `to` is not valid"))
}

/// The mail as it leaves.
fn written(text: &Text, from: Mailbox, to: &[String]) -> Result<Vec<u8>, Undelivered> {
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
    Ok(message.formatted())
}

/// A mail server, as `smtp` names it.
struct Server {
    host: String,
    port: u16,
    encryption: Encryption,
    login: Option<Credentials>,
}

#[derive(Clone, Copy, PartialEq)]
enum Encryption {
    None,
    StartTls,
    FromTheBeginning,
}

impl Server {
    fn of(address: &str) -> Option<Self> {
        let url = Url::parse(address).ok()?;
        let (encryption, port) = match url.scheme() {
            "smtp" => (Encryption::None, SMTP_PORT),
            "smtp+starttls" => (Encryption::StartTls, SUBMISSION_PORT),
            "smtps" => (Encryption::FromTheBeginning, SUBMISSIONS_PORT),
            _ => return None,
        };
        let decoded = |text: &str| {
            let text = percent_decode_str(text).decode_utf8();
            text.ok().map(std::borrow::Cow::into_owned)
        };
        let login = match url.password() {
            Some(password) => Some(Credentials::new(
                decoded(url.username())?,
                decoded(password)?,
            )),
            None => None,
        };
        Some(Self {
            host: match url.host()? {
                Host::Domain(name) => name.to_owned(),
                Host::Ipv4(ip) => ip.to_string(),
                Host::Ipv6(ip) => ip.to_string(),
            },
            port: url.port().unwrap_or(port),
            encryption,
            login,
        })
    }

    async fn connect(&self, limit: Duration) -> Result<AsyncSmtpConnection, Error> {
        let tls = match self.encryption {
            Encryption::None => None,
            _ => Some(TlsParameters::new(self.host.clone())?),
        };
        let (at_once, later) = match self.encryption {
            Encryption::FromTheBeginning => (tls, None),
            _ => (None, tls),
        };
        let at = (self.host.as_str(), self.port);
        let me = ClientId::default();
        let mut connection =
            AsyncSmtpConnection::connect_tokio1(at, Some(limit), &me, at_once, None).await?;
        if let Some(tls) = later {
            connection.starttls(tls, &me).await?;
        }
        if let Some(login) = &self.login {
            let ways = [Mechanism::Plain, Mechanism::Login];
            connection.auth(&ways, login).await?;
        }
        Ok(connection)
    }
}

/// A mail on its way, and what became of it so far.
struct Letter<'a> {
    from: Address,
    text: Vec<u8>,
    /// The receivers, as the configuration has them.
    to: Vec<(&'a String, Address)>,
    /// Who has it, and what the server said to that.
    taken: Vec<(&'a String, String)>,
    /// Whom the server has refused.
    refused: Vec<(&'a String, Undelivered)>,
    stage: Stage,
}

impl<'a> Letter<'a> {
    async fn deliver(&mut self, server: &Server, limit: Duration) -> Result<(), Undelivered> {
        let connected = server.connect(limit).await;
        let mut connection = connected.map_err(|e| undelivered(&e, self.stage))?;
        self.stage = Stage::Talking;
        let parameters = self.parameters(&connection)?;
        let all = self.to.clone();
        if let Err(e) = self.transact(&mut connection, &parameters, &all).await {
            let mut left = all;
            left.retain(|(receiver, _)| !self.refused.iter().any(|(r, _)| r == receiver));
            // Some servers look at the receivers only once they have the text: each gets a mail of his own.
            if e.status().is_none() || left.len() < 2 {
                return Err(undelivered(&e, self.stage));
            }
            for one in left {
                let mut sent = connection.command(Rset).await.map(drop);
                if sent.is_ok() {
                    let one = std::slice::from_ref(&one);
                    sent = self.transact(&mut connection, &parameters, one).await;
                }
                match sent {
                    Ok(()) => {}
                    Err(e) if e.status().is_some() => {
                        self.refused.push((one.0, undelivered(&e, self.stage)));
                    }
                    Err(e) => return Err(undelivered(&e, self.stage)),
                }
            }
        }
        let _ = timeout(QUIT_WAIT, connection.quit()).await;
        Ok(())
    }

    /// One transaction (RFC 5321), whatever became of the receivers. An error is about all of them that the server has
    /// not refused.
    async fn transact(
        &mut self,
        connection: &mut AsyncSmtpConnection,
        parameters: &[MailParameter],
        to: &[(&'a String, Address)],
    ) -> Result<(), Error> {
        let mail = Mail::new(Some(self.from.clone()), parameters.to_vec());
        connection.command(mail).await?;
        let mut willing = vec![];
        for (receiver, address) in to {
            match connection.command(Rcpt::new(address.clone(), vec![])).await {
                Ok(_) => willing.push(*receiver),
                Err(e) if e.status().is_some() => {
                    self.refused.push((*receiver, undelivered(&e, self.stage)));
                }
                Err(e) => return Err(e),
            }
        }
        if willing.is_empty() {
            return Ok(());
        }
        connection.command(Data).await?;
        self.stage = Stage::Sent;
        let answer = connection.message(&self.text).await;
        if answer.as_ref().err().is_none_or(|e| e.status().is_some()) {
            self.stage = Stage::Talking;
        }
        let said: Vec<String> = answer?.message().map(str::to_owned).collect();
        let said = words::line(&said.join(" "));
        (self.taken).extend(willing.into_iter().map(|receiver| (receiver, said.clone())));
        Ok(())
    }

    fn parameters(
        &self,
        connection: &AsyncSmtpConnection,
    ) -> Result<Vec<MailParameter>, Undelivered> {
        let mut addresses = self.to.iter().map(|(_, address)| address);
        let plain = |address: &Address| AsRef::<str>::as_ref(address).is_ascii();
        if plain(&self.from) && addresses.all(plain) && self.text.is_ascii() {
            return Ok(vec![]);
        }
        if !connection
            .server_info()
            .supports_feature(Extension::SmtpUtfEight)
        {
            return Err(refused(
                "an address of `from` or `to` is not in ASCII, and the mail server takes none such (SMTPUTF8)",
            ));
        }
        let eight = MailParameter::Body(MailBodyParameter::EightBitMime);
        Ok(vec![MailParameter::SmtpUtfEight, eight])
    }

    /// What is to be said in the end. `result`: what went wrong with the connection, or with the mail for all.
    fn told(self, result: Result<(), Undelivered>) -> Result<String, Undelivered> {
        let Self {
            to,
            taken,
            refused,
            stage,
            ..
        } = self;
        let has = |receiver: &&String| taken.iter().any(|(r, _)| r == receiver);
        let lacking: Vec<&String> = to.iter().map(|(r, _)| *r).filter(|r| !has(r)).collect();
        if lacking.is_empty() {
            // Whatever came later: the server has said that it took the mail.
            return Ok(taken
                .into_iter()
                .map(|(_, said)| said)
                .next()
                .unwrap_or_default());
        }
        let mut whys: Vec<String> = vec![];
        let mut permanent = true;
        if let Err(e) = &result {
            permanent &= e.refused;
            whys.push(e.why.clone());
        }
        let mut for_good = vec![];
        for (receiver, e) in &refused {
            permanent &= e.refused;
            if e.refused {
                for_good.push((*receiver).clone());
            }
            whys.push(match to.len() {
                1 => e.why.clone(),
                _ => words::line(&format!("not {receiver}: {}", e.why)),
            });
        }
        let mut why = whys.join("; ");
        if !taken.is_empty() {
            let (taken, all) = (taken.len(), to.len());
            why = format!("{taken} of {all} receivers have the mail; {why}");
        }
        Err(Undelivered {
            refused: permanent,
            // Without an answer to the mail itself, nobody knows whether the server took it.
            perhaps: stage == Stage::Sent,
            lacking: lacking.into_iter().cloned().collect(),
            for_good: if permanent { vec![] } else { for_good },
            ..Undelivered::new(why)
        })
    }
}

fn undelivered(e: &Error, stage: Stage) -> Undelivered {
    let why = format!("the mail server: {}", trouble::of_mail(e, stage));
    Undelivered {
        refused: e.is_permanent(),
        ..Undelivered::new(words::line(&why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mail_server_is_named_by_an_address() {
        for (address, host, port, encryption) in [
            ("smtp://h.example", "h.example", 25, Encryption::None),
            (
                "smtp://127.0.0.1:2525/",
                "127.0.0.1",
                2525,
                Encryption::None,
            ),
            ("smtp+starttls://h", "h", 587, Encryption::StartTls),
            ("smtps://[::1]", "::1", 465, Encryption::FromTheBeginning),
        ] {
            let server = Server::of(address).expect(address);
            assert!(server.encryption == encryption, "{address}");
            assert_eq!((server.host.as_str(), server.port), (host, port));
            assert_eq!(server.login, None);
        }
        let server = Server::of("smtps://me%40h:p%3A%2F%25@h").expect("an address");
        let login = Credentials::new("me@h".to_owned(), "p:/%".to_owned());
        assert_eq!(server.login, Some(login));
        for bad in ["http://h", "smtp:", "smtp://u:%ff@h"] {
            assert!(Server::of(bad).is_none(), "{bad}");
        }
    }
}
