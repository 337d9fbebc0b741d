//! `--record FILE`: writes down each question to the store, its answer, and each start and end of a command, with their
//! times. `soloist check-record` compares such files with the rules and judges the promises ([`check`]).
//!
//! Each process appends its own lines, so that several may share a file: the daemon, the helpers of its guards, and
//! commands. A line is in the kernel before the request that it tells of leaves: killing the process loses no question
//! that the store may have seen. Each line has a digest over itself and the one before it of the same process.

pub mod check;
mod judge;
mod order;
mod store;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use self::store::recording;
use crate::{
    clock::Boottime,
    config::rights,
    logic::{
        claim::{Answered, OnCrash, Overlap, Question},
        schedule::Dst,
    },
    model::{JobName, Outcome, RunId, job::Job},
    store::Around,
};

/// The version of the lines: others are refused.
const VERSION: u32 = 7;

/// What a process writes down.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(
    clippy::large_enum_variant,
    reason = "each lives only until it is written, or taken in"
)]
pub enum Line {
    /// The first line of a process.
    Begins {
        version: u32,
        /// The instance, or the command.
        who: String,
        /// Names the life of the host's kernel: [`Boottime`]s of one life can be compared.
        boot: String,
    },
    /// The configuration, at the start and after each reload.
    Jobs(BTreeMap<JobName, Rules>),
    /// A question leaves; its number is that of this line.
    Asks { sent: Boottime, question: Question },
    /// The answer to the question of line `to`.
    Answers {
        to: u64,
        /// When the question left for the store, if the answer grants or renews a lease.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        left: Option<Boottime>,
        received: Boottime,
        /// Unix microseconds of the store's clock.
        now_us: i64,
        answer: Answered,
        /// None: the store's clock was in doubt, and it decided nothing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        around: Option<Around>,
    },
    /// No answer to the question of line `to`: the store may have carried it out.
    Fails { to: u64, error: String },
    /// The store's epoch, as a heartbeat found it.
    Epoch {
        sent: Boottime,
        received: Boottime,
        now_us: i64,
        incarnation: String,
        id: String,
    },
    /// A guard is told to start the command of a granted run.
    Starts { run: RunId, at: Boottime },
    /// The command is gone, and all of its processes.
    Ran {
        run: RunId,
        /// None: it could not start.
        started: Option<Boottime>,
        ended: Boottime,
        outcome: Outcome,
    },
    /// The process did not run between these times: it was stopped or frozen, or its host was busy.
    Stood { from: Boottime, to: Boottime },
    /// The process ends in order.
    Ends {},
}

/// What the promises about a job depend on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rules {
    pub enabled: bool,
    /// Each as it was written, with its overrides.
    pub schedules: Vec<(String, Dst)>,
    pub timezone: String,
    pub overlap: Overlap,
    pub on_crash: OnCrash,
    pub max_attempts: u32,
    pub retries: bool,
    pub start_within: Duration,
    pub jitter: Duration,
    pub lease: Duration,
}

impl Rules {
    fn of(job: &Job) -> Self {
        let texts = job.schedule_text.iter().cloned();
        let dst = job.schedules.iter().map(|s| s.dst());
        Self {
            enabled: job.enabled,
            schedules: texts.zip(dst).collect(),
            timezone: job.timezone.to_string(),
            overlap: job.overlap,
            on_crash: job.on_crash,
            max_attempts: job.max_attempts,
            retries: job.retry.is_some(),
            start_within: job.start_within,
            jitter: job.jitter,
            lease: job.lease.length,
        }
    }
}

/// A line as it stands in the file: `DIGEST PROCESS NUMBER JSON`, where the process is a random number, and the number
/// counts its lines from 0.
struct Written<'a> {
    by: u64,
    n: u64,
    digest: u64,
    line: &'a str,
}

impl std::fmt::Display for Written<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{:016x} {} {} {}",
            self.digest, self.by, self.n, self.line
        )
    }
}

impl<'a> Written<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.splitn(4, ' ');
        Some(Self {
            digest: u64::from_str_radix(parts.next()?, 16).ok()?,
            by: parts.next()?.parse().ok()?,
            n: parts.next()?.parse().ok()?,
            line: parts.next()?,
        })
    }
}

/// The digest of line `n` of a process, after a line with the digest `before`.
fn digest(before: u64, by: u64, n: u64, line: &str) -> u64 {
    xxh3_64_with_seed(format!("{by} {n} {line}").as_bytes(), before)
}

