//! `check` and `next`: what the configuration says; they do not use the store.

use std::{cmp::Reverse, collections::BinaryHeap, path::Path};

use clap::Args;
use serde::Serialize;

use super::{Exit, Failure, Out, instant, job, remark, show};
use crate::{
    config::{Config, Job, Problem, Report},
    logic::schedule::next_of,
    model::{JobName, Occurrence},
    view::Time,
};

/// How many occurrences `check` shows for each job.
const SHOWN: usize = 3;

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
struct Upcoming {
    job: JobName,
    occurrence: Time,
    local: String,
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
            return "nothing is planned\n".to_owned();
        }
        let mut t = show::Table::new(&["JOB", "OCCURRENCE", "LOCAL TIME", "WHEN"]);
        for u in &list {
            t.row([
                u.job.as_str().into(),
                show::instant(u.occurrence.0).into(),
                show::local(&u.local).into(),
                show::relative(u.occurrence.0, now).into(),
            ]);
        }
        t.render()
    })?;
    Ok(Exit::Ok)
}

/// The first `n` occurrences of all `jobs` after `from`, sorted by time, then by name.
fn upcoming(jobs: &[&Job], from: i64, n: usize) -> Vec<Upcoming> {
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

#[derive(Debug, Serialize)]
struct Checked<'a> {
    ok: bool,
    file: &'a Path,
    digest: &'a str,
    store: String,
    jobs: Vec<CheckedJob<'a>>,
}

#[derive(Debug, Serialize)]
struct CheckedJob<'a> {
    job: &'a JobName,
    enabled: bool,
    schedule: &'a [String],
    timezone: &'a str,
    next: Vec<Upcoming>,
}

#[derive(Debug, Serialize)]
struct Refused<'a> {
    ok: bool,
    file: &'a Path,
    problems: &'a [Problem],
}

pub(super) fn check(
    path: &Path,
    loaded: Result<Config, Report>,
    now: i64,
    out: &Out,
) -> Result<Exit, Failure> {
    let config = match loaded {
        Ok(config) => config,
        Err(report) if out.json => {
            out.object(&Refused {
                ok: false,
                file: path,
                problems: report.problems(),
            })?;
            return Ok(Exit::Config);
        }
        Err(report) => return Err(Failure::Config(report)),
    };
    let checked = Checked {
        ok: true,
        file: path,
        digest: &config.digest,
        store: config.store.url.to_string(),
        jobs: config
            .jobs
            .values()
            .map(|j| CheckedJob {
                job: &j.name,
                enabled: j.enabled,
                schedule: &j.schedule_text,
                timezone: &j.timezone,
                next: if j.enabled {
                    upcoming(&[j], now, SHOWN)
                } else {
                    vec![]
                },
            })
            .collect(),
    };
    out.say(&checked, || render(&checked, now))?;
    Ok(Exit::Ok)
}

fn render(c: &Checked, now: i64) -> String {
    let disabled = c.jobs.iter().filter(|j| !j.enabled).count();
    let mut text = format!(
        "{} is valid: {}{}, store {}\n",
        show::line(&c.file.to_string_lossy()),
        show::count(c.jobs.len(), "job"),
        if disabled > 0 {
            format!(" ({disabled} disabled)")
        } else {
            String::new()
        },
        show::line(&c.store)
    );
    if c.jobs.is_empty() {
        return text;
    }
    let mut t = show::Table::new(&["JOB", "SCHEDULE", "TIME ZONE", "NEXT", "WHEN"]);
    for j in &c.jobs {
        let lines = j.schedule.len().max(j.next.len()).max(1);
        for i in 0..lines {
            let first = i == 0;
            let nothing = match (j.enabled, j.schedule.is_empty()) {
                (false, _) => "disabled",
                (true, true) => "only when triggered",
                (true, false) => "never again",
            };
            t.row([
                show::Cell::new(show::BOLD, if first { j.job.as_str() } else { "" }),
                j.schedule.get(i).map_or("", String::as_str).into(),
                if first { j.timezone } else { "" }.into(),
                match j.next.get(i) {
                    Some(u) => show::local(&u.local).into(),
                    None if first => show::Cell::new(show::WARN, nothing),
                    None => "".into(),
                },
                j.next
                    .get(i)
                    .map_or(String::new(), |u| show::relative(u.occurrence.0, now))
                    .into(),
            ]);
        }
    }
    text.push('\n');
    text.push_str(&t.render());
    text
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

    #[test]
    fn check_shows_each_job_with_its_next_occurrences() {
        let c = config(
            "[jobs.draw]\nschedule = '0 12 * * *'\ntimezone = 'Asia/Shanghai'\ncommand = 'x'\n\
             [jobs.both]\nschedule = ['@at 2026-11-20T15:13:00Z', '@at 2020-01-01T00:00:00Z']\ncommand = 'x'\n\
             [jobs.gone]\nschedule = '@at 2020-01-01T00:00:00Z'\ncommand = 'x'\n\
             [jobs.off]\nschedule = '@daily'\ncommand = 'x'\nenabled = false\n",
        );
        let checked = Checked {
            ok: true,
            file: Path::new("jobs.toml"),
            digest: "d",
            store: "sqlite:x".into(),
            jobs: c
                .jobs
                .values()
                .map(|j| CheckedJob {
                    job: &j.name,
                    enabled: j.enabled,
                    schedule: &j.schedule_text,
                    timezone: &j.timezone,
                    next: if j.enabled {
                        upcoming(&[j], NOW, 3)
                    } else {
                        vec![]
                    },
                })
                .collect(),
        };
        let text = anstream::adapter::strip_str(&render(&checked, NOW)).to_string();
        assert_eq!(
            text,
            "jobs.toml is valid: 4 jobs (1 disabled), store sqlite:x\n\n\
             JOB   SCHEDULE                  TIME ZONE      NEXT                            WHEN\n\
             both  @at 2026-11-20T15:13:00Z  UTC            Fri 2026-11-20 15:13:00 +00:00  in 18 s\n\
             \x20     @at 2020-01-01T00:00:00Z\n\
             draw  0 12 * * *                Asia/Shanghai  Sat 2026-11-21 12:00:00 +08:00  in 12 h 47 min\n\
             \x20                                              Sun 2026-11-22 12:00:00 +08:00  in 1 d 12 h\n\
             \x20                                              Mon 2026-11-23 12:00:00 +08:00  in 2 d 12 h\n\
             gone  @at 2020-01-01T00:00:00Z  UTC            never again\n\
             off   @daily                    UTC            disabled\n"
        );
    }
}
