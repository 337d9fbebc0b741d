//! Gets each occurrence decided: local dedupe through singleflight, then the contest in the store with limited
//! retries, then the lease goes to whoever runs it. Losers watch.
//!
//! One driver per job takes its due occurrences in order. Whatever else wakes an occurrence (takeover watch,
//! pub/sub, trigger) comes through [`Elector::contest`] too, where all callers of one occurrence share one flight.
//! Only the flight's own closure ever sees the lease; callers get the outcome.

mod batch;
mod foreseen;
mod pending;
mod watch;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_singleflight::UnaryGroup;
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, error, info, warn};

use self::{
    batch::Batcher,
    foreseen::Foreseen,
    pending::{Queue, Segment},
    watch::Watches,
};
pub use self::{batch::Place, pending::Due};
use crate::{
    clock::{Boottime, StoreClock},
    config::{Job, OnStateLoss, StoreRetry},
    logic::{
        belief::{self, SLACK, Sampled},
        claim::{
            self, Answer, Claim, Event, Grant, Missed, OnCrash, Open, Overlap, Register,
            Registration, State, Target, Told,
        },
        observe,
        schedule::{Schedule, next_of},
        timetable::{self, Backlog},
    },
    model::{InstanceId, JobName, Occurrence, Outcome, RunId, Trigger},
    store::{self, Decision, Reply, Store},
};

/// How much later than the one before it an instance asks for an occurrence, by its rank for that occurrence. The
/// first goes at once; when it is dead, nobody waits for it longer than this.
const HANDICAP: Duration = Duration::from_millis(3);
const HANDICAP_MAX: Duration = Duration::from_millis(45);
/// Between two rounds of attempts while the store is away.
const AWAY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// An occurrence that a contest begins for later than this after its instant is caught up, not on schedule.
const LATE_MS: i64 = 1000;
/// What this instance should have asked for so long ago was held up here: by a suspend, or a step of the clock.
const STALLED_MS: i64 = 3000;
/// After the last moment for a start: by then it has passed on the store's clock too.
const LATER_MS: i64 = 20;
const HOUR_MS: i64 = 3_600_000;
/// Ended runs of a job that are remembered, so that a second answer to the question for one starts nothing.
const ENDED_KEPT: usize = 4;
/// How often one contest asks again, when the answer says that it soon may: at first as soon as it says, then less and
/// less often. A clock that stands behind what is decided would otherwise be asked a thousand times a second.
const PACE: (u32, Duration) = (3, Duration::from_secs(1));
/// Between two tries to register a job that the store refuses.
const REFUSED_AGAIN: Duration = Duration::from_secs(5);
/// Before a job whose attempt could not be asked for is registered anew.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How many of a job's overdue occurrences are looked at one by one.
const OVERDUE_KEPT: usize = 100;

/// How a contest ended, as far as this instance is concerned. Everybody who waited for it gets the same.
#[derive(Debug, Clone, PartialEq)]
pub enum Contest {
    /// Ours; whoever runs it has the lease.
    Won(RunId),
    Lost {
        to: InstanceId,
    },
    /// Decided, and over.
    Settled,
    /// Decided without a run.
    Recorded(Outcome),
    /// Not decided: the store is away or quarantined.
    Undecided,
    /// This instance claims nothing at present.
    Draining,
    /// The job is not in this instance's configuration any more.
    Gone,
    /// Not decided: others have decided some of what was to be given up with it.
    Behind,
}

/// A lease that was won, for whoever runs it.
#[derive(Debug)]
pub struct Granted {
    pub job: Arc<Job>,
    pub grant: Grant,
    pub run: RunId,
    /// Before the command left that was answered with this lease: trust counts from here.
    pub sent: Boottime,
    /// Unix ms of the store's clock: a first attempt is not started later than this.
    pub start_by: i64,
    /// Held until the command was started.
    pub place: Option<Place>,
    /// Unix ms of the store's clock, about when it was granted.
    pub granted_at: i64,
    pub key: Option<String>,
    /// The answer came after the last moment for a start, to a question that was asked again: it is to be settled as
    /// missed.
    pub too_late: bool,
    /// Held while the run lasts, when the number of runs is limited.
    pub slot: Option<tokio::sync::OwnedSemaphorePermit>,
}

/// Takes won leases. Must not block.
pub type Start = Box<dyn Fn(Granted) + Send + Sync>;

/// What the dispatcher is told of a job.
#[derive(Debug)]
pub enum Plan {
    /// Plan its occurrences after this one.
    From(Arc<Job>, Occurrence),
    /// Plan nothing of it any more.
    Drop(JobName),
}

pub struct Elector {
    pub store: Arc<dyn Store>,
    pub clock: Arc<StoreClock>,
    pub instance: InstanceId,
    pub host: String,
    retry: StoreRetry,
    start: Start,
    batcher: Batcher,
    /// Boxed: a table has up to half of its places empty.
    jobs: Mutex<HashMap<JobName, Box<Entry>>>,
    /// Of jobs that were removed. Locked after `jobs`.
    parted: Mutex<HashMap<JobName, Parted>>,
    flights: UnaryGroup<(JobName, Target, bool), Contest>,
    watches: Watches,
    foreseen: Foreseen,
    live: Mutex<Arc<[InstanceId]>>,
    slots: Option<Arc<Semaphore>>,
    /// To look at what is overdue takes a while; many jobs at one time would keep others from running.
    counting: Semaphore,
    journal: mpsc::Sender<Decision>,
    plans: mpsc::UnboundedSender<Plan>,
    draining: AtomicBool,
    /// Why the store must not be relied on, as long as it must not.
    unfit: Mutex<Option<Arc<str>>>,
    /// The longest of any job, in milliseconds; only grows.
    quarantine: AtomicU64,
    /// Set when a job has to be registered (again).
    pub enrol: Notify,
    /// Nothing new is begun after this.
    pub stop: CancellationToken,
    pub tasks: TaskTracker,
}

/// What is kept of a job that was removed: questions without an answer, and runs.
type Parted = (BTreeMap<Target, RunId>, Runs);

/// One job, as this instance stands with it.
struct Entry {
    job: Arc<Job>,
    /// The newest occurrence known to be decided.
    known: Occurrence,
    /// Occurrences up to here are not owed.
    since: Occurrence,
    /// What people asked of it, as far as this instance knows.
    told: Told,
    /// Its present definition plans what comes after this.
    planned: Occurrence,
    /// The longest of its definitions here: what was planned may have waited for so long.
    jitter: Duration,
    /// The longest that any lease of it needs that may still be held: by its definitions here, also former ones, and by
    /// what others were seen to hold. A run keeps the lease that it was granted with, and after a loss of the store's
    /// data nobody can ask for it.
    quarantine: Duration,
    /// Known to the store, in its present incarnation: it can be claimed.
    ready: bool,
    /// What the store knows of it is this definition, and we have seen what is open.
    registered: bool,
    /// Of which epoch the store was asked last, and said to wait: there is nothing to ask before the quarantine is over.
    held_back: Option<(Arc<str>, Arc<str>)>,
    /// When the store refused it last.
    refused: Option<Boottime>,
    /// Occurrences of which the next attempt is waited for.
    again: BTreeSet<Occurrence>,
    /// It cannot be claimed or registered, as was said; and which occurrence this was noted for last.
    trouble: Option<Box<Target>>,
    /// What last waited because the store must not be relied on.
    unfit: Option<Box<Target>>,
    /// What was planned before this instance knew the job has been looked at.
    primed: bool,
    queue: Queue,
    /// A driver works on the queue.
    driven: bool,
    /// What was foreseen last did not come: somebody else is faster, or the job is paused.
    in_vain: bool,
    /// Nonces of claims that were sent and have no answer that ends them.
    asked: BTreeMap<Target, RunId>,
    /// Since when each trigger that waits is known here.
    triggers: BTreeMap<String, Boottime>,
    runs: Runs,
    /// Something about this job has changed: ready, an ended run, a new definition.
    changed: Changed,
}

/// What a driver does next.
enum Next {
    Ask(pending::Plan, tokio::sync::futures::OwnedNotified),
    /// It cannot be claimed at present.
    Wait(tokio::sync::futures::OwnedNotified),
    Unfold(Arc<Job>, (Vec<Segment>, u32), Occurrence),
    Idle,
}

impl Entry {
    /// How long there is no sense in asking the store to register it.
    fn next_ask(&self, epoch: &Epoch, now: Boottime) -> Duration {
        if let Some(at) = self.refused {
            return (at + REFUSED_AGAIN).since(now);
        }
        let held_back = self.held_back.as_ref();
        if held_back.is_none_or(|(inc, id)| *inc != epoch.inc || *id != epoch.id) {
            return Duration::ZERO;
        }
        epoch.adoptable_in(self.quarantine, now)
    }

