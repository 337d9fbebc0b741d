//! Random sequences on every store, compared step by step with the pure rules: answers, states, history, events.
//! Redis' clock cannot be set, so the rules are given the clock and the incarnation that each reply carries.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use fastrand::Rng;
use soloist::{
    logic::claim::{
        self, Answer, Claim, Control, DelayedAttempt, Effects, Event, Grant, Missed, Observed,
        OnCrash, Overlap, Pause, Pending, Presence, Register, Remembered, Renew, Settle, State,
        Target, Triggered,
    },
    model::{InstanceId, JobName, Occurrence, Outcome, RunId, RunRecord, Trigger, Wait},
    store::{HISTORY_KEPT, Reply, Store, Tail, memory::MemoryStore, sqlite::SqliteStore},
};
use tokio::sync::broadcast;

use crate::support::server::RedisServer;

/// What can be done to a store from outside.
enum Place {
    Memory(Arc<MemoryStore>, Arc<AtomicI64>),
    Sqlite(Arc<AtomicI64>),
    Redis(RedisServer),
}

fn hand_moved() -> (Arc<AtomicI64>, soloist::store::Clock) {
    let time = Arc::new(AtomicI64::new(1_800_000_000_123_456));
    let clock = time.clone();
    (time, Arc::new(move || clock.load(Ordering::Relaxed)))
}

#[tokio::test]
async fn memory_does_what_the_rules_say() {
    let (time, clock) = hand_moved();
    let store = Arc::new(MemoryStore::new_with_clock(clock));
    let mut place = Place::Memory(store.clone(), time);
    compare(&*store, &mut place, 1, 3000).await;
}

#[tokio::test]
async fn sqlite_does_what_the_rules_say() {
    let (time, clock) = hand_moved();
    let dir = tempfile::TempDir::new().unwrap();
    let store = SqliteStore::open_with_clock(&dir.path().join("state.db"), clock).unwrap();
    let mut place = Place::Sqlite(time);
    compare(&store, &mut place, 2, 3000).await;
}

#[tokio::test]
async fn redis_does_what_the_rules_say() {
    let server = RedisServer::start();
    let store = server.store();
    let mut place = Place::Redis(server);
    compare(&store, &mut place, 3, 3000).await;
}

/// One job by the rules.
#[derive(Default)]
struct Known {
    state: Option<State>,
    /// Newest first.
    history: VecDeque<RunRecord>,
}

/// A run that was granted once: it may renew and settle at any time, also when it should not.
#[derive(Clone)]
struct Run {
    claim: Claim,
    occurrence: Occurrence,
    attempt: u32,
    trigger: Trigger,
    seq: u32,
}

struct Model {
    rng: Rng,
    jobs: BTreeMap<JobName, Known>,
    runs: Vec<Run>,
    claims: Vec<Claim>,
    incarnation: String,
    now: i64,
    /// The events that this step has to send.
    events: Vec<Event>,
    at: String,
    /// Which kinds of answers were met: a comparison that meets few compares little.
    met: HashSet<String>,
}

impl Model {
    /// Applies the rules to what the store did, and compares.
    fn step<T: PartialEq + Debug>(
        &mut self,
        job: &JobName,
        theirs: &T,
        f: impl FnOnce(&mut Option<State>, &mut Effects) -> T,
    ) {
        let known = self.jobs.get_mut(job).unwrap();
        let before = known.state.clone();
        let mut effects = Effects::default();
        let ours = f(&mut known.state, &mut effects);
        assert_eq!(
            theirs, &ours,
            "{}: the store's answer (left) differs; state {before:#?}",
            self.at
        );
        for r in std::mem::take(&mut effects.records) {
            effects.put(r, &mut known.history);
            known.history.truncate(HISTORY_KEPT);
        }
        self.events.extend(effects.events);
        let word = format!("{ours:?}");
        let word = word.split([' ', '{']).next().unwrap_or_default();
        self.met.insert(word.to_owned());
    }

    fn note_reply<T>(&mut self, r: &Reply<T>) {
        self.now = r.now_us / 1000;
        self.incarnation = r.incarnation.to_string();
    }

