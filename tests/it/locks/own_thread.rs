//! A client works on a thread of its own: nothing of it depends on the runtime of its caller.

use std::{
    pin::Pin,
    sync::mpsc,
    task::{Context, Poll, Wake, Waker},
    thread::JoinHandle,
};

use super::*;

fn both(test: impl Fn(&Bed)) {
    for bed in [Bed::sqlite(), Bed::redis()] {
        test(&bed);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// A client without retries: an error that a retry would repair shows.
fn once(bed: &Bed) -> LockClient {
    let mut config = Store::from_url(&bed.url()).unwrap();
    config.retry.attempts = 0;
    LockClient::with_config(&config).unwrap()
}

#[test]
fn a_client_serves_several_runtimes_in_turn() {
    both(|bed| {
        let c = once(bed);
        let levels = c.reentrant("l", LONG).unwrap();
        let mut kept = None;
        for round in 0..6 {
            let lock = runtime().block_on(async {
                let lock = kept.take();
                if let Some(lock) = &lock {
                    let lock: &Lock = lock;
                    lock.renew().await.unwrap();
                    levels.renew().await.unwrap();
                    lock.release().await.unwrap();
                }
                assert_eq!(
                    super::levels(levels.try_enter(NoRetry).await.unwrap()),
                    round + 1
                );
                take(&c, "k", LONG).await
            });
            assert!(lock.is_held());
            kept = Some(lock);
        }
    });
}

/// Also with other threads of the runtime idle.
#[test]
fn what_is_kept_renewed_survives_a_taker_that_blocks_its_thread() {
    let test = |bed: Bed, runtime: tokio::runtime::Runtime| {
        let (url, c) = (bed.url(), bed.client());
        let work = async move {
            let lease = Duration::from_secs(5);
            let elector = Elector::open(&url, "invoices", lease).unwrap();
            let at = due_now(&elector).await;
            let Election::Won(term) = elect(&elector, at).await else {
                panic!("nobody else is there");
            };
            term.keep_renewed();
            let lock = take(&c, "k", lease).await;
            lock.keep_renewed();
            let reentrant = c.reentrant("l", lease).unwrap();
            let _ = reentrant.try_enter(NoRetry).await.unwrap();
            reentrant.keep_renewed();
            std::thread::sleep(lease + Duration::from_secs(1));
            assert!(lock.is_held() && reentrant.is_held() && term.is_held());
            lock.release().await.unwrap();
            assert_eq!(reentrant.leave().await.unwrap(), ReleasedLevel::Released);
            assert!(term.settle(Outcome::Succeeded).await.unwrap());
        };
        // On a worker of the runtime, where the task of the connection would be.
        runtime.block_on(async { tokio::spawn(work).await.unwrap() });
    };
    let with_others = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().unwrap()
    };
    std::thread::scope(|s| {
        s.spawn(|| test(Bed::sqlite(), runtime()));
        s.spawn(|| test(Bed::redis(), runtime()));
        s.spawn(|| test(Bed::sqlite(), with_others()));
        s.spawn(|| test(Bed::redis(), with_others()));
    });
}

#[test]
fn what_was_taken_outlives_its_runtime_and_is_renewed_outside() {
    both(|bed| {
        let (c, other) = (bed.client(), bed.client());
        let lease = Duration::from_secs(2);
        let reentrant = c.reentrant("l", lease).unwrap();
        let (lock, dropped) = runtime().block_on(async {
            let _ = reentrant.try_enter(NoRetry).await.unwrap();
            (take(&c, "k", lease).await, take(&c, "d", LONG).await)
        });
        lock.keep_renewed();
        reentrant.keep_renewed();
        drop(dropped);
        std::thread::sleep(lease * 3 / 2);
        assert!(lock.is_held() && reentrant.is_held());
        drop(lock);
        drop(reentrant);
        runtime().block_on(async {
            until_free(&other, "k").await;
            until_free(&other, "d").await;
            until_free(&other, "l").await;
        });
    });
}

#[tokio::test(start_paused = true)]
async fn a_paused_clock_is_of_no_concern() {
    for bed in [Bed::sqlite(), Bed::redis()] {
        let (a, b) = (once(&bed), once(&bed));
        let lock = take(&a, "k", LONG).await;
        lock.renew().await.unwrap();
        assert!(
            b.try_lock("k", LONG, NoRetry)
                .await
                .unwrap()
                .acquired()
                .is_none()
        );
        let begun = Instant::now();
        let retry = LimitedRetry {
            interval: 100 * MS,
            max: 3,
        };
        let out = b.try_lock("k", LONG, retry).await.unwrap();
        assert!(matches!(out, TryLock::Held { .. }));
        assert!(begun.elapsed() >= 300 * MS, "{:?}", begun.elapsed());
        let begun = Instant::now();
        let out = b.lock("k", 300 * MS, LONG).await.unwrap();
        assert!(matches!(out, TryLock::Held { .. }));
        assert!(begun.elapsed() >= 300 * MS, "{:?}", begun.elapsed());
        let waiter = waiting(&b, "k");
        tokio::task::yield_now().await;
        lock.release().await.unwrap();
        waiter.await.unwrap().release().await.unwrap();
        let short = take(&a, "s", 200 * MS).await;
        short.lost().await;
        let reentrant = a.reentrant("l", LONG).unwrap();
        assert_eq!(levels(reentrant.enter(LONG).await.unwrap()), 1);
        assert_eq!(reentrant.leave().await.unwrap(), ReleasedLevel::Released);
        let elector = elector(&bed);
        let at = due_now(&elector).await;
        let won = loop {
            match elector.claim(at).await.unwrap() {
                Election::Early { wait } | Election::Quarantined { wait } => {
                    std::thread::sleep(wait);
                }
                decided => break decided,
            }
        };
        let Election::Won(term) = won else {
            panic!("nobody else is there");
        };
        assert!(term.renew().await.unwrap());
        assert!(term.settle(Outcome::Succeeded).await.unwrap());
    }
}

struct Unpark(std::thread::Thread);
impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls the future without any runtime.
fn block_on<T>(f: impl Future<Output = T>) -> T {
    let mut f = std::pin::pin!(f);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match f.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(out) => return out,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn a_client_needs_no_runtime_of_its_caller() {
    both(|bed| {
        let (a, b) = (bed.client(), bed.client());
        let lock = block_on(take(&a, "k", LONG));
        let spin = ExponentialBackoff::default().until(20 * MS);
        assert!(
            block_on(b.try_lock("k", LONG, spin))
                .unwrap()
                .acquired()
                .is_none()
        );
        let waiter =
            std::thread::spawn(move || acquired(block_on(b.lock("k", LONG, LONG)).unwrap()));
        block_on(lock.renew()).unwrap();
        block_on(lock.release()).unwrap();
        drop(waiter.join().unwrap());
        block_on(a.wait_idle());
        let done = block_on(a.with_lock("k", LONG, LONG, |_| async { 1 })).unwrap();
        assert_eq!(done, WithLock::Done(1));
        assert!(matches!(
            block_on(a.claim_period("p", LONG)).unwrap(),
            Period::Claimed { .. }
        ));
        let elector = elector(bed);
        drop(block_on(elector.claim(1)).unwrap());
        for nonsense in [i64::MIN, -1, 0, i64::MAX / 4, i64::MAX] {
            let e = block_on(elector.claim(nonsense)).unwrap_err();
            assert!(e.to_string().contains("no instant"), "{e}");
        }
    });
}

/// A caller whose futures were polled once, and whose thread and runtime do nothing any more until this is dropped.
struct Starved {
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

type Asking = Pin<Box<dyn Future<Output = ()>>>;

impl Starved {
    fn after_one_poll(ask: impl FnOnce() -> Vec<Asking> + Send + 'static) -> Self {
        let (end, ended) = mpsc::channel::<()>();
        let (polled, begun) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            runtime().block_on(async {
                let mut asking = ask();
                for asking in &mut asking {
                    let _ = futures_util::poll!(asking);
                }
                polled.send(()).unwrap();
                let _ = ended.recv();
            });
        });
        begun.recv().unwrap();
        Self {
            end: Some(end),
            thread: Some(thread),
        }
    }
}

impl Drop for Starved {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The caller has begun to connect, its requests are among those of others, and others wait for what it releases.
#[test]
fn a_caller_that_is_not_polled_holds_up_nobody() {
    both(|bed| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let c = once(bed);
        let starved = {
            let c = c.clone();
            Starved::after_one_poll(move || {
                let ask = |i| {
                    let c = c.clone();
                    async move { drop(c.try_lock(&format!("starved-{i}"), LONG, NoRetry).await) }
                };
                (0..100).map(|i| -> Asking { Box::pin(ask(i)) }).collect()
            })
        };
        // Longer than it may take to connect.
        std::thread::sleep(1200 * MS);
        runtime.block_on(async {
            let lock = within(take(&c, "k", LONG)).await;
            within(lock.renew()).await.unwrap();
            within(lock.release()).await.unwrap();
        });
        drop(starved);
        runtime.block_on(async {
            for i in 0..100 {
                until_free(&c, &format!("starved-{i}")).await;
            }
        });

        let inner = c.reentrant("l", LONG).unwrap();
        let (lock, turn) = runtime.block_on(async {
            assert_eq!(levels(inner.try_enter(NoRetry).await.unwrap()), 1);
            let turn = c.singleflight_lock("s", LONG, LONG).await.unwrap();
            (take(&c, "k", LONG).await, acquired(turn))
        });
        let (lock, turn) = (Arc::new(lock), Arc::new(turn));
        let waiters = {
            let (c, other) = (c.clone(), c.reentrant("l", LONG).unwrap());
            runtime.spawn(async move {
                let (lock, turn, entered) = tokio::join!(
                    c.lock("k", LONG, LONG),
                    c.singleflight_lock("s", LONG, LONG),
                    other.enter(LONG)
                );
                drop((acquired(lock.unwrap()), acquired(turn.unwrap())));
                assert_eq!(levels(entered.unwrap()), 1);
            })
        };
        std::thread::sleep(50 * MS);
        assert!(!waiters.is_finished());
        let starved = {
            let (lock, turn) = (lock.clone(), turn.clone());
            Starved::after_one_poll(move || {
                vec![
                    Box::pin(async move { drop(lock.release().await) }),
                    Box::pin(async move { drop(turn.release().await) }),
                    Box::pin(async move { drop(inner.leave().await) }),
                ]
            })
        };
        runtime.block_on(async {
            within(waiters).await.unwrap();
            within(lock.release()).await.unwrap();
        });
        drop(starved);

        let lock = runtime.block_on(take(&c, "w", LONG));
        let starved = {
            let c = c.clone();
            let first = async move { drop(c.lock("w", LONG, 300 * MS).await) };
            Starved::after_one_poll(move || vec![Box::pin(first)])
        };
        runtime.block_on(async {
            let second = waiting(&c, "w");
            within(lock.release()).await.unwrap();
            drop(within(second).await.unwrap());
        });
        drop(starved);
    });
}

/// Also a request that had to wait because all calls were under way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_many_is_answered_in_time_though_the_server_hangs() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let mut config = Store::from_url(&proxy.url()).unwrap();
    config.retry.attempts = 0;
    config.timeout = Duration::from_secs(1);
    let c = LockClient::with_config(&config).unwrap();
    drop(take(&c, "k", LONG).await);
    c.wait_idle().await;
    proxy.set(Fault::BlackHoleUp);
    let begun = Instant::now();
    let all = (0..1000).map(|i| {
        let c = c.clone();
        async move { c.try_lock(&format!("k-{i}"), LONG, NoRetry).await }
    });
    for answer in within(join_all(all)).await {
        assert!(matches!(answer, Err(Error::Unreachable { .. })));
    }
    // Three times what the server is given for an answer, and time to spare.
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}");
}

