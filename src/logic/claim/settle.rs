//! A run has ended.

use serde::{Deserialize, Serialize};

use super::{Effects, Event, Last, NextAttempt, Open, State, last};
use crate::model::{Outcome, RunId, RunRecord, Trigger};

/// Records how a run ended and releases its lease.
#[derive(Debug, Clone, PartialEq)]
pub struct Settle {
    pub run: RunId,
    /// Names job, occurrence, attempt and all that the history shall keep.
    pub record: RunRecord,
    pub next_attempt: Option<DelayedAttempt>,
}

/// The attempt that is to follow, as the holder asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelayedAttempt {
    /// Milliseconds from the moment in which the store records the settlement.
    pub delay_ms: i64,
    /// [`Trigger::Retry`] or [`Trigger::Takeover`].
    pub trigger: Trigger,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Settlement {
    /// Recorded, and the lease is released. Also the answer to the same settlement sent again.
    Done,
    /// The lease was no longer ours. The record stands in the history all the same.
    Lost,
}

pub fn settle(
    state: &mut Option<State>,
    s: &Settle,
    now_us: i64,
    incarnation: &str,
    effects: &mut Effects,
) -> Settlement {
    let now = now_us.div_euclid(1000);
    let (job, occurrence) = (&s.record.job, s.record.occurrence);
    let fresh = state
        .as_ref()
        .is_some_and(|st| st.incarnation == incarnation);
    let st = state.get_or_insert_default();
    let ended = |l: &Last| l.run == s.run && l.outcome != Outcome::Unknown;
    if st.last.as_ref().is_some_and(ended) {
        return Settlement::Done;
    }
    let i = st
        .open
        .iter()
        .position(|e| e.run.id == s.run && e.next_attempt.is_none());
    let mut record = s.record.clone();
    record.by = i.and_then(|i| match s.record.outcome {
        Outcome::Cancelled => st.open[i].stopped_by.clone(),
        _ => st.open[i].by.clone(),
    });
    effects.records.push(record);
    let next_attempt = s.next_attempt.map(|a| NextAttempt {
        at: now + a.delay_ms,
        trigger: a.trigger,
    });
    let awaited = |e: &Open| Event::AttemptAwaited {
        job: job.clone(),
        occurrence: e.run.occurrence,
    };
    if i.is_none() && fresh {
        // The instance that found the lease lapsed could not know how the run ended.
        if let Some(l) = st.last.as_mut().filter(|l| l.run == s.run) {
            (l.outcome, l.started) = (s.record.outcome, s.record.started_at);
            l.ended_at(s.record.finished_at.unwrap_or(now));
            if let Some(next_attempt) = next_attempt
                && let Some(e) = still_possible(st, s.run)
            {
                effects.events.push(awaited(&e));
                st.open.push(Open {
                    next_attempt: Some(next_attempt),
                    ..e
                });
            }
        }
        return Settlement::Lost;
    }
    if occurrence.0 > st.newest {
        st.newest = occurrence.0;
    }
    if let Some(i) = i {
        let e = &mut st.open[i];
        // The run may have ended long before the store could be told: what came due in between did not overlap with it.
        let ended = s.record.finished_at.unwrap_or(now).min(now);
        st.last = Some(last(e, &s.record, ended, now));
        // Asked to end on purpose: no further attempt.
        match next_attempt.filter(|_| e.stop.is_none()) {
            Some(next_attempt) => {
                e.next_attempt = Some(next_attempt);
                effects.events.push(awaited(e));
            }
            None => {
                st.open.remove(i);
            }
        }
    }
    if i.is_none() {
        end_unseen(st, s, now);
    }
    if st.waiting {
        st.waiting = false;
        effects.events.push(Event::Ended { job: job.clone() });
    }
    Settlement::Done
}

/// An attempt from before the one that settles may be in a state that is older than its grant: it has ended.
fn end_unseen(st: &mut State, s: &Settle, now: i64) {
    let (occurrence, attempt) = (s.record.occurrence, s.record.attempt);
    st.open
        .retain(|e| e.run.occurrence != occurrence || e.run.attempt > attempt);
    // Otherwise a renewal of such an attempt that comes late would put it back, and ours would be granted again.
    let newer = |l: &Last| (l.occurrence, l.attempt) > (occurrence, attempt);
    if !st.last.as_ref().is_some_and(newer) {
        st.last = unseen(s, now).or(st.last.take());
    }
}

/// The run that settles, of which the store has no entry: nobody knows when it was granted.
fn unseen(s: &Settle, now: i64) -> Option<Last> {
    let record = &s.record;
    let ended = record.finished_at.unwrap_or(now);
    let to = ended.min(now);
    let mut last = Last {
        occurrence: record.occurrence,
        attempt: record.attempt,
        run: s.run,
        instance: record.instance.clone()?,
        outcome: record.outcome,
        from: record.started_at.unwrap_or(to),
        started: record.started_at,
        to,
        ended: None,
    };
    last.ended_at(ended);
    Some(last)
}

/// The entry of `run`, which was found dead, if it may have another attempt: nobody asked it to end, and no newer
/// occurrence was granted since, whose token would be higher.
fn still_possible(st: &mut State, run: RunId) -> Option<Open> {
    let State { lapsed, open, .. } = st;
    let lapsed = lapsed.take_if(|e| {
        let newer = |o: &Open| o.run.occurrence > e.run.occurrence;
        e.run.id == run && e.stop.is_none() && !open.iter().any(newer)
    });
    lapsed.map(|e| *e)
}
