//! `exec`: any command under a distributed lock, for crontabs and scripts.
//!
//! The order: claim the period (`--once-per`), take the lock, run the command, and release the lock once the command's
//! process tree is gone. A process that waits for the lock claims its period only once it holds the lock: a waiting
//! process may be ended at any time, and the period may end meanwhile. The command runs under a guard that knows until
//! when the lock is trusted, so that the command ends in time even if this process is killed, is stopped or hangs.

pub(super) mod signals;

use std::{cell::Cell, os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Duration};

use clap::Args;

use self::signals::{Caught, Signals};
use super::{Exit, Failure, find, remark, show};
use crate::{
    clock::Boottime,
    config::{self, Lease, Sends, StoreUrl, duration, show_duration},
    guard::{EXEC_ID, Spec, Transparent},
    lock::{
        self, Lock, LockClient, NoRetry, TryLock,
        period::{ClaimedPeriod, PeriodClaim},
    },
    log_queue,
    logic::guard_life::{Cause, Stop},
    model::{JobName, Occurrence, RunId},
    runner::{RunEnd, Runner, Running, childless, reap_strangers},
    settle::ReleaseOnDeath,
    words,
};

/// The clock drift that the locks of [`lock`] assume.
const CLOCK_DRIFT: f64 = 0.01;
/// How long `exec` waits for the store, at most, after a signal told it to end, or after its command ended because of
/// one. A store that works needs less.
const WAIT_IDLE: Duration = Duration::from_secs(1);
/// How long what this process says may take to be written before the command writes.
const FLUSH: Duration = Duration::from_millis(125);

const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

#[derive(Debug, Args)]
#[command(after_help = "\
The command gets the stdin, stdout, stderr, terminal, signals and environment of soloist (without
SOLOIST_STORE_URL and the variables that [store] of the configuration expands), and in addition
SOLOIST_LOCK, SOLOIST_FENCING_TOKEN and, with --once-per, SOLOIST_OCCURRENCE. When the command ends,
soloist ends the processes that it left running, and then releases the lock.

Exit codes:
  the command's own; 128+N when signal N ended it
  127 when the command was not found, 126 when it could not be executed
  79  when the lock was lost: the command was ended, or not started
  75  when another process has the lock, or had this period (-E sets another code)
  69  when the store cannot be reached; the command was not started

Examples, for the same crontab on ten hosts:
  SOLOIST_STORE_URL=redis://locks.example.com:6379/0
  # once a minute, on one of them:
  * * * * * soloist exec --lock mail-queue --once-per 1m -E 0 -- /usr/local/bin/send-mail
  # never on two hosts at once; each host waits for its turn for up to ten minutes:
  0 3 * * * soloist exec --lock backup --wait 10m -- /usr/local/bin/backup --full
In a script on a single host, as with flock:
  soloist exec --store sqlite:/var/lib/locks.db --lock deploy -- make deploy")]
pub(super) struct Exec {
    /// Name of the lock: commands with the same lock name exclude each other
    #[arg(long, value_name = "NAME")]
    lock: String,
    /// How long the lock stays taken after its host vanishes; renewed while the command runs
    #[arg(long, value_name = "D", default_value = "15s", value_parser = duration)]
    lease: Duration,
    /// Wait at most this long for the lock
    #[arg(long, value_name = "D", default_value = "0s", hide_default_value = true, value_parser = duration)]
    wait: Duration,
    /// Run once in each period of the store's clock, such as `1m`, on all hosts together
    #[arg(long, value_name = "D", value_parser = duration)]
    once_per: Option<Duration>,
    /// Exit code if another process has the lock or had the period [default: 75]; with 0, prints no message
    #[arg(short = 'E', long, value_name = "N")]
    conflict_exit_code: Option<u8>,
    /// Store that has the lock, as `redis://host:6379/0` or `sqlite:PATH` [default: the store of the configuration
    /// file]
    #[arg(
        long,
        value_name = "URL",
        env = "SOLOIST_STORE_URL",
        hide_env_values = true
    )]
    store: Option<String>,
    /// The command and its arguments, run without a shell
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true)]
    command: Vec<String>,
}

