//! This instance as a member of the fleet: its heartbeat, the other live instances, requests to drain, and the store's
//! epoch.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use crate::{
    clock::{Boottime, wall_us},
    config::{self, Config},
    contender::{Contender, Epoch, note_clock},
    holder::Holder,
    logic::{
        backoff::Throttle,
        belief::{self, Verdict},
        claim::{Control, Controlled},
        contest::{EpochChange, EpochWatch},
        drain::Drain,
    },
    model::InstanceId,
    store::{self, Beat, Fleet, Info, LIVE_WITHIN_MS, OUTAGES_KEPT, Outage, Problem, Reply},
    view::{wait_in_words, waits_since},
};

const HEARTBEAT: Duration = Duration::from_secs(1);
/// After a change of the live instances this one waits for so long before it says again which jobs it lacks: one that
/// has such a job may be started again.
const STEADY_FOR: Duration = Duration::from_secs(15);
const AT_ONCE: Boottime = Boottime(0);
/// Time between two warnings that this host's clock is far from the store's.
const APART_AGAIN: Duration = Duration::from_secs(3600);
/// Time between two warnings that the store does not answer.
const WARN_AGAIN: Duration = Duration::from_secs(10);
/// Time between two checks of the store's settings while they are safe; otherwise each heartbeat checks them.
const CHECK_AGAIN: Duration = Duration::from_secs(5);
/// Time between two rounds while some jobs are not registered.
const REGISTER_AGAIN: Duration = Duration::from_millis(200);
/// How long a heartbeat waits for the registration of jobs, at most.
const REGISTER_WAIT: Duration = Duration::from_millis(500);

/// What the heartbeat reports about the configuration.
#[derive(Debug, Clone)]
pub(super) struct Loaded {
    digest: String,
    jobs: u32,
}

impl Loaded {
    pub(super) fn of(config: &Config) -> Self {
        Self {
            digest: config.digest.clone(),
            jobs: config.jobs.len() as u32,
        }
    }
}

pub(super) struct FleetTask {
    contender: Arc<Contender>,
    holder: Arc<Holder>,
    loaded: watch::Sender<Loaded>,
    finish: CancellationToken,
    epoch: EpochWatch,
    started_at: i64,
    /// A random number for this process.
    process: u32,
    /// This process has sent a heartbeat under its name.
    announced: bool,
    /// When this instance last warned about another process with its name.
    duplicate_told: Throttle,
    unlisted_told: Throttle,
    /// When the store last answered.
    answered: Option<Boottime>,
    away_since: Option<Boottime>,
    /// When the store did not answer: the newest times, oldest first.
    outages: VecDeque<Outage>,
    warned: Throttle,
    drain: Drain,
    /// Who asked last.
    drained_by: String,
    /// The live instances.
    here: Vec<InstanceId>,
    /// The configuration of this instance.
    config: String,
    /// When this one is to say which jobs it lacks; None: it has said so.
    mark_at: Option<Boottime>,
    /// How many rounds in a row found all jobs registered.
    registered_rounds: u32,
    /// Heartbeats until the next check of the jobs whose watermark lies in the future.
    rounds_to_recheck: u32,
    /// The incarnation whose settings were checked last, and when.
    checked: Option<(Arc<str>, Boottime)>,
    /// The problems that the check found.
    problems: Vec<Problem>,
    complained: Throttle,
    /// When this instance last warned that it does not believe the store's clock.
    doubted: Throttle,
    /// When it last warned that this host's clock is far from the store's, which it believes.
    apart_told: Throttle,
    /// Limits the warnings that jobs cannot be registered.
    unregistered: Throttle,
    /// The registration, which runs beside the heartbeats.
    registering: Option<JoinHandle<Result<usize, store::Error>>>,
}

/// Heartbeats between two checks of the jobs whose watermark lies in the future.
const RECHECK_ROUNDS: u32 = 15;

