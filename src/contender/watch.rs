//! The leases of other instances as this instance has seen them: which have lapsed, and when to poll again.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tracing::debug;

use super::Contender;
use crate::{
    clock::Boottime,
    logic::{
        claim::{Observed, Open, State, Target},
        contest::JobState,
        observe::{self, WatchedLease},
    },
    model::{JobName, Occurrence},
    store,
};

#[derive(Debug, Default)]
pub(super) struct Watches {
    seen: Mutex<Seen>,
    /// Woken when an added watch is due before all others.
    pub(super) changed: Notify,
}

#[derive(Debug, Default)]
struct Seen {
    by_job: HashMap<JobName, Vec<Watch>>,
    /// A lower bound of all `look_at`.
    next: Option<Boottime>,
}

#[derive(Debug)]
struct Watch {
    occurrence: Occurrence,
    lease: WatchedLease,
    look_at: Boottime,
}

impl Watch {
    fn new(open: &Open, received: Boottime) -> Self {
        Self {
            occurrence: open.run.occurrence,
            lease: WatchedLease::new(open, received),
            look_at: received,
        }
    }
}

impl Watches {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock()
    }

    /// Adds an open entry, in the state that an answer received at `received` showed. True: it has been unchanged for
    /// its whole lease.
    pub(super) fn add(
        &self,
        job: &JobName,
        open: &Open,
        received: Boottime,
        every: Duration,
    ) -> bool {
        let mut seen = self.lock();
        let of_job = seen.by_job.entry(job.clone()).or_default();
        let at = of_job
            .iter()
            .position(|w| w.occurrence == open.run.occurrence);
        let w = match at {
            Some(i) => &mut of_job[i],
            None => {
                of_job.push(Watch::new(open, received));
                of_job.last_mut().expect("it was added above")
            }
        };
        w.lease.look(open, received);
        let lapsed = w.lease.lapsed(received).is_some();
        w.look_at = match &open.next_attempt {
            // The flight that waits for the next attempt also watches; this is a fallback.
            Some(_) => received + w.lease.length(),
            None if lapsed => received + every,
            None => (received + every).min(w.lease.expiry()),
        };
        let look_at = w.look_at;
        if seen.next.is_none_or(|next| look_at < next) {
            seen.next = Some(look_at);
            self.changed.notify_one();
        }
        lapsed
    }

    /// The proof that allows claiming `target` although another run holds a lease, on it or on another occurrence of
    /// the job.
    pub(super) fn lapsed(&self, job: &JobName, target: &Target, now: Boottime) -> Option<Observed> {
        let seen = self.lock();
        let of_job = seen.by_job.get(job)?;
        let own = match target {
            Target::Scheduled(at) => of_job.iter().find(|w| w.occurrence == *at),
            Target::Manual { .. } => None,
        };
        let lapsed = match own {
            Some(w) => w.lease.lapsed(now),
            None => of_job.iter().find_map(|w| w.lease.lapsed(now)),
        };
        lapsed.cloned()
    }

    /// How long until the lease of `at` lapses, unless it is renewed.
    pub(super) fn expiry(&self, job: &JobName, at: Occurrence, now: Boottime) -> Duration {
        let seen = self.lock();
        let watch = seen
            .by_job
            .get(job)
            .and_then(|l| l.iter().find(|w| w.occurrence == at));
        watch.map_or(Duration::MAX, |w| {
            w.lease.expiry().since(now) + Duration::from_millis(1)
        })
    }

    pub(super) fn has(&self, job: &JobName, at: Occurrence) -> bool {
        self.lock()
            .by_job
            .get(job)
            .is_some_and(|l| l.iter().any(|w| w.occurrence == at))
    }

    pub(super) fn drop_one(&self, job: &JobName, at: Occurrence) {
        self.keep(job, |w| w.occurrence != at);
    }

    pub(super) fn forget(&self, job: &JobName) {
        self.keep(job, |_| false);
    }

    /// Drops the watches of occurrences that are no longer open, and returns them.
    pub(super) fn retain(&self, job: &JobName, open: &[Open]) -> Vec<Occurrence> {
        self.keep(job, |w| {
            open.iter().any(|o| o.run.occurrence == w.occurrence)
        })
    }

    fn keep(&self, job: &JobName, keep: impl Fn(&Watch) -> bool) -> Vec<Occurrence> {
        let mut gone = vec![];
        let mut seen = self.lock();
        if let Some(of_job) = seen.by_job.get_mut(job) {
            of_job.retain(|w| {
                let keep = keep(w);
                if !keep {
                    gone.push(w.occurrence);
                }
                keep
            });
            if of_job.is_empty() {
                seen.by_job.remove(job);
            }
        }
        gone
    }

    /// A lower bound of the next poll. None: nothing is watched.
    pub(super) fn next_look(&self) -> Option<Boottime> {
        self.lock().next
    }

    /// The jobs to poll now, each once. Without an answer about a job, it comes again after a lease.
    pub(super) fn due(&self, now: Boottime) -> Vec<JobName> {
        let mut seen = self.lock();
        let mut next = None;
        let mut names = vec![];
        for (job, of_job) in &mut seen.by_job {
            let due = of_job
                .iter_mut()
                .filter(|w| w.look_at <= now)
                .map(|w| w.look_at = now + w.lease.length())
                .count();
            if due > 0 {
                names.push(job.clone());
            }
            next = of_job.iter().map(|w| w.look_at).chain(next).min();
        }
        seen.next = next;
        names
    }

    pub(super) fn postpone(&self, jobs: &[JobName], at: Boottime) {
        let mut seen = self.lock();
        for job in jobs {
            for w in seen.by_job.get_mut(job).into_iter().flatten() {
                w.look_at = at;
            }
        }
        seen.next = Some(seen.next.map_or(at, |next| next.min(at)));
    }
}

