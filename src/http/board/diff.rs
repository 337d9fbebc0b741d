//! What happened, from what is different. Pure.

use super::{Recent, at};
use crate::{
    http::events::Feed,
    logic::claim::{OWN_KEY, State, Triggered},
    model::Trigger,
    view::{InstanceView, Time},
};

type Fed = Vec<(&'static str, Feed)>;

/// A change of the offset of a host's clock by less than this is not shown at once; milliseconds.
const OFFSET_MOVES: f64 = 50.0;

/// The job may have records that were not read yet: more has changed than the renewals of its leases.
pub(super) fn may_have_records(before: Option<&State>, after: &State) -> bool {
    let Some(before) = before else { return true };
    let open = |st: &State| -> Vec<_> {
        let all = st.open.iter();
        all.map(|o| (o.run.id, o.next_attempt)).collect()
    };
    before.newest != after.newest || before.last != after.last || open(before) != open(after)
}

/// When the lease of an active run lapses, if nobody renews it: Unix ms.
pub(super) fn lapses_at(st: &State) -> Option<i64> {
    let held = st.open.iter().filter(|o| o.next_attempt.is_none());
    held.map(|o| o.renewed_at.saturating_add(o.run.lease).saturating_add(1))
        .min()
}

pub(super) fn may_have_lapsed(st: &State, now: i64) -> bool {
    lapses_at(st).is_some_and(|at| at <= now)
}

/// `decided`: the newest trigger that was decided, if it was not known.
// Long: one kind of event after the other.
pub(super) fn states(
    before: Option<&State>,
    after: Option<&State>,
    decided: Option<&Triggered>,
) -> Fed {
    let none = State::default();
    let (before, after) = (before.unwrap_or(&none), after.unwrap_or(&none));
    let mut fed: Fed = vec![];
    let pending = |st: &State, key: &str| st.triggers.iter().any(|t| t.key == key);
    let own = |key: &str| (!key.starts_with(OWN_KEY)).then(|| key.to_owned());
    let mut triggered: Vec<&str> = after.triggers.iter().map(|t| t.key.as_str()).collect();
    triggered.retain(|key| !pending(before, key));
    // Put in and claimed between two looks.
    triggered.extend(
        decided
            .map(|t| t.key.as_str())
            .filter(|key| !pending(before, key)),
    );
    for key in triggered {
        let feed = Feed {
            key: own(key),
            ..Feed::default()
        };
        fed.push(("triggered", feed));
    }
    for o in &after.open {
        let known = before.open.iter().find(|b| b.run.id == o.run.id);
        let feed = Feed {
            occurrence: at(o.run.occurrence),
            attempt: Some(o.run.attempt),
            instance: Some(o.run.instance.clone()),
            run_id: Some(o.run.id),
            ..Feed::default()
        };
        match (o.next_attempt, known) {
            (None, None) => {
                let takeover = o.run.trigger == Trigger::Takeover;
                let trigger = Some(o.run.trigger);
                let feed = Feed {
                    takeover: Some(takeover),
                    trigger,
                    ..feed
                };
                fed.push(("granted", feed));
            }
            (Some(next), known) if known.is_none_or(|k| k.next_attempt != Some(next)) => {
                let feed = Feed {
                    attempt: Some(o.run.attempt.saturating_add(1)),
                    next_at: Some(Time(next.at)),
                    trigger: Some(next.trigger),
                    instance: None,
                    run_id: None,
                    ..feed
                };
                fed.push(("awaited", feed));
            }
            _ => {}
        }
    }
    if before.pause != after.pause {
        fed.push(match &after.pause {
            Some(p) => {
                let feed = Feed {
                    reason: p.reason.clone(),
                    until: p.until.map(Time),
                    ..Feed::default()
                };
                ("paused", feed)
            }
            None => ("resumed", Feed::default()),
        });
    }
    if before.skip_at < after.skip_at {
        let feed = Feed {
            count: Some(u64::from(after.skip)),
            ..Feed::default()
        };
        fed.push(("skip", feed));
    }
    fed
}

/// The same attempt, or the same occurrence that did not run.
pub(super) fn same_run(a: &Recent, b: &Recent) -> bool {
    match (a.run_id, b.run_id) {
        (Some(a), Some(b)) => a == b,
        (None, None) => {
            (a.occurrence, a.attempt, a.outcome) == (b.occurrence, b.attempt, b.outcome)
        }
        _ => false,
    }
}

/// What the records say that were not known, or say otherwise now: oldest first.
pub(super) fn records(known: &[Recent], newest: &[Recent]) -> Fed {
    let new = newest.iter().rev().filter(|r| {
        !known
            .iter()
            .any(|k| same_run(k, r) && k.outcome == r.outcome)
    });
    let one = |r: &Recent| {
        let ran = r.attempt > 0;
        let feed = Feed {
            occurrence: Some(r.occurrence),
            attempt: ran.then_some(r.attempt),
            trigger: Some(r.trigger),
            instance: r.instance.clone().filter(|_| ran),
            run_id: r.run_id,
            outcome: Some(r.outcome),
            duration_ms: r.duration_ms,
            exit_code: r.exit_code,
            count: (r.count > 1).then_some(r.count),
            ..Feed::default()
        };
        let kind = match (ran, r.outcome) {
            (true, _) => "ended",
            (false, crate::model::Outcome::Skipped) => "skipped",
            (false, _) => "missed",
        };
        (kind, feed)
    };
    new.map(one).collect()
}

/// What happened to instances.
pub(super) fn instances(before: &[InstanceView], after: &[InstanceView]) -> Fed {
    let mut fed: Fed = vec![];
    for i in after {
        let mut tell = |kind| {
            let feed = Feed {
                instance: Some(i.instance.clone()),
                ..Feed::default()
            };
            fed.push((kind, feed));
        };
        let known = before.iter().find(|b| b.instance == i.instance);
        let came = match known {
            Some(b) => b.started_at != i.started_at && b.pid != i.pid || b.silent && !i.silent,
            None => true,
        };
        if came && !i.silent {
            tell("instance_up");
        }
        let Some(b) = known else { continue };
        if i.silent && !b.silent {
            tell("instance_silent");
        }
        if i.draining != b.draining {
            tell(if i.draining { "draining" } else { "undrained" });
        }
        if i.config != b.config {
            let feed = Feed {
                instance: Some(i.instance.clone()),
                config: Some(i.config.clone()),
                ..Feed::default()
            };
            fed.push(("configuration", feed));
        }
    }
    for b in before {
        if !after.iter().any(|i| i.instance == b.instance) {
            let feed = Feed {
                instance: Some(b.instance.clone()),
                ..Feed::default()
            };
            fed.push(("instance_gone", feed));
        }
    }
    fed
}

/// More is different than what moves with every heartbeat.
pub(super) fn instances_differ(before: &[InstanceView], after: &[InstanceView]) -> bool {
    let steady = |a: &InstanceView, b: &InstanceView| {
        let moved = (a.clock_offset_ms - b.clock_offset_ms).abs() > OFFSET_MOVES;
        let same = InstanceView {
            last_seen: b.last_seen,
            clock_offset_ms: b.clock_offset_ms,
            ..a.clone()
        };
        !moved && same == *b
    };
    before.len() != after.len() || !before.iter().zip(after).all(|(a, b)| steady(a, b))
}
