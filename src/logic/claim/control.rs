//! What people ask of a job: pause, skip, trigger, cancel and so on.

use super::{
    Effects, Event, KEYS_MOST, LIBRARY, Pause, Pending, State, StopRequest, forget_keys, own_key,
    planned_never,
};
use crate::model::{JobName, LAST_MS, Occurrence, RunId};

/// What a person asks of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Control {
    Pause {
        until: Option<i64>,
        reason: Option<String>,
    },
    Resume,
    /// So many coming occurrences; 0 withdraws a request.
    Skip {
        count: u32,
    },
    /// Ends what runs and drops what waits for another attempt.
    Cancel,
    Trigger {
        key: String,
    },
    /// The caller does not have the job enabled, and if no other instance says that it does, none has. Instances ask
    /// for this, not people.
    Off,
    /// Puts the watermark back to now, where a wrong clock has moved it into the future. `ran`: occurrences that lie in
    /// the future and ran all the same, which stay decided.
    Rewind {
        ran: Vec<Occurrence>,
    },
    /// The same, and who asks: `alice@web-1`, or the name of a token.
    By(String, Box<Control>),
}

impl Control {
    pub fn by(self, who: &str) -> Self {
        Self::By(visible(who), Box::new(self))
    }
}

/// The name of who asks, as it is kept.
pub fn visible(who: &str) -> String {
    let visible = who.chars().filter(|c| !c.is_control());
    visible.take(100).collect()
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Controlled {
    Done,
    /// Nothing to do: it was not paused, nothing runs, the key was used.
    Nothing,
    /// The runs that were asked to end.
    Stopping(Vec<RunId>),
    /// The trigger was decided before, as this occurrence.
    Triggered(Occurrence),
    /// [`KEYS_MOST`] keys of the job are remembered or wait: this one was not taken.
    TooMany,
    /// The store knows nothing of this job: no instance has it in its configuration.
    Absent,
}

pub fn control(
    state: &mut Option<State>,
    job: &JobName,
    what: &Control,
    now_us: i64,
    effects: &mut Effects,
) -> Controlled {
    let now = now_us.div_euclid(1000);
    let Some(st) = state.as_mut() else {
        return Controlled::Absent;
    };
    let (by, what) = match what {
        Control::By(by, what) => (Some(by.clone()), &**what),
        what => (None, what),
    };
    match what {
        Control::Pause { until, reason } => {
            st.pause = Some(Pause {
                until: *until,
                reason: reason.clone(),
                by,
                at: now.max(st.resumed + 1).min(LAST_MS),
            });
            effects.events.push(Event::Controlled { job: job.clone() });
            Controlled::Done
        }
        Control::Resume => {
            st.resumed_by = by;
            resume(st, job, now, effects)
        }
        Control::Skip { count } => {
            (st.skip, st.skip_at) = (*count, now.max(st.skip_at + 1).min(LAST_MS));
            st.skip_by = by;
            effects.events.push(Event::Controlled { job: job.clone() });
            Controlled::Done
        }
        Control::Off => {
            // A program that has a job of the library is not in the fleet's list, and plans the job itself.
            if st.off > 0 || st.schedule == LIBRARY {
                return Controlled::Nothing;
            }
            st.off = now;
            // An instance that has the job enabled all the same says so.
            effects.events.push(Event::Controlled { job: job.clone() });
            Controlled::Done
        }
        Control::Rewind { ran } => {
            st.rewound_by = by;
            rewind(st, job, ran, now, effects)
        }
        Control::Cancel => cancel(st, job, by, effects),
        Control::Trigger { key } => trigger(st, job, key, by, now, effects),
        Control::By(..) => Controlled::Nothing,
    }
}

fn resume(st: &mut State, job: &JobName, now: i64, effects: &mut Effects) -> Controlled {
    let paused = st.paused(now).is_some();
    if let Some(p) = st.pause.take() {
        st.resumed = now.max(p.at);
        effects.events.push(Event::Controlled { job: job.clone() });
    }
    if !paused {
        return Controlled::Nothing;
    }
    for e in st.open.iter().filter(|e| e.next_attempt.is_some()) {
        effects.events.push(Event::AttemptAwaited {
            job: job.clone(),
            occurrence: e.run.occurrence,
        });
    }
    Controlled::Done
}

/// Puts back the watermark that a clock ahead of time moved into the future. What ran by that clock stays decided.
fn rewind(
    st: &mut State,
    job: &JobName,
    ran: &[Occurrence],
    now: i64,
    effects: &mut Effects,
) -> Controlled {
    if st.newest <= now && st.since <= now {
        return Controlled::Nothing;
    }
    let open = st.open.iter().map(|o| o.run.occurrence);
    let last = st.last.iter().map(|l| l.occurrence);
    let mut early: Vec<Occurrence> = ran.iter().copied().chain(open).chain(last).collect();
    early.append(&mut st.early);
    early.retain(|at| at.0 > now);
    early.sort_unstable();
    early.dedup();
    st.early = early;
    st.newest = st.newest.min(now);
    st.since = st.since.min(now);
    if let Some(l) = &mut st.last {
        (l.from, l.to) = (l.from.min(now), l.to.min(now));
        l.started = l.started.map(|at| at.min(now));
        l.ended = l.ended.map(|at| at.min(now));
    }
    effects.events.push(Event::Controlled { job: job.clone() });
    Controlled::Done
}

fn cancel(st: &mut State, job: &JobName, by: Option<String>, effects: &mut Effects) -> Controlled {
    let waiting = st.open.len();
    st.open.retain(|e| e.next_attempt.is_none());
    let dropped = waiting != st.open.len();
    let mut stopping = vec![];
    for e in &mut st.open {
        if e.stop.is_none() {
            (e.stop, e.stopped_by) = (Some(StopRequest::Cancelled), by.clone());
        }
        stopping.push(e.run.id);
    }
    if !stopping.is_empty() {
        effects.events.push(Event::Stop { job: job.clone() });
        Controlled::Stopping(stopping)
    } else if dropped {
        Controlled::Done
    } else {
        Controlled::Nothing
    }
}

fn trigger(
    st: &mut State,
    job: &JobName,
    key: &str,
    by: Option<String>,
    now: i64,
    effects: &mut Effects,
) -> Controlled {
    forget_keys(&mut st.triggered, now);
    if let Some(t) = st.triggered.iter().find(|t| t.key == *key) {
        return Controlled::Triggered(t.occurrence);
    }
    if st.triggers.iter().any(|t| t.key == *key) {
        return Controlled::Nothing;
    }
    let people = st.triggered.iter().filter(|t| !own_key(&t.key)).count();
    let kept = if own_key(key) { 0 } else { people };
    if st.triggers.len() + kept >= KEYS_MOST {
        return Controlled::TooMany;
    }
    // Each has an instant of its own, which is that of its record if nobody starts it in time.
    let taken = |at: Occurrence| {
        let mut waiting = st.triggers.iter();
        at.0 == st.newest || waiting.any(|t| planned_never(t.at) == at)
    };
    let mut at = now;
    while at < LAST_MS && taken(planned_never(at)) {
        at += 1;
    }
    let key = key.to_owned();
    st.triggers.push(Pending {
        key: key.clone(),
        at,
        by,
    });
    effects.events.push(Event::Triggered {
        job: job.clone(),
        key,
        at,
    });
    Controlled::Done
}
