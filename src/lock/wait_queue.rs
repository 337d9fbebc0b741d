//! Where the waiters of this client for one key queue, and are woken together by its releases.

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

/// The queues of a client, by key; each exists as long as somebody is in it.
#[derive(Default)]
pub(super) struct WaitQueues(Mutex<HashMap<Arc<str>, Entry>>);

struct Entry {
    queue: Arc<WaitQueue>,
    waiters: usize,
}

pub(super) struct WaitQueue {
    /// Who has it asks the store; tokio gives it out in the order in which it was asked for.
    pub(super) turn: Arc<tokio::sync::Mutex<()>>,
    /// Counts the releases that this client knows of.
    releases: watch::Sender<u64>,
    /// The owner who has the lock, as far as anybody here knows, and until when at most.
    held: Mutex<Option<(Arc<str>, Boottime)>>,
    /// The store was asked to tell of releases by others; and does.
    asked_to_subscribe: AtomicBool,
    subscribed: AtomicBool,
}

/// Somebody in a queue.
pub(super) struct Waiter {
    core: Arc<Core>,
    key: Arc<str>,
    queue: Arc<WaitQueue>,
}

/// Tells of the releases after it was marked.
pub(super) struct Wakeup(watch::Receiver<u64>);

/// Whether the client with this id made the owner.
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
                releases: watch::Sender::new(0),
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

    /// The lock on `key` was given back, or may have been.
    pub(super) fn wake(&self, key: &str) {
        if let Some(entry) = self.entries().get(key) {
            entry.queue.wake();
        }
    }

    /// Messages of releases may have been lost.
    #[cfg(feature = "sqlite")]
    pub(super) fn wake_all(&self) {
        for entry in self.entries().values() {
            entry.queue.wake();
        }
    }

    /// The subscription has ended: releases by others are not known of until there is one again.
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
        self.releases.send_modify(|n| *n += 1);
    }

    pub(super) fn wakeup(&self) -> Wakeup {
        Wakeup(self.releases.subscribe())
    }

    /// Who is known to have it, and until when at most.
    pub(super) fn known_holder(&self) -> Option<(Arc<str>, Boottime)> {
        self.held()
            .clone()
            .filter(|(_, until)| *until > Boottime::now())
    }

    /// Takes down who has it, as the store said, unless there was a release since the store was asked.
    pub(super) fn note_holder(&self, wakeup: &Wakeup, owner: &str, until: Boottime) {
        let mut held = self.held();
        if wakeup.0.has_changed().is_ok_and(|woken| !woken) {
            *held = Some((owner.into(), until));
        }
    }

    /// What was known of this owner is out of date.
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

    /// The store is about to be asked to tell of releases. Whoever leaves last has to tell it to stop.
    pub(super) fn will_subscribe(&self) {
        self.asked_to_subscribe.store(true, Ordering::SeqCst);
    }

    /// From now on releases by others are known of; those before may have been missed.
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
                // Under the lock of the map: a new queue for this key subscribes after this.
                if self.queue.asked_to_subscribe.load(Ordering::SeqCst) {
                    self.core.backend.unsubscribe(&self.key);
                }
            }
        }
    }
}
