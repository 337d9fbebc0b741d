//! The store of one host: a SQLite file that several processes share. Runs the reference rules (logic::claim) on a
//! row for each job, each step in one `BEGIN IMMEDIATE` transaction that is on the disk before it is answered.
//!
//! One thread writes and one reads; both take their work from a channel. Whatever waits for the writer goes into one
//! transaction, so that the cost of a sync is shared. Nothing acknowledged is lost: there is one incarnation, the
//! id that the file was given when it was made.

use std::{
    collections::BTreeMap,
    ops::Range,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::Duration,
};

use async_trait::async_trait;
use rusqlite::{
    Connection, ErrorCode, OpenFlags, OptionalExtension, ToSql, TransactionBehavior, params,
};
use tokio::sync::{broadcast, oneshot};

use super::{
    Beat, Clock, DECISIONS_KEPT, DECISIONS_TTL, Decision, Error, FENCE_TTL, FORGET_INSTANCE, Fleet,
    HISTORY_KEPT, Info, LAST_BYTE, LINE_MOST, OUTPUT_TTL, Output, RECORDS_TTL, Reply, STATE_MOST,
    Store, Tail, fill,
    output::{Extent, Pieces},
    readable, tidy,
};
use crate::{
    clock::{self, Boottime, StoreClock},
    logic::{
        belief,
        claim::{
            self, Answer, Claim, Control, Controlled, Effects, Event, Register, Registration,
            Renew, Renewal, Settle, Settlement, State,
        },
    },
    model::{InstanceId, JobName, RunId, RunRecord, possible_ms},
};

/// Version of the tables below. The first kept output in another form.
const SCHEMA: i64 = 2;
/// Says in the file's header that it is ours ("solo").
const APPLICATION: i64 = 0x736f_6c6f;
const TABLES: &str = "
CREATE TABLE meta (key TEXT PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;
CREATE TABLE jobs (job TEXT PRIMARY KEY, state TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE history (id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, run TEXT, at INTEGER NOT NULL,
    record TEXT NOT NULL) STRICT;
CREATE INDEX history_job ON history (job, id);
CREATE TABLE decisions (id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, at INTEGER NOT NULL,
    decision TEXT NOT NULL) STRICT;
CREATE INDEX decisions_job ON decisions (job, id);
CREATE TABLE instances (instance TEXT PRIMARY KEY, seen INTEGER NOT NULL, info TEXT NOT NULL) STRICT;
CREATE TABLE drains (instance TEXT PRIMARY KEY, at INTEGER NOT NULL) STRICT;
CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, origin TEXT NOT NULL, at INTEGER NOT NULL,
    event TEXT NOT NULL) STRICT;
";

/// See src/store/output.rs; `at` is when it was changed last.
const OUTPUT: &str = "
CREATE TABLE output (id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL UNIQUE, at INTEGER NOT NULL,
    start INTEGER NOT NULL, base INTEGER NOT NULL, stop INTEGER NOT NULL, done INTEGER NOT NULL, total INTEGER,
    patience INTEGER) STRICT;
CREATE TABLE pieces (run TEXT NOT NULL, n INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (run, n)) STRICT;
CREATE TRIGGER output_gone AFTER DELETE ON output BEGIN DELETE FROM pieces WHERE run = old.run; END;
";

/// Of the library (src/lock/sqlite.rs). Files that were made before there were locks get it too.
const LOCKS: &str = "
CREATE TABLE IF NOT EXISTS locks (key TEXT PRIMARY KEY, owner TEXT NOT NULL, count INTEGER, nonce TEXT,
    token INTEGER NOT NULL, until INTEGER NOT NULL) STRICT, WITHOUT ROWID;
";

/// How long one process waits for another one's transaction.
const BUSY: Duration = Duration::from_secs(5);
/// Requests that share a transaction.
const GROUP: usize = 256;
/// How often other processes' events are looked for.
const POLL: Duration = Duration::from_millis(20);
/// The same when nobody has written for [`QUIET`]: most of what a look costs is to wake up for it.
const POLL_QUIET: Duration = Duration::from_millis(100);
const QUIET: Duration = Duration::from_secs(2);
/// Events are hints: one that nobody saw within this time helps nobody.
const EVENTS_TTL: Duration = Duration::from_secs(10);
/// Time between two looks for what is too old, and rows of a table that one look removes at most.
const SWEEP: Duration = Duration::from_secs(10);
const SWEPT: usize = 1000;

pub struct SqliteStore {
    shared: Arc<Shared>,
    writer: mpsc::Sender<Work>,
    reader: mpsc::Sender<ReaderTask>,
    events: broadcast::Sender<Event>,
}

/// What both threads know.
struct Shared {
    address: String,
    path: PathBuf,
    /// Device and inode of the file that was opened.
    file: (u64, u64),
    incarnation: Arc<str>,
    /// Names this handle in the table of events.
    origin: String,
    clock: Clock,
    /// What the daemon believes of that clock.
    believed: OnceLock<Arc<StoreClock>>,
    /// That is this host's wall clock.
    local_clock: bool,
}

/// One request inside its transaction.
pub(crate) struct Step<'a> {
    pub(crate) db: &'a Connection,
    /// The time of what this step decides and writes.
    pub(crate) now_us: i64,
    /// What the clock shows; another time than `now_us` only while it is in doubt.
    shown_us: i64,
    in_doubt: bool,
    incarnation: &'a str,
    pub(crate) effects: Effects,
}

