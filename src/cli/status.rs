//! `status`: the fleet at a glance.

use std::collections::{HashMap, HashSet};

use super::{
    Context, Exit, Failure,
    show::{self, BAD, BOLD, BUSY, Cell, DIM, PLAIN, WARN, count, relative, took},
};
use crate::{
    acts,
    logic::{belief::NEAR, coming::SKIPS_COUNTED, judge},
    model::{JobName, RunRecord},
    store::{observe_each, records_each},
    view::{self, InstanceView, JobView, LacksView, LastView, PauseView, StatusView},
    words::{self, command},
};

pub(super) async fn status(ctx: &Context) -> Result<Exit, Failure> {
    let (fleet, _) = ctx.fleet().await?;
    let names: Vec<JobName> = ctx.config.jobs.keys().cloned().collect();
    let states = ctx
        .ask(async || observe_each(&*ctx.store, &names).await)
        .await?;
    let (mut by_name, mut unreadable) = (HashMap::new(), HashMap::new());
    for (name, state) in names.into_iter().zip(states.value) {
        match state {
            Ok(Some(state)) => drop(by_name.insert(name, state)),
            Ok(None) => {}
            Err(e) => drop(unreadable.insert(name, e.to_string())),
        }
    }
    let mut status = view::status(
        &ctx.config,
        ctx.store.address(),
        &fleet,
        &by_name,
        states.now_us / 1000,
        &states.incarnation,
    );
    for j in &mut status.jobs {
        j.unreadable = unreadable.remove(&j.job);
    }
    status.problems = ctx.problems().await;
    if !ctx.config.channels.is_empty() {
        // Without what the notifier says the rest is shown.
        let mut jobs = ctx.config.jobs.values();
        let watched = jobs.any(|job| job.alarms.expect_success_within.is_some());
        match ctx.store.notices(watched).await {
            Ok(said) => {
                status.notifier_lacks = LacksView::of(said.value.lease.as_deref());
                for j in &mut status.jobs {
                    if let Some(job) = ctx.config.jobs.get(&j.job) {
                        let noted = view::noted(&said.value, &j.job);
                        let since = view::without_success(by_name.get(&j.job), noted);
                        j.overdue = view::overdue(job, since, status.now.0);
                    }
                }
            }
            Err(error) => status.problems.push(format!(
                "cannot read notification data; overdue jobs not shown: {error}"
            )),
        }
    }
    let names: Vec<JobName> = status.jobs.iter().map(|j| j.job.clone()).collect();
    let records = ctx
        .ask(async || records_each(&*ctx.store, &names, judge::RECORDS).await)
        .await?;
    let mut records: HashMap<usize, Vec<RunRecord>> = records.into_iter().collect();
    for (of, j) in status.jobs.iter_mut().enumerate() {
        let records = records.remove(&of).unwrap_or_default();
        j.judge(false, records.iter().map(RunRecord::decided));
        // Its state would say it, had the store not lost its data since the run began.
        j.look_at_records(LastView::newest(records));
    }
    ctx.out.say(&status, || {
        render(&status) + &repairs(&status, |job| ctx.store.place(job))
    })?;
    Ok(Exit::Ok)
}

/// Hints for the jobs whose state cannot be read.
pub(crate) fn repairs(s: &StatusView, place: impl Fn(&JobName) -> String) -> String {
    let one = |j: &JobView| {
        let reason = j.unreadable.as_ref()?;
        let what = format!("{}: {}", j.job, show::line(reason));
        Some(format!(
            "\n{}\n  Instances cannot read it either: this job may not start, and a run that dies is not taken over. \
            Another program, or another version of soloist, wrote to {}: repair it, or delete it while no run of the \
            job is active.\n",
            show::paint(BAD, &what),
            show::line(&place(&j.job))
        ))
    };
    s.jobs.iter().filter_map(one).collect()
}

