//! Which instance had which jobs when: a ledger of what was written to the files, and of who has read it.
//!
//! An instance reads its file when it starts and when SIGHUP tells it to, and only its log says when it has. Until
//! then it may have any version since the last one that it surely had.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{Read as _, Seek as _, SeekFrom},
    path::Path,
};

use crate::support::process::boottime_ns;

/// A time in which an instance lived and had one of these versions. CLOCK_BOOTTIME; `i64::MAX` while it lasts.
#[derive(Debug, Clone)]
struct Spell {
    instance: usize,
    from_ns: i64,
    to_ns: i64,
    /// From the oldest to the newest version that it may have had.
    oldest: usize,
    newest: usize,
}

/// How far an instance that lives is with its file.
#[derive(Debug, Clone)]
struct Reader {
    spell: usize,
    /// It may read at any moment.
    reads: bool,
    /// It was told to read: the length of its log then, and the version.
    told: Option<(u64, usize)>,
    /// It has to be told, but not before this.
    to_be_told: Option<i64>,
}

#[derive(Debug, Clone, Default)]
pub struct Comings {
    /// Of each version of the files: the jobs that are there, and enabled.
    versions: Vec<BTreeSet<String>>,
    spells: Vec<Spell>,
    readers: Vec<Option<Reader>>,
}

impl Comings {
    pub fn new(instances: usize, jobs: impl IntoIterator<Item = String>) -> Self {
        Self {
            versions: vec![jobs.into_iter().collect()],
            spells: vec![],
            readers: vec![None; instances],
        }
    }

    fn spell(&mut self, instance: usize, now: i64, oldest: usize, newest: usize) -> usize {
        self.spells.push(Spell {
            instance,
            from_ns: now,
            to_ns: i64::MAX,
            oldest,
            newest,
        });
        self.spells.len() - 1
    }

    /// Another spell of the instance's life follows.
    fn go_on(&mut self, instance: usize, now: i64, oldest: usize, newest: usize) {
        let Some(before) = self.readers[instance].as_ref().map(|r| r.spell) else {
            return;
        };
        self.spells[before].to_ns = now;
        let spell = self.spell(instance, now, oldest, newest);
        if let Some(reader) = &mut self.readers[instance] {
            reader.spell = spell;
        }
    }

    /// It reads the file that is there. It is told once more when it can hear it: only then it says what it has.
    pub fn starts(&mut self, instance: usize, now: i64) {
        self.ends(instance, now);
        let newest = self.versions.len() - 1;
        let spell = self.spell(instance, now, newest, newest);
        self.readers[instance] = Some(Reader {
            spell,
            reads: true,
            told: None,
            to_be_told: Some(now),
        });
    }

    pub fn ends(&mut self, instance: usize, now: i64) {
        if let Some(reader) = self.readers[instance].take() {
            self.spells[reader.spell].to_ns = now;
        }
    }

    /// The files have other jobs from now on, of which an instance is told `after` so long.
    pub fn written(&mut self, jobs: BTreeSet<String>, now: i64, after: impl Fn(usize) -> i64) {
        self.versions.push(jobs);
        let newest = self.versions.len() - 1;
        for i in 0..self.readers.len() {
            let Some(reader) = &mut self.readers[i] else {
                continue;
            };
            reader.to_be_told = Some(now + after(i));
            if reader.reads {
                let oldest = self.spells[reader.spell].oldest;
                self.go_on(i, now, oldest, newest);
            }
        }
    }

    /// Instances that are to be told now.
    pub fn to_be_told(&self, now: i64) -> Vec<usize> {
        let due = |i: &usize| {
            let reader = self.readers[*i].as_ref();
            reader.is_some_and(|r| r.told.is_none() && r.to_be_told.is_some_and(|at| at <= now))
        };
        (0..self.readers.len()).filter(due).collect()
    }

    /// It is told now; `log` is how long its log is.
    pub fn told(&mut self, instance: usize, now: i64, log: u64) {
        let newest = self.versions.len() - 1;
        if let Some(reader) = &mut self.readers[instance] {
            (reader.told, reader.to_be_told, reader.reads) = (Some((log, newest)), None, true);
            let oldest = self.spells[reader.spell].oldest;
            self.go_on(instance, now, oldest, newest);
        }
    }

