//! Batches claims that are due at the same time: one script call for up to a hundred claims.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tracing::info;

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
pub struct ClaimPermit {
    /// None: nobody was left to take it.
    permits: Option<Arc<Permits>>,
}

/// How many permits there are follows [`Pace`].
#[derive(Debug)]
struct Permits(Mutex<Count>);

#[derive(Debug)]
struct Count {
    pace: Pace,
    taken: usize,
    /// Those that wait, first come, first served; and before all others those that may be granted already.
    first: VecDeque<oneshot::Sender<ClaimPermit>>,
    others: VecDeque<oneshot::Sender<ClaimPermit>>,
}

impl Permits {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Count {
            pace: Pace::new(cores()),
            taken: 0,
            first: VecDeque::new(),
            others: VecDeque::new(),
        })))
    }

    fn wait(self: &Arc<Self>, first: bool) -> oneshot::Receiver<ClaimPermit> {
        let (give, permit) = oneshot::channel();
        let mut count = self.0.lock();
        let waiting = match first {
            true => &mut count.first,
            false => &mut count.others,
        };
        if waiting.len() == waiting.capacity() {
            // Before it grows: those that do not wait any more, as after a change of their job, take no place.
            waiting.retain(|w| !w.is_closed());
        }
        waiting.push_back(give);
        self.give(&mut count);
        permit
    }

    fn give(self: &Arc<Self>, count: &mut Count) {
        while count.taken < count.pace.limit()
            && let Some(waiting) = count.first.pop_front().or_else(|| count.others.pop_front())
        {
            let permits = Some(self.clone());
            match waiting.send(ClaimPermit { permits }) {
                Ok(()) => count.taken += 1,
                // Its drop must not count down what was not counted.
                Err(mut permit) => permit.permits = None,
            }
        }
    }
}

impl ClaimPermit {
    /// The granted run got its turn to start after `wait`, under a lease that is trusted for `trust`.
    pub fn waited(&self, wait: Duration, trust: Duration) {
        if let Some(permits) = &self.permits {
            let mut count = permits.0.lock();
            let (before, full) = (count.pace.limit(), count.taken >= count.pace.limit());
            count.pace.waited(wait, trust, full, Boottime::now());
            let limit = count.pace.limit();
            if limit < before {
                info!(
                    waited_ms = wait.as_millis() as u64,
                    "this host starts commands more slowly than this instance claims them: for now it claims at most \
                     {limit} at one time"
                );
            }
            permits.give(&mut count);
        }
    }
}

impl Drop for ClaimPermit {
    fn drop(&mut self) {
        if let Some(permits) = self.permits.take() {
            let mut count = permits.0.lock();
            count.taken -= 1;
            permits.give(&mut count);
        }
    }
}

/// How many cores this host has.
pub fn cores() -> usize {
    #[cfg(test)]
    if crate::simulation::simulated() {
        return 2;
    }
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
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
            permits: Permits::new(),
        }
    }

    /// Waits for a permit; `first`: before those that never asked the store. Cancel safe.
    pub(super) async fn permit(&self, first: bool) -> Option<ClaimPermit> {
        self.permits.wait(first).await.ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_goes_first_to_a_claim_that_may_be_granted_and_the_queue_stays_short() {
        let permits = Permits::new();
        let limit = permits.0.lock().pace.limit();
        let mut taken: Vec<_> = (0..limit).map(|_| permits.wait(false)).collect();
        let mut held: Vec<_> = taken.iter_mut().map(|t| t.try_recv().ok()).collect();
        let (mut other, mut first) = (permits.wait(false), permits.wait(true));
        held.pop();
        let got = first.try_recv();
        assert!(got.is_ok() && other.try_recv().is_err());
        // Those that gave up take no place.
        for _ in 0..10_000 {
            drop(permits.wait(false));
        }
        assert!(permits.0.lock().others.len() < 100);
        drop(got);
        assert!(other.try_recv().is_ok());
        drop((held, other));
        assert_eq!(permits.0.lock().taken, 0);
    }
}
