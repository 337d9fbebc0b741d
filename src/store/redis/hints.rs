//! Receives the hints of other instances.

use std::time::Duration;

use futures_util::StreamExt;
use tokio::sync::broadcast;
use tracing::{debug, warn};

use crate::{
    logic::claim::Event,
    model::JobName,
    store::{Changed, connection::Client},
};

/// What is published on a channel.
pub(super) trait Hint: Clone + Send + 'static {
    /// None: a later version, or another program, published it.
    fn read(payload: &[u8]) -> Option<Self>;
    /// Some may have been lost.
    fn gap() -> Self;
    /// What an instance does without them.
    const WITHOUT: &'static str;
}

impl Hint for Event {
    fn read(payload: &[u8]) -> Option<Self> {
        serde_json::from_slice(payload).ok()
    }
    fn gap() -> Self {
        Self::Gap
    }
    const WITHOUT: &'static str = "cannot subscribe to the other instances' hints: triggers, retries and takeovers start later";
}

impl Hint for Changed {
    fn read(payload: &[u8]) -> Option<Self> {
        let names: Vec<JobName> = serde_json::from_slice(payload).ok()?;
        Some(Self::Jobs(names.into()))
    }
    fn gap() -> Self {
        Self::Any
    }
    const WITHOUT: &'static str = "cannot subscribe to the changes of jobs: HTTP shows those that other instances make some seconds later";
}

/// After this time without a hint the subscriber sends a PING. Otherwise a connection that ended only on the server's
/// side, or in a middlebox that still acknowledges packets, would stay silent for ever.
const QUIET: Duration = Duration::from_secs(5);

/// Forwards published hints for ever, and connects again whenever the connection ends.
pub(super) async fn listen<H: Hint>(client: Client, channel: String, hints: broadcast::Sender<H>) {
    let mut told = false;
    loop {
        let subscribe = async {
            let mut sub = client.subscription().await?;
            sub.subscribe(&channel).await?;
            Ok(sub)
        };
        match tokio::time::timeout(client.timeout * 4, subscribe).await {
            Ok(Ok(sub)) => {
                told = false;
                // Hints that were published before this moment are lost.
                let _ = hints.send(H::gap());
                let (mut sink, mut stream) = sub.split();
                loop {
                    match tokio::time::timeout(QUIET, stream.next()).await {
                        Ok(Some(message)) => {
                            if let Some(hint) = H::read(message.get_payload_bytes()) {
                                let _ = hints.send(hint);
                            }
                        }
                        Ok(None) => break,
                        // Any answer shows that the server is there, even a refusal.
                        Err(_) => {
                            let ping = sink.ping::<redis::Value>();
                            if tokio::time::timeout(client.timeout * 4, ping)
                                .await
                                .is_err()
                            {
                                debug!(
                                    "no answer on the connection for the other instances' hints; connecting again"
                                );
                                break;
                            }
                        }
                    }
                }
            }
            // Do not log that the server is unreachable: the requests that fail say so.
            Ok(Err(e)) => {
                let e = client.error(&e);
                if !e.is_transient() && !std::mem::replace(&mut told, true) {
                    warn!(
                        error = %e,
                        "{}", H::WITHOUT
                    );
                }
            }
            Err(_) => {}
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
