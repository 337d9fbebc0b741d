//! The last will of a daemon: what it had claimed, or was about to, and had not started. If the daemon is killed, its
//! zygote ([`crate::guard`]) has the store told that these commands were never executed, so that another attempt is
//! safe, whatever `on_crash` says. Nobody else could tell: a run that was started has a guard, but these have none yet.
//!
//! The will is a file in memory, which the zygote has open, too. An entry stands in it from before the claim leaves
//! until the guard is told what to run: from then on the guard is the one who knows. A daemon that ends in order ends
//! its zygote first.
//!
//! In the file: the [`Destination`] as JSON, from the beginning to `HEAD`; then the entries, each a [`Claimed`] as JSON
//! in `ENTRY` bytes. What is behind the JSON is zero, and an entry that does not count begins with a zero. An entry
//! lies in one page and is written at once, so the kernel does not cut it.

pub mod settle;

use std::{collections::HashSet, fs::File, io, os::unix::fs::FileExt, sync::Arc};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::{
    config,
    logic::claim::{Claim, OnCrash},
    model::{JobName, RunId},
};

/// The hidden first argument with which the zygote of a killed daemon executes this binary; its descriptor 0 is the
/// will.
pub const ARGUMENT: &str = "__last_will";

const HEAD: u64 = 64 << 10;
const ENTRY: u64 = 512;

/// Where the outcomes of a daemon's runs are recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Destination {
    #[serde(with = "config::Handed")]
    pub store: config::Store,
}

/// A claim that was made, or may have been, and whose command was not started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Claimed {
    pub job: JobName,
    pub run: RunId,
    pub on_crash: OnCrash,
    pub max_attempts: u32,
    /// [`crate::clock::StoreClock::offset_us`].
    pub offset_us: i64,
}

impl Claimed {
    pub fn of(claim: &Claim, offset_us: i64) -> Self {
        Self {
            job: claim.job.clone(),
            run: claim.run,
            on_crash: claim.on_crash,
            max_attempts: claim.max_attempts,
            offset_us,
        }
    }
}

/// The will of this process.
#[derive(Debug)]
pub struct LastWill {
    file: File,
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    /// The run of each place; None: it is struck out, or free.
    runs: Vec<Option<RunId>>,
    free: Vec<usize>,
    /// What guards were told to run, until it is settled: it does not come into the will any more.
    told: HashSet<RunId>,
}

impl LastWill {
    /// # Errors
    /// No descriptor or memory is left.
    pub fn new(destination: &Destination) -> io::Result<Arc<Self>> {
        let name = "soloist-last-will";
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
        let head = serde_json::to_vec(destination)?;
        if head.len() as u64 >= HEAD {
            return Err(io::Error::other("the settings of the store are too long"));
        }
        let file = File::from(file);
        file.write_all_at(&head, 0)?;
        file.set_len(HEAD)?;
        let places = Mutex::default();
        Ok(Arc::new(Self { file, places }))
    }

    /// The will, for the process that is to execute it.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Puts `claimed` into the will. None: a guard was told to run it; or there is no memory for it, so it counts as if
    /// there were no will.
    pub fn add(self: &Arc<Self>, claimed: &Claimed) -> Option<Entry> {
        let mut entry = serde_json::to_vec(claimed).ok()?;
        if entry.len() as u64 >= ENTRY {
            return None;
        }
        entry.resize(ENTRY as usize, 0);
        let run = claimed.run;
        let mut places = self.places.lock();
        if places.told.contains(&run) {
            return None;
        }
        let place = places.free.pop().unwrap_or(places.runs.len());
        if place == places.runs.len() {
            places.runs.push(None);
        }
        places.runs[place] = Some(run);
        let written = self.file.write_all_at(&entry, at(place));
        drop(places);
        let added = Entry {
            will: self.clone(),
            place,
            run,
        };
        written.ok()?;
        Some(added)
    }

    /// A guard is told to run `run` after this: it stands in the will no more.
    ///
    /// # Errors
    /// The kernel has no memory for a page that it had swapped out. The guard must not be told.
    pub fn strike_out(&self, run: RunId) -> io::Result<()> {
        let mut places = self.places.lock();
        places.told.insert(run);
        for (place, of) in places.runs.iter_mut().enumerate() {
            if *of == Some(run) {
                self.clear(place)?;
                *of = None;
            }
        }
        Ok(())
    }

    /// `run` is settled: nobody claims it any more.
    pub fn forget(&self, run: RunId) {
        self.places.lock().told.remove(&run);
    }

    fn clear(&self, place: usize) -> io::Result<()> {
        let file = &self.file;
        // Without its head no entry of it counts.
        (file.write_all_at(&[0], at(place))).or_else(|_| file.set_len(0))
    }

