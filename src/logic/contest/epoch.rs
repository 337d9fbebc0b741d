//! The store's epoch, as one instance knows it: the time from one start of the server, or loss of its data, to the
//! next.

use std::{sync::Arc, time::Duration};

use crate::model::Boottime;

/// What is known of the store's epoch.
#[derive(Debug, Clone)]
pub struct Epoch {
    pub incarnation: Arc<str>,
    /// Changes when the data is lost under the same incarnation.
    pub id: Arc<str>,
    /// Unix ms of the store's clock.
    pub born: i64,
    /// An instance has vouched for it.
    pub open: bool,
    /// The longest quarantine that any instance needs.
    pub quarantine: Duration,
    /// When this instance saw it first.
    pub first_seen: Boottime,
    /// When this instance saw it open first.
    pub open_seen: Option<Boottime>,
    /// Another instance that lives was there before this epoch: it may know more of a job than one that has not had
    /// the job since.
    pub others_know: bool,
}

/// How long an instance that has not had a job all the time lets the others go first when the store lost the job's
/// state: what they owe begins with what they know.
const OTHERS_FIRST: Duration = Duration::from_secs(2);

impl Epoch {
    /// How long until the state of a job from before this epoch may be adopted: every lease from before it has been
    /// reclaimed or is over, if none needs longer than `quarantine` to end.
    pub fn adoptable_in(&self, quarantine: Duration, now: Boottime) -> Duration {
        match self.open {
            true => Duration::ZERO,
            false => (self.first_seen + quarantine).since(now),
        }
    }
    /// The same for an instance that has not had the job since before this epoch.
    pub fn adoptable_last_in(&self, quarantine: Duration, now: Boottime) -> Duration {
        let first = self.adoptable_in(quarantine, now);
        if !self.others_know {
            return first;
        }
        let from = self.open_seen.unwrap_or(self.first_seen + quarantine);
        first.max((from + OTHERS_FIRST).since(now))
    }
    fn is(&self, other: &Self) -> bool {
        self.incarnation == other.incarnation && self.id == other.id
    }
}

/// What names an epoch.
#[derive(Debug, Clone, PartialEq)]
pub struct EpochName {
    incarnation: Arc<str>,
    id: Arc<str>,
}

impl EpochName {
    pub fn of(epoch: &Epoch) -> Self {
        Self {
            incarnation: epoch.incarnation.clone(),
            id: epoch.id.clone(),
        }
    }
}

/// What an answer of the store says about its epoch, compared with the answer before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EpochChange {
    /// The first answer, or nothing new.
    None,
    /// The first answer, and the epoch is not open yet.
    FirstSeenClosed,
    /// The server was restarted, or lost or changed its data.
    Replaced,
    /// The quarantine is over.
    Opened,
}

/// Follows the store's epoch from answer to answer.
#[derive(Debug, Clone, Default)]
pub struct EpochWatch(Option<Epoch>);

impl EpochWatch {
    pub fn known(&self) -> Option<&Epoch> {
        self.0.as_ref()
    }

    /// Takes in an answer. `seen.first_seen` is when the answer was received; an epoch that is known keeps its own.
    pub fn learn(&mut self, seen: Epoch) -> EpochChange {
        let known = self.0.take();
        let same = known.as_ref().filter(|e| e.is(&seen));
        let change = match (&known, same) {
            (None, _) if !seen.open => EpochChange::FirstSeenClosed,
            (Some(_), None) => EpochChange::Replaced,
            (_, Some(before)) if seen.open && !before.open => EpochChange::Opened,
            _ => EpochChange::None,
        };
        let first_seen = same.map_or(seen.first_seen, |e| e.first_seen);
        let open_seen = same.and_then(|e| e.open_seen);
        self.0 = Some(Epoch {
            first_seen,
            open_seen: open_seen.or(seen.open.then_some(seen.first_seen)),
            ..seen
        });
        change
    }

