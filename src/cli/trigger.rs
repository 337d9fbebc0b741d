//! `trigger`: starts one extra run now, and waits for it if asked.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{
    Context, Exit, Failure,
    history::exit,
    logs::{self, POLL, Printer, Reader},
    millis, remark, show,
};
use crate::{
    acts::{self, doubt, key, who},
    clock::Boottime,
    config::Job,
    logic::{
        claim::{Open, State, trigger_is_over},
        observe,
    },
    model::{JobName, Occurrence, Outcome, RunId, RunRecord},
    store::{Fleet, Output},
    text,
    view::{self, RunView, Time},
};

/// The hint for a key whose trigger was not run.
const ANOTHER_KEY: &str = "use another --key to run it";
/// Exit code for a run whose command could not be started, as in the shell.
const NOT_STARTED: u8 = 126;
/// `trigger --wait` gives up this long after `start_within` if no instance is up to claim the trigger, and this long
/// after the lease of a run that is no longer renewed; three times as long while instances are up that could act.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long an attempt may wait for its turn while instances are up.
const TURN: Duration = Duration::from_secs(3600);

#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes with --wait:
  the command's own; 128+N when signal N ended it
  126 when the command could not be executed
  79  when the run lost its lease, or the instance that ran it died
  75  when no instance started the run, or its next attempt, within start_within: no instance is up,
      all are draining, none has the job, none believes the store's clock, or the job is paused
  69  when the store does not answer
Ctrl-C ends the waiting, not the run.

The store keeps a key for 7 days, by its own clock, after the run was started or given up. It keeps
up to 10000 keys of a job; then it refuses a new key, with exit code 75, until it deletes an old
one. Triggers without --key do not count.

Examples:
  soloist trigger backup
  soloist trigger backup --wait              prints its output, exits with its code
  soloist trigger report --key 2026-11-22    once, however often this is called")]
pub(super) struct Trigger {
    /// Name of the job
    job: String,
    /// A key runs the job only once within 7 days, however often it is used [default: a new key]
    #[arg(long, value_name = "K", value_parser = key)]
    key: Option<String>,
    /// Follow the run and exit with its command's exit code
    #[arg(long)]
    wait: bool,
    /// Print JSON; with --wait, the run's record when it has ended
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    job: &'a JobName,
    key: &'a str,
    /// False: this key was used before this command.
    new: bool,
    /// Null until an instance has claimed it.
    occurrence: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    run: Option<RunView>,
}

