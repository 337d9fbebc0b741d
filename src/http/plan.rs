//! What is planned: from the schedules, without jitter, and what of it is passed over.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{extract::State, http::Uri, response::Response};
use serde::Serialize;

use super::{
    App,
    api::{Args, json, named},
    problem::{Problem, ProblemView},
};
use crate::{
    config::Job,
    logic::{
        coming::{Coming, PassedOver},
        schedule::{Schedule, next_of},
    },
    model::{JobName, Occurrence},
    view::Time,
};

const HOUR: i64 = 3_600_000;
const DAY: i64 = 24 * HOUR;
/// How many minutes of a day are shown with their jobs, and how many jobs of each.
const TOP: usize = 10;
const TOP_JOBS: usize = 50;
/// Counting takes at most this long: a thousand jobs may run each second.
const COUNT_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Planned {
    pub(super) job: JobName,
    pub(super) occurrence: Time,
    #[schema(format = DateTime)]
    pub(super) local: String,
    /// Why it will not run. Written only if it will not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) passed_over: Option<PassedOver>,
}

/// A job with more occurrences than were asked for.
#[derive(Debug, PartialEq, Serialize, utoipa::ToSchema)]
struct Frequent {
    job: JobName,
    /// The mean distance of its first ones in the span.
    every_ms: i64,
}

/// Planned occurrences, by time.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Plan {
    planned: Vec<Planned>,
    /// With `per_job`: the jobs that are left out of `planned`, because they have more.
    frequent: Vec<Frequent>,
    /// There are more: ask for less time, or fewer jobs.
    truncated: bool,
}

/// The enabled jobs of these names, or all.
pub(super) fn enabled(app: &App, names: &[JobName]) -> Vec<Arc<Job>> {
    let inner = app.board.read();
    let all = inner.config.jobs.values();
    all.filter(|job| job.enabled && (names.is_empty() || names.contains(&job.name)))
        .cloned()
        .collect()
}

/// The first `most` occurrences after `from` and up to `to`.
pub(super) fn between(jobs: &[Arc<Job>], from: i64, to: i64, most: usize) -> (Vec<Planned>, bool) {
    let next = |i: usize, after: Occurrence| {
        let next = next_of(&jobs[i].schedules, after).filter(|o| o.0 <= to)?;
        Some(Reverse((next, i)))
    };
    let mut heap: BinaryHeap<_> = (0..jobs.len())
        .filter_map(|i| next(i, Occurrence(from)))
        .collect();
    let mut list = vec![];
    while let Some(Reverse((o, i))) = heap.pop() {
        if list.len() == most {
            return (list, true);
        }
        let job = &jobs[i];
        list.push(Planned {
            job: job.name.clone(),
            occurrence: o.into(),
            local: job
                .schedules
                .first()
                .map_or_else(String::new, |s| s.local(o)),
            passed_over: None,
        });
        heap.extend(next(i, o));
    }
    (list, false)
}

/// The jobs with at most `most` occurrences after `from` and up to `to`, and the others.
fn told_apart(
    jobs: Vec<Arc<Job>>,
    from: i64,
    to: i64,
    most: usize,
) -> (Vec<Arc<Job>>, Vec<Frequent>) {
    let mut frequent = vec![];
    let few = |job: &Arc<Job>| {
        let next = |o: &Occurrence| next_of(&job.schedules, *o).filter(|o| o.0 <= to);
        let Some(first) = next(&Occurrence(from)) else {
            return true;
        };
        let Some(last) = std::iter::successors(Some(first), next).nth(most) else {
            return true;
        };
        frequent.push(Frequent {
            job: job.name.clone(),
            every_ms: (last.0 - first.0) / most.max(1) as i64,
        });
        false
    };
    (jobs.into_iter().filter(few).collect(), frequent)
}

