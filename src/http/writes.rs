//! What can be asked over HTTP: the same that the commands ask, with the same words.

use std::{future::Future, sync::Arc, time::Duration};

use axum::{
    Extension,
    body::{Bytes, HttpBody},
    extract::{FromRequest, Request, State},
    http::{StatusCode, header},
    response::Response,
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, Error as _},
};
use serde_json::{Value, error::Category};
use tokio::time::timeout;
use tracing::info;

use super::{
    App, BODY_MOST,
    api::{Path, json, named},
    auth::Caller,
    problem::{Problem, ProblemView},
};
use crate::{
    acts::{self, Asker, Refusal},
    config::nearest,
    logic::claim::{Control, Controlled},
    model::{InstanceId, JobName, RunId},
    view::{Clock, Time},
    words,
};

/// The most characters of the reason of a pause: it is part of the job's state, and of the record of each skipped
/// occurrence.
const REASON_MOST: usize = 1000;

/// The body of a request must arrive within this time.
const BODY_WITHIN: Duration = Duration::from_secs(20);

/// An empty body counts as `{}`, too, which helps people who use curl.
const BODY: &str =
    "`{}` if there is nothing to say; without `Content-Type: application/json` the answer is 415";

impl From<Refusal> for Problem {
    fn from(r: Refusal) -> Self {
        match r {
            Refusal::Usage { message, hint } => Self::bad(message).hint(hint),
            Refusal::NotNow { message, hint } => Self {
                hint,
                ..Self::new(StatusCode::CONFLICT, message)
            },
            Refusal::Store(e) => e.into(),
        }
    }
}

/// What a request may say. All fields are optional.
pub(super) trait Said: DeserializeOwned {
    /// Each field, and what it may be.
    const FIELDS: &'static [(&'static str, &'static str)];
}

/// A body in JSON. An empty one counts as `{}`.
pub(super) struct Json<T>(T);

impl<S: Send + Sync, T: Said> FromRequest<S> for Json<T> {
    type Rejection = Problem;
    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let kind = request
            .headers()
            .get(header::CONTENT_TYPE)
            .and_then(|v| v.to_str().ok());
        let kind = kind
            .and_then(|kind| kind.split(';').next())
            .unwrap_or_default();
        if !kind.trim().eq_ignore_ascii_case("application/json") {
            return Err(
                Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the body must be JSON").hint(
                    "send `Content-Type: application/json`, and `{}` if there is nothing to say",
                ),
            );
        }
        let too_large = || {
            let detail = format!("the body has more than {BODY_MOST} bytes");
            Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail).hint("send less")
        };
        // What its headers announce is not waited for.
        if request.body().size_hint().lower() > BODY_MOST as u64 {
            return Err(too_large());
        }
        let body = timeout(BODY_WITHIN, Bytes::from_request(request, state)).await;
        let body = body.map_err(|_| {
            let detail = format!("the body did not arrive within {BODY_WITHIN:?}");
            Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
                .hint("send as many bytes as `Content-Length` has")
        })?;
        let body = body.map_err(|e| match e.status() {
            StatusCode::PAYLOAD_TOO_LARGE => too_large(),
            _ => Problem::bad("the body does not arrive as its headers say")
                .hint("send as many bytes as `Content-Length` has"),
        })?;
        match &body[..] {
            b"" => read(b"{}"),
            body => read(body),
        }
        .map(Self)
    }
}

