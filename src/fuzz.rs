//! What is fuzzed: each target takes any bytes, and panics where soloist breaks a promise about them. fuzz/ has the
//! programs and the kept inputs; as a test, each target is tried on these and on changed ones.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::{Arc, LazyLock},
    time::Duration,
};

use jiff::tz::{TimeZone, TimeZoneDatabase};
use redis::{FromRedisValue, IntoConnectionInfo};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value as Json;

use crate::{
    cli::{history, status, why},
    clock::Boottime,
    config::{self, Config, StoreUrl},
    guard, lock,
    logic::{
        claim::{
            self, Claim, Control, DelayedAttempt, Effects, Event, Observed, OnCrash, Open, Overlap,
            Register, Remembered, Renew, Settle, State, Target,
        },
        guard_life::{Life, Step},
        schedule::{Dst, Fold, Gap, Schedule},
    },
    model::{
        InstanceId, JobName, LAST_MS, Occurrence, Outcome, Run, RunId, RunRecord, Trigger, is_name,
        possible_ms,
    },
    settle::{ReleaseOnDeath, SettleOnDeath},
    store::{
        self, Decision, Fleet, Info,
        connection::Client,
        redis::{
            check, reply,
            state::{self, Fields},
        },
    },
    text::{self, acts},
    view::{self, RunView},
};

/// Takes any bytes.
pub type Tries = fn(&[u8]);

/// Each by its name, which is that of its program and of its inputs' directory.
pub const TARGETS: [(&str, Tries); 9] = [
    ("config", config),
    ("duration", duration),
    ("guard", guard),
    ("reply", reply),
    ("schedule", schedule),
    ("shown", shown),
    ("state", state),
    ("text", text),
    ("url", url),
];

const NOW: i64 = 1_795_187_561_318; // 2026-11-20T15:12:41.318Z
const INC: &str = "5f0a";
const SECRET: &str = "hunter2x9q";

fn lines(data: &[u8]) -> Option<std::str::Lines<'_>> {
    std::str::from_utf8(data).ok().map(str::lines)
}

/// Nothing in it acts on a terminal, but for newlines and colours.
#[track_caller]
fn harmless(text: &str) {
    let mut rest = text;
    while let Some(at) = rest.find(|c| acts(c) && c != '\n' && c != '\t') {
        let codes = rest[at..].strip_prefix("\x1b[");
        let end = codes.and_then(|c| c.find(|c: char| !c.is_ascii_digit() && c != ';'));
        let Some((codes, end)) = codes.zip(end).filter(|(c, n)| c[*n..].starts_with('m')) else {
            panic!("{:?} in {text:?}", &rest[at..]);
        };
        rest = &codes[end..];
    }
}

/// What is read again is what was written.
#[track_caller]
fn comes_back<T: Serialize + DeserializeOwned>(value: &T) {
    let text = serde_json::to_string(value).expect("it can be written");
    let again: T = serde_json::from_str(&text).expect("it can be read again");
    assert_eq!(serde_json::to_string(&again).expect("once more"), text);
}

/// A configuration file.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let env = |name: &str| match name {
        "SECRET" => Some(SECRET.to_owned()),
        "EMPTY" => Some(String::new()),
        "HOST" => Some("redis.example".to_owned()),
        _ => None,
    };
    let read = || config::parse(text, Path::new("/nowhere/at-all/jobs.toml"), &env);
    match read() {
        Ok(config) => {
            let again = read().expect("it was accepted before");
            assert_eq!(config.digest, again.digest);
            for (name, job) in &config.jobs {
                assert!(is_name(name.as_str()));
                assert_eq!(job.digest, again.jobs[name].digest);
                assert!(job.lease.trust + job.lease.kill_budget < job.lease.length);
                view::job(&job.name, Some(job), None, NOW, INC);
            }
        }
        Err(report) => {
            assert!(!report.problems().is_empty());
            let shown = report.render(true);
            harmless(&text::coloured(&shown));
            let said = format!("{report}{shown}{}", {
                serde_json::to_string(report.problems()).expect("JSON")
            });
            assert!(text.contains(SECRET) || !said.contains(SECRET), "{said}");
        }
    }
}

