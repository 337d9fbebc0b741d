//! What a message says: a title, a text, and the same as JSON. Made when it is sent, with what is true of its jobs
//! then.

mod facts;
#[cfg(test)]
mod tests;

use std::{cmp::Reverse, collections::BTreeMap, fmt::Write as _};

use serde_json::{Value as Json, json};

pub(super) use self::facts::last_lines;
use crate::{
    config::Config,
    logic::{
        claim::State,
        notify::{Item, Kind, Message},
    },
    model::{InstanceId, JobName, Outcome, rfc3339_ms},
    view::signal_name,
    words::{self, number},
};

/// How many jobs the title of a message about several names, and how much of a name.
const TITLE_NAMES: usize = 3;
const TITLE_NAME_MOST: usize = 40;
/// How much of the names of jobs to which the same happened the text has: the facts of the first need room, too.
const NAMES_MOST: usize = 600;

/// What is known when a message is sent.
pub(super) struct Surroundings<'a> {
    pub(super) config: &'a Config,
    /// Those that the store has of the jobs of the message.
    pub(super) states: &'a BTreeMap<JobName, State>,
    pub(super) from: &'a InstanceId,
    pub(super) now: i64,
}

impl Surroundings<'_> {
    fn url(&self) -> Option<&String> {
        self.config.http.as_ref()?.public_url.as_ref()
    }

    /// To the job on the page.
    fn link(&self, item: &Item) -> Option<String> {
        let url = self.url().filter(|_| item.kind != Kind::Test)?;
        let run = item.run.as_ref();
        let at = run.map(|run| format!("?o={}", run.occurrence));
        Some(format!(
            "{url}/#/job/{}{}",
            item.job,
            at.unwrap_or_default()
        ))
    }
}

/// A message, ready to be sent.
pub(super) struct Text {
    /// The same for each try.
    pub(super) id: String,
    /// One line.
    pub(super) title: String,
    /// What stands before the facts of the jobs.
    pub(super) intro: String,
    pub(super) jobs: Vec<JobText>,
    /// The others, of which nothing more is known than what happened.
    pub(super) others: Vec<JobText>,
    /// To what it is about on the page.
    pub(super) link: Option<String>,
    pub(super) json: Json,
    pub(super) bad: bool,
    /// The instance that sends it.
    pub(super) source: String,
}

/// What is said of one job.
pub(super) struct JobText {
    pub(super) job: String,
    pub(super) kind: &'static str,
    pub(super) bad: bool,
    pub(super) title: String,
    pub(super) facts: String,
    pub(super) link: Option<String>,
    pub(super) output: String,
    /// Names the trouble of this job in this fleet.
    pub(super) key: String,
}

/// Where the links to the page are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    InTheText,
    /// The service shows the text as it is, so that a link in it could not be clicked.
    Apart,
}

impl Text {
    pub(super) fn of(message: &Message, id: &str, s: &Surroundings<'_>) -> Self {
        let mut message = message.clone();
        arrange(&mut message);
        let title = heading(&message, s.now);
        let alone = message.items.len() == 1 && message.others.is_empty();
        let mut intro = String::new();
        if message.perhaps_sent {
            intro += "This may be a repetition: an earlier try to send this message may have succeeded.\n\n";
        }
        if s.now - message.at > 60_000 {
            let late = words::span(s.now - message.at);
            let _ = write!(
                intro,
                "This message is {late} late: the channel did not work before.\n\n"
            );
        }
        if message.items.len() > TITLE_NAMES {
            for (kind, _, jobs) in groups(&message) {
                let names = jobs.iter().map(|job| job.as_str()).collect::<Vec<_>>();
                let names = cut(&names.join(", "), NAMES_MOST);
                let _ = writeln!(intro, "{}: {names}", happened(kind, jobs.len()));
            }
            if message.more > 0 {
                let _ = writeln!(intro, "and {} more", number(message.more));
            }
        }
        if !alone {
            intro += &facts::line("more", "soloist status");
            intro.push('\n');
        }
        let of_job = |item: &Item| JobText {
            job: item.job.to_string(),
            kind: item.kind.as_str(),
            bad: item.bad,
            title: item_title(item, s.now),
            facts: facts::of_item(item, s, alone),
            link: s.link(item),
            output: facts::output(item, alone),
            key: match item.kind {
                // No job has this name: a test must not resolve the incident of one that is called `test`.
                Kind::Test => format!("soloist/{}//test", s.config.store.namespace),
                _ => format!("soloist/{}/{}", s.config.store.namespace, item.job),
            },
        };
        let mut text = Self {
            id: id.to_owned(),
            link: match alone {
                true => s.link(&message.items[0]),
                false => s.url().map(|url| format!("{url}/")),
            },
            bad: ends_bad(&message),
            source: s.from.to_string(),
            jobs: message.items.iter().map(of_job).collect(),
            others: others(&message).iter().map(of_job).collect(),
            json: Json::Null,
            title,
            intro,
        };
        let others = message.others.iter();
        text.json = json!({
            "id": id,
            "title": text.title,
            "text": text.body(Links::InTheText, usize::MAX),
            "bad": text.bad,
            "channel": message.channel,
            "namespace": s.config.store.namespace,
            "sent_by": s.from,
            "at": rfc3339_ms(message.at),
            "perhaps_sent": message.perhaps_sent,
            "tries": message.tries,
            "items": message.items.iter().map(|i| facts::json(i, s)).collect::<Vec<_>>(),
            "others": others.map(|(job, kind)| json!({"job": job, "kind": kind})).collect::<Vec<_>>(),
            "more": message.others.len() as u64 + message.more,
        });
        text
    }

