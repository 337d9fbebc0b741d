//! jobs.toml -> [`Config`], checked. Whatever is wrong is reported here, before anything starts.
//!
//! [`load`] reads the file twice over: as written (`raw`, each value by itself), then as checked (`check`, with
//! defaults, contradictions and other files). Both add to one [`Report`], so that all problems come at once.

#[cfg(test)]
mod bounds;
mod check;
mod digest;
mod expand;
mod raw;
mod report;
pub mod rights;
#[cfg(test)]
mod tests;
mod tree;
mod url;
mod value;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use toml::de::DeTable;

use self::{report::Collector, tree::Reader};
use crate::model::JobName;

pub use self::report::{Problem, Report};
pub use self::value::nearest;
pub use crate::{
    logic::{lease::Lease, timetable::CatchUp},
    model::{
        duration::show as show_duration,
        job::{Command, Job, JobRetry, OnStateLoss, Output},
    },
};

/// A duration as the configuration writes it: `250ms`, `15s`, `1h30m`.
///
/// # Errors
/// What is wrong, and what to do.
pub fn duration(text: &str) -> Result<Duration, String> {
    value::duration(text).map_err(|e| match e.hint {
        Some(hint) => format!("{}; {hint}", e.message),
        None => e.message,
    })
}

/// Reads and checks the configuration file, with this process's environment.
///
/// # Errors
/// All problems of the file, or the one that it cannot be read.
pub fn load(path: &Path) -> Result<Config, Report> {
    let failed =
        |message: String, hint: &str| Report::of_file(path, message, Some(hint.to_owned()));
    let bytes = std::fs::read(path).map_err(|error| {
        failed(
            format!("cannot read the configuration: {error}"),
            "name another file with `--config` or `SOLOIST_CONFIG`",
        )
    })?;
    rights::trusted(path).map_err(|f| failed(f.message, &f.fix))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = valid.iter().filter(|b| **b == b'\n').count() + 1;
        failed(
            format!("line {line} is not UTF-8"),
            "save the file as UTF-8",
        )
    })?;
    let config = parse(&text, path, &|name| std::env::var(name).ok());
    drop(text);
    give_back();
    config
}