/// # Errors
/// What is wrong with a body, in words: not those of the program that reads it.
fn read<T: Said>(body: &[u8]) -> Result<T, Problem> {
    let value: Value = serde_json::from_slice(body).map_err(|e| {
        let detail = match e.classify() {
            Category::Eof => "the body is not JSON: it ends too early".to_owned(),
            _ => format!(
                "the body is not JSON: see line {}, column {}",
                e.line(),
                e.column()
            ),
        };
        Problem::bad(detail).hint("send an object, or nothing at all")
    })?;
    let Value::Object(fields) = value else {
        return Err(Problem::bad("the body must be an object of JSON")
            .hint("send `{}` if there is nothing to say"));
    };
    let names = || T::FIELDS.iter().map(|(name, _)| *name);
    for (name, value) in fields {
        let Some((_, allowed)) = T::FIELDS.iter().find(|(known, _)| *known == name) else {
            let shown: String = name.chars().take(100).collect();
            let problem = Problem::bad(format!("no field `{shown}` is known here"));
            return Err(match nearest(&name, names()) {
                Some(near) => problem.hint(format!("did you mean `{near}`?")),
                None if T::FIELDS.is_empty() => problem.hint("there are none; send `{}`"),
                None => problem.hint(format!(
                    "those known are {}",
                    names().collect::<Vec<_>>().join(", ")
                )),
            });
        };
        let alone = Value::Object(serde_json::Map::from_iter([(name.clone(), value)]));
        serde_json::from_value::<T>(alone)
            .map_err(|_| Problem::bad(format!("`{name}` must be {allowed}")))?;
    }
    // Each field is as it must be. The value above has only the last of each name.
    serde_json::from_slice(body).map_err(|e| {
        let said = e.to_string();
        let twice = names().find(|name| said.contains(&format!("`{name}`")));
        let twice = twice.map_or("a field".to_owned(), |name| format!("`{name}`"));
        Problem::bad(format!("{twice} is there twice")).hint("send each field once")
    })
}

#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct TriggerRequest {
    /// A key runs the job only once within 7 days, however often it is used. Default: a new one.
    #[serde(default)]
    #[schema(
        min_length = 1,
        max_length = 200,
        pattern = r"^[^~\u0000-\u001f\u007f-\u009f][^\u0000-\u001f\u007f-\u009f]*$"
    )]
    key: Option<String>,
}

#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PauseRequest {
    /// RFC 3339, a local date and time in the job's time zone, or a duration as `2h`; in the future. Default: until
    /// resumed.
    #[serde(default)]
    #[schema(min_length = 1, pattern = "^[0-9Pp+]")]
    until: Option<String>,
    /// Shown with the job, and in the record of each skipped occurrence.
    #[serde(default)]
    #[schema(max_length = 1000)]
    reason: Option<String>,
}

#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SkipRequest {
    /// How many; 0 takes an earlier request back. Default: 1.
    #[serde(default, deserialize_with = "whole")]
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295.0)]
    n: Option<u32>,
}

/// A number without a fraction is whole for JSON Schema, however it is written: `2`, `2.0`, `2e0`.
fn whole<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    let whole = |n: f64| {
        let fits = n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&n);
        fits.then_some(n as u32).ok_or_else(|| D::Error::custom(""))
    };
    Option::<f64>::deserialize(d)?.map(whole).transpose()
}

impl Said for TriggerRequest {
    const FIELDS: &'static [(&'static str, &'static str)] = &[("key", "a string")];
}

impl Said for PauseRequest {
    const FIELDS: &'static [(&'static str, &'static str)] = &[
        (
            "until",
            "a string: an instant as `2026-12-24T18:00:00Z`, or a duration as `2h`",
        ),
        ("reason", "a string"),
    ];
}

impl Said for SkipRequest {
    const FIELDS: &'static [(&'static str, &'static str)] =
        &[("n", "a whole number from 0 to 4294967295")];
}

impl Said for NoRequest {
    const FIELDS: &'static [(&'static str, &'static str)] = &[];
}

/// Nothing can be said.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NoRequest {}

/// A trigger that the store has taken.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Triggered {
    triggered: bool,
    key: String,
    /// This key was used before: the job does not run again.
    known: bool,
    /// As which occurrence it was decided, if it was.
    occurrence: Option<Time>,
    detail: String,
}

/// What came of a request.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Done {
    /// False: there was nothing to do.
    done: bool,
    /// In words.
    detail: String,
    /// The runs that were asked to end.
    #[serde(skip_serializing_if = "Option::is_none")]
    runs: Option<Vec<RunId>>,
    /// Until when the job is paused; null: until it is resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<Option<Time>>,
    /// The first of the occurrences that will be skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    occurrences: Option<Vec<Time>>,
}

impl Done {
    fn new(done: bool, detail: String) -> Self {
        Self {
            done,
            detail,
            runs: None,
            until: None,
            occurrences: None,
        }
    }
}