/// A request; it gets the reason if there is no transaction for it. Its answer is given by [`Finish`].
type Work = Box<dyn FnOnce(Result<&mut Step<'_>, Error>) -> (Option<Error>, Finish) + Send>;
/// Answers a request, once it is known whether the transaction was committed.
type Finish = Box<dyn FnOnce(&Result<(), Error>) + Send>;

enum ReaderTask {
    Read(Box<dyn FnOnce(&Connection) + Send>),
    /// Somebody listens to events now.
    Listen,
}

/// Why a request failed inside.
pub(crate) enum Fault {
    Sql(rusqlite::Error),
    /// What is stored does not read as what it should be.
    Data(String),
}

impl From<rusqlite::Error> for Fault {
    fn from(e: rusqlite::Error) -> Self {
        Self::Sql(e)
    }
}

impl SqliteStore {
    /// Opens the file, and makes it if it is not there. Its directory has to exist, on a local disk.
    ///
    /// # Errors
    /// A missing directory, a network file system, a file that cannot be written, is none of ours, is damaged, or
    /// was made by a newer version.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_by(path, Arc::new(clock::wall_us), true)
    }

    /// As [`SqliteStore::open`]; `clock` is the store's clock.
    ///
    /// # Errors
    /// As those of [`SqliteStore::open`].
    pub fn open_with_clock(path: &Path, clock: Clock) -> Result<Self, Error> {
        Self::open_by(path, clock, false)
    }

    fn open_by(path: &Path, clock: Clock, local_clock: bool) -> Result<Self, Error> {
        let address = format!("sqlite:{}", path.display());
        let refuse = |reason: String| Error::Refused {
            address: address.clone(),
            reason,
        };
        let directory = match path.parent() {
            Some(d) if d.as_os_str().is_empty() => Path::new("."),
            Some(d) => d,
            None => return Err(refuse("it is a directory; name a file".to_owned())),
        };
        if !directory.is_dir() {
            return Err(refuse(format!(
                "the directory {} does not exist; create it, writable for the user that soloist runs as",
                directory.display()
            )));
        }
        if path.is_dir() {
            return Err(refuse("it is a directory; name a file in it".to_owned()));
        }
        // The file may be a link, or a mount of its own.
        let on = if path.exists() { path } else { directory };
        let fs = rustix::fs::statfs(on)
            .map_err(|e| refuse(format!("cannot ask for the file system: {e}")))?;
        if let Some(name) = network(fs.f_type as u64) {
            return Err(refuse(format!(
                "it is on a network file system ({name}), where locks and shared memory are not reliable; \
                 put it on a local disk, or use Redis for several hosts"
            )));
        }
        crate::config::rights::database(path)
            .map_err(|f| refuse(format!("{}: {}", f.message, f.fix)))?;
        let db = connect(path)
            .and_then(|db| prepare(&db, clock()).map(|()| db))
            .map_err(|e| e.at(&address))?;
        let incarnation: String = db
            .query_row("SELECT value FROM meta WHERE key = 'uuid'", [], |r| {
                r.get(0)
            })
            .map_err(|e| Fault::Sql(e).at(&address))?;
        let look = connect(path).map_err(|e| e.at(&address))?;
        // The name of a new file has to survive a power cut as its content does.
        std::fs::File::open(directory)
            .and_then(|d| d.sync_all())
            .map_err(|e| refuse(format!("cannot sync {}: {e}", directory.display())))?;
        let file = std::fs::metadata(path)
            .map(|m| (m.dev(), m.ino()))
            .map_err(|e| refuse(format!("cannot look at it: {e}")))?;
        let shared = Arc::new(Shared {
            address: address.clone(),
            path: path.to_owned(),
            file,
            incarnation: incarnation.into(),
            origin: RunId::random().to_string(),
            clock,
            believed: OnceLock::new(),
            local_clock,
        });
        let events = broadcast::channel(super::HINTS).0;
        let (writer, requests) = mpsc::channel();
        let (reader, looks) = mpsc::channel();
        let spawn = |name: &str, f: Box<dyn FnOnce() + Send>| {
            thread::Builder::new()
                .name(name.to_owned())
                .spawn(f)
                .map_err(|e| Error::Unreachable {
                    address: address.clone(),
                    reason: format!("cannot start a thread: {e}"),
                })
        };
        let (s, e) = (shared.clone(), events.clone());
        spawn(
            "sqlite-write",
            Box::new(move || write(&db, &requests, &s, &e)),
        )?;
        let (s, e) = (shared.clone(), events.clone());
        spawn("sqlite-read", Box::new(move || read(&look, &looks, &s, &e)))?;
        Ok(Self {
            shared,
            writer,
            reader,
            events,
        })
    }

    /// Runs `f` in a transaction; answers when it is on the disk.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Step<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<Reply<T>, Error> {
        let (answer, answered) = oneshot::channel();
        let shared = self.shared.clone();
        let work: Work = Box::new(move |step| {
            let out = step.and_then(|step| {
                // Nobody sees what is written before the commit: trust may count from here, and not from when this was put into
                // the queue, which another process may hold up.
                let sent = Boottime::now();
                f(step)
                    .and_then(|value| step.write_effects(&shared.origin).map(|()| value))
                    .map(|value| (value, step.shown_us, sent))
                    .map_err(|e| e.at(&shared.address))
            });
            let failed = out.as_ref().err().cloned();
            let finish: Finish = Box::new(move |committed| {
                let _ = answer.send(match committed {
                    Ok(()) => out,
                    Err(e) => Err(e.clone()),
                });
            });
            (failed, finish)
        });
        self.writer.send(work).map_err(|_| self.dead())?;
        let (value, now_us, sent) = answered.await.map_err(|_| self.dead())??;
        Ok(self.reply(value, now_us, sent))
    }

    pub(crate) async fn read<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Connection) -> Result<T, Fault> + Send + 'static,
    ) -> Result<Reply<T>, Error> {
        let (answer, answered) = oneshot::channel();
        let shared = self.shared.clone();
        let look = ReaderTask::Read(Box::new(move |db| {
            let sent = Boottime::now();
            let out = shared
                .same_file()
                .and_then(|()| f(db).map_err(|e| e.at(&shared.address)));
            let _ = answer.send(out.map(|value| (value, (shared.clock)(), sent)));
        }));
        self.reader.send(look).map_err(|_| self.dead())?;
        let (value, now_us, sent) = answered.await.map_err(|_| self.dead())??;
        Ok(self.reply(value, now_us, sent))
    }

    fn reply<T>(&self, value: T, now_us: i64, sent: Boottime) -> Reply<T> {
        Reply {
            value,
            now_us,
            incarnation: self.shared.incarnation.clone(),
            sent,
            received: Boottime::now(),
        }
    }

    fn dead(&self) -> Error {
        Error::Unreachable {
            address: self.shared.address.clone(),
            reason: "the thread that uses the database has ended; restart soloist".to_owned(),
        }
    }
}

