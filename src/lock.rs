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

mod client_thread;
#[cfg(feature = "daemon")]
mod elector;
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
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    runtime::Handle,
    sync::{OwnedMutexGuard, oneshot},
};
use tokio_util::task::task_tracker::TaskTrackerToken;

#[cfg(feature = "daemon")]
pub use self::elector::{Election, Elector, Term};
use self::{
    client_thread::ClientThread,
    held::HeldLock,
    period::{PeriodClaim, PeriodReply},
    reentrant::{EnterReply, LeaveReply, LevelToLeave},
    wait_queue::{WaitQueues, Waiter},
};
pub use self::{
    held::{Deadlines, Lock, Released},
    redlock::{Redlock, RedlockGuard, TryRedlock},
    reentrant::{Enter, Leave, ReentrantLock},
    retry::{Attempt, ExponentialBackoff, LimitedRetry, NoRetry, RetryStrategy, Until},
};
pub use crate::model::FencingToken;
use crate::{
    clock::Boottime,
    config,
    logic::{
        backoff::Pauses,
        trust::{HeldLease, Step},
    },
    store,
};

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

/// Why a lock could not be acquired, renewed or given back. That somebody else has it is no error, see [`TryLock`].
///
/// In all of them `key` is the lock's as the caller named it, `address` the store's URL without its password, and `reason` what was
/// wrong in the words of whoever said so.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Error {
    /// The store's URL cannot be used.
    #[error("cannot use this store: {reason}")]
    InvalidUrl { reason: String },
    /// Keys have 1 to [`KEY_MAX`] bytes, and no control characters and no braces.
    #[error("`{key}` cannot be the key of a lock: {reason}")]
    InvalidKey { key: String, reason: String },
    /// Zero, shorter than 10 ms, or longer than 366 days. Nothing was asked.
    #[error("cannot lock `{key}`: {reason}")]
    InvalidLease { key: String, reason: String },
    /// No answer, or none that can be relied on (a server that is full, loads its data, or is a replica): the request may have
    /// been carried out or not. Asking again is safe; assuming that the lock is held is
    /// not. What may have been acquired is given back in the background, or lapses with its lease.
    #[error("the store at {address} is not available for lock `{key}`: {reason}")]
    Unreachable {
        key: String,
        address: String,
        reason: String,
    },
    /// The store answered, and refused; asking again at once will not help. Nothing was changed.
    #[error("the store at {address} refused lock `{key}`: {reason}")]
    Refused {
        key: String,
        address: String,
        reason: String,
    },
    /// Fewer replicas than `min_replicas` have the grant or renewal, so it must not be relied on. A grant was given back.
    #[error("only {have} of {want} replicas of {address} confirmed lock `{key}`")]
    NotReplicated {
        key: String,
        address: String,
        have: u32,
        want: u32,
    },
    /// Under this key is something else: another kind of lock, or another program's data. It was not touched.
    #[error(
        "lock `{key}` at {address} is of another kind, or not a lock; use another key or another namespace"
    )]
    WrongType { key: String, address: String },
    /// The lock was granted, but the answer took so long that nothing of its lease can be trusted. It was given back.
    #[error(
        "lock `{key}` was granted, but the answer took {took:?}, too long for a lease of {lease:?}; use a longer lease"
    )]
    TooLate {
        key: String,
        lease: Duration,
        /// From before the request left, on CLOCK_BOOTTIME.
        took: Duration,
    },
    /// The lock lapsed, was given back, or was deleted, and it is not ours any more. Whoever has it now keeps it.
    #[error("lock `{key}` is not held by us any more: {}", match .holder {
        Some(holder) => format!("{holder} has it"),
        None => "nobody has it".to_owned(),
    })]
    NotHeld {
        key: String,
        /// Who has it now; None: nobody.
        holder: Option<String>,
    },
    /// The lock was lost before: it was not renewed while it could be trusted, so the store may have granted it to another by now;
    /// or the store has said that it is not ours.
    #[error("lock `{key}` was lost: it was not renewed in time, or taken away")]
    Lost { key: String },
    /// A [`Redlock`] needs three nodes or more.
    #[error("a lock on a majority needs at least 3 nodes, not {have}")]
    TooFewNodes { have: usize },
    /// Too few nodes answered. What was granted was given back, or lapses with its lease.
    #[error("only {votes} of the {needed} nodes that lock `{key}` needs confirmed it: {reason}")]
    NoMajority {
        key: String,
        /// Nodes that did.
        votes: usize,
        needed: usize,
        /// What the first node said that failed.
        reason: String,
    },
    /// What is stored cannot be read: written by something else, or by another version.
    #[error("unreadable data about lock `{key}` in the store at {address}: {reason}")]
    Corrupt {
        key: String,
        address: String,
        reason: String,
    },
}

