//! Channels of each type, and those that do not work.

use std::fs;

use serde_json::Value;

use super::{
    channel, kinds,
    servers::{Hook, MailServer, Mode, Oddity},
};
use crate::support::{GENEROUS, fleet::fleet, wait_for, wait_until};

const BAD: &str = "command = \"echo '<!channel> @everyone <b>x</b> \\u001b[2J'; false\"\nschedule = \"@every 1s\"";

#[test]
fn a_channel_that_hangs_babbles_and_is_busy_gets_the_message_in_the_end() {
    let modes = [
        Mode::Hangs,
        Mode::Babbles,
        Mode::Busy(1),
        Mode::Status(503),
        Mode::Takes,
    ];
    let hook = Hook::start_with(&modes);
    let other = Hook::start(Mode::Takes);
    let tables = channel("ops", &hook, "timeout = \"500ms\"") + &channel("other", &other, "");
    let fleet = fleet(1)
        .tables(&tables)
        .default("notify", "[\"ops\", \"other\"]")
        .job("bad", BAD)
        .start();
    // The other channel does not wait for it.
    other.wait("other", 1);
    let heard = hook.wait("ops", 1);
    assert_eq!(kinds(&heard[0]), [("bad", "failed")]);
    assert_eq!(heard[0]["tries"], 4);
    assert_eq!(heard[0]["perhaps_sent"], true);
    let log = fleet.instances[0].log_text();
    for said in [
        "did not answer within 500ms",
        "429 Too Many Requests",
        "503",
    ] {
        assert!(log.contains(said), "{said}: {log}");
    }
    // Lengths of time are said in one way.
    assert!(log.contains("pause=\"1.00 s\""), "{log}");
}

/// A channel that heard of the recovery first would show a good job as bad: PagerDuty would open an incident for ever.
/// What happens while a message is tried again is one message.
#[test]
fn what_a_channel_did_not_take_comes_before_what_happened_later() {
    let refusals = [Mode::Status(500); 3];
    let hook = Hook::start_with(&[&refusals[..], &[Mode::Takes]].concat());
    let dir = tempfile::tempdir().expect("a directory");
    let url = hook.url("ops");
    let mut fleet = fleet(1)
        .tables(&format!(
            "[notify.ops]\ntype = \"pagerduty\"\nrouting_key = \"abc\"\nurl = \"{url}\"\n"
        ))
        .default("notify", "[\"ops\"]")
        .job("bad", &super::failing(dir.path(), ""))
        .start();
    // The next try comes only after the recovery: in four seconds at least.
    wait_until("three tries", GENEROUS, || hook.paths().len() >= 3);
    fs::write(dir.path().join("ok"), "").expect("a file");
    fleet.set_job("worse", Some(BAD));
    fleet.reload(0);
    let heard = hook.wait("ops", 3);
    let of = |n: usize| {
        (
            heard[n]["event_action"].clone(),
            heard[n]["dedup_key"].clone(),
        )
    };
    let (trigger, resolve) = ("trigger".into(), "resolve".into());
    assert_eq!(
        (of(0).0, of(1).0, of(2).0),
        (trigger, "trigger".into(), resolve)
    );
    assert_eq!(of(0).1, of(2).1);
    let details = &heard[2]["payload"]["custom_details"]["message"];
    let all = details.as_str().expect("text");
    assert!(
        all.starts_with("2 jobs: 1 failed, 1 recovered: worse, bad"),
        "{all}"
    );
}

