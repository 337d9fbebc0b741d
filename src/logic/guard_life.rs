//! Life of one run, as its guard sees it: starting, running, ending (SIGTERM was sent), killing (SIGKILL was sent).
//!
//! The start is part of the run: timeout, deadline, stop and the end of the daemon end it as they end the command.
//!
//! The caller reports what happened and when it noticed; [`Life`] answers with a [`Step`]: what to do to the process
//! tree. All times are CLOCK_BOOTTIME of the host that has the run. `Life` does not know which processes are in the
//! tree, nor how signals reach them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::{Boottime, Outcome};

/// The most that processes get between SIGTERM and SIGKILL when the command itself has ended and left them behind.
pub const LEFTOVER_GRACE: Duration = Duration::from_secs(1);

/// The most that a tree gets between SIGTERM and SIGKILL when its daemon died: another instance waits to take over.
pub const DAEMON_GONE_GRACE: Duration = Duration::from_millis(50);

/// Pause before killing a tree that does not die again: the first, and the longest.
const KILL_AGAIN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(200));

/// Why a command was told to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// `soloist cancel`.
    Cancelled,
    /// A newer occurrence came (`overlap = "replace"`).
    Replaced,
    /// The instance stops and the drain is over.
    Shutdown,
    /// The daemon knows that the lease is no longer ours.
    LeaseLost,
}

/// What ended a command that did not end by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The job's `timeout` passed.
    Timeout,
    /// The daemon said so.
    Stopped(Stop),
    /// The deadline of the lease passed without a newer one.
    Deadline,
    /// The daemon died; seen by the guard.
    DaemonGone,
    /// The guard died; seen by the daemon.
    GuardGone,
}

/// The outcome of a command that ended with this exit code or signal, for this cause.
///
/// The cause decides: a command that answers SIGTERM with exit code 0 was cancelled all the same. A command that
/// could not be started has neither code nor signal and failed.
pub fn outcome(cause: Option<Cause>, exit_code: Option<i32>, success_codes: &[i32]) -> Outcome {
    match cause {
        Some(Cause::Timeout) => Outcome::TimedOut,
        Some(Cause::Stopped(Stop::Cancelled | Stop::Shutdown)) => Outcome::Cancelled,
        Some(Cause::Stopped(Stop::Replaced)) => Outcome::Replaced,
        Some(Cause::Stopped(Stop::LeaseLost) | Cause::Deadline) => Outcome::LeaseLost,
        Some(Cause::DaemonGone | Cause::GuardGone) => Outcome::Crashed,
        None if exit_code.is_some_and(|code| success_codes.contains(&code)) => Outcome::Succeeded,
        None => Outcome::Failed,
    }
}

/// Why a run ended, for people, if its outcome does not say it.
pub fn reason(cause: Option<Cause>) -> Option<String> {
    let said = match cause? {
        Cause::Stopped(Stop::Shutdown) => "the instance stopped",
        Cause::Stopped(Stop::LeaseLost) => {
            "the lease could not be renewed in time, so the command was ended: another instance may run the job"
        }
        Cause::Deadline => {
            "the lease ran out, and the guard had heard of no renewal, so the guard ended the command"
        }
        _ => return None,
    };
    Some(said.to_owned())
}

/// The error in the record of a run whose daemon died before it told a guard what to run.
pub const NEVER_STARTED: &str =
    "the instance died before it started the command: the command was never executed";

/// What is to be done to the tree now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[must_use]
pub enum Step {
    Nothing,
    /// SIGTERM to all of it, once.
    Terminate,
    /// SIGKILL to all of it, again and again until it is gone.
    Kill,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The command is not executed yet. Nothing runs that could clean up, so whatever ends the run kills at once.
    Starting,
    Running,
    Ending {
        kill_at: Boottime,
    },
    Killing,
}

/// The state of one run.
#[derive(Debug, Clone)]
pub struct Life {
    phase: Phase,
    /// Never moves backwards, and not at all once it has passed.
    deadline: Boottime,
    deadline_passed: bool,
    timeout_at: Option<Boottime>,
    grace: Duration,
    kill_budget: Duration,
    command_ended: bool,
    cause: Option<Cause>,
}

