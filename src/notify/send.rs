//! Sends one message over a channel of any type.

use serde_json::json;

use super::{
    Undelivered, client, email,
    text::{Subject, Text, cut},
};
use crate::config::{Channel, MessageForm, Secret, Way};

/// What the services take, in characters: less than their limits, which count in their own ways.
const SLACK_MOST: usize = 3500;
const DISCORD_MOST: usize = 1900;
const TEAMS_MOST: usize = 15_000;

/// Returns what came back, in words. `hidden`: variables that no command gets.
pub(super) async fn send(
    channel: &Channel,
    text: &Text,
    hidden: &[String],
) -> Result<String, Undelivered> {
    match &channel.way {
        Way::Http { form, url } => {
            let body = match form {
                MessageForm::Webhook => text.json.clone(),
                MessageForm::Slack => slack(text),
                MessageForm::Discord => discord(text),
                MessageForm::Teams => teams(text),
            };
            post(url, &body, channel).await
        }
        Way::PagerDuty { url, routing_key } => {
            let mut said = String::new();
            for subject in &text.subjects {
                said = post(url, &pagerduty(subject, text, routing_key), channel).await?;
            }
            Ok(said)
        }
        Way::Email { smtp, from, to } => email::send(smtp, from, to, text, channel.timeout).await,
        Way::Command(argv) => command(argv, channel, text, hidden).await,
    }
}

async fn post(
    url: &Secret,
    body: &serde_json::Value,
    channel: &Channel,
) -> Result<String, Undelivered> {
    let body = body.to_string().into_bytes();
    let answer = client::post(url.expose(), "application/json", body, channel.timeout).await?;
    let text = crate::words::line(&answer.text);
    Ok(match text.is_empty() {
        true => answer.status.to_string(),
        false => format!("{}: {text}", answer.status),
    })
}

/// Slack reads `&`, `<` and `>` as its own signs: escaped, they mention and link nobody.
fn slack(text: &Text) -> serde_json::Value {
    let escaped = |text: &str| {
        text.replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;")
    };
    let title = escaped(&text.title);
    let body = escaped(&cut(&text.body, SLACK_MOST)).replace("```", "'''");
    json!({
        "text": format!("*{title}*\n```{body}```"),
        "link_names": false,
        "unfurl_links": false,
    })
}

/// `allowed_mentions` without any: no `@everyone` has an effect.
fn discord(text: &Text) -> serde_json::Value {
    let fence = |text: &str| text.replace("```", "'''");
    let title = fence(&cut(&text.title, 200));
    let body = fence(&cut(
        &text.body,
        DISCORD_MOST - title.chars().count().min(300),
    ));
    json!({
        "content": format!("**{title}**\n```\n{body}\n```"),
        "allowed_mentions": { "parse": [] },
    })
}

/// An adaptive card, as the workflows of Teams take it. Its text blocks read Markdown, so every line goes into one that
/// is monospaced, and signs of links are escaped.
fn teams(text: &Text) -> serde_json::Value {
    let plain = |text: &str| {
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            if "\\`*_[]<>#~|".contains(c) {
                out.push('\\');
            }
            out.push(c);
        }
        out.replace('\n', "\n\n")
    };
    let block = |text: &str, weight: &str| {
        json!({
            "type": "TextBlock", "text": text, "wrap": true, "weight": weight, "fontType": "Monospace",
        })
    };
    json!({
        "type": "message",
        "attachments": [{
            "contentType": "application/vnd.microsoft.card.adaptive",
            "content": {
                "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
                "type": "AdaptiveCard",
                "version": "1.4",
                "body": [
                    block(&plain(&text.title), "Bolder"),
                    block(&plain(&cut(&text.body, TEAMS_MOST)), "Default"),
                ],
            },
        }],
    })
}

/// An incident for each job, which its recovery resolves.
fn pagerduty(subject: &Subject, text: &Text, key: &Secret) -> serde_json::Value {
    let action = if subject.bad { "trigger" } else { "resolve" };
    let mut event = json!({
        "routing_key": key.expose(),
        "event_action": action,
        "dedup_key": cut(&subject.key, 250),
        "payload": {
            "summary": cut(&subject.title, 1000),
            "source": text.source,
            "severity": "error",
            "component": subject.job,
            "class": subject.kind,
            "custom_details": { "text": cut(&subject.text, 30_000) },
        },
    });
    if let Some(link) = &subject.link {
        event["links"] = json!([{ "href": link, "text": "the job in soloist" }]);
    }
    event
}

async fn command(
    argv: &[String],
    channel: &Channel,
    text: &Text,
    hidden: &[String],
) -> Result<String, Undelivered> {
    let [program, arguments @ ..] = argv else {
        return Err(Undelivered::new("no program is given"));
    };
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    for name in hidden {
        command.env_remove(name);
    }
    // The size of one variable is limited by the kernel.
    let (title, body) = (cut(&text.title, 1000), cut(&text.body, 30_000));
    command
        .env("SOLOIST_CHANNEL", &channel.name)
        .env("SOLOIST_TITLE", title)
        .env("SOLOIST_TEXT", body)
        .env("SOLOIST_BAD", if text.bad { "1" } else { "0" });
    let limit = channel.timeout;
    match crate::runner::plain(command, text.json.to_string().as_bytes(), limit).await {
        Ok(Some(status)) if status.success() => Ok("the command ended with 0".to_owned()),
        Ok(Some(status)) => Err(Undelivered {
            perhaps: true,
            ..Undelivered::new(format!("the command ended with {status}"))
        }),
        Ok(None) => Err(Undelivered {
            perhaps: true,
            ..Undelivered::new(format!(
                "the command did not end within {limit:?} and was killed"
            ))
        }),
        Err(e) => Err(Undelivered::new(format!("cannot start the command: {e}"))),
    }
}
