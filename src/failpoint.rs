//! Places where tests end the daemon as SIGKILL would, in debug builds only: `SOLOIST_FAILPOINT=<name>`, once if
//! `SOLOIST_FAILPOINT_ONCE` names a file, which is made then.

/// Ends this process when the environment says so.
pub(crate) fn here(name: &str) {
    if cfg!(debug_assertions) && std::env::var("SOLOIST_FAILPOINT").is_ok_and(|v| v == name) {
        if let Ok(once) = std::env::var("SOLOIST_FAILPOINT_ONCE")
            && std::fs::File::create_new(once).is_err()
        {
            return;
        }
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
