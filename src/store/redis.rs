//! The store of a fleet: one Redis primary, and one script (lua/) for each atomic step.
//!
//! All keys start with the namespace: `{<job>}:state` (a hash that does not expire); `{<job>}:history`,
//! `{<job>}:decisions` and `{<job>}:output:<run>`, which expire; `instances`, `drains`, `epoch`, `jobs` and
//! `notices`. The channel is `events`.

mod ask;
pub(crate) mod check;
mod hints;
mod pool;
mod renewals;
pub(crate) mod reply;
mod script;
pub(crate) mod state;

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use redis::Value;
use tokio::sync::broadcast;

#[doc(hidden)]
pub use self::script::script;
use self::{
    ask::{Arg, Holder, extra, members, stored, to_json},
    pool::{Pool, Pooled},
    renewals::Renewals,
    script::{
        CLAIM, COMPARE_AND_SET, HEARTBEAT, JOBS, LINES, NOTE, NOTICES, OBSERVE, OUTPUT,
        READ_OUTPUT, RENEW, SETTLE, WRONG_TYPE,
    },
};
pub use super::connection::install_crypto;
use super::{
    BATCH, Beat, Changed, Decision, Error, Fleet, Notices, Output, Problem, Reply, Store, Tail,
    connection::{Client, Connection, Script},
    fill, tidy,
};
use crate::{
    clock::{Boottime, StoreClock},
    config,
    logic::{
        belief,
        claim::{
            self, Answer, Claim, Control, Controlled, Effects, Event, Register, Registration,
            Renew, Renewal, Settle, Settlement, State, Target,
        },
        notify::lease::{Write, Written},
    },
    model::{InstanceId, JobName, Marks, RunId, RunRecord},
};

/// The most commands with output that are under way at one time.
const OUTPUTS: u32 = 2;
/// How many times an instance tries to change a state that others change at the same time.
const COMPARE_AND_SET_TRIES: usize = 50;

/// The store of a fleet, on a Redis server.
pub struct RedisStore {
    client: Client,
    namespace: String,
    channel: String,
    min_replicas: u32,
    /// For claims, settlements and reading.
    pool: Pool,
    renewals: Arc<Renewals>,
    /// For output, of which there may be much: it has its own connections and travels a little at a time, so that no
    /// other request waits behind it.
    outputs: Pool,
    output_turns: tokio::sync::Semaphore,
    events: broadcast::Sender<Event>,
    changes: broadcast::Sender<Changed>,
    /// The time that the daemon believes the server's clock to show.
    clock: Arc<OnceLock<Arc<StoreClock>>>,
    /// The tasks that receive hints and changes; they end with the store.
    listener: OnceLock<tokio::task::AbortHandle>,
    change_listener: OnceLock<tokio::task::AbortHandle>,
}

impl RedisStore {
    /// Prepares a store at `url`. It connects with the first request.
    ///
    /// # Errors
    /// The URL, a certificate or a key cannot be used.
    pub fn open(url: &str, c: &config::Store) -> Result<Self, Error> {
        let client = Client::new(url, c)?;
        let clock = Arc::default();
        Ok(Self {
            pool: Pool::new(client.clone(), c.pool_size, 1),
            renewals: Renewals::new(client.clone(), c.min_replicas, Arc::clone(&clock)),
            outputs: Pool::new(client.clone(), OUTPUTS, 0),
            output_turns: tokio::sync::Semaphore::new(OUTPUTS as usize),
            channel: format!("{}:events", c.namespace),
            namespace: c.namespace.clone(),
            min_replicas: c.min_replicas,
            events: broadcast::channel(super::HINTS).0,
            changes: broadcast::channel(super::CHANGES).0,
            clock,
            listener: OnceLock::new(),
            change_listener: OnceLock::new(),
            client,
        })
    }

    fn key(&self, job: &JobName, what: &str) -> String {
        format!("{}:{{{job}}}:{what}", self.namespace)
    }
    fn global(&self, what: &str) -> String {
        format!("{}:{what}", self.namespace)
    }

