//! Reads the answers of the scripts of lua/. Any answer becomes a value or a reason, even if the server is not Redis or
//! another program wrote its data.

use std::{collections::BTreeMap, time::Duration};

use redis::{FromRedisValue, Value};
use serde::de::DeserializeOwned;

use super::{
    super::{Fleet, Info, LAST_BYTE, Notices, Output},
    state::Fields,
};
use crate::{
    logic::{
        claim::{Answer, Claim, Grant, Open, Renewal, Settlement, StopRequest, Target},
        notify::lease::{LEASE, Written},
    },
    model::{InstanceId, JobName, Marks, Occurrence, RunId, possible_ms},
};

/// The most characters of a reason: unreadable data may be of any size.
const LONGEST_REASON: usize = 200;

fn read<T: FromRedisValue>(v: &Value) -> Result<T, String> {
    T::from_redis_value(v.clone()).map_err(|e| cut(&e.to_string()))
}

fn cut(reason: &str) -> String {
    match reason.char_indices().nth(LONGEST_REASON) {
        Some((end, _)) => format!("{}...", &reason[..end]),
        None => reason.to_owned(),
    }
}

fn at(values: &[Value], i: usize) -> &Value {
    values.get(i).unwrap_or(&Value::Nil)
}

fn ms(v: &Value) -> Result<i64, String> {
    possible_ms(read(v)?)
}

fn json<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|e| format!("{e} in {text:.200}"))
}

/// Every answer begins with the server's clock in µs and the incarnation: returns both, and the rest.
pub(crate) fn begin(mut answer: Vec<Value>) -> Result<(i64, String, Vec<Value>), String> {
    if answer.len() < 2 {
        return Err("a script's answer is too short".to_owned());
    }
    let rest = answer.split_off(2);
    let now_us: i64 = read(&answer[0])?;
    possible_ms(now_us.div_euclid(1000)).map_err(|e| format!("its clock cannot be right: {e}"))?;
    Ok((now_us, read(&answer[1])?, rest))
}

/// Reads claim.lua's answer to one claim.
pub(crate) fn answer(claim: &Claim, v: &Value) -> Result<Answer, String> {
    match (v, &claim.target) {
        (Value::Int(1), Target::Scheduled(at)) => {
            let (occurrence, trigger) = (*at, claim.trigger);
            return Ok(Answer::Granted(Grant {
                occurrence,
                attempt: 1,
                trigger,
            }));
        }
        (Value::BulkString(entry), _) => {
            return running(claim, &String::from_utf8_lossy(entry));
        }
        _ => {}
    }
    let parts: Vec<Value> = read(v)?;
    let text = |i: usize| read::<String>(at(&parts, i));
    let int = |i: usize| read::<i64>(at(&parts, i));
    let occurrence = |i: usize| ms(at(&parts, i)).map(Occurrence);
    Ok(match text(0)?.as_str() {
        "granted" => Answer::Granted(Grant {
            occurrence: asked_for(claim, occurrence(1)?)?,
            attempt: read(at(&parts, 2))?,
            trigger: json(&format!("\"{}\"", text(3)?))?,
        }),
        "running" => return running(claim, &text(1)?),
        "blocked" => Answer::Blocked(json(&text(1)?)?),
        "settled" => match text(1)?.as_str() {
            "" => Answer::Settled(None),
            last => Answer::Settled(Some(json(last)?)),
        },
        "early" => Answer::Early { wait_us: int(1)? },
        "later" => Answer::Later { wait_ms: int(1)? },
        "run_first" => Answer::RunFirst(occurrence(1)?),
        "recorded" => Answer::Recorded {
            outcome: text(1)?.parse()?,
            reason: text(2)?,
        },
        "behind" => Answer::Behind {
            newest: occurrence(1)?,
            early: json(&text(2)?)?,
        },
        "quarantined" => Answer::Quarantined,
        "absent" => Answer::Absent,
        "in_doubt" => Answer::InDoubt,
        other => return Err(format!("unknown answer `{other}`")),
    })
}

/// Checks that an answer to a scheduled claim names the claimed occurrence. Otherwise the instance would start the
/// wrong occurrence, or take it as decided, whatever year it is in.
fn asked_for(claim: &Claim, answered: Occurrence) -> Result<Occurrence, String> {
    match claim.target {
        Target::Scheduled(asked) if asked != answered => {
            Err(format!("asked for {asked}, it answered for {answered}"))
        }
        _ => Ok(answered),
    }
}

fn running(claim: &Claim, entry: &str) -> Result<Answer, String> {
    let open: Open = json(entry)?;
    asked_for(claim, open.run.occurrence)?;
    Ok(Answer::Running(open))
}

