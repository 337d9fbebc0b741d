//! Gets each occurrence decided: singleflight merges local callers, the contest in the store follows with limited
//! retries, and the winner passes the lease to [`crate::holder`]. Losers watch.
//!
//! [`crate::logic::contest`] has the rules (what to decide, when to ask again); this module has their effects: timers,
//! the store, singleflight, logs. One driver per job (`drive`) takes its due occurrences in order. Every other wake-up
//! of an occurrence (takeover watch, pub/sub, trigger) also goes through [`Contender::contest`] (`flight`), where all
//! callers of one occurrence share one flight. Only the flight itself sees the lease; callers get the outcome.
//! `register` registers the jobs with the store, and `watch` polls the leases of other instances.

mod claim_batcher;
mod drive;
mod flight;
mod prepare;
mod register;
#[cfg(test)]
mod tests;
mod watch;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
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

pub use self::claim_batcher::{ClaimPermit, cores};
use self::{claim_batcher::ClaimBatcher, prepare::PreparedRuns, watch::Watches};
pub use crate::logic::contest::{Ask, ContestEnd, Due, Epoch};
use crate::{
    clock::{Boottime, StoreClock},
    config::{Job, StoreRetry},
    health::Health,
    last_will::{self, LastWill},
    logic::{
        backoff::Throttle,
        belief::{self, Sampled},
        claim::{Event, Open, Remembered, Target, TargetId},
        contest::{Absence, Account, Changes, Halt, JobState, Me},
        delays::Delays,
    },
    model::{InstanceId, JobName, Occurrence, Run, RunId},
    store::{Decision, Reply, Store},
};

/// How long to wait before registering a job again after its next attempt could not be claimed.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A lease that this instance won, for the holder that runs it.
#[derive(Debug)]
pub struct Granted {
    pub job: Arc<Job>,
    pub run: Run,
    /// The incarnation of the store that granted it.
    pub incarnation: Arc<str>,
    /// When the request for this lease left: trust counts from here.
    pub sent: Boottime,
    /// The latest instant to start a first attempt, Unix ms of the store's clock.
    pub start_by: i64,
    /// Held until the command was started.
    pub permit: Option<ClaimPermit>,
    /// Until the guard is told what to run.
    pub in_will: Option<last_will::Entry>,
    /// The grant answered a repeated claim, and came too late to start the run: settle it as missed, for this
    /// reason.
    pub too_late: Option<&'static str>,
    /// Held while the run lasts, if the number of runs is limited.
    pub slot: Option<tokio::sync::OwnedSemaphorePermit>,
    /// What it waited for until it was granted, and when that was.
    pub waits: Delays,
    pub won: Boottime,
}

/// Takes won leases. Must not block.
pub type Start = Box<dyn Fn(Granted) + Send + Sync>;

/// What the dispatcher learns about a job.
#[derive(Debug)]
pub enum PlanUpdate {
    /// Plan its occurrences after this one.
    PlanAfter(Arc<Job>, Occurrence),
    /// Plan no more occurrences of it.
    Remove(JobName),
}

pub struct Contender {
    pub store: Arc<dyn Store>,
    pub clock: Arc<StoreClock>,
    pub me: Me,
    retry: StoreRetry,
    start: Start,
    batcher: ClaimBatcher,
    /// What is to be said of claims if this process is killed.
    last_will: Option<Arc<LastWill>>,
    /// Boxed, because up to half of a hash table is empty.
    jobs: Mutex<HashMap<JobName, Box<Entry>>>,
    /// Unanswered claims and active runs of removed jobs. Lock it after `jobs`.
    removed: Mutex<HashMap<JobName, Account>>,
    /// Jobs that this instance had, or had enabled, and has not any more. Lock it after `jobs`.
    gone: Mutex<BTreeMap<JobName, Gone>>,
    flights: UnaryGroup<(JobName, TargetId, bool), ContestEnd>,
    watches: Watches,
    prepared: PreparedRuns,
    live: Mutex<Arc<[InstanceId]>>,
    slots: Option<Arc<Semaphore>>,
    /// Limits how many jobs handle overdue occurrences at the same time, because that takes a while.
    unfolding: Semaphore,
    journal: mpsc::Sender<Decision>,
    plans: mpsc::UnboundedSender<PlanUpdate>,
    pub health: Arc<Health>,
    draining: AtomicBool,
    /// Why this instance must not claim: the reason as a decision, and in words.
    halts: Mutex<BTreeMap<&'static str, Option<Arc<str>>>>,
    /// When this instance last said that the store contradicts the times in its answers.
    contradiction_told: Mutex<Throttle>,
    /// The longest quarantine that any job needs, in milliseconds; only grows.
    quarantine: AtomicU64,
    /// The settings of the store are to be checked now.
    pub check_due: AtomicBool,
    /// Set when a job must be registered (again), or the store checked.
    pub registration_due: Notify,
    /// Cancelled: nothing new starts.
    pub stop: CancellationToken,
    pub tasks: TaskTracker,
}