    async fn connection(&self) -> Result<Pooled<'_>, Error> {
        self.pool.checkout().await
    }

    /// Runs a script whose answer begins with now_us and incarnation. With `confirm`, waits until `min_replicas`
    /// replicas have its writes.
    async fn run(
        &self,
        pool: &Pool,
        script: &Script,
        keys: &[String],
        args: &[Arg<'_>],
        confirm: bool,
    ) -> Result<Reply<Vec<Value>>, Error> {
        let mut c = pool.checkout().await?;
        let sent = Boottime::now();
        let believed = Arg::String(
            self.believed_ms(sent)
                .map_or(String::new(), |ms| ms.to_string()),
        );
        let value = match self.eval(&mut c, script, keys, args, &believed).await {
            Ok(value) => value,
            Err(e) => {
                // For the next request, which may have to wait for it.
                drop(c);
                return Err(self.with_key(e, keys).await);
            }
        };
        if confirm && self.min_replicas > 0 {
            // On the same connection: WAIT counts only the writes of its own.
            let wait = self.client.wait_for_replicas(self.min_replicas);
            let have: u32 = c.query(&wait).await.map_err(|e| self.client.error(&e))?;
            if have < self.min_replicas {
                return Err(self.client.not_replicated(have, self.min_replicas));
            }
        }
        self.reply(value, sent, Boottime::now())
    }

    /// Reads a script's answer, which begins with now_us and incarnation.
    fn reply(
        &self,
        value: Vec<Value>,
        sent: Boottime,
        received: Boottime,
    ) -> Result<Reply<Vec<Value>>, Error> {
        let (now_us, incarnation, value) = self.understood(reply::begin(value))?;
        Ok(Reply {
            value,
            now_us,
            incarnation: incarnation.into(),
            sent,
            received,
        })
    }

    async fn eval(
        &self,
        c: &mut Connection,
        script: &Script,
        keys: &[String],
        args: &[Arg<'_>],
        believed: &Arg<'_>,
    ) -> Result<Vec<Value>, Error> {
        let mut call = ask::call(script, keys, args);
        believed.write(&mut call);
        c.eval(script, &call)
            .await
            .map_err(|e| self.client.error(&e))
    }

    /// Makes changes to these keys.
    async fn pipe(&self, p: &redis::Pipeline, keys: &[String]) -> Result<(), Error> {
        let made = self.connection().await?.pipe(p).await;
        match made {
            Ok(()) => Ok(()),
            Err(e) => Err(self.with_key(self.client.error(&e), keys).await),
        }
    }

    /// Names the keys in an error that says that a value has another type than soloist gives it: the server does not.
    async fn with_key(&self, e: Error, keys: &[String]) -> Error {
        let Error::Corrupt { address, reason } = e else {
            return e;
        };
        let wrong = match keys {
            _ if !reason.contains("WRONGTYPE") => vec![],
            [one] => vec![one.clone()],
            _ => self.wrong_types(keys).await,
        };
        let reason = match wrong.is_empty() {
            true => reason,
            false => format!(
                "another program gave {} a value of another type than soloist's: rename or delete that key \
                 (if it ends in `:state`, only while no run of its job is active; {reason})",
                wrong.join(", ")
            ),
        };
        Error::Corrupt { address, reason }
    }

    /// Those of the keys that have values of another type; none if the server does not say.
    async fn wrong_types(&self, keys: &[String]) -> Vec<String> {
        let asked = async {
            let mut c = self.pool.checkout().await?;
            let none = Arg::Str("");
            let answer = self.eval(&mut c, &WRONG_TYPE, keys, &[], &none).await?;
            let (_, _, names) = self.understood(reply::begin(answer))?;
            Ok::<_, Error>(names)
        };
        let names = asked.await.unwrap_or_default();
        let names = names
            .into_iter()
            .map(|name| redis::from_redis_value(name).unwrap_or_default());
        names.collect()
    }

    /// The time that the daemon believes the server's clock to show at `moment`, in Unix ms; None: it does not know.
    fn believed_ms(&self, moment: Boottime) -> Option<i64> {
        Some(self.clock.get()?.at(moment)?.div_euclid(1000))
    }
    fn in_doubt<T>(&self, reply: &Reply<T>) -> bool {
        self.believed_ms(reply.sent)
            .is_some_and(|ms| belief::in_doubt(ms, reply.now_us.div_euclid(1000)))
    }

    fn understood<T>(&self, read: Result<T, String>) -> Result<T, Error> {
        read.map_err(|reason| self.corrupt(&reason))
    }
    fn corrupt(&self, reason: &str) -> Error {
        Error::Corrupt {
            address: self.client.address.clone(),
            reason: reason.to_owned(),
        }
    }

    async fn claim_some(&self, claims: &[Claim]) -> Result<Reply<Vec<Answer>>, Error> {
        let Some(first) = claims.first() else {
            return Err(self.corrupt("no claims"));
        };
        let mut keys = Vec::with_capacity(claims.len() * 2);
        let mut args: Vec<Arg<'_>> = Vec::with_capacity(3 + claims.len() * 9);
        args.extend([
            first.instance.as_str().into(),
            first.host.as_str().into(),
            self.channel.as_str().into(),
        ]);
        for c in claims {
            keys.push(self.key(&c.job, "state"));
            keys.push(self.key(&c.job, "history"));
            args.push(c.job.as_str().into());
            args.push(match &c.target {
                Target::Scheduled(at) => Arg::Int(at.0),
                Target::Manual { .. } => Arg::Str(""),
            });
            args.push(Arg::Int(c.known.0));
            args.push(Arg::String(c.run.to_string()));
            args.push(Arg::Int(c.start_by));
            args.push(c.overlap.as_str().into());
            args.push(c.trigger.as_str().into());
            args.push(Arg::String(members(&Holder {
                run: c.run,
                instance: &c.instance,
                host: &c.host,
                lease: c.lease,
                definition: &c.definition,
            })));
            args.push(Arg::String(extra(c)));
        }
        let reply = self.run(&self.pool, &CLAIM, &keys, &args, true).await?;
        if reply.value.len() != claims.len() {
            return Err(self.corrupt("the number of answers is not the number of claims"));
        }
        let answers: Vec<Answer> = claims
            .iter()
            .zip(&reply.value)
            .map(|(c, v)| self.understood(reply::answer(c, v)))
            .collect::<Result<_, _>>()?;
        Ok(reply.map(|_| answers))
    }

    /// Reads the states of at most [`BATCH`] jobs.
    async fn observe_some(&self, jobs: &[JobName]) -> Result<Reply<Vec<state::Fields>>, Error> {
        let keys: Vec<String> = jobs.iter().map(|j| self.key(j, "state")).collect();
        let reply = self.run(&self.pool, &OBSERVE, &keys, &[], false).await?;
        let fields = reply
            .value
            .iter()
            .map(|v| self.understood(reply::fields(v)))
            .collect::<Result<Vec<_>, _>>()?;
        if fields.len() != jobs.len() {
            return Err(self.corrupt("the number of states is not that of jobs"));
        }
        Ok(reply.map(|_| fields))
    }

    /// Joins several answers into one, which counts from the oldest request. If there is none, asks the server for the
    /// time.
    async fn join<T>(&self, parts: Vec<Reply<Vec<T>>>) -> Result<Reply<Vec<T>>, Error> {
        let joined = parts.into_iter().reduce(|a, b| {
            let mut value = a.value;
            value.extend(b.value);
            Reply {
                value,
                now_us: b.now_us,
                incarnation: b.incarnation,
                sent: a.sent.min(b.sent),
                received: a.received.max(b.received),
            }
        });
        match joined {
            Some(reply) => Ok(reply),
            None => Ok(self.observe_some(&[]).await?.map(|_| vec![])),
        }
    }

    fn decode(&self, job: &JobName, fields: &state::Fields) -> Result<Option<State>, Error> {
        state::decode(fields).map_err(|e| self.corrupt(&format!("{}: {e}", self.place(job))))
    }

    /// The newest lines of a list, each read as JSON. Logs the number of those that cannot be read.
    async fn lines<T: serde::de::DeserializeOwned>(
        &self,
        what: &str,
        job: &JobName,
        key: &str,
        most: usize,
    ) -> Result<Vec<T>, Error> {
        let keys = [self.key(job, key)];
        let args = [Arg::Int(most as i64)];
        let reply = self.run(&self.pool, &LINES, &keys, &args, false).await?;
        let lines = reply.value.iter().map(reply::line);
        Ok(super::readable(what, job, lines))
    }

    /// Writes a changed state back, with its effects. False: another instance changed the state meanwhile.
    async fn compare_and_set(
        &self,
        job: &JobName,
        incarnation: &str,
        was: &state::Fields,
        now: &State,
        effects: &Effects,
        epoch: Option<&str>,
    ) -> Result<bool, Error> {
        let (set, remove) = state::diff(was, now);
        let mut args: Vec<Arg<'_>> = vec![
            incarnation.into(),
            self.channel.as_str().into(),
            epoch.unwrap_or_default().into(),
            job.as_str().into(),
        ];
        let mut list = |items: Vec<String>| {
            args.push(Arg::Int(items.len() as i64));
            args.extend(items.into_iter().map(Arg::String));
        };
        list(
            was.iter()
                .flat_map(|(k, v)| [k.clone(), v.clone()])
                .collect(),
        );
        list(set);
        list(remove);
        list(effects.records.iter().map(to_json).collect());
        list(effects.events.iter().map(to_json).collect());
        let keys = [
            self.key(job, "state"),
            self.key(job, "history"),
            self.global("epoch"),
            self.global("jobs"),
        ];
        let reply = self
            .run(&self.pool, &COMPARE_AND_SET, &keys, &args, false)
            .await?;
        self.understood(reply::compare_and_set(&reply.value))
    }

    /// Reads a job's state, lets `f` decide on it, and writes it back. Starts again if another instance changed the
    /// state in between.
    async fn change<T>(
        &self,
        job: &JobName,
        f: impl Fn(&mut Option<State>, i64, &str, &mut Effects) -> T + Send,
    ) -> Result<Reply<(T, Option<State>)>, Error> {
        for _ in 0..COMPARE_AND_SET_TRIES {
            let reply = self.observe_some(std::slice::from_ref(job)).await?;
            let was = reply.value.first().cloned().unwrap_or_default();
            let before = self.decode(job, &was)?;
            let (mut after, mut effects) = (before.clone(), Effects::default());
            let doubted = self
                .believed_ms(reply.sent)
                .filter(|_| self.in_doubt(&reply));
            let now_us = doubted.map_or(reply.now_us, |ms| ms * 1000);
            let value = f(&mut after, now_us, &reply.incarnation, &mut effects);
            let done = match &after {
                Some(now) if after != before || effects != Effects::default() => {
                    self.compare_and_set(job, &reply.incarnation, &was, now, &effects, None)
                        .await?
                }
                _ => true,
            };
            if done {
                return Ok(reply.map(|_| (value, after)));
            }
        }
        Err(Error::Unreachable {
            address: self.client.address.clone(),
            reason: format!(
                "others changed the state of `{job}` during each of {COMPARE_AND_SET_TRIES} attempts to change it"
            ),
        })
    }
}

