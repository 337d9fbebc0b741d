//! What an instance knows of a lease that another holds: when it has lapsed, and how long a quarantine has to last for
//! it. The one rule for both watchers, the daemon's `Contender` and the library's `Elector`.

use std::time::Duration;

use super::claim::{Observed, Open};
use super::lease::Lease;
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
            since: if same { self.since } else { received },
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

/// How long nothing may be granted after the store lost its data, for a caller whose leases are like `own`, who needed
/// `known` so far, and has now seen `open`. The run that holds `open` keeps the lease that it was granted, and after
/// the loss nobody can look up how long that is.
pub fn quarantine(own: &Lease, known: Duration, open: &Open) -> Duration {
    match length(open) {
        length if length > own.length => known.max(own.quarantine_for(length)),
        _ => known.max(own.quarantine),
    }
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
    fn a_longer_lease_lengthens_the_quarantine_and_a_shorter_one_changes_nothing() {
        let own = Lease::new(Duration::from_secs(2), 0.01).unwrap();
        let long = Lease::new(Duration::from_secs(60), 0.01).unwrap();
        let known = quarantine(&own, Duration::ZERO, &open(1, 500));
        assert_eq!(known, own.quarantine);
        let longer = quarantine(&own, known, &open(1, 60_000));
        assert!(longer >= long.quarantine, "{longer:?}");
        assert_eq!(quarantine(&own, longer, &open(1, 500)), longer);
    }

    #[test]
    fn a_sighting_tells_the_length_that_its_entry_carries() {
        assert_eq!(
            ObservedLease::new(&open(1, 1_500), ms(0)).length(),
            Duration::from_millis(1_500)
        );
    }
}
