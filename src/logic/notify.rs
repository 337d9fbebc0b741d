//! Who is told what of a job, and when: pure. The store keeps the notes of each job and the messages that wait; one
//! instance of the fleet, the notifier, judges records by these rules and sends (src/notify). [`lease`] says which
//! instance that is.

pub mod lease;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    logic::{claim::State, median::median},
    model::{JobName, Occurrence, Outcome, RunRecord, Trigger},
};

/// What can be told of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Failed,
    TimedOut,
    Crashed,
    Unknown,
    LeaseLost,
    Missed,
    Late,
    TooLong,
    TooShort,
    Recovered,
    /// No success within `expect_success_within`.
    Overdue,
    /// `soloist notify test` sent it.
    Test,
}

impl Kind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Crashed => "crashed",
            Self::Unknown => "unknown",
            Self::LeaseLost => "lease_lost",
            Self::Missed => "missed",
            Self::Late => "late",
            Self::TooLong => "too_long",
            Self::TooShort => "too_short",
            Self::Recovered => "recovered",
            Self::Overdue => "overdue",
            Self::Test => "test",
        }
    }
}

/// What a channel is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    pub on: BTreeSet<Kind>,
    /// So many bad ends in a row make a job bad.
    pub after: u32,
    /// A run that starts so much later than planned is [`Kind::Late`], ms.
    pub late_after_ms: i64,
}

/// A channel is told of at most so many changes of a job in an hour.
pub const HOURLY: usize = 6;
const HOUR_MS: i64 = 3_600_000;
/// How many successful runs a job's usual duration is the median of, and at least.
const USUAL_OF: usize = 9;
const USUAL_LEAST: usize = 5;
/// A duration is unusual if it differs by this factor, and by this many ms.
const UNUSUAL: (i64, i64) = (3, 10_000);
/// How many judged records are known by name: the newest may be replaced by another record of the same run.
const SEEN: usize = 6;

/// What is noted of one job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Notes {
    /// The names of the newest records that were read, newest first.
    pub seen: Vec<String>,
    /// Bad ends of attempts that others may follow, oldest first. If none follows, the attempt was the last one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub undecided: Vec<RunRecord>,
    /// When it was first noted, Unix ms.
    pub first: i64,
    /// When a run of it last succeeded, Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub success: Option<i64>,
    /// That it is overdue was told.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overdue: bool,
    /// The durations of the last successful runs, newest first, ms.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub durations: Vec<i64>,
    /// By channel.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub channels: BTreeMap<String, ChannelNotes>,
    /// Since when nobody is told of the job, because the configuration does not have it, or names no channel for it,
    /// Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unwatched: Option<i64>,
}

/// What one channel was told of a job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChannelNotes {
    /// The number of bad ends in a row, and the time of the first.
    pub streak: u64,
    pub since: i64,
    /// [`Rules::after`] ends were bad.
    pub bad: bool,
    /// The channel was told that the job is bad.
    pub told_bad: bool,
    /// Of the last bad end: a success of an older occurrence, which took longer, makes nothing good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bad_of: Option<Occurrence>,
    /// When the last changes were told, oldest first: at most [`HOURLY`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub told_at: Vec<i64>,
    /// The number of changes since then.
    #[serde(default)]
    pub changes: u64,
    /// The last change, if it is to be told once [`HOURLY`] allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untold: Option<Box<Item>>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_false(b: &bool) -> bool {
    !b
}

/// A channel of a job, with its rules.
pub type ChannelRules<'a> = (&'a str, &'a Rules);

/// The name of a record among those of its job. A run may get a second record, with another outcome.
fn name(r: &RunRecord) -> String {
    match r.run_id {
        Some(id) => format!("{id}:{}", r.outcome),
        None => format!("{}:{}:{}", r.occurrence.0, r.outcome, r.count),
    }
}

/// When the record was made, as far as it says, Unix ms.
pub fn made_at(r: &RunRecord) -> i64 {
    r.finished_at.or(r.started_at).unwrap_or(r.occurrence.0)
}

impl Notes {
    pub fn new(now: i64) -> Self {
        Self {
            first: now,
            ..Self::default()
        }
    }

    /// Of these records, newest first, how many are new; None: perhaps more than there are.
    pub fn unseen(&self, records: &[RunRecord]) -> Option<usize> {
        records.iter().position(|r| self.seen.contains(&name(r)))
    }

