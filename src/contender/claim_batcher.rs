//! Claims that are due together travel together: one script call for up to a hundred.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::{
    logic::claim::{Answer, Claim},
    store::{BATCH, Error, Reply, Store},
};

/// Commands under way at one time. While they are, what comes in collects for the next.
const IN_FLIGHT: usize = 4;
/// Claims under way, and runs that were granted and have not been started yet. More would be granted than this instance
/// can start at once; others have the rest, or it waits here, where nothing lapses.
const MAX_CLAIMS: usize = 2 * BATCH;

/// The right to have one claim under way; a grant keeps it until its command was started.
#[derive(Debug)]
pub struct ClaimPermit(#[expect(dead_code, reason = "held, not looked at")] OwnedSemaphorePermit);

type Queued = (Claim, oneshot::Sender<Result<Reply<Answer>, Error>>);

#[derive(Debug)]
pub(super) struct ClaimBatcher {
    queue: mpsc::UnboundedSender<Queued>,
    permits: Arc<Semaphore>,
}

impl ClaimBatcher {
    pub(super) fn start(store: Arc<dyn Store>) -> Self {
        let (sender, queue) = mpsc::unbounded_channel();
        tokio::spawn(run(store, queue));
        Self {
            queue: sender,
            permits: Arc::new(Semaphore::new(MAX_CLAIMS)),
        }
    }

    /// Waits for its turn, in the order of asking; None: never. Cancel safe.
    pub(super) async fn permit(&self) -> Option<ClaimPermit> {
        let permit = self.permits.clone().acquire_owned().await;
        permit.ok().map(ClaimPermit)
    }

    pub(super) async fn claim(&self, claim: Claim) -> Result<Reply<Answer>, Error> {
        let (tell, answer) = oneshot::channel();
        let stopped = || Error::Unreachable {
            address: "(stopped)".into(),
            reason: "this instance is stopping".into(),
        };
        self.queue.send((claim, tell)).map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }
}

async fn run(store: Arc<dyn Store>, mut queue: mpsc::UnboundedReceiver<Queued>) {
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT));
    while let Some(first) = queue.recv().await {
        let mut batch = vec![first];
        // Whoever is due at the same instant is about to ask: let them run first.
        tokio::task::yield_now().await;
        let permit = in_flight.clone().acquire_owned().await;
        while batch.len() < BATCH
            && let Ok(next) = queue.try_recv()
        {
            batch.push(next);
        }
        let store = store.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let (claims, tell): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
            match store.claim(&claims).await {
                Ok(mut reply) => {
                    let answers = std::mem::take(&mut reply.value);
                    for (tell, answer) in tell.into_iter().zip(answers) {
                        let _ = tell.send(Ok(reply.clone().map(|_| answer)));
                    }
                }
                // One that the store refuses must not take the others down. Those that were decided before it are
                // answered the same again.
                Err(e) if !e.is_transient() && claims.len() > 1 => {
                    for (claim, tell) in claims.into_iter().zip(tell) {
                        let one = store.claim(std::slice::from_ref(&claim)).await;
                        let _ = tell.send(one.and_then(|reply| only(reply, &e)));
                    }
                }
                Err(e) => {
                    for tell in tell {
                        let _ = tell.send(Err(e.clone()));
                    }
                }
            }
        });
    }
}

fn only(mut reply: Reply<Vec<Answer>>, otherwise: &Error) -> Result<Reply<Answer>, Error> {
    let answer = reply.value.pop().ok_or_else(|| otherwise.clone())?;
    Ok(reply.map(|_| answer))
}
