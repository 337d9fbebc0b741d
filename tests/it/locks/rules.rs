//! Single rules of the locks: no other test would fail without them.

use super::*;

over_both! {
    a_level_never_shortens_what_is_left
    the_time_of_lock_at_least_for_counts_from_the_grant
    what_is_kept_after_its_release_is_nobodys
}

/// The trust of a lease of two minutes: (L / 1.01 - 2 s) / 1.01.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trust_counts_from_before_the_request_left() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let mut config = Store::from_url(&proxy.url()).unwrap();
    config.timeout = Duration::from_secs(20);
    let c = LockClient::with_config(&config).unwrap();
    let trust = take(&c, "warm", LONG).await;
    trust.renew().await.unwrap();
    assert!(trust.remaining() < 115_657 * MS, "{:?}", trust.remaining());
    let levels = c.reentrant("l", LONG).unwrap();
    let by = 1000 * MS;
    proxy.set(Fault::DelayReplies(by));
    let most = 115_657 * MS - by;
    let lock = take(&c, "k", LONG).await;
    assert!(lock.remaining() < most, "{:?}", lock.remaining());
    lock.renew().await.unwrap();
    assert!(lock.remaining() < most, "{:?}", lock.remaining());
    let _ = levels.try_enter(NoRetry).await.unwrap();
    assert!(levels.remaining() < most, "{:?}", levels.remaining());
    levels.renew().await.unwrap();
    assert!(levels.remaining() < most, "{:?}", levels.remaining());
    proxy.set(Fault::None);
}

/// The first try is repeated at once, then as often as `retry` says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_has_as_many_tries_as_its_store_allows() {
    let server = RedisServer::start();
    let mut config = Store::from_url(&server.url()).unwrap();
    // There is no replica, so no grant may be relied on.
    config.min_replicas = 1;
    config.retry.interval = MS;
    for (attempts, tries) in [(0, 1), (1, 3), (2, 4)] {
        config.retry.attempts = attempts;
        let c = LockClient::with_config(&config).unwrap();
        let before = calls(&server, "wait");
        let e = c.try_lock("k", LONG, NoRetry).await.unwrap_err();
        assert!(matches!(e, Error::NotReplicated { have: 0, .. }), "{e}");
        assert_eq!(calls(&server, "wait") - before, tries);
        c.wait_idle().await;
    }
}

async fn a_level_never_shortens_what_is_left(bed: Bed) {
    let c = bed.client();
    let long = c.reentrant("k", LONG).unwrap().owned_by("us");
    let short = c.reentrant("k", 500 * MS).unwrap().owned_by("us");
    assert_eq!(levels(long.try_enter(NoRetry).await.unwrap()), 1);
    assert_eq!(levels(short.try_enter(NoRetry).await.unwrap()), 2);
    let left = c.holder("k").await.unwrap().unwrap().remaining;
    assert!(left > LONG / 2 && left <= LONG, "{left:?}");
    assert_eq!(
        short.leave().await.unwrap(),
        ReleasedLevel::StillHeld { levels: 1 }
    );
    let left = c.holder("k").await.unwrap().unwrap().remaining;
    assert!(left > LONG / 2 && left <= LONG, "{left:?}");
    // A level that another value of this owner entered may be left, too.
    assert_eq!(short.leave().await.unwrap(), ReleasedLevel::Released);
}

async fn the_time_of_lock_at_least_for_counts_from_the_grant(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let lock = take(&a, "k", LONG).await;
    tokio::time::sleep(1500 * MS).await;
    lock.lock_at_least_for(LONG);
    lock.release().await.unwrap();
    let left = b.holder("k").await.unwrap().unwrap().remaining;
    assert!(left <= LONG - 1500 * MS, "{left:?}");
    // The time may be longer than the lease; the last call counts.
    let lock = take(&a, "l", 10_000 * MS).await;
    lock.lock_at_least_for(MS);
    lock.lock_at_least_for(LONG);
    drop(lock);
    a.wait_idle().await;
    let left = b.holder("l").await.unwrap().unwrap().remaining;
    assert!(left > LONG / 2, "{left:?}");
    // A time that has passed keeps nothing.
    let lock = take(&a, "m", LONG).await;
    lock.lock_at_least_for(MS);
    tokio::time::sleep(5 * MS).await;
    lock.release().await.unwrap();
    assert_eq!(b.holder("m").await.unwrap(), None);
}

