//! Who is told what of a job, and when: pure. The store keeps the notes of each job and the messages that wait; one
//! instance of the fleet, the notifier, judges records by these rules and sends (src/notify). [`stand`] says which
//! instance that is.

mod sight;
pub mod stand;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    logic::{claim::State, median::median},
    model::{InstanceId, JobName, Occurrence, Outcome, RunId, RunRecord, Trigger, Wait},
};

pub use self::sight::{OFF_MS, Sight, recorded_since};

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
    /// The state changed several times, which was not told one by one.
    Flapping,
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
            Self::Flapping => "flapping",
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

/// Within this time of each other a job's changes of state are told one by one at most [`PROMPT`] times, ms.
pub const SETTLED_MS: i64 = 60_000;
/// See [`SETTLED_MS`]: that it failed, and that it recovered.
pub const PROMPT: usize = 2;
/// A job whose state goes on changing is told of at most so seldom, ms.
pub const SELDOM_MS: i64 = 3_600_000;
/// How many successful runs a job's usual duration is the median of, and at least.
const USUAL_OF: usize = 9;
const USUAL_LEAST: usize = 5;
/// Such a factor, and such a difference, make a duration unusual.
const UNUSUAL: (i64, i64) = (3, 10_000);
/// How many judged records are known by name: the newest may be replaced by another record of the same run.
const SEEN: usize = 6;

/// The most attempts of a job that wait for others of their occurrences: the oldest beyond them count as ends.
const AWAITED: usize = 20;

/// What is noted of one job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Notes {
    /// The names of the newest records that were judged, newest first.
    pub seen: Vec<String>,
    /// Bad ends of attempts that others are to follow, oldest first: one of each occurrence. If none follows, the
    /// attempt was the last one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub awaited: Vec<RunRecord>,
    /// Over which channels they are told, if the configuration does not have the job any more then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub awaited_for: Vec<String>,
    /// How the first attempts of occurrences started whose last attempts are not judged yet, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_starts: Vec<FirstStart>,
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
    pub told: BTreeMap<String, Told>,
    /// Since when nobody is told of the job, because the configuration does not have it, or names no channel for it,
    /// Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unwatched: Option<i64>,
}

/// How late the first attempt of a planned occurrence started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FirstStart {
    pub of: Occurrence,
    pub lateness_ms: i64,
    /// What it waited for longest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited: Option<(Wait, u64)>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_false(b: &bool) -> bool {
    !b
}

/// A job, as one channel sees it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Told {
    /// It is bad since so many ends, and since this time; 0: it is good.
    pub streak: u64,
    pub since: i64,
    /// [`Rules::after`] ends were bad.
    pub bad: bool,
    /// Whose bad end counted last. It counts once: of an attempt that was told because a pause held the next one back,
    /// that one may end as badly. A success of an older occurrence, which took longer, makes nothing good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted: Option<Occurrence>,
    /// When a change was last told, oldest first: at most [`PROMPT`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent: Vec<i64>,
    /// Its changes are not told one by one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Held>,
}

/// Changes that are told together, later.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Held {
    pub since: i64,
    pub until: i64,
    pub changes: u64,
    /// What the last of them was.
    pub kind: Kind,
    /// The run that made it bad last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_bad: Option<Box<RunRecord>>,
}

/// Something that a channel is to be told.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    pub channel: String,
    pub kind: Kind,
    /// The job is bad now.
    pub bad: bool,
    /// So many bad ends in a row, and since when.
    pub streak: u64,
    pub since: i64,
    /// If it is flapping: how often the state changed, which run made it bad last, and when the next summary may come.
    pub changes: u64,
    pub last_bad: Option<Box<RunRecord>>,
    pub again_at: Option<i64>,
}

/// The name of a record among those of its job. A run may get a second record, with another outcome.
pub fn name(r: &RunRecord) -> String {
    match r.run_id {
        Some(id) => format!("{id}:{}", r.outcome),
        None => format!("{}:{}:{}", r.occurrence.0, r.outcome, r.count),
    }
}

