//! `soloist __settle`: records the outcome of a run whose daemon died, or stopped before it could record it; or
//! releases the lock of a dead `soloist exec`. The guard executes this process once the command's process tree is gone.

use std::{process::ExitCode, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

#[cfg(feature = "notify")]
use crate::traces;
use crate::{
    clock::{Boottime, StoreClock},
    config::{self, StoreUrl},
    guard::{HandOver, KnownEnd, Moment},
    lock::LockClient,
    logic::{
        attempts::After,
        backoff::Pauses,
        claim::{DelayedAttempt, Settle},
        guard_life,
    },
    model::{LAST_MS, Outcome, RunRecord},
    startup,
    store::{self, Store, Tail},
};

/// How long this process tries to record an outcome that only it knows. If it gives up, the history says `unknown`, and
/// with `on_crash = "rerun"` the command runs again although its end was known.
pub(crate) const KNOWN_PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// Longest pause between two attempts: while other instances may be about to take over, and later.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// The instructions to a guard whose daemon died: settle the run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SettleOnDeath {
    #[serde(with = "config::Handed")]
    pub store: config::Store,
    /// The record of the run, without its end.
    pub record: RunRecord,
    /// The next attempt if the run crashed with its daemon.
    pub on_crash: Option<DelayedAttempt>,
    /// The next attempt if the command failed by itself.
    pub on_failure: Option<DelayedAttempt>,
    /// The next attempt if the command was not executed.
    pub on_no_start: Option<DelayedAttempt>,
    /// [`crate::clock::StoreClock::offset_us`].
    pub offset_us: i64,
    /// How long to try to record that the run died with its daemon, or lost its lease. After that the lease has lapsed,
    /// and the instance that finds it records the same. The outcome of a command that ended by itself is tried for a
    /// day.
    pub patience: Duration,
    /// Where the span of the run goes, if somebody wants it.
    #[cfg(feature = "notify")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) traces: Option<traces::OnDeath>,
}

impl SettleOnDeath {
    fn next_attempt(&self, after: After) -> Option<DelayedAttempt> {
        match after {
            After::End => None,
            After::Crash => self.on_crash,
            After::Failure => self.on_failure,
            After::NoStart => self.on_no_start,
        }
    }

    /// The time of the store's clock, as the daemon knew it.
    fn store_us(&self, at: Boottime) -> i64 {
        self.offset_us.saturating_add((at.0 / 1000) as i64)
    }

    /// The complete record of the ended run.
    pub(crate) fn ended(&self, end: KnownEnd) -> RunRecord {
        let ms = |m: &Moment| (self.store_us(m.boottime) / 1000).clamp(0, LAST_MS);
        let record = self.record.clone();
        let started_at = end.started.as_ref().map(ms);
        let finished_at = Some(ms(&end.ended));
        RunRecord {
            started_at,
            finished_at,
            lateness_ms: started_at.map(|s| s - record.occurrence.0),
            duration_ms: started_at.zip(finished_at).map(|(s, f)| (f - s).max(0)),
            outcome: end.outcome,
            exit_code: end.exit_code,
            signal: end.signal,
            error: end.error.or_else(|| guard_life::reason(end.cause)),
            usage: end.usage,
            ..record
        }
    }

    fn patience(&self, outcome: Outcome) -> Duration {
        match outcome {
            Outcome::Crashed | Outcome::LeaseLost => self.patience,
            _ => self.patience.max(KNOWN_PATIENCE),
        }
    }
}

/// The instructions to a guard whose `soloist exec` died: release the lock.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReleaseOnDeath {
    #[serde(with = "config::Handed")]
    pub store: config::Store,
    /// The key of the lock.
    pub key: String,
    /// [`crate::Lock::owner`].
    pub owner: String,
    /// How long to try: one lease. After that the lock has lapsed.
    #[serde(default)]
    pub patience: Duration,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OnDeath {
    Settle(Box<SettleOnDeath>),
    Release(Box<ReleaseOnDeath>),
}

