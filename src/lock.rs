//! Locks for programs: for anything that two processes must not do at the same time. They are to a program what the
//! daemon's leases are to its jobs.
//!
//! A [`LockClient`] acquires locks in Redis (many hosts) or in a SQLite file (one host). [`LockClient::try_lock`] asks
//! the store, and says who holds the lock if somebody else does. [`LockClient::lock`] waits, and the release wakes it.
//! [`LockClient::with_lock`] runs a future under a lock, and drops the future when the lock is lost. Losing a race is
//! an outcome ([`TryLock::Held`]), not an error.
//!
//! A client works on a thread of its own. The thread starts with the client's first request and ends with the client.
//! So locks do not depend on the caller's runtime: it may be any executor, block its threads, end before its locks do,
//! or have a paused clock. The one exception is an `Elector` over a store that was opened elsewhere: it shares the
//! connections of that store.
//!
//! docs/locks.md says what is promised and what is not. In short: a lock is a key with a time to live, which the store
//! counts by its *wall clock*. The holder needs no wall clock: it trusts the lock for less than the lease, counted on
//! CLOCK_BOOTTIME from before its request left. If something must not be done twice even when the store's clock is
//! stepped, the resource has to check the [fencing token](Lock::fencing_token).
//!
//! ```
//! # tokio_test(async {
//! use std::time::Duration;
//! use soloist::{LockClient, NoRetry, TryLock};
//!
//! # let dir = tempfile::tempdir()?;
//! # let url = format!("sqlite:{}", dir.path().join("locks.db").display());
//! let locks = LockClient::open(&url)?; // or "redis://host:6379/0"
//! match locks.try_lock("nightly-report", Duration::from_secs(30), NoRetry).await? {
//!     TryLock::Acquired(lock) => {
//!         lock.keep_renewed();
//!         // ... the work, for as long as lock.is_held() ...
//!         lock.release().await?;
//!     }
//!     TryLock::Held { holder, remaining } => {
//!         println!("{holder} has it, for {remaining:?} at most");
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # });
//! # fn tokio_test(f: impl Future<Output = Result<(), Box<dyn std::error::Error>>>) {
//! #     tokio::runtime::Runtime::new().unwrap().block_on(f).unwrap();
//! # }
//! ```

mod backend;
mod client_thread;
mod core;
#[cfg(feature = "daemon")]
mod elector;
mod error;
mod held;
pub(crate) mod period;
#[cfg(feature = "redis")]
mod redis;
mod redlock;
mod reentrant;
pub mod retry;
#[cfg(feature = "sqlite")]
mod sqlite;
mod wait_queue;

#[cfg(all(feature = "daemon", any(test, fuzzing)))]
pub(crate) use self::redis::reply::any as reply;