pub(crate) fn render(s: &StatusView) -> String {
    let now = s.now.0;
    let live = s.instances.iter().filter(|i| !i.silent).count();
    let mut text = format!(
        "{} on {}, {}{}\n",
        count(live, "live instance"),
        show::line(&s.store),
        match s.store.starts_with("sqlite:") {
            // A file has none.
            true => String::new(),
            false => format!("namespace {}, ", s.namespace),
        },
        count(s.jobs.len(), "job")
    );
    text.push_str(&show::problems(&s.problems));
    if let Some(ahead) = s.clock_doubt_ms {
        let doubts = |i: &&InstanceView| !i.silent && i.clock_doubt_ms.is_some();
        let (who, what) = match s.instances.iter().filter(doubts).count() {
            n if n < live => (format!("{n} of {live} "), "they start nothing"),
            _ => (String::new(), "nothing is started"),
        };
        let warning = format!(
            "{who}instances do not believe the store's clock, which is {}: {what} until it is corrected",
            show::apart(ahead)
        );
        text.push_str(&format!("{}\n", show::paint(BAD, &warning)));
    }
    let apart = |i: &&InstanceView| !i.silent && i.clock_offset_ms.abs() > NEAR.as_millis() as f64;
    if s.clock_doubt_ms.is_none()
        && let Some(i) = s.instances.iter().find(apart)
    {
        let warning = format!(
            "the store's clock is {}, compared with the host of {}: occurrences follow the store's clock; correct the \
             clock that is wrong",
            show::apart(-i.clock_offset_ms as i64),
            show::line(i.instance.as_str())
        );
        text.push_str(&format!("{}\n", show::paint(BAD, &warning)));
    }
    if s.others_configuration() {
        let file = "the instances run another configuration than the one that this command read: see CONFIG; SIGHUP \
                    makes an instance read its file again";
        text.push_str(&format!("{}\n", show::paint(WARN, file)));
    }
    if !s.epoch.open {
        text.push_str(&format!("{}\n", show::paint(WARN, &s.epoch.words)));
    } else if live == 0 {
        text.push_str(&format!("{}\n", show::paint(BAD, acts::NOBODY)));
    } else if s.instances.iter().all(|i| i.silent || i.draining) {
        text.push_str(&format!("{}\n", show::paint(WARN, view::DRAINED)));
    }
    text.push('\n');
    if !s.instances.is_empty() {
        text.push_str(&instances(s, now));
    }
    if !s.jobs.is_empty() {
        if !s.instances.is_empty() {
            text.push('\n');
        }
        text.push_str(&jobs(s, now));
    }
    text.push_str(&lacks(s));
    let unknown = unknown_runs(s);
    if !unknown.is_empty() {
        let what = format!("this configuration lacks jobs that are running: {unknown}");
        text.push_str(&format!("\n{}\n", show::paint(WARN, &what)));
    }
    text
}

/// The jobs of which the notifier may tell nobody.
fn lacks(s: &StatusView) -> String {
    s.notifier_lacks.as_ref().map_or_else(String::new, |lacks| {
        let what = format!(
            "{} sends the notifications, and its configuration lacks jobs that other instances have: {}",
            show::line(lacks.instance.as_str()),
            lacks.words
        );
        format!("\n{}\n", show::paint(WARN, &what))
    })
}

/// The runs of jobs that this configuration lacks: `draw on web-1, backup on web-2`.
fn unknown_runs(s: &StatusView) -> String {
    let known: HashSet<&JobName> = s.jobs.iter().map(|j| &j.job).collect();
    let live = s.instances.iter().filter(|i| !i.silent);
    let runs = live.flat_map(|i| i.running.iter().map(move |r| (r, i)));
    let unknown = runs.filter(|(r, _)| !known.contains(&r.job));
    let texts: Vec<String> = unknown
        .map(|(r, i)| format!("{} on {}", r.job, show::line(i.instance.as_str())))
        .collect();
    texts.join(", ")
}

