//! The notifier's looks at the records of jobs.

use tracing::debug;

use super::{Changes, Keeper, LOOK_AT, LOOK_SOON, UNREADABLE_MOST};
use crate::{
    clock::Boottime,
    failpoint,
    logic::{
        claim::State,
        notify::{GIVE_UP_MS, Item, Kind, Notes, Sight, Verdict, made_at},
    },
    model::{JobName, RunRecord},
    notify::text,
    store::{self, HISTORY_KEPT, tail},
};

/// How many jobs are looked at together: what follows from it is one write.
pub(super) const AT_ONCE: usize = 100;
/// How many records are read first: most often one is new.
const FIRST: usize = 4;

/// The records of a job, newest first.
type OfJob = (JobName, Vec<RunRecord>);

impl Keeper {
    /// Some of the jobs of which nothing was heard: hints may be lost.
    pub(super) fn next_of_round(&mut self) {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = self.round.as_ref().map_or(Unbounded, Excluded);
        let jobs = &self.config.jobs;
        let some = jobs.range::<JobName, _>((from, Unbounded)).take(LOOK_AT);
        let mut last = None;
        for (name, job) in some {
            last = Some(name.clone());
            if !job.alarms.notify.is_empty() {
                self.pending.add(name.clone(), self.heard);
            }
        }
        self.round = last;
        let awaiting: Vec<JobName> = self.awaiting().cloned().collect();
        for name in awaiting {
            self.pending.add(name, self.heard);
        }
    }

    /// Looks at some jobs, and notes what follows.
    pub(super) async fn look(&mut self) {
        let mut some = self.pending.take(AT_ONCE);
        some.retain(|(name, _)| self.watched(name).is_some());
        if some.is_empty() {
            return;
        }
        failpoint::slow("slow_look").await;
        match self.judge(&some).await {
            Ok((changes, again)) => {
                if !again.is_empty() {
                    self.not_before = Boottime::now() + LOOK_SOON;
                    some.retain(|(name, _)| again.contains(name));
                    self.pending.put_back(some);
                }
                if !changes.notes.is_empty() && !self.commit(changes).await {
                    debug!("another instance judges these jobs");
                }
            }
            Err(e) => {
                debug!(error = %e, "cannot look at jobs for notifications; retrying");
                self.not_before = Boottime::now() + LOOK_SOON * 5;
                self.pending.put_back(some);
            }
        }
    }

    /// What follows from the records of these jobs; and at which to look again soon.
    async fn judge(
        &mut self,
        some: &[(JobName, i64)],
    ) -> Result<(Changes, Vec<JobName>), store::Error> {
        let names = some.iter().map(|(name, _)| name.clone()).collect();
        let heard = |name: &JobName| {
            let of = some.iter().find(|(n, _)| n == name);
            of.map_or(i64::MAX, |(_, heard)| *heard)
        };
        let first = self.unjudged(names).await?;
        let (mut changes, mut again) = (Changes::default(), vec![]);
        let awaits = |name| self.notes.get(name).is_some_and(|n| !n.awaited.is_empty());
        let bad: Vec<JobName> = first
            .iter()
            .filter(|(name, all)| awaits(name) || all.iter().any(|r| r.outcome.is_bad()))
            .map(|(name, _)| name.clone())
            .collect();
        let now = self.now_ms();
        // Most often all is well.
        for (name, records) in &first {
            if !bad.contains(name) {
                let upto = records.len();
                let when = (heard(name), now);
                self.judge_job(&mut changes, name, (records, upto), None, when)
                    .await;
            }
        }
        if bad.is_empty() {
            return Ok((changes, again));
        }
        // An attempt that another one follows is not the end of its occurrence. Read the records again after the
        // state: an occurrence that is not open then has its last record.
        let (asked, order) = (bad.clone(), bad.clone());
        let states = self.asking.states(asked).await?;
        let later = self.unjudged(bad).await?;
        for (name, records) in &later {
            let before = first.iter().find(|(n, _)| n == name).map(|(_, r)| r);
            let known = |r: &RunRecord| before.is_some_and(|all| all.contains(r));
            // What is newer than the state waits for the next look: a bad end may not be the last of its occurrence,
            // and a good one must not be told before a bad one that is still awaited.
            let upto = records.iter().position(|r| !known(r));
            if upto.is_some() {
                again.push(name.clone());
            }
            let at = order.iter().position(|n| n == name);
            let state = match at.and_then(|at| states.value.get(at)) {
                // A later round looks again.
                Some(Err(_)) if self.may_be_read_soon(name) => continue,
                Some(Ok(state)) => {
                    self.unreadable.remove(name);
                    state.as_ref()
                }
                _ => None,
            };
            let records = (&records[..], upto.unwrap_or(records.len()));
            let when = (heard(name), now);
            self.judge_job(&mut changes, name, records, state, when)
                .await;
        }
        self.limit(&mut changes, now);
        Ok((changes, again))
    }

