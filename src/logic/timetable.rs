//! Which occurrences are due, and after downtime which were missed and which are to be caught up.
//!
//! [`Timetable`] hands out occurrences while soloist runs; [`overdue`] and [`Backlog`] judge the time when it did not.
//! Nothing here reads a clock: instants are Unix milliseconds of the caller's clock.

use std::{
    collections::{BTreeSet, HashMap},
    fmt::Display,
    hash::Hash,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;

use super::{
    catch_up::Backlog,
    claim, jitter,
    schedule::{Schedule, next_of},
};
use crate::model::Occurrence;

/// Occurrences of one job that one [`Timetable::take_due`] hands out at most; the others stay due.
pub const MAX_PER_CALL: usize = 1000;

/// If more occurrences of one job than this have started, they are handed out as a range.
const FEW: usize = 8;

/// The next occurrence of every job, ordered by start instant.
///
/// The cost of asking when the next one starts does not depend on the number of jobs; the cost of handing one out grows
/// with the logarithm of that number. The key's `Display` is the job's name: jitter is derived from it.
#[derive(Debug)]
pub struct Timetable<K> {
    /// Boxed: up to half of a hash table's places are empty.
    entries: HashMap<K, Box<Entry>>,
    /// One for each entry that has a next occurrence.
    queue: BTreeSet<(i64, K)>,
}

#[derive(Debug)]
struct Entry {
    schedules: Arc<[Arc<Schedule>]>,
    jitter: Duration,
    /// The last occurrence handed out, or where the entry began.
    cursor: Occurrence,
    next: Option<Next>,
}

/// An occurrence that has not been handed out yet.
#[derive(Debug, Clone, Copy)]
struct Next {
    occurrence: Occurrence,
    start_at_ms: i64,
    /// The occurrence after it: jitter must not delay a start beyond that one.
    following: Option<Occurrence>,
}

/// An occurrence whose start instant has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Due<K> {
    pub key: K,
    pub occurrence: Occurrence,
    /// When to start: the occurrence and its jitter.
    pub start_at_ms: i64,
    /// The job's occurrence handed out before this, or `after` of [`Timetable::insert`]. None lies in between.
    pub previous: Occurrence,
}

impl<K: Clone + Ord + Hash + Display> Timetable<K> {
    pub fn new() -> Self {
        Self {
            entries: HashMap::new(),
            queue: BTreeSet::new(),
        }
    }

    /// Adds a job whose first occurrence is the first after `after`. A job of the same key is replaced as if it
    /// had been removed before.
    pub fn insert(
        &mut self,
        key: K,
        schedules: impl Into<Arc<[Arc<Schedule>]>>,
        jitter: Duration,
        after: Occurrence,
    ) {
        self.remove(&key);
        let schedules = schedules.into();
        let first = next_of(&schedules, after);
        let next = first.map(|first| Next::new(&key, &schedules, jitter, first));
        if let Some(next) = next {
            self.queue.insert((next.start_at_ms, key.clone()));
        }
        self.entries.insert(
            key,
            Box::new(Entry {
                schedules,
                jitter,
                cursor: after,
                next,
            }),
        );
    }

    pub fn remove(&mut self, key: &K) {
        if let Some(next) = self.entries.remove(key).and_then(|entry| entry.next) {
            self.queue.remove(&(next.start_at_ms, key.clone()));
        }
    }

    pub fn contains(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Start instant of the earliest occurrence that has not been handed out; None when there is none any more.
    pub fn next_at(&self) -> Option<Occurrence> {
        self.queue
            .first()
            .map(|(start_at_ms, _)| Occurrence(*start_at_ms))
    }

    /// The last occurrence of `key` that was handed out, or `after` of its [`Timetable::insert`].
    pub fn cursor(&self, key: &K) -> Option<Occurrence> {
        self.entries.get(key).map(|entry| entry.cursor)
    }

    /// The next occurrence of `key` and its start instant.
    pub fn upcoming(&self, key: &K) -> Option<(Occurrence, i64)> {
        let next = self.entries.get(key)?.next?;
        Some((next.occurrence, next.start_at_ms))
    }

    /// If more than a few occurrences of a job have started by `now`, takes them out as a range: the host was
    /// suspended, or a clock was stepped. [`Timetable::take_due`] then hands out the others.
    #[must_use]
    pub fn take_backlog(&mut self, now: Occurrence) -> Vec<(K, Backlog)> {
        let started = self.queue.iter().take_while(|(at, _)| *at <= now.0);
        let keys: Vec<K> = started.map(|(_, key)| key.clone()).collect();
        let many = |key: &K| {
            let entry = self.entries.get(key)?;
            let following = entry.next?.following.filter(|f| *f <= now)?;
            let next = |o: &Occurrence| next_of(&entry.schedules, *o).filter(|o| *o <= now);
            let few = std::iter::successors(Some(following), next)
                .take(FEW)
                .count();
            (few == FEW).then(|| key.clone())
        };
        let keys: Vec<K> = keys.iter().filter_map(many).collect();
        let mut out = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            let (s, after) = (&entry.schedules, entry.cursor);
            let starts = |at: &Occurrence| Next::new(&key, s, entry.jitter, *at).start_at_ms;
            // Only the newest can still wait for its jitter.
            let last = latest(s, after, now).and_then(|last| match starts(&last) <= now.0 {
                true => Some(last),
                false => latest(s, after, Occurrence(last.0 - 1)),
            });
            let (Some(last), Some(was)) = (last, entry.next) else {
                continue;
            };
            let backlog = Backlog {
                schedules: entry.schedules.clone(),
                jitter: entry.jitter,
                after,
                last,
            };
            let next = next_of(s, last).map(|next| Next::new(&key, s, entry.jitter, next));
            (entry.cursor, entry.next) = (last, next);
            self.queue.remove(&(was.start_at_ms, key.clone()));
            if let Some(next) = next {
                self.queue.insert((next.start_at_ms, key.clone()));
            }
            out.push((key, backlog));
        }
        out
    }