    /// At most `most` units of UTF-16.
    pub(super) fn body(&self, links: Links, most: usize) -> String {
        let parts: Vec<String> = match &self.jobs[..] {
            [one] => vec![one.text(links, most.saturating_sub(units(&self.intro)))],
            all => {
                let text =
                    |job: &JobText| format!("{}\n{}", job.title, job.text(links, usize::MAX));
                all.iter().map(text).collect()
            }
        };
        cut(&format!("{}{}", self.intro, parts.join("\n")), most)
    }
}

impl JobText {
    /// At most `most` units of UTF-16, as far as the output is what makes it too long: its end says most.
    pub(super) fn text(&self, links: Links, most: usize) -> String {
        let mut out = self.facts.clone();
        if let Some(link) = self.link.as_ref().filter(|_| links == Links::InTheText) {
            out += &facts::line("link", link);
        }
        let room = most.saturating_sub(units(&out));
        match self.output.split_once('\n') {
            Some((title, lines)) if units(&self.output) > room => {
                let room = room.saturating_sub(units(title) + 3);
                let _ = write!(out, "{title}\n  {}", cut_begin(lines, room));
            }
            _ => out += &self.output,
        }
        out
    }
}

/// Puts the jobs that are bad now before the others, each by their names. What is told of one job stays in the order in
/// which it happened.
fn arrange(message: &mut Message) {
    let items = message.items.iter();
    let last: BTreeMap<JobName, bool> = items.map(|i| (i.job.clone(), i.bad)).collect();
    message
        .items
        .sort_by_cached_key(|i| (!last.get(&i.job).copied().unwrap_or(i.bad), i.job.clone()));
    message
        .others
        .sort_by_cached_key(|(job, kind)| (*kind == Kind::Recovered, job.clone()));
}

/// What happened to `n` jobs.
fn happened(kind: Kind, n: usize) -> &'static str {
    let one = n == 1;
    match kind {
        Kind::Failed => "failed",
        Kind::TimedOut => "timed out",
        Kind::Crashed => "crashed",
        Kind::Unknown => "ended in an unknown way",
        Kind::LeaseLost if one => "lost its lease",
        Kind::LeaseLost => "lost their leases",
        Kind::Missed if one => "was missed",
        Kind::Missed => "were missed",
        Kind::Late => "started late",
        Kind::TooLong => "took unusually long",
        Kind::TooShort => "ended unusually soon",
        Kind::Recovered => "recovered",
        Kind::Overdue if one => "has had no success for too long",
        Kind::Overdue => "have had no success for too long",
        Kind::Test => "test",
    }
}

/// The title of what is said of one job.
fn item_title(item: &Item, now: i64) -> String {
    let (job, run) = (&item.job, item.run.as_ref());
    let took = run.and_then(|run| run.duration_ms);
    let more = match (item.kind, run) {
        (Kind::Test, _) => return "soloist: a test".to_owned(),
        (Kind::Unknown, _) => return format!("{job}: nobody knows how its run ended"),
        (Kind::Overdue, _) => {
            let so_far = if item.never { "so far, " } else { "" };
            let since = words::span(now - item.since);
            return format!("{job}: no success {so_far}for {since}");
        }
        (Kind::Late, Some(run)) => {
            let late = words::took(run.lateness_ms.unwrap_or(0));
            return format!("{job} started {late} late");
        }
        (Kind::TooLong | Kind::TooShort, _) => {
            let (took, usual) = (took.unwrap_or(0), item.expected.unwrap_or(0));
            let (took, usual) = (words::took(took), words::took(usual));
            format!(": after {took}, usually {usual}")
        }
        (_, Some(run)) => match (run.exit_code, run.signal) {
            (Some(code), _) if run.outcome == Outcome::Failed => format!(" (exit code {code})"),
            (_, Some(signal)) => format!(" ({})", signal_name(signal)),
            _ => String::new(),
        },
        _ => String::new(),
    };
    format!("{job} {}{more}", happened(item.kind, 1))
}

