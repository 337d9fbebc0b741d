//! The board: what the fleet's jobs are doing, in memory. Every read is answered from it, so that readers cost the
//! store nothing. One task keeps it: it looks at the jobs of which the store says that they changed, and at all of them
//! now and then, because hints may be lost. What it finds changed becomes events, see `events`.

mod diff;
mod fleet;
mod recent;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
    time::Duration,
};

use parking_lot::RwLock;
use serde::Serialize;
use tokio::{
    sync::{
        broadcast::{self, error::RecvError},
        watch,
    },
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use self::{diff::Told, recent::Recents};
use super::events::{Feed, Kind, Ring};
use crate::{
    clock::{Boottime, wall_us},
    config::{self, Config},
    health::Pulse,
    logic::{
        claim::{State, Triggered},
        coming::Coming,
        judge,
        median::median,
        notify::{GivenUp, lease},
    },
    model::{InstanceId, JobName, Occurrence, Outcome, RunId, RunRecord, Trigger},
    store::{self, Asking, Changed},
    view::{self, Clock, EpochView, InstanceView, JobView, LastView, Time},
};

/// How many ended runs of each job the board has.
pub(super) const RECENT: usize = judge::RECORDS;
/// How many records are read first when a job has changed: most often one is new.
const FIRST_RECORDS: usize = 3;
/// The time between two looks at all jobs.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// With more jobs, each look takes in so many of them.
const LOOK_AT: usize = 2000;
/// The time between two looks for jobs that only other instances have.
const LOOK_ELSEWHERE: Duration = Duration::from_secs(10);
/// How many jobs are looked at together: what is found of them is shown at once. The answer of the store takes several
/// times what is kept of it, at each look, and the heap keeps that much.
const LOOK_AT_ONCE: usize = 40;
/// Of how many jobs records are read together, for the same reason.
const READ_AT_ONCE: usize = 16;
/// The most names of instances that all jobs share.
const NAMES: usize = 256;
/// The pause after the store did not answer.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// The instances are shown anew this often, even if only their clocks moved on.
const INSTANCES_AGAIN: Duration = Duration::from_secs(5);
/// What a planned instant changes is shown so much later: by then its grant has most likely been seen.
const AFTER_INSTANT_MS: i64 = 300;

/// An ended run, or an occurrence that did not run, as a mark in a strip.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub(super) struct Recent {
    pub(super) run_id: Option<RunId>,
    pub(super) occurrence: Time,
    pub(super) attempt: u32,
    pub(super) trigger: Trigger,
    pub(super) outcome: Outcome,
    pub(super) exit_code: Option<i32>,
    pub(super) started_at: Option<Time>,
    pub(super) duration_ms: Option<i64>,
    /// Not written: mostly it is the start and the duration.
    #[serde(skip)]
    pub(super) finished_at: Option<Time>,
    pub(super) lateness_ms: Option<i64>,
    pub(super) instance: Option<InstanceId>,
    /// How many occurrences without a run it stands for. Written only if it is not 1.
    #[serde(skip_serializing_if = "is_one")]
    pub(super) count: u64,
}

fn is_one(n: &u64) -> bool {
    *n == 1
}

impl From<RunRecord> for Recent {
    fn from(r: RunRecord) -> Self {
        Self {
            run_id: r.run_id,
            occurrence: r.occurrence.into(),
            attempt: r.attempt,
            trigger: r.trigger,
            outcome: r.outcome,
            exit_code: r.exit_code,
            started_at: r.started_at.map(Time),
            duration_ms: r.duration_ms,
            finished_at: r.finished_at.map(Time),
            lateness_ms: r.lateness_ms,
            instance: r.instance,
            count: r.count,
        }
    }
}

impl Recent {
    /// When it ended if its command was started: the start and the duration.
    fn usual_end(&self) -> Option<Time> {
        let (started, took) = self.started_at.zip(self.duration_ms)?;
        Some(Time(started.0.saturating_add(took)))
    }
}

impl view::Attempt for Recent {
    fn at(&self) -> (Time, u32) {
        (self.occurrence, self.attempt)
    }
    fn trigger(&self) -> Trigger {
        self.trigger
    }
    fn started(&self) -> Option<Time> {
        self.started_at
    }
    fn ended(&self) -> Option<Time> {
        self.finished_at
    }
    fn set_lateness(&mut self, ms: Option<i64>) {
        self.lateness_ms = ms;
    }
}

/// A job as the page shows it in a line.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub(super) struct Job {
    #[serde(flatten)]
    pub(super) view: JobView,
    /// Other instances have it, and the configuration of this one lacks it: its schedule is not known here.
    pub(super) elsewhere: bool,
    /// The last ended runs, newest first.
    #[schema(value_type = Vec<Recent>)]
    pub(super) recent: Recents,
    /// The median duration of the recent runs that succeeded.
    pub(super) typical_ms: Option<i64>,
    /// The median lateness of the recent runs.
    pub(super) late_typical_ms: Option<i64>,
}

/// As [`Job`], with fewer of its runs.
#[derive(Serialize)]
pub(super) struct Shortened<'a> {
    #[serde(flatten)]
    view: &'a JobView,
    elsewhere: bool,
    recent: Vec<Recent>,
    typical_ms: Option<i64>,
    late_typical_ms: Option<i64>,
}

impl Job {
    /// With the last `runs` of its runs.
    pub(super) fn with_runs(&self, runs: usize) -> Shortened<'_> {
        Shortened {
            view: &self.view,
            elsewhere: self.elsewhere,
            recent: self.recent.iter().take(runs).collect(),
            typical_ms: self.typical_ms,
            late_typical_ms: self.late_typical_ms,
        }
    }
}

/// All jobs. The instances are at `/api/v1/instances`.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Jobs<'a> {
    pub(super) now: Time,
    /// The store's address, without secrets.
    pub(super) store: &'a str,
    pub(super) namespace: &'a str,
    /// What is wrong with the store, in words, as its server shows it.
    pub(super) problems: &'a [String],
    pub(super) clock_doubt_ms: Option<i64>,
    pub(super) nobody_believes: bool,
    pub(super) epoch: Option<EpochView>,
    /// Digest of this instance's configuration.
    pub(super) config: &'a str,
    /// Why the store does not answer this instance; then everything else is as it was at `as_of`.
    pub(super) store_error: Option<String>,
    /// When this instance last saw the jobs in the store; null: not yet.
    pub(super) as_of: Option<Time>,
    /// The newest event that this answer includes.
    pub(super) cursor: String,
    /// Written one by one, after the rest.
    #[schema(value_type = Vec<Job>)]
    pub(super) jobs: [(); 0],
}

