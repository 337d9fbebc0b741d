//! The configuration file, from its bytes to a checked [`Config`].

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use toml::de::DeTable;

use super::{
    Channels, Http, Report, Sends, Store,
    advice::Spots,
    check, named, raw,
    report::{Collector, Place},
    rights,
    tree::Reader,
};
use crate::model::{JobName, duration, job::Job};

/// Ten thousand jobs have a few MiB.
const MOST: u64 = 16 << 20;

/// A duration as the configuration writes it: `250ms`, `15s`, `1h30m`.
///
/// # Errors
/// The problem with the text, and what to do about it.
pub fn duration(text: &str) -> Result<Duration, String> {
    duration::parse(text).map_err(|e| match e.hint {
        Some(hint) => format!("{}; {hint}", e.message),
        None => e.message,
    })
}

/// Reads and checks the configuration file, with this process's environment.
///
/// # Errors
/// All problems of the file, or the reason why it cannot be read.
pub fn load(path: &Path, sends: Sends<'_>) -> Result<Config, Report> {
    let text = read(path)?;
    let config = parsed(&text, path, &|name| std::env::var(name).ok(), sends, None);
    drop(text);
    trim_memory();
    config
}

/// The text of the configuration file.
pub(super) fn read(path: &Path) -> Result<String, Report> {
    let failed =
        |message: String, hint: &str| Report::of_file(path, message, Some(hint.to_owned()));
    // As root check it first, because reading another user's pipe may never end; and again, because there may have been
    // no file yet.
    if rights::strict() {
        rights::trusted(path).map_err(|f| failed(f.message, &f.fix))?;
    }
    // It may be a pipe, as of `<(...)` in a shell.
    let bytes = std::fs::File::open(path).and_then(|file| named::bounded(file, MOST));
    let bytes = bytes.map_err(|error| {
        failed(
            format!("cannot read the configuration: {}", named::words(&error)),
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
    // TOML leaves it to the reader which newlines a string of several lines has; a shell knows only this one.
    Ok(unmarked(&text).replace("\r\n", "\n"))
}

/// Without the byte order mark that some editors put at the begin: it is no part of the text, and in no column.
pub(super) fn unmarked(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// Returns freed memory to the system. Reading a large file takes several times the memory of the configuration, and
/// glibc would keep that for as long as the daemon runs (10,000 jobs: some 30 MiB).
pub(crate) fn trim_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it has no preconditions, any thread may call it, and it changes only free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Checks a configuration: `text` is the content of the file at `path`, `env` looks up environment variables.
///
/// Also reads the files that the configuration names (`password_file`, `env_file`). Relative paths start at the
/// directory of `path`.
///
/// # Errors
/// All problems, in the order of the file.
pub fn parse(
    text: &str,
    path: &Path,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Config, Report> {
    parsed(text, path, env, Sends::All, None)
}

/// As [`parse`], with the places that advice is about.
pub(super) fn parse_with_places(
    text: &str,
    path: &Path,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<(Config, Spots), Report> {
    let mut places = Spots::default();
    let config = parsed(text, path, env, Sends::All, Some(&mut places))?;
    Ok((config, places))
}

fn parsed(
    text: &str,
    path: &Path,
    env: &dyn Fn(&str) -> Option<String>,
    sends: Sends<'_>,
    places: Option<&mut Spots>,
) -> Result<Config, Report> {
    let text = unmarked(text);
    let mut problems = Collector::new(path, text);
    let (tree, errors) = DeTable::parse_recoverable(text);
    // After one the parser guesses what was meant.
    if !errors.is_empty() {
        for error in errors {
            let span = error.span().unwrap_or(0..0);
            problems.add(Place::Top, span, error.message().to_owned(), None);
        }
        return Err(problems.finish());
    }
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
    reader.sends = sends;
    let raw = raw::file(&mut reader, tree.get_ref());
    match check::config(&mut reader, raw, places) {
        Some(config) if reader.problems.is_empty() => Ok(config),
        _ => Err(reader.problems.finish()),
    }
}

/// A checked configuration: no later step refuses a part of it.
#[derive(Debug, Clone)]
pub struct Config {
    pub store: Store,
    pub limits: Limits,
    /// None: no HTTP.
    pub http: Option<Http>,
    /// Empty: nobody is told anything.
    pub channels: Channels,
    /// The jobs by their names.
    pub jobs: BTreeMap<JobName, Arc<Job>>,
    /// The environment variables that `[store]`, `[http]` and `[notify]` expand: commands do not get them.
    pub store_variables: Arc<[String]>,
    /// Digest of the whole configuration with defaults: instances with the same digest agree (16 hex digits).
    pub digest: String,
}

impl Config {
    /// There is a channel that some job uses.
    pub fn tells_anybody(&self) -> bool {
        let mut jobs = self.jobs.values();
        jobs.any(|job| !job.alarms.notify.is_empty())
    }
}

#[derive(Debug, Clone)]
pub struct Limits {
    /// How many runs this instance may have at the same time; None: no limit.
    pub max_parallel: Option<u32>,
    /// How long active runs may continue after SIGTERM before they are ended (`drain`, default 60 s).
    pub drain: Duration,
    /// ρ: how much the rates of two hosts' monotonic clocks may differ (`clock_drift`, default 0.01).
    pub clock_drift: f64,
}
