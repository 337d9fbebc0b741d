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

struct Entry {
    queue: Arc<WaitQueue>,
    waiters: usize,
}

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
        let entry = entries.entry(key.clone()).or_insert_with(|| Entry {
            queue: Arc::new(WaitQueue {
                turn: Arc::default(),
                releases: watch::Sender::new(()),
                held: Mutex::new(None),
                asked_to_subscribe: AtomicBool::new(false),
                subscribed: AtomicBool::new(false),
            }),
            waiters: 0,
        });
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
            .filter(|(_, until)| *until > Boottime::now())
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
            && *until <= Boottime::now()
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
