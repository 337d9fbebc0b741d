//! The JSON views of runs, instances and jobs. Pure: the time comes from the store's answers.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use jiff::fmt::temporal::DateTimePrinter;
use serde::{Serialize, Serializer};

use crate::{
    config::{Config, Job},
    logic::{
        attempts, belief,
        claim::{Last, Open, Pending, State, trigger_is_over},
        coming::{Coming, PassedOver},
        judge::{self, Decided},
        notify::{
            Notes,
            stand::{self, Lease},
        },
    },
    model::{
        FencingToken, InstanceId, JobName, Occurrence, Outcome, RunId, RunRecord, Trigger,
        rfc3339_ms,
    },
    store::{Fleet, Info, Notices},
    words,
};

/// If an instance's clock differs from the store's by more than this, `status` warns; milliseconds.
pub(crate) const CLOCK_WARNING_MS: f64 = 500.0;
/// An instance without a heartbeat for this long is shown as silent; milliseconds.
pub(crate) const SHOWN_SILENT_AFTER_MS: i64 = 15_000;
/// While others live, an instance without a heartbeat for this long is not shown any more; milliseconds. The store
/// keeps it for longer: one that starts while the store's clock is wrong by hours has to see the others.
const GONE_AFTER_MS: i64 = 3_600_000;

/// How far an instance's heartbeat may be dated after the store's clock; milliseconds.
const CLOCKS_APART_MS: i64 = belief::SLACK.as_millis() as i64;

/// Unix milliseconds of the store's clock, written as RFC 3339 in UTC with milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "http", schema(value_type = String, format = DateTime))]
pub(crate) struct Time(pub i64);

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        // Many times as fast as `rfc3339_ms`: an answer with a thousand jobs has fifty thousand times.
        const PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(at) => s.serialize_str(&PRINTER.timestamp_to_string(&at)),
            Err(_) => s.serialize_str(&rfc3339_ms(self.0)),
        }
    }
}

impl From<Occurrence> for Time {
    fn from(o: Occurrence) -> Self {
        Self(o.0)
    }
}

/// One attempt of an occurrence, or an occurrence that was not run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct RunView {
    pub run_id: Option<RunId>,
    pub job: JobName,
    pub occurrence: Time,
    pub trigger: Trigger,
    pub attempt: u32,
    pub fencing_token: Option<FencingToken>,
    pub instance: Option<InstanceId>,
    pub host: Option<String>,
    /// While it runs: when it was granted.
    pub started_at: Option<Time>,
    pub finished_at: Option<Time>,
    /// From the planned instant to the start; of a later attempt, from when that was due. Null: not known, as while it
    /// runs.
    pub lateness_ms: Option<i64>,
    pub duration_ms: Option<i64>,
    pub outcome: Outcome,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub output_tail: String,
    pub output_truncated: bool,
    pub error: Option<String>,
    /// CPU time of all its processes; null: not known.
    pub cpu_ms: Option<u64>,
    /// The most memory that one of its processes had at a time.
    pub peak_memory_bytes: Option<u64>,
    /// What it wrote to stdout and stderr.
    pub output_bytes: Option<u64>,
    /// How many processes the command left when it ended, which soloist ended. Written only if there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_processes: Option<u32>,
    /// How many occurrences without a run this record stands for, up to `occurrence`. Written only if it is not 1.
    #[serde(skip_serializing_if = "is_one")]
    pub count: u64,
    /// Who asked for it: cancelled what was cancelled, paused or skipped what was skipped, triggered any other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

fn is_one(n: &u64) -> bool {
    *n == 1
}

impl From<RunRecord> for RunView {
    fn from(r: RunRecord) -> Self {
        Self {
            run_id: r.run_id,
            job: r.job,
            occurrence: r.occurrence.into(),
            trigger: r.trigger,
            attempt: r.attempt,
            fencing_token: r.fencing_token,
            instance: r.instance,
            host: r.host,
            started_at: r.started_at.map(Time),
            finished_at: r.finished_at.map(Time),
            lateness_ms: r.lateness_ms,
            duration_ms: r.duration_ms,
            outcome: r.outcome,
            exit_code: r.exit_code,
            signal: r.signal,
            output_tail: r.output_tail,
            output_truncated: r.output_truncated,
            error: r.error,
            cpu_ms: r.usage.cpu_ms,
            peak_memory_bytes: r.usage.peak_memory_bytes,
            output_bytes: r.usage.output_bytes,
            left_processes: r.usage.left_processes,
            count: r.count,
            by: r.by,
        }
    }
}

impl RunView {
    /// What there is to say of it: its error, what its command left, and who asked for it.
    pub(crate) fn remarks(&self) -> String {
        let left = self.left_processes.map(words::left_behind);
        let left = left.map(|left| format!("soloist {left}"));
        let did = match self.outcome {
            Outcome::Cancelled => "cancelled",
            _ => "asked for",
        };
        let by = self.by.as_ref().map(|by| format!("{did} by {by}"));
        let all = [self.error.clone(), left, by];
        all.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }

