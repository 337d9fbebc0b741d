//! A lock that its owner can take again: each level is given back by itself, the last one frees it.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use super::{
    Attempt, Error, Kept, LockClient, RetryStrategy, checked, leased, name_of, retry::NoRetry,
};
use crate::{
    clock::Boottime,
    config,
    logic::trust::{HeldLease, Step},
    model::FencingToken,
};

/// A lock with levels, for code that calls itself, or its like in another process, under one lock.
///
/// It belongs to an *owner*, not to a value or a task: clones of this value have the same one, and
/// [`ReentrantLock::owned_by`] gives it a name that other processes can use too. Dropping it gives nothing back, because other levels
/// may be in use; what is not left lapses with the lease. A key is either reentrant or not: a [`Lock`](super::Lock) on it is refused
/// ([`Error::WrongType`]), and the other way round.
///
/// ```
/// # tokio_test(async {
/// use std::time::Duration;
/// use soloist::{LockClient, lock::{Enter, Leave, NoRetry}};
///
/// # let dir = tempfile::tempdir()?;
/// # let locks = LockClient::open(&format!("sqlite:{}", dir.path().join("locks.db").display()))?;
/// let account = locks.reentrant("account/42", Duration::from_secs(30))?;
/// assert!(matches!(account.enter(NoRetry).await?, Enter::Entered { levels: 1, .. }));
/// assert!(matches!(account.enter(NoRetry).await?, Enter::Entered { levels: 2, .. }));
/// assert_eq!(account.leave().await?, Leave::Still { levels: 1 });
/// assert_eq!(account.leave().await?, Leave::Freed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # });
/// # fn tokio_test(f: impl Future<Output = Result<(), Box<dyn std::error::Error>>>) {
/// #     tokio::runtime::Runtime::new().unwrap().block_on(f).unwrap();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ReentrantLock {
    client: LockClient,
    key: Arc<str>,
    owner: Arc<str>,
    lease: config::Lease,
    held: Arc<Mutex<Option<HeldLease>>>,
}

/// How an attempt to enter ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Enter {
    /// Ours, `levels` times by now. The token is that of the first level: it is one grant.
    Entered { levels: u32, token: FencingToken },
    /// Another owner has it; as in [`TryLock::Held`](super::TryLock::Held).
    Held { holder: String, remaining: Duration },
}

/// How giving back one level ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Leave {
    /// One level less; the lock is still ours.
    Still { levels: u32 },
    /// That was the last one: the lock is free.
    Freed,
    /// It belongs to another owner, who keeps it.
    Foreign { holder: String },
    /// Nobody has it: it lapsed, or was never entered.
    NotHeld,
}

impl LockClient {
    /// A reentrant lock on `key`, with an owner of its own; asks nothing yet.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidLease`].
    pub fn reentrant(&self, key: &str, lease: Duration) -> Result<ReentrantLock, Error> {
        let key = checked(key)?;
        Ok(ReentrantLock {
            lease: leased(&key, lease)?,
            client: self.clone(),
            owner: self.owner(),
            key,
            held: Arc::default(),
        })
    }
}

