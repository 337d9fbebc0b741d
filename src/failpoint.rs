//! Places where a debug build kills itself with SIGKILL, panics, or acts at all, if `SOLOIST_FAILPOINT` has the name of
//! the place, or its name in a list with commas. With `SOLOIST_FAILPOINT_ONCE=<file>` a process kills itself only if
//! the file does not exist yet; it creates the file first.

fn wanted(name: &str) -> bool {
    cfg!(debug_assertions)
        && std::env::var("SOLOIST_FAILPOINT").is_ok_and(|v| v.split(',').any(|n| n == name))
}

/// In a debug build only when the environment says so: for what a daemon does to what others have left, because a test
/// is to see who did it.
pub(crate) fn lets(name: &str) -> bool {
    !cfg!(debug_assertions) || wanted(name)
}

/// Panics when the environment says so.
pub(crate) fn panics(name: &str) {
    assert!(!wanted(name), "the failpoint `{name}`");
}

/// A sixtieth of this time when the environment says so: for what nobody waits in a test.
#[cfg(feature = "notify")]
pub(crate) fn hurry(time: std::time::Duration) -> std::time::Duration {
    match wanted("hurry") {
        true => time / 60,
        false => time,
    }
}

/// Ends this process when the environment says so.
pub(crate) fn here(name: &str) {
    if wanted(name) {
        if let Ok(once) = std::env::var("SOLOIST_FAILPOINT_ONCE")
            && std::fs::File::create_new(once).is_err()
        {
            return;
        }
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