/// Zone, instant in ms, rules of daylight saving, and the schedule; a line each.
pub fn schedule(data: &[u8]) {
    static ZONES: LazyLock<TimeZoneDatabase> = LazyLock::new(TimeZoneDatabase::bundled);
    static NAMES: LazyLock<Vec<String>> =
        LazyLock::new(|| ZONES.available().map(|n| n.to_string()).collect());
    let Some(mut lines) = lines(data) else { return };
    let (zone, from) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    let (dst, text) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    let any = || {
        let n = zone.bytes().fold(0, |n, b| n * 31 % 7919 + usize::from(b));
        ZONES.get(&NAMES[n % NAMES.len()]).ok()
    };
    let tz = ZONES.get(zone).ok().or_else(any).unwrap_or(TimeZone::UTC);
    let dst = Dst {
        gap: match dst.as_bytes().first() {
            Some(b'h') => Some(Gap::Shift),
            Some(b'k') => Some(Gap::Skip),
            _ => None,
        },
        overlap: match dst.as_bytes().get(1) {
            Some(b'f') => Some(Fold::First),
            Some(b's') => Some(Fold::Second),
            Some(b'b') => Some(Fold::Both),
            _ => None,
        },
    };
    let read = |job| Schedule::parse(text, &tz, dst, job);
    let schedule = match read("job") {
        Ok(schedule) => Arc::new(schedule),
        Err(e) => {
            let span = e.span.unwrap_or(0..0);
            assert!(text.get(span.clone()).is_some(), "{span:?} of {text:?}");
            return;
        }
    };
    let again = read("job").expect("it was accepted before");
    let other = read("another").ok().filter(|s| !s.uses_job_name());
    let mut t = Occurrence(from.parse().unwrap_or(NOW));
    let mut before = None;
    for _ in 0..4 {
        let next = schedule.next_after(t);
        assert_eq!(next, again.next_after(t));
        if let Some(other) = &other {
            assert_eq!(next, other.next_after(t));
        }
        let Some(o) = next else { break };
        assert!(o > t);
        // Nothing lies between the two.
        assert_eq!(schedule.next_after(Occurrence(o.0 - 1)), next);
        assert_eq!(
            schedule.next_after(Occurrence(i64::midpoint(t.0, o.0 - 1))),
            next
        );
        if let Some(before) = before.filter(|b: &Occurrence| b.0 >= 0) {
            assert_eq!(
                crate::why::previous(std::slice::from_ref(&schedule), o),
                Some(before)
            );
        }
        let local = schedule.local(o);
        let offset = tz.to_offset(o.timestamp());
        if offset.seconds() % 60 == 0 {
            assert_eq!(
                local.parse::<jiff::Timestamp>().ok(),
                Some(o.timestamp()),
                "{local}"
            );
        }
        (t, before) = (o, Some(o));
    }
}

/// A length of time as the configuration writes it.
pub fn duration(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match config::duration(text) {
        Ok(d) => {
            assert!(d <= Duration::from_secs(3650 * 86_400));
            let shown = config::show_duration(d);
            assert_eq!(config::duration(&shown), Ok(d), "{shown}");
        }
        Err(e) => assert!(!e.contains(|c: char| c.is_control()), "{e:?}"),
    }
}

