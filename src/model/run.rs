//! Names of jobs and instances, occurrences, runs, and the records of runs.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::FencingToken;

/// The name of a job: its key under `[jobs]`. It is one that [`is_name`]. The configuration and the library's `Elector`
/// check that; this type does not.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema), schema(value_type = String))]
pub struct JobName(Arc<str>);

impl JobName {
    /// The length of the longest name, in bytes.
    pub const LONGEST: usize = 100;

    pub fn new(name: &str) -> Self {
        Self(name.into())
    }
    /// True if a name may contain `c`. Names are part of keys in the store and of paths.
    pub fn allows(c: char) -> bool {
        c.is_ascii_alphanumeric() || "-_.".contains(c)
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a job or an instance may have this name. Names are segments of the API's paths, and browsers and HTTP
/// clients make another path of one with the segment `.` or `..`.
pub fn is_name(text: &str) -> bool {
    let lengths = 1..=JobName::LONGEST;
    lengths.contains(&text.len()) && text.chars().all(JobName::allows) && !is_dots(text)
}

/// `.` or `..`.
pub fn is_dots(text: &str) -> bool {
    matches!(text, "." | "..")
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// The name of one soloist process: `<hostname>-<short random>` unless configured.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema), schema(value_type = String))]
pub struct InstanceId(Arc<str>);

impl InstanceId {
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// The id of one execution of a command (UUIDv7). It is also the nonce of the claim: one instance uses the same id for
/// one attempt of one occurrence, so that a claim that it repeats after a lost reply gets the first answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema), schema(value_type = String, format = "uuid"))]
pub struct RunId(pub uuid::Uuid);

#[cfg(test)]
thread_local! {
    static IDS: std::cell::Cell<Option<fn() -> u128>> = const { std::cell::Cell::new(None) };
}

impl RunId {
    /// A new id; its time part is this host's wall clock and carries no promise.
    pub fn random() -> Self {
        #[cfg(test)]
        if let Some(next) = IDS.get() {
            return Self(uuid::Uuid::from_u128(next()));
        }
        Self(uuid::Uuid::now_v7())
    }

    /// From now on this thread takes its ids from there.
    #[cfg(all(test, feature = "daemon"))]
    pub(crate) fn come_from(source: fn() -> u128) {
        IDS.set(Some(source));
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for RunId {
    type Err = uuid::Error;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        s.parse().map(Self)
    }
}

/// The last millisecond of the year 9999.
pub const LAST_MS: i64 = 253_402_300_799_999;

/// Checks a time in Unix milliseconds that comes from another program. Within these years no sum, and no time in
/// microseconds, overflows.
///
/// # Errors
/// The time is before 1970 or after the year 9999.
pub fn possible_ms(ms: i64) -> Result<i64, String> {
    match ms {
        0..=LAST_MS => Ok(ms),
        _ => Err(format!("{ms} ms is no time from 1970 to the year 9999")),
    }
}

/// Deserialises a field with a time that [`possible_ms`] accepts, or with a length of time in milliseconds.
pub fn ms<'de, D: Deserializer<'de>>(d: D) -> Result<i64, D::Error> {
    possible_ms(i64::deserialize(d)?).map_err(D::Error::custom)
}

/// As [`ms`], for a field that may be empty.
pub fn ms_or_none<'de, D: Deserializer<'de>>(d: D) -> Result<Option<i64>, D::Error> {
    let ms = Option::<i64>::deserialize(d)?;
    ms.map(possible_ms).transpose().map_err(D::Error::custom)
}

/// A planned instant of a job, in Unix milliseconds (UTC); never the moment at which an instance woke up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Occurrence(pub i64);

impl<'de> Deserialize<'de> for Occurrence {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        ms(d).map(Self)
    }
}

impl Occurrence {
    /// The token of the `attempt`-th lease of this occurrence. It grows with both, so the tokens of one job strictly
    /// increase, and no store needs a counter, which it could lose.
    pub fn token(self, attempt: u32) -> FencingToken {
        FencingToken(
            self.0
                .saturating_mul(1000)
                .saturating_add(i64::from(attempt)),
        )
    }
    pub fn timestamp(self) -> jiff::Timestamp {
        jiff::Timestamp::from_millisecond(self.0).unwrap_or(jiff::Timestamp::MAX)
    }
}

/// As RFC 3339 in UTC with milliseconds: `2026-03-01T03:00:00.000Z`.
impl fmt::Display for Occurrence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&rfc3339_ms(self.0))
    }
}

/// Unix milliseconds as RFC 3339 in UTC with exactly three decimals.
pub fn rfc3339_ms(ms: i64) -> String {
    match jiff::Timestamp::from_millisecond(ms) {
        Ok(t) => format!("{t:.3}"),
        Err(_) => format!("{ms} ms"),
    }
}

/// Why a run started. The command gets it as `SOLOIST_TRIGGER`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub enum Trigger {
    /// The schedule: its planned instant had come.
    Schedule,
    /// The occurrence was overdue when this instance learned of it, for example after downtime, but still within
    /// `start_within`.
    CatchUp,
    /// A person or a script ran `soloist trigger`.
    Manual,
    /// The previous attempt failed, and the job has `retry`.
    Retry,
    /// The holder of the previous attempt died, and the job has `on_crash = "rerun"`.
    Takeover,
}

