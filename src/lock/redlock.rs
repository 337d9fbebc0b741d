//! Redlock: a lock on the majority of N independent masters, as its authors describe it, with its known faults.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;

use super::{
    Attempt, Error, Giving, IfDropped, Kept, Kind, LockClient, Released, RetryStrategy, Tried,
    checked, leased, name_of,
};
use crate::clock::Boottime;

/// A lock that survives the loss of a minority of its nodes. The nodes know nothing of each other; do not use replicas of one master.
///
/// A grant counts when a majority gave it while it is still valid: validity = lease − the time it took − drift (1 % of the lease, and
/// 2 ms). After a failure all nodes are told to forget it.
///
/// **What it does not do.** A lock that sits on exactly a majority is granted twice when one of these nodes is restarted
/// without its data, or when the wall clock of one of them is stepped past the lease; docs/locks.md names the test that
/// shows each. There is no fencing token: N clocks give none that grows. A node that was restarted empty has to stay away for the longest
/// lease in use. Where that is not good enough, use one master and check the fencing token of a [`Lock`](super::Lock).
///
/// ```no_run
/// # async fn f() -> Result<(), soloist::lock::Error> {
/// use std::time::Duration;
/// use soloist::{ExponentialBackoff, LockClient, Redlock, lock::TryRedlock};
///
/// let nodes = ["redis://a/0", "redis://b/0", "redis://c/0"].map(LockClient::open);
/// let red = Redlock::new(nodes.into_iter().collect::<Result<Vec<_>, _>>()?)?;
/// let retry = ExponentialBackoff::default().until(Duration::from_secs(5));
/// match red.try_lock("payout", Duration::from_secs(30), retry).await? {
///     TryRedlock::Taken(lock) => {
///         // ... the work, while lock.is_held(), with lock.renew() now and then ...
///         lock.release().await?;
///     }
///     TryRedlock::Held { holder, remaining, .. } => println!("{holder} has it, for {remaining:?} at most"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Redlock {
    nodes: Vec<LockClient>,
    node_timeout: Option<Duration>,
}

/// How a try to take a [`Redlock`] ended.
#[derive(Debug)]
#[must_use = "a lock that is dropped is given back at once"]
pub enum TryRedlock {
    /// A majority granted it in time.
    Taken(RedlockGuard),
    /// Others have so many nodes that there was no majority.
    Held {
        /// Nodes that were granted, and given back.
        votes: usize,
        /// The name of one of the holders.
        holder: String,
        /// Until enough nodes are free at most, by their clocks.
        remaining: Duration,
    },
}

/// A [`Redlock`] that is ours until it is given back, lost, or dropped (which gives it back in the background).
#[derive(Debug)]
#[must_use = "a lock that is dropped is given back at once"]
pub struct RedlockGuard {
    lock: Redlock,
    key: Arc<str>,
    owner: Arc<str>,
    lease: Duration,
    timeout: Duration,
    trusted_until: Mutex<Boottime>,
    released: AtomicBool,
    runtime: tokio::runtime::Handle,
}

fn drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

impl Redlock {
    /// Over these nodes: three or more, best an odd number.
    ///
    /// # Errors
    /// [`Error::TooFewNodes`].
    pub fn new(nodes: impl IntoIterator<Item = LockClient>) -> Result<Self, Error> {
        let nodes: Vec<_> = nodes.into_iter().collect();
        if nodes.len() < 3 {
            return Err(Error::TooFewNodes { have: nodes.len() });
        }
        Ok(Self {
            nodes,
            node_timeout: None,
        })
    }

    /// How long each node is waited for. Unless set it is a twentieth of the lease, between 10 ms and 500 ms.
    #[must_use]
    pub fn node_timeout(mut self, timeout: Duration) -> Self {
        self.node_timeout = Some(timeout);
        self
    }

    /// Nodes that make a majority.
    pub fn quorum(&self) -> usize {
        self.nodes.len() / 2 + 1
    }