/// The writing thread; ends with the store.
fn write(
    db: &Connection,
    requests: &mpsc::Receiver<Work>,
    shared: &Shared,
    events: &broadcast::Sender<Event>,
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
        let mut happened = vec![];
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
            happened.clear();
            for work in group {
                finish.push(work(Err(e.clone())).1);
            }
        }
        for event in happened {
            let _ = events.send(event);
        }
        for f in finish {
            f(&outcome);
        }
    }
}

/// Runs the whole group in one transaction. What is left in `group` after an error was not begun.
fn transaction(
    db: &Connection,
    shared: &Shared,
    group: &mut std::collections::VecDeque<Work>,
    finish: &mut Vec<Finish>,
    happened: &mut Vec<Event>,
    swept: &mut Boottime,
) -> Result<(), Error> {
    let run = |sql: &str| {
        db.prepare_cached(sql)
            .and_then(|mut s| s.execute([]))
            .map(drop)
            .map_err(|e| Fault::Sql(e).at(&shared.address))
    };
    shared.same_file()?;
    run("BEGIN IMMEDIATE")?;
    while let Some(work) = group.pop_front() {
        let shown_us = (shared.clock)();
        let believed = shared.believed.get().and_then(|clock| clock.now_us());
        let doubted =
            believed.filter(|us| belief::in_doubt(us.div_euclid(1000), shown_us.div_euclid(1000)));
        let mut step = Step {
            db,
            now_us: doubted.unwrap_or(shown_us),
            shown_us,
            in_doubt: doubted.is_some(),
            incarnation: &shared.incarnation,
            effects: Effects::default(),
        };
        // One request that fails must not take the others of its group with it.
        if let Err(e) = run("SAVEPOINT request") {
            group.push_front(work);
            return Err(e);
        }
        let (failed, f) = work(Ok(&mut step));
        finish.push(f);
        match failed {
            None => happened.append(&mut step.effects.events),
            // A full disk and the like end the whole transaction.
            Some(e) if db.is_autocommit() => return Err(e),
            Some(_) => run("ROLLBACK TO request")?,
        }
        run("RELEASE request")?;
    }
    let now = Boottime::now();
    if now.since(*swept) >= SWEEP {
        *swept = now;
        sweep(db, (shared.clock)() / 1000).map_err(|e| Fault::Sql(e).at(&shared.address))?;
    }
    run("COMMIT")
}

/// Removes what is too old. Rows are numbered in the order of time, so the oldest are found without a search.
fn sweep(db: &Connection, now: i64) -> rusqlite::Result<()> {
    for (table, ttl) in [
        ("history", RECORDS_TTL),
        ("decisions", DECISIONS_TTL),
        ("output", OUTPUT_TTL),
        ("events", EVENTS_TTL),
    ] {
        db.prepare_cached(&format!(
            "DELETE FROM {table} WHERE id IN (SELECT id FROM {table} ORDER BY id LIMIT {SWEPT}) AND at < ?1"
        ))?
        .execute([now - millis(ttl)])?;
    }
    let gone = now - millis(FORGET_INSTANCE);
    // A drain lasts until it is taken back or its instance leaves; it goes a while after an instance that was forgotten.
    // In this order: a clock that jumps ahead for a moment makes a living instance look forgotten, until its next heartbeat.
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
    db.prepare_cached("DELETE FROM locks WHERE abs(until) < ?1")?
        .execute([(now - millis(FENCE_TTL)) * 1000])?;
    Ok(())
}

/// A commit is seen by others only after the log was synced, which a busy disk may take long for; the log's time is
/// that of the write before it.
const POLL_ANYWAY: Duration = Duration::from_secs(1);

/// The reading thread; between requests it looks for other processes' events, as long as somebody listens.
fn read(
    db: &Connection,
    looks: &mpsc::Receiver<ReaderTask>,
    shared: &Shared,
    events: &broadcast::Sender<Event>,
) {
    let mut seen: i64 = db
        .query_row("SELECT coalesce(max(id), 0) FROM events", [], |r| r.get(0))
        .unwrap_or(0);
    let mut written = Written {
        path: log_of(&shared.path),
        last: None,
    };
    let mut active = Boottime::now();
    let mut polled = active;
    loop {
        let look = if events.receiver_count() > 0 {
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
            // Nothing is said of errors here: whoever asks for more than hints meets them too.
            Some(ReaderTask::Listen) | None => {
                let now = Boottime::now();
                let changed = written.changed();
                if changed {
                    active = now;
                }
                if changed || now.since(polled) > POLL_ANYWAY {
                    polled = now;
                    let _ = poll(db, shared, events, &mut seen);
                }
            }
        }
    }
}