// Long: one arm for each answer to a trigger.
pub(super) async fn trigger(ctx: &Context, args: &Trigger) -> Result<Exit, Failure> {
    let job = ctx.job(&args.job)?;
    let key = args.key.clone().unwrap_or_else(acts::own_key);
    // Subscribe before the request, so that no hint about its end is missed.
    let mut events = ctx.store.events();
    let (fleet, clock) = ctx.fleet().await?;
    for problem in ctx.problems().await {
        remark(&format!("the store: {problem}"));
    }
    let own = args.key.is_none();
    let (asker, me) = (ctx.asker(), acts::me());
    let triggered = asker.trigger(&job.name, &key, own, &me).await;
    let triggered = triggered.map_err(|r| ctx.refused(r))?;
    let mut answer = Answer {
        job: &job.name,
        key: &key,
        new: triggered.new,
        occurrence: triggered.occurrence.map(Time::from),
        run: None,
    };
    if !args.wait {
        if let Some(at) = answer.occurrence {
            let history = records(ctx, &job.name).await?;
            let of_it = history.into_iter().filter(|r| r.occurrence.0 == at.0);
            answer.run = of_it.max_by_key(|r| r.attempt).map(RunView::from);
        }
        let is_over = |since: &i64| trigger_is_over(*since, job.start_within, clock.now);
        let over = triggered.waits_since.filter(is_over);
        let over = over.map(|_| acts::over(job.start_within, &fleet, clock));
        let who = || who(&fleet, clock, Some(&ctx.config.digest));
        ctx.out.say(&answer, || match &over {
            Some(over) if answer.occurrence.is_none() => format!(
                "`{}` was triggered with key `{key}` before, and {over}; {ANOTHER_KEY}\n",
                job.name
            ),
            _ => requested(&answer, &who()),
        })?;
        return Ok(Exit::Ok);
    }
    if !ctx.out.json
        && !answer.new
        && let Some(at) = answer.occurrence
    {
        let at = show::instant(at.0);
        remark(&format!(
            "key `{key}` was used before, for {at}: the job does not run again; this is the result of that run"
        ));
    }
    let mut wait = Wait {
        ctx,
        job,
        key: &key,
        since: triggered.sent,
        waited_before: (triggered.waits_since).map_or(Duration::ZERO, |since| {
            let ms = clock.now.saturating_sub(since).max(0);
            Duration::from_millis(ms as u64)
        }),
        occurrence: answer.occurrence.map(|t| Occurrence(t.0)),
        following: None,
        printer: Printer::new(None),
        shown: 0,
        told: None,
        awaited: 0,
        still: None,
    };
    loop {
        if let Some(run) = wait.step().await? {
            let code = code(&run);
            if ctx.out.json {
                answer.occurrence = Some(run.occurrence);
                answer.run = Some(run);
                ctx.out.object(&answer)?;
            } else if run.outcome != Outcome::Succeeded {
                remark(&ended(&run));
                if !answer.new && run.attempt == 0 {
                    remark(&format!("key `{key}` was used before; {ANOTHER_KEY}"));
                }
            }
            return Ok(Exit::Command(code));
        }
        // An event only makes the next poll come sooner.
        let _ = tokio::time::timeout(POLL, async {
            while let Ok(e) = events.recv().await {
                if e.job() == Some(&job.name) {
                    break;
                }
            }
            // The channel lagged or closed: poll at the usual interval.
            tokio::time::sleep(POLL / 4).await;
        })
        .await;
    }
}

fn requested(a: &Answer, who: &str) -> String {
    let at = a.occurrence.map(|t| Occurrence(t.0));
    let text = acts::triggered(a.job, a.key, a.new, at, who);
    let not_run = a.run.as_ref().filter(|r| at.is_some() && r.attempt == 0);
    let more = not_run.map_or(String::new(), |r| format!("{}; {ANOTHER_KEY}\n", ended(r)));
    format!("{text}\n{more}")
}

/// Follows one trigger: from the request to the end of its last attempt.
struct Wait<'a> {
    ctx: &'a Context,
    job: &'a Job,
    key: &'a str,
    /// When the run was requested, by this host's clock: the store's may be wrong.
    since: Boottime,
    /// A trigger that was put in before had waited so long by then, by the store's clock.
    waited_before: Duration,
    occurrence: Option<Occurrence>,
    following: Option<Reader>,
    /// Writes the output that is shown.
    printer: Printer,
    /// The newest attempt whose output is shown or followed.
    shown: u32,
    /// The hint for the reason for waiting that was printed last.
    told: Option<String>,
    /// The newest attempt whose successor was announced.
    awaited: u32,
    /// The open entry as it was last seen (its run, its renewals, whether its next attempt is due), and since when.
    still: Option<((RunId, u32, bool), Boottime)>,
}