/// A number that chooses a file and quotes, a line; then a URL, in which `P` stands for what is secret.
pub fn url(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let (choice, text) = text.split_once('\n').unwrap_or(("", text));
    if text.contains(SECRET) {
        return;
    }
    let choice: usize = choice.parse().unwrap_or(0);
    store::redis::install_crypto();
    let url = text.replace('P', SECRET);
    let read = config::Store::from_url(&url);
    let mut said = format!("{read:?}");
    let Ok(store) = &read else {
        return assert!(!said.contains(SECRET), "{said}");
    };
    let StoreUrl::Redis(secret) = &store.url else {
        return;
    };
    let shown = store.url.to_string();
    said += &serde_json::to_string(secret).expect("JSON");
    if let Err(e) = Client::new(&url, store) {
        said += &format!("{e} {e:?}");
    }
    if !shown.contains(SECRET) {
        assert!(!said.contains(SECRET), "{said}");
    }
    let info = url.as_str().into_connection_info();
    let is_secret = info.is_ok_and(|i| {
        let password = i.redis_settings().password();
        password.is_some_and(|p| p.contains(SECRET))
    });
    if !is_secret || text.matches('P').count() != 1 {
        return;
    }
    assert!(!shown.contains(SECRET), "{shown}");
    let quotes = ["\"", "'", "\"\"\"", "'''"][choice % 4];
    // What is known not to be kept: a string that ends too early, with a line break behind or before.
    if quotes == "'''" && url.contains(quotes) && url.contains('\n') {
        return;
    }
    let file = FILES[choice / 8 % FILES.len()];
    let file = in_file(&url, quotes, choice / 4 % 2 == 1, file);
    let said = match config::parse(&file, Path::new("/nowhere/at-all/jobs.toml"), &|_| None) {
        Ok(config) => format!("{config:?} {}", config.digest),
        Err(report) => format!(
            "{report} {report:?} {}",
            serde_json::to_string(report.problems()).expect("JSON")
        ),
    };
    assert!(!said.contains(SECRET), "{file}\n{said}");
}

/// Files with a URL in them, most of them wrong.
pub(crate) const FILES: [&str; 9] = [
    "store.url = URL",
    "[store]\nurl = URL\ntimeout = 1\n",
    "[store]\nurl = URL # ]\ntimout = '1s'\n",
    "[store]\nurl = URL x\n",
    "store = { url = URL, timeout = 1 }\n",
    "[store]\nurl = OPEN\ntimeout = 1",
    "[store]\nurl = [URL]\n",
    "[store]\nurl = URL\nurl = URL\nusername = 'x'\npassword_file = 'y'\n",
    "[jobs.a]\ncommand = 'x'\nenv = { DB = URL, N = 1 }\n",
];

/// One of [`FILES`] with `url` between `quotes`, with more escapes than it needs if it is `escaped`.
pub(crate) fn in_file(url: &str, quotes: &str, escaped: bool, file: &str) -> String {
    let mut value = url.replace("${", "$${");
    if quotes == "'" {
        value = value.replace('\n', "");
    }
    if quotes.starts_with('"') {
        value = value.replace('\\', "\\\\").replace('"', "\\\"");
        if quotes.len() == 1 {
            value = value.replace('\n', "\\n").replace('\t', "\\t");
        }
        if escaped {
            value = value
                .replace('@', "\\u0040")
                .replace('?', "\\x3f")
                .replace("//", "/\\u002F");
        }
    }
    file.replace("URL", &format!("{quotes}{value}{quotes}"))
        .replace("OPEN", &format!("{quotes}{value}"))
}