/// When the record was made, as far as it says, Unix ms.
pub fn made_at(r: &RunRecord) -> i64 {
    r.finished_at.or(r.started_at).unwrap_or(r.occurrence.0)
}

/// What is to be done about the notes of a job.
#[derive(Debug, Clone, PartialEq)]
pub enum Watch {
    /// They stay as they are.
    Same,
    /// They become these.
    Becomes(Notes),
    /// They are not needed any more.
    Forget,
}

impl Notes {
    pub fn new(now: i64) -> Self {
        Self {
            first: now,
            ..Self::default()
        }
    }

    /// Whether anybody is told of the job now. Its notes stay for a while after it was removed: an instance may have
    /// another configuration for a moment, and a job that comes back is not told anew.
    pub fn watch(&self, watched: bool, now: i64) -> Watch {
        let unwatched = match (watched, self.unwatched) {
            (true, None) => return Watch::Same,
            (true, Some(_)) => None,
            (false, None) => Some(now),
            (false, Some(since)) if now.saturating_sub(since) >= FORGET_MS => return Watch::Forget,
            (false, Some(_)) => return Watch::Same,
        };
        Watch::Becomes(Self {
            unwatched,
            ..self.clone()
        })
    }

    /// Of these records, newest first, how many are new; None: perhaps more than there are.
    pub fn unjudged(&self, records: &[RunRecord]) -> Option<usize> {
        records.iter().position(|r| self.seen.contains(&name(r)))
    }

    /// Notes the record without telling anybody.
    pub fn note(&mut self, r: &RunRecord) {
        let name = name(r);
        // An attempt that turns out to be the last was seen before.
        if !self.seen.contains(&name) {
            self.seen.insert(0, name);
            self.seen.truncate(SEEN);
        }
        if r.outcome == Outcome::Succeeded {
            self.success = self.success.max(Some(made_at(r)));
            if let Some(ms) = r.duration_ms {
                self.durations.insert(0, ms);
                self.durations.truncate(USUAL_OF);
            }
        }
    }

    /// The attempts that others were to follow, and none did: they are to be judged, before the new records, of which
    /// `new` are all. These were read after the state: a later attempt of an occurrence that is not open has its
    /// record.
    pub fn dropped(&mut self, new: &[RunRecord], sight: Sight<'_>) -> Vec<RunRecord> {
        let mut all = std::mem::take(&mut self.awaited);
        all.retain(|r| !new.iter().any(|other| counts_after(other, r)));
        let many = all.len().saturating_sub(AWAITED);
        let (out, awaited) = (all.into_iter().enumerate())
            .partition::<Vec<_>, _>(|(n, r)| *n < many || !sight.is_open(r.occurrence));
        self.awaited = awaited.into_iter().map(|(_, r)| r).collect();
        out.into_iter().map(|(_, r)| r).collect()
    }

    /// Whether a new record is not to be judged, but only noted: that of an attempt that another one follows or is to
    /// follow. `newer`: the new records after it, as for [`Notes::dropped`].
    pub fn passes_over(&mut self, r: &RunRecord, newer: &[RunRecord], sight: Sight<'_>) -> bool {
        let same = |other: &RunRecord| {
            counts_after(other, r) && (other.attempt > r.attempt || name(other) != name(r))
        };
        if !r.outcome.is_bad() {
            return false;
        }
        let follows = newer.iter().any(same);
        let awaited = !follows && sight.is_open(r.occurrence);
        if awaited {
            self.awaited.push(r.clone());
        }
        if follows || awaited {
            self.note(r);
            self.note_first_start(r);
        }
        follows || awaited
    }

    fn note_first_start(&mut self, r: &RunRecord) {
        let late = r.lateness_ms.filter(|ms| *ms > 0);
        if let Some(lateness_ms) = late.filter(|_| is_planned(r)) {
            self.first_starts.push(FirstStart {
                of: r.occurrence,
                lateness_ms,
                waited: r.waited,
            });
            // Those whose last attempt no notifier ever saw.
            let many = self.first_starts.len().saturating_sub(AWAITED);
            self.first_starts.drain(..many);
        }
    }

