//! Settings that are valid and most likely not meant: warnings for `check`, each with its place. No advice stops a
//! start.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

#[cfg(feature = "http")]
use toml::de::DeTable;

use super::{
    Config, Job, Lease, Report, keys,
    report::{Collector, Place},
    show_duration,
    tree::{At, inside},
};
use crate::{
    logic::{
        claim::Overlap,
        schedule::{advise, longest_gap, next_of, shortened_interval, shortest_interval},
    },
    model::{JobName, Occurrence},
    words::{count, span},
};

/// This many round trips to the store must fit into the time for which a holder trusts its lease.
const ROUND_TRIPS: u32 = 10;
/// How often the schedules of all jobs may be asked for times without an occurrence, and the schedules of one job.
const ASKS_IN_ALL: u32 = 500_000;
const ASKS_MOST: u32 = 1000;
const ASKS_LEAST: u32 = 50;
/// Schedules are compared at times so far apart that these are of all hours, minutes and seconds; and at first at so
/// few.
const ASKED_APART_MS: i64 = (37 * 3600 + 13 * 60 + 7) * 1000;
const FEW_ASKS: u32 = 8;
/// A message names no more jobs than this.
const NAMED: usize = 4;

/// Where the values stand that advice is about.
#[derive(Debug, Clone)]
pub(super) struct Places {
    schedule: Vec<Range<usize>>,
    /// The schedule is that of `[defaults]`.
    of_defaults: bool,
    timeout: Option<Range<usize>>,
    /// User or group.
    user: Option<Range<usize>>,
    lease: Range<usize>,
    expect_success_within: Option<Range<usize>>,
    /// Whether `[defaults]` has it, not the job.
    expect_of_defaults: bool,
}

/// All of them.
#[derive(Debug, Clone, Default)]
pub(super) struct Spots {
    pub(super) jobs: BTreeMap<JobName, Places>,
    /// The names of the channels.
    pub(super) channels: BTreeMap<String, Range<usize>>,
}

impl Places {
    pub(super) fn of(name: &At<&str>, job: &keys::Job, defaults: &keys::Job) -> Self {
        let schedule = job.schedule.or(&defaults.schedule);
        let texts = schedule.value().map_or(&[][..], Vec::as_slice);
        let lease = job.lease.or(&defaults.lease).span();
        Self {
            schedule: texts.iter().map(|at| at.span.clone()).collect(),
            of_defaults: job.schedule.span().is_none(),
            timeout: job.timeout.or(&defaults.timeout).span(),
            user: job
                .user
                .span()
                .or(job.group.span())
                .or(defaults.user.span())
                .or(defaults.group.span()),
            lease: lease.unwrap_or_else(|| name.span.clone()),
            expect_success_within: job
                .expect_success_within
                .or(&defaults.expect_success_within)
                .span(),
            expect_of_defaults: job.expect_success_within.span().is_none(),
        }
    }
}

/// The file of a valid configuration, as it is written.
#[derive(Debug)]
pub struct Written {
    pub(super) path: PathBuf,
    pub(super) text: String,
    pub(super) places: Spots,
}

/// Facts from the store and this host.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// The users and groups that this host does not know, by their jobs, in words.
    pub unknown_users: BTreeMap<JobName, String>,
    /// How long the store takes to answer.
    pub round_trip: Option<Duration>,
    /// How long a run usually takes, in milliseconds, and of how many runs that is known.
    pub usual: BTreeMap<JobName, (i64, usize)>,
}

impl Written {
    /// The report of a certificate in `[http]` that cannot be served.
    #[cfg(feature = "http")]
    pub(crate) fn refuse_tls(&self, why: String) -> Report {
        let (tree, _) = DeTable::parse_recoverable(&self.text);
        let http = tree.get_ref().get("http");
        let tls = http.and_then(|http| http.get_ref().as_table()?.get("tls"));
        let span = tls.map_or(0..0, |tls| tls.span());
        let hint = "name the PEM files of a certificate, with those that it was signed by after it, and of its key";
        let mut found = Collector::new(&self.path, &self.text);
        found.add(
            Place::Http,
            span,
            format!("`tls`: {why}"),
            Some(hint.to_owned()),
        );
        found.finish()
    }