impl App {
    /// Asks the store, from the daemon's runtime. The request is made even if the client goes away.
    async fn act<T: Send + 'static>(
        &self,
        act: impl Future<Output = Result<T, Refusal>> + Send + 'static,
    ) -> Result<T, Problem> {
        if let Some(away) = &self.board.read().pulse().away {
            return Err(
                Problem::unavailable(away.why.to_string()).hint("try again once the store answers")
            );
        }
        match self.daemon.spawn(act).await {
            Ok(done) => done.map_err(Problem::from),
            Err(_) => Err(Problem::unavailable("the instance ends")),
        }
    }

    async fn control(&self, job: &JobName, what: Control) -> Result<Controlled, Problem> {
        let (store, retry, job) = (self.store.clone(), self.retry.clone(), job.clone());
        let act = async move {
            let asker = Asker {
                store: &*store,
                retry: &retry,
            };
            asker.control(&job, &what).await.map(|reply| reply.value)
        };
        self.act(act).await
    }

    fn clock(&self) -> Clock {
        self.board.read().clock()
    }
}

/// Logs who asks for what. Returns who: the name of the token, or only that it came over HTTP.
fn told(caller: &Caller, what: &str, of: &dyn std::fmt::Display) -> String {
    let nobody = || format!("http@{}", crate::store::host());
    let by = caller.name.as_deref().map_or_else(nobody, str::to_owned);
    info!(by, "asked over HTTP: {what} {of}");
    by
}