    /// Makes the record of the last attempt of an occurrence as late as the first attempt was: people expect the
    /// occurrence at its time, however often it is tried.
    pub fn start_as_first(&mut self, r: &mut RunRecord) {
        let first = self.first_starts.iter().rfind(|f| f.of == r.occurrence);
        let first = first.cloned();
        self.first_starts.retain(|f| f.of != r.occurrence);
        if r.attempt > 1 {
            r.lateness_ms = first.as_ref().map(|f| f.lateness_ms);
            r.waited = first.and_then(|f| f.waited);
        }
    }

    /// The job is told over these channels now.
    pub fn watched_by(&mut self, channels: &[String]) {
        self.awaited_for = match self.awaited.is_empty() {
            true => vec![],
            false => channels.to_vec(),
        };
    }

    /// The usual duration of a successful run, ms.
    pub fn usual(&self) -> Option<i64> {
        if self.durations.len() < USUAL_LEAST {
            return None;
        }
        median(self.durations.clone())
    }

    /// Judges a record that is the last of its occurrence. See also [`Notes::start_as_first`].
    pub fn judge<'a>(
        &mut self,
        channels: impl Iterator<Item = (&'a str, &'a Rules)>,
        r: &RunRecord,
        now: i64,
    ) -> Vec<Verdict> {
        let usual = self.usual();
        let success = r.outcome == Outcome::Succeeded;
        let overdue = self.overdue;
        let mut out = vec![];
        for (channel, rules) in channels {
            let told = self.told.entry(channel.to_owned()).or_default();
            let bad = complaint(r, rules, usual);
            if bad.is_none() && !success {
                continue;
            }
            out.extend(told.end(channel, rules, bad, r, overdue, now));
        }
        if success {
            self.overdue = false;
        }
        self.note(r);
        out
    }

    /// What the passing of time alone makes to be told. `within`: see `expect_success_within`.
    pub fn passes<'a>(
        &mut self,
        channels: impl Iterator<Item = (&'a str, &'a Rules)>,
        within: Option<i64>,
        now: i64,
    ) -> Vec<Verdict> {
        let since = self.success.unwrap_or(self.first);
        let overdue = !self.overdue && within.is_some_and(|within| now - since >= within);
        self.overdue |= overdue;
        let mut out = vec![];
        for (channel, rules) in channels {
            let told = self.told.entry(channel.to_owned()).or_default();
            if overdue {
                out.push(Verdict {
                    channel: channel.to_owned(),
                    kind: Kind::Overdue,
                    bad: true,
                    streak: told.streak,
                    since,
                    changes: 0,
                    last_bad: None,
                    again_at: None,
                });
            }
            out.extend(told.passes(channel, rules, self.overdue, now));
        }
        out
    }

    /// When [`Notes::passes`] is to be asked next, Unix ms.
    pub fn due(&self, within: Option<i64>) -> Option<i64> {
        let overdue = within
            .filter(|_| !self.overdue)
            .map(|within| self.success.unwrap_or(self.first).saturating_add(within));
        let held = self
            .told
            .values()
            .filter_map(|t| Some(t.held.as_ref()?.until));
        held.chain(overdue).min()
    }
}

/// The later record says how the occurrence ended: one that a newer occurrence replaced says nothing of it.
fn counts_after(later: &RunRecord, r: &RunRecord) -> bool {
    later.occurrence == r.occurrence && later.outcome != Outcome::Replaced
}

/// A first attempt that was to start at the instant of its occurrence.
fn is_planned(r: &RunRecord) -> bool {
    matches!(r.trigger, Trigger::Schedule | Trigger::CatchUp) && r.attempt == 1
}

