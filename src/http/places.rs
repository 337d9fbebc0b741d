//! Which connections may stay. There are only so many places: when all are taken, a new connection gets the place of
//! the one that has waited longest for a request. So silent clients keep nobody out, however many there are.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A client that takes nothing of its answer for so long may lose its place, if no connection waits for a request.
const STUCK_AFTER: Duration = Duration::from_secs(5);

/// What a connection does, as far as its place depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    /// It waits for the TLS handshake, for the head of a request, or for its body. The one with the lowest number has
    /// waited longest.
    Waits(u64),
    /// A request that has arrived to its end is being answered.
    Answers,
    /// The answer is written, and the client still has to take the end of it.
    Flushes,
}

#[derive(Debug)]
struct Taken {
    does: Does,
    /// Since when the client takes nothing of what is written to it.
    stuck: Option<Instant>,
    given_away: CancellationToken,
}

#[derive(Debug, Default)]
struct Inner {
    taken: BTreeMap<u64, Taken>,
    /// The next number: of a place, and of a connection that begins to wait.
    next: u64,
}

impl Inner {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The place that a new connection gets if all are taken. None: the client of each takes its answer.
    fn to_give_away(&self, now: Instant) -> Option<u64> {
        let waits = |(id, taken): (&u64, &Taken)| match taken.does {
            Does::Waits(since) => Some((since, *id)),
            Does::Answers | Does::Flushes => None,
        };
        let stuck = |(id, taken): (&u64, &Taken)| taken.stuck.map(|since| (since, *id));
        let longest_waiting = self.taken.iter().filter_map(waits).min();
        longest_waiting.map(|(_, id)| id).or_else(|| {
            let (since, id) = self.taken.iter().filter_map(stuck).min()?;
            (now.duration_since(since) >= STUCK_AFTER).then_some(id)
        })
    }
}

/// All places.
pub(super) struct Places {
    most: usize,
    inner: Mutex<Inner>,
}

impl Places {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            inner: Mutex::default(),
        })
    }

    pub(super) fn are_taken(&self) -> bool {
        self.inner.lock().taken.len() >= self.most
    }

    /// A place for a new connection, and whether another one must go for it. None: all are taken, by clients that are
    /// being answered.
    pub(super) fn take(self: &Arc<Self>, now: Instant) -> Option<(Place, bool)> {
        let mut inner = self.inner.lock();
        let full = inner.taken.len() >= self.most;
        if full {
            let id = inner.to_give_away(now)?;
            if let Some(taken) = inner.taken.remove(&id) {
                taken.given_away.cancel();
            }
        }
        let (id, since) = (inner.number(), inner.number());
        let given_away = CancellationToken::new();
        let taken = Taken {
            does: Does::Waits(since),
            stuck: None,
            given_away: given_away.clone(),
        };
        inner.taken.insert(id, taken);
        let place = Place {
            places: self.clone(),
            id,
            given_away,
        };
        Some((place, full))
    }
}

/// The place of one connection, free again once it is dropped.
pub(super) struct Place {
    places: Arc<Places>,
    id: u64,
    given_away: CancellationToken,
}

impl Place {
    /// Returns once another connection has the place: then this one must end.
    pub(super) async fn given_away(&self) {
        self.given_away.cancelled().await;
    }

    /// The head of a request is complete; `whole`: so is the request. Otherwise it waits, from now, for the body: see
    /// [`Answering::whole`].
    pub(super) fn asked(self: &Arc<Self>, whole: bool) -> Answering {
        self.change(|taken, next| {
            taken.does = match whole {
                true => Does::Answers,
                false => Does::Waits(next),
            }
        });
        Answering(self.clone())
    }

    /// The client has taken all that was written.
    pub(super) fn flushed(&self) {
        self.change(|taken, next| {
            if taken.does == Does::Flushes {
                taken.does = Does::Waits(next);
            }
        });
    }

    /// Since when the client takes nothing; None: it takes what is written.
    pub(super) fn stuck(&self, since: Option<Instant>) {
        self.change(|taken, _| taken.stuck = since);
    }

