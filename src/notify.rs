//! Notifications and heartbeats: tells people when the state of a job changes (`keeper`), and tells services that
//! watch jobs when a run starts and ends (`heartbeat`). The rules are in `logic/notify`. Traces use the same `client`.
//!
//! Both have threads of their own, each with its own runtime: however slow a server is, no run waits for it. Requests
//! to the store go from the daemon's runtime, to which its connections belong.

pub(crate) mod client;
mod email;
pub(crate) mod heartbeat;
mod keeper;
mod send;
mod text;
mod trouble;

use std::{sync::Arc, time::Duration};

use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::{
    clock::StoreClock,
    config::{Channel, Config},
    health::Health,
    logic::notify::Kind,
    model::InstanceId,
    store::{Asking, Store},
    words,
};

/// How long messages and heartbeats under way may take when the daemon ends.
pub(crate) const LAST_WORDS: Duration = Duration::from_millis(500);

/// What the notifier needs of the daemon.
pub(crate) struct Parts {
    /// As reloads change it.
    pub(crate) config: watch::Receiver<Arc<Config>>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Arc<StoreClock>,
    pub(crate) health: Arc<Health>,
    pub(crate) instance: InstanceId,
    pub(crate) finish: CancellationToken,
}

/// Takes part in electing the fleet's notifier, and is it while elected, until `finish`.
pub(crate) async fn serve(p: Parts) {
    // Here, because the task that receives them belongs to the daemon's runtime.
    let changes = p.store.changes();
    let asking = Asking::new(p.store.clone());
    let (ended, end) = oneshot::channel::<()>();
    let body = move || {
        let _ended = ended;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        match runtime {
            Ok(runtime) => {
                runtime.block_on(keeper::Keeper::new(p, asking, changes).run());
                runtime.shutdown_background();
            }
            Err(error) => error!(%error, "cannot send notifications: no runtime"),
        }
    };
    if let Err(error) = std::thread::Builder::new()
        .name("notify".to_owned())
        .spawn(body)
    {
        error!(%error, "cannot send notifications: no thread");
    }
    let _ = end.await;
}

/// Why a message was not delivered, as far as known.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Undelivered {
    /// In words, without secrets.
    pub(crate) why: String,
    /// Another try is not likely to help.
    pub(crate) refused: bool,
    /// Who of its receivers lacks it. Empty: all of them.
    pub(crate) lacking: Vec<String>,
    /// Those of them whom the server refused for good, if it may yet take the message for the others.
    pub(crate) for_good: Vec<String>,
    /// It may have arrived all the same.
    pub(crate) perhaps: bool,
    /// When to try again, as the server says.
    pub(crate) retry_after: Option<Duration>,
}

impl Undelivered {
    fn new(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            refused: false,
            lacking: vec![],
            for_good: vec![],
            perhaps: false,
            retry_after: None,
        }
    }

    /// With when the server says to try again.
    pub(crate) fn in_words(self) -> String {
        match self.retry_after {
            Some(after) => {
                let after = words::took(after.as_millis() as i64);
                format!("{}; it says to try again in {after}", self.why)
            }
            None => self.why,
        }
    }
}

/// Sends a message that says that it is a test. Returns what came back.
pub(crate) async fn test(
    channel: &Channel,
    config: &Config,
    from: &InstanceId,
    now: i64,
) -> Result<String, Undelivered> {
    let surroundings = text::Surroundings::of(config, from, now);
    let message = text::test_message(&channel.name, now);
    // Mail servers drop a mail whose id they have seen.
    let id = format!("test-{now}-{:08x}", fastrand::u32(..));
    let text = text::Text::of(&message, &id, &surroundings);
    debug_assert_eq!(message.items.first().map(|i| i.kind), Some(Kind::Test));
    let to = channel.way.receivers();
    send::send(channel, to, &text, &config.store_variables).await
}