/// What the channel calls bad about a run. None: nothing, or it is neither good nor bad.
fn complaint(r: &RunRecord, rules: &Rules, usual: Option<i64>) -> Option<Kind> {
    let (factor, least) = UNUSUAL;
    let lasting = r.duration_ms.zip(usual);
    let kind = match r.outcome {
        Outcome::Failed => Kind::Failed,
        Outcome::TimedOut => Kind::TimedOut,
        Outcome::Crashed => Kind::Crashed,
        Outcome::Unknown => Kind::Unknown,
        Outcome::LeaseLost => Kind::LeaseLost,
        Outcome::Missed => Kind::Missed,
        Outcome::Succeeded => {
            let planned = is_planned(r) || r.attempt > 1;
            let late = planned && r.lateness_ms.is_some_and(|ms| ms >= rules.late_after_ms);
            let long = lasting
                .is_some_and(|(ms, usual)| ms > usual.saturating_mul(factor) && ms - usual > least);
            let short =
                lasting.is_some_and(|(ms, usual)| ms < usual / factor && usual - ms > least);
            let found = [
                (late, Kind::Late),
                (long, Kind::TooLong),
                (short, Kind::TooShort),
            ];
            let mut told = found
                .into_iter()
                .filter(|(is, kind)| *is && rules.on.contains(kind));
            return told.next().map(|(_, kind)| kind);
        }
        Outcome::Running | Outcome::Cancelled | Outcome::Replaced | Outcome::Skipped => {
            return None;
        }
    };
    rules.on.contains(&kind).then_some(kind)
}

impl Told {
    /// A run has ended: badly, or well.
    fn end(
        &mut self,
        channel: &str,
        rules: &Rules,
        bad: Option<Kind>,
        r: &RunRecord,
        overdue: bool,
        now: i64,
    ) -> Option<Verdict> {
        let (kind, streak, since) = match bad {
            Some(kind) => {
                if self.streak == 0 {
                    self.since = made_at(r);
                }
                if self.counted.replace(r.occurrence) != Some(r.occurrence) {
                    self.streak = self.streak.saturating_add(r.count.max(1));
                }
                if self.bad || self.streak < u64::from(rules.after) {
                    return None;
                }
                self.bad = true;
                (kind, self.streak, self.since)
            }
            None if self.counted > Some(r.occurrence) => return None,
            None => {
                let (streak, since) = (self.streak, self.since);
                (self.streak, self.counted) = (0, None);
                if !std::mem::take(&mut self.bad) && !overdue {
                    return None;
                }
                (Kind::Recovered, streak, since)
            }
        };
        if let Some(held) = &mut self.held {
            held.changes += 1;
            held.kind = kind;
            if self.bad {
                held.last_bad = Some(r.clone().into());
            }
            return None;
        }
        if kind == Kind::Recovered && !rules.on.contains(&kind) {
            return None;
        }
        self.recent.retain(|told| now - told < SETTLED_MS);
        if self.recent.len() >= PROMPT {
            self.held = Some(Held {
                since: now,
                until: now + SETTLED_MS,
                changes: 1,
                kind,
                last_bad: self.bad.then(|| r.clone().into()),
            });
            return None;
        }
        self.recent.push(now);
        Some(Verdict {
            channel: channel.to_owned(),
            kind,
            bad: self.bad,
            streak,
            since,
            changes: 0,
            last_bad: None,
            again_at: None,
        })
    }

    fn passes(&mut self, channel: &str, rules: &Rules, overdue: bool, now: i64) -> Option<Verdict> {
        let held = self.held.as_mut().filter(|held| now >= held.until)?;
        if held.changes == 0 {
            self.held = None;
            self.recent.clear();
            return None;
        }
        let (changes, since, last) = (held.changes, held.since, held.kind);
        let last_bad = held.last_bad.take();
        let pause = (held.until - held.since).saturating_mul(2).min(SELDOM_MS);
        *held = Held {
            since: now,
            until: now + pause,
            changes: 0,
            kind: last,
            last_bad: None,
        };
        if changes == 1 && last == Kind::Recovered && !rules.on.contains(&last) {
            return None;
        }
        Some(Verdict {
            channel: channel.to_owned(),
            // A single one is told as what it was.
            kind: if changes == 1 { last } else { Kind::Flapping },
            bad: self.bad || overdue,
            streak: self.streak,
            since,
            changes,
            last_bad,
            again_at: (changes > 1).then_some(held.until),
        })
    }
}

