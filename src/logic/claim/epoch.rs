//! What the store keeps of its epoch: the time from one start of the server, or loss of its data, to the next.
//! `lua/heartbeat.lua` has the same rule.

use std::time::Duration;

/// The epoch, as the store keeps it beside the jobs: it is lost with them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StoredEpoch {
    pub incarnation: String,
    /// Names the epoch, together with the incarnation.
    pub id: String,
    /// Unix ms of the store's clock at the first heartbeat.
    pub born: i64,
    /// The longest quarantine that any instance needs.
    pub quarantine: Duration,
    /// No instance can still hold a lease from before the epoch that it did not reclaim.
    pub open: bool,
}

/// What the heartbeat of an instance says about the epoch.
#[derive(Debug, Clone, Copy)]
pub struct EpochBeat<'a> {
    /// The quarantine that the instance needs.
    pub quarantine: Duration,
    /// The epoch (incarnation, id) that it has seen for a whole quarantine.
    pub vouched: Option<(&'a str, &'a str)>,
}

/// One heartbeat; None: somebody only reads. `now` and `believed` are Unix ms: what the store's clock shows, or, if it
/// is in doubt, what the caller believes; and what the caller believes. `fresh` makes the id of an epoch that begins.
pub fn heartbeat<'e>(
    stored: &'e mut Option<StoredEpoch>,
    beat: Option<EpochBeat<'_>>,
    (now, believed): (i64, Option<i64>),
    incarnation: &str,
    fresh: impl FnOnce() -> String,
) -> &'e StoredEpoch {
    if stored
        .as_ref()
        .is_some_and(|e| e.incarnation != incarnation)
    {
        *stored = None;
    }
    let epoch = stored.get_or_insert_with(|| StoredEpoch {
        incarnation: incarnation.to_owned(),
        id: fresh(),
        // The later of both clocks: occurrences that were planned before the birth and have no record are given up, and
        // must not run twice.
        born: now.max(believed.unwrap_or(now)),
        quarantine: Duration::ZERO,
        open: false,
    });
    if let Some(beat) = beat {
        epoch.quarantine = epoch.quarantine.max(beat.quarantine);
        epoch.open |= beat.vouched == Some((&epoch.incarnation, &epoch.id));
    }
    epoch
}
