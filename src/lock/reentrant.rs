//! A lock that its owner can acquire again: each level is given back by itself, the last one frees it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{
    Attempt, Error, IfDropped, Kind, LockClient, NoRetry, OwnerReply, RetryStrategy, WaitOutcome,
    WaiterTry, checked, leased, name_of,
};
use crate::{
    clock::Boottime,
    config,
    logic::trust::{HeldLease, Step},
    model::FencingToken,
};
use parking_lot::{Mutex, MutexGuard};

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
/// use soloist::{LockClient, lock::{Enter, Leave}};
///
/// # let dir = tempfile::tempdir()?;
/// # let locks = LockClient::open(&format!("sqlite:{}", dir.path().join("locks.db").display()))?;
/// let account = locks.reentrant("account/42", Duration::from_secs(30))?;
/// assert!(matches!(account.enter(Duration::ZERO).await?, Enter::Entered { levels: 1, .. }));
/// assert!(matches!(account.enter(Duration::ZERO).await?, Enter::Entered { levels: 2, .. }));
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
    known: Arc<Mutex<Known>>,
}

/// What this value and its clones know of the lock.
#[derive(Debug, Default)]
struct Known {
    /// While it is entered.
    held: Option<HeldLease>,
    /// Counts the times that it was entered from outside.
    entry: u64,
    /// The entry that is kept renewed.
    renewed: u64,
    /// The names of the levels that were entered here and not left; and of those that were being left when no answer came.
    levels: Vec<(Arc<str>, LevelToLeave)>,
}

/// How an attempt to enter ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Enter {
    /// Ours.
    Entered {
        /// So many times by now.
        levels: u32,
        /// That of the first level: it is one grant. See [`Lock::fencing_token`](super::Lock::fencing_token).
        token: FencingToken,
    },
    /// Another owner has it.
    Held {
        /// As in [`TryLock::Held`](super::TryLock::Held).
        holder: String,
        /// As in [`TryLock::Held`](super::TryLock::Held).
        remaining: Duration,
    },
}

/// How giving back one level ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Leave {
    /// One level less; the lock is still ours.
    Still {
        /// So many times yet.
        levels: u32,
    },
    /// That was the last one: the lock is free.
    Freed,
    /// It belongs to another owner, who keeps it.
    Foreign {
        /// The name in its owner.
        holder: String,
    },
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
            known: Arc::default(),
        })
    }
}

impl ReentrantLock {
    /// The same lock for an owner of this name: whoever uses the name is the same owner, in any process.
    pub fn owned_by(&self, owner: &str) -> Self {
        Self {
            owner: self.client.named(owner).name,
            known: Arc::default(),
            ..self.clone()
        }
    }

    /// As it was given to the client.
    pub fn key(&self) -> &str {
        &self.key
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }

    /// Enters if no other owner has it: acquires the lock, or one level more of it. The lease begins anew, unless more than that is
    /// left. While another owner has it, asks again as `retry` says.
    ///
    /// Dropping the future gives back the level that it may have entered.
    ///
    /// # Errors
    /// As those of [`LockClient::try_lock`]. After [`Error::Unreachable`] a level may have been entered; it is given back in the
    /// background, or lapses with the lease.
    pub async fn try_enter(&self, mut retry: impl RetryStrategy) -> Result<Enter, Error> {
        let begun = Boottime::now();
        let mut number = 0;
        let nonce = self.name_of_level();
        loop {
            match self.enter_once(&nonce, false).await? {
                WaiterTry::Acquired { lock, .. } => return Ok(lock),
                WaiterTry::Held { owner, remaining } => {
                    number += 1;
                    let attempt = Attempt {
                        number,
                        elapsed: Boottime::now().since(begun),
                        remaining,
                    };
                    match retry.pause(&attempt) {
                        Some(pause) => self.client.core.thread.sleep(pause).await,
                        None => {
                            return Ok(Enter::Held {
                                holder: name_of(&owner).to_owned(),
                                remaining,
                            });
                        }
                    }
                }
            }
        }
    }

