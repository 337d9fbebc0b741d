//! Against a naive timetable, which asks every job again each time.

use std::collections::BTreeMap;

use jiff::tz::TimeZone;
use proptest::prelude::*;

use super::{jitter::start_at_ms, *};
use crate::{
    logic::{catch_up::CatchUp, schedule::Dst},
    model::JobName,
};

/// 2026-01-01T00:00:00Z
const NOW: i64 = 1_767_225_600_000;

fn schedules(texts: &[&str]) -> Vec<Arc<Schedule>> {
    texts
        .iter()
        .map(|text| Arc::new(Schedule::parse(text, &TimeZone::UTC, Dst::default(), "job").unwrap()))
        .collect()
}

fn walk(schedules: &[Arc<Schedule>], after: i64, until: i64) -> Vec<Occurrence> {
    let mut t = Occurrence(after);
    let mut all = Vec::new();
    while let Some(next) = next_of(schedules, t)
        && next.0 <= until
    {
        all.push(next);
        t = next;
    }
    all
}

fn job(name: &str) -> JobName {
    JobName::new(name)
}

#[test]
fn one_call_hands_out_a_bounded_number_of_a_job_and_the_others_stay_due() {
    let mut table = Timetable::new();
    table.insert(
        job("busy"),
        schedules(&["@every 1s"]),
        Duration::ZERO,
        Occurrence(NOW),
    );
    table.insert(
        job("calm"),
        schedules(&["@every 1h"]),
        Duration::ZERO,
        Occurrence(NOW),
    );
    let until = Occurrence(NOW + 3_600_000);
    let mut all = Vec::new();
    let mut calls = 0;
    while table.next_at().is_some_and(|next| next <= until) {
        let due = table.take_due(until);
        assert!(due.iter().filter(|due| due.key == job("busy")).count() <= MAX_PER_CALL);
        all.extend(due);
        calls += 1;
    }
    assert_eq!(calls, 4);
    assert_eq!(all.len(), 3601);
    // A job that is far behind does not hold up the others.
    assert!(
        all[..=MAX_PER_CALL]
            .iter()
            .any(|due| due.key == job("calm"))
    );
}

#[test]
fn overdue_is_exact_for_a_moderate_number_and_bounded_for_any() {
    let every_second = schedules(&["* * * * * *"]);
    let exact = overdue(
        &every_second,
        Occurrence(NOW),
        Occurrence(NOW + 5_000_500),
        3,
    );
    assert_eq!(
        exact.recent,
        [4998, 4999, 5000].map(|s| Occurrence(NOW + s * 1000))
    );
    let older = Range {
        first: Occurrence(NOW + 1000),
        last: Occurrence(NOW + 4_997_000),
        count: 4997,
        exact: true,
    };
    assert_eq!(exact.older, Some(older));

    let year = 365 * 86_400_000;
    let estimate = overdue(&every_second, Occurrence(NOW), Occurrence(NOW + year), 10);
    assert_eq!(estimate.recent.len(), 10);
    let older = estimate.older.unwrap();
    assert!(!older.exact);
    assert_eq!(
        (older.first, older.last),
        (Occurrence(NOW + 1000), Occurrence(NOW + year - 10_000))
    );
    assert_eq!(older.count, 31_536_000 - 10);

    // A burst long ago is found as quickly.
    let burst = overdue(
        &schedules(&["* * * 1 1 *"]),
        Occurrence(NOW - 1),
        Occurrence(NOW + year - 1),
        2,
    );
    assert_eq!(
        burst.recent,
        [86_398, 86_399].map(|s| Occurrence(NOW + s * 1000))
    );

    assert_eq!(
        overdue(&every_second, Occurrence(NOW), Occurrence(NOW), 5),
        Overdue::default()
    );
    assert_eq!(
        overdue(&every_second, Occurrence(NOW), Occurrence(NOW - 9999), 5),
        Overdue::default()
    );
    assert_eq!(
        overdue(&[], Occurrence(NOW), Occurrence(NOW + year), 5),
        Overdue::default()
    );
    assert_eq!(
        overdue(&every_second, Occurrence(NOW), Occurrence(NOW + 2000), 0)
            .older
            .unwrap()
            .count,
        2
    );
    let all_time = overdue(
        &schedules(&["@at 2026-01-01T00:00:05Z"]),
        Occurrence(i64::MIN),
        Occurrence(i64::MAX),
        5,
    );
    assert_eq!(
        all_time,
        Overdue {
            older: None,
            recent: vec![Occurrence(NOW + 5000)]
        }
    );
}