/// The whole process: reads the [`HandOver`] and settles.
pub fn main() -> ExitCode {
    // As the zygote says.
    let _ = rustix::thread::set_name(c"soloist");
    outlive_terminal_and_service();
    let handed: HandOver = match HandOver::read() {
        Ok(handed) => handed,
        Err(e) => return fail(&format!("cannot read the guard's hand-over: {e}")),
    };
    let on_death = match serde_json::from_value(handed.settle) {
        Ok(OnDeath::Settle(settle)) => *settle,
        Ok(OnDeath::Release(release)) => return release_lock(&release),
        Err(e) => return fail(&format!("cannot read the daemon's instructions: {e}")),
    };
    let end = handed.end;
    let after = After::of(end.outcome, end.cause, end.started.is_some());
    let next_attempt = on_death.next_attempt(after);
    let mut tries = Tries::new(
        Boottime::now(),
        on_death.patience,
        on_death.patience(end.outcome),
    );
    let Some(run) = on_death.record.run_id else {
        return fail("the daemon's instructions have no run id");
    };
    let record = on_death.ended(end);
    let settle = Settle {
        run,
        record,
        next_attempt,
    };
    loop {
        let tried = block_on(tell(&on_death, &settle));
        let error = match tried {
            Ok(()) => {
                #[cfg(feature = "notify")]
                trace(&on_death, settle.record);
                return ExitCode::SUCCESS;
            }
            Err(error) => error,
        };
        let Some(pause) = tries.after_failure(Boottime::now()) else {
            let outcome = settle.record.outcome;
            return fail(&format!(
                "run {run}: outcome {outcome} not recorded: {error}"
            ));
        };
        std::thread::sleep(pause);
    }
}

/// For how long this process tries, and how often.
struct Tries {
    hurry_until: Boottime,
    until: Boottime,
    pauses: Pauses,
}

impl Tries {
    fn new(now: Boottime, hurry: Duration, patience: Duration) -> Self {
        Self {
            hurry_until: now + hurry,
            until: now + patience,
            pauses: Pauses::from(PAUSE.0),
        }
    }

    /// The pause before the next try; None: give up.
    fn after_failure(&mut self, now: Boottime) -> Option<Duration> {
        if now >= self.until {
            return None;
        }
        Some(match now >= self.hurry_until {
            true => self.pauses.after_failure(PAUSE.1),
            false => PAUSE.0,
        })
    }
}

/// Sends the span of the run, if somebody wants it. The next attempt need not wait: the outcome is recorded.
#[cfg(feature = "notify")]
#[expect(
    clippy::print_stderr,
    reason = "there is no log in this process; stderr may be closed, and then nobody hears"
)]
fn trace(on_death: &SettleOnDeath, record: RunRecord) {
    let Some(to) = &on_death.traces else { return };
    let place = (&*on_death.store.namespace, &*to.place);
    let span = traces::Span::new(place, record, to.key.clone());
    if let Err(error) = traces::send_now(&to.settings, span) {
        eprintln!(
            "soloist: settle: the span of the run was not sent: {}",
            crate::text::line(&error)
        );
    }
}

/// Sends one request, on a new connection.
async fn tell(on_death: &SettleOnDeath, settle: &Settle) -> Result<(), String> {
    let store = open(&on_death.store, on_death.offset_us)?;
    let told = store.settle(settle, &Tail::default()).await;
    told.map(drop).map_err(|e| e.to_string())
}

/// Runs `attempt` on a runtime of its own. Each attempt builds one: descriptors, processes or memory may be short for a
/// while.
pub(crate) fn block_on(attempt: impl Future<Output = Result<(), String>>) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime
        .map_err(|e| format!("cannot start: {e}"))?
        .block_on(attempt)
}

/// Opens the store of a daemon that is gone. `offset_us` is [`StoreClock::offset_us`] as the daemon knew it.
pub(crate) fn open(store: &config::Store, offset_us: i64) -> Result<Arc<dyn Store>, String> {
    let store = store::open(store).map_err(|e| e.to_string())?;
    // As the daemon did: while the store's clock is wrong, the next attempt must not be dated by it.
    if offset_us != 0 {
        let (clock, now) = (StoreClock::default(), Boottime::now());
        let us = offset_us.saturating_add((now.0 / 1000) as i64);
        clock.sample(us, now, now);
        store.believe(Arc::new(clock));
    }
    Ok(store)
}