/// Tells whether anybody wrote since it was asked last, by one look at the write-ahead log: SQLite's own answer
/// (`PRAGMA data_version`) takes locks, and costs a hundred times as much.
struct Written {
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
        // A file's time may stand still for some ms: what is that fresh is looked at once more.
        let fresh = now.is_some_and(|(s, ns, _)| {
            let age = clock::wall_us() - (s * 1_000_000 + ns / 1000);
            age.abs() < 2 * POLL_QUIET.as_micros() as i64
        });
        changed || fresh
    }
}

/// Where SQLite logs what is written to the database at `path`.
fn log_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

fn poll(
    db: &Connection,
    shared: &Shared,
    events: &broadcast::Sender<Event>,
    seen: &mut i64,
) -> rusqlite::Result<()> {
    let mut rows =
        db.prepare_cached("SELECT id, origin, event FROM events WHERE id > ?1 ORDER BY id")?;
    let mut rows = rows.query([*seen])?;
    while let Some(row) = rows.next()? {
        *seen = row.get(0)?;
        // Our own were delivered when they were written.
        if row.get_ref(1)?.as_str()? != shared.origin
            && let Ok(event) = serde_json::from_str(row.get_ref(2)?.as_str()?)
        {
            let _ = events.send(event);
        }
    }
    Ok(())
}

impl Shared {
    /// A file that was replaced or removed under us would let two fleets decide the same occurrences.
    fn same_file(&self) -> Result<(), Error> {
        let reason = match std::fs::metadata(&self.path) {
            Ok(m) if (m.dev(), m.ino()) == self.file => return Ok(()),
            Ok(_) => {
                "the file was replaced by another while it was in use; restart soloist to use it"
                    .to_owned()
            }
            Err(e) => format!("the file is gone ({e}); put it back or restart soloist"),
        };
        Err(Error::Refused {
            address: self.address.clone(),
            reason,
        })
    }
}

impl Step<'_> {
    fn now(&self) -> i64 {
        self.now_us.div_euclid(1000)
    }

    /// Runs `f` on the state of `job` and keeps what it leaves.
    fn with<T>(
        &mut self,
        job: &JobName,
        f: impl FnOnce(&mut Option<State>, i64, &str, &mut Effects) -> T,
    ) -> Result<(T, Option<State>), Fault> {
        let before = state(self.db, job)?;
        let mut after = before.clone();
        let out = f(&mut after, self.now_us, self.incarnation, &mut self.effects);
        if let Some(st) = after.as_ref().filter(|_| after != before) {
            self.execute(
                "INSERT INTO jobs (job, state) VALUES (?1, ?2) ON CONFLICT (job) DO UPDATE SET state = ?2",
                &[&job.as_str(), &to_json(st)],
            )?;
        }
        Ok((out, after))
    }

    pub(crate) fn execute(&self, sql: &str, values: &[&dyn ToSql]) -> Result<usize, Fault> {
        Ok(self.db.prepare_cached(sql)?.execute(values)?)
    }

    fn save(&self, run: RunId, extent: &Extent) -> Result<(), Fault> {
        let (total, patience) = extent.rest.map(|(n, until)| (n as i64, until)).unzip();
        self.execute(
            "INSERT INTO output (run, at, start, base, stop, done, total, patience) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT (run) DO UPDATE SET \
             at = ?2, start = ?3, base = ?4, stop = ?5, done = ?6, total = ?7, patience = ?8",
            &[
                &run.to_string(),
                &self.now(),
                &(extent.start as i64),
                &(extent.base as i64),
                &(extent.stop as i64),
                &extent.done,
                &total,
                &patience,
            ],
        )?;
        Ok(())
    }

    /// Writes down what the rules left to be done.
    fn write_effects(&self, origin: &str) -> Result<(), Fault> {
        let now = self.now();
        for r in &self.effects.records {
            let job = r.job.as_str();
            let stored = RunRecord {
                fencing_token: None,
                output_tail: String::new(),
                ..r.clone()
            };
            self.execute(
                "INSERT INTO history (job, run, at, record) VALUES (?1, ?2, ?3, ?4)",
                &[
                    &job,
                    &r.run_id.map(|r| r.to_string()),
                    &now,
                    &to_json(&stored),
                ],
            )?;
            let mut old = self.db.prepare_cached(
                "DELETE FROM history WHERE job = ?1 AND id <= (SELECT id FROM history WHERE job = ?1 \
                 ORDER BY id DESC LIMIT 1 OFFSET ?2) RETURNING run",
            )?;
            let old: Vec<Option<String>> = old
                .query_map(params![job, HISTORY_KEPT as i64], |r| r.get(0))?
                .collect::<Result<_, _>>()?;
            for run in old.into_iter().flatten() {
                self.execute("DELETE FROM output WHERE run = ?1", &[&run])?;
            }
        }
        for event in &self.effects.events {
            self.execute(
                "INSERT INTO events (origin, at, event) VALUES (?1, ?2, ?3)",
                &[&origin, &now, &to_json(event)],
            )?;
        }
        Ok(())
    }
}

