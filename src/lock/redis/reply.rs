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

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    fn held(left: i64) -> Value {
        Value::Array(vec![Value::Int(left), text("me")])
    }

    #[test]
    fn who_has_a_lock_and_for_how_long_is_read() {
        assert_eq!(
            try_lock(text("7")),
            Ok(TryLockReply::Acquired(FencingToken(7)))
        );
        assert_eq!(try_lock(Value::Nil), Ok(TryLockReply::Stale));
        for (left, remaining) in [(1500, Duration::from_millis(1500)), (-1, Duration::MAX)] {
            let owner = "me".to_owned();
            let found = Ok(Some((owner.clone(), remaining)));
            assert_eq!(holder(held(left)), found);
            let reply = TryLockReply::Held { owner, remaining };
            assert_eq!(try_lock(held(left)), Ok(reply));
        }
        assert_eq!(holder(Value::Nil), Ok(None));
    }

    #[test]
    fn a_number_is_an_answer_and_a_text_the_owner_instead() {
        let mine = Some("me".to_owned());
        assert_eq!(owner(Value::Int(1)), Ok(OwnerReply::Done));
        assert_eq!(owner(text("me")), Ok(OwnerReply::NotOwner(mine.clone())));
        assert_eq!(owner(text("")), Ok(OwnerReply::NotOwner(None)));
        assert!(matches!(leave(Value::Int(3)), Ok(LeaveReply::Levels(3))));
        assert!(matches!(leave(text("me")), Ok(LeaveReply::NotOwner(o)) if o == mine));
    }

    #[test]
    fn a_token_with_levels_is_told_from_an_owner_with_time() {
        let entered = enter(Value::Array(vec![text("7"), Value::Int(2)]));
        assert!(matches!(
            entered,
            Ok(EnterReply::Acquired(FencingToken(7), 2))
        ));
        assert!(matches!(enter(Value::Nil), Ok(EnterReply::Stale)));
        assert!(
            matches!(enter(held(5)), Ok(EnterReply::Held { owner, remaining })
            if owner == "me" && remaining == Duration::from_millis(5))
        );
    }

    #[test]
    fn a_period_is_claimed_or_held() {
        let next = Duration::from_millis(20);
        for (claimed, reply) in [
            (1, PeriodReply::Claimed { begin: 10, next }),
            (
                0,
                PeriodReply::Held {
                    owner: "me".to_owned(),
                    next,
                },
            ),
        ] {
            let [claimed, begin, after] = [claimed, 10, 20].map(Value::Int);
            let answer = Value::Array(vec![claimed, begin, after, text("me")]);
            assert_eq!(claim_period(answer), Ok(reply));
        }
    }

    /// What `src/fuzz.rs` calls.
    #[test]
    fn each_script_has_answers_of_its_own() {
        for (script, answer) in [
            ("try_lock", Value::Nil),
            ("renew", Value::Int(1)),
            ("release", Value::Int(1)),
            ("holder", Value::Nil),
            ("enter", Value::Nil),
            ("leave", Value::Int(1)),
        ] {
            assert_eq!(any(script, answer), Ok(()), "{script}");
            let nonsense = Value::Array(vec![Value::Nil]);
            assert!(any(script, nonsense).is_err(), "{script}");
        }
        assert!(any("claim_period", Value::Nil).is_err());
    }
}
