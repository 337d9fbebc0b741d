//! Honest instances in random interleavings, in virtual time: they claim, lose replies, renew, watch, crash and
//! settle; the store restarts, forgets, and goes back to an older state.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fastrand::Rng;

use super::*;
use crate::model::{InstanceId, JobName, Run, RunId};

/// The lengths of a lease, of a holder's trust in it, of the time to kill and of a quarantine, in milliseconds.
const LEASE: i64 = 1000;
const TRUST: i64 = 700;
const KILL: i64 = 200;
const QUARANTINE: i64 = LEASE + KILL;
const EVERY: i64 = 250;
const MAX_ATTEMPTS: u32 = 3;

fn job() -> JobName {
    JobName::new("backup")
}

fn put(state: &mut Option<State>, key: &str, now: i64) -> Controlled {
    let what = Control::Trigger {
        key: key.to_owned(),
    };
    control(state, &job(), &what, now * 1000, &mut Effects::default())
}

#[test]
fn keys_are_remembered_for_a_time_and_not_for_a_number_of_triggers() {
    let t = 1_800_000_000_000;
    let mut state = Some(State::default());
    let used = |state: &mut Option<State>, key: &str, at: i64| {
        assert_eq!(put(state, key, at), Controlled::Done, "{key}");
        let st = state.as_mut().unwrap();
        st.remember_trigger(key, Occurrence(at), at);
    };
    let own = |i: usize| format!("{OWN_KEY}{i}");
    used(&mut state, "first", t);
    for i in 0..3 * OWN_KEYS_MOST {
        used(&mut state, &own(i), t + 1 + i as i64);
    }
    assert_eq!(
        put(&mut state, "first", t + 5000),
        Controlled::Triggered(Occurrence(t))
    );
    let st = state.as_ref().unwrap();
    assert!(st.triggered.len() <= OWN_KEYS_MOST + 2);
    // soloist's own keys are gone soon, people's keys when their time is over.
    let last = own(3 * OWN_KEYS_MOST - 1);
    assert!(matches!(
        put(&mut state, &last, t + OWN_KEYS_KEPT_MS),
        Controlled::Triggered(_)
    ));
    assert_eq!(
        put(&mut state, &own(0), t + 2 * OWN_KEYS_KEPT_MS),
        Controlled::Done
    );
    assert_eq!(state.as_ref().unwrap().triggered.len(), 1);
    assert!(matches!(
        put(&mut state, "first", t + KEYS_KEPT_MS - 1),
        Controlled::Triggered(_)
    ));
    assert_eq!(put(&mut state, "first", t + KEYS_KEPT_MS), Controlled::Done);
}

/// A restarted store kept what ran early; the instance that counted the range did not know of it.
#[test]
fn what_ran_early_is_not_recorded_as_lost() {
    let t = 1_800_000_000_000;
    let at = |s: i64| Occurrence(t + s * 1000);
    let range = |first: i64, last: i64| Missed {
        first: at(first),
        last: at(last),
        count: (last - first + 1) as u64,
    };
    let mut state = Some(State {
        incarnation: "before".to_owned(),
        newest: t,
        early: vec![at(4), at(40)],
        ..State::default()
    });
    let mut ask = Register {
        adopt: Some("now".to_owned()),
        lost: vec![range(1, 9)],
        ..Register::first(job())
    };
    let mut effects = Effects::default();
    let now = at(20).0 * 1000;
    let answer = register(&mut state, &ask, now, "now", &mut effects);
    assert_eq!(
        (answer, effects.records.len()),
        (Registration::Quarantined, 0)
    );
    ask.lost = vec![range(1, 3), range(5, 9)];
    let answer = register(&mut state, &ask, now, "now", &mut effects);
    assert_eq!(answer, Registration::Ready);
    let all: Vec<_> = effects
        .records
        .iter()
        .map(|r| (r.occurrence, r.count))
        .collect();
    assert_eq!(all, [(at(3), 3), (at(9), 5)]);
    assert_eq!(state.unwrap().newest, at(9).0);
}

