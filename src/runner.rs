//! The daemon's side of a run: starts its guard, talks to it, collects the output, and ends the tree itself if the
//! guard is killed. What the guard does is in [`crate::guard`].
//!
//! Order at the end of a run: [`Running::wait`] (the tree is gone), settle in the store, [`Running::settled`].

mod children;
mod output;

use std::{
    cell::RefCell,
    collections::HashSet,
    io::{self, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    sync::{mpsc, oneshot, watch},
};
use tracing::{debug, warn};

use self::children::{OwnChild, bury};
pub use self::{
    children::bury_strangers,
    output::{LOG_TARGET, LONGEST_LOG_LINE, Piece, Tail},
};
use crate::{
    clock::Boottime,
    config::Output,
    guard::{
        self, Cgroup, Control, EXEC_ID, HandOver, Moment, Proc, RUN_ID, Report, Spec, below,
        descend, kill_pass,
    },
    logic::backoff::Pauses,
    logic::run::{Cause, Stop, outcome},
    model::{JobName, Outcome, RunId},
};

/// How long the pipes may stay open after the tree is gone. Only somebody outside of the tree who was handed a
/// descriptor can hold them.
const DRAIN: Duration = Duration::from_millis(500);

/// How often an orphaned tree is killed again, at first and at most.
const ORPHANS_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(256));

/// How long a sweep tries to empty one cgroup.
const SWEEP_PATIENCE: Duration = Duration::from_secs(5);

/// Starts commands under guards. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Runner {
    exe: Arc<PathBuf>,
    /// Variables of ours that guards and commands do not get.
    hidden: Arc<[String]>,
}

/// The guard could not be started: the run failed before it began.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the guard of `{job}` ({}): {source}{}", exe.display(), hint(source))]
pub struct StartError {
    job: JobName,
    exe: PathBuf,
    source: io::Error,
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            "; raise the limit on open files of the soloist process (ulimit -n, LimitNOFILE)"
        }
        Some(libc::ENFILE) => "; the host's limit on open files is reached (fs.file-max)",
        Some(libc::EAGAIN) => {
            "; a limit on processes is reached (ulimit -u, TasksMax, pids.max, kernel.pid_max)"
        }
        Some(libc::ENOMEM) => "; the host is out of memory",
        _ => "",
    }
}

impl Runner {
    /// Guards are started from this very binary. Makes this process the subreaper of what guards leave behind
    /// when they are killed.
    ///
    /// # Errors
    /// When the kernel refuses that.
    pub fn new() -> io::Result<Self> {
        Self::with_exe("/proc/self/exe".into())
    }