    /// Takes the lock if a majority of the nodes grants it; else asks again as often as `retry` says.
    ///
    /// Two who ask at the same time may take half each and both lose: use an
    /// [`ExponentialBackoff`](super::ExponentialBackoff) with jitter.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidLease`]; [`Error::NoMajority`]: too many nodes did not answer, what was granted was given
    /// back; [`Error::TooLate`]: nothing was left of its validity.
    pub async fn try_lock(
        &self,
        key: &str,
        lease: Duration,
        mut retry: impl RetryStrategy,
    ) -> Result<TryRedlock, Error> {
        let key = checked(key)?;
        leased(&key, lease)?;
        let begun = Boottime::now();
        let mut number = 0;
        loop {
            let (votes, holder, remaining) = match self.once(&key, lease).await? {
                TryRedlock::Held {
                    votes,
                    holder,
                    remaining,
                } => (votes, holder, remaining),
                taken => return Ok(taken),
            };
            number += 1;
            let attempt = Attempt {
                number,
                elapsed: Boottime::now().since(begun),
                remaining,
            };
            match retry.pause(&attempt) {
                Some(pause) => tokio::time::sleep(pause).await,
                None => {
                    return Ok(TryRedlock::Held {
                        votes,
                        holder,
                        remaining,
                    });
                }
            }
        }
    }

    async fn once(&self, key: &Arc<str>, lease: Duration) -> Result<TryRedlock, Error> {
        let timeout = self.node_timeout.unwrap_or_else(|| {
            (lease / 20).clamp(Duration::from_millis(10), Duration::from_millis(500))
        });
        let owner = self.nodes[0].owner();
        let sent = Boottime::now();
        // From here on it gives back what it may have: also when this future is dropped.
        let guard = RedlockGuard {
            lock: self.clone(),
            key: key.clone(),
            owner: owner.clone(),
            lease,
            timeout,
            trusted_until: Mutex::new((sent + lease) - drift(lease)),
            released: false.into(),
            runtime: tokio::runtime::Handle::current(),
        };
        let answers = join_all(
            self.nodes
                .iter()
                .map(|n| n.core.backend.try_lock(key, &owner, lease, false, timeout)),
        )
        .await;
        let (mut votes, mut held, mut first) = (0, vec![], None);
        for answer in answers {
            match answer {
                Ok(Tried::Taken(_)) => votes += 1,
                Ok(Tried::Held { owner, remaining }) => held.push((remaining, owner)),
                Ok(Tried::Stale) => {}
                Err(e) => {
                    first.get_or_insert(e);
                }
            }
        }
        if votes >= self.quorum() {
            let took = Boottime::now().since(sent);
            if guard.is_held() {
                return Ok(TryRedlock::Taken(guard));
            }
            let _ = guard.release().await;
            return Err(Error::TooLate {
                key: key.to_string(),
                lease,
                took,
            });
        }
        // Also where there was no answer: the grant may have been made.
        let _ = guard.release().await;
        held.sort();
        // So many have to become free.
        let missing = self.quorum() - votes;
        // Once they are: those that do not answer may stay away.
        let blocking = votes + held.len() >= self.quorum();
        match held.get(missing.min(held.len()).wrapping_sub(1)) {
            Some((remaining, owner)) if blocking => Ok(TryRedlock::Held {
                votes,
                holder: name_of(owner).to_owned(),
                remaining: *remaining,
            }),
            _ => Err(Error::NoMajority {
                key: key.to_string(),
                votes,
                needed: self.quorum(),
                reason: first.map_or_else(|| "a late answer".to_owned(), |e| e.to_string()),
            }),
        }
    }
}

impl RedlockGuard {
    /// As it was given to the client.
    pub fn key(&self) -> &str {
        &self.key
    }

