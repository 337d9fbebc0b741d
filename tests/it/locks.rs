//! The library's locks: one suite over Redis and SQLite, then what only a server can do (hang, forget, lose replies).

use std::{
    collections::HashSet,
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use futures_util::future::{Either, join, join_all};
use soloist::{
    Election, Elector, ExponentialBackoff, LimitedRetry, Lock, LockClient, NoRetry, RetryStrategy,
    TryLock, Until, WithLock,
    config::Store,
    lock::{
        Attempt, Error, Period, Redlock, ReentrantLock, Released, ReleasedLevel, TryEnter,
        TryRedlock,
    },
    model::Outcome,
    store::sqlite::SqliteStore,
};
use tempfile::TempDir;

use crate::support::{
    GENEROUS,
    proxy::{Fault, Proxy},
    server::RedisServer,
};

const MS: Duration = Duration::from_millis(1);
/// No test waits that long: a waiter that the end of this lease woke was not woken by a release.
const LONG: Duration = Duration::from_secs(120);

/// A store that clients share.
enum Bed {
    Sqlite(TempDir),
    Redis(RedisServer),
}

impl Bed {
    fn sqlite() -> Self {
        Self::Sqlite(TempDir::new().unwrap())
    }
    fn redis() -> Self {
        Self::Redis(RedisServer::start())
    }
    fn url(&self) -> String {
        match self {
            Self::Sqlite(dir) => format!("sqlite:{}", dir.path().join("locks.db").display()),
            Self::Redis(server) => server.url(),
        }
    }
    fn server(&self) -> &RedisServer {
        match self {
            Self::Redis(server) => server,
            Self::Sqlite(_) => unreachable!(),
        }
    }
    /// One more client, as another process would have.
    fn client(&self) -> LockClient {
        LockClient::open(&self.url()).unwrap()
    }
}

macro_rules! over_both {
    ($($test:ident)*) => {
        mod sqlite { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(super::Bed::sqlite()).await })* }
        mod redis { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(super::Bed::redis()).await })* }
    };
}

mod dropped;
mod electors;
mod own_thread;
mod redlock;
mod rules;

over_both! {
    a_hundred_contenders_have_one_winner
    who_loses_is_told_who_has_it
    a_retry_strategy_decides_when_to_ask_again
    a_waiter_is_woken_by_the_release_of_another_client
    a_waiter_is_woken_by_the_release_of_its_own_client
    a_waiter_that_gives_up_is_told_who_has_it
    waiters_of_one_client_are_served_in_order
    singleflight_gives_the_lock_to_each_caller_in_turn
    a_lost_singleflight_lock_lets_the_next_one_in
    a_lock_is_renewed_until_it_is_given_back
    renewals_are_bounded
    a_lapsed_lock_is_lost_and_cannot_be_renewed
    who_lost_the_lock_cannot_take_it_from_its_successor
    a_release_counts_once
    a_dropped_lock_is_given_back
    a_dropped_request_leaves_nothing_behind
    a_release_that_is_dropped_goes_on
    fencing_tokens_grow
    bad_keys_and_leases_are_refused_unasked
    a_future_under_a_lock_ends_with_its_value
    a_future_is_cancelled_when_its_lock_is_lost
    deadlines_follow_the_lock
    keys_and_namespaces_do_not_meet
    a_reentrant_lock_is_freed_by_its_last_level
    a_foreign_release_of_a_reentrant_lock_is_an_outcome
    a_renewal_covers_all_levels
    who_waits_to_enter_is_woken_by_the_last_level
    an_owner_that_waits_twice_enters_twice
    a_reentrant_lock_is_kept_renewed_until_it_is_freed_or_dropped
    who_enters_what_its_owner_has_elsewhere_can_keep_it_renewed
    one_key_is_not_of_two_kinds
    a_redlock_is_taken_renewed_and_given_back
    a_period_is_claimed_once
    an_elector_grants_each_occurrence_once
    an_elector_takes_over_from_the_dead
    a_term_is_renewed_until_it_is_settled
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_the_callers_own_is_connected_as_it_was_made() {
    use ::redis::IntoConnectionInfo;
    let server = RedisServer::start();
    server.command::<()>(&["ACL", "SETUSER", "me", "on", ">s3cret", "~*", "&*", "+@all"]);
    let info = server.url().into_connection_info().unwrap();
    let settings = info.redis_settings().clone();
    let info = info.set_redis_settings(settings.set_username("me").set_password("s3cret"));
    let client = ::redis::Client::open(info).unwrap();
    let ours = LockClient::with_redis(client.clone());
    let other = LockClient::open(&server.url()).unwrap();
    assert_eq!(ours.address(), other.address());

    let lock = take(&ours, "k", LONG).await;
    let connected: String = server.command(&["CLIENT", "LIST"]);
    assert!(connected.contains(" user=me "), "{connected}");
    let held = other.try_lock("k", LONG, NoRetry).await.unwrap();
    assert!(matches!(held, TryLock::Held { .. }), "{held:?}");
    let mut elsewhere = Store::from_url(&server.url()).unwrap();
    elsewhere.namespace = "elsewhere".to_owned();
    let elsewhere = LockClient::with_redis_and_config(client, &elsewhere);
    take(&elsewhere, "k", LONG).await.release().await.unwrap();

    // The client's subscriptions go there too: a waiter is woken long before the lease is over.
    lock.release().await.unwrap();
    let lock = take(&other, "k", LONG).await;
    let (waited, ()) = join(ours.lock("k", GENEROUS, LONG), async {
        until("somebody waits", || {
            let told: (String, u32) = server.command(&["PUBSUB", "NUMSUB", "soloist:{k}:released"]);
            told.1 > 0
        })
        .await;
        lock.release().await.unwrap();
    })
    .await;
    acquired(waited.unwrap()).release().await.unwrap();

    server.command::<()>(&["ACL", "DELUSER", "me"]);
    let refused = ours.try_lock("k", LONG, NoRetry).await.unwrap_err();
    assert!(!refused.to_string().contains("s3cret"), "{refused}");
}

fn acquired(t: TryLock) -> Lock {
    match t {
        TryLock::Acquired(lock) => lock,
        TryLock::Held { holder, remaining } => panic!("held by {holder} for {remaining:?}"),
    }
}

/// Acquires the lock, also if the machine stands still for so long that the grant of a short lease comes too late.
async fn take(c: &LockClient, key: &str, lease: Duration) -> Lock {
    let begun = Instant::now();
    loop {
        match c.try_lock(key, lease, NoRetry).await {
            Err(Error::TooLate { .. }) if begun.elapsed() < GENEROUS => until_free(c, key).await,
            answer => return acquired(answer.unwrap()),
        }
    }
}

/// Waits until `what` comes true.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(
            begun.elapsed() < GENEROUS,
            "waited in vain for this: {what}"
        );
        tokio::time::sleep(MS).await;
    }
}

async fn until_free(c: &LockClient, key: &str) {
    let begun = Instant::now();
    while c.holder(key).await.unwrap().is_some() {
        assert!(begun.elapsed() < GENEROUS, "{key} does not become free");
        tokio::time::sleep(MS).await;
    }
}

async fn within<T>(f: impl Future<Output = T>) -> T {
    tokio::time::timeout(GENEROUS, f).await.expect("in time")
}

async fn a_hundred_contenders_have_one_winner(bed: Bed) {
    let clients: Vec<_> = (0..4).map(|_| bed.client()).collect();
    let barrier = Arc::new(tokio::sync::Barrier::new(100));
    let tasks: Vec<_> = (0..100)
        .map(|i| {
            let (c, barrier) = (clients[i % 4].clone(), barrier.clone());
            tokio::spawn(async move {
                barrier.wait().await;
                c.try_lock("one", LONG, NoRetry).await.unwrap().acquired()
            })
        })
        .collect();
    let mut winners = vec![];
    for t in tasks {
        winners.extend(t.await.unwrap());
    }
    assert_eq!(winners.len(), 1);
    assert!(winners[0].is_held());
}

async fn who_loses_is_told_who_has_it(bed: Bed) {
    let (a, b) = (bed.client().named("ann"), bed.client());
    assert_eq!(b.holder("k").await.unwrap(), None);
    let lock = take(&a, "k", LONG).await;
    assert!(lock.owner().starts_with("ann#"));
    let TryLock::Held { holder, remaining } = b.try_lock("k", LONG, NoRetry).await.unwrap() else {
        panic!("two have it");
    };
    assert_eq!(holder, "ann");
    assert!(remaining <= LONG && remaining > LONG / 2, "{remaining:?}");
    assert_eq!(b.holder("k").await.unwrap().unwrap().name, "ann");
    assert_eq!(lock.release().await.unwrap(), Released::Now);
    assert_eq!(b.holder("k").await.unwrap(), None);
}

/// Counts the tries of the strategy inside.
struct Counted<R>(R, Arc<AtomicU32>);
impl<R: RetryStrategy> RetryStrategy for Counted<R> {
    fn pause(&mut self, a: &Attempt) -> Option<Duration> {
        self.1.store(a.number, SeqCst);
        assert!(a.remaining > LONG / 2 && a.remaining <= LONG);
        self.0.pause(a)
    }
}

async fn a_retry_strategy_decides_when_to_ask_again(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let lock = take(&a, "k", LONG).await;
    let tries = Arc::new(AtomicU32::new(0));
    let retry = LimitedRetry {
        interval: MS,
        max: 3,
    };
    let out = b.try_lock("k", LONG, Counted(retry, tries.clone())).await;
    assert!(matches!(out.unwrap(), TryLock::Held { .. }));
    assert_eq!(tries.swap(0, SeqCst), 4);
    let out = b
        .try_lock("k", LONG, Counted(Until::new(500 * MS), tries.clone()))
        .await;
    assert!(matches!(out.unwrap(), TryLock::Held { .. }));
    assert!(tries.swap(0, SeqCst) >= 2);
    let spin = Counted(ExponentialBackoff::default(), tries.clone());
    let waiter = tokio::spawn(async move { acquired(b.try_lock("k", LONG, spin).await.unwrap()) });
    until("it spins", || tries.load(SeqCst) >= 3).await;
    lock.release().await.unwrap();
    let _lock = within(waiter).await.unwrap();
}

fn waiting(c: &LockClient, key: &'static str) -> tokio::task::JoinHandle<Lock> {
    let c = c.clone();
    tokio::spawn(async move { acquired(c.lock(key, LONG, LONG).await.unwrap()) })
}

async fn a_waiter_is_woken_by_the_release_of_another_client(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    for _ in 0..3 {
        let lock = take(&a, "k", LONG).await;
        let waiter = waiting(&b, "k");
        tokio::time::sleep(30 * MS).await;
        assert!(!waiter.is_finished());
        lock.release().await.unwrap();
        let got = within(waiter).await.unwrap();
        got.release().await.unwrap();
    }
}

async fn a_waiter_is_woken_by_the_release_of_its_own_client(bed: Bed) {
    let a = bed.client();
    let lock = take(&a, "k", LONG).await;
    let waiter = waiting(&a, "k");
    tokio::time::sleep(30 * MS).await;
    assert!(!waiter.is_finished());
    // In the background.
    drop(lock);
    let _got = within(waiter).await.unwrap();
}

