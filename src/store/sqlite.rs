//! The store of one host: a SQLite file that several processes share. It runs the reference rules (logic::claim) on one
//! row for each job. Each step is in one `BEGIN IMMEDIATE` transaction, which is on the disk before the caller gets the
//! answer.
//!
//! One thread writes and another reads; both take their work from a channel. All requests that wait for the writer go
//! into one transaction, so that they share the cost of a sync. The store loses nothing that it has acknowledged, so it
//! has one incarnation: the id that the file got when it was created.

mod fault;
mod file;
mod rows;
mod threads;

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, ToSql, params};
use tokio::sync::{broadcast, oneshot};

pub(crate) use self::fault::Fault;
pub use self::file::open_to_others;
use self::{
    file::{HURRIED, beside, connect, network, prepare},
    rows::{PiecesOf, extent, fleet, names, notices, state},
    threads::{Finish, Hints, ReaderTask, Work, read, write},
};
use super::{
    Beat, Changed, Clock, DECISIONS_KEPT, Decision, Error, Fleet, HISTORY_KEPT, Notices, Output,
    Reply, Store, Tail, fill, output::Extent, readable, tidy,
};
use crate::{
    clock::{self, Boottime, StoreClock},
    logic::{
        claim::{
            self, Answer, Claim, Control, Controlled, Effects, Event, Register, Registration,
            Renew, Renewal, Settle, Settlement, State,
        },
        notify::lease::{self, LEASE, Write, Written},
    },
    model::{InstanceId, JobName, Marks, RunId, RunRecord},
};

/// The store of one host, in a SQLite file.
pub struct SqliteStore {
    shared: Arc<Shared>,
    writer: mpsc::Sender<Work>,
    reader: mpsc::Sender<ReaderTask>,
    events: broadcast::Sender<Event>,
    changes: broadcast::Sender<Changed>,
}

/// The data that both threads use.
struct Shared {
    address: String,
    /// The database file, its shared memory and its log, with device and inode of each when it was opened.
    files: [(Option<(u64, u64)>, PathBuf); 3],
    incarnation: Arc<str>,
    /// Names this handle in the table of events.
    origin: String,
    clock: Clock,
    /// The time that the daemon believes `clock` to show.
    believed: OnceLock<Arc<StoreClock>>,
    /// True: `clock` is this host's wall clock.
    local_clock: bool,
    /// This process is about to end.
    hurried: Arc<AtomicBool>,
}

/// One request inside its transaction.
pub(crate) struct Request<'a> {
    pub(crate) db: &'a Connection,
    /// The time at which this request is decided, and with which its writes are dated.
    pub(crate) now_us: i64,
    /// The time that the clock shows; it differs from `now_us` only while the clock is in doubt.
    shown_us: i64,
    in_doubt: bool,
    incarnation: &'a str,
    pub(crate) effects: Effects,
    /// The jobs whose state it changed, otherwise than by a renewal.
    changed: Vec<JobName>,
}

