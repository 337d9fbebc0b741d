//! One job, as one instance knows it.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet, VecDeque, btree_map::Entry},
    sync::Arc,
    time::Duration,
};

use super::{
    Ask, ContestEnd, Me, START_MARGIN,
    epoch::{Epoch, EpochName},
    queue::{Due, Queue, Segment, Unfolded},
};
use crate::{
    logic::{
        belief::SLACK,
        catch_up::Backlog,
        claim::{
            self, Claim, Missed, OnCrash, Open, Pending, Presence, Register, Remembered, State,
            Target, TargetId, Triggered,
        },
        jitter, quarantine,
        schedule::next_of,
        timetable,
    },
    model::{
        Boottime, Occurrence, RunId, Trigger,
        job::{Job, OnStateLoss},
    },
};

/// An occurrence that comes in so long after its start was held up on this instance, by a suspend or a step of the
/// clock.
const STALLED_MS: i64 = 3000;
/// The pause between two tries to register a job that the store refuses.
const REFUSED_AGAIN: Duration = Duration::from_secs(5);
/// How many ended runs of a job are remembered, so that a second answer to the claim of one starts nothing.
const ENDED_KEPT: usize = 4;
/// How many of a job's overdue occurrences are looked at one by one.
const OVERDUE_KEPT: usize = 100;

/// What this instance has asked the store for, and what runs here. Outlives the job's place in the configuration.
#[derive(Debug, Default, Clone)]
pub struct Account {
    /// The claims that were sent and have no answer that ends them.
    unanswered: BTreeMap<TargetId, Asked>,
    /// The runs that this instance holds. True: the run is over, and its settlement is awaited.
    active: BTreeMap<RunId, bool>,
    /// The newest ended runs. A late answer to a lost claim must not start a run twice.
    ended: VecDeque<RunId>,
}

#[derive(Debug, Clone)]
struct Asked {
    /// The run id, which a claim that is sent again keeps.
    run: RunId,
    /// The job as it was when the claim was sent last.
    job: Arc<Job>,
    /// The claim was sent, and no answer came: it may be granted, and only asking again keeps its lease.
    unheard: bool,
}

impl Account {
    /// The run id of the claim for `id` that has no answer yet.
    pub fn asked(&self, id: &TargetId) -> Option<RunId> {
        self.unanswered.get(id).map(|asked| asked.run)
    }
    pub(super) fn asked_as(&self, id: &TargetId) -> Option<(RunId, Arc<Job>)> {
        self.unanswered
            .get(id)
            .map(|asked| (asked.run, asked.job.clone()))
    }
    pub(super) fn ask(
        &mut self,
        id: TargetId,
        job: &Arc<Job>,
        fresh: impl FnOnce() -> RunId,
    ) -> RunId {
        match self.unanswered.entry(id) {
            Entry::Occupied(mut known) => {
                known.get_mut().job = job.clone();
                known.get().run
            }
            Entry::Vacant(new) => {
                new.insert(Asked {
                    run: fresh(),
                    job: job.clone(),
                    unheard: false,
                })
                .run
            }
        }
    }
    /// Whether the last claim for `id` that was sent had no answer.
    pub(super) fn is_unheard(&self, id: &TargetId) -> bool {
        self.unanswered.get(id).is_some_and(|asked| asked.unheard)
    }
    pub(super) fn set_unheard(&mut self, id: &TargetId, unheard: bool) {
        if let Some(asked) = self.unanswered.get_mut(id) {
            asked.unheard = unheard;
        }
    }
    pub(super) fn forget(&mut self, id: &TargetId) {
        self.unanswered.remove(id);
    }
    /// The claim was answered with a grant. False: its run was begun before.
    pub(super) fn begin(&mut self, id: &TargetId, run: RunId) -> bool {
        self.unanswered.remove(id);
        !self.ended.contains(&run) && self.active.insert(run, false).is_none()
    }
    /// A run is over, and about to be settled. Until it is settled, the store takes it for a run that goes on, and
    /// would skip because of it what came due since.
    pub fn run_is_over(&mut self, run: RunId) {
        if let Some(over) = self.active.get_mut(&run) {
            *over = true;
        }
    }
    /// The run's lease was released, or lost.
    pub fn run_has_ended(&mut self, run: RunId) {
        if self.active.remove(&run).is_some() {
            self.ended.push_back(run);
            let excess = self.ended.len().saturating_sub(ENDED_KEPT);
            self.ended.drain(..excess);
        }
    }
    pub(super) fn active(&self) -> impl Iterator<Item = RunId> {
        self.active.keys().copied()
    }
    pub fn is_running(&self, run: RunId) -> bool {
        self.active.contains_key(&run)
    }
    pub fn has_unanswered_claims(&self) -> bool {
        !self.unanswered.is_empty()
    }
    pub fn is_idle(&self) -> bool {
        self.active.is_empty()
    }
    /// A run is over and not settled yet.
    pub(super) fn settling(&self) -> bool {
        self.active.values().any(|over| *over)
    }
    /// Nothing in the account is needed any more.
    pub fn is_closed(&self) -> bool {
        self.unanswered.is_empty() && self.active.is_empty()
    }
}

