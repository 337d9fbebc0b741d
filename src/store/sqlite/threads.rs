//! The two threads: one writes, in transactions that many requests share; the other reads, and looks for the events of
//! other processes.

use std::{os::unix::fs::MetadataExt, path::PathBuf, sync::mpsc, time::Duration};

use rusqlite::Connection;
use tokio::sync::broadcast;

use super::{Fault, LOG, Request, Shared, file::LOCKED, millis};
use crate::{
    clock::{self, Boottime},
    logic::{
        belief,
        claim::{Effects, Event},
    },
    model::JobName,
    store::{Changed, DECISIONS_TTL, Error, FENCE_TTL, FORGET_INSTANCE, OUTPUT_TTL, RECORDS_TTL},
};

/// The most requests that share a transaction.
pub(super) const GROUP: usize = 256;

/// The time between two looks for other processes' events.
pub(super) const POLL: Duration = Duration::from_millis(20);

/// The same if no other process had an event for [`QUIET`]: most of the cost of a look is the wake-up. Writes alone do
/// not count, because each daemon writes a heartbeat every second.
pub(super) const POLL_QUIET: Duration = Duration::from_millis(100);

pub(super) const QUIET: Duration = Duration::from_secs(2);

/// Events are hints: one that is older than this no longer helps a process that has not seen it.
pub(super) const EVENTS_TTL: Duration = Duration::from_secs(10);

/// The time between two removals of old rows.
pub(super) const SWEEP: Duration = Duration::from_secs(10);

/// The most rows of one table that one removal takes.
pub(super) const SWEPT: usize = 1000;