    /// Takes in new records, oldest first. Returns those that say how an occurrence ended: a bad end of an attempt does
    /// not, if another attempt followed or may follow. `state`: read before the records, so that an occurrence that is
    /// not open has its last record.
    pub fn take_in(&mut self, new: Vec<RunRecord>, state: Option<&State>) -> Vec<RunRecord> {
        for r in &new {
            self.seen.insert(0, name(r));
        }
        self.seen.truncate(SEEN);
        let all = [std::mem::take(&mut self.undecided), new].concat();
        let is_open = |at| state.is_some_and(|st| st.open.iter().any(|o| o.run.occurrence == at));
        let mut ends = vec![];
        for (n, r) in all.iter().enumerate() {
            // A newer occurrence that replaced the next attempt says nothing of this one.
            let follows = |later: &RunRecord| {
                later.occurrence == r.occurrence && later.outcome != Outcome::Replaced
            };
            match r.outcome.is_bad() {
                true if all[n + 1..].iter().any(follows) => {}
                true if is_open(r.occurrence) => self.undecided.push(r.clone()),
                _ => ends.push(r.clone()),
            }
        }
        ends
    }

    /// Judges the last record of an occurrence. Returns what the channels are to be told.
    pub fn judge(
        &mut self,
        channels: &[ChannelRules<'_>],
        r: &RunRecord,
        now: i64,
    ) -> Vec<(String, Item)> {
        let (usual, success) = (self.usual(), r.outcome == Outcome::Succeeded);
        let mut out = vec![];
        for (channel, rules) in channels {
            let notes = self.channels.entry((*channel).to_owned()).or_default();
            let bad = complaint(r, rules, usual);
            if bad.is_some() || success {
                notes.end(rules, bad, r, self.overdue);
                out.extend(notes.tell(now).map(|item| ((*channel).to_owned(), item)));
            }
        }
        self.overdue &= !success;
        self.note_success(r);
        out
    }

    /// Notes a record without telling anybody.
    pub fn note_success(&mut self, r: &RunRecord) {
        if r.outcome != Outcome::Succeeded {
            return;
        }
        self.success = self.success.max(Some(made_at(r)));
        if let Some(ms) = r.duration_ms {
            self.durations.insert(0, ms);
            self.durations.truncate(USUAL_OF);
        }
    }

    /// The usual duration of a successful run, ms.
    fn usual(&self) -> Option<i64> {
        (self.durations.len() >= USUAL_LEAST)
            .then(|| median(self.durations.clone()))
            .flatten()
    }

    fn is_overdue(&self, within: Option<i64>, now: i64) -> bool {
        let since = self.success.unwrap_or(self.first);
        within.is_some_and(|within| now - since >= within)
    }

    /// Whether [`Notes::time_passes`] has something to tell.
    pub fn is_due(&self, channels: &[ChannelRules<'_>], within: Option<i64>, now: i64) -> bool {
        let mut channels = channels
            .iter()
            .filter_map(|(name, _)| self.channels.get(*name));
        !self.overdue && self.is_overdue(within, now)
            || channels.any(|c| c.untold.is_some() && c.has_room(now))
    }

    /// What the channels are to be told because of the time. `within`: see `expect_success_within`.
    pub fn time_passes(
        &mut self,
        job: &JobName,
        channels: &[ChannelRules<'_>],
        within: Option<i64>,
        now: i64,
    ) -> Vec<(String, Item)> {
        let overdue = !self.overdue && self.is_overdue(within, now);
        self.overdue |= overdue;
        let mut out = vec![];
        for (channel, _) in channels {
            let notes = self.channels.entry((*channel).to_owned()).or_default();
            if overdue {
                notes.told_bad = true;
                let item = Item {
                    expected: within,
                    never: self.success.is_none(),
                    ..Item::new(
                        job.clone(),
                        Kind::Overdue,
                        true,
                        self.success.unwrap_or(self.first),
                    )
                };
                out.push(((*channel).to_owned(), item));
            }
            out.extend(notes.tell(now).map(|item| ((*channel).to_owned(), item)));
        }
        out
    }
}

/// What the channel calls bad about a run. None: nothing, or it is neither good nor bad. With what was expected of the
/// run, ms.
fn complaint(r: &RunRecord, rules: &Rules, usual: Option<i64>) -> Option<(Kind, Option<i64>)> {
    let kind = match r.outcome {
        Outcome::Failed => Kind::Failed,
        Outcome::TimedOut => Kind::TimedOut,
        Outcome::Crashed => Kind::Crashed,
        Outcome::Unknown => Kind::Unknown,
        Outcome::LeaseLost => Kind::LeaseLost,
        Outcome::Missed => Kind::Missed,
        Outcome::Succeeded => {
            let (factor, least) = UNUSUAL;
            let planned =
                matches!(r.trigger, Trigger::Schedule | Trigger::CatchUp) && r.attempt == 1;
            let late = planned && r.lateness_ms.is_some_and(|ms| ms >= rules.late_after_ms);
            let (took, usually) = r.duration_ms.zip(usual).unwrap_or_default();
            let long = took > usually.saturating_mul(factor) && took - usually > least;
            let short = took < usually / factor && usually - took > least;
            let found = [
                (late, Kind::Late, Some(rules.late_after_ms)),
                (long, Kind::TooLong, usual),
                (short, Kind::TooShort, usual),
            ];
            let mut found = found.into_iter();
            let told = found.find(|(is, kind, _)| *is && rules.on.contains(kind));
            return told.map(|(_, kind, expected)| (kind, expected));
        }
        Outcome::Running | Outcome::Cancelled | Outcome::Replaced | Outcome::Skipped => {
            return None;
        }
    };
    rules.on.contains(&kind).then_some((kind, None))
}

impl ChannelNotes {
    /// An occurrence has ended: badly, or well. `overdue`: the channel was told that the job is.
    fn end(
        &mut self,
        rules: &Rules,
        bad: Option<(Kind, Option<i64>)>,
        r: &RunRecord,
        overdue: bool,
    ) {
        let item = |kind, notes: &Self| Item {
            streak: notes.streak,
            run: Some(r.clone()),
            ..Item::new(r.job.clone(), kind, notes.bad, notes.since)
        };
        let item = match bad {
            Some((kind, expected)) => {
                if self.streak == 0 {
                    self.since = made_at(r);
                }
                // A run may get a second record.
                if self.bad_of.replace(r.occurrence) != Some(r.occurrence) {
                    self.streak = self.streak.saturating_add(r.count.max(1));
                }
                if self.bad || self.streak < u64::from(rules.after) {
                    return;
                }
                self.bad = true;
                Item {
                    expected,
                    ..item(kind, self)
                }
            }
            None if self.bad_of > Some(r.occurrence) => return,
            None => {
                let was_bad = std::mem::take(&mut self.bad);
                let item = item(Kind::Recovered, self);
                (self.streak, self.bad_of) = (0, None);
                if !was_bad && !overdue && !self.told_bad {
                    return;
                }
                if !rules.on.contains(&Kind::Recovered) {
                    self.told_bad = false;
                }
                item
            }
        };
        self.changes += 1;
        let news = self.bad != self.told_bad || overdue && rules.on.contains(&item.kind);
        self.untold = news.then(|| item.into());
    }

    fn has_room(&self, now: i64) -> bool {
        let recent = self.told_at.iter().filter(|at| now - **at < HOUR_MS);
        recent.count() < HOURLY
    }

    /// The change that is to be told now.
    fn tell(&mut self, now: i64) -> Option<Item> {
        if !self.has_room(now) {
            return None;
        }
        let item = *self.untold.take()?;
        self.told_at.retain(|at| now - at < HOUR_MS);
        self.told_at.push(now);
        self.told_bad = item.bad;
        let full = self.told_at.len() == HOURLY;
        Some(Item {
            changes: std::mem::take(&mut self.changes),
            quiet_until: self.told_at.first().filter(|_| full).map(|at| at + HOUR_MS),
            ..item
        })
    }
}

/// What is told of one job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Item {
    pub job: JobName,
    pub kind: Kind,
    pub bad: bool,
    pub streak: u64,
    pub since: i64,
    /// How often the job became good or bad since the channel was last told of it, with this change.
    #[serde(default)]
    pub changes: u64,
    /// Until then the channel is told of no further change of the job, Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiet_until: Option<i64>,
    /// How long a run usually takes, if this one took unusually long or short; how late it may start, if it was late;
    /// how long the job may be without a success, if it was for longer; ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<i64>,
    /// The fleet knows of no success of it. Counts for [`Kind::Overdue`] alone.
    #[serde(default, skip_serializing_if = "is_false")]
    pub never: bool,
    /// The run that changed the state, with the end of its output; None: no run did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunRecord>,
}

impl Item {
    /// The kind alone; nothing more is known.
    pub fn new(job: JobName, kind: Kind, bad: bool, since: i64) -> Self {
        Self {
            job,
            kind,
            bad,
            streak: 0,
            since,
            changes: 0,
            quiet_until: None,
            expected: None,
            never: false,
            run: None,
        }
    }
}

/// A message that waits to be sent over one channel. Those of a channel are sent one after the other, and what happens
/// meanwhile becomes one message: at most two of them wait.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub channel: String,
    /// Unix ms.
    pub at: i64,
    /// At most [`ITEMS`].
    pub items: Vec<Item>,
    /// What more happened, at most [`NAMES`], and how much of which not even the names are told.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<(JobName, Kind)>,
    #[serde(default)]
    pub more: u64,
    /// Not before this time, Unix ms.
    pub due: i64,
    #[serde(default)]
    pub tries: u32,
    /// How many of them were refused.
    #[serde(default)]
    pub refusals: u32,
    /// When the first of them failed, Unix ms.
    #[serde(default)]
    pub failed_at: i64,
    /// The receivers of a mail who lack it, if others have it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub only: Vec<String>,
    /// Somebody is sending it.
    #[serde(default)]
    pub sending: bool,
    /// An earlier try may have delivered it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub perhaps_sent: bool,
}

/// How many changes a message tells in full.
pub const ITEMS: usize = 20;
/// How many more jobs it names.
pub const NAMES: usize = 100;
/// What happens within this time of each other becomes one message, ms.
const TOGETHER_MS: i64 = 2_000;
/// No message waits longer for others to join it, ms.
const JOIN_MOST_MS: i64 = 10_000;
/// The notes of a job of which nobody is told stay so long, and what was given up is remembered so long, ms.
pub const FORGET_MS: i64 = 7 * 24 * 3_600_000;

impl Message {
    pub fn new(item: Item, channel: &str, now: i64) -> Self {
        Self {
            channel: channel.to_owned(),
            at: now,
            items: vec![item],
            others: vec![],
            more: 0,
            due: now + TOGETHER_MS,
            tries: 0,
            refusals: 0,
            failed_at: 0,
            only: vec![],
            sending: false,
            perhaps_sent: false,
        }
    }

