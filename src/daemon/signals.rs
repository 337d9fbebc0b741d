//! What the daemon is asked for by signals.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

pub(super) enum SignalRequest {
    Stop(&'static str),
    Reload,
}

pub(super) struct Signals {
    /// What was asked for meanwhile, and comes next.
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
    /// A second wish to stop. What comes right behind the first is the same one: `timeout` and shells signal both the
    /// process and its group.
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
