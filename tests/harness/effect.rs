//! What a fault does to a fleet, as far as the judge has to know it.

use super::judge::SECOND;

/// A fault, from its begin to its end (CLOCK_BOOTTIME).
#[derive(Debug, Clone)]
pub struct Struck {
    pub name: &'static str,
    pub effect: Effect,
    pub from_ns: i64,
    /// When it had struck all that it strikes: to kill several daemons takes its time.
    pub done_ns: i64,
    /// `i64::MAX` while it lasts.
    pub to_ns: i64,
}

/// Instances are numbered from 0; a run is named by its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// It explains nothing: the fleet has to go on as if it were not.
    Harmless,
    /// The daemon was killed, or told to end.
    Killed {
        instance: usize,
    },
    ToldToEnd {
        instance: usize,
    },
    /// It was told to end, and did not.
    NotEnded {
        instance: usize,
    },
    /// The daemon was started again.
    Started {
        instance: usize,
    },
    Stopped {
        instance: usize,
    },
    /// Daemon, guards and jobs of the instance stand still.
    Frozen {
        instance: usize,
    },
    /// The daemon and all its guards were killed, and neither could see the other die.
    BothKilled {
        instance: usize,
    },
    GuardKilled {
        run: String,
    },
    GuardHalted {
        run: String,
        instance: usize,
    },
    JobKilled {
        run: String,
    },
    /// The command stands still.
    JobHalted,
    /// No request of the instance is answered.
    Cut {
        instance: usize,
    },
    /// Some requests of the instance are answered late or not at all.
    Hindered {
        instance: usize,
    },
    /// Replies to the instance are garbled; no promise but that it survives.
    Garbled {
        instance: usize,
    },
    /// The instance lacks descriptors or processes.
    Starved {
        instance: usize,
    },
    /// The server answers nobody.
    Silenced,
    /// The server grants nothing, but renews and settles.
    GrantsNothing,
    /// The data has another identity: one quarantine.
    Renamed,
    /// All data is lost, or replaced by an older copy. Each is also a change of the identity.
    LosesAll,
    GoesBack,
    /// The server's clock is wrong.
    ServerClock {
        us: i64,
    },
    /// The wall clock of the instance is wrong.
    Wall {
        instance: usize,
    },
    Paused {
        job: String,
    },
    /// Some occurrences of the job are skipped, or a run of it was cancelled.
    Steered {
        job: String,
    },
    /// The instance claims nothing.
    Drained,
    /// The harness itself got no CPU.
    HostStalled,
}

impl Struck {
    /// It lasted at some time from `from` to `to`.
    pub fn touches(&self, from: i64, to: i64) -> bool {
        self.from_ns <= to && self.to_ns >= from
    }

    /// Until when a job may be silent because of it; None: it silences nobody.
    pub fn silent_until(&self, job: &str, lease_ns: i64, instances: usize) -> Option<i64> {
        let takeover = 2 * lease_ns + 3 * SECOND;
        let after = |by: i64| Some(self.to_ns.saturating_add(by));
        match &self.effect {
            Effect::Harmless | Effect::Started { .. } | Effect::NotEnded { .. } => None,
            // Others take over, if there are others.
            Effect::Killed { .. }
            | Effect::ToldToEnd { .. }
            | Effect::Stopped { .. }
            | Effect::Frozen { .. }
            | Effect::BothKilled { .. }
            | Effect::GuardKilled { .. }
            | Effect::GuardHalted { .. }
            | Effect::JobKilled { .. }
            | Effect::Cut { .. }
            | Effect::Hindered { .. }
            | Effect::Starved { .. }
            | Effect::Drained
                if instances > 2 =>
            {
                let end = self.from_ns.saturating_add(takeover);
                Some(end.min(self.to_ns.saturating_add(takeover)))
            }
            Effect::Paused { job: paused } | Effect::Steered { job: paused } => {
                if paused == job {
                    after(takeover)
                } else {
                    None
                }
            }
            Effect::ServerClock { .. } => after(takeover + 15 * SECOND),
            Effect::Garbled { .. } => after(15 * SECOND),
            _ => after(takeover),
        }
    }
}

impl Effect {
    /// It strikes this instance, or all.
    pub fn strikes(&self, of: Option<usize>) -> bool {
        match self {
            Self::Killed { instance }
            | Self::ToldToEnd { instance }
            | Self::NotEnded { instance }
            | Self::Started { instance }
            | Self::Stopped { instance }
            | Self::Frozen { instance }
            | Self::BothKilled { instance }
            | Self::GuardHalted { instance, .. }
            | Self::Cut { instance }
            | Self::Hindered { instance }
            | Self::Garbled { instance }
            | Self::Starved { instance }
            | Self::Wall { instance } => of.is_none_or(|of| of == *instance),
            _ => true,
        }
    }

    pub fn restarts(&self, of: Option<usize>) -> bool {
        matches!(
            self,
            Self::Killed { .. }
                | Self::BothKilled { .. }
                | Self::ToldToEnd { .. }
                | Self::Started { .. }
        ) && self.strikes(of)
    }

    /// An instance cannot learn what is in the store meanwhile.
    pub fn keeps_from_the_store(&self) -> bool {
        matches!(
            self,
            Self::Killed { .. }
                | Self::BothKilled { .. }
                | Self::ToldToEnd { .. }
                | Self::Stopped { .. }
                | Self::Frozen { .. }
                | Self::Cut { .. }
                | Self::Hindered { .. }
                | Self::Silenced
        )
    }

    /// This run of this instance may be lost because of it.
    pub fn explains_a_loss(&self, of: Option<usize>, lost: Option<&str>) -> bool {
        match self {
            Self::GuardKilled { run } | Self::JobKilled { run } | Self::GuardHalted { run, .. } => {
                Some(run.as_str()) == lost
            }
            Self::Harmless
            | Self::JobHalted
            | Self::Steered { .. }
            | Self::GrantsNothing
            | Self::Wall { .. }
            | Self::Paused { .. }
            | Self::Drained
            | Self::Started { .. }
            | Self::NotEnded { .. } => false,
            // Less than a second is believed.
            Self::ServerClock { us } => us.abs() > 1_000_000,
            _ => self.strikes(of),
        }
    }
}
