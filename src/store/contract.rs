//! The contract that every store of a fleet keeps, and the types of its requests and answers.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};

use super::Error;
use crate::{
    clock::{Boottime, StoreClock},
    logic::{
        claim::{
            Answer, Claim, Control, Controlled, Event, Register, Registration, Renew, Renewal,
            Settle, Settlement, State,
        },
        notify::lease::{Write, Written},
    },
    model::{InstanceId, JobName, Marks, Occurrence, RunId, RunRecord, ms},
};

/// The number of run records that the history keeps of each job.
pub const HISTORY_KEPT: usize = 200;
/// The number of decisions that the store keeps of each job, those of all instances together.
pub const DECISIONS_KEPT: usize = 400;
/// Redis removes the history of a job to which no record was added for this time; SQLite removes each record that is
/// older.
pub const RECORDS_TTL: Duration = Duration::from_secs(30 * 24 * 3600);
/// As [`RECORDS_TTL`], for decisions.
pub const DECISIONS_TTL: Duration = Duration::from_secs(3 * 24 * 3600);
/// How long the store keeps the output of a run after its last change.
pub const OUTPUT_TTL: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long the store keeps the entry of an instance that sends no heartbeat.
pub const FORGET_INSTANCE: Duration = Duration::from_secs(24 * 3600);
/// The most bytes of output in one command: over a slow connection more bytes would not arrive in time, and would
/// delay the requests behind them.
pub const OUTPUT_AT_ONCE: usize = 128 << 10;
/// The most bytes of one job's state, which has room for ten thousand keys of triggers. soloist did not write a larger
/// one, and does not read it.
pub const STATE_MOST: usize = 16 << 20;
/// The most bytes of one run's output that soloist puts together in memory.
pub const OUTPUT_MOST: usize = 64 << 20;
/// The highest number of a byte of output: every store can count exactly up to here (Lua's numbers end at 2^53).
pub const LAST_BYTE: u64 = 1 << 53;
/// The most claims, states or registrations in one command.
pub const BATCH: usize = 100;
/// The number of hints by which a slow listener may be behind; a listener that is further behind looks at all jobs
/// again. Their memory is allocated at once, 64 bytes for each hint.
pub(super) const HINTS: usize = 8192;
/// The same for hints of changes. Whoever needs them looks at all jobs now and then anyway.
pub(super) const CHANGES: usize = 1024;

/// The clock of a store that has none of its own: Unix microseconds.
pub type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// A store's answer, with the time that the store's clock showed when it answered.
#[derive(Debug, Clone)]
pub struct Reply<T> {
    pub value: T,
    /// Unix microseconds of the store's clock.
    pub now_us: i64,
    /// The incarnation of the store that answered.
    pub incarnation: Arc<str>,
    /// When the request left, or earlier: trust is counted from here.
    pub sent: Boottime,
    /// When the answer had arrived, or later: what it says about other instances was true before this time.
    pub received: Boottime,
}

impl<T> Reply<T> {
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Reply<U> {
        let Self {
            value,
            now_us,
            incarnation,
            sent,
            received,
        } = self;
        Reply {
            value: f(value),
            now_us,
            incarnation,
            sent,
            received,
        }
    }
}

/// What an instance reports about itself with each heartbeat.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Info {
    /// Unix ms of the store's clock at the last heartbeat; the store fills it in.
    #[serde(default, deserialize_with = "ms")]
    pub seen: i64,
    pub host: String,
    pub pid: u32,
    /// A random number that distinguishes this process from another one of the same name.
    #[serde(default)]
    pub process: u32,
    pub version: String,
    /// The digest of its configuration.
    pub config: String,
    /// This host's wall clock minus the store's clock as the instance believes it, in ms.
    pub clock_offset_ms: f64,
    /// This host's wall clock when the instance made this report, in Unix ms; 0: the report does not have it.
    #[serde(default, deserialize_with = "ms")]
    pub wall: i64,
    /// While the instance does not believe the store's clock: by how much that clock is ahead of the time that the
    /// instance believes, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_doubt_ms: Option<i64>,
    /// When the instance started, in Unix ms.
    #[serde(deserialize_with = "ms")]
    pub started_at: i64,
    /// Its active runs: job and occurrence.
    pub running: Vec<(JobName, Occurrence)>,
    /// It claims nothing, for a reason that is not in [`Fleet::drains`]: it stops, or the store has lost the request to
    /// drain.
    pub draining: bool,
    /// The number of jobs in its configuration.
    pub jobs: u32,
    /// When the store did not answer this process: the newest [`OUTAGES_KEPT`] times, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outages: Vec<Outage>,
    /// Why it claims nothing, otherwise than because it drains or doubts the store's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub halted: Option<String>,
}

