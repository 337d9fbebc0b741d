//! Connections to Redis: how they are made, shared by all tasks, and replaced when they break.
//!
//! A connection that failed is marked and never used again. The caller whose request failed repeats the request.

mod stream;

#[cfg(feature = "daemon")]
use std::collections::BTreeSet;
use std::{io, net::IpAddr, sync::Arc, time::Duration};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use parking_lot::{Mutex, MutexGuard};
use redis::{
    AsyncConnectionConfig, ConnectionAddr, ErrorKind, FromRedisValue, IntoConnectionInfo,
    RedisError,
    aio::MultiplexedConnection,
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
use tokio_util::task::AbortOnDropHandle;

use self::stream::{Certificates, Ended, Stream};
use super::Error;
use crate::config;
#[cfg(feature = "daemon")]
use crate::logic::moved;

/// A script: its text, and the SHA-1 by which the server knows it.
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) sha: String,
}

impl Script {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        Self {
            sha: redis::Script::new(&text).get_hash().to_owned(),
            text,
        }
    }

    /// The beginning of a call: to be followed by the arguments, of which there are about `args`. There is space for
    /// them at once: making a command is most of what a lock costs on our side.
    pub(crate) fn call<K: AsRef<str>>(
        &self,
        keys: impl ExactSizeIterator<Item = K>,
        args: usize,
    ) -> redis::Cmd {
        let bytes = 128 + 96 * keys.len() + 32 * args;
        let mut call = redis::Cmd::with_capacity(8 + keys.len() + args, bytes);
        call.arg("EVALSHA").arg(&*self.sha).arg(keys.len());
        for key in keys {
            call.arg(key.as_ref());
        }
        call
    }
}