/// A message that waits to be sent over one channel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub channel: String,
    /// Unix ms.
    pub at: i64,
    /// At most [`ITEMS`].
    pub items: Vec<Item>,
    /// What more happened, of which there is no room to tell: the jobs, at most [`NAMES`], and how much it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<(JobName, Kind)>,
    #[serde(default)]
    pub more: u64,
    /// What happened to those of `more` that are not among `others`, and how often.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unnamed: BTreeMap<Kind, u64>,
    /// Not before this time, Unix ms.
    pub due: i64,
    /// Until then the channel's server wants no message, as it said to this one, Unix ms.
    #[serde(default)]
    pub channel_rests: i64,
    #[serde(default)]
    pub tries: u32,
    /// How often the channel's server refused it.
    #[serde(default)]
    pub refusals: u32,
    /// The receivers of a mail who lack it, if others have it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left: Vec<String>,
    /// Who is sending it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sending: Option<InstanceId>,
    /// An earlier try may have delivered it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub perhaps_sent: bool,
    /// Why the last try failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
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

impl GivenUp {
    pub fn new(id: &str, message: &Message, why: &str, now: i64) -> Self {
        let items = message.items.iter().map(|i| (i.job.clone(), i.kind));
        let about: Vec<_> = items.take(GIVEN_UP_NAMES).collect();
        let all = message.items.len() as u64 + message.more;
        let tail = match message.left.is_empty() {
            true => String::new(),
            false => {
                let left: String = (message.left.join(", ").chars().take(GIVEN_UP_LEFT)).collect();
                format!(" (it is about {left} alone)")
            }
        };
        let room = GIVEN_UP_WHY.saturating_sub(tail.chars().count());
        let why = why.chars().take(room).collect::<String>() + &tail;
        Self {
            id: id.to_owned(),
            channel: message.channel.clone(),
            at: now,
            tries: message.tries,
            why,
            more: all.saturating_sub(about.len() as u64),
            about,
        }
    }
}

/// Those that the fleet remembers, oldest first, and these: the newest [`GIVEN_UP_KEPT`], none older than
/// [`FORGET_MS`].
pub fn remembered(mut known: Vec<GivenUp>, new: &[GivenUp], now: i64) -> Vec<GivenUp> {
    known.extend_from_slice(new);
    known.retain(|g| now.saturating_sub(g.at) < FORGET_MS);
    known.drain(..known.len().saturating_sub(GIVEN_UP_KEPT));
    known
}

/// What is told of one job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Item {
    pub job: JobName,
    pub kind: Kind,
    pub bad: bool,
    pub streak: u64,
    pub since: i64,
    #[serde(default)]
    pub changes: u64,
    /// When the next summary may come, Unix ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again_at: Option<i64>,
    pub zone: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<i64>,
    /// How long a run usually takes, if this one took unusually long or short; how late it may start, if it was late;
    /// how long the job may be without a success, if it was for longer; ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<i64>,
    /// The fleet knows of no success of it. Counts for [`Kind::Overdue`] alone.
    #[serde(default, skip_serializing_if = "is_false")]
    pub never: bool,
    /// The notifier's configuration lacks the job.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lacked: bool,
    /// The run that changed the state; None: no run did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<About>,
    /// As it is when the message is sent; it is not kept.
    #[serde(skip)]
    pub now: Now,
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
            again_at: None,
            zone: "UTC".to_owned(),
            next: None,
            expected: None,
            never: false,
            lacked: false,
            run: None,
            now: Now::default(),
        }
    }
}

/// What is true of a job only now.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Now {
    /// Since when it is paused, until when (None: until somebody resumes it), and why.
    pub paused: Option<(i64, Option<i64>, Option<String>)>,
    /// So many of its next occurrences are to be skipped.
    pub skip: u32,
    pub standstill: Option<Standstill>,
}

