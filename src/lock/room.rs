//! Where the local callers for one key meet: they queue, and hear of releases together.

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

/// The rooms of a client, by key; each exists as long as somebody is in it.
#[derive(Default)]
pub(super) struct Rooms(Mutex<HashMap<Arc<str>, Place>>);

struct Place {
    room: Arc<Room>,
    visitors: usize,
}

pub(super) struct Room {
    /// Who has it asks the store; tokio gives it out in the order in which it was asked for.
    pub(super) turn: Arc<tokio::sync::Mutex<()>>,
    /// Counts the releases that were heard of.
    bell: watch::Sender<u64>,
    /// The owner who has the lock, as far as anybody here knows, and until when at most.
    held: Mutex<Option<(Arc<str>, Boottime)>>,
    /// The store was asked to tell of releases by others; and does.
    asked: AtomicBool,
    listening: AtomicBool,
}

/// Somebody in a room.
pub(super) struct Visit {
    core: Arc<Core>,
    key: Arc<str>,
    room: Arc<Room>,
}

/// Hears the releases after it was marked.
pub(super) struct Bell(watch::Receiver<u64>);

/// Whether the client with this id made the owner.
pub(super) fn made_by(id: &str, owner: &str) -> bool {
    owner
        .rsplit_once('#')
        .and_then(|(_, nonce)| nonce.strip_prefix(id))
        .is_some_and(|rest| rest.starts_with('.'))
}

impl Rooms {
    fn places(&self) -> MutexGuard<'_, HashMap<Arc<str>, Place>> {
        self.0.lock()
    }

    pub(super) fn enter(&self, key: &Arc<str>, core: Arc<Core>) -> Visit {
        let mut places = self.places();
        let place = places.entry(key.clone()).or_insert_with(|| Place {
            room: Arc::new(Room {
                turn: Arc::default(),
                bell: watch::Sender::new(0),
                held: Mutex::new(None),
                asked: AtomicBool::new(false),
                listening: AtomicBool::new(false),
            }),
            visitors: 0,
        });
        place.visitors += 1;
        let room = place.room.clone();
        drop(places);
        Visit {
            core,
            key: key.clone(),
            room,
        }
    }

    /// The lock on `key` was given back, or may have been.
    pub(super) fn ring(&self, key: &str) {
        if let Some(place) = self.places().get(key) {
            place.room.ring();
        }
    }

    /// Releases may have gone unheard.
    #[cfg(feature = "sqlite")]
    pub(super) fn ring_all(&self) {
        for place in self.places().values() {
            place.room.ring();
        }
    }

    /// Nobody listens any more: releases go unheard until somebody does again.
    pub(super) fn deafen(&self) {
        for place in self.places().values() {
            if place.room.listening.swap(false, Ordering::SeqCst) {
                place.room.ring();
            }
        }
    }
}

impl Room {
    fn held(&self) -> MutexGuard<'_, Option<(Arc<str>, Boottime)>> {
        self.held.lock()
    }

    fn ring(&self) {
        let mut held = self.held();
        *held = None;
        self.bell.send_modify(|n| *n += 1);
    }

    pub(super) fn bell(&self) -> Bell {
        Bell(self.bell.subscribe())
    }

    /// Who is known to have it, and until when at most.
    pub(super) fn known(&self) -> Option<(Arc<str>, Boottime)> {
        self.held()
            .clone()
            .filter(|(_, until)| *until > Boottime::now())
    }

    /// Takes down what the store said, unless the bell has rung since it was asked.
    pub(super) fn know(&self, bell: &Bell, owner: &str, until: Boottime) {
        let mut held = self.held();
        if bell.0.has_changed().is_ok_and(|rung| !rung) {
            *held = Some((owner.into(), until));
        }
    }

    /// What was known of this owner is out of date.
    pub(super) fn forget(&self, owner: &str) {
        let mut held = self.held();
        if let Some((_, until)) = held.as_ref().filter(|(o, _)| **o == *owner)
            && *until <= Boottime::now()
        {
            *held = None;
        }
    }

    pub(super) fn listening(&self) -> bool {
        self.listening.load(Ordering::SeqCst)
    }

    /// Whoever leaves last has to tell the store.
    pub(super) fn asks(&self) {
        self.asked.store(true, Ordering::SeqCst);
    }

    /// From now on releases by others are heard of; those before may have been missed.
    pub(super) fn listens(&self) {
        self.listening.store(true, Ordering::SeqCst);
        *self.held() = None;
    }
}

impl Bell {
    pub(super) fn mark_unchanged(&mut self) {
        self.0.mark_unchanged();
    }

    pub(super) async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl std::ops::Deref for Visit {
    type Target = Room;
    fn deref(&self) -> &Room {
        &self.room
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut places = self.core.rooms.places();
        if let Some(place) = places.get_mut(&self.key) {
            place.visitors -= 1;
            if place.visitors == 0 {
                places.remove(&self.key);
                // Under the lock of the map: a new room for this key asks to listen after this.
                if self.room.asked.load(Ordering::SeqCst) {
                    self.core.backend.forget(&self.key);
                }
            }
        }
    }
}