fn place(job: &JobName) -> String {
    format!("the row `{job}` of the table `jobs`")
}

fn state(db: &Connection, job: &JobName) -> Result<Option<State>, Fault> {
    let unreadable = |e: &dyn std::fmt::Display| Fault::Data(format!("{}: {e}", place(job)));
    let mut rows = db.prepare_cached("SELECT state FROM jobs WHERE job = ?1")?;
    let mut rows = rows.query([job.as_str()])?;
    let Some(row) = rows.next()? else {
        return Ok(None);
    };
    let text = row.get_ref(0)?.as_str().map_err(|e| unreadable(&e))?;
    match text.len() {
        ..=STATE_MOST => serde_json::from_str(text)
            .map(Some)
            .map_err(|e| unreadable(&e)),
        n => Err(unreadable(&format!("it has {n} bytes"))),
    }
}

fn extent(db: &Connection, run: RunId) -> Result<Option<Extent>, Fault> {
    let extent = db
        .prepare_cached(
            "SELECT start, base, stop, done, total, patience FROM output WHERE run = ?1",
        )?
        .query_row([run.to_string()], |r| {
            let byte = |i: usize| r.get::<_, i64>(i).map(|n| n as u64);
            let total: Option<i64> = r.get(4)?;
            let patience: Option<i64> = r.get(5)?;
            Ok(Extent {
                start: byte(0)?,
                base: byte(1)?,
                stop: byte(2)?,
                done: r.get(3)?,
                rest: total
                    .zip(patience)
                    .map(|(total, until)| (total as u64, until)),
            })
        })
        .optional()?;
    match extent {
        Some(k) if k.start > k.base || k.base > k.stop || k.stop > LAST_BYTE => {
            Err(Fault::Data(format!(
                "the output of run {run} cannot reach from {} to {}",
                k.base, k.stop
            )))
        }
        extent => Ok(extent),
    }
}

/// The pieces of one run's output.
struct PiecesOf<'a> {
    db: &'a Connection,
    run: String,
}

impl Pieces for PiecesOf<'_> {
    type Error = Fault;
    fn get(&self, n: u64) -> Result<Vec<u8>, Fault> {
        let data = self
            .db
            .prepare_cached("SELECT data FROM pieces WHERE run = ?1 AND n = ?2")?
            .query_row(params![self.run, n as i64], |r| r.get(0))
            .optional()?;
        Ok(data.unwrap_or_default())
    }
    fn put(&mut self, n: u64, data: &[u8]) -> Result<(), Fault> {
        self.db
            .prepare_cached(
                "INSERT INTO pieces (run, n, data) VALUES (?1, ?2, ?3) ON CONFLICT (run, n) DO UPDATE SET data = ?3",
            )?
            .execute(params![self.run, n as i64, data])?;
        Ok(())
    }
    fn remove(&mut self, which: Range<u64>) -> Result<(), Fault> {
        self.db
            .prepare_cached("DELETE FROM pieces WHERE run = ?1 AND n >= ?2 AND n < ?3")?
            .execute(params![self.run, which.start as i64, which.end as i64])?;
        Ok(())
    }
}

/// The first column of each row, where it is a text: no soloist writes anything else.
fn names(mut rows: rusqlite::Rows<'_>) -> Result<Vec<String>, Fault> {
    let mut names = vec![];
    while let Some(row) = rows.next()? {
        names.extend(row.get::<_, String>(0));
    }
    Ok(names)
}

fn fleet(db: &Connection) -> Result<Fleet, Fault> {
    let meta = |key: &str| -> Result<i64, Fault> {
        Ok(db
            .prepare_cached("SELECT value FROM meta WHERE key = ?1")?
            .query_row([key], |r| r.get(0))?)
    };
    let mut instances = BTreeMap::new();
    let mut rows = db.prepare_cached("SELECT instance, seen, info FROM instances")?;
    let mut rows = rows.query([])?;
    while let Some(row) = rows.next()? {
        // Another version's idea of an instance is no reason to stop.
        if let Ok(info) = serde_json::from_str::<Info>(row.get_ref(2)?.as_str().unwrap_or("")) {
            let (Ok(id), Some(seen)) = (row.get::<_, String>(0), row.get(1).ok()) else {
                continue;
            };
            if let Ok(seen) = possible_ms(seen) {
                instances.insert(InstanceId::new(&id), Info { seen, ..info });
            }
        }
    }
    let mut drains = db.prepare_cached("SELECT instance FROM drains ORDER BY instance")?;
    let drains = names(drains.query([])?)?;
    let drains = drains.iter().map(|id| InstanceId::new(id)).collect();
    Ok(Fleet {
        // The file is the epoch.
        id: "file".into(),
        before: None,
        born: meta("born")?,
        quarantine: Duration::from_millis(meta("quarantine")?.max(0) as u64),
        open: true,
        instances,
        drains,
    })
}

fn connect(path: &Path) -> Result<Connection, Fault> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // Whoever can read it can lock it. SQLite gives what it makes beside it the same mode. Never opened by us when it is
    // there: to close a file takes this process's locks on it away.
    let made = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    drop(made);
    let mut db = Connection::open_with_flags(path, flags)?;
    // SQLite's own waiting grows to 100 ms a try, so that one process can be starved by the others.
    db.busy_handler(Some(|tries| {
        thread::sleep(Duration::from_millis(1));
        tries < BUSY.as_millis() as i32
    }))?;
    db.set_prepared_statement_cache_capacity(64);
    // The cache: KiB, a quarter of what each connection would keep for good after it read or wrote all jobs once. What
    // is not in it is in the system's.
    db.execute_batch(
        "PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -512",
    )?;
    Ok(db)
}

