use std::{future::Future, sync::Arc};

use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;

use super::{Error, Observation, Reply, Store, observe_each, records_each};
use crate::model::{JobName, RunRecord};

/// Asks the store from the daemon's runtime, to which its connections belong: for threads with a runtime of their own.
#[derive(Clone)]
pub(crate) struct Asking {
    store: Arc<dyn Store>,
    daemon: Handle,
}

impl Asking {
    /// To be called in the daemon's runtime.
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            daemon: Handle::current(),
        }
    }

    pub(crate) async fn ask<T, F>(&self, f: impl FnOnce(Arc<dyn Store>) -> F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        match AbortOnDropHandle::new(self.daemon.spawn(f(self.store.clone()))).await {
            Ok(answer) => answer,
            Err(_) => Err(Error::Unreachable {
                address: self.store.address().to_owned(),
                reason: "the instance ends".to_owned(),
            }),
        }
    }

    /// As [`observe_each`].
    pub(crate) async fn states(
        &self,
        jobs: Vec<JobName>,
    ) -> Result<Reply<Vec<Observation>>, Error> {
        self.ask(|s| async move { observe_each(&*s, &jobs).await })
            .await
    }

    /// As [`records_each`].
    pub(crate) async fn records(
        &self,
        jobs: Vec<JobName>,
        n: usize,
    ) -> Result<Vec<(usize, Vec<RunRecord>)>, Error> {
        if jobs.is_empty() {
            return Ok(vec![]);
        }
        self.ask(|s| async move { records_each(&*s, &jobs, n).await })
            .await
    }
}
