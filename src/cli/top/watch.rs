//! What `soloist top` asks of the store: the fleet now and then, jobs when hints say that they have changed and all of
//! them now and then, because hints may be lost, and of the job that is looked at its records and its output.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::{
    sync::{broadcast::error::RecvError, mpsc::UnboundedSender, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use super::state::{Found, HISTORY, News, RECENT};
use crate::{
    cli::{Context, failure::remedy, logs::POLL},
    clock::Boottime,
    logic::claim::State,
    model::{JobName, RunId},
    store::{self, Changed, observe_each, records_each},
    view,
};

type To = UnboundedSender<News>;

/// The time between two looks at the fleet. Once in so many of them it asks what is wrong with the store, and what the
/// notifier noted.
const FLEET_AGAIN: Duration = Duration::from_secs(2);
const SELDOM: u32 = 15;
/// The time between two looks at all jobs, with hints of what has changed and without.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const LOOK_WITHOUT_HINTS: Duration = Duration::from_secs(2);
/// Hints that come together are looked at together.
const GATHER: Duration = Duration::from_millis(150);
/// How many jobs are looked at together.
const LOOK_AT_ONCE: usize = 200;
/// The pause after the store did not answer.
const AFTER_FAILURE: Duration = Duration::from_secs(1);

/// What of one job is looked at.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Wanted {
    pub job: Option<JobName>,
    pub run: Option<RunId>,
    /// The next byte of its output.
    pub at: u64,
}

/// Looks at the fleet for as long as it is polled.
pub(super) async fn fleet(ctx: &Context, to: &To) {
    for n in 0_u32.. {
        match ctx.store.heartbeat(None).await {
            Ok(reply) => {
                let local_ms = (reply.received.0 / 1_000_000) as i64;
                let _ = to.send(News::Fleet {
                    shown: reply.now_us.div_euclid(1000),
                    fleet: Box::new(reply.value),
                    local_ms,
                });
            }
            Err(e) => {
                away(ctx, to, &e);
                sleep(AFTER_FAILURE).await;
                continue;
            }
        }
        if n.is_multiple_of(SELDOM) {
            if let Ok(problems) = ctx.store.check().await {
                let problems = problems.into_iter().map(|p| p.text).collect();
                let _ = to.send(News::Problems(problems));
            }
            noted(ctx, to).await;
        }
        sleep(FLEET_AGAIN).await;
    }
}

/// Tells since when jobs have been without a success, as far as the notifier noted that.
async fn noted(ctx: &Context, to: &To) {
    let mut jobs = ctx.config.jobs.values();
    let watched = jobs.any(|job| job.alarms.expect_success_within.is_some());
    if ctx.config.channels.is_empty() || !watched {
        return;
    }
    if let Ok(said) = ctx.store.notices(true).await {
        let since = |job: &JobName| Some((job.clone(), view::noted(&said.value, job)?));
        let all = ctx.config.jobs.keys().filter_map(since).collect();
        let _ = to.send(News::Noted(all));
    }
}

fn away(ctx: &Context, to: &To, e: &store::Error) {
    let what = remedy(e, &format!("the store that {} names", ctx.path.display()));
    let what = what.map_or(String::new(), |what| format!("; {what}"));
    let _ = to.send(News::Away(format!("{e}{what}")));
}

/// Looks at the jobs for as long as it is polled.
pub(super) async fn jobs(ctx: &Context, to: &To, mut wanted: watch::Receiver<Wanted>) {
    let mut hints = ctx.store.changes();
    let mut hinted = true;
    let mut known: BTreeMap<JobName, State> = BTreeMap::new();
    let all = || ctx.config.jobs.keys().cloned();
    let mut next_round = Instant::now();
    let mut some: BTreeSet<JobName> = BTreeSet::new();
    loop {
        if Instant::now() >= next_round {
            some.extend(all());
            next_round = Instant::now()
                + if hinted {
                    LOOK_AGAIN
                } else {
                    LOOK_WITHOUT_HINTS
                };
        }
        while let Some(first) = some.first().cloned() {
            let names: Vec<JobName> = some.range(first..).take(LOOK_AT_ONCE).cloned().collect();
            match look(ctx, to, &names, &mut known).await {
                Ok(()) => some.retain(|name| !names.contains(name)),
                Err(e) => {
                    away(ctx, to, &e);
                    sleep(AFTER_FAILURE).await;
                }
            }
        }
        tokio::select! {
            hint = hints.recv(), if hinted => {
                let until = Instant::now() + GATHER;
                let mut next = Some(hint);
                while let Some(hint) = next.take() {
                    match hint {
                        Ok(Changed::Jobs(names)) => some.extend(names.iter().cloned()),
                        Ok(Changed::Any) | Err(RecvError::Lagged(_)) => some.extend(all()),
                        Err(RecvError::Closed) => {
                            hinted = false;
                            break;
                        }
                    }
                    next = tokio::time::timeout_at(until, hints.recv()).await.ok();
                }
                some.retain(|name| ctx.config.jobs.contains_key(name));
            }
            // Something was done to it, or it is looked at anew.
            Ok(()) = wanted.changed() => some.extend(wanted.borrow_and_update().job.clone()),
            () = sleep_until(next_round) => {}
        }
    }
}

