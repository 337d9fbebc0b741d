//! Sends one message over a channel of any type.

use std::os::unix::process::ExitStatusExt as _;

use serde_json::json;

use super::{
    Undelivered, client, email,
    text::{Links, Subject, Text, cut, letters},
};
use crate::{
    config::{Channel, MessageForm, Secret, Way, show_duration},
    logic::notify::Kind,
};

/// What Slack takes, in characters: less than its limit.
const SLACK_MOST: usize = 3500;
/// What Discord takes is 2000; whether it counts characters or units of UTF-16, a text of so many units is short
/// enough.
const DISCORD_MOST: usize = 1900;
/// What Teams takes is 28 KB, with all that the card has around the text.
const TEAMS_MOST: usize = 26_000;

/// A message that `soloist notify test` sends.
const TEST: &str = Kind::Test.as_str();
/// How much of what a command wrote to stderr is told: lines, and characters.
const SAID_LINES: usize = 3;
const SAID_MOST: usize = 220;

/// Returns what came back, in words. `to`: which of the receivers are to get it; `hidden`: variables that no command
/// gets.
pub(super) async fn send(
    channel: &Channel,
    to: &[String],
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
                for action in actions(subject) {
                    let event = pagerduty(subject, action, text, routing_key);
                    said = post(url, &event, channel).await?;
                }
                if subject.kind == TEST {
                    said +=
                        "; the test is an open incident of the severity `info`: resolve it there";
                }
            }
            Ok(said)
        }
        Way::Email {
            smtp,
            from,
            to: all,
        } => email::send(smtp, (from, all, to), text, channel.timeout).await,
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
    let body = text.body.within(Links::Apart, SLACK_MOST, letters, cut);
    let body = escaped(&body).replace("```", "'''");
    let link = text
        .link
        .as_ref()
        .map(|link| format!("\n<{}>", escaped(link)));
    json!({
        "text": format!("*`{title}`*\n```{body}```{}", link.unwrap_or_default()),
        "link_names": false,
        "unfurl_links": false,
    })
}

/// `allowed_mentions` without any: no `@everyone` has an effect.
fn discord(text: &Text) -> serde_json::Value {
    let fence = |text: &str| text.replace("```", "'''");
    let title = escaped(&cut(&text.title, 200));
    // In these signs, it shows no preview.
    let link = text.link.as_ref().map(|link| format!("\n<{link}>"));
    let link = link.unwrap_or_default();
    let room = DISCORD_MOST.saturating_sub(units(&title) + units(&link));
    let body = fence(&text.body.within(Links::Apart, room, units, cut_units));
    json!({
        "content": format!("**{title}**\n```\n{body}\n```{link}"),
        "allowed_mentions": { "parse": [] },
    })
}

fn units(text: &str) -> usize {
    text.encode_utf16().count()
}

