//! Renewals that are due together travel together: as one pipeline of script calls, over one connection. An error of
//! one renewal does not affect the others.

use std::{
    collections::VecDeque,
    sync::{Arc, OnceLock},
};

use parking_lot::{Mutex, MutexGuard};
use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::sync::oneshot;

use super::script::RENEW;
use crate::{
    clock::{Boottime, StoreClock},
    store::{
        BATCH, Error,
        connection::{Client, Connection, MAX_LOADS, SharedConnection},
    },
};

/// The most pipelines under way at one time. Meanwhile further renewals collect for the next pipeline.
const IN_FLIGHT: usize = 4;

/// A script's answer, when the command left, and when the answer had arrived.
pub(super) type Answer = (Vec<Value>, Boottime, Boottime);
type Queued = (Cmd, oneshot::Sender<Result<Answer, Error>>);

pub(super) struct Renewals {
    client: Client,
    /// Only for renewals, so that they never wait behind other requests.
    connection: SharedConnection,
    min_replicas: u32,
    clock: Arc<OnceLock<Arc<StoreClock>>>,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Queued>,
    /// The number of tasks that send waiting calls, each one pipeline at a time.
    senders: usize,
}

impl Renewals {
    pub(super) fn new(
        client: Client,
        min_replicas: u32,
        clock: Arc<OnceLock<Arc<StoreClock>>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            connection: SharedConnection::new(client.clone()),
            client,
            min_replicas,
            clock,
            queue: Mutex::default(),
        })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Makes the connection, if there is none, and sees that it answers.
    pub(super) async fn ready(&self) -> Result<(), Error> {
        let ping = redis::cmd("PING");
        let ask = async |c: &mut Connection| c.query::<Value>(&ping).await;
        let answer = self.connection.run(self.client.timeout * 3, ask).await;
        answer.map(drop).map_err(|e| e.at(&self.client))
    }

    /// Sends one call of the script. `call` lacks the last argument, the time that the daemon believes the server's
    /// clock to show when the call leaves.
    ///
    /// If the caller drops the future, a call that still waits is not sent, and one that is under way may be made.
    pub(super) async fn send(self: &Arc<Self>, call: Cmd) -> Result<Answer, Error> {
        let (tell, answer) = oneshot::channel();
        let start = {
            let mut queue = self.queue();
            queue.waiting.push_back((call, tell));
            // WAIT delays the commands behind it on its connection.
            let most = if self.min_replicas > 0 { 1 } else { IN_FLIGHT };
            let start = queue.senders < most;
            queue.senders += usize::from(start);
            start
        };
        if start {
            let sender = Sender {
                all: self.clone(),
                ended: false,
            };
            tokio::spawn(sender.run());
        }
        // A sender ends without an answer only if its runtime ends.
        answer
            .await
            .unwrap_or_else(|_| Err(self.connection.timed_out(self.client.timeout)))
    }

    /// Sends all calls; returns their answers in the same order.
    async fn send_all(
        &self,
        c: &mut Connection,
        calls: &[Cmd],
    ) -> Result<Vec<Result<Answer, Error>>, RedisError> {
        let mut answers: Vec<Option<Result<Answer, Error>>> = vec![];
        answers.resize_with(calls.len(), || None);
        let mut have = self.min_replicas;
        let mut loads = 0;
        loop {
            let missing: Vec<usize> = (0..calls.len()).filter(|&i| answers[i].is_none()).collect();
            if missing.is_empty() {
                break;
            }
            let sent = Boottime::now();
            let believed = self.clock.get().and_then(|clock| clock.at(sent));
            let believed = believed.map_or(String::new(), |us| us.div_euclid(1000).to_string());
            let mut pipe = redis::pipe();
            pipe.ignore_errors();
            for &i in &missing {
                let mut call = calls[i].clone();
                call.arg(&believed);
                pipe.add_command(call);
            }
            if self.min_replicas > 0 {
                // In the same pipeline: WAIT counts only the writes of its own connection.
                pipe.add_command(self.client.wait_for_replicas(self.min_replicas));
            }
            let mut results: Vec<RedisResult<Value>> = c.pipe(&pipe).await?;
            let received = Boottime::now();
            if self.min_replicas > 0
                && let Some(replicas) = results.pop()
            {
                have = have.min(redis::from_redis_value(replicas?)?);
            }
            let mut unknown = false;
            for (i, result) in missing.into_iter().zip(results) {
                let result = result.and_then(|v| Ok(redis::from_redis_value::<Vec<Value>>(v)?));
                answers[i] = match result {
                    // Sent again below, after the script is loaded.
                    Err(e) if e.code() == Some("NOSCRIPT") && loads < MAX_LOADS => {
                        unknown = true;
                        None
                    }
                    Err(e) => {
                        c.note_error(&e);
                        Some(Err(self.client.error(&e)))
                    }
                    Ok(value) => Some(Ok((value, sent, received))),
                };
            }
            if !unknown {
                break;
            }
            loads += 1;
            c.load(&RENEW).await?;
        }
        let short =
            (have < self.min_replicas).then(|| self.client.not_replicated(have, self.min_replicas));
        Ok(answers
            .into_iter()
            .map(|answer| match (answer, &short) {
                (Some(Ok(_)), Some(short)) => Err(short.clone()),
                (Some(answer), _) => answer,
                // The server returned fewer answers than it got calls.
                (None, _) => Err(self.connection.timed_out(self.client.timeout)),
            })
            .collect())
    }
}

/// Sends waiting calls until none waits.
struct Sender {
    all: Arc<Renewals>,
    ended: bool,
}

impl Sender {
    async fn run(mut self) {
        // First let other tasks queue the renewals that are due at the same moment.
        tokio::task::yield_now().await;
        while let Some(batch) = self.next() {
            let (calls, tell): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
            let all = &*self.all;
            // Time to connect, and time for the answer.
            let limit = all.client.timeout * 3;
            let answers = all
                .connection
                .run(limit, async |c| all.send_all(c, &calls).await);
            let answers = match answers.await {
                Ok(answers) => answers,
                Err(e) => vec![Err(e.at(&all.client)); tell.len()],
            };
            for (tell, answer) in tell.into_iter().zip(answers) {
                let _ = tell.send(answer);
            }
        }
    }

    fn next(&mut self) -> Option<Vec<Queued>> {
        let mut queue = self.all.queue();
        let mut batch = vec![];
        while batch.len() < BATCH
            && let Some(next) = queue.waiting.pop_front()
        {
            // Drop calls whose callers no longer wait.
            if !next.1.is_closed() {
                batch.push(next);
            }
        }
        if batch.is_empty() {
            // In the same step as the check of the queue, so that no caller relies on this sender any more.
            queue.senders -= 1;
            self.ended = true;
            return None;
        }
        Some(batch)
    }
}

impl Drop for Sender {
    /// Runs before the sender's end only if its runtime ends.
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let mut queue = self.all.queue();
        queue.senders -= 1;
        if queue.senders == 0 {
            // Their callers get an error, and retry.
            queue.waiting.clear();
        }
    }
}
