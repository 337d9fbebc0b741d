//! The facts of one job, line by line.

use std::fmt::Write as _;

use serde_json::{Value as Json, json};

use super::{Surroundings, cut_begin};
use crate::{
    logic::{
        claim::State,
        coming::Coming,
        notify::{Item, Kind},
    },
    model::{Outcome, RunRecord, Trigger, rfc3339_ms},
    text,
    view::signal_name,
    words,
};

/// The end of an output that a message has: lines, and characters; and the lines if it tells of several jobs.
const OUTPUT_LINES: usize = 15;
const OUTPUT_MOST: usize = 1500;
const OUTPUT_OF_MANY: usize = 3;

/// One line of facts. Without a name it goes on with what the line before began.
pub(super) fn line(name: &str, text: &str) -> String {
    let colon = if name.is_empty() { "" } else { ":" };
    format!("{:<12} {text}\n", format!("{name}{colon}"))
}

/// `Sat 2026-11-21 12:00:00 +08:00`, in this zone.
fn local(ms: i64, zone: &str) -> String {
    let zone = jiff::tz::TimeZoneDatabase::bundled()
        .get(zone)
        .unwrap_or(jiff::tz::TimeZone::UTC);
    match jiff::Timestamp::from_millisecond(ms) {
        Ok(t) => t
            .to_zoned(zone)
            .strftime("%a %Y-%m-%d %H:%M:%S %:z")
            .to_string(),
        Err(_) => rfc3339_ms(ms),
    }
}

fn zone<'a>(item: &Item, s: &Surroundings<'a>) -> &'a str {
    let job = s.config.jobs.get(&item.job);
    job.map_or("UTC", |job| &*job.timezone)
}

/// When the job is to run next, Unix ms.
fn next(item: &Item, s: &Surroundings<'_>) -> Option<i64> {
    let job = s.config.jobs.get(&item.job)?;
    Some(Coming::of(job, s.states.get(&item.job), s.now).next?.0)
}

fn outcome(run: &RunRecord) -> String {
    let mut out = run.outcome.to_string().replace('_', " ");
    if let Some(code) = run.exit_code {
        let _ = write!(out, ", exit code {code}");
    }
    if let Some(signal) = run.signal {
        let _ = write!(out, ", {}", signal_name(signal));
    }
    if let Some(ms) = run.duration_ms {
        let _ = write!(out, ", after {}", words::took(ms));
    }
    if run.count > 1 {
        let _ = write!(out, ", {} occurrences", run.count);
    }
    out
}