    fn job(&mut self) -> JobName {
        let i = self.rng.usize(..self.jobs.len());
        self.jobs.keys().nth(i).unwrap().clone()
    }
    fn instance(&mut self) -> InstanceId {
        InstanceId::new(["a", "b", "c"][self.rng.usize(..3)])
    }
    /// A few instants around now, so that many claims meet.
    fn instant(&mut self) -> i64 {
        let grid = self.now - self.now.rem_euclid(40);
        grid + 40 * self.rng.i64(-6..=3)
    }
    /// The answers that were not met yet.
    fn missing(&self) -> Vec<&'static str> {
        let met = |word: &&str| self.met.iter().any(|w| w.starts_with(*word));
        WORDS.into_iter().filter(|word| !met(word)).collect()
    }
    fn one_in(&mut self, n: u32) -> bool {
        self.rng.u32(..n) == 0
    }
    fn missed(&mut self) -> Missed {
        let last = self.instant();
        Missed {
            first: Occurrence(last - 80),
            last: Occurrence(last),
            count: self.rng.u64(1..5),
        }
    }

    fn claim(&mut self, instance: &InstanceId) -> Claim {
        // Asked again after a lost reply, or much later.
        if !self.claims.is_empty() && self.one_in(5) {
            let recent = self.claims.len().saturating_sub(12);
            let i = self.rng.usize(recent..self.claims.len());
            return Claim {
                instance: instance.clone(),
                host: format!("{instance}.example"),
                ..self.claims[i].clone()
            };
        }
        let job = self.job();
        let state = self.jobs[&job].state.clone().unwrap_or_default();
        let by_hand = self.one_in(4);
        let at = match state.open.first() {
            Some(open) if self.one_in(3) => open.run.occurrence.0,
            _ => self.instant(),
        };
        let target = if by_hand {
            Target::Manual {
                key: match state.triggers.first() {
                    Some(pending) if self.one_in(2) => pending.key.clone(),
                    _ => self.key(),
                },
                before: self
                    .one_in(2)
                    .then(|| Occurrence(self.now + self.rng.i64(-1500..80))),
            }
        } else {
            Target::Scheduled(Occurrence(at))
        };
        let observed = (!state.open.is_empty() && self.one_in(2)).then(|| {
            let e = &state.open[self.rng.usize(..state.open.len())];
            Observed {
                run: e.run.id,
                seq: e.seq + u32::from(self.one_in(6)),
                incarnation: if self.one_in(6) {
                    "older".into()
                } else {
                    e.incarnation.clone()
                },
            }
        });
        let holds = state.open.iter().filter(|_| self.one_in(3));
        let holds = holds.map(|e| e.run.id).collect();
        let claim = Claim {
            job,
            target,
            known: Occurrence(if self.one_in(12) { self.instant() } else { 0 }),
            missed: (0..self.rng.usize(..3).saturating_sub(1))
                .map(|_| self.missed())
                .collect(),
            run: RunId::random(),
            instance: instance.clone(),
            host: format!("{instance}.example"),
            trigger: [Trigger::Schedule, Trigger::CatchUp, Trigger::Manual][self.rng.usize(..3)],
            start_by: match self.rng.u32(..24) {
                0 => claim::NEVER,
                1 => claim::REMOVED,
                2..5 => at + 20,
                _ => at + 100_000,
            },
            lease: 15_000,
            overlap: [
                Overlap::Skip,
                Overlap::Queue,
                Overlap::Replace,
                Overlap::Allow,
            ][self.rng.usize(..4)],
            on_crash: [OnCrash::Fail, OnCrash::Rerun][self.rng.usize(..2)],
            max_attempts: self.rng.u32(1..5),
            definition: "definition \"1\"".to_owned(),
            observed,
            holds,
            cause: [None, Some(Wait::Slot), Some(Wait::Overdue)][self.rng.usize(..3)],
        };
        self.claims.push(claim.clone());
        claim
    }

    fn remembered(&mut self) -> Remembered {
        Remembered {
            pause: self.one_in(8).then(|| Pause {
                until: self.one_in(2).then(|| self.now + self.rng.i64(-20..60)),
                reason: None,
                at: self.now + self.rng.i64(-100..20),
                by: self.by(),
            }),
            skip: self.rng.u32(..2),
            skip_by: self.by(),
            skip_at: if self.one_in(6) {
                self.now + self.rng.i64(-100..20)
            } else {
                0
            },
            triggered: (self.one_in(6).then(|| Triggered {
                key: self.key(),
                occurrence: Occurrence(self.now - self.rng.i64(0..50)),
                at: self.now + self.rng.i64(-100..20),
            }))
            .into_iter()
            .collect(),
            triggers: (self.one_in(6).then(|| Pending {
                key: self.key(),
                at: self.now + self.rng.i64(-100..20),
                by: self.by(),
            }))
            .into_iter()
            .collect(),
        }
    }

    fn by(&mut self) -> Option<String> {
        self.one_in(2)
            .then(|| "ü/\"@\"".to_owned() + &self.rng.u8(..9).to_string())
    }

    fn key(&mut self) -> String {
        ["k1", "k2", "ü/\"3\"\n"][self.rng.usize(..3)].to_owned() + &self.rng.u8(..9).to_string()
    }

    /// Most often one that is open.
    fn run(&mut self) -> Option<Run> {
        let recent = self.runs.len().saturating_sub(6);
        (!self.runs.is_empty()).then(|| self.runs[self.rng.usize(recent..self.runs.len())].clone())
    }
}

