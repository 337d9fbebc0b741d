//! Locks for programs: what the daemon's leases are to jobs, for anything that two processes must not do at once.
//!
//! A [`LockClient`] acquires locks in Redis (many hosts) or in a SQLite file (one host). [`LockClient::try_lock`] asks and
//! tells who has it; [`LockClient::lock`] waits and is woken by the release; [`LockClient::with_lock`] runs a future
//! and cancels it when the lock is lost. Losing a race is an outcome ([`TryLock::Held`]), not an error.
//!
//! A client works on a thread of its own, which is started with its first request and ends with it. So none of this depends on the
//! caller's runtime: it may be any executor, block its threads, end before its locks do, or have a paused clock. Only an `Elector` over a store that
//! was opened elsewhere shares that one's connections.
//!
//! What is promised, and what is not, stands in docs/locks.md. In short: a lock is a key with a time to live, and that
//! is counted by the *store's wall clock*. The holder's own side needs no wall clock: it trusts the lock from before
//! its request left, for less than the lease, on CLOCK_BOOTTIME. What must not be done twice even if the store's clock
//! is stepped has to check the [fencing token](Lock::fencing_token).
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
    wait_queue::{WaitQueues, Waiter},
};
pub use self::{
    error::Error,
    held::{Deadlines, Lock, Released},
    redlock::{Redlock, RedlockGuard, TryRedlock},
    reentrant::{Enter, Leave, ReentrantLock},
    retry::{Attempt, ExponentialBackoff, LimitedRetry, NoRetry, RetryStrategy, Until},
};
pub use crate::model::FencingToken;
#[cfg(feature = "redis")]
use crate::store;
use crate::{clock::Boottime, config, logic::backoff::Pauses};

/// What a store is told, as `[store]` of the configuration file has it; for [`LockClient::with_config`].
pub mod options {
    pub use crate::config::{Secret, Store, StoreRetry, StoreUrl, Tls};
}

/// Between two requests of a waiter while the store is away.
const AWAY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Longest key, in bytes.
pub const KEY_MAX: usize = 512;
/// ρ: by how much the rates of the store's clock and of ours may differ.
const CLOCK_DRIFT: f64 = 0.01;
/// Redis drops a key in the millisecond after its time to live.
const AFTER: Duration = Duration::from_millis(1);

/// How a try to acquire a lock ended.
#[derive(Debug)]
#[must_use = "a lock that is dropped is given back at once"]
pub enum TryLock {
    /// It is ours.
    Acquired(Lock),
    /// Somebody else has it.
    Held {
        /// The name of the holder's client, see [`LockClient::named`].
        holder: String,
        /// At most this long, by the store's clock, unless it is renewed; [`Duration::MAX`] if it does not expire.
        remaining: Duration,
    },
}

impl TryLock {
    /// The lock, if it was acquired.
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
    /// It was not begun: somebody else kept the lock for the whole wait.
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
    /// The period of now is ours, and nobody else's.
    Claimed {
        /// The next one begins after this time, by the store's clock.
        next: Duration,
    },
    /// Somebody else has claimed it.
    Held {
        /// The name of the client that did, see [`LockClient::named`].
        holder: String,
        /// The next one begins after this time, by the store's clock.
        next: Duration,
    },
}

/// Who has a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The name of the holder's client, see [`LockClient::named`].
    pub name: String,
    /// At most this long, by the store's clock, unless it is renewed; [`Duration::MAX`] if it does not expire.
    pub remaining: Duration,
}