    /// What is in the queue was due by a wrong clock: what the store says is looked at again, and planned for as after a start.
    fn plan_anew(&mut self) {
        self.queue.forget_scheduled();
        self.planned = Occurrence(0);
        (self.ready, self.registered, self.primed) = (false, false, false);
        self.changed.tell();
    }

    /// What counts as decided lies in the future.
    fn ahead(&self, now: Occurrence) -> bool {
        self.known.max(self.since).0 > now.0 + SLACK.as_millis() as i64
    }
}

/// Tells those who wait that something has changed. Takes no memory until somebody has waited.
#[derive(Default)]
struct Changed(Option<Arc<Notify>>);

impl Changed {
    fn tell(&self) {
        if let Some(notify) = &self.0 {
            notify.notify_waiters();
        }
    }

    /// Ends with the next change after this call.
    fn next(&mut self) -> tokio::sync::futures::OwnedNotified {
        self.0.get_or_insert_default().clone().notified_owned()
    }
}

/// Runs of one job that were handed over: a late answer to a lost question must not start one twice.
#[derive(Debug, Default)]
struct Runs {
    /// True: nothing of it goes on any more, and its settlement is awaited.
    active: BTreeMap<RunId, bool>,
    /// The newest of those that have ended.
    ended: VecDeque<RunId>,
}

impl Runs {
    /// False: it was handed over before.
    fn begin(&mut self, run: RunId) -> bool {
        !self.ended.contains(&run) && self.active.insert(run, false).is_none()
    }
    fn over(&mut self, run: RunId) {
        if let Some(over) = self.active.get_mut(&run) {
            *over = true;
        }
    }
    fn end(&mut self, run: RunId) {
        if self.active.remove(&run).is_some() {
            self.ended.push_back(run);
            let excess = self.ended.len().saturating_sub(ENDED_KEPT);
            self.ended.drain(..excess);
        }
    }
}

/// What an elector is made of.
pub struct Parts {
    pub store: Arc<dyn Store>,
    pub clock: Arc<StoreClock>,
    pub instance: InstanceId,
    pub host: String,
    pub retry: StoreRetry,
    pub max_parallel: Option<u32>,
    pub journal: mpsc::Sender<Decision>,
    pub plans: mpsc::UnboundedSender<Plan>,
    pub stop: CancellationToken,
    pub tasks: TaskTracker,
}

impl Elector {
    pub fn build(p: Parts, start: Start) -> Self {
        Self {
            batcher: Batcher::start(p.store.clone()),
            store: p.store,
            clock: p.clock,
            instance: p.instance,
            host: p.host,
            retry: p.retry,
            start,
            jobs: Mutex::default(),
            parted: Mutex::default(),
            flights: UnaryGroup::new(),
            watches: Watches::default(),
            foreseen: Foreseen::default(),
            live: Mutex::new(Arc::new([])),
            slots: p.max_parallel.map(|n| Arc::new(Semaphore::new(n as usize))),
            counting: Semaphore::new(1),
            journal: p.journal,
            plans: p.plans,
            draining: AtomicBool::new(false),
            unfit: Mutex::default(),
            quarantine: AtomicU64::new(0),
            enrol: Notify::new(),
            stop: p.stop,
            tasks: p.tasks,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<JobName, Box<Entry>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn parted(&self) -> MutexGuard<'_, HashMap<JobName, Parted>> {
        self.parted.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn entry<T>(&self, job: &JobName, f: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        self.lock().get_mut(job).map(|e| f(e))
    }

    /// Adds a job, or puts another definition in the place of its old one. A run that goes on keeps its own.
    pub fn set_job(&self, job: Arc<Job>) {
        let quarantine = job.lease.quarantine;
        self.lengthen(quarantine);
        let mut jobs = self.lock();
        match jobs.get_mut(&job.name) {
            Some(e) => {
                if e.job.schedule_digest != job.schedule_digest
                    || e.job.jitter != job.jitter
                    || e.job.enabled != job.enabled
                {
                    // What the old schedule had planned for later is not planned any more.
                    let now = Occurrence(self.clock.now_us().unwrap_or(0) / 1000);
                    e.queue.forget_after(now);
                    if e.primed {
                        self.keep_waiting(e, now);
                        let _ = self.plans.send(Plan::From(job.clone(), now));
                    }
                }
                e.jitter = e.jitter.max(job.jitter);
                e.job = job;
                e.quarantine = e.quarantine.max(quarantine);
                (e.registered, e.held_back, e.refused) = (false, None, None);
                e.changed.tell();
            }
            None => {
                let (asked, runs) = self.parted().remove(&job.name).unwrap_or_default();
                jobs.insert(
                    job.name.clone(),
                    Box::new(Entry {
                        jitter: job.jitter,
                        planned: Occurrence(0),
                        job,
                        known: Occurrence(0),
                        since: Occurrence(0),
                        told: Told::default(),
                        quarantine,
                        ready: false,
                        registered: false,
                        held_back: None,
                        refused: None,
                        again: BTreeSet::new(),
                        trouble: None,
                        unfit: None,
                        primed: false,
                        queue: Queue::default(),
                        driven: false,
                        in_vain: false,
                        asked,
                        triggers: BTreeMap::new(),
                        runs,
                        changed: Changed::default(),
                    }),
                );
            }
        }
        drop(jobs);
        self.enrol.notify_one();
    }

    /// What was planned up to now by the definition that is replaced, and waits for the jitter that it has there, stays
    /// owed: nothing that the new one plans may overtake it. That can be one occurrence only, as each starts before the
    /// next. The dispatcher hands it in when its time has come.
    fn keep_waiting(&self, e: &mut Entry, now: Occurrence) {
        let job = &e.job;
        let floor = e.known.max(e.since).max(e.planned);
        e.planned = now;
        if job.jitter.is_zero() || !job.enabled || floor >= now {
            return;
        }
        let oldest = Occurrence(now.0 - job.jitter.as_millis() as i64);
        let Some(at) = timetable::latest(&job.schedules, floor.max(oldest), now) else {
            return;
        };
        let start_at = timetable::start_at_ms(job.name.as_str(), &job.schedules, at, job.jitter);
        if start_at > now.0 {
            let due = Due {
                job: job.name.clone(),
                target: Target::Scheduled(at),
                start_at,
                start_by: start_at.saturating_add(job.start_within.as_millis() as i64),
                overdue: false,
                missed: vec![],
            };
            e.queue.wait(due);
        }
    }

    /// Forgets a job. A run that goes on is not disturbed. What was planned up to now and not decided yet, because it
    /// waits for its jitter or its turn, is not started here any more; when nobody may start it any more, it is
    /// recorded as missed.
    pub fn remove_job(self: &Arc<Self>, job: &JobName) {
        let mut jobs = self.lock();
        let mut removed = jobs.remove(job);
        if let Some(e) = &mut removed {
            e.changed.tell();
            // It may come back, with a grant that we have not heard of yet.
            if !e.asked.is_empty() || !e.runs.active.is_empty() {
                let left = (std::mem::take(&mut e.asked), std::mem::take(&mut e.runs));
                self.parted().insert(job.clone(), left);
            }
        }
        drop(jobs);
        self.watches.forget(job);
        let _ = self.plans.send(Plan::Drop(job.clone()));
        let now = self.clock.now_us().map(|us| Occurrence(us / 1000));
        if let (Some(e), Some(now)) = (removed, now)
            && e.primed
            && e.job.enabled
            && next_of(&e.job.schedules, e.known.max(e.since)).is_some_and(|next| next <= now)
        {
            let this = self.clone();
            self.tasks.spawn(async move {
                let owed = {
                    let _turn = this.counting.acquire().await;
                    this.owed(&e, now)
                };
                let schedules = e.job.schedules.clone();
                drop(e);
                if let Some((claim, after)) = owed {
                    this.give_up(claim, &schedules, after).await;
                }
            });
        }
    }

    /// A claim that has all recorded that a removed job leaves undecided, and the moment (Unix ms of the store's clock)
    /// from which nobody can start that any more.
    fn owed(&self, e: &Entry, now: Occurrence) -> Option<(Claim, i64)> {
        let floor = e.known.max(e.since);
        let all = timetable::overdue(&e.job.schedules, floor, now, OVERDUE_KEPT);
        let each = |at: Occurrence| Missed {
            first: at,
            last: at,
            count: 1,
        };
        let older = all.older.map(|o| Missed {
            first: o.first,
            last: o.last,
            count: o.count,
        });
        let mut missed: Vec<Missed> = older
            .into_iter()
            .chain(all.recent.into_iter().map(each))
            .collect();
        let last = missed.pop()?;
        let within = e.jitter + e.job.start_within;
        let after = last.last.0.saturating_add(within.as_millis() as i64) + LATER_MS;
        let claim = Claim {
            job: e.job.name.clone(),
            target: Target::Scheduled(last.last),
            known: e.known,
            missed,
            run: RunId::random(),
            instance: self.instance.clone(),
            host: self.host.clone(),
            trigger: Trigger::Schedule,
            start_by: claim::REMOVED,
            lease: e.job.lease.length.as_millis() as i64,
            overlap: e.job.overlap,
            on_crash: e.job.on_crash,
            max_attempts: e.job.max_attempts,
            def: e.job.digest.clone(),
            observed: None,
            holds: vec![],
        };
        Some((claim, after))
    }

    /// Has the store record what a removed job has left, after the moment up to which another instance, which may have
    /// the job for longer or for good, may start it.
    async fn give_up(self: Arc<Self>, mut claim: Claim, schedules: &[Arc<Schedule>], after: i64) {
        let mut away = AWAY.0;
        loop {
            let early = after - self.clock.now_us().unwrap_or(0) / 1000;
            if early > 0 {
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_millis(early.min(HOUR_MS) as u64)) => continue,
                    () = self.stop.cancelled() => return,
                }
            }
            if self.job(&claim.job).is_some() {
                // It is back, and has looked after this itself.
                return;
            }
            match self.batcher.claim(claim.clone()).await {
                Ok(reply) if reply.value == Answer::InDoubt => self.note_clock(&reply),
                Ok(Reply {
                    value: Answer::Behind { newest, early },
                    ..
                }) => {
                    let left = |m| timetable::undecided(schedules, newest, &early, m);
                    claim.missed = claim.missed.into_iter().flat_map(left).collect();
                    continue;
                }
                Ok(reply) => {
                    self.note_clock(&reply);
                    // Else it was decided by another, or lost with the state of the store.
                    if let (Answer::Recorded { outcome, reason }, Target::Scheduled(at)) =
                        (reply.value, claim.target)
                    {
                        info!(job = %claim.job, occurrence = %at, %outcome, reason, "not run");
                        self.journal(&claim.job, at, outcome.as_str(), reason);
                    }
                    return;
                }
                Err(e) if !e.is_transient() => {
                    warn!(job = %claim.job, error = %e, "cannot record what the removed job leaves");
                    return;
                }
                Err(_) => {}
            }
            tokio::select! {
                () = tokio::time::sleep(away) => {}
                () = self.stop.cancelled() => return,
            }
            away = (away * 2).min(AWAY.1);
        }
    }

