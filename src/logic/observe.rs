//! Judges a lease that another instance holds: when it has lapsed.
//! Both watchers use this rule: the daemon's `Contender` and the library's `Elector`.

use std::time::Duration;

use super::claim::{Observed, Open};
use crate::model::Boottime;

/// One open entry, as it was seen last, and since when it has not changed.
///
/// It has lapsed when it was seen unchanged for its whole length. The entry carries that length: what its holder asked
/// for, which may be more or less than our own leases have.
#[derive(Debug, Clone)]
pub struct ObservedLease {
    observed: Observed,
    length: Duration,
    since: Boottime,
    held: bool,
}

impl ObservedLease {
    /// The first look. `received`: after the answer that showed it.
    pub fn new(open: &Open, received: Boottime) -> Self {
        Self {
            observed: state(open),
            length: length(open),
            since: received,
            held: open.next_attempt.is_none(),
        }
    }

    /// One more look. If anything has changed, the time begins anew.
    pub fn update(&mut self, open: &Open, received: Boottime) {
        let now = Self::new(open, received);
        let same = self.observed == now.observed && self.length == now.length;
        *self = Self {
            since: if !same { received } else { self.since },
            ..now
        };
    }

    /// The length that the entry carries.
    pub fn length(&self) -> Duration {
        self.length
    }

    /// When it lapses unless it changes.
    pub fn expiry(&self) -> Boottime {
        self.since + self.length
    }

    /// The proof, once it has lapsed. An entry that nobody holds, because its next attempt is awaited, does not lapse.
    pub fn lapsed(&self, now: Boottime) -> Option<&Observed> {
        (self.held && now >= self.expiry()).then_some(&self.observed)
    }
}

/// After this instance could not poll for a while, a holder gets this much time before its lease counts as lapsed: most
/// likely the store did not answer the holder either, and the holder retries once a second. Only the holder may know
/// how its run ended.
const HOLDER_GRACE: Duration = Duration::from_secs(3);

/// A lease that this instance polls: as [`ObservedLease`], and it knows when polling failed for a while.
#[derive(Debug, Clone)]
pub struct WatchedLease {
    seen: ObservedLease,
    /// When this instance polled last.
    looked: Boottime,
    /// The lease does not count as lapsed before this, because polling failed for a while. Set once for each state of
    /// the entry.
    not_before: Option<Boottime>,
}

impl WatchedLease {
    pub fn new(open: &Open, received: Boottime) -> Self {
        Self {
            seen: ObservedLease::new(open, received),
            looked: received,
            not_before: None,
        }
    }

    /// The entry, as an answer received at `received` showed it.
    pub fn look(&mut self, open: &Open, received: Boottime) {
        let overslept = self.overslept(received);
        let before = self.seen.expiry();
        self.seen.update(open, received);
        self.looked = received;
        if self.seen.expiry() != before {
            self.not_before = None;
        } else if overslept && self.not_before.is_none() {
            self.not_before = Some(received + HOLDER_GRACE.min(self.seen.length()));
        }
    }

    /// The length that the entry carries.
    pub fn length(&self) -> Duration {
        self.seen.length()
    }

    /// True: polling failed for a while, because each instance polls twice in a lease.
    fn overslept(&self, now: Boottime) -> bool {
        now.since(self.looked) > self.seen.length() * 3 / 4
    }

    /// When the lease lapses unless the entry changes.
    pub fn expiry(&self) -> Boottime {
        let expiry = self.seen.expiry();
        self.not_before.map_or(expiry, |at| at.max(expiry))
    }

    /// The proof that the lease has lapsed, once this instance has observed that.
    pub fn lapsed(&self, now: Boottime) -> Option<&Observed> {
        let seen = self.seen.lapsed(now)?;
        (now >= self.expiry() && !self.overslept(now)).then_some(seen)
    }
}

fn state(open: &Open) -> Observed {
    Observed {
        run: open.run.id,
        seq: open.seq,
        incarnation: open.incarnation.clone(),
    }
}

