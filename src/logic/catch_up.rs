//! `catch_up`: which of the occurrences that are overdue run, and which are recorded as missed.

use std::{sync::Arc, time::Duration};

use super::{
    claim,
    schedule::{Schedule, next_of},
    timetable::{latest, overdue},
};
use crate::model::Occurrence;

/// Which of several overdue occurrences are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub enum CatchUp {
    /// The newest.
    Latest,
    All,
    None,
}

/// Occurrences of one schedule that are due and have not been decided: a range, however many they are.
#[derive(Debug, Clone)]
pub struct Backlog {
    pub schedules: Arc<[Arc<Schedule>]>,
    /// Each may have been planned to start up to this long after its instant.
    pub jitter: Duration,
    /// They lie after this ...
    pub after: Occurrence,
    /// ... and up to this.
    pub last: Occurrence,
}

/// What to do about the oldest of a backlog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// To be recorded as missed, ascending; the last of them stands by itself.
    pub missed: Vec<claim::Missed>,
    /// To be started, ascending.
    pub run: Vec<Occurrence>,
    /// All up to here is in one of these.
    pub upto: Occurrence,
}

impl Backlog {
    /// Decides on the oldest of them by `policy`, the job's `catch_up`. Those from `in_time` on may start; of these
    /// `policy` takes the newest, all or none. All others are missed. At most `most` are started now; the next piece
    /// has the others. Up to `most` missed ones stand by themselves, more become one range.
    pub fn piece(&self, policy: CatchUp, in_time: Occurrence, most: usize) -> Piece {
        let (s, last) = (&self.schedules, self.last);
        let missed = |upto: Occurrence| summary(s, self.after, upto.min(last), most);
        let before = |o: Occurrence| Occurrence(o.0.saturating_sub(1));
        let all = |missed, run| Piece {
            missed,
            run,
            upto: last,
        };
        match policy {
            CatchUp::None => all(missed(last), vec![]),
            CatchUp::Latest => match latest(s, self.after.max(before(in_time)), last) {
                Some(newest) => all(missed(before(newest)), vec![newest]),
                None => all(missed(last), vec![]),
            },
            CatchUp::All => {
                let first = self.after.max(before(in_time));
                let next = |o: &Occurrence| next_of(s, *o).filter(|next| *next <= last);
                let mut run: Vec<Occurrence> = std::iter::successors(next(&first), next)
                    .take(most + 1)
                    .collect();
                let more = run.len() > most;
                run.truncate(most);
                Piece {
                    missed: missed(before(in_time)),
                    upto: if more { run[most - 1] } else { last },
                    run,
                }
            }
        }
    }
}

/// The occurrences in (`after`, `upto`], each by itself when they are `most` at most; otherwise all but the last
/// together.
fn summary(
    schedules: &[Arc<Schedule>],
    after: Occurrence,
    upto: Occurrence,
    most: usize,
) -> Vec<claim::Missed> {
    let single = |at: Occurrence| claim::Missed {
        first: at,
        last: at,
        count: 1,
    };
    let next = |o: &Occurrence| next_of(schedules, *o).filter(|next| *next <= upto);
    let each: Vec<Occurrence> = std::iter::successors(next(&after), next)
        .take(most + 1)
        .collect();
    if each.len() <= most {
        return each.into_iter().map(single).collect();
    }
    let all = overdue(schedules, after, upto, 1);
    let older = all.older.map(|o| claim::Missed {
        first: o.first,
        last: o.last,
        count: o.count,
    });
    older
        .into_iter()
        .chain(all.recent.into_iter().map(single))
        .collect()
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;

    use super::*;
    use crate::logic::schedule::Dst;

    /// 2026-01-01T00:00:00Z
    const NOW: i64 = 1_767_225_600_000;

    #[test]
    fn catching_up_takes_what_the_policy_says_within_the_time_allowed() {
        let now = NOW + 10 * 60_000 + 30_000;
        let all = Backlog {
            schedules: [Arc::new(
                Schedule::parse("* * * * *", &TimeZone::UTC, Dst::default(), "job").unwrap(),
            )]
            .into(),
            jitter: Duration::ZERO,
            after: Occurrence(NOW),
            last: Occurrence(now),
        };
        let minute = |o: Occurrence| (o.0 - NOW) / 60_000;
        let piece = |policy, within: i64, most| {
            let piece = all.piece(policy, Occurrence(now - within * 1000), most);
            let missed: Vec<_> = piece
                .missed
                .iter()
                .map(|m| (minute(m.first), minute(m.last), m.count))
                .collect();
            let run: Vec<i64> = piece.run.into_iter().map(minute).collect();
            (missed, run, piece.upto.0)
        };
        let singles =
            |minutes: std::ops::RangeInclusive<i64>| minutes.map(|m| (m, m, 1)).collect::<Vec<_>>();
        assert_eq!(
            piece(CatchUp::Latest, 150, 10),
            (singles(1..=9), vec![10], now)
        );
        assert_eq!(
            piece(CatchUp::All, 150, 10),
            (singles(1..=7), vec![8, 9, 10], now)
        );
        assert_eq!(
            piece(CatchUp::None, 150, 10),
            (singles(1..=10), vec![], now)
        );
        // the limit itself is in time
        assert_eq!(
            piece(CatchUp::Latest, 30, 10),
            (singles(1..=9), vec![10], now)
        );
        assert_eq!(piece(CatchUp::All, 29, 10), (singles(1..=10), vec![], now));
        // more than stand by themselves: a range, and the last
        let range = |last: i64| vec![(1, last - 1, last as u64 - 1), (last, last, 1)];
        assert_eq!(piece(CatchUp::None, 150, 9), (range(10), vec![], now));
        assert_eq!(piece(CatchUp::Latest, 150, 3), (range(9), vec![10], now));
        // all of them, and none is forgotten: those behind these come next
        let sixth = NOW + 6 * 60_000;
        assert_eq!(piece(CatchUp::All, 270, 1), (range(5), vec![6], sixth));
    }
}
