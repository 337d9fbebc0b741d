//! Pauses between tries that fail: the one rule for all that is tried again.

use std::time::Duration;

/// The pause after the `n`th failure in a row (from 1): twice as long each time, at most `most`.
pub fn nth(first: Duration, n: u32, most: Duration) -> Duration {
    let doublings = n.saturating_sub(1).min(31);
    first.saturating_mul(1 << doublings).min(most)
}

/// `pause`, or down to half of it, by `roll` from 0 to 1: what failed together does not come back together.
pub fn spread(pause: Duration, roll: f64) -> Duration {
    pause.mul_f64(0.5 + roll.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let (first, most) = (Duration::from_millis(10), Duration::from_millis(70));
        let pauses: Vec<u128> = (0..6).map(|n| nth(first, n, most).as_millis()).collect();
        assert_eq!(pauses, [10, 10, 20, 40, 70, 70]);
        assert_eq!(nth(first, u32::MAX, most), most);
        assert_eq!(nth(Duration::MAX, 9, Duration::MAX), Duration::MAX);
    }

    #[test]
    fn a_pause_is_spread_over_its_second_half() {
        let pause = Duration::from_millis(100);
        let spread = |roll| spread(pause, roll).as_millis();
        assert_eq!([spread(0.0), spread(0.5), spread(1.0)], [50, 75, 100]);
        assert_eq!(spread(7.0), 100);
    }
}
