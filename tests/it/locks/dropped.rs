//! Futures that are dropped before their answer, at any moment: nothing stays held.

use super::*;

over_both! {
    a_dropped_request_leaves_nothing_at_whatever_moment
    a_level_whose_request_is_dropped_is_given_back
    a_period_whose_request_is_dropped_is_free_again
}

/// Polls a future for a while, and drops it unless it is done. The time is shorter than a timer could measure.
async fn poll_for_a_while<T>(asking: impl Future<Output = T>, round: u64) -> Option<T> {
    tokio::pin!(asking);
    let begun = Instant::now();
    loop {
        if let std::task::Poll::Ready(out) = futures_util::poll!(&mut asking) {
            return Some(out);
        }
        if begun.elapsed() >= Duration::from_micros(round * 37 % 1500) {
            return None;
        }
        tokio::task::yield_now().await;
    }
}

fn forget_scripts(bed: &Bed) {
    if let Bed::Redis(server) = bed {
        server.command::<()>(&["SCRIPT", "FLUSH"]);
    }
}

/// The script has to be loaded first: the release must not arrive in between.
async fn a_dropped_request_leaves_nothing_at_whatever_moment(bed: Bed) {
    let (c, other) = (bed.client(), bed.client());
    for round in 0..60 {
        forget_scripts(&bed);
        let key = format!("k{round}");
        // One request alone, and several together.
        let n = if round % 2 == 0 { 1 } else { 5 };
        let all = (0..n).map(|i| {
            let (c, key) = (c.clone(), format!("{key}-{i}"));
            async move { c.try_lock(&key, LONG, NoRetry).await }
        });
        drop(poll_for_a_while(join_all(all), round).await);
        for i in 0..n {
            until_free(&other, &format!("{key}-{i}")).await;
        }
        c.wait_idle().await;
        for i in 0..n {
            let held = other.holder(&format!("{key}-{i}")).await.unwrap();
            assert_eq!(held, None, "round {round}");
        }
    }
}

async fn a_level_whose_request_is_dropped_is_given_back(bed: Bed) {
    let c = bed.client();
    for round in 0..60 {
        forget_scripts(&bed);
        let lock = c.reentrant(&format!("k{round}"), LONG).unwrap();
        let inside = round % 3 == 0;
        if inside {
            assert_eq!(levels(lock.try_enter(NoRetry).await.unwrap()), 1);
        }
        let answer = match round % 2 {
            0 => poll_for_a_while(lock.try_enter(NoRetry), round).await,
            _ => poll_for_a_while(lock.enter(LONG), round).await,
        };
        c.wait_idle().await;
        if let Some(entered) = answer {
            assert_eq!(levels(entered.unwrap()), 1 + u32::from(inside));
            let _ = lock.leave().await.unwrap();
        }
        if inside {
            assert_eq!(
                lock.leave().await.unwrap(),
                ReleasedLevel::Released,
                "round {round}"
            );
        }
        let held = c.holder(lock.key()).await.unwrap();
        assert_eq!(held, None, "round {round}");
        assert!(!lock.is_held());
    }
}

async fn a_period_whose_request_is_dropped_is_free_again(bed: Bed) {
    let c = bed.client();
    let year = Duration::from_secs(366 * 24 * 3600);
    let mut dropped = 0;
    for round in 0..60 {
        forget_scripts(&bed);
        let key = format!("k{round}");
        let answer = poll_for_a_while(c.claim_period(&key, year), round).await;
        c.wait_idle().await;
        let again = c.claim_period(&key, year).await.unwrap();
        match answer {
            Some(first) => {
                assert!(matches!(first.unwrap(), Period::Claimed { .. }));
                assert!(matches!(again, Period::Held { .. }), "claimed twice");
            }
            None => {
                dropped += 1;
                assert!(matches!(again, Period::Claimed { .. }), "round {round}");
            }
        }
    }
    assert!(dropped > 0);
}

