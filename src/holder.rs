//! One granted run, from the grant to its settlement: starts the command under its guard, keeps the lease renewed, ends
//! the command if the lease can no longer be trusted or somebody asks for it, and records the outcome.

mod turns;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio_util::{
    sync::CancellationToken,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};
use tracing::{debug, error, info, warn};

use self::turns::{Turn, Turns};
use crate::{
    blocking,
    clock::{Boottime, StoreClock},
    config,
    contender::{self, Contender, Granted},
    failpoint,
    guard::{HandOver, KnownEnd, Moment, Spec},
    logic::{
        attempts::{self, After},
        backoff::{Pauses, Throttle},
        claim::{DelayedAttempt, Renew, Renewal, Settle, Settlement},
        delays,
        guard_life::{self, Stop},
        hold::{Do, Hold, Pieces, Renewed, View},
        pace,
        trace::SpanContext,
    },
    model::{InstanceId, JobName, Marks, Occurrence, Outcome, RunId, RunRecord, Usage, Wait},
    runner::{Prepared, RunEnd, Runner, Running, StartError},
    settle::SettleOnDeath,
    store::{self, OUTPUT_AT_ONCE, OUTPUT_PATIENCE, Reply, Store, Tail},
    words,
};
#[cfg(feature = "notify")]
use crate::{
    notify::heartbeat::{self, Heartbeats},
    traces::{self, Traces},
};

/// Output up to this size is stored together with the outcome; more follows in pieces, so that it does not delay
/// outcomes.
const WITH_SETTLEMENT: usize = 16 << 10;
/// Pause between two attempts to settle: the first, and the longest.
const SETTLE_AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// The same if the store refuses, which somebody must fix first.
const SETTLE_REFUSED: Duration = Duration::from_secs(30);
/// Time between two warnings about one settlement.
const WARN_AGAIN: Duration = Duration::from_secs(30);
/// How long a prepared guard waits for its run.
const PREPARED_FOR: Duration = Duration::from_secs(3);
/// How long an instance that cannot start guards claims nothing before it tries one: at first, and at most.
const STANDS_BACK: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(16));
/// How long a slow start (a look-up over the network, a slow disk) may hold up others.
const START_PATIENCE: Duration = Duration::from_millis(250);

pub struct Holder {
    pub store: Arc<dyn Store>,
    pub clock: Arc<StoreClock>,
    pub runner: Runner,
    pub instance: InstanceId,
    pub host: String,
    /// For the guard, which settles if this process dies.
    pub store_config: config::Store,
    /// Cancelled: all runs are ended.
    pub kill: CancellationToken,
    /// Cancelled: this process ends, so pending settlements are given up.
    pub give_up: CancellationToken,
    pub runs: TaskTracker,
    /// The runs whose commands are alive or may still start; all others only wait for the store.
    pub commands: TaskTracker,
    turns: Arc<Turns>,
    #[cfg(feature = "notify")]
    pub(crate) heartbeats: Heartbeats,
    /// Empty: nobody wants the spans of runs.
    #[cfg(feature = "notify")]
    pub(crate) traces: std::sync::OnceLock<Arc<Traces>>,
    running: Mutex<BTreeMap<RunId, HeldRun>>,
    /// Prepared guards of runs that will most likely be granted soon.
    prepared: Mutex<BTreeMap<RunId, Prepared>>,
    /// While guards cannot be started: when to try one. Other instances may be able to start theirs.
    failing: Mutex<(Pauses, Option<Boottime>)>,
}

/// This process ends before the outcome is recorded: the guard, or a new process, must record it.
struct GivenUp;

/// How keeping the lease of a run ended.
enum KeepOutcome {
    /// Start the run: it is its turn.
    Start(Turn),
    /// The run has ended; the attempt that follows, if nothing was started and another attempt is therefore safe.
    Ended(Box<RunEnd>, Option<DelayedAttempt>),
}

struct HeldRun {
    job: JobName,
    occurrence: Occurrence,
    /// How long ending its command may take.
    end: Duration,
    /// Wakes the task that renews the lease.
    nudge: Arc<Notify>,
}

