//! Carries out what people request of the fleet, by a command or over HTTP: checks each request, sends it to the
//! store, and describes the result in words.

use std::time::Duration;

use futures_util::future::BoxFuture;
use jiff::{Timestamp, civil, fmt::temporal::Pieces, tz::TimeZone};

use crate::{
    clock::Boottime,
    config::{Job, StoreRetry, nearest},
    logic::{
        claim::{Control, Controlled, KEYS_KEPT_MS, KEYS_MOST, OWN_KEY, visible},
        schedule::next_of,
    },
    model::{InstanceId, JobName, Occurrence, RunId},
    store::{self, Fleet, LIVE_WITHIN_MS, Reply, Store},
    view::{self, Clock},
    words,
};

/// Why a request is not carried out.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It makes no sense: a name that does not exist, a time that has passed.
    Usage {
        message: String,
        hint: String,
    },
    /// Not now.
    NotNow {
        message: String,
        hint: Option<String>,
    },
    Store(store::Error),
}

impl Refusal {
    fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage {
            message: message.into(),
            hint: hint.into(),
        }
    }
}

/// The store, and how to repeat a request after a transport error.
#[derive(Clone, Copy)]
pub(crate) struct Asker<'a> {
    pub(crate) store: &'a dyn Store,
    pub(crate) retry: &'a StoreRetry,
}

impl<'a> Asker<'a> {
    /// Each request must be safe to repeat.
    async fn ask<T>(
        self,
        f: impl Fn() -> BoxFuture<'a, Result<T, store::Error>>,
    ) -> Result<T, Refusal> {
        self.ask_counted(f).await.map(|(reply, _)| reply)
    }

    /// The same, with how often the request was repeated: each may have done its work.
    async fn ask_counted<T>(
        self,
        f: impl Fn() -> BoxFuture<'a, Result<T, store::Error>>,
    ) -> Result<(T, u32), Refusal> {
        let mut repeated = 0;
        loop {
            match f().await {
                Err(e) if e.is_transient() && repeated < self.retry.attempts => {
                    tracing::debug!(error = %e, "asking again");
                }
                other => return other.map(|v| (v, repeated)).map_err(Refusal::Store),
            }
            repeated += 1;
            tokio::time::sleep(self.retry.pause(repeated, fastrand::f64())).await;
        }
    }

    /// # Errors
    /// No instance has registered the job.
    pub(crate) async fn control(
        self,
        job: &'a JobName,
        what: &'a Control,
    ) -> Result<Reply<Controlled>, Refusal> {
        self.controlled(job, what).await.map(|(reply, _)| reply)
    }

    /// The same, with how often the request was repeated.
    async fn controlled(
        self,
        job: &'a JobName,
        what: &'a Control,
    ) -> Result<(Reply<Controlled>, u32), Refusal> {
        let (reply, repeated) = (self.ask_counted(|| self.store.control(job, what))).await?;
        match reply.value {
            Controlled::Absent => Err(self.absent(job).await),
            _ => Ok((reply, repeated)),
        }
    }

    /// The job is not registered, so nobody can act on it.
    async fn absent(self, job: &JobName) -> Refusal {
        let fleet = self.ask(|| self.store.heartbeat(None)).await;
        let wait = fleet.ok().and_then(|reply| {
            let clock = Clock::of(&reply.value, reply.now_us.div_euclid(1000));
            wait(&reply.value, clock)
        });
        let hint = "an instance that has the job registers it: `soloist status` shows which are up";
        Refusal::NotNow {
            message: format!("job `{job}` is not registered with the store yet"),
            hint: Some(wait.unwrap_or_else(|| hint.to_owned())),
        }
    }

    pub(crate) async fn drain(
        self,
        instance: &'a InstanceId,
        on: bool,
        by: &str,
    ) -> Result<(), Refusal> {
        let by = &visible(by);
        self.ask(|| {
            let by = by.clone();
            Box::pin(async move { self.store.drain(instance, on, &by).await })
        })
        .await
    }