    /// Whether the state of a job cannot be read only for a moment, as far as anybody knows.
    fn may_be_read_soon(&mut self, name: &JobName) -> bool {
        let now = Boottime::now();
        let since = *self.unreadable.entry(name.clone()).or_insert(now);
        now.since(since) < UNREADABLE_MOST
    }

    /// The records of these jobs that are not judged yet, oldest first.
    async fn unjudged(&self, names: Vec<JobName>) -> Result<Vec<OfJob>, store::Error> {
        let mut out = vec![];
        let mut deep = vec![];
        for (name, records) in self.records(names, FIRST).await? {
            let notes = self.notes.get(&name);
            match notes.map(|n| n.unjudged(&records)) {
                Some(Some(n)) => out.push((name, oldest_first(&records, n))),
                _ if records.len() < FIRST => {
                    let n = records.len();
                    out.push((name, oldest_first(&records, n)));
                }
                _ => deep.push(name),
            }
        }
        for (name, records) in self.records(deep, HISTORY_KEPT).await? {
            let n = self.notes.get(&name).and_then(|n| n.unjudged(&records));
            let n = n.unwrap_or(records.len());
            out.push((name, oldest_first(&records, n)));
        }
        Ok(out)
    }

    /// The newest `n` records of each of these jobs. Those that cannot be read hide nothing else.
    async fn records(&self, names: Vec<JobName>, n: usize) -> Result<Vec<OfJob>, store::Error> {
        let all = self.asking.records(names.clone(), n).await?;
        Ok(all
            .into_iter()
            .map(|(at, records)| (names[at].clone(), records))
            .collect())
    }

    /// Judges the first `upto` of these new records of one job, oldest first. `heard`: they are of after this time.
    async fn judge_job(
        &self,
        changes: &mut Changes,
        name: &JobName,
        (records, upto): (&[RunRecord], usize),
        state: Option<&State>,
        (heard, now): (i64, i64),
    ) {
        let Some(watched) = self.watched(name) else {
            return;
        };
        let known = self.notes.get(name);
        let mut notes = known.cloned().unwrap_or_else(|| Notes::new(now));
        let has = watched.job.is_some();
        let sight = Sight { state, has, now };
        let mut ends = notes.dropped(records, sight);
        let dropped = ends.len();
        ends.extend_from_slice(&records[..upto]);
        let mut told: Vec<(Verdict, RunRecord, Option<i64>)> = vec![];
        for (at, mut r) in ends.into_iter().enumerate() {
            // Of a job that nobody was told of so far, only what a message could still tell in time.
            let begin = self.since.max(now.saturating_sub(GIVE_UP_MS));
            if known.is_none() && made_at(&r) < begin {
                notes.note(&r);
                continue;
            }
            if let Some(new) = at.checked_sub(dropped)
                && notes.passes_over(&r, &records[new + 1..], sight)
            {
                continue;
            }
            notes.start_as_first(&mut r);
            let usual = notes.usual();
            let verdicts = notes.judge(self.rules_of(&watched), &r, now);
            for verdict in verdicts {
                let expected = self.expected(&verdict, usual);
                told.push((verdict, r.clone(), expected));
            }
        }
        notes.watched_by(watched.channels);
        if known == Some(&notes) {
            return;
        }
        for (verdict, r, expected) in told {
            let output = match self.has_room(changes, &verdict.channel, heard) && verdict.bad {
                true => self.output(&r).await,
                false => String::new(),
            };
            let run = Some(text::about(&r, &output));
            let item = Item {
                expected,
                ..text::item(name, watched.job, &verdict, run, now)
            };
            self.tell(changes, &verdict.channel, item, (heard, now));
        }
        changes.notes.insert(name.clone(), notes);
    }

    /// What the run should have taken, or how late it may start, ms. `usual`: the usual duration before it.
    fn expected(&self, verdict: &Verdict, usual: Option<i64>) -> Option<i64> {
        match verdict.kind {
            Kind::TooLong | Kind::TooShort => usual,
            Kind::Late => Some(
                self.config
                    .channels
                    .get(&verdict.channel)?
                    .rules
                    .late_after_ms,
            ),
            _ => None,
        }
    }

    fn has_room(&self, changes: &mut Changes, channel: &str, now: i64) -> bool {
        let open = self.open_message(changes, channel, now);
        open.is_none_or(|message| message.has_room())
    }

    /// The end of a run's output; empty if the store does not say.
    async fn output(&self, r: &RunRecord) -> String {
        let (Some(run), job) = (r.run_id, r.job.clone()) else {
            return String::new();
        };
        let asked = self
            .asking
            .ask(|s| async move { tail(&*s, &job, run).await })
            .await;
        asked.map(|(text, _)| text).unwrap_or_default()
    }
}

fn oldest_first(records: &[RunRecord], n: usize) -> Vec<RunRecord> {
    records.iter().take(n).rev().cloned().collect()
}
