//! Whether an instance claims nothing because somebody asked it to drain, also when the store loses that request.

/// What an instance knows of the request that it drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Drain {
    /// Nobody asks.
    #[default]
    No,
    /// The store has the request.
    Asked,
    /// The store lost its data and the request in it. This instance gives the request back, and drains meanwhile.
    Lost,
}

impl Drain {
    /// After a heartbeat: `shown`, the store has the request; `lost`, the store has lost or changed its data since the
    /// heartbeat before.
    pub fn learn(&mut self, shown: bool, lost: bool) {
        *self = match self {
            _ if shown => Self::Asked,
            Self::Asked if lost => Self::Lost,
            Self::Lost => Self::Lost,
            // Somebody took the request back.
            Self::No | Self::Asked => Self::No,
        };
    }

    /// The store has taken the request again: what the next heartbeats show counts.
    pub fn given_back(&mut self) {
        if *self == Self::Lost {
            *self = Self::Asked;
        }
    }

    /// This instance claims nothing.
    pub fn is_on(self) -> bool {
        self != Self::No
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_to_drain_counts_until_somebody_takes_it_back() {
        let mut drain = Drain::default();
        drain.learn(false, true);
        assert_eq!(drain, Drain::No, "a loss asks nobody to drain");
        drain.learn(true, false);
        assert_eq!(drain, Drain::Asked);
        drain.learn(false, false);
        assert_eq!(drain, Drain::No);
    }

    #[test]
    fn a_request_that_the_store_lost_counts_until_the_store_has_it_again() {
        let mut drain = Drain::Asked;
        // However long the store takes, and however often it loses its data meanwhile.
        for lost in [true, false, false, true, false] {
            drain.learn(false, lost);
            assert_eq!(drain, Drain::Lost);
        }
        drain.given_back();
        assert!(drain.is_on());
        assert_eq!(drain, Drain::Asked);
        // It was lost again, right after that.
        drain.learn(false, true);
        assert_eq!(drain, Drain::Lost);
        drain.given_back();
        drain.learn(false, false);
        assert_eq!(drain, Drain::No, "somebody took it back");
    }

    #[test]
    fn a_copy_of_the_data_that_has_the_request_needs_nothing() {
        let mut drain = Drain::Asked;
        drain.learn(true, true);
        assert_eq!(drain, Drain::Asked);
        let mut drain = Drain::Lost;
        drain.learn(true, false);
        assert_eq!(drain, Drain::Asked, "its answer was lost, not the request");
    }
}
