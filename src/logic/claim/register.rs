//! Making a job known to the store, also again after a loss of the store's data.

use super::{
    Claim, Effects, JOB_REMOVED, LOST, Missed, OnCrash, Overlap, Pause, Pending, State, Target,
    Triggered, know, lapse,
};
use std::collections::HashSet;

use crate::model::{InstanceId, JobName, Occurrence, Outcome, RunRecord, Trigger};

/// Makes a job known, learns where it stands, and adopts its state into the present incarnation.
#[derive(Debug, Clone, PartialEq)]
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
    /// Occurrences planned before the store lost its data, of which nobody knows what became: record as unknown.
    /// Ascending.
    pub lost: Vec<Missed>,
    /// `lost` was counted from this occurrence on; 0: nothing was known of any. If a holder has put back a later one
    /// meanwhile, it has to be counted anew.
    pub counted_from: i64,
    /// What was due, or asked for, before this, Unix ms, may have run, and the store has lost that: record it as
    /// unknown. 0: run it again.
    pub lost_before: i64,
    pub presence: Presence,
    /// Occurrences that were undecided when the caller ceased to have the job. Ascending.
    pub owed: Vec<Missed>,
    /// Since when the caller has the job, Unix ms; 0: since now.
    pub back_at: i64,
    /// Since when the caller, which knew nothing of the job, waits for the store to grant again, Unix ms; 0: it did not
    /// wait. What was planned since then is recorded.
    pub waits_since: i64,
    /// What the caller knows people to have asked for.
    pub remembered: Remembered,
    pub instance: InstanceId,
    pub host: String,
    /// What becomes of attempts that were under way, or awaited, in the incarnation before: with
    /// [`OnCrash::Rerun`] the next one follows, which may repeat one that the store has lost.
    pub on_crash: OnCrash,
    pub max_attempts: u32,
}

#[cfg(any(test, fuzzing))]
impl Register {
    /// Of an instance that knows nothing of the job, in a store that has never lost anything.
    pub(crate) fn first(job: JobName) -> Self {
        Self {
            job,
            schedule: "s".to_owned(),
            definition: String::new(),
            known: Occurrence(0),
            adopt: None,
            epoch: None,
            lost: vec![],
            counted_from: i64::MAX,
            lost_before: 0,
            presence: Presence::New,
            owed: vec![],
            back_at: 0,
            waits_since: 0,
            remembered: Remembered::default(),
            instance: InstanceId::new("a"),
            host: String::new(),
            on_crash: OnCrash::Fail,
            max_attempts: 1,
        }
    }
}

/// Whether the caller has the job in its configuration, and enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It has the job disabled.
    Disabled,
    /// It has the job now, and has not told the store so yet.
    New,
    /// It has had the job since it told the store so.
    Kept,
}

/// What people asked of a job, as one instance remembers it: after a loss of its data, the instances tell the store
/// again. If the store has a newer request, that one counts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Remembered {
    pub pause: Option<Pause>,
    pub skip: u32,
    /// When `skip` was asked for; 0: never.
    pub skip_at: i64,
    /// Who asked for `skip`.
    pub skip_by: Option<String>,
    /// Triggers that were decided: their keys must not run again.
    pub triggered: Vec<Triggered>,
    /// Triggers that waited, as far as the caller knows. If the store knows nothing of one, it may have run.
    pub triggers: Vec<Pending>,
}

