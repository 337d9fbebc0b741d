//! What happens in the fleet, as a stream of events that can be resumed.
//!
//! The ring has the last events. An event about a job, or about the instances, has no data of its own: whoever gets it
//! is told how the job is then, so that a job that changes often takes no more memory than another one.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, HeaderValue, Uri, header},
    response::{IntoResponse as _, Response},
};
use futures_util::StreamExt as _;
use serde::Serialize;
use tokio::{sync::watch, time::Instant};

use super::{
    App,
    api::{Args, json},
    auth::Caller,
    board::{Inner, Instances, Job, StoreView},
    headers::accepts,
    problem::{Problem, ProblemView},
};
use crate::{
    model::{InstanceId, JobName, Outcome, RunId, Trigger},
    view::Time,
};

/// How many events other than those about jobs the ring has.
const KEPT: usize = 1024;
/// How many of those that the ring has dropped, and that no run tells of: people ask for acts after hours, too.
const RARE: usize = 256;
/// The kinds of the feed that may come with each run. What they say is in the history.
const OF_RUNS: [&str; 6] = [
    "granted", "ended", "missed", "skipped", "unknown", "awaited",
];
/// A comment goes over a stream so often, so that nothing on the way takes it for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// The most streams at one time.
pub(super) const STREAMS: usize = 64;
/// The most events that one piece of a stream has.
const AT_ONCE: usize = 256;

/// What an item of the feed says; each kind has some of these.
#[derive(Debug, Clone, Default, PartialEq, Serialize, utoipa::ToSchema)]
pub(super) struct Feed {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) job: Option<JobName>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) instance: Option<InstanceId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) occurrence: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) attempt: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) trigger: Option<Trigger>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) run_id: Option<RunId>,
    /// The holder of the attempt before died.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) takeover: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) outcome: Option<Outcome>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) duration_ms: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) exit_code: Option<i32>,
    /// When the next attempt may start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) next_at: Option<Time>,
    /// The key of a trigger, if a person gave it one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<String>,
    /// Why the job is paused, or a message was not delivered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// Who asked for it: the name of a token, `alice@web-1`, or `http@HOST`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) by: Option<String>,
    /// The channel that did not take a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) channel: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) until: Option<Time>,
    /// Since when an instance is not heard from, or there is other data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) since: Option<Time>,
    /// How many occurrences: missed, or to be skipped; or of how many jobs a message told, or how many are lacking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) count: Option<u64>,
    /// The digest of an instance's configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) config: Option<String>,
}

#[derive(Debug, Clone)]
pub(super) enum Kind {
    /// The job looks different now.
    Job(JobName),
    Removed(JobName),
    /// The instances look different now.
    Instances,
    Store(Box<StoreView>),
    Feed(&'static str, Box<Feed>),
}

struct Item {
    /// Unix ms of the store's clock.
    at: i64,
    kind: Kind,
}

/// The last events, by their numbers.
pub(super) struct Ring {
    /// Names this process in cursors: the numbers of another one mean nothing here.
    boot: String,
    next: u64,
    items: BTreeMap<u64, Item>,
    /// The newest event about each job; an older one is not needed any more.
    of_jobs: HashMap<JobName, u64>,
    of_instances: Option<u64>,
    /// The newest event that the ring had to drop.
    dropped: u64,
    /// The newest of the dropped ones that are not of runs: for the feed alone.
    rare: BTreeMap<u64, Item>,
}

impl Ring {
    pub(super) fn new() -> Self {
        Self {
            boot: format!("{:08x}", fastrand::u32(..)),
            next: 1,
            items: BTreeMap::new(),
            of_jobs: HashMap::new(),
            of_instances: None,
            dropped: 0,
            rare: BTreeMap::new(),
        }
    }

    /// The number of the newest event; 0: there was none.
    pub(super) fn latest(&self) -> u64 {
        self.next - 1
    }

    pub(super) fn cursor(&self) -> String {
        self.cursor_of(self.latest())
    }

    fn cursor_of(&self, seq: u64) -> String {
        format!("{}.{seq}", self.boot)
    }

    /// The number after which a client goes on. None: this ring cannot say what has happened since.
    fn position(&self, cursor: &str) -> Option<u64> {
        let (boot, seq) = cursor.split_once('.')?;
        let seq: u64 = seq.parse().ok()?;
        (boot == self.boot && self.dropped <= seq && seq <= self.latest()).then_some(seq)
    }

