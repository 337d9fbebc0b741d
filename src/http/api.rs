//! What can be read: from the board, and what the board does not have from the store.

use std::{collections::BTreeSet, ops::RangeInclusive, sync::Arc, time::Duration};

use axum::{
    Extension,
    body::Body,
    extract::{FromRequestParts, State},
    http::{HeaderValue, StatusCode, Uri, header, request},
    response::{IntoResponse as _, Response},
};
use futures_util::{StreamExt as _, stream};
use serde::Serialize;

use super::{
    App,
    auth::Caller,
    board::{Board, Instances, Job, Jobs, RECENT},
    problem::{Problem, ProblemView},
};
use crate::{
    config::{nearest, tokens::Role},
    model::{InstanceId, JobName},
};

/// The dispatcher goes round every 1.5 seconds at least: after this time it hangs.
const HANGS_AFTER: Duration = Duration::from_secs(10);
/// The store counts as reachable for so long after it answered a heartbeat, of which there is one each second.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// A piece of a long answer has so many bytes, and at most one job more.
const PIECE: usize = 64 << 10;

/// An answer in JSON.
pub(super) fn json<T: Serialize>(value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => json_of(Body::from(body)),
        Err(e) => Problem::internal(format!("cannot write JSON: {e}")).into_response(),
    }
}

fn json_of(body: Body) -> Response {
    let mut response = Response::new(body);
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// The part of a path.
pub(super) struct Path<T>(pub(super) T);

impl<S: Send + Sync, T: serde::de::DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = Problem;
    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, Problem> {
        match axum::extract::Path::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(value)) => Ok(Self(value)),
            Err(_) => Err(Problem::bad("the path cannot be read")),
        }
    }
}

/// The arguments of a query.
pub(super) struct Args(Vec<(String, String)>);

impl Args {
    /// `once`: the arguments that may be there once; `repeated`: those that may be there several times.
    ///
    /// # Errors
    /// An argument is none of these, or is there too often.
    pub(super) fn of(uri: &Uri, once: &[&str], repeated: &[&str]) -> Result<Self, Problem> {
        let read = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(uri);
        let axum::extract::Query(all) =
            read.map_err(|_| Problem::bad("the query cannot be read"))?;
        let names = [once, repeated].concat();
        for (at, (name, _)) in all.iter().enumerate() {
            if !names.contains(&name.as_str()) {
                let problem = Problem::bad(format!("no argument `{name}` is known here"));
                return Err(match nearest(name, names.iter().copied()) {
                    Some(near) => problem.hint(format!("did you mean `{near}`?")),
                    None => problem.hint(format!("those known are {}", names.join(", "))),
                });
            }
            let again = all[..at].iter().any(|(other, _)| other == name);
            if again && !repeated.contains(&name.as_str()) {
                return Err(
                    Problem::bad(format!("`{name}` is there several times")).hint("give it once")
                );
            }
        }
        Ok(Self(all))
    }

    /// The first of this name, if it is not empty.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.all(name).next()
    }

    /// All of this name that are not empty.
    pub(super) fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.given(name).filter(|value| !value.is_empty())
    }

    /// All of this name as they are, for what is more than a text: an empty one is wrong there.
    pub(super) fn given(&self, name: &str) -> impl Iterator<Item = &str> {
        let named = self.0.iter().filter(move |(n, _)| n == name);
        named.map(|(_, value)| value.as_str())
    }

    pub(super) fn number(
        &self,
        name: &str,
        within: RangeInclusive<usize>,
    ) -> Result<Option<usize>, Problem> {
        let number = |text: &str| match text.parse() {
            Ok(n) if within.contains(&n) => Ok(n),
            _ => Err(Problem::bad(format!(
                "`{name}` must be a number from {} to {}",
                within.start(),
                within.end()
            ))),
        };
        self.given(name).next().map(number).transpose()
    }

    /// An instant, in Unix milliseconds.
    pub(super) fn instant(&self, name: &str) -> Result<Option<i64>, Problem> {
        let given = self.given(name).next();
        given.map(instant).transpose().map_err(|why| {
            let problem = Problem::bad(format!("`{name}`: {why}"));
            let meant = given.unwrap_or_default().replace(' ', "+");
            match instant(&meant) {
                Ok(_) => problem.hint("a `+` in a query stands for a blank: write it as `%2B`"),
                Err(_) => problem,
            }
        })
    }

    pub(super) fn is_set(&self, name: &str) -> Result<bool, Problem> {
        match self.given(name).next() {
            None | Some("false" | "0") => Ok(false),
            Some("true" | "1") => Ok(true),
            Some(_) => Err(Problem::bad(format!("`{name}` must be true or false"))),
        }
    }
}