    /// As [`Runner::new`], with guards from another binary: that of tests, which are not soloist themselves.
    ///
    /// # Errors
    /// As [`Runner::new`].
    pub fn with_exe(exe: PathBuf) -> io::Result<Self> {
        // Any pid means yes.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        Ok(Self {
            exe: Arc::new(exe),
            hidden: Arc::default(),
        })
    }

    /// Guards and commands get none of these variables of ours: the secrets of the store.
    pub fn hiding(self, variables: Arc<[String]>) -> Self {
        Self {
            hidden: variables,
            ..self
        }
    }

    /// Us, as the guard or what comes after it.
    fn command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(&*self.exe);
        command.arg0("soloist");
        let of_store = std::env::vars_os().map(|(name, _)| name);
        let of_store = of_store.filter(|name| guard::is_of_store(name));
        for name in of_store.chain(self.hidden.iter().map(Into::into)) {
            command.env_remove(name);
        }
        command
    }

    /// Starts a guard ahead of its run: it waits to be told what to run, and ends when the answer is dropped. Needs a
    /// Tokio runtime, and holds its thread for a fraction of a millisecond, whatever the size of this process.
    ///
    /// # Errors
    /// No descriptor, process or memory left for a guard.
    pub fn prepare(&self, job: &JobName, run: RunId) -> Result<Prepared, StartError> {
        self.launch(job, run, false)
            .map_err(|source| self.failed(job, source))
    }

    /// Starts the guard of `spec`, which starts the command; [`Running::started`] tells when it has. As for
    /// [`Runner::prepare`], a Tokio runtime is needed, and its thread held.
    ///
    /// # Errors
    /// No descriptor, process or memory left for a guard. Everything later is part of [`End`].
    pub async fn start(&self, spec: Spec, output: Output) -> Result<Running, StartError> {
        self.start_prepared(spec, output, None).await
    }

    /// As [`Runner::start`], with the guard that was prepared for this run, if there is one.
    ///
    /// # Errors
    /// As [`Runner::start`].
    pub async fn start_prepared(
        &self,
        spec: Spec,
        output: Output,
        prepared: Option<Prepared>,
    ) -> Result<Running, StartError> {
        let job = spec.job.clone();
        self.spawn(spec, output, prepared)
            .map_err(|source| self.failed(&job, source))
    }

    fn failed(&self, job: &JobName, source: io::Error) -> StartError {
        StartError {
            job: job.clone(),
            exe: self.exe.to_path_buf(),
            source,
        }
    }

    fn launch(&self, job: &JobName, run: RunId, transparent: bool) -> io::Result<Prepared> {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        // Nothing here that would make std fork instead of posix_spawn: a fork copies the page tables of the
        // whole daemon. User, session and so on are the guard's work.
        let mut command = self.command();
        command
            .args([guard::ARGUMENT, job.as_str(), &run.to_string()])
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // Not closed on exec, for the guard to have under this number; ours is closed when it has it.
        let mut stdin = None;
        if transparent {
            let ours = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?;
            rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::empty())?;
            command
                .arg(ours.as_raw_fd().to_string())
                .stdout(Stdio::inherit())
                .stderr(Stdio::inherit());
            stdin = Some(ours);
        }
        let child = OwnChild::spawn(command)?;
        drop(stdin);
        Ok(Prepared {
            child,
            socket: ours,
        })
    }

    fn spawn(&self, spec: Spec, output: Output, prepared: Option<Prepared>) -> io::Result<Running> {
        let mut first_line = serde_json::to_vec(&spec)?;
        first_line.push(b'\n');
        // Somebody may have killed the one that waits: then nothing was started yet, and a new one takes its place.
        let told = prepared.and_then(|p| Some((p.tell(&first_line).ok()?, p)));
        let (written, prepared) = match told {
            Some(told) => told,
            None => {
                let new = self.launch(&spec.job, spec.run_id, spec.transparent.is_some())?;
                (new.tell(&first_line)?, new)
            }
        };
        // What does not fit follows later.
        first_line.drain(..written);
        let Prepared { mut child, socket } = prepared;
        let ours = UnixStream::from_std(socket)?;

        let tail = Arc::new(Tail::new(output.keep));
        let mut drains = tokio::task::JoinSet::new();
        let (stdout, stderr) = child.take_output();
        if let Some(pipe) = stdout {
            let (tail, job, run) = (tail.clone(), spec.job.clone(), spec.run_id.to_string());
            drains.spawn(async move {
                output::drain(pipe, &tail, output.log, "stdout", job.as_str(), &run).await
            });
        }
        if let Some(pipe) = stderr {
            let (tail, job, run) = (tail.clone(), spec.job.clone(), spec.run_id.to_string());
            drains.spawn(async move {
                output::drain(pipe, &tail, output.log, "stderr", job.as_str(), &run).await
            });
        }
        let (orders, order_queue) = mpsc::unbounded_channel();
        let (state, state_seen) = watch::channel(State::default());
        let guard_pid = child.id();
        let supervisor = Supervisor {
            job: spec.job,
            run_id: spec.run_id,
            success_codes: spec.success_codes,
            transparent: spec.transparent.is_some(),
            child,
            drains,
            tail: tail.clone(),
            state,
            pending: first_line,
            deadline: spec.deadline,
            due: spec
                .timeout
                .map(|timeout| Boottime::now() + timeout + spec.grace + spec.kill_budget),
            grace: spec.grace,
            kill_budget: spec.kill_budget,
        };
        tokio::spawn(supervisor.run(ours, order_queue));
        Ok(Running {
            orders,
            state: state_seen,
            tail,
            guard_pid,
        })
    }

    /// Leaves an outcome that the store has not heard of to a process of its own, which goes on trying when this one
    /// has ended: for runs without a guard that could.
    ///
    /// # Errors
    /// No descriptor, process or memory left for it.
    pub fn hand_over(&self, hand_over: &HandOver) -> io::Result<()> {
        self.command()
            .arg(guard::SETTLE_ARGUMENT)
            .stdin(hand_over.to_file()?)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map(drop)
    }

    /// Ends what other daemons and their guards left behind when both were killed at once, and returns how many
    /// runs that were. It sees only trees in a cgroup below our own; others cannot be told from innocent
    /// processes that got our environment handed on (`at`, `sbatch`). Blocking; costs next to nothing while every run
    /// has its guard.
    pub fn sweep() -> usize {
        // In this order: a guard is there before its cgroup is, and after.
        let mut cgroups = guard::cgroups_of_all_runs();
        cgroups.retain(|(_, cgroup)| cgroup.abandoned());
        if cgroups.is_empty() {
            return 0;
        }
        // One that has just made it has not locked it yet.
        let guarded: Vec<String> = guard_run_ids();
        let orphaned = cgroups
            .into_iter()
            .filter(|(run, _)| !guarded.contains(run));
        orphaned
            .filter(|(_, cgroup)| {
                let populated = cgroup.populated();
                end_cgroup(cgroup);
                populated
            })
            .count()
    }
}

