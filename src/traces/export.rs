//! Sends spans: in batches, from a queue that is never long, on a thread of its own.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{
    Request, StatusCode,
    header::{CONTENT_TYPE, HeaderName, HeaderValue, USER_AGENT},
};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Settings, Span, encode};
use crate::{
    clock::Boottime,
    logic::backoff::{Pauses, Throttle},
    notify::client::{self, Inner},
    vitals::Vitals,
};

/// How many spans wait to be sent; the oldest are left out for newer ones.
const WAITING: usize = 2048;
/// How many are sent at once.
const BATCH: usize = 512;
/// How long a span waits for others that are sent with it.
const GATHER: Duration = Duration::from_secs(1);
/// The pause after a failure that may pass: the first, and the longest, unless the receiver asks for a longer one.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Time between two warnings about the same.
const WARN_AGAIN: Duration = Duration::from_secs(60);
/// The time limit of the one request of a process that ends with it.
const AT_ONCE: Duration = Duration::from_secs(5);

/// Where a daemon hands in the spans of its runs.
#[derive(Debug)]
pub(crate) struct Traces {
    queue: Arc<Queue>,
    settings: Arc<Settings>,
}

#[derive(Debug)]
struct Queue {
    spans: Mutex<VecDeque<Span>>,
    more: Notify,
    /// Cancelled: what waits is sent at once, and that is all.
    finish: CancellationToken,
    /// Cancelled: the thread has ended.
    done: CancellationToken,
    vitals: Arc<Vitals>,
    dropped: Mutex<Throttle>,
}

/// Why spans were not taken.
#[derive(Debug, PartialEq)]
enum Failed {
    /// It may pass, after this pause if the receiver says so.
    Now(String, Option<Duration>),
    /// They are never taken.
    Refused(String),
}

impl Traces {
    /// Starts the thread.
    pub(crate) fn start(settings: Settings, vitals: Arc<Vitals>) -> Self {
        let settings = Arc::new(settings);
        let queue = Arc::new(Queue::new(vitals));
        info!("sending traces to {}", receiver(&settings));
        let (q, s) = (queue.clone(), settings.clone());
        let body = move || {
            let _done = q.done.clone().drop_guard();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            match runtime {
                Ok(runtime) => {
                    runtime.block_on(run(&q, &s));
                    runtime.shutdown_background();
                }
                Err(error) => warn!(%error, "cannot send traces: no runtime"),
            }
        };
        let thread = std::thread::Builder::new().name("traces".to_owned());
        if let Err(error) = thread.spawn(body) {
            warn!(%error, "cannot send traces: no thread");
        }
        Self { queue, settings }
    }

    pub(crate) fn settings(&self) -> Arc<Settings> {
        self.settings.clone()
    }

    /// Never waits.
    pub(crate) fn send(&self, span: Span) {
        self.queue.push(span);
    }

    /// Sends what waits, for at most `patience`.
    pub(crate) async fn finish(&self, patience: Duration) {
        self.queue.finish.cancel();
        let done = self.queue.done.cancelled();
        if tokio::time::timeout(patience, done).await.is_err() {
            let to = receiver(&self.settings);
            warn!("{to} takes no traces within {patience:?}: stopping without sending the last");
        }
    }
}

impl Queue {
    fn new(vitals: Arc<Vitals>) -> Self {
        Self {
            spans: Mutex::default(),
            more: Notify::new(),
            finish: CancellationToken::new(),
            done: CancellationToken::new(),
            vitals,
            dropped: Mutex::default(),
        }
    }

    fn push(&self, span: Span) {
        let full = {
            let mut spans = self.spans.lock();
            let full = spans.len() >= WAITING;
            if full {
                spans.pop_front();
            }
            spans.push_back(span);
            full
        };
        self.more.notify_one();
        if full {
            self.drop_count(1);
        }
    }

    /// Waits for spans, and a moment for more of them.
    async fn gather(&self) {
        while !self.finish.is_cancelled() {
            let waiting = self.spans.lock().len();
            if waiting >= BATCH {
                return;
            }
            if waiting > 0 {
                let _ = tokio::time::timeout(GATHER, self.finish.cancelled()).await;
                return;
            }
            tokio::select! {
                () = self.more.notified() => {}
                () = self.finish.cancelled() => {}
            }
        }
    }

    fn take(&self) -> Vec<Span> {
        let mut spans = self.spans.lock();
        let n = spans.len().min(BATCH);
        spans.drain(..n).collect()
    }

