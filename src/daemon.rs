//! `soloist run`: wires the parts; start order, stop order.
//!
//! One task owns each mutable thing: the dispatcher the timetable, the fleet task the epoch, the contender the contests,
//! a holder task each run.

mod dispatch;
mod fleet;
mod journal;

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, oneshot},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info, warn};

use self::{dispatch::Dispatcher, fleet::FleetTask};
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
pub struct Options {
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
pub async fn run(o: Options) -> anyhow::Result<()> {
    // Before anything else, so that a signal during the start is not lost.
    let mut signals = Signals::new().context("cannot handle signals")?;
    early::release();
    let host = host_name();
    let instance = InstanceId::new(
        &o.instance
            .unwrap_or_else(|| format!("{host}-{:04x}", fastrand::u16(..))),
    );
    let store = store::open(&o.config.store)?;
    warn_of_open_file(&o.config.store.url);
    let clock = Arc::new(StoreClock::default());
    store.believe(clock.clone());
    let runner = Runner::new().context("cannot become the subreaper of the commands")?;
    let runner = runner.hiding(o.config.store_variables.clone());
    sweep().await;

    let stop = CancellationToken::new();
    let finish = CancellationToken::new();
    let contests = TaskTracker::new();
    let background = TaskTracker::new();
    let (decisions, journal) = mpsc::channel(20_000);
    let (plans, planned) = mpsc::unbounded_channel();
    let holder = Holder::new(
        store.clone(),
        clock.clone(),
        runner,
        instance.clone(),
        host.clone(),
        o.config.store.clone(),
    );
    // The holder reports ended runs to the contender, which hands it the leases: a knot that is tied here.
    let contender = Arc::new_cyclic(|weak: &std::sync::Weak<Contender>| {
        let (holder, weak) = (holder.clone(), weak.clone());
        let parts = Parts {
            store: store.clone(),
            clock: clock.clone(),
            instance: instance.clone(),
            host: host.clone(),
            retry: o.config.store.retry.clone(),
            max_parallel: o.config.limits.max_parallel,
            journal: decisions,
            plans,
            stop: stop.clone(),
            tasks: contests.clone(),
        };
        Contender::build(
            parts,
            Box::new(move |granted| {
                if let Some(contender) = weak.upgrade() {
                    holder.start(contender, granted);
                }
            }),
        )
    });
    info!(%instance, store = store.address(), jobs = o.config.jobs.len(), config = o.config.digest, "soloist {}", env!("CARGO_PKG_VERSION"));
    for job in o.config.jobs.values() {
        contender.set_job(job.clone());
    }

    let fleet = FleetTask::new(contender.clone(), holder.clone(), &o.config, finish.clone());
    let config_seen = fleet.config_sender();
    background.spawn(fleet.run());
    background.spawn(journal::run(store.clone(), journal, finish.clone()));
    background.spawn(contender.clone().watch());
    background.spawn({
        let finish = finish.clone();
        async move {
            while finish
                .run_until_cancelled(tokio::time::sleep(SWEEP_EVERY))
                .await
                .is_some()
            {
                sweep().await;
            }
        }
    });
    background.spawn({
        let finish = finish.clone();
        async move {
            let reaping = finish.run_until_cancelled(runner::reap_strangers()).await;
            if let Some(Err(error)) = reaping {
                warn!(%error, "zombies of others will stay until this process ends");
            }
        }
    });
    background.spawn(listen(
        store.clone(),
        contender.clone(),
        holder.clone(),
        finish.clone(),
    ));
    let prepare = {
        let holder = holder.clone();
        Box::new(move |job: &JobName, run| holder.prepare(job, run))
    };
    let dispatcher = Dispatcher::new(
        contender.clone(),
        clock.clone(),
        planned,
        prepare,
        stop.clone(),
    )?;
    background.spawn(dispatcher.run());
    notify(&[sd_notify::NotifyState::Ready]);

    let mut config = o.config;
    loop {
        match signals.next().await {
            SignalRequest::Reload => {
                notify_reloading();
                let mut loading = load(&o.config_path);
                // Reading may hang, on a file system whose server is away.
                let loaded = loop {
                    tokio::select! {
                        loaded = &mut loading => break loaded.ok(),
                        asked = signals.next() => match asked {
                            // One that comes meanwhile is about what is read now, or later.
                            SignalRequest::Reload => loading = load(&o.config_path),
                            stop @ SignalRequest::Stop(_) => {
                                signals.asked = Some(stop);
                                break None;
                            }
                        },
                    }
                };
                if let Some(loaded) = loaded {
                    reload(loaded, &mut config, &contender, &config_seen);
                }
            }
            SignalRequest::Stop(name) => {
                info!(
                    signal = name,
                    running = holder.running().len(),
                    "stopping: nothing new is begun, what runs goes on"
                );
                break;
            }
        }
    }
    notify(&[sd_notify::NotifyState::Stopping]);

    stop.cancel();
    contests.close();
    holder.runs.close();
    holder.commands.close();
    background.close();
    // A question that the store has not answered yet may be answered with a grant.
    let all = async {
        contests.wait().await;
        holder.runs.wait().await;
    };
    let drained = tokio::select! {
        () = all => true,
        () = tokio::time::sleep(config.limits.drain) => {
            warn!(drain = ?config.limits.drain, running = holder.running().len(), "runs still active after the drain, ending them");
            false
        }
        name = signals.again() => {
            warn!(signal = name, running = holder.running().len(), "asked again, ending what runs");
            false
        }
    };
    if !drained {
        holder.kill.cancel();
        // Each command ends within its grace.
        let _ = tokio::time::timeout(holder.longest_end(), holder.commands.wait()).await;
    }
    // One deadline for all goodbyes. The outcomes go first; a store that does not answer soon hears all at once.
    let until = tokio::time::Instant::now() + LAST_WORDS;
    let _ = tokio::time::timeout(LAST_WORDS / 2, holder.runs.wait()).await;
    finish.cancel();
    let all = async { tokio::join!(holder.runs.wait(), background.wait()) };
    if tokio::time::timeout_at(until, all).await.is_err() {
        warn!("the store does not answer; leaving without a word to it");
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
    info!("stopped");
    Ok(())
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

/// Reads the configuration, in a thread that nobody waits for.
fn load(path: &std::path::Path) -> oneshot::Receiver<Result<Config, config::Report>> {
    let (loaded, answer) = oneshot::channel();
    let path = path.to_owned();
    std::thread::spawn(move || {
        // Nobody waits for it any more when the daemon is to stop.
        let _ = loaded.send(config::load(&path));
    });
    answer
}

fn notify_reloading() {
    let now = std::time::Duration::from_nanos(crate::clock::Boottime::now().0);
    notify(&[
        sd_notify::NotifyState::Reloading,
        sd_notify::NotifyState::Custom(&format!("MONOTONIC_USEC={}", now.as_micros())),
    ]);
}

/// Puts another configuration in force, or says why not.
fn reload(
    loaded: Result<Config, config::Report>,
    config: &mut Config,
    contender: &Arc<Contender>,
    seen: &tokio::sync::watch::Sender<fleet::Loaded>,
) {
    match loaded {
        Err(report) => {
            error!("the new configuration is invalid, the old one stays in force:");
            // One line of the log each.
            report.to_string().lines().for_each(|line| error!("{line}"));
        }
        Ok(new) => {
            let mut changed = (0, 0, 0);
            for name in config
                .jobs
                .keys()
                .filter(|name| !new.jobs.contains_key(*name))
            {
                contender.remove_job(name);
                changed.0 += 1;
            }
            for (name, job) in &new.jobs {
                match config.jobs.get(name) {
                    Some(old) if same(old, job) => continue,
                    Some(_) => changed.1 += 1,
                    None => changed.2 += 1,
                }
                contender.set_job(job.clone());
            }
            let (removed, altered, added) = changed;
            info!(
                removed,
                altered,
                added,
                jobs = new.jobs.len(),
                config = new.digest,
                "configuration reloaded"
            );
            let old = std::mem::replace(config, new);
            if old.store != config.store {
                let what = changed_of_store(&old.store, &config.store).join(", ");
                warn!(
                    "[store] has changed ({what}), and this instance goes on with the store as it was: a change takes effect \
                     when soloist is started again"
                );
                // Compared with what is in use, so that it is said again with each reload.
                config.store = old.store;
            }
            if old.limits.max_parallel != config.limits.max_parallel {
                warn!(
                    "`max_parallel` has changed: that takes effect when soloist is started again"
                );
                config.limits.max_parallel = old.limits.max_parallel;
            }
            // Not `send`, which changes nothing while nobody waits for a change.
            seen.send_replace(fleet::Loaded::of(config));
        }
    }
    notify(&[sd_notify::NotifyState::Ready]);
}

/// The names of the keys of `[store]` that differ, in its order.
fn changed_of_store(a: &config::Store, b: &config::Store) -> Vec<&'static str> {
    // All of them, so that a new one is not forgotten here.
    let config::Store {
        url,
        namespace,
        username,
        password,
        tls,
        timeout,
        pool_size,
        min_replicas,
        retry,
    } = a;
    [
        ("url", *url != b.url),
        ("namespace", *namespace != b.namespace),
        ("username", *username != b.username),
        ("the password", *password != b.password),
        ("tls", *tls != b.tls),
        ("timeout", *timeout != b.timeout),
        ("pool_size", *pool_size != b.pool_size),
        ("min_replicas", *min_replicas != b.min_replicas),
        ("retry", *retry != b.retry),
    ]
    .into_iter()
    .filter_map(|(name, changed)| changed.then_some(name))
    .collect()
}

fn same(a: &config::Job, b: &config::Job) -> bool {
    let digests = |job: &config::Job| (job.digest.clone(), job.schedule_digest.clone());
    // The digest knows nothing of their values.
    digests(a) == digests(b) && a.enabled == b.enabled && a.env == b.env
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

enum SignalRequest {
    Stop(&'static str),
    Reload,
}

struct Signals {
    /// What was asked for meanwhile, and comes next.
    asked: Option<SignalRequest>,
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            asked: None,
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: signal(SignalKind::hangup())?,
        })
    }
    /// A second wish to stop. What comes right behind the first is the same one: `timeout` and shells signal both the
    /// process and its group.
    async fn again(&mut self) -> &'static str {
        let first = crate::clock::Boottime::now();
        loop {
            let name = tokio::select! {
                _ = self.term.recv() => "SIGTERM",
                _ = self.int.recv() => "SIGINT",
            };
            if crate::clock::Boottime::now().since(first) >= Duration::from_millis(300) {
                return name;
            }
        }
    }
    async fn next(&mut self) -> SignalRequest {
        if let Some(asked) = self.asked.take() {
            return asked;
        }
        tokio::select! {
            _ = self.term.recv() => SignalRequest::Stop("SIGTERM"),
            _ = self.int.recv() => SignalRequest::Stop("SIGINT"),
            _ = self.hup.recv() => SignalRequest::Reload,
        }
    }
}
