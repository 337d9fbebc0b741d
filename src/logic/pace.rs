//! How many claims an instance may have under way, or granted and not started: no more than it can start in time.
//!
//! A host shows its pace by how long granted runs wait for their turn to start. As with a congestion window, the limit
//! shrinks at once if they wait too long, and grows slowly while they do not.

use std::time::Duration;

use crate::model::Boottime;

/// As many as may be starting at one time: fewer would not be quicker.
const LEAST: usize = 32;
/// Enough for a quick host and a store that takes a moment to answer.
const FIRST: usize = 64;
const MOST: usize = 200;

/// The limit of one instance.
#[derive(Debug, Clone)]
pub struct Pace {
    limit: usize,
    /// When the limit was last lowered.
    lowered: Option<Boottime>,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            limit: FIRST,
            lowered: None,
        }
    }
}

impl Pace {
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
                self.limit = (self.limit * 2 / 3).max(LEAST);
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

    #[test]
    fn a_long_wait_lowers_the_limit_once_for_those_that_waited_together() {
        let mut pace = Pace::default();
        let long = TRUST / 4 + Duration::from_millis(1);
        for ms in 0..100 {
            pace.waited(long, TRUST, true, at(ms));
        }
        assert_eq!(pace.limit(), 42);
        for ms in (10_000..100_000).step_by(3_000) {
            pace.waited(long, TRUST, true, at(ms));
        }
        assert_eq!(pace.limit(), LEAST);
    }

    #[test]
    fn the_limit_grows_only_if_it_is_reached_and_runs_do_not_wait() {
        let mut pace = Pace::default();
        pace.waited(Duration::ZERO, TRUST, false, at(0));
        pace.waited(TRUST / 8, TRUST, true, at(0));
        pace.waited(TRUST / 4, TRUST, true, at(0));
        assert_eq!(pace.limit(), FIRST);
        pace.waited(Duration::ZERO, TRUST, true, at(0));
        assert_eq!(pace.limit(), FIRST + 1);
        for _ in 0..1000 {
            pace.waited(Duration::ZERO, TRUST, true, at(0));
        }
        assert_eq!(pace.limit(), MOST);
    }
}
