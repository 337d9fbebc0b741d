//! Connections to Redis that are checked out, each for one task at a time.
//!
//! bb8's own way to notice a dead connection is a PING before each use, which nearly doubles the time of a claim.
//! Here a connection that failed is not used again; a claim that met a dead one is asked again.

use std::sync::Arc;

use bb8_redis::bb8;
use parking_lot::Mutex;
use redis::RedisError;
use tokio::sync::Notify;

use crate::store::{
    Error,
    connection::{Client, Connection},
};

pub(super) struct Pool {
    connections: bb8::Pool<Manager>,
    manager: Manager,
}

pub(super) type Pooled<'p> = bb8::PooledConnection<'p, Manager>;

#[derive(Debug, Clone)]
pub(super) struct Manager {
    client: Client,
    /// Why the last connection could not be made: bb8 itself only says that time ran out.
    failure: Arc<Mutex<Option<Error>>>,
    /// A connection could not be made just now.
    failed: Arc<Notify>,
}

impl Pool {
    /// Of at most `size` connections; `idle` of them are there also while nobody needs them.
    pub(super) fn new(client: Client, size: u32, idle: u32) -> Self {
        let manager = Manager {
            client,
            failure: Arc::default(),
            failed: Arc::default(),
        };
        let connections = bb8::Pool::builder()
            .max_size(size.max(1))
            .min_idle(Some(idle))
            .test_on_check_out(false)
            .connection_timeout(manager.client.timeout * 2)
            .max_lifetime(None)
            .idle_timeout(None)
            // One failed attempt is an answer: who asked decides whether to ask again.
            .retry_connection(false)
            // `connect` keeps the reason itself.
            .error_sink(Box::new(bb8::NopErrorSink))
            .build_unchecked(manager.clone());
        Self {
            connections,
            manager,
        }
    }

    pub(super) async fn checkout(&self) -> Result<Pooled<'_>, Error> {
        let Manager {
            client,
            failure,
            failed,
        } = &self.manager;
        let told = failed.notified();
        let got = tokio::select! {
            got = self.connections.get() => got,
            // bb8 waits its whole timeout out, even if the server refuses at once. While no connection is there that could
            // become free, the refusal is the answer.
            () = told, if self.connections.state().connections == 0 => Err(bb8::RunError::TimedOut),
        };
        got.map_err(|e| match e {
            bb8::RunError::User(e) => client.error(&e),
            bb8::RunError::TimedOut => {
                let failure = failure.lock().clone();
                failure.unwrap_or_else(|| Error::Unreachable {
                    address: client.address.clone(),
                    reason: "no connection became free in time".to_owned(),
                })
            }
        })
    }
}

impl bb8::ManageConnection for Manager {
    type Connection = Connection;
    type Error = RedisError;

    async fn connect(&self) -> Result<Connection, RedisError> {
        let made = self.client.connect().await;
        *self.failure.lock() = made.as_ref().err().map(|e| self.client.error(e));
        if made.is_err() {
            self.failed.notify_waiters();
        }
        made
    }
    async fn is_valid(&self, c: &mut Connection) -> Result<(), RedisError> {
        c.query::<()>(&redis::cmd("PING")).await
    }
    fn has_broken(&self, c: &mut Connection) -> bool {
        c.is_broken()
    }
}
