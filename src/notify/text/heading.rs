//! The title of a message: one line that says what happened to which jobs.

use std::{cmp::Reverse, collections::BTreeMap};

use super::body::cut;
use crate::{
    logic::notify::{Item, Kind, Message},
    model::{JobName, Outcome},
    view::signal_name,
    words::{self, number},
};

/// How many jobs the title of a message about several names, and how much of a name.
pub(super) const TITLE_NAMES: usize = 3;
const TITLE_NAME_MOST: usize = 40;

/// What happened to `n` jobs.
pub(super) fn happened(kind: Kind, n: u64) -> &'static str {
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
        Kind::Flapping if one => "keeps changing",
        Kind::Flapping => "keep changing",
        Kind::Test => "test",
    }
}

/// The title of what is said of one job.
pub(super) fn of_item(item: &Item, now: i64) -> String {
    let job = &item.job;
    let exit = item.run.as_ref().and_then(|run| {
        let code = run.exit_code.filter(|_| run.outcome == Outcome::Failed);
        code.map(|code| format!(" (exit code {code})")).or(run
            .signal
            .map(|signal| format!(" ({})", signal_name(signal))))
    });
    let took = item.run.as_ref().and_then(|run| run.duration_ms);
    let took = took.map(words::took).zip(item.expected.map(words::took));
    let late = item.run.as_ref().and_then(|run| run.lateness_ms);
    match item.kind {
        Kind::Test => "soloist: a test".to_owned(),
        Kind::Overdue if item.never => {
            format!(
                "{job}: no success so far, for {}",
                words::span(now - item.since)
            )
        }
        Kind::Overdue => format!("{job}: no success for {}", words::span(now - item.since)),
        Kind::Flapping => format!(
            "{job} keeps changing: {} in {}, {} now",
            words::count(
                usize::try_from(item.changes).unwrap_or(usize::MAX),
                "change"
            ),
            words::span(now - item.since),
            if item.bad { "bad" } else { "good" },
        ),
        Kind::Unknown => format!("{job}: nobody knows how its run ended"),
        Kind::Late if late.is_some() => {
            format!("{job} started {} late", words::took(late.unwrap_or(0)))
        }
        kind @ (Kind::TooLong | Kind::TooShort) => {
            let took = took.map(|(took, usual)| format!(": after {took}, usually {usual}"));
            format!("{job} {}{}", happened(kind, 1), took.unwrap_or_default())
        }
        kind => format!("{job} {}{}", happened(kind, 1), exit.unwrap_or_default()),
    }
}

/// Jobs to which the same happened, by their names.
pub(super) struct Group<'a> {
    pub(super) kind: Kind,
    pub(super) jobs: Vec<&'a JobName>,
    /// How many more.
    pub(super) unnamed: u64,
    good: bool,
}

impl Group<'_> {
    fn count(&self) -> u64 {
        self.jobs.len() as u64 + self.unnamed
    }

    pub(super) fn happened(&self) -> &'static str {
        happened(self.kind, self.count())
    }
}

/// All jobs of a message, each once, by what happened to it last: those that are bad before the others, and what
/// happened to most of them first. And how many more there are, of which the message does not know what happened.
pub(super) fn groups(message: &Message) -> (Vec<Group<'_>>, u64) {
    let mut last: BTreeMap<&JobName, (Kind, bool)> = BTreeMap::new();
    last.extend(message.items.iter().map(|i| (&i.job, (i.kind, !i.bad))));
    let others = message.others.iter();
    last.extend(others.map(|(job, kind)| (job, (*kind, *kind == Kind::Recovered))));
    let mut groups: BTreeMap<Kind, Group<'_>> = BTreeMap::new();
    let mut group = |kind, good: bool, job, unnamed| {
        let group = groups.entry(kind).or_insert_with(|| Group {
            kind,
            jobs: vec![],
            unnamed: 0,
            good: true,
        });
        group.good &= good;
        group.jobs.extend(job);
        group.unnamed += unnamed;
    };
    for (job, (kind, good)) in last {
        group(kind, good, Some(job), 0);
    }
    for (kind, n) in &message.unnamed {
        group(*kind, *kind == Kind::Recovered, None, *n);
    }
    let mut groups: Vec<Group<'_>> = groups.into_values().collect();
    groups.sort_by_key(|g| (g.good, Reverse(g.count()), g.kind));
    let known = message.others.len() as u64 + message.unnamed.values().sum::<u64>();
    (groups, message.more.saturating_sub(known))
}

/// `1,000 jobs failed: a, b, c, …`; `3 jobs: 2 failed, 1 recovered: a, b, c`.
pub(super) fn of_message(message: &Message, now: i64) -> String {
    if let ([item], 0) = (&message.items[..], message.more) {
        return of_item(item, now);
    }
    let (groups, rest) = groups(message);
    let all = groups.iter().map(Group::count).sum::<u64>() + rest;
    if let (1, Some(item)) = (all, message.items.first()) {
        let one_after_the_other = message.items.iter().map(|i| happened(i.kind, 1));
        let words: Vec<&str> = one_after_the_other.collect();
        return format!("{} {}", item.job, words.join(", then "));
    }
    let what = match (&groups[..], rest) {
        ([one], 0) => format!(" {}", one.happened()),
        (several, rest) => {
            let parts = several.iter();
            let mut parts: Vec<String> = parts
                .map(|g| format!("{} {}", number(g.count()), g.happened()))
                .collect();
            if rest > 0 {
                parts.push(format!("{} more", number(rest)));
            }
            format!(": {}", parts.join(", "))
        }
    };
    let names = first_names(&groups, all);
    format!("{} jobs{what}: {names}", number(all))
}

/// The first jobs of a message: `a, b, c, …`.
fn first_names(groups: &[Group<'_>], all: u64) -> String {
    let jobs = groups.iter().flat_map(|g| &g.jobs).take(TITLE_NAMES);
    let mut names: Vec<String> = jobs.map(|job| cut(job.as_str(), TITLE_NAME_MOST)).collect();
    if (names.len() as u64) < all {
        names.push("…".to_owned());
    }
    names.join(", ")
}
