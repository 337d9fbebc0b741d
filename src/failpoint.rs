//! Places where tests end a process as SIGKILL would, or where it panics, in debug builds only:
//! `SOLOIST_FAILPOINT=<name>`, once if `SOLOIST_FAILPOINT_ONCE` names a file, which is made then.

fn wanted(name: &str) -> bool {
    cfg!(debug_assertions) && std::env::var("SOLOIST_FAILPOINT").is_ok_and(|v| v == name)
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
