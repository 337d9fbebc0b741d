//! The judge: reads what the witnesses wrote and finds every broken promise.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    fs::File,
    io::{Read as _, Seek as _, SeekFrom},
    path::Path,
};

/// One line of a witness.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    pub job: String,
    /// Unix ms.
    pub occurrence: i64,
    pub token: i64,
    pub attempt: u32,
    pub instance: String,
    pub trigger: String,
    pub run: String,
    /// Process id of the command.
    pub root: u32,
    /// Process id of the writer.
    pub pid: u32,
    /// start, beat, end.
    pub event: String,
    /// CLOCK_BOOTTIME.
    pub boot_ns: i64,
    /// CLOCK_REALTIME of the host, whatever libfaketime says.
    pub wall_us: i64,
}

/// Everything that one process tree wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    pub job: String,
    pub occurrence: i64,
    pub token: i64,
    pub attempt: u32,
    pub instance: String,
    pub trigger: String,
    pub run: String,
    pub root: u32,
    pub pids: BTreeSet<u32>,
    pub start_ns: i64,
    pub start_wall_us: i64,
    /// Its last sign of life, of any of its processes.
    pub last_ns: i64,
    /// The command came to its end by itself.
    pub ended: bool,
    /// When it did.
    pub ended_ns: Option<i64>,
}

/// What the witnesses wrote up to some moment.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    pub so_far: Runs,
    /// How many bytes of the file were read.
    read: u64,
}

/// A promise that was broken.
#[derive(Debug, Clone, PartialEq)]
pub enum Violation {
    /// The same attempt of an occurrence was started more than once.
    Duplicate {
        job: String,
        occurrence: i64,
        attempt: u32,
        starts: usize,
    },
    /// An occurrence was started again although its job must not be.
    Repeated {
        job: String,
        occurrence: i64,
        starts: usize,
    },
    /// Two runs of one job were alive at the same time.
    Overlap {
        job: String,
        first: i64,
        second: i64,
        by_us: i64,
    },
    /// A planned occurrence neither started nor was recorded.
    Missed { job: String, occurrence: i64 },
    /// A job whose occurrences are all to be judged has not started once.
    NeverStarted { job: String },
    /// A run started before its planned instant.
    Early {
        job: String,
        occurrence: i64,
        by_us: i64,
    },
    /// A later start carried a token that is not greater.
    TokenRegression { job: String, token: i64, after: i64 },
    /// A process was alive after its deadline.
    Orphan { job: String, token: i64, by_us: i64 },
}

/// What a trace may show although it would otherwise be a broken promise.
#[derive(Debug, Clone, Copy)]
pub struct Expect {
    /// Another attempt of the same occurrence is fine (`on_crash = "rerun"`, `retry`).
    pub reruns: bool,
    /// Runs of one job may be alive together (`overlap = "allow"`).
    pub overlaps: bool,
}

pub const ONCE: Expect = Expect {
    reruns: false,
    overlaps: false,
};
pub const RERUN: Expect = Expect {
    reruns: true,
    overlaps: false,
};

/// The runs that lines tell of, as far as these were added.
#[derive(Debug, Clone, Default)]
pub struct Runs {
    runs: Vec<Run>,
    by_root: HashMap<(String, u32, i64), usize>,
}

impl Runs {
    pub fn add(&mut self, line: &Line) {
        let runs = &mut self.runs;
        let name = (line.run.clone(), line.root, line.token);
        let i = *self.by_root.entry(name).or_insert_with(|| {
            runs.push(Run {
                job: line.job.clone(),
                occurrence: line.occurrence,
                token: line.token,
                attempt: line.attempt,
                instance: line.instance.clone(),
                trigger: line.trigger.clone(),
                run: line.run.clone(),
                root: line.root,
                pids: BTreeSet::new(),
                start_ns: line.boot_ns,
                start_wall_us: line.wall_us,
                last_ns: line.boot_ns,
                ended_ns: None,
                ended: false,
            });
            runs.len() - 1
        });
        let run = &mut runs[i];
        run.pids.insert(line.pid);
        run.last_ns = run.last_ns.max(line.boot_ns);
        if line.boot_ns < run.start_ns {
            run.start_ns = line.boot_ns;
            run.start_wall_us = line.wall_us;
        }
        if line.event == "end" && line.pid == line.root {
            run.ended = true;
            run.ended_ns = Some(line.boot_ns);
        }
    }

