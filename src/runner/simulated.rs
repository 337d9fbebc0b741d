//! Guards of simulated hosts: each follows its [`Life`] as a real guard does, but no process runs: the guard only
//! notes when its command starts and ends.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use tokio::sync::{mpsc, watch};

use super::{Order, RunEnd, Running, State, Tail};
use crate::{
    clock::Boottime,
    guard::{Control, HandOver, KnownEnd, Moment, Spec},
    logic::guard_life::{Cause, Life, Step, outcome},
    model::{Marks, Outcome, RunId, RunRecord, Usage},
};

/// What is written down of a command.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// The simulation's time, ns.
    pub(crate) world: u64,
    pub(crate) host: usize,
    pub(crate) record: RunRecord,
    pub(crate) run: RunId,
    /// None: it starts.
    pub(crate) ended: Option<Outcome>,
}

/// How a command behaves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Behaviour {
    pub(crate) start: Duration,
    pub(crate) lasts: Duration,
    pub(crate) fails: bool,
    /// It ignores SIGTERM.
    pub(crate) stubborn: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Starting { at: Boottime },
    Runs { until: Boottime },
    Gone,
}

struct Guard {
    host: usize,
    spec: Spec,
    life: Life,
    phase: Phase,
    behaviour: Behaviour,
    started: Option<Moment>,
    orders: mpsc::UnboundedReceiver<Order>,
    state: watch::Sender<State>,
    end: Option<KnownEnd>,
    daemon_gone: bool,
}

/// Says how the next command behaves.
pub(crate) type Behave = Box<dyn FnMut(&Spec) -> Behaviour + Send>;

/// All guards of a simulation.
#[derive(Default)]
pub(crate) struct Guards {
    all: Vec<Guard>,
    pub(crate) seen: Vec<Seen>,
    /// What guards whose daemons are gone have to tell the store: on which host.
    pub(crate) to_settle: VecDeque<(usize, HandOver)>,
    pub(crate) behave: Option<Behave>,
}

impl std::fmt::Debug for Guards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guards")
            .field("seen", &self.seen)
            .finish_non_exhaustive()
    }
}

impl Guards {
    pub(super) fn start(&mut self, host: usize, spec: Spec, keep: usize) -> Running {
        let (orders, order_queue) = mpsc::unbounded_channel();
        let (state, seen) = watch::channel(State::default());
        let now = Boottime::now();
        let behaviour = match &mut self.behave {
            Some(behave) => behave(&spec),
            None => Behaviour {
                start: Duration::from_millis(5),
                lasts: Duration::from_millis(500),
                fails: false,
                stubborn: false,
            },
        };
        self.all.push(Guard {
            host,
            life: Life::new(
                now,
                spec.deadline,
                spec.timeout,
                spec.grace,
                spec.kill_budget,
            ),
            phase: Phase::Starting {
                at: now + behaviour.start,
            },
            behaviour,
            started: None,
            orders: order_queue,
            state,
            end: None,
            daemon_gone: false,
            spec,
        });
        Running {
            orders,
            state: seen,
            tail: Arc::new(Tail::new(keep)),
            guard_pid: None,
        }
    }

    /// What the guards of `host` do at `now`, the host's CLOCK_BOOTTIME.
    pub(crate) fn step(&mut self, host: usize, world: u64, now: Boottime, wall_us: i64) {
        let at = Moment {
            wall_us,
            boottime: now,
        };
        let mut left = vec![];
        for mut guard in std::mem::take(&mut self.all) {
            if guard.host != host || guard.step(at, world, &mut self.seen, &mut self.to_settle) {
                left.push(guard);
            }
        }
        self.all = left;
    }
}

