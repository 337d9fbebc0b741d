//! `soloist __last_will`: tells the store which runs a killed daemon had been granted and never started.

use std::{collections::BTreeSet, fs::File, os::fd::AsFd, process::ExitCode, time::Duration};

use futures_util::{StreamExt, stream};

use super::{Claimed, Destination};
use crate::{
    clock::Boottime,
    logic::{
        attempts,
        backoff::Pauses,
        claim::{Settle, State},
        guard_life,
    },
    model::{JobName, Outcome, RunRecord},
    settle::{KNOWN_PATIENCE, block_on, fail, open, outlive_terminal_and_service},
    store::Tail,
};

/// A claim that the daemon had sent may reach the store after the daemon's death: what was not granted yet is looked
/// for so long.
const UNDER_WAY: Duration = Duration::from_secs(5);
/// The shortest and the longest pause between two looks.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// How many outcomes are told at once.
const AT_ONCE: usize = 8;

/// The whole process. Its descriptor 0 is the will.
pub fn main() -> ExitCode {
    // As the zygote says.
    let _ = rustix::thread::set_name(c"soloist");
    outlive_terminal_and_service();
    let will = std::io::stdin().as_fd().try_clone_to_owned();
    let (destination, mut left) = match will.and_then(|will| super::read(&File::from(will))) {
        Ok(will) => will,
        Err(e) => return fail(&format!("cannot read what a daemon left behind: {e}")),
    };
    let begun = Boottime::now();
    let mut pauses = Pauses::from(PAUSE.0);
    loop {
        let under_way = Boottime::now().since(begun) < UNDER_WAY;
        let told = block_on(tell(&destination, &mut left, under_way));
        if left.is_empty() {
            return ExitCode::SUCCESS;
        }
        if let Err(error) = told
            && Boottime::now().since(begun) >= KNOWN_PATIENCE
        {
            return fail(&format!(
                "{} runs that were never started are not recorded: {error}",
                left.len()
            ));
        }
        std::thread::sleep(pauses.after_failure(PAUSE.1));
    }
}

/// Tells the store what it has granted of `left`, and leaves in `left` what is to be looked for again: `under_way`,
/// also what it has not granted.
async fn tell(
    destination: &Destination,
    left: &mut Vec<Claimed>,
    under_way: bool,
) -> Result<(), String> {
    let offset_us = left.last().map_or(0, |last| last.offset_us);
    let store = open(&destination.store, offset_us)?;
    let now = Boottime::now();
    let jobs: BTreeSet<&JobName> = left.iter().map(|c| &c.job).collect();
    let jobs: Vec<JobName> = jobs.into_iter().cloned().collect();
    let states = store.observe(&jobs).await.map_err(|e| e.to_string())?.value;
    let state = |job: &JobName| {
        let i = jobs.binary_search(job).ok()?;
        states.get(i)?.as_ref()
    };
    let ended_ms = |c: &Claimed| c.offset_us.saturating_add((now.0 / 1000) as i64) / 1000;
    let (mut again, mut granted) = (vec![], vec![]);
    for claimed in left.drain(..) {
        match state(&claimed.job).and_then(|st| settlement(st, &claimed, ended_ms(&claimed))) {
            Some(settle) => granted.push((claimed, settle)),
            None if under_way => again.push(claimed),
            // It was not granted, or somebody else said what became of it.
            None => {}
        }
    }
    let mut failed = None;
    let telling = granted.into_iter().map(|(claimed, settle)| {
        let store = store.clone();
        async move { (claimed, store.settle(&settle, &Tail::default()).await) }
    });
    let mut telling = stream::iter(telling).buffer_unordered(AT_ONCE);
    while let Some((claimed, told)) = telling.next().await {
        if let Err(error) = told {
            failed = Some(error.to_string());
            again.push(claimed);
        }
    }
    *left = again;
    failed.map_or(Ok(()), Err)
}

