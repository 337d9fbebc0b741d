//! Which time it is: what an instance believes of the store's clock, and when it does not believe it.
//!
//! The store's clock names the instants at which occurrences are due. It may be wrong: a server that comes up with a
//! clock an hour ahead, or one whose clock is stepped and corrected again. So three kinds of witnesses are asked:
//!
//! - the *monotonic time* that passed on this host since the clock was believed last;
//! - the *wall clocks of the hosts*, this one's and those of the other instances, as their heartbeats tell them;
//! - the *store's clock* itself, when it goes on evenly with its new time for [`PROBATION`] and is not far from the
//!   hosts'.
//!
//! As long as the store's clock runs evenly, an instance believes it whatever the wall clocks show: they may be stepped
//! as well. That holds once the hosts have sided with it, at least one other host among them. Until then only the
//! store's clock itself speaks for it, and hosts that agree with each other outvote it at any time if they are more.
//! One that jumps by more than [`SLACK`] is in doubt until the witnesses agree with it or it comes back. While it is in
//! doubt the instance goes by the monotonic time, claims nothing, and says so.

use std::time::Duration;

use crate::model::Boottime;

/// A jump of the store's clock up to this is taken over at once, as clocks are disciplined by steps of this size.
pub const SLACK: Duration = Duration::from_secs(1);
/// A request is carried out with the clock in doubt when the store's clock is behind the caller's by more than
/// [`SLACK`], or ahead by more than this: the longest that a request may be on its way.
pub const ON_ITS_WAY: Duration = Duration::from_secs(10);
/// A wall clock that is further than this from both times has nothing to say about either.
pub const NEAR: Duration = Duration::from_secs(10);
/// A clock that went on evenly for so long is believed, unless more hosts are near the other time alone than near it.
pub const PROBATION: Duration = Duration::from_secs(15);

/// How much the two clocks may drift apart, for choosing between an old exact sample and a new rough one.
const DRIFT_PPM: i64 = 100;
/// Samples that contradict each other by more than this were taken on both sides of a step.
const STEP_US: i64 = 20_000;

/// The store's clock as one answer showed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// The store's wall clock in Unix µs minus this host's [`Boottime`] in µs.
    pub offset_us: i64,
    /// Half a round trip: how wrong the offset may be.
    pub error_us: i64,
    pub at: Boottime,
}

impl Estimate {
    /// From an answer that shows `store_us`, to a request that left at `sent` and was answered at `received`.
    pub fn new(store_us: i64, sent: Boottime, received: Boottime) -> Self {
        let half = (received.since(sent).as_micros() / 2) as i64;
        Self {
            offset_us: store_us
                .saturating_sub((sent.0 / 1000) as i64)
                .saturating_sub(half),
            error_us: half + 1,
            at: received,
        }
    }

    fn aged(&self, now: Boottime) -> i64 {
        let age_us = i64::try_from(now.since(self.at).as_micros()).unwrap_or(i64::MAX);
        self.error_us
            .saturating_add(age_us / (1_000_000 / DRIFT_PPM))
    }

    /// How far `new` is from what this estimate predicts, µs; None: it fits.
    fn apart(&self, new: &Self) -> Option<i64> {
        let apart = new.offset_us.saturating_sub(self.offset_us);
        (apart.saturating_abs() > self.aged(new.at) + new.error_us + STEP_US).then_some(apart)
    }

    /// Takes over `new`, which fits, if it is the more exact one.
    fn refine(&mut self, new: Self) {
        if new.error_us <= self.aged(new.at) {
            *self = new;
        }
    }
}

/// The effect of a sample. Amounts are in µs: by how much the store's clock is ahead of the expected time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sampled {
    /// As expected, or the first one.
    Even,
    /// A small jump: it is taken over.
    Stepped(i64),
    /// A jump that was not there with the sample before: from now on the clock is in doubt.
    Doubted(i64),
    /// Still in doubt.
    InDoubt,
    /// The store's clock is back at the believed time, give or take a small jump.
    Restored,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The witnesses side with the store's clock, which is this much ahead (µs) of what was believed: it is believed
    /// now.
    Accepted(i64),
    /// The wall clocks of most hosts agree with each other, and the store's is this much ahead (µs) of them.
    Outvoted(i64),
}