impl Guard {
    /// False: nothing is left to do.
    fn step(
        &mut self,
        at: Moment,
        world: u64,
        seen: &mut Vec<Seen>,
        to_settle: &mut VecDeque<(usize, HandOver)>,
    ) -> bool {
        let now = at.boottime;
        let mut step = self.life.on_time(now);
        loop {
            match self.orders.try_recv() {
                Ok(Order::Tell(Control::Deadline(d))) => {
                    step = step.max(self.life.on_renewal(now, d))
                }
                Ok(Order::Tell(Control::Stop { reason, grace })) => {
                    step = step.max(self.life.on_stop(now, reason, grace));
                }
                Ok(Order::Settled(told)) => {
                    let _ = told.send(());
                    return false;
                }
                Ok(Order::Tell(_)) => {}
                Err(mpsc::error::TryRecvError::Empty) => break,
                Err(mpsc::error::TryRecvError::Disconnected) => {
                    if !std::mem::replace(&mut self.daemon_gone, true) && self.phase != Phase::Gone
                    {
                        step = step.max(self.life.on_daemon_gone(now));
                    }
                    break;
                }
            }
        }
        match self.phase {
            Phase::Starting { .. } if step != Step::Nothing || self.life.killing() => {
                self.gone(at, None, world, seen);
            }
            Phase::Starting { at: begins } if now >= begins => {
                self.life.on_started();
                self.started = Some(at);
                self.phase = Phase::Runs {
                    until: now + self.behaviour.lasts,
                };
                self.write_down(world, None, seen);
                self.state.send_modify(|s| s.started = Some(at));
            }
            Phase::Runs { .. }
                if step == Step::Kill
                    || self.life.killing()
                    || step == Step::Terminate && !self.behaviour.stubborn =>
            {
                self.gone(at, None, world, seen);
            }
            Phase::Runs { until } if now >= until => {
                let _ = self.life.on_command_end(now, false);
                self.gone(at, Some(i32::from(self.behaviour.fails)), world, seen);
            }
            _ => {}
        }
        if self.daemon_gone
            && let Some(end) = self.end.take()
        {
            let settle = self.spec.settle.clone();
            to_settle.push_back((self.host, HandOver { settle, end }));
            return false;
        }
        !(self.daemon_gone && self.phase == Phase::Gone)
    }

    fn write_down(&self, world: u64, ended: Option<Outcome>, seen: &mut Vec<Seen>) {
        seen.push(Seen {
            world,
            host: self.host,
            record: serde_json::from_value(self.spec.settle["record"].clone()).expect("a record"),
            run: self.spec.run_id,
            ended,
        });
    }

    fn gone(&mut self, at: Moment, code: Option<i32>, world: u64, seen: &mut Vec<Seen>) {
        self.phase = Phase::Gone;
        let cause = self.life.cause();
        let outcome = outcome(cause, code, &[0]);
        if self.started.is_some() {
            self.write_down(world, Some(outcome), seen);
        }
        let error = self
            .started
            .is_none()
            .then(|| "it was not started".to_owned());
        let end = RunEnd {
            outcome,
            exit_code: code,
            signal: None,
            cause,
            error: error.clone(),
            errno: None,
            started: self.started,
            ended: at,
            output_tail: vec![],
            output_bytes: 0,
            stderr: Marks::default(),
            usage: Usage::default(),
        };
        self.state.send_modify(|s| s.end = Some(end));
        let outcome = match cause {
            Some(Cause::DaemonGone) => Outcome::Crashed,
            _ => outcome,
        };
        self.end = Some(KnownEnd {
            outcome,
            cause,
            exit_code: code,
            signal: None,
            error,
            started: self.started,
            ended: at,
            usage: Usage::default(),
        });
    }
}

/// The run of a simulated host; None: this thread simulates none.
pub(super) fn start(spec: &Spec, keep: usize) -> Option<Running> {
    let (host, guards) = crate::simulation::guards()?;
    Some(guards.lock().start(host, spec.clone(), keep))
}

/// See [`super::Runner::hand_over`]. False: this thread simulates no host.
pub(super) fn hand_over(handed: &HandOver) -> bool {
    let Some((host, guards)) = crate::simulation::guards() else {
        return false;
    };
    let copy = HandOver {
        settle: handed.settle.clone(),
        end: handed.end.clone(),
    };
    guards.lock().to_settle.push_back((host, copy));
    true
}
