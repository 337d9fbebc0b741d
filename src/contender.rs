//! Gets each occurrence decided: local dedupe through singleflight, then the contest in the store with limited
//! retries, then the lease goes to whoever runs it. Losers watch.
//!
//! What is decided, and when to ask again, is [`crate::logic::contest`]; here are its effects: timers, the store,
//! singleflight, logs. One driver per job (`drive`) takes its due occurrences in order. Whatever else wakes an
//! occurrence (takeover watch, pub/sub, trigger) comes through [`Contender::contest`] too (`flight`), where all callers of
//! one occurrence share one flight. Only the flight itself ever sees the lease; callers get the outcome. `register` makes
//! the jobs known to the store, `watch` looks at the leases of others.

mod claim_batcher;
mod drive;
mod flight;
mod prepare;
mod register;
#[cfg(test)]
mod tests;
mod watch;

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_singleflight::UnaryGroup;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, Semaphore, futures::OwnedNotified, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info, warn};

pub use self::claim_batcher::ClaimPermit;
use self::{claim_batcher::ClaimBatcher, prepare::PreparedRuns, watch::Watches};
pub use crate::logic::contest::{Ask, Due, Ended, Epoch};
use crate::{
    clock::{Boottime, StoreClock},
    config::{Job, StoreRetry},
    logic::{
        belief::{self, Sampled},
        claim::{Event, Open, Target, TargetId},
        contest::{Account, Changes, Halt, JobState, Me},
    },
    model::{InstanceId, JobName, Occurrence, Run, RunId},
    store::{Decision, Reply, Store},
};

/// Before a job whose attempt could not be asked for is registered anew.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A lease that was won, for whoever runs it.
#[derive(Debug)]
pub struct Granted {
    pub job: Arc<Job>,
    pub run: Run,
    /// Before the command left that was answered with this lease: trust counts from here.
    pub sent: Boottime,
    /// Unix ms of the store's clock: a first attempt is not started later than this.
    pub start_by: i64,
    /// Held until the command was started.
    pub permit: Option<ClaimPermit>,
    /// The answer came after the last moment for a start, to a claim that was sent again: it is to be settled as
    /// missed.
    pub too_late: bool,
    /// Held while the run lasts, when the number of runs is limited.
    pub slot: Option<tokio::sync::OwnedSemaphorePermit>,
}

/// Takes won leases. Must not block.
pub type Start = Box<dyn Fn(Granted) + Send + Sync>;

/// What the dispatcher is told of a job.
#[derive(Debug)]
pub enum PlanUpdate {
    /// Plan its occurrences after this one.
    PlanAfter(Arc<Job>, Occurrence),
    /// Plan nothing of it any more.
    Remove(JobName),
}

pub struct Contender {
    pub store: Arc<dyn Store>,
    pub clock: Arc<StoreClock>,
    pub me: Me,
    retry: StoreRetry,
    start: Start,
    batcher: ClaimBatcher,
    /// Boxed: a table has up to half of its places empty.
    jobs: Mutex<HashMap<JobName, Box<Entry>>>,
    /// Claims without an answer, and runs, of jobs that were removed. Locked after `jobs`.
    removed: Mutex<HashMap<JobName, Account>>,
    flights: UnaryGroup<(JobName, TargetId, bool), Ended>,
    watches: Watches,
    prepared: PreparedRuns,
    live: Mutex<Arc<[InstanceId]>>,
    slots: Option<Arc<Semaphore>>,
    /// To look at what is overdue takes a while; many jobs at one time would keep others from running.
    unfolding: Semaphore,
    journal: mpsc::Sender<Decision>,
    plans: mpsc::UnboundedSender<PlanUpdate>,
    draining: AtomicBool,
    /// Why the store must not be relied on, as long as it must not.
    unreliable: Mutex<Option<Arc<str>>>,
    /// The longest of any job, in milliseconds; only grows.
    quarantine: AtomicU64,
    /// Set when a job has to be registered (again).
    pub registration_due: Notify,
    /// Nothing new is begun after this.
    pub stop: CancellationToken,
    pub tasks: TaskTracker,
}

