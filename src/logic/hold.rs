//! One granted run as its holder keeps it: the run waits for its turn, starts, has its lease renewed, shows its output,
//! and ends.
//!
//! [`Hold::next`] says what to do; the caller does it and reports the result, or calls again when the time that
//! [`Do::Wait`] names has come. At most one renewal and one piece of output are under way at a time.
//!
//! ```text
//! Waiting ── Start ──▶ Running ── somebody wants it ended ──▶ Ending
//!    │                    └──────── trust is over, or the store says so ──▶ Lost ◀── (Ending)
//!    └── Abandon: nothing was started
//! ```

use std::time::Duration;

use super::{
    claim::{self, Renewal},
    guard_life::Stop,
    lease::Lease,
    trust::{HeldLease, Step},
};
use crate::model::{Boottime, Outcome};

/// A shorter run hands in its output only at its end.
const SHOW_AFTER: Duration = Duration::from_millis(500);
const SHOW_EVERY: Duration = Duration::from_millis(300);
/// A piece that did not arrive in time is halved, down to this.
const SMALLEST_PIECE: usize = 4 << 10;
/// A run that was granted in time, but had to wait here until so long after the last moment for a start, is missed.
const START_LATER_MS: i64 = 1000;

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Do {
    /// Ask the store to renew the lease, with this number; then [`Hold::renewed`].
    Renew(u32),
    /// Start the command: its turn is used up.
    Start,
    /// Start nothing: record this. `another_attempt`: another attempt may follow at once, because it would repeat
    /// nothing.
    Abandon {
        outcome: Outcome,
        why: &'static str,
        another_attempt: bool,
    },
    /// Have the command ended; None: with the job's own grace.
    Stop(Stop, Option<Duration>),
    /// Hand in the new output, at most so many bytes; then [`Hold::shown`].
    Show(usize),
    /// Do nothing before then.
    Wait(Boottime),
}

/// What a holder sees at one moment.
#[derive(Debug, Clone, Copy)]
pub struct View {
    pub now: Boottime,
    /// Unix ms of the store's clock; None before its first answer.
    pub store_ms: Option<i64>,
    /// This run may be started.
    pub turn: bool,
    /// All runs of this instance are to end.
    pub killed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Granted, and not started.
    Waiting,
    /// The store said what becomes of a run that is not started.
    Refused(Do),
    Running,
    /// The command was told to end; its lease is kept until it has ended.
    Ending,
    /// The lease is not ours any more, and the command was told to end.
    Lost,
}

/// Whether a renewal is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RenewalRequest {
    None,
    UnderWay,
    /// The store may have answered it before the change that the holder is to look for: renew once more.
    UnderWayAndOnceMore,
}

/// The holder's side of one run.
#[derive(Debug, Clone)]
pub struct Hold {
    lease: HeldLease,
    /// How long a command whose lease is lost may take to end by itself.
    grace: Duration,
    phase: Phase,
    renewal: RenewalRequest,
    /// The incarnation of the store that granted the run.
    granted_by: String,
    /// The incarnation of the store that answered last that it does not know the run, since then.
    reclaim: Option<String>,
    /// The run must not start later than this, Unix ms of the store's clock.
    start_by: Option<i64>,
    /// The store's request to end the run, not yet passed on to the command.
    stop: Option<Stop>,
    show_at: Boottime,
    showing: bool,
    pieces: Pieces,
}

impl Hold {
    /// A lease that this `incarnation` of the store granted to a request which left at `sent`. `start_by`: for a first
    /// attempt only. `largest`: the size of the largest piece of output, in bytes.
    pub fn new(
        lease: Lease,
        incarnation: &str,
        sent: Boottime,
        start_by: Option<i64>,
        largest: usize,
    ) -> Self {
        Self {
            lease: HeldLease::new(lease, sent),
            grace: lease.kill_budget / 2,
            phase: Phase::Waiting,
            renewal: RenewalRequest::None,
            granted_by: incarnation.to_owned(),
            reclaim: None,
            start_by,
            stop: None,
            show_at: Boottime(0),
            showing: false,
            pieces: Pieces::new(largest),
        }
    }

    pub fn trusted_until(&self) -> Boottime {
        self.lease.trusted_until()
    }

