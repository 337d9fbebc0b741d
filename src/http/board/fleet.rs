//! Jobs that other instances have, and this instance's configuration lacks.

use std::collections::BTreeSet;

use crate::{
    config::Config,
    logic::claim::LIBRARY,
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
