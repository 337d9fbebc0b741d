//! `history`: runs, newest first.

use std::cmp::Reverse;

use clap::Args;

use super::{
    Context, Exit, Failure, logs, outcome, remark,
    show::{self, BOLD, Cell, PLAIN, relative, style_of, took},
};
pub(crate) use crate::view::exit;
use crate::{
    acts,
    logic::claim::State,
    model::{JobName, Outcome},
    store::{Error, HISTORY_KEPT, Observation, observe_each},
    view::{RunView, as_far_as_known, late_since_due},
};

#[derive(Debug, Args)]
#[command(after_help = "\
The store keeps the last 200 records of each job. SQLite removes a record after 30 days; Redis
removes the records of a job 30 days after the newest one. Times are in UTC.

Examples:
  soloist history                                what the fleet did last
  soloist history backup -n 3
  soloist history --outcome missed --json")]
pub(crate) struct History {
    /// Only of this job
    job: Option<String>,
    /// How many
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = show::lines)]
    number: usize,
    /// Only with this outcome: running, succeeded, failed, timed_out, cancelled, replaced, lease_lost, crashed,
    /// unknown, skipped, missed
    #[arg(long, value_name = "OUTCOME", value_parser = outcome)]
    outcome: Option<Outcome>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub(super) async fn history(ctx: &Context, args: &History) -> Result<Exit, Failure> {
    let names: Vec<JobName> = match &args.job {
        Some(name) => vec![ctx.known_job(name).await?.0],
        None => ctx.config.jobs.keys().cloned().collect(),
    };
    let reply = ctx
        .ask(async || observe_each(&*ctx.store, &names).await)
        .await?;
    let known = |(name, state): (JobName, Observation)| match state {
        Ok(state) => Some((name, state?)),
        Err(e) => {
            remark(&format!("cannot read the active runs of `{name}`: {e}"));
            // Read this job's records anyway: they may be among the newest.
            let newest = crate::model::LAST_MS;
            let state = State {
                newest,
                ..State::default()
            };
            Some((name, state))
        }
    };
    let states: Vec<(JobName, State)> = names
        .into_iter()
        .zip(reply.value)
        .filter_map(known)
        .collect();
    let mut runs = collect(ctx, states, args.number, args.outcome).await?;
    if ctx.out.json {
        logs::fill(ctx, &mut runs).await?;
    }
    let (fleet, clock) = ctx.fleet().await?;
    let now = clock.right(reply.now_us / 1000);
    ctx.out.say(&runs, || match args.outcome {
        Some(outcome) if runs.is_empty() => format!("no runs with outcome {outcome}\n"),
        None if runs.is_empty() => format!("no runs yet{}\n", as_far_as_known(&fleet)),
        _ => render(&runs, now, args.job.is_none()),
    })?;
    if runs.is_empty() {
        for problem in ctx.problems().await {
            remark(&format!("the store: {problem}"));
        }
        if let Some(why) = acts::standstill(&fleet, clock) {
            remark(&why);
        }
    }
    Ok(Exit::Ok)
}

/// The newest `n` runs of all these jobs. Reads the jobs in the order of their newest occurrence and stops at the first
/// that cannot add to the list: twenty lines need not read ten thousand jobs.
async fn collect(
    ctx: &Context,
    mut states: Vec<(JobName, State)>,
    n: usize,
    only: Option<Outcome>,
) -> Result<Vec<RunView>, Failure> {
    states.sort_by_key(|(_, st)| Reverse(st.newest));
    let wanted = |r: &RunView| only.is_none_or(|o| r.outcome == o);
    let mut runs: Vec<RunView> = vec![];
    for (name, st) in &states {
        if runs.len() >= n
            && runs
                .get(n.wrapping_sub(1))
                .is_none_or(|r| r.occurrence.0 > st.newest)
        {
            break;
        }
        let held = st.open.iter().filter(|o| o.next_attempt.is_none());
        let job = ctx.config.jobs.get(name).map(|job| &**job);
        runs.extend(held.map(|o| RunView::running(name, o)).filter(wanted));
        if only != Some(Outcome::Running) {
            // One more: the last attempt's lateness counts from the end of the one before.
            let fetch = if only.is_some() {
                HISTORY_KEPT
            } else {
                n.saturating_add(1).min(HISTORY_KEPT)
            };
            let ended = ctx.ask(async || ctx.store.records(name, fetch).await).await;
            let ended = match ended {
                // It hides no other job's.
                Err(Failure::Store(e @ Error::Corrupt { .. }, _)) if states.len() > 1 => {
                    remark(&format!("cannot read the records of `{name}`: {e}"));
                    continue;
                }
                ended => ended?,
            };
            // A run that ended between the two reads is in both.
            runs.retain(|r| {
                r.outcome != Outcome::Running || ended.iter().all(|e| e.run_id != r.run_id)
            });
            let mut ended: Vec<RunView> = ended.into_iter().map(RunView::from).collect();
            late_since_due(&mut ended, job);
            runs.extend(ended.into_iter().filter(wanted));
        }
        sort(&mut runs);
        runs.truncate(n);
    }
    Ok(runs)
}