fn registration(known: i64) -> Register {
    Register {
        schedule: "every 2 s".to_owned(),
        known: Occurrence(known),
        ..Register::first(job())
    }
}

/// A settlement or a renewal made a state in a store that had lost all, after the caller had looked at it.
#[test]
fn what_was_lost_is_counted_anew_if_the_store_knows_of_more_by_then() {
    let t = 1_800_000_000_000;
    let mut state = Some(State {
        newest: t - 9000,
        ..State::default()
    });
    let mut ask = Register {
        adopt: Some("now".to_owned()),
        counted_from: 0,
        ..registration(0)
    };
    let mut effects = Effects::default();
    let answer = register(&mut state, &ask, t * 1000, "now", &mut effects);
    assert_eq!(answer, Registration::Quarantined);
    ask.counted_from = t - 9000;
    ask.lost = vec![Missed::one(Occurrence(t - 7000))];
    let answer = register(&mut state, &ask, t * 1000, "now", &mut effects);
    assert_eq!((answer, effects.records.len()), (Registration::Ready, 1));
    assert_eq!(state.map(|s| s.newest), Some(t - 7000));
}

/// A store that went back to an older copy of its data does not know which triggers have run since.
#[test]
fn a_trigger_from_before_a_loss_is_recorded_and_not_run() {
    let t = 1_800_000_000_000;
    let pending = |key: &str, at| Pending {
        key: key.to_owned(),
        at,
        by: None,
    };
    let mut state = Some(State {
        incarnation: "before".to_owned(),
        schedule: "every 2 s".to_owned(),
        triggers: vec![
            pending("old", t - 5000),
            pending("older", t - 6000),
            pending("new", t + 1),
        ],
        ..State::default()
    });
    let ask = Register {
        adopt: Some("now".to_owned()),
        lost_before: t,
        ..registration(0)
    };
    let mut effects = Effects::default();
    let answer = register(&mut state, &ask, (t + 999) * 1000, "now", &mut effects);
    assert_eq!(answer, Registration::Ready);
    let st = state.expect("a state");
    assert_eq!(st.triggers, [pending("new", t + 1)]);
    let keys: Vec<&str> = st.triggered.iter().map(|t| t.key.as_str()).collect();
    assert_eq!(keys, ["old", "older"]);
    let at: BTreeSet<i64> = effects.records.iter().map(|r| r.occurrence.0).collect();
    assert_eq!(at.len(), 2, "{at:?}");
    assert!(
        effects
            .records
            .iter()
            .all(|r| r.outcome == Outcome::Unknown)
    );
    assert!(at.iter().all(|at| at % 1000 != 0), "{at:?}");
}

#[test]
fn a_key_too_many_is_refused_and_none_is_forgotten() {
    let t = 1_800_000_000_000;
    let mut state = Some(State::default());
    for i in 0..KEYS_MOST as i64 {
        let st = state.as_mut().unwrap();
        st.remember_trigger(&format!("k{i}"), Occurrence(t + i), t + i);
    }
    let now = t + KEYS_MOST as i64;
    assert_eq!(put(&mut state, "more", now), Controlled::TooMany);
    assert_eq!(
        put(&mut state, "k0", now),
        Controlled::Triggered(Occurrence(t))
    );
    let own = format!("{OWN_KEY}1");
    assert_eq!(put(&mut state, &own, now), Controlled::Done);
    // There is room when the first is forgotten.
    state.as_mut().unwrap().triggers.clear();
    assert_eq!(put(&mut state, "more", t + KEYS_KEPT_MS), Controlled::Done);
}

/// A run as its instance knows it.
#[derive(Clone)]
struct Held {
    claim: Claim,
    grant: Grant,
    trusted_until: i64,
    seq: u32,
    /// The incarnation that did not know the run.
    reclaim: String,
}

