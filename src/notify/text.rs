//! What a message says: a title, a text, and the same as JSON. Made from facts when it is sent.

mod body;
mod facts;
mod heading;
mod item;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use serde_json::{Value as Json, json};

#[cfg(test)]
pub(super) use self::body::{Details, Names};
pub(super) use self::{
    body::{Body, Links, cut, letters},
    item::{about, item, refreshed, test_message},
};
use crate::{
    config::Config,
    logic::notify::{Item, Kind, Message},
    model::{InstanceId, rfc3339_ms},
    words,
};

/// What a message says of where it comes from.
pub(super) struct Surroundings {
    namespace: String,
    public_url: Option<String>,
    from: InstanceId,
    now: i64,
}

impl Surroundings {
    pub(super) fn of(config: &Config, from: &InstanceId, now: i64) -> Self {
        let http = config.http.as_ref();
        Self {
            namespace: config.store.namespace.clone(),
            public_url: http.and_then(|http| http.public_url.clone()),
            from: from.clone(),
            now,
        }
    }

    /// To the job on the page.
    fn link(&self, item: &Item) -> Option<String> {
        let url = self
            .public_url
            .as_ref()
            .filter(|_| item.kind != Kind::Test)?;
        let job = &item.job;
        Some(match &item.run {
            Some(run) => format!("{url}/#/job/{job}?o={}", run.occurrence),
            None => format!("{url}/#/job/{job}"),
        })
    }
}

/// A message, ready to be sent.
pub(super) struct Text {
    /// The same for each try.
    pub(super) id: String,
    /// One line.
    pub(super) title: String,
    pub(super) body: Body,
    /// To what it is about on the page.
    pub(super) link: Option<String>,
    pub(super) json: Json,
    pub(super) bad: bool,
    /// The instance that sends it.
    pub(super) source: String,
    pub(super) subjects: Vec<Subject>,
}

/// What is said of one job.
pub(super) struct Subject {
    pub(super) job: String,
    pub(super) kind: &'static str,
    pub(super) bad: bool,
    pub(super) title: String,
    pub(super) text: String,
    pub(super) link: Option<String>,
    /// Names the trouble of this job in this fleet.
    pub(super) key: String,
}

impl Text {
    pub(super) fn of(message: &Message, id: &str, s: &Surroundings) -> Self {
        let title = heading::of_message(message, s.now);
        let alone = message.items.len() == 1 && message.more == 0;
        let mut body = Body::default();
        if message.perhaps_sent {
            body.intro += "This may be a repetition: an earlier try to send this message may have succeeded.\n\n";
        }
        if s.now - message.at > 60_000 && message.tries > 0 {
            let late = words::span(s.now - message.at);
            let _ = write!(
                body.intro,
                "This message is {late} late: earlier tries failed.\n\n"
            );
        }
        let mut subjects = vec![];
        for item in &message.items {
            let mut details = facts::of_item(item, s, alone);
            let title = heading::of_item(item, s.now);
            subjects.push(Subject {
                job: item.job.to_string(),
                kind: item.kind.as_str(),
                bad: item.bad,
                text: details.text(Links::InTheText),
                link: details.link.clone(),
                key: key(item, s),
                title: title.clone(),
            });
            details.title = (!alone).then_some(title);
            body.details.push(details);
        }
        let link = match alone {
            true => subjects.first().and_then(|subject| subject.link.clone()),
            false => s.public_url.as_ref().map(|url| format!("{url}/")),
        };
        if message.items.len() > heading::TITLE_NAMES || message.more > 0 {
            let (groups, rest) = heading::groups(message);
            let names = groups.iter().map(|g| body::Names {
                what: g.happened(),
                jobs: g.jobs.iter().map(|job| (*job).clone()).collect(),
                unnamed: g.unnamed,
            });
            (body.names, body.rest) = (names.collect(), rest);
        }
        if !alone {
            body.closing = "\nmore:        soloist status\n".to_owned();
        }
        let items: Vec<Json> = message.items.iter().map(|i| item_json(i, s)).collect();
        let bad = message.items.iter().any(|i| i.bad);
        let json = json!({
            "id": id,
            "title": title,
            "text": body.whole(Links::InTheText),
            "bad": bad,
            "channel": message.channel,
            "namespace": s.namespace,
            "sent_by": s.from,
            "at": rfc3339_ms(message.at),
            "perhaps_sent": message.perhaps_sent,
            "tries": message.tries,
            "items": items,
            "others": message.others.iter().map(|(job, kind)| json!({"job": job, "kind": kind})).collect::<Vec<_>>(),
            "more": message.more,
        });
        Self {
            id: id.to_owned(),
            title,
            body,
            link,
            json,
            bad,
            source: s.from.to_string(),
            subjects,
        }
    }
}

/// What names the incident of a job.
fn key(item: &Item, s: &Surroundings) -> String {
    match item.kind {
        // No job has this name: a test must not resolve the incident of one that is called `test`.
        Kind::Test => format!("soloist/{}//test", s.namespace),
        _ => format!("soloist/{}/{}", s.namespace, item.job),
    }
}

fn item_json(item: &Item, s: &Surroundings) -> Json {
    let run = item.run.as_ref().map(|run| {
        json!({
            "run_id": run.id,
            "occurrence": run.occurrence.to_string(),
            "local": facts::local(run.occurrence.0, &item.zone),
            "trigger": run.trigger,
            "attempt": run.attempt,
            "outcome": run.outcome,
            "exit_code": run.exit_code,
            "signal": run.signal,
            "error": run.error,
            "instance": run.instance,
            "host": run.host,
            "started_at": run.started_at.map(rfc3339_ms),
            "duration_ms": run.duration_ms,
            "lateness_ms": run.lateness_ms,
            "waited_for": run.waited.map(|(wait, _)| wait),
            "count": run.count,
            "output": run.output,
        })
    });
    json!({
        "job": item.job,
        "kind": item.kind,
        "bad": item.bad,
        "streak": item.streak,
        "since": rfc3339_ms(item.since),
        "changes": item.changes,
        "next": item.next.map(rfc3339_ms),
        "paused": item.now.paused.is_some(),
        "expected_ms": item.expected,
        "never": item.never,
        "link": s.link(item),
        "run": run,
    })
}