    /// [`Renew::reclaim`](claim::Renew::reclaim) of the next renewal.
    pub fn reclaim(&self) -> String {
        self.reclaim.clone().unwrap_or_default()
    }

    /// False: no renewal is under way, or its answer does not matter any more.
    pub fn awaits_renewal(&self) -> bool {
        self.renewal != RenewalRequest::None
    }

    /// What to do now. The caller asks again until the answer is to wait.
    pub fn next(&mut self, v: View) -> Do {
        match self.phase {
            Phase::Waiting => self.before_the_start(v),
            Phase::Refused(end) => end,
            Phase::Running | Phase::Ending | Phase::Lost => self.while_it_runs(v),
        }
    }

    fn before_the_start(&mut self, v: View) -> Do {
        if v.killed {
            return Do::Abandon {
                outcome: Outcome::LeaseLost,
                why: "this instance was stopped before it started the command",
                another_attempt: true,
            };
        }
        let over = self.start_by.map(|by| by.saturating_add(START_LATER_MS));
        if v.store_ms.zip(over).is_some_and(|(now, over)| now > over) {
            return Do::Abandon {
                outcome: Outcome::Missed,
                why: claim::TOO_LATE,
                another_attempt: false,
            };
        }
        if self.awaits_renewal() {
            return Do::Wait(Boottime(u64::MAX));
        }
        if v.turn && self.lease.may_start(v.now) {
            self.phase = Phase::Running;
            self.show_at = v.now + SHOW_AFTER;
            return Do::Start;
        }
        // Once trust is over, the store may have granted the lease to another. Its answer says so, or confirms that the
        // lease is ours.
        if v.now >= self.lease.renew_at() {
            return self.renew();
        }
        Do::Wait(self.lease.renew_at())
    }

    fn while_it_runs(&mut self, v: View) -> Do {
        let step = self.lease.step(v.now);
        if self.phase != Phase::Lost && step == Step::StepDown {
            // The guard has the same deadline, and acts on it without us.
            return self.lose();
        }
        if let Some(stop) = self.stop.take() {
            return Do::Stop(stop, None);
        }
        if v.killed && self.phase == Phase::Running {
            self.phase = Phase::Ending;
            return Do::Stop(Stop::Shutdown, None);
        }
        if self.phase != Phase::Lost && step == Step::Renew && !self.awaits_renewal() {
            return self.renew();
        }
        if !self.showing && v.now >= self.show_at {
            self.showing = true;
            self.show_at = v.now + SHOW_EVERY;
            return Do::Show(self.pieces.most());
        }
        let show_at = match self.showing {
            true => Boottime(u64::MAX),
            false => self.show_at,
        };
        Do::Wait(match (self.phase, step) {
            (Phase::Lost, _) => show_at,
            // The renewal is under way. Trust ends in its own time all the same.
            (_, Step::Renew) => show_at.min(self.lease.trusted_until()),
            (_, Step::WaitUntil(at)) => show_at.min(at),
            (_, Step::StepDown) => show_at,
        })
    }

    fn renew(&mut self) -> Do {
        self.renewal = RenewalRequest::UnderWay;
        Do::Renew(self.lease.next_seq())
    }

    fn lose(&mut self) -> Do {
        self.phase = Phase::Lost;
        self.renewal = RenewalRequest::None;
        self.stop = None;
        Do::Stop(Stop::LeaseLost, Some(self.grace))
    }

