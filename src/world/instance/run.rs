//! What an instance was granted: its runs, and their guards when the daemon is gone.

use std::{sync::Arc, time::Duration};

use super::Held;
use crate::{
    logic::{
        attempts::{self, After},
        claim::{DelayedAttempt, Question, Renew, Settle},
        contest::Win,
        guard_life::{Cause, Life},
        hold::{self, Do, Hold, Renewed},
    },
    model::{Boottime, JobName, Outcome, RunId, RunRecord, job::Job},
    world::{Body, Command, CommandState, SETTLE_AGAIN, Sender, Settling, TIMEOUT, Willed, World},
};

impl World {
    pub(super) fn won(&mut self, i: usize, job: &JobName, win: Win, sent: Boottime) {
        let start_by = (win.run.attempt == 1).then_some(win.start_by);
        let mut held = Held {
            hold: Hold::new(*win.job.lease, &win.incarnation, sent, start_by, 1),
            win: Arc::new(win),
            renewal: None,
            wake: Boottime(0),
            started: false,
            settling: None,
            awaited: None,
        };
        let late = held.win.too_late.is_some();
        if late {
            self.reached.insert("granted too late");
            held.settling = Some(self.settling(&held.win, Outcome::Missed, None));
        }
        self.here(i, job).held.push(held);
        if late {
            let run = self
                .here(i, job)
                .held
                .last()
                .expect("it was pushed")
                .win
                .run
                .id;
            self.here(i, job).state.account.run_is_over(run);
        }
    }

    pub(super) fn settling(
        &self,
        win: &Win,
        outcome: Outcome,
        next: Option<DelayedAttempt>,
    ) -> Settling {
        let ms = self.ms();
        let record = RunRecord {
            outcome,
            ..RunRecord::of(&win.job.name, &win.run).lasting(None, Some(ms))
        };
        Settling {
            settle: Settle {
                run: win.run.id,
                record,
                next_attempt: next,
            },
            asked: None,
            again_at: self.now,
            until: Boottime(u64::MAX),
            failures: 0,
        }
    }

    pub(super) fn hold_all(&mut self, i: usize, job: &JobName) -> bool {
        let mut busy = false;
        for r in (0..self.instances[i].jobs[job].held.len()).rev() {
            busy |= self.hold(i, job, r);
        }
        busy
    }

    pub(super) fn hold(&mut self, i: usize, job: &JobName, r: usize) -> bool {
        let now = self.now;
        let store_ms = self.instances[i].believed_ms(now);
        let held = &mut self.here(i, job).held[r];
        let run = held.win.run.id;
        if held.settling.is_some() {
            return self.settle(i, job, r);
        }
        if let Some((_, _, until)) = held.renewal
            && now >= until
        {
            held.renewal = None;
            held.wake = Boottime(0);
            let follows = held.hold.renewed(None, now, now);
            debug_assert_eq!(follows, Renewed::Nothing);
            return true;
        }
        if held.started
            && let Some((outcome, after)) = self.gone(run)
        {
            return self.ended(i, job, r, outcome, after);
        }
        let held = &mut self.here(i, job).held[r];
        if now < held.wake {
            return false;
        }
        let next = held.hold.next(hold::View {
            now,
            store_ms,
            turn: true,
            killed: false,
        });
        match next {
            Do::Wait(at) => {
                held.wake = at;
                return false;
            }
            Do::Renew(seq) => {
                let ask = Renew {
                    job: job.clone(),
                    run: held.win.run.clone(),
                    seq,
                    late: now >= held.hold.trusted_until(),
                    reclaim: held.hold.reclaim(),
                };
                let id = self.request(i, Question::Renew(Box::new(ask)));
                self.here(i, job).held[r].renewal = Some((id, now, now + TIMEOUT));
            }
            Do::Start => self.start(i, job, r),
            Do::Abandon {
                outcome,
                another_attempt,
                ..
            } => {
                let win = held.win.clone();
                self.reached.insert("granted, not started");
                let next = another_attempt.then(|| attempts::after_no_start(win.run.attempt));
                let settling = self.settling(&win, outcome, next.flatten());
                let h = self.here(i, job);
                h.held[r].awaited = settling.settle.next_attempt;
                h.held[r].settling = Some(settling);
                h.state.account.run_is_over(run);
            }
            Do::Stop(stop, grace) => {
                if !held.hold.awaits_renewal() {
                    held.renewal = None;
                }
                self.stop_command(run, stop, grace);
            }
            Do::Show(_) => held.hold.shown(Some(0), now),
        }
        true
    }