/// The mode of a file that others than its user may open.
pub fn open_to_others(path: &Path) -> Option<u32> {
    let mode = std::fs::metadata(path).ok()?.mode() & 0o777;
    (mode & 0o077 != 0).then_some(mode)
}

/// Makes the tables of a new file, and checks that an old one is ours and of a version we know.
fn prepare(db: &Connection, now_us: i64) -> Result<(), Fault> {
    let pragma = |name: &str| db.query_row(&format!("PRAGMA {name}"), [], |r| r.get::<_, i64>(0));
    // Before anything is written: a file of somebody else's stays as it is. In one snapshot, as another process may
    // be making the tables just now.
    let tx = rusqlite::Transaction::new_unchecked(db, TransactionBehavior::Deferred)?;
    let tables: i64 = tx.query_row("SELECT count(*) FROM sqlite_schema", [], |r| r.get(0))?;
    if tables > 0 && pragma("application_id")? != APPLICATION {
        return Err(Fault::Data(
            "it is a database of another program; name another file".to_owned(),
        ));
    }
    tx.commit()?;
    // While several processes do this to a new file, the loser's attempt fails at once instead of waiting.
    let began = Boottime::now();
    loop {
        match db.query_row("PRAGMA journal_mode = WAL", [], |r| r.get::<_, String>(0)) {
            Ok(mode) if mode == "wal" => break,
            Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {
                if Boottime::now().since(began) > BUSY {
                    return Err(e.into());
                }
                thread::sleep(Duration::from_millis(2));
            }
            Ok(mode) => {
                return Err(Fault::Data(format!(
                    "its journal mode is {mode} and cannot be changed to WAL"
                )));
            }
            Err(e) => return Err(e.into()),
        }
    }
    let tx = rusqlite::Transaction::new_unchecked(db, TransactionBehavior::Immediate)?;
    match pragma("user_version")? {
        0 => {
            tx.execute_batch(TABLES)?;
            tx.execute_batch(OUTPUT)?;
            tx.execute(
                "INSERT INTO meta (key, value) VALUES ('uuid', ?1), ('born', ?2), ('quarantine', 0)",
                params![format!("sqlite-{}", RunId::random()), now_us.div_euclid(1000)],
            )?;
            tx.pragma_update(None, "application_id", APPLICATION)?;
            tx.pragma_update(None, "user_version", SCHEMA)?;
        }
        1 => {
            tx.execute_batch("DROP TABLE output")?;
            tx.execute_batch(OUTPUT)?;
            tx.pragma_update(None, "user_version", SCHEMA)?;
        }
        SCHEMA => {}
        newer => {
            return Err(Fault::Data(format!(
                "it was made by a newer soloist (its tables have version {newer}, this program knows {SCHEMA}); \
                 update soloist here"
            )));
        }
    }
    tx.execute_batch(LOCKS)?;
    tx.commit()?;
    Ok(())
}

impl Fault {
    fn at(self, address: &str) -> Error {
        let address = address.to_owned();
        let e = match self {
            Self::Data(reason) => return Error::Corrupt { address, reason },
            Self::Sql(e) => e,
        };
        let refused = |reason: String| Error::Refused {
            address: address.clone(),
            reason,
        };
        match e.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Error::Unreachable {
                reason: format!("another process has locked it for longer than {BUSY:?}"),
                address,
            },
            Some(ErrorCode::DiskFull) => {
                refused(format!("the disk is full; free some space ({e})"))
            }
            Some(
                ErrorCode::ReadOnly
                | ErrorCode::PermissionDenied
                | ErrorCode::CannotOpen
                | ErrorCode::AuthorizationForStatementDenied,
            ) => refused(format!(
                "it cannot be written; the file and its directory must be writable for the user that soloist \
                 runs as ({e})"
            )),
            // Whether the transaction reached the disk is not known.
            Some(ErrorCode::SystemIoFailure) => Error::Unreachable {
                reason: format!("the disk failed ({e})"),
                address,
            },
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Error::Corrupt {
                reason: format!(
                    "the file is damaged or no database; restore it, or move it away to begin anew ({e})"
                ),
                address,
            },
            // A value of another type than was written.
            None if !matches!(e, rusqlite::Error::SqliteFailure(..)) => Error::Corrupt {
                reason: e.to_string(),
                address,
            },
            _ => refused(e.to_string()),
        }
    }
}

/// Name of a file system that is shared over a network, by its magic number (statfs).
fn network(magic: u64) -> Option<&'static str> {
    Some(match magic & 0xffff_ffff {
        0x6969 => "NFS",
        0x517b | 0xfe53_4d42 => "SMB",
        0xff53_4d42 => "CIFS",
        0x00c3_6400 => "CephFS",
        0x0102_1997 => "9p",
        0x5346_414f | 0x6b41_4653 => "AFS",
        0x7375_7245 => "Coda",
        0x564c => "NCP",
        0x0bd0_0bd0 => "Lustre",
        0x4750_4653 => "GPFS",
        0x1983_0326 => "BeeGFS",
        0x7461_636f => "OCFS2",
        0x0116_1970 => "GFS2",
        0x786f_4256 => "a virtual machine's shared folder",
        _ => return None,
    })
}

fn millis(d: Duration) -> i64 {
    i64::try_from(d.as_millis()).unwrap_or(i64::MAX)
}