    /// `own`: the key is new, so that it can only be known from the same request.
    pub(crate) async fn trigger(
        self,
        job: &'a JobName,
        key: &str,
        own: bool,
        by: &str,
    ) -> Result<Triggered, Refusal> {
        let mut before = None;
        if !own {
            let jobs = std::slice::from_ref(job);
            let seen = self.ask(|| self.store.observe(jobs)).await?;
            let state = seen.value.into_iter().next().flatten();
            before = state.map(|st| (st.knows_key(key), st.waits_since(key)));
        }
        let key = key.to_owned();
        let what = Control::Trigger { key }.by(by);
        let (reply, repeated) = self.controlled(job, &what).await?;
        if reply.value == Controlled::TooMany {
            return Err(too_many(job));
        }
        let occurrence = match reply.value {
            Controlled::Triggered(at) => Some(at),
            _ => None,
        };
        // A request that had to be repeated finds its own key, which nobody had used before it.
        let found_own = repeated > 0 && before.is_some_and(|(known, _)| !known);
        Ok(Triggered {
            new: reply.value == Controlled::Done || own || found_own,
            occurrence,
            waits_since: before.and_then(|(_, since)| since),
            sent: reply.sent,
        })
    }
}

/// The user and host of this command: `alice@web-1`.
pub(crate) fn me() -> String {
    let uid = nix::unistd::getuid();
    let user = nix::unistd::User::from_uid(uid).ok().flatten();
    let name = user.map_or_else(|| uid.to_string(), |user| user.name);
    format!("{name}@{}", store::host())
}

/// A trigger that the store has taken.
#[derive(Debug)]
pub(crate) struct Triggered {
    /// False: this key was used before the request.
    pub(crate) new: bool,
    /// As which occurrence it was decided, if it was.
    pub(crate) occurrence: Option<Occurrence>,
    /// It was put in before the request, and waited.
    pub(crate) waits_since: Option<i64>,
    pub(crate) sent: Boottime,
}

/// The key of a trigger that a person gave.
///
/// # Errors
/// The key has a wrong length or a wrong character.
pub(crate) fn key(text: &str) -> Result<String, String> {
    if text.is_empty() || text.chars().count() > 200 || text.chars().any(char::is_control) {
        return Err("use 1 to 200 characters, without control characters".to_owned());
    }
    if text.starts_with(OWN_KEY) {
        return Err(format!(
            "keys that begin with `{OWN_KEY}` are reserved: soloist gives them to triggers without a key"
        ));
    }
    Ok(text.to_owned())
}

/// A key for a trigger that got none.
pub(crate) fn own_key() -> String {
    format!("{OWN_KEY}{}", RunId::random())
}

fn too_many(job: &JobName) -> Refusal {
    let days = KEYS_KEPT_MS / 86_400_000;
    Refusal::NotNow {
        message: format!(
            "the store already keeps {KEYS_MOST} trigger keys of `{job}`, or as many triggers are waiting"
        ),
        hint: Some(format!(
            "the store forgets a key {days} days after its use; a trigger without a key of its own needs none"
        )),
    }
}

/// `text` as an instant after `now`, both in Unix milliseconds. `name` is that of the argument.
///
/// # Errors
/// It is not understood, or not in the future.
pub(crate) fn until(name: &str, text: &str, zone: &str, now: i64) -> Result<i64, Refusal> {
    let bad = |why: &str| {
        Refusal::usage(
            format!("{name} `{}`: {why}", words::line(text)),
            "write 2026-12-24T18:00:00+01:00, 2026-12-24T18:00 (in the job's time zone), or a duration as 2h",
        )
    };
    let far = || {
        Refusal::usage(
            format!("{name} `{}`: out of range", words::line(text)),
            "write an instant before 9999-12-30T22:00:00Z; without any, it is paused until somebody resumes it",
        )
    };
    let tz = TimeZone::get(zone).unwrap_or(TimeZone::UTC);
    let at = if let Ok(t) = text.parse::<Timestamp>() {
        t
    } else if let Ok(local) = text.parse::<civil::DateTime>() {
        tz.to_ambiguous_zoned(local)
            .compatible()
            .map_err(|_| far())?
            .timestamp()
    } else if let Ok(span) = text.parse::<jiff::Span>() {
        let start = Timestamp::from_millisecond(now)
            .map_err(|_| far())?
            .to_zoned(tz);
        start.checked_add(span).map_err(|_| far())?.timestamp()
    } else if Pieces::parse(text).is_ok_and(|p| p.time().is_some() && p.offset().is_some()) {
        return Err(far());
    } else {
        return Err(bad("not understood"));
    };
    let at = at.as_millisecond();
    if at <= now {
        return Err(Refusal::usage(
            format!("{name} `{}`: that is not in the future", words::line(text)),
            format!("for the fleet it is {} now", words::instant(now)),
        ));
    }
    Ok(at)
}

