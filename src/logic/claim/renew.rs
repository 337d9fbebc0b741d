//! A holder renews its lease.

use super::{Last, Open, State, StopRequest};
use crate::model::{JobName, Outcome, Run};

/// [`Register::schedule`](super::Register::schedule) and [`Register::definition`](super::Register::definition) of a job
/// that the library's electors have: no configuration knows it.
pub const LIBRARY: &str = "library";

/// Prolongs a lease. Carries all that is needed to reclaim it in a new incarnation of the store.
#[derive(Debug, Clone, PartialEq)]
pub struct Renew {
    pub job: JobName,
    pub run: Run,
    /// Counts the renewals sent for this run, from 1.
    pub seq: u32,
    /// The holder did not trust its lease any more when it asked: a store that lost the lease must not have it back.
    pub late: bool,
    /// The incarnation of a store that answered [`Renewal::Unknown`] to the renewal before: it may have the lease back.
    /// Empty: no store may.
    pub reclaim: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Renewal {
    /// Still ours; with a request to end the run, if there is one.
    Renewed(Option<StopRequest>),
    /// Another has it, or it was ended: stop at once.
    Lost,
    /// The store has lost its data, or has other data, and does not know the run: a holder that still trusts its lease
    /// asks again, and reclaims it.
    Unknown,
}

/// Prolongs the lease of exactly this run, or reclaims it when the store's state is from another incarnation.
pub fn renew(state: &mut Option<State>, r: &Renew, now_us: i64, incarnation: &str) -> Renewal {
    let now = now_us.div_euclid(1000);
    if let Some(st) = state.as_mut() {
        if let Some(e) = st
            .open
            .iter_mut()
            .find(|e| e.run.id == r.run.id && e.next_attempt.is_none())
        {
            e.seq = e.seq.saturating_add(1).max(r.seq);
            e.renewed_at = now;
            e.incarnation = incarnation.to_owned();
            return Renewal::Renewed(e.stop);
        }
        let ended = |l: &Last| l.run == r.run.id && l.outcome != Outcome::Unknown;
        // Data from before a restart that knows of this occurrence and does not have the run: it was found dead.
        let known = |e: &Open| e.run.occurrence == r.run.occurrence;
        let decided = !st.incarnation.is_empty() && st.newest >= r.run.occurrence.0;
        let dead = st.incarnation == incarnation || decided && !st.open.iter().any(known);
        // A later attempt has ended: it was granted after ours ended.
        let later = |l: &Last| l.occurrence == r.run.occurrence && l.attempt > r.run.attempt;
        let over = |l: &Last| ended(l) || later(l);
        if dead || st.last.as_ref().is_some_and(over) {
            return Renewal::Lost;
        }
    }
    // A later attempt that is already there was granted after ours ended.
    let later = |e: &Open| e.run.occurrence == r.run.occurrence && e.run.attempt > r.run.attempt;
    let open = state.iter().flat_map(|st| &st.open);
    if r.late || open.into_iter().any(later) {
        return Renewal::Lost;
    }
    // It may have been on its way since before the loss; meanwhile this run may have ended, and a later attempt may
    // have come and gone with the data.
    if r.reclaim != incarnation {
        return Renewal::Unknown;
    }
    // A holder that still trusts its lease may put it back into a store that lost it.
    let st = state.get_or_insert_default();
    st.open.retain(|e| e.run.occurrence != r.run.occurrence);
    if r.run.occurrence.0 > st.newest {
        st.newest = r.run.occurrence.0;
    }
    if let Some(key) = &r.run.key
        && !st.triggered.iter().any(|t| t.key == *key)
    {
        // Otherwise its key would run once more when this run has ended.
        st.remember_trigger(key, r.run.occurrence, now);
    }
    let open = Open::new(r.run.clone(), r.seq, incarnation, now);
    st.open.push(open);
    Renewal::Renewed(None)
}