    /// An attempt that has not ended. Its start is the moment of the grant: only its instance knows the true one, so
    /// nobody else can say how late it is.
    pub(crate) fn running(name: &JobName, open: &Open) -> Self {
        let run = &open.run;
        Self {
            run_id: Some(run.id),
            job: name.clone(),
            occurrence: run.occurrence.into(),
            trigger: run.trigger,
            attempt: run.attempt,
            fencing_token: Some(run.occurrence.token(run.attempt)),
            instance: Some(run.instance.clone()),
            host: Some(run.host.clone()),
            started_at: Some(Time(run.granted_at)),
            finished_at: None,
            lateness_ms: None,
            duration_ms: None,
            outcome: Outcome::Running,
            exit_code: None,
            signal: None,
            output_tail: String::new(),
            output_truncated: false,
            error: None,
            cpu_ms: None,
            peak_memory_bytes: None,
            output_bytes: None,
            left_processes: None,
            count: 1,
            by: open.by.clone(),
        }
    }
}

/// When an attempt was due: the first at the planned instant, and a later one after the end of the one before. Counted
/// from the instant, a retry or a takeover in time would look late. A run whose holder died ended when it was found
/// dead. None: not known.
fn due(
    job: Option<&Job>,
    occurrence: Time,
    attempt: u32,
    trigger: Trigger,
    end_before: impl FnOnce() -> Option<Time>,
) -> Option<Time> {
    if attempt <= 1 {
        return Some(occurrence);
    }
    let pause = match trigger {
        Trigger::Retry => attempts::after_failure(job?, attempt - 1)?.delay_ms,
        _ => 0,
    };
    end_before().map(|end| Time(end.0.saturating_add(pause)))
}

fn lateness(attempt: u32, started: Option<Time>, due: Option<Time>) -> Option<i64> {
    let late = started?.0.saturating_sub(due?.0);
    Some(if attempt > 1 { late.max(0) } else { late })
}

/// An attempt, or an occurrence that was not run, in one of the forms in which it is shown.
pub(crate) trait Attempt {
    fn at(&self) -> (Time, u32);
    fn trigger(&self) -> Trigger;
    fn started(&self) -> Option<Time>;
    fn ended(&self) -> Option<Time>;
    fn set_lateness(&mut self, ms: Option<i64>);
}

impl Attempt for RunView {
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

impl Attempt for RunRecord {
    fn at(&self) -> (Time, u32) {
        (self.occurrence.into(), self.attempt)
    }
    fn trigger(&self) -> Trigger {
        self.trigger
    }
    fn started(&self) -> Option<Time> {
        self.started_at.map(Time)
    }
    fn ended(&self) -> Option<Time> {
        self.finished_at.map(Time)
    }
    fn set_lateness(&mut self, ms: Option<i64>) {
        self.lateness_ms = ms;
    }
}

/// Counts the lateness of later attempts from when they were due. `runs` are of `job`, in any order.
pub(crate) fn late_since_due(runs: &mut [impl Attempt], job: Option<&Job>) {
    if runs.iter().all(|r| r.at().1 <= 1) {
        return;
    }
    let ended: HashMap<(Time, u32), Option<Time>> = (runs.iter())
        .filter(|r| r.at().1 > 0)
        .map(|r| (r.at(), r.ended()))
        .collect();
    for r in runs.iter_mut().filter(|r| r.at().1 > 1) {
        let (at, attempt) = r.at();
        let before = || ended.get(&(at, attempt - 1)).copied().flatten();
        let due = due(job, at, attempt, r.trigger(), before);
        r.set_lateness(lateness(attempt, r.started(), due));
    }
}

/// Exit code, or the signal (by name if it has one).
pub(crate) fn exit(r: &RunView) -> String {
    match (r.exit_code, r.signal) {
        (_, Some(signal)) => signal_name(signal),
        (Some(code), None) => code.to_string(),
        (None, None) => String::new(),
    }
}

/// `SIGTERM`; `signal 50` of one that is seldom seen.
pub(crate) fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        n => return format!("signal {n}"),
    };
    name.to_owned()
}

/// Instances and jobs of a fleet at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct StatusView {
    /// The store's address, without secrets.
    pub store: String,
    pub namespace: String,
    /// The store's clock, or the time that instances use instead if they do not believe it.
    pub now: Time,
    /// What is wrong with the store, in words, as its server shows it; empty if it does not say.
    pub problems: Vec<String>,
    /// How far the store's clock is ahead of the time that instances believe, if they do not believe that clock.
    pub clock_doubt_ms: Option<i64>,
    /// No live instance believes the store's clock, so none starts anything.
    pub nobody_believes: bool,
    /// Digest of the caller's configuration.
    pub config: String,
    pub epoch: EpochView,
    pub instances: Vec<InstanceView>,
    pub jobs: Vec<JobView>,
    /// Jobs of the fleet that the configuration of the instance lacks that sends the notifications.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notifier_lacks: Option<LacksView>,
}

/// Jobs that other instances have, and the instance that sends the fleet's notifications lacks.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct LacksView {
    /// The instance that sends.
    pub instance: InstanceId,
    /// The first ten.
    pub jobs: Vec<JobName>,
    /// How many more.
    pub more: u64,
    /// The channels over which they are told all the same; empty: nobody is told of them.
    pub channels: Vec<String>,
    /// The same in words.
    #[serde(skip)]
    pub words: String,
}