#[cfg(feature = "redis")]
use std::convert::Infallible;
use std::{
    future::Future,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use tokio::sync::OwnedMutexGuard;
use tokio_util::task::task_tracker::TaskTrackerToken;

#[cfg(feature = "redis")]
use self::backend::Then;
#[cfg(feature = "daemon")]
pub use self::elector::{Election, Elector, Term};
use self::{
    backend::{Backend, Kind, OwnerReply, ReleaseOptions, TryLockReply},
    client_thread::ClientThread,
    core::{Core, TryLockOutcome},
    period::PeriodClaim,
    retry::Attempts,
    wait_queue::{WaitQueues, Waiter},
};
pub use self::{
    error::Error,
    held::{Deadlines, Lock, Released},
    redlock::{Redlock, RedlockGuard, TryRedlock},
    reentrant::{ReentrantLock, ReleasedLevel, TryEnter},
    retry::{Attempt, ExponentialBackoff, LimitedRetry, NoRetry, RetryStrategy, Until},
};
pub use crate::model::FencingToken;
#[cfg(feature = "redis")]
use crate::store;
use crate::{clock::Boottime, config, logic::backoff::Pauses};

/// The settings of a store, as in `[store]` of the configuration file; for [`LockClient::with_config`].
pub mod options {
    pub use crate::config::{Secret, Store, StoreRetry, StoreUrl, Tls};
}

/// Shortest and longest pause between two requests of a waiter while the store does not answer.
const AWAY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// The longest key, in bytes.
pub const KEY_MAX: usize = 512;
/// ρ: by how much the rates of the store's clock and of this host's clock may differ.
const CLOCK_DRIFT: f64 = 0.01;
/// Redis drops a key in the millisecond after its time to live, so a waiter asks this much later.
const AFTER: Duration = Duration::from_millis(1);

/// How an attempt to acquire a lock ended.
#[derive(Debug)]
#[must_use = "a lock that is dropped is released at once"]
pub enum TryLock {
    /// The caller holds the lock.
    Acquired(Lock),
    /// Somebody else holds it.
    Held {
        /// The name of the holder's client, see [`LockClient::named`].
        holder: String,
        /// The holder keeps it for at most this long, by the store's clock, unless it renews; [`Duration::MAX`] if the
        /// lock does not expire.
        remaining: Duration,
    },
}

impl TryLock {
    /// Returns the lock, if it was acquired.
    pub fn acquired(self) -> Option<Lock> {
        match self {
            Self::Acquired(lock) => Some(lock),
            Self::Held { .. } => None,
        }
    }
}

/// How [`LockClient::with_lock`] ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the future may not have been run"]
pub enum WithLock<T> {
    /// The future ran to its end under the lock.
    Done(T),
    /// The future did not run: others held the lock for the whole wait.
    Held {
        /// As in [`TryLock::Held`].
        holder: String,
        /// As in [`TryLock::Held`].
        remaining: Duration,
    },
}

/// How [`LockClient::claim_period`] ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Period {
    /// This call claimed the present period; nobody else gets it.
    Claimed {
        /// The next period begins after this time, by the store's clock.
        next: Duration,
    },
    /// The present period was claimed before.
    Held {
        /// The name of the client that claimed it, see [`LockClient::named`].
        holder: String,
        /// The next period begins after this time, by the store's clock.
        next: Duration,
    },
}

/// The holder of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The name of the holder's client, see [`LockClient::named`].
    pub name: String,
    /// The holder keeps it for at most this long, by the store's clock, unless it renews; [`Duration::MAX`] if the lock
    /// does not expire.
    pub remaining: Duration,
}

/// Acquires locks in one store. Cheap to clone: clones share the thread, the connections and the queues of waiters.
#[derive(Clone)]
pub struct LockClient {
    core: Arc<Core>,
    name: Arc<str>,
}

