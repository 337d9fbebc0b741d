//! What the black-box tests share: servers, fleets, the witness job and its judge, processes, waiting.

pub mod fleet;
pub mod process;
pub mod proxy;
pub mod server;
pub mod trace;
pub mod witness;

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How long a condition may take that a healthy machine meets in a moment: only a broken program waits it out.
pub const GENEROUS: Duration = Duration::from_secs(60);

/// The first value that `look` finds, asked again and again.
///
/// # Panics
/// When there is none within `limit`, with what was awaited.
#[track_caller]
pub fn wait_for<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            begun.elapsed() < limit,
            "waited {limit:?} in vain for this: {what}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    wait_for(what, limit, || holds().then_some(()));
}

/// Seconds that the long tests last: `SOLOIST_TEST_SECONDS`, else 10.
pub fn test_seconds() -> u64 {
    std::env::var("SOLOIST_TEST_SECONDS")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(10)
}

/// Fleets measure milliseconds, so that not all of them may run at one time, however many test threads there are.
static SLOTS: Mutex<usize> = Mutex::new(4);
static SLOT_FREE: Condvar = Condvar::new();

/// The right to run so much at one time; given back on drop.
pub struct Slots(usize);

impl Slots {
    pub fn take(n: usize) -> Self {
        let mut free = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
        while *free < n {
            free = SLOT_FREE.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= n;
        Self(n)
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        *SLOTS.lock().unwrap_or_else(PoisonError::into_inner) += self.0;
        SLOT_FREE.notify_all();
    }
}
