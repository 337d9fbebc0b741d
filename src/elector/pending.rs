//! A job's due occurrences on this instance, until they are decided.

use std::{collections::VecDeque, sync::Arc};

use super::LATE_MS;
use crate::{
    config::{CatchUp, Job},
    logic::{
        claim::{Missed, NEVER, Overlap, Target},
        schedule::Schedule,
        timetable,
    },
    model::{JobName, Occurrence, Trigger},
};

/// An occurrence that is due. Times are Unix ms of the store's clock.
#[derive(Debug, Clone, PartialEq)]
pub struct Due {
    pub job: JobName,
    pub target: Target,
    /// The planned instant and the jitter.
    pub start_at: i64,
    /// Not later than this.
    pub start_by: i64,
    /// It was overdue when this instance learned of it.
    pub overdue: bool,
    /// Given up before it.
    pub missed: Vec<Missed>,
}

/// So many given up occurrences get a record each; more are one record together.
const EACH: usize = 100;

#[derive(Debug, Default)]
pub(super) struct Queue {
    due: VecDeque<Due>,
    /// Those in the queue could not be decided for a while, so that several of them are overdue.
    outage: bool,
}

/// What to ask for next.
#[derive(Debug, PartialEq)]
pub(super) struct Plan {
    pub(super) target: Target,
    pub(super) missed: Vec<Missed>,
    pub(super) trigger: Trigger,
    pub(super) start_by: i64,
}

impl Queue {
    /// `asked` as for [`Queue::plan`].
    pub(super) fn push(&mut self, due: Due, now: i64, asked: impl Fn(&Target) -> bool) {
        // Most come in order: then the last one tells that it is new.
        let newer = matches!(
            (self.due.back().map(|d| &d.target), &due.target),
            (None, _) | (Some(Target::Scheduled(_)), Target::Scheduled(_))
        ) && self.due.back().is_none_or(|d| d.start_at < due.start_at);
        let known = (!newer).then(|| self.due.iter_mut().find(|d| same(&d.target, &due.target)));
        if let Some(Some(d)) = known {
            // What is given up with it may be news.
            d.missed.extend(due.missed);
            in_order(&mut d.missed);
            return;
        }
        self.due.push_back(due);
        if self.due.len() > EACH {
            self.fold(now, asked);
        }
        // Scheduled ones in order, whatever else comes between them.
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
        self.outage = false;
    }

    pub(super) fn forget_after(&mut self, now: Occurrence) {
        self.due
            .retain(|d| !matches!(d.target, Target::Scheduled(at) if at > now));
    }

    /// `target` is decided, and so is every scheduled one before it.
    pub(super) fn done(&mut self, target: &Target) {
        match target {
            Target::Scheduled(at) => self
                .due
                .retain(|d| !matches!(d.target, Target::Scheduled(x) if x <= *at)),
            manual => self.due.retain(|d| !same(&d.target, manual)),
        }
        if self.due.len() <= 1 {
            self.outage = false;
        }
    }

    /// What others have decided is not given up here, nor counted.
    pub(super) fn trim(&mut self, schedules: &[Arc<Schedule>], known: Occurrence) {
        for m in self.due.iter_mut().flat_map(|d| &mut d.missed) {
            if m.first <= known && known < m.last {
                *m = timetable::recount(schedules, known, *m);
            }
        }
        for d in &mut self.due {
            d.missed.retain(|m| m.last > known);
        }
    }

    /// The first scheduled one after `known`.
    pub(super) fn first_after(&self, known: Occurrence) -> Option<Occurrence> {
        let scheduled = self.due.iter().filter_map(|d| match d.target {
            Target::Scheduled(at) => Some(at),
            Target::Manual { .. } => None,
        });
        scheduled.filter(|at| *at > known).min()
    }

    /// A claim for `target` that gives up `missed` would jump over one that is due: it came in since that was planned.
    pub(super) fn jumped(&self, known: Occurrence, target: &Target, missed: &[Missed]) -> bool {
        let Target::Scheduled(target) = target else {
            return false;
        };
        let left_out = |at: Occurrence| {
            at > known && at < *target && !missed.iter().any(|m| m.first <= at && at <= m.last)
        };
        self.due.iter().any(|d| match d.target {
            Target::Scheduled(at) => left_out(at) || d.missed.iter().any(|m| left_out(m.last)),
            Target::Manual { .. } => false,
        })
    }

    /// Those that nobody may start any more become part of the one behind them: an outage of days costs no memory.
    fn fold(&mut self, now: i64, asked: impl Fn(&Target) -> bool) {
        let manual = |d: &Due| matches!(d.target, Target::Manual { .. });
        let asked = self.due.iter().rposition(|d| asked(&d.target));
        let mut from = asked.map_or(0, |i| i + 1);
        while self.due.get(from).is_some_and(manual) {
            from += 1;
        }
        let mut folded = from;
        while let [a, b, ..] = &mut self.due.make_contiguous()[folded..]
            && let (Target::Scheduled(at), Target::Scheduled(_)) = (&a.target, &b.target)
            && now > a.start_by
        {
            let mut missed = std::mem::take(&mut a.missed);
            missed.push(Missed {
                first: *at,
                last: *at,
                count: 1,
            });
            missed.append(&mut b.missed);
            in_order(&mut missed);
            let count = missed.iter().map(|m| m.count).sum();
            b.missed = match missed.as_slice() {
                [first, .., last] if missed.len() > EACH => vec![Missed {
                    first: first.first,
                    last: last.last,
                    count,
                }],
                _ => missed,
            };
            folded += 1;
        }
        self.due.drain(from..folded);
    }

