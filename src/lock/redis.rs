//! Locks in Redis: one script for each step (lua/lock/). There is one connection that all tasks share, one for
//! renewals, and one that is subscribed to releases while somebody waits.

mod lock_batcher;
pub(crate) mod reply;

use std::{
    collections::HashSet,
    sync::{Arc, LazyLock},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::StreamExt;
use parking_lot::Mutex;
use redis::{Cmd, Value, aio::PubSubSink};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
};

use self::lock_batcher::{LockBatcher, Operation};
use super::{
    Backend, Error, Kind, OwnerReply, ReleaseOptions, Then, TryLockReply,
    period::PeriodReply,
    reentrant::{EnterReply, LeaveReply, LevelToLeave},
    wait_queue::{WaitQueues, made_by},
};
use crate::{
    config,
    store::{
        self, FENCE_TTL,
        connection::{CallError, Client, Script, SharedConnection, install_crypto, is_wrong_type},
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
static CLAIM_PERIOD: LazyLock<Script> = script!("claim_period");
static RELEASE_PERIOD: LazyLock<Script> = script!("release_period");
static HOLDER: LazyLock<Script> = script!("holder");

/// How long a listener without waiters stays connected.
const IDLE: Duration = Duration::from_secs(30);
/// The pause between two attempts to connect the listener.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);

pub(super) struct RedisLocks {
    client: Client,
    namespace: String,
    min_replicas: u32,
    connection: Arc<SharedConnection>,
    batcher: Arc<LockBatcher>,
    /// A connection of their own, so that renewals wait behind nothing else.
    renewals: SharedConnection,
    subscriber: Subscriber,
}

impl RedisLocks {
    pub(super) fn open(
        url: &str,
        c: &config::Store,
        id: &str,
        queues: Arc<WaitQueues>,
    ) -> Result<Self, store::Error> {
        Ok(Self::over(Client::new(url, c)?, c, id, queues))
    }

    pub(super) fn over(
        client: Client,
        c: &config::Store,
        id: &str,
        queues: Arc<WaitQueues>,
    ) -> Self {
        install_crypto();
        let connection = Arc::new(SharedConnection::new(client.clone()));
        Self {
            namespace: c.namespace.clone(),
            min_replicas: c.min_replicas,
            batcher: Arc::new(LockBatcher::new(client.clone(), connection.clone())),
            connection,
            renewals: SharedConnection::new(client.clone()),
            subscriber: Subscriber {
                client: client.clone(),
                namespace: c.namespace.clone(),
                id: id.to_owned(),
                queues,
                listener: Mutex::new(None),
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
        on: (&SharedConnection, Duration),
        script: &Script,
        (key, what): (&str, &str),
        args: &[Arg<'_>],
        confirm: bool,
    ) -> Result<Value, Error> {
        let call = script_call(script, &self.name(key, what), args);
        self.send(on, key, (script, call), confirm).await
    }

    async fn send(
        &self,
        (connection, limit): (&SharedConnection, Duration),
        key: &str,
        (script, call): (&Script, Cmd),
        confirm: bool,
    ) -> Result<Value, Error> {
        let replicas = if confirm { self.min_replicas } else { 0 };
        let asked = connection.run(limit, async |c| {
            let answer = c.eval(script, &call).await?;
            if replicas == 0 {
                return Ok((answer, 0));
            }
            // On the same connection, because WAIT counts the writes of its own connection.
            let wait = self.client.wait_for_replicas(replicas);
            Ok((answer, c.query(&wait).await?))
        });
        let (answer, have) = asked.await.map_err(|e| call_error(&self.client, key, e))?;
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

    fn understood<T>(&self, key: &str, read: Result<T, String>) -> Result<T, Error> {
        understood(&self.client, key, read)
    }
}

fn call_error(client: &Client, key: &str, e: CallError) -> Error {
    match e {
        CallError::Redis(e) if is_wrong_type(&e) => Error::WrongType {
            key: key.to_owned(),
            address: client.address.clone(),
        },
        e => Error::of(key, e.at(client)),
    }
}

fn understood<T>(client: &Client, key: &str, read: Result<T, String>) -> Result<T, Error> {
    read.map_err(|reason| Error::Corrupt {
        key: key.to_owned(),
        address: client.address.clone(),
        reason,
    })
}

/// What follows the name of a lock in its one key.
const LOCK: &str = "lock";

enum Arg<'a> {
    Text(&'a str),
    /// Whole milliseconds, rounded up, so that a short time does not become zero.
    Ms(Duration),
}

fn millis(time: Duration) -> u64 {
    time.as_nanos().div_ceil(1_000_000).min(i64::MAX as u128) as u64
}

fn script_call(script: &Script, name: &str, args: &[Arg<'_>]) -> Cmd {
    let mut call = script.call([name].into_iter(), args.len());
    for arg in args {
        match arg {
            Arg::Text(text) => call.arg(*text),
            Arg::Ms(time) => call.arg(millis(*time)),
        };
    }
    call
}

/// For how long the server remembers the last claim of a period of this length: at least two periods, in case the clock
/// goes back.
fn period_kept(length: Duration) -> Duration {
    (length * 2).max(FENCE_TTL)
}

fn try_lock_call(name: &str, owner: &str, lease: Duration) -> (&'static Script, Cmd) {
    let args = [
        Arg::Text(owner),
        Arg::Ms(lease + FENCE_TTL),
        Arg::Ms(FENCE_TTL),
    ];
    (&TRY_LOCK, script_call(&TRY_LOCK, name, &args))
}

fn release_call(
    name: &str,
    owner: &str,
    ReleaseOptions {
        keep_for,
        check_expiry,
        unanswered,
    }: ReleaseOptions,
) -> (&'static Script, Cmd) {
    let keep_for = match keep_for.is_zero() {
        true => Arg::Text(""),
        false => Arg::Ms(keep_for),
    };
    let check_expiry = Arg::Text(if check_expiry { "1" } else { "" });
    let args = [
        Arg::Text(owner),
        Arg::Ms(FENCE_TTL),
        keep_for,
        check_expiry,
        Arg::Text("1"),
    ];
    let args = &args[..if unanswered { 5 } else { 4 }];
    (&RELEASE, script_call(&RELEASE, name, args))
}

#[async_trait]
impl Backend for RedisLocks {
    fn address(&self) -> &str {
        &self.client.address
    }

    /// Long enough to connect and to be answered.
    fn patience(&self) -> Duration {
        self.batcher.patience()
    }

    async fn try_lock(
        &self,
        key: &str,
        owner: &str,
        lease: Duration,
        limit: Duration,
    ) -> Result<TryLockReply, Error> {
        let call = try_lock_call(&self.name(key, LOCK), owner, lease);
        let on = (&*self.connection, limit);
        let answer = self.send(on, key, call, true).await?;
        self.understood(key, reply::try_lock(answer))
    }

    fn begin_try_lock(
        &self,
        thread: &Handle,
        who @ (key, _): (&Arc<str>, &Arc<str>),
        lease: Duration,
        then: Then<TryLockReply>,
    ) -> Result<(), Then<TryLockReply>> {
        // WAIT confirms a single grant, so each has a call of its own.
        if self.min_replicas > 0 {
            return Err(then);
        }
        let operation = Operation::TryLock { lease, then };
        self.batcher
            .ask(thread, self.name(key, LOCK), who, operation);
        Ok(())
    }

    async fn renew(
        &self,
        key: &str,
        owner: &str,
        kind: Kind,
        lease: Duration,
        limit: Duration,
    ) -> Result<OwnerReply, Error> {
        let args = [
            Arg::Text(owner),
            Arg::Ms(lease + FENCE_TTL),
            Arg::Ms(FENCE_TTL),
            Arg::Text("levels"),
        ];
        let args = &args[..if kind == Kind::Reentrant { 4 } else { 3 }];
        let on = (&self.renewals, limit);
        let answer = self.call(on, &RENEW, (key, LOCK), args, true).await?;
        self.understood(key, reply::owner(answer))
    }

    async fn release(
        &self,
        key: &str,
        owner: &str,
        options: ReleaseOptions,
        limit: Duration,
    ) -> Result<OwnerReply, Error> {
        let call = release_call(&self.name(key, LOCK), owner, options);
        let on = (&*self.connection, limit);
        let answer = self.send(on, key, call, false).await?;
        self.understood(key, reply::owner(answer))
    }

    fn begin_release(
        &self,
        thread: &Handle,
        who @ (key, _): (&Arc<str>, &Arc<str>),
        options: ReleaseOptions,
        then: Then<OwnerReply>,
    ) -> Result<(), Then<OwnerReply>> {
        // Rare releases travel alone.
        if self.min_replicas > 0 || options != ReleaseOptions::default() {
            return Err(then);
        }
        let operation = Operation::Release { then };
        self.batcher
            .ask(thread, self.name(key, LOCK), who, operation);
        Ok(())
    }

    async fn holder(
        &self,
        key: &str,
        limit: Duration,
    ) -> Result<Option<(String, Duration)>, Error> {
        let (on, args) = ((&*self.connection, limit), [Arg::Ms(FENCE_TTL)]);
        let answer = self.call(on, &HOLDER, (key, LOCK), &args, false).await?;
        self.understood(key, reply::holder(answer))
    }

    async fn enter(
        &self,
        key: &str,
        (owner, nonce): (&str, &str),
        lease: Duration,
        limit: Duration,
    ) -> Result<EnterReply, Error> {
        let args = [
            Arg::Text(owner),
            Arg::Text(nonce),
            Arg::Ms(lease + FENCE_TTL),
            Arg::Ms(FENCE_TTL),
        ];
        let on = (&*self.connection, limit);
        let answer = self.call(on, &ENTER, (key, LOCK), &args, true).await?;
        self.understood(key, reply::enter(answer))
    }

    async fn leave(
        &self,
        key: &str,
        (owner, nonce): (&str, &str),
        which: LevelToLeave,
        limit: Duration,
    ) -> Result<LeaveReply, Error> {
        let args = [
            Arg::Text(owner),
            Arg::Text(nonce),
            Arg::Ms(FENCE_TTL),
            Arg::Text(match which {
                LevelToLeave::Named => "named",
                LevelToLeave::Newest => "newest",
                LevelToLeave::Unanswered => "unanswered",
            }),
        ];
        let on = (&*self.connection, limit);
        let answer = self.call(on, &LEAVE, (key, LOCK), &args, false).await?;
        self.understood(key, reply::leave(answer))
    }

    async fn claim_period(
        &self,
        key: &str,
        owner: &str,
        length: Duration,
        limit: Duration,
    ) -> Result<PeriodReply, Error> {
        let what = format!("period:{}", millis(length));
        let args = [
            Arg::Text(owner),
            Arg::Ms(length),
            Arg::Ms(period_kept(length)),
        ];
        let on = (&*self.connection, limit);
        let answer = self
            .call(on, &CLAIM_PERIOD, (key, &what), &args, true)
            .await?;
        self.understood(key, reply::claim_period(answer))
    }

    async fn release_period(
        &self,
        key: &str,
        owner: &str,
        (length, begin): (Duration, i64),
        limit: Duration,
    ) -> Result<(), Error> {
        let what = format!("period:{}", millis(length));
        let begin = begin.to_string();
        let args = [Arg::Text(owner), Arg::Text(&begin)];
        let on = (&*self.connection, limit);
        self.call(on, &RELEASE_PERIOD, (key, &what), &args, false)
            .await
            .map(drop)
    }

    async fn subscribe(&self, key: &str) {
        loop {
            let (confirm, confirmed) = oneshot::channel();
            let request = Request::Subscribe(key.to_owned(), confirm);
            self.subscriber.send(request);
            if confirmed.await.is_ok() {
                return;
            }
            // The listener has ended, because nobody had waited for a while.
            tokio::task::yield_now().await;
        }
    }

    fn unsubscribe(&self, key: &str) {
        self.subscriber.send(Request::Unsubscribe(key.to_owned()));
    }
}

/// Subscribes to releases through a [`Listener`], which runs while somebody waits, and a little longer.
struct Subscriber {
    client: Client,
    namespace: String,
    /// The id of the client: its own releases wake its waiters without a message.
    id: String,
    queues: Arc<WaitQueues>,
    listener: Mutex<Option<mpsc::UnboundedSender<Request>>>,
}

enum Request {
    /// The sender is used when the server has confirmed the subscription.
    Subscribe(String, oneshot::Sender<()>),
    Unsubscribe(String),
}

impl Subscriber {
    fn send(&self, request: Request) {
        let mut listener = self.listener.lock();
        let request = match listener.as_ref() {
            Some(requests) => match requests.send(request) {
                Ok(()) => return,
                // The listener has ended, because nobody had waited for a while.
                Err(mpsc::error::SendError(request)) => request,
            },
            None => request,
        };
        // `subscribe` is called on the client's thread, so the listener runs there.
        if let Request::Subscribe(..) = request {
            let (sender, requests) = mpsc::unbounded_channel();
            let _ = sender.send(request);
            *listener = Some(sender);
            tokio::spawn(
                Listener {
                    client: self.client.clone(),
                    prefix: format!("{}:{{", self.namespace),
                    id: self.id.clone(),
                    queues: self.queues.clone(),
                    requests,
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
    queues: Arc<WaitQueues>,
    requests: mpsc::UnboundedReceiver<Request>,
    /// The keys that somebody waits for.
    wanted: HashSet<String>,
    /// Waiters that the server has not confirmed yet.
    pending: Vec<(String, oneshot::Sender<()>)>,
}

impl Drop for Listener {
    /// Waiters then ask the store again, and so do those whose subscription is not confirmed yet.
    fn drop(&mut self) {
        self.requests.close();
        self.queues.subscription_ended();
    }
}

const RELEASED: &str = "}:released";

impl Listener {
    /// Ends when its client is gone, or when nobody has waited for a while.
    async fn run(mut self) {
        loop {
            if self.wanted.is_empty() {
                let next = tokio::time::timeout(IDLE, self.requests.recv());
                let Ok(Some(request)) = next.await else { break };
                self.note(request);
                continue;
            }
            match self.connection().await {
                SubscriberEnd::Gone => return,
                SubscriberEnd::Broken => tokio::time::sleep(RECONNECT_PAUSE).await,
                SubscriberEnd::Idle => {}
            }
        }
    }

    fn channel(&self, key: &str) -> String {
        format!("{}{key}{RELEASED}", self.prefix)
    }

    /// Returns the key to subscribe to, if it is a new one.
    fn note(&mut self, request: Request) -> Option<String> {
        match request {
            Request::Subscribe(key, confirm) => {
                self.pending.push((key.clone(), confirm));
                self.wanted.insert(key.clone()).then_some(key)
            }
            Request::Unsubscribe(key) => {
                self.wanted.remove(&key);
                None
            }
        }
    }

    /// One connection, from its subscriptions to its end.
    async fn connection(&mut self) -> SubscriberEnd {
        let limit = self.client.timeout * 2;
        let Ok(connection) = self.client.pubsub().await else {
            return SubscriberEnd::Broken;
        };
        let (mut sink, mut messages) = connection.split();
        let channels: Vec<String> = self.wanted.iter().map(|k| self.channel(k)).collect();
        if !subscribe(&mut sink, &channels, limit).await {
            return SubscriberEnd::Broken;
        }
        for key in self.may_have_missed() {
            self.queues.wake(key);
        }
        self.confirm();
        loop {
            tokio::select! {
                message = messages.next() => {
                    let Some(message) = message else { return SubscriberEnd::Broken };
                    self.received(&message);
                }
                request = self.requests.recv() => {
                    let Some(request) = request else { return SubscriberEnd::Gone };
                    let old = match &request {
                        Request::Unsubscribe(key) => Some(self.channel(key)),
                        Request::Subscribe(..) => None,
                    };
                    let new = self.note(request).map(|key| self.channel(&key));
                    if let Some(channel) = new
                        && !subscribe(&mut sink, &[channel], limit).await
                    {
                        return SubscriberEnd::Broken;
                    }
                    if let Some(channel) = old
                        && !matches!(tokio::time::timeout(limit, sink.unsubscribe(channel)).await, Ok(Ok(())))
                    {
                        return SubscriberEnd::Broken;
                    }
                    self.confirm();
                }
                () = tokio::time::sleep(IDLE), if self.wanted.is_empty() => return SubscriberEnd::Idle,
            }
        }
    }

    /// Messages that were published while there was no connection are lost. Waiters that are not confirmed yet ask
    /// again anyway.
    fn may_have_missed(&self) -> impl Iterator<Item = &str> {
        let known = |key: &&str| !self.pending.iter().any(|(new, _)| new == key);
        self.wanted.iter().map(String::as_str).filter(known)
    }

    fn confirm(&mut self) {
        for (_, confirm) in self.pending.drain(..) {
            let _ = confirm.send(());
        }
    }

    fn received(&self, message: &redis::Msg) {
        let key = message
            .get_channel_name()
            .strip_prefix(&self.prefix)
            .and_then(|rest| rest.strip_suffix(RELEASED));
        let ours = std::str::from_utf8(message.get_payload_bytes())
            .is_ok_and(|owner| made_by(&self.id, owner));
        if let Some(key) = key
            && !ours
        {
            self.queues.wake(key);
        }
    }
}

enum SubscriberEnd {
    /// The client is gone.
    Gone,
    Broken,
    /// Nobody waits.
    Idle,
}

/// False: the connection is of no use any more.
async fn subscribe(sink: &mut PubSubSink, channels: &[String], limit: Duration) -> bool {
    matches!(
        tokio::time::timeout(limit, sink.subscribe(channels)).await,
        Ok(Ok(()))
    )
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::LockClient;

    const URL: &str = "redis://127.0.0.1:1";

    /// A listener of the client `me` in the namespace `ns`, which nothing connects.
    fn listener(queues: &Arc<WaitQueues>) -> Listener {
        let (_, requests) = mpsc::unbounded_channel();
        Listener {
            client: Client::new(URL, &config::Store::from_url(URL).unwrap()).unwrap(),
            prefix: "ns:{".to_owned(),
            id: "me".to_owned(),
            queues: queues.clone(),
            requests,
            wanted: HashSet::new(),
            pending: vec![],
        }
    }

    #[test]
    fn a_message_wakes_who_waits_for_what_another_client_released() {
        let core = LockClient::open(URL).unwrap().core;
        let waiter = core.queues.join(&"k".into(), core.clone());
        let mut wakeup = waiter.wakeup();
        let listener = listener(&core.queues);
        for (channel, owner, wakes) in [
            ("ns:{k}:released", "host#other.1", true),
            ("ns:{k}:released", "host#me.1", false),
            ("ns:{l}:released", "host#other.1", false),
            ("n2:{k}:released", "host#other.1", false),
            ("ns:{k}:lock", "host#other.1", false),
        ] {
            let message = ["message", channel, owner].map(|s| Value::BulkString(s.into()));
            listener.received(&redis::Msg::from_value(&Value::Array(message.into())).unwrap());
            let woken = wakeup.changed().now_or_never().is_some();
            assert_eq!(woken, wakes, "{channel} {owner}");
        }
    }

    #[test]
    fn the_last_claim_is_remembered_for_two_periods_and_a_week_at_least() {
        let day = Duration::from_secs(86_400);
        for (days, kept) in [(1, 7), (3, 7), (4, 8), (366, 732)] {
            assert_eq!(period_kept(days * day), kept * day);
        }
        assert_eq!(FENCE_TTL, 7 * day);
    }

    #[test]
    fn a_key_is_subscribed_to_once_and_its_waiters_are_confirmed() {
        let core = LockClient::open(URL).unwrap().core;
        let mut listener = listener(&core.queues);
        assert_eq!(listener.channel("k"), "ns:{k}:released");
        let missed = |l: &Listener| l.may_have_missed().map(str::to_owned).collect::<Vec<_>>();
        let mut confirmed = vec![];
        for key in ["k", "k", "l"] {
            let (confirm, told) = oneshot::channel();
            let new = listener.note(Request::Subscribe(key.to_owned(), confirm));
            assert_eq!(new.is_some(), confirmed.len() != 1);
            assert!(new.is_none_or(|new| new == key));
            confirmed.push(told);
        }
        assert_eq!(missed(&listener), [""; 0]);
        listener.confirm();
        assert!(confirmed.iter_mut().all(|told| told.try_recv().is_ok()));
        assert_eq!(listener.note(Request::Unsubscribe("l".to_owned())), None);
        // After a new connection, who was confirmed before may have missed a release.
        assert_eq!(missed(&listener), ["k"]);
    }
}
