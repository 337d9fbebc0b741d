//! `soloist exec`: the built binary as a crontab or a script would call it, over a real Redis and over SQLite files.

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use soloist::{LockClient, lock::Period};

use crate::support::{
    GENEROUS, full_pipe, process,
    server::RedisServer,
    wait_for, wait_until,
    witness::{headless, slow},
};

const EXE: &str = env!("CARGO_BIN_EXE_soloist");

/// A store, and a directory for what the commands write.
struct Place {
    dir: tempfile::TempDir,
    server: Option<RedisServer>,
}

/// Both stores, one after the other.
fn places() -> [Place; 2] {
    [Place::redis(), Place::sqlite()]
}

impl Place {
    fn sqlite() -> Self {
        Self {
            dir: tempfile::tempdir().expect("a directory"),
            server: None,
        }
    }
    fn redis() -> Self {
        let mut place = Self::sqlite();
        place.server = Some(RedisServer::start());
        place
    }

    fn server(&mut self) -> &mut RedisServer {
        self.server.as_mut().expect("a place with a server")
    }

    fn url(&self) -> String {
        match &self.server {
            Some(server) => server.url(),
            None => format!("sqlite:{}", self.file("locks.db").display()),
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap_or_default()
    }

    /// The number that a command has written.
    #[track_caller]
    fn pid(&self, name: &str) -> u32 {
        wait_for(&format!("a number in {name}"), GENEROUS, || {
            let text = self.text(name);
            text.strip_suffix('\n')?.parse().ok()
        })
    }

    /// `soloist exec` with these options and this shell script, in our directory.
    fn exec(&self, options: &[&str], script: &str) -> Command {
        let mut command = self.command(options);
        command.args(["--", "/bin/sh", "-c", script]);
        command
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = process::mortal(EXE);
        command
            .arg("exec")
            .args(options)
            .current_dir(self.dir.path())
            .env("SOLOIST_STORE_URL", self.url())
            .env_remove("SOLOIST_CONFIG")
            .env_remove("SOLOIST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs the script under lock `l` to its end.
    fn run(&self, options: &[&str], script: &str) -> Ran {
        Ran::of(
            self.exec(&[&["--lock", "l"], options].concat(), script)
                .output()
                .expect("soloist starts"),
        )
    }

    /// Starts the script under lock `l`.
    fn start(&self, options: &[&str], script: &str) -> Running {
        let command = self.exec(&[&["--lock", "l"], options].concat(), script);
        Running::of(command)
    }

    /// Holds the lock `l` until the file `go` is there.
    fn hold(&self, options: &[&str]) -> Running {
        let holder = self.start(
            options,
            "echo $$ > holder; while [ ! -e go ]; do sleep 0.01; done",
        );
        self.pid("holder");
        holder
    }

    fn go(&self) {
        File::create(self.file("go")).expect("a file");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        process::end_soloists_in(self.dir.path());
    }
}

#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn of(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).expect("UTF-8"),
            err: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
    #[track_caller]
    fn assert(&self, code: i32, out: &str, err: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.out, out, "{self:?}");
        assert!(
            if err.is_empty() {
                self.err.is_empty()
            } else {
                self.err.contains(err)
            },
            "{self:?}"
        );
    }
}

/// A started `exec`; killed on drop.
struct Running(Child);

impl Running {
    fn of(mut command: Command) -> Self {
        Self(command.spawn().expect("soloist starts"))
    }
    fn pid(&self) -> u32 {
        self.0.id()
    }
    fn signal(&self, signal: Signal) {
        process::signal(self.pid(), signal);
    }
    /// Waits for its end, and for that of its output.
    #[track_caller]
    fn end(&mut self) -> Ran {
        let status = wait_for("the end of soloist exec", GENEROUS, || {
            self.0.try_wait().expect("our child")
        });
        let text = |pipe: Option<&mut dyn Read>| {
            let mut bytes = vec![];
            if let Some(pipe) = pipe {
                pipe.read_to_end(&mut bytes).expect("readable");
            }
            String::from_utf8(bytes).expect("UTF-8")
        };
        Ran {
            code: status.code(),
            out: text(self.0.stdout.as_mut().map(|p| p as _)),
            err: text(self.0.stderr.as_mut().map(|p| p as _)),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn it_exits_as_the_command_did_or_as_shells_do_without_one() {
    for place in places() {
        place.run(&[], "exit 0").assert(0, "", "");
        place.run(&[], "exit 7").assert(7, "", "");
        place.run(&[], "kill -KILL $$").assert(128 + 9, "", "");
        place.run(&[], "kill -USR1 $$").assert(128 + 10, "", "");

        let no_program = |program: &str| {
            let mut command = place.command(&["--lock", "l", program]);
            Ran::of(command.output().expect("soloist starts"))
        };
        no_program("no-such-command").assert(127, "", "not found in PATH");
        no_program("").assert(127, "", "not found in PATH");
        no_program("/no/such/command").assert(127, "", "does not exist");
        no_program("/etc/passwd").assert(126, "", "is not executable");
        no_program("/").assert(126, "", "is not executable");
        // Each released the lock.
        place.run(&[], "true").assert(0, "", "");
    }
}

/// Its other threads run, although it shows as a zombie.
#[test]
fn a_command_whose_first_thread_has_ended_has_the_lock_until_all_of_it_is_gone() {
    for place in places() {
        let mut holder = place.start(&[], &format!("exec {} pid", headless().display()));
        let pid = place.pid("pid");
        wait_until("its first thread has ended", GENEROUS, || {
            !process::alive(pid)
        });
        place.run(&[], "true").assert(75, "", "has it");
        holder.signal(Signal::TERM);
        place.run(&[], "true").assert(75, "", "has it");
        // Then its guard ends the command, and releases the lock.
        holder.signal(Signal::KILL);
        holder.end();
        let threads = format!("ls /proc/{pid}/task 2>/dev/null | wc -l");
        let next = place.run(&["--wait", "1m"], &threads);
        assert_eq!(next.code, Some(0), "{next:?}");
        let left: u32 = next.out.trim().parse().expect("a number");
        assert!(left <= 1, "{next:?}");
    }
}

#[test]
fn the_command_knows_its_lock_and_tokens_grow() {
    for place in places() {
        let script = "echo $SOLOIST_LOCK $SOLOIST_FENCING_TOKEN $MINE";
        let tokens = [1, 2].map(|_| {
            let mut command = place.exec(&["--lock", "night ly"], script);
            let ran = Ran::of(command.env("MINE", "own").output().expect("soloist starts"));
            let words: Vec<&str> = ran.out.split_whitespace().collect();
            let ["night", "ly", token, "own"] = words[..] else {
                panic!("{ran:?}");
            };
            token.parse::<u64>().expect("a number")
        });
        assert!(tokens[0] < tokens[1], "{tokens:?}");
    }
}

#[test]
fn stdin_stdout_and_stderr_are_the_commands_own() {
    let place = Place::sqlite();
    let mut command = place.exec(&["--lock", "l"], "cat; echo seen >&2; exit 3");
    let mut running = Running::of({
        command.stdin(Stdio::piped());
        command
    });
    // More than any pipe holds, and not text.
    let bytes: Vec<u8> = (0..1_000_003_u32).map(|n| (n % 251) as u8).collect();
    let mut stdin = running.0.stdin.take().expect("a pipe");
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let mut back = vec![];
    let mut stdout = running.0.stdout.take().expect("a pipe");
    stdout.read_to_end(&mut back).expect("readable");
    writer.join().expect("written").expect("all of it");
    assert!(back == bytes, "{} of {} bytes", back.len(), bytes.len());
    running.end().assert(3, "", "seen\n");
}

#[test]
fn who_is_at_the_other_end_notices_when_the_command_lets_go() {
    let place = Place::sqlite();
    let script = "exec <&- >&-; echo $$ > holder; while [ ! -e go ]; do sleep 0.01; done";
    let mut command = place.exec(&["--lock", "l"], script);
    command.stdin(Stdio::piped());
    let mut running = Running::of(command);
    place.pid("holder");
    // The reader sees the end of file, although `exec` still runs.
    let mut stdout = running.0.stdout.take().expect("a pipe");
    rustix::io::ioctl_fionbio(&stdout, true).expect("a pipe");
    wait_until("the end of its output", GENEROUS, || {
        matches!(stdout.read(&mut [0]), Ok(0))
    });
    let mut stdin = running.0.stdin.take().expect("a pipe");
    wait_until("nobody reads our pipe", GENEROUS, || {
        stdin.write_all(b"x").is_err()
    });
    assert!(running.0.try_wait().expect("our child").is_none());
    place.go();
    running.end().assert(0, "", "");
}

#[test]
fn a_command_has_the_descriptors_that_it_would_have_without_us() {
    let place = Place::sqlite();
    let show = "ls /proc/self/fd";
    let script = format!("exec 7< /dev/null; {show}; \"$EXE\" exec --lock l -- {show}");
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", &script])
        .env("EXE", EXE)
        .env("SOLOIST_STORE_URL", place.url());
    let ran = Ran::of(shell.output().expect("a shell"));
    let lines: Vec<&str> = ran.out.lines().collect();
    let (without, with) = lines.split_at(lines.len() / 2);
    assert!(without == with && with.contains(&"7"), "{ran:?}");
}

#[test]
fn a_command_ignores_what_it_would_ignore_without_us() {
    let place = Place::sqlite();
    for (ignored, libcs_own) in [
        ("PIPE", true),
        ("PIPE HUP USR1 CHLD RTMIN", false),
        ("", true),
        ("", false),
    ] {
        let show = "grep SigIgn /proc/self/status";
        let trap = if ignored.is_empty() {
            String::new()
        } else {
            format!("trap '' {ignored};")
        };
        let script = format!("{trap} {show}; \"$EXE\" exec --lock l -- {show}");
        let mut shell = Command::new("/bin/bash");
        shell
            .args(["-c", &script])
            .env("EXE", EXE)
            .env("SOLOIST_STORE_URL", place.url());
        // The two signals that libc reserves: a program that was started by its posix_spawn ignores them. SAFETY: a
        // system call with valid pointers, which is async-signal-safe.
        unsafe {
            shell.pre_exec(move || {
                for signal in [32, 33] {
                    let mut action = [0_usize; 8];
                    action[0] = if libcs_own {
                        libc::SIG_IGN
                    } else {
                        libc::SIG_DFL
                    };
                    let no = std::ptr::null_mut::<usize>();
                    libc::syscall(libc::SYS_rt_sigaction, signal, action.as_ptr(), no, 8_usize);
                }
                Ok(())
            });
        }
        let ran = Ran::of(shell.output().expect("bash"));
        let lines: Vec<&str> = ran.out.lines().collect();
        assert!(lines.len() == 2 && lines[0] == lines[1], "{ran:?}");
        let mask = lines[0].trim_start_matches("SigIgn:").trim();
        let mask = u64::from_str_radix(mask, 16).expect("a mask");
        assert_eq!(mask >> 31 & 3 == 3, libcs_own, "{ran:?}");
    }
}

#[test]
fn signals_reach_the_command_once() {
    for place in places() {
        for (signal, name) in [
            (Signal::TERM, "TERM"),
            (Signal::INT, "INT"),
            (Signal::HUP, "HUP"),
            (Signal::QUIT, "QUIT"),
            (Signal::USR1, "USR1"),
            (Signal::USR2, "USR2"),
            (Signal::WINCH, "WINCH"),
            (Signal::CONT, "CONT"),
        ] {
            for name in ["ready", "go", "got"] {
                fs::remove_file(place.file(name)).ok();
            }
            let script = format!(
                "trap 'echo {name} >> got' {name}; echo $$ > ready; while [ ! -e go ]; do sleep 0.01; done; exit 5"
            );
            let mut running = place.start(&[], &script);
            place.pid("ready");
            running.signal(signal);
            let got = format!("{name}\n");
            wait_until(&format!("SIG{name}"), GENEROUS, || place.text("got") == got);
            place.go();
            running.end().assert(5, "", "");
            // The command gets no further signal.
            assert_eq!(place.text("got"), got);
        }
    }
}

/// A terminal of our own, and a program that has it as its controlling one.
struct Terminal {
    master: File,
    child: Child,
    seen: String,
}

impl Terminal {
    fn start(place: &Place, script: &str) -> Self {
        let (mut master, mut slave) = (-1, -1);
        // SAFETY: two valid pointers; the others may be null.
        let made = unsafe {
            libc::openpty(
                &raw mut master,
                &raw mut slave,
                std::ptr::null_mut(),
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        assert_eq!(made, 0, "a terminal");
        // SAFETY: made just now, and nobody else's.
        let (master, slave) =
            unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        rustix::io::ioctl_fionbio(&master, true).expect("our end");
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", script])
            .env("EXE", EXE)
            .env("SOLOIST_STORE_URL", place.url())
            .current_dir(place.dir.path())
            .stdin(slave.try_clone().expect("a descriptor"))
            .stdout(slave.try_clone().expect("a descriptor"))
            .stderr(slave);
        // SAFETY: async-signal-safe calls, and nothing is allocated.
        unsafe {
            command.pre_exec(|| {
                process::default_signals();
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            });
        }
        let child = command.spawn().expect("a shell");
        Self {
            master: master.into(),
            child,
            seen: String::new(),
        }
    }

    fn press(&mut self, keys: &[u8]) {
        self.master.write_all(keys).expect("our end of it");
    }

    /// What it has shown so far.
    fn screen(&mut self) -> &str {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = self.master.read(&mut bytes) {
            self.seen.push_str(&String::from_utf8_lossy(&bytes[..n]));
        }
        &self.seen
    }

    #[track_caller]
    fn wait_shown(&mut self, text: &str) {
        let begun = Instant::now();
        while !self.screen().contains(text) {
            assert!(
                begun.elapsed() < GENEROUS,
                "no {text:?} on the terminal: {:?}",
                self.seen
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[track_caller]
    fn end(&mut self) -> Option<i32> {
        wait_for("the end of the terminal's shell", GENEROUS, || {
            self.screen();
            self.child.try_wait().expect("our child")
        })
        .code()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // With exec, its guard ends the command.
        for child in process::children(self.child.id()) {
            process::signal(child, Signal::KILL);
        }
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[test]
fn ctrl_c_is_left_to_the_terminal() {
    let place = Place::sqlite();
    // A command that leaves our group: a signal of the terminal to the group is not for it, and `exec` must not pass it
    // on.
    let mut terminal = Terminal::start(
        &place,
        r#"set -m
        "$EXE" exec --lock l -- setsid sh -c '
            trap "echo by us" INT; trap "echo on purpose; exit 5" USR1
            echo $PPID > guard; echo ready; while :; do sleep 0.01; done'
        echo "code $?""#,
    );
    terminal.wait_shown("ready");
    terminal.press(b"\x03");
    // Shown when the signal has been sent.
    terminal.wait_shown("^C");
    let exec = process::parent(place.pid("guard")).expect("the guard's parent");
    process::signal(exec, Signal::USR1);
    terminal.wait_shown("on purpose");
    terminal.wait_shown("code 5");
    assert!(!terminal.screen().contains("by us"), "{}", terminal.seen);
    terminal.end();
}

#[test]
fn ctrl_z_stops_both_and_fg_continues_both() {
    let place = Place::sqlite();
    let mut terminal = Terminal::start(
        &place,
        r#"set -m
        "$EXE" exec --lock l --lease 1h -- sh -c '
            mkfifo go; echo $$ > holder; read line < go; echo $line; exit 5'
        echo "stopped $?"; read line; fg; echo "code $?""#,
    );
    // One that does not fork: a shell that is in vfork while its child is stopped cannot be stopped itself.
    let command = place.pid("holder");
    terminal.press(b"\x1a");
    // The shell has its terminal back, with 128 + SIGTSTP or, as we stopped ourselves, SIGSTOP.
    terminal.wait_shown("stopped 14");
    wait_until("the command is stopped", GENEROUS, || {
        state(command) == Some('T')
    });
    terminal.press(b"\n");
    wait_until("the command goes on", GENEROUS, || {
        state(command) == Some('S')
    });
    fs::write(place.file("go"), "went on\n").expect("it reads");
    terminal.wait_shown("went on");
    terminal.wait_shown("code 5");
    terminal.end();
}

/// Whether the process has a socket, which here is its connection to the store.
fn has_socket(pid: u32) -> bool {
    let all = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    all.flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|target| target.to_string_lossy().starts_with("socket:"))
}

fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat[stat.rfind(')')? + 2..].chars().next()
}

#[test]
fn somebody_else_has_it() {
    for place in places() {
        let mut holder = place.hold(&[]);
        let who = format!(":{} has it; its lease lasts 1", holder.pid());
        place.run(&[], "echo run >> ran").assert(75, "", &who);
        place
            .run(&["-E", "3"], "echo run >> ran")
            .assert(3, "", &who);
        // No output that cron would mail.
        place.run(&["-E", "0"], "echo run >> ran").assert(0, "", "");
        place
            .run(&["--wait", "2s"], "echo run >> ran")
            .assert(75, "", "waiting for lock `l`: ");
        assert_eq!(place.text("ran"), "");
        place.go();
        holder.end().assert(0, "", "");
        place.run(&[], "echo run >> ran").assert(0, "", "");
    }
}

#[test]
fn a_waiter_has_the_lock_after_the_release() {
    for place in places() {
        // Only the release can end this wait: the lease lasts longer.
        let mut holder = place.hold(&["--lease", "1h"]);
        let mut waiter = place.start(&["--wait", "30s"], "echo mine");
        let mut line = [0; 8];
        let stderr = waiter.0.stderr.as_mut().expect("a pipe");
        stderr.read_exact(&mut line).expect("it says that it waits");
        assert_eq!(&line, b"soloist:");
        place.go();
        holder.end().assert(0, "", "");
        let ran = waiter.end();
        ran.assert(0, "mine\n", "waiting for lock `l`: ");
        assert!(ran.err.ends_with("; for at most 30s\n"), "{ran:?}");
        assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
    }
}

#[test]
fn a_waiter_that_is_told_to_end_leaves_nothing() {
    for place in places() {
        let mut holder = place.hold(&[]);
        for signal in [Signal::TERM, Signal::KILL] {
            let mut waiter = place.start(&["--wait", "30s", "--once-per", "366d"], "echo mine");
            let mut line = [0; 8];
            let stderr = waiter.0.stderr.as_mut().expect("a pipe");
            stderr.read_exact(&mut line).expect("it says that it waits");
            waiter.signal(signal);
            let ran = waiter.end();
            match signal {
                Signal::KILL => assert_eq!((ran.code, &*ran.out), (None, "")),
                _ => ran.assert(143, "", "waiting for lock"),
            }
        }
        place.go();
        holder.end().assert(0, "", "");
        // Neither the lock nor the period.
        place
            .run(&["--once-per", "366d"], "echo mine")
            .assert(0, "mine\n", "");
    }
}

#[tokio::test]
async fn a_waiter_hears_that_its_period_was_taken_meanwhile() {
    for place in places() {
        let mut holder = place.hold(&[]);
        let mut waiter = place.start(&["--wait", "30s", "--once-per", "366d"], "echo mine");
        let mut line = [0; 8];
        let stderr = waiter.0.stderr.as_mut().expect("a pipe");
        stderr.read_exact(&mut line).expect("it says that it waits");
        let other = LockClient::open(&place.url()).unwrap().named("other");
        let year = Duration::from_secs(366 * 24 * 3600);
        assert!(matches!(
            other.claim_period("l", year).await.unwrap(),
            Period::Claimed { .. }
        ));
        place.go();
        holder.end().assert(0, "", "");
        let ran = waiter.end();
        ran.assert(
            75,
            "",
            "the current period (366d) of lock `l` was already claimed by other",
        );
        // And nobody has the lock.
        place.run(&[], "echo mine").assert(0, "mine\n", "");
    }
}

/// Nor does a stderr that nobody reads.
#[test]
fn a_stderr_that_nobody_reads_stops_neither_a_wait_nor_the_release() {
    let place = Place::sqlite();
    let (_unread, full) = full_pipe();
    let unread = |mut command: Command| {
        command.stderr(full.try_clone().expect("a pipe"));
        Running::of(command)
    };
    let mut nothing = unread(place.command(&["--lock", "l", "no-such-command"]));
    assert_eq!(nothing.end().code, Some(127));
    let mut holder = place.hold(&[]);
    let mut waiter = unread(place.exec(&["--lock", "l", "--wait", "1m"], "echo mine"));
    wait_catches(&waiter);
    place.go();
    holder.end().assert(0, "", "");
    waiter.end().assert(0, "mine\n", "");
}

/// A store that takes connections and answers nothing keeps nobody who is told to end.
#[test]
fn who_is_told_to_end_says_what_it_leaves_and_ends_soon() {
    let mut place = Place::redis();
    for options in [&[][..], &["--wait", "30s"], &["--once-per", "1m"]] {
        place.server().stop();
        let mut waiting = place.start(options, "echo run >> ran");
        wait_catches(&waiting);
        wait_until("it asks its store", GENEROUS, || has_socket(waiting.pid()));
        waiting.signal(Signal::TERM);
        let ran = waiting.end();
        ran.assert(
            143,
            "",
            "the store did not answer within 1 s: if it still grants lock `l`, nobody can take it until its lease ends",
        );
        place.server().cont();
        assert_eq!(place.text("ran"), "");
    }
    // Nor does a file that another process has locked.
    let place = Place::sqlite();
    place.run(&[], "true").assert(0, "", "");
    let db = rusqlite::Connection::open(place.file("locks.db")).expect("the store's file");
    db.execute_batch("BEGIN IMMEDIATE").expect("a lock");
    let mut opening = place.start(&[], "echo run >> ran");
    wait_catches(&opening);
    opening.signal(Signal::TERM);
    opening.end().assert(143, "", "");
    assert_eq!(place.text("ran"), "");
}

/// Whoever stops it, a crontab or systemd, waits for it, too.
#[test]
fn who_is_told_to_end_leaves_the_release_to_its_guard_when_the_store_is_silent() {
    for place in places() {
        for told_first in [true, false] {
            // Longer than any patience: it cannot lapse.
            let mut holder = place.hold(&["--lease", "1h"]);
            let command = place.pid("holder");
            let db = rusqlite::Connection::open(place.file("locks.db")).expect("a file");
            match &place.server {
                Some(server) => server.stop(),
                None => db.execute_batch("BEGIN IMMEDIATE").expect("a lock"),
            }
            if told_first {
                holder.signal(Signal::TERM);
            } else {
                place.go();
                wait_gone(&[command]);
                let [guard] = process::children(holder.pid())[..] else {
                    panic!("one guard")
                };
                wait_until("the guard has reaped it", GENEROUS, || {
                    process::children(guard).is_empty()
                });
                holder.signal(Signal::TERM);
            }
            let begun = Instant::now();
            holder.end().assert(
                if told_first { 143 } else { 0 },
                "",
                "the store did not answer within 1 s: lock `l` may stay taken until its lease ends (1h); the guard \
                keeps trying to release it",
            );
            // Three repetitions of a request to a locked file take more than twenty.
            assert!(
                begun.elapsed() < Duration::from_secs(15),
                "{:?}",
                begun.elapsed()
            );
            match &place.server {
                Some(server) => server.cont(),
                None => db.execute_batch("ROLLBACK").expect("unlocked"),
            }
            let ran = place.run(&["--wait", "1m"], "rm -f holder go; echo mine");
            assert_eq!((ran.code, ran.out.as_str()), (Some(0), "mine\n"), "{ran:?}");
        }
    }
}

fn wait_catches(running: &Running) {
    wait_until("it catches signals", GENEROUS, || {
        // As long as it is not executed, all signals are blocked.
        let program = fs::read_link(format!("/proc/{}/exe", running.pid()));
        let executed = program.is_ok() && program.ok() != std::env::current_exe().ok();
        // Blocked, for a descriptor on which they arrive. Before that some are for a moment, but not this one.
        let status = fs::read_to_string(format!("/proc/{}/status", running.pid()));
        let status = status.unwrap_or_default();
        let mask = status.lines().find_map(|l| l.strip_prefix("SigBlk:"));
        let mask = mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok());
        executed && mask.is_some_and(|m| m & 1 << (Signal::USR1.as_raw() - 1) != 0)
    });
}

/// With too few descriptors for a guard, or for anything before it.
#[test]
fn what_could_not_be_started_leaves_neither_lock_nor_period_behind() {
    let place = Place::sqlite();
    let mut starved = 0;
    for limit in 5..32 {
        let name = format!("l{limit}");
        let options = ["--lock", &name, "--once-per", "366d", "--", "echo", "ran"];
        let mut command = place.command(&[]);
        let line = format!("ulimit -n {limit}; exec {EXE} exec \"$@\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &line, "sh"]).args(options);
        shell
            .current_dir(place.dir.path())
            .env("SOLOIST_STORE_URL", place.url())
            .env_remove("SOLOIST_CONFIG")
            .stdin(Stdio::null());
        let ran = Ran::of(shell.output().expect("a shell"));
        if ran.code == Some(0) {
            break;
        }
        assert!(
            matches!(ran.code, Some(69 | 70)) && ran.out.is_empty(),
            "{ran:?}"
        );
        starved += usize::from(ran.err.contains("cannot start the guard"));
        let again = command.args(&options[..]).output();
        Ran::of(again.expect("soloist starts")).assert(0, "ran\n", "");
    }
    assert!(starved > 0, "no guard was missing a descriptor");
}

#[test]
fn a_period_is_run_once_and_one_without_a_run_is_given_back() {
    for place in places() {
        let yearly = ["--once-per", "366d"];
        let mut holder = place.hold(&[]);
        // Another process holds the lock: the period is not used up.
        place
            .run(&yearly, "echo run >> ran")
            .assert(75, "", " has it");
        place.go();
        holder.end().assert(0, "", "");
        // Nor does a command that does not exist use it up.
        let mut command = place.command(&["--lock", "l", "--once-per", "366d", "no-such-command"]);
        Ran::of(command.output().expect("soloist starts")).assert(127, "", "not found");

        place.run(&yearly, "echo run >> ran").assert(0, "", "");
        let again = place.run(&yearly, "echo run >> ran");
        again.assert(
            75,
            "",
            "the current period (366d) of lock `l` was already claimed by ",
        );
        place
            .run(&["--once-per", "366d", "-E", "0"], "echo run >> ran")
            .assert(0, "", "");
        assert_eq!(place.text("ran"), "run\n");
        // Another length, another lock and a run without a period are independent of it.
        place
            .run(&["--once-per", "365d"], "echo run >> ran")
            .assert(0, "", "");
        place.run(&[], "echo run >> ran").assert(0, "", "");
        assert_eq!(place.text("ran"), "run\nrun\nrun\n");
    }
}

/// The command, a child that ignores SIGTERM, and one that left its session and its parents behind.
const STUBBORN_TREE: &str = r#"
trap '' TERM HUP INT
(setsid sh -c 'trap "" TERM; echo $$ > daemon; while :; do sleep 1000; done' &)
sh -c 'trap "" TERM; echo $$ > child; while :; do sleep 1000; done' &
echo $$ > command; while :; do sleep 1000; done
"#;

fn tree(place: &Place) -> Vec<u32> {
    ["daemon", "child", "command"]
        .map(|name| place.pid(name))
        .to_vec()
}

#[track_caller]
fn wait_gone(pids: &[u32]) {
    wait_until("the whole tree is gone", GENEROUS, || {
        !pids.iter().any(|pid| process::alive(*pid))
    });
}

#[test]
fn sigkill_of_exec_ends_the_command_at_once_and_frees_the_lock() {
    for place in places() {
        // Longer than any patience: the lock cannot have lapsed.
        let mut running = place.start(&["--lease", "1h"], STUBBORN_TREE);
        let pids = tree(&place);
        running.0.kill().expect("killed");
        wait_gone(&pids);
        running.0.wait().expect("our child");
        let ran = place.run(&["--wait", "30s"], "echo mine");
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "mine\n"), "{ran:?}");
    }
}

/// Neither their session nor their environment says whose they are, but `exec` has no other children.
#[test]
fn sigkill_of_the_guard_ends_what_cannot_be_recognised() {
    let place = Place::sqlite();
    let script = format!(
        "(env -i setsid sh -c 'echo $$ > plain; sleep 1000; true' >/dev/null 2>&1 &)
        (env -i setsid {} headless >/dev/null 2>&1 &)
        while :; do sleep 1000; done",
        headless().display()
    );
    let mut running = place.start(&["--lease", "1h"], &script);
    let pids = ["plain", "headless"].map(|name| place.pid(name));
    kill_guard(&running);
    running.end().assert(70, "", "the guard of this run died");
    let threads = |pid| fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let left = pids.map(threads);
    for pid in pids {
        process::signal(pid, Signal::KILL);
    }
    assert_eq!(left, [0, 0]);
    place.run(&[], "true").assert(0, "", "");
}

/// The shell that became `exec` had started it.
#[test]
fn sigkill_of_the_guard_leaves_alone_what_was_there_before() {
    let place = Place::sqlite();
    let script = format!(
        "setsid sleep 1000 2>/dev/null & echo $! > other; exec {EXE} exec --lock l -- sh -c 'echo $$ > command; sleep 1000; true'"
    );
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", &script])
        .current_dir(place.dir.path())
        .env("SOLOIST_STORE_URL", place.url())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut shell = Running::of(shell);
    let (other, command) = (place.pid("other"), place.pid("command"));
    kill_guard(&shell);
    shell.end().assert(70, "", "the guard of this run died");
    assert!(!process::alive(command) && process::alive(other));
    process::signal(other, Signal::KILL);
}

fn kill_guard(running: &Running) {
    let guard = process::children(running.pid())
        .into_iter()
        .find(|pid| process::command_line(*pid).contains("__guard"))
        .expect("a guard");
    process::signal(guard, Signal::KILL);
}

#[test]
fn the_end_of_a_command_hangs_nobody_up() {
    let place = Place::sqlite();
    // As cron and CI start it: in a session of its own, whose group has no parent in another group of that session. A
    // group that becomes orphaned while one of its processes is stopped gets SIGHUP as a whole.
    let script = r#"
        trap 'echo "hung up" >> heard' HUP
        trap 'echo continued >> heard' CONT
        sleep 1000 & stopped=$!
        kill -STOP $stopped
        until grep -q "State:.T" /proc/$stopped/status; do sleep 0.01; done
        run() { "$EXE" exec --lock l --lease 1h -- "$@"; echo "code $?"; }
        run true
        run sh -c 'kill -TERM $$'
        run sh -c '(setsid sh -c "echo \$\$ > left; exec sleep 1000" &); until [ -s left ]; do sleep 0.01; done'
        run sh -c 'kill -KILL $PPID; sleep 1000'
        "$EXE" exec --lock l --lease 1h --wait 1m -- sh -c 'echo $$ > killed; exec sleep 1000' & exec=$!
        until [ -s killed ]; do sleep 0.01; done
        kill -KILL $exec; wait $exec
        while kill -0 $(cat killed) 2> /dev/null; do sleep 0.01; done
        grep -c "State:.T" /proc/$stopped/status
        kill -KILL $stopped
        cat heard 2> /dev/null"#;
    let ran = in_a_group_of_its_own(&place, script);
    // The fourth time, the guard was killed.
    assert_eq!(ran.out, "code 0\ncode 143\ncode 0\ncode 70\n1\n", "{ran:?}");
    assert_eq!(ran.code, Some(1), "nothing was heard: {ran:?}");
}

/// Runs a script as cron does, in a session of its own.
fn in_a_group_of_its_own(place: &Place, script: &str) -> Ran {
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", script])
        .env("EXE", EXE)
        .env("SOLOIST_STORE_URL", place.url())
        .env_remove("SOLOIST_CONFIG")
        .current_dir(place.dir.path())
        .stdin(Stdio::null());
    // SAFETY: async-signal-safe calls, and nothing is allocated.
    unsafe {
        shell.pre_exec(|| {
            process::default_signals();
            libc::setsid();
            Ok(())
        });
    }
    Ran::of(shell.output().expect("a shell"))
}

#[test]
fn a_signal_ends_a_command_that_is_still_being_started() {
    let place = Place::sqlite();
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        let once = place.file(&format!("slow-{code}"));
        let mut command = place.exec(&["--lock", "l", "--once-per", "366d"], "echo ran >> ran");
        command.envs(slow("execve", 100_000, &once));
        let mut running = Running::of(command);
        wait_until("the start is under way", GENEROUS, || once.exists());
        running.signal(signal);
        running.end().assert(code, "", "");
        assert_eq!(place.text("ran"), "");
    }
    // `exec` released lock and period.
    place
        .run(&["--once-per", "366d"], "echo mine")
        .assert(0, "mine\n", "");
}

#[test]
fn what_the_command_left_behind_goes_before_the_lock() {
    let place = Place::sqlite();
    let ran = place.run(
        &["--lease", "2s"],
        "(setsid sh -c 'echo $$ > daemon; exec sleep 1000 <&- >&- 2>&-' &); while [ ! -s daemon ]; do sleep 0.01; done; exit 4",
    );
    ran.assert(4, "", "soloist: ended 1 process that the command left");
    assert!(!process::alive(place.pid("daemon")));
}

#[test]
fn without_its_store_nothing_is_started() {
    let mut place = Place::redis();
    place.server().kill();
    for options in [
        &[][..],
        &["--wait", "300ms"],
        &["--once-per", "1m"],
        &["--once-per", "1m", "--wait", "300ms"],
    ] {
        let ran = place.run(options, "echo run >> ran");
        ran.assert(
            69,
            "",
            "hint: the command was not started; check that the store is up",
        );
    }
    // On a port that nobody listens on, too.
    let port = place.server().port();
    let refused = format!("redis://127.0.0.1:{port}/0");
    place.run(&["--store", &refused], "echo run >> ran").assert(
        69,
        "",
        "the command was not started",
    );
    place
        .run(&["--store", "sqlite:/no/such/dir/x.db"], "echo run >> ran")
        .assert(69, "", "the command was not started");
    // A server that is no Redis listens there.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let web = format!("redis://{}/0", listener.local_addr().expect("an address"));
    let server = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().expect("a client");
        client.read_exact(&mut [0; 4]).expect("a request");
        client
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n<html>\r\n")
            .expect("an answer");
    });
    let ran = place.run(&["--store", &web], "echo run >> ran");
    ran.assert(69, "", "does not speak the protocol of Redis");
    assert_eq!(ran.err.lines().count(), 2, "{ran:?}");
    server.join().expect("a web server");
    // Stopped: it takes connections and answers nothing.
    place.server().revive(None);
    place.server().stop();
    place
        .run(&[], "echo run >> ran")
        .assert(69, "", "the command was not started");
    assert_eq!(place.text("ran"), "");
}

#[test]
fn a_store_that_is_gone_for_longer_than_the_lease_ends_the_command() {
    let mut place = Place::redis();
    let mut running = place.start(&["--lease", "2s"], STUBBORN_TREE);
    let pids = tree(&place);
    place.server().kill();
    wait_gone(&pids);
    running
        .end()
        .assert(79, "", "lock `l` was lost: it could not be renewed in time");
}

#[test]
fn a_command_may_take_longer_than_its_lease() {
    for place in places() {
        place
            .run(&["--lease", "2s"], "sleep 3; echo done")
            .assert(0, "done\n", "");
    }
}

#[test]
fn a_store_that_is_away_for_a_moment_does_not() {
    let mut place = Place::redis();
    place.server().append_only();
    let mut running = place.hold(&["--lease", "20s"]);
    place.server().kill();
    place.server().revive(None);
    // The lock was there all the time.
    place.run(&[], "true").assert(75, "", " has it");
    place.go();
    running.end().assert(0, "", "");
}

#[test]
fn a_lock_that_is_taken_away_ends_the_command() {
    let mut place = Place::redis();
    let mut running = place.start(&["--lease", "2s"], STUBBORN_TREE);
    let pids = tree(&place);
    place.server().command::<()>(&["FLUSHALL"]);
    wait_gone(&pids);
    // As soon as a renewal shows the loss, not only when trust is over.
    running.end().assert(
        79,
        "",
        "lock `l` was lost: it was deleted, or another process took it; the command",
    );
}

#[test]
fn an_exec_that_hangs_does_not_keep_its_command_beyond_the_lock() {
    let place = Place::sqlite();
    let mut running = place.start(&["--lease", "2s"], STUBBORN_TREE);
    let pids = tree(&place);
    running.signal(Signal::STOP);
    wait_gone(&pids);
    // Another process holds it while the first still hangs.
    let ran = place.run(&["--wait", "30s"], "echo mine");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "mine\n"), "{ran:?}");
    running.signal(Signal::CONT);
    running
        .end()
        .assert(79, "", "lock `l` was lost: it could not be renewed in time");
}

#[test]
fn the_store_comes_from_the_option_the_environment_or_the_file() {
    let place = Place::sqlite();
    let other = |name: &str| format!("sqlite:{}", place.file(name).display());
    let made = |name: &str| place.file(name).exists();
    let run = |change: &dyn Fn(&mut Command), args: &[&str]| {
        let mut command = Command::new(EXE);
        command
            .args(args)
            .args(["--lock", "l", "--", "true"])
            .current_dir(place.dir.path())
            .env_remove("SOLOIST_STORE_URL")
            .env_remove("SOLOIST_CONFIG");
        change(&mut command);
        Ran::of(command.output().expect("soloist starts"))
    };
    // Only if /etc has no file: the machine may have one.
    if !Path::new("/etc/soloist/jobs.toml").exists() {
        let ran = run(&|_| {}, &["exec"]);
        ran.assert(
            64,
            "",
            "hint: name it with `--store URL` or SOLOIST_STORE_URL",
        );
        let empty = run(
            &|c| {
                c.env("SOLOIST_STORE_URL", "");
            },
            &["exec"],
        );
        assert_eq!((empty.code, &empty.err), (ran.code, &ran.err));
    }
    fs::write(
        place.file("a.toml"),
        format!("[store]\nurl = {:?}\n", other("file.db")),
    )
    .expect("written");
    run(&|_| {}, &["--config", "a.toml", "exec"]).assert(0, "", "");
    assert!(made("file.db"));
    let env = other("env.db");
    let set = |c: &mut Command| {
        c.env("SOLOIST_STORE_URL", &env);
    };
    run(&set, &["--config", "a.toml", "exec"]).assert(0, "", "");
    assert!(made("env.db"));
    run(&set, &["exec", "--store", &other("option.db")]).assert(0, "", "");
    assert!(made("option.db"));

    run(&|_| {}, &["--config", "missing.toml", "exec"]).assert(78, "", "missing.toml");
    run(&|_| {}, &["exec", "--store", "reds://h"]).assert(64, "", "did you mean `redis:`?");
    run(&|_| {}, &["exec", "--store", "memory:"]).assert(
        64,
        "",
        "a `memory:` store exists only inside one process",
    );
}

#[test]
fn what_makes_no_sense_is_wrong_usage() {
    let place = Place::sqlite();
    for (options, told) in [
        (&["--lock", "", "true"][..], "it is empty"),
        (&["--lock", "a{b", "true"], "braces"),
        (&["--lock", "l", "--lease", "1", "true"], "not a duration"),
        (
            &["--lock", "l", "--lease", "0s", "true"],
            "at least 1s400ms",
        ),
        (
            &["--lock", "l", "--lease", "1s", "true"],
            "hint: `--lease 15s` suits most",
        ),
        (&["--lock", "l", "--lease", "3650d", "true"], "366 days"),
        (
            &["--lock", "l", "--once-per", "0s", "true"],
            "a period must be",
        ),
        (
            &["--lock", "l", "--once-per", "367d", "true"],
            "at most 366 days",
        ),
        (
            &["--lock", "l", "--wait", "soon", "true"],
            "is not a duration",
        ),
        (&["--lock", "l", "-E", "256", "true"], "256"),
        (&["--lock", "l"], "CMD"),
        (&["true"], "--lock"),
    ] {
        let ran = Ran::of(place.command(options).output().expect("soloist starts"));
        assert_eq!(ran.code, Some(64), "{options:?}: {ran:?}");
        assert!(ran.err.contains(told), "{options:?}: {ran:?}");
    }
}

#[test]
fn waiting_includes_a_store_that_comes_up_late() {
    let mut place = Place::redis();
    place.server().kill();
    let children: Vec<_> = [&[][..], &["--once-per", "366d"]]
        .into_iter()
        .map(|more| {
            let options = [&["--lock", "l", "--wait", "1m"], more].concat();
            place
                .exec(&options, "echo run >> ran")
                .spawn()
                .expect("soloist starts")
        })
        .collect();
    // Longer than the retries of the store.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(place.text("ran"), "");
    place.server().revive(None);
    for mut child in children {
        assert!(child.wait().expect("an end").success());
    }
    assert_eq!(place.text("ran"), "run\nrun\n");
}

#[test]
fn the_command_does_not_learn_the_way_to_the_store() {
    let place = Place::redis();
    let mut command = place.exec(&["--lock", "l"], "env");
    let ran = Ran::of(command.env("MINE", "own").output().expect("soloist starts"));
    assert!(ran.out.contains("MINE=own\n"), "{ran:?}");
    assert!(!ran.out.contains("SOLOIST_STORE"), "{ran:?}");
    // Nor the variables that the configuration expands.
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(
        dir.path().join("jobs.toml"),
        "[store]\nurl = 'sqlite:${HIDDEN_NAME}'\n",
    )
    .expect("a configuration");
    let mut command = Command::new(EXE);
    command
        .args(["exec", "--lock", "l", "--", "env"])
        .current_dir(dir.path())
        .env_remove("SOLOIST_STORE_URL")
        .env_remove("SOLOIST_CONFIG")
        .env("HIDDEN_NAME", "hunter2.db");
    let ran = Ran::of(command.env("MINE", "own").output().expect("soloist starts"));
    assert!(ran.out.contains("MINE=own\n"), "{ran:?}");
    assert!(!ran.out.contains("hunter2"), "{ran:?}");
}

#[test]
fn a_new_sqlite_file_is_its_users_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let script = "umask 0; exec \"$EXE\" exec --store sqlite:l.db --lock l -- stat -c '%a %n' l.db l.db-wal l.db-shm";
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", script])
        .env("EXE", EXE)
        .current_dir(dir.path());
    let ran = Ran::of(command.output().expect("sh starts"));
    ran.assert(0, "600 l.db\n600 l.db-wal\n600 l.db-shm\n", "");
}
