//! Computes the times of a lease from its length, so that its holder is gone before anybody else may be granted it.

use std::time::Duration;

use crate::model::duration::show;

/// The times of a lease: `trust` and `kill_budget` together are over before `length` is, on clocks whose rates differ
/// by no more than the drift that it was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lease {
    /// L: how long others must see it unrenewed.
    pub length: Duration,
    pub renew_every: Duration,
    /// T: how long the holder trusts it, from before the request left.
    pub trust: Duration,
    /// K: within this after T every process of the run is gone.
    pub kill_budget: Duration,
    /// Q: how long nothing is granted after the store lost or changed its data.
    pub quarantine: Duration,
}

/// Below 8 s a quarter of the lease, from there on this.
const KILL_BUDGET: Duration = Duration::from_secs(2);
/// A shorter one leaves the guard less than 125 ms to end a process tree, and is lost whenever the host is busy
/// for a moment.
pub(crate) const SHORTEST: Duration = Duration::from_millis(500);
const SHORTEST_LOCK: Duration = Duration::from_millis(10);
/// A renewal more often than this is load without use.
pub(crate) const SHORTEST_RENEWAL: Duration = Duration::from_millis(10);
const MOST_DRIFT: f64 = 0.2;

impl Lease {
    /// The longest lease of a lock.
    pub const LONGEST_LOCK: Duration = Duration::from_secs(366 * 24 * 3600);

    /// The lease of this length whose holder is gone before anyone else may be granted it, as long as clocks
    /// differ in rate by no more than `clock_drift`.
    ///
    /// `renew_every` is a fifth of the length.
    ///
    /// # Errors
    /// A length below 500 ms, or a drift outside 0 to 0.2; in words.
    pub fn new(length: Duration, clock_drift: f64) -> Result<Self, String> {
        if !(0.0..=MOST_DRIFT).contains(&clock_drift) {
            return Err(format!(
                "clock_drift must be between 0 and {MOST_DRIFT}, not {clock_drift}"
            ));
        }
        if length < SHORTEST {
            return Err(format!(
                "lease ({}) must be at least {}: a shorter one leaves no time to end a command before another \
                 instance may start it",
                show(length),
                show(SHORTEST)
            ));
        }
        let kill_budget = KILL_BUDGET.min(length / 4);
        let rate = 1.0 + clock_drift;
        let (l, k) = (length.as_secs_f64(), kill_budget.as_secs_f64());
        Ok(Self {
            length,
            renew_every: length / 5,
            // Whole milliseconds, always to the safe side.
            trust: Duration::from_millis((((l / rate - k) / rate) * 1000.0).floor() as u64),
            kill_budget,
            quarantine: Duration::from_millis(((l * rate + k) * 1000.0).ceil() as u64),
        })
    }

    /// The lease of a lock of the library: as [`Lease::new`], for any length from 10 ms to 366 days.
    ///
    /// Nothing has to be killed at its end, but the margin is the same: what the holder does with its last moment of
    /// trust has a quarter of the lease, at most 2 s, to arrive.
    ///
    /// # Errors
    /// Another length; in words.
    pub fn of_lock(length: Duration, clock_drift: f64) -> Result<Self, String> {
        if !(SHORTEST_LOCK..=Self::LONGEST_LOCK).contains(&length) {
            return Err(format!(
                "a lease must be from {} to 366 days, not {length:?}",
                show(SHORTEST_LOCK)
            ));
        }
        if length >= SHORTEST {
            return Self::new(length, clock_drift);
        }
        // Scaled down: all of it is proportional to so short a length.
        let scale = SHORTEST.as_secs_f64() / length.as_secs_f64();
        let long = Self::new(SHORTEST, clock_drift)?;
        Ok(Self {
            length,
            renew_every: long.renew_every.div_f64(scale),
            trust: long.trust.div_f64(scale),
            kill_budget: long.kill_budget.div_f64(scale),
            quarantine: long.quarantine.div_f64(scale),
        })
    }