/// The next `n` occurrences that are planned after `now`, whether they will run or not.
pub(crate) fn planned(job: Option<&Job>, now: i64, n: usize) -> Vec<Occurrence> {
    let Some(job) = job.filter(|j| j.enabled) else {
        return vec![];
    };
    let mut list = vec![];
    let mut at = Occurrence(now);
    while list.len() < n
        && let Some(next) = next_of(&job.schedules, at)
    {
        list.push(next);
        at = next;
    }
    list
}

/// # Errors
/// The job has no occurrences that could be skipped.
pub(crate) fn skippable(name: &JobName, job: Option<&Job>, count: u32) -> Result<(), Refusal> {
    if job.is_some_and(|j| j.schedules.is_empty()) && count > 0 {
        return Err(Refusal::usage(
            format!("`{name}` has no schedule, so it has no occurrences to skip"),
            "it runs only when it is triggered, and a pause does not prevent that either; 0 withdraws an earlier skip",
        ));
    }
    Ok(())
}

/// # Errors
/// The fleet has no instance of this name; has the nearest name as its hint.
pub(crate) fn instance(fleet: &Fleet, name: &str) -> Result<InstanceId, Refusal> {
    let id = InstanceId::new(name);
    if fleet.instances.contains_key(&id) || fleet.drains.contains(&id) {
        return Ok(id);
    }
    let names = fleet.instances.keys().map(InstanceId::as_str);
    let hint = nearest(name, names).map_or_else(
        || instances_in_words(fleet),
        |near| format!("did you mean `{near}`?"),
    );
    Err(Refusal::usage(
        format!("no instance `{}`", words::line(name)),
        hint,
    ))
}

pub(crate) fn instances_in_words(fleet: &Fleet) -> String {
    if fleet.instances.is_empty() {
        return "no instance has ever used this store".to_owned();
    }
    let names: Vec<&str> = fleet.instances.keys().map(InstanceId::as_str).collect();
    format!("the instances are {}", names.join(", "))
}

// ---- results, in words ----

pub(crate) fn paused(job: &JobName, until: Option<i64>, now: i64) -> String {
    let until = until.map_or("until `soloist resume`".to_owned(), |t| {
        format!("until {} ({})", words::instant(t), words::relative(t, now))
    });
    format!("`{job}` is paused on all instances {until}; running commands continue")
}

/// `changed`: it was paused.
pub(crate) fn resumed(name: &JobName, job: Option<&Job>, changed: bool, clock: Clock) -> String {
    if !changed {
        return format!("`{name}` was not paused");
    }
    match planned(job, clock.now, 1).first() {
        Some(_) if clock.nobody_believes => {
            format!(
                "`{name}` is resumed on all instances, and starts once the store's clock is corrected"
            )
        }
        Some(o) => format!(
            "`{name}` is resumed on all instances; next {}",
            words::relative(o.0, clock.now)
        ),
        None => format!("`{name}` is resumed on all instances"),
    }
}

/// `first`: the first of the occurrences that will be skipped.
pub(crate) fn skips(name: &JobName, count: u32, first: &[Occurrence]) -> String {
    if count == 0 {
        return format!("`{name}` will skip no occurrence");
    }
    let mut text = format!(
        "`{name}` will skip {} on all instances",
        words::count(count as usize, "occurrence")
    );
    if !first.is_empty() {
        let shown: Vec<String> = first.iter().map(|o| words::instant(o.0)).collect();
        let more = match count as usize > first.len() {
            true => ", …",
            false => "",
        };
        text.push_str(&format!(": {}{more}", shown.join(", ")));
    }
    text
}