/// The store's clock as an instance believes it.
#[derive(Debug, Default, Clone)]
pub struct Belief {
    known: Option<Estimate>,
    /// Most hosts sided with the store's clock once, at least one other host among them.
    confirmed: bool,
    doubt: Option<Doubt>,
    /// When the last doubt began, and when it ended.
    spell: Option<(Boottime, Option<Boottime>)>,
}

#[derive(Debug, Clone, Copy)]
struct Doubt {
    /// What the store's clock shows.
    shown: Estimate,
    /// Since when it goes on evenly like this.
    since: Boottime,
}

impl Belief {
    /// The offset that is believed; None before the first answer.
    pub fn offset_us(&self) -> Option<i64> {
        self.known.map(|e| e.offset_us)
    }

    /// What is believed of the store's clock at `moment`, Unix µs; None before the first answer.
    pub fn at(&self, moment: Boottime) -> Option<i64> {
        self.offset_us()
            .map(|o| o.saturating_add((moment.0 / 1000) as i64))
    }

    /// When the store's clock will show `ms`, on our clock.
    pub fn when(&self, ms: i64) -> Option<Boottime> {
        let us = ms.saturating_mul(1000).saturating_sub(self.offset_us()?);
        Some(Boottime((us.max(0) as u64).saturating_mul(1000)))
    }

    /// While the store's clock is in doubt: how far it is ahead of what is believed, µs.
    pub fn doubt_us(&self) -> Option<i64> {
        let (known, doubt) = self.known.zip(self.doubt)?;
        Some(doubt.shown.offset_us.saturating_sub(known.offset_us))
    }

    /// Whether the clock was in doubt at `moment`; only the last doubt is known.
    pub fn doubted_at(&self, moment: Boottime) -> bool {
        self.spell
            .is_some_and(|(from, to)| from <= moment && to.is_none_or(|to| moment <= to))
    }

    fn note_spell(&mut self, now: Boottime) {
        match (&mut self.spell, self.doubt.is_some()) {
            (None | Some((_, Some(_))), true) => self.spell = Some((now, None)),
            (Some((_, to @ None)), false) => *to = Some(now),
            _ => {}
        }
    }

    pub fn sample(&mut self, new: Estimate) -> Sampled {
        let sampled = self.take(new);
        self.note_spell(new.at);
        sampled
    }

    fn take(&mut self, new: Estimate) -> Sampled {
        let Some(known) = &mut self.known else {
            self.known = Some(new);
            return Sampled::Even;
        };
        let Some(apart) = known.apart(&new) else {
            known.refine(new);
            return match self.doubt.take() {
                Some(_) => Sampled::Restored,
                None => Sampled::Even,
            };
        };
        if apart.saturating_abs() <= SLACK.as_micros() as i64 {
            *known = new;
            return match self.doubt.take() {
                Some(_) => Sampled::Restored,
                None => Sampled::Stepped(apart),
            };
        }
        match &mut self.doubt {
            Some(d) if d.shown.apart(&new).is_none() => {
                d.shown.refine(new);
                Sampled::InDoubt
            }
            doubt => {
                *doubt = Some(Doubt {
                    shown: new,
                    since: new.at,
                });
                Sampled::Doubted(apart)
            }
        }
    }

    /// Asks the witnesses. `walls`: by how much each host's wall clock is ahead of what the store's clock shows now,
    /// ms; this host's own stands first.
    pub fn vote(&mut self, walls: &[i64], now: Boottime) -> Option<Verdict> {
        let verdict = self.ask(walls, now);
        self.note_spell(now);
        verdict
    }

