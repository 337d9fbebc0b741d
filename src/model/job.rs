//! The checked definition of a job from the configuration.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use super::JobName;
use crate::logic::{
    catch_up::CatchUp,
    claim::{OnCrash, Overlap},
    lease::Lease,
    schedule::Schedule,
};

/// Fields that are often equal are in an [`Arc`] that jobs share, so that ten thousand jobs need little memory.
#[derive(Debug, Clone)]
pub struct Job {
    pub name: JobName,
    pub description: Option<Arc<str>>,
    pub tags: Arc<[String]>,
    pub enabled: bool,
    /// Empty: the job only runs when triggered. Each schedule is parsed with the job's time zone, `dst` and name (for
    /// `H`). Jobs with equal schedules share them.
    pub schedules: Arc<[Arc<Schedule>]>,
    /// The schedules as written, for display.
    pub schedule_text: Arc<[String]>,
    /// The IANA name of the time zone, for display.
    pub timezone: Arc<str>,
    pub jitter: Duration,
    pub command: Command,
    /// The variables of `env` and `env_file`, of the job and of the defaults together.
    pub env: Arc<BTreeMap<String, String>>,
    /// Variables of the daemon that the command gets although soloist would hold them back.
    pub pass_env: Arc<[String]>,
    /// An absolute path; a relative one in the file starts at the directory of the configuration file.
    pub working_dir: Option<Arc<Path>>,
    pub user: Option<Arc<str>>,
    pub group: Option<Arc<str>>,
    /// If the command runs as another user: setuid programs and file capabilities may give it more rights.
    pub new_privileges: bool,
    pub timeout: Option<Duration>,
    pub grace: Duration,
    pub lease: Arc<Lease>,
    pub overlap: Overlap,
    pub on_crash: OnCrash,
    pub on_state_loss: OnStateLoss,
    /// The most attempts of one occurrence, after crashes and retries together: 1 to 999.
    pub max_attempts: u32,
    pub retry: Option<Arc<JobRetry>>,
    pub start_within: Duration,
    pub catch_up: CatchUp,
    pub success_codes: Arc<[i32]>,
    pub output: Output,
    pub alarms: Arc<Alarms>,
    /// The digest of the definition (16 hex digits). Each claim carries it, so that people can see if instances have
    /// different definitions.
    pub digest: String,
    /// The digest of schedule, time zone and `dst` alone. Occurrences that were planned under another one are not
    /// caught up.
    pub schedule_digest: Arc<str>,
}

/// Who hears of the job's runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Alarms {
    /// The names of channels.
    pub notify: Vec<String>,
    /// Asked at the start and the end of each run.
    pub heartbeat: Option<HiddenUrl>,
    /// The longest time between two successes.
    pub expect_success_within: Option<Duration>,
}

/// A URL that has a secret in it: who knows it may ask it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct HiddenUrl(Arc<str>);

impl HiddenUrl {
    pub fn new(url: &str) -> Self {
        Self(url.into())
    }

    /// The URL itself: only to ask it, never for output.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for HiddenUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// The program and its arguments, run without a shell.
    Argv(Vec<String>),
    /// A line that `/bin/sh -c` runs.
    Shell(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub enum OnStateLoss {
    Skip,
    Rerun,
}

/// How often and when soloist tries a failed command again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct JobRetry {
    /// Attempts after the first.
    pub attempts: u32,
    pub interval: Duration,
    pub exponential: bool,
    pub max_interval: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    /// How many bytes of the end of the output the store keeps.
    pub keep: usize,
    /// True: each line also goes to the log.
    pub log: bool,
}
