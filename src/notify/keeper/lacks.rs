//! Jobs that other instances have, and the notifier's own configuration lacks. They are told over the channels of its
//! `[defaults]`: what the job's own configuration says, only the other instances know.

use std::collections::BTreeSet;

use tracing::{debug, info, warn};

use super::Keeper;
use crate::{
    clock::Boottime,
    logic::{
        backoff::Throttle,
        claim::LIBRARY,
        notify::stand::{Lacks, lacking},
    },
    model::JobName,
    store,
};

/// The time between two looks: longer than instances take to mark a job that was removed as nobody's.
const EVERY: std::time::Duration = std::time::Duration::from_secs(20);
/// What lasts is logged again after this time.
const WARN_AGAIN: std::time::Duration = std::time::Duration::from_secs(3600);

/// What the notifier knows of them.
#[derive(Default)]
pub(super) struct Lacking {
    pub(super) jobs: BTreeSet<JobName>,
    /// Those of the last look, which may be about to go.
    seen: BTreeSet<JobName>,
    next: Option<Boottime>,
    said: Throttle,
    /// What was logged last.
    last: Option<Lacks>,
}

impl Keeper {
    /// Looks for them, if it is time.
    pub(super) async fn look_for_lacking(&mut self, now: Boottime) {
        if self.lacking.next.is_some_and(|next| now < next) {
            return;
        }
        self.lacking.next = Some(now + EVERY);
        let seen = match self.jobs_of_others().await {
            Ok(seen) => seen,
            Err(e) => return debug!(error = %e, "cannot look for jobs of other instances"),
        };
        self.lacking.jobs = lacking(&self.lacking.jobs, &self.lacking.seen, &seen);
        self.lacking.seen = seen;
        self.say_lacking(now);
        for name in &self.lacking.jobs {
            self.pending.add(name.clone(), self.heard);
        }
    }

    /// The jobs that some other instance has enabled, and this configuration does not have.
    async fn jobs_of_others(&self) -> Result<BTreeSet<JobName>, store::Error> {
        let mut names = self.asking.ask(|s| async move { s.jobs().await }).await?;
        names.retain(|name| !self.config.jobs.contains_key(name));
        if names.is_empty() {
            return Ok(BTreeSet::new());
        }
        let states = self.asking.states(names.clone()).await?;
        let had = |state: &store::Observation| {
            let state = state.as_ref().ok().and_then(Option::as_ref);
            // A program that uses the library tells its people itself.
            state.is_some_and(|st| st.off == 0 && !st.schedule.is_empty() && st.schedule != LIBRARY)
        };
        let all = names.into_iter().zip(&states.value);
        Ok(all.filter(|(_, s)| had(s)).map(|(name, _)| name).collect())
    }

    /// What the lease says of them, so that each instance and each command can.
    pub(super) fn lacks(&self) -> Option<Lacks> {
        Lacks::of(&self.lacking.jobs, &self.config.default_channels)
    }

    /// The configuration is another one.
    pub(super) fn lacks_less(&mut self) {
        let jobs = &self.config.jobs;
        self.lacking.jobs.retain(|name| !jobs.contains_key(name));
        self.lacking.seen.retain(|name| !jobs.contains_key(name));
    }

    fn say_lacking(&mut self, now: Boottime) {
        let lacks = self.lacks();
        let new = lacks != self.lacking.last;
        let Some(lacks) = lacks else {
            if new {
                info!("this instance's configuration has all jobs of the fleet now");
            }
            self.lacking.said.over();
            self.lacking.last = None;
            return;
        };
        if new {
            self.lacking.said.over();
        }
        if self.lacking.said.lets(now, WARN_AGAIN) {
            warn!(
                jobs = lacks.names(),
                "other instances have jobs that the configuration of this instance, which sends the fleet's \
                 notifications, lacks: {}; give all instances the same jobs",
                lacks.told()
            );
        }
        self.lacking.last = Some(lacks);
    }
}