/// Reads the answer of renew.lua.
pub(crate) fn renewal(rest: &[Value]) -> Result<Renewal, String> {
    let word = |i: usize| rest.get(i).map_or(Ok(String::new()), read::<String>);
    Ok(match (word(0)?.as_str(), word(1)?.as_str()) {
        ("renewed", "") => Renewal::Renewed(None),
        ("renewed", "replaced") => Renewal::Renewed(Some(StopRequest::Replaced)),
        ("renewed", _) => Renewal::Renewed(Some(StopRequest::Cancelled)),
        ("unknown", _) => Renewal::Unknown,
        _ => Renewal::Lost,
    })
}

/// Reads the answer of settle.lua.
pub(crate) fn settlement(rest: &[Value]) -> Result<Settlement, String> {
    Ok(match read::<String>(at(rest, 0))?.as_str() {
        "done" => Settlement::Done,
        _ => Settlement::Lost,
    })
}

/// Reads the answer of compare_and_set.lua: whether it changed the state.
pub(crate) fn compare_and_set(rest: &[Value]) -> Result<bool, String> {
    read::<i64>(at(rest, 0)).map(|n| n == 1)
}

/// Reads the answer of notices.lua. Notes that are not UTF-8 are left out.
pub(crate) fn notices(rest: &[Value]) -> Result<Notices, String> {
    let lease: String = read(at(rest, 0))?;
    let all: Vec<(Vec<u8>, Vec<u8>)> = read(at(rest, 1))?;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).ok();
    let notes = all
        .into_iter()
        .filter_map(|(name, note)| Some((text(name)?, text(note)?)))
        .filter(|(name, _)| name != LEASE);
    Ok(Notices {
        lease: Some(lease).filter(|lease| !lease.is_empty()),
        notes: notes.collect(),
    })
}

/// Reads the answer of note.lua.
pub(crate) fn written(rest: &[Value]) -> Result<Written, String> {
    let lease: String = read(at(rest, 1))?;
    Ok(match read::<i64>(at(rest, 0))? {
        1 => Written::Done,
        _ => Written::Not(Some(lease).filter(|lease| !lease.is_empty())),
    })
}

/// Reads one state of observe.lua.
pub(crate) fn fields(v: &Value) -> Result<Fields, String> {
    read(v)
}

/// Reads one line of lines.lua, which is JSON.
pub(crate) fn line<T: DeserializeOwned>(v: &Value) -> Result<T, String> {
    match v {
        Value::BulkString(line) => serde_json::from_slice(line).map_err(|e| e.to_string()),
        _ => Err("it is not a string".to_owned()),
    }
}

/// The fields of a hash whose names are UTF-8; soloist never writes other names.
fn named(v: &Value) -> Result<Vec<(String, Vec<u8>)>, String> {
    let all: Vec<(Vec<u8>, Vec<u8>)> = read(v)?;
    let text = |(name, value)| Some((String::from_utf8(name).ok()?, value));
    Ok(all.into_iter().filter_map(text).collect())
}

/// Reads the answer of heartbeat.lua.
pub(crate) fn fleet(rest: &[Value]) -> Result<Fleet, String> {
    let mut instances = BTreeMap::new();
    for (id, info) in named(at(rest, 4))? {
        // An instance of another version may have written an entry that this one cannot read: skip it.
        if let Ok(info) = serde_json::from_slice::<Info>(&info) {
            instances.insert(InstanceId::new(&id), info);
        }
    }
    let (mut drains, mut drained_by) = (vec![], BTreeMap::new());
    for (id, asked) in named(at(rest, 5))? {
        let (id, asked) = (InstanceId::new(&id), String::from_utf8_lossy(&asked));
        let (since, by) = asked.split_once(' ').unwrap_or((&asked, ""));
        if since != "0" {
            drains.push(id.clone());
        }
        if !by.is_empty() {
            drained_by.insert(id, by.to_owned());
        }
    }
    let epoch = |field: &'static str| {
        move |e: String| {
            format!("field `{field}` of the key `<namespace>:epoch`: {e}; delete that key")
        }
    };
    Ok(Fleet {
        id: read::<String>(at(rest, 0)).map_err(epoch("id"))?.into(),
        before: serde_json::from_slice(&read::<Vec<u8>>(at(rest, 6))?).ok(),
        born: ms(at(rest, 1)).map_err(epoch("born"))?,
        quarantine: Duration::from_millis(ms(at(rest, 2)).map_err(epoch("quarantine"))? as u64),
        open: read::<i64>(at(rest, 3)).map_err(epoch("open"))? == 1,
        instances,
        drains,
        drained_by,
    })
}

