//! When to ask again for a lock that somebody else holds. The rules are pure: what they need to know comes in as an
//! [`Attempt`].

use std::time::Duration;

use crate::clock::Boottime;

/// An attempt that found the lock held.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// The number of attempts so far, at least 1.
    pub number: u32,
    /// The time since the first attempt began, on this host's CLOCK_BOOTTIME.
    pub elapsed: Duration,
    /// The holder keeps the lock for at most this long, by the store's clock, unless it renews.
    pub remaining: Duration,
}

/// Counts the attempts of one caller.
pub(super) struct Attempts {
    begun: Boottime,
    number: u32,
}

impl Attempts {
    /// To be called before the first attempt.
    pub(super) fn begin() -> Self {
        Self {
            begun: Boottime::now(),
            number: 0,
        }
    }

    /// One more attempt found the lock held.
    pub(super) fn held_for(&mut self, remaining: Duration) -> Attempt {
        self.number = self.number.saturating_add(1);
        Attempt {
            number: self.number,
            elapsed: Boottime::now().since(self.begun),
            remaining,
        }
    }
}

/// Decides whether and when [`LockClient::try_lock`](super::LockClient::try_lock) asks again.
///
/// ```
/// use std::time::Duration;
/// use soloist::lock::{Attempt, RetryStrategy};
///
/// /// Asks once more, when the lease of the holder has run out.
/// struct WhenItLapses;
/// impl RetryStrategy for WhenItLapses {
///     fn pause(&mut self, attempt: &Attempt) -> Option<Duration> {
///         (attempt.number == 1).then_some(attempt.remaining)
///     }
/// }
/// ```
pub trait RetryStrategy: Send {
    /// Returns how long to wait before the next attempt; None: give up.
    fn pause(&mut self, attempt: &Attempt) -> Option<Duration>;
}

/// A closure, for a strategy that is used in one place.
impl<F: FnMut(&Attempt) -> Option<Duration> + Send> RetryStrategy for F {
    fn pause(&mut self, attempt: &Attempt) -> Option<Duration> {
        self(attempt)
    }
}

/// Asks once.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoRetry;

impl RetryStrategy for NoRetry {
    fn pause(&mut self, _: &Attempt) -> Option<Duration> {
        None
    }
}

/// Asks again every `interval`, at most `max` times after the first attempt.
#[derive(Debug, Clone, Copy)]
pub struct LimitedRetry {
    /// The pause between two attempts, on this host's clock.
    pub interval: Duration,
    /// The number of attempts after the first.
    pub max: u32,
}

impl RetryStrategy for LimitedRetry {
    fn pause(&mut self, attempt: &Attempt) -> Option<Duration> {
        (attempt.number <= self.max).then_some(self.interval)
    }
}

/// Asks again after `first`, then after pauses that are `factor` times as long each time, up to `max`. Never gives up,
/// unless a deadline is added with [`ExponentialBackoff::until`].
///
/// The default is 1 ms, doubled up to 128 ms, each pause shortened by up to a half at random.
#[derive(Debug, Clone, Copy)]
pub struct ExponentialBackoff {
    /// The first pause.
    pub first: Duration,
    /// The factor by which each pause is longer than the one before; less than 1 counts as 1.
    pub factor: f64,
    /// The longest pause.
    pub max: Duration,
    /// From 0 to 1: the part of each pause that chance may take away, so that contenders do not ask in step.
    pub jitter: f64,
}

impl Default for ExponentialBackoff {
    fn default() -> Self {
        Self {
            first: Duration::from_millis(1),
            factor: 2.0,
            max: Duration::from_millis(128),
            jitter: 0.5,
        }
    }
}

impl ExponentialBackoff {
    /// The same pauses, until `limit` has passed since the first attempt: see [`Until`].
    pub fn until(self, limit: Duration) -> Until {
        Until { limit, pace: self }
    }

    fn after(&self, number: u32, chance: f64) -> Duration {
        // A NaN counts as 1, and as no jitter.
        let factor = self.factor.max(1.0);
        let jitter = self.jitter.max(0.0);
        let power = factor.powi(number.saturating_sub(1).min(10_000) as i32);
        let pause = (self.first.as_secs_f64() * power).min(self.max.as_secs_f64());
        Duration::try_from_secs_f64(pause * (1.0 - jitter.min(1.0) * chance)).unwrap_or(self.max)
    }
}

impl RetryStrategy for ExponentialBackoff {
    fn pause(&mut self, attempt: &Attempt) -> Option<Duration> {
        Some(self.after(attempt.number, fastrand::f64()))
    }
}

/// Asks again until a given time has passed since the first attempt; the last attempt is made at that time.
///
/// The pauses are those of an [`ExponentialBackoff`], of the default one for [`Until::new`].
#[derive(Debug, Clone, Copy)]
pub struct Until {
    limit: Duration,
    pace: ExponentialBackoff,
}

