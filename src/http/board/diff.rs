//! What happened, from what is different. Pure.

use super::{Recent, at, recent::Recents};
use crate::{
    http::events::Feed,
    logic::claim::{OWN_KEY, Open, Pause, State, StopRequest, Triggered},
    model::{Outcome, RunId, Trigger},
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

/// What was told of a job. After an outage, or after a loss of its data, the store shows again what people asked for
/// and what ran long ago: that is not told again.
#[derive(Debug)]
pub(super) struct Told {
    /// Acts up to this instant (Unix ms of the store's clock) are told, or older than the board.
    acts: i64,
    /// What ran when the store's data changed last.
    runs: Vec<RunId>,
}

impl Told {
    pub(super) fn at(now: i64) -> Self {
        Self {
            acts: now,
            runs: vec![],
        }
    }

    /// It ran when the store's data changed last.
    pub(super) fn ran(&self, run: RunId) -> bool {
        self.runs.contains(&run)
    }
}

/// The attempts that are under way.
pub(super) fn under_way(st: Option<&State>) -> impl Iterator<Item = RunId> {
    let open = st.into_iter().flat_map(|st| &st.open);
    let held = open.filter(|o| o.next_attempt.is_none());
    held.map(|o| o.run.id)
}

/// `decided`: the newest trigger that was decided, if it was not known. `recent`: the ended runs that are known.
// Long: one kind of event after the other.
pub(super) fn states(
    before: Option<&State>,
    after: Option<&State>,
    decided: Option<&Triggered>,
    recent: &Recents,
    told: &mut Told,
) -> Fed {
    let none = State::default();
    let (before, after) = (before.unwrap_or(&none), after.unwrap_or(&none));
    let same_data = before.incarnation == after.incarnation;
    if !same_data && !before.open.is_empty() {
        told.runs = before.open.iter().map(|o| o.run.id).collect();
    }
    let decided = decided.filter(|_| same_data);
    let new = |at: i64| at > told.acts;
    let mut fed: Fed = vec![];
    let pending = |st: &State, key: &str| st.triggers.iter().any(|t| t.key == key);
    let own = |key: &str| (!key.starts_with(OWN_KEY)).then(|| key.to_owned());
    let put_in = after.triggers.iter().filter(|t| new(t.at));
    let mut triggered: Vec<&str> = put_in.map(|t| t.key.as_str()).collect();
    triggered.retain(|key| !pending(before, key));
    // Put in and claimed between two looks.
    triggered.extend(
        decided
            .filter(|t| new(t.at))
            .map(|t| t.key.as_str())
            .filter(|key| !pending(before, key)),
    );
    for key in triggered {
        let waits = after.triggers.iter().find(|t| t.key == key);
        let waits = waits.and_then(|t| t.by.clone());
        let mut open = after.open.iter();
        let runs = || open.find(|o| o.run.key.as_deref() == Some(key))?.by.clone();
        let feed = Feed {
            key: own(key),
            by: waits.or_else(runs),
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
        let of_run = feed.clone();
        let seen = |id| told.ran(id) || recent.iter().any(|r| r.run_id == Some(id));
        let again = known.is_none() && seen(o.run.id);
        let asked = |o: &Open| o.stop == Some(StopRequest::Cancelled);
        match (o.next_attempt, known) {
            _ if again => {}
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
        if asked(o) && !again && !known.is_some_and(asked) {
            let by = o.stopped_by.clone();
            fed.push(("cancelled", Feed { by, ..of_run }));
        }
    }
    // Only a request drops an attempt that waits, unless something newer is decided, or the store's data changed.
    let waits = before.open.iter().filter(|o| o.next_attempt.is_some());
    let still = (&before.newest, &before.last) == (&after.newest, &after.last);
    for o in waits.filter(|_| same_data && still) {
        if !after
            .open
            .iter()
            .any(|a| a.run.occurrence == o.run.occurrence)
        {
            let feed = Feed {
                occurrence: at(o.run.occurrence),
                attempt: Some(o.run.attempt.saturating_add(1)),
                ..Feed::default()
            };
            fed.push(("cancelled", feed));
        }
    }
    // A pause that was over already is only cleared away.
    let held = |p: &Pause| p.until.is_none_or(|until| until > after.resumed);
    if new(after.resumed) && before.pause.as_ref().is_none_or(held) {
        let feed = Feed {
            by: after.resumed_by.clone(),
            ..Feed::default()
        };
        fed.push(("resumed", feed));
    }
    if let Some(p) = after.pause.as_ref().filter(|p| new(p.at)) {
        let feed = Feed {
            reason: p.reason.clone(),
            until: p.until.map(Time),
            by: p.by.clone(),
            ..Feed::default()
        };
        fed.push(("paused", feed));
    }
    if same_data && after.newest < before.newest {
        let by = after.rewound_by.clone();
        fed.push((
            "rewound",
            Feed {
                by,
                ..Feed::default()
            },
        ));
    }
    if new(after.skip_at) {
        let feed = Feed {
            count: Some(u64::from(after.skip)),
            by: after.skip_by.clone(),
            ..Feed::default()
        };
        fed.push(("skip", feed));
    }
    let put_in = after.triggers.iter().map(|t| t.at);
    let paused = after.pause.iter().map(|p| p.at);
    let acts = [after.resumed, after.skip_at];
    let acts = acts.into_iter().chain(put_in).chain(paused);
    told.acts = acts.chain(decided.map(|t| t.at)).fold(told.acts, i64::max);
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

/// What the records say that were not known, or say otherwise now: oldest first. `granted`: the grant of this run was
/// seen. Of a run that began and ended between two looks it was not: then its record tells of it.
pub(super) fn records(known: &[Recent], newest: &[Recent], granted: impl Fn(RunId) -> bool) -> Fed {
    let new = newest.iter().rev().filter(|r| {
        !known
            .iter()
            .any(|k| same_run(k, r) && k.outcome == r.outcome)
    });
    let mut fed: Fed = vec![];
    for r in new {
        let ran = r.attempt > 0;
        let of_it = Feed {
            occurrence: Some(r.occurrence),
            attempt: ran.then_some(r.attempt),
            trigger: Some(r.trigger),
            instance: r.instance.clone().filter(|_| ran),
            run_id: r.run_id,
            ..Feed::default()
        };
        let unseen = |id| !granted(id) && !known.iter().any(|k| k.run_id == Some(id));
        if ran && r.run_id.is_some_and(unseen) {
            let feed = Feed {
                takeover: Some(r.trigger == Trigger::Takeover),
                ..of_it.clone()
            };
            fed.push(("granted", feed));
        }
        let feed = Feed {
            outcome: Some(r.outcome),
            duration_ms: r.duration_ms,
            exit_code: r.exit_code,
            count: (r.count > 1).then_some(r.count),
            ..of_it
        };
        let kind = match (ran, r.outcome) {
            (true, _) => "ended",
            (false, Outcome::Skipped) => "skipped",
            (false, Outcome::Unknown) => "unknown",
            (false, _) => "missed",
        };
        fed.push((kind, feed));
    }
    fed
}

/// What happened to instances.
pub(super) fn instances(before: &[InstanceView], after: &[InstanceView]) -> Fed {
    let mut fed: Fed = vec![];
    for i in after {
        let mut tell = |kind, since| {
            let feed = Feed {
                instance: Some(i.instance.clone()),
                since,
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
            tell("instance_up", None);
        }
        let Some(b) = known else { continue };
        if i.silent && !b.silent {
            tell("instance_silent", Some(i.last_seen));
        }
        if i.draining != b.draining {
            let kind = if i.draining { "draining" } else { "undrained" };
            let feed = Feed {
                instance: Some(i.instance.clone()),
                by: i.drained_by.clone(),
                ..Feed::default()
            };
            fed.push((kind, feed));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        logic::claim::{NextAttempt, Pending},
        model::{Occurrence, Run},
    };

    fn kinds(fed: &Fed) -> Vec<&'static str> {
        fed.iter().map(|(kind, _)| *kind).collect()
    }

    /// Shows one state after the other to a board that knows the first one. Returns the kinds of events after each.
    fn seen(states: &[&State]) -> Vec<Vec<&'static str>> {
        let mut told = Told::at(100);
        let pairs = states.windows(2);
        let fed = pairs
            .map(|p| super::states(Some(p[0]), Some(p[1]), None, &Recents::default(), &mut told));
        fed.map(|fed| kinds(&fed)).collect()
    }

    fn of(incarnation: &str) -> State {
        State {
            incarnation: incarnation.to_owned(),
            ..State::default()
        }
    }

    fn paused(incarnation: &str, at: i64, until: Option<i64>) -> State {
        State {
            pause: Some(Pause {
                until,
                reason: None,
                at,
                by: None,
            }),
            ..of(incarnation)
        }
    }

    fn open(next_attempt: Option<NextAttempt>, stop: Option<StopRequest>) -> State {
        let open = Open {
            run: Run {
                granted_at: 95,
                ..Run::first(90)
            },
            incarnation: "a".to_owned(),
            renewed_at: 95,
            stop,
            next_attempt,
            ..Open::first(90)
        };
        State {
            open: vec![open],
            newest: 90,
            ..of("a")
        }
    }

    #[test]
    fn what_the_store_shows_again_is_not_told_again() {
        let was = paused("a", 150, Some(300));
        let lost = seen(&[
            &of("a"),
            &was,
            &State::default(),
            &of("b"),
            &paused("b", 150, Some(300)),
        ]);
        assert_eq!(lost, [vec!["paused"], vec![], vec![], vec![]]);
        // It is over: the next claim clears it away.
        assert_eq!(seen(&[&was, &of("a")]), [Vec::<&str>::new()]);
        // Older than the board.
        assert_eq!(
            seen(&[&of("a"), &paused("a", 50, None)]),
            [Vec::<&str>::new()]
        );
        let skips = |data: &str| State {
            skip: 2,
            skip_at: 150,
            ..of(data)
        };
        let waits = |data: &str| {
            let one = Pending {
                key: "k".to_owned(),
                at: 150,
                by: None,
            };
            State {
                triggers: vec![one],
                ..of(data)
            }
        };
        for (first, again, kind) in [
            (skips("a"), skips("b"), "skip"),
            (waits("a"), waits("b"), "triggered"),
        ] {
            let all = seen(&[&of("a"), &first, &State::default(), &again]);
            assert_eq!(all, [vec![kind], vec![], vec![]]);
        }
        let ahead = State {
            newest: 900,
            ..of("a")
        };
        assert_eq!(seen(&[&ahead, &of("a")]), [["rewound"]]);
        let runs = open(None, None);
        assert_eq!(
            seen(&[&of("a"), &runs, &State::default(), &runs]),
            [vec!["granted"], vec![], vec![]]
        );
    }

    #[test]
    fn what_became_of_an_occurrence_without_a_run_is_told_by_its_outcome() {
        let record = |outcome| {
            let job = crate::model::JobName::new("a");
            let at = Occurrence(90);
            crate::model::RunRecord::without_run(&job, at, Trigger::Schedule, outcome)
        };
        for (outcome, kind) in [
            (Outcome::Missed, "missed"),
            (Outcome::Skipped, "skipped"),
            (Outcome::Unknown, "unknown"),
        ] {
            let fed = records(&[], &[record(outcome).into()], |_| false);
            assert_eq!(kinds(&fed), [kind]);
        }
    }

    #[test]
    fn what_people_ask_for_is_told() {
        let resumed = |at| State {
            resumed: at,
            ..of("a")
        };
        let all = seen(&[
            &paused("a", 150, Some(300)),
            &resumed(200),
            &paused("a", 250, None),
            &resumed(260),
        ]);
        assert_eq!(all, [["resumed"], ["paused"], ["resumed"]]);
        // Nothing was paused any more.
        let late = seen(&[&paused("a", 150, Some(300)), &resumed(400)]);
        assert_eq!(late, [Vec::<&str>::new()]);
        let stopped = open(None, Some(StopRequest::Cancelled));
        let all = seen(&[&open(None, None), &stopped, &stopped]);
        assert_eq!(all, [vec!["cancelled"], vec![]]);
        let replaced = open(None, Some(StopRequest::Replaced));
        assert_eq!(seen(&[&open(None, None), &replaced]), [Vec::<&str>::new()]);
        let next = NextAttempt {
            at: 500,
            trigger: Trigger::Retry,
        };
        let waits = open(Some(next), None);
        let dropped = State {
            newest: 90,
            ..of("a")
        };
        assert_eq!(seen(&[&waits, &dropped]), [["cancelled"]]);
        let newer = State {
            newest: 95,
            ..of("a")
        };
        assert_eq!(seen(&[&waits, &newer]), [Vec::<&str>::new()]);
    }
}