/// A guard that waits to be told what to run; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "it ends when dropped"]
pub struct Prepared {
    child: OwnChild,
    socket: StdUnixStream,
}

impl Prepared {
    /// The guard's process id.
    pub fn guard_pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Returns how much of it was taken.
    fn tell(&self, line: &[u8]) -> io::Result<usize> {
        (&self.socket).write(line)
    }
}

/// The run ids in the command lines of all guards on this host.
fn guard_run_ids() -> Vec<String> {
    let Ok(dir) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    dir.flatten()
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .filter_map(|line| {
            let mut args = line.split(|&b| b == 0).skip(1);
            (args.next() == Some(guard::ARGUMENT.as_bytes())).then_some(())?;
            Some(String::from_utf8_lossy(args.nth(1)?).into_owned())
        })
        .collect()
}

/// How a run ended. Its tree is gone.
#[derive(Debug, Clone)]
pub struct End {
    pub outcome: Outcome,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    /// What ended it; None: it ended by itself, or could not be started.
    pub cause: Option<Cause>,
    /// Why it failed, in words, where code and signal do not say it.
    pub error: Option<String>,
    /// Why exec refused it, as the kernel says it; None also when it did not come to that.
    pub errno: Option<i32>,
    /// None when the command could not be started.
    pub started: Option<Moment>,
    /// When the last process of its tree was gone: a run is over when its tree is.
    pub ended: Moment,
    /// Processes that were still there when the command itself ended.
    pub leftover: u32,
    /// The last bytes of stdout and stderr, at most [`Output::keep`].
    pub output_tail: Vec<u8>,
    /// All that was written.
    pub output_bytes: u64,
}

impl End {
    /// For [`crate::model::RunRecord::output_tail`].
    pub fn output_text(&self) -> String {
        String::from_utf8_lossy(&self.output_tail).into_owned()
    }

    /// For [`crate::model::RunRecord::output_truncated`].
    pub fn output_truncated(&self) -> bool {
        self.output_bytes > self.output_tail.len() as u64
    }
}

#[derive(Debug, Default)]
struct State {
    started: Option<Moment>,
    end: Option<End>,
    /// Counts how often the command was stopped, with its process id and the last signal that did it.
    stopped: (u64, i32, i32),
}

/// See [`Running::watch`].
#[derive(Debug)]
pub struct Watch(watch::Receiver<State>, u64);

impl Watch {
    /// As [`Running::started`].
    pub async fn started(&mut self) -> Option<Moment> {
        match self
            .0
            .wait_for(|s| s.started.is_some() || s.end.is_some())
            .await
        {
            Ok(state) => state.started,
            Err(_) => None,
        }
    }

