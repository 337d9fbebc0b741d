//! One job in detail.

use std::{sync::Arc, time::Duration};

use axum::{extract::State, response::Response};
use serde::Serialize;

use super::{
    App,
    api::{Path, json, named},
    board::Job,
    problem::{Problem, ProblemView},
};
use crate::{
    config,
    logic::{
        catch_up::CatchUp,
        claim::{OnCrash, Overlap},
        median::median,
        schedule,
    },
    model::{Outcome, RunRecord, job::OnStateLoss},
    store::HISTORY_KEPT,
    view::{self, Time},
};

/// How many coming occurrences are shown.
const UPCOMING: usize = 5;

/// A job with all that is shown of it alone.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct JobDetail {
    #[serde(flatten)]
    job: Job,
    /// The next occurrences that will run, without jitter.
    upcoming: Vec<Upcoming>,
    /// The schedule in plain words; empty: the job runs only when triggered.
    schedule_words: String,
    /// Null: only other instances know it.
    definition: Option<Definition>,
    /// Null: the records cannot be read now.
    stats: Option<Stats>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Upcoming {
    at: Time,
    #[schema(format = DateTime)]
    local: String,
}

/// How the job is defined: everything but its command and its environment, which may have secrets.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Definition {
    /// Instances with the same digest have the same definition.
    digest: String,
    overlap: Overlap,
    on_crash: OnCrash,
    on_state_loss: OnStateLoss,
    catch_up: CatchUp,
    lease_ms: i64,
    renew_every_ms: i64,
    timeout_ms: Option<i64>,
    grace_ms: i64,
    start_within_ms: i64,
    jitter_ms: i64,
    max_attempts: u32,
    retry: Option<Retry>,
    user: Option<String>,
    group: Option<String>,
    success_codes: Vec<i32>,
    output_keep_bytes: usize,
    output_log: bool,
}

/// How a failed command is tried again.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Retry {
    /// After the first attempt.
    attempts: u32,
    interval_ms: i64,
    exponential: bool,
    max_interval_ms: i64,
}

/// Over the runs that the store keeps of this job.
#[derive(Debug, PartialEq, Serialize, utoipa::ToSchema)]
struct Stats {
    runs: usize,
    succeeded: usize,
    /// From 0 to 1; null: there was no run.
    success_rate: Option<f64>,
    duration_p50_ms: Option<i64>,
    duration_p95_ms: Option<i64>,
    lateness_p50_ms: Option<i64>,
    lateness_p95_ms: Option<i64>,
}

impl Definition {
    fn of(job: &config::Job) -> Self {
        Self {
            digest: job.digest.clone(),
            overlap: job.overlap,
            on_crash: job.on_crash,
            on_state_loss: job.on_state_loss,
            catch_up: job.catch_up,
            lease_ms: ms(job.lease.length),
            renew_every_ms: ms(job.lease.renew_every),
            timeout_ms: job.timeout.map(ms),
            grace_ms: ms(job.grace),
            start_within_ms: ms(job.start_within),
            jitter_ms: ms(job.jitter),
            max_attempts: job.max_attempts,
            retry: job.retry.as_ref().map(|r| Retry {
                attempts: r.attempts,
                interval_ms: ms(r.interval),
                exponential: r.exponential,
                max_interval_ms: ms(r.max_interval),
            }),
            user: job.user.as_deref().map(str::to_owned),
            group: job.group.as_deref().map(str::to_owned),
            success_codes: job.success_codes.to_vec(),
            output_keep_bytes: job.output.keep,
            output_log: job.output.log,
        }
    }
}

fn ms(d: Duration) -> i64 {
    i64::try_from(d.as_millis()).unwrap_or(i64::MAX)
}

impl Stats {
    fn of(records: &[RunRecord]) -> Self {
        let ran: Vec<&RunRecord> = records.iter().filter(|r| r.attempt > 0).collect();
        let succeeded = ran
            .iter()
            .filter(|r| r.outcome == Outcome::Succeeded)
            .count();
        let took: Vec<i64> = ran.iter().filter_map(|r| r.duration_ms).collect();
        let late: Vec<i64> = ran.iter().filter_map(|r| r.lateness_ms).collect();
        Self {
            runs: ran.len(),
            succeeded,
            success_rate: (!ran.is_empty()).then(|| succeeded as f64 / ran.len() as f64),
            duration_p95_ms: percentile95(took.clone()),
            duration_p50_ms: median(took),
            lateness_p95_ms: percentile95(late.clone()),
            lateness_p50_ms: median(late),
        }
    }
}

/// The least value that at least 95 % of them do not exceed.
fn percentile95(mut all: Vec<i64>) -> Option<i64> {
    let rank = (all.len() * 95).div_ceil(100).checked_sub(1)?;
    let (_, value, _) = all.select_nth_unstable(rank);
    Some(*value)
}

/// One job: its next occurrences, its definition and its statistics
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{job}",
    tag = "jobs",
    params(("job" = String, Path)),
    responses(
        (status = 200, description = "the job", body = JobDetail),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn job(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Response, Problem> {
    let name = named(&app.board, &name)?;
    let asked = name.clone();
    let records = app
        .ask(move |store| {
            let name = asked.clone();
            async move { store.records(&name, HISTORY_KEPT).await }
        })
        .await;
    let inner = app.board.read();
    let job = inner
        .job(&name)
        .ok_or_else(|| Problem::missing("the job is gone"))?;
    let definition = inner.definition(&name);
    let records = records.map(|mut records| {
        view::late_since_due(&mut records, definition.as_deref());
        records
    });
    let upcoming = definition.iter().zip(inner.coming(&name));
    let upcoming = upcoming.flat_map(|(job, coming)| coming.runs(job).map(move |o| (job, o)));
    let local = |job: &config::Job, o| {
        let first = job.schedules.first();
        first.map_or_else(String::new, |s| s.local(o))
    };
    let words: Vec<String> = (job.view.schedule.iter())
        .map(|text| schedule::words(text, name.as_str()))
        .collect();
    Ok(json(&JobDetail {
        job: job.clone(),
        upcoming: upcoming
            .take(UPCOMING)
            .map(|(job, o)| Upcoming {
                at: o.into(),
                local: local(job, o),
            })
            .collect(),
        schedule_words: words.join("; and "),
        definition: definition.as_deref().map(Definition::of),
        stats: records.ok().map(|records| Stats::of(&records)),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_95th_percentile_is_a_value_that_occurred() {
        assert_eq!(percentile95(vec![]), None);
        assert_eq!(percentile95(vec![7]), Some(7));
        assert_eq!(percentile95((1..=100).rev().collect()), Some(95));
    }
}