#[test]
fn a_mail_server_that_takes_a_mail_and_dies_gets_it_again_and_the_mail_says_so() {
    let server = MailServer::start_odd(&[(".", Oddity::Dies)]);
    let url = server.url();
    let tables = format!(
        "[notify.mail]\ntype = \"email\"\nsmtp = \"{url}\"\nfrom = \"soloist <s@example.org>\"\n\
         to = \"Ann <ann@example.org>\"\n"
    );
    let _fleet = fleet(1)
        .tables(&tables)
        .default("notify", "[\"mail\"]")
        .job("bad", BAD)
        .start();
    let mails = wait_for("two mails", GENEROUS, || {
        let mails = server.mails();
        (mails.len() >= 2).then_some(mails)
    });
    let id = |mail: &str| {
        let line = mail
            .lines()
            .find(|l| l.to_ascii_lowercase().starts_with("message-id"));
        line.expect("an id").to_owned()
    };
    assert!(
        mails[0].contains("Subject: bad failed (exit code 1)"),
        "{}",
        mails[0]
    );
    assert!(!mails[0].contains("repetition"), "{}", mails[0]);
    assert!(mails[0].contains("MIME-Version: 1.0"), "{}", mails[0]);
    let automatic = "Auto-Submitted: auto-generated";
    assert!(mails[0].contains(automatic), "{}", mails[0]);
    assert!(
        mails[1].contains("This may be a repetition"),
        "{}",
        mails[1]
    );
    assert_eq!(id(&mails[0]), id(&mails[1]));
}

/// The others have the mail: it is not sent to them again.
#[test]
fn a_receiver_who_is_refused_is_named_as_one_who_was_not_told() {
    let server = MailServer::start();
    let fleet = fleet(1)
        .tables(&format!(
            "[notify.mail]\ntype = \"email\"\nsmtp = \"{}\"\nfrom = \"s@example.org\"\n\
             to = [\"ann@example.org\", \"bad@example.org\"]\n",
            server.url()
        ))
        .default("notify", "[\"mail\"]")
        .job("bad", BAD)
        .env(0, "SOLOIST_FAILPOINT", "hurry")
        .start();
    fleet.wait_log(0, "gave a message up");
    let message = fleet.json(&["notify", "undelivered", "--json"])[0].take();
    let why = message["why"].as_str().expect("why");
    assert!(
        why.starts_with("1 of 2 receivers have the mail; not bad@example.org: "),
        "{why}"
    );
    assert_eq!(message["tries"], 6);
    let taken = server.taken();
    assert_eq!(taken.len(), 1, "{taken:?}");
    assert_eq!(taken[0].0, ["ann"]);
}

#[test]
fn a_command_gets_the_message_and_one_that_never_ends_is_killed() {
    let dir = tempfile::tempdir().expect("a directory");
    let (got, began) = (dir.path().join("got"), dir.path().join("began"));
    let script = format!(
        "cat > {0}.new; echo \\\"$SOLOIST_TITLE\\\" >> {0}.new; mv {0}.new {0}",
        got.display()
    );
    let hangs = format!("echo x >> {}; sleep 1000", began.display());
    let tables = format!(
        "[notify.one]\ntype = \"command\"\ncommand = [\"/bin/sh\", \"-c\", \"{script}\"]\n\
         [notify.two]\ntype = \"command\"\ntimeout = \"300ms\"\ncommand = [\"/bin/sh\", \"-c\", \"{hangs}\"]\n"
    );
    let fleet = fleet(1)
        .tables(&tables)
        .default("notify", "[\"one\", \"two\"]")
        .job("bad", BAD)
        .start();
    let text = wait_for("the command was called", GENEROUS, || {
        fs::read_to_string(&got).ok()
    });
    let (json, title) = text
        .split_once('\n')
        .map_or((text.as_str(), ""), |(j, t)| (j, t));
    let (json, title) = match json.rsplit_once('}') {
        Some((json, rest)) if title.is_empty() => (format!("{json}}}"), rest.to_owned()),
        _ => (json.to_owned(), title.to_owned()),
    };
    let message: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(kinds(&message), [("bad", "failed")]);
    assert_eq!(title.trim(), "bad failed (exit code 1)");
    fleet.wait_log(0, "was killed");
    wait_until("it is tried again", GENEROUS, || {
        fs::read_to_string(&began).is_ok_and(|text| text.lines().count() >= 2)
    });
}

