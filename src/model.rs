//! The basic types that all parts of soloist use.

pub mod duration;
#[cfg(feature = "daemon")]
pub mod job;
#[cfg(feature = "sqlite")]
mod marks;
#[cfg(feature = "sqlite")]
mod run;

use std::{fmt, time::Duration};

#[cfg(feature = "sqlite")]
pub use self::{marks::*, run::*};

/// Nanoseconds of CLOCK_BOOTTIME, which is monotonic and includes the time in which the host was suspended.
///
/// All processes of one host can compare their times (the guard reads the daemon's deadlines on this clock). Times of
/// different hosts must not be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sqlite", derive(serde::Serialize, serde::Deserialize))]
pub struct Boottime(pub u64);

impl Boottime {
    /// The time from `earlier` to `self`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<Duration> for Boottime {
    type Output = Self;
    fn add(self, d: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

impl std::ops::Sub<Duration> for Boottime {
    type Output = Self;
    fn sub(self, d: Duration) -> Self {
        Self(
            self.0
                .saturating_sub(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

/// An integer that grows with every lease granted for a job: occurrence in ms × 1000 + attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(
    feature = "sqlite",
    derive(serde::Serialize, serde::Deserialize),
    serde(transparent)
)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema), schema(value_type = i64))]
pub struct FencingToken(pub i64);

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
