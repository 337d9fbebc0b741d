//! What a message knows of a job: taken from a record when it is judged, and completed when the message is sent.

use std::collections::BTreeMap;

use super::body::letters;
use crate::{
    config::{Config, Job},
    logic::{
        claim::State,
        coming::Coming,
        notify::{About, Item, Kind, Message, Now, Standstill, Verdict},
    },
    model::{JobName, RunRecord},
    text, words,
};

/// The end of an output that a message has: lines, and characters.
pub(super) const OUTPUT_LINES: usize = 15;
pub(super) const OUTPUT_MOST: usize = 1500;

/// The facts of a record that a message may tell. `output` is the end of the run's output.
pub(in crate::notify) fn about(r: &RunRecord, output: &str) -> About {
    About {
        id: r.run_id,
        occurrence: r.occurrence,
        trigger: r.trigger,
        attempt: r.attempt,
        outcome: r.outcome,
        exit_code: r.exit_code,
        signal: r.signal,
        error: r.error.as_deref().map(words::line),
        instance: r.instance.clone(),
        host: r.host.as_deref().map(words::line),
        started_at: r.started_at,
        duration_ms: r.duration_ms,
        lateness_ms: r.lateness_ms,
        waited: r.waited,
        count: r.count,
        output: last_lines(output),
    }
}

/// The last lines, safe to show.
pub(super) fn last_lines(output: &str) -> String {
    // Before it is made safe, which takes time for each character.
    let from = output.len().saturating_sub(4 * OUTPUT_MOST);
    let from = (from..=output.len())
        .find(|at| output.is_char_boundary(*at))
        .unwrap_or(0);
    let safe = text::lines(output.get(from..).unwrap_or_default());
    let lines: Vec<&str> = safe.trim_end().lines().collect();
    let kept = lines.get(lines.len().saturating_sub(OUTPUT_LINES)..);
    let kept = kept.unwrap_or_default().join("\n");
    let many = letters(&kept).saturating_sub(OUTPUT_MOST);
    match many {
        0 => kept,
        many => format!("…{}", kept.chars().skip(many + 1).collect::<String>()),
    }
}

/// When the job is to run next, Unix ms.
fn next(job: &Job, state: Option<&State>, now: i64) -> Option<i64> {
    Some(Coming::of(job, state, now).next?.0)
}

/// The message as it is sent now: in its order, and with what is true of its jobs only now, because it may have waited.
/// `states`: of those jobs of which the store says anything. `drained`: all live instances drain.
pub(in crate::notify) fn refreshed(
    message: &Message,
    config: &Config,
    states: &BTreeMap<JobName, State>,
    drained: bool,
    now: i64,
) -> Message {
    let mut message = message.clone();
    message.arrange();
    for item in &mut message.items {
        let state = states.get(&item.job);
        item.now = state.map_or_else(Now::default, |st| Now::of(st, item.since, now));
        let job = config.jobs.get(&item.job);
        item.next = job
            .and_then(|job| next(job, state, now))
            .filter(|_| !drained);
        if drained && !matches!(item.now.standstill, Some(Standstill::Runs { .. })) {
            item.now.standstill = Some(Standstill::Drained);
        }
    }
    message
}

/// What is told of a job because of a verdict. `job`: None if this configuration lacks it.
pub(in crate::notify) fn item(
    name: &JobName,
    job: Option<&Job>,
    verdict: &Verdict,
    run: Option<About>,
    now: i64,
) -> Item {
    Item {
        streak: verdict.streak,
        changes: verdict.changes,
        again_at: verdict.again_at,
        zone: job.map_or("UTC", |job| &*job.timezone).to_owned(),
        next: job.and_then(|job| next(job, None, now)),
        lacked: job.is_none(),
        run,
        ..Item::new(name.clone(), verdict.kind, verdict.bad, verdict.since)
    }
}

pub(in crate::notify) fn test_message(channel: &str, now: i64) -> Message {
    let item = Item::new(JobName::new("test"), Kind::Test, false, now);
    Message::new(item, channel, now)
}
