//! soloist: cron for replicated hosts.
//!
//! The map of the crate. Pure rules live in [`logic`]; everything that touches the world stands around them
//! and depends on them, never the other way: `main -> cli -> daemon -> {elector, runner, store} -> logic`.

pub mod cli;
pub mod clock;
pub mod config;
pub mod daemon;
mod early;
pub mod elector;
pub mod failpoint;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
pub mod guard;
pub mod holder;
#[warn(missing_docs)]
pub mod lock;
pub mod logic;
pub mod model;
pub mod runner;
pub mod settle;
pub mod store;
pub mod text;
pub mod view;

pub use lock::{
    Election, Elector, ExponentialBackoff, LimitedRetry, Lock, LockClient, NoRetry, Redlock,
    ReentrantLock, RetryStrategy, TryLock, Until, WithLock,
};
