//! A job's due occurrences on this instance, until they are decided.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::Ask;
use crate::{
    logic::{
        catch_up::{Backlog, CatchUp},
        claim::{Missed, NEVER, Overlap, Target},
        schedule::{Schedule, next_of},
        timetable,
    },
    model::{JobName, Occurrence, Trigger, job::Job},
};

/// An occurrence that is due. Times are Unix ms of the store's clock.
#[derive(Debug, Clone, PartialEq)]
pub struct Due {
    pub job: JobName,
    pub target: Target,
    /// The planned instant plus the jitter.
    pub start_at: i64,
    /// The last moment for a start.
    pub start_by: i64,
    /// It was overdue when this instance learned of it.
    pub overdue: bool,
    /// Earlier occurrences that are given up with it.
    pub missed: Vec<Missed>,
}

/// An occurrence that is claimed later than this after its `start_at` is caught up, not on schedule.
const LATE_MS: i64 = 1000;
/// Up to so many given-up occurrences get a record each; more than that share one record.
const EACH: usize = 100;

/// A range of overdue occurrences. They are listed one by one only when their turn comes: after a night in which the
/// host was suspended or the store could not be reached, they take no memory each.
#[derive(Debug, Clone)]
pub struct Segment {
    pub backlog: Backlog,
    /// No instance was running when they came due. Otherwise they came due on this instance, and with
    /// [`Overlap::Queue`] they wait for each other.
    pub absent: bool,
}

/// The oldest occurrences of the segments, one by one.
#[derive(Debug)]
pub struct Unfolded {
    due: Vec<Due>,
    /// The segments have no occurrences up to here any more.
    upto: Occurrence,
    /// The queue's `turn` when the segments were read.
    turn: u32,
}

#[derive(Debug, Default, Clone)]
pub(super) struct Queue {
    due: VecDeque<Due>,
    /// Ascending. Occurrences before the first segment are in `due`, and go first.
    backlog: VecDeque<Segment>,
    /// Occurrences that a former definition planned, and that still wait for its jitter. The dispatcher hands them in
    /// again when that has passed; until then nothing overtakes them.
    waiting: Vec<Due>,
    /// Counts how often the backlog was begun anew.
    turn: u32,
    /// The occurrences in the queue could not be decided for a while, so several of them are overdue.
    outage: bool,
    /// Occurrences that ran before their time, and so are not given up. Ascending.
    early: Vec<Occurrence>,
}

impl Queue {
    /// Adds an occurrence that must not start before it is pushed, or a later one is.
    pub(super) fn wait(&mut self, due: Due) {
        if !self.waiting.iter().any(|d| same(&d.target, &due.target)) {
            self.waiting.push(due);
        }
    }

    /// The waiting occurrences up to `at` are due now, and go before the one that starts at `start_at`.
    fn pull(&mut self, at: Occurrence, start_at: i64, now: i64, asked: impl Fn(&Target) -> bool) {
        let not_after = |d: &Due| matches!(d.target, Target::Scheduled(x) if x <= at);
        let mut pulled: Vec<Due> = self.waiting.extract_if(.., |d| not_after(d)).collect();
        pulled.sort_by_key(|d| d.start_at);
        for mut d in pulled {
            d.start_at = d.start_at.min(start_at);
            self.insert(d, now, &asked);
        }
    }

    /// `asked` as for [`Queue::next_claim`].
    pub(super) fn push(&mut self, due: Due, now: i64, asked: impl Fn(&Target) -> bool) {
        if let Target::Scheduled(at) = due.target {
            self.pull(at, due.start_at, now, &asked);
        }
        self.insert(due, now, asked);
    }

    /// Adds a segment behind the backlog. A segment from when no instance was running replaces the backlog.
    pub(super) fn overdue(&mut self, s: Segment, now: i64, asked: impl Fn(&Target) -> bool) {
        self.pull(s.backlog.last, s.backlog.after.0, now, asked);
        if s.absent {
            self.turn += 1;
            self.backlog.clear();
        }
        self.backlog.push_back(s);
    }

    /// True: `due` is now the last occurrence of the backlog.
    pub(super) fn absorb(&mut self, job: &Job, due: &Due) -> bool {
        let Target::Scheduled(at) = due.target else {
            return false;
        };
        let later = |d: &Due, last| matches!(d.target, Target::Scheduled(x) if x > last);
        let Some(b) = self.backlog.back_mut().map(|s| &mut s.backlog) else {
            return false;
        };
        let follows = Arc::ptr_eq(&b.schedules, &job.schedules)
            && due.missed.is_empty()
            && !self.due.iter().any(|d| later(d, b.last))
            && next_of(&b.schedules, b.last) == Some(at);
        if follows {
            b.last = at;
        }
        follows
    }

