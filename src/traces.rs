//! Traces: a span for each run, sent by OTLP over HTTP to where the standard variables of OpenTelemetry say. The
//! process that records the outcome of a run sends its span: the daemon, or the guard's `__settle` if the daemon has
//! died. docs/traces.md has what a span says; the ids are computed in `logic/trace`.
//!
//! The spans of a daemon wait in a short queue for a thread of their own: however slow the receiver is, no run and no
//! settlement waits for it.

use std::{fmt, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{
    Request, StatusCode,
    header::{CONTENT_TYPE, HeaderName, HeaderValue, USER_AGENT},
};
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc::{Receiver, Sender, channel},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    clock::Boottime,
    health::Health,
    logic::{
        backoff::{Pauses, Throttle},
        trace::SpanContext,
    },
    model::{Outcome, RunRecord},
    notify::client::{self, Inner},
};

/// How many spans wait to be sent; while there are so many, new ones are dropped.
const WAITING: usize = 2048;
/// How many are sent at once.
const BATCH: usize = 512;
/// How long a span waits for others that are sent with it.
const GATHER: Duration = Duration::from_secs(1);
/// The time limit of each request.
const LIMIT: Duration = Duration::from_secs(10);
/// That of a process that ends with its one request.
const LIMIT_AT_END: Duration = Duration::from_secs(5);
/// The pause after a failure that may pass: the first, and the longest.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Time between two warnings about the same.
const WARN_AGAIN: Duration = Duration::from_secs(60);

/// Where spans go, and what is said of this process.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// With the path.
    url: String,
    headers: Vec<(String, String)>,
    /// Attributes of this process.
    resource: Vec<(String, String)>,
}

/// Leaves out what may be secret.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Settings")
    }
}

impl Settings {
    /// Looks at the variables. None: no spans are sent. Also what is wrong with them, without their values, which may
    /// be secret. An empty variable counts as unset.
    pub(crate) fn read(
        variable: &dyn Fn(&str) -> Option<String>,
        resource: &[(&str, &str)],
    ) -> (Option<Self>, Vec<String>) {
        let get = |name| {
            let value = variable(name)?.trim().to_owned();
            (!value.is_empty()).then_some((name, value))
        };
        let (name, url) = match get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") {
            Some(given) => given,
            None => match get("OTEL_EXPORTER_OTLP_ENDPOINT") {
                Some((name, url)) => (name, format!("{}/v1/traces", url.trim_end_matches('/'))),
                None => return (None, vec![]),
            },
        };
        if !crate::config::is_http_url(&url) || url.parse::<hyper::Uri>().is_err() {
            let why =
                "is not the address of a server, as http://collector:4318: no traces are sent";
            return (None, vec![format!("{name} {why}")]);
        }
        let mut problems = vec![];
        let headers = get("OTEL_EXPORTER_OTLP_HEADERS").map(|(name, text)| {
            headers(&text).unwrap_or_else(|| {
                let why = "is not of the form `name=value,name=value`: none of the headers is sent";
                problems.push(format!("{name} {why}"));
                vec![]
            })
        });
        let service = get("OTEL_SERVICE_NAME").map_or("soloist".to_owned(), |(_, name)| name);
        let own = [
            ("service.name", &*service),
            ("service.version", env!("CARGO_PKG_VERSION")),
        ];
        let resource = own.iter().chain(resource);
        let settings = Self {
            url,
            headers: headers.unwrap_or_default(),
            resource: resource
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        };
        (Some(settings), problems)
    }

    /// Who receives the spans, without the path, which may be secret.
    fn receiver(&self) -> String {
        let uri = self.url.parse();
        uri.map_or_else(|_| "the receiver".to_owned(), |uri| client::shown(&uri))
    }

    /// The body of a request to export these spans, in the JSON of OTLP: ids in hexadecimal, times and 64-bit numbers
    /// as text, enumerations as numbers.
    fn body(&self, spans: &[Span]) -> Vec<u8> {
        let resource = self.resource.iter().map(|(key, value)| text(key, value));
        let scope = json!({ "name": "soloist", "version": env!("CARGO_PKG_VERSION") });
        let spans: Vec<Value> = spans.iter().map(Span::to_json).collect();
        let request = json!({ "resourceSpans": [{
            "resource": { "attributes": resource.collect::<Vec<_>>() },
            "scopeSpans": [{ "scope": scope, "spans": spans }],
        }] });
        request.to_string().into_bytes()
    }

    /// Sends spans, once. An error in words, and whether it may pass.
    async fn export(
        &self,
        client: &Inner,
        spans: &[Span],
        limit: Duration,
    ) -> Result<(), (String, bool)> {
        let mut request = Request::post(&*self.url)
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, client::AGENT);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(Full::from(self.body(spans)));
        let request = request.map_err(|_| ("the request is not valid".to_owned(), false))?;
        let (head, said) = client::exchange(client, request, limit)
            .await
            .map_err(|e| (e.why, true))?;
        if head.status.is_success() {
            return Ok(());
        }
        let may_pass = matches!(
            head.status,
            StatusCode::TOO_MANY_REQUESTS
                | StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT
        );
        let said = format!("answered {}: {}", head.status, crate::words::line(&said));
        Err((said.trim_end_matches(": ").to_owned(), may_pass))
    }
}