    /// Waits for the next stop, and returns the signal that did it. Cancel safe. A command that goes on already is passed over.
    pub async fn stopped(&mut self) -> i32 {
        loop {
            let seen = self.1;
            let Ok((count, pid, signal)) = self
                .0
                .wait_for(|s| s.stopped.0 > seen)
                .await
                .map(|s| s.stopped)
            else {
                return std::future::pending().await;
            };
            self.1 = count;
            if Proc::read(pid).is_some_and(|p| p.stopped()) {
                return signal;
            }
        }
    }
}

#[derive(Debug)]
enum Order {
    Tell(Control),
    /// Told, and the guard has it.
    Settled(oneshot::Sender<()>),
}

/// A run whose guard was started.
///
/// Dropped before [`Running::settled`], it is as if the daemon had died: the guard ends the command and settles.
#[derive(Debug)]
#[must_use = "dropping it ends the command and leaves the settling to the guard"]
pub struct Running {
    orders: mpsc::UnboundedSender<Order>,
    state: watch::Receiver<State>,
    tail: Arc<Tail>,
    guard_pid: Option<u32>,
}

impl Running {
    /// The lease is trusted until `deadline`. Never waits. Without effect when the deadline before has passed.
    pub fn extend(&self, deadline: Boottime) {
        let _ = self.orders.send(Order::Tell(Control::Deadline(deadline)));
    }

    /// Ends the command: SIGTERM, and after `grace` (None: the job's) SIGKILL. Never waits. A second, shorter
    /// grace shortens the first.
    pub fn stop(&self, reason: Stop, grace: Option<Duration>) {
        let _ = self
            .orders
            .send(Order::Tell(Control::Stop { reason, grace }));
    }

    /// Sends a signal to the command itself. Never waits; one that comes before the command is there waits for it.
    pub fn signal(&self, signal: i32) {
        let _ = self.orders.send(Order::Tell(Control::Signal(signal)));
    }

    /// Hears of the start of the command and, if it is transparent, of its stops (SIGSTOP, SIGTSTP, ...).
    pub fn watch(&self) -> Watch {
        Watch(self.state.clone(), 0)
    }

    /// Waits until the command was started, and returns when that was; None: it could not be, see [`Running::wait`].
    pub async fn started(&self) -> Option<Moment> {
        self.watch().started().await
    }

    /// Waits until every process of the run is gone, and returns how it ended. Cancel safe; the answer stays.
    pub async fn wait(&mut self) -> End {
        if let Ok(state) = self.state.wait_for(|s| s.end.is_some()).await
            && let Some(end) = &state.end
        {
            return end.clone();
        }
        // Only if the runtime is being torn down under us: the guard sees its socket close and takes over.
        std::future::pending().await
    }

    /// The output so far; stays valid afterwards.
    pub fn output(&self) -> Arc<Tail> {
        self.tail.clone()
    }

    /// The guard's process id.
    pub fn guard_pid(&self) -> Option<u32> {
        self.guard_pid
    }

    /// The outcome is recorded in the store, or is nobody's business any more (the lease was lost): lets the guard
    /// go without settling. Returns when the guard has been told.
    pub async fn settled(self) {
        let (told, wait) = oneshot::channel();
        if self.orders.send(Order::Settled(told)).is_ok() {
            let _ = wait.await;
        }
    }
}

/// The task behind a [`Running`].
struct Supervisor {
    job: JobName,
    run_id: RunId,
    success_codes: Vec<i32>,
    transparent: bool,
    child: OwnChild,
    drains: tokio::task::JoinSet<()>,
    tail: Arc<Tail>,
    state: watch::Sender<State>,
    /// Lines that the socket has not taken yet.
    pending: Vec<u8>,
    /// The newest one that the guard was told.
    deadline: Boottime,
    /// By then it will have ended the tree, if it can: for the timeout, or as it was told.
    due: Option<Boottime>,
    grace: Duration,
    kill_budget: Duration,
}

/// [`Report::Exited`].
#[derive(Debug)]
struct Exited {
    exit_code: Option<i32>,
    signal: Option<i32>,
    cause: Option<Cause>,
}

