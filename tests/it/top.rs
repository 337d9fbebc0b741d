//! `soloist top` on a terminal of its own: what it shows, what it does, and how it leaves the terminal.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    os::{
        fd::{FromRawFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::Signal;

use crate::support::{GENEROUS, process, server::RedisServer, wait_for, wait_until};

const EXE: &str = env!("CARGO_BIN_EXE_soloist");
const LEFT: &str = "\x1b[?1049l";

/// A terminal of `columns` x `rows`, and a shell on it that runs `soloist top`.
struct Terminal {
    dir: tempfile::TempDir,
    master: File,
    shell: Child,
    daemon: Child,
    seen: String,
}

impl Terminal {
    fn start(variables: &[(&str, &str)], columns: u16, rows: u16) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("store.db");
        let url = format!("sqlite:{}", file.display());
        Self::start_on(dir, &url, variables, columns, rows)
    }

    fn start_on(
        dir: tempfile::TempDir,
        url: &str,
        variables: &[(&str, &str)],
        columns: u16,
        rows: u16,
    ) -> Self {
        let jobs = format!(
            "[store]\nurl = '{url}'\n[jobs.tidy]\nschedule = []\nlease = '1h'\ncommand = 'echo tidied; touch ran'\n"
        );
        fs::write(dir.path().join("jobs.toml"), jobs).expect("a file");
        let plain = |mut command: Command| {
            for name in [
                "SOLOIST_CONFIG",
                "SOLOIST_LOG",
                "SOLOIST_STORE_URL",
                "NO_COLOR",
                "LC_ALL",
                "LC_CTYPE",
            ] {
                command.env_remove(name);
            }
            command.current_dir(dir.path());
            command
        };
        let mut daemon = plain(process::mortal(EXE));
        daemon.args(["run", "--instance", "web-1"]);
        daemon
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let daemon = daemon.spawn().expect("soloist starts");
        if url.starts_with("sqlite:") {
            // Later the terminal gets only what changes of a word.
            wait_until("the job is registered", GENEROUS, || {
                let mut status = plain(process::mortal(EXE));
                let said = status.args(["status", "--json"]).output();
                let said = said.expect("soloist starts").stdout;
                String::from_utf8_lossy(&said)
                    .replace(' ', "")
                    .contains("\"known\":true")
            });
        }
        let (mut master, mut slave) = (-1, -1);
        let size = libc::winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: two valid pointers and a valid size; the others may be null.
        let made = unsafe {
            libc::openpty(
                &raw mut master,
                &raw mut slave,
                std::ptr::null_mut(),
                std::ptr::null(),
                &raw const size,
            )
        };
        assert_eq!(made, 0, "a terminal");
        // SAFETY: made just now, and nobody else's.
        let (master, slave) =
            unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        rustix::io::ioctl_fionbio(&master, true).expect("our end");
        let script = r#"stty -g > before
            set -m
            "$EXE" top & echo $! > pid; fg > /dev/null
            echo "code $?"
            while [ -n "$(jobs -s)" ]; do echo asleep; read line; fg > /dev/null; echo "code $?"; done
            stty -g > after; echo over"#;
        let mut shell = plain(Command::new("/bin/bash"));
        let end = || slave.try_clone().expect("a descriptor");
        shell
            .args(["-c", script])
            .env("EXE", EXE)
            .env("TERM", "xterm-256color")
            .env("LANG", "C.UTF-8");
        shell.envs(variables.iter().copied());
        shell.stdin(end()).stdout(end()).stderr(end());
        // SAFETY: async-signal-safe calls, and nothing is allocated.
        unsafe {
            shell.pre_exec(|| {
                process::default_signals();
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            });
        }
        let shell = shell.spawn().expect("a shell");
        Self {
            dir,
            master: master.into(),
            shell,
            daemon,
            seen: String::new(),
        }
    }

    fn press(&mut self, keys: &str) {
        self.master
            .write_all(keys.as_bytes())
            .expect("our end of it");
    }

    fn look(&mut self) {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = self.master.read(&mut bytes) {
            self.seen.push_str(&String::from_utf8_lossy(&bytes[..n]));
        }
    }

    /// Waits for a text that is shown from now on, and forgets what was shown before it.
    #[track_caller]
    fn wait_shown(&mut self, text: &str) -> String {
        let begun = Instant::now();
        loop {
            self.look();
            if let Some(at) = self.seen.find(text) {
                let rest = self.seen.split_off(at + text.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            assert!(
                begun.elapsed() < GENEROUS,
                "no {text:?} on the terminal: {:?}",
                self.seen
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until all of these are on the screen, which it has drawn anew again and again: otherwise only what changes
    /// is drawn.
    #[track_caller]
    fn wait_screen(&mut self, texts: &[&str]) {
        wait_until("what the screen shows", GENEROUS, || {
            self.seen.clear();
            self.press("\x0c");
            std::thread::sleep(Duration::from_millis(200));
            self.look();
            texts.iter().all(|text| self.seen.contains(text))
        });
    }

    #[track_caller]
    fn pid(&self) -> u32 {
        let file = self.dir.path().join("pid");
        wait_for("its process", GENEROUS, || {
            fs::read_to_string(&file)
                .ok()?
                .strip_suffix('\n')?
                .parse()
                .ok()
        })
    }

    /// The terminal has the settings that it had, its own screen and its cursor.
    #[track_caller]
    fn as_before(&mut self) {
        self.wait_shown("over");
        let text = |name: &str| fs::read_to_string(self.dir.path().join(name)).expect("settings");
        assert!(!text("before").is_empty());
        assert_eq!(text("before"), text("after"));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        for child in process::children(self.shell.id()) {
            process::signal(child, Signal::KILL);
        }
        self.shell.kill().ok();
        self.shell.wait().ok();
        process::end_soloists_in(self.dir.path());
        self.daemon.kill().ok();
        self.daemon.wait().ok();
    }
}

#[test]
fn a_job_is_triggered_and_the_terminal_is_as_it_was() {
    let mut t = Terminal::start(&[], 80, 24);
    t.wait_shown("tidy");
    // The store knows the job.
    t.wait_shown("not yet");
    t.press("t");
    t.wait_shown("Run tidy once now");
    t.press("y");
    t.wait_shown("claims");
    wait_until("its run", GENEROUS, || t.dir.path().join("ran").exists());
    t.press("\r");
    t.wait_shown("tidied");
    t.press("q");
    t.press("q");
    let end = t.wait_shown("code 0");
    assert!(end.contains(LEFT) && end.contains("\x1b[?25h"), "{end:?}");
    t.as_before();
}

#[test]
fn a_signal_ends_it_and_the_terminal_is_as_it_was() {
    for (signal, code) in [
        (Signal::TERM, "code 143"),
        (Signal::HUP, "code 129"),
        (Signal::INT, "code 130"),
    ] {
        let mut t = Terminal::start(&[], 80, 24);
        t.wait_shown("tidy");
        process::signal(t.pid(), signal);
        let end = t.wait_shown(code);
        assert!(end.contains(LEFT) && end.contains("\x1b[?25h"), "{end:?}");
        t.as_before();
    }
}

#[test]
fn a_panic_leaves_the_terminal_as_it_was() {
    let mut t = Terminal::start(&[("SOLOIST_FAILPOINT", "top_redraws")], 80, 24);
    t.wait_shown("tidy");
    t.press("\x0c");
    let end = t.wait_shown("panicked at");
    assert!(end.contains(LEFT) && end.contains("\x1b[?25h"), "{end:?}");
    // Its message is on the terminal's own screen, and its lines begin at the left.
    let rest = t.wait_shown("code 101");
    assert!(rest.contains("top_redraws`\r\n"), "{rest:?}");
    t.as_before();
}

#[test]
fn it_is_suspended_and_comes_back() {
    let mut t = Terminal::start(&[], 80, 24);
    t.wait_shown("tidy");
    t.press("\x1a");
    let end = t.wait_shown("asleep");
    assert!(end.contains(LEFT) && end.contains("\x1b[?25h"), "{end:?}");
    t.press("\n");
    t.wait_shown("\x1b[?1049h");
    t.wait_shown("tidy");
    process::signal(t.pid(), Signal::TSTP);
    t.wait_shown("asleep");
    t.press("\n");
    t.wait_shown("tidy");
    t.press("q");
    t.wait_shown("code 0");
    t.as_before();
}

/// Neither a store that is away when it starts nor the wait of a new fleet is silent.
#[test]
fn it_starts_without_the_store_and_goes_on_when_that_comes() {
    let mut server = RedisServer::start();
    server.kill();
    let dir = tempfile::tempdir().expect("a directory");
    let mut t = Terminal::start_on(dir, &server.url(), &[], 200, 50);
    t.wait_screen(&[
        "no answer from the store yet, for ",
        "not available",
        "reach",
    ]);
    server.revive(None);
    t.wait_screen(&[
        "jobs wait up to ",
        "the store is new, ",
        "--new-fleet",
        "running,",
    ]);
    server.kill();
    t.wait_screen(&[
        "no answer from the store for ",
        "this is what was known then",
    ]);
    t.press("q");
    t.wait_shown("code 0");
    t.as_before();
}

#[test]
fn a_small_terminal_without_colours_or_utf8_is_served() {
    let mut t = Terminal::start(&[("NO_COLOR", "1"), ("LANG", "C")], 40, 10);
    let mut seen = t.wait_shown("not yet");
    t.press("3");
    seen += &t.wait_shown("web-1");
    t.press("q");
    seen += &t.wait_shown("code 0");
    assert!(seen.is_ascii(), "{seen:?}");
    let colour = |n: &str| seen.contains(&format!("\x1b[{n}"));
    assert!(
        !(30..38).any(|n| colour(&format!("{n}m"))) && !colour("38;5"),
        "{seen:?}"
    );
    t.as_before();
}

#[test]
fn who_has_no_terminal_is_told_what_to_use() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = dir.path().join("store.db");
    fs::write(&store, "").expect("a file");
    let jobs = format!("[store]\nurl = 'sqlite:{}'\n", store.display());
    fs::write(dir.path().join("jobs.toml"), jobs).expect("a file");
    let mut command = process::mortal(EXE);
    command
        .arg("top")
        .current_dir(dir.path())
        .env_remove("SOLOIST_CONFIG")
        .stdin(Stdio::null());
    let out = command.output().expect("soloist starts");
    assert_eq!(out.status.code(), Some(64));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        said.contains("needs a terminal") && said.contains("soloist status"),
        "{said}"
    );
}
