//! `soloist __settle`: records the outcome of a run whose daemon is dead, or gives back the lock of a dead
//! `soloist exec`. The guard becomes this process when the command's tree is gone.

use std::{process::ExitCode, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    clock::Boottime,
    config,
    guard::{HandOver, Moment},
    lock::LockClient,
    logic::claim::{Again, Settle},
    model::{Outcome, RunRecord},
    store::{self, Tail},
};

/// What a daemon leaves its guards, in case it dies.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Legacy {
    pub store: config::Store,
    /// Complete but for how it ended.
    pub record: RunRecord,
    /// The attempt that follows when the run crashed with its daemon.
    pub on_crash: Option<Again>,
    /// The attempt that follows when the command had failed by itself.
    pub on_failure: Option<Again>,
    /// [`crate::clock::StoreClock::offset_us`].
    pub offset_us: i64,
    /// How long to try. Afterwards the lease has lapsed, and whoever finds it says what can be said.
    pub patience: Duration,
}

/// What `soloist exec` leaves its guard, in case it dies.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LockLegacy {
    pub store: config::Store,
    /// Of the lock.
    pub key: String,
    /// [`crate::Lock::owner`].
    pub owner: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Left {
    Run(Box<Legacy>),
    Lock(Box<LockLegacy>),
}

/// Life of the process: reads the [`HandOver`] and settles.
pub fn main() -> ExitCode {
    let handed: HandOver = match HandOver::read() {
        Ok(handed) => handed,
        Err(e) => return fail(&format!("cannot read what the guard handed over: {e}")),
    };
    let legacy = match serde_json::from_value(handed.settle) {
        Ok(Left::Run(legacy)) => *legacy,
        Ok(Left::Lock(legacy)) => return release(&legacy),
        Err(e) => return fail(&format!("cannot read what the daemon left: {e}")),
    };
    let end = handed.end;
    let ms = |m: &Moment| ((m.boottime.0 / 1000) as i64 + legacy.offset_us) / 1000;
    let mut record = legacy.record;
    record.started_at = end.started.as_ref().map(ms);
    record.finished_at = Some(ms(&end.ended));
    record.lateness_ms = record.started_at.map(|s| s - record.occurrence.0);
    record.duration_ms = record
        .started_at
        .zip(record.finished_at)
        .map(|(s, f)| (f - s).max(0));
    record.outcome = end.outcome;
    record.exit_code = end.exit_code;
    record.signal = end.signal;
    record.error = end.error;
    let again = match end.outcome {
        Outcome::Crashed | Outcome::LeaseLost => legacy.on_crash,
        Outcome::Failed | Outcome::TimedOut => legacy.on_failure,
        _ => None,
    };
    let Some(run) = record.run_id else {
        return fail("the daemon left no run id");
    };
    let settle = Settle { run, record, again };
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => return fail(&format!("cannot start: {e}")),
    };
    let until = Boottime::now() + legacy.patience;
    runtime.block_on(async {
        let mut error = match store::open(&legacy.store) {
            Ok(store) => loop {
                match store.settle(&settle, &Tail::default()).await {
                    Ok(_) => return ExitCode::SUCCESS,
                    Err(e) if Boottime::now() >= until => break e,
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            },
            Err(e) => e,
        }
        .to_string();
        error.insert_str(
            0,
            &format!(
                "run {run}: outcome {} not recorded: ",
                settle.record.outcome
            ),
        );
        fail(&error)
    })
}

/// Should the store not answer, the lock lapses with its lease.
fn release(legacy: &LockLegacy) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => return fail(&format!("cannot start: {e}")),
    };
    runtime.block_on(async {
        let released = match LockClient::with_config(&legacy.store) {
            Ok(locks) => locks.release_for(&legacy.key, &legacy.owner).await,
            Err(e) => Err(e),
        };
        match released {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => fail(&format!("lock `{}` not given back: {e}", legacy.key)),
        }
    })
}

#[expect(
    clippy::print_stderr,
    reason = "there is no log in this process; stderr may be closed, and then nobody hears"
)]
fn fail(error: &str) -> ExitCode {
    eprintln!("soloist: settle: {error}");
    ExitCode::from(70)
}
