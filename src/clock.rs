//! The only file that asks the operating system for the time.
//!
//! Two clocks, never mixed: wall time names occurrences, [`Boottime`] measures leases. The wall clock of a host
//! may be wrong or stepped at any moment and nothing but *when* an occurrence is due depends on it.

use crate::logic::belief::{Belief, Estimate, Sampled, Verdict};
pub use crate::model::Boottime;

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
/// The host's wall clock plays no part while the store's goes on evenly. [`Belief`] says what is believed when it jumps.
#[derive(Debug, Default)]
pub struct StoreClock(std::sync::Mutex<Belief>);

impl StoreClock {
    fn belief(&self) -> std::sync::MutexGuard<'_, Belief> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
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

/// A timer on [`Boottime`]: it is exact to a fraction of a millisecond, where the runtime's own rounds up to the
/// next one, and it counts the time that the host was suspended.
#[derive(Debug)]
pub struct Alarm(tokio::io::unix::AsyncFd<std::os::fd::OwnedFd>);

impl Alarm {
    /// # Errors
    /// No descriptor left.
    pub fn new() -> std::io::Result<Self> {
        use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
        let fd = timerfd_create(
            TimerfdClockId::Boottime,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        // SAFETY: an owned descriptor stays open, and is this one, for as long as the AsyncFd has it.
        Ok(Self(unsafe { tokio::io::unix::AsyncFd::register(fd)? }))
    }

    /// Returns at `at`, or at once when that has passed. Cancel safe; one caller at a time.
    pub async fn until(&self, at: Boottime) {
        use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_settime};
        loop {
            // As a span from now, not as an absolute time: ours is libc's idea of the clock, the timer has the
            // kernel's.
            let left = at.since(Boottime::now());
            if left.is_zero() {
                return;
            }
            let value = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let zero = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let set = timerfd_settime(
                &self.0,
                TimerfdTimerFlags::empty(),
                &Itimerspec {
                    it_interval: zero,
                    it_value: value,
                },
            );
            if set.is_err() {
                tokio::time::sleep(left).await;
                continue;
            }
            if let Ok(mut ready) = self.0.readable().await {
                let mut count = [0; 8];
                // Nothing there (EAGAIN) when the timer was set again meanwhile.
                let _ = rustix::io::read(&self.0, &mut count);
                ready.clear_ready();
            }
        }
    }
}
