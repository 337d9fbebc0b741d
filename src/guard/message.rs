//! The messages between daemon, guard and `soloist __settle`: one JSON line each.

use std::{
    fs::File,
    io::{self, Seek, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    clock::{self, Boottime},
    config,
    logic::guard_life::{Cause, Stop},
    model::{JobName, Outcome, Run, RunId, Usage},
};

/// What to run: the first line that the daemon sends. It has the command's variables and the store's configuration, so
/// never print all of it.
#[derive(Clone, Serialize, Deserialize)]
pub struct Spec {
    pub job: JobName,
    pub run_id: RunId,
    /// Program and arguments, run without a shell.
    pub argv: Vec<String>,
    /// Set in addition to the daemon's environment. The command inherits all of that except the variables for the
    /// daemon alone (systemd's notification, watchdog, socket and credential variables, those of the daemon's own
    /// trace, `SOLOIST_STORE*`, and what [`Runner::hiding`](crate::runner::Runner::hiding) names). For another user,
    /// these variables are set in addition to those of a login.
    pub env: Vec<(String, String)>,
    pub working_dir: Option<PathBuf>,
    pub user: Option<String>,
    pub group: Option<String>,
    /// A command of another user may gain the rights that setuid programs give.
    #[serde(default)]
    pub new_privileges: bool,
    pub timeout: Option<Duration>,
    pub grace: Duration,
    pub kill_budget: Duration,
    pub success_codes: Vec<i32>,
    /// The time until which the holder trusts the lease; the guard does not start the command later.
    pub deadline: Boottime,
    /// Passed unchanged to `__settle` if the daemon dies; see [`HandOver`].
    pub settle: serde_json::Value,
    /// The program to execute for the hand-over instead of this binary.
    #[serde(default)]
    pub settle_exe: Option<PathBuf>,
    /// Find the tree through /proc, even if the guard could make a cgroup.
    #[serde(default)]
    pub walk_only: bool,
    /// Run the command in the place of the program that started soloist; see [`Transparent`].
    #[serde(default)]
    pub transparent: Option<Transparent>,
}

impl std::fmt::Debug for Spec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Spec")
            .field("job", &self.job)
            .field("run_id", &self.run_id)
            .finish_non_exhaustive()
    }
}

/// Runs a command as a shell would: with the descriptors, environment, session, process group and terminal of the
/// process that started the guard. Without it, a command has its own session, pipes for its output and `/dev/null` as
/// its input.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Transparent {
    /// Signals that stay ignored, because soloist was started with them ignored (`nohup`).
    pub ignored: Vec<i32>,
}

impl Spec {
    /// A run of `job`, with the environment that docs/configuration.md promises. `traceparent` says where its span is.
    pub fn new(
        job: &config::Job,
        run: &Run,
        traceparent: String,
        deadline: Boottime,
        settle: serde_json::Value,
    ) -> Self {
        let argv = match &job.command {
            config::Command::Argv(argv) => argv.clone(),
            config::Command::Shell(text) => vec!["/bin/sh".into(), "-c".into(), text.clone()],
        };
        // First, because a job may have another one.
        let mut env = vec![("TRACEPARENT".to_owned(), traceparent)];
        let passed = job.pass_env.iter();
        env.extend(passed.filter_map(|name| Some((name.clone(), std::env::var(name).ok()?))));
        env.extend(job.env.iter().map(|(n, v)| (n.clone(), v.clone())));
        env.extend(
            [
                ("SOLOIST_JOB", job.name.to_string()),
                ("SOLOIST_OCCURRENCE", run.occurrence.to_string()),
                ("SOLOIST_OCCURRENCE_MS", run.occurrence.0.to_string()),
                (RUN_ID, run.id.to_string()),
                ("SOLOIST_ATTEMPT", run.attempt.to_string()),
                ("SOLOIST_FENCING_TOKEN", run.token().to_string()),
                ("SOLOIST_INSTANCE", run.instance.to_string()),
                ("SOLOIST_TRIGGER", run.trigger.as_str().into()),
            ]
            .map(|(name, value)| (name.into(), value)),
        );
        Self {
            job: job.name.clone(),
            run_id: run.id,
            argv,
            env,
            working_dir: job.working_dir.as_deref().map(Path::to_owned),
            user: job.user.as_deref().map(str::to_owned),
            group: job.group.as_deref().map(str::to_owned),
            new_privileges: job.new_privileges,
            timeout: job.timeout,
            grace: job.grace,
            kill_budget: job.lease.kill_budget,
            success_codes: job.success_codes.to_vec(),
            deadline,
            settle,
            settle_exe: None,
            walk_only: false,
            transparent: None,
        }
    }
}

/// True for variables with the store's address or password, which a command must not get.
pub(crate) fn is_of_store(variable: &std::ffi::OsStr) -> bool {
    variable.as_encoded_bytes().starts_with(b"SOLOIST_STORE")
}

/// The variable that marks all processes of a run.
pub(crate) const RUN_ID: &str = "SOLOIST_RUN_ID";