/// What is said of one job. `alone`: the message tells of no other.
// Long: one line of the text after the other.
pub(super) fn of_item(item: &Item, s: &Surroundings<'_>, alone: bool) -> String {
    let mut facts = String::new();
    let mut line = |name: &str, text: &str| facts += &line(name, text);
    if item.kind == Kind::Test {
        let namespace = &s.config.store.namespace;
        line("sent by", &format!("{} ({namespace})", s.from));
        line("at", &words::instant(s.now));
        return facts + "Nothing is wrong: somebody ran `soloist notify test`.\n";
    }
    line("job", item.job.as_str());
    let zone = zone(item, s);
    let local = |ms: i64| local(ms, zone);
    if let Some(run) = &item.run {
        // With the instant as `why` takes it.
        let at = run.occurrence.0;
        line(
            "occurrence",
            &format!("{} ({})", local(at), words::instant(at)),
        );
        line("outcome", &outcome(run));
        if let Some(error) = run.error.as_deref().or(unsaid(run.outcome)) {
            line("error", &words::line(error));
        }
        if run.attempt > 0 {
            let why = match run.trigger {
                Trigger::Schedule => String::new(),
                other => format!(" ({})", other.as_str().replace('_', " ")),
            };
            line("attempt", &format!("{}{why}", run.attempt));
        }
        if let Some(instance) = &run.instance {
            let host = run.host.as_ref().filter(|h| !h.is_empty());
            let host = host.map(|h| format!(" on {h}")).unwrap_or_default();
            line("instance", &words::line(&format!("{instance}{host}")));
        }
    }
    match item.kind {
        Kind::Overdue if item.never => {
            let watched = local(item.since);
            line(
                "no success",
                &format!("so far; the job has been watched since {watched}"),
            );
        }
        Kind::Overdue => line("no success", &format!("since {}", local(item.since))),
        _ if item.streak > 1 || item.streak > 0 && item.kind == Kind::Recovered => {
            let name = if item.bad { "is bad" } else { "was bad" };
            let ends = words::count(usize::try_from(item.streak).unwrap_or(0), "bad end");
            let since = local(item.since);
            line(name, &format!("since {since}, {ends} in a row"));
        }
        _ => {}
    }
    expectation(item, &mut line);
    let state = s.states.get(&item.job);
    if let (Kind::Overdue, Some(state)) = (item.kind, state) {
        line("why", &standstill(state, item.since, s, local));
    }
    let pause = state.and_then(|st| st.pause.as_ref());
    if let Some(pause) = pause.filter(|p| p.until.is_none_or(|until| s.now < until)) {
        let until = pause.until.map_or("somebody resumes it".to_owned(), local);
        let reason = pause.reason.as_deref().map(words::line);
        let reason = reason.map(|r| format!(": {r}")).unwrap_or_default();
        let since = local(pause.at);
        line("paused", &format!("since {since}, until {until}{reason}"));
    }
    if let Some(skip) = state.map(|st| st.skip).filter(|skip| *skip > 0) {
        let many = words::count(skip as usize, "occurrence");
        line("skipped", &format!("the next {many}, on request"));
    }
    if let Some(next) = next(item, s) {
        let text = match next.saturating_sub(s.now) {
            ..=-1000 => format!("due since {}", local(next)),
            _ => format!("{}, {}", local(next), words::relative(next, s.now)),
        };
        line("next", &text);
    }
    if item.changes > 1 {
        let text = format!(
            "{} between good and bad since the last message",
            item.changes
        );
        line("changes", &text);
    }
    if let Some(until) = item.quiet_until {
        let text = format!("no further change is told before {}", local(until));
        line("quiet", &text);
    }
    for (n, command) in commands(item, alone).iter().enumerate() {
        line(if n == 0 { "more" } else { "" }, command);
    }
    facts
}

/// The error of a run whose record has none, as far as its outcome says.
fn unsaid(outcome: Outcome) -> Option<&'static str> {
    match outcome {
        Outcome::TimedOut => Some("it ran for longer than its `timeout`, so it was ended"),
        Outcome::Crashed => {
            Some("the daemon or the guard that ran it died, so the command was ended")
        }
        _ => None,
    }
}

/// What was expected of the job, and for a late start why it was late.
fn expectation(item: &Item, line: &mut impl FnMut(&str, &str)) {
    let expected = item.expected.unwrap_or(0);
    let usually = |than: &str| {
        let usual = words::took(expected);
        format!("{usual}, the median of its last successes; {than} that is told")
    };
    match (item.kind, &item.run) {
        (Kind::TooLong, _) => line("usually", &usually("more than three times")),
        (Kind::TooShort, _) => line("usually", &usually("less than a third of")),
        (Kind::Late, Some(run)) => {
            let late = words::took(run.lateness_ms.unwrap_or(0));
            let from = words::took(expected);
            line(
                "late",
                &format!("{late} after its planned time; from {from} on it is told (`late_after`)"),
            );
            let why = run
                .waited
                .map(|(wait, ms)| wait.delay(&words::took(i64::try_from(ms).unwrap_or(i64::MAX))));
            // Its daemon died.
            let unknown = "nobody noted what it waited for".to_owned();
            line("why", &why.unwrap_or(unknown));
        }
        (Kind::Overdue, _) => {
            let within = words::span(expected);
            let text = format!("a success within {within} (`expect_success_within`)");
            line("expected", &text);
        }
        _ => {}
    }
}