impl RedisStore {
    fn keys_of_heartbeat(&self) -> [String; 4] {
        ["instances", "drains", "epoch", "jobs"].map(|name| self.global(name))
    }

    async fn beat(&self, args: &[Arg<'_>]) -> Result<Reply<Fleet>, Error> {
        let keys = self.keys_of_heartbeat();
        let reply = self.run(&self.pool, &HEARTBEAT, &keys, args, false).await?;
        let fleet = self.understood(reply::fleet(&reply.value))?;
        Ok(reply.map(|_| fleet))
    }
}

#[async_trait]
impl Store for RedisStore {
    fn address(&self) -> &str {
        &self.client.address
    }
    fn place(&self, job: &JobName) -> String {
        self.key(job, "state")
    }
    fn durable(&self) -> bool {
        false
    }
    fn believe(&self, clock: Arc<StoreClock>) {
        let _ = self.clock.set(clock);
    }

    async fn check(&self) -> Result<Vec<Problem>, Error> {
        if let Some(text) = self.client.moved().await {
            return Ok(vec![Problem { fatal: true, text }]);
        }
        // INFO instead of CONFIG GET: few users may use CONFIG, and the scripts need INFO anyway.
        let mut p = redis::pipe();
        for section in ["server", "memory", "replication", "persistence"] {
            p.cmd("INFO").arg(section);
        }
        let (server, memory, replication, persistence): (String, String, String, String) = self
            .connection()
            .await?
            .pipe(&p)
            .await
            .map_err(|e| self.client.error(&e))?;
        let info = check::Sections {
            server: &server,
            memory: &memory,
            replication: &replication,
            persistence: &persistence,
        };
        let mut found = check::problems(info, self.min_replicas);
        if let Err(e) = self.renewals.ready().await {
            let text = format!(
                "there is no connection for renewing leases, so runs would be ended; if the server's maxclients is \
                 reached, raise it ({e})"
            );
            found.push(Problem { fatal: true, text });
        }
        Ok(found)
    }

