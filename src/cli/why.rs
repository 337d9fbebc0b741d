//! `why`: what happened to one occurrence, and what each instance decided about it.

use std::collections::BTreeMap;

use super::{
    Context, Exit, Failure, history, logs,
    show::{self, BOLD, Cell, DIM, PLAIN, WARN, count, relative, took},
};
pub(crate) use crate::why::{Facts, WhyView};
use crate::{
    config::Config,
    model::{InstanceId, JobName, Occurrence},
    store::HISTORY_KEPT,
    text::{instant_or_local, line},
    view::RunView,
    why::unplanned_words,
    words::command,
};
use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "\
Decisions are kept for 3 days, records of runs for 30.

Examples:
  soloist why backup                          the latest occurrence, or trigger
  soloist why backup 2026-11-20T03:00:00Z     this one; Unix milliseconds do as well
  soloist why backup 2026-11-20 11:00         the same as local time in the job's zone
  soloist why backup 'Fri 2026-11-20 11:00:00 +08:00'     the same as `next` prints it")]
pub(crate) struct Why {
    /// Name of the job
    job: String,
    /// RFC 3339, Unix milliseconds, or local time in the job's zone, as `next` prints it [default: the latest, or the
    /// latest trigger]
    occurrence: Vec<String>,
    /// What `occurrence` says.
    #[arg(skip)]
    at: Option<i64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Why {
    /// # Errors
    /// The occurrence cannot be read.
    pub(super) fn read(&mut self, config: &Config) -> Result<(), Failure> {
        if self.occurrence.is_empty() {
            return Ok(());
        }
        let text = self.occurrence.join(" ");
        let job = config.jobs.get(&JobName::new(&self.job));
        let zone = job.map_or("UTC", |job| &*job.timezone);
        let at = instant_or_local(&text, zone).map_err(|hint| {
            Failure::usage(
                format!("`{}` is not understood as an instant", line(&text)),
                hint,
            )
        })?;
        self.at = Some(at);
        Ok(())
    }

    /// The answer that needs the configuration alone: nothing was planned for that time. None: the store must answer.
    pub(super) fn unplanned(&self, config: &Config, now: i64) -> Option<String> {
        let at = Occurrence(self.at?);
        let job = config.jobs.get(&JobName::new(&self.job))?;
        let why = unplanned_words(job, at, now).filter(|_| !job.schedules.is_empty())?;
        Some(format!("{} {}\n{why}\n", job.name, show::instant(at.0)))
    }
}

pub(super) async fn why(ctx: &Context, args: &Why) -> Result<Exit, Failure> {
    let (mut view, now) = explain(ctx, &args.job, args.at).await?;
    view.problems = ctx.problems().await;
    if ctx.out.json {
        logs::fill(ctx, &mut view.runs).await?;
    }
    ctx.out.say(&view, || render(&view, now))?;
    Ok(Exit::Ok)
}

/// The second value is the time of the fleet.
pub(super) async fn explain(
    ctx: &Context,
    job: &str,
    at: Option<i64>,
) -> Result<(WhyView, i64), Failure> {
    let (name, job) = ctx.known_job(job).await?;
    let (fleet, clock) = ctx.fleet().await?;
    let decisions = ctx.ask(async || ctx.store.decisions(&name).await).await?;
    let state = ctx.state(&name).await?;
    let history = ctx
        .ask(async || ctx.store.records(&name, HISTORY_KEPT).await)
        .await?;
    let facts = Facts {
        name: &name,
        job,
        clock,
        now: clock.right(state.now_us / 1000),
        incarnation: &state.incarnation,
        state: state.value,
        fleet,
        history: history.into_iter().map(RunView::from).collect(),
        decisions,
    };
    let at = match at {
        Some(ms) => Occurrence(ms),
        None => facts.latest().ok_or_else(|| {
            let trigger = command("trigger", &[name.as_str()]);
            if job.is_some_and(|job| job.schedules.is_empty()) {
                // The store was new then, or lost its data, and with it what ran before.
                let since = match facts.fleet.born {
                    0 => String::new(),
                    born => format!(
                        " since {}, when the store was new, or lost its data and with it what ran before",
                        show::instant(born)
                    ),
                };
                return Failure::usage(
                    format!(
                        "`{name}` is not known to have run: it has no schedule, and nobody has triggered it{since}"
                    ),
                    format!("`{trigger}` starts it now"),
                );
            }
            Failure::usage(
                format!("`{name}` has had no occurrence yet"),
                format!(
                    "`{}` shows what comes; `{trigger}` starts it now",
                    command("next", &[name.as_str()])
                ),
            )
        })?,
    };
    Ok((facts.explain(at), facts.now))
}

/// A decision in words; an unknown one is shown as it is.
fn told(decision: &str, detail: &str) -> String {
    let words = match decision {
        "won" => "won it",
        "lost" if detail.starts_with("to ") => return format!("lost {detail}"),
        "lost" => "lost: another instance won it",
        "settled" => "asked after it had been decided",
        "skipped" => "recorded it as skipped",
        "missed" => "recorded it as missed",
        "unknown" => "recorded it as unknown",
        "store_error" => "could not reach the store",
        "no_start" => "could not start any command",
        "clock" => "does not believe the store's clock",
        "draining" => "did not claim it: draining",
        "quarantined" => "had to wait",
        other => other,
    };
    match detail.trim() {
        "" => words.to_owned(),
        detail => format!("{words} ({detail})"),
    }
}

pub(crate) fn render(v: &WhyView, now: i64) -> String {
    let mut text = format!(
        "{} {}, {}",
        show::paint(BOLD, v.job.as_str()),
        show::instant(v.occurrence.0),
        relative(v.occurrence.0, now)
    );
    if let Some(local) = &v.local {
        text.push_str(&format!(" ({})", show::local(local)));
    }
    text.push_str(&format!(
        "\n{}\n",
        show::paint(BOLD, &crate::text::line(&v.verdict))
    ));
    text.push_str(&show::problems(&v.problems));
    for (what, t) in [("before", v.before), ("after", v.after)] {
        if let Some(t) = t {
            text.push_str(&format!(
                "the one {what}: {}, {}\n",
                show::instant(t.0),
                relative(t.0, now)
            ));
        }
    }
    let attempts: Vec<RunView> = v.runs.iter().filter(|r| r.attempt > 0).cloned().collect();
    if !attempts.is_empty() {
        text.push('\n');
        text.push_str(&history::render(&attempts, now, false));
    }
    if !v.decisions.is_empty() || !v.silent.is_empty() || !v.unanswered.is_empty() {
        let mut t = show::Table::new(&["INSTANCE", ">AT", "DECISION"]);
        let mut seen: BTreeMap<&InstanceId, ()> = BTreeMap::new();
        for d in &v.decisions {
            let style = match d.decision.as_str() {
                "won" => show::GOOD,
                "lost" => PLAIN,
                _ => WARN,
            };
            let again = seen.insert(&d.instance, ()).is_some();
            t.row([
                Cell::new(if again { DIM } else { BOLD }, d.instance.as_str()),
                since(d.at.0 - v.occurrence.0).into(),
                Cell::new(style, told(&d.decision, &d.detail)),
            ]);
        }
        for u in &v.unanswered {
            t.row([
                Cell::new(BOLD, u.instance.as_str()),
                since(u.from.0 - v.occurrence.0).into(),
                Cell::new(
                    WARN,
                    format!(
                        "the store did not answer for {}",
                        took(u.until.0 - u.from.0)
                    ),
                ),
            ]);
        }
        for s in &v.silent {
            t.row([
                Cell::new(BOLD, s.instance.as_str()),
                "".into(),
                Cell::new(DIM, s.reason.as_str()),
            ]);
        }
        text.push('\n');
        text.push_str(&t.render());
    }
    if v.runs.is_empty() && v.decisions.is_empty() && v.silent.is_empty() && v.before.is_none() {
        text.push_str(&format!(
            "{} of any instance about it\n",
            count(0, "decision")
        ));
    }
    text
}

/// The time of a decision relative to its occurrence: `+4 ms`.
fn since(ms: i64) -> String {
    if ms < 0 {
        format!("-{}", took(-ms))
    } else {
        format!("+{}", took(ms))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{super::history::tests::run, *};
    use crate::{
        logic::claim::{Pause, State},
        logic::schedule::Schedule,
        model::Outcome,
        store::{Decision, Fleet, Info, Outage},
        view::{self, Time},
        why::previous,
    };

    const NOW: i64 = 1_795_187_561_318; // 2026-11-20T15:12:41.318Z
    const AT: i64 = 1_795_186_800_000; // 15:00:00
    const HOUR: i64 = 3_600_000;

    fn config() -> Config {
        let text = "[jobs.draw]\nschedule = '@hourly'\ncommand = 'x'\n";
        crate::config::parse(text, Path::new("jobs.toml"), &|_| None).unwrap()
    }

    fn info(started_at: i64, seen: i64) -> Info {
        Info {
            seen,
            host: "h".into(),
            process: 1,
            started_at,
            jobs: 1,
            ..Info::default()
        }
    }

    fn facts<'a>(name: &'a JobName, config: &'a Config) -> Facts<'a> {
        Facts {
            name,
            job: Some(&config.jobs[name]),
            state: Some(State {
                incarnation: "i".into(),
                since: AT - 10 * HOUR,
                newest: AT,
                ..State::default()
            }),
            incarnation: "i",
            clock: view::Clock {
                now: NOW,
                doubt_ms: None,
                nobody_believes: false,
            },
            now: NOW,
            fleet: Fleet::of([
                (InstanceId::new("web-1"), info(0, NOW)),
                (InstanceId::new("web-2"), info(AT + 1, NOW)),
                (InstanceId::new("web-3"), info(0, AT - 1)),
                (InstanceId::new("web-4"), info(0, NOW)),
            ]),
            history: vec![],
            decisions: vec![],
        }
    }

    fn decision(instance: &str, at: i64, decision: &str, detail: &str) -> Decision {
        Decision {
            job: JobName::new("draw"),
            occurrence: Occurrence(AT),
            instance: InstanceId::new(instance),
            at,
            decision: decision.into(),
            detail: detail.into(),
        }
    }

    #[test]
    fn a_run_is_explained_with_each_instances_decision() {
        let (name, config) = (JobName::new("draw"), config());
        let mut f = facts(&name, &config);
        f.history = vec![
            run(AT, 1, Outcome::Succeeded),
            run(AT - HOUR, 1, Outcome::Failed),
        ];
        f.decisions = vec![
            decision("web-4", AT + 6, "lost", "to web-1"),
            decision("web-1", AT + 2, "won", "attempt 1"),
            decision("web-2", AT + 60_000, "settled", ""),
        ];
        let v = f.explain(f.latest().unwrap());
        let text = anstream::adapter::strip_str(&render(&v, NOW)).to_string();
        assert_eq!(
            text,
            "draw 2026-11-20T15:00:00Z, 12 min 41 s ago (Fri 2026-11-20 15:00:00 +00:00)\n\
             It ran once on web-1, 4 ms after its instant, succeeded after 31 ms.\n\
             \n\
             OCCURRENCE            WHEN             OUTCOME    EXIT  TRY  TRIGGER   INSTANCE  LATE   TOOK\n\
             2026-11-20T15:00:00Z  12 min 41 s ago  succeeded  0       1  schedule  web-1     4 ms  31 ms\n\
             \n\
             INSTANCE      AT  DECISION\n\
             web-1      +2 ms  won it (attempt 1)\n\
             web-4      +6 ms  lost to web-1\n\
             web-2     +1 min  asked after it had been decided\n\
             web-3             had stopped reporting to the store\n"
        );
    }

    /// Nobody has recorded a decision, and the run ends while the store is asked.
    #[test]
    fn a_run_right_after_its_trigger_is_told_once_and_of_the_instance_that_ran_it() {
        let (name, config) = (JobName::new("draw"), config());
        let mut f = facts(&name, &config);
        let mut record = run(NOW - 900, 1, Outcome::Succeeded);
        record.trigger = crate::model::Trigger::Manual;
        let st = f.state.as_mut().unwrap();
        st.newest = NOW - 900;
        st.open = vec![crate::logic::claim::Open {
            run: crate::model::Run {
                trigger: record.trigger,
                key: Some("~k".into()),
                id: record.run_id.unwrap(),
                instance: InstanceId::new("web-1"),
                ..crate::model::Run::first(NOW - 900)
            },
            ..crate::logic::claim::Open::first(NOW - 900)
        }];
        f.history = vec![record];
        let v = f.explain(f.latest().unwrap());
        assert_eq!(v.runs.len(), 1);
        assert!(
            v.verdict.starts_with("It ran once on web-1"),
            "{}",
            v.verdict
        );
        let said = |id: &str| {
            v.silent
                .iter()
                .find(|s| s.instance.as_str() == id)
                .unwrap()
                .reason
                .as_str()
        };
        assert_eq!(
            said("web-1"),
            "ran it, and has not recorded its decision yet"
        );
        assert_eq!(said("web-4"), "has recorded no decision yet");
    }

    /// The reports of an instance begin with its process: the process before it may have been up.
    #[test]
    fn a_restarted_instance_is_not_taken_for_a_new_one() {
        let (name, config) = (JobName::new("draw"), config());
        let mut f = facts(&name, &config);
        let silent = |f: &Facts<'_>| {
            let v = f.explain(Occurrence(AT));
            let of = v.silent.iter().find(|s| s.instance.as_str() == "web-2");
            of.expect("an instance").reason.clone()
        };
        let since = "is up only since 2026-11-20T15:00:00.001Z, as far as is known";
        assert_eq!(silent(&f), since);
        let before = decision("web-2", AT - HOUR, "won", "attempt 1");
        f.decisions = vec![Decision {
            occurrence: Occurrence(AT - HOUR),
            ..before
        }];
        let restarted = "was restarted since: its earlier decisions are not recorded";
        assert_eq!(silent(&f), restarted);
        f.decisions.clear();
        let mut earlier = run(AT - HOUR, 1, Outcome::Succeeded);
        earlier.instance = Some(InstanceId::new("web-2"));
        f.history = vec![earlier];
        assert_eq!(silent(&f), restarted);
    }

    #[test]
    fn a_job_without_a_schedule_is_explained_as_such() {
        let text = "[jobs.draw]\ncommand = 'x'\n";
        let config = crate::config::parse(text, Path::new("jobs.toml"), &|_| None).unwrap();
        let name = JobName::new("draw");
        let v = facts(&name, &config).explain(Occurrence(AT));
        assert_eq!(
            v.verdict,
            "Nothing happened at that time: the job has no schedule, so it runs only when somebody triggers it."
        );
    }

    #[test]
    fn an_outage_of_the_store_is_named() {
        let (name, config) = (JobName::new("draw"), config());
        let mut f = facts(&name, &config);
        f.history = vec![run(AT, 1, Outcome::Succeeded)];
        let instance = f
            .fleet
            .instances
            .get_mut(&InstanceId::new("web-1"))
            .unwrap();
        let outage = |from: i64, until: i64| Outage { from, until };
        instance.outages = vec![
            outage(AT - HOUR, AT - HOUR + 1_000),
            outage(AT - 400, AT + 11_600),
            outage(AT + 20_000, AT + 30_000),
        ];
        let text =
            anstream::adapter::strip_str(&render(&f.explain(Occurrence(AT)), NOW)).to_string();
        let row = "web-1     -400 ms  the store did not answer for 12.0 s\n";
        assert!(text.contains(row), "{text}");
        assert_eq!(text.matches("did not answer").count(), 1, "{text}");
        // That says why it has no decision.
        assert_eq!(text.matches("\nweb-1 ").count(), 1, "{text}");
        for at in [AT - 401, AT + 11_600] {
            assert_eq!(f.explain(Occurrence(at)).unanswered, []);
        }
    }

    #[test]
    fn what_did_not_run_says_why() {
        let (name, config) = (JobName::new("draw"), config());
        let told = |f: &Facts, at: i64| f.explain(Occurrence(at)).verdict;

        let mut f = facts(&name, &config);
        let mut skipped = run(AT, 0, Outcome::Skipped);
        skipped.error = Some("paused: disks".into());
        f.history = vec![skipped];
        assert_eq!(
            told(&f, AT),
            "It did not run, it was skipped: paused: disks."
        );

        let mut missed = run(AT, 0, Outcome::Missed);
        missed.count = 3;
        missed.error = Some("overdue".into());
        f.history = vec![missed];
        assert_eq!(
            told(&f, AT - 2 * HOUR),
            "It is one of 3 occurrences up to 2026-11-20T15:00:00Z that were missed: overdue."
        );
        assert_eq!(
            told(&f, AT - 3 * HOUR),
            "It was decided, but its record has been deleted since."
        );

        // Only the next range is counted through, whatever others say.
        let mut odd = f.history[0].clone();
        (odd.occurrence, odd.count) = (Time(AT + 90_000 * HOUR), u64::MAX);
        f.history.extend(std::iter::repeat_n(odd, 199));
        assert_eq!(
            told(&f, AT - 3 * HOUR),
            "It was decided, but its record has been deleted since."
        );

        f.history.clear();
        assert_eq!(
            told(&f, AT - 10 * HOUR),
            "Not run: this schedule took effect at 2026-11-20T05:00:00Z: the schedule was new, or the job came back or \
             was enabled again."
        );
        assert!(told(&f, AT + HOUR + 1).starts_with("Nothing is planned for that time: "));
        let stranger = f.explain(Occurrence(AT + 1));
        assert_eq!(
            stranger.verdict,
            "Nothing was planned for that time: occurrences are at whole seconds, and this is 1 ms after one."
        );
        assert_eq!(
            (stranger.before, stranger.after),
            (Some(Time(AT)), Some(Time(AT + HOUR)))
        );
        assert_eq!(
            told(&f, AT + HOUR),
            "It is not due yet: it is due in 47 min 18 s."
        );
        let st = f.state.as_mut().unwrap();
        st.pause = Some(Pause {
            until: None,
            reason: None,
            at: 0,
            by: None,
        });
        assert_eq!(
            told(&f, AT + HOUR),
            "It is not due yet: it is due in 47 min 18 s, but the job is paused until somebody resumes it."
        );
        // It is over by then.
        f.state.as_mut().unwrap().pause.as_mut().unwrap().until = Some(NOW + 1000);
        let due = "It is not due yet: it is due in 47 min 18 s.";
        assert_eq!(told(&f, AT + HOUR), due);
        f.state.as_mut().unwrap().newest = AT - HOUR;
        assert_eq!(
            told(&f, AT),
            "It is undecided, although instances are up: see their logs, and `soloist status`."
        );
        let drained = "all live instances drain or stop, so no job starts until one is undrained (`soloist undrain \
                       INSTANCE`) or another one starts.";
        let all: Vec<InstanceId> = f.fleet.instances.keys().cloned().collect();
        f.fleet.drains = all[1..].to_vec();
        assert!(told(&f, AT).contains("although instances are up"));
        f.fleet.drains = all;
        assert_eq!(told(&f, AT), format!("It is undecided: {drained}"));
        assert_eq!(
            told(&f, AT + HOUR),
            format!("It is not due yet: it is due in 47 min 18 s, but {drained}")
        );
        f.fleet.drains.clear();
        f.fleet.instances.clear();
        assert_eq!(
            told(&f, AT),
            "It is undecided: no instance is up. The next instance that starts will run it or record it."
        );
        f.incarnation = "another";
        assert!(told(&f, AT).starts_with("It waits: the store was restarted or lost its data"));
        f.state = None;
        assert!(told(&f, AT).starts_with("Nothing is known: no instance has registered the job"));
    }

    /// A trigger is no occurrence of the schedule, and none that is decided if nobody started it in time.
    #[test]
    fn a_trigger_that_waits_or_was_missed_is_found_at_its_time() {
        use crate::model::Trigger;
        let (name, config) = (JobName::new("draw"), config());
        let mut f = facts(&name, &config);
        let at = NOW - 60_000;
        f.state.as_mut().unwrap().triggers = vec![crate::logic::claim::Pending {
            key: "~k".into(),
            at,
            by: None,
        }];
        assert_eq!(f.latest(), Some(Occurrence(at)));
        let waits = "It is a trigger that no instance has started yet";
        assert_eq!(f.explain(Occurrence(at)).verdict, format!("{waits}."));
        f.fleet.drains = f.fleet.instances.keys().cloned().collect();
        let verdict = f.explain(Occurrence(at)).verdict;
        assert!(
            verdict.starts_with(&format!("{waits}: all live instances drain")),
            "{verdict}"
        );
        f.fleet.instances.clear();
        let verdict = f.explain(Occurrence(at)).verdict;
        assert_eq!(
            verdict,
            format!("{waits}: no instance is up, so no job starts: `soloist run` starts one.")
        );
        // Nobody was there until its time was over.
        let old = NOW - 10 * 86_400_000 + 1;
        f.state.as_mut().unwrap().triggers[0].at = old;
        let verdict = f.explain(Occurrence(old)).verdict;
        assert!(
            verdict
                .starts_with("It is a trigger, and no instance started it within `start_within` (")
                && verdict.contains("records it as missed: no instance is up"),
            "{verdict}"
        );
        f.state.as_mut().unwrap().triggers.clear();
        let mut record = run(at, 0, Outcome::Missed);
        (record.trigger, record.error) = (Trigger::Manual, Some("nobody".into()));
        f.history = vec![record];
        assert_eq!(f.latest(), Some(Occurrence(at)));
        let verdict = f.explain(Occurrence(at)).verdict;
        assert_eq!(verdict, "It did not run, it was missed: nobody.");
    }

    /// The configuration says so, whatever the store knows.
    #[test]
    fn the_field_that_does_not_match_is_named_without_the_store() {
        let (name, config) = (JobName::new("draw"), config());
        let mut f = facts(&name, &config);
        f.state = None;
        let odd = Occurrence(AT + 60_000);
        let said = f.explain(odd).verdict;
        let why = "Nothing was planned for that time: the schedule wants the minute to be 0, and this is 15:01 in UTC.";
        assert_eq!(said, why);
        let asks = |at| Why {
            job: "draw".into(),
            occurrence: vec![],
            at,
            json: false,
        };
        assert_eq!(
            asks(Some(odd.0)).unplanned(&config, NOW),
            Some(format!("draw 2026-11-20T15:01:00Z\n{why}\n"))
        );
        assert_eq!(asks(Some(AT)).unplanned(&config, NOW), None);
        assert_eq!(asks(None).unplanned(&config, NOW), None);
    }

    #[test]
    fn a_job_that_is_disabled_is_told_as_such() {
        let text = "[jobs.draw]\nschedule = '@hourly'\ncommand = 'x'\nenabled = false\n";
        let config = crate::config::parse(text, Path::new("jobs.toml"), &|_| None).unwrap();
        let name = JobName::new("draw");
        let mut f = facts(&name, &config);
        f.state.as_mut().unwrap().newest = AT - HOUR;
        let told = |f: &Facts, at: i64| f.explain(Occurrence(at)).verdict;
        for (at, words) in [
            (AT + HOUR, "It will not run: the job is disabled"),
            (AT, "It was not run: the job is disabled"),
            (AT + 60_000, "Besides, the job is disabled"),
        ] {
            assert!(told(&f, at).contains(words), "{}", told(&f, at));
        }
        f.state = None;
        assert!(told(&f, AT).starts_with("It does not run: the job is disabled"));
    }

    #[test]
    fn a_loss_of_data_is_named() {
        let (name, config) = (JobName::new("draw"), config());
        let told = |f: &Facts, at: i64| f.explain(Occurrence(at)).verdict;
        let mut f = facts(&name, &config);
        f.fleet.born = AT - 2 * HOUR;
        let gone = "It was decided, but its record is gone: it was deleted, or the store lost data when it started anew \
                    at 2026-11-20T13:00:00Z.";
        assert_eq!(told(&f, AT - 3 * HOUR), gone);
        let deleted = "It was decided, but its record has been deleted since.";
        assert_eq!(told(&f, AT - HOUR), deleted);
        let nobody = "Nobody knows whether it ran: later, at 2026-11-20T13:00:00Z, the store lost its data, or was new, \
                      and it has no record from before.";
        f.state.as_mut().unwrap().lost_before = AT - 3 * HOUR;
        assert_eq!(told(&f, AT - 3 * HOUR), nobody);
        // An instance noted that it ran it.
        f.decisions = vec![decision("web-1", AT - 3 * HOUR + 2, "won", "attempt 1")];
        f.decisions[0].occurrence = Occurrence(AT - 3 * HOUR);
        let ran = "It ran on web-1, and nobody knows how it ended: later, at 2026-11-20T13:00:00Z, the store lost its \
                   data.";
        assert_eq!(told(&f, AT - 3 * HOUR), ran);
        f.decisions.clear();
        let st = f.state.as_mut().unwrap();
        (st.lost_before, st.lost_until, st.newest) = (0, AT, AT - 2 * HOUR);
        // As the record says, which is not there yet, or no more.
        st.lost_why = "the store was new, and granted nothing until 15:00".to_owned();
        let said = "It was not run: the store was new, and granted nothing until 15:00.";
        assert_eq!(told(&f, AT), said);
        // The job is known only since the store was new.
        let st = f.state.as_mut().unwrap();
        (st.lost_until, st.since) = (0, AT - HOUR);
        assert_eq!(told(&f, AT - 3 * HOUR), nobody);
        assert!(told(&f, AT - HOUR).starts_with("Not run: this schedule took effect"));
        // An instance that went on told the store the newest occurrence that it knew: the job's state begins with it.
        f.state.as_mut().unwrap().since = AT - 3 * HOUR;
        assert_eq!(told(&f, AT - 4 * HOUR), nobody);
        assert_eq!(told(&f, AT - 3 * HOUR), nobody);
        // What ended before the store started shows that it lost nothing then.
        let mut before = run(AT - 2 * HOUR - 60_000, 1, Outcome::Succeeded);
        before.finished_at = Some(Time(AT - 2 * HOUR - 50_000));
        f.history = vec![before];
        assert!(told(&f, AT - 4 * HOUR).starts_with("Not run: this schedule took effect"));
    }

    #[test]
    fn what_a_wrong_clock_gave_up_is_told_with_its_remedy_and_not_of_the_future() {
        let (name, config) = (JobName::new("draw"), config());
        let told = |f: &Facts, at: i64| f.explain(Occurrence(at)).verdict;
        let mut f = facts(&name, &config);
        let mut missed = run(AT + 5 * HOUR, 0, Outcome::Missed);
        (missed.count, missed.error) = (6, Some("overdue".into()));
        f.history = vec![missed];
        // While the watermark stands in the future.
        f.state.as_mut().unwrap().newest = AT + 5 * HOUR;
        let remedy = "The store's clock was wrong, so everything up to 2026-11-20T20:00:00Z counts as decided; \
        `soloist rewind draw` corrects that.";
        let past =
            "It is one of 6 occurrences up to 2026-11-20T20:00:00Z that were missed: overdue.";
        assert_eq!(told(&f, AT), format!("{past} {remedy}"));
        assert_eq!(told(&f, AT + HOUR), format!("It will not run. {remedy}"));
        // And when it was put right.
        f.state.as_mut().unwrap().newest = AT;
        assert_eq!(told(&f, AT), past);
        assert!(told(&f, AT + HOUR).starts_with("It is not due yet"));
    }

    #[test]
    fn several_attempts_and_a_running_one_are_told_by_the_last() {
        let (name, config) = (JobName::new("draw"), config());
        let mut f = facts(&name, &config);
        let mut failed = run(AT, 2, Outcome::Failed);
        failed.exit_code = Some(3);
        f.history = vec![failed, run(AT, 1, Outcome::Unknown)];
        assert_eq!(
            f.explain(Occurrence(AT)).verdict,
            "It ran 2 times; the last attempt on web-1 failed (exit 3) after 31 ms."
        );
        // One that could not be started, or whose daemon was killed before it was.
        let mut crashed = run(AT, 1, Outcome::Crashed);
        (crashed.started_at, crashed.lateness_ms) = (None, None);
        (crashed.duration_ms, crashed.error) = (None, Some("its daemon was killed".into()));
        f.history = vec![crashed.clone()];
        assert_eq!(
            f.explain(Occurrence(AT)).verdict,
            "It was not executed on web-1: crashed: its daemon was killed."
        );
        f.history = vec![run(AT, 2, Outcome::Succeeded), crashed.clone()];
        assert_eq!(
            f.explain(Occurrence(AT)).verdict,
            "It ran once in 2 attempts; the last one on web-1 succeeded after 31 ms."
        );
        crashed.attempt = 3;
        let before = [run(AT, 2, Outcome::Failed), run(AT, 1, Outcome::Failed)];
        f.history = [vec![crashed.clone()], before.to_vec()].concat();
        assert_eq!(
            f.explain(Occurrence(AT)).verdict,
            "It ran 2 times in 3 attempts; the last one on web-1 crashed: its daemon was killed."
        );
        let mut first = crashed.clone();
        first.attempt = 1;
        crashed.attempt = 2;
        f.history = vec![crashed, first];
        assert_eq!(
            f.explain(Occurrence(AT)).verdict,
            "None of its 2 attempts was executed; the last one on web-1 crashed: its daemon was killed."
        );
        let mut running = run(AT, 1, Outcome::Running);
        running.started_at = Some(Time(NOW - 3_000));
        f.history = vec![running];
        assert_eq!(
            f.explain(Occurrence(AT)).verdict,
            "It is running on web-1 for 3.00 s, attempt 1, 4 ms after its instant."
        );
    }

    #[test]
    fn no_name_makes_a_line_of_its_own() {
        let (name, config) = (JobName::new("draw"), config());
        let mut f = facts(&name, &config);
        let mut odd = run(AT, 1, Outcome::Succeeded);
        odd.instance = Some(InstanceId::new("a\r\nforged\x1b[30m"));
        f.history = vec![odd];
        let shown = crate::text::coloured(&render(&f.explain(Occurrence(AT)), NOW));
        assert!(
            shown.contains("It ran once on a\\r\\nforged\\x1b[30m, 4 ms"),
            "{shown}"
        );
        assert!(!shown.contains("\nforged") && !shown.contains("\x1b[30m"));
    }

    #[test]
    fn the_occurrence_before_is_the_last_one_before() {
        use crate::logic::schedule::Dst;
        let tz = jiff::tz::TimeZone::get("Europe/Berlin").unwrap();
        for (text, t, want) in [
            ("@hourly", AT, Some(AT - HOUR)),
            ("@hourly", AT + 1, Some(AT)),
            ("@every 7s", 7_001, Some(7_000)),
            ("@every 7s", 7_000, Some(0)),
            ("@every 7s", 0, None),
            ("@at 2026-11-20T15:00:00Z", NOW, Some(AT)),
            ("@at 2026-11-20T15:00:00Z", AT, None),
            // The last leap day before.
            ("0 0 29 2 *", NOW, Some(1_709_161_200_000)),
        ] {
            let s = std::sync::Arc::new(Schedule::parse(text, &tz, Dst::default(), "j").unwrap());
            assert_eq!(
                previous(&[s], Occurrence(t)),
                want.map(Occurrence),
                "{text} before {t}"
            );
        }
        assert_eq!(previous(&[], Occurrence(NOW)), None);
    }
}
