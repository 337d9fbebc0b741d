//! The queues in which this client's waiters wait, one for each key; a release wakes the queue of its key.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::Core;
use crate::clock::Boottime;

/// The queues of a client, by key; each exists as long as it has waiters.
#[derive(Default)]
pub(super) struct WaitQueues(Mutex<HashMap<Arc<str>, Entry>>);

#[derive(Default)]
struct Entry {
    queue: Arc<WaitQueue>,
    waiters: usize,
}

#[derive(Default)]
pub(super) struct WaitQueue {
    /// The waiter that has it asks the store; tokio hands it out in the order in which the waiters came.
    pub(super) turn: Arc<tokio::sync::Mutex<()>>,
    /// Changes with each release that this client knows of.
    releases: watch::Sender<()>,
    /// The owner that holds the lock, as far as this client knows, and until when at most.
    held: Mutex<Option<(Arc<str>, Boottime)>>,
    /// Whether the store was asked to announce releases by others, and whether it does so now.
    asked_to_subscribe: AtomicBool,
    subscribed: AtomicBool,
}

/// A place in a queue.
pub(super) struct Waiter {
    core: Arc<Core>,
    key: Arc<str>,
    queue: Arc<WaitQueue>,
}

/// Notifies of the releases that come after it was marked.
pub(super) struct Wakeup(watch::Receiver<()>);

/// Whether the client with this id made this owner.
pub(super) fn made_by(id: &str, owner: &str) -> bool {
    owner
        .rsplit_once('#')
        .and_then(|(_, nonce)| nonce.strip_prefix(id))
        .is_some_and(|rest| rest.starts_with('.'))
}

impl WaitQueues {
    fn entries(&self) -> MutexGuard<'_, HashMap<Arc<str>, Entry>> {
        self.0.lock()
    }

    pub(super) fn join(&self, key: &Arc<str>, core: Arc<Core>) -> Waiter {
        let mut entries = self.entries();
        let entry = entries.entry(key.clone()).or_default();
        entry.waiters += 1;
        let queue = entry.queue.clone();
        drop(entries);
        Waiter {
            core,
            key: key.clone(),
            queue,
        }
    }

    /// To be called when the lock on `key` was released, or may have been.
    pub(super) fn wake(&self, key: &str) {
        if let Some(entry) = self.entries().get(key) {
            entry.queue.wake();
        }
    }

    /// To be called when messages of releases may have been lost.
    #[cfg(feature = "sqlite")]
    pub(super) fn wake_all(&self) {
        for entry in self.entries().values() {
            entry.queue.wake();
        }
    }

    /// To be called when the subscription has ended: until there is another, this client does not learn of releases by
    /// others.
    pub(super) fn subscription_ended(&self) {
        for entry in self.entries().values() {
            if entry.queue.subscribed.swap(false, Ordering::SeqCst) {
                entry.queue.wake();
            }
        }
    }
}

impl WaitQueue {
    fn held(&self) -> MutexGuard<'_, Option<(Arc<str>, Boottime)>> {
        self.held.lock()
    }

    fn wake(&self) {
        let mut held = self.held();
        *held = None;
        self.releases.send_replace(());
    }

    pub(super) fn wakeup(&self) -> Wakeup {
        Wakeup(self.releases.subscribe())
    }

    /// The known holder, and until when it holds the lock at most.
    pub(super) fn known_holder(&self) -> Option<(Arc<str>, Boottime)> {
        self.held()
            .clone()
            .filter(|(_, until)| !until.since(Boottime::now()).is_zero())
    }

    /// Notes the holder that the store has named, unless there was a release since the store was asked.
    pub(super) fn note_holder(&self, wakeup: &Wakeup, owner: &str, until: Boottime) {
        let mut held = self.held();
        if wakeup.0.has_changed().is_ok_and(|woken| !woken) {
            *held = Some((owner.into(), until));
        }
    }

    /// Forgets this holder if its time has passed.
    pub(super) fn forget_holder(&self, owner: &str) {
        let mut held = self.held();
        if let Some((_, until)) = held.as_ref().filter(|(o, _)| **o == *owner)
            && until.since(Boottime::now()).is_zero()
        {
            *held = None;
        }
    }

    pub(super) fn is_subscribed(&self) -> bool {
        self.subscribed.load(Ordering::SeqCst)
    }

    /// To be called before the store is asked to announce releases. The last waiter that leaves then unsubscribes.
    pub(super) fn will_subscribe(&self) {
        self.asked_to_subscribe.store(true, Ordering::SeqCst);
    }

    /// From now on this client learns of releases by others; it may have missed earlier ones.
    pub(super) fn has_subscribed(&self) {
        self.subscribed.store(true, Ordering::SeqCst);
        *self.held() = None;
    }
}