    /// Whether something for this channel may become part of it: not if a try may have delivered it.
    pub fn takes(&self, channel: &str) -> bool {
        let fresh = self.tries == 0 && !self.sending && !self.perhaps_sent;
        fresh && self.channel == channel
    }

    pub fn join(&mut self, item: Item, now: i64) {
        if self.items.len() < ITEMS {
            self.items.push(item);
        } else if self.others.len() < NAMES {
            self.others.push((item.job, item.kind));
        } else {
            self.more += 1;
        }
        let due = (now + TOGETHER_MS).min(self.at + JOIN_MOST_MS);
        self.due = self.due.max(due);
    }
}

/// A message that was given up: nobody was told what it says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GivenUp {
    /// That of the message.
    pub id: String,
    pub channel: String,
    /// When it was given up, Unix ms.
    pub at: i64,
    pub tries: u32,
    pub why: String,
    /// Some of what it says, and how much more it says.
    pub about: Vec<(JobName, Kind)>,
    pub more: u64,
}

/// How many messages that were given up the fleet remembers; of each so many jobs, and so many characters of why.
const GIVEN_UP_KEPT: usize = 20;
const GIVEN_UP_NAMES: usize = 5;
const GIVEN_UP_WHY: usize = 300;

impl GivenUp {
    pub fn new(id: &str, message: &Message, why: &str, now: i64) -> Self {
        let items = message.items.iter().map(|i| (i.job.clone(), i.kind));
        let about: Vec<_> = items.take(GIVEN_UP_NAMES).collect();
        let all = (message.items.len() + message.others.len()) as u64 + message.more;
        Self {
            id: id.to_owned(),
            channel: message.channel.clone(),
            at: now,
            tries: message.tries,
            why: why.chars().take(GIVEN_UP_WHY).collect(),
            more: all - about.len() as u64,
            about,
        }
    }
}

/// Adds one to those that the fleet remembers, oldest first: the newest `GIVEN_UP_KEPT`, none older than
/// [`FORGET_MS`].
pub fn remember(known: &mut Vec<GivenUp>, new: GivenUp) {
    let now = new.at;
    known.push(new);
    known.retain(|g| now.saturating_sub(g.at) < FORGET_MS);
    known.drain(..known.len().saturating_sub(GIVEN_UP_KEPT));
}
