//! An instance's hold on a lease: how long to trust it, when to renew it, when to step down.

use std::time::Duration;

use super::lease::Lease;
use crate::model::Boottime;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    WaitUntil(Boottime),
    Renew,
    StepDown,
}

/// Our hold on one lease, as far as this instance may trust it.
#[derive(Debug, Clone)]
pub struct HeldLease {
    lease: Lease,
    renew_at: Boottime,
    trusted_until: Boottime,
    seq: u32,
}

impl HeldLease {
    /// `sent_at` is when the request for it left: a slow reply must not lengthen our trust.
    pub fn new(lease: Lease, sent_at: Boottime) -> Self {
        Self {
            lease,
            renew_at: sent_at + lease.renew_every,
            trusted_until: sent_at + lease.trust,
            seq: 0,
        }
    }

    pub fn trusted_until(&self) -> Boottime {
        self.trusted_until
    }

    pub fn renew_at(&self) -> Boottime {
        self.renew_at
    }

    /// Enough trust is left to start a command with: for two renewals, should the first be lost.
    pub fn may_start(&self, now: Boottime) -> bool {
        now + self.lease.trust / 4 <= self.trusted_until
    }

    pub fn is_trusted(&self, now: Boottime) -> bool {
        now < self.trusted_until
    }

    /// How long one renewal may take.
    pub fn half_left(&self, now: Boottime) -> Duration {
        half_left(self.trusted_until, now)
    }

    pub fn step(&self, now: Boottime) -> Step {
        if !self.is_trusted(now) {
            Step::StepDown
        } else if now >= self.renew_at {
            Step::Renew
        } else {
            Step::WaitUntil(self.renew_at.min(self.trusted_until))
        }
    }

    /// The number of the renewal that is about to be sent.
    pub fn next_seq(&mut self) -> u32 {
        self.seq += 1;
        self.seq
    }

    /// A renewal that left at `sent_at` was confirmed. A confirmation that came after the end of trust is too late:
    /// the command may be dead already.
    pub fn renewed(&mut self, sent_at: Boottime, now: Boottime) {
        if self.is_trusted(now) {
            self.renew_at = sent_at + self.lease.renew_every;
            self.trusted_until = self.trusted_until.max(sent_at + self.lease.trust);
        }
    }

    /// As [`HeldLease::renewed`], while nothing was started yet. No command can be dead then, so even after the end of
    /// trust a confirmed lease is ours again.
    pub fn renewed_unstarted(&mut self, sent_at: Boottime) {
        self.renew_at = sent_at + self.lease.renew_every;
        self.trusted_until = self.trusted_until.max(sent_at + self.lease.trust);
    }

    /// A renewal failed: again soon, and more than once before trust ends.
    pub fn failed(&mut self, now: Boottime) {
        let pause = (self.lease.renew_every / 4)
            .clamp(Duration::from_millis(20), Duration::from_millis(500));
        self.renew_at = now + pause;
    }

    /// The next renewal is due at once.
    pub fn renew_now(&mut self) {
        self.renew_at = Boottime(0);
    }
}