impl SqliteStore {
    /// Opens the file, and creates it if it does not exist. Its directory must exist, on a local disk.
    ///
    /// # Errors
    /// The directory is missing, the file is on a network file system, it cannot be written, it belongs to another
    /// program, it is damaged, or a newer version made it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_by(path, Arc::new(clock::wall_us), true)
    }

    /// Opens the file like [`SqliteStore::open`], with `clock` as the store's clock.
    ///
    /// # Errors
    /// The same as those of [`SqliteStore::open`].
    pub fn open_with_clock(path: &Path, clock: Clock) -> Result<Self, Error> {
        Self::open_by(path, clock, false)
    }

    // Long: one check after the other, each with its own message.
    fn open_by(path: &Path, clock: Clock, local_clock: bool) -> Result<Self, Error> {
        let address = format!("sqlite:{}", path.display());
        let refuse = |reason: String| Error::Refused {
            address: address.clone(),
            reason,
        };
        crate::config::rights::database(path)
            .map_err(|f| refuse(format!("{}: {}", f.message, f.fix)))?;
        let named = path;
        // If a link leads to no file yet, SQLite would create it, readable for all users.
        let path = &crate::config::named::followed(path);
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
        // Ask about the file itself if it exists: it may be a link, or a mount.
        let on = if path.exists() { path } else { directory };
        let fs = rustix::fs::statfs(on)
            .map_err(|e| refuse(format!("cannot find out its file system: {e}")))?;
        if let Some(name) = network(fs.f_type as u64) {
            return Err(refuse(format!(
                "it is on a network file system ({name}), where locks and shared memory are not reliable; \
                 put it on a local disk, or use Redis for several hosts"
            )));
        }
        let db = connect(path)
            .and_then(|db| prepare(&db, clock()).map(|()| db))
            .map_err(|e| e.at(&address))?;
        let incarnation: String = db
            .query_row("SELECT value FROM meta WHERE key = 'uuid'", [], |r| {
                r.get(0)
            })
            .map_err(|e| Fault::Sql(e).at(&address))?;
        let look = connect(path).map_err(|e| e.at(&address))?;
        // Read this here and not in the reading thread, which may start later: events that other processes write from
        // now on must not be missed.
        let seen: i64 = look
            .query_row("SELECT coalesce(max(id), 0) FROM events", [], |r| r.get(0))
            .unwrap_or(0);
        // The name of a new file must survive a power cut, as its content does.
        std::fs::File::open(directory)
            .and_then(|d| d.sync_all())
            .map_err(|e| refuse(format!("cannot sync {}: {e}", directory.display())))?;
        // SQLite follows links: it has the other files beside the file itself.
        let files = [named.into(), beside(path, "-shm"), beside(path, "-wal")];
        let files = files.map(|path: PathBuf| (identity(&path).ok(), path));
        let shared = Arc::new(Shared {
            address: address.clone(),
            files,
            incarnation: incarnation.into(),
            origin: RunId::random().to_string(),
            clock,
            believed: OnceLock::new(),
            local_clock,
            hurried: Arc::default(),
        });
        let events = broadcast::channel(super::HINTS).0;
        let (writer, requests) = mpsc::channel();
        let (reader, looks) = mpsc::channel();
        let spawn = |name: &str, f: Box<dyn FnOnce() + Send>| {
            let hurried = shared.hurried.clone();
            let f = move || {
                HURRIED.set(hurried);
                f();
            };
            thread::Builder::new()
                .name(name.to_owned())
                .spawn(f)
                .map_err(|e| Error::Unreachable {
                    address: address.clone(),
                    reason: format!("cannot start a thread: {e}"),
                })
        };
        let hints = Hints {
            events,
            changes: broadcast::channel(super::CHANGES).0,
        };
        let (s, h) = (shared.clone(), hints.clone());
        spawn(
            "sqlite-write",
            Box::new(move || write(&db, &requests, &s, &h)),
        )?;
        let (s, h) = (shared.clone(), hints.clone());
        spawn(
            "sqlite-read",
            Box::new(move || read(&look, &looks, &s, &h, seen)),
        )?;
        let Hints { events, changes } = hints;
        Ok(Self {
            shared,
            writer,
            reader,
            events,
            changes,
        })
    }

    /// Runs `f` in a transaction, and returns when the transaction is on the disk.
    ///
    /// If the caller drops the future, the transaction is still made.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Request<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<Reply<T>, Error> {
        let (answer, answered) = oneshot::channel();
        let shared = self.shared.clone();
        let work: Work = Box::new(move |request| {
            let out = request.and_then(|request| {
                // No other process sees this write before the commit, so trust may count from here. It need not count
                // from when the request was queued: another process may delay the queue.
                let sent = Boottime::now();
                f(request)
                    .and_then(|value| request.write_effects(&shared.origin).map(|()| value))
                    .map(|value| (value, request.shown_us, sent))
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
                .same_files(db)
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

impl Shared {
    /// Checks that the files are still those that were opened: if somebody replaced or removed one, two fleets would
    /// decide the same occurrences.
    fn same_files(&self, db: &Connection) -> Result<(), Error> {
        for (number, (file, path)) in self.files.iter().enumerate() {
            let name = path.display();
            let reason = match identity(path) {
                Ok(now) if Some(now) == *file => continue,
                Ok(_) => format!(
                    "{name} was replaced by another file while it was in use; restart soloist to use that"
                ),
                Err(e) => {
                    if number == LOG {
                        // The other files are there. What is in the log alone would be decided again.
                        let _ = db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
                    }
                    format!("{name} is gone ({e}); put it back or restart soloist")
                }
            };
            let address = self.address.clone();
            return Err(Error::Refused { address, reason });
        }
        Ok(())
    }
}

/// The number of the log among the files.
const LOG: usize = 2;

/// Device and inode of a file.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|m| (m.dev(), m.ino()))
}

impl Request<'_> {
    fn now(&self) -> i64 {
        self.now_us.div_euclid(1000)
    }

    /// Runs `f` on the state of `job` and stores the state that `f` leaves.
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
        if super::changed(before.as_ref(), after.as_ref()) {
            self.changed.push(job.clone());
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

    /// Removes the record whose place `r` takes. Returns how many occurrences that one counted.
    fn take_joined(&self, r: &RunRecord) -> Result<u64, Fault> {
        let Some(joined) = self.effects.joined(r) else {
            return Ok(0);
        };
        let mut rows = self.db.prepare_cached(
            "SELECT id, record FROM history WHERE job = ?1 AND run IS NULL ORDER BY id DESC",
        )?;
        let mut rows = rows.query([r.job.as_str()])?;
        while let Some(row) = rows.next()? {
            let old = serde_json::from_str::<RunRecord>(row.get_ref(1)?.as_str().unwrap_or(""));
            if let Ok(old) = old
                && joined.replaces(&old)
            {
                let id: i64 = row.get(0)?;
                self.execute("DELETE FROM history WHERE id = ?1", &[&id])?;
                return Ok(old.count);
            }
        }
        Ok(0)
    }

    /// Writes the records and events that the rules produced.
    fn write_effects(&self, origin: &str) -> Result<(), Fault> {
        let now = self.now();
        for r in &self.effects.records {
            let job = r.job.as_str();
            let stored = RunRecord {
                fencing_token: None,
                output_tail: String::new(),
                count: r.count.saturating_add(self.take_joined(r)?),
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
                self.execute("DELETE FROM pieces WHERE run = ?1", &[&run])?;
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

fn millis(d: Duration) -> i64 {
    i64::try_from(d.as_millis()).unwrap_or(i64::MAX)
}

fn to_json<T: serde::Serialize>(v: &T) -> String {
    // Cannot fail: soloist's own types consist of strings, numbers and lists of them.
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
    fn hurry(&self) {
        self.shared.hurried.store(true, Ordering::Relaxed);
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
            // If the rule recorded nothing, this settlement was made before.
            if s.effects.records.len() > before {
                s.changed.push(settle.record.job.clone());
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
                s.execute("DELETE FROM drained_by WHERE instance = ?1", &[&id])?;
            }
            Ok(())
        })
        .await
        .map(drop)
    }

    async fn drain(&self, instance: &InstanceId, on: bool, by: &str) -> Result<(), Error> {
        let (instance, by) = (instance.clone(), by.to_owned());
        self.write(move |s| {
            let id = instance.as_str();
            s.execute("INSERT OR REPLACE INTO drained_by (instance, by) VALUES (?1, ?2)", &[&id, &by])?;
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

    async fn notices(&self, all: bool) -> Result<Reply<Notices>, Error> {
        self.read(move |db| notices(db, all)).await
    }

    async fn note(&self, write: &Write) -> Result<Reply<Written>, Error> {
        let write = write.clone();
        self.write(move |s| {
            let lease = notices(s.db, false)?.lease;
            if !lease::allows(lease.as_deref(), &write) {
                return Ok(Written::Not(lease));
            }
            let lease = (LEASE.to_owned(), write.lease.clone());
            for (name, note) in write.set.iter().chain([&lease]) {
                s.execute(
                    "INSERT INTO notices (name, note) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET note = ?2",
                    &[name, note],
                )?;
            }
            for name in &write.remove {
                s.execute("DELETE FROM notices WHERE name = ?1", &[name])?;
            }
            Ok(Written::Done)
        })
        .await
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
            let mut rows = db.prepare_cached(
                "SELECT decision FROM decisions WHERE job = ?1 ORDER BY id DESC LIMIT ?2",
            )?;
            let lines: Vec<String> = rows
                .query_map(params![job.as_str(), DECISIONS_KEPT as i64], |r| r.get(0))?
                .collect::<Result<_, _>>()?;
            Ok(readable(
                "decisions",
                &job,
                lines.iter().map(|l| serde_json::from_str(l)),
            ))
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
            let mut rows = db.prepare_cached(
                "SELECT record FROM history WHERE job = ?1 ORDER BY id DESC LIMIT ?2",
            )?;
            let mut read = |most: usize| -> Result<Vec<RunRecord>, Fault> {
                let lines: Vec<String> = rows
                    .query_map(params![job.as_str(), most as i64], |r| r.get(0))?
                    .collect::<Result<_, _>>()?;
                let records = lines.iter().map(|l| serde_json::from_str(l));
                Ok(tidy(readable("records of runs", &job, records), n))
            };
            let few = super::lines_for(n);
            let records = read(few)?;
            match records.len() >= n || few == HISTORY_KEPT {
                true => Ok(records),
                false => read(HISTORY_KEPT),
            }
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
        stderr: &Marks,
    ) -> Result<(), Error> {
        let (data, stderr) = (data.to_vec(), stderr.clone());
        self.write(move |s| {
            let mut all = extent(s.db, run)?.unwrap_or_else(|| Extent::from(at));
            let mut pieces = PiecesOf {
                db: s.db,
                run: run.to_string(),
            };
            all.add(&mut pieces, at, &data, keep as u64, &stderr)?;
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

    fn changes(&self) -> broadcast::Receiver<Changed> {
        let receiver = self.changes.subscribe();
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

    /// Asks the store's own connections: the setting belongs to each connection, not to the file.
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

    /// Magic numbers from linux/magic.h and from the sources of the file systems.
    #[test]
    fn network_file_systems_are_known_by_their_numbers() {
        assert_eq!(network(0x6969), Some("NFS"));
        assert_eq!(network(0xfe53_4d42), Some("SMB"));
        // As a signed field that was widened.
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
