//! Metrics, in the formats of Prometheus and OpenMetrics. What this instance did comes from [`Figures`]; what is true
//! of the fleet, from the board, is the same on every instance that answers.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, header},
    response::Response,
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, NoLabelSet, text::encode},
    metrics::MetricType,
    registry::{Registry, Unit},
};

use super::{App, board::Inner, headers::accepts, problem::Problem};
use crate::{log_queue, vitals::Figures};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The metrics of this instance, and of the fleet as it sees it
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "health",
    responses(
        (status = 200, description = "in the text format of Prometheus, or of OpenMetrics if asked for it", content(
            (String = "text/plain"),
            (String = "application/openmetrics-text"),
        )),
        (status = "default", description = "a problem", body = super::problem::ProblemView,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn metrics(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let mut registry = Registry::with_prefix("soloist");
    registry.register_collector(Box::new(Metrics(app)));
    let mut text = String::new();
    encode(&mut text, &registry).map_err(|_| Problem::internal("cannot write the metrics"))?;
    let (text, kind) = match accepts(&headers, "application/openmetrics-text") {
        true => (text, OPENMETRICS),
        false => (classic(&text), CLASSIC),
    };
    let mut response = Response::new(Body::from(text));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

/// OpenMetrics in the older format, in which the name of a counter ends with `_total` everywhere.
fn classic(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with("# UNIT ") || line == "# EOF" {
            continue;
        }
        let name = |line: &str| line.split(' ').nth(2).unwrap_or_default().to_owned();
        let is_counter = |line: &str| line.starts_with("# TYPE ") && line.ends_with(" counter");
        let counter = is_counter(line)
            || line.starts_with("# HELP ")
                && lines
                    .peek()
                    .is_some_and(|next| is_counter(next) && name(next) == name(line));
        match counter {
            true => {
                let name = name(line);
                out.push_str(&line.replacen(&name, &format!("{name}_total"), 1));
            }
            false => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

struct Metrics(Arc<App>);

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

type Written = Result<(), fmt::Error>;
type Labels<'a, const N: usize> = [(&'a str, &'a str); N];

fn gauge<V: EncodeGaugeValue>(
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    unit: Option<&Unit>,
    help: &str,
    value: V,
) -> Written {
    e.encode_descriptor(name, help, unit, MetricType::Gauge)?
        .encode_gauge(&value)
}

fn gauges<'a, V: EncodeGaugeValue, const N: usize>(
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    unit: Option<&Unit>,
    help: &str,
    values: impl IntoIterator<Item = (Labels<'a, N>, V)>,
) -> Written {
    let mut metric = e.encode_descriptor(name, help, unit, MetricType::Gauge)?;
    for (labels, value) in values {
        metric.encode_family(&labels)?.encode_gauge(&value)?;
    }
    Ok(())
}

fn counter<V: EncodeCounterValue>(
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: V,
) -> Written {
    let mut metric = e.encode_descriptor(name, help, None, MetricType::Counter)?;
    metric.encode_counter::<NoLabelSet, _, f64>(&value, None)
}

fn counters<'a, const N: usize>(
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (Labels<'a, N>, u64)>,
) -> Written {
    let mut metric = e.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in values {
        metric
            .encode_family(&labels)?
            .encode_counter::<NoLabelSet, _, f64>(&value, None)?;
    }
    Ok(())
}

fn histogram(
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    (sum, count, buckets): (f64, u64, Vec<(f64, u64)>),
) -> Written {
    let mut metric =
        e.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
    metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Written {
        let e = &mut encoder;
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        gauges(
            e,
            "build_info",
            None,
            "The version of this instance",
            [(version, 1_i64)],
        )?;
        of_instance(e, &self.0.vitals.figures)?;
        let inner = self.0.board.read();
        of_store(e, &inner)?;
        of_fleet(e, &inner, self.0.instance.as_str())?;
        of_jobs(e, &inner)?;
        drop(inner);
        let used = super::events::STREAMS - self.0.streams.available_permits();
        gauge(
            e,
            "http_streams",
            None,
            "Open streams of events and of output",
            used as i64,
        )
    }
}

fn of_instance(e: &mut DescriptorEncoder<'_>, f: &Figures) -> Written {
    let runs = f.runs.read();
    let runs = runs
        .iter()
        .map(|((job, outcome), n)| ([("job", job.as_str()), ("outcome", *outcome)], *n));
    counters(
        e,
        "runs",
        "Runs that ended on this instance, by outcome",
        runs,
    )?;
    let help =
        "From the planned instant to the start of the command, of first attempts on this instance";
    histogram(e, "start_lateness", help, f.lateness.read())?;
    histogram(
        e,
        "run_duration",
        "How long runs on this instance took",
        f.durations.read(),
    )?;
    let one = |name: &'static str| move |(word, n): (&'static str, u64)| ([(name, word)], n);
    let late = f.late.read().into_iter().map(one("cause"));
    counters(
        e,
        "late_starts",
        "First attempts that started more than a second late on this instance, by cause",
        late,
    )?;
    let not_run = f.not_run.read();
    let not_run = not_run
        .iter()
        .map(|((outcome, cause), n)| ([("outcome", *outcome), ("cause", *cause)], *n));
    counters(
        e,
        "not_run",
        "Occurrences that this instance recorded as not run, by cause",
        not_run,
    )?;
    let claims = f.claims.read().into_iter().map(one("answer"));
    counters(
        e,
        "claims",
        "Claims of this instance, by the answer of the store",
        claims,
    )?;
    let renewals = f.renewals.read().into_iter().map(one("answer"));
    counters(
        e,
        "renewals",
        "Renewals of leases by this instance, by the answer of the store",
        renewals,
    )?;
    let read = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed);
    let help = "Runs of this instance that ended because their lease was lost";
    counter(e, "leases_lost", help, read(&f.leases_lost))?;
    let help = "Occurrences that this instance took over because the lease of another one lapsed";
    counter(e, "takeovers", help, read(&f.takeovers))?;
    let help = "Heartbeats of this instance that the store did not answer";
    counter(e, "heartbeats_failed", help, read(&f.heartbeats_failed))?;
    let help = "Lines of this instance's log that were dropped because nobody read them";
    counter(e, "log_lines_dropped", help, log_queue::dropped())?;
    let spans = f.spans.read().into_iter().map(one("result"));
    let help =
        "Spans of runs that this instance sent, that were refused, or for which there was no room";
    counters(e, "spans", help, spans)?;
    let told = f.notifications.read();
    let told = told.iter().map(|((channel, result), n)| {
        let labels = [("channel", channel.as_str()), ("result", *result)];
        (labels, *n)
    });
    counters(
        e,
        "notifications",
        "Tries of this instance to deliver messages to channels, and messages that it gave up",
        told,
    )
}

fn of_store(e: &mut DescriptorEncoder<'_>, inner: &Inner) -> Written {
    let pulse = inner.pulse();
    let up = i64::from(pulse.fleet.is_some() && pulse.away.is_none());
    gauge(
        e,
        "store_up",
        None,
        "Whether the store answers this instance",
        up,
    )?;
    if pulse.fleet.is_some() {
        let latency = pulse.latency.as_secs_f64();
        gauge(
            e,
            "store_latency",
            Some(&Unit::Seconds),
            "How long the last heartbeat took",
            latency,
        )?;
    }
    let problems = pulse.problems.len() as i64;
    gauge(
        e,
        "store_problems",
        None,
        "Problems with the settings of the store",
        problems,
    )
}

fn of_fleet(e: &mut DescriptorEncoder<'_>, inner: &Inner, me: &str) -> Written {
    let view = inner.instances();
    let count = |wanted: &dyn Fn(&crate::view::InstanceView) -> bool| {
        view.instances.iter().filter(|i| wanted(i)).count() as i64
    };
    let states = [
        ([("state", "live")], count(&|i| !i.silent && !i.draining)),
        ([("state", "draining")], count(&|i| !i.silent && i.draining)),
        ([("state", "silent")], count(&|i| i.silent)),
    ];
    gauges(e, "instances", None, "Instances of the fleet", states)?;
    let differ = count(&|i| !i.silent && i.config_differs);
    let help = "Live instances whose configuration is not that of most instances";
    gauge(e, "instances_with_other_configuration", None, help, differ)?;
    if let Some(own) = view.instances.iter().find(|i| i.instance.as_str() == me) {
        let offset = own.clock_offset_ms / 1000.0;
        gauge(
            e,
            "clock_offset",
            Some(&Unit::Seconds),
            "This host's clock minus the store's",
            offset,
        )?;
        let running = own.running.len() as i64;
        gauge(
            e,
            "running_runs",
            None,
            "Active runs of this instance",
            running,
        )?;
        gauge(
            e,
            "draining",
            None,
            "Whether this instance drains",
            i64::from(own.draining),
        )?;
    }
    if let Some(epoch) = &view.epoch {
        let help =
            "Whether the store grants anything: it does not for a while after it lost its data";
        gauge(e, "store_open", None, help, i64::from(epoch.open))?;
    }
    let doubted = i64::from(inner.clock().doubt_ms.is_some());
    gauge(
        e,
        "store_clock_doubted",
        None,
        "Whether an instance does not believe the store's clock",
        doubted,
    )
}

fn of_jobs(e: &mut DescriptorEncoder<'_>, inner: &Inner) -> Written {
    // Those of other instances, too: which one is asked makes no difference.
    let all = || inner.each().map(|job| &job.view);
    let help = "Jobs of the fleet: of this instance's configuration, and that others have enabled";
    gauge(e, "jobs", None, help, all().count() as i64)?;
    let differ = all().filter(|v| v.other_definition).count() as i64;
    let help = "Jobs of which the fleet has another definition than this instance";
    gauge(e, "jobs_with_other_definition", None, help, differ)?;
    let paused = all().filter(|v| v.paused.is_some()).count() as i64;
    gauge(e, "jobs_paused", None, "Paused jobs", paused)?;
    let unreadable = all().filter(|v| v.unreadable.is_some()).count() as i64;
    gauge(
        e,
        "jobs_unreadable",
        None,
        "Jobs whose state in the store cannot be read",
        unreadable,
    )?;
    let seconds = |ms: i64| ms as f64 / 1000.0;
    let next = all().filter_map(|v| Some(([("job", v.job.as_str())], seconds(v.next?.0))));
    let help =
        "When the job runs next: the next planned occurrence that is neither paused nor skipped";
    gauges(
        e,
        "job_next_occurrence_timestamp",
        Some(&Unit::Seconds),
        help,
        next,
    )?;
    let success = inner
        .last_successes()
        .map(|(job, ms)| ([("job", job.as_str())], seconds(ms)));
    let help = "When a run of the job last succeeded, on any instance";
    gauges(
        e,
        "job_last_success_timestamp",
        Some(&Unit::Seconds),
        help,
        success,
    )?;
    let last = all().filter_map(|v| Some(([("job", v.job.as_str())], v.last.as_ref()?)));
    let ended = last
        .clone()
        .filter(|(_, last)| last.run_id.is_some())
        .map(|(labels, last)| (labels, seconds(last.finished_at.0)));
    let help = "When a run of the job last ended, on any instance";
    gauges(
        e,
        "job_last_end_timestamp",
        Some(&Unit::Seconds),
        help,
        ended,
    )?;
    let failed = last.map(|(labels, last)| (labels, i64::from(last.outcome.is_bad())));
    let help =
        "Whether the last run of the job went wrong; one that was cancelled or replaced did not";
    gauges(e, "job_last_run_failed", None, help, failed)?;
    let needs = all().map(|v| ([("job", v.job.as_str())], i64::from(v.attention.is_some())));
    let help = "Whether a person should look at the job, as the page and `soloist top` say";
    gauges(e, "job_needs_attention", None, help, needs)?;
    let running = all().map(|v| ([("job", v.job.as_str())], v.running.len() as i64));
    gauges(
        e,
        "job_running",
        None,
        "Active runs of the job, on all instances",
        running,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_names_counters_with_their_end() {
        let text = "# HELP a_runs Runs.\n# TYPE a_runs counter\na_runs_total{job=\"# TYPE x counter\"} 1\n\
            # HELP b_seconds B\n# TYPE b_seconds gauge\n# UNIT b_seconds seconds\nb_seconds 2\n# EOF\n";
        let want = "# HELP a_runs_total Runs.\n# TYPE a_runs_total counter\na_runs_total{job=\"# TYPE x counter\"} 1\n\
            # HELP b_seconds B\n# TYPE b_seconds gauge\nb_seconds 2\n";
        assert_eq!(classic(text), want);
    }
}