/// Newest occurrence first; within an occurrence, the last attempt first.
fn sort(runs: &mut [RunView]) {
    runs.sort_by(|a, b| {
        (b.occurrence, b.attempt)
            .cmp(&(a.occurrence, a.attempt))
            .then_with(|| a.job.cmp(&b.job))
    });
}

pub(crate) fn render(runs: &[RunView], now: i64, with_job: bool) -> String {
    table(runs, now, with_job, true).render()
}

/// `when`: with the time since each occurrence.
pub(super) fn table(runs: &[RunView], now: i64, with_job: bool, when: bool) -> show::Table {
    let mut t = show::Table::new(&[
        "JOB",
        "OCCURRENCE",
        "WHEN",
        "OUTCOME",
        "EXIT",
        ">TRY",
        "TRIGGER",
        "INSTANCE",
        ">LATE",
        ">TOOK",
        "NOTE",
    ]);
    for r in runs {
        let duration = match (r.outcome, r.started_at) {
            (Outcome::Running, Some(t)) => format!("{} so far", took(now - t.0)),
            _ => r.duration_ms.map_or(String::new(), took),
        };
        let outcome = if r.count > 1 {
            format!("{} x{}", r.outcome, r.count)
        } else {
            r.outcome.to_string()
        };
        t.row([
            Cell::new(BOLD, if with_job { r.job.as_str() } else { "" }),
            show::instant(r.occurrence.0).into(),
            if when {
                relative(r.occurrence.0, now).into()
            } else {
                "".into()
            },
            Cell::new(style_of(r.outcome), outcome),
            exit(r).into(),
            if r.attempt == 0 {
                "".into()
            } else {
                r.attempt.to_string().into()
            },
            r.trigger.as_str().into(),
            r.instance.as_ref().map_or("", |i| i.as_str()).into(),
            r.lateness_ms.map_or(String::new(), took).into(),
            duration.into(),
            Cell::new(PLAIN, r.remarks()),
        ]);
    }
    t
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{
        model::{InstanceId, Trigger},
        view::Time,
    };

    pub(crate) const NOW: i64 = 1_795_187_561_318; // 2026-11-20T15:12:41.318Z

    pub(crate) fn run(at: i64, attempt: u32, outcome: Outcome) -> RunView {
        let ran = attempt > 0;
        RunView {
            run_id: ran.then(crate::model::RunId::random),
            job: JobName::new("draw"),
            occurrence: Time(at),
            trigger: Trigger::Schedule,
            attempt,
            fencing_token: None,
            instance: Some(InstanceId::new("web-1")),
            host: Some("web".into()),
            started_at: ran.then_some(Time(at + 4)),
            finished_at: ran.then_some(Time(at + 35)),
            lateness_ms: ran.then_some(4),
            duration_ms: ran.then_some(31),
            outcome,
            exit_code: (ran && outcome == Outcome::Succeeded).then_some(0),
            signal: None,
            output_tail: String::new(),
            output_truncated: false,
            error: None,
            cpu_ms: None,
            peak_memory_bytes: None,
            output_bytes: None,
            left_processes: None,
            count: 1,
            by: None,
        }
    }

    #[test]
    fn the_newest_occurrence_and_of_it_the_last_attempt_comes_first() {
        let mut runs = vec![
            run(NOW - 5_000, 1, Outcome::Failed),
            run(NOW - 9_000, 1, Outcome::Succeeded),
            run(NOW - 5_000, 2, Outcome::Running),
        ];
        sort(&mut runs);
        let order: Vec<_> = runs
            .iter()
            .map(|r| (r.occurrence.0 - NOW, r.attempt))
            .collect();
        assert_eq!(order, [(-5_000, 2), (-5_000, 1), (-9_000, 1)]);
    }

    #[test]
    fn a_line_per_attempt_with_all_that_tells_why() {
        let mut running = run(NOW - 2_318, 2, Outcome::Running);
        running.duration_ms = None;
        running.trigger = Trigger::Retry;
        let mut killed = run(NOW - 62_318, 1, Outcome::TimedOut);
        killed.signal = Some(libc::SIGKILL);
        killed.error = Some("timed out after 5 s".into());
        let mut missed = run(NOW - 122_318, 0, Outcome::Missed);
        missed.count = 3;
        missed.error = Some("overdue, and not caught up".into());
        let done = run(NOW - 182_318, 1, Outcome::Succeeded);
        let text = render(&[running, killed, missed, done], NOW, true);
        let text = anstream::adapter::strip_str(&text).to_string();
        assert_eq!(
            text,
            "JOB   OCCURRENCE            WHEN           OUTCOME    EXIT     TRY  TRIGGER   INSTANCE  LATE           TOOK  NOTE\n\
             draw  2026-11-20T15:12:39Z  2 s ago        running               2  retry     web-1     4 ms  2.31 s so far\n\
             draw  2026-11-20T15:11:39Z  1 min 2 s ago  timed_out  SIGKILL    1  schedule  web-1     4 ms          31 ms  timed out after 5 s\n\
             draw  2026-11-20T15:10:39Z  2 min 2 s ago  missed x3                schedule  web-1                          overdue, and not caught up\n\
             draw  2026-11-20T15:09:39Z  3 min 2 s ago  succeeded  0          1  schedule  web-1     4 ms          31 ms\n"
        );
    }
}
