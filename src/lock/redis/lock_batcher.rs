//! Requests that are made at the same time, to acquire or to release locks, travel together: one script call for many
//! locks.
//!
//! One task on the client's thread sends all requests, in the order in which they came, and hands out the answers. A
//! caller only puts its request into the queue; the request needs no task of its own. While no call is under way, a
//! request is sent at once, and a single one by the script for one lock. While calls are under way, requests collect
//! for the next call ([`worthwhile`]).

use std::{
    collections::VecDeque,
    convert::Infallible,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, LazyLock},
    task::{Poll, Waker},
    time::Duration,
};

use futures_util::future::join_all;
use parking_lot::{Mutex, MutexGuard};
use redis::Value;
use tokio::runtime::Handle;

use super::{
    super::{Error, OwnerReply, ReleaseOptions, Then, TryLockReply},
    call_error, millis, release_call, reply, try_lock_call, understood,
};
use crate::{
    clock::Boottime,
    store::{
        self, FENCE_TTL,
        connection::{CallError, Client, Script, SharedConnection, is_lost},
    },
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

/// Calls that are under way at one time: while the server works on one, this client makes and reads others.
const IN_FLIGHT: usize = 4;
/// Locks in one call: they keep the server busy for less than a millisecond.
const MAX_BATCH: usize = 64;

/// A request for one lock. Its `then` gets an answer in every case.
pub(super) struct Request {
    batcher: Arc<LockBatcher>,
    /// The lock's key in the server.
    name: String,
    key: Arc<str>,
    owner: Arc<str>,
    asked: Boottime,
    /// None once it is answered.
    operation: Option<Operation>,
}

pub(super) enum Operation {
    TryLock {
        lease: Duration,
        then: Then<TryLockReply>,
    },
    Release {
        then: Then<OwnerReply>,
    },
}

impl Request {
    fn new(
        batcher: &Arc<LockBatcher>,
        name: String,
        (key, owner): (&Arc<str>, &Arc<str>),
        operation: Operation,
    ) -> Self {
        Self {
            batcher: batcher.clone(),
            name,
            key: key.clone(),
            owner: owner.clone(),
            asked: Boottime::now(),
            operation: Some(operation),
        }
    }

    fn answer(mut self, answer: Result<Value, Error>) {
        let client = &self.batcher.client;
        match self.operation.take() {
            Some(Operation::TryLock { then, .. }) => {
                then(answer.and_then(|a| understood(client, &self.key, reply::try_lock(a))));
            }
            Some(Operation::Release { then }) => {
                then(answer.and_then(|a| understood(client, &self.key, reply::owner(a))));
            }
            None => {}
        }
    }

    fn fail(self, e: store::Error) {
        let e = Error::of(&self.key, e);
        self.answer(Err(e));
    }

    /// The lease of an attempt to lock; None: a release.
    fn lease(&self) -> Option<Duration> {
        match self.operation {
            Some(Operation::TryLock { lease, .. }) => Some(lease),
            _ => None,
        }
    }

    /// What is left of the time that an answer may take.
    fn left(&self) -> Duration {
        let waited = Boottime::now().since(self.asked);
        self.batcher.patience().saturating_sub(waited)
    }

    /// Sends it by the script for one lock.
    async fn send_alone(self) {
        let (name, owner) = (&*self.name, &*self.owner);
        let (script, call) = match self.lease() {
            Some(lease) => try_lock_call(name, owner, lease),
            None => release_call(name, owner, ReleaseOptions::default()),
        };
        let LockBatcher {
            connection, client, ..
        } = &*self.batcher;
        let asked = connection.run(self.left(), async |c| c.eval(script, &call).await);
        let answer = asked.await;
        let answer = answer.map_err(|e| call_error(client, &self.key, e));
        self.answer(answer);
    }
}

impl Drop for Request {
    /// Answers a request that was not answered because the task that sends it has panicked.
    fn drop(&mut self) {
        let failed = || Error::Unreachable {
            key: self.key.to_string(),
            address: self.batcher.client.address.clone(),
            reason: "the request was not sent".to_owned(),
        };
        match self.operation.take() {
            Some(Operation::TryLock { then, .. }) => then(Err(failed())),
            Some(Operation::Release { then }) => then(Err(failed())),
            None => {}
        }
    }
}

pub(super) struct LockBatcher {
    client: Client,
    connection: Arc<SharedConnection>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Request>,
    /// Whether a task sends the requests in the queue.
    sending: bool,
    /// Wakes that task, if it waits for requests.
    idle: Option<Waker>,
    /// The number of requests that the task waits for, unless a call under way ends first.
    wanted: usize,
}

impl LockBatcher {
    pub(super) fn new(client: Client, connection: Arc<SharedConnection>) -> Self {
        Self {
            client,
            connection,
            state: Mutex::default(),
        }
    }

    /// The time that an answer may take if nothing is wrong: to connect, and to be answered.
    pub(super) fn patience(&self) -> Duration {
        self.client.timeout * 3
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Puts a request into the queue; `thread` sends it.
    pub(super) fn ask(
        self: &Arc<Self>,
        thread: &Handle,
        name: String,
        who: (&Arc<str>, &Arc<str>),
        operation: Operation,
    ) {
        let request = Request::new(self, name, who, operation);
        let mut state = self.state();
        state.queue.push_back(request);
        let sending = std::mem::replace(&mut state.sending, true);
        let idle = match state.queue.len() >= state.wanted {
            true => state.idle.take(),
            false => None,
        };
        drop(state);
        if let Some(sender) = idle {
            sender.wake();
        } else if !sending {
            thread.spawn(Sender(self.clone()).run());
        }
    }
}

/// The task that sends the requests in the queue; it lives as long as its thread.
struct Sender(Arc<LockBatcher>);

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Sender {
    async fn run(self) {
        let mut calls: Vec<(usize, Call)> = vec![];
        let never: Infallible = poll_fn(|cx| {
            // Older calls first: the call that is polled first is sent first.
            calls.retain_mut(|(_, call)| call.as_mut().poll(cx).is_pending());
            while calls.len() < IN_FLIGHT
                && let Some(batch) = self.next(worthwhile(&calls), cx.waker())
            {
                let n = batch.len();
                let mut call: Call = Box::pin(send(self.0.clone(), batch));
                if call.as_mut().poll(cx).is_pending() {
                    calls.push((n, call));
                }
            }
            Poll::Pending
        })
        .await;
        match never {}
    }

    /// Takes the next batch from the queue. None: the queue has fewer than `wanted` requests, and `waker` is woken when
    /// it has as many.
    fn next(&self, wanted: usize, waker: &Waker) -> Option<Vec<Request>> {
        let mut state = self.0.state();
        if state.queue.len() < wanted {
            state.idle = Some(waker.clone());
            state.wanted = wanted;
            return None;
        }
        let first = state.queue.len().min(MAX_BATCH);
        Some(state.queue.drain(..first).collect())
    }
}

/// How many requests are worth a call of their own beside `calls`, which come with their sizes: half as many as the
/// largest has, and at least one. When a call is answered, its callers ask again one after the other: without this
/// rule, the first of them would travel alone, and the others would wait behind it.
fn worthwhile(calls: &[(usize, Call)]) -> usize {
    let largest = calls.iter().map(|(n, _)| *n).max();
    largest.unwrap_or(0).div_ceil(2).max(1)
}

impl Drop for Sender {
    /// If the task has panicked, the next request starts another.
    fn drop(&mut self) {
        let left = std::mem::take(&mut *self.0.state());
        drop(left);
    }
}

async fn send(batcher: Arc<LockBatcher>, mut batch: Vec<Request>) {
    // The first request has waited for longest.
    while batch.first().is_some_and(|r| r.left().is_zero()) {
        let late = batcher.connection.timed_out(batcher.patience());
        batch.remove(0).fail(late);
    }
    if batch.len() > 1 {
        batch = send_together(&batcher, batch).await;
    }
    join_all(batch.into_iter().map(Request::send_alone)).await;
}

/// Sends a batch in one call. Returns the requests that have to be sent alone.
async fn send_together(batcher: &LockBatcher, batch: Vec<Request>) -> Vec<Request> {
    let names = batch.iter().map(|r| &*r.name);
    let mut call = BATCH.call(names, 1 + 2 * batch.len());
    call.arg(FENCE_TTL.as_millis() as u64);
    for request in &batch {
        call.arg(&*request.owner);
        match request.lease() {
            Some(lease) => call.arg(millis(lease + FENCE_TTL)),
            None => call.arg(""),
        };
    }
    let left = batch.iter().map(Request::left).min().unwrap_or_default();
    let asked = batcher
        .connection
        .run(left, async |c| c.eval(&BATCH, &call).await);
    let failed = match asked.await {
        Ok(Value::Array(answers)) if answers.len() == batch.len() => {
            let mut rest = vec![];
            for (request, answer) in batch.into_iter().zip(answers) {
                match answer {
                    Value::SimpleString(_) => rest.push(request),
                    value => request.answer(Ok(value)),
                }
            }
            return rest;
        }
        Err(CallError::NoAnswer(e)) => e,
        Err(CallError::Redis(e)) if is_lost(&e) => batcher.client.error(&e),
        // The server refuses the call as a whole, and has done nothing: the keys are on several nodes, or this user may
        // not touch some of them.
        Ok(_) | Err(CallError::Redis(_)) => return batch,
    };
    batch.into_iter().for_each(|r| r.fail(failed.clone()));
    vec![]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    const URL: &str = "redis://127.0.0.1:1";

    fn sender() -> Sender {
        let client = Client::new(URL, &config::Store::from_url(URL).unwrap()).unwrap();
        let connection = Arc::new(SharedConnection::new(client.clone()));
        Sender(Arc::new(LockBatcher::new(client, connection)))
    }

    /// A release, or an attempt to lock for this many seconds.
    fn put(to: &Sender, owner: &str, lease: Option<u64>) {
        let operation = match lease {
            None => Operation::Release {
                then: Box::new(|_| ()),
            },
            Some(lease) => Operation::TryLock {
                lease: Duration::from_secs(lease),
                then: Box::new(|_| ()),
            },
        };
        let who = (&"k".into(), &owner.into());
        let request = Request::new(&to.0, "name".to_owned(), who, operation);
        to.0.state().queue.push_back(request);
    }

    fn next(from: &Sender, wanted: usize) -> Option<Vec<String>> {
        let batch = from.next(wanted, Waker::noop())?;
        Some(batch.iter().map(|r| r.owner.to_string()).collect())
    }

    #[test]
    fn a_batch_has_what_came_first_if_it_is_enough() {
        let sender = sender();
        for (owner, lease) in [("a", Some(1)), ("b", Some(2)), ("c", None)] {
            put(&sender, owner, lease);
        }
        assert_eq!(next(&sender, 2).unwrap(), ["a", "b", "c"]);
        put(&sender, "f", None);
        assert_eq!(next(&sender, 2), None);
        assert!(sender.0.state().idle.is_some());
        assert_eq!(sender.0.state().wanted, 2);
        for _ in 0..MAX_BATCH {
            put(&sender, "g", None);
        }
        assert_eq!(next(&sender, 2).unwrap().len(), MAX_BATCH);
        assert_eq!(next(&sender, 1).unwrap(), ["g"]);
    }

    #[test]
    fn a_call_is_worth_half_of_the_largest_under_way() {
        let calls = |sizes: &[usize]| -> Vec<(usize, Call)> {
            let call = |n: &usize| (*n, Box::pin(std::future::ready(())) as Call);
            sizes.iter().map(call).collect()
        };
        let cases: [(&[usize], usize); 4] = [(&[], 1), (&[1], 1), (&[5], 3), (&[2, 64, 3], 32)];
        for (sizes, worth) in cases {
            assert_eq!(worthwhile(&calls(sizes)), worth, "{sizes:?}");
        }
    }

    #[test]
    fn a_request_is_answered_once_and_in_every_case() {
        let batcher = sender().0.clone();
        let limit = batcher.patience();
        assert_eq!(limit, 3 * batcher.client.timeout);
        let (tell, told) = std::sync::mpsc::channel();
        let request = || {
            let tell = tell.clone();
            let then: Then<OwnerReply> = Box::new(move |answer| tell.send(answer).unwrap());
            let who = (&"k".into(), &"a".into());
            Request::new(
                &batcher,
                "name".to_owned(),
                who,
                Operation::Release { then },
            )
        };
        let left = request().left();
        assert!(left > limit / 2 && left <= limit, "{left:?}");
        let e = told.try_recv().unwrap().unwrap_err();
        assert!(e.to_string().contains("the request was not sent"), "{e}");
        request().fail(batcher.connection.timed_out(limit));
        let e = told.try_recv().unwrap().unwrap_err();
        assert!(matches!(e, Error::Unreachable { .. }), "{e}");
        request().answer(Err(e));
        assert!(told.try_recv().unwrap().is_err());
        assert!(told.try_recv().is_err());
    }
}
