//! Reads the records of a fleet, compares each answer with the rules, and judges what happened.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    io::{self, BufRead, BufReader, Read as _},
    path::PathBuf,
};

use serde::Serialize;

use super::{
    Line, Rules, VERSION, Written, digest,
    order::{Done, Jump, Losses, Operation, States, Unseen, dates_of, order, variants},
};
use crate::{
    logic::{
        claim::{Answer, Answered, Effects, Question, Registration, State},
        median::median,
    },
    model::{Boottime, JobName, RunId, RunRecord},
    store::Around,
};

/// How far the store's clock and a host's may drift apart while a record is kept, µs.
pub(super) const INEXACT_US: i64 = 500_000;

/// The most bytes of a line of a record, which has room for a state before and after an answer.
const LINE_MOST: u64 = 64 << 20;

/// The next line, without its end. None: there is none.
fn line(reader: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut text = String::new();
    if reader.take(LINE_MOST + 1).read_line(&mut text)? as u64 > LINE_MOST {
        let reason = format!("a line has more than {} MiB", LINE_MOST >> 20);
        return Err(io::Error::other(reason));
    }
    let end = text.trim_end_matches(['\r', '\n']).len();
    let whole = !text.is_empty();
    text.truncate(end);
    Ok(whole.then_some(text))
}

/// What was checked, and what is wrong.
#[derive(Debug, Default, Serialize)]
pub struct Verdict {
    pub files: usize,
    pub processes: usize,
    /// Processes whose record does not end in order: they were killed, or are still there.
    pub unended: usize,
    pub questions: usize,
    /// Questions without an answer.
    pub unanswered: usize,
    pub jobs: usize,
    /// Attempts that were granted, and commands that ran.
    pub granted: usize,
    pub ran: usize,
    /// How often the store was restarted, or its data was lost or replaced, as the heartbeats tell.
    pub losses: usize,
    /// Answers whose time cannot be right: somebody changed it on the way.
    pub wrong_times: usize,
    /// How often questions without an answer changed a state in a way that could not be followed.
    pub not_followed: usize,
    /// How often the state of a job was gone when no heartbeat can tell whether the store had lost its data: this
    /// cannot be judged.
    pub not_judged: usize,
    /// Planned occurrences whose outcome was looked for.
    pub occurrences: usize,
    pub breaches: Vec<Breach>,
}

/// Something that must not be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Breach {
    /// The promise of docs/guarantees.md; 0: the record itself, or an answer that no rule gives.
    pub promise: u8,
    pub job: Option<JobName>,
    /// Of what has promise 0: the record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Of what has promise 0: when the question left. Of runs that started too early: when. Of runs that lasted too
    /// long: when they ended. CLOCK_BOOTTIME, ns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<Boottime>,
    pub text: String,
}

/// Why records cannot be checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {}: {error}", path.display())]
    Unreadable {
        path: PathBuf,
        error: std::io::Error,
    },
    #[error("{}:{line}: {reason}", path.display())]
    Refused {
        path: PathBuf,
        line: usize,
        reason: String,
    },
}

/// One process of the fleet, as it wrote itself down.
#[derive(Debug)]
pub(super) struct Process {
    who: String,
    pub(super) boot: usize,
    ended: bool,
    /// The store's clock minus this process's monotonic clock, µs, by each of its answers.
    offsets: Vec<i64>,
    /// Those of them by which something was claimed: the process believed that clock.
    believed: Vec<i64>,
    /// The median of these, or of all, over all processes of this host.
    offset: i64,
    /// Its configurations, each from a time of the store on.
    pub(super) jobs: Vec<(Boottime, BTreeMap<JobName, Rules>)>,
    /// When it did not run.
    stood: Vec<(Boottime, Boottime)>,
    /// Its last sign of life.
    pub(super) last: Boottime,
}

