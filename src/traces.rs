//! Traces: a span for each run, sent by OTLP over HTTP to where the standard variables of OpenTelemetry say. The
//! process that records the outcome of a run sends its span: the daemon, or the guard's `__settle` if the daemon has
//! died. docs/traces.md has what a span says; the ids are computed in `logic/trace`.
//!
//! The spans of a daemon wait in a short queue for a thread of their own: however slow the receiver is, no run and no
//! settlement waits for it.

mod encode;
mod export;
mod settings;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub(crate) use self::{
    export::{Traces, send_now},
    settings::{Own, Settings, read},
};
use crate::{
    clock::Boottime,
    guard::Moment,
    logic::trace::SpanContext,
    model::{Outcome, RunRecord},
};

/// A run whose outcome is recorded.
#[derive(Debug)]
pub(crate) struct Span {
    context: SpanContext,
    /// The span of the attempt before it.
    previous: Option<SpanContext>,
    /// The begin of the start of its command; without one, when its lease was claimed. Unix µs of this host's wall
    /// clock, by which its command writes its own spans, too.
    begin_us: i64,
    /// When its last process was gone.
    gone_us: i64,
    /// When its outcome was recorded. All three are as far apart as they were on the monotonic clock.
    end_us: i64,
    /// From the claim to `begin_us`: for its turn, and for the start of its guard.
    waited_ms: Option<i64>,
    /// The key of its manual trigger.
    key: Option<String>,
    record: RunRecord,
}

/// When something happened to a run.
#[derive(Debug)]
pub(crate) struct Times {
    /// When the request for its lease left; None: not known.
    pub(crate) claimed: Option<Boottime>,
    pub(crate) started: Option<Moment>,
    pub(crate) gone: Moment,
    pub(crate) recorded: Boottime,
}

impl Span {
    /// `namespace` and `place` as for [`SpanContext::of`].
    pub(crate) fn new(
        (namespace, place): (&str, &str),
        record: RunRecord,
        key: Option<String>,
        times: &Times,
    ) -> Self {
        let of =
            |attempt| SpanContext::of(namespace, place, &record.job, record.occurrence, attempt);
        let base = times.started.as_ref().unwrap_or(&times.gone);
        let after = |at: Boottime| (i128::from(at.0) - i128::from(base.boottime.0)) / 1000;
        let wall = |at| {
            base.wall_us
                .saturating_add(i64::try_from(after(at)).unwrap_or(0))
        };
        let begin_us = match (&times.started, times.claimed) {
            (None, Some(claimed)) => wall(claimed),
            _ => base.wall_us,
        };
        let waited = |claimed| base.boottime.since(claimed).as_millis();
        Self {
            context: of(record.attempt),
            previous: (record.attempt > 1).then(|| of(record.attempt - 1)),
            begin_us,
            gone_us: wall(times.gone.boottime),
            end_us: wall(times.recorded).max(begin_us),
            waited_ms: times.claimed.and_then(|at| i64::try_from(waited(at)).ok()),
            key,
            record,
        }
    }

    /// What went wrong, in words; None: nothing did.
    fn fault(&self) -> Option<String> {
        let r = &self.record;
        match r.outcome {
            Outcome::Running
            | Outcome::Succeeded
            | Outcome::Cancelled
            | Outcome::Replaced
            | Outcome::Skipped => return None,
            Outcome::Failed
            | Outcome::TimedOut
            | Outcome::LeaseLost
            | Outcome::Crashed
            | Outcome::Unknown
            | Outcome::Missed => {}
        }
        let what = r.outcome.as_str().replace('_', " ");
        let why = r.error.as_deref().map(crate::words::line);
        let why = why
            .or(r.exit_code.map(|code| format!("exit code {code}")))
            .or(r.signal.map(crate::view::signal_name));
        Some(match why {
            Some(why) => format!("{what}: {why}"),
            None => what,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{JobName, Occurrence, Trigger};

    pub(super) fn record(outcome: Outcome, attempt: u32) -> RunRecord {
        let job = JobName::new("report");
        let at = Occurrence(1_795_233_600_000);
        RunRecord {
            attempt,
            ..RunRecord::without_run(&job, at, Trigger::Schedule, outcome)
        }
    }

    pub(super) fn moment(ms: u64) -> Moment {
        Moment {
            wall_us: 1_795_233_600_000_000 + ms as i64 * 1000,
            boottime: Boottime(5_000_000_000 + ms * 1_000_000),
        }
    }

    fn span(record: RunRecord, times: &Times) -> Span {
        Span::new(("soloist", "sqlite"), record, None, times)
    }

    #[test]
    fn a_span_begins_with_its_command_and_ends_with_the_record() {
        let mut times = Times {
            claimed: Some(moment(0).boottime),
            started: Some(moment(12)),
            gone: moment(500),
            recorded: moment(502).boottime,
        };
        // The wall clock was stepped during the run: the length stays true.
        times.gone.wall_us -= 3_600_000_000;
        let s = span(record(Outcome::Succeeded, 1), &times);
        let us = |ms| moment(ms).wall_us;
        assert_eq!(
            (s.begin_us, s.gone_us, s.end_us),
            (us(12), us(500), us(502))
        );
        assert_eq!((s.waited_ms, s.previous), (Some(12), None));
        times.gone = moment(500);
        times.started = None;
        let s = span(record(Outcome::Missed, 2), &times);
        assert_eq!((s.begin_us, s.end_us), (us(0), us(502)));
        let first = span(record(Outcome::Failed, 1), &times);
        assert_eq!(s.previous, Some(first.context));
        assert_eq!(s.context.trace, first.context.trace);
        times.claimed = None;
        assert_eq!(span(record(Outcome::Crashed, 1), &times).begin_us, us(500));
    }

    #[test]
    fn only_what_went_wrong_is_a_fault() {
        let times = Times {
            claimed: None,
            started: None,
            gone: moment(1),
            recorded: moment(2).boottime,
        };
        let fault = |change: RunRecord| span(change, &times).fault();
        let r = |outcome| record(outcome, 1);
        for outcome in Outcome::ALL {
            let fine = ["running", "succeeded", "cancelled", "replaced", "skipped"];
            assert_eq!(
                fault(r(outcome)).is_none(),
                fine.contains(&outcome.as_str()),
                "{outcome}"
            );
        }
        let failed = RunRecord {
            exit_code: Some(3),
            ..r(Outcome::Failed)
        };
        assert_eq!(fault(failed).as_deref(), Some("failed: exit code 3"));
        let killed = RunRecord {
            signal: Some(9),
            ..r(Outcome::TimedOut)
        };
        assert_eq!(fault(killed).as_deref(), Some("timed out: SIGKILL"));
        let lost = RunRecord {
            signal: Some(9),
            error: Some("so\nit is".repeat(1000)),
            ..r(Outcome::LeaseLost)
        };
        let text = fault(lost).expect("a fault");
        assert!(text.starts_with("lease lost: so\\nit is"), "{text}");
        assert!(text.len() < 1000, "{}", text.len());
    }
}
