//! Sends one message over a channel of any type.

use std::os::unix::process::ExitStatusExt as _;

use serde_json::json;

use super::{
    Undelivered, client, email,
    text::{JobText, Links, Text, cut, units},
};
use crate::{
    config::{Channel, MessageForm, Secret, Way, show_duration},
    logic::notify::Kind,
};

/// What the services take, in units of UTF-16, less than their limits: Slack 4000, Discord 2000. Teams takes 28 KB of
/// JSON, in which a unit takes at most four bytes.
const SLACK_MOST: usize = 3500;
const DISCORD_MOST: usize = 1900;
const TEAMS_MOST: usize = 6000;
/// The size of one variable is limited by the kernel, and that of an event by PagerDuty.
const MOST: usize = 30_000;

/// A message that `soloist notify test` sends.
const TEST: &str = Kind::Test.as_str();
/// How much of what a command wrote to stderr is told: lines, and characters.
const SAID_LINES: usize = 3;
const SAID_MOST: usize = 220;

/// Returns what came back, in words. `only`: these receivers lack it; empty: all. `hidden`: variables that no command
/// gets.
pub(super) async fn send(
    channel: &Channel,
    only: &[String],
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
            for job in text.jobs.iter().chain(&text.others) {
                // A test opens an incident, because somebody is to see it; and it resolves that of the test before,
                // because PagerDuty tells nobody of what joins an open incident.
                let actions: &[&str] = match (job.kind, job.bad) {
                    (TEST, _) => &["resolve", "trigger"],
                    (_, true) => &["trigger"],
                    (_, false) => &["resolve"],
                };
                for action in actions {
                    let event = pagerduty(job, action, text, routing_key);
                    said = post(url, &event, channel).await?;
                }
                if job.kind == TEST {
                    said +=
                        "; the test is an open incident of the severity `info`: resolve it there";
                }
            }
            Ok(said)
        }
        Way::Email { smtp, from, to } => {
            let lacks = |receiver: &&String| only.is_empty() || only.contains(receiver);
            let lacking: Vec<&String> = to.iter().filter(lacks).collect();
            email::send(smtp, from, (to, &lacking), text, channel.timeout).await
        }
        Way::Command(argv) => command(argv, channel, text, hidden).await,
        Way::Unread => Err(Undelivered::new("this process does not know where to send")),
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
    // As code: Slack has no way to escape `*` and `_`.
    let title = escaped(&text.title).replace('`', "'");
    let body = escaped(&text.body(Links::Apart, SLACK_MOST)).replace("```", "'''");
    let link = text.link.as_deref();
    let link = link.map(|link| format!("\n<{}>", escaped(link)));
    json!({
        "text": format!("*`{title}`*\n```{body}```{}", link.unwrap_or_default()),
        "link_names": false,
        "unfurl_links": false,
    })
}

/// `allowed_mentions` without any: no `@everyone` has an effect.
fn discord(text: &Text) -> serde_json::Value {
    let title = escaped(&cut(&text.title, 200));
    // In these signs, it shows no preview.
    let link = text.link.as_ref().map(|link| format!("\n<{link}>"));
    let link = link.unwrap_or_default();
    let room = DISCORD_MOST.saturating_sub(units(&title) + units(&link));
    let body = text.body(Links::Apart, room).replace("```", "'''");
    json!({
        "content": format!("**{title}**\n```\n{body}\n```{link}"),
        "allowed_mentions": { "parse": [] },
    })
}

/// Text for what reads Markdown.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if "\\`*_[]<>#~|".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// An adaptive card, as the workflows of Teams take it. Its text blocks read Markdown, so every line goes into one that
/// is monospaced, and signs of links are escaped.
fn teams(text: &Text) -> serde_json::Value {
    let body = text.body(Links::InTheText, TEAMS_MOST);
    let plain = |text: &str| escaped(text).replace('\n', "\n\n");
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
                    block(&plain(&cut(&text.title, 1000)), "Bolder"),
                    block(&plain(&body), "Default"),
                ],
            },
        }],
    })
}