    pub fn len(&self) -> usize {
        self.runs.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter()
    }

    /// In the order of their starts.
    pub fn sorted(&self) -> Vec<Run> {
        self.since(i64::MIN)
    }

    /// Those with a sign of life since then (CLOCK_BOOTTIME), in the order of their starts.
    pub fn since(&self, ns: i64) -> Vec<Run> {
        let runs = self.runs.iter().filter(|r| r.last_ns >= ns);
        let mut runs: Vec<Run> = runs.cloned().collect();
        runs.sort_by_key(|r| r.start_ns);
        runs
    }
}

impl Trace {
    /// Reads what was appended to the file since: tests look many times a second. A file that does not exist is empty.
    ///
    /// # Panics
    /// On a line that no witness writes.
    #[track_caller]
    pub fn read_on(&mut self, file: &Path) {
        let Ok(mut file) = File::open(file) else {
            return;
        };
        let mut new = String::new();
        file.seek(SeekFrom::Start(self.read)).expect("the trace");
        file.read_to_string(&mut new).expect("the trace");
        // A witness may be in the middle of a write.
        let whole = new.rfind('\n').map_or("", |end| &new[..=end]);
        self.read += whole.len() as u64;
        whole.lines().for_each(|line| self.so_far.add(&parse(line)));
    }

    /// In the order of their starts.
    pub fn runs(&self) -> Vec<Run> {
        self.so_far.sorted()
    }

    pub fn runs_of(&self, job: &str) -> Vec<Run> {
        self.runs().into_iter().filter(|r| r.job == job).collect()
    }

    /// Starts of each instance.
    pub fn wins(&self) -> BTreeMap<String, usize> {
        let mut wins = BTreeMap::new();
        for run in self.runs() {
            *wins.entry(run.instance).or_default() += 1;
        }
        wins
    }

    /// Everything but misses and orphans, which need to know what was planned.
    pub fn violations(&self, expect: Expect) -> Vec<Violation> {
        let mut found = vec![];
        let mut jobs: BTreeMap<String, Vec<Run>> = BTreeMap::new();
        for run in self.runs() {
            jobs.entry(run.job.clone()).or_default().push(run);
        }
        for (job, runs) in jobs {
            let mut attempts: BTreeMap<(i64, u32), usize> = BTreeMap::new();
            let mut starts: BTreeMap<i64, usize> = BTreeMap::new();
            for run in &runs {
                *attempts.entry((run.occurrence, run.attempt)).or_default() += 1;
                *starts.entry(run.occurrence).or_default() += 1;
                let by_us = run.occurrence * 1000 - run.start_wall_us;
                if by_us > 0 {
                    found.push(Violation::Early {
                        job: job.clone(),
                        occurrence: run.occurrence,
                        by_us,
                    });
                }
            }
            for ((occurrence, attempt), starts) in attempts {
                if starts > 1 {
                    found.push(Violation::Duplicate {
                        job: job.clone(),
                        occurrence,
                        attempt,
                        starts,
                    });
                }
            }
            for (occurrence, starts) in starts {
                if starts > 1 && !expect.reruns {
                    found.push(Violation::Repeated {
                        job: job.clone(),
                        occurrence,
                        starts,
                    });
                }
            }
            if expect.overlaps {
                continue;
            }
            let mut longest: Option<&Run> = None;
            for run in &runs {
                if let Some(before) = longest
                    && run.start_ns <= before.last_ns
                {
                    found.push(Violation::Overlap {
                        job: job.clone(),
                        first: before.token,
                        second: run.token,
                        by_us: (before.last_ns - run.start_ns) / 1000,
                    });
                }
                if longest.is_none_or(|l| run.last_ns > l.last_ns) {
                    longest = Some(run);
                }
            }
            for pair in runs.windows(2) {
                if pair[1].token <= pair[0].token {
                    found.push(Violation::TokenRegression {
                        job: job.clone(),
                        token: pair[1].token,
                        after: pair[0].token,
                    });
                }
            }
        }
        found
    }