/// One job of this instance.
struct Entry {
    state: JobState,
    /// A driver works on its queue.
    driven: bool,
    changed: Changed,
}

struct Gone {
    absence: Absence,
    /// A task has what was undecided recorded as missed.
    recording: bool,
    /// [`JobState::memory`] of a removed job.
    memory: Remembered,
    /// The newest occurrence of a removed job that is known to be decided.
    newest: Occurrence,
}

impl Gone {
    fn new(absence: Absence) -> Self {
        Self {
            absence,
            recording: false,
            memory: Remembered::default(),
            newest: Occurrence(0),
        }
    }
}

/// Wakes the tasks that wait for a change. Takes no memory until a task has waited.
#[derive(Default)]
struct Changed(Option<Arc<Notify>>);

impl Changed {
    fn tell(&self) {
        if let Some(notify) = &self.0 {
            notify.notify_waiters();
        }
    }

    /// The future ends with the next change after this call.
    fn next(&mut self) -> OwnedNotified {
        self.0.get_or_insert_default().clone().notified_owned()
    }
}

/// The parts of a contender.
pub struct Parts {
    pub store: Arc<dyn Store>,
    pub clock: Arc<StoreClock>,
    pub instance: InstanceId,
    pub host: String,
    pub retry: StoreRetry,
    pub max_parallel: Option<u32>,
    pub journal: mpsc::Sender<Decision>,
    pub plans: mpsc::UnboundedSender<PlanUpdate>,
    /// Where this instance shows how it is.
    pub health: Arc<Health>,
    /// Where it says what it has claimed; None: nobody would read it.
    pub last_will: Option<Arc<LastWill>>,
    pub stop: CancellationToken,
    pub tasks: TaskTracker,
}

