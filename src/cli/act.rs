//! `pause`, `resume`, `skip`, `rewind`, `cancel`: commands that act on one job, on the whole fleet.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{Context, Exit, Failure, logs, millis, show};
use crate::{
    acts::{self, planned},
    logic::claim::{Control, Controlled, State},
    model::{JobName, Occurrence, RunId},
    view::{self, RunView, Time},
};

#[derive(Debug, Args)]
pub(super) struct JobOnly {
    /// Name of the job
    job: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
`--until` is read by the store's clock, or, while instances do not believe that clock, by the time that they use \
instead.

Occurrences during the pause are recorded as skipped and never run later. A running command continues: `soloist \
cancel` ends it. A retry, or the rerun after a crash, waits until the pause is over; `soloist cancel` drops it. \
Triggers still work.

Examples:
  soloist pause backup --until 2h --reason \"moving the disks\"
  soloist pause backup --until 2026-12-24T18:00      in the job's time zone
  soloist pause backup                               until `soloist resume backup`")]
pub(super) struct Pause {
    /// Name of the job
    job: String,
    /// RFC 3339, a local date and time in the job's time zone, or a duration as `2h` or `1d12h`
    /// [default: until resumed]
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Shown with the job, and in the record of each skipped occurrence
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Skip {
    /// Name of the job
    job: String,
    /// How many; 0 takes an earlier request back
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1)]
    number: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
After the store's clock was ahead for a while, a job may count future occurrences as decided: it does not start \
until they are past, as `soloist status` says. This command makes the job count only past occurrences as decided. \
Occurrences that ran before their time stay decided, and the command lists them.

Examples:
  soloist rewind backup")]
pub(super) struct Rewind {
    /// Name of the job
    job: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct Rewound<'a> {
    job: &'a JobName,
    /// False: it counted no future occurrence as decided.
    changed: bool,
    /// Everything up to this instant counted as decided.
    was: Time,
    /// Occurrences that ran before their time; they do not run again.
    ran: Vec<Time>,
}

#[derive(Debug, Serialize)]
pub(super) struct Paused {
    job: JobName,
    paused: bool,
    until: Option<Time>,
    reason: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Resumed {
    job: JobName,
    paused: bool,
    /// False: it was not paused.
    changed: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct Skipped {
    job: JobName,
    skip: u32,
    /// The first of them.
    occurrences: Vec<Time>,
}

#[derive(Debug, Serialize)]
struct Cancelled<'a> {
    job: &'a JobName,
    /// The runs that were asked to end.
    runs: Vec<RunView>,
    /// They all have ended.
    ended: bool,
    /// Waiting attempts that were cancelled.
    dropped: usize,
}

pub(super) async fn control(
    ctx: &Context,
    job: &JobName,
    what: Control,
) -> Result<Controlled, Failure> {
    let reply = ctx.asker().control(job, &what.by(&acts::me())).await;
    Ok(reply.map_err(|r| ctx.refused(r))?.value)
}

pub(super) async fn pause(ctx: &Context, args: &Pause) -> Result<Exit, Failure> {
    if args.until.is_some() {
        ctx.doubted(ctx.fleet().await?.1);
    }
    let until = args.until.as_deref().map(|text| ("--until", text));
    let (answer, text) = paused(ctx, &args.job, until, args.reason.clone()).await?;
    ctx.out.say(&answer, || text + "\n")?;
    Ok(Exit::Ok)
}

/// `until`: the name of the argument, and its text.
pub(super) async fn paused(
    ctx: &Context,
    job: &str,
    until: Option<(&str, &str)>,
    reason: Option<String>,
) -> Result<(Paused, String), Failure> {
    let (name, job) = ctx.known_job(job).await?;
    let now = ctx.fleet().await?.1.now;
    let zone = job.map_or("UTC", |j| &*j.timezone);
    let until = until.map(|(argument, text)| acts::until(argument, text, zone, now));
    let until = until.transpose().map_err(|r| ctx.refused(r))?;
    let what = Control::Pause {
        until,
        reason: reason.clone(),
    };
    let _ = control(ctx, &name, what).await?;
    let text = acts::paused(&name, until, now);
    let answer = Paused {
        job: name,
        paused: true,
        until: until.map(Time),
        reason,
    };
    Ok((answer, text))
}

pub(super) async fn resume(ctx: &Context, args: &JobOnly) -> Result<Exit, Failure> {
    let (answer, text) = resumed(ctx, &args.job).await?;
    ctx.out.say(&answer, || text + "\n")?;
    Ok(Exit::Ok)
}

pub(super) async fn resumed(ctx: &Context, job: &str) -> Result<(Resumed, String), Failure> {
    let (name, job) = ctx.known_job(job).await?;
    let (_, clock) = ctx.fleet().await?;
    let changed = control(ctx, &name, Control::Resume).await? == Controlled::Done;
    let text = acts::resumed(&name, job, changed, clock);
    let answer = Resumed {
        job: name,
        paused: false,
        changed,
    };
    Ok((answer, text))
}

pub(super) async fn skip(ctx: &Context, args: &Skip) -> Result<Exit, Failure> {
    let (answer, text) = skipped(ctx, &args.job, args.number).await?;
    ctx.out.say(&answer, || text + "\n")?;
    Ok(Exit::Ok)
}

pub(super) async fn skipped(
    ctx: &Context,
    job: &str,
    count: u32,
) -> Result<(Skipped, String), Failure> {
    let (name, job) = ctx.known_job(job).await?;
    acts::skippable(&name, job, count).map_err(|r| ctx.refused(r))?;
    let (_, clock) = ctx.fleet().await?;
    let _ = control(ctx, &name, Control::Skip { count }).await?;
    let reply = ctx.state(&name).await?;
    let now = clock.right(reply.now_us / 1000);
    // A pause skips its occurrences before `skip` counts: while a job is paused, nobody can say which ones `skip` will
    // hit.
    let paused = reply
        .value
        .as_ref()
        .is_some_and(|st| view::paused(st, now).is_some());
    let list = if paused {
        vec![]
    } else {
        planned(job, now, count.min(5) as usize)
    };
    let text = acts::skips(&name, count, &list);
    let answer = Skipped {
        job: name,
        skip: count,
        occurrences: list.into_iter().map(Time::from).collect(),
    };
    Ok((answer, text))
}

pub(super) async fn rewind(ctx: &Context, args: &Rewind) -> Result<Exit, Failure> {
    let (name, job) = ctx.known_job(&args.job).await?;
    let (fleet, clock) = ctx.fleet().await?;
    let shown = clock.now;
    // If no instance is up to check the store's clock, only this host's clock can.
    let alone = fleet.instances.values().all(|i| clock.silent(i));
    let doubt = match clock.doubt_ms {
        Some(ahead) => Some(format!(
            "instances measure that it is {}",
            show::apart(ahead)
        )),
        None => ctx.apart(clock).filter(|_| alone).map(|ahead| {
            format!(
                "no instance is up, and compared with this host's clock it is {}",
                show::apart(ahead)
            )
        }),
    };
    if let Some(why) = doubt {
        return Err(Failure::TryAgain {
            message: format!("the store's clock is in doubt: {why}"),
            hint: Some(
                "correct the clock of the store's host first, then rewind the job".to_owned(),
            ),
        });
    }
    let before = ctx.state(&name).await?.value.unwrap_or_default();
    let history = ctx
        .ask(async || ctx.store.history(&name, crate::store::HISTORY_KEPT).await)
        .await?;
    let ran = history.iter().filter(|r| r.run_id.is_some());
    let ran: Vec<Occurrence> = ran
        .map(|r| r.occurrence)
        .filter(|at| at.0 > shown)
        .collect();
    let changed = control(ctx, &name, Control::Rewind { ran }).await? == Controlled::Done;
    let reply = ctx.state(&name).await?;
    let now = reply.now_us / 1000;
    let early = reply.value.unwrap_or_default().early;
    let answer = Rewound {
        job: &name,
        changed,
        was: Time(before.newest.max(before.since)),
        ran: early.iter().copied().map(Time::from).collect(),
    };
    ctx.out.say(&answer, || {
        if !changed {
            return format!("`{name}` counts no future occurrence as decided: nothing to rewind\n");
        }
        let mut text = format!(
            "`{name}` counted everything up to {} as decided; it now counts only past occurrences",
            show::instant(answer.was.0)
        );
        if let Some(next) = planned(job, now, 1).first() {
            text.push_str(&format!("; next {}", show::relative(next.0, now)));
        }
        text.push('\n');
        if let Some(last) = early.last() {
            let shown: Vec<String> = early.iter().map(|o| show::instant(o.0)).collect();
            text.push_str(&format!(
                "these occurrences ran before their time and do not run again: {}\n\
                 runs before {} get smaller fencing tokens than those had: a system that checks tokens refuses them\n",
                shown.join(", "),
                show::instant(last.0)
            ));
        }
        text
    })?;
    Ok(Exit::Ok)
}

pub(super) async fn cancel(ctx: &Context, args: &JobOnly) -> Result<Exit, Failure> {
    let (name, job) = ctx.known_job(&args.job).await?;
    let before = ctx.state(&name).await?.value.unwrap_or_default();
    let dropped = before
        .open
        .iter()
        .filter(|o| o.next_attempt.is_some())
        .count();
    let asked = match control(ctx, &name, Control::Cancel).await? {
        Controlled::Stopping(runs) => runs,
        _ => vec![],
    };
    // The instance learns of the request with its next renewal at the latest; then the command has its grace to end.
    let patience = job.map_or(Duration::from_secs(5), |j| {
        (j.grace + j.lease.renew_every).min(Duration::from_secs(20)) + Duration::from_secs(1)
    });
    let polls = (millis(patience) / 100).max(1);
    let mut runs = asked_runs(&name, &before, &asked);
    let mut ended = asked.is_empty();
    for _ in 0..polls {
        if ended {
            break;
        }
        let state = ctx.state(&name).await?.value.unwrap_or_default();
        for run in asked_runs(&name, &state, &asked) {
            if !runs.iter().any(|r| r.run_id == run.run_id) {
                runs.push(run);
            }
        }
        ended = !asked.iter().any(|r| state.held_by(*r).is_some());
        if !ended {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    if ended && !asked.is_empty() {
        let history = ctx
            .ask(async || ctx.store.records(&name, crate::store::HISTORY_KEPT).await)
            .await?;
        for run in &mut runs {
            if let Some(r) = history.iter().find(|r| r.run_id == run.run_id) {
                *run = r.clone().into();
            }
        }
        if ctx.out.json {
            logs::fill(ctx, &mut runs).await?;
        }
    }
    let answer = Cancelled {
        job: &name,
        runs,
        ended,
        dropped,
    };
    ctx.out.say(&answer, || cancelled(&answer))?;
    Ok(Exit::Ok)
}

fn asked_runs(job: &JobName, state: &State, asked: &[RunId]) -> Vec<RunView> {
    state
        .open
        .iter()
        .filter(|o| asked.contains(&o.run.id))
        .map(|o| RunView::running(job, o))
        .collect()
}

fn cancelled(c: &Cancelled) -> String {
    let job = c.job;
    let mut text = String::new();
    for r in &c.runs {
        let on = r.instance.as_ref();
        let on = on.map_or("an instance".to_owned(), |i| show::line(i.as_str()));
        let of = show::instant(r.occurrence.0);
        text.push_str(&if c.ended {
            format!("`{job}` of {of} on {on} has ended: {}\n", r.outcome)
        } else {
            format!("`{job}` of {of} on {on} was asked to end, and is still running\n")
        });
    }
    if c.dropped > 0 {
        text.push_str(&format!(
            "`{job}`: cancelled {}\n",
            show::count(c.dropped, "waiting attempt")
        ));
    }
    if text.is_empty() {
        text = format!("no run of `{job}` is active\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancel_says_which_runs_ended_and_which_not() {
        use super::super::history::tests::run;
        use crate::model::Outcome;
        let name = JobName::new("draw");
        let mut c = Cancelled {
            job: &name,
            runs: vec![run(1_795_233_600_000, 1, Outcome::Cancelled)],
            ended: true,
            dropped: 0,
        };
        assert_eq!(
            cancelled(&c),
            "`draw` of 2026-11-21T04:00:00Z on web-1 has ended: cancelled\n"
        );
        c.ended = false;
        assert_eq!(
            cancelled(&c),
            "`draw` of 2026-11-21T04:00:00Z on web-1 was asked to end, and is still running\n"
        );
        // Whatever the store has for a name.
        c.runs[0].instance = Some(crate::model::InstanceId::new("a\nb\x1b[30m"));
        assert_eq!(
            cancelled(&c),
            "`draw` of 2026-11-21T04:00:00Z on a\\nb\\x1b[30m was asked to end, and is still running\n"
        );
        c.runs.clear();
        c.dropped = 1;
        assert_eq!(cancelled(&c), "`draw`: cancelled 1 waiting attempt\n");
        c.dropped = 0;
        assert_eq!(cancelled(&c), "no run of `draw` is active\n");
    }
}