/// The instances of the fleet, and the store as this instance sees it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Instances {
    pub(super) now: Time,
    /// What is wrong with the store, in words, as its server shows it.
    pub(super) problems: Vec<String>,
    pub(super) clock_doubt_ms: Option<i64>,
    pub(super) nobody_believes: bool,
    pub(super) epoch: Option<EpochView>,
    /// Digest of the configuration of the instance that answers.
    pub(super) config: String,
    pub(super) instances: Vec<InstanceView>,
    pub(super) store: StoreView,
}

/// The store as the answering instance sees it.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub(super) struct StoreView {
    /// Without secrets.
    pub(super) address: String,
    pub(super) reachable: bool,
    /// How long the last heartbeat took; null: there was none yet.
    pub(super) latency_ms: Option<f64>,
    pub(super) error: Option<String>,
    /// Since when the store does not answer.
    pub(super) since: Option<Time>,
}

pub(super) struct Board {
    inner: RwLock<Inner>,
    /// The number of the newest event.
    latest: watch::Sender<u64>,
}

pub(super) struct Inner {
    pub(super) config: Arc<Config>,
    own: InstanceId,
    address: String,
    /// In boxes, because nearly half of the places in a tree that is filled in order stay empty.
    jobs: BTreeMap<JobName, Box<Entry>>,
    /// When to look at jobs again, Unix ms of the store's clock.
    due: BTreeSet<(i64, JobName)>,
    pub(super) ring: Ring,
    pulse: Pulse,
    /// As they were last shown.
    instances: Vec<InstanceView>,
    /// See [`view::others_differ`].
    others_differ: bool,
    shown: Option<Boottime>,
    /// When jobs were last observed, Unix ms of the store's clock.
    as_of: Option<i64>,
    /// Why the last look at the jobs failed.
    failed: Option<String>,
    incarnation: Arc<str>,
    names: BTreeSet<InstanceId>,
    /// The messages that were given up, by their ids, as the fleet remembers them.
    given_up: BTreeSet<String>,
}

struct Entry {
    /// None: only other instances have it.
    definition: Option<Arc<config::Job>>,
    /// Without the keys of decided triggers, which may be many.
    state: Option<State>,
    /// The newest of these.
    triggered: Option<Box<Triggered>>,
    unreadable: Option<String>,
    /// Its state and its records were read.
    known: bool,
    told: Told,
    /// When a run last succeeded, as far as the board has seen.
    last_success: Option<i64>,
    job: Job,
    /// The incarnation of the store that its state is from.
    incarnation: Arc<str>,
    /// As of [`Inner`].
    others_differ: bool,
    due: Option<i64>,
}

/// Why jobs are looked at.
#[derive(Clone, Copy, PartialEq)]
enum Look {
    /// The store said that they changed, or may have. It may be their records alone: the settlement of a run that the
    /// store had lost changes no state.
    Changed,
    /// It is their turn.
    Turn,
}

/// What was found of one job.
struct Found {
    name: JobName,
    state: Result<Option<State>, String>,
    /// None: they cannot have changed, or cannot be read.
    records: Option<Records>,
}

enum Records {
    /// The newest ones; those before are known.
    Newest(Vec<Recent>),
    All(Vec<Recent>),
}

impl Board {
    /// `own`: the instance that it belongs to, which has just been started.
    pub(super) fn new(config: Arc<Config>, address: &str, own: InstanceId) -> Self {
        let board = Self {
            inner: RwLock::new(Inner {
                config: config.clone(),
                own,
                address: address.to_owned(),
                jobs: BTreeMap::new(),
                due: BTreeSet::new(),
                ring: Ring::new(),
                pulse: Pulse::default(),
                instances: vec![],
                others_differ: false,
                shown: None,
                as_of: None,
                failed: None,
                incarnation: "".into(),
                names: BTreeSet::new(),
                given_up: BTreeSet::new(),
            }),
            latest: watch::Sender::new(0),
        };
        board.inner.write().configure(&config);
        board
    }

