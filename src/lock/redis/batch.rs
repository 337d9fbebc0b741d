//! Locks that are taken and given back at one time travel together: one script call for many of them.
//!
//! One or two at a time are asked for directly, each by its own script: nothing is gained by waiting for others then. While more
//! are asked for, one task sends them all, in the order in which they came, two calls at a time.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, LazyLock},
    task::Poll,
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use redis::{Cmd, Value};
use tokio::sync::{Notify, oneshot};

use crate::store::{
    self, FENCE_TTL,
    connection::{Client, Line, Script, Trouble, is_lost},
};

static MANY: LazyLock<Script> = LazyLock::new(|| {
    Script::new(concat!(
        "local function try_lock(KEYS, ARGV)\n",
        include_str!("../../../lua/lock/try_lock.lua"),
        "end\nlocal function release(KEYS, ARGV)\n",
        include_str!("../../../lua/lock/release.lua"),
        "end\n",
        include_str!("../../../lua/lock/many.lua"),
    ))
});

/// So many at one time are asked for by themselves.
const DIRECT: usize = 2;
/// Calls under way at one time: while the server works on one, we make and read others. What comes in meanwhile collects
/// for the next.
const IN_FLIGHT: usize = 4;
/// Locks in one call: a server that is asked for so many is busy for less than a millisecond.
const TOGETHER: usize = 64;

/// What is asked for one lock; as in lua/lock/many.lua.
pub(super) struct Ask {
    pub(super) name: String,
    pub(super) step: &'static str,
    pub(super) owner: String,
    /// Milliseconds; of what is taken.
    pub(super) ttl: Option<u64>,
}

pub(super) enum Answer {
    Said(Value),
    Failed(store::Error),
    /// Not answered in company.
    Alone,
}

pub(super) struct Batcher {
    client: Client,
    line: Arc<Line>,
    state: Mutex<State>,
    /// Something was put into the queue.
    more: Notify,
}

#[derive(Default)]
struct State {
    /// Asked for directly, and not answered yet.
    direct: usize,
    queue: VecDeque<(Ask, oneshot::Sender<Answer>)>,
    /// A task sends what is in the queue.
    sending: bool,
}

/// How one is to be asked for.
pub(super) enum Way {
    /// By itself, as long as this lives.
    Direct(Direct),
    /// With others; here comes the answer. A sender that is gone says as much as [`Answer::Alone`].
    Together(oneshot::Receiver<Answer>),
}

pub(super) struct Direct(Arc<Batcher>);

impl Drop for Direct {
    fn drop(&mut self) {
        self.0.state().direct -= 1;
    }
}

impl Batcher {
    pub(super) fn new(client: Client, line: Arc<Line>) -> Self {
        Self {
            client,
            line,
            state: Mutex::default(),
            more: Notify::new(),
        }
    }

    /// How long an answer may take in good order: to connect, and to be answered.
    pub(super) fn patience(&self) -> Duration {
        self.client.timeout * 3
    }

    pub(super) fn late(&self, limit: Duration) -> store::Error {
        self.line.late(limit)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn way(self: &Arc<Self>, ask: impl FnOnce() -> Ask) -> Way {
        let mut state = self.state();
        if !state.sending && state.direct < DIRECT {
            state.direct += 1;
            return Way::Direct(Direct(self.clone()));
        }
        let (tell, answer) = oneshot::channel();
        state.queue.push_back((ask(), tell));
        if std::mem::replace(&mut state.sending, true) {
            drop(state);
            self.more.notify_one();
        } else {
            tokio::spawn(Sender(self.clone()).run());
        }
        Way::Together(answer)
    }
}

/// Empties the queue, and ends when it stays empty.
struct Sender(Arc<Batcher>);

type Flight = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Sender {
    async fn run(self) {
        let mut flights: Vec<Flight> = vec![];
        loop {
            // Others are about to ask too: let them.
            tokio::task::yield_now().await;
            while flights.len() < IN_FLIGHT
                && let Some(batch) = self.next(flights.is_empty())
            {
                flights.push(Box::pin(send(self.0.clone(), batch)));
            }
            if flights.is_empty() {
                return;
            }
            // The older one first: what is polled first is sent first.
            let landed = std::future::poll_fn(|cx| {
                let before = flights.len();
                flights.retain_mut(|f| f.as_mut().poll(cx).is_pending());
                match flights.len() < before {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            });
            tokio::select! {
                biased;
                () = landed => {}
                () = self.0.more.notified() => {}
            }
        }
    }

    /// What is in the queue; None: nothing is. `last`: then this task ends.
    fn next(&self, last: bool) -> Option<Vec<(Ask, oneshot::Sender<Answer>)>> {
        let mut state = self.0.state();
        let mut batch = Vec::with_capacity(state.queue.len().min(TOGETHER));
        while batch.len() < TOGETHER
            && let Some(next) = state.queue.pop_front()
        {
            // Who does not wait any more has taken nothing yet, and shall not.
            if !next.1.is_closed() {
                batch.push(next);
            }
        }
        if batch.is_empty() {
            if last {
                state.sending = false;
            }
            return None;
        }
        Some(batch)
    }
}

async fn send(batcher: Arc<Batcher>, batch: Vec<(Ask, oneshot::Sender<Answer>)>) {
    let bytes: usize = batch
        .iter()
        .map(|(a, _)| a.name.len() + a.owner.len())
        .sum();
    let mut call = Cmd::with_capacity(4 + 4 * batch.len(), 96 + 24 * batch.len() + bytes);
    call.arg("EVALSHA").arg(&*MANY.sha).arg(batch.len());
    for (ask, _) in &batch {
        call.arg(&*ask.name);
    }
    call.arg(FENCE_TTL.as_millis() as u64);
    for (ask, _) in &batch {
        call.arg(ask.step).arg(&*ask.owner);
        if let Some(ms) = ask.ttl {
            call.arg(ms);
        }
    }
    let limit = batcher.patience();
    let asked = batcher
        .line
        .run(limit, async |c| c.eval(&MANY, &call).await);
    let failed = match asked.await {
        Ok(Value::Array(answers)) if answers.len() == batch.len() => {
            for (answer, (_, tell)) in answers.into_iter().zip(batch) {
                let _ = tell.send(match answer {
                    Value::SimpleString(_) => Answer::Alone,
                    said => Answer::Said(said),
                });
            }
            return;
        }
        Err(Trouble::Without(e)) => Some(e),
        Err(Trouble::Said(e)) if is_lost(&e) => Some(batcher.client.error(&e)),
        // The server does not take them together, and has done nothing: keys on several nodes, or some that this user may not touch.
        Ok(_) | Err(Trouble::Said(_)) => None,
    };
    for (_, tell) in batch {
        let _ = tell.send(match &failed {
            Some(e) => Answer::Failed(e.clone()),
            None => Answer::Alone,
        });
    }
}