    /// Occurrences of a job (planned each `period_ms`) that neither started nor stand in `recorded`, from `since` (Unix
    /// ms; None: from the job's first start) to the job's last start.
    pub fn misses(
        &self,
        job: &str,
        period_ms: i64,
        since: Option<i64>,
        recorded: &BTreeSet<i64>,
    ) -> Vec<Violation> {
        let started: BTreeSet<i64> = self
            .runs_of(job)
            .iter()
            .filter(|r| r.trigger != "manual")
            .map(|r| r.occurrence)
            .collect();
        let (Some(&first), Some(&last)) = (started.first(), started.last()) else {
            return vec![Violation::NeverStarted {
                job: job.to_owned(),
            }];
        };
        let first = since.unwrap_or(first);
        (first / period_ms..=last / period_ms)
            .map(|n| n * period_ms)
            .filter(|o| *o >= first && !started.contains(o) && !recorded.contains(o))
            .map(|occurrence| Violation::Missed {
                job: job.to_owned(),
                occurrence,
            })
            .collect()
    }

    /// Signs of life of runs on `instance` that had begun before `deadline_ns` (CLOCK_BOOTTIME), later than it.
    pub fn orphans(&self, instance: &str, deadline_ns: i64) -> Vec<Violation> {
        self.runs()
            .into_iter()
            .filter(|r| {
                r.instance == instance && r.start_ns < deadline_ns && r.last_ns > deadline_ns
            })
            .map(|r| Violation::Orphan {
                job: r.job,
                token: r.token,
                by_us: (r.last_ns - deadline_ns) / 1000,
            })
            .collect()
    }
}