impl Contender {
    pub fn build(p: Parts, start: Start) -> Self {
        Self {
            batcher: ClaimBatcher::start(p.store.clone()),
            last_will: p.last_will,
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
            gone: Mutex::default(),
            flights: UnaryGroup::new(),
            watches: Watches::default(),
            prepared: PreparedRuns::default(),
            live: Mutex::new(Arc::new([])),
            slots: p.max_parallel.map(|n| Arc::new(Semaphore::new(n as usize))),
            unfolding: Semaphore::new(1),
            journal: p.journal,
            plans: p.plans,
            health: p.health,
            draining: AtomicBool::new(false),
            halts: Mutex::default(),
            contradiction_told: Mutex::default(),
            quarantine: AtomicU64::new(0),
            check_due: AtomicBool::new(false),
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
    /// Changes a job with `f`, and wakes the tasks that wait for changes of it.
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
    /// The outstanding claims and active runs of a job, also of a removed one.
    fn account<T>(&self, job: &JobName, f: impl FnOnce(&mut Account) -> T) -> Option<T> {
        let mut jobs = self.lock();
        match jobs.get_mut(job) {
            Some(e) => Some(f(&mut e.state.account)),
            None => self.removed().get_mut(job).map(f),
        }
    }

    /// Unix ms of the store's clock, or of this host's before the store's first answer. Only for display, not for
    /// decisions.
    fn shown_ms(&self) -> i64 {
        let now = self.clock.now_ms();
        now.unwrap_or_else(|| crate::clock::wall_us().div_euclid(1000))
    }

    // ---- which jobs there are ----

    /// Adds a job, or replaces its definition. An active run keeps the definition that it started with.
    pub fn set_job(self: &Arc<Self>, job: Arc<Job>) {
        // To disable a job is to remove it, and to add it as one that has no planned occurrences. When it is enabled,
        // this instance has to learn what is owed, as after a start: others may have had the job meanwhile.
        let owed = match self.job(&job.name) {
            Some(before) if before.enabled != job.enabled => self.remove_job(&job.name),
            _ => None,
        };
        self.raise_quarantine(job.lease.quarantine);
        let now = self.clock.now_ms().map(Occurrence);
        let mut jobs = self.lock();
        if let Some(e) = jobs.get_mut(&job.name) {
            if let Some(after) = self.touch(e, |e| e.state.redefine(job.clone(), now)) {
                let _ = self.plans.send(PlanUpdate::PlanAfter(job, after));
            }
            return;
        }
        let account = self.removed().remove(&job.name).unwrap_or_default();
        let mut state = JobState::new(job.clone(), account);
        let mut gone = self.gone.lock();
        if let Some(gone) = gone.get_mut(&job.name) {
            state.recall(std::mem::take(&mut gone.memory), gone.newest);
        }
        if job.enabled {
            let absence = gone.remove(&job.name).map(|gone| gone.absence);
            state.comes_back(absence.unwrap_or_default(), now);
        } else {
            state.owes(owed);
        }
        drop(gone);
        let entry = Entry {
            state,
            driven: false,
            changed: Changed::default(),
        };
        jobs.insert(job.name.clone(), Box::new(entry));
        self.registration_due.notify_one();
    }

    /// Removes a job. An active run continues. This instance does not start occurrences that were planned up to now and
    /// still wait for their jitter or their turn; once no instance may start them, it records them as missed. Returns
    /// the first of them.
    pub fn remove_job(self: &Arc<Self>, job: &JobName) -> Option<Occurrence> {
        let now = self.clock.now_ms().map(Occurrence);
        let mut jobs = self.lock();
        let mut entry = jobs.remove(job);
        let mut owed = None;
        if let Some(e) = &mut entry {
            owed = e.state.next_undecided().filter(|at| Some(*at) <= now);
            e.changed.tell();
            let mut all = self.gone.lock();
            let gone = all.entry(job.clone());
            let gone = gone.or_insert_with(|| Gone::new(Absence::default()));
            (gone.memory, gone.newest) = (e.state.memory(), e.state.newest());
            if e.state.definition.enabled {
                gone.absence = Absence {
                    began: Some(Boottime::now()),
                    ..Absence::default()
                };
                gone.recording = now.is_some();
            }
            drop(all);
            // The job may return while a grant for it is still on its way here.
            if !e.state.account.is_closed() {
                let asks = e.state.unanswered();
                let account = std::mem::take(&mut e.state.account);
                self.removed().insert(job.clone(), account);
                self.tasks
                    .spawn(self.clone().find_grants(job.clone(), asks));
            }
        }
        drop(jobs);
        self.watches.forget(job);
        let _ = self.plans.send(PlanUpdate::Remove(job.clone()));
        if let (Some(e), Some(now)) = (entry, now)
            && e.state.definition.enabled
        {
            self.tasks.spawn(self.clone().give_up(e.state, now));
        }
        owed
    }

    pub fn job(&self, job: &JobName) -> Option<Arc<Job>> {
        self.entry(job, |e| e.state.definition.clone())
    }

    pub fn has_enabled(&self, job: &JobName) -> bool {
        self.job(job).is_some_and(|job| job.enabled)
    }

    /// The jobs that this instance has and that are enabled.
    pub fn enabled(&self) -> BTreeSet<JobName> {
        let jobs = self.lock();
        let all = jobs.values().map(|e| &e.state.definition);
        all.filter(|job| job.enabled)
            .map(|job| job.name.clone())
            .collect()
    }

    /// A claim for the job is still on its way: it would contradict that this instance does not have the job enabled.
    pub fn has_unanswered_claims(&self, job: &JobName) -> bool {
        self.account(job, |a| a.has_unanswered_claims()) == Some(true)
    }

    /// What was undecided of the job is recorded, or cannot be.
    fn gave_up(&self, job: &JobName) {
        self.gone_now(job, |gone| gone.recording = false);
        self.state(job, |s| s.owes(None));
    }

    fn gone_now(&self, job: &JobName, f: impl FnOnce(&mut Gone)) {
        if let Some(gone) = self.gone.lock().get_mut(job) {
            f(gone);
        }
    }

    /// Registers all jobs again: hints may have been lost, or the store may have lost its data.
    pub fn resync(&self) {
        for e in self.lock().values_mut() {
            self.touch(e, |e| e.state.resync());
        }
        self.registration_due.notify_one();
    }

    /// Checks the jobs whose watermark lies in the future again: somebody may have rewound them.
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

    /// How long the store must not grant after it lost its data, as far as this instance knows.
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

    /// Sets why nothing is safe to claim, or None; `decision` is that reason for `why`. This instance claims nothing
    /// while there is a reason. Active runs continue.
    pub fn set_halt(&self, decision: &'static str, why: Option<String>) {
        let goes_on = why.is_none();
        self.halts.lock().insert(decision, why.map(Into::into));
        if goes_on {
            for e in self.lock().values() {
                e.changed.tell();
            }
        }
    }
    /// A reason, as `why` has it and in words.
    pub fn halted(&self) -> Option<(&'static str, Arc<str>)> {
        let halts = self.halts.lock();
        halts
            .iter()
            .find_map(|(name, why)| Some((*name, why.clone()?)))
    }
    fn halt(&self) -> Option<Halt> {
        if self.draining() {
            return Some(Halt::Draining);
        }
        if let Some(ahead_us) = self.clock.doubt_us() {
            return Some(Halt::Unreliable("clock", belief::in_words(ahead_us).into()));
        }
        let (decision, why) = self.halted()?;
        Some(Halt::Unreliable(decision, why))
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

    /// All processes of a run are gone, and it is about to be settled.
    pub fn run_over(&self, job: &JobName, run: RunId) {
        self.account(job, |a| a.run_is_over(run));
    }

    /// A run of this instance has ended; its lease is released or lost. `awaited`: the occurrence that waits for
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

    /// Contests an open occurrence again, because its next attempt is due or its holder is gone.
    fn claim_next_attempt(self: &Arc<Self>, job: JobName, at: Occurrence) {
        // Only one task waits for it, however often it is found open.
        if self.state(&job, |s| s.await_next_attempt(at)) != Some(true) {
            return;
        }
        let this = self.clone();
        self.tasks.spawn(async move {
            let undecided =
                this.contest(&job, Ask::next_attempt(at)).await == ContestEnd::Undecided;
            if undecided {
                tokio::select! {
                    () = tokio::time::sleep(LOOK_AGAIN) => {}
                    () = this.stop.cancelled() => {}
                }
            }
            this.state(&job, |s| {
                s.awaits_no_longer(at);
                if undecided {
                    // Registering finds the open entry and watches it.
                    s.stale();
                }
            });
        });
    }

    /// This instance waits for the next attempt of an occurrence.
    pub fn awaits(&self, job: &JobName, at: Occurrence) -> bool {
        self.state(job, |s| s.awaits(at)) == Some(true)
    }

    /// Handles a hint from another instance. Hints may be lost: watching and registering find the same facts a little
    /// later.
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
            Event::Triggered { job, key, at } => {
                self.triggered(job, key, Some(*at).filter(|at| *at > 0));
            }
            Event::Controlled { job } => {
                self.state(job, JobState::stale);
            }
            Event::Gap => self.resync(),
            Event::Stop { .. } | Event::Drain | Event::Unlocked { .. } => {}
        }
    }

    /// Contests a manual trigger that waits in the store.
    fn triggered(self: &Arc<Self>, job: &JobName, key: &str, at_ms: Option<i64>) {
        // Without the store's clock this instance has registered nothing yet: registering will find the trigger.
        let Some(at_ms) = at_ms.or_else(|| self.clock.now_ms()) else {
            return;
        };
        if let Some(due) = self.state(job, |s| s.triggered(key, at_ms, Boottime::now())) {
            self.due(vec![due]);
        }
    }

    /// Watches a lease, in the state that an answer received at `received` showed. True: it has been unchanged for its
    /// whole length.
    fn watch_lease(&self, job: &JobName, open: &Open, received: Boottime) -> bool {
        let every = self.poll_every(job, open);
        let seen = self.state(job, |s| {
            let quarantine = s.note_lease(open);
            // Only while the job exists: nothing would remove the watch of a removed job.
            (self.watches.add(job, open, received, every), quarantine)
        });
        let Some((lapsed, quarantine)) = seen else {
            return false;
        };
        self.raise_quarantine(quarantine);
        lapsed
    }

    /// The store decides nothing by a clock that is not the one which its answers show.
    fn contradicted(&self, job: &JobName, target: &Target) {
        let every = Duration::from_secs(10);
        if self.contradiction_told.lock().lets(Boottime::now(), every) {
            error!(
                "the store's clock does not show the times that arrive here in its answers, so the store decides \
                 nothing and no job starts: something between this host and the store changes its answers; check the \
                 proxies on the way to the `url` in [store]"
            );
        }
        if let Target::Scheduled(at) = target {
            let detail = "the store's clock does not show the times that arrive in its answers";
            self.journal(job, *at, "contradicted", detail.to_owned());
        }
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
        // If the channel is full, the store has not answered for long: the newest decisions are lost, and `why` will
        // not show them.
        let _ = self.journal.try_send(d);
    }
}

/// Takes in a sample of the store's clock; logs when that clock was stepped.
pub fn note_clock<T>(clock: &StoreClock, reply: &Reply<T>) {
    note_sample(clock.sample(reply.now_us, reply.sent, reply.received));
}

pub fn note_sample(sampled: Sampled) {
    match sampled {
        Sampled::Even | Sampled::InDoubt => {}
        Sampled::Stepped(step) => warn!(
            step_ms = step / 1000,
            "the store's clock was stepped: occurrences follow it"
        ),
        Sampled::Doubted(step) => error!("{}", belief::in_words(step)),
        Sampled::Restored => {
            info!("this instance believes the store's clock again: it starts jobs again")
        }
    }
}

impl std::fmt::Debug for Contender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Contender")
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}