/// `a=1,b=2`, with the values percent-encoded. None: it is something else.
fn headers(text: &str) -> Option<Vec<(String, String)>> {
    let pairs = text.split(',').map(str::trim).filter(|p| !p.is_empty());
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
        HeaderName::try_from(name.trim()).ok()?;
        HeaderValue::from_str(&value).ok()?;
        Some((name.trim().to_owned(), value.into_owned()))
    };
    pairs.map(pair).collect()
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

/// A run whose outcome is recorded.
#[derive(Debug)]
pub(crate) struct Span {
    context: SpanContext,
    /// The key of its manual trigger.
    key: Option<String>,
    record: RunRecord,
}

impl Span {
    /// `namespace` and `place` as for [`SpanContext::of`].
    pub(crate) fn new(
        (namespace, place): (&str, &str),
        record: RunRecord,
        key: Option<String>,
    ) -> Self {
        let r = &record;
        Self {
            context: SpanContext::of(namespace, place, &r.job, r.occurrence, r.attempt),
            key,
            record,
        }
    }

    fn to_json(&self) -> Value {
        let r = &self.record;
        let is_fault = r.outcome.is_bad() || r.outcome == Outcome::Missed;
        let outcome = r.outcome.as_str();
        let run = r.run_id.map(|id| id.to_string());
        let texts = [
            ("soloist.job", Some(r.job.as_str())),
            ("soloist.occurrence", Some(&*r.occurrence.to_string())),
            ("soloist.trigger", Some(r.trigger.as_str())),
            ("soloist.trigger.key", self.key.as_deref()),
            ("soloist.run_id", run.as_deref()),
            ("soloist.instance", r.instance.as_ref().map(|i| i.as_str())),
            ("soloist.outcome", Some(outcome)),
            ("error.type", is_fault.then_some(outcome)),
        ]
        .map(|(key, value)| Some(text(key, value?)));
        let of = |n: Option<u64>| n.and_then(|n| i64::try_from(n).ok());
        let numbers = [
            ("soloist.attempt", Some(i64::from(r.attempt))),
            ("soloist.fencing_token", r.fencing_token.map(|t| t.0)),
            ("soloist.lateness_ms", r.lateness_ms),
            ("soloist.duration_ms", r.duration_ms),
            ("process.exit.code", r.exit_code.map(i64::from)),
            ("soloist.signal", r.signal.map(i64::from)),
            ("soloist.cpu_ms", of(r.usage.cpu_ms)),
            ("soloist.peak_memory_bytes", of(r.usage.peak_memory_bytes)),
            ("soloist.output_bytes", of(r.usage.output_bytes)),
        ]
        .map(|(key, n)| Some(json!({ "key": key, "value": { "intValue": n?.to_string() } })));
        let attributes: Vec<Value> = texts.into_iter().chain(numbers).flatten().collect();
        let end = r.finished_at.unwrap_or(r.occurrence.0);
        let nanos = |ms: i64| (i128::from(ms.max(0)) * 1_000_000).to_string();
        let status = is_fault.then(|| {
            let why = r.error.as_deref().map(crate::words::line);
            json!({ "code": 2, "message": why.unwrap_or_else(|| outcome.replace('_', " ")) })
        });
        json!({
            "traceId": format!("{:032x}", self.context.trace),
            "spanId": format!("{:016x}", self.context.span),
            "flags": 1,
            "name": r.job.as_str(),
            "kind": 1,
            "startTimeUnixNano": nanos(r.started_at.unwrap_or(end)),
            "endTimeUnixNano": nanos(end),
            "attributes": attributes,
            "status": status.unwrap_or_else(|| json!({})),
        })
    }
}