impl Until {
    /// `limit` is counted from the first attempt, on this host's CLOCK_BOOTTIME.
    pub fn new(limit: Duration) -> Self {
        ExponentialBackoff::default().until(limit)
    }

    /// As [`Until::new`], with an instant. If it has passed, there is one attempt.
    pub fn deadline(at: std::time::Instant) -> Self {
        let now = tokio::time::Instant::now().into_std();
        Self::new(at.saturating_duration_since(now))
    }
}

impl RetryStrategy for Until {
    fn pause(&mut self, attempt: &Attempt) -> Option<Duration> {
        let left = self.limit.checked_sub(attempt.elapsed)?;
        (!left.is_zero()).then(|| {
            self.pace
                .after(attempt.number, fastrand::f64())
                .clamp(Duration::from_micros(100), Duration::MAX)
                .min(left)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn attempt(number: u32, elapsed: Duration) -> Attempt {
        Attempt {
            number,
            elapsed,
            remaining: 1000 * MS,
        }
    }

    #[test]
    fn attempts_are_numbered_from_one_and_know_how_long_they_took() {
        let mut attempts = Attempts::begin();
        for number in 1..=3 {
            let attempt = attempts.held_for(5 * MS);
            assert_eq!((attempt.number, attempt.remaining), (number, 5 * MS));
        }
        let before = attempts.held_for(MS).elapsed;
        attempts.begun = Boottime(attempts.begun.0.saturating_sub(1_000_000));
        assert!(attempts.held_for(MS).elapsed >= before + MS);
    }

    #[test]
    fn a_function_decides_and_a_backoff_never_gives_up() {
        let mut twice = |held: &Attempt| (held.number < 3).then_some(held.remaining / 2);
        for (number, pause) in [(1, Some(10 * MS)), (2, Some(10 * MS)), (3, None)] {
            let held = Attempt {
                remaining: 20 * MS,
                ..attempt(number, MS)
            };
            assert_eq!(RetryStrategy::pause(&mut twice, &held), pause);
        }
        let mut backoff = ExponentialBackoff {
            jitter: 0.0,
            ..ExponentialBackoff::default()
        };
        assert_eq!(backoff.pause(&attempt(4, MS)), Some(8 * MS));
        assert_eq!(NoRetry.pause(&attempt(1, MS)), None);
    }

    #[test]
    fn a_limited_retry_ends() {
        let mut retry = LimitedRetry {
            interval: 5 * MS,
            max: 2,
        };
        let pauses: Vec<_> = (1..=4).map(|n| retry.pause(&attempt(n, MS))).collect();
        assert_eq!(pauses, [Some(5 * MS), Some(5 * MS), None, None]);
        assert_eq!(NoRetry.pause(&attempt(1, MS)), None);
    }

    #[test]
    fn the_backoff_doubles_from_one_to_128_milliseconds() {
        let backoff = ExponentialBackoff::default();
        let longest: Vec<u128> = (1..=10)
            .map(|n| backoff.after(n, 0.0).as_millis())
            .collect();
        assert_eq!(longest, [1, 2, 4, 8, 16, 32, 64, 128, 128, 128]);
        assert_eq!(backoff.after(8, 1.0), 64 * MS);
        assert_eq!(backoff.after(u32::MAX, 0.0), 128 * MS);
    }

    #[test]
    fn nonsense_in_a_backoff_neither_panics_nor_spins_faster_than_its_first_pause() {
        for (factor, jitter) in [
            (0.0, -1.0),
            (f64::NAN, f64::NAN),
            (f64::INFINITY, 7.0),
            (-2.0, 0.0),
        ] {
            let backoff = ExponentialBackoff {
                first: 4 * MS,
                factor,
                max: 100 * MS,
                jitter,
            };
            for n in [1, 2, 50, u32::MAX] {
                let pause = backoff.after(n, 0.0);
                assert!(
                    (4 * MS..=100 * MS).contains(&pause),
                    "{factor} {jitter} {pause:?}"
                );
            }
        }
        let endless = ExponentialBackoff {
            first: Duration::MAX,
            max: Duration::MAX,
            ..ExponentialBackoff::default()
        };
        assert_eq!(endless.after(1, 0.0), Duration::MAX);
    }

    #[test]
    fn a_deadline_is_met_by_the_last_try_and_not_passed() {
        let mut until = Until::new(100 * MS);
        assert!(until.pause(&attempt(9, 20 * MS)).unwrap() <= 80 * MS);
        assert_eq!(until.pause(&attempt(9, 100 * MS)), None);
        assert_eq!(until.pause(&attempt(9, 101 * MS)), None);
        assert_eq!(Until::new(Duration::ZERO).pause(&attempt(1, MS)), None);
    }
}
