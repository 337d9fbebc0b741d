//! The facts of one job, line by line.

use std::fmt::Write as _;

use super::{
    Surroundings,
    body::{self, Details},
    item::OUTPUT_LINES,
};
use crate::{
    logic::notify::{About, Item, Kind, Standstill},
    model::{Outcome, Trigger, rfc3339_ms},
    view::{DRAINED, signal_name},
    words::{self, number},
};

/// With several jobs in one message each has fewer lines of output.
const OUTPUT_OF_MANY: usize = 3;

/// `Sat 2026-11-21 12:00:00 +08:00`, in the job's zone.
pub(super) fn local(ms: i64, zone: &str) -> String {
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

fn outcome(run: &About) -> String {
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
    let late = run.lateness_ms.filter(|ms| *ms >= 1000);
    // The lateness of a later attempt is that of the first one.
    if let Some(ms) = late.filter(|_| run.attempt <= 1) {
        let _ = write!(out, ", started {} late", words::took(ms));
    }
    if run.count > 1 {
        let _ = write!(out, ", {} occurrences", run.count);
    }
    out
}

/// What is said of one job. `alone`: the message tells of no other.
// Long: one line of the text after the other.
pub(super) fn of_item(item: &Item, s: &Surroundings, alone: bool) -> Details {
    let mut facts = String::new();
    let mut line = |name: &str, text: &str| facts += &body::line(name, text);
    if item.kind == Kind::Test {
        line("sent by", &format!("{} ({})", s.from, s.namespace));
        line("at", &words::instant(s.now));
        facts += "Nothing is wrong: somebody ran `soloist notify test`.\n";
        return Details {
            facts,
            ..Details::default()
        };
    }
    line("job", item.job.as_str());
    let local = |ms: i64| local(ms, &item.zone);
    if let Some(run) = &item.run {
        // With the instant as `why` takes it.
        let at = run.occurrence.0;
        let utc = match item.zone.as_str() {
            "UTC" => String::new(),
            _ => format!(" ({})", words::instant(at)),
        };
        let name = match item.kind {
            Kind::Flapping => "last bad",
            _ => "occurrence",
        };
        line(name, &format!("{}{utc}", local(at)));
        line("outcome", &outcome(run));
        if let Some(error) = run.error.as_deref().or(unsaid(run.outcome)) {
            line("error", error);
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
            line(
                "instance",
                &format!("{}{host}", words::line(instance.as_str())),
            );
        }
    }
    let ends = |n: u64| words::count(usize::try_from(n).unwrap_or(usize::MAX), "bad end");
    match item.kind {
        Kind::Overdue if item.never => {
            let watched = local(item.since);
            line(
                "no success",
                &format!("so far; the job has been watched since {watched}"),
            );
        }
        Kind::Overdue => line("no success", &format!("since {}", local(item.since))),
        Kind::Recovered if item.streak > 0 => {
            let (since, ends) = (local(item.since), ends(item.streak));
            line("was bad", &format!("since {since}, {ends} in a row"));
        }
        Kind::Flapping => {
            let since = local(item.since);
            let text = format!(
                "{} between good and bad since {since}; further ones are summed up",
                number(item.changes)
            );
            line("changes", &text);
            if let Some(at) = item.again_at {
                let text = format!("the next one comes on {} at the earliest", local(at));
                line("summary", &text);
            }
        }
        _ if item.bad && item.streak > 1 => {
            let (since, ends) = (local(item.since), ends(item.streak));
            line("bad since", &format!("{since}, {ends} in a row"));
        }
        _ => {}
    }
    for (name, text) in expectation(item) {
        line(name, &text);
    }
    if let (Kind::Overdue, Some(why)) = (item.kind, &item.now.standstill) {
        line("why", &standstill(why, s.now, local));
    }
    if let Some((since, until, reason)) = &item.now.paused {
        let until = until.map_or("somebody resumes it".to_owned(), local);
        let reason = reason.as_ref().map(|r| format!(": {}", words::line(r)));
        let reason = reason.unwrap_or_default();
        line(
            "paused",
            &format!("since {}, until {until}{reason}", local(*since)),
        );
    }
    if item.now.skip > 0 {
        let many = words::count(item.now.skip as usize, "occurrence");
        line("skipped", &format!("the next {many}, on request"));
    }
    if let Some(next) = item.next {
        let text = match next.saturating_sub(s.now) {
            ..=-1000 => format!("due since {}", local(next)),
            _ => format!("{}, {}", local(next), words::relative(next, s.now)),
        };
        line("next", &text);
    }
    if item.lacked {
        let text = format!(
            "the configuration of {}, which sent this, lacks the job, so its time zone and its next run are not known; \
             `soloist status` says more",
            s.from
        );
        line("note", &text);
    }
    for (n, command) in commands(item, alone).iter().enumerate() {
        line(if n == 0 { "more" } else { "" }, command);
    }
    Details {
        title: None,
        facts,
        link: s.link(item),
        output: output(item, alone),
    }
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

/// The commands that say more.
fn commands(item: &Item, alone: bool) -> Vec<String> {
    let job = item.job.as_str();
    let say = |name: &str, more: &[&str]| words::command(name, &[&[job], more].concat());
    let history = say("history", &[]);
    let Some(run) = &item.run else {
        return match alone && item.kind == Kind::Overdue {
            true => vec![say("why", &[]), history],
            false => vec![history],
        };
    };
    let why = say("why", &[&words::instant(run.occurrence.0)]);
    match run.id {
        None => vec![why],
        Some(_) if !alone => vec![history],
        Some(id) => {
            let logs = say("logs", &[&id.to_string()]);
            let why = (item.kind == Kind::Late).then_some(why);
            [history, logs].into_iter().chain(why).collect()
        }
    }
}

fn output(item: &Item, alone: bool) -> String {
    let output = item.run.as_ref().map_or("", |run| run.output.as_str());
    let lines: Vec<&str> = output.lines().collect();
    let most = if alone { OUTPUT_LINES } else { OUTPUT_OF_MANY };
    let cut = lines.len().saturating_sub(most);
    let lines = lines.get(cut..).unwrap_or_default();
    if lines.is_empty() || !item.bad {
        return String::new();
    }
    let id = item.run.as_ref().and_then(|run| run.id);
    let is_cut = cut > 0 || output.starts_with('…');
    let more = id.filter(|_| is_cut && !alone).map(|id| {
        let id = id.to_string();
        let command = words::command("logs", &[item.job.as_str(), &id]);
        format!(" ({most} lines; `{command}` shows more)")
    });
    let more = more.unwrap_or_default();
    format!("the end of its output{more}:\n  {}\n", lines.join("\n  "))
}

/// Why an overdue job has no success. `local`: a time in words.
fn standstill(why: &Standstill, now: i64, local: impl Fn(i64) -> String) -> String {
    match why {
        Standstill::Runs { since, on } => format!(
            "it has been running for {}, since {}, on {}, and has not ended",
            words::span(now - since),
            local(*since),
            words::line(on.as_str()),
        ),
        Standstill::Nobody => "no instance has the job".to_owned(),
        Standstill::Drained => DRAINED.to_owned(),
        Standstill::Ended { outcome, at } => {
            let outcome = outcome.to_string().replace('_', " ");
            format!("its last run ended {}: {outcome}", local(*at))
        }
        Standstill::Idle => "no run of it has started since then".to_owned(),
    }
}

/// What was expected of the job, and for a late start why it was late.
fn expectation(item: &Item) -> Vec<(&'static str, String)> {
    let Some(expected) = item.expected else {
        return vec![];
    };
    let of_successes = "the median of its last successes";
    match (item.kind, &item.run) {
        (Kind::TooLong, _) => vec![(
            "usually",
            format!(
                "{}, {of_successes}; more than three times that is told",
                words::took(expected)
            ),
        )],
        (Kind::TooShort, _) => vec![(
            "usually",
            format!(
                "{}, {of_successes}; less than a third of that is told",
                words::took(expected)
            ),
        )],
        (Kind::Late, Some(run)) => {
            let why = match run.waited {
                Some((wait, ms)) => wait.delay(&words::took(i64::try_from(ms).unwrap_or(i64::MAX))),
                // An older version ran it, or its daemon died.
                None => "nobody noted what it waited for".to_owned(),
            };
            let first = match run.attempt {
                ..=1 => "",
                _ => "its first attempt started ",
            };
            vec![
                (
                    "late",
                    format!(
                        "{first}{} after its planned time; from {} on it is told (`late_after`)",
                        words::took(run.lateness_ms.unwrap_or(0)),
                        words::took(expected)
                    ),
                ),
                ("why", why),
            ]
        }
        (Kind::Overdue, _) => vec![(
            "expected",
            format!(
                "a success within {} (`expect_success_within`)",
                words::span(expected)
            ),
        )],
        _ => vec![],
    }
}
