//! What only SQLite has: the file, and several processes on it.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rusqlite::Connection;
use soloist::{
    clock::Boottime,
    logic::claim::{Answer, Claim, Control, OnCrash, Overlap, Settle, State, Target},
    model::{InstanceId, JobName, Occurrence, Outcome, RunId, RunRecord, Trigger},
    store::{self, Beat, Decision, Error, Fleet, Info, Store, Tail, sqlite::SqliteStore},
};
use tempfile::TempDir;

use crate::support::{GENEROUS, process, registration, wait_until};

fn job() -> JobName {
    JobName::new("backup")
}

fn claim(at: i64) -> Claim {
    Claim {
        job: job(),
        target: Target::Scheduled(Occurrence(at)),
        known: Occurrence(0),
        missed: vec![],
        run: RunId::random(),
        instance: InstanceId::new("a"),
        host: "h".to_owned(),
        trigger: Trigger::Schedule,
        start_by: i64::MAX / 2,
        lease: 15_000,
        overlap: Overlap::Allow,
        on_crash: OnCrash::Fail,
        max_attempts: 1,
        definition: "d".to_owned(),
        observed: None,
        holds: vec![],
        cause: None,
    }
}

/// The record of a run that succeeded.
fn record(c: &Claim) -> RunRecord {
    RunRecord {
        run_id: Some(c.run),
        job: job(),
        occurrence: Occurrence(1),
        trigger: c.trigger,
        attempt: 1,
        fencing_token: None,
        instance: None,
        host: None,
        started_at: None,
        finished_at: None,
        lateness_ms: None,
        duration_ms: None,
        outcome: Outcome::Succeeded,
        exit_code: Some(0),
        signal: None,
        output_tail: String::new(),
        output_truncated: false,
        error: None,
        count: 1,
        usage: soloist::model::Usage::default(),
        waited: None,
        by: None,
    }
}

async fn register(store: &dyn Store) {
    let incarnation = store.observe(&[]).await.unwrap().incarnation;
    let register = registration(&job(), Some(incarnation.to_string()));
    let _ = store.register(&[register]).await.unwrap();
}

fn refusal(path: &Path) -> Error {
    match SqliteStore::open(path) {
        Err(e) => e,
        Ok(_) => panic!("{} was opened", path.display()),
    }
}

#[test]
fn a_missing_directory_is_named() {
    let dir = TempDir::new().unwrap();
    let e = refusal(&dir.path().join("no/state.db"));
    assert!(matches!(e, Error::Refused { .. }), "{e}");
    assert!(
        e.to_string()
            .contains(dir.path().join("no").to_str().unwrap()),
        "{e}"
    );
    assert!(!dir.path().join("no").exists());
    let e = refusal(dir.path());
    assert!(e.to_string().contains("it is a directory"), "{e}");
}

#[test]
fn a_newer_schema_is_refused() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    drop(SqliteStore::open(&path).unwrap());
    let db = Connection::open(&path).unwrap();
    db.pragma_update(None, "user_version", 99).unwrap();
    let e = refusal(&path);
    assert!(e.to_string().contains("made by a newer soloist"), "{e}");
    assert!(!e.is_transient());
}

#[test]
fn another_programs_database_is_left_alone() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    let db = Connection::open(&path).unwrap();
    db.execute_batch("CREATE TABLE theirs (x)").unwrap();
    drop(db);
    let before = std::fs::read(&path).unwrap();
    let e = refusal(&path);
    assert!(e.to_string().contains("database of another program"), "{e}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn a_file_that_is_no_database_is_corrupt() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    std::fs::write(
        &path,
        "nothing that SQLite would have written. ".repeat(100),
    )
    .unwrap();
    let e = refusal(&path);
    assert!(matches!(e, Error::Corrupt { .. }), "{e}");
}