impl Error {
    /// Worth asking again soon.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. } | Self::NotReplicated { .. } | Self::NoMajority { .. }
        )
    }

    fn of(key: &str, e: store::Error) -> Self {
        let key = key.to_owned();
        match e {
            store::Error::Unreachable { address, reason } => Self::Unreachable {
                key,
                address,
                reason,
            },
            store::Error::Refused { address, reason } => Self::Refused {
                key,
                address,
                reason,
            },
            store::Error::NotReplicated {
                address,
                have,
                want,
            } => Self::NotReplicated {
                key,
                address,
                have,
                want,
            },
            store::Error::Corrupt { address, reason } => Self::Corrupt {
                key,
                address,
                reason,
            },
        }
    }
}

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

/// What a store says to a try.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TryLockReply {
    Acquired(FencingToken),
    Held {
        owner: String,
        remaining: Duration,
    },
    /// This owner had it, and it is over.
    Stale,
}

/// What a store says to who claims to be the owner.
#[derive(Debug, Clone, PartialEq, Eq)]
enum OwnerReply {
    /// It was the owner: renewed, or given back.
    Done,
    /// It is not; the owner of now, if there is one.
    NotOwner(Option<String>),
}

impl From<Result<(), Option<String>>> for OwnerReply {
    fn from(answer: Result<(), Option<String>>) -> Self {
        answer.map_or_else(Self::NotOwner, |()| Self::Done)
    }
}

/// How a lock is given back: unless said otherwise at once, as one that is still held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ReleaseOptions {
    /// Nobody shall have it for so long yet.
    keep_for: Duration,
    /// It may have lapsed by the owner's own count, so the store is to look whether it has. Else it counts as given back
    /// by its owner, as long as nobody else has had it since. In a SQLite file it costs nothing to look each time.
    check_expiry: bool,
    /// The request for it got no answer and may still arrive: it shall find that its lock is over.
    /// (One thread writes to a SQLite file, in the order of what is asked.)
    unanswered: bool,
}

/// Is handed the answer to a request, on the client's thread.
type Then<T> = Box<dyn FnOnce(Result<T, Error>) + Send>;

/// One key is of one kind at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Reentrant,
}

