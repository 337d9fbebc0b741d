//! The daemon's side of one guard: sends it messages, handles its reports, and does its work if it dies.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    sync::{mpsc, oneshot, watch},
};
use tracing::{debug, warn};

use super::{
    Order, RunEnd, State, Tail,
    children::{OwnChild, childless},
    orphans::Orphans,
};
use crate::{
    blocking,
    clock::Boottime,
    guard::{Control, EXEC_ID, Moment, Report, frozen, helpless},
    logic::guard_life::{Again, Cause, Kills, Overdue, outcome},
    model::{JobName, RunId, Usage},
};

/// Pause between two looks at a guard that should have ended its tree.
const CHECK_AGAIN: Duration = Duration::from_millis(32);

/// How long a guard that was killed may take to die. One in a freezer of cgroup v1 dies only when it is let go.
const DYING: Duration = Duration::from_millis(100);

/// The task behind a [`Running`].
pub(super) struct Supervisor {
    pub(super) job: JobName,
    pub(super) run_id: RunId,
    pub(super) success_codes: Vec<i32>,
    pub(super) transparent: bool,
    pub(super) child: OwnChild,
    pub(super) drains: tokio::task::JoinSet<()>,
    pub(super) tail: Arc<Tail>,
    pub(super) state: watch::Sender<State>,
    /// Lines that the socket has not accepted yet.
    pub(super) pending: Vec<u8>,
    pub(super) overdue: Overdue,
    pub(super) kill_budget: Duration,
    /// See [`super::Runner::for_one_run`].
    pub(super) sole: bool,
    /// When this process killed the guard, and what the guard should have ended the command for.
    pub(super) killed_guard: Option<(Boottime, Cause)>,
}

/// The content of [`Report::Exited`].
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
    gone: Option<(Moment, Usage)>,
}

