//! The jobs at which the notifier has yet to look.

use std::collections::{BTreeSet, VecDeque};

use crate::model::JobName;

/// The oldest first, each with the time after which it may have changed, Unix ms.
#[derive(Default)]
pub(super) struct Pending {
    queue: VecDeque<(JobName, i64)>,
    names: BTreeSet<JobName>,
}

impl Pending {
    pub(super) fn add(&mut self, name: JobName, heard: i64) {
        if self.names.insert(name.clone()) {
            self.queue.push_back((name, heard));
        }
    }

    pub(super) fn take(&mut self, most: usize) -> Vec<(JobName, i64)> {
        let some: Vec<_> = self.queue.drain(..most.min(self.queue.len())).collect();
        for (name, _) in &some {
            self.names.remove(name);
        }
        some
    }

    /// They could not be judged: they stay the oldest.
    pub(super) fn put_back(&mut self, some: Vec<(JobName, i64)>) {
        for (name, heard) in some.into_iter().rev() {
            // It may have been heard of again meanwhile.
            if !self.names.insert(name.clone()) {
                self.queue.retain(|(other, _)| *other != name);
            }
            self.queue.push_front((name, heard));
        }
    }

    pub(super) fn oldest(&self) -> Option<i64> {
        self.queue.front().map(|(_, heard)| *heard)
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
