//! Locks in Redis: one script for each step (lua/lock/), one connection that all tasks share, one for renewals, and one
//! that hears of releases while somebody waits.

mod batch;
pub(crate) mod reply;

use std::{
    collections::HashSet,
    sync::{Arc, LazyLock},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::StreamExt;
use parking_lot::Mutex;
use redis::{Cmd, Value, aio::PubSubSink, cmd};
use tokio::sync::{mpsc, oneshot};

use self::batch::{Answer, Ask as One, Batcher, Way};
use super::{
    Backend, Error, Giving, Kept, Kind, Tried,
    period::Timed,
    reentrant::{Entered, Left, Which},
    room::{Rooms, made_by},
};
use crate::{
    config,
    store::{
        self, FENCE_TTL,
        connection::{Client, Line, Script, Trouble, install_crypto, is_wrong_type},
    },
};

macro_rules! script {
    ($name:literal) => {
        LazyLock::new(|| Script::new(include_str!(concat!("../../lua/lock/", $name, ".lua"))))
    };
}
static TRY_LOCK: LazyLock<Script> = script!("try_lock");
static RENEW: LazyLock<Script> = script!("renew");
static RELEASE: LazyLock<Script> = script!("release");
static ENTER: LazyLock<Script> = script!("enter");
static LEAVE: LazyLock<Script> = script!("leave");
static PERIOD: LazyLock<Script> = script!("period");
static UNPERIOD: LazyLock<Script> = script!("unperiod");
static LOOK: LazyLock<Script> = script!("look");

/// A subscriber without anybody who waits stays connected for so long.
const IDLE: Duration = Duration::from_secs(30);
/// Between two tries to connect the subscriber.
const AWAY: Duration = Duration::from_millis(200);

pub(super) struct RedisLocks {
    client: Client,
    namespace: String,
    min_replicas: u32,
    line: Arc<Line>,
    batcher: Arc<Batcher>,
    /// Renewals wait behind nothing else.
    renewals: Line,
    ear: Ear,
}

impl RedisLocks {
    pub(super) fn open(
        url: &str,
        c: &config::Store,
        id: &str,
        rooms: Arc<Rooms>,
    ) -> Result<Self, store::Error> {
        Ok(Self::over(Client::new(url, c)?, c, id, rooms))
    }

    pub(super) fn over(client: Client, c: &config::Store, id: &str, rooms: Arc<Rooms>) -> Self {
        install_crypto();
        let line = Arc::new(Line::new(client.clone()));
        Self {
            namespace: c.namespace.clone(),
            min_replicas: c.min_replicas,
            batcher: Arc::new(Batcher::new(client.clone(), line.clone())),
            line,
            renewals: Line::new(client.clone()),
            ear: Ear {
                client: client.clone(),
                namespace: c.namespace.clone(),
                id: id.to_owned(),
                rooms,
                asks: Mutex::new(None),
            },
            client,
        }
    }

    fn name(&self, key: &str, what: &str) -> String {
        [&*self.namespace, ":{", key, "}:", what].concat()
    }

    /// Runs a script on the key `what` of the lock. With `confirm`, waits for the replicas.
    async fn call(
        &self,
        (line, limit): (&Line, Duration),
        script: &Script,
        (key, what): (&str, &str),
        args: &[Arg<'_>],
        confirm: bool,
    ) -> Result<Value, Error> {
        let name = self.name(key, what);
        // Room for all of it: this is most of what a lock costs on our side.
        let mut call = Cmd::with_capacity(4 + args.len(), 128 + 2 * name.len());
        call.arg("EVALSHA").arg(&*script.sha).arg("1").arg(&*name);
        for arg in args {
            match arg {
                Arg::Text(text) => call.arg(*text),
                Arg::Ms(time) => call.arg(millis(*time)),
            };
        }
        let replicas = if confirm { self.min_replicas } else { 0 };
        // 0 would be for ever.
        let patience = (self.client.timeout.as_millis() as u64 / 2).max(1);
        let asked = line.run(limit, async |c| {
            let answer = c.eval(script, &call).await?;
            if replicas == 0 {
                return Ok((answer, 0));
            }
            // WAIT counts the writes of its own connection.
            let mut wait = cmd("WAIT");
            wait.arg(replicas).arg(patience);
            Ok((answer, c.query(&wait).await?))
        });
        let (answer, have) = asked.await.map_err(|e| self.trouble(key, e))?;
        if have < replicas {
            return Err(Error::NotReplicated {
                key: key.to_owned(),
                address: self.client.address.clone(),
                have,
                want: replicas,
            });
        }
        Ok(answer)
    }

    /// Takes or gives back a plain lock: together with others, if more are asked for at one time.
    async fn step(
        &self,
        step: Step,
        key: &str,
        owner: &str,
        limit: Duration,
    ) -> Result<Value, Error> {
        // WAIT is for one grant; who has less time than others must not be waited for as long as they are.
        let alone = self.min_replicas > 0 || limit != self.patience() || !step.is_common();
        let mut _direct = None;
        if !alone {
            match self
                .batcher
                .way(|| step.with_others(self.name(key, LOCK), owner))
            {
                Way::Direct(direct) => _direct = Some(direct),
                Way::Together(answer) => match tokio::time::timeout(limit, answer).await {
                    Ok(Ok(Answer::Said(value))) => return Ok(value),
                    Ok(Ok(Answer::Failed(e))) => return Err(Error::of(key, e)),
                    Ok(Ok(Answer::Alone) | Err(_)) => {}
                    Err(_) => return Err(Error::of(key, self.batcher.late(limit))),
                },
            }
        }
        let on = (&*self.line, limit);
        match step {
            Step::TryLock { lease, hears } => {
                let args = [
                    Arg::Text(owner),
                    Arg::Ms(lease + FENCE_TTL),
                    Arg::Ms(FENCE_TTL),
                    WAITS,
                ];
                let args = &args[..if hears { 4 } else { 3 }];
                self.call(on, &TRY_LOCK, (key, LOCK), args, true).await
            }
            Step::Release(Giving {
                keep,
                sure,
                unheard,
            }) => {
                let keep = match keep.is_zero() {
                    true => Arg::Text(""),
                    false => Arg::Ms(keep),
                };
                let unsure = Arg::Text(if sure { "" } else { "1" });
                let args = [
                    Arg::Text(owner),
                    Arg::Ms(FENCE_TTL),
                    keep,
                    unsure,
                    Arg::Text("1"),
                ];
                let args = &args[..if unheard { 5 } else { 4 }];
                self.call(on, &RELEASE, (key, LOCK), args, false).await
            }
        }
    }

    fn trouble(&self, key: &str, e: Trouble) -> Error {
        match e {
            Trouble::Without(e) => Error::of(key, e),
            Trouble::Said(e) if is_wrong_type(&e) => Error::WrongType {
                key: key.to_owned(),
                address: self.client.address.clone(),
            },
            Trouble::Said(e) => Error::of(key, self.client.error(&e)),
        }
    }

    fn understood<T>(&self, key: &str, read: Result<T, String>) -> Result<T, Error> {
        read.map_err(|reason| Error::Corrupt {
            key: key.to_owned(),
            address: self.client.address.clone(),
            reason,
        })
    }
}

/// What is asked for a plain lock, and may be asked together with others.
#[derive(Clone, Copy)]
enum Step {
    TryLock { lease: Duration, hears: bool },
    Release(Giving),
}

impl Step {
    /// What is rare goes alone.
    fn is_common(self) -> bool {
        match self {
            Self::TryLock { .. } => true,
            Self::Release(Giving {
                keep,
                sure,
                unheard,
            }) => sure && keep.is_zero() && !unheard,
        }
    }

    fn with_others(self, name: String, owner: &str) -> One {
        let (step, ttl) = match self {
            Self::TryLock { lease, hears } => {
                let step = if hears { "w" } else { "t" };
                (step, Some(millis(lease + FENCE_TTL)))
            }
            Self::Release(_) => ("r", None),
        };
        One {
            name,
            step,
            owner: owner.to_owned(),
            ttl,
        }
    }
}

/// The one key of a lock.
const LOCK: &str = "lock";
const WAITS: Arg<'static> = Arg::Text("1");

enum Arg<'a> {
    Text(&'a str),
    /// Whole milliseconds; what is more than nothing is not made nothing.
    Ms(Duration),
}

fn millis(time: Duration) -> u64 {
    time.as_nanos().div_ceil(1_000_000).min(i64::MAX as u128) as u64
}

#[async_trait]
impl Backend for RedisLocks {
    fn address(&self) -> &str {
        &self.client.address
    }

    /// To connect, and to be answered.
    fn patience(&self) -> Duration {
        self.batcher.patience()
    }

    async fn try_lock(
        &self,
        key: &str,
        owner: &str,
        lease: Duration,
        hears: bool,
        limit: Duration,
    ) -> Result<Tried, Error> {
        let step = Step::TryLock { lease, hears };
        let answer = self.step(step, key, owner, limit).await?;
        self.understood(key, reply::tried(answer))
    }

    async fn renew(
        &self,
        key: &str,
        owner: &str,
        kind: Kind,
        lease: Duration,
        limit: Duration,
    ) -> Result<Kept, Error> {
        let args = [
            Arg::Text(owner),
            Arg::Ms(lease + FENCE_TTL),
            Arg::Ms(FENCE_TTL),
            Arg::Text("levels"),
        ];
        let args = &args[..if kind == Kind::Reentrant { 4 } else { 3 }];
        let on = (&self.renewals, limit);
        let answer = self.call(on, &RENEW, (key, LOCK), args, true).await?;
        self.understood(key, reply::kept(answer))
    }

    async fn release(
        &self,
        key: &str,
        owner: &str,
        how: Giving,
        limit: Duration,
    ) -> Result<Kept, Error> {
        let step = Step::Release(how);
        let answer = self.step(step, key, owner, limit).await?;
        self.understood(key, reply::kept(answer))
    }

    async fn look(&self, key: &str, limit: Duration) -> Result<Option<(String, Duration)>, Error> {
        let (on, args) = ((&*self.line, limit), [Arg::Ms(FENCE_TTL)]);
        let answer = self.call(on, &LOOK, (key, LOCK), &args, false).await?;
        self.understood(key, reply::look(answer))
    }

    async fn enter(
        &self,
        key: &str,
        (owner, nonce): (&str, &str),
        lease: Duration,
        hears: bool,
        limit: Duration,
    ) -> Result<Entered, Error> {
        let args = [
            Arg::Text(owner),
            Arg::Text(nonce),
            Arg::Ms(lease + FENCE_TTL),
            Arg::Ms(FENCE_TTL),
            WAITS,
        ];
        let args = &args[..if hears { 5 } else { 4 }];
        let on = (&*self.line, limit);
        let answer = self.call(on, &ENTER, (key, LOCK), args, true).await?;
        self.understood(key, reply::entered(answer))
    }

    async fn leave(
        &self,
        key: &str,
        (owner, nonce): (&str, &str),
        which: Which,
        limit: Duration,
    ) -> Result<Left, Error> {
        let args = [
            Arg::Text(owner),
            Arg::Text(nonce),
            Arg::Ms(FENCE_TTL),
            Arg::Text(match which {
                Which::This => "this",
                Which::Any => "any",
                Which::Unheard => "unheard",
            }),
        ];
        let on = (&*self.line, limit);
        let answer = self.call(on, &LEAVE, (key, LOCK), &args, false).await?;
        self.understood(key, reply::left(answer))
    }

    async fn take_period(
        &self,
        key: &str,
        owner: &str,
        length: Duration,
        limit: Duration,
    ) -> Result<Timed, Error> {
        let what = format!("period:{}", millis(length));
        let args = [
            Arg::Text(owner),
            Arg::Ms(length),
            // Two of them at least, for a clock that goes back.
            Arg::Ms((length * 2).max(FENCE_TTL)),
        ];
        let on = (&*self.line, limit);
        let answer = self.call(on, &PERIOD, (key, &what), &args, true).await?;
        self.understood(key, reply::timed(answer))
    }

    async fn give_back_period(
        &self,
        key: &str,
        owner: &str,
        (length, begin): (Duration, i64),
        limit: Duration,
    ) -> Result<(), Error> {
        let what = format!("period:{}", millis(length));
        let begin = begin.to_string();
        let args = [Arg::Text(owner), Arg::Text(&begin)];
        let on = (&*self.line, limit);
        self.call(on, &UNPERIOD, (key, &what), &args, false)
            .await
            .map(drop)
    }

    async fn listen(&self, key: &str) {
        loop {
            let (heard, told) = oneshot::channel();
            self.ear.ask(Ask::Join(key.to_owned(), heard));
            if told.await.is_ok() {
                return;
            }
            // The one that listened has ended, because nobody had waited for long.
            tokio::task::yield_now().await;
        }
    }

    fn forget(&self, key: &str) {
        self.ear.ask(Ask::Leave(key.to_owned()));
    }
}

/// Hears of releases; a task that runs while somebody waits, and a little longer.
struct Ear {
    client: Client,
    namespace: String,
    /// Of the client: what it releases itself rings without a message.
    id: String,
    rooms: Arc<Rooms>,
    asks: Mutex<Option<mpsc::UnboundedSender<Ask>>>,
}

enum Ask {
    /// Answered when the server has confirmed it.
    Join(String, oneshot::Sender<()>),
    Leave(String),
}

impl Ear {
    fn ask(&self, ask: Ask) {
        let mut asks = self.asks.lock();
        let ask = match asks.as_ref() {
            Some(task) => match task.send(ask) {
                Ok(()) => return,
                // It has ended: nobody had waited for long.
                Err(mpsc::error::SendError(ask)) => ask,
            },
            None => ask,
        };
        // Who joins does so on the client's thread.
        if let Ask::Join(..) = ask {
            let (task, asked) = mpsc::unbounded_channel();
            let _ = task.send(ask);
            *asks = Some(task);
            tokio::spawn(
                Listener {
                    client: self.client.clone(),
                    prefix: format!("{}:{{", self.namespace),
                    id: self.id.clone(),
                    rooms: self.rooms.clone(),
                    asked,
                    wanted: HashSet::new(),
                    pending: vec![],
                }
                .run(),
            );
        }
    }
}

struct Listener {
    client: Client,
    prefix: String,
    id: String,
    rooms: Arc<Rooms>,
    asked: mpsc::UnboundedReceiver<Ask>,
    /// Keys that somebody waits for.
    wanted: HashSet<String>,
    /// Who is to be told that it is subscribed now.
    pending: Vec<(String, oneshot::Sender<()>)>,
}

impl Drop for Listener {
    /// Who waits asks again, and so does who asks just now.
    fn drop(&mut self) {
        self.asked.close();
        self.rooms.deafen();
    }
}

const RELEASED: &str = "}:released";

impl Listener {
    /// Ends when its client is gone, or when nobody has waited for a while.
    async fn run(mut self) {
        loop {
            if self.wanted.is_empty() {
                let next = tokio::time::timeout(IDLE, self.asked.recv());
                let Ok(Some(ask)) = next.await else { break };
                self.note(ask);
                continue;
            }
            match self.connection().await {
                Ended::Gone => return,
                Ended::Broken => tokio::time::sleep(AWAY).await,
                Ended::Idle => {}
            }
        }
    }

    fn channel(&self, key: &str) -> String {
        format!("{}{key}{RELEASED}", self.prefix)
    }

    fn note(&mut self, ask: Ask) -> Option<String> {
        match ask {
            Ask::Join(key, heard) => {
                self.pending.push((key.clone(), heard));
                self.wanted.insert(key.clone()).then_some(key)
            }
            Ask::Leave(key) => {
                self.wanted.remove(&key);
                None
            }
        }
    }

    /// One connection, from its subscriptions to its end.
    async fn connection(&mut self) -> Ended {
        let limit = self.client.timeout * 2;
        let connected = self.client.subscriber().await;
        let Ok(subscriber) = connected else {
            return Ended::Broken;
        };
        let (mut sink, mut messages) = subscriber.split();
        let channels: Vec<String> = self.wanted.iter().map(|k| self.channel(k)).collect();
        if !subscribed(&mut sink, &channels, limit).await {
            return Ended::Broken;
        }
        // What was published while there was no connection was not heard. Who is told now asks again anyway.
        for key in &self.wanted {
            if self.pending.iter().all(|(new, _)| new != key) {
                self.rooms.ring(key);
            }
        }
        self.tell();
        loop {
            tokio::select! {
                message = messages.next() => {
                    let Some(message) = message else { return Ended::Broken };
                    self.heard(&message);
                }
                ask = self.asked.recv() => {
                    let Some(ask) = ask else { return Ended::Gone };
                    let left = match &ask {
                        Ask::Leave(key) => Some(self.channel(key)),
                        Ask::Join(..) => None,
                    };
                    let joined = self.note(ask).map(|key| self.channel(&key));
                    if let Some(channel) = joined
                        && !subscribed(&mut sink, &[channel], limit).await
                    {
                        return Ended::Broken;
                    }
                    if let Some(channel) = left
                        && !matches!(tokio::time::timeout(limit, sink.unsubscribe(channel)).await, Ok(Ok(())))
                    {
                        return Ended::Broken;
                    }
                    self.tell();
                }
                () = tokio::time::sleep(IDLE), if self.wanted.is_empty() => return Ended::Idle,
            }
        }
    }

    fn tell(&mut self) {
        for (_, heard) in self.pending.drain(..) {
            let _ = heard.send(());
        }
    }

    fn heard(&self, message: &redis::Msg) {
        let key = message
            .get_channel_name()
            .strip_prefix(&self.prefix)
            .and_then(|rest| rest.strip_suffix(RELEASED));
        let ours = std::str::from_utf8(message.get_payload_bytes())
            .is_ok_and(|owner| made_by(&self.id, owner));
        if let Some(key) = key
            && !ours
        {
            self.rooms.ring(key);
        }
    }
}

enum Ended {
    /// Its client is gone.
    Gone,
    Broken,
    /// Nobody waits.
    Idle,
}

async fn subscribed(sink: &mut PubSubSink, channels: &[String], limit: Duration) -> bool {
    matches!(
        tokio::time::timeout(limit, sink.subscribe(channels)).await,
        Ok(Ok(()))
    )
}
