//! Chooses the runs that this instance will most likely be granted soon, so that their guards can be prepared.

use std::collections::{HashSet, VecDeque};

use super::{Contender, Due};
use crate::{
    logic::claim::{Overlap, Target},
    model::{JobName, Occurrence, RunId},
};
use parking_lot::{Mutex, MutexGuard};

/// How many runs are prepared at once. If more are due at one instant, the later ones wait for each other anyway.
const MOST: usize = 4;

#[derive(Debug, Default)]
pub(super) struct PreparedRuns(Mutex<Runs>);

#[derive(Debug, Default)]
struct Runs {
    /// The newest prepared occurrences, with the run id that the claim for each will carry.
    newest: VecDeque<(JobName, Occurrence, RunId)>,
    /// Jobs whose last prepared run was not granted: another instance is faster, or the job is paused.
    unused: HashSet<JobName>,
}

impl PreparedRuns {
    fn lock(&self) -> MutexGuard<'_, Runs> {
        self.0.lock()
    }

    fn push(&self, job: JobName, at: Occurrence, run: RunId) {
        let mut runs = self.lock();
        runs.newest.push_back((job, at, run));
        if runs.newest.len() > MOST {
            runs.newest.pop_front();
        }
    }

    /// The run id of `target`, if it was prepared.
    pub(super) fn run_id(&self, job: &JobName, target: &Target) -> Option<RunId> {
        let runs = self.lock();
        let found = runs
            .newest
            .iter()
            .find(|(j, at, _)| is(job, target, j, *at));
        found.map(|(_, _, run)| *run)
    }

    /// `target` is decided, or cannot be decided now. `won`: this instance won it, for itself.
    pub(super) fn decided(&self, job: &JobName, target: &Target, won: bool) {
        let mut runs = self.lock();
        let before = runs.newest.len();
        runs.newest.retain(|(j, at, _)| !is(job, target, j, *at));
        if won {
            runs.unused.remove(job);
        } else if runs.newest.len() < before {
            runs.unused.insert(job.clone());
        }
    }

    /// See [`Runs::unused`].
    fn last_was_unused(&self, job: &JobName) -> bool {
        self.lock().unused.contains(job)
    }
}

fn is(job: &JobName, target: &Target, j: &JobName, at: Occurrence) -> bool {
    job == j && *target == Target::Scheduled(at)
}

impl Contender {
    /// The soon due occurrences of `due` that this instance will most likely be granted: it has the first rank for
    /// them, and it knows nothing that prevents them. Each comes with its future run id.
    pub fn runs_to_prepare<'d>(
        &self,
        due: impl IntoIterator<Item = &'d Due>,
    ) -> impl Iterator<Item = (JobName, RunId)> {
        let possible = self.halt().is_none()
            && self
                .slots
                .as_ref()
                .is_none_or(|slots| slots.available_permits() > 0);
        let due = due.into_iter().take(if possible { MOST } else { 0 });
        due.filter_map(|due| self.run_to_prepare(due))
    }

    fn run_to_prepare(&self, due: &Due) -> Option<(JobName, RunId)> {
        let Target::Scheduled(at) = due.target else {
            return None;
        };
        if self.rank(&due.job, &due.target, None) > 0 {
            return None;
        }
        let likely = self.entry(&due.job, |e| {
            let job = &e.state.definition;
            let free = e.state.account.is_idle() || job.overlap == Overlap::Allow;
            let known = at <= e.state.newest() || e.state.account.has_unanswered_claims();
            free && !known && e.state.may_be_claimed() && !e.driven
        });
        let likely = likely.filter(|_| !self.prepared.last_was_unused(&due.job));
        (likely == Some(true)).then(|| {
            let run = RunId::random();
            self.prepared.push(due.job.clone(), at, run);
            (due.job.clone(), run)
        })
    }
}