/// What the store knows of the job, as far as this instance has heard. In all states but the last, the job is to be
/// registered.
#[derive(Debug, Clone, PartialEq)]
pub enum Standing {
    /// This instance knows nothing of the job, or nothing that still counts: what is overdue is looked at when the job
    /// is registered.
    New(RegisterWhen),
    /// The store lost or changed its data, and takes no claims for the job.
    Lost(RegisterWhen),
    /// The job can be claimed. Something has changed: its definition, or what people asked of it.
    Stale(RegisterWhen),
    Registered,
}

/// When to ask the store to register a job.
#[derive(Debug, Clone, PartialEq)]
pub enum RegisterWhen {
    Now,
    /// The store refused at this moment: ask again a while later.
    Refused(Boottime),
    /// The store said to wait until the quarantine of this epoch is over.
    QuarantineIsOver(Box<EpochName>),
}

impl Standing {
    fn may_claim(&self) -> bool {
        matches!(self, Self::Stale(_) | Self::Registered)
    }
    fn when(&self) -> Option<&RegisterWhen> {
        match self {
            Self::New(when) | Self::Lost(when) | Self::Stale(when) => Some(when),
            Self::Registered => None,
        }
    }
    fn take_when(&mut self) -> RegisterWhen {
        match std::mem::replace(self, Self::Registered) {
            Self::New(when) | Self::Lost(when) | Self::Stale(when) => when,
            Self::Registered => RegisterWhen::Now,
        }
    }
    fn ask(&mut self, when: RegisterWhen) {
        *self = match self {
            Self::New(_) => Self::New(when),
            Self::Lost(_) => Self::Lost(when),
            Self::Stale(_) | Self::Registered => Self::Stale(when),
        };
    }
    fn become_new(&mut self) {
        *self = Self::New(self.take_when());
    }
    fn become_lost(&mut self) {
        if self.may_claim() {
            *self = Self::Lost(self.take_when());
        }
    }
    fn become_stale(&mut self) {
        if *self == Self::Registered {
            *self = Self::Stale(RegisterWhen::Now);
        }
    }
}

/// A trouble that is reported once until it is over, and noted once for each occurrence.
#[derive(Debug, Default, Clone)]
pub(super) struct Noted(Option<Box<TargetId>>);

impl Noted {
    pub(super) fn is_new(&self) -> bool {
        self.0.is_none()
    }
    /// True: the last note was not for `id`.
    pub(super) fn first_for(&mut self, id: &TargetId) -> bool {
        let first = self.0.as_deref() != Some(id);
        if first {
            self.0 = Some(Box::new(id.clone()));
        }
        first
    }
    fn over(&mut self) {
        self.0 = None;
    }
}

/// Counters of what other tasks wait for: as long as they stay equal, nothing has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changes {
    /// A task that waits for this job is to look again.
    pub changed: u64,
    /// The job is to be registered.
    pub to_register: u64,
}

/// A time in which an instance is without a job: it is not in its configuration, or disabled.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Absence {
    pub began: Option<Boottime>,
    /// What was undecided when it began. Ascending.
    pub owed: Vec<Missed>,
    /// When it ended, Unix ms; 0: that is not known.
    pub until: i64,
}

/// When an instance is without a job, it says so to the store, and an instance that has the job contradicts: what was
/// planned during the absence is owed if one does. So long others have time for that before the job may be back.
pub(super) const CONTRADICTION: Duration = Duration::from_millis(1500);

/// A trigger that waits.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    /// When this instance learned of it.
    learned: Boottime,
    /// Since when it waits in the store, Unix ms of the store's clock.
    at_ms: i64,
}

/// What follows from a registration.
#[derive(Debug, Default, PartialEq)]
pub struct Registered {
    /// Everything up to here counts as decided, although it lies in the future.
    pub ahead: Option<Occurrence>,
    /// The occurrences after the first and up to the second came due while no instance was running, and are in the
    /// queue now.
    pub catch_up: Option<(Occurrence, Occurrence)>,
    /// Occurrences after this are to be planned.
    pub plan_after: Option<Occurrence>,
    /// Claim these once more: they may be ours, or their next attempt is awaited.
    pub ask_again: Vec<Occurrence>,
    /// Leases that others hold.
    pub watch: Vec<Open>,
    /// Triggers that wait, or that may be ours.
    pub triggers: Vec<Pending>,
}