async fn compare(store: &dyn Store, place: &mut Place, seed: u64, steps: usize) {
    let names = ["a", "b-2", "c.d_3"].map(|n| JobName::new(&format!("{n}-{seed}")));
    let mut m = Model {
        rng: Rng::with_seed(seed),
        jobs: names.into_iter().map(|n| (n, Known::default())).collect(),
        runs: vec![],
        claims: vec![],
        incarnation: String::new(),
        now: 0,
        events: vec![],
        at: String::new(),
        met: HashSet::new(),
    };
    let jobs: Vec<JobName> = m.jobs.keys().cloned().collect();
    let mut events = store.events();
    until_received(store, &mut events).await;
    // A rare answer may need more steps than most sequences.
    for step in 0..10 * steps {
        if step >= steps && m.missing().is_empty() {
            break;
        }
        m.at = format!("seed {seed}, step {step}");
        m.events.clear();
        if let Place::Memory(_, time) | Place::Sqlite(time) = place {
            let step = match m.one_in(60) {
                true => -100_000,
                false => m.rng.i64(0..25_000),
            };
            time.fetch_add(step, Ordering::Relaxed);
        }
        let seen = store.observe(&jobs).await.unwrap();
        m.note_reply(&seen);
        match m.rng.u32(..100) {
            0..55 => claims(store, &mut m).await,
            55..65 => renew(store, &mut m).await,
            65..79 => settle(store, &mut m).await,
            79..85 => register(store, &mut m).await,
            85..98 => control(store, &mut m).await,
            _ => {
                if m.one_in(5) && loses(place, &mut m) {
                    until_received(store, &mut events).await;
                }
            }
        }
        let seen = store.observe(&jobs).await.unwrap().value;
        for (job, seen) in jobs.iter().zip(seen) {
            assert_eq!(
                seen, m.jobs[job].state,
                "{}: the store's state of {job} (left)",
                m.at
            );
        }
        for wanted in &m.events {
            let received = tokio::time::timeout(Duration::from_secs(30), async {
                loop {
                    match events.recv().await.unwrap() {
                        // From `until_received`, and from a new connection.
                        Event::Drain | Event::Gap => {}
                        other => return other,
                    }
                }
            });
            assert_eq!(received.await.as_ref(), Ok(wanted), "{}", m.at);
        }
        if step % 25 == 0 || step + 1 >= steps {
            for job in &jobs {
                let seen = store.history(job, 1000).await.unwrap();
                assert_eq!(
                    seen,
                    tidy(&m.jobs[job].history),
                    "{}: history (left) of {job}",
                    m.at
                );
            }
        }
    }
    let missing = m.missing();
    assert!(
        missing.is_empty(),
        "seed {seed}: no {missing:?} among {:?}",
        m.met
    );
}

/// How the answers begin that each sequence has to meet.
const WORDS: [&str; 18] = [
    "Granted(Grant",
    "Running(Open",
    "Blocked(Open",
    "Settled(None)",
    "Settled(Some(Last",
    "Early",
    "Later",
    "RunFirst(Occurrence(",
    "Recorded",
    "Behind",
    "Absent",
    "Renewed(None)",
    "Lost",
    "Done",
    "Nothing",
    "Stopping([RunId(",
    "Triggered(Occurrence(",
    "(Ready,",
];

