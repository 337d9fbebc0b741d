//! Why an occurrence ran, or did not.

use std::sync::Arc;

use axum::{extract::State, response::Response};

use super::{
    App,
    api::{Path, instant, json, named},
    problem::{Problem, ProblemView},
};
use crate::{
    model::{Occurrence, Outcome},
    store::{self, HISTORY_KEPT},
    view::RunView,
    why::{Facts, WhyView},
};

/// Why an occurrence ran, or why it did not: what each instance decided
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{job}/why/{occurrence}",
    tag = "jobs",
    params(
        ("job" = String, Path),
        ("occurrence" = String, Path, description = "its instant, or `latest`: the last one that is due or decided"),
    ),
    responses(
        (status = 200, description = "what is known of it", body = WhyView),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn why(
    State(app): State<Arc<App>>,
    Path((job, occurrence)): Path<(String, String)>,
) -> Result<Response, Problem> {
    explained(&app, &job, &occurrence).await
}

/// The same of the latest occurrence
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{job}/why",
    operation_id = "why_latest",
    tag = "jobs",
    params(("job" = String, Path)),
    responses(
        (status = 200, description = "what is known of it", body = WhyView),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn latest(
    State(app): State<Arc<App>>,
    Path(job): Path<String>,
) -> Result<Response, Problem> {
    explained(&app, &job, "latest").await
}

async fn explained(app: &App, job: &str, occurrence: &str) -> Result<Response, Problem> {
    let name = named(&app.board, job)?;
    let at = match occurrence {
        "latest" => None,
        text => Some(instant(text).map_err(|why| Problem::bad(format!("the occurrence: {why}")))?),
    };
    let asked = name.clone();
    let (state, decisions, history) = app
        .ask(move |store| {
            let name = asked.clone();
            async move {
                let state = store.observe(std::slice::from_ref(&name)).await?;
                let decisions = store.decisions(&name).await?;
                Ok((state, decisions, store.records(&name, HISTORY_KEPT).await?))
            }
        })
        .await?;
    let (definition, fleet, problems) = {
        let inner = app.board.read();
        let pulse = inner.pulse();
        (
            inner.definition(&name),
            pulse.fleet.clone(),
            pulse.problems.clone(),
        )
    };
    let fleet = fleet.ok_or_else(|| Problem::unavailable("the store has not answered yet"))?;
    let clock = crate::view::Clock::of(&fleet.value, state.now_us.div_euclid(1000));
    let facts = Facts {
        name: &name,
        job: definition.as_deref(),
        clock,
        now: clock.now,
        incarnation: &state.incarnation,
        state: state.value.into_iter().next().flatten(),
        fleet: fleet.value.clone(),
        history: history.into_iter().map(RunView::from).collect(),
        decisions,
    };
    let at = at.map(Occurrence).or_else(|| facts.latest());
    let at = at.ok_or_else(|| Problem::missing(format!("`{name}` has had no occurrence yet")))?;
    let mut view = facts.explain(at);
    view.problems = problems.to_vec();
    for run in &mut view.runs {
        let Some(id) = run.run_id.filter(|_| run.outcome != Outcome::Running) else {
            continue;
        };
        let job = name.clone();
        let tail = app
            .ask(move |store| {
                let job = job.clone();
                async move { store::tail(&*store, &job, id).await }
            })
            .await;
        // What cannot be read hides nothing else.
        let (tail, complete) = tail.unwrap_or_default();
        run.output_tail = tail;
        run.output_truncated |= !complete;
    }
    Ok(json(&view))
}
