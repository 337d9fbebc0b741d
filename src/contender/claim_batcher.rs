//! Batches claims that are due at the same time: one script call for up to a hundred claims.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::{
    clock::Boottime,
    logic::{
        claim::{Answer, Claim},
        pace::Pace,
    },
    store::{BATCH, Error, Reply, Store},
};

/// How many commands may be under way at once. Meanwhile new claims collect for the next command.
const IN_FLIGHT: usize = 4;
/// The permit for one claim under way; a grant keeps it until its command has started. More grants than this instance
/// can start in time would be lost: other instances claim the rest, or it waits here, where no lease can lapse.
#[derive(Debug)]
pub struct ClaimPermit(Arc<Permits>);

/// How many permits there are follows [`Pace`].
#[derive(Debug)]
struct Permits {
    free: Semaphore,
    count: Mutex<Count>,
}

#[derive(Debug)]
struct Count {
    pace: Pace,
    /// How many exist, free or not.
    all: usize,
}

impl Permits {
    fn new() -> Self {
        let pace = Pace::default();
        Self {
            free: Semaphore::new(pace.limit()),
            count: Mutex::new(Count {
                all: pace.limit(),
                pace,
            }),
        }
    }

    /// Makes as many as there are to be, if necessary out of the one that somebody returns.
    fn level(&self, count: &mut Count, returned: usize) {
        let limit = count.pace.limit();
        let free = (returned + limit).saturating_sub(count.all);
        count.all = count.all - returned + free;
        self.free.add_permits(free);
    }
}

impl ClaimPermit {
    /// The granted run got its turn to start after `wait`, under a lease that is trusted for `trust`.
    pub fn waited(&self, wait: Duration, trust: Duration) {
        let full = self.0.free.available_permits() == 0;
        let mut count = self.0.count.lock();
        count.pace.waited(wait, trust, full, Boottime::now());
        self.0.level(&mut count, 0);
    }
}

impl Drop for ClaimPermit {
    fn drop(&mut self) {
        self.0.level(&mut self.0.count.lock(), 1);
    }
}

type Queued = (Claim, oneshot::Sender<Result<Reply<Answer>, Error>>);

#[derive(Debug)]
pub(super) struct ClaimBatcher {
    queue: mpsc::UnboundedSender<Queued>,
    permits: Arc<Permits>,
}

impl ClaimBatcher {
    pub(super) fn start(store: Arc<dyn Store>) -> Self {
        let (sender, queue) = mpsc::unbounded_channel();
        tokio::spawn(send_batches(store, queue));
        Self {
            queue: sender,
            permits: Arc::new(Permits::new()),
        }
    }

    /// Waits for a permit, first come, first served. None: this instance is stopping. Cancel safe.
    pub(super) async fn permit(&self) -> Option<ClaimPermit> {
        self.permits.free.acquire().await.ok()?.forget();
        Some(ClaimPermit(self.permits.clone()))
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
