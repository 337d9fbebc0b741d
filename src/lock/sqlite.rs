//! Locks in a SQLite file: a row each, in the file of [`SqliteStore`], through its writing thread. For processes of one
//! host; the clock is the host's wall clock.

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use rusqlite::OptionalExtension;
use tokio::{sync::broadcast::error::RecvError, task::JoinHandle};

use super::{
    Backend, Error, Kept, Tried,
    period::Timed,
    reentrant::{Entered, Left},
    room::{Rooms, made_by},
};
use crate::{
    logic::claim::Event,
    model::FencingToken,
    store::{
        self, Store,
        sqlite::{Fault, SqliteStore, Step},
    },
};

/// Longer than the store itself waits for another process's transaction.
const PATIENCE: Duration = Duration::from_secs(6);

pub(super) struct SqliteLocks {
    store: SqliteStore,
    namespace: String,
    id: String,
    rooms: Arc<Rooms>,
    ear: Mutex<Ear>,
}

/// Listens while somebody waits: as long as it does, the file is looked at.
#[derive(Default)]
struct Ear {
    wanted: HashSet<String>,
    task: Option<JoinHandle<()>>,
}

/// A row, whether it still counts or not.
struct Row {
    owner: String,
    /// None: of a plain lock.
    count: Option<i64>,
    /// Of the last step of a lock with levels.
    nonce: Option<String>,
    token: i64,
    /// Unix µs of the host's wall clock; negative when it was given back: a clock that goes back must not revive it.
    until: i64,
}

impl SqliteLocks {
    pub(super) fn open(
        path: &Path,
        namespace: &str,
        id: &str,
        rooms: Arc<Rooms>,
    ) -> Result<Self, store::Error> {
        Ok(Self::new(SqliteStore::open(path)?, namespace, id, rooms))
    }

    pub(super) fn new(store: SqliteStore, namespace: &str, id: &str, rooms: Arc<Rooms>) -> Self {
        Self {
            store,
            namespace: namespace.to_owned(),
            id: id.to_owned(),
            rooms,
            ear: Mutex::default(),
        }
    }

    /// The rows of one namespace do not meet those of another. Keys contain no brace.
    fn name(&self, key: &str) -> String {
        format!("{}:{{{key}}}", self.namespace)
    }

    /// One step in a transaction of its own. None: the row is a lock of another kind.
    async fn step<T: Send + 'static>(
        &self,
        key: &str,
        limit: Duration,
        f: impl FnOnce(&mut Step<'_>, &str) -> Result<Option<T>, Fault> + Send + 'static,
    ) -> Result<T, Error> {
        let name = self.name(key);
        let work = self.store.write(move |s| f(s, &name));
        let reply = tokio::time::timeout(limit, work).await;
        let reply = reply.unwrap_or_else(|_| {
            Err(store::Error::Unreachable {
                address: self.store.address().to_owned(),
                reason: format!("no answer within {limit:?}"),
            })
        });
        let value = reply.map_err(|e| Error::of(key, e))?.value;
        value.ok_or_else(|| Error::WrongType {
            key: key.to_owned(),
            address: self.store.address().to_owned(),
        })
    }
}

fn micros(time: Duration) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

fn row(s: &Step<'_>, name: &str) -> Result<Option<Row>, Fault> {
    Ok(s.db
        .prepare_cached("SELECT owner, count, nonce, token, until FROM locks WHERE key = ?1")?
        .query_row([name], |r| {
            Ok(Row {
                owner: r.get(0)?,
                count: r.get(1)?,
                nonce: r.get(2)?,
                token: r.get(3)?,
                until: r.get(4)?,
            })
        })
        .optional()?)
}

impl Row {
    fn left(&self, now: i64) -> Option<Duration> {
        u64::try_from(self.until - now)
            .ok()
            .filter(|us| *us > 0)
            .map(Duration::from_micros)
    }
}

