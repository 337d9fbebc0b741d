//! Where the span of a run is in its trace. The ids are computed, not drawn: so all attempts of an occurrence are in
//! one trace whichever instances run them, and an attempt knows the span of the one before it.

use xxhash_rust::xxh3::Xxh3;

use crate::model::{JobName, Occurrence};

/// The ids of a trace and of a span in it, as W3C Trace Context has them. Neither is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    pub trace: u128,
    pub span: u64,
}

impl SpanContext {
    /// The span of the `attempt`-th run of an occurrence. `namespace` and `place` are those of the store in which the
    /// fleet meets: two fleets with a job of the same name have different traces.
    pub fn of(
        namespace: &str,
        place: &str,
        job: &JobName,
        occurrence: Occurrence,
        attempt: u32,
    ) -> Self {
        let mut hash = Xxh3::new();
        // Lengths separate neighbouring parts: `ab`, `c` is not `a`, `bc`.
        for part in [namespace, place, job.as_str()] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        hash.update(&occurrence.0.to_le_bytes());
        let trace = hash.digest128().max(1);
        hash.update(&attempt.to_le_bytes());
        let span = hash.digest().max(1);
        Self { trace, span }
    }

    /// The value of `traceparent`. `recorded`: somebody keeps this span.
    pub fn traceparent(&self, recorded: bool) -> String {
        format!(
            "00-{:032x}-{:016x}-{:02x}",
            self.trace,
            self.span,
            u8::from(recorded)
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn of(namespace: &str, place: &str, job: &str, at: i64, attempt: u32) -> SpanContext {
        SpanContext::of(
            namespace,
            place,
            &JobName::new(job),
            Occurrence(at),
            attempt,
        )
    }

    #[test]
    fn attempts_share_a_trace_and_nothing_else_does() {
        let first = of("n", "p", "job", 1000, 1);
        assert_eq!(first, of("n", "p", "job", 1000, 1));
        let second = of("n", "p", "job", 1000, 2);
        assert_eq!(first.trace, second.trace);
        assert_ne!(first.span, second.span);
        let all = [
            first,
            of("n", "p", "job", 1001, 1),
            of("n", "p", "jo", 1000, 1),
            of("n", "pj", "ob", 1000, 1),
            of("np", "", "job", 1000, 1),
            of("n2", "p", "job", 1000, 1),
        ];
        let traces: HashSet<u128> = all.iter().map(|c| c.trace).collect();
        assert_eq!(traces.len(), all.len());
        let spans: HashSet<u64> = all.iter().map(|c| c.span).collect();
        assert_eq!(spans.len(), all.len());
    }

    /// Instances of two versions, or on two kinds of host, must agree.
    #[test]
    fn the_ids_stay_what_they_are() {
        let context = of(
            "soloist",
            "redis://h:6379/0",
            "backup",
            1_795_233_600_000,
            1,
        );
        assert_eq!(
            context.traceparent(true),
            "00-7ba57d66a2322714a3f31408527ce3b4-0385ee1c837054f4-01"
        );
    }

    #[test]
    fn a_traceparent_has_fixed_lengths_and_says_whether_the_span_is_kept() {
        let small = SpanContext { trace: 1, span: 2 };
        assert_eq!(
            small.traceparent(true),
            "00-00000000000000000000000000000001-0000000000000002-01"
        );
        assert!(small.traceparent(false).ends_with("-00"));
    }
}