impl Trigger {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Schedule => "schedule",
            Self::CatchUp => "catch_up",
            Self::Manual => "manual",
            Self::Retry => "retry",
            Self::Takeover => "takeover",
        }
    }
}

/// How an occurrence, or one attempt of it, ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub enum Outcome {
    Running,
    Succeeded,
    /// The command ended with a code outside `success_codes` or by a signal, or could not start.
    Failed,
    TimedOut,
    /// `soloist cancel` ended it, or its instance stopped.
    Cancelled,
    /// A newer occurrence replaced it (`overlap = "replace"`).
    Replaced,
    /// The holder could no longer trust its lease and ended the command.
    LeaseLost,
    /// The daemon died; the guard ended the command.
    Crashed,
    /// The host vanished: soloist does not know how the run ended.
    Unknown,
    /// It did not run on purpose: the job was paused, a person skipped it, or the previous run was still active.
    Skipped,
    /// No instance could start it within `start_within`.
    Missed,
}

impl Outcome {
    pub const ALL: [Self; 11] = [
        Self::Running,
        Self::Succeeded,
        Self::Failed,
        Self::TimedOut,
        Self::Cancelled,
        Self::Replaced,
        Self::LeaseLost,
        Self::Crashed,
        Self::Unknown,
        Self::Skipped,
        Self::Missed,
    ];
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Replaced => "replaced",
            Self::LeaseLost => "lease_lost",
            Self::Crashed => "crashed",
            Self::Unknown => "unknown",
            Self::Skipped => "skipped",
            Self::Missed => "missed",
        }
    }
    /// Something ran and went wrong, which nobody wished. What a person ended or replaced is none of these.
    pub fn is_bad(self) -> bool {
        match self {
            Self::Failed | Self::TimedOut | Self::LeaseLost | Self::Crashed | Self::Unknown => true,
            Self::Running
            | Self::Succeeded
            | Self::Cancelled
            | Self::Replaced
            | Self::Skipped
            | Self::Missed => false,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Outcome {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|o| o.as_str() == s)
            .ok_or_else(|| {
                format!(
                    "unknown outcome `{s}`, expected one of {}",
                    Self::ALL.map(Self::as_str).join(", ")
                )
            })
    }
}

/// One run and its holder. All parts of soloist name a run by it, from its grant to its settlement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    #[serde(rename = "run")]
    pub id: RunId,
    pub occurrence: Occurrence,
    /// The number of this attempt, from 1.
    pub attempt: u32,
    pub trigger: Trigger,
    /// The key of the manual trigger, if one caused the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    pub instance: InstanceId,
    pub host: String,
    /// The length of its lease, in milliseconds.
    #[serde(deserialize_with = "ms")]
    pub lease: i64,
    /// The digest of the definition that runs.
    pub definition: String,
    /// When the store granted it, in Unix milliseconds of the store's clock.
    #[serde(deserialize_with = "ms")]
    pub granted_at: i64,
}

#[cfg(test)]
impl Run {
    /// The first attempt of an occurrence, granted to `a` at its instant.
    pub(crate) fn first(at: i64) -> Self {
        Self {
            id: RunId(uuid::Uuid::nil()),
            occurrence: Occurrence(at),
            attempt: 1,
            trigger: Trigger::Schedule,
            key: None,
            instance: InstanceId::new("a"),
            host: "a".to_owned(),
            lease: 15_000,
            definition: String::new(),
            granted_at: at,
        }
    }
}

impl Run {
    pub fn token(&self) -> FencingToken {
        self.occurrence.token(self.attempt)
    }
}

/// The record of one attempt, or of an occurrence that did not run, in the history. Times are Unix milliseconds of the
/// store's clock; the JSON of the commands shows them as RFC 3339.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// None for an occurrence without a run (skipped, missed).
    pub run_id: Option<RunId>,
    pub job: JobName,
    pub occurrence: Occurrence,
    pub trigger: Trigger,
    pub attempt: u32,
    pub fencing_token: Option<FencingToken>,
    pub instance: Option<InstanceId>,
    pub host: Option<String>,
    /// When the start of the command began; None: the command was never executed.
    #[serde(default, deserialize_with = "ms_or_none")]
    pub started_at: Option<i64>,
    /// When the last process of its tree was gone, which may be later than the end of the command.
    #[serde(default, deserialize_with = "ms_or_none")]
    pub finished_at: Option<i64>,
    /// From the planned instant to `started_at`; it includes the jitter and the wait for a free slot (`max_parallel`).
    pub lateness_ms: Option<i64>,
    /// From `started_at` to `finished_at`.
    pub duration_ms: Option<i64>,
    pub outcome: Outcome,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    /// The last bytes of stdout and stderr; bytes that are not UTF-8 are replaced.
    #[serde(default)]
    pub output_tail: String,
    /// True: the run wrote more than the store kept.
    #[serde(default)]
    pub output_truncated: bool,
    /// Why the run failed, or why the occurrence was skipped or missed, for people.
    pub error: Option<String>,
    /// The number of occurrences of which this is the record: 1, or more for a range that did not run and ends
    /// with `occurrence`.
    #[serde(default = "one")]
    pub count: u64,
    #[serde(default, skip_serializing_if = "Usage::is_unknown")]
    pub usage: Usage,
    /// What its start waited for longest, and how long, ms. None: it was not late, or nobody knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited: Option<(Wait, u64)>,
    /// Who asked for it: cancelled what was cancelled, paused or skipped what was skipped, triggered any other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

