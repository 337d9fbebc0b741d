//! The daemon's claim of an occurrence, for programs that have a scheduler of their own.

use std::{
    collections::{BTreeMap, HashMap},
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::{CLOCK_DRIFT, client_thread::ClientThread};
use crate::{
    clock::{Boottime, StoreClock, wall_us},
    config,
    logic::{
        belief,
        claim::{
            Answer, Claim, Grant, LIBRARY, OnCrash, Open, Overlap, Presence, Register,
            Registration, Renew, Renewal, Settle, Settlement, Target,
        },
        observe::ObservedLease,
        quarantine,
        trust::{HeldLease, Step},
    },
    model::{
        FencingToken, InstanceId, JobName, Occurrence, Outcome, Run, RunId, RunRecord, Trigger,
        is_name,
    },
    store::{self, Beat, Info, Store, Tail},
};

/// Grants each occurrence of one job once, whichever instances ask, and however late. A lock alone cannot do that: A
/// runs and releases within two milliseconds, B's clock is behind, and B takes the free lock and runs the same
/// occurrence again.
///
/// An occurrence is named by its planned instant, which all instances compute alike, never by the moment at which an
/// instance woke up. A decided occurrence stays decided, without a time to live; occurrences at or before the newest
/// decided one are not granted. The promises are those of the daemon (docs/guarantees.md, 1 to 3, 5, 7 and 8). The
/// elector shares the daemon's store: `soloist history` shows what was settled here. Do not use the name of a job that
/// a daemon runs.
///
/// ```
/// # tokio_test(async {
/// use std::time::Duration;
/// use soloist::{Election, Elector, model::Outcome};
///
/// # let dir = tempfile::tempdir()?;
/// # let url = format!("sqlite:{}", dir.path().join("soloist.db").display());
/// let elector = Elector::open(&url, "invoices", Duration::from_secs(15))?;
/// // From your scheduler: the planned instant in Unix milliseconds.
/// # let planned = 1_767_225_600_000_i64.max(soloist::clock::wall_us() / 1000 + 5);
/// # tokio::time::sleep(Duration::from_millis(1)).await;
/// loop {
///     match elector.claim(planned).await? {
///         Election::Won(term) => {
///             term.keep_renewed();
///             // ... the work, while term.is_held(); write with term.fencing_token() ...
///             term.settle(Outcome::Succeeded).await?;
///             break;
///         }
///         Election::Early { wait } | Election::Quarantined { wait } => {
///             tokio::time::sleep(wait).await;
///         }
///         // Another instance runs it, or has run it.
///         _ => break,
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # });
/// # fn tokio_test(f: impl Future<Output = Result<(), Box<dyn std::error::Error>>>) {
/// #     tokio::runtime::Runtime::new().unwrap().block_on(f).unwrap();
/// # }
/// ```
pub struct Elector {
    store: Arc<dyn Store>,
    /// What this instance believes of the store's clock.
    clock: Arc<StoreClock>,
    thread: Arc<ClientThread>,
    job: JobName,
    instance: InstanceId,
    host: String,
    lease: config::Lease,
    on_crash: OnCrash,
    max_attempts: u32,
    memory: Mutex<Memory>,
    /// One request at a time: two requests for one occurrence would have the same nonce, and both would be granted.
    claiming: tokio::sync::Mutex<()>,
}

/// The end of the year 9999: fencing tokens of instants up to there are exact everywhere.
const LATEST: i64 = 253_402_300_799_999;
/// The number of other instances' leases that are watched. A job has one at a time, unless it was run with another
/// policy before.
const WATCHED: usize = 16;

/// What this instance remembers between two requests.
struct Memory {
    /// The newest occurrence that this instance knows to be decided.
    known: i64,
    /// The nonces of requests without an answer.
    unanswered: HashMap<i64, RunId>,
    /// The leases of other instances.
    seen: BTreeMap<Occurrence, ObservedLease>,
    /// The longest quarantine that any lease seen here needs.
    quarantine: Duration,
    /// The epoch of the store, and when this instance first saw it.
    epoch: Option<(Epoch, Boottime)>,
}

#[derive(PartialEq)]
struct Epoch {
    incarnation: Arc<str>,
    id: Arc<str>,
}

impl Memory {
    /// Notes the state of a lease; returns when it lapses unless it changes.
    fn watch(&mut self, own: &config::Lease, open: &Open, received: Boottime) -> Boottime {
        self.quarantine = quarantine::seen(own, self.quarantine, open);
        let new = || ObservedLease::new(open, received);
        let seen = self.seen.entry(open.run.occurrence).or_insert_with(new);
        seen.update(open, received);
        let lapses = seen.expiry();
        if self.seen.len() > WATCHED {
            self.seen.pop_first();
        }
        lapses
    }
}

/// How a claim ended.
#[derive(Debug)]
#[must_use = "a term that is dropped is not settled: its occurrence counts as crashed"]
pub enum Election {
    /// This instance won. The caller settles the term when the work is done.
    Won(Term),
    /// Another instance has it. If that instance dies, a claim after `ask_again` may get the next attempt, provided
    /// that crashed occurrences are rerun ([`Elector::rerun`]). A caller that does not ask again leaves the attempt to
    /// others.
    Lost {
        /// The instance that has it.
        holder: InstanceId,
        /// Before this time nothing changes, unless the holder finishes.
        ask_again: Duration,
    },
    /// Another occurrence of the job is still running, or an attempt of one has to come first. Runs of one job never
    /// overlap. A caller that does not want to wait goes on to its next occurrence.
    Waiting {
        /// As in `Lost`.
        ask_again: Duration,
    },
    /// It was decided before, and is over.
    Settled,
    /// This claim decided it without a run, and recorded that: its holder had died, or it was planned before the store
    /// lost its data, so that it may have run. A store that is new looks like one that lost its data: what was planned
    /// before the first claim there is recorded as unknown, unless the elector [reruns](Elector::rerun).
    Recorded {
        /// The outcome that the history shows from now on.
        outcome: Outcome,
        /// The reason, in words.
        reason: String,
    },
    /// The planned instant is still to come, by the store's clock.
    Early {
        /// The time until then, by the store's clock.
        wait: Duration,
    },
    /// The store is new to this instance, or has lost its data: nothing is granted until every old lease is over.
    Quarantined {
        /// The time until the quarantine is over.
        wait: Duration,
    },
}

impl Elector {
    /// Makes an elector for one job, in the store at `url` (as for [`LockClient::open`](super::LockClient::open)).
    /// `lease` is at least 500 ms: other instances take a holder for dead once they have seen it unrenewed for so long,
    /// each on its own monotonic clock.
    ///
    /// # Errors
    /// [`store::Error::Refused`]: the URL, the name, the lease, or the SQLite file cannot be used.
    pub fn open(url: &str, job: &str, lease: Duration) -> Result<Self, store::Error> {
        let refuse = |reason: String| store::Error::Refused {
            address: "the given URL".to_owned(),
            reason,
        };
        let config = config::Store::from_url(url).map_err(refuse)?;
        let thread = Arc::new(ClientThread::default());
        let store = {
            let handle = thread.handle();
            let _inside = handle
                .map_err(|e| no_thread(config.url.to_string(), &e))?
                .enter();
            store::open(&config)?
        };
        Self::with(thread, store, job, lease)
    }

    /// As [`Elector::open`], over a store that was opened before. Connections that the store made in the caller's
    /// runtime end with that runtime, and stand still while that runtime does.
    ///
    /// # Errors
    /// [`store::Error::Refused`]: the name or the lease cannot be used.
    pub fn over(store: Arc<dyn Store>, job: &str, lease: Duration) -> Result<Self, store::Error> {
        Self::with(Arc::default(), store, job, lease)
    }

    fn with(
        thread: Arc<ClientThread>,
        store: Arc<dyn Store>,
        job: &str,
        lease: Duration,
    ) -> Result<Self, store::Error> {
        let refuse = |reason: String| store::Error::Refused {
            address: store.address().to_owned(),
            reason,
        };
        const LONGEST: usize = JobName::LONGEST;
        if !is_name(job) {
            return Err(refuse(format!(
                "`{}` cannot be the name of a job; use letters, digits, `-`, `_` and `.`, 1 to {LONGEST} of them, and \
                not `.` or `..` alone",
                job.chars().take(64).collect::<String>().escape_debug()
            )));
        }
        let lease = config::Lease::new(lease, CLOCK_DRIFT).map_err(refuse)?;
        let host = crate::store::host();
        let random = uuid::Uuid::new_v4().simple().to_string();
        let clock = Arc::new(StoreClock::default());
        store.believe(clock.clone());
        Ok(Self {
            instance: InstanceId::new(&format!("{host}-{}", &random[..8])),
            host,
            job: JobName::new(job),
            lease,
            on_crash: OnCrash::Fail,
            max_attempts: 1,
            memory: Mutex::new(Memory {
                known: 0,
                unanswered: HashMap::new(),
                seen: BTreeMap::new(),
                quarantine: lease.quarantine,
                epoch: None,
            }),
            claiming: tokio::sync::Mutex::default(),
            clock,
            thread,
            store,
        })
    }

    /// Reruns an occurrence whose holder died, up to `max_attempts` attempts in all (1 to 999). Then each occurrence
    /// runs at least once, instead of at most once. That includes those of which the store has lost the data.
    #[must_use]
    pub fn rerun(mut self, max_attempts: u32) -> Self {
        self.on_crash = OnCrash::Rerun;
        self.max_attempts = max_attempts.clamp(1, 999);
        self
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock()
    }

    /// Asks the store on the elector's own thread.
    async fn ask<T: Send + 'static>(
        &self,
        request: impl Future<Output = Result<T, store::Error>> + Send + 'static,
    ) -> Result<T, store::Error> {
        let asked = self.thread.run(request).await;
        asked.unwrap_or_else(|e| Err(no_thread(self.store.address().to_owned(), &e)))
    }

    /// Asks for the right to run the occurrence that was planned for `planned_ms` (Unix milliseconds, UTC).
    ///
    /// After an error, call again: if the store granted the occurrence and its answer was lost, it gives the same
    /// answer again. Concurrent calls are answered one after the other; if two of them are for one occurrence, at most
    /// one wins.
    ///
    /// # Errors
    /// Those of the store. [`store::Error::Unreachable`]: the outcome is unknown, or the grant came too late to be
    /// used. [`store::Error::Refused`]: also if `planned_ms` is outside the years 1970 to 9999, or if the server is set
    /// up so that it may forget data, for example by evicting keys.
    ///
    /// # Cancel safety
    /// If the future is dropped, a request that is under way continues on the elector's thread, and may win an
    /// occurrence that nobody runs. Call again for the same occurrence: if it was won, this call gets the grant. If
    /// nobody calls again, the occurrence counts as crashed when its lease has lapsed.
    // Long: one arm for each answer of the store; what the arms share is local.
    pub async fn claim(&self, planned_ms: i64) -> Result<Election, store::Error> {
        if !(1..=LATEST).contains(&planned_ms) {
            return Err(store::Error::Refused {
                address: self.store.address().to_owned(),
                reason: format!(
                    "{planned_ms} ms after 1970 is no instant for an occurrence; the years 1970 to 9999 are"
                ),
            });
        }
        let _one = self.claiming.lock().await;
        let at = Occurrence(planned_ms);
        loop {
            let claim = {
                let mut memory = self.memory();
                // The observed lease is that of the occurrence itself if it is watched, or else that of any other run
                // of the job.
                let now = Boottime::now();
                let observed = match memory.seen.get(&at) {
                    Some(own) => own.lapsed(now),
                    None => memory.seen.values().find_map(|seen| seen.lapsed(now)),
                };
                let observed = observed.cloned();
                Claim {
                    job: self.job.clone(),
                    target: Target::Scheduled(at),
                    known: Occurrence(memory.known),
                    missed: vec![],
                    run: *memory.unanswered.entry(at.0).or_insert_with(RunId::random),
                    instance: self.instance.clone(),
                    host: self.host.clone(),
                    trigger: Trigger::Schedule,
                    // The caller's scheduler decides when it is too late.
                    start_by: i64::MAX / 2,
                    lease: self.lease.length.as_millis() as i64,
                    // The caller's scheduler decides whether to wait for a run that is still in progress.
                    overlap: Overlap::Queue,
                    on_crash: self.on_crash,
                    max_attempts: self.max_attempts,
                    definition: LIBRARY.to_owned(),
                    observed,
                    holds: vec![],
                    cause: None,
                }
            };
            let run = claim.run;
            let store = self.store.clone();
            let mut reply = self.ask(async move { store.claim(&[claim]).await }).await?;
            let Some(answer) = reply.value.pop() else {
                return Err(store::Error::Corrupt {
                    address: self.store.address().to_owned(),
                    reason: "a claim without an answer".to_owned(),
                });
            };
            if let Answer::Granted(_) = &answer {
                let held = HeldLease::new(self.lease, reply.sent);
                if held.step(Boottime::now()) == Step::StepDown {
                    // Its nonce stays: when asked again, the store renews the grant if nobody else has it.
                    return Err(store::Error::Unreachable {
                        address: self.store.address().to_owned(),
                        reason: format!(
                            "occurrence {at} was granted, but the answer took too long for a lease of {:?}",
                            self.lease.length
                        ),
                    });
                }
            }
            let _ = self.clock.sample(reply.now_us, reply.sent, reply.received);
            if answer == Answer::InDoubt {
                // The answer was long on its way, or the store's clock jumped. Only one host's clock can judge that
                // here.
                let wall_ms = wall_us().saturating_sub(reply.now_us) / 1000;
                let _ = self.clock.vote(&[wall_ms]);
                match self.clock.doubt_us() {
                    None => continue,
                    Some(ahead) => {
                        return Err(store::Error::Refused {
                            address: self.store.address().to_owned(),
                            reason: belief::in_words(ahead),
                        });
                    }
                }
            }
            // A definite answer ends the request: the next claim gets another nonce.
            self.memory().unanswered.remove(&at.0);
            return Ok(match answer {
                Answer::Granted(grant) => {
                    self.decided(at);
                    Election::Won(Term::new(self, grant, run, &reply))
                }
                Answer::Running(open) => Election::Lost {
                    ask_again: self.watch(&open, reply.received),
                    holder: open.run.instance,
                },
                Answer::Blocked(open) => Election::Waiting {
                    ask_again: self.watch(&open, reply.received),
                },
                Answer::InDoubt | Answer::RunFirst(_) => Election::Waiting {
                    ask_again: self.lease.renew_every,
                },
                Answer::Later { wait_ms } => Election::Waiting {
                    ask_again: Duration::from_millis(wait_ms.max(1) as u64),
                },
                Answer::Settled(_) => {
                    self.decided(at);
                    Election::Settled
                }
                Answer::Recorded { outcome, reason } => {
                    self.decided(at);
                    Election::Recorded { outcome, reason }
                }
                // This answer is about ranges that are given up; there are none here.
                Answer::Behind { newest, .. } => {
                    self.decided(newest);
                    continue;
                }
                Answer::Early { wait_us } => Election::Early {
                    wait: Duration::from_micros(wait_us.max(1) as u64),
                },
                Answer::Quarantined | Answer::Absent => match self.adopt().await? {
                    None => continue,
                    Some(wait) => Election::Quarantined { wait },
                },
            });
        }
    }

    fn decided(&self, at: Occurrence) {
        let mut memory = self.memory();
        memory.known = memory.known.max(at.0);
        memory.seen.remove(&at);
    }

    /// Notes the state of a lease; returns when to look again.
    fn watch(&self, open: &Open, received: Boottime) -> Duration {
        let lapses = self.memory().watch(&self.lease, open, received);
        let left = lapses.since(Boottime::now());
        self.lease
            .renew_every
            .min(left.max(Duration::from_millis(10)))
    }

    /// What this instance reports of itself.
    fn info(&self) -> Info {
        Info {
            host: self.host.clone(),
            pid: std::process::id(),
            process: 1,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            // The elector takes no part in the ranks of the daemons.
            draining: true,
            ..Info::default()
        }
    }

    /// Registers the job in the store's present incarnation, or returns how long that has to wait.
    // Long: it fills in a whole registration.
    async fn adopt(&self) -> Result<Option<Duration>, store::Error> {
        let known = self.memory().quarantine;
        let beat = Beat {
            instance: self.instance.clone(),
            info: self.info(),
            quarantine: known,
            open: None,
        };
        let store = self.store.clone();
        let look = async move { store.heartbeat(Some(&beat)).await };
        let fleet = self.ask(look).await?;
        let first_seen = {
            let mut memory = self.memory();
            let epoch = Epoch {
                incarnation: fleet.incarnation.clone(),
                id: fleet.value.id.clone(),
            };
            match &memory.epoch {
                Some((known, since)) if *known == epoch => *since,
                _ => {
                    memory.epoch = Some((epoch, fleet.received));
                    fleet.received
                }
            }
        };
        let quarantine = known.max(fleet.value.quarantine);
        let left = quarantine.saturating_sub(Boottime::now().since(first_seen));
        if !fleet.value.open && !self.store.durable() && !left.is_zero() {
            return Ok(Some(left));
        }
        let register = Register {
            job: self.job.clone(),
            schedule: LIBRARY.to_owned(),
            definition: LIBRARY.to_owned(),
            known: Occurrence(self.memory().known),
            adopt: Some(fleet.incarnation.to_string()),
            // If the data is lost between that look and this step, nothing is adopted.
            epoch: Some(fleet.value.id.to_string()),
            lost: vec![],
            counted_from: i64::MAX,
            lost_before: match self.on_crash {
                OnCrash::Fail => fleet.value.born,
                OnCrash::Rerun => 0,
            },
            presence: Presence::New,
            owed: vec![],
            back_at: 0,
            waits_since: 0,
            remembered: Default::default(),
            instance: self.instance.clone(),
            host: self.host.clone(),
            on_crash: self.on_crash,
            max_attempts: self.max_attempts,
        };
        let store = self.store.clone();
        let problems = self.ask(async move { store.check().await }).await?;
        if let Some(problem) = problems.into_iter().find(|p| p.fatal) {
            return Err(store::Error::Refused {
                address: self.store.address().to_owned(),
                reason: problem.text,
            });
        }
        let store = self.store.clone();
        let reply = self
            .ask(async move { store.register(&[register]).await })
            .await?;
        match reply.value.first() {
            Some((Registration::Ready, _)) => Ok(None),
            // The incarnation has changed since the look above.
            _ => Ok(Some(quarantine)),
        }
    }
}