/// What the guard has reported so far.
#[derive(Debug, Default)]
struct Reported {
    pid: Option<i32>,
    cgroup: Option<PathBuf>,
    started: Option<Moment>,
    exited: Option<Exited>,
    failed: Option<(String, Option<Cause>)>,
    errno: Option<i32>,
    start_signal: Option<i32>,
    gone: Option<(u32, Moment)>,
}

impl Supervisor {
    async fn run(mut self, socket: UnixStream, mut orders: mpsc::UnboundedReceiver<Order>) {
        let (from_guard, mut to_guard) = socket.into_split();
        let mut reports = BufReader::new(from_guard).lines();
        let mut reported = Reported::default();
        let mut settled = Vec::new();
        let mut dropped = false;
        // Until the tree is gone, or the guard.
        while reported.gone.is_none() {
            if dropped && self.pending.is_empty() {
                let _ = to_guard.shutdown().await;
            }
            // Half of the kill budget is the command's grace, the other half is for what comes after it.
            let at = self.deadline + self.kill_budget * 5 / 8;
            let overdue = self
                .due
                .map_or(at, |due| due.min(at))
                .since(Boottime::now())
                .max(ORPHANS_AGAIN.1 / 8);
            tokio::select! {
                () = tokio::time::sleep(overdue) => self.check_on_guard(),
                line = reports.next_line() => match line {
                    Ok(Some(line)) => self.on_report(&line, &mut reported),
                    Ok(None) | Err(_) => break,
                },
                order = orders.recv(), if !dropped => match order {
                    Some(order) => self.take(order, &mut settled),
                    // Nobody wants to know any more: once the guard has all that was said, we are dead for it.
                    None => dropped = true,
                },
                written = to_guard.write(&self.pending), if !self.pending.is_empty() => match written {
                    Ok(n) => { self.pending.drain(..n); }
                    Err(_) => self.pending.clear(),
                },
            }
        }
        if reported.gone.is_none() {
            self.guard_is_gone(&mut reported).await;
        }
        self.finish_output().await;
        let end = self.end(reported);
        self.state.send_modify(|state| state.end = Some(end));

        // Until settled: the guard waits for that, or for our death.
        while settled.is_empty() && !dropped {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(order) => self.take(order, &mut settled),
                    None => dropped = true,
                },
                // Somebody killed it. As a zombie it would hide others.
                _ = self.child.wait(), if self.child.id().is_some() => {}
            }
        }
        let _ = to_guard.write_all(&self.pending).await;
        drop(to_guard);
        for told in settled {
            let _ = told.send(());
        }
        drop(reports);
        if let Err(error) = self.child.wait().await {
            debug!(job = %self.job, run = %self.run_id, %error, "cannot wait for a guard");
        }
    }

    fn take(&mut self, order: Order, settled: &mut Vec<oneshot::Sender<()>>) {
        let control = match order {
            Order::Tell(control) => {
                match control {
                    Control::Deadline(deadline) => self.deadline = self.deadline.max(deadline),
                    Control::Stop { grace, .. } => {
                        let grace = grace.unwrap_or(self.grace);
                        let due = Boottime::now() + grace + self.kill_budget;
                        self.due = Some(self.due.map_or(due, |before| before.min(due)));
                    }
                    Control::Signal(_) | Control::Settled => {}
                }
                control
            }
            Order::Settled(told) => {
                settled.push(told);
                Control::Settled
            }
        };
        if let Ok(mut line) = serde_json::to_vec(&control) {
            line.push(b'\n');
            self.pending.append(&mut line);
        }
    }

    fn on_report(&self, line: &str, reported: &mut Reported) {
        match serde_json::from_str(line) {
            Ok(Report::Started { pid, at, cgroup }) => {
                (reported.pid, reported.started, reported.cgroup) = (Some(pid), Some(at), cgroup);
                self.state.send_modify(|state| state.started = Some(at));
            }
            Ok(Report::StartFailed {
                error,
                cause,
                errno,
                signal,
            }) => {
                reported.failed = Some((error, cause));
                (reported.errno, reported.start_signal) = (errno, signal);
            }
            Ok(Report::Stopped { signal }) => {
                let pid = reported.pid.unwrap_or_default();
                self.state
                    .send_modify(|state| state.stopped = (state.stopped.0 + 1, pid, signal));
            }
            Ok(Report::Exited {
                exit_code,
                signal,
                cause,
                ..
            }) => {
                reported.exited = Some(Exited {
                    exit_code,
                    signal,
                    cause,
                });
            }
            Ok(Report::Gone { leftover, at }) => reported.gone = Some((leftover, at)),
            Ok(Report::Stuck { pids }) => {
                self.warn_of_survivors(&pids);
            }
            Err(error) => {
                warn!(job = %self.job, run = %self.run_id, %error, line, "a guard says what we do not understand")
            }
        }
    }

    fn warn_of_survivors(&self, pids: &[i32]) {
        warn!(job = %self.job, run = %self.run_id, ?pids, "processes of a run survive SIGKILL so far");
    }

    /// The guard should have ended the tree by now. If somebody stopped it, it cannot: killed, it leaves that to us.
    fn check_on_guard(&mut self) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        if pid
            .and_then(Proc::read)
            .is_some_and(|guard| guard.stopped())
        {
            self.child.kill();
        }
    }

    /// The guard ended without its last word: its work is ours now.
    async fn guard_is_gone(&mut self, reported: &mut Reported) {
        // Certainly dead, so that its children are ours.
        self.child.kill();
        let status = self.child.wait().await;
        let how = status.map_or_else(|e| e.to_string(), |status| status.to_string());
        let error = format!("the guard of this run died ({how}), so the command was ended");
        warn!(job = %self.job, run = %self.run_id, "{error}");
        let run = self.run_id.to_string();
        let mut orphans = Orphans::new(&run, reported.pid, reported.cgroup.take());
        if self.transparent {
            orphans.marker = format!("{EXEC_ID}={run}");
            orphans.group = Some(rustix::process::getpgrp().as_raw_nonzero().get());
        }
        let mut pauses = Pauses::from(ORPHANS_AGAIN.0);
        let mut said = false;
        // Without end, as the guard would: a run is not over, and must not be settled, before its tree is.
        loop {
            let pass = tokio::task::spawn_blocking(move || {
                let left = orphans.pass();
                (orphans, left)
            });
            // Only a runtime that is being torn down does not finish it.
            let Ok((back, left)) = pass.await else { break };
            if left.is_empty() {
                break;
            }
            orphans = back;
            let pause = pauses.after_failure(ORPHANS_AGAIN.1);
            if pause == ORPHANS_AGAIN.1 && !std::mem::replace(&mut said, true) {
                self.warn_of_survivors(&left);
            }
            tokio::time::sleep(pause).await;
        }
        let at = Moment::now();
        // What the guard had said about the command itself stays true.
        if reported.exited.is_none() && reported.failed.is_none() {
            reported.exited = Some(Exited {
                exit_code: None,
                signal: None,
                cause: Some(Cause::GuardGone),
            });
            reported.failed = Some((error, Some(Cause::GuardGone)));
        }
        reported.gone = Some((0, at));
    }

    async fn finish_output(&mut self) {
        let drains = &mut self.drains;
        let all = async { while drains.join_next().await.is_some() {} };
        if tokio::time::timeout(DRAIN, all).await.is_err() {
            debug!(job = %self.job, run = %self.run_id, "somebody else holds the output of a run open");
        }
        self.drains.abort_all();
    }

    fn end(&self, reported: Reported) -> End {
        let (leftover, ended) = reported.gone.unwrap_or_else(|| (0, Moment::now()));
        let Exited {
            exit_code,
            signal,
            cause,
        } = reported.exited.unwrap_or(Exited {
            exit_code: None,
            signal: reported.start_signal,
            cause: None,
        });
        let (error, fail_cause) = reported.failed.unzip();
        let cause = cause.or(fail_cause.flatten());
        let tail = self.tail.since(0);
        End {
            outcome: outcome(cause, exit_code, &self.success_codes),
            exit_code,
            signal,
            cause,
            error,
            errno: reported.errno,
            started: reported.started,
            ended,
            leftover,
            output_bytes: tail.next(),
            output_tail: tail.bytes,
        }
    }
}