/// Why an overdue job has no success.
fn standstill(
    state: &State,
    since: i64,
    s: &Surroundings<'_>,
    local: impl Fn(i64) -> String,
) -> String {
    let runs = state.open.iter().filter(|o| o.next_attempt.is_none());
    let last = state.last.as_ref().filter(|l| l.ended() > since);
    match runs.map(|o| &o.run).min_by_key(|run| run.granted_at) {
        Some(run) => format!(
            "it has been running for {}, since {}, on {}, and has not ended",
            words::span(s.now - run.granted_at),
            local(run.granted_at),
            words::line(run.instance.as_str()),
        ),
        None => match last.filter(|l| l.outcome != Outcome::Succeeded) {
            Some(last) => {
                let outcome = last.outcome.to_string().replace('_', " ");
                format!("its last run ended {}: {outcome}", local(last.ended()))
            }
            None => "no run of it has started since then".to_owned(),
        },
    }
}

/// The commands that say more.
fn commands(item: &Item, alone: bool) -> Vec<String> {
    let job = item.job.as_str();
    let say = |name: &str, more: &[&str]| words::command(name, &[&[job], more].concat());
    let history = say("history", &[]);
    match &item.run {
        None => vec![say("why", &[]), history],
        Some(run) => {
            let why = say("why", &[&words::instant(run.occurrence.0)]);
            match run.run_id {
                None => vec![why],
                Some(_) if !alone => vec![history],
                Some(id) => vec![history, say("logs", &[&id.to_string()]), why],
            }
        }
    }
}

/// The last lines, safe to show.
pub(in crate::notify) fn last_lines(output: &str) -> String {
    // Before it is made safe, which takes time for each character.
    let from = output.len().saturating_sub(4 * OUTPUT_MOST);
    let mut end = (from..=output.len()).filter_map(|at| output.get(at..));
    let safe = text::lines(end.next().unwrap_or_default());
    let lines: Vec<&str> = safe.trim_end().lines().collect();
    let kept = lines[lines.len().saturating_sub(OUTPUT_LINES)..].join("\n");
    cut_begin(&kept, OUTPUT_MOST)
}

pub(super) fn output(item: &Item, alone: bool) -> String {
    let Some(run) = item.run.as_ref().filter(|r| !r.output_tail.is_empty()) else {
        return String::new();
    };
    let lines: Vec<&str> = run.output_tail.lines().collect();
    let most = if alone { OUTPUT_LINES } else { OUTPUT_OF_MANY };
    let cut = lines.len().saturating_sub(most);
    let id = run.run_id.filter(|_| cut > 0).map(|id| id.to_string());
    let more = id.map(|id| words::command("logs", &[item.job.as_str(), &id]));
    let more = more.map(|logs| format!(" ({most} lines; `{logs}` shows more)"));
    let more = more.unwrap_or_default();
    let lines = lines[cut..].join("\n  ");
    format!("the end of its output{more}:\n  {lines}\n")
}

pub(super) fn json(item: &Item, s: &Surroundings<'_>) -> Json {
    let run = item.run.as_ref().map(|run| {
        json!({
            "run_id": run.run_id,
            "occurrence": run.occurrence.to_string(),
            "local": local(run.occurrence.0, zone(item, s)),
            "trigger": run.trigger,
            "attempt": run.attempt,
            "outcome": run.outcome,
            "exit_code": run.exit_code,
            "signal": run.signal,
            "error": run.error.as_deref().map(words::line),
            "instance": run.instance,
            "host": run.host.as_deref().map(words::line),
            "started_at": run.started_at.map(rfc3339_ms),
            "duration_ms": run.duration_ms,
            "lateness_ms": run.lateness_ms,
            "waited_for": run.waited.map(|(wait, _)| wait),
            "count": run.count,
            "output": run.output_tail,
        })
    });
    let state = s.states.get(&item.job);
    json!({
        "job": item.job,
        "kind": item.kind,
        "bad": item.bad,
        "streak": item.streak,
        "since": rfc3339_ms(item.since),
        "changes": item.changes,
        "next": next(item, s).map(rfc3339_ms),
        "paused": state.is_some_and(|st| st.pause.is_some()),
        "expected_ms": item.expected,
        "never": item.never,
        "link": s.link(item),
        "run": run,
    })
}
