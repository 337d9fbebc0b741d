//! Registers the jobs with the store (again after each loss of its data), and takes in their state from it.

use std::{sync::Arc, time::Duration};

use tracing::{info, warn};

use super::{Contender, Epoch, PlanUpdate};
use crate::{
    clock::Boottime,
    config::Job,
    logic::{
        claim::{Register, Registration, State},
        contest::JobState,
    },
    store::{self, Reply},
};

/// The store's answer about one job.
type Answer = Result<(Registration, Option<State>), store::Error>;

impl Contender {
    /// Registers the jobs that are not registered in the present incarnation. `epoch` says whether a state from before
    /// may be adopted. While the store's clock is in doubt it asks nothing. Returns how many jobs are left.
    ///
    /// # Errors
    /// The store's. Jobs that were registered before the error stay registered.
    pub async fn register(self: &Arc<Self>, epoch: &Epoch) -> Result<usize, store::Error> {
        if self.clock.doubt_us().is_some() {
            // The store decides nothing now.
            let left = self.lock();
            return Ok(left.values().filter(|e| !e.state.is_registered()).count());
        }
        let now = Boottime::now();
        let mut left = 0;
        let mut todo = vec![];
        for e in self.lock().values() {
            match e.state.register_in(epoch, now) {
                None => {}
                Some(Duration::ZERO) => {
                    todo.push((
                        e.state.definition.clone(),
                        e.state.registration(&self.me, epoch),
                    ));
                }
                Some(_) => left += 1,
            }
        }
        for chunk in todo.chunks(store::BATCH) {
            left += self.register_these(chunk, epoch).await?;
        }
        Ok(left)
    }

    /// How long until there is a job to register in `epoch`. None: all jobs are registered.
    pub fn next_registration(&self, epoch: &Epoch) -> Option<Duration> {
        let (jobs, now) = (self.lock(), Boottime::now());
        let left = jobs.values();
        left.filter_map(|e| e.state.register_in(epoch, now)).min()
    }

    /// Returns how many are left.
    async fn register_these(
        self: &Arc<Self>,
        chunk: &[(Arc<Job>, Register)],
        epoch: &Epoch,
    ) -> Result<usize, store::Error> {
        let asks: Vec<Register> = chunk.iter().map(|(_, ask)| ask.clone()).collect();
        let (reply, answers) = self.ask_to_register(&asks).await?;
        if let Some(reply) = &reply {
            self.note_clock(reply);
        }
        let incarnation = reply.map(|reply| reply.incarnation);
        let (mut left, mut adopt) = (0, vec![]);
        for ((job, ask), answer) in chunk.iter().zip(answers) {
            let state = match answer {
                Ok((Registration::Ready, state)) => {
                    self.registered(job, &state.unwrap_or_default(), epoch);
                    continue;
                }
                Ok((Registration::Quarantined | Registration::Absent, state)) => state,
                Err(e) => {
                    left += 1;
                    self.refused(job, &e);
                    continue;
                }
            };
            left += 1;
            if incarnation.as_ref() != Some(&epoch.incarnation) {
                continue;
            }
            let wait = self.state(&job.name, |s| s.adoptable_in(epoch, Boottime::now()));
            if wait == Some(Duration::ZERO) {
                let born = self.born(epoch);
                let adoption = JobState::adoption(job, ask.clone(), epoch, born, state.as_ref());
                adopt.push((job.clone(), adoption));
                // This may have taken a while: let other tasks run.
                tokio::task::yield_now().await;
            } else {
                let now = self.clock.now_ms();
                self.state(&job.name, |s| s.register_after_quarantine(epoch, now));
            }
        }
        if !adopt.is_empty() {
            left -= self.adopt(&adopt, epoch).await?;
        }
        Ok(left)
    }