/// What the job's queue wants next.
#[derive(Debug)]
pub enum Next {
    Ask(Ask),
    /// The job cannot be claimed at present.
    Wait,
    /// The backlog has to be listed one by one: outside of any lock, because that may take a while.
    Unfold(Arc<Job>, (Vec<Segment>, u32), Occurrence),
    Idle,
}

/// One job, as one instance knows it. Times of day are Unix ms of the store's clock.
#[derive(Debug, Clone)]
pub struct JobState {
    pub definition: Arc<Job>,
    pub account: Account,
    standing: Standing,
    /// The newest occurrence known to be decided.
    newest: Occurrence,
    /// Occurrences up to here are not owed.
    since: Occurrence,
    /// Since when (Unix ms) it has waited, in an epoch, for the store to grant again.
    waits_since: Option<(Box<EpochName>, i64)>,
    /// See [`State::lost_until`].
    lost_until: i64,
    /// What people asked of the job, as far as this instance knows; None: nothing.
    remembered: Option<Box<Remembered>>,
    /// The present definition plans the occurrences after this.
    planned: Occurrence,
    /// The longest jitter of the job's definitions on this instance: what they planned may wait for so long.
    jitter: Duration,
    /// The longest quarantine that a lease of the job needs which may still be held: by the definitions on this
    /// instance, also former ones, and by the leases that others were seen to hold. A run keeps the lease that it was
    /// granted with, and after a loss of the store's data nobody can look that lease up.
    quarantine: Duration,
    queue: Queue,
    /// See [`JobState::owes`].
    owed: Option<Occurrence>,
    /// Occurrences whose next attempt this instance waits for.
    awaited: BTreeSet<Occurrence>,
    /// The job cannot be claimed or registered.
    pub(super) trouble: Noted,
    /// When the last trouble was over, Unix ms.
    trouble_until: i64,
    /// The job is not claimed, because the store must not be relied on.
    pub(super) noted_unreliable: Noted,
    /// The triggers that wait.
    triggers: BTreeMap<String, Waiting>,
    /// Triggers that were decided, as far as this instance knows: after a loss of its data the store is told their
    /// keys. Oldest first.
    triggered: Vec<Triggered>,
    /// The epoch in which the store has been told of the triggers.
    told_triggers: Option<Box<EpochName>>,
    /// The store has been told that this instance has the job enabled, and it still has.
    told_presence: bool,
    /// This instance was without the job before, and the store has not been told yet that it is back.
    absence: Option<Box<Absence>>,
    changes: Changes,
}

impl JobState {
    pub fn new(definition: Arc<Job>, account: Account) -> Self {
        Self {
            jitter: definition.jitter,
            quarantine: definition.lease.quarantine,
            definition,
            account,
            standing: Standing::New(RegisterWhen::Now),
            newest: Occurrence(0),
            since: Occurrence(0),
            waits_since: None,
            lost_until: 0,
            remembered: None,
            planned: Occurrence(0),
            queue: Queue::default(),
            owed: None,
            awaited: BTreeSet::new(),
            trouble: Noted::default(),
            trouble_until: 0,
            noted_unreliable: Noted::default(),
            triggers: BTreeMap::new(),
            triggered: vec![],
            told_triggers: None,
            told_presence: false,
            absence: None,
            changes: Changes {
                changed: 0,
                to_register: 1,
            },
        }
    }

    pub fn changes(&self) -> Changes {
        self.changes
    }
    fn change(&mut self) {
        self.changes.changed += 1;
    }

    /// The newest occurrence known to be decided.
    pub fn newest(&self) -> Occurrence {
        self.newest
    }
    pub fn quarantine(&self) -> Duration {
        self.quarantine
    }
    /// What people asked of it, as far as this instance knows.
    pub fn remembered(&self) -> Remembered {
        self.remembered.as_deref().cloned().unwrap_or_default()
    }
    /// Occurrences after this are owed.
    fn floor(&self) -> Occurrence {
        self.newest.max(self.since)
    }
    pub(super) fn decided(&mut self, at: Occurrence) {
        self.newest = self.newest.max(at);
    }

    // ---- its definition ----

    /// What is to be kept in mind of the job while this instance is without it: what people asked for outlasts that,
    /// too. Not what waits: others decide it meanwhile.
    pub fn memory(&self) -> Remembered {
        Remembered {
            triggered: self.triggered.clone(),
            ..self.remembered()
        }
    }
    pub fn recall(&mut self, memory: Remembered, newest: Occurrence) {
        self.decided(newest);
        self.triggered = memory.triggered;
        let asked = Remembered {
            triggered: vec![],
            ..memory
        };
        self.remembered = (asked != Remembered::default()).then(|| asked.into());
    }

