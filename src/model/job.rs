//! A job as the configuration defines it, checked.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use super::JobName;
use crate::logic::{
    claim::{OnCrash, Overlap},
    lease::Lease,
    schedule::Schedule,
    timetable::CatchUp,
};

/// What is often equal is behind an [`Arc`] and shared between jobs: ten thousand of them are to stay small.
#[derive(Debug, Clone)]
pub struct Job {
    pub name: JobName,
    pub description: Option<String>,
    pub tags: Arc<[String]>,
    pub enabled: bool,
    /// None: the job only runs when triggered. Each already parsed with the job's time zone, `dst` and name (for `H`). Shared between jobs
    /// with equal expressions.
    pub schedules: Arc<[Arc<Schedule>]>,
    /// As written, for display.
    pub schedule_text: Arc<[String]>,
    /// IANA name, for display.
    pub timezone: Arc<str>,
    pub jitter: Duration,
    pub command: Command,
    /// `env` and `env_file` of the job and of the defaults together.
    pub env: Arc<BTreeMap<String, String>>,
    /// Variables of the daemon that the command gets although they would be held back.
    pub pass_env: Arc<[String]>,
    /// Absolute; a relative path is taken from the directory of the configuration file.
    pub working_dir: Option<Arc<Path>>,
    pub user: Option<Arc<str>>,
    pub group: Option<Arc<str>>,
    /// As another user, it may get what setuid programs give.
    pub new_privileges: bool,
    pub timeout: Option<Duration>,
    pub grace: Duration,
    pub lease: Arc<Lease>,
    pub overlap: Overlap,
    pub on_crash: OnCrash,
    pub on_state_loss: OnStateLoss,
    /// Attempts of one occurrence in all (crashes and retries together), 1 to 999.
    pub max_attempts: u32,
    pub retry: Option<Arc<JobRetry>>,
    pub start_within: Duration,
    pub catch_up: CatchUp,
    pub success_codes: Arc<[i32]>,
    pub output: Output,
    /// Digest of the definition (16 hex digits): goes with each claim, so that drift between instances is seen.
    pub digest: String,
    /// Digest of schedule, time zone and dst alone: what is planned under another one is not owed.
    pub schedule_digest: Arc<str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Run as they stand, no shell.
    Argv(Vec<String>),
    /// `/bin/sh -c`.
    Shell(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnStateLoss {
    Skip,
    Rerun,
}

/// When a failed command is tried again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct JobRetry {
    /// Tries after the first.
    pub attempts: u32,
    pub interval: Duration,
    pub exponential: bool,
    pub max_interval: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    /// Bytes of the end of the output that the history keeps.
    pub keep: usize,
    /// Each line also goes to the log.
    pub log: bool,
}
