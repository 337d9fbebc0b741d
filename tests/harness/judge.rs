//! The judge: from what the witnesses wrote, what the store recorded, and what was done to the fleet, it finds each
//! broken promise. It is a function of these alone; it reads no clock and no file.
//!
//! What docs/guarantees.md excludes is counted too, but apart ([`Finding::excused`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use soloist::{
    logic::jitter::jitter_ms,
    model::{Occurrence, Outcome, RunRecord},
};

use super::{
    comings::Comings,
    effect::{Effect, Struck},
};
use crate::support::trace::Run;

pub const MS: i64 = 1_000_000;
pub const SECOND: i64 = 1000 * MS;

/// How long processes that were signalled may take to be gone, and a line to be written, on a busy host.
const TO_BE_GONE: i64 = SECOND;
/// What processes get between SIGTERM and SIGKILL if their command ended and left them (`LEFTOVER_GRACE`).
const LEFTOVER: i64 = SECOND;
/// How long it may take until the outcome of a run is recorded, and its record seen.
const TO_BE_TOLD: i64 = 30 * SECOND;
/// A jump of the store's clock of up to this is believed at once.
const BELIEVED_MS: i64 = 1000;
/// Clocks that differ by no more than this confirm each other.
const NEAR_MS: i64 = 10_000;
/// A wrong clock is believed after this time, if no more hosts contradict it than confirm it.
const PROBATION: i64 = 15 * SECOND;
/// A longer silence of a job than its period and this is a broken promise, if no fault explains it.
const SILENCE: i64 = 10 * SECOND;

/// What the judge has to know of a job.
#[derive(Debug, Clone)]
pub struct Job {
    pub name: &'static str,
    /// The time between two occurrences, which are planned at its multiples; None: the job is only triggered.
    pub period_ms: Option<i64>,
    pub lease_ns: i64,
    pub may_overlap: bool,
    pub repeats: Repeats,
    /// Its command succeeds.
    pub succeeds: bool,
    pub start_within_ms: i64,
    pub jitter_ms: i64,
    /// It is removed from the files at times: what was planned meanwhile is owed by nobody.
    pub comes_and_goes: bool,
}

/// Which attempts may follow the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeats {
    Never,
    /// `retry`: after an attempt that came to its end.
    AfterFailure,
    /// `on_crash = "rerun"`.
    AfterCrash,
}

/// A record, and when it was first seen in the store (CLOCK_BOOTTIME).
#[derive(Debug, Clone)]
pub struct Seen {
    pub record: RunRecord,
    pub seen_ns: i64,
}

/// All that happened.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    pub jobs: Vec<Job>,
    /// The starts, in their order.
    pub runs: Vec<Run>,
    pub records: Vec<Seen>,
    pub struck: Vec<Struck>,
    /// The keys that `soloist trigger` was given, and those that it accepted.
    pub keys: BTreeSet<String>,
    pub accepted: BTreeSet<String>,
    /// The keys that other jobs were triggered with.
    pub few_keys: BTreeMap<String, BTreeSet<String>>,
    /// Who had which jobs when.
    pub comings: Comings,
    /// Runs that ended before (CLOCK_BOOTTIME) are left out.
    pub since_ns: i64,
    /// Up to here (CLOCK_BOOTTIME) the lines and records are complete.
    pub now_ns: i64,
    /// Occurrences up to this one of each job have been decided when the records were read.
    pub decided: BTreeMap<String, i64>,
    /// CLOCK_REALTIME less CLOCK_BOOTTIME, ns.
    pub wall_less_boot_ns: i64,
    pub instances: usize,
    /// The fleet has come to its end: each attempt must have an outcome.
    pub over: bool,
    /// Processes of runs that are alive after the end.
    pub left_over: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// An attempt started twice.
    Duplicate,
    /// An occurrence started again although its job must not be repeated.
    Repeated,
    Overlap,
    /// A process was alive after its deadline, its daemon, its guard or its command.
    Orphan,
    /// A start before the planned instant.
    Early,
    /// An occurrence, an attempt or a trigger without a record.
    Missed,
    /// A later start with a token that is not greater.
    Token,
    /// A run that ended, or a grant that never started, without a fault that explains it.
    Lost,
    /// A start in a pause.
    Paused,
    /// A start of what was planned while no instance had the job.
    Absent,
    /// A job that did nothing for long, without a fault that explains it.
    Silence,
    /// A daemon that did not end when it was told to.
    NotEnded,
}

