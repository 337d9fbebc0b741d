//! A lock that its owner can acquire again. Each level is released on its own; releasing the last level releases the
//! lock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{
    Attempts, Error, IfDropped, Kind, LockClient, NoRetry, OwnerReply, RetryStrategy, WaitOutcome,
    WaiterTry, checked, leased, name_of,
};
use crate::{
    clock::Boottime,
    config,
    logic::trust::{HeldLease, Step},
    model::FencingToken,
};
use parking_lot::{Mutex, MutexGuard};

/// A lock with levels, for code that calls itself (in this process or in another one) while it holds the lock.
///
/// The lock belongs to an *owner*, not to a value or a task. Clones of this value have the same owner, and
/// [`ReentrantLock::owned_by`] names an owner that other processes can use too. Dropping the value releases nothing,
/// because other levels may be in use; levels that nobody leaves lapse with the lease. A key is either reentrant or
/// not: a [`Lock`](super::Lock) on the key of a reentrant lock is refused ([`Error::WrongType`]), and the other way
/// round.
///
/// ```
/// # tokio_test(async {
/// use std::time::Duration;
/// use soloist::{LockClient, lock::{ReleasedLevel, TryEnter}};
///
/// # let dir = tempfile::tempdir()?;
/// # let locks = LockClient::open(&format!("sqlite:{}", dir.path().join("locks.db").display()))?;
/// let account = locks.reentrant("account/42", Duration::from_secs(30))?;
/// assert!(matches!(account.enter(Duration::ZERO).await?, TryEnter::Acquired { levels: 1, .. }));
/// assert!(matches!(account.enter(Duration::ZERO).await?, TryEnter::Acquired { levels: 2, .. }));
/// assert_eq!(account.leave().await?, ReleasedLevel::StillHeld { levels: 1 });
/// assert_eq!(account.leave().await?, ReleasedLevel::Released);
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
    known: Arc<Mutex<Known>>,
}

/// What this value and its clones know about the lock.
#[derive(Debug, Default)]
struct Known {
    /// None unless the lock is entered.
    held: Option<HeldLease>,
    /// How often the lock was entered from outside.
    entry: u64,
    /// The value of `entry` that is kept renewed.
    renewed: u64,
    /// The names of the levels that were entered here and not left. Also those whose leave request got no answer.
    levels: Vec<(Arc<str>, LevelToLeave)>,
}

/// How an attempt to enter ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum TryEnter {
    /// The owner has acquired the level.
    Acquired {
        /// The number of levels, with this one.
        levels: u32,
        /// The token of the first level, because all levels are one grant. See
        /// [`Lock::fencing_token`](super::Lock::fencing_token).
        token: FencingToken,
    },
    /// Another owner holds it.
    Held {
        /// As in [`TryLock::Held`](super::TryLock::Held).
        holder: String,
        /// As in [`TryLock::Held`](super::TryLock::Held).
        remaining: Duration,
    },
}

/// How the release of one level ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum ReleasedLevel {
    /// One level less; the owner still holds the lock.
    StillHeld {
        /// The number of levels that are left.
        levels: u32,
    },
    /// That was the last level: the lock is free.
    Released,
    /// Another owner holds the lock, and keeps it.
    Foreign {
        /// The name in that owner.
        holder: String,
    },
    /// Nobody holds the lock: it lapsed, or was never entered.
    NotHeld,
}

impl LockClient {
    /// Makes a reentrant lock on `key` with an owner of its own; sends nothing.
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
            known: Arc::default(),
        })
    }
}

impl ReentrantLock {
    /// The same lock for the owner of this name. Everybody who uses the name is the same owner, in any process.
    pub fn owned_by(&self, owner: &str) -> Self {
        Self {
            owner: self.client.named(owner).name,
            known: Arc::default(),
            ..self.clone()
        }
    }

    /// The key, as it was given to the client.
    pub fn key(&self) -> &str {
        &self.key
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }

    /// Enters the lock if no other owner holds it: acquires it, or one more level of it. The lease starts again, unless
    /// more than that is left. While another owner holds it, asks again as often as `retry` says.
    ///
    /// # Errors
    /// As [`LockClient::try_lock`]. After [`Error::Unreachable`] a level may have been acquired; the client releases it
    /// in the background, or it lapses with the lease.
    ///
    /// # Cancel safety
    /// If the future is dropped, the request that it has sent continues to its answer on the client's thread. A level
    /// that was acquired is then released.
    pub async fn try_enter(&self, mut retry: impl RetryStrategy) -> Result<TryEnter, Error> {
        let mut attempts = Attempts::begin();
        let nonce = self.name_of_level();
        loop {
            match self.enter_once(&nonce).await? {
                WaiterTry::Acquired { lock, .. } => return Ok(lock),
                WaiterTry::Held { owner, remaining } => {
                    match retry.pause(&attempts.held_for(remaining)) {
                        Some(pause) => self.client.core.thread.sleep(pause).await,
                        None => {
                            return Ok(TryEnter::Held {
                                holder: name_of(&owner).to_owned(),
                                remaining,
                            });
                        }
                    }
                }
            }
        }
    }