impl Supervisor {
    pub(super) async fn run(
        mut self,
        socket: UnixStream,
        mut orders: mpsc::UnboundedReceiver<Order>,
    ) {
        let (from_guard, mut to_guard) = socket.into_split();
        let mut reports = BufReader::new(from_guard).lines();
        let mut reported = Reported::default();
        let mut settled = Vec::new();
        let mut dropped = false;
        // Until the tree or the guard is gone.
        while reported.gone.is_none() {
            if dropped && self.pending.is_empty() {
                let _ = to_guard.shutdown().await;
            }
            let (overdue, _) = self.overdue.at();
            let wait = overdue.since(Boottime::now()).max(CHECK_AGAIN);
            tokio::select! {
                () = tokio::time::sleep(wait) => if self.check_on_guard() { break },
                line = reports.next_line() => match line {
                    Ok(Some(line)) => self.on_report(&line, &mut reported),
                    Ok(None) | Err(_) => break,
                },
                order = orders.recv(), if !dropped => match order {
                    Some(order) => self.take(order, &mut settled),
                    // The caller dropped the run: once the guard has all messages, treat this process as dead.
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
        self.tail.gone.cancel();
        while self.drains.join_next().await.is_some() {}
        let end = self.end(reported);
        self.state.send_modify(|state| state.end = Some(end));

        // Wait until the run is settled: the guard waits for that message, or for the death of this process.
        while settled.is_empty() && !dropped {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(order) => self.take(order, &mut settled),
                    None => dropped = true,
                },
                // The guard was killed. Reap it, because its zombie would hide others.
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
                    Control::Deadline(deadline) => self.overdue.on_renewal(deadline),
                    Control::Stop { reason, grace } => {
                        self.overdue.on_stop(Boottime::now(), reason, grace);
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
            Ok(Report::Gone { at, usage }) => reported.gone = Some((at, usage)),
            Ok(Report::Stuck { pids }) => {
                self.warn_of_survivors(&pids);
            }
            Err(error) => {
                warn!(job = %self.job, run = %self.run_id, %error, line, "cannot parse a report of a guard")
            }
        }
    }

    fn warn_of_survivors(&self, pids: &[i32]) {
        warn!(job = %self.job, run = %self.run_id, ?pids, "processes of a run are still alive after SIGKILL");
    }

    /// The guard should have ended the tree by now. If somebody stopped or froze the guard, it cannot: kill it and do
    /// its work here. True: it was killed, and cannot die yet.
    fn check_on_guard(&mut self) -> bool {
        let now = Boottime::now();
        if let Some((killed, _)) = self.killed_guard {
            return now.since(killed) >= DYING;
        }
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        if pid.is_some_and(helpless) {
            self.killed_guard = Some((now, self.overdue.at().1));
            self.child.kill();
        }
        false
    }

    /// The guard ended without its last report: do its work here.
    async fn guard_is_gone(&mut self, reported: &mut Reported) {
        // Make sure that it is dead, so that its children become children of this process.
        self.child.kill();
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        // However long that takes on a busy host, but for a guard that cannot die.
        let status = loop {
            match tokio::time::timeout(DYING, self.child.wait()).await {
                Err(_) if !pid.is_some_and(frozen) => {}
                status => break status,
            }
        };
        let guard = pid.filter(|_| status.is_err());
        let how = match status {
            Ok(Ok(status)) => status.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it was killed, and cannot die yet".to_owned(),
        };
        let error = match self.killed_guard {
            None => format!("the guard of this run died ({how}), so the command was ended"),
            Some(_) => "somebody had stopped or frozen the guard of this run when it should have ended the command, \
                        so this instance ended both"
                .to_owned(),
        };
        // If the guard did not say that it had executed the command, nobody knows.
        let known = self.killed_guard.filter(|_| reported.started.is_some());
        let cause = known.map_or(Cause::GuardGone, |(_, cause)| cause);
        warn!(job = %self.job, run = %self.run_id, "{error}");
        let run = self.run_id.to_string();
        let mut orphans = Orphans::new(&run, reported.pid, reported.cgroup.take());
        if self.transparent {
            orphans.marker = format!("{EXEC_ID}={run}");
            orphans.group = Some(rustix::process::getpgrp().as_raw_nonzero().get());
        }
        orphans.sole = self.sole;
        orphans.guard = guard;
        let mut kills = Kills::begin(Boottime::now(), self.kill_budget);
        // Without limit, like the guard: a run is not over, and must not be settled, before its tree is gone.
        loop {
            let (back, left) = blocking::run(move || {
                let left = orphans.pass();
                (orphans, left)
            })
            .await;
            // What was forked while this process read /proc may be missing there, but the kernel knows of it.
            if left.is_empty() && (!self.sole || guard.is_some() || childless()) {
                break;
            }
            orphans = back;
            if let Some(Again { report: true }) = kills.on_time(Boottime::now()) {
                self.warn_of_survivors(&left);
            }
            tokio::time::sleep(kills.again_at().since(Boottime::now())).await;
        }
        let at = Moment::now();
        // The guard's earlier reports about the command itself stay valid.
        if reported.exited.is_none() && reported.failed.is_none() {
            reported.exited = Some(Exited {
                exit_code: None,
                signal: None,
                cause: Some(cause),
            });
            reported.failed = Some((error, Some(cause)));
        }
        reported.gone = Some((at, Usage::default()));
    }

    fn end(&self, reported: Reported) -> RunEnd {
        let gone = || (Moment::now(), Usage::default());
        let (ended, usage) = reported.gone.unwrap_or_else(gone);
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
        RunEnd {
            outcome: outcome(cause, exit_code, &self.success_codes),
            exit_code,
            signal,
            cause,
            error,
            errno: reported.errno,
            started: reported.started,
            ended,
            output_bytes: tail.next(),
            output_tail: tail.bytes,
            stderr: self.tail.stderr(),
            usage,
        }
    }
}
