//! One flight for each occurrence, however many ask for it: the contest's steps, carried out.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, futures::OwnedNotified};
use tracing::{debug, info, warn};

use super::{ClaimPermit, Contender, Granted};
use crate::{
    clock::Boottime,
    logic::{
        claim::{Answer, Claim, Target},
        contest::{AnswerInfo, Ask, Contest, Effect, Ended, Slot, Step, Subject, View},
    },
    model::{JobName, Occurrence, Outcome, RunId},
};

impl Contender {
    /// One flight for each occurrence, however many ask for it.
    pub fn contest(self: &Arc<Self>, job: &JobName, ask: Ask) -> BoxFuture<'static, Ended> {
        // `before` of a manual trigger differs between callers and must not make two flights of one.
        // Nor must whoever looks at a decided one join those that end when they find it decided.
        let key = (job.clone(), ask.target.id(), ask.next_attempt);
        let this = self.clone();
        let rank = self.rank(job, &ask.target, None);
        let (contest, first) = Contest::new(ask, rank);
        let flight = Flight {
            contender: self.clone(),
            job: job.clone(),
            contest,
            slot: None,
            permit: None,
            woken: None,
        };
        Box::pin(async move { this.flights.work(&key, flight.fly(first)).await })
    }
}

struct Flight {
    contender: Arc<Contender>,
    job: JobName,
    contest: Contest,
    /// Whoever waits for another run, or for a retry, has none.
    slot: Option<OwnedSemaphorePermit>,
    /// Held while the store is asked, and by a grant.
    permit: Option<ClaimPermit>,
    /// Ends with the next change after the last look.
    woken: Option<OwnedNotified>,
}

impl Flight {
    async fn fly(mut self, first: Step) -> Ended {
        let contender = self.contender.clone();
        let mut step = first;
        loop {
            step = match step {
                Step::Look => self.look(),
                Step::Pause(time) => {
                    tokio::select! {
                        () = tokio::time::sleep(time) => {}
                        () = contender.stop.cancelled() => {}
                    }
                    Step::Look
                }
                Step::Rest(time) => {
                    self.slot = None;
                    let woken = self.woken.take();
                    tokio::select! {
                        () = tokio::time::sleep(time) => {}
                        () = changed(woken) => {}
                        () = contender.stop.cancelled() => {}
                    }
                    Step::Look
                }
                Step::TakeSlot(time) => {
                    let Some(slots) = contender.slots.clone() else {
                        return Ended::Undecided;
                    };
                    self.slot = slots.clone().try_acquire_owned().ok();
                    if self.slot.is_none() {
                        let woken = self.woken.take();
                        tokio::select! {
                            permit = slots.acquire_owned() => self.slot = permit.ok(),
                            () = tokio::time::sleep(time) => {}
                            () = changed(woken) => {}
                            () = contender.stop.cancelled() => return Ended::Draining,
                        }
                    }
                    // It may be decided, removed or drained by now.
                    Step::Look
                }
                Step::TakePermit => {
                    let woken = self.woken.take();
                    tokio::select! {
                        biased;
                        permit = contender.batcher.permit() => self.permit = permit,
                        () = changed(woken) => {}
                        () = contender.stop.cancelled() => {}
                    }
                    Step::Look
                }
                Step::FindGrant(run) => {
                    let granted = self.find(run).await;
                    let stopping = contender.stop.is_cancelled();
                    self.see(None, |c, v, effects| c.found(granted, stopping, v, effects))
                }
                Step::Ask(claim) => self.ask(*claim).await,
                Step::First(at) => {
                    // That one needs the slot.
                    self.slot = None;
                    contender.contest(&self.job, Ask::next_attempt(at)).await;
                    self.contest.first_was_decided()
                }
                Step::End(ended) => return ended,
            };
        }
    }

    fn look(&mut self) -> Step {
        let step = self.see(None, Contest::look);
        if !matches!(step, Step::Ask(_)) {
            self.permit = None;
        }
        step
    }