/// Makes ring the process's cryptography provider; later calls have no effect.
pub fn install_crypto() {
    #[cfg(feature = "tls")]
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Where connections lead to, and whether one was astray at the last look at the host's name.
type Peers = (Vec<(IpAddr, Ended)>, bool);

#[derive(Clone)]
pub(crate) struct Client {
    client: redis::Client,
    /// None: the client is the caller's, and connects as it does by itself.
    certificates: Option<Certificates>,
    /// The URL without its password: messages name the store by it.
    pub(crate) address: String,
    /// The password that the server gets, because the server may repeat it in an error.
    password: Option<config::Secret>,
    pub(crate) timeout: Duration,
    peers: Arc<Mutex<Peers>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Client {
    pub(crate) fn new(url: &str, c: &config::Store) -> Result<Self, Error> {
        let address = config::StoreUrl::Redis(config::Secret::new(url)).to_string();
        #[cfg(not(feature = "tls"))]
        if address.starts_with("rediss:") || c.tls.is_some() {
            let reason =
                "this program was built without TLS; add the feature `tls` of the crate soloist"
                    .to_owned();
            return Err(Error::Refused { address, reason });
        }
        // Hide the error's detail: it is a part of the URL, which may be a secret.
        let info = url.into_connection_info().map_err(|e| {
            let mut reason = e.to_string();
            if let Some(detail) = e.detail() {
                reason = reason.replace(detail, "***");
            }
            refuse(&address, reason)
        })?;
        let mut settings = info.redis_settings().clone();
        if let Some(user) = &c.username {
            settings = settings.set_username(user);
        }
        if let Some(password) = &c.password {
            settings = settings.set_password(password.expose());
        }
        let password = settings.password().map(config::Secret::new);
        let tcp = TcpSettings::default()
            .set_nodelay(true)
            .set_keepalive(
                TcpKeepalive::new()
                    .with_time(Duration::from_secs(10))
                    .with_interval(Duration::from_secs(3)),
            )
            .set_user_timeout(Duration::from_secs(15));
        let info = info.set_redis_settings(settings).set_tcp_settings(tcp);
        let client = redis::Client::open(info).map_err(|e| refuse(&address, e.to_string()))?;
        let certificates = c.tls.as_ref().map(Certificates::read).transpose();
        let certificates = certificates.map_err(|why| refuse(&address, why))?;
        Ok(Self {
            client,
            certificates: Some(certificates.unwrap_or_default()),
            address,
            password,
            timeout: c.timeout,
            peers: Arc::default(),
        })
    }

    /// Uses a client that the caller made, with its settings for connecting.
    pub(crate) fn over(client: redis::Client, timeout: Duration) -> Self {
        let info = client.get_connection_info();
        let settings = info.redis_settings();
        let (scheme, db) = match info.addr() {
            ConnectionAddr::Unix(_) => ("redis+unix", "?db="),
            ConnectionAddr::TcpTls { .. } => ("rediss", "/"),
            _ => ("redis", "/"),
        };
        let mut address = format!("{scheme}://{}", info.addr());
        if settings.db() != 0 {
            address = format!("{address}{db}{}", settings.db());
        }
        Self {
            address,
            password: settings.password().map(config::Secret::new),
            timeout,
            client,
            certificates: None,
            peers: Arc::default(),
        }
    }

    pub(crate) fn error(&self, e: &RedisError) -> Error {
        // Take the first line: the answer of a server that is not Redis may have several.
        let (address, text) = (self.address.clone(), e.to_string());
        let reason = text.lines().next().unwrap_or_default();
        let code = code(e);
        let code = code.as_deref();
        let code = code.or((e.kind() == ErrorKind::Parse).then_some("PARSE"));
        let known = known(code, reason);
        let mut reason = self.without_password(reason);
        if let Some((.., meaning)) = known {
            reason = format!("{meaning} ({reason})");
        }
        let passing = is_lost(e) || known.is_some_and(|(_, passes, _)| *passes);
        // Another program wrote a value of another type under one of soloist's keys.
        if reason.contains("WRONGTYPE") {
            Error::Corrupt { address, reason }
        } else if passing {
            Error::Unreachable { address, reason }
        } else {
            Error::Refused { address, reason }
        }
    }

    /// The command that waits until `want` replicas have the writes of its own connection, for at most half of the time
    /// that a command may take. It returns how many have them.
    pub(crate) fn wait_for_replicas(&self, want: u32) -> redis::Cmd {
        let mut wait = redis::cmd("WAIT");
        // At least 1: WAIT takes 0 as no time limit.
        wait.arg(want)
            .arg((self.timeout.as_millis() as u64 / 2).max(1));
        wait
    }

    #[cfg(feature = "daemon")]
    pub(crate) fn not_replicated(&self, have: u32, want: u32) -> Error {
        Error::NotReplicated {
            address: self.address.clone(),
            have,
            want,
        }
    }

    /// Removes the password from an error: a server without HELLO, or a proxy, repeats the arguments that it got
    /// (`unknown command 'HELLO', with args beginning with: ...`).
    fn without_password(&self, text: &str) -> String {
        let end = text.find("with args beginning with").unwrap_or(text.len());
        let text = text[..end].trim_end_matches([' ', ',']);
        match self.password.as_ref().map(config::Secret::expose) {
            Some(password) if !password.is_empty() => text.replace(password, "***"),
            _ => text.to_owned(),
        }
    }

    fn config(&self) -> AsyncConnectionConfig {
        AsyncConnectionConfig::new().set_response_timeout(Some(self.timeout))
    }

    /// A connection for subscriptions.
    pub(crate) async fn pubsub(&self) -> Result<redis::aio::PubSub, Error> {
        let limit = self.timeout * 4;
        match tokio::time::timeout(limit, self.subscription()).await {
            Ok(made) => made.map_err(|e| self.error(&e)),
            Err(_) => Err(Error::Unreachable {
                address: self.address.clone(),
                reason: format!("no connection within {limit:?}"),
            }),
        }
    }

    /// A connection for subscriptions, without a time limit.
    pub(crate) async fn subscription(&self) -> Result<redis::aio::PubSub, RedisError> {
        match self.stream().await? {
            Some(stream) => {
                let settings = self.client.get_connection_info().redis_settings();
                redis::aio::PubSub::new(settings, stream).await
            }
            None => self.client.get_async_pubsub().await,
        }
    }

    pub(super) async fn connect(&self) -> Result<Connection, RedisError> {
        let made = tokio::time::timeout(self.timeout * 2, self.login()).await;
        let (inner, driver) =
            made.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))?;
        Ok(Connection {
            inner,
            driver,
            broken: false,
        })
    }

    async fn login(&self) -> Result<(MultiplexedConnection, Driver), RedisError> {
        let config = self.config();
        let Some(stream) = self.stream().await? else {
            let made = self
                .client
                .get_multiplexed_async_connection_with_config(&config);
            return Ok((made.await?, None));
        };
        let settings = self.client.get_connection_info().redis_settings();
        let made = MultiplexedConnection::new_with_config(settings, stream, config);
        let (inner, driver) = made.await?;
        let driver = AbortOnDropHandle::new(tokio::spawn(driver));
        Ok((inner, Some(Arc::new(driver))))
    }

    /// None: the caller's client makes its own.
    async fn stream(&self) -> Result<Option<Stream>, RedisError> {
        #[cfg(all(test, feature = "daemon"))]
        if let Some(stream) = crate::simulation::connect() {
            return Ok(Some(Stream::new(Box::pin(stream?)).0));
        }
        let Some(tls) = &self.certificates else {
            return Ok(None);
        };
        let mut peer = None;
        let info = self.client.get_connection_info();
        let stream = stream::open(info, tls, &mut peer, self.timeout).await?;
        let (stream, ended) = Stream::new(stream);
        let peers = &mut self.peers.lock().0;
        peers.retain(|(_, ended)| ended.is_used());
        peers.extend(peer.map(|peer| (peer, ended)));
        Ok(Some(stream))
    }

    /// Says so if the host's name means other addresses now than those that connections lead to. Once a second look has
    /// confirmed that, these connections end, and the next requests make others.
    #[cfg(feature = "daemon")]
    pub(crate) async fn moved(&self) -> Option<String> {
        // None leads to an address if the host is a socket.
        if self.peers.lock().0.is_empty() {
            return None;
        }
        let name = self.client.get_connection_info().addr().to_string();
        // In a task of its own, because it panics if the host has no thread for it.
        let asked = tokio::spawn(tokio::net::lookup_host(name.clone()));
        let answers = match tokio::time::timeout(self.timeout, asked).await {
            Ok(Ok(Ok(all))) => all.map(|address| address.ip().to_canonical()).collect(),
            _ => BTreeSet::new(),
        };
        let (all, astray) = &mut *self.peers.lock();
        all.retain(|(_, ended)| ended.is_used());
        let peers = all.iter().map(|(peer, _)| *peer).collect();
        if moved::look(astray, &answers, &peers)? {
            all.iter().for_each(|(_, ended)| ended.end());
        }
        let text = format!("{name} now means {answers:?}, this instance is connected to {peers:?}");
        Some(text.replace(['{', '}'], ""))
    }
}