    /// The job comes back after this instance was without it.
    pub fn comes_back(&mut self, after: Absence, now: Option<Occurrence>) {
        let until = now.map_or(0, |now| now.0);
        self.absence = Some(Box::new(Absence { until, ..after }));
    }
    /// Replaces the definition by one that is enabled if the old one is; a run that goes on keeps its own. Occurrences
    /// after the returned one are to be planned anew.
    pub fn redefine(
        &mut self,
        definition: Arc<Job>,
        now: Option<Occurrence>,
    ) -> Option<Occurrence> {
        let old = &self.definition;
        let other_plan =
            old.schedule_digest != definition.schedule_digest || old.jitter != definition.jitter;
        let mut plan_after = None;
        // Before the store's first answer nothing was planned.
        if other_plan && let Some(now) = now {
            // What the old schedule had planned for later is not planned any more, and the new one begins now.
            self.queue.forget_after(now);
            if let Some(absence) = &mut self.absence {
                absence.until = now.0;
            }
            if !matches!(self.standing, Standing::New(_)) {
                self.keep_waiting(now);
                plan_after = Some(now);
            }
        }
        self.jitter = self.jitter.max(definition.jitter);
        self.quarantine = self.quarantine.max(definition.lease.quarantine);
        self.definition = definition;
        self.register_now();
        self.change();
        plan_after
    }

    /// An occurrence that the replaced definition planned up to now, and that waits for the jitter of that definition,
    /// stays owed: nothing that the new definition plans may overtake it. There is at most one, because each starts
    /// before the next. The dispatcher hands it in when its time has come.
    fn keep_waiting(&mut self, now: Occurrence) {
        let job = &self.definition;
        let floor = self.floor().max(self.planned);
        self.planned = now;
        if job.jitter.is_zero() || !job.enabled || floor >= now {
            return;
        }
        let oldest = Occurrence(now.0 - job.jitter.as_millis() as i64);
        let Some(at) = timetable::latest(&job.schedules, floor.max(oldest), now) else {
            return;
        };
        let start_at = jitter::start_at_ms(job.name.as_str(), &job.schedules, at, job.jitter);
        if start_at > now.0 {
            self.queue.wait(Due {
                job: job.name.clone(),
                target: Target::Scheduled(at),
                start_at,
                start_by: start_at.saturating_add(job.start_within.as_millis() as i64),
                overdue: false,
                missed: vec![],
            });
        }
    }

    /// For a job that is removed from the configuration: a claim that records all its undecided occurrences, and the
    /// moment from which nobody can start them any more.
    pub fn given_up(&self, me: &Me, now: Occurrence, run: RunId) -> Option<(Claim, i64)> {
        let job = &self.definition;
        let floor = self.floor();
        if matches!(self.standing, Standing::New(_)) {
            return None;
        }
        next_of(&job.schedules, floor).filter(|next| *next <= now)?;
        let all = timetable::overdue(&job.schedules, floor, now, OVERDUE_KEPT);
        let older = all.older.map(|o| Missed {
            first: o.first,
            last: o.last,
            count: o.count,
        });
        let recent = all.recent.into_iter().map(Missed::one);
        let mut missed: Vec<Missed> = older.into_iter().chain(recent).collect();
        let last = missed.pop()?;
        let within = self.jitter + job.start_within + START_MARGIN;
        let after = last.last.0.saturating_add(within.as_millis() as i64);
        let claim = Claim {
            job: job.name.clone(),
            target: Target::Scheduled(last.last),
            known: self.newest,
            missed,
            run,
            instance: me.instance.clone(),
            host: me.host.clone(),
            trigger: Trigger::Schedule,
            start_by: claim::REMOVED,
            lease: job.lease.length.as_millis() as i64,
            overlap: job.overlap,
            on_crash: job.on_crash,
            max_attempts: job.max_attempts,
            definition: job.digest.clone(),
            observed: None,
            holds: vec![],
            cause: None,
        };
        Some((claim, after))
    }

    // ---- its standing with the store ----