impl Kind {
    pub const ALL: [Self; 12] = [
        Self::Duplicate,
        Self::Repeated,
        Self::Overlap,
        Self::Orphan,
        Self::Early,
        Self::Missed,
        Self::Token,
        Self::Lost,
        Self::Paused,
        Self::Absent,
        Self::Silence,
        Self::NotEnded,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Duplicate => "duplicates",
            Self::Repeated => "repeated",
            Self::Overlap => "overlaps",
            Self::Orphan => "orphans",
            Self::Early => "early",
            Self::Missed => "missed without a record",
            Self::Token => "tokens that do not increase",
            Self::Lost => "lost without a fault",
            Self::Paused => "started in a pause",
            Self::Absent => "planned in an absence",
            Self::Silence => "silent without a fault",
            Self::NotEnded => "daemons that did not end",
        }
    }
}

/// A promise that was broken, or would have been if the documentation did not exclude it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub kind: Kind,
    pub job: String,
    /// When it became visible, CLOCK_BOOTTIME.
    pub at_ns: i64,
    pub what: String,
    /// Why it is not counted as broken.
    pub excused: Option<&'static str>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.kind.name(), self.job, self.what)?;
        match self.excused {
            Some(why) => write!(f, " (not promised: {why})"),
            None => Ok(()),
        }
    }
}

#[derive(Debug, Clone, Default)]
pub struct Verdict {
    pub findings: Vec<Finding>,
    /// Planned occurrences that were judged.
    pub judged: usize,
    /// The longest time in which a job did nothing, less what faults explain.
    pub longest_silence_ns: i64,
}

impl Verdict {
    pub fn broken(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|f| f.excused.is_none())
    }
    pub fn count(&self, kind: Kind) -> usize {
        self.broken().filter(|f| f.kind == kind).count()
    }
    pub fn excused(&self, kind: Kind) -> usize {
        let of = |f: &&Finding| f.kind == kind && f.excused.is_some();
        self.findings.iter().filter(of).count()
    }
}

pub fn judge(e: &Evidence) -> Verdict {
    let mut verdict = Verdict::default();
    for job in &e.jobs {
        let of_job = OfJob {
            e,
            job,
            runs: e.runs.iter().filter(|r| r.job == job.name).collect(),
            records: e
                .records
                .iter()
                .filter(|s| s.record.job.as_str() == job.name)
                .collect(),
        };
        of_job.starts(&mut verdict);
        of_job.overlaps(&mut verdict);
        of_job.tokens(&mut verdict);
        of_job.orphans(&mut verdict);
        of_job.occurrences(&mut verdict);
        of_job.outcomes(&mut verdict);
        of_job.triggers(&mut verdict);
        of_job.lost(&mut verdict);
        of_job.silence(&mut verdict);
    }
    for struck in &e.struck {
        if let Effect::NotEnded { instance } = &struck.effect {
            verdict.findings.push(Finding {
                kind: Kind::NotEnded,
                job: format!("i{}", instance + 1),
                at_ns: struck.from_ns,
                what: "it was still alive long after SIGTERM".into(),
                excused: None,
            });
        }
    }
    for process in &e.left_over {
        verdict.findings.push(Finding {
            kind: Kind::Orphan,
            job: "the fleet".into(),
            at_ns: e.now_ns,
            what: format!("{process} is alive after the end"),
            excused: None,
        });
    }
    verdict.findings.sort_by_key(|f| f.at_ns);
    verdict
}

struct OfJob<'a> {
    e: &'a Evidence,
    job: &'a Job,
    runs: Vec<&'a Run>,
    records: Vec<&'a Seen>,
}

fn instance(of: &Run) -> Option<usize> {
    number(&of.instance)
}

fn number(id: &str) -> Option<usize> {
    id.strip_prefix('i')?.parse::<usize>().ok()?.checked_sub(1)
}

