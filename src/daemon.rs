//! `soloist run`: connects the parts, and starts and stops them in order.
//!
//! One task owns each mutable part: the dispatcher owns the timetable, the fleet task the epoch, the contender the
//! contests, and a holder task each run.

mod dispatch;
mod fleet;
mod found;
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
#[cfg(feature = "http")]
use crate::http;
#[cfg(test)]
use crate::last_will::Claimed;
use crate::{
    blocking,
    clock::StoreClock,
    config::{self, Config},
    contender::{Contender, Parts},
    holder::Holder,
    last_will::{Destination, LastWill},
    logic::claim::Event,
    model::{InstanceId, JobName},
    runner::{self, Runner},
    startup,
    store::{self, Store},
};
#[cfg(feature = "notify")]
use crate::{notify as notifications, traces};

pub(crate) use self::found::NotNew;

/// The arguments of `soloist run`.
#[derive(Debug)]
pub(crate) struct Options {
    /// Read again on SIGHUP.
    pub config_path: PathBuf,
    pub config: Config,
    /// None: host name and a random suffix.
    pub instance: Option<String>,
    /// Somebody says that nothing of this fleet runs anywhere else: see `daemon/found.rs`.
    pub new_fleet: bool,
}

/// How long this process tries to record the last outcomes and to sign off once no command runs any more. Then the
/// guards keep trying to record the outcomes.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long handing runs over to their guards may take: it involves only this host.
const HAND_OVER: Duration = Duration::from_secs(1);

/// How long sending the last traces may take.
#[cfg(feature = "notify")]
const LAST_TRACES: Duration = Duration::from_secs(2);

/// How often this process ends runs whose daemon and guard were killed together, on the same host.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// How often it is looked whether the zygote lives.
const ZYGOTE_EVERY: Duration = Duration::from_secs(1);

/// Ends runs by one of [`Runner`]'s ways to find those of dead daemons.
async fn sweep(finding: fn() -> usize) {
    let runs = blocking::run(finding).await;
    if runs > 0 {
        warn!(
            runs,
            "this instance ended runs that a dead soloist process left behind on this host"
        );
    }
}

/// Runs until a signal ends it. SIGTERM and SIGINT drain: nothing more is claimed, and what is granted runs; a second
/// signal ends the active runs. SIGHUP reloads the configuration.
///
/// # Errors
/// The store cannot be opened, or the process lacks something that it needs. A store that does not answer is not an
/// error.
pub(crate) async fn run(o: Options) -> anyhow::Result<()> {
    // First, so that a signal during the start is not lost.
    let mut signals = Signals::new().context("cannot handle signals")?;
    startup::release();
    let Some(mut daemon) = begin(o, &mut signals).await? else {
        info!("stopped");
        return Ok(());
    };
    notify(&[sd_notify::NotifyState::Ready]);
    let signal = daemon.serve(&mut signals).await;
    info!(
        signal,
        running = daemon.holder.running().len(),
        "stopping: this instance claims nothing more, and finishes what it was granted"
    );
    notify(&[sd_notify::NotifyState::Stopping]);
    daemon.drain(&mut signals).await;
    daemon.leave().await;
    info!("stopped");
    Ok(())
}

/// Starts a daemon. None: a signal asked to stop first.
async fn begin(o: Options, signals: &mut Signals) -> anyhow::Result<Option<Daemon>> {
    let mut starting = std::pin::pin!(Daemon::start(o));
    let mut reload = false;
    let daemon = loop {
        tokio::select! {
            started = &mut starting => break started?,
            asked = signals.next() => match asked {
                SignalRequest::Reload => reload = true,
                SignalRequest::Stop(signal) => {
                    info!(signal, "stopping: nothing has been started yet");
                    return Ok(None);
                }
            },
        }
    };
    if reload {
        signals.asked = Some(SignalRequest::Reload);
    }
    Ok(Some(daemon))
}

/// Opens the store.
fn open(config: &Config) -> anyhow::Result<Arc<dyn Store>> {
    check_place(&config.store.url)?;
    let store = store::open(&config.store)?;
    warn_of_open_file(&config.store.url);
    Ok(store)
}