impl Life {
    /// A command whose start begins now. `timeout` is counted from now.
    pub fn new(
        now: Boottime,
        deadline: Boottime,
        timeout: Option<Duration>,
        grace: Duration,
        kill_budget: Duration,
    ) -> Self {
        Self {
            phase: Phase::Starting,
            deadline,
            deadline_passed: false,
            timeout_at: timeout.map(|t| now + t),
            grace,
            kill_budget,
            command_ended: false,
            cause: None,
        }
    }

    /// What ended the command; None while it runs undisturbed, and when it ended by itself.
    pub fn cause(&self) -> Option<Cause> {
        self.cause
    }

    /// Until when the command may run, as far as is known.
    pub fn deadline(&self) -> Boottime {
        self.deadline
    }

    /// The command is executed.
    pub fn on_started(&mut self) {
        if self.phase == Phase::Starting {
            self.phase = Phase::Running;
        }
    }

    /// SIGKILL is due, or was sent already.
    pub fn killing(&self) -> bool {
        self.phase == Phase::Killing
    }

    /// When [`Life::on_time`] has something to do next; None: time alone changes nothing any more.
    pub fn wake_at(&self) -> Option<Boottime> {
        let deadline = (!self.deadline_passed).then_some(self.deadline);
        let other = match self.phase {
            Phase::Starting | Phase::Running => self.timeout_at,
            Phase::Ending { kill_at } => Some(kill_at),
            Phase::Killing => return None,
        };
        deadline.into_iter().chain(other).min()
    }

    /// Time passed.
    pub fn on_time(&mut self, now: Boottime) -> Step {
        let mut step = Step::Nothing;
        if now >= self.deadline && !self.deadline_passed {
            self.deadline_passed = true;
            // Counted from the deadline, not from now: after a freeze nothing is left of the kill budget.
            let kill_at = self.deadline + self.grace.min(self.kill_budget / 2);
            step = self.end(now, Some(Cause::Deadline), kill_at);
        }
        if matches!(self.phase, Phase::Starting | Phase::Running)
            && self.timeout_at.is_some_and(|t| now >= t)
        {
            step = step.max(self.end(now, Some(Cause::Timeout), now + self.grace));
        }
        step.max(self.kill_if_due(now))
    }

    /// A deadline was read, at `now`. It counts only while the one before has not passed: a renewal that waited
    /// in the queue while we were frozen says nothing about who holds the lease by now.
    pub fn on_renewal(&mut self, now: Boottime, deadline: Boottime) -> Step {
        let step = self.on_time(now);
        if !self.deadline_passed {
            self.deadline = self.deadline.max(deadline);
        }
        step
    }

    /// The daemon wants the command stopped; `grace` None means the job's. A second, shorter grace shortens the first.
    pub fn on_stop(&mut self, now: Boottime, stop: Stop, grace: Option<Duration>) -> Step {
        let step = self.on_time(now);
        let kill_at = now + grace.unwrap_or(self.grace);
        step.max(self.end(now, Some(Cause::Stopped(stop)), kill_at))
    }

    /// The control pipe closed.
    pub fn on_daemon_gone(&mut self, now: Boottime) -> Step {
        let step = self.on_time(now);
        let kill_at = now + self.grace.min(DAEMON_GONE_GRACE);
        step.max(self.end(now, Some(Cause::DaemonGone), kill_at))
    }

    /// The command itself ended and left processes behind. If they were being ended together with the command, they
    /// keep its grace.
    pub fn on_command_end(&mut self, now: Boottime, by_daemons_death: bool) -> Step {
        if by_daemons_death && self.cause.is_none() && !self.command_ended {
            self.cause = Some(Cause::DaemonGone);
        }
        self.command_ended = true;
        match self.phase {
            Phase::Starting | Phase::Running => {
                let kill_at = now + self.grace.min(LEFTOVER_GRACE);
                self.end(now, None, kill_at)
            }
            Phase::Ending { .. } | Phase::Killing => Step::Nothing,
        }
    }

    /// The first cause stays. What happens after the command ended by itself is no cause.
    fn end(&mut self, now: Boottime, cause: Option<Cause>, kill_at: Boottime) -> Step {
        if self.cause.is_none() && !self.command_ended {
            self.cause = cause;
        }
        let step = match self.phase {
            Phase::Starting => {
                self.phase = Phase::Killing;
                Step::Kill
            }
            Phase::Running => {
                self.phase = Phase::Ending { kill_at };
                Step::Terminate
            }
            Phase::Ending { kill_at: before } => {
                self.phase = Phase::Ending {
                    kill_at: before.min(kill_at),
                };
                Step::Nothing
            }
            Phase::Killing => Step::Nothing,
        };
        step.max(self.kill_if_due(now))
    }

