//! A lock that was acquired: how long it can be trusted, its renewal, and its end.

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

/// A lock that its holder keeps until it is released, lost, or dropped. Dropping it releases it in the background.
///
/// The holder trusts the lock for less than its lease, counted on CLOCK_BOOTTIME from before the request left: of a
/// lease of 15 s the first 12.7 s. The rest is a margin: the last writes of the holder can arrive in it, and it covers
/// clocks that run at different rates.
///
/// A program that ends right after it dropped a lock may end before the release is sent: await [`Lock::release`] first.
#[derive(Debug)]
#[must_use = "a lock that is dropped is released at once"]
pub struct Lock {
    hold: Arc<HeldLock>,
}

/// How a release that succeeded ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The lock was held until now.
    Now,
    /// The lock had been released before: nothing was sent, or an earlier request released it.
    Before,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Held,
    /// No longer trusted; the store may still have it under our owner.
    Lost,
    /// Its release was requested: it is no longer trusted, although it was until then.
    Releasing,
    /// Released, or dropped and about to be released.
    Released,
    /// The store says that it is not ours.
    Gone,
}

#[derive(Debug)]
struct State {
    held: HeldLease,
    phase: Phase,
    at_least_until: Boottime,
    /// The number of release requests that have left.
    releases_sent: u32,
}

pub(super) struct HeldLock {
    core: Arc<Core>,
    key: Arc<str>,
    owner: Arc<str>,
    lease: config::Lease,
    token: FencingToken,
    /// Just before the request left.
    granted: Boottime,
    state: Mutex<State>,
    /// Notifies of each change. Made when the first follower comes: most locks are acquired and released without one.
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

    /// The key, as it was given to the client.
    pub fn key(&self) -> &str {
        &self.hold.key
    }

    /// The owner: unique for this grant; begins with the name of the client.
    pub fn owner(&self) -> &str {
        &self.hold.owner
    }

    /// The fencing token: a number that grows with every grant of this key. A resource can check it, and refuse a
    /// smaller token than it has seen.
    ///
    /// It is the store's clock in µs or the last token plus one, whichever is greater. So it grows as long as the store
    /// remembers the last token (until a week after the lease, if it loses no data), *or* its clock was not stepped
    /// back past the last grant. It is wrong only if both fail at once.
    pub fn fencing_token(&self) -> FencingToken {
        self.hold.token
    }

    /// True while the lock can be trusted: it is not lost, and nobody has begun to release it. Sends nothing.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long the lock can be trusted unless it is renewed, on this host's CLOCK_BOOTTIME; zero when it cannot be
    /// trusted.
    pub fn remaining(&self) -> Duration {
        let state = self.hold.state();
        if state.phase != Phase::Held {
            return Duration::ZERO;
        }
        state.held.trusted_until().since(Boottime::now())
    }

    /// Follows until when the lock can be trusted: later after each renewal, zero once the lock is lost or released.
    /// For callers that hand the deadline on, for example to a child process.
    pub fn deadlines(&self) -> Deadlines {
        Deadlines {
            changes: self.hold.follow(),
            hold: Arc::downgrade(&self.hold),
        }
    }

    /// Renews the lock: its lease starts again, now. If the store does not answer, the client repeats the request as
    /// `retry` of `[store]` says, as long as the lock can be trusted.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: the store says that the lock is not ours; nothing was changed, and the lock counts as lost.
    /// [`Error::Lost`]: the lock was lost before, and nothing was sent; or the answer came when the lock could not be
    /// trusted any more. [`Error::WrongType`]: the key holds something else, so the lock counts as lost.
    /// [`Error::Unreachable`] and others: unknown whether the store renewed it; what was trusted before is still
    /// trusted.
    ///
    /// # Cancel safety
    /// If the future is dropped, the renewal continues on the client's thread, and counts if it succeeds.
    pub async fn renew(&self) -> Result<(), Error> {
        let hold = self.hold.clone();
        let renewing = async move {
            let half_left = || hold.half_left();
            hold.core
                .renew_with_retries(half_left, |limit| hold.renew(limit))
                .await
        };
        self.hold.core.run(self.key(), renewing).await
    }