    /// Enters as [`ReentrantLock::try_enter`] does; while another owner has it, waits for up to `wait`, and is woken when it is
    /// freed, as [`LockClient::lock`] is. Who has it enters at once; the others of this client take their turns.
    ///
    /// # Errors
    /// As those of [`LockClient::lock`].
    pub async fn enter(&self, wait: Duration) -> Result<Enter, Error> {
        let begun = Boottime::now();
        // Before all who wait: they may be waiting for us.
        match self.try_enter(NoRetry).await {
            Ok(Enter::Held { .. }) => {}
            // It may come while we wait.
            Err(e) if e.is_transient() && !wait.is_zero() => {}
            out => return out,
        }
        let wait = wait.saturating_sub(Boottime::now().since(begun));
        let waited = self.client.wait_for(
            &self.key,
            Some(&self.owner),
            wait,
            |subscribed| async move { self.enter_once(&self.name_of_level(), subscribed).await },
        );
        Ok(match waited.await? {
            WaitOutcome::Acquired(entered, ..) => entered,
            WaitOutcome::Held { holder, remaining } => Enter::Held { holder, remaining },
        })
    }

    fn name_of_level(&self) -> Arc<str> {
        self.client.core.nonce().into()
    }

    /// One try. Should the caller go away, it goes on to its answer, and a level that it entered is given back after that.
    async fn enter_once(
        &self,
        nonce: &Arc<str>,
        subscribed: bool,
    ) -> Result<WaiterTry<Enter>, Error> {
        let (this, nonce) = (self.clone(), nonce.clone());
        let entering = async move { this.enter_here(nonce, subscribed).await };
        let (tried, undo_if_dropped) = self.client.core.run(&self.key, entering).await?;
        // From here on it is the caller's.
        undo_if_dropped.disarm();
        Ok(tried)
    }

