//! Redlock: a lock on the majority of N independent masters, as its authors describe it, with its known faults.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use parking_lot::Mutex;

use super::{
    Attempts, Core, Error, Kind, LockClient, OwnerReply, ReleaseOptions, Released, RetryStrategy,
    TryLockReply, checked, leased, name_of,
};
use crate::clock::Boottime;

/// A lock that survives the loss of a minority of its nodes. The nodes know nothing of each other; do not use replicas
/// of one master.
///
/// A grant counts if a majority of the nodes gave it while it is still valid. Validity = lease − the time that the
/// requests took − drift (1 % of the lease, and 2 ms). After a failure the client releases the lock on all nodes.
///
/// **What it does not do.** A lock that sits on exactly a majority is granted twice when one of these nodes restarts
/// without its data, or when the wall clock of one of them is stepped past the lease; docs/locks.md names the test that
/// shows each. There is no fencing token: N clocks give none that grows. A node that was restarted empty has to stay
/// away for the longest lease in use. Where that is not good enough, use one master and check the fencing token of a
/// [`Lock`](super::Lock).
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
///     TryRedlock::Acquired(lock) => {
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

/// How an attempt to acquire a [`Redlock`] ended.
#[derive(Debug)]
#[must_use = "a lock that is dropped is released at once"]
pub enum TryRedlock {
    /// A majority of the nodes granted it in time.
    Acquired(RedlockGuard),
    /// There was no majority: others hold the lock on too many nodes.
    Held {
        /// The number of nodes that granted it; these grants were released.
        votes: usize,
        /// The name of one of the holders.
        holder: String,
        /// Enough nodes are free after at most this time, by their clocks, unless the holders renew.
        remaining: Duration,
    },
}

/// A [`Redlock`] that its holder keeps until it is released, lost, or dropped. Dropping it releases it in the
/// background.
#[derive(Debug)]
#[must_use = "a lock that is dropped is released at once"]
pub struct RedlockGuard {
    lock: Redlock,
    key: Arc<str>,
    owner: Arc<str>,
    lease: Duration,
    timeout: Duration,
    trusted_until: Mutex<Boottime>,
    released: AtomicBool,
    /// In the order of the nodes.
    shares: Vec<Share>,
}

/// The possible grant of one node. It is released when this is dropped, unless it was disarmed.
#[derive(Debug)]
struct Share {
    node: LockClient,
    key: Arc<str>,
    owner: Arc<str>,
    /// The node did not answer.
    unanswered: AtomicBool,
    armed: AtomicBool,
}

/// Until when a grant, or a renewal, is valid whose requests left at `sent`.
fn valid_until(sent: Boottime, lease: Duration) -> Boottime {
    let drift = lease / 100 + Duration::from_millis(2);
    sent + (lease - drift)
}

/// For how long others hold the lock at most; zero if that is not known.
fn held_for(failed: &Result<TryRedlock, Error>) -> Duration {
    match failed {
        Ok(TryRedlock::Held { remaining, .. }) => *remaining,
        _ => Duration::ZERO,
    }
}

/// The holder whose expiry frees a majority, and when that is. None: nodes that do not answer may stay away, so there
/// may be no majority even then.
fn in_the_way(
    votes: usize,
    mut held: Vec<(Duration, String)>,
    quorum: usize,
) -> Option<(Duration, String)> {
    held.sort();
    // So many more nodes have to become free.
    let missing = quorum - votes;
    held.into_iter().nth(missing - 1)
}

impl Redlock {
    /// Makes a lock on these nodes: three or more, preferably an odd number.
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

    /// How long the client waits for each node. The default is a twentieth of the lease, between 10 ms and 500 ms.
    #[must_use]
    pub fn node_timeout(mut self, timeout: Duration) -> Self {
        self.node_timeout = Some(timeout);
        self
    }

    /// The number of nodes that make a majority.
    pub fn quorum(&self) -> usize {
        self.nodes.len() / 2 + 1
    }