/// Why a job has no success.
#[derive(Debug, Clone, PartialEq)]
pub enum Standstill {
    /// It has been running since then.
    Runs { since: i64, on: InstanceId },
    /// No instance has the job.
    Nobody,
    /// All live instances drain.
    Drained,
    /// Its last run ended so.
    Ended { outcome: Outcome, at: i64 },
    /// No run of it has begun.
    Idle,
}

impl Now {
    /// `since`: when it last succeeded, or was first seen.
    pub fn of(state: &State, since: i64, now: i64) -> Self {
        let runs = state.open.iter().filter(|o| o.next_attempt.is_none());
        let oldest = runs.min_by_key(|o| o.run.granted_at);
        let last = state.last.as_ref();
        let last = last.filter(|l| l.ended() > since && l.outcome != Outcome::Succeeded);
        let pause = state.pause.as_ref();
        let pause = pause.filter(|p| p.until.is_none_or(|until| now < until));
        Self {
            paused: pause.map(|p| (p.at, p.until, p.reason.clone())),
            skip: state.skip,
            standstill: Some(match (oldest, last) {
                (Some(open), _) => Standstill::Runs {
                    since: open.run.granted_at,
                    on: open.run.instance.clone(),
                },
                (None, _) if state.off > 0 => Standstill::Nobody,
                (None, Some(last)) => Standstill::Ended {
                    outcome: last.outcome,
                    at: last.ended(),
                },
                (None, None) => Standstill::Idle,
            }),
        }
    }
}

/// What is told of a run, or of an occurrence that did not run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct About {
    pub id: Option<RunId>,
    pub occurrence: Occurrence,
    pub trigger: Trigger,
    pub attempt: u32,
    pub outcome: Outcome,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub error: Option<String>,
    pub instance: Option<InstanceId>,
    pub host: Option<String>,
    pub started_at: Option<i64>,
    pub duration_ms: Option<i64>,
    /// Of the first attempt of its occurrence, and so is `waited`.
    pub lateness_ms: Option<i64>,
    /// What its start waited for longest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited: Option<(Wait, u64)>,
    pub count: u64,
    /// The end of its output.
    pub output: String,
}

/// How many jobs a message tells of in full.
pub const ITEMS: usize = 20;
/// How many more it names.
pub const NAMES: usize = 100;
/// What happens within this time of each other becomes one message, ms.
pub const TOGETHER_MS: i64 = 2_000;
/// No message waits longer for others to join it, ms.
pub const JOIN_MOST_MS: i64 = 10_000;
/// The most messages that wait for one channel: the oldest beyond them are given up.
pub const WAITING: usize = 50;
/// A message that could not be delivered for so long is given up, ms.
pub const GIVE_UP_MS: i64 = 3_600_000;
/// The pauses before a message that was refused is tried again: somebody may be about to mend the server. After them it
/// is given up.
const REFUSED_AGAIN: [Duration; 3] = [
    Duration::from_secs(2),
    Duration::from_secs(30),
    Duration::from_secs(120),
];
/// The notes of a job of which nobody is told stay so long, and what was given up is remembered so long, ms.
pub const FORGET_MS: i64 = 7 * 24 * 3_600_000;
/// How many messages that were given up the fleet remembers; of each so many jobs, and so many characters of why.
pub const GIVEN_UP_KEPT: usize = 20;
const GIVEN_UP_NAMES: usize = 5;
const GIVEN_UP_WHY: usize = 300;
/// Of the receivers who lack it so many characters.
const GIVEN_UP_LEFT: usize = 100;

/// The pause after this number of refusals. None: it is given up.
pub fn refused_again(refusals: u32) -> Option<Duration> {
    let before = usize::try_from(refusals.saturating_sub(1)).unwrap_or(usize::MAX);
    REFUSED_AGAIN.get(before).copied()
}