impl Wait<'_> {
    /// Some: the run has ended, and this is its last record.
    // Long: one case after the other of what may have become of a trigger.
    async fn step(&mut self) -> Result<Option<RunView>, Failure> {
        let reply = self.ctx.state(&self.job.name).await?;
        let shown = reply.now_us / 1000;
        let Some(st) = reply.value else {
            // The store lost its data. An instance that runs the job restores its state; an unclaimed request is gone.
            if self.waited() > self.job.start_within + PATIENCE {
                return Err(lost(&self.job.name));
            }
            return Ok(None);
        };
        if self.occurrence.is_none() {
            self.occurrence = claimed_as(&st, self.key);
        }
        let Some(at) = self.occurrence else {
            self.pending(&st).await?;
            return Ok(None);
        };
        let open = st.open.iter().find(|o| o.run.occurrence == at);
        if let Some(o) = open {
            // Between two attempts the entry still names the previous run.
            if self.following.as_ref().is_none_or(|r| r.run() != o.run.id) {
                self.finish_output().await?;
                if o.run.attempt > self.shown.saturating_add(1) {
                    let history = self.history().await?;
                    self.output_between(&history, at, o.run.attempt).await?;
                }
                self.shown = o.run.attempt;
                self.following = Some(Reader::new(self.job.name.clone(), o.run.id));
                if o.next_attempt.is_none() {
                    remark(&format!(
                        "{} runs on {}, attempt {}, run {}",
                        self.job.name, o.run.instance, o.run.attempt, o.run.id
                    ));
                }
            }
            if let Some(next) = o.next_attempt
                && self.awaited < o.run.attempt
            {
                self.awaited = o.run.attempt;
                let now = self.fleet().await?.1.right(shown);
                remark(&format!(
                    "attempt {} of {} on {} has ended; the next one ({}) is due {}",
                    o.run.attempt,
                    self.job.name,
                    o.run.instance,
                    next.trigger.as_str(),
                    show::relative(next.at, now)
                ));
            }
        }
        if let Some(open) = open {
            if let Some(reader) = &mut self.following {
                reader
                    .step(self.ctx, &mut print(self.ctx, &mut self.printer))
                    .await?;
            }
            return self.stuck(&st, open, shown).await;
        }
        let history = self.history().await?;
        let last = history
            .iter()
            .filter(|r| r.occurrence == at)
            .max_by_key(|r| r.attempt);
        let Some(last) = last else {
            return Err(Failure::TryAgain {
                message: format!(
                    "`{}` of {} has ended, and its record has been deleted since",
                    self.job.name,
                    show::instant(at.0)
                ),
                hint: None,
            });
        };
        // The run ended between two polls, or before the first one.
        if let Some(run) = last.run_id
            && self.following.as_ref().is_none_or(|r| r.run() != run)
        {
            self.finish_output().await?;
            self.output_between(&history, at, last.attempt).await?;
            self.following = Some(Reader::new(self.job.name.clone(), run));
        }
        self.finish_output().await?;
        let mut last = [RunView::from(last.clone())];
        if self.ctx.out.json {
            logs::fill(self.ctx, &mut last).await?;
        }
        Ok(last.into_iter().next())
    }

    async fn history(&self) -> Result<Vec<RunRecord>, Failure> {
        records(self.ctx, &self.job.name).await
    }

    /// Shows the output of earlier attempts that began and ended between two polls.
    async fn output_between(
        &mut self,
        history: &[RunRecord],
        at: Occurrence,
        attempt: u32,
    ) -> Result<(), Failure> {
        let mut unseen: Vec<&RunRecord> = history
            .iter()
            .filter(|r| r.occurrence == at && r.attempt > self.shown && r.attempt < attempt)
            .collect();
        unseen.sort_by_key(|r| r.attempt);
        for run in unseen.into_iter().filter_map(|r| r.run_id) {
            let mut reader = Reader::new(self.job.name.clone(), run);
            reader
                .finish(self.ctx, &mut print(self.ctx, &mut self.printer))
                .await?;
        }
        Ok(())
    }

    fn waited(&self) -> Duration {
        Boottime::now().since(self.since)
    }

    /// Detects a run, or a waiting attempt, that no instance may be left to end or to start.
    async fn stuck(
        &mut self,
        st: &State,
        open: &Open,
        shown: i64,
    ) -> Result<Option<RunView>, Failure> {
        let due = open.next_attempt.map(|next| next.at <= shown);
        let seen = (open.run.id, open.seq, due == Some(true));
        let since = match self.still {
            Some((before, since)) if before == seen && due != Some(false) => since,
            _ => Boottime::now(),
        };
        self.still = Some((seen, since));
        let still = Boottime::now().since(since);
        let lease = observe::length(open);
        let (job, within) = (&self.job.name, self.job.start_within);
        let patience = if due.is_some() { within } else { lease } + PATIENCE;
        if still <= patience {
            return Ok(None);
        }
        let (fleet, clock) = self.fleet().await?;
        if due.is_none() {
            // A live instance that has the job finds the run dead after one lease, and records it.
            let alive = fleet.instances.values().any(|i| !clock.silent(i));
            if alive && still <= 3 * patience {
                return Ok(None);
            }
            remark(&format!(
                "{job} on {} no longer renews its lease, and no instance is up to record the outcome; see `soloist \
                history {job}` once an instance with this job is up",
                open.run.instance
            ));
            return Ok(Some(RunView {
                outcome: Outcome::Unknown,
                ..RunView::running(job, open)
            }));
        }
        let paused = view::paused(st, clock.right(shown));
        let (reason, hint) = match (paused, obstacle(&fleet, clock)) {
            (_, Some(obstacle)) => obstacle,
            (Some(_), None) => (
                "the job is paused".to_owned(),
                format!(
                    "`{}` lets it start; `{}` drops it",
                    crate::words::command("resume", &[job.as_str()]),
                    crate::words::command("cancel", &[job.as_str()])
                ),
            ),
            (None, None) if still > TURN => (
                "no live instance claims it".to_owned(),
                format!(
                    "see `soloist status` and `{}`",
                    crate::words::command("why", &[job.as_str()])
                ),
            ),
            (None, None) => return Ok(None),
        };
        Err(Failure::TryAgain {
            message: format!("the next attempt of `{job}` waits: {reason}"),
            hint: Some(hint),
        })
    }

    async fn fleet(&self) -> Result<(Fleet, view::Clock), Failure> {
        self.ctx.fleet().await
    }

    /// Shows the rest of the output of the attempt that was followed.
    async fn finish_output(&mut self) -> Result<(), Failure> {
        if let Some(reader) = &mut self.following {
            reader
                .finish(self.ctx, &mut print(self.ctx, &mut self.printer))
                .await?;
        }
        Ok(())
    }

    /// Nobody has claimed it yet.
    async fn pending(&mut self, st: &State) -> Result<(), Failure> {
        if !st.triggers.iter().any(|t| t.key == self.key) {
            return Err(lost(&self.job.name));
        }
        let within = self.job.start_within.saturating_sub(self.waited_before);
        let waited = self.waited();
        let overdue = waited > within + PATIENCE || within.is_zero();
        let (fleet, clock) = self.fleet().await?;
        let job = &self.job.name;
        let (reason, hint) = match obstacle(&fleet, clock) {
            Some((reason, hint)) if !overdue => {
                // The reason may have a time in it that goes by.
                if self.told.as_ref() != Some(&hint) {
                    remark(&format!("{reason}; waiting"));
                    self.told = Some(hint);
                }
                return Ok(());
            }
            Some(obstacle) => obstacle,
            // Live instances that have the job record it as missed when it is too late.
            None if waited <= within + 3 * PATIENCE => return Ok(()),
            None => (
                "no live instance claims it".to_owned(),
                format!(
                    "see whether `{job}` is in their configuration: `soloist status` and `{}`",
                    crate::words::command("why", &[job.as_str()])
                ),
            ),
        };
        let waited = waited + self.waited_before;
        let hint = match self.waited_before.is_zero() {
            true => hint,
            false => format!("the trigger is to be recorded as missed: {ANOTHER_KEY}, or none"),
        };
        Err(Failure::TryAgain {
            message: format!(
                "no instance claimed `{job}` within {}: {reason}",
                show::span(millis(waited))
            ),
            hint: Some(hint),
        })
    }
}

