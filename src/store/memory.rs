//! The store for tests: it serves one process, and its data ends with that process. It runs the reference rules
//! unchanged.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::broadcast;

use super::{
    Beat, Changed, Clock, Decision, Error, Fleet, Info, Notices, Output, Reply, Store, Tail,
    changed, fill, output::Extent, tidy,
};
use crate::{
    clock::{self, Boottime, StoreClock},
    logic::{
        belief,
        claim::{
            self, Answer, Claim, Control, Controlled, Effects, EpochBeat, Event, Register,
            Registration, Renew, Renewal, Settle, Settlement, State, StoredEpoch,
        },
        notify::lease::{self, Write, Written},
    },
    model::{InstanceId, JobName, Marks, RunId, RunRecord},
};

pub struct MemoryStore {
    data: Mutex<Data>,
    /// The time that the daemon believes the store's clock to show.
    believed: OnceLock<Arc<StoreClock>>,
    events: broadcast::Sender<Event>,
    changes: broadcast::Sender<Changed>,
}

struct Data {
    incarnation: Arc<str>,
    epoch: Option<StoredEpoch>,
    clock: Clock,
    /// Added to the clock, so that tests can move it.
    shift_us: i64,
    states: HashMap<JobName, State>,
    history: HashMap<JobName, VecDeque<RunRecord>>,
    decisions: HashMap<JobName, VecDeque<Decision>>,
    output: HashMap<RunId, (Extent, BTreeMap<u64, Vec<u8>>)>,
    instances: BTreeMap<InstanceId, Info>,
    drains: Vec<InstanceId>,
    drained_by: BTreeMap<InstanceId, String>,
    notices: Notices,
    /// The jobs that the request that is being served has changed.
    changed: Vec<JobName>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    pub fn new() -> Self {
        Self::new_with_clock(Arc::new(clock::wall_us))
    }

    /// `clock` is the store's clock, in Unix microseconds.
    pub fn new_with_clock(clock: Clock) -> Self {
        Self {
            data: Mutex::new(Data {
                incarnation: "memory-1".into(),
                // Nothing was lost before the first start.
                epoch: Some(StoredEpoch {
                    incarnation: "memory-1".to_owned(),
                    id: "memory-1".to_owned(),
                    born: 0,
                    quarantine: Duration::ZERO,
                    open: true,
                }),
                clock,
                shift_us: 0,
                states: HashMap::new(),
                history: HashMap::new(),
                decisions: HashMap::new(),
                output: HashMap::new(),
                instances: BTreeMap::new(),
                drains: vec![],
                drained_by: BTreeMap::new(),
                notices: Notices::default(),
                changed: vec![],
            }),
            believed: OnceLock::new(),
            events: broadcast::channel(4096).0,
            changes: broadcast::channel(super::CHANGES).0,
        }
    }

    /// Moves the store's clock.
    pub fn shift(&self, by: i64) {
        self.lock().shift_us += by * 1000;
    }

    /// Puts a state in place of what the store has of a job.
    pub fn put(&self, job: &JobName, state: State) {
        self.lock().states.insert(job.clone(), state);
    }

