//! soloist: cron for replicated hosts, and the locks that it is made with.
//!
//! # The locks
//!
//! [`lock`] is for programs that embed soloist: what two processes must not do at once. A [`LockClient`] takes locks in
//! Redis (feature `redis`; `tls` for `rediss://`) or in a SQLite file (feature `sqlite`). A program that wants no more
//! than this leaves the daemon out:
//!
//! ```toml
//! soloist = { version = "0.1", default-features = false, features = ["redis"] }
//! ```
//!
//! That is all that the library promises. An `Elector`, which has each planned instant of a job granted once, decides
//! by the daemon's rules and needs the feature `daemon`.
//!
//! # The daemon
//!
//! Everything else is what the program `soloist` is made of (feature `daemon`, the default). It is public for the
//! program, its tests and its benches, and may change with any version.
//!
//! Pure rules live in [`logic`], and their words in [`model`]. Everything that touches the world stands around them and
//! depends on them, never the other way: `main -> cli -> daemon -> {contender, holder, runner, store} -> logic`. The
//! locks stand beside the daemon: `lock -> store::{connection, sqlite} -> logic`.

// What is not for users of the library says so.
#![cfg_attr(feature = "daemon", warn(unreachable_pub))]

// The program.
#[cfg(feature = "daemon")]
mod acts;
#[cfg(feature = "daemon")]
mod blocking;
#[cfg(feature = "daemon")]
pub mod cli;
#[cfg(feature = "daemon")]
pub mod contender;
#[cfg(feature = "daemon")]
mod daemon;
#[cfg(feature = "daemon")]
mod failpoint;
#[cfg(all(feature = "daemon", any(test, fuzzing)))]
#[doc(hidden)]
pub mod fuzz;
#[cfg(feature = "daemon")]
pub mod guard;
#[cfg(feature = "daemon")]
pub mod health;
#[cfg(feature = "daemon")]
pub mod holder;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "daemon")]
pub mod last_will;
#[cfg(feature = "daemon")]
mod log_queue;
#[cfg(feature = "notify")]
mod notify;
#[cfg(feature = "daemon")]
#[cfg(feature = "daemon")]
pub mod runner;
#[cfg(feature = "daemon")]
pub mod settle;
#[cfg(all(test, feature = "daemon"))]
mod simulation;
#[cfg(feature = "daemon")]
mod startup;
#[cfg(feature = "daemon")]
mod text;
#[cfg(feature = "notify")]
mod traces;
#[cfg(feature = "daemon")]
mod view;
#[cfg(feature = "daemon")]
mod why;
#[cfg(feature = "daemon")]
mod words;

// The locks.
#[cfg(any(feature = "redis", feature = "sqlite"))]
#[warn(missing_docs)]
pub mod lock;

// What both stand on.
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod clock;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod config;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod logic;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod model;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod store;

#[cfg(feature = "daemon")]
pub use lock::{Election, Elector};
#[cfg(any(feature = "redis", feature = "sqlite"))]
pub use lock::{
    ExponentialBackoff, LimitedRetry, Lock, LockClient, NoRetry, Redlock, ReentrantLock,
    RetryStrategy, TryLock, Until, WithLock,
};
/// The version of the crate `redis` that [`LockClient::with_redis`] takes a client of.
#[cfg(feature = "redis")]
pub use redis;