/// Makes events flow again after the connection was lost.
async fn until_received(store: &dyn Store, events: &mut broadcast::Receiver<Event>) {
    let nobody = InstanceId::new("nobody");
    for _ in 0..200 {
        // Events from earlier tries prove nothing.
        while events.try_recv().is_ok() {}
        // A restart broke the connection: the first try finds that out.
        let _ = store.drain(&nobody, false, "").await;
        let drain = async { while !matches!(events.recv().await, Ok(Event::Drain)) {} };
        let received = tokio::time::timeout(Duration::from_millis(100), drain);
        if received.await.is_ok() {
            // Each connection finds that out by itself.
            for _ in 0..8 {
                let _ = store.observe(&[]).await;
            }
            return;
        }
    }
    panic!("no event in 200 attempts");
}

/// The store's history as it is read: each run once, its newest record, with the token.
fn tidy(history: &VecDeque<RunRecord>) -> Vec<RunRecord> {
    let mut seen = HashSet::new();
    history
        .iter()
        .filter(|r| r.run_id.is_none_or(|id| seen.insert(id)))
        .map(|r| RunRecord {
            fencing_token: (r.attempt > 0).then(|| r.occurrence.token(r.attempt)),
            ..r.clone()
        })
        .collect()
}

async fn claims(store: &dyn Store, m: &mut Model) {
    let instance = m.instance();
    let n = if m.one_in(5) { 3 } else { 1 };
    let claims: Vec<Claim> = (0..n).map(|_| m.claim(&instance)).collect();
    let r = store.claim(&claims).await.unwrap();
    m.note_reply(&r);
    for (c, theirs) in claims.iter().zip(&r.value) {
        m.step(&c.job, theirs, |st, effects| {
            claim::claim(st, c, r.now_us, &r.incarnation, effects)
        });
        if let Answer::Granted(g) = theirs {
            m.runs.push(Run {
                claim: c.clone(),
                occurrence: g.occurrence,
                attempt: g.attempt,
                trigger: g.trigger,
                seq: 0,
            });
        }
    }
}

async fn renew(store: &dyn Store, m: &mut Model) {
    let Some(run) = m.run() else { return };
    let c = &run.claim;
    let seq = run.seq + m.rng.u32(1..3);
    // A grant by a clock that was ahead: its renewal leaves the watermark in the future.
    let ahead = if m.one_in(6) { 60 } else { 0 };
    let grant = Grant {
        occurrence: Occurrence(run.occurrence.0 + ahead),
        attempt: run.attempt,
        trigger: run.trigger,
    };
    let reclaim = match m.one_in(2) {
        true => m.incarnation.clone(),
        false => String::new(),
    };
    let renew = Renew {
        late: false,
        reclaim,
        job: c.job.clone(),
        run: c.run(grant, run.occurrence.0 + 1),
        seq,
    };
    let mut reply = store.renew(&renew).await;
    // The first renewal after a restart finds its connection broken.
    while matches!(&reply, Err(e) if e.is_transient()) {
        reply = store.renew(&renew).await;
    }
    let r = reply.unwrap();
    m.note_reply(&r);
    m.step(&renew.job, &r.value, |st, _| {
        claim::renew(st, &renew, r.now_us, &r.incarnation)
    });
    if let Some(known) = m.runs.iter_mut().find(|k| k.claim.run == c.run) {
        known.seq = seq;
    }
}

