//! The commands that the measured daemons run: this bench's own binary, started with a hidden argument.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use soloist::clock::{Boottime, wall_us};

/// Appends `planned_ms started_us` to the file that follows it.
pub const NOW: &str = "__now";
/// Says in the directory that follows it who runs which attempt; the first attempt then shows with a file that it
/// lives until somebody ends it.
pub const HOLD: &str = "__hold";

pub fn path() -> PathBuf {
    std::env::current_exe().expect("our own path")
}

/// True: this process was one of those commands, and is done.
pub fn main() -> bool {
    let now = wall_us();
    let mut args = std::env::args_os().skip(1);
    let Some(mode) = args.next().filter(|a| a == NOW || a == HOLD) else {
        return false;
    };
    let place = PathBuf::from(args.next().expect("a path"));
    if mode == NOW {
        let planned = variable("SOLOIST_OCCURRENCE_MS");
        append(&place, &format!("{planned} {now}\n"));
    } else {
        hold(&place, now);
    }
    true
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| "-".to_owned())
}

/// In one write, so that lines of several processes do not mix.
fn append(path: &Path, line: &str) {
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .expect("a file to write to");
    file.write_all(line.as_bytes()).expect("room for a line");
}

fn hold(dir: &Path, now: i64) {
    let attempt = variable("SOLOIST_ATTEMPT");
    let pid = std::process::id();
    let beats = File::create(dir.join(format!("beat-{pid}"))).expect("a file for the beats");
    append(
        &dir.join("starts"),
        &format!(
            "{attempt} {} {pid} {} {now}\n",
            variable("SOLOIST_INSTANCE"),
            std::os::unix::process::parent_id()
        ),
    );
    if attempt != "1" {
        return;
    }
    // Somebody ends us; a minute is for the case that nobody does.
    let end = Boottime::now() + Duration::from_secs(60);
    while Boottime::now() < end {
        let _ = beats.write_all_at(&wall_us().to_le_bytes(), 0);
        std::thread::sleep(Duration::from_micros(500));
    }
}
