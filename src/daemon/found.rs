//! The first start of a fleet, without the quarantine: somebody says that nothing of it runs anywhere else.

use std::{fmt, time::Duration};

use tracing::{info, warn};

use crate::{
    clock::Boottime,
    logic::backoff::Throttle,
    model::RunId,
    store::{Fleet, LIVE_WITHIN_MS, Store},
    words,
};

/// Time between two questions while the store does not answer.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// Time between two warnings that it does not.
const WARN_AGAIN: Duration = Duration::from_secs(10);

/// The store knows a fleet already, so the statement is wrong.
#[derive(Debug)]
pub(crate) struct NotNew {
    /// What it knows.
    what: String,
}

impl NotNew {
    pub(crate) const HINT: &str = "start it without --new-fleet: it waits only if the store has lost its data, and the \
                                   log says until when";

    fn of(fleet: &Fleet, store: &str, now: i64) -> Self {
        let live = fleet.instances.iter();
        let live = live.filter(|(_, i)| i.seen.abs_diff(now) <= LIVE_WITHIN_MS as u64);
        let what = match live.max_by_key(|(_, i)| i.seen) {
            Some((id, info)) => format!(
                "the instance {id} on {} was seen {}",
                info.host,
                words::relative(info.seen, now)
            ),
            None if fleet.open => "another instance of it has already started it".to_owned(),
            None => "it has a fleet's data".to_owned(),
        };
        Self {
            what: format!("--new-fleet is refused: {store} is not new to this namespace: {what}"),
        }
    }
}

impl fmt::Display for NotNew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for NotNew {}

/// Has the store begin open, in one step; waits until it answers.
///
/// # Errors
/// [`NotNew`]; or the store's answer cannot be used.
pub(super) async fn found(store: &dyn Store) -> anyhow::Result<()> {
    if store.durable() {
        info!(
            "--new-fleet has no effect: a store of this kind loses nothing, so no start waits for it"
        );
        return Ok(());
    }
    // The same in each question: a reply may be lost.
    let id = RunId::random().to_string();
    let mut warned = Throttle::default();
    loop {
        match store.found(&id).await {
            // A store that holds an older epoch begins the next one under this id too, but closed.
            Ok(reply) if reply.value.open && *reply.value.id == *id => {
                warn!(
                    "--new-fleet: starting without a wait, because somebody said that nothing of this fleet runs \
                    anywhere else; leave the option out from the next start on"
                );
                return Ok(());
            }
            Ok(reply) => {
                let now = reply.now_us.div_euclid(1000);
                return Err(NotNew::of(&reply.value, store.address(), now).into());
            }
            Err(e) if e.is_transient() => {
                if warned.lets(Boottime::now(), WARN_AGAIN) {
                    warn!(error = %e, "the store does not answer: this instance starts nothing until it does");
                }
            }
            Err(e) => return Err(e.into()),
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}
