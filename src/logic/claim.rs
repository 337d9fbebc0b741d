//! State of one job + request -> answer. This is the reference for the Lua (compared on random sequences) and is
//! itself what SQLite and the in-memory store run.
//!
//! What decides once-per-occurrence is one watermark: `newest`, the newest decided occurrence, which only grows. An
//! occurrence at or before it was decided: it is open (running, or waiting for its next attempt) or it is settled.
//!
//! Times are Unix milliseconds of the store's clock unless they say `_us` (microseconds). The store's clock decides
//! *when* an occurrence is due and labels records. The store's clock never ends a lease. A lease ends when a contender
//! has seen the same (run, seq) unchanged for the lease's whole length, by the contender's own monotonic clock, and the
//! store still has that (run, seq).

#[cfg(test)]
mod bounds;
mod control;
mod epoch;
mod message;
mod overlap;
mod register;
mod renew;
mod settle;
mod state;
#[cfg(test)]
mod tests;

use std::ops::ControlFlow;

pub use self::{control::*, epoch::*, message::*, register::*, renew::*, settle::*, state::*};
use super::belief;
use crate::model::{Occurrence, Outcome, RunRecord, Trigger};

/// The record of an occurrence, or of `count` of them, that got no run.
fn not_run(
    claim: &Claim,
    occurrence: Occurrence,
    count: u64,
    (outcome, error, by): Kept,
) -> RunRecord {
    RunRecord {
        instance: Some(claim.instance.clone()),
        host: Some(claim.host.clone()),
        error: Some(error),
        count,
        by,
        ..RunRecord::without_run(&claim.job, occurrence, claim.trigger, outcome)
    }
}

/// What nobody asked for.
fn unasked(outcome: Outcome, why: impl Into<String>) -> Kept {
    (outcome, why.into(), None)
}

pub const LOST: &str = "the store lost its data, and no record of this occurrence survived";
pub const LAPSED: &str = "its instance vanished: the lease was not renewed for its whole length";
pub const NEVER_RENEWED: &str = "its instance vanished before it renewed the lease: whether the command was started is not known";
pub const TOO_LATE: &str = "nobody could start it within start_within";
pub const IN_DOUBT: &str =
    "nobody could start it within start_within: the store's clock was wrong, and not believed";
pub const OVERDUE: &str = "overdue, and not caught up";
/// Where it is not known what kept it back, and until when.
pub const AFTER_LOSS: &str = "the store had lost its data, and granted nothing until then";
pub const JOB_REMOVED: &str =
    "the job was removed from the configuration, or disabled, before it was started";
pub const OVERLAPS: &str = "the run before was still going on";
pub const PAUSED: &str = "paused";
/// When to ask again for an attempt of a job that is paused until somebody resumes it.
pub const PAUSED_WAIT_MS: i64 = 30_000;
pub const SKIPPED: &str = "skipped by request";

/// Decides one claim. `now_us` is the store's clock, `incarnation` its present incarnation.
///
/// Promises: attempt `n` of an occurrence is granted to one run, ever; attempts of one job overlap only with
/// [`Overlap::Allow`]; tokens of granted attempts strictly increase, but for [`Overlap::Allow`].
pub fn claim(
    state: &mut Option<State>,
    c: &Claim,
    now_us: i64,
    incarnation: &str,
    effects: &mut Effects,
) -> Answer {
    let Some(st) = state.as_mut() else {
        return Answer::Absent;
    };
    let now = now_us.div_euclid(1000);
    know(st, c.known, now);
    if st.incarnation != incarnation {
        return Answer::Quarantined;
    }
    // Newer ones are decided; or the clock that dated it was wrong, and has been corrected.
    if st.lost_before <= st.newest || st.lost_before > now {
        st.lost_before = 0;
    }
    if st.lost_until <= st.newest || st.lost_until > now {
        st.forget_loss();
    }
    let open = st.open.iter().position(|o| match &c.target {
        Target::Scheduled(at) => o.run.occurrence == *at,
        Target::Manual { key, .. } => o.run.key.as_ref() == Some(key),
    });
    if let Some(i) = open {
        return claim_open(st, i, c, now, incarnation, effects);
    }
    match claim_undecided(st, c, now_us, incarnation, effects) {
        ControlFlow::Continue(grant) => Answer::Granted(grant),
        ControlFlow::Break(answer) => answer,
    }
}

/// What one check of a claim says: go on towards a grant, or answer this.
type Checked<T> = ControlFlow<Answer, T>;