/// What the process does, for a simulated host.
#[cfg(test)]
pub(crate) async fn simulated(handed: HandOver) {
    let on_death: SettleOnDeath =
        serde_json::from_value(handed.settle).expect("the daemon's instructions");
    let end = handed.end;
    let after = After::of(end.outcome, end.cause, end.started.is_some());
    let next_attempt = on_death.next_attempt(after);
    let until = Boottime::now() + on_death.patience(end.outcome);
    let record = on_death.ended(end);
    let settle = Settle {
        run: record.run_id.expect("a run"),
        record,
        next_attempt,
    };
    while tell(&on_death, &settle).await.is_err() && Boottime::now() < until {
        tokio::time::sleep(PAUSE.0).await;
    }
}

/// Ignores the signals that a guard ignores, because this process may not have been one: a signal to everything that a
/// stopped daemon left behind, or to its group in a terminal, must not end this process.
pub(crate) fn outlive_terminal_and_service() {
    let _ = rustix::process::setsid();
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: valid signals, and a valid disposition.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    startup::release();
}

/// If the store does not answer for one lease, the lock lapses.
fn release_lock(release: &ReleaseOnDeath) -> ExitCode {
    let mut tries = Tries::new(Boottime::now(), Duration::ZERO, release.patience);
    loop {
        // If the store's file is gone, the lock is gone too.
        if matches!(&release.store.url, StoreUrl::Sqlite(file) if !file.exists()) {
            return ExitCode::SUCCESS;
        }
        let tried = block_on(async {
            let locks = LockClient::with_config(&release.store).map_err(|e| e.to_string())?;
            let released = locks.release_for(&release.key, &release.owner).await;
            released.map_err(|e| e.to_string())
        });
        let error = match tried {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => error,
        };
        let Some(pause) = tries.after_failure(Boottime::now()) else {
            return fail(&format!(
                "lock `{}` could not be released: {error}",
                release.key
            ));
        };
        std::thread::sleep(pause);
    }
}

