//! Pauses between failed tries, and between messages about them: the one rule for everything that is tried again.

use std::time::Duration;

use crate::model::Boottime;

/// The pause after the `n`th failure in a row (from 1): twice as long each time, at most `most`.
pub fn nth(first: Duration, n: u32, most: Duration) -> Duration {
    let doublings = n.saturating_sub(1).min(31);
    first.saturating_mul(1 << doublings).min(most)
}

/// The pauses of one thing that is tried again and again.
#[derive(Debug, Clone)]
pub struct Pauses {
    first: Duration,
    failures: u32,
}

impl Pauses {
    pub fn from(first: Duration) -> Self {
        Self { first, failures: 0 }
    }

    /// After one more failure in a row.
    pub fn after_failure(&mut self, most: Duration) -> Duration {
        self.failures = self.failures.saturating_add(1);
        nth(self.first, self.failures, most)
    }

    /// The last try was a success.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Lets a message through at once, and again once in a while as long as its cause lasts.
#[derive(Debug, Default)]
pub struct Throttle(Option<Boottime>);

impl Throttle {
    /// True: no message was let through for `every`; this one is.
    pub fn lets(&mut self, now: Boottime, every: Duration) -> bool {
        let lets = self.0.is_none_or(|said| now.since(said) >= every);
        if lets {
            self.0 = Some(now);
        }
        lets
    }

    /// True: a message was let through, and its cause is not over.
    pub fn was_said(&self) -> bool {
        self.0.is_some()
    }

    /// The cause is over: the next message is let through at once.
    pub fn over(&mut self) {
        self.0 = None;
    }
}

/// From half of `pause` to all of it, by `roll` from 0 to 1: callers that failed together do not retry together.
pub fn spread(pause: Duration, roll: f64) -> Duration {
    pause.mul_f64(0.5 + roll.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let (first, most) = (Duration::from_millis(10), Duration::from_millis(70));
        let pauses: Vec<u128> = (0..6).map(|n| nth(first, n, most).as_millis()).collect();
        assert_eq!(pauses, [10, 10, 20, 40, 70, 70]);
        assert_eq!(nth(first, u32::MAX, most), most);
        assert_eq!(nth(Duration::MAX, 9, Duration::MAX), Duration::MAX);
    }

    #[test]
    fn a_success_begins_anew() {
        let (first, most) = (Duration::from_millis(10), Duration::from_secs(1));
        let mut pauses = Pauses::from(first);
        let three = [0; 3].map(|_| pauses.after_failure(most).as_millis());
        assert_eq!(three, [10, 20, 40]);
        pauses.reset();
        assert_eq!(pauses.after_failure(most), first);
    }

    #[test]
    fn what_lasts_is_said_once_in_a_while() {
        let (at, every) = (
            |ms: u64| Boottime(ms * 1_000_000),
            Duration::from_millis(10),
        );
        let mut throttle = Throttle::default();
        let said = [1, 2, 10, 11, 12].map(|ms| throttle.lets(at(ms), every));
        assert_eq!(said, [true, false, false, true, false]);
        throttle.over();
        assert!(!throttle.was_said());
        assert!(throttle.lets(at(13), every));
    }

    #[test]
    fn a_pause_is_spread_over_its_second_half() {
        let pause = Duration::from_millis(100);
        let spread = |roll| spread(pause, roll).as_millis();
        assert_eq!([spread(0.0), spread(0.5), spread(1.0)], [50, 75, 100]);
        assert_eq!(spread(7.0), 100);
    }
}