/// An instance without a heartbeat for this long has no rank; milliseconds.
pub const LIVE_WITHIN_MS: i64 = 3500;

/// How many outages of the store an instance reports.
pub const OUTAGES_KEPT: usize = 4;

/// A time during which the store did not answer an instance, in Unix ms of the clock that the instance believes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Outage {
    /// The last answer before.
    #[serde(deserialize_with = "ms")]
    pub from: i64,
    /// The first answer after.
    #[serde(deserialize_with = "ms")]
    pub until: i64,
}

/// The fleet as the store knows it, and its epoch. An epoch lasts from one start of the server, or loss of its data, to
/// the next.
#[derive(Debug, Clone, PartialEq)]
pub struct Fleet {
    /// The id that names the epoch, together with the incarnation.
    pub id: Arc<str>,
    /// The entry of this instance before this heartbeat.
    pub before: Option<Info>,
    /// Unix ms of the store's clock when the first instance saw this epoch.
    pub born: i64,
    /// The longest quarantine that any instance needs.
    pub quarantine: Duration,
    /// True: the quarantine is over. No instance can still hold a lease from before this epoch that it did not reclaim.
    pub open: bool,
    pub instances: BTreeMap<InstanceId, Info>,
    /// The instances that `soloist drain` told to drain.
    pub drains: Vec<InstanceId>,
    /// Who last asked an instance to drain, or no longer to drain.
    pub drained_by: BTreeMap<InstanceId, String>,
}

#[cfg(test)]
impl Fleet {
    /// These instances in an epoch that grants; none was asked to drain.
    pub(crate) fn of(instances: impl IntoIterator<Item = (InstanceId, Info)>) -> Self {
        Self {
            id: "e".into(),
            before: None,
            born: 0,
            quarantine: Duration::ZERO,
            open: true,
            instances: instances.into_iter().collect(),
            drains: vec![],
            drained_by: BTreeMap::new(),
        }
    }
}

impl Fleet {
    /// An instance claims nothing, or will not as soon as it hears of the request to drain.
    pub fn is_draining(&self, id: &InstanceId, info: &Info) -> bool {
        info.draining || self.drains.contains(id)
    }
}

/// A heartbeat of one instance.
#[derive(Debug, Clone, PartialEq)]
pub struct Beat {
    pub instance: InstanceId,
    pub info: Info,
    /// The quarantine that this instance needs.
    pub quarantine: Duration,
    /// The epoch (incarnation, id) that this instance has seen for a whole quarantine, so that the store may open it.
    pub open: Option<(Arc<str>, Arc<str>)>,
}

/// What one instance decided about one occurrence, and when. `soloist why` shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    pub job: JobName,
    pub occurrence: Occurrence,
    pub instance: InstanceId,
    /// Unix ms of the store's clock, as this instance knows it.
    #[serde(deserialize_with = "ms")]
    pub at: i64,
    /// won, lost, paused, skipped, overlap, too_late, store_error, draining, quarantined, ...
    pub decision: String,
    #[serde(default)]
    pub detail: String,
}

/// A part of a run's output. Byte numbers count from the first byte that the run wrote.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    /// The number of the first byte of `data`.
    pub from: u64,
    /// At most [`OUTPUT_AT_ONCE`] bytes.
    pub data: Vec<u8>,
    /// The store already has more bytes after `data`.
    pub more: bool,
    /// The run has ended, and its holder is still storing the rest of its output.
    pub coming: bool,
    /// `data` is the end of the output that the store has, and no more will come.
    pub done: bool,
    /// If `done`: the number of bytes at the end of the output that the holder never stored.
    pub missing: u64,
    /// Which bytes came from stderr, also others than those of `data`. Empty if an earlier version wrote them.
    pub stderr: Marks,
}

impl Output {
    /// `data` of an output of which the store has the bytes before `stop`, and of which the run wrote `total`.
    pub(super) fn new(
        from: u64,
        data: Vec<u8>,
        stop: u64,
        done: bool,
        coming: bool,
        total: u64,
        stderr: Marks,
    ) -> Self {
        let more = !data.is_empty() && from.saturating_add(data.len() as u64) < stop;
        let done = done && !more;
        Self {
            from,
            data,
            more,
            coming,
            done,
            missing: if done { total.saturating_sub(stop) } else { 0 },
            stderr,
        }
    }
}

