//! Turns a [`State`] into the fields of a Redis hash, and back. lua/lib.lua lists the fields.

use std::collections::BTreeMap;

use serde::{Serialize, de::DeserializeOwned};

use crate::{logic::claim::State, model::possible_ms};

/// Names and values, as HGETALL returns them.
pub(crate) type Fields = Vec<(String, String)>;

pub(crate) fn decode(fields: &Fields) -> Result<Option<State>, String> {
    if fields.is_empty() {
        return Ok(None);
    }
    fn json<T: DeserializeOwned>(name: &str, v: &str) -> Result<T, String> {
        serde_json::from_str(v).map_err(|e| format!("field {name}: {e}: {v:.200}"))
    }
    fn time(name: &str, v: &str) -> Result<i64, String> {
        possible_ms(json(name, v)?).map_err(|e| format!("field {name}: {e}"))
    }
    if let [(mark, reason)] = &fields[..]
        && mark == "!"
    {
        return Err(reason.clone());
    }
    let mut st = State::default();
    for (name, v) in fields {
        match name.as_str() {
            "incarnation" => st.incarnation = v.clone(),
            "schedule" => st.schedule = v.clone(),
            "definition" => st.definition = v.clone(),
            "since" => st.since = time(name, v)?,
            "newest" => st.newest = time(name, v)?,
            "lost_before" => st.lost_before = time(name, v)?,
            "lost_until" => st.lost_until = time(name, v)?,
            "lost_why" => st.lost_why = v.clone(),
            "first_wait" => st.first_wait = true,
            "open" => st.open = json(name, v)?,
            "last" => st.last = Some(json(name, v)?),
            "lapsed" => st.lapsed = Some(json(name, v)?),
            "pause" => st.pause = Some(json(name, v)?),
            "resumed" => st.resumed = time(name, v)?,
            "skip" => st.skip = json(name, v)?,
            "skip_at" => st.skip_at = time(name, v)?,
            "off" => st.off = time(name, v)?,
            "early" => st.early = json(name, v)?,
            "triggers" => st.triggers = json(name, v)?,
            "triggered" => st.triggered = json(name, v)?,
            "waiting" => st.waiting = true,
            "skip_by" => st.skip_by = Some(v.clone()),
            "rewound_by" => st.rewound_by = Some(v.clone()),
            "resumed_by" => st.resumed_by = Some(v.clone()),
            // `last_to` repeats last.to. A newer version wrote any other field.
            _ => {}
        }
    }
    Ok(Some(st))
}

fn encode(st: &State) -> BTreeMap<&'static str, String> {
    fn json<T: Serialize>(v: &T) -> String {
        serde_json::to_string(v).unwrap_or_default()
    }
    let mut f = BTreeMap::from([
        ("incarnation", st.incarnation.clone()),
        ("schedule", st.schedule.clone()),
        ("definition", st.definition.clone()),
        ("since", st.since.to_string()),
        ("newest", st.newest.to_string()),
        ("skip", st.skip.to_string()),
    ]);
    for (name, ms) in [
        ("lost_before", st.lost_before),
        ("lost_until", st.lost_until),
        ("resumed", st.resumed),
        ("skip_at", st.skip_at),
        ("off", st.off),
    ] {
        if ms != 0 {
            f.insert(name, ms.to_string());
        }
    }
    if !st.lost_why.is_empty() {
        f.insert("lost_why", st.lost_why.clone());
    }
    if st.first_wait {
        f.insert("first_wait", "1".to_owned());
    }
    if !st.early.is_empty() {
        f.insert("early", json(&st.early));
    }
    if !st.open.is_empty() {
        f.insert("open", json(&st.open));
    }
    if let Some(last) = &st.last {
        f.insert("last", json(last));
        f.insert("last_to", last.to.to_string());
    }
    if let Some(lapsed) = &st.lapsed {
        f.insert("lapsed", json(lapsed));
    }
    if let Some(pause) = &st.pause {
        f.insert("pause", json(pause));
    }
    if !st.triggers.is_empty() {
        f.insert("triggers", json(&st.triggers));
    }
    if !st.triggered.is_empty() {
        f.insert("triggered", json(&st.triggered));
    }
    if st.waiting {
        f.insert("waiting", "1".to_owned());
    }
    let by = [
        ("skip_by", &st.skip_by),
        ("resumed_by", &st.resumed_by),
        ("rewound_by", &st.rewound_by),
    ];
    let by = by
        .into_iter()
        .filter_map(|(name, by)| Some((name, by.clone()?)));
    f.extend(by);
    f
}

const KNOWN: [&str; 25] = [
    "lost_before",
    "lost_until",
    "lost_why",
    "first_wait",
    "incarnation",
    "schedule",
    "definition",
    "since",
    "newest",
    "open",
    "last",
    "last_to",
    "lapsed",
    "pause",
    "resumed",
    "skip",
    "skip_at",
    "off",
    "early",
    "triggers",
    "triggered",
    "waiting",
    "skip_by",
    "resumed_by",
    "rewound_by",
];

/// The fields to set (names and values in turn) and the fields to remove, so that the hash `was` becomes `now`.
pub(crate) fn diff(was: &Fields, now: &State) -> (Vec<String>, Vec<String>) {
    let new = encode(now);
    let set = new
        .iter()
        .filter(|(k, v)| !was.iter().any(|(wk, wv)| wk == *k && wv == *v))
        .flat_map(|(k, v)| [(*k).to_owned(), v.clone()])
        .collect();
    let remove = was
        .iter()
        .map(|(k, _)| k)
        .filter(|k| KNOWN.contains(&k.as_str()) && !new.contains_key(k.as_str()))
        .cloned()
        .collect();
    (set, remove)
}