impl Process {
    /// What the store's clock showed, Unix µs.
    pub(super) fn store_us(&self, at: Boottime) -> i64 {
        (at.0 / 1000) as i64 + self.offset
    }

    /// At most this had come by the store's clock at the last sign of life, Unix µs: that clock may have been wrong for
    /// most of the time, or at the end.
    pub(super) fn last_us(&self) -> i64 {
        let offset = self.offsets.last().copied().unwrap_or(self.offset);
        (self.last.0 / 1000) as i64 + offset.min(self.offset)
    }

    /// It did not run at some time between these.
    pub(super) fn stood(&self, from: Boottime, to: Boottime) -> bool {
        self.stood
            .iter()
            .any(|(begin, end)| *begin <= to && from <= *end)
    }
}

/// A command, as its guard's side wrote it down.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ran {
    pub(super) process: usize,
    /// Which process told the guard to start it.
    pub(super) starter: Option<usize>,
    pub(super) started: Option<Boottime>,
    pub(super) ended: Option<Boottime>,
}

/// Everything that was read.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) processes: Vec<Process>,
    boots: Vec<String>,
    operations: BTreeMap<JobName, Vec<Operation>>,
    pub(super) runs: HashMap<RunId, Ran>,
    /// By each heartbeat: the store's time, µs; the incarnation; the epoch's id.
    epochs: Vec<(i64, String, String)>,
    files: Vec<PathBuf>,
    states: States,
    /// Answers that no rule gives at the time that they name.
    wrong: Vec<(JobName, usize, Around)>,
}

/// Checks the records of a whole fleet. Each process whose record is missing may make answers look wrong.
///
/// # Errors
/// A file cannot be read, or is not a record as some process wrote it.
pub fn check(files: &[PathBuf]) -> Result<Verdict, Error> {
    let mut records = read(files)?;
    let mut verdict = Verdict {
        files: files.len(),
        processes: records.processes.len(),
        unended: records.processes.iter().filter(|p| !p.ended).count(),
        jobs: records.operations.len(),
        ran: records
            .runs
            .values()
            .filter(|r| r.started.is_some())
            .count(),
        ..Verdict::default()
    };
    let losses = records.losses();
    let epochs = records.epochs.iter().map(|(_, of, id)| (of, id));
    verdict.losses = epochs.collect::<BTreeSet<_>>().len().saturating_sub(1);
    records.wrong(&mut verdict);
    let mut states = std::mem::take(&mut records.states);
    for (job, operations) in &records.operations {
        verdict.questions += operations.len();
        verdict.unanswered += operations.iter().filter(|o| o.done.is_none()).count();
        let ordered = order(operations, &losses, &mut states);
        for d in &ordered.decided {
            match d.jump {
                Some(Jump::Unanswered) => verdict.not_followed += 1,
                Some(Jump::Unseen) => verdict.not_judged += 1,
                Some(Jump::Unexplained) => {
                    let says = |who: &str| {
                        format!(
                            "the store showed {who} a state that follows from no other answer, and from no question \
                             without an answer (is the record of some process missing?)"
                        )
                    };
                    let breach = records.unexplained(job, &operations[d.operation], says);
                    verdict.breaches.push(breach);
                }
                Some(Jump::Lost) | None => {}
            }
        }
        records.judge(job, operations, &ordered, &mut verdict);
    }
    Ok(verdict)
}