pub(super) fn exec(config: Option<PathBuf>, args: &Exec) -> Result<Exit, Failure> {
    let (store, variables) = store(config, args)?;
    let lease = lease(args, &store)?;
    let ignored = signals::ignored();
    // Before this process starts another thread.
    let caught =
        signals::block(&ignored).map_err(|e| Failure::internal("cannot catch signals", e))?;
    // What it says must not keep it from renewing the lock.
    log_queue::by_a_thread();
    // The runtime panics if it has too few descriptors.
    let spare: Result<Vec<_>, _> = (0..8).map(|_| std::fs::File::open("/dev/null")).collect();
    drop(spare.map_err(|e| {
        let what = "too few open files are allowed; raise the limit (ulimit -n, LimitNOFILE)";
        Failure::internal(what, e)
    })?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::internal("cannot start the runtime", e))?;
    let ended = runtime.block_on(async {
        tokio::spawn(async {
            let Err(e) = reap_strangers().await;
            remark(&format!(
                "cannot wait for orphaned processes ({e}): they stay as zombies until this command ends"
            ));
        });
        let signals = signals(caught)?;
        // A file may be locked, or its disk may hang. To open a server's store asks it nothing yet.
        let opened = match store.url {
            StoreUrl::Sqlite { .. } => {
                let store = store.clone();
                let opening = tokio::task::spawn_blocking(move || LockClient::with_config(&store));
                tokio::select! {
                    opened = opening => {
                        opened.map_err(|e| Failure::internal("cannot open the store", e))?
                    }
                    signal = ended(&signals) => return Ok(by_signal(signal)),
                }
            }
            _ => LockClient::with_config(&store),
        };
        let locks = opened.map_err(|e| failure(&e))?;
        Session {
            args,
            store,
            variables,
            lease,
            ignored,
            locks,
            signals,
            told: Cell::default(),
        }
        .run()
        .await
    });
    // The thread that opens the store may hang: do not wait for it.
    runtime.shutdown_background();
    ended
}

fn signals(fd: OwnedFd) -> Result<Signals, Failure> {
    Signals::new(fd).map_err(|e| Failure::internal("cannot catch signals", e))
}

fn store(config: Option<PathBuf>, args: &Exec) -> Result<(config::Store, Arc<[String]>), Failure> {
    const HINT: &str = "name it with `--store URL` or SOLOIST_STORE_URL, as `redis://host:6379/0` or `sqlite:PATH`";
    if let Some(url) = args.store.as_deref().filter(|url| !url.is_empty()) {
        let store = config::Store::from_url(url);
        let memory = |s: config::Store| match s.url {
            StoreUrl::Memory => Err("a `memory:` store exists only inside one process".to_owned()),
            _ => Ok((s, Arc::default())),
        };
        return store
            .and_then(memory)
            .map_err(|e| Failure::usage(format!("cannot use this store: {e}"), HINT));
    }
    match find(config) {
        Ok(path) => {
            let config = config::load(&path, Sends::Nothing).map_err(Failure::Config)?;
            Ok((config.store, config.store_variables))
        }
        Err(Failure::Missing { message, .. }) => Err(Failure::usage(
            format!("no store is named, and {message}"),
            HINT,
        )),
        Err(e) => Err(e),
    }
}

fn lease(args: &Exec, store: &config::Store) -> Result<Lease, Failure> {
    let usage = |e| {
        Failure::usage(
            e,
            "`--lease 15s` suits most commands: it limits how soon another host may follow a dead one, not how long \
            the command may take; to change the store's timeout, set `timeout` in [store] of a configuration file",
        )
    };
    Lease::for_store(args.lease, CLOCK_DRIFT, store.timeout).map_err(usage)
}

