//! The headers of every answer.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};

const ALWAYS: [(HeaderName, &str); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
         form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
];

/// `fresh`: nobody may keep the answer.
pub(super) fn add(headers: &mut HeaderMap, fresh: bool) {
    for (name, value) in ALWAYS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if fresh || !headers.contains_key(header::CACHE_CONTROL) {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
}

/// Whether the client asks for this type by its name, in `Accept` (RFC 9110, 12.5.1), and does not refuse it (`q=0`).
pub(super) fn accepts(headers: &HeaderMap, kind: &str) -> bool {
    let lines = headers.get_all(header::ACCEPT).iter();
    lines
        .filter_map(|line| line.to_str().ok())
        .flat_map(|line| line.split(','))
        .any(|range| {
            let mut parts = range.split(';').map(str::trim);
            let named = parts.next().is_some_and(|k| k.eq_ignore_ascii_case(kind));
            let refused = |part: &str| {
                let weight = part
                    .split_once('=')
                    .filter(|(k, _)| k.eq_ignore_ascii_case("q"));
                weight.is_some_and(|(_, q)| q.trim().parse() == Ok(0.0))
            };
            named && !parts.any(refused)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_is_asked_for_by_its_name_and_with_a_weight() {
        const KIND: &str = "text/event-stream";
        for (lines, wanted) in [
            (&["text/event-stream"] as &[&'static str], true),
            (&["Text/Event-Stream"], true),
            (&["application/json, text/event-stream;q=0.5"], true),
            (&["application/json", "text/event-stream"], true),
            (&["text/event-stream ; charset=utf-8 ; Q=1"], true),
            (&["text/event-stream;q=0.001"], true),
            (&["text/event-stream;q=0"], false),
            (&["text/event-stream; Q=0"], false),
            (&["text/event-stream; q=0.000, application/json"], false),
            (&["text/event-streams"], false),
            (&["x-text/event-stream"], false),
            (&["application/json;x=text/event-stream"], false),
            (&["text/*"], false),
            (&["*/*"], false),
            (&[""], false),
            (&[], false),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(header::ACCEPT, HeaderValue::from_static(line));
            }
            assert_eq!(accepts(&headers, KIND), wanted, "{lines:?}");
        }
    }
}