    /// Acquires the lock if a majority of the nodes grants it. If not, asks again as often as `retry` says, also when
    /// too few nodes answered ([`Attempt::remaining`](super::Attempt::remaining) is zero then).
    ///
    /// Two callers that ask at the same time may get half of the nodes each, and both lose: use an
    /// [`ExponentialBackoff`](super::ExponentialBackoff) with jitter.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidLease`]: nothing was sent. [`Error::NoMajority`]: too many nodes did not
    /// answer. [`Error::TooLate`]: the answers took so long that nothing was left of the validity. In both cases the
    /// client releases what was granted.
    ///
    /// # Cancel safety
    /// If the future is dropped, the request to each node continues to its answer on the thread of the node's client.
    /// What the nodes granted is then released.
    pub async fn try_lock(
        &self,
        key: &str,
        lease: Duration,
        mut retry: impl RetryStrategy,
    ) -> Result<TryRedlock, Error> {
        let key = checked(key)?;
        leased(&key, lease)?;
        let mut attempts = Attempts::begin();
        loop {
            let failed = match self.try_once(&key, lease).await {
                Ok(acquired @ TryRedlock::Acquired(_)) => return Ok(acquired),
                Err(e) if !e.is_transient() => return Err(e),
                failed => failed,
            };
            match retry.pause(&attempts.held_for(held_for(&failed))) {
                Some(pause) => self.nodes[0].core.thread.sleep(pause).await,
                None => return failed,
            }
        }
    }

    // Long: one place counts what the nodes granted, and releases it.
    async fn try_once(&self, key: &Arc<str>, lease: Duration) -> Result<TryRedlock, Error> {
        let timeout = self.node_timeout.unwrap_or_else(|| usual_timeout(lease));
        let owner = self.nodes[0].owner();
        let sent = Boottime::now();
        // If this future is dropped, the request to each node continues to its answer, and the share is then given
        // back.
        let answers = join_all(self.nodes.iter().map(|node| {
            let (core, share) = (node.core.clone(), Share::of(node, key, &owner));
            let asked = async move {
                let ask = |limit| {
                    core.backend
                        .try_lock(&share.key, &share.owner, lease, limit)
                };
                let (answer, _) = core.ask_twice(timeout, ask).await;
                share.unanswered.store(answer.is_err(), SeqCst);
                if matches!(answer, Ok(TryLockReply::Held { .. } | TryLockReply::Stale)) {
                    share.disarm();
                }
                Ok((answer, share))
            };
            async move { node.core.run(key, asked).await }
        }))
        .await;
        let mut guard = RedlockGuard {
            lock: self.clone(),
            key: key.clone(),
            owner: owner.clone(),
            lease,
            timeout,
            trusted_until: Mutex::new(valid_until(sent, lease)),
            released: false.into(),
            shares: vec![],
        };
        let (mut votes, mut held, mut first) = (0, vec![], None);
        for (node, answer) in self.nodes.iter().zip(answers) {
            let (answer, share) = answer.unwrap_or_else(|e| {
                // The thread of its client cannot be started, so nothing was sent.
                let share = Share::of(node, key, &owner);
                share.disarm();
                (Err(e), share)
            });
            guard.shares.push(share);
            match answer {
                Ok(TryLockReply::Acquired(_)) => votes += 1,
                Ok(TryLockReply::Held { owner, remaining }) => held.push((remaining, owner)),
                Ok(TryLockReply::Stale) => {}
                Err(e) => {
                    first.get_or_insert(e);
                }
            }
        }
        if votes >= self.quorum() {
            let took = Boottime::now().since(sent);
            if guard.is_held() {
                return Ok(TryRedlock::Acquired(guard));
            }
            let _ = guard.release().await;
            return Err(Error::TooLate {
                key: key.to_string(),
                lease,
                took,
            });
        }
        // Also on nodes that did not answer: they may have granted it.
        let _ = guard.release().await;
        match in_the_way(votes, held, self.quorum()) {
            Some((remaining, owner)) => Ok(TryRedlock::Held {
                votes,
                holder: name_of(&owner).to_owned(),
                remaining,
            }),
            None => Err(Error::NoMajority {
                key: key.to_string(),
                votes,
                needed: self.quorum(),
                reason: first
                    .map_or_else(|| "a node answered too late".to_owned(), |e| e.to_string()),
            }),
        }
    }
}

impl RedlockGuard {
    /// The key, as it was given to [`Redlock::try_lock`].
    pub fn key(&self) -> &str {
        &self.key
    }

    fn until(&self) -> Boottime {
        *self.trusted_until.lock()
    }

    /// True while the lock is valid. Sends nothing.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long the lock is valid unless it is renewed, on this host's CLOCK_BOOTTIME; zero when it is not valid.
    pub fn remaining(&self) -> Duration {
        if self.released.load(SeqCst) {
            return Duration::ZERO;
        }
        self.until().since(Boottime::now())
    }

