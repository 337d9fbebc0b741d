//! Locks that are acquired and given back at one time travel together: one script call for many of them.
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
    connection::{CallError, Client, Script, SharedConnection, is_lost},
};

static BATCH: LazyLock<Script> = LazyLock::new(|| {
    Script::new(concat!(
        "local function try_lock(KEYS, ARGV)\n",
        include_str!("../../../lua/lock/try_lock.lua"),
        "end\nlocal function release(KEYS, ARGV)\n",
        include_str!("../../../lua/lock/release.lua"),
        "end\n",
        include_str!("../../../lua/lock/batch.lua"),
    ))
});

/// So many at one time are asked for by themselves.
const MAX_DIRECT: usize = 2;
/// Calls under way at one time: while the server works on one, we make and read others. What comes in meanwhile collects
/// for the next.
const IN_FLIGHT: usize = 4;
/// Locks in one call: a server that is asked for so many is busy for less than a millisecond.
const MAX_BATCH: usize = 64;

/// What is asked for one lock; as in lua/lock/batch.lua.
pub(super) struct Request {
    pub(super) name: String,
    pub(super) step: &'static str,
    pub(super) owner: String,
    /// Milliseconds; of a try_lock.
    pub(super) ttl: Option<u64>,
}

pub(super) enum BatchReply {
    Value(Value),
    Failed(store::Error),
    /// Not answered in a batch: to be asked for alone.
    AskAlone,
}

type Queued = (Request, oneshot::Sender<BatchReply>);

pub(super) struct LockBatcher {
    client: Client,
    connection: Arc<SharedConnection>,
    state: Mutex<State>,
    /// Something was put into the queue.
    more: Notify,
}

#[derive(Default)]
struct State {
    /// Asked for directly, and not answered yet.
    direct: usize,
    queue: VecDeque<Queued>,
    /// A task sends what is in the queue.
    sending: bool,
}

/// How one is to be asked for.
pub(super) enum Route {
    /// By itself, as long as this lives.
    Direct(DirectRequest),
    /// With others; here comes the answer. A sender that is gone says as much as [`BatchReply::AskAlone`].
    Batched(oneshot::Receiver<BatchReply>),
}

/// Counts as one that is under way.
pub(super) struct DirectRequest(Arc<LockBatcher>);

impl Drop for DirectRequest {
    fn drop(&mut self) {
        self.0.state().direct -= 1;
    }
}

impl LockBatcher {
    pub(super) fn new(client: Client, connection: Arc<SharedConnection>) -> Self {
        Self {
            client,
            connection,
            state: Mutex::default(),
            more: Notify::new(),
        }
    }

    /// How long an answer may take in good order: to connect, and to be answered.
    pub(super) fn patience(&self) -> Duration {
        self.client.timeout * 3
    }

    pub(super) fn timed_out(&self, limit: Duration) -> store::Error {
        self.connection.timed_out(limit)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn route(self: &Arc<Self>, request: impl FnOnce() -> Request) -> Route {
        let mut state = self.state();
        if !state.sending && state.direct < MAX_DIRECT {
            state.direct += 1;
            return Route::Direct(DirectRequest(self.clone()));
        }
        let (tell, answer) = oneshot::channel();
        state.queue.push_back((request(), tell));
        if std::mem::replace(&mut state.sending, true) {
            drop(state);
            self.more.notify_one();
        } else {
            tokio::spawn(Sender(self.clone()).run());
        }
        Route::Batched(answer)
    }
}

/// Empties the queue, and ends when it stays empty.
struct Sender(Arc<LockBatcher>);

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Sender {
    async fn run(self) {
        let mut calls: Vec<Call> = vec![];
        loop {
            // Others are about to ask too: let them.
            tokio::task::yield_now().await;
            while calls.len() < IN_FLIGHT
                && let Some(batch) = self.next(calls.is_empty())
            {
                calls.push(Box::pin(send(self.0.clone(), batch)));
            }
            if calls.is_empty() {
                return;
            }
            // The older one first: what is polled first is sent first.
            let answered = std::future::poll_fn(|cx| {
                let before = calls.len();
                calls.retain_mut(|f| f.as_mut().poll(cx).is_pending());
                match calls.len() < before {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            });
            tokio::select! {
                biased;
                () = answered => {}
                () = self.0.more.notified() => {}
            }
        }
    }

    /// What is in the queue; None: nothing is. `last`: then this task ends.
    fn next(&self, last: bool) -> Option<Vec<Queued>> {
        let mut state = self.0.state();
        let mut batch = Vec::with_capacity(state.queue.len().min(MAX_BATCH));
        while batch.len() < MAX_BATCH
            && let Some(next) = state.queue.pop_front()
        {
            // Who does not wait any more has acquired nothing yet, and shall not.
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

async fn send(batcher: Arc<LockBatcher>, batch: Vec<Queued>) {
    let bytes: usize = batch
        .iter()
        .map(|(a, _)| a.name.len() + a.owner.len())
        .sum();
    let mut call = Cmd::with_capacity(4 + 4 * batch.len(), 96 + 24 * batch.len() + bytes);
    call.arg("EVALSHA").arg(&*BATCH.sha).arg(batch.len());
    for (request, _) in &batch {
        call.arg(&*request.name);
    }
    call.arg(FENCE_TTL.as_millis() as u64);
    for (request, _) in &batch {
        call.arg(request.step).arg(&*request.owner);
        if let Some(ms) = request.ttl {
            call.arg(ms);
        }
    }
    let limit = batcher.patience();
    let asked = batcher
        .connection
        .run(limit, async |c| c.eval(&BATCH, &call).await);
    let failed = match asked.await {
        Ok(Value::Array(answers)) if answers.len() == batch.len() => {
            for (answer, (_, tell)) in answers.into_iter().zip(batch) {
                let _ = tell.send(match answer {
                    Value::SimpleString(_) => BatchReply::AskAlone,
                    value => BatchReply::Value(value),
                });
            }
            return;
        }
        Err(CallError::NoAnswer(e)) => Some(e),
        Err(CallError::Redis(e)) if is_lost(&e) => Some(batcher.client.error(&e)),
        // The server does not take them together, and has done nothing: keys on several nodes, or some that this user may not touch.
        Ok(_) | Err(CallError::Redis(_)) => None,
    };
    for (_, tell) in batch {
        let _ = tell.send(match &failed {
            Some(e) => BatchReply::Failed(e.clone()),
            None => BatchReply::AskAlone,
        });
    }
}