    pub fn is_registered(&self) -> bool {
        self.standing == Standing::Registered
    }
    pub fn may_be_claimed(&self) -> bool {
        self.standing.may_claim()
    }
    fn register_now(&mut self) {
        self.standing.ask(RegisterWhen::Now);
        self.changes.to_register += 1;
    }
    /// What the store has of the job may have changed.
    pub fn stale(&mut self) {
        self.standing.become_stale();
        self.changes.to_register += 1;
    }
    /// As [`JobState::stale`], and a job that waits for the end of a quarantine is registered at once.
    pub fn resync(&mut self) {
        match self.standing.when() {
            Some(RegisterWhen::Refused(_)) => {}
            Some(RegisterWhen::Now | RegisterWhen::QuarantineIsOver(_)) | None => {
                self.register_now()
            }
        }
    }
    /// The store lost or changed its data.
    pub(super) fn lost(&mut self) {
        self.standing.become_lost();
        self.changes.to_register += 1;
    }
    /// This instance did not follow the job for a while: before it claims anything, it learns where the job stands and
    /// what is overdue.
    pub fn look_anew(&mut self) {
        self.standing.become_new();
        self.changes.to_register += 1;
        self.change();
    }
    /// The queue was filled by a wrong clock: the instance asks the store again, and plans as after a start.
    pub(super) fn plan_anew(&mut self) {
        self.queue.forget_scheduled();
        self.planned = Occurrence(0);
        self.look_anew();
    }
    /// True: what counts as decided lies in the future.
    pub fn ahead(&self, now: Occurrence) -> bool {
        self.floor().0 > now.0.saturating_add(SLACK.as_millis() as i64)
    }

    /// How long to wait before asking the store to register the job; None: it is registered.
    pub fn register_in(&self, epoch: &Epoch, now: Boottime) -> Option<Duration> {
        let began = self.absence.as_ref().and_then(|absence| absence.began);
        let contradiction = began.map_or(Duration::ZERO, |at| (at + CONTRADICTION).since(now));
        let wait = match self.standing.when()? {
            RegisterWhen::Now => Duration::ZERO,
            RegisterWhen::Refused(at) => (*at + REFUSED_AGAIN).since(now),
            RegisterWhen::QuarantineIsOver(of) if **of == EpochName::of(epoch) => {
                self.adoptable_in(epoch, now)
            }
            RegisterWhen::QuarantineIsOver(_) => Duration::ZERO,
        };
        Some(wait.max(contradiction))
    }
    /// How long until this instance may have the store adopt the job's state in `epoch`.
    pub fn adoptable_in(&self, epoch: &Epoch, now: Boottime) -> Duration {
        match self.told_presence {
            true => epoch.adoptable_in(self.quarantine, now),
            false => epoch.adoptable_last_in(self.quarantine, now),
        }
    }
    /// The store says to wait until the quarantine of `epoch` is over. `now_ms`: Unix ms of the store's clock, if that
    /// is known.
    pub fn register_after_quarantine(&mut self, epoch: &Epoch, now_ms: Option<i64>) {
        let of = Box::new(EpochName::of(epoch));
        if self.waited_in(epoch).is_none() {
            self.waits_since = now_ms.map(|now| (of.clone(), now));
        }
        self.standing.ask(RegisterWhen::QuarantineIsOver(of));
    }
    /// Since when it has waited so in `epoch`.
    fn waited_in(&self, epoch: &Epoch) -> Option<i64> {
        let of = self.waits_since.as_ref();
        of.filter(|(of, _)| **of == EpochName::of(epoch))
            .map(|(_, since)| *since)
    }
    /// The store granted nothing at that time, because its data was new.
    pub fn was_kept_back(&self, at: Occurrence) -> bool {
        at.0 <= self.lost_until
    }
    /// Until when an occurrence waited for the store, Unix ms: it refused what was asked about the job, or could not be
    /// reached, or granted nothing at that instant.
    pub fn away_until(&self, at: Occurrence, now_ms: i64) -> i64 {
        match self.is_troubled() || self.was_kept_back(at) {
            true => now_ms,
            false => self.trouble_until,
        }
    }
    /// The store refuses what is asked about the job, or cannot be reached.
    pub fn is_troubled(&self) -> bool {
        !self.trouble.is_new()
    }
    fn trouble_is_over(&mut self, now_ms: i64) {
        if self.is_troubled() {
            self.trouble_until = now_ms;
            self.trouble.over();
        }
    }

    /// The store refuses to register the job. True: no trouble was noted before.
    pub fn refused(&mut self, now: Boottime) -> bool {
        self.standing.ask(RegisterWhen::Refused(now));
        let news = self.trouble.is_new();
        self.trouble.first_for(&TargetId::Scheduled(Occurrence(0)));
        news
    }