    async fn claim(&self, claims: &[Claim]) -> Result<Reply<Vec<Answer>>, Error> {
        if !claims.is_empty() && claims.len() <= BATCH {
            return self.claim_some(claims).await;
        }
        let parts =
            futures_util::future::try_join_all(claims.chunks(BATCH).map(|c| self.claim_some(c)))
                .await?;
        self.join(parts).await
    }

    async fn renew(&self, r: &Renew) -> Result<Reply<Renewal>, Error> {
        let args = [
            Arg::String(r.run.id.to_string()),
            Arg::Int(r.run.occurrence.0),
            Arg::Int(i64::from(r.run.attempt)),
            Arg::Int(i64::from(r.seq)),
            Arg::String(if r.late {
                String::new()
            } else {
                members(&r.run)
            }),
            Arg::String(r.reclaim.clone()),
        ];
        let keys = [self.key(&r.job, "state")];
        let call = ask::call(&RENEW, &keys, &args);
        let (value, sent, received) = match self.renewals.send(call).await {
            Ok(answer) => answer,
            Err(e) => return Err(self.with_key(e, &keys).await),
        };
        let reply = self.reply(value, sent, received)?;
        let renewal = self.understood(reply::renewal(&reply.value))?;
        Ok(reply.map(|_| renewal))
    }