// Long: one arm for each kind of line.
fn read(files: &[PathBuf]) -> Result<Records, Error> {
    let mut records = Records {
        files: files.to_vec(),
        ..Records::default()
    };
    // Of each process: its index, the number of its next line, and the digest of the last one.
    let mut chains: HashMap<u64, (usize, u64, u64)> = HashMap::new();
    // Questions that have no answer yet: where they are.
    let mut asked: HashMap<(usize, u64), (JobName, usize)> = HashMap::new();
    for (file, path) in files.iter().enumerate() {
        let unreadable = |error| Error::Unreadable {
            path: path.clone(),
            error,
        };
        let mut reader = BufReader::new(File::open(path).map_err(unreadable)?);
        let lines = std::iter::from_fn(|| line(&mut reader).transpose());
        let mut lines = lines.enumerate().peekable();
        let mut any = false;
        while let Some((nth, text)) = lines.next() {
            let text = text.map_err(unreadable)?;
            let text = text.as_str();
            let refused = |reason: &str| Error::Refused {
                path: path.clone(),
                line: nth + 1,
                reason: reason.to_owned(),
            };
            // A process that was killed, or a disk that was full, may have cut its last line: then nothing follows, or
            // another process begins.
            let begins = |(_, next): &(usize, std::io::Result<String>)| {
                let next = next.as_ref().ok().and_then(|next| Written::parse(next));
                next.is_some_and(|w| w.n == 0)
            };
            let broken_off = !text.ends_with('}') && lines.peek().is_none_or(begins);
            let Some(written) = Written::parse(text) else {
                if broken_off {
                    continue;
                }
                return Err(refused("this is not a line of a record"));
            };
            any = true;
            let chain = chains.get(&written.by).copied();
            let (process, n, before) = chain.unwrap_or((records.processes.len(), 0, 0));
            if written.n != n {
                return Err(refused(&format!(
                    "a line is missing or out of place: line {} of its process follows on {n} lines",
                    written.n
                )));
            }
            if digest(before, written.by, n, written.line) != written.digest {
                if broken_off {
                    continue;
                }
                return Err(refused(
                    "this line, or one before it of the same process, was changed: its digest differs",
                ));
            }
            chains.insert(written.by, (process, n + 1, written.digest));
            let line: Line = serde_json::from_str(written.line)
                .map_err(|e| refused(&format!("cannot be read: {e}")))?;
            match (line, chain.is_some()) {
                (Line::Begins { version, who, boot }, false) => {
                    if version != VERSION {
                        return Err(refused(&format!(
                            "it has version {version}; this soloist reads version {VERSION}"
                        )));
                    }
                    records.begin(who, &boot);
                }
                (Line::Begins { .. }, true) | (_, false) => {
                    return Err(refused("a process begins with `begins`, once"));
                }
                (line, true) => {
                    records
                        .take(process, n, (file, nth + 1), line, &mut asked)
                        .map_err(|reason| refused(&reason))?;
                }
            }
        }
        if !any {
            return Err(Error::Refused {
                path: path.clone(),
                line: 1,
                reason: "this is not a record: it has no whole line of one".to_owned(),
            });
        }
    }
    records.date();
    Ok(records)
}

impl Records {
    pub(super) fn begin(&mut self, who: String, boot: &str) {
        let known = self.boots.iter().position(|b| b == boot);
        let boot = known.unwrap_or_else(|| {
            self.boots.push(boot.to_owned());
            self.boots.len() - 1
        });
        self.processes.push(Process {
            who,
            boot,
            ended: false,
            offsets: vec![],
            believed: vec![],
            offset: 0,
            jobs: vec![],
            stood: vec![],
            last: Boottime(0),
        });
    }