/// The message, the hint and the exit code for an error of the lock.
fn failure(e: &lock::Error) -> Failure {
    let message = e.to_string();
    let hint = match e {
        lock::Error::InvalidKey { .. } => {
            return Failure::usage(message, "give `--lock` a plain name, as in `backup`");
        }
        lock::Error::InvalidLease { .. } => {
            return Failure::usage(message, "see `soloist help exec`");
        }
        lock::Error::Unreachable { reason, .. } if !crate::store::connection::explains(reason) => {
            "the command was not started; check that the store is up, and that this host can reach it"
        }
        lock::Error::NotReplicated { .. } => {
            "the command was not started; check that the replicas of the store are connected"
        }
        lock::Error::TooLate { .. } => "the command was not started; the store is slow or far away",
        _ => "the command was not started",
    };
    Failure::Absent {
        message,
        hint: hint.to_owned(),
    }
}

struct Session<'a> {
    args: &'a Exec,
    store: config::Store,
    /// The environment variables that the store's configuration expands.
    variables: Arc<[String]>,
    lease: Lease,
    ignored: Vec<i32>,
    locks: LockClient,
    signals: Signals,
    /// The last signal that asked for the end, of the command or of this process.
    told: Cell<Option<i32>>,
}

/// How the wait for the lock ended.
enum WaitOutcome {
    Acquired(Lock),
    Held {
        holder: String,
        remaining: Duration,
    },
    /// A signal ended the wait.
    Ended(i32),
}