    /// How long nothing may be granted after the store lost its data, as far as this instance knows.
    pub fn quarantine(&self) -> Duration {
        Duration::from_millis(self.quarantine.load(Ordering::Relaxed))
    }
    fn lengthen(&self, quarantine: Duration) {
        let ms = u64::try_from(quarantine.as_millis()).unwrap_or(u64::MAX);
        self.quarantine.fetch_max(ms, Ordering::Relaxed);
    }

    /// Watches a lease, as an answer that came at `received` showed it. True: it was seen unchanged for its whole
    /// length.
    fn saw(&self, job: &JobName, open: &Open, received: Boottime) -> bool {
        let every = self.poll_every(job, open);
        let seen = self.entry(job, |e| {
            e.quarantine = observe::quarantine(&e.job.lease, e.quarantine, open);
            // While the job is there for sure: nobody would take the watch of a removed one away again.
            (self.watches.add(job, open, received, every), e.quarantine)
        });
        let Some((lapsed, quarantine)) = seen else {
            return false;
        };
        self.lengthen(quarantine);
        lapsed
    }

    pub fn job(&self, job: &JobName) -> Option<Arc<Job>> {
        self.entry(job, |e| e.job.clone())
    }

    pub fn set_live(&self, live: Arc<[InstanceId]>) {
        *self.live.lock().unwrap_or_else(PoisonError::into_inner) = live;
    }
    fn live(&self) -> Arc<[InstanceId]> {
        self.live
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub fn set_draining(&self, on: bool) {
        let mut jobs = self.lock();
        let was = self.draining.load(Ordering::SeqCst);
        for e in jobs.values_mut() {
            if was && !on {
                // Others have worked meanwhile, or nobody has: look where each job stands and what is overdue before
                // anything is claimed.
                (e.ready, e.registered, e.primed) = (false, false, false);
            }
            e.changed.tell();
        }
        self.draining.store(on, Ordering::SeqCst);
        drop(jobs);
        self.enrol.notify_one();
    }
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst) || self.stop.is_cancelled()
    }

    /// Whether the store must not be relied on, and why: nothing is claimed until it may. What runs goes on.
    pub fn set_unfit(&self, why: Option<String>) {
        let fit = why.is_none();
        *self.unfit.lock().unwrap_or_else(PoisonError::into_inner) = why.map(Into::into);
        if fit {
            for e in self.lock().values() {
                e.changed.tell();
            }
        }
    }
    /// Why nothing is claimed at present: as a decision and in words.
    fn unfit(&self) -> Option<(&'static str, Arc<str>)> {
        if let Some(ahead_us) = self.clock.doubt_us() {
            return Some(("clock", belief::in_words(ahead_us).into()));
        }
        let why = self.unfit.lock().unwrap_or_else(PoisonError::into_inner);
        Some(("store_error", why.clone()?))
    }

    /// Looks again at the jobs whose register stands in the future: it may have been put right.
    pub fn look_at_those_ahead(&self) {
        let Some(now_us) = self.clock.now_us() else {
            return;
        };
        let mut some = false;
        for e in self.lock().values_mut() {
            if e.ahead(Occurrence(now_us / 1000)) {
                (e.registered, some) = (false, true);
            }
        }
        if some {
            self.enrol.notify_one();
        }
    }

    /// The jobs that this instance has and that are enabled.
    pub fn enabled(&self) -> BTreeSet<JobName> {
        let jobs = self.lock();
        let enabled = jobs.values().filter(|e| e.job.enabled);
        enabled.map(|e| e.job.name.clone()).collect()
    }

    /// All jobs are registered again: hints may have been lost, or the store its data.
    pub fn resync(&self) {
        for e in self.lock().values_mut() {
            (e.registered, e.held_back) = (false, None);
        }
        self.enrol.notify_one();
    }

    /// A question was answered with a grant. False: its run was handed over before.
    fn hand_over(&self, job: &JobName, target: &Target, at: Occurrence, run: RunId) -> bool {
        let mut jobs = self.lock();
        let target = flat(target);
        if let Some(e) = jobs.get_mut(job) {
            e.known = e.known.max(at);
            e.asked.remove(&target);
            return e.runs.begin(run);
        }
        // The job was removed meanwhile. What was granted is run all the same, and when the job comes back this is
        // no open question any more.
        let mut parted = self.parted();
        let (asked, runs) = parted.entry(job.clone()).or_default();
        asked.remove(&target);
        runs.begin(run)
    }

    /// Nothing of a run goes on any more, and it is about to be settled. Until it is, the store has it for a run that goes
    /// on, and would skip for its sake what was due since.
    pub fn run_over(&self, job: &JobName, run: RunId) {
        if self.entry(job, |e| e.runs.over(run)).is_none()
            && let Some((_, runs)) = self.parted().get_mut(job)
        {
            runs.over(run);
        }
    }

    /// A run has ended here; its lease is given back or lost. `again`: the store awaits another attempt.
    pub fn run_ended(self: &Arc<Self>, job: &JobName, run: RunId, again: Option<Occurrence>) {
        let there = self.entry(job, |e| {
            e.runs.end(run);
            e.changed.tell();
        });
        if there.is_none()
            && let Some((_, runs)) = self.parted().get_mut(job)
        {
            runs.end(run);
        }
        if let Some(at) = again
            && self.job(job).is_some()
        {
            self.again(job.clone(), at);
        }
    }

    /// This instance's place in the order in which the live ones go for an occurrence: the same on all of them.
    fn rank(&self, job: &JobName, target: &Target, without: Option<&InstanceId>) -> usize {
        let live = self.live();
        let mut key = Vec::with_capacity(64);
        let weight = |id: &InstanceId, key: &mut Vec<u8>| {
            key.clear();
            key.extend_from_slice(id.as_str().as_bytes());
            key.push(0);
            key.extend_from_slice(job.as_str().as_bytes());
            key.push(0);
            match target {
                Target::Scheduled(at) => key.extend_from_slice(&at.0.to_le_bytes()),
                Target::Manual { key: k, .. } => key.extend_from_slice(k.as_bytes()),
            }
            xxhash_rust::xxh3::xxh3_64(key)
        };
        let ours = weight(&self.instance, &mut key);
        live.iter()
            .filter(|id| **id != self.instance && Some(*id) != without)
            .filter(|id| weight(id, &mut key) > ours)
            .count()
    }

    /// Occurrences that are due. Returns at once; each job's driver takes over.
    pub fn due(self: &Arc<Self>, due: Vec<Due>) {
        let mut drive = Vec::with_capacity(due.len());
        let now = self.clock.now_us().unwrap_or(0) / 1000;
        {
            let mut jobs = self.lock();
            for d in due {
                let Some(e) = jobs.get_mut(&d.job) else {
                    continue;
                };
                if let Target::Scheduled(at) = d.target
                    && at <= e.known
                {
                    continue;
                }
                let name = d.job.clone();
                if !d.overdue && now - d.start_at > STALLED_MS {
                    e.queue.outage();
                }
                if !e.queue.absorb(&e.job, &d) {
                    let asked = &e.asked;
                    e.queue.push(d, now, |t| asked.contains_key(t));
                    e.queue.compact(&e.job, |t| asked.contains_key(t));
                }
                if !std::mem::replace(&mut e.driven, true) {
                    drive.push(name);
                }
            }
        }
        if self.slots.is_some() {
            // Who asks first gets a slot first: not the same jobs every time.
            fastrand::shuffle(&mut drive);
        }
        for job in drive {
            let this = self.clone();
            self.tasks.spawn(async move { this.drive(job).await });
        }
    }

    /// Many occurrences of a job are due, and nobody looked for a while. `absent`: there was no instance of us. Returns
    /// at once.
    pub fn overdue(self: &Arc<Self>, job: &JobName, backlog: Backlog, absent: bool) {
        let now = self.clock.now_us().unwrap_or(0) / 1000;
        let drive = self.entry(job, |e| {
            let asked = &e.asked;
            let segment = Segment { backlog, absent };
            e.queue.overdue(segment, now, |t| asked.contains_key(t));
            if !absent {
                e.queue.outage();
            }
            !std::mem::replace(&mut e.driven, true)
        });
        if drive == Some(true) {
            let (this, job) = (self.clone(), job.clone());
            self.tasks.spawn(async move { this.drive(job).await });
        }
    }

    /// Works through a job's due occurrences, in order, until none is left.
    async fn drive(self: Arc<Self>, job: JobName) {
        let mut away = AWAY.0;
        loop {
            let now = self.clock.now_us().unwrap_or(0) / 1000;
            // Heard of from before the lock is given back: nothing that changes is slept through.
            let next = self.entry(&job, |e| {
                let asked = &e.asked;
                if e.queue.is_empty() {
                    e.driven = false;
                    return Next::Idle;
                }
                if !e.ready {
                    e.queue.outage();
                    return Next::Wait(e.changed.next());
                }
                if let Some(segments) = e.queue.next_segments(e.known) {
                    return Next::Unfold(e.job.clone(), segments, e.known);
                }
                e.queue.trim(&e.job.schedules, e.known);
                match e.queue.plan(&e.job, now, |t| asked.contains_key(t)) {
                    Some(plan) => Next::Ask(plan, e.changed.next()),
                    None => {
                        e.driven = false;
                        Next::Idle
                    }
                }
            });
            let (plan, woken) = match next {
                Some(Next::Ask(plan, woken)) => (plan, woken),
                Some(Next::Wait(woken)) => {
                    tokio::select! {
                        () = woken => {}
                        () = tokio::time::sleep(Duration::from_millis(250)) => {}
                        () = self.stop.cancelled() => return,
                    }
                    continue;
                }
                Some(Next::Unfold(config, segments, known)) => {
                    let unfolded = {
                        let _turn = self.counting.acquire().await;
                        pending::unfold(segments, &config, now, known)
                    };
                    self.entry(&job, |e| {
                        let asked = &e.asked;
                        e.queue.unfolded(unfolded, now, |t| asked.contains_key(t));
                    });
                    tokio::task::yield_now().await;
                    continue;
                }
                Some(Next::Idle) | None => return,
            };
            let ask = Ask {
                target: plan.target.clone(),
                missed: plan.missed,
                trigger: plan.trigger,
                start_by: plan.start_by,
                again: false,
            };
            let outcome = self.contest(&job, ask).await;
            let foreseen = self.foreseen.forget(&job, &plan.target);
            let won = matches!(outcome, Contest::Won(_));
            if foreseen || won {
                self.entry(&job, |e| e.in_vain = !won);
            }
            match outcome {
                Contest::Undecided => {
                    self.entry(&job, |e| e.queue.outage());
                    tokio::select! {
                        () = tokio::time::sleep(away) => {}
                        () = woken => {}
                        () = self.stop.cancelled() => return,
                    }
                    away = (away * 2).min(AWAY.1);
                }
                // It may be back already, and this is then its driver.
                Contest::Gone => {}
                Contest::Draining => {
                    // Others do it. What they decide, and what nobody does, is learned when this instance claims again.
                    self.entry(&job, |e| {
                        if self.draining() {
                            e.queue.clear();
                            e.triggers.clear();
                        }
                    });
                }
                // What others decided is known now, and planned for.
                Contest::Behind => {}
                _ => {
                    away = AWAY.0;
                    self.entry(&job, |e| {
                        e.trouble = None;
                        e.queue.done(&plan.target);
                        if let Target::Manual { key, .. } = &plan.target {
                            e.triggers.remove(key);
                        }
                    });
                }
            }
        }
    }

    /// One flight for each occurrence, however many ask for it.
    pub fn contest(self: &Arc<Self>, job: &JobName, ask: Ask) -> BoxFuture<'static, Contest> {
        // `before` of a manual trigger differs between callers and must not make two flights of one.
        // Nor must whoever looks at a decided one join those that end when they find it decided.
        let key = (job.clone(), flat(&ask.target), ask.again);
        let this = self.clone();
        let lead = Lead {
            elector: self.clone(),
            job: job.clone(),
            ask,
        };
        Box::pin(async move { this.flights.work(&key, lead.compete()).await })
    }

    /// An occurrence of ours or another's that is open is to be decided again: its next attempt, or its holder is gone.
    fn again(self: &Arc<Self>, job: JobName, at: Occurrence) {
        // One at a time waits for it, however often it is seen to be open.
        if self.entry(&job, |e| e.again.insert(at)) != Some(true) {
            return;
        }
        let this = self.clone();
        self.tasks.spawn(async move {
            let outcome = this.contest(&job, Ask::again(at)).await;
            if outcome == Contest::Undecided {
                tokio::select! {
                    () = tokio::time::sleep(LOOK_AGAIN) => {}
                    () = this.stop.cancelled() => {}
                }
            }
            this.entry(&job, |e| e.again.remove(&at));
            if outcome == Contest::Undecided {
                // Registering finds the open entry, and watches it.
                this.entry(&job, |e| e.registered = false);
                this.enrol.notify_one();
            }
        });
    }

    /// What the fleet tells. A hint may be lost: the watches and registering find the same a little later.
    pub fn hear(self: &Arc<Self>, event: &Event) {
        match event {
            Event::Ended { job } => {
                self.entry(job, |e| e.changed.tell());
            }
            Event::Again { job, occurrence } => {
                if self.job(job).is_some() {
                    self.entry(job, |e| e.changed.tell());
                    self.again(job.clone(), *occurrence);
                }
            }
            Event::Triggered { job, key } => self.triggered(job, key, None),
            Event::Controlled { job } => {
                self.entry(job, |e| e.registered = false);
                self.enrol.notify_one();
            }
            Event::Gap => self.resync(),
            Event::Stop { .. } | Event::Drain | Event::Unlocked { .. } => {}
        }
    }

    /// A manual trigger waits in the store.
    fn triggered(self: &Arc<Self>, job: &JobName, key: &str, at: Option<i64>) {
        // Before this instance knows the store's clock it has registered nothing: it hears of the trigger when it does.
        let Some(at) = at.or_else(|| self.clock.now_us().map(|us| us / 1000)) else {
            return;
        };
        let Some(config) = self.entry(job, |e| {
            let known = e.triggers.entry(key.to_owned());
            known.or_insert_with(Boottime::now);
            e.job.clone()
        }) else {
            return;
        };
        self.due(vec![Due {
            job: job.clone(),
            target: Target::Manual {
                key: key.to_owned(),
                before: None,
            },
            start_at: at,
            start_by: at + config.start_within.as_millis() as i64,
            overdue: false,
            missed: vec![],
        }]);
    }

    /// Registers what is not registered in the present incarnation. `epoch` says whether a state from before may be
    /// adopted. Returns how many are left.
    ///
    /// # Errors
    /// The store's; what was registered until then is.
    pub async fn enrol(self: &Arc<Self>, epoch: &Epoch) -> Result<usize, store::Error> {
        let now = Boottime::now();
        let mut left = 0;
        let todo: Vec<(Arc<Job>, Register, Duration)> = self
            .lock()
            .values()
            .filter(|e| !(e.ready && e.registered))
            .filter(|e| {
                let ask = e.next_ask(epoch, now).is_zero();
                left += usize::from(!ask);
                ask
            })
            .map(|e| (e.job.clone(), self.registration(e), e.quarantine))
            .collect();
        for chunk in todo.chunks(store::BATCH) {
            let ask: Vec<Register> = chunk.iter().map(|(_, ask, _)| ask.clone()).collect();
            let reply = match self.register(&ask).await {
                Err(e) if !e.is_transient() => {
                    left += chunk.len();
                    chunk.iter().for_each(|(job, ..)| self.refused(job, &e));
                    continue;
                }
                reply => reply?,
            };
            self.note_clock(&reply);
            let mut adopt = vec![];
            for ((job, ask, quarantine), answer) in chunk.iter().zip(reply.value) {
                let (answer, state) = match answer {
                    Ok(answer) => answer,
                    Err(e) => {
                        left += 1;
                        self.refused(job, &e);
                        continue;
                    }
                };
                match answer {
                    Registration::Ready => self.enrolled(job, state.unwrap_or_default()),
                    Registration::Quarantined | Registration::Absent => {
                        left += 1;
                        if epoch.inc == reply.inc && epoch.adoptable(*quarantine) {
                            let mut r = ask.clone();
                            r.adopt = Some(epoch.inc.to_string());
                            r.epoch = Some(epoch.id.to_string());
                            let newest = state
                                .as_ref()
                                .map_or(0, |s| s.newest.max(s.since))
                                .max(ask.known.0);
                            let early = state.map_or(vec![], |s| s.early);
                            let lost = self.lost(job, newest, self.born(epoch));
                            r.lost = lost.map_or(vec![], |l| {
                                timetable::undecided(&job.schedules, Occurrence(newest), &early, l)
                            });
                            adopt.push((job.clone(), r));
                            // That may have taken a while: there are others to run.
                            tokio::task::yield_now().await;
                        } else if epoch.inc == reply.inc {
                            self.entry(&job.name, |e| {
                                e.held_back = Some((epoch.inc.clone(), epoch.id.clone()));
                            });
                        }
                    }
                }
            }
            let (jobs, asks): (Vec<_>, Vec<_>) = adopt.into_iter().unzip();
            if asks.is_empty() {
                continue;
            }
            // Only if the epoch is still the one that was seen before: data that was lost since then would make a job
            // with a living holder look like a new one.
            let look = self.store.heartbeat(None).await?;
            if look.inc != epoch.inc || look.value.id != epoch.id {
                continue;
            }
            let reply = self.register(&asks).await?;
            for ((job, ask), answer) in jobs.iter().zip(&asks).zip(reply.value) {
                let (answer, state) = match answer {
                    Ok(answer) => answer,
                    Err(e) => {
                        self.refused(job, &e);
                        continue;
                    }
                };
                if answer == Registration::Ready {
                    left -= 1;
                    if let Some(last) = ask.lost.last() {
                        let count: u64 = ask.lost.iter().map(|l| l.count).sum();
                        warn!(job = %job.name, occurrences = count, until = %last.last,
                            "the store lost its state: nobody knows what became of these occurrences, recorded as unknown");
                    }
                    self.enrolled(job, state.unwrap_or_default());
                }
            }
        }
        Ok(left)
    }

    /// How long there is nothing to register in `epoch`; None: all jobs are.
    pub fn next_enrol(&self, epoch: &Epoch) -> Option<Duration> {
        let (jobs, now) = (self.lock(), Boottime::now());
        let left = jobs.values().filter(|e| !(e.ready && e.registered));
        left.map(|e| e.next_ask(epoch, now)).min()
    }

    /// One that the store refuses (a key of another type, a state of another version) must not take the others down:
    /// then each is registered by itself.
    async fn register(
        &self,
        asks: &[Register],
    ) -> Result<Reply<Vec<Result<(Registration, Option<State>), store::Error>>>, store::Error> {
        let refused = match self.store.register(asks).await {
            Ok(reply) => return Ok(reply.map(|v| v.into_iter().map(Ok).collect())),
            Err(e) if e.is_transient() || asks.len() == 1 => return Err(e),
            Err(e) => e,
        };
        let (mut all, mut some) = (vec![], None);
        for ask in asks {
            match self.store.register(std::slice::from_ref(ask)).await {
                Ok(mut reply) => {
                    all.push(reply.value.pop().ok_or_else(|| refused.clone()));
                    some = Some(reply);
                }
                Err(e) if e.is_transient() => return Err(e),
                Err(e) => all.push(Err(e)),
            }
        }
        some.map(|reply| reply.map(|_| all)).ok_or(refused)
    }

    /// The store refuses this job. Said once, until it works again.
    fn refused(&self, job: &Job, e: &store::Error) {
        let target = Box::new(Target::Scheduled(Occurrence(0)));
        let first = self.entry(&job.name, |j| {
            j.refused = Some(Boottime::now());
            j.trouble.replace(target).is_none()
        });
        if first == Some(true) {
            warn!(job = %job.name, error = %e, "cannot register the job, and so not run it; trying again until it works");
        }
    }

    /// The birth of the epoch, Unix ms. Its clock may have been wrong then: it was not later than we saw it.
    fn born(&self, epoch: &Epoch) -> i64 {
        let seen = self.clock.at(epoch.first_seen);
        seen.map_or(epoch.born, |us| epoch.born.min(us.div_euclid(1000)))
    }

    fn registration(&self, e: &Entry) -> Register {
        let job = &e.job;
        Register {
            job: job.name.clone(),
            sched: job.schedule_digest.to_string(),
            def: job.digest.clone(),
            known: e.known,
            adopt: None,
            epoch: None,
            lost: vec![],
            enabled: job.enabled,
            told: e.told.clone(),
            instance: self.instance.clone(),
            host: self.host.clone(),
            on_crash: match job.on_state_loss {
                OnStateLoss::Skip => OnCrash::Fail,
                OnStateLoss::Rerun => job.on_crash,
            },
            max_attempts: job.max_attempts,
        }
    }

    /// The occurrences after `newest` and up to the birth of the epoch, when they are to be given up.
    fn lost(&self, job: &Job, newest: i64, born: i64) -> Option<Missed> {
        if newest == 0 || job.on_state_loss == OnStateLoss::Rerun {
            return None;
        }
        let all = timetable::overdue(&job.schedules, Occurrence(newest), Occurrence(born), 1);
        let recent = all.recent.last()?;
        let (first, count) = all.older.map_or((*recent, 0), |o| (o.first, o.count));
        Some(Missed {
            first,
            last: *recent,
            count: count + 1,
        })
    }

    /// The store knows the job: from here on its occurrences can be claimed.
    fn enrolled(self: &Arc<Self>, job: &Arc<Job>, state: State) {
        let now = Occurrence(self.clock.now_us().unwrap_or(0) / 1000);
        // What was registered may have been replaced meanwhile. Then the new definition's turn comes, and not before
        // is anything of it the store's.
        let same = |e: &Entry| Arc::ptr_eq(&e.job, job);
        let Some(Some(prime)) = self.entry(&job.name, |e| {
            same(e).then(|| {
                // What lies in the future was learned by a clock that was wrong, and may have been put right.
                let ahead = e.ahead(now);
                if ahead {
                    (e.known, e.since) = (Occurrence(state.newest), Occurrence(state.since));
                }
                e.known = e.known.max(Occurrence(state.newest));
                e.since = e.since.max(Occurrence(state.since));
                e.told = Told::of(&state);
                if ahead && !e.ahead(now) {
                    e.plan_anew();
                }
                let prime = !std::mem::replace(&mut e.primed, true);
                if e.ahead(now) {
                    warn!(job = %job.name, until = %e.known.max(e.since),
                        "what is planned up to then counts as decided, although it lies in the future: the store's clock \
                         was wrong; nothing of the job starts until then, or until `soloist rewind` puts it right");
                }
                prime
            })
        }) else {
            return;
        };
        if prime {
            // An occurrence whose jitter has not passed yet is not overdue.
            let floor = Occurrence(state.newest.max(state.since));
            let until = Occurrence(now.0 - job.jitter.as_millis() as i64).max(floor);
            let overdue = next_of(&job.schedules, floor).filter(|next| *next <= until);
            if job.enabled && overdue.is_some() {
                info!(job = %job.name, after = %floor, %until, "catching up after downtime");
                let jitter = self.entry(&job.name, |e| e.jitter);
                let backlog = Backlog {
                    schedules: job.schedules.clone(),
                    jitter: jitter.unwrap_or(job.jitter),
                    after: floor,
                    last: until,
                };
                self.overdue(&job.name, backlog, true);
            }
            let _ = self.plans.send(Plan::From(job.clone(), until));
        }
        // Grants of ours whose answers got lost, and whose occurrences nobody here asks for any more.
        let unheard = self.entry(&job.name, |e| {
            let (again, held) = (&e.again, |run: &RunId| state.held_by(*run).is_some());
            e.asked.retain(|target, run| {
                !matches!(target, Target::Scheduled(at)
                    if at.0 <= state.newest && !again.contains(at) && !held(run))
            });
            let ours = |o: &&Open| e.asked.values().any(|run| *run == o.run);
            let ours = state.open.iter().filter(ours);
            ours.map(|o| (o.occurrence, o.key.clone(), o.granted_at))
                .collect::<Vec<_>>()
        });
        // Only now: nothing newer may be claimed before what is overdue is in the queue.
        self.entry(&job.name, |e| {
            // Not if a drain ended meanwhile: then what is overdue has to be looked at once more.
            if same(e) && e.primed {
                (e.ready, e.registered) = (true, true);
                (e.trouble, e.held_back, e.refused) = (None, None, None);
                e.changed.tell();
            }
        });
        for (at, key, granted_at) in unheard.unwrap_or_default() {
            match key {
                None => self.again(job.name.clone(), at),
                Some(key) => self.triggered(&job.name, &key, Some(granted_at)),
            }
        }
        let received = Boottime::now();
        for open in &state.open {
            let ours = self
                .entry(&job.name, |e| e.runs.active.contains_key(&open.run))
                .unwrap_or(false);
            if !ours || open.again.is_some() {
                self.saw(&job.name, open, received);
            }
            if open.again.is_some() {
                self.again(job.name.clone(), open.occurrence);
            }
        }
        for pending in &state.triggers {
            self.triggered(&job.name, &pending.key, Some(pending.at));
        }
    }

    /// How often to look at a lease: the first in rank often enough to take over a tenth of a lease after it lapsed,
    /// the others as its substitutes.
    fn poll_every(&self, job: &JobName, open: &Open) -> Duration {
        let lease = Duration::from_millis(open.lease.max(1) as u64);
        match self.rank(
            job,
            &Target::Scheduled(open.occurrence),
            Some(&open.instance),
        ) {
            0 => lease / 12,
            _ => lease / 2,
        }
    }

    /// Looks at the leases that others hold, and takes over where one lapses. Runs until `stop`.
    pub async fn watch(self: Arc<Self>) {
        loop {
            // At most a second, because a suspend stops the runtime's timers; at least a little, so that many looks
            // become one.
            let next = self.watches.next_look();
            let wait = next.map_or(Duration::from_secs(1), |at| at.since(Boottime::now()));
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.watches.changed.notified() => continue,
                () = tokio::time::sleep(wait.clamp(Duration::from_millis(5), Duration::from_secs(1))) => {}
            }
            if next.is_none_or(|at| at > Boottime::now()) {
                continue;
            }
            let due = self.watches.due(Boottime::now());
            for names in due.chunks(store::BATCH) {
                match self.store.observe(names).await {
                    Ok(reply) => {
                        self.note_clock(&reply);
                        for (name, state) in names.iter().zip(&reply.value) {
                            self.observed(name, state.as_ref(), reply.received);
                        }
                    }
                    // One that cannot be read must not hide the others.
                    Err(e) if !e.is_transient() => {
                        for name in names {
                            match self.store.observe(std::slice::from_ref(name)).await {
                                Ok(reply) => {
                                    let state = reply.value.first().and_then(Option::as_ref);
                                    self.observed(name, state, reply.received);
                                }
                                Err(e) => {
                                    debug!(job = %name, error = %e, "cannot look at the lease of another");
                                }
                            }
                        }
                    }
                    Err(e) => {
                        debug!(error = %e, "cannot look at the leases of others");
                        self.watches
                            .postpone(names, Boottime::now() + Duration::from_millis(200));
                        break;
                    }
                }
            }
        }
    }

    fn observed(self: &Arc<Self>, job: &JobName, state: Option<&State>, received: Boottime) {
        let open = state.map(|s| s.open.as_slice()).unwrap_or_default();
        for gone in self.watches.retain(job, open) {
            debug!(job = %job, occurrence = %gone, "ended elsewhere");
            self.entry(job, |e| e.changed.tell());
        }
        for e in open {
            if !self.watches.has(job, e.occurrence) {
                continue;
            }
            let lapsed = self.saw(job, e, received);
            if e.again.is_some() || lapsed {
                self.again(job.clone(), e.occurrence);
            }
        }
    }

    fn note_clock<T>(&self, reply: &Reply<T>) {
        note_clock(&self.clock, reply);
    }

    fn journal(&self, job: &JobName, occurrence: Occurrence, decision: &str, detail: String) {
        let at = self.clock.now_us().unwrap_or(0) / 1000;
        let instance = self.instance.clone();
        let d = Decision {
            job: job.clone(),
            occurrence,
            instance,
            at,
            decision: decision.to_owned(),
            detail,
        };
        // Full: the store has been away for long. The newest are lost, which `why` says by having nothing.
        let _ = self.journal.try_send(d);
    }
}

