//! Why a request for a lock failed.

use std::time::Duration;

use crate::store;

/// Why a lock could not be acquired, renewed or released. A lock that somebody else holds is not an error, see
/// [`TryLock`](super::TryLock).
///
/// In every variant, `key` is the key as the caller named it, `address` is the store's URL without its password, and
/// `reason` says what was wrong, in the words of the store, the driver or the operating system.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Error {
    /// The store's URL, its certificates or its SQLite file cannot be used.
    #[error("cannot use this store: {reason}")]
    InvalidUrl { reason: String },
    /// A key has 1 to [`KEY_MAX`](super::KEY_MAX) bytes, and contains no control characters and no braces. Nothing was
    /// sent.
    #[error("`{key}` cannot be the key of a lock: {reason}")]
    InvalidKey { key: String, reason: String },
    /// A lease is 10 ms to 366 days long; a period is a whole number of milliseconds, 1 ms to 366 days. Nothing was
    /// sent.
    #[error("cannot lock `{key}`: {reason}")]
    InvalidLease { key: String, reason: String },
    /// The store gave no answer, or none that can be relied on (the server is full, is loading its data, or is a
    /// replica). Whether the request was carried out is unknown. Asking again is safe; assuming that the lock is held
    /// is not. If the request acquired something, the client releases it in the background, or it lapses with its
    /// lease.
    #[error("the store at {address} is not available for lock `{key}`: {reason}")]
    Unreachable {
        key: String,
        address: String,
        reason: String,
    },
    /// The store answered, and refused. Asking again at once does not help. Nothing was changed.
    #[error("the store at {address} refused the request for lock `{key}`: {reason}")]
    Refused {
        key: String,
        address: String,
        reason: String,
    },
    /// Fewer replicas than `min_replicas` have the grant or the renewal, so the caller must not rely on it. The client
    /// releases a grant.
    #[error("only {have} of {want} replicas of {address} confirmed lock `{key}`")]
    NotReplicated {
        key: String,
        address: String,
        /// The number of replicas that confirmed it.
        have: u32,
        /// The number that `min_replicas` demands.
        want: u32,
    },
    /// The key holds something else: another kind of lock, or the data of another program. It was not touched.
    #[error(
        "key `{key}` at {address} holds another kind of lock, or the data of another program; \
         use another key or another namespace"
    )]
    WrongType { key: String, address: String },
    /// The store granted the lock, but its answer took so long that nothing of the lease can be trusted. The client
    /// releases the lock.
    #[error(
        "lock `{key}` was granted, but the answer took {took:?}, too long for a lease of {lease:?}; use a longer lease"
    )]
    TooLate {
        key: String,
        /// The lease that was asked for.
        lease: Duration,
        /// Time since just before the request left, on CLOCK_BOOTTIME.
        took: Duration,
    },
    /// The lock lapsed, was released, or was deleted, so it does not belong to this owner any more. If somebody else
    /// holds it now, they keep it.
    #[error("this owner does not hold lock `{key}` any more: {}", match .holder {
        Some(holder) => format!("{holder} has it"),
        None => "nobody has it".to_owned(),
    })]
    NotHeld {
        key: String,
        /// The name of the client that holds it now; None: nobody does.
        holder: Option<String>,
    },
    /// The lock was lost before this call: it was not renewed while it could be trusted, so the store may have granted
    /// it to somebody else by now; or the store has said that it does not belong to this owner.
    #[error(
        "lock `{key}` was lost: it was not renewed in time, or the store no longer has it in our name"
    )]
    Lost { key: String },
    /// A [`Redlock`](super::Redlock) needs three nodes or more.
    #[error("a Redlock needs at least 3 nodes, not {have}")]
    TooFewNodes { have: usize },
    /// Fewer nodes than a majority confirmed the request. What single nodes granted is released, or lapses with its
    /// lease.
    #[error(
        "lock `{key}` needs the confirmation of {needed} nodes, but only {votes} confirmed it: {reason}"
    )]
    NoMajority {
        key: String,
        /// The number of nodes that confirmed it.
        votes: usize,
        /// The number of nodes in a majority.
        needed: usize,
        /// What the first node that failed said.
        reason: String,
    },
    /// The data in the store cannot be read: another program or another version wrote it.
    #[error("unreadable data about lock `{key}` in the store at {address}: {reason}")]
    Corrupt {
        key: String,
        address: String,
        reason: String,
    },
}

impl Error {
    /// True if asking again soon may succeed: the store did not answer, or too few replicas or nodes confirmed.
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