    async fn settle(&self, s: &Settle, output: &Tail) -> Result<Reply<Settlement>, Error> {
        let r = &s.record;
        let keys = [
            self.key(&r.job, "state"),
            self.key(&r.job, "history"),
            self.key(&r.job, &format!("output:{}", s.run)),
        ];
        let args = [
            Arg::String(s.run.to_string()),
            Arg::Int(r.occurrence.0),
            r.outcome.as_str().into(),
            Arg::String(stored(r)),
            self.channel.as_str().into(),
            s.next_attempt.map_or("", |a| a.trigger.as_str()).into(),
            Arg::Int(s.next_attempt.map_or(0, |a| a.delay_ms)),
            r.job.as_str().into(),
            Arg::Bytes(&output.data),
            Arg::Int(output.before as i64),
            Arg::Int(output.more as i64),
            Arg::Int(i64::from(r.attempt)),
            r.finished_at.map_or(Arg::from(""), Arg::Int),
            Arg::String(output.stderr.to_text()),
            r.started_at.map_or(Arg::from(""), Arg::Int),
        ];
        let reply = self.run(&self.pool, &SETTLE, &keys, &args, false).await?;
        let settlement = self.understood(reply::settlement(&reply.value))?;
        Ok(reply.map(|_| settlement))
    }

    async fn register(
        &self,
        jobs: &[Register],
    ) -> Result<Reply<Vec<(Registration, Option<State>)>>, Error> {
        let mut parts = vec![];
        for chunk in jobs.chunks(BATCH) {
            let names = chunk.iter().map(|r| r.job.clone());
            let read = self.observe_some(&names.collect::<Vec<_>>()).await?;
            if self.in_doubt(&read) {
                let none = chunk.iter().map(|_| (Registration::Quarantined, None));
                let value = none.collect();
                parts.push(read.map(|_| value));
                continue;
            }
            // Most often nothing changes. Changed states are written one job per command, several commands at a time.
            let changes = chunk.iter().zip(&read.value).map(|(r, was)| {
                let (now_us, incarnation) = (read.now_us, read.incarnation.clone());
                async move {
                    let before = self.decode(&r.job, was)?;
                    let (mut after, mut effects) = (before.clone(), Effects::default());
                    let answer = claim::register(&mut after, r, now_us, &incarnation, &mut effects);
                    match &after {
                        Some(now) if after != before => {
                            let epoch = r.adopt.as_ref().and(r.epoch.as_deref());
                            if self
                                .compare_and_set(&r.job, &incarnation, was, now, &effects, epoch)
                                .await?
                            {
                                return Ok((answer, after));
                            }
                        }
                        _ => return Ok((answer, after)),
                    }
                    // Another instance changed the state meanwhile. Try again without adopting: before it adopts, the
                    // caller must check the epoch again.
                    let without_adoption = Register {
                        adopt: None,
                        ..r.clone()
                    };
                    let r = &without_adoption;
                    let reply = self
                        .change(&r.job, |st, now, incarnation, effects| {
                            claim::register(st, r, now, incarnation, effects)
                        })
                        .await?;
                    Ok::<_, Error>(reply.value)
                }
            });
            let changed = futures_util::future::try_join_all(changes).await?;
            parts.push(read.map(|_| changed));
        }
        self.join(parts).await
    }