    fn ask(&mut self, walls: &[i64], now: Boottime) -> Option<Verdict> {
        let near = NEAR.as_millis() as i64;
        let known = self.known.as_mut()?;
        let Some(doubt) = self.doubt else {
            if self.confirmed {
                return None;
            }
            let is_near = |w: &&i64| w.saturating_abs() <= near;
            let with = walls.iter().filter(is_near).count();
            let far: Vec<i64> = walls.iter().filter(|w| !is_near(w)).copied().collect();
            let (against, other) = of_one_mind(&far);
            // The store's own clock is one witness among the hosts'.
            if against > with + 1 {
                let ahead_us = -other.saturating_mul(1000);
                let shown = *known;
                known.offset_us = known.offset_us.saturating_sub(ahead_us);
                self.doubt = Some(Doubt { shown, since: now });
                return Some(Verdict::Outvoted(ahead_us));
            }
            self.confirmed = with > against && walls.iter().skip(1).any(|w| is_near(&w));
            return None;
        };
        let ahead_us = doubt.shown.offset_us.saturating_sub(known.offset_us);
        // Each clock is its own witness: the store's for what it shows, this host's monotonic one for what was
        // believed.
        let (mut with, mut against) = (1, 1);
        let (mut near_it, mut near_the_other_alone) = (0, 0);
        for wall in walls {
            let (new, old) = (
                wall.saturating_abs(),
                wall.saturating_add(ahead_us / 1000).saturating_abs(),
            );
            if new.min(old) <= near && new != old {
                *(if new < old { &mut with } else { &mut against }) += 1;
            }
            near_it += usize::from(new <= near);
            near_the_other_alone += usize::from(old <= near && new > near);
        }
        // A server that is some seconds off, after a failover for instance, would be believed by an instance that
        // starts now.
        let lasts = now.since(doubt.since) >= PROBATION && near_it >= near_the_other_alone;
        if with > against || lasts {
            *known = doubt.shown;
            self.doubt = None;
            // The hosts were not asked about this time yet.
            self.confirmed = false;
            return Some(Verdict::Accepted(ahead_us));
        }
        None
    }
}

/// The largest number of `walls` that are near one of them, and that one; of several such, the middle one.
fn of_one_mind(walls: &[i64]) -> (usize, i64) {
    let near = NEAR.as_millis() as i64;
    let around = |one: i64| {
        let is_near = |w: &&i64| w.saturating_sub(one).saturating_abs() <= near;
        walls.iter().filter(is_near).count()
    };
    let most = walls.iter().map(|w| around(*w)).max().unwrap_or(0);
    let mut middle: Vec<i64> = (walls.iter().copied())
        .filter(|w| around(*w) == most)
        .collect();
    middle.sort_unstable();
    (most, middle.get(middle.len() / 2).copied().unwrap_or(0))
}

/// What is said of a store's clock that is `ahead_us` ahead of what this instance believes.
pub fn in_words(ahead_us: i64) -> String {
    let by = Duration::from_millis(ahead_us.unsigned_abs() / 1000);
    let side = if ahead_us > 0 { "ahead of" } else { "behind" };
    format!(
        "the store's clock is {by:.1?} {side} the time that this host measured and that most hosts' clocks show: \
         this instance starts no job by it; correct the clock of the store's host"
    )
}