/// Acquires locks in one store. Cheap to clone; clones share connections and the queue of waiters.
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
    /// Opens the store at `url`: `redis://`, `rediss://` (TLS), `redis+unix://` or `sqlite:PATH`; the rest as in an empty
    /// `[store]` (keys begin with `soloist:`, 500 ms for each command, three retries). Does not connect yet: a server
    /// that is down is an error of the first call. A SQLite file is made if it is not there.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`], also for a SQLite file that cannot be used.
    pub fn open(url: &str) -> Result<Self, Error> {
        let store = config::Store::from_url(url).map_err(|reason| Error::InvalidUrl { reason })?;
        Self::with_config(&store)
    }

    /// As [`LockClient::open`], with all that `[store]` can say: namespace, TLS, password, timeout, retries,
    /// `min_replicas`. A `memory:` store has no locks.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`]: also for certificates or a file that cannot be used.
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

    /// Over a `redis::Client` of the caller's, with the server, user, password and certificates that it was made with; the rest as
    /// in [`LockClient::open`]. `soloist::redis` is the version of the crate that it must be of.
    ///
    /// The locks make connections of their own with it. A connection of the caller's would end with the runtime that it was made in,
    /// and its locks with it.
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

    /// As [`LockClient::with_redis`], with what `store` says of all but the way to the server: namespace, timeout, retries,
    /// `min_replicas`.
    #[cfg(feature = "redis")]
    pub fn with_redis_and_config(client: ::redis::Client, store: &config::Store) -> Self {
        let client = store::connection::Client::over(client, store.timeout);
        let made = Self::over(&store.retry, |id, queues| {
            Ok::<_, Infallible>(redis::RedisLocks::over(client, store, id, queues))
        });
        made.unwrap_or_else(|never| match never {})
    }

    /// Over a SQLite store that was opened before; in a test with a clock of its own
    /// ([`SqliteStore::open_with_clock`](crate::store::sqlite::SqliteStore::open_with_clock)).
    #[cfg(feature = "daemon")]
    pub fn with_sqlite(store: crate::store::sqlite::SqliteStore) -> Self {
        let made = Self::over(&config::StoreRetry::default(), |id, queues| {
            Ok::<_, Infallible>(sqlite::SqliteLocks::new(store, "soloist", id, queues))
        });
        made.unwrap_or_else(|never| match never {})
    }

    /// Over what is made for the id of this client, and its queues.
    fn over<B: Backend + 'static, E>(
        retry: &config::StoreRetry,
        backend: impl FnOnce(&str, Arc<WaitQueues>) -> Result<B, E>,
    ) -> Result<Self, E> {
        let queues = Arc::new(WaitQueues::default());
        let id = uuid::Uuid::new_v4().simple().to_string();
        let backend = Box::new(backend(&id, queues.clone())?);
        let host = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
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

    /// The same client under another name: what others are told when a lock is held by it. Unless set it is
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

    /// The store, for messages; without secrets.
    pub fn address(&self) -> &str {
        self.core.backend.address()
    }

    /// Acquires the lock on `key` if it is free; else asks again as often as `retry` says, and then tells who has it.
    ///
    /// `lease` (10 ms to 366 days) is counted by the store's wall clock from the moment it grants the lock; the lock
    /// lapses then unless it is renewed. Asking again after a lost reply is part of it (`retry` of `[store]`), and is answered
    /// as the first time. The waiters of [`LockClient::lock`] have no precedence over it.
    ///
    /// Dropping the future gives back what it may have acquired.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidLease`], [`Error::WrongType`], [`Error::Refused`]: nothing was acquired.
    /// [`Error::Unreachable`]: the lock may be held in our name until `lease` has passed, by nobody. [`Error::TooLate`].
    pub async fn try_lock(
        &self,
        key: &str,
        lease: Duration,
        mut retry: impl RetryStrategy,
    ) -> Result<TryLock, Error> {
        let key = checked(key)?;
        let lease = leased(&key, lease)?;
        let begun = Boottime::now();
        let mut number = 0;
        loop {
            let owner = self.owner();
            match self.core.try_lock(&key, &owner, lease, false).await? {
                TryLockOutcome::Acquired(lock, _) => return Ok(TryLock::Acquired(lock)),
                TryLockOutcome::Held { owner, remaining } => {
                    number += 1;
                    let attempt = Attempt {
                        number,
                        elapsed: Boottime::now().since(begun),
                        remaining,
                    };
                    match retry.pause(&attempt) {
                        Some(pause) => self.core.thread.sleep(pause).await,
                        None => return Ok(held(&owner, remaining)),
                    }
                }
            }
        }
    }

    /// Acquires the lock on `key`; while somebody else has it, waits for up to `wait`, and is woken by the release.
    ///
    /// Nothing is sent while it waits: the store tells of the release (Redis: publish and subscribe; SQLite: a look at
    /// the file's log, at most 20 ms later). Should that message be lost, the lock is asked for again when the time has passed that
    /// its holder had left. Waiters of one client take their turns in the order in which they came (first in, first out); between clients
    /// the store decides. `wait` of zero asks once.
    ///
    /// A store that does not answer is waited for, too, from the first request on.
    ///
    /// # Errors
    /// As [`LockClient::try_lock`]. [`Error::Unreachable`] comes after `wait`, and not before the retries of `[store]` are over.
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

    /// As [`LockClient::lock`], but of all callers on this client only one competes in the store; the next one does
    /// when it has given the lock back (or lost it). Each gets the lock in turn, first in, first out, with a lease and a fencing
    /// token of its own. A thousand local callers cost the store two commands each, and never one in vain against each other.
    ///
    /// # Errors
    /// As [`LockClient::lock`].
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
    /// // Of the three one at a time competes with other processes.
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

    /// Runs what `work` makes under the lock on `key`, which is kept renewed; waits for it as [`LockClient::lock`] does.
    ///
    /// `work` is given the [fencing token](Lock::fencing_token), for resources that check it.
    ///
    /// When the lock is lost the future is dropped at its next `.await`, before the lock can be granted to another. What it has
    /// handed to other tasks or threads goes on: give them the token, or a `CancellationToken` of yours.
    ///
    /// # Errors
    /// As [`LockClient::lock`]; [`Error::Lost`] when the future was dropped for the loss of the lock.
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
        // In a scope of its own: the future is gone before the lock is given back.
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
                // It was ours when the future ended; what becomes of it now is no failure of the work.
                if let Err(e) = lock.release().await {
                    tracing::debug!(error = %e, "the lock could not be given back");
                }
                Ok(WithLock::Done(out))
            }
            None => Err(Error::Lost {
                key: lock.key().to_owned(),
            }),
        }
    }

    /// Who has the lock on `key` now; None: nobody. News that may be old when it arrives.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::Unreachable`], [`Error::Refused`], [`Error::WrongType`].
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

    /// Claims the present period for `key`: of all who ask within one period, one gets it. Periods are `every` long (a millisecond to
    /// 366 days), counted from the Unix epoch by the store's wall clock, so that hosts whose clocks differ mean the same ones.
    /// Those of another length are other periods.
    ///
    /// Nothing has to be given back, and nothing is when the claimant dies: at most once for each period, as long as the
    /// store keeps its data. A clock that goes back does not begin a period again (remembered for a week, and for two periods at least).
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidLease`] (of `every`), [`Error::WrongType`], [`Error::Refused`]: nothing was claimed.
    /// [`Error::Unreachable`]: the period may be used up.
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

    /// Waits until nothing goes on in the background: until what was dropped has been given back, or cannot be. For a program
    /// that is about to end.
    pub async fn wait_idle(&self) {
        self.core.thread.wait_idle().await;
    }

    /// Never the same twice.
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
        // On the client's thread: between a release and the next try there is no other to be woken.
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
        let ask = |subscribed| async move {
            let owner = self.owner();
            Ok(
                match self.core.try_lock(asked, &owner, lease, subscribed).await? {
                    TryLockOutcome::Acquired(lock, token) => WaiterTry::Acquired {
                        lock: (lock, token),
                        owner,
                        lease: lease.length,
                    },
                    TryLockOutcome::Held { owner, remaining } => {
                        WaiterTry::Held { owner, remaining }
                    }
                },
            )
        };
        let won = self.wait_for(&key, None, wait, ask).await?;
        Ok(match won {
            WaitOutcome::Acquired(won, (turn, waiter)) => {
                if keep_turn {
                    // With its queue: who comes next has to find this turn.
                    won.0.keep_turn(turn, waiter);
                }
                WaitOutcome::Acquired(won, ())
            }
            WaitOutcome::Held { holder, remaining } => WaitOutcome::Held { holder, remaining },
        })
    }

    /// Asks in the order in which the callers of this client came, until it is won; sleeps in between, until there is
    /// reason to ask again. A lock that `me` already holds is not waited for.
    // Long: a loop over what a waiter knows, which is local.
    async fn wait_for<T, F: Future<Output = Result<WaiterTry<T>, Error>>>(
        &self,
        key: &Arc<str>,
        me: Option<&str>,
        wait: Duration,
        ask: impl Fn(bool) -> F,
    ) -> Result<WaitOutcome<T>, Error> {
        let deadline = Boottime::now() + wait;
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
                // Others of us are before us. Who they wait for is asked only if they do not know.
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
                .filter(|(owner, _)| Boottime::now() < deadline && Some(&**owner) != me);
            let (holder, free_at) = match known {
                Some(known) => known,
                None => match ask(waiter.is_subscribed()).await {
                    Ok(WaiterTry::Acquired { lock, owner, lease }) => {
                        waiter.note_holder(&wakeup, &owner, Boottime::now() + lease + AFTER);
                        return Ok(WaitOutcome::Acquired(lock, (turn, waiter)));
                    }
                    Ok(WaiterTry::Held { owner, remaining }) => {
                        pauses.reset();
                        let at = (Boottime::now() + remaining) + AFTER;
                        if Boottime::now() >= deadline {
                            return Ok(held(&owner, remaining));
                        }
                        waiter.note_holder(&wakeup, &owner, at);
                        (owner.into(), at)
                    }
                    // It may come while we wait, also if it was never there yet.
                    Err(e) if e.is_transient() && Boottime::now() < deadline => {
                        tokio::select! {
                            () = thread.sleep(pauses.after_failure(AWAY.1)) => {}
                            () = thread.sleep_until(deadline) => return Err(e),
                        }
                        continue;
                    }
                    Err(e) => return Err(e),
                },
            };
            // Releases of our own client wake without a subscription.
            let subscribe = !waiter.is_subscribed() && !self.core.is_ours(&holder);
            if subscribe {
                waiter.will_subscribe();
            }
            tokio::select! {
                biased;
                () = wakeup.changed() => {}
                // Whatever was released before the subscription shows when we ask again.
                () = self.core.subscribe(key), if subscribe => waiter.has_subscribed(),
                () = thread.sleep_until(free_at.min(deadline)) => waiter.forget_holder(&holder),
            }
            if Boottime::now() >= deadline
                && waiter.known_holder().is_some_and(|(h, _)| h == holder)
            {
                return Ok(held(&holder, left(free_at)));
            }
        }
    }
}

/// How a waiter's try ended.
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

/// How a wait ended. With the local turn, and the place in the queue that it is of.
enum WaitOutcome<T, Turn = (OwnedMutexGuard<()>, Waiter)> {
    Acquired(T, Turn),
    Held { holder: String, remaining: Duration },
}

/// Does something should it be dropped before it is disarmed: for futures that are dropped before their answer is there.
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

/// The time until `at`; the end of the clock is never.
fn left(at: Boottime) -> Duration {
    match at {
        Boottime(u64::MAX) => Duration::MAX,
        at => at.since(Boottime::now()),
    }
}

/// The name in an owner: `<name>#<client>.<number>`.
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
        format!("it has {} bytes, {KEY_MAX} is the most", key.len())
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

    #[test]
    fn an_owner_shows_its_name() {
        assert_eq!(name_of("host:1#0af.3"), "host:1");
        assert_eq!(name_of("host:1#0af.3!kept"), "host:1");
        assert_eq!(name_of("by hand"), "by hand");
    }
}
