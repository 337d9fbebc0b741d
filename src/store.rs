//! The stores, which keep leases and locks. `Store` is the contract between a fleet and its store, which decides claims
//! and remembers the decisions. `memory`, `redis` and `sqlite` implement it, and one suite of tests
//! (tests/it/conformance.rs) runs over all three. The library's locks use the same connections to Redis, the same
//! SQLite file and the same errors.

#[cfg(any(feature = "http", feature = "notify"))]
mod asking;
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

#[cfg(any(feature = "http", feature = "notify"))]
pub(crate) use self::asking::Asking;
#[cfg(feature = "daemon")]
pub use self::open::open;
#[cfg(feature = "sqlite")]
pub use self::{contract::*, output::OUTPUT_PATIENCE};

/// How long a store remembers the last fencing token of a lock that nobody takes.
pub const FENCE_TTL: Duration = Duration::from_secs(7 * 24 * 3600);

/// The name of this host, as those who use a store are told apart by it.
#[cfg(any(feature = "redis", feature = "sqlite"))]
pub(crate) fn host() -> String {
    let host = rustix::system::uname();
    match host.nodename().to_string_lossy() {
        host if host.is_empty() => "host".to_owned(),
        host => host.into_owned(),
    }
}

/// Why a request to a store failed. `address` names the store, without secrets.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// No answer came: the store may have carried out the request or not. Repeating the request is safe.
    #[error("the store at {address} is not available: {reason}")]
    Unreachable { address: String, reason: String },
    /// The store answered with a refusal; repeating the request at once does not help.
    #[error("the store at {address} refused: {reason}")]
    Refused { address: String, reason: String },
    /// The store made the grant or renewal, but fewer replicas than `min_replicas` have it. The caller must not rely on
    /// it.
    #[error("only {have} of {want} replicas of {address} confirmed the write")]
    NotReplicated {
        address: String,
        have: u32,
        want: u32,
    },
    /// soloist cannot read the stored data: another program or another version wrote it.
    #[error("unreadable data in the store at {address}: {reason}")]
    Corrupt { address: String, reason: String },
}

impl Error {
    /// True if the same request may soon succeed.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::NotReplicated { .. })
    }
    /// What kind of error it is, in words that say nothing of where the store is.
    #[cfg(feature = "daemon")]
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "the store does not answer",
            Self::Refused { .. } => "the store refuses what this instance asks",
            Self::NotReplicated { .. } => "too few replicas of the store confirm what is written",
            Self::Corrupt { .. } => "the data in the store cannot be read",
        }
    }
}