/// Whether a request that left when its caller believed it was `believed_ms` may be decided by a store whose clock
/// shows `now_ms`. lua/lib.lua has the same rule.
pub fn in_doubt(believed_ms: i64, now_ms: i64) -> bool {
    let ahead = now_ms.saturating_sub(believed_ms);
    ahead < -(SLACK.as_millis() as i64) || ahead > ON_ITS_WAY.as_millis() as i64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: i64 = 1_000_000;
    const HOUR: i64 = 3600 * SECOND;

    fn at(ms: u64) -> Boottime {
        Boottime(ms * 1_000_000)
    }
    /// What the store's clock shows at `ms` when it is `ahead_us` ahead of the truth.
    fn shown(ms: u64, ahead_us: i64) -> Estimate {
        Estimate::new(
            1_800_000_000_000_000 + ms as i64 * 1000 + ahead_us,
            at(ms),
            at(ms),
        )
    }
    fn believed(ahead_us: i64) -> Belief {
        let mut b = Belief::default();
        assert_eq!(b.sample(shown(0, ahead_us)), Sampled::Even);
        assert_eq!(b.vote(&[], at(0)), None);
        b
    }

    #[test]
    fn a_clock_that_goes_on_evenly_is_believed_whatever_the_hosts_show() {
        let mut b = believed(0);
        // Another host sided with it once.
        assert_eq!(b.vote(&[0, 900], at(0)), None);
        for ms in (0..60_000).step_by(1000) {
            assert_eq!(b.sample(shown(ms, 0)), Sampled::Even);
            assert_eq!(b.vote(&[3_600_000, 3_600_000, 3_600_000], at(ms)), None);
        }
        assert_eq!(b.doubt_us(), None);
    }

    #[test]
    fn a_clock_that_no_other_host_sided_with_can_be_outvoted_at_any_time() {
        let hour = HOUR / 1000;
        for own in [-hour, 5 * hour, 0] {
            let mut b = Belief::default();
            b.sample(shown(0, HOUR));
            // One host against the store, or its own host alone for it.
            for ms in [0, 1000, 60_000] {
                b.sample(shown(ms, HOUR));
                assert_eq!(b.vote(&[own], at(ms)), None, "{own}");
            }
            let others = vec![-hour; if own == 0 { 3 } else { 2 }];
            let walls = [vec![own], others].concat();
            let verdict = b.vote(&walls, at(61_000));
            assert_eq!(verdict, Some(Verdict::Outvoted(HOUR)), "{own}");
        }
        // Hosts that disagree do not confirm it either.
        let mut b = believed(HOUR);
        assert_eq!(b.vote(&[-hour, 0], at(0)), None);
        assert_eq!(b.vote(&[-hour, 0, -hour], at(1000)), None);
        let verdict = b.vote(&[-hour, 0, -hour, -hour], at(2000));
        assert_eq!(verdict, Some(Verdict::Outvoted(HOUR)));
        // A time that is believed after a jump has to be confirmed anew.
        let mut b = believed(0);
        assert_eq!(b.vote(&[0, 0], at(0)), None);
        b.sample(shown(1000, HOUR));
        let verdict = b.vote(&[5 * hour], at(16_000));
        assert_eq!(verdict, Some(Verdict::Accepted(HOUR)));
        let verdict = b.vote(&[5 * hour, -hour, -hour], at(17_000));
        assert_eq!(verdict, Some(Verdict::Outvoted(HOUR)));
    }

    #[test]
    fn an_estimate_grows_less_exact_with_time_and_gives_way_to_a_better_one() {
        let of = |offset_us: i64, error_us: i64, ms: u64| Estimate {
            offset_us,
            error_us,
            at: at(ms),
        };
        let known = of(0, 10, 0);
        // 100 in a million, of ten seconds: 1,000 µs.
        assert_eq!((known.aged(at(0)), known.aged(at(10_000))), (10, 1010));
        let most = 1010 + 30 + STEP_US;
        for (offset, apart) in [
            (most, None),
            (-most, None),
            (most + 1, Some(most + 1)),
            (-most - 1, Some(-most - 1)),
        ] {
            assert_eq!(known.apart(&of(offset, 30, 10_000)), apart, "{offset}");
        }
        for (error, taken) in [(1010, true), (1011, false)] {
            let (mut refined, new) = (known, of(5, error, 10_000));
            refined.refine(new);
            assert_eq!(refined == new, taken, "{error}");
        }
        let b = believed(HOUR);
        assert_eq!(b.offset_us(), Some(1_800_000_000_000_000 + HOUR));
    }

    #[test]
    fn small_steps_are_taken_over() {
        let mut b = believed(0);
        assert_eq!(
            b.sample(shown(1000, SECOND / 2)),
            Sampled::Stepped(SECOND / 2)
        );
        assert_eq!(b.sample(shown(1100, SECOND / 2)), Sampled::Even);
    }

    #[test]
    fn a_clock_that_comes_back_a_little_beside_is_said_to_be_right_again() {
        let mut b = believed(0);
        assert_eq!(b.sample(shown(1000, HOUR)), Sampled::Doubted(HOUR));
        assert_eq!(b.sample(shown(2000, SECOND / 2)), Sampled::Restored);
        assert_eq!(b.doubt_us(), None);
        assert_eq!(b.sample(shown(3000, SECOND / 2)), Sampled::Even);
    }

    #[test]
    fn a_clock_that_is_wrong_for_two_seconds_is_not_believed() {
        for wrong in [HOUR, -HOUR, 40 * SECOND, 2 * SECOND, 10 * 365 * 24 * HOUR] {
            let mut b = believed(0);
            let before = b.offset_us();
            assert_eq!(b.sample(shown(1000, wrong)), Sampled::Doubted(wrong));
            assert_eq!(b.sample(shown(2000, wrong)), Sampled::InDoubt);
            assert_eq!(b.vote(&[-wrong / 1000], at(2000)), None);
            assert_eq!((b.offset_us(), b.doubt_us()), (before, Some(wrong)));
            assert_eq!(b.sample(shown(3000, 0)), Sampled::Restored);
            let doubted = [999, 1000, 2999, 3000, 3001].map(|ms| b.doubted_at(at(ms)));
            assert_eq!(doubted, [false, true, true, true, false]);
            assert_eq!((b.offset_us(), b.doubt_us()), (before, None));
        }
    }

    #[test]
    fn the_hosts_decide_whether_a_jump_put_the_clock_right() {
        // Five hosts with rough clocks, three of them within a second.
        let rough = [0, 1000, -1000, 3000, -3000];
        for (was, is, right) in [
            (HOUR, 0, true),
            (-2 * SECOND, 0, true),
            (0, HOUR, false),
            (0, -2 * SECOND, false),
        ] {
            let mut b = believed(was);
            assert!(matches!(b.sample(shown(1000, is)), Sampled::Doubted(_)));
            let walls = rough.map(|w| w - is / 1000);
            let verdict = b.vote(&walls, at(1000));
            assert_eq!(
                verdict,
                right.then_some(Verdict::Accepted(is - was)),
                "{was} -> {is}"
            );
            // Later, if it goes on evenly, and is near to what they show.
            let lasts = !right && is.abs() < NEAR.as_micros() as i64;
            let verdict = b.vote(&walls, at(3_600_000));
            assert_eq!(
                verdict,
                lasts.then_some(Verdict::Accepted(is - was)),
                "{was} -> {is}"
            );
        }
    }

    #[test]
    fn without_a_witness_a_jump_is_believed_when_it_lasts() {
        let mut b = believed(0);
        assert_eq!(b.sample(shown(1000, HOUR)), Sampled::Doubted(HOUR));
        assert_eq!(b.vote(&[], at(10_000)), None);
        // Another jump begins anew.
        assert_eq!(
            b.sample(shown(10_000, 2 * HOUR)),
            Sampled::Doubted(2 * HOUR)
        );
        assert_eq!(b.vote(&[], at(20_000)), None);
        assert_eq!(
            b.vote(&[], at(25_000)),
            Some(Verdict::Accepted(2 * HOUR)),
            "evenly for fifteen seconds"
        );
    }

    #[test]
    fn at_first_most_hosts_of_one_mind_outvote_the_store() {
        let hour = HOUR / 1000;
        for (walls, outvoted) in [
            // One host against the store: the store's clock names the instants.
            (vec![-hour], None),
            (vec![-hour, -hour + 3000], Some(HOUR - 3 * SECOND)),
            // Two that are wrong in ways of their own.
            (vec![-hour, hour], None),
            (vec![-hour, hour, 0], None),
            (vec![3000, -3000, 0, 1000, -1000], None),
            (vec![-hour, -hour, -hour, 0], Some(HOUR)),
        ] {
            let mut b = Belief::default();
            b.sample(shown(0, HOUR));
            let verdict = b.vote(&walls, at(0));
            assert_eq!(verdict, outvoted.map(Verdict::Outvoted), "{walls:?}");
            assert_eq!(b.doubt_us(), outvoted, "{walls:?}");
        }
        // And when the clock is put right, it is believed at once.
        let mut b = Belief::default();
        b.sample(shown(0, HOUR));
        assert_eq!(
            b.vote(&[-hour, -hour], at(0)),
            Some(Verdict::Outvoted(HOUR))
        );
        assert_eq!(b.sample(shown(1000, 0)), Sampled::Restored);
    }

    /// Hosts whose clocks are right, some seconds off, or wrong in one of two ways.
    #[test]
    fn a_host_that_is_far_from_both_is_no_witness_and_one_between_them_is_one_for_both() {
        let jumped = |by: i64, walls: &[i64]| {
            let mut b = believed(0);
            assert_eq!(
                b.sample(shown(1000, by * 1000)),
                Sampled::Doubted(by * 1000)
            );
            let early = b.vote(walls, at(1001));
            let late = b.vote(walls, at(1000) + PROBATION);
            (early.is_some(), late.is_some())
        };
        let hour = 3_600_000;
        assert_eq!(jumped(hour, &[10 * hour]), (false, true));
        assert_eq!(jumped(hour, &[0]), (true, false));
        // One near each: it lasts. The limit is near.
        assert_eq!(jumped(-15_000, &[0, 15_000]), (false, true));
        assert_eq!(jumped(-15_000, &[10_000, 14_000]), (false, true));
        assert_eq!(jumped(-15_000, &[10_001, 14_000]), (false, false));
    }

    #[test]
    fn a_request_is_in_doubt_beyond_the_slack_or_the_longest_way() {
        let all = [-1001, -1000, 0, 10_000, 10_001].map(|ahead| in_doubt(5000, 5000 + ahead));
        assert_eq!(all, [true, false, false, false, true]);
        assert!(
            in_words(3_600_000_000).starts_with("the store's clock is 3600.0s ahead of the time")
        );
        assert!(in_words(-1_500_000).starts_with("the store's clock is 1.5s behind the time"));
    }

    fn hosts() -> impl Strategy<Value = Vec<i64>> {
        let one = (
            prop::sample::select(vec![0, 15_000, HOUR / 1000]),
            -12_000i64..12_000,
        );
        prop::collection::vec(one.prop_map(|(by, rough)| by + rough), 1..9)
    }

    proptest! {
        /// An instance that was alone before comes to believe what one believes that starts now.
        #[test]
        fn who_was_first_comes_to_what_a_newcomer_believes(walls in hosts(), alone in 0u64..100_000) {
            let (mut first, mut newcomer) = (Belief::default(), Belief::default());
            first.sample(shown(0, HOUR));
            first.vote(&walls[..1], at(0));
            first.sample(shown(alone, HOUR));
            newcomer.sample(shown(alone, HOUR));
            prop_assert_eq!(first.vote(&walls, at(alone)), newcomer.vote(&walls, at(alone)));
            prop_assert_eq!(first.doubt_us(), newcomer.doubt_us());
        }

        /// While neither the store's clock nor the hosts' are stepped, the belief does not go to and fro.
        #[test]
        fn the_same_witnesses_lead_to_one_verdict(walls in hosts(), jump in prop::sample::select(vec![0, 15 * SECOND, HOUR])) {
            let mut b = believed(0);
            b.sample(shown(100, jump));
            let mut verdicts = vec![];
            for ms in (1000..200_000).step_by(1000) {
                b.sample(shown(ms, jump));
                verdicts.extend(b.vote(&walls, at(ms)));
            }
            // Accepted, as hosts near it outnumber those near what was believed; outvoted by more at a third time.
            prop_assert!(verdicts.len() <= 2, "{:?}", verdicts);
        }

        /// Whatever the store shows, and whatever hosts say, nothing overflows, and what is believed only moves to what
        /// the store has shown, or to what most hosts said at first.
        #[test]
        fn any_times_are_survived(
            first in any::<i64>(),
            times in prop::collection::vec((any::<i64>(), 0u64..30_000, prop::collection::vec(any::<i64>(), 0..4)), 1..20)
        ) {
            let mut b = Belief::default();
            let mut now = 0;
            b.sample(Estimate::new(first, at(0), at(0)));
            for (store, wait, walls) in times {
                now += wait;
                let _ = b.sample(Estimate::new(store, at(now), at(now + 5)));
                let _ = b.vote(&walls, at(now + 5));
                prop_assert!(b.offset_us().is_some());
            }
        }
    }
}
