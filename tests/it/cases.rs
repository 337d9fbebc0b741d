//! What the worlds (src/world) ask the store, asked on each store: the same answer, the same state after it, the same
//! records and hints. The clock shows exactly the time of the case.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use serde::Deserialize;
use serde_json::Value;
use soloist::{
    logic::claim::{Answered, Effects, Event, Question, State},
    model::{JobName, RunRecord},
    store::{Store, Tail, memory::MemoryStore, sqlite::SqliteStore},
};

use crate::support::{GENEROUS, server::RedisServer};

/// A line of tests/cases.jsonl, as src/world/cases.rs writes it.
#[derive(Debug, Deserialize)]
struct Case {
    now_us: i64,
    incarnation: String,
    before: Option<State>,
    question: Question,
    answer: Answered,
    after: Option<State>,
    effects: Effects,
}

/// The cases of the file that SOLOIST_CASES names, or of the kept one: each about a job of its own, in the incarnation
/// of the store that is asked.
fn cases(incarnation: &str) -> impl Iterator<Item = (String, Case)> {
    let kept = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases.jsonl");
    let file = std::env::var("SOLOIST_CASES").unwrap_or_else(|_| kept.to_owned());
    let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert!(lines.len() > 500, "only {} cases", lines.len());
    let incarnation = format!("{incarnation:?}");
    lines.into_iter().enumerate().map(move |(i, line)| {
        let name = format!("{file}:{}", i + 1);
        let read = |line: &str| -> Case {
            serde_json::from_str(line).unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        let was = format!("{:?}", read(&line).incarnation);
        let line = line.replace("\"j0\"", &format!("\"j{i}\""));
        let mut case = read(&line.replace(&was, &incarnation));
        if let Question::Register(r) = &mut case.question {
            // The world has looked at the epoch before it asked the rules.
            r.epoch = None;
        }
        (name, case)
    })
}

/// Asks all cases. `put` makes the store have a state, and `set` sets its clock (µs).
async fn ask_all(
    store: &dyn Store,
    incarnation: &str,
    put: impl Fn(&JobName, &State),
    set: impl Fn(i64),
) {
    let mut events = store.events();
    // A subscription that is not there yet would miss the first.
    let nobody = soloist::model::InstanceId::new("nobody");
    loop {
        store
            .drain(&nobody, false, "")
            .await
            .expect("the store answers");
        let heard = tokio::time::timeout(Duration::from_millis(100), events.recv());
        if heard.await.is_ok() {
            break;
        }
    }
    let mut asked = 0;
    for (name, case) in cases(incarnation) {
        let job = case.question.job();
        set(case.now_us);
        if let Some(state) = &case.before {
            put(job, state);
        }
        let has = |reply: soloist::store::Reply<Vec<Option<State>>>| reply.value.into_iter().next();
        let observe = || async { store.observe(std::slice::from_ref(job)).await.map(has) };
        let before = observe().await.expect("a state that can be read");
        assert_eq!(before, Some(case.before.clone()), "{name}: before");
        let (answer, now_us) = ask(store, &case.question).await;
        assert_eq!(now_us, case.now_us, "{name}: the clock");
        assert_eq!(
            answer, case.answer,
            "{name}: the answer (left), to {:#?}",
            case.question
        );
        let after = observe().await.expect("a state that can be read");
        assert_eq!(
            after,
            Some(case.after.clone()),
            "{name}: the state after it (left)"
        );
        let records = store.records(job, 100).await.expect("records");
        // Newest first, and each run once.
        let with_token = |r: &RunRecord| RunRecord {
            fencing_token: (r.attempt > 0).then(|| r.occurrence.token(r.attempt)),
            ..r.clone()
        };
        let mut wanted: Vec<_> = case.effects.records.iter().rev().map(with_token).collect();
        let mut seen = std::collections::HashSet::new();
        wanted.retain(|r| r.run_id.is_none_or(|run| seen.insert(run)));
        assert_eq!(records, wanted, "{name}: the records (left)");
        for wanted in &case.effects.events {
            let hint = async {
                loop {
                    match events.recv().await.expect("hints") {
                        Event::Drain | Event::Gap => {}
                        other => return other,
                    }
                }
            };
            let heard = tokio::time::timeout(GENEROUS, hint).await;
            assert_eq!(heard.as_ref(), Ok(wanted), "{name}: a hint (left)");
        }
        asked += 1;
    }
    println!("{asked} cases asked of {}", store.address());
}

async fn ask(store: &dyn Store, question: &Question) -> (Answered, i64) {
    match question {
        Question::Claim(c) => {
            let reply = store
                .claim(std::slice::from_ref(c))
                .await
                .expect("an answer");
            let answer = reply.value.into_iter().next().expect("one answer");
            (Answered::Claim(answer), reply.now_us)
        }
        Question::Register(r) => {
            let reply = store
                .register(std::slice::from_ref(r))
                .await
                .expect("an answer");
            let (answer, _) = reply.value.into_iter().next().expect("one answer");
            (Answered::Register(answer), reply.now_us)
        }
        Question::Renew(r) => {
            let reply = store.renew(r).await.expect("an answer");
            (Answered::Renew(reply.value), reply.now_us)
        }
        Question::Settle(s) => {
            let reply = store.settle(s, &Tail::default()).await.expect("an answer");
            (Answered::Settle(reply.value), reply.now_us)
        }
        Question::Control(job, what) => {
            let reply = store.control(job, what).await.expect("an answer");
            (Answered::Control(reply.value), reply.now_us)
        }
    }
}

/// A clock that is set by hand.
fn by_hand() -> (Arc<AtomicI64>, soloist::store::Clock) {
    let time = Arc::new(AtomicI64::new(1_800_000_000_000_000));
    let clock = time.clone();
    (time, Arc::new(move || clock.load(Ordering::Relaxed)))
}

#[tokio::test]
async fn memory_answers_as_the_worlds_do() {
    let (time, clock) = by_hand();
    let store = MemoryStore::new_with_clock(clock);
    let reply = store.observe(&[]).await.expect("an answer");
    let put = |job: &JobName, state: &State| store.put(job, state.clone());
    let set = |us| time.store(us, Ordering::Relaxed);
    ask_all(&store, &reply.incarnation, put, set).await;
}

#[tokio::test]
async fn sqlite_answers_as_the_worlds_do() {
    let (time, clock) = by_hand();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("state.db");
    let store = SqliteStore::open_with_clock(&file, clock).expect("a store");
    let reply = store.observe(&[]).await.expect("an answer");
    let db = rusqlite::Connection::open(&file).expect("the file");
    let put = |job: &JobName, state: &State| {
        let state = serde_json::to_string(state).expect("JSON");
        db.execute(
            "INSERT INTO jobs (job, state) VALUES (?1, ?2)",
            [job.as_str(), &state],
        )
        .expect("a row");
    };
    let set = |us| time.store(us, Ordering::Relaxed);
    ask_all(&store, &reply.incarnation, put, set).await;
}

#[tokio::test]
async fn redis_answers_as_the_worlds_do() {
    let server = RedisServer::start_with_own_clock();
    let store = server.store();
    let reply = store.observe(&[]).await.expect("an answer");
    let connect = || redis::Client::open(server.url())?.get_connection();
    let connection = std::cell::RefCell::new(connect().expect("a connection"));
    let put = |job: &JobName, state: &State| {
        let mut set = redis::cmd("HSET");
        set.arg(store.place(job).split(' ').next_back());
        for (name, value) in fields(state) {
            set.arg(name).arg(value);
        }
        set.exec(&mut connection.borrow_mut()).expect("HSET");
    };
    ask_all(&store, &reply.incarnation, put, |us| server.stop_clock(us)).await;
}

/// The fields of a job's hash, as lua/lib.lua lists them. What is empty is absent, but for three numbers.
fn fields(state: &State) -> Vec<(String, String)> {
    let Value::Object(members) = serde_json::to_value(state).expect("JSON") else {
        panic!("a state is an object");
    };
    let mut fields: Vec<(String, String)> = members
        .into_iter()
        .map(|(name, value)| match value {
            Value::String(text) => (name, text),
            Value::Bool(_) => (name, "1".to_owned()),
            value => (name, value.to_string()),
        })
        .collect();
    if let Some(last) = &state.last {
        fields.push(("last_to".to_owned(), last.to.to_string()));
    }
    fields
}
