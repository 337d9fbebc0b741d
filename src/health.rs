//! What a daemon knows of its own health and work, for those who ask from outside: over HTTP. The parts write here what
//! they see; nothing in the daemon depends on it.

mod figures;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::watch;

pub use self::figures::Figures;
#[cfg(feature = "notify")]
pub use self::figures::Told;

use crate::{
    clock::Boottime,
    store::{Error, Fleet, Problem, Reply},
};

/// The health of one instance.
#[derive(Debug, Default)]
pub struct Health {
    /// When the dispatcher last went round, ns of [`Boottime`]; 0: never.
    round: AtomicU64,
    pulse: watch::Sender<Pulse>,
    pub figures: Figures,
}

/// What the last heartbeats found.
#[derive(Debug, Clone, Default)]
pub struct Pulse {
    /// The last answer.
    pub fleet: Option<Arc<Reply<Fleet>>>,
    /// How long it took.
    pub latency: Duration,
    /// The store does not answer.
    pub away: Option<Away>,
    /// What is wrong with the store's settings, in words.
    pub problems: Arc<[String]>,
}

/// The store does not answer.
#[derive(Debug, Clone)]
pub struct Away {
    pub why: Arc<str>,
    /// The same in a few words, without the store's address.
    pub kind: &'static str,
    pub since: Boottime,
}

impl Health {
    /// The dispatcher goes round.
    pub fn round(&self) {
        self.round.store(Boottime::now().0, Ordering::Relaxed);
    }

    /// How long ago the dispatcher last went round; None: it has not begun.
    pub fn since_round(&self) -> Option<Duration> {
        let at = self.round.load(Ordering::Relaxed);
        (at > 0).then(|| Boottime::now().since(Boottime(at)))
    }

    pub fn pulse(&self) -> watch::Receiver<Pulse> {
        self.pulse.subscribe()
    }

    /// The store answered a heartbeat. Copies nothing if nobody listens.
    pub fn answered(&self, reply: &Reply<Fleet>, problems: &[Problem]) {
        if self.pulse.receiver_count() == 0 {
            return;
        }
        self.pulse.send_modify(|pulse| {
            pulse.latency = reply.received.since(reply.sent);
            pulse.fleet = Some(Arc::new(reply.clone()));
            pulse.away = None;
            pulse.problems = problems.iter().map(|p| p.text.clone()).collect();
        });
    }

    /// The store did not answer a heartbeat.
    pub fn failed(&self, error: &Error) {
        self.figures.heartbeats_failed.inc();
        if self.pulse.receiver_count() == 0 {
            return;
        }
        self.pulse.send_modify(|pulse| {
            let since = pulse.away.take().map_or_else(Boottime::now, |a| a.since);
            pulse.away = Some(Away {
                why: error.to_string().into(),
                kind: error.kind(),
                since,
            });
        });
    }
}