/// The parts of a running daemon.
pub(crate) struct Daemon {
    config_path: PathBuf,
    config: Config,
    contender: Arc<Contender>,
    holder: Arc<Holder>,
    /// Tells the fleet task about a reloaded configuration.
    config_seen: watch::Sender<fleet::Loaded>,
    /// Cancelled: nothing new starts.
    stop: CancellationToken,
    /// Cancelled: no command runs any more, and the other tasks end too.
    finish: CancellationToken,
    contests: TaskTracker,
    background: TaskTracker,
    /// Shows the notifier the configuration that is in force. None: there were no channels yet.
    #[cfg(feature = "notify")]
    notifier: Option<watch::Sender<Arc<Config>>>,
    /// Shows HTTP the configuration that is in force.
    #[cfg(feature = "http")]
    config_shown: watch::Sender<Arc<Config>>,
}

impl Daemon {
    async fn start(o: Options) -> anyhow::Result<Self> {
        let host = crate::store::host();
        let instance = InstanceId::new(
            &o.instance
                .unwrap_or_else(|| format!("{host}-{:04x}", fastrand::u16(..))),
        );
        // In a thread that may be left behind: another process may have locked the file, or its disk may hang.
        let opening =
            tokio::task::spawn_blocking(move || open(&o.config).map(|store| (store, o.config)));
        let (store, config) = opening.await.context("cannot open the store")??;
        if o.new_fleet {
            found::found(&*store).await?;
        }
        let runner = Runner::new().context("cannot become the subreaper of the jobs' commands")?;
        startup::outlive_the_limit_on_files();
        let destination = Destination {
            store: config.store.clone(),
        };
        let last_will = LastWill::new(&destination);
        if let Err(error) = &last_will {
            warn!(%error, "no last will: if this instance is killed, its unstarted runs become unknown");
        }
        let runner = runner
            .hiding(config.store_variables.clone())
            .leaving(last_will.ok());
        runner.start_zygote();
        sweep(Runner::sweep).await;
        let parts = (store, runner);
        let mut daemon = Self::assemble(o.config_path, config, (instance, host), parts)?;
        daemon.send_traces();
        let background = &daemon.background;
        // The daemon before this one may have left such runs, if its zygote is dead, too.
        drop(tokio::spawn(sweep(Runner::end_helpless)));
        background.spawn(sweep_now_and_then(daemon.finish.clone()));
        background.spawn(reap_strangers(daemon.finish.clone()));
        background.spawn(keep_zygote(
            daemon.holder.runner.clone(),
            daemon.finish.clone(),
        ));
        daemon.serve_http();
        daemon.send_notifications();
        Ok(daemon)
    }

