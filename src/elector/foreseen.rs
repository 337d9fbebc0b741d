//! What this instance is about to ask for and will most likely be granted: whoever runs it can get ready.

use std::collections::{HashSet, VecDeque};

use super::{Due, Elector};
use crate::{
    logic::claim::{Overlap, Target},
    model::{JobName, Occurrence, RunId},
};
use parking_lot::{Mutex, MutexGuard};

/// So many at one time. When more are due at one instant, the later ones wait for one another anyway.
const MOST: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Foreseen(Mutex<Sight>);

#[derive(Debug, Default)]
struct Sight {
    /// The newest occurrences that were foreseen, with the run id that the claim for each will carry.
    soon: VecDeque<(JobName, Occurrence, RunId)>,
    /// What was foreseen of these last did not come: somebody else is faster, or the job is paused.
    in_vain: HashSet<JobName>,
}

impl Foreseen {
    fn lock(&self) -> MutexGuard<'_, Sight> {
        self.0.lock()
    }

    fn push(&self, job: JobName, at: Occurrence, run: RunId) {
        let mut sight = self.lock();
        sight.soon.push_back((job, at, run));
        if sight.soon.len() > MOST {
            sight.soon.pop_front();
        }
    }

    /// The run id of `target`, if it was foreseen.
    pub(super) fn run(&self, job: &JobName, target: &Target) -> Option<RunId> {
        let sight = self.lock();
        let found = sight.soon.iter().find(|(j, at, _)| is(job, target, j, *at));
        found.map(|(_, _, run)| *run)
    }

    /// `target` is decided, or cannot be at present. `won`: by this instance, for itself.
    pub(super) fn came(&self, job: &JobName, target: &Target, won: bool) {
        let mut sight = self.lock();
        let before = sight.soon.len();
        sight.soon.retain(|(j, at, _)| !is(job, target, j, *at));
        if won {
            sight.in_vain.remove(job);
        } else if sight.soon.len() < before {
            sight.in_vain.insert(job.clone());
        }
    }

    fn in_vain(&self, job: &JobName) -> bool {
        self.lock().in_vain.contains(job)
    }
}

fn is(job: &JobName, target: &Target, j: &JobName, at: Occurrence) -> bool {
    job == j && *target == Target::Scheduled(at)
}

impl Elector {
    /// Those of `due`, which is about to be, that will most likely be granted to this instance: it goes first for
    /// them, and as far as it knows nothing stands against them. Each comes with the run id it will have.
    pub fn foresee<'d>(
        &self,
        due: impl IntoIterator<Item = &'d Due>,
    ) -> impl Iterator<Item = (JobName, RunId)> {
        let possible = self.halt().is_none()
            && self
                .slots
                .as_ref()
                .is_none_or(|slots| slots.available_permits() > 0);
        let due = due.into_iter().take(if possible { MOST } else { 0 });
        due.filter_map(|due| self.foresee_one(due))
    }

    fn foresee_one(&self, due: &Due) -> Option<(JobName, RunId)> {
        let Target::Scheduled(at) = due.target else {
            return None;
        };
        if self.rank(&due.job, &due.target, None) > 0 {
            return None;
        }
        let likely = self.entry(&due.job, |e| {
            let job = &e.state.definition;
            let free = e.state.account.is_idle() || job.overlap == Overlap::Allow;
            let known = at <= e.state.newest() || e.state.account.has_questions();
            free && !known && e.state.may_be_claimed() && !e.driven
        });
        let likely = likely.filter(|_| !self.foreseen.in_vain(&due.job));
        (likely == Some(true)).then(|| {
            let run = RunId::random();
            self.foreseen.push(due.job.clone(), at, run);
            (due.job.clone(), run)
        })
    }
}