    /// All advice, in the order of the file. None: there is none.
    pub fn advise(&self, config: &Config, now: Occurrence, observed: &Observed) -> Option<Report> {
        let mut found = Collector::new(&self.path, &self.text);
        let watched = config
            .jobs
            .values()
            .filter(|job| job.alarms.expect_success_within.is_some());
        let asks = ASKS_IN_ALL / watched.count().max(1) as u32;
        let mut of_defaults = BTreeSet::new();
        for job in config.jobs.values() {
            let Some(places) = self.places.jobs.get(&job.name) else {
                continue;
            };
            self.schedules(&mut found, job, places, now);
            if let Some(unknown) = observed.unknown_users.get(&job.name) {
                let span = places.user.clone().unwrap_or_default();
                let hint =
                    "create it on each host that runs the job; a number needs no entry there";
                found.advise(
                    "unknown_user",
                    Place::Job(job.name.as_str()),
                    span,
                    unknown.clone(),
                    hint.to_owned(),
                );
            }
            if job.enabled {
                let asks = asks.clamp(ASKS_LEAST, ASKS_MOST);
                alarm(&mut found, job, places, now, asks, &mut of_defaults);
                intervals(&mut found, job, places, now, observed);
                if let Some(round_trip) = observed.round_trip {
                    lease(
                        &mut found,
                        job,
                        places,
                        round_trip,
                        config.limits.clock_drift,
                    );
                }
            }
        }
        self.together(&mut found, config, now);
        self.unused(&mut found, config);
        (!found.is_empty()).then(|| found.finish().into_advice())
    }

    /// What each schedule says by itself.
    fn schedules(&self, found: &mut Collector<'_>, job: &Job, places: &Places, now: Occurrence) {
        let all = job.schedules.iter().zip(&*job.schedule_text);
        for ((schedule, text), span) in all.zip(&places.schedule) {
            for advice in advise(text, schedule, job.name.as_str(), now) {
                let span = inside(&self.text, span.clone(), text, &advice.span);
                let message = format!("`schedule`: {}", advice.message);
                found.advise(advice.rule, places.place(job), span, message, advice.hint);
            }
        }
    }

    /// Channels over which nobody is told of any job.
    fn unused(&self, found: &mut Collector<'_>, config: &Config) {
        let of_jobs = config.jobs.values().flat_map(|job| &job.alarms.notify);
        let used: BTreeSet<&String> = of_jobs.chain(&config.default_channels).collect();
        for (name, span) in &self.places.channels {
            if used.contains(name) {
                continue;
            }
            let shown = name.escape_debug();
            let message = "no job uses this channel, so nothing is told over it".to_owned();
            let hint = format!(
                "name it in the `notify` of `[defaults]` or of a job: `notify = [\"{shown}\"]`"
            );
            found.advise(
                "unused_channel",
                Place::Channel(name),
                span.clone(),
                message,
                hint,
            );
        }
    }

