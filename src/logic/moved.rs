//! Whether the name of the store's host still leads to the server that this instance is connected to.

use std::{collections::BTreeSet, net::IpAddr};

/// `answers`: the addresses that the name means now; none if nobody says it. `peers`: those that connections lead to.
/// `astray` has from the last look whether one led to an address that the name did not mean.
///
/// None: nothing has changed. Some(false): another look has to confirm it, because one answer may be odd.
pub fn look(
    astray: &mut bool,
    answers: &BTreeSet<IpAddr>,
    peers: &BTreeSet<IpAddr>,
) -> Option<bool> {
    // 0.0.0.0 leads to 127.0.0.1.
    let known = !answers.is_empty() && !answers.iter().any(IpAddr::is_unspecified);
    let before = std::mem::replace(astray, known && !peers.is_subset(answers));
    astray.then_some(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(all: &str) -> BTreeSet<IpAddr> {
        let all = all.split_whitespace();
        all.map(|ip| ip.parse().expect("an address")).collect()
    }

    #[test]
    fn a_name_has_moved_if_two_looks_in_a_row_lack_a_peer() {
        const SAME: Option<bool> = None;
        const IN_DOUBT: Option<bool> = Some(false);
        const MOVED: Option<bool> = Some(true);
        let (one, two, both) = ("10.0.0.1", "10.0.0.2", "10.0.0.2 10.0.0.1");
        for (peers, looks) in [
            (one, vec![(one, SAME), (both, SAME)]),
            (one, vec![(two, IN_DOUBT), ("10.0.0.3", MOVED)]),
            // One odd answer, or none at all.
            (one, vec![(two, IN_DOUBT), (one, SAME), (two, IN_DOUBT)]),
            (one, vec![("", SAME), ("", SAME)]),
            ("127.0.0.1", vec![("0.0.0.0", SAME), ("0.0.0.0", SAME)]),
            // Some connections lead to the new address.
            (both, vec![(two, IN_DOUBT), (two, MOVED)]),
            ("", vec![(two, SAME), (two, SAME)]),
        ] {
            let mut astray = false;
            for (answers, expected) in looks {
                let seen = look(&mut astray, &ips(answers), &ips(peers));
                assert_eq!(seen, expected, "{answers:?}, connected to {peers}");
            }
        }
    }
}