    /// Makes the parts that need nothing of this host but its time.
    // Long: each part is made once, in order.
    pub(crate) fn assemble(
        config_path: PathBuf,
        config: Config,
        (instance, host): (InstanceId, String),
        (store, runner): (Arc<dyn Store>, Runner),
    ) -> anyhow::Result<Self> {
        let clock = Arc::new(StoreClock::default());
        store.believe(clock.clone());
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
            health: Arc::default(),
            last_will: holder.runner.last_will().cloned(),
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
            let (holder, contender) = (holder.clone(), contender.clone());
            Box::new(move |job: &JobName, run| holder.prepare(&contender, job, run))
        };
        let dispatcher = Dispatcher::new(contender.clone(), clock, planned, prepare, stop.clone())?;
        background.spawn(fleet.run());
        background.spawn(journal::run(store.clone(), journal, finish.clone()));
        background.spawn(contender.clone().watch());
        background.spawn(listen(
            store,
            contender.clone(),
            holder.clone(),
            finish.clone(),
        ));
        background.spawn(dispatcher.run());
        #[cfg(feature = "http")]
        let config_shown = watch::Sender::new(Arc::new(match &config.http {
            Some(_) => config.clone(),
            // Nobody looks at it.
            None => Config {
                jobs: std::collections::BTreeMap::new(),
                ..config.clone()
            },
        }));
        Ok(Self {
            config_path,
            config,
            contender,
            holder,
            config_seen,
            stop,
            finish,
            contests,
            background,
            #[cfg(feature = "notify")]
            notifier: None,
            #[cfg(feature = "http")]
            config_shown,
        })
    }

    /// What would be said of its claims if it were killed now.
    #[cfg(test)]
    pub(crate) fn last_will(&self) -> Option<(Destination, Vec<Claimed>)> {
        self.holder.runner.last_will()?.read().ok()
    }

    /// Serves HTTP, if the configuration says so.
    #[cfg(feature = "http")]
    fn serve_http(&self) {
        let Some(http) = self.config.http.clone() else {
            return;
        };
        self.background.spawn(http::serve(http::Parts {
            http,
            config: self.config_shown.subscribe(),
            store: self.contender.store.clone(),
            health: self.contender.health.clone(),
            instance: self.contender.me.instance.clone(),
            finish: self.finish.clone(),
        }));
    }

    #[cfg(not(feature = "http"))]
    fn serve_http(&self) {
        if self.config.http.is_some() {
            warn!("[http] has no effect: this program was built without the feature `http`");
        }
    }

    /// Takes part in sending the fleet's notifications, once the configuration has a channel; tells that part of a
    /// reloaded configuration.
    #[cfg(feature = "notify")]
    fn send_notifications(&mut self) {
        if let Some(notifier) = &self.notifier {
            notifier.send_replace(Arc::new(self.config.clone()));
            return;
        }
        if self.config.channels.is_empty() {
            return;
        }
        let (shown, config) = watch::channel(Arc::new(self.config.clone()));
        self.notifier = Some(shown);
        self.background
            .spawn(notifications::serve(notifications::Context {
                config,
                store: self.contender.store.clone(),
                clock: self.contender.clock.clone(),
                health: self.contender.health.clone(),
                instance: self.contender.me.instance.clone(),
                finish: self.finish.clone(),
            }));
    }

    #[cfg(not(feature = "notify"))]
    fn send_notifications(&mut self) {
        if !self.config.channels.is_empty() {
            warn!("[notify] has no effect: this program was built without the feature `notify`");
        }
    }

    /// Sends the spans of this instance's runs, if the environment says where. A reload changes nothing: the
    /// environment of a process stays as it is.
    #[cfg(feature = "notify")]
    fn send_traces(&self) {
        let resource = [
            ("service.instance.id", self.contender.me.instance.as_str()),
            ("host.name", &self.holder.host),
            ("soloist.namespace", &self.config.store.namespace),
        ];
        let variable = |name: &str| std::env::var(name).ok();
        let (settings, problems) = traces::Settings::read(&variable, &resource);
        for problem in problems {
            warn!("{problem}");
        }
        if let Some(settings) = settings {
            let health = self.contender.health.clone();
            let _ = self
                .holder
                .traces
                .set(traces::Traces::start(settings, health));
        }
    }

    #[cfg(not(feature = "notify"))]
    fn send_traces(&self) {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if set("OTEL_EXPORTER_OTLP_ENDPOINT") || set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") {
            warn!("no traces are sent: this program was built without the feature `notify`");
        }
    }

    /// Serves until a signal asks to stop. Returns the signal's name.
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
                        #[cfg(feature = "http")]
                        if self.config.http.is_some() {
                            self.config_shown
                                .send_replace(Arc::new(self.config.clone()));
                        }
                        self.send_notifications();
                    }
                }
            }
        }
    }

    /// Waits for active runs for as long as the drain lasts; then ends them.
    async fn drain(&self, signals: &mut Signals) {
        let holder = &self.holder;
        self.stop.cancel();
        holder.store.hurry();
        self.contests.close();
        holder.runs.close();
        holder.commands.close();
        self.background.close();
        // The store may still answer an outstanding claim with a grant.
        let all = async {
            self.contests.wait().await;
            holder.runs.wait().await;
        };
        let drain = self.config.limits.drain;
        tokio::select! {
            () = all => return,
            () = tokio::time::sleep(drain) => {
                warn!(?drain, running = holder.running().len(), "runs are still active at the end of the drain: \
                this instance ends them");
            }
            name = signals.second_stop() => {
                warn!(signal = name, running = holder.running().len(), "a second signal came: this instance ends the \
                active runs");
            }
        }
        holder.kill.cancel();
        // Each command ends within its grace.
        let _ = tokio::time::timeout(holder.longest_end(), holder.commands.wait()).await;
    }

    /// Records the last outcomes and signs off, and leaves what remains to the guards.
    async fn leave(&self) {
        let holder = &self.holder;
        // One deadline for everything. Outcomes go first; if the store is slow, the other tasks sign off at the same
        // time.
        let until = tokio::time::Instant::now() + LAST_WORDS;
        let _ = tokio::time::timeout(LAST_WORDS / 2, holder.runs.wait()).await;
        self.finish.cancel();
        let all = async { tokio::join!(holder.runs.wait(), self.background.wait()) };
        if tokio::time::timeout_at(until, all).await.is_err() {
            warn!(
                "this instance stops without signing off: the store does not answer, or the processes of a run do not \
                 die"
            );
        }
        let unrecorded = holder.running().len();
        if unrecorded > 0 {
            error!(
                running = unrecorded,
                "some outcomes are not recorded yet: the guards of those runs keep trying"
            );
        }
        holder.give_up.cancel();
        // Releases the guards, or lets them take over. A guard that is not told notices when this process ends.
        let _ = tokio::time::timeout(HAND_OVER, holder.runs.wait()).await;
        // After the last of what the runs say.
        #[cfg(feature = "notify")]
        holder.heartbeats.finish(crate::notify::LAST_WORDS).await;
        #[cfg(feature = "notify")]
        if let Some(traces) = holder.traces.get() {
            traces.finish(LAST_TRACES).await;
        }
    }
}