impl std::fmt::Debug for LockClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LockClient")
            .field("address", &self.address())
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl LockClient {
    /// Opens the store at `url`: `redis://`, `rediss://` (TLS), `redis+unix://` or `sqlite:PATH`.
    ///
    /// All other settings are those of an empty `[store]`: keys begin with `soloist:`, a command may take 500 ms, and a
    /// request is retried three times. This call does not connect: if the server is down, the first request fails. A
    /// SQLite file is created if it does not exist.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`]: the URL or the SQLite file cannot be used.
    pub fn open(url: &str) -> Result<Self, Error> {
        let store = config::Store::from_url(url).map_err(|reason| Error::InvalidUrl { reason })?;
        Self::with_config(&store)
    }

    /// As [`LockClient::open`], with all settings of `[store]`: namespace, TLS, password, timeout, retries,
    /// `min_replicas`. A `memory:` store has no locks.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`]: the URL, a certificate or the SQLite file cannot be used.
    pub fn with_config(store: &config::Store) -> Result<Self, Error> {
        let invalid = |reason: String| Error::InvalidUrl { reason };
        let made = match &store.url {
            #[cfg(feature = "redis")]
            config::StoreUrl::Redis(url) => Self::over(&store.retry, |id, queues| {
                redis::RedisLocks::open(url.expose(), store, id, queues)
            }),
            #[cfg(feature = "sqlite")]
            config::StoreUrl::Sqlite(path) => Self::over(&store.retry, |id, queues| {
                sqlite::SqliteLocks::open(path, &store.namespace, id, queues)
            }),
            config::StoreUrl::Memory => {
                let reason = "`memory:` has no locks; use `sqlite:PATH` or a Redis server";
                return Err(invalid(reason.to_owned()));
            }
            #[cfg(not(all(feature = "redis", feature = "sqlite")))]
            _ => {
                let has = if cfg!(feature = "redis") {
                    "redis"
                } else {
                    "sqlite"
                };
                return Err(invalid(format!(
                    "this program was built without this kind of store: of soloist's features it has `{has}` alone"
                )));
            }
        };
        made.map_err(|e| invalid(e.to_string()))
    }

    /// Uses the server, user, password and certificates of a `redis::Client` of the caller; all other settings are as
    /// in [`LockClient::open`]. The client must be of the crate version that `soloist::redis` exports.
    ///
    /// The locks make connections of their own with it. A connection that the caller made would end with the caller's
    /// runtime, and its locks with it.
    ///
    /// ```no_run
    /// use soloist::{LockClient, redis};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = redis::Client::open("redis://redis.example.net:6379/0")?;
    /// let locks = LockClient::with_redis(client);
    /// # drop(locks);
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "redis")]
    pub fn with_redis(client: ::redis::Client) -> Self {
        Self::with_redis_and_config(client, &config::Store::of(config::StoreUrl::Memory))
    }

    /// As [`LockClient::with_redis`], with the namespace, timeout, retries and `min_replicas` of `store`. Everything in
    /// `store` about how to reach the server is ignored.
    #[cfg(feature = "redis")]
    pub fn with_redis_and_config(client: ::redis::Client, store: &config::Store) -> Self {
        let client = store::connection::Client::over(client, store.timeout);
        let made = Self::over(&store.retry, |id, queues| {
            Ok::<_, Infallible>(redis::RedisLocks::over(client, store, id, queues))
        });
        made.unwrap_or_else(|never| match never {})
    }

    /// Uses a SQLite store that was opened before; a test can open one with a clock of its own
    /// ([`SqliteStore::open_with_clock`](crate::store::sqlite::SqliteStore::open_with_clock)).
    #[cfg(feature = "daemon")]
    pub fn with_sqlite(store: crate::store::sqlite::SqliteStore) -> Self {
        let made = Self::over(&config::StoreRetry::default(), |id, queues| {
            Ok::<_, Infallible>(sqlite::SqliteLocks::new(store, "soloist", id, queues))
        });
        made.unwrap_or_else(|never| match never {})
    }

    /// Makes a client with the backend that `backend` makes from the client's id and queues.
    fn over<B: Backend + 'static, E>(
        retry: &config::StoreRetry,
        backend: impl FnOnce(&str, Arc<WaitQueues>) -> Result<B, E>,
    ) -> Result<Self, E> {
        let queues = Arc::new(WaitQueues::default());
        let id = uuid::Uuid::new_v4().simple().to_string();
        let backend = Box::new(backend(&id, queues.clone())?);
        let host = crate::store::host();
        Ok(Self {
            core: Arc::new(Core {
                backend,
                retry: retry.clone(),
                id,
                owners: AtomicU64::new(0),
                queues,
                thread: ClientThread::default(),
            }),
            name: format!("{host}:{}", std::process::id()).into(),
        })
    }

    /// The same client under another name. When one of its locks is held, others are told this name. The default is
    /// `<hostname>:<pid>`. At most 200 bytes are kept; control characters and `#` become `_`.
    pub fn named(&self, name: &str) -> Self {
        let mut kept = String::new();
        for c in name.chars() {
            let c = if c.is_control() || c == '#' { '_' } else { c };
            if kept.len() + c.len_utf8() > 200 {
                break;
            }
            kept.push(c);
        }
        Self {
            core: self.core.clone(),
            name: kept.into(),
        }
    }

    /// The address of the store, for messages; without secrets.
    pub fn address(&self) -> &str {
        self.core.backend.address()
    }

    /// Acquires the lock on `key` if it is free. If somebody else holds it, asks again as often as `retry` says, and
    /// then returns who holds it.
    ///
    /// `lease` (10 ms to 366 days) is counted by the store's wall clock from the moment it grants the lock; then the
    /// lock lapses, unless it was renewed. If a reply is lost, the client repeats the request (`retry` of `[store]`),
    /// and the store gives the same answer again. This call does not queue behind the waiters of [`LockClient::lock`].
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidLease`], [`Error::WrongType`], [`Error::Refused`]: nothing was acquired.
    /// [`Error::Unreachable`], [`Error::NotReplicated`], [`Error::TooLate`]: the caller must not rely on the lock; if
    /// the store granted it, the client releases it in the background, or it lapses after `lease`.
    ///
    /// # Cancel safety
    /// If the future is dropped, the request that it has sent continues to its answer on the client's thread. A lock
    /// that was granted is then released.
    pub async fn try_lock(
        &self,
        key: &str,
        lease: Duration,
        mut retry: impl RetryStrategy,
    ) -> Result<TryLock, Error> {
        let key = checked(key)?;
        let lease = leased(&key, lease)?;
        let mut attempts = Attempts::begin();
        loop {
            let owner = self.owner();
            match self.core.try_lock(&key, &owner, lease).await? {
                TryLockOutcome::Acquired(lock, _) => return Ok(TryLock::Acquired(lock)),
                TryLockOutcome::Held { owner, remaining } => {
                    match retry.pause(&attempts.held_for(remaining)) {
                        Some(pause) => self.core.thread.sleep(pause).await,
                        None => return Ok(held(&owner, remaining)),
                    }
                }
            }
        }
    }

    /// Acquires the lock on `key`. While somebody else holds it, waits for up to `wait`; the release wakes the waiter.
    ///
    /// A waiter sends nothing while it waits: the store announces the release (Redis: publish and subscribe; SQLite:
    /// the client looks at the file's log every 20 ms, or every 100 ms if nothing was written for a while). If that
    /// message is lost, the client asks again when the holder's remaining time has passed. Waiters of one client are
    /// served in the order in which they came (first in, first out); between clients the store decides. If `wait` is
    /// zero, the client asks once.
    ///
    /// If the store does not answer, the call waits for it too, from the first request on.
    ///
    /// # Errors
    /// As [`LockClient::try_lock`]. [`Error::Unreachable`] is returned when `wait` has passed, and not before the
    /// retries of `[store]` have been made.
    ///
    /// # Cancel safety
    /// If the future is dropped, the caller leaves the queue. A request that is under way continues to its answer on
    /// the client's thread; a lock that was granted is then released.
    ///
    /// ```
    /// # tokio_test(async {
    /// use std::time::Duration;
    /// use soloist::LockClient;
    /// # let dir = tempfile::tempdir()?;
    /// # let locks = LockClient::open(&format!("sqlite:{}", dir.path().join("locks.db").display()))?;
    /// let (wait, lease) = (Duration::from_secs(10), Duration::from_secs(30));
    /// if let Some(lock) = locks.lock("ledger", wait, lease).await?.acquired() {
    ///     lock.keep_renewed();
    ///     // ... the work; what it writes to may check lock.fencing_token() ...
    ///     lock.release().await?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # });
    /// # fn tokio_test(f: impl Future<Output = Result<(), Box<dyn std::error::Error>>>) {
    /// #     tokio::runtime::Runtime::new().unwrap().block_on(f).unwrap();
    /// # }
    /// ```
    pub async fn lock(&self, key: &str, wait: Duration, lease: Duration) -> Result<TryLock, Error> {
        self.compete(key, wait, lease, false).await
    }

    /// As [`LockClient::lock`], but only one caller of this client competes in the store at a time. The next caller
    /// competes when that one has released or lost the lock. Each caller gets the lock in turn, first in, first out,
    /// with a lease and a fencing token of its own. A thousand local callers cost the store two commands each, and they
    /// never ask in vain because of each other.
    ///
    /// # Errors
    /// As [`LockClient::lock`].
    ///
    /// # Cancel safety
    /// As [`LockClient::lock`]; if the future is dropped, the turn passes to the next caller.
    ///
    /// ```
    /// # tokio_test(async {
    /// use std::time::Duration;
    /// use soloist::LockClient;
    /// # let dir = tempfile::tempdir()?;
    /// # let locks = LockClient::open(&format!("sqlite:{}", dir.path().join("locks.db").display()))?;
    /// let (wait, lease) = (Duration::from_secs(10), Duration::from_secs(30));
    /// let request = || async {
    ///     let lock = locks.singleflight_lock("rates", wait, lease).await?;
    ///     lock.acquired().expect("nobody has it for ten seconds").release().await
    /// };
    /// // One of the three at a time competes with other processes.
    /// let (a, b, c) = tokio::join!(request(), request(), request());
    /// a.and(b).and(c)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # });
    /// # fn tokio_test(f: impl Future<Output = Result<(), Box<dyn std::error::Error>>>) {
    /// #     tokio::runtime::Runtime::new().unwrap().block_on(f).unwrap();
    /// # }
    /// ```
    pub async fn singleflight_lock(
        &self,
        key: &str,
        wait: Duration,
        lease: Duration,
    ) -> Result<TryLock, Error> {
        self.compete(key, wait, lease, true).await
    }

    /// Runs a future under the lock on `key`, and keeps the lock renewed meanwhile. Waits for the lock as
    /// [`LockClient::lock`] does. `work` makes the future once the lock is acquired.
    ///
    /// `work` gets the [fencing token](Lock::fencing_token), for resources that check it.
    ///
    /// When the lock is lost, the future is dropped at its next `.await`, before the lock can be granted to somebody
    /// else. What the future has handed to other tasks or threads continues: give these the token, or a
    /// `CancellationToken` of your own.
    ///
    /// # Errors
    /// As [`LockClient::lock`]. [`Error::Lost`]: the future was dropped because the lock was lost.
    ///
    /// # Cancel safety
    /// If the returned future is dropped, the future of `work` is dropped with it, and then the lock is released in the
    /// background. During the wait it is as with [`LockClient::lock`].
    ///
    /// ```
    /// # tokio_test(async {
    /// use std::time::Duration;
    /// use soloist::{LockClient, WithLock};
    /// # let dir = tempfile::tempdir()?;
    /// # let locks = LockClient::open(&format!("sqlite:{}", dir.path().join("locks.db").display()))?;
    /// let (wait, lease) = (Duration::from_secs(1), Duration::from_secs(30));
    /// let out = locks
    ///     .with_lock("sum", wait, lease, |token| async move {
    ///         // ... update sums set n = 42, token = $token where token < $token ...
    ///         assert!(token.0 > 0);
    ///         40 + 2
    ///     })
    ///     .await?;
    /// assert_eq!(out, WithLock::Done(42));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # });
    /// # fn tokio_test(f: impl Future<Output = Result<(), Box<dyn std::error::Error>>>) {
    /// #     tokio::runtime::Runtime::new().unwrap().block_on(f).unwrap();
    /// # }
    /// ```
    pub async fn with_lock<F: Future>(
        &self,
        key: &str,
        wait: Duration,
        lease: Duration,
        work: impl FnOnce(FencingToken) -> F,
    ) -> Result<WithLock<F::Output>, Error> {
        let lock = match self.lock(key, wait, lease).await? {
            TryLock::Acquired(lock) => lock,
            TryLock::Held { holder, remaining } => return Ok(WithLock::Held { holder, remaining }),
        };
        lock.keep_renewed();
        // In a scope of its own: the future is dropped before the lock is released.
        let done = {
            let (lost, future) = (lock.lost(), work(lock.fencing_token()));
            tokio::select! {
                biased;
                () = lost => None,
                out = future => Some(out),
            }
        };
        match done {
            Some(out) => {
                // The lock was held when the future ended. If the release fails, the work is still done.
                if let Err(e) = lock.release().await {
                    tracing::debug!(error = %e, "the lock could not be released");
                }
                Ok(WithLock::Done(out))
            }
            None => Err(Error::Lost {
                key: lock.key().to_owned(),
            }),
        }
    }

    /// Returns who holds the lock on `key`; None: nobody. The answer may be out of date when it arrives.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::Unreachable`], [`Error::Refused`], [`Error::WrongType`].
    ///
    /// # Cancel safety
    /// The request changes nothing, so the future can be dropped at any time.
    pub async fn holder(&self, key: &str) -> Result<Option<Holder>, Error> {
        let (core, key) = (self.core.clone(), checked(key)?);
        let asked = key.clone();
        let look = async move {
            let limit = core.backend.patience();
            core.with_retries(limit, || core.backend.holder(&asked, limit))
                .await
        };
        let found = self.core.run(&key, look).await?;
        Ok(found.map(|(owner, remaining)| Holder {
            name: name_of(&owner).to_owned(),
            remaining,
        }))
    }

    /// Claims the present period for `key`: of all callers within one period, one gets it. A period is `every` long
    /// (1 ms to 366 days, in whole milliseconds). Periods are counted from the Unix epoch by the store's wall clock, so
    /// hosts whose clocks differ mean the same ones. Claims with another length are independent of these.
    ///
    /// The claimant does not release the period, and the period stays claimed if the claimant dies: at most one claim
    /// for each period, as long as the store keeps its data. If the store's clock goes back, no period begins again;
    /// the store remembers the last claim for a week, and for two periods at least.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidLease`] (of `every`), [`Error::WrongType`], [`Error::Refused`]: nothing
    /// was claimed. [`Error::Unreachable`], [`Error::NotReplicated`]: unknown; the period may be used up.
    ///
    /// # Cancel safety
    /// If the future is dropped, the request continues to its answer on the client's thread. A period that was claimed
    /// is then released, so that another caller can claim it.
    ///
    /// ```
    /// # tokio_test(async {
    /// use std::time::Duration;
    /// use soloist::{LockClient, lock::Period};
    /// # let dir = tempfile::tempdir()?;
    /// # let locks = LockClient::open(&format!("sqlite:{}", dir.path().join("locks.db").display()))?;
    /// let hour = Duration::from_secs(3600);
    /// match locks.claim_period("newsletter", hour).await? {
    ///     Period::Claimed { .. } => { /* send it */ }
    ///     Period::Held { holder, next } => println!("{holder} has sent it; again in {next:?}"),
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # });
    /// # fn tokio_test(f: impl Future<Output = Result<(), Box<dyn std::error::Error>>>) {
    /// #     tokio::runtime::Runtime::new().unwrap().block_on(f).unwrap();
    /// # }
    /// ```
    pub async fn claim_period(&self, key: &str, every: Duration) -> Result<Period, Error> {
        Ok(match self.try_claim_period(key, every).await? {
            PeriodClaim::Claimed { next, .. } => Period::Claimed { next },
            PeriodClaim::Held { holder, next } => Period::Held { holder, next },
        })
    }

    /// Waits until nothing is left to do in the background: no request is open, and all that was dropped has been given
    /// back or cannot be. For a program that is about to end.
    ///
    /// # Cancel safety
    /// If the future is dropped, the work in the background continues.
    pub async fn wait_idle(&self) {
        self.core.thread.wait_idle().await;
    }

    /// A new owner; no two are the same.
    fn owner(&self) -> Arc<str> {
        [&*self.name, "#", &self.core.nonce()].concat().into()
    }

    async fn compete(
        &self,
        key: &str,
        wait: Duration,
        lease: Duration,
        keep_turn: bool,
    ) -> Result<TryLock, Error> {
        let key = checked(key)?;
        let lease = leased(&key, lease)?;
        let (this, of) = (self.clone(), key.clone());
        // On the client's thread: no other thread has to be woken between a release and the next attempt.
        let competing = async move { this.compete_here(of, wait, lease, keep_turn).await };
        let won = self.core.thread.run_until_dropped(competing).await;
        match won.unwrap_or_else(|e| Err(self.core.no_thread(&key, &e)))? {
            WaitOutcome::Acquired((lock, _), ()) => Ok(TryLock::Acquired(lock)),
            WaitOutcome::Held { holder, remaining } => Ok(TryLock::Held { holder, remaining }),
        }
    }

    async fn compete_here(
        &self,
        key: Arc<str>,
        wait: Duration,
        lease: config::Lease,
        keep_turn: bool,
    ) -> Result<WaitOutcome<(Lock, TaskTrackerToken), ()>, Error> {
        let asked = &key;
        let ask = || async move {
            let owner = self.owner();
            Ok(match self.core.try_lock(asked, &owner, lease).await? {
                TryLockOutcome::Acquired(lock, token) => WaiterTry::Acquired {
                    lock: (lock, token),
                    owner,
                    lease: lease.length,
                },
                TryLockOutcome::Held { owner, remaining } => WaiterTry::Held { owner, remaining },
            })
        };
        let won = self.wait_for(&key, None, wait, ask).await?;
        Ok(match won {
            WaitOutcome::Acquired(won, (turn, waiter)) => {
                if keep_turn {
                    // With its place in the queue: the next caller has to find this turn taken.
                    won.0.keep_turn(turn, waiter);
                }
                WaitOutcome::Acquired(won, ())
            }
            WaitOutcome::Held { holder, remaining } => WaitOutcome::Held { holder, remaining },
        })
    }

    /// Calls `ask` until the lock is acquired or `wait` has passed. The callers of this client take turns, in the order
    /// in which they came. Between two requests the waiter sleeps until it has a reason to ask again. A lock that `me`
    /// already holds is not waited for.
    // Long: one loop over the state of a waiter, which is local.
    async fn wait_for<T, F: Future<Output = Result<WaiterTry<T>, Error>>>(
        &self,
        key: &Arc<str>,
        me: Option<&str>,
        wait: Duration,
        ask: impl Fn() -> F,
    ) -> Result<WaitOutcome<T>, Error> {
        let deadline = Boottime::now() + wait;
        let is_over = || Boottime::now() >= deadline;
        let held = |owner: &str, remaining| WaitOutcome::Held {
            holder: name_of(owner).to_owned(),
            remaining,
        };
        let thread = &self.core.thread;
        let waiter = self.core.queues.join(key, self.core.clone());
        let turn = tokio::select! {
            biased;
            turn = waiter.turn.clone().lock_owned() => turn,
            () = thread.sleep_until(deadline) => {
                // Other callers of this client come first. The store is asked who holds the lock only if they do not
                // know.
                if let Some((owner, at)) = waiter.known_holder() {
                    return Ok(held(&owner, left(at)));
                }
                return Ok(match self.holder(key).await? {
                    Some(h) => held(&h.name, h.remaining),
                    None => held(&self.name, Duration::ZERO),
                });
            }
        };
        let mut wakeup = waiter.wakeup();
        let mut pauses = Pauses::from(AWAY.0);
        loop {
            wakeup.mark_unchanged();
            let known = waiter
                .known_holder()
                .filter(|(owner, _)| !is_over() && Some(&**owner) != me);
            let (holder, at) = match known {
                Some(known) => known,
                None => match ask().await {
                    Ok(WaiterTry::Acquired { lock, owner, lease }) => {
                        waiter.note_holder(&wakeup, &owner, free_at(Boottime::now(), lease));
                        return Ok(WaitOutcome::Acquired(lock, (turn, waiter)));
                    }
                    Ok(WaiterTry::Held { owner, remaining }) => {
                        pauses.reset();
                        let at = free_at(Boottime::now(), remaining);
                        if is_over() {
                            return Ok(held(&owner, remaining));
                        }
                        waiter.note_holder(&wakeup, &owner, at);
                        (owner.into(), at)
                    }
                    // The store may come back while the caller waits, also if it was never there yet.
                    Err(e) if e.is_transient() && !is_over() => {
                        tokio::select! {
                            () = thread.sleep(pauses.after_failure(AWAY.1)) => {}
                            () = thread.sleep_until(deadline) => return Err(e),
                        }
                        continue;
                    }
                    Err(e) => return Err(e),
                },
            };
            // A release by this client wakes its waiters without a subscription.
            let subscribe = !waiter.is_subscribed() && !self.core.is_ours(&holder);
            if subscribe {
                waiter.will_subscribe();
            }
            tokio::select! {
                biased;
                () = wakeup.changed() => {}
                // If the release came before the subscription, the next request finds the lock free.
                () = self.core.subscribe(key), if subscribe => waiter.has_subscribed(),
                () = thread.sleep_until(at.min(deadline)) => waiter.forget_holder(&holder),
            }
            if is_over() && waiter.known_holder().is_some_and(|(h, _)| h == holder) {
                return Ok(held(&holder, left(at)));
            }
        }
    }
}