    /// As [`Lease::new`], and renewed so often that one renewal that waits for the whole `store_timeout` can be
    /// followed by another before half of the trust is used up.
    ///
    /// # Errors
    /// Also when that is not possible, with the numbers.
    pub fn for_store(
        length: Duration,
        clock_drift: f64,
        store_timeout: Duration,
    ) -> Result<Self, String> {
        let mut lease = Self::new(length.max(SHORTEST), clock_drift)?;
        let room = |lease: &Self| {
            (lease.trust / 2)
                .checked_sub(store_timeout + Duration::from_millis(1))
                .filter(|room| *room >= SHORTEST_RENEWAL)
        };
        let Some(room) = room(&lease) else {
            // The least that would do, as somebody would write it.
            let step = Duration::from_millis(100);
            let mut least = lease.length;
            while room(&Self::new(least, clock_drift)?).is_none() {
                least += step.max(least / 100);
                least -= Duration::from_nanos((least.as_nanos() % step.as_nanos()) as u64);
            }
            return Err(format!(
                "lease ({}) is too short for the store's timeout ({}), which must be well below half of the time for \
                 which the holder trusts the lease; with this timeout it must be at least {}",
                show(length),
                show(store_timeout),
                show(least),
            ));
        };
        Self::new(length, clock_drift)?;
        if lease.renew_every > room {
            // Whole milliseconds, as everything that is shown.
            lease.renew_every = room - Duration::from_nanos((room.as_nanos() % 1_000_000) as u64);
        }
        Ok(lease)
    }