/// The end of a run's output, as it travels with the settlement.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tail {
    /// The number of bytes that the run wrote before this end.
    pub before: u64,
    /// All bytes of the end if they are few; otherwise empty.
    pub data: Vec<u8>,
    /// If `data` is empty: the number of bytes of the end. The holder stores them with [`Store::append_output`], before
    /// or after the settlement. The store gives up bytes that do not arrive within
    /// [`OUTPUT_PATIENCE`](super::OUTPUT_PATIENCE) after the settlement.
    pub more: u64,
    /// Which bytes came from stderr.
    #[serde(default)]
    pub stderr: Marks,
}

/// A property of a store with which soloist cannot keep its promises, or only some of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// No instance may start a run as long as the store has this problem.
    pub fatal: bool,
    /// What is wrong, and what to do about it.
    pub text: String,
}

/// The store of a fleet, which all its instances share. Every request is one atomic step, and the caller may repeat it
/// if the answer was lost; a request about several jobs is one step for each job. No method repeats a request
/// after an error.
///
/// # Cancel safety
/// If the caller drops a returned future before its end, the caller does not know whether the store made the step, as
/// after a lost answer. The caller may repeat the request.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The store's address for messages, without secrets.
    fn address(&self) -> &str;
    /// Where the store keeps the state of a job, for a person who has to repair it.
    fn place(&self, job: &JobName) -> String {
        job.to_string()
    }
    /// True if the store never loses data that it has acknowledged, so that it needs no quarantine.
    fn durable(&self) -> bool;
    /// True if the store's clock is this host's wall clock.
    fn local_clock(&self) -> bool {
        false
    }
    /// From now on each request says which time `clock` believes the store's clock to show. If the store's clock
    /// contradicts it ([`crate::logic::belief::in_doubt`]), the store decides nothing: it answers claims with
    /// [`Answer::InDoubt`] and registrations with [`Registration::Quarantined`]. It still makes renewals and
    /// settlements, and dates them by the believed time.
    fn believe(&self, clock: Arc<StoreClock>);

    /// The process is about to end: from now on a request waits but a moment for other processes that use the store.
    fn hurry(&self) {}

    /// The problems of the store's setup; empty if it has none.
    async fn check(&self) -> Result<Vec<Problem>, Error> {
        Ok(vec![])
    }

    /// Returns one answer for each claim, in order. All claims must come from one instance; their number is not
    /// limited. They travel in commands of up to [`BATCH`] claims, and if one command fails, the whole call does.
    async fn claim(&self, claims: &[Claim]) -> Result<Reply<Vec<Answer>>, Error>;
    /// Renews the lease of one run.
    async fn renew(&self, renew: &Renew) -> Result<Reply<Renewal>, Error>;
    /// Records how a run ended, and ends its lease. If the caller repeats it, the history still shows the run once.
    async fn settle(&self, settle: &Settle, output: &Tail) -> Result<Reply<Settlement>, Error>;

    /// Registers jobs. Returns for each the answer and the state that the job has then; the state is None if the store
    /// has none, or if it is not read because the clock is in doubt.
    async fn register(
        &self,
        jobs: &[Register],
    ) -> Result<Reply<Vec<(Registration, Option<State>)>>, Error>;
    /// Carries out a person's request about one job: a pause, a trigger and so on.
    async fn control(&self, job: &JobName, what: &Control) -> Result<Reply<Controlled>, Error>;
    /// All jobs that an instance ever registered, in no order.
    async fn jobs(&self) -> Result<Vec<JobName>, Error>;
    /// The state of each job, in order; None: the store has none.
    async fn observe(&self, jobs: &[JobName]) -> Result<Reply<Vec<Option<State>>>, Error>;

    /// Stores the heartbeat of an instance and returns the fleet. Without a heartbeat it only reads the fleet.
    async fn heartbeat(&self, beat: Option<&Beat>) -> Result<Reply<Fleet>, Error>;
    /// Somebody says that nothing of this fleet runs anywhere. If the store knows nothing of a fleet, its epoch gets
    /// this `id` and begins open, without a quarantine; otherwise it is not open, or has another id. A repeated
    /// request is answered as the first. A durable store has no quarantine.
    async fn found(&self, id: &str) -> Result<Reply<Fleet>, Error> {
        let _ = id;
        self.heartbeat(None).await
    }
    /// Removes the entry of an instance that ends, and its drain. `process` is that of [`Info`]: the entry of another
    /// process of the same name stays.
    async fn leave(&self, instance: &InstanceId, process: u32) -> Result<(), Error>;
    /// Tells an instance to drain (`on`), or no longer to drain. `by`: who asks.
    async fn drain(&self, instance: &InstanceId, on: bool, by: &str) -> Result<(), Error>;

    /// Adds to the decisions of jobs. A repeated request adds them again.
    async fn journal(&self, decisions: &[Decision]) -> Result<(), Error>;
    /// The decisions about a job, newest first.
    async fn decisions(&self, job: &JobName) -> Result<Vec<Decision>, Error>;
    /// At most `n` records, newest first: ended runs, each once, and occurrences that did not run.
    async fn history(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error>;
    /// The same records without the output of the runs, which may be long.
    async fn records(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        self.history(job, n).await
    }

    /// Adds `data` to the output of an active run, or of a run whose settlement announced more ([`Tail::more`]). The
    /// store keeps the newest `keep` bytes. `at` is the number of bytes that the run wrote before `data`: a repeated
    /// request with the same `at` adds nothing twice. `stderr`: which bytes came from stderr, up to the end of `data`
    /// at least; it takes the place of what an earlier request said.
    async fn append_output(
        &self,
        job: &JobName,
        run: RunId,
        at: u64,
        data: &[u8],
        keep: usize,
        stderr: &Marks,
    ) -> Result<(), Error>;
    /// The output from byte `from` on, up to [`OUTPUT_AT_ONCE`] bytes; None: the store has no output of this run.
    async fn output(&self, job: &JobName, run: RunId, from: u64) -> Result<Option<Output>, Error>;

    /// What the fleet has noted for notifications: the notifier's lease, and all notes; without `all`, of the notes
    /// only [`GIVEN_UP`](crate::logic::notify::lease::GIVEN_UP).
    async fn notices(&self, all: bool) -> Result<Reply<Notices>, Error>;
    /// Changes the notes, if [`allows`](crate::logic::notify::lease::allows) says so. A repeated request gets the first
    /// answer as long as no other request changed the lease.
    async fn note(&self, write: &Write) -> Result<Reply<Written>, Error>;

    /// Hints of what happens in the fleet, for as long as the receiver exists. Some may be lost.
    fn events(&self) -> tokio::sync::broadcast::Receiver<Event>;

    /// Hints of the jobs whose state has changed otherwise than by a renewal, for as long as the receiver exists. Some
    /// may be lost. A store without such hints has closed the channel.
    fn changes(&self) -> tokio::sync::broadcast::Receiver<Changed> {
        tokio::sync::broadcast::channel(1).1
    }
}

