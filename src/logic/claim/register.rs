//! Making a job known to the store, also again after a loss of the store's data.

use super::{
    Claim, Effects, LOST, Missed, OnCrash, Overlap, Pause, Pending, State, Target, know, lapse,
};
use serde::{Deserialize, Serialize};

use crate::logic::bent::rule;
use crate::model::{InstanceId, JobName, Occurrence, Outcome, RunRecord, Trigger};

/// Makes a job known, learns where it stands, and adopts its state into the present incarnation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Register {
    pub job: JobName,
    pub schedule: String,
    pub definition: String,
    /// As in [`Claim::known`]; 0 when nothing is known.
    pub known: Occurrence,
    /// The caller has seen this incarnation for a whole quarantine, or knows that nothing was lost in it.
    pub adopt: Option<String>,
    /// The epoch in that incarnation that `adopt` is about. A store that can lose its data between two steps adopts
    /// only if it still is this one; None: not looked at.
    pub epoch: Option<String>,
    /// Occurrences planned before the store lost its state, of which nobody knows what became: record as unknown.
    /// Ascending.
    pub lost: Vec<Missed>,
    /// `lost` was counted from this occurrence on; 0: nothing was known of any. If a holder has put back a later one
    /// meanwhile, it has to be counted anew.
    pub counted_from: i64,
    /// What was due, or asked for, before this, Unix ms, may have run, and the store has lost that: record it as
    /// unknown. 0: run it again.
    pub lost_before: i64,
    /// The job is enabled at the caller.
    pub enabled: bool,
    /// What the caller knows people to have asked for.
    pub remembered: Remembered,
    pub instance: InstanceId,
    pub host: String,
    /// What becomes of attempts that were under way, or awaited, in the incarnation before: with
    /// [`OnCrash::Rerun`] the next one follows, which may repeat one that the store has lost.
    pub on_crash: OnCrash,
    pub max_attempts: u32,
}

/// What people asked of a job, as one instance remembers it: after a loss of its data, the instances tell the store
/// again. If the store has a newer request, that one counts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Remembered {
    pub pause: Option<Pause>,
    pub skip: u32,
    /// When `skip` was asked for; 0: never.
    pub skip_at: i64,
}