/// What comes to a guard, and to its daemon, each a line: the byte 255 stands where it comes in pieces.
pub fn guard(data: &[u8]) {
    let whole: Vec<u8> = data.iter().copied().filter(|b| *b != 0xff).collect();
    if whole.len() > 60_000 {
        return;
    }
    let (spec, controls, settled) = guard::understood(std::iter::once(&*whole));
    let pieces = guard::understood(data.split(|b| *b == 0xff));
    assert_eq!((&controls, settled), (&pieces.1, pieces.2));
    for line in whole.split(|b| *b == b'\n') {
        if let Ok(report) = serde_json::from_slice::<guard::Report>(line) {
            comes_back(&report);
        }
        if let Ok(handed) = serde_json::from_slice::<guard::HandOver>(line) {
            // Not what it was handed: numbers that soloist does not write may come back another in the last digit.
            comes_back(&handed.end);
            if let Ok(settle) = serde_json::from_value::<SettleOnDeath>(handed.settle.clone()) {
                comes_back(&settle);
                comes_back(&settle.ended(handed.end));
            } else if let Ok(release) = serde_json::from_value::<ReleaseOnDeath>(handed.settle) {
                comes_back(&release);
            }
        }
    }
    controls.iter().for_each(comes_back);
    let Some(mut spec) = spec else { return };
    spec.settle = Json::Null;
    comes_back(&spec);
    assert!(spec.env.is_empty() || !format!("{spec:?}").contains(SECRET));
    let mut now = Boottime(1_000_000_000_000);
    let mut life = Life::new(
        now,
        spec.deadline,
        spec.timeout,
        spec.grace,
        spec.kill_budget,
    );
    for control in controls {
        let before = life.deadline();
        let step = match control {
            guard::Control::Deadline(deadline) => life.on_renewal(now, deadline),
            guard::Control::Stop { reason, grace } => life.on_stop(now, reason, grace),
            guard::Control::Signal(n) if n % 2 == 0 => {
                life.on_started();
                Step::Nothing
            }
            guard::Control::Signal(_) => life.on_command_end(now, false),
            guard::Control::Settled => life.on_daemon_gone(now),
        };
        assert!(life.deadline() >= before);
        assert!(step != Step::Kill || life.killing());
        if let Some(at) = life.wake_at() {
            now = now.max(at);
            let _ = life.on_time(now);
        }
    }
}

/// The name of a script, then its answer: a line each for what is no list, by its first byte as in [`value`].
pub fn reply(data: &[u8]) {
    let mut lines = data.split(|b| *b == b'\n');
    let name = lines.next().unwrap_or_default();
    let Ok(name) = std::str::from_utf8(name) else {
        return;
    };
    if let Some(script) = name.strip_prefix("lock/") {
        let _ = lock::reply(script, value(&mut lines, 0).unwrap_or_default());
        return;
    }
    match name {
        "info" => {
            let mut info = || String::from_utf8_lossy(lines.next().unwrap_or_default());
            let mut info = || info().replace(' ', "\r\n");
            let (server, memory, replication) = (info(), info(), info());
            let info = check::Sections {
                server: &server,
                memory: &memory,
                replication: &replication,
                persistence: &info(),
            };
            check::problems(info, 1);
        }
        "event" => {
            let event = lines.next().unwrap_or_default();
            if let Ok(event) = serde_json::from_slice::<Event>(event) {
                comes_back(&event);
            }
        }
        _ => {
            let all = std::iter::from_fn(|| value(&mut lines, 0)).collect();
            answered(name, redis::Value::Array(all));
        }
    }
}