    /// Renews the lock on all nodes that have it.
    ///
    /// # Errors
    /// [`Error::Lost`]: the lock is not valid any more. [`Error::NoMajority`]: fewer than a majority confirmed the
    /// renewal; the old validity stands.
    ///
    /// # Cancel safety
    /// If the future is dropped, requests that were sent continue to their answers, so nodes may have prolonged the
    /// lock. This value does not count that: [`RedlockGuard::remaining`] keeps the old validity.
    pub async fn renew(&self) -> Result<(), Error> {
        let sent = Boottime::now();
        let lost = || Error::Lost {
            key: self.key.to_string(),
        };
        if !self.is_held() {
            return Err(lost());
        }
        let (lease, timeout) = (self.lease, self.timeout);
        let answers = self
            .ask_all(move |core, key, owner| async move {
                let ask = |limit| core.backend.renew(&key, &owner, Kind::Plain, lease, limit);
                core.ask_twice(timeout, ask).await.0
            })
            .await;
        let (mut votes, mut first) = (0, None);
        for answer in answers {
            match answer {
                Ok(OwnerReply::Done) => votes += 1,
                Ok(OwnerReply::NotOwner(_)) => {}
                Err(e) => {
                    first.get_or_insert(e);
                }
            }
        }
        if votes < self.lock.quorum() {
            return Err(self.no_majority(votes, first));
        }
        if !self.is_held() {
            return Err(lost());
        }
        let mut until = self.trusted_until.lock();
        *until = (*until).max(valid_until(sent, self.lease));
        Ok(())
    }

    fn no_majority(&self, votes: usize, first: Option<Error>) -> Error {
        Error::NoMajority {
            key: self.key.to_string(),
            votes,
            needed: self.lock.quorum(),
            reason: first.map_or_else(|| "others have it".to_owned(), |e| e.to_string()),
        }
    }