    /// Enters the lock as [`ReentrantLock::try_enter`] does. While another owner holds it, waits for up to `wait`; when
    /// the lock becomes free, the waiter is woken as in [`LockClient::lock`]. The owner that holds the lock enters at
    /// once; other callers of this client take turns.
    ///
    /// # Errors
    /// As [`LockClient::lock`].
    ///
    /// # Cancel safety
    /// As [`ReentrantLock::try_enter`]; the caller also leaves the queue.
    pub async fn enter(&self, wait: Duration) -> Result<TryEnter, Error> {
        let begun = Boottime::now();
        // Before all waiters: they may be waiting for this owner.
        match self.try_enter(NoRetry).await {
            Ok(TryEnter::Held { .. }) => {}
            // The store may come back while the caller waits.
            Err(e) if e.is_transient() && !wait.is_zero() => {}
            out => return out,
        }
        let wait = wait.saturating_sub(Boottime::now().since(begun));
        let (this, core) = (self.clone(), &self.client.core);
        // On the client's thread, as a lock is waited for: a caller that is not polled keeps no turn there.
        let waiting = async move { this.wait_here(wait).await };
        let waited = core.thread.run_until_dropped(waiting).await;
        match waited.unwrap_or_else(|e| Err(core.no_thread(&self.key, &e)))? {
            WaitOutcome::Acquired((entered, undo_if_dropped), ()) => {
                undo_if_dropped.disarm();
                Ok(entered)
            }
            WaitOutcome::Held { holder, remaining } => Ok(TryEnter::Held { holder, remaining }),
        }
    }

    async fn wait_here(
        self,
        wait: Duration,
    ) -> Result<WaitOutcome<(TryEnter, IfDropped<impl FnOnce() + Send>), ()>, Error> {
        let this = &self;
        let ask = || async move {
            let nonce = this.name_of_level();
            let (tried, undo_if_dropped) = this.enter_or_undo(&nonce).await?;
            Ok(match tried {
                WaiterTry::Acquired { lock, owner, lease } => WaiterTry::Acquired {
                    lock: (lock, undo_if_dropped),
                    owner,
                    lease,
                },
                WaiterTry::Held { owner, remaining } => WaiterTry::Held { owner, remaining },
            })
        };
        let (client, me) = (&self.client, Some(&*self.owner));
        Ok(match client.wait_for(&self.key, me, wait, ask).await? {
            WaitOutcome::Acquired(entered, _turn) => WaitOutcome::Acquired(entered, ()),
            WaitOutcome::Held { holder, remaining } => WaitOutcome::Held { holder, remaining },
        })
    }

    fn name_of_level(&self) -> Arc<str> {
        self.client.core.nonce().into()
    }

    /// One attempt. If the caller is gone when the answer comes, a level that was acquired is released.
    async fn enter_once(&self, nonce: &Arc<str>) -> Result<WaiterTry<TryEnter>, Error> {
        let (tried, undo_if_dropped) = self.enter_or_undo(nonce).await?;
        // From here on the caller has the level.
        undo_if_dropped.disarm();
        Ok(tried)
    }

    /// The level is released when the returned [`IfDropped`] is dropped without being disarmed.
    async fn enter_or_undo(
        &self,
        nonce: &Arc<str>,
    ) -> Result<(WaiterTry<TryEnter>, IfDropped<impl FnOnce() + Send + use<>>), Error> {
        let (this, nonce) = (self.clone(), nonce.clone());
        let entering = async move { this.enter_here(nonce).await };
        self.client.core.run(&self.key, entering).await
    }