fn script(name: &str) -> String {
    let path = format!("{}/lua/lock/{name}.lua", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

fn call<T: ::redis::FromRedisValue>(
    server: &RedisServer,
    name: &str,
    key: &str,
    args: &[&str],
) -> T {
    let script = script(name);
    let call = [&["EVAL", &script, "1", key], args].concat();
    server.command(&call)
}

const LOCK: &str = "soloist:{k}:lock";
const WEEK: &str = "604800000";

/// The release of a lock whose request got no answer may overtake that request.
#[test]
fn a_request_that_arrives_after_its_release_takes_nothing() {
    let server = RedisServer::start();
    let take = |owner: &str| -> ::redis::Value {
        call(&server, "try_lock", LOCK, &[owner, "604860000", WEEK])
    };
    let undo =
        |owner: &str| -> String { call(&server, "release", LOCK, &[owner, WEEK, "", "", "1"]) };
    // Nobody ever held it; its owner released it; it has lapsed.
    assert_eq!(undo("a#1"), "");
    assert_eq!(take("a#1"), ::redis::Value::Nil);
    assert!(matches!(take("a#2"), ::redis::Value::BulkString(_)));
    let free: i64 = call(&server, "release", LOCK, &["a#2", WEEK, ""]);
    assert_eq!(free, 1);
    assert_eq!(undo("a#3"), "");
    assert_eq!(take("a#3"), ::redis::Value::Nil);
    assert!(matches!(take("a#4"), ::redis::Value::BulkString(_)));
    // A lock that another owner holds is left alone.
    assert_eq!(undo("a#5"), "a#4");
    server.command::<()>(&["PEXPIRE", LOCK, WEEK]);
    assert_eq!(undo("a#6"), "");
    assert_eq!(take("a#6"), ::redis::Value::Nil);
    // Tokens go on growing, and what is another program's is left alone.
    assert!(matches!(take("a#7"), ::redis::Value::BulkString(_)));
    server.command::<()>(&[
        "SET",
        LOCK,
        "maintenance, by hand, for long",
        "PX",
        "1000000",
    ]);
    undo("a#8");
    let value: String = server.command(&["GET", LOCK]);
    assert_eq!(value, "maintenance, by hand, for long");
}

#[test]
fn a_level_that_is_asked_for_after_its_return_is_not_taken() {
    let server = RedisServer::start();
    let enter = |owner: &str, level: &str| -> ::redis::Value {
        call(&server, "enter", LOCK, &[owner, level, "604860000", WEEK])
    };
    let leave = |owner: &str, level: &str, which: &str| -> ::redis::Value {
        call(&server, "leave", LOCK, &[owner, level, WEEK, which])
    };
    let levels = |value: ::redis::Value| ::redis::from_redis_value::<(i64, i64)>(value).unwrap().1;
    let nobody = ::redis::Value::BulkString(vec![]);
    // Nobody holds it.
    assert_eq!(leave("a", "1", "unanswered"), nobody);
    assert_eq!(enter("a", "1"), ::redis::Value::Nil);
    // We hold it: to leave a level that was never entered releases nothing, and that level cannot be entered later.
    assert_eq!(levels(enter("a", "2")), 1);
    assert_eq!(leave("a", "3", "unanswered"), ::redis::Value::Int(1));
    assert_eq!(enter("a", "3"), ::redis::Value::Nil);
    assert_eq!(levels(enter("a", "4")), 2);
    // Requests that are repeated in any order count once each.
    assert_eq!(levels(enter("a", "2")), 2);
    assert_eq!(leave("a", "2", "named"), ::redis::Value::Int(1));
    assert_eq!(levels(enter("a", "5")), 2);
    assert_eq!(leave("a", "2", "named"), ::redis::Value::Int(2));
    assert_eq!(enter("a", "2"), ::redis::Value::Nil);
    // The newest level is left by a request with another name, twice.
    assert_eq!(leave("a", "6", "newest"), ::redis::Value::Int(1));
    assert_eq!(leave("a", "6", "newest"), ::redis::Value::Int(1));
    assert_eq!(leave("a", "4", "named"), ::redis::Value::Int(0));
    assert_eq!(enter("a", "4"), ::redis::Value::Nil);
    // Another owner holds it in between: the names of levels that are over are still remembered.
    assert_eq!(levels(enter("b", "7")), 1);
    assert_eq!(leave("b", "7", "named"), ::redis::Value::Int(0));
    for late in ["4", "5", "7"] {
        assert_eq!(enter("a", late), ::redis::Value::Nil, "{late}");
    }
    // Of many names, the newest are remembered.
    for n in 100..200 {
        let name = n.to_string();
        assert_eq!(levels(enter("a", &name)), 1);
        assert_eq!(leave("a", &name, "named"), ::redis::Value::Int(0));
    }
    assert_eq!(enter("a", "199"), ::redis::Value::Nil);
    // Also while the lock is held throughout; and the levels of a lock that lapsed are over with it.
    assert_eq!(levels(enter("a", "200")), 1);
    for n in 201..300 {
        let name = n.to_string();
        assert_eq!(levels(enter("a", &name)), 2);
        assert_eq!(leave("a", &name, "named"), ::redis::Value::Int(1));
    }
    let length: i64 = server.command(&["STRLEN", LOCK]);
    assert!(length < 200, "{length} bytes");
    for n in 300..400 {
        let _ = levels(enter("a", &n.to_string()));
    }
    server.command::<()>(&["PEXPIRE", LOCK, WEEK]);
    assert_eq!(enter("a", "399"), ::redis::Value::Nil);
    assert_eq!(levels(enter("a", "400")), 1);
    assert_eq!(enter("a", "399"), ::redis::Value::Nil);
    let length: i64 = server.command(&["STRLEN", LOCK]);
    assert!(length < 200, "{length} bytes");
}

/// Released, and kept for a while: late requests of its owner change nothing.
#[test]
fn what_comes_late_does_not_touch_what_is_kept() {
    let server = RedisServer::start();
    let args = ["a#1", "604860000", WEEK];
    let _: String = call(&server, "try_lock", LOCK, &args);
    let kept: i64 = call(&server, "release", LOCK, &["a#1", WEEK, "20000"]);
    assert_eq!(kept, 1);
    let look = || -> (String, i64) {
        let value = server.command(&["GET", LOCK]);
        (value, server.command(&["PTTL", LOCK]))
    };
    let (value, left) = look();
    assert_eq!(&value[16..17], "=");
    let answer: ::redis::Value = call(&server, "try_lock", LOCK, &args);
    assert!(matches!(answer, ::redis::Value::Array(_)), "{answer:?}");
    let renewed: ::redis::Value = call(&server, "renew", LOCK, &args);
    assert!(
        matches!(renewed, ::redis::Value::BulkString(_)),
        "{renewed:?}"
    );
    // The release is repeated without a time: the lock is kept all the same.
    let again: i64 = call(&server, "release", LOCK, &["a#1", WEEK, ""]);
    assert_eq!(again, 1);
    let (after, after_left) = look();
    assert_eq!(after, value);
    assert!(
        after_left <= left && after_left > left - 15_000,
        "{after_left}"
    );
}

/// Levels are counted by their names: clones that enter and leave at one time do not take each other's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn levels_of_clones_are_exact_though_replies_are_lost() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let mut config = Store::from_url(&proxy.url()).unwrap();
    config.retry.attempts = 50;
    config.retry.interval = MS;
    config.retry.exponential = false;
    let c = LockClient::with_config(&config).unwrap();
    let lock = c.reentrant("k", LONG).unwrap();
    let _outer = lock.try_enter(NoRetry).await.unwrap();
    proxy.set(Fault::Lossy(20));
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                for _ in 0..10 {
                    assert!(levels(lock.try_enter(NoRetry).await.unwrap()) >= 2);
                    assert!(matches!(
                        lock.leave().await.unwrap(),
                        ReleasedLevel::StillHeld { .. }
                    ));
                }
            })
        })
        .collect();
    for t in tasks {
        within(t).await.unwrap();
    }
    proxy.set(Fault::None);
    assert!(proxy.struck() > 0);
    assert_eq!(lock.leave().await.unwrap(), ReleasedLevel::Released);
}