fn to_json<T: serde::Serialize>(v: &T) -> String {
    // Our own types: strings, numbers and lists of them.
    serde_json::to_string(v).unwrap_or_default()
}

#[async_trait]
impl Store for SqliteStore {
    fn address(&self) -> &str {
        &self.shared.address
    }
    fn place(&self, job: &JobName) -> String {
        place(job)
    }
    fn durable(&self) -> bool {
        true
    }
    fn believe(&self, clock: Arc<StoreClock>) {
        let _ = self.shared.believed.set(clock);
    }
    fn local_clock(&self) -> bool {
        self.shared.local_clock
    }

    async fn claim(&self, claims: &[Claim]) -> Result<Reply<Vec<Answer>>, Error> {
        let claims = claims.to_vec();
        self.write(move |s| {
            if s.in_doubt {
                return Ok(claims.iter().map(|_| Answer::InDoubt).collect());
            }
            claims
                .iter()
                .map(|c| {
                    s.with(&c.job, |st, now, incarnation, effects| {
                        claim::claim(st, c, now, incarnation, effects)
                    })
                    .map(|(answer, _)| answer)
                })
                .collect()
        })
        .await
    }

    async fn renew(&self, r: &Renew) -> Result<Reply<Renewal>, Error> {
        let r = r.clone();
        self.write(move |s| {
            s.with(&r.job, |st, now, incarnation, _| {
                claim::renew(st, &r, now, incarnation)
            })
            .map(|(renewal, _)| renewal)
        })
        .await
    }

    async fn settle(&self, settle: &Settle, output: &Tail) -> Result<Reply<Settlement>, Error> {
        let (settle, output) = (settle.clone(), output.clone());
        self.write(move |s| {
            let before = s.effects.records.len();
            let (out, _) = s.with(&settle.record.job, |st, now, incarnation, effects| {
                claim::settle(st, &settle, now, incarnation, effects)
            })?;
            // Nothing recorded: this settlement was made before.
            if s.effects.records.len() > before {
                let was = extent(s.db, settle.run)?;
                let (db, now) = (s.db, s.now());
                let run = settle.run.to_string();
                if let Some(extent) = Extent::settle(was, &mut PiecesOf { db, run }, &output, now)?
                {
                    s.save(settle.run, &extent)?;
                }
            }
            Ok(out)
        })
        .await
    }

    async fn register(
        &self,
        jobs: &[Register],
    ) -> Result<Reply<Vec<(Registration, Option<State>)>>, Error> {
        let jobs = jobs.to_vec();
        self.write(move |s| {
            if s.in_doubt {
                let none = jobs.iter().map(|_| (Registration::Quarantined, None));
                return Ok(none.collect());
            }
            jobs.iter()
                .map(|r| {
                    s.with(&r.job, |st, now, incarnation, effects| {
                        claim::register(st, r, now, incarnation, effects)
                    })
                })
                .collect()
        })
        .await
    }

    async fn control(&self, job: &JobName, what: &Control) -> Result<Reply<Controlled>, Error> {
        let (job, what) = (job.clone(), what.clone());
        self.write(move |s| {
            s.with(&job, |st, now, _, effects| {
                claim::control(st, &job, &what, now, effects)
            })
            .map(|(answer, _)| answer)
        })
        .await
    }

    async fn jobs(&self) -> Result<Vec<JobName>, Error> {
        let all = self
            .read(|db| {
                let mut jobs = db.prepare_cached("SELECT job FROM jobs")?;
                names(jobs.query([])?)
            })
            .await?;
        Ok(all.value.iter().map(|name| JobName::new(name)).collect())
    }

    async fn observe(&self, jobs: &[JobName]) -> Result<Reply<Vec<Option<State>>>, Error> {
        let jobs = jobs.to_vec();
        self.read(move |db| jobs.iter().map(|j| state(db, j)).collect())
            .await
    }

    async fn heartbeat(&self, beat: Option<&Beat>) -> Result<Reply<Fleet>, Error> {
        let Some(beat) = beat.cloned() else {
            return self.read(fleet).await;
        };
        self.write(move |s| {
            let before =
                s.db.prepare_cached("SELECT info FROM instances WHERE instance = ?1")?
                    .query_row([beat.instance.as_str()], |r| Ok(r.get::<_, String>(0).ok()))
                    .optional()?
                    .flatten()
                    .and_then(|info| serde_json::from_str(&info).ok());
            s.execute(
                "UPDATE meta SET value = ?1 WHERE key = 'quarantine' AND value < ?1",
                &[&millis(beat.quarantine)],
            )?;
            s.execute(
                "INSERT INTO instances (instance, seen, info) VALUES (?1, ?2, ?3) \
                 ON CONFLICT (instance) DO UPDATE SET seen = ?2, info = ?3",
                &[&beat.instance.as_str(), &s.now(), &to_json(&beat.info)],
            )?;
            let mut fleet = fleet(s.db)?;
            fleet.before = before;
            Ok(fleet)
        })
        .await
    }

    async fn leave(&self, instance: &InstanceId, process: u32) -> Result<(), Error> {
        let instance = instance.clone();
        self.write(move |s| {
            let id = instance.as_str();
            let own = s.execute(
                "DELETE FROM instances WHERE instance = ?1 AND coalesce(info ->> 'process', 0) = ?2",
                &[&id, &process],
            )?;
            if own > 0 {
                s.execute("DELETE FROM drains WHERE instance = ?1", &[&id])?;
            }
            Ok(())
        })
        .await
        .map(drop)
    }

