//! What every store of a fleet does, in words and types.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::Error;
use crate::{
    clock::{Boottime, StoreClock},
    logic::claim::{
        Answer, Claim, Control, Controlled, Event, Register, Registration, Renew, Renewal, Settle,
        Settlement, State,
    },
    model::{InstanceId, JobName, Occurrence, RunId, RunRecord, ms},
};

/// Run records that the history keeps of each job.
pub const HISTORY_KEPT: usize = 200;
/// Decisions that are kept of each job, of all instances together.
pub const DECISIONS_KEPT: usize = 400;
/// How long records, decisions and an unseen instance are kept at most.
pub const RECORDS_TTL: Duration = Duration::from_secs(30 * 24 * 3600);
pub const DECISIONS_TTL: Duration = Duration::from_secs(3 * 24 * 3600);
pub const OUTPUT_TTL: Duration = Duration::from_secs(7 * 24 * 3600);
pub const FORGET_INSTANCE: Duration = Duration::from_secs(24 * 3600);
/// Bytes of output that travel in one command: more of them could not arrive in time where the way is slow, and would
/// hold up whoever is behind them.
pub const OUTPUT_AT_ONCE: usize = 128 << 10;
/// Bytes of one job's state, and of one record or decision, at most: ten thousand keys of triggers, and errors in words. What
/// is larger is not soloist's, and is not read.
pub const STATE_MOST: usize = 16 << 20;
pub const LINE_MOST: usize = 64 << 10;
/// And of what an instance tells of itself.
pub const INSTANCE_MOST: usize = 4 << 20;
/// More than this of one run's output is not put together in memory.
pub const OUTPUT_MOST: usize = 64 << 20;
/// Bytes of output are counted up to here: what every store can count exactly.
pub const LAST_BYTE: u64 = 1 << 53;
/// Claims, states and registrations that travel in one command.
pub const BATCH: usize = 100;
/// Hints that a slow listener may be behind by; after that it looks at all jobs again. The memory of all of them is
/// taken at once, 64 bytes each.
pub(super) const HINTS: usize = 8192;

/// The clock of a store that has none of its own: Unix microseconds.
pub type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// A store's answer, with the store's clock when it was given.
#[derive(Debug, Clone)]
pub struct Reply<T> {
    pub value: T,
    /// Unix microseconds of the store's clock.
    pub now_us: i64,
    /// The incarnation of the store that answered.
    pub incarnation: Arc<str>,
    /// Before the request left: trust is counted from here.
    pub sent: Boottime,
    /// After the answer was there: what it says about others is at least this old news.
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

/// What an instance tells about itself with each heartbeat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Info {
    /// Unix ms of the store's clock at the last heartbeat; filled in by the store.
    #[serde(default, deserialize_with = "ms")]
    pub seen: i64,
    pub host: String,
    pub pid: u32,
    /// Random, of this process: what tells two of one name apart.
    #[serde(default)]
    pub process: u32,
    pub version: String,
    /// Digest of the configuration.
    pub config: String,
    /// This host's wall clock minus the store's, as the instance believes it, in ms.
    pub clock_offset_ms: f64,
    /// This host's wall clock when it told this, Unix ms; 0: not told.
    #[serde(default, deserialize_with = "ms")]
    pub wall: i64,
    /// While the instance does not believe the store's clock: how far that is ahead of what it believes, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_doubt_ms: Option<i64>,
    #[serde(deserialize_with = "ms")]
    pub started_at: i64,
    /// What it runs: job and occurrence.
    pub running: Vec<(JobName, Occurrence)>,
    pub draining: bool,
    /// Jobs loaded.
    pub jobs: u32,
}

/// The fleet as the store knows it, and the epoch: the time from a start of the server, or from the loss of its
/// data, to the next.
#[derive(Debug, Clone, PartialEq)]
pub struct Fleet {
    /// Names the epoch, together with the incarnation.
    pub id: Arc<str>,
    /// What this instance's entry was before this heartbeat.
    pub before: Option<Info>,
    /// Unix ms of the store's clock when this epoch was first seen by anybody.
    pub born: i64,
    /// The longest quarantine that any instance needs.
    pub quarantine: Duration,
    /// Nobody can hold a lease from before this epoch that was not reclaimed.
    pub open: bool,
    pub instances: BTreeMap<InstanceId, Info>,
    /// Instances that are asked to drain.
    pub drains: Vec<InstanceId>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Beat {
    pub instance: InstanceId,
    pub info: Info,
    pub quarantine: Duration,
    /// This instance has seen the epoch (incarnation, id) for a whole quarantine: it is open.
    pub open: Option<(Arc<str>, Arc<str>)>,
}

/// What one instance decided about one occurrence, and when: the answer to "why did it not run?".
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

/// Some of the output of a run, from byte `from` of all that it wrote.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    pub from: u64,
    /// At most [`OUTPUT_AT_ONCE`].
    pub data: Vec<u8>,
    /// There is more behind it already.
    pub more: bool,
    /// The run has ended, and the rest of its output is still being handed in.
    pub coming: bool,
    /// Nothing more will come behind `data`.
    pub done: bool,
    /// Then: bytes at the end of the output that were never handed in.
    pub missing: u64,
}