/// Decides a claim for an occurrence that is not open.
fn claim_undecided(
    st: &mut State,
    c: &Claim,
    now_us: i64,
    incarnation: &str,
    effects: &mut Effects,
) -> Checked<Grant> {
    let now = now_us.div_euclid(1000);
    let at = due(st, c, now_us, effects)?;
    give_up_missed(st, c, at, effects)?;
    apply_early_runs(st, c, at)?;
    if !c.is_manual() && at.0 <= st.lost_before {
        let answer = decide(st, c, at, now, unasked(Outcome::Unknown, LOST), effects);
        return ControlFlow::Break(answer);
    }
    if !c.is_manual() && c.start_by != REMOVED && st.first_wait && at.0 <= st.lost_until {
        let kept = st.kept_back();
        return ControlFlow::Break(keep_one_back(st, c, at, kept, effects));
    }
    apply_pause_and_skip(st, c, at, now, effects)?;
    if c.overlap != Overlap::Allow {
        overlap::apply(st, c, at, now, effects)?;
    }
    let key_by = match &c.target {
        Target::Manual { key, .. } => {
            let by = st.remember_trigger(key, at, now);
            (Some(key.clone()), by)
        }
        Target::Scheduled(_) => (None, None),
    };
    st.newest = at.0;
    let first = Grant {
        occurrence: at,
        attempt: 1,
        trigger: c.trigger,
    };
    let open = Open::granted(c, first, key_by, now, incarnation);
    let grant = open.grant();
    st.open.push(open);
    ControlFlow::Continue(grant)
}

/// The occurrence, if its time has come and it is not decided. The occurrence of a trigger is chosen here.
fn due(st: &mut State, c: &Claim, now_us: i64, effects: &mut Effects) -> Checked<Occurrence> {
    let now = now_us.div_euclid(1000);
    match &c.target {
        Target::Scheduled(at) => {
            if at.0 <= st.newest {
                let last = st.last.clone().filter(|l| l.occurrence == *at);
                return ControlFlow::Break(Answer::Settled(last));
            }
            if now_us < at.0 * 1000 {
                let wait_us = at.0 * 1000 - now_us;
                return ControlFlow::Break(Answer::Early { wait_us });
            }
            if c.start_by != REMOVED {
                // An instance has the job, and has it enabled.
                st.off = 0;
            }
            ControlFlow::Continue(*at)
        }
        Target::Manual { key, before } => {
            let Some(trigger) = st.triggers.iter().find(|t| t.key == *key) else {
                let at = st.triggered.iter().find(|t| t.key == *key);
                let at = at.map(|t| t.occurrence);
                let last = st.last.clone().filter(|l| Some(l.occurrence) == at);
                return ControlFlow::Break(Answer::Settled(last));
            };
            if now > c.start_by {
                // A record needs no room among the decided occurrences.
                let at = planned_never(trigger.at.min(now));
                let late = unasked(Outcome::Missed, too_late(c));
                let answer = not_started(st, c, at, now, late, effects);
                return ControlFlow::Break(answer);
            }
            // If `before` has passed and is not decided, more than one trigger needs room before it. A job is planned
            // at whole seconds, so none of these instants is one of its.
            let at = match before {
                Some(b) if b.0 <= now => (st.newest + 1).max(b.0 - 999),
                _ => now,
            };
            if at > st.newest && before.is_none_or(|b| at < b.0) {
                return ControlFlow::Continue(Occurrence(at));
            }
            // If the clock is behind the newest decided occurrence, there is room once the clock has passed it.
            let room_us = (st.newest + 1) * 1000 - now_us;
            let wait_us = if at <= st.newest { room_us } else { 1000 };
            ControlFlow::Break(Answer::Early { wait_us })
        }
    }
}

/// The occurrence of a trigger that comes to no run, put in at `at`. A job is planned at whole seconds: it is none of
/// those.
pub fn planned_never(at: i64) -> Occurrence {
    Occurrence(at + i64::from(at % 1000 == 0))
}

/// Why an occurrence whose time to start is over is recorded as missed.
fn too_late(c: &Claim) -> String {
    match c.start_by {
        PASSED_IN_DOUBT => IN_DOUBT.to_owned(),
        _ => with_cause(c, TOO_LATE),
    }
}

/// The same for an occurrence that was never to start.
fn never(c: &Claim) -> String {
    match c.start_by {
        REMOVED => JOB_REMOVED.to_owned(),
        _ => with_cause(c, OVERDUE),
    }
}

fn with_cause(c: &Claim, what: &str) -> String {
    let cause = c
        .cause
        .map_or(String::new(), |wait| format!(": {}", wait.cause()));
    what.to_owned() + &cause
}

/// Records what the claim gives up before `at`.
fn give_up_missed(st: &mut State, c: &Claim, at: Occurrence, effects: &mut Effects) -> Checked<()> {
    if c.missed.iter().any(|m| m.last < at && st.decided_in(m)) {
        return ControlFlow::Break(Answer::Behind {
            newest: Occurrence(st.newest),
            early: st.early.clone(),
        });
    }
    for m in c.missed.iter().filter(|m| m.last < at) {
        if m.last.0 <= st.newest {
            continue;
        }
        if let Some(kept) = st.why_late(c, m) {
            keep_back(st, c, m, kept, effects);
            continue;
        }
        st.newest = m.last.0;
        let record = not_run(c, m.last, m.count, unasked(Outcome::Missed, never(c)));
        effects.records.push(record);
    }
    ControlFlow::Continue(())
}

