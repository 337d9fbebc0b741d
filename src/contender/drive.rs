//! One driver per job takes the job's due occurrences in order, until none is left.

use std::{sync::Arc, time::Duration};

use tracing::{info, warn};

use super::{Ask, Contender, ContestEnd, Due};
use crate::{
    logic::{
        backoff,
        catch_up::Backlog,
        claim::{Answer, Claim, Missed, Target},
        contest::{JobState, Next, unfold},
        timetable,
    },
    model::{JobName, Occurrence, RunId},
    store::Reply,
};

/// Pause between two rounds of attempts while the store does not answer.
const AWAY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// The longest wait until a job is claimable before its driver checks again, in case no change wakes it.
const CLAIMABLE_RECHECK: Duration = Duration::from_millis(250);
/// The longest timer.
const LONGEST_TIMER: Duration = Duration::from_secs(3600);

impl Contender {
    /// Hands due occurrences to the drivers of their jobs. Returns at once.
    pub fn due(self: &Arc<Self>, due: Vec<Due>) {
        let mut drive = Vec::with_capacity(due.len());
        // Before the store's first answer nothing is planned, so nothing is due.
        let Some(now) = self.clock.now_ms() else {
            return;
        };
        {
            let mut jobs = self.lock();
            for d in due {
                let Some(e) = jobs.get_mut(&d.job) else {
                    continue;
                };
                let name = d.job.clone();
                if e.state.due(d, now) && !std::mem::replace(&mut e.driven, true) {
                    drive.push(name);
                }
            }
        }
        if self.slots.is_some() {
            // Shuffled, because the first to ask gets a slot first: it should not always be the same jobs.
            fastrand::shuffle(&mut drive);
        }
        for job in drive {
            self.tasks.spawn(self.clone().drive(job));
        }
    }

    /// Hands a backlog of due occurrences to the job's driver, after nobody looked for a while. `absent`: no instance
    /// was up. Returns at once.
    pub fn overdue(self: &Arc<Self>, job: &JobName, backlog: Backlog, absent: bool) {
        if let Some(now) = self.clock.now_ms() {
            self.state(job, |s| s.overdue(backlog, absent, now));
            self.start_driver(job);
        }
    }

    /// Starts the job's driver if it has none.
    pub(super) fn start_driver(self: &Arc<Self>, job: &JobName) {
        if self.entry(job, |e| !std::mem::replace(&mut e.driven, true)) == Some(true) {
            self.tasks.spawn(self.clone().drive(job.clone()));
        }
    }

    /// Handles a job's due occurrences in order, until none is left.
    async fn drive(self: Arc<Self>, job: JobName) {
        let mut undecided = 0;
        loop {
            let Some(now) = self.clock.now_ms() else {
                self.entry(&job, |e| e.driven = false);
                return;
            };
            // Subscribe before the lock is released, so that no change is missed.
            let next = self.entry(&job, |e| {
                let next = e.state.next(now);
                e.driven = !matches!(next, Next::Idle);
                (next, e.changed.next())
            });
            let Some((next, woken)) = next else { return };
            let (pause, woken) = match next {
                Next::Idle => return,
                Next::Wait => (CLAIMABLE_RECHECK, woken),
                Next::Unfold(definition, segments, newest) => {
                    let unfolded = {
                        let _turn = self.unfolding.acquire().await;
                        unfold(segments, &definition, now, newest)
                    };
                    self.state(&job, |s| s.unfolded(unfolded, now));
                    tokio::task::yield_now().await;
                    continue;
                }
                Next::Ask(claim) => {
                    if self.ask_for(&job, claim).await != ContestEnd::Undecided {
                        undecided = 0;
                        continue;
                    }
                    undecided += 1;
                    // What was sent may be granted: then asking again renews its lease.
                    let renew = self.entry(&job, |e| e.state.definition.lease.renew_every);
                    let most = AWAY.1.min(renew.unwrap_or(AWAY.1));
                    (backoff::nth(AWAY.0, undecided, most), woken)
                }
            };
            tokio::select! {
                () = woken => {}
                () = tokio::time::sleep(pause) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    async fn ask_for(self: &Arc<Self>, job: &JobName, ask: Ask) -> ContestEnd {
        let target = ask.target.clone();
        let ended = self.contest(job, ask).await;
        self.prepared
            .decided(job, &target, matches!(ended, ContestEnd::Won(_)));
        let draining = self.draining();
        let now = self.shown_ms();
        self.state(job, |s| s.ended(&target, &ended, draining, now));
        ended
    }

    /// Learns what became of the claims of a removed or disabled job that have no answer: what was granted is run.
    pub(super) async fn find_grants(self: Arc<Self>, job: JobName, asks: Vec<Ask>) {
        for ask in asks {
            let mut undecided = 0;
            // If the job is back, registering it finds them.
            while !self.has_enabled(&job)
                && self.contest(&job, ask.clone()).await == ContestEnd::Undecided
            {
                undecided += 1;
                tokio::select! {
                    () = tokio::time::sleep(backoff::nth(AWAY.0, undecided, AWAY.1)) => {}
                    () = self.stop.cancelled() => return,
                }
            }
        }
    }

    /// Has the store record the occurrences of a removed or disabled job that are undecided up to `now`.
    pub(super) async fn give_up(self: Arc<Self>, job: JobState, now: Occurrence) {
        let schedules = job.definition.schedules.clone();
        let owed = {
            let _turn = self.unfolding.acquire().await;
            job.given_up(&self.me, now, RunId::random())
        };
        let name = job.definition.name.clone();
        drop(job);
        let Some((mut claim, after_ms)) = owed else {
            return self.gave_up(&name);
        };
        if let Target::Scheduled(at) = claim.target {
            let last = std::iter::once(Missed::one(at));
            let all = claim.missed.iter().copied().chain(last).collect();
            self.gone_now(&name, |gone| gone.absence.owed = all);
        }
        let mut failures = 0;
        loop {
            // Another instance that still has the job may start the occurrence until then.
            let now = self.clock.now_ms();
            let early = now.map_or(1000, |now| after_ms.saturating_sub(now));
            let pause = if early > 0 {
                Duration::from_millis(early as u64).min(LONGEST_TIMER)
            } else {
                if self.has_enabled(&claim.job) {
                    // The job is back: registering it handles this.
                    return;
                }
                match self.batcher.claim(claim.clone()).await {
                    Ok(reply) if reply.value == Answer::InDoubt => self.note_clock(&reply),
                    Ok(Reply {
                        value: Answer::Behind { newest, early },
                        ..
                    }) => {
                        let left = |m| timetable::undecided(&schedules, newest, &early, m);
                        claim.missed = claim.missed.into_iter().flat_map(left).collect();
                        continue;
                    }
                    Ok(reply) => {
                        self.note_clock(&reply);
                        self.gave_up(&name);
                        return self.note_given_up(&claim, reply.value);
                    }
                    Err(e) if !e.is_transient() => {
                        warn!(job = %claim.job, error = %e, "cannot record the undecided occurrences of the removed \
                        job as missed");
                        return self.gave_up(&name);
                    }
                    Err(_) => {}
                }
                failures += 1;
                backoff::nth(AWAY.0, failures, AWAY.1)
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    fn note_given_up(&self, claim: &Claim, answer: Answer) {
        // Otherwise another instance decided it, or the store lost it with its data.
        if let (Answer::Recorded { outcome, reason }, Target::Scheduled(at)) =
            (answer, &claim.target)
        {
            info!(job = %claim.job, occurrence = %at, %outcome, reason, "not run");
            self.journal(&claim.job, *at, outcome.as_str(), reason);
        }
    }
}