    /// Hands out the next occurrence of one job, whenever it starts.
    pub fn take_next(&mut self, key: &K) -> Option<Due<K>> {
        let entry = self.entries.get_mut(key)?;
        let next = entry.next?;
        let due = Due {
            key: key.clone(),
            occurrence: next.occurrence,
            start_at_ms: next.start_at_ms,
            previous: entry.cursor,
        };
        entry.cursor = next.occurrence;
        entry.next = next
            .following
            .map(|occurrence| Next::new(key, &entry.schedules, entry.jitter, occurrence));
        self.queue.remove(&(next.start_at_ms, key.clone()));
        if let Some(next) = entry.next {
            self.queue.insert((next.start_at_ms, key.clone()));
        }
        Some(due)
    }

    /// Hands out all occurrences that start at or before `until`, by start instant; those of one job always in the
    /// order of their occurrences. Each is handed out once.
    ///
    /// At most [`MAX_PER_CALL`] of a job: the others stay due, and [`Timetable::next_at`] says so. For a
    /// long absence use [`overdue`] and insert the job anew.
    #[must_use]
    pub fn take_due(&mut self, until: Occurrence) -> Vec<Due<K>> {
        let mut due = Vec::new();
        let mut again = Vec::new();
        while self
            .queue
            .first()
            .is_some_and(|(start_at_ms, _)| *start_at_ms <= until.0)
        {
            let Some((_, key)) = self.queue.pop_first() else {
                break;
            };
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            let mut budget = MAX_PER_CALL;
            while let Some(next) = entry.next
                && next.start_at_ms <= until.0
                && budget > 0
            {
                due.push(Due {
                    key: key.clone(),
                    occurrence: next.occurrence,
                    start_at_ms: next.start_at_ms,
                    previous: entry.cursor,
                });
                entry.cursor = next.occurrence;
                entry.next = next
                    .following
                    .map(|occurrence| Next::new(&key, &entry.schedules, entry.jitter, occurrence));
                budget -= 1;
            }
            if let Some(next) = entry.next {
                again.push((next.start_at_ms, key));
            }
        }
        self.queue.extend(again);
        // Starts of one job strictly increase, so this keeps its occurrences in order.
        due.sort_by(|a, b| (a.start_at_ms, &a.key).cmp(&(b.start_at_ms, &b.key)));
        due
    }
}

impl<K: Clone + Ord + Hash + Display> Default for Timetable<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl Next {
    fn new(
        key: &impl Display,
        schedules: &[Arc<Schedule>],
        jitter: Duration,
        occurrence: Occurrence,
    ) -> Self {
        let following = next_of(schedules, occurrence);
        let start_at_ms = match jitter.is_zero() {
            true => occurrence.0,
            false => jitter::delayed(&key.to_string(), occurrence, following, jitter),
        };
        Self {
            occurrence,
            start_at_ms,
            following,
        }
    }
}

/// The occurrences of a job in a time that nobody watched.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Overdue {
    /// The occurrences before `recent`.
    pub older: Option<Range>,
    /// The newest, ascending.
    pub recent: Vec<Occurrence>,
}

/// Occurrences of a job that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub first: Occurrence,
    pub last: Occurrence,
    pub count: u64,
    /// False: `count` is an estimate, from how close together the first ones are.
    pub exact: bool,
}

/// Occurrences that [`overdue`] counts one by one before it estimates.
const COUNTED: u64 = 10_000;