/// The task that reads and writes for a connection; it ends with the last clone of the connection.
type Driver = Option<Arc<AbortOnDropHandle<()>>>;

fn refuse(address: &str, reason: impl Into<String>) -> Error {
    let (address, mut reason) = (address.to_owned(), reason.into());
    if let Some((.., meaning)) = known(None, &reason) {
        reason = format!("{meaning} ({reason})");
    }
    Error::Refused { address, reason }
}

pub(crate) const FULL: &str = "the server is full; raise its maxmemory or free some memory";
const CLUSTER: &str =
    "the server belongs to a Redis Cluster, which soloist does not support; name a single server";
pub(crate) const UNSAVED: &str =
    "the server cannot save its data, so it takes no writes; free some of its disk, or see its log";
pub(crate) const REPLICA: &str = "the server is a replica and takes no writes; name its primary in `url`, or wait for the failover";
const WANTS_PASSWORD: &str = "the server wants a password; set `password_file` in [store]";
const FORBIDDEN: &str =
    "the user lacks permissions that soloist needs; docs/operations.md has the ACL to set";
const STRANGERS: &str = "the server does not accept the user name and password; check `username` and `password_file` in [store]";
const CERTIFICATE: &str = "the server wants a certificate that it trusts; name one with `tls.cert` and `tls.key` in [store]";
const NO_TLS: &str =
    "the server there does not speak TLS; write `redis://` in `url`, or name its port for TLS";