    /// Asks the store to register the job in `epoch`.
    pub fn registration(&self, me: &Me, epoch: &Epoch) -> Register {
        let job = &self.definition;
        let mut remembered = self.remembered();
        let told = self.told_triggers.as_deref();
        if told != Some(&EpochName::of(epoch)) {
            remembered.triggered.clone_from(&self.triggered);
            let waiting = self.triggers.iter().map(|(key, waiting)| Pending {
                key: key.clone(),
                at: waiting.at_ms,
                by: None,
            });
            remembered.triggers = waiting.collect();
        }
        Register {
            job: job.name.clone(),
            schedule: job.schedule_digest.to_string(),
            definition: job.digest.clone(),
            known: self.newest,
            adopt: None,
            epoch: None,
            lost: vec![],
            counted_from: 0,
            lost_before: 0,
            presence: match job.enabled {
                false => Presence::Disabled,
                true if self.told_presence => Presence::Kept,
                true => Presence::New,
            },
            owed: (self.absence.as_ref()).map_or(vec![], |absence| absence.owed.clone()),
            back_at: self.absence.as_ref().map_or(0, |absence| absence.until),
            waits_since: match self.standing {
                // Otherwise what was planned meanwhile is in the queue.
                Standing::New(_) if job.enabled => self.waited_in(epoch).unwrap_or(0),
                _ => 0,
            },
            remembered,
            instance: me.instance.clone(),
            host: me.host.clone(),
            on_crash: match job.on_state_loss {
                OnStateLoss::Skip => OnCrash::Fail,
                OnStateLoss::Rerun => job.on_crash,
            },
            max_attempts: job.max_attempts,
        }
    }

    /// `ask`, changed so that it adopts `state`: what the store has of the job from before `epoch`, which began at
    /// `born`.
    pub fn adoption(
        definition: &Job,
        mut ask: Register,
        epoch: &Epoch,
        born: i64,
        state: Option<&State>,
    ) -> Register {
        ask.adopt = Some(epoch.incarnation.to_string());
        ask.epoch = Some(epoch.id.to_string());
        if definition.on_state_loss == OnStateLoss::Skip {
            ask.lost_before = born;
        }
        let newest = state.map_or(0, |s| s.newest.max(s.since)).max(ask.known.0);
        ask.counted_from = newest;
        let early = state.map_or([].as_slice(), |s| &s.early);
        // What is planned while the instance is without the job is not owed.
        let lost = match ask.presence {
            Presence::Disabled => None,
            _ if newest == 0 => None,
            _ => lost_between(definition, newest.max(ask.back_at), born),
        };
        ask.lost = (ask.owed.iter().copied().chain(lost))
            .flat_map(|l| timetable::undecided(&definition.schedules, Occurrence(newest), early, l))
            .collect();
        ask
    }

    /// The store knows `definition`, and what it was told in `epoch`: from here on the job's occurrences can be
    /// claimed. None: another definition has replaced it meanwhile, and has to be registered first.
    pub fn registered(
        &mut self,
        definition: &Arc<Job>,
        state: &State,
        epoch: &Epoch,
        now_ms: i64,
    ) -> Option<Registered> {
        if !Arc::ptr_eq(&self.definition, definition) {
            return None;
        }
        let now = Occurrence(now_ms);
        let mut follows = Registered::default();
        // A decided occurrence in the future was learned by a wrong clock, which may have been corrected.
        let ahead = self.ahead(now);
        if ahead {
            (self.newest, self.since) = (Occurrence(state.newest), Occurrence(state.since));
        }
        self.newest = self.newest.max(Occurrence(state.newest));
        self.since = self.since.max(Occurrence(state.since));
        (self.waits_since, self.lost_until) = (None, state.lost_until);
        let remembered = Remembered::of(state);
        self.remembered = (remembered != Remembered::default()).then(|| remembered.into());
        self.told_triggers = Some(Box::new(EpochName::of(epoch)));
        self.told_presence = definition.enabled;
        if definition.enabled {
            self.absence = None;
        }
        self.learn_triggered(&state.triggered, now_ms);
        if ahead && !self.ahead(now) {
            self.plan_anew();
        }
        follows.ahead = self.ahead(now).then(|| self.floor());
        if matches!(self.standing, Standing::New(_)) {
            // An occurrence whose jitter has not passed yet is not overdue.
            let floor = Occurrence(state.newest.max(state.since));
            let until = now.0.saturating_sub(definition.jitter.as_millis() as i64);
            let until = Occurrence(until).max(floor);
            let overdue = next_of(&definition.schedules, floor).filter(|next| *next <= until);
            if definition.enabled && overdue.is_some() {
                follows.catch_up = Some((floor, until));
                let backlog = Backlog {
                    schedules: definition.schedules.clone(),
                    jitter: self.jitter,
                    after: floor,
                    last: until,
                };
                self.overdue(backlog, true, now_ms);
            }
            follows.plan_after = Some(until);
        }
        self.find_own_grants(state, &mut follows);
        // Only now: nothing newer may be claimed before the overdue occurrences are in the queue.
        self.standing = Standing::Registered;
        self.trouble_is_over(now_ms);
        self.change();
        follows.ask_again.extend(
            state
                .open
                .iter()
                .filter(|o| o.next_attempt.is_some())
                .map(|o| o.run.occurrence),
        );
        let others = |o: &&Open| o.next_attempt.is_some() || !self.account.is_running(o.run.id);
        follows.watch = state.open.iter().filter(others).cloned().collect();
        follows.triggers.extend(state.triggers.iter().cloned());
        Some(follows)
    }