/// The occurrences in (`after`, `now`]: the newest `keep`, and of those before them the first, the last and how many.
///
/// The work is bounded by `keep` and a constant, however long the time was: a job of every second has 31 million
/// occurrences in a year.
pub fn overdue(
    schedules: &[Arc<Schedule>],
    after: Occurrence,
    now: Occurrence,
    keep: usize,
) -> Overdue {
    // Nothing is due outside the calendar, and within it no sum or difference below can overflow.
    let calendar = Timestamp::MIN.as_millisecond()..=Timestamp::MAX.as_millisecond();
    let within = |o: Occurrence| Occurrence(o.0.clamp(*calendar.start(), *calendar.end()));
    let (after, now) = (within(after), within(now));
    let mut recent: Vec<Occurrence> = Vec::new();
    let mut bound = now;
    let mut distance = 1000;
    let last_older = loop {
        let Some(latest) = latest_in(schedules, after, bound, distance) else {
            break None;
        };
        if recent.len() == keep {
            break Some(latest);
        }
        if let Some(later) = recent.last() {
            distance = later.0 - latest.0;
        }
        recent.push(latest);
        bound = Occurrence(latest.0 - 1);
    };
    recent.reverse();
    let older = last_older
        .and_then(|last| next_of(schedules, after).map(|first| range(schedules, first, last)));
    Overdue { older, recent }
}

/// The newest occurrence in (`after`, `bound`]. `distance` (ms) is a guess of how far back it is.
fn latest_in(
    schedules: &[Arc<Schedule>],
    after: Occurrence,
    bound: Occurrence,
    distance: i64,
) -> Option<Occurrence> {
    let next = |t: Occurrence| next_of(schedules, t).filter(|next| *next <= bound);
    // Schedules only look ahead. So go back in growing steps until something lies ahead ...
    let mut distance = distance.max(1);
    let mut latest = loop {
        let from = Occurrence(bound.0.saturating_sub(distance).max(after.0));
        match next(from) {
            Some(found) => break found,
            None if from == after || bound <= after => return None,
            None => distance *= 2,
        }
    };
    // ... and halve the time between that and the end, until nothing follows.
    let mut empty_from = bound;
    while let Some(found) = next(latest) {
        let middle = Occurrence(found.0 + (empty_from.0 - found.0) / 2);
        latest = match next(middle) {
            Some(beyond) => beyond,
            None => {
                empty_from = middle;
                found
            }
        };
    }
    Some(latest)
}

fn range(schedules: &[Arc<Schedule>], first: Occurrence, last: Occurrence) -> Range {
    let (mut count, mut at) = (1, first);
    while count < COUNTED && at < last {
        match next_of(schedules, at) {
            Some(next) => at = next,
            None => break,
        }
        count += 1;
    }
    let exact = at >= last;
    if !exact {
        let (all, counted) = ((last.0 - first.0) as u128, (at.0 - first.0).max(1) as u128);
        count = u64::try_from(u128::from(count - 1) * all / counted + 1).unwrap_or(u64::MAX);
    }
    Range {
        first,
        last,
        count,
        exact,
    }
}

/// What is left of a range of occurrences when those up to `known` are decided, and so are those in `early`
/// (ascending).
pub fn undecided(
    schedules: &[Arc<Schedule>],
    known: Occurrence,
    early: &[Occurrence],
    range: claim::Missed,
) -> Vec<claim::Missed> {
    if range.last <= known {
        return vec![];
    }
    let holes = early
        .iter()
        .filter(|at| **at > known && range.first <= **at && **at <= range.last);
    let from = known.max(Occurrence(range.first.0 - 1));
    if from < range.first && holes.clone().next().is_none() {
        return vec![range];
    }
    // Each piece lies between one that is decided and the next one that is, or the end.
    let mut pieces = vec![];
    let mut after = from;
    for until in holes.map(|at| Occurrence(at.0 - 1)).chain([range.last]) {
        // The ends of the range are occurrences, also where they are of another schedule than the present one.
        let first = match next_of(schedules, after).filter(|first| *first <= until) {
            _ if after < range.first => Some(range.first).filter(|first| *first <= until),
            None if until == range.last && after < until => Some(range.last),
            first => first,
        };
        if let Some(first) = first {
            let last = match latest(schedules, after, until) {
                _ if until == range.last => until,
                last => last.unwrap_or(first).max(first),
            };
            let count = self::range(schedules, first, last).count;
            pieces.push(claim::Missed {
                first,
                last,
                count: count.clamp(1, range.count.max(1)),
            });
        }
        after = Occurrence(until.0 + 1);
    }
    pieces
}

/// The newest occurrence in (`after`, `until`].
pub fn latest(
    schedules: &[Arc<Schedule>],
    after: Occurrence,
    until: Occurrence,
) -> Option<Occurrence> {
    overdue(schedules, after, until, 1).recent.pop()
}

#[cfg(test)]
mod tests;
