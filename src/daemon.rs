//! `soloist run`: wires the parts; start order, stop order.
//!
//! One task owns each mutable thing: the dispatcher the timetable, the fleet task the epoch, the contender the contests,
//! a holder task each run.

mod dispatch;
mod fleet;
mod journal;
mod reload;
mod signals;

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context;
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info, warn};

use self::{
    dispatch::Dispatcher,
    fleet::FleetTask,
    signals::{SignalRequest, Signals},
};
use crate::{
    clock::StoreClock,
    config::{self, Config},
    contender::{Contender, Parts},
    early,
    holder::Holder,
    logic::claim::Event,
    model::{InstanceId, JobName},
    runner::{self, Runner},
    store::{self, Store},
};

/// What `soloist run` was told.
#[derive(Debug)]
pub(crate) struct Options {
    /// Read again on SIGHUP.
    pub config_path: PathBuf,
    pub config: Config,
    /// None: host name and a random suffix.
    pub instance: Option<String>,
}

/// How long the store gets to hear all that is left to say, the last outcomes and the farewell, when no command runs any
/// more. What it has not heard by then, the guards go on telling it.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long the runs may take to be handed over to their guards: nothing but this host has a part in that.
const HAND_OVER: Duration = Duration::from_secs(1);

/// What a daemon and its guard leave behind that are killed at once lives no longer than this, if another daemon lives
/// beside them.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

async fn sweep() {
    if let Ok(runs @ 1..) = tokio::task::spawn_blocking(Runner::sweep).await {
        warn!(
            runs,
            "ended what another soloist on this host had left behind"
        );
    }
}

/// Runs until a signal ends it. SIGTERM and SIGINT drain: what runs goes on, nothing new begins; the second one ends
/// what runs. SIGHUP reads the configuration again.
///
/// # Errors
/// The store cannot be opened at all, or the process lacks what it needs. A store that is away is no error.
pub(crate) async fn run(o: Options) -> anyhow::Result<()> {
    // Before anything else, so that a signal during the start is not lost.
    let mut signals = Signals::new().context("cannot handle signals")?;
    early::release();
    let mut daemon = Daemon::start(o).await?;
    notify(&[sd_notify::NotifyState::Ready]);
    let signal = daemon.serve(&mut signals).await;
    info!(
        signal,
        running = daemon.holder.running().len(),
        "stopping: nothing new is begun, what runs goes on"
    );
    notify(&[sd_notify::NotifyState::Stopping]);
    daemon.drain(&mut signals).await;
    daemon.leave().await;
    info!("stopped");
    Ok(())
}

/// The parts of a running daemon.
struct Daemon {
    config_path: PathBuf,
    config: Config,
    contender: Arc<Contender>,
    holder: Arc<Holder>,
    /// Tells the fleet task of a configuration that was read again.
    config_seen: watch::Sender<fleet::Loaded>,
    /// Nothing new is begun any more.
    stop: CancellationToken,
    /// No command runs any more: the rest is to end, too.
    finish: CancellationToken,
    contests: TaskTracker,
    background: TaskTracker,
}

impl Daemon {
    async fn start(o: Options) -> anyhow::Result<Self> {
        let host = host_name();
        let instance = InstanceId::new(
            &o.instance
                .unwrap_or_else(|| format!("{host}-{:04x}", fastrand::u16(..))),
        );
        let config = o.config;
        let store = store::open(&config.store)?;
        warn_of_open_file(&config.store.url);
        let clock = Arc::new(StoreClock::default());
        store.believe(clock.clone());
        let runner = Runner::new().context("cannot become the subreaper of the commands")?;
        let runner = runner.hiding(config.store_variables.clone());
        sweep().await;

        let (stop, finish) = (CancellationToken::new(), CancellationToken::new());
        let (contests, background) = (TaskTracker::new(), TaskTracker::new());
        let (decisions, journal) = mpsc::channel(20_000);
        let (plans, planned) = mpsc::unbounded_channel();
        let holder = Holder::new(
            store.clone(),
            clock.clone(),
            runner,
            instance.clone(),
            host.clone(),
            config.store.clone(),
        );
        info!(%instance, store = store.address(), jobs = config.jobs.len(), config = config.digest, "soloist {}", env!("CARGO_PKG_VERSION"));
        let parts = Parts {
            store: store.clone(),
            clock: clock.clone(),
            instance,
            host,
            retry: config.store.retry.clone(),
            max_parallel: config.limits.max_parallel,
            journal: decisions,
            plans,
            stop: stop.clone(),
            tasks: contests.clone(),
        };
        let contender = tie(parts, &holder);
        for job in config.jobs.values() {
            contender.set_job(job.clone());
        }
        let fleet = FleetTask::new(contender.clone(), holder.clone(), &config, finish.clone());
        let config_seen = fleet.config_sender();
        let prepare = {
            let holder = holder.clone();
            Box::new(move |job: &JobName, run| holder.prepare(job, run))
        };
        let dispatcher = Dispatcher::new(contender.clone(), clock, planned, prepare, stop.clone())?;
        background.spawn(fleet.run());
        background.spawn(journal::run(store.clone(), journal, finish.clone()));
        background.spawn(contender.clone().watch());
        background.spawn(sweep_now_and_then(finish.clone()));
        background.spawn(reap_strangers(finish.clone()));
        background.spawn(listen(
            store,
            contender.clone(),
            holder.clone(),
            finish.clone(),
        ));
        background.spawn(dispatcher.run());
        Ok(Self {
            config_path: o.config_path,
            config,
            contender,
            holder,
            config_seen,
            stop,
            finish,
            contests,
            background,
        })
    }