/// An incident for each job, which its recovery resolves.
fn pagerduty(job: &JobText, action: &str, text: &Text, key: &Secret) -> serde_json::Value {
    let severity = if job.kind == TEST { "info" } else { "error" };
    // Some jobs of the message may have no event of their own.
    let message = cut(&format!("{}\n\n{}", text.title, text.intro), MOST);
    let mut event = json!({
        "routing_key": key.expose(),
        "event_action": action,
        "dedup_key": cut(&job.key, 250),
        "payload": {
            "summary": cut(&job.title, 1000),
            "source": text.source,
            "severity": severity,
            "component": job.job,
            "class": job.kind,
            "custom_details": { "text": cut(&job.text(Links::InTheText, MOST), MOST), "message": message },
        },
    });
    if let Some(link) = &job.link {
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
    command
        .env("SOLOIST_CHANNEL", &channel.name)
        .env("SOLOIST_TITLE", cut(&text.title, 1000))
        .env("SOLOIST_TEXT", text.body(Links::InTheText, MOST))
        .env("SOLOIST_BAD", if text.bad { "1" } else { "0" });
    let limit = channel.timeout;
    let failed = |what: String, said: &[u8]| {
        let secrets: Vec<String> = hidden
            .iter()
            .filter_map(|n| std::env::var(n).ok())
            .collect();
        let said = match last_words(said, &secrets) {
            said if said.is_empty() => "; it wrote nothing to stderr".to_owned(),
            said => format!(": {said}"),
        };
        Err(Undelivered {
            perhaps: true,
            ..Undelivered::new(what + &said)
        })
    };
    match crate::runner::plain(command, text.json.to_string().as_bytes(), limit).await {
        Ok((Some(status), _)) if status.success() => Ok("the command ended with 0".to_owned()),
        Ok((Some(status), said)) => {
            let how = match (status.code(), status.signal()) {
                (Some(code), _) => format!("exit code {code}"),
                (None, Some(signal)) => crate::view::signal_name(signal),
                (None, None) => status.to_string(),
            };
            failed(format!("the command ended with {how}"), &said)
        }
        Ok((None, said)) => failed(
            format!(
                "the command did not end within {} and was killed",
                show_duration(limit)
            ),
            &said,
        ),
        Err(e) => Err(Undelivered::new(format!("cannot start the command: {e}"))),
    }
}

/// The last lines that a command wrote, as one line of bounded length. `secrets`: values that it may know only by their
/// variables.
fn last_words(said: &[u8], secrets: &[String]) -> String {
    let mut text = String::from_utf8_lossy(said).into_owned();
    // The longest first: one may be a part of another. A short one is no secret, and may stand in any text.
    let mut secrets: Vec<&String> = secrets.iter().filter(|s| s.len() >= 4).collect();
    secrets.sort_by_key(|s| std::cmp::Reverse(s.len()));
    for secret in secrets {
        text = text.replace(secret.as_str(), "***");
    }
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    let last = lines.get(lines.len().saturating_sub(SAID_LINES)..);
    let safe = crate::text::line(&last.unwrap_or_default().join("; ")).replace('\t', " ");
    match safe.chars().count().saturating_sub(SAID_MOST) {
        0 => safe,
        many => format!("…{}", safe.chars().skip(many + 1).collect::<String>()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(body: &str) -> Text {
        Text {
            id: "1".to_owned(),
            title: "x".repeat(100) + " failed",
            intro: String::new(),
            others: vec![],
            jobs: vec![JobText {
                job: "x".repeat(100),
                kind: "failed",
                bad: true,
                title: format!("{body} failed"),
                facts: format!("{body}\n"),
                link: None,
                output: String::new(),
                key: body.to_owned(),
            }],
            link: None,
            json: json!({}),
            bad: true,
            source: "a".to_owned(),
        }
    }

    /// However long a text is, and whatever it consists of, a service takes it, and shows it as text alone.
    #[test]
    fn hostile_text_is_cut_to_what_each_service_takes_and_stays_text() {
        for piece in [
            "<!channel> <@U1> @everyone @here <b>x</b> &amp; ",
            "```",
            "``",
            "[x](http://evil.example) \\*_~|#>",
            "</at><script>",
            "\u{1f600}",
            "é\n",
            "\\\"",
        ] {
            let text = text(&piece.repeat(10_000));
            let said = slack(&text);
            let said = said["text"].as_str().expect("text");
            assert!(said.chars().count() < 40_000, "{piece}");
            assert!(!said.contains(['<', '>']), "{piece}");
            assert_eq!(said.matches("```").count(), 2, "{piece}");
            let said = discord(&text);
            assert_eq!(said["allowed_mentions"]["parse"], json!([]));
            let said = said["content"].as_str().expect("text");
            let units = said.encode_utf16().count();
            assert!((1500..=2000).contains(&units), "{piece}: {units}");
            assert_eq!(said.matches("```").count(), 2, "{piece}");
            let said = teams(&text);
            let bytes = said.to_string().len();
            assert!((6_000..28 << 10).contains(&bytes), "{piece}: {bytes}");
            let said = &said["attachments"][0]["content"]["body"][1]["text"];
            let mut before = ' ';
            for c in said.as_str().expect("text").chars() {
                assert!(!"<>[]*`".contains(c) || before == '\\', "{piece}: {c}");
                before = if before == '\\' { ' ' } else { c };
            }
            let said = pagerduty(&text.jobs[0], "trigger", &text, &Secret::new("k"));
            assert!(said.to_string().len() < 500_000, "{piece}");
            let count = |v: &serde_json::Value| v.as_str().expect("text").chars().count();
            assert!(count(&said["payload"]["summary"]) <= 1024);
            assert!(count(&said["dedup_key"]) <= 255);
        }
    }

    #[test]
    fn a_title_is_text() {
        let mut text = text("x");
        text.title = "__all__ `*failed*`".to_owned();
        let said = slack(&text);
        let said = said["text"].as_str().expect("text");
        assert!(said.starts_with("*`__all__ '*failed*'`*\n"), "{said}");
        let said = discord(&text);
        let said = said["content"].as_str().expect("text");
        let title = "**\\_\\_all\\_\\_ \\`\\*failed\\*\\`**\n";
        assert!(said.starts_with(title), "{said}");
    }

    /// These services show the text as it is, so that a link in it cannot be clicked.
    #[test]
    fn a_link_stands_beside_the_text() {
        let link = Some("https://s.example/#/job/a?o=1&x=2".to_owned());
        let mut text = text("two\nlines");
        text.jobs[0].link.clone_from(&link);
        text.link = link;
        let said = slack(&text);
        let said = said["text"].as_str().expect("text");
        let end = "two\nlines\n```\n<https://s.example/#/job/a?o=1&amp;x=2>";
        assert!(said.ends_with(end), "{said}");
        let said = discord(&text);
        let said = said["content"].as_str().expect("text");
        let end = "two\nlines\n\n```\n<https://s.example/#/job/a?o=1&x=2>";
        assert!(said.ends_with(end), "{said}");
        let said = text.body(Links::InTheText, usize::MAX);
        assert!(
            said.ends_with("link:        https://s.example/#/job/a?o=1&x=2\n"),
            "{said}"
        );
    }

    #[test]
    fn what_a_command_says_is_short_acts_on_nothing_and_has_no_secret() {
        let secrets = [
            "hunter2".to_owned(),
            "hunter2-long".to_owned(),
            "4711".to_owned(),
            "no".to_owned(),
        ];
        let words = |said: &str| last_words(said.as_bytes(), &secrets);
        assert_eq!(words("no pin 4711"), "no pin ***");
        assert_eq!(words(""), "");
        assert_eq!(words("\n \r\n"), "");
        assert_eq!(words("1\n2\n\n3\n4\n"), "2; 3; 4");
        assert_eq!(
            words("no\x1b[2J route to hunter2-long or hunter2\u{202e}\n"),
            "no\\x1b[2J route to *** or ***\\u{202e}"
        );
        let long = words(&("é".repeat(4000) + "the end"));
        assert!(
            long.starts_with('…') && long.ends_with("éthe end"),
            "{long}"
        );
        assert_eq!(long.chars().count(), SAID_MOST);
        assert_eq!(last_words(b"\xff\xfeend", &[]), "\u{fffd}\u{fffd}end");
    }
}