/// After this many rounds the memory that registering all jobs took is freed: by then the timetable has them.
const TRIM_AFTER_ROUNDS: u32 = 3;

impl FleetTask {
    pub(super) fn new(
        contender: Arc<Contender>,
        holder: Arc<Holder>,
        config: &Config,
        finish: CancellationToken,
    ) -> Self {
        Self {
            contender,
            holder,
            loaded: watch::Sender::new(Loaded::of(config)),
            finish,
            epoch: EpochWatch::default(),
            started_at: 0,
            process: fastrand::u32(1..),
            announced: false,
            duplicate_told: Throttle::default(),
            unlisted_told: Throttle::default(),
            answered: None,
            away_since: None,
            outages: VecDeque::new(),
            warned: Throttle::default(),
            drain: Drain::No,
            drained_by: String::new(),
            here: vec![],
            config: String::new(),
            mark_at: None,
            registered_rounds: 0,
            rounds_to_recheck: RECHECK_ROUNDS,
            checked: None,
            problems: vec![],
            complained: Throttle::default(),
            doubted: Throttle::default(),
            apart_told: Throttle::default(),
            unregistered: Throttle::default(),
            registering: None,
        }
    }

    pub(super) fn config_sender(&self) -> watch::Sender<Loaded> {
        self.loaded.clone()
    }

    pub(super) async fn run(mut self) {
        let mut events = self.contender.store.events();
        let mut reloads = self.loaded.subscribe();
        let mut next = HEARTBEAT;
        loop {
            self.holder.try_guard(&self.contender);
            if self.beat().await {
                self.give_drain_back().await;
                let left = match self.epoch.known().cloned() {
                    Some(epoch) if self.is_reliable(&epoch.incarnation).await => {
                        // Before that nobody who has a job could contradict.
                        if epoch.open {
                            self.mark().await;
                        }
                        self.register(&epoch).await
                    }
                    _ => Ok(0),
                };
                self.registered_rounds = match left {
                    Ok(0) => self.registered_rounds.saturating_add(1),
                    _ => 0,
                };
                if self.registered_rounds == TRIM_AFTER_ROUNDS {
                    config::trim_memory();
                }
                self.rounds_to_recheck -= 1;
                if self.rounds_to_recheck == 0 {
                    self.rounds_to_recheck = RECHECK_ROUNDS;
                    self.contender.look_at_those_ahead();
                }
                next = match left {
                    Ok(0) => {
                        self.unregistered.over();
                        HEARTBEAT
                    }
                    // During a quarantine, registering can wait until it is over.
                    Ok(_) => {
                        let epoch = self.epoch.known();
                        let next = epoch.and_then(|epoch| self.contender.next_registration(epoch));
                        let idle = next.filter(|_| self.registering.is_none());
                        let idle = match self.contender.clock.doubt_us() {
                            Some(_) => Some(HEARTBEAT),
                            None => idle,
                        };
                        idle.unwrap_or(REGISTER_AGAIN)
                            .clamp(REGISTER_AGAIN, HEARTBEAT)
                    }
                    Err(e) => {
                        let now = Boottime::now();
                        if self.unregistered.lets(now, WARN_AGAIN) {
                            warn!(error = %e, "cannot register jobs with the store, so they do not run; retrying");
                        }
                        REGISTER_AGAIN
                    }
                };
            }
            tokio::select! {
                () = tokio::time::sleep(next) => {}
                () = self.contender.registration_due.notified() => {}
                _ = reloads.changed() => {}
                () = drain_hint(&mut events) => {}
                () = self.finish.cancelled() => break,
            }
        }
        let _ = self
            .contender
            .store
            .leave(&self.contender.me.instance, self.process)
            .await;
    }

    /// Gives the store the request to drain that it has lost.
    async fn give_drain_back(&mut self) {
        if self.drain != Drain::Lost {
            return;
        }
        match (self.contender.store)
            .drain(&self.contender.me.instance, true, &self.drained_by)
            .await
        {
            Ok(_) => self.drain.given_back(),
            // The next heartbeat tries again.
            Err(e) => debug!(error = %e, "cannot give the store the lost request to drain"),
        }
    }

