//! How many claims an instance may have under way, or granted and not started: no more than it can start in time.
//!
//! A host shows its pace by how long granted runs wait for their turn to start. As with a congestion window, the limit
//! shrinks at once if they wait too long, and grows with each start while they do not.

use std::time::Duration;

use crate::model::Boottime;

const MOST: usize = 200;
/// Claims of one instant travel together, which costs the store less than half: enough for that, and no more than a
/// host of two cores starts in a fraction of a second.
const AT_FIRST: usize = 64;

/// How many commands a host with so many cores starts at one time. More would only delay each other, and all others;
/// fewer would leave cores idle when a start waits for a disk.
pub fn starting(cores: usize) -> usize {
    (4 * cores).clamp(8, 64)
}

/// The limit of one instance.
#[derive(Debug, Clone)]
pub struct Pace {
    limit: usize,
    /// As many as may be starting at one time: with fewer the host would wait.
    least: usize,
    /// When the limit was last lowered.
    lowered: Option<Boottime>,
}

impl Pace {
    pub fn new(cores: usize) -> Self {
        let least = starting(cores);
        Self {
            limit: AT_FIRST.max(2 * least),
            least,
            lowered: None,
        }
    }

    /// How many there may be.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// A granted run waited so long for its turn, with a lease that is trusted for `trust`. `full`: as many claims were
    /// under way as there may be.
    pub fn waited(&mut self, wait: Duration, trust: Duration, full: bool, now: Boottime) {
        if wait > trust / 4 {
            // Those that were claimed before the limit was lowered have waited as long, and say nothing new.
            if self.lowered.is_none_or(|at| now.since(at) > wait) {
                self.limit = (self.limit * 2 / 3).max(self.least);
                self.lowered = Some(now);
            }
        } else if full && wait < trust / 8 {
            self.limit = (self.limit + 1).min(MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUST: Duration = Duration::from_secs(8);

    fn at(ms: u64) -> Boottime {
        Boottime(0) + Duration::from_millis(ms)
    }

    /// Claims of one instant travel together, also on a host with one core.
    #[test]
    fn the_first_limit_is_many_claims_and_no_more_than_a_batch_or_two() {
        for cores in [1, 2, 8, 64] {
            let limit = Pace::new(cores).limit();
            assert!((64..=MOST).contains(&limit), "{cores} cores: {limit}");
            assert!(limit >= starting(cores));
        }
    }

    #[test]
    fn a_long_wait_lowers_the_limit_once_for_those_that_waited_together() {
        let mut pace = Pace::new(8);
        let long = TRUST / 4 + Duration::from_millis(1);
        for ms in 0..100 {
            pace.waited(long, TRUST, true, at(ms));
        }
        assert_eq!(pace.limit(), 42);
        for ms in (10_000..100_000).step_by(3_000) {
            pace.waited(long, TRUST, true, at(ms));
        }
        assert_eq!(pace.limit(), starting(8));
    }

    #[test]
    fn the_limit_grows_only_if_it_is_reached_and_runs_do_not_wait() {
        let mut pace = Pace::new(8);
        pace.waited(Duration::ZERO, TRUST, false, at(0));
        pace.waited(TRUST / 8, TRUST, true, at(0));
        pace.waited(TRUST / 4, TRUST, true, at(0));
        assert_eq!(pace.limit(), 64);
        pace.waited(Duration::ZERO, TRUST, true, at(0));
        assert_eq!(pace.limit(), 65);
        for _ in 0..1000 {
            pace.waited(Duration::ZERO, TRUST, true, at(0));
        }
        assert_eq!(pace.limit(), MOST);
    }
}