impl ReentrantLock {
    /// The same lock for an owner of this name: whoever uses the name is the same owner, in any process.
    pub fn owned_by(&self, owner: &str) -> Self {
        Self {
            owner: self.client.named(owner).name,
            held: Arc::default(),
            ..self.clone()
        }
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    fn held(&self) -> MutexGuard<'_, Option<HeldLease>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters: takes the lock, or one level more of it. The lease begins anew, unless more than that is left. While another owner has
    /// it, asks again as `retry` says.
    ///
    /// # Errors
    /// As those of [`LockClient::try_lock`]. After [`Error::Unreachable`] a level may have been taken; it lapses with the lease.
    pub async fn enter(&self, mut retry: impl RetryStrategy) -> Result<Enter, Error> {
        let begun = Boottime::now();
        let mut number = 0;
        let core = &self.client.core;
        let limit = core.backend.patience();
        loop {
            let nonce = self.client.owner();
            let sent = std::sync::atomic::AtomicU64::new(0);
            let entered = core
                .insist(limit, || {
                    sent.store(Boottime::now().0, Ordering::Relaxed);
                    let who = (&*self.owner, &*nonce);
                    let lease = self.lease.length;
                    core.backend.enter(&self.key, who, lease, false, limit)
                })
                .await?;
            let sent = Boottime(sent.into_inner());
            match entered {
                Entered::Taken(token, levels) => {
                    let now = Boottime::now();
                    let fresh = HeldLease::new(self.lease, sent);
                    if fresh.step(now) == Step::StepDown {
                        let _ = self.leave().await;
                        return Err(self.too_late(now.since(sent)));
                    }
                    *self.held() = Some(fresh);
                    return Ok(Enter::Entered { levels, token });
                }
                Entered::Held { owner, remaining } => {
                    number += 1;
                    let attempt = Attempt {
                        number,
                        elapsed: Boottime::now().since(begun),
                        remaining,
                    };
                    match retry.pause(&attempt) {
                        Some(pause) => tokio::time::sleep(pause).await,
                        None => {
                            return Ok(Enter::Held {
                                holder: name_of(&owner).to_owned(),
                                remaining,
                            });
                        }
                    }
                }
                Entered::Stale => return Err(self.too_late(self.lease.length)),
            }
        }
    }

    fn too_late(&self, took: Duration) -> Error {
        Error::TooLate {
            key: self.key.to_string(),
            lease: self.lease.length,
            took,
        }
    }

    /// Gives back one level. Asking again after a lost reply takes off no second one.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Refused`], [`Error::WrongType`].
    pub async fn leave(&self) -> Result<Leave, Error> {
        let core = &self.client.core;
        let limit = core.backend.patience();
        let nonce = self.client.owner();
        let asked = AtomicU32::new(0);
        let left = core
            .insist(limit, || {
                asked.fetch_add(1, Ordering::Relaxed);
                core.backend.leave(&self.key, (&self.owner, &nonce), limit)
            })
            .await?;
        core.rooms.ring(&self.key);
        Ok(match left {
            Left::Levels(0) => self.is_over(Leave::Freed),
            Left::Levels(levels) => Leave::Still { levels },
            // The first request freed it, and its answer got lost.
            Left::Not(_) if asked.into_inner() > 1 && self.is_held() => self.is_over(Leave::Freed),
            Left::Not(Some(owner)) => self.is_over(Leave::Foreign {
                holder: name_of(&owner).to_owned(),
            }),
            Left::Not(None) => self.is_over(Leave::NotHeld),
        })
    }

    fn is_over(&self, how: Leave) -> Leave {
        *self.held() = None;
        how
    }

    /// Prolongs the lock for all its levels: the lease begins anew, now.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: it is not this owner's. [`Error::Lost`]: it was not renewed while it could be trusted, and was not asked
    /// for. [`Error::Unreachable`] and others: not known.
    pub async fn renew(&self) -> Result<(), Error> {
        let core = &self.client.core;
        let sent = Boottime::now();
        let lost = || Error::Lost {
            key: self.key.to_string(),
        };
        if self.held().is_some() && !self.is_held() {
            return Err(lost());
        }
        let limit = core.backend.patience();
        let answer = core
            .backend
            .renew_all(&self.key, &self.owner, self.lease.length, limit);
        match answer.await? {
            Kept::Yes => {
                let mut held = self.held();
                let held = held.get_or_insert_with(|| HeldLease::new(self.lease, sent));
                held.renewed(sent, Boottime::now());
                match held.step(Boottime::now()) {
                    Step::StepDown => Err(lost()),
                    _ => Ok(()),
                }
            }
            Kept::No(owner) => {
                *self.held() = None;
                Err(Error::NotHeld {
                    key: self.key.to_string(),
                    holder: owner.map(|o| name_of(&o).to_owned()),
                })
            }
        }
    }

    /// True while the lock can be trusted, as far as this value and its clones have entered it. Asks nobody.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long the lock can be trusted unless it is renewed, on this host's CLOCK_BOOTTIME.
    pub fn remaining(&self) -> Duration {
        self.held()
            .as_ref()
            .map_or(Duration::ZERO, |h| h.trusted_until().since(Boottime::now()))
    }

    /// Enters if no other owner has it; asks once.
    ///
    /// # Errors
    /// As [`ReentrantLock::enter`].
    pub async fn try_enter(&self) -> Result<Enter, Error> {
        self.enter(NoRetry).await
    }
}

/// What a store says to who wants to enter.
pub(super) enum Entered {
    Taken(FencingToken, u32),
    Held { owner: String, remaining: Duration },
    Stale,
}

/// What a store says to who leaves.
pub(super) enum Left {
    Levels(u32),
    Not(Option<String>),
}