    /// The answer of the store, and its incarnation, to a renewal that left at `sent`, and came at `now`; None: there
    /// was none.
    pub fn renewed(
        &mut self,
        answer: Option<(Renewal, &str)>,
        sent: Boottime,
        now: Boottime,
    ) -> Renewed {
        let once_more = self.renewal == RenewalRequest::UnderWayAndOnceMore;
        self.renewal = RenewalRequest::None;
        if let Some((renewal, incarnation)) = answer {
            self.reclaim = (renewal == Renewal::Unknown).then(|| incarnation.to_owned());
        }
        let other_data = answer.is_some_and(|(_, incarnation)| incarnation != self.granted_by);
        let renewed = match (answer.map(|(renewal, _)| renewal), self.phase) {
            (_, Phase::Lost | Phase::Refused(_)) => return Renewed::Nothing,
            (None, _) => {
                // Whatever went wrong: while trust lasts, trying again is right.
                self.lease.failed(now);
                Renewed::Nothing
            }
            (Some(Renewal::Unknown), _) => {
                self.lease.failed(now);
                Renewed::Nothing
            }
            (Some(Renewal::Renewed(_)), Phase::Waiting)
                if other_data && sent >= self.lease.trusted_until() =>
            {
                // Others may have run this occurrence, and newer ones, in the data that was lost.
                self.phase = Phase::Refused(Do::Abandon {
                    outcome: Outcome::Unknown,
                    why: claim::LOST,
                    another_attempt: false,
                });
                Renewed::Nothing
            }
            (Some(Renewal::Renewed(stop)), Phase::Waiting) => {
                self.lease.renewed_unstarted(sent);
                if let Some(stop) = stop {
                    self.phase = Phase::Refused(Do::Abandon {
                        outcome: match stop {
                            claim::StopRequest::Cancelled => Outcome::Cancelled,
                            claim::StopRequest::Replaced => Outcome::Replaced,
                        },
                        why: "ended before it was started",
                        another_attempt: false,
                    });
                }
                Renewed::Nothing
            }
            (Some(Renewal::Renewed(stop)), _) => {
                self.lease.renewed(sent, now);
                if let (Some(stop), Phase::Running) = (stop, self.phase) {
                    self.phase = Phase::Ending;
                    self.stop = Some(match stop {
                        claim::StopRequest::Cancelled => Stop::Cancelled,
                        claim::StopRequest::Replaced => Stop::Replaced,
                    });
                }
                Renewed::Extended(self.lease.trusted_until())
            }
            (Some(Renewal::Lost), Phase::Waiting) => {
                self.phase = Phase::Refused(Do::Abandon {
                    outcome: Outcome::LeaseLost,
                    why: "the lease was lost before the command was started",
                    another_attempt: true,
                });
                Renewed::Nothing
            }
            (Some(Renewal::Lost), _) => match self.lose() {
                Do::Stop(stop, grace) => Renewed::Lost(stop, grace),
                _ => Renewed::Nothing,
            },
        };
        if once_more {
            self.lease.renew_now();
        }
        renewed
    }

    /// Somebody may have asked to end the run: the answer to the next renewal tells.
    pub fn nudged(&mut self) {
        if self.awaits_renewal() {
            self.renewal = RenewalRequest::UnderWayAndOnceMore;
        }
        self.lease.renew_now();
    }

    /// There was no new output.
    pub fn nothing_to_show(&mut self) {
        self.showing = false;
    }

    /// A piece of output was handed in, of so many bytes; None: it did not arrive.
    pub fn shown(&mut self, arrived: Option<usize>, now: Boottime) {
        self.showing = false;
        // As long as it might be: there is more.
        if arrived.is_some_and(|length| length >= self.pieces.most()) {
            self.show_at = now;
        }
        self.pieces.handed_in(arrived.is_some());
    }
}

/// How much output is handed in at a time.
#[derive(Debug, Clone)]
pub struct Pieces {
    most: usize,
    largest: usize,
}

impl Pieces {
    /// At most `largest` bytes.
    pub fn new(largest: usize) -> Self {
        Self {
            most: largest,
            largest,
        }
    }

    /// The most for the next piece.
    pub fn most(&self) -> usize {
        self.most
    }

    /// A piece was handed in, and arrived or not.
    pub fn handed_in(&mut self, arrived: bool) {
        self.most = match arrived {
            true => (self.most * 2).min(self.largest),
            false => (self.most / 2).max(SMALLEST_PIECE),
        };
    }
}