/// Also if they are of a former schedule: here at half past, while the present one is hourly.
#[test]
fn what_is_undecided_of_a_range_keeps_its_ends() {
    let hourly = schedules(&["0 * * * *"]);
    let at = |minute: i64| Occurrence(NOW + minute * 60_000);
    let range = claim::Missed {
        first: at(30),
        last: at(330),
        count: 6,
    };
    let minute = |o: Occurrence| (o.0 - NOW) / 60_000;
    let left = |known, early: &[i64]| -> Vec<_> {
        let early: Vec<_> = early.iter().map(|m| at(*m)).collect();
        let pieces = undecided(&hourly, at(known), &early, range).into_iter();
        pieces
            .map(|m| (minute(m.first), minute(m.last), m.count))
            .collect()
    };
    assert_eq!(left(0, &[]), [(30, 330, 6)]);
    assert_eq!(left(30, &[]), [(60, 330, 6)]);
    assert_eq!(left(0, &[120]), [(30, 60, 2), (180, 330, 4)]);
    assert_eq!(left(30, &[120]), [(60, 60, 1), (180, 330, 4)]);
    assert_eq!(left(300, &[]), [(330, 330, 1)]);
    assert_eq!(left(330, &[]), []);
}

fn backlog(schedules: Vec<Arc<Schedule>>, after: i64, last: i64) -> Backlog {
    Backlog {
        schedules: schedules.into(),
        jitter: Duration::ZERO,
        after: Occurrence(after),
        last: Occurrence(last),
    }
}

#[test]
fn a_long_absence_is_a_range_of_each_job_and_costs_no_memory() {
    let mut timetable = Timetable::new();
    let minutely: Arc<[_]> = schedules(&["* * * * *"]).into();
    for i in 0..2000 {
        let jitter = Duration::from_secs(i % 3 * 10);
        timetable.insert(i, minutely.clone(), jitter, Occurrence(NOW));
    }
    let now = Occurrence(NOW + 12 * 3_600_000 + 5_000);
    let taken = timetable.take_backlog(now);
    assert_eq!(taken.len(), 2000);
    let (mut waiting, mut upto) = (0, 0);
    for (key, backlog) in &taken {
        assert_eq!(backlog.after.0, NOW);
        let newest = NOW + 12 * 3_600_000;
        // The newest may wait for its jitter.
        upto += i32::from(backlog.last.0 == newest);
        waiting += i32::from(backlog.last.0 == newest - 60_000);
        assert_eq!(timetable.cursor(key), Some(backlog.last));
    }
    assert!(waiting > 100 && waiting + upto == 2000, "{waiting} {upto}");
    assert!(timetable.take_backlog(now).is_empty());
    assert!(timetable.take_due(now).is_empty());
    // Later occurrences come one by one.
    let due = timetable.take_due(Occurrence(now.0 + 80_000));
    assert_eq!(due.len(), 2000 + waiting as usize);
}

const TEXTS: [&str; 8] = [
    "* * * * *",
    "*/7 * * * * *",
    "0 */2 * * *",
    "@every 90s",
    "@every 3700ms",
    "@at 2026-01-01T00:30:00Z",
    "15,45 * * * *",
    "* * 1 1 * *",
];

#[derive(Debug, Clone)]
enum Op {
    Insert {
        key: u8,
        texts: Vec<usize>,
        jitter_ms: u64,
        back_ms: i64,
    },
    Remove {
        key: u8,
    },
    Take {
        forward_ms: i64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0..6u8, prop::collection::vec(0..TEXTS.len(), 0..3), prop_oneof![Just(0), 1..200_000u64], 0..600_000i64)
            .prop_map(|(key, texts, jitter_ms, back_ms)| Op::Insert { key, texts, jitter_ms, back_ms }),
        1 => (0..6u8).prop_map(|key| Op::Remove { key }),
        6 => (0..400_000i64).prop_map(|forward_ms| Op::Take { forward_ms }),
    ]
}

/// A job of the naive timetable: it has no plan, it asks for all occurrences again and again.
struct Naive {
    schedules: Vec<Arc<Schedule>>,
    jitter: Duration,
    cursor: i64,
}

