//! The thread on which a client works. The client's connections, timers, renewals and releases live there, and in no
//! runtime of the caller. So a caller may block its thread, end its runtime, pause its clock, or drop its future: its
//! request continues to its answer all the same.

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

/// At most one thread, from the first request to the end of the client.
#[derive(Default)]
pub(super) struct ClientThread {
    running: OnceLock<Running>,
    starting: Mutex<()>,
    /// Tracks open requests and releases.
    work: TaskTracker,
}

struct Running {
    handle: Handle,
    /// Dropped with the client; then the thread ends.
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

    /// Runs some work on the thread, and returns its result. Dropping the future does not end the work: its result is
    /// then dropped on the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        // Held until the result is taken, or until it is dropped and its release has begun: the client is not idle
        // before that.
        let token = self.work.token();
        let task = self.handle()?.spawn(async move { (work.await, token) });
        joined(task.await).map(|(out, _)| out)
    }

    /// As [`ClientThread::run`], but the work is aborted when the future is dropped, and nobody waits for it then.
    pub(super) async fn run_until_dropped<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        joined(AbortOnDropHandle::new(self.handle()?.spawn(work)).await)
    }

    /// The client is not idle until this is dropped.
    pub(super) fn token(&self) -> TaskTrackerToken {
        self.work.token()
    }

    /// Runs work on the thread in the background; only [`ClientThread::wait_idle`] waits for it.
    pub(super) fn spawn_tracked(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Ok(handle) = self.handle() {
            handle.spawn(self.work.track_future(work));
        }
    }

    /// Runs work on the thread in the background; nobody waits for it.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Ok(handle) = self.handle() {
            handle.spawn(work);
        }
    }

    /// Waits until no request is open, and all releases have succeeded or failed.
    pub(super) async fn wait_idle(&self) {
        self.work.close();
        self.work.wait().await;
    }

    /// Sleeps by the thread's timer, whose clock nobody pauses.
    pub(super) async fn sleep(&self, time: Duration) {
        let sleep = match self.handle() {
            Ok(handle) => timer(handle, time),
            Err(_) => tokio::time::sleep(time),
        };
        sleep.await;
    }

    /// Sleeps until `at` by [`Boottime`], at most a second at a time, because timers stand still while the host is
    /// suspended.
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

/// A timer belongs to the runtime in which it is made, even if another task waits for it.
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
