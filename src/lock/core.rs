//! What the clones of a client share, and how a client sends requests: with retries, in the background, on its own
//! thread.

use std::{
    future::Future,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::oneshot;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::{
    Error, Lock,
    backend::{Backend, OwnerReply, ReleaseOptions, Then, TryLockReply},
    client_thread::ClientThread,
    held::HeldLock,
    wait_queue::{self, WaitQueues},
};
use crate::{
    clock::Boottime,
    config,
    logic::trust::{HeldLease, Step},
    model::FencingToken,
};

pub(super) struct Core {
    pub(super) backend: Box<dyn Backend>,
    pub(super) retry: config::StoreRetry,
    /// Part of every owner that this client makes.
    pub(super) id: String,
    pub(super) owners: AtomicU64,
    pub(super) queues: Arc<WaitQueues>,
    pub(super) thread: ClientThread,
}

/// A new grant.
pub(super) struct Granted {
    pub(super) token: FencingToken,
    /// Just before the request left that the store answered with it.
    pub(super) sent: Boottime,
}

/// As [`TryLockReply`], with what the caller needs to continue.
pub(super) enum TryLockOutcome {
    /// With the lock, and the token that keeps the client busy until the caller has the lock and so is the one to
    /// release it.
    Acquired(Lock, TaskTrackerToken),
    Held {
        owner: String,
        remaining: Duration,
    },
}

impl Core {
    pub(super) fn is_ours(&self, owner: &str) -> bool {
        wait_queue::made_by(&self.id, owner)
    }

    /// Sends a request, and repeats it if it gets no answer. The first repetition is made at once, because a connection
    /// that was cut while it was idle shows that only when it is used. Further ones follow as often as `[store]`
    /// allows, until `within` has passed for the first request and for each of them.
    pub(super) async fn with_retries<T, F: Future<Output = Result<T, Error>>>(
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

    /// As [`Core::with_retries`], when the first answer is already there; `begun` is when the first request left.
    async fn retry<T, F: Future<Output = Result<T, Error>>>(
        &self,
        within: Duration,
        (begun, first): (Boottime, Result<T, Error>),
        ask: impl Fn() -> F,
    ) -> Result<T, Error> {
        if self.is_final(&first) {
            return first;
        }
        let last = begun + self.retry.time_for_all(within);
        // If the first request took its time, its connection was not a cut one.
        let mut next = match Boottime::now().since(begun) >= within {
            true => first,
            false => ask().await,
        };
        for nth in 1..=self.retry.attempts {
            if self.is_final(&next) || Boottime::now() >= last {
                break;
            }
            let pause = self.retry.pause(nth, fastrand::f64());
            self.thread.sleep(pause).await;
            next = ask().await;
        }
        next
    }

    /// Renews a lock, and repeats the request if it gets no answer. Each may take half of the trust that is left
    /// (`half_left`), so that there is time for another.
    pub(super) async fn renew_with_retries<F: Future<Output = Result<(), Error>>>(
        &self,
        half_left: impl Fn() -> Duration,
        renew: impl Fn(Duration) -> F,
    ) -> Result<(), Error> {
        let within = || self.backend.patience().min(half_left());
        for pause in self.retry.renewal_pauses(fastrand::f64) {
            match renew(within()).await {
                Err(e) if e.is_transient() => self.thread.sleep(pause.min(half_left())).await,
                out => return out,
            }
        }
        renew(within()).await
    }

    /// As the beginning of [`Core::with_retries`], with `within` as the limit for both requests. True: two requests
    /// were sent.
    pub(super) async fn ask_twice<T, F: Future<Output = Result<T, Error>>>(
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

    /// Runs some work on the client's thread. The work continues to its end even if the caller drops the future.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        key: &str,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let done = self.thread.run(work).await;
        done.unwrap_or_else(|e| Err(self.no_thread(key, &e)))
    }

    pub(super) fn no_thread(&self, key: &str, e: &io::Error) -> Error {
        Error::Unreachable {
            key: key.to_owned(),
            address: self.backend.address().to_owned(),
            reason: format!("the client's thread failed: {e}"),
        }
    }

    /// A part of owners, and the name of a request; no two are the same.
    pub(super) fn nonce(&self) -> String {
        let n = self.owners.fetch_add(1, Ordering::Relaxed);
        [&*self.id, ".", &n.to_string()].concat()
    }

    /// One attempt. If the caller drops the future, the request continues to its answer, and the lock that it acquired
    /// is then dropped, which releases it.
    ///
    /// The caller only hands the request over. Everything else happens on the client's thread: a caller that is not
    /// polled delays nobody.
    pub(super) async fn try_lock(
        self: &Arc<Self>,
        key: &Arc<str>,
        owner: &Arc<str>,
        lease: config::Lease,
    ) -> Result<TryLockOutcome, Error> {
        let thread = self.thread.handle().map_err(|e| self.no_thread(key, &e))?;
        let sent = Boottime::now();
        let asking = TryLocking {
            core: self.clone(),
            key: key.clone(),
            owner: owner.clone(),
            lease,
        };
        // Held until the outcome is taken, or until it is dropped and its release has begun: the client is not idle
        // before that.
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
        let begun = self
            .backend
            .begin_try_lock(thread, (key, owner), lease.length, then);
        if let Err(then) = begun {
            let (core, key, owner) = (self.clone(), key.clone(), owner.clone());
            self.thread.spawn(async move {
                let limit = core.backend.patience();
                let asked = core.backend.try_lock(&key, &owner, lease.length, limit);
                then(asked.await);
            });
        }
        told.await
            .unwrap_or_else(|_| Err(self.no_thread(key, &io::Error::other("it has ended"))))
    }

    /// Makes a lock from a grant, if any of its lease can be trusted.
    pub(super) fn acquired(
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
            // Dropping it releases it.
            drop(lock);
            return Err(Error::TooLate {
                key: key.to_string(),
                lease: lease.length,
                took: now.since(granted.sent),
            });
        }
        Ok(lock)
    }

    /// Releases in the background what an owner may hold; `over` gets the result.
    pub(super) fn release(
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

    /// As [`Core::release`], when nobody waits for the result.
    pub(super) fn release_in_background(
        self: &Arc<Self>,
        key: &Arc<str>,
        owner: &Arc<str>,
        options: impl Fn() -> ReleaseOptions + Send + Sync + 'static,
    ) {
        self.release(key, owner, options, |answer| {
            if let Err(e) = answer {
                tracing::debug!(error = %e, "a lock could not be released; it lapses with its lease");
            }
        });
    }

    /// As [`Backend::subscribe`]; never returns if the client's thread has failed.
    pub(super) async fn subscribe(self: &Arc<Self>, key: &Arc<str>) {
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

/// An attempt that is under way.
struct TryLocking {
    core: Arc<Core>,
    key: Arc<str>,
    owner: Arc<str>,
    lease: config::Lease,
}

impl TryLocking {
    /// If an answer is lost, asks again with the same owner.
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
                .try_lock(&self.key, &self.owner, lease, limit)
        };
        let answer = self.core.retry(limit, (sent, first), ask).await;
        self.outcome(Boottime(last_sent.into_inner()), answer, open)
    }

    /// Releases what the request may have acquired, if its answer does not say.
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
            // The lock was ours while the answers were lost, and lapsed: no answer can come later than that.
            Ok(TryLockReply::Stale) => Err(Error::TooLate {
                key: key.to_string(),
                lease: lease.length,
                took: lease.length,
            }),
            Err(e) => {
                // Without an answer, or with too few replicas, there may be a lock that no caller knows of.
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