    /// Registers the jobs in a task of its own: with many jobs that takes longer than the other instances wait for a
    /// heartbeat. Returns how many are left.
    async fn register(&mut self, epoch: &Epoch) -> Result<usize, store::Error> {
        let (contender, epoch) = (self.contender.clone(), epoch.clone());
        let register = async move { contender.register(&epoch).await };
        let mut task = (self.registering.take()).unwrap_or_else(|| tokio::spawn(register));
        match tokio::time::timeout(REGISTER_WAIT, &mut task).await {
            Ok(Ok(left)) => left,
            Ok(Err(_)) => Ok(1),
            Err(_) => {
                self.registering = Some(task);
                Ok(1)
            }
        }
    }

    /// Sends one heartbeat. True: the store answered.
    async fn beat(&mut self) -> bool {
        let contender = &self.contender;
        let loaded = self.loaded.borrow().clone();
        let info = Info {
            host: contender.me.host.clone(),
            pid: std::process::id(),
            process: self.process,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config: loaded.digest,
            clock_offset_ms: contender.clock.wall_offset_ms().unwrap_or(0.0),
            wall: wall_us() / 1000,
            clock_doubt_ms: contender.clock.doubt_us().map(|us| us / 1000),
            started_at: self.started_at,
            running: self.holder.running(),
            // Not a drain that the store already lists: all see at once when somebody takes it back.
            draining: contender.stop.is_cancelled() || self.drain == Drain::Lost,
            jobs: loaded.jobs,
            outages: self.outages.iter().copied().collect(),
            halted: contender.halted().map(|(_, why)| why.to_string()),
            ..Info::default()
        };
        let beat = Beat {
            instance: contender.me.instance.clone(),
            info,
            quarantine: contender.quarantine(),
            open: self.epoch.vouched(contender.quarantine(), Boottime::now()),
        };
        let mut told = contender.store.heartbeat(Some(&beat)).await;
        // One connection that broke alarms nobody. A heartbeat may be repeated.
        if self.away_since.is_none() && told.as_ref().is_err_and(store::Error::is_transient) {
            told = contender.store.heartbeat(Some(&beat)).await;
        }
        match told {
            Ok(reply) => {
                note_clock(&contender.clock, &reply);
                if let Some(since) = self.away_since.take() {
                    info!(away = ?Boottime::now().since(since), store = self.contender.store.address(), "the store answers again");
                    // Hints were lost, and runs may have begun that this instance does not watch.
                    self.contender.resync();
                    self.note_outage(self.answered.unwrap_or(since));
                }
                self.contender.health.answered(&reply, &self.problems);
                self.answered = Some(Boottime::now());
                self.warned.over();
                self.learn(reply);
                true
            }
            Err(e) => {
                let now = Boottime::now();
                self.contender.health.failed(&e);
                self.away_since.get_or_insert(now);
                if self.warned.lets(now, WARN_AGAIN) {
                    match e.is_transient() {
                        true => {
                            warn!(error = %e, "the store does not answer: this instance starts nothing until it does")
                        }
                        false => {
                            error!(error = %e, "this instance cannot use the store's answer: it starts nothing until \
                            this is fixed")
                        }
                    }
                }
                false
            }
        }
    }

    /// Keeps in mind that the store did not answer from `from` until now, so that the next heartbeat reports it.
    fn note_outage(&mut self, from: Boottime) {
        let Some(until) = self.contender.clock.now_ms() else {
            return;
        };
        let lasted = Boottime::now().since(from).as_millis() as i64;
        if self.outages.len() == OUTAGES_KEPT {
            self.outages.pop_front();
        }
        let from = until.saturating_sub(lasted);
        self.outages.push_back(Outage { from, until });
    }

