//! `next`: what the configuration plans, and what of it will not run, if the store answers.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    path::Path,
    time::Duration,
};

use clap::Args;
use serde::Serialize;

use super::{Exit, Failure, Out, instant, job, remark, show, status};
use crate::{
    acts,
    config::{Config, Job, StoreUrl},
    logic::{
        claim::State,
        coming::{Coming, PassedOver},
        schedule::{next_of, words},
    },
    model::{JobName, Occurrence},
    store::{self, Store, observe_each},
    view::{self, PauseView, Time},
};

#[derive(Debug, Args)]
#[command(after_help = "\
Shows what the configuration plans, without jitter. If the store answers within a second, it notes
what will not run because of a pause or a skip; otherwise stderr says that this is not known.
With --json each occurrence has `schedule_words`, the schedule in plain words, and `passed_over`:
null if it will run, otherwise `why` it will not, and of a pause `until` and `reason`. Without the
store, `passed_over` is not there.

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

/// An occurrence with what is known of it beside its time.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    planned: &'a Upcoming,
    /// The schedule in plain words.
    schedule_words: &'a str,
    /// None: the store was not asked. Some(None): it will run.
    #[serde(skip_serializing_if = "Option::is_none")]
    passed_over: Option<Option<Passed>>,
}

/// Why an occurrence will not run.
#[derive(Debug, PartialEq, Serialize)]
struct Passed {
    why: PassedOver,
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip)]
    pause: Option<PauseView>,
}

/// How long the store is asked: `next` is of use without it, too.
const ASKED_FOR: Duration = Duration::from_secs(1);

/// The store's answer.
struct Seen {
    /// The time that the fleet uses.
    now: i64,
    states: HashMap<JobName, State>,
    /// Why nothing starts at present.
    waits: Option<String>,
}

