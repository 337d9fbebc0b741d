//! Lets a test take out one rule of the program, to see that a fleet of `src/world` then breaks a promise. Outside of
//! tests every rule is in force.

/// `rule!(Name, condition)`: the condition, and false while the rule is taken out. For what a rule forbids.
#[cfg(test)]
macro_rules! rule {
    ($rule:ident, $condition:expr) => {
        (!crate::logic::bent::is_out(crate::logic::bent::Rule::$rule) && $condition)
    };
}
#[cfg(not(test))]
macro_rules! rule {
    ($rule:ident, $condition:expr) => {
        $condition
    };
}

/// `may!(Name, condition)`: the condition, and true while the rule is taken out. For what a rule allows.
#[cfg(test)]
macro_rules! may {
    ($rule:ident, $condition:expr) => {
        (crate::logic::bent::is_out(crate::logic::bent::Rule::$rule) || $condition)
    };
}
#[cfg(not(test))]
macro_rules! may {
    ($rule:ident, $condition:expr) => {
        $condition
    };
}
pub(crate) use {may, rule};

#[cfg(test)]
pub(crate) use self::switch::*;

#[cfg(test)]
mod switch {
    use std::cell::Cell;

    /// Each is one condition of the program, at the place of the same name.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub(crate) enum Rule {
        DecidedStaysDecided,
        NotBeforeItsTime,
        KeysAreRemembered,
        PauseHolds,
        OverlapIsLookedAt,
        LapseNeedsProof,
        TakeoverNeedsProof,
        OtherDataGrantsNothing,
        OtherDataConfirmsNothing,
        AttemptHasItsTurnOnce,
        RepeatedGrantIsSeen,
        FailMeansOnce,
        TooLateIsMissed,
        LostIsLost,
        ReclaimDecides,
        ReclaimFollowsTheLoss,
        ReclaimBringsItsKey,
        SettlementDecides,
        StoppedIsNotRetried,
        NewerHasItsTurn,
        AdoptionWaits,
        LostIsCountedAnew,
        LostTriggersDoNotRun,
        LostMayHaveRun,
        OthersGoFirst,
        PauseIsToldAgain,
        KeysAreToldAgain,
        NothingIsJumpedOver,
        QuarantineIsWaitedOut,
        VouchedAfterQuarantine,
        JumpsAreDoubted,
        StoreDecidesNothingInDoubt,
        LeaseLapsesAtItsEnd,
        ChangeBeginsAnew,
        DeadlineEnds,
        DaemonsDeathEnds,
        AttemptsAreBounded,
        StoppedIsNotTakenUp,
        PauseHoldsAttempts,
        AttemptsDoNotOverlap,
        GrantIsRemembered,
        SettlesOnce,
        SettlesItsRun,
        RenewsItsRun,
        CancelDropsTheNext,
        KeysRunOnce,
        KillFollows,
    }

    impl Rule {
        pub(crate) const ALL: &[Self] = &[
            Self::DecidedStaysDecided,
            Self::NotBeforeItsTime,
            Self::KeysAreRemembered,
            Self::PauseHolds,
            Self::OverlapIsLookedAt,
            Self::LapseNeedsProof,
            Self::TakeoverNeedsProof,
            Self::OtherDataGrantsNothing,
            Self::OtherDataConfirmsNothing,
            Self::AttemptHasItsTurnOnce,
            Self::RepeatedGrantIsSeen,
            Self::FailMeansOnce,
            Self::TooLateIsMissed,
            Self::LostIsLost,
            Self::ReclaimDecides,
            Self::ReclaimFollowsTheLoss,
            Self::ReclaimBringsItsKey,
            Self::SettlementDecides,
            Self::StoppedIsNotRetried,
            Self::NewerHasItsTurn,
            Self::AdoptionWaits,
            Self::LostIsCountedAnew,
            Self::LostTriggersDoNotRun,
            Self::LostMayHaveRun,
            Self::OthersGoFirst,
            Self::PauseIsToldAgain,
            Self::KeysAreToldAgain,
            Self::NothingIsJumpedOver,
            Self::QuarantineIsWaitedOut,
            Self::VouchedAfterQuarantine,
            Self::JumpsAreDoubted,
            Self::StoreDecidesNothingInDoubt,
            Self::LeaseLapsesAtItsEnd,
            Self::ChangeBeginsAnew,
            Self::DeadlineEnds,
            Self::DaemonsDeathEnds,
            Self::AttemptsAreBounded,
            Self::StoppedIsNotTakenUp,
            Self::PauseHoldsAttempts,
            Self::AttemptsDoNotOverlap,
            Self::GrantIsRemembered,
            Self::SettlesOnce,
            Self::SettlesItsRun,
            Self::RenewsItsRun,
            Self::CancelDropsTheNext,
            Self::KeysRunOnce,
            Self::KillFollows,
        ];
    }

    thread_local! {
        static OUT: Cell<Option<Rule>> = const { Cell::new(None) };
    }

    pub(crate) fn is_out(rule: Rule) -> bool {
        OUT.get() == Some(rule)
    }

    /// `f`, while `rule` is taken out on this thread.
    pub(crate) fn while_out<T>(rule: Option<Rule>, f: impl FnOnce() -> T) -> T {
        let before = OUT.replace(rule);
        let result = f();
        OUT.set(before);
        result
    }
}