    /// True: the store's settings are safe. Otherwise this instance claims nothing, and logs why.
    async fn is_reliable(&mut self, incarnation: &Arc<str>) -> bool {
        let now = Boottime::now();
        let known = self.checked.as_ref().filter(|(of, _)| of == incarnation);
        let unreliable = self.problems.iter().any(|p| p.fatal);
        let due = self.contender.check_due.swap(false, Ordering::SeqCst);
        if let Some((_, at)) = known
            && !unreliable
            && !due
            && now.since(*at) < CHECK_AGAIN
        {
            return true;
        }
        // Once all is well, the next trouble is told at once.
        let complain = self.complained.lets(now, WARN_AGAIN);
        let found = match self.contender.store.check().await {
            Ok(found) => found,
            Err(e) => {
                // Use the last answer, if there was one in this incarnation.
                let reliable = known.is_some() && !unreliable;
                if complain {
                    warn!(error = %e, "cannot check the settings of the store");
                }
                return reliable;
            }
        };
        let store = self.contender.store.address();
        let fatal: Vec<&str> = found
            .iter()
            .filter(|p| p.fatal)
            .map(|p| p.text.as_str())
            .collect();
        let reasons = fatal.join("; ");
        if fatal.is_empty() {
            self.contender.set_halt("store_error", None);
            self.complained.over();
            if unreliable {
                info!(
                    store,
                    "the settings of the store are safe again: this instance starts jobs again"
                );
            }
        } else {
            (self.contender).set_halt("store_error", Some(reasons.clone()));
            if complain {
                error!(
                    store,
                    "the store is not safe to use: {reasons}; this instance starts nothing until that is \
                    changed"
                );
            }
        }
        let reliable = fatal.is_empty();
        if found != self.problems {
            for p in found.iter().filter(|p| !p.fatal) {
                warn!(store, "check the settings of the store: {}", p.text);
            }
        }
        self.checked = Some((incarnation.clone(), now));
        self.problems = found;
        reliable
    }

    /// Marks the jobs in the store that this instance does not have enabled as off: at its start and after a reload at
    /// once, and after a change of the fleet once it is steady. An instance that has such a job enabled contradicts.
    /// When a marked job comes back, what was planned meanwhile is not caught up.
    async fn mark(&mut self) {
        let contender = &self.contender;
        // In doubt the store decides nothing, and nobody could contradict.
        if self.mark_at.is_none_or(|at| Boottime::now() < at)
            || contender.clock.doubt_us().is_some()
        {
            return;
        }
        let all = match contender.store.jobs().await {
            Ok(all) => all,
            // The next heartbeat tries again.
            Err(e) => {
                if !e.is_transient() && self.unlisted_told.lets(Boottime::now(), WARN_AGAIN) {
                    warn!(
                        error = %e,
                        "cannot list the store's jobs, so this instance cannot mark those that were removed: if such a \
                        job comes back, soloist runs what was planned meanwhile"
                    );
                }
                return;
            }
        };
        let enabled = contender.enabled();
        let mut left = false;
        for job in all.iter().filter(|job| !enabled.contains(*job)) {
            if contender.has_unanswered_claims(job) {
                left = true;
                continue;
            }
            match contender.store.control(job, &Control::Off).await {
                Ok(reply) => {
                    note_clock(&contender.clock, &reply);
                    // A fleet whose files differ would log this at each of its changes.
                    if reply.value == Controlled::Done && self.mark_at == Some(AT_ONCE) {
                        info!(%job, "this instance does not have this job enabled: if no other one has it, nothing that \
                        is planned from now on is caught up");
                    }
                }
                Err(e) if e.is_transient() => return,
                // A refusal would be repeated for ever.
                Err(_) => {}
            }
        }
        if !left {
            self.mark_at = None;
        }
    }