/// Half of the trust that is left: if a connection is dead, there is time for another.
pub fn half_left(until: Boottime, now: Boottime) -> Duration {
    (until.since(now) / 2).max(Duration::from_millis(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(n: u64) -> Boottime {
        Boottime(n * 1_000_000)
    }
    fn lease() -> Lease {
        Lease {
            length: Duration::from_millis(15_000),
            renew_every: Duration::from_millis(3_000),
            trust: Duration::from_millis(12_700),
            kill_budget: Duration::from_millis(2_000),
            quarantine: Duration::from_millis(17_150),
        }
    }

    #[test]
    fn trust_is_counted_from_before_the_request_left() {
        let held = HeldLease::new(lease(), ms(1_000));
        assert_eq!(held.step(ms(1_000)), Step::WaitUntil(ms(4_000)));
        assert_eq!(held.step(ms(4_000)), Step::Renew);
        assert_eq!(held.step(ms(13_700)), Step::StepDown);
    }

    #[test]
    fn a_confirmation_after_the_end_of_trust_revives_nothing() {
        let mut held = HeldLease::new(lease(), ms(0));
        held.renewed(ms(12_000), ms(12_701));
        assert_eq!(held.step(ms(12_701)), Step::StepDown);
    }

    #[test]
    fn a_confirmation_in_time_counts_from_its_request() {
        let mut held = HeldLease::new(lease(), ms(0));
        held.renewed(ms(3_000), ms(12_000));
        assert_eq!(held.trusted_until(), ms(15_700));
    }

    #[test]
    fn before_the_start_a_late_confirmation_counts_from_its_request_too() {
        let mut held = HeldLease::new(lease(), ms(0));
        held.renewed_unstarted(ms(20_000));
        assert_eq!(held.trusted_until(), ms(32_700));
        assert_eq!(held.step(ms(20_000)), Step::WaitUntil(ms(23_000)));
        // An older one takes nothing away.
        held.renewed_unstarted(ms(19_000));
        assert_eq!(held.trusted_until(), ms(32_700));
    }

    #[test]
    fn a_command_is_started_while_a_quarter_of_the_trust_is_left() {
        let held = HeldLease::new(lease(), ms(1_000));
        assert!(held.may_start(ms(1_000)) && held.may_start(ms(10_525)));
        assert!(!held.may_start(ms(10_526)) && !held.may_start(ms(60_000)));
    }

    #[test]
    fn a_renewal_leaves_time_for_another() {
        let held = HeldLease::new(lease(), ms(1_000));
        for (now, half) in [(1_000, 6_350), (13_698, 1), (13_700, 1), (60_000, 1)] {
            assert_eq!(held.half_left(ms(now)), Duration::from_millis(half));
        }
    }

    #[test]
    fn renewals_are_numbered_from_one() {
        let mut held = HeldLease::new(lease(), ms(0));
        assert_eq!(
            [held.next_seq(), held.next_seq(), held.next_seq()],
            [1, 2, 3]
        );
    }

    #[test]
    fn after_a_confirmation_the_next_renewal_is_due_a_period_after_its_request() {
        let mut held = HeldLease::new(lease(), ms(0));
        held.renewed(ms(3_100), ms(3_200));
        assert_eq!(held.renew_at(), ms(6_100));
        assert_eq!(held.step(ms(6_099)), Step::WaitUntil(ms(6_100)));
        // At the end of trust it is too late.
        let end = held.trusted_until();
        held.renewed(ms(15_000), end);
        assert_eq!(held.trusted_until(), end);
    }

    #[test]
    fn a_failed_renewal_is_tried_again_soon_and_more_than_once_while_trust_lasts() {
        let mut held = HeldLease::new(lease(), ms(0));
        // A quarter of the period, but for half a second at most and 20 ms at least.
        held.failed(ms(3_000));
        assert_eq!(held.renew_at(), ms(3_500));
        for (renew_every, pause) in [(400, 100), (100, 25), (40, 20)] {
            let lease = Lease {
                renew_every: Duration::from_millis(renew_every),
                ..lease()
            };
            let mut held = HeldLease::new(lease, ms(0));
            held.failed(ms(renew_every));
            assert_eq!(held.renew_at(), ms(renew_every + pause), "{renew_every}");
        }
    }

    #[test]
    fn a_look_before_its_time_is_due_at_once() {
        let mut held = HeldLease::new(lease(), ms(1_000));
        held.renew_now();
        assert_eq!(held.step(ms(1_001)), Step::Renew);
        assert_eq!(held.step(ms(13_700)), Step::StepDown);
    }

    proptest! {
        #[test]
        fn trust_never_outlives_the_last_confirmed_request(events in prop::collection::vec((0u64..9_000, 0u64..9_000, any::<bool>()), 1..40)) {
            let mut held = HeldLease::new(lease(), ms(0));
            let (mut now, mut confirmed) = (0, 0);
            for (wait, delay, ok) in events {
                now += wait;
                if held.step(ms(now)) == Step::StepDown {
                    break;
                }
                let sent = now;
                now += delay;
                if ok {
                    held.renewed(ms(sent), ms(now));
                    confirmed = sent;
                } else {
                    held.failed(ms(now));
                }
                prop_assert!(held.trusted_until() <= ms(confirmed + 12_700));
            }
        }
    }
}