/// RFC 3339 or Unix milliseconds, as Unix milliseconds.
pub(super) fn instant(text: &str) -> Result<i64, String> {
    crate::text::instant(text)
}

/// # Errors
/// The configuration has no such job; has the nearest name as its hint.
pub(super) fn named(board: &Board, name: &str) -> Result<JobName, Problem> {
    let inner = board.read();
    let wanted = JobName::new(name);
    match inner.job(&wanted) {
        Some(_) => Ok(wanted),
        None => {
            let shown: String = name.chars().take(100).collect();
            let problem = Problem::missing(format!("there is no job `{shown}`"));
            let names = inner.each().map(|job| job.view.job.as_str());
            Err(match nearest(name, names) {
                Some(near) => problem.hint(format!("did you mean `{near}`?")),
                None => problem.hint("`/api/v1/jobs` lists the jobs of the fleet"),
            })
        }
    }
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Alive {
    alive: bool,
}

/// Whether the instance is alive: it hands out occurrences
#[utoipa::path(
    get,
    path = "/healthz",
    tag = "health",
    security(()),
    responses(
        (status = 200, description = "it is", body = Alive),
        (status = 503, description = "it hangs", body = ProblemView, content_type = "application/problem+json"),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn healthz(State(app): State<Arc<App>>) -> Response {
    match app.health.since_round() {
        // It has only begun.
        Some(since) if since > HANGS_AFTER => {
            let detail = format!(
                "nothing was handed out for {} s: the instance hangs",
                since.as_secs()
            );
            Problem::unavailable(detail)
                .hint("restart it")
                .into_response()
        }
        _ => json(&Alive { alive: true }),
    }
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Ready {
    ready: bool,
}

/// Whether the store answers this instance
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "health",
    security(()),
    responses(
        (status = 200, description = "it does", body = Ready),
        (status = 503, description = "it does not", body = ProblemView, content_type = "application/problem+json"),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn readyz(State(app): State<Arc<App>>) -> Response {
    let inner = app.board.read();
    let pulse = inner.pulse();
    // Everybody may ask this: nobody learns where the store is.
    let detail = match (&pulse.away, &pulse.fleet) {
        (Some(away), _) => away.kind.to_owned(),
        (None, None) => "the store has not answered yet".to_owned(),
        (None, Some(reply)) => {
            let since = crate::clock::Boottime::now().since(reply.received);
            if since <= ANSWERED_WITHIN {
                return json(&Ready { ready: true });
            }
            format!("the store has not answered for {} s", since.as_secs())
        }
    };
    Problem::unavailable(detail)
        .hint("until the store answers, nothing starts")
        .into_response()
}

/// What the caller may do here.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Session {
    /// Null: a token is needed.
    role: Option<Role>,
    /// The name of the caller's token.
    #[schema(value_type = Option<String>)]
    name: Option<Arc<str>>,
    /// There are tokens.
    tokens: bool,
    /// Nobody may change anything here.
    read_only: bool,
    instance: InstanceId,
    version: &'static str,
    #[schema(format = "uri")]
    public_url: Option<String>,
}

/// What the caller may do here; needs no token
#[utoipa::path(
    get,
    path = "/api/v1/session",
    tag = "health",
    security((), ("token" = [])),
    responses(
        (status = 200, description = "whether a token is needed, and what it allows", body = Session),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn session(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Response {
    json(&Session {
        role: caller.role,
        name: caller.name,
        tokens: app.gate.has_tokens(),
        read_only: app.gate.read_only(),
        instance: app.instance.clone(),
        version: env!("CARGO_PKG_VERSION"),
        public_url: app.http.public_url.clone(),
    })
}

/// All jobs of the fleet, as this instance's configuration has them; those that it lacks are `elsewhere`
#[utoipa::path(
    get,
    path = "/api/v1/jobs",
    tag = "jobs",
    params(
        ("tag" = Option<Vec<String>>, Query, description = "only those with this tag; several: with all of them"),
        ("q" = Option<String>, Query, description = "only those whose name, description or tags contain these words"),
        ("recent" = Option<usize>, Query, minimum = 0, maximum = 24,
            description = "how many of each job's last runs; default 24"),
    ),
    responses(
        (status = 200, description = "the jobs", body = Jobs, headers(
            ("X-Cursor" = String, description = "the newest event that the answer includes"),
        )),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn jobs(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, Problem> {
    let args = Args::of(&uri, &["q", "recent"], &["tag"])?;
    let words = args.text("q").unwrap_or_default().split_whitespace();
    let wanted = Wanted {
        tags: args.all("tag").map(str::to_owned).collect(),
        words: words.map(str::to_lowercase).collect(),
        runs: args.number("recent", 0..=RECENT)?.unwrap_or(RECENT),
    };
    let (mut listing, cursor) = {
        let inner = app.board.read();
        let listing = Listing::begin(&app, &inner.without_jobs(), wanted);
        (listing, inner.ring.cursor())
    };
    let failed = |e| Problem::internal(format!("cannot write JSON: {e}"));
    let first = listing.piece().map_err(failed)?;
    let mut response = json_of(match listing.ended {
        true => Body::from(first),
        false => listing.go_on(first),
    });
    if let Ok(cursor) = HeaderValue::from_str(&cursor) {
        response.headers_mut().insert("x-cursor", cursor);
    }
    Ok(response)
}

/// Which jobs are asked for, and how many of the last runs of each.
struct Wanted {
    tags: BTreeSet<String>,
    words: Vec<String>,
    runs: usize,
}

impl Wanted {
    fn wants(&self, job: &Job) -> bool {
        let view = &job.view;
        let has = |word: &String| {
            let texts = view.tags.iter().map(String::as_str);
            let mut texts = texts
                .chain(view.description.as_deref())
                .chain([view.job.as_str()]);
            texts.any(|text| text.to_lowercase().contains(word.as_str()))
        };
        self.tags.iter().all(|tag| view.tags.contains(tag)) && self.words.iter().all(has)
    }
}

/// An answer with all jobs, written piece by piece as the client takes it. So it needs little memory, however slow the
/// client is, and others are answered between two pieces. What changes meanwhile comes after the answer's cursor.
struct Listing {
    app: Arc<App>,
    wanted: Wanted,
    /// The last job that is written.
    after: Option<JobName>,
    /// What is not sent yet.
    out: Vec<u8>,
    ended: bool,
}

impl Listing {
    fn begin(app: &Arc<App>, head: &Jobs<'_>, wanted: Wanted) -> Self {
        let mut out = serde_json::to_vec(head).unwrap_or_default();
        // The jobs come last.
        out.truncate(out.len().saturating_sub("]}".len()));
        Self {
            app: app.clone(),
            wanted,
            after: None,
            out,
            ended: false,
        }
    }

    fn piece(&mut self) -> serde_json::Result<Vec<u8>> {
        let mut out = std::mem::take(&mut self.out);
        // With room for one more job of the usual size, so that it need not grow.
        out.reserve(PIECE + PIECE / 8);
        let inner = self.app.board.read();
        let before = self.after.clone();
        for job in inner.after(before.as_ref()) {
            if !self.wanted.wants(job) {
                continue;
            }
            if out.len() >= PIECE {
                return Ok(out);
            }
            if self.after.is_some() {
                out.push(b',');
            }
            match self.wanted.runs {
                RECENT => serde_json::to_writer(&mut out, job)?,
                runs => serde_json::to_writer(&mut out, &job.with_runs(runs))?,
            }
            self.after = Some(job.view.job.clone());
        }
        out.extend_from_slice(b"]}");
        // It may be a small answer that its client does not take.
        out.shrink_to_fit();
        self.ended = true;
        Ok(out)
    }

    /// The whole answer, of which `first` is written.
    fn go_on(self, first: Vec<u8>) -> Body {
        let rest = stream::try_unfold(self, |mut listing| async move {
            if listing.ended {
                return Ok(None);
            }
            let piece = listing.piece()?;
            Ok::<_, serde_json::Error>(Some((piece, listing)))
        });
        Body::from_stream(stream::once(async { Ok(first) }).chain(rest))
    }
}

/// The instances, and the store
#[utoipa::path(
    get,
    path = "/api/v1/instances",
    tag = "fleet",
    responses(
        (status = 200, description = "the instances", body = Instances),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn instances(State(app): State<Arc<App>>) -> Response {
    let instances = app.board.read().instances();
    json(&instances)
}

/// Nothing is at this path.
pub(super) async fn nothing(uri: Uri) -> Problem {
    let path: String = uri.path().chars().take(200).collect();
    Problem::missing(format!("there is nothing at {path}"))
        .hint("`/api/v1/openapi.json` lists what there is")
}

pub(super) async fn not_allowed() -> Problem {
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "this cannot be done there")
        .hint("`/api/v1/openapi.json` lists what can")
}