/// A request. It gets the transaction, or the reason why there is none. The [`Finish`] that it returns answers it.
pub(super) type Work =
    Box<dyn FnOnce(Result<&mut Request<'_>, Error>) -> (Option<Error>, Finish) + Send>;

/// Answers a request. It gets the result of the commit.
pub(super) type Finish = Box<dyn FnOnce(&Result<(), Error>) + Send>;

/// Who listens for what happens.
#[derive(Clone)]
pub(super) struct Hints {
    pub(super) events: broadcast::Sender<Event>,
    pub(super) changes: broadcast::Sender<Changed>,
}

/// What the writes of one transaction tell.
#[derive(Default)]
pub(super) struct Happened {
    events: Vec<Event>,
    changed: Vec<JobName>,
}

/// How the table of events tells other processes of changed jobs. Earlier versions do not understand it, and pass over
/// it.
#[derive(serde::Serialize, serde::Deserialize)]
struct ChangedJobs {
    changed: Vec<JobName>,
}

pub(super) enum ReaderTask {
    Read(Box<dyn FnOnce(&Connection) + Send>),
    /// A listener for events exists now.
    Listen,
}

/// The writing thread, which ends with the store.
pub(super) fn write(
    db: &Connection,
    requests: &mpsc::Receiver<Work>,
    shared: &Shared,
    hints: &Hints,
) {
    let mut swept = Boottime(0);
    while let Ok(first) = requests.recv() {
        let mut group = std::collections::VecDeque::from([first]);
        while group.len() < GROUP
            && let Ok(next) = requests.try_recv()
        {
            group.push_back(next);
        }
        let mut finish = Vec::with_capacity(group.len());
        let mut happened = Happened::default();
        let outcome = transaction(
            db,
            shared,
            &mut group,
            &mut finish,
            &mut happened,
            &mut swept,
        );
        if let Err(e) = &outcome {
            if !db.is_autocommit() {
                let _ = db.execute_batch("ROLLBACK");
            }
            happened = Happened::default();
            for work in group {
                finish.push(work(Err(e.clone())).1);
            }
        }
        for event in happened.events {
            let _ = hints.events.send(event);
        }
        if !happened.changed.is_empty() {
            let _ = hints.changes.send(Changed::Jobs(happened.changed.into()));
        }
        for f in finish {
            f(&outcome);
        }
    }
}

/// Runs the whole group in one transaction. After an error, the requests that are left in `group` were not begun.
pub(super) fn transaction(
    db: &Connection,
    shared: &Shared,
    group: &mut std::collections::VecDeque<Work>,
    finish: &mut Vec<Finish>,
    happened: &mut Happened,
    swept: &mut Boottime,
) -> Result<(), Error> {
    let run = |sql: &str| {
        db.prepare_cached(sql)
            .and_then(|mut s| s.execute([]))
            .map(drop)
            .map_err(|e| Fault::Sql(e).at(&shared.address))
    };
    shared.same_files(db)?;
    run("BEGIN IMMEDIATE")?;
    LOCKED.set(None);
    while let Some(work) = group.pop_front() {
        let shown_us = (shared.clock)();
        let believed = shared.believed.get().and_then(|clock| clock.now_us());
        let doubted =
            believed.filter(|us| belief::in_doubt(us.div_euclid(1000), shown_us.div_euclid(1000)));
        let mut request = Request {
            db,
            now_us: doubted.unwrap_or(shown_us),
            shown_us,
            in_doubt: doubted.is_some(),
            incarnation: &shared.incarnation,
            effects: Effects::default(),
            changed: vec![],
        };
        // If one request fails, the others of its group must not fail too.
        if let Err(e) = run("SAVEPOINT request") {
            group.push_front(work);
            return Err(e);
        }
        let (failed, f) = work(Ok(&mut request));
        finish.push(f);
        match failed {
            None => {
                happened.events.append(&mut request.effects.events);
                happened.changed.append(&mut request.changed);
            }
            // Errors such as a full disk end the whole transaction.
            Some(e) if db.is_autocommit() => return Err(e),
            Some(_) => run("ROLLBACK TO request")?,
        }
        run("RELEASE request")?;
    }
    if !happened.changed.is_empty() {
        let now = (shared.clock)().div_euclid(1000);
        tell_changes(db, &shared.origin, now, &mut happened.changed)
            .map_err(|e| Fault::Sql(e).at(&shared.address))?;
    }
    let now = Boottime::now();
    if now.since(*swept) >= SWEEP {
        *swept = now;
        sweep(db, (shared.clock)() / 1000).map_err(|e| Fault::Sql(e).at(&shared.address))?;
    }
    run("COMMIT")
}

/// Tells other processes which jobs this transaction changes.
fn tell_changes(
    db: &Connection,
    origin: &str,
    now: i64,
    changed: &mut Vec<JobName>,
) -> rusqlite::Result<()> {
    changed.sort_unstable();
    changed.dedup();
    let told = ChangedJobs {
        changed: std::mem::take(changed),
    };
    let text = super::to_json(&told);
    *changed = told.changed;
    db.prepare_cached("INSERT INTO events (origin, at, event) VALUES (?1, ?2, ?3)")?
        .execute(rusqlite::params![origin, now, text])
        .map(drop)
}

/// Removes old rows. Their ids grow with time, so it finds the oldest without a search.
pub(super) fn sweep(db: &Connection, now: i64) -> rusqlite::Result<()> {
    let oldest = |table: &str| {
        format!("id IN (SELECT id FROM {table} ORDER BY id LIMIT {SWEPT}) AND at < ?1")
    };
    db.prepare_cached(&format!(
        "DELETE FROM pieces WHERE run IN (SELECT run FROM output WHERE {})",
        oldest("output")
    ))?
    .execute([now - millis(OUTPUT_TTL)])?;
    for (table, ttl) in [
        ("history", RECORDS_TTL),
        ("decisions", DECISIONS_TTL),
        ("output", OUTPUT_TTL),
        ("events", EVENTS_TTL),
    ] {
        db.prepare_cached(&format!("DELETE FROM {table} WHERE {}", oldest(table)))?
            .execute([now - millis(ttl)])?;
    }
    let gone = now - millis(FORGET_INSTANCE);
    // A drain lasts until it is taken back or its instance leaves. If the instance is forgotten, the drain is removed
    // only a while later, because a clock that jumps ahead for a moment makes a living instance look forgotten until
    // its next heartbeat. The order of these statements ensures that.
    db.prepare_cached(
        "UPDATE drains SET at = ?1 WHERE instance IN (SELECT instance FROM instances)",
    )?
    .execute([now])?;
    db.prepare_cached("DELETE FROM instances WHERE seen < ?1")?
        .execute([gone])?;
    db.prepare_cached(
        "DELETE FROM drains WHERE at < ?1 AND instance NOT IN (SELECT instance FROM instances)",
    )?
    .execute([gone])?;
    db.prepare_cached(
        "DELETE FROM drained_by WHERE instance NOT IN (SELECT instance FROM instances UNION SELECT instance FROM drains)",
    )?
    .execute([])?;
    db.prepare_cached("DELETE FROM locks WHERE abs(until) < ?1")?
        .execute([(now - millis(FENCE_TTL)) * 1000])?;
    Ok(())
}

/// The longest time between two looks, even if the log did not change: other processes see a commit only after the log
/// is synced, for which a busy disk may need long, but the log's time is that of the write before the sync.
pub(super) const POLL_ANYWAY: Duration = Duration::from_secs(1);

/// The reading thread. Between requests, and while a listener exists, it looks for other processes' events: those after
/// the event with the id `seen`.
pub(super) fn read(
    db: &Connection,
    looks: &mpsc::Receiver<ReaderTask>,
    shared: &Shared,
    hints: &Hints,
    mut seen: i64,
) {
    let mut written = Written {
        path: shared.files[LOG].1.clone(),
        last: None,
    };
    let mut active = Boottime::now();
    let mut polled = active;
    loop {
        let listened = hints.events.receiver_count() + hints.changes.receiver_count() > 0;
        let look = if listened {
            let quiet = Boottime::now().since(active) > QUIET;
            match looks.recv_timeout(if quiet { POLL_QUIET } else { POLL }) {
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
                other => other.ok(),
            }
        } else {
            match looks.recv() {
                Err(_) => return,
                Ok(look) => Some(look),
            }
        };
        match look {
            Some(ReaderTask::Read(f)) => f(db),
            // Do not report errors here: requests, which need more than hints, meet and report them too.
            Some(ReaderTask::Listen) | None => {
                let now = Boottime::now();
                if written.changed() || now.since(polled) > POLL_ANYWAY {
                    polled = now;
                    if let Ok(true) = poll(db, shared, hints, &mut seen) {
                        active = now;
                    }
                }
            }
        }
    }
}

/// Says whether a process wrote since the last call, by one look at the write-ahead log. SQLite's own answer (`PRAGMA
/// data_version`) takes locks, and costs a hundred times as much.
pub(super) struct Written {
    path: PathBuf,
    last: Option<(i64, i64, u64)>,
}

impl Written {
    fn changed(&mut self) -> bool {
        let now = std::fs::metadata(&self.path)
            .map(|m| (m.mtime(), m.mtime_nsec(), m.size()))
            .ok();
        let changed = now != self.last || now.is_none();
        self.last = now;
        // Two writes within some ms may get the same time, so look again if the last write is that recent.
        let fresh = now.is_some_and(|(s, ns, _)| {
            let age = clock::wall_us() - (s * 1_000_000 + ns / 1000);
            age.abs() < 2 * POLL_QUIET.as_micros() as i64
        });
        changed || fresh
    }
}

/// Delivers the events of other processes. True: there was one.
pub(super) fn poll(
    db: &Connection,
    shared: &Shared,
    hints: &Hints,
    seen: &mut i64,
) -> rusqlite::Result<bool> {
    let mut foreign = false;
    let mut rows =
        db.prepare_cached("SELECT id, origin, event FROM events WHERE id > ?1 ORDER BY id")?;
    let mut rows = rows.query([*seen])?;
    while let Some(row) = rows.next()? {
        *seen = row.get(0)?;
        // This process's own events were delivered when it wrote them.
        if row.get_ref(1)?.as_str()? == shared.origin {
            continue;
        }
        let text = row.get_ref(2)?.as_str()?;
        if let Ok(ChangedJobs { changed }) = serde_json::from_str(text) {
            let _ = hints.changes.send(Changed::Jobs(changed.into()));
            continue;
        }
        foreign = true;
        if let Ok(event) = serde_json::from_str(text) {
            let _ = hints.events.send(event);
        }
    }
    Ok(foreign)
}