impl OfJob<'_> {
    fn found(
        &self,
        verdict: &mut Verdict,
        kind: Kind,
        at_ns: i64,
        what: String,
        excused: Option<&'static str>,
    ) {
        verdict.findings.push(Finding {
            kind,
            job: self.job.name.to_owned(),
            at_ns,
            what,
            excused,
        });
    }

    /// A fault with such an effect at some time from `from` to `to`.
    fn any(&self, from: i64, to: i64, mut wanted: impl FnMut(&Effect) -> bool) -> bool {
        let mut within = self.e.struck.iter().filter(|s| s.touches(from, to));
        within.any(|s| wanted(&s.effect))
    }

    fn data_lost(&self, from: i64, to: i64) -> bool {
        self.any(from, to, |e| {
            matches!(e, Effect::LosesAll | Effect::GoesBack)
        })
    }

    fn garbled(&self, from: i64, to: i64) -> bool {
        self.any(from, to, |e| matches!(e, Effect::Garbled { .. }))
    }

    /// Why this start, which repeats what started at `before`, is not counted.
    fn excuse_for_a_repeat(&self, before: &Run, run: &Run) -> Option<&'static str> {
        if self.garbled(before.start_ns - 10 * SECOND, run.start_ns) {
            return Some("garbled replies");
        }
        let lost = |s: &&Struck| {
            matches!(s.effect, Effect::LosesAll | Effect::GoesBack)
                && before.start_ns <= s.from_ns
                && s.from_ns <= run.start_ns
        };
        let lost = self.e.struck.iter().find(lost)?;
        let due_ns = before.occurrence * MS - self.e.wall_less_boot_ns;
        if lost.from_ns < due_ns {
            return Some("data was lost before the time of what had started early");
        }
        let away = self.any(lost.from_ns, run.start_ns, |e| {
            e.keeps_from_the_store() && e.strikes(instance(run))
        });
        away.then_some("data was lost while the instance was stopped or cut off")
    }

    /// Duplicates, repeats, early starts, starts in a pause.
    fn starts(&self, verdict: &mut Verdict) {
        let mut attempts: BTreeMap<(i64, u32), &Run> = BTreeMap::new();
        let mut occurrences: BTreeMap<i64, &Run> = BTreeMap::new();
        for &run in &self.runs {
            if let Some(before) = attempts.insert((run.occurrence, run.attempt), run) {
                let excuse = self.excuse_for_a_repeat(before, run);
                let what = format!("{run} started after {before}");
                self.found(verdict, Kind::Duplicate, run.start_ns, what, excuse);
            }
            if let Some(before) = occurrences.insert(run.occurrence, run)
                && run.attempt != before.attempt
                && !self.may_follow(before, run)
            {
                let excuse = self.excuse_for_a_repeat(before, run);
                let what = format!("{run} started after {before}");
                self.found(verdict, Kind::Repeated, run.start_ns, what, excuse);
            }
            self.early(run, verdict);
            self.paused(run, verdict);
            self.absent(run, verdict);
        }
    }

    fn may_follow(&self, before: &Run, run: &Run) -> bool {
        match self.job.repeats {
            Repeats::AfterCrash => true,
            Repeats::Never => false,
            Repeats::AfterFailure => {
                let killed = self.any(
                    before.start_ns,
                    run.start_ns,
                    |e| matches!(e, Effect::JobKilled { run } if *run == before.run),
                );
                before.ended || killed
            }
        }
    }

    fn early(&self, run: &Run, verdict: &mut Verdict) {
        // The record of a trigger has the instant at which the store granted it.
        let scheduled = run.trigger == "schedule" && run.attempt == 1;
        let jitter = Duration::from_millis(self.job.jitter_ms.unsigned_abs());
        let jitter = match scheduled {
            true => jitter_ms(self.job.name, Occurrence(run.occurrence), jitter),
            false => 0,
        };
        let by_ms = run.occurrence + jitter - run.start_wall_us / 1000;
        if by_ms <= 0 {
            return;
        }
        let at = run.start_ns;
        let lately = at - SECOND;
        let ahead_ms = |s: &Struck| match s.effect {
            Effect::ServerClock { us } => us / 1000,
            _ => 0,
        };
        let steps = self.e.struck.iter().filter(|s| s.touches(lately, at));
        let mut excuse = None;
        for step in steps {
            let ahead = ahead_ms(step);
            if (1..=BELIEVED_MS).contains(&ahead) && by_ms <= ahead + 5 {
                return;
            }
            if ahead <= BELIEVED_MS {
                continue;
            }
            let long = step.to_ns.min(at) - step.from_ns >= PROBATION;
            // An instance that begins knows no other time. It is told by the hosts that are not near the wrong one.
            let walls = self.e.struck.iter().filter(|s| {
                matches!(s.effect, Effect::Wall { .. }) && s.touches(step.from_ns - PROBATION, at)
            });
            let begun = self.any(step.from_ns - PROBATION, at, |e| e.restarts(instance(run)));
            let misled = 2 * walls.count() >= self.e.instances || ahead <= NEAR_MS && begun;
            if long || misled {
                excuse = Some("a wrong clock of the store that was believed");
            }
        }
        if self.garbled(at - 10 * SECOND, at) {
            excuse = Some("garbled replies");
        }
        let what = format!("{run} started {by_ms} ms before its time");
        self.found(verdict, Kind::Early, at, what, excuse);
    }

    fn paused(&self, run: &Run, verdict: &mut Verdict) {
        // What was granted before may start a moment later.
        const UNDER_WAY: i64 = 1500 * MS;
        if run.trigger == "manual" {
            return;
        }
        let at = run.start_ns;
        let pause = self.e.struck.iter().find(|s| {
            matches!(&s.effect, Effect::Paused { job } if job == self.job.name)
                && s.from_ns + UNDER_WAY < at
                && at < s.to_ns
        });
        let Some(pause) = pause else { return };
        // One that was requested in the last moment before a loss may be known to nobody.
        let excuse = self
            .data_lost(pause.from_ns - SECOND, pause.from_ns + 3 * SECOND)
            .then_some("the data was lost right after the request")
            .or_else(|| self.garbled(pause.from_ns, at).then_some("garbled replies"));
        let what = format!("{run} started in a pause");
        self.found(verdict, Kind::Paused, at, what, excuse);
    }

    /// A start of what was planned while no instance had the job, which nobody owes.
    fn absent(&self, run: &Run, verdict: &mut Verdict) {
        let planned_ns = run.occurrence * MS - self.e.wall_less_boot_ns;
        if !self.job.comes_and_goes || run.trigger == "manual" {
            return;
        }
        let comings = &self.e.comings;
        let Some((from, to)) = comings.absence(self.job.name, planned_ns) else {
            return;
        };
        // One that lived all the time until the job came back tells the store of the absence, if no other one that had
        // the job took that back and died.
        let tells = |instance: usize| {
            let since = comings.without_since(instance, self.job.name, planned_ns)?;
            let to = to.min(run.start_ns);
            let kept = self.any(since - SECOND, to + SECOND, |e| {
                // A server without memory does not take in that the job is gone.
                let cannot = e.keeps_from_the_store() || *e == Effect::GrantsNothing;
                cannot && e.strikes(Some(instance))
            });
            let taken_back = comings.died_with(self.job.name, since);
            (comings.lived(instance, since, to) && !kept && !taken_back).then_some(())
        };
        let told = (0..self.e.instances).any(|i| tells(i).is_some());
        let excuse = (!told)
            .then_some("no instance could tell the store of the absence")
            .or_else(|| {
                let wrong = |e: &Effect| matches!(e, Effect::ServerClock { .. });
                self.any(from, run.start_ns, wrong)
                    .then_some("a wrong clock of the store")
            })
            .or_else(|| {
                self.garbled(from, run.start_ns)
                    .then_some("garbled replies")
            });
        let what = format!(
            "{run} was planned {} ms after the last instance had ceased to have the job, and {} ms before one had it \
             again",
            (planned_ns - from) / MS,
            (to.min(run.start_ns) - planned_ns) / MS
        );
        self.found(verdict, Kind::Absent, run.start_ns, what, excuse);
    }

    /// Some instance has to tell what became of an occurrence: it had the job before and at its time, and lived on,
    /// undisturbed, until nobody could start it any more.
    fn owed(&self, at_ns: i64, until_ns: i64) -> bool {
        const BEFORE: i64 = 3 * SECOND / 2;
        let comings = &self.e.comings;
        let until = (until_ns + 2 * SECOND).min(self.e.now_ns);
        (0..self.e.instances).any(|i| {
            comings.had(i, self.job.name, at_ns - BEFORE, at_ns + SECOND / 20)
                && comings.lived(i, at_ns, until)
                && !self.any(at_ns - BEFORE, until, |e| {
                    e.keeps_from_the_store() && *e != Effect::Silenced && e.strikes(Some(i))
                })
        })
    }

    fn overlaps(&self, verdict: &mut Verdict) {
        if self.job.may_overlap {
            return;
        }
        let mut longest: Option<&Run> = None;
        for &run in &self.runs {
            if let Some(before) = longest
                && run.start_ns <= before.last_ns
            {
                let by_ms = (before.last_ns - run.start_ns) / MS;
                let what = format!("{run} started {by_ms} ms before the end of {before}");
                let excuse = self.excuse_for_life(before, before.start_ns, before.last_ns);
                self.found(verdict, Kind::Overlap, run.start_ns, what, excuse);
            }
            if longest.is_none_or(|l| run.last_ns > l.last_ns) {
                longest = Some(run);
            }
        }
    }

    /// Why nothing is promised of the end of a run: neither its daemon nor its guard could act (A3).
    fn excuse_for_life(&self, run: &Run, from: i64, to: i64) -> Option<&'static str> {
        let of = instance(run);
        let whole = self.any(
            from,
            to,
            |e| matches!(e, Effect::Frozen { instance } if Some(*instance) == of),
        );
        if whole {
            return Some("the whole instance was frozen");
        }
        // Until the next daemon of the instance has ended what is left.
        let both = self.e.struck.iter().find(|s| {
            matches!(s.effect, Effect::BothKilled { instance } if Some(instance) == of)
                && s.touches(from, to)
        });
        if both.is_some_and(|both| self.swept_by(of, both).is_none_or(|swept| to <= swept)) {
            return Some("daemon and guard were killed at the same instant");
        }
        let guard = self.any(
            from,
            to,
            |e| matches!(e, Effect::GuardHalted { run: halted, .. } if *halted == run.run),
        );
        if guard {
            return Some("the guard was stopped");
        }
        self.any(from, to, |e| matches!(e, Effect::HostStalled))
            .then_some("this host stood still")
    }

    /// When what a daemon and its guards left must be gone: its instance has started again.
    fn swept_by(&self, of: Option<usize>, killed: &Struck) -> Option<i64> {
        let started = self.e.struck.iter().find(|s| {
            s.from_ns >= killed.from_ns
                && matches!(s.effect, Effect::Started { instance } if Some(instance) == of)
        });
        // A guard that is not quite dead at the start keeps what is left until the next look, ten seconds later.
        started.map(|s| s.from_ns + 10 * SECOND + 2 * TO_BE_GONE)
    }

    fn tokens(&self, verdict: &mut Verdict) {
        if self.job.may_overlap {
            return;
        }
        let mut greatest: Option<&Run> = None;
        for &run in &self.runs {
            if let Some(before) = greatest
                && run.token <= before.token
            {
                let lost =
                    run.attempt > 1 && self.data_lost(before.start_ns - 60 * SECOND, run.start_ns);
                let excuse = lost
                    .then_some("an attempt that is repeated after data was lost")
                    .or_else(|| self.excuse_for_a_repeat(before, run))
                    // It may have been granted before, and started when its lease was over.
                    .or_else(|| self.excuse_for_life(run, before.start_ns, run.start_ns));
                let what = format!("{run} started after {before}");
                self.found(verdict, Kind::Token, run.start_ns, what, excuse);
            }
            if greatest.is_none_or(|g| run.token > g.token) {
                greatest = Some(run);
            }
        }
    }

    /// Signs of life after the moment at which all of the run had to be gone.
    fn orphans(&self, verdict: &mut Verdict) {
        for &run in &self.runs {
            let Some((deadline, why)) = self.deadline(run) else {
                continue;
            };
            if run.last_ns <= deadline {
                continue;
            }
            let excuse = self.excuse_for_life(run, run.start_ns, run.last_ns);
            let late = (run.last_ns - deadline) / MS;
            let what = format!("{run} was alive {late} ms after it had to be gone: {why}");
            self.found(verdict, Kind::Orphan, deadline, what, excuse);
        }
    }

    /// When all of the run had to be gone, with the time that a busy host may need, and why.
    fn deadline(&self, run: &Run) -> Option<(i64, &'static str)> {
        let of = instance(run);
        let lease = self.job.lease_ns;
        let mut first: Option<(i64, &'static str)> = None;
        let mut note = |at: i64, why| {
            if first.is_none_or(|(before, _)| at < before) {
                first = Some((at, why));
            }
        };
        if let Some(ended) = run.ended_ns {
            note(ended + LEFTOVER + TO_BE_GONE, "its command had ended");
        }
        for s in &self.e.struck {
            let at = s.done_ns;
            if at > run.last_ns || s.to_ns < run.start_ns {
                continue;
            }
            match &s.effect {
                Effect::Killed { instance } if Some(*instance) == of && at >= run.start_ns => {
                    note(at + TO_BE_GONE, "its daemon was killed");
                }
                Effect::GuardKilled { run: killed } if *killed == run.run => {
                    let halted = self.any(
                        at - SECOND,
                        run.last_ns,
                        |e| matches!(e, Effect::Stopped { instance } if Some(*instance) == of),
                    );
                    if !halted {
                        note(at + TO_BE_GONE, "its guard was killed");
                    }
                }
                // The guard ends it at its deadline, whatever comes afterwards.
                Effect::Stopped { .. } | Effect::Cut { .. } | Effect::Silenced
                    if s.effect.strikes(of) && s.to_ns > at.max(run.start_ns) + lease =>
                {
                    note(
                        at.max(run.start_ns) + lease + TO_BE_GONE / 4,
                        "its lease was not renewed",
                    );
                }
                Effect::BothKilled { instance } if Some(*instance) == of && at >= run.start_ns => {
                    if let Some(swept) = self.swept_by(of, s) {
                        note(
                            swept,
                            "its daemon and guard were killed, and a daemon started again",
                        );
                    }
                }
                _ => {}
            }
        }
        first
    }

    /// Each planned occurrence has started or has a record. Until its lease is over, one that was granted may still be
    /// about to start, also while newer ones run.
    fn occurrences(&self, verdict: &mut Verdict) {
        let (Some(period), Some(&until)) = (self.job.period_ms, self.e.decided.get(self.job.name))
        else {
            return;
        };
        let mut known: BTreeSet<i64> = BTreeSet::new();
        for run in &self.runs {
            known.insert(run.occurrence);
        }
        for seen in &self.records {
            let count = i64::try_from(seen.record.count)
                .unwrap_or(i64::MAX)
                .min(100_000);
            known.extend((0..count).map(|n| seen.record.occurrence.0 - n * period));
        }
        let first = self.runs.iter().map(|r| r.occurrence).min();
        let Some(first) = first else { return };
        let mut at = (first + period - 1) / period * period;
        while at <= until {
            let at_ns = at * MS - self.e.wall_less_boot_ns;
            let until_ns = at_ns + self.job.start_within_ms * MS;
            let mut by_ns = until_ns + 2 * self.job.lease_ns;
            if self.job.comes_and_goes {
                if !self.owed(at_ns, until_ns) {
                    at += period;
                    continue;
                }
                // It is told when the server answers again.
                by_ns += 20 * SECOND;
            }
            verdict.judged += 1;
            if !known.contains(&at) && (self.e.over || by_ns < self.e.now_ns) {
                let what = format!("{at} has neither a start nor a record");
                let excuse = self.excuse_for_no_record(at_ns);
                self.found(verdict, Kind::Missed, at_ns, what, excuse);
            }
            at += period;
        }
    }

    /// What was decided in data that was lost has no record; so has what came due until each instance had found the
    /// loss.
    fn excuse_for_no_record(&self, at_ns: i64) -> Option<&'static str> {
        let within = self.job.start_within_ms * MS;
        if self.data_lost(at_ns - self.until_found(at_ns), at_ns + within + 5 * SECOND) {
            return Some("decided in data that was lost");
        }
        if self.garbled(at_ns - 10 * SECOND, at_ns + within) {
            return Some("garbled replies");
        }
        let mut silences = self
            .e
            .struck
            .iter()
            .filter(|s| s.effect == Effect::Silenced);
        let came_back = |s: &Struck| self.e.comings.lacked(self.job.name, s.from_ns, s.to_ns);
        silences
            .any(|s| s.touches(at_ns, at_ns) && came_back(s))
            .then_some("the store was silent while the job came back on some instance")
    }

    /// How long it may take after a loss until each instance knows it: a quarantine, and what keeps one of them away.
    fn until_found(&self, at_ns: i64) -> i64 {
        let away = self.e.struck.iter().filter(|s| {
            s.effect.keeps_from_the_store() && s.from_ns < at_ns && s.to_ns > at_ns - 20 * SECOND
        });
        let longest = away.map(|s| s.to_ns.min(at_ns) - s.from_ns).max();
        3 * self.job.lease_ns + 5 * SECOND + longest.unwrap_or(0)
    }

    /// Each attempt that started has an outcome in the end.
    fn outcomes(&self, verdict: &mut Verdict) {
        if !self.e.over {
            return;
        }
        let told: BTreeSet<(i64, u32)> = self
            .records
            .iter()
            .filter(|s| s.record.outcome != Outcome::Running)
            .map(|s| (s.record.occurrence.0, s.record.attempt))
            .collect();
        for run in &self.runs {
            if told.contains(&(run.occurrence, run.attempt)) {
                continue;
            }
            let lost = self.data_lost(run.start_ns - SECOND, run.last_ns + TO_BE_TOLD);
            let excuse = lost.then_some("decided in data that was lost").or_else(|| {
                self.garbled(run.start_ns - 10 * SECOND, run.last_ns + 10 * SECOND)
                    .then_some("garbled replies")
            });
            let what = format!("{run} has no outcome");
            self.found(verdict, Kind::Missed, run.last_ns, what, excuse);
        }
    }

    fn triggers(&self, verdict: &mut Verdict) {
        if self.job.period_ms.is_some() {
            return self.few_triggers(verdict);
        }
        let started: BTreeSet<i64> = self.runs.iter().map(|r| r.occurrence).collect();
        if started.len() > self.e.keys.len() {
            let what = format!(
                "{} triggers started, {} keys were given",
                started.len(),
                self.e.keys.len()
            );
            let excuse = self.garbled(0, i64::MAX).then_some("garbled replies");
            self.found(verdict, Kind::Duplicate, self.e.now_ns, what, excuse);
        }
        if !self.e.over {
            return;
        }
        let mut told = started;
        told.extend(self.records.iter().map(|s| s.record.occurrence.0));
        if told.len() < self.e.accepted.len() {
            let what = format!(
                "{} triggers have an outcome, {} were accepted",
                told.len(),
                self.e.accepted.len()
            );
            let lost = self.data_lost(0, i64::MAX);
            let excuse = lost.then_some("decided in data that was lost");
            self.found(verdict, Kind::Missed, self.e.now_ns, what, excuse);
        }
    }

    /// A key runs the job once.
    fn few_triggers(&self, verdict: &mut Verdict) {
        let manual = self.runs.iter().filter(|r| r.trigger == "manual");
        let started: BTreeSet<i64> = manual.map(|r| r.occurrence).collect();
        let Some(keys) = self.e.few_keys.get(self.job.name) else {
            return;
        };
        let given = keys.len();
        if started.len() > given {
            let what = format!(
                "{} triggers started, {given} keys were given",
                started.len()
            );
            let excuse = self.garbled(0, i64::MAX).then_some("garbled replies");
            self.found(verdict, Kind::Duplicate, self.e.now_ns, what, excuse);
        }
    }

    /// Runs that did not come to their end, and grants that were not started, without a reason.
    fn lost(&self, verdict: &mut Verdict) {
        let runs: BTreeMap<&str, &Run> = self.runs.iter().map(|r| (r.run.as_str(), *r)).collect();
        for seen in &self.records {
            let r = &seen.record;
            let lost = match r.outcome {
                Outcome::LeaseLost | Outcome::Unknown | Outcome::Crashed | Outcome::TimedOut => {
                    true
                }
                Outcome::Failed => self.job.succeeds,
                _ => false,
            };
            // What is older may be of a run that is not in the evidence.
            if !lost || seen.seen_ns < self.e.since_ns + 60 * SECOND {
                continue;
            }
            let of = r.instance.as_ref().and_then(|i| number(i.as_str()));
            let name = r.run_id.map(|id| id.to_string());
            let run = name.as_deref().and_then(|id| runs.get(id));
            let (from, to) = self.when_lost(seen, run.copied());
            let explains = |e: &Effect| e.explains_a_loss(of, name.as_deref());
            // What nobody knows the end of is told again from older data.
            let lost = self.data_lost(from, seen.seen_ns);
            if !lost && !self.any(from, to, explains) {
                let what = format!(
                    "{} attempt {} on {} ended as {}{}{}",
                    r.occurrence.0,
                    r.attempt,
                    r.instance.as_ref().map_or("no instance", |i| i.as_str()),
                    r.outcome,
                    if run.is_some() {
                        ""
                    } else {
                        " without a start"
                    },
                    r.error
                        .as_ref()
                        .map_or_else(String::new, |e| format!(": {e}")),
                );
                self.found(verdict, Kind::Lost, seen.seen_ns, what, None);
            }
        }
    }

    /// The time in which a fault must have struck, if it made this run end, or kept it from its start.
    fn when_lost(&self, seen: &Seen, run: Option<&Run>) -> (i64, i64) {
        const BEFORE: i64 = 2 * SECOND;
        const AFTER: i64 = SECOND;
        /// That of the longest lease, and as much on a busy host.
        const QUARANTINE: i64 = 10 * SECOND;
        if let Some(run) = run {
            // Who is stopped says nothing more, and may be ended long after.
            let halted = |e: &Effect| matches!(e, Effect::JobHalted);
            let to = match self.any(run.start_ns, run.last_ns + AFTER, halted) {
                true => seen.seen_ns,
                false => run.last_ns + AFTER,
            };
            return (run.start_ns - BEFORE, to);
        }
        let boot = |ms: i64| (ms * MS - self.e.wall_less_boot_ns).min(seen.seen_ns);
        let wrong = self.any(seen.seen_ns - 60 * SECOND, seen.seen_ns, |e| {
            matches!(e, Effect::ServerClock { .. })
        });
        match seen.record.started_at {
            // Of a run that never started it is when it was granted, by the store's clock.
            Some(granted) if !wrong => (boot(granted) - BEFORE, boot(granted) + AFTER),
            _ => {
                let planned = boot(seen.record.occurrence.0);
                // A lost trigger is told of, as of that moment, once somebody decides again.
                let told = match seen.record.attempt {
                    0 => QUARANTINE,
                    _ => 0,
                };
                (planned - self.job.lease_ns - BEFORE - told, seen.seen_ns)
            }
        }
    }

    /// Times in which no run of the job was alive and nothing was decided, less what faults explain.
    fn silence(&self, verdict: &mut Verdict) {
        let Some(period) = self.job.period_ms else {
            return;
        };
        if self.job.comes_and_goes {
            return;
        }
        let mut alive: Vec<(i64, i64)> =
            self.runs.iter().map(|r| (r.start_ns, r.last_ns)).collect();
        alive.extend(self.records.iter().map(|s| (s.seen_ns, s.seen_ns)));
        alive.sort_unstable();
        let Some(&(_, mut last)) = alive.first() else {
            return;
        };
        alive.push((self.e.now_ns, self.e.now_ns));
        for (from, to) in alive {
            if from > last {
                let silent = self.unexplained(last, from);
                verdict.longest_silence_ns = verdict.longest_silence_ns.max(silent);
                if silent > period * MS + SILENCE {
                    let what = format!("nothing for {} ms", silent / MS);
                    self.found(verdict, Kind::Silence, from, what, None);
                }
            }
            last = last.max(to);
        }
    }

    /// So much of this time no fault explains.
    fn unexplained(&self, from: i64, to: i64) -> i64 {
        let mut explained: Vec<(i64, i64)> = self
            .e
            .struck
            .iter()
            .filter_map(|s| {
                let until = s.silent_until(self.job.name, self.job.lease_ns, self.e.instances)?;
                Some((s.from_ns.max(from), until.min(to)))
            })
            .filter(|(from, to)| from < to)
            .collect();
        explained.sort_unstable();
        let (mut left, mut upto) = (to - from, from);
        for (from, to) in explained {
            left -= (to - from.max(upto)).max(0);
            upto = upto.max(to);
        }
        left
    }
}

#[cfg(test)]
#[allow(unused, reason = "there are no tests in the harness's own program")]
#[path = "judge_tests.rs"]
mod tests;
