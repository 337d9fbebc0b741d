//! Where leases and locks are kept. `Store` is the contract of a fleet, by which claims are decided and remembered: `memory`,
//! `redis` and `sqlite` keep it alike, and one suite (tests/it/conformance.rs) runs over all of them. Locks share
//! the connections to Redis, the SQLite file, and what may go wrong.

#[cfg(feature = "redis")]
pub(crate) mod connection;
#[cfg(feature = "sqlite")]
mod contract;
#[cfg(feature = "daemon")]
pub mod memory;
#[cfg(feature = "daemon")]
mod open;
#[cfg(feature = "sqlite")]
mod output;
#[cfg(feature = "daemon")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sqlite;

use std::time::Duration;

#[cfg(feature = "daemon")]
pub use self::open::open;
#[cfg(feature = "sqlite")]
pub use self::{contract::*, output::OUTPUT_PATIENCE};

/// How long the last fencing token of a lock that nobody takes is remembered.
pub const FENCE_TTL: Duration = Duration::from_secs(7 * 24 * 3600);

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The request may have been carried out or not. Asking again is safe.
    #[error("the store at {address} is not available: {reason}")]
    Unreachable { address: String, reason: String },
    /// The store answered, and refused; asking again at once will not help.
    #[error("the store at {address} refused: {reason}")]
    Refused { address: String, reason: String },
    /// The grant or renewal was made, but fewer replicas than `min_replicas` have it. It must not be relied on.
    #[error("only {have} of {want} replicas of {address} confirmed the write")]
    NotReplicated {
        address: String,
        have: u32,
        want: u32,
    },
    /// What is stored cannot be read: written by something else, or by another version.
    #[error("unreadable data in the store at {address}: {reason}")]
    Corrupt { address: String, reason: String },
}

impl Error {
    /// Worth asking again soon.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::NotReplicated { .. })
    }
}