/// Where locks are. Every method but `subscribe` and `unsubscribe` is one atomic step that waits at most `limit`, and may be
/// called again when its answer was lost.
#[async_trait]
trait Backend: Send + Sync {
    fn address(&self) -> &str;
    /// How long an answer may take in good order.
    fn patience(&self) -> Duration;
    /// `subscribed`: whoever asks is subscribed, so the release has to be published should somebody else have it.
    async fn try_lock(
        &self,
        key: &str,
        owner: &str,
        lease: Duration,
        subscribed: bool,
        limit: Duration,
    ) -> Result<TryLockReply, Error>;
    /// As `try_lock`, in no task of its own: `thread` asks, and hands the answer to `then`. Gives `then` back where that cannot be.
    fn begin_try_lock(
        &self,
        _thread: &Handle,
        (_key, _owner): (&Arc<str>, &Arc<str>),
        _lease: Duration,
        _subscribed: bool,
        then: Then<TryLockReply>,
    ) -> Result<(), Then<TryLockReply>> {
        Err(then)
    }
    async fn renew(
        &self,
        key: &str,
        owner: &str,
        kind: Kind,
        lease: Duration,
        limit: Duration,
    ) -> Result<OwnerReply, Error>;
    async fn release(
        &self,
        key: &str,
        owner: &str,
        options: ReleaseOptions,
        limit: Duration,
    ) -> Result<OwnerReply, Error>;
    /// As `begin_try_lock`.
    fn begin_release(
        &self,
        _thread: &Handle,
        (_key, _owner): (&Arc<str>, &Arc<str>),
        _options: ReleaseOptions,
        then: Then<OwnerReply>,
    ) -> Result<(), Then<OwnerReply>> {
        Err(then)
    }
    async fn holder(&self, key: &str, limit: Duration)
    -> Result<Option<(String, Duration)>, Error>;
    /// `who`: the owner, and the nonce of this step; `subscribed` as in `try_lock`.
    async fn enter(
        &self,
        key: &str,
        who: (&str, &str),
        lease: Duration,
        subscribed: bool,
        limit: Duration,
    ) -> Result<EnterReply, Error>;
    async fn leave(
        &self,
        key: &str,
        who: (&str, &str),
        which: LevelToLeave,
        limit: Duration,
    ) -> Result<LeaveReply, Error>;
    /// The present period of this length.
    async fn claim_period(
        &self,
        key: &str,
        owner: &str,
        length: Duration,
        limit: Duration,
    ) -> Result<PeriodReply, Error>;
    /// `at`: length, and begin in Unix ms.
    async fn release_period(
        &self,
        key: &str,
        owner: &str,
        at: (Duration, i64),
        limit: Duration,
    ) -> Result<(), Error>;
    /// Returns when every release of `key` from now on will wake its queue.
    async fn subscribe(&self, key: &str);
    /// Nobody waits for `key` any more.
    fn unsubscribe(&self, key: &str);
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

struct Core {
    backend: Box<dyn Backend>,
    retry: config::StoreRetry,
    /// Part of every owner that this client makes.
    id: String,
    owners: AtomicU64,
    queues: Arc<WaitQueues>,
    thread: ClientThread,
}

/// A grant that has just been made.
struct Granted {
    token: FencingToken,
    /// Before the request left that was answered with it.
    sent: Boottime,
}

/// As [`TryLockReply`], with what the caller needs to go on.
enum TryLockOutcome {
    /// Until somebody has the lock who will give it back, the token says that this is to be waited for.
    Acquired(Lock, TaskTrackerToken),
    Held {
        owner: String,
        remaining: Duration,
    },
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

impl Core {
    fn is_ours(&self, owner: &str) -> bool {
        wait_queue::made_by(&self.id, owner)
    }

    /// Repeats a request that got no answer: once at once, because a connection that was cut while nobody used it shows that only when
    /// it is used; then as often as `[store]` allows, and not for longer than `within` each.
    async fn with_retries<T, F: Future<Output = Result<T, Error>>>(
        &self,
        within: Duration,
        ask: impl Fn() -> F,
    ) -> Result<T, Error> {
        let begun = Boottime::now();
        let first = ask().await;
        self.retry(within, (begun, first), ask).await
    }

    fn is_final<T>(&self, answer: &Result<T, Error>) -> bool {
        !matches!(answer, Err(e) if e.is_transient()) || self.retry.attempts == 0
    }

    /// As [`Core::with_retries`], where the first answer is there, to what was asked when it says.
    async fn retry<T, F: Future<Output = Result<T, Error>>>(
        &self,
        within: Duration,
        (begun, first): (Boottime, Result<T, Error>),
        ask: impl Fn() -> F,
    ) -> Result<T, Error> {
        if self.is_final(&first) {
            return first;
        }
        let last = begun + within * (self.retry.attempts + 1);
        let mut tried = 0;
        // What took its time was no such connection.
        let mut next = match Boottime::now().since(begun) < within {
            true => ask().await,
            false => first,
        };
        loop {
            match next {
                Err(e)
                    if e.is_transient()
                        && tried < self.retry.attempts
                        && Boottime::now() < last =>
                {
                    self.thread
                        .sleep(self.retry.pause(tried + 1, fastrand::f64()))
                        .await;
                    tried += 1;
                    next = ask().await;
                }
                out => return out,
            }
        }
    }