    /// If an answer is lost, asks again with the same nonce.
    async fn enter_here(
        self,
        nonce: Arc<str>,
    ) -> Result<(WaiterTry<TryEnter>, IfDropped<impl FnOnce() + Send>), Error> {
        let core = &self.client.core;
        let limit = core.backend.patience();
        let sent = AtomicU64::new(0);
        let lease = self.lease.length;
        let entered = core
            .with_retries(limit, || {
                sent.store(Boottime::now().0, Ordering::Relaxed);
                let who = (&*self.owner, &*nonce);
                core.backend.enter(&self.key, who, lease, limit)
            })
            .await;
        let sent = Boottime(sent.into_inner());
        let tried = match entered {
            Ok(EnterReply::Acquired(token, levels)) => {
                let now = Boottime::now();
                let fresh = HeldLease::new(self.lease, sent);
                if fresh.step(now) == Step::StepDown {
                    self.undo(nonce);
                    return Err(self.too_late(now.since(sent)));
                }
                let mut known = self.known();
                if levels == 1 || known.held.is_none() {
                    known.entry += 1;
                    known.levels.clear();
                }
                known.held = Some(fresh);
                known.levels.push((nonce.clone(), LevelToLeave::Named));
                WaiterTry::Acquired {
                    lock: TryEnter::Acquired { levels, token },
                    owner: self.owner.clone(),
                    lease,
                }
            }
            Ok(EnterReply::Held { owner, remaining }) => WaiterTry::Held { owner, remaining },
            Ok(EnterReply::Stale) => return Err(self.too_late(lease)),
            Err(e) => {
                if e.is_transient() {
                    self.undo(nonce);
                }
                return Err(e);
            }
        };
        let acquired = matches!(tried, WaiterTry::Acquired { .. });
        let undo_if_dropped = IfDropped::new(move || {
            if acquired {
                self.undo(nonce);
            }
        });
        Ok((tried, undo_if_dropped))
    }

    /// Releases in the background a level that no caller knows of.
    fn undo(&self, nonce: Arc<str>) {
        let this = self.clone();
        this.known().levels.retain(|(name, _)| *name != nonce);
        self.client.core.thread.spawn_tracked(async move {
            if let Err(e) = this.leave_by(&nonce, LevelToLeave::Unanswered).await {
                tracing::debug!(error = %e, "a level could not be released; it lapses with the lease");
            }
        });
    }

    fn too_late(&self, took: Duration) -> Error {
        Error::TooLate {
            key: self.key.to_string(),
            lease: self.lease.length,
            took,
        }
    }

    /// Releases one level. If a reply is lost, the client asks again, which releases no second level.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Refused`], [`Error::WrongType`].
    ///
    /// # Cancel safety
    /// Dropping the future does not cancel the request: it continues in the background. (A future that was never polled
    /// releases nothing.)
    pub async fn leave(&self) -> Result<ReleasedLevel, Error> {
        let this = self.clone();
        let newest = this.known().levels.pop();
        // If other values use the owner too, the newest level may be theirs.
        let (nonce, which) = newest.unwrap_or_else(|| (self.name_of_level(), LevelToLeave::Newest));
        let leaving = async move {
            let left = this.leave_by(&nonce, which).await;
            if matches!(&left, Err(e) if e.is_transient()) {
                this.known().levels.push((nonce, which));
            }
            left
        };
        self.client.core.run(&self.key, leaving).await
    }

    async fn leave_by(&self, nonce: &str, which: LevelToLeave) -> Result<ReleasedLevel, Error> {
        let core = &self.client.core;
        let limit = core.backend.patience();
        let asked = AtomicU32::new(0);
        let left = core
            .with_retries(limit, || {
                asked.fetch_add(1, Ordering::Relaxed);
                let who = (&*self.owner, nonce);
                core.backend.leave(&self.key, who, which, limit)
            })
            .await?;
        if !matches!(left, LeaveReply::Levels(1..)) {
            core.queues.wake(&self.key);
        }
        Ok(match left {
            LeaveReply::Levels(0) => self.is_over(ReleasedLevel::Released),
            LeaveReply::Levels(levels) => ReleasedLevel::StillHeld { levels },
            // The first request released the lock, and its answer was lost.
            LeaveReply::NotOwner(_) if asked.into_inner() > 1 && self.is_held() => {
                self.is_over(ReleasedLevel::Released)
            }
            LeaveReply::NotOwner(Some(owner)) => self.is_over(ReleasedLevel::Foreign {
                holder: name_of(&owner).to_owned(),
            }),
            LeaveReply::NotOwner(None) => self.is_over(ReleasedLevel::NotHeld),
        })
    }

    fn is_over(&self, how: ReleasedLevel) -> ReleasedLevel {
        let mut known = self.known();
        known.held = None;
        known.levels.clear();
        how
    }

    /// Renews the lock for all its levels: the lease starts again, now. If the store does not answer, the client
    /// repeats the request as in [`Lock::renew`](super::Lock::renew).
    ///
    /// # Errors
    /// [`Error::NotHeld`]: this owner does not hold the lock. [`Error::Lost`]: it was not renewed while it could be
    /// trusted. [`Error::Unreachable`] and others: unknown whether the store renewed it.
    ///
    /// # Cancel safety
    /// If the future is dropped, the renewal continues on the client's thread, and counts if it succeeds.
    pub async fn renew(&self) -> Result<(), Error> {
        let this = self.clone();
        let renewing = async move {
            // Unknown if the lock was entered elsewhere.
            let half_left = || match &this.known().held {
                Some(held) => held.half_left(Boottime::now()),
                None => Duration::MAX,
            };
            let core = &this.client.core;
            core.renew_with_retries(half_left, |limit| this.renew_within(limit))
                .await
        };
        self.client.core.run(&self.key, renewing).await
    }