/// Connects the two: the contender hands won leases to the holder, which reports ended runs back.
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

/// A zygote that dies, or can do nothing, is replaced also while nothing is started: it is to execute the last will,
/// and to look after guards that can do nothing.
async fn keep_zygote(runner: Runner, finish: CancellationToken) {
    let pause = || finish.run_until_cancelled(tokio::time::sleep(ZYGOTE_EVERY));
    while pause().await.is_some() {
        let looked = runner.clone();
        let helpless = blocking::run(move || looked.helpless_zygote()).await;
        runner.keep_zygote(helpless);
    }
}

async fn sweep_now_and_then(finish: CancellationToken) {
    let pause = || finish.run_until_cancelled(tokio::time::sleep(SWEEP_EVERY));
    while pause().await.is_some() {
        sweep(Runner::sweep).await;
    }
}

async fn reap_strangers(finish: CancellationToken) {
    let reaping = finish.run_until_cancelled(runner::reap_strangers()).await;
    if let Some(Err(error)) = reaping {
        warn!(%error, "cannot reap zombies that this process did not start: they stay until it ends");
    }
}

/// Nobody else may put another database in the place of the daemon's. The commands, which people start, do not ask:
/// root may look at the store of any user.
fn check_place(url: &config::StoreUrl) -> Result<(), store::Error> {
    let config::StoreUrl::Sqlite(path) = url else {
        return Ok(());
    };
    config::rights::place(path).map_err(|f| store::Error::Refused {
        address: url.to_string(),
        reason: format!("{}: {}", f.message, f.fix),
    })
}

/// Only warns: an older version may have created the file, or somebody may want to share it.
fn warn_of_open_file(url: &config::StoreUrl) {
    if let config::StoreUrl::Sqlite(path) = url
        && let Some(mode) = store::sqlite::open_to_others(path)
    {
        let file = path.display();
        warn!(
            "other users may open {file} (mode {mode:03o}): they can read the output of jobs, and stop all jobs from \
            starting; to prevent that, run: chmod 600 {file}*"
        );
    }
}

/// Passes the fleet's hints to the parts that they concern.
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
                warn!(lost = n, "some hints were lost: checking all jobs");
                contender.resync();
            }
            Err(RecvError::Closed) => return,
        }
    }
}

/// Notifies systemd, if it started this process.
fn notify(state: &[sd_notify::NotifyState<'_>]) {
    let _ = sd_notify::notify(state);
}