impl LacksView {
    /// `lease`: that of the notifier, as the store has it.
    pub(crate) fn of(lease: Option<&str>) -> Option<Self> {
        let lease = Lease::read(lease?).filter(|lease| !lease.over)?;
        let lacks = lease.lacks?;
        Some(Self {
            words: format!("{}: {}", lacks.names(), lacks.told()),
            instance: lease.holder,
            jobs: lacks.jobs,
            more: lacks.more,
            channels: lacks.channels,
        })
    }
}

impl StatusView {
    /// There are live instances, and none has the caller's configuration.
    pub(crate) fn others_configuration(&self) -> bool {
        let mut live = self.instances.iter().filter(|i| !i.silent).peekable();
        live.peek().is_some() && live.all(|i| i.config != self.config)
    }
}

/// The time since the store started or lost its data.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct EpochView {
    pub since: Time,
    /// False: nothing is granted yet.
    pub open: bool,
    /// How much longer nothing is granted; null if no instance is up to end it.
    pub wait_ms: Option<i64>,
    /// Why nothing is granted, until when, and how not to wait for that; empty if it is open.
    #[serde(skip)]
    pub words: String,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct InstanceView {
    pub instance: InstanceId,
    pub host: String,
    pub pid: u32,
    pub version: String,
    pub started_at: Time,
    pub last_seen: Time,
    /// It sent no heartbeat for [`SHOWN_SILENT_AFTER_MS`].
    pub silent: bool,
    /// This host's wall clock minus the store's.
    pub clock_offset_ms: f64,
    pub clock_warning: bool,
    /// How far the store's clock is ahead of the time that this instance believes, if it does not believe that clock.
    pub clock_doubt_ms: Option<i64>,
    pub config: String,
    /// Most instances have another configuration.
    pub config_differs: bool,
    /// Jobs loaded.
    pub jobs: u32,
    pub running: Vec<RunningView>,
    /// It was asked to drain, or it is draining.
    pub draining: bool,
    /// Who last asked it to drain, or no longer to drain.
    pub drained_by: Option<String>,
    /// Why it starts nothing, otherwise than because it drains or does not believe the store's clock.
    pub halted: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct RunningView {
    pub job: JobName,
    pub occurrence: Time,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct JobView {
    pub job: JobName,
    /// Its state in a word: why it needs attention, what holds it, or what became of its newest decided occurrence.
    #[cfg_attr(feature = "http", schema(schema_with = states))]
    pub state: &'static str,
    /// Why a person should look at it, as `missed 3 of the last 10`; null: nobody needs to. Whether it runs now changes
    /// nothing.
    pub attention: Option<String>,
    #[cfg_attr(feature = "http", schema(value_type = Option<String>))]
    pub description: Option<Arc<str>>,
    #[cfg_attr(feature = "http", schema(value_type = Vec<String>))]
    pub tags: Arc<[String]>,
    /// As written in the configuration; empty: the job runs only when triggered.
    #[cfg_attr(feature = "http", schema(value_type = Vec<String>))]
    pub schedule: Arc<[String]>,
    #[cfg_attr(feature = "http", schema(value_type = String))]
    pub timezone: Arc<str>,
    pub enabled: bool,
    /// An instance has registered the job with the store.
    pub known: bool,
    /// Its state is from before the store lost data: nothing is granted until an instance adopts that state.
    pub quarantined: bool,
    /// The newest decided occurrence.
    pub newest: Option<Time>,
    /// The store's clock was wrong: everything up to this future instant counts as decided.
    pub decided_ahead: Option<Time>,
    /// The newest decided occurrence was skipped or missed.
    pub newest_not_run: bool,
    /// The newest attempt that ended, or occurrence of which nobody knows whether it ran (`attempt` 0).
    pub last: Option<LastView>,
    pub running: Vec<RunView>,
    /// Occurrences that wait for their next attempt.
    pub awaited: Vec<AwaitedView>,
    /// The next occurrence that will run, without jitter.
    pub next: Option<Time>,
    #[cfg_attr(feature = "http", schema(format = DateTime))]
    pub next_local: Option<String>,
    /// The next planned occurrence, if it will not run.
    pub passed_over: Option<PassedOverView>,
    /// In a box, because most jobs have none.
    pub paused: Option<Box<PauseView>>,
    /// How many of the next occurrences will be skipped.
    pub skip: u32,
    /// Manual triggers that nobody has claimed yet.
    pub triggers: usize,
    /// Those of `triggers` that nobody may start any more: they are recorded as missed once an instance may start jobs.
    #[serde(skip_serializing_if = "is_none_of")]
    pub triggers_over: usize,
    /// The fleet registered, or runs, another definition than the caller's configuration has, and a live instance may
    /// have that one.
    pub other_definition: bool,
    /// The lease of an active run was not renewed for its whole length, so its holder is probably gone.
    pub lapsed: bool,
    /// Since when it has had no success, as far as is known, if that is longer than its `expect_success_within`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overdue: Option<Time>,
    /// Why the job's state in the store cannot be read. Then nothing else is known, and the job does not start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<String>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_none_of(n: &usize) -> bool {
    *n == 0
}

/// A planned occurrence that will not run. Neither will those that are planned between it and `next`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct PassedOverView {
    pub occurrence: Time,
    pub why: PassedOver,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct LastView {
    pub occurrence: Time,
    pub attempt: u32,
    /// Null: nobody knows whether it ran, because the store lost its data.
    pub run_id: Option<RunId>,
    /// The one that ran it, or that recorded that nobody knows.
    pub instance: Option<InstanceId>,
    pub outcome: Outcome,
    /// Null: its command was never started, or nobody knows.
    pub started_at: Option<Time>,
    /// Of a run whose end nobody saw: when it was found dead; if nobody knows of a run: the planned instant.
    pub finished_at: Time,
    /// From `started_at` to `finished_at`.
    pub duration_ms: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct AwaitedView {
    pub occurrence: Time,
    /// The number of the next attempt.
    pub attempt: u32,
    pub at: Time,
    pub trigger: Trigger,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct PauseView {
    pub since: Time,
    pub until: Option<Time>,
    pub reason: Option<String>,
    /// Who asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

impl JobView {
    /// A loss of the store's data takes the state of runs that end later, and are recorded all the same: the last run
    /// is the newest of the state and of the records.
    pub(crate) fn look_at_records(&mut self, recorded: Option<LastView>) {
        let newer = |r: &LastView| {
            let last = self.last.as_ref();
            last.is_none_or(|l| r.run_id != l.run_id && r.finished_at > l.finished_at)
        };
        self.last = recorded.filter(newer).or_else(|| self.last.take());
    }

    /// Says how the job is, once all else is known of it. `records`: the last ones, newest first; without any, the
    /// last run tells. `elsewhere`: only other instances have it.
    pub(crate) fn judge(&mut self, elsewhere: bool, records: impl Iterator<Item = Decided>) {
        let mut records: Vec<Decided> = records.collect();
        let last = self.last.as_ref().filter(|_| records.is_empty());
        records.extend(last.map(|l| (Occurrence(l.occurrence.0), l.outcome, 1)));
        let running = self.running.iter().map(|r| r.occurrence);
        let open = running.chain(self.awaited.iter().map(|a| a.occurrence));
        let facts = judge::Facts {
            unreadable: self.unreadable.is_some(),
            ahead: self.decided_ahead.is_some(),
            lapsed: self.lapsed,
            overdue: self.overdue.is_some(),
            paused: self.paused.is_some(),
            enabled: self.enabled,
            open: open.map(|at| Occurrence(at.0)).collect(),
            retries: !self.awaited.is_empty(),
            elsewhere,
            known: self.known,
            quarantined: self.quarantined,
            manual: self.schedule.is_empty(),
        };
        (self.state, self.attention) = judge::judge(&facts, &records);
    }
}

impl LastView {
    /// The newest of these records that is of a run, or of what may have run. `records`: newest first.
    pub(crate) fn newest(records: impl IntoIterator<Item = RunRecord>) -> Option<Self> {
        let mut all = records.into_iter();
        let r = all.find(|r| may_have_run(r.attempt, r.outcome))?;
        let end = r.finished_at.or(r.started_at).unwrap_or(r.occurrence.0);
        Some(Self {
            occurrence: r.occurrence.into(),
            attempt: r.attempt,
            run_id: r.run_id,
            instance: r.instance,
            outcome: r.outcome,
            started_at: r.started_at.map(Time),
            finished_at: Time(end),
            duration_ms: r.duration_ms,
        })
    }
}

/// Whether such a record is of a run, or of what may have run.
pub(crate) fn may_have_run(attempt: u32, outcome: Outcome) -> bool {
    attempt > 0 || outcome == Outcome::Unknown
}

/// The words for the state of a job.
#[cfg(feature = "http")]
fn states() -> utoipa::openapi::Object {
    let outcomes = Outcome::ALL.into_iter().map(Outcome::as_str);
    utoipa::openapi::ObjectBuilder::new()
        .schema_type(utoipa::openapi::Type::String)
        .enum_values(Some(outcomes.chain(judge::WORDS.split(' '))))
        .build()
}

/// The view of a job at `now` (Unix ms of the store's clock). `job`: what the caller's configuration says of it, if it
/// has it; `incarnation` is that of the store.
// Long: one field after the other.
pub(crate) fn job(
    name: &JobName,
    job: Option<&Job>,
    state: Option<&State>,
    now: i64,
    incarnation: &str,
) -> JobView {
    let none = State::default();
    let known = state.is_some();
    let st = state.unwrap_or(&none);
    let decided = st.newest.max(st.since);
    let ahead = decided.saturating_sub(now) > belief::SLACK.as_millis() as i64;
    let coming = job.map(|job| (job, Coming::of(job, state, now)));
    let next = coming.as_ref().and_then(|(_, coming)| coming.next);
    let local = |o| Some(job?.schedules.first()?.local(o));
    let passed_over = coming
        .as_ref()
        .and_then(|(job, coming)| coming.passed_over(job));
    let held = || st.open.iter().filter(|o| o.next_attempt.is_none());
    let other = |definition: &str| {
        !definition.is_empty() && job.is_some_and(|job| definition != job.digest)
    };
    let mut view = JobView {
        job: name.clone(),
        state: "none",
        attention: None,
        description: job.and_then(|job| job.description.clone()),
        tags: job.map_or_else(Arc::default, |job| job.tags.clone()),
        schedule: job.map_or_else(Arc::default, |job| job.schedule_text.clone()),
        timezone: job.map_or_else(|| "UTC".into(), |job| job.timezone.clone()),
        enabled: job.is_none_or(|job| job.enabled),
        known,
        quarantined: known && st.incarnation != incarnation,
        newest: (st.newest > 0).then_some(Time(st.newest)),
        decided_ahead: ahead.then_some(Time(decided)),
        // With overlap = "allow" an older run may end last; then `last` is not the newest occurrence, and this stays
        // false.
        newest_not_run: job.is_none_or(|job| job.overlap != crate::logic::claim::Overlap::Allow)
            && st.open.is_empty()
            && st.last.as_ref().is_some_and(|l| l.occurrence.0 < st.newest),
        last: st.last.as_ref().map(|l| LastView {
            occurrence: l.occurrence.into(),
            attempt: l.attempt,
            run_id: Some(l.run),
            instance: Some(l.instance.clone()),
            outcome: l.outcome,
            started_at: l.started.map(Time),
            finished_at: Time(l.ended()),
            duration_ms: l.started.map(|at| l.ended().saturating_sub(at).max(0)),
        }),
        running: held().map(|o| RunView::running(name, o)).collect(),
        awaited: st
            .open
            .iter()
            .filter_map(|o| {
                o.next_attempt.map(|next| AwaitedView {
                    occurrence: o.run.occurrence.into(),
                    attempt: o.run.attempt.saturating_add(1),
                    at: Time(next.at),
                    trigger: next.trigger,
                })
            })
            .collect(),
        next: next.map(Time::from),
        next_local: next.and_then(local),
        passed_over: passed_over.map(|(o, why)| PassedOverView {
            occurrence: o.into(),
            why,
        }),
        paused: paused(st, now).map(Box::new),
        skip: st.skip,
        triggers: st.triggers.len(),
        triggers_over: job.map_or(0, |job| {
            let over = |t: &&Pending| trigger_is_over(t.at, job.start_within, now);
            st.triggers.iter().filter(over).count()
        }),
        other_definition: other(&st.definition) || held().any(|o| other(&o.run.definition)),
        lapsed: held().any(|o| now - o.renewed_at > o.run.lease),
        overdue: job.and_then(|job| overdue(job, success(st), now)),
        unreadable: None,
    };
    view.judge(job.is_none(), std::iter::empty());
    view
}

/// When the run that ended last succeeded, if it did.
pub(crate) fn success(st: &State) -> Option<i64> {
    let last = st.last.as_ref();
    last.filter(|l| l.outcome == Outcome::Succeeded)
        .map(Last::ended)
}

/// Since when the job has had no success, as far as is known: by its state, and by what the notifier noted of it.
pub(crate) fn without_success(state: Option<&State>, noted: Option<i64>) -> Option<i64> {
    noted.max(state.and_then(success))
}

/// The notifier has seen no success of the job since then: since its last one, or since it first saw the job.
pub(crate) fn noted(said: &Notices, job: &JobName) -> Option<i64> {
    let note = said.notes.get(&format!("{}{job}", stand::OF_JOB))?;
    let notes: Notes = serde_json::from_str(note).ok()?;
    Some(notes.success.unwrap_or(notes.first))
}

/// `since`, if the job has been without a success from then on for too long.
pub(crate) fn overdue(job: &Job, since: Option<i64>, now: i64) -> Option<Time> {
    let within = job.alarms.expect_success_within.filter(|_| job.enabled)?;
    let within = i64::try_from(within.as_millis()).unwrap_or(i64::MAX);
    since
        .filter(|since| now.saturating_sub(*since) >= within)
        .map(Time)
}

/// The pause that is in force at `now`.
pub(crate) fn paused(st: &State, now: i64) -> Option<PauseView> {
    let p = st.pause.as_ref()?;
    p.until.is_none_or(|until| now < until).then(|| PauseView {
        since: Time(p.at),
        until: p.until.map(Time),
        reason: p.reason.clone(),
        by: p.by.clone(),
    })
}

/// Whether the store grants at `now`, and how long that may still take.
pub(crate) fn epoch(fleet: &Fleet, now: i64) -> EpochView {
    let quarantine = i64::try_from(fleet.quarantine.as_millis()).unwrap_or(i64::MAX);
    let live = |i: &&Info| i.seen.abs_diff(now) <= SHOWN_SILENT_AFTER_MS as u64;
    let since = waits_since(fleet, fleet.instances.values().filter(live));
    let since = since.filter(|_| !fleet.open && quarantine > 0);
    EpochView {
        since: Time(fleet.born),
        open: fleet.open,
        wait_ms: since.map(|since| since.saturating_add(quarantine).saturating_sub(now).max(0)),
        words: match fleet.open {
            true => String::new(),
            false if since.is_none() && fleet.instances.is_empty() && fleet.drains.is_empty() => {
                wait_in_words(since, quarantine, now, None) + FIRST_OF_ALL
            }
            false => wait_in_words(since, quarantine, now, newcomer(fleet)),
        },
    }
}

/// Added to a statement that something has not happened. The store knows nothing from before its `epoch`, if it had any
/// data then.
pub(crate) fn as_far_as_known(fleet: &Fleet) -> String {
    match fleet.born {
        // A file loses nothing.
        0 => String::new(),
        born => format!(
            ", as far as is known: at {} the store was new, was restarted or lost its data",
            words::instant(born)
        ),
    }
}

/// All live instances drain, because somebody asked them to or because they stop.
pub(crate) const DRAINED: &str = "all live instances drain or stop, so no job starts until one is undrained (`soloist \
                                  undrain INSTANCE`) or another one starts";

/// Whether there are live instances, and all of them drain.
pub(crate) fn drained(fleet: &Fleet, clock: Clock) -> bool {
    let live = |(_, info): &(&InstanceId, &Info)| !clock.silent(info);
    let mut live = fleet.instances.iter().filter(live).peekable();
    live.peek().is_some() && live.all(|(id, info)| fleet.is_draining(id, info))
}

/// The only instance that the store knows, if it was never there with other data: it may be started as a new fleet.
fn newcomer(fleet: &Fleet) -> Option<&InstanceId> {
    let mut instances = fleet.instances.iter();
    let (id, info) = instances.next()?;
    // One that has just sent its first heartbeat does not say since when it is up.
    let new = info.started_at == 0 || info.started_at >= fleet.born;
    (new && instances.next().is_none() && fleet.drains.is_empty()).then_some(id)
}

/// The store knows no instance.
const FIRST_OF_ALL: &str = "; if nothing of this fleet runs anywhere else, there is no need to wait: start the first \
                            one with --new-fleet";

/// Why jobs wait although they are due, while the store grants nothing because its data is new. `since`: when the first
/// of the live instances began to wait, for the `quarantine` (ms); None: none is up. `newcomer`: an instance that could
/// do without.
pub(crate) fn wait_in_words(
    since: Option<i64>,
    quarantine: i64,
    now: i64,
    newcomer: Option<&InstanceId>,
) -> String {
    // Rounded up.
    let seconds = |ms: i64| ms.saturating_add(999).div_euclid(1000).saturating_mul(1000);
    let until = since.map(|since| since.saturating_add(quarantine));
    let wait = match until {
        Some(until) if until > now => format!(
            "jobs wait up to {} more, until {}",
            words::span(seconds(until.saturating_sub(now))),
            words::instant(seconds(until))
        ),
        Some(until) => format!(
            "jobs wait until an instance sees that their wait, which was to end at {}, is over",
            words::instant(seconds(until))
        ),
        None => format!(
            "no instance is up, so no job starts; `soloist run` starts one, and jobs then wait {}",
            match quarantine {
                0 => "for as long as their lease".to_owned(),
                ms => format!("up to {}", words::span(seconds(ms))),
            }
        ),
    };
    let newcomer = newcomer.filter(|_| until.is_some_and(|until| until > now));
    let skip = newcomer.map_or(String::new(), |id| {
        format!(
            "; if nothing of this fleet runs anywhere else, there is no need to wait: stop {}, and start it once with \
            --new-fleet",
            words::line(id.as_str())
        )
    });
    format!(
        "{wait}: the store is new, was restarted or lost its data, and runs from before may still be alive{skip}"
    )
}

/// Since when that one of these instances has seen the epoch which has seen it for longest. A command may have seen it
/// before: that counts for nobody.
pub(crate) fn waits_since<'a>(
    fleet: &Fleet,
    instances: impl Iterator<Item = &'a Info>,
) -> Option<i64> {
    instances.map(|i| i.started_at.max(fleet.born)).min()
}

/// The time that a fleet uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Clock {
    /// The store's clock, or the time that live instances believe instead, Unix ms.
    pub now: i64,
    /// How far the store's clock is ahead of the time that live instances believe, if they do not believe that clock,
    /// ms.
    pub doubt_ms: Option<i64>,
    /// No live instance believes the store's clock, so none starts anything.
    pub nobody_believes: bool,
}

impl Clock {
    /// The store's clock shows `shown`.
    pub(crate) fn of(fleet: &Fleet, shown: i64) -> Self {
        let said = |i: &&Info| {
            let doubt = i.clock_doubt_ms?;
            let live = shown.saturating_sub(doubt).abs_diff(i.seen) <= SHOWN_SILENT_AFTER_MS as u64;
            live.then_some(doubt)
        };
        let doubts = fleet.instances.values();
        let doubt_ms = doubts
            .filter_map(|i| said(&i))
            .max_by_key(|ms| ms.saturating_abs());
        let mut clock = Self {
            now: shown,
            doubt_ms,
            nobody_believes: false,
        };
        clock.now = clock.right(shown);
        let mut live = fleet.instances.values().filter(|i| !clock.silent(i));
        clock.nobody_believes = doubt_ms.is_some() && live.all(|i| i.clock_doubt_ms.is_some());
        clock
    }

    /// The time that the fleet believes when the store's clock shows `shown`.
    pub(crate) fn right(&self, shown: i64) -> i64 {
        shown.saturating_sub(self.doubt_ms.unwrap_or(0))
    }

    /// The age of an instance's last heartbeat, ms. An instance dates heartbeats by the clock that it believes, and
    /// since this heartbeat it may have begun to doubt the store's clock, or to believe it.
    pub(crate) fn age(&self, info: &Info) -> i64 {
        let shown = self.now.saturating_add(self.doubt_ms.unwrap_or(0));
        let doubts = [info.clock_doubt_ms, self.doubt_ms, None];
        let ages = doubts.map(|d| {
            shown
                .saturating_sub(d.unwrap_or(0))
                .saturating_sub(info.seen)
        });
        let least = |age: &i64| (*age < -CLOCKS_APART_MS, age.saturating_abs());
        ages.into_iter().min_by_key(least).unwrap_or_default()
    }

    /// It sent no heartbeat for [`SHOWN_SILENT_AFTER_MS`].
    pub(crate) fn silent(&self, info: &Info) -> bool {
        self.age(info).saturating_abs() > SHOWN_SILENT_AFTER_MS
    }
}

/// The view of the whole fleet. `states` has the states of `config`'s jobs by name.
pub(crate) fn status(
    config: &Config,
    store: &str,
    fleet: &Fleet,
    states: &HashMap<JobName, State>,
    now: i64,
    incarnation: &str,
) -> StatusView {
    let clock = Clock::of(fleet, now);
    let now = clock.now;
    let instances = instances(fleet, &config.digest, clock, |job| states.get(job));
    let others = others_differ(&instances, &config.digest);
    let view = |j: &Arc<Job>| {
        let mut view = job(&j.name, Some(j), states.get(&j.name), now, incarnation);
        view.other_definition &= others;
        view
    };
    StatusView {
        store: store.to_owned(),
        namespace: config.store.namespace.clone(),
        now: Time(now),
        problems: vec![],
        clock_doubt_ms: clock.doubt_ms,
        nobody_believes: clock.nobody_believes,
        config: config.digest.clone(),
        epoch: epoch(fleet, now),
        jobs: config.jobs.values().map(view).collect(),
        instances,
        notifier_lacks: None,
    }
}

/// The views of the instances; `ours` is the digest of the caller's configuration, and `state` has the states of jobs
/// as far as they are known. The last heartbeat of an instance may have runs that have ended since: those of a dead one
/// were settled by their guards, or taken over.
pub(crate) fn instances<'s>(
    fleet: &Fleet,
    ours: &str,
    clock: Clock,
    state: impl Fn(&JobName) -> Option<&'s State>,
) -> Vec<InstanceView> {
    let now = clock.now;
    let common = most_common(fleet, ours, clock);
    let alone = fleet.instances.values().all(|info| clock.silent(info));
    let is_over = |id: &InstanceId, job: &JobName, at: Occurrence| {
        let runs =
            |o: &Open| o.next_attempt.is_none() && o.run.instance == *id && o.run.occurrence == at;
        state(job).is_some_and(|st| st.newest >= at.0 && !st.open.iter().any(runs))
    };
    fleet
        .instances
        .iter()
        .filter(|(_, info)| alone || clock.age(info).saturating_abs() <= GONE_AFTER_MS)
        .map(|(id, info)| InstanceView {
            instance: id.clone(),
            host: info.host.clone(),
            pid: info.pid,
            version: info.version.clone(),
            started_at: Time(info.started_at),
            last_seen: Time(now.saturating_sub(clock.age(info))),
            silent: clock.silent(info),
            clock_offset_ms: info.clock_offset_ms,
            clock_warning: info.clock_offset_ms.abs() > CLOCK_WARNING_MS,
            clock_doubt_ms: info.clock_doubt_ms,
            config: info.config.clone(),
            config_differs: info.config != common,
            jobs: info.jobs,
            running: info
                .running
                .iter()
                .filter(|(job, at)| !is_over(id, job, *at))
                .map(|(job, occurrence)| RunningView {
                    job: job.clone(),
                    occurrence: (*occurrence).into(),
                })
                .collect(),
            draining: fleet.is_draining(id, info),
            // Nobody asks an instance that stops.
            drained_by: (fleet.drained_by.get(id).cloned())
                .filter(|_| fleet.drains.contains(id) == fleet.is_draining(id, info)),
            halted: info.halted.clone(),
        })
        .collect()
}

/// A live instance has another configuration than the caller: a definition in the store that the caller does not have
/// may be that one's. Otherwise only an instance that is gone had it.
pub(crate) fn others_differ(instances: &[InstanceView], ours: &str) -> bool {
    instances.iter().any(|i| !i.silent && i.config != ours)
}

/// The configuration that most instances have; if several are equally frequent, ours, or else always the same one of
/// them. Silent instances count only if no other is left.
fn most_common(fleet: &Fleet, ours: &str, clock: Clock) -> String {
    let mut counts: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for info in fleet.instances.values() {
        let count = counts.entry(info.config.as_str()).or_default();
        count.0 += usize::from(!clock.silent(info));
        count.1 += 1;
    }
    counts
        .into_iter()
        .max_by_key(|(digest, count)| (*count, *digest == ours))
        .map_or_else(|| ours.to_owned(), |(digest, _)| digest.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retry_is_late_only_from_when_it_was_due() {
        let text = "[jobs.draw]\ncommand = 'x'\nretry = { attempts = 3, interval = '3s', backoff = 'exponential' }\n";
        let config = crate::config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
        let config = config.expect("valid");
        let job = config.jobs.values().next().expect("a job");
        let run = |attempt: u32, trigger, from: i64, to: i64| {
            let open =
                RunRecord::without_run(&job.name, Occurrence(100_000), trigger, Outcome::Failed);
            RunView::from(RunRecord {
                attempt,
                ..open.lasting(Some(from), Some(to))
            })
        };
        let all = [
            run(4, Trigger::Takeover, 113_030, 113_100),
            run(3, Trigger::Retry, 112_020, 113_000),
            run(2, Trigger::Retry, 104_010, 106_000),
            run(1, Trigger::Schedule, 100_005, 101_000),
        ];
        let late = |runs: &[RunView], job: Option<&Job>| -> Vec<Option<i64>> {
            let mut runs = runs.to_vec();
            late_since_due(&mut runs, job);
            runs.iter().map(|r| r.lateness_ms).collect()
        };
        assert_eq!(
            late(&all, Some(job)),
            [Some(30), Some(20), Some(10), Some(5)]
        );
        // While it runs nobody knows when its command was started.
        let open = Open {
            renewed_at: 104_010,
            ..Open::first(100_000)
        };
        assert_eq!(RunView::running(&job.name, &open).lateness_ms, None);
        // Without its configuration, or the attempt before, nobody knows when it was due.
        assert_eq!(late(&all, None), [Some(30), None, None, Some(5)]);
        assert_eq!(late(&all[1..2], Some(job)), [None]);
    }

    /// A command that looked before the first instance came has waited for nothing.
    #[test]
    fn the_first_wait_counts_from_the_instance_that_has_waited_longest() {
        use std::time::Duration;
        let info = |started_at: i64, seen: i64| Info {
            seen,
            process: 1,
            started_at,
            jobs: 1,
            ..Info::default()
        };
        let mut fleet = Fleet {
            id: "e".into(),
            before: None,
            born: 100_000,
            quarantine: Duration::from_secs(17),
            open: false,
            instances: BTreeMap::new(),
            drains: vec![],
            drained_by: Default::default(),
        };
        let wait = |fleet: &Fleet| epoch(fleet, 200_000).wait_ms;
        assert_eq!(wait(&fleet), None, "nobody waits");
        let mut up = |name: &str, info| {
            fleet.instances.insert(InstanceId::new(name), info);
            epoch(&fleet, 200_000).wait_ms
        };
        assert_eq!(up("late", info(198_000, 199_000)), Some(15_000));
        assert_eq!(up("gone", info(0, 150_000)), Some(15_000));
        assert_eq!(up("first", info(190_000, 199_000)), Some(7_000));
        // It was there before the epoch began.
        assert_eq!(up("old", info(50_000, 199_000)), Some(0));
    }

    #[test]
    fn only_who_may_start_as_a_new_fleet_is_told_how_not_to_wait() {
        use std::time::Duration;
        let info = |started_at: i64| Info {
            seen: 199_000,
            process: 1,
            started_at,
            jobs: 1,
            ..Info::default()
        };
        let of = |instances: &[(&str, i64)], drains: &[&str], open| {
            let fleet = Fleet {
                id: "e".into(),
                before: None,
                born: 190_500,
                quarantine: Duration::from_millis(17_250),
                open,
                instances: (instances.iter())
                    .map(|(id, at)| (InstanceId::new(id), info(*at)))
                    .collect(),
                drains: drains.iter().map(|id| InstanceId::new(id)).collect(),
                drained_by: Default::default(),
            };
            epoch(&fleet, 200_000).words
        };
        let why = "the store is new, was restarted or lost its data, and runs from before may still be alive";
        let until = "jobs wait up to 8 s more, until 1970-01-01T00:03:28Z";
        let skip = "; if nothing of this fleet runs anywhere else, there is no need to wait: stop a, and start it once \
                    with --new-fleet";
        for first in [0, 190_500] {
            assert_eq!(
                of(&[("a", first)], &[], false),
                format!("{until}: {why}{skip}")
            );
        }
        // It has seen other data; somebody drained one; another one is there.
        let both = [("a", 190_500), ("b", 195_000)];
        for (instances, drains) in [
            (&[("a", 190_499)][..], &[][..]),
            (&both[..1], &["a"]),
            (&both, &[]),
        ] {
            assert_eq!(of(instances, drains, false), format!("{until}: {why}"));
        }
        let nobody = format!(
            "no instance is up, so no job starts; `soloist run` starts one, and jobs then wait up to 18 s: {why}"
        );
        let first = "; if nothing of this fleet runs anywhere else, there is no need to wait: start the first one \
                     with --new-fleet";
        assert_eq!(of(&[], &[], false), format!("{nobody}{first}"));
        assert_eq!(of(&[], &["a"], false), nobody);
        assert_eq!(of(&both, &[], true), "");
        let over = "jobs wait until an instance sees that their wait, which was to end at 1970-01-01T00:03:18Z, is over: ";
        let said = wait_in_words(Some(180_000), 17_250, 200_000, None);
        assert_eq!(said, format!("{over}{why}"));
    }

    #[test]
    fn times_are_written_as_jiff_writes_them() {
        let last = jiff::Timestamp::MAX.as_second() * 1000;
        let mut ms: Vec<i64> = vec![
            0,
            1,
            951_782_400_000,
            4_107_542_399_999,
            last,
            last - 1,
            last + 999,
            -1,
        ];
        // Each day of eight hundred years, at some millisecond of it.
        ms.extend((0..292_194_i64).map(|day| day * 86_400_000 + day * 7919 % 86_400_000));
        for ms in ms {
            assert_eq!(serde_json::json!(Time(ms)), rfc3339_ms(ms), "{ms}");
        }
    }
}