    /// Asks all nodes at the same time, each on the thread of its client.
    async fn ask_all<T: Send + 'static, F>(
        &self,
        ask: impl Fn(Arc<Core>, Arc<str>, Arc<str>) -> F,
    ) -> Vec<Result<T, Error>>
    where
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let all = self.lock.nodes.iter().map(|node| {
            let asked = ask(node.core.clone(), self.key.clone(), self.owner.clone());
            node.core.run(&self.key, asked)
        });
        join_all(all).await
    }

    /// Releases the lock on all nodes. Nodes that do not answer are tried again in the background. The lock is not
    /// valid any more once this future was first polled.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: a majority did not have the lock any more. [`Error::NoMajority`]: fewer than a majority have
    /// confirmed the release; on the other nodes the lock lapses with its lease, if the tries in the background fail
    /// too.
    ///
    /// # Cancel safety
    /// Dropping the future does not cancel the release: it continues in the background.
    pub async fn release(&self) -> Result<Released, Error> {
        let held = self.is_held();
        if self.released.swap(true, SeqCst) {
            return Ok(Released::Before);
        }
        let timeout = self.timeout;
        // Each release continues to its end on the thread of the node's client, also if this future is dropped.
        let answers = join_all(self.shares.iter().map(|share| {
            let (core, key, owner) = (
                share.node.core.clone(),
                self.key.clone(),
                self.owner.clone(),
            );
            let left = Share::of(&share.node, &key, &owner);
            let options = ReleaseOptions {
                check_expiry: !held,
                ..share.options()
            };
            left.unanswered.store(options.unanswered, SeqCst);
            let armed = share.armed.swap(false, SeqCst);
            let asked = async move {
                if !armed {
                    left.disarm();
                }
                let ask = |limit| core.backend.release(&key, &owner, options, limit);
                let answer = match core.ask_twice(timeout, ask).await {
                    // The first request released it, and its answer was lost.
                    (Ok(OwnerReply::NotOwner(_)), true) if held => Ok(OwnerReply::Done),
                    (answer, _) => answer,
                };
                core.queues.wake(&key);
                match &answer {
                    Ok(_) => left.disarm(),
                    // The drop of `left` tries again in the background.
                    Err(_) => left.unanswered.store(true, SeqCst),
                }
                answer
            };
            async move { share.node.core.run(&self.key, asked).await }
        }))
        .await;
        let (mut freed, mut gone) = (0, 0);
        let (mut holder, mut first) = (None, None);
        for answer in answers {
            match answer {
                Ok(OwnerReply::Done) => freed += 1,
                Ok(OwnerReply::NotOwner(owner)) => {
                    gone += 1;
                    holder = holder.or(owner);
                }
                Err(e) => {
                    first.get_or_insert(e);
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
            return Err(self.no_majority(freed, first));
        }
        Ok(Released::Now)
    }
}

impl Share {
    fn of(node: &LockClient, key: &Arc<str>, owner: &Arc<str>) -> Self {
        Self {
            node: node.clone(),
            key: key.clone(),
            owner: owner.clone(),
            unanswered: false.into(),
            armed: true.into(),
        }
    }

    fn disarm(&self) {
        self.armed.store(false, SeqCst);
    }

    fn options(&self) -> ReleaseOptions {
        ReleaseOptions {
            unanswered: self.unanswered.load(SeqCst),
            ..ReleaseOptions::default()
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.armed.load(SeqCst) {
            let options = self.options();
            let core = &self.node.core;
            core.release_in_background(&self.key, &self.owner, move || options);
        }
    }
}

/// How long a node may take to answer, if nobody says otherwise.
fn usual_timeout(lease: Duration) -> Duration {
    (lease / 20).clamp(Duration::from_millis(10), Duration::from_millis(500))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_is_more_than_half() {
        for (nodes, quorum) in [(3, 2), (4, 3), (5, 3), (6, 4), (7, 4)] {
            let nodes = (0..nodes).map(|_| LockClient::open("redis://127.0.0.1:1").unwrap());
            assert_eq!(Redlock::new(nodes).unwrap().quorum(), quorum);
        }
    }

    #[test]
    fn a_share_is_given_back_unless_it_was_disarmed() {
        let node = LockClient::open("redis://127.0.0.1:1").unwrap();
        let share = Share::of(&node, &"k".into(), &"me#1.2".into());
        assert!(share.armed.load(SeqCst) && !share.options().unanswered);
        share.unanswered.store(true, SeqCst);
        assert!(share.options().unanswered);
        share.disarm();
        assert!(!share.armed.load(SeqCst));
    }

    #[test]
    fn who_asks_again_is_told_for_how_long_others_have_it() {
        let held = TryRedlock::Held {
            votes: 1,
            holder: "b".to_owned(),
            remaining: Duration::from_secs(7),
        };
        assert_eq!(held_for(&Ok(held)), Duration::from_secs(7));
        let have = Error::TooFewNodes { have: 2 };
        assert_eq!(held_for(&Err(have)), Duration::ZERO);
    }

    #[test]
    fn a_grant_is_valid_for_the_lease_without_its_drift() {
        let (sent, ms) = (Boottime(5_000_000_000), Duration::from_millis);
        assert_eq!(valid_until(sent, ms(1000)), sent + ms(988));
        assert_eq!(valid_until(sent, ms(60_000)), sent + ms(59_398));
    }

    #[test]
    fn a_majority_becomes_free_when_as_many_as_it_lacks_are_over() {
        let seconds = Duration::from_secs;
        let held = |times: &[u64]| -> Vec<_> {
            let held = times.iter().map(|t| (seconds(*t), t.to_string()));
            held.collect()
        };
        let way = |votes, times: &[u64], quorum| {
            let found = in_the_way(votes, held(times), quorum);
            found.map(|(left, owner)| (left.as_secs(), owner.parse().unwrap()))
        };
        assert_eq!(way(1, &[9, 4], 2), Some((4, 4)));
        assert_eq!(way(0, &[9, 4], 2), Some((9, 9)));
        assert_eq!(way(0, &[7, 9, 4, 1], 3), Some((7, 7)));
        assert_eq!(way(2, &[7, 9], 4), Some((9, 9)));
        for (votes, times) in [(0, &[9][..]), (1, &[]), (0, &[])] {
            assert_eq!(way(votes, times, 2), None);
        }
    }

    #[test]
    fn a_node_may_take_a_small_part_of_the_lease() {
        let ms = Duration::from_millis;
        for (lease, timeout) in [(100, 10), (1000, 50), (5000, 250), (60_000, 500)] {
            assert_eq!(usual_timeout(ms(lease)), ms(timeout));
        }
    }
}