    /// Keeps the lock renewed in the background until it is released, dropped or lost. Renews after each fifth of the
    /// lease. If the store says that the lock is not ours, the lock is lost. After any other error the client soon
    /// tries again, until the lock cannot be trusted any more. Returns at once; a second call does nothing.
    /// The client's own thread renews, over a connection of its own: the caller may block its thread, and its runtime
    /// may end.
    ///
    /// A lock that is kept renewed lives as long as this process, even if the process hangs in a loop: see
    /// [`Lock::keep_renewed_at_most`].
    pub fn keep_renewed(&self) {
        self.keep(None);
    }

    /// As [`Lock::keep_renewed`], but at most `max_renewals` times: then the lock lapses with its lease, and is lost.
    /// If the lease is L and the store answers, that is (`max_renewals` / 5 + 1) × L after the grant. Retries make it
    /// later, but never later than (`max_renewals` + 1) × L.
    pub fn keep_renewed_at_most(&self, max_renewals: u32) {
        self.keep(Some(max_renewals));
    }

    fn keep(&self, limit: Option<u32>) {
        if !self.hold.renewing.swap(true, Ordering::SeqCst) {
            let hold = self.hold.clone();
            self.hold.core.thread.spawn(hold.keep_renewed(limit));
        }
    }

    /// Releases the lock, and wakes its waiters. The lock is not trusted any more once this future was first polled.
    ///
    /// Only this owner's lock is released, never a successor's. Once a release has succeeded, a further call returns
    /// [`Released::Before`], also if the first answer was lost.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: the lock was not ours any more; if somebody else holds it, they keep it. (If the lock lapsed
    /// only by the store's clock, because that was stepped, and nobody has held it since, the release succeeds.)
    /// [`Error::Unreachable`], after the retries of `[store]`: the lock lapses with its lease at the latest. The caller
    /// may call again, and dropping the lock tries once more.
    ///
    /// # Cancel safety
    /// Dropping the future does not cancel the release: it continues in the background. (A future that was never polled
    /// releases nothing.)
    pub async fn release(&self) -> Result<Released, Error> {
        self.hold.stop_trusting();
        self.hold.clone().release().await
    }

    /// Keeps the lock held for at least `time` from its grant, even if it is released sooner: for work that ends at
    /// once, and that a host whose clock is behind must not do again. The last call counts; `time` is at most 366 days.
    ///
    /// The release hands the rest of the time to the store, which counts it by its wall clock. If the holder dies, only
    /// the lease counts.
    pub fn lock_at_least_for(&self, time: Duration) {
        let time = time.min(config::Lease::LONGEST_LOCK);
        self.hold.state().at_least_until = self.hold.granted + time;
    }