/// `m` is decided without a run, because the store had lost its data, or the job was paused. What one loss or pause
/// kept from running is one record of the job, as long as no other occurrence of the job comes in between.
fn keep_back(st: &mut State, c: &Claim, m: &Missed, kept: Kept, effects: &mut Effects) {
    let before = Occurrence(std::mem::replace(&mut st.newest, m.last.0));
    // One that ran early has an outcome of its own.
    let apart = st.early.iter().any(|e| before < *e && *e < m.first);
    let goes_on = |r: &&mut RunRecord| {
        !apart && r.job == c.job && r.occurrence == before && r.error.as_ref() == Some(&kept.1)
    };
    if let Some(r) = effects.records.last_mut().filter(goes_on) {
        let count = r.count.saturating_add(m.count);
        *r = not_run(c, m.last, count, kept);
        let of_it = |j: &&mut Joined| j.job == c.job && j.at == before;
        if let Some(joined) = effects.joined.iter_mut().find(of_it) {
            joined.at = m.last;
        }
        return;
    }
    let why = kept.1.clone();
    let record = not_run(c, m.last, m.count, kept);
    effects.records.push(record);
    if !apart {
        effects.joined.push(Joined {
            job: c.job.clone(),
            before,
            at: m.last,
            why,
        });
    }
}

/// The same of the target of the claim.
fn keep_one_back(
    st: &mut State,
    c: &Claim,
    at: Occurrence,
    kept: Kept,
    effects: &mut Effects,
) -> Answer {
    let (outcome, reason, _) = kept.clone();
    keep_back(st, c, &Missed::one(at), kept, effects);
    Answer::Recorded { outcome, reason }
}

/// The occurrence may have run before its time, by a wrong clock: see [`Control::Rewind`].
fn apply_early_runs(st: &mut State, c: &Claim, at: Occurrence) -> Checked<()> {
    let ran = !c.is_manual() && st.early.contains(&at);
    if ran {
        st.newest = at.0;
    }
    st.early.retain(|e| e.0 > st.newest);
    if ran {
        let last = st.last.clone().filter(|l| l.occurrence == at);
        return ControlFlow::Break(Answer::Settled(last));
    }
    ControlFlow::Continue(())
}

/// A pause, a skip or the time may decide the occurrence without a run. Pauses and skips do not apply to triggers.
fn apply_pause_and_skip(
    st: &mut State,
    c: &Claim,
    at: Occurrence,
    now: i64,
    effects: &mut Effects,
) -> Checked<()> {
    if c.is_manual() {
        return ControlFlow::Continue(());
    }
    let late = now > c.start_by;
    let kept = st.why_late(c, &Missed::one(at)).filter(|_| late);
    if let Some(p) = &st.pause {
        if p.until.is_none_or(|until| now < until) {
            let kept = p.kept();
            let answer = match late && c.start_by != REMOVED {
                true => keep_one_back(st, c, at, kept, effects),
                false => decide(st, c, at, now, kept, effects),
            };
            return ControlFlow::Break(answer);
        }
        st.pause = None;
    }
    if st.skip > 0 {
        st.skip -= 1;
        let event = Event::Controlled { job: c.job.clone() };
        effects.events.push(event);
        let kept = (Outcome::Skipped, SKIPPED.to_owned(), st.skip_by.clone());
        let answer = decide(st, c, at, now, kept, effects);
        return ControlFlow::Break(answer);
    }
    if late {
        if let Some(kept) = kept.filter(|_| c.start_by != PASSED_IN_DOUBT) {
            return ControlFlow::Break(keep_one_back(st, c, at, kept, effects));
        }
        let reason = match c.start_by <= NEVER {
            true => never(c),
            false => too_late(c),
        };
        let answer = decide(st, c, at, now, unasked(Outcome::Missed, reason), effects);
        return ControlFlow::Break(answer);
    }
    ControlFlow::Continue(())
}

/// The watermark only grows: what any instance knows to be decided stays decided, also when a server that took over is
/// some seconds behind. An occurrence further in the future does not count: it was learned by a wrong clock, and must
/// not come back after [`Control::Rewind`].
fn know(st: &mut State, known: Occurrence, now: i64) {
    if known.0 <= now + belief::NEAR.as_millis() as i64 {
        st.newest = st.newest.max(known.0);
    }
}