    async fn renew_within(&self, limit: Duration) -> Result<(), Error> {
        let core = &self.client.core;
        let sent = Boottime::now();
        let lost = || Error::Lost {
            key: self.key.to_string(),
        };
        if self.known().held.is_some() && !self.is_held() {
            return Err(lost());
        }
        let (kind, lease) = (Kind::Reentrant, self.lease.length);
        let answer = core
            .backend
            .renew(&self.key, &self.owner, kind, lease, limit);
        match answer.await? {
            OwnerReply::Done => {
                let mut known = self.known();
                known.entry += u64::from(known.held.is_none());
                let held = known
                    .held
                    .get_or_insert_with(|| HeldLease::new(self.lease, sent));
                held.renewed(sent, Boottime::now());
                match held.step(Boottime::now()) {
                    Step::StepDown => Err(lost()),
                    _ => Ok(()),
                }
            }
            OwnerReply::NotOwner(owner) => {
                self.known().held = None;
                Err(Error::NotHeld {
                    key: self.key.to_string(),
                    holder: owner.map(|o| name_of(&o).to_owned()),
                })
            }
        }
    }

    /// Keeps all levels renewed in the background, as [`Lock::keep_renewed`](super::Lock::keep_renewed) does, until the
    /// last level is released, the lock is lost, or this value and its clones are dropped. Returns at once. A second
    /// call does nothing, and neither does a call while the lock is not entered: call it after each
    /// [`ReentrantLock::enter`] that enters from outside.
    pub fn keep_renewed(&self) {
        let entry = {
            let mut known = self.known();
            if known.held.is_none() || known.renewed == known.entry {
                return;
            }
            known.renewed = known.entry;
            known.entry
        };
        let weak = Arc::downgrade(&self.known);
        // The renewal borrows what the clones know, so that it ends when the last of them is dropped.
        let lock = Self {
            known: Arc::default(),
            ..self.clone()
        };
        self.client.core.thread.spawn(async move {
            while let Some(known) = weak.upgrade() {
                let lock = Self {
                    known,
                    ..lock.clone()
                };
                let (step, half_left) = {
                    let known = lock.known();
                    let Some(held) = known.held.as_ref().filter(|_| known.entry == entry) else {
                        return;
                    };
                    let now = Boottime::now();
                    (held.step(now), held.half_left(now))
                };
                match step {
                    Step::StepDown => return,
                    Step::WaitUntil(at) => {
                        let core = lock.client.core.clone();
                        // While it sleeps, this task must not be what keeps `known` alive.
                        drop(lock);
                        let left = at.since(Boottime::now());
                        core.thread.sleep(left.min(Duration::from_secs(1))).await;
                    }
                    Step::Renew => {
                        // As with a `Lock`.
                        let limit = lock.client.core.backend.patience().min(half_left);
                        if let Err(e) = lock.renew_within(limit).await {
                            tracing::debug!(key = &*lock.key, error = %e, "renewal failed");
                            if let Some(held) = &mut lock.known().held {
                                held.failed(Boottime::now());
                            }
                        }
                    }
                }
            }
        });
    }

    /// True while the lock can be trusted, as far as this value and its clones have entered it. Sends nothing.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long the lock can be trusted unless it is renewed, on this host's CLOCK_BOOTTIME; zero when it cannot.
    pub fn remaining(&self) -> Duration {
        self.known()
            .held
            .as_ref()
            .map_or(Duration::ZERO, |h| h.trusted_until().since(Boottime::now()))
    }
}

/// A store's answer to an attempt to enter.
pub(super) enum EnterReply {
    Acquired(FencingToken, u32),
    Held { owner: String, remaining: Duration },
    Stale,
}

/// Which level to release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LevelToLeave {
    /// The level of this name.
    Named,
    /// The newest level; the name is that of this request.
    Newest,
    /// The level of this name, if it was ever entered: the request for it got no answer, and may still arrive. Then it
    /// must find that the level is over.
    Unanswered,
}

/// A store's answer to a request to leave.
pub(super) enum LeaveReply {
    /// The number of levels that are left.
    Levels(u32),
    /// The owner does not hold it; with the owner that does, if there is one.
    NotOwner(Option<String>),
}