    /// Detects a second process with this instance's name: each finds its own entry overwritten by the other.
    fn look_for_duplicate(&mut self, before: Option<&Info>) {
        let other = before.filter(|b| self.announced && b.process != self.process);
        self.announced = true;
        let now = Boottime::now();
        if let Some(other) = other
            && self.duplicate_told.lets(now, WARN_AGAIN)
        {
            warn!(
                instance = %self.contender.me.instance, host = other.host, pid = other.pid,
                "another soloist process uses this instance's name: `status`, `why` and `drain` cannot tell the two \
                apart; give each its own name (--instance)"
            );
        }
    }

    /// Compares the store's clock with the clocks of all hosts, and logs the verdict.
    fn believe(&mut self, reply: &Reply<Fleet>) {
        let contender = &self.contender;
        let shown = reply.now_us.div_euclid(1000);
        let believed = contender.clock.at(reply.received).unwrap_or(reply.now_us) / 1000;
        // A durable store uses this host's clock, so this host's clock cannot check it.
        let walls = match contender.store.durable() {
            true => vec![],
            false => {
                let wall = wall_us().div_euclid(1000);
                walls(&reply.value, &contender.me.instance, shown, believed, wall)
            }
        };
        match contender.clock.vote(&walls) {
            Some(Verdict::Accepted(step)) => warn!(
                step_ms = step / 1000,
                "the store's clock was stepped; this instance believes it, because the hosts' clocks agree with it or \
                because it has run evenly since: occurrences follow it"
            ),
            Some(Verdict::Outvoted(ahead)) => error!("{}", belief::in_words(ahead)),
            None => {}
        }
        let now = Boottime::now();
        match contender.clock.doubt_us() {
            Some(ahead) => {
                // The code that noticed it has logged it the first time.
                let noticed = self.doubted.was_said();
                if self.doubted.lets(now, WARN_AGAIN) && noticed {
                    error!("{}", belief::in_words(ahead));
                }
            }
            None => self.doubted.over(),
        }
        let apart = contender.clock.wall_offset_ms().unwrap_or(0.0);
        if contender.clock.doubt_us().is_some() || apart.abs() <= belief::NEAR.as_millis() as f64 {
            self.apart_told.over();
        } else if self.apart_told.lets(now, APART_AGAIN) {
            let by = Duration::from_millis(apart.abs() as u64);
            let side = if apart > 0.0 { "ahead of" } else { "behind" };
            warn!(
                "this host's clock is {by:.1?} {side} the store's: occurrences follow the store's clock; correct the \
                 clock that is wrong"
            );
        }
    }

    /// Logs a change of the epoch, and does what follows from it.
    fn tell(&mut self, change: EpochChange, fleet: &Fleet, incarnation: &str, now: i64) {
        match change {
            EpochChange::None => {}
            EpochChange::FirstSeenClosed => info!("{}", self.wait(fleet, now, true)),
            EpochChange::Replaced if fleet.open => {
                warn!(epoch = %incarnation, "the store was restarted, or lost or changed its data, and another \
                instance has already waited");
                self.contender.resync();
                self.mark_at = Some(AT_ONCE);
            }
            EpochChange::Replaced => {
                warn!(epoch = %incarnation, "{}", self.wait(fleet, now, false));
                self.contender.resync();
            }
            EpochChange::Opened => {
                self.mark_at = Some(AT_ONCE);
                info!(
                    "the wait is over, also for the jobs with the longest lease: all jobs start again"
                )
            }
        }
    }

    /// How long the fleet waits that found a new store, or one that lost its data: until one of those that live has
    /// waited for long enough, this one from `now` on. `new`: this instance knew no other data.
    fn wait(&self, fleet: &Fleet, now: i64, new: bool) -> String {
        let me = &self.contender.me.instance;
        let others = (fleet.instances.iter())
            .filter(|(id, _)| *id != me)
            .map(|(_, i)| i)
            .filter(|i| i.seen.abs_diff(now) <= LIVE_WITHIN_MS as u64);
        let waits = waits_since(fleet, others);
        let since = waits.map_or(now, |since| since.min(now));
        let whole = i64::try_from(fleet.quarantine.as_millis()).unwrap_or(i64::MAX);
        let alone = new && waits.is_none();
        wait_in_words(Some(since), whole, now, alone.then_some(me))
    }

