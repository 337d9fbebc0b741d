//! Carries out the steps of a contest: one flight for each occurrence, however many callers ask for it.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, futures::OwnedNotified};
use tracing::{debug, info, warn};

use super::{ClaimPermit, Contender, Granted};
use crate::{
    clock::Boottime,
    last_will::{self, Claimed},
    logic::{
        claim::{Answer, Claim, Target},
        contest::{
            AnswerInfo, Ask, Contest, ContestEnd, Effect, JobState, Slot, Step, Subject, View,
        },
        delays::Delays,
        jitter::start_at_ms,
    },
    model::{JobName, Occurrence, Outcome, RunId, Wait},
    store,
};

impl Contender {
    /// Contests an occurrence: one flight for each, however many callers ask for it.
    pub fn contest(self: &Arc<Self>, job: &JobName, ask: Ask) -> BoxFuture<'static, ContestEnd> {
        // `before` of a manual trigger differs between callers: it must not lead to two flights. Nor may a caller that
        // examines a decided occurrence join a flight that ends as soon as it finds it decided.
        let key = (job.clone(), ask.target.id(), ask.next_attempt);
        let this = self.clone();
        let rank = self.rank(job, &ask.target, None);
        let waits = self.waited(job, &ask);
        let at = match &ask.target {
            Target::Scheduled(at) => Some(*at),
            Target::Manual { key, .. } => self.state(job, |s| s.planned_never(key)).flatten(),
        };
        let (contest, first) = Contest::new(ask, rank);
        let flight = Flight {
            contender: self.clone(),
            job: job.clone(),
            contest,
            at,
            slot: None,
            permit: None,
            in_will: None,
            woken: None,
            contradicted: 0,
            waits,
            lapsed: false,
        };
        Box::pin(async move { this.flights.work(&key, flight.fly(first)).await })
    }

    /// What an occurrence has waited for before this contest.
    fn waited(&self, job: &JobName, ask: &Ask) -> Delays {
        let at = match &ask.target {
            Target::Scheduled(at) => *at,
            Target::Manual { key, .. } => return self.trigger_waited(job, key),
        };
        let now = self.shown_ms();
        let of = |s: &mut JobState| (s.definition.clone(), s.away_until(at, now));
        let Some((definition, away_until)) = self.state(job, of) else {
            return Delays::default();
        };
        let (schedules, jitter) = (&definition.schedules, definition.jitter);
        let meant = start_at_ms(job.as_str(), schedules, at, jitter).saturating_sub(at.0);
        let since = |ms: i64| ms.saturating_sub(at.0);
        Delays::before(since(now), meant, ask.trigger, since(away_until))
    }

    /// The same of a trigger: first for an instance, and then for those before it.
    fn trigger_waited(&self, job: &JobName, key: &str) -> Delays {
        let now = Boottime::now();
        let of = |s: &mut JobState| {
            let (at, here) = (s.planned_never(key)?, s.trigger_waits(key, now)?);
            Some((at, here, s.is_troubled()))
        };
        let mut waits = Delays::default();
        if let Some((at, here, away)) = self.state(job, of).flatten() {
            let all = self.shown_ms().saturating_sub(at.0).max(0) as u64;
            waits.add(
                Wait::Overdue,
                Duration::from_millis(all).saturating_sub(here),
            );
            waits.add(if away { Wait::StoreAway } else { Wait::Overlap }, here);
        }
        waits
    }
}

struct Flight {
    contender: Arc<Contender>,
    job: JobName,
    contest: Contest,
    /// The occurrence; of a trigger, if it comes to no run. None: the trigger is decided.
    at: Option<Occurrence>,
    /// None while it waits for another run, or for a retry.
    slot: Option<OwnedSemaphorePermit>,
    /// Held while a claim is under way, and then by a grant.
    permit: Option<ClaimPermit>,
    /// From before the claim leaves, and then by a grant.
    in_will: Option<last_will::Entry>,
    /// Ends with the next change after the last check.
    woken: Option<OwnedNotified>,
    /// How often in a row the store refused to decide because of its clock, which its answers show as believed.
    contradicted: u32,
    /// What it waits for: the reason of a late start.
    waits: Delays,
    /// A claim of it proved that the lease of the attempt before has lapsed.
    lapsed: bool,
}

/// After so many, no claim was merely long on its way.
const CONTRADICTIONS: u32 = 5;

impl Flight {
    async fn fly(mut self, first: Step) -> ContestEnd {
        let contender = self.contender.clone();
        let mut step = first;
        loop {
            let (begun, wait) = (Boottime::now(), step.waits_for());
            step = match step {
                Step::Look => self.look(),
                Step::Pause(time, _) => {
                    tokio::select! {
                        () = tokio::time::sleep(time) => {}
                        () = contender.stop.cancelled() => {}
                    }
                    Step::Look
                }
                Step::Rest(time, _) => {
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
                        return ContestEnd::Undecided;
                    };
                    self.slot = slots.clone().try_acquire_owned().ok();
                    if self.slot.is_none() {
                        let woken = self.woken.take();
                        tokio::select! {
                            permit = slots.acquire_owned() => self.slot = permit.ok(),
                            () = tokio::time::sleep(time) => {}
                            () = changed(woken) => {}
                            () = contender.stop.cancelled() => return ContestEnd::Draining,
                        }
                    }
                    // By now it may be decided, or the job removed, or the instance draining.
                    Step::Look
                }
                Step::TakePermit { first } => {
                    let woken = self.woken.take();
                    tokio::select! {
                        biased;
                        permit = contender.batcher.permit(first) => self.permit = permit,
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
                    // The other run needs the slot.
                    self.slot = None;
                    contender.contest(&self.job, Ask::next_attempt(at)).await;
                    self.contest.first_was_decided()
                }
                Step::End(ended) => return ended,
            };
            // A run that was granted meanwhile has been started, with what it had waited for.
            if let Some(wait) = wait {
                self.waits.add(wait, Boottime::now().since(begun));
            }
        }
    }