/// For the guard, whose `__settle` sends the span of a run whose daemon has died.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OnDeath {
    pub(crate) settings: Arc<Settings>,
    /// As for [`SpanContext::of`].
    pub(crate) place: String,
    pub(crate) key: Option<String>,
}

/// Sends one span from a process that has nothing else to do, and waits for it.
///
/// # Errors
/// In words, why it was not taken.
pub(crate) fn send_now(settings: &Settings, span: Span) -> Result<(), String> {
    let client = client::client().map_err(|e| e.why)?;
    crate::settle::block_on(async {
        let sent = settings.export(&client, &[span], LIMIT_AT_END).await;
        sent.map_err(|(why, _)| why)
    })
}

/// Where a daemon hands in the spans of its runs.
#[derive(Debug)]
pub(crate) struct Traces {
    /// None: the daemon ends.
    queue: Mutex<Option<Sender<Span>>>,
    pub(crate) settings: Arc<Settings>,
    health: Arc<Health>,
    /// The daemon ends: what waits is sent at once.
    finish: CancellationToken,
    /// The thread has ended.
    done: CancellationToken,
}

impl Traces {
    /// Starts the thread.
    pub(crate) fn start(settings: Settings, health: Arc<Health>) -> Arc<Self> {
        let (queue, spans) = channel(WAITING);
        let traces = Arc::new(Self {
            queue: Mutex::new(Some(queue)),
            settings: Arc::new(settings),
            health,
            finish: CancellationToken::new(),
            done: CancellationToken::new(),
        });
        info!("sending traces to {}", traces.settings.receiver());
        let own = traces.clone();
        let body = move || {
            let _done = own.done.clone().drop_guard();
            let sent = crate::settle::block_on(async {
                own.run(spans).await;
                Ok(())
            });
            if let Err(error) = sent {
                warn!(%error, "cannot send traces");
            }
        };
        let thread = std::thread::Builder::new().name("traces".to_owned());
        if let Err(error) = thread.spawn(body) {
            warn!(%error, "cannot send traces: no thread");
        }
        traces
    }

    /// Never waits.
    pub(crate) fn send(&self, span: Span) {
        let queue = self.queue.lock();
        let sent = queue.as_ref().is_some_and(|q| q.try_send(span).is_ok());
        if !sent {
            self.health.figures.spans("dropped", 1);
        }
    }

    /// Sends what waits, for at most `patience`.
    pub(crate) async fn finish(&self, patience: Duration) {
        *self.queue.lock() = None;
        self.finish.cancel();
        if timeout(patience, self.done.cancelled()).await.is_err() {
            let to = self.settings.receiver();
            warn!("{to} takes no traces within {patience:?}: stopping without sending the last");
        }
    }