async fn a_waiter_that_gives_up_is_told_who_has_it(bed: Bed) {
    let (a, b) = (bed.client().named("ann"), bed.client().named("bob"));
    let _lock = take(&a, "k", LONG).await;
    for wait in [Duration::ZERO, 50 * MS] {
        let (first, second) = tokio::join!(b.lock("k", wait, LONG), b.lock("k", wait, LONG));
        for out in [first, second] {
            let TryLock::Held { holder, remaining } = out.unwrap() else {
                panic!("two have it");
            };
            assert_eq!(holder, "ann");
            assert!(remaining > LONG / 2 && remaining <= LONG, "{remaining:?}");
        }
    }
}

async fn waiters_of_one_client_are_served_in_order(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let lock = take(&a, "k", LONG).await;
    let order = Arc::new(Mutex::new(vec![]));
    let mut tasks = vec![];
    for i in 0..20 {
        let (b, order) = (b.clone(), order.clone());
        let (begun, started) = tokio::sync::oneshot::channel();
        tasks.push(tokio::spawn(async move {
            let asking = b.lock("k", LONG, LONG);
            tokio::pin!(asking);
            // Once it is polled, the future is in the queue.
            let polled = futures_util::poll!(&mut asking);
            assert!(polled.is_pending());
            begun.send(()).unwrap();
            let lock = acquired(asking.await.unwrap());
            order.lock().unwrap().push(i);
            lock.release().await.unwrap();
        }));
        started.await.unwrap();
    }
    lock.release().await.unwrap();
    for t in tasks {
        within(t).await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..20).collect::<Vec<_>>());
}

async fn singleflight_gives_the_lock_to_each_caller_in_turn(bed: Bed) {
    let c = bed.client();
    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = vec![];
    for _ in 0..20 {
        let (c, inside) = (c.clone(), inside.clone());
        tasks.push(tokio::spawn(async move {
            let lock = acquired(c.singleflight_lock("k", LONG, LONG).await.unwrap());
            assert_eq!(inside.fetch_add(1, SeqCst), 0, "two are inside");
            tokio::task::yield_now().await;
            inside.fetch_sub(1, SeqCst);
            let token = lock.fencing_token().0;
            lock.release().await.unwrap();
            token
        }));
    }
    let mut tokens = vec![];
    for t in tasks {
        tokens.push(within(t).await.unwrap());
    }
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 20, "a lease was shared");
    if let Bed::Redis(server) = &bed {
        // Each sends a try and a release; two calls more, because the server did not know the scripts.
        assert_eq!(calls(server, "evalsha"), 42);
    }
}

async fn a_lost_singleflight_lock_lets_the_next_one_in(bed: Bed) {
    let c = bed.client();
    let stuck = acquired(c.singleflight_lock("k", LONG, 1500 * MS).await.unwrap());
    let next = within(c.singleflight_lock("k", LONG, LONG)).await.unwrap();
    assert!(acquired(next).is_held());
    assert!(!stuck.is_held());
}

async fn a_lock_is_renewed_until_it_is_given_back(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let lease = 5000 * MS;
    let lock = take(&a, "k", lease).await;
    lock.keep_renewed();
    lock.keep_renewed();
    let begun = Instant::now();
    while begun.elapsed() < lease + 500 * MS {
        assert!(lock.is_held());
        assert!(
            b.try_lock("k", lease, NoRetry)
                .await
                .unwrap()
                .acquired()
                .is_none()
        );
        tokio::time::sleep(5 * MS).await;
    }
    lock.release().await.unwrap();
    assert!(!lock.is_held());
    let _next = take(&b, "k", LONG).await;
}

async fn renewals_are_bounded(bed: Bed) {
    let a = bed.client();
    let lease = Duration::from_secs(4);
    let begun = Instant::now();
    let lock = take(&a, "k", lease).await;
    let mut deadlines = lock.deadlines();
    let mut last = deadlines.now();
    lock.keep_renewed_at_most(3);
    let mut renewals = 0;
    loop {
        let next = within(deadlines.next()).await;
        if next == soloist::clock::Boottime(0) {
            break;
        }
        renewals += u32::from(next > last);
        last = next;
        assert!(renewals <= 3, "renewed once more");
    }
    assert_eq!(renewals, 3);
    within(lock.lost()).await;
    assert!(!lock.is_held());
    // Three renewals, a fifth of the lease apart; then trust runs out.
    assert!(begun.elapsed() > lease, "{:?}", begun.elapsed());
    assert!(matches!(lock.renew().await, Err(Error::Lost { .. })));
    until_free(&a, "k").await;
}

async fn a_lapsed_lock_is_lost_and_cannot_be_renewed(bed: Bed) {
    let a = bed.client();
    let lease = 2000 * MS;
    let lock = take(&a, "k", lease).await;
    assert!(lock.remaining() < lease);
    lock.renew().await.unwrap();
    within(lock.lost()).await;
    assert_eq!(lock.remaining(), Duration::ZERO);
    assert!(matches!(lock.renew().await, Err(Error::Lost { .. })));
    until_free(&a, "k").await;
    let e = lock.release().await.unwrap_err();
    assert!(matches!(e, Error::NotHeld { holder: None, .. }), "{e}");
}

async fn who_lost_the_lock_cannot_take_it_from_its_successor(bed: Bed) {
    let (a, b) = (bed.client(), bed.client().named("bob"));
    let old = take(&a, "k", 300 * MS).await;
    let new = acquired(within(b.lock("k", LONG, LONG)).await.unwrap());
    let e = old.release().await.unwrap_err();
    assert!(
        matches!(&e, Error::NotHeld { holder: Some(h), .. } if h == "bob"),
        "{e}"
    );
    assert_eq!(
        e.to_string(),
        "this owner does not hold lock `k` any more: bob has it"
    );
    let token = old.fencing_token();
    drop(old);
    new.renew().await.unwrap();
    assert!(new.fencing_token() > token);
    assert_eq!(a.holder("k").await.unwrap().unwrap().name, "bob");
}

async fn a_release_counts_once(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let lock = take(&a, "k", LONG).await;
    assert_eq!(lock.release().await.unwrap(), Released::Now);
    let next = take(&b, "k", LONG).await;
    assert_eq!(lock.release().await.unwrap(), Released::Before);
    assert!(matches!(lock.renew().await, Err(Error::NotHeld { .. })));
    drop(lock);
    next.renew().await.unwrap();
    assert_eq!(next.release().await.unwrap(), Released::Now);
}

async fn a_dropped_lock_is_given_back(bed: Bed) {
    let a = bed.client();
    let lock = take(&a, "k", LONG).await;
    // From a thread that knows nothing of the runtime.
    std::thread::spawn(move || drop(lock)).join().unwrap();
    until_free(&a, "k").await;
}

async fn a_dropped_request_leaves_nothing_behind(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    for polls in 1..40 {
        let mut asking = Box::pin(a.lock("k", LONG, LONG));
        for _ in 0..polls {
            if futures_util::poll!(&mut asking).is_ready() {
                break;
            }
            tokio::time::sleep(MS / 20).await;
        }
        drop(asking);
        let got = within(b.lock("k", GENEROUS, LONG)).await.unwrap();
        acquired(got).release().await.unwrap();
    }
}

async fn fencing_tokens_grow(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let mut last = 0;
    for i in 0..20 {
        let lock = take(if i % 2 == 0 { &a } else { &b }, "k", LONG).await;
        assert!(lock.fencing_token().0 > last);
        last = lock.fencing_token().0;
        lock.release().await.unwrap();
    }
    let lapsing = take(&a, "k", 300 * MS).await;
    let next = acquired(within(b.lock("k", LONG, LONG)).await.unwrap());
    assert!(next.fencing_token() > lapsing.fencing_token());
}

async fn bad_keys_and_leases_are_refused_unasked(bed: Bed) {
    let c = bed.client();
    let long = "x".repeat(513);
    for bad in ["", "a{b", "a}", "a\nb", "\u{7}", &long] {
        let e = c.try_lock(bad, LONG, NoRetry).await.unwrap_err();
        assert!(matches!(e, Error::InvalidKey { .. }), "{e}");
        let e = c.lock(bad, LONG, LONG).await.unwrap_err();
        assert!(matches!(e, Error::InvalidKey { .. }), "{e}");
        let e = c.holder(bad).await.unwrap_err();
        assert!(matches!(e, Error::InvalidKey { .. }), "{e}");
    }
    for bad in [
        Duration::ZERO,
        Duration::from_nanos(1),
        9 * MS,
        Duration::MAX,
    ] {
        let e = c.try_lock("k", bad, NoRetry).await.unwrap_err();
        assert!(matches!(e, Error::InvalidLease { .. }), "{e}");
        let e = c.singleflight_lock("k", LONG, bad).await.unwrap_err();
        assert!(matches!(e, Error::InvalidLease { .. }), "{e}");
    }
    let longest = "ü".repeat(256);
    let lock = take(&c, &longest, LONG).await;
    lock.release().await.unwrap();
    // Waiting for ever is no overflow.
    acquired(c.lock("k", Duration::MAX, LONG).await.unwrap())
        .release()
        .await
        .unwrap();
}

async fn a_future_under_a_lock_ends_with_its_value(bed: Bed) {
    let (a, b) = (bed.client().named("ann"), bed.client());
    let inside = async {
        let out = b.with_lock("k", 10 * MS, LONG, |_| async { 1 }).await;
        assert!(matches!(out.unwrap(), WithLock::Held { holder, .. } if holder == "ann"));
        7
    };
    let before = take(&a, "k", LONG).await;
    let token = before.fencing_token();
    before.release().await.unwrap();
    let work = |given| async move {
        // The work gets the token that it may pass on.
        assert!(given > token);
        inside.await
    };
    let out = a.with_lock("k", LONG, LONG, work).await.unwrap();
    assert_eq!(out, WithLock::Done(7));
    assert_eq!(b.holder("k").await.unwrap(), None);
}