/// The errors of which more can be said than the server says: a code, or words of the error; whether it passes by
/// itself (a server that starts, fails over or runs a long script); what it means, and what to do about it.
const KNOWN: [(&str, bool, &str); 32] = [
    ("OOM", true, FULL),
    ("MISCONF", true, UNSAVED),
    (
        "LOADING",
        true,
        "the server still reads its data; wait until it has",
    ),
    (
        "BUSY",
        true,
        "a script of another program blocks the server; wait for its end, or use SCRIPT KILL",
    ),
    ("READONLY", true, REPLICA),
    ("MASTERDOWN", true, REPLICA),
    (
        "NOREPLICAS",
        true,
        "the server has fewer replicas than its `min-replicas-to-write`; connect replicas, or lower that",
    ),
    (
        "max number of clients reached",
        true,
        "the server has too many clients; raise its `maxclients`, or disconnect some",
    ),
    ("TRYAGAIN", true, CLUSTER),
    ("CLUSTERDOWN", true, CLUSTER),
    ("CROSSSLOT", false, CLUSTER),
    ("MOVED", false, CLUSTER),
    ("not allowed in cluster mode", false, CLUSTER),
    ("NOAUTH", false, WANTS_PASSWORD),
    // The server's answer to a command of more than ten words.
    ("unauthenticated multibulk length", false, WANTS_PASSWORD),
    ("WRONGPASS", false, STRANGERS),
    ("AuthenticationFailed", false, STRANGERS),
    ("NOPERM", false, FORBIDDEN),
    // NOPERM inside a script.
    ("The user executing the script can't", false, FORBIDDEN),
    (
        "DENIED",
        false,
        "the server is in protected mode, and serves its own host alone; give it a password or a `bind`",
    ),
    (
        "DB index is out of range",
        false,
        "the server has no database of this number; take a lower one in `url`, or raise its `databases`",
    ),
    (
        "unknown command",
        false,
        "the server lacks a command that soloist needs; it must be Redis 6.2 or newer, without renamed commands",
    ),
    // The kind of the error.
    (
        "PARSE",
        false,
        "the server there does not speak the protocol of Redis; check the host and the port",
    ),
    (
        "UnknownIssuer",
        true,
        "no known authority signed the server's certificate; name the PEM file of the one that did with `tls.ca` in \
         [store]",
    ),
    (
        "not valid for name",
        true,
        "the server's certificate is for another name; use that name in `url`",
    ),
    (
        "certificate expired",
        true,
        "the server's certificate has expired; renew it",
    ),
    ("CertificateRequired", true, CERTIFICATE),
    ("UnknownCA", true, CERTIFICATE),
    (
        "KeyMismatch",
        false,
        "the key does not belong to the certificate; name a pair with `tls.cert` and `tls.key` in [store]",
    ),
    ("corrupt message", true, NO_TLS),
    ("InvalidContentType", true, NO_TLS),
    (stream::NO_HANDSHAKE, true, NO_TLS),
];

fn known(code: Option<&str>, reason: &str) -> Option<&'static (&'static str, bool, &'static str)> {
    KNOWN.iter().find(|(sign, ..)| {
        let is_code = sign.bytes().all(|b| b.is_ascii_uppercase());
        if is_code {
            code == Some(sign)
        } else {
            reason.contains(sign)
        }
    })
}

/// Whether the reason of an error says what it means and what to do.
#[cfg(any(test, feature = "daemon"))]
pub(crate) fn explains(reason: &str) -> bool {
    KNOWN
        .iter()
        .any(|(.., meaning)| reason.starts_with(meaning))
}

/// True for an error of the network: the server may have carried out the request or not.
pub(crate) fn is_lost(e: &RedisError) -> bool {
    e.is_io_error() || e.is_timeout() || e.is_connection_dropped() || e.kind() == ErrorKind::Io
}

/// True if a key has a type that the command cannot use; also for such an error inside a script of a server before 7.0.
pub(crate) fn is_wrong_type(e: &RedisError) -> bool {
    // Redis 6.2 omits the dash if the error comes from the command itself.
    let inside = |d: &str| d.contains(": -WRONGTYPE ") || d.contains(": WRONGTYPE ");
    e.code() == Some("WRONGTYPE") || e.detail().is_some_and(inside)
}

/// The code of an error, of the first one in a pipeline. If a command inside a script failed, a server before 7.0 puts
/// the code of that error into the text `ERR Error running script (...): @user_script:1: -CODE ...`.
fn code(e: &RedisError) -> Option<String> {
    let of_server = e.clone().into_server_errors();
    let Some((_, first)) = of_server.as_deref().and_then(<[_]>::first) else {
        return e.code().map(ToOwned::to_owned);
    };
    let inner = first.details().and_then(|d| {
        let mut codes = KNOWN.iter().map(|(code, ..)| *code);
        codes.find(|c| d.contains(&format!(": -{c} ")))
    });
    Some(inner.unwrap_or(first.code()).to_owned())
}

/// One connection that all tasks use at once. The first task that needs it makes it, and it is replaced when it breaks.
/// No task checks it out, as it would from a pool, so a command costs a round trip and nothing else.
pub(crate) struct SharedConnection {
    client: Client,
    current: Mutex<Current>,
}

type Opening = Shared<BoxFuture<'static, Result<Connection, Error>>>;

