//! How a store keeps the output of a run: in pieces of one size, so that adding to megabytes costs as much as adding to
//! nothing. lua/pieces.lua and the scripts that use it do the same in Redis.

use std::{collections::BTreeMap, convert::Infallible, ops::Range, time::Duration};

use super::{LAST_BYTE, OUTPUT_AT_ONCE, Output, Tail};
use crate::model::Marks;

/// The bytes of one piece, also in Redis: piece n starts at byte n × `PIECE`.
pub(super) const PIECE: u64 = 64 << 10;
/// The number of the piece that says which bytes came from stderr ([`Marks::to_text`]): greater than that of any piece
/// of the output. Redis has it in a field of its own.
const MARKS: u64 = 1 << 48;
/// How long the store waits for the rest of a run's output after the settlement.
pub const OUTPUT_PATIENCE: Duration = Duration::from_secs(300);

/// Says which bytes of a run's output the store has. [`Pieces`] has the bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Extent {
    /// The first byte that the pieces have.
    pub(super) start: u64,
    /// The first byte that readers get; those before it are older than the run's `output.keep`.
    pub(super) base: u64,
    /// The byte after the last.
    pub(super) stop: u64,
    /// No more will come.
    pub(super) done: bool,
    /// If the run ended before the store had all of its output: the number of bytes that the run wrote, and the time
    /// (Unix ms of the store's clock) until which the store waits for the rest.
    pub(super) rest: Option<(u64, i64)>,
}

/// Where the pieces of one output are kept.
pub(super) trait Pieces {
    type Error;
    fn get(&self, n: u64) -> Result<Vec<u8>, Self::Error>;
    fn put(&mut self, n: u64, data: &[u8]) -> Result<(), Self::Error>;
    fn remove(&mut self, which: Range<u64>) -> Result<(), Self::Error>;
}

impl Pieces for BTreeMap<u64, Vec<u8>> {
    type Error = Infallible;
    fn get(&self, n: u64) -> Result<Vec<u8>, Infallible> {
        Ok(BTreeMap::get(self, &n).cloned().unwrap_or_default())
    }
    fn put(&mut self, n: u64, data: &[u8]) -> Result<(), Infallible> {
        self.insert(n, data.to_vec());
        Ok(())
    }
    fn remove(&mut self, which: Range<u64>) -> Result<(), Infallible> {
        self.retain(|n, _| !which.contains(n));
        Ok(())
    }
}

fn mark<P: Pieces>(pieces: &mut P, stderr: &Marks) -> Result<(), P::Error> {
    match stderr.is_empty() {
        true => Ok(()),
        false => pieces.put(MARKS, stderr.to_text().as_bytes()),
    }
}

impl Extent {
    /// An empty output that begins at byte `at`.
    pub(super) fn from(at: u64) -> Self {
        Self {
            start: at,
            base: at,
            stop: at,
            ..Self::default()
        }
    }

    /// See [`super::Store::append_output`].
    pub(super) fn add<P: Pieces>(
        &mut self,
        pieces: &mut P,
        at: u64,
        data: &[u8],
        keep: u64,
        stderr: &Marks,
    ) -> Result<(), P::Error> {
        let end = at.saturating_add(data.len() as u64);
        if self.done || end > LAST_BYTE {
            return Ok(());
        }
        // An older request that is repeated knows less.
        if end >= self.stop {
            mark(pieces, stderr)?;
        }
        if at > self.stop {
            // Bytes are missing before `data`: drop all earlier ones.
            pieces.remove(self.start / PIECE..self.stop / PIECE + 1)?;
            (self.start, self.base, self.stop) = (at, at, at);
        }
        let known = usize::try_from(self.stop - at).unwrap_or(usize::MAX);
        self.put(pieces, &data[known.min(data.len())..])?;
        self.base = self.base.max(self.stop.saturating_sub(keep));
        let (first, last) = (self.start / PIECE, self.base / PIECE);
        if last > first {
            pieces.remove(first..last)?;
            self.start = last * PIECE;
        }
        self.complete();
        Ok(())
    }

    fn put<P: Pieces>(&mut self, pieces: &mut P, mut data: &[u8]) -> Result<(), P::Error> {
        while !data.is_empty() {
            let n = self.stop / PIECE;
            let room = ((n + 1) * PIECE - self.stop) as usize;
            let (part, rest) = data.split_at(room.min(data.len()));
            if self.stop > self.start.max(n * PIECE) {
                let mut all = pieces.get(n)?;
                all.extend_from_slice(part);
                pieces.put(n, &all)?;
            } else {
                pieces.put(n, part)?;
            }
            self.stop += part.len() as u64;
            data = rest;
        }
        Ok(())
    }

