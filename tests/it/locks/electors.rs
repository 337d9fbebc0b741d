//! The library's elector: the daemon's rules about leases of others, and one term for each claim.

use super::*;

over_both! {
    an_elector_waits_for_the_length_that_the_holder_asked_for
    of_two_requests_at_one_time_one_wins
}

async fn an_elector_waits_for_the_length_that_the_holder_asked_for(bed: Bed) {
    let open = |lease| Elector::open(&bed.url(), "invoices", lease).unwrap();
    let (slow, quick) = (open(6000 * MS), open(2000 * MS).rerun(2));
    let at = due_now(&slow).await;
    let Election::Won(dead) = elect(&slow, at).await else {
        panic!("nobody else is there");
    };
    let begun = Instant::now();
    let term = loop {
        match elect(&quick, at).await {
            Election::Lost { ask_again, .. } => {
                assert!(ask_again <= 2000 * MS);
                tokio::time::sleep(ask_again).await;
            }
            Election::Won(term) => break term,
            other => panic!("{other:?}"),
        }
        assert!(begun.elapsed() < GENEROUS);
    };
    assert!(!dead.is_held(), "two trust it");
    assert!(begun.elapsed() >= 5900 * MS, "{:?}", begun.elapsed());
    assert_eq!(term.attempt(), 2);
    // And the other way round: an elector with long leases waits no longer than the short lease lasts.
    drop(term);
    let late = elect(&slow, at).await;
    assert!(!matches!(late, Election::Won(_)), "{late:?}");
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_electors_quarantine_is_as_long_as_the_longest_lease_that_it_saw_needs() {
    let bed = Bed::redis();
    let Bed::Redis(server) = &bed else {
        unreachable!()
    };
    let open = |lease| Elector::open(&bed.url(), "invoices", lease).unwrap();
    let (long, short) = (open(30_000 * MS), open(500 * MS));
    let at = due_now(&short).await;
    // The short lease vouches for the server, without the quarantine of the long one.
    let Election::Won(first) = elect(&short, at).await else {
        panic!("nobody else is there");
    };
    assert!(first.settle(Outcome::Succeeded).await.unwrap());
    // A server that remembers nothing grants whatever is asked for first.
    let epoch: String = server.command(&["HGET", "soloist:epoch", "incarnation"]);
    server.command::<()>(&["HSET", "soloist:epoch", "open", "1"]);
    let at = soloist::clock::wall_us() / 1000;
    let Election::Won(_term) = long.claim(at).await.unwrap() else {
        panic!("nobody else is there");
    };
    assert!(matches!(elect(&short, at).await, Election::Lost { .. }));
    server.command::<()>(&["FLUSHALL"]);
    let wait = loop {
        match short.claim(at + 1).await.unwrap() {
            Election::Quarantined { wait } => break wait,
            Election::Early { wait } => tokio::time::sleep(wait).await,
            other => panic!("{epoch}: {other:?}"),
        }
    };
    assert!(wait > 25_000 * MS, "{wait:?}");
}

/// The elector waited out a quarantine before the loss, but not since: others may run occurrences that the store has
/// forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_loss_of_data_an_elector_waits_again_and_takes_nothing_twice() {
    let bed = Bed::redis();
    let Bed::Redis(server) = &bed else {
        unreachable!()
    };
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
    let Bed::Redis(server) = &bed else {
        unreachable!()
    };
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
    let Bed::Redis(server) = &bed else {
        unreachable!()
    };
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

#[test]
fn the_name_of_a_job_is_as_long_as_in_the_configuration() {
    let bed = Bed::sqlite();
    let longest = soloist::model::JobName::LONGEST;
    let open = |n| Elector::open(&bed.url(), &"x".repeat(n), 500 * MS);
    open(longest).unwrap();
    let e = open(longest + 1).unwrap_err();
    assert!(e.to_string().contains(&format!("1 to {longest}")), "{e}");
    let config = |n| {
        format!(
            "[jobs.{}]\nschedule = \"@hourly\"\ncommand = \"true\"\n",
            "x".repeat(n)
        )
    };
    let dir = TempDir::new().unwrap();
    for (n, fits) in [(longest, true), (longest + 1, false)] {
        let path = dir.path().join("jobs.toml");
        std::fs::write(&path, config(n)).unwrap();
        assert_eq!(
            soloist::config::load(&path, soloist::config::Sends::All).is_ok(),
            fits,
            "{n}"
        );
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

/// The elector began with a wrong time. This host's clock sides with the corrected one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_elector_believes_a_store_whose_clock_is_corrected() {
    let server = RedisServer::start_with_own_clock();
    server.set_clock(-3_600_000_000);
    let elector = Elector::open(&server.url(), "invoices", 500 * MS).unwrap();
    let now = due_now(&elector).await;
    let early = elector.claim(now).await.unwrap();
    assert!(matches!(early, Election::Early { .. }), "{early:?}");
    server.set_clock(0);
    let corrected = elect(&elector, now).await;
    assert!(matches!(corrected, Election::Won(_)), "{corrected:?}");
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
