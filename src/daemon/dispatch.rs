//! Hands out occurrences at their instants: the timetable, its look-ahead, and the alarm for the exact instant.
//!
//! tokio-cron-scheduler ticks each second, but its tick is only a wake-up: it comes up to half a second late, stops for
//! as long as the wall clock was stepped back, and does not make up for stalls. So a monotonic interval backs it up,
//! and every wake-up reads the store-corrected clock: the next wake-up notices a clock step or a suspend.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::Context;
use tokio::sync::mpsc;
use tokio_cron_scheduler::{Job as TickJob, JobScheduler};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    clock::{Alarm, Boottime, StoreClock, wall_us},
    contender::{Contender, Due, PlanUpdate},
    logic::{
        claim::Target,
        timetable::{self, Timetable},
    },
    model::{JobName, Occurrence, RunId},
};

/// How far ahead occurrences are taken from the timetable and armed: more than two ticks, so that a late tick delays
/// nothing.
const LOOK_AHEAD_MS: i64 = 3000;
const INTERVAL: Duration = Duration::from_millis(1500);
/// How long before an instant its guards are started: several times what that takes on a busy host.
const PREPARE_MS: i64 = 50;

/// Prepares a run that will most likely be granted soon. Must not block.
pub(super) type Prepare = Box<dyn Fn(&JobName, RunId) + Send>;

pub(super) struct Dispatcher {
    contender: Arc<Contender>,
    clock: Arc<StoreClock>,
    plans: mpsc::UnboundedReceiver<PlanUpdate>,
    stop: CancellationToken,
    timetable: Timetable<JobName>,
    /// Armed occurrences by their start instant, Unix ms of the store's clock.
    armed: BTreeMap<i64, Vec<Due>>,
    prepare: Prepare,
    /// Occurrences armed up to this instant (Unix ms, as above) have been prepared.
    prepared: i64,
    alarm: Alarm,
}

impl Dispatcher {
    pub(super) fn new(
        contender: Arc<Contender>,
        clock: Arc<StoreClock>,
        plans: mpsc::UnboundedReceiver<PlanUpdate>,
        prepare: Prepare,
        stop: CancellationToken,
    ) -> anyhow::Result<Self> {
        let alarm = Alarm::new().context("cannot make a timer")?;
        Ok(Self {
            contender,
            clock,
            plans,
            stop,
            timetable: Timetable::new(),
            armed: BTreeMap::new(),
            prepare,
            prepared: 0,
            alarm,
        })
    }