    fn complete(&mut self) {
        self.done |= self.rest.is_some_and(|(total, _)| self.stop >= total);
    }

    /// The extent after the settlement of the run. None: the store had no output of it, and gets none.
    pub(super) fn settle<P: Pieces>(
        was: Option<Self>,
        pieces: &mut P,
        tail: &Tail,
        now: i64,
    ) -> Result<Option<Self>, P::Error> {
        mark(pieces, &tail.stderr)?;
        if tail.more > 0 {
            let mut extent = was.unwrap_or_else(|| Self::from(tail.before));
            let patience = now.saturating_add(OUTPUT_PATIENCE.as_millis() as i64);
            extent.rest = Some((tail.before.saturating_add(tail.more), patience));
            extent.complete();
            return Ok(Some(extent));
        }
        let mut extent = match was {
            Some(was) if tail.data.is_empty() => was,
            None if tail.data.is_empty() => return Ok(None),
            was => {
                if let Some(was) = was {
                    pieces.remove(was.start / PIECE..was.stop / PIECE + 1)?;
                }
                let mut extent = Self::from(tail.before);
                extent.put(pieces, &tail.data)?;
                extent
            }
        };
        extent.done = true;
        Ok(Some(extent))
    }

    /// See [`super::Store::output`].
    pub(super) fn read<P: Pieces>(
        &self,
        pieces: &P,
        from: u64,
        now: i64,
    ) -> Result<Output, P::Error> {
        let from = from.clamp(self.base, self.stop);
        let stop = self.stop.min(from + OUTPUT_AT_ONCE as u64);
        let mut data = Vec::with_capacity((stop - from) as usize);
        while from + (data.len() as u64) < stop {
            let at = from + data.len() as u64;
            let n = at / PIECE;
            let piece = pieces.get(n)?;
            let begin = self.start.max(n * PIECE);
            let end = (stop.min((n + 1) * PIECE) - begin) as usize;
            let Some(part) = piece.get((at - begin) as usize..end) else {
                break;
            };
            data.extend_from_slice(part);
        }
        let stderr = Marks::parse(&String::from_utf8_lossy(&pieces.get(MARKS)?));
        let given_up = self.rest.is_some_and(|(_, until)| now > until);
        let total = self.rest.map_or(self.stop, |(total, _)| total);
        Ok(Output::new(
            from,
            data,
            self.stop,
            self.done || given_up,
            self.rest.is_some() && !self.done && !given_up,
            total,
            stderr,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(extent: &mut Extent, all: &mut BTreeMap<u64, Vec<u8>>, at: u64, data: &[u8], keep: u64) {
        let Ok(()) = extent.add(all, at, data, keep, &Marks::default());
    }
    fn all(extent: &Extent, pieces: &BTreeMap<u64, Vec<u8>>) -> Vec<u8> {
        let (mut at, mut bytes) = (extent.base, vec![]);
        loop {
            let Ok(some) = extent.read(pieces, at, 0);
            at += some.data.len() as u64;
            bytes.extend(some.data);
            if !some.more {
                return bytes;
            }
        }
    }

    #[test]
    fn whatever_the_pieces_the_newest_bytes_are_kept() {
        let written: Vec<u8> = (0..700_000u32).map(|i| (i % 251) as u8).collect();
        for keep in [0, 1, 65_536, 100_000, 1 << 24] {
            for step in [1_000, 65_536, 131_072, 700_000] {
                let (mut extent, mut pieces) = (Extent::from(0), BTreeMap::new());
                for (i, part) in written.chunks(step).enumerate() {
                    let at = (i * step) as u64;
                    add(&mut extent, &mut pieces, at, part, keep);
                    // Repeated, as after a lost answer.
                    add(&mut extent, &mut pieces, at, part, keep);
                }
                let wanted = &written[written.len().saturating_sub(keep as usize)..];
                assert_eq!(all(&extent, &pieces), wanted, "keep {keep}, step {step}");
                let most = keep as usize + PIECE as usize;
                assert!(pieces.values().map(Vec::len).sum::<usize>() <= most);
            }
        }
    }

    #[test]
    fn a_hole_leaves_nothing_of_what_was_before() {
        let (mut extent, mut pieces) = (Extent::from(5), BTreeMap::new());
        add(&mut extent, &mut pieces, 5, &[1; 200_000], 1 << 20);
        add(&mut extent, &mut pieces, 300_000, &[2; 10], 1 << 20);
        assert_eq!(all(&extent, &pieces), [2; 10]);
        assert_eq!(pieces.values().map(Vec::len).sum::<usize>(), 10);
    }
}