    /// `asked`: the store was asked for it and the answer got lost. It may be ours, so that it is neither given up nor
    /// overtaken before there is one.
    pub(super) fn plan(
        &mut self,
        job: &Job,
        now: i64,
        asked: impl Fn(&Target) -> bool,
    ) -> Option<Plan> {
        self.fold(now, &asked);
        let first = self.due.front()?;
        let scheduled: Vec<&Due> = self
            .due
            .iter()
            .filter(|d| matches!(d.target, Target::Scheduled(_)))
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
                missed.push(Missed {
                    first: at,
                    last: at,
                    count: 1,
                });
            }
        }
        in_order(&mut missed);
        let late = due.overdue || now - due.start_at > LATE_MS;
        // Nothing overdue is to be caught up: it is asked for too late on purpose, and recorded.
        let never =
            stale || job.catch_up == CatchUp::None && self.outage && now - due.start_at > LATE_MS;
        Some(Plan {
            target: due.target.clone(),
            missed,
            trigger: match due.target {
                Target::Manual { .. } => Trigger::Manual,
                Target::Scheduled(_) if late => Trigger::CatchUp,
                Target::Scheduled(_) => Trigger::Schedule,
            },
            start_by: if never { NEVER } else { due.start_by },
        })
    }
}

/// Each once and oldest first: the store records what lies after the newest one that it has recorded.
fn in_order(missed: &mut Vec<Missed>) {
    missed.sort_by_key(|m| (m.last, std::cmp::Reverse(m.count)));
    missed.dedup_by_key(|m| m.last);
}

fn same(a: &Target, b: &Target) -> bool {
    super::flat(a) == super::flat(b)
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
    fn what_is_given_up_with_one_that_is_there_already_is_not_forgotten() {
        let mut q = queue(&[3000]);
        let m = |at: i64| Missed {
            first: Occurrence(at),
            last: Occurrence(at),
            count: 1,
        };
        let mut same = due(scheduled(3000), 3000);
        same.missed = vec![m(1000), m(2000)];
        q.push(same.clone(), 0, nothing);
        q.push(same, 0, nothing);
        let p = q.plan(&job(""), 3000, nothing).expect("one is due");
        assert_eq!(lasts(&p.missed), [1000, 2000]);
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
    fn what_is_given_up_is_named_in_order_and_once() {
        // 3000 is there twice: by itself, and as what the newest of a catch-up gives up.
        let mut q = queue(&[2000, 3000]);
        let m = |at: i64| Missed {
            first: Occurrence(at),
            last: Occurrence(at),
            count: 1,
        };
        let mut newest = due(scheduled(4000), 4000);
        newest.missed = vec![m(1000), m(2000), m(3000)];
        q.push(newest, 0, nothing);
        q.outage();
        let p = q.plan(&job(""), 4000, nothing).expect("one is due");
        assert_eq!(lasts(&p.missed), [1000, 2000, 3000]);
        // One that goes first takes along what lies before it.
        let p = q.plan(&job("overlap = \"queue\""), 4000, nothing);
        assert_eq!(lasts(&p.expect("one is due").missed), [1000]);
    }

    #[test]
    fn what_nobody_can_start_any_more_costs_no_memory() {
        let mut q = Queue::default();
        for i in 0..100_000 {
            q.push(due(scheduled(i * 1000), i * 1000), i * 1000, nothing);
        }
        assert!(q.due.len() <= EACH + 1, "{}", q.due.len());
        let p = q.plan(&job(""), 200_000_000, nothing).expect("one is left");
        assert_eq!(p.target, scheduled(99_999_000));
        assert_eq!(p.missed.iter().map(|m| m.count).sum::<u64>(), 99_999);
    }

    #[test]
    fn what_was_asked_for_is_neither_folded_nor_overtaken() {
        let mut q = queue(&[1000, 2000, 3000, 4000]);
        q.outage();
        let asked = |t: &Target| *t == scheduled(2000);
        // Long after the last moment for all but the last.
        let p = q.plan(&job(""), 13_500, asked).expect("one is due");
        assert_eq!((p.target, lasts(&p.missed)), (scheduled(2000), vec![1000]));
        assert_eq!(p.start_by, 0, "a newer one is to be run instead");
        q.done(&scheduled(2000));
        let p = q.plan(&job(""), 13_500, nothing).expect("one is due");
        assert_eq!((p.target, lasts(&p.missed)), (scheduled(4000), vec![3000]));
    }

    #[test]
    fn without_an_outage_they_are_worked_off_one_by_one() {
        let mut q = queue(&[1000, 2000]);
        let p = q.plan(&job(""), 2500, nothing).expect("one is due");
        assert_eq!((p.target, p.start_by), (scheduled(1000), 11_000));
        q.outage();
        let p = q.plan(&job("catch_up = \"all\""), 2500, nothing);
        assert_eq!(p.expect("one is due").target, scheduled(1000));
        let p = q.plan(&job("catch_up = \"none\""), 3500, nothing);
        assert_eq!(p.expect("one is due").start_by, 0);
    }
}