    async fn run(&self, mut spans: Receiver<Span>) {
        let client = match client::client() {
            Ok(client) => client,
            Err(e) => return warn!(error = e.why, "cannot send traces"),
        };
        let to = self.settings.receiver();
        let mut warned = Throttle::default();
        let mut batch = vec![];
        while spans.recv_many(&mut batch, BATCH).await > 0 {
            if batch.len() < BATCH {
                let _ = timeout(GATHER, self.finish.cancelled()).await;
                while batch.len() < BATCH
                    && let Ok(span) = spans.try_recv()
                {
                    batch.push(span);
                }
            }
            let mut pauses = Pauses::from(AGAIN.0);
            let result = loop {
                let Err((why, may_pass)) = self.settings.export(&client, &batch, LIMIT).await
                else {
                    break "sent";
                };
                let last = self.finish.is_cancelled();
                if last || warned.lets(Boottime::now(), WARN_AGAIN) {
                    warn!(error = why, "{to} takes no traces");
                }
                if last || !may_pass {
                    break "refused";
                }
                let pause = pauses.after_failure(AGAIN.1);
                let _ = timeout(pause, self.finish.cancelled()).await;
            };
            self.health.figures.spans(result, batch.len() as u64);
            batch.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{JobName, Occurrence, Trigger};

    fn read(variables: &[(&str, &str)]) -> (Option<Settings>, Vec<String>) {
        let get = |name: &str| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Settings::read(&get, &[("host.name", "h")])
    }

    #[test]
    fn the_variables_say_where_spans_go_and_no_secret_is_shown() {
        const ALL: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
        const TRACES: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
        const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
        let url = |variables: &[_]| read(variables).0.map(|s| s.url);
        assert_eq!(url(&[(ALL, " ")]), None);
        let all = (ALL, "http://c:4318/");
        assert_eq!(url(&[all]).as_deref(), Some("http://c:4318/v1/traces"));
        assert_eq!(
            url(&[all, (TRACES, "https://t/in")]).as_deref(),
            Some("https://t/in")
        );
        let headers = (HEADERS, "api-key=a%3Db, x = y ,");
        let settings = read(&[all, headers, ("OTEL_SERVICE_NAME", "nightly")])
            .0
            .expect("sent");
        let of = |k: &str, v: &str| (k.to_owned(), v.to_owned());
        assert_eq!(settings.headers, [of("api-key", "a=b"), of("x", "y")]);
        assert_eq!(settings.resource[0], of("service.name", "nightly"));
        assert_eq!(settings.resource[2], of("host.name", "h"));
        assert!(!format!("{settings:?}").contains("a=b"));
        for (variable, sent) in [
            ((TRACES, "ftp://hunter2"), false),
            ((TRACES, "http://me:hunter2@c"), false),
            ((HEADERS, "hunter2"), true),
            ((HEADERS, "a=hunter2%0Ab"), true),
        ] {
            let (settings, problems) = read(&[all, variable]);
            assert_eq!(settings.is_some(), sent, "{variable:?}");
            assert!(
                problems.len() == 1 && problems[0].contains(variable.0),
                "{problems:?}"
            );
            assert!(!problems[0].contains("hunter2"), "{problems:?}");
        }
    }

    #[test]
    fn a_queue_that_is_full_drops_new_spans_and_counts_them() {
        let (queue, _spans) = channel(2);
        let traces = Traces {
            queue: Mutex::new(Some(queue)),
            settings: Arc::new(
                read(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c")])
                    .0
                    .expect("sent"),
            ),
            health: Arc::default(),
            finish: CancellationToken::new(),
            done: CancellationToken::new(),
        };
        for n in 0..5 {
            let job = JobName::new("report");
            let record =
                RunRecord::without_run(&job, Occurrence(n), Trigger::Schedule, Outcome::Failed);
            traces.send(Span::new(("n", "p"), record, None));
        }
        let dropped = [("result", "dropped".to_owned())];
        let dropped = traces.health.figures.spans.get(&dropped).map(|n| n.get());
        assert_eq!(dropped, Some(3));
    }
}