    /// Does what a restarted server does: a new incarnation, with the data it had, or without it (`empty`).
    pub fn restart(&self, empty: bool) {
        let mut d = self.lock();
        d.incarnation = format!("memory-{}", RunId::random()).into();
        if empty {
            d.states.clear();
            d.history.clear();
            d.decisions.clear();
            d.output.clear();
            d.instances.clear();
            d.drains.clear();
            d.drained_by.clear();
            d.notices = Notices::default();
            d.epoch = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Data> {
        // The mutex is not poisoned by a panic: the test whose data that leaves half changed has failed anyway.
        self.data.lock()
    }

    /// The time that the daemon believes instead of `now_us`, while the clock is in doubt.
    fn doubted_us(&self, now_us: i64) -> Option<i64> {
        let believed = self.believed.get()?.now_us()?;
        belief::in_doubt(believed.div_euclid(1000), now_us.div_euclid(1000)).then_some(believed)
    }
    fn in_doubt(&self) -> bool {
        let now_us = {
            let d = self.lock();
            (d.clock)() + d.shift_us
        };
        self.doubted_us(now_us).is_some()
    }

    fn reply<T>(&self, f: impl FnOnce(&mut Data, i64, &str, &mut Effects) -> T) -> Reply<T> {
        let sent = Boottime::now();
        let mut d = self.lock();
        let now_us = (d.clock)() + d.shift_us;
        let incarnation = d.incarnation.clone();
        let mut effects = Effects::default();
        let value = f(
            &mut d,
            self.doubted_us(now_us).unwrap_or(now_us),
            &incarnation,
            &mut effects,
        );
        for r in std::mem::take(&mut effects.records) {
            let h = d.history.entry(r.job.clone()).or_default();
            effects.put(r, h);
            h.truncate(super::HISTORY_KEPT);
        }
        let changed = std::mem::take(&mut d.changed);
        drop(d);
        for e in effects.events {
            let _ = self.events.send(e);
        }
        if !changed.is_empty() {
            let _ = self.changes.send(Changed::Jobs(changed.into()));
        }
        Reply {
            value,
            now_us,
            incarnation,
            sent,
            received: Boottime::now(),
        }
    }
}

/// Runs `f` on the state of `job`, at `now_us`, and keeps the state that `f` leaves.
fn with<T>(d: &mut Data, job: &JobName, f: impl FnOnce(&mut Option<State>) -> T) -> T {
    let mut state = d.states.remove(job);
    let before = state.clone();
    let out = f(&mut state);
    if changed(before.as_ref(), state.as_ref()) {
        d.changed.push(job.clone());
    }
    if let Some(s) = state {
        d.states.insert(job.clone(), s);
    }
    out
}

#[async_trait]
impl Store for MemoryStore {
    fn address(&self) -> &str {
        "memory:"
    }
    fn durable(&self) -> bool {
        false
    }
    fn believe(&self, clock: Arc<StoreClock>) {
        let _ = self.believed.set(clock);
    }
    async fn claim(&self, claims: &[Claim]) -> Result<Reply<Vec<Answer>>, Error> {
        if self.in_doubt() {
            return Ok(self.reply(|_, _, _, _| claims.iter().map(|_| Answer::InDoubt).collect()));
        }
        Ok(self.reply(|d, now, incarnation, effects| {
            claims
                .iter()
                .map(|c| {
                    with(d, &c.job, |st| {
                        claim::claim(st, c, now, incarnation, effects)
                    })
                })
                .collect()
        }))
    }
    async fn renew(&self, r: &Renew) -> Result<Reply<Renewal>, Error> {
        Ok(self.reply(|d, now, incarnation, _| {
            with(d, &r.job, |st| claim::renew(st, r, now, incarnation))
        }))
    }
    async fn settle(&self, s: &Settle, output: &Tail) -> Result<Reply<Settlement>, Error> {
        Ok(self.reply(|d, now, incarnation, effects| {
            let out = with(d, &s.record.job, |st| {
                claim::settle(st, s, now, incarnation, effects)
            });
            // If the rule recorded nothing, this settlement was made before.
            if !effects.records.is_empty() {
                d.changed.push(s.record.job.clone());
                let (was, mut pieces) = match d.output.remove(&s.run) {
                    Some((was, pieces)) => (Some(was), pieces),
                    None => (None, BTreeMap::new()),
                };
                let Ok(extent) = Extent::settle(was, &mut pieces, output, now.div_euclid(1000));
                if let Some(extent) = extent {
                    d.output.insert(s.run, (extent, pieces));
                }
            }
            out
        }))
    }
    async fn register(
        &self,
        jobs: &[Register],
    ) -> Result<Reply<Vec<(Registration, Option<State>)>>, Error> {
        if self.in_doubt() {
            let none = |_: &Register| (Registration::Quarantined, None);
            return Ok(self.reply(|_, _, _, _| jobs.iter().map(none).collect()));
        }
        Ok(self.reply(|d, now, incarnation, effects| {
            jobs.iter()
                .map(|r| {
                    with(d, &r.job, |st| {
                        (
                            claim::register(st, r, now, incarnation, effects),
                            st.clone(),
                        )
                    })
                })
                .collect()
        }))
    }
    async fn control(&self, job: &JobName, what: &Control) -> Result<Reply<Controlled>, Error> {
        Ok(self.reply(|d, now, _, effects| {
            with(d, job, |st| claim::control(st, job, what, now, effects))
        }))
    }
    async fn jobs(&self) -> Result<Vec<JobName>, Error> {
        Ok(self.lock().states.keys().cloned().collect())
    }
    async fn observe(&self, jobs: &[JobName]) -> Result<Reply<Vec<Option<State>>>, Error> {
        Ok(self.reply(|d, _, _, _| jobs.iter().map(|j| d.states.get(j).cloned()).collect()))
    }
    async fn heartbeat(&self, beat: Option<&Beat>) -> Result<Reply<Fleet>, Error> {
        let believed = self.believed.get().and_then(|clock| clock.now_ms());
        Ok(self.reply(|d, now, incarnation, _| {
            let before = beat.and_then(|b| d.instances.get(&b.instance).cloned());
            let now = now.div_euclid(1000);
            let of_epoch = beat.map(|b| EpochBeat {
                quarantine: b.quarantine,
                vouched: b.open.as_ref().map(|(of, id)| (&**of, &**id)),
            });
            let fresh = || RunId::random().to_string();
            let times = (now, believed);
            let epoch = claim::heartbeat(&mut d.epoch, of_epoch, times, incarnation, fresh).clone();
            if let Some(b) = beat {
                let info = Info {
                    seen: now,
                    ..b.info.clone()
                };
                d.instances.insert(b.instance.clone(), info);
            }
            Fleet {
                id: epoch.id.into(),
                before,
                born: epoch.born,
                quarantine: epoch.quarantine,
                open: epoch.open,
                instances: d.instances.clone(),
                drains: d.drains.clone(),
                drained_by: d.drained_by.clone(),
            }
        }))
    }
    async fn leave(&self, instance: &InstanceId, process: u32) -> Result<(), Error> {
        let mut d = self.lock();
        if d.instances
            .get(instance)
            .is_some_and(|i| i.process == process)
        {
            d.instances.remove(instance);
            d.drains.retain(|i| i != instance);
            d.drained_by.remove(instance);
        }
        Ok(())
    }
    async fn drain(&self, instance: &InstanceId, on: bool, by: &str) -> Result<(), Error> {
        self.reply(|d, _, _, effects| {
            d.drains.retain(|i| i != instance);
            d.drained_by.insert(instance.clone(), by.to_owned());
            if on {
                d.drains.push(instance.clone());
            }
            effects.events.push(Event::Drain);
        });
        Ok(())
    }
    async fn notices(&self, all: bool) -> Result<Reply<Notices>, Error> {
        Ok(self.reply(|d, _, _, _| Notices {
            lease: d.notices.lease.clone(),
            notes: match all {
                true => d.notices.notes.clone(),
                false => {
                    let note = d.notices.notes.get_key_value(lease::GIVEN_UP);
                    note.map(|(k, v)| (k.clone(), v.clone()))
                        .into_iter()
                        .collect()
                }
            },
        }))
    }
    async fn note(&self, write: &Write) -> Result<Reply<Written>, Error> {
        Ok(self.reply(|d, _, _, _| {
            let notices = &mut d.notices;
            if !lease::allows(notices.lease.as_deref(), write) {
                return Written::Not(notices.lease.clone());
            }
            notices.notes.extend(write.set.iter().cloned());
            notices.notes.retain(|name, _| !write.remove.contains(name));
            notices.lease = Some(write.lease.clone());
            Written::Done
        }))
    }
    async fn journal(&self, decisions: &[Decision]) -> Result<(), Error> {
        let mut d = self.lock();
        for x in decisions {
            let list = d.decisions.entry(x.job.clone()).or_default();
            list.push_front(x.clone());
            list.truncate(super::DECISIONS_KEPT);
        }
        Ok(())
    }
    async fn decisions(&self, job: &JobName) -> Result<Vec<Decision>, Error> {
        Ok(self
            .lock()
            .decisions
            .get(job)
            .map(|d| d.iter().cloned().collect())
            .unwrap_or_default())
    }
    async fn history(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        let mut records = self.records(job, n).await?;
        fill(self, &mut records).await?;
        Ok(records)
    }
    async fn records(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        let d = self.lock();
        let records = d.history.get(job).map(|h| h.iter().cloned().collect());
        Ok(tidy(records.unwrap_or_default(), n))
    }
    async fn append_output(
        &self,
        _: &JobName,
        run: RunId,
        at: u64,
        data: &[u8],
        keep: usize,
        stderr: &Marks,
    ) -> Result<(), Error> {
        let mut d = self.lock();
        let nothing = || (Extent::from(at), BTreeMap::new());
        let (extent, pieces) = d.output.entry(run).or_insert_with(nothing);
        let Ok(()) = extent.add(pieces, at, data, keep as u64, stderr);
        Ok(())
    }
    async fn output(&self, _: &JobName, run: RunId, from: u64) -> Result<Option<Output>, Error> {
        let d = self.lock();
        let now = ((d.clock)() + d.shift_us).div_euclid(1000);
        Ok(d.output.get(&run).map(|(extent, pieces)| {
            let Ok(some) = extent.read(pieces, from, now);
            some
        }))
    }
    fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }
    fn changes(&self) -> broadcast::Receiver<Changed> {
        self.changes.subscribe()
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}
