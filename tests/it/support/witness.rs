//! The job that writes down that it runs: compiled once for each test process.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The program: `witness FILE [for=MS] [beat=MS] [exit=CODE] [life=MS] [ignore-term] [daemon] [setsid]`.
///
/// # Panics
/// Without a C compiler.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        // In the build directory, so that nothing is left elsewhere; test processes do not wait for each other.
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (source, made) = (dir.join("witness.c"), dir.join(format!("witness.{}", std::process::id())));
        let program = dir.join("witness");
        std::fs::create_dir_all(dir).expect("the build directory");
        std::fs::write(&source, include_str!("witness.c")).expect("write the witness's source");
        let output = Command::new("cc")
            .args(["-O1", "-Wall", "-Werror", "-o"])
            .args([&made, &source])
            .output()
            .unwrap_or_else(|e| {
                panic!("cannot run the C compiler `cc`: {e}; the tests need one (apt-get install gcc libc6-dev)")
            });
        assert!(
            output.status.success(),
            "cc failed on the witness: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        std::fs::rename(&made, &program).expect("put the witness in place");
        program
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use crate::support::trace::Trace;

    #[test]
    fn the_witness_writes_what_the_judge_reads() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = dir.path().join("trace");
        let status = Command::new(super::program())
            .arg(&file)
            .args(["for=60", "beat=20", "exit=3"])
            .env("SOLOIST_JOB", "a")
            .env("SOLOIST_OCCURRENCE_MS", "1000")
            .env("SOLOIST_FENCING_TOKEN", "1000001")
            .env("SOLOIST_ATTEMPT", "1")
            .env("SOLOIST_INSTANCE", "i1")
            .env("SOLOIST_TRIGGER", "schedule")
            .env("SOLOIST_RUN_ID", "r")
            .status()
            .expect("the witness runs");
        assert_eq!(status.code(), Some(3));
        let trace = Trace::read(&file);
        let runs = trace.runs();
        assert_eq!(runs.len(), 1);
        let run = &runs[0];
        assert_eq!(
            (run.job.as_str(), run.occurrence, run.token, run.attempt),
            ("a", 1000, 1_000_001, 1)
        );
        assert!(run.ended);
        let ms = (run.last_ns - run.start_ns) / 1_000_000;
        assert!(ms >= 60, "{ms}");
    }
}