    pub(super) fn start(&mut self, i: usize, job: &JobName, r: usize) {
        let now = self.now;
        let of = (i, self.instances[i].generation);
        let held = &mut self.here(i, job).held[r];
        held.started = true;
        let (win, trusted_until) = (held.win.clone(), held.hold.trusted_until());
        let (definition, run) = (&win.job, win.run.clone());
        let (lasts, fails, stubborn) = how_it_runs(definition, &run);
        let life = Life::new(
            now,
            trusted_until,
            definition.timeout,
            definition.grace,
            definition.lease.kill_budget,
        );
        let id = run.id;
        self.instances[i].told.insert(id);
        self.commands.push(Command {
            job: job.clone(),
            run,
            of,
            life,
            state: CommandState::Starting,
            lasts,
            fails,
            stubborn,
            offset_us: self.instances[i].belief.offset_us().unwrap_or(0),
            settle: None,
            executed: false,
        });
        self.send(Sender::Instance(i, of.1), Body::Exec(id));
    }

    /// How a command ended, once its guard says so.
    pub(super) fn gone(&self, run: RunId) -> Option<(Outcome, After)> {
        let command = self.commands.iter().find(|c| c.run.id == run)?;
        match command.state {
            CommandState::Gone(outcome, cause, _) => {
                Some((outcome, After::of(outcome, cause, command.executed)))
            }
            _ => None,
        }
    }

    pub(super) fn ended(
        &mut self,
        i: usize,
        job: &JobName,
        r: usize,
        outcome: Outcome,
        after: After,
    ) -> bool {
        let win = self.here(i, job).held[r].win.clone();
        let next = after.next_attempt(&win.job, win.run.attempt);
        let mut settling = self.settling(&win, outcome, next);
        settling.settle.record.finished_at = Some(self.ended_at(win.run.id));
        let h = self.here(i, job);
        h.held[r].awaited = next;
        h.held[r].settling = Some(settling);
        h.state.account.run_is_over(win.run.id);
        true
    }

    pub(super) fn ended_at(&self, run: RunId) -> i64 {
        let command = self.commands.iter().find(|c| c.run.id == run);
        match command.map(|c| c.state) {
            Some(CommandState::Gone(_, _, at)) => self.ms() - self.now.since(at).as_millis() as i64,
            _ => self.ms(),
        }
    }

    pub(super) fn settle(&mut self, i: usize, job: &JobName, r: usize) -> bool {
        let now = self.now;
        let settling = self.here(i, job).held[r].settling.as_mut();
        let Some(request) = settling.and_then(|s| s.next(now)) else {
            return false;
        };
        let id = self.request(i, Question::Settle(Box::new(request)));
        let settling = self.here(i, job).held[r].settling.as_mut();
        settling.expect("it was there").asked = Some((id, now + TIMEOUT));
        true
    }

    /// What the guard of a command that is gone does. True: something has changed.
    pub(in crate::world) fn guard_settles(&mut self, c: usize) -> bool {
        let (now, of) = (self.now, self.commands[c].of);
        let here = &self.instances[of.0];
        if here.alive && here.generation == of.1 {
            return false;
        }
        let command = &self.commands[c];
        let CommandState::Gone(outcome, cause, at) = command.state else {
            return false;
        };
        if command.settle.is_none() {
            let definition = self.plan.job(&command.job).clone();
            let patience = match outcome {
                Outcome::Crashed | Outcome::LeaseLost => definition.lease.length,
                _ => Duration::from_secs(3600),
            };
            let after = After::of(outcome, cause, command.executed);
            let next = after.next_attempt(&definition, command.run.attempt);
            let record = RunRecord {
                outcome,
                ..RunRecord::of(&command.job, &command.run).lasting(None, Some(self.ms()))
            };
            self.commands[c].settle = Some(Settling {
                settle: Settle {
                    run: record.run_id.expect("a run's"),
                    record,
                    next_attempt: next,
                },
                asked: None,
                again_at: now,
                until: at + patience,
                failures: 0,
            });
        }
        let settling = self.commands[c].settle.as_mut().expect("it was made");
        if now >= settling.until && settling.asked.is_none() {
            self.commands.remove(c);
            // The others have another place now: the round begins anew.
            return true;
        }
        let Some(request) = settling.next(now) else {
            return false;
        };
        let from = Sender::Guard(request.run);
        let believed = self.commands[c].offset_us + (now.0 / 1000) as i64;
        let request = Question::Settle(Box::new(request));
        let id = self.send(from, Body::Request(request, Some(believed)));
        let settling = self.commands[c].settle.as_mut();
        settling.expect("it was made").asked = Some((id, now + TIMEOUT));
        true
    }