    /// What would be read if this process were killed now.
    ///
    /// # Errors
    /// As of [`read`].
    pub fn read(&self) -> io::Result<(Destination, Vec<Claimed>)> {
        read(&self.file)
    }
}

fn at(place: usize) -> u64 {
    HEAD + place as u64 * ENTRY
}

/// An entry of the will. Dropped, it is struck out.
#[derive(Debug)]
pub struct Entry {
    will: Arc<LastWill>,
    place: usize,
    run: RunId,
}

impl Entry {
    pub fn run(&self) -> RunId {
        self.run
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut places = self.will.places.lock();
        if places.runs[self.place].take().is_some() {
            // If that fails, no entry counts any more, or whoever takes the place next writes over it.
            let _ = self.will.clear(self.place);
        }
        places.free.push(self.place);
        if places.free.len() == places.runs.len() && self.will.file.set_len(HEAD).is_ok() {
            (places.free, places.runs) = (vec![], vec![]);
        }
    }
}

/// Reads a will.
///
/// # Errors
/// `file` is none, or cannot be read.
pub fn read(file: &File) -> io::Result<(Destination, Vec<Claimed>)> {
    let length = file.metadata()?.len();
    let mut all = vec![0; usize::try_from(length.min(1 << 30)).unwrap_or_default()];
    file.read_exact_at(&mut all, 0)?;
    let (head, entries) = all.split_at_checked(HEAD as usize).unwrap_or_default();
    let destination = serde_json::from_slice(json(head))?;
    let entries = entries.chunks(ENTRY as usize).map(json);
    let entries = entries.filter_map(|entry| serde_json::from_slice(entry).ok());
    Ok((destination, entries.collect()))
}

fn json(padded: &[u8]) -> &[u8] {
    padded.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn will() -> Arc<LastWill> {
        let destination = Destination {
            store: config::Store::from_url("redis://me:secret@h").expect("a store"),
        };
        LastWill::new(&destination).expect("a file in memory")
    }

    fn claimed(job: &str) -> Claimed {
        Claimed {
            job: JobName::new(job),
            run: RunId::random(),
            on_crash: OnCrash::Fail,
            max_attempts: 3,
            offset_us: -7,
        }
    }

    #[test]
    fn a_will_has_what_was_put_into_it_and_not_struck_out() {
        let will = will();
        let longest = "n".repeat(JobName::LONGEST);
        let all: Vec<_> = ["a", "b", &longest].into_iter().map(claimed).collect();
        let mut entries: Vec<_> = all.iter().map(|c| will.add(c).expect("a place")).collect();
        let (destination, read) = will.read().expect("a will");
        assert_eq!(read, all);
        let store = config::Store::from_url("redis://me:secret@h").expect("a store");
        assert_eq!(destination.store, store);

        // However often it stands there.
        let again = will.add(&all[0]);
        assert!(again.is_some());
        will.strike_out(all[0].run).expect("memory");
        assert!(will.add(&all[0]).is_none(), "a guard was told to run it");
        drop(entries.remove(2));
        assert_eq!(will.read().expect("a will").1, all[1..2]);
        drop((again, entries.remove(0)));
        will.forget(all[0].run);
        assert_eq!(will.places.lock().told.len(), 0);
        // Its place is taken again.
        let more = claimed("more");
        let more_entry = will.add(&more).expect("a place");
        assert_eq!(more_entry.run(), more.run);
        let (_, read) = will.read().expect("a will");
        assert_eq!(read.len(), 2);
        assert!(read.contains(&more) && read.contains(&all[1]));
        drop((entries, more_entry));
        assert_eq!(will.read().expect("a will").1, []);
        // It takes no memory then.
        let length = will.file.metadata().expect("a file").len();
        assert_eq!(length, HEAD);
    }

    #[test]
    fn what_is_no_will_is_refused_and_an_entry_that_was_cut_does_not_count() {
        let empty = tempfile::tempfile().expect("a file");
        assert!(read(&empty).is_err());
        empty.write_all_at(&[b'x'; 100], 0).expect("written");
        assert!(read(&empty).is_err());

        let will = will();
        let (whole, cut) = (claimed("whole"), claimed("cut"));
        let _entries = [&cut, &whole].map(|c| will.add(c).expect("a place"));
        will.file.write_all_at(&[0], HEAD + 20).expect("written");
        assert_eq!(will.read().expect("a will").1, [whole]);
        // A file that lost its head has nothing to say.
        will.file.set_len(0).expect("cut");
        assert!(will.read().is_err());
    }
}