fn answered(name: &str, all: redis::Value) {
    let all = Vec::<redis::Value>::from_redis_value(all).unwrap_or_default();
    let Ok((now_us, _, rest)) = reply::begin(all) else {
        return;
    };
    assert!((0..=LAST_MS).contains(&now_us.div_euclid(1000)));
    match name {
        "jobs" => {
            let _ = reply::jobs(&rest);
        }
        "claim" => {
            for v in &rest {
                for c in [scheduled(NOW), manual()] {
                    let _ = reply::answer(&c, v).map(|a| format!("{a:?}"));
                }
            }
        }
        "renew" => drop(reply::renewal(&rest)),
        "settle" => drop(reply::settlement(&rest)),
        "notices" => drop(reply::notices(&rest)),
        "note" => drop(reply::written(&rest)),
        "compare_and_set" => drop(reply::compare_and_set(&rest)),
        "observe" => {
            for v in &rest {
                let _ = reply::fields(v).map(|f| state::decode(&f));
            }
        }
        "lines" => {
            for v in &rest {
                let _ = reply::line::<RunRecord>(v).map(|r| comes_back(&r));
                let _ = reply::line::<Decision>(v).map(|d| comes_back(&d));
            }
        }
        "heartbeat" => {
            // Whatever the members of the two hashes are, the rest is understood as without them.
            let mut without = rest.clone();
            let mut hashes = without.iter_mut().skip(4).take(2);
            if hashes.all(emptied) && reply::fleet(&without).is_ok() {
                assert!(reply::fleet(&rest).is_ok());
            }
            if let Ok(fleet) = reply::fleet(&rest) {
                assert!((0..=LAST_MS).contains(&fleet.born));
                for info in fleet.instances.values().cloned() {
                    comes_back(&Info {
                        clock_offset_ms: 0.5,
                        ..info
                    });
                }
                view::Clock::of(&fleet, now_us / 1000);
            }
        }
        "output" => {
            if let Ok(Some(output)) = reply::output(run_id(1), &rest) {
                let end = output.from.saturating_add(output.data.len() as u64);
                assert!(output.data.is_empty() || end <= store::LAST_BYTE);
                assert!(!output.more || !output.data.is_empty());
                assert!(!(output.more && output.done));
            }
        }
        _ => {}
    }
}

/// Takes the members out of what may be a hash's answer; false: it is none.
fn emptied(v: &mut redis::Value) -> bool {
    let redis::Value::Array(all) = v else {
        return false;
    };
    let text = |v: &redis::Value| matches!(v, redis::Value::BulkString(_));
    let is_hash = all.len() % 2 == 0 && all.iter().all(text);
    all.clear();
    is_hash
}

/// `:` integer, `$` text, `+` status, `_` nothing, `,` double, `#` boolean; `*` list, `~` set, `%` map, up to a line
/// with `.` alone.
fn value<'d>(lines: &mut impl Iterator<Item = &'d [u8]>, depth: usize) -> Option<redis::Value> {
    use redis::Value;
    let line = lines.next()?;
    let text = String::from_utf8_lossy(line.get(1..).unwrap_or_default());
    let list = |lines: &mut dyn Iterator<Item = &'d [u8]>| -> Vec<Value> {
        let mut lines = lines;
        let next = || (depth < 20).then(|| value(&mut lines, depth + 1)).flatten();
        std::iter::from_fn(next).collect()
    };
    Some(match line.first()? {
        b'.' => return None,
        b':' => Value::Int(text.parse().unwrap_or_default()),
        b'+' if text == "OK" => Value::Okay,
        b'+' => Value::SimpleString(text.into_owned()),
        b'_' => Value::Nil,
        b',' => Value::Double(text.parse().unwrap_or_default()),
        b'#' => Value::Boolean(text == "t"),
        b'*' => Value::Array(list(lines)),
        b'~' => Value::Set(list(lines)),
        b'%' => {
            let all = list(lines);
            let pairs = all.chunks_exact(2);
            Value::Map(pairs.map(|p| (p[0].clone(), p[1].clone())).collect())
        }
        _ => Value::BulkString(line[1..].to_vec()),
    })
}

fn run_id(n: u128) -> RunId {
    RunId(uuid::Uuid::from_u128(n))
}

fn scheduled(at: i64) -> Claim {
    Claim {
        job: JobName::new("odd"),
        target: Target::Scheduled(Occurrence(at)),
        known: Occurrence(0),
        missed: vec![],
        run: run_id(1),
        instance: InstanceId::new("i1"),
        host: "h1".to_owned(),
        trigger: Trigger::Schedule,
        start_by: i64::MAX,
        lease: 15_000,
        overlap: Overlap::Skip,
        on_crash: OnCrash::Rerun,
        max_attempts: 3,
        definition: "d".to_owned(),
        observed: None,
        holds: vec![],
        cause: None,
    }
}

