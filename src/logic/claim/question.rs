//! Any question about one job, with its answer, in one type: for what handles them all alike.

use serde::{Deserialize, Serialize};

use super::{
    Answer, Claim, Control, Controlled, Effects, Register, Registration, Renew, Renewal, Settle,
    Settlement, State, claim, control, register, renew, settle,
};
use crate::model::JobName;

/// What an instance or a person asks the store about one job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    Claim(Box<Claim>),
    Register(Box<Register>),
    Renew(Box<Renew>),
    Settle(Box<Settle>),
    Control(JobName, Control),
}

/// The answer to a [`Question`] of the same name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "one lives while it is looked at")]
pub enum Answered {
    Claim(Answer),
    Register(Registration),
    Renew(Renewal),
    Settle(Settlement),
    Control(Controlled),
}

impl Question {
    pub fn job(&self) -> &JobName {
        match self {
            Self::Claim(c) => &c.job,
            Self::Register(r) => &r.job,
            Self::Renew(r) => &r.job,
            Self::Settle(s) => &s.record.job,
            Self::Control(job, _) => job,
        }
    }

    /// The answer, by the rules; `now_us` is the store's clock.
    pub fn decide(
        &self,
        state: &mut Option<State>,
        now_us: i64,
        incarnation: &str,
        effects: &mut Effects,
    ) -> Answered {
        match self {
            Self::Claim(c) => Answered::Claim(claim(state, c, now_us, incarnation, effects)),
            Self::Register(r) => {
                Answered::Register(register(state, r, now_us, incarnation, effects))
            }
            Self::Renew(r) => Answered::Renew(renew(state, r, now_us, incarnation)),
            Self::Settle(s) => Answered::Settle(settle(state, s, now_us, incarnation, effects)),
            Self::Control(job, what) => {
                Answered::Control(control(state, job, what, now_us, effects))
            }
        }
    }
}