/// # Panics
/// On a line that no witness writes.
#[track_caller]
fn parse(line: &str) -> Line {
    let words: Vec<&str> = line.trim_end().split(' ').collect();
    let [
        job,
        occurrence,
        token,
        attempt,
        instance,
        trigger,
        run,
        root,
        pid,
        event,
        boot,
        wall,
    ] = words[..]
    else {
        panic!("not a witness's line: {line:?}");
    };
    let number = |what: &str| -> i64 {
        what.parse()
            .unwrap_or_else(|e| panic!("{what:?} in a witness's line {line:?}: {e}"))
    };
    Line {
        job: job.into(),
        occurrence: number(occurrence),
        token: number(token),
        attempt: number(attempt) as u32,
        instance: instance.into(),
        trigger: trigger.into(),
        run: run.into(),
        root: number(root) as u32,
        pid: number(pid) as u32,
        event: event.into(),
        boot_ns: number(boot),
        wall_us: number(wall),
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} attempt {} on {} ({}), alive for {} ms",
            self.job,
            self.occurrence,
            self.attempt,
            self.instance,
            self.trigger,
            (self.last_ns - self.start_ns) / 1_000_000
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of `a` for the occurrence at `second`, started and ended so many ms after second 0.
    fn run(second: i64, attempt: u32, root: u32, from_ms: i64, to_ms: i64) -> Vec<Line> {
        let line = |event: &str, at: i64| Line {
            job: "a".into(),
            occurrence: second * 1000,
            token: second * 1_000_000 + i64::from(attempt),
            attempt,
            instance: format!("i{root}"),
            trigger: "schedule".into(),
            run: format!("r{root}"),
            root,
            pid: root,
            event: event.into(),
            boot_ns: at * 1_000_000,
            wall_us: at * 1000,
        };
        vec![line("start", from_ms), line("end", to_ms)]
    }

    fn trace(runs: &[Vec<Line>]) -> Trace {
        let mut trace = Trace::default();
        runs.concat().iter().for_each(|line| trace.so_far.add(line));
        trace
    }

    #[test]
    fn a_clean_trace_has_no_violation() {
        let t = trace(&[run(1, 1, 1, 1002, 1010), run(2, 1, 2, 2001, 2900)]);
        assert_eq!(t.violations(ONCE), []);
        assert_eq!(t.misses("a", 1000, None, &BTreeSet::new()), []);
        assert_eq!(
            t.misses("b", 1000, None, &BTreeSet::new()),
            [Violation::NeverStarted { job: "b".into() }]
        );
        assert_eq!(
            t.wins(),
            BTreeMap::from([("i1".to_owned(), 1), ("i2".to_owned(), 1)])
        );
    }

    #[test]
    fn the_same_attempt_twice_is_found() {
        let t = trace(&[run(1, 1, 1, 1002, 1010), run(1, 1, 2, 1050, 1060)]);
        let found = t.violations(RERUN);
        assert!(
            matches!(
                found[..],
                [
                    Violation::Duplicate {
                        occurrence: 1000,
                        attempt: 1,
                        starts: 2,
                        ..
                    },
                    Violation::TokenRegression { .. }
                ]
            ),
            "{found:?}"
        );
    }

    #[test]
    fn another_attempt_is_found_unless_reruns_are_expected() {
        let t = trace(&[run(1, 1, 1, 1002, 1010), run(1, 2, 2, 1050, 1060)]);
        assert_eq!(t.violations(RERUN), []);
        let found = t.violations(ONCE);
        assert!(
            matches!(
                found[..],
                [Violation::Repeated {
                    occurrence: 1000,
                    starts: 2,
                    ..
                }]
            ),
            "{found:?}"
        );
    }

    #[test]
    fn an_overlap_is_found_also_across_a_short_run_and_by_a_child() {
        let mut long = run(1, 1, 1, 1002, 1010);
        let mut child = long[1].clone();
        (child.pid, child.event, child.boot_ns) = (77, "beat".into(), 3_500_000_000);
        long.push(child);
        let t = trace(&[long, run(2, 1, 2, 2001, 2010), run(3, 1, 3, 3001, 3010)]);
        let found = t.violations(ONCE);
        assert!(
            matches!(
                found[..],
                [
                    Violation::Overlap {
                        first: 1_000_001,
                        second: 2_000_001,
                        ..
                    },
                    Violation::Overlap {
                        first: 1_000_001,
                        second: 3_000_001,
                        ..
                    }
                ]
            ),
            "{found:?}"
        );
        let allowed = Expect {
            overlaps: true,
            ..ONCE
        };
        assert_eq!(t.violations(allowed), []);
    }

    #[test]
    fn an_early_start_is_found() {
        let found = trace(&[run(1, 1, 1, 999, 1010)]).violations(ONCE);
        assert!(
            matches!(found[..], [Violation::Early { by_us: 1000, .. }]),
            "{found:?}"
        );
    }

    #[test]
    fn a_token_that_goes_back_is_found() {
        let t = trace(&[run(2, 1, 1, 2001, 2010), run(1, 1, 2, 2500, 2510)]);
        let found = t.violations(ONCE);
        assert!(
            matches!(
                found[..],
                [Violation::TokenRegression {
                    token: 1_000_001,
                    after: 2_000_001,
                    ..
                }]
            ),
            "{found:?}"
        );
    }

    #[test]
    fn a_miss_is_found_unless_it_was_recorded() {
        let t = trace(&[run(1, 1, 1, 1002, 1010), run(4, 1, 1, 4001, 4010)]);
        let miss = |occurrence| Violation::Missed {
            job: "a".into(),
            occurrence,
        };
        assert_eq!(
            t.misses("a", 1000, None, &BTreeSet::from([2000])),
            [miss(3000)]
        );
        assert_eq!(
            t.misses("a", 1000, Some(-500), &BTreeSet::from([2000, 3000])),
            [miss(0)]
        );
    }

    #[test]
    fn a_process_after_its_deadline_is_found() {
        let t = trace(&[run(1, 1, 1, 1002, 1500)]);
        assert_eq!(t.orphans("i1", 1_501_000_000), []);
        assert_eq!(t.orphans("i2", 1_400_000_000), []);
        let found = t.orphans("i1", 1_400_000_000);
        assert!(
            matches!(found[..], [Violation::Orphan { by_us: 100_000, .. }]),
            "{found:?}"
        );
    }
}