/// How one attempt of a waiter ended.
enum WaiterTry<T> {
    Acquired {
        lock: T,
        owner: Arc<str>,
        lease: Duration,
    },
    Held {
        owner: String,
        remaining: Duration,
    },
}

/// How a wait ended; `Turn` is the local turn, and the place in the queue that it belongs to.
enum WaitOutcome<T, Turn = (OwnedMutexGuard<()>, Waiter)> {
    Acquired(T, Turn),
    Held { holder: String, remaining: Duration },
}

/// Calls a function when it is dropped, unless it was disarmed: for futures that are dropped before their answer comes.
struct IfDropped<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> IfDropped<F> {
    fn new(f: F) -> Self {
        Self(Some(f))
    }

    fn disarm(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for IfDropped<F> {
    fn drop(&mut self) {
        if let Some(f) = self.0.take() {
            f();
        }
    }
}

/// When a waiter asks again for a lock that its holder keeps for so long at most.
fn free_at(now: Boottime, remaining: Duration) -> Boottime {
    (now + remaining) + AFTER
}

/// The time until `at`; the last instant of the clock means never.
fn left(at: Boottime) -> Duration {
    match at {
        Boottime(u64::MAX) => Duration::MAX,
        at => at.since(Boottime::now()),
    }
}

/// The name in an owner, which is `<name>#<client>.<number>`.
fn name_of(owner: &str) -> &str {
    owner.rsplit_once('#').map_or(owner, |(name, _)| name)
}

fn held(owner: &str, remaining: Duration) -> TryLock {
    TryLock::Held {
        holder: name_of(owner).to_owned(),
        remaining,
    }
}

fn checked(key: &str) -> Result<Arc<str>, Error> {
    let reason = if key.is_empty() {
        "it is empty".to_owned()
    } else if key.len() > KEY_MAX {
        format!("it has {} bytes; {KEY_MAX} are the most", key.len())
    } else if let Some(c) = key.chars().find(|c| c.is_control() || "{}".contains(*c)) {
        format!("it contains {c:?}; control characters and braces are not allowed")
    } else {
        return Ok(key.into());
    };
    let shown: String = key.chars().take(64).collect();
    Err(Error::InvalidKey {
        key: shown.escape_debug().to_string(),
        reason,
    })
}

fn leased(key: &str, lease: Duration) -> Result<config::Lease, Error> {
    config::Lease::of_lock(lease, CLOCK_DRIFT).map_err(|reason| Error::InvalidLease {
        key: key.to_owned(),
        reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_checked() {
        for good in ["a", "orders/42", "ünï", &"x".repeat(KEY_MAX)] {
            assert_eq!(&*checked(good).unwrap(), good);
        }
        for (bad, reason) in [
            ("", "it is empty"),
            (&*"x".repeat(KEY_MAX + 1), "it has 513 bytes"),
            ("a{b", "braces"),
            ("a}b", "braces"),
            ("a\nb", "control characters"),
            ("a\0", "control characters"),
        ] {
            let e = checked(bad).unwrap_err();
            assert!(matches!(e, Error::InvalidKey { .. }));
            assert!(e.to_string().contains(reason), "{e}");
            assert!(!e.to_string().contains('\n') && e.to_string().len() < 300);
        }
    }

    fn client() -> LockClient {
        LockClient::open("redis://127.0.0.1:1").unwrap()
    }

    #[test]
    fn an_owner_is_of_its_client_and_no_two_are_the_same() {
        let (a, b) = (client().named("a"), client());
        let (first, second) = (a.owner(), a.owner());
        assert_ne!(first, second);
        assert_eq!(name_of(&first), "a");
        assert!(a.core.is_ours(&first) && a.core.is_ours(&second));
        assert!(!a.core.is_ours(&b.owner()));
        assert!(a.address().contains("127.0.0.1:1"));
        let shown = format!("{a:?}");
        assert!(
            shown.contains(a.address()) && shown.contains("\"a\""),
            "{shown}"
        );
    }

    #[test]
    fn what_is_held_for_ever_is_not_asked_for_again() {
        let (second, now) = (Duration::from_secs(1), Boottime(7));
        assert_eq!(free_at(now, second), now + second + AFTER);
        assert_eq!(left(free_at(now, Duration::MAX)), Duration::MAX);
        assert_eq!(left(now), Duration::ZERO);
        let hour = left(Boottime::now() + 3600 * second);
        assert!(hour > 3000 * second && hour <= 3600 * second);
    }

    #[test]
    fn a_lock_is_returned_if_it_was_acquired() {
        let none = held("b#1.2", Duration::ZERO);
        assert!(matches!(&none, TryLock::Held { holder, .. } if holder == "b"));
        assert!(none.acquired().is_none());
    }

    #[test]
    fn an_owner_shows_its_name() {
        assert_eq!(name_of("host:1#0af.3"), "host:1");
        assert_eq!(name_of("host:1#0af.3!kept"), "host:1");
        assert_eq!(name_of("by hand"), "by hand");
    }
}
