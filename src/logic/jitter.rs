//! Jitter: how long after its instant an occurrence starts.

use std::{sync::Arc, time::Duration};

use xxhash_rust::xxh3::xxh3_64;

use super::schedule::{Schedule, next_of};
use crate::model::Occurrence;

/// Delay of an occurrence in milliseconds, in [0, `jitter`): the same on every instance for one job and occurrence,
/// evenly spread over occurrences. 0 when `jitter` is under a millisecond.
pub fn jitter_ms(job: &str, o: Occurrence, jitter: Duration) -> i64 {
    let range = u64::try_from(jitter.as_millis())
        .unwrap_or(u64::MAX)
        .min(i64::MAX as u64);
    let mut key = Vec::with_capacity(job.len() + 9);
    key.extend_from_slice(job.as_bytes());
    key.push(0);
    key.extend_from_slice(&o.0.to_le_bytes());
    // The high half of the product scales the hash to the range without the bias of a remainder.
    ((u128::from(xxh3_64(&key)) * u128::from(range)) >> 64) as i64
}

/// When an occurrence of `job` starts, in Unix milliseconds: `jitter` after it at most, and before the next one.
///
/// Equals `occurrence + jitter_ms(...)` as long as the job's occurrences are at least `jitter` apart. Where they are
/// not, the jitter is cut to the distance to the next one: starts then stay in the order of the occurrences, and are
/// still the same on every instance, whenever that instance began.
pub fn start_at_ms(
    job: &str,
    schedules: &[Arc<Schedule>],
    occurrence: Occurrence,
    jitter: Duration,
) -> i64 {
    delayed(job, occurrence, next_of(schedules, occurrence), jitter)
}

pub fn delayed(
    job: &str,
    occurrence: Occurrence,
    following: Option<Occurrence>,
    jitter: Duration,
) -> i64 {
    let room = following.and_then(|following| u64::try_from(following.0 - occurrence.0).ok());
    let jitter = jitter.min(room.map_or(Duration::MAX, Duration::from_millis));
    occurrence
        .0
        .saturating_add(jitter_ms(job, occurrence, jitter))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// These values must never change, as those of `H`.
    #[test]
    fn jitter_is_the_same_for_ever() {
        // 2026-01-01T12:00:00Z
        let noon = Occurrence(1_767_268_800_000);
        let second = Duration::from_secs(30);
        assert_eq!(
            [
                jitter_ms("backup", noon, second),
                jitter_ms("report", noon, second),
                jitter_ms("backup", Occurrence(noon.0 + 1000), second)
            ],
            [28596, 15699, 6209]
        );
        assert_eq!(jitter_ms("backup", noon, Duration::ZERO), 0);
        assert_eq!(jitter_ms("backup", noon, Duration::from_micros(999)), 0);
        assert!(jitter_ms("backup", noon, Duration::MAX) >= 0);
    }

    #[test]
    fn jitter_is_spread_evenly() {
        let mut tenths = [0; 10];
        for i in 0..10_000 {
            tenths[jitter_ms("job", Occurrence(i * 60_000), Duration::from_secs(10)) as usize
                / 1000] += 1;
        }
        assert!(tenths.iter().all(|n| (850..1150).contains(n)), "{tenths:?}");
    }

    proptest! {
        #[test]
        fn jitter_is_in_range(job in ".{0,20}", ms in any::<i64>(), jitter in 1u64..100_000_000) {
            let delay = jitter_ms(&job, Occurrence(ms), Duration::from_millis(jitter));
            prop_assert!((0..jitter as i64).contains(&delay));
            prop_assert_eq!(delay, jitter_ms(&job, Occurrence(ms), Duration::from_millis(jitter)));
        }
    }
}