impl Naive {
    /// (occurrence, start) of those not handed out that start up to `until`, as many as one call hands out.
    fn due(&self, key: &str, until: i64) -> Vec<(Occurrence, i64)> {
        walk(&self.schedules, self.cursor, until)
            .into_iter()
            .map(|o| (o, start_at_ms(key, &self.schedules, o, self.jitter)))
            .filter(|(_, start)| *start <= until)
            .take(MAX_PER_CALL)
            .collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_timetable_equals_a_naive_one(ops in prop::collection::vec(op(), 1..40)) {
        let mut now = NOW;
        let mut table: Timetable<String> = Timetable::new();
        let mut naive: BTreeMap<String, Naive> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Insert { key, texts, jitter_ms, back_ms } => {
                    let key = key.to_string();
                    let schedules = schedules(&texts.iter().map(|i| TEXTS[*i]).collect::<Vec<_>>());
                    let (jitter, cursor) = (Duration::from_millis(jitter_ms), now - back_ms);
                    table.insert(key.clone(), schedules.clone(), jitter, Occurrence(cursor));
                    naive.insert(key, Naive { schedules, jitter, cursor });
                }
                Op::Remove { key } => {
                    table.remove(&key.to_string());
                    naive.remove(&key.to_string());
                }
                Op::Take { forward_ms } => {
                    now += forward_ms;
                    let mut expected = Vec::new();
                    let mut left_over = false;
                    for (key, job) in &mut naive {
                        let mut previous = Occurrence(job.cursor);
                        let due = job.due(key, now);
                        left_over |= due.len() == MAX_PER_CALL;
                        for (occurrence, start_at_ms) in due {
                            expected.push(Due { key: key.clone(), occurrence, start_at_ms, previous });
                            previous = occurrence;
                        }
                        job.cursor = previous.0;
                    }
                    expected.sort_by_key(|due| (due.start_at_ms, due.key.clone(), due.occurrence));
                    prop_assert_eq!(table.take_due(Occurrence(now)), expected);
                    prop_assert!(left_over || table.next_at().is_none_or(|next| next.0 > now));
                }
            }
            for (key, job) in &naive {
                prop_assert_eq!(table.cursor(key), Some(Occurrence(job.cursor)));
            }
            prop_assert_eq!(table.len(), naive.len());
        }
    }

    #[test]
    fn overdue_equals_walking(texts in prop::collection::vec(0..TEXTS.len(), 0..3), after in -20_000_000..20_000_000i64, length in 0..9_000_000i64, keep in 0usize..20) {
        let schedules = schedules(&texts.iter().map(|i| TEXTS[*i]).collect::<Vec<_>>());
        let (after, now) = (NOW + after, NOW + after + length);
        let all = walk(&schedules, after, now);
        let got = overdue(&schedules, Occurrence(after), Occurrence(now), keep);
        let (older, recent) = all.split_at(all.len().saturating_sub(keep));
        prop_assert_eq!(got.recent, recent);
        let older = (!older.is_empty()).then(|| Range { first: older[0], last: older[older.len() - 1], count: older.len() as u64, exact: true });
        prop_assert_eq!(got.older, older);
    }

    #[test]
    fn every_overdue_occurrence_is_missed_or_run(length in 0..90_000i64, keep in 0usize..30, within in 0..60u64, policy in 0..3usize) {
        let schedules = schedules(&["@every 3s"]);
        let policy = [CatchUp::Latest, CatchUp::All, CatchUp::None][policy];
        let now = Occurrence(NOW + length);
        let all = walk(&schedules, NOW, now.0);
        let in_time = Occurrence(now.0 - 1000 * within as i64);
        let mut left = backlog(schedules, NOW, now.0);
        let (mut missed, mut run, mut in_order) = (0, 0, vec![]);
        while left.after < left.last {
            let piece = left.piece(policy, in_time, keep + 1);
            prop_assert!(piece.run.len() <= keep + 1 && piece.upto > left.after);
            missed += piece.missed.iter().map(|missed| missed.count).sum::<u64>();
            run += piece.run.len() as u64;
            prop_assert!(policy != CatchUp::All || piece.run.iter().all(|o| *o >= in_time));
            in_order.extend(piece.missed.iter().flat_map(|m| [m.first, m.last]).chain(piece.run));
            left.after = piece.upto;
        }
        prop_assert_eq!(missed + run, all.len() as u64);
        let wanted = match policy {
            CatchUp::None => 0,
            CatchUp::Latest => u64::from(all.last().is_some_and(|o| *o >= in_time)),
            CatchUp::All => all.iter().filter(|o| **o >= in_time).count() as u64,
        };
        prop_assert_eq!(run, wanted);
        in_order.dedup();
        prop_assert!(in_order.is_sorted());
        prop_assert!(all.is_empty() || in_order.first() == all.first());
    }
}
