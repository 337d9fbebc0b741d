//! Metrics, in the formats of Prometheus and OpenMetrics. What this instance did comes from
//! [`crate::health::Figures`]; what is true
//! of the fleet, from the board, is the same on every instance that answers.

use std::{fmt, sync::Arc};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, header},
    response::Response,
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeGaugeValue, NoLabelSet, text::encode},
    metrics::MetricType,
    registry::{Registry, Unit},
};

use super::{App, board::Inner, headers::accepts, problem::Problem};
use crate::log_queue;

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
    app.health.figures.register(&mut registry);
    registry.register_collector(Box::new(Metrics(app)));
    let mut text = String::new();
    encode(&mut text, &registry).map_err(|_| Problem::internal("cannot write the metrics"))?;
    // What is new in it is a comment in the older format.
    let kind = match accepts(&headers, "application/openmetrics-text") {
        true => OPENMETRICS,
        false => CLASSIC,
    };
    let mut response = Response::new(Body::from(text));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
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
        let help = "Lines of this instance's log that were dropped because nobody read them";
        e.encode_descriptor("log_lines_dropped", help, None, MetricType::Counter)?
            .encode_counter::<NoLabelSet, _, f64>(&log_queue::dropped(), None)?;
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