impl Holder {
    pub fn new(
        store: Arc<dyn Store>,
        clock: Arc<StoreClock>,
        runner: Runner,
        instance: InstanceId,
        host: String,
        store_config: config::Store,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            clock,
            runner,
            instance,
            host,
            store_config,
            kill: CancellationToken::new(),
            give_up: CancellationToken::new(),
            runs: TaskTracker::new(),
            commands: TaskTracker::new(),
            turns: Turns::new(pace::starting(contender::cores())),
            #[cfg(feature = "notify")]
            heartbeats: Heartbeats::default(),
            #[cfg(feature = "notify")]
            traces: std::sync::OnceLock::new(),
            running: Mutex::default(),
            prepared: Mutex::default(),
            failing: Mutex::new((Pauses::from(STANDS_BACK.0), None)),
        })
    }

    /// The runs of this process.
    pub fn running(&self) -> Vec<(JobName, Occurrence)> {
        let running = self.running.lock();
        running
            .values()
            .map(|r| (r.job.clone(), r.occurrence))
            .collect()
    }

    /// How long ending all commands of this process may take.
    pub fn longest_end(&self) -> Duration {
        let running = self.running.lock();
        running.values().map(|r| r.end).max().unwrap_or_default()
    }

    /// Somebody asked to end a run of `job`: renew its leases now, because the answer says which run it is.
    pub fn nudge(&self, job: &JobName) {
        let running = self.running.lock();
        running
            .values()
            .filter(|r| r.job == *job)
            .for_each(|r| r.nudge.notify_one());
    }

    /// Starts a guard for a run that will most likely be granted soon. If the run is not granted, the guard ends after
    /// a while without any effect.
    pub fn prepare(self: &Arc<Self>, contender: &Arc<Contender>, job: &JobName, run: RunId) {
        #[cfg(test)]
        if crate::simulation::simulated() {
            return;
        }
        let (this, contender, job) = (self.clone(), contender.clone(), job.clone());
        tokio::spawn(async move {
            let runner = this.runner.clone();
            let guard = blocking::run(move || runner.prepare(&job, run)).await;
            this.tried(&contender, guard.as_ref().err());
            if let Ok(guard) = guard {
                this.prepared().insert(run, guard);
                tokio::time::sleep(PREPARED_FOR).await;
                this.prepared().remove(&run);
            }
        });
    }

    /// Tries a guard, if this instance could start none and the pause is over.
    pub fn try_guard(self: &Arc<Self>, contender: &Arc<Contender>) {
        let again = self.failing.lock().1;
        if again.is_some_and(|at| at <= Boottime::now()) {
            self.prepare(contender, &JobName::new("any"), RunId::random());
        }
    }

    /// A guard was tried. If it did not start, this instance claims nothing until one starts, which it tries after a
    /// while.
    fn tried(&self, contender: &Contender, failed: Option<&StartError>) {
        let now = Boottime::now();
        let (pauses, again) = &mut *self.failing.lock();
        // Meanwhile, runs that were granted before may fail.
        if let Some(error) = failed.filter(|_| again.is_none_or(|at| at <= now)) {
            let pause = pauses.after_failure(STANDS_BACK.1);
            *again = Some(now + pause);
            warn!(%error, ?pause, "this instance cannot start anything, so it claims nothing and leaves that to the \
                others; it tries again after the pause");
            contender.set_halt("no_start", Some(error.to_string()));
        } else if failed.is_none() && again.take().is_some() {
            pauses.reset();
            info!("this instance can start guards again: it claims again");
            contender.set_halt("no_start", None);
        }
    }

    /// Starts the guard and tells it what to run, on none of the runtime's threads: on a busy host that takes a while,
    /// and the leases of other runs have to be renewed meanwhile.
    async fn launch(
        &self,
        spec: Spec,
        output: config::Output,
        prepared: Option<Prepared>,
    ) -> Result<Running, StartError> {
        #[cfg(test)]
        if crate::simulation::simulated() {
            return self.runner.start_prepared(spec, output, prepared);
        }
        let runner = self.runner.clone();
        blocking::run(move || runner.start_prepared(spec, output, prepared)).await
    }

    fn prepared(&self) -> MutexGuard<'_, BTreeMap<RunId, Prepared>> {
        self.prepared.lock()
    }

    /// Starts the granted run.
    pub fn start(self: &Arc<Self>, contender: Arc<Contender>, granted: Granted) {
        let this = self.clone();
        let command = self.commands.token();
        self.runs.spawn(async move {
            let (job, run) = (granted.job.name.clone(), granted.run.id);
            let nudge = Arc::new(Notify::new());
            let entry = HeldRun {
                job: job.clone(),
                occurrence: granted.run.occurrence,
                end: granted.job.grace + granted.job.lease.kill_budget,
                nudge: nudge.clone(),
            };
            this.running.lock().insert(run, entry);
            let awaited = this.hold(&contender, granted, &nudge, command).await;
            this.running.lock().remove(&run);
            if let Some(will) = this.runner.last_will() {
                will.forget(run);
            }
            contender.run_ended(&job, run, awaited);
        });
    }

    /// Handles a run from the grant to the settlement. Returns its occurrence if another attempt is to follow.
    // Long: the stages of a run one after the other, and each may be its last.
    async fn hold(
        &self,
        contender: &Contender,
        mut g: Granted,
        nudge: &Notify,
        command: TaskTrackerToken,
    ) -> Option<Occurrence> {
        failpoint::here("after_grant");
        let (job, run) = (g.job.clone(), g.run.clone());
        let start_by = (run.attempt == 1).then_some(g.start_by);
        let mut hold = Hold::new(*job.lease, &g.incarnation, g.sent, start_by, OUTPUT_AT_ONCE);
        let granted = Boottime::now();
        if let Some(reason) = g.too_late {
            warn!(job = %job.name, occurrence = %run.occurrence, reason, "the grant arrived too late to start the run");
            let end = not_started(Outcome::Missed, &in_words(reason, Wait::StoreAway));
            drop(command);
            g.slot = None;
            g.permit = None;
            g.in_will = None;
            return self.settle_unstarted(contender, &g, end, None).await;
        }
        let mut turn = match self.keep(contender, &g, &mut hold, None, nudge).await {
            KeepOutcome::Start(turn) => turn,
            KeepOutcome::Ended(end, next_attempt) => {
                drop(command);
                g.slot = None;
                g.permit = None;
                if next_attempt.is_none() {
                    g.in_will = None;
                }
                return self
                    .settle_unstarted(contender, &g, *end, next_attempt)
                    .await;
            }
        };
        if let Some(permit) = &g.permit {
            permit.waited(Boottime::now().since(granted), job.lease.trust);
        }
        let settle = self.settle_on_death(&g, |after| after.next_attempt(&job, run.attempt));
        let spec = Spec::new(
            &job,
            &run,
            self.traceparent(&g),
            hold.trusted_until(),
            settle,
        );
        let prepared = self.prepared().remove(&g.run.id);
        let started = self.launch(spec, job.output, prepared).await;
        self.tried(contender, started.as_ref().err());
        g.in_will = None;
        turn.launched();
        let mut running = match started {
            Ok(running) => running,
            Err(e) => {
                error!(job = %job.name, occurrence = %run.occurrence, error = %e, "cannot start the command");
                let end = not_started(Outcome::Failed, &e.to_string());
                drop(command);
                g.slot = None;
                g.permit = None;
                let next_attempt = After::Failure.next_attempt(&job, run.attempt);
                return self
                    .settle_unstarted(contender, &g, end, next_attempt)
                    .await;
            }
        };
        info!(job = %job.name, occurrence = %run.occurrence, run = %g.run.id, attempt = run.attempt,
            trigger = run.trigger.as_str(), "started");
        #[cfg(feature = "notify")]
        self.heartbeats.send(
            &job.name,
            job.alarms.heartbeat.as_ref(),
            heartbeat::Moment::Starts,
        );
        let mut watch = running.watch();
        let permit = g.permit.take();
        tokio::spawn(async move {
            let _ = tokio::time::timeout(START_PATIENCE, watch.started()).await;
            drop((turn, permit));
        });
        let mut shown = 0;
        let end = loop {
            let running = Some((&mut running, &mut shown));
            if let KeepOutcome::Ended(end, _) =
                self.keep(contender, &g, &mut hold, running, nudge).await
            {
                break end;
            }
        };
        failpoint::here("before_settle");
        let next_attempt = After::of(end.outcome, end.cause, end.started.is_some())
            .next_attempt(&job, run.attempt);
        // No process of the run is left; recording the outcome may take as long as the store does not answer.
        drop(command);
        g.slot = None;
        match self.settle(contender, &g, &end, next_attempt).await {
            Ok(awaited) => {
                running.settled().await;
                if is_apart(&end) {
                    self.hand_in(&g, *end, shown);
                }
                awaited
            }
            Err(GivenUp) => {
                error!(job = %job.name, run = %g.run.id, outcome = %end.outcome,
                    "stopping before the outcome is recorded: the run's guard keeps trying");
                // Dropping `running` without a message makes the guard settle, as if this process had died.
                None
            }
        }
    }

    /// Stores the output of a settled run from byte `from` on, piece by piece, for at most [`OUTPUT_PATIENCE`].
    fn hand_in(&self, g: &Granted, end: RunEnd, from: u64) {
        let (store, give_up) = (self.store.clone(), self.give_up.clone());
        let (job, run, keep) = (g.job.name.clone(), g.run.id, g.job.output.keep);
        let until = Boottime::now() + OUTPUT_PATIENCE;
        self.runs.spawn(async move {
            let mut rest = kept_from(&end, from);
            let mut pieces = Pieces::new(OUTPUT_AT_ONCE);
            let mut pauses = Pauses::from(SETTLE_AGAIN.0);
            let mut error = None;
            while !rest.is_empty() {
                let left = rest.len();
                if Boottime::now() >= until {
                    warn!(%job, %run, left, error, "cannot store the end of the output within {OUTPUT_PATIENCE:?}: \
                    giving it up");
                    return;
                }
                let at = end.output_bytes.saturating_sub(left as u64);
                let (piece, after) = rest.split_at(pieces.most().min(left));
                let told = tokio::select! {
                    biased;
                    told = store.append_output(&job, run, at, piece, keep, &end.stderr) => told,
                    () = give_up.cancelled() => return,
                };
                pieces.handed_in(told.is_ok());
                error = match told {
                    Ok(()) => {
                        rest = after;
                        pauses.reset();
                        continue;
                    }
                    Err(e) => Some(e.to_string()),
                };
                tokio::select! {
                    () = tokio::time::sleep(pauses.after_failure(SETTLE_AGAIN.1)) => {}
                    () = give_up.cancelled() => return,
                }
            }
        });
    }

    /// Like [`Holder::settle`], for a run without a guard that could continue after this process ends.
    async fn settle_unstarted(
        &self,
        contender: &Contender,
        g: &Granted,
        end: RunEnd,
        next_attempt: Option<DelayedAttempt>,
    ) -> Option<Occurrence> {
        match self.settle(contender, g, &end, next_attempt).await {
            Ok(awaited) => awaited,
            Err(GivenUp) => {
                let usage = used(&end);
                let end = KnownEnd {
                    outcome: end.outcome,
                    cause: end.cause,
                    exit_code: end.exit_code,
                    signal: end.signal,
                    error: end.error,
                    started: end.started,
                    ended: end.ended,
                    usage,
                };
                let outcome = end.outcome;
                let settle = self.settle_on_death(g, |_| next_attempt);
                match self.runner.hand_over(&HandOver { settle, end }) {
                    Ok(()) => error!(job = %g.job.name, run = %g.run.id, %outcome,
                        "stopping before the outcome is recorded: a background process keeps trying"),
                    Err(e) => error!(job = %g.job.name, run = %g.run.id, %outcome, error = %e,
                        "stopping before the outcome is recorded, and cannot start a process that would keep trying"),
                }
                None
            }
        }
    }

    /// The instructions with which the guard settles if this process dies.
    fn settle_on_death(
        &self,
        g: &Granted,
        next_attempt: impl Fn(After) -> Option<DelayedAttempt>,
    ) -> serde_json::Value {
        let settle = SettleOnDeath {
            store: self.store_config.clone(),
            record: self.record(g, None),
            on_crash: next_attempt(After::Crash),
            on_failure: next_attempt(After::Failure),
            on_no_start: next_attempt(After::NoStart),
            offset_us: self.clock.offset_us().unwrap_or(0),
            patience: g.job.lease.length,
            #[cfg(feature = "notify")]
            traces: self.traces.get().map(|traces| traces::OnDeath {
                settings: traces.settings.clone(),
                place: self.place(g).to_owned(),
                key: g.run.key.clone(),
            }),
        };
        serde_json::to_value(&settle).unwrap_or_default()
    }

    /// What tells the store of this fleet from those of others, in traces: of a file the id of its data, because many
    /// hosts have one at the same path; otherwise the address, which outlives the data.
    fn place<'a>(&'a self, g: &'a Granted) -> &'a str {
        match self.store.durable() {
            true => &g.incarnation,
            false => self.store.address(),
        }
    }

    /// The place of the run's span, for its command.
    fn traceparent(&self, g: &Granted) -> String {
        let (job, run) = (&g.job.name, &g.run);
        let (namespace, place) = (&self.store_config.namespace, self.place(g));
        let context = SpanContext::of(namespace, place, job, run.occurrence, run.attempt);
        #[cfg(feature = "notify")]
        let recorded = self.traces.get().is_some();
        #[cfg(not(feature = "notify"))]
        let recorded = false;
        context.traceparent(recorded)
    }

    /// Hands in the span of a run whose outcome is recorded, if somebody wants it.
    #[cfg(feature = "notify")]
    fn trace(&self, g: &Granted, record: RunRecord) {
        let Some(traces) = self.traces.get() else {
            return;
        };
        let place = (&*self.store_config.namespace, self.place(g));
        traces.send(traces::Span::new(place, record, g.run.key.clone()));
    }

    /// Keeps the lease renewed until the run may start, or, if it is `running`, until its whole process tree is gone.
    // Long: it carries out every decision of `Hold`, and what is under way meanwhile (a renewal, output) is local.
    async fn keep(
        &self,
        contender: &Contender,
        g: &Granted,
        hold: &mut Hold,
        mut running: Option<(&mut Running, &mut u64)>,
        nudge: &Notify,
    ) -> KeepOutcome {
        let job = &g.job;
        let mut turn = None;
        let mut in_turn = running
            .is_none()
            .then(|| self.turns.ask(g.run.occurrence, hold.trusted_until()));
        let mut renewal = None;
        let mut showing = None;
        loop {
            let killed = self.kill.is_cancelled();
            let next = hold.next(View {
                now: Boottime::now(),
                store_ms: self.clock.now_ms(),
                turn: turn.is_some(),
                killed,
            });
            let wake = match next {
                Do::Wait(at) => at,
                Do::Renew(seq) => {
                    let (ask, store) = (self.renewal(g, seq, hold), self.store.clone());
                    renewal = Some(Box::pin(async move { store.renew(&ask).await }));
                    continue;
                }
                Do::Start => match turn.take() {
                    Some(turn) => return KeepOutcome::Start(turn),
                    None => continue,
                },
                Do::Abandon {
                    outcome,
                    why,
                    another_attempt,
                } => {
                    let why = match outcome {
                        Outcome::Missed => in_words(why, Wait::Host),
                        _ => why.to_owned(),
                    };
                    info!(job = %job.name, occurrence = %g.run.occurrence, %outcome, why, "granted, but not started");
                    let next_attempt = another_attempt
                        .then(|| attempts::after_no_start(g.run.attempt))
                        .flatten();
                    return KeepOutcome::Ended(Box::new(not_started(outcome, &why)), next_attempt);
                }
                Do::Stop(stop, grace) => {
                    match stop {
                        Stop::LeaseLost => warn!(job = %job.name, run = %g.run.id,
                            "the lease could not be renewed in time: ending the run"),
                        stop => {
                            info!(job = %job.name, run = %g.run.id, ?stop, "ending the run on request")
                        }
                    }
                    if let Some((running, _)) = &running {
                        running.stop(stop, grace);
                    }
                    if !hold.awaits_renewal() {
                        renewal = None;
                    }
                    continue;
                }
                Do::Show(most) => {
                    let piece = running.as_ref().map(|(r, shown)| {
                        let output = r.output();
                        // In this order, so that the marks reach to the end of the piece.
                        (output.piece(**shown, most), output.stderr())
                    });
                    match piece.filter(|(piece, _)| !piece.bytes.is_empty()) {
                        Some((piece, stderr)) => {
                            let (store, name, run, keep) = (
                                self.store.clone(),
                                job.name.clone(),
                                g.run.id,
                                job.output.keep,
                            );
                            showing = Some(Box::pin(async move {
                                let (at, bytes) = (piece.offset, &piece.bytes);
                                let told =
                                    store.append_output(&name, run, at, bytes, keep, &stderr);
                                let told = told.await;
                                told.is_ok().then(|| (piece.next(), piece.bytes.len()))
                            }));
                        }
                        None => hold.nothing_to_show(),
                    }
                    continue;
                }
            };
            // A suspend stops the runtime's timers, so check the real clock often.
            let wait = wake.since(Boottime::now());
            let wait = wait.clamp(Duration::from_millis(1), Duration::from_secs(1));
            tokio::select! {
                end = async { match &mut running { Some((r, _)) => r.wait().await, None => std::future::pending().await } } => {
                    return KeepOutcome::Ended(Box::new(end), None);
                }
                reply = async { match renewal.as_mut() { Some(r) => r.await, None => std::future::pending().await } } => {
                    renewal = None;
                    contender.health.figures.renewed(reply.as_ref().ok().map(|r| &r.value));
                    self.renewed(g, hold, reply, running.as_ref().map(|(r, _)| &**r));
                }
                told = async { match showing.as_mut() { Some(s) => s.await, None => std::future::pending().await } } => {
                    showing = None;
                    if let (Some((_, shown)), Some((next, _))) = (&mut running, told) {
                        **shown = next;
                    }
                    hold.shown(told.map(|(_, length)| length), Boottime::now());
                }
                got = async { match in_turn.as_mut() { Some(t) => t.await, None => std::future::pending().await } } => {
                    in_turn = None;
                    turn = got.ok();
                }
                () = nudge.notified() => hold.nudged(),
                () = self.kill.cancelled(), if !killed => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Handles the store's answer to a renewal.
    fn renewed(
        &self,
        g: &Granted,
        hold: &mut Hold,
        reply: Result<Reply<Renewal>, store::Error>,
        running: Option<&Running>,
    ) {
        let now = Boottime::now();
        let follows = match reply {
            Ok(reply) => {
                crate::contender::note_clock(&self.clock, &reply);
                hold.renewed(Some((reply.value, &reply.incarnation)), reply.sent, now)
            }
            Err(e) => {
                match running {
                    Some(_) => {
                        warn!(job = %g.job.name, run = %g.run.id, error = %e, "cannot renew the lease; retrying")
                    }
                    None => debug!(job = %g.job.name, run = %g.run.id, error = %e,
                        "cannot renew the lease of a run that has not started yet; retrying"),
                }
                hold.renewed(None, now, now)
            }
        };
        match (follows, running) {
            (Renewed::Extended(until), Some(running)) => running.extend(until),
            (Renewed::Lost(stop, grace), Some(running)) => {
                warn!(job = %g.job.name, run = %g.run.id, "another instance has the lease: ending the run");
                running.stop(stop, grace);
            }
            (Renewed::Nothing, _) | (_, None) => {}
        }
    }

    fn renewal(&self, g: &Granted, seq: u32, hold: &Hold) -> Renew {
        Renew {
            job: g.job.name.clone(),
            run: g.run.clone(),
            seq,
            late: Boottime::now() >= hold.trusted_until(),
            reclaim: hold.reclaim(),
        }
    }

    fn record(&self, g: &Granted, end: Option<&RunEnd>) -> RunRecord {
        let ms = |m: &Moment| self.clock.at(m.boottime).unwrap_or(m.wall_us) / 1000;
        let started = end.and_then(|e| e.started.as_ref()).map(ms);
        let finished = end.map(|e| ms(&e.ended));
        let record = RunRecord::of(&g.job.name, &g.run).lasting(started, finished);
        RunRecord {
            outcome: end.map_or(Outcome::Running, |e| e.outcome),
            exit_code: end.and_then(|e| e.exit_code),
            signal: end.and_then(|e| e.signal),
            output_truncated: end.is_some_and(RunEnd::output_truncated),
            error: end.and_then(|e| e.error.clone().or_else(|| guard_life::reason(e.cause))),
            usage: end.map(used).unwrap_or_default(),
            waited: end
                .and_then(|e| e.started.as_ref())
                .filter(|_| delays::need_a_reason(g.run.attempt, g.run.trigger, record.lateness_ms))
                .and_then(|started| {
                    let mut waits = g.waits;
                    waits.add(Wait::Host, started.boottime.since(g.won));
                    let (wait, time) = waits.longest()?;
                    Some((wait, time.as_millis() as u64))
                }),
            ..record
        }
    }

    /// Records the outcome, and retries until the store has it or this process must end. Returns what [`Holder::hold`]
    /// does.
    async fn settle(
        &self,
        contender: &Contender,
        g: &Granted,
        end: &RunEnd,
        next_attempt: Option<DelayedAttempt>,
    ) -> Result<Option<Occurrence>, GivenUp> {
        contender.run_over(&g.job.name, g.run.id);
        let record = self.record(g, Some(end));
        log_end(&record);
        contender.health.figures.ended(&record);
        let follows = next_attempt.is_some();
        // How the occurrence ends the last attempt says.
        #[cfg(feature = "notify")]
        if !follows {
            self.heartbeats.send(
                &g.job.name,
                g.job.alarms.heartbeat.as_ref(),
                heartbeat::Moment::Ends(&record),
            );
        }
        let settle = Settle {
            run: g.run.id,
            record,
            next_attempt,
        };
        let told = self.offer(g, &settle, &with_settlement(end)).await?;
        let lost = told == Settlement::Lost;
        #[cfg(feature = "notify")]
        self.trace(g, settle.record);
        if lost {
            warn!(job = %g.job.name, run = %g.run.id, "the outcome was recorded after the lease was lost");
        }
        Ok((follows && !lost).then_some(g.run.occurrence))
    }

    /// Tells the store the outcome until it has it, or this process must end.
    async fn offer(
        &self,
        g: &Granted,
        settle: &Settle,
        tail: &Tail,
    ) -> Result<Settlement, GivenUp> {
        let mut pauses = Pauses::from(SETTLE_AGAIN.0);
        let (mut warned, mut first) = (Throttle::default(), true);
        loop {
            let told = tokio::select! {
                biased;
                told = self.store.settle(settle, tail) => told,
                () = self.give_up.cancelled() => return Err(GivenUp),
            };
            let most = match told {
                Ok(reply) => {
                    crate::contender::note_clock(&self.clock, &reply);
                    return Ok(reply.value);
                }
                Err(e) => {
                    // The server may close a connection just as a request goes over it.
                    let passing = std::mem::take(&mut first) && e.is_transient();
                    if !passing && warned.lets(Boottime::now(), WARN_AGAIN) {
                        warn!(job = %g.job.name, run = %g.run.id, error = %e, "cannot record the outcome; retrying");
                    }
                    if e.is_transient() {
                        SETTLE_AGAIN.1
                    } else {
                        SETTLE_REFUSED
                    }
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pauses.after_failure(most)) => {}
                () = self.give_up.cancelled() => return Err(GivenUp),
            }
        }
    }
}

/// The log need not warn of it.
fn is_as_wished(outcome: Outcome) -> bool {
    matches!(
        outcome,
        Outcome::Succeeded | Outcome::Cancelled | Outcome::Replaced
    )
}

fn log_end(r: &RunRecord) {
    let (job, occurrence, outcome) = (&r.job, &r.occurrence, r.outcome);
    let duration_ms = r.duration_ms.unwrap_or(0);
    let error = r.error.as_deref();
    if is_as_wished(outcome) {
        info!(%job, %occurrence, %outcome, duration_ms, error, "ended");
    } else {
        let (exit_code, signal) = (r.exit_code, r.signal);
        warn!(%job, %occurrence, %outcome, exit_code, signal, duration_ms, error, "ended");
    }
    if let Some(left) = r.usage.left_processes {
        warn!(%job, %occurrence, "{}", words::left_behind(left));
    }
    debug!(record = ?r, "settling");
}

/// The output is stored after the outcome, and not with it.
fn is_apart(end: &RunEnd) -> bool {
    end.output_tail.len() > WITH_SETTLEMENT
}

/// What is stored of the output together with the outcome.
fn with_settlement(end: &RunEnd) -> Tail {
    let kept = end.output_tail.len() as u64;
    let (data, more) = match is_apart(end) {
        true => (vec![], kept),
        false => (end.output_tail.clone(), 0),
    };
    Tail {
        before: end.output_bytes - kept,
        data,
        more,
        stderr: end.stderr.clone(),
    }
}

/// The kept output from byte `from` on, counted from the first byte of the output.
fn kept_from(end: &RunEnd, from: u64) -> &[u8] {
    let left = usize::try_from(end.output_bytes.saturating_sub(from)).unwrap_or(usize::MAX);
    let skip = end.output_tail.len().saturating_sub(left);
    end.output_tail.get(skip..).unwrap_or_default()
}

fn used(end: &RunEnd) -> Usage {
    Usage {
        output_bytes: end.started.is_some().then_some(end.output_bytes),
        ..end.usage
    }
}

/// Why a granted run was not started in time.
fn in_words(what: &str, wait: Wait) -> String {
    format!("{what}: {}", wait.cause())
}

fn not_started(outcome: Outcome, error: &str) -> RunEnd {
    RunEnd {
        outcome,
        exit_code: None,
        signal: None,
        cause: None,
        error: Some(error.to_owned()),
        errno: None,
        started: None,
        ended: Moment::now(),
        output_tail: vec![],
        output_bytes: 0,
        stderr: Marks::default(),
        usage: Usage::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_output_is_stored_with_the_outcome_and_much_after_it() {
        let mut end = not_started(Outcome::Failed, "why");
        for (kept, apart) in [
            (0, false),
            (WITH_SETTLEMENT, false),
            (WITH_SETTLEMENT + 1, true),
        ] {
            end.output_tail = vec![b'a'; kept];
            end.output_bytes = 5 + kept as u64;
            let tail = with_settlement(&end);
            let (with, more) = if apart { (0, kept) } else { (kept, 0) };
            assert_eq!((tail.data.len(), tail.more), (with, more as u64));
            assert_eq!((tail.before, is_apart(&end)), (5, apart));
        }
    }

    #[test]
    fn the_rest_of_the_output_is_what_was_kept_and_not_shown() {
        let mut end = not_started(Outcome::Failed, "why");
        (end.output_tail, end.output_bytes) = (b"cdefg".to_vec(), 7);
        for (from, rest) in [(0, "cdefg"), (2, "cdefg"), (4, "efg"), (7, ""), (9, "")] {
            assert_eq!(kept_from(&end, from), rest.as_bytes(), "{from}");
        }
    }

    #[test]
    fn the_log_warns_of_what_nobody_wished() {
        for (outcome, wished) in [
            (Outcome::Succeeded, true),
            (Outcome::Cancelled, true),
            (Outcome::Replaced, true),
            (Outcome::Failed, false),
            (Outcome::Missed, false),
            (Outcome::LeaseLost, false),
        ] {
            assert_eq!(is_as_wished(outcome), wished, "{outcome}");
        }
    }

    #[test]
    fn the_end_of_a_run_is_logged() {
        use std::io::{Read, Seek};
        let mut file = tempfile::tempfile().expect("a file");
        let log = Arc::new(file.try_clone().expect("the same file"));
        let log = tracing_subscriber::fmt().with_writer(log).with_ansi(false);
        let (job, trigger) = (JobName::new("work"), crate::model::Trigger::Schedule);
        tracing::subscriber::with_default(log.finish(), || {
            for outcome in [Outcome::Succeeded, Outcome::Failed] {
                let record = RunRecord::without_run(&job, Occurrence(1), trigger, outcome);
                log_end(&record);
            }
        });
        let mut text = String::new();
        file.rewind().expect("a file");
        file.read_to_string(&mut text).expect("a text");
        let levels: Vec<_> = text.lines().map(|l| l.split_whitespace().nth(1)).collect();
        assert_eq!(levels, [Some("INFO"), Some("WARN")], "{text}");
        assert!(text.lines().all(|l| l.contains("ended job=work")), "{text}");
    }

    #[test]
    fn a_run_has_output_if_its_command_was_started() {
        let mut end = not_started(Outcome::Missed, "why");
        assert_eq!(
            (end.outcome, end.error.as_deref()),
            (Outcome::Missed, Some("why"))
        );
        assert_eq!(used(&end).output_bytes, None);
        assert!(!end.output_truncated());
        (end.started, end.output_bytes) = (Some(Moment::now()), 7);
        end.usage.cpu_ms = Some(3);
        assert_eq!(
            (used(&end).output_bytes, used(&end).cpu_ms),
            (Some(7), Some(3))
        );
        // What was not kept is missing.
        for (kept, truncated) in [(6, true), (7, false)] {
            end.output_tail = vec![b'a'; kept];
            assert_eq!(end.output_truncated(), truncated);
            assert_eq!(end.output_text().len(), kept);
        }
    }
}