/// Its holder has released it: it can neither renew nor acquire it, and the lock lapses by itself.
async fn what_is_kept_after_its_release_is_nobodys(bed: Bed) {
    let (a, b) = (bed.client(), bed.client());
    let lock = take(&a, "k", LONG).await;
    lock.lock_at_least_for(700 * MS);
    assert_eq!(lock.release().await.unwrap(), Released::Now);
    assert_eq!(lock.release().await.unwrap(), Released::Before);
    assert!(matches!(lock.renew().await, Err(Error::NotHeld { .. })));
    for c in [&a, &b] {
        assert!(
            c.try_lock("k", LONG, NoRetry)
                .await
                .unwrap()
                .acquired()
                .is_none()
        );
    }
    let token = lock.fencing_token();
    let next = within(b.lock("k", LONG, LONG)).await.unwrap();
    assert!(next.acquired().unwrap().fencing_token() > token);
}

/// A key that was a lock stays for a week, so that tokens grow; no key stays for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_key_expires_and_tokens_are_remembered_for_a_week() {
    let bed = Bed::redis();
    let server = bed.server();
    let c = bed.client();
    let ttl = |key: &str| {
        let ms: i64 = server.command(&["PTTL", &format!("soloist:{{{key}}}:{}", "lock")]);
        Duration::from_millis(u64::try_from(ms).expect("it expires"))
    };
    let week = Duration::from_secs(7 * 24 * 3600);
    let held = |key: &str| {
        let ttl = ttl(key);
        assert!(
            ttl > week + LONG / 2 && ttl <= week + LONG,
            "{key}: {ttl:?}"
        );
    };
    let kept = |key: &str| {
        let ttl = ttl(key);
        assert!(ttl > week - LONG && ttl <= week + LONG, "{key}: {ttl:?}");
    };
    let lock = take(&c, "k", LONG).await;
    held("k");
    server.command::<()>(&["PEXPIRE", "soloist:{k}:lock", "604830000"]);
    lock.renew().await.unwrap();
    held("k");
    lock.release().await.unwrap();
    kept("k");
    let lock = take(&c, "at-least", LONG).await;
    lock.lock_at_least_for(LONG);
    lock.release().await.unwrap();
    held("at-least");
    let levels_ = c.reentrant("l", LONG).unwrap();
    for _ in 0..2 {
        let _ = levels_.try_enter(NoRetry).await.unwrap();
        held("l");
    }
    levels_.renew().await.unwrap();
    held("l");
    let _ = levels_.leave().await.unwrap();
    held("l");
    assert_eq!(levels_.leave().await.unwrap(), ReleasedLevel::Released);
    kept("l");
    let _ = c.claim_period("p", 1000 * MS).await.unwrap();
    let period: i64 = server.command(&["PTTL", "soloist:{p}:period:1000"]);
    assert!(period > 0 && period <= week.as_millis() as i64, "{period}");
    let _ = c.claim_period("p", 2 * week).await.unwrap();
    let name = format!("soloist:{{p}}:period:{}", 2 * week.as_millis());
    let period: i64 = server.command(&["PTTL", &name]);
    assert!(period > 3 * week.as_millis() as i64, "{period}");
    // A release that comes before its request leaves a note, for a shorter time.
    let script =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/lua/lock/release.lua"))
            .unwrap();
    let week = week.as_millis().to_string();
    let undo = [
        "EVAL",
        &script,
        "1",
        "soloist:{u}:lock",
        "x#1",
        &week,
        "",
        "",
        "1",
    ];
    server.command::<()>(&undo);
    assert!(ttl("u") <= Duration::from_secs(3600));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_is_told_without_what_would_break_a_line_and_an_address_without_secrets() {
    let bed = Bed::redis();
    let c = bed.client().named("an\u{7}n#1\nö");
    let _lock = take(&c, "k", LONG).await;
    let held = bed.client().holder("k").await.unwrap();
    assert!(format!("{held:?}").contains("an_n_1_ö"), "{held:?}");
    let long = bed.client().named(&"ö".repeat(150));
    let _lock = take(&long, "l", LONG).await;
    let held = format!("{:?}", c.holder("l").await.unwrap());
    assert!(
        held.contains(&"ö".repeat(100)) && !held.contains(&"ö".repeat(101)),
        "{held}"
    );
    assert!(c.address().starts_with("redis"), "{}", c.address());
    let secret = LockClient::open("redis://:hunter2@localhost:1/0").unwrap();
    assert!(
        !secret.address().contains("hunter2"),
        "{}",
        secret.address()
    );
    assert!(
        secret.address().contains("localhost:1"),
        "{}",
        secret.address()
    );
}