/// What the start of a run may wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wait {
    /// For the `jitter` of its job.
    Jitter,
    /// For one of the `max_parallel` places.
    Slot,
    /// For another occurrence of its job.
    Overlap,
    /// For an answer of the store, or until it granted again after a loss of its data, or until its clock was believed.
    StoreAway,
    /// For an instance that could start it.
    Overdue,
    /// For the host, which had granted runs to start.
    Host,
}

impl Wait {
    pub const ALL: [Self; 6] = [
        Self::Jitter,
        Self::Slot,
        Self::Overlap,
        Self::StoreAway,
        Self::Overdue,
        Self::Host,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Jitter => "jitter",
            Self::Slot => "slot",
            Self::Overlap => "overlap",
            Self::StoreAway => "store_away",
            Self::Overdue => "overdue",
            Self::Host => "host",
        }
    }

    /// Why something was not started in time.
    pub const fn cause(self) -> &'static str {
        match self {
            Self::Jitter => "its `jitter` delayed it",
            Self::Slot => "no slot was free: as many runs as `max_parallel` allows were going on",
            Self::Overlap => "the runs of the job before it had not ended",
            Self::StoreAway => {
                "the store did not answer, or granted nothing, or its clock was not believed"
            }
            Self::Overdue => {
                "no instance could start it: each was stopped, suspended, drained or cut off from the store, or had \
                               not registered the job yet, which was new or had been enabled again"
            }
            Self::Host => "its host took too long to start it, after the store had granted it",
        }
    }

    /// Why something was started late. `time`: how long it waited.
    pub fn delay(self, time: &str) -> String {
        match self {
            Self::Jitter => format!("its `jitter` delayed it by {time}"),
            Self::Slot => format!(
                "it waited {time} for a free slot: as many runs as `max_parallel` allows were going on"
            ),
            Self::Overlap => format!("it waited {time} for the run before it to end"),
            Self::StoreAway => {
                format!("it waited {time} for the store to answer, or for its clock to be believed")
            }
            Self::Overdue => {
                format!("no instance could start it for {time}; then it was caught up")
            }
            Self::Host => {
                format!("its host took {time} to start it, after the store had granted it")
            }
        }
    }
}

/// What a run took of its host; None: not known, because its guard was killed, or an older version recorded it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time, in user and kernel mode, of the command and of all processes that it started and that have ended, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<u64>,
    /// The most memory that one of its processes had at a time (resident, shared pages included), bytes. It is never
    /// less than what a command has before it is executed, which is a few MB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_memory_bytes: Option<u64>,
    /// What it wrote to stdout and stderr, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_bytes: Option<u64>,
    /// Processes that it left when it ended by itself, and that its guard ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_processes: Option<u32>,
}

impl Usage {
    fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
}

impl RunRecord {
    /// What it says of how its job is: of which occurrence, and how many of them.
    pub fn decided(&self) -> (Occurrence, Outcome, u64) {
        (self.occurrence, self.outcome, self.count)
    }

    /// The record of a run that has not begun yet.
    pub fn of(job: &JobName, run: &Run) -> Self {
        Self {
            run_id: Some(run.id),
            fencing_token: Some(run.token()),
            attempt: run.attempt,
            instance: Some(run.instance.clone()),
            host: Some(run.host.clone()),
            ..Self::without_run(job, run.occurrence, run.trigger, Outcome::Running)
        }
    }

    /// The record of an occurrence that did not run.
    pub fn without_run(
        job: &JobName,
        occurrence: Occurrence,
        trigger: Trigger,
        outcome: Outcome,
    ) -> Self {
        Self {
            run_id: None,
            job: job.clone(),
            occurrence,
            trigger,
            attempt: 0,
            fencing_token: None,
            instance: None,
            host: None,
            started_at: None,
            finished_at: None,
            lateness_ms: None,
            duration_ms: None,
            outcome,
            exit_code: None,
            signal: None,
            output_tail: String::new(),
            output_truncated: false,
            error: None,
            count: 1,
            usage: Usage::default(),
            waited: None,
            by: None,
        }
    }

    /// The same record with its times: `started` (None: the command never started) and `finished`.
    pub fn lasting(self, started: Option<i64>, finished: Option<i64>) -> Self {
        Self {
            started_at: started,
            finished_at: finished,
            lateness_ms: started.map(|at| at - self.occurrence.0),
            duration_ms: started.zip(finished).map(|(from, to)| (to - from).max(0)),
            ..self
        }
    }
}

fn one() -> u64 {
    1
}