/// Run a job once now, on exactly one instance
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{job}/trigger",
    tag = "jobs",
    params(("job" = String, Path)),
    request_body(content = TriggerRequest, description = BODY),
    responses(
        (status = 202, description = "the store has the request; an instance claims it", body = Triggered),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn trigger(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(job): Path<String>,
    Json(request): Json<TriggerRequest>,
) -> Result<Response, Problem> {
    let job = named(&app.board, &job)?;
    let own = request.key.is_none();
    let key = match request.key {
        Some(key) => acts::key(&key).map_err(|why| Problem::bad(format!("`key`: {why}")))?,
        None => acts::own_key(),
    };
    let by = told(&caller, "trigger", &job);
    let (store, retry) = (app.store.clone(), app.retry.clone());
    let (name, asked) = (job.clone(), key.clone());
    let act = async move {
        let asker = Asker {
            store: &*store,
            retry: &retry,
        };
        asker.trigger(&name, &asked, own, &by).await
    };
    let taken = app.act(act).await?;
    let who = {
        let inner = app.board.read();
        let fleet = inner.pulse().fleet.as_ref();
        let config = inner.definition(&job).map(|_| inner.config.digest.as_str());
        fleet.map_or_else(String::new, |f| acts::who(&f.value, inner.clock(), config))
    };
    let answer = Triggered {
        triggered: true,
        known: !taken.new,
        occurrence: taken.occurrence.map(Time::from),
        detail: acts::triggered(&job, &key, taken.new, taken.occurrence, &who),
        key,
    };
    let mut response = json(&answer);
    *response.status_mut() = StatusCode::ACCEPTED;
    Ok(response)
}

/// Stop occurrences of a job from starting, on the whole fleet
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{job}/pause",
    tag = "jobs",
    params(("job" = String, Path)),
    request_body(content = PauseRequest, description = BODY),
    responses(
        (status = 200, description = "the job is paused", body = Done),
        (status = 400, description = "a problem; also if `until` is past, or not understood", body = ProblemView,
            content_type = "application/problem+json"),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn pause(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(job): Path<String>,
    Json(request): Json<PauseRequest>,
) -> Result<Response, Problem> {
    let job = named(&app.board, &job)?;
    if request
        .reason
        .as_ref()
        .is_some_and(|r| r.chars().count() > REASON_MOST)
    {
        return Err(Problem::bad(format!(
            "`reason` has more than {REASON_MOST} characters"
        )));
    }
    let now = app.clock().now;
    let zone = {
        let inner = app.board.read();
        inner
            .job(&job)
            .map_or_else(|| "UTC".into(), |job| job.view.timezone.clone())
    };
    let until = request.until.as_deref();
    let until = until
        .map(|text| acts::until("until", text, &zone, now))
        .transpose()?;
    let reason = request.reason.filter(|text| !text.is_empty());
    let by = told(&caller, "pause", &job);
    let what = Control::Pause { until, reason };
    app.control(&job, what.by(&by)).await?;
    Ok(json(&Done {
        until: Some(until.map(Time)),
        ..Done::new(true, acts::paused(&job, until, now))
    }))
}

/// End a pause
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{job}/resume",
    tag = "jobs",
    params(("job" = String, Path)),
    request_body(content = NoRequest, description = BODY),
    responses(
        (status = 200, description = "the job is not paused", body = Done),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn resume(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(job): Path<String>,
    Json(_): Json<NoRequest>,
) -> Result<Response, Problem> {
    let job = named(&app.board, &job)?;
    let by = told(&caller, "resume", &job);
    let changed = app.control(&job, Control::Resume.by(&by)).await? == Controlled::Done;
    let inner = app.board.read();
    let definition = inner.definition(&job);
    let detail = acts::resumed(&job, definition.as_deref(), changed, inner.clock());
    Ok(json(&Done::new(changed, detail)))
}

/// Skip the next occurrences of a job, on the whole fleet
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{job}/skip",
    tag = "jobs",
    params(("job" = String, Path)),
    request_body(content = SkipRequest, description = BODY),
    responses(
        (status = 200, description = "so many will be skipped", body = Done),
        (status = 409, description = "a problem; also if the job has no schedule", body = ProblemView,
            content_type = "application/problem+json"),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn skip(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(job): Path<String>,
    Json(request): Json<SkipRequest>,
) -> Result<Response, Problem> {
    let job = named(&app.board, &job)?;
    let count = request.n.unwrap_or(1);
    {
        let inner = app.board.read();
        acts::skippable(&job, inner.definition(&job).as_deref(), count).map_err(|refusal| {
            Problem {
                status: StatusCode::CONFLICT,
                ..Problem::from(refusal)
            }
        })?;
    }
    let by = told(&caller, "skip occurrences of", &job);
    app.control(&job, Control::Skip { count }.by(&by)).await?;
    let inner = app.board.read();
    let definition = inner.definition(&job);
    // During a pause nobody can say which ones will be hit.
    let paused = inner.job(&job).is_some_and(|job| job.view.paused.is_some());
    let first = match paused {
        true => vec![],
        false => acts::planned(
            definition.as_deref(),
            inner.clock().now,
            count.min(5) as usize,
        ),
    };
    Ok(json(&Done {
        occurrences: Some(first.iter().copied().map(Time::from).collect()),
        ..Done::new(true, acts::skips(&job, count, &first))
    }))
}

/// End the active runs of a job, on all instances, and drop its waiting attempts
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{job}/cancel",
    tag = "jobs",
    params(("job" = String, Path)),
    request_body(content = NoRequest, description = BODY),
    responses(
        (status = 200, description = "the runs were asked to end", body = Done),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(job): Path<String>,
    Json(_): Json<NoRequest>,
) -> Result<Response, Problem> {
    let job = named(&app.board, &job)?;
    let by = told(&caller, "cancel", &job);
    let answer = app.control(&job, Control::Cancel.by(&by)).await?;
    let done = answer != Controlled::Nothing;
    let runs = match answer {
        Controlled::Stopping(runs) => runs,
        _ => vec![],
    };
    let detail = match (runs.len(), done) {
        (0, false) => format!("no run of `{job}` is active"),
        (0, true) => format!("`{job}`: its waiting attempts are cancelled"),
        (n, _) => format!("{} of `{job}` asked to end", words::count(n, "active run")),
    };
    Ok(json(&Done {
        runs: Some(runs),
        ..Done::new(done, detail)
    }))
}

/// Make an instance claim nothing more and finish its active runs
#[utoipa::path(
    post,
    path = "/api/v1/instances/{instance}/drain",
    tag = "fleet",
    params(("instance" = String, Path)),
    request_body(content = NoRequest, description = BODY),
    responses(
        (status = 200, description = "it was asked to", body = Done),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn drain(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(instance): Path<String>,
    Json(_): Json<NoRequest>,
) -> Result<Response, Problem> {
    set_drain(&app, &caller, &instance, true).await
}

/// Make a drained instance claim again
#[utoipa::path(
    post,
    path = "/api/v1/instances/{instance}/undrain",
    tag = "fleet",
    params(("instance" = String, Path)),
    request_body(content = NoRequest, description = BODY),
    responses(
        (status = 200, description = "it was asked to", body = Done),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn undrain(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(instance): Path<String>,
    Json(_): Json<NoRequest>,
) -> Result<Response, Problem> {
    set_drain(&app, &caller, &instance, false).await
}

async fn set_drain(
    app: &App,
    caller: &Caller,
    instance: &str,
    on: bool,
) -> Result<Response, Problem> {
    let (fleet, clock) = {
        let inner = app.board.read();
        (inner.pulse().fleet.clone(), inner.clock())
    };
    let fleet = fleet.ok_or_else(|| Problem::unavailable("the store has not answered yet"))?;
    let id: InstanceId = acts::instance(&fleet.value, instance).map_err(|refusal| {
        let problem = Problem::from(refusal);
        Problem {
            status: StatusCode::NOT_FOUND,
            ..problem
        }
    })?;
    let by = told(caller, if on { "drain" } else { "undrain" }, &id);
    let (store, retry, asked) = (app.store.clone(), app.retry.clone(), id.clone());
    let act = async move {
        let asker = Asker {
            store: &*store,
            retry: &retry,
        };
        asker.drain(&asked, on, &by).await
    };
    app.act(act).await?;
    let running = fleet.value.instances.get(&id).map(|i| i.running.iter());
    let running: Vec<&JobName> = running.into_iter().flatten().map(|(job, _)| job).collect();
    let others = acts::others(&fleet.value, &id, clock);
    Ok(json(&Done::new(
        true,
        acts::drained(&id, on, &running, &others),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<T: Said>(body: &str) -> String {
        match read::<T>(body.as_bytes()) {
            Ok(_) => String::new(),
            Err(p) => format!("{}; {}", p.detail, p.hint.unwrap_or_default()),
        }
    }

    #[test]
    fn what_is_wrong_with_a_body_is_said_in_words_about_its_fields() {
        for (body, said) in [
            (" ", "the body is not JSON: it ends too early; "),
            ("{", "the body is not JSON: it ends too early; "),
            ("{\"n\": x}", "the body is not JSON: see line 1, column 7; "),
            ("[]", "the body must be an object of JSON; "),
            ("null", "the body must be an object of JSON; "),
            (
                "{\"n\": -1}",
                "`n` must be a whole number from 0 to 4294967295; ",
            ),
            (
                "{\"n\": \"1\"}",
                "`n` must be a whole number from 0 to 4294967295; ",
            ),
            (
                "{\"n\": 1.5}",
                "`n` must be a whole number from 0 to 4294967295; ",
            ),
            ("{\"n\": 99124.0}", ""),
            (
                "{\"n\": 4294967296.0}",
                "`n` must be a whole number from 0 to 4294967295; ",
            ),
            (
                "{\"n\": 4294967296}",
                "`n` must be a whole number from 0 to 4294967295; ",
            ),
            (
                "{\"count\": 1}",
                "no field `count` is known here; those known are n",
            ),
            ("{\"n\": 1, \"n\": 2}", "`n` is there twice; "),
        ] {
            let got = refused::<SkipRequest>(body);
            assert!(got.starts_with(said), "{body}: {got}");
        }
        let near = refused::<PauseRequest>("{\"reasn\": \"x\"}");
        assert!(near.ends_with("did you mean `reason`?"), "{near}");
        let twice =
            refused::<PauseRequest>("{\"until\": null, \"reason\": \"a\", \"reason\": \"until\"}");
        assert!(twice.starts_with("`reason` is there twice; "), "{twice}");
        let none = refused::<NoRequest>("{\"a\": 1}");
        assert!(none.ends_with("there are none; send `{}`"), "{none}");
        for body in [
            "{}",
            "{\"until\": null}",
            " {\"until\": \"2h\", \"reason\": \"x\"}\n",
        ] {
            assert_eq!(refused::<PauseRequest>(body), "", "{body}");
        }
    }
}
