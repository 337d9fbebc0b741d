//! Locks in a SQLite file, for the processes of one host: a row each, in the file of [`SqliteStore`], through its
//! writing thread. The clock is the host's wall clock.

mod levels;

use std::{collections::HashSet, path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use rusqlite::OptionalExtension;
use tokio::{sync::broadcast::error::RecvError, task::JoinHandle};

use self::levels::Levels;
use super::{
    Backend, Error, IfDropped, Kind, OwnerReply, ReleaseOptions, TryLockReply,
    period::PeriodReply,
    reentrant::{EnterReply, LeaveReply, LevelToLeave},
    wait_queue::{WaitQueues, made_by},
};
use crate::{
    logic::claim::Event,
    model::FencingToken,
    store::{
        self, Store,
        sqlite::{Fault, Request, SqliteStore},
    },
};

/// Longer than the store itself waits for a transaction of another process.
const PATIENCE: Duration = Duration::from_secs(6);
/// Follows the owner of a lock that was released, but that nobody may acquire yet.
const KEPT: &str = "!kept";

pub(super) struct SqliteLocks {
    store: SqliteStore,
    namespace: String,
    id: String,
    queues: Arc<WaitQueues>,
    subscriber: Mutex<Subscriber>,
}

/// Listens to releases while somebody waits; as long as it listens, the store looks at the file.
#[derive(Default)]
struct Subscriber {
    wanted: HashSet<String>,
    task: Option<JoinHandle<()>>,
}

/// The row of a lock, which may be over.
struct Row {
    owner: String,
    /// None: a plain lock.
    count: Option<i64>,
    /// The [`Levels`] of a reentrant lock.
    nonce: Option<String>,
    token: i64,
    /// Unix µs of the host's wall clock. Negative once the lock was released, so that a clock that goes back does not
    /// revive it.
    until: i64,
}

impl SqliteLocks {
    pub(super) fn open(
        path: &Path,
        namespace: &str,
        id: &str,
        queues: Arc<WaitQueues>,
    ) -> Result<Self, store::Error> {
        Ok(Self::new(SqliteStore::open(path)?, namespace, id, queues))
    }

    pub(super) fn new(
        store: SqliteStore,
        namespace: &str,
        id: &str,
        queues: Arc<WaitQueues>,
    ) -> Self {
        Self {
            store,
            namespace: namespace.to_owned(),
            id: id.to_owned(),
            queues,
            subscriber: Mutex::default(),
        }
    }

    /// The key of the row. Keys contain no brace, so rows of different namespaces cannot have the same one.
    fn name(&self, key: &str) -> String {
        format!("{}:{{{key}}}", self.namespace)
    }

    /// One step in a transaction of its own; `f` returns None if the row is a lock of another kind.
    async fn step<T: Send + 'static>(
        &self,
        key: &str,
        limit: Duration,
        f: impl FnOnce(&mut Request<'_>, &str) -> Result<Option<T>, Fault> + Send + 'static,
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

/// The beginning of the period of this length that `now_us` is in; in ms, as the length.
fn begin_of_period(now_us: i64, length: i64) -> i64 {
    now_us.div_euclid(1000).div_euclid(length) * length
}

/// The time until the period after the one that begins at `begin`; zero if that has begun.
fn until_next(now_us: i64, begin: i64, length: i64) -> Duration {
    let us = (begin + length).saturating_mul(1000) - now_us;
    Duration::from_micros(u64::try_from(us).unwrap_or(0))
}

/// Until when the row of a period is kept, in µs: a period longer than the period lasts, in case the clock goes back.
fn period_kept_until(begin: i64, length: i64) -> i64 {
    (begin + length * 2).saturating_mul(1000)
}

fn row(s: &Request<'_>, name: &str) -> Result<Option<Row>, Fault> {
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

/// The row, if it is ours; otherwise the step returns here.
macro_rules! own_row_or_return {
    ($ownership:expr) => {
        match $ownership {
            Ownership::Ours(row) => row,
            Ownership::Others(owner) => return Ok(Some(Err(owner))),
            Ownership::OfAnotherKind => return Ok(None),
        }
    };
}

/// Whose lock a row is, seen by an owner.
enum Ownership {
    Ours(Row),
    /// With the present owner, if there is one.
    Others(Option<String>),
    OfAnotherKind,
}

fn ownership(s: &Request<'_>, name: &str, owner: &str, kind: Kind) -> Result<Ownership, Fault> {
    Ok(match row(s, name)?.filter(|r| r.left(s.now_us).is_some()) {
        None => Ownership::Others(None),
        Some(r) if r.kind() != kind => Ownership::OfAnotherKind,
        Some(r) if r.owner == owner => Ownership::Ours(r),
        Some(r) => Ownership::Others(Some(r.owner)),
    })
}

/// How an attempt to acquire a lock ended.
enum Acquire {
    /// With the token, and the number of levels.
    Acquired(FencingToken, usize),
    Held {
        owner: String,
        remaining: Duration,
    },
    Stale,
}

/// Acquires a lock, or one level of it if `level` names one. None: the key has a lock of another kind.
fn acquire(
    s: &Request<'_>,
    name: &str,
    (owner, level): (&str, Option<&str>),
    lease: Duration,
) -> Result<Option<Acquire>, Fault> {
    let until = s.now_us.saturating_add(micros(lease));
    let last = row(s, name)?;
    let mut levels = last.as_ref().and_then(Row::levels);
    if let (Some(level), Some(levels)) = (level, &levels)
        && levels.is_over(level)
    {
        return Ok(Some(Acquire::Stale));
    }
    if let Some(r) = &last
        && let Some(remaining) = r.left(s.now_us)
    {
        if r.count.is_some() != level.is_some() {
            return Ok(None);
        }
        if r.owner != owner {
            let owner = r.owner.clone();
            return Ok(Some(Acquire::Held { owner, remaining }));
        }
        if let (Some(level), Some(levels)) = (level, &mut levels) {
            levels.enter(level);
        }
        write_levels(s, name, levels.as_ref())?;
        s.execute(
            "UPDATE locks SET until = max(until, ?2) WHERE key = ?1",
            &[&name, &until],
        )?;
        let token = FencingToken(r.token);
        return Ok(Some(Acquire::Acquired(
            token,
            levels.map_or(1, |l| l.count()),
        )));
    }
    // The row stays after its lock, for the token; it also shows that a request came late.
    let over = match (level, &levels) {
        (None, _) => last
            .as_ref()
            .is_some_and(|r| r.owner.strip_suffix(KEPT).unwrap_or(&r.owner) == owner),
        (Some(level), Some(levels)) => levels.is_inside(level),
        (Some(_), None) => false,
    };
    if over {
        return Ok(Some(Acquire::Stale));
    }
    let token = last.map_or(0, |r| r.token + 1).max(s.now_us);
    let levels = level.map(|level| Levels::after(levels, level));
    let (count, levels) = (
        levels.as_ref().map(|_| 1),
        levels.as_ref().map(Levels::to_string),
    );
    s.execute(
        "INSERT INTO locks (key, owner, count, nonce, token, until) VALUES (?1, ?2, ?3, ?4, ?5, ?6) \
         ON CONFLICT (key) DO UPDATE SET owner = ?2, count = ?3, nonce = ?4, token = ?5, until = ?6",
        &[&name, &owner, &count, &levels, &token, &until],
    )?;
    Ok(Some(Acquire::Acquired(FencingToken(token), 1)))
}

fn write_levels(s: &Request<'_>, name: &str, levels: Option<&Levels>) -> Result<(), Fault> {
    if let Some(levels) = levels {
        s.execute(
            "UPDATE locks SET count = ?2, nonce = ?3 WHERE key = ?1",
            &[&name, &(levels.count() as i64), &levels.to_string()],
        )?;
    }
    Ok(())
}

/// Ends a lock, and announces its release.
fn free(s: &mut Request<'_>, name: &str, owner: String) -> Result<(), Fault> {
    s.execute(
        "UPDATE locks SET until = ?2 WHERE key = ?1",
        &[&name, &-s.now_us],
    )?;
    tell(s, name, owner);
    Ok(())
}

fn tell(s: &mut Request<'_>, name: &str, owner: String) {
    let lock = name.to_owned();
    s.effects.events.push(Event::Unlocked { lock, owner });
}

impl Row {
    fn kind(&self) -> Kind {
        match self.count {
            None => Kind::Plain,
            Some(_) => Kind::Reentrant,
        }
    }

    fn levels(&self) -> Option<Levels> {
        let levels = self.count.and(self.nonce.as_deref())?;
        Some(Levels::parse(levels))
    }

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
        limit: Duration,
    ) -> Result<TryLockReply, Error> {
        let owner = owner.to_owned();
        let acquired = self.step(key, limit, move |s, name| {
            acquire(s, name, (&owner, None), lease)
        });
        Ok(match acquired.await? {
            Acquire::Acquired(token, _) => TryLockReply::Acquired(token),
            Acquire::Held { owner, remaining } => TryLockReply::Held { owner, remaining },
            Acquire::Stale => TryLockReply::Stale,
        })
    }

    async fn renew(
        &self,
        key: &str,
        owner: &str,
        kind: Kind,
        lease: Duration,
        limit: Duration,
    ) -> Result<OwnerReply, Error> {
        let owner = owner.to_owned();
        let renewed = self.step(key, limit, move |s, name| {
            own_row_or_return!(ownership(s, name, &owner, kind)?);
            let until = s.now_us.saturating_add(micros(lease));
            s.execute(
                "UPDATE locks SET until = ?2 WHERE key = ?1",
                &[&name, &until],
            )?;
            Ok(Some(Ok(())))
        });
        Ok(OwnerReply::from(renewed.await?))
    }

    async fn release(
        &self,
        key: &str,
        owner: &str,
        ReleaseOptions { keep_for, .. }: ReleaseOptions,
        limit: Duration,
    ) -> Result<OwnerReply, Error> {
        let owner = owner.to_owned();
        let released = self.step(key, limit, move |s, name| {
            let kept = format!("{owner}{KEPT}");
            if matches!(ownership(s, name, &kept, Kind::Plain)?, Ownership::Ours(_)) {
                return Ok(Some(Ok(())));
            }
            own_row_or_return!(ownership(s, name, &owner, Kind::Plain)?);
            if keep_for.is_zero() {
                free(s, name, owner)?;
            } else {
                let until = s.now_us.saturating_add(micros(keep_for));
                s.execute(
                    "UPDATE locks SET owner = ?2, until = ?3 WHERE key = ?1",
                    &[&name, &kept, &until],
                )?;
                tell(s, name, owner);
            }
            Ok(Some(Ok(())))
        });
        Ok(OwnerReply::from(released.await?))
    }

    async fn holder(
        &self,
        key: &str,
        limit: Duration,
    ) -> Result<Option<(String, Duration)>, Error> {
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
        limit: Duration,
    ) -> Result<EnterReply, Error> {
        let (owner, nonce) = (owner.to_owned(), nonce.to_owned());
        let acquired = self.step(key, limit, move |s, name| {
            acquire(s, name, (&owner, Some(&nonce)), lease)
        });
        Ok(match acquired.await? {
            Acquire::Acquired(token, levels) => EnterReply::Acquired(token, levels as u32),
            Acquire::Held { owner, remaining } => EnterReply::Held { owner, remaining },
            Acquire::Stale => EnterReply::Stale,
        })
    }

    async fn leave(
        &self,
        key: &str,
        (owner, nonce): (&str, &str),
        which: LevelToLeave,
        limit: Duration,
    ) -> Result<LeaveReply, Error> {
        let (owner, nonce) = (owner.to_owned(), nonce.to_owned());
        let left = self.step(key, limit, move |s, name| {
            // A request that got no answer does not arrive after this: one thread writes, in the order of the requests.
            let r = own_row_or_return!(ownership(s, name, &owner, Kind::Reentrant)?);
            let mut levels = r.levels().unwrap_or_else(|| Levels::parse(""));
            levels.leave(&nonce, which);
            write_levels(s, name, Some(&levels))?;
            if levels.count() == 0 {
                free(s, name, owner)?;
            }
            Ok(Some(Ok(levels.count() as u32)))
        });
        Ok(match left.await? {
            Ok(levels) => LeaveReply::Levels(levels),
            Err(owner) => LeaveReply::NotOwner(owner),
        })
    }

    async fn claim_period(
        &self,
        key: &str,
        owner: &str,
        length: Duration,
        limit: Duration,
    ) -> Result<PeriodReply, Error> {
        let owner = owner.to_owned();
        self.step(key, limit, move |s, name| {
            // A row of its own beside the lock's; its token is the beginning of the newest period that was claimed.
            let (now, length) = (s.now_us, length.as_millis() as i64);
            let name = format!("{name}:period:{length}");
            let next = |begin| until_next(now, begin, length);
            let begin = begin_of_period(now, length);
            if let Some(last) = row(s, &name)? {
                let (begun, next) = (last.token, next(last.token));
                if last.owner == owner {
                    return Ok(Some(PeriodReply::Claimed { begin: begun, next }));
                }
                // Also a later period: a clock that went back does not begin a period again.
                if begun >= begin {
                    let owner = last.owner;
                    return Ok(Some(PeriodReply::Held { owner, next }));
                }
            }
            let next = next(begin);
            let until = period_kept_until(begin, length);
            s.execute(
                "INSERT INTO locks (key, owner, count, token, until) VALUES (?1, ?2, NULL, ?3, ?4) \
                 ON CONFLICT (key) DO UPDATE SET owner = ?2, count = NULL, token = ?3, until = ?4",
                &[&name, &owner, &begin, &until],
            )?;
            Ok(Some(PeriodReply::Claimed { begin, next }))
        })
        .await
    }

    async fn release_period(
        &self,
        key: &str,
        owner: &str,
        (length, begin): (Duration, i64),
        limit: Duration,
    ) -> Result<(), Error> {
        let owner = owner.to_owned();
        self.step(key, limit, move |s, name| {
            let name = format!("{name}:period:{}", length.as_millis());
            // The periods before it stay claimed.
            s.execute(
                "UPDATE locks SET owner = '', token = token - 1 WHERE key = ?1 AND owner = ?2 AND token = ?3",
                &[&name, &owner, &begin],
            )?;
            Ok(Some(()))
        })
        .await
    }

    async fn subscribe(&self, key: &str) {
        let mut subscriber = self.subscriber.lock();
        subscriber.wanted.insert(key.to_owned());
        if subscriber.task.as_ref().is_none_or(JoinHandle::is_finished) {
            let mut events = self.store.events();
            let (queues, id) = (self.queues.clone(), self.id.clone());
            let prefix = format!("{}:{{", self.namespace);
            let others = self.queues.clone();
            subscriber.task = Some(tokio::spawn(async move {
                // If the task ends, its waiters have to learn that they are not subscribed any more.
                let _ended = IfDropped::new(move || others.subscription_ended());
                loop {
                    match events.recv().await {
                        Ok(Event::Unlocked { lock, owner }) if !made_by(&id, &owner) => {
                            let key = lock.strip_prefix(&prefix).and_then(|k| k.strip_suffix('}'));
                            key.into_iter().for_each(|key| queues.wake(key));
                        }
                        Ok(_) => {}
                        Err(RecvError::Lagged(_)) => queues.wake_all(),
                        Err(RecvError::Closed) => return,
                    }
                }
            }));
        }
    }

    fn unsubscribe(&self, key: &str) {
        let mut subscriber = self.subscriber.lock();
        subscriber.wanted.remove(key);
        if subscriber.wanted.is_empty()
            && let Some(task) = subscriber.task.take()
        {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use futures_util::FutureExt;

    use super::*;

    const LEASE: Duration = Duration::from_secs(60);

    fn locks() -> (tempfile::TempDir, SqliteLocks) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("locks.db");
        let locks = SqliteLocks::open(&path, "soloist", "id", Arc::default()).unwrap();
        (dir, locks)
    }

    async fn leave(locks: &SqliteLocks, name: &str, which: LevelToLeave) -> u32 {
        match locks.leave("k", ("a", name), which, PATIENCE).await {
            Ok(LeaveReply::Levels(levels)) => levels,
            _ => panic!("it is ours"),
        }
    }

    /// Enters a level; None: that level is over.
    async fn enter(locks: &SqliteLocks, name: &str) -> Option<u32> {
        match locks.enter("k", ("a", name), LEASE, PATIENCE).await {
            Ok(EnterReply::Acquired(_, levels)) => Some(levels),
            Ok(EnterReply::Stale) => None,
            _ => panic!("nobody else has it"),
        }
    }

    #[test]
    fn a_row_is_a_lock_until_its_time() {
        let row = |until, count| Row {
            owner: "a".to_owned(),
            count,
            nonce: None,
            token: 1,
            until,
        };
        for (now, left) in [(6, Some(4)), (9, Some(1)), (10, None), (11, None)] {
            let left = left.map(Duration::from_micros);
            assert_eq!(row(10, None).left(now), left, "{now}");
        }
        // Released at 10.
        assert_eq!(row(-10, None).left(12), None);
        assert!(matches!(row(1, None).kind(), Kind::Plain));
        assert!(matches!(row(1, Some(1)).kind(), Kind::Reentrant));
    }

    #[test]
    fn periods_follow_each_other() {
        let us = Duration::from_micros;
        for (now, begin, next) in [
            (600_000, 600, 300_000),
            (899_999, 600, 1),
            (900_000, 900, 300_000),
            (-1, -300, 1),
        ] {
            assert_eq!(begin_of_period(now, 300), begin, "{now}");
            assert_eq!(until_next(now, begin, 300), us(next), "{now}");
        }
        assert_eq!(until_next(900_001, 600, 300), us(0));
        assert_eq!(period_kept_until(600, 300), 1_200_000);
    }

    #[tokio::test]
    async fn locks_of_another_namespace_have_other_rows() {
        let (_dir, locks) = locks();
        assert_eq!(locks.name("k"), "soloist:{k}");
    }

    #[tokio::test]
    async fn a_level_counts_once_in_whatever_order_it_is_asked_for_again() {
        let (_dir, locks) = locks();
        assert_eq!(enter(&locks, "1").await, Some(1));
        assert_eq!(enter(&locks, "2").await, Some(2));
        assert_eq!(enter(&locks, "1").await, Some(2));
        assert_eq!(leave(&locks, "1", LevelToLeave::Named).await, 1);
        assert_eq!(leave(&locks, "1", LevelToLeave::Named).await, 1);
        assert_eq!(enter(&locks, "1").await, None);
        // A level that was never entered.
        assert_eq!(leave(&locks, "3", LevelToLeave::Unanswered).await, 1);
        assert_eq!(enter(&locks, "3").await, None);
        // The newest level, under another name, asked twice.
        assert_eq!(enter(&locks, "4").await, Some(2));
        assert_eq!(leave(&locks, "5", LevelToLeave::Newest).await, 1);
        assert_eq!(leave(&locks, "5", LevelToLeave::Newest).await, 1);
        assert_eq!(leave(&locks, "2", LevelToLeave::Named).await, 0);
        for late in ["2", "4"] {
            assert_eq!(enter(&locks, late).await, None, "{late}");
        }
        assert_eq!(enter(&locks, "6").await, Some(1));
    }

    #[tokio::test]
    async fn a_release_that_is_asked_for_again_is_one_and_keeps_what_it_kept() {
        let (_dir, locks) = locks();
        let acquired = locks.try_lock("k", "a", LEASE, PATIENCE).await;
        assert!(matches!(acquired, Ok(TryLockReply::Acquired(_))));
        for keep_for in [LEASE, Duration::ZERO] {
            let options = ReleaseOptions {
                keep_for,
                check_expiry: false,
                unanswered: false,
            };
            let freed = locks.release("k", "a", options, PATIENCE).await;
            assert_eq!(freed.unwrap(), OwnerReply::Done);
            assert!(locks.holder("k", PATIENCE).await.unwrap().is_some());
        }
    }

    #[tokio::test]
    async fn what_is_over_stays_over_and_tokens_grow_though_the_clock_goes_back() {
        const START: i64 = 5_000_000_000;
        let dir = tempfile::tempdir().unwrap();
        let now = Arc::new(AtomicI64::new(START));
        let clock = {
            let now = now.clone();
            Arc::new(move || now.load(Ordering::SeqCst))
        };
        let store = SqliteStore::open_with_clock(&dir.path().join("locks.db"), clock).unwrap();
        let locks = SqliteLocks::new(store, "soloist", "id", Arc::default());
        let take = async |owner| match locks.try_lock("k", owner, LEASE, PATIENCE).await {
            Ok(TryLockReply::Acquired(FencingToken(token))) => Some(token),
            Ok(TryLockReply::Stale) => None,
            other => panic!("{other:?}"),
        };
        let free = async |owner| {
            let freed = locks.release("k", owner, ReleaseOptions::default(), PATIENCE);
            assert_eq!(freed.await.unwrap(), OwnerReply::Done);
        };
        let holder = async || locks.holder("k", PATIENCE).await.unwrap();
        assert_eq!(take("a").await, Some(START));
        assert_eq!(holder().await, Some(("a".to_owned(), LEASE)));
        // A request that is repeated is the same one.
        assert_eq!(take("a").await, Some(START));
        free("a").await;
        assert_eq!(take("a").await, None);
        now.fetch_sub(1000, Ordering::SeqCst);
        assert_eq!(holder().await, None);
        assert_eq!(take("b").await, Some(START + 1));
        assert_eq!(holder().await.map(|(owner, _)| owner).as_deref(), Some("b"));
        // A release that is not its owner's, or that comes late, changes nothing.
        for owner in ["a", "c"] {
            let freed = locks.release("k", owner, ReleaseOptions::default(), PATIENCE);
            let theirs = OwnerReply::NotOwner(Some("b".to_owned()));
            assert_eq!(freed.await.unwrap(), theirs);
        }
        // The other kind of lock has a row of its own kind.
        let entered = locks.enter("k", ("b", "1"), LEASE, PATIENCE).await;
        assert!(matches!(entered, Err(Error::WrongType { .. })));
        let renewed = locks.renew("k", "b", Kind::Reentrant, LEASE, PATIENCE);
        assert!(matches!(renewed.await, Err(Error::WrongType { .. })));
        let renewed = locks.renew("k", "b", Kind::Plain, 2 * LEASE, PATIENCE);
        assert_eq!(renewed.await.unwrap(), OwnerReply::Done);
        assert_eq!(holder().await, Some(("b".to_owned(), 2 * LEASE)));
        assert!(locks.address().ends_with("locks.db"));
        assert_eq!(locks.patience(), PATIENCE);
    }

    #[tokio::test]
    async fn releases_are_listened_to_while_somebody_waits() {
        let (_dir, locks) = locks();
        let listens = || locks.subscriber.lock().task.is_some();
        assert!(!listens());
        for key in ["k", "l"] {
            locks.subscribe(key).await;
            assert!(listens());
        }
        locks.unsubscribe("k");
        assert!(listens());
        locks.unsubscribe("l");
        assert!(!listens());
    }

    /// Its own releases wake the client's waiters without a message.
    #[tokio::test]
    async fn a_release_by_another_client_wakes_the_waiters_of_its_key() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", dir.path().join("locks.db").display());
        let core = crate::LockClient::open(&url).unwrap().core;
        let other = crate::LockClient::open(&url).unwrap();
        let join = |key: &str| core.queues.join(&key.into(), core.clone());
        let (at_k, at_l) = (join("k"), join("l"));
        let (mut k, mut l) = (at_k.wakeup(), at_l.wakeup());
        for key in ["k", "l"] {
            core.backend.subscribe(key).await;
        }
        let me = format!("host#{}.1", core.id);
        let backend = &core.backend;
        let taken = backend.try_lock("k", &me, LEASE, PATIENCE).await;
        assert!(matches!(taken, Ok(TryLockReply::Acquired(_))));
        let freed = backend.release("k", &me, ReleaseOptions::default(), PATIENCE);
        assert_eq!(freed.await.unwrap(), OwnerReply::Done);
        let theirs = other.try_lock("l", LEASE, crate::NoRetry).await.unwrap();
        theirs.acquired().unwrap().release().await.unwrap();
        tokio::time::timeout(Duration::from_secs(60), l.changed())
            .await
            .expect("a release by another client is announced");
        assert_eq!(k.changed().now_or_never(), None);
    }

    #[tokio::test]
    async fn a_period_is_given_back_by_its_owner_only() {
        let (_dir, locks) = locks();
        let year = Duration::from_secs(366 * 24 * 3600);
        let claim = async |owner: &str| match locks.claim_period("k", owner, year, PATIENCE).await {
            Ok(PeriodReply::Claimed { begin, .. }) => Some(begin),
            _ => None,
        };
        let begin = claim("a").await.unwrap();
        for (owner, begin) in [("b", begin), ("a", begin - 1)] {
            let at = (year, begin);
            locks
                .release_period("k", owner, at, PATIENCE)
                .await
                .unwrap();
            assert_eq!(claim("b").await, None);
        }
        let at = (year, begin);
        locks.release_period("k", "a", at, PATIENCE).await.unwrap();
        assert_eq!(claim("b").await, Some(begin));
    }
}