/// The jobs that a message names, each once, by what happened to it last: those that are bad before the others (true),
/// and what happened to most of them first.
fn groups(message: &Message) -> Vec<(Kind, bool, Vec<&JobName>)> {
    let mut last: BTreeMap<&JobName, (Kind, bool)> = BTreeMap::new();
    let items = message.items.iter();
    last.extend(items.map(|i| (&i.job, (i.kind, !i.bad))));
    let others = message.others.iter();
    last.extend(others.map(|(job, kind)| (job, (*kind, *kind == Kind::Recovered))));
    let mut groups: BTreeMap<(Kind, bool), Vec<&JobName>> = BTreeMap::new();
    for (job, what) in last {
        groups.entry(what).or_default().push(job);
    }
    let groups = groups.into_iter();
    let mut groups: Vec<_> = groups
        .map(|((kind, good), jobs)| (kind, good, jobs))
        .collect();
    groups.sort_by_key(|(kind, good, jobs)| (*good, Reverse(jobs.len()), *kind));
    groups
}

/// A job of it is bad after all that it tells.
fn ends_bad(message: &Message) -> bool {
    let mut items = message.items.iter().enumerate();
    items.any(|(n, i)| i.bad && !message.items[n + 1..].iter().any(|l| l.job == i.job))
}

/// The jobs of which it has no more than what happened.
fn others(message: &Message) -> Vec<Item> {
    let item = |(job, kind): &(JobName, Kind)| {
        Item::new(job.clone(), *kind, *kind != Kind::Recovered, message.at)
    };
    message.others.iter().map(item).collect()
}

/// `20 jobs failed: a, b, c, …`; `3 jobs: 2 failed, 1 recovered: a, b, c`.
fn heading(message: &Message, now: i64) -> String {
    let groups = groups(message);
    let all = groups.iter().map(|(_, _, jobs)| jobs.len()).sum::<usize>() as u64 + message.more;
    match (&message.items[..], all) {
        ([item], 1) => return item_title(item, now),
        ([first, ..], 1) => {
            let words: Vec<&str> = message.items.iter().map(|i| happened(i.kind, 1)).collect();
            return format!("{} {}", first.job, words.join(", then "));
        }
        _ => {}
    }
    let what = match (&groups[..], message.more) {
        ([(kind, _, jobs)], 0) => format!(" {}", happened(*kind, jobs.len())),
        (groups, more) => {
            let part = |(kind, _, jobs): &(Kind, bool, Vec<&JobName>)| {
                let n = jobs.len();
                format!("{} {}", number(n as u64), happened(*kind, n))
            };
            let mut parts: Vec<String> = groups.iter().map(part).collect();
            parts.extend((more > 0).then(|| format!("{} more", number(more))));
            format!(": {}", parts.join(", "))
        }
    };
    let names = groups.iter().flat_map(|(_, _, jobs)| jobs);
    let names = names.take(TITLE_NAMES);
    let mut names: Vec<String> = names.map(|j| cut(j.as_str(), TITLE_NAME_MOST)).collect();
    if (names.len() as u64) < all {
        names.push("…".to_owned());
    }
    format!("{} jobs{what}: {}", number(all), names.join(", "))
}

/// The number of units of UTF-16: no service counts a text as longer.
pub(super) fn units(text: &str) -> usize {
    text.encode_utf16().count()
}

/// The characters that fit into `most` units.
fn fitting(chars: impl Iterator<Item = char>, most: usize) -> impl Iterator<Item = char> {
    chars.scan(most, |left, c| {
        *left = left.checked_sub(c.len_utf16())?;
        Some(c)
    })
}

/// At most `most` units; what is cut is marked.
pub(super) fn cut(text: &str, most: usize) -> String {
    if units(text) <= most {
        return text.to_owned();
    }
    let kept: String = fitting(text.chars(), most.saturating_sub(1)).collect();
    kept + "…"
}

/// The same, and the begin is cut.
fn cut_begin(text: &str, most: usize) -> String {
    if units(text) <= most {
        return text.to_owned();
    }
    let kept: Vec<char> = fitting(text.chars().rev(), most.saturating_sub(1)).collect();
    std::iter::once('…').chain(kept.into_iter().rev()).collect()
}