    fn kill_if_due(&mut self, now: Boottime) -> Step {
        match self.phase {
            Phase::Ending { kill_at } if now >= kill_at => {
                self.phase = Phase::Killing;
                Step::Kill
            }
            _ => Step::Nothing,
        }
    }
}

/// A tree that was killed, until it is gone.
#[derive(Debug, Clone)]
pub struct Kills {
    again_at: Boottime,
    pause: Duration,
    /// When survivors are reported; None: they were.
    stuck_at: Option<Boottime>,
}

/// A tree that was killed and is not gone is to be killed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Again {
    /// What survives that is to be reported.
    pub report: bool,
}

impl Kills {
    /// It was killed at `now`.
    pub fn begin(now: Boottime, kill_budget: Duration) -> Self {
        Self {
            again_at: now + KILL_AGAIN.0,
            pause: KILL_AGAIN.0,
            stuck_at: Some(now + kill_budget),
        }
    }

    /// When [`Kills::on_time`] has something to do next.
    pub fn again_at(&self) -> Boottime {
        self.again_at
    }

    /// Time passed.
    #[must_use]
    pub fn on_time(&mut self, now: Boottime) -> Option<Again> {
        if now < self.again_at {
            return None;
        }
        self.pause = (self.pause * 2).min(KILL_AGAIN.1);
        self.again_at = now + self.pause;
        let report = self.stuck_at.take_if(|at| now >= *at).is_some();
        Some(Again { report })
    }
}

/// When a guard should have ended its tree, as far as its daemon knows.
#[derive(Debug, Clone)]
pub struct Overdue {
    /// The newest that the guard was told.
    deadline: Boottime,
    /// Because of the timeout or on request.
    due: Option<(Boottime, Cause)>,
    grace: Duration,
    kill_budget: Duration,
}

impl Overdue {
    /// As [`Life::new`].
    pub fn new(
        now: Boottime,
        deadline: Boottime,
        timeout: Option<Duration>,
        grace: Duration,
        kill_budget: Duration,
    ) -> Self {
        Self {
            deadline,
            due: timeout.map(|timeout| (now + timeout + grace + kill_budget, Cause::Timeout)),
            grace,
            kill_budget,
        }
    }

    /// The guard is told this deadline.
    pub fn on_renewal(&mut self, deadline: Boottime) {
        self.deadline = self.deadline.max(deadline);
    }

    /// The guard is told to stop the command; `grace` None means the job's.
    pub fn on_stop(&mut self, now: Boottime, why: Stop, grace: Option<Duration>) {
        let due = now + grace.unwrap_or(self.grace) + self.kill_budget;
        if self.due.is_none_or(|(before, _)| due < before) {
            self.due = Some((due, Cause::Stopped(why)));
        }
    }