    /// Moves the end of a long queue into the backlog.
    pub(super) fn compact(&mut self, job: &Job, asked: impl Fn(&Target) -> bool) {
        if self.due.len() <= EACH {
            return;
        }
        let at = |d: &Due| match d.target {
            Target::Scheduled(at) if d.missed.is_empty() && !asked(&d.target) => Some(at),
            _ => None,
        };
        let from = (EACH / 2..self.due.len()).rev().find(|i| {
            let pair = at(&self.due[i - 1]).zip(at(&self.due[*i]));
            pair.is_none_or(|(a, b)| next_of(&job.schedules, a) != Some(b))
        });
        let from = from.map_or(EACH / 2, |i| i + 1);
        let (Some(first), Some(last)) = (self.due.get(from), self.due.back()) else {
            return;
        };
        let (Some(after), Some(_), Some(last)) = (at(&self.due[from - 1]), at(first), at(last))
        else {
            return;
        };
        if self.backlog.back().is_some_and(|s| s.backlog.last > after) {
            return;
        }
        let backlog = Backlog {
            schedules: job.schedules.clone(),
            jitter: job.jitter,
            after,
            last,
        };
        self.due.truncate(from);
        self.backlog.push_back(Segment {
            backlog,
            absent: false,
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.due.is_empty() && self.backlog.is_empty()
    }

    /// The segments and the queue's turn, if their oldest occurrences have to be listed now: outside of any lock,
    /// because that may take a while.
    pub(super) fn next_segments(&mut self, known: Occurrence) -> Option<(Vec<Segment>, u32)> {
        self.backlog.retain(|s| s.backlog.last > known);
        let front = self.backlog.front()?.backlog.after.max(known);
        let before = |d: &Due| matches!(d.target, Target::Scheduled(at) if at <= front);
        if self.due.iter().any(before) {
            return None;
        }
        Some((self.backlog.iter().cloned().collect(), self.turn))
    }

    pub(super) fn unfolded(&mut self, u: Unfolded, now: i64, asked: impl Fn(&Target) -> bool) {
        if u.turn != self.turn {
            return;
        }
        for s in &mut self.backlog {
            s.backlog.after = s.backlog.after.max(u.upto);
        }
        self.backlog.retain(|s| s.backlog.last > u.upto);
        for due in u.due {
            self.insert(due, now, &asked);
        }
    }

    fn insert(&mut self, due: Due, now: i64, asked: impl Fn(&Target) -> bool) {
        // Most come in order: then a look at the last one shows that `due` is new.
        let newer = matches!(
            (self.due.back().map(|d| &d.target), &due.target),
            (None, _) | (Some(Target::Scheduled(_)), Target::Scheduled(_))
        ) && self.due.back().is_none_or(|d| d.start_at < due.start_at);
        let known = (!newer).then(|| self.due.iter_mut().find(|d| same(&d.target, &due.target)));
        if let Some(Some(d)) = known {
            // The occurrences that are given up with it may be new.
            d.missed.extend(due.missed);
            in_order(&mut d.missed);
            return;
        }
        self.due.push_back(due);
        if self.due.len() > EACH {
            self.fold(now, asked);
        }
        // In order of their start, also when triggers come in between.
        if self
            .due
            .iter()
            .rev()
            .nth(1)
            .is_some_and(|d| d.start_at > self.due[self.due.len() - 1].start_at)
        {
            self.due.make_contiguous().sort_by_key(|d| d.start_at);
        }
    }

    pub(super) fn outage(&mut self) {
        self.outage = true;
    }

    pub(super) fn clear(&mut self) {
        self.due.clear();
        self.backlog.clear();
        self.waiting.clear();
        self.turn += 1;
        self.outage = false;
    }

    pub(super) fn forget_scheduled(&mut self) {
        self.due
            .retain(|d| matches!(d.target, Target::Manual { .. }));
        self.backlog.clear();
        self.waiting.clear();
        self.turn += 1;
    }

    pub(super) fn forget_after(&mut self, now: Occurrence) {
        self.due
            .retain(|d| !matches!(d.target, Target::Scheduled(at) if at > now));
    }

    /// `target` is decided; if it is scheduled, so is every scheduled occurrence before it.
    pub(super) fn done(&mut self, target: &Target) {
        match target {
            Target::Scheduled(at) => {
                let over = |d: &Due| matches!(d.target, Target::Scheduled(x) if x <= *at);
                self.due.retain(|d| !over(d));
                self.waiting.retain(|d| !over(d));
            }
            manual => self.due.retain(|d| !same(&d.target, manual)),
        }
        if self.due.len() <= 1 && self.backlog.is_empty() {
            self.outage = false;
        }
    }

    /// Takes what others have decided out of what is given up here.
    pub(super) fn trim(&mut self, schedules: &[Arc<Schedule>], known: Occurrence) {
        self.early.retain(|at| *at > known);
        for d in &mut self.due {
            let left = |m| timetable::undecided(schedules, known, &self.early, m);
            d.missed = std::mem::take(&mut d.missed)
                .into_iter()
                .flat_map(left)
                .collect();
        }
    }

    /// These ran before their time.
    pub(super) fn ran(&mut self, early: Vec<Occurrence>) {
        self.early = early;
    }

    /// The first scheduled occurrence after `known`.
    pub(super) fn first_after(&self, known: Occurrence) -> Option<Occurrence> {
        let scheduled = self.due.iter().chain(&self.waiting);
        let scheduled = scheduled.filter_map(|d| match d.target {
            Target::Scheduled(at) => Some(at),
            Target::Manual { .. } => None,
        });
        let backlog = self.backlog.iter().filter_map(|s| s.first_after(known));
        scheduled.filter(|at| *at > known).chain(backlog).min()
    }

    /// True: a claim for `target` that gives up `missed` would jump over a due occurrence that came in after the claim
    /// was planned.
    pub(super) fn jumped(&self, known: Occurrence, target: &Target, missed: &[Missed]) -> bool {
        let Target::Scheduled(target) = target else {
            return false;
        };
        let left_out = |at: Occurrence| {
            at > known
                && at < *target
                && !self.early.contains(&at)
                && !missed.iter().any(|m| m.first <= at && at <= m.last)
        };
        let backlog = self.backlog.iter().filter_map(|s| s.first_after(known));
        let mut due = self.due.iter().chain(&self.waiting);
        due.any(|d| match d.target {
            Target::Scheduled(at) => left_out(at) || d.missed.iter().any(|m| left_out(m.last)),
            Target::Manual { .. } => false,
        }) || backlog.into_iter().any(left_out)
    }

    /// Occurrences that nobody may start any more are given up with the next one: an outage of days costs no memory.
    fn fold(&mut self, now: i64, asked: impl Fn(&Target) -> bool) {
        let manual = |d: &Due| matches!(d.target, Target::Manual { .. });
        let asked = self.due.iter().rposition(|d| asked(&d.target));
        let mut from = asked.map_or(0, |i| i + 1);
        while self.due.get(from).is_some_and(manual) {
            from += 1;
        }
        let mut folded = from;
        // Not across a backlog: its occurrences lie between the two.
        let apart = self.backlog.front().map(|s| s.backlog.last);
        while let [a, b, ..] = &mut self.due.make_contiguous()[folded..]
            && let (Target::Scheduled(at), Target::Scheduled(next)) = (&a.target, &b.target)
            && now > a.start_by
            && apart.is_none_or(|apart| *next <= apart || *at > apart)
        {
            let mut missed = std::mem::take(&mut a.missed);
            missed.push(Missed::one(*at));
            missed.append(&mut b.missed);
            in_order(&mut missed);
            b.missed = together(missed);
            folded += 1;
        }
        self.due.drain(from..folded);
    }

    /// `asked`: the store was asked for it, and the answer was lost. It may be ours: until there is an answer, it is
    /// neither given up nor overtaken.
    pub(super) fn next_claim(
        &mut self,
        job: &Job,
        now: i64,
        asked: impl Fn(&Target) -> bool,
    ) -> Option<Ask> {
        self.fold(now, &asked);
        let first = self.due.front()?;
        // Occurrences behind a backlog wait until it is worked off.
        let apart = self.backlog.front().map(|s| s.backlog.last);
        let scheduled: Vec<&Due> = self
            .due
            .iter()
            .filter(|d| {
                matches!(d.target, Target::Scheduled(at) if apart.is_none_or(|apart| at <= apart))
            })
            .collect();
        let collapse = self.outage && job.overlap != Overlap::Queue && job.catch_up != CatchUp::All;
        let last = scheduled.len().saturating_sub(1);
        let (due, given_up, stale) = if collapse && matches!(first.target, Target::Scheduled(_)) {
            let i = scheduled
                .iter()
                .position(|d| asked(&d.target))
                .unwrap_or(last);
            (scheduled[i], &scheduled[..i], i < last)
        } else {
            (first, [].as_slice(), false)
        };
        // All that is given up before it, also what came in with a later one.
        let mut missed: Vec<Missed> = scheduled
            .iter()
            .flat_map(|d| d.missed.iter().copied())
            .filter(|m| matches!(due.target, Target::Scheduled(at) if m.last < at))
            .collect();
        for d in given_up {
            if let Target::Scheduled(at) = d.target {
                missed.push(Missed::one(at));
            }
        }
        in_order(&mut missed);
        // A folded range may include an occurrence that ran early.
        let left = |m| timetable::undecided(&job.schedules, Occurrence(i64::MIN), &self.early, m);
        let missed = missed.into_iter().flat_map(left).collect();
        let late = due.overdue || now - due.start_at > LATE_MS;
        // If nothing overdue is to be caught up, the claim is too late on purpose: the store records it as missed.
        let never =
            stale || job.catch_up == CatchUp::None && self.outage && now - due.start_at > LATE_MS;
        Some(Ask {
            target: due.target.clone(),
            missed,
            trigger: match due.target {
                Target::Manual { .. } => Trigger::Manual,
                Target::Scheduled(_) if late => Trigger::CatchUp,
                Target::Scheduled(_) => Trigger::Schedule,
            },
            start_by: if never { NEVER } else { due.start_by },
            next_attempt: false,
        })
    }
}

impl Segment {
    fn first_after(&self, known: Occurrence) -> Option<Occurrence> {
        let b = &self.backlog;
        next_of(&b.schedules, b.after.max(known)).filter(|at| *at <= b.last)
    }
}

/// Lists one by one the oldest occurrences of `segments`, which are the segments of `job` after `known`.
pub fn unfold(
    (segments, turn): (Vec<Segment>, u32),
    job: &Job,
    now: i64,
    known: Occurrence,
) -> Unfolded {
    let ms = |d: Duration| i64::try_from(d.as_millis()).unwrap_or(i64::MAX);
    let (mut due, mut missed, mut upto) = (vec![], vec![], known);
    let newest = segments.len() - 1;
    for (i, s) in segments.into_iter().enumerate() {
        let mut b = s.backlog;
        b.after = b.after.max(upto);
        if b.after >= b.last {
            upto = upto.max(b.last);
            continue;
        }
        let policy = match job.catch_up {
            _ if !s.absent && job.overlap == Overlap::Queue => CatchUp::All,
            policy => policy,
        };
        let within = ms(job.start_within + b.jitter);
        let mut piece = b.piece(policy, Occurrence(now.saturating_sub(within)), EACH);
        upto = piece.upto;
        missed.append(&mut piece.missed);
        if policy == CatchUp::Latest && i < newest {
            // The latest one is in a later segment.
            missed.extend(piece.run.drain(..).map(Missed::one));
        }
        for at in piece.run {
            due.push(Due {
                job: job.name.clone(),
                target: Target::Scheduled(at),
                start_at: at.0,
                start_by: at.0.saturating_add(within),
                overdue: true,
                missed: together(std::mem::take(&mut missed)),
            });
        }
        if !due.is_empty() {
            break;
        }
    }
    // If none is to be started, the last of them is claimed too late on purpose, so that the store records them all.
    if due.is_empty()
        && let Some(last) = missed.pop()
    {
        due.push(Due {
            job: job.name.clone(),
            target: Target::Scheduled(last.last),
            start_at: last.last.0,
            start_by: NEVER,
            overdue: true,
            missed: together(missed),
        });
    }
    Unfolded { due, upto, turn }
}

/// More than [`EACH`] records become one.
fn together(missed: Vec<Missed>) -> Vec<Missed> {
    let count = missed.iter().map(|m| m.count).sum();
    match missed.as_slice() {
        [first, .., last] if missed.len() > EACH => vec![Missed {
            first: first.first,
            last: last.last,
            count,
        }],
        _ => missed,
    }
}

/// Each once and oldest first: the store skips what is not after the newest one that it has recorded.
fn in_order(missed: &mut Vec<Missed>) {
    missed.sort_by_key(|m| (m.last, std::cmp::Reverse(m.count)));
    missed.dedup_by_key(|m| m.last);
}

fn same(a: &Target, b: &Target) -> bool {
    a.id() == b.id()
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use super::*;
    use crate::config;

    fn job(lines: &str) -> Arc<Job> {
        let text = format!("[jobs.work]\ncommand = [\"true\"]\n{lines}\n");
        let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None).expect("valid");
        config.jobs.values().next().expect("a job").clone()
    }

    fn scheduled(at: i64) -> Target {
        Target::Scheduled(Occurrence(at))
    }
    fn due(target: Target, start_at: i64) -> Due {
        Due {
            job: JobName::new("work"),
            target,
            start_at,
            start_by: start_at + 10_000,
            overdue: false,
            missed: vec![],
        }
    }
    fn nothing(_: &Target) -> bool {
        false
    }
    fn queue(at: &[i64]) -> Queue {
        let mut q = Queue::default();
        for at in at {
            q.push(due(scheduled(*at), *at), 0, nothing);
        }
        q
    }
    fn lasts(missed: &[Missed]) -> Vec<i64> {
        missed.iter().map(|m| m.last.0).collect()
    }

    #[test]
    fn they_come_in_order_and_each_once() {
        let mut q = queue(&[3000, 1000, 3000, 2000, 1000]);
        let key = |k: &str| Target::Manual {
            key: k.to_owned(),
            before: None,
        };
        q.push(due(key("k"), 1500), 0, nothing);
        q.push(due(key("k"), 9999), 0, nothing);
        let order: Vec<i64> = q.due.iter().map(|d| d.start_at).collect();
        assert_eq!(order, [1000, 1500, 2000, 3000]);
        assert_eq!(q.first_after(Occurrence(1000)), Some(Occurrence(2000)));
    }

    #[test]
    fn a_claim_that_was_planned_before_others_came_in_is_known() {
        let m = Missed {
            first: Occurrence(1000),
            last: Occurrence(2000),
            count: 2,
        };
        let jumped =
            |q: &Queue, missed: &[Missed]| q.jumped(Occurrence(500), &scheduled(3000), missed);
        assert!(!jumped(&queue(&[500, 3000, 4000]), &[]));
        assert!(jumped(&queue(&[2000, 3000]), &[]));
        assert!(!jumped(&queue(&[2000, 3000]), &[m]));
        let mut q = queue(&[3000]);
        let mut same = due(scheduled(3000), 3000);
        same.missed = vec![m];
        q.push(same, 0, nothing);
        assert!(jumped(&q, &[]));
        assert!(!jumped(&q, &[m]));
    }

    #[test]
    fn what_ran_early_is_not_given_up() {
        let job = job("schedule = \"@every 1s\"");
        // Three that wait are given up, and what another one gives up is a range.
        let mut q = queue(&[20_000, 21_000, 22_000]);
        let mut newest = due(scheduled(23_000), 23_000);
        newest.missed = vec![Missed {
            first: Occurrence(10_000),
            last: Occurrence(19_000),
            count: 10,
        }];
        q.push(newest, 0, nothing);
        q.outage();
        q.ran(
            [12_000, 15_000, 16_000, 19_000, 21_000]
                .map(Occurrence)
                .to_vec(),
        );
        let p = q.next_claim(&job, 24_000, nothing).expect("one is due");
        let given_up: Vec<_> = p
            .missed
            .iter()
            .map(|m| (m.first.0, m.last.0, m.count))
            .collect();
        assert_eq!(
            given_up,
            [
                (10_000, 11_000, 2),
                (13_000, 14_000, 2),
                (17_000, 18_000, 2),
                (20_000, 20_000, 1),
                (22_000, 22_000, 1)
            ]
        );
        assert!(!q.jumped(Occurrence(0), &p.target, &p.missed));
        // What was decided meanwhile (up to 13 s) is left out.
        q.trim(&job.schedules, Occurrence(13_000));
        assert_eq!(q.early, [15_000, 16_000, 19_000, 21_000].map(Occurrence));
        let p = q.next_claim(&job, 24_000, nothing).expect("one is due");
        assert_eq!(lasts(&p.missed), [14_000, 18_000, 20_000, 22_000]);
        q.trim(&job.schedules, Occurrence(19_000));
        assert_eq!(q.early, [21_000].map(Occurrence));
    }

    #[test]
    fn what_may_still_be_started_costs_no_memory_either() {
        // The store cannot be reached for a day, and each may start a day late.
        let job = job("schedule = \"@every 1s\"\nstart_within = \"24h\"\ncatch_up = \"all\"");
        let mut q = Queue::default();
        let all = 86_400;
        for i in 1..=all {
            let mut due = due(scheduled(i * 1000), i * 1000);
            due.start_by = i * 1000 + 86_400_000;
            if !q.absorb(&job, &due) {
                q.push(due, i * 1000, nothing);
                q.compact(&job, nothing);
            }
        }
        assert!(
            q.due.len() <= EACH && q.backlog.len() == 1,
            "{}",
            q.due.len()
        );
        assert_eq!(q.first_after(Occurrence(0)), Some(Occurrence(1000)));
        assert_eq!(
            q.first_after(Occurrence(70_000_000)),
            Some(Occurrence(70_001_000))
        );
        assert!(q.jumped(Occurrence(0), &scheduled(all * 1000), &[]));
        // Each is claimed, in order, and the list stays short.
        let (mut known, now) = (Occurrence(0), all * 1000);
        for i in 1..=all {
            while let Some(segments) = q.next_segments(known) {
                let unfolded = unfold(segments, &job, now, known);
                q.unfolded(unfolded, now, nothing);
            }
            let p = q.next_claim(&job, now, nothing).expect("one is due");
            assert_eq!((&p.target, p.missed.len()), (&scheduled(i * 1000), 0));
            assert!(q.due.len() <= EACH);
            q.done(&p.target);
            known = Occurrence(i * 1000);
        }
        assert!(q.is_empty());
    }

    #[test]
    fn what_was_overdue_is_decided_by_policy_whatever_came_after_it() {
        for lines in ["", "catch_up = \"none\""] {
            let job = job(&format!(
                "schedule = \"@every 10s\"\nstart_within = \"1h\"\n{lines}"
            ));
            let mut q = queue(&[100_000]);
            q.outage();
            let backlog = Backlog {
                schedules: job.schedules.clone(),
                jitter: Duration::ZERO,
                after: Occurrence(10_000),
                last: Occurrence(90_000),
            };
            q.backlog.push_back(Segment {
                backlog,
                absent: true,
            });
            let (mut asked, mut missed) = (vec![], 0);
            while !q.is_empty() {
                while let Some(segments) = q.next_segments(Occurrence(0)) {
                    let unfolded = unfold(segments, &job, 100_500, Occurrence(0));
                    q.unfolded(unfolded, 100_500, nothing);
                }
                let p = q.next_claim(&job, 100_500, nothing).expect("one is due");
                missed += p.missed.iter().map(|m| m.count).sum::<u64>();
                asked.push(p.target.clone());
                q.done(&p.target);
            }
            // 20 s to 90 s are given up with it.
            assert_eq!((asked, missed), (vec![scheduled(100_000)], 8), "{lines}");
        }
    }

    #[test]
    fn nothing_overtakes_what_waits_for_its_former_jitter() {
        let mut q = Queue::default();
        let mut old = due(scheduled(1000), 50_000);
        old.start_by = 60_000;
        q.wait(old.clone());
        assert!(q.is_empty(), "it is not due yet");
        assert_eq!(q.first_after(Occurrence(0)), Some(Occurrence(1000)));
        assert!(q.jumped(Occurrence(0), &scheduled(20_000), &[]));
        // It goes first, in its time.
        q.push(due(scheduled(20_000), 20_000), 20_003, nothing);
        let p = q.next_claim(&job(""), 20_003, nothing).expect("one is due");
        assert_eq!((p.target.clone(), p.start_by), (scheduled(1000), 60_000));
        q.done(&p.target);
        let p = q.next_claim(&job(""), 20_003, nothing).expect("one is due");
        assert_eq!(p.target, scheduled(20_000));
        // Handed in when its time has come, it is there once.
        let mut q = Queue::default();
        q.wait(old.clone());
        q.push(old.clone(), 50_000, nothing);
        q.push(old, 50_000, nothing);
        assert_eq!((q.due.len(), q.waiting.len()), (1, 0));
    }

    #[test]
    fn what_was_asked_for_is_neither_folded_nor_overtaken() {
        let mut q = queue(&[1000, 2000, 3000, 4000]);
        q.outage();
        let asked = |t: &Target| *t == scheduled(2000);
        // Long after the last moment for all but the last.
        let p = q.next_claim(&job(""), 13_500, asked).expect("one is due");
        assert_eq!((p.target, lasts(&p.missed)), (scheduled(2000), vec![1000]));
        assert_eq!(p.start_by, 0, "a newer one is to be run instead");
        q.done(&scheduled(2000));
        let p = q.next_claim(&job(""), 13_500, nothing).expect("one is due");
        assert_eq!((p.target, lasts(&p.missed)), (scheduled(4000), vec![3000]));
    }

    #[test]
    fn without_an_outage_they_are_worked_off_one_by_one() {
        let mut q = queue(&[1000, 2000]);
        let p = q.next_claim(&job(""), 2500, nothing).expect("one is due");
        assert_eq!((p.target, p.start_by), (scheduled(1000), 11_000));
        q.outage();
        let p = q.next_claim(&job("catch_up = \"all\""), 2500, nothing);
        assert_eq!(p.expect("one is due").target, scheduled(1000));
        let p = q.next_claim(&job("catch_up = \"none\""), 3500, nothing);
        assert_eq!(p.expect("one is due").start_by, 0);
    }

    fn ask_for(q: &mut Queue, job: &Job, now: i64) -> Option<i64> {
        q.next_claim(job, now, nothing).map(|ask| match ask.target {
            Target::Scheduled(at) => at.0,
            Target::Manual { .. } => -1,
        })
    }
    fn segment(job: &Job, after: i64, last: i64, absent: bool) -> Segment {
        Segment {
            backlog: Backlog {
                schedules: job.schedules.clone(),
                jitter: Duration::ZERO,
                after: Occurrence(after),
                last: Occurrence(last),
            },
            absent,
        }
    }

    /// While the backlog is worked off, what comes due behind it joins it if nothing lies between, or has to be kept.
    #[test]
    fn a_backlog_takes_in_what_follows_it_at_once_and_nothing_else() {
        let job = job("schedule = \"@every 1s\"");
        let other = self::job("schedule = \"@every 1s\"\ncatch_up = \"all\"");
        let begun = || {
            let mut q = Queue::default();
            q.overdue(segment(&job, 0, 9000, false), 9500, nothing);
            q
        };
        let last = |q: &Queue| q.backlog.back().map(|s| s.backlog.last.0);
        let mut q = begun();
        assert!(q.absorb(&job, &due(scheduled(10_000), 10_000)));
        assert_eq!(last(&q), Some(10_000));
        // One is left out; a definition with schedules of its own; something is given up with it; a trigger.
        let mut gives_up = due(scheduled(10_000), 10_000);
        gives_up.missed = vec![Missed::one(Occurrence(9000))];
        let key = Target::Manual {
            key: "k".to_owned(),
            before: None,
        };
        for (definition, next) in [
            (&job, due(scheduled(11_000), 11_000)),
            (&other, due(scheduled(10_000), 10_000)),
            (&job, gives_up),
            (&job, due(key, 10_000)),
        ] {
            let mut q = begun();
            assert!(!q.absorb(definition, &next), "{next:?}");
            assert_eq!(last(&q), Some(9000));
        }
        // A newer one is in the queue already: it would be overtaken.
        let mut q = begun();
        q.push(due(scheduled(12_000), 12_000), 12_000, nothing);
        assert!(!q.absorb(&job, &due(scheduled(10_000), 10_000)));
        // An older one is not overtaken.
        let mut q = begun();
        q.push(due(scheduled(0), 0), 12_000, nothing);
        q.push(due(scheduled(9000), 9000), 12_000, nothing);
        assert!(q.absorb(&job, &due(scheduled(10_000), 10_000)));
        // A second outage goes behind the first; an absence of all instances begins anew.
        q.overdue(segment(&job, 10_000, 20_000, false), 20_500, nothing);
        assert_eq!(q.backlog.len(), 2);
        q.overdue(segment(&job, 0, 30_000, true), 30_500, nothing);
        assert_eq!((q.backlog.len(), last(&q)), (1, Some(30_000)));
    }

    /// A long queue is kept as a range, as far as each of its occurrences is like the next.
    #[test]
    fn a_long_queue_is_kept_short_where_nothing_is_lost_by_it() {
        let job = job("schedule = \"@every 1s\"\nstart_within = \"24h\"");
        let long = || {
            let mut q = Queue::default();
            for i in 0..=EACH as i64 {
                let mut due = due(scheduled(i * 1000), i * 1000);
                due.start_by = i64::MAX;
                q.push(due, 0, nothing);
            }
            q
        };
        let newest = EACH as i64 * 1000;
        let kept = |q: &Queue| (q.due.len(), q.backlog.len());
        let mut q = long();
        q.compact(&job, nothing);
        assert_eq!(kept(&q), (EACH / 2, 1));
        // The newest may be granted, or gives something up: it has to be asked for itself.
        let mut q = long();
        q.compact(&job, |t: &Target| *t == scheduled(newest));
        assert_eq!(kept(&q), (EACH + 1, 0));
        let mut q = long();
        q.due[EACH].missed = vec![Missed::one(Occurrence(1))];
        q.compact(&job, nothing);
        assert_eq!(kept(&q), (EACH + 1, 0));
        // One in the second half may be granted: what lies before it stays.
        let mut q = long();
        q.compact(&job, |t: &Target| *t == scheduled(80_000));
        assert_eq!(kept(&q), (82, 1));
        // The backlog lies behind what would be put into it.
        let mut q = long();
        let behind = segment(&job, newest, newest + 9000, false);
        q.backlog.push_back(behind);
        q.compact(&job, nothing);
        assert_eq!(kept(&q), (EACH + 1, 1));
        // It ends where that begins.
        let mut q = long();
        q.backlog.push_back(segment(&job, 47_000, 49_000, false));
        q.compact(&job, nothing);
        assert_eq!(kept(&q), (EACH / 2, 2));
        // It is not long.
        let mut q = long();
        q.due.pop_back();
        q.compact(&job, nothing);
        assert_eq!(kept(&q), (EACH, 0));
    }

    /// Several outages: each has its policy, and of what is caught up once only the newest of all is started.
    #[test]
    fn the_latest_of_several_outages_is_the_one_that_runs() {
        let listed = |lines: &str, segments: &[(i64, i64, bool)]| {
            let job = job(&format!(
                "schedule = \"@every 1s\"\nstart_within = \"1h\"\n{lines}"
            ));
            let all = segments.iter();
            let all = all.map(|(after, last, absent)| segment(&job, *after, *last, *absent));
            let unfolded = unfold((all.collect(), 0), &job, 9000, Occurrence(0));
            let due = unfolded.due.iter().map(|d| match d.target {
                Target::Scheduled(at) => (at.0, d.missed.iter().map(|m| m.count).sum()),
                Target::Manual { .. } => panic!("a trigger"),
            });
            due.collect::<Vec<(i64, u64)>>()
        };
        let two = [(0, 2000, true), (3000, 5000, false)];
        assert_eq!(listed("", &two), [(5000, 3)]);
        // The first is done with.
        assert_eq!(
            listed("", &[(2000, 2000, true), (3000, 5000, true)]),
            [(5000, 1)]
        );
        // With a queue, what came due here waits for its turn, and what came due in an absence does not.
        let queue = "overlap = \"queue\"";
        assert_eq!(
            listed(queue, &[(3000, 5000, false)]),
            [(4000, 0), (5000, 0)]
        );
        assert_eq!(listed(queue, &[(3000, 5000, true)]), [(5000, 1)]);
        assert_eq!(
            listed("catch_up = \"all\"", &[(3000, 5000, true)]),
            [(4000, 0), (5000, 0)]
        );
    }

    #[test]
    fn a_new_schedule_leaves_what_is_due_and_the_triggers() {
        let mut q = queue(&[1000, 2000, 3000]);
        let key = Target::Manual {
            key: "k".to_owned(),
            before: None,
        };
        q.push(due(key, 2500), 0, nothing);
        q.forget_after(Occurrence(2000));
        let left: Vec<i64> = q.due.iter().map(|d| d.start_at).collect();
        assert_eq!(left, [1000, 2000, 2500]);
    }

    /// Occurrences on both sides of a backlog are not one, and those behind it wait for it.
    #[test]
    fn nothing_is_given_up_across_a_backlog() {
        let job = job("schedule = \"@every 1s\"");
        let mut q = queue(&[1000, 8000, 9000]);
        q.backlog.push_back(segment(&job, 1000, 7000, false));
        // Long after the last moment of each.
        assert_eq!(ask_for(&mut q, &job, 90_000), Some(1000));
        assert_eq!(q.due.len(), 3);
        q.backlog.clear();
        assert_eq!(ask_for(&mut q, &job, 90_000), Some(9000));
        // Both before it, or both behind it: they are.
        for (at, last, left) in [([1000, 2000], 7000, 1), ([8000, 9000], 7000, 1)] {
            let mut q = queue(&at);
            q.backlog.push_back(segment(&job, 2000, last, false));
            let _ = ask_for(&mut q, &job, 90_000);
            assert_eq!(q.due.len(), left);
        }
    }

    #[test]
    fn what_is_claimed_late_is_caught_up() {
        let trigger = |overdue: bool, now: i64| {
            let mut q = Queue::default();
            let due = due(scheduled(1000), 1000);
            q.push(Due { overdue, ..due }, 0, nothing);
            let ask = q.next_claim(&job(""), now, nothing);
            ask.expect("one is due").trigger
        };
        assert_eq!(trigger(false, 1000 + LATE_MS), Trigger::Schedule);
        assert_eq!(trigger(false, 1001 + LATE_MS), Trigger::CatchUp);
        assert_eq!(trigger(true, 1000), Trigger::CatchUp);
    }

    /// `catch_up = "none"` is about what could not be decided for a while, and about triggers it says nothing.
    #[test]
    fn what_is_late_without_an_outage_is_started_all_the_same() {
        let none = job("catch_up = \"none\"");
        let start_by = |outage: bool, now: i64| {
            let mut q = queue(&[1000]);
            q.outage = outage;
            q.next_claim(&none, now, nothing)
                .expect("one is due")
                .start_by
        };
        assert_eq!(start_by(false, 5000), 11_000);
        assert_eq!(start_by(true, 5000), NEVER);
        assert_eq!(start_by(true, 1500), 11_000);
        assert_eq!(start_by(true, 1000 + LATE_MS), 11_000);
        assert_eq!(start_by(true, 1001 + LATE_MS), NEVER);
        // In an outage a trigger is the first in the queue: it is not given up with the newest.
        let key = Target::Manual {
            key: "k".to_owned(),
            before: None,
        };
        let mut q = Queue::default();
        q.push(due(key, 500), 600, nothing);
        q.push(due(scheduled(1000), 1000), 1000, nothing);
        q.push(due(scheduled(2000), 2000), 2000, nothing);
        q.outage();
        assert_eq!(ask_for(&mut q, &job(""), 2500), Some(-1));
    }
    /// It may be started up to its last moment: until then it is not given up with the next one.
    #[test]
    fn what_can_still_be_started_is_not_folded() {
        let mut q = queue(&[1000, 2000]);
        assert_eq!(ask_for(&mut q, &job(""), 11_000), Some(1000));
        assert_eq!(ask_for(&mut q, &job(""), 11_001), Some(2000));
        // Nothing is folded before there are many.
        let mut q = Queue::default();
        for i in 0..=EACH as i64 {
            assert_eq!(q.due.len() as i64, i);
            q.push(due(scheduled(i), i), 90_000, nothing);
        }
        assert_eq!(q.due.len(), 1);
    }

    #[test]
    fn what_was_overdue_may_start_as_late_as_its_jitter_says() {
        let job = job("schedule = \"@every 10s\"\nstart_within = \"60s\"");
        let mut s = segment(&job, 0, 10_000, true);
        s.backlog.jitter = Duration::from_secs(5);
        let listed = unfold((vec![s], 0), &job, 11_000, Occurrence(0));
        let due: Vec<_> = listed
            .due
            .iter()
            .map(|d| (d.start_at, d.start_by))
            .collect();
        assert_eq!(due, [(10_000, 75_000)]);
        assert_eq!(listed.upto, Occurrence(10_000));
    }

    #[test]
    fn more_records_than_that_become_one() {
        let many = |n: i64| (1..=n).map(|at| Missed::one(Occurrence(at))).collect();
        assert_eq!(together(many(EACH as i64)).len(), EACH);
        let one = together(many(EACH as i64 + 1));
        let range = one.iter().map(|m| (m.first.0, m.last.0, m.count));
        assert_eq!(range.collect::<Vec<_>>(), [(1, 101, 101)]);
    }
}