struct Flag(Arc<AtomicUsize>);
impl Drop for Flag {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

async fn a_future_is_cancelled_when_its_lock_is_lost(bed: Bed) {
    let a = bed.client();
    let dropped = Arc::new(AtomicUsize::new(0));
    let flag = Flag(dropped.clone());
    let work = |_| async move {
        let _flag = flag;
        std::future::pending::<()>().await;
    };
    let (bed_, c) = (&bed, bed.client());
    let sabotage = async {
        let begun = Instant::now();
        while c.holder("k").await.unwrap().is_none() {
            assert!(begun.elapsed() < GENEROUS);
            tokio::time::sleep(MS).await;
        }
        steal(bed_, "k");
    };
    let (out, ()) =
        within(async { tokio::join!(a.with_lock("k", LONG, 2000 * MS, work), sabotage) }).await;
    assert!(matches!(out, Err(Error::Lost { .. })), "{out:?}");
    assert_eq!(dropped.load(SeqCst), 1);
}

/// Takes the lock away from its holder, as an operator might.
fn steal(bed: &Bed, key: &str) {
    match bed {
        Bed::Redis(server) => server.command::<()>(&["DEL", &format!("soloist:{{{key}}}:lock")]),
        Bed::Sqlite(dir) => {
            let db = rusqlite::Connection::open(dir.path().join("locks.db")).unwrap();
            db.busy_timeout(GENEROUS).unwrap();
            db.execute("DELETE FROM locks", []).unwrap();
        }
    }
}

async fn deadlines_follow_the_lock(bed: Bed) {
    let a = bed.client();
    let lock = take(&a, "k", 5000 * MS).await;
    let mut deadlines = lock.deadlines();
    let first = deadlines.now();
    assert!(first > soloist::clock::Boottime::now());
    lock.renew().await.unwrap();
    let second = within(deadlines.next()).await;
    assert!(second > first);
    let renewed = lock.remaining();
    assert!(renewed <= 5000 * MS && renewed > Duration::ZERO);
    lock.release().await.unwrap();
    let mut last = within(deadlines.next()).await;
    while last != soloist::clock::Boottime(0) {
        last = within(deadlines.next()).await;
    }
}

async fn keys_and_namespaces_do_not_meet(bed: Bed) {
    let a = bed.client();
    let mut other = Store::from_url(&bed.url()).unwrap();
    other.namespace = "other".to_owned();
    let b = LockClient::with_config(&other).unwrap();
    let _first = take(&a, "k", LONG).await;
    let _second = take(&b, "k", LONG).await;
    let _third = take(&a, "kk", LONG).await;
}

fn levels(e: TryEnter) -> u32 {
    match e {
        TryEnter::Acquired { levels, .. } => levels,
        TryEnter::Held { holder, .. } => panic!("held by {holder}"),
    }
}

async fn a_reentrant_lock_is_freed_by_its_last_level(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let (ours, theirs) = (
        a.reentrant("k", LONG).unwrap(),
        b.reentrant("k", LONG).unwrap(),
    );
    for n in 1..=3 {
        assert_eq!(levels(ours.clone().try_enter(NoRetry).await.unwrap()), n);
    }
    let mut tries = vec![];
    let thrice = |a: &Attempt| {
        tries.push(a.number);
        (a.number < 3).then_some(MS)
    };
    assert!(matches!(
        within(theirs.try_enter(thrice)).await.unwrap(),
        TryEnter::Held { .. }
    ));
    assert_eq!(tries, [1, 2, 3]);
    assert_eq!(
        ours.leave().await.unwrap(),
        ReleasedLevel::StillHeld { levels: 2 }
    );
    assert_eq!(
        ours.leave().await.unwrap(),
        ReleasedLevel::StillHeld { levels: 1 }
    );
    assert!(ours.is_held());
    assert!(matches!(
        theirs.try_enter(NoRetry).await.unwrap(),
        TryEnter::Held { .. }
    ));
    assert_eq!(ours.leave().await.unwrap(), ReleasedLevel::Released);
    assert!(!ours.is_held());
    assert_eq!(ours.leave().await.unwrap(), ReleasedLevel::NotHeld);
    assert_eq!(levels(theirs.try_enter(NoRetry).await.unwrap()), 1);
    // The same name is the same owner, from another process too.
    let (one, two) = (
        a.reentrant("n", LONG).unwrap(),
        b.reentrant("n", LONG).unwrap(),
    );
    let batch = one.owned_by("batch");
    assert_eq!(levels(batch.try_enter(NoRetry).await.unwrap()), 1);
    assert!(batch.is_held() && !batch.owned_by("other").is_held());
    assert_eq!(
        levels(two.owned_by("batch").try_enter(NoRetry).await.unwrap()),
        2
    );
    assert!(matches!(
        one.owned_by("other").try_enter(NoRetry).await.unwrap(),
        TryEnter::Held { .. }
    ));
}

async fn a_foreign_release_of_a_reentrant_lock_is_an_outcome(bed: Bed) {
    let (a, b) = (bed.client().named("ann"), bed.client());
    let (ours, theirs) = (
        a.reentrant("k", LONG).unwrap(),
        b.reentrant("k", LONG).unwrap(),
    );
    let _ = ours.try_enter(NoRetry).await.unwrap();
    let foreign = ReleasedLevel::Foreign {
        holder: "ann".to_owned(),
    };
    assert_eq!(theirs.leave().await.unwrap(), foreign);
    let e = theirs.renew().await.unwrap_err();
    assert!(matches!(e, Error::NotHeld { holder: Some(h), .. } if h == "ann"));
    ours.renew().await.unwrap();
    assert_eq!(ours.leave().await.unwrap(), ReleasedLevel::Released);
    // An owner that believes to hold the lock still does not release what an operator took away.
    let _ = ours.try_enter(NoRetry).await.unwrap();
    steal(&bed, "k");
    assert!(ours.is_held() && ours.key() == "k");
    assert_eq!(ours.leave().await.unwrap(), ReleasedLevel::NotHeld);
}

async fn a_renewal_covers_all_levels(bed: Bed) {
    let c = bed.client();
    let lock = c.reentrant("k", 5000 * MS).unwrap();
    assert_eq!(levels(lock.try_enter(NoRetry).await.unwrap()), 1);
    assert_eq!(levels(lock.try_enter(NoRetry).await.unwrap()), 2);
    let begun = Instant::now();
    while begun.elapsed() < 5500 * MS {
        lock.renew().await.unwrap();
        tokio::time::sleep(20 * MS).await;
    }
    assert_eq!(
        lock.leave().await.unwrap(),
        ReleasedLevel::StillHeld { levels: 1 }
    );
    until_free(&c, "k").await;
    assert!(!lock.is_held());
    assert!(matches!(lock.renew().await, Err(Error::Lost { .. })));
    assert_eq!(lock.leave().await.unwrap(), ReleasedLevel::NotHeld);
}

async fn who_waits_to_enter_is_woken_by_the_last_level(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let ours = a.reentrant("k", LONG).unwrap();
    for n in 1..=2 {
        assert_eq!(levels(ours.enter(LONG).await.unwrap()), n);
    }
    // Another owner of the same client, and one of another client.
    let waiters = [&a, &b].map(|c| {
        let theirs = c.reentrant("k", LONG).unwrap();
        tokio::spawn(async move {
            assert_eq!(levels(theirs.enter(LONG).await.unwrap()), 1);
            assert_eq!(theirs.leave().await.unwrap(), ReleasedLevel::Released);
        })
    });
    if let Bed::Redis(server) = &bed {
        until("the other client listens", || subscribers(server, "k") == 1).await;
    }
    // The owner that holds the lock does not queue behind them.
    assert_eq!(levels(within(ours.enter(LONG)).await.unwrap()), 3);
    for n in [2, 1] {
        assert_eq!(
            ours.leave().await.unwrap(),
            ReleasedLevel::StillHeld { levels: n }
        );
    }
    assert!(waiters.iter().all(|w| !w.is_finished()));
    let late = b.reentrant("k", LONG).unwrap();
    let TryEnter::Held { holder, remaining } = late.enter(20 * MS).await.unwrap() else {
        panic!("two owners have it");
    };
    assert!(!holder.contains('\t') && remaining > LONG / 2, "{holder:?}");
    assert_eq!(ours.leave().await.unwrap(), ReleasedLevel::Released);
    for w in waiters {
        within(w).await.unwrap();
    }
}

/// An owner does not wait for itself.
async fn an_owner_that_waits_twice_enters_twice(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let theirs = a.reentrant("k", LONG).unwrap();
    assert_eq!(levels(theirs.try_enter(NoRetry).await.unwrap()), 1);
    let ours = b.reentrant("k", LONG).unwrap();
    let waiters = [ours.clone(), ours]
        .map(|ours| tokio::spawn(async move { levels(ours.enter(LONG).await.unwrap()) }));
    tokio::time::sleep(100 * MS).await;
    assert_eq!(theirs.leave().await.unwrap(), ReleasedLevel::Released);
    let mut entered = vec![];
    for w in waiters {
        entered.push(within(w).await.unwrap());
    }
    entered.sort();
    assert_eq!(entered, [1, 2]);
}

async fn a_reentrant_lock_is_kept_renewed_until_it_is_freed_or_dropped(bed: Bed) {
    let c = bed.client();
    let lease = 5000 * MS;
    let (ours, theirs) = (
        c.reentrant("k", lease).unwrap(),
        c.reentrant("k", LONG).unwrap(),
    );
    // There is no level yet that could be renewed.
    ours.keep_renewed();
    assert_eq!(levels(ours.enter(Duration::ZERO).await.unwrap()), 1);
    ours.keep_renewed();
    assert_eq!(levels(ours.enter(Duration::ZERO).await.unwrap()), 2);
    // More calls do not make more renewals.
    (0..100).for_each(|_| ours.keep_renewed());
    assert_kept(&ours, lease + 500 * MS).await;
    if let Bed::Redis(server) = &bed {
        assert!(calls(server, "evalsha") < 100);
    }
    assert_eq!(
        ours.leave().await.unwrap(),
        ReleasedLevel::StillHeld { levels: 1 }
    );
    assert_eq!(ours.leave().await.unwrap(), ReleasedLevel::Released);
    assert!(!ours.is_held());
    // A lock that is entered anew is renewed only after another call, and then until its last value is dropped.
    assert_eq!(levels(ours.enter(Duration::ZERO).await.unwrap()), 1);
    until("it lapses", || !ours.is_held()).await;
    until_free(&c, "k").await;
    assert_eq!(levels(ours.enter(LONG).await.unwrap()), 1);
    ours.keep_renewed();
    let clone = ours.clone();
    drop(ours);
    assert_kept(&clone, lease + 500 * MS).await;
    drop(clone);
    assert_eq!(levels(within(theirs.enter(LONG)).await.unwrap()), 1);
}

async fn assert_kept(lock: &ReentrantLock, time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        assert!(lock.is_held());
        tokio::time::sleep(10 * MS).await;
    }
}

/// The first level is another process's.
async fn who_enters_what_its_owner_has_elsewhere_can_keep_it_renewed(bed: Bed) {
    let lease = 5000 * MS;
    let [theirs, ours] =
        [bed.client(), bed.client()].map(|c| c.reentrant("k", lease).unwrap().owned_by("batch"));
    assert_eq!(levels(theirs.try_enter(NoRetry).await.unwrap()), 1);
    assert_eq!(levels(ours.try_enter(NoRetry).await.unwrap()), 2);
    ours.keep_renewed();
    assert_kept(&ours, lease + 500 * MS).await;
    let left = ours.leave().await.unwrap();
    assert_eq!(left, ReleasedLevel::StillHeld { levels: 1 });
}

/// The renewal ended with the time for which the lock could be trusted, and no answer said that it was lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_entered_again_after_an_outage_can_be_kept_renewed_again() {
    let server = RedisServer::start();
    let open = || LockClient::open(&server.url()).unwrap();
    let lease = 5000 * MS;
    let lock = open().reentrant("k", lease).unwrap();
    assert_eq!(levels(lock.enter(LONG).await.unwrap()), 1);
    lock.keep_renewed();
    server.stop();
    until("nobody can trust it", || !lock.is_held()).await;
    server.cont();
    until_free(&open(), "k").await;
    assert_eq!(levels(within(lock.enter(LONG)).await.unwrap()), 1);
    lock.keep_renewed();
    assert_kept(&lock, lease + 500 * MS).await;
    assert_eq!(lock.leave().await.unwrap(), ReleasedLevel::Released);
    assert_eq!(lock.leave().await.unwrap(), ReleasedLevel::NotHeld);
}

async fn one_key_is_not_of_two_kinds(bed: Bed) {
    let c = bed.client();
    let reentrant = c.reentrant("k", LONG).unwrap();
    assert_eq!(levels(reentrant.try_enter(NoRetry).await.unwrap()), 1);
    let e = c.try_lock("k", LONG, NoRetry).await.unwrap_err();
    assert!(matches!(e, Error::WrongType { .. }), "{e}");
    assert!(c.holder("k").await.unwrap().is_some());
    assert_eq!(reentrant.leave().await.unwrap(), ReleasedLevel::Released);
    let plain = take(&c, "k", LONG).await;
    let e = reentrant.try_enter(NoRetry).await.unwrap_err();
    assert!(matches!(e, Error::WrongType { .. }), "{e}");
    let e = reentrant.leave().await.unwrap_err();
    assert!(matches!(e, Error::WrongType { .. }), "{e}");
    plain.renew().await.unwrap();
    plain.release().await.unwrap();
}