    fn learn(&mut self, reply: Reply<Fleet>) {
        self.believe(&reply);
        self.look_for_duplicate(reply.value.before.as_ref());
        let now = self
            .contender
            .clock
            .now_us()
            .unwrap_or(reply.now_us)
            .div_euclid(1000);
        if self.started_at == 0 {
            self.started_at = now;
        }
        let fleet = reply.value;
        let others_know = others_know(&fleet, &self.contender.me.instance, now);
        let change = self.epoch.learn(Epoch {
            incarnation: reply.incarnation.clone(),
            id: fleet.id.clone(),
            born: fleet.born,
            open: fleet.open,
            quarantine: fleet.quarantine,
            first_seen: reply.received,
            open_seen: None,
            others_know,
        });
        self.tell(change, &fleet, &reply.incarnation, now);
        let contender = &self.contender;
        let live: Vec<InstanceId> = fleet
            .instances
            .iter()
            .filter(|(_, i)| i.seen.abs_diff(now) <= LIVE_WITHIN_MS as u64)
            .filter(|(id, i)| !fleet.is_draining(id, i))
            .map(|(id, _)| id.clone())
            .collect();
        contender.set_live(live.into());
        let here = fleet.instances.iter();
        let here = here.filter(|(_, i)| i.seen.abs_diff(now) <= LIVE_WITHIN_MS as u64);
        let here: Vec<InstanceId> = here.map(|(id, _)| id.clone()).collect();
        let config = self.loaded.borrow().digest.clone();
        if self.config != config {
            (self.config, self.mark_at) = (config, Some(AT_ONCE));
        } else if self.here != here && self.mark_at != Some(AT_ONCE) {
            self.mark_at = Some(reply.received + STEADY_FOR);
        }
        self.here = here;
        let drained = self.drain.is_on();
        let shown = fleet.drains.contains(&contender.me.instance);
        if let Some(by) = fleet.drained_by.get(&contender.me.instance) {
            self.drained_by.clone_from(by);
        }
        self.drain.learn(shown, change == EpochChange::Replaced);
        let drain = self.drain.is_on();
        if drain != drained {
            contender.set_draining(drain);
            info!(
                drain,
                by = self.drained_by,
                "this instance was asked to {}",
                if drain {
                    "drain: it claims nothing more"
                } else {
                    "claim again"
                }
            );
        }
    }
}

/// How far the wall clock of each host is ahead of the store's clock (`shown`), ms. A heartbeat has two times: what the
/// store's clock showed, and what its instance believed. They are apart while it doubts the store, and then one of them
/// dates it ([`belief::in_doubt`]). A clock may have been stepped since that heartbeat, and an instance that has just
/// started knows only its host's `wall` clock.
fn walls(fleet: &Fleet, me: &InstanceId, shown: i64, believed: i64, wall: i64) -> Vec<i64> {
    let others = fleet.instances.iter().filter(|(id, _)| *id != me);
    let others = others.filter_map(|(_, i)| {
        let doubt = i.clock_doubt_ms.unwrap_or(0);
        let (by_store, by_belief) = match i.seen.saturating_add(doubt) {
            store if belief::in_doubt(i.seen, store) => (store, i.seen),
            _ => (i.seen, i.seen.saturating_sub(doubt)),
        };
        let same = [
            (by_store, shown),
            (by_belief, shown),
            (by_belief, believed),
            (by_belief, wall),
        ];
        let is_same = |(then, now): &(i64, i64)| then.abs_diff(*now) <= LIVE_WITHIN_MS as u64;
        let (then, now) = same.into_iter().find(|t| i.wall != 0 && is_same(t))?;
        let ahead = i.wall.saturating_sub(then);
        Some(ahead.saturating_add(now).saturating_sub(shown))
    });
    std::iter::once(wall.saturating_sub(shown))
        .chain(others)
        .collect()
}

