//! What the black-box tests share: servers, fleets, the witness job and its judge, processes, waiting.

pub mod cgroup;
pub mod fleet;
pub mod process;
pub mod proxy;
pub mod server;
pub mod trace;
pub mod witness;

use std::{
    io::Write as _,
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use soloist::{
    logic::claim::{OnCrash, Presence, Register},
    model::{InstanceId, JobName, Occurrence},
};

/// How long a condition may take that a healthy machine meets in a moment: only a broken program waits it out.
pub const GENEROUS: Duration = Duration::from_secs(60);

/// The first registration of a job, by the instance `a`; in the incarnation that `adopt` names.
pub fn registration(job: &JobName, adopt: Option<String>) -> Register {
    Register {
        job: job.clone(),
        schedule: "s".to_owned(),
        definition: "d".to_owned(),
        known: Occurrence(0),
        adopt,
        epoch: None,
        lost: vec![],
        counted_from: i64::MAX,
        lost_before: 0,
        presence: Presence::New,
        owed: vec![],
        back_at: 0,
        waits_since: 0,
        remembered: Default::default(),
        instance: InstanceId::new("a"),
        host: "h".to_owned(),
        on_crash: OnCrash::Fail,
        max_attempts: 1,
    }
}

/// This host's clock, Unix ms.
pub fn now_ms() -> i64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    t.tv_sec * 1000 + t.tv_nsec / 1_000_000
}

/// Calls `look` again and again; returns the first value that it finds.
///
/// # Panics
/// When there is none within `limit`; the message says what was awaited.
#[track_caller]
pub fn wait_for<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            begun.elapsed() < limit,
            "waited {limit:?} in vain for this: {what}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    wait_for(what, limit, || holds().then_some(()));
}

/// A pipe that is full: a writer waits until somebody reads.
pub fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let size = rustix::pipe::fcntl_getpipe_size(&writer).expect("its size");
    std::io::Write::write_all(&mut writer, &vec![b'\n'; size]).expect("room");
    (reader, writer)
}

/// Says why a test, or a part of one, is not run here: on stderr, past the test harness, and in the file that
/// `SOLOIST_TEST_SKIPPED` names, which `test.sh` lists at its end. In CI all that the tests need is there: what would
/// be skipped fails.
///
/// # Panics
/// In CI.
#[track_caller]
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let ci = std::env::var("CI").is_ok_and(|ci| !matches!(ci.as_str(), "" | "0" | "false"));
    assert!(!ci, "{test} must not be skipped in CI: {reason}");
    let line = format!("{test}: {reason}\n");
    let _ = write!(std::io::stderr(), "skipped: {line}");
    if let Some(file) = std::env::var_os("SOLOIST_TEST_SKIPPED") {
        let mut file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(file)
            .expect("the list of skipped tests");
        file.write_all(line.as_bytes())
            .expect("the list of skipped tests");
    }
}

/// Seconds that the long tests last: `SOLOIST_TEST_SECONDS`, else 10.
pub fn test_seconds() -> u64 {
    std::env::var("SOLOIST_TEST_SECONDS")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(10)
}

/// Fleets measure milliseconds, so that not all of them may run at one time, however many test threads there are.
static SLOTS: Mutex<usize> = Mutex::new(12);
static SLOT_FREE: Condvar = Condvar::new();

/// A permit to run that many instances at one time; released on drop.
pub struct Slots(usize);

impl Slots {
    pub fn take(n: usize) -> Self {
        let mut free = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
        while *free < n {
            free = SLOT_FREE.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= n;
        Self(n)
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        *SLOTS.lock().unwrap_or_else(PoisonError::into_inner) += self.0;
        SLOT_FREE.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    const ROLE: &str = "SOLOIST_TEST_SKIPS";

    #[test]
    fn what_is_skipped_is_listed_and_fails_in_ci() {
        if std::env::var_os(ROLE).is_some() {
            return super::skip("there is no moon");
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        let list = dir.path().join("skipped");
        let name = "support::tests::what_is_skipped_is_listed_and_fails_in_ci";
        let skips = |ci: &str| {
            Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", name])
                .envs([(ROLE, "1"), ("CI", ci)])
                .env("SOLOIST_TEST_SKIPPED", &list)
                .output()
                .expect("it starts")
        };
        let line = format!("{name}: there is no moon\n");
        for ci in ["", "0", "false"] {
            let ran = skips(ci);
            let err = String::from_utf8_lossy(&ran.stderr).into_owned();
            assert!(ran.status.success(), "{ci}: {err}");
            assert!(err.contains(&format!("skipped: {line}")), "{ci}: {err}");
        }
        let text = std::fs::read_to_string(&list).expect("the list");
        assert_eq!(text, line.repeat(3));
        for ci in ["true", "1"] {
            let ran = skips(ci);
            let out = String::from_utf8_lossy(&ran.stdout).into_owned();
            assert!(!ran.status.success(), "{ci}");
            assert!(
                out.contains("must not be skipped in CI: there is no moon"),
                "{ci}: {out}"
            );
        }
        let text = std::fs::read_to_string(&list).expect("the list");
        assert_eq!(text, line.repeat(3), "what fails is not skipped");
    }
}
