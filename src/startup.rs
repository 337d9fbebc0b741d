//! What a program tells the kernel and the allocator before it has threads: to hold signals back, to hide its memory
//! from other processes, and to let all threads share one heap.
//!
//! Signals wait until the program is ready for them. Without this, an early signal would end the program. Examples: a
//! SIGHUP (reload) that reaches a daemon while it still reads its configuration for the first time; or a signal that
//! guards ignore, sent to all processes of that name.

use std::sync::OnceLock;

/// Signals that guards and settlers ignore.
const HELD: [i32; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

/// What was blocked when this process was started.
static BEFORE: OnceLock<libc::sigset_t> = OnceLock::new();

/// Nobody of the same user may look into this process, whatever secrets it holds: see docs/security.md. To be said
/// again after each exec, and not by what a command becomes. Called before `main`.
pub(crate) fn hide() {
    // SAFETY: takes no pointers. Should it fail, all goes on as it did.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
}

/// All threads share one heap. With one for each, memory that is freed after a start stays with some of them, by
/// chance: up to 5 MiB of a daemon with 10,000 jobs. Large blocks are no part of the heap, so they go back to the
/// system once they are free. Otherwise glibc keeps the largest one that there ever was: of an answer with 1,000 jobs,
/// 6 MiB.
pub(crate) fn share_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers. Should it fail, all goes on as it did.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
    }
}

/// From now on they wait. Called before `main`, when there is one thread.
pub(crate) fn hold() {
    let before = change(libc::SIG_BLOCK, &set(&HELD));
    let _ = BEFORE.set(before);
}

/// Only SIGHUP still waits: whatever else comes may end a process that has not begun yet.
pub(crate) fn release_all_but_hangup() {
    restore();
    change(libc::SIG_BLOCK, &set(&[libc::SIGHUP]));
}

/// A file that would grow beyond the limit (`ulimit -f`) is an error of that write, and not the end of this process.
/// Guards reset what they inherit.
pub(crate) fn outlive_the_limit_on_files() {
    // SAFETY: a valid signal, and a valid disposition.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// What waits arrives now, in this thread, and nothing waits any more.
pub(crate) fn release() {
    change(libc::SIG_UNBLOCK, &set(&HELD));
}

/// As [`release`], but for what was blocked by whoever started this process.
pub(crate) fn restore() {
    if let Some(before) = BEFORE.get() {
        change(libc::SIG_SETMASK, before);
    }
}

fn set(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: all-zero is a valid sigset_t, which is initialised before use; the numbers are valid.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Changes what is blocked in this thread; returns what was before.
fn change(how: i32, signals: &libc::sigset_t) -> libc::sigset_t {
    let mut before = set(&[]);
    // SAFETY: both sets are valid.
    unsafe { libc::pthread_sigmask(how, signals, &raw mut before) };
    before
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    /// In a process of its own: where others have freed much, a block may come from what they have left.
    #[test]
    fn a_large_block_is_never_part_of_the_heap() {
        let name = "startup::tests::a_large_block_is_never_part_of_the_heap";
        if crate::guard::tests::ran_elsewhere(name) {
            return;
        }
        share_heap();
        for _ in 0..3 {
            let block = vec![1_u8; 4 << 20];
            // SAFETY: malloc has written the block's size there; its second bit says that the block is mapped alone.
            let size = unsafe { block.as_ptr().cast::<usize>().sub(1).read() };
            assert_eq!(size & 2, 2);
        }
    }
}