    /// Ends when the lock is lost: at once when the store says that it is not ours, and at the latest when it cannot be
    /// trusted any more. Never ends if the lock is released or dropped first.
    ///
    /// # Cancel safety
    /// The future only watches, so it can be dropped at any time.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        let hold = self.hold.clone();
        async move {
            if hold.over().await != Phase::Lost {
                std::future::pending::<()>().await;
            }
        }
    }

    /// True if the store said that somebody else or nobody holds it.
    #[cfg(feature = "daemon")]
    pub(crate) fn was_taken_away(&self) -> bool {
        self.hold.phase() == Phase::Gone
    }

    /// Keeps the local turn until this lock has ended.
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
    /// The instant until which the lock can be trusted; `Boottime(0)` when the lock is lost or released.
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

    /// Waits until the deadline differs from the last one that [`Deadlines::now`] or this method returned, and returns
    /// it; `Boottime(0)` when the lock is lost or released.
    ///
    /// # Cancel safety
    /// A dropped future misses nothing: the next call returns the newest deadline.
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

    /// Changes the state, and notifies the followers if `f` returns true.
    fn change(&self, f: impl FnOnce(&mut State) -> bool) -> bool {
        let changed = f(&mut self.state());
        if changed && let Some(changes) = self.changes.get() {
            changes.send_replace(());
        }
        changed
    }

    /// A receiver of every change after this call.
    fn follow(&self) -> watch::Receiver<()> {
        self.changes
            .get_or_init(|| watch::Sender::new(()))
            .subscribe()
    }

    fn phase(&self) -> Phase {
        self.state().phase
    }

    /// From `Held` only: a lock that was released is not lost.
    fn end(&self, phase: Phase) {
        self.change(|s| {
            let first = s.phase == Phase::Held;
            if first {
                s.phase = phase;
            }
            first
        });
    }

    /// Waits until the lock has ended; returns `Lost` or `Released`.
    async fn over(&self) -> Phase {
        let mut changes = self.follow();
        loop {
            changes.mark_unchanged();
            let (phase, trusted, is_trusted) = {
                let (s, now) = (self.state(), Boottime::now());
                (s.phase, s.held.trusted_until(), s.held.is_trusted(now))
            };
            match phase {
                Phase::Held if !is_trusted => self.end(Phase::Lost),
                Phase::Held => tokio::select! {
                    _ = changes.changed() => {}
                    () = self.core.thread.sleep_until(trusted) => {}
                },
                // It becomes `Released` or `Gone`, unless no answer comes.
                Phase::Releasing => tokio::select! {
                    _ = changes.changed() => {}
                    () = self.core.thread.sleep_until(trusted) => return Phase::Released,
                },
                Phase::Lost | Phase::Gone => return Phase::Lost,
                Phase::Released => return Phase::Released,
            }
        }
    }

    fn half_left(&self) -> Duration {
        self.state().held.half_left(Boottime::now())
    }

    async fn renew(&self, limit: Duration) -> Result<(), Error> {
        let lost = || Error::Lost {
            key: self.key.to_string(),
        };
        let sent = Boottime::now();
        let (phase, left) = {
            let s = self.state();
            (s.phase, s.held.trusted_until().since(sent))
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
        if left.is_zero() {
            self.end(Phase::Lost);
            return Err(lost());
        }
        let limit = limit.min(left);
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
                    let in_time = s.phase == Phase::Held && s.held.is_trusted(now);
                    s.held.renewed(sent, now);
                    in_time
                });
                if in_time || matches!(self.phase(), Phase::Released | Phase::Releasing) {
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
            // The key holds something else, which is certainly not our lock.
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
                    let limit = self.core.backend.patience().min(self.half_left());
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

    /// From now on the lock is not trusted any more.
    fn stop_trusting(&self) {
        self.change(|s| {
            let held = s.phase == Phase::Held;
            if held {
                s.phase = if s.held.is_trusted(Boottime::now()) {
                    Phase::Releasing
                } else {
                    Phase::Lost
                };
            }
            held
        });
    }

    /// To be called after [`HeldLock::stop_trusting`]. The client's thread notes the result, even if the caller is
    /// gone.
    async fn release(self: Arc<Self>) -> Result<Released, Error> {
        let phase = self.phase();
        if phase == Phase::Released {
            return Ok(Released::Before);
        }
        // It was trusted until its release was requested.
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
                // It was ours, and another request, whose answer was lost or is still to come, has released it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LockClient;

    const LEASE: Duration = Duration::from_secs(60);

    /// A lock that was granted just now. Its store is never asked.
    fn hold() -> HeldLock {
        granted(LEASE, Duration::ZERO)
    }

    fn granted(lease: Duration, ago: Duration) -> HeldLock {
        let core = LockClient::open("redis://127.0.0.1:1").unwrap().core;
        let lease = config::Lease::of_lock(lease, 0.01).unwrap();
        let granted = Boottime::now() - ago;
        let held = HeldLease::new(lease, granted);
        let (key, owner) = ("k".into(), "me#1.2".into());
        HeldLock::new(core, key, owner, lease, FencingToken(7), granted, held)
    }

    fn foreign() -> Option<String> {
        Some("b#3.4".to_owned())
    }

    #[test]
    fn a_lock_that_was_trusted_is_released_and_one_that_was_not_is_lost() {
        let second = Duration::from_secs(1);
        for (lease, after) in [(LEASE, Phase::Releasing), (second / 10, Phase::Lost)] {
            let hold = granted(lease, second);
            hold.stop_trusting();
            assert_eq!(hold.phase(), after);
            // It has ended: nothing ends it in another way.
            for how in [Phase::Gone, Phase::Lost] {
                hold.end(how);
                assert_eq!(hold.phase(), after);
            }
            hold.stop_trusting();
            assert_eq!(hold.phase(), after);
        }
        let hold = hold();
        hold.end(Phase::Gone);
        assert_eq!(hold.phase(), Phase::Gone);
    }

    /// The answer to a release; `sent`: how many such requests have left.
    #[test]
    fn a_release_whose_answer_was_lost_counts_as_one_of_ours() {
        let done = OwnerReply::Done;
        let (nobodys, theirs) = (OwnerReply::NotOwner(None), OwnerReply::NotOwner(foreign()));
        for (answer, trusted, sent, released, after) in [
            (&done, true, 1, Some(Released::Now), Phase::Released),
            (&done, false, 1, Some(Released::Now), Phase::Released),
            (&nobodys, true, 1, None, Phase::Gone),
            (&theirs, true, 1, None, Phase::Gone),
            (&nobodys, true, 2, Some(Released::Before), Phase::Released),
            (&theirs, true, 3, Some(Released::Before), Phase::Released),
            (&theirs, false, 2, None, Phase::Gone),
        ] {
            let hold = hold();
            hold.stop_trusting();
            hold.state().releases_sent = sent;
            let out = hold.released(Ok(answer.clone()), trusted);
            assert_eq!(
                (out.as_ref().ok(), hold.phase()),
                (released.as_ref(), after)
            );
            if let Err(e) = out {
                let is_theirs = *answer == theirs;
                let named = matches!(&e, Error::NotHeld { holder: Some(b), .. } if b == "b");
                assert_eq!(named, is_theirs, "{e}");
            }
            // A later answer changes nothing of a release.
            if after == Phase::Released {
                let again = hold.released(Ok(OwnerReply::NotOwner(None)), trusted);
                assert_eq!(again.unwrap(), Released::Before);
                assert_eq!(hold.phase(), Phase::Released);
            }
        }
    }

    #[test]
    fn each_change_is_told_to_those_who_follow() {
        let hold = hold();
        let mut changes = hold.follow();
        assert!(!hold.change(|_| false));
        assert!(!changes.has_changed().unwrap());
        assert!(hold.change(|_| true));
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        hold.end(Phase::Lost);
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        hold.end(Phase::Gone);
        hold.stop_trusting();
        assert!(!changes.has_changed().unwrap());
    }

    #[test]
    fn what_is_known_of_a_lock_is_said_without_asking() {
        let hold = hold();
        let (granted, left) = (hold.granted, hold.half_left());
        let trust = hold.lease.trust;
        assert!(left <= trust / 2 && left > trust / 3, "{left:?}");
        let lock = Lock::new(hold);
        assert_eq!((lock.key(), lock.owner()), ("k", "me#1.2"));
        assert_eq!(lock.fencing_token(), FencingToken(7));
        let shown = format!("{lock:?}");
        assert!(
            shown.contains("me#1.2") && shown.contains("Held"),
            "{shown}"
        );
        assert!(lock.is_held() && lock.remaining() > LEASE / 2);
        let mut deadlines = lock.deadlines();
        assert_eq!(deadlines.now(), granted + trust);
        for (time, until) in [
            (Duration::MAX, granted + config::Lease::LONGEST_LOCK),
            (LEASE, granted + LEASE),
        ] {
            lock.lock_at_least_for(time);
            assert_eq!(lock.hold.state().at_least_until, until);
        }
        lock.hold.end(Phase::Gone);
        assert!(!lock.is_held());
        assert_eq!(lock.remaining(), Duration::ZERO);
        assert_eq!(deadlines.now(), Boottime(0));
        let hold = hold_of(lock);
        assert_eq!(hold.phase(), Phase::Gone);
    }

    /// What a dropped lock leaves.
    fn hold_of(lock: Lock) -> Arc<HeldLock> {
        let hold = lock.hold.clone();
        drop(lock);
        hold
    }

    #[test]
    fn a_lock_that_is_dropped_is_released_unless_the_store_says_whose_it_is() {
        for (phase, after) in [
            (Phase::Held, Phase::Released),
            (Phase::Lost, Phase::Released),
            (Phase::Releasing, Phase::Released),
            (Phase::Gone, Phase::Gone),
        ] {
            let lock = Lock::new(hold());
            lock.hold.state().phase = phase;
            assert_eq!(hold_of(lock).phase(), after, "{phase:?}");
        }
    }
}