    /// The same lease, renewed every `renew_every`.
    ///
    /// # Errors
    /// When that is less often than now, or more often than every 10 ms, with the numbers.
    pub fn renewed_every(mut self, renew_every: Duration) -> Result<Self, String> {
        let (given, most, length) = (show(renew_every), show(self.renew_every), show(self.length));
        if renew_every < SHORTEST_RENEWAL {
            let least = show(SHORTEST_RENEWAL);
            return Err(format!("renew_every ({given}) must be at least {least}"));
        }
        if renew_every > self.renew_every {
            return Err(if self.renew_every == self.length / 5 {
                format!(
                    "renew_every ({given}) must be at most a fifth of the lease ({length}), which is {most}"
                )
            } else {
                format!(
                    "renew_every ({given}) must be at most {most}: with the store's timeout it must fit into half \
                     of the time for which the holder of a lease of {length} trusts it"
                )
            });
        }
        self.renew_every = renew_every;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_times_of_the_default_lease_are_those_of_the_guarantees() {
        let lease = Lease::new(Duration::from_secs(15), 0.01).unwrap();
        assert_eq!(lease.kill_budget, Duration::from_secs(2));
        assert_eq!(lease.trust, Duration::from_millis(12_724));
        assert_eq!(lease.renew_every, Duration::from_secs(3));
        assert_eq!(lease.quarantine, Duration::from_millis(17_150));
    }

    #[test]
    fn a_lease_for_a_slow_store_is_renewed_at_whole_milliseconds_before_there_is_no_room() {
        let lease = |timeout: u64| {
            Lease::for_store(
                Duration::from_secs(15),
                0.01,
                Duration::from_millis(timeout),
            )
            .unwrap()
        };
        assert_eq!(lease(100).renew_every, Duration::from_secs(3));
        let slow = lease(4000);
        assert!(slow.renew_every < Duration::from_secs(3), "{slow:?}");
        assert_eq!(slow.renew_every.subsec_nanos() % 1_000_000, 0, "{slow:?}");
        // Two tries fit into what is trusted.
        assert!(
            slow.renew_every + Duration::from_millis(2 * 4000) <= slow.trust,
            "{slow:?}"
        );
    }

    #[test]
    fn what_cannot_be_a_lease_is_refused_with_the_numbers() {
        let ms = Duration::from_millis;
        let cases = [
            (499, 0.01, "lease (499ms) must be at least 500ms"),
            (
                15_000,
                0.21,
                "clock_drift must be between 0 and 0.2, not 0.21",
            ),
            (
                15_000,
                -0.01,
                "clock_drift must be between 0 and 0.2, not -0.01",
            ),
            (
                15_000,
                f64::NAN,
                "clock_drift must be between 0 and 0.2, not NaN",
            ),
        ];
        for (length, drift, expected) in cases {
            let error = Lease::new(ms(length), drift).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        let error = Lease::for_store(ms(1000), 0.01, ms(500)).unwrap_err();
        assert_eq!(
            error,
            "lease (1s) is too short for the store's timeout (500ms), which must be well below half of the time for \
             which the holder trusts the lease; with this timeout it must be at least 1s400ms"
        );
        // The length that the message names is enough, and a little less is not; whatever else is wrong.
        for (timeout, least) in [(500, 1400), (2000, 5500)] {
            let says = |length| Lease::for_store(ms(length), 0.01, ms(timeout)).unwrap_err();
            assert!(
                says(10).ends_with(&format!("at least {}", show(ms(least)))),
                "{}",
                says(10)
            );
            Lease::for_store(ms(least), 0.01, ms(timeout)).unwrap();
            says(least - 100);
        }
        let renewed = |length, timeout, renewal| {
            let lease = Lease::for_store(ms(length), 0.01, ms(timeout)).unwrap();
            lease
                .renewed_every(ms(renewal))
                .map(|lease| lease.renew_every)
        };
        assert_eq!(renewed(15_000, 500, 3000), Ok(ms(3000)));
        assert_eq!(renewed(15_000, 500, 10), Ok(ms(10)));
        let cases = [
            (
                15_000,
                3001,
                "renew_every (3s1ms) must be at most a fifth of the lease (15s), which is 3s",
            ),
            (15_000, 0, "renew_every (0s) must be at least 10ms"),
            (
                3000,
                600,
                "renew_every (600ms) must be at most 598ms: with the store's timeout it must fit into half of the \
                 time for which the holder of a lease of 3s trusts it",
            ),
        ];
        for (length, renewal, expected) in cases {
            assert_eq!(renewed(length, 500, renewal).unwrap_err(), expected);
        }
    }

    #[test]
    fn a_lock_may_have_a_short_lease_with_the_same_margin() {
        let ms = Duration::from_millis;
        let short = Lease::of_lock(ms(100), 0.01).unwrap();
        let long = Lease::of_lock(ms(500), 0.01).unwrap();
        assert_eq!(long, Lease::new(ms(500), 0.01).unwrap());
        assert_eq!(short.trust * 5, long.trust);
        assert_eq!(short.renew_every, ms(20));
        for wrong in [
            Duration::ZERO,
            Duration::from_nanos(1),
            ms(9),
            Duration::MAX,
        ] {
            let e = Lease::of_lock(wrong, 0.01).unwrap_err();
            assert!(
                e.starts_with("a lease must be from 10ms to 366 days, not"),
                "{e}"
            );
        }
    }

    proptest! {
        /// Promise 3: whatever the two hosts' clocks do within the drift, the old holder's processes are gone before
        /// the new one may be granted the lease, also after the store lost its data.
        #[test]
        fn a_holder_is_gone_before_another_may_come(
            length in 500_u64..86_400_000, drift in 0.0..=0.2_f64, a in 0.0..=1.0_f64, b in 0.0..=1.0_f64,
        ) {
            let lease = Lease::new(Duration::from_millis(length), drift).unwrap();
            // Seconds of true time per second of a clock, from the slowest to the fastest allowed.
            let pace = |x: f64| (1.0 + drift).powf(2.0 * x - 1.0);
            let gone = lease.trust.as_secs_f64() * pace(a) + lease.kill_budget.as_secs_f64();
            let granted = lease.length.as_secs_f64() * pace(b);
            let after_loss = lease.quarantine.as_secs_f64() / (1.0 + drift);
            prop_assert!(gone <= granted + 1e-9, "gone at {gone}, granted at {granted}");
            prop_assert!(gone <= after_loss + 1e-9, "gone at {gone}, granted at {after_loss}");
            prop_assert!(after_loss >= lease.length.as_secs_f64(), "a lease from before may still stand");
            prop_assert!(lease.trust > Duration::ZERO);
            prop_assert!(lease.renew_every * 5 <= lease.length);
            prop_assert!(lease.trust.as_secs_f64() >= length as f64 / 1000.0 * 0.4, "trust is wasted");
        }

        #[test]
        fn a_late_reply_leaves_room_for_a_second_renewal(
            length in 500_u64..600_000, timeout in 1_u64..10_000, drift in 0.0..=0.2_f64,
        ) {
            let timeout = Duration::from_millis(timeout);
            if let Ok(lease) = Lease::for_store(Duration::from_millis(length), drift, timeout) {
                prop_assert!(timeout + lease.renew_every < lease.trust / 2);
                prop_assert!(lease.renew_every * 5 <= lease.length && !lease.renew_every.is_zero());
            } else {
                // Refused only when there is really no room.
                let trust = Lease::new(Duration::from_millis(length), drift).unwrap().trust;
                prop_assert!(timeout + SHORTEST_RENEWAL + Duration::from_millis(1) > trust / 2);
            }
        }
    }
}
