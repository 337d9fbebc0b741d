//! What a start has waited for, and for how long: a run that is late names the longest of these waits as its reason.

use std::time::Duration;

use crate::model::{Trigger, Wait};

/// Starts later than this record why, ms.
pub const LATE_MS: i64 = 1000;

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Delays([Duration; Wait::ALL.len()]);

impl Delays {
    /// Those of an occurrence whose contest begins `ms` after its planned instant. `jitter`: how much of that was
    /// meant; `away`: for how much of it the store answered no claims of its job, or granted nothing.
    pub fn before(ms: i64, jitter: i64, trigger: Trigger, away: i64) -> Self {
        let mut waits = Self::default();
        let of = |ms: i64| Duration::from_millis(ms.max(0) as u64);
        let jitter = jitter.clamp(0, ms.max(0));
        waits.add(Wait::Jitter, of(jitter));
        let away = away.clamp(jitter, ms.max(jitter));
        waits.add(Wait::StoreAway, of(away - jitter));
        let wait = match trigger {
            Trigger::CatchUp => Wait::Overdue,
            // Behind the occurrences before it.
            _ => Wait::Overlap,
        };
        waits.add(wait, of(ms.saturating_sub(away)));
        waits
    }

    pub fn add(&mut self, wait: Wait, time: Duration) {
        self.0[wait as usize] = self.0[wait as usize].saturating_add(time);
    }

    /// None: it has waited for nothing. Of equal ones the first of [`Wait::ALL`].
    pub fn longest(&self) -> Option<(Wait, Duration)> {
        let all = Wait::ALL.into_iter().zip(self.0).rev();
        all.max_by_key(|(_, time)| *time)
            .filter(|(_, time)| !time.is_zero())
    }

    /// What kept it from a start in time: that counts from the end of the jitter.
    pub fn cause(mut self) -> Option<Wait> {
        self.0[Wait::Jitter as usize] = Duration::ZERO;
        Some(self.longest()?.0)
    }
}

/// Whether the lateness of such an attempt says anything: that of a trigger counts from when it was claimed, and that
/// of a later attempt from an instant at which it was not due.
fn counts(attempt: u32, trigger: Trigger) -> bool {
    attempt == 1 && matches!(trigger, Trigger::Schedule | Trigger::CatchUp)
}

/// Whether such an attempt has started so late that its longest wait is worth a word.
pub fn need_a_reason(attempt: u32, trigger: Trigger, lateness_ms: Option<i64>) -> bool {
    counts(attempt, trigger) && lateness_ms.is_some_and(|ms| ms >= LATE_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_start_needs_a_reason() {
        for (attempt, trigger, lateness, needs) in [
            (1, Trigger::Schedule, Some(1000), true),
            (1, Trigger::Schedule, Some(999), false),
            (1, Trigger::Schedule, None, false),
            (1, Trigger::CatchUp, Some(1001), true),
            (1, Trigger::Manual, Some(9000), false),
            (2, Trigger::Schedule, Some(9000), false),
        ] {
            let says = need_a_reason(attempt, trigger, lateness);
            assert_eq!(says, needs, "{attempt} {trigger:?} {lateness:?}");
        }
    }

    #[test]
    fn the_longest_wait_is_the_reason() {
        let s = Duration::from_secs;
        let before = |ms, jitter, trigger, away| {
            let waits = Delays::before(ms, jitter, trigger, away);
            waits.longest().map(|(wait, _)| wait)
        };
        let (schedule, caught) = (Trigger::Schedule, Trigger::CatchUp);
        assert_eq!(before(0, 0, schedule, 0), None);
        assert_eq!(before(-3, 30, schedule, 30), None);
        assert_eq!(before(30_000, 30_000, schedule, 0), Some(Wait::Jitter));
        assert_eq!(before(70_000, 30_000, schedule, 0), Some(Wait::Overlap));
        assert_eq!(before(70_000, 30_000, caught, 0), Some(Wait::Overdue));
        assert_eq!(before(70_000, 0, caught, 70_000), Some(Wait::StoreAway));
        // The store answered again a while ago.
        assert_eq!(
            before(70_000, 10_000, caught, 45_000),
            Some(Wait::StoreAway)
        );
        assert_eq!(before(70_000, 10_000, caught, 35_000), Some(Wait::Overdue));
        assert_eq!(before(70_000, 10_000, caught, 9000), Some(Wait::Overdue));
        let mut waits = Delays::before(2000, 2000, schedule, 0);
        waits.add(Wait::Slot, s(3));
        waits.add(Wait::Host, s(4));
        assert_eq!(waits.longest(), Some((Wait::Host, s(4))));
        waits.add(Wait::Slot, s(2));
        assert_eq!(waits.longest(), Some((Wait::Slot, s(5))));
        // It may start so late without being late.
        waits.add(Wait::Jitter, s(100));
        assert_eq!(waits.cause(), Some(Wait::Slot));
        assert_eq!(Delays::before(9, 9, schedule, 0).cause(), None);
    }
}