fn instances(s: &StatusView, now: i64) -> String {
    let mut t = show::Table::new(&[
        "INSTANCE", "HOST", "SEEN", ">CLOCK", "CONFIG", ">JOBS", ">RUNNING", "NOTE",
    ]);
    for i in &s.instances {
        t.row([
            Cell::new(BOLD, i.instance.as_str()),
            i.host.as_str().into(),
            Cell::new(
                if i.silent { BAD } else { PLAIN },
                relative(i.last_seen.0, now),
            ),
            Cell::new(if i.clock_warning { BAD } else { PLAIN }, offset(i)),
            Cell::new(
                if i.config_differs { WARN } else { DIM },
                format!(
                    "{}{}",
                    i.config.chars().take(8).collect::<String>(),
                    if i.config_differs { " differs" } else { "" }
                ),
            ),
            i.jobs.to_string().into(),
            // The guards of a silent instance may have ended its runs; nobody can tell.
            if i.silent {
                "?".into()
            } else {
                i.running.len().to_string().into()
            },
            Cell::new(WARN, instance_note(i)),
        ]);
    }
    t.render()
}

/// `+0.003 s`, `-1.234 s`: always with milliseconds, so that the column is easy to compare.
fn offset(i: &InstanceView) -> String {
    // Rounded to an integer first, so that it never shows `-0`.
    format!("{:+.3} s", i.clock_offset_ms.round() as i64 as f64 / 1000.0)
}

fn instance_note(i: &InstanceView) -> String {
    let mut notes = vec![];
    if i.silent {
        notes.push("not heard from");
    }
    if i.draining {
        notes.push("draining");
    }
    let by = i.drained_by.iter().filter(|_| i.draining);
    let by = by.map(|by| format!("asked by {}", crate::words::line(by)));
    let by: Vec<String> = by.collect();
    notes.extend(by.iter().map(String::as_str));
    if i.clock_warning {
        notes.push("wrong clock");
    }
    let halted = (i.halted.as_ref()).map(|why| format!("starts nothing: {why}"));
    notes.extend(halted.as_deref());
    notes.join(", ")
}

fn jobs(s: &StatusView, now: i64) -> String {
    let mut t = show::Table::new(&[
        "JOB",
        "SCHEDULE",
        "LAST",
        "ENDED",
        ">TOOK",
        "RUNNING ON",
        "NEXT",
        "NOTE",
    ]);
    for j in &s.jobs {
        let (outcome, ended, lasted) = match &j.last {
            Some(l) => (
                Cell::new(show::style_of(l.outcome), l.outcome.as_str()),
                relative(l.finished_at.0, now),
                l.duration_ms.map(took).unwrap_or_default(),
            ),
            None => (Cell::new(DIM, "-"), String::new(), String::new()),
        };
        t.row([
            Cell::new(BOLD, j.job.as_str()),
            if j.schedule.is_empty() {
                Cell::new(DIM, "manual")
            } else {
                j.schedule.join(" | ").into()
            },
            outcome,
            ended.into(),
            lasted.into(),
            Cell::new(BUSY, running(j, s)),
            next(j, s),
            Cell::new(WARN, job_note(j, s.epoch.open, now)),
        ]);
    }
    t.render()
}

/// `web-1 for 3 s`; nobody knows how the run of a silent instance is.
fn running(j: &JobView, s: &StatusView) -> String {
    let runs: Vec<String> = j
        .running
        .iter()
        .map(|r| {
            let on = r.instance.as_ref().map_or("?", |i| i.as_str());
            let since = r.started_at.map_or(0, |t| s.now.0 - t.0);
            let silent = |i: &InstanceView| i.silent && Some(&i.instance) == r.instance.as_ref();
            let note = match s.instances.iter().any(silent) {
                true => ", which is not heard from",
                false => "",
            };
            format!("{on} for {}{note}", took(since))
        })
        .collect();
    runs.join(", ")
}

