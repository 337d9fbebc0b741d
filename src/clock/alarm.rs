//! Waiting for a moment of [`Boottime`].

use super::Boottime;

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
            #[cfg(test)]
            if crate::simulation::simulated() {
                tokio::time::sleep(left).await;
                continue;
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
