//! Periods of the store's clock, each claimed once. A lock alone cannot do that for a command that ends in a
//! millisecond.

use std::{sync::Arc, time::Duration};

use super::{Core, Error, IfDropped, LockClient, checked, name_of};
use crate::config;

/// A store's answer to a claim of the present period.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PeriodReply {
    /// With the beginning of the period, in Unix ms of the store's clock.
    Claimed {
        begin: i64,
        next: Duration,
    },
    Held {
        owner: String,
        next: Duration,
    },
}

/// How [`LockClient::try_claim_period`] ended; `next`: the next period begins after this time, by the store's clock.
#[derive(Debug)]
#[must_use = "the period may be another's"]
pub(crate) enum PeriodClaim {
    Claimed {
        period: ClaimedPeriod,
        next: Duration,
    },
    /// Somebody, perhaps this client, has claimed it before.
    Held {
        /// The name of the client that claimed it, see [`LockClient::named`]; empty if that client released the period.
        holder: String,
        next: Duration,
    },
}

/// A period that this client has claimed.
#[derive(Clone)]
pub(crate) struct ClaimedPeriod {
    core: Arc<Core>,
    key: Arc<str>,
    owner: Arc<str>,
    length: Duration,
    begin_ms: i64,
}

impl std::fmt::Debug for ClaimedPeriod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClaimedPeriod")
            .field("key", &self.key)
            .field("length", &self.length)
            .field("begin_ms", &self.begin_ms)
            .finish_non_exhaustive()
    }
}

impl LockClient {
    /// As [`LockClient::claim_period`]; a claimed period can be released. If the future is dropped, the request
    /// continues to its answer, and a period that was claimed is then released.
    pub(crate) async fn try_claim_period(
        &self,
        key: &str,
        length: Duration,
    ) -> Result<PeriodClaim, Error> {
        let key = checked(key)?;
        let whole = length.subsec_nanos().is_multiple_of(1_000_000);
        if length.is_zero() || !whole || length > config::Lease::LONGEST_LOCK {
            return Err(Error::InvalidLease {
                key: key.to_string(),
                reason: format!(
                    "a period must be whole milliseconds, at least one and at most 366 days, not {length:?}"
                ),
            });
        }
        let (core, owner, asked) = (self.core.clone(), self.owner(), key.clone());
        let (claim, release_if_dropped) = self
            .core
            .run(&key, async move {
                core.claim_period(asked, owner, length).await
            })
            .await?;
        // From here on the caller has it.
        release_if_dropped.disarm();
        Ok(claim)
    }
}

impl Core {
    /// If the claimant is gone when the answer comes, a claimed period is released.
    async fn claim_period(
        self: Arc<Self>,
        key: Arc<str>,
        owner: Arc<str>,
        length: Duration,
    ) -> Result<(PeriodClaim, IfDropped<impl FnOnce() + Send>), Error> {
        let limit = self.backend.patience();
        let ask = || self.backend.claim_period(&key, &owner, length, limit);
        let claim = match self.with_retries(limit, ask).await? {
            PeriodReply::Claimed { begin, next } => PeriodClaim::Claimed {
                next,
                period: ClaimedPeriod {
                    core: self.clone(),
                    key,
                    owner,
                    length,
                    begin_ms: begin,
                },
            },
            PeriodReply::Held { owner, next } => PeriodClaim::Held {
                holder: name_of(&owner).to_owned(),
                next,
            },
        };
        let ours = match &claim {
            PeriodClaim::Claimed { period, .. } => Some(period.clone()),
            PeriodClaim::Held { .. } => None,
        };
        let release_if_dropped = IfDropped::new(move || {
            if let Some(period) = ours {
                self.thread.spawn_tracked(async move {
                    if let Err(e) = period.release_here().await {
                        tracing::debug!(error = %e, "the period stays claimed");
                    }
                });
            }
        });
        Ok((claim, release_if_dropped))
    }
}

impl ClaimedPeriod {
    async fn release_here(&self) -> Result<(), Error> {
        let limit = self.core.backend.patience();
        let release = || {
            let at = (self.length, self.begin_ms);
            self.core
                .backend
                .release_period(&self.key, &self.owner, at, limit)
        };
        self.core.with_retries(limit, release).await
    }
}

/// What `soloist exec` and its guard need in addition.
#[cfg(feature = "daemon")]
impl LockClient {
    /// Releases what a process that is now dead held, by the owner of its lock. Dropping the future does not cancel
    /// that.
    pub(crate) async fn release_for(&self, key: &str, owner: &str) -> Result<(), Error> {
        let (core, key, owner) = (self.core.clone(), checked(key)?, owner.to_owned());
        let asked = key.clone();
        let free = async move {
            let limit = core.backend.patience();
            let options = super::ReleaseOptions {
                keep_for: Duration::ZERO,
                check_expiry: false,
                unanswered: false,
            };
            core.with_retries(limit, || {
                core.backend.release(&asked, &owner, options, limit)
            })
            .await
        };
        // If somebody else or nobody holds it by now, there is nothing left to do.
        self.core.run(&key, free).await.map(drop)
    }
}

#[cfg(feature = "daemon")]
impl ClaimedPeriod {
    /// The beginning of the period, in Unix milliseconds of the store's clock.
    pub(crate) fn begin_ms(&self) -> i64 {
        self.begin_ms
    }

    /// Releases the period, because nothing was done in it: somebody else may claim it. Dropping the future does not
    /// cancel the release: it continues on the client's thread.
    ///
    /// # Errors
    /// Those of the store; the period then stays claimed.
    pub(crate) async fn release(self) -> Result<(), Error> {
        let (core, key) = (self.core.clone(), self.key.clone());
        core.run(&key, async move { self.release_here().await })
            .await
    }
}