/// What the fleet has noted for notifications.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Notices {
    /// The notifier's lease. None: there was no notifier yet.
    pub lease: Option<String>,
    pub notes: BTreeMap<String, String>,
}

/// A hint that the states of jobs have changed.
#[derive(Debug, Clone)]
pub enum Changed {
    Jobs(Arc<[JobName]>),
    /// Hints may have been lost: any job.
    Any,
}

/// Whether a state changed otherwise than by a renewal of a lease.
pub(super) fn changed(before: Option<&State>, after: Option<&State>) -> bool {
    let (Some(before), Some(after)) = (before, after) else {
        return before != after;
    };
    if before == after || before.open.len() != after.open.len() {
        return before != after;
    }
    let mut renewed = before.clone();
    for (was, is) in renewed.open.iter_mut().zip(&after.open) {
        (was.seq, was.renewed_at) = (is.seq, is.renewed_at);
    }
    renewed != *after
}

/// The states of jobs. For a state that cannot be read, gives the reason: it does not hide the states of other jobs.
///
/// # Errors
/// Those of [`Store::observe`] except [`Error::Corrupt`], which is in the answer for its job.
///
/// # Cancel safety
/// The caller may drop the future at any time: it only reads.
pub async fn observe_each(
    store: &dyn Store,
    jobs: &[JobName],
) -> Result<Reply<Vec<Observation>>, Error> {
    match store.observe(jobs).await {
        Ok(reply) => return Ok(reply.map(|states| states.into_iter().map(Ok).collect())),
        Err(Error::Corrupt { .. }) => {}
        Err(e) => return Err(e),
    }
    let mut all = store.observe(&[]).await?.map(|_| vec![]);
    for some in jobs.chunks(BATCH) {
        match store.observe(some).await {
            Ok(reply) => all.value.extend(reply.value.into_iter().map(Ok)),
            Err(Error::Corrupt { .. }) => {
                for job in some {
                    all.value
                        .push(match store.observe(std::slice::from_ref(job)).await {
                            Ok(reply) => Ok(reply.value.into_iter().next().flatten()),
                            Err(e @ Error::Corrupt { .. }) => Err(e),
                            Err(e) => return Err(e),
                        });
                }
            }
            Err(e) => return Err(e),
        }
    }
    Ok(all)
}

