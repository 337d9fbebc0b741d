//! The signals that the daemon handles, and what they request.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

pub(super) enum SignalRequest {
    Stop(&'static str),
    Reload,
}

pub(super) struct Signals {
    /// A request that arrived meanwhile and is served next.
    pub(super) asked: Option<SignalRequest>,
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            asked: None,
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: signal(SignalKind::hangup())?,
        })
    }
    /// Waits for a second signal to stop. One right after the first does not count: `timeout` and shells signal both
    /// the process and its group.
    pub(super) async fn second_stop(&mut self) -> &'static str {
        let first = crate::clock::Boottime::now();
        loop {
            let name = tokio::select! {
                _ = self.term.recv() => "SIGTERM",
                _ = self.int.recv() => "SIGINT",
            };
            if crate::clock::Boottime::now().since(first) >= Duration::from_millis(300) {
                return name;
            }
        }
    }
    pub(super) async fn next(&mut self) -> SignalRequest {
        if let Some(asked) = self.asked.take() {
            return asked;
        }
        tokio::select! {
            _ = self.term.recv() => SignalRequest::Stop("SIGTERM"),
            _ = self.int.recv() => SignalRequest::Stop("SIGINT"),
            _ = self.hup.recv() => SignalRequest::Reload,
        }
    }
}
