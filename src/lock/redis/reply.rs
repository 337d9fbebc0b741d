//! What the scripts of lua/lock/ answer, taken apart.

use std::time::Duration;

use redis::{FromRedisValue, Value};

use super::super::{
    Kept, Tried,
    period::Timed,
    reentrant::{Entered, Left},
};
use crate::model::FencingToken;

fn read<T: FromRedisValue>(answer: Value) -> Result<T, String> {
    T::from_redis_value(answer).map_err(|e| e.to_string())
}

/// Redis says -1 for a key that does not expire.
fn remaining(ms: i64) -> Duration {
    u64::try_from(ms).map_or(Duration::MAX, Duration::from_millis)
}

pub(super) fn tried(answer: Value) -> Result<Tried, String> {
    Ok(match answer {
        Value::BulkString(_) => Tried::Taken(FencingToken(read(answer)?)),
        Value::Nil => Tried::Stale,
        other => {
            let (left, owner) = read(other)?;
            let remaining = remaining(left);
            Tried::Held { owner, remaining }
        }
    })
}

/// A number is the answer; a text is the one who has it instead (nobody, if empty).
fn numbered<T: FromRedisValue>(answer: Value) -> Result<Result<T, Option<String>>, String> {
    match answer {
        Value::Int(_) => read(answer).map(Ok),
        other => {
            let holder: String = read(other)?;
            Ok(Err((!holder.is_empty()).then_some(holder)))
        }
    }
}

/// Of a renewal or a release.
pub(super) fn kept(answer: Value) -> Result<Kept, String> {
    numbered::<()>(answer).map(Kept::from)
}

pub(super) fn look(answer: Value) -> Result<Option<(String, Duration)>, String> {
    let found: Option<(i64, String)> = read(answer)?;
    Ok(found.map(|(left, owner)| (owner, remaining(left))))
}

pub(super) fn entered(answer: Value) -> Result<Entered, String> {
    Ok(match answer {
        Value::Nil => Entered::Stale,
        Value::Array(ref is) if matches!(is[..], [_, Value::Int(_)]) => {
            let (token, levels) = read(answer)?;
            Entered::Taken(FencingToken(token), levels)
        }
        other => {
            let (left, owner) = read(other)?;
            let remaining = remaining(left);
            Entered::Held { owner, remaining }
        }
    })
}

pub(super) fn left(answer: Value) -> Result<Left, String> {
    Ok(match numbered(answer)? {
        Ok(levels) => Left::Levels(levels),
        Err(holder) => Left::Not(holder),
    })
}

pub(super) fn timed(answer: Value) -> Result<Timed, String> {
    let (taken, begin, next, owner) = read::<(bool, _, _, _)>(answer)?;
    let next = remaining(next);
    Ok(match taken {
        true => Timed::Taken { begin, next },
        false => Timed::Before { owner, next },
    })
}

/// That of the script of this name, for fuzzing.
#[cfg(any(test, fuzzing))]
pub(crate) fn any(script: &str, answer: Value) -> Result<(), String> {
    match script {
        "try_lock" => tried(answer).map(drop),
        "renew" | "release" => kept(answer).map(drop),
        "look" => look(answer).map(drop),
        "enter" => entered(answer).map(drop),
        "leave" => left(answer).map(drop),
        _ => timed(answer).map(drop),
    }
}