    // Long: one arm for each kind of line.
    fn take(
        &mut self,
        process: usize,
        n: u64,
        place: (usize, usize),
        line: Line,
        asked: &mut HashMap<(usize, u64), (JobName, usize)>,
    ) -> Result<(), String> {
        let here = &mut self.processes[process];
        match line {
            Line::Begins { .. } => {}
            Line::Jobs(jobs) => here.jobs.push((here.last, jobs)),
            Line::Asks { sent, question } => {
                here.last = sent;
                let job = question.job().clone();
                let of_job = self.operations.entry(job.clone()).or_default();
                asked.insert((process, n), (job, of_job.len()));
                of_job.push(Operation {
                    place,
                    process,
                    boot: here.boot,
                    sent,
                    sent_us: 0,
                    about_us: 0,
                    question,
                    done: None,
                });
            }
            Line::Answers {
                to,
                left,
                received,
                now_us,
                answer,
                around,
            } => {
                let question = asked.remove(&(process, to));
                let (job, at) = question.ok_or("it answers no question of this process")?;
                here.last = received;
                let operation = self
                    .operations
                    .get_mut(&job)
                    .and_then(|all| all.get_mut(at));
                let operation = operation.ok_or("it answers no question of this process")?;
                let middle = (operation.sent.0 + received.0) / 2;
                let offset = now_us - (middle / 1000) as i64;
                here.offsets.push(offset);
                if let Answered::Claim(decided) = &answer
                    && *decided != Answer::InDoubt
                {
                    here.believed.push(offset);
                }
                let step = match around {
                    _ if answer == Answered::Claim(Answer::InDoubt) => None,
                    None if answer == Answered::Register(Registration::Quarantined) => None,
                    None => return Err("it does not show the state".to_owned()),
                    Some(around) => {
                        let records = records(&operation.question, &answer, &around, around.now_us);
                        let step = self.states.step(&around, records);
                        if step.records.is_none() {
                            self.wrong.push((job, at, around));
                        }
                        Some(step)
                    }
                };
                operation.done = Some(Done {
                    left,
                    received,
                    now_us,
                    answer,
                    step,
                });
            }
            Line::Fails { .. } => {}
            Line::Epoch {
                sent,
                received,
                now_us,
                incarnation,
                id,
            } => {
                here.last = received;
                let middle = (sent.0 + received.0) / 2;
                here.offsets.push(now_us - (middle / 1000) as i64);
                self.epochs.push((now_us, incarnation, id));
            }
            Line::Starts { run, at } => {
                here.last = at;
                self.runs.entry(run).or_insert(Ran {
                    process,
                    starter: Some(process),
                    started: None,
                    ended: None,
                });
            }
            Line::Ran {
                run,
                started,
                ended,
                ..
            } => {
                here.last = here.last.max(ended);
                let starter = self.runs.get(&run).and_then(|ran| ran.starter);
                let ran = Ran {
                    process,
                    starter,
                    started,
                    ended: Some(ended),
                };
                self.runs.insert(run, ran);
            }
            Line::Stood { from, to } => here.stood.push((from, to)),
            Line::Ends {} => here.ended = true,
        }
        Ok(())
    }

    /// Gives each question its place in time: by the store's clock, unless that jumped, or somebody told a wrong time.
    fn date(&mut self) {
        let median = |boot: usize| {
            let of = |which: fn(&Process) -> &Vec<i64>| -> Vec<i64> {
                let of = self.processes.iter().filter(|p| p.boot == boot);
                of.flat_map(which).copied().collect()
            };
            let mut offsets = of(|p| &p.believed);
            if offsets.is_empty() {
                offsets = of(|p| &p.offsets);
            }
            median(offsets).unwrap_or(0)
        };
        let medians: Vec<i64> = (0..self.boots.len()).map(median).collect();
        for p in &mut self.processes {
            p.offset = medians[p.boot];
        }
        for o in self.operations.values_mut().flatten() {
            let us = |at: Boottime| self.processes[o.process].store_us(at);
            o.sent_us = us(o.sent);
            o.about_us = match &o.done {
                None => o.sent_us,
                Some(done) => {
                    let (from, to) = (o.sent_us - INEXACT_US, us(done.received) + INEXACT_US);
                    match (from..=to).contains(&done.now_us) {
                        true => done.now_us,
                        false => i64::midpoint(from, to),
                    }
                }
            };
        }
    }

