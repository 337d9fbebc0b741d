//! jobs.toml -> `Config`, checked. Reports every problem before anything starts.
//!
//! `load` processes the file in two steps: as written (`raw`, each value by itself), then as checked (`check`, with
//! defaults, contradictions and other files). Both add to one `Report`, so that the user sees all problems at once.
//!
//! Locks need only [`Store`], and no file: the rest is for the daemon.

#[cfg(feature = "daemon")]
mod advice;
#[cfg(all(test, feature = "daemon"))]
mod bounds;
#[cfg(feature = "daemon")]
mod check;
#[cfg(feature = "daemon")]
mod digest;
#[cfg(feature = "daemon")]
mod expand;
#[cfg(feature = "daemon")]
mod file;
#[cfg(feature = "daemon")]
mod form;
#[cfg(feature = "daemon")]
mod handed;
#[cfg(feature = "daemon")]
mod http;
#[cfg(feature = "daemon")]
mod keys;
#[cfg(any(feature = "tls", feature = "sqlite"))]
pub(crate) mod named;
#[cfg(feature = "daemon")]
mod notify;
#[cfg(feature = "daemon")]
mod quote;
#[cfg(feature = "daemon")]
mod raw;
#[cfg(feature = "daemon")]
mod report;
pub mod rights;
mod spelling;
mod store;
#[cfg(all(test, feature = "daemon"))]
mod tests;
#[cfg(feature = "daemon")]
pub(crate) mod tokens;
#[cfg(feature = "daemon")]
mod tree;
mod url;
#[cfg(feature = "daemon")]
mod value;

pub use self::{
    spelling::nearest,
    store::{Secret, Store, StoreRetry, StoreUrl, Tls},
};
pub use crate::{logic::lease::Lease, model::duration::show as show_duration};

#[cfg(feature = "notify")]
pub(crate) use self::raw::is_http_url;
#[cfg(feature = "daemon")]
pub use self::{
    advice::{Observed, Written, load_written},
    file::{Config, Limits, duration, load, parse},
    http::{Http, HttpTls, Listen},
    notify::{Channel, Channels, Form as MessageForm, Sends, Way},
    report::{Problem, Report},
};
#[cfg(feature = "daemon")]
pub(crate) use self::{file::trim_memory, handed::Handed};
#[cfg(feature = "daemon")]
pub use crate::{
    logic::catch_up::CatchUp,
    model::job::{Alarms, Command, HiddenUrl, Job, JobRetry, OnStateLoss, Output},
};
