//! The store's address and settings: the only part of the configuration that locks need.

use std::{path::PathBuf, time::Duration};

use crate::logic::backoff;

/// The address and settings of a store.
///
/// Create it with [`Store::from_url`], and then change fields. Guards get it too, with all secrets (as a `Handed`),
/// because they settle if the daemon dies.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Store {
    pub url: StoreUrl,
    /// Prefix of every key.
    pub namespace: String,
    pub username: Option<String>,
    /// The content of `password_file`, without the final newline.
    pub password: Option<Secret>,
    pub tls: Option<Tls>,
    /// The time limit of each command.
    pub timeout: Duration,
    pub pool_size: u32,
    /// Replicas that must have a grant or renewal before it counts (WAIT); 0: none.
    pub min_replicas: u32,
    pub retry: StoreRetry,
}

/// The store that a URL names. `Display` and `Debug` leave out the password.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreUrl {
    /// The absolute path of the file; a relative one in the configuration starts at the directory of that file.
    Sqlite(PathBuf),
    /// `redis://`, `rediss://` or `redis+unix://`, as written.
    Redis(Secret),
    /// `memory:`, for tests only: one process.
    Memory,
}

/// A text that must not be shown. Printing or serialising it gives `***`; only [`Secret::expose`] and `Handed` give the
/// text itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself: only for the store, never for output.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

/// The PEM files for TLS. Create it with [`Tls::default`], and then change fields.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "daemon", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Tls {
    pub ca: Option<PathBuf>,
    /// Always together with `key`.
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

/// How often and when a caller repeats a store command after a transport error.
///
/// Create it with [`StoreRetry::default`], and then change fields.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "daemon", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct StoreRetry {
    /// Attempts after the first.
    pub attempts: u32,
    pub interval: Duration,
    pub exponential: bool,
    pub max_interval: Duration,
    pub jitter: bool,
}

impl StoreRetry {
    /// The pause after the `nth` failure in a row (from 1). With `jitter`, `chance` (from 0 to 1) shortens it.
    pub fn pause(&self, nth: u32, chance: f64) -> Duration {
        let nth = if self.exponential { nth } else { 1 };
        let most = self.max_interval.max(self.interval);
        let pause = backoff::nth(self.interval, nth, most);
        match self.jitter {
            true => backoff::spread(pause, chance),
            false => pause,
        }
    }
}

#[cfg(any(feature = "redis", feature = "sqlite"))]
impl StoreRetry {
    /// How long the first try and all others may take, if each may take `within`.
    pub(crate) fn time_for_all(&self, within: Duration) -> Duration {
        within * (self.attempts + 1)
    }

    /// The pauses between the tries of a renewal. The second try goes out at once, in case the first found a dead
    /// connection.
    pub(crate) fn renewal_pauses(
        &self,
        chance: impl Fn() -> f64,
    ) -> impl Iterator<Item = Duration> {
        (1..=self.attempts).map(move |nth| match nth {
            1 => Duration::ZERO,
            nth => self.pause(nth, chance()),
        })
    }
}

impl Default for StoreRetry {
    fn default() -> Self {
        Self {
            attempts: 3,
            interval: Duration::from_millis(100),
            exponential: true,
            max_interval: Duration::from_secs(2),
            jitter: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_try_of_a_renewal_goes_out_at_once_and_further_ones_after_longer_pauses() {
        let ms = Duration::from_millis;
        let pauses = |exponential, attempts| -> Vec<_> {
            let retry = StoreRetry {
                attempts,
                exponential,
                ..StoreRetry::default()
            };
            retry.renewal_pauses(|| 1.0).collect()
        };
        assert_eq!(pauses(true, 4), [0, 200, 400, 800].map(ms));
        assert_eq!(pauses(false, 3), [0, 100, 100].map(ms));
        assert_eq!(pauses(true, 0), []);
    }

    #[test]
    fn each_try_may_take_its_time_the_first_included() {
        let retry = StoreRetry {
            attempts: 3,
            ..StoreRetry::default()
        };
        let second = Duration::from_secs(1);
        assert_eq!(retry.time_for_all(second), 4 * second);
    }
}