    /// Jobs that all start at the same instants.
    fn together(&self, found: &mut Collector<'_>, config: &Config, now: Occurrence) {
        // Equal lists of schedules are one list.
        let mut lists: BTreeMap<usize, Vec<&Job>> = BTreeMap::new();
        let jobs = config
            .jobs
            .values()
            .filter(|job| job.enabled && job.jitter.is_zero() && !job.schedules.is_empty());
        for job in jobs {
            let list = job.schedules.as_ptr() as usize;
            lists.entry(list).or_default().push(job);
        }
        let asks = ASKS_IN_ALL / lists.len().max(1) as u32;
        let asks = asks.clamp(ASKS_LEAST, ASKS_MOST);
        let lists = lists.into_values().collect();
        // Most of them differ soon.
        let groups = alike(lists, now, FEW_ASKS);
        let groups = groups.into_iter().flat_map(|group| match group.len() {
            1 => vec![group],
            _ => alike(group, now, asks),
        });
        let mut groups: Vec<Vec<&Job>> = groups
            .map(|group| group.into_iter().flatten().collect())
            .filter(|jobs: &Vec<&Job>| jobs.len() > 1)
            .collect();
        for jobs in &mut groups {
            jobs.sort_by_key(|job| &job.name);
        }
        // One warning for all of them: the largest first.
        groups.sort_by_key(|jobs| (Reverse(jobs.len()), &jobs[0].name));
        let Some(([first, others @ ..], more)) = groups.split_first().map(|(g, m)| (&g[..], m))
        else {
            return;
        };
        let places = self.places.jobs.get(&first.name);
        let Some(span) = places.and_then(|places| places.schedule.first()) else {
            return;
        };
        let mut message = format!(
            "`schedule`: `{}` starts at the same instants as {}, all in the same second",
            first.name,
            named(others)
        );
        for jobs in more.iter().take(NAMED) {
            message.push_str(&format!("; so do {} together", named(jobs)));
        }
        if more.len() > NAMED {
            let rest = count(more.len() - NAMED, "other group");
            message.push_str(&format!("; and the jobs of {rest}"));
        }
        let fields = (groups
            .iter()
            .flatten()
            .flat_map(|job| job.schedule_text.iter()))
        .any(|text| !text.starts_with("@every"));
        let hint = match fields {
            true => {
                "`H` in place of a number takes one by the job's name (`H * * * *`, `H 3 * * *`); or `jitter = \"30s\"` \
                 delays each start a little"
            }
            false => "`jitter = \"30s\"` delays each start a little",
        };
        found.advise(
            "together",
            Place::Jobs,
            span.clone(),
            message,
            hint.to_owned(),
        );
    }
}

/// The names of these jobs, as far as a message names them.
fn named(jobs: &[&Job]) -> String {
    let mut names: Vec<String> = (jobs.iter().take(NAMED))
        .map(|job| format!("`{}`", job.name))
        .collect();
    if jobs.len() > NAMED {
        names.push(count(jobs.len() - NAMED, "other job"));
    }
    crate::logic::schedule::joined(&names)
}

/// These lists of jobs, each with one schedule, in groups that start at the same instants, as far as so many questions
/// show.
fn alike(lists: Vec<Vec<&Job>>, now: Occurrence, asks: u32) -> Vec<Vec<Vec<&Job>>> {
    let mut groups: BTreeMap<Vec<Option<Occurrence>>, Vec<Vec<&Job>>> = BTreeMap::new();
    for jobs in lists {
        let schedules = jobs.first().map_or(&[][..], |job| &job.schedules);
        let at = |n| Occurrence(now.0 + i64::from(n) * ASKED_APART_MS);
        let instants: Vec<_> = (0..asks).map(|n| next_of(schedules, at(n))).collect();
        // What never comes starts with nothing.
        if instants.iter().any(Option::is_some) {
            groups.entry(instants).or_default().push(jobs);
        }
    }
    groups.into_values().collect()
}

impl Places {
    fn place<'j>(&self, job: &'j Job) -> Place<'j> {
        match self.of_defaults {
            true => Place::Defaults,
            false => Place::Job(job.name.as_str()),
        }
    }
}