/// Reads the answer of jobs.lua.
pub(crate) fn jobs(rest: &[Value]) -> Result<Vec<JobName>, String> {
    let names: Vec<Vec<u8>> = rest.iter().map(read).collect::<Result<_, _>>()?;
    let names = names.iter().filter_map(|name| str::from_utf8(name).ok());
    Ok(names.map(JobName::new).collect())
}

/// Reads the answer of read_output.lua. None: the store has no output of this run.
pub(crate) fn output(run: RunId, rest: &[Value]) -> Result<Option<Output>, String> {
    let [from, data, stop, done, coming, total, stderr] = rest else {
        return Ok(None);
    };
    let int = read::<u64>;
    let (from, stop, total) = (int(from)?, int(stop)?, int(total)?);
    let (done, coming) = (int(done)? == 1, int(coming)? == 1);
    let data: Vec<u8> = read(data)?;
    let stderr: Vec<u8> = read(stderr)?;
    let stderr = Marks::parse(&String::from_utf8_lossy(&stderr));
    if stop > LAST_BYTE || data.len() as u64 > stop.saturating_sub(from) {
        return Err(format!(
            "the output of run {run} cannot consist of the bytes {from} to {stop}"
        ));
    }
    Ok(Some(Output::new(
        from, data, stop, done, coming, total, stderr,
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        logic::claim::{OnCrash, Overlap},
        model::Trigger,
    };

    fn claim(target: Target) -> Claim {
        Claim {
            job: JobName::new("draw"),
            target,
            known: Occurrence(0),
            missed: vec![],
            run: RunId(uuid::Uuid::nil()),
            instance: InstanceId::new("a"),
            host: "a".to_owned(),
            trigger: Trigger::Schedule,
            start_by: 0,
            lease: 2000,
            overlap: Overlap::Skip,
            on_crash: OnCrash::Fail,
            max_attempts: 1,
            definition: String::new(),
            observed: None,
            holds: vec![],
            cause: None,
        }
    }

    fn text(s: &str) -> Value {
        Value::BulkString(s.as_bytes().to_vec())
    }

    #[test]
    fn what_cannot_be_read_of_an_epoch_is_named_and_bounded() {
        let huge = text(&"A".repeat(1 << 20));
        for (i, field) in [(1, "born"), (2, "quarantine"), (3, "open")] {
            let (none, one) = (|| Value::Array(vec![]), || Value::Int(1));
            let mut rest = vec![text("id"), one(), one(), one(), none(), none(), text("")];
            assert!(fleet(&rest).is_ok());
            rest[i] = huge.clone();
            let error = fleet(&rest).expect_err("no number");
            assert!(
                error.contains(&format!("`{field}` of the key `<namespace>:epoch`")),
                "{error}"
            );
            assert!(error.len() < 500, "{}", error.len());
        }
    }

    #[test]
    fn an_answer_for_another_occurrence_is_none() {
        let granted = |at| {
            Value::Array(vec![
                text("granted"),
                Value::Int(at),
                Value::Int(2),
                text("takeover"),
            ])
        };
        let open = |at| {
            format!(
                r#"{{"occurrence":{at},"attempt":1,"trigger":"schedule","run":"{}","instance":"b","host":"b","seq":1,
                "lease":2000,"definition":"","incarnation":"i","granted_at":1,"renewed_at":1}}"#,
                uuid::Uuid::nil()
            )
        };
        let asked = claim(Target::Scheduled(Occurrence(5000)));
        assert!(matches!(
            answer(&asked, &granted(5000)),
            Ok(Answer::Granted(_))
        ));
        assert!(matches!(
            answer(&asked, &text(&open(5000))),
            Ok(Answer::Running(_))
        ));
        let whole = |at| Value::Array(vec![text("running"), text(&open(at))]);
        assert!(matches!(
            answer(&asked, &whole(5000)),
            Ok(Answer::Running(_))
        ));
        for wrong in [granted(6_779_000_000_000), text(&open(4999)), whole(5001)] {
            let error = answer(&asked, &wrong).expect_err("another occurrence");
            assert!(
                error.contains("asked for 1970-01-01T00:00:05.000Z"),
                "{error}"
            );
        }
        // The store chooses the occurrence of a trigger, so any is right.
        let key = "k".to_owned();
        let manual = claim(Target::Manual { key, before: None });
        assert!(matches!(
            answer(&manual, &granted(7000)),
            Ok(Answer::Granted(_))
        ));
    }
}
