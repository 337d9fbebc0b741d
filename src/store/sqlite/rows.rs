//! Reads and checks the rows of the tables.

use std::{collections::BTreeMap, ops::Range, time::Duration};

use rusqlite::{Connection, OptionalExtension, params};

use super::{Fault, place};
use crate::{
    logic::{
        claim::State,
        notify::stand::{GIVEN_UP, LEASE},
    },
    model::{InstanceId, JobName, RunId, possible_ms},
    store::{
        Fleet, Info, LAST_BYTE, Notices, STATE_MOST,
        output::{Extent, Pieces},
    },
};

pub(super) fn state(db: &Connection, job: &JobName) -> Result<Option<State>, Fault> {
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
        n => Err(unreadable(&format!(
            "it has {n} bytes, more than soloist writes"
        ))),
    }
}

pub(super) fn notices(db: &Connection, all: bool) -> Result<Notices, Fault> {
    let text = |r: &rusqlite::Row<'_>, i: usize| match r.get_ref(i)?.as_str() {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(Fault::Data(
            "the table notices has a row that soloist did not write".to_owned(),
        )),
    };
    let mut out = Notices::default();
    let mut rows = match all {
        true => db.prepare_cached("SELECT name, note FROM notices")?,
        false => db.prepare_cached("SELECT name, note FROM notices WHERE name IN (?1, ?2)")?,
    };
    let mut rows = match all {
        true => rows.query([])?,
        false => rows.query([LEASE, GIVEN_UP])?,
    };
    while let Some(row) = rows.next()? {
        let (name, note) = (text(row, 0)?, text(row, 1)?);
        match &*name {
            LEASE => out.lease = Some(note),
            _ => drop(out.notes.insert(name, note)),
        }
    }
    Ok(out)
}

pub(super) fn extent(db: &Connection, run: RunId) -> Result<Option<Extent>, Fault> {
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
                "the output of run {run} cannot consist of the bytes {} to {}",
                k.base, k.stop
            )))
        }
        extent => Ok(extent),
    }
}

/// The pieces of one run's output.
pub(super) struct PiecesOf<'a> {
    pub(super) db: &'a Connection,
    pub(super) run: String,
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

/// The first column of each row in which it is a text; soloist never writes another type there.
pub(super) fn names(mut rows: rusqlite::Rows<'_>) -> Result<Vec<String>, Fault> {
    let mut names = vec![];
    while let Some(row) = rows.next()? {
        names.extend(row.get::<_, String>(0));
    }
    Ok(names)
}

pub(super) fn fleet(db: &Connection) -> Result<Fleet, Fault> {
    let meta = |key: &str| -> Result<i64, Fault> {
        Ok(db
            .prepare_cached("SELECT value FROM meta WHERE key = ?1")?
            .query_row([key], |r| r.get(0))?)
    };
    let mut instances = BTreeMap::new();
    let mut rows = db.prepare_cached("SELECT instance, seen, info FROM instances")?;
    let mut rows = rows.query([])?;
    while let Some(row) = rows.next()? {
        // An instance of another version may have written an entry that this one cannot read: skip it.
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
    let mut by = db.prepare_cached("SELECT instance, by FROM drained_by")?;
    let by = by.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get(1)?)))?;
    let drained_by = by.map(|row| row.map(|(id, by)| (InstanceId::new(&id), by)));
    Ok(Fleet {
        // The file has one epoch: SQLite loses no data.
        id: "file".into(),
        before: None,
        born: meta("born")?,
        quarantine: Duration::from_millis(meta("quarantine")?.max(0) as u64),
        open: true,
        instances,
        drains,
        drained_by: drained_by.collect::<Result<_, _>>()?,
    })
}