#[expect(
    clippy::print_stderr,
    reason = "there is no log in this process; stderr may be closed, and then nobody hears"
)]
pub(crate) fn fail(error: &str) -> ExitCode {
    eprintln!("soloist: settle: {}", crate::text::line(error));
    ExitCode::from(70)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{JobName, Occurrence, Trigger, Usage};

    fn on_death() -> SettleOnDeath {
        let next_attempt = |trigger| {
            Some(DelayedAttempt {
                delay_ms: 0,
                trigger,
            })
        };
        SettleOnDeath {
            store: config::Store::from_url("memory:").expect("a store"),
            record: RunRecord {
                run_id: None,
                job: JobName::new("a"),
                occurrence: Occurrence(0),
                trigger: Trigger::Schedule,
                attempt: 1,
                fencing_token: None,
                instance: None,
                host: None,
                started_at: None,
                finished_at: None,
                lateness_ms: None,
                duration_ms: None,
                outcome: Outcome::Running,
                exit_code: None,
                signal: None,
                output_tail: String::new(),
                output_truncated: false,
                error: None,
                count: 1,
                usage: Usage::default(),
                waited: None,
                by: None,
            },
            on_crash: next_attempt(Trigger::Takeover),
            on_failure: next_attempt(Trigger::Retry),
            on_no_start: None,
            offset_us: 0,
            patience: Duration::from_secs(15),
            #[cfg(feature = "notify")]
            traces: None,
        }
    }

    /// As the daemon would have written it.
    #[test]
    fn a_record_says_when_and_how_its_run_ended() {
        let after = |ms: u64| Moment {
            wall_us: 0,
            boottime: Boottime(ms * 1_000_000),
        };
        let mut on_death = on_death();
        on_death.record.occurrence = Occurrence(10_000);
        on_death.offset_us = 9_000_000;
        let mut end = KnownEnd {
            outcome: Outcome::Failed,
            cause: None,
            exit_code: Some(3),
            signal: None,
            error: None,
            started: Some(after(1_500)),
            ended: after(4_000),
            usage: Usage {
                cpu_ms: Some(70),
                peak_memory_bytes: Some(4_096_000),
                output_bytes: None,
                left_processes: None,
            },
        };
        let failed = on_death.ended(end.clone());
        let times = (failed.started_at, failed.finished_at);
        assert_eq!(times, (Some(10_500), Some(13_000)));
        let lengths = (failed.lateness_ms, failed.duration_ms);
        assert_eq!(lengths, (Some(500), Some(2_500)));
        let how = (failed.outcome, failed.exit_code, failed.signal);
        assert_eq!(how, (Outcome::Failed, Some(3), None));
        assert_eq!(failed.error, None);
        assert_eq!(failed.usage.cpu_ms, Some(70));

        (end.exit_code, end.signal) = (None, Some(libc::SIGKILL));
        (end.outcome, end.error) = (Outcome::Crashed, Some("gone".to_owned()));
        let killed = on_death.ended(end);
        let how = (killed.outcome, killed.exit_code, killed.signal);
        assert_eq!(how, (Outcome::Crashed, None, Some(libc::SIGKILL)));
        assert_eq!(killed.error.as_deref(), Some("gone"));
    }

    #[test]
    fn the_next_attempt_is_the_one_that_the_daemon_named_for_this_end() {
        let mut on_death = on_death();
        on_death.on_no_start = Some(DelayedAttempt {
            delay_ms: 7,
            trigger: Trigger::Takeover,
        });
        for (after, expected) in [
            (After::End, None),
            (After::Crash, on_death.on_crash),
            (After::Failure, on_death.on_failure),
            (After::NoStart, on_death.on_no_start),
        ] {
            assert_eq!(on_death.next_attempt(after), expected, "{after:?}");
        }
        let crashed = on_death.patience(Outcome::Crashed);
        assert_eq!(crashed, on_death.patience);
    }

    #[test]
    fn who_tries_to_record_an_outcome_hurries_first_and_gives_up_at_last() {
        let (at, ms) = (|s: u64| Boottime(s * 1_000_000_000), Duration::from_millis);
        let mut tries = Tries::new(at(10), ms(5_000), ms(9_000));
        let pauses = [10, 14, 15, 16, 17, 18].map(|now| tries.after_failure(at(now)));
        let expected = [100, 100, 100, 200, 400, 800].map(|pause| Some(ms(pause)));
        assert_eq!(pauses, expected);
        assert_eq!(tries.after_failure(at(19)), None);
    }

    #[test]
    fn an_outcome_that_nobody_else_knows_is_offered_for_longer_than_a_lease() {
        for (outcome, for_long) in [
            (Outcome::Succeeded, true),
            (Outcome::Failed, true),
            (Outcome::TimedOut, true),
            (Outcome::Cancelled, true),
            (Outcome::Missed, true),
            (Outcome::Crashed, false),
            (Outcome::LeaseLost, false),
        ] {
            let patience = on_death().patience(outcome);
            assert_eq!(patience > Duration::from_secs(3600), for_long, "{outcome}");
        }
    }

    #[test]
    fn a_guard_gets_the_secrets_that_nothing_else_is_shown() {
        let mut on_death = on_death();
        on_death.store = config::Store::from_url("redis://me:hunter2@h").expect("a store");
        on_death.store.password = Some(config::Secret::new("hunter3"));
        let handed = serde_json::to_string(&on_death).expect("JSON");
        let back: SettleOnDeath = serde_json::from_str(&handed).expect("what the guard was handed");
        assert_eq!(back.store, on_death.store);
        assert!(!format!("{on_death:?}").contains("hunter"), "{on_death:?}");
        let secret = serde_json::to_string(&on_death.store.password).expect("JSON");
        assert_eq!(secret, "\"***\"");
    }
}