impl Session<'_> {
    async fn run(self) -> Result<Exit, Failure> {
        let begun = Boottime::now();
        let (outcome, period) = match self.period().await {
            Ok(Ok(period)) => (self.try_once().await, period),
            Ok(Err(exit)) => return Ok(exit),
            Err(e) => (Err(e), None),
        };
        let outcome = match outcome {
            Ok(WaitOutcome::Acquired(lock)) => return self.run_under(lock, period).await,
            outcome => outcome,
        };
        self.release_period(period).await;
        if let Some(signal) = self.told.get() {
            return Ok(by_signal(signal));
        }
        let left = self.args.wait.saturating_sub(Boottime::now().since(begun));
        let why = match &outcome {
            Ok(WaitOutcome::Held { holder, remaining }) => held(holder, *remaining),
            // Also wait for a store that does not answer.
            Err(e) if e.is_transient() => "the store does not answer".to_owned(),
            _ => String::new(),
        };
        let outcome = match outcome {
            _ if why.is_empty() || left.is_zero() => outcome,
            _ => self.wait_for_lock(&why, left).await,
        };
        match outcome {
            Ok(WaitOutcome::Acquired(lock)) => {
                lock.keep_renewed();
                match self.period().await {
                    Ok(Ok(period)) => self.run_under(lock, period).await,
                    refused => {
                        self.free(&lock, "").await;
                        refused
                            .map(|period| period.err().unwrap_or(Exit::TryAgain))
                            .map_err(|e| failure(&e))
                    }
                }
            }
            Ok(WaitOutcome::Held { holder, remaining }) => {
                let name = &self.args.lock;
                Ok(self.conflict(&format!("lock `{name}`: {}", held(&holder, remaining))))
            }
            Ok(WaitOutcome::Ended(signal)) => Ok(by_signal(signal)),
            Err(e) => Err(failure(&e)),
        }
    }

    /// Runs the command under the lock, and releases the lock afterwards.
    async fn run_under(&self, lock: Lock, period: Option<ClaimedPeriod>) -> Result<Exit, Failure> {
        lock.keep_renewed();
        let (end, running) = match self.command(&lock, period.as_ref()).await {
            Ok(ended) => ended,
            Err(e) => {
                self.release_period(period).await;
                self.free(&lock, "").await;
                return Err(e);
            }
        };
        if let Some(left) = end.usage.left_processes {
            remark(&words::left_behind(left));
        }
        let exit = self.exit(&end, &lock);
        if end.started.is_none() {
            self.release_period(period).await;
        }
        // The process tree is gone: another process may have the lock now.
        if !lock.is_held()
            || self
                .free(&lock, "; the guard keeps trying to release it")
                .await
        {
            // The guard need not release the lock any more.
            running.settled().await;
        }
        // Otherwise `running` is dropped, and the guard keeps trying to release the lock, as after our death.
        Ok(exit)
    }

    /// Claims the current period, if the user asked for periods. Err: another process had it.
    async fn period(&self) -> Result<Result<Option<ClaimedPeriod>, Exit>, lock::Error> {
        let Some(length) = self.args.once_per else {
            return Ok(Ok(None));
        };
        let claim = tokio::select! {
            claim = self.locks.try_claim_period(&self.args.lock, length) => claim,
            signal = self.ended() => {
                self.wait_idle().await;
                return Ok(Err(by_signal(signal)));
            }
        };
        match claim? {
            PeriodClaim::Claimed { period, .. } => Ok(Ok(Some(period))),
            PeriodClaim::Held { holder, next } => {
                let by = if holder.is_empty() {
                    String::new()
                } else {
                    format!(" by {holder}")
                };
                Ok(Err(self.conflict(&format!(
                    "the current period ({}) of lock `{}` was already claimed{by}; the next one begins in {}",
                    show_duration(length),
                    self.args.lock,
                    span(next)
                ))))
            }
        }
    }

    async fn try_once(&self) -> Result<WaitOutcome, lock::Error> {
        let first = tokio::select! {
            biased;
            tried = self.locks.try_lock(&self.args.lock, self.args.lease, NoRetry) => tried?,
            signal = self.ended() => {
                self.wait_idle().await;
                return Ok(WaitOutcome::Ended(signal));
            }
        };
        Ok(match first {
            TryLock::Acquired(lock) => WaitOutcome::Acquired(lock),
            TryLock::Held { holder, remaining } => WaitOutcome::Held { holder, remaining },
        })
    }

    /// Waits for the lock after the first attempt failed because of `why`.
    async fn wait_for_lock(&self, why: &str, wait: Duration) -> Result<WaitOutcome, lock::Error> {
        let (name, lease) = (&self.args.lock, self.args.lease);
        let most = show_duration(self.args.wait);
        remark(&format!(
            "waiting for lock `{name}`: {why}; for at most {most}"
        ));
        log_queue::flush(FLUSH);
        let tried = tokio::select! {
            biased;
            tried = self.locks.lock(name, wait, lease) => tried,
            signal = self.ended() => {
                self.wait_idle().await;
                return Ok(WaitOutcome::Ended(signal));
            }
        };
        Ok(match tried? {
            TryLock::Acquired(lock) => WaitOutcome::Acquired(lock),
            TryLock::Held { holder, remaining } => WaitOutcome::Held { holder, remaining },
        })
    }

    /// Waits for a signal that ends this process; for use only while no command runs that it could be meant for.
    async fn ended(&self) -> i32 {
        let signal = ended(&self.signals).await;
        self.told.set(Some(signal));
        signal
    }

    /// Waits for a release. Once a signal has asked for the end, the store gets no longer than [`WAIT_IDLE`]. None: it
    /// did not answer in that time, and the release goes on in the background.
    async fn patiently<T>(&self, release: impl Future<Output = T>) -> Option<T> {
        let mut release = std::pin::pin!(release);
        let told = async {
            while self.told.get().is_none() {
                let caught = self.signals.next().await;
                if caught.asks_for_end() {
                    self.told.set(Some(caught.number));
                }
            }
        };
        tokio::select! {
            biased;
            released = &mut release => return Some(released),
            () = told => {}
        }
        tokio::time::timeout(WAIT_IDLE, release).await.ok()
    }

    /// Releases the lock. False: it is not known whether the store released it. `others` says who goes on, if this
    /// process gives up.
    async fn free(&self, lock: &Lock, others: &str) -> bool {
        match self.patiently(lock.release()).await {
            Some(Ok(_)) => return true,
            Some(Err(e)) => remark(&format!("{e}; the lock ends when its lease ends")),
            None => remark(&format!(
                "the store did not answer within {}: lock `{}` may stay taken until its lease ends ({}){others}",
                span(WAIT_IDLE),
                self.args.lock,
                show_duration(self.args.lease),
            )),
        }
        false
    }

    async fn release_period(&self, period: Option<ClaimedPeriod>) {
        let Some(period) = period else { return };
        match self.patiently(period.release()).await {
            Some(Ok(_)) => {}
            Some(Err(e)) => tracing::debug!(error = %e, "the period stays claimed"),
            None => remark(&format!(
                "the store did not answer within {}: the current period of lock `{}` may stay claimed",
                span(WAIT_IDLE),
                self.args.lock,
            )),
        }
    }

    /// Waits until the locks that a cancelled request may have taken have been released in the background, but not for
    /// long: whoever sent the signal waits, too.
    async fn wait_idle(&self) {
        let idle = tokio::time::timeout(WAIT_IDLE, self.locks.wait_idle()).await;
        if idle.is_err() {
            remark(&format!(
                "the command was not started; the store did not answer within {}: if it still grants lock `{}`, nobody \
                can take it until its lease ends ({})",
                span(WAIT_IDLE),
                self.args.lock,
                show_duration(self.args.lease),
            ));
        }
    }

    /// Runs the command, and returns when its whole process tree is gone.
    // Long: whatever may happen while a command runs, in one loop.
    async fn command(
        &self,
        lock: &Lock,
        period: Option<&ClaimedPeriod>,
    ) -> Result<(RunEnd, Running), Failure> {
        let mut deadlines = lock.deadlines();
        let (run_id, args) = (RunId::random(), self.args);
        let release = ReleaseOnDeath {
            store: self.store.clone(),
            key: args.lock.clone(),
            owner: lock.owner().to_owned(),
            patience: args.lease,
        };
        let mut env = vec![
            ("SOLOIST_LOCK".to_owned(), args.lock.clone()),
            (
                "SOLOIST_FENCING_TOKEN".to_owned(),
                lock.fencing_token().to_string(),
            ),
            (EXEC_ID.to_owned(), run_id.to_string()),
        ];
        if let Some(period) = period {
            let at = Occurrence(period.begin_ms());
            env.push(("SOLOIST_OCCURRENCE".to_owned(), at.to_string()));
            env.push(("SOLOIST_OCCURRENCE_MS".to_owned(), at.0.to_string()));
        }
        let spec = Spec {
            job: JobName::new(&args.lock),
            run_id,
            argv: args.command.clone(),
            env,
            working_dir: None,
            user: None,
            group: None,
            new_privileges: false,
            timeout: None,
            grace: self.lease.kill_budget / 2,
            kill_budget: self.lease.kill_budget,
            success_codes: vec![0],
            deadline: deadlines.now(),
            settle: serde_json::to_value(release)
                .map_err(|e| Failure::internal("cannot write JSON", e))?,
            settle_exe: None,
            // The command stays in this process's cgroup, as if a shell had started it.
            walk_only: true,
            transparent: Some(Transparent {
                ignored: self.ignored.clone(),
            }),
        };
        let none = config::Output {
            keep: 0,
            log: false,
        };
        let childless = childless();
        let mut running = Runner::new()
            .map_err(|e| Failure::internal("cannot watch processes", e))?
            .for_one_run(childless)
            .hiding(self.variables.clone())
            .start(spec, none)
            .map_err(|e| Failure::internal("the command was not started", e))?;
        let_go_of_streams();
        let (mut start, mut stops) = (running.watch(), running.watch());
        let (mut lost, mut reached) = (false, false);
        // Only the start time of the command tells whether the terminal sent these signals to the command too.
        let mut early = vec![];
        loop {
            tokio::select! {
                end = running.wait() => return Ok((end, running)),
                started = start.started(), if !reached => {
                    reached = true;
                    for (caught, at) in early.drain(..) {
                        pass_on(&running, caught, started.is_some_and(|s| s.boottime <= at));
                    }
                }
                deadline = deadlines.next(), if !lost => {
                    if deadline == Boottime(0) {
                        // The guard has the same deadline and acts on it alone.
                        lost = true;
                        running.stop(Stop::LeaseLost, Some(self.lease.kill_budget / 2));
                    } else {
                        running.extend(deadline);
                    }
                }
                caught = self.signals.next() => {
                    if caught.asks_for_end() {
                        self.told.set(Some(caught.number));
                    }
                    if caught.by_terminal && !reached {
                        early.push((caught, Boottime::now()));
                    } else {
                        pass_on(&running, caught, reached);
                    }
                }
                signal = stops.stopped() => {
                    // Our parent must see that the command was stopped from the keyboard. A command that an operator
                    // stops keeps its lock.
                    if matches!(signal, libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU) {
                        signals::stop_ourselves();
                    }
                }
            }
        }
    }

    fn conflict(&self, what: &str) -> Exit {
        let code = self.args.conflict_exit_code;
        if code != Some(0) {
            remark(what);
        }
        code.map_or(Exit::TryAgain, Exit::Command)
    }

    fn exit(&self, end: &RunEnd, lock: &Lock) -> Exit {
        let name = &self.args.lock;
        match end.cause {
            Some(Cause::Deadline | Cause::Stopped(Stop::LeaseLost)) => {
                let why = match end.cause {
                    Some(Cause::Stopped(_)) if lock.was_taken_away() => {
                        "it was deleted, or another process took it"
                    }
                    _ => "it could not be renewed in time",
                };
                let what = match end.started {
                    Some(_) => "the command was ended",
                    None => "the command was not started",
                };
                remark(&format!("lock `{name}` was lost: {why}; {what}"));
                Exit::LeaseLost
            }
            Some(_) => {
                remark(end.error.as_deref().unwrap_or("the command was ended"));
                Exit::Internal
            }
            // The signal was meant for the command, which was not executed yet.
            None if end.started.is_none() && end.signal.is_some() => {
                by_signal(end.signal.unwrap_or_default())
            }
            None if end.started.is_none() => {
                remark(
                    end.error
                        .as_deref()
                        .unwrap_or("the command was not started"),
                );
                match end.errno {
                    Some(libc::ENOENT | libc::ENOTDIR) => Exit::Command(NOT_FOUND),
                    Some(_) => Exit::Command(NOT_EXECUTABLE),
                    None => Exit::Internal,
                }
            }
            None => match (end.signal, end.exit_code) {
                (Some(signal), _) => by_signal(signal),
                (None, code) => {
                    Exit::Command(code.and_then(|c| u8::try_from(c).ok()).unwrap_or(u8::MAX))
                }
            },
        }
    }
}

fn by_signal(signal: i32) -> Exit {
    Exit::Command(u8::try_from(128 + signal).unwrap_or(u8::MAX))
}

fn pass_on(running: &Running, caught: Caught, reached: bool) {
    if caught.to_be_passed_on(reached) {
        running.signal(caught.number);
    }
}

/// Leaves stdin and stdout to the command alone, so that the processes at the other ends notice when it closes them.
fn let_go_of_streams() {
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null");
    if let Ok(null) = null {
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
    }
}

fn span(d: Duration) -> String {
    show::span(super::millis(d))
}

/// `web-1:4711 has it; its lease lasts 12 s, unless it renews it`
fn held(holder: &str, remaining: Duration) -> String {
    if remaining == Duration::MAX {
        format!("{holder} has it, and its lease has no end")
    } else {
        format!(
            "{holder} has it; its lease lasts {} unless renewed",
            span(remaining)
        )
    }
}

/// Waits for a signal that ends this process.
async fn ended(signals: &Signals) -> i32 {
    loop {
        let caught = signals.next().await;
        if caught.ends() {
            return caught.number;
        }
        if matches!(caught.number, libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU) {
            signals::stop_ourselves();
        }
    }
}
