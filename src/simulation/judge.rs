//! What a simulated fleet promises, judged by what its commands did, and by what the store kept.

use std::collections::{BTreeMap, BTreeSet};

use super::host::EPOCH_US;
use crate::{
    config::Config,
    logic::{claim::OnCrash, guard_life::DAEMON_GONE_GRACE, schedule::next_of},
    model::{Occurrence, Outcome, RunId, RunRecord, Trigger, job::Job},
    runner::Seen,
};

const SECOND: u64 = 1_000_000_000;
/// What ended so shortly before the end of the simulation need not be settled yet, ns.
const SETTLING: u64 = SECOND;
/// What was granted may start so much later, ns: a lease.
const GRANTED: u64 = 2 * SECOND;
/// At the end each job has had so long to run again, or to tell what became of an occurrence, ns.
const CALM: u64 = 12 * SECOND;
/// A request may be sent again for so long, ns.
const AGAIN: u64 = 10 * SECOND;

/// What happened, in the simulation's time, ns.
#[derive(Debug, Default)]
pub(super) struct Story {
    pub(super) now: u64,
    pub(super) seen: Vec<Seen>,
    /// What the store has of each job at the end.
    pub(super) histories: BTreeMap<String, Vec<RunRecord>>,
    /// When the store started again, with its data, without them, or with older data.
    pub(super) lost_at: Vec<u64>,
    /// It lost some of its data.
    pub(super) data_lost: bool,
    /// The store's clock was wrong until then; 0: never.
    pub(super) clock_right_since: u64,
    /// When somebody rewound each of these jobs.
    pub(super) rewound: BTreeMap<&'static str, u64>,
    /// When the daemon of each host was killed, and when the next one started there.
    pub(super) deaths: Vec<(usize, u64, Option<u64>)>,
    /// Pauses: when each was asked for, and when it was confirmed; and when an end of it was asked for.
    pub(super) pauses: Vec<(&'static str, u64, u64)>,
    pub(super) resumes: Vec<(&'static str, u64)>,
    /// How many keys people gave to triggers of the job `hand`.
    pub(super) keys: usize,
}

/// An attempt: its token is made of these.
type Token = (i64, u32);

fn token(r: &RunRecord) -> Token {
    (r.occurrence.0, r.attempt)
}

fn true_us(at: u64) -> i64 {
    EPOCH_US + (at / 1000) as i64
}

impl Story {
    /// The promises that were broken, and how.
    pub(super) fn judge(&self, config: &Config) -> Vec<String> {
        let mut broken = vec![];
        for job in config.jobs.values() {
            let of_job = |s: &&Seen| s.record.job == job.name;
            let of_job: Vec<&Seen> = self.seen.iter().filter(of_job).collect();
            self.judge_starts(job, &of_job, &mut broken);
            // Nobody knows what a wrong clock decided.
            if self.clock_right_since == 0 {
                self.judge_outcomes(job, &of_job, &mut broken);
            }
            let last = of_job.iter().rfind(|s| s.ended.is_none());
            let silent = self.now - last.map_or(0, |s| s.world);
            if !job.schedules.is_empty() && silent > CALM {
                let (name, silent) = (&job.name, silent / SECOND);
                broken.push(format!("{name} does not run: {silent} s without a start"));
            }
        }
        self.judge_orphans(&mut broken);
        broken
    }

    fn lost_between(&self, from: u64, to: u64) -> bool {
        self.lost_at.iter().any(|at| (from..=to).contains(at))
    }

    fn end_of(&self, run: RunId) -> Option<&Seen> {
        let mut all = self.seen.iter();
        all.find(|s| s.run == run && s.ended.is_some())
    }

    fn judge_starts(&self, job: &Job, seen: &[&Seen], broken: &mut Vec<String>) {
        let mut attempts: BTreeSet<Token> = BTreeSet::new();
        let (mut runs, mut alive) = (BTreeSet::new(), BTreeSet::new());
        let (mut newest, mut timely): (Token, Token) = Default::default();
        let mut early: Vec<i64> = vec![];
        let mut cancelled = BTreeSet::new();
        let once = job.on_crash == OnCrash::Fail && job.retry.is_none();
        for s in seen {
            let (r, at) = (&s.record, s.world);
            let (occurrence, attempt) = token(r);
            if let Some(outcome) = s.ended {
                alive.remove(&s.run);
                if outcome == Outcome::Cancelled {
                    cancelled.insert(occurrence);
                }
                continue;
            }
            let mut breaks = |how: &str| {
                let at = at as f64 / 1e9;
                let name = format!("{at:.3} {} {} attempt {attempt}", job.name, r.occurrence);
                broken.push(format!("{name} on i{} {how}", s.host));
            };
            let lost = self.lost_between(0, at);
            // What ran before its time is decided in the future, which nobody remembers after a loss.
            let forgotten = lost && early.iter().any(|at| *at >= occurrence);
            // A wrong clock may be believed for a while, by those who know no other.
            let is_early = occurrence * 1000 > true_us(at);
            if is_early && self.clock_right_since != 0 {
                early.push(occurrence);
            } else if is_early {
                breaks("starts before its time");
            }
            let late_ms = true_us(at.saturating_sub(GRANTED)) / 1000 - occurrence;
            let timely_clock = r.trigger == Trigger::Schedule && self.clock_right_since == 0;
            if timely_clock && late_ms > job.start_within.as_millis() as i64 {
                breaks("starts too late");
            }
            if !runs.insert(s.run) {
                breaks("starts as a run that was");
            }
            if attempts.contains(&(occurrence, attempt)) && !forgotten {
                breaks("starts twice");
            }
            let before = attempts.iter().filter(|(at, _)| *at == occurrence).count();
            if before > 0 && !forgotten && (once || before >= job.max_attempts as usize) {
                breaks("starts the occurrence once too often");
            }
            if cancelled.contains(&occurrence) && !lost {
                breaks("starts after somebody cancelled the occurrence");
            }
            attempts.insert((occurrence, attempt));
            if !alive.is_empty() {
                breaks(&format!("starts while others are alive: {alive:?}"));
            }
            alive.insert(s.run);
            // An attempt that is repeated after a loss may come after a newer occurrence (docs/guarantees.md). Nor does
            // one that ran early count after somebody has rewound the job.
            let repeated = attempt > 1 && lost || forgotten;
            let back = self.rewound.get(job.name.as_str());
            let back = back.is_some_and(|then| *then <= at);
            let greatest = if back { timely } else { newest };
            if greatest >= (occurrence, attempt) && !repeated {
                breaks(&format!("starts after {greatest:?}"));
            }
            newest = newest.max((occurrence, attempt));
            if !is_early {
                timely = timely.max((occurrence, attempt));
            }
            let planned = matches!(r.trigger, Trigger::Schedule | Trigger::CatchUp);
            if planned && self.paused(job, at) {
                breaks("starts in a pause");
            }
        }
        if job.schedules.is_empty() && attempts.len() > self.keys {
            let (name, n, keys) = (&job.name, attempts.len(), self.keys);
            broken.push(format!("{name} starts {n} times for {keys} keys"));
        }
    }

    /// The job has been paused for so long that nothing planned may start any more.
    fn paused(&self, job: &Job, at: u64) -> bool {
        let mut pauses = self.pauses.iter();
        pauses.any(|(of, asked, confirmed)| {
            let since = asked.saturating_sub(AGAIN);
            let mut resumes = self.resumes.iter().filter(|(resumed, _)| resumed == of);
            job.name.as_str() == *of
                && confirmed + GRANTED < at
                && !resumes.any(|(_, resumed)| (since..=at).contains(resumed))
                && !self.lost_between(*asked, at)
        })
    }

    /// What the history says is what the commands did, and it leaves nothing out.
    fn judge_outcomes(&self, job: &Job, seen: &[&Seen], broken: &mut Vec<String>) {
        let history = self.histories.get(job.name.as_str());
        let period = next_of(&job.schedules, Occurrence(0)).map_or(0, |at| at.0);
        let (mut decided, mut ended) = (BTreeSet::new(), BTreeSet::new());
        for r in history.into_iter().flatten() {
            let count = i64::try_from(r.count).expect("a number");
            decided.extend((0..count).map(|n| r.occurrence.0 - n * period));
            ended.extend((r.outcome != Outcome::Running).then(|| token(r)));
            let by_itself = |outcome| matches!(outcome, Outcome::Succeeded | Outcome::Failed);
            let end = r.run_id.and_then(|run| self.end_of(run)?.ended);
            if by_itself(r.outcome) && end != Some(r.outcome) {
                let (at, said) = (r.occurrence, r.outcome);
                broken.push(format!("{} {at} is said to have {said}: {end:?}", job.name));
            }
        }
        // What was decided in data that were lost has no outcome.
        if self.data_lost {
            return;
        }
        let starts = seen.iter().filter(|s| s.ended.is_none());
        let starts: BTreeMap<Token, &&Seen> = starts.map(|s| (token(&s.record), s)).collect();
        for ((at, attempt), start) in &starts {
            let end = self.end_of(start.run);
            let settled = end.is_some_and(|s| s.world + SETTLING <= self.now);
            if settled && !ended.contains(&(*at, *attempt)) {
                let (name, at) = (&job.name, Occurrence(*at));
                broken.push(format!("{name} {at} attempt {attempt} has no outcome"));
            }
        }
        let Some(((first, _), _)) = starts.first_key_value() else {
            return;
        };
        let last = true_us(self.now - CALM) / 1000;
        let mut at = Occurrence(*first);
        while let Some(next) = next_of(&job.schedules, at).filter(|next| next.0 <= last) {
            at = next;
            let started = starts.range((at.0, 0)..=(at.0, u32::MAX)).next();
            if started.is_none() && !decided.contains(&at.0) {
                broken.push(format!("{} {at} has no outcome", job.name));
            }
        }
    }

    /// No command outlives its daemon by more than the guard needs to end it, or starts without one.
    fn judge_orphans(&self, broken: &mut Vec<String>) {
        let grace = DAEMON_GONE_GRACE.as_nanos() as u64 + SECOND / 10;
        for (host, died, next) in &self.deaths {
            let starts = self.seen.iter().filter(|s| s.ended.is_none());
            for start in starts.filter(|s| s.host == *host) {
                let end = self.end_of(start.run).map_or(self.now, |s| s.world);
                if start.world <= *died && end > died + grace {
                    broken.push(format!("run {} outlives its daemon", start.run));
                }
                if start.world > *died && next.is_none_or(|next| start.world <= next) {
                    broken.push(format!("run {} starts without its daemon", start.run));
                }
            }
        }
    }
}