/// At most `most` units of UTF-16; what is cut is marked.
fn cut_units(text: &str, most: usize) -> String {
    if units(text) <= most {
        return text.to_owned();
    }
    let mut left = most.saturating_sub(1);
    let fits = |c: &char| match left.checked_sub(c.len_utf16()) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    let mut out: String = text.chars().take_while(fits).collect();
    out.push('…');
    out
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

/// The card with as much of the text as Teams takes.
fn teams(text: &Text) -> serde_json::Value {
    let mut most = TEAMS_MOST;
    loop {
        let card = teams_card(text, most);
        // Signs that are escaped, and letters beyond ASCII, take more than one byte.
        if most < 500 || card.to_string().len() <= TEAMS_MOST {
            return card;
        }
        most -= most / 8;
    }
}

/// An adaptive card, as the workflows of Teams take it. Its text blocks read Markdown, so every line goes into one that
/// is monospaced, and signs of links are escaped.
fn teams_card(text: &Text, most: usize) -> serde_json::Value {
    let body = text.body.within(Links::InTheText, most, letters, cut);
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

/// What happens to the incident of a job. A test opens one, because somebody is to see it; and it resolves that of the
/// test before, because PagerDuty tells nobody of what joins an open incident.
fn actions(subject: &Subject) -> &'static [&'static str] {
    match (subject.kind, subject.bad) {
        (TEST, _) => &["resolve", "trigger"],
        (_, true) => &["trigger"],
        (_, false) => &["resolve"],
    }
}

/// An incident for each job, which its recovery resolves.
fn pagerduty(subject: &Subject, action: &str, text: &Text, key: &Secret) -> serde_json::Value {
    let severity = if subject.kind == TEST {
        "info"
    } else {
        "error"
    };
    let mut event = json!({
        "routing_key": key.expose(),
        "event_action": action,
        "dedup_key": cut(&subject.key, 250),
        "payload": {
            "summary": cut(&subject.title, 1000),
            "source": text.source,
            "severity": severity,
            "component": subject.job,
            "class": subject.kind,
            "custom_details": { "text": cut(&subject.text, 30_000) },
        },
    });
    // Some of them have no event of their own.
    let names = text.body.all_names();
    if !names.is_empty() {
        let all = format!("{}\n\n{names}", text.title);
        event["payload"]["custom_details"]["message"] = cut(&all, 30_000).into();
    }
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
    let (title, body) = (
        cut(&text.title, 1000),
        text.body.within(Links::InTheText, 30_000, letters, cut),
    );
    command
        .env("SOLOIST_CHANNEL", &channel.name)
        .env("SOLOIST_TITLE", title)
        .env("SOLOIST_TEXT", body)
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
    use super::{
        super::text::{Body, Details, Names},
        *,
    };
    use crate::model::JobName;

    fn text(body: &str) -> Text {
        Text {
            id: "1".to_owned(),
            title: "x".repeat(100) + " failed",
            body: Body {
                details: vec![Details {
                    facts: format!("{body}\n"),
                    ..Details::default()
                }],
                ..Body::default()
            },
            link: None,
            json: json!({}),
            bad: true,
            source: "a".to_owned(),
            subjects: vec![Subject {
                job: "x".repeat(100),
                kind: "failed",
                bad: true,
                title: format!("{body} failed"),
                text: body.to_owned(),
                link: None,
                key: body.to_owned(),
            }],
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
            assert!((20_000..28 << 10).contains(&bytes), "{piece}: {bytes}");
            let said = &said["attachments"][0]["content"]["body"][1]["text"];
            let mut before = ' ';
            for c in said.as_str().expect("text").chars() {
                assert!(!"<>[]*`".contains(c) || before == '\\', "{piece}: {c}");
                before = if before == '\\' { ' ' } else { c };
            }
            let said = pagerduty(&text.subjects[0], "trigger", &text, &Secret::new("k"));
            assert!(said.to_string().len() < 500_000, "{piece}");
            let count = |v: &serde_json::Value| v.as_str().expect("text").chars().count();
            assert!(count(&said["payload"]["summary"]) <= 1024);
            assert!(count(&said["dedup_key"]) <= 255);
        }
    }

    #[test]
    fn an_event_of_pagerduty_names_the_jobs_that_have_none() {
        let mut text = text("x");
        let event = |text: &Text| pagerduty(&text.subjects[0], "trigger", text, &Secret::new("k"));
        let details = event(&text)["payload"]["custom_details"].clone();
        assert_eq!(details, json!({ "text": "x" }));
        text.title = "2 jobs failed".to_owned();
        text.body.names = vec![Names {
            what: "failed",
            jobs: vec![JobName::new("a"), JobName::new("b")],
            unnamed: 0,
        }];
        let details = &event(&text)["payload"]["custom_details"];
        assert_eq!(details["message"], "2 jobs failed\n\nfailed: a, b\n");
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
        text.body.details[0].link.clone_from(&link);
        text.link = link;
        let said = slack(&text);
        let said = said["text"].as_str().expect("text");
        let end = "two\nlines\n```\n<https://s.example/#/job/a?o=1&amp;x=2>";
        assert!(said.ends_with(end), "{said}");
        let said = discord(&text);
        let said = said["content"].as_str().expect("text");
        let end = "two\nlines\n\n```\n<https://s.example/#/job/a?o=1&x=2>";
        assert!(said.ends_with(end), "{said}");
        let said = text.body.whole(Links::InTheText);
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

    #[test]
    fn what_fits_is_not_cut() {
        let short = text("two\nlines");
        for said in [slack(&short), discord(&short), teams(&short)] {
            assert!(!said.to_string().contains('…'), "{said}");
        }
        assert_eq!(cut_units("a\u{1f600}b", 4), "a\u{1f600}b");
        assert_eq!(cut_units("a\u{1f600}b", 3), "a…");
        assert_eq!(cut_units("a\u{1f600}bc", 4), "a\u{1f600}…");
    }
}