fn next(j: &JobView, s: &StatusView) -> Cell {
    match j.next {
        Some(_) if s.nobody_believes => Cell::new(WARN, "when the clock is corrected"),
        Some(_) if s.instances.iter().all(|i| i.silent) => {
            Cell::new(WARN, "when an instance is up")
        }
        Some(_) if s.instances.iter().all(|i| i.silent || i.draining) => {
            Cell::new(WARN, "when one is undrained")
        }
        Some(t) => relative(t.0, s.now.0).into(),
        None if !j.enabled => Cell::new(DIM, "disabled"),
        None if j.schedule.is_empty() => Cell::new(DIM, "when triggered"),
        None if j.paused.as_ref().is_some_and(|p| p.until.is_none()) => {
            Cell::new(DIM, "when resumed")
        }
        None if j.skip > SKIPS_COUNTED => Cell::new(DIM, "after the skips"),
        None => Cell::new(DIM, "never again"),
    }
}

/// `paused until 2026-11-20T17:12:41Z (in 2 h): move`.
pub(super) fn paused(p: &PauseView, now: i64) -> String {
    let until = p.until.map_or("until resumed".to_owned(), |t| {
        format!("until {} ({})", show::instant(t.0), relative(t.0, now))
    });
    let by: String = p.by.iter().map(|by| format!(" by {by}")).collect();
    match &p.reason {
        Some(reason) => format!("paused {until}{by}: {reason}"),
        None => format!("paused {until}{by}"),
    }
}