    /// What the heartbeats tell of losses. A loss under the same incarnation is known by its epoch alone, and an epoch
    /// that ended before any heartbeat found it left no trace.
    fn losses(&self) -> Losses {
        let mut seen: BTreeMap<(&str, &str), (i64, i64)> = BTreeMap::new();
        for (now_us, incarnation, id) in &self.epochs {
            let times = seen.entry((incarnation, id)).or_insert((*now_us, *now_us));
            *times = (times.0.min(*now_us), times.1.max(*now_us));
        }
        let mut epochs: Vec<(&str, (i64, i64))> = seen
            .into_iter()
            .map(|((of, _), times)| (of, times))
            .collect();
        epochs.sort_by_key(|(_, times)| times.0);
        let next = epochs.iter().skip(1).map(|(_, times)| times.0);
        let unseen = |((of, times), to_us): (&(&str, (i64, i64)), i64)| Unseen {
            incarnation: (*of).to_owned(),
            from_us: times.1,
            to_us,
        };
        let unseen = epochs.iter().zip(next.chain([i64::MAX])).map(unseen);
        let pairs = epochs.windows(2);
        Losses {
            unseen: unseen.collect(),
            found: pairs
                .filter(|two| two[0].0 == two[1].0)
                .map(|two| two[0].1.1.min(two[1].1.0))
                .collect(),
        }
    }

    /// `says` gets who asked.
    fn unexplained(
        &self,
        job: &JobName,
        o: &Operation,
        says: impl FnOnce(&str) -> String,
    ) -> Breach {
        let (file, line) = o.place;
        let file = &self.files[file];
        let says = says(&self.processes[o.process].who);
        Breach {
            promise: 0,
            job: Some(job.clone()),
            file: Some(file.clone()),
            at: Some(o.sent),
            text: format!("{}:{line}: {says}", file.display()),
        }
    }

    /// Judges the answers that no rule gives at the time that they name. If some other time explains one of them, and
    /// the one that it names is impossible, only that time is wrong: somebody changed it on the way.
    fn wrong(&self, verdict: &mut Verdict) {
        for (job, at, around) in &self.wrong {
            let Some(o) = self.operations.get(job).and_then(|all| all.get(*at)) else {
                continue;
            };
            let Some(Done { now_us, answer, .. }) = &o.done else {
                continue;
            };
            let explains = |us: i64| records(&o.question, answer, around, us).is_some();
            let (from, to) = self.decided_between(o);
            let impossible = |us: i64| !(from..=to).contains(&us);
            if (impossible(*now_us) || impossible(around.now_us))
                && self.times_of(o, around).any(explains)
            {
                verdict.wrong_times += 1;
                continue;
            }
            let by_the_rules = decide(&o.question, around, around.now_us).0;
            let breach = self.unexplained(job, o, |who| {
                format!(
                    "the store answered {who} with {answer:?}, or changed the state in another way than the rules do; \
                     by the rules the answer is {by_the_rules:?}"
                )
            });
            verdict.breaches.push(breach);
        }
    }

    /// The store decided between these, Unix µs: after the question and before its answer.
    fn decided_between(&self, o: &Operation) -> (i64, i64) {
        let received = o.done.as_ref().map_or(o.sent, |done| done.received);
        let to_us = self.processes[o.process].store_us(received);
        (o.sent_us - INEXACT_US, to_us + INEXACT_US)
    }

    /// The times at which the store may have decided, Unix µs: those that the state shows, and each millisecond from
    /// the question to its answer. The rules count in milliseconds, and some answers say how long a lease still lasts.
    fn times_of(&self, o: &Operation, around: &Around) -> impl Iterator<Item = i64> {
        let shown = serde_json::to_value(&around.after).unwrap_or_default();
        let mut dates = vec![];
        dates_of(&shown, &mut dates);
        let (from, to) = self.decided_between(o);
        std::iter::once(o.about_us)
            .chain(dates.into_iter().map(|ms| ms * 1000))
            .chain((from.div_euclid(1000)..=to.div_euclid(1000)).map(|ms| ms * 1000))
    }