/// How long one renewal may take; `half_left`: half of the trust that is left.
fn time_for_renewal(half_left: Duration, lease: &config::Lease) -> Duration {
    let most = lease.renew_every * 2;
    half_left.max(Duration::from_millis(10)).min(most)
}

fn no_thread(address: String, e: &std::io::Error) -> store::Error {
    store::Error::Unreachable {
        address,
        reason: format!("the elector's thread failed: {e}"),
    }
}

impl std::fmt::Debug for Elector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Elector")
            .field("store", &self.store.address())
            .field("job", &self.job)
            .field("instance", &self.instance)
            .finish_non_exhaustive()
    }
}

/// The lease of one occurrence that this instance won. The caller has to settle it. If it is dropped unsettled, the
/// occurrence counts as crashed when its lease has lapsed.
#[must_use = "a term that is dropped is not settled: its occurrence counts as crashed"]
pub struct Term {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn Store>,
    thread: Arc<ClientThread>,
    renew: Renew,
    /// [`Renew::reclaim`] of the next renewal.
    reclaim: Mutex<String>,
    grant: Grant,
    lease: config::Lease,
    held: watch::Sender<Option<HeldLease>>,
    stop: tokio_util::sync::CancellationToken,
    renewing: AtomicBool,
}

impl std::fmt::Debug for Term {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Term")
            .field("job", &self.inner.renew.job)
            .field("occurrence", &self.inner.grant.occurrence)
            .field("attempt", &self.inner.grant.attempt)
            .finish_non_exhaustive()
    }
}