    pub(super) async fn run(mut self) {
        let (tick, mut ticks) = mpsc::channel::<()>(1);
        let scheduler = match start_tick(tick).await {
            Ok(scheduler) => Some(scheduler),
            Err(e) => {
                warn!(error = %e, "tokio-cron-scheduler does not tick: the timetable is woken by the interval alone");
                None
            }
        };
        let mut interval = tokio::time::interval(INTERVAL);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        loop {
            self.contender.health.round();
            let more = self.advance();
            if sd_notify::watchdog_enabled().is_some() {
                // Only this loop may report to the watchdog: a dispatcher that hangs must not look alive.
                super::notify(&[sd_notify::NotifyState::Watchdog]);
            }
            let next = self.wake_at().and_then(|ms| self.clock.when(ms));
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                // Let other tasks run: after a long suspend there is much to hand out.
                () = tokio::task::yield_now(), if more => {}
                update = self.plans.recv() => match update {
                    Some(update) => self.take(update),
                    None => break,
                },
                () = self.alarm.until(next.unwrap_or(Boottime(u64::MAX / 2))), if next.is_some() => {}
                Some(()) = ticks.recv() => {}
                _ = interval.tick() => {}
            }
        }
        if let Some(mut scheduler) = scheduler {
            let _ = scheduler.shutdown().await;
        }
    }

    /// Fires due occurrences and arms those that are due soon. True: there may be more.
    fn advance(&mut self) -> bool {
        if self.contender.store.local_clock() {
            let now = Boottime::now();
            crate::contender::note_sample(self.clock.sample(wall_us(), now, now));
        }
        // First take in all waiting updates of the plan.
        while let Ok(update) = self.plans.try_recv() {
            self.take(update);
        }
        // Piece by piece: after a long suspend all due occurrences might not fit into memory at once, and the contender
        // folds those that are too late to start.
        let more = self.hand_out();
        self.prepare();
        more
    }

    /// The next instant at which to fire, arm or prepare something, Unix ms of the store's clock.
    fn wake_at(&self) -> Option<i64> {
        let due = self.armed.keys().next().copied();
        let soon = self.armed.range(self.prepared + 1..).next();
        due.into_iter()
            .chain(soon.map(|(ms, _)| ms - PREPARE_MS))
            .min()
    }

    /// Has the guards started that will be needed soon.
    fn prepare(&mut self) {
        let Some(now_us) = self.clock.now_us() else {
            return;
        };
        let until = now_us.div_euclid(1000) + PREPARE_MS;
        // After a backward clock step, prepare again for what follows.
        let from = self.prepared.min(until);
        // Half open: an empty range is fine, while a range that ends before it starts panics.
        let soon = self.armed.range(from + 1..until + 1);
        let soon = soon.flat_map(|(_, due)| due);
        for (job, run) in self.contender.runs_to_prepare(soon) {
            (self.prepare)(&job, run);
        }
        self.prepared = until;
    }

    /// True: there may be more.
    fn hand_out(&mut self) -> bool {
        let Some(now_us) = self.clock.now_us() else {
            return false;
        };
        let now = now_us.div_euclid(1000);
        // In the order of the occurrences: first those armed, then newly due ones, and only then future ones.
        self.fire(now);
        for (job, backlog) in self.timetable.take_backlog(Occurrence(now)) {
            self.contender.overdue(&job, backlog, false);
        }
        let more = self.look_ahead(Occurrence(now + LOOK_AHEAD_MS));
        self.fire(now);
        more
    }

    /// Hands armed occurrences that are due to the contender.
    fn fire(&mut self, now: i64) {
        let later = self.armed.split_off(&(now + 1));
        let due: Vec<Due> = std::mem::replace(&mut self.armed, later)
            .into_values()
            .flatten()
            .collect();
        if !due.is_empty() {
            self.contender.due(due);
        }
    }

    /// Takes occurrences that start up to `until` out of the timetable. True: there were some.
    fn look_ahead(&mut self, until: Occurrence) -> bool {
        let taken = self.timetable.take_due(until);
        let any = !taken.is_empty();
        self.keep_armed(taken);
        any
    }

    fn keep_armed(&mut self, taken: Vec<timetable::Due<JobName>>) {
        for due in taken {
            let Some(job) = self.contender.job(&due.key) else {
                continue;
            };
            self.armed.entry(due.start_at_ms).or_default().push(Due {
                job: due.key,
                target: Target::Scheduled(due.occurrence),
                start_at: due.start_at_ms,
                start_by: due
                    .start_at_ms
                    .saturating_add(job.start_within.as_millis() as i64),
                overdue: false,
                missed: vec![],
            });
        }
    }

    fn take(&mut self, update: PlanUpdate) {
        let (name, after) = match &update {
            PlanUpdate::PlanAfter(job, after) => (&job.name, *after),
            PlanUpdate::Remove(name) => (name, Occurrence(i64::MIN)),
        };
        // Occurrences that the old schedule planned before the change still count as due, also while they wait for
        // their jitter.
        while let Some((at, _)) = self.timetable.upcoming(name)
            && at <= after
            && let Some(due) = self.timetable.take_next(name)
        {
            self.keep_armed(vec![due]);
        }
        // Armed occurrences after the change are dropped; the new schedule plans them again, or does not.
        for due in self.armed.values_mut() {
            due.retain(|d| {
                d.job != *name || matches!(d.target, Target::Scheduled(at) if at <= after)
            });
        }
        self.armed.retain(|_, due| !due.is_empty());
        self.timetable.remove(name);
        if let PlanUpdate::PlanAfter(job, after) = &update
            && job.enabled
            && !job.schedules.is_empty()
        {
            self.timetable
                .insert(job.name.clone(), job.schedules.clone(), job.jitter, *after);
        }
    }
}

