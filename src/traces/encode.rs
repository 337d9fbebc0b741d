//! Spans as OTLP has them, in its JSON form: ids in hexadecimal, times and 64-bit numbers as text, enumerations as
//! numbers.

use serde_json::{Value, json};

use super::{Settings, Span};

/// `SPAN_KIND_INTERNAL`.
const INTERNAL: u8 = 1;
/// `STATUS_CODE_ERROR`. Without it a status is unset, which is what OpenTelemetry recommends for all else.
const ERROR: u8 = 2;

/// The body of a request to export these spans.
pub(super) fn body(settings: &Settings, spans: &[Span]) -> Vec<u8> {
    let resource = settings.resource.iter().map(|(k, v)| text(k, v));
    let resource: Vec<Value> = resource.collect();
    let spans: Vec<Value> = spans.iter().map(span).collect();
    let request = json!({
        "resourceSpans": [{
            "resource": { "attributes": resource },
            "scopeSpans": [{
                "scope": { "name": "soloist", "version": env!("CARGO_PKG_VERSION") },
                "spans": spans,
            }],
        }],
    });
    request.to_string().into_bytes()
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

fn number(key: &str, value: i64) -> Value {
    json!({ "key": key, "value": { "intValue": value.to_string() } })
}

fn nanos(us: i64) -> String {
    (i128::from(us.max(0)) * 1000).to_string()
}

fn span(s: &Span) -> Value {
    let trace = format!("{:032x}", s.context.trace);
    let id = |span: u64| format!("{span:016x}");
    let links: Vec<Value> = s
        .previous
        .iter()
        .map(|before| {
            json!({
                "traceId": trace,
                "spanId": id(before.span),
                "attributes": [text("soloist.link", "previous_attempt")],
            })
        })
        .collect();
    let ended = s
        .record
        .started_at
        .map(|_| json!({ "timeUnixNano": nanos(s.gone_us), "name": "ended" }));
    let fault = s.fault();
    let status = match &fault {
        Some(words) => json!({ "code": ERROR, "message": words }),
        None => json!({}),
    };
    json!({
        "traceId": trace,
        "spanId": id(s.context.span),
        // Recorded; see `SpanContext::traceparent`.
        "flags": 1,
        "name": s.record.job.as_str(),
        "kind": INTERNAL,
        "startTimeUnixNano": nanos(s.begin_us),
        "endTimeUnixNano": nanos(s.end_us),
        "attributes": attributes(s, fault.is_some()),
        "events": ended.into_iter().collect::<Vec<_>>(),
        "links": links,
        "status": status,
    })
}

fn attributes(s: &Span, is_fault: bool) -> Vec<Value> {
    let r = &s.record;
    let outcome = r.outcome.as_str();
    let run = r.run_id.map(|id| id.to_string());
    let occurrence = r.occurrence.to_string();
    let texts = [
        ("soloist.job", Some(r.job.as_str())),
        ("soloist.occurrence", Some(&*occurrence)),
        ("soloist.trigger", Some(r.trigger.as_str())),
        ("soloist.trigger.key", s.key.as_deref()),
        ("soloist.run_id", run.as_deref()),
        ("soloist.instance", r.instance.as_ref().map(|i| i.as_str())),
        ("soloist.outcome", Some(outcome)),
        // Not its text, which differs from run to run.
        ("error.type", is_fault.then_some(outcome)),
    ];
    let of = |n: Option<u64>| n.and_then(|n| i64::try_from(n).ok());
    let numbers = [
        ("soloist.attempt", Some(i64::from(r.attempt))),
        ("soloist.fencing_token", r.fencing_token.map(|t| t.0)),
        ("soloist.lateness_ms", r.lateness_ms),
        ("soloist.waited_ms", s.waited_ms),
        ("soloist.duration_ms", r.duration_ms),
        ("process.exit.code", r.exit_code.map(i64::from)),
        ("soloist.signal", r.signal.map(i64::from)),
        ("soloist.cpu_ms", of(r.usage.cpu_ms)),
        ("soloist.peak_memory_bytes", of(r.usage.peak_memory_bytes)),
        ("soloist.output_bytes", of(r.usage.output_bytes)),
    ];
    let texts = texts.iter().filter_map(|(k, v)| Some(text(k, (*v)?)));
    let numbers = numbers.iter().filter_map(|(k, v)| Some(number(k, (*v)?)));
    texts.chain(numbers).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        model::{Outcome, RunRecord},
        traces::{
            Times,
            tests::{moment, record},
        },
    };

    #[test]
    fn a_span_is_written_as_otlp_has_it() {
        let times = Times {
            claimed: Some(moment(0).boottime),
            started: Some(moment(2)),
            gone: moment(1002),
            recorded: moment(1003).boottime,
        };
        let failed = RunRecord {
            exit_code: Some(3),
            started_at: Some(1_795_233_600_002),
            lateness_ms: Some(2),
            ..record(Outcome::Failed, 2)
        };
        let key = Some("a \"key\"".to_owned());
        let s = Span::new(("soloist", "p"), failed, key, &times);
        let settings = Settings {
            url: String::new(),
            headers: vec![],
            timeout: Duration::ZERO,
            resource: vec![("service.name".to_owned(), "soloist".to_owned())],
        };
        let (context, before) = (s.context, s.previous.expect("an attempt before"));
        let written: Value = serde_json::from_slice(&body(&settings, &[s])).expect("JSON");
        let resource = &written["resourceSpans"][0]["resource"]["attributes"][0];
        assert_eq!(resource["key"], "service.name");
        assert_eq!(resource["value"]["stringValue"], "soloist");
        let scope = &written["resourceSpans"][0]["scopeSpans"][0];
        assert_eq!(scope["scope"]["name"], "soloist");
        let attributes = scope["spans"][0]["attributes"].clone();
        let mut span = scope["spans"][0].clone();
        span["attributes"] = Value::Null;
        assert_eq!(
            span,
            json!({
                "traceId": format!("{:032x}", context.trace),
                "spanId": format!("{:016x}", context.span),
                "flags": 1,
                "name": "report",
                "kind": 1,
                "startTimeUnixNano": "1795233600002000000",
                "endTimeUnixNano": "1795233601003000000",
                "attributes": null,
                "events": [{ "timeUnixNano": "1795233601002000000", "name": "ended" }],
                "links": [{
                    "traceId": format!("{:032x}", context.trace),
                    "spanId": format!("{:016x}", before.span),
                    "attributes": [{ "key": "soloist.link", "value": { "stringValue": "previous_attempt" } }],
                }],
                "status": { "code": 2, "message": "failed: exit code 3" },
            })
        );
        for expected in [
            text("soloist.trigger.key", "a \"key\""),
            text("error.type", "failed"),
            text("soloist.occurrence", "2026-11-21T04:00:00.000Z"),
            number("soloist.attempt", 2),
            number("process.exit.code", 3),
            number("soloist.waited_ms", 2),
        ] {
            let all = attributes.as_array().expect("a list");
            assert!(all.contains(&expected), "{expected} is not in {all:#?}");
        }
        // What nobody knows is left out.
        assert!(!attributes.to_string().contains("soloist.signal"));
    }
}
