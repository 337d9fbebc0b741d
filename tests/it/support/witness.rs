//! The job that writes down that it runs, and a slow host: compiled once for each test process.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The program: `witness FILE [for=MS] [beat=MS] [exit=CODE] [life=MS] [ignore-term] [daemon] [setsid]`.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| compile("witness", include_str!("witness.c"), &[]))
}

/// A library that makes a program slow in one call, and the variables for it: the first `call`, which also makes the
/// file `once`, takes `ms`.
pub fn slow(call: &str, ms: u64, once: &Path) -> [(String, String); 4] {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let text = include_str!("slow.c");
        compile("slow.so", text, &["-shared", "-fPIC"])
    });
    [
        ("LD_PRELOAD", library.display().to_string()),
        ("SLOW_CALL", call.to_owned()),
        ("SLOW_MS", ms.to_string()),
        ("SLOW_ONCE", once.display().to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
}

/// A program whose first thread ends at once, while another writes its pid into the file that is its argument, and goes
/// on, whatever SIGTERM says.
pub fn headless() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| compile("headless", include_str!("headless.c"), &["-pthread"]))
}

/// The program `unruly MODE FILE`: processes that are hard to be rid of.
pub fn unruly() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| compile("unruly", include_str!("unruly.c"), &["-pthread"]))
}

/// A library that makes a program's wall clock wrong by what stands in `file` (µs, eight bytes), and the variables for
/// it.
pub fn stepped(file: &Path) -> [(&'static str, String); 2] {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let text = include_str!("step.c");
        compile("step.so", text, &["-shared", "-fPIC"])
    });
    [
        ("LD_PRELOAD", library.display().to_string()),
        ("STEP_FILE", file.display().to_string()),
    ]
}

/// A library that refuses clone3.
pub fn refuse_clone3() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let text = include_str!("refuse.c");
        compile("refuse.so", text, &["-shared", "-fPIC"])
    })
}

/// Compiles in the build directory, so that nothing is left elsewhere; test processes do not wait for each other.
///
/// # Panics
/// Without a C compiler.
fn compile(name: &str, text: &str, flags: &[&str]) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let me = std::process::id();
    let (source, made) = (
        dir.join(format!("{name}.{me}.c")),
        dir.join(format!("{name}.{me}")),
    );
    let product = dir.join(name);
    std::fs::create_dir_all(dir).expect("the build directory");
    std::fs::write(&source, text).expect("write the source");
    let output = Command::new("cc")
        .args(["-O1", "-Wall", "-Werror"])
        .args(flags)
        .arg("-o")
        .args([&made, &source])
        .output()
        .unwrap_or_else(|e| {
            panic!("cannot run the C compiler `cc`: {e}; the tests need one (apt-get install gcc libc6-dev)")
        });
    assert!(
        output.status.success(),
        "cc failed on {name}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    std::fs::remove_file(&source).ok();
    std::fs::rename(&made, &product).expect("put it in place");
    product
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
        let mut trace = Trace::default();
        trace.read_on(&file);
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