impl Wakeup {
    pub(super) fn mark_unchanged(&mut self) {
        self.0.mark_unchanged();
    }

    pub(super) async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl std::ops::Deref for Waiter {
    type Target = WaitQueue;
    fn deref(&self) -> &WaitQueue {
        &self.queue
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut entries = self.core.queues.entries();
        if let Some(entry) = entries.get_mut(&self.key) {
            entry.waiters -= 1;
            if entry.waiters == 0 {
                entries.remove(&self.key);
                // Under the lock of the map, so that a new queue for this key subscribes after this.
                if self.queue.asked_to_subscribe.load(Ordering::SeqCst) {
                    self.core.backend.unsubscribe(&self.key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn an_owner_is_of_the_client_whose_id_it_has() {
        assert!(made_by("ab", "host#ab.7") && made_by("ab", "a#b#ab.7"));
        for other in ["host#abc.7", "host#ab", "host#a.7", "ab.7", "host"] {
            assert!(!made_by("ab", other), "{other}");
        }
    }

    #[test]
    fn a_holder_is_known_until_its_time_passes_or_the_lock_is_released() {
        let queue = WaitQueue::default();
        let known = || queue.known_holder().map(|(owner, _)| owner.to_string());
        let (past, future) = (Boottime(0), Boottime::now() + Duration::from_secs(3600));
        let mut wakeup = queue.wakeup();
        assert_eq!(known(), None);
        queue.note_holder(&wakeup, "a", future);
        queue.forget_holder("a");
        assert_eq!(known().as_deref(), Some("a"));
        queue.note_holder(&wakeup, "b", past);
        assert_eq!(known(), None);
        queue.forget_holder("a");
        assert!(queue.held().is_some());
        queue.forget_holder("b");
        assert!(queue.held().is_none());
        // What was asked before a release says nothing of the time after it.
        queue.note_holder(&wakeup, "a", future);
        assert_eq!(wakeup.changed().now_or_never(), None);
        queue.wake();
        assert_eq!(known(), None);
        queue.note_holder(&wakeup, "a", future);
        assert_eq!(known(), None);
        assert_eq!(wakeup.changed().now_or_never(), Some(()));
        queue.note_holder(&wakeup, "a", future);
        // Who has subscribed may have missed a release before.
        assert!(!queue.is_subscribed() && known().is_some());
        queue.has_subscribed();
        assert!(queue.is_subscribed() && known().is_none());
        queue.wake();
        wakeup.mark_unchanged();
        assert_eq!(wakeup.changed().now_or_never(), None);
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn a_queue_exists_as_long_as_it_has_waiters() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", dir.path().join("locks.db").display());
        let core = crate::LockClient::open(&url).unwrap().core;
        let (queues, key) = (core.queues.clone(), Arc::from("k"));
        let first = queues.join(&key, core.clone());
        let second = queues.join(&key, core.clone());
        let (mut at_first, mut at_second) = (first.wakeup(), second.wakeup());
        let mut woken = || [&mut at_first, &mut at_second].map(|w| w.changed().now_or_never());
        let wakes: [fn(&WaitQueues); 2] = [|q| q.wake("k"), WaitQueues::wake_all];
        for wake in wakes {
            assert_eq!(woken(), [None; 2]);
            wake(&queues);
            assert_eq!(woken(), [Some(()); 2]);
        }
        queues.subscription_ended();
        assert_eq!(woken(), [None; 2]);
        second.has_subscribed();
        queues.subscription_ended();
        assert!(!first.is_subscribed());
        assert_eq!(woken(), [Some(()); 2]);
        drop(first);
        assert_eq!(queues.entries().len(), 1);
        drop(second);
        assert_eq!(queues.entries().len(), 0);
    }
}