/// Takes the store's clock in; says so when it was stepped.
pub fn note_clock<T>(clock: &StoreClock, reply: &Reply<T>) {
    note_sample(clock.sample(reply.now_us, reply.sent, reply.received));
}

pub fn note_sample(sampled: Sampled) {
    match sampled {
        Sampled::Even | Sampled::InDoubt => {}
        Sampled::Stepped(step) => warn!(
            step_ms = step / 1000,
            "the store's clock was stepped; occurrences follow it"
        ),
        Sampled::Doubted(step) => error!("{}", belief::in_words(step)),
        Sampled::Restored => info!("the store's clock is right again: starting again"),
    }
}

/// What a contest is about.
#[derive(Debug, Clone)]
pub struct Ask {
    pub target: Target,
    /// Given up before it.
    pub missed: Vec<Missed>,
    pub trigger: Trigger,
    /// Unix ms of the store's clock: not later than this.
    pub start_by: i64,
    /// It was decided before, and is to be looked at again: for its next attempt, or because its holder is gone.
    pub again: bool,
}

impl Ask {
    fn again(at: Occurrence) -> Self {
        let target = Target::Scheduled(at);
        Self {
            target,
            missed: vec![],
            trigger: Trigger::Schedule,
            start_by: i64::MAX,
            again: true,
        }
    }
}

