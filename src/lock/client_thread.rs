//! The thread on which a client works. Its connections, timers, renewals, and what it gives back live there, and in no runtime of the
//! caller's: a caller's thread may be blocked, its runtime may have ended or its clock be paused, its future may be dropped, and what was
//! asked for goes on to its answer all the same.

use std::{future::Future, io, sync::OnceLock, thread, time::Duration};

use parking_lot::Mutex;
use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
    task::JoinError,
    time::Sleep,
};
use tokio_util::task::{AbortOnDropHandle, TaskTracker, task_tracker::TaskTrackerToken};

use crate::clock::Boottime;

/// One thread at most, from the first request to the end of its client.
#[derive(Default)]
pub(super) struct ClientThread {
    running: OnceLock<Running>,
    starting: Mutex<()>,
    /// Requests, and what is given back.
    work: TaskTracker,
}

struct Running {
    handle: Handle,
    /// Dropped with the client: the thread ends.
    _end: oneshot::Sender<()>,
}

impl ClientThread {
    pub(super) fn handle(&self) -> io::Result<&Handle> {
        if let Some(running) = self.running.get() {
            return Ok(&running.handle);
        }
        let _one = self.starting.lock();
        let running = match self.running.get() {
            Some(running) => running,
            None => {
                let started = start()?;
                self.running.get_or_init(|| started)
            }
        };
        Ok(&running.handle)
    }

    /// Has the thread do some work, and hands on what comes of it. Dropping the future does not end the work; what comes of it
    /// is dropped then, on the thread, when it is there.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        // Held until what comes of it is taken, or was dropped and has begun to give something back: then this is idle no sooner.
        let token = self.work.token();
        let task = self.handle()?.spawn(async move { (work.await, token) });
        joined(task.await).map(|(out, _)| out)
    }

    /// As [`ClientThread::run`], for work that ends soon after the future is dropped, wherever it is, and that nobody waits for then.
    pub(super) async fn run_until_dropped<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        joined(AbortOnDropHandle::new(self.handle()?.spawn(work)).await)
    }

    /// Until it is dropped, this is not idle.
    pub(super) fn token(&self) -> TaskTrackerToken {
        self.work.token()
    }

    /// Has the thread do what nobody waits for but [`ClientThread::wait_idle`].
    pub(super) fn spawn_tracked(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Ok(handle) = self.handle() {
            handle.spawn(self.work.track_future(work));
        }
    }

    /// Has the thread do what nobody waits for.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Ok(handle) = self.handle() {
            handle.spawn(work);
        }
    }

    /// Waits until no request is open and all that was to be given back has been, or could not be.
    pub(super) async fn wait_idle(&self) {
        self.work.close();
        self.work.wait().await;
    }

    /// Sleeps on the thread's clock, which nobody pauses.
    pub(super) async fn sleep(&self, time: Duration) {
        let sleep = match self.handle() {
            Ok(handle) => timer(handle, time),
            Err(_) => tokio::time::sleep(time),
        };
        sleep.await;
    }

    /// Sleeps until `at`, on [`Boottime`]; at most a second at a time, because a suspend stops timers.
    pub(super) async fn sleep_until(&self, at: Boottime) {
        loop {
            let left = at.since(Boottime::now());
            if left.is_zero() {
                return;
            }
            self.sleep(left.min(Duration::from_secs(1))).await;
        }
    }
}

/// A timer belongs to the runtime in which it is made, whoever waits for it.
fn timer(handle: &Handle, time: Duration) -> Sleep {
    let _inside = handle.enter();
    tokio::time::sleep(time)
}

fn joined<T>(ended: Result<T, JoinError>) -> io::Result<T> {
    ended.map_err(|e| match e.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(e) => io::Error::other(e),
    })
}

fn start() -> io::Result<Running> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let (end, ended) = oneshot::channel();
    thread::Builder::new()
        .name("soloist-locks".to_owned())
        .spawn(move || {
            let _ = runtime.block_on(ended);
        })?;
    Ok(Running { handle, _end: end })
}