    /// Finds grants of this instance whose answers were lost, and whose occurrences it claims no more.
    fn find_own_grants(&mut self, state: &State, follows: &mut Registered) {
        let awaited = &self.awaited;
        self.account.unanswered.retain(|target, Asked { run, .. }| {
            !matches!(target, TargetId::Scheduled(at)
                if at.0 <= state.newest && !awaited.contains(at) && state.held_by(*run).is_none())
        });
        for open in &state.open {
            if self
                .account
                .unanswered
                .values()
                .any(|asked| asked.run == open.run.id)
            {
                match &open.run.key {
                    None => follows.ask_again.push(open.run.occurrence),
                    Some(key) => follows.triggers.push(Pending {
                        key: key.clone(),
                        at: open.run.granted_at,
                        by: None,
                    }),
                }
            }
        }
    }

    /// What to ask so as to learn what became of the claims that have no answer.
    pub fn unanswered(&self) -> Vec<Ask> {
        let asks = self.account.unanswered.keys().map(|id| {
            let within = self.definition.start_within.as_millis() as i64;
            let waits = match id {
                TargetId::Manual(key) => self.triggers.get(key),
                TargetId::Scheduled(_) => None,
            };
            let start_by = waits.map_or(i64::MAX, |waits| waits.at_ms.saturating_add(within));
            Ask {
                start_by,
                ..Ask::again(id.target())
            }
        });
        asks.collect()
    }

    // ---- leases of others ----

    /// Notes a lease that another instance holds. Returns how long the job's quarantine has to be now.
    pub fn note_lease(&mut self, open: &Open) -> Duration {
        self.quarantine = quarantine::seen(&self.definition.lease, self.quarantine, open);
        self.quarantine
    }
    /// A run of the job has ended elsewhere.
    pub fn ended_elsewhere(&mut self) {
        self.change();
    }
    /// Starts to wait for the next attempt of an occurrence. False: this instance waits for it already.
    pub fn await_next_attempt(&mut self, at: Occurrence) -> bool {
        self.awaited.insert(at)
    }
    /// This instance waits for that attempt no more.
    pub fn awaits_no_longer(&mut self, at: Occurrence) {
        self.awaited.remove(&at);
    }

    // ---- what is due ----

    /// The first occurrence that is not decided: the next one of the schedule, or one in the queue. If its time has
    /// passed, it waits for its jitter or its turn, and must not be jumped over.
    pub fn next_undecided(&self) -> Option<Occurrence> {
        let job = &self.definition;
        let next = next_of(&job.schedules, self.floor()).filter(|_| job.enabled);
        let queued = self.queue.first_after(self.newest);
        let owed = self.owed.filter(|at| *at > self.newest);
        next.into_iter().chain(queued).chain(owed).min()
    }

    /// Of a disabled job: the first occurrence that was planned before, and that this instance has not recorded yet.
    pub fn owes(&mut self, first: Option<Occurrence>) {
        self.owed = first;
    }

    /// True: the store knows the job, and a claim for `ask` jumps over no due occurrence.
    pub(super) fn may_claim(&self, ask: &Ask) -> bool {
        self.may_be_claimed() && !self.queue.jumped(self.newest, &ask.target, &ask.missed)
    }

    /// An occurrence is due. False: it is decided.
    pub fn due(&mut self, due: Due, now_ms: i64) -> bool {
        if matches!(due.target, Target::Scheduled(at) if at <= self.newest) {
            return false;
        }
        if !due.overdue && now_ms.saturating_sub(due.start_at) > STALLED_MS {
            self.queue.outage();
        }
        if !self.queue.absorb(&self.definition, &due) {
            let account = &self.account;
            let asked = |t: &Target| account.asked(&t.id()).is_some();
            self.queue.push(due, now_ms, asked);
            self.queue.compact(&self.definition, asked);
        }
        true
    }

    /// Many occurrences are due, because nobody looked for a while. `absent`: no instance was running.
    pub fn overdue(&mut self, backlog: Backlog, absent: bool, now_ms: i64) {
        let account = &self.account;
        let asked = |t: &Target| account.asked(&t.id()).is_some();
        let segment = Segment { backlog, absent };
        self.queue.overdue(segment, now_ms, asked);
        if !absent {
            self.queue.outage();
        }
    }