/// What is known of the store's epoch: the time from a start of the server, or from the loss of its data, to the next.
#[derive(Debug, Clone)]
pub struct Epoch {
    pub inc: Arc<str>,
    /// A new one where the data was lost under the same incarnation.
    pub id: Arc<str>,
    /// Unix ms of the store's clock.
    pub born: i64,
    /// Somebody has vouched for it.
    pub open: bool,
    /// The longest that any instance needs.
    pub quarantine: Duration,
    /// When this instance saw it first.
    pub first_seen: Boottime,
}

impl Epoch {
    /// Nobody can hold a lease from before it any more that needs `quarantine` to die and was not reclaimed.
    fn adoptable(&self, quarantine: Duration) -> bool {
        self.adoptable_in(quarantine, Boottime::now()).is_zero()
    }
    fn adoptable_in(&self, quarantine: Duration, now: Boottime) -> Duration {
        match self.open {
            true => Duration::ZERO,
            false => (self.first_seen + quarantine).since(now),
        }
    }
}

/// The leader of one flight.
struct Lead {
    elector: Arc<Elector>,
    job: JobName,
    ask: Ask,
}

impl Lead {
    async fn compete(mut self) -> Contest {
        let el = self.elector.clone();
        let rank = el.rank(&self.job, &self.ask.target, None);
        if rank > 0 {
            tokio::time::sleep((HANDICAP * rank as u32).min(HANDICAP_MAX)).await;
        }
        let mut slot = None;
        let mut failures = 0;
        // Answers in a row that said to ask again soon.
        let mut soon = 0;
        loop {
            if el.draining() {
                match self.granted_unheard().await {
                    Ok(true) => {}
                    Err(_) if !el.stop.is_cancelled() => return Contest::Undecided,
                    Ok(false) | Err(_) => {
                        self.note("draining", String::new());
                        self.forget_nonce();
                        return Contest::Draining;
                    }
                }
            }
            if let Some((decision, why)) = el.unfit() {
                // The daemon says it aloud; here it is kept for `why`, once for each occurrence.
                let target = Box::new(flat(&self.ask.target));
                if el.entry(&self.job, |j| {
                    j.unfit.replace(target.clone()) != Some(target)
                }) == Some(true)
                {
                    self.note(decision, why.to_string());
                }
                return Contest::Undecided;
            }
            // Whoever wakes late finds the occurrence decided, and asks nobody.
            let target = flat(&self.ask.target);
            let Some((job, known, asked, undecided, ready, settling, since, holds, woken)) = el
                .entry(&self.job, |e| {
                    let floor = e.known.max(e.since);
                    let undecided = (floor, e.queue.first_after(e.known));
                    // As in `drive`: from here on nothing that changes is slept through.
                    let woken = e.changed.next();
                    let asked = e.asked.contains_key(&target);
                    let ready = e.ready && !e.queue.jumped(e.known, &target, &self.ask.missed);
                    let settling =
                        e.job.overlap != Overlap::Allow && e.runs.active.values().any(|over| *over);
                    (
                        e.job.clone(),
                        e.known,
                        asked,
                        undecided,
                        ready,
                        settling,
                        self.key().and_then(|key| e.triggers.get(key).copied()),
                        e.runs.active.keys().copied().collect(),
                        woken,
                    )
                })
            else {
                return Contest::Gone;
            };
            tokio::pin!(woken);
            // A trigger is waited for on this instance's own clock: the store's may stand behind.
            let over = since.map(|since| since + job.start_within);
            let left = over.map(|over| {
                let over = over + Duration::from_millis(LATER_MS as u64);
                over.since(Boottime::now())
            });
            let passed = left == Some(Duration::ZERO);
            let too_late = passed
                || el.clock.now_us().unwrap_or(0) / 1000
                    > self.ask.start_by.saturating_add(LATER_MS);
            let over = over.or_else(|| el.clock.when(self.ask.start_by));
            let doubted = too_late
                && self.ask.start_by > claim::NEVER
                && over.is_some_and(|over| el.clock.doubted_at(over));
            if let Target::Scheduled(at) = self.ask.target
                && at <= known
                && !self.ask.again
                // What we asked for and have not heard of may be decided, and ours.
                && !asked
            {
                return Contest::Settled;
            }
            if !ready && !self.ask.again {
                // What is overdue before it is not in the queue yet, or came there since this one was planned.
                return Contest::Undecided;
            }
            if settling {
                tokio::select! {
                    () = woken.as_mut() => {}
                    () = tokio::time::sleep(LOOK_AGAIN) => {}
                    () = el.stop.cancelled() => {}
                }
                continue;
            }
            if let Target::Manual { before, .. } = &mut self.ask.target {
                // Not the next one from now on: one that has passed may still wait for its jitter or its turn, and
                // must not be jumped over.
                let (floor, queued) = undecided;
                let next = next_of(&job.schedules, floor).filter(|_| job.enabled);
                *before = next.into_iter().chain(queued).min();
            }
            if let (None, Some(slots), false) = (&slot, &el.slots, too_late) {
                // A slot first: while this instance is busy, another one may have it. When nobody has had it in time,
                // it needs none to be recorded.
                slot = slots.clone().try_acquire_owned().ok();
                if slot.is_none() {
                    let now = el.clock.now_us().unwrap_or(0) / 1000;
                    let left = self.ask.start_by.saturating_sub(now).clamp(0, HOUR_MS) as u64;
                    tokio::select! {
                        permit = slots.clone().acquire_owned() => slot = permit.ok(),
                        () = tokio::time::sleep(Duration::from_millis(left + 1 + LATER_MS as u64)) => {}
                        () = woken.as_mut() => {}
                        () = el.stop.cancelled() => return Contest::Draining,
                    }
                    // It may be decided, removed or drained by now.
                    continue;
                }
            }
            let place = tokio::select! {
                biased;
                place = el.batcher.place() => place,
                // It may be decided, removed or drained by now.
                () = woken.as_mut() => continue,
                () = el.stop.cancelled() => continue,
            };
            let run = el.nonce(&self.job, &self.ask.target);
            let claim = Claim {
                job: self.job.clone(),
                target: self.ask.target.clone(),
                known,
                missed: self.ask.missed.clone(),
                run,
                instance: el.instance.clone(),
                host: el.host.clone(),
                trigger: self.ask.trigger,
                start_by: match passed {
                    _ if doubted => claim::PASSED_IN_DOUBT,
                    true => claim::PASSED,
                    false => self.ask.start_by,
                },
                lease: job.lease.length.as_millis() as i64,
                overlap: job.overlap,
                on_crash: job.on_crash,
                max_attempts: job.max_attempts,
                def: job.digest.clone(),
                observed: el
                    .watches
                    .lapsed(&self.job, &self.ask.target, Boottime::now()),
                holds,
            };
            let reply = match el.batcher.claim(claim).await {
                Ok(reply) => reply,
                Err(e) => {
                    drop(place);
                    failures += 1;
                    if !e.is_transient() || failures > el.retry.attempts {
                        // Said once, and noted once for each occurrence: an outage must not fill the log.
                        let target = Box::new(flat(&self.ask.target));
                        let before = el.entry(&self.job, |j| j.trouble.replace(target.clone()));
                        if before == Some(None) {
                            warn!(job = %self.job, occurrence = %self.at(), error = %e, "cannot claim; trying again until it works");
                        }
                        if before != Some(Some(target)) {
                            self.note("store_error", e.to_string());
                        }
                        return Contest::Undecided;
                    }
                    tokio::select! {
                        () = tokio::time::sleep(backoff(&el.retry, failures)) => {}
                        () = el.stop.cancelled() => {}
                    }
                    continue;
                }
            };
            el.note_clock(&reply);
            failures = 0;
            let now = reply.now_us / 1000;
            // Only a grant keeps it.
            let place = place.filter(|_| matches!(reply.value, Answer::Granted(_)));
            let wait = match reply.value {
                Answer::Granted(grant) => {
                    if !el.hand_over(&self.job, &self.ask.target, grant.occurrence, run) {
                        debug!(job = %self.job, %run, "granted again: it was handed over before");
                        return Contest::Won(run);
                    }
                    el.watches.drop_one(&self.job, grant.occurrence);
                    el.journal(
                        &self.job,
                        grant.occurrence,
                        "won",
                        format!("attempt {}", grant.attempt),
                    );
                    let key = match &self.ask.target {
                        Target::Manual { key, .. } => Some(key.clone()),
                        Target::Scheduled(_) => None,
                    };
                    (el.start)(Granted {
                        job,
                        grant,
                        run,
                        // The command that was answered, however often and when this was asked before: by asking again with
                        // the same nonce it renewed the lease.
                        sent: reply.sent,
                        start_by: self.ask.start_by,
                        place,
                        granted_at: now,
                        key,
                        // The store grants nothing new after that moment.
                        too_late: grant.attempt == 1 && (passed || now > self.ask.start_by),
                        slot,
                    });
                    return Contest::Won(run);
                }
                Answer::Taken(open) => {
                    if open.def != job.digest {
                        debug!(job = %self.job, holder = %open.instance, "runs with another definition of this job");
                    }
                    if el.saw(&self.job, &open, reply.received) {
                        continue;
                    }
                    self.decided(open.occurrence);
                    self.forget_nonce();
                    el.journal(
                        &self.job,
                        open.occurrence,
                        "lost",
                        format!("to {}", open.instance),
                    );
                    return Contest::Lost { to: open.instance };
                }
                Answer::Settled(last) => {
                    if let Target::Scheduled(at) = self.ask.target {
                        el.watches.drop_one(&self.job, at);
                        self.decided(at);
                    }
                    match &last {
                        Some(l) => el.journal(
                            &self.job,
                            l.occurrence,
                            "lost",
                            format!("to {}, which has {}", l.instance, l.outcome),
                        ),
                        None => self.note("settled", String::new()),
                    }
                    self.forget_nonce();
                    return Contest::Settled;
                }
                Answer::Recorded { outcome, reason } => {
                    if let Target::Scheduled(at) = self.ask.target {
                        el.watches.drop_one(&self.job, at);
                        self.decided(at);
                    }
                    self.forget_nonce();
                    self.note(outcome.as_str(), reason.clone());
                    match outcome {
                        Outcome::Missed | Outcome::Unknown => {
                            warn!(job = %self.job, occurrence = %self.at(), %outcome, reason, "not run");
                        }
                        _ => {
                            info!(job = %self.job, occurrence = %self.at(), %outcome, reason, "not run")
                        }
                    }
                    return Contest::Recorded(outcome);
                }
                Answer::Held(open) => {
                    el.saw(&self.job, &open, reply.received);
                    let lease = Duration::from_millis(open.lease.max(1) as u64);
                    if el
                        .watches
                        .lapsed(&self.job, &self.ask.target, Boottime::now())
                        .is_some()
                    {
                        // Its holder is dead: what piled up behind it is overdue, not queued.
                        el.entry(&self.job, |e| e.queue.outage());
                        pace(&mut soon, Duration::from_millis(1))
                    } else {
                        let expiry = el
                            .watches
                            .expiry(&self.job, open.occurrence, Boottime::now());
                        // For a proof that the holder lives, look soon after its next renewal.
                        self.until_too_late(now, (lease / 10).min(expiry))
                    }
                }
                // There is no room for a trigger before what others have decided already: learn that.
                Answer::Early { .. } if matches!(self.ask.target, Target::Manual { before: Some(b), .. } if b.0 <= now) =>
                {
                    el.entry(&self.job, |e| e.registered = false);
                    el.enrol.notify_one();
                    pace(&mut soon, Duration::from_millis(20))
                }
                // The clock stands behind what is decided. It may be put right at any moment.
                Answer::Early { wait_us } if self.key().is_some() => {
                    let wait = Duration::from_micros(wait_us.max(50) as u64);
                    pace(&mut soon, wait.min(PACE.1))
                }
                // It was due by a clock that was wrong, and has been put right since.
                Answer::Early { wait_us }
                    if wait_us > SLACK.as_micros() as i64
                        && !self.ask.again
                        && el.clock.now_us().is_some() =>
                {
                    self.forget_nonce();
                    el.entry(&self.job, Entry::plan_anew);
                    el.enrol.notify_one();
                    return Contest::Undecided;
                }
                Answer::Early { wait_us } => {
                    let wait = Duration::from_micros(wait_us.clamp(50, 5_000_000) as u64);
                    pace(&mut soon, wait)
                }
                Answer::Later { wait_ms } => {
                    self.until_too_late(now, Duration::from_millis(wait_ms.clamp(1, 30_000) as u64))
                }
                Answer::RunFirst(at) => {
                    // That one needs the slot.
                    drop(slot.take());
                    if Target::Scheduled(at) != self.ask.target {
                        el.contest(&self.job, Ask::again(at)).await;
                    }
                    pace(&mut soon, Duration::from_millis(1))
                }
                Answer::Behind { newest, early } => {
                    self.decided(newest);
                    el.entry(&self.job, |e| e.queue.ran(early));
                    self.forget_nonce();
                    return Contest::Behind;
                }
                // Either it was long on its way, and is asked again, or the clock is in doubt from now on.
                Answer::InDoubt => pace(&mut soon, Duration::from_millis(20)),
                Answer::Quarantined | Answer::Absent => {
                    self.note(
                        "quarantined",
                        "the store lost or changed its state".to_owned(),
                    );
                    el.entry(&self.job, |e| e.ready = false);
                    el.enrol.notify_one();
                    return Contest::Undecided;
                }
            };
            let wait = wait.min(left.map_or(Duration::MAX, |left| left.max(PACE.1 / 1000)));
            // Whoever waits for another run needs no slot meanwhile.
            slot = None;
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = woken.as_mut() => {}
                () = el.stop.cancelled() => return Contest::Draining,
            }
        }
    }

    /// A question of ours has no answer yet, and was answered with a grant.
    async fn granted_unheard(&self) -> Result<bool, store::Error> {
        let target = flat(&self.ask.target);
        let Some(Some(run)) = self
            .elector
            .entry(&self.job, |e| e.asked.get(&target).copied())
        else {
            return Ok(false);
        };
        let job = std::slice::from_ref(&self.job);
        let reply = self.elector.store.observe(job).await?;
        let state = reply.value.into_iter().next().flatten();
        Ok(state.is_some_and(|s| s.held_by(run).is_some()))
    }

    /// Of a manual trigger.
    fn key(&self) -> Option<&str> {
        match &self.ask.target {
            Target::Manual { key, .. } => Some(key),
            Target::Scheduled(_) => None,
        }
    }
    fn at(&self) -> String {
        match &self.ask.target {
            Target::Scheduled(at) => at.to_string(),
            Target::Manual { key, .. } => format!("manual {key}"),
        }
    }
    /// `wait`, but not past the moment from which on the occurrence is missed.
    fn until_too_late(&self, now: i64, wait: Duration) -> Duration {
        match self.ask.start_by.saturating_sub(now) {
            left if left < 0 => wait,
            left => wait.min(Duration::from_millis(left as u64 + 1)),
        }
    }
    fn decided(&self, at: Occurrence) {
        self.elector.entry(&self.job, |e| e.known = e.known.max(at));
    }
    fn forget_nonce(&self) {
        self.elector
            .entry(&self.job, |e| e.asked.remove(&flat(&self.ask.target)));
    }
    fn note(&self, decision: &str, detail: String) {
        let at = match self.ask.target {
            Target::Scheduled(at) => at,
            Target::Manual { .. } => Occurrence(self.elector.clock.now_us().unwrap_or(0) / 1000),
        };
        self.elector.journal(&self.job, at, decision, detail);
    }
}

