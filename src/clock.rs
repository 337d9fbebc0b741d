//! The only file that asks the operating system for the time; `Alarm` waits for it.
//!
//! Two clocks, never mixed: wall time names occurrences, [`Boottime`] measures leases. The wall clock of a host
//! may be wrong or stepped at any moment and nothing but *when* an occurrence is due depends on it.

#[cfg(feature = "daemon")]
mod alarm;

use crate::logic::belief::{Belief, Estimate, Sampled, Verdict};
pub use crate::model::Boottime;

#[cfg(feature = "daemon")]
pub use self::alarm::Alarm;

impl Boottime {
    /// Now, on this host.
    pub fn now() -> Self {
        let (s, ns) = gettime(libc::CLOCK_BOOTTIME);
        Self(s as u64 * 1_000_000_000 + ns as u64)
    }
}

/// This host's wall clock: microseconds since the Unix epoch.
pub fn wall_us() -> i64 {
    let (s, ns) = gettime(libc::CLOCK_REALTIME);
    s.saturating_mul(1_000_000).saturating_add(ns / 1000)
}

/// Through libc, not the vDSO directly: tests give a process a wrong clock by a library that stands before libc.
fn gettime(clock: libc::clockid_t) -> (i64, i64) {
    #[cfg(all(test, feature = "daemon"))]
    if let Some(simulated) = crate::simulation::gettime(clock) {
        return simulated;
    }
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `t` is a valid timespec, and both clocks exist on every Linux that this runs on.
    unsafe { libc::clock_gettime(clock, &mut t) };
    (t.tv_sec, t.tv_nsec)
}

/// The store's clock as this instance believes it: an offset from its own [`Boottime`], measured with every answer.
///
/// The host's wall clock plays no part while the store's goes on evenly. [`Belief`] says what is believed when it
/// jumps.
#[derive(Debug, Default)]
pub struct StoreClock(parking_lot::Mutex<Belief>);

impl StoreClock {
    fn belief(&self) -> parking_lot::MutexGuard<'_, Belief> {
        self.0.lock()
    }

    /// What is believed at this moment.
    pub fn snapshot(&self) -> Belief {
        self.belief().clone()
    }

    /// Takes in the store's clock as an answer gave it.
    pub fn sample(&self, store_us: i64, sent: Boottime, received: Boottime) -> Sampled {
        self.belief()
            .sample(Estimate::new(store_us, sent, received))
    }

    /// Asks the wall clocks of the hosts: see [`Belief::vote`].
    pub fn vote(&self, walls: &[i64]) -> Option<Verdict> {
        self.belief().vote(walls, Boottime::now())
    }

    /// While the store's clock is in doubt: how far it is ahead of what this instance believes, µs.
    pub fn doubt_us(&self) -> Option<i64> {
        self.belief().doubt_us()
    }

    /// See [`Belief::doubted_at`].
    pub fn doubted_at(&self, moment: Boottime) -> bool {
        self.belief().doubted_at(moment)
    }

    /// What is believed of the store's clock now, Unix µs; None before the first answer.
    pub fn now_us(&self) -> Option<i64> {
        self.at(Boottime::now())
    }

    /// The same in ms.
    pub fn now_ms(&self) -> Option<i64> {
        Some(self.now_us()?.div_euclid(1000))
    }

    /// What is believed of the store's clock at `moment`, Unix µs; None before the first answer.
    pub fn at(&self, moment: Boottime) -> Option<i64> {
        self.belief().at(moment)
    }

    /// When the store's clock will show `ms`, on our clock.
    pub fn when(&self, ms: i64) -> Option<Boottime> {
        self.belief().when(ms)
    }

    /// This host's wall clock minus the store's, in ms.
    pub fn wall_offset_ms(&self) -> Option<f64> {
        self.now_us()
            .map(|now| wall_us().saturating_sub(now) as f64 / 1000.0)
    }

    /// What is believed of the store's clock in Unix µs, minus our [`Boottime`] in µs.
    pub fn offset_us(&self) -> Option<i64> {
        self.belief().offset_us()
    }
}
