//! Which granted run starts next: the one that was due first and, of two, the one with the least trust left.
//!
//! A start is two stages: the guard is launched, and then the command is executed under it. Few are launched at one
//! time, because launches only wait for each other; more may be on their way to the exec.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::{clock::Boottime, model::Occurrence};

/// How many guards may be launched at one time: one is forked while another is told what to run.
const LAUNCHING: usize = 2;

#[derive(Debug)]
pub(super) struct Turns {
    /// How many commands may be starting at one time, launches included.
    most: usize,
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    launching: usize,
    starting: usize,
    waiting: BTreeMap<Key, oneshot::Sender<Turn>>,
    /// How many have asked so far: keeps the order of equal ones.
    asked: u64,
}

type Key = (Occurrence, Boottime, u64);

/// The right to start one command. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    /// None: nobody was left to take the turn.
    turns: Option<Arc<Turns>>,
    launching: bool,
}

impl Turns {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            places: Mutex::default(),
        })
    }

    /// Asks for a turn, for a run with this planned instant whose lease is trusted so long. Whoever drops the receiver
    /// gives the turn up.
    pub(super) fn ask(
        self: &Arc<Self>,
        due: Occurrence,
        trusted_until: Boottime,
    ) -> oneshot::Receiver<Turn> {
        let (give, turn) = oneshot::channel();
        let mut places = self.places.lock();
        places.asked += 1;
        let key = (due, trusted_until, places.asked);
        places.waiting.insert(key, give);
        self.give(&mut places);
        turn
    }

    fn give(self: &Arc<Self>, places: &mut Places) {
        while places.launching < LAUNCHING
            && places.starting < self.most
            && let Some((_, waiting)) = places.waiting.pop_first()
        {
            let turn = Turn {
                turns: Some(self.clone()),
                launching: true,
            };
            match waiting.send(turn) {
                Ok(()) => {
                    places.launching += 1;
                    places.starting += 1;
                }
                // Its drop must not count down what was not counted.
                Err(mut turn) => turn.turns = None,
            }
        }
    }
}

impl Turn {
    /// The guard is launched, or cannot be.
    pub(super) fn launched(&mut self) {
        if let (Some(turns), true) = (&self.turns, self.launching) {
            self.launching = false;
            let mut places = turns.places.lock();
            places.launching -= 1;
            turns.give(&mut places);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.launched();
        if let Some(turns) = self.turns.take() {
            let mut places = turns.places.lock();
            places.starting -= 1;
            turns.give(&mut places);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 8;

    fn taken(asked: &mut oneshot::Receiver<Turn>) -> Option<Turn> {
        asked.try_recv().ok()
    }

    #[test]
    fn what_was_due_first_starts_first_and_then_what_has_the_least_trust_left() {
        let turns = Turns::new(MOST);
        let ask = |due, until| turns.ask(Occurrence(due), Boottime(until));
        let (mut first, mut second) = (ask(9, 9), ask(9, 9));
        let (mut late, mut early, mut scarce) = (ask(5, 8), ask(4, 9), ask(5, 7));
        let mut held = vec![
            taken(&mut first).expect("free"),
            taken(&mut second).expect("free"),
        ];
        for next in [&mut early, &mut scarce, &mut late] {
            assert!(taken(next).is_none(), "two are launched");
            held[0].launched();
            held.insert(0, taken(next).expect("the next in order"));
        }
    }

    #[test]
    fn a_turn_that_ends_or_that_nobody_takes_goes_to_the_next() {
        let turns = Turns::new(MOST);
        let ask = || turns.ask(Occurrence(0), Boottime(0));
        let mut starting = vec![];
        for _ in 0..MOST {
            let mut turn = taken(&mut ask()).expect("free");
            turn.launched();
            // Once more changes nothing.
            turn.launched();
            starting.push(turn);
        }
        let (mut gone, mut next, unread, mut last) = (ask(), ask(), ask(), ask());
        for one in [&mut gone, &mut next] {
            assert!(taken(one).is_none(), "all places are taken");
        }
        drop(gone);
        starting.pop();
        let got = taken(&mut next).expect("the one before it is gone");
        starting.pop();
        assert!(taken(&mut last).is_none());
        // It was given, and never taken.
        drop(unread);
        assert!(taken(&mut last).is_some());
        drop((got, starting, last));
        let places = turns.places.lock();
        assert_eq!(
            (places.launching, places.starting, places.waiting.len()),
            (0, 0, 0)
        );
    }
}