/// Returns freed memory to the system. Reading a large file takes several times what the configuration takes
/// afterwards, and glibc would keep it for as long as the daemon runs (10,000 jobs: some 30 MiB).
pub(crate) fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: has no preconditions, may be called from any thread, and touches free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Checks a configuration: `text` is the content of the file at `path`, `env` answers for the environment.
///
/// Files that it names (`password_file`, `env_file`) are read. Relative paths are relative to the directory of
/// `path`.
///
/// # Errors
/// All problems, in the order of the file.
pub fn parse(
    text: &str,
    path: &Path,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Config, Report> {
    let mut problems = Collector::new(path, text);
    let (tree, errors) = DeTable::parse_recoverable(text);
    let mut repeated = Vec::new();
    for error in errors {
        let span = error.span().unwrap_or(0..0);
        let before = text.get(..span.start).unwrap_or_default();
        let line = before.rfind('\n').map_or(0, |n| n + 1);
        if report::is_duplicate(error.message()) && text[line..].trim_start().starts_with('[') {
            repeated.push((line, span.start));
        }
        problems.syntax(span, error.message());
    }
    repeated.sort_unstable();
    repeated.truncate(REPEATED);
    let ends = repeated
        .iter()
        .skip(1)
        .map(|(line, _)| *line)
        .chain([text.len()]);
    let texts: Vec<_> = repeated
        .iter()
        .zip(ends)
        .map(|((line, at), end)| (at, alone(text, *line..end)))
        .collect();
    let again: Vec<_> = texts
        .iter()
        .map(|(at, text)| (*at, DeTable::parse_recoverable(text).0))
        .collect();
    let dir = path.parent().unwrap_or(Path::new(""));
    let dir = if dir.as_os_str().is_empty() {
        Path::new(".")
    } else {
        dir
    };
    let mut reader = Reader::new(
        text,
        env,
        std::path::absolute(dir).unwrap_or_else(|_| dir.into()),
        problems,
    );
    let mut raw = raw::file(&mut reader, tree.get_ref());
    for (at, tree) in &again {
        let more = raw::file(&mut reader, tree.get_ref());
        let jobs = more
            .jobs
            .into_iter()
            .filter(|(_, span, _)| span.start == **at);
        raw.jobs.extend(jobs);
    }
    match check::config(&mut reader, raw) {
        Some(config) if reader.problems.is_empty() => Ok(config),
        _ => Err(reader.problems.finish()),
    }
}

/// Tables that are there already, and are judged all the same: of each repeated key the parser keeps the first value.
const REPEATED: usize = 20;

/// A part of the text at its place, without what is before and after it.
fn alone(text: &str, part: std::ops::Range<usize>) -> String {
    let blank = |b: u8| if b == b'\n' { '\n' } else { ' ' };
    let mut out: String = text[..part.start].bytes().map(blank).collect();
    out.push_str(&text[part]);
    out
}

/// A checked configuration: nothing in it can be refused later.
#[derive(Debug, Clone)]
pub struct Config {
    pub store: Store,
    pub limits: Limits,
    /// By name.
    pub jobs: BTreeMap<JobName, Arc<Job>>,
    /// The environment variables that `[store]` expands: they are not for commands.
    pub store_variables: Arc<[String]>,
    /// Digest of all that the file says, after defaults: instances with the same one agree (16 hex digits).
    pub digest: String,
}

/// Goes to the guards too, which settle when the daemon is dead: as a `Handed`, secrets and all.
#[derive(Debug, Clone, PartialEq)]
pub struct Store {
    pub url: StoreUrl,
    /// Prefix of every key.
    pub namespace: String,
    pub username: Option<String>,
    /// Content of `password_file`, without the final newline.
    pub password: Option<Secret>,
    pub tls: Option<Tls>,
    /// Each command.
    pub timeout: Duration,
    pub pool_size: u32,
    /// Replicas that must have a grant or renewal before it counts (WAIT); 0: none.
    pub min_replicas: u32,
    pub retry: StoreRetry,
}

/// Shown and debugged without its password.
#[derive(Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// Absolute; a relative path is taken from the directory of the configuration file.
    Sqlite(PathBuf),
    /// `redis://`, `rediss://` or `redis+unix://`, as written.
    Redis(Secret),
    /// `memory:`, for tests only: one process.
    Memory,
}

/// Whatever prints or serialises it gets `***`; only [`Secret::expose`] and `Handed` give the text itself.
#[derive(Clone, PartialEq, Eq, Deserialize)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself: for the store, and for nothing that is shown.
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

impl Serialize for Secret {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str("***")
    }
}

/// A [`Store`] with its secrets, for the pipe to a guard. Field for field that of the name.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Store")]
pub(crate) struct Handed {
    #[serde(with = "HandedUrl")]
    url: StoreUrl,
    namespace: String,
    username: Option<String>,
    #[serde(serialize_with = "handed_password")]
    password: Option<Secret>,
    tls: Option<Tls>,
    timeout: Duration,
    pool_size: u32,
    min_replicas: u32,
    retry: StoreRetry,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "StoreUrl")]
enum HandedUrl {
    Sqlite(PathBuf),
    Redis(#[serde(serialize_with = "handed_url")] Secret),
    Memory,
}

fn handed_url<S: serde::Serializer>(url: &Secret, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(url.expose())
}

#[expect(clippy::ref_option, reason = "serde gives the field as it is")]
fn handed_password<S: serde::Serializer>(p: &Option<Secret>, s: S) -> Result<S::Ok, S::Error> {
    p.as_ref().map(Secret::expose).serialize(s)
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tls {
    pub ca: Option<PathBuf>,
    /// Always together with `key`.
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

/// Limited retries of a store command after a transport error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoreRetry {
    /// Tries after the first.
    pub attempts: u32,
    pub interval: Duration,
    pub exponential: bool,
    pub max_interval: Duration,
    pub jitter: bool,
}

#[derive(Debug, Clone)]
pub struct Limits {
    /// Runs at one time on this instance; None: no limit.
    pub max_parallel: Option<u32>,
    /// How long runs may go on after SIGTERM before they are ended (`drain`, default 60 s).
    pub drain: Duration,
    /// ρ: by how much the rates of two hosts' monotonic clocks may differ (`clock_drift`, default 0.01).
    pub clock_drift: f64,
}
