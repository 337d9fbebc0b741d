//! A lock that was acquired: how far it can be trusted, its renewal, its end.

use std::{
    future::Future,
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedMutexGuard, oneshot, watch};

use super::{Core, Error, Kind, OwnerReply, ReleaseOptions, name_of, wait_queue::Waiter};
use crate::{
    clock::Boottime,
    config,
    logic::trust::{HeldLease, Step},
    model::FencingToken,
};

/// A lock that is ours until it is given back, lost, or dropped (which gives it back in the background).
///
/// We trust it for less than its lease, counted from before the request left, on CLOCK_BOOTTIME: of a lease of 15 s the first
/// 12.7 s. The rest is the margin in which what the holder did last can arrive, and in which clocks may differ.
///
/// A program that ends right after it dropped a lock has no background any more: await [`Lock::release`] before.
#[derive(Debug)]
#[must_use = "a lock that is dropped is given back at once"]
pub struct Lock {
    hold: Arc<HeldLock>,
}

/// How a release ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The lock was ours until now.
    Now,
    /// It had been given back before; nothing was sent, or an earlier request had done it.
    Before,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Held,
    /// Not trusted any more; the store may still have it in our name.
    Lost,
    /// It is given back: not to be trusted any more, though it was until then.
    Releasing,
    /// Given back, or dropped and about to be.
    Released,
    /// The store says that it is not ours.
    Gone,
}

#[derive(Debug)]
struct State {
    held: HeldLease,
    phase: Phase,
    at_least_until: Boottime,
    /// Requests to give it back that have left.
    releases_sent: u32,
}

pub(super) struct HeldLock {
    core: Arc<Core>,
    key: Arc<str>,
    owner: Arc<str>,
    lease: config::Lease,
    token: FencingToken,
    /// Before the request left.
    granted: Boottime,
    state: Mutex<State>,
    /// Tells of each change. Made when somebody follows the state: most locks are acquired and given back unwatched.
    changes: OnceLock<watch::Sender<()>>,
    renewing: AtomicBool,
}

impl std::fmt::Debug for HeldLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldLock")
            .field("key", &self.key)
            .field("owner", &self.owner)
            .field("token", &self.token)
            .field("state", &*self.state())
            .finish_non_exhaustive()
    }
}

impl Lock {
    pub(super) fn new(hold: HeldLock) -> Self {
        Self {
            hold: Arc::new(hold),
        }
    }

    /// As it was given to the client.
    pub fn key(&self) -> &str {
        &self.hold.key
    }

    /// Unique for this grant; begins with the name of the client.
    pub fn owner(&self) -> &str {
        &self.hold.owner
    }

    /// A number that grows with every grant of this key; for resources that refuse a smaller one than they have seen.
    ///
    /// It is the store's clock in µs or the last token plus one, whichever is greater. So it grows as long as the store remembers
    /// the last token (until a week after the lease, and as long as it loses no data), *or* its clock was not stepped back past
    /// the last grant. Only both together break it.
    pub fn fencing_token(&self) -> FencingToken {
        self.hold.token
    }

    /// True while the lock can be trusted: not lost, and no request to give it back has left. Asks nobody.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long the lock can be trusted unless it is renewed; zero when it cannot. On this host's CLOCK_BOOTTIME.
    pub fn remaining(&self) -> Duration {
        let state = self.hold.state();
        if state.phase != Phase::Held {
            return Duration::ZERO;
        }
        state.held.trusted_until().since(Boottime::now())
    }

    /// Until when the lock can be trusted, and from then on whenever that changes: later with each renewal, zero when
    /// it is lost or given back. For who has to hand the deadline on, to a child process for instance.
    pub fn deadlines(&self) -> Deadlines {
        Deadlines {
            changes: self.hold.follow(),
            hold: Arc::downgrade(&self.hold),
        }
    }

    /// Prolongs the lock: its lease begins anew, now. A request without an answer is repeated as `retry` of `[store]` says, as far as
    /// the time for which the lock can be trusted allows.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: the store says that it is not ours; nothing was changed, and it counts as lost.
    /// [`Error::Lost`]: it was lost before, nothing was asked. [`Error::Unreachable`] and others: not known; what was trusted
    /// before is trusted still.
    pub async fn renew(&self) -> Result<(), Error> {
        let hold = self.hold.clone();
        let renewing = async move { hold.renew_with_retries().await };
        self.hold.core.run(self.key(), renewing).await
    }