/// The part of a target that names it.
fn flat(target: &Target) -> Target {
    match target {
        Target::Scheduled(at) => Target::Scheduled(*at),
        Target::Manual { key, .. } => Target::Manual {
            key: key.clone(),
            before: None,
        },
    }
}

impl Elector {
    /// The nonce of this instance's question for `target`: the same until it is answered.
    fn nonce(&self, job: &JobName, target: &Target) -> RunId {
        let foreseen = self.foreseen.run(job, target);
        let fresh = foreseen.unwrap_or_else(RunId::random);
        self.entry(job, |e| *e.asked.entry(flat(target)).or_insert(fresh))
            .unwrap_or(fresh)
    }
}

/// How long to wait before asking again, after `soon` answers that said to do so: at least `wait`, and each time longer
/// than before when there were several.
fn pace(soon: &mut u32, wait: Duration) -> Duration {
    let more = soon.saturating_sub(PACE.0).min(16);
    *soon = soon.saturating_add(1);
    if more == 0 {
        return wait;
    }
    wait.max((Duration::from_millis(1) * (1 << more)).min(PACE.1))
}

fn backoff(retry: &StoreRetry, failures: u32) -> Duration {
    let base = if retry.exponential {
        retry.interval.saturating_mul(1 << (failures - 1).min(16))
    } else {
        retry.interval
    };
    let base = base.min(retry.max_interval);
    if retry.jitter {
        base.mul_f64(0.5 + fastrand::f64() / 2.0)
    } else {
        base
    }
}

