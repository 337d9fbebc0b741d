//! Pure rules: no I/O, no clock, no async, no randomness. Time and answers come in as arguments, what to do
//! next comes out as data.

pub mod backoff;
pub mod belief;
pub mod claim;
pub mod contest;
pub mod hold;
pub mod lease;
pub mod observe;
pub mod run;
pub mod schedule;
pub mod timetable;
pub mod trust;