/// Returns when the list of instances to drain has changed.
async fn drain_hint(events: &mut tokio::sync::broadcast::Receiver<crate::logic::claim::Event>) {
    use tokio::sync::broadcast::error::RecvError;
    loop {
        match events.recv().await {
            Ok(crate::logic::claim::Event::Drain) => return,
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

/// Another instance lives, and was there before the epoch.
fn others_know(fleet: &Fleet, me: &InstanceId, now: i64) -> bool {
    fleet.instances.iter().any(|(id, other)| {
        id != me
            && other.seen.abs_diff(now) <= LIVE_WITHIN_MS as u64
            && other.started_at < fleet.born
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clocks_of_hosts_are_compared_by_whichever_time_their_heartbeats_have() {
        const NOW: i64 = 1_800_000_000_000;
        const HOUR: i64 = 3_600_000;
        let info = |seen: i64, wall: i64| Info {
            seen,
            host: "h".into(),
            process: 1,
            version: "0".into(),
            config: "c".into(),
            wall,
            ..Info::default()
        };
        let instances = [
            ("me", info(NOW, NOW + 1_000_000)),
            ("before-the-step", info(NOW - 900, NOW - 900 + 20)),
            ("by-the-store", info(NOW + HOUR - 500, NOW - 500)),
            ("long-gone", info(NOW - 60_000, NOW)),
            ("tells-none", info(NOW, 0)),
        ];
        let fleet = Fleet {
            id: "e".into(),
            before: None,
            born: NOW,
            quarantine: Duration::ZERO,
            open: true,
            instances: instances
                .map(|(id, i)| (InstanceId::new(id), i))
                .into_iter()
                .collect(),
            drains: vec![],
            drained_by: Default::default(),
        };
        let me = InstanceId::new("me");
        // The store is an hour ahead: of what was believed, or, to one that has just started, of its host's clock.
        for believed in [NOW, NOW + HOUR] {
            let mut all = walls(&fleet, &me, NOW + HOUR, believed, NOW + 7);
            all.sort_unstable();
            let dated = if believed == NOW { 20 } else { 27 };
            assert_eq!(all, [-HOUR, -HOUR + 7, -HOUR + dated]);
        }

        // One that starts now on a host whose clock is wrong, too, learns from those that do not believe the store.
        let doubts = Info {
            clock_doubt_ms: Some(HOUR),
            ..info(NOW - 300, NOW - 290)
        };
        let mut fleet = fleet;
        fleet.instances = [("doubts", doubts)]
            .map(|(id, i)| (InstanceId::new(id), i))
            .into();
        let lost = NOW - HOUR / 4;
        let all = walls(&fleet, &me, NOW + HOUR, NOW + HOUR, lost);
        assert_eq!(all, [lost - NOW - HOUR, -HOUR + 10]);

        // The store was five seconds ahead before, which those who doubted it date their heartbeats by all the same.
        let doubted = Info {
            clock_doubt_ms: Some(5000),
            ..info(NOW + 4700, NOW - 290)
        };
        fleet.instances = [("doubted", doubted)]
            .map(|(id, i)| (InstanceId::new(id), i))
            .into();
        for believed in [NOW, NOW + HOUR] {
            let all = walls(&fleet, &me, NOW + HOUR, believed, NOW + 7);
            let dated = if believed == NOW { 10 } else { 17 };
            assert_eq!(all, [-HOUR + 7, -HOUR + dated]);
        }
        // It shows that time still, or is right again.
        for shown in [NOW + 5000, NOW] {
            let all = walls(&fleet, &me, shown, NOW, NOW + 7);
            assert_eq!(all, [NOW + 7 - shown, NOW + 10 - shown]);
        }
    }
}
