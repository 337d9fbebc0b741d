//! The quarantine: how long nothing is granted after the store lost its data, so that each run of before has ended.
//! [`Lease::new`] says how long one is for a lease of its own length; `contest::epoch` says when it ends.

use std::time::Duration;

use super::{claim::Open, lease::Lease, observe::length};

/// How long nothing may be granted after the store lost its data, for a caller whose leases are like `own`, who needed
/// `known` so far, and has now seen `open`. The run that holds `open` keeps the lease that it was granted, and after
/// the loss nobody can look up how long that is.
pub fn seen(own: &Lease, known: Duration, open: &Open) -> Duration {
    match length(open) {
        length if length > own.length => known.max(own.quarantine_for(length)),
        _ => known.max(own.quarantine),
    }
}

impl Lease {
    /// A quarantine that is long enough for a lease of another length too, of which no more is known.
    pub fn quarantine_for(&self, length: Duration) -> Duration {
        // The part of it that is not in proportion, the time to kill, grows more slowly.
        let times = length.as_secs_f64() / self.length.as_secs_f64();
        let whole = Duration::from_millis(1);
        self.quarantine
            .max(self.quarantine.mul_f64(times.max(1.0)) + whole)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::{InstanceId, Occurrence, Run, RunId, Trigger};

    fn open(lease: i64) -> Open {
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
            seq: 1,
            incarnation: "1".to_owned(),
            renewed_at: 0,
            stop: None,
            next_attempt: None,
            by: None,
            stopped_by: None,
        }
    }

    #[test]
    fn a_quarantine_for_a_longer_lease_is_no_shorter_than_its_own_would_be() {
        let (ms, lease) = (
            Duration::from_millis,
            Lease::new(Duration::from_secs(15), 0.01).unwrap(),
        );
        // Three times as long, and the millisecond that rounding may take; never less than its own.
        assert_eq!(lease.quarantine_for(ms(45_000)), ms(3 * 17_150 + 1));
        assert_eq!(lease.quarantine_for(ms(15_000)), ms(17_151));
        assert_eq!(lease.quarantine_for(ms(500)), ms(17_151));
        for length in [500, 2000, 8000, 60_000, 3_600_000] {
            let own = Lease::new(ms(length), 0.01).unwrap().quarantine;
            assert!(lease.quarantine_for(ms(length)) >= own, "{length}");
        }
    }

    #[test]
    fn a_longer_lease_lengthens_the_quarantine_and_a_shorter_one_changes_nothing() {
        let own = Lease::new(Duration::from_secs(2), 0.01).unwrap();
        let long = Lease::new(Duration::from_secs(60), 0.01).unwrap();
        let known = seen(&own, Duration::ZERO, &open(500));
        assert_eq!(known, own.quarantine);
        let longer = seen(&own, known, &open(60_000));
        assert!(longer >= long.quarantine, "{longer:?}");
        assert_eq!(seen(&own, longer, &open(500)), longer);
    }

    proptest! {
        #[test]
        fn a_quarantine_for_another_length_is_long_enough(
            a in 500_u64..86_400_000, b in 500_u64..86_400_000, drift in 0.0..=0.2_f64,
        ) {
            let lease = |length| Lease::new(Duration::from_millis(length), drift).unwrap();
            prop_assert!(lease(a).quarantine_for(lease(b).length) >= lease(b).quarantine);
            prop_assert!(lease(a).quarantine_for(lease(b).length) >= lease(a).quarantine);
        }
    }
}
