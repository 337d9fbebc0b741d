//! Batches claims that are due at the same time: one script call for up to a hundred claims.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::{
    logic::claim::{Answer, Claim},
    store::{BATCH, Error, Reply, Store},
};

/// How many commands may be under way at once. Meanwhile new claims collect for the next command.
const IN_FLIGHT: usize = 4;
/// How many claims may be under way or granted but not started yet. More grants than this instance can start at once
/// would be wasted: other instances claim the rest, or it waits here, where no lease can lapse.
const MAX_CLAIMS: usize = 2 * BATCH;

/// The permit for one claim under way; a grant keeps it until its command has started.
#[derive(Debug)]
pub struct ClaimPermit(#[expect(dead_code, reason = "held, never read")] OwnedSemaphorePermit);

type Queued = (Claim, oneshot::Sender<Result<Reply<Answer>, Error>>);

#[derive(Debug)]
pub(super) struct ClaimBatcher {
    queue: mpsc::UnboundedSender<Queued>,
    permits: Arc<Semaphore>,
}

impl ClaimBatcher {
    pub(super) fn start(store: Arc<dyn Store>) -> Self {
        let (sender, queue) = mpsc::unbounded_channel();
        tokio::spawn(send_batches(store, queue));
        Self {
            queue: sender,
            permits: Arc::new(Semaphore::new(MAX_CLAIMS)),
        }
    }

    /// Waits for a permit, first come, first served. None: this instance is stopping. Cancel safe.
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

async fn send_batches(store: Arc<dyn Store>, mut queue: mpsc::UnboundedReceiver<Queued>) {
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT));
    while let Some(first) = queue.recv().await {
        let mut batch = vec![first];
        // Other drivers with occurrences at the same instant are about to claim: let them run first.
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
                // If the store refuses one claim, the others must still get through: send each alone. Claims that were
                // already decided get the same answer again.
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