/// The tree of a guard that was killed.
///
/// The kernel killed the command itself (PDEATHSIG). The rest fell to us, the next subreaper: what is in the
/// run's cgroup, in the command's session or group, or carries the run's id. Whatever has none of these (`env -i`
/// and setsid, without a cgroup) cannot be told from children of ours that are none of our business.
struct Orphans {
    marker: String,
    command: Option<i32>,
    /// That of a transparent command, which is our own.
    group: Option<i32>,
    cgroup: Option<Cgroup>,
    /// Once seen, a process stays known: as a zombie it has no environment any more.
    known: RefCell<HashSet<(i32, u64)>>,
}

impl Orphans {
    fn new(run: &str, command: Option<i32>, cgroup: Option<PathBuf>) -> Self {
        Self {
            marker: format!("{RUN_ID}={run}"),
            command,
            group: None,
            cgroup: cgroup.map(Cgroup::at).or_else(|| guard::cgroup_of_run(run)),
            known: RefCell::default(),
        }
    }

    fn members(&self) -> Vec<Proc> {
        let ours = below(std::process::id().cast_signed());
        let mut known = self.known.borrow_mut();
        let roots: Vec<Proc> = ours
            .iter()
            .filter(|p| {
                known.contains(&p.key())
                    || self.group == Some(p.group)
                    || belongs(p, &self.marker, self.command)
            })
            .cloned()
            .collect();
        let mut tree = descend(ours, roots.iter().map(|p| p.pid).collect());
        tree.extend(roots);
        known.extend(tree.iter().map(Proc::key));
        tree
    }

