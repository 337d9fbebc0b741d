//! The contract of a store of locks, one method for each atomic step. Redis and SQLite implement it.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::runtime::Handle;

use super::{
    Error,
    period::PeriodReply,
    reentrant::{EnterReply, LeaveReply, LevelToLeave},
};
use crate::model::FencingToken;

/// A store's answer to an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TryLockReply {
    Acquired(FencingToken),
    Held {
        owner: String,
        remaining: Duration,
    },
    /// This owner had the lock before, and it is over.
    Stale,
}

/// A store's answer to a request in the name of an owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OwnerReply {
    /// It was the owner: the lock is renewed or released.
    Done,
    /// It is not the owner; with the present owner, if there is one.
    NotOwner(Option<String>),
}

impl From<Result<(), Option<String>>> for OwnerReply {
    fn from(answer: Result<(), Option<String>>) -> Self {
        answer.map_or_else(Self::NotOwner, |()| Self::Done)
    }
}

/// How a lock is released. The default is at once, as a lock that is still held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ReleaseOptions {
    /// For this long, nobody else may acquire the lock yet.
    pub(super) keep_for: Duration,
    /// By the owner's own count the lock may have lapsed, so the store must check that. Otherwise it counts as released
    /// by its owner, as long as nobody else has had it since. A SQLite file checks each time, because that costs
    /// nothing.
    pub(super) check_expiry: bool,
    /// The request for the lock got no answer, and may still arrive. Then it must find that its lock is over. (A SQLite
    /// file does not need this: one thread writes to it, in the order of the requests.)
    pub(super) unanswered: bool,
}

/// Gets the answer to a request, on the client's thread.
pub(super) type Then<T> = Box<dyn FnOnce(Result<T, Error>) + Send>;

/// The kind of lock; a key has one kind at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Reentrant,
}

/// A store of locks. Every method except `subscribe` and `unsubscribe` is one atomic step that takes at most `limit`,
/// and may be repeated if its answer was lost.
#[async_trait]
pub(super) trait Backend: Send + Sync {
    fn address(&self) -> &str;
    /// The time that an answer may take if nothing is wrong.
    fn patience(&self) -> Duration;
    async fn try_lock(
        &self,
        key: &str,
        owner: &str,
        lease: Duration,
        limit: Duration,
    ) -> Result<TryLockReply, Error>;
    /// As `try_lock`, without a task of its own: `thread` sends the request, and passes the answer to `then`. If the
    /// store cannot do that, this returns `then`.
    fn begin_try_lock(
        &self,
        _thread: &Handle,
        (_key, _owner): (&Arc<str>, &Arc<str>),
        _lease: Duration,
        then: Then<TryLockReply>,
    ) -> Result<(), Then<TryLockReply>> {
        Err(then)
    }
    async fn renew(
        &self,
        key: &str,
        owner: &str,
        kind: Kind,
        lease: Duration,
        limit: Duration,
    ) -> Result<OwnerReply, Error>;
    async fn release(
        &self,
        key: &str,
        owner: &str,
        options: ReleaseOptions,
        limit: Duration,
    ) -> Result<OwnerReply, Error>;
    /// As `begin_try_lock`, for `release`.
    fn begin_release(
        &self,
        _thread: &Handle,
        (_key, _owner): (&Arc<str>, &Arc<str>),
        _options: ReleaseOptions,
        then: Then<OwnerReply>,
    ) -> Result<(), Then<OwnerReply>> {
        Err(then)
    }
    async fn holder(&self, key: &str, limit: Duration)
    -> Result<Option<(String, Duration)>, Error>;
    /// `who` is the owner, and the nonce of this request.
    async fn enter(
        &self,
        key: &str,
        who: (&str, &str),
        lease: Duration,
        limit: Duration,
    ) -> Result<EnterReply, Error>;
    async fn leave(
        &self,
        key: &str,
        who: (&str, &str),
        which: LevelToLeave,
        limit: Duration,
    ) -> Result<LeaveReply, Error>;
    /// Claims the present period of this length.
    async fn claim_period(
        &self,
        key: &str,
        owner: &str,
        length: Duration,
        limit: Duration,
    ) -> Result<PeriodReply, Error>;
    /// `at` is the length, and the beginning in Unix ms.
    async fn release_period(
        &self,
        key: &str,
        owner: &str,
        at: (Duration, i64),
        limit: Duration,
    ) -> Result<(), Error>;
    /// Returns when every later release of `key` will wake its queue.
    async fn subscribe(&self, key: &str);
    /// Nobody waits for `key` any more.
    fn unsubscribe(&self, key: &str);
}
