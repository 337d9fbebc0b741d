//! Redlock: cut connections, the retry strategy, its trust.

use super::*;

fn cut(servers: &[RedisServer]) {
    for server in servers {
        server.command::<i64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_that_were_cut_do_not_defeat_a_redlock() {
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let red = nodes(&servers);
    for _ in 0..3 {
        let lock = red_taken(red.try_lock("k", LONG, NoRetry).await.unwrap());
        lock.renew().await.unwrap();
        cut(&servers);
        lock.renew().await.unwrap();
        cut(&servers);
        assert_eq!(lock.release().await.unwrap(), Released::Now);
        cut(&servers);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redlock_whose_nodes_do_not_answer_is_asked_for_again() {
    let mut servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let red = nodes(&servers);
    servers[0].kill();
    servers[1].kill();
    let mut tries = 0;
    let retry = |attempt: &Attempt| {
        tries = attempt.number;
        assert_eq!(attempt.remaining, Duration::ZERO);
        if tries == 3 {
            servers[1].revive(None);
        }
        (attempt.elapsed < GENEROUS).then_some(MS)
    };
    let lock = red_taken(red.try_lock("k", LONG, retry).await.unwrap());
    assert!(tries >= 3);
    lock.release().await.unwrap();
}

/// The first request released it, and only its reply was lost. A lock that had lapsed before was nobody's to release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_of_a_redlock_is_asked_for_again_when_its_replies_are_lost() {
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let proxies: Vec<_> = servers.iter().map(|s| Proxy::start(s.port())).collect();
    let red = Redlock::new(proxies.iter().map(|p| LockClient::open(&p.url()).unwrap()));
    let red = red.unwrap().node_timeout(1500 * MS);
    let lock = red_taken(red.try_lock("k", LONG, NoRetry).await.unwrap());
    assert_eq!(lock.key(), "k");
    for p in &proxies[..2] {
        p.set(Fault::LoseReply(":1\r\n"));
    }
    assert_eq!(lock.release().await.unwrap(), Released::Now);
    assert!(proxies[..2].iter().all(|p| p.struck() == 1));

    let lapsed = red_taken(red.try_lock("l", 2000 * MS, NoRetry).await.unwrap());
    for server in &servers {
        until_free(&LockClient::open(&server.url()).unwrap(), "l").await;
    }
    for p in &proxies[..2] {
        p.set(Fault::LoseReply("$0\r\n"));
    }
    let e = lapsed.release().await.unwrap_err();
    assert!(matches!(e, Error::NotHeld { holder: None, .. }), "{e}");
    assert!(proxies[..2].iter().all(|p| p.struck() == 2));
}

/// The release is repeated in the background, for as long as `retry` says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_of_a_redlock_reaches_a_node_that_was_away() {
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let proxies: Vec<_> = servers.iter().map(|s| Proxy::start(s.port())).collect();
    let red = Redlock::new(proxies.iter().map(|p| {
        let mut config = Store::from_url(&p.url()).unwrap();
        (config.retry.attempts, config.retry.interval) = (1000, 10 * MS);
        LockClient::with_config(&config).unwrap()
    }));
    let red = red.unwrap();
    let lock = red_taken(red.try_lock("k", LONG, NoRetry).await.unwrap());
    proxies[2].set(Fault::Refuse);
    assert_eq!(lock.release().await.unwrap(), Released::Now);
    proxies[2].set(Fault::None);
    until_free(&LockClient::open(&servers[2].url()).unwrap(), "k").await;
}

/// The request may still arrive at the node: the node notes which owner must not acquire the lock any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_did_not_answer_is_told_that_the_redlock_is_over() {
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let proxies: Vec<_> = servers.iter().map(|s| Proxy::start(s.port())).collect();
    let red = Redlock::new(proxies.iter().map(|p| LockClient::open(&p.url()).unwrap())).unwrap();
    let warm = red_taken(red.try_lock("warm", LONG, NoRetry).await.unwrap());
    warm.release().await.unwrap();
    proxies[2].set(Fault::BlackHoleUp);
    let lock = red_taken(red.try_lock("k", LONG, NoRetry).await.unwrap());
    proxies[2].set(Fault::None);
    lock.release().await.unwrap();
    let notes = || servers[2].command::<i64>(&["EXISTS", "soloist:{k}:lock"]);
    until("it is noted", || notes() == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_request_for_a_redlock_leaves_nothing() {
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let red = nodes(&servers);
    let clients: Vec<_> = servers
        .iter()
        .map(|s| LockClient::open(&s.url()).unwrap())
        .collect();
    for round in 0..30 {
        for server in &servers {
            server.command::<()>(&["SCRIPT", "FLUSH"]);
        }
        let time = Duration::from_micros(round * 67 % 1500);
        let asking = red.try_lock("k", LONG, NoRetry);
        let _ = tokio::time::timeout(time, asking).await;
        for client in &clients {
            until_free(client, "k").await;
        }
    }
}

/// The validity is the lease minus the time that the requests took minus the drift (1 % and 2 ms).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redlock_is_trusted_from_before_its_requests_left_and_for_less_than_the_lease() {
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let proxies: Vec<_> = servers.iter().map(|s| Proxy::start(s.port())).collect();
    let red = Redlock::new(proxies.iter().map(|p| LockClient::open(&p.url()).unwrap()))
        .unwrap()
        .node_timeout(Duration::from_secs(30));
    let most = LONG - LONG / 100 - 2 * MS;
    let lock = red_taken(red.try_lock("warm", LONG, NoRetry).await.unwrap());
    assert!(lock.remaining() <= most, "{:?}", lock.remaining());
    lock.renew().await.unwrap();
    assert!(lock.remaining() <= most, "{:?}", lock.remaining());
    for p in &proxies {
        p.set(Fault::DelayReplies(300 * MS));
    }
    let lock = red_taken(red.try_lock("k", LONG, NoRetry).await.unwrap());
    assert!(
        lock.remaining() <= most - 300 * MS,
        "{:?}",
        lock.remaining()
    );
    lock.renew().await.unwrap();
    assert!(
        lock.remaining() <= most - 300 * MS,
        "{:?}",
        lock.remaining()
    );
}