#[test]
fn those_who_make_the_file_together_agree_on_it() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    let incs: Vec<String> = std::thread::scope(|scope| {
        let open = || {
            let store = SqliteStore::open(&path).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            runtime
                .block_on(store.observe(&[]))
                .unwrap()
                .incarnation
                .to_string()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(incs.iter().collect::<HashSet<_>>().len(), 1, "{incs:?}");
}

#[tokio::test]
async fn a_replaced_or_removed_file_is_refused() {
    for end in ["", "-wal", "-shm"] {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("state.db");
        let store = SqliteStore::open(&path).unwrap();
        register(&store).await;
        let (file, away) = (format!("{}{end}", path.display()), dir.path().join("away"));
        std::fs::rename(&file, &away).unwrap();
        for e in [
            store.claim(&[claim(1)]).await.unwrap_err(),
            store.observe(&[]).await.unwrap_err(),
        ] {
            assert!(e.to_string().contains(&format!("{file} is gone")), "{e}");
        }
        std::fs::copy(&away, &file).unwrap();
        let e = store.claim(&[claim(1)]).await.unwrap_err();
        let replaced = format!("{file} was replaced by another");
        assert!(e.to_string().contains(&replaced), "{e}");
        std::fs::rename(&away, &file).unwrap();
        assert!(matches!(
            store.claim(&[claim(1)]).await.unwrap().value[0],
            Answer::Granted(_)
        ));
    }
}

/// A store on a copy of the database file alone, as a backup may be, or what is left after a crash without the log.
fn without_log(path: &Path, copy: &TempDir) -> SqliteStore {
    let alone = copy.path().join("copy.db");
    std::fs::copy(path, &alone).unwrap();
    SqliteStore::open(&alone).unwrap()
}

#[tokio::test]
async fn what_was_decided_is_in_the_file_when_its_log_was_removed() {
    let (dir, copy) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = dir.path().join("state.db");
    let store = SqliteStore::open(&path).unwrap();
    register(&store).await;
    let granted = store.claim(&[claim(1)]).await.unwrap();
    assert!(matches!(granted.value[0], Answer::Granted(_)));
    std::fs::remove_file(dir.path().join("state.db-wal")).unwrap();
    store.claim(&[claim(2)]).await.unwrap_err();
    let copied = without_log(&path, &copy);
    let state = |reply: soloist::store::Reply<Vec<Option<State>>>| reply.value[0].clone();
    let left = state(copied.observe(&[job()]).await.unwrap()).expect("a state");
    assert_eq!(left.open.len(), 1, "{left:?}");
}

/// What a handle of another process removes when it first writes. `beats`: this instance gives a sign of life.
async fn sweep(path: &Path, beats: &str) -> Fleet {
    let beat = Beat {
        instance: InstanceId::new(beats),
        info: Info {
            host: "h".to_owned(),
            process: 1,
            ..Info::default()
        },
        quarantine: Duration::ZERO,
        open: None,
    };
    let store = SqliteStore::open(path).unwrap();
    store.heartbeat(Some(&beat)).await.unwrap();
    store.heartbeat(None).await.unwrap().value
}

#[tokio::test]
async fn a_drain_lasts_as_long_as_its_instance() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    let by_hand = |sql: &str| Connection::open(&path).unwrap().execute_batch(sql).unwrap();
    let a = InstanceId::new("a");
    sweep(&path, "a").await;
    let store = SqliteStore::open(&path).unwrap();
    store.drain(&a, true, "alice@web-1").await.unwrap();
    by_hand("UPDATE drains SET at = 1");
    assert_eq!(sweep(&path, "b").await.drains, std::slice::from_ref(&a));
    // A clock was ahead for a moment: the instance lives, but looks as if it had been silent for long.
    by_hand("UPDATE drains SET at = 1; UPDATE instances SET seen = 1 WHERE instance = 'a'");
    let fleet = sweep(&path, "b").await;
    assert!(!fleet.instances.contains_key(&a));
    assert_eq!(fleet.drains, std::slice::from_ref(&a));
    assert_eq!(sweep(&path, "a").await.drains, std::slice::from_ref(&a));
    // The instance does not come back.
    by_hand("UPDATE drains SET at = 1; DELETE FROM instances WHERE instance = 'a'");
    assert_eq!(sweep(&path, "b").await.drains, []);
}

#[tokio::test]
async fn what_is_old_is_removed() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    let store = SqliteStore::open(&path).unwrap();
    register(&store).await;
    let mine = claim(1);
    let _ = store.claim(std::slice::from_ref(&mine)).await.unwrap();
    let settle = Settle {
        run: mine.run,
        record: record(&mine),
        next_attempt: None,
    };
    let tail = Tail {
        data: b"out".to_vec(),
        ..Tail::default()
    };
    let _ = store.settle(&settle, &tail).await.unwrap();
    let decision = Decision {
        job: job(),
        occurrence: Occurrence(1),
        instance: InstanceId::new("a"),
        at: 1,
        decision: "won".to_owned(),
        detail: String::new(),
    };
    store.journal(&[decision]).await.unwrap();
    sweep(&path, "a").await;
    store
        .drain(&InstanceId::new("nobody"), true, "")
        .await
        .unwrap();
    let db = Connection::open(&path).unwrap();
    let count = |table: &str| -> i64 {
        db.query_row(&format!("SELECT count(*) FROM {table}"), [], |r| r.get(0))
            .unwrap()
    };
    let now = soloist::clock::wall_us() / 1000;
    let kept = [
        ("history", "at", store::RECORDS_TTL),
        ("decisions", "at", store::DECISIONS_TTL),
        ("output", "at", store::OUTPUT_TTL),
        ("instances", "seen", store::FORGET_INSTANCE),
    ];
    for (table, column, ttl) in kept {
        let at = |ms: i64| {
            let sql = format!("UPDATE {table} SET {column} = {ms}");
            db.execute_batch(&sql).unwrap();
        };
        let ttl = ttl.as_millis() as i64;
        at(now - ttl + 600_000);
        let before = count(table);
        sweep(&path, "b").await;
        assert!(
            before > 0 && count(table) >= before,
            "{table} is not old yet"
        );
        at(now - ttl - 1000);
        sweep(&path, "c").await;
        let left = count(table);
        // The instance that swept has just given a sign of life.
        assert_eq!(left, i64::from(table == "instances"), "{table}");
    }
    let states: i64 = count("jobs");
    assert_eq!(states, 1, "a state has no expiry");
}