    /// The epoch that this instance vouches for at `now`, so that the store may open it: it has seen it for a whole
    /// quarantine, its own (`needed`) and the longest that the fleet told the store.
    pub fn vouched(&self, needed: Duration, now: Boottime) -> Option<(Arc<str>, Arc<str>)> {
        let epoch = self.0.as_ref()?;
        let seen_long_enough = now.since(epoch.first_seen) >= needed.max(epoch.quarantine);
        (!epoch.open && seen_long_enough).then(|| (epoch.incarnation.clone(), epoch.id.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(id: &str, open: bool, at: u64) -> Epoch {
        Epoch {
            incarnation: "i".into(),
            id: id.into(),
            born: 0,
            open,
            quarantine: Duration::from_secs(9),
            first_seen: Boottime(at * 1_000_000_000),
            open_seen: None,
            others_know: false,
        }
    }

    #[test]
    fn an_instance_that_may_know_less_lets_the_others_go_first() {
        let second = |n: u64| Boottime(n * 1_000_000_000);
        let (mut epochs, nine) = (EpochWatch::default(), Duration::from_secs(9));
        let waits = |epochs: &EpochWatch, at| {
            let epoch = epochs.known().expect("one");
            let both = [
                epoch.adoptable_in(nine, second(at)),
                epoch.adoptable_last_in(nine, second(at)),
            ];
            both.map(|wait| wait.as_secs())
        };
        let others = |epoch: Epoch| Epoch {
            others_know: true,
            ..epoch
        };
        epochs.learn(seen("a", false, 10));
        assert_eq!(waits(&epochs, 15), [4, 4]);
        epochs.learn(others(seen("a", false, 11)));
        assert_eq!(waits(&epochs, 15), [4, 6]);
        assert_eq!(waits(&epochs, 20), [0, 1]);
        // Opened by another instance, which has waited for longer.
        epochs.learn(others(seen("a", true, 16)));
        epochs.learn(others(seen("a", true, 17)));
        assert_eq!(waits(&epochs, 17), [0, 1]);
        assert_eq!(waits(&epochs, 18), [0, 0]);
    }

    #[test]
    fn an_epoch_is_vouched_for_after_the_longest_quarantine_since_it_was_seen_first() {
        let mut epochs = EpochWatch::default();
        let second = |n: u64| Boottime(n * 1_000_000_000);
        assert_eq!(epochs.vouched(Duration::ZERO, second(100)), None);
        assert_eq!(
            epochs.learn(seen("a", false, 10)),
            EpochChange::FirstSeenClosed
        );
        assert_eq!(epochs.learn(seen("a", false, 12)), EpochChange::None);
        let vouched = |epochs: &EpochWatch, needed, at| {
            epochs
                .vouched(Duration::from_secs(needed), second(at))
                .is_some()
        };
        assert!(!vouched(&epochs, 1, 18));
        assert!(vouched(&epochs, 1, 19));
        assert!(!vouched(&epochs, 20, 29));
        assert!(vouched(&epochs, 20, 30));
        // Another epoch begins anew; an open one needs nobody's word.
        assert_eq!(epochs.learn(seen("b", false, 40)), EpochChange::Replaced);
        assert!(!vouched(&epochs, 1, 48));
        assert_eq!(epochs.learn(seen("b", true, 49)), EpochChange::Opened);
        assert!(!vouched(&epochs, 1, 99));
    }
    #[test]
    fn the_first_answer_changes_nothing_but_says_whether_to_wait() {
        for (open, change) in [
            (true, EpochChange::None),
            (false, EpochChange::FirstSeenClosed),
        ] {
            let mut epochs = EpochWatch::default();
            assert_eq!(epochs.learn(seen("a", open, 10)), change);
            assert_eq!(epochs.learn(seen("a", open, 11)), EpochChange::None);
            // The same id in another incarnation is another epoch.
            let other = Epoch {
                incarnation: "j".into(),
                ..seen("a", open, 12)
            };
            assert_eq!(epochs.learn(other), EpochChange::Replaced);
            let since = epochs.known().map(|e| e.first_seen);
            assert_eq!(since, Some(Boottime(12_000_000_000)));
        }
    }
}