    /// Keeps the lock renewed in the background until it is given back, dropped or lost. Renews after each fifth of the
    /// lease; after an error, whichever it is, it tries again soon, until trust ends. Returns at once; a second call does nothing.
    ///
    /// The client's own thread does it, over a connection of its own: the caller may block its thread, and its runtime may end.
    ///
    /// A lock that is kept renewed lives as long as this process, however long it hangs in a loop: see [`Lock::keep_renewed_at_most`].
    pub fn keep_renewed(&self) {
        self.keep(None);
    }

    /// As [`Lock::keep_renewed`], at most `max_renewals` times: after that the lock lapses with its lease, and is lost. With a lease
    /// L and a store that answers that is (`max_renewals` / 5 + 1) × L after the grant; where renewals have to be tried again it is
    /// later, but never after (`max_renewals` + 1) × L.
    pub fn keep_renewed_at_most(&self, max_renewals: u32) {
        self.keep(Some(max_renewals));
    }

    fn keep(&self, limit: Option<u32>) {
        if !self.hold.renewing.swap(true, Ordering::SeqCst) {
            let hold = self.hold.clone();
            self.hold.core.thread.spawn(hold.keep_renewed(limit));
        }
    }

    /// Gives the lock back, and wakes who waits for it. From the moment this is called the lock is not trusted any more.
    ///
    /// Only what is ours is given back. Again after that it is [`Released::Before`], also when the first answer got lost.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: it was not ours any more, and who has it keeps it. (A lapse that only the store has seen, because its
    /// clock was stepped, is not told if nobody has had the lock since.) [`Error::Unreachable`] after the retries
    /// of `[store]`: it lapses with its lease at the latest; may be called again, and dropping the lock tries once more.
    ///
    /// Dropping the future does not take the release back: it goes on in the background.
    pub async fn release(&self) -> Result<Released, Error> {
        self.hold.stop_trusting();
        self.hold.clone().release().await
    }

    /// The lock stays held for at least `time` from its grant, even if it is given back sooner: for work that is over
    /// in no time and must not be done again by a host whose clock is behind. The last call counts; 366 days are the most.
    ///
    /// The rest of the time goes to the store with the release and is counted by its wall clock. If the holder dies, the
    /// lease alone counts.
    pub fn lock_at_least_for(&self, time: Duration) {
        let time = time.min(config::Lease::LONGEST_LOCK);
        self.hold.state().at_least_until = self.hold.granted + time;
    }

    /// Ends when the lock is lost: at the end of trust at the latest, at once when the store says that it is not ours. Never
    /// ends if the lock is given back first.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        let hold = self.hold.clone();
        async move {
            if hold.over().await != Phase::Lost {
                std::future::pending::<()>().await;
            }
        }
    }

    /// The store said that it is another's, or nobody's.
    #[cfg(feature = "daemon")]
    pub(crate) fn was_taken_away(&self) -> bool {
        self.hold.phase() == Phase::Gone
    }

    /// Keeps the local turn until this lock is over.
    pub(super) fn keep_turn(&self, turn: OwnedMutexGuard<()>, waiter: Waiter) {
        let hold = self.hold.clone();
        self.hold.core.thread.spawn(async move {
            hold.over().await;
            drop(turn);
            drop(waiter);
        });
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let left = self.hold.change(|s| {
            let left = matches!(s.phase, Phase::Held | Phase::Lost | Phase::Releasing);
            if left {
                s.phase = Phase::Released;
            }
            left
        });
        if left {
            let hold = &self.hold;
            let keep_until = hold.state().at_least_until;
            hold.core
                .release_in_background(&hold.key, &hold.owner, move || ReleaseOptions {
                    keep_for: keep_until.since(Boottime::now()),
                    ..ReleaseOptions::default()
                });
        }
    }
}

/// Follows how long a lock can be trusted; see [`Lock::deadlines`].
#[derive(Debug, Clone)]
pub struct Deadlines {
    changes: watch::Receiver<()>,
    hold: Weak<HeldLock>,
}

impl Deadlines {
    /// The end of trust; `Boottime(0)` when the lock is lost or given back.
    pub fn now(&mut self) -> Boottime {
        self.changes.mark_unchanged();
        let Some(hold) = self.hold.upgrade() else {
            return Boottime(0);
        };
        let state = hold.state();
        match state.phase {
            Phase::Held => state.held.trusted_until(),
            _ => Boottime(0),
        }
    }