/// Reads the states of these jobs. None: there is no store yet, so nobody has paused anything.
///
/// # Errors
/// Why they cannot be read.
fn look(config: &Config, names: Vec<JobName>) -> Result<Option<Seen>, String> {
    match &config.store.url {
        // Only a daemon creates it.
        StoreUrl::Sqlite(file) if !file.exists() => return Ok(None),
        StoreUrl::Memory => {
            return Err(
                "a `memory:` store exists only inside the one process that runs jobs".into(),
            );
        }
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start the runtime: {e}"))?;
    let settings = config.store.clone();
    let asking = runtime.spawn(async move {
        // Another process may have locked the file.
        let opened = tokio::task::spawn_blocking(move || store::open(&settings)).await;
        let store = opened.map_err(|e| e.to_string())?;
        let store = store.map_err(|e| e.to_string())?;
        seen(&*store, names).await.map_err(|e| e.to_string())
    });
    let seen = runtime.block_on(async { tokio::time::timeout(ASKED_FOR, asking).await });
    runtime.shutdown_background();
    let late = |_| {
        format!(
            "the store does not answer within {}",
            show::span(super::millis(ASKED_FOR))
        )
    };
    seen.map_err(late)?.map_err(|e| e.to_string())?.map(Some)
}

async fn seen(store: &dyn Store, names: Vec<JobName>) -> Result<Seen, store::Error> {
    let fleet = store.heartbeat(None).await?;
    let clock = view::Clock::of(&fleet.value, fleet.now_us.div_euclid(1000));
    let observed = observe_each(store, &names).await?;
    let mut states = HashMap::new();
    for (name, state) in names.into_iter().zip(observed.value) {
        match state {
            Ok(Some(state)) => drop(states.insert(name, state)),
            Ok(None) => {}
            Err(e) => remark(&format!("cannot read whether `{name}` is paused: {e}")),
        }
    }
    Ok(Seen {
        now: clock.now,
        states,
        waits: acts::standstill(&fleet.value, clock),
    })
}

/// Why this occurrence will not run. None: it will.
fn passed(seen: &Seen, coming: &Coming, job: &Job, o: Occurrence) -> Option<Passed> {
    let why = coming.passes_over(job, o)?;
    let state = seen.states.get(&job.name);
    let pause = state.filter(|_| why == PassedOver::Paused);
    let pause = pause.and_then(|st| view::paused(st, seen.now));
    Some(Passed {
        why,
        until: pause.as_ref().and_then(|p| p.until),
        reason: pause.as_ref().and_then(|p| p.reason.clone()),
        pause,
    })
}

/// The same for people.
fn note(passed: &Passed, job: &JobName, now: i64) -> String {
    match (passed.why, &passed.pause) {
        (PassedOver::Paused, Some(p)) => status::paused(p, now),
        (PassedOver::Paused, None) => "paused".to_owned(),
        (PassedOver::Skipped, _) => "will be skipped, as somebody asked".to_owned(),
        (PassedOver::Disabled, _) => "disabled".to_owned(),
        (PassedOver::Decided, _) => format!(
            "counts as decided, because the store's clock was wrong: `{}` corrects that",
            crate::words::command("rewind", &[job.as_str()])
        ),
    }
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
    let listed = |job: &&&Job| list.iter().any(|u| u.job == job.name);
    let listed: Vec<&Job> = jobs.iter().filter(listed).copied().collect();
    let seen = match list.is_empty() {
        true => Ok(None),
        false => look(config, listed.iter().map(|job| job.name.clone()).collect()),
    };
    let seen = seen.unwrap_or_else(|why| {
        remark(&format!("pauses and skips are not shown: {why}"));
        None
    });
    if let Some(why) = seen.as_ref().and_then(|seen| seen.waits.as_ref()) {
        remark(why);
    }
    // For each of the jobs: what the schedule says, and what the store says.
    let known: HashMap<&JobName, (&Job, String, Option<Coming>)> = (listed.iter())
        .map(|job| {
            let coming = |seen: &Seen| Coming::of(job, seen.states.get(&job.name), seen.now);
            (
                &job.name,
                (*job, schedule_words(job), seen.as_ref().map(coming)),
            )
        })
        .collect();
    let shown = list.iter().filter_map(|planned| {
        let (job, schedule_words, coming) = known.get(&planned.job)?;
        let at = Occurrence(planned.occurrence.0);
        let both = seen.as_ref().zip(coming.as_ref());
        Some(Shown {
            planned,
            schedule_words,
            passed_over: both.map(|(seen, coming)| passed(seen, coming, job, at)),
        })
    });
    let shown: Vec<Shown> = shown.collect();
    let one = args.job.is_some();
    out.say(&shown, || match list.is_empty() {
        true => nothing(jobs.first().copied().filter(|_| one)),
        false => render(&shown, &listed, one, now),
    })?;
    Ok(Exit::Ok)
}

/// `one`: only one job was asked for.
fn render(all: &[Shown], jobs: &[&Job], one: bool, now: i64) -> String {
    let mut t = show::Table::new(&["JOB", "OCCURRENCE", "LOCAL TIME", "WHEN", "NOTE"]);
    for s in all {
        let u = s.planned;
        let note = |p: &Passed| note(p, &u.job, now);
        t.row([
            u.job.as_str().into(),
            show::instant(u.occurrence.0).into(),
            show::local(&u.local).into(),
            show::relative(u.occurrence.0, now).into(),
            show::Cell::new(
                show::WARN,
                s.passed_over.iter().flatten().map(note).collect::<String>(),
            ),
        ]);
    }
    // One job is told before its occurrences; of several, those that are shown, after them.
    let told: String = jobs.iter().map(|job| in_words(job) + "\n").collect();
    match one {
        true => told + &t.render(),
        false => format!("{}\n{told}", t.render()),
    }
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
fn schedule_words(job: &Job) -> String {
    let texts = job.schedule_text.iter();
    let each: Vec<String> = texts.map(|text| words(text, job.name.as_str())).collect();
    each.join("; and ")
}

/// A job with its schedule in plain words.
fn in_words(job: &Job) -> String {
    format!(
        "{}: {}; {}",
        show::paint(show::BOLD, job.name.as_str()),
        show::line(&schedule_words(job)),
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