    async fn drain(&self, instance: &InstanceId, on: bool) -> Result<(), Error> {
        let instance = instance.clone();
        self.write(move |s| {
            let id = instance.as_str();
            if on {
                s.execute(
                    "INSERT INTO drains (instance, at) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET at = ?2",
                    &[&id, &s.now()],
                )?;
            } else {
                s.execute("DELETE FROM drains WHERE instance = ?1", &[&id])?;
            }
            s.effects.events.push(Event::Drain);
            Ok(())
        })
        .await
        .map(drop)
    }

    async fn journal(&self, decisions: &[Decision]) -> Result<(), Error> {
        let decisions = decisions.to_vec();
        self.write(move |s| {
            for d in &decisions {
                let job = d.job.as_str();
                s.execute(
                    "INSERT INTO decisions (job, at, decision) VALUES (?1, ?2, ?3)",
                    &[&job, &s.now(), &to_json(d)],
                )?;
                s.execute(
                    "DELETE FROM decisions WHERE job = ?1 AND id <= (SELECT id FROM decisions WHERE job = ?1 \
                     ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                    &[&job, &(DECISIONS_KEPT as i64)],
                )?;
            }
            Ok(())
        })
        .await
        .map(drop)
    }

    async fn decisions(&self, job: &JobName) -> Result<Vec<Decision>, Error> {
        let job = job.clone();
        self.read(move |db| {
            let mut rows = db
                .prepare_cached("SELECT decision FROM decisions WHERE job = ?1 AND octet_length(decision) <= ?2 ORDER BY id DESC LIMIT ?3")?;
            let lines: Vec<String> = rows
                .query_map(params![job.as_str(), LINE_MOST as i64, DECISIONS_KEPT as i64], |r| r.get(0))?
                .collect::<Result<_, _>>()?;
            Ok(readable("decisions", &job, lines.iter().map(|l| serde_json::from_str(l))))
        })
        .await
        .map(|r| r.value)
    }

    async fn history(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        let mut records = self.records(job, n).await?;
        fill(self, &mut records).await?;
        Ok(records)
    }

    async fn records(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        let job = job.clone();
        self.read(move |db| {
            let mut rows =
                db.prepare_cached("SELECT record FROM history WHERE job = ?1 AND octet_length(record) <= ?2 ORDER BY id DESC LIMIT ?3")?;
            let lines: Vec<String> = rows
                .query_map(params![job.as_str(), LINE_MOST as i64, HISTORY_KEPT as i64], |r| r.get(0))?
                .collect::<Result<_, _>>()?;
            let records = lines.iter().map(|l| serde_json::from_str(l));
            Ok(tidy(readable("records of runs", &job, records), n))
        })
        .await
        .map(|r| r.value)
    }

    async fn append_output(
        &self,
        _: &JobName,
        run: RunId,
        at: u64,
        data: &[u8],
        keep: usize,
    ) -> Result<(), Error> {
        let data = data.to_vec();
        self.write(move |s| {
            let mut all = extent(s.db, run)?.unwrap_or_else(|| Extent::from(at));
            let mut pieces = PiecesOf {
                db: s.db,
                run: run.to_string(),
            };
            all.add(&mut pieces, at, &data, keep as u64)?;
            s.save(run, &all)
        })
        .await
        .map(drop)
    }

    async fn output(&self, _: &JobName, run: RunId, from: u64) -> Result<Option<Output>, Error> {
        let shared = self.shared.clone();
        self.read(move |db| {
            let now = (shared.clock)().div_euclid(1000);
            let Some(extent) = extent(db, run)? else {
                return Ok(None);
            };
            let run = run.to_string();
            extent.read(&PiecesOf { db, run }, from, now).map(Some)
        })
        .await
        .map(|r| r.value)
    }

    fn events(&self) -> broadcast::Receiver<Event> {
        let receiver = self.events.subscribe();
        let _ = self.reader.send(ReaderTask::Listen);
        receiver
    }
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore")
            .field("address", &self.shared.address)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Read from the store's own connections: the setting is each connection's, and not the file's.
    #[tokio::test]
    async fn an_answer_is_on_the_disk_before_it_is_given() {
        let dir = tempfile::TempDir::new().unwrap();
        let store = SqliteStore::open(&dir.path().join("state.db")).unwrap();
        let pragmas = |db: &Connection| -> Result<(i64, String), Fault> {
            Ok((
                db.query_row("PRAGMA synchronous", [], |r| r.get(0))?,
                db.query_row("PRAGMA journal_mode", [], |r| r.get(0))?,
            ))
        };
        let full = (2, "wal".to_owned());
        let of_writer = store.write(move |s| pragmas(s.db)).await.unwrap().value;
        let of_reader = store.read(pragmas).await.unwrap().value;
        assert_eq!((of_writer, of_reader), (full.clone(), full));
    }

    /// Magic numbers as linux/magic.h and the file systems' own sources give them.
    #[test]
    fn network_file_systems_are_known_by_their_numbers() {
        assert_eq!(network(0x6969), Some("NFS"));
        assert_eq!(network(0xfe53_4d42), Some("SMB"));
        // A signed field that was widened.
        assert_eq!(network(0xffff_ffff_ff53_4d42), Some("CIFS"));
        for (name, local) in [
            ("ext4", 0xef53),
            ("xfs", 0x5846_5342),
            ("btrfs", 0x9123_683e),
            ("tmpfs", 0x0102_1994),
            ("overlayfs", 0x794c_7630),
        ] {
            assert_eq!(network(local), None, "{name}");
        }
    }
}