impl Term {
    fn new(
        elector: &Elector,
        grant: Grant,
        run: RunId,
        granted: &store::Reply<Vec<Answer>>,
    ) -> Self {
        let renew = Renew {
            late: false,
            reclaim: String::new(),
            job: elector.job.clone(),
            run: Run {
                id: run,
                occurrence: grant.occurrence,
                attempt: grant.attempt,
                trigger: grant.trigger,
                key: None,
                instance: elector.instance.clone(),
                host: elector.host.clone(),
                lease: elector.lease.length.as_millis() as i64,
                definition: LIBRARY.to_owned(),
                granted_at: granted.now_us / 1000,
            },
            seq: 0,
        };
        Self {
            inner: Arc::new(Inner {
                store: elector.store.clone(),
                thread: elector.thread.clone(),
                reclaim: Mutex::default(),
                renew,
                grant,
                lease: elector.lease,
                held: watch::Sender::new(Some(HeldLease::new(elector.lease, granted.sent))),
                stop: tokio_util::sync::CancellationToken::new(),
                renewing: false.into(),
            }),
        }
    }

    /// The planned instant, in Unix milliseconds.
    pub fn occurrence(&self) -> i64 {
        self.inner.grant.occurrence.0
    }

    /// The number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.inner.grant.attempt
    }

    /// The fencing token: occurrence in ms × 1000 + attempt. It grows with every grant of the job, whatever data the
    /// store loses.
    pub fn fencing_token(&self) -> FencingToken {
        self.inner.grant.token()
    }

    /// True while the lease can be trusted: the work has to end with it. Sends nothing.
    pub fn is_held(&self) -> bool {
        self.inner.is_held()
    }

    /// How long the lease can be trusted unless it is renewed, on this host's CLOCK_BOOTTIME; zero when it cannot.
    pub fn remaining(&self) -> Duration {
        self.inner.remaining()
    }

    /// Renews the lease; false if it is lost.
    ///
    /// # Errors
    /// Those of the store; what was trusted before is still trusted.
    ///
    /// # Cancel safety
    /// If the future is dropped, the renewal continues on the elector's thread, and counts if it succeeds.
    pub async fn renew(&self) -> Result<bool, store::Error> {
        let inner = self.inner.clone();
        self.inner
            .ask(async move { inner.renew().await })
            .await
            .and_then(|held| held)
    }

    /// Keeps the lease renewed in the background until it is settled, dropped or lost. After an error it tries again,
    /// until the lease cannot be trusted any more. The elector's own thread renews: the caller may block its thread,
    /// and its runtime may end. A second call does nothing.
    pub fn keep_renewed(&self) {
        if !self.inner.renewing.swap(true, Ordering::SeqCst) {
            self.inner.thread.spawn(self.inner.clone().keep_renewed());
        }
    }

    /// Ends when the lease is lost or settled.
    ///
    /// # Cancel safety
    /// The future only watches, so it can be dropped at any time.
    pub fn over(&self) -> impl Future<Output = ()> + Send + 'static {
        let inner = self.inner.clone();
        async move {
            let mut held = inner.held.subscribe();
            loop {
                held.mark_unchanged();
                let Some(at) = inner.trusted_until().filter(|_| inner.is_held()) else {
                    return;
                };
                tokio::select! {
                    _ = held.changed() => {}
                    () = inner.thread.sleep_until(at) => {}
                }
            }
        }
    }

    /// Records how the work ended, and releases the lease, in one step. True: recorded under our lease. False: the
    /// lease was not ours any more; the history has the record all the same. If the store does not answer, tries again
    /// until it does, or until the lease cannot be trusted any more.
    ///
    /// # Errors
    /// Those of the store, if it did not answer for so long. The occurrence then counts as crashed, sooner or later.
    ///
    /// # Cancel safety
    /// Dropping the future does not cancel the settlement: it continues in the background. (A future that was never
    /// polled settles nothing.)
    pub async fn settle(self, outcome: Outcome) -> Result<bool, store::Error> {
        let inner = self.inner.clone();
        inner.stop.cancel();
        let settled = async move { inner.settle(outcome).await };
        self.inner.ask(settled).await.and_then(|settled| settled)
    }
}