    /// The rules of a job, by whoever has it in its newest configuration.
    pub(super) fn rules(&self, job: &JobName) -> Option<&Rules> {
        let newest = |p: &'_ Process| p.jobs.last().map(|(_, jobs)| jobs.contains_key(job));
        let has = self
            .processes
            .iter()
            .rev()
            .find(|p| newest(p) == Some(true))?;
        has.jobs.last()?.1.get(job)
    }

    /// All definitions that were in force at some time.
    pub(super) fn all_rules<'a>(
        &'a self,
        job: &'a JobName,
    ) -> impl Iterator<Item = &'a Rules> + 'a {
        let of = |p: &'a Process| p.jobs.iter().filter_map(|(_, jobs)| jobs.get(job));
        self.processes.iter().flat_map(of)
    }
}

/// The answer by the rules, the state after it, and the records that it makes.
fn decide(
    question: &Question,
    around: &Around,
    now_us: i64,
) -> (Answered, Option<State>, Vec<RunRecord>) {
    let (mut after, mut effects) = (around.before.clone(), Effects::default());
    let answer = question.decide(&mut after, now_us, &around.incarnation, &mut effects);
    (answer, after, effects.records)
}

/// What the decision recorded, if the rules explain the answer and the state after it.
fn records(
    question: &Question,
    answer: &Answered,
    around: &Around,
    now_us: i64,
) -> Option<Vec<RunRecord>> {
    let mut all = variants(question).into_iter();
    all.find_map(|question| {
        let (by_the_rules, after, records) = decide(&question, around, now_us);
        (by_the_rules == *answer && after == around.after).then_some(records)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_the_heartbeats_of_two_epochs_another_loss_may_have_come_unseen() {
        let beat = |us, incarnation: &str, id: &str| (us, incarnation.to_owned(), id.to_owned());
        let records = Records {
            // In the order of the files, which is not that of time.
            epochs: vec![
                beat(60, "b", "3"),
                beat(10, "a", "1"),
                beat(20, "a", "1"),
                beat(30, "a", "2"),
                beat(40, "a", "2"),
            ],
            ..Records::default()
        };
        let losses = records.losses();
        assert_eq!(losses.found, [20]);
        let unseen = |incarnation: &str, from_us, to_us| Unseen {
            incarnation: incarnation.to_owned(),
            from_us,
            to_us,
        };
        let all = [
            unseen("a", 20, 30),
            unseen("a", 40, 60),
            unseen("b", 60, i64::MAX),
        ];
        assert_eq!(losses.unseen, all);
    }

    #[test]
    fn the_clock_by_which_claims_were_decided_dates_what_happened() {
        let process = |offsets: &[i64], believed: &[i64]| Process {
            who: String::new(),
            boot: 0,
            ended: true,
            offsets: offsets.to_vec(),
            believed: believed.to_vec(),
            offset: 0,
            jobs: vec![],
            stood: vec![],
            last: Boottime(5000),
        };
        for (believed, offset) in [(&[7_i64, 8, 9][..], 8), (&[], 3_600)] {
            let mut records = Records {
                boots: vec!["b".to_owned()],
                processes: vec![process(&[3_600, 3_600, 3_600, 7, 8], believed)],
                ..Records::default()
            };
            records.date();
            assert_eq!(records.processes[0].offset, offset, "{believed:?}");
        }
    }

    #[test]
    fn a_clock_that_was_ahead_for_most_of_the_time_or_at_the_end_makes_nothing_overdue() {
        const HOUR: i64 = 3_600_000_000;
        for (offsets, offset) in [
            ([HOUR + 7, HOUR + 8, 9], HOUR + 7),
            ([7, 9, HOUR + 8], 9),
            ([7, 8, 9], 9),
        ] {
            let process = Process {
                who: String::new(),
                boot: 0,
                ended: true,
                offsets: offsets.to_vec(),
                believed: vec![],
                offset,
                jobs: vec![],
                stood: vec![],
                last: Boottime(5000),
            };
            assert_eq!(process.last_us(), 5 + 9, "{offsets:?}");
        }
    }
}