/// `open`: no job waits because the store may have lost its data.
pub(super) fn job_note(j: &JobView, open: bool, now: i64) -> String {
    if j.unreadable.is_some() {
        return "its state in the store cannot be read: see below".to_owned();
    }
    // Of these two a note below says more.
    let said = j.decided_ahead.is_some() || j.overdue.is_some();
    let mut notes: Vec<String> = j.attention.iter().filter(|_| !said).cloned().collect();
    notes.extend(j.paused.as_ref().map(|p| paused(p, now)));
    if j.skip > 0 {
        notes.push(format!("skips the next {}", j.skip));
    }
    for a in &j.awaited {
        notes.push(format!(
            "attempt {} ({}) {}",
            a.attempt,
            a.trigger.as_str(),
            if a.at.0 <= now {
                "is due".to_owned()
            } else {
                relative(a.at.0, now)
            }
        ));
    }
    let waiting = j.triggers - j.triggers_over;
    if waiting > 0 {
        notes.push(format!("{} waiting", count(waiting, "trigger")));
    }
    if j.triggers_over > 0 {
        notes.push(format!(
            "{} not started within `start_within`: to be recorded as missed, see `{}`",
            count(j.triggers_over, "trigger"),
            command("why", &[j.job.as_str()])
        ));
    }
    if let Some(t) = j.decided_ahead {
        notes.push(format!(
            "counts everything up to {} as decided, because the store's clock was wrong: `{}` corrects that",
            show::instant(t.0),
            command("rewind", &[j.job.as_str()])
        ));
    }
    if j.newest_not_run
        && let Some(t) = j.newest
    {
        notes.push(format!(
            "the occurrence due {} did not run, see `{}`",
            relative(t.0, now),
            command("why", &[j.job.as_str(), &show::instant(t.0)])
        ));
    }
    if let Some(since) = j.overdue {
        notes.push(format!(
            "overdue: without a success for {}, from {} on",
            words::span(now - since.0),
            show::instant(since.0)
        ));
    }
    if j.quarantined || !j.known && j.enabled {
        let waits = match open {
            true if j.quarantined => "no instance has registered it again yet",
            true => "no instance has registered it yet",
            false => "waits, as said above",
        };
        notes.push(waits.to_owned());
    }
    if j.other_definition {
        notes.push("the fleet runs another definition".to_owned());
    }
    notes.join("; ")
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, path::Path, time::Duration};

    use super::*;
    use crate::{
        logic::claim::{Last, NextAttempt, Open, Pause, State},
        model::{InstanceId, Occurrence, Outcome, Run, RunId, Trigger},
        store::{Fleet, Info},
    };

    const NOW: i64 = 1_795_187_561_318; // 2026-11-20T15:12:41.318Z

    fn info(seen: i64, config: &str, offset: f64) -> Info {
        Info {
            seen,
            host: "web".into(),
            process: 1,
            version: "0.1.0".into(),
            config: config.into(),
            clock_offset_ms: offset,
            running: vec![(JobName::new("draw"), Occurrence(NOW))],
            jobs: 4,
            ..Info::default()
        }
    }

    fn open(definition: &str, renewed_at: i64) -> Open {
        Open {
            run: Run {
                instance: InstanceId::new("web-1"),
                definition: definition.into(),
                granted_at: NOW - 3_300,
                ..Run::first(NOW - 3_318)
            },
            renewed_at,
            ..Open::first(NOW - 3_318)
        }
    }

    /// An instance that is gone leaves its definition in the store: nobody has it any more.
    #[test]
    fn another_definition_is_that_of_a_living_instance() {
        let text = "[jobs.draw]\nschedule = '@hourly'\ncommand = 'x'\n";
        let config = crate::config::parse(text, Path::new("jobs.toml"), &|_| None).unwrap();
        let state = State {
            definition: "another".to_owned(),
            ..State::default()
        };
        let states = HashMap::from([(JobName::new("draw"), state)]);
        for (seen, says) in [(NOW, true), (NOW - 60_000, false)] {
            let own = info(NOW, &config.digest, 0.0);
            let instances = [("a", own), ("b", info(seen, "x", 0.0))];
            let fleet = Fleet::of(instances.map(|(id, info)| (InstanceId::new(id), info)));
            let s = view::status(&config, "x", &fleet, &states, NOW, "i");
            assert_eq!(render(&s).contains("another definition"), says);
        }
    }

    /// Somebody has to look for one that is silent, and nobody for one that was replaced long ago.
    #[test]
    fn an_instance_that_was_silent_for_an_hour_is_gone_while_another_one_lives() {
        let config = crate::config::parse("", Path::new("jobs.toml"), &|_| None).unwrap();
        for (minutes, lives, shown) in [(59, true, true), (61, true, false), (61, false, true)] {
            let seen = |live| info(if live { NOW } else { NOW - minutes * 60_000 }, "x", 0.0);
            let instances = [("a", seen(lives)), ("b", seen(false))];
            let fleet = Fleet::of(instances.map(|(id, info)| (InstanceId::new(id), info)));
            let s = view::status(&config, "x", &fleet, &HashMap::new(), NOW, "i");
            assert_eq!(
                s.instances.iter().any(|i| i.instance.as_str() == "b"),
                shown
            );
        }
    }

    #[test]
    fn status_says_that_all_instances_drain() {
        let text = "[jobs.draw]\nschedule = '@hourly'\ncommand = 'x'\n";
        let config = crate::config::parse(text, Path::new("jobs.toml"), &|_| None).unwrap();
        let said = |drains: &[&str]| {
            let instances = ["a", "b"].map(|id| (InstanceId::new(id), info(NOW, "aaaaaaaa", 0.0)));
            let fleet = Fleet {
                drains: drains.iter().map(|id| InstanceId::new(id)).collect(),
                drained_by: Default::default(),
                ..Fleet::of(instances)
            };
            let s = view::status(&config, "x", &fleet, &HashMap::new(), NOW, "i");
            anstream::adapter::strip_str(&render(&s)).to_string()
        };
        let some = said(&["a"]);
        assert!(
            !some.contains("undrain") && some.contains("in 47 min"),
            "{some}"
        );
        let all = said(&["a", "b"]);
        assert!(
            all.contains("all live instances drain or stop, so no job starts"),
            "{all}"
        );
        assert!(all.contains("when one is undrained"), "{all}");
    }

    #[test]
    fn status_shows_instances_and_jobs_and_what_is_odd_about_them() {
        let config = crate::config::parse(
            "[jobs.draw]\nschedule = '0 12 * * *'\ncommand = 'x'\n\
             [jobs.fresh]\nschedule = '@hourly'\ncommand = 'x'\n\
             [jobs.manual]\nschedule = []\ncommand = 'x'\n\
             [jobs.retried]\nschedule = '@hourly'\ncommand = 'x'\nretry = { attempts = 1 }\n",
            Path::new("jobs.toml"),
            &|_| None,
        )
        .unwrap();
        let definition = |name: &str| config.jobs[&JobName::new(name)].digest.clone();
        let draw = State {
            incarnation: "i".into(),
            definition: "other".into(),
            newest: NOW - 3_318,
            open: vec![open(&definition("draw"), NOW - 100)],
            last: Some(Last {
                occurrence: Occurrence(NOW - 86_400_000),
                attempt: 1,
                run: RunId::random(),
                instance: InstanceId::new("web-1"),
                outcome: Outcome::Succeeded,
                from: NOW - 86_400_000,
                started: Some(NOW - 86_400_000),
                to: NOW - 86_399_969,
                ended: None,
            }),
            pause: Some(Pause {
                until: Some(NOW + 7_200_000),
                reason: Some("move".into()),
                at: NOW - 1,
                by: None,
            }),
            skip: 2,
            ..State::default()
        };
        let mut retried = open(&definition("retried"), NOW - 20_000);
        retried.next_attempt = Some(NextAttempt {
            at: NOW + 3_000,
            trigger: Trigger::Retry,
        });
        let retried = State {
            incarnation: "lost".into(),
            definition: definition("retried"),
            open: vec![retried],
            ..State::default()
        };
        let states = HashMap::from([
            (JobName::new("draw"), draw),
            (JobName::new("retried"), retried),
        ]);
        let fleet = Fleet {
            id: "e".into(),
            before: None,
            born: NOW - 5_000,
            quarantine: Duration::from_secs(17),
            open: false,
            instances: BTreeMap::from([
                (
                    InstanceId::new("web-1"),
                    info(NOW - 1_000, "aaaaaaaabbbb", 3.4),
                ),
                (
                    InstanceId::new("web-2"),
                    info(NOW - 200, "aaaaaaaabbbb", -0.2),
                ),
                (
                    InstanceId::new("web-3"),
                    info(NOW - 60_000, "cccccccc", -1234.0),
                ),
            ]),
            drains: vec![InstanceId::new("web-2")],
            drained_by: Default::default(),
        };
        let view = view::status(&config, "redis://host:6379/0", &fleet, &states, NOW, "i");
        let text = anstream::adapter::strip_str(&render(&view)).to_string();
        assert_eq!(
            text,
            "2 live instances on redis://host:6379/0, namespace soloist, 4 jobs\n\
             the instances run another configuration than the one that this command read: see CONFIG; SIGHUP makes an \
             instance read its file again\n\
             jobs wait up to 12 s more, until 2026-11-20T15:12:54Z: the store is new, was restarted or lost its data, \
             and runs from before may still be alive\n\
             \n\
             INSTANCE  HOST  SEEN          CLOCK  CONFIG            JOBS  RUNNING  NOTE\n\
             web-1     web   1 s ago    +0.003 s  aaaaaaaa             4        1\n\
             web-2     web   now        +0.000 s  aaaaaaaa             4        1  draining\n\
             web-3     web   1 min ago  -1.234 s  cccccccc differs     4        ?  not heard from, wrong clock\n\
             \n\
             JOB      SCHEDULE    LAST       ENDED             TOOK  RUNNING ON        NEXT            NOTE\n\
             draw     0 12 * * *  succeeded  23 h 59 min ago  31 ms  web-1 for 3.30 s  in 2 d 20 h     \
             paused until 2026-11-20T17:12:41.318Z (in 2 h): move; skips the next 2; the fleet runs another \
             definition\n\
             fresh    @hourly     -                                                    in 47 min 18 s  \
             waits, as said above\n\
             manual   manual      -                                                    when triggered  \
             waits, as said above\n\
             retried  @hourly     -                                                    in 47 min 18 s  \
             attempt 2 (retry) in 3 s; waits, as said above\n"
        );
    }

    #[test]
    fn runs_of_jobs_that_the_configuration_lacks_are_shown() {
        let config = crate::config::parse("", Path::new("jobs.toml"), &|_| None).unwrap();
        let fleet = Fleet::of([
            (InstanceId::new("web-1"), info(NOW, &config.digest, 0.0)),
            (InstanceId::new("web-2"), info(NOW, "other", 0.0)),
            (InstanceId::new("gone"), info(0, "other", 0.0)),
        ]);
        let view = view::status(&config, "", &fleet, &HashMap::new(), NOW, "i");
        let text = anstream::adapter::strip_str(&render(&view)).to_string();
        let said =
            "\nthis configuration lacks jobs that are running: draw on web-1, draw on web-2\n";
        assert!(text.ends_with(said), "{text}");
        // One live instance has the caller's configuration.
        assert!(!text.contains("another configuration"), "{text}");
    }

    #[test]
    fn it_is_said_how_many_do_not_believe_the_stores_clock() {
        const HOUR: i64 = 3_600_000;
        let config = crate::config::parse("", Path::new("jobs.toml"), &|_| None).unwrap();
        let said = |doubts: [bool; 2]| {
            let one = |name: &str, doubts: bool| {
                let mut i = info(NOW - if doubts { HOUR } else { 0 }, &config.digest, 0.0);
                i.clock_doubt_ms = doubts.then_some(HOUR);
                (InstanceId::new(name), i)
            };
            let fleet = Fleet::of([one("a", doubts[0]), one("b", doubts[1])]);
            let view = view::status(&config, "", &fleet, &HashMap::new(), NOW, "i");
            let text = anstream::adapter::strip_str(&render(&view)).to_string();
            assert!(text.starts_with("2 live instances"), "{text}");
            let line = text.lines().nth(1).unwrap_or_default();
            line.split_once(" until")
                .map_or("", |(line, _)| line)
                .to_owned()
        };
        let what = "instances do not believe the store's clock, which is 1 h ahead";
        assert_eq!(said([false, false]), "");
        assert_eq!(said([true, true]), format!("{what}: nothing is started"));
        assert_eq!(
            said([true, false]),
            format!("1 of 2 {what}: they start nothing")
        );
    }

    #[test]
    fn the_configuration_that_most_live_instances_have_is_the_common_one() {
        let config = crate::config::parse("", Path::new("jobs.toml"), &|_| None).unwrap();
        let odd = |instances: &[(&str, i64, &str)]| -> Vec<String> {
            let instances = instances.iter();
            let fleet = Fleet::of(
                instances.map(|(id, seen, digest)| (InstanceId::new(id), info(*seen, digest, 0.0))),
            );
            view::status(&config, "", &fleet, &HashMap::new(), NOW, "i")
                .instances
                .iter()
                .filter(|i| i.config_differs)
                .map(|i| i.instance.to_string())
                .collect()
        };
        let ours = config.digest.clone();
        assert_eq!(
            odd(&[("a", NOW, "x"), ("b", NOW, "y"), ("c", NOW, "y")]),
            ["a"]
        );
        assert_eq!(
            odd(&[
                ("a", NOW, "x"),
                ("b", NOW - 60_000, "y"),
                ("c", NOW - 60_000, "y")
            ]),
            ["b", "c"]
        );
        assert_eq!(odd(&[("a", NOW, "x"), ("b", NOW, &ours)]), ["a"]);
    }
}