impl Inner {
    async fn ask<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, store::Error> {
        let done = self.thread.run(work).await;
        done.map_err(|e| no_thread(self.store.address().to_owned(), &e))
    }

    async fn settle(self: Arc<Self>, outcome: Outcome) -> Result<bool, store::Error> {
        let inner = &*self;
        let last = inner.trusted_until().unwrap_or(Boottime(0));
        let r = &inner.renew;
        let settle = Settle {
            run: r.run.id,
            record: RunRecord {
                outcome,
                ..RunRecord::of(&r.job, &r.run).lasting(Some(r.run.granted_at), None)
            },
            next_attempt: None,
        };
        loop {
            match inner.store.settle(&settle, &Tail::default()).await {
                Ok(reply) => {
                    inner.held.send_replace(None);
                    return Ok(reply.value == Settlement::Done);
                }
                Err(e) if !e.is_transient() || Boottime::now() >= last => return Err(e),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }
}

impl Drop for Term {
    fn drop(&mut self) {
        self.inner.stop.cancel();
    }
}

impl Inner {
    fn trusted_until(&self) -> Option<Boottime> {
        self.held.borrow().as_ref().map(HeldLease::trusted_until)
    }

    fn remaining(&self) -> Duration {
        self.trusted_until()
            .map_or(Duration::ZERO, |at| at.since(Boottime::now()))
    }

    fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    async fn renew(&self) -> Result<bool, store::Error> {
        // Once more if the store has lost the lease.
        for _ in 0..2 {
            let mut seq = None;
            self.held.send_if_modified(|h| {
                seq = h.as_mut().map(HeldLease::next_seq);
                false
            });
            let Some(seq) = seq.filter(|_| self.is_held()) else {
                return Ok(false);
            };
            let renew = Renew {
                seq,
                reclaim: std::mem::take(&mut *self.reclaim.lock()),
                ..self.renew.clone()
            };
            let reply = self.store.renew(&renew).await?;
            match reply.value {
                Renewal::Unknown => {
                    *self.reclaim.lock() = reply.incarnation.to_string();
                    continue;
                }
                Renewal::Renewed(_) => self.held.send_modify(|h| {
                    if let Some(h) = h {
                        h.renewed(reply.sent, reply.received);
                    }
                }),
                Renewal::Lost => drop(self.held.send_replace(None)),
            }
            return Ok(self.is_held());
        }
        Err(store::Error::Unreachable {
            address: self.store.address().to_owned(),
            reason: "its data changes again and again".to_owned(),
        })
    }

    async fn keep_renewed(self: Arc<Self>) {
        loop {
            let step = self
                .held
                .borrow()
                .as_ref()
                .map(|h| (h.step(Boottime::now()), h.half_left(Boottime::now())));
            let work = async {
                match step {
                    None | Some((Step::StepDown, _)) => false,
                    Some((Step::WaitUntil(at), _)) => {
                        self.thread.sleep_until(at).await;
                        true
                    }
                    Some((Step::Renew, half_left)) => {
                        let limit = time_for_renewal(half_left, &self.lease);
                        match tokio::time::timeout(limit, self.renew()).await {
                            Ok(Ok(held)) => held,
                            Ok(Err(_)) | Err(_) => {
                                self.held.send_modify(|h| {
                                    if let Some(h) = h {
                                        h.failed(Boottime::now());
                                    }
                                });
                                true
                            }
                        }
                    }
                }
            };
            tokio::select! {
                go_on = work => if !go_on { return },
                () = self.stop.cancelled() => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::memory::MemoryStore;

    fn elector() -> Elector {
        let store = Arc::new(MemoryStore::new());
        Elector::over(store, "invoices", Duration::from_secs(15)).unwrap()
    }

    fn open(at: i64, lease: Duration) -> Open {
        Open {
            run: Run {
                instance: InstanceId::new("b"),
                lease: lease.as_millis() as i64,
                definition: LIBRARY.to_owned(),
                granted_at: 0,
                ..Run::first(at)
            },
            incarnation: "1".to_owned(),
            renewed_at: 0,
            ..Open::first(at)
        }
    }

    #[test]
    fn a_renewal_leaves_time_for_another_and_ends_before_the_next() {
        let ms = Duration::from_millis;
        let lease = config::Lease::new(ms(15_000), CLOCK_DRIFT).unwrap();
        for (half_left, time) in [(1, 10), (10, 10), (2000, 2000), (60_000, 6000)] {
            assert_eq!(time_for_renewal(ms(half_left), &lease), ms(time));
        }
    }

    #[test]
    fn an_elector_reports_itself_and_takes_no_rank() {
        let info = elector().info();
        assert_eq!(
            info.host,
            rustix::system::uname().nodename().to_str().unwrap()
        );
        assert_eq!((info.pid, info.process), (std::process::id(), 1));
        assert_eq!(info.version, env!("CARGO_PKG_VERSION"));
        assert!(info.draining);
    }

    #[test]
    fn the_leases_of_the_newest_occurrences_are_watched() {
        let elector = elector();
        let mut memory = elector.memory();
        let (second, day) = (Duration::from_secs(1), Duration::from_secs(86_400));
        for at in 1..=20 {
            let received = Boottime(at as u64);
            let lapses = memory.watch(&elector.lease, &open(at, second), received);
            assert_eq!(lapses, received + second);
            assert_eq!(memory.seen.len() as i64, at.min(16));
        }
        let (oldest, newest) = (memory.seen.first_key_value(), memory.seen.last_key_value());
        assert_eq!(
            [oldest, newest].map(|o| o.map(|(at, _)| at.0)),
            [Some(5), Some(20)]
        );
        assert_eq!(memory.quarantine, elector.lease.quarantine);
        memory.watch(&elector.lease, &open(20, day), Boottime(0));
        assert!(memory.quarantine > day);
    }

    #[test]
    fn who_looks_again_does_so_before_the_lease_lapses() {
        let elector = elector();
        let again = |lease| {
            let received = Boottime::now();
            elector.watch(&open(1, Duration::from_millis(lease)), received)
        };
        assert_eq!(again(3_600_000), elector.lease.renew_every);
        let soon = again(2000);
        assert!(soon > Duration::from_millis(10) && soon <= Duration::from_secs(2));
        assert_eq!(again(1), Duration::from_millis(10));
    }

    #[tokio::test]
    async fn a_term_says_what_was_won_and_is_held_until_it_is_settled() {
        let elector = elector().rerun(2);
        let at = wall_us() / 1000 - 1000;
        let term = match elector.claim(at).await.unwrap() {
            Election::Won(term) => term,
            other => panic!("{other:?}"),
        };
        let shown = [format!("{elector:?}"), format!("{term:?}")];
        assert!(shown.iter().all(|s| s.contains("invoices")), "{shown:?}");
        assert!(shown[1].contains(&at.to_string()), "{shown:?}");
        assert_eq!((term.occurrence(), term.attempt()), (at, 1));
        assert_eq!(term.fencing_token(), FencingToken(at * 1000 + 1));
        assert!(term.is_held() && term.remaining() <= elector.lease.trust);
        assert!(term.renew().await.unwrap());
        let inner = term.inner.clone();
        assert!(inner.remaining() > elector.lease.trust / 2);
        assert!(term.settle(Outcome::Failed).await.unwrap());
        let records = elector.store.history(&elector.job, 9).await.unwrap();
        let told = records.iter().map(|r| (r.occurrence.0, r.outcome));
        assert_eq!(told.collect::<Vec<_>>(), [(at, Outcome::Failed)]);
        assert_eq!(
            (inner.is_held(), inner.remaining()),
            (false, Duration::ZERO)
        );
        assert!(!inner.renew().await.unwrap());
        let again = elector.claim(at).await.unwrap();
        assert!(matches!(again, Election::Settled), "{again:?}");
        let early = elector.claim(at + 3_600_000).await.unwrap();
        assert!(
            matches!(early, Election::Early { wait } if wait > Duration::from_secs(3000)),
            "{early:?}"
        );
    }

    #[test]
    fn what_was_decided_stays_known_and_is_not_watched_any_more() {
        let elector = elector();
        for at in [5, 9] {
            elector.watch(&open(at, Duration::from_secs(1)), Boottime::now());
        }
        for (at, known) in [(9, 9), (5, 9)] {
            elector.decided(Occurrence(at));
            assert_eq!(elector.memory().known, known);
        }
        assert!(elector.memory().seen.is_empty());
    }
}