fn manual() -> Claim {
    Claim {
        target: Target::Manual {
            key: "k".to_owned(),
            before: Some(Occurrence(NOW + 1000)),
        },
        trigger: Trigger::Manual,
        ..scheduled(0)
    }
}

/// The fields of a job's state, each a line `name=value`: what is read from Redis, and goes on from there.
pub fn state(data: &[u8]) {
    let Some(lines) = lines(data) else { return };
    let pairs = lines.filter_map(|l| l.split_once('='));
    let fields: BTreeMap<String, String> =
        pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
    let fields: Fields = fields.into_iter().collect();
    let Ok(Some(was)) = state::decode(&fields) else {
        return;
    };
    stays_readable(&fields, &was);
    for now in [NOW, 0, LAST_MS] {
        steps(&fields, &was, now);
        for job in SOME_JOBS.jobs.values() {
            view::job(&job.name, Some(job), Some(&was), now, INC);
        }
    }
}

/// What is written can be read again, by Redis and by SQLite.
#[track_caller]
fn stays_readable(fields: &Fields, now: &State) {
    let (set, remove) = state::diff(fields, now);
    let mut all: BTreeMap<String, String> = fields.iter().cloned().collect();
    all.retain(|name, _| !remove.contains(name));
    all.extend(set.chunks_exact(2).map(|p| (p[0].clone(), p[1].clone())));
    let all: Fields = all.into_iter().collect();
    assert_eq!(state::decode(&all), Ok(Some(now.clone())));
    assert_eq!(state::diff(&all, now), (vec![], vec![]));
    let row = serde_json::to_string(now).expect("JSON");
    assert_eq!(serde_json::from_str::<State>(&row).expect("a row"), *now);
}

// Long: one arm for each step of a store.
fn steps(fields: &Fields, was: &State, now: i64) {
    let us = now * 1000;
    let job = JobName::new("odd");
    let done = |name: &str, f: &dyn Fn(&mut Option<State>, &mut Effects)| {
        let (mut st, mut effects) = (Some(was.clone()), Effects::default());
        f(&mut st, &mut effects);
        let st = st.expect("a state that is known stays known");
        assert!(st.newest >= was.newest || name == "rewind", "{name}");
        stays_readable(fields, &st);
        effects.records.iter().for_each(comes_back);
    };
    let first = was.open.first();
    let observed = first.map(|o| Observed {
        run: o.run.id,
        seq: o.seq,
        incarnation: o.incarnation.clone(),
    });
    let at = first.map_or(now, |o| o.run.occurrence.0);
    for overlap in [
        Overlap::Skip,
        Overlap::Queue,
        Overlap::Replace,
        Overlap::Allow,
    ] {
        for at in [now, at] {
            for observed in [None, observed.clone()] {
                for c in [scheduled(at), manual()] {
                    let c = Claim {
                        overlap,
                        observed: observed.clone(),
                        ..c
                    };
                    done("claim", &|st, effects| {
                        let answer = claim::claim(st, &c, us, &was.incarnation, effects);
                        let _ = format!("{answer:?}");
                    });
                }
            }
        }
    }
    let ours = |o: Option<&Open>| Renew {
        late: false,
        reclaim: String::new(),
        run: Run {
            occurrence: Occurrence(at),
            attempt: 1,
            trigger: Trigger::Schedule,
            key: Some("k".to_owned()),
            id: o.map_or(run_id(1), |o| o.run.id),
            instance: InstanceId::new("i1"),
            host: "h1".to_owned(),
            lease: 15_000,
            definition: "d".to_owned(),
            granted_at: now,
        },
        job: job.clone(),
        seq: 7,
    };
    for incarnation in [&*was.incarnation, "another"] {
        for o in [None, first] {
            let mut r = ours(o);
            for reclaim in ["", incarnation] {
                r.reclaim = reclaim.to_owned();
                done("renew", &|st, _| {
                    let _ = claim::renew(st, &r, us, incarnation);
                });
            }
            let record = RunRecord {
                run_id: Some(r.run.id),
                fencing_token: None,
                ..record(at)
            };
            let next_attempt = Some(DelayedAttempt {
                delay_ms: 1000,
                trigger: Trigger::Retry,
            });
            for next_attempt in [None, next_attempt.filter(|_| now < LAST_MS)] {
                let s = Settle {
                    run: r.run.id,
                    record: record.clone(),
                    next_attempt,
                };
                done("settle", &|st, effects| {
                    let _ = claim::settle(st, &s, us, incarnation, effects);
                });
            }
        }
        for remembered in [Remembered::default(), Remembered::of(was)] {
            let r = Register {
                definition: "d".to_owned(),
                adopt: Some(incarnation.to_owned()),
                remembered,
                on_crash: OnCrash::Rerun,
                max_attempts: 3,
                ..Register::first(job.clone())
            };
            done("register", &|st, effects| {
                let _ = claim::register(st, &r, us, incarnation, effects);
            });
        }
    }
    for (name, what) in [
        (
            "pause",
            Control::Pause {
                until: None,
                reason: None,
            },
        ),
        ("resume", Control::Resume),
        ("skip", Control::Skip { count: 2 }),
        ("cancel", Control::Cancel),
        (
            "trigger",
            Control::Trigger {
                key: "k2".to_owned(),
            },
        ),
        ("off", Control::Off),
        ("rewind", Control::Rewind { ran: vec![] }),
    ] {
        done(name, &|st, effects| {
            drop(claim::control(st, &job, &what, us, effects))
        });
    }
}