    /// For another try. The oldest are left out if newer ones have taken their places.
    fn put_back(&self, batch: Vec<Span>) {
        let dropped = {
            let mut spans = self.spans.lock();
            let room = WAITING.saturating_sub(spans.len());
            let dropped = batch.len().saturating_sub(room);
            for span in batch.into_iter().skip(dropped).rev() {
                spans.push_front(span);
            }
            dropped
        };
        if dropped > 0 {
            self.drop_count(dropped);
        }
    }

    fn drop_count(&self, n: usize) {
        self.vitals.figures.spans("dropped", n as u64);
        if self.dropped.lock().lets(Boottime::now(), WARN_AGAIN) {
            warn!("{WAITING} spans wait to be sent: this process drops the oldest");
        }
    }
}

async fn run(queue: &Queue, settings: &Settings) {
    let client = match client::client() {
        Ok(client) => client,
        Err(e) => return warn!(error = e.why, "cannot send traces"),
    };
    let figures = &queue.vitals.figures;
    let mut pauses = Pauses::from(AGAIN.0);
    let mut warned = Throttle::default();
    loop {
        queue.gather().await;
        let batch = queue.take();
        let n = batch.len();
        if n == 0 {
            // It does not return without spans, unless this is the end.
            return;
        }
        let (why, pause) = match export(&client, settings, &batch, settings.timeout).await {
            Ok(None) => {
                figures.spans("sent", n as u64);
                pauses.reset();
                if warned.was_said() {
                    info!("the receiver takes traces again");
                    warned.over();
                }
                continue;
            }
            Ok(Some((refused, why))) => {
                let refused = refused.min(n as u64);
                figures.spans("sent", n as u64 - refused);
                figures.spans("refused", refused);
                pauses.reset();
                (format!("it refused {refused} of {n} spans: {why}"), None)
            }
            Err(Failed::Refused(why)) => {
                figures.spans("refused", n as u64);
                (why, None)
            }
            Err(Failed::Now(why, asked)) => {
                queue.put_back(batch);
                let pause = pauses.after_failure(AGAIN.1);
                (why, Some(pause.max(asked.unwrap_or_default())))
            }
        };
        let last = queue.finish.is_cancelled();
        if last || warned.lets(Boottime::now(), WARN_AGAIN) {
            let to = receiver(settings);
            match pause {
                Some(_) if last => {
                    warn!(error = why, "{to} takes no traces: stopping without them")
                }
                Some(_) => warn!(error = why, "{to} takes no traces; trying again"),
                None => warn!(error = why, "{to} refuses traces"),
            }
        }
        if let Some(pause) = pause {
            if last {
                return;
            }
            let _ = tokio::time::timeout(pause, queue.finish.cancelled()).await;
        }
    }
}

/// Who receives the spans, without the path, which may be secret.
fn receiver(settings: &Settings) -> String {
    let uri = settings.url.parse();
    uri.map_or_else(|_| "the receiver".to_owned(), |uri| client::shown(&uri))
}

/// Sends spans, once. Returns how many of them the receiver refused, and why.
async fn export(
    client: &Inner,
    settings: &Settings,
    spans: &[Span],
    limit: Duration,
) -> Result<Option<(u64, String)>, Failed> {
    let body = encode::body(settings, spans);
    let mut request = Request::post(&*settings.url)
        .header(CONTENT_TYPE, "application/json")
        .header(USER_AGENT, client::AGENT)
        .body(Full::from(body))
        .map_err(|_| Failed::Refused("the address is not valid".to_owned()))?;
    for (name, value) in &settings.headers {
        if let (Ok(name), Ok(mut value)) =
            (HeaderName::try_from(name), HeaderValue::from_str(value))
        {
            value.set_sensitive(true);
            request.headers_mut().insert(name, value);
        }
    }
    let (head, text) = client::exchange(client, request, limit)
        .await
        .map_err(|e| Failed::Now(e.why, e.retry_after))?;
    judge(head.status, client::retry_after(&head.headers), &text)
}

/// What an answer means, by the specification of OTLP over HTTP.
fn judge(
    status: StatusCode,
    retry_after: Option<Duration>,
    text: &str,
) -> Result<Option<(u64, String)>, Failed> {
    if status.is_success() {
        return Ok(partly_refused(text));
    }
    let said = crate::words::line(text);
    let why = format!("answered {status}: {said}");
    let why = why.trim_end_matches(": ").to_owned();
    match status {
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => Err(Failed::Now(why, retry_after)),
        _ => Err(Failed::Refused(why)),
    }
}