impl Remembered {
    pub fn of(st: &State) -> Self {
        Self {
            pause: st.pause.clone(),
            skip: st.skip,
            skip_at: st.skip_at,
        }
    }
    pub(super) fn is_nothing(&self) -> bool {
        self.pause.is_none() && self.skip == 0
    }
    pub(super) fn restore(&self, st: &mut State) {
        if let Some(p) = &self.pause
            && rule!(PauseIsToldAgain, st.pause.is_none())
            && p.at > st.resumed
        {
            st.pause = Some(p.clone());
        }
        if self.skip_at > st.skip_at {
            (st.skip, st.skip_at) = (self.skip, self.skip_at);
        } else if self.skip_at == st.skip_at && self.skip_at > 0 {
            st.skip = st.skip.min(self.skip);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[must_use]
pub enum Registration {
    /// Known and of this incarnation; the state says the rest.
    Ready,
    Quarantined,
    Absent,
}

pub fn register(
    state: &mut Option<State>,
    r: &Register,
    now_us: i64,
    incarnation: &str,
    effects: &mut Effects,
) -> Registration {
    let now = now_us.div_euclid(1000);
    let may_adopt = r.adopt.as_deref() == Some(incarnation);
    let Some(st) = state.as_mut() else {
        if may_adopt {
            *state = Some(new(r, now, incarnation, effects));
            return Registration::Ready;
        }
        // Even before an instance adopts the job: nothing may start under a pause that a living instance knows.
        if !r.remembered.is_nothing() {
            r.remembered.restore(state.get_or_insert_default());
        }
        return Registration::Absent;
    };
    know(st, r.known, now);
    r.remembered.restore(st);
    if st.incarnation != incarnation {
        // A holder reclaimed its lease, or settled, after the range was counted: the range has to be counted anew.
        let others = st.newest.max(st.since) > r.counted_from;
        let others = rule!(LostIsCountedAnew, others) || r.lost.iter().any(|l| st.decided_in(l));
        if rule!(AdoptionWaits, !may_adopt) || others {
            return Registration::Quarantined;
        }
        adopt(st, r, now, incarnation, effects);
    }
    if r.enabled && st.off > 0 {
        // No instance had the job until now.
        (st.since, st.off) = (st.since.max(now), 0);
    }
    if st.schedule != r.schedule {
        // Another schedule: what it would have planned before now was never owed.
        st.since = if st.schedule.is_empty() && st.newest > 0 {
            st.since
        } else {
            now
        };
        st.schedule = r.schedule.clone();
    }
    st.definition = r.definition.clone();
    Registration::Ready
}

/// The state of a job that the store knows nothing of: a new one, or lost.
fn new(r: &Register, now: i64, incarnation: &str, effects: &mut Effects) -> State {
    let known = (r.known.0 > 0).then_some(r.known.0.min(now));
    let mut st = State {
        incarnation: incarnation.to_owned(),
        schedule: r.schedule.clone(),
        definition: r.definition.clone(),
        since: known.unwrap_or(now),
        lost_before: r.lost_before,
        ..State::default()
    };
    forget_lost(&mut st, r, now, effects);
    r.remembered.restore(&mut st);
    st
}

/// Takes a state over from another incarnation. Holders that live have reclaimed by now; the leases of the others died
/// with them.
fn adopt(st: &mut State, r: &Register, now: i64, incarnation: &str, effects: &mut Effects) {
    st.incarnation = incarnation.to_owned();
    let mut i = 0;
    while i < st.open.len() {
        let e = &st.open[i];
        if e.incarnation == incarnation {
            i += 1;
            continue;
        }
        if e.next_attempt.is_some() {
            // The awaited attempt may have been granted, and its grant lost: its token must not be granted twice.
            if r.on_crash == OnCrash::Fail {
                st.open.remove(i);
            } else {
                i += 1;
            }
            continue;
        }
        let c = Claim {
            job: r.job.clone(),
            target: Target::Scheduled(e.run.occurrence),
            known: r.known,
            missed: vec![],
            run: e.run.id,
            instance: r.instance.clone(),
            host: r.host.clone(),
            trigger: Trigger::Takeover,
            start_by: 0,
            lease: e.run.lease,
            overlap: Overlap::Skip,
            on_crash: r.on_crash,
            max_attempts: r.max_attempts,
            definition: r.definition.clone(),
            observed: None,
            holds: vec![],
        };
        if lapse(st, i, &c, now, effects) {
            i += 1;
        }
    }
    forget_lost(st, r, now, effects);
    lose_triggers(st, r, now, effects);
}

fn lose_triggers(st: &mut State, r: &Register, now: i64, effects: &mut Effects) {
    let before = |t: &mut Pending| rule!(LostTriggersDoNotRun, t.at < r.lost_before);
    let lost: Vec<Pending> = st.triggers.extract_if(.., before).collect();
    let mut at = now;
    for trigger in lost {
        // An instant of its own, and none at which the job may be planned.
        at += if at % 1000 == 999 { 2 } else { 1 };
        st.remember_trigger(&trigger.key, Occurrence(at), now);
        effects.records.push(RunRecord {
            instance: Some(r.instance.clone()),
            host: Some(r.host.clone()),
            error: Some(TRIGGER_LOST.to_owned()),
            ..RunRecord::without_run(&r.job, Occurrence(at), Trigger::Manual, Outcome::Unknown)
        });
    }
}

const TRIGGER_LOST: &str = "the store lost its state, and with it whether this trigger has run: trigger the job \
    again if it has not";

fn forget_lost(st: &mut State, r: &Register, now: i64, effects: &mut Effects) {
    know(st, r.known, now);
    for l in &r.lost {
        if l.last.0 <= st.newest || l.last.0 > now {
            continue;
        }
        st.newest = l.last.0;
        effects.records.push(lost(r, l));
    }
}

fn lost(r: &Register, l: &Missed) -> RunRecord {
    RunRecord {
        instance: Some(r.instance.clone()),
        host: Some(r.host.clone()),
        error: Some(LOST.to_owned()),
        count: l.count,
        ..RunRecord::without_run(&r.job, l.last, Trigger::Schedule, Outcome::Unknown)
    }
}