impl Remembered {
    pub fn of(st: &State) -> Self {
        Self {
            pause: st.pause.clone(),
            skip: st.skip,
            skip_at: st.skip_at,
            skip_by: st.skip_by.clone(),
            triggered: vec![],
            triggers: vec![],
        }
    }
    pub fn is_nothing(&self) -> bool {
        self.pause.is_none()
            && self.skip == 0
            && self.triggered.is_empty()
            && self.triggers.is_empty()
    }
    /// Returns the triggers that the store knew nothing of.
    pub(super) fn restore(&self, st: &mut State, now: i64) -> Vec<Pending> {
        if let Some(p) = &self.pause
            && st.pause.is_none()
            && p.at > st.resumed
        {
            st.pause = Some(p.clone());
        }
        if self.skip_at > st.skip_at {
            (st.skip, st.skip_at) = (self.skip, self.skip_at);
            st.skip_by.clone_from(&self.skip_by);
        } else if self.skip_at == st.skip_at && self.skip_at > 0 {
            st.skip = st.skip.min(self.skip);
        }
        self.restore_keys(st, now);
        let known = keys(&st.triggered, &st.triggers);
        let news = self.triggers.iter().filter(|t| !known.contains(&*t.key));
        news.cloned().collect()
    }
    fn restore_keys(&self, st: &mut State, now: i64) {
        let known = keys(&st.triggered, &[]);
        let new = |t: &&Triggered| !known.contains(&*t.key);
        let news: Vec<Triggered> = self.triggered.iter().filter(new).cloned().collect();
        if news.is_empty() {
            return;
        }
        let used = keys(&news, &[]);
        // What waits with a used key was put in after the store lost it.
        st.triggers.retain(|t| !used.contains(&*t.key));
        st.triggered.extend(news.into_iter().map(|t| Triggered {
            at: t.at.min(now),
            ..t
        }));
        st.triggered.sort_by_key(|t| t.at);
    }
}

fn keys<'a>(triggered: &'a [Triggered], triggers: &'a [Pending]) -> HashSet<&'a str> {
    let decided = triggered.iter().map(|t| &*t.key);
    decided.chain(triggers.iter().map(|t| &*t.key)).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
            let st = state.get_or_insert_default();
            st.triggers = r.remembered.restore(st, now);
        }
        return Registration::Absent;
    };
    know(st, r.known, now);
    if r.presence == Presence::Kept {
        // Another instance took the job for nobody's.
        st.off = 0;
    }
    let mut lost = r.remembered.restore(st, now);
    if st.incarnation != incarnation {
        st.triggers.append(&mut lost);
        // A holder reclaimed its lease, or settled, after the range was counted: the range has to be counted anew.
        let others =
            st.newest.max(st.since) > r.counted_from || r.lost.iter().any(|l| st.decided_in(l));
        if !may_adopt || others {
            return Registration::Quarantined;
        }
        adopt(st, r, now, incarnation, effects);
    }
    // Others have adopted the state without them.
    lose_triggers(st, r, lost, now, effects);
    if r.presence == Presence::New && st.off > 0 {
        // Nor, as far as is known, did another instance have the job: what was planned meanwhile is not owed.
        (st.since, st.off) = (st.since.max(back_at(r, now)), 0);
    }
    if st.schedule != r.schedule {
        // Another schedule: what it would have planned before now was never owed.
        st.since = if st.schedule.is_empty() && st.newest.max(st.since) > 0 {
            st.since
        } else {
            now
        };
        st.schedule = r.schedule.clone();
    }
    if r.presence == Presence::New && r.back_at > 0 {
        // An instance that got the job later may have registered it first.
        st.since = st.since.min(back_at(r, now));
    }
    if r.presence == Presence::New {
        forget_owed(st, r, now, effects);
    }
    st.definition = r.definition.clone();
    Registration::Ready
}

/// Records what the caller owed when it ceased to have the job, and what nobody owes any more. Another instance, which
/// owed less, may have registered the job's return before.
fn forget_owed(st: &mut State, r: &Register, now: i64, effects: &mut Effects) {
    for m in &r.owed {
        if m.last.0 > st.newest && m.last.0 <= st.since.min(now) {
            st.newest = m.last.0;
            let record = without_run(r, m, Outcome::Missed, JOB_REMOVED);
            effects.records.push(record);
        }
    }
}

fn back_at(r: &Register, now: i64) -> i64 {
    match r.back_at {
        0 => now,
        at => at.min(now),
    }
}

/// If the store lost what it knew of the job, it lost that nobody has it, too. An instance that has it contradicts.
fn off(r: &Register, now: i64) -> i64 {
    match r.presence {
        Presence::Disabled => now,
        Presence::New | Presence::Kept => 0,
    }
}

/// What the job owes begins after this, if the store knows nothing of it: with what the caller knows to be decided, or
/// where the caller had not the job, with its return.
fn owed_after(r: &Register, now: i64) -> i64 {
    match r.known.0.min(now) {
        known if known > 0 && r.back_at == 0 => known,
        known => known.max(back_at(r, now)),
    }
}