/// An `expect_success_within` that tells nobody, or that is over before the schedule lets anything succeed. That of the
/// defaults is told for one job by each rule: `said` has these.
// Long: one piece of advice after the other, each with its words.
fn alarm(
    found: &mut Collector<'_>,
    job: &Job,
    places: &Places,
    now: Occurrence,
    asks: u32,
    said: &mut BTreeSet<&'static str>,
) {
    let mut may_say = |rule| !places.expect_of_defaults || said.insert(rule);
    let (Some(within), Some(span_of)) = (
        job.alarms.expect_success_within,
        &places.expect_success_within,
    ) else {
        return;
    };
    let place = match places.expect_of_defaults {
        true => Place::Defaults,
        false => Place::Job(job.name.as_str()),
    };
    if job.alarms.notify.is_empty() && may_say("untold_alarm") {
        let message = match places.expect_of_defaults {
            true => format!(
                "`expect_success_within` tells nobody of jobs without a channel, such as `{}`",
                job.name.as_str().escape_debug()
            ),
            false => "`expect_success_within` tells nobody: the job has no channel".to_owned(),
        };
        let hint =
            "name a channel (a table `[notify.NAME]`) in `notify` of the job or of `[defaults]`";
        found.advise(
            "untold_alarm",
            place,
            span_of.clone(),
            message,
            hint.to_owned(),
        );
    }
    let ms = i64::try_from(within.as_millis()).unwrap_or(i64::MAX);
    let Some((gap, from)) = longest_gap(&job.schedules, now, ms, asks) else {
        return;
    };
    let local = |o: Occurrence| {
        let text = job
            .schedules
            .first()
            .map_or_else(String::new, |s| s.local(o));
        text.get(..16).unwrap_or_default().replace('T', " ")
    };
    let of = match places.expect_of_defaults {
        true => format!(" for `{}`", job.name.as_str().escape_debug()),
        false => String::new(),
    };
    if !may_say("short_alarm") {
        return;
    }
    let to = Occurrence(from.0 + gap);
    let clocks = match clocks_go_back(job, from, to, ms) {
        true => " (the clocks go back between the two)",
        false => "",
    };
    let message = format!(
        "`expect_success_within` ({}) is too short{of}: the schedule has nothing for {} from {} to {}{clocks}, so the \
         time is over before a run can succeed, and that is told",
        show_duration(within),
        span(gap),
        local(from),
        local(to),
    );
    // With time for the run itself, and as somebody would write it.
    let needed = gap.unsigned_abs();
    let unit = if needed >= 3_600_000 {
        3_600_000
    } else {
        60_000
    };
    let better = (needed + (needed / 20).max(unit)).div_ceil(unit) * unit;
    let better = show_duration(Duration::from_millis(better));
    let hint =
        format!("longer than that and a run together: `expect_success_within = \"{better}\"`");
    found.advise("short_alarm", place, span_of.clone(), message, hint);
}

/// The two are at least `within` ms apart only because an hour comes twice: by the clocks it is less.
fn clocks_go_back(job: &Job, from: Occurrence, to: Occurrence, within: i64) -> bool {
    let shown = |o: Occurrence| {
        let local = job.schedules.first()?.local(o);
        local.get(..19)?.parse::<jiff::civil::DateTime>().ok()
    };
    let apart = shown(from)
        .zip(shown(to))
        .map(|(from, to)| to.duration_since(from));
    apart.is_some_and(|apart| apart.as_millis() < i128::from(within) && within <= to.0 - from.0)
}