#[derive(Default)]
struct Instance {
    held: Vec<Held>,
    /// Claims whose replies were lost, and that will be sent again.
    asked: Vec<Claim>,
    /// Leases of others, and since when each was seen like this.
    watched: Vec<(Observed, i64)>,
    known: i64,
    /// The incarnation, and since when it is seen.
    incarnation: (String, i64),
}

struct World {
    rng: Rng,
    now: i64,
    state: Option<State>,
    incarnation: u32,
    instances: Vec<Instance>,
    overlap: Overlap,
    on_crash: OnCrash,
    retries: bool,
    // What is judged.
    grants: HashMap<(Occurrence, u32), RunId>,
    token: i64,
    /// Until when each run's processes may live.
    alive: BTreeMap<RunId, i64>,
    newest: i64,
    recorded: u32,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let overlap = [
            Overlap::Skip,
            Overlap::Queue,
            Overlap::Replace,
            Overlap::Allow,
        ];
        Self {
            now: 1_800_000_000_000,
            state: None,
            incarnation: 1,
            instances: (0..3).map(|_| Instance::default()).collect(),
            overlap: overlap[rng.usize(..4)],
            on_crash: [OnCrash::Fail, OnCrash::Rerun][rng.usize(..2)],
            retries: rng.bool(),
            grants: HashMap::new(),
            token: 0,
            alive: BTreeMap::new(),
            newest: 0,
            recorded: 0,
            rng,
        }
    }

    fn incarnation(&self) -> String {
        format!("incarnation-{}", self.incarnation)
    }

    fn attempts(&self) -> u32 {
        if self.on_crash == OnCrash::Rerun {
            MAX_ATTEMPTS
        } else {
            1
        }
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.now += self.rng.i64(0..120);
            for instance in &mut self.instances {
                instance.held.retain(|h| self.now < h.trusted_until);
            }
            let i = self.rng.usize(..self.instances.len());
            match self.rng.u32(..100) {
                0..35 => self.claim(i),
                35..62 => self.renew(i),
                62..72 => self.settle(i),
                72..95 => self.watch(i),
                95..98 => self.crash(i),
                _ => self.restart(),
            }
            if let Some(st) = &self.state {
                assert!(st.newest >= self.newest, "the watermark went back");
                self.newest = st.newest;
            }
        }
    }

    fn claim(&mut self, i: usize) {
        let grid = self.now - self.now.rem_euclid(EVERY);
        let known = Occurrence(self.instances[i].known);
        let (state, now) = (&self.state, self.now);
        let me = &mut self.instances[i];
        let claim = if !me.asked.is_empty() && self.rng.bool() {
            me.asked.remove(self.rng.usize(..me.asked.len()))
        } else {
            let waits = state.as_ref().and_then(|st| st.open.first());
            let at = match waits {
                Some(open) if self.rng.bool() => open.run.occurrence,
                _ => Occurrence(grid + EVERY * self.rng.i64(-3..=1)),
            };
            // Decided here, or held here: an instance does not ask for that again.
            if me.held.iter().any(|h| h.grant.occurrence == at)
                || me.asked.iter().any(|c| c.target == Target::Scheduled(at))
            {
                return;
            }
            let lapsed = me.watched.iter().find(|(_, since)| now - since >= LEASE);
            Claim {
                job: job(),
                target: Target::Scheduled(at),
                known,
                missed: vec![],
                run: RunId::random(),
                instance: InstanceId::new(&format!("i{i}")),
                host: String::new(),
                trigger: Trigger::Schedule,
                start_by: at.0 + 5 * EVERY,
                lease: LEASE,
                overlap: self.overlap,
                on_crash: self.on_crash,
                max_attempts: if self.on_crash == OnCrash::Rerun {
                    MAX_ATTEMPTS
                } else {
                    1
                },
                definition: String::new(),
                observed: lapsed.map(|(o, _)| o.clone()),
                holds: me.held.iter().map(|h| h.claim.run).collect(),
                cause: None,
            }
        };
        let (incarnation, mut effects) = (self.incarnation(), Effects::default());
        let answer = super::claim(
            &mut self.state,
            &claim,
            now * 1000,
            &incarnation,
            &mut effects,
        );
        self.recorded += effects.records.len() as u32;
        if let Answer::Granted(g) = answer {
            let first = self.grants.insert((g.occurrence, g.attempt), claim.run);
            assert!(
                first.is_none_or(|run| run == claim.run),
                "{g:?} was granted twice"
            );
            if first.is_none() && self.overlap != Overlap::Allow {
                assert!(g.token().0 > self.token, "{g:?} has an older token");
                self.token = g.token().0;
            }
        }
        if self.rng.u32(..4) == 0 {
            // The reply is lost.
            self.instances[i].asked.push(claim);
            return;
        }
        match answer {
            Answer::Granted(grant) => {
                let me = &mut self.instances[i];
                me.known = me.known.max(grant.occurrence.0);
                me.held.push(Held {
                    trusted_until: now + TRUST,
                    claim,
                    grant,
                    seq: 0,
                    reclaim: String::new(),
                });
                let run = me.held[me.held.len() - 1].claim.run;
                self.trust(run, now + TRUST + KILL);
                if self.overlap != Overlap::Allow {
                    for (other, until) in &self.alive {
                        assert!(
                            *other == run || *until <= now,
                            "{grant:?} overlaps {other} at {now}"
                        );
                    }
                }
            }
            Answer::Absent | Answer::Quarantined => self.register(i),
            Answer::Settled(_) | Answer::Recorded { .. } => {
                let Target::Scheduled(at) = claim.target else {
                    return;
                };
                let me = &mut self.instances[i];
                me.known = me.known.max(at.0);
            }
            _ => {}
        }
    }

    fn trust(&mut self, run: RunId, until: i64) {
        self.alive.insert(run, until);
    }

    fn renew(&mut self, i: usize) {
        let n = self.instances[i].held.len();
        if n == 0 {
            return;
        }
        let h = self.rng.usize(..n);
        let incarnation = self.incarnation();
        let held = &mut self.instances[i].held[h];
        held.seq += 1;
        let renew = Renew {
            late: false,
            reclaim: std::mem::take(&mut held.reclaim),
            run: Run {
                occurrence: held.grant.occurrence,
                attempt: held.grant.attempt,
                trigger: held.grant.trigger,
                key: None,
                id: held.claim.run,
                instance: held.claim.instance.clone(),
                host: String::new(),
                lease: LEASE,
                definition: String::new(),
                granted_at: self.now,
            },
            job: job(),
            seq: held.seq,
        };
        let answer = super::renew(&mut self.state, &renew, self.now * 1000, &incarnation);
        if self.rng.u32(..4) == 0 {
            return;
        }
        match answer {
            Renewal::Unknown => held.reclaim = incarnation,
            Renewal::Renewed(None) => {
                held.trusted_until = self.now + TRUST;
                self.trust(renew.run.id, self.now + TRUST + KILL);
            }
            Renewal::Renewed(Some(_)) => {}
            Renewal::Lost => drop(self.end(i, h)),
        }
    }

    /// The processes of this run are gone now.
    fn end(&mut self, i: usize, h: usize) -> Held {
        let held = self.instances[i].held.remove(h);
        self.alive.insert(held.claim.run, self.now);
        held
    }

    fn settle(&mut self, i: usize) {
        let n = self.instances[i].held.len();
        if n == 0 {
            return;
        }
        let h = self.rng.usize(..n);
        let held = self.end(i, h);
        let (g, c) = (held.grant, held.claim);
        let another = self.retries && g.attempt < MAX_ATTEMPTS && self.rng.bool();
        let settle = Settle {
            run: c.run,
            record: RunRecord {
                run_id: Some(c.run),
                trigger: g.trigger,
                attempt: g.attempt,
                ..not_run(&c, g.occurrence, 1, unasked(Outcome::Failed, ""))
            },
            next_attempt: another.then(|| DelayedAttempt {
                delay_ms: self.rng.i64(0..400),
                trigger: Trigger::Retry,
            }),
        };
        let incarnation = self.incarnation();
        for _ in 0..self.rng.u32(1..3) {
            let before = self.state.clone();
            let mut effects = Effects::default();
            let _ = super::settle(
                &mut self.state,
                &settle,
                self.now * 1000,
                &incarnation,
                &mut effects,
            );
            let held =
                |st: &Option<State>| st.as_ref().is_some_and(|st| st.held_by(c.run).is_some());
            assert!(!held(&self.state), "settled, and still open: {before:?}");
        }
    }

    /// Looks at the leases; each is watched from when it was first seen in its present state.
    fn watch(&mut self, i: usize) {
        let now = self.now;
        let me = &mut self.instances[i];
        let open = self.state.iter().flat_map(|st| &st.open);
        let seen = open.filter(|o| o.next_attempt.is_none()).map(|o| Observed {
            run: o.run.id,
            seq: o.seq,
            incarnation: o.incarnation.clone(),
        });
        me.watched = seen
            .map(|o| {
                let since = me
                    .watched
                    .iter()
                    .find(|(w, _)| *w == o)
                    .map_or(now, |(_, t)| *t);
                (o, since)
            })
            .collect();
        let newest = self.state.as_ref().map_or(0, |st| st.newest);
        me.known = me.known.max(newest);
        self.register(i);
    }

    /// Registers, with the right to adopt once the incarnation was seen for a whole quarantine.
    fn register(&mut self, i: usize) {
        let (incarnation, now) = (self.incarnation(), self.now);
        let me = &mut self.instances[i];
        if me.incarnation.0 != incarnation {
            me.incarnation = (incarnation.clone(), now);
        }
        let last = Occurrence(now - now.rem_euclid(EVERY));
        let register = Register {
            definition: "d".to_owned(),
            known: Occurrence(me.known),
            adopt: (now - me.incarnation.1 >= QUARANTINE).then(|| incarnation.clone()),
            lost: vec![Missed::one(last)],
            instance: InstanceId::new(&format!("i{i}")),
            on_crash: self.on_crash,
            max_attempts: self.attempts(),
            ..Register::first(job())
        };
        let mut effects = Effects::default();
        let _ = super::register(
            &mut self.state,
            &register,
            now * 1000,
            &incarnation,
            &mut effects,
        );
    }

    fn crash(&mut self, i: usize) {
        while !self.instances[i].held.is_empty() {
            self.end(i, 0);
        }
        self.instances[i] = Instance::default();
    }

    /// Restarts the store, without its data or with it.
    fn restart(&mut self) {
        self.incarnation += 1;
        if self.rng.bool() {
            self.state = None;
            self.newest = 0;
        }
    }
}

/// Attempt n of an occurrence is granted to one run, no two runs of a job live at one time, tokens strictly
/// increase, and what is decided stays decided.
#[test]
fn honest_instances_never_meet() {
    let (mut grants, mut takeovers, mut overlaps) = (0, 0, 0);
    for seed in 0..1500 {
        let result = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            world.run(300);
            world
        });
        let world = result.unwrap_or_else(|e| {
            let text = e.downcast_ref::<String>().cloned().unwrap_or_default();
            panic!("seed {seed}: {text}")
        });
        grants += world.grants.len();
        takeovers += world
            .grants
            .keys()
            .filter(|(_, attempt)| *attempt > 1)
            .count();
        overlaps += world.recorded;
    }
    // What never happens is not tested.
    assert!(
        grants > 8000 && takeovers > 800 && overlaps > 3000,
        "{grants} {takeovers} {overlaps}"
    );
}