    /// Returns how many were registered.
    async fn adopt(
        self: &Arc<Self>,
        adopt: &[(Arc<Job>, Register)],
        epoch: &Epoch,
    ) -> Result<usize, store::Error> {
        // Only if the epoch has not changed: if the store had lost its data since, a job with a live holder would look
        // new.
        let look = self.store.heartbeat(None).await?;
        if look.incarnation != epoch.incarnation || look.value.id != epoch.id {
            return Ok(0);
        }
        let asks: Vec<Register> = adopt.iter().map(|(_, ask)| ask.clone()).collect();
        let (_, answers) = self.ask_to_register(&asks).await?;
        let mut ready = 0;
        for ((job, ask), answer) in adopt.iter().zip(answers) {
            match answer {
                Ok((Registration::Ready, state)) => {
                    ready += 1;
                    if let Some(last) = ask.lost.last() {
                        let count: u64 = ask.lost.iter().map(|l| l.count).sum();
                        warn!(job = %job.name, occurrences = count, until = %last.last,
                            "the store lost its data, and with it the outcome of these occurrences: soloist records \
                            them as unknown");
                        self.health.figures.lost(count);
                    }
                    self.registered(job, &state.unwrap_or_default(), epoch);
                }
                Ok((Registration::Quarantined | Registration::Absent, _)) => {}
                Err(e) => self.refused(job, &e),
            }
        }
        Ok(ready)
    }

    /// Returns an answer for each job, and the store's last reply (None: it refused all). If the store refuses one job
    /// (a key of another type, a state of another version), the others must still be registered, and each needs its own
    /// error: then each is sent alone.
    async fn ask_to_register(
        &self,
        asks: &[Register],
    ) -> Result<(Option<Reply<()>>, Vec<Answer>), store::Error> {
        let refused = match self.store.register(asks).await {
            Ok(mut reply) => {
                let answers = std::mem::take(&mut reply.value);
                return Ok((
                    Some(reply.map(|_| ())),
                    answers.into_iter().map(Ok).collect(),
                ));
            }
            Err(e) if e.is_transient() => return Err(e),
            Err(e) => e,
        };
        if asks.len() == 1 {
            return Ok((None, vec![Err(refused)]));
        }
        let (mut last, mut answers) = (None, vec![]);
        for ask in asks {
            match self.store.register(std::slice::from_ref(ask)).await {
                Ok(mut reply) => {
                    answers.push(reply.value.pop().ok_or_else(|| refused.clone()));
                    last = Some(reply.map(|_| ()));
                }
                Err(e) if e.is_transient() => return Err(e),
                Err(e) => answers.push(Err(e)),
            }
        }
        Ok((last, answers))
    }

    /// Logs that the store refuses this job: once, until it works again.
    fn refused(&self, job: &Job, e: &store::Error) {
        if self.state(&job.name, |s| s.refused(Boottime::now())) == Some(true) {
            warn!(job = %job.name, error = %e, "the store refuses to register this job, so this instance does not run \
                it; it tries again");
        }
    }

    /// The birth of the epoch, Unix ms: at most the time at which we first saw it, because the store's clock may have
    /// been wrong then.
    fn born(&self, epoch: &Epoch) -> i64 {
        let seen = self.clock.at(epoch.first_seen);
        seen.map_or(epoch.born, |us| epoch.born.min(us.div_euclid(1000)))
    }

    /// The store has the job: its occurrences can be claimed from now on.
    fn registered(self: &Arc<Self>, job: &Arc<Job>, state: &State, epoch: &Epoch) {
        let name = &job.name;
        // The store's clock is known, because the store has answered.
        let Some(now) = self.clock.now_ms() else {
            return;
        };
        let Some(Some(follows)) = self.state(name, |s| s.registered(job, state, epoch, now)) else {
            return;
        };
        if let Some(until) = follows.ahead {
            warn!(job = %name, %until,
                "the store's clock was wrong, so the job counts occurrences up to this future instant as decided: it \
                does not start until then, or until `soloist rewind` corrects this");
        }
        if let Some((after, until)) = follows.catch_up {
            info!(job = %name, %after, %until,
                "undecided since {after}: catching up");
            self.start_driver(name);
        }
        if let Some(after) = follows.plan_after {
            let _ = self.plans.send(PlanUpdate::PlanAfter(job.clone(), after));
        }
        let received = Boottime::now();
        for open in &follows.watch {
            self.watch_lease(name, open, received);
        }
        for at in follows.ask_again {
            self.claim_next_attempt(name.clone(), at);
        }
        for pending in &follows.triggers {
            self.triggered(name, &pending.key, Some(pending.at));
        }
    }
}
