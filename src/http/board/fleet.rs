//! Jobs that other instances have, and this instance's configuration lacks.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use crate::{
    config::{self, CatchUp, Command, Config, Lease, OnStateLoss, Output},
    logic::claim::{LIBRARY, OnCrash, Overlap},
    model::{JobName, is_name},
    store::{self, Asking},
};

/// The jobs that some other instance has enabled, and this configuration does not have.
pub(super) async fn elsewhere(
    store: &Asking,
    config: &Config,
) -> Result<BTreeSet<JobName>, store::Error> {
    let mut names = store.ask(|s| async move { s.jobs().await }).await?;
    // Another program may have written others.
    names.retain(|name| !config.jobs.contains_key(name) && is_name(name.as_str()));
    if names.is_empty() {
        return Ok(BTreeSet::new());
    }
    let states = store.states(names.clone()).await?;
    let had = |state: &store::Observation| {
        let state = state.as_ref().ok().and_then(Option::as_ref);
        // A program that uses the library plans its job itself.
        state.is_some_and(|st| st.off == 0 && !st.schedule.is_empty() && st.schedule != LIBRARY)
    };
    let all = names.into_iter().zip(&states.value);
    Ok(all.filter(|(_, s)| had(s)).map(|(name, _)| name).collect())
}

/// What stands for the definition of a job that only other instances know: one without a schedule, by which nothing
/// here runs.
pub(super) fn unknown(name: &JobName) -> Arc<config::Job> {
    let none = Duration::ZERO;
    Arc::new(config::Job {
        name: name.clone(),
        description: None,
        tags: Arc::default(),
        enabled: true,
        schedules: Arc::default(),
        schedule_text: Arc::default(),
        timezone: "UTC".into(),
        jitter: none,
        command: Command::Argv(vec![]),
        env: Arc::default(),
        pass_env: Arc::default(),
        working_dir: None,
        user: None,
        group: None,
        new_privileges: false,
        timeout: None,
        grace: none,
        lease: Arc::new(Lease {
            length: none,
            renew_every: none,
            trust: none,
            kill_budget: none,
            quarantine: none,
        }),
        overlap: Overlap::Skip,
        on_crash: OnCrash::Fail,
        on_state_loss: OnStateLoss::Skip,
        max_attempts: 1,
        retry: None,
        start_within: none,
        catch_up: CatchUp::Latest,
        success_codes: Arc::default(),
        output: Output {
            keep: 0,
            log: false,
        },
        alarms: Arc::default(),
        digest: String::new(),
        schedule_digest: "".into(),
    })
}
