//! Reads the answers of the scripts in lua/lock/.

use std::time::Duration;

use redis::{FromRedisValue, Value};

use super::super::{
    OwnerReply, TryLockReply,
    period::PeriodReply,
    reentrant::{EnterReply, LeaveReply},
};
use crate::model::FencingToken;

fn read<T: FromRedisValue>(answer: Value) -> Result<T, String> {
    T::from_redis_value(answer).map_err(|e| e.to_string())
}

/// Redis says -1 for a key that does not expire.
fn remaining(ms: i64) -> Duration {
    u64::try_from(ms).map_or(Duration::MAX, Duration::from_millis)
}

pub(super) fn try_lock(answer: Value) -> Result<TryLockReply, String> {
    Ok(match answer {
        Value::BulkString(_) => TryLockReply::Acquired(FencingToken(read(answer)?)),
        Value::Nil => TryLockReply::Stale,
        other => {
            let (left, owner) = read(other)?;
            let remaining = remaining(left);
            TryLockReply::Held { owner, remaining }
        }
    })
}

/// A number is the answer; a text is the owner that holds the lock instead (empty: nobody does).
fn numbered<T: FromRedisValue>(answer: Value) -> Result<Result<T, Option<String>>, String> {
    match answer {
        Value::Int(_) => read(answer).map(Ok),
        other => {
            let holder: String = read(other)?;
            Ok(Err((!holder.is_empty()).then_some(holder)))
        }
    }
}

/// The answer to a renewal or a release.
pub(super) fn owner(answer: Value) -> Result<OwnerReply, String> {
    numbered::<()>(answer).map(OwnerReply::from)
}

pub(super) fn holder(answer: Value) -> Result<Option<(String, Duration)>, String> {
    let found: Option<(i64, String)> = read(answer)?;
    Ok(found.map(|(left, owner)| (owner, remaining(left))))
}

pub(super) fn enter(answer: Value) -> Result<EnterReply, String> {
    Ok(match answer {
        Value::Nil => EnterReply::Stale,
        Value::Array(ref is) if matches!(is[..], [_, Value::Int(_)]) => {
            let (token, levels) = read(answer)?;
            EnterReply::Acquired(FencingToken(token), levels)
        }
        other => {
            let (left, owner) = read(other)?;
            let remaining = remaining(left);
            EnterReply::Held { owner, remaining }
        }
    })
}

pub(super) fn leave(answer: Value) -> Result<LeaveReply, String> {
    Ok(match numbered(answer)? {
        Ok(levels) => LeaveReply::Levels(levels),
        Err(holder) => LeaveReply::NotOwner(holder),
    })
}

pub(super) fn claim_period(answer: Value) -> Result<PeriodReply, String> {
    let (claimed, begin, next, owner) = read::<(bool, _, _, _)>(answer)?;
    let next = remaining(next);
    Ok(match claimed {
        true => PeriodReply::Claimed { begin, next },
        false => PeriodReply::Held { owner, next },
    })
}

/// Reads the answer of the script of this name, for fuzzing.
#[cfg(any(test, fuzzing))]
pub(crate) fn any(script: &str, answer: Value) -> Result<(), String> {
    match script {
        "try_lock" => try_lock(answer).map(drop),
        "renew" | "release" => owner(answer).map(drop),
        "holder" => holder(answer).map(drop),
        "enter" => enter(answer).map(drop),
        "leave" => leave(answer).map(drop),
        _ => claim_period(answer).map(drop),
    }
}