    async fn control(&self, job: &JobName, what: &Control) -> Result<Reply<Controlled>, Error> {
        let reply = self
            .change(job, |st, now, _, effects| {
                claim::control(st, job, what, now, effects)
            })
            .await?;
        Ok(reply.map(|(answer, _)| answer))
    }

    async fn jobs(&self) -> Result<Vec<JobName>, Error> {
        let keys = [self.global("jobs")];
        let reply = self.run(&self.pool, &JOBS, &keys, &[], false).await?;
        self.understood(reply::jobs(&reply.value))
    }

    async fn observe(&self, jobs: &[JobName]) -> Result<Reply<Vec<Option<State>>>, Error> {
        let mut parts = vec![];
        for chunk in jobs.chunks(BATCH) {
            let reply = self.observe_some(chunk).await?;
            let states = reply
                .value
                .iter()
                .zip(chunk)
                .map(|(f, job)| self.decode(job, f))
                .collect::<Result<Vec<_>, _>>()?;
            parts.push(reply.map(|_| states));
        }
        self.join(parts).await
    }

    async fn heartbeat(&self, beat: Option<&Beat>) -> Result<Reply<Fleet>, Error> {
        let args = match beat {
            Some(b) => {
                let info = serde_json::to_value(&b.info).unwrap_or_default();
                let serde_json::Value::Object(mut info) = info else {
                    return Err(self.corrupt("info"));
                };
                info.remove("seen");
                [
                    b.instance.as_str().into(),
                    Arg::String(members(&info)),
                    Arg::Int(b.quarantine.as_millis() as i64),
                    Arg::String(b.open.as_ref().map_or(String::new(), |(incarnation, id)| {
                        format!("{incarnation}/{id}")
                    })),
                    Arg::String(RunId::random().to_string()),
                ]
            }
            None => {
                let id = Arg::String(RunId::random().to_string());
                ["".into(), "".into(), Arg::Int(0), "".into(), id]
            }
        };
        self.beat(&args).await
    }

    async fn found(&self, id: &str) -> Result<Reply<Fleet>, Error> {
        self.beat(&["".into(), "".into(), Arg::Int(0), "new".into(), id.into()])
            .await
    }

    async fn leave(&self, instance: &InstanceId, process: u32) -> Result<(), Error> {
        let keys = self.keys_of_heartbeat();
        let args = [
            instance.as_str().into(),
            "".into(),
            Arg::Int(0),
            "".into(),
            Arg::String(RunId::random().to_string()),
            Arg::Int(i64::from(process)),
        ];
        self.run(&self.pool, &HEARTBEAT, &keys, &args, false)
            .await
            .map(drop)
    }

    async fn drain(&self, instance: &InstanceId, on: bool, by: &str) -> Result<(), Error> {
        let mut p = redis::pipe();
        let asked = format!("{} {by}", u8::from(on));
        p.hset(self.global("drains"), instance.as_str(), asked)
            .ignore();
        p.publish(&self.channel, to_json(&Event::Drain)).ignore();
        self.pipe(&p, &[self.global("drains")]).await
    }

    async fn notices(&self, all: bool) -> Result<Reply<Notices>, Error> {
        let keys = [self.global("notices")];
        let args = [Arg::Str(if all { "1" } else { "" })];
        let reply = self.run(&self.pool, &NOTICES, &keys, &args, false).await?;
        let notices = self.understood(reply::notices(&reply.value))?;
        Ok(reply.map(|_| notices))
    }

    async fn note(&self, write: &Write) -> Result<Reply<Written>, Error> {
        let keys = [self.global("notices")];
        let mut args: Vec<Arg<'_>> = vec![
            write.was.as_deref().unwrap_or_default().into(),
            write.lease.as_str().into(),
            Arg::Int(2 * write.set.len() as i64),
        ];
        for (name, note) in &write.set {
            args.extend([name.as_str().into(), note.as_str().into()]);
        }
        args.push(Arg::Int(write.remove.len() as i64));
        args.extend(write.remove.iter().map(|name| Arg::from(name.as_str())));
        let reply = self.run(&self.pool, &NOTE, &keys, &args, false).await?;
        let written = self.understood(reply::written(&reply.value))?;
        Ok(reply.map(|_| written))
    }

