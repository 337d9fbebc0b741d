//! Work that may block for a while, on threads that live as long as this process.
//!
//! This module does not use `spawn_blocking`, which panics if the host cannot start another thread: the work would be
//! lost with the task that handed it in.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::oneshot};

use crate::clock::Boottime;

/// Pause between two tries of [`within`].
const AGAIN: Duration = Duration::from_millis(1);

/// Tries until there is a result, for `patience` at most, and at least once. Blocks its thread.
pub(crate) fn within<T>(patience: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Boottime::now() + patience;
    loop {
        let result = attempt();
        if result.is_some() || Boottime::now() >= end {
            return result;
        }
        thread::sleep(AGAIN);
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// More would not start commands faster: the kernel forks one process after the other.
const THREADS: usize = 4;

static QUEUE: Mutex<Option<mpsc::Sender<Work>>> = Mutex::new(None);

/// Does `work` on one of the threads, or on this one if the host has none for it; in the caller's runtime. Work that
/// has begun goes on if the caller does not wait for it.
///
/// # Panics
/// If `work` does.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let runtime = Handle::current();
    let (done, result) = oneshot::channel();
    let work: Work = Box::new(move || {
        let _runtime = runtime.enter();
        let _ = done.send(catch_unwind(AssertUnwindSafe(work)));
    });
    let refused = match queue() {
        Some(queue) => queue.send(work).err().map(|refused| refused.0),
        None => Some(work),
    };
    if let Some(work) = refused {
        work();
    }
    match result.await {
        Ok(Ok(value)) => value,
        Ok(Err(panic)) => resume_unwind(panic),
        // No work is dropped: the threads never end.
        Err(_) => std::future::pending().await,
    }
}

/// None: no thread can be started now.
fn queue() -> Option<mpsc::Sender<Work>> {
    let mut queue = QUEUE.lock();
    if queue.is_none() {
        let (sender, receiver) = mpsc::channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let started = (0..THREADS).filter(|_| {
            let receiver = receiver.clone();
            let thread = thread::Builder::new().name("blocking".to_owned());
            thread.spawn(move || serve(&receiver)).is_ok()
        });
        *queue = (started.count() > 0).then_some(sender);
    }
    queue.clone()
}

fn serve(queue: &Mutex<mpsc::Receiver<Work>>) {
    loop {
        let next = queue.lock().recv();
        let Ok(work) = next else { return };
        work();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_tried_again_ends_with_its_result_or_with_patience() {
        let mut tries = 0;
        let third = within(Duration::from_secs(3600), || {
            tries += 1;
            (tries == 3).then_some(tries)
        });
        assert_eq!((third, tries), (Some(3), 3));
        let begun = Boottime::now();
        assert_eq!(within(Duration::from_millis(30), || None::<()>), None);
        assert!(Boottime::now().since(begun) >= Duration::from_millis(30));
    }

    #[tokio::test]
    async fn work_is_done_on_another_thread_in_the_callers_runtime() {
        let here = thread::current().id();
        let many = (0..100)
            .map(|n| run(move || (n, thread::current().id(), Handle::try_current().is_ok())));
        for (n, done) in (0..).zip(futures_util::future::join_all(many).await) {
            assert!(done.0 == n && done.1 != here && done.2, "{done:?}");
        }
        // A panic is the caller's, and the thread goes on.
        for _ in 0..2 * THREADS {
            let failed = tokio::spawn(run(|| panic!("on purpose"))).await;
            assert!(failed.expect_err("a panic").is_panic());
        }
        assert_eq!(run(|| 1).await, 1);
    }

    /// The process of the next test.
    #[test]
    #[ignore = "only for the next one"]
    fn alone() {
        use rustix::process::{Resource, getrlimit, setrlimit};
        nix::unistd::setuid(54_321.into()).expect("another user");
        let mut limit = getrlimit(Resource::Nproc);
        limit.current = Some(1);
        setrlimit(Resource::Nproc, limit).expect("a limit");
        thread::Builder::new().spawn(|| ()).expect_err("no thread");
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let here = thread::current().id();
        let there = runtime
            .expect("a runtime")
            .block_on(run(|| thread::current().id()));
        assert_eq!(here, there);
    }

    #[test]
    fn where_no_thread_can_be_started_the_caller_does_the_work() {
        // Only root can become another user, and no limit of processes is for root.
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let this = std::env::current_exe().expect("a path");
        let words = [
            "blocking::tests::alone",
            "--exact",
            "--ignored",
            "--test-threads=1",
        ];
        let output = std::process::Command::new(this).args(words).output();
        let output = output.expect("it starts");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{output:?}"
        );
    }
}