async fn records(ctx: &Context, job: &JobName) -> Result<Vec<RunRecord>, Failure> {
    let all = async || ctx.store.records(job, crate::store::HISTORY_KEPT).await;
    ctx.ask(all).await
}

/// The occurrence for which the key was claimed.
fn claimed_as(st: &State, key: &str) -> Option<Occurrence> {
    let decided = st.triggered.iter().find(|t| t.key == key);
    decided.map(|t| t.occurrence).or_else(|| {
        let open = st.open.iter().find(|o| o.run.key.as_deref() == Some(key));
        open.map(|o| o.run.occurrence)
    })
}

/// Why no instance can claim anything, and what to do about it.
fn obstacle(fleet: &Fleet, clock: view::Clock) -> Option<(String, String)> {
    let mut live = (fleet.instances.iter())
        .filter(|(_, i)| !clock.silent(i))
        .peekable();
    if live.peek().is_none() {
        let hint =
            "start one with `soloist run`, or see `soloist status`; then trigger the job again";
        return Some(("no instance is up".to_owned(), hint.to_owned()));
    };
    if live.all(|(id, i)| fleet.is_draining(id, i)) {
        let hint = "`soloist undrain` makes an instance claim again; then trigger the job again";
        return Some((
            "every live instance is draining".to_owned(),
            hint.to_owned(),
        ));
    }
    let hint = "correct the clock of the store's host; then trigger the job with another key: this trigger is \
    recorded as missed";
    let doubted = doubt(clock).map(|why| (why, hint.to_owned()));
    let waits =
        || acts::wait(fleet, clock).map(|why| (why, "trigger the job again after that".to_owned()));
    doubted.or_else(waits)
}

