//! A pool of connections to Redis; one task at a time checks out a connection.
//!
//! bb8 itself notices a dead connection by a PING before each use, which nearly doubles the time of a claim. Here a
//! connection that failed is not used again, and the caller repeats the claim.

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
    /// Why the last attempt to connect failed; None if it succeeded. bb8 itself only reports a timeout.
    failure: Arc<Mutex<Option<Error>>>,
    /// Notified when an attempt to connect fails.
    failed: Arc<Notify>,
}

impl Pool {
    /// A pool of at most `size` connections, which keeps `idle` of them even if no task needs them.
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
            // One failed attempt is an answer: the caller decides whether to try again.
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
        for _ in 0..self.connections.state().idle_connections {
            let pooled = self.take().await?;
            // Closed while it was idle: the pool discards it.
            if !pooled.is_broken() {
                return Ok(pooled);
            }
        }
        self.take().await
    }

    async fn take(&self) -> Result<Pooled<'_>, Error> {
        let Manager {
            client,
            failure,
            failed,
        } = &self.manager;
        let told = failed.notified();
        let got = tokio::select! {
            got = self.connections.get() => got,
            // bb8 waits for its whole timeout even if the server refuses at once. If there is no connection that could
            // become free, take the refusal as the answer.
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