impl std::fmt::Debug for Elector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Elector")
            .field("instance", &self.instance)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{config, store::memory::MemoryStore};

    fn job(lines: &str) -> Arc<Job> {
        let text = format!("[jobs.work]\ncommand = [\"true\"]\n{lines}\n");
        let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None).expect("valid");
        config.jobs.values().next().expect("a job").clone()
    }

    fn elector() -> Arc<Elector> {
        let parts = Parts {
            store: Arc::new(MemoryStore::new()),
            clock: Arc::default(),
            instance: InstanceId::new("a"),
            host: "a".into(),
            retry: StoreRetry {
                attempts: 0,
                interval: Duration::ZERO,
                exponential: false,
                max_interval: Duration::ZERO,
                jitter: false,
            },
            max_parallel: None,
            journal: mpsc::channel(10).0,
            plans: mpsc::unbounded_channel().0,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        Arc::new(Elector::build(parts, Box::new(|_| {})))
    }

    fn held(at: i64) -> Open {
        Open {
            occurrence: Occurrence(at),
            attempt: 1,
            trigger: Trigger::Schedule,
            key: None,
            run: RunId::random(),
            instance: InstanceId::new("b"),
            host: "b".into(),
            seq: 0,
            lease: 15_000,
            def: String::new(),
            inc: "i".into(),
            granted_at: at,
            renewed_at: at,
            stop: None,
            again: None,
        }
    }

    /// An answer that comes after a job was removed says who holds it.
    #[tokio::test]
    async fn a_removed_job_is_watched_no_more() {
        let (el, job) = (elector(), job(""));
        el.set_job(job.clone());
        let _ = el.saw(&job.name, &held(1000), Boottime::now());
        assert!(el.watches.has(&job.name, Occurrence(1000)));
        el.remove_job(&job.name);
        let _ = el.saw(&job.name, &held(2000), Boottime::now());
        for at in [1000, 2000] {
            assert!(!el.watches.has(&job.name, Occurrence(at)));
        }
    }

    /// Whatever the answers say: a contest asks once a second in the end, and at once in the beginning.
    #[test]
    fn a_contest_asks_less_and_less_often() {
        let mut soon = 0;
        let waits: Vec<u128> = (0..16)
            .map(|_| pace(&mut soon, Duration::from_micros(50)).as_millis())
            .collect();
        assert_eq!(waits[..5], [0, 0, 0, 0, 2]);
        assert_eq!(waits[15], 1000);
        assert_eq!(pace(&mut soon, Duration::from_secs(4)).as_secs(), 4);
    }
}