/// Others see a claim or renewal from its commit on, not while it waits for the file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_has_left_when_its_transaction_has_begun() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    let store = std::sync::Arc::new(SqliteStore::open(&path).unwrap());
    register(&*store).await;
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let claimed = tokio::spawn({
        let store = store.clone();
        async move { store.claim(&[claim(1)]).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let let_go = Boottime::now();
    other.execute_batch("ROLLBACK").unwrap();
    let reply = claimed.await.unwrap().unwrap();
    assert!(matches!(reply.value[0], Answer::Granted(_)));
    assert!(let_go <= reply.sent && reply.sent <= reply.received);
}

#[tokio::test]
async fn a_locked_file_is_an_error_that_passes() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    let store = SqliteStore::open(&path).unwrap();
    register(&store).await;
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    // It waits for half a second instead of five.
    store.hurry();
    let waited = async || {
        let e = store.claim(&[claim(1)]).await.unwrap_err();
        let text = e.to_string();
        let how = format!("`fuser {}` names those", path.display());
        assert!(e.is_transient() && text.contains(&how), "{e}");
        let (_, rest) = text
            .split_once("for writing for longer than ")
            .expect(&text);
        rest.split('s')
            .next()
            .expect("a number")
            .parse::<f64>()
            .ok()
    };
    let (first, second) = (waited().await, waited().await);
    assert!(
        second > first && second < Some(60.0),
        "{first:?}, {second:?}"
    );
    // A read is not held up.
    assert!(store.observe(&[job()]).await.unwrap().value[0].is_some());
    other.execute_batch("ROLLBACK").unwrap();
    assert!(matches!(
        store.claim(&[claim(1)]).await.unwrap().value[0],
        Answer::Granted(_)
    ));
}

#[tokio::test]
async fn an_unreadable_row_fails_its_own_request_alone() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    let store = SqliteStore::open(&path).unwrap();
    register(&store).await;
    let other = Connection::open(&path).unwrap();
    other
        .execute_batch("INSERT INTO jobs VALUES ('bad', '{\"newest\":\"x\"}')")
        .unwrap();
    // The first holds the writer, so that the others share one transaction.
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let name = job();
    let pause = Control::Pause {
        until: None,
        reason: None,
    };
    let bad = [
        claim(5),
        Claim {
            job: JobName::new("bad"),
            ..claim(7)
        },
    ];
    let (good, first) = ([claim(6)], [claim(4)]);
    let all = async {
        tokio::join!(
            store.claim(&first),
            store.claim(&bad),
            store.claim(&good),
            store.control(&name, &pause)
        )
    };
    let release = async {
        tokio::task::yield_now().await;
        other.execute_batch("ROLLBACK").unwrap();
    };
    let ((first, bad, good, pause), ()) = tokio::join!(all, release);
    assert!(matches!(first.unwrap().value[0], Answer::Granted(_)));
    let e = bad.unwrap_err();
    assert!(matches!(e, Error::Corrupt { .. }), "{e}");
    assert!(matches!(good.unwrap().value[0], Answer::Granted(_)));
    pause.unwrap();
    let st = store
        .observe(&[job()])
        .await
        .unwrap()
        .value
        .remove(0)
        .unwrap();
    // Nothing of the failed request is left, not even its first claim.
    let open: Vec<i64> = st.open.iter().map(|o| o.run.occurrence.0).collect();
    assert_eq!(open, [4, 6]);
}

#[tokio::test]
async fn what_was_answered_is_there_after_opening_again() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    let store = SqliteStore::open(&path).unwrap();
    assert!(store.durable());
    register(&store).await;
    let first = store.claim(&[claim(1)]).await.unwrap();
    let born = store.heartbeat(None).await.unwrap().value.born;
    drop(store);
    let store = SqliteStore::open(&path).unwrap();
    let again = store.claim(&[claim(1)]).await.unwrap();
    assert_eq!(first.incarnation, again.incarnation);
    assert!(matches!(again.value[0], Answer::Running(_)));
    assert_eq!(store.heartbeat(None).await.unwrap().value.born, born);
}

