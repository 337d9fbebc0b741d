//! The library's elector: the daemon's rules about leases of others, and one term for each claim.

use super::*;

over_both! {
    of_two_requests_at_one_time_one_wins
}

async fn of_two_requests_at_one_time_one_wins(bed: Bed) {
    let elector = elector(&bed);
    let mut at = due_now(&elector).await;
    for _ in 0..20 {
        // A round may take less than a millisecond, but each round needs an occurrence of its own.
        at = (at + 1).max(soloist::clock::wall_us() / 1000);
        let (a, b, c) = tokio::join!(
            elect(&elector, at),
            elect(&elector, at),
            elect(&elector, at)
        );
        let said = format!("{a:?}, {b:?}, {c:?}");
        let mut won = vec![];
        for e in [a, b, c] {
            if let Election::Won(term) = e {
                won.push(term);
            }
        }
        assert_eq!(won.len(), 1, "terms of one occurrence: {said}");
        for term in won {
            assert!(term.settle(Outcome::Succeeded).await.unwrap());
        }
    }
}

/// An occurrence that is due now, and its term: nobody else is there.
async fn won(elector: &Elector) -> (i64, soloist::lock::Term) {
    let at = due_now(elector).await;
    match elect(elector, at).await {
        Election::Won(term) => (at, term),
        other => panic!("{other:?}"),
    }
}

/// The elector waited out a quarantine before the loss, but not since: others may run occurrences that the store has
/// forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_loss_of_data_an_elector_waits_again_and_takes_nothing_twice() {
    let bed = Bed::redis();
    let server = bed.server();
    let elector = elector(&bed);
    let (at, term) = won(&elector).await;
    assert!(term.settle(Outcome::Succeeded).await.unwrap());
    server.command::<()>(&["FLUSHALL"]);
    let again = elector.claim(at).await.unwrap();
    assert!(matches!(again, Election::Quarantined { .. }), "{again:?}");
    let again = elect(&elector, at).await;
    assert!(matches!(again, Election::Settled), "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_term_outlives_the_loss_of_all_data() {
    let bed = Bed::redis();
    let server = bed.server();
    let elector = elector(&bed);
    let (_, term) = won(&elector).await;
    for _ in 0..2 {
        server.command::<()>(&["FLUSHALL"]);
        assert!(term.renew().await.unwrap());
    }
    assert!(term.settle(Outcome::Succeeded).await.unwrap());
}

/// Nobody who is alive remembers that it ran.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_elector_that_starts_after_a_loss_of_data_does_not_run_again_what_was_planned_before() {
    let bed = Bed::redis();
    let server = bed.server();
    let at = {
        let elector = elector(&bed);
        let at = due_now(&elector).await;
        let Election::Won(term) = elect(&elector, at).await else {
            panic!("nobody else is there");
        };
        assert!(term.settle(Outcome::Succeeded).await.unwrap());
        at
    };
    server.command::<()>(&["FLUSHALL"]);
    let elector = elector(&bed);
    let again = elect(&elector, at).await;
    let unknown = matches!(
        &again,
        Election::Recorded {
            outcome: Outcome::Unknown,
            ..
        }
    );
    assert!(unknown, "{again:?}");
    let next = soloist::clock::wall_us() / 1000;
    assert!(matches!(elect(&elector, next).await, Election::Won(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_comes_too_late_is_no_term_and_can_be_asked_for_again() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let mut config = Store::from_url(&proxy.url()).unwrap();
    config.timeout = Duration::from_secs(20);
    let store = soloist::store::open(&config).unwrap();
    let elector = Elector::over(store, "invoices", 700 * MS).unwrap();
    let (_, term) = won(&elector).await;
    assert!(term.settle(Outcome::Succeeded).await.unwrap());
    proxy.set(Fault::DelayReplies(700 * MS));
    let at = soloist::clock::wall_us() / 1000;
    let e = elector.claim(at).await.unwrap_err();
    assert!(e.is_transient(), "{e}");
    proxy.set(Fault::None);
    // No other elector holds it: the same grant, renewed.
    let Election::Won(term) = elect(&elector, at).await else {
        panic!("nobody else is there");
    };
    assert!(term.is_held());
    assert_eq!(term.attempt(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_elector_does_not_rely_on_a_server_that_evicts_keys() {
    let server =
        RedisServer::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]);
    let elector = Elector::open(&server.url(), "invoices", 500 * MS).unwrap();
    let at = soloist::clock::wall_us() / 1000;
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < GENEROUS);
        match elector.claim(at).await {
            Ok(Election::Early { wait } | Election::Quarantined { wait }) => {
                tokio::time::sleep(wait).await;
            }
            Err(e) => {
                assert!(
                    !e.is_transient() && e.to_string().contains("maxmemory"),
                    "{e}"
                );
                return;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A clock that has just jumped grants nothing: the occurrence would start half an hour too early, and never at its
/// time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_elector_does_not_believe_a_store_whose_clock_jumps() {
    let server = RedisServer::start_with_own_clock();
    let elector = Elector::open(&server.url(), "invoices", 500 * MS).unwrap();
    let now = due_now(&elector).await;
    let Election::Won(term) = elect(&elector, now).await else {
        panic!("nobody else is there");
    };
    assert!(term.settle(Outcome::Succeeded).await.unwrap());
    server.step_clock(Duration::from_secs(3600));
    let coming = now + 1_800_000;
    for _ in 0..2 {
        let e = elector.claim(coming).await.unwrap_err().to_string();
        assert!(e.contains("the store's clock is 3600.0s ahead"), "{e}");
    }
    server.step_clock(Duration::ZERO);
    let early = elector.claim(coming).await.unwrap();
    assert!(matches!(early, Election::Early { .. }), "{early:?}");
    let next = elect(&elector, now + 1).await;
    assert!(matches!(next, Election::Won(_)), "{next:?}");
}

/// A settlement without an answer is sent again while the lease lasts, and no longer. The record in the history has the
/// term's times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_term_is_recorded_with_its_times_and_tries_for_as_long_as_its_lease() {
    let server = RedisServer::start();
    let mut config = Store::from_url(&server.url()).unwrap();
    (config.timeout, config.retry.attempts) = (100 * MS, 0);
    let store = soloist::store::open(&config).unwrap();
    let elector = Elector::over(store.clone(), "invoices", 5000 * MS).unwrap();
    let at = due_now(&elector).await;
    let term = loop {
        match elect(&elector, at).await {
            Election::Won(term) => break term,
            other => println!("{other:?}"),
        }
    };
    server.stop();
    let settling = tokio::spawn(term.settle(Outcome::Succeeded));
    tokio::time::sleep(300 * MS).await;
    assert!(!settling.is_finished(), "it gave up");
    server.cont();
    assert!(within(settling).await.unwrap().unwrap());
    let job = soloist::model::JobName::new("invoices");
    let record = store.history(&job, 1).await.unwrap().remove(0);
    let (began, late) = (record.started_at.unwrap(), record.lateness_ms.unwrap());
    assert!((at..at + 60_000).contains(&began), "{began}");
    assert_eq!(late, began - at);

    let short = Elector::over(store, "others", 2000 * MS).unwrap();
    let at = due_now(&short).await;
    let Election::Won(term) = elect(&short, at).await else {
        panic!("nobody else is there");
    };
    server.stop();
    let e = within(term.settle(Outcome::Succeeded)).await.unwrap_err();
    assert!(e.is_transient(), "{e}");
}