const ALONE: &str = "SOLOIST_TEST_ALONE";

/// How many threads of this process have this name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok())
        .filter(|comm| comm.trim_end() == name)
        .count()
}

#[test]
fn a_client_has_one_thread_which_ends_with_it() {
    if std::env::var(ALONE).is_err() {
        // In a process without other tests.
        let name = "locks::own_thread::a_client_has_one_thread_which_ends_with_it";
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(ALONE, "1")
            .output()
            .unwrap();
        assert!(out.status.success(), "{out:?}");
        return;
    }
    both(|bed| {
        let runtime = runtime();
        runtime.block_on(async {
            let c = bed.client();
            let clone = c.named("clone");
            assert_eq!(threads("soloist-locks"), 0);
            let locks = [take(&c, "a", LONG).await, take(&clone, "b", LONG).await];
            for lock in &locks {
                lock.keep_renewed();
                lock.renew().await.unwrap();
            }
            let waiter = waiting(&c, "a");
            assert_eq!(threads("soloist-locks"), 1);
            drop(locks);
            within(waiter).await.unwrap().release().await.unwrap();
            drop((c, clone));
            until("it ends", || threads("soloist-locks") == 0).await;
        });
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_includes_a_store_that_comes_up_late() {
    let mut server = RedisServer::start_later();
    let (a, b) = (
        LockClient::open(&server.url()).unwrap(),
        LockClient::open(&server.url()).unwrap(),
    );
    let waiter = waiting(&a, "k");
    let enters = tokio::spawn(async move {
        let lock = b.reentrant("l", LONG).unwrap();
        levels(lock.enter(LONG).await.unwrap())
    });
    // Longer than the retries of the store.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!waiter.is_finished() && !enters.is_finished());
    server.revive(None);
    assert!(within(waiter).await.unwrap().is_held());
    assert_eq!(within(enters).await.unwrap(), 1);
}

fn cut(server: &RedisServer) {
    server.command::<i64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_connection_costs_nothing() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    let levels_ = c.reentrant("l", LONG).unwrap();
    let mut config = Store::from_url(&bed.url()).unwrap();
    config.retry.attempts = 1;
    let few = LockClient::with_config(&config).unwrap();
    for c in [&c, &few] {
        let lock = take(c, "k", LONG).await;
        lock.renew().await.unwrap();
        for _ in 0..3 {
            cut(server);
            lock.renew().await.unwrap();
        }
        cut(server);
        assert_eq!(lock.release().await.unwrap(), Released::Now);
        assert_eq!(levels(levels_.try_enter(NoRetry).await.unwrap()), 1);
        cut(server);
        levels_.renew().await.unwrap();
        cut(server);
        levels_.renew().await.unwrap();
        cut(server);
        assert_eq!(levels_.leave().await.unwrap(), ReleasedLevel::Released);
        cut(server);
    }
}

/// The client retries while trust lasts, and not after that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_is_retried_for_as_long_as_the_lock_is_trusted() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let mut config = Store::from_url(&proxy.url()).unwrap();
    config.retry.attempts = 100;
    config.retry.interval = 20 * MS;
    config.retry.exponential = false;
    let c = LockClient::with_config(&config).unwrap();
    let lock = take(&c, "k", LONG).await;
    let short = take(&c, "s", Duration::from_secs(2)).await;
    proxy.set(Fault::Refuse);
    let begun = Instant::now();
    let e = within(short.renew()).await.unwrap_err();
    assert!(matches!(e, Error::Lost { .. }), "{e}");
    assert!(begun.elapsed() < GENEROUS / 2 && !short.is_held());
    let renewing = lock.renew();
    tokio::pin!(renewing);
    assert!(tokio::time::timeout(100 * MS, &mut renewing).await.is_err());
    proxy.set(Fault::None);
    within(renewing).await.unwrap();
}

/// A renewal in the background waits for an answer for half of the trust that is left, and then is sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_hangs_leaves_time_for_another() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let mut config = Store::from_url(&proxy.url()).unwrap();
    config.timeout = LONG;
    let c = LockClient::with_config(&config).unwrap();
    let lease = Duration::from_secs(15);
    let (lock, levels_) = (take(&c, "k", lease).await, c.reentrant("l", lease).unwrap());
    assert_eq!(levels(levels_.try_enter(NoRetry).await.unwrap()), 1);
    // The connection for renewals is made.
    lock.renew().await.unwrap();
    proxy.set(Fault::BlackHoleUp);
    lock.keep_renewed();
    levels_.keep_renewed();
    // Renewals are sent after each fifth of the lease.
    let asked = || lock.remaining().max(levels_.remaining()) < lease * 3 / 5;
    until("they have asked", asked).await;
    proxy.set(Fault::None);
    let renewed = || lock.remaining().min(levels_.remaining()) > lease * 7 / 10;
    until("they are renewed", renewed).await;
}