    /// What an instance that is killed leaves behind: its claims under way, and what it was granted and has not
    /// started.
    pub(in crate::world) fn leave_will(&mut self, i: usize) {
        let of = (i, self.instances[i].generation);
        let offset_us = self.instances[i].belief.offset_us().unwrap_or(0);
        let until = self.now + TIMEOUT;
        let under_way = self.mail.iter().filter_map(|m| match &m.body {
            Body::Request(Question::Claim(claim), _) if m.from == Sender::Instance(i, of.1) => {
                Some((claim.job.clone(), claim.run))
            }
            _ => None,
        });
        let mut claimed: Vec<_> = under_way.collect();
        for (job, state) in &self.server.data.states {
            let granted = state.open.iter();
            let granted = granted.filter(|o| o.next_attempt.is_none() && is_of(o.run.id, of));
            claimed.extend(granted.map(|o| (job.clone(), o.run.id)));
        }
        // However often their claims were sent.
        let told = &self.instances[i].told;
        claimed.retain(|(_, run)| !told.contains(run));
        let wills = claimed.into_iter().map(|(job, run)| Willed {
            job,
            run,
            of,
            offset_us,
            until,
        });
        self.wills.extend(wills);
    }

    /// Has the store told of what it granted. True: something has changed.
    pub(in crate::world) fn execute_wills(&mut self) -> bool {
        let (now, up) = (self.now, self.server.up);
        let mut busy = false;
        for will in std::mem::take(&mut self.wills) {
            let state = self.server.data.states.get(&will.job).filter(|_| up);
            let held = state.and_then(|st| {
                let lapsed = st.lapsed.as_deref().filter(|e| e.run.id == will.run);
                st.held_by(will.run).or(lapsed)
            });
            let Some(run) = held.map(|e| e.run.clone()) else {
                if now < will.until {
                    self.wills.push(will);
                } else {
                    busy = true;
                }
                continue;
            };
            busy = true;
            self.reached.insert("never started");
            let definition = self.plan.job(&will.job);
            let (lease, grace) = (definition.lease.length, definition.grace);
            self.commands.push(Command {
                job: will.job,
                run,
                of: will.of,
                life: Life::new(now, now + lease, None, grace, lease),
                state: CommandState::Gone(Outcome::Crashed, Some(Cause::DaemonGone), now),
                lasts: Duration::ZERO,
                fails: false,
                stubborn: false,
                offset_us: will.offset_us,
                settle: None,
                executed: false,
            });
        }
        busy
    }

    pub(in crate::world) fn guard_answered(&mut self, run: RunId) {
        self.reached.insert("settled by a guard");
        self.commands.retain(|c| c.run.id != run);
    }
}

impl Settling {
    /// The request that is to be sent now.
    pub(super) fn next(&mut self, now: Boottime) -> Option<Settle> {
        if let Some((_, until)) = self.asked {
            if now >= until {
                self.asked = None;
                self.failures += 1;
                self.again_at = now + SETTLE_AGAIN;
            }
            return None;
        }
        (now >= self.again_at).then(|| self.settle.clone())
    }
    pub(in crate::world) fn wake_at(&self) -> Boottime {
        self.asked.map_or(self.again_at, |(_, until)| until)
    }
}

/// Whether the id names a run of this process.
fn is_of(run: RunId, (i, generation): (usize, u32)) -> bool {
    let n = run.0.as_u128();
    (n >> 64, n >> 32 & 0xffff_ffff) == (i as u128, u128::from(generation))
}

/// Every third occurrence has a command that runs into the next one and ignores SIGTERM; the first attempt of every
/// second one fails.
fn how_it_runs(job: &Job, run: &crate::model::Run) -> (Duration, bool, bool) {
    let n = run.occurrence.0 / 2000;
    let long = n % 3 == 0;
    let lasts = match long {
        true => Duration::from_millis(2500),
        false => Duration::from_millis(300),
    };
    let fails = job.retry.is_some() && n % 2 == 0 && run.attempt == 1;
    (lasts, fails, long)
}
