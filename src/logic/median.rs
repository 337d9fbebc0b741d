//! The middle of some values: what is usual.

/// The middle one; of two middle ones, their mean. None: there are none.
pub fn median(mut all: Vec<i64>) -> Option<i64> {
    all.sort_unstable();
    let upper = *all.get(all.len() / 2)?;
    let lower = all[(all.len() - 1) / 2];
    Some(lower.midpoint(upper))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_two_is_their_mean() {
        for (all, middle) in [
            (vec![], None),
            (vec![7], Some(7)),
            (vec![2000, 1000], Some(1500)),
            (vec![9, 1, 2], Some(2)),
            (vec![9, 1, 2, 4], Some(3)),
            (vec![1, 2], Some(1)),
            (vec![i64::MAX, i64::MAX], Some(i64::MAX)),
        ] {
            assert_eq!(median(all.clone()), middle, "{all:?}");
        }
    }
}
