//! What this process says, to stderr or to the journal. In a daemon and in `exec` a thread of its own writes it, so
//! that no start, renewal or end waits for a reader that does not read.

use std::{
    collections::VecDeque,
    io::{self, Write as _},
    os::unix::net::UnixDatagram,
    sync::{LazyLock, OnceLock},
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// How many bytes wait at most. Once they do, lines are dropped until half of the bytes are written.
const WAITING: usize = 1 << 20;
/// How long the end of this process waits for the last lines to be written.
const LAST: Duration = Duration::from_secs(1);
const JOURNAL: &str = "/run/systemd/journal/socket";

#[derive(Debug, Clone, Copy)]
pub(crate) enum To {
    Stderr,
    Journal,
}

#[derive(Default)]
struct Queue {
    wanted: bool,
    thread_runs: bool,
    lines: VecDeque<(To, Vec<u8>)>,
    bytes: usize,
    /// A line waits, or is being written.
    busy: bool,
    dropped: u64,
    /// So many of them the log has counted. As long as that is not all, no line is taken.
    told: u64,
}

static QUEUE: LazyLock<Mutex<Queue>> = LazyLock::new(Mutex::default);
/// `busy` has changed.
static CHANGED: Condvar = Condvar::new();
static SOCKET: OnceLock<UnixDatagram> = OnceLock::new();

/// Drop it at the end of the process: it waits a little for the last lines.
pub(crate) struct Last;

impl Drop for Last {
    fn drop(&mut self) {
        flush(LAST);
    }
}

/// From now on a thread writes. Signals that must not arrive in it are blocked before.
pub(crate) fn by_a_thread() {
    QUEUE.lock().wanted = true;
    // The usual hook would wait for stderr.
    std::panic::set_hook(Box::new(|panic| {
        let thread = thread::current();
        let text = format!("thread {:?} {panic}\n", thread.name().unwrap_or_default());
        write(To::Stderr, text.into_bytes());
    }));
}

/// # Errors
/// There is no journal on this host.
pub(crate) fn open_journal() -> io::Result<()> {
    UnixDatagram::unbound()?.connect(JOURNAL)?;
    // Not a connected one: the journal may be restarted.
    let _ = SOCKET.set(UnixDatagram::unbound()?);
    Ok(())
}

/// Writes the line, or hands it to the thread.
pub(crate) fn write(to: To, line: Vec<u8>) {
    let mut queue = QUEUE.lock();
    if queue.wanted && !queue.thread_runs {
        let thread = thread::Builder::new().name("log".to_owned());
        queue.thread_runs = thread.spawn(serve).is_ok();
    }
    if !queue.thread_runs {
        drop(queue);
        return write_now(to, &line);
    }
    if queue.dropped > queue.told || queue.bytes + line.len() > WAITING {
        queue.dropped += 1;
        return;
    }
    queue.bytes += line.len();
    queue.lines.push_back((to, line));
    if !std::mem::replace(&mut queue.busy, true) {
        CHANGED.notify_all();
    }
}

/// Waits until all lines are written, at most so long.
pub(crate) fn flush(most: Duration) {
    CHANGED.wait_while_for(&mut QUEUE.lock(), |queue| queue.busy, most);
}

/// How many lines nobody has read in time.
#[cfg(feature = "http")]
pub(crate) fn dropped() -> u64 {
    QUEUE.lock().dropped
}

fn serve() {
    let mut queue = QUEUE.lock();
    loop {
        if queue.dropped > queue.told && queue.bytes <= WAITING / 2 {
            let new = queue.dropped - queue.told;
            queue.told = queue.dropped;
            // A line like the others, where those that it counts would be.
            MutexGuard::unlocked(&mut queue, || {
                tracing::warn!("{new} log lines were dropped: nobody read them");
            });
        }
        if let Some((to, line)) = queue.lines.pop_front() {
            MutexGuard::unlocked(&mut queue, || write_now(to, &line));
            queue.bytes -= line.len();
        } else {
            queue.busy = false;
            CHANGED.notify_all();
            CHANGED.wait_while(&mut queue, |queue| !queue.busy);
        }
    }
}

/// Waits for the reader. An error has no place where it could be told.
fn write_now(to: To, line: &[u8]) {
    let _ = match (to, SOCKET.get()) {
        (To::Journal, Some(socket)) => socket.send_to(line, JOURNAL).map(drop),
        _ => io::stderr().write_all(line),
    };
}
