//! The database file: its tables, its mode, and how soloist opens it.

use std::{
    cell::{Cell, RefCell},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior, limits::Limit, params};

use super::Fault;
use crate::{clock::Boottime, model::RunId};

/// The version of the tables below. Version 1 kept output in another form.
pub(super) const SCHEMA: i64 = 2;

/// The application id in the file's header, which marks it as soloist's ("solo").
pub(super) const APPLICATION: i64 = 0x736f_6c6f;

pub(super) const TABLES: &str = "
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

/// See src/store/output.rs; `at` is the time of the last change.
pub(super) const OUTPUT: &str = "
CREATE TABLE output (id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL UNIQUE, at INTEGER NOT NULL,
    start INTEGER NOT NULL, base INTEGER NOT NULL, stop INTEGER NOT NULL, done INTEGER NOT NULL, total INTEGER,
    patience INTEGER) STRICT;
CREATE TABLE pieces (run TEXT NOT NULL, n INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (run, n)) STRICT;
";

/// The table of the library's locks (src/lock/sqlite.rs). Files from versions without locks get it too.
pub(super) const LOCKS: &str = "
CREATE TABLE IF NOT EXISTS locks (key TEXT PRIMARY KEY, owner TEXT NOT NULL, count INTEGER, nonce TEXT,
    token INTEGER NOT NULL, until INTEGER NOT NULL) STRICT, WITHOUT ROWID;
";

/// Notifications: the lease, and notes by their names. Files from versions without them get it too.
pub(super) const NOTICES: &str = "
CREATE TABLE IF NOT EXISTS notices (name TEXT PRIMARY KEY, note TEXT NOT NULL) STRICT, WITHOUT ROWID;
";

/// Who last asked an instance to drain, or no longer to drain. Files from versions without it get it too.
pub(super) const DRAINED_BY: &str = "
CREATE TABLE IF NOT EXISTS drained_by (instance TEXT PRIMARY KEY, by TEXT NOT NULL) STRICT, WITHOUT ROWID;
";

/// No value in the file is larger, and SQLite makes none that is.
const LARGEST: i32 = 64 << 20;

/// How long a process waits for the transaction of another one.
pub(super) const BUSY: Duration = Duration::from_secs(5);

/// The same for a process that is about to end.
const SOON: Duration = Duration::from_millis(500);

thread_local! {
    /// Whether this thread waits for a store whose process is about to end.
    pub(super) static HURRIED: RefCell<Arc<AtomicBool>> = RefCell::default();
    /// Since when a statement of this thread waits for another process.
    static BEGAN: Cell<Boottime> = const { Cell::new(Boottime(0)) };
    /// Since when other processes have kept this thread from writing.
    pub(super) static LOCKED: Cell<Option<Boottime>> = const { Cell::new(None) };
}

/// The path of the file that SQLite has beside the database.
pub(super) fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

pub(super) fn connect(path: &Path) -> Result<Connection, Fault> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // To open a pipe would wait for its writer for ever.
    if std::fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        let what = format!("{} is not a regular file", path.display());
        return Err(Fault::Data(what));
    }
    // Create the file with mode 600, because every user who can read it can lock it; SQLite gives the files that it
    // creates beside it the same mode. Do not open an existing file here: closing it would remove the locks that this
    // process has on it.
    let made = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    drop(made);
    let mut db = Connection::open_with_flags(path, flags)?;
    db.set_limit(Limit::SQLITE_LIMIT_LENGTH, LARGEST)?;
    // SQLite's own pauses between tries grow to 100 ms, so other processes could starve this one.
    db.busy_handler(Some(|tries| {
        let now = Boottime::now();
        LOCKED.set(LOCKED.get().or(Some(now)));
        if tries == 0 {
            BEGAN.set(now);
        }
        thread::sleep(Duration::from_millis(1));
        let hurried = HURRIED.with_borrow(|hurried| hurried.load(Ordering::Relaxed));
        now.since(BEGAN.get()) < if hurried { SOON } else { BUSY }
    }))?;
    db.set_prepared_statement_cache_capacity(64);
    // The cache has 512 KiB, a quarter of what each connection would keep for good after it read or wrote all jobs
    // once. The system's cache has the rest.
    db.execute_batch(
        "PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -512",
    )?;
    Ok(db)
}

/// The mode of a file that other users than its owner may open; None: they may not, or there is no such file.
pub fn open_to_others(path: &Path) -> Option<u32> {
    let mode = std::fs::metadata(path).ok()?.mode() & 0o777;
    (mode & 0o077 != 0).then_some(mode)
}

/// Creates the tables of a new file. Checks that an existing file is soloist's and has a version that this program
/// knows.
pub(super) fn prepare(db: &Connection, now_us: i64) -> Result<(), Fault> {
    let pragma = |name: &str| db.query_row(&format!("PRAGMA {name}"), [], |r| r.get::<_, i64>(0));
    // Check this before any write, so that another program's file stays unchanged; and in one snapshot, because another
    // process may be creating the tables at this moment.
    let tx = rusqlite::Transaction::new_unchecked(db, TransactionBehavior::Deferred)?;
    let tables: i64 = tx.query_row("SELECT count(*) FROM sqlite_schema", [], |r| r.get(0))?;
    if tables > 0 && pragma("application_id")? != APPLICATION {
        return Err(Fault::Data(
            "it is a database of another program; name another file".to_owned(),
        ));
    }
    tx.commit()?;
    // If several processes do this to a new file at the same time, SQLite lets all but one fail at once, without
    // waiting.
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
    let version = pragma("user_version")?;
    match version {
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
    tx.execute_batch(NOTICES)?;
    tx.execute_batch(DRAINED_BY)?;
    tx.commit()?;
    if version == 0 {
        // A copy of the file alone has its tables from now on.
        db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
    }
    Ok(())
}

/// The name of a network file system with this magic number (of statfs); None: it is not a network file system.
pub(super) fn network(magic: u64) -> Option<&'static str> {
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
