//! What this instance is about to ask for and will most likely be granted: whoever runs it can get ready.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{Due, Elector};
use crate::{
    logic::claim::{Overlap, Target},
    model::{JobName, Occurrence, RunId},
};

/// So many at one time. When more are due at one instant, the later ones wait for one another anyway.
const MOST: usize = 4;

/// The newest occurrences that were foreseen, with the run id that the claim for each will carry.
#[derive(Debug, Default)]
pub(super) struct Foreseen(Mutex<VecDeque<(JobName, Occurrence, RunId)>>);

impl Foreseen {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(JobName, Occurrence, RunId)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: JobName, at: Occurrence, run: RunId) {
        let mut all = self.lock();
        all.push_back((job, at, run));
        if all.len() > MOST {
            all.pop_front();
        }
    }

    /// The run id of `target`, if it was foreseen.
    pub(super) fn run(&self, job: &JobName, target: &Target) -> Option<RunId> {
        let all = self.lock();
        let found = all.iter().find(|(j, at, _)| is(job, target, j, *at));
        found.map(|(_, _, run)| *run)
    }

    /// Forgets `target`, and tells whether it was foreseen.
    pub(super) fn forget(&self, job: &JobName, target: &Target) -> bool {
        let mut all = self.lock();
        let before = all.len();
        all.retain(|(j, at, _)| !is(job, target, j, *at));
        all.len() < before
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
        let possible = !self.draining()
            && self.unfit().is_none()
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
            let free = e.runs.active.is_empty() || e.job.overlap == Overlap::Allow;
            free && e.ready && !e.driven && !e.in_vain && at > e.known && e.asked.is_empty()
        });
        (likely == Some(true)).then(|| {
            let run = RunId::random();
            self.foreseen.push(due.job.clone(), at, run);
            (due.job.clone(), run)
        })
    }
}