#[derive(Default)]
struct Current {
    /// Counts the connections, so that a task that found one broken does not discard the next one.
    number: u64,
    opening: Option<Opening>,
}

impl SharedConnection {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client,
            current: Mutex::default(),
        }
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock()
    }

    /// The connection, or the reason why there is none. If several callers need a new one, only one of them connects.
    async fn connection(&self) -> Result<(u64, Connection), Error> {
        let (number, opening) = {
            let mut current = self.current();
            let made = current.opening.as_ref().and_then(Shared::peek);
            // Closed while it was idle.
            if made.is_some_and(|made| made.as_ref().is_ok_and(Connection::is_broken)) {
                current.number += 1;
                current.opening = None;
            }
            let number = current.number;
            let opening = current.opening.get_or_insert_with(|| {
                let client = self.client.clone();
                let connect = async move { client.connect().await.map_err(|e| client.error(&e)) };
                connect.boxed().shared()
            });
            (number, opening.clone())
        };
        let made = opening.await;
        if made.is_err() {
            self.replace(number);
        }
        Ok((number, made?))
    }

    /// The next caller gets a new connection.
    fn replace(&self, number: u64) {
        let mut current = self.current();
        if current.number == number {
            current.number += 1;
            current.opening = None;
        }
    }

    /// Gives `ask` the connection, and stops waiting for it after `limit`.
    pub(crate) async fn run<T>(
        &self,
        limit: Duration,
        ask: impl AsyncFnOnce(&mut Connection) -> Result<T, RedisError>,
    ) -> Result<T, CallError> {
        let mut number = None;
        let work = async {
            let (n, mut connection) = self.connection().await.map_err(CallError::NoAnswer)?;
            number = Some(n);
            let out = ask(&mut connection).await;
            if connection.broken {
                self.replace(n);
            }
            out.map_err(CallError::Redis)
        };
        let out = tokio::time::timeout(limit, work).await;
        out.unwrap_or_else(|_| {
            // The server may be gone: no other caller should wait on this connection.
            if let Some(n) = number {
                self.replace(n);
            }
            Err(CallError::NoAnswer(self.timed_out(limit)))
        })
    }

    pub(crate) fn timed_out(&self, limit: Duration) -> Error {
        Error::Unreachable {
            address: self.client.address.clone(),
            reason: format!("no answer within {limit:?}"),
        }
    }
}

/// Why a call got no answer that it can use.
pub(crate) enum CallError {
    /// No connection, or no answer in time.
    NoAnswer(Error),
    /// The server or the network returned an error.
    Redis(RedisError),
}

impl CallError {
    pub(crate) fn at(self, client: &Client) -> Error {
        match self {
            Self::NoAnswer(e) => e,
            Self::Redis(e) => client.error(&e),
        }
    }
}

/// How many times one call loads a script that the server does not know. More than once, because the server may forget
/// the script again before the call arrives.
pub(crate) const MAX_LOADS: u32 = 10;

#[derive(Clone)]
pub(crate) struct Connection {
    inner: MultiplexedConnection,
    driver: Driver,
    broken: bool,
}

impl Connection {
    pub(crate) async fn query<T: FromRedisValue>(
        &mut self,
        c: &redis::Cmd,
    ) -> Result<T, RedisError> {
        let out = c.query_async(&mut self.inner).await;
        self.note(out)
    }
    /// Calls a script with EVALSHA. If the server does not know the script, loads it and calls it again.
    pub(crate) async fn eval<T: FromRedisValue>(
        &mut self,
        script: &Script,
        call: &redis::Cmd,
    ) -> Result<T, RedisError> {
        let mut loads = 0;
        loop {
            match self.query(call).await {
                Err(e) if e.code() == Some("NOSCRIPT") && loads < MAX_LOADS => {
                    self.load(script).await?;
                    loads += 1;
                }
                out => return out,
            }
        }
    }
    pub(crate) async fn load(&mut self, script: &Script) -> Result<(), RedisError> {
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(&*script.text);
        self.query::<String>(&load).await.map(drop)
    }
    /// Marks the connection as broken if the error means that. A timeout does: the next request must not get the late
    /// answer, and the server may be gone. READONLY does too: a primary that was demoted does not recover on this
    /// connection.
    pub(crate) fn note_error(&mut self, e: &RedisError) {
        self.broken |= e.is_io_error()
            || e.is_timeout()
            || e.is_connection_dropped()
            || e.is_unrecoverable_error()
            || code(e).as_deref() == Some("READONLY");
    }
    /// True: it failed, or the server or a proxy has closed it, perhaps because it was idle. It must not be used again.
    pub(crate) fn is_broken(&self) -> bool {
        let driver = self.driver.as_ref();
        self.broken || driver.is_some_and(|driver| driver.is_finished())
    }
    fn note<T>(&mut self, out: Result<T, RedisError>) -> Result<T, RedisError> {
        if let Err(e) = &out {
            self.note_error(e);
        }
        out
    }
}