/// The instance that takes a trigger, in words. `config`: the digest of a configuration that has the job; an instance
/// with another one may have it too.
pub(crate) fn who(fleet: &Fleet, clock: Clock, config: Option<&str>) -> String {
    let live: Vec<_> = (fleet.instances.iter())
        .filter(|(_, i)| !clock.silent(i))
        .collect();
    let claiming: Vec<_> = (live.iter())
        .filter(|(id, i)| !fleet.is_draining(id, i))
        .collect();
    let have_it = claiming
        .iter()
        .all(|(_, i)| config == Some(i.config.as_str()));
    let who = match claiming.len() {
        0 if live.is_empty() => return "no instance is up to claim it".to_owned(),
        0 => return "every live instance is draining, so it waits".to_owned(),
        _ if !have_it => "an instance that has the job claims it, if one is live".to_owned(),
        1 if live.len() == 1 => "the one live instance claims it".to_owned(),
        1 => "the one live instance that is not draining claims it".to_owned(),
        n if n == live.len() => format!("one of {n} live instances claims it"),
        n => format!("one of {n} live instances that are not draining claims it"),
    };
    match (doubt(clock), wait(fleet, clock)) {
        (Some(why), _) => format!("{who} once the store's clock is corrected: {why}"),
        (None, Some(why)) => format!("{who}, but {why}"),
        (None, None) => who,
    }
}

/// No instance is up.
pub(crate) const NOBODY: &str = "no instance is up, so no job starts: `soloist run` starts one";

/// Some: nothing starts at present.
pub(crate) fn standstill(fleet: &Fleet, clock: Clock) -> Option<String> {
    let nobody = || fleet.instances.values().all(|i| clock.silent(i));
    let nobody = || nobody().then(|| NOBODY.to_owned());
    let drained = || view::drained(fleet, clock).then(|| view::DRAINED.to_owned());
    doubt(clock)
        .or_else(|| wait(fleet, clock))
        .or_else(nobody)
        .or_else(drained)
}

/// Some: the store's data is new, so nothing starts yet.
pub(crate) fn wait(fleet: &Fleet, clock: Clock) -> Option<String> {
    let words = view::epoch(fleet, clock.now).words;
    (!words.is_empty()).then_some(words)
}

/// Some: no instance believes the store's clock, so nothing starts.
pub(crate) fn doubt(clock: Clock) -> Option<String> {
    let ahead = clock.doubt_ms.filter(|_| clock.nobody_believes)?;
    Some(format!(
        "instances do not believe the store's clock, which is {}, and start nothing until it is corrected",
        words::apart(ahead)
    ))
}

/// A trigger, in one line.
pub(crate) fn triggered(
    job: &JobName,
    key: &str,
    new: bool,
    occurrence: Option<Occurrence>,
    who: &str,
) -> String {
    match (occurrence, new) {
        (Some(at), true) => format!(
            "`{job}` is triggered with key `{key}`, as the occurrence of {}",
            words::instant(at.0)
        ),
        (Some(at), false) => format!(
            "key `{key}` of `{job}` was used before, for {}: the job does not run again",
            words::instant(at.0)
        ),
        (None, true) => format!("`{job}` is triggered with key `{key}`; {who}"),
        (None, false) => {
            format!("`{job}` was triggered with key `{key}` before and still waits; {who}")
        }
    }
}

/// The end of a trigger that still waits after the job's `start_within` (`within`), in words.
pub(crate) fn over(within: Duration, fleet: &Fleet, clock: Clock) -> String {
    let why = standstill(fleet, clock).map_or(String::new(), |why| format!(": {why}"));
    format!(
        "no instance started it within `start_within` ({}); the next one that may start jobs records it as missed{why}",
        words::took(i64::try_from(within.as_millis()).unwrap_or(i64::MAX))
    )
}

/// The instances, other than one, that claim occurrences.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Others {
    pub(crate) live: usize,
    /// They may be gone: name, and time since their last heartbeat, ms.
    pub(crate) overdue: Vec<(InstanceId, i64)>,
}

/// The instances other than `id`.
pub(crate) fn others(fleet: &Fleet, id: &InstanceId, clock: Clock) -> Others {
    let mut others = Others::default();
    for (other, info) in &fleet.instances {
        if other == id || clock.silent(info) || fleet.is_draining(other, info) {
            continue;
        }
        match clock.age(info).saturating_abs() {
            age if age > LIVE_WITHIN_MS => others.overdue.push((other.clone(), age)),
            _ => others.live += 1,
        }
    }
    others
}

