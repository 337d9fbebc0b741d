//! Which bytes of a run's output came from which of its two streams.

use std::{collections::VecDeque, fmt::Write as _};

use serde::{Deserialize, Serialize};

/// Where a command wrote something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// The bytes of an output that came from stderr, as ranges: from, and to (exclusive), counted from the first byte that
/// the run wrote. Ascending, and no two touch. All other bytes came from stdout, or are older than the oldest range.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks(VecDeque<(u64, u64)>);

impl Marks {
    /// The most ranges that are kept: the newest.
    pub const MOST: usize = 500;

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    /// The bytes from `from` to `to`, which are the newest, came from stderr.
    pub fn add(&mut self, from: u64, to: u64) {
        match self.0.back_mut() {
            Some((_, end)) if *end >= from => *end = to.max(*end),
            _ => self.0.push_back((from, to)),
        }
        while self.0.len() > Self::MOST {
            self.0.pop_front();
        }
    }
    /// Nobody keeps the bytes before `first`.
    pub fn forget(&mut self, first: u64) {
        while self.0.front().is_some_and(|(_, to)| *to <= first) {
            self.0.pop_front();
        }
    }
    /// The ranges within these bytes.
    pub fn within(&self, from: u64, to: u64) -> Vec<(u64, u64)> {
        let cut = self.0.iter().map(|(a, b)| (from.max(*a), to.min(*b)));
        cut.filter(|(a, b)| a < b).collect()
    }
    /// `data`, whose first byte is number `from`, in pieces of one stream each.
    pub fn cut<'a>(&self, from: u64, data: &'a [u8]) -> Vec<(Stream, &'a [u8])> {
        let (mut pieces, mut rest, mut at) = (vec![], data, from);
        let mut take = |stream, to: u64| {
            let n = usize::try_from(to - at).unwrap_or(usize::MAX);
            let (piece, left) = rest.split_at(n.min(rest.len()));
            (rest, at) = (left, to);
            if !piece.is_empty() {
                pieces.push((stream, piece));
            }
        };
        let end = from.saturating_add(data.len() as u64);
        for (a, b) in self.within(from, end) {
            take(Stream::Stdout, a);
            take(Stream::Stderr, b);
        }
        take(Stream::Stdout, end);
        pieces
    }
    /// As stores keep it: `FROM-TO`, divided by spaces.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for (from, to) in &self.0 {
            let apart = if text.is_empty() { "" } else { " " };
            let _ = write!(text, "{apart}{from}-{to}");
        }
        text
    }
    /// What cannot be read, or is out of order, is left out.
    pub fn parse(text: &str) -> Self {
        let mut all = Self::default();
        for range in text.split(' ') {
            let range = range.split_once('-');
            let range = range.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            let after = all.0.back().map_or(0, |(_, to)| *to);
            if let Some((from, to)) = range.filter(|(from, to)| after <= *from && from < to) {
                all.add(from, to);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_of_the_stream_that_wrote_them() {
        let mut m = Marks::default();
        m.add(2, 4);
        m.add(4, 5);
        m.add(7, 9);
        let data = b"ooeeeooeeo";
        let all = |from: u64, data| {
            let cut = m.cut(from, data).into_iter();
            cut.map(|(s, d)| (s == Stream::Stderr, String::from_utf8_lossy(d).into_owned()))
                .collect::<Vec<_>>()
        };
        let is = |parts: &[&str]| -> Vec<(bool, String)> {
            let one = |p: &&str| (p.starts_with('e'), (*p).to_owned());
            parts.iter().map(one).collect()
        };
        assert_eq!(all(0, data), is(&["oo", "eee", "oo", "ee", "o"]));
        assert_eq!(all(3, &data[3..8]), is(&["ee", "oo", "e"]));
        assert_eq!(all(9, &data[9..]), is(&["o"]));
        assert_eq!(all(10, b""), is(&[]));
        assert_eq!(m.within(3, 8), [(3, 5), (7, 8)]);
        assert_eq!(
            (m.to_text(), Marks::parse(&m.to_text())),
            ("2-5 7-9".into(), m.clone())
        );
        m.forget(5);
        assert_eq!(m.to_text(), "7-9");
    }

    #[test]
    fn what_others_wrote_harms_nothing() {
        for (text, read) in [
            ("", ""),
            ("x 1-2", "1-2"),
            ("5-5 9-3 4-", ""),
            ("3-6 1-2 5-9 8-9", "3-6 8-9"),
            (
                "0-18446744073709551615 1-99999999999999999999",
                "0-18446744073709551615",
            ),
        ] {
            assert_eq!(Marks::parse(text).to_text(), read, "{text}");
        }
        let long: Vec<String> = (0..2000)
            .map(|n| format!("{}-{}", 3 * n, 3 * n + 1))
            .collect();
        let long = Marks::parse(&long.join(" "));
        assert_eq!(long.0.len(), Marks::MOST);
        assert_eq!(long.0.back(), Some(&(5997, 5998)));
        let _ = long.cut(u64::MAX - 1, b"abc");
    }
}