/// Only the store of a fleet needs these.
#[cfg(feature = "daemon")]
impl Connection {
    pub(crate) async fn pipe<T: FromRedisValue>(
        &mut self,
        p: &redis::Pipeline,
    ) -> Result<T, RedisError> {
        let out = p.query_async(&mut self.inner).await;
        self.note(out)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Client, Error, explains};

    /// What a server answers, what soloist makes of it, and whether it may pass by itself.
    #[test]
    fn each_error_of_a_server_says_what_it_means_and_what_to_do() {
        let client = redis::Client::open("redis://127.0.0.1/").expect("a URL");
        let client = Client::over(client, Duration::from_millis(500));
        for (answer, said, passes) in [
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                "raise its maxmemory",
                true,
            ),
            (
                "MISCONF Redis is configured to save RDB snapshots",
                "free some of its disk",
                true,
            ),
            (
                "ERR Error running script (call to f): @user_script:1: -MISCONF Redis",
                "free some of its disk",
                true,
            ),
            (
                "LOADING Redis is loading the dataset in memory",
                "wait until it has",
                true,
            ),
            ("BUSY Redis is busy running a script.", "SCRIPT KILL", true),
            (
                "READONLY You can't write against a read only replica.",
                "name its primary",
                true,
            ),
            (
                "MASTERDOWN Link with MASTER is down",
                "name its primary",
                true,
            ),
            (
                "NOREPLICAS Not enough good replicas to write.",
                "min-replicas-to-write",
                true,
            ),
            (
                "ERR max number of clients reached",
                "raise its `maxclients`",
                true,
            ),
            (
                "CROSSSLOT Keys in request don't hash to the same slot",
                "a Redis Cluster",
                false,
            ),
            ("MOVED 3999 127.0.0.1:6381", "a Redis Cluster", false),
            (
                "NOAUTH Authentication required.",
                "set `password_file`",
                false,
            ),
            (
                "WRONGPASS invalid username-password pair",
                "check `username` and `password_file`",
                false,
            ),
            (
                "NOPERM this user has no permissions to run the 'eval' command",
                "docs/operations.md",
                false,
            ),
            (
                "DENIED Redis is running in protected mode",
                "protected mode",
                false,
            ),
            (
                "ERR DB index is out of range",
                "raise its `databases`",
                false,
            ),
            (
                "ERR unknown command 'EVALSHA', with args beginning with: 'x'",
                "Redis 6.2 or newer",
                false,
            ),
        ] {
            let value = redis::parse_redis_value(format!("-{answer}\r\n").as_bytes());
            let Ok(redis::Value::ServerError(e)) = value else {
                panic!("no error: {value:?}");
            };
            let e = client.error(&e.into());
            assert_eq!(e.is_transient(), passes, "{e}");
            let (Error::Unreachable { reason, .. } | Error::Refused { reason, .. }) = e else {
                panic!("{e}");
            };
            assert!(
                reason.contains(said) && explains(&reason),
                "{answer}: {reason}"
            );
        }
        let other = redis::parse_redis_value(b"-ERR something else\r\n");
        let Ok(redis::Value::ServerError(e)) = other else {
            panic!("no error: {other:?}");
        };
        let e = client.error(&e.into()).to_string();
        assert!(e.contains("something else") && !explains(&e), "{e}");
    }

    /// WAIT takes 0 as no time limit: the shortest timeouts must not become one.
    #[test]
    fn waiting_for_replicas_has_a_time_limit_however_short_a_timeout_is() {
        for (timeout, limit) in [(0, "1"), (1, "1"), (2, "1"), (3, "1"), (500, "250")] {
            let client = redis::Client::open("redis://127.0.0.1/").expect("a URL");
            let client = Client::over(client, Duration::from_millis(timeout));
            let packed = client.wait_for_replicas(2).get_packed_command();
            let packed = String::from_utf8(packed).expect("text");
            assert!(
                packed.ends_with(&format!("\r\n{limit}\r\n")),
                "{timeout} ms: {packed:?}"
            );
        }
    }
}
