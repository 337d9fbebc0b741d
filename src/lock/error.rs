//! Why a lock could not be acquired, renewed or released.

use std::time::Duration;

use crate::store;

/// Why a lock could not be acquired, renewed or given back. That somebody else has it is no error, see [`TryLock`](super::TryLock).
///
/// In all of them `key` is the lock's as the caller named it, `address` the store's URL without its password, and `reason` what was
/// wrong in the words of whoever said so.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Error {
    /// The store's URL cannot be used.
    #[error("cannot use this store: {reason}")]
    InvalidUrl { reason: String },
    /// Keys have 1 to [`KEY_MAX`](super::KEY_MAX) bytes, and no control characters and no braces.
    #[error("`{key}` cannot be the key of a lock: {reason}")]
    InvalidKey { key: String, reason: String },
    /// Zero, shorter than 10 ms, or longer than 366 days. Nothing was asked.
    #[error("cannot lock `{key}`: {reason}")]
    InvalidLease { key: String, reason: String },
    /// No answer, or none that can be relied on (a server that is full, loads its data, or is a replica): the request may have
    /// been carried out or not. Asking again is safe; assuming that the lock is held is
    /// not. What may have been acquired is given back in the background, or lapses with its lease.
    #[error("the store at {address} is not available for lock `{key}`: {reason}")]
    Unreachable {
        key: String,
        address: String,
        reason: String,
    },
    /// The store answered, and refused; asking again at once will not help. Nothing was changed.
    #[error("the store at {address} refused lock `{key}`: {reason}")]
    Refused {
        key: String,
        address: String,
        reason: String,
    },
    /// Fewer replicas than `min_replicas` have the grant or renewal, so it must not be relied on. A grant was given back.
    #[error("only {have} of {want} replicas of {address} confirmed lock `{key}`")]
    NotReplicated {
        key: String,
        address: String,
        have: u32,
        want: u32,
    },
    /// Under this key is something else: another kind of lock, or another program's data. It was not touched.
    #[error(
        "lock `{key}` at {address} is of another kind, or not a lock; use another key or another namespace"
    )]
    WrongType { key: String, address: String },
    /// The lock was granted, but the answer took so long that nothing of its lease can be trusted. It was given back.
    #[error(
        "lock `{key}` was granted, but the answer took {took:?}, too long for a lease of {lease:?}; use a longer lease"
    )]
    TooLate {
        key: String,
        lease: Duration,
        /// From before the request left, on CLOCK_BOOTTIME.
        took: Duration,
    },
    /// The lock lapsed, was given back, or was deleted, and it is not ours any more. Whoever has it now keeps it.
    #[error("lock `{key}` is not held by us any more: {}", match .holder {
        Some(holder) => format!("{holder} has it"),
        None => "nobody has it".to_owned(),
    })]
    NotHeld {
        key: String,
        /// Who has it now; None: nobody.
        holder: Option<String>,
    },
    /// The lock was lost before: it was not renewed while it could be trusted, so the store may have granted it to another by now;
    /// or the store has said that it is not ours.
    #[error("lock `{key}` was lost: it was not renewed in time, or taken away")]
    Lost { key: String },
    /// A [`Redlock`](super::Redlock) needs three nodes or more.
    #[error("a lock on a majority needs at least 3 nodes, not {have}")]
    TooFewNodes { have: usize },
    /// Too few nodes answered. What was granted was given back, or lapses with its lease.
    #[error("only {votes} of the {needed} nodes that lock `{key}` needs confirmed it: {reason}")]
    NoMajority {
        key: String,
        /// Nodes that did.
        votes: usize,
        needed: usize,
        /// What the first node said that failed.
        reason: String,
    },
    /// What is stored cannot be read: written by something else, or by another version.
    #[error("unreadable data about lock `{key}` in the store at {address}: {reason}")]
    Corrupt {
        key: String,
        address: String,
        reason: String,
    },
}

impl Error {
    /// Worth asking again soon.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. } | Self::NotReplicated { .. } | Self::NoMajority { .. }
        )
    }

    pub(super) fn of(key: &str, e: store::Error) -> Self {
        let key = key.to_owned();
        match e {
            store::Error::Unreachable { address, reason } => Self::Unreachable {
                key,
                address,
                reason,
            },
            store::Error::Refused { address, reason } => Self::Refused {
                key,
                address,
                reason,
            },
            store::Error::NotReplicated {
                address,
                have,
                want,
            } => Self::NotReplicated {
                key,
                address,
                have,
                want,
            },
            store::Error::Corrupt { address, reason } => Self::Corrupt {
                key,
                address,
                reason,
            },
        }
    }
}
