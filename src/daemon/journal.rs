//! Records the decisions of this instance in the store, many at a time, without delaying any other task.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::store::{Decision, Store};

const EVERY: Duration = Duration::from_secs(1);
const AT_ONCE: usize = 1000;

pub(super) async fn run(
    store: Arc<dyn Store>,
    mut decisions: mpsc::Receiver<Decision>,
    finish: CancellationToken,
) {
    let mut waiting: Vec<Decision> = vec![];
    loop {
        let last = tokio::select! {
            () = tokio::time::sleep(EVERY) => false,
            () = finish.cancelled() => true,
        };
        while waiting.len() < AT_ONCE
            && let Ok(d) = decisions.try_recv()
        {
            waiting.push(d);
        }
        if !waiting.is_empty() {
            match store.journal(&waiting).await {
                Ok(()) => waiting.clear(),
                // If the store refuses the decisions of one job, the others must still get through.
                Err(e) if !e.is_transient() => {
                    debug!(error = %e, "the store refused decisions: recording them job by job");
                    waiting.sort_by(|a, b| a.job.cmp(&b.job));
                    for of_job in waiting.chunk_by(|a, b| a.job == b.job) {
                        if let Err(e) = store.journal(of_job).await {
                            debug!(job = %of_job[0].job, error = %e, lost = of_job.len(), "the store refused the \
                            decisions of this job: they are lost");
                        }
                    }
                    waiting.clear();
                }
                Err(e) => {
                    debug!(error = %e, waiting = waiting.len(), "cannot record decisions; retrying")
                }
            }
        }
        if last {
            return;
        }
    }
}