/// What is to be said of `claimed` if it was granted, and nothing has been said yet but that its lease has lapsed.
fn settlement(state: &State, claimed: &Claimed, ended_ms: i64) -> Option<Settle> {
    let lapsed = state
        .lapsed
        .as_deref()
        .filter(|e| e.run.id == claimed.run)
        .filter(|_| {
            let last = state.last.as_ref();
            last.is_some_and(|l| l.run == claimed.run && l.outcome == Outcome::Unknown)
        });
    let run = &state.held_by(claimed.run).or(lapsed)?.run;
    let (on_crash, max) = (claimed.on_crash, claimed.max_attempts);
    Some(Settle {
        run: run.id,
        record: RunRecord {
            outcome: Outcome::Crashed,
            error: Some(guard_life::NEVER_STARTED.to_owned()),
            ..RunRecord::of(&claimed.job, run).lasting(None, Some(ended_ms))
        },
        next_attempt: attempts::after_unstarted(on_crash, max, run.attempt),
    })
}

/// What the process does, for a simulated host.
#[cfg(test)]
pub(crate) async fn simulated((destination, mut left): (Destination, Vec<Claimed>)) {
    let begun = Boottime::now();
    while !left.is_empty() && Boottime::now().since(begun) < KNOWN_PATIENCE {
        let under_way = Boottime::now().since(begun) < UNDER_WAY;
        if tell(&destination, &mut left, under_way).await.is_err() || !left.is_empty() {
            tokio::time::sleep(PAUSE.0).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        logic::claim::{Last, NextAttempt, OnCrash, Open},
        model::{InstanceId, Occurrence, Run, RunId, Trigger},
    };

    fn granted(run: RunId, attempt: u32) -> Open {
        let run = Run {
            id: run,
            attempt,
            instance: InstanceId::new("gone"),
            lease: 2000,
            granted_at: 60_001,
            ..Run::first(60_000)
        };
        Open {
            run,
            renewed_at: 60_001,
            ..Open::first(60_000)
        }
    }

    fn claimed(run: RunId) -> Claimed {
        Claimed {
            job: JobName::new("a"),
            run,
            on_crash: OnCrash::Fail,
            max_attempts: 1,
            offset_us: 0,
        }
    }

    #[test]
    fn what_was_granted_and_never_started_gets_another_attempt() {
        let run = RunId::random();
        let state = State {
            open: vec![granted(RunId::random(), 1), granted(run, 2)],
            ..State::default()
        };
        let said = settlement(&state, &claimed(run), 61_000).expect("it was granted");
        assert_eq!((said.run, said.record.run_id), (run, Some(run)));
        assert_eq!((said.record.attempt, said.record.occurrence.0), (2, 60_000));
        let times = (said.record.started_at, said.record.finished_at);
        assert_eq!(times, (None, Some(61_000)));
        assert_eq!(said.record.outcome, Outcome::Crashed);
        let next = said.next_attempt.expect("another attempt");
        assert_eq!((next.delay_ms, next.trigger), (0, Trigger::Takeover));
        // Of a job whose instances die each time before its start.
        let state = State {
            open: vec![granted(run, 5)],
            ..State::default()
        };
        let said = settlement(&state, &claimed(run), 61_000).expect("it was granted");
        assert_eq!(said.next_attempt, None);
    }

    #[test]
    fn what_was_not_granted_or_is_known_already_is_not_spoken_of() {
        let run = RunId::random();
        let said = |state: &State| settlement(state, &claimed(run), 61_000).is_some();
        let mut state = State {
            open: vec![granted(RunId::random(), 1)],
            ..State::default()
        };
        assert!(!said(&state));
        // It awaits its next attempt: somebody settled it.
        state.open = vec![Open {
            next_attempt: Some(NextAttempt {
                at: 0,
                trigger: Trigger::Takeover,
            }),
            ..granted(run, 1)
        }];
        assert!(!said(&state));
        // Somebody found its lease lapsed, and could say no more.
        let last = |outcome, run| Last {
            occurrence: Occurrence(60_000),
            attempt: 1,
            run,
            instance: InstanceId::new("gone"),
            outcome,
            from: 60_001,
            started: None,
            ended: None,
            to: 61_000,
        };
        state = State {
            lapsed: Some(Box::new(granted(run, 1))),
            last: Some(last(Outcome::Unknown, run)),
            ..State::default()
        };
        assert!(said(&state));
        for other in [
            last(Outcome::Crashed, run),
            last(Outcome::Unknown, RunId::random()),
        ] {
            state.last = Some(other);
            assert!(!said(&state));
        }
    }
}