    fn until(&self) -> Boottime {
        *self
            .trusted_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// True while the lock is valid. Asks nobody.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// What is left of its validity unless it is renewed, on this host's CLOCK_BOOTTIME.
    pub fn remaining(&self) -> Duration {
        if self.released.load(SeqCst) {
            return Duration::ZERO;
        }
        self.until().since(Boottime::now())
    }

    /// Prolongs the lock on all nodes that have it.
    ///
    /// # Errors
    /// [`Error::Lost`]: it is not valid any more. [`Error::NoMajority`]: fewer than a majority confirmed it; the old validity stands.
    pub async fn renew(&self) -> Result<(), Error> {
        let sent = Boottime::now();
        let lost = || Error::Lost {
            key: self.key.to_string(),
        };
        if !self.is_held() {
            return Err(lost());
        }
        let answers = join_all(self.lock.nodes.iter().map(|n| {
            n.core.backend.renew(
                &self.key,
                &self.owner,
                Kind::Plain,
                self.lease,
                self.timeout,
            )
        }))
        .await;
        let votes = answers
            .iter()
            .filter(|a| matches!(a, Ok(Kept::Yes)))
            .count();
        if votes < self.lock.quorum() {
            let first = answers.into_iter().find_map(Result::err);
            return Err(Error::NoMajority {
                key: self.key.to_string(),
                votes,
                needed: self.lock.quorum(),
                reason: first.map_or_else(|| "others have it".to_owned(), |e| e.to_string()),
            });
        }
        if !self.is_held() {
            return Err(lost());
        }
        let mut until = self
            .trusted_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *until = (*until).max(sent + (self.lease - drift(self.lease)));
        Ok(())
    }

    /// Gives the lock back on all nodes, also on those that did not answer; they are tried again in the background.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: a majority did not have it any more. [`Error::NoMajority`]: fewer than a majority have confirmed it; those
    /// that did not answer are tried again in the background, and it lapses with its lease.
    pub async fn release(&self) -> Result<Released, Error> {
        let sure = self.is_held();
        if self.released.swap(true, SeqCst) {
            return Ok(Released::Before);
        }
        let how = Giving {
            keep: Duration::ZERO,
            sure,
        };
        let unfinished = IfDropped::new(|| self.lock.nodes.iter().for_each(|n| self.abandon(n)));
        let answers = join_all(self.lock.nodes.iter().map(|n| {
            n.core
                .backend
                .release(&self.key, &self.owner, how, self.timeout)
        }))
        .await;
        unfinished.disarm();
        let (mut freed, mut gone) = (0, 0);
        let (mut holder, mut first) = (None, None);
        for (node, answer) in self.lock.nodes.iter().zip(answers) {
            node.core.rooms.ring(&self.key);
            match answer {
                Ok(Kept::Yes) => freed += 1,
                Ok(Kept::No(owner)) => {
                    gone += 1;
                    holder = holder.or(owner);
                }
                Err(e) => {
                    first.get_or_insert(e);
                    self.abandon(node);
                }
            }
        }
        if gone >= self.lock.quorum() {
            return Err(Error::NotHeld {
                key: self.key.to_string(),
                holder: holder.map(|o| name_of(&o).to_owned()),
            });
        }
        if freed < self.lock.quorum() {
            return Err(Error::NoMajority {
                key: self.key.to_string(),
                votes: freed,
                needed: self.lock.quorum(),
                reason: first.map_or_else(|| "others have it".to_owned(), |e| e.to_string()),
            });
        }
        Ok(Released::Now)
    }

    fn abandon(&self, node: &LockClient) {
        let (key, owner) = (self.key.clone(), self.owner.clone());
        node.core.abandon(&self.runtime, key, owner, Boottime(0));
    }
}

impl Drop for RedlockGuard {
    fn drop(&mut self) {
        if !self.released.load(SeqCst) {
            self.lock.nodes.iter().for_each(|n| self.abandon(n));
        }
    }
}