/// One job of this instance.
struct Entry {
    state: JobState,
    /// Somebody works on its queue.
    driven: bool,
    changed: Changed,
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
    fn next(&mut self) -> OwnedNotified {
        self.0.get_or_insert_default().clone().notified_owned()
    }
}

/// What a contender is made of.
pub struct Parts {
    pub store: Arc<dyn Store>,
    pub clock: Arc<StoreClock>,
    pub instance: InstanceId,
    pub host: String,
    pub retry: StoreRetry,
    pub max_parallel: Option<u32>,
    pub journal: mpsc::Sender<Decision>,
    pub plans: mpsc::UnboundedSender<PlanUpdate>,
    pub stop: CancellationToken,
    pub tasks: TaskTracker,
}

impl Contender {
    pub fn build(p: Parts, start: Start) -> Self {
        Self {
            batcher: ClaimBatcher::start(p.store.clone()),
            store: p.store,
            clock: p.clock,
            me: Me {
                instance: p.instance,
                host: p.host,
            },
            retry: p.retry,
            start,
            jobs: Mutex::default(),
            removed: Mutex::default(),
            flights: UnaryGroup::new(),
            watches: Watches::default(),
            prepared: PreparedRuns::default(),
            live: Mutex::new(Arc::new([])),
            slots: p.max_parallel.map(|n| Arc::new(Semaphore::new(n as usize))),
            unfolding: Semaphore::new(1),
            journal: p.journal,
            plans: p.plans,
            draining: AtomicBool::new(false),
            unreliable: Mutex::default(),
            quarantine: AtomicU64::new(0),
            registration_due: Notify::new(),
            stop: p.stop,
            tasks: p.tasks,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<JobName, Box<Entry>>> {
        self.jobs.lock()
    }
    fn removed(&self) -> MutexGuard<'_, HashMap<JobName, Account>> {
        self.removed.lock()
    }
    fn entry<T>(&self, job: &JobName, f: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        self.lock().get_mut(job).map(|e| self.touch(e, f))
    }
    /// Whatever `f` does to a job, whoever waits for that is told.
    fn touch<T>(&self, e: &mut Entry, f: impl FnOnce(&mut Entry) -> T) -> T {
        let before = e.state.changes();
        let result = f(e);
        self.tell(e, before);
        result
    }
    fn tell(&self, e: &Entry, before: Changes) {
        let now = e.state.changes();
        if now.changed != before.changed {
            e.changed.tell();
        }
        if now.to_register != before.to_register {
            self.registration_due.notify_one();
        }
    }
    fn state<T>(&self, job: &JobName, f: impl FnOnce(&mut JobState) -> T) -> Option<T> {
        self.entry(job, |e| f(&mut e.state))
    }
    /// What this instance has asked for and runs of a job, also of one that was removed.
    fn account<T>(&self, job: &JobName, f: impl FnOnce(&mut Account) -> T) -> Option<T> {
        let mut jobs = self.lock();
        match jobs.get_mut(job) {
            Some(e) => Some(f(&mut e.state.account)),
            None => self.removed().get_mut(job).map(f),
        }
    }

    /// Unix ms of the store's clock; before its first answer, of this host's. For what is shown, and nothing that is decided by.
    fn shown_ms(&self) -> i64 {
        let now = self.clock.now_ms();
        now.unwrap_or_else(|| crate::clock::wall_us().div_euclid(1000))
    }

    // ---- which jobs there are ----

    /// Adds a job, or puts another definition in the place of its old one. A run that goes on keeps its own.
    pub fn set_job(&self, job: Arc<Job>) {
        self.raise_quarantine(job.lease.quarantine);
        let now = self.clock.now_ms().map(Occurrence);
        let mut jobs = self.lock();
        if let Some(e) = jobs.get_mut(&job.name) {
            let plan_after = self.touch(e, |e| e.state.redefine(job.clone(), now));
            if let Some(after) = plan_after {
                let _ = self.plans.send(PlanUpdate::PlanAfter(job, after));
            }
            return;
        }
        let account = self.removed().remove(&job.name).unwrap_or_default();
        let entry = Entry {
            state: JobState::new(job.clone(), account),
            driven: false,
            changed: Changed::default(),
        };
        jobs.insert(job.name.clone(), Box::new(entry));
        self.registration_due.notify_one();
    }

    /// Forgets a job. A run that goes on is not disturbed. What was planned up to now and not decided yet, because it
    /// waits for its jitter or its turn, is not started here any more; when nobody may start it any more, it is
    /// recorded as missed.
    pub fn remove_job(self: &Arc<Self>, job: &JobName) {
        let mut jobs = self.lock();
        let mut entry = jobs.remove(job);
        if let Some(e) = &mut entry {
            e.changed.tell();
            // It may come back, with a grant that we have not heard of yet.
            if !e.state.account.is_closed() {
                let account = std::mem::take(&mut e.state.account);
                self.removed().insert(job.clone(), account);
            }
        }
        drop(jobs);
        self.watches.forget(job);
        let _ = self.plans.send(PlanUpdate::Remove(job.clone()));
        let now = self.clock.now_ms().map(Occurrence);
        if let (Some(e), Some(now)) = (entry, now) {
            self.tasks.spawn(self.clone().give_up(e.state, now));
        }
    }

    pub fn job(&self, job: &JobName) -> Option<Arc<Job>> {
        self.entry(job, |e| e.state.definition.clone())
    }

    /// The jobs that this instance has and that are enabled.
    pub fn enabled(&self) -> BTreeSet<JobName> {
        let jobs = self.lock();
        let all = jobs.values().map(|e| &e.state.definition);
        all.filter(|job| job.enabled)
            .map(|job| job.name.clone())
            .collect()
    }

    /// All jobs are registered again: hints may have been lost, or the store its data.
    pub fn resync(&self) {
        for e in self.lock().values_mut() {
            self.touch(e, |e| e.state.resync());
        }
        self.registration_due.notify_one();
    }

    /// Looks again at the jobs whose watermark stands in the future: it may have been put right.
    pub fn look_at_those_ahead(&self) {
        let Some(now_us) = self.clock.now_us() else {
            return;
        };
        for e in self.lock().values_mut() {
            if e.state.ahead(Occurrence(now_us / 1000)) {
                self.touch(e, |e| e.state.stale());
            }
        }
    }

    // ---- whether anything is claimed ----

    /// How long nothing may be granted after the store lost its data, as far as this instance knows.
    pub fn quarantine(&self) -> Duration {
        Duration::from_millis(self.quarantine.load(Ordering::Relaxed))
    }
    fn raise_quarantine(&self, quarantine: Duration) {
        let ms = u64::try_from(quarantine.as_millis()).unwrap_or(u64::MAX);
        self.quarantine.fetch_max(ms, Ordering::Relaxed);
    }

    pub fn set_draining(&self, on: bool) {
        let mut jobs = self.lock();
        let was = self.draining.swap(on, Ordering::SeqCst);
        for e in jobs.values_mut() {
            if was && !on {
                self.touch(e, |e| e.state.look_anew());
            }
            e.changed.tell();
        }
        drop(jobs);
        self.registration_due.notify_one();
    }
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst) || self.stop.is_cancelled()
    }

    /// Whether the store must not be relied on, and why: nothing is claimed until it may. What runs goes on.
    pub fn set_unreliable(&self, why: Option<String>) {
        let reliable = why.is_none();
        *self.unreliable.lock() = why.map(Into::into);
        if reliable {
            for e in self.lock().values() {
                e.changed.tell();
            }
        }
    }
    fn halt(&self) -> Option<Halt> {
        if self.draining() {
            return Some(Halt::Draining);
        }
        if let Some(ahead_us) = self.clock.doubt_us() {
            return Some(Halt::Unreliable("clock", belief::in_words(ahead_us).into()));
        }
        let why = self.unreliable.lock();
        Some(Halt::Unreliable("store_error", why.clone()?))
    }

    // ---- who goes first ----

    pub fn set_live(&self, live: Arc<[InstanceId]>) {
        *self.live.lock() = live;
    }
    fn rank(&self, job: &JobName, target: &Target, without: Option<&InstanceId>) -> usize {
        let live = self.live.lock().clone();
        crate::logic::contest::rank(&live, &self.me.instance, job, target, without)
    }

    // ---- what happens ----

    /// Nothing of a run goes on any more, and it is about to be settled.
    pub fn run_over(&self, job: &JobName, run: RunId) {
        self.account(job, |a| a.run_is_over(run));
    }

    /// A run has ended here; its lease is given back or lost. `awaited`: the occurrence of which the store awaits
    /// another attempt.
    pub fn run_ended(self: &Arc<Self>, job: &JobName, run: RunId, awaited: Option<Occurrence>) {
        if self.state(job, |s| s.run_has_ended(run)).is_none() {
            self.account(job, |a| a.run_has_ended(run));
        }
        if let Some(at) = awaited
            && self.job(job).is_some()
        {
            self.claim_next_attempt(job.clone(), at);
        }
    }

    /// An occurrence of ours or another's that is open is to be decided again: its next attempt, or its holder is gone.
    fn claim_next_attempt(self: &Arc<Self>, job: JobName, at: Occurrence) {
        // One at a time waits for it, however often it is seen to be open.
        if self.state(&job, |s| s.await_next_attempt(at)) != Some(true) {
            return;
        }
        let this = self.clone();
        self.tasks.spawn(async move {
            let undecided = this.contest(&job, Ask::next_attempt(at)).await == Ended::Undecided;
            if undecided {
                tokio::select! {
                    () = tokio::time::sleep(LOOK_AGAIN) => {}
                    () = this.stop.cancelled() => {}
                }
            }
            this.state(&job, |s| {
                s.awaits_no_longer(at);
                if undecided {
                    // Registering finds the open entry, and watches it.
                    s.stale();
                }
            });
        });
    }

    /// What the fleet tells. A hint may be lost: the watches and registering find the same a little later.
    pub fn on_event(self: &Arc<Self>, event: &Event) {
        match event {
            Event::Ended { job } => {
                self.state(job, JobState::ended_elsewhere);
            }
            Event::AttemptAwaited { job, occurrence } => {
                if self.state(job, JobState::ended_elsewhere).is_some() {
                    self.claim_next_attempt(job.clone(), *occurrence);
                }
            }
            Event::Triggered { job, key } => self.triggered(job, key, None),
            Event::Controlled { job } => {
                self.state(job, JobState::stale);
            }
            Event::Gap => self.resync(),
            Event::Stop { .. } | Event::Drain | Event::Unlocked { .. } => {}
        }
    }

    /// A manual trigger waits in the store.
    fn triggered(self: &Arc<Self>, job: &JobName, key: &str, at_ms: Option<i64>) {
        // Before this instance knows the store's clock it has registered nothing: it hears of the trigger when it does.
        let Some(at_ms) = at_ms.or_else(|| self.clock.now_ms()) else {
            return;
        };
        if let Some(due) = self.state(job, |s| s.triggered(key, at_ms, Boottime::now())) {
            self.due(vec![due]);
        }
    }

    /// Watches a lease, as an answer that came at `received` showed it. True: it was seen unchanged for its whole
    /// length.
    fn watch_lease(&self, job: &JobName, open: &Open, received: Boottime) -> bool {
        let every = self.poll_every(job, open);
        let seen = self.state(job, |s| {
            let quarantine = s.note_lease(open);
            // While the job is there for sure: nobody would take the watch of a removed one away again.
            (self.watches.add(job, open, received, every), quarantine)
        });
        let Some((lapsed, quarantine)) = seen else {
            return false;
        };
        self.raise_quarantine(quarantine);
        lapsed
    }

    fn note_clock<T>(&self, reply: &Reply<T>) {
        note_clock(&self.clock, reply);
    }

    fn journal(&self, job: &JobName, occurrence: Occurrence, decision: &str, detail: String) {
        let d = Decision {
            job: job.clone(),
            occurrence,
            instance: self.me.instance.clone(),
            at: self.shown_ms(),
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

impl std::fmt::Debug for Contender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Contender")
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}