impl Contender {
    /// How often to poll a lease: the first in rank polls often enough to take over a tenth of a lease after it lapsed,
    /// and the others are its substitutes.
    pub(super) fn poll_every(&self, job: &JobName, open: &Open) -> Duration {
        let lease = observe::length(open);
        match self.rank(
            job,
            &Target::Scheduled(open.run.occurrence),
            Some(&open.run.instance),
        ) {
            0 => lease / 12,
            _ => lease / 2,
        }
    }

    /// Polls the leases of other instances, and takes over when one lapses. Runs until `stop`.
    pub async fn watch(self: Arc<Self>) {
        loop {
            // At most a second, because a suspend stops the runtime's timers; at least a little, so that many polls
            // become one.
            let next = self.watches.next_look();
            let wait = next.map_or(Duration::from_secs(1), |at| at.since(Boottime::now()));
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.watches.changed.notified() => continue,
                () = tokio::time::sleep(wait.clamp(Duration::from_millis(5), Duration::from_secs(1))) => {}
            }
            if next.is_none_or(|at| at > Boottime::now()) {
                continue;
            }
            let due = self.watches.due(Boottime::now());
            for names in due.chunks(store::BATCH) {
                match self.store.observe(names).await {
                    Ok(reply) => {
                        self.note_clock(&reply);
                        for (name, state) in names.iter().zip(&reply.value) {
                            self.observed(name, state.as_ref(), reply.received);
                        }
                    }
                    // A state that cannot be read must not hide the others.
                    Err(e) if !e.is_transient() => {
                        for name in names {
                            match self.store.observe(std::slice::from_ref(name)).await {
                                Ok(reply) => {
                                    let state = reply.value.first().and_then(Option::as_ref);
                                    self.observed(name, state, reply.received);
                                }
                                Err(e) => {
                                    debug!(job = %name, error = %e, "cannot read the lease of another instance");
                                }
                            }
                        }
                    }
                    Err(e) => {
                        debug!(error = %e, "cannot read the leases of other instances");
                        self.watches
                            .postpone(names, Boottime::now() + Duration::from_millis(200));
                        break;
                    }
                }
            }
        }
    }

    fn observed(self: &Arc<Self>, job: &JobName, state: Option<&State>, received: Boottime) {
        let open = state.map(|s| s.open.as_slice()).unwrap_or_default();
        for gone in self.watches.retain(job, open) {
            debug!(job = %job, occurrence = %gone, "ended on another instance");
            self.state(job, JobState::ended_elsewhere);
        }
        for e in open {
            if !self.watches.has(job, e.run.occurrence) {
                continue;
            }
            let lapsed = self.watch_lease(job, e, received);
            if e.next_attempt.is_some() || lapsed {
                self.claim_next_attempt(job.clone(), e.run.occurrence);
            }
        }
    }
}