    pub(super) fn push(&mut self, at: i64, kind: Kind) {
        let seq = self.next;
        self.next += 1;
        let older = match &kind {
            Kind::Job(name) => self.of_jobs.insert(name.clone(), seq),
            Kind::Removed(name) => self.of_jobs.remove(name),
            Kind::Instances => self.of_instances.replace(seq),
            Kind::Store(_) | Kind::Feed(..) => None,
        };
        if let Some(older) = older {
            self.items.remove(&older);
        }
        self.items.insert(seq, Item { at, kind });
        // Those about jobs are bounded by the number of jobs.
        while self.items.len() > KEPT + self.of_jobs.len()
            && let Some((seq, item)) = self.items.pop_first()
        {
            self.dropped = seq;
            match &item.kind {
                Kind::Job(name) => drop(self.of_jobs.remove(name)),
                Kind::Instances => self.of_instances = None,
                Kind::Feed(kind, _) if OF_RUNS.contains(kind) => {}
                Kind::Feed(..) | Kind::Store(_) | Kind::Removed(_) => {
                    self.rare.insert(seq, item);
                    if self.rare.len() > RARE {
                        self.rare.pop_first();
                    }
                }
            }
        }
    }
}

/// An event.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Event<'a> {
    /// To go on after this event. After one that is kept longer, the answer is `reset`.
    cursor: String,
    /// The store's clock, or the time that the fleet uses instead.
    at: Time,
    #[schema(value_type = EventKind)]
    kind: &'static str,
    #[serde(flatten)]
    data: Data<'a>,
}

/// Of the feed are all from `granted` on.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(
    dead_code,
    reason = "for the document; who tells an event names its kind"
)]
enum EventKind {
    Job,
    JobRemoved,
    Instances,
    Store,
    Reset,
    Granted,
    Ended,
    Missed,
    Skipped,
    Unknown,
    Triggered,
    Paused,
    Resumed,
    Skip,
    Cancelled,
    Awaited,
    Draining,
    Undrained,
    InstanceUp,
    InstanceSilent,
    InstanceGone,
    DataLost,
    Configuration,
    Undelivered,
}

/// What an event says.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(untagged)]
pub(super) enum Data<'a> {
    /// Of `job`: how the job is now.
    Job {
        job: &'a Job,
    },
    /// Of `job_removed`.
    Removed {
        job: &'a JobName,
    },
    /// Of `instances`.
    Instances(Box<Instances>),
    /// Of `store`.
    Store(&'a StoreView),
    Feed(&'a Feed),
    /// Of `reset`: what happened since is not known here; load the jobs and the instances anew.
    Reset {},
}

/// The events after a position, and the last position that they reach.
fn since<'a>(inner: &'a Inner, after: u64, most: usize) -> (Vec<Event<'a>>, u64) {
    let ring = &inner.ring;
    let mut reached = ring.latest();
    let mut events = vec![];
    for (seq, item) in ring.items.range(after + 1..) {
        if events.len() == most {
            reached = seq - 1;
            break;
        }
        events.extend(event(inner, *seq, item));
    }
    (events, reached)
}

/// All events that there are, and the rare ones from before.
pub(super) fn kept(inner: &Inner) -> Vec<Event<'_>> {
    let rare = inner.ring.rare.iter();
    let rare = rare.filter_map(|(seq, item)| event(inner, *seq, item));
    let (events, _) = since(inner, inner.ring.dropped, usize::MAX);
    rare.chain(events).collect()
}

/// None: the job that it tells of is gone.
fn event<'a>(inner: &'a Inner, seq: u64, item: &'a Item) -> Option<Event<'a>> {
    let (kind, data) = match &item.kind {
        Kind::Job(name) => (
            "job",
            Data::Job {
                job: inner.job(name)?,
            },
        ),
        Kind::Removed(job) => ("job_removed", Data::Removed { job }),
        Kind::Instances => ("instances", Data::Instances(Box::new(inner.instances()))),
        Kind::Store(store) => ("store", Data::Store(store)),
        Kind::Feed(kind, feed) => (*kind, Data::Feed(feed)),
    };
    Some(Event {
        cursor: inner.ring.cursor_of(seq),
        at: Time(item.at),
        kind,
        data,
    })
}

fn reset(inner: &Inner) -> Event<'static> {
    Event {
        cursor: inner.ring.cursor(),
        at: Time(inner.clock().now),
        kind: "reset",
        data: Data::Reset {},
    }
}

/// The events since a cursor.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Events<'a> {
    events: Vec<Event<'a>>,
    /// For the next request.
    cursor: String,
    /// What happened since is not known here: load the jobs and the instances anew.
    reset: bool,
}