/// How long a lease is, as its entry says.
pub fn length(open: &Open) -> Duration {
    Duration::from_millis(open.run.lease.max(1) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        logic::claim::NextAttempt,
        model::{InstanceId, Occurrence, Run, RunId, Trigger},
    };

    fn ms(n: u64) -> Boottime {
        Boottime(n * 1_000_000)
    }

    fn open(seq: u32, lease: i64) -> Open {
        Open {
            run: Run {
                occurrence: Occurrence(1),
                attempt: 1,
                trigger: Trigger::Schedule,
                key: None,
                id: RunId(uuid::Uuid::nil()),
                instance: InstanceId::new("a"),
                host: String::new(),
                lease,
                definition: String::new(),
                granted_at: 0,
            },
            seq,
            incarnation: "1".to_owned(),
            renewed_at: 0,
            stop: None,
            next_attempt: None,
            by: None,
            stopped_by: None,
        }
    }

    #[test]
    fn a_lease_lapses_when_it_was_seen_unchanged_for_the_length_that_it_carries() {
        for lease in [500, 15_000] {
            let mut seen = ObservedLease::new(&open(1, lease), ms(1000));
            let end = 1000 + lease as u64;
            seen.update(&open(1, lease), ms(1400));
            assert_eq!(seen.expiry(), ms(end));
            assert!(seen.lapsed(ms(end - 1)).is_none());
            assert_eq!(seen.lapsed(ms(end)).unwrap().seq, 1);
        }
    }

    #[test]
    fn whatever_changes_begins_anew() {
        let first = open(1, 500);
        for changed in [
            open(2, 500),
            open(1, 700),
            Open {
                incarnation: "2".to_owned(),
                ..open(1, 500)
            },
            Open {
                run: Run {
                    id: RunId(uuid::Uuid::max()),
                    ..open(1, 500).run
                },
                ..open(1, 500)
            },
        ] {
            let mut seen = ObservedLease::new(&first, ms(0));
            seen.update(&changed, ms(499));
            let end = 499 + changed.run.lease as u64;
            assert!(seen.lapsed(ms(end - 1)).is_none(), "{changed:?}");
            let proof = seen.lapsed(ms(end)).unwrap();
            let is = (proof.run, proof.seq, &proof.incarnation);
            assert_eq!(is, (changed.run.id, changed.seq, &changed.incarnation));
        }
    }

    #[test]
    fn what_nobody_holds_does_not_lapse() {
        let next_attempt = NextAttempt {
            at: 0,
            trigger: Trigger::Retry,
        };
        let mut seen = ObservedLease::new(&open(1, 500), ms(0));
        seen.update(
            &Open {
                next_attempt: Some(next_attempt),
                ..open(1, 500)
            },
            ms(10),
        );
        assert!(seen.lapsed(ms(10_000)).is_none());
    }

    #[test]
    fn a_sighting_tells_the_length_that_its_entry_carries() {
        assert_eq!(
            ObservedLease::new(&open(1, 1_500), ms(0)).length(),
            Duration::from_millis(1_500)
        );
    }

    /// Looks at these times, in ms, at an entry that does not change.
    fn looked(times: &[u64]) -> WatchedLease {
        let mut watch = WatchedLease::new(&open(1, 10_000), ms(times[0]));
        times
            .iter()
            .for_each(|&t| watch.look(&open(1, 10_000), ms(t)));
        watch
    }

    #[test]
    fn a_lease_that_is_looked_at_all_the_time_lapses_at_its_end() {
        let watch = looked(&[0, 5_000, 9_999]);
        assert!(watch.lapsed(ms(9_999)).is_none());
        assert!(watch.lapsed(ms(10_000)).is_some());
    }

    #[test]
    fn after_a_time_without_a_look_its_holder_has_time_to_renew() {
        // A proof that was not looked at lately is none.
        assert!(looked(&[0, 5_000]).lapsed(ms(15_000)).is_none());
        let watch = looked(&[0, 5_000, 15_000]);
        assert_eq!(watch.expiry(), ms(18_000));
        assert!(watch.lapsed(ms(17_999)).is_none());
        assert!(watch.lapsed(ms(18_000)).is_some());
        // Once: one who can look now and then only is not kept waiting for ever.
        assert!(looked(&[0, 15_000, 30_000]).lapsed(ms(30_000)).is_some());
    }

    #[test]
    fn what_has_changed_meanwhile_begins_anew() {
        let mut watch = looked(&[0, 15_000]);
        watch.look(&open(2, 10_000), ms(16_000));
        assert_eq!(watch.expiry(), ms(26_000));
    }
}