/// Runs that are, or may be, longer than the time to the next one.
fn intervals(
    found: &mut Collector<'_>,
    job: &Job,
    places: &Places,
    now: Occurrence,
    observed: &Observed,
) {
    let usual = observed.usual.get(&job.name);
    let then = match job.overlap {
        Overlap::Allow => return,
        Overlap::Skip => "occurrences due while a run goes on are skipped",
        Overlap::Queue => "occurrences due while a run goes on wait, and run late",
        Overlap::Replace => "the next occurrence ends a run that goes on",
    };
    if job.timeout.is_none() && usual.is_none() {
        return;
    }
    let Some((shortest, at)) = shortest_interval(&job.schedules, now) else {
        return;
    };
    let next = |(ms, at): (i64, Occurrence), clocks: &str| {
        let local = job.schedules.first().map(|s| s.local(at));
        let local = local.unwrap_or_default();
        let local = local.get(..16).unwrap_or_default().replace('T', " ");
        format!(
            "the next occurrence, {} later (as after {local}{clocks})",
            span(ms)
        )
    };
    // The next occurrence that a run of this length lasts beyond.
    let beyond = |ms: i64| {
        if ms > shortest {
            return Some(next((shortest, at), ""));
        }
        let forward = shortened_interval(&job.schedules, now).filter(|(short, _)| ms > *short);
        forward.map(|two| next(two, ", where the clocks go forward"))
    };
    let others = [
        (Overlap::Queue, "`queue` lets the next one wait"),
        (Overlap::Replace, "`replace` ends the run"),
        (Overlap::Allow, "`allow` starts it beside"),
    ];
    let others = others
        .iter()
        .filter(|(overlap, _)| *overlap != job.overlap)
        .map(|(_, does)| *does)
        .collect::<Vec<_>>();
    let hint = format!(
        "set a shorter `timeout`, a rarer `schedule`, or another `overlap`: {}",
        others.join(", ")
    );
    let place = Place::Job(job.name.as_str());
    if let (Some(timeout), Some(marked)) = (job.timeout, &places.timeout)
        && let Some(next) = beyond(timeout.as_millis() as i64)
    {
        let message = format!(
            "`timeout` ({}) lets a run last beyond {next}: {then}",
            show_duration(timeout)
        );
        found.advise("long_timeout", place, marked.clone(), message, hint.clone());
    }
    if let (Some((ms, runs)), Some(marked)) = (usual, places.schedule.first())
        && let Some(next) = beyond(*ms)
    {
        let message = format!(
            "`schedule`: a run usually takes {} ({runs} runs), so it lasts beyond {next}: {then}",
            span(*ms)
        );
        found.advise("long_run", place, marked.clone(), message, hint);
    }
}

/// A lease that a slow answer or two would end.
fn lease(found: &mut Collector<'_>, job: &Job, places: &Places, round_trip: Duration, drift: f64) {
    let needed = round_trip * ROUND_TRIPS;
    if job.lease.trust >= needed {
        return;
    }
    let step = Duration::from_millis(100);
    let mut length = job.lease.length;
    while Lease::new(length, drift).is_ok_and(|lease| lease.trust < needed) {
        length += step.max(length / 20);
    }
    // As somebody would write it.
    let length = Duration::from_millis((length.as_millis() as u64).div_ceil(500) * 500);
    let message = format!(
        "`lease` ({}): the store takes {} ms to answer, and the holder trusts this lease for {} ms: a few slow answers \
         end the run",
        show_duration(job.lease.length),
        round_trip.as_millis(),
        job.lease.trust.as_millis(),
    );
    let hint = format!("`lease = \"{}\"` or longer", show_duration(length));
    let place = Place::Job(job.name.as_str());
    found.advise("short_lease", place, places.lease.clone(), message, hint);
}