fn record(at: i64) -> RunRecord {
    RunRecord {
        run_id: Some(run_id(1)),
        job: JobName::new("odd"),
        occurrence: Occurrence(at),
        trigger: Trigger::Schedule,
        attempt: 1,
        fencing_token: None,
        instance: Some(InstanceId::new("i1")),
        host: Some("h1".to_owned()),
        started_at: Some(at),
        finished_at: Some(at),
        lateness_ms: Some(0),
        duration_ms: Some(0),
        outcome: Outcome::Failed,
        exit_code: Some(1),
        signal: None,
        output_tail: String::new(),
        output_truncated: false,
        error: None,
        count: 1,
        usage: crate::model::Usage::default(),
        waited: None,
        by: None,
    }
}

static SOME_JOBS: LazyLock<Config> = LazyLock::new(|| {
    let text = "[jobs.good]\nschedule = '@hourly'\ncommand = 'x'\n\
                [jobs.odd]\nschedule = '*/5 * * * * *'\njitter = '1m'\noverlap = 'queue'\ncommand = 'x'\n\
                [jobs.when]\ncommand = 'x'\n";
    config::parse(text, Path::new("jobs.toml"), &|_| None).expect("a good file")
});

/// What a store says of a fleet, as JSON, and what is shown of it.
pub fn shown(data: &[u8]) {
    let Ok(said) = serde_json::from_slice::<Json>(data) else {
        return;
    };
    let plain = texts(&plain(&said));
    for (text, plain) in texts(&said).iter().zip(&plain) {
        harmless(text);
        // Neither a line nor a colour comes from elsewhere.
        for c in ['\n', '\x1b'] {
            let count = |text: &str| text.matches(c).count();
            assert!(count(text) <= count(plain), "{c:?}: {text}\n{plain}");
        }
    }
}

/// The same without a character that acts on a terminal; each has another in its place.
fn plain(json: &Json) -> Json {
    let of = |text: &str| -> String {
        let other = |c| char::from_u32(0xf_0000 + u32::from(c)).unwrap_or('?');
        let each = text.chars().map(|c| if acts(c) { other(c) } else { c });
        each.collect()
    };
    match json {
        Json::String(text) => Json::String(of(text)),
        Json::Array(all) => all.iter().map(plain).collect(),
        Json::Object(all) => all.iter().map(|(k, v)| (of(k), plain(v))).collect(),
        other => other.clone(),
    }
}