    /// One step of the contest, with what it sees now, and what follows from it. `sent`: when the command left that was
    /// answered.
    fn see(
        &mut self,
        sent: Option<Boottime>,
        decide: impl FnOnce(&mut Contest, &mut View<'_>, &mut Vec<Effect>) -> Step,
    ) -> Step {
        let contender = self.contender.clone();
        let (now, target) = (Boottime::now(), self.contest.ask.target.clone());
        let (belief, halt) = (contender.clock.snapshot(), contender.halt());
        let lapsed = contender.watches.lapsed(&self.job, &target, now);
        let fresh = || {
            let prepared = contender.prepared.run_id(&self.job, &target);
            prepared.unwrap_or_else(RunId::random)
        };
        let slot = match (&contender.slots, &self.slot) {
            (None, _) => Slot::Needless,
            (Some(_), Some(_)) => Slot::Held,
            (Some(_), None) => Slot::Missing,
        };
        let permit = self.permit.is_some();
        let view = |subject| View {
            me: &contender.me,
            now,
            clock: &belief,
            subject,
            halt,
            slot,
            permit,
            lapsed,
            fresh: &fresh,
        };
        let mut effects = vec![];
        let mut jobs = contender.lock();
        let step = match jobs.get_mut(&self.job) {
            Some(e) => {
                if sent.is_none() {
                    // Subscribed before the lock is given back: nothing that changes is slept through.
                    self.woken = Some(e.changed.next());
                }
                let before = e.state.changes();
                let mut view = view(Subject::Here(&mut e.state));
                let step = decide(&mut self.contest, &mut view, &mut effects);
                contender.tell(e, before);
                step
            }
            None => {
                let mut removed = contender.removed();
                let account = removed.entry(self.job.clone()).or_default();
                let mut view = view(Subject::Removed(account));
                let step = decide(&mut self.contest, &mut view, &mut effects);
                if account.is_closed() {
                    removed.remove(&self.job);
                }
                step
            }
        };
        drop(jobs);
        for effect in effects {
            self.carry_out(effect, sent);
        }
        step
    }

    fn carry_out(&mut self, effect: Effect, sent: Option<Boottime>) {
        let contender = self.contender.clone();
        match effect {
            Effect::Note(at, decision, detail) => {
                let at = at.unwrap_or(match self.contest.ask.target {
                    Target::Scheduled(at) => at,
                    Target::Manual { .. } => Occurrence(contender.shown_ms()),
                });
                contender.journal(&self.job, at, decision, detail);
            }
            Effect::Unwatch(at) => contender.watches.drop_one(&self.job, at),
            Effect::Start(win) => (contender.start)(Granted {
                job: win.job,
                run: win.run,
                // The command that was answered, however often and when this was asked before: by asking again with
                // the same nonce it renewed the lease.
                sent: sent.unwrap_or(Boottime(0)),
                start_by: win.start_by,
                permit: self.permit.take(),
                too_late: win.too_late,
                slot: self.slot.take(),
            }),
            Effect::NotRun(outcome, reason) => {
                let (job, at) = (&self.job, self.at());
                match outcome {
                    Outcome::Missed | Outcome::Unknown => {
                        warn!(%job, occurrence = %at, %outcome, reason, "not run");
                    }
                    _ => info!(%job, occurrence = %at, %outcome, reason, "not run"),
                }
            }
            Effect::CannotClaim(error) => {
                warn!(job = %self.job, occurrence = %self.at(), error, "cannot claim; trying again until it works");
            }
        }
    }

    async fn ask(&mut self, claim: Claim) -> Step {
        let contender = self.contender.clone();
        let definition = claim.definition.clone();
        let reply = match contender.batcher.claim(claim).await {
            Ok(reply) => reply,
            Err(e) => {
                self.permit = None;
                let retry = &contender.retry;
                let pause = |n| retry.pause(n, fastrand::f64());
                let (error, transient) = (e.to_string(), e.is_transient());
                return self.see(None, |contest, v, effects| {
                    contest.failed(&error, transient, retry.attempts, pause, v, effects)
                });
            }
        };
        contender.note_clock(&reply);
        let mut info = AnswerInfo {
            store_ms: reply.now_us / 1000,
            lapsed: false,
            expires_in: std::time::Duration::MAX,
        };
        if let Answer::Running(open) | Answer::Blocked(open) = &reply.value {
            if open.run.definition != definition {
                debug!(job = %self.job, holder = %open.run.instance, "runs with another definition of this job");
            }
            info.lapsed = contender.watch_lease(&self.job, open, reply.received);
            info.expires_in =
                contender
                    .watches
                    .expiry(&self.job, open.run.occurrence, Boottime::now());
        }
        let step = self.see(Some(reply.sent), |contest, v, effects| {
            contest.answered(reply.value, info, v, effects)
        });
        // Only a grant keeps it.
        self.permit = None;
        step
    }

    /// Whether `run`, whose claim has no answer yet, was granted; None: the store is away.
    async fn find(&self, run: RunId) -> Option<bool> {
        let job = std::slice::from_ref(&self.job);
        let reply = self.contender.store.observe(job).await.ok()?;
        let state = reply.value.into_iter().next().flatten();
        Some(state.is_some_and(|s| s.held_by(run).is_some()))
    }

    fn at(&self) -> String {
        match &self.contest.ask.target {
            Target::Scheduled(at) => at.to_string(),
            Target::Manual { key, .. } => format!("manual {key}"),
        }
    }
}

/// For ever, when nothing is there that could change.
async fn changed(woken: Option<OwnedNotified>) {
    match woken {
        Some(woken) => woken.await,
        None => std::future::pending().await,
    }
}
