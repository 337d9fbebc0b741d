//! Receives the hints of other instances.

use std::time::Duration;

use futures_util::StreamExt;
use tokio::sync::broadcast;
use tracing::{debug, warn};

use crate::{logic::claim::Event, store::connection::Client};

/// After this time without a hint the subscriber sends a PING. Otherwise a connection that ended only on the server's
/// side, or in a middlebox that still acknowledges packets, would stay silent for ever.
const QUIET: Duration = Duration::from_secs(5);

/// Forwards published hints for ever, and connects again whenever the connection ends.
pub(super) async fn listen(client: Client, channel: String, events: broadcast::Sender<Event>) {
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
                let _ = events.send(Event::Gap);
                let (mut sink, mut stream) = sub.split();
                loop {
                    match tokio::time::timeout(QUIET, stream.next()).await {
                        Ok(Some(message)) => {
                            if let Ok(event) = serde_json::from_slice(message.get_payload_bytes()) {
                                let _ = events.send(event);
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
                        "cannot subscribe to the other instances' hints: triggers, retries and takeovers start later"
                    );
                }
            }
            Err(_) => {}
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
