//! Jobs that other instances have, and this instance's configuration lacks.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use crate::{
    config::{self, Config},
    logic::claim::LIBRARY,
    model::JobName,
    store::{self, Asking},
};

/// The jobs that some other instance has enabled, and this configuration does not have.
pub(super) async fn elsewhere(
    store: &Asking,
    config: &Config,
) -> Result<BTreeSet<JobName>, store::Error> {
    let mut names = store.ask(|s| async move { s.jobs().await }).await?;
    names.retain(|name| !config.jobs.contains_key(name));
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

/// What stands for the definition of a job that only other instances know: one without a schedule.
pub(super) fn unknown(name: &JobName) -> Option<Arc<config::Job>> {
    let text = format!("[jobs.{:?}]\ncommand = 'true'\n", name.as_str());
    let config = config::parse(&text, Path::new("jobs.toml"), &|_| None).ok()?;
    config.jobs.values().next().cloned()
}