    /// As [`Core::with_retries`] begins, for who has `within` for all of it. True: it was asked twice.
    async fn ask_twice<T, F: Future<Output = Result<T, Error>>>(
        &self,
        within: Duration,
        ask: impl Fn(Duration) -> F,
    ) -> (Result<T, Error>, bool) {
        let begun = Boottime::now();
        match ask(within).await {
            Err(e) if e.is_transient() => {
                let left = within.saturating_sub(Boottime::now().since(begun));
                if left.is_zero() {
                    return (Err(e), false);
                }
                (ask(left).await, true)
            }
            out => (out, false),
        }
    }

    /// Has the client's thread do some work, to its end whatever becomes of the caller.
    async fn run<T: Send + 'static>(
        &self,
        key: &str,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let done = self.thread.run(work).await;
        done.unwrap_or_else(|e| Err(self.no_thread(key, &e)))
    }

    fn no_thread(&self, key: &str, e: &io::Error) -> Error {
        Error::Unreachable {
            key: key.to_owned(),
            address: self.backend.address().to_owned(),
            reason: format!("the thread that asks it failed: {e}"),
        }
    }

    /// Part of owners, and the name of a step. Never the same twice.
    fn nonce(&self) -> String {
        let n = self.owners.fetch_add(1, Ordering::Relaxed);
        [&*self.id, ".", &n.to_string()].concat()
    }

    /// One try. Should the caller go away, it goes on to its answer, and what it acquired is given back after that: dropped with the lock.
    ///
    /// The caller only hands the request over. Everything else is done on the client's thread: a caller that is not polled holds up nobody.
    async fn try_lock(
        self: &Arc<Self>,
        key: &Arc<str>,
        owner: &Arc<str>,
        lease: config::Lease,
        subscribed: bool,
    ) -> Result<TryLockOutcome, Error> {
        let thread = self.thread.handle().map_err(|e| self.no_thread(key, &e))?;
        let sent = Boottime::now();
        let asking = TryLocking {
            core: self.clone(),
            key: key.clone(),
            owner: owner.clone(),
            lease,
            subscribed,
        };
        // Held until the outcome is taken, or was dropped and has begun to give something back: then this is idle no sooner.
        let token = self.thread.token();
        let (tell, told) = oneshot::channel();
        let then: Then<_> = Box::new(move |first| {
            let core = asking.core.clone();
            if core.is_final(&first) {
                let _ = tell.send(asking.outcome(sent, first, token));
            } else {
                core.thread.spawn(async move {
                    let _ = tell.send(asking.retry(sent, first, token).await);
                });
            }
        });
        let begun =
            self.backend
                .begin_try_lock(thread, (key, owner), lease.length, subscribed, then);
        if let Err(then) = begun {
            let (core, key, owner) = (self.clone(), key.clone(), owner.clone());
            self.thread.spawn(async move {
                let limit = core.backend.patience();
                let asked = core
                    .backend
                    .try_lock(&key, &owner, lease.length, subscribed, limit);
                then(asked.await);
            });
        }
        told.await
            .unwrap_or_else(|_| Err(self.no_thread(key, &io::Error::other("it has ended"))))
    }

    /// A grant as a lock, if anything of it can be trusted.
    fn acquired(
        self: &Arc<Self>,
        key: Arc<str>,
        owner: Arc<str>,
        lease: config::Lease,
        granted: Granted,
    ) -> Result<Lock, Error> {
        let now = Boottime::now();
        let held = HeldLease::new(lease, granted.sent);
        let late = held.step(now) == Step::StepDown;
        let hold = HeldLock::new(
            self.clone(),
            key.clone(),
            owner,
            lease,
            granted.token,
            granted.sent,
            held,
        );
        let lock = Lock::new(hold);
        if late {
            // Dropping it gives it back.
            drop(lock);
            return Err(Error::TooLate {
                key: key.to_string(),
                lease: lease.length,
                took: now.since(granted.sent),
            });
        }
        Ok(lock)
    }

