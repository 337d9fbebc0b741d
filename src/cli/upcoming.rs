//! `next`: what is planned, from the configuration alone.

use std::{cmp::Reverse, collections::BinaryHeap, path::Path};

use clap::Args;
use serde::Serialize;

use super::{Exit, Failure, Out, instant, job, remark, show};
use crate::{
    config::{Config, Job},
    logic::schedule::{next_of, words},
    model::{JobName, Occurrence},
    view::Time,
};

#[derive(Debug, Args)]
#[command(after_help = "\
Shows occurrences without jitter, from the configuration alone: it ignores pauses and skips.

Examples:
  soloist next                                          the next ten of all jobs
  soloist next backup -n 3
  soloist next backup --from 2026-03-28T00:00:00Z       around a daylight saving change")]
pub(super) struct Next {
    /// Only of this job
    job: Option<String>,
    /// How many
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10, value_parser = show::lines)]
    number: usize,
    /// After this instant (RFC 3339, or Unix milliseconds) [default: now]
    #[arg(long, value_name = "INSTANT", value_parser = instant)]
    from: Option<i64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Upcoming {
    job: JobName,
    pub(super) occurrence: Time,
    pub(super) local: String,
}

fn local(job: &Job, o: Occurrence) -> String {
    // All schedules of a job use its time zone.
    job.schedules
        .first()
        .map_or_else(|| o.to_string(), |s| s.local(o))
}

pub(super) fn next(
    path: &Path,
    config: &Config,
    args: &Next,
    now: i64,
    out: &Out,
) -> Result<Exit, Failure> {
    let jobs: Vec<&Job> = match &args.job {
        Some(name) => {
            let job = job(config, path, name)?;
            if !job.enabled {
                remark(&format!(
                    "job `{name}` is disabled: its occurrences do not run"
                ));
            }
            vec![job]
        }
        None => config
            .jobs
            .values()
            .map(|j| &**j)
            .filter(|j| j.enabled)
            .collect(),
    };
    let list = upcoming(&jobs, args.from.unwrap_or(now), args.number);
    out.say(&list, || {
        if list.is_empty() {
            return nothing(args.job.as_ref().and(jobs.first().copied()));
        }
        // One job is told before its occurrences; of several, those that are shown, after them.
        let told = |jobs: &[&Job]| -> String {
            let with_schedule = jobs.iter().filter(|job| !job.schedules.is_empty());
            with_schedule.map(|job| in_words(job) + "\n").collect()
        };
        let mut t = show::Table::new(&["JOB", "OCCURRENCE", "LOCAL TIME", "WHEN"]);
        for u in &list {
            t.row([
                u.job.as_str().into(),
                show::instant(u.occurrence.0).into(),
                show::local(&u.local).into(),
                show::relative(u.occurrence.0, now).into(),
            ]);
        }
        if args.job.is_some() {
            return told(&jobs) + &t.render();
        }
        let shown = |job: &&&Job| list.iter().any(|u| u.job == job.name);
        let shown: Vec<&Job> = jobs.iter().filter(shown).copied().collect();
        format!("{}\n{}", t.render(), told(&shown))
    })?;
    Ok(Exit::Ok)
}

/// Why there is no occurrence to show. `job`: the one that was asked about.
fn nothing(job: Option<&Job>) -> String {
    match job {
        Some(job) if job.schedules.is_empty() => {
            let name = show::line(job.name.as_str());
            format!(
                "`{name}` has no schedule: it runs only when somebody triggers it (`{}`)\n",
                crate::words::command("trigger", &[job.name.as_str()])
            )
        }
        Some(job) => format!("{}\nnothing is planned any more\n", in_words(job)),
        None => "nothing is planned\n".to_owned(),
    }
}

/// The schedule of a job in plain words.
fn in_words(job: &Job) -> String {
    let texts = job.schedule_text.iter();
    let each: Vec<String> = texts.map(|text| words(text, job.name.as_str())).collect();
    format!(
        "{}: {}; {}",
        show::paint(show::BOLD, job.name.as_str()),
        show::line(&each.join("; and ")),
        job.timezone
    )
}

/// The first `n` occurrences of all `jobs` after `from`, sorted by time, then by name.
pub(super) fn upcoming(jobs: &[&Job], from: i64, n: usize) -> Vec<Upcoming> {
    let mut heap: BinaryHeap<Reverse<(Occurrence, usize)>> = jobs
        .iter()
        .enumerate()
        .filter_map(|(i, j)| next_of(&j.schedules, Occurrence(from)).map(|o| Reverse((o, i))))
        .collect();
    let mut list = vec![];
    while list.len() < n
        && let Some(Reverse((o, i))) = heap.pop()
    {
        list.push(Upcoming {
            job: jobs[i].name.clone(),
            occurrence: o.into(),
            local: local(jobs[i], o),
        });
        if let Some(next) = next_of(&jobs[i].schedules, o) {
            heap.push(Reverse((next, i)));
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_795_187_561_318; // 2026-11-20T15:12:41.318Z

    fn config(text: &str) -> Config {
        crate::config::parse(text, Path::new("jobs.toml"), &|_| None).unwrap()
    }

    #[test]
    fn jobs_are_merged_in_the_order_of_time_then_of_names() {
        let c = config(
            "[jobs.b]\nschedule = '0 * * * *'\ncommand = 'x'\n\
             [jobs.a]\nschedule = ['30 * * * *', '0 16 * * *']\ncommand = 'x'\ntimezone = 'Asia/Kolkata'\n",
        );
        let jobs: Vec<&Job> = c.jobs.values().map(|j| &**j).collect();
        let got: Vec<_> = upcoming(&jobs, NOW, 4)
            .into_iter()
            .map(|u| {
                let json = serde_json::to_value(&u).unwrap();
                format!("{} {} {}", u.job, json["occurrence"], json["local"])
            })
            .collect();
        assert_eq!(
            got,
            [
                r#"a "2026-11-20T16:00:00.000Z" "2026-11-20T21:30:00+05:30""#,
                r#"b "2026-11-20T16:00:00.000Z" "2026-11-20T16:00:00+00:00""#,
                r#"a "2026-11-20T17:00:00.000Z" "2026-11-20T22:30:00+05:30""#,
                r#"b "2026-11-20T17:00:00.000Z" "2026-11-20T17:00:00+00:00""#,
            ]
        );
        assert_eq!(upcoming(&jobs, NOW, 0), []);
    }
}