impl Output {
    /// `data` of an output that reaches to `stop` of `total` bytes.
    pub(super) fn new(
        from: u64,
        data: Vec<u8>,
        stop: u64,
        done: bool,
        coming: bool,
        total: u64,
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
        }
    }
}

/// The last bytes of a run's output, as its settlement tells of them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tail {
    /// Bytes that came before them.
    pub before: u64,
    /// All of them, when they are few; else none.
    pub data: Vec<u8>,
    /// So many bytes are handed in apart, with [`Store::append_output`], or were already. What is not there within
    /// [`OUTPUT_PATIENCE`](super::OUTPUT_PATIENCE) is given up.
    pub more: u64,
}

/// Something about a store that soloist's promises do not hold with, or only with losses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Nothing may be started while it is so.
    pub fatal: bool,
    /// What is wrong, and what to do.
    pub text: String,
}

/// One place for all instances of a fleet. Every method is one atomic step and may be called again when its answer
/// was lost. None retries by itself.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// For messages; without secrets.
    fn address(&self) -> &str;
    /// Where the state of a job is, for whoever has to repair it.
    fn place(&self, job: &JobName) -> String {
        job.to_string()
    }
    /// True when nothing acknowledged is ever lost and no quarantine is needed.
    fn durable(&self) -> bool;
    /// True when the store's clock is this host's wall clock.
    fn local_clock(&self) -> bool {
        false
    }
    /// From now on each request says what `clock` believes the store's clock to show. Where the two contradict each other
    /// ([`crate::logic::belief::in_doubt`]) nothing is decided: claims are answered [`Answer::InDoubt`], registrations
    /// [`Registration::Quarantined`]; renewals and settlements are made, and dated by the caller's clock.
    fn believe(&self, clock: Arc<StoreClock>);

    /// What is wrong with how the store is set up; empty when it has all that is needed.
    async fn check(&self) -> Result<Vec<Problem>, Error> {
        Ok(vec![])
    }

    /// One answer for each claim, in order. Any number, all of one instance; they travel in commands of up to
    /// [`BATCH`], and an error of one command is the answer to all.
    async fn claim(&self, claims: &[Claim]) -> Result<Reply<Vec<Answer>>, Error>;
    async fn renew(&self, renew: &Renew) -> Result<Reply<Renewal>, Error>;
    async fn settle(&self, settle: &Settle, output: &Tail) -> Result<Reply<Settlement>, Error>;

    /// What is known of each job afterwards; None only when the answer is Absent.
    async fn register(
        &self,
        jobs: &[Register],
    ) -> Result<Reply<Vec<(Registration, Option<State>)>>, Error>;
    async fn control(&self, job: &JobName, what: &Control) -> Result<Reply<Controlled>, Error>;
    /// All jobs that were ever registered, in no order.
    async fn jobs(&self) -> Result<Vec<JobName>, Error>;
    async fn observe(&self, jobs: &[JobName]) -> Result<Reply<Vec<Option<State>>>, Error>;

    /// None: only look.
    async fn heartbeat(&self, beat: Option<&Beat>) -> Result<Reply<Fleet>, Error>;
    /// `process` as in [`Info`]: another one of the same name stays.
    async fn leave(&self, instance: &InstanceId, process: u32) -> Result<(), Error>;
    async fn drain(&self, instance: &InstanceId, on: bool) -> Result<(), Error>;

    async fn journal(&self, decisions: &[Decision]) -> Result<(), Error>;
    /// Newest first.
    async fn decisions(&self, job: &JobName) -> Result<Vec<Decision>, Error>;
    /// Ended runs and occurrences that were not run, newest first, each run once; at most `n`.
    async fn history(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error>;
    /// The same without the output of the runs, which may be much.
    async fn records(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        self.history(job, n).await
    }

    /// Adds to the output of a run that goes on, or has ended with more to come ([`Tail::more`]); the newest `keep` bytes
    /// stay. `at`: bytes written before these; asking again with the same `at` adds nothing twice.
    async fn append_output(
        &self,
        job: &JobName,
        run: RunId,
        at: u64,
        data: &[u8],
        keep: usize,
    ) -> Result<(), Error>;
    /// What there is from byte `from` on, as much as travels at once; None when nothing is known of this run's output.
    async fn output(&self, job: &JobName, run: RunId, from: u64) -> Result<Option<Output>, Error>;

    /// Hints of what happens in the fleet, as long as the receiver lives. Some may be lost.
    fn events(&self) -> tokio::sync::broadcast::Receiver<Event>;
}

/// The states of jobs, and for each that cannot be read the reason. An error is one of all of them.
///
/// # Errors
/// Those of [`Store::observe`] that are not about what is stored of one job.
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

/// What is known of a job, or why it cannot be read.
pub type Observation = Result<Option<State>, Error>;

/// Those lines that can be read; of the others it is said how many there are.
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

/// Completes records as they were read: each run once (the newest record of it), with its token.
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

/// Completes records with the output of their runs, read piece by piece.
pub(crate) async fn fill(store: &dyn Store, records: &mut [RunRecord]) -> Result<(), Error> {
    for r in records {
        let Some(run) = r.run_id else { continue };
        let (tail, complete) = tail(store, &r.job, run).await?;
        r.output_tail = tail;
        r.output_truncated |= !complete;
    }
    Ok(())
}

/// All that is kept of a run's output, and whether that is all of it, as far as is known.
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