    /// Kills all there is and buries what is dead. Returns who is left; blocking, for milliseconds.
    fn pass(&self) -> Vec<i32> {
        // Looked at while they live, or nothing could tell their zombies from others.
        let found = self.members().len();
        if let Some(cgroup) = &self.cgroup {
            cgroup.kill();
        }
        if found > 0 {
            kill_pass(|| self.members());
        }
        let mut left: Vec<i32> = self
            .members()
            .iter()
            .filter(|p| !buried(p))
            .map(|p| p.pid)
            .collect();
        if let Some(cgroup) = &self.cgroup {
            if cgroup.populated() {
                left.extend(cgroup.members());
            } else if left.is_empty() {
                cgroup.remove();
            }
        }
        left
    }
}

/// A zombie whose parent we are is waited for, by its number: never to take away anybody else's child.
fn buried(process: &Proc) -> bool {
    process.parent == std::process::id().cast_signed() && !process.alive() && bury(process.pid)
}

fn belongs(process: &Proc, marker: &str, command: Option<i32>) -> bool {
    command.is_some_and(|pid| process.pid == pid || process.session == pid || process.group == pid)
        || words(process.pid, "environ", |var| var == marker.as_bytes())
        // One that was to become the command is still its guard's copy, with the run id among the arguments.
        || marker.split_once('=').is_some_and(|(_, run)| {
            words(process.pid, "cmdline", |word| word == run.as_bytes())
                && words(process.pid, "cmdline", |word| word == guard::ARGUMENT.as_bytes())
        })
}

/// Whether one of the NUL-terminated words in this file of /proc is wanted.
fn words(pid: i32, file: &str, wanted: impl Fn(&[u8]) -> bool) -> bool {
    let has = |path: PathBuf| {
        std::fs::read(path.join(file)).is_ok_and(|text| text.split(|&b| b == 0).any(&wanted))
    };
    // A first thread that has ended shows nothing any more, for those that it has left either.
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    let headless = Proc::read(pid).is_some_and(|p| p.headless());
    match threads {
        Ok(threads) if headless => threads.flatten().any(|thread| has(thread.path())),
        _ => has(format!("/proc/{pid}").into()),
    }
}

fn end_cgroup(cgroup: &Cgroup) {
    let end = Boottime::now() + SWEEP_PATIENCE;
    while cgroup.populated() && Boottime::now() < end {
        cgroup.kill();
        std::thread::sleep(ORPHANS_AGAIN.0);
    }
    cgroup.remove();
}