/// Looks at some jobs, and tells what it found of those that have changed.
async fn look(
    ctx: &Context,
    to: &To,
    names: &[JobName],
    known: &mut BTreeMap<JobName, State>,
) -> Result<(), store::Error> {
    let reply = observe_each(&*ctx.store, names).await?;
    let (mut found, mut records) = (vec![], vec![]);
    for (name, state) in names.iter().zip(reply.value) {
        let mut state = state.map_err(|e| e.to_string());
        if let Ok(Some(st)) = &mut state {
            // The keys of decided triggers may be many, and are not shown.
            st.triggered.clear();
            let before = known.get(name);
            if before == Some(st) && st.open.is_empty() {
                continue;
            }
            if before.is_none_or(|before| may_have_records(before, st)) {
                records.push(found.len());
            }
        }
        found.push(Found {
            job: name.clone(),
            state,
            records: None,
        });
    }
    let jobs: Vec<JobName> = records.iter().map(|at| found[*at].job.clone()).collect();
    for (of, newest) in records_each(&*ctx.store, &jobs, RECENT).await? {
        found[records[of]].records = Some(newest);
    }
    for f in &found {
        match &f.state {
            Ok(Some(st)) => drop(known.insert(f.job.clone(), st.clone())),
            _ => drop(known.remove(&f.job)),
        }
    }
    let _ = to.send(News::Found {
        found,
        incarnation: reply.incarnation,
    });
    Ok(())
}

fn may_have_records(before: &State, after: &State) -> bool {
    let open = |st: &State| -> Vec<_> {
        let all = st.open.iter();
        all.map(|o| (o.run.id, o.next_attempt)).collect()
    };
    before.newest != after.newest || before.last != after.last || open(before) != open(after)
}

/// Reads the records and the output of what is looked at, for as long as it is polled.
pub(super) async fn job(ctx: &Context, to: &To, mut wanted: watch::Receiver<Wanted>) {
    // As far as the output of this run was read.
    let (mut run, mut at) = (None, 0);
    loop {
        let now = wanted.borrow_and_update().clone();
        if run != now.run {
            (run, at) = (now.run, now.at);
        }
        let Some(job) = now.job else {
            if wanted.changed().await.is_err() {
                return std::future::pending().await;
            }
            continue;
        };
        match ctx.store.records(&job, HISTORY).await {
            Ok(records) => drop(to.send(News::History(job.clone(), records))),
            Err(store::Error::Corrupt { .. }) => {}
            Err(e) => away(ctx, to, &e),
        }
        // Until something else is looked at.
        tokio::select! {
            () = follow(ctx, to, &job, run, &mut at) => {}
            changed = wanted.changed() => if changed.is_err() {
                return std::future::pending().await;
            },
        }
    }
}

/// Follows the output of a run; ends when its records should be read again.
async fn follow(ctx: &Context, to: &To, job: &JobName, run: Option<RunId>, at: &mut u64) {
    let until = Boottime::now();
    let mut done = false;
    while Boottime::now().since(until) < LOOK_AGAIN {
        if let Some(run) = run.filter(|_| !done) {
            match timeout(LOOK_AGAIN, ctx.store.output(job, run, *at)).await {
                Ok(Ok(output)) => {
                    let more = output.as_ref().is_some_and(|o| o.more);
                    if let Some(o) = &output {
                        *at = (*at).max(o.from).saturating_add(o.data.len() as u64);
                        done = o.done;
                    }
                    let _ = to.send(News::Output(run, output));
                    if more {
                        continue;
                    }
                }
                Ok(Err(store::Error::Corrupt { .. })) => done = true,
                Ok(Err(e)) => {
                    away(ctx, to, &e);
                    sleep(AFTER_FAILURE).await;
                }
                Err(_) => {}
            }
        }
        sleep(POLL * 2).await;
    }
}
