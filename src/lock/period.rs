//! Periods of the store's clock, each taken once: what a lock alone cannot give to a command that ends in a millisecond.

use std::{sync::Arc, time::Duration};

use super::{Core, Error, IfDropped, LockClient, checked, name_of};
use crate::config;

/// What a store says to who wants the present period.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Timed {
    /// With its begin, Unix ms of the store's clock.
    Taken {
        begin: i64,
        next: Duration,
    },
    Before {
        owner: String,
        next: Duration,
    },
}

/// How [`LockClient::take_period`] ended; `next`: when the next period begins, by the store's clock.
#[derive(Debug)]
#[must_use = "the period may be another's"]
pub(crate) enum TakePeriod {
    Taken {
        period: OwnPeriod,
        next: Duration,
    },
    /// Somebody, perhaps we ourselves, took it before.
    Before {
        /// The name of the client that did, see [`LockClient::named`]; empty when it gave the period back.
        holder: String,
        next: Duration,
    },
}

/// A period that is ours.
#[derive(Clone)]
pub(crate) struct OwnPeriod {
    core: Arc<Core>,
    key: Arc<str>,
    owner: Arc<str>,
    length: Duration,
    begin_ms: i64,
}

impl std::fmt::Debug for OwnPeriod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnPeriod")
            .field("key", &self.key)
            .field("length", &self.length)
            .field("begin_ms", &self.begin_ms)
            .finish_non_exhaustive()
    }
}

impl LockClient {
    /// As [`LockClient::claim_period`], with what it takes to give the period back.
    pub(crate) async fn take_period(
        &self,
        key: &str,
        length: Duration,
    ) -> Result<TakePeriod, Error> {
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
        let (taken, unheard) = self
            .core
            .run(&key, async move { core.period(asked, owner, length).await })
            .await?;
        // From here on it is the caller's.
        unheard.disarm();
        Ok(taken)
    }
}

impl Core {
    /// What is taken is given back should nobody hear of it.
    async fn period(
        self: Arc<Self>,
        key: Arc<str>,
        owner: Arc<str>,
        length: Duration,
    ) -> Result<(TakePeriod, IfDropped<impl FnOnce() + Send>), Error> {
        let limit = self.backend.patience();
        let ask = || self.backend.take_period(&key, &owner, length, limit);
        let taken = match self.insist(limit, ask).await? {
            Timed::Taken { begin, next } => TakePeriod::Taken {
                next,
                period: OwnPeriod {
                    core: self.clone(),
                    key,
                    owner,
                    length,
                    begin_ms: begin,
                },
            },
            Timed::Before { owner, next } => TakePeriod::Before {
                holder: name_of(&owner).to_owned(),
                next,
            },
        };
        let ours = match &taken {
            TakePeriod::Taken { period, .. } => Some(period.clone()),
            TakePeriod::Before { .. } => None,
        };
        let unheard = IfDropped::new(move || {
            if let Some(period) = ours {
                self.home.finish(async move {
                    if let Err(e) = period.give_back_here().await {
                        tracing::debug!(error = %e, "the period stays taken");
                    }
                });
            }
        });
        Ok((taken, unheard))
    }
}

impl OwnPeriod {
    async fn give_back_here(&self) -> Result<(), Error> {
        let limit = self.core.backend.patience();
        let give = || {
            let at = (self.length, self.begin_ms);
            self.core
                .backend
                .give_back_period(&self.key, &self.owner, at, limit)
        };
        self.core.insist(limit, give).await
    }
}

/// What `soloist exec` and its guard do beside.
#[cfg(feature = "daemon")]
impl LockClient {
    /// Gives back what a process took that is dead now, by the owner of its lock.
    pub(crate) async fn release_for(&self, key: &str, owner: &str) -> Result<(), Error> {
        let (core, key, owner) = (self.core.clone(), checked(key)?, owner.to_owned());
        let asked = key.clone();
        let free = async move {
            let limit = core.backend.patience();
            let how = super::Giving {
                keep: Duration::ZERO,
                sure: true,
                unheard: false,
            };
            core.insist(limit, || core.backend.release(&asked, &owner, how, limit))
                .await
        };
        // Another's by now, or nobody's: then it is over anyhow.
        self.core.run(&key, free).await.map(drop)
    }
}

#[cfg(feature = "daemon")]
impl OwnPeriod {
    /// Its begin: Unix milliseconds of the store's clock.
    pub(crate) fn begin_ms(&self) -> i64 {
        self.begin_ms
    }

    /// Nothing was done in it: another may have it.
    ///
    /// # Errors
    /// The store's; then it stays taken.
    pub(crate) async fn give_back(self) -> Result<(), Error> {
        let (core, key) = (self.core.clone(), self.key.clone());
        core.run(&key, async move { self.give_back_here().await })
            .await
    }
}