/// A test that opened no incident would be seen by nobody.
#[test]
fn a_test_over_pagerduty_opens_an_incident_of_its_own() {
    let hook = Hook::start(Mode::Takes);
    let url = hook.url("pager");
    let fleet = fleet(1)
        .tables(&format!(
            "[notify.pager]\ntype = \"pagerduty\"\nrouting_key = \"abc\"\nurl = \"{url}\"\n"
        ))
        .job("test", "command = \"true\"")
        .start();
    let said = fleet.said(&["notify", "test", "pager"]);
    assert!(
        said.contains("200 OK") && said.contains("resolve it there"),
        "{said}"
    );
    let heard = hook.heard("pager");
    let actions: Vec<&str> = (heard.iter())
        .map(|e| e["event_action"].as_str().expect("an action"))
        .collect();
    // The first ends that of an earlier test: PagerDuty tells nobody of what joins an open incident.
    assert_eq!(actions, ["resolve", "trigger"]);
    assert_eq!(heard[1]["payload"]["severity"], "info");
    assert_eq!(heard[0]["dedup_key"], heard[1]["dedup_key"]);
    // No job has this name.
    let key = heard[1]["dedup_key"].as_str().expect("a key");
    assert!(key.ends_with("//test"), "{key}");
}

#[test]
fn a_test_shows_what_came_back() {
    let hook = Hook::start(Mode::Takes);
    let fleet = fleet(1)
        .tables(
            &(channel("ops", &hook, "")
                + "[notify.no]\ntype = \"command\"\ncommand = [\"false\"]\n"),
        )
        .job("x", "command = \"true\"")
        .start();
    let said = fleet.said(&["notify", "test", "ops"]);
    assert!(said.contains("200 OK: ok"), "{said}");
    assert_eq!(hook.heard("ops")[0]["title"], "soloist: a test");
    fleet.said(&["notify", "test", "ops"]);
    let heard = hook.heard("ops");
    assert_ne!(heard[0]["id"], heard[1]["id"], "a reader keeps both");
    hook.set(Mode::Status(404));
    let out = fleet.cli(&["notify", "test", "ops", "--json"]);
    assert_eq!(out.status.code(), Some(75));
    let said: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(said["delivered"], false);
    assert!(
        said["answer"].as_str().expect("words").contains("404"),
        "{said}"
    );
    hook.set(Mode::Busy(7));
    let out = fleet.cli(&["notify", "test", "ops"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    let again = "answered 429 Too Many Requests; it says to try again in 7.00 s";
    assert!(said.contains(again), "{said}");
    assert!(said.contains("and at the server that it names"), "{said}");
    let out = fleet.cli(&["notify", "test", "no"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(said.contains("and at the command that it names"), "{said}");
    let out = fleet.cli(&["notify", "test", "opps"]);
    assert_eq!(out.status.code(), Some(64));
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(said.contains("did you mean `ops`?"), "{said}");
}

/// What a command writes is text in a message of each type, and no longer than the service takes.
#[test]
fn hostile_output_is_text_in_a_message_of_each_type() {
    let hook = Hook::start(Mode::Takes);
    let server = MailServer::start();
    let dir = tempfile::tempdir().expect("a directory");
    let (script, got) = (dir.path().join("script"), dir.path().join("got"));
    // Long lines, and many; the last are what a message has.
    let line = "<!channel> <@U1> @everyone @here <b>x</b> [a](http://evil) ```";
    let bytes = "\\033[2J\\033]0;t\\007\\b\\r\\000\\342\\200\\256\\360\\237\\230\\200\\377";
    let text = format!(
        "i=0; while [ $i -lt 50 ]; do printf '%s {bytes}\\n' '{line}' '{}'; i=$((i+1)); done\n\
         printf '.\\r\\n.\\r\\nSubject: forged\\r\\n'; exit 1\n",
        "y".repeat(2000)
    );
    fs::write(&script, text).expect("a script");
    let mut tables = String::new();
    for kind in ["webhook", "slack", "discord", "teams", "pagerduty"] {
        let url = hook.url(kind);
        tables += &format!("[notify.{kind}]\ntype = \"{kind}\"\nurl = \"{url}\"\n");
    }
    tables += &format!(
        "routing_key = \"abc\"\n[notify.email]\ntype = \"email\"\nsmtp = \"{}\"\nfrom = \"s@example.org\"\n\
         to = \"ann@example.org\"\n[notify.command]\ntype = \"command\"\n\
         command = [\"/bin/sh\", \"-c\", 'printf \"%s\\n\" \"$SOLOIST_TITLE\" \"$SOLOIST_TEXT\" > {1}.new; \
         cat > {1}.json; mv {1}.new {1}']\n",
        server.url(),
        got.display()
    );
    let job = format!(
        "description = \"<!channel> @everyone\"\ncommand = [\"/bin/sh\", {:?}]\nschedule = \"@every 1s\"",
        script.display().to_string()
    );
    let _fleet = fleet(1)
        .tables(&tables)
        .default(
            "notify",
            "[\"webhook\", \"slack\", \"discord\", \"teams\", \"pagerduty\", \"email\", \"command\"]",
        )
        .default("output", "{ log = false }")
        .job("\"-rf.__x__\"", &job)
        .start();
    let one = |name: &str| hook.wait(name, 1)[0].clone();
    // Nothing that acts on a terminal, or that a reader does not see.
    let harmless = |text: &str| {
        let acts = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert_eq!(text.chars().find(|c| acts(*c)), None, "{text}");
    };
    let webhook = one("webhook");
    assert_eq!(kinds(&webhook), [("-rf.__x__", "failed")]);
    harmless(webhook["text"].as_str().expect("text"));
    harmless(webhook["items"][0]["run"]["output"].as_str().expect("text"));
    let slack = one("slack")["text"].as_str().expect("text").to_owned();
    assert!(!slack.contains(['<', '>']), "{slack}");
    assert_eq!(slack.matches("```").count(), 2, "{slack}");
    harmless(&slack);
    let discord = one("discord");
    assert_eq!(discord["allowed_mentions"]["parse"], Value::Array(vec![]));
    let content = discord["content"].as_str().expect("text");
    assert!(content.encode_utf16().count() <= 2000, "{content}");
    assert_eq!(content.matches("```").count(), 2, "{content}");
    harmless(content);
    let teams = one("teams");
    assert!(teams.to_string().len() < 28 << 10);
    let card = &teams["attachments"][0]["content"]["body"];
    assert!(
        card[0]["text"]
            .as_str()
            .expect("text")
            .contains("\\_\\_x\\_\\_"),
        "{card}"
    );
    let body = card[1]["text"].as_str().expect("text");
    assert!(!body.replace("\\<", "").contains('<'), "{body}");
    harmless(body);
    let pager = one("pagerduty");
    harmless(
        pager["payload"]["custom_details"]["text"]
            .as_str()
            .expect("text"),
    );
    let mails = wait_for("a mail", GENEROUS, || {
        Some(server.mails()).filter(|m| !m.is_empty())
    });
    let (head, _) = mails[0].split_once("\r\n\r\n").expect("a head");
    assert_eq!(head.matches("Subject: ").count(), 1, "{head}");
    assert!(
        head.contains("Subject: -rf.__x__ failed (exit code 1)"),
        "{head}"
    );
    assert!(
        head.contains("text/plain") && !mails[0].contains('\x1b'),
        "{}",
        mails[0]
    );
    assert!(
        mails[0].lines().all(|l| l.len() < 1000 && l != "."),
        "{}",
        mails[0]
    );
    let text = wait_for("the command was called", GENEROUS, || {
        fs::read_to_string(&got).ok()
    });
    assert!(
        text.starts_with("-rf.__x__ failed (exit code 1)\n"),
        "{text}"
    );
    harmless(&text);
    let json = fs::read_to_string(got.with_extension("json")).expect("what it read");
    let message: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(kinds(&message), [("-rf.__x__", "failed")]);
}