    /// Until it is asked to stop. Returns the signal.
    async fn serve(&mut self, signals: &mut Signals) -> &'static str {
        loop {
            match signals.next().await {
                SignalRequest::Stop(name) => return name,
                SignalRequest::Reload => {
                    if let Some(loaded) = reload::load(&self.config_path, signals).await {
                        reload::put_in_force(
                            loaded,
                            &mut self.config,
                            &self.contender,
                            &self.config_seen,
                        );
                    }
                }
            }
        }
    }

    /// Lets what runs end by itself, for as long as it may; then ends it.
    async fn drain(&self, signals: &mut Signals) {
        let holder = &self.holder;
        self.stop.cancel();
        self.contests.close();
        holder.runs.close();
        holder.commands.close();
        self.background.close();
        // A claim that the store has not answered yet may be answered with a grant.
        let all = async {
            self.contests.wait().await;
            holder.runs.wait().await;
        };
        let drain = self.config.limits.drain;
        tokio::select! {
            () = all => return,
            () = tokio::time::sleep(drain) => {
                warn!(?drain, running = holder.running().len(), "runs still active after the drain, ending them");
            }
            name = signals.second_stop() => {
                warn!(signal = name, running = holder.running().len(), "asked again, ending what runs");
            }
        }
        holder.kill.cancel();
        // Each command ends within its grace.
        let _ = tokio::time::timeout(holder.longest_end(), holder.commands.wait()).await;
    }

    /// Tells the store what is left to be told, and leaves the rest to the guards.
    async fn leave(&self) {
        let holder = &self.holder;
        // One deadline for all goodbyes. The outcomes go first; a store that does not answer soon hears all at once.
        let until = tokio::time::Instant::now() + LAST_WORDS;
        let _ = tokio::time::timeout(LAST_WORDS / 2, holder.runs.wait()).await;
        self.finish.cancel();
        let all = async { tokio::join!(holder.runs.wait(), self.background.wait()) };
        if tokio::time::timeout_at(until, all).await.is_err() {
            warn!("the store does not answer: this instance ends without saying so there");
        }
        let unrecorded = holder.running().len();
        if unrecorded > 0 {
            error!(
                running = unrecorded,
                "some outcomes could not be recorded: their guards go on trying"
            );
        }
        holder.give_up.cancel();
        // Only to let the guards go, or take over. One that is not told sees our end.
        let _ = tokio::time::timeout(HAND_OVER, holder.runs.wait()).await;
    }
}

/// The holder reports ended runs to the contender, which hands it the leases.
fn tie(parts: Parts, holder: &Arc<Holder>) -> Arc<Contender> {
    Arc::new_cyclic(|weak: &std::sync::Weak<Contender>| {
        let (holder, weak) = (holder.clone(), weak.clone());
        Contender::build(
            parts,
            Box::new(move |granted| {
                if let Some(contender) = weak.upgrade() {
                    holder.start(contender, granted);
                }
            }),
        )
    })
}

async fn sweep_now_and_then(finish: CancellationToken) {
    let pause = || finish.run_until_cancelled(tokio::time::sleep(SWEEP_EVERY));
    while pause().await.is_some() {
        sweep().await;
    }
}

async fn reap_strangers(finish: CancellationToken) {
    let reaping = finish.run_until_cancelled(runner::reap_strangers()).await;
    if let Some(Err(error)) = reaping {
        warn!(%error, "zombies of others will stay until this process ends");
    }
}

/// The store's file may have been made by an older version, or to be shared: it is not ours to decide.
fn warn_of_open_file(url: &config::StoreUrl) {
    if let config::StoreUrl::Sqlite(path) = url
        && let Some(mode) = store::sqlite::open_to_others(path)
    {
        let file = path.display();
        warn!(
            "other users may open {file} (mode {mode:03o}): they can read the outputs of jobs, and keep all jobs from starting; \
             unless that is meant, chmod 600 {file}*"
        );
    }
}

/// Takes the fleet's hints to whom they concern.
async fn listen(
    store: Arc<dyn Store>,
    contender: Arc<Contender>,
    holder: Arc<Holder>,
    finish: CancellationToken,
) {
    use tokio::sync::broadcast::error::RecvError;
    let mut events = store.events();
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = finish.cancelled() => return,
        };
        match event {
            Ok(Event::Stop { job }) => holder.nudge(&job),
            Ok(event) => contender.on_event(&event),
            Err(RecvError::Lagged(n)) => {
                warn!(
                    lost = n,
                    "too many hints at once; looking at all jobs again"
                );
                contender.resync();
            }
            Err(RecvError::Closed) => return,
        }
    }
}

/// To systemd, if it listens.
fn notify(state: &[sd_notify::NotifyState<'_>]) {
    let _ = sd_notify::notify(state);
}

fn host_name() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    if name.is_empty() {
        "host".to_owned()
    } else {
        name
    }
}