    async fn journal(&self, decisions: &[Decision]) -> Result<(), Error> {
        if decisions.is_empty() {
            return Ok(());
        }
        let mut by_job: std::collections::HashMap<&JobName, Vec<String>> =
            std::collections::HashMap::new();
        for d in decisions {
            by_job.entry(&d.job).or_default().push(to_json(d));
        }
        let mut p = redis::pipe();
        let mut keys = Vec::with_capacity(by_job.len());
        for (job, lines) in by_job {
            let key = self.key(job, "decisions");
            p.lpush(&key, lines).ignore();
            p.ltrim(&key, 0, super::DECISIONS_KEPT as isize - 1)
                .ignore();
            p.pexpire(&key, super::DECISIONS_TTL.as_millis() as i64)
                .ignore();
            keys.push(key);
        }
        self.pipe(&p, &keys).await
    }

    async fn decisions(&self, job: &JobName) -> Result<Vec<Decision>, Error> {
        self.lines("decisions", job, "decisions", super::DECISIONS_KEPT)
            .await
    }

    async fn history(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        let mut records = self.records(job, n).await?;
        fill(self, &mut records).await?;
        Ok(records)
    }

    async fn records(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        let few = super::lines_for(n);
        let lines = self.lines("records of runs", job, "history", few).await?;
        let records = tidy(lines, n);
        if records.len() >= n || few == super::HISTORY_KEPT {
            return Ok(records);
        }
        let all = super::HISTORY_KEPT;
        let lines = self.lines("records of runs", job, "history", all).await?;
        Ok(tidy(lines, n))
    }

    async fn append_output(
        &self,
        job: &JobName,
        run: RunId,
        at: u64,
        data: &[u8],
        keep: usize,
        stderr: &Marks,
    ) -> Result<(), Error> {
        if at.saturating_add(data.len() as u64) > super::LAST_BYTE {
            return Ok(());
        }
        let keys = [self.key(job, &format!("output:{run}"))];
        let args = [
            Arg::Int(at as i64),
            Arg::Bytes(data),
            Arg::Int(keep as i64),
            Arg::String(stderr.to_text()),
        ];
        // Ignore the error: the semaphore is never closed.
        let _turn = self.output_turns.acquire().await;
        self.run(&self.outputs, &OUTPUT, &keys, &args, false)
            .await
            .map(drop)
    }

    async fn output(&self, job: &JobName, run: RunId, from: u64) -> Result<Option<Output>, Error> {
        let keys = [self.key(job, &format!("output:{run}"))];
        let args = [
            Arg::Int(from.min(super::LAST_BYTE) as i64),
            Arg::Int(super::OUTPUT_AT_ONCE as i64),
        ];
        let reply = self
            .run(&self.pool, &READ_OUTPUT, &keys, &args, false)
            .await?;
        self.understood(reply::output(run, &reply.value))
    }

    fn events(&self) -> broadcast::Receiver<Event> {
        let receiver = self.events.subscribe();
        // Without a runtime the task cannot start; the next call tries again.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.listener.get_or_init(|| {
                let (client, channel) = (self.client.clone(), self.channel.clone());
                runtime
                    .spawn(hints::listen(client, channel, self.events.clone()))
                    .abort_handle()
            });
        }
        receiver
    }

    fn changes(&self) -> broadcast::Receiver<Changed> {
        let receiver = self.changes.subscribe();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.change_listener.get_or_init(|| {
                let (client, channel) = (self.client.clone(), format!("{}:changes", self.channel));
                runtime
                    .spawn(hints::listen(client, channel, self.changes.clone()))
                    .abort_handle()
            });
        }
        receiver
    }
}

impl Drop for RedisStore {
    fn drop(&mut self) {
        for listener in [&self.listener, &self.change_listener] {
            if let Some(listener) = listener.get() {
                listener.abort();
            }
        }
    }
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisStore")
            .field("address", &self.client.address)
            .finish_non_exhaustive()
    }
}