/// The number of contenders; the last one is killed.
const CONTENDERS: usize = 4;
/// Each of the others stops behind this one.
const OCCURRENCES: i64 = 1000;
const ROLE: &str = "SOLOIST_TEST_CONTENDER";

/// Where each contender writes a line for each grant.
fn grants(dir: &Path) -> Vec<PathBuf> {
    (0..CONTENDERS)
        .map(|i| dir.join(format!("grants-{i}")))
        .collect()
}

fn granted(file: &Path) -> Vec<i64> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    // A contender may have been killed in the middle of a line.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|l| l.parse().unwrap()).collect()
}

/// Claims every occurrence in turn and settles what it gets. Each contender gets one of the first, so that all take
/// part even if the machine favours one of them; after that they contend.
fn contend(dir: &Path, number: usize) {
    let files = grants(dir);
    let mut out = std::fs::File::options()
        .create(true)
        .append(true)
        .open(&files[number])
        .unwrap();
    let store = SqliteStore::open(&dir.join("state.db")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let take = |at: i64, out: &mut std::fs::File| runtime.block_on(take(&store, at, out));
    let has_begun = |file: &Path| !granted(file).is_empty();
    if let Some(before) = number.checked_sub(1) {
        wait_until("the one before has begun", GENEROUS, || {
            has_begun(&files[before])
        });
    }
    take(i64::try_from(number).unwrap() + 1, &mut out);
    wait_until("all have begun", GENEROUS, || {
        files.iter().all(|f| has_begun(f))
    });
    let victim = number == CONTENDERS - 1;
    let shared = i64::try_from(CONTENDERS).unwrap();
    for at in shared + 1.. {
        if at > OCCURRENCES && !victim {
            return;
        }
        take(at, &mut out);
    }
}

async fn take(store: &SqliteStore, at: i64, out: &mut std::fs::File) {
    use std::io::Write;
    let c = claim(at);
    let Answer::Granted(g) = store.claim(std::slice::from_ref(&c)).await.unwrap().value[0] else {
        return;
    };
    writeln!(out, "{}", g.occurrence.0).unwrap();
    let record = RunRecord {
        occurrence: g.occurrence,
        trigger: g.trigger,
        attempt: g.attempt,
        ..record(&c)
    };
    let settle = Settle {
        run: c.run,
        record,
        next_attempt: None,
    };
    let _ = store.settle(&settle, &Tail::default()).await.unwrap();
}

#[test]
fn four_processes_share_a_file_and_one_is_killed() {
    if let Ok(role) = std::env::var(ROLE) {
        let (number, dir) = role.split_once(' ').unwrap();
        return contend(Path::new(dir), number.parse().unwrap());
    }
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state.db");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async { register(&SqliteStore::open(&path).unwrap()).await });
    let files = grants(dir.path());
    let mut children: Vec<_> = (0..CONTENDERS)
        .map(|i| {
            let mut command = process::mortal(std::env::current_exe().unwrap());
            command
                .args([
                    "--exact",
                    "sqlite::four_processes_share_a_file_and_one_is_killed",
                ])
                .env(ROLE, format!("{i} {}", dir.path().display()))
                .stdout(Stdio::null());
            command.spawn().unwrap()
        })
        .collect();
    let (victim, others) = children.split_last_mut().unwrap();
    // It never stops by itself.
    wait_until("it is in the middle of its work", GENEROUS, || {
        granted(&files[CONTENDERS - 1]).len() >= 50
    });
    victim.kill().unwrap();
    assert!(!victim.wait().unwrap().success());
    for c in others {
        assert!(c.wait().unwrap().success());
    }
    let all: Vec<i64> = files.iter().flat_map(|f| granted(f)).collect();
    let each: HashSet<i64> = all.iter().copied().collect();
    assert_eq!(all.len(), each.len(), "an occurrence was granted twice");
    let st = runtime.block_on(async {
        let store = SqliteStore::open(&path).unwrap();
        let seen = store.observe(&[job()]).await.unwrap().value.remove(0);
        seen.unwrap()
    });
    assert!(st.newest >= OCCURRENCES, "{}", st.newest);
    assert!(st.open.len() <= 1, "{:?}", st.open);
    // The killed contender may have died between its grant and its line.
    let missing: Vec<i64> = (1..=st.newest).filter(|o| !each.contains(o)).collect();
    assert!(missing.len() <= 1, "never granted: {missing:?}");
    let db = Connection::open(&path).unwrap();
    let check: String = db
        .query_row("PRAGMA integrity_check", [], |r| r.get(0))
        .unwrap();
    assert_eq!(check, "ok");
}