    /// Changes what is known of this connection, if it still has its place.
    fn change(&self, change: impl FnOnce(&mut Taken, u64)) {
        let mut inner = self.places.inner.lock();
        let next = inner.number();
        if let Some(taken) = inner.taken.get_mut(&self.id) {
            change(taken, next);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.inner.lock().taken.remove(&self.id);
    }
}

/// Lives as long as a request is being answered, from its head on. Once the request is whole, the place is kept until
/// this is dropped and [`Place::flushed`] is called.
pub(super) struct Answering(Arc<Place>);

impl Answering {
    /// Nothing more of the request is waited for: its body has arrived, or its answer does not need the body.
    pub(super) fn whole(&self) {
        self.0.change(|taken, _| taken.does = Does::Answers);
    }

    /// The request has arrived to its end, or its answer does not need the rest.
    pub(super) fn is_whole(&self) -> bool {
        let inner = self.0.places.inner.lock();
        let taken = inner.taken.get(&self.0.id);
        taken.is_some_and(|taken| taken.does == Does::Answers)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.change(|taken, _| taken.does = Does::Flushes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(place: &Place) -> bool {
        place.given_away.is_cancelled()
    }

    fn take(places: &Arc<Places>, now: Instant) -> Option<Arc<Place>> {
        places.take(now).map(|(place, _)| Arc::new(place))
    }

    #[test]
    fn the_one_that_has_waited_longest_goes_first() {
        let (places, now) = (Places::new(3), Instant::now());
        let all: Vec<_> = (0..3).filter_map(|_| take(&places, now)).collect();
        // The first has had a request meanwhile: it begins to wait anew once its answer is taken.
        drop(all[0].asked(true));
        all[0].flushed();
        let fourth = take(&places, now).expect("a place");
        assert_eq!(
            [&all[0], &all[1], &all[2]].map(|p| gone(p)),
            [false, true, false]
        );
        let fifth = take(&places, now).expect("a place");
        assert!(gone(&all[2]) && !gone(&all[0]));
        let _sixth = take(&places, now).expect("a place");
        assert!(gone(&all[0]) && !gone(&fourth) && !gone(&fifth));
    }

    #[test]
    fn nobody_goes_for_others_while_it_is_answered() {
        let (places, now) = (Places::new(2), Instant::now());
        let [first, second] = [(); 2].map(|()| take(&places, now).expect("a place"));
        let (one, two) = (first.asked(true), second.asked(true));
        assert!(take(&places, now).is_none());
        // The answer is written; that the client has taken it is not known yet.
        drop(one);
        assert!(take(&places, now).is_none());
        first.flushed();
        let third = take(&places, now).expect("a place");
        assert!(gone(&first) && !gone(&second));
        // Whoever ends leaves a place for others, and nobody must go for them.
        drop((two, second));
        let (_fourth, made_room) = places.take(now).expect("a place");
        assert!(!made_room && !gone(&third));
    }

    #[test]
    fn a_request_whose_body_has_not_arrived_keeps_nobody_out() {
        let (places, now) = (Places::new(2), Instant::now());
        let [first, second] = [(); 2].map(|()| take(&places, now).expect("a place"));
        let one = first.asked(false);
        // The first waits since its head was complete, so the second has waited longer.
        let third = take(&places, now).expect("a place");
        assert!(gone(&second) && !gone(&first));
        one.whole();
        let fourth = take(&places, now).expect("a place");
        assert!(gone(&third) && !gone(&first));
        let two = fourth.asked(false);
        let _fifth = take(&places, now).expect("a place");
        assert!(gone(&fourth) && !gone(&first));
        // Its body arrives too late.
        two.whole();
        assert_eq!(places.inner.lock().taken.len(), 2);
    }

    #[test]
    fn a_client_that_takes_nothing_keeps_its_place_for_a_while() {
        let (places, now) = (Places::new(2), Instant::now());
        let [first, second] = [(); 2].map(|()| take(&places, now).expect("a place"));
        let _answers = (first.asked(true), second.asked(true));
        second.stuck(Some(now));
        let before = now + STUCK_AFTER - Duration::from_millis(1);
        assert!(take(&places, before).is_none());
        second.stuck(None);
        first.stuck(Some(before));
        assert!(take(&places, now + STUCK_AFTER).is_none());
        let _third = take(&places, before + STUCK_AFTER).expect("a place");
        assert!(gone(&first) && !gone(&second));
    }

    #[test]
    fn a_connection_that_has_lost_its_place_changes_nothing() {
        let (places, now) = (Places::new(1), Instant::now());
        let first = take(&places, now).expect("a place");
        let second = take(&places, now).expect("a place");
        drop(first.asked(true));
        first.flushed();
        drop(first);
        assert_eq!(places.inner.lock().taken.len(), 1);
        assert!(!gone(&second));
    }
}