/// Notes in a state that is adopted now until when its job was kept from running, and why.
fn note_loss(st: &mut State, why: &str, now: i64) {
    st.lost_until = now;
    st.lost_why = format!("{why} and granted nothing until {}", Occurrence(now));
}

/// What kept a job from running until its state was adopted.
const LOST_DATA: &str = "the store had lost its data,";
const RESTARTED: &str = "the store was restarted, or its data had changed,";
const NEW: &str = "the store was new, or had lost its data,";

/// Whether this reason of a record says that the loss of the store's data, or a new store, kept the job from running.
pub fn is_state_loss(reason: &str) -> bool {
    [LOST_DATA, RESTARTED, NEW]
        .iter()
        .any(|why| reason.starts_with(why))
}

/// The state of a job that the store knows nothing of: a new one, or lost.
fn new(r: &Register, now: i64, incarnation: &str, effects: &mut Effects) -> State {
    // Nobody knows of anything that was lost.
    let first = r.presence == Presence::New && r.known.0 == 0 && r.back_at == 0;
    let mut st = State {
        incarnation: incarnation.to_owned(),
        schedule: r.schedule.clone(),
        definition: r.definition.clone(),
        since: match r.waits_since {
            since if first && since > 0 => since.min(now),
            _ => owed_after(r, now),
        },
        lost_before: r.lost_before,
        first_wait: first && r.waits_since > 0,
        off: off(r, now),
        ..State::default()
    };
    if st.first_wait {
        note_loss(&mut st, NEW, now);
    } else if r.lost_before > 0 {
        note_loss(&mut st, LOST_DATA, now);
    }
    forget_lost(&mut st, r, now, effects);
    st.triggers = r.remembered.restore(&mut st, now);
    lose_waiting_triggers(&mut st, r, now, effects);
    st
}

/// Takes a state over from another incarnation. Holders that live have reclaimed by now; the leases of the others died
/// with them.
fn adopt(st: &mut State, r: &Register, now: i64, incarnation: &str, effects: &mut Effects) {
    // What was due before the loss may have run, whatever the caller knows of it: the state may be an old copy, or have
    // no more than what instances remembered.
    st.lost_before = st.lost_before.max(r.lost_before);
    st.forget_loss();
    st.off = st.off.max(off(r, now));
    if r.lost_before > 0 {
        let lost = st.incarnation.is_empty();
        note_loss(st, if lost { LOST_DATA } else { RESTARTED }, now);
    }
    // The same, or no more than leases that were put back, which owe what they owed.
    if st.incarnation.is_empty() && (st.newest == 0 || r.back_at > 0) {
        st.since = st.since.max(owed_after(r, now));
    }
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
            cause: None,
        };
        if lapse(st, i, &c, now, effects) {
            i += 1;
        }
    }
    // Its next attempt may have been granted in what was lost.
    st.lapsed = None;
    forget_lost(st, r, now, effects);
    lose_waiting_triggers(st, r, now, effects);
}

fn lose_waiting_triggers(st: &mut State, r: &Register, now: i64, effects: &mut Effects) {
    let before = |t: &mut Pending| t.at < r.lost_before;
    let lost = st.triggers.extract_if(.., before).collect();
    lose_triggers(st, r, lost, now, effects);
}

fn lose_triggers(
    st: &mut State,
    r: &Register,
    lost: Vec<Pending>,
    now: i64,
    effects: &mut Effects,
) {
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

const TRIGGER_LOST: &str = "the store lost its data, and with it whether this trigger has run: trigger the job \
    again if it has not";

fn forget_lost(st: &mut State, r: &Register, now: i64, effects: &mut Effects) {
    know(st, r.known, now);
    for l in &r.lost {
        if l.last.0 <= st.newest || l.last.0 > now {
            continue;
        }
        st.newest = l.last.0;
        let record = without_run(r, l, Outcome::Unknown, LOST);
        effects.records.push(record);
    }
}

fn without_run(r: &Register, m: &Missed, outcome: Outcome, why: &str) -> RunRecord {
    RunRecord {
        instance: Some(r.instance.clone()),
        host: Some(r.host.clone()),
        error: Some(why.to_owned()),
        count: m.count,
        ..RunRecord::without_run(&r.job, m.last, Trigger::Schedule, outcome)
    }
}