/// The newest `n` records of each of these jobs, with the job's place among them, in any order. Records that cannot be
/// read hide nothing else: their job is left out.
///
/// # Errors
/// Those of [`Store::records`] except [`Error::Corrupt`].
///
/// # Cancel safety
/// The caller may drop the future at any time: it only reads.
pub async fn records_each(
    store: &dyn Store,
    jobs: &[JobName],
    n: usize,
) -> Result<Vec<(usize, Vec<RunRecord>)>, Error> {
    /// How many requests are under way at one time.
    const AT_ONCE: usize = 8;
    let asks = (0..jobs.len()).map(|at| async move { (at, store.records(&jobs[at], n).await) });
    let asks: Vec<_> = asks.collect();
    let mut answers = futures_util::stream::iter(asks).buffer_unordered(AT_ONCE);
    let mut all = vec![];
    while let Some((at, records)) = answers.next().await {
        match records {
            Ok(records) => all.push((at, records)),
            Err(Error::Corrupt { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(all)
}

/// The state of a job, or why it cannot be read.
pub type Observation = Result<Option<State>, Error>;

/// The lines that can be read. Logs the number of the others and the reason for the first.
pub(super) fn readable<T, E: std::fmt::Display>(
    what: &str,
    job: &JobName,
    lines: impl Iterator<Item = Result<T, E>>,
) -> Vec<T> {
    let (mut unreadable, mut first) = (0, None);
    let read = lines
        .filter_map(|line| {
            line.map_err(|e| {
                unreadable += 1;
                first.get_or_insert_with(|| e.to_string());
            })
            .ok()
        })
        .collect();
    if let Some(reason) = first {
        tracing::warn!(%job, unreadable, reason, "{what} that cannot be read are left out");
    }
    read
}

/// Completes records that were read: keeps one for each run, the newest, and adds the fencing tokens.
pub(crate) fn tidy(records: Vec<RunRecord>, n: usize) -> Vec<RunRecord> {
    let mut seen = std::collections::HashSet::new();
    let mut out: Vec<RunRecord> = records
        .into_iter()
        .filter(|r| r.run_id.is_none_or(|id| seen.insert(id)))
        .take(n)
        .collect();
    for r in &mut out {
        r.fencing_token = (r.attempt > 0).then(|| r.occurrence.token(r.attempt));
    }
    out
}

/// How many lines to read first for `n` records. A run may have two; if that leaves too few records, all lines are
/// read.
pub(super) fn lines_for(n: usize) -> usize {
    n.saturating_mul(2).saturating_add(8).min(HISTORY_KEPT)
}

/// Adds to each record the output of its run, which it reads piece by piece.
pub(crate) async fn fill(store: &dyn Store, records: &mut [RunRecord]) -> Result<(), Error> {
    for r in records {
        let Some(run) = r.run_id else { continue };
        let (tail, complete) = tail(store, &r.job, run).await?;
        r.output_tail = tail;
        r.output_truncated |= !complete;
    }
    Ok(())
}

/// All of a run's output that the store keeps, and whether that is, as far as the store knows, all that the run wrote.
pub(crate) async fn tail(
    store: &dyn Store,
    job: &JobName,
    run: RunId,
) -> Result<(String, bool), Error> {
    let (mut at, mut bytes, mut complete) = (0, vec![], true);
    while let Some(some) = store.output(job, run, at).await? {
        complete &= some.from == at && !some.coming && some.missing == 0;
        at = some.from.saturating_add(some.data.len() as u64);
        bytes.extend(some.data);
        if bytes.len() > OUTPUT_MOST {
            complete = false;
            break;
        }
        if !some.more {
            break;
        }
    }
    Ok((String::from_utf8_lossy(&bytes).into_owned(), complete))
}