impl Message {
    pub fn new(item: Item, channel: &str, now: i64) -> Self {
        Self {
            channel: channel.to_owned(),
            at: now,
            items: vec![item],
            others: vec![],
            more: 0,
            unnamed: BTreeMap::new(),
            due: now + TOGETHER_MS,
            channel_rests: 0,
            tries: 0,
            refusals: 0,
            left: vec![],
            sending: None,
            perhaps_sent: false,
            why: None,
        }
    }

    /// Whether something for this channel may become part of it that happened after `heard`.
    pub fn takes(&self, channel: &str, heard: i64) -> bool {
        self.channel == channel
            && self.tries == 0
            && self.left.is_empty()
            && self.sending.is_none()
            && heard < self.at + JOIN_MOST_MS
    }

    pub fn has_room(&self) -> bool {
        self.items.len() < ITEMS
    }

    pub fn join(&mut self, item: Item, heard: i64) {
        match self.has_room() {
            true => self.items.push(item),
            false => {
                self.more += 1;
                match self.others.len() < NAMES {
                    true => self.others.push((item.job, item.kind)),
                    false => *self.unnamed.entry(item.kind).or_default() += 1,
                }
            }
        }
        let due = (heard + TOGETHER_MS).min(self.at + JOIN_MOST_MS);
        self.due = self.due.max(due);
    }

    /// Puts the jobs that are bad now before the others, each by their names. What is told of one job stays in the
    /// order in which it happened.
    pub fn arrange(&mut self) {
        let last: BTreeMap<JobName, bool> =
            (self.items.iter().map(|i| (i.job.clone(), i.bad))).collect();
        self.items
            .sort_by_cached_key(|i| (!last.get(&i.job).copied().unwrap_or(i.bad), i.job.clone()));
        self.others
            .sort_by_cached_key(|(job, kind)| (*kind == Kind::Recovered, job.clone()));
    }
}

/// That a message may be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// When, Unix ms.
    pub due: i64,
    /// To these of its receivers.
    pub to: Vec<String>,
}

/// The messages that may be sent: to each receiver, of those of a channel that tell of one job, the oldest. Who hears
/// of a recovery before the failure that came first would take a good job for a bad one. `receivers`: who is to get a
/// message; None: its channel has no receivers of its own.
pub fn in_turn(
    messages: &BTreeMap<String, Message>,
    receivers: impl Fn(&Message) -> Option<Vec<String>>,
) -> BTreeMap<&String, Turn> {
    /// The jobs of which a receiver is yet to hear, and whether there are others that nobody names.
    type Untold<'a> = (BTreeSet<&'a JobName>, bool);
    let mut rests: BTreeMap<&str, i64> = BTreeMap::new();
    for m in messages.values() {
        let until = rests.entry(&m.channel).or_default();
        *until = m.channel_rests.max(*until);
    }
    let mut earlier: BTreeMap<(&str, Option<String>), Untold<'_>> = BTreeMap::new();
    let mut turn = BTreeMap::new();
    // The ids begin with the time, so the oldest comes first.
    for (id, m) in messages {
        let named = m.items.iter().map(|i| &i.job);
        let jobs: BTreeSet<&JobName> = named.chain(m.others.iter().map(|(job, _)| job)).collect();
        let unnamed = m.more > m.others.len() as u64;
        let mut waits = |receiver: Option<String>| {
            let (told, anything) = earlier.entry((&m.channel, receiver)).or_default();
            let waits = *anything || unnamed && !told.is_empty() || !told.is_disjoint(&jobs);
            told.extend(&jobs);
            *anything |= unnamed;
            waits
        };
        let to = match receivers(m) {
            None => (!waits(None)).then(Vec::new),
            // All of them are gone: it is over.
            Some(all) if all.is_empty() => Some(all),
            Some(mut all) => {
                all.retain(|receiver| !waits(Some(receiver.clone())));
                (!all.is_empty()).then_some(all)
            }
        };
        if let Some(to) = to {
            let rests = rests.get(m.channel.as_str()).copied().unwrap_or_default();
            let due = m.due.max(rests);
            turn.insert(id, Turn { due, to });
        }
    }
    turn
}