    /// From when on a tree that is not gone shows that its guard does nothing, and for what it should have ended it.
    pub fn at(&self) -> (Boottime, Cause) {
        // Half of the kill budget is the command's grace, the other half is for the steps after it.
        let at = self.deadline + self.kill_budget * 5 / 8;
        let lapsed = (at, Cause::Deadline);
        self.due.filter(|(due, _)| *due <= at).unwrap_or(lapsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guard_is_overdue_when_it_should_have_ended_its_tree() {
        let new = |timeout: Option<u64>| {
            Overdue::new(at(0), at(10_000), timeout.map(ms), ms(400), ms(800))
        };
        let mut run = new(None);
        assert_eq!(run.at(), (at(10_500), Cause::Deadline));
        run.on_renewal(at(20_000));
        run.on_renewal(at(15_000));
        assert_eq!(run.at(), (at(20_500), Cause::Deadline));
        // With the job's grace, a longer one and a shorter one.
        for (now, why, grace, due, cause) in [
            (1000, Stop::Replaced, None, 2200, Stop::Replaced),
            (1000, Stop::Shutdown, Some(900), 2200, Stop::Replaced),
            (1000, Stop::Cancelled, Some(100), 1900, Stop::Cancelled),
        ] {
            run.on_stop(at(now), why, grace.map(ms));
            assert_eq!(run.at(), (at(due), Cause::Stopped(cause)), "{grace:?}");
        }
        let mut timed = new(Some(3000));
        assert_eq!(timed.at(), (at(4200), Cause::Timeout));
        timed.on_stop(at(3500), Stop::Cancelled, None);
        assert_eq!(timed.at(), (at(4200), Cause::Timeout));
        assert_eq!(new(Some(60_000)).at(), (at(10_500), Cause::Deadline));
    }

    #[test]
    fn what_does_not_die_is_killed_again_and_reported_once_its_kill_budget_is_over() {
        let mut kills = Kills::begin(at(0), ms(300));
        let mut seen = vec![];
        for now in 0..1000 {
            let due = kills.again_at() <= at(now);
            match kills.on_time(at(now)) {
                None => assert!(!due),
                Some(Again { report }) => seen.push((now, report)),
            }
        }
        let reported = |now| (now, now == 454);
        let all = [2, 6, 14, 30, 62, 126, 254, 454, 654, 854];
        assert_eq!(seen, all.map(reported));
        // In its last moment.
        for (budget, report) in [(2, true), (3, false)] {
            let mut kills = Kills::begin(at(0), ms(budget));
            assert_eq!(kills.on_time(at(2)), Some(Again { report }));
        }
    }

    fn at(ms: u64) -> Boottime {
        Boottime(1_000_000_000 + ms * 1_000_000)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Begun at 0, deadline 1000, grace 400, kill budget 500.
    fn starting(timeout: Option<u64>) -> Life {
        Life::new(at(0), at(1000), timeout.map(ms), ms(400), ms(500))
    }

    /// The same, and executed.
    fn life(timeout: Option<u64>) -> Life {
        let mut life = starting(timeout);
        life.on_started();
        life
    }

    #[test]
    fn whatever_ends_a_start_kills_at_once() {
        let mut late = starting(None);
        assert_eq!(late.wake_at(), Some(at(1000)));
        assert_eq!(late.on_time(at(999)), Step::Nothing);
        assert_eq!(late.on_time(at(1000)), Step::Kill);
        assert_eq!(late.cause(), Some(Cause::Deadline));

        let mut slow = starting(Some(300));
        assert_eq!(slow.wake_at(), Some(at(300)));
        assert_eq!(slow.on_time(at(299)), Step::Nothing);
        assert_eq!(slow.on_time(at(300)), Step::Kill);
        assert_eq!(slow.cause(), Some(Cause::Timeout));

        let mut stopped = starting(None);
        let grace = Some(ms(60_000));
        assert_eq!(stopped.on_stop(at(5), Stop::Replaced, grace), Step::Kill);
        assert_eq!(stopped.cause(), Some(Cause::Stopped(Stop::Replaced)));

        let mut left = starting(None);
        assert_eq!(left.on_daemon_gone(at(5)), Step::Kill);
        assert_eq!(left.cause(), Some(Cause::DaemonGone));

        let mut failed = starting(None);
        assert_eq!(failed.on_command_end(at(5), false), Step::Kill);
        assert_eq!(failed.cause(), None);
    }

    #[test]
    fn the_time_of_the_start_is_part_of_the_timeout() {
        let mut life = starting(Some(300));
        assert_eq!(life.on_time(at(200)), Step::Nothing);
        life.on_started();
        assert_eq!(life.wake_at(), Some(at(300)));
        assert_eq!(life.on_time(at(300)), Step::Terminate);
        assert_eq!(life.cause(), Some(Cause::Timeout));
    }

    #[test]
    fn a_start_that_was_ended_does_not_come_back_to_life() {
        let mut life = starting(None);
        assert_eq!(life.on_daemon_gone(at(5)), Step::Kill);
        life.on_started();
        assert!(life.killing());
    }

    #[test]
    fn the_deadline_ends_the_command_and_half_the_kill_budget_later_kills_it() {
        let mut life = life(None);
        assert_eq!(life.wake_at(), Some(at(1000)));
        assert_eq!(life.on_time(at(999)), Step::Nothing);
        assert_eq!(life.on_time(at(1000)), Step::Terminate);
        assert_eq!(life.wake_at(), Some(at(1250)));
        assert_eq!(life.on_time(at(1249)), Step::Nothing);
        assert_eq!(life.on_time(at(1250)), Step::Kill);
        assert_eq!(
            (life.cause(), life.killing(), life.wake_at()),
            (Some(Cause::Deadline), true, None)
        );
    }

    #[test]
    fn a_renewal_moves_the_deadline_forward_only() {
        let mut life = life(None);
        assert_eq!(life.on_renewal(at(500), at(2000)), Step::Nothing);
        assert_eq!(life.on_renewal(at(600), at(1500)), Step::Nothing);
        assert_eq!(life.on_time(at(1999)), Step::Nothing);
        assert_eq!(life.on_time(at(2000)), Step::Terminate);
    }

    #[test]
    fn a_renewal_read_after_the_deadline_is_ignored_even_if_time_was_never_looked_at() {
        let mut life = life(None);
        assert_eq!(life.on_renewal(at(1001), at(9000)), Step::Terminate);
        assert_eq!(life.on_renewal(at(1002), at(9000)), Step::Nothing);
        assert_eq!(life.on_time(at(1250)), Step::Kill);
    }

    #[test]
    fn after_a_freeze_past_the_kill_budget_there_is_no_grace_left() {
        let mut life = life(None);
        assert_eq!(life.on_time(at(5000)), Step::Kill);
        assert_eq!(life.cause(), Some(Cause::Deadline));
    }

    #[test]
    fn timeout_and_stop_give_the_grace_and_a_lost_lease_cuts_it() {
        let mut timed = life(Some(100));
        assert_eq!(timed.on_time(at(100)), Step::Terminate);
        assert_eq!(timed.wake_at(), Some(at(500)));
        assert!(!timed.killing());
        assert_eq!(timed.on_time(at(500)), Step::Kill);
        assert!(timed.killing());
        assert_eq!(timed.cause(), Some(Cause::Timeout));

        let mut stopped = life(None);
        assert_eq!(
            stopped.on_stop(at(900), Stop::Cancelled, Some(ms(60_000))),
            Step::Terminate
        );
        assert_eq!(stopped.wake_at(), Some(at(1000)));
        assert_eq!(stopped.on_time(at(1000)), Step::Nothing);
        assert_eq!(stopped.wake_at(), Some(at(1250)));
        assert_eq!(stopped.on_time(at(1250)), Step::Kill);
        assert_eq!(stopped.cause(), Some(Cause::Stopped(Stop::Cancelled)));
    }

    #[test]
    fn a_second_stop_shortens_the_grace_and_never_lengthens_it() {
        let mut life = life(None);
        assert_eq!(life.on_stop(at(0), Stop::Shutdown, None), Step::Terminate);
        assert_eq!(
            life.on_stop(at(10), Stop::Shutdown, Some(ms(900))),
            Step::Nothing
        );
        assert_eq!(life.wake_at(), Some(at(400)));
        assert_eq!(
            life.on_stop(at(20), Stop::Shutdown, Some(Duration::ZERO)),
            Step::Kill
        );
    }

    #[test]
    fn a_dead_daemon_leaves_fifty_milliseconds() {
        let mut running = life(None);
        assert_eq!(running.on_daemon_gone(at(10)), Step::Terminate);
        assert_eq!(running.on_time(at(59)), Step::Nothing);
        assert_eq!(running.on_time(at(60)), Step::Kill);
        assert_eq!(running.cause(), Some(Cause::DaemonGone));

        let mut ending = life(Some(5));
        assert_eq!(ending.on_time(at(5)), Step::Terminate);
        assert_eq!(ending.on_daemon_gone(at(10)), Step::Nothing);
        assert_eq!(ending.on_time(at(60)), Step::Kill);
        assert_eq!(ending.cause(), Some(Cause::Timeout));
    }

    #[test]
    fn what_a_command_left_behind_is_ended_without_a_cause() {
        let mut left = life(None);
        assert_eq!(left.on_command_end(at(10), false), Step::Terminate);
        assert_eq!(left.on_daemon_gone(at(20)), Step::Nothing);
        assert_eq!(left.on_time(at(70)), Step::Kill);
        assert_eq!(left.cause(), None);

        let mut long = Life::new(at(0), at(60_000), None, ms(10_000), ms(500));
        long.on_started();
        assert_eq!(long.on_command_end(at(0), false), Step::Terminate);
        assert_eq!(long.wake_at(), Some(at(1000)));
    }

    #[test]
    fn a_command_that_died_of_its_daemons_death_is_crashed() {
        let mut life = life(None);
        assert_eq!(life.on_command_end(at(10), true), Step::Terminate);
        assert_eq!(life.cause(), Some(Cause::DaemonGone));
    }

    /// The first cause stays, and what ended by itself has none.
    #[test]
    fn a_daemons_death_explains_the_end_of_a_command_once() {
        let mut stopped = life(None);
        assert_eq!(
            stopped.on_stop(at(5), Stop::Cancelled, None),
            Step::Terminate
        );
        assert_eq!(stopped.on_command_end(at(10), true), Step::Nothing);
        assert_eq!(stopped.cause(), Some(Cause::Stopped(Stop::Cancelled)));

        let mut ended = life(None);
        assert_eq!(ended.on_command_end(at(10), false), Step::Terminate);
        assert_eq!(ended.on_command_end(at(11), true), Step::Nothing);
        assert_eq!(ended.cause(), None);
    }

    #[test]
    fn a_reason_is_given_where_the_outcome_does_not_say_it() {
        let said = |cause| reason(cause).unwrap_or_default();
        let stopped = |stop| Some(Cause::Stopped(stop));
        assert!(said(stopped(Stop::Shutdown)).contains("instance stopped"));
        assert!(said(stopped(Stop::LeaseLost)).contains("could not be renewed"));
        assert!(said(Some(Cause::Deadline)).contains("the guard ended"));
        for silent in [None, Some(Cause::Timeout), stopped(Stop::Cancelled)] {
            assert_eq!(reason(silent), None, "{silent:?}");
        }
    }

    #[test]
    fn outcomes() {
        for (cause, code, expected) in [
            (None, Some(0), Outcome::Succeeded),
            (None, Some(3), Outcome::Succeeded),
            (None, Some(1), Outcome::Failed),
            (None, None, Outcome::Failed),
            (Some(Cause::Timeout), Some(0), Outcome::TimedOut),
            (
                Some(Cause::Stopped(Stop::Cancelled)),
                Some(0),
                Outcome::Cancelled,
            ),
            (
                Some(Cause::Stopped(Stop::Shutdown)),
                None,
                Outcome::Cancelled,
            ),
            (
                Some(Cause::Stopped(Stop::Replaced)),
                None,
                Outcome::Replaced,
            ),
            (
                Some(Cause::Stopped(Stop::LeaseLost)),
                None,
                Outcome::LeaseLost,
            ),
            (Some(Cause::Deadline), Some(0), Outcome::LeaseLost),
            (Some(Cause::DaemonGone), None, Outcome::Crashed),
            (Some(Cause::GuardGone), None, Outcome::Crashed),
        ] {
            assert_eq!(
                outcome(cause, code, &[0, 3]),
                expected,
                "{cause:?} {code:?}"
            );
        }
    }

    proptest::proptest! {
        /// Whatever arrives, and however late time is looked at: after deadline + half the kill budget it is killed.
        #[test]
        fn nothing_lives_past_a_deadline(events in proptest::collection::vec((0u64..3000, 0u8..6, 0u64..3000), 0..40)) {
            let mut life = starting(Some(700));
            let mut events = events;
            events.sort();
            let mut deadline = 1000;
            for (now, what, arg) in events {
                if now < deadline && what == 0 {
                    deadline = deadline.max(arg);
                }
                let _ = match what {
                    0 => life.on_renewal(at(now), at(arg)),
                    1 => life.on_stop(at(now), Stop::Cancelled, Some(ms(arg))),
                    2 => life.on_daemon_gone(at(now)),
                    3 => life.on_command_end(at(now), false),
                    4 => {
                        life.on_started();
                        Step::Nothing
                    }
                    _ => life.on_time(at(now)),
                };
                if now >= deadline + 250 {
                    let _ = life.on_time(at(now));
                    proptest::prop_assert!(life.killing());
                }
            }
            let _ = life.on_time(at(10_000));
            proptest::prop_assert!(life.killing());
        }
    }
}