    /// The state at one moment. Writers wait as long as the guard lives.
    pub(super) fn read(&self) -> parking_lot::RwLockReadGuard<'_, Inner> {
        self.inner.read()
    }

    /// Tells the number of the newest event.
    pub(super) fn latest(&self) -> watch::Receiver<u64> {
        self.latest.subscribe()
    }

    fn change<T>(&self, f: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = self.inner.write();
        let out = f(&mut inner);
        let seq = inner.ring.latest();
        drop(inner);
        self.latest.send_if_modified(|known| {
            let newer = *known != seq;
            *known = seq;
            newer
        });
        out
    }

    /// Keeps the board until `finish`. The store is asked by tasks of the daemon's runtime.
    // Long: a loop of one look after the other, and one arm for each thing that wakes it.
    pub(super) async fn keep(
        &self,
        store: Asking,
        mut changes: broadcast::Receiver<Changed>,
        mut pulse: watch::Receiver<Pulse>,
        mut config: watch::Receiver<Arc<Config>>,
        finish: CancellationToken,
    ) {
        let mut hinted = true;
        // At which jobs to look: those that have changed go first.
        let (mut changed, mut others) = (BTreeSet::new(), BTreeSet::new());
        let mut round = Round::default();
        let mut next_round = Instant::now();
        let mut look_elsewhere = next_round;
        let mut not_before = next_round;
        loop {
            let now = Instant::now();
            if now >= look_elsewhere {
                let looked = self.look_elsewhere(&store);
                if let Some(new) = finish.run_until_cancelled(looked).await {
                    changed.extend(new);
                }
                look_elsewhere = now + LOOK_ELSEWHERE;
            }
            if now >= next_round {
                others.extend(round.next(&self.read().jobs));
                next_round = now + LOOK_AGAIN;
                finish
                    .run_until_cancelled(self.look_at_given_up(&store))
                    .await;
            }
            if now >= not_before {
                let (some, look) = match changed.is_empty() {
                    true => (&mut others, Look::Turn),
                    false => (&mut changed, Look::Changed),
                };
                let names: Vec<JobName> = some.iter().take(LOOK_AT_ONCE).cloned().collect();
                if !names.is_empty() {
                    match finish
                        .run_until_cancelled(self.look(&store, names.clone(), look))
                        .await
                    {
                        None => return,
                        Some(Ok(())) => some.retain(|name| !names.contains(name)),
                        Some(Err(e)) => {
                            debug!(error = %e, "cannot look at the jobs");
                            self.change(|inner| inner.failed = Some(e.to_string()));
                            not_before = now + AFTER_FAILURE;
                        }
                    }
                }
            }
            let wake = match changed.is_empty() && others.is_empty() {
                true => next_round,
                false => not_before,
            };
            let due = self.read().next_due();
            let due = async {
                match due {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = finish.cancelled() => return,
                change = changes.recv(), if hinted => match change {
                    Ok(Changed::Jobs(names)) => {
                        changed.extend(names.iter().cloned());
                        // What else has come meanwhile is looked at together.
                        while let Ok(Changed::Jobs(names)) = changes.try_recv() {
                            changed.extend(names.iter().cloned());
                        }
                    }
                    Ok(Changed::Any) | Err(RecvError::Lagged(_)) => {
                        changed.extend(self.read().jobs.keys().cloned());
                    }
                    Err(RecvError::Closed) => hinted = false,
                },
                seen = pulse.changed() => {
                    // The daemon is gone.
                    let Ok(()) = seen else { return };
                    let pulse = pulse.borrow_and_update().clone();
                    self.change(|inner| inner.beats(pulse));
                }
                seen = config.changed() => {
                    let Ok(()) = seen else { return };
                    let config = config.borrow_and_update().clone();
                    self.change(|inner| inner.reloaded(config));
                    next_round = now;
                }
                () = due => changed.extend(self.change(Inner::time_passes)),
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    /// Looks at some jobs, and takes in what it finds.
    async fn look(
        &self,
        store: &Asking,
        mut names: Vec<JobName>,
        look: Look,
    ) -> Result<(), store::Error> {
        {
            let inner = self.read();
            names.retain(|name| inner.jobs.contains_key(name));
        }
        let reply = store.states(names.clone()).await?;
        let states = reply
            .value
            .into_iter()
            .map(|state| state.map_err(|e| e.to_string()));
        let (mut newest, mut all) = (vec![], vec![]);
        let mut found: Vec<Found> = vec![];
        {
            let inner = self.read();
            for (name, state) in names.into_iter().zip(states) {
                match (inner.jobs.get(&name), &state) {
                    (Some(e), Ok(Some(_))) if !e.known => all.push((found.len(), name.clone())),
                    (Some(e), Ok(Some(st)))
                        if look == Look::Changed
                            || diff::may_have_records(e.state.as_ref(), st) =>
                    {
                        newest.push((found.len(), name.clone()));
                    }
                    _ => {}
                }
                found.push(Found {
                    name,
                    state,
                    records: None,
                });
            }
        }
        for (at, records) in self.records(store, newest, FIRST_RECORDS).await? {
            let name = found[at].name.clone();
            match self.goes_on(&name, &records) {
                true => found[at].records = Some(Records::Newest(records)),
                false => all.push((at, name)),
            }
        }
        for (at, records) in self.records(store, all, RECENT).await? {
            found[at].records = Some(Records::All(records));
        }
        self.change(|inner| inner.take(found, reply.now_us.div_euclid(1000), reply.incarnation));
        Ok(())
    }

    /// Shows the jobs that only other instances have, so that each instance shows the same list. Returns the new ones.
    async fn look_elsewhere(&self, store: &Asking) -> Vec<JobName> {
        let config = self.read().config.clone();
        let seen = match fleet::elsewhere(store, &config).await {
            Ok(seen) => seen,
            Err(e) => {
                debug!(error = %e, "cannot look for jobs of other instances");
                return vec![];
            }
        };
        let is_shown = {
            let inner = self.read();
            let shown = inner.jobs.iter().filter(|(_, e)| e.job.elsewhere);
            shown.map(|(name, _)| name).eq(&seen)
        };
        match is_shown {
            true => vec![],
            false => self.change(|inner| inner.elsewhere(seen)),
        }
    }

    /// Shows the messages that nobody got.
    async fn look_at_given_up(&self, store: &Asking) {
        if self.read().config.channels.is_empty() {
            return;
        }
        let Ok(reply) = store.ask(|s| async move { s.notices(false).await }).await else {
            return;
        };
        let note = reply.value.notes.get(lease::GIVEN_UP);
        let all: Vec<GivenUp> = note
            .and_then(|note| serde_json::from_str(note).ok())
            .unwrap_or_default();
        if all.iter().any(|g| !self.read().given_up.contains(&g.id)) {
            self.change(|inner| inner.given_up(&all));
        }
    }

    /// The newest `n` records of each of these jobs, with their places.
    async fn records(
        &self,
        store: &Asking,
        jobs: Vec<(usize, JobName)>,
        n: usize,
    ) -> Result<Vec<(usize, Vec<Recent>)>, store::Error> {
        let mut all = vec![];
        for some in jobs.chunks(READ_AT_ONCE) {
            let (places, names): (Vec<usize>, Vec<JobName>) = some.iter().cloned().unzip();
            let read = store.records(names, n).await?;
            let mut inner = self.inner.write();
            for (of, records) in read {
                let mut records: Vec<Recent> = records.into_iter().map(Recent::from).collect();
                for instance in records.iter_mut().filter_map(|r| r.instance.as_mut()) {
                    inner.share(instance);
                }
                all.push((places[of], records));
            }
        }
        Ok(all)
    }

    /// What was before these newest records is known.
    fn goes_on(&self, name: &JobName, newest: &[Recent]) -> bool {
        let inner = self.read();
        inner.jobs.get(name).is_some_and(|e| {
            let known = |last: &Recent| {
                let mut recent = e.job.recent.iter();
                recent.any(|r| diff::same_run(&r, last) && r.outcome == last.outcome)
            };
            newest.len() < FIRST_RECORDS || newest.last().is_some_and(known)
        })
    }
}

/// The looks at all jobs, some at a time.
#[derive(Default)]
struct Round {
    after: Option<JobName>,
}

impl Round {
    fn next(&mut self, jobs: &BTreeMap<JobName, Box<Entry>>) -> Vec<JobName> {
        let from = self.after.as_ref().map_or(Unbounded, Excluded);
        let some = jobs.range::<JobName, _>((from, Unbounded)).take(LOOK_AT);
        let mut some: Vec<JobName> = some.map(|(name, _)| name.clone()).collect();
        if some.len() < LOOK_AT {
            let rest = LOOK_AT.min(jobs.len()) - some.len();
            some.extend(jobs.keys().take(rest).cloned());
        }
        self.after = some.last().cloned();
        some
    }
}

impl Inner {
    /// The name of an instance takes memory once, and not in each job that the instance has run.
    fn share(&mut self, name: &mut InstanceId) {
        if let Some(known) = self.names.get(name) {
            *name = known.clone();
            return;
        }
        if self.names.len() >= NAMES {
            self.names.clear();
        }
        self.names.insert(name.clone());
    }

    /// The time that the fleet uses. While the store is away, that which it used then and what has passed since.
    pub(super) fn clock(&self) -> Clock {
        match &self.pulse.fleet {
            Some(reply) => {
                let passed = Boottime::now().since(reply.received).as_millis() as i64;
                Clock::of(
                    &reply.value,
                    reply.now_us.div_euclid(1000).saturating_add(passed),
                )
            }
            None => Clock {
                now: wall_us().div_euclid(1000),
                doubt_ms: None,
                nobody_believes: false,
            },
        }
    }

    pub(super) fn job(&self, name: &JobName) -> Option<&Job> {
        self.jobs.get(name).map(|e| &e.job)
    }

    /// What this instance's configuration says of a job. None: only other instances have it.
    pub(super) fn definition(&self, name: &JobName) -> Option<Arc<config::Job>> {
        self.jobs.get(name)?.definition.clone()
    }

    /// What comes next of a job.
    pub(super) fn coming(&self, name: &JobName) -> Option<Coming> {
        let e = self.jobs.get(name)?;
        Some(Coming::of(
            e.definition.as_deref()?,
            e.state.as_ref(),
            self.clock().now,
        ))
    }

    pub(super) fn last_successes(&self) -> impl Iterator<Item = (&JobName, i64)> {
        self.jobs
            .iter()
            .filter_map(|(name, e)| Some((name, e.last_success?)))
    }

    pub(super) fn each(&self) -> impl Iterator<Item = &Job> + Clone {
        self.jobs.values().map(|e| &e.job)
    }

    pub(super) fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// The jobs after this one, or all, in the order of their names.
    pub(super) fn after(&self, name: Option<&JobName>) -> impl Iterator<Item = &Job> {
        let from = name.map_or(Unbounded, Excluded);
        let jobs = self.jobs.range::<JobName, _>((from, Unbounded));
        jobs.map(|(_, e)| &e.job)
    }

    /// What is said of all jobs together.
    pub(super) fn without_jobs(&self) -> Jobs<'_> {
        let clock = self.clock();
        Jobs {
            now: Time(clock.now),
            store: &self.address,
            namespace: &self.config.store.namespace,
            problems: &self.pulse.problems,
            clock_doubt_ms: clock.doubt_ms,
            nobody_believes: clock.nobody_believes,
            epoch: self.epoch(clock),
            config: &self.config.digest,
            store_error: self.store_error(),
            as_of: self.as_of.map(Time),
            cursor: self.ring.cursor(),
            jobs: [],
        }
    }

    fn store_error(&self) -> Option<String> {
        let away = self.pulse.away.as_ref().map(|away| away.why.to_string());
        away.or_else(|| self.failed.clone())
    }

    fn epoch(&self, clock: Clock) -> Option<EpochView> {
        let fleet = self.pulse.fleet.as_ref()?;
        Some(view::epoch(&fleet.value, clock.now))
    }

    pub(super) fn instances(&self) -> Instances {
        let clock = self.clock();
        Instances {
            now: Time(clock.now),
            problems: self.pulse.problems.to_vec(),
            clock_doubt_ms: clock.doubt_ms,
            nobody_believes: clock.nobody_believes,
            epoch: self.epoch(clock),
            config: self.config.digest.clone(),
            instances: self.instance_views(clock),
            store: self.store(clock),
        }
    }

    fn instance_views(&self, mut clock: Clock) -> Vec<InstanceView> {
        let Some(reply) = &self.pulse.fleet else {
            return vec![];
        };
        // Nobody can report while the store is away: the others are as they were then.
        if self.pulse.away.is_some() {
            clock = Clock::of(&reply.value, reply.now_us.div_euclid(1000));
        }
        let state = |job: &JobName| self.jobs.get(job)?.state.as_ref();
        let mut views = view::instances(&reply.value, &self.config.digest, clock, state);
        // In new data an instance is missing until its next heartbeat: so long it is as it was.
        let age = reply.now_us.div_euclid(1000) - reply.value.born;
        if age < store::LIVE_WITHIN_MS {
            let had = |i: &&InstanceView| reply.value.instances.contains_key(&i.instance);
            views.extend(self.instances.iter().filter(|i| !had(i)).cloned());
            views.sort_by(|a, b| a.instance.cmp(&b.instance));
        }
        views
    }

    pub(super) fn store(&self, clock: Clock) -> StoreView {
        let away = self.pulse.away.as_ref();
        let ago = |at: &Boottime| Boottime::now().since(*at).as_millis() as i64;
        StoreView {
            address: self.address.clone(),
            reachable: self.pulse.fleet.is_some() && away.is_none(),
            latency_ms: self
                .pulse
                .fleet
                .as_ref()
                .map(|_| self.pulse.latency.as_secs_f64() * 1000.0),
            error: self.store_error(),
            since: away.map(|away| Time(clock.now - ago(&away.since))),
        }
    }

    /// The length of time until [`Inner::time_passes`] is to be called.
    fn next_due(&self) -> Option<Duration> {
        let (at, _) = self.due.first()?;
        let wait = at.saturating_sub(self.clock().now).clamp(1, 60_000);
        Some(Duration::from_millis(wait as u64))
    }

    /// Shows what the time has changed. Returns the jobs at which to look in the store.
    fn time_passes(&mut self) -> Vec<JobName> {
        let now = self.clock().now;
        let incarnation = self.incarnation.clone();
        let mut look = vec![];
        while let Some((at, _)) = self.due.first()
            && *at <= now
            && let Some((_, name)) = self.due.pop_first()
        {
            let Some(e) = self.jobs.get_mut(&name) else {
                continue;
            };
            e.due = None;
            if e.state
                .as_ref()
                .is_some_and(|st| diff::may_have_lapsed(st, now))
            {
                look.push(name.clone());
            }
            let before = e.show(now, &incarnation, false);
            let changed = e.job.view != before;
            // Not again before the store was looked at.
            e.due = e.due.map(|at| at.max(now + 250));
            if let Some(at) = e.due {
                self.due.insert((at, name.clone()));
            }
            if changed {
                self.ring.push(now, Kind::Job(name));
            }
        }
        look
    }

    /// Shows these jobs of other instances, and no others.
    fn elsewhere(&mut self, seen: BTreeSet<JobName>) -> Vec<JobName> {
        let now = self.clock().now;
        let shown = self.jobs.iter().filter(|(_, e)| e.job.elsewhere);
        let gone = shown.filter(|(name, _)| !seen.contains(*name));
        let gone: Vec<JobName> = gone.map(|(name, _)| name.clone()).collect();
        for name in gone {
            let removed = self.jobs.remove(&name);
            if let Some(at) = removed.and_then(|e| e.due) {
                self.due.remove(&(at, name.clone()));
            }
            self.ring.push(now, Kind::Removed(name));
        }
        let mut new = vec![];
        for name in seen {
            if self.jobs.contains_key(&name) {
                continue;
            }
            let entry = Entry::new(&name, None, now);
            self.jobs.insert(name.clone(), Box::new(entry));
            new.push(name);
        }
        new
    }

    /// Another configuration is in force.
    fn reloaded(&mut self, config: Arc<Config>) {
        let now = self.clock().now;
        let had = self.jobs.iter().filter(|(_, e)| !e.job.elsewhere);
        let gone = had.filter(|(name, _)| !config.jobs.contains_key(*name));
        let gone: Vec<JobName> = gone.map(|(name, _)| name.clone()).collect();
        let changed: Vec<JobName> = config
            .jobs
            .values()
            .filter(|job| {
                let known = self.jobs.get(&job.name);
                let known = known.and_then(|e| e.definition.as_ref());
                known.is_none_or(|known| !Arc::ptr_eq(known, job))
            })
            .map(|job| job.name.clone())
            .collect();
        self.configure(&config);
        for name in gone {
            self.ring.push(now, Kind::Removed(name));
        }
        for name in changed {
            self.ring.push(now, Kind::Job(name));
        }
        self.config = config;
    }

    fn configure(&mut self, config: &Config) {
        let now = self.clock().now;
        let incarnation = self.incarnation.clone();
        let due = &mut self.due;
        self.jobs.retain(|name, e| {
            let stays = e.job.elsewhere || config.jobs.contains_key(name);
            if !stays && let Some(at) = e.due {
                due.remove(&(at, name.clone()));
            }
            stays
        });
        for (name, job) in &config.jobs {
            let e = self
                .jobs
                .entry(name.clone())
                .or_insert_with(|| Box::new(Entry::new(name, Some(job), now)));
            e.definition = Some(job.clone());
            e.others_differ = self.others_differ;
            e.job.elsewhere = false;
            if let Some(at) = e.due.take() {
                self.due.remove(&(at, name.clone()));
            }
            e.show(now, &incarnation, false);
            if let Some(at) = e.due {
                self.due.insert((at, name.clone()));
            }
        }
    }

    /// Takes in what a heartbeat found.
    fn beats(&mut self, pulse: Pulse) {
        let away = |p: &Pulse| p.away.as_ref().map(|away| away.why.clone());
        let (before, after) = (away(&self.pulse), away(&pulse));
        let grants = |p: &Pulse| {
            let fleet = &p.fleet.as_ref()?.value;
            Some((fleet.id.clone(), fleet.open))
        };
        let (had, has) = (grants(&self.pulse), grants(&pulse));
        let another = had != has;
        let first = self.pulse.fleet.is_none() && pulse.fleet.is_some();
        let answered = self.pulse.fleet.as_ref();
        let answered = answered.map_or(0, |reply| reply.now_us.div_euclid(1000));
        self.pulse = pulse;
        let clock = self.clock();
        let now = clock.now;
        if before.is_some() && after.is_none() {
            // The looks at the jobs failed for the same reason; the next one is under way.
            self.failed = None;
        }
        if before != after || first {
            let store = self.store(clock);
            self.ring.push(now, Kind::Store(Box::new(store)));
        }
        let other_data = had.zip(has).is_some_and(|(had, has)| had.0 != has.0);
        if let Some(epoch) = self.epoch(clock).filter(|_| other_data) {
            let opens = |wait| Time(now.saturating_add(wait));
            let feed = Feed {
                // A server that the store fails back to may have had its data for long.
                since: Some(Time(epoch.since.0.max(answered).min(now))),
                until: epoch.wait_ms.map(opens),
                ..Feed::default()
            };
            self.ring.push(now, Kind::Feed("data_lost", Box::new(feed)));
        }
        let views = self.instance_views(clock);
        if first {
            // The others were there before.
            let others = views.iter().filter(|i| i.instance != self.own);
            self.instances = others.cloned().collect();
        }
        let feed = diff::instances(&self.instances, &views);
        let moved = another || diff::instances_differ(&self.instances, &views);
        for (kind, feed) in feed {
            self.ring.push(now, Kind::Feed(kind, Box::new(feed)));
        }
        let moment = Boottime::now();
        if moved
            || self
                .shown
                .is_none_or(|at| moment.since(at) >= INSTANCES_AGAIN)
        {
            self.shown = Some(moment);
            self.ring.push(now, Kind::Instances);
        }
        self.instances = views;
        self.compare_definitions();
    }

    /// Shows the jobs of which an instance has another definition that came, or has gone.
    fn compare_definitions(&mut self) {
        let differ = view::others_differ(&self.instances, &self.config.digest);
        if std::mem::replace(&mut self.others_differ, differ) == differ {
            return;
        }
        let (now, config) = (self.clock().now, self.config.clone());
        let others = |inner: &Self| -> Vec<JobName> {
            let all = inner.each().filter(|job| job.view.other_definition);
            all.map(|job| job.view.job.clone()).collect()
        };
        let before = others(self);
        self.configure(&config);
        for name in before.into_iter().chain(others(self)) {
            self.ring.push(now, Kind::Job(name));
        }
    }

    fn given_up(&mut self, all: &[GivenUp]) {
        for g in all.iter().filter(|g| !self.given_up.contains(&g.id)) {
            let count = g.about.len() as u64 + g.more;
            let job = g.about.first().map(|(job, _)| job.clone());
            let feed = Feed {
                job: job.filter(|_| count == 1),
                channel: Some(g.channel.clone()),
                reason: Some(g.why.clone()),
                count: Some(count),
                ..Feed::default()
            };
            self.ring
                .push(g.at, Kind::Feed("undelivered", Box::new(feed)));
        }
        self.given_up = all.iter().map(|g| g.id.clone()).collect();
    }

    /// Takes in what was found of jobs when the store's clock showed `shown`.
    fn take(&mut self, found: Vec<Found>, shown: i64, incarnation: Arc<str>) {
        let now = match &self.pulse.fleet {
            Some(reply) => Clock::of(&reply.value, shown).right(shown),
            None => shown,
        };
        self.as_of = Some(now);
        self.failed = None;
        self.incarnation = incarnation.clone();
        for mut f in found {
            if let Ok(Some(st)) = &mut f.state
                && let Some(last) = &mut st.last
            {
                self.share(&mut last.instance);
            }
            let Some(e) = self.jobs.get_mut(&f.name) else {
                continue;
            };
            let was_due = e.due;
            let (feed, changed) = e.take(f.state, f.records, now, &incarnation);
            if was_due != e.due {
                if let Some(at) = was_due {
                    self.due.remove(&(at, f.name.clone()));
                }
                if let Some(at) = e.due {
                    self.due.insert((at, f.name.clone()));
                }
            }
            for (kind, feed) in feed {
                let feed = Feed {
                    job: Some(f.name.clone()),
                    ..feed
                };
                self.ring.push(now, Kind::Feed(kind, Box::new(feed)));
            }
            if changed {
                self.ring.push(now, Kind::Job(f.name));
            }
        }
    }
}

impl Entry {
    fn new(name: &JobName, definition: Option<&Arc<config::Job>>, now: i64) -> Self {
        Self {
            definition: definition.cloned(),
            state: None,
            triggered: None,
            unreadable: None,
            known: false,
            told: Told::at(now),
            last_success: None,
            job: Job {
                view: view::job(name, definition.map(|job| &**job), None, now, ""),
                elsewhere: definition.is_none(),
                recent: Recents::default(),
                typical_ms: None,
                late_typical_ms: None,
            },
            incarnation: "".into(),
            others_differ: false,
            due: None,
        }
    }

    /// Returns what happened, and whether the job looks different now.
    fn take(
        &mut self,
        state: Result<Option<State>, String>,
        records: Option<Records>,
        now: i64,
        incarnation: &Arc<str>,
    ) -> (Vec<(&'static str, Feed)>, bool) {
        let (mut feed, mut begins) = (vec![], vec![]);
        let mut changed = !self.known;
        let mut granted: Vec<RunId> = diff::under_way(self.state.as_ref()).collect();
        match state {
            Ok(mut state) => {
                let triggered = state
                    .as_mut()
                    .and_then(|st| std::mem::take(&mut st.triggered).pop())
                    .map(Box::new);
                let idle = state.as_ref().is_none_or(|st| st.open.is_empty());
                let same = state == self.state
                    && triggered == self.triggered
                    && *incarnation == self.incarnation;
                // Most jobs of a look are as they were, and what the time changes is shown when it does.
                if self.known && self.unreadable.is_none() && idle && same && records.is_none() {
                    return (feed, false);
                }
                self.unreadable = None;
                if self.known {
                    let decided = triggered
                        .as_deref()
                        .filter(|t| self.triggered.as_deref() != Some(*t));
                    let told = diff::states(
                        self.state.as_ref(),
                        state.as_ref(),
                        decided,
                        &self.job.recent,
                        &mut self.told,
                    );
                    // What is under way or awaited comes after what has ended.
                    let grants = told.iter().filter(|(kind, _)| *kind == "granted");
                    let grants: Vec<_> = grants.filter_map(|(_, f)| f.run_id).collect();
                    let of_now = |kind: &str, run: Option<RunId>| match kind {
                        "granted" | "awaited" => true,
                        _ => run.is_some_and(|run| grants.contains(&run)),
                    };
                    (begins, feed) = told
                        .into_iter()
                        .partition(|(kind, f)| of_now(kind, f.run_id));
                } else {
                    self.told = Told::at(now);
                }
                self.triggered = triggered;
                self.state = state;
            }
            Err(why) => self.unreadable = Some(why),
        }
        granted.extend(diff::under_way(self.state.as_ref()));
        if let Some(records) = records {
            let (newest, all) = match records {
                Records::Newest(records) => (records, false),
                Records::All(records) => (records, true),
            };
            if self.known {
                // It ended after the state was read: its record tells both.
                let ended = |run: RunId| newest.iter().any(|r| r.run_id == Some(run));
                begins.retain(|(kind, f)| {
                    let over = f.run_id.filter(|run| *kind == "granted" && ended(*run));
                    granted.retain(|run| Some(*run) != over);
                    over.is_none()
                });
                let known: Vec<Recent> = self.job.recent.iter().collect();
                let granted = |id| granted.contains(&id) || self.told.ran(id);
                feed.extend(diff::records(&known, &newest, granted));
            }
            changed |= self.merge(newest, all);
        }
        feed.extend(begins);
        self.known = true;
        self.incarnation = incarnation.clone();
        let before = self.show(now, incarnation, true);
        (feed, changed || self.job.view != before)
    }

    /// True: the recent runs have changed.
    fn merge(&mut self, mut newest: Vec<Recent>, all: bool) -> bool {
        if !all {
            let known = self.job.recent.iter();
            let rest = known.filter(|r| !newest.iter().any(|n| diff::same_run(n, r)));
            newest.extend(rest.collect::<Vec<_>>());
        }
        view::late_since_due(&mut newest, self.definition.as_deref());
        newest.truncate(RECENT);
        let recent = Recents::of(&newest);
        if recent == self.job.recent {
            return false;
        }
        let succeeded = newest.iter().filter(|r| r.outcome == Outcome::Succeeded);
        self.last_success = succeeded
            .clone()
            .filter_map(|r| Some(r.finished_at?.0))
            .max()
            .max(self.last_success);
        self.job.typical_ms = median(succeeded.filter_map(|r| r.duration_ms).collect());
        self.job.late_typical_ms = median(newest.iter().filter_map(|r| r.lateness_ms).collect());
        self.job.recent = recent;
        true
    }

    /// Makes the view anew. `observed`: the state is as the store has it now; otherwise nobody knows whether a lease
    /// has lapsed meanwhile. Returns the view before.
    fn show(&mut self, now: i64, incarnation: &str, observed: bool) -> JobView {
        let lapsed = self.job.view.lapsed;
        let (name, definition) = (&self.job.view.job, self.definition.as_deref());
        let mut view = view::job(name, definition, self.state.as_ref(), now, incarnation);
        if !observed {
            view.lapsed = lapsed && !view.running.is_empty();
        }
        view.other_definition &= self.others_differ;
        view.unreadable = self.unreadable.clone();
        view.look_at_records(last(&self.job.recent));
        let records = self.job.recent.iter();
        let records = records.map(|r| (Occurrence(r.occurrence.0), r.outcome, r.count));
        view.judge(self.job.elsewhere, records);
        let ends = view.paused.as_ref().and_then(|p| p.until).map(|t| t.0);
        let after = |t: Time| t.0 + AFTER_INSTANT_MS;
        let next = view.next.map(after);
        let passed = view.passed_over.as_ref().map(|p| after(p.occurrence));
        let lapses = self
            .state
            .as_ref()
            .and_then(diff::lapses_at)
            .filter(|_| !view.lapsed);
        self.due = [ends, next, passed, lapses].into_iter().flatten().min();
        std::mem::replace(&mut self.job.view, view)
    }
}

/// The newest of these that is of a run, or of what may have run.
fn last(recent: &Recents) -> Option<LastView> {
    let r = recent
        .iter()
        .find(|r| view::may_have_run(r.attempt, r.outcome))?;
    let end = r.finished_at.or(r.started_at);
    Some(LastView {
        occurrence: r.occurrence,
        attempt: r.attempt,
        run_id: r.run_id,
        instance: r.instance,
        outcome: r.outcome,
        started_at: r.started_at,
        finished_at: end.unwrap_or(r.occurrence),
        duration_ms: r.duration_ms,
    })
}

/// The occurrence that a feed item is about.
pub(super) fn at(o: Occurrence) -> Option<Time> {
    Some(o.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        health::Away,
        logic::claim,
        store::{Fleet, Info, LIVE_WITHIN_MS, Reply},
    };

    fn own() -> InstanceId {
        InstanceId::new("a")
    }

    /// Of a store whose clock shows `now`, Unix ms.
    fn answer(fleet: Fleet, now: i64) -> Arc<Reply<Fleet>> {
        Arc::new(Reply {
            value: fleet,
            now_us: now * 1000,
            incarnation: "".into(),
            sent: Boottime::now(),
            received: Boottime::now(),
        })
    }

    /// A loss of the store's data took the state of a run, or all that was known of an occurrence.
    #[test]
    fn the_last_run_is_the_newest_of_the_state_and_the_records() {
        let name = JobName::new("a");
        let at = 1_795_176_000_000;
        let instance = Some(InstanceId::new("i"));
        let without = |ms: i64, outcome| RunRecord {
            instance: instance.clone(),
            ..RunRecord::without_run(&name, Occurrence(at + ms), Trigger::Schedule, outcome)
        };
        let ran = |ms: i64, outcome| RunRecord {
            run_id: Some(RunId(uuid::Uuid::from_u128(ms as u128))),
            attempt: 1,
            ..without(ms, outcome).lasting(Some(at + ms + 5), Some(at + ms + 50))
        };
        // Granted, and never started: its end is not the planned instant.
        let unstarted = |ms: i64| ran(ms, Outcome::LeaseLost).lasting(None, Some(at + ms + 4000));
        let state = |ms: i64| claim::Last {
            occurrence: Occurrence(at + ms),
            attempt: 1,
            run: RunId(uuid::Uuid::from_u128(ms as u128)),
            instance: InstanceId::new("i"),
            outcome: Outcome::Succeeded,
            from: at + ms + 5,
            started: Some(at + ms + 5),
            to: at + ms + 40,
            ended: None,
        };
        let (lost, missed) = (Outcome::LeaseLost, Outcome::Missed);
        let unknown = Outcome::Unknown;
        for (last, records, shown) in [
            (None, vec![], None),
            (None, vec![without(0, missed)], None),
            (
                None,
                vec![without(100, missed), ran(0, lost)],
                Some((lost, 1)),
            ),
            (
                None,
                vec![without(100, unknown), ran(0, lost)],
                Some((unknown, 0)),
            ),
            (
                Some(state(100)),
                vec![ran(0, lost)],
                Some((Outcome::Succeeded, 1)),
            ),
            (
                Some(state(100)),
                vec![without(0, unknown)],
                Some((Outcome::Succeeded, 1)),
            ),
            // The record of the same run.
            (
                Some(state(100)),
                vec![ran(100, lost)],
                Some((Outcome::Succeeded, 1)),
            ),
            (Some(state(0)), vec![ran(100, lost)], Some((lost, 1))),
            (None, vec![unstarted(0)], Some((lost, 1))),
            (Some(state(100)), vec![unstarted(0)], Some((lost, 1))),
            (
                Some(state(0)),
                vec![without(100, unknown)],
                Some((unknown, 0)),
            ),
        ] {
            let st = State {
                last,
                newest: at + 100,
                ..State::default()
            };
            let mut e = Entry::new(&name, None, at);
            let _ = e.take(
                Ok(Some(st.clone())),
                Some(Records::All(
                    records.iter().cloned().map(Recent::from).collect(),
                )),
                at,
                &"".into(),
            );
            let of = |last: &Option<LastView>| last.as_ref().map(|l| (l.outcome, l.attempt));
            assert_eq!(of(&e.job.view.last), shown, "{records:?}");
            // As `status` does it.
            let mut view = view::job(&name, None, Some(&st), at, "");
            view.look_at_records(LastView::newest(records));
            assert_eq!(view.last, e.job.view.last);
        }
    }

    /// However short it was, and whatever the board was busy with meanwhile.
    #[test]
    fn the_grant_of_each_run_is_told_once() {
        let name = JobName::new("a");
        let id = |n: i64| RunId(uuid::Uuid::from_u128(n as u128));
        let record = |n: i64, outcome| RunRecord {
            run_id: Some(id(n)),
            attempt: 1,
            ..RunRecord::without_run(&name, Occurrence(n), Trigger::Schedule, outcome)
        };
        let state = |newest: i64, open: &[i64]| State {
            newest,
            open: open
                .iter()
                .map(|n| claim::Open {
                    run: crate::model::Run {
                        id: id(*n),
                        ..crate::model::Run::first(*n)
                    },
                    ..claim::Open::first(*n)
                })
                .collect(),
            ..State::default()
        };
        let mut e = Entry::new(&name, None, 0);
        let mut look = |newest: i64, open: &[i64], ended: &[(i64, Outcome)]| {
            let records = ended.iter().map(|(n, outcome)| record(*n, *outcome).into());
            let records = Records::Newest(records.collect());
            let state = Ok(Some(state(newest, open)));
            let (fed, _) = e.take(state, Some(records), newest, &"".into());
            let told = |(kind, feed): (_, Feed)| Some((kind, feed.occurrence?.0));
            fed.into_iter().filter_map(told).collect::<Vec<_>>()
        };
        let (well, lost) = (Outcome::Succeeded, Outcome::LeaseLost);
        // What ran before the board is not told.
        assert_eq!(look(100, &[], &[(100, well)]), []);
        assert_eq!(look(200, &[200], &[]), [("granted", 200)]);
        assert_eq!(look(200, &[], &[(200, well)]), [("ended", 200)]);
        // Two ran since the last look, and a third one does.
        assert_eq!(
            look(500, &[500], &[(400, well), (300, well), (200, well)]),
            [
                ("granted", 300),
                ("ended", 300),
                ("granted", 400),
                ("ended", 400),
                ("granted", 500)
            ]
        );
        assert_eq!(look(500, &[], &[(500, lost)]), [("ended", 500)]);
        // Its guard says how it ended after all.
        assert_eq!(look(500, &[], &[(500, well)]), [("ended", 500)]);
        // It ended after its state was read.
        assert_eq!(
            look(600, &[600], &[(600, well)]),
            [("granted", 600), ("ended", 600)]
        );
        assert_eq!(look(600, &[], &[(600, well)]), []);
    }

    #[test]
    fn an_instance_that_new_data_lacks_is_not_gone_before_it_could_send_a_heartbeat() {
        let config = config::parse("", std::path::Path::new("jobs.toml"), &|_| None);
        let board = Board::new(Arc::new(config.expect("valid")), "redis://x", own());
        let mut inner = board.inner.write();
        let lost = 500_000;
        for (born, now, knows, shown) in [
            (0, lost - 1, "ab", "ab"),
            (lost, lost, "b", "ab"),
            (lost, lost + LIVE_WITHIN_MS - 1, "bc", "abc"),
            (lost, lost + LIVE_WITHIN_MS, "bc", "bc"),
            // Later ones are gone at once.
            (lost, lost + LIVE_WITHIN_MS + 1, "c", "c"),
        ] {
            let info = || Info {
                seen: now,
                ..Info::default()
            };
            let id = |c: char| InstanceId::new(&c.to_string());
            let fleet = Fleet {
                id: "e".into(),
                before: None,
                born,
                quarantine: Duration::ZERO,
                open: true,
                instances: knows.chars().map(|c| (id(c), info())).collect(),
                drains: vec![],
                drained_by: Default::default(),
            };
            inner.beats(Pulse {
                fleet: Some(answer(fleet, now)),
                ..Pulse::default()
            });
            let all: String = (inner.instances.iter().map(|i| i.instance.as_str())).collect();
            assert_eq!(all, shown, "{now}");
            if inner.ring.latest() < 4 {
                // The board's own instance has just come; the others may have been there for long.
                let told = serde_json::json!(super::super::events::kept(&inner));
                let up = told.as_array().into_iter().flatten();
                let up: Vec<_> = up.filter(|e| e["kind"] == "instance_up").collect();
                assert_eq!(up.len(), 1, "{told}");
                assert_eq!(up[0]["instance"], "a");
            }
        }
    }

    /// An instance that is gone leaves its definition in the store: nobody has it any more.
    #[test]
    fn another_definition_is_shown_while_a_living_instance_may_have_it() {
        let text = "[jobs.a]\nschedule = '@daily'\ncommand = 'x'\n";
        let config = config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
        let config = config.expect("valid");
        let ours = config.digest.clone();
        let board = Board::new(Arc::new(config), "redis://x", own());
        let mut inner = board.inner.write();
        let now = 1_000_000;
        let instances = |other: i64| {
            [(own(), now, &*ours), (InstanceId::new("b"), other, "x")].map(|(id, seen, config)| {
                let config = config.to_owned();
                let info = Info {
                    seen,
                    config,
                    ..Info::default()
                };
                (id, info)
            })
        };
        let state = State {
            definition: "another".to_owned(),
            ..State::default()
        };
        let found = || Found {
            name: JobName::new("a"),
            state: Ok(Some(state.clone())),
            records: None,
        };
        for (seen, shown) in [(now, true), (now - 60_000, false), (now, true)] {
            let told = inner.ring.latest();
            inner.beats(Pulse {
                fleet: Some(answer(Fleet::of(instances(seen)), now)),
                ..Pulse::default()
            });
            inner.take(vec![found()], now, "".into());
            let job = inner.each().next().expect("a job");
            assert_eq!(job.view.other_definition, shown);
            assert!(inner.ring.latest() > told, "it is told");
        }
    }

    #[test]
    fn the_begin_and_the_end_of_a_wait_are_told_at_once() {
        let config = config::parse("", std::path::Path::new("jobs.toml"), &|_| None);
        let board = Board::new(Arc::new(config.expect("valid")), "redis://x", own());
        let mut inner = board.inner.write();
        for (n, (id, open)) in [
            ("a", false),
            ("a", true),
            ("b", false),
            ("b", true),
            ("c", true),
        ]
        .into_iter()
        .enumerate()
        {
            let info = Info {
                seen: 1_000_000,
                ..Info::default()
            };
            let fleet = Fleet {
                id: id.into(),
                before: None,
                born: 0,
                quarantine: Duration::from_secs(3),
                open,
                instances: BTreeMap::from([(own(), info)]),
                drains: vec![],
                drained_by: Default::default(),
            };
            let before = inner.ring.latest();
            inner.beats(Pulse {
                fleet: Some(answer(fleet, 1_000_000)),
                ..Pulse::default()
            });
            assert!(inner.ring.latest() > before, "{n}");
        }
        let told = serde_json::json!(super::super::events::kept(&inner));
        let told = told.as_array().into_iter().flatten();
        let lost: Vec<_> = told.filter(|e| e["kind"] == "data_lost").collect();
        assert_eq!(lost.len(), 2, "{lost:?}");
        // Not from when its data is: the old data answered until then.
        assert_eq!(lost[0]["since"], "1970-01-01T00:16:40.000Z");
        assert!(lost[0]["until"].is_string(), "{lost:?}");
        assert!(lost[1]["until"].is_null(), "it grants already: {lost:?}");
    }

    #[test]
    fn an_act_is_told_after_a_thousand_runs() {
        let config = config::parse("", std::path::Path::new("jobs.toml"), &|_| None);
        let board = Board::new(Arc::new(config.expect("valid")), "redis://x", own());
        let mut inner = board.inner.write();
        let told = |kind| Kind::Feed(kind, Box::default());
        inner.ring.push(0, told("paused"));
        for _ in 0..3000 {
            inner.ring.push(0, told("granted"));
        }
        let kept = serde_json::json!(super::super::events::kept(&inner));
        assert_eq!(kept[0]["kind"], "paused");
        let runs = kept.as_array().map_or(0, |all| all.len() - 1);
        assert!((1000..2000).contains(&runs), "{runs}");
        assert_eq!(kept[1]["kind"], "granted");
        assert_eq!(kept[runs]["cursor"], inner.ring.cursor());
    }

    /// The page asks for all jobs once, and for the instances again and again.
    #[test]
    fn with_the_instances_comes_what_keeps_all_jobs_from_starting() {
        let config = config::parse("", std::path::Path::new("jobs.toml"), &|_| None);
        let board = Board::new(Arc::new(config.expect("valid")), "redis://x", own());
        let mut inner = board.inner.write();
        for doubt in [Some(5000), None] {
            let now = 1_795_176_000_000;
            let info = Info {
                seen: now - doubt.unwrap_or(0),
                clock_doubt_ms: doubt,
                ..Info::default()
            };
            let fleet = Fleet::of([(own(), info)]);
            inner.beats(Pulse {
                fleet: Some(answer(fleet, now)),
                problems: ["it evicts".to_owned()].into(),
                ..Pulse::default()
            });
            let told = inner.instances();
            assert_eq!(told.nobody_believes, doubt.is_some());
            assert_eq!(told.clock_doubt_ms, doubt);
            assert_eq!(told.problems, ["it evicts"]);
        }
    }

    #[test]
    fn a_store_that_is_back_has_no_error_any_more() {
        let config = config::parse("", std::path::Path::new("jobs.toml"), &|_| None);
        let board = Board::new(Arc::new(config.expect("valid")), "redis://x", own());
        let away = || Pulse {
            away: Some(Away {
                why: "refused".into(),
                kind: "",
                since: Boottime::now(),
            }),
            ..Pulse::default()
        };
        let error = |inner: &Inner| inner.store(inner.clock()).error;
        let mut inner = board.inner.write();
        inner.beats(away());
        inner.failed = Some("refused".to_owned());
        assert_eq!(error(&inner).as_deref(), Some("refused"));
        inner.beats(Pulse::default());
        assert_eq!(error(&inner), None);
        // While it answers heartbeats, a look may fail for another reason.
        inner.failed = Some("slow".to_owned());
        inner.beats(Pulse::default());
        assert_eq!(error(&inner).as_deref(), Some("slow"));
    }
}
