//! Leases that others hold, as this instance has seen them: which lapse, and when to look again.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

use crate::{
    clock::Boottime,
    logic::{
        claim::{Observed, Open, Target},
        observe::Sighting,
    },
    model::{JobName, Occurrence},
};

#[derive(Debug, Default)]
pub(super) struct Watches {
    seen: Mutex<Seen>,
    /// A watch was added that is due before all others.
    pub(super) changed: Notify,
}

#[derive(Debug, Default)]
struct Seen {
    by_job: HashMap<JobName, Vec<Watch>>,
    /// Not later than the earliest `look_at`.
    next: Option<Boottime>,
}

#[derive(Debug)]
struct Watch {
    occurrence: Occurrence,
    seen: Sighting,
    look_at: Boottime,
}

impl Watches {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An open entry, as an answer that came at `received` showed it. True: it was seen unchanged for its whole lease.
    pub(super) fn add(
        &self,
        job: &JobName,
        open: &Open,
        received: Boottime,
        every: Duration,
    ) -> bool {
        let mut seen = self.lock();
        let of_job = seen.by_job.entry(job.clone()).or_default();
        let at = of_job.iter().position(|w| w.occurrence == open.occurrence);
        let w = match at {
            Some(i) => &mut of_job[i],
            None => {
                of_job.push(Watch {
                    occurrence: open.occurrence,
                    seen: Sighting::new(open, received),
                    look_at: received,
                });
                of_job.last_mut().expect("it was put there")
            }
        };
        w.seen.look(open, received);
        let lapsed = w.seen.lapsed(received).is_some();
        w.look_at = match &open.again {
            // The flight that waits for the next attempt watches by itself; this is in case it fails.
            Some(_) => received + w.seen.length(),
            None if lapsed => received + every,
            None => (received + every).min(w.seen.expiry()),
        };
        let look_at = w.look_at;
        if seen.next.is_none_or(|next| look_at < next) {
            seen.next = Some(look_at);
            self.changed.notify_one();
        }
        lapsed
    }

    /// The proof that lets `target` be claimed although somebody holds a lease: on it, or on any other run of the job.
    pub(super) fn lapsed(&self, job: &JobName, target: &Target, now: Boottime) -> Option<Observed> {
        let seen = self.lock();
        let of_job = seen.by_job.get(job)?;
        let own = match target {
            Target::Scheduled(at) => of_job.iter().find(|w| w.occurrence == *at),
            Target::Manual { .. } => None,
        };
        let lapsed = match own {
            Some(w) => w.seen.lapsed(now),
            None => of_job.iter().find_map(|w| w.seen.lapsed(now)),
        };
        lapsed.cloned()
    }

    /// How long until the lease of `at` lapses if it does not change.
    pub(super) fn expiry(&self, job: &JobName, at: Occurrence, now: Boottime) -> Duration {
        let seen = self.lock();
        let watch = seen
            .by_job
            .get(job)
            .and_then(|l| l.iter().find(|w| w.occurrence == at));
        watch.map_or(Duration::MAX, |w| {
            w.seen.expiry().since(now) + Duration::from_millis(1)
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

    /// Drops the watches of what is not open any more, and returns these occurrences.
    pub(super) fn retain(&self, job: &JobName, open: &[Open]) -> Vec<Occurrence> {
        self.keep(job, |w| open.iter().any(|o| o.occurrence == w.occurrence))
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

    /// Not later than the next look that is due; None: nothing is watched.
    pub(super) fn next_look(&self) -> Option<Boottime> {
        self.lock().next
    }

    /// The jobs to look at, each once. They come again after a lease if nobody tells what was seen.
    pub(super) fn due(&self, now: Boottime) -> Vec<JobName> {
        let mut seen = self.lock();
        let mut next = None;
        let mut names = vec![];
        for (job, of_job) in &mut seen.by_job {
            let due = of_job
                .iter_mut()
                .filter(|w| w.look_at <= now)
                .map(|w| w.look_at = now + w.seen.length())
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
