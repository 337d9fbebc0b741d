//! What a store of locks does, step by step; Redis and SQLite are the two.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::runtime::Handle;

use super::{
    Error,
    period::PeriodReply,
    reentrant::{EnterReply, LeaveReply, LevelToLeave},
};
use crate::model::FencingToken;

/// What a store says to a try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TryLockReply {
    Acquired(FencingToken),
    Held {
        owner: String,
        remaining: Duration,
    },
    /// This owner had it, and it is over.
    Stale,
}

/// What a store says to who claims to be the owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OwnerReply {
    /// It was the owner: renewed, or given back.
    Done,
    /// It is not; the owner of now, if there is one.
    NotOwner(Option<String>),
}

impl From<Result<(), Option<String>>> for OwnerReply {
    fn from(answer: Result<(), Option<String>>) -> Self {
        answer.map_or_else(Self::NotOwner, |()| Self::Done)
    }
}

/// How a lock is given back: unless said otherwise at once, as one that is still held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ReleaseOptions {
    /// Nobody shall have it for so long yet.
    pub(super) keep_for: Duration,
    /// It may have lapsed by the owner's own count, so the store is to look whether it has. Else it counts as given back
    /// by its owner, as long as nobody else has had it since. In a SQLite file it costs nothing to look each time.
    pub(super) check_expiry: bool,
    /// The request for it got no answer and may still arrive: it shall find that its lock is over.
    /// (One thread writes to a SQLite file, in the order of what is asked.)
    pub(super) unanswered: bool,
}

/// Is handed the answer to a request, on the client's thread.
pub(super) type Then<T> = Box<dyn FnOnce(Result<T, Error>) + Send>;

/// One key is of one kind at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Reentrant,
}

/// Where locks are. Every method but `subscribe` and `unsubscribe` is one atomic step that waits at most `limit`, and may be
/// called again when its answer was lost.
#[async_trait]
pub(super) trait Backend: Send + Sync {
    fn address(&self) -> &str;
    /// How long an answer may take in good order.
    fn patience(&self) -> Duration;
    /// `subscribed`: whoever asks is subscribed, so the release has to be published should somebody else have it.
    async fn try_lock(
        &self,
        key: &str,
        owner: &str,
        lease: Duration,
        subscribed: bool,
        limit: Duration,
    ) -> Result<TryLockReply, Error>;
    /// As `try_lock`, in no task of its own: `thread` asks, and hands the answer to `then`. Gives `then` back where that cannot be.
    fn begin_try_lock(
        &self,
        _thread: &Handle,
        (_key, _owner): (&Arc<str>, &Arc<str>),
        _lease: Duration,
        _subscribed: bool,
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
    /// As `begin_try_lock`.
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
    /// `who`: the owner, and the nonce of this step; `subscribed` as in `try_lock`.
    async fn enter(
        &self,
        key: &str,
        who: (&str, &str),
        lease: Duration,
        subscribed: bool,
        limit: Duration,
    ) -> Result<EnterReply, Error>;
    async fn leave(
        &self,
        key: &str,
        who: (&str, &str),
        which: LevelToLeave,
        limit: Duration,
    ) -> Result<LeaveReply, Error>;
    /// The present period of this length.
    async fn claim_period(
        &self,
        key: &str,
        owner: &str,
        length: Duration,
        limit: Duration,
    ) -> Result<PeriodReply, Error>;
    /// `at`: length, and begin in Unix ms.
    async fn release_period(
        &self,
        key: &str,
        owner: &str,
        at: (Duration, i64),
        limit: Duration,
    ) -> Result<(), Error>;
    /// Returns when every release of `key` from now on will wake its queue.
    async fn subscribe(&self, key: &str);
    /// Nobody waits for `key` any more.
    fn unsubscribe(&self, key: &str);
}