    /// A manual trigger waits in the store, since `at_ms` by its clock.
    pub fn triggered(&mut self, key: &str, at_ms: i64, now: Boottime) -> Due {
        let waiting = Waiting {
            learned: now,
            at_ms,
        };
        self.triggers.entry(key.to_owned()).or_insert(waiting);
        let within = self.definition.start_within.as_millis() as i64;
        Due {
            job: self.definition.name.clone(),
            target: Target::Manual {
                key: key.to_owned(),
                before: None,
            },
            start_at: at_ms,
            start_by: at_ms.saturating_add(within),
            overdue: false,
            missed: vec![],
        }
    }
    /// When the time of a trigger is over, on our own clock.
    pub(super) fn trigger_is_over(&self, key: &str) -> Option<Boottime> {
        let waiting = self.triggers.get(key)?;
        Some(waiting.learned + self.definition.start_within)
    }
    /// What the occurrence of a trigger is that comes to no run. None: it is decided.
    pub fn planned_never(&self, key: &str) -> Option<Occurrence> {
        let waiting = self.triggers.get(key)?;
        Some(claim::planned_never(waiting.at_ms))
    }
    /// How long a trigger has waited since this instance learned of it. None: it is decided.
    pub fn trigger_waits(&self, key: &str, now: Boottime) -> Option<Duration> {
        Some(now.since(self.triggers.get(key)?.learned))
    }
    /// The trigger is decided: `at` is its occurrence.
    pub(super) fn trigger_is_decided(&mut self, key: &str, at: Occurrence, now_ms: i64) {
        self.triggers.remove(key);
        let triggered = Triggered {
            key: key.to_owned(),
            occurrence: at,
            at: now_ms,
        };
        self.learn_triggered(&[triggered], now_ms);
    }
    /// What the store says of triggers counts for more than what this instance concluded.
    fn learn_triggered(&mut self, news: &[Triggered], now_ms: i64) {
        if !news.is_empty() {
            let keys: HashSet<&str> = news.iter().map(|t| &*t.key).collect();
            self.triggered.retain(|t| !keys.contains(&*t.key));
            self.triggered.extend_from_slice(news);
            self.triggered.sort_by_key(|t| t.at);
        }
        claim::forget_keys(&mut self.triggered, now_ms);
    }

    pub(super) fn outage(&mut self) {
        self.queue.outage();
    }
    pub(super) fn ran_early(&mut self, early: Vec<Occurrence>) {
        self.queue.ran(early);
    }

    /// What to ask for next.
    pub fn next(&mut self, now_ms: i64) -> Next {
        if self.queue.is_empty() {
            return Next::Idle;
        }
        if !self.may_be_claimed() {
            self.queue.outage();
            return Next::Wait;
        }
        if let Some(segments) = self.queue.next_segments(self.newest) {
            return Next::Unfold(self.definition.clone(), segments, self.newest);
        }
        self.queue.trim(&self.definition.schedules, self.newest);
        let account = &self.account;
        let asked = |t: &Target| account.asked(&t.id()).is_some();
        match self.queue.next_claim(&self.definition, now_ms, asked) {
            Some(claim) => Next::Ask(claim),
            None => Next::Idle,
        }
    }

    /// The backlog of [`Next::Unfold`] was listed.
    pub fn unfolded(&mut self, unfolded: Unfolded, now_ms: i64) {
        let account = &self.account;
        let asked = |t: &Target| account.asked(&t.id()).is_some();
        self.queue.unfolded(unfolded, now_ms, asked);
    }

    /// How the claim that [`JobState::next`] named has ended, at `now_ms`. `draining`: this instance takes nothing new.
    pub fn ended(&mut self, target: &Target, ended: &ContestEnd, draining: bool, now_ms: i64) {
        match ended {
            ContestEnd::Undecided => self.queue.outage(),
            // Other instances claim now. This one learns what they decided, and what nobody did, when it claims again.
            ContestEnd::Draining if draining => {
                self.queue.clear();
                self.triggers.clear();
            }
            // What others decided is known now, and the next claim allows for it.
            ContestEnd::Draining | ContestEnd::Gone | ContestEnd::Behind => {}
            ContestEnd::Won(_)
            | ContestEnd::Lost { .. }
            | ContestEnd::Settled
            | ContestEnd::Recorded(_) => {
                self.trouble_is_over(now_ms);
                self.queue.done(target);
                if let Target::Manual { key, .. } = target {
                    self.triggers.remove(key);
                }
            }
        }
    }

    /// A run has ended here.
    pub fn run_has_ended(&mut self, run: RunId) {
        self.account.run_has_ended(run);
        self.change();
    }
}

/// The occurrences of `job` after `newest` and up to `born`, if they are to be given up after a loss of the store's
/// data.
fn lost_between(job: &Job, newest: i64, born: i64) -> Option<Missed> {
    if job.on_state_loss == OnStateLoss::Rerun {
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