/// Decides a claim for an open occurrence: the claimant's already, another instance's, lapsed, or waiting for its next
/// attempt.
fn claim_open(
    st: &mut State,
    i: usize,
    c: &Claim,
    now: i64,
    incarnation: &str,
    effects: &mut Effects,
) -> Answer {
    if st.open[i].next_attempt.is_none() {
        let e = &mut st.open[i];
        if e.run.id == c.run {
            // Asked again after a lost reply: the claimant counts its trust from this request, so an instance that
            // watches has to begin anew.
            e.seq += u32::from(e.seq < u32::MAX);
            e.renewed_at = now;
            return Answer::Granted(e.grant());
        }
        if !st.open[i].is(c.observed.as_ref()) {
            return Answer::Running(st.open[i].clone());
        }
        let reason = reason_of_lapse(&st.open[i]).to_owned();
        if !lapse(st, i, c, now, effects) {
            return Answer::Recorded {
                outcome: Outcome::Unknown,
                reason,
            };
        }
    }
    let e = &st.open[i];
    let Some(next_attempt) = e.next_attempt else {
        return Answer::Running(e.clone());
    };
    // The run whose attempt just ended asks again after a lost reply: it has had its turn.
    if e.run.id == c.run {
        return Answer::Settled(None);
    }
    // A takeover is due at once. Its time was taken from a clock that may have been wrong.
    if next_attempt.trigger != Trigger::Takeover && now < next_attempt.at {
        return Answer::Later {
            wait_ms: next_attempt.at - now,
        };
    }
    if let Some(later) = st.until_resumed(now) {
        return later;
    }
    // Another one is held only if the policy was Allow before.
    let mut i = i;
    while c.overlap != Overlap::Allow
        && let Some(j) = st.open.iter().position(|o| o.next_attempt.is_none())
    {
        if !st.open[j].is(c.observed.as_ref()) {
            st.waiting = true;
            return Answer::Blocked(st.open[j].clone());
        }
        if !lapse(st, j, c, now, effects) && j < i {
            i -= 1;
        }
    }
    let e = &mut st.open[i];
    let next = Grant {
        occurrence: e.run.occurrence,
        attempt: e.run.attempt.saturating_add(1),
        trigger: next_attempt.trigger,
    };
    let key_by = (e.run.key.take(), e.by.take());
    *e = Open::granted(c, next, key_by, now, incarnation);
    Answer::Granted(e.grant())
}

fn reason_of_lapse(e: &Open) -> &'static str {
    if e.seq > 0 { LAPSED } else { NEVER_RENEWED }
}

/// The holder of open entry `i` is gone, and nobody knows how its run ended. True: another attempt is due.
fn lapse(st: &mut State, i: usize, c: &Claim, now: i64, effects: &mut Effects) -> bool {
    let e = &mut st.open[i];
    let mut record = e.record(&c.job, Outcome::Unknown, now, reason_of_lapse(e));
    if e.seq == 0 {
        // What is granted waits for its turn to start: this may not have had it.
        record = record.lasting(None, Some(now));
    }
    // A run whose end nobody saw counts as busy until its last renewal, not until it was found dead.
    st.last = Some(last(e, &record, e.renewed_at, now));
    effects.records.push(record);
    if c.on_crash == OnCrash::Rerun && e.run.attempt < c.max_attempts && e.stop.is_none() {
        e.next_attempt = Some(NextAttempt {
            at: now,
            trigger: Trigger::Takeover,
        });
        true
    } else {
        st.lapsed = Some(st.open.remove(i).into());
        false
    }
}

/// `busy_until`: unlike the record, which says when the run ended, this is known to be true.
fn last(e: &Open, record: &RunRecord, busy_until: i64, now: i64) -> Last {
    let mut last = Last {
        occurrence: e.run.occurrence,
        attempt: e.run.attempt,
        run: e.run.id,
        instance: e.run.instance.clone(),
        outcome: record.outcome,
        from: e.run.granted_at,
        started: record.started_at,
        to: busy_until,
        ended: None,
    };
    last.ended_at(record.finished_at.unwrap_or(now));
    last
}

/// `at` is decided without a run.
fn decide(
    st: &mut State,
    c: &Claim,
    at: Occurrence,
    now: i64,
    kept: Kept,
    effects: &mut Effects,
) -> Answer {
    st.newest = st.newest.max(at.0);
    not_started(st, c, at, now, kept, effects)
}

/// As [`decide`], but occurrences before `at` stay undecided.
fn not_started(
    st: &mut State,
    c: &Claim,
    at: Occurrence,
    now: i64,
    mut kept: Kept,
    effects: &mut Effects,
) -> Answer {
    if let Target::Manual { key, .. } = &c.target {
        kept.2 = st.remember_trigger(key, at, now);
    }
    let (outcome, reason, _) = kept.clone();
    effects.records.push(not_run(c, at, 1, kept));
    Answer::Recorded { outcome, reason }
}