/// The same for transparent commands, which may themselves be part of a run.
pub(crate) const EXEC_ID: &str = "SOLOIST_EXEC_ID";

/// What the daemon sends after the [`Spec`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// The holder now trusts the lease until this time.
    Deadline(Boottime),
    /// End the command; grace None means the job's, zero means SIGKILL at once.
    Stop {
        reason: Stop,
        grace: Option<Duration>,
    },
    /// Send a signal to the command itself, not to its tree.
    Signal(i32),
    /// The outcome is recorded: the guard need not hand over.
    Settled,
}

/// A moment on both clocks of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// Microseconds since the Unix epoch by the host's wall clock.
    pub wall_us: i64,
    pub boottime: Boottime,
}

impl Moment {
    pub fn now() -> Self {
        Self {
            wall_us: clock::wall_us(),
            boottime: Boottime::now(),
        }
    }
}

/// What the guard reports, in this order: `Started` or `StartFailed`; `Exited` after `Started`; `Gone`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The command runs: exec has succeeded.
    Started {
        pid: i32,
        at: Moment,
        cgroup: Option<PathBuf>,
    },
    /// The command does not run.
    StartFailed {
        /// Why, for people.
        error: String,
        /// What ended the start; None: it failed by itself.
        cause: Option<Cause>,
        /// The kernel's error for the exec itself, if the start got that far.
        #[serde(default)]
        errno: Option<i32>,
        /// The signal that ended the process that was to become the command, unless the guard sent it.
        #[serde(default)]
        signal: Option<i32>,
    },
    /// This signal stopped a transparent command.
    Stopped { signal: i32 },
    /// The command itself ended; `cause` None: by itself. Other processes of its tree may still be alive.
    Exited {
        exit_code: Option<i32>,
        signal: Option<i32>,
        cause: Option<Cause>,
        at: Moment,
    },
    /// These processes are still alive one kill budget after SIGKILL: they are in an uninterruptible sleep, or the
    /// guard may not kill them.
    Stuck { pids: Vec<i32> },
    /// Every process of the run is gone.
    Gone {
        at: Moment,
        #[serde(default)]
        usage: Usage,
    },
}

/// How a run ended, as far as its guard knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownEnd {
    /// The command's own outcome if it ended before its daemon did, otherwise `crashed`.
    pub outcome: Outcome,
    /// Why soloist ended it; None: it ended by itself, or could not start.
    #[serde(default)]
    pub cause: Option<Cause>,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub error: Option<String>,
    /// When its start began; None: the command could not start.
    pub started: Option<Moment>,
    /// When the last process of its tree was gone.
    pub ended: Moment,
    #[serde(default)]
    pub usage: Usage,
}

/// What `soloist __settle` gets, as JSON in a file on descriptor 0: from the guard of a dead daemon, or from a daemon
/// that stops before it could record an outcome.
#[derive(Clone, Serialize, Deserialize)]
pub struct HandOver {
    /// [`Spec::settle`].
    pub settle: serde_json::Value,
    pub end: KnownEnd,
}

impl std::fmt::Debug for HandOver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandOver")
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}

impl HandOver {
    /// Reads the hand-over to this process.
    ///
    /// # Errors
    /// Stdin cannot be read, or has something that a guard does not write.
    pub fn read() -> io::Result<Self> {
        Ok(serde_json::from_reader(io::stdin().lock())?)
    }

    /// A file in memory with the hand-over, for the stdin of `soloist __settle`.
    ///
    /// # Errors
    /// The process has no free descriptor or memory.
    pub fn to_file(&self) -> io::Result<File> {
        let mut file = File::from(rustix::fs::memfd_create(
            "soloist-settle",
            rustix::fs::MemfdFlags::CLOEXEC,
        )?);
        serde_json::to_writer(&mut file, self)?;
        file.flush()?;
        file.rewind()?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_store_are_told_from_those_of_a_run() {
        for (name, of_store) in [
            ("SOLOIST_STORE", true),
            ("SOLOIST_STORE_URL", true),
            ("SOLOIST_JOB", false),
            ("STORE", false),
        ] {
            assert_eq!(is_of_store(name.as_ref()), of_store, "{name}");
        }
    }

    #[test]
    fn neither_variables_nor_instructions_are_shown() {
        let mut spec = super::super::tests::spec(None, "true");
        spec.env = vec![("TOKEN".to_owned(), "hunter2".to_owned())];
        let hand_over = HandOver {
            settle: "hunter2".into(),
            end: KnownEnd {
                outcome: Outcome::Failed,
                cause: None,
                exit_code: Some(77),
                signal: None,
                error: None,
                started: None,
                ended: Moment::now(),
                usage: Usage::default(),
            },
        };
        let run = spec.run_id.to_string();
        for (shown, with) in [
            (format!("{spec:?}"), &*run),
            (format!("{hand_over:?}"), "77"),
        ] {
            assert!(
                shown.contains(with) && !shown.contains("hunter2"),
                "{shown}"
            );
        }
    }
}