    fn look(&mut self) -> Step {
        let step = self.see(None, Contest::look);
        if !matches!(step, Step::Ask(_)) {
            self.permit = None;
        }
        step
    }

    /// Takes one step of the contest with the present facts, and carries out its effects. `sent`: when the answered
    /// request left.
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
                    // Subscribe before the mutex is released: no change may be missed.
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
                let at = at.or(self.at);
                let at = at.unwrap_or_else(|| Occurrence(contender.shown_ms()));
                contender.journal(&self.job, at, decision, detail);
            }
            Effect::Unwatch(at) => contender.watches.drop_one(&self.job, at),
            Effect::Start(win) => {
                let late = contender.shown_ms().saturating_sub(win.run.occurrence.0);
                let figures = &contender.health.figures;
                figures.granted(
                    win.run.attempt,
                    win.run.trigger,
                    self.lapsed,
                    late,
                    &self.waits,
                );
                (contender.start)(Granted {
                    job: win.job,
                    run: win.run,
                    incarnation: win.incarnation,
                    // The time of the answered request, however often the claim was sent before: a repeated claim with
                    // the same nonce renews the lease.
                    sent: sent.unwrap_or(Boottime(0)),
                    start_by: win.start_by,
                    permit: self.permit.take(),
                    in_will: self.in_will.take(),
                    too_late: win.too_late,
                    slot: self.slot.take(),
                    waits: self.waits,
                    won: Boottime::now(),
                });
            }
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
                warn!(job = %self.job, occurrence = %self.at(), error, "cannot claim the occurrence; retrying");
            }
        }
    }

    async fn ask(&mut self, mut claim: Claim) -> Step {
        let contender = self.contender.clone();
        if !claim.missed.is_empty() || claim.start_by < contender.shown_ms() {
            claim.cause = self.waits.cause();
        }
        let (definition, target) = (claim.definition.clone(), claim.target.clone());
        let given_up = claim.missed.iter().map(|m| m.count).sum();
        let wait = claim.cause;
        self.lapsed |= claim.observed.is_some();
        self.put_into_will(&claim);
        let begun = Boottime::now();
        let reply = contender.batcher.claim(claim).await;
        self.waits
            .add(Wait::StoreAway, Boottime::now().since(begun));
        let reply = match reply {
            Ok(reply) => reply,
            Err(e) => {
                contender.health.figures.claim_failed();
                self.permit = None;
                if matches!(e, store::Error::NotReplicated { .. }) {
                    // Until the replicas are back, each claim would be granted, and not used.
                    contender.check_due.store(true, Ordering::SeqCst);
                    contender.registration_due.notify_one();
                }
                let retry = &contender.retry;
                let pause = |n| retry.pause(n, fastrand::f64());
                let (error, transient) = (e.to_string(), e.is_transient());
                return self.see(None, |contest, v, effects| {
                    contest.failed(&error, transient, retry.attempts, pause, v, effects)
                });
            }
        };
        contender
            .health
            .figures
            .claimed(given_up, wait, &reply.value);
        contender.note_clock(&reply);
        let contradicts = reply.value == Answer::InDoubt && contender.clock.doubt_us().is_none();
        self.contradicted = if contradicts {
            self.contradicted + 1
        } else {
            0
        };
        if self.contradicted == CONTRADICTIONS {
            contender.contradicted(&self.job, &target);
        }
        let mut info = AnswerInfo {
            incarnation: reply.incarnation.clone(),
            store_ms: reply.now_us / 1000,
            lapsed: false,
            expires_in: Duration::MAX,
        };
        if let Answer::Running(open) | Answer::Blocked(open) = &reply.value {
            if open.run.definition != definition {
                debug!(job = %self.job, holder = %open.run.instance, "another instance runs this job with another \
                definition");
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
        // Only a grant keeps them.
        self.permit = None;
        self.in_will = None;
        step
    }

    /// A claim that was not answered stays there: it may be granted.
    fn put_into_will(&mut self, claim: &Claim) {
        let contender = &self.contender;
        if self.in_will.as_ref().is_none_or(|e| e.run() != claim.run)
            && let Some(will) = &contender.last_will
        {
            let offset_us = contender.clock.offset_us().unwrap_or(0);
            self.in_will = will.add(&Claimed::of(claim, offset_us));
        }
    }

    /// Whether `run`, whose claim was not answered, was granted. None: the store does not answer.
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

/// Waits for the change; for ever if there is nothing to wait for.
async fn changed(woken: Option<OwnedNotified>) {
    match woken {
        Some(woken) => woken.await,
        None => std::future::pending().await,
    }
}