/// What follows at once from the answer to a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewed {
    Nothing,
    /// The command may run until then.
    Extended(Boottime),
    /// The lease is another's: have the command ended.
    Lost(Stop, Option<Duration>),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const T0: u64 = 1000;
    /// The incarnation that granted the run.
    const DATA: &str = "data";

    fn ms(n: u64) -> Boottime {
        Boottime((T0 + n) * 1_000_000)
    }
    fn lease() -> Lease {
        Lease::new(Duration::from_secs(2), 0.01).expect("valid")
    }
    fn hold() -> Hold {
        Hold::new(lease(), DATA, ms(0), Some(60_000), 64 << 10)
    }
    fn view(now: u64, turn: bool) -> View {
        View {
            now: ms(now),
            store_ms: Some(0),
            turn,
            killed: false,
        }
    }
    fn same(renewal: Renewal) -> Option<(Renewal, &'static str)> {
        Some((renewal, DATA))
    }
    fn started() -> Hold {
        let mut hold = hold();
        assert_eq!(hold.next(view(1, true)), Do::Start);
        hold
    }
    fn abandoned(what: Do) -> Option<(Outcome, bool)> {
        match what {
            Do::Abandon {
                outcome,
                another_attempt,
                ..
            } => Some((outcome, another_attempt)),
            _ => None,
        }
    }

    /// Another instance may have been granted the run, and have ended it, in data that is not there any more.
    #[test]
    fn other_data_confirms_no_lease_once_trust_is_over() {
        for (sent, starts) in [(900, true), (1900, false)] {
            let mut hold = hold();
            assert_eq!(hold.next(view(sent, false)), Do::Renew(1));
            let confirmed = Some((Renewal::Renewed(None), "other"));
            hold.renewed(confirmed, ms(sent), ms(sent + 10));
            let next = hold.next(view(sent + 11, true));
            match starts {
                true => assert_eq!(next, Do::Start),
                false => assert_eq!(abandoned(next), Some((Outcome::Unknown, false))),
            }
        }
    }

    /// The next renewal, which comes soon, gives the lease back to the store that has lost it.
    #[test]
    fn a_holder_whose_run_the_store_does_not_know_asks_again_and_reclaims_it() {
        for mut hold in [hold(), started()] {
            assert_eq!(hold.reclaim(), "");
            let asked = hold.next(view(900, false));
            assert_eq!(asked, Do::Renew(1));
            let trusted_until = hold.trusted_until();
            let follows = hold.renewed(Some((Renewal::Unknown, "other")), ms(900), ms(901));
            assert_eq!(follows, Renewed::Nothing);
            assert_eq!(
                (&*hold.reclaim(), hold.trusted_until()),
                ("other", trusted_until)
            );
            while !matches!(hold.next(view(901, false)), Do::Wait(_)) {
                hold.shown(Some(0), ms(901));
            }
            assert_eq!(hold.next(view(1100, false)), Do::Renew(2));
            hold.renewed(Some((Renewal::Renewed(None), "other")), ms(1100), ms(1101));
            assert!(hold.trusted_until() > trusted_until);
            assert_eq!(hold.reclaim(), "");
        }
    }

    #[test]
    fn what_waits_for_its_turn_is_kept_renewed_and_started_with_enough_trust() {
        let mut hold = hold();
        assert!(matches!(hold.next(view(1, false)), Do::Wait(at) if at > ms(100)));
        assert_eq!(hold.next(view(900, false)), Do::Renew(1));
        // The answer may ask to end the run: nothing is started before the answer comes.
        assert!(matches!(hold.next(view(901, true)), Do::Wait(_)));
        // Trust is over, and the store confirms the lease once more.
        let answer = same(Renewal::Renewed(None));
        assert_eq!(hold.renewed(answer, ms(1900), ms(1950)), Renewed::Nothing);
        assert_eq!(hold.next(view(1951, true)), Do::Start);
    }

    #[test]
    fn what_was_not_started_says_whether_another_attempt_repeats_nothing() {
        let killed = View {
            killed: true,
            ..view(1, true)
        };
        assert_eq!(
            abandoned(hold().next(killed)),
            Some((Outcome::LeaseLost, true))
        );
        let late = View {
            store_ms: Some(61_001),
            ..view(1, true)
        };
        assert_eq!(abandoned(hold().next(late)), Some((Outcome::Missed, false)));
        let just_in_time = View {
            store_ms: Some(61_000),
            ..late
        };
        assert_eq!(hold().next(just_in_time), Do::Start);
        for (answer, expected) in [
            (Renewal::Lost, (Outcome::LeaseLost, true)),
            (
                Renewal::Renewed(Some(claim::StopRequest::Cancelled)),
                (Outcome::Cancelled, false),
            ),
            (
                Renewal::Renewed(Some(claim::StopRequest::Replaced)),
                (Outcome::Replaced, false),
            ),
        ] {
            let mut hold = hold();
            assert_eq!(hold.next(view(900, false)), Do::Renew(1));
            hold.renewed(same(answer), ms(900), ms(901));
            assert_eq!(abandoned(hold.next(view(902, true))), Some(expected));
        }
    }

    #[test]
    fn a_run_is_told_to_end_once_and_keeps_its_lease_until_it_has() {
        let mut hold = started();
        let cancelled = same(Renewal::Renewed(Some(claim::StopRequest::Cancelled)));
        assert_eq!(hold.next(view(450, false)), Do::Renew(1));
        assert!(matches!(
            hold.renewed(cancelled, ms(450), ms(460)),
            Renewed::Extended(_)
        ));
        assert_eq!(hold.next(view(461, false)), Do::Stop(Stop::Cancelled, None));
        let killed = |now| View {
            killed: true,
            ..view(now, false)
        };
        assert!(!matches!(hold.next(killed(462)), Do::Stop(..)));
        assert_eq!(hold.next(killed(900)), Do::Renew(2));
        assert_eq!(hold.next(killed(901)), Do::Show(64 << 10));
        hold.renewed(cancelled, ms(901), ms(902));
        assert!(!matches!(hold.next(killed(903)), Do::Stop(..)));
    }

    #[test]
    fn a_stop_of_the_instance_ends_a_run_once() {
        let mut hold = started();
        let killed = |now| View {
            killed: true,
            ..view(now, false)
        };
        assert_eq!(hold.next(killed(2)), Do::Stop(Stop::Shutdown, None));
        assert!(matches!(hold.next(killed(3)), Do::Wait(_)));
        // Its lease is kept while it ends.
        assert_eq!(hold.next(killed(450)), Do::Renew(1));
    }

    /// Its turn has come, and what is left of its trust is too short to start a command with.
    #[test]
    fn nothing_is_started_on_the_rest_of_a_trust() {
        let mut hold = hold();
        let until = hold.trusted_until();
        let quarter = lease().trust / 4;
        let at = |before: Duration| View {
            now: Boottime(until.0 - before.as_nanos() as u64),
            ..view(0, true)
        };
        let short = quarter - Duration::from_millis(1);
        assert_eq!(hold.clone().next(at(quarter)), Do::Start);
        assert_eq!(hold.next(at(short)), Do::Renew(1));
    }

    #[test]
    fn a_lease_that_is_lost_ends_the_run_and_is_not_asked_for_again() {
        for late in [false, true] {
            let mut hold = started();
            assert_eq!(hold.next(view(450, false)), Do::Renew(1));
            if late {
                let end = Do::Stop(Stop::LeaseLost, Some(lease().kill_budget / 2));
                assert_eq!(hold.next(view(1990, false)), end);
                // Its answer comes too late to be of use.
                let answer = same(Renewal::Renewed(None));
                assert_eq!(hold.renewed(answer, ms(1980), ms(1991)), Renewed::Nothing);
            } else {
                let lost = hold.renewed(same(Renewal::Lost), ms(450), ms(451));
                assert!(matches!(lost, Renewed::Lost(Stop::LeaseLost, Some(_))));
            }
            assert!(!hold.awaits_renewal());
            for now in [2000, 5000] {
                let next = hold.next(view(now, false));
                assert!(matches!(next, Do::Show(_) | Do::Wait(_)), "{next:?}");
            }
        }
    }

    #[test]
    fn a_nudge_during_a_renewal_asks_once_more() {
        let mut hold = started();
        hold.nudged();
        assert_eq!(hold.next(view(10, false)), Do::Renew(1));
        hold.nudged();
        assert!(matches!(hold.next(view(11, false)), Do::Wait(_)));
        hold.renewed(same(Renewal::Renewed(None)), ms(10), ms(12));
        assert_eq!(hold.next(view(13, false)), Do::Renew(2));
        hold.renewed(same(Renewal::Renewed(None)), ms(13), ms(14));
        assert!(matches!(hold.next(view(15, false)), Do::Wait(_)));
    }

    #[test]
    fn output_is_handed_in_from_half_a_second_on_and_once_in_a_while() {
        let mut hold = started();
        let show = |hold: &mut Hold, at| {
            assert_eq!(hold.next(view(at - 1, false)), Do::Wait(ms(at)));
            assert_eq!(hold.next(view(at, false)), Do::Show(64 << 10));
            // One piece at a time.
            assert!(matches!(hold.next(view(at, false)), Do::Wait(_)));
        };
        hold.lease = HeldLease::new(
            Lease::new(Duration::from_secs(60), 0.01).expect("valid"),
            ms(0),
        );
        show(&mut hold, 501);
        hold.nothing_to_show();
        show(&mut hold, 801);
        hold.shown(Some(1), ms(802));
        show(&mut hold, 1101);
    }

    #[test]
    fn pieces_of_output_shrink_where_they_do_not_arrive_and_grow_again() {
        let mut hold = started();
        let mut now = 501;
        let mut piece = |hold: &mut Hold, left: Option<usize>| {
            now += 300;
            let size = match hold.next(view(now, false)) {
                Do::Show(size) => size,
                Do::Renew(_) => {
                    hold.renewed(same(Renewal::Renewed(None)), ms(now), ms(now));
                    match hold.next(view(now, false)) {
                        Do::Show(size) => size,
                        other => panic!("{other:?}"),
                    }
                }
                other => panic!("{other:?}"),
            };
            hold.shown(left.map(|left| size - left), ms(now));
            size
        };
        let sizes = [None; 6].map(|lost| piece(&mut hold, lost) >> 10);
        assert_eq!(sizes, [64, 32, 16, 8, 4, 4]);
        assert_eq!(piece(&mut hold, Some(0)) >> 10, 4);
        // There is more: at once.
        assert!(hold.show_at < ms(501 + 300 * 7 + 1));
        assert_eq!(piece(&mut hold, Some(1)) >> 10, 8);
        assert_eq!(hold.show_at, ms(501 + 300 * 9));
    }

    proptest! {
        /// Whatever the store does: the command is told to end before anybody else may have the lease, one renewal is
        /// under way at most, and the holder never waits past the moment at which it has to act.
        #[test]
        fn trust_is_never_outlived(
            answers in prop::collection::vec((0..600u64, 0..10u8), 1..60), step in 1..50u64,
        ) {
            let mut hold = started();
            let (mut now, mut answers) = (1, answers.into_iter());
            let mut asked: Option<(u64, u64, u8)> = None;
            let (mut told, mut trusted) = (None, hold.trusted_until());
            while now < 20_000 && told.is_none() {
                now += step;
                if let Some((sent, at, kind)) = asked && at <= now {
                    asked = None;
                    let answer = match kind {
                        0..5 => same(Renewal::Renewed(None)),
                        5..7 => None,
                        7..9 => Some((Renewal::Unknown, "other")),
                        _ => same(Renewal::Lost),
                    };
                    match hold.renewed(answer, ms(sent), ms(now)) {
                        Renewed::Extended(until) => trusted = until,
                        Renewed::Lost(..) => told = Some(now),
                        Renewed::Nothing => {}
                    }
                }
                loop {
                    match hold.next(view(now, false)) {
                        Do::Renew(_) => {
                            prop_assert!(asked.is_none(), "two renewals at once");
                            prop_assert!(told.is_none(), "asked for what is lost");
                            let (delay, kind) = answers.next().unwrap_or((1, 5));
                            asked = Some((now, now + delay, kind));
                        }
                        Do::Stop(Stop::LeaseLost, _) => told = Some(now),
                        Do::Show(_) => hold.shown(Some(0), ms(now)),
                        Do::Wait(at) => {
                            prop_assert!(told.is_some() || at <= trusted, "sleeps through the end of trust");
                            break;
                        }
                        other => prop_assert!(false, "{other:?}"),
                    }
                }
                prop_assert!(told.is_some() || ms(now) < trusted, "runs without trust");
            }
            prop_assert!(told.is_some(), "it goes on without answers");
        }
    }
}
