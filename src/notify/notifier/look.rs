//! The notifier's looks at the records of jobs.

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Unbounded},
    time::Duration,
};

use tracing::debug;

use super::{Changes, GIVE_UP_MS, Notifier};
use crate::{
    clock::Boottime,
    logic::{
        claim::State,
        notify::{ITEMS, Notes, made_at},
    },
    model::{JobName, RunRecord},
    notify::text,
    store::{self, HISTORY_KEPT, tail},
};

/// How many jobs are looked at together: what follows from it is one write.
pub(super) const AT_ONCE: usize = 100;
/// How many records are read first: most often one is new.
const FIRST: usize = 4;
/// The time between two looks at some of the jobs of which nothing was heard, and how many those are.
const ROUND: (Duration, usize) = (Duration::from_secs(5), 500);
/// Jobs are looked at again so soon after a look that could not judge all.
const SOON: Duration = Duration::from_millis(200);

/// By job: its new records, oldest first.
type New = BTreeMap<JobName, Vec<RunRecord>>;

impl Notifier {
    /// Looks at some jobs, and notes what follows.
    pub(super) async fn look(&mut self, now: Boottime) {
        if now >= self.next_round {
            // Hints may be lost.
            self.next_round = now + ROUND.0;
            let from = self.round.as_ref().map_or(Unbounded, Excluded);
            let names = self.config.jobs.range::<JobName, _>((from, Unbounded));
            let some: Vec<JobName> = names.map(|(name, _)| name).take(ROUND.1).cloned().collect();
            self.round = some.last().cloned();
            self.pending.extend(some);
        }
        if now < self.not_before {
            return;
        }
        let from = self.looked.as_ref().map_or(Unbounded, Excluded);
        let names = self.pending.range::<JobName, _>((from, Unbounded));
        let mut names: Vec<JobName> = names.take(AT_ONCE).cloned().collect();
        self.looked = names.last().cloned();
        self.pending.retain(|name| !names.contains(name));
        names.retain(|name| !self.channels(name).is_empty());
        if names.is_empty() {
            return;
        }
        match self.judge(names.clone()).await {
            Ok((changes, again)) => {
                if !again.is_empty() {
                    self.not_before = Boottime::now() + SOON;
                }
                self.pending.extend(again);
                if !changes.notes.is_empty() && !self.commit(changes).await {
                    debug!("another instance judges these jobs");
                }
            }
            Err(e) => {
                debug!(error = %e, "cannot look at jobs for notifications; retrying");
                self.not_before = Boottime::now() + SOON * 5;
                self.pending.extend(names);
            }
        }
    }

    /// What follows from the records of these jobs; and at which to look again soon.
    async fn judge(&self, names: Vec<JobName>) -> Result<(Changes, Vec<JobName>), store::Error> {
        let new = self.unseen(names).await?;
        let mut bad: Vec<JobName> = new.keys().cloned().collect();
        bad.retain(|name| {
            let undecided = |n: &Notes| !n.undecided.is_empty();
            self.notes.get(name).is_some_and(undecided)
                || new[name].iter().any(|r| r.outcome.is_bad())
        });
        // An attempt that another one follows is not the end of its occurrence. With the same records before and after
        // it, the state says which occurrences have their last one.
        let states = match bad.is_empty() {
            true => vec![],
            false => self.asking.states(bad.clone()).await?.value,
        };
        let mut states: BTreeMap<&JobName, _> = bad.iter().zip(states).collect();
        let later = self.unseen(bad.clone()).await?;
        let (mut changes, mut again) = (Changes::default(), vec![]);
        for (name, records) in new {
            let state = states.remove(&name);
            match state {
                Some(_) if later.get(&name) != Some(&records) => again.push(name),
                // A state that cannot be read keeps no failure from being told.
                state => {
                    let state = state.and_then(|s| s.ok()?);
                    self.judge_job(&mut changes, name, records, state.as_ref())
                        .await;
                }
            }
        }
        Ok((changes, again))
    }

    /// The records of these jobs that were not taken in yet.
    async fn unseen(&self, names: Vec<JobName>) -> Result<New, store::Error> {
        let (mut out, mut names) = (New::new(), names);
        for most in [FIRST, HISTORY_KEPT] {
            let read = self.asking.records(names.clone(), most).await?;
            let mut deep = vec![];
            for (at, records) in read {
                let name = names[at].clone();
                let n = self.notes.get(&name).and_then(|n| n.unseen(&records));
                if n.is_none() && records.len() == FIRST && most == FIRST {
                    deep.push(name);
                    continue;
                }
                let n = n.unwrap_or(records.len());
                out.insert(name, records.into_iter().take(n).rev().collect());
            }
            names = deep;
        }
        Ok(out)
    }

    /// Judges the new records of a job.
    async fn judge_job(
        &self,
        changes: &mut Changes,
        name: JobName,
        records: Vec<RunRecord>,
        state: Option<&State>,
    ) {
        let (channels, now) = (self.channels(&name), self.now_ms());
        let known = self.notes.get(&name);
        let mut notes = known.cloned().unwrap_or_else(|| Notes::new(now));
        // Of a job that nobody was told of so far, only what a message could still tell in time.
        let begin = match known {
            Some(_) => i64::MIN,
            None => self.since.max(now.saturating_sub(GIVE_UP_MS)),
        };
        let mut items = vec![];
        for r in notes.take_in(records, state) {
            match made_at(&r) < begin {
                true => notes.note_success(&r),
                false => items.extend(notes.judge(&channels, &r, now)),
            }
        }
        for (channel, mut item) in items {
            let open = self.open_message(changes, &channel);
            let in_full = open.is_none_or(|m| m.items.len() < ITEMS);
            if let Some(run) = item.run.as_mut().filter(|_| in_full && item.bad) {
                run.output_tail = text::last_lines(&self.output(run).await);
            }
            self.tell(changes, &channel, item, now);
        }
        if known != Some(&notes) {
            changes.notes.insert(name, notes);
        }
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