/// A process that was killed, or a full disk, may have left a part of a line.
fn end_broken_line(file: &mut File) -> std::io::Result<()> {
    let mut last = [b'\n'];
    if file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    match last {
        [b'\n'] => Ok(()),
        _ => file.write_all(b"\n"),
    }
}

/// Appends to a file. Cheap to share; a line is written at once, in one piece.
#[derive(Debug)]
pub struct Recorder {
    path: PathBuf,
    by: u64,
    state: Mutex<Writing>,
}

#[derive(Debug)]
struct Writing {
    file: File,
    n: u64,
    digest: u64,
    /// A line could not be written: none is written any more, because the record would have a hole.
    broken: bool,
}

impl Recorder {
    /// Opens the file, and creates it if it does not exist, readable for its owner alone. `who`: the instance, or the
    /// command.
    ///
    /// # Errors
    /// The file cannot be opened or written.
    pub fn open(path: &Path, who: &str) -> std::io::Result<Arc<Self>> {
        use std::os::unix::fs::OpenOptionsExt;
        // Absolute: guards run elsewhere.
        let path = std::path::absolute(path)?;
        let exists = path.symlink_metadata().is_ok();
        let trusted = match path.parent() {
            Some(directory) if !exists => rights::trusted(directory),
            _ => rights::trusted(&path),
        };
        trusted.map_err(|f| std::io::Error::other(format!("{}: {}", f.message, f.fix)))?;
        // Not through a link, and no pipe that waits for its reader: somebody else may have put it there.
        let mut file = File::options()
            .create(true)
            .append(true)
            .read(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path)?;
        if !file.metadata()?.is_file() {
            return Err(std::io::Error::other("it is not a regular file"));
        }
        end_broken_line(&mut file)?;
        let this = Arc::new(Self {
            path,
            by: fastrand::u64(1..1 << 53),
            state: Mutex::new(Writing {
                file,
                n: 0,
                digest: 0,
                broken: false,
            }),
        });
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        #[cfg(test)]
        let boot = crate::simulation::boot_id().unwrap_or(boot);
        let begins = Line::Begins {
            version: VERSION,
            who: who.to_owned(),
            boot: boot.trim().to_owned(),
        };
        this.try_write(&begins)?;
        Ok(this)
    }

    /// The file, for other processes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes one line, and returns its number. If that fails, logs it, and writes nothing more: the record then ends
    /// here.
    pub fn write(&self, line: &Line) -> u64 {
        self.try_write(line).unwrap_or_else(|error| {
            tracing::error!(file = %self.path.display(), %error, "cannot write the record: it ends here");
            0
        })
    }

    fn try_write(&self, line: &Line) -> std::io::Result<u64> {
        let line = serde_json::to_string(line)?;
        let mut writing = self.state.lock();
        if writing.broken {
            return Ok(0);
        }
        let n = writing.n;
        let digest = digest(writing.digest, self.by, n, &line);
        let written = Written {
            by: self.by,
            n,
            digest,
            line: &line,
        };
        let bytes = written.to_string().into_bytes();
        let done = writing.file.write_all(&bytes);
        writing.broken = done.is_err();
        (writing.n, writing.digest) = (n + 1, digest);
        done.map(|()| n)
    }

    /// Writes down from now on when this process did not run, for as long as somebody has the recorder.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn watch_for_stops(self: &Arc<Self>) -> std::io::Result<()> {
        const PAUSE: Duration = Duration::from_millis(200);
        const STOOD: Duration = Duration::from_millis(700);
        let this = Arc::downgrade(self);
        let watch = move || {
            let mut from = Boottime::now();
            loop {
                std::thread::sleep(PAUSE);
                let Some(this) = this.upgrade() else { return };
                let to = Boottime::now();
                if to.since(from) > STOOD {
                    this.write(&Line::Stood { from, to });
                }
                from = to;
            }
        };
        let thread = std::thread::Builder::new().name("record".to_owned());
        thread.spawn(watch).map(drop)
    }

    /// Writes down the jobs of a configuration.
    pub fn jobs<'a>(&self, jobs: impl IntoIterator<Item = &'a Arc<Job>>) {
        let rules = |job: &Arc<Job>| (job.name.clone(), Rules::of(job));
        self.write(&Line::Jobs(jobs.into_iter().map(rules).collect()));
    }
}