    /// Looks whether instances have read what they were told to.
    pub fn look<'a>(&mut self, log: impl Fn(usize) -> &'a Path) {
        self.look_at(boottime_ns(), log);
    }

    pub fn look_at<'a>(&mut self, now: i64, log: impl Fn(usize) -> &'a Path) {
        for i in 0..self.readers.len() {
            let Some(reader) = &mut self.readers[i] else {
                continue;
            };
            let Some((from, version)) = reader.told else {
                continue;
            };
            if !says(log(i), from, "configuration reloaded") {
                continue;
            }
            (reader.told, reader.reads) = (None, false);
            // If the files were written since, it may have read these.
            let newest = self.versions.len() - 1;
            self.go_on(i, now, version, newest);
        }
    }

    fn of(&self, instance: usize) -> impl DoubleEndedIterator<Item = &Spell> {
        self.spells.iter().filter(move |s| s.instance == instance)
    }

    fn all(&self, spell: &Spell, job: &str, has: bool) -> bool {
        let versions = &self.versions[spell.oldest..=spell.newest];
        versions.iter().all(|v| v.contains(job) == has)
    }

    /// It lived all the time.
    pub fn lived(&self, instance: usize, from: i64, to: i64) -> bool {
        let mut upto = from;
        for s in self.of(instance) {
            if s.from_ns <= upto && s.to_ns > upto {
                upto = s.to_ns;
            }
        }
        upto >= to
    }

    /// It lived, and had the job, all the time.
    pub fn had(&self, instance: usize, job: &str, from: i64, to: i64) -> bool {
        let mut touching = self
            .of(instance)
            .filter(|s| s.from_ns <= to && s.to_ns >= from);
        self.lived(instance, from, to) && touching.all(|s| self.all(s, job, true))
    }

    /// Some instance lived between these, and none had the job at any time.
    fn absent(&self, job: &str, from: i64, to: i64) -> bool {
        let touching = |s: &&Spell| s.from_ns <= to && s.to_ns >= from;
        let mut touching = self.spells.iter().filter(touching).peekable();
        touching.peek().is_some() && touching.all(|s| self.all(s, job, false))
    }

    /// The longest time around `at` in which no instance had the job; None: one may have had it then.
    pub fn absence(&self, job: &str, at: i64) -> Option<(i64, i64)> {
        const NEAR: i64 = 50_000_000;
        if !self.absent(job, at - NEAR, at + NEAR) {
            return None;
        }
        let may_have = |s: &&Spell| !self.all(s, job, false);
        let with: Vec<&Spell> = self.spells.iter().filter(may_have).collect();
        let from = with.iter().map(|s| s.to_ns).filter(|to| *to < at).max();
        let to = with
            .iter()
            .map(|s| s.from_ns)
            .filter(|from| *from > at)
            .min();
        // Before the first one nobody was without it.
        Some((from?, to.unwrap_or(i64::MAX)))
    }

    /// Some instance lived between these, and may have been without the job.
    pub fn lacked(&self, job: &str, from: i64, to: i64) -> bool {
        let mut touching = self
            .spells
            .iter()
            .filter(|s| s.from_ns <= to && s.to_ns >= from);
        touching.any(|s| !self.all(s, job, true))
    }

    /// Some instance died after `since` that may have had the job then: it may have taken back what another one had
    /// told the store of an absence.
    pub fn died_with(&self, job: &str, since: i64) -> bool {
        let ended = |s: &&Spell| s.to_ns >= since && s.to_ns != i64::MAX;
        let mut ended = self.spells.iter().filter(ended);
        ended.any(|s| {
            let lived_on = |next: &Spell| next.instance == s.instance && next.from_ns == s.to_ns;
            !self.all(s, job, false) && !self.spells.iter().any(lived_on)
        })
    }

    /// Since when an instance that had the job before, and has lived since, surely has it no more; None: it has not
    /// lived from then until `at`, or did not have it.
    pub fn without_since(&self, instance: usize, job: &str, at: i64) -> Option<i64> {
        let mut upto = at;
        for s in self.of(instance).rev().filter(|s| s.from_ns <= at) {
            if s.to_ns < upto {
                return None;
            }
            if !self.all(s, job, false) {
                return Some(s.from_ns);
            }
            upto = s.from_ns;
        }
        None
    }
}

fn says(log: &Path, from: u64, text: &str) -> bool {
    let Ok(mut file) = File::open(log) else {
        return false;
    };
    let mut new = vec![];
    let read = file
        .seek(SeekFrom::Start(from))
        .and_then(|_| file.read_to_end(&mut new));
    read.is_ok() && String::from_utf8_lossy(&new).contains(text)
}

#[cfg(test)]
#[allow(unused, reason = "there are no tests in the harness's own program")]
mod tests {
    use super::*;

    fn jobs(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    const MS: i64 = 1_000_000;

    #[test]
    fn nobody_knows_what_an_instance_has_until_it_says_so() {
        let log = tempfile::NamedTempFile::new().expect("a file");
        let say = |text: &str| std::fs::write(log.path(), text).expect("write the log");
        let mut comings = Comings::new(1, jobs(&["a"]));
        comings.starts(0, 0);
        // The file is written before the instance says that it has read the one before.
        comings.written(jobs(&[]), 1000 * MS, |_| 500 * MS);
        assert!(comings.had(0, "a", 0, 900 * MS));
        assert!(!comings.had(0, "a", 0, 1100 * MS));
        assert_eq!(comings.absence("a", 1100 * MS), None);
        assert!(comings.to_be_told(1400 * MS).is_empty());
        assert_eq!(comings.to_be_told(1500 * MS), [0]);
        comings.told(0, 1500 * MS, 0);
        comings.look(|_| log.path());
        assert_eq!(comings.absence("a", 1600 * MS), None);
        say("configuration reloaded");
        comings.look(|_| log.path());
        let read = comings.spells.last().expect("a spell").from_ns;
        let later = read + 1000 * MS;
        assert_eq!(comings.absence("a", later), Some((read, i64::MAX)));
        assert_eq!(comings.without_since(0, "a", later), Some(1500 * MS));
        // What it is not told of, it does not have.
        comings.written(jobs(&["a"]), read + 2000 * MS, |_| 0);
        assert!(comings.absence("a", read + 3000 * MS).is_some());
        comings.told(0, read + 3500 * MS, 22);
        assert_eq!(comings.absence("a", later), Some((read, read + 3500 * MS)));
        assert_eq!(comings.absence("a", read + 4000 * MS), None);
        assert!(comings.lived(0, 0, read + 9000 * MS));
        comings.ends(0, read + 5000 * MS);
        assert!(!comings.lived(0, 0, read + 9000 * MS));
        assert!(comings.died_with("a", read + 4000 * MS));
        assert!(!comings.died_with("b", read + 4000 * MS));
        assert!(!comings.died_with("a", read + 6000 * MS));
        // When nobody lives, nobody has ceased to have the job.
        assert_eq!(comings.absence("a", read + 7000 * MS), None);
        assert_eq!(comings.without_since(0, "a", read + 7000 * MS), None);
    }
}