    /// A lost answer is asked for again with the same nonce.
    async fn enter_here(
        self,
        nonce: Arc<str>,
        subscribed: bool,
    ) -> Result<(WaiterTry<Enter>, IfDropped<impl FnOnce() + Send>), Error> {
        let core = &self.client.core;
        let limit = core.backend.patience();
        let sent = AtomicU64::new(0);
        let lease = self.lease.length;
        let entered = core
            .with_retries(limit, || {
                sent.store(Boottime::now().0, Ordering::Relaxed);
                let who = (&*self.owner, &*nonce);
                core.backend.enter(&self.key, who, lease, subscribed, limit)
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
                    lock: Enter::Entered { levels, token },
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

    /// Gives back in the background a level that nobody knows of.
    fn undo(&self, nonce: Arc<str>) {
        let this = self.clone();
        this.known().levels.retain(|(name, _)| *name != nonce);
        self.client.core.thread.spawn_tracked(async move {
            if let Err(e) = this.leave_by(&nonce, LevelToLeave::Unanswered).await {
                tracing::debug!(error = %e, "a level could not be given back; it lapses with the lease");
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

    /// Gives back one level. Asking again after a lost reply takes off no second one.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Refused`], [`Error::WrongType`].
    ///
    /// Dropping the future does not take it back: it goes on in the background.
    pub async fn leave(&self) -> Result<Leave, Error> {
        let this = self.clone();
        let newest = this.known().levels.pop();
        // Of an owner that others use too, it may be theirs.
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

    async fn leave_by(&self, nonce: &str, which: LevelToLeave) -> Result<Leave, Error> {
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
            LeaveReply::Levels(0) => self.is_over(Leave::Freed),
            LeaveReply::Levels(levels) => Leave::Still { levels },
            // The first request freed it, and its answer got lost.
            LeaveReply::NotOwner(_) if asked.into_inner() > 1 && self.is_held() => {
                self.is_over(Leave::Freed)
            }
            LeaveReply::NotOwner(Some(owner)) => self.is_over(Leave::Foreign {
                holder: name_of(&owner).to_owned(),
            }),
            LeaveReply::NotOwner(None) => self.is_over(Leave::NotHeld),
        })
    }

    fn is_over(&self, how: Leave) -> Leave {
        let mut known = self.known();
        known.held = None;
        known.levels.clear();
        how
    }

    /// Prolongs the lock for all its levels: the lease begins anew, now. A request without an answer is repeated as that of
    /// [`Lock::renew`](super::Lock::renew) is.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: it is not this owner's. [`Error::Lost`]: it was not renewed while it could be trusted, and was not asked
    /// for. [`Error::Unreachable`] and others: not known.
    pub async fn renew(&self) -> Result<(), Error> {
        let this = self.clone();
        let renewing = async move { this.renew_with_retries().await };
        self.client.core.run(&self.key, renewing).await
    }

    /// Half of what is left of trust; None: what is left is not known here.
    fn half_of_trust(&self) -> Option<Duration> {
        let trusted = self.known().held.as_ref()?.trusted_until();
        Some((trusted.since(Boottime::now()) / 2).max(Duration::from_millis(1)))
    }

    async fn renew_with_retries(&self) -> Result<(), Error> {
        let core = &self.client.core;
        let mut tried = 0;
        loop {
            let half = self.half_of_trust().unwrap_or(Duration::MAX);
            match self.renew_within(core.backend.patience().min(half)).await {
                Err(e) if e.is_transient() && tried < core.retry.attempts => {
                    // At once after a connection that was found cut, as in [`Core::with_retries`].
                    if tried > 0 {
                        let half = self.half_of_trust().unwrap_or(Duration::MAX);
                        let pause = core.retry.pause(tried + 1, fastrand::f64());
                        core.thread.sleep(pause.min(half)).await;
                    }
                    tried += 1;
                }
                out => return out,
            }
        }
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

    /// Keeps all levels renewed in the background, as [`Lock::keep_renewed`](super::Lock::keep_renewed) does, until the last one
    /// is given back, the lock is lost, or this value and its clones are dropped. Returns at once; a second call does
    /// nothing, and neither does one while it is not entered: call it after [`ReentrantLock::enter`], each time.
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
        // What it knows is borrowed from us, so that the renewal ends when the last of us does.
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
                let (step, trusted) = {
                    let known = lock.known();
                    let Some(held) = known.held.as_ref().filter(|_| known.entry == entry) else {
                        return;
                    };
                    (held.step(Boottime::now()), held.trusted_until())
                };
                match step {
                    Step::StepDown => return,
                    Step::WaitUntil(at) => {
                        let core = lock.client.core.clone();
                        // Not the last of us.
                        drop(lock);
                        let at = at.min(Boottime::now() + Duration::from_secs(1));
                        core.thread.sleep_until(at).await;
                    }
                    Step::Renew => {
                        // As of a `Lock`.
                        let limit = trusted.since(Boottime::now()) / 2;
                        let limit = limit.max(Duration::from_millis(1));
                        let limit = limit.min(lock.client.core.backend.patience());
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

    /// True while the lock can be trusted, as far as this value and its clones have entered it. Asks nobody.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long the lock can be trusted unless it is renewed, on this host's CLOCK_BOOTTIME.
    pub fn remaining(&self) -> Duration {
        self.known()
            .held
            .as_ref()
            .map_or(Duration::ZERO, |h| h.trusted_until().since(Boottime::now()))
    }
}

/// What a store says to who wants to enter.
pub(super) enum EnterReply {
    Acquired(FencingToken, u32),
    Held { owner: String, remaining: Duration },
    Stale,
}

/// Which level is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LevelToLeave {
    /// The one of this name.
    Named,
    /// The newest one; the name is that of the step.
    Newest,
    /// The one of this name, if it was ever entered: the request for it got no answer, may still arrive, and shall find that
    /// it is over.
    Unanswered,
}

/// What a store says to who leaves.
pub(super) enum LeaveReply {
    /// So many are left.
    Levels(u32),
    /// It is not the owner's; the owner of now, if there is one.
    NotOwner(Option<String>),
}