/// All that commands show of it.
fn texts(said: &Json) -> Vec<String> {
    let ms = |name: &str, default| {
        let ms = said[name].as_i64().map(possible_ms);
        ms.and_then(Result::ok).unwrap_or(default)
    };
    fn all<T: DeserializeOwned>(list: &Json) -> Vec<T> {
        let each = list.as_array().into_iter().flatten();
        each.filter_map(|v| serde_json::from_value(v.clone()).ok())
            .collect()
    }
    let object = |name: &str| said[name].as_object().cloned().unwrap_or_default();
    let instances = object("instances").into_iter().filter_map(|(id, info)| {
        let info: Info = serde_json::from_value(info).ok()?;
        Some((InstanceId::new(&id), info))
    });
    let fleet = Fleet {
        id: "e".into(),
        before: None,
        born: ms("born", 0),
        quarantine: Duration::from_millis(ms("quarantine", 0) as u64),
        open: said["open"].as_bool().unwrap_or(true),
        instances: instances.collect(),
        drains: all(&said["drains"]),
        drained_by: Default::default(),
    };
    let (mut states, mut unreadable) = (HashMap::new(), HashMap::new());
    for (job, st) in object("states") {
        match serde_json::from_value::<State>(st) {
            Ok(st) => drop(states.insert(JobName::new(&job), st)),
            Err(e) => drop(unreadable.insert(JobName::new(&job), e.to_string())),
        }
    }
    let shown_ms = ms("now", NOW);
    let config = &*SOME_JOBS;
    let mut view = view::status(config, "redis://host", &fleet, &states, shown_ms, INC);
    for j in &mut view.jobs {
        j.unreadable = unreadable.remove(&j.job);
    }
    let mut texts = vec![status::render(&view) + &status::repairs(&view, ToString::to_string)];
    let clock = view::Clock::of(&fleet, shown_ms);
    let now = clock.right(shown_ms);
    let records: Vec<RunRecord> = all(&said["history"]);
    let ended = store::tidy(records, store::HISTORY_KEPT);
    let ended: Vec<RunView> = ended.into_iter().map(RunView::from).collect();
    let mut runs = ended.clone();
    for (job, st) in &states {
        let open = st.open.iter();
        runs.extend(open.map(|o| RunView::running(job, o)));
    }
    texts.push(history::render(&runs, now, true));
    for (name, job) in &config.jobs {
        let facts = why::Facts {
            name,
            job: Some(&**job).filter(|_| name.as_str() != "when"),
            state: states.get(name).cloned(),
            incarnation: INC,
            clock,
            now,
            fleet: fleet.clone(),
            history: ended.clone(),
            decisions: all(&said["decisions"]),
        };
        let at = said["at"].as_i64().map(Occurrence);
        for at in [at, facts.latest()].into_iter().flatten() {
            if possible_ms(at.0).is_ok() {
                texts.push(why::render(&facts.explain(at), now));
            }
        }
    }
    texts.iter().map(|text| text::coloured(text)).collect()
}

/// What is shown of any text.
pub fn text(data: &[u8]) {
    let all = String::from_utf8_lossy(data);
    harmless(&text::coloured(&all));
    let line = text::line(&all);
    assert!(!line.contains(|c| acts(c) && c != '\t'), "{line:?}");
    let lines = text::lines(&all);
    assert!(
        !lines.contains(|c| acts(c) && c != '\t' && c != '\n'),
        "{lines:?}"
    );
    // A run's output comes in pieces.
    let (mut stream, mut shown) = (text::Stream::default(), String::new());
    let mut rest = data;
    while let Some(first) = rest.first() {
        let piece;
        (piece, rest) = rest.split_at(rest.len().min(1 + usize::from(*first % 7)));
        shown += &stream.push(piece);
    }
    shown += &stream.end();
    assert_eq!(shown, lines);
}