async fn a_redlock_is_taken_renewed_and_given_back(bed: Bed) {
    let beds: Vec<Bed> = (0..3)
        .map(|_| match bed {
            Bed::Sqlite(_) => Bed::sqlite(),
            Bed::Redis(_) => Bed::redis(),
        })
        .collect();
    let red = |name: &str| {
        let nodes = beds.iter().map(|b| b.client().named(name));
        Redlock::new(nodes).unwrap().node_timeout(GENEROUS)
    };
    let (a, b) = (red("ann"), red("bob"));
    let lock = red_taken(a.try_lock("k", LONG, NoRetry).await.unwrap());
    assert!(lock.is_held() && lock.remaining() < LONG);
    let TryRedlock::Held {
        votes,
        holder,
        remaining,
    } = b.try_lock("k", LONG, NoRetry).await.unwrap()
    else {
        panic!("two have it");
    };
    assert_eq!((votes, &*holder), (0, "ann"));
    assert!(remaining > LONG / 2 && remaining <= LONG);
    tokio::time::sleep(50 * MS).await;
    // However long the renewal takes: trust counts from after this moment, 50 ms after the grant.
    let (asked, was) = (Instant::now(), lock.remaining());
    lock.renew().await.unwrap();
    assert!(lock.remaining() + asked.elapsed() > was + 20 * MS);
    assert_eq!(lock.release().await.unwrap(), Released::Now);
    assert_eq!(lock.release().await.unwrap(), Released::Before);
    assert!(!lock.is_held());
    let lock = red_taken(b.try_lock("k", LONG, NoRetry).await.unwrap());
    drop(lock);
    for bed in &beds {
        until_free(&bed.client(), "k").await;
    }
    // One node that another owner holds is no obstacle; two are, and the grant of the third is released.
    let _one = take(&beds[0].client(), "k", LONG).await;
    let lock = red_taken(a.try_lock("k", LONG, NoRetry).await.unwrap());
    lock.release().await.unwrap();
    // The node that becomes free first completes a majority.
    let _two = take(&beds[1].client(), "k", LONG / 2).await;
    let out = a.try_lock("k", LONG, NoRetry).await.unwrap();
    assert!(
        matches!(out, TryRedlock::Held { votes: 1, remaining, .. } if remaining <= LONG / 2),
        "{out:?}"
    );
    assert_eq!(beds[2].client().holder("k").await.unwrap(), None);
}

fn red_taken(t: TryRedlock) -> soloist::lock::RedlockGuard {
    match t {
        TryRedlock::Acquired(guard) => guard,
        TryRedlock::Held { votes, holder, .. } => panic!("{votes} votes, held by {holder}"),
    }
}

#[test]
fn a_redlock_needs_three_nodes() {
    let bed = Bed::sqlite();
    let e = Redlock::new([bed.client(), bed.client()]).unwrap_err();
    assert!(matches!(e, Error::TooFewNodes { have: 2 }), "{e}");
    for (nodes, quorum) in [(3, 2), (4, 3), (5, 3)] {
        let red = Redlock::new((0..nodes).map(|_| bed.client())).unwrap();
        assert_eq!(red.quorum(), quorum);
    }
}

/// Clients of servers, some of which may be down.
fn nodes(servers: &[RedisServer]) -> Redlock {
    let client = |s: &RedisServer| {
        let mut config = Store::from_url(&s.url()).unwrap();
        config.timeout = 200 * MS;
        LockClient::with_config(&config).unwrap()
    };
    Redlock::new(servers.iter().map(client)).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redlock_survives_a_minority_and_needs_a_majority() {
    let mut servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let red = nodes(&servers);
    servers[0].kill();
    let lock = red_taken(red.try_lock("k", LONG, NoRetry).await.unwrap());
    lock.renew().await.unwrap();
    lock.release().await.unwrap();
    servers[1].kill();
    let e = red.try_lock("k", LONG, NoRetry).await.unwrap_err();
    assert!(
        matches!(
            e,
            Error::NoMajority {
                votes: 1,
                needed: 2,
                ..
            }
        ),
        "{e}"
    );
    // Released, also where it had been granted.
    let client = LockClient::open(&servers[2].url()).unwrap();
    assert_eq!(client.holder("k").await.unwrap(), None);
    // An owner without a majority does not hold the lock either.
    let _held = take(&client, "k", LONG).await;
    let e = red.try_lock("k", LONG, NoRetry).await.unwrap_err();
    assert!(matches!(e, Error::NoMajority { votes: 0, .. }), "{e}");
}

/// A caller that loses on the nodes that answer has lost a race, and may ask again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redlock_that_others_have_is_asked_for_again_though_a_node_is_away() {
    let mut servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let red = nodes(&servers);
    servers[0].kill();
    let other = LockClient::open(&servers[1].url()).unwrap().named("other");
    let lock = take(&other, "k", LONG).await;
    let TryRedlock::Held { votes, holder, .. } = red.try_lock("k", LONG, NoRetry).await.unwrap()
    else {
        panic!("without a majority");
    };
    assert_eq!((votes, &*holder), (1, "other"));
    let mut lock = Some(lock);
    let give_up_late = |attempt: &Attempt| {
        // The second time it is free.
        drop(lock.take());
        (attempt.elapsed < GENEROUS).then_some(MS)
    };
    let won = red_taken(red.try_lock("k", LONG, give_up_late).await.unwrap());
    won.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_of_a_redlock_needs_a_majority() {
    let mut servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let red = nodes(&servers);
    // If a majority does not answer, nobody knows whether a majority has released it.
    let lock = red_taken(red.try_lock("k", LONG, NoRetry).await.unwrap());
    servers[0].kill();
    servers[1].kill();
    let e = lock.release().await.unwrap_err();
    assert!(
        matches!(
            e,
            Error::NoMajority {
                votes: 1,
                needed: 2,
                ..
            }
        ),
        "{e}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_whose_key_became_something_else_is_lost() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    let (lock, kept) = (take(&c, "k", LONG).await, take(&c, "k2", LONG).await);
    for key in ["soloist:{k}:lock", "soloist:{k2}:lock"] {
        server.command::<()>(&["DEL", key]);
        server.command::<()>(&["LPUSH", key, "theirs"]);
    }
    let e = lock.renew().await.unwrap_err();
    assert!(matches!(e, Error::WrongType { .. }), "{e}");
    assert!(!lock.is_held());
    // A renewal in the background notices this too, far sooner than trust would end.
    kept.keep_renewed();
    within(kept.lost()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_node_costs_a_redlock_its_timeout_and_nothing_of_its_safety() {
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let proxies: Vec<_> = servers.iter().map(|s| Proxy::start(s.port())).collect();
    let red = Redlock::new(proxies.iter().map(|p| LockClient::open(&p.url()).unwrap())).unwrap();
    proxies[0].set(Fault::BlackHoleDown);
    let begun = Instant::now();
    let lock = red_taken(
        red.node_timeout(1000 * MS)
            .try_lock("k", LONG, NoRetry)
            .await
            .unwrap(),
    );
    assert!(begun.elapsed() >= 1000 * MS);
    assert!(lock.remaining() < LONG - 1000 * MS);
    // What the silent node granted is released with the rest.
    lock.release().await.unwrap();
    proxies[0].set(Fault::None);
    let direct = LockClient::open(&format!("redis://127.0.0.1:{}", servers[0].port())).unwrap();
    until_free(&direct, "k").await;
}

/// A fault of plain Redlock: what a node forgets, it grants again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_redlock_has_two_holders_after_a_node_was_restarted_empty() {
    let mut servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let (a, b) = (nodes(&servers), nodes(&servers));
    servers[2].kill();
    // On exactly a majority: nodes 0 and 1.
    let first = red_taken(a.try_lock("k", LONG, NoRetry).await.unwrap());
    servers[1].restart_empty();
    servers[2].revive(None);
    let second = red_taken(b.try_lock("k", LONG, NoRetry).await.unwrap());
    assert!(
        first.is_held() && second.is_held(),
        "the fault is gone: docs/locks.md is out of date"
    );
}

/// A fault of plain Redlock: a lease is counted by each node's wall clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_redlock_has_two_holders_after_a_clock_was_stepped() {
    let dirs: Vec<_> = (0..3).map(|_| TempDir::new().unwrap()).collect();
    let stepped = Arc::new(std::sync::atomic::AtomicI64::new(0));
    let clients = || {
        let node = |(i, dir): (usize, &TempDir)| {
            let stepped = stepped.clone();
            let clock = Arc::new(move || {
                let step = if i == 1 { stepped.load(SeqCst) } else { 0 };
                soloist::clock::wall_us() + step
            });
            let path = dir.path().join("locks.db");
            LockClient::with_sqlite(SqliteStore::open_with_clock(&path, clock).unwrap())
        };
        dirs.iter().enumerate().map(node).collect::<Vec<_>>()
    };
    let (ann, bob) = (clients(), clients());
    let (a, b) = (
        Redlock::new(ann.clone()).unwrap(),
        Redlock::new(bob).unwrap(),
    );
    // Node 2 is busy for a moment, so that the lock sits on exactly a majority.
    let busy = take(&ann[2], "k", LONG).await;
    let first = red_taken(a.try_lock("k", LONG, NoRetry).await.unwrap());
    busy.release().await.unwrap();
    let out = b.try_lock("k", LONG, NoRetry).await.unwrap();
    assert!(matches!(out, TryRedlock::Held { .. }), "{out:?}");
    stepped.store(2 * LONG.as_micros() as i64, SeqCst);
    let second = red_taken(b.try_lock("k", LONG, NoRetry).await.unwrap());
    assert!(
        first.is_held() && second.is_held(),
        "the fault is gone: docs/locks.md is out of date"
    );
}

/// The same for a single store: what docs/locks.md says about the store's wall clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_of_the_stores_clock_ends_a_lock_and_its_token_shows_it() {
    let dir = TempDir::new().unwrap();
    let stepped = Arc::new(std::sync::atomic::AtomicI64::new(0));
    let client = || {
        let stepped = stepped.clone();
        let clock = Arc::new(move || soloist::clock::wall_us() + stepped.load(SeqCst));
        let path = dir.path().join("locks.db");
        LockClient::with_sqlite(SqliteStore::open_with_clock(&path, clock).unwrap())
    };
    let (a, b) = (client(), client());
    let first = take(&a, "k", LONG).await;
    stepped.store(2 * LONG.as_micros() as i64, SeqCst);
    let second = take(&b, "k", LONG).await;
    assert!(first.is_held() && second.is_held());
    assert!(second.fencing_token() > first.fencing_token());
    assert!(matches!(first.renew().await, Err(Error::NotHeld { .. })));
    second.release().await.unwrap();
    // The clock is back: the token grows all the same.
    stepped.store(0, SeqCst);
    assert!(take(&a, "k", LONG).await.fencing_token() > second.fencing_token());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_level_is_taken_and_given_back_once_when_replies_are_lost() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let c = LockClient::open(&proxy.url()).unwrap();
    let lock = c.reentrant("k", LONG).unwrap();
    for _ in 0..2 {
        let _ = lock.try_enter(NoRetry).await.unwrap();
    }
    let _ = lock.leave().await.unwrap();
    proxy.set(Fault::LoseReply("*2\r\n:1"));
    assert_eq!(levels(lock.try_enter(NoRetry).await.unwrap()), 2);
    proxy.set(Fault::LoseReply(":1\r\n"));
    assert_eq!(
        lock.leave().await.unwrap(),
        ReleasedLevel::StillHeld { levels: 1 }
    );
    proxy.set(Fault::LoseReply(":0\r\n"));
    assert_eq!(lock.leave().await.unwrap(), ReleasedLevel::Released);
    assert_eq!(proxy.struck(), 3);
}

async fn a_period_is_claimed_once(bed: Bed) {
    let clients: Vec<_> = (0..3)
        .map(|i| bed.client().named(&format!("c{i}")))
        .collect();
    let (every, mut claimed, mut held) = (200 * MS, 0, 0);
    let begun = Instant::now();
    while claimed < 5 {
        assert!(begun.elapsed() < GENEROUS);
        let all = clients.iter().map(|c| c.claim_period("k", every));
        for out in futures_util::future::join_all(all).await {
            match out.unwrap() {
                Period::Claimed { next } => {
                    claimed += 1;
                    assert!(next <= every);
                }
                Period::Held { holder, next } => {
                    held += 1;
                    assert!(
                        holder.starts_with('c') && next <= every,
                        "{holder} {next:?}"
                    );
                }
            }
        }
        tokio::time::sleep(MS).await;
    }
    // Five periods cannot be claimed in less than the time from the end of the first to the start of the last.
    assert!(begun.elapsed() >= 3 * every, "{:?}", begun.elapsed());
    assert!(held > claimed);
    for bad in [Duration::ZERO, Duration::from_micros(1500), Duration::MAX] {
        let e = clients[0].claim_period("k", bad).await.unwrap_err();
        assert!(matches!(e, Error::InvalidLease { .. }), "{e}");
    }
    // A period is no lock: the key is free.
    let _lock = take(&clients[0], "k", LONG).await;
}

#[tokio::test]
async fn a_period_is_not_begun_again_by_a_clock_that_goes_back() {
    let dir = TempDir::new().unwrap();
    let now = Arc::new(std::sync::atomic::AtomicI64::new(1_000_000_000_000));
    let clock = {
        let now = now.clone();
        Arc::new(move || now.load(SeqCst))
    };
    let path = dir.path().join("locks.db");
    let c = LockClient::with_sqlite(SqliteStore::open_with_clock(&path, clock).unwrap());
    let minute = Duration::from_secs(60);
    let claim = async || c.claim_period("k", minute).await.unwrap();
    let next = Duration::from_secs(20);
    assert_eq!(claim().await, Period::Claimed { next });
    now.fetch_add(19_999_999, SeqCst);
    assert!(matches!(claim().await, Period::Held { .. }));
    now.fetch_add(1, SeqCst);
    assert_eq!(claim().await, Period::Claimed { next: minute });
    now.fetch_sub(1, SeqCst);
    let next = minute + Duration::from_micros(1);
    assert!(matches!(claim().await, Period::Held { next: n, .. } if n == next));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_period_is_claimed_though_its_reply_was_lost_and_never_goes_back() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let c = LockClient::open(&proxy.url()).unwrap();
    let every = Duration::from_secs(366 * 24 * 3600);
    assert_eq!(c.holder("warm").await.unwrap(), None);
    proxy.set(Fault::LoseReply("*4\r\n:1"));
    let claimed = c.claim_period("k", every).await.unwrap();
    assert!(matches!(claimed, Period::Claimed { .. }), "{claimed:?}");
    assert_eq!(proxy.struck(), 1);
    let again = c.claim_period("k", every).await.unwrap();
    assert!(matches!(again, Period::Held { .. }), "{again:?}");
    // A period that was claimed when the server's clock was ahead.
    let ahead = soloist::clock::wall_us() / 1000 + 3_600_000;
    let key = "soloist:{k}:period:1000";
    server.command::<()>(&["SET", key, &format!("{ahead} x#y.0"), "EX", "9999"]);
    let next = c.claim_period("k", Duration::from_secs(1)).await.unwrap();
    assert!(
        matches!(&next, Period::Held { holder, next } if holder == "x" && *next > Duration::from_secs(3000)),
        "{next:?}"
    );
}

fn elector(bed: &Bed) -> Elector {
    Elector::open(&bed.url(), "invoices", 500 * MS).unwrap()
}

/// A planned instant that is due now. The elector knows its store before: what was planned earlier would count as lost.
async fn due_now(e: &Elector) -> i64 {
    if let Election::Won(term) = elect(e, 1).await {
        assert!(term.settle(Outcome::Succeeded).await.unwrap());
    }
    soloist::clock::wall_us() / 1000
}

/// Asks until the answer is another one than to wait.
async fn elect(e: &Elector, at: i64) -> Election {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < GENEROUS, "no decision");
        match e.claim(at).await {
            Ok(Election::Early { wait } | Election::Quarantined { wait }) => {
                tokio::time::sleep(wait).await
            }
            // On a busy host an answer may take longer than a lease. The same claim is asked again.
            Err(e) if e.is_transient() => {}
            decided => return decided.unwrap(),
        }
    }
}