    /// Gives back what an owner may hold, in the background; `over` is told how that ended.
    fn release(
        self: &Arc<Self>,
        key: &Arc<str>,
        owner: &Arc<str>,
        options: impl Fn() -> ReleaseOptions + Send + Sync + 'static,
        over: impl FnOnce(Result<OwnerReply, Error>) + Send + 'static,
    ) {
        let thread = match self.thread.handle() {
            Ok(thread) => thread,
            Err(e) => return over(Err(self.no_thread(key, &e))),
        };
        let (begun, token) = (Boottime::now(), self.thread.token());
        let first_options = options();
        let (core, of, by) = (self.clone(), key.clone(), owner.clone());
        let then: Then<_> = Box::new(move |first| {
            if core.is_final(&first) {
                core.queues.wake(&of);
                over(first);
                drop(token);
            } else {
                core.clone().thread.spawn(async move {
                    let limit = core.backend.patience();
                    let ask = || core.backend.release(&of, &by, options(), limit);
                    let answer = core.retry(limit, (begun, first), ask).await;
                    core.queues.wake(&of);
                    over(answer);
                    drop(token);
                });
            }
        });
        let begun = self
            .backend
            .begin_release(thread, (key, owner), first_options, then);
        if let Err(then) = begun {
            let (core, key, owner) = (self.clone(), key.clone(), owner.clone());
            self.thread.spawn(async move {
                let limit = core.backend.patience();
                let asked = core.backend.release(&key, &owner, first_options, limit);
                then(asked.await);
            });
        }
    }

    /// As [`Core::release`], where nobody waits for the end.
    fn release_in_background(
        self: &Arc<Self>,
        key: &Arc<str>,
        owner: &Arc<str>,
        options: impl Fn() -> ReleaseOptions + Send + Sync + 'static,
    ) {
        self.release(key, owner, options, |answer| {
            if let Err(e) = answer {
                tracing::debug!(error = %e, "a lock could not be given back; it lapses with its lease");
            }
        });
    }

    /// As [`Backend::subscribe`].
    async fn subscribe(self: &Arc<Self>, key: &Arc<str>) {
        let (core, asked) = (self.clone(), key.clone());
        let subscribing = async move {
            core.backend.subscribe(&asked).await;
            Ok(())
        };
        if self.run(key, subscribing).await.is_err() {
            std::future::pending().await
        }
    }
}

/// A try that is under way.
struct TryLocking {
    core: Arc<Core>,
    key: Arc<str>,
    owner: Arc<str>,
    lease: config::Lease,
    subscribed: bool,
}

impl TryLocking {
    /// A lost answer is asked for again with the same owner.
    async fn retry(
        self,
        sent: Boottime,
        first: Result<TryLockReply, Error>,
        open: TaskTrackerToken,
    ) -> Result<TryLockOutcome, Error> {
        let limit = self.core.backend.patience();
        let last_sent = AtomicU64::new(sent.0);
        let ask = || {
            last_sent.store(Boottime::now().0, Ordering::Relaxed);
            let lease = self.lease.length;
            self.core
                .backend
                .try_lock(&self.key, &self.owner, lease, self.subscribed, limit)
        };
        let answer = self.core.retry(limit, (sent, first), ask).await;
        self.outcome(Boottime(last_sent.into_inner()), answer, open)
    }

    /// What may have been acquired without our knowledge is given back.
    fn outcome(
        self,
        sent: Boottime,
        answer: Result<TryLockReply, Error>,
        open: TaskTrackerToken,
    ) -> Result<TryLockOutcome, Error> {
        let Self {
            core,
            key,
            owner,
            lease,
            ..
        } = self;
        match answer {
            Ok(TryLockReply::Acquired(token)) => core
                .acquired(key, owner, lease, Granted { token, sent })
                .map(|lock| TryLockOutcome::Acquired(lock, open)),
            Ok(TryLockReply::Held { owner, remaining }) => {
                Ok(TryLockOutcome::Held { owner, remaining })
            }
            // It was ours while the answers got lost, and lapsed: as late as an answer can come.
            Ok(TryLockReply::Stale) => Err(Error::TooLate {
                key: key.to_string(),
                lease: lease.length,
                took: lease.length,
            }),
            Err(e) => {
                // Without an answer something may be there that nobody knows of; and where replicas did not confirm.
                if e.is_transient() {
                    core.release_in_background(&key, &owner, || ReleaseOptions {
                        unanswered: true,
                        ..ReleaseOptions::default()
                    });
                }
                Err(e)
            }
        }
    }
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