/// `running`: the jobs that the instance still runs.
pub(crate) fn drained(
    instance: &InstanceId,
    on: bool,
    running: &[&JobName],
    others: &Others,
) -> String {
    let instance = words::line(instance.as_str());
    if !on {
        return format!("{instance} claims again");
    }
    let running = if running.is_empty() {
        "runs nothing now".to_owned()
    } else {
        let jobs: Vec<&str> = running.iter().map(|job| job.as_str()).collect();
        format!("finishes {}", words::line(&jobs.join(", ")))
    };
    let mut rest = match others.live {
        0 => "no other instance is up to run jobs".to_owned(),
        1 => "1 other instance runs jobs".to_owned(),
        n => format!("{n} other instances run jobs"),
    };
    for (other, age) in &others.overdue {
        let (other, age) = (words::line(other.as_str()), words::took(*age));
        rest += &format!("; {other} may be gone, it has not reported for {age}");
    }
    format!("{instance} claims nothing more and {running}; {rest}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Info;

    const NOW: i64 = 1_795_187_561_318; // 2026-11-20T15:12:41.318Z

    #[test]
    fn only_instances_that_claim_and_have_the_job_are_counted_for_a_trigger() {
        let info = |config: &str| Info {
            seen: NOW,
            config: config.to_owned(),
            ..Info::default()
        };
        let named = |(name, config): &(&str, &str)| (InstanceId::new(name), info(config));
        let of = |instances: &[(&str, &str)], drains: &[&str], config| {
            let fleet = Fleet {
                id: "e".into(),
                before: None,
                born: 0,
                quarantine: std::time::Duration::ZERO,
                open: true,
                instances: instances.iter().map(named).collect(),
                drains: drains.iter().map(|name| InstanceId::new(name)).collect(),
                drained_by: Default::default(),
            };
            who(&fleet, Clock::of(&fleet, NOW), config)
        };
        let (same, ours) = ([("a", "x"), ("b", "x"), ("c", "x")], Some("x"));
        for (drains, want) in [
            (&[][..], "one of 3 live instances claims it"),
            (
                &["a"],
                "one of 2 live instances that are not draining claims it",
            ),
            (
                &["a", "b"],
                "the one live instance that is not draining claims it",
            ),
            (
                &["a", "b", "c"],
                "every live instance is draining, so it waits",
            ),
        ] {
            assert_eq!(of(&same, drains, ours), want);
        }
        assert_eq!(of(&same[..1], &[], ours), "the one live instance claims it");
        assert_eq!(of(&[], &[], ours), "no instance is up to claim it");
        // Nobody knows which instances have it: no number.
        let unknown = "an instance that has the job claims it, if one is live";
        assert_eq!(of(&same, &["c"], None), unknown);
        assert_eq!(of(&[("a", "x"), ("c", "y")], &[], ours), unknown);
        assert_eq!(
            of(&[("a", "x"), ("c", "y")], &["c"], ours),
            "the one live instance that is not draining claims it"
        );
    }

    #[test]
    fn a_pause_ends_at_an_instant_a_local_time_or_after_a_while() {
        for (text, zone, want) in [
            ("2026-11-20T18:00:00+01:00", "UTC", "2026-11-20T17:00:00Z"),
            ("2026-12-24T18:00", "Europe/Berlin", "2026-12-24T17:00:00Z"),
            (
                "2026-12-24 18:00:00",
                "Asia/Shanghai",
                "2026-12-24T10:00:00Z",
            ),
            ("2026-12-24", "Asia/Shanghai", "2026-12-23T16:00:00Z"),
            ("2h", "UTC", "2026-11-20T17:12:41.318Z"),
            ("1h30m", "UTC", "2026-11-20T16:42:41.318Z"),
            ("1d12h", "UTC", "2026-11-22T03:12:41.318Z"),
        ] {
            let got = until("until", text, zone, NOW).map(words::instant);
            assert_eq!(got.ok().as_deref(), Some(want), "{text}");
        }
        for text in ["9999-12-31T23:59:59Z", "9999-12-31T23:59", "8000y"] {
            let Err(Refusal::Usage { message, .. }) = until("until", text, "UTC", NOW) else {
                panic!("{text} is understood");
            };
            assert!(message.contains("out of range"), "{message}");
        }
        for text in ["", "soon", "2020-01-01T00:00:00Z", "-2h", "0s", "20000y"] {
            let refused = until("until", text, "UTC", NOW);
            assert!(matches!(refused, Err(Refusal::Usage { .. })), "{text}");
        }
    }
}