#[async_trait]
impl Backend for SqliteLocks {
    fn address(&self) -> &str {
        self.store.address()
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn try_lock(
        &self,
        key: &str,
        owner: &str,
        lease: Duration,
        _hears: bool,
        limit: Duration,
    ) -> Result<Tried, Error> {
        let owner = owner.to_owned();
        self.step(key, limit, move |s, name| {
            let until = s.now_us.saturating_add(micros(lease));
            let last = row(s, name)?;
            if let Some(r) = &last
                && let Some(remaining) = r.left(s.now_us)
            {
                if r.count.is_some() {
                    return Ok(None);
                }
                if r.owner != owner {
                    let owner = r.owner.clone();
                    return Ok(Some(Tried::Held { owner, remaining }));
                }
                s.execute(
                    "UPDATE locks SET until = ?2 WHERE key = ?1",
                    &[&name, &until],
                )?;
                return Ok(Some(Tried::Taken(FencingToken(r.token))));
            }
            // The row stays after its lock, for the token: a request that came late is known by it.
            if last
                .as_ref()
                .is_some_and(|r| r.owner.strip_suffix("!kept").unwrap_or(&r.owner) == owner)
            {
                return Ok(Some(Tried::Stale));
            }
            let token = last.map_or(0, |r| r.token + 1).max(s.now_us);
            s.execute(
                "INSERT INTO locks (key, owner, count, token, until) VALUES (?1, ?2, NULL, ?3, ?4) \
                 ON CONFLICT (key) DO UPDATE SET owner = ?2, count = NULL, nonce = NULL, token = ?3, until = ?4",
                &[&name, &owner, &token, &until],
            )?;
            Ok(Some(Tried::Taken(FencingToken(token))))
        })
        .await
    }

    async fn renew(
        &self,
        key: &str,
        owner: &str,
        lease: Duration,
        limit: Duration,
    ) -> Result<Kept, Error> {
        let owner = owner.to_owned();
        self.step(key, limit, move |s, name| {
            let Some(r) = row(s, name)?.filter(|r| r.left(s.now_us).is_some()) else {
                return Ok(Some(Kept::No(None)));
            };
            if r.count.is_some() {
                return Ok(None);
            }
            if r.owner != owner {
                return Ok(Some(Kept::No(Some(r.owner))));
            }
            let until = s.now_us.saturating_add(micros(lease));
            s.execute(
                "UPDATE locks SET until = ?2 WHERE key = ?1",
                &[&name, &until],
            )?;
            Ok(Some(Kept::Yes))
        })
        .await
    }

    async fn release(
        &self,
        key: &str,
        owner: &str,
        keep: Duration,
        limit: Duration,
    ) -> Result<Kept, Error> {
        let owner = owner.to_owned();
        self.step(key, limit, move |s, name| {
            let kept = format!("{owner}!kept");
            let Some(r) = row(s, name)?.filter(|r| r.left(s.now_us).is_some()) else {
                return Ok(Some(Kept::No(None)));
            };
            if r.owner == kept {
                return Ok(Some(Kept::Yes));
            }
            if r.count.is_some() {
                return Ok(None);
            }
            if r.owner != owner {
                return Ok(Some(Kept::No(Some(r.owner))));
            }
            if keep.is_zero() {
                s.execute(
                    "UPDATE locks SET until = ?2 WHERE key = ?1",
                    &[&name, &-s.now_us],
                )?;
            } else {
                let until = s.now_us.saturating_add(micros(keep));
                s.execute(
                    "UPDATE locks SET owner = ?2, until = ?3 WHERE key = ?1",
                    &[&name, &kept, &until],
                )?;
            }
            let lock = name.to_owned();
            s.fx.events.push(Event::Unlocked { lock, owner });
            Ok(Some(Kept::Yes))
        })
        .await
    }

    async fn look(&self, key: &str, limit: Duration) -> Result<Option<(String, Duration)>, Error> {
        self.step(key, limit, move |s, name| {
            let r = row(s, name)?;
            Ok(Some(r.and_then(|r| {
                let left = r.left(s.now_us)?;
                Some((r.owner, left))
            })))
        })
        .await
    }

    async fn enter(
        &self,
        key: &str,
        (owner, nonce): (&str, &str),
        lease: Duration,
        _hears: bool,
        limit: Duration,
    ) -> Result<Entered, Error> {
        let (owner, nonce) = (owner.to_owned(), nonce.to_owned());
        self.step(key, limit, move |s, name| {
            let until = s.now_us.saturating_add(micros(lease));
            let last = row(s, name)?;
            if let Some(r) = &last
                && let Some(remaining) = r.left(s.now_us)
            {
                let Some(count) = r.count else {
                    return Ok(None);
                };
                if r.owner != owner {
                    let owner = r.owner.clone();
                    return Ok(Some(Entered::Held { owner, remaining }));
                }
                let count = count + i64::from(r.nonce.as_ref() != Some(&nonce));
                s.execute(
                    "UPDATE locks SET count = ?2, nonce = ?3, until = max(until, ?4) WHERE key = ?1",
                    &[&name, &count, &nonce, &until],
                )?;
                return Ok(Some(Entered::Taken(FencingToken(r.token), count as u32)));
            }
            if last.as_ref().is_some_and(|r| r.nonce.as_ref() == Some(&nonce)) {
                return Ok(Some(Entered::Stale));
            }
            let token = last.map_or(0, |r| r.token + 1).max(s.now_us);
            s.execute(
                "INSERT INTO locks (key, owner, count, nonce, token, until) VALUES (?1, ?2, 1, ?3, ?4, ?5) \
                 ON CONFLICT (key) DO UPDATE SET owner = ?2, count = 1, nonce = ?3, token = ?4, until = ?5",
                &[&name, &owner, &nonce, &token, &until],
            )?;
            Ok(Some(Entered::Taken(FencingToken(token), 1)))
        })
        .await
    }

    async fn leave(
        &self,
        key: &str,
        (owner, nonce): (&str, &str),
        limit: Duration,
    ) -> Result<Left, Error> {
        let (owner, nonce) = (owner.to_owned(), nonce.to_owned());
        self.step(key, limit, move |s, name| {
            let Some(r) = row(s, name)?.filter(|r| r.left(s.now_us).is_some()) else {
                return Ok(Some(Left::Not(None)));
            };
            let Some(count) = r.count else {
                return Ok(None);
            };
            if r.owner != owner {
                return Ok(Some(Left::Not(Some(r.owner))));
            }
            if r.nonce.as_ref() == Some(&nonce) {
                return Ok(Some(Left::Levels(count as u32)));
            }
            let left = (count - 1).max(0);
            if left > 0 {
                s.execute(
                    "UPDATE locks SET count = ?2, nonce = ?3 WHERE key = ?1",
                    &[&name, &left, &nonce],
                )?;
            } else {
                s.execute(
                    "UPDATE locks SET until = ?2 WHERE key = ?1",
                    &[&name, &-s.now_us],
                )?;
                let lock = name.to_owned();
                s.fx.events.push(Event::Unlocked { lock, owner });
            }
            Ok(Some(Left::Levels(left as u32)))
        })
        .await
    }

    async fn renew_all(
        &self,
        key: &str,
        owner: &str,
        lease: Duration,
        limit: Duration,
    ) -> Result<Kept, Error> {
        let owner = owner.to_owned();
        self.step(key, limit, move |s, name| {
            let Some(r) = row(s, name)?.filter(|r| r.left(s.now_us).is_some()) else {
                return Ok(Some(Kept::No(None)));
            };
            if r.count.is_none() {
                return Ok(None);
            }
            if r.owner != owner {
                return Ok(Some(Kept::No(Some(r.owner))));
            }
            let until = s.now_us.saturating_add(micros(lease));
            s.execute(
                "UPDATE locks SET until = ?2 WHERE key = ?1",
                &[&name, &until],
            )?;
            Ok(Some(Kept::Yes))
        })
        .await
    }

    async fn take_period(
        &self,
        key: &str,
        owner: &str,
        length: Duration,
        limit: Duration,
    ) -> Result<Timed, Error> {
        let owner = owner.to_owned();
        self.step(key, limit, move |s, name| {
            // A row of its own beside the lock's; the token is the begin of the newest period that was claimed.
            let (now, length) = (s.now_us.div_euclid(1000), length.as_millis() as i64);
            let name = format!("{name}:period:{length}");
            let next = |begin: i64| {
                let us = (begin + length).saturating_mul(1000) - s.now_us;
                Duration::from_micros(u64::try_from(us).unwrap_or(0))
            };
            let begin = now - now.rem_euclid(length);
            if let Some(last) = row(s, &name)? {
                let (begun, next) = (last.token, next(last.token));
                if last.owner == owner {
                    return Ok(Some(Timed::Taken { begin: begun, next }));
                }
                // Also a later one: a clock that went back does not begin a period again.
                if begun >= begin {
                    let owner = last.owner;
                    return Ok(Some(Timed::Before { owner, next }));
                }
            }
            let next = next(begin);
            let until = (begin + length * 2).saturating_mul(1000);
            s.execute(
                "INSERT INTO locks (key, owner, count, token, until) VALUES (?1, ?2, NULL, ?3, ?4) \
                 ON CONFLICT (key) DO UPDATE SET owner = ?2, count = NULL, token = ?3, until = ?4",
                &[&name, &owner, &begin, &until],
            )?;
            Ok(Some(Timed::Taken { begin, next }))
        })
        .await
    }

    async fn give_back_period(
        &self,
        key: &str,
        owner: &str,
        (length, begin): (Duration, i64),
        limit: Duration,
    ) -> Result<(), Error> {
        let owner = owner.to_owned();
        self.step(key, limit, move |s, name| {
            let name = format!("{name}:period:{}", length.as_millis());
            // The periods before it stay taken.
            s.execute(
                "UPDATE locks SET owner = '', token = token - 1 WHERE key = ?1 AND owner = ?2 AND token = ?3",
                &[&name, &owner, &begin],
            )?;
            Ok(Some(()))
        })
        .await
    }

    async fn listen(&self, key: &str) {
        let mut ear = self.ear.lock().unwrap_or_else(PoisonError::into_inner);
        ear.wanted.insert(key.to_owned());
        if ear.task.as_ref().is_none_or(JoinHandle::is_finished) {
            let mut events = self.store.events();
            let (rooms, id) = (self.rooms.clone(), self.id.clone());
            let prefix = format!("{}:{{", self.namespace);
            ear.task = Some(tokio::spawn(async move {
                loop {
                    match events.recv().await {
                        Ok(Event::Unlocked { lock, owner }) if !made_by(&id, &owner) => {
                            let key = lock.strip_prefix(&prefix).and_then(|k| k.strip_suffix('}'));
                            key.into_iter().for_each(|key| rooms.ring(key));
                        }
                        Ok(_) => {}
                        Err(RecvError::Lagged(_)) => rooms.ring_all(),
                        Err(RecvError::Closed) => return,
                    }
                }
            }));
        }
    }

    fn forget(&self, key: &str) {
        let mut ear = self.ear.lock().unwrap_or_else(PoisonError::into_inner);
        ear.wanted.remove(key);
        if ear.wanted.is_empty()
            && let Some(task) = ear.task.take()
        {
            task.abort();
        }
    }
}
