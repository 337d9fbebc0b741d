//! What will run, as a calendar that programs subscribe to (RFC 5545).

use std::{fmt::Write as _, sync::Arc};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderValue, header},
    response::Response,
};

use super::{
    App,
    api::{Path, named},
    plan::{self, Planned},
    problem::{Problem, ProblemView},
};
use crate::{
    config::Job,
    model::{JobName, Occurrence},
    text,
};

const DAY: i64 = 24 * 3_600_000;
/// How far the calendar reaches, and how many events it has at most.
const REACHES: i64 = 14 * DAY;
const MOST: usize = 1000;
/// A job with more occurrences than one an hour would fill the calendar of all jobs: it is left out there.
const OF_ONE_JOB: usize = 14 * 24;
/// No event is shown shorter; ms.
const SHORTEST: i64 = 60_000;
/// A line has at most so many bytes, without its end.
const LINE: usize = 75;

/// The next two weeks of all jobs, as iCalendar; without jobs that run more often than once an hour
#[utoipa::path(
    get,
    path = "/calendar.ics",
    operation_id = "calendar",
    tag = "plan",
    security(("token" = []), ("password" = [])),
    responses(
        (status = 200, description = "a calendar", body = String, content_type = "text/calendar"),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn all(State(app): State<Arc<App>>) -> Result<Response, Problem> {
    let jobs = plan::enabled(&app, &[]);
    calendar(&app, jobs, "soloist", OF_ONE_JOB).await
}

/// The next two weeks of a job, as iCalendar
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{job}/calendar.ics",
    operation_id = "calendar_of_job",
    tag = "plan",
    security(("token" = []), ("password" = [])),
    params(("job" = String, Path)),
    responses(
        (status = 200, description = "a calendar", body = String, content_type = "text/calendar"),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn of_job(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Response, Problem> {
    let name = named(&app.board, &name)?;
    let jobs = plan::enabled(&app, std::slice::from_ref(&name));
    let title = format!("soloist: {name}");
    calendar(&app, jobs, &title, MOST).await
}

async fn calendar(
    app: &App,
    jobs: Vec<Arc<Job>>,
    title: &str,
    of_one: usize,
) -> Result<Response, Problem> {
    let (now, namespace, typical, next) = {
        let inner = app.board.read();
        let next: Vec<Option<Occurrence>> = jobs
            .iter()
            .map(|job| inner.coming(&job.name).and_then(|coming| coming.next))
            .collect();
        let typical: Vec<Option<i64>> = jobs
            .iter()
            .map(|job| inner.job(&job.name).and_then(|job| job.typical_ms))
            .collect();
        (
            inner.clock().now,
            inner.config.store.namespace.clone(),
            typical,
            next,
        )
    };
    let of = jobs.clone();
    let listing = move || {
        let mut all = vec![];
        for (job, next) in of.into_iter().zip(next) {
            // What comes before the next one that will run is passed over.
            let Some(next) = next else { continue };
            // A calendar of one job has its first events; that of all jobs has all events of a job, or none.
            let (mut planned, more) = plan::between(
                std::slice::from_ref(&job),
                next.0 - 1,
                now + REACHES,
                of_one,
            );
            if !more || of_one == MOST {
                all.append(&mut planned);
            }
        }
        all.sort_by(|a, b| (a.occurrence, &a.job).cmp(&(b.occurrence, &b.job)));
        all.truncate(MOST);
        all
    };
    let planned = tokio::task::spawn_blocking(listing).await;
    let planned = planned.map_err(|_| Problem::internal("cannot list the occurrences"))?;
    let known = |name: &JobName| jobs.iter().zip(&typical).find(|(job, _)| job.name == *name);
    let events: Vec<(Planned, Option<&str>, i64)> = planned
        .into_iter()
        .map(|p| {
            let known = known(&p.job);
            let description = known.and_then(|(job, _)| job.description.as_deref());
            let lasts = known
                .and_then(|(_, typical)| *typical)
                .unwrap_or(0)
                .max(SHORTEST);
            (p, description, lasts)
        })
        .collect();
    let mut response = Response::new(Body::from(write(title, &namespace, now, &events)));
    let kind = HeaderValue::from_static("text/calendar; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

fn write(
    title: &str,
    namespace: &str,
    now: i64,
    events: &[(Planned, Option<&str>, i64)],
) -> String {
    let mut out = String::new();
    let mut line = |text: &str| fold(&mut out, text);
    line("BEGIN:VCALENDAR");
    line("VERSION:2.0");
    line("PRODID:-//soloist//soloist//EN");
    line("CALSCALE:GREGORIAN");
    line(&format!("X-WR-CALNAME:{}", escaped(title)));
    for (p, description, lasts) in events {
        line("BEGIN:VEVENT");
        line(&format!(
            "UID:{}-{}@{}.soloist",
            p.job,
            p.occurrence.0,
            escaped(namespace)
        ));
        line(&format!("DTSTAMP:{}", basic(now)));
        line(&format!("DTSTART:{}", basic(p.occurrence.0)));
        line(&format!(
            "DTEND:{}",
            basic(p.occurrence.0.saturating_add(*lasts))
        ));
        line(&format!("SUMMARY:{}", escaped(p.job.as_str())));
        if let Some(text) = description {
            line(&format!("DESCRIPTION:{}", escaped(text)));
        }
        line("TRANSP:TRANSPARENT");
        line("END:VEVENT");
    }
    if events.is_empty() {
        // RFC 5545 wants at least one component, and strict programs refuse a calendar without any.
        for text in [
            "BEGIN:VTIMEZONE",
            "TZID:UTC",
            "BEGIN:STANDARD",
            "DTSTART:19700101T000000",
            "TZOFFSETFROM:+0000",
            "TZOFFSETTO:+0000",
            "END:STANDARD",
            "END:VTIMEZONE",
        ] {
            line(text);
        }
    }
    line("END:VCALENDAR");
    out
}

/// `20261125T120000Z`
fn basic(ms: i64) -> String {
    let at = jiff::Timestamp::from_millisecond(ms).unwrap_or_default();
    at.strftime("%Y%m%dT%H%M%SZ").to_string()
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | ';' | ',' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            // What turns the direction of text would turn what a calendar program writes beside it.
            c if text::acts(c) => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Writes a line, in pieces if it is long: each begins with a space but the first.
fn fold(out: &mut String, line: &str) {
    let mut left = LINE;
    for c in line.chars() {
        if c.len_utf8() > left {
            out.push_str("\r\n ");
            left = LINE - 1;
        }
        left -= c.len_utf8();
        let _ = out.write_char(c);
    }
    out.push_str("\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::Time;

    #[test]
    fn a_calendar_without_events_has_a_component_all_the_same() {
        let text = write("x", "ns", 0, &[]);
        assert!(
            text.contains("\r\nBEGIN:VTIMEZONE\r\nTZID:UTC\r\n"),
            "{text}"
        );
        assert!(
            text.ends_with("END:VTIMEZONE\r\nEND:VCALENDAR\r\n"),
            "{text}"
        );
    }

    #[test]
    fn an_event_has_its_times_and_nothing_leaves_its_line() {
        let planned = Planned {
            job: JobName::new("draw"),
            occurrence: Time(1_795_233_600_000),
            local: String::new(),
            passed_over: None,
        };
        let description = format!("a;b,c\\d\u{202e}e\r\nEND:VCALENDAR\n{}", "ä日".repeat(40));
        let text = write(
            "x",
            "ns",
            1_795_187_561_318,
            &[(planned, Some(&description), 90_000)],
        );
        assert!(
            text.contains("DTSTART:20261121T040000Z\r\nDTEND:20261121T040130Z\r\n"),
            "{text}"
        );
        assert!(text.contains("DTSTAMP:20261120T151241Z\r\n"), "{text}");
        let lines: Vec<&str> = text.split("\r\n").collect();
        assert!(
            lines
                .iter()
                .all(|l| l.len() <= LINE && !l.contains(['\r', '\n'])),
            "{text}"
        );
        let ends = lines.iter().filter(|l| **l == "END:VCALENDAR").count();
        assert_eq!(ends, 1, "{text}");
        let unfolded = text.replace("\r\n ", "");
        let want = format!(
            "DESCRIPTION:a\\;b\\,c\\\\d e \\nEND:VCALENDAR\\n{}\r\n",
            "ä日".repeat(40)
        );
        assert!(unfolded.contains(&want), "{unfolded}");
    }
}