    /// Waits until there is another deadline than [`Deadlines::now`] gave last, and gives it. When the lock is over,
    /// `Boottime(0)`.
    pub async fn next(&mut self) -> Boottime {
        if self.changes.changed().await.is_err() {
            return Boottime(0);
        }
        self.now()
    }
}

impl HeldLock {
    pub(super) fn new(
        core: Arc<Core>,
        key: Arc<str>,
        owner: Arc<str>,
        lease: config::Lease,
        token: FencingToken,
        granted: Boottime,
        held: HeldLease,
    ) -> Self {
        Self {
            core,
            key,
            owner,
            lease,
            token,
            granted,
            state: Mutex::new(State {
                held,
                phase: Phase::Held,
                at_least_until: Boottime(0),
                releases_sent: 0,
            }),
            changes: OnceLock::new(),
            renewing: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Changes the state, and tells whoever follows it if `f` says so.
    fn change(&self, f: impl FnOnce(&mut State) -> bool) -> bool {
        let changed = f(&mut self.state());
        if changed && let Some(changes) = self.changes.get() {
            changes.send_replace(());
        }
        changed
    }

    /// Hears of every change after this call.
    fn follow(&self) -> watch::Receiver<()> {
        self.changes
            .get_or_init(|| watch::Sender::new(()))
            .subscribe()
    }

    fn phase(&self) -> Phase {
        self.state().phase
    }

    /// From `Held` only: what was given back is not lost.
    fn end(&self, phase: Phase) {
        self.change(|s| {
            let first = s.phase == Phase::Held;
            if first {
                s.phase = phase;
            }
            first
        });
    }

    /// Waits for the end of the lock, one way or the other: `Lost` or `Released`.
    async fn over(&self) -> Phase {
        let mut changes = self.follow();
        loop {
            changes.mark_unchanged();
            let (phase, trusted) = {
                let s = self.state();
                (s.phase, s.held.trusted_until())
            };
            match phase {
                Phase::Held if Boottime::now() >= trusted => self.end(Phase::Lost),
                Phase::Held => tokio::select! {
                    _ = changes.changed() => {}
                    () = self.core.thread.sleep_until(trusted) => {}
                },
                // It ends in one of the others, unless no answer comes.
                Phase::Releasing => tokio::select! {
                    _ = changes.changed() => {}
                    () = self.core.thread.sleep_until(trusted) => return Phase::Released,
                },
                Phase::Lost | Phase::Gone => return Phase::Lost,
                Phase::Released => return Phase::Released,
            }
        }
    }

    /// Half of what is left of trust: should the connection be dead, there is time for another.
    fn half_of_trust(&self) -> Duration {
        let trusted = self.state().held.trusted_until();
        (trusted.since(Boottime::now()) / 2).max(Duration::from_millis(1))
    }

    async fn renew_with_retries(&self) -> Result<(), Error> {
        let mut tried = 0;
        loop {
            let limit = self.core.backend.patience().min(self.half_of_trust());
            match self.renew(limit).await {
                Err(e) if e.is_transient() && tried < self.core.retry.attempts => {
                    // At once after a connection that was found cut, as in [`Core::with_retries`].
                    if tried > 0 {
                        let pause = self.core.retry.pause(tried + 1, fastrand::f64());
                        self.core
                            .thread
                            .sleep(pause.min(self.half_of_trust()))
                            .await;
                    }
                    tried += 1;
                }
                out => return out,
            }
        }
    }

    async fn renew(&self, limit: Duration) -> Result<(), Error> {
        let lost = || Error::Lost {
            key: self.key.to_string(),
        };
        let sent = Boottime::now();
        let (phase, trusted) = {
            let s = self.state();
            (s.phase, s.held.trusted_until())
        };
        if phase != Phase::Held {
            return Err(match phase {
                Phase::Lost | Phase::Gone => lost(),
                _ => Error::NotHeld {
                    key: self.key.to_string(),
                    holder: None,
                },
            });
        }
        if sent >= trusted {
            self.end(Phase::Lost);
            return Err(lost());
        }
        let limit = limit.min(trusted.since(sent));
        let answer = self
            .core
            .backend
            .renew(
                &self.key,
                &self.owner,
                Kind::Plain,
                self.lease.length,
                limit,
            )
            .await;
        let now = Boottime::now();
        match answer {
            Ok(OwnerReply::Done) => {
                let in_time = self.change(|s| {
                    let in_time = s.phase == Phase::Held && now < s.held.trusted_until();
                    s.held.renewed(sent, now);
                    in_time
                });
                if in_time || self.phase() == Phase::Released || self.phase() == Phase::Releasing {
                    return Ok(());
                }
                self.end(Phase::Lost);
                Err(lost())
            }
            Ok(OwnerReply::NotOwner(holder)) => {
                self.end(Phase::Gone);
                Err(Error::NotHeld {
                    key: self.key.to_string(),
                    holder: holder.map(|o| name_of(&o).to_owned()),
                })
            }
            // Something else is under the key: whatever that is, it is not our lock.
            Err(e @ Error::WrongType { .. }) => {
                self.end(Phase::Gone);
                Err(e)
            }
            Err(e) => Err(e),
        }
    }

    async fn keep_renewed(self: Arc<Self>, mut left: Option<u32>) {
        let mut changes = self.follow();
        loop {
            changes.mark_unchanged();
            let (phase, step, trusted) = {
                let s = self.state();
                let step = s.held.step(Boottime::now());
                (s.phase, step, s.held.trusted_until())
            };
            if phase != Phase::Held {
                return;
            }
            let at = match step {
                Step::StepDown => return self.end(Phase::Lost),
                Step::WaitUntil(at) => at,
                Step::Renew if left == Some(0) => trusted,
                Step::Renew => {
                    let limit = self.core.backend.patience().min(self.half_of_trust());
                    let renewed = tokio::select! {
                        renewed = self.renew(limit) => renewed,
                        _ = self.over() => return,
                    };
                    match renewed {
                        Ok(()) => left = left.map(|n| n - 1),
                        Err(
                            Error::NotHeld { .. } | Error::Lost { .. } | Error::WrongType { .. },
                        ) => return,
                        Err(e) => {
                            tracing::debug!(key = &*self.key, error = %e, "renewal failed, trying again");
                            self.state().held.failed(Boottime::now());
                        }
                    }
                    continue;
                }
            };
            tokio::select! {
                () = self.core.thread.sleep_until(at) => {}
                _ = changes.changed() => {}
            }
        }
    }

    /// From now on it is not trusted any more.
    fn stop_trusting(&self) {
        self.change(|s| {
            let held = s.phase == Phase::Held;
            if held {
                let trusted = Boottime::now() < s.held.trusted_until();
                s.phase = if trusted {
                    Phase::Releasing
                } else {
                    Phase::Lost
                };
            }
            held
        });
    }

    /// After [`HeldLock::stop_trusting`]. What comes of it is noted on the client's thread, whoever waits for it.
    async fn release(self: Arc<Self>) -> Result<Released, Error> {
        let phase = self.phase();
        if phase == Phase::Released {
            return Ok(Released::Before);
        }
        // It was ours until it was let go.
        let trusted = phase == Phase::Releasing;
        let asking = self.clone();
        let options = move || {
            let mut s = asking.state();
            s.releases_sent += 1;
            ReleaseOptions {
                keep_for: s.at_least_until.since(Boottime::now()),
                check_expiry: !trusted,
                unanswered: false,
            }
        };
        let (tell, told) = oneshot::channel();
        let hold = self.clone();
        self.core
            .release(&self.key, &self.owner, options, move |answer| {
                let _ = tell.send(hold.released(answer, trusted));
            });
        told.await.unwrap_or_else(|_| {
            let ended = io::Error::other("it has ended");
            Err(self.core.no_thread(&self.key, &ended))
        })
    }

    fn released(
        &self,
        answer: Result<OwnerReply, Error>,
        trusted: bool,
    ) -> Result<Released, Error> {
        let answer = answer?;
        let mut out = Ok(Released::Before);
        self.change(|s| {
            s.phase = match answer {
                _ if s.phase == Phase::Released => return false,
                OwnerReply::Done => {
                    out = Ok(Released::Now);
                    Phase::Released
                }
                // It was ours, and another request, whose answer got lost or is on its way, has freed it.
                OwnerReply::NotOwner(_) if trusted && s.releases_sent > 1 => Phase::Released,
                OwnerReply::NotOwner(holder) => {
                    out = Err(Error::NotHeld {
                        key: self.key.to_string(),
                        holder: holder.map(|o| name_of(&o).to_owned()),
                    });
                    Phase::Gone
                }
            };
            true
        });
        out
    }
}