async fn an_elector_grants_each_occurrence_once(bed: Bed) {
    let electors: Vec<_> = (0..3).map(|_| elector(&bed)).collect();
    let first = due_now(&electors[0]).await;
    let mut last = 0;
    for at in (first..).step_by(5).take(10) {
        let (a, b, c) = tokio::join!(
            elect(&electors[0], at),
            elect(&electors[1], at),
            elect(&electors[2], at)
        );
        let mut won = vec![];
        for e in [a, b, c] {
            match e {
                Election::Won(term) => won.push(term),
                Election::Lost { .. } | Election::Settled => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(won.len(), 1, "{at}");
        let term = won.remove(0);
        assert_eq!((term.occurrence(), term.attempt()), (at, 1));
        assert!(term.fencing_token().0 > last && term.is_held());
        last = term.fencing_token().0;
        assert!(term.settle(Outcome::Succeeded).await.unwrap());
        // An elector whose clock is behind comes when the term is over.
        for e in &electors {
            assert!(matches!(elect(e, at).await, Election::Settled));
            assert!(matches!(elect(e, at - 1).await, Election::Settled));
        }
    }
}

async fn an_elector_takes_over_from_the_dead(bed: Bed) {
    let (a, b) = (elector(&bed), elector(&bed).rerun(2));
    let at = due_now(&a).await;
    let Election::Won(dead) = elect(&a, at).await else {
        panic!("nobody else is there");
    };
    let token = dead.fencing_token();
    let over = dead.over();
    let begun = Instant::now();
    let term = loop {
        match elect(&b, at).await {
            Election::Lost { ask_again, .. } => tokio::time::sleep(ask_again).await,
            Election::Won(term) => break term,
            other => panic!("{other:?}"),
        }
        assert!(begun.elapsed() < GENEROUS);
    };
    assert!(!dead.is_held(), "two trust it");
    within(over).await;
    assert_eq!(term.attempt(), 2);
    assert!(term.fencing_token() > token);
    assert!(!dead.renew().await.unwrap());
    assert!(!dead.settle(Outcome::Succeeded).await.unwrap());
    assert!(term.settle(Outcome::Succeeded).await.unwrap());
}

async fn a_term_is_renewed_until_it_is_settled(bed: Bed) {
    let open = || Elector::open(&bed.url(), "invoices", 3000 * MS).unwrap();
    let (a, b) = (open(), open().rerun(2));
    let at = due_now(&a).await;
    let Election::Won(term) = elect(&a, at).await else {
        panic!("nobody else is there");
    };
    let over = term.over();
    tokio::pin!(over);
    assert!(term.renew().await.unwrap());
    term.keep_renewed();
    let begun = Instant::now();
    while begun.elapsed() < 3500 * MS {
        assert!(term.is_held() && futures_util::poll!(&mut over).is_pending());
        assert!(matches!(elect(&b, at).await, Election::Lost { .. }));
        tokio::time::sleep(20 * MS).await;
    }
    assert!(term.settle(Outcome::Failed).await.unwrap());
    within(over).await;
    assert!(matches!(elect(&b, at).await, Election::Settled));
    // A dropped term is renewed no more.
    let long = Elector::open(&bed.url(), "invoices", 3000 * MS).unwrap();
    let at = due_now(&long).await;
    let Election::Won(term) = elect(&long, at).await else {
        panic!("nobody else is there");
    };
    term.keep_renewed();
    drop(term);
    let begun = Instant::now();
    while !matches!(elect(&b, at).await, Election::Won(_)) {
        assert!(begun.elapsed() < GENEROUS);
        tokio::time::sleep(20 * MS).await;
    }
}

/// How often the server was sent a command.
fn calls(server: &RedisServer, command: &str) -> u64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let line = format!("cmdstat_{command}:calls=");
    stats
        .lines()
        .find_map(|l| l.strip_prefix(&line)?.split(',').next()?.parse().ok())
        .unwrap_or(0)
}

fn subscribers(server: &RedisServer, key: &str) -> i64 {
    let channel = format!("soloist:{{{key}}}:released");
    let (_, n): (String, i64) = server.command(&["PUBSUB", "NUMSUB", &channel]);
    n
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_sends_nothing_while_it_waits() {
    let bed = Bed::redis();
    let server = bed.server();
    let (a, b) = (bed.client(), bed.client());
    let lock = take(&a, "k", LONG).await;
    let waiters: Vec<_> = (0..10)
        .map(|_| {
            let b = b.clone();
            tokio::spawn(async move {
                let lock = acquired(b.lock("k", LONG, LONG).await.unwrap());
                lock.release().await.unwrap();
            })
        })
        .collect();
    until("it has subscribed", || subscribers(server, "k") == 1).await;
    // The first try, one after the subscription, and the holder's own; one more for a script the server did not know.
    until("the first waiter has asked", || {
        calls(server, "evalsha") >= 4
    })
    .await;
    let before = calls(server, "evalsha");
    assert_eq!(before, 4);
    let all = |name: &str| -> u64 {
        let stats: String = server.command(&["INFO", "stats"]);
        stats
            .lines()
            .find_map(|l| l.strip_prefix(name)?.parse().ok())
            .unwrap()
    };
    let total = all("total_commands_processed:");
    // In this time a poller would have asked; our own look is one command.
    tokio::time::sleep(500 * MS).await;
    assert_eq!(all("total_commands_processed:") - total, 1);
    lock.release().await.unwrap();
    for w in waiters {
        within(w).await.unwrap();
    }
    // Each of the ten asked once after its turn came, and released: none asked in vain.
    assert_eq!(calls(server, "evalsha") - before, 1 + 1 + 10 + 10);
    until("nobody listens", || subscribers(server, "k") == 0).await;
}

/// Two clients wait and both are woken. The one that loses is woken again, also by the release of a lock that was
/// renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_loses_to_another_waiter_is_woken_again() {
    let bed = Bed::redis();
    let server = bed.server();
    let (a, b, c) = (bed.client(), bed.client(), bed.client());
    let lock = take(&a, "k", LONG).await;
    let (first, second) = (waiting(&b, "k"), waiting(&c, "k"));
    until("both wait", || subscribers(server, "k") == 2).await;
    lock.renew().await.unwrap();
    lock.release().await.unwrap();
    let (winner, loser) = match within(futures_util::future::select(first, second)).await {
        Either::Left((lock, other)) | Either::Right((lock, other)) => (lock.unwrap(), other),
    };
    winner.renew().await.unwrap();
    winner.release().await.unwrap();
    within(loser).await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_singleflight_waiter_never_asks_while_its_own_client_has_the_lock() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    let lease = Duration::from_secs(3);
    let lock = acquired(c.singleflight_lock("k", LONG, lease).await.unwrap());
    lock.keep_renewed();
    let waiter = {
        let c = c.clone();
        tokio::spawn(async move { acquired(c.singleflight_lock("k", LONG, lease).await.unwrap()) })
    };
    // Longer than the lease: a waiter that competes in the store asks again when the holder's remaining time has
    // passed.
    let begun = Instant::now();
    while begun.elapsed() < lease * 3 / 2 {
        assert!(lock.is_held() && !waiter.is_finished());
        tokio::time::sleep(10 * MS).await;
    }
    lock.release().await.unwrap();
    within(waiter).await.unwrap().release().await.unwrap();
    // Each script reads and then writes once, unless it refuses.
    let writes = ["set", "setrange", "pexpire"].map(|name| calls(server, name));
    assert_eq!(calls(server, "get"), writes.iter().sum::<u64>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_tasks_on_one_key_try_once_for_each_win() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    let tasks: Vec<_> = (0..64)
        .map(|_| {
            let c = c.clone();
            tokio::spawn(async move {
                for _ in 0..10 {
                    let lock = acquired(c.lock("k", LONG, LONG).await.unwrap());
                    lock.release().await.unwrap();
                }
            })
        })
        .collect();
    for t in tasks {
        within(t).await.unwrap();
    }
    // Of its own releases a client knows without the server.
    assert_eq!(calls(server, "subscribe"), 0);
    // Only a try that finds the lock held asks for the remaining time (PTTL).
    let in_vain = calls(server, "pttl") as f64 / 640.0;
    assert!(in_vain <= 0.1, "{in_vain} tries in vain for each win");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_survives_the_loss_of_its_subscription() {
    let bed = Bed::redis();
    let server = bed.server();
    let (a, b) = (bed.client(), bed.client());
    let lock = take(&a, "k", LONG).await;
    let waiter = waiting(&b, "k");
    until("it has subscribed", || subscribers(server, "k") == 1).await;
    let killed: i64 = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    assert_eq!(killed, 1);
    // Nobody receives the message of this release.
    lock.release().await.unwrap();
    let got = within(waiter).await.unwrap();
    // And again, with the release after the new subscription.
    let waiter = waiting(&a, "k");
    until("it has subscribed", || subscribers(server, "k") == 1).await;
    let _: i64 = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    until("it has subscribed again", || subscribers(server, "k") == 1).await;
    got.release().await.unwrap();
    let _got = within(waiter).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_script_cache_is_filled_again() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    let lock = take(&c, "k", LONG).await;
    server.command::<()>(&["SCRIPT", "FLUSH"]);
    lock.renew().await.unwrap();
    server.command::<()>(&["SCRIPT", "FLUSH"]);
    assert_eq!(lock.release().await.unwrap(), Released::Now);
    server.command::<()>(&["SCRIPT", "FLUSH"]);
    let _lock = take(&c, "k", LONG).await;
}

/// As if the server's clock had been stepped past the lease. A renewal does not create the lock anew, and a release
/// changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lapsed_by_the_servers_clock_is_not_revived() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    let week = (7 * 24 * 3600 * 1000).to_string();
    let lapse = |key: &str| {
        server.command::<()>(&["PEXPIRE", &format!("soloist:{{{key}}}:lock"), &week]);
    };
    let (first, second) = (take(&c, "a", LONG).await, take(&c, "b", LONG).await);
    let third = take(&c, "d", LONG).await;
    let levels = c.reentrant("c", LONG).unwrap();
    assert!(matches!(
        levels.try_enter(NoRetry).await.unwrap(),
        TryEnter::Acquired { .. }
    ));
    for key in ["a", "b", "c", "d"] {
        lapse(key);
    }
    // Nobody has had it since: as good as held.
    assert_eq!(second.release().await.unwrap(), Released::Now);
    // Another owner has held it since, and has released it too.
    let next = take(&c, "d", LONG).await;
    next.release().await.unwrap();
    for e in [
        first.renew().await.unwrap_err(),
        third.release().await.unwrap_err(),
        levels.renew().await.unwrap_err(),
    ] {
        assert!(matches!(e, Error::NotHeld { holder: None, .. }), "{e}");
    }
    assert_eq!(levels.leave().await.unwrap(), ReleasedLevel::NotHeld);
    for key in ["a", "b", "c", "d"] {
        assert_eq!(c.holder(key).await.unwrap(), None);
        // A key that had a lock of another kind is free for any caller.
        assert!(take(&c, key, LONG).await.fencing_token() > first.fencing_token());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_is_a_loss_and_tokens_grow_over_it() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    let lock = take(&c, "k", LONG).await;
    server.flush();
    // The lock is not created anew: that would hide the loss.
    let e = lock.renew().await.unwrap_err();
    assert!(matches!(e, Error::NotHeld { holder: None, .. }), "{e}");
    assert!(!lock.is_held());
    within(lock.lost()).await;
    assert_eq!(c.holder("k").await.unwrap(), None);
    let next = take(&c, "k", LONG).await;
    assert!(next.fencing_token() > lock.fencing_token());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_another_type_is_refused_and_left_alone() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    let key = "soloist:{k}:lock";
    server.command::<()>(&["LPUSH", key, "theirs"]);
    for e in [
        c.try_lock("k", LONG, NoRetry).await.unwrap_err(),
        c.lock("k", LONG, LONG).await.unwrap_err(),
        c.holder("k").await.unwrap_err(),
    ] {
        assert!(matches!(e, Error::WrongType { .. }), "{e}");
    }
    let there: Vec<String> = server.command(&["LRANGE", key, "0", "-1"]);
    assert_eq!(there, ["theirs"]);
    // A key without an expiry, set by hand.
    for text in [
        "maintenance: ask ~ann",
        "maintenance, ask ~ann",
        "0123456789abcdef~",
    ] {
        server.command::<()>(&["SET", "soloist:{h}:lock", text]);
        assert_eq!(c.holder("h").await.unwrap().unwrap().name, text);
        let TryLock::Held { holder, .. } = c.try_lock("h", LONG, NoRetry).await.unwrap() else {
            panic!("{text} was taken over");
        };
        assert_eq!(holder, text);
    }
    server.command::<()>(&["SET", "soloist:{h}:lock", "by hand"]);
    let TryLock::Held { holder, remaining } = c.lock("h", 20 * MS, LONG).await.unwrap() else {
        panic!("it was taken over");
    };
    assert_eq!((&*holder, remaining), ("by hand", Duration::MAX));
}

/// They are the server's time, or one more than the last one if that is greater.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_the_servers_time_and_grow_although_its_clock_stands_or_goes_back() {
    const BEGIN: i64 = 1_800_000_000_000_000;
    let server = RedisServer::start_with_own_clock();
    let c = LockClient::open(&server.url()).unwrap();
    // The server writes 5 us as "5".
    for (us, expected) in [
        (5, 5),
        (7_000_000, 7_000_000),
        (6_000_000, 7_000_001),
        (-3_600_000_000, 7_000_002),
        (8_123_456, 8_123_456),
    ] {
        server.stop_clock(BEGIN + us);
        let lock = acquired(c.try_lock("plain", LONG, NoRetry).await.unwrap());
        assert_eq!(lock.fencing_token().0, BEGIN + expected);
        lock.release().await.unwrap();
    }
    // A clock that goes back prolongs what its owner has left.
    let levels = c.reentrant("levels", LONG).unwrap();
    for (us, expected) in [(9_000_005, 9_000_005), (9_000_005, 9_000_006)] {
        server.stop_clock(BEGIN + us);
        let TryEnter::Acquired { token, .. } = levels.try_enter(NoRetry).await.unwrap() else {
            panic!("nobody has it");
        };
        assert_eq!(token.0, BEGIN + expected);
        assert_eq!(levels.leave().await.unwrap(), ReleasedLevel::Released);
    }
}

/// Time does not help against an answer that says what is wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_for_what_becomes_no_lock_is_told_so_at_once() {
    let bed = Bed::redis();
    let server = bed.server();
    let (a, b) = (bed.client(), bed.client());
    let _lock = take(&a, "k", 2000 * MS).await;
    let waiter = tokio::spawn(async move { b.lock("k", LONG, LONG).await });
    until("it waits", || subscribers(server, "k") == 1).await;
    let key = "soloist:{k}:lock";
    // In one step: between two the waiter may take it.
    let script = "redis.call('DEL', KEYS[1]); redis.call('RPUSH', KEYS[1], 'a list')";
    server.command::<()>(&["EVAL", script, "1", key]);
    let told = within(waiter).await.unwrap();
    assert!(matches!(told, Err(Error::WrongType { .. })), "{told:?}");
}

/// It is not ours any more, and stays as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_was_overwritten_by_hand_is_lost_and_left_alone() {
    let bed = Bed::redis();
    let server = bed.server();
    let (c, key) = (bed.client(), "soloist:{k}:lock");
    let by_hand = "maintenance, ask ~ann";
    let overwrite = || server.command::<()>(&["SET", key, by_hand]);
    let left = || {
        assert_eq!(server.command::<String>(&["GET", key]), by_hand);
        assert_eq!(server.command::<i64>(&["TTL", key]), -1);
        server.command::<i64>(&["DEL", key]);
    };
    let lock = take(&c, "k", LONG).await;
    overwrite();
    let e = lock.renew().await.unwrap_err();
    assert!(
        matches!(
            e,
            Error::NotHeld {
                holder: Some(_),
                ..
            }
        ),
        "{e}"
    );
    left();
    let lock = take(&c, "k", LONG).await;
    overwrite();
    let e = lock.release().await.unwrap_err();
    assert!(
        matches!(
            e,
            Error::NotHeld {
                holder: Some(_),
                ..
            }
        ),
        "{e}"
    );
    left();
    let ours = c.reentrant("k", LONG).unwrap();
    assert_eq!(levels(ours.try_enter(NoRetry).await.unwrap()), 1);
    overwrite();
    let said = ours.leave().await.unwrap();
    assert!(matches!(said, ReleasedLevel::Foreign { .. }), "{said:?}");
    left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reply_is_asked_again_with_the_same_answer() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let c = LockClient::open(&proxy.url()).unwrap();
    drop(take(&c, "warm", LONG).await);
    until_free(&c, "warm").await;
    // Only the reply to the try has the digits of the token.
    proxy.set(Fault::LoseReply("$16"));
    let lock = take(&c, "k", LONG).await;
    assert_eq!(proxy.struck(), 1, "no reply was lost");
    assert_eq!(proxy.fault(), Fault::None);
    assert!(lock.is_held());
    lock.renew().await.unwrap();
    // The renewals have their own connection: it is there.
    proxy.set(Fault::LoseReply(":1\r\n"));
    lock.renew().await.unwrap();
    assert_eq!(proxy.struck(), 2, "no reply was lost");
    proxy.set(Fault::LoseReply(":1\r\n"));
    assert_eq!(lock.release().await.unwrap(), Released::Before);
    assert_eq!(proxy.struck(), 3);
    assert_eq!(c.holder("k").await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_comes_too_late_is_given_back() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let mut config = Store::from_url(&proxy.url()).unwrap();
    config.timeout = Duration::from_secs(5);
    let c = LockClient::with_config(&config).unwrap();
    drop(take(&c, "warm", LONG).await);
    until_free(&c, "warm").await;
    let direct = LockClient::open(&format!("redis://127.0.0.1:{}", server.port())).unwrap();
    proxy.set(Fault::DelayReplies(300 * MS));
    // Its trust ends after 223 ms, its lease is over after 300 ms.
    let e = c.try_lock("k", 300 * MS, NoRetry).await.unwrap_err();
    assert!(matches!(e, Error::TooLate { .. }), "{e}");
    proxy.set(Fault::None);
    until_free(&direct, "k").await;
    let _next = take(&direct, "k", LONG).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_without_an_answer_is_an_error_and_leaves_nothing() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let mut config = Store::from_url(&proxy.url()).unwrap();
    config.timeout = 500 * MS;
    config.retry.attempts = 1;
    let c = LockClient::with_config(&config).unwrap();
    drop(take(&c, "warm", LONG).await);
    until_free(&c, "warm").await;
    let direct = LockClient::open(&format!("redis://127.0.0.1:{}", server.port())).unwrap();
    proxy.set(Fault::BlackHoleDown);
    let e = within(c.try_lock("k", LONG, NoRetry)).await.unwrap_err();
    assert!(matches!(e, Error::Unreachable { .. }), "{e}");
    proxy.set(Fault::None);
    // What it may have been granted is released long before the lease is over.
    until_free(&direct, "k").await;
    // A request that the server has not seen may still arrive, and then finds that its lock is over.
    proxy.set(Fault::BlackHoleUp);
    let e = within(c.try_lock("late", LONG, NoRetry)).await.unwrap_err();
    assert!(matches!(e, Error::Unreachable { .. }), "{e}");
    proxy.set(Fault::None);
    until("its end is noted", || {
        let noted: Option<String> = server.command(&["GET", "soloist:{late}:lock"]);
        noted.is_some_and(|lock| lock.contains('~'))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_survives_a_server_that_is_away_for_less_than_the_lease() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let c = LockClient::open(&proxy.url()).unwrap();
    let lease = Duration::from_secs(9);
    let lock = take(&c, "k", lease).await;
    lock.keep_renewed();
    let begun = Instant::now();
    for fault in [Fault::Refuse, Fault::Reset, Fault::BlackHoleDown] {
        proxy.set(fault);
        tokio::time::sleep(lease / 3).await;
        proxy.set(Fault::None);
        let was = lock.remaining();
        until("it is renewed", || {
            assert!(lock.is_held());
            lock.remaining() > was
        })
        .await;
    }
    assert!(begun.elapsed() >= lease, "nothing was shown");
    assert_eq!(lock.release().await.unwrap(), Released::Now);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_lost_before_another_can_have_it_when_the_server_is_away_for_longer() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let c = LockClient::open(&proxy.url()).unwrap();
    let direct = LockClient::open(&format!("redis://127.0.0.1:{}", server.port())).unwrap();
    for fault in [
        Fault::Refuse,
        Fault::BlackHoleUp,
        Fault::BlackHoleDown,
        Fault::Stall,
    ] {
        let lock = take(&c, "k", 600 * MS).await;
        lock.keep_renewed();
        proxy.set(fault.clone());
        let other = {
            let direct = direct.clone();
            tokio::spawn(async move { acquired(direct.lock("k", LONG, LONG).await.unwrap()) })
        };
        within(lock.lost()).await;
        assert!(!other.is_finished(), "{fault:?}: two had it");
        let other = within(other).await.unwrap();
        proxy.set(Fault::None);
        // Late renewals and releases change nothing for its successor.
        assert!(lock.release().await.is_err());
        other.renew().await.unwrap();
        other.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_waits_for_its_server_too() {
    let mut server = RedisServer::start();
    let (a, b) = (
        LockClient::open(&server.url()).unwrap(),
        LockClient::open(&server.url()).unwrap(),
    );
    let _lock = take(&a, "k", LONG).await;
    let waiter = waiting(&b, "k");
    until("it has subscribed", || subscribers(&server, "k") == 1).await;
    server.restart_empty();
    let got = within(waiter).await.unwrap();
    assert!(got.is_held());
    server.kill();
    // The wait ends when its time is over.
    let e = within(b.lock("other", 300 * MS, LONG)).await.unwrap_err();
    assert!(matches!(e, Error::Unreachable { .. }), "{e}");
    drop(got);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_server_grants_nothing_but_renews_and_frees() {
    let bed = Bed::redis();
    let server = bed.server();
    let mut config = Store::from_url(&bed.url()).unwrap();
    config.retry.attempts = 0;
    let (a, b) = (LockClient::with_config(&config).unwrap(), bed.client());
    let (lock, short) = (take(&a, "k", LONG).await, take(&a, "s", LONG).await);
    let plain = take(&a, "p", LONG).await;
    let levels = a.reentrant("l", LONG).unwrap();
    let entered = async || match levels.try_enter(NoRetry).await.unwrap() {
        TryEnter::Acquired { levels, .. } => levels,
        held => panic!("{held:?}"),
    };
    assert_eq!(entered().await, 1);
    server.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let e = a.try_lock("new", LONG, NoRetry).await.unwrap_err();
    assert!(e.to_string().contains("the server is full"), "{e}");
    lock.renew().await.unwrap();
    assert_eq!(entered().await, 2);
    assert_eq!(
        levels.leave().await.unwrap(),
        ReleasedLevel::StillHeld { levels: 1 }
    );
    levels.renew().await.unwrap();
    assert_eq!(levels.leave().await.unwrap(), ReleasedLevel::Released);
    short.lock_at_least_for(LONG);
    assert_eq!(short.release().await.unwrap(), Released::Now);
    // Also alone in its call, where the release is the first write of its script.
    assert_eq!(plain.release().await.unwrap(), Released::Now);
    assert_eq!(b.holder("p").await.unwrap(), None);
    // A waiter is woken.
    let waiter = waiting(&b, "k");
    until("it has subscribed", || subscribers(server, "k") == 1).await;
    server.command::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(lock.release().await.unwrap(), Released::Now);
    within(waiter).await.unwrap().release().await.unwrap();
    assert!(b.holder("s").await.unwrap().is_some());
}

/// Asks for the locks `first-0`, `first-1` and so on at one time.
async fn take_together(c: &LockClient, first: &str, n: usize) -> Vec<Result<TryLock, Error>> {
    let asks = (0..n).map(|i| {
        let (c, key) = (c.clone(), format!("{first}-{i}"));
        async move { c.try_lock(&key, LONG, NoRetry).await }
    });
    within(join_all(asks)).await
}

#[tokio::test]
async fn locks_that_are_asked_for_at_one_time_travel_together() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    // Loads both scripts.
    drop(take_together(&c, "warm", 9).await);
    until_free(&c, "warm-8").await;
    let before = calls(server, "evalsha");
    let locks: Vec<Lock> = take_together(&c, "k", 200)
        .await
        .into_iter()
        .map(|t| acquired(t.unwrap()))
        .collect();
    let tokens: HashSet<_> = locks.iter().map(Lock::owner).collect();
    assert_eq!(tokens.len(), 200, "each has an owner of its own");
    // Two travel alone, the others in groups of up to sixty-four, which came in while calls were under way.
    let asked = calls(server, "evalsha") - before;
    assert!(asked <= 20, "{asked} calls");
    for (i, lock) in locks.iter().enumerate() {
        let holder = c.holder(&format!("k-{i}")).await.unwrap().unwrap();
        assert!(lock.owner().starts_with(&holder.name));
    }
    let before = calls(server, "evalsha");
    for released in within(join_all(locks.iter().map(Lock::release))).await {
        assert_eq!(released.unwrap(), Released::Now);
    }
    let asked = calls(server, "evalsha") - before;
    assert!(asked <= 20, "{asked} calls");
    for t in take_together(&c, "k", 200).await {
        assert!(acquired(t.unwrap()).fencing_token() > locks[0].fencing_token());
    }
}

/// Three callers ask for each of ten locks at one time; returns what they got.
async fn take_thrice(c: &LockClient, lease: fn(usize) -> Duration) -> Vec<Lock> {
    let asks = (0..30).map(|i| {
        let (c, key) = (c.clone(), format!("k-{}", i / 3));
        async move { c.try_lock(&key, lease(i / 3), NoRetry).await }
    });
    let mut locks: Vec<Option<Lock>> = (0..10).map(|_| None).collect();
    for (i, answer) in within(join_all(asks)).await.into_iter().enumerate() {
        if let TryLock::Acquired(lock) = answer.unwrap() {
            assert!(locks[i / 3].replace(lock).is_none(), "two have k-{}", i / 3);
        }
    }
    locks.into_iter().map(Option::unwrap).collect()
}

#[tokio::test]
async fn each_that_travels_with_others_has_its_own_key_and_lease() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    drop(take_together(&c, "warm", 9).await);
    until_free(&c, "warm-8").await;
    let before = calls(server, "mget");
    let lease = |i: usize| LONG * (1 + i as u32 % 2);
    // Nobody has held them.
    let locks = take_thrice(&c, lease).await;
    assert!(calls(server, "mget") > before, "they traveled together");
    for released in within(join_all(locks.iter().map(Lock::release))).await {
        assert_eq!(released.unwrap(), Released::Now);
    }
    // Somebody has held them.
    let locks = take_thrice(&c, lease).await;
    for (i, lock) in locks.iter().enumerate() {
        let holder = c.holder(&format!("k-{i}")).await.unwrap().unwrap();
        assert!(lock.is_held());
        assert!(holder.remaining > lease(i) - LONG && holder.remaining <= lease(i));
    }
    // If two want a lock that is just being released, one of them gets it.
    let (released, again) = within(join(
        join_all(locks.iter().map(Lock::release)),
        take_together(&c, "k", 10),
    ))
    .await;
    for (i, (released, again)) in released.into_iter().zip(again).enumerate() {
        assert_eq!(released.unwrap(), Released::Now);
        let holder = c.holder(&format!("k-{i}")).await.unwrap();
        match again.unwrap() {
            TryLock::Acquired(lock) => assert!(lock.owner().starts_with(&holder.unwrap().name)),
            TryLock::Held { .. } => assert!(holder.is_none()),
        }
    }
}

#[tokio::test]
async fn what_is_wrong_with_one_lock_is_not_the_business_of_those_that_travel_with_it() {
    let bed = Bed::redis();
    let server = bed.server();
    let (c, other) = (bed.client(), bed.client().named("other"));
    server.command::<()>(&["LPUSH", "soloist:{k-10}:lock", "theirs"]);
    server.command::<()>(&["SET", "soloist:{k-11}:lock", "by hand"]);
    let levels = other.reentrant("k-12", LONG).unwrap();
    assert!(matches!(
        levels.try_enter(NoRetry).await.unwrap(),
        TryEnter::Acquired { .. }
    ));
    let _held = take(&other, "k-13", LONG).await;
    for (i, answer) in take_together(&c, "k", 30).await.into_iter().enumerate() {
        match (i, answer) {
            (10 | 12, Err(Error::WrongType { .. })) => {}
            (11, Ok(TryLock::Held { holder, .. })) => assert_eq!(holder, "by hand"),
            (13, Ok(TryLock::Held { holder, .. })) => assert_eq!(holder, "other"),
            (10..14, answer) => panic!("{i}: {answer:?}"),
            (_, answer) => drop(acquired(answer.unwrap())),
        }
    }
    // Nor of locks that are released.
    let ours = take_together(&c, "ours", 30).await;
    let ours: Vec<_> = ours.into_iter().map(|t| acquired(t.unwrap())).collect();
    let (released, bad) = within(join(
        join_all(ours.iter().map(Lock::release)),
        join_all((0..30).map(|_| c.try_lock("k-10", LONG, NoRetry))),
    ))
    .await;
    for released in released {
        assert_eq!(released.unwrap(), Released::Now);
    }
    for bad in bad {
        assert!(matches!(bad, Err(Error::WrongType { .. })));
    }
}

/// `min_replicas` and `lock_at_least_for` count for requests that are made together, too.
#[tokio::test]
async fn replicas_and_what_is_kept_count_among_many_too() {
    let bed = Bed::redis();
    let c = bed.client();
    let locks = take_together(&c, "k", 30).await.into_iter();
    let locks: Vec<_> = locks.map(|t| acquired(t.unwrap())).collect();
    locks.iter().for_each(|lock| lock.lock_at_least_for(LONG));
    for released in within(join_all(locks.iter().map(Lock::release))).await {
        assert_eq!(released.unwrap(), Released::Now);
    }
    for i in 0..30 {
        assert!(c.holder(&format!("k-{i}")).await.unwrap().is_some(), "{i}");
    }
    let mut config = Store::from_url(&bed.url()).unwrap();
    (config.min_replicas, config.retry.attempts) = (1, 0);
    let alone = LockClient::with_config(&config).unwrap();
    for answer in take_together(&alone, "r", 12).await {
        assert!(answer.is_err(), "{answer:?}");
    }
}

/// A user of the server may be allowed some keys only; and a cluster takes keys of one node only.
#[tokio::test]
async fn what_the_server_does_not_take_together_is_asked_for_alone() {
    let server = RedisServer::start();
    server.command::<()>(&[
        "ACL",
        "SETUSER",
        "some",
        "on",
        ">secret",
        "resetkeys",
        "~soloist:{k-1*",
        "&*",
        "+@all",
    ]);
    let url = format!("redis://some:secret@127.0.0.1:{}", server.port());
    let c = LockClient::open(&url).unwrap();
    for (i, answer) in take_together(&c, "k", 30).await.into_iter().enumerate() {
        match answer {
            Ok(t) => assert!(acquired(t).is_held() && i.to_string().starts_with('1')),
            Err(Error::Refused { reason, .. }) => {
                assert!(!i.to_string().starts_with('1'), "{i}: {reason}");
            }
            Err(e) => panic!("{i}: {e}"),
        }
    }
}

/// Drops the release while it is under way, as a `timeout` or `select!` around it would.
async fn a_release_that_is_dropped_goes_on(bed: Bed) {
    let c = bed.client();
    for fair in [false, true] {
        let lock = match fair {
            true => acquired(c.singleflight_lock("k", LONG, LONG).await.unwrap()),
            false => take(&c, "k", LONG).await,
        };
        let next = {
            let c = c.clone();
            tokio::spawn(async move {
                acquired(match fair {
                    true => c.singleflight_lock("k", LONG, LONG).await.unwrap(),
                    false => c.lock("k", LONG, LONG).await.unwrap(),
                })
            })
        };
        tokio::time::sleep(20 * MS).await;
        let mut releasing = Box::pin(lock.release());
        // The release is still pending, unless this machine is slow and the server is not.
        let _ = futures_util::poll!(&mut releasing);
        drop(releasing);
        // `lock` itself is not dropped meanwhile.
        let next = within(next).await.unwrap();
        next.release().await.unwrap();
        assert!(!lock.is_held());
    }
    let levels = c.reentrant("levels", LONG).unwrap();
    let TryEnter::Acquired { .. } = levels.enter(LONG).await.unwrap() else {
        panic!("held by another");
    };
    let next = c.reentrant("levels", LONG).unwrap();
    let entering = tokio::spawn(async move { next.enter(LONG).await.unwrap() });
    tokio::time::sleep(20 * MS).await;
    let mut leaving = Box::pin(levels.leave());
    let _ = futures_util::poll!(&mut leaving);
    drop(leaving);
    let entered = within(entering).await.unwrap();
    assert!(matches!(entered, TryEnter::Acquired { levels: 1, .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_to_enter_enters_once_though_the_answer_is_lost() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let mut config = Store::from_url(&proxy.url()).unwrap();
    config.retry.attempts = 0;
    let c = LockClient::with_config(&config).unwrap();
    let holder = take_level(&server, "k").await;
    let waiting = c.reentrant("k", LONG).unwrap();
    let entering = {
        let waiting = waiting.clone();
        tokio::spawn(async move { waiting.enter(LONG).await.unwrap() })
    };
    until("it has said that it waits", || {
        subscribers(&server, "k") == 1
    })
    .await;
    // This reply is the number of levels.
    proxy.set(Fault::LoseReply(":1\r\n"));
    assert_eq!(holder.leave().await.unwrap(), ReleasedLevel::Released);
    let entered = within(entering).await.unwrap();
    assert_eq!(proxy.struck(), 1, "no reply was lost");
    assert!(
        matches!(entered, TryEnter::Acquired { levels: 1, .. }),
        "{entered:?}"
    );
    assert_eq!(waiting.leave().await.unwrap(), ReleasedLevel::Released);
}

async fn take_level(server: &RedisServer, key: &str) -> ReentrantLock {
    let url = format!("redis://127.0.0.1:{}/0", server.port());
    let levels = LockClient::open(&url)
        .unwrap()
        .reentrant(key, LONG)
        .unwrap();
    let entered = levels.try_enter(NoRetry).await.unwrap();
    assert!(matches!(entered, TryEnter::Acquired { .. }));
    levels
}

/// The line of docs/locks.md: nothing is refused with it, and each command in it is called.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_user_may_do_what_locks_need() {
    let server = RedisServer::start();
    let line = include_str!("../../docs/locks.md")
        .lines()
        .find_map(|l| l.strip_prefix("user "))
        .expect("docs/locks.md has the line of an ACL file");
    let words: Vec<&str> = ["ACL", "SETUSER"]
        .into_iter()
        .chain(line.split(' '))
        .collect();
    server.command::<()>(&words);
    let url = |who: &str| format!("redis://{who}@127.0.0.1:{}", server.port());
    let mut config = Store::from_url(&url("locks:CHANGE-ME")).unwrap();
    config.min_replicas = 1;
    let replicated = LockClient::with_config(&config).unwrap();
    let e = replicated.try_lock("r", LONG, NoRetry).await.unwrap_err();
    assert!(matches!(e, Error::NotReplicated { have: 0, .. }), "{e}");

    let client = || LockClient::open(&url("locks:CHANGE-ME")).unwrap();
    let (a, b) = (client(), client());
    let lock = take(&a, "k", LONG).await;
    lock.renew().await.unwrap();
    assert!(b.holder("k").await.unwrap().is_some());
    let waiter = waiting(&b, "k");
    let listens = || {
        let channel = "soloist:{k}:released";
        let (_, n): (String, i64) = server.command(&["PUBSUB", "NUMSUB", channel]);
        n
    };
    until("it listens", || listens() == 1).await;
    lock.lock_at_least_for(MS);
    lock.release().await.unwrap();
    within(waiter).await.unwrap().release().await.unwrap();
    until("nobody listens", || listens() == 0).await;
    let levels = a.reentrant("levels", LONG).unwrap();
    for _ in 0..2 {
        assert!(matches!(
            levels.enter(LONG).await.unwrap(),
            TryEnter::Acquired { .. }
        ));
    }
    levels.renew().await.unwrap();
    for _ in 0..2 {
        let _ = levels.leave().await.unwrap();
    }
    let _ = a.claim_period("k", LONG).await.unwrap();
    drop(take_together(&a, "many", 9).await);

    let denied: Vec<Vec<::redis::Value>> = server.command(&["ACL", "LOG"]);
    let denied: Vec<String> = denied
        .iter()
        .map(|entry| format!("{entry:?}"))
        // redis-rs introduces itself; a refusal of that is nothing.
        .filter(|entry| !entry.contains("client|setinfo"))
        .collect();
    assert_eq!(denied, Vec::<String>::new(), "the page allows too little");
    let stats: String = server.command(&["INFO", "commandstats"]);
    for word in line.split(" +").skip(1) {
        assert!(
            stats.contains(&format!("cmdstat_{word}:")),
            "{word} is allowed for nothing"
        );
    }
    // A client with a wrong password is told what to do.
    let c = LockClient::open(&url("locks:wrong")).unwrap();
    let e = c.try_lock("k", LONG, NoRetry).await.unwrap_err();
    assert!(matches!(e, Error::Refused { .. }), "{e}");
    assert!(!e.to_string().contains("wrong"), "{e}");
}

#[test]
fn a_url_that_cannot_be_used_says_why() {
    for (url, why) in [
        ("reds://h", "did you mean `redis:`?"),
        ("memory:", "`memory:` has no locks"),
        ("sqlite:/nowhere/at/all.db", "does not exist"),
        ("redis://h:0/0", "not a valid URL of the kind `redis:`"),
    ] {
        let e = LockClient::open(url).unwrap_err();
        assert!(matches!(e, Error::InvalidUrl { .. }));
        assert!(e.to_string().contains(why), "{e}");
    }
}

const ROLE: &str = "SOLOIST_TEST_LOCK_COUNTER";
const PROCESSES: usize = 4;
const TASKS: usize = 8;

/// Adds one to the number in the file, in a way that another process at the same time would undo.
fn add_one(path: &Path) {
    let n: u64 = std::fs::read_to_string(path).unwrap().parse().unwrap();
    std::fs::write(path, (n + 1).to_string()).unwrap();
}

/// One process: eight tasks, `rounds` each.
fn count(url: &str, file: &Path, rounds: usize) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let c = LockClient::open(url).unwrap();
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let (c, file) = (c.clone(), file.to_owned());
                tokio::spawn(async move {
                    for _ in 0..rounds {
                        let lock = match task % 2 {
                            0 => c.lock("counter", LONG, LONG).await,
                            _ => c.singleflight_lock("counter", LONG, LONG).await,
                        };
                        let lock = acquired(lock.unwrap());
                        add_one(&file);
                        lock.release().await.unwrap();
                    }
                })
            })
            .collect();
        for t in tasks {
            t.await.unwrap();
        }
    });
}

/// The test binary again, four times; `test` is the test that calls this.
fn four_processes_count(test: &str, url: &str, rounds: usize) {
    if let Ok(role) = std::env::var(ROLE) {
        let (url, file) = role.split_once(' ').unwrap();
        return count(url, Path::new(file), rounds);
    }
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("counter");
    std::fs::write(&file, "0").unwrap();
    let children: Vec<_> = (0..PROCESSES)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test])
                .env(ROLE, format!("{url} {}", file.display()))
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    for mut c in children {
        assert!(c.wait().unwrap().success());
    }
    let counted = std::fs::read_to_string(&file).unwrap();
    assert_eq!(counted, (PROCESSES * TASKS * rounds).to_string());
}

/// Of each task: 8,000 in all.
const ROUNDS: usize = 250;

#[test]
fn a_counter_of_four_processes_is_exact_over_redis() {
    let name = "locks::a_counter_of_four_processes_is_exact_over_redis";
    if std::env::var(ROLE).is_ok() {
        return four_processes_count(name, "", ROUNDS);
    }
    let server = RedisServer::start();
    four_processes_count(name, &server.url(), ROUNDS);
}

/// Each step is on the disk before it is answered, so that it takes a while: 100 for each task.
#[test]
fn a_counter_of_four_processes_is_exact_over_sqlite() {
    let name = "locks::a_counter_of_four_processes_is_exact_over_sqlite";
    if std::env::var(ROLE).is_ok() {
        return four_processes_count(name, "", 100);
    }
    let bed = Bed::sqlite();
    drop(bed.client());
    four_processes_count(name, &bed.url(), 100);
}