/// How many spans the receiver refused, and why, if it says so in an answer that is a success.
fn partly_refused(text: &str) -> Option<(u64, String)> {
    let answer: Value = serde_json::from_str(text).ok()?;
    let partly = answer.get("partialSuccess")?;
    // 64-bit numbers are text there, and may be numbers.
    let refused = partly.get("rejectedSpans")?;
    let refused = refused
        .as_u64()
        .or_else(|| refused.as_str()?.parse().ok())?;
    let why = partly.get("errorMessage").and_then(Value::as_str);
    (refused > 0).then(|| (refused, crate::words::line(why.unwrap_or_default())))
}

/// Sends one span from a process that has nothing else to do, and waits for it: for at most five seconds.
///
/// # Errors
/// In words, why it was not taken.
pub(crate) fn send_now(settings: &Settings, span: Span) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    let client = client::client().map_err(|e| e.why)?;
    let limit = settings.timeout.min(AT_ONCE);
    let sent = runtime.block_on(export(&client, settings, &[span], limit));
    runtime.shutdown_background();
    match sent {
        Ok(None) => Ok(()),
        Ok(Some((_, why))) | Err(Failed::Now(why, _) | Failed::Refused(why)) => Err(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::Outcome,
        traces::{
            Times,
            tests::{moment, record},
        },
    };

    /// Spans that are told apart by their attempts.
    fn spans(attempts: std::ops::Range<usize>) -> Vec<Span> {
        let times = Times {
            claimed: None,
            started: None,
            gone: moment(1),
            recorded: moment(2).boottime,
        };
        let of = |n: usize| record(Outcome::Succeeded, n.try_into().expect("small"));
        attempts
            .map(|n| Span::new(("n", "p"), of(n), None, &times))
            .collect()
    }

    fn attempts(queue: &Queue) -> (usize, Option<u32>, Option<u32>) {
        let spans = queue.spans.lock();
        let attempt = |s: &Span| s.record.attempt;
        (
            spans.len(),
            spans.front().map(attempt),
            spans.back().map(attempt),
        )
    }

    #[test]
    fn the_queue_is_never_long_and_leaves_out_the_oldest() {
        let vitals = Arc::<Vitals>::default();
        let queue = Queue::new(vitals.clone());
        let dropped = || {
            let all = vitals.figures.spans.read();
            all.iter()
                .find(|(what, _)| *what == "dropped")
                .map(|(_, n)| *n)
        };
        spans(1..WAITING + 1)
            .into_iter()
            .for_each(|s| queue.push(s));
        assert_eq!(
            (attempts(&queue), dropped()),
            ((WAITING, Some(1), Some(2048)), Some(0))
        );
        spans(2049..2052).into_iter().for_each(|s| queue.push(s));
        assert_eq!(
            (attempts(&queue), dropped()),
            ((WAITING, Some(4), Some(2051)), Some(3))
        );

        let batch = queue.take();
        assert_eq!(
            (batch.len(), attempts(&queue)),
            (BATCH, (WAITING - BATCH, Some(516), Some(2051)))
        );
        spans(2052..2062).into_iter().for_each(|s| queue.push(s));
        queue.put_back(batch);
        assert_eq!(
            (attempts(&queue), dropped()),
            ((WAITING, Some(14), Some(2061)), Some(13))
        );
        let in_order: Vec<u32> = queue.take().iter().map(|s| s.record.attempt).collect();
        assert!(in_order.is_sorted());
    }

    #[test]
    fn answers_mean_what_otlp_says() {
        let of = |status: u16, text: &str| {
            let status = StatusCode::from_u16(status).expect("a status");
            judge(status, Some(Duration::from_secs(7)), text)
        };
        for text in [
            "",
            "{}",
            "ok",
            r#"{"partialSuccess":{}}"#,
            r#"{"partialSuccess":{"rejectedSpans":"0"}}"#,
        ] {
            assert_eq!(of(200, text), Ok(None), "{text}");
        }
        for number in ["\"2\"", "2"] {
            let text = format!(
                r#"{{"partialSuccess":{{"rejectedSpans":{number},"errorMessage":"too\nold"}}}}"#
            );
            assert_eq!(of(202, &text), Ok(Some((2, "too\\nold".to_owned()))));
        }
        for status in [429, 502, 503, 504] {
            let Err(Failed::Now(why, pause)) = of(status, "later") else {
                panic!("{status}");
            };
            assert!(why.contains("later"), "{why}");
            assert_eq!(pause, Some(Duration::from_secs(7)));
        }
        for status in [302, 400, 401, 404, 413, 415, 500, 501] {
            assert!(
                matches!(of(status, "no"), Err(Failed::Refused(_))),
                "{status}"
            );
        }
    }
}