async fn start_tick(
    tick: mpsc::Sender<()>,
) -> Result<JobScheduler, tokio_cron_scheduler::JobSchedulerError> {
    // It goes by the wall clock of the host that simulates.
    #[cfg(test)]
    if crate::simulation::simulated() {
        return Err(tokio_cron_scheduler::JobSchedulerError::CantInit);
    }
    let scheduler = JobScheduler::new().await?;
    let job = TickJob::new_async("* * * * * *", move |_, _| {
        let tick = tick.clone();
        Box::pin(async move {
            let _ = tick.try_send(());
        })
    })?;
    scheduler.add(job).await?;
    scheduler.start().await?;
    Ok(scheduler)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::{
        config::{self, Job},
        contender::{Epoch, Parts},
        model::InstanceId,
        store::memory::MemoryStore,
    };

    fn job(lines: &str) -> Arc<Job> {
        let text = format!("[jobs.work]\ncommand = [\"true\"]\n{lines}\n");
        let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None).expect("valid");
        config.jobs.values().next().expect("a job").clone()
    }

    /// A dispatcher whose store's clock shows `now`.
    fn dispatcher(now: i64) -> Dispatcher {
        let clock = Arc::new(StoreClock::default());
        let here = Boottime::now();
        clock.sample(now * 1000, here, here);
        let (plans, planned) = mpsc::unbounded_channel();
        let parts = Parts {
            store: Arc::new(MemoryStore::new_with_clock(Arc::new(move || now * 1000))),
            clock: clock.clone(),
            instance: InstanceId::new("a"),
            host: "a".into(),
            retry: config::StoreRetry {
                attempts: 0,
                interval: Duration::ZERO,
                exponential: false,
                max_interval: Duration::ZERO,
                jitter: false,
            },
            max_parallel: None,
            journal: mpsc::channel(10).0,
            plans,
            health: std::sync::Arc::default(),
            last_will: None,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        let contender = Arc::new(Contender::build(parts, Box::new(|_| {})));
        let prepare = Box::new(|_: &JobName, _| {});
        Dispatcher::new(contender, clock, planned, prepare, CancellationToken::new())
            .expect("a timer")
    }

    fn armed(d: &Dispatcher) -> Vec<i64> {
        let all = d.armed.values().flatten();
        all.map(|due| match due.target {
            Target::Scheduled(at) => at.0,
            Target::Manual { .. } => 0,
        })
        .collect()
    }

    const HOUR: i64 = 3_600_000;
    const NOON: i64 = 1_800_000_000_000 - 1_800_000_000_000 % HOUR;

    #[tokio::test]
    async fn another_schedule_drops_nothing_that_waits_for_its_jitter() {
        // The jitter is the same for one occurrence: take a time at which it has not passed.
        let old = job("schedule = \"@every 1h\"\njitter = \"30m\"");
        let mut d = dispatcher(NOON + 1);
        d.contender.set_job(old.clone());
        d.take(PlanUpdate::PlanAfter(old, Occurrence(NOON - 1)));
        assert_eq!(armed(&d), [0; 0]);
        let new = job("schedule = \"@every 7h\"");
        d.take(PlanUpdate::PlanAfter(new, Occurrence(NOON + 1)));
        assert_eq!(armed(&d), [NOON]);
    }

    #[tokio::test]
    async fn a_changed_schedule_at_the_instant_keeps_or_replaces_what_is_armed() {
        for (change, kept) in [(-2, false), (0, true), (2, true)] {
            let old = job("schedule = \"@every 1h\"");
            let mut d = dispatcher(NOON - 100);
            d.contender.set_job(old.clone());
            d.take(PlanUpdate::PlanAfter(old, Occurrence(NOON - 1000)));
            d.advance();
            assert_eq!(armed(&d), [NOON]);
            // The new one has the same instant, and another.
            let new = job("schedule = [\"@every 1h\", \"@every 30m\"]");
            d.contender.set_job(new.clone());
            d.take(PlanUpdate::PlanAfter(new, Occurrence(NOON + change)));
            let planned_anew = d.timetable.upcoming(&JobName::new("work"));
            let next = planned_anew.map(|(at, _)| at.0);
            if kept {
                assert_eq!((armed(&d), next), (vec![NOON], Some(NOON + HOUR / 2)));
            } else {
                assert_eq!((armed(&d), next), (vec![], Some(NOON)));
            }
        }
    }

    #[tokio::test]
    async fn guards_are_prepared_shortly_before_their_instant_and_once() {
        for (before, expected, wake) in [
            (PREPARE_MS + 10, 0, NOON - PREPARE_MS),
            (PREPARE_MS - 10, 1, NOON),
        ] {
            // Again where this took so long that another moment came.
            loop {
                let job = job("schedule = \"@every 1h\"");
                let mut d = dispatcher(NOON - before);
                let (asked, mut prepared) = mpsc::unbounded_channel();
                d.prepare =
                    Box::new(move |job: &JobName, run| drop(asked.send((job.clone(), run))));
                d.contender.set_job(job.clone());
                let fleet = d.contender.store.heartbeat(None).await.expect("a reply");
                let epoch = Epoch {
                    incarnation: fleet.incarnation,
                    id: fleet.value.id,
                    born: fleet.value.born,
                    open: true,
                    quarantine: Duration::ZERO,
                    first_seen: Boottime::now(),
                    open_seen: None,
                    others_know: false,
                };
                assert_eq!(d.contender.register(&epoch).await.expect("an answer"), 0);
                d.take(PlanUpdate::PlanAfter(job.clone(), Occurrence(NOON - 1000)));
                d.advance();
                d.advance();
                let now = d.clock.now_us().expect("a time") / 1000;
                if now >= NOON - before + 10 {
                    continue;
                }
                assert_eq!(d.wake_at(), Some(wake), "{before} ms before");
                let prepared: Vec<_> = std::iter::from_fn(|| prepared.try_recv().ok()).collect();
                assert_eq!(prepared.len(), expected, "{before} ms before");
                assert!(prepared.iter().all(|(name, _)| *name == job.name));
                break;
            }
        }
    }

    #[tokio::test]
    async fn a_removed_job_is_planned_no_more() {
        let old = job("schedule = \"@every 1h\"");
        let mut d = dispatcher(NOON - 100);
        d.contender.set_job(old.clone());
        d.take(PlanUpdate::PlanAfter(old.clone(), Occurrence(NOON - 1000)));
        d.advance();
        d.take(PlanUpdate::Remove(old.name.clone()));
        assert_eq!(armed(&d), [0; 0]);
        assert!(!d.timetable.contains(&old.name));
    }
}