async fn settle(store: &dyn Store, m: &mut Model) {
    let Some(run) = m.run() else { return };
    let c = &run.claim;
    let retry = m.one_in(2).then(|| DelayedAttempt {
        delay_ms: m.rng.i64(0..200),
        trigger: [Trigger::Retry, Trigger::Takeover][m.rng.usize(..2)],
    });
    let finished = [None, Some(m.now), Some(m.now - m.rng.i64(0..2000))][m.rng.usize(..3)];
    let settle = Settle {
        run: c.run,
        record: RunRecord {
            run_id: Some(c.run),
            job: c.job.clone(),
            occurrence: run.occurrence,
            trigger: run.trigger,
            attempt: run.attempt,
            fencing_token: None,
            instance: Some(c.instance.clone()),
            host: Some(c.host.clone()),
            started_at: Some(run.occurrence.0),
            finished_at: finished,
            lateness_ms: Some(3),
            duration_ms: Some(m.now - run.occurrence.0),
            outcome: [
                Outcome::Succeeded,
                Outcome::Failed,
                Outcome::Unknown,
                Outcome::Crashed,
            ][m.rng.usize(..4)],
            exit_code: Some(1),
            signal: None,
            output_tail: String::new(),
            output_truncated: true,
            error: Some("exit code 1".to_owned()),
            count: 1,
            usage: soloist::model::Usage::default(),
            waited: None,
            by: None,
        },
        next_attempt: retry,
    };
    let r = store.settle(&settle, &Tail::default()).await.unwrap();
    m.note_reply(&r);
    m.step(&settle.record.job, &r.value, |st, effects| {
        claim::settle(st, &settle, r.now_us, &r.incarnation, effects)
    });
}

async fn register(store: &dyn Store, m: &mut Model) {
    let job = m.job();
    let register = Register {
        schedule: ["s1", "s1", "s1", "s2"][m.rng.usize(..4)].to_owned(),
        definition: ["d1", "d2"][m.rng.usize(..2)].to_owned(),
        known: Occurrence(if m.one_in(6) { m.instant() } else { 0 }),
        adopt: match m.rng.u32(..4) {
            0 => None,
            1 => Some("another".to_owned()),
            _ => Some(m.incarnation.clone()),
        },
        epoch: None,
        lost: m.one_in(2).then(|| m.missed()).into_iter().collect(),
        counted_from: i64::MAX,
        lost_before: 0,
        presence: [Presence::Disabled, Presence::New, Presence::Kept][m.rng.usize(..3)],
        back_at: if m.one_in(2) { m.instant() } else { 0 },
        waits_since: if m.one_in(2) { m.instant() } else { 0 },
        owed: m.one_in(3).then(|| m.missed()).into_iter().collect(),
        remembered: m.remembered(),
        instance: m.instance(),
        host: "h".to_owned(),
        on_crash: [OnCrash::Fail, OnCrash::Rerun][m.rng.usize(..2)],
        max_attempts: m.rng.u32(1..4),
        job,
    };
    let r = store
        .register(std::slice::from_ref(&register))
        .await
        .unwrap();
    m.note_reply(&r);
    m.step(&register.job, &r.value[0], |st, effects| {
        let answer = claim::register(st, &register, r.now_us, &r.incarnation, effects);
        (answer, st.clone())
    });
}

async fn control(store: &dyn Store, m: &mut Model) {
    let job = m.job();
    let what = match m.rng.u32(..14) {
        0 => Control::Pause {
            until: m.one_in(2).then(|| m.now + m.rng.i64(-20..60)),
            reason: m.one_in(2).then(|| "because / \"x\"".to_owned()),
        },
        1..4 => Control::Resume,
        4 => Control::Skip {
            count: m.rng.u32(..3),
        },
        5 => Control::Cancel,
        6 => Control::Off,
        7 => Control::Rewind {
            ran: vec![Occurrence(m.instant()), Occurrence(m.now + 60)],
        },
        _ => Control::Trigger { key: m.key() },
    };
    let what = match m.by() {
        Some(by) => what.by(&by),
        None => what,
    };
    let r = store.control(&job, &what).await.unwrap();
    m.note_reply(&r);
    m.step(&job, &r.value, |st, effects| {
        claim::control(st, &job, &what, r.now_us, effects)
    });
}

/// The store restarts, with or without its data. True: it may have to be connected to again.
fn loses(place: &mut Place, m: &mut Model) -> bool {
    let empty = m.one_in(3);
    match place {
        Place::Sqlite(..) => return false,
        Place::Memory(store, _) => store.restart(empty),
        Place::Redis(server) => match (empty, m.one_in(2)) {
            (true, true) => server.flush(),
            (true, false) => server.restart_empty(),
            (false, _) => server.restart(),
        },
    }
    if empty {
        m.jobs.values_mut().for_each(|k| *k = Known::default());
    }
    true
}