/// A server-sent event. The first sets only the time after which a client comes again.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "for the document; `write_event` writes them")]
pub(super) struct Sent {
    /// The cursor.
    id: Option<String>,
    /// The kind.
    event: Option<String>,
    /// JSON.
    data: Option<String>,
}

/// What happens: a stream, or, for pollers, what happened since a cursor
#[utoipa::path(
    get,
    path = "/api/v1/events",
    tag = "fleet",
    params(
        ("since" = Option<String>, Query, min_length = 1, description = "a cursor; without one, from now on"),
        ("feed" = Option<bool>, Query, description = "all that is kept of the feed and of the store; acts are kept longer than runs; not for streams"),
        ("Last-Event-ID" = Option<String>, Header, description = "the same, as browsers send it"),
    ),
    responses(
        (status = 200, description = "with `Accept: text/event-stream`, a stream", content(
            (Events = "application/json"),
            (Sent = "text/event-stream"),
        )),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn events(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let args = Args::of(&uri, &["since", "feed"], &[])?;
    // Whatever it holds, it says that the client wants to go on.
    let last = headers
        .get("last-event-id")
        .map(|v| String::from_utf8_lossy(v.as_bytes()));
    let given = args.given("since").next();
    if given == Some("") {
        return Err(
            Problem::bad("`since` is empty").hint("without `since`, events are told from now on")
        );
    }
    let cursor = last.as_deref().or(given);
    if accepts(&headers, "text/event-stream") {
        return stream(&app, caller, cursor);
    }
    let feed = args.is_set("feed")?;
    let inner = app.board.read();
    let latest = inner.ring.latest();
    let position = match cursor {
        Some(cursor) => inner.ring.position(cursor),
        None => Some(latest),
    };
    let (mut events, reached) = match position {
        Some(_) if feed && cursor.is_none() => (kept(&inner), latest),
        Some(at) => since(&inner, at, usize::MAX),
        None => (vec![], latest),
    };
    if feed {
        events.retain(|e| !matches!(e.data, Data::Job { .. } | Data::Instances(_)));
    }
    let body = Events {
        events,
        cursor: inner.ring.cursor_of(reached),
        reset: position.is_none(),
    };
    Ok(json(&body))
}

fn stream(app: &Arc<App>, caller: Caller, cursor: Option<&str>) -> Result<Response, Problem> {
    let permit = app.streams.clone().try_acquire_owned().map_err(|_| {
        Problem::unavailable(format!("{STREAMS} streams are open already"))
            .hint(
                "close pages of soloist, and programs that follow events or output; or poll without `Accept: \
                text/event-stream`",
            )
    })?;
    let position = {
        let inner = app.board.read();
        match cursor {
            Some(cursor) => inner.ring.position(cursor),
            None => Some(inner.ring.latest()),
        }
    };
    let stream = Stream {
        app: app.clone(),
        latest: app.board.latest(),
        position,
        begun: false,
        _permit: permit,
    };
    let pieces = futures_util::stream::unfold(stream, |mut stream| async move {
        let piece = stream.next().await?;
        Some((piece, stream))
    });
    Ok(sse(app, caller, pieces))
}

/// An answer that is a stream of events. It ends when the caller's token is taken away: before the next event, or the
/// next sign of life.
pub(super) fn sse(
    app: &Arc<App>,
    caller: Caller,
    pieces: impl futures_util::Stream<Item = Bytes> + Send + 'static,
) -> Response {
    let app = app.clone();
    let pieces = pieces.take_while(move |_| std::future::ready(app.gate.still_lets(&caller)));
    let mut response = Body::from_stream(pieces.map(Ok::<_, Infallible>)).into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream"),
    );
    // A proxy must pass on each event at once.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// One event as it goes over a stream.
pub(super) fn write_event<T: Serialize>(out: &mut Vec<u8>, id: &str, kind: &str, data: &T) {
    out.extend_from_slice(format!("id: {id}\nevent: {kind}\ndata: ").as_bytes());
    // JSON of one line: no newline can end the event early.
    if serde_json::to_writer(&mut *out, data).is_err() {
        out.extend_from_slice(b"null");
    }
    out.extend_from_slice(b"\n\n");
}

/// A client's stream. It takes from the ring what the client takes from it: a client that does not read costs no
/// memory.
struct Stream {
    app: Arc<App>,
    latest: watch::Receiver<u64>,
    /// None: begin with `reset`.
    position: Option<u64>,
    begun: bool,
    _permit: tokio::sync::OwnedSemaphorePermit,
}

impl Stream {
    /// None: the instance ends.
    async fn next(&mut self) -> Option<Bytes> {
        if !std::mem::replace(&mut self.begun, true) {
            // The head of the answer, and this, go out at once.
            return Some(Bytes::from_static(b": soloist\nretry: 1000\n\n"));
        }
        let quiet = Instant::now() + KEEP_ALIVE;
        loop {
            let seen = *self.latest.borrow_and_update();
            if self.position.is_none_or(|at| at < seen) {
                let piece = self.piece();
                if !piece.is_empty() {
                    return Some(piece.into());
                }
            }
            tokio::select! {
                changed = self.latest.changed() => changed.ok()?,
                () = tokio::time::sleep_until(quiet) => return Some(Bytes::from_static(b": alive\n\n")),
                () = self.app.finish.cancelled() => return None,
            }
        }
    }

    fn piece(&mut self) -> Vec<u8> {
        let inner = self.app.board.read();
        let mut out = vec![];
        let after = match self.position {
            Some(at) if at >= inner.ring.dropped => at,
            _ => {
                let event = reset(&inner);
                write_event(&mut out, &event.cursor, event.kind, &event);
                self.position = Some(inner.ring.latest());
                return out;
            }
        };
        let (events, reached) = since(&inner, after, AT_ONCE);
        for event in &events {
            write_event(&mut out, &event.cursor, event.kind, event);
        }
        self.position = Some(reached);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str) -> Kind {
        Kind::Job(JobName::new(name))
    }

    fn feed() -> Kind {
        Kind::Feed("paused", Box::default())
    }

    #[test]
    fn a_job_has_one_event_in_the_ring_and_the_feed_a_limit() {
        let mut ring = Ring::new();
        for _ in 0..10_000 {
            ring.push(0, job("a"));
            ring.push(0, job("b"));
            ring.push(0, Kind::Instances);
        }
        assert_eq!(ring.items.len(), 3);
        // Nothing that a client needs is lost.
        let first = ring.cursor_of(0);
        assert_eq!(ring.position(&first), Some(0));
        for _ in 0..KEPT + 10 {
            ring.push(0, feed());
        }
        assert!(ring.items.len() <= KEPT + 2);
        assert_eq!(ring.position(&first), None, "too old");
        let now = ring.cursor();
        assert_eq!(ring.position(&now), Some(ring.latest()));
        ring.push(0, job("a"));
        assert_eq!(ring.position(&now), Some(ring.latest() - 1));
    }

    #[test]
    fn what_runs_tell_pushes_no_act_out_of_the_feed() {
        let mut ring = Ring::new();
        let granted = || Kind::Feed("granted", Box::default());
        for _ in 0..10 {
            ring.push(0, feed());
            for _ in 0..KEPT {
                ring.push(0, granted());
            }
        }
        assert_eq!(ring.items.len(), KEPT);
        assert_eq!(ring.rare.len(), 10);
        for _ in 0..2 * KEPT {
            ring.push(0, feed());
        }
        assert_eq!(ring.rare.len(), RARE);
        // They are the newest of those that the ring lacks.
        let newest = ring.rare.last_key_value().map(|(seq, _)| *seq);
        assert_eq!(newest, Some(ring.dropped));
        // From one of before nobody can go on: runs are lacking.
        let first = ring.rare.first_key_value().map_or(0, |(seq, _)| *seq);
        assert_eq!(ring.position(&ring.cursor_of(first)), None);
        let shown: Vec<u64> = ring.rare.keys().chain(ring.items.keys()).copied().collect();
        assert!(shown.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn the_page_keeps_what_the_ring_keeps() {
        let kinds = OF_RUNS.map(|kind| format!("'{kind}'")).join(", ");
        let store = include_str!("page/store.js");
        assert!(store.contains(&format!("OF_RUNS = [{kinds}];")), "{kinds}");
        for kind in OF_RUNS {
            let list = include_str!("page/events.js");
            assert!(list.contains(&format!("\n  {kind}: [")), "{kind}");
        }
    }

    #[test]
    fn cursors_of_others_and_of_the_future_mean_nothing() {
        let mut ring = Ring::new();
        ring.push(0, feed());
        for cursor in [
            "",
            "x",
            "x.1",
            ".",
            "1",
            &ring.cursor_of(2),
            &format!("{}.-1", ring.boot),
        ] {
            assert_eq!(ring.position(cursor), None, "{cursor}");
        }
    }

    #[test]
    fn a_removed_job_leaves_no_event_of_its_own() {
        let mut ring = Ring::new();
        for n in 0..5000 {
            let name = format!("job-{n}");
            ring.push(0, job(&name));
            ring.push(0, Kind::Removed(JobName::new(&name)));
        }
        assert!(ring.items.len() <= KEPT && ring.of_jobs.is_empty());
    }
}