fn lost(job: &JobName) -> Failure {
    Failure::TryAgain {
        message: format!("the store lost the trigger of `{job}` before an instance claimed it"),
        hint: Some("trigger the job again".to_owned()),
    }
}

fn print<'a>(
    ctx: &'a Context,
    printer: &'a mut Printer,
) -> impl FnMut(&Output, bool) -> Result<(), Failure> {
    move |output, done| {
        if ctx.out.json {
            return Ok(());
        }
        match printer.show(&ctx.out, output, done) {
            // The reader of our output has closed it; the exit code still matters.
            Err(Failure::Output(e)) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    }
}

/// The exit code that stands for a run.
fn code(r: &RunView) -> u8 {
    let own = || match (r.exit_code, r.signal) {
        (_, Some(signal)) => Some(u8::try_from(128 + signal).unwrap_or(u8::MAX)),
        (Some(code), None) => Some(u8::try_from(code).unwrap_or(u8::MAX)),
        (None, None) => None,
    };
    let terminated = (128 + libc::SIGTERM) as u8;
    match r.outcome {
        Outcome::Succeeded => own().unwrap_or(0),
        Outcome::Failed => own().unwrap_or(NOT_STARTED),
        Outcome::TimedOut | Outcome::Cancelled | Outcome::Replaced => own().unwrap_or(terminated),
        Outcome::LeaseLost | Outcome::Crashed | Outcome::Unknown => Exit::LeaseLost.code(),
        Outcome::Skipped | Outcome::Missed | Outcome::Running => Exit::TryAgain.code(),
    }
}

/// `draw on web-1: failed (exit 3) after 31 ms`
fn ended(r: &RunView) -> String {
    let mut text = r.job.to_string();
    if let Some(i) = r.instance.as_ref().filter(|_| r.attempt > 0) {
        text.push_str(&format!(" on {i}"));
    }
    text.push_str(&format!(": {}", r.outcome));
    match exit(r) {
        how if how.is_empty() => {}
        how if r.signal.is_some() => text.push_str(&format!(" ({how})")),
        how => text.push_str(&format!(" (exit {how})")),
    }
    if let Some(ms) = r.duration_ms {
        text.push_str(&format!(" after {}", show::took(ms)));
    }
    if let Some(e) = &r.error {
        text.push_str(&format!(": {e}"));
    }
    text::line(&text)
}

#[cfg(test)]
mod tests {
    use super::{super::history::tests::run, *};
    use crate::model::InstanceId;

    #[test]
    fn the_exit_code_is_the_commands_own_or_says_why_there_is_none() {
        use Outcome::*;
        for (outcome, exit, signal, want) in [
            (Succeeded, Some(0), None, 0),
            (Succeeded, Some(3), None, 3), // in success_codes
            (Failed, Some(3), None, 3),
            (Failed, None, Some(libc::SIGSEGV), 139),
            (Failed, None, None, 126),
            (TimedOut, None, Some(libc::SIGKILL), 137),
            (TimedOut, Some(4), None, 4),
            (Cancelled, None, None, 143),
            (Replaced, None, Some(libc::SIGTERM), 143),
            (LeaseLost, None, Some(libc::SIGKILL), 79),
            (Crashed, None, Some(libc::SIGKILL), 79),
            (Unknown, None, None, 79),
            (Missed, None, None, 75),
            (Skipped, None, None, 75),
        ] {
            let mut r = run(0, 1, outcome);
            (r.exit_code, r.signal) = (exit, signal);
            assert_eq!(code(&r), want, "{outcome} {exit:?} {signal:?}");
        }
    }

    #[test]
    fn the_end_is_told_in_one_line() {
        let mut r = run(0, 1, Outcome::Failed);
        r.exit_code = Some(3);
        assert_eq!(ended(&r), "draw on web-1: failed (exit 3) after 31 ms");
        r.signal = Some(libc::SIGTERM);
        assert_eq!(ended(&r), "draw on web-1: failed (SIGTERM) after 31 ms");
        let mut r = run(0, 0, Outcome::Missed);
        r.error = Some("nobody could start it within start_within".into());
        assert_eq!(
            ended(&r),
            "draw: missed: nobody could start it within start_within"
        );
        // Whatever the store has for a name or a reason.
        r.attempt = 1;
        r.instance = Some(InstanceId::new("a\r\nb\x1b[8m"));
        r.error = Some("c\nd".into());
        assert_eq!(ended(&r), "draw on a\\r\\nb\\x1b[8m: missed: c\\nd");
    }

    #[test]
    fn a_trigger_says_who_takes_it() {
        let job = JobName::new("draw");
        let mut a = Answer {
            job: &job,
            key: "k",
            new: true,
            occurrence: None,
            run: None,
        };
        assert_eq!(
            requested(&a, "one of 3 live instances claims it"),
            "`draw` is triggered with key `k`; one of 3 live instances claims it\n"
        );
        // The store's answer was lost, and an instance took it before the request was repeated.
        a.occurrence = Some(Time(1_795_233_600_000));
        assert_eq!(
            requested(&a, ""),
            "`draw` is triggered with key `k`, as the occurrence of 2026-11-21T04:00:00Z\n"
        );
        (a.new, a.occurrence) = (false, None);
        assert_eq!(
            requested(&a, "no instance is up to claim it"),
            "`draw` was triggered with key `k` before and still waits; no instance is up to claim it\n"
        );
        a.occurrence = Some(Time(1_795_233_600_000));
        let used = "key `k` of `draw` was used before, for 2026-11-21T04:00:00Z: the job does not run again\n";
        assert_eq!(requested(&a, ""), used);
        let mut missed = run(1_795_233_600_000, 0, Outcome::Missed);
        missed.error = Some("nobody was there".to_owned());
        a.run = Some(missed);
        assert_eq!(
            requested(&a, ""),
            format!("{used}draw: missed: nobody was there; use another --key to run it\n")
        );
    }
}
