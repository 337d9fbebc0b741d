//! Pure rules: no I/O, no clock, no async, no randomness. The caller passes in times and answers; what to do next is
//! returned as data.

pub(crate) mod bent;

#[cfg(feature = "daemon")]
pub mod attempts;
pub mod backoff;
pub mod belief;
#[cfg(feature = "daemon")]
pub mod catch_up;
#[cfg(feature = "sqlite")]
pub mod claim;
#[cfg(feature = "daemon")]
pub mod coming;
#[cfg(feature = "daemon")]
pub mod contest;
#[cfg(feature = "daemon")]
pub mod drain;
#[cfg(feature = "daemon")]
pub mod guard_life;
#[cfg(feature = "daemon")]
pub mod hold;
#[cfg(feature = "daemon")]
pub mod jitter;
#[cfg(feature = "daemon")]
pub mod judge;
pub mod lease;
#[cfg(feature = "sqlite")]
pub mod median;
#[cfg(feature = "sqlite")]
pub mod notify;
#[cfg(feature = "daemon")]
pub mod observe;
#[cfg(feature = "daemon")]
pub mod pace;
#[cfg(feature = "daemon")]
pub mod quarantine;
#[cfg(feature = "daemon")]
pub mod schedule;
#[cfg(feature = "daemon")]
pub mod timetable;
#[cfg(feature = "daemon")]
pub mod trace;
pub mod trust;
#[cfg(feature = "daemon")]
pub mod waits;