/// Reads and checks the configuration file, and keeps what advice needs.
///
/// # Errors
/// As [`super::load`].
pub fn load_written(path: &Path) -> Result<(Config, Written), Report> {
    let text = super::file::read(path)?;
    let (config, places) =
        super::file::parse_with_places(&text, path, &|name| std::env::var(name).ok())?;
    let path = path.to_owned();
    Ok((config, Written { path, text, places }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Occurrence = Occurrence(1_795_187_561_318); // 2026-11-20T15:12:41.318Z

    fn told(text: &str, observed: &Observed) -> Vec<String> {
        let path = Path::new("jobs.toml");
        let (config, places) =
            super::super::file::parse_with_places(text, path, &|_| None).expect("valid");
        let (path, text) = (path.to_owned(), text.to_owned());
        let written = Written { path, text, places };
        let report = written.advise(&config, NOW, observed);
        let problems = report.iter().flat_map(|r| r.problems());
        problems
            .map(|p| {
                let (line, column) = (p.line.unwrap_or(0), p.column.unwrap_or(0));
                format!(
                    "{line}:{column} {} {}",
                    p.rule.unwrap_or_default(),
                    p.message
                )
            })
            .collect()
    }

    #[test]
    fn no_job_is_advised_to_set_the_overlap_that_it_has() {
        for overlap in ["skip", "queue", "replace"] {
            let text = format!(
                "[jobs.a]\nschedule = '*/10 * * * *'\ncommand = 'x'\ntimeout = '15m'\noverlap = '{overlap}'\n"
            );
            let path = Path::new("jobs.toml");
            let (config, places) =
                super::super::file::parse_with_places(&text, path, &|_| None).expect("valid");
            let path = path.to_owned();
            let written = Written { path, text, places };
            let report = written.advise(&config, NOW, &Observed::default());
            let report = report.expect("advice");
            let of = report.problems();
            let hint = of[0].hint.clone().expect("a hint");
            assert!(hint.contains("`allow`"), "{hint}");
            assert!(!hint.contains(&format!("`{overlap}`")), "{hint}");
        }
    }

    #[test]
    fn a_timeout_or_a_usual_run_longer_than_the_interval_is_named() {
        let text = |overlap: &str| {
            format!(
                "[jobs.a]\nschedule = '*/10 * * * *'\ncommand = 'x'\ntimeout = '15m'\noverlap = '{overlap}'\n"
            )
        };
        let mut observed = Observed::default();
        assert_eq!(
            told(&text("skip"), &observed),
            [
                "4:11 long_timeout job `a`: `timeout` (15m) lets a run last beyond the next occurrence, 10 min later (as \
                 after 2026-11-20 15:20): occurrences due while a run goes on are skipped"
            ]
        );
        assert_eq!(told(&text("allow"), &observed), [""; 0]);
        assert!(told(&text("queue"), &observed)[0].ends_with("wait, and run late"));
        assert_eq!(
            told(&text("skip").replace("15m", "10m"), &observed),
            [""; 0]
        );
        observed.usual.insert(JobName::new("a"), (660_000, 20));
        assert_eq!(
            told(&text("replace").replace("15m", "1m"), &observed),
            [
                "2:12 long_run job `a`: `schedule`: a run usually takes 11 min (20 runs), so it lasts beyond the next \
                 occurrence, 10 min later (as after 2026-11-20 15:20): the next occurrence ends a run that goes on"
            ]
        );
        let daily = "timezone = 'Europe/Berlin'\n".to_owned()
            + &text("skip")
                .replace("*/10 * * * *", "0 12 * * *")
                .replace("15m", "24h");
        let daily = daily.replacen("timezone", "[defaults]\ntimezone", 1);
        let message = "`timeout` (1d) lets a run last beyond the next occurrence, 23 h later (as after 2027-03-27 12:00, \
                       where the clocks go forward): occurrences due while a run goes on are skipped";
        let said = told(&daily, &Observed::default());
        assert!(said.len() == 1 && said[0].ends_with(message), "{said:?}");
        assert_eq!(
            told(&daily.replace("24h", "23h"), &Observed::default()),
            [""; 0]
        );
        // Nobody starts it but people.
        let disabled = text("skip") + "enabled = false\n";
        assert_eq!(told(&disabled, &observed), [""; 0]);
    }

    #[test]
    fn a_lease_must_outlast_some_answers_of_the_store() {
        let text = "[store]\ntimeout = '150ms'\n[jobs.a]\ncommand = 'x'\nlease = '1s'\n[jobs.b]\ncommand = 'x'\n";
        let observed = |ms| Observed {
            round_trip: Some(Duration::from_millis(ms)),
            ..Observed::default()
        };
        assert_eq!(told(text, &observed(70)), [""; 0]);
        assert_eq!(
            told(text, &observed(90)),
            [
                "5:9 short_lease job `a`: `lease` (1s): the store takes 90 ms to answer, and the holder trusts this lease \
                 for 732 ms: a few slow answers end the run"
            ]
        );
    }

    #[test]
    fn jobs_that_start_together_are_named_once() {
        let job = |name: &str, schedule: &str, more: &str| {
            format!("[jobs.{name}]\nschedule = '{schedule}'\ncommand = 'x'\n{more}")
        };
        let mut text = job("a", "0 3 * * *", "") + &job("b", "0 3 * * *", "");
        assert_eq!(
            told(&text, &Observed::default()),
            [
                "2:12 together [jobs]: `schedule`: `a` starts at the same instants as `b`, all in the same second"
            ]
        );
        for name in ["c", "d", "e", "f", "g"] {
            text += &job(name, "0 3 * * *", "");
        }
        let told_once = told(&text, &Observed::default());
        assert_eq!(told_once.len(), 1);
        assert!(
            told_once[0].contains("`b`, `c`, `d`, `e` and 2 other jobs,"),
            "{told_once:?}"
        );
        // These do not.
        let apart = job("a", "H 3 * * *", "")
            + &job("b", "H 3 * * *", "")
            + &job("c", "0 3 * * *", "jitter = '1m'\n")
            + &job("d", "0 3 * * *", "enabled = false\n")
            + &job("e", "0 3 * * *", "")
            + &job("f", "0 3 * * *", "timezone = 'Asia/Tokyo'\n")
            + &job("g", "0 3 * * 1-6", "")
            + &job("h", "0 3 1-30 * *", "");
        assert_eq!(told(&apart, &Observed::default()), [""; 0]);
        // The instants count, not how they are written.
        let alike = job("a", "0 * * * *", "")
            + &job("b", "@hourly", "")
            + &job("c", "0 0 * * * *", "")
            + &job("d", "0 18 * * *", "")
            + &job("e", "0 3 * * *", "timezone = 'Asia/Tokyo'\n");
        assert_eq!(
            told(&alike, &Observed::default()),
            [
                "2:12 together [jobs]: `schedule`: `a` starts at the same instants as `b` and `c`, all in the same second; \
                 so do `d` and `e` together"
            ]
        );
    }

    /// Ten thousand jobs, each with a schedule of its own, and half of them like another one.
    #[test]
    fn many_schedules_are_compared_in_a_short_time() {
        let one = |n: usize| {
            let (s, m, h) = (n / 2 % 60, n / 120 % 60, n / 7200);
            let star = if n.is_multiple_of(2) { "*" } else { "1-31" };
            format!("[jobs.j{n}]\ncommand = 'x'\nschedule = '{s} {m} {h} {star} * *'\n")
        };
        let text: String = (0..10_000).map(one).collect();
        let told = told(&text, &Observed::default());
        let [one] = &told[..] else {
            panic!("{} lines", told.len());
        };
        assert!(
            one.contains("`j0` starts at the same instants as `j1`, all"),
            "{one}"
        );
        assert!(one.contains("; so do `j10` and `j11` together; "), "{one}");
        assert!(
            one.ends_with("; and the jobs of 4,995 other groups"),
            "{one}"
        );
    }

    /// A file with every mistake, and all that is said about it.
    #[test]
    fn each_mistake_is_shown_with_its_line_its_meaning_and_what_is_better() {
        let text = include_str!("../../tests/advice.toml");
        let path = Path::new("jobs.toml");
        let (config, places) =
            super::super::file::parse_with_places(text, path, &|_| None).expect("valid");
        let (path, text) = (path.to_owned(), text.to_owned());
        let written = Written { path, text, places };
        let observed = Observed {
            round_trip: Some(Duration::from_millis(120)),
            usual: BTreeMap::from([(JobName::new("reindex"), (780_000, 20))]),
            unknown_users: BTreeMap::from([(
                JobName::new("scan"),
                "user `scaner` is not known on this host".to_owned(),
            )]),
        };
        let report = written.advise(&config, NOW, &observed).expect("advice");
        let shown = format!("{}\n", report.render(false));
        if std::env::var_os("SOLOIST_WRITE_DOCS").is_some() {
            let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/advice.txt");
            std::fs::write(file, &shown).expect("written");
        }
        let wanted = include_str!("../../tests/advice.txt");
        assert_eq!(shown, wanted, "tests/advice.txt shows something else");
        let page = include_str!("../../docs/advice.md");
        let Some((_, rest)) = page.split_once("```text\n") else {
            panic!("the page shows no advice");
        };
        let (example, _) = rest.split_once("```").expect("the end of the text");
        assert!(
            shown.contains(example),
            "docs/advice.md shows something else"
        );
        let mut rules: Vec<&str> = report.problems().iter().filter_map(|p| p.rule).collect();
        rules.sort_unstable();
        rules.dedup();
        assert_eq!(rules, RULES);
        for rule in RULES {
            assert!(page.contains(&format!("| `{rule}` |")), "{rule}");
        }
    }

    const RULES: [&str; 17] = [
        "both_days",
        "clock_change",
        "days_in_utc",
        "each_minute",
        "long_run",
        "long_timeout",
        "never",
        "quartz_weekdays",
        "rare",
        "short_alarm",
        "short_lease",
        "together",
        "uneven_step",
        "unknown_user",
        "untold_alarm",
        "unused_channel",
        "wide_step",
    ];

    #[test]
    fn an_alarm_that_comes_too_soon_or_that_nobody_hears_is_named() {
        let text = |within: &str, more: &str| {
            format!(
                "[notify.ops]\ntype = 'command'\ncommand = ['x']\n[jobs.a]\nschedule = '0 9 * * 1-5'\ncommand = 'x'\n\
                 expect_success_within = '{within}'\n{more}"
            )
        };
        let none = Observed::default();
        assert_eq!(told(&text("73h", "notify = ['ops']"), &none), [""; 0]);
        assert_eq!(
            told(&text("72h", "notify = ['ops']"), &none),
            [
                "7:25 short_alarm job `a`: `expect_success_within` (3d) is too short: the schedule has nothing for 3 d \
                 from 2026-11-27 09:00 to 2026-11-30 09:00, so the time is over before a run can succeed, and that is told"
            ]
        );
        assert_eq!(
            told(&text("73h", ""), &none),
            [
                "1:9 unused_channel channel `ops`: no job uses this channel, so nothing is told over it",
                "7:25 untold_alarm job `a`: `expect_success_within` tells nobody: the job has no channel"
            ]
        );
        // A day of 25 hours.
        let daily = "[notify.ops]\ntype = 'command'\ncommand = ['x']\n[jobs.a]\nschedule = '0 9 * * *'\n\
                     timezone = 'Europe/Berlin'\ncommand = 'x'\nnotify = ['ops']\nexpect_success_within = ";
        let long = told(&format!("{daily}'24h30m'\n"), &none);
        assert!(
            long.len() == 1
                && long[0].contains(
                    "nothing for 1 d 1 h from 2027-10-30 09:00 to 2027-10-31 09:00 (the clocks go back between the two), so"
                ),
            "{long:?}"
        );
        let short = told(&format!("{daily}'23h'\n"), &none);
        assert!(
            short.len() == 1 && !short[0].contains("clocks"),
            "{short:?}"
        );
        // Nobody watches a job that is disabled.
        let disabled = text("1h", "notify = ['ops']\nenabled = false\n");
        assert_eq!(told(&disabled, &none), [""; 0]);
        // What the defaults say is told there, once.
        let defaults = "[notify.ops]\ntype = 'command'\ncommand = ['x']\n[defaults]\nnotify = ['ops']\n\
                        expect_success_within = '1h'\n[jobs.a]\ncommand = 'x'\n[jobs.b]\nnotify = []\ncommand = 'x'\n\
                        [jobs.c]\nnotify = []\ncommand = 'x'\n";
        let all = told(defaults, &none);
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(
            all[0].starts_with("6:25 untold_alarm [defaults]: "),
            "{all:?}"
        );
    }

    #[test]
    fn what_the_defaults_say_is_told_once_and_there() {
        let text = "[defaults]\nschedule = ['@hourly', '*/7 * * * *']\njitter = '1m'\ncommand = 'x'\n[jobs.a]\n[jobs.b]\n";
        let all = told(text, &Observed::default());
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(
            all[0].starts_with("2:25 uneven_step [defaults]: `schedule`: `*/7`"),
            "{all:?}"
        );
    }
}