/// What is planned, from the schedules
#[utoipa::path(
    get,
    path = "/api/v1/plan",
    tag = "plan",
    params(
        ("from" = Option<String>, Query, description = "default now"),
        ("to" = Option<String>, Query, description = "default a day later"),
        ("job" = Option<Vec<String>>, Query, description = "only of these jobs"),
        ("limit" = Option<usize>, Query, minimum = 1, maximum = 10_000, description = "how many; default 1000"),
        ("per_job" = Option<usize>, Query, minimum = 1, maximum = 10_000,
            description = "jobs with more in the span are listed in `frequent` instead"),
    ),
    responses(
        (status = 200, description = "the occurrences, without jitter", body = Plan),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn plan(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, Problem> {
    let args = Args::of(&uri, &["from", "to", "limit", "per_job"], &["job"])?;
    let now = app.board.read().clock().now;
    let from = args.instant("from")?.unwrap_or(now);
    let to = args
        .instant("to")?
        .unwrap_or_else(|| from.saturating_add(DAY));
    let limit = args.number("limit", 1..=10_000)?.unwrap_or(1000);
    let per_job = args.number("per_job", 1..=10_000)?;
    let names: Vec<JobName> = args
        .all("job")
        .map(|name| named(&app.board, name))
        .collect::<Result<_, _>>()?;
    let jobs = enabled(&app, &names);
    let coming: HashMap<JobName, Coming> = {
        let inner = app.board.read();
        let one = |job: &Arc<Job>| Some((job.name.clone(), inner.coming(&job.name)?));
        jobs.iter().filter_map(one).collect()
    };
    // An occurrence at `from` itself counts.
    let after = from.saturating_sub(1);
    let listing = move || {
        let (jobs, frequent) = match per_job {
            Some(most) => told_apart(jobs, after, to, most),
            None => (jobs, vec![]),
        };
        let (mut planned, truncated) = between(&jobs, after, to, limit);
        let defined: HashMap<&JobName, &Arc<Job>> =
            jobs.iter().map(|job| (&job.name, job)).collect();
        for p in &mut planned {
            let known = coming.get(&p.job).zip(defined.get(&p.job));
            p.passed_over =
                known.and_then(|(c, job)| c.passes_over(job, Occurrence(p.occurrence.0)));
        }
        Plan {
            planned,
            frequent,
            truncated,
        }
    };
    let listed = tokio::task::spawn_blocking(listing).await;
    let plan = listed.map_err(|_| Problem::internal("cannot list the occurrences"))?;
    Ok(json(&plan))
}

/// How many occurrences a day has in each minute.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Load {
    /// In `zone`.
    #[schema(format = Date)]
    day: String,
    /// The time zone, by its IANA name.
    zone: String,
    /// The first minute.
    from: Time,
    /// The occurrences in each minute of the day: 1440 numbers, fewer or more if the clocks change.
    minutes: Vec<u32>,
    /// Of each minute: how many occurrences its fullest second has.
    at_once: Vec<u32>,
    /// In each hour: mostly 24 numbers.
    by_hour: Vec<u32>,
    /// At most 10 minutes: those in which the most jobs start, then those with the most starts; most first.
    top: Vec<Minute>,
    /// There are too many to be counted in time: the numbers are too small.
    truncated: bool,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Minute {
    /// From 0, since `from`.
    minute: usize,
    /// How many occurrences; a job may have many in one minute.
    count: u32,
    /// The jobs that have an occurrence in it, at most 50 of them.
    jobs: Vec<JobName>,
}

/// How many occurrences fall into each minute of a day
#[utoipa::path(
    get,
    path = "/api/v1/load",
    tag = "plan",
    params(
        ("day" = Option<String>, Query, format = Date, description = "default today"),
        ("tz" = Option<String>, Query, min_length = 1, pattern = "^[A-Za-z0-9_+/-]+$",
            description = "the time zone of the day, by its IANA name; default UTC"),
    ),
    responses(
        (status = 200, description = "the minutes of the day", body = Load),
        (status = 400, description = "a problem; also if this instance's host does not know the time zone", body = ProblemView,
            content_type = "application/problem+json"),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn load(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, Problem> {
    let args = Args::of(&uri, &["day", "tz"], &[])?;
    let now = app.board.read().clock().now;
    let zone = args.given("tz").next().unwrap_or("UTC");
    let tz = jiff::tz::TimeZone::get(zone)
        .map_err(|_| Problem::bad("`tz` must be a time zone, as Europe/Berlin"))?;
    let date = match args.given("day").next() {
        None => Occurrence(now).timestamp().to_zoned(tz.clone()).date(),
        Some(text) => text
            .parse()
            .map_err(|_| Problem::bad("`day` must be a date, as 2026-11-25"))?,
    };
    let midnight = |date: jiff::civil::Date| date.to_zoned(tz.clone()).ok();
    let span = midnight(date).zip(date.tomorrow().ok().and_then(midnight));
    let Some((start, end)) = span else {
        return Err(Problem::bad("`day` is out of range"));
    };
    let day = Day {
        name: date.to_string(),
        zone: zone.to_owned(),
        start: start.timestamp().as_millisecond(),
        end: end.timestamp().as_millisecond(),
    };
    let jobs = enabled(&app, &[]);
    let counted = tokio::task::spawn_blocking(move || count(&jobs, day)).await;
    Ok(json(&counted.map_err(|_| {
        Problem::internal("cannot count the occurrences")
    })?))
}

/// A day of a time zone, in Unix milliseconds.
struct Day {
    name: String,
    zone: String,
    start: i64,
    end: i64,
}

/// Counts the occurrences of the day.
fn count(jobs: &[Arc<Job>], day: Day) -> Load {
    let Day { start, end, .. } = day;
    let began = Instant::now();
    // Jobs with equal schedules share them, so that each is computed once.
    let mut shared: HashMap<*const Arc<Schedule>, (&[Arc<Schedule>], u32)> = HashMap::new();
    for job in jobs {
        let of = shared
            .entry(job.schedules.as_ptr())
            .or_insert((&job.schedules, 0));
        of.1 += 1;
    }
    let mut minutes = vec![0_u32; ((end - start) / 60_000) as usize];
    let mut of_jobs = minutes.clone();
    let mut seconds = vec![0_u32; minutes.len() * 60];
    let mut truncated = false;
    'all: for (schedules, jobs) in shared.values() {
        let (mut at, mut n) = (Occurrence(start - 1), 0_u32);
        let mut before = usize::MAX;
        while let Some(next) = next_of(schedules, at).filter(|o| o.0 < end) {
            let of = ((next.0 - start) / 60_000) as usize;
            if let Some(minute) = minutes.get_mut(of) {
                *minute = minute.saturating_add(*jobs);
                seconds[of * 60 + ((next.0 - start) / 1000 % 60) as usize] += *jobs;
                // A job counts once in a minute, however often it starts there.
                of_jobs[of] += if of == before { 0 } else { *jobs };
            }
            before = of;
            at = next;
            n += 1;
            if n.is_multiple_of(1024) && began.elapsed() > COUNT_WITHIN {
                truncated = true;
                break 'all;
            }
        }
    }
    let mut by_jobs: Vec<usize> = (0..minutes.len()).filter(|m| minutes[*m] > 0).collect();
    by_jobs.sort_by_key(|m| (Reverse((of_jobs[*m], minutes[*m])), *m));
    let top = by_jobs.into_iter().take(TOP).map(|minute| {
        let first = start + minute as i64 * 60_000;
        let falls = |job: &&Arc<Job>| {
            next_of(&job.schedules, Occurrence(first - 1)).is_some_and(|o| o.0 < first + 60_000)
        };
        let names = jobs.iter().filter(falls).take(TOP_JOBS);
        Minute {
            minute,
            count: minutes[minute],
            jobs: names.map(|job| job.name.clone()).collect(),
        }
    });
    Load {
        day: day.name,
        zone: day.zone,
        from: Time(start),
        top: top.collect(),
        by_hour: minutes.chunks(60).map(|hour| hour.iter().sum()).collect(),
        at_once: (seconds
            .chunks(60)
            .map(|of| of.iter().copied().max().unwrap_or(0)))
        .collect(),
        minutes,
        truncated,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(text: &str) -> Vec<Arc<Job>> {
        let config = crate::config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
        config.expect("valid").jobs.values().cloned().collect()
    }

    const TEXT: &str = "[jobs.a]\nschedule = '*/30 * * * *'\ncommand = 'x'\n[jobs.b]\nschedule = '*/30 * * * *'\n\
        command = 'x'\n[jobs.c]\nschedule = '5 12 * * *'\ncommand = 'x'\n";
    const MIDNIGHT: i64 = 1_795_132_800_000; // 2026-11-20T00:00:00Z

    fn day(start: i64, hours: i64) -> Day {
        Day {
            name: "2026-11-20".to_owned(),
            zone: "UTC".to_owned(),
            start,
            end: start + hours * HOUR,
        }
    }

    #[test]
    fn a_day_has_its_occurrences_by_minute() {
        let long = count(&jobs(TEXT), day(MIDNIGHT, 25));
        assert_eq!((long.minutes.len(), long.by_hour.len()), (1500, 25));
        let load = count(&jobs(TEXT), day(MIDNIGHT, 24));
        assert_eq!(
            (load.day.as_str(), load.minutes.len(), load.by_hour.len()),
            ("2026-11-20", 1440, 24)
        );
        assert_eq!(
            (load.minutes[0], load.minutes[30], load.minutes[12 * 60 + 5]),
            (2, 2, 1)
        );
        assert_eq!(load.minutes.iter().sum::<u32>(), 97);
        assert_eq!(
            (load.at_once[0], load.at_once[1], load.at_once[12 * 60 + 5]),
            (2, 0, 1)
        );
        assert_eq!(load.by_hour[12], 5);
        let first = &load.top[0];
        assert_eq!((first.minute, first.count, first.jobs.len()), (0, 2, 2));
    }

    #[test]
    fn a_minute_of_many_jobs_comes_before_one_of_many_starts() {
        let many = (0..9).map(|i| format!("[jobs.n{i}]\nschedule = '7 4 * * *'\ncommand = 'x'\n"));
        let poll = "[jobs.poll]\nschedule = '* * 3 * * *'\ncommand = 'x'\n";
        let text = poll.to_owned() + &many.collect::<String>();
        let Load { top, at_once, .. } = count(&jobs(&text), day(MIDNIGHT, 24));
        assert_eq!((at_once[4 * 60 + 7], at_once[3 * 60]), (9, 1));
        let said: Vec<_> = (top.iter().take(2))
            .map(|t| (t.minute, t.count, t.jobs.len()))
            .collect();
        assert_eq!(said, [(4 * 60 + 7, 9, 9), (3 * 60, 60, 1)]);
    }

    #[test]
    fn a_job_that_is_planned_too_often_is_told_apart() {
        let (few, frequent) = told_apart(jobs(TEXT), MIDNIGHT - 1, MIDNIGHT + DAY - 1, 10);
        let names: Vec<_> = few.iter().map(|j| j.name.as_str()).collect();
        assert_eq!(names, ["c"]);
        let said: Vec<_> = frequent
            .iter()
            .map(|f| (f.job.as_str(), f.every_ms))
            .collect();
        assert_eq!(said, [("a", HOUR / 2), ("b", HOUR / 2)]);
        let (few, frequent) = told_apart(jobs(TEXT), MIDNIGHT - 1, MIDNIGHT + DAY - 1, 48);
        assert_eq!((few.len(), frequent), (3, vec![]));
    }

    #[test]
    fn a_plan_is_in_order_and_says_whether_there_is_more() {
        let (list, more) = between(&jobs(TEXT), MIDNIGHT - 1, MIDNIGHT + HOUR, 100);
        let said: Vec<_> = list
            .iter()
            .map(|p| (p.occurrence.0 - MIDNIGHT, p.job.as_str()))
            .collect();
        let half = HOUR / 2;
        assert_eq!(
            said,
            [
                (0, "a"),
                (0, "b"),
                (half, "a"),
                (half, "b"),
                (HOUR, "a"),
                (HOUR, "b")
            ]
        );
        assert!(!more);
        let (list, more) = between(&jobs(TEXT), MIDNIGHT - 1, MIDNIGHT + HOUR, 6);
        assert_eq!((list.len(), more), (6, false));
        let (list, more) = between(&jobs(TEXT), MIDNIGHT - 1, MIDNIGHT + HOUR, 5);
        assert_eq!((list.len(), more), (5, true));
    }
}
