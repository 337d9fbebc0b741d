//! The guard and the runner, with the real binary and real process trees.
//!
//! Two ways to use them: [`RawGuard`] speaks to a guard as the daemon would, so that a test can be a bad daemon;
//! `Runner` is what the daemon uses. Trees are ended through a cgroup and through /proc, so most tests run both ways.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::{fd::OwnedFd, unix::fs::PermissionsExt, unix::net::UnixStream, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use rustix::process::{Pid, Resource, Rlimit, Signal};
use soloist::{
    clock::Boottime,
    config,
    guard::{self, Control, HandOver, Report, Spec},
    logic::{
        claim::{OnCrash, Overlap},
        guard_life::{Cause, Stop},
    },
    model::{InstanceId, JobName, Occurrence, Outcome, Run, RunId, Trigger},
    runner::{RunEnd, Runner, Running},
};

pub use crate::support::cgroup::TestCgroup;
use crate::support::{
    process, skip,
    witness::{headless, refuse_clone3, slow, unruly},
};

const EXE: &str = env!("CARGO_BIN_EXE_soloist");
/// Far longer than any test here takes; only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(120);
const HOUR: Duration = Duration::from_secs(3600);
const OUTPUT: config::Output = config::Output {
    keep: 64 << 10,
    log: false,
};

/// Both ways of ending a tree.
const WALK_ONLY: [bool; 2] = [true, false];

fn spec(argv: &[&str]) -> Spec {
    Spec {
        job: JobName::new("backup"),
        run_id: RunId::random(),
        argv: argv.iter().map(ToString::to_string).collect(),
        env: Vec::new(),
        working_dir: None,
        user: None,
        group: None,
        new_privileges: false,
        timeout: None,
        grace: Duration::from_secs(10),
        kill_budget: Duration::from_secs(2),
        success_codes: vec![0],
        deadline: Boottime::now() + HOUR,
        settle: serde_json::json!({"store": "sqlite:x", "token": 7}),
        settle_exe: Some("/bin/true".into()),
        walk_only: false,
        transparent: None,
    }
    .marked()
}

trait Marked {
    fn marked(self) -> Self;
}

impl Marked for Spec {
    /// As `Spec::new` would.
    fn marked(mut self) -> Self {
        self.env
            .push(("SOLOIST_RUN_ID".into(), self.run_id.to_string()));
        self
    }
}

fn shell(text: &str) -> Spec {
    spec(&["/bin/sh", "-c", text])
}

/// Waits until `condition` holds.
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Boottime::now() + PATIENCE;
    while !condition() {
        assert!(Boottime::now() < end, "still waiting until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The same for async tests.
async fn until_async(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Boottime::now() + PATIENCE;
    while !condition() {
        assert!(Boottime::now() < end, "still waiting until {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// State letter and start time of a process: the second tells it from a later one with its number.
fn stat(pid: i32) -> Option<(char, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..]
        .split_ascii_whitespace()
        .collect();
    Some((fields[0].chars().next()?, fields[19].parse().ok()?))
}

fn kill(pid: i32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(pid).expect("a pid"), signal)
        .expect("the process is there");
}

/// A command with a background child, a child in its own session, a daemon that forked twice, one that ignores
/// SIGTERM, and one without our environment. Each writes its pid into the directory.
struct Tree {
    dir: tempfile::TempDir,
}

const TREE: &str = r#"
cd "$0"
note() { echo "$2" > "$1.new"; mv "$1.new" "$1"; }
note command $$
sleep 1000 & note background $!
setsid sh -c 'echo $$ > session.new; mv session.new session; exec sleep 1000' &
(setsid sh -c 'echo $$ > daemon.new; mv daemon.new daemon; exec sleep 1000' &)
sh -c 'trap "" TERM; echo $$ > stubborn.new; mv stubborn.new stubborn; while :; do sleep 1000; done' &
env -i /bin/sh -c 'echo $$ > bare.new; mv bare.new bare; exec sleep 1000' &
"#;

impl Tree {
    const MEMBERS: [&str; 6] = [
        "command",
        "background",
        "session",
        "daemon",
        "stubborn",
        "bare",
    ];

    fn new() -> Self {
        Self {
            dir: tempfile::tempdir().expect("a directory"),
        }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The tree, then `rest` in the command's shell.
    fn spec(&self, rest: &str) -> Spec {
        spec(&[
            "/bin/sh",
            "-c",
            &format!("{TREE}\n{rest}"),
            self.path().to_str().expect("UTF-8"),
        ])
    }

    fn complete(&self) -> bool {
        Self::MEMBERS.iter().all(|m| self.path().join(m).exists())
    }

    /// The members, once all have started: name, pid and start time.
    fn members(&self) -> Vec<(&'static str, i32, u64)> {
        until("the tree has grown", || self.complete());
        Self::MEMBERS.map(|m| self.member(m)).into_iter().collect()
    }

    fn member(&self, name: &'static str) -> (&'static str, i32, u64) {
        let text = fs::read_to_string(self.path().join(name)).expect("a pid file");
        let pid = text.trim().parse().expect("a pid");
        (name, pid, stat(pid).expect("alive").1)
    }

    fn hand_over_script(&self) -> PathBuf {
        let script = self.path().join("settle.sh");
        let to = self.path().join("handed").display().to_string();
        fs::write(
            &script,
            format!(
                "#!/bin/sh\n[ \"$1\" = __settle ] || exit 1\ngrep ^Sig /proc/self/status > {to}.status\n\
                 cat > {to}.new\nmv {to}.new {to}\n"
            ),
        )
        .expect("written");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("executable");
        script
    }

    fn handed_over(&self) -> HandOver {
        until("the guard has handed over", || {
            self.path().join("handed").exists()
        });
        serde_json::from_slice(&fs::read(self.path().join("handed")).expect("readable"))
            .expect("JSON")
    }
}

fn alive(members: &[(&'static str, i32, u64)]) -> Vec<&'static str> {
    let lives = |&&(_, pid, start): &&_| {
        stat(pid).is_some_and(|(state, s)| s == start && !"ZX".contains(state))
    };
    members.iter().filter(lives).map(|m| m.0).collect()
}

#[track_caller]
fn assert_gone(members: &[(&'static str, i32, u64)]) {
    assert_eq!(alive(members), Vec::<&str>::new(), "these are still alive");
}

/// A guard that a test speaks to directly.
struct RawGuard {
    child: Child,
    socket: UnixStream,
    reports: BufReader<UnixStream>,
    stdout: ChildStdout,
}

impl RawGuard {
    fn idle(spec: &Spec) -> Self {
        Self::on(spec, UnixStream::pair().expect("a socket pair"))
    }

    fn on(spec: &Spec, pair: (UnixStream, UnixStream)) -> Self {
        Self::with(spec, pair, |_| {})
    }

    /// With a changed command: further arguments, another environment.
    fn with(
        spec: &Spec,
        (ours, theirs): (UnixStream, UnixStream),
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let mut command = Command::new(EXE);
        command.args([guard::ARGUMENT, spec.job.as_str(), &spec.run_id.to_string()]);
        change(&mut command);
        let mut child = command
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("a guard");
        ours.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let stdout = child.stdout.take().expect("a pipe");
        let reports = BufReader::new(ours.try_clone().expect("a second descriptor"));
        Self {
            child,
            socket: ours,
            reports,
            stdout,
        }
    }

    fn start(spec: &Spec) -> Self {
        let mut guard = Self::idle(spec);
        guard.send(spec);
        guard
    }

    fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    fn send(&mut self, message: &impl serde::Serialize) {
        let mut line = serde_json::to_vec(message).expect("JSON");
        line.push(b'\n');
        self.socket.write_all(&line).expect("the guard listens");
    }

    fn report(&mut self) -> Report {
        let mut line = String::new();
        self.reports.read_line(&mut line).expect("a report in time");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"))
    }

    /// Closes both descriptors: for the guard its daemon is dead.
    fn die(self) -> Child {
        self.child
    }

    /// The output, whose end comes with the end of the tree and not only with that of the guard.
    fn finish(mut self) -> String {
        let (sender, output) = std::sync::mpsc::channel();
        let mut stdout = self.stdout;
        std::thread::spawn(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).expect("text");
            sender.send(text)
        });
        let text = output
            .recv_timeout(PATIENCE)
            .expect("the end of the output");
        let mut line = serde_json::to_vec(&Control::Settled).expect("JSON");
        line.push(b'\n');
        self.socket.write_all(&line).expect("the guard listens");
        let status = self.child.wait().expect("the guard ends");
        assert!(status.success(), "{status}");
        text
    }
}

/// Started and at its end; asserts the order of reports.
fn exited(report: Report) -> (Option<i32>, Option<i32>, Option<Cause>) {
    match report {
        Report::Exited {
            exit_code,
            signal,
            cause,
            ..
        } => (exit_code, signal, cause),
        other => panic!("expected the end of the command, not {other:?}"),
    }
}

fn gone(report: Report) -> (Option<u32>, Boottime) {
    match report {
        Report::Gone { at, usage } => (usage.left_processes, at.boottime),
        Report::Stuck { pids } => panic!("{} survive", pids.len()),
        other => panic!("expected the end of the tree, not {other:?}"),
    }
}

#[track_caller]
fn started(report: Report) -> i32 {
    match report {
        Report::Started { pid, .. } => pid,
        other => panic!("expected the start of the command, not {other:?}"),
    }
}

fn runner() -> Runner {
    Runner::with_exe(EXE.into()).expect("a runner")
}

/// One whose guards are forked, as almost all of a daemon's are; [`RawGuard`] is executed.
async fn forking() -> Runner {
    let runner = runner();
    zygote_of(&runner).await;
    runner
}

async fn run(spec: Spec) -> RunEnd {
    run_with(spec, OUTPUT).await
}

async fn run_with(spec: Spec, output: config::Output) -> RunEnd {
    run_by(&forking().await, spec, output).await
}

async fn run_by(runner: &Runner, spec: Spec, output: config::Output) -> RunEnd {
    let mut running = runner.start(spec, output).expect("a guard");
    let end = tokio::time::timeout(PATIENCE, running.wait())
        .await
        .expect("an end");
    let guard = running.guard_pid().expect("a pid").cast_signed();
    running.settled().await;
    until_async("the guard has ended", || stat(guard).is_none()).await;
    end
}

// ---- guards that wait for their run ----

#[tokio::test]
async fn a_prepared_guard_takes_the_run_that_it_was_prepared_for() {
    let (spec, runner) = (shell("echo done"), runner());
    let prepared = runner.prepare(&spec.job, spec.run_id).expect("a guard");
    let pid = prepared.guard_pid();
    let mut running = runner
        .start_prepared(spec, OUTPUT, Some(prepared))
        .expect("a run");
    assert_eq!(running.guard_pid(), pid);
    let end = running.wait().await;
    assert_eq!(
        (end.outcome, end.output_text().as_str()),
        (Outcome::Succeeded, "done\n")
    );
    running.settled().await;
}

#[tokio::test]
async fn a_prepared_guard_that_is_not_wanted_ends() {
    for runner in [runner(), forking().await] {
        let spec = shell("echo done");
        let prepared = runner.prepare(&spec.job, spec.run_id).expect("a guard");
        let pid = prepared.guard_pid().expect("a pid").cast_signed();
        assert!(stat(pid).is_some());
        drop(prepared);
        until_async("it has ended, and is no zombie", || stat(pid).is_none()).await;
    }
}

#[tokio::test]
async fn a_prepared_guard_that_is_killed_costs_nothing() {
    let (spec, runner) = (shell("echo done"), forking().await);
    let prepared = runner.prepare(&spec.job, spec.run_id).expect("a guard");
    let pid = prepared.guard_pid().expect("a pid").cast_signed();
    kill(pid, Signal::KILL);
    // Dead with all its threads: until then its parent is not told.
    until_async("it is dead", || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        stat(pid).is_none_or(|(state, _)| state == 'Z' && threads <= 1)
    })
    .await;
    let started = runner.start_prepared(spec, OUTPUT, Some(prepared));
    let mut running = started.expect("a run");
    assert_ne!(running.guard_pid().expect("a pid").cast_signed(), pid);
    assert_eq!(running.wait().await.outcome, Outcome::Succeeded);
    running.settled().await;
}

// ---- how commands end ----

#[tokio::test]
async fn a_command_that_ends_by_itself_has_its_code_signal_and_output() {
    for walk_only in WALK_ONLY {
        let mut hello = shell("echo out; echo err >&2");
        hello.walk_only = walk_only;
        let end = run(hello).await;
        assert_eq!(
            (end.outcome, end.exit_code, end.signal, end.cause),
            (Outcome::Succeeded, Some(0), None, None)
        );
        assert_eq!(
            (
                end.usage.left_processes,
                end.error.as_deref(),
                end.output_bytes
            ),
            (None, None, 8)
        );
        assert!(
            ["out\nerr\n", "err\nout\n"].contains(&end.output_text().as_str()),
            "{}",
            end.output_text()
        );
        assert!(!end.output_truncated());
        let started = end.started.expect("it was started");
        assert!(started.boottime <= end.ended.boottime && started.wall_us <= end.ended.wall_us);
    }
    let end = run(shell("exit 3")).await;
    assert_eq!(
        (end.outcome, end.exit_code, end.signal),
        (Outcome::Failed, Some(3), None)
    );
    let end = run(Spec {
        success_codes: vec![0, 3],
        ..shell("exit 3")
    })
    .await;
    assert_eq!(end.outcome, Outcome::Succeeded);
    let end = run(shell("kill -9 $$")).await;
    assert_eq!(
        (end.outcome, end.exit_code, end.signal, end.cause),
        (Outcome::Failed, None, Some(9), None)
    );
}

#[test]
fn what_a_command_leaves_behind_is_ended() {
    for walk_only in WALK_ONLY {
        let tree = Tree::new();
        let spec = Spec {
            walk_only,
            grace: HOUR,
            ..tree.spec("until [ -e go ]; do sleep 0.01; done; exit 5")
        };
        let mut guard = RawGuard::start(&spec);
        let report = guard.report();
        let Report::Started { pid, cgroup, .. } = &report else {
            panic!("{report:?}")
        };
        if walk_only {
            assert_eq!(*cgroup, None);
        } else if TestCgroup::new().is_some() {
            let cgroup = cgroup
                .as_ref()
                .expect("a cgroup was used where one can be made");
            assert!(
                fs::read_to_string(cgroup.join("cgroup.procs"))
                    .expect("it exists")
                    .contains(&pid.to_string())
            );
        } else {
            skip("the part with a cgroup: no cgroup v2 that we may write to");
        }
        let members = tree.members();
        fs::write(tree.path().join("go"), "").expect("written");
        assert_eq!(exited(guard.report()), (Some(5), None, None));
        let (leftover, _) = gone(guard.report());
        assert_gone(&members);
        assert!(leftover >= Some(5), "{leftover:?}");
        if let Report::Started {
            cgroup: Some(cgroup),
            ..
        } = report
        {
            assert!(!cgroup.exists(), "the cgroup was left");
        }
        guard.finish();
    }
}

#[test]
fn what_a_command_leaves_behind_may_tidy_up() {
    for walk_only in WALK_ONLY {
        let dir = tempfile::tempdir().expect("a directory");
        let spec = Spec {
            walk_only,
            grace: HOUR,
            working_dir: Some(dir.path().into()),
            ..shell(
                "sh -c 'trap \"echo tidied > told; exit\" TERM; touch ready; sleep 1000 & wait' & \
                 until [ -e ready ]; do sleep 0.01; done",
            )
        };
        let mut guard = RawGuard::start(&spec);
        started(guard.report());
        assert_eq!(exited(guard.report()), (Some(0), None, None));
        let (leftover, _) = gone(guard.report());
        assert!(leftover >= Some(1), "{leftover:?}");
        let told = fs::read_to_string(dir.path().join("told"));
        assert_eq!(told.ok().as_deref(), Some("tidied\n"), "it got no SIGTERM");
        guard.finish();
    }
}

#[tokio::test]
async fn a_run_is_over_when_its_tree_is() {
    // It ignores SIGTERM, so that it lives for as long as what is left behind may.
    let dir = tempfile::tempdir().expect("a directory");
    let end = run(Spec {
        working_dir: Some(dir.path().into()),
        ..shell("sh -c 'trap \"\" TERM; touch ready; while :; do sleep 1000; done' & until [ -e ready ]; do sleep 0.01; done")
    })
    .await;
    assert_eq!((end.outcome, end.exit_code), (Outcome::Succeeded, Some(0)));
    let took = end
        .ended
        .boottime
        .since(end.started.expect("it was started").boottime);
    assert!(took >= Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_timeout_gives_the_grace_and_then_kills() {
    for walk_only in WALK_ONLY {
        let tree = Tree::new();
        let mut spec = tree.spec("trap '' TERM; touch ready; while :; do sleep 1000; done");
        spec.grace = Duration::from_millis(200);
        spec.timeout = Some(Duration::from_secs(15));
        spec.walk_only = walk_only;
        let begin = Boottime::now();
        let mut guard = RawGuard::start(&spec);
        started(guard.report());
        until("the trap is set", || tree.path().join("ready").exists());
        let members = tree.members();
        assert_eq!(
            exited(guard.report()),
            (None, Some(9), Some(Cause::Timeout))
        );
        let (_, at) = gone(guard.report());
        assert!(
            at.since(begin) >= Duration::from_millis(15_200),
            "{:?}",
            at.since(begin)
        );
        assert_gone(&members);
        guard.finish();
    }
}

#[test]
fn a_stop_reaches_the_whole_tree_and_lets_it_finish_within_the_grace() {
    for walk_only in WALK_ONLY {
        let tree = Tree::new();
        let mut spec =
            tree.spec("trap 'echo tidied; exit 4' TERM; touch ready; while :; do wait; done");
        spec.walk_only = walk_only;
        // The grace is for the command to react; a command that ignores SIGTERM gets all of it.
        spec.grace = Duration::from_secs(3);
        let mut guard = RawGuard::start(&spec);
        started(guard.report());
        until("the trap is set", || tree.path().join("ready").exists());
        let members = tree.members();
        guard.send(&Control::Stop {
            reason: Stop::Replaced,
            grace: None,
        });
        assert_eq!(
            exited(guard.report()),
            (Some(4), None, Some(Cause::Stopped(Stop::Replaced)))
        );
        gone(guard.report());
        assert_gone(&members);
        assert_eq!(guard.finish(), "tidied\n");
    }
}

#[test]
fn a_stop_without_grace_kills_what_ignores_sigterm_and_is_stopped() {
    for walk_only in WALK_ONLY {
        let tree = Tree::new();
        let mut guard = RawGuard::start(&Spec {
            walk_only,
            ..tree.spec("wait")
        });
        started(guard.report());
        let members = tree.members();
        kill(members[4].1, Signal::STOP);
        guard.send(&Control::Stop {
            reason: Stop::Cancelled,
            grace: Some(Duration::ZERO),
        });
        assert_eq!(
            exited(guard.report()),
            (None, Some(9), Some(Cause::Stopped(Stop::Cancelled)))
        );
        gone(guard.report());
        assert_gone(&members);
        guard.finish();
    }
}

#[test]
fn a_process_whose_first_thread_has_ended_is_ended_too() {
    for walk_only in WALK_ONLY {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("pid");
        let program = headless().to_str().expect("UTF-8");
        let argv = [program, file.to_str().expect("UTF-8")];
        // As the command itself, and as a process that it left behind.
        let left = format!(
            "setsid {} {} & until [ -s {2} ]; do sleep 0.01; done",
            argv[0], argv[1], argv[1]
        );
        for command in [spec(&argv), shell(&left)] {
            fs::remove_file(&file).ok();
            let mut guard = RawGuard::start(&Spec {
                walk_only,
                grace: Duration::from_millis(50),
                ..command
            });
            started(guard.report());
            let mut pid = 0;
            until("it is there", || {
                let text = fs::read_to_string(&file).unwrap_or_default();
                pid = text.trim().parse().unwrap_or(0);
                pid > 0 && stat(pid).is_some_and(|(state, _)| state == 'Z')
            });
            guard.send(&Control::Stop {
                reason: Stop::Cancelled,
                grace: None,
            });
            exited(guard.report());
            gone(guard.report());
            assert!(stat(pid).is_none(), "it was left");
            guard.finish();
        }
    }
}

/// Other processes of the host, so that a look at all of them takes its time.
struct Crowd(Child);

impl Crowd {
    fn gather() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("pid");
        let mut command = Command::new(unruly());
        let child = command.arg("crowd").arg(&file).spawn().expect("a crowd");
        until("all are there", || file.exists());
        Self(child)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.0.kill().expect("ended");
        self.0.wait().expect("reaped");
    }
}

/// Runs `unruly` in this mode until it says that it has begun, and has it ended by its timeout.
fn unruly_is_ended(mode: &str, walk_only: bool) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("pid");
    let program = unruly().to_str().expect("UTF-8");
    let spec = Spec {
        walk_only,
        timeout: Some(Duration::from_secs(5)),
        grace: Duration::from_millis(50),
        // Nobody is told before that of what is still there.
        kill_budget: HOUR,
        ..spec(&[program, mode, file.to_str().expect("UTF-8")])
    };
    let begin = Boottime::now();
    let mut guard = RawGuard::start(&spec);
    started(guard.report());
    until("it is there", || file.exists());
    // The command itself may be a process that ends soon.
    let (_, _, cause) = exited(guard.report());
    let (_, at) = gone(guard.report());
    println!(
        "{mode}: {cause:?}, gone after {:?} (walk only: {walk_only})",
        at.since(begin)
    );
    // It would have ended by itself later.
    assert!(
        at.since(begin) < Duration::from_secs(90),
        "{:?}",
        at.since(begin)
    );
    let left = process::with_argument(&file);
    assert_eq!(left, [] as [u32; 0]);
    guard.finish();
}

#[test]
fn a_process_that_forks_and_ends_all_the_time_is_ended() {
    for walk_only in WALK_ONLY {
        let _crowd = Crowd::gather();
        unruly_is_ended("comet", walk_only);
    }
}

#[test]
fn processes_without_their_first_thread_that_fork_all_the_time_are_ended() {
    for walk_only in WALK_ONLY {
        unruly_is_ended("swarm", walk_only);
    }
}

#[test]
fn a_stopped_command_still_gets_its_sigterm() {
    let tree = Tree::new();
    let mut guard =
        RawGuard::start(&tree.spec("trap 'exit 4' TERM; touch ready; while :; do wait; done"));
    let command = started(guard.report());
    until("the trap is set", || tree.path().join("ready").exists());
    kill(command, Signal::STOP);
    until("it is stopped", || {
        stat(command).is_some_and(|(state, _)| state == 'T')
    });
    guard.send(&Control::Stop {
        reason: Stop::Cancelled,
        grace: Some(HOUR),
    });
    assert_eq!(
        exited(guard.report()),
        (Some(4), None, Some(Cause::Stopped(Stop::Cancelled)))
    );
    guard.send(&Control::Stop {
        reason: Stop::Cancelled,
        grace: Some(Duration::ZERO),
    });
    gone(guard.report());
    guard.finish();
}

// ---- leases ----

#[test]
fn a_deadline_ends_the_tree_within_the_kill_budget() {
    for walk_only in WALK_ONLY {
        let tree = Tree::new();
        let mut spec = tree.spec("trap '' TERM; touch ready; while :; do sleep 1000; done");
        spec.grace = HOUR;
        spec.kill_budget = Duration::from_secs(40);
        spec.deadline = Boottime::now() + Duration::from_secs(15);
        spec.walk_only = walk_only;
        let mut guard = RawGuard::start(&spec);
        started(guard.report());
        let members = tree.members();
        assert_eq!(
            exited(guard.report()),
            (None, Some(9), Some(Cause::Deadline))
        );
        let (_, at) = gone(guard.report());
        assert!(
            at >= spec.deadline + spec.kill_budget / 2,
            "no grace was given"
        );
        assert!(
            at <= spec.deadline + spec.kill_budget,
            "{:?} late",
            at.since(spec.deadline + spec.kill_budget)
        );
        assert_gone(&members);
        guard.finish();
    }
}

#[test]
fn renewals_keep_a_command_running_past_its_first_deadline() {
    let mut spec = spec(&["sleep", "1000"]);
    spec.deadline = Boottime::now() + Duration::from_secs(8);
    let mut guard = RawGuard::start(&spec);
    started(guard.report());
    guard.send(&Control::Deadline(Boottime::now() + HOUR));
    // An older deadline that comes later changes nothing.
    guard.send(&Control::Deadline(spec.deadline));
    until("the first deadline is over", || {
        Boottime::now() > spec.deadline + Duration::from_millis(50)
    });
    guard.send(&Control::Stop {
        reason: Stop::Shutdown,
        grace: None,
    });
    assert_eq!(
        exited(guard.report()).2,
        Some(Cause::Stopped(Stop::Shutdown))
    );
    gone(guard.report());
    guard.finish();
}

#[test]
fn a_renewal_that_waited_while_the_guard_was_stopped_past_its_deadline_is_ignored() {
    let mut spec = spec(&["sleep", "1000"]);
    spec.deadline = Boottime::now() + Duration::from_secs(10);
    let mut guard = RawGuard::start(&spec);
    let command = started(guard.report());
    let pid = guard.pid();
    kill(pid, Signal::STOP);
    until("the guard is stopped", || {
        stat(pid).is_some_and(|(state, _)| state == 'T')
    });
    guard.send(&Control::Deadline(Boottime::now() + HOUR));
    until("the deadline is over", || Boottime::now() > spec.deadline);
    assert!(
        stat(command).is_some_and(|(state, _)| state != 'Z'),
        "nobody could have ended it"
    );
    kill(pid, Signal::CONT);
    assert_eq!(exited(guard.report()).2, Some(Cause::Deadline));
    gone(guard.report());
    guard.finish();
}

#[test]
fn a_command_is_not_started_after_its_deadline() {
    let dir = tempfile::tempdir().expect("a directory");
    let witness = dir.path().join("ran");
    let mut spec = spec(&["touch", witness.to_str().expect("UTF-8")]);
    spec.deadline = Boottime::now();
    let mut guard = RawGuard::start(&spec);
    let Report::StartFailed { error, cause, .. } = guard.report() else {
        panic!("it was started")
    };
    assert_eq!(
        (error.as_str(), cause),
        (
            "the lease ran out before the command could be started",
            Some(Cause::Deadline)
        )
    );
    gone(guard.report());
    guard.finish();
    assert!(!witness.exists());
}

/// A guard that finds this message right behind its run.
fn told_at_once(spec: &Spec, control: Control) -> RawGuard {
    let mut guard = RawGuard::idle(spec);
    let mut lines = serde_json::to_vec(spec).expect("JSON");
    lines.push(b'\n');
    serde_json::to_writer(&mut lines, &control).expect("JSON");
    lines.push(b'\n');
    guard.socket.write_all(&lines).expect("the guard listens");
    guard
}

#[test]
fn a_stop_that_comes_with_the_run_starts_nothing() {
    let stop = Control::Stop {
        reason: Stop::Cancelled,
        grace: None,
    };
    let mut guard = told_at_once(&spec(&["sleep", "100"]), stop);
    let Report::StartFailed { error, cause, .. } = guard.report() else {
        panic!("it was started")
    };
    // Not even a process for it was made, which would have been doing something.
    assert_eq!(
        error,
        "it was cancelled before the command could be started"
    );
    assert_eq!(cause, Some(Cause::Stopped(Stop::Cancelled)));
    gone(guard.report());
    guard.finish();
}

#[test]
fn a_signal_that_comes_with_the_run_reaches_the_command() {
    let spec = spec(&["sleep", "100"]);
    let mut guard = told_at_once(&spec, Control::Signal(libc::SIGUSR1));
    // It ends the command, or the process that is to become it.
    let by = loop {
        match guard.report() {
            Report::StartFailed { signal, .. } | Report::Exited { signal, .. } => break signal,
            Report::Started { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(by, Some(libc::SIGUSR1));
    gone(guard.report());
    guard.finish();
}

#[test]
fn after_a_freeze_past_the_lease_the_tree_dies_at_once_whatever_was_queued() {
    let Some(cgroup) = TestCgroup::new() else {
        return skip("no cgroup v2 that we may write to");
    };
    for walk_only in WALK_ONLY {
        let tree = Tree::new();
        let mut spec = tree.spec("trap '' TERM; while :; do sleep 1000; done");
        spec.grace = HOUR;
        // Half of it would be the grace.
        spec.kill_budget = Duration::from_secs(40);
        spec.deadline = Boottime::now() + Duration::from_secs(15);
        spec.walk_only = walk_only;
        let mut guard = RawGuard::idle(&spec);
        cgroup.write("cgroup.procs", &guard.pid().to_string());
        guard.send(&spec);
        started(guard.report());
        let members = tree.members();
        cgroup.write("cgroup.freeze", "1");
        until("all are frozen", || {
            cgroup.read("cgroup.events").contains("frozen 1")
        });
        guard.send(&Control::Deadline(Boottime::now() + HOUR));
        until("deadline and grace are over", || {
            Boottime::now() > spec.deadline + spec.kill_budget / 2
        });
        assert_eq!(alive(&members).len(), members.len());
        let thaw = Boottime::now();
        cgroup.write("cgroup.freeze", "0");
        // SIGKILL at once: SIGTERM alone would have left the stubborn one, for an hour.
        assert_eq!(
            exited(guard.report()),
            (None, Some(9), Some(Cause::Deadline))
        );
        let (_, at) = gone(guard.report());
        assert!(at < thaw + spec.kill_budget / 2, "there was a grace");
        println!(
            "gone {:?} after the thaw (walk only: {walk_only})",
            at.since(thaw)
        );
        assert_gone(&members);
        guard.finish();
    }
}

/// A log that takes its time: 200 ms for each line of output.
struct SlowLog;

impl tracing::Subscriber for SlowLog {
    fn enabled(&self, meta: &tracing::Metadata<'_>) -> bool {
        meta.target() == soloist::runner::LOG_TARGET
    }
    fn event(&self, _: &tracing::Event<'_>) {
        std::thread::sleep(Duration::from_millis(200));
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// It is in the pipe when the tree is gone. A busy host may need longer than half a second for any part of it.
#[tokio::test]
async fn the_end_of_an_output_is_kept_however_slowly_it_is_read() {
    let _slow = tracing::subscriber::set_default(SlowLog);
    let log = config::Output {
        log: true,
        ..OUTPUT
    };
    // Less than a pipe holds: the command does not wait for the reader. Each chunk takes 700 ms.
    let end = run_with(
        shell("yes $(seq 600) | head -c 30000; echo; echo the end"),
        log,
    )
    .await;
    let text = end.output_text();
    assert!(
        text.ends_with("the end\n"),
        "{} of {}",
        text.len(),
        end.output_bytes
    );
}

impl TestCgroup {
    /// One of the freezer of cgroup v1.
    pub fn freezer() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mut mounts = mounts.lines().filter_map(|line| line.split_once(" - "));
        let (place, _) = mounts.find(|(_, what)| what.ends_with(",freezer"))?;
        let name = format!("test-{}", RunId::random());
        let path = Path::new(place.split(' ').nth(4)?).join(name);
        fs::create_dir(&path).ok()?;
        Some(Self(path))
    }

    pub fn add(&self, pid: u32) -> std::io::Result<()> {
        fs::write(self.0.join("cgroup.procs"), pid.to_string())
    }

    pub fn freeze(&self, freeze: bool) {
        let v1 = self.0.join("freezer.state").exists();
        let (file, text) = match (v1, freeze) {
            (true, true) => ("freezer.state", "FROZEN"),
            (true, false) => ("freezer.state", "THAWED"),
            (false, true) => ("cgroup.freeze", "1"),
            (false, false) => ("cgroup.freeze", "0"),
        };
        self.write(file, text);
    }

    /// Another one in it, which is to be dropped first.
    fn below(&self, name: &str) -> Self {
        let path = self.0.join(name);
        fs::create_dir(&path).expect("our own cgroup");
        Self(path)
    }

    /// The command starts in it.
    fn holds(&self, command: &mut Command) {
        let members = fs::File::options()
            .write(true)
            .open(self.0.join("cgroup.procs"));
        let members = members.expect("our own cgroup");
        // SAFETY: a write is async-signal-safe and nothing is allocated.
        unsafe { command.pre_exec(move || Ok(rustix::io::write(&members, b"0").map(drop)?)) };
    }

    /// What a daemon in it would sweep: the number of runs. Daemons of other tests sweep what is in the tests' own
    /// cgroup every few seconds, and this one nothing of theirs.
    fn sweep(&self) -> usize {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "guard::stand_in_that_sweeps", "--nocapture"]);
        self.holds(command.env("SOLOIST_TEST_SWEEPS", "1"));
        let output = command.output().expect("a stand-in");
        let text = String::from_utf8_lossy(&output.stdout);
        let swept = text
            .split_once("swept ")
            .and_then(|(_, rest)| rest.split_once(" runs"));
        let swept = swept.and_then(|(number, _)| number.parse().ok());
        swept.unwrap_or_else(|| panic!("{output:?}"))
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).expect("our own cgroup");
    }
    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).expect("our own cgroup")
    }
}

/// Not a test of its own: [`TestCgroup::sweep`].
#[test]
fn stand_in_that_sweeps() {
    if std::env::var_os("SOLOIST_TEST_SWEEPS").is_some() {
        println!("swept {} runs", Runner::sweep());
    }
}

// ---- deaths ----

#[test]
fn when_the_daemon_goes_the_tree_goes_and_the_guard_settles_as_crashed() {
    for walk_only in WALK_ONLY {
        let tree = Tree::new();
        let spec = Spec {
            walk_only,
            settle_exe: Some(tree.hand_over_script()),
            grace: HOUR,
            ..tree.spec("wait")
        };
        let mut guard = RawGuard::start(&spec);
        started(guard.report());
        let members = tree.members();
        let mut child = guard.die();
        let handed = tree.handed_over();
        assert_gone(&members);
        assert_eq!(handed.settle, spec.settle);
        assert_eq!(handed.end.outcome, Outcome::Crashed);
        assert_eq!(handed.end.signal, Some(15));
        assert!(
            handed
                .end
                .error
                .as_deref()
                .is_some_and(|e| e.contains("daemon died")),
            "{:?}",
            handed.end
        );
        assert!(handed.end.started.is_some());
        assert!(child.wait().expect("it ends").success());
        // What systemd sends to all that a dead daemon left behind does not end it. The standard library resets
        // SIGPIPE.
        let kept = [libc::SIGCHLD, libc::SIGCONT, libc::SIGPIPE].into_iter();
        let kept = kept.chain(OF_ITSELF);
        let status = tree.path().join("handed.status");
        assert_eq!(signals(&status, "SigIgn"), all_signals_but(kept));
        assert_eq!(signals(&status, "SigBlk"), 0);
    }
}

#[test]
fn a_command_that_ended_before_the_daemon_died_keeps_its_true_outcome() {
    for (command, outcome, code) in [
        ("exit 0", Outcome::Succeeded, Some(0)),
        ("exit 7", Outcome::Failed, Some(7)),
    ] {
        let tree = Tree::new();
        let mut guard = RawGuard::start(&Spec {
            settle_exe: Some(tree.hand_over_script()),
            ..shell(command)
        });
        started(guard.report());
        exited(guard.report());
        gone(guard.report());
        let mut child = guard.die();
        let end = tree.handed_over().end;
        assert_eq!(
            (end.outcome, end.exit_code, end.error),
            (outcome, code, None)
        );
        child.wait().expect("it ends");
    }
}

#[test]
fn a_command_that_could_not_be_started_is_handed_over_as_failed_with_its_reason() {
    let tree = Tree::new();
    let mut guard = RawGuard::start(&Spec {
        settle_exe: Some(tree.hand_over_script()),
        ..spec(&["no-such-command"])
    });
    assert!(matches!(guard.report(), Report::StartFailed { .. }));
    gone(guard.report());
    let mut child = guard.die();
    let end = tree.handed_over().end;
    assert_eq!((end.outcome, end.started), (Outcome::Failed, None));
    assert!(
        end.error
            .is_some_and(|e| e.contains("`no-such-command` not found"))
    );
    child.wait().expect("it ends");
}

#[test]
fn a_settled_run_is_not_settled_again() {
    let tree = Tree::new();
    let mut guard = RawGuard::start(&Spec {
        settle_exe: Some(tree.hand_over_script()),
        ..spec(&["true"])
    });
    started(guard.report());
    exited(guard.report());
    gone(guard.report());
    guard.finish();
    assert!(!tree.path().join("handed").exists());
}

#[test]
fn an_outcome_of_a_run_without_a_guard_is_left_to_a_process_of_its_own() {
    let tree = Tree::new();
    let end = guard::KnownEnd {
        outcome: Outcome::Missed,
        cause: None,
        usage: soloist::model::Usage::default(),
        exit_code: None,
        signal: None,
        error: Some("too late".into()),
        started: None,
        ended: guard::Moment::now(),
    };
    let settle = serde_json::json!({"token": 7});
    let runner = Runner::with_exe(tree.hand_over_script()).expect("a runner");
    let hand_over = HandOver { settle, end };
    runner.hand_over(&hand_over).expect("a process");
    let handed = tree.handed_over();
    assert_eq!(handed.end, hand_over.end);
    assert_eq!(handed.settle, hand_over.settle);
}

#[test]
fn what_is_no_hand_over_is_refused_with_the_reason() {
    for (handed, said) in [
        ("{", "cannot read the guard's hand-over"),
        (
            r#"{"settle":7,"end":{"outcome":"failed","exit_code":1,"signal":null,"error":null,"started":null,
                "ended":{"wall_us":1,"boottime":1}}}"#,
            "cannot read the daemon's instructions",
        ),
    ] {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(handed.as_bytes()).expect("written");
        std::io::Seek::rewind(&mut file).expect("rewound");
        let mut command = Command::new(EXE);
        let settle = command.arg(guard::SETTLE_ARGUMENT).stdin(file).output();
        let settle = settle.expect("a process");
        let text = String::from_utf8_lossy(&settle.stderr);
        assert!(text.contains(said), "{text}");
        assert_eq!(settle.status.code(), Some(70));
    }
}

/// A signal to all that a stopped daemon left behind, or to its group in a terminal, does not end it.
#[test]
fn who_keeps_trying_to_record_an_outcome_outlives_service_and_terminal() {
    let key = RunId::random().to_string();
    let end = guard::KnownEnd {
        outcome: Outcome::Succeeded,
        cause: None,
        usage: soloist::model::Usage::default(),
        exit_code: Some(0),
        signal: None,
        error: None,
        started: None,
        ended: guard::Moment::now(),
    };
    // Nobody listens there.
    let settle = soloist::settle::ReleaseOnDeath {
        store: config::Store::from_url("redis://127.0.0.1:1").expect("a store"),
        key: key.clone(),
        owner: "a".into(),
        patience: HOUR,
    };
    let settle = serde_json::to_value(&settle).expect("JSON");
    let hand_over = HandOver { settle, end };
    runner().hand_over(&hand_over).expect("a process");
    let has_it = |pid: &u32| {
        let handed = fs::read_to_string(format!("/proc/{pid}/fd/0"));
        process::command_line(*pid).contains(guard::SETTLE_ARGUMENT)
            && handed.is_ok_and(|text| text.contains(&key))
    };
    let find = || {
        process::children(std::process::id())
            .into_iter()
            .find(has_it)
    };
    until("it is there", || find().is_some());
    let pid = find().expect("it is there").cast_signed();
    let status = format!("/proc/{pid}/status");
    let ends = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];
    let wanted = ends
        .into_iter()
        .fold(0, |set, signal| set | 1 << (signal - 1));
    until("it ignores them", || {
        signals(Path::new(&status), "SigIgn") & wanted == wanted
    });
    let process = Pid::from_raw(pid).expect("a pid");
    assert_eq!(rustix::process::getsid(Some(process)), Ok(process));
    kill(pid, Signal::KILL);
    rustix::process::waitpid(Some(process), rustix::process::WaitOptions::empty()).expect("reaped");
}

/// Whether this process was forked and has executed nothing since (PF_FORKNOEXEC), and its parent.
fn forked_by(pid: u32) -> (bool, i32) {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    let flags: u64 = fields[6].parse().expect("flags");
    (flags & 0x40 != 0, fields[1].parse().expect("a parent"))
}

async fn zygote_of(runner: &Runner) -> u32 {
    until_async("the zygote is ready", || {
        runner.start_zygote();
        runner.zygote_pid().is_some()
    })
    .await;
    runner.zygote_pid().expect("a zygote")
}

/// Starts a command that goes on.
async fn start_waiting(runner: &Runner) -> Running {
    let running = runner
        .start(spec(&["sleep", "1000"]), OUTPUT)
        .expect("a guard");
    running.started().await.expect("started");
    running
}

async fn cancel(mut running: Running) {
    running.stop(Stop::Cancelled, None);
    assert_eq!(running.wait().await.outcome, Outcome::Cancelled);
    running.settled().await;
}

fn dead(pid: u32) -> bool {
    stat(pid.cast_signed()).is_none_or(|(state, _)| state == 'Z')
}

#[tokio::test]
async fn guards_are_forked_from_a_zygote_and_outlive_it() {
    let runner = runner();
    let zygote = zygote_of(&runner).await;
    let (first, second) = (start_waiting(&runner).await, start_waiting(&runner).await);
    let this = std::process::id().cast_signed();
    for running in [&first, &second] {
        let guard = running.guard_pid().expect("a guard");
        assert_eq!(forked_by(guard), (true, this));
        let line = fs::read(format!("/proc/{guard}/cmdline")).expect("a command line");
        let words: Vec<&[u8]> = line.split(|&b| b == 0).take(3).collect();
        assert_eq!(words, [&b"soloist"[..], b"__guard", b"backup"]);
        let comm = fs::read_to_string(format!("/proc/{guard}/comm")).expect("its name");
        assert_eq!(comm.trim(), "soloist");
    }
    kill(zygote.cast_signed(), Signal::KILL);
    until_async("the zygote is dead", || dead(zygote)).await;
    let third = start_waiting(&runner).await;
    assert_ne!(zygote_of(&runner).await, zygote);
    for running in [first, second, third] {
        cancel(running).await;
    }
}

#[tokio::test]
async fn a_zygote_that_is_stopped_or_frozen_is_replaced_and_nothing_runs_twice() {
    for frozen in [false, true] {
        let Some(cgroup) = TestCgroup::new() else {
            return skip("no cgroup v2 that we may write to");
        };
        let runner = runner();
        let zygote = zygote_of(&runner).await;
        if frozen {
            cgroup.write("cgroup.procs", &zygote.to_string());
            cgroup.write("cgroup.freeze", "1");
            until_async("it is frozen", || {
                cgroup.read("cgroup.events").contains("frozen 1")
            })
            .await;
        } else {
            kill(zygote.cast_signed(), Signal::STOP);
            until_async("it is stopped", || {
                stat(zygote.cast_signed()).is_some_and(|(state, _)| state == 'T')
            })
            .await;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("ran");
        let line = format!("echo >> {}", file.display());
        for _ in 0..2 {
            let end = run_by(&runner, shell(&line), OUTPUT).await;
            assert_eq!(end.outcome, Outcome::Succeeded, "{end:?}");
        }
        assert_ne!(zygote_of(&runner).await, zygote);
        // It must not fork, when it goes on, what it was asked for.
        until_async("it is dead", || dead(zygote)).await;
        let runs = fs::read_to_string(&file).expect("it ran").len();
        assert_eq!(runs, 2);
    }
}

/// Its guards share its limit with it, so there is no other way to start one.
#[tokio::test]
async fn a_zygote_that_is_refused_a_process_says_why_and_goes_on() {
    // Root is refused nothing.
    let user = 2_000_000_000 + std::process::id();
    let (runner, _dir) = runner_with(&match rustix::process::geteuid().is_root() {
        true => format!("exec setpriv --reuid={user} --regid={user} --clear-groups {EXE} \"$@\""),
        false => ":".to_owned(),
    });
    let zygote = zygote_of(&runner).await;
    let hard = fs::read_to_string(format!("/proc/{zygote}/limits")).expect("a process");
    let hard = hard.lines().find(|l| l.starts_with("Max processes"));
    let hard = hard.and_then(|l| l.split_ascii_whitespace().nth(3));
    let hard = hard.expect("a limit").to_owned();
    // As that user, because not every root may limit others.
    let limit = |soft: &str| {
        let mut command = Command::new("prlimit");
        command.args(["--pid", &zygote.to_string(), &format!("--nproc={soft}:")]);
        if rustix::process::geteuid().is_root() {
            command.uid(user).gid(user);
        }
        assert!(command.status().expect("prlimit").success());
    };
    limit("1");
    for _ in 0..2 {
        let refused = runner.start(spec(&["true"]), OUTPUT);
        let error = refused.expect_err("no process is left").to_string();
        assert!(
            error.starts_with("cannot start the guard of `backup`")
                && error.ends_with(
                    "a limit on processes is reached (ulimit -u, TasksMax, pids.max, kernel.pid_max)"
                ),
            "{error}"
        );
    }
    assert_eq!((runner.zygote_pid(), dead(zygote)), (Some(zygote), false));
    limit(&hard);
    let running = start_waiting(&runner).await;
    let guard = running.guard_pid().expect("a guard");
    let this = std::process::id().cast_signed();
    assert_eq!(forked_by(guard), (true, this));
    cancel(running).await;
    assert_eq!(runner.zygote_pid(), Some(zygote));
}

/// Starts guards from a script that does `zygote` before it becomes a zygote.
fn runner_with(zygote: &str) -> (Runner, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    let exe = dir.path().join("soloist");
    let script = format!("#!/bin/sh\n[ \"$1\" != __zygote ] || {zygote}\nexec {EXE} \"$@\"\n");
    fs::write(&exe, script).expect("a script");
    fs::set_permissions(&exe, fs::Permissions::from_mode(0o755)).expect("executable");
    (Runner::with_exe(exe).expect("a runner"), dir)
}

#[tokio::test]
async fn without_a_zygote_guards_are_executed() {
    let (runner, _dir) = runner_with("exec sleep 1000");
    let running = start_waiting(&runner).await;
    assert_eq!(runner.zygote_pid(), None);
    assert!(!forked_by(running.guard_pid().expect("a guard")).0);
    cancel(running).await;
}

/// At most one is begun in each second: where none is of any use, little is spent on them.
#[tokio::test]
async fn zygotes_come_again_and_not_too_often() {
    let runner_ = runner();
    for _ in 0..2 {
        let zygote = zygote_of(&runner_).await;
        tokio::time::sleep(Duration::from_millis(1100)).await;
        kill(zygote.cast_signed(), Signal::KILL);
        until_async("it is dead", || dead(zygote)).await;
    }
    zygote_of(&runner_).await;

    let (runner, dir) = runner_with("{ echo >> \"$0.begun\"; exit 1; }");
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_millis(500) {
        runner.start_zygote();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let most = begun.elapsed().as_secs() as usize + 1;
    let times = fs::read_to_string(dir.path().join("soloist.begun")).map_or(0, |text| text.len());
    assert!(times <= most, "{times} times");
}

/// The guard that it forked is there, and nobody knows it.
#[tokio::test]
async fn a_zygote_that_dies_before_it_answers_has_forked_in_vain() {
    let (runner, _dir) = runner_with("export SOLOIST_FAILPOINT=after_fork");
    for _ in 0..3 {
        let zygote = zygote_of(&runner).await;
        let running = start_waiting(&runner).await;
        assert!(dead(zygote));
        let known = running.guard_pid().expect("a guard");
        assert!(!forked_by(known).0);
        // Only the guard that this process knows has the run. The two do not call themselves the same.
        let title = process::command_line(known);
        let words = title.find(guard::ARGUMENT).map(|at| title[at..].trim_end());
        let words = words.expect("a guard's title");
        until("the other guard is gone", || {
            let guards = process::children(std::process::id());
            let same = |pid: &u32| !dead(*pid) && process::command_line(*pid).contains(words);
            guards.into_iter().filter(same).count() <= 1
        });
        cancel(running).await;
    }
}

#[test]
fn a_zygote_refuses_what_is_no_request() {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let kind = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let pair = socketpair(AddressFamily::UNIX, kind.0, kind.1, None);
    let (ours, theirs) = pair.expect("a socket pair");
    let mut zygote = Command::new(EXE)
        .args([guard::ZYGOTE_ARGUMENT, &"-".repeat(500)])
        .stdin(theirs)
        .stdout(Stdio::null())
        .spawn()
        .expect("a zygote");
    let mut ours = fs::File::from(ours);
    let says = |mut socket: &fs::File| {
        let mut reply = [0; 4];
        socket.read_exact(&mut reply).expect("a reply");
        i32::from_ne_bytes(reply)
    };
    assert_eq!(says(&ours), 0, "it is ready");
    // Without descriptors.
    ours.write_all(b"soloist\0").expect("it listens");
    assert_eq!(says(&ours), -libc::EBADF);
    drop(ours);
    assert!(zygote.wait().expect("it ends").success());
}

#[test]
fn a_zygote_ends_with_its_daemon() {
    for stopped in [false, true] {
        let tree = Tree::new();
        let mut daemon = stand_in(&tree, &tree.spec("wait"));
        tree.members();
        let zygote = process::children(daemon.id())
            .into_iter()
            .find(|pid| process::command_line(*pid).contains("__zygote"))
            .expect("a zygote");
        if stopped {
            kill(zygote.cast_signed(), Signal::STOP);
        }
        daemon.kill().expect("killed");
        until("the zygote is gone", || dead(zygote));
        daemon.wait().expect("reaped");
    }
}

#[test]
fn a_guard_whose_daemon_dies_before_it_spoke_just_goes() {
    let mut child = RawGuard::idle(&spec(&["true"])).die();
    assert!(child.wait().expect("it ends").success());
}

/// Not a test of its own: the daemon that another test kills. Runs the spec in the file that the variable names.
#[tokio::test]
async fn stand_in_daemon() {
    let Some(file) = std::env::var_os("SOLOIST_TEST_STAND_IN") else {
        return;
    };
    let spec: Spec = serde_json::from_slice(&fs::read(file).expect("a spec")).expect("a spec");
    // Without it its zygote would end.
    let runner = runner();
    let mut running = runner.start(spec, OUTPUT).expect("a guard");
    running.started().await.expect("started");
    running.wait().await;
    std::future::pending::<()>().await;
}

fn stand_in(tree: &Tree, spec: &Spec) -> Child {
    let file = tree.path().join("spec");
    fs::write(&file, serde_json::to_vec(spec).expect("JSON")).expect("written");
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "guard::stand_in_daemon", "--nocapture"])
        .env("SOLOIST_TEST_STAND_IN", file)
        .stdout(Stdio::null())
        .spawn()
        .expect("a stand-in")
}

#[test]
fn when_the_daemon_is_killed_the_tree_is_gone_and_settled_as_crashed() {
    for walk_only in WALK_ONLY {
        let tree = Tree::new();
        // Writes all the time: the closed pipe must not make it look as if it had ended by itself.
        let mut spec = tree.spec("while :; do echo busy; done");
        (spec.walk_only, spec.settle_exe, spec.grace) =
            (walk_only, Some(tree.hand_over_script()), HOUR);
        let mut daemon = stand_in(&tree, &spec);
        let members = tree.members();
        daemon.kill().expect("killed");
        let killed = Boottime::now();
        let handed = tree.handed_over();
        assert_gone(&members);
        println!(
            "gone {:?} after the kill (walk only: {walk_only})",
            handed.end.ended.boottime.since(killed)
        );
        assert_eq!(handed.end.outcome, Outcome::Crashed, "{:?}", handed.end);
        daemon.wait().expect("reaped");
    }
}

/// Not a test of its own: a daemon in which, when it is killed, a command's pipes are closed long before the socket
/// of its guard.
#[test]
fn stand_in_whose_pipes_close_first() {
    let Some(file) = std::env::var_os("SOLOIST_TEST_PIPES_FIRST") else {
        return;
    };
    let spec: Spec = serde_json::from_slice(&fs::read(file).expect("a spec")).expect("a spec");
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(Resource::Nofile, limit).expect("a higher limit");
    // The kernel closes the newest first: the pipes, then much else, then the socket.
    let pair = UnixStream::pair().expect("a socket pair");
    let mut ballast: Vec<_> = (0..3000).map_while(|_| UnixStream::pair().ok()).collect();
    ballast.truncate(ballast.len().saturating_sub(20));
    let mut guard = RawGuard::on(&spec, pair);
    guard.send(&spec);
    started(guard.report());
    let RawGuard {
        child: _child,
        socket: _socket,
        reports,
        mut stdout,
    } = guard;
    // The kernel closes a socket with the newest of its descriptors, and this one is newer than the pipes.
    drop(reports);
    fs::write("started", "").expect("written");
    let mut nothing = [0; 4096];
    while stdout.read(&mut nothing).is_ok_and(|n| n > 0) {}
    drop(ballast);
}

#[test]
fn a_command_that_dies_of_its_daemons_closed_pipe_is_crashed_and_not_failed() {
    let tree = Tree::new();
    let spec = Spec {
        settle_exe: Some(tree.hand_over_script()),
        ..spec(&["yes"])
    };
    let file = tree.path().join("spec");
    fs::write(&file, serde_json::to_vec(&spec).expect("JSON")).expect("written");
    let mut daemon = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "guard::stand_in_whose_pipes_close_first"])
        .env("SOLOIST_TEST_PIPES_FIRST", file)
        .current_dir(tree.path())
        .stdout(Stdio::null())
        .spawn()
        .expect("a stand-in");
    until("it is started", || tree.path().join("started").exists());
    daemon.kill().expect("killed");
    let end = tree.handed_over().end;
    daemon.wait().expect("reaped");
    // It ends by SIGPIPE, unless this host was so busy that the guard saw its socket close first.
    println!("ended by signal {:?}", end.signal);
    assert_eq!(end.outcome, Outcome::Crashed, "{end:?}");
}

#[test]
fn while_the_daemon_is_stopped_its_lease_still_ends_the_tree() {
    let tree = Tree::new();
    let mut spec = tree.spec("wait");
    spec.settle_exe = Some(tree.hand_over_script());
    spec.deadline = Boottime::now() + Duration::from_secs(20);
    let mut daemon = stand_in(&tree, &spec);
    let members = tree.members();
    let pid = daemon.id().cast_signed();
    kill(pid, Signal::STOP);
    until("the tree is gone", || alive(&members).is_empty());
    assert!(Boottime::now() >= spec.deadline);
    daemon.kill().expect("killed");
    assert_eq!(tree.handed_over().end.outcome, Outcome::LeaseLost);
    daemon.wait().expect("reaped");
}

#[tokio::test]
async fn when_the_guard_is_killed_the_daemon_ends_the_tree() {
    for walk_only in WALK_ONLY {
        let tree = Tree::new();
        let runner = forking().await;
        // It is no business of other runs, and does not wait for them.
        let other = start_waiting(&runner).await;
        let mut running = runner
            .start(
                Spec {
                    walk_only,
                    ..tree.spec("echo hello; wait")
                },
                OUTPUT,
            )
            .expect("a guard");
        running.started().await.expect("started");
        until_async("the tree has grown", || tree.complete()).await;
        until_async("it has spoken", || {
            !running.output().piece(0, 64).bytes.is_empty()
        })
        .await;
        let members = tree.members();
        kill(
            running.guard_pid().expect("a pid").cast_signed(),
            Signal::KILL,
        );
        let killed = Boottime::now();
        let end = tokio::time::timeout(PATIENCE, running.wait())
            .await
            .expect("an end");
        println!(
            "gone {:?} after the kill (walk only: {walk_only})",
            end.ended.boottime.since(killed)
        );
        assert_gone(&members);
        assert_eq!(
            (end.outcome, end.cause),
            (Outcome::Crashed, Some(Cause::GuardGone))
        );
        assert!(
            end.error
                .as_deref()
                .is_some_and(|e| e.contains("guard of this run died (signal: 9")),
            "{end:?}"
        );
        assert_eq!(end.output_text(), "hello\n");
        running.settled().await;
        assert!(!dead(other.guard_pid().expect("a pid")));
        cancel(other).await;
    }
}

#[tokio::test]
async fn a_stopped_guard_does_not_let_a_command_outlive_its_lease() {
    let tree = Tree::new();
    let mut spec = tree.spec("wait");
    spec.deadline = Boottime::now() + Duration::from_secs(20);
    // The looks at all of this process's children take their time: they are those of all tests.
    spec.kill_budget = Duration::from_secs(64);
    let deadline = spec.deadline + spec.kill_budget;
    let mut running = forking().await.start(spec, OUTPUT).expect("a guard");
    // The guard, too, may be slow to say that it has executed the command; else nobody would know.
    running.started().await.expect("started");
    until_async("the tree has grown", || tree.complete()).await;
    let members = tree.members();
    kill(
        running.guard_pid().expect("a pid").cast_signed(),
        Signal::STOP,
    );
    let end = tokio::time::timeout(PATIENCE, running.wait())
        .await
        .expect("an end");
    assert_gone(&members);
    assert_eq!(end.cause, Some(Cause::Deadline));
    println!(
        "{:?} before its time was over",
        deadline.since(end.ended.boottime)
    );
    assert!(
        end.ended.boottime <= deadline,
        "{:?} late",
        end.ended.boottime.since(deadline)
    );
    running.settled().await;
}

#[tokio::test]
async fn a_stopped_guard_does_not_save_a_command_from_its_timeout_or_from_a_stop() {
    for timeout in [None, Some(Duration::from_secs(20))] {
        let tree = Tree::new();
        let spec = Spec {
            grace: Duration::from_millis(100),
            timeout,
            ..tree.spec("wait")
        };
        let mut running = forking().await.start(spec, OUTPUT).expect("a guard");
        running.started().await.expect("started");
        until_async("the tree has grown", || tree.complete()).await;
        let members = tree.members();
        kill(
            running.guard_pid().expect("a pid").cast_signed(),
            Signal::STOP,
        );
        if timeout.is_none() {
            running.stop(Stop::Cancelled, None);
        }
        let end = tokio::time::timeout(PATIENCE, running.wait())
            .await
            .expect("an end");
        assert_gone(&members);
        let cause = timeout.map_or(Cause::Stopped(Stop::Cancelled), |_| Cause::Timeout);
        assert_eq!(end.cause, Some(cause));
        let error = end.error.unwrap_or_default();
        assert!(error.contains("stopped or frozen the guard"), "{error}");
        running.settled().await;
    }
}

/// In /proc a frozen process looks as if it slept. In a freezer of cgroup v1 it does not even die of SIGKILL.
#[tokio::test]
async fn a_frozen_guard_saves_a_command_neither_from_its_timeout_nor_from_a_stop_nor_from_its_lease()
 {
    let soon = || Boottime::now() + Duration::from_secs(10);
    let ends = [
        (Some(Duration::from_secs(10)), None, false, Cause::Timeout),
        (None, None, true, Cause::Stopped(Stop::Shutdown)),
        (None, Some(soon), false, Cause::Deadline),
    ];
    for (v1, (timeout, deadline, stop, cause)) in [false, true]
        .into_iter()
        .flat_map(|v1| ends.map(|e| (v1, e)))
    {
        let cgroup = if v1 {
            TestCgroup::freezer()
        } else {
            TestCgroup::new()
        };
        let Some(cgroup) = cgroup else {
            skip("no cgroup that we may freeze");
            continue;
        };
        let tree = Tree::new();
        let spec = tree.spec("wait");
        let spec = Spec {
            grace: Duration::from_millis(100),
            timeout,
            deadline: deadline.map_or(spec.deadline, |soon| soon()),
            ..spec
        };
        let mut running = forking().await.start(spec, OUTPUT).expect("a guard");
        running.started().await.expect("started");
        until_async("the tree has grown", || tree.complete()).await;
        let members = tree.members();
        let guard = running.guard_pid().expect("a pid");
        cgroup.write("cgroup.procs", &guard.to_string());
        cgroup.freeze(true);
        if stop {
            running.stop(Stop::Shutdown, None);
        }
        let end = tokio::time::timeout(PATIENCE, running.wait())
            .await
            .expect("an end");
        assert_gone(&members);
        assert_eq!(end.cause, Some(cause), "cgroup v1: {v1}");
        running.settled().await;
        cgroup.freeze(false);
        until_async("the guard is gone", || dead(guard)).await;
    }
}

/// Somebody may stop it for a moment.
#[tokio::test]
async fn a_stopped_guard_is_left_alone_until_it_should_have_ended_its_command() {
    // Each of them counts: without any of these the time would be over.
    let spec = Spec {
        deadline: Boottime::now() + HOUR,
        timeout: Some(HOUR),
        grace: 2 * HOUR,
        kill_budget: 4 * HOUR,
        ..shell("trap '' TERM; echo ready; while :; do sleep 1; done")
    };
    let mut running = forking().await.start(spec, OUTPUT).expect("a guard");
    until_async("it ignores SIGTERM", || running.output().total() > 0).await;
    let guard = running.guard_pid().expect("a guard").cast_signed();
    for told in [false, true] {
        kill(guard, Signal::STOP);
        if told {
            running.stop(Stop::Shutdown, Some(2 * HOUR));
        }
        until_async("it is stopped", || {
            stat(guard).is_some_and(|(state, _)| state == 'T')
        })
        .await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(stat(guard).map(|(state, _)| state), Some('T'));
        kill(guard, Signal::CONT);
    }
    running.stop(Stop::Cancelled, Some(Duration::ZERO));
    let end = running.wait().await;
    assert_eq!(end.cause, Some(Cause::Stopped(Stop::Shutdown)), "{end:?}");
    running.settled().await;
}

/// A guard that says this, and dies.
async fn last_words(words: &str) -> RunEnd {
    let dir = tempfile::tempdir().expect("a directory");
    let exe = dir.path().join("soloist");
    let script =
        format!("#!/bin/sh\n[ \"$1\" = __guard ] || exit\nread -r spec\necho '{words}' >&0\n");
    fs::write(&exe, script).expect("a script");
    fs::set_permissions(&exe, fs::Permissions::from_mode(0o755)).expect("executable");
    let runner = Runner::with_exe(exe).expect("a runner");
    let mut running = runner.start(spec(&["true"]), OUTPUT).expect("a guard");
    running.wait().await
}

#[tokio::test]
async fn what_a_guard_said_before_it_died_stays_true() {
    let at = r#"{"wall_us":1,"boottime":1}"#;
    let exited = format!(r#"{{"exited":{{"exit_code":3,"signal":null,"cause":null,"at":{at}}}}}"#);
    let end = last_words(&exited).await;
    assert_eq!(
        (end.outcome, end.exit_code, end.cause, end.error),
        (Outcome::Failed, Some(3), None, None)
    );
    let end = last_words(r#"{"start_failed":{"error":"no","cause":null}}"#).await;
    assert_eq!(
        (end.outcome, end.cause, end.error.as_deref()),
        (Outcome::Failed, None, Some("no"))
    );
    let end = last_words("nothing that it should say").await;
    assert_eq!(end.cause, Some(Cause::GuardGone), "{end:?}");
}

fn zombies_of_ours() -> Vec<i32> {
    let me = std::process::id().to_string();
    let pids = fs::read_dir("/proc")
        .expect("/proc")
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let mut fields = stat[stat.rfind(')').map_or(0, |i| i + 1)..].split_ascii_whitespace();
        fields.next() == Some("Z") && fields.next() == Some(&me)
    })
    .collect()
}

/// Not a test of its own: a program that reaps strangers while guards of its own end.
#[tokio::test]
async fn stand_in_that_reaps_strangers() {
    if std::env::var_os("SOLOIST_TEST_STRANGERS").is_none() {
        return;
    }
    let reaps = tokio::spawn(soloist::runner::reap_strangers());
    let runner = runner();
    for _ in 0..10 {
        let mut runs = Vec::new();
        for _ in 0..10 {
            runs.push(runner.start(spec(&["sleep", "1000"]), OUTPUT));
        }
        for run in runs.iter().flatten() {
            run.started().await.expect("started");
            for _ in 0..10 {
                // SAFETY: the child does what is async-signal-safe alone.
                unsafe {
                    if libc::fork() == 0 {
                        libc::_exit(3);
                    }
                }
            }
            let guard = run.guard_pid().expect("a pid");
            kill(guard.cast_signed(), Signal::KILL);
        }
        for run in runs {
            let mut run = run.expect("a guard");
            let error = run.wait().await.error.unwrap_or_default();
            assert!(error.contains("died (signal: 9"), "{error}");
            run.settled().await;
        }
        // Nobody takes the signal, and nobody is told.
        drop(runner.prepare(&JobName::new("a"), RunId::random()));
    }
    until_async("all are reaped", || zombies_of_ours().is_empty()).await;
    assert!(!reaps.is_finished());
}

/// Not a test of its own: a debugger, which lets go at the end of its input.
#[test]
fn stand_in_that_traces() {
    let Ok(pid) = std::env::var("SOLOIST_TEST_TRACED") else {
        return;
    };
    let pid: i32 = pid.parse().expect("a pid");
    // SAFETY: a system call about another process, without pointers.
    if unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) } == 0 {
        println!("\ntraces");
        let _ = std::io::stdin().read(&mut [0]);
    }
}

/// Who is traced stays a zombie until the debugger lets go: the run is not over before that.
#[tokio::test]
async fn a_run_whose_guard_was_killed_is_over_once_all_of_it_is_reaped() {
    let tree = Tree::new();
    let running = runner().start(tree.spec("wait"), OUTPUT);
    let mut running = running.expect("a guard");
    until_async("the tree has grown", || tree.complete()).await;
    let traced = tree.members()[0].1;
    let mut tracer = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "guard::stand_in_that_traces", "--nocapture"])
        .env("SOLOIST_TEST_TRACED", traced.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a stand-in");
    let lines = BufReader::new(tracer.stdout.take().expect("a pipe")).lines();
    let traces = lines.map_while(Result::ok).any(|line| line == "traces");
    if traces {
        let guard = running.guard_pid().expect("a pid").cast_signed();
        kill(guard, Signal::KILL);
        until_async("it is dead", || {
            stat(traced).is_some_and(|(state, _)| state == 'Z') && stat(guard).is_none()
        })
        .await;
        // Time to take the run for over. A host so busy that it is too short hides a fault, and makes none.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let let_go = Boottime::now();
        drop(tracer.stdin.take());
        let end = running.wait().await;
        assert!(end.ended.boottime >= let_go, "{end:?}");
    } else {
        skip("no right to trace a process");
        running.stop(Stop::Cancelled, None);
        running.wait().await;
    }
    running.settled().await;
    tracer.wait().expect("it ends");
}

#[test]
fn who_reaps_strangers_takes_the_end_of_no_guard() {
    let status = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "guard::stand_in_that_reaps_strangers"])
        .env("SOLOIST_TEST_STRANGERS", "1")
        .stdout(Stdio::null())
        .status()
        .expect("a stand-in");
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn a_running_that_is_dropped_is_ended_and_settled_by_its_guard() {
    let tree = Tree::new();
    let running = forking()
        .await
        .start(
            Spec {
                settle_exe: Some(tree.hand_over_script()),
                ..tree.spec("wait")
            },
            OUTPUT,
        )
        .expect("a guard");
    until_async("the tree has grown", || tree.complete()).await;
    let members = tree.members();
    drop(running);
    until_async("the guard has handed over", || {
        tree.path().join("handed").exists()
    })
    .await;
    assert_gone(&members);
    assert_eq!(tree.handed_over().end.outcome, Outcome::Crashed);
}

/// True: the process runs no more; its zombie may still be there.
fn wait_for_the_last_thread(pid: i32) {
    until("its last thread is gone", || {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        stat(pid).is_none_or(|(state, _)| state == 'Z') && threads <= 1
    });
}

#[tokio::test]
async fn a_killed_guard_takes_a_command_with_it_whose_first_thread_has_ended() {
    // Without a daemon, and also with one that ends what was left behind.
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let program = headless().to_str().expect("UTF-8");
    let headless_pid = |name: &str| {
        let mut pid = 0;
        until("it is there", || {
            let text = fs::read_to_string(dir.path().join(name)).unwrap_or_default();
            pid = text.trim().parse().unwrap_or(0);
            pid > 0 && stat(pid).is_some_and(|(state, _)| state == 'Z')
        });
        pid
    };
    let mut guard = RawGuard::start(&Spec {
        walk_only: true,
        ..spec(&[program, &file("alone")])
    });
    started(guard.report());
    let pid = headless_pid("alone");
    guard.child.kill().expect("killed");
    guard.child.wait().expect("reaped");
    wait_for_the_last_thread(pid);

    for walk_only in WALK_ONLY {
        let names = ["command", "left"].map(|n| format!("{n}{walk_only}"));
        let [command, left] = names.each_ref().map(|n| file(n));
        let both = format!("(setsid {program} {left} &); exec {program} {command}");
        let spec = Spec {
            walk_only,
            ..shell(&both)
        };
        let mut running = forking().await.start(spec, OUTPUT).expect("a guard");
        running.started().await.expect("started");
        let pids = names.each_ref().map(|n| headless_pid(n));
        kill(
            running.guard_pid().expect("a pid").cast_signed(),
            Signal::KILL,
        );
        let end = running.wait().await;
        assert_eq!(end.cause, Some(Cause::GuardGone));
        for pid in pids {
            let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
            assert!(threads <= 1, "told before it was gone");
        }
        running.settled().await;
    }
}

#[test]
fn a_sweep_ends_what_daemon_and_guard_left_in_a_cgroup_and_nothing_that_is_guarded() {
    sweep_ends_what_is_left(false, false);
}

#[test]
fn a_sweep_ends_what_another_user_pretends_to_guard() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can become another user");
    }
    sweep_ends_what_is_left(false, true);
}

/// The kernel kills nothing in such a cgroup, and does not list its processes.
#[test]
fn a_sweep_ends_what_is_left_in_a_threaded_cgroup() {
    sweep_ends_what_is_left(true, false);
}

/// What is in it has nothing to do with soloist.
#[test]
fn a_sweep_leaves_a_cgroup_alone_whose_name_only_begins_like_that_of_a_run() {
    let Some(parent) = TestCgroup::new() else {
        return skip("no cgroup v2 that we may write to");
    };
    let foreign = parent.below("soloist-web-1");
    let mut command = Command::new("sleep");
    foreign.holds(command.arg("1000"));
    let mut stranger = command.spawn().expect("a process");
    assert_eq!(parent.sweep(), 0);
    assert!(
        matches!(stranger.try_wait(), Ok(None)),
        "the sweep ended it"
    );
    stranger.kill().expect("it lives");
    stranger.wait().expect("it has ended");
}

/// A command of root's puts itself into a threaded cgroup: its own, or one below it.
#[test]
fn a_threaded_cgroup_hides_nothing_from_its_guard() {
    let Some(ours) = TestCgroup::new() else {
        return skip("no cgroup v2 that we may write to");
    };
    let parent = ours.0.parent().expect("a directory").display();
    for moves in [
        "echo 0 >$parent/cgroup.procs; echo threaded >$own/cgroup.type; echo 0 >$own/cgroup.procs",
        "mkdir $own/t; echo threaded >$own/t/cgroup.type; echo 0 >$own/t/cgroup.procs",
    ] {
        let run_id = RunId::random();
        let script = format!(
            "trap '' TERM; parent={parent}; own=$parent/soloist-{run_id}; {{ {moves}; }} || exit 7\n\
             (setsid sleep 1000 &); sleep 1000 & grep ^0:: /proc/self/cgroup; wait"
        );
        let mut guard = RawGuard::start(&Spec {
            run_id,
            grace: Duration::from_millis(10),
            ..shell(&script)
        });
        started(guard.report());
        let mut said = String::new();
        let mut output = BufReader::new(&mut guard.stdout);
        output.read_line(&mut said).expect("a line");
        assert!(said.contains(&run_id.to_string()), "{said}");
        guard.send(&Control::Stop {
            reason: Stop::Cancelled,
            grace: None,
        });
        exited(guard.report());
        gone(guard.report());
        let cgroup = ours.0.with_file_name(format!("soloist-{run_id}"));
        assert!(!cgroup.exists(), "{moves}");
        guard.finish();
    }
}

fn sweep_ends_what_is_left(threaded: bool, pretended: bool) {
    let Some(parent) = TestCgroup::new() else {
        return skip("no cgroup v2 that we may write to");
    };
    let orphaned = parent.below(&format!("soloist-{}", RunId::random()));
    if threaded && fs::write(orphaned.0.join("cgroup.type"), "threaded").is_err() {
        return skip("no cgroup here can be threaded");
    }
    let dir = tempfile::tempdir().expect("a directory");
    // One whose first thread has ended is passed over by the kernel.
    let file = dir.path().join("pid");
    let mut without = Command::new(headless());
    let mut orphans = [Command::new("sleep").arg("1000"), without.arg(&file)].map(|command| {
        orphaned.holds(command);
        command.stdout(Stdio::null()).spawn().expect("a process")
    });
    until("its first thread has ended", || {
        let (state, _) = stat(orphans[1].id().cast_signed()).expect("it lives");
        state == 'Z' && file.exists()
    });
    // Looks like the guard of the run, but belongs to somebody else.
    let mut pretender = pretended.then(|| {
        let readable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(dir.path(), readable).expect("another mode");
        fs::write(dir.path().join("__guard"), "sleep 1000 & echo; wait").expect("a script");
        let name = orphaned.0.file_name().expect("a name").to_string_lossy();
        let run = name.trim_start_matches("soloist-");
        let mut command = Command::new("sh");
        command.args(["__guard", "job", run]).uid(65534).gid(65534);
        let command = command.current_dir(dir.path()).stdout(Stdio::piped());
        let mut child = command.process_group(0).spawn().expect("a process");
        let mut said = [0];
        let output = child.stdout.as_mut().expect("a pipe");
        output.read_exact(&mut said).expect("it runs");
        child
    });
    // Beside a threaded cgroup the kernel allows no other.
    let guarded = (!threaded).then(|| {
        let spec = spec(&["sleep", "1000"]);
        let pair = UnixStream::pair().expect("a socket pair");
        let mut guard = RawGuard::with(&spec, pair, |command| parent.holds(command));
        guard.send(&spec);
        let command = started(guard.report());
        // The lock shows that the guard lives, also where its process cannot be seen.
        let cgroup = parent.0.join(format!("soloist-{}", spec.run_id));
        let cgroup = fs::File::open(cgroup).expect("the guard's cgroup");
        assert!(cgroup.try_lock().is_err());
        (guard, command)
    });

    assert_eq!(parent.sweep(), 1);
    for orphan in &mut orphans {
        let status = orphan.wait().expect("our child").to_string();
        assert_eq!(status, "signal: 9 (SIGKILL)");
    }
    if let Some(child) = &mut pretender {
        let group = Pid::from_raw(child.id().cast_signed()).expect("a pid");
        rustix::process::kill_process_group(group, Signal::KILL).expect("ours");
        child.wait().expect("reaped");
    }
    assert!(!orphaned.0.exists());
    if let Some((mut guard, command)) = guarded {
        assert!(stat(command).is_some_and(|(state, _)| state != 'Z'));
        guard.send(&Control::Stop {
            reason: Stop::Cancelled,
            grace: None,
        });
        exited(guard.report());
        gone(guard.report());
        guard.finish();
    }
}

/// Signals for an error of a program itself.
const OF_ITSELF: [i32; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
    libc::SIGTRAP,
];

/// As the kernel writes a set of signals. SIGKILL and SIGSTOP are in none: nobody can block or ignore them.
fn all_signals_but(signals: impl IntoIterator<Item = i32>) -> u64 {
    let never = [libc::SIGKILL, libc::SIGSTOP];
    let without = signals.into_iter().chain(never);
    !without.fold(0, |set, signal| set | 1 << (signal - 1))
}

/// The set of this name in a file like /proc/PID/status.
fn signals(status: &Path, name: &str) -> u64 {
    let text = fs::read_to_string(status).expect("a status");
    let set = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
    u64::from_str_radix(set.expect("a set"), 16).expect("hexadecimal")
}

#[test]
fn signals_to_the_guard_end_nothing() {
    let mut guard = RawGuard::start(&spec(&["sleep", "1000"]));
    let command = started(guard.report());
    let status = format!("/proc/{}/status", guard.pid());
    let blocked = signals(Path::new(&status), "SigBlk");
    assert_eq!(blocked, all_signals_but(OF_ITSELF));
    for signal in [
        Signal::TERM,
        Signal::INT,
        Signal::HUP,
        Signal::QUIT,
        Signal::USR1,
        Signal::TSTP,
        Signal::ALARM,
    ] {
        kill(guard.pid(), signal);
    }
    assert!(stat(command).is_some_and(|(state, _)| state != 'Z'));
    guard.send(&Control::Stop {
        reason: Stop::Cancelled,
        grace: None,
    });
    assert_eq!(
        exited(guard.report()),
        (None, Some(15), Some(Cause::Stopped(Stop::Cancelled)))
    );
    gone(guard.report());
    guard.finish();
}

// ---- what the command finds ----

#[tokio::test]
async fn no_descriptor_leaks_into_the_command_and_stdin_is_empty() {
    // Without CLOEXEC, as some library might open one.
    let file = fs::File::open("/dev/null").expect("a file");
    let leak = rustix::io::dup(&file).expect("a descriptor");
    // Of a guard that is executed, and of one that is forked.
    for runner in [runner(), forking().await] {
        let end = run_by(&runner, spec(&["ls", "-l", "/proc/self/fd"]), OUTPUT).await;
        let text = end.output_text();
        let numbers: Vec<&str> = text
            .lines()
            .filter_map(|l| l.split_once(" -> ")?.0.rsplit(' ').next())
            .collect();
        // 3 is the directory that ls reads.
        assert_eq!(numbers, ["0", "1", "2", "3"], "{text}");
        assert!(text.contains("0 -> /dev/null"), "{text}");
        assert!(!text.contains("socket:"), "{text}");
    }
    drop(leak);
}

#[tokio::test]
async fn a_command_has_a_session_of_its_own_and_all_signals_at_their_defaults() {
    let end = run(spec(&["cut", "-d ", "-f1,5,6", "/proc/self/stat"])).await;
    let text = end.output_text();
    let ids: Vec<&str> = text.split_ascii_whitespace().collect();
    assert!(
        ids.len() == 3 && ids[0] == ids[1] && ids[1] == ids[2],
        "{text}"
    );

    // Of a guard that is executed, and of one that is forked.
    for runner in [runner(), forking().await] {
        let signals = spec(&["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]);
        let end = run_by(&runner, signals, OUTPUT).await;
        let text = end.output_text();
        assert_eq!(text.lines().count(), 2, "{text}");
        for line in text.lines() {
            let (name, mask) = line.split_once(":\t").expect("name and mask");
            let mask = u64::from_str_radix(mask, 16).expect("hexadecimal");
            // Also glibc's own two, 32 and 33, which its posix_spawn leaves ignored in what it starts.
            assert_eq!(mask, 0, "{name}: {text}");
        }
    }
}

/// One that does not empty its descriptors, or asks for what is always there, would never sleep again.
#[tokio::test]
async fn a_guard_sleeps_while_nothing_happens() {
    // An orphan that has ended is an event, too.
    let spec = shell("(sleep 0.01 &); exec sleep 1000");
    let mut running = forking().await.start(spec, OUTPUT).expect("a guard");
    running.started().await.expect("started");
    let guard = running.guard_pid().expect("a pid");
    let schedule = format!("/proc/{guard}/schedstat");
    // Nanoseconds on a CPU.
    let busy = || {
        let text = fs::read_to_string(&schedule).expect("it lives");
        let busy = text.split(' ').next().expect("a number").parse::<u64>();
        Duration::from_nanos(busy.expect("a number"))
    };
    until_async("the orphan is gone", || process::children(guard).len() == 1).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let before = busy();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let took = busy() - before;
    assert!(took < Duration::from_millis(100), "{took:?}");
    running.stop(Stop::Cancelled, None);
    assert_eq!(running.wait().await.outcome, Outcome::Cancelled);
    running.settled().await;
}

#[test]
fn a_guard_takes_no_stdin_that_is_not_the_number_of_a_descriptor() {
    for argument in ["a", "-1", "2"] {
        let mut command = Command::new(EXE);
        command.args([guard::ARGUMENT, "backup", "run", "of=1", argument]);
        let output = command.stdin(Stdio::null()).output().expect("a guard");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("must be a descriptor"), "{argument}: {text}");
        assert_eq!(output.status.code(), Some(70));
    }
}

/// The scheduling policy of a process, or of this thread (0).
fn policy(pid: i32) -> i32 {
    // SAFETY: a plain system call.
    let policy = unsafe { libc::sched_getscheduler(pid) };
    assert!(policy >= 0, "{}", std::io::Error::last_os_error());
    policy & !libc::SCHED_RESET_ON_FORK
}

/// Whether the kernel lets this process have a real-time priority.
fn may_be_urgent() -> bool {
    let ask = || {
        let lowest = libc::sched_param { sched_priority: 1 };
        // SAFETY: a plain system call about this thread.
        unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const lowest) == 0 }
    };
    std::thread::spawn(ask).join().expect("a thread")
}

/// The host may have more to do than it can when the lease ends.
#[tokio::test]
async fn a_guard_has_a_real_time_priority_while_its_command_runs_if_the_kernel_allows_it() {
    let expected = if may_be_urgent() {
        libc::SCHED_RR
    } else {
        policy(0)
    };
    let mut running = start_waiting(&forking().await).await;
    let guard = running.guard_pid().expect("a guard").cast_signed();
    until_async("it is urgent", || policy(guard) == expected).await;
    let [command] = process::children(guard.cast_unsigned())[..] else {
        panic!("one command");
    };
    assert_eq!(policy(command.cast_signed()), policy(0));
    running.stop(Stop::Cancelled, None);
    assert_eq!(running.wait().await.outcome, Outcome::Cancelled);
    // What is left to do, and what it may have to execute, is not urgent.
    assert_eq!(policy(guard), policy(0));
    running.settled().await;
}

fn job(command: config::Command) -> config::Job {
    config::Job {
        name: JobName::new("report"),
        description: None,
        tags: [].into(),
        enabled: true,
        schedules: [].into(),
        schedule_text: [].into(),
        timezone: "UTC".into(),
        jitter: Duration::ZERO,
        command,
        env: BTreeMap::from([
            ("COLOUR".into(), "blue".into()),
            ("SOLOIST_JOB".into(), "forged".into()),
        ])
        .into(),
        pass_env: Default::default(),
        working_dir: Some(Path::new("/usr").into()),
        user: None,
        group: None,
        new_privileges: false,
        timeout: None,
        grace: Duration::from_secs(1),
        lease: Arc::new(config::Lease {
            length: Duration::from_secs(15),
            renew_every: Duration::from_secs(3),
            trust: Duration::from_millis(12_700),
            kill_budget: Duration::from_secs(2),
            quarantine: Duration::from_secs(17),
        }),
        overlap: Overlap::Skip,
        on_crash: OnCrash::Fail,
        on_state_loss: config::OnStateLoss::Skip,
        max_attempts: 1,
        retry: None,
        start_within: Duration::from_secs(60),
        catch_up: config::CatchUp::Latest,
        success_codes: [0].into(),
        output: OUTPUT,
        alarms: Arc::default(),
        digest: String::new(),
        schedule_digest: "".into(),
    }
}

#[tokio::test]
async fn a_command_sees_the_environment_that_is_promised_and_nothing_of_the_daemons_own() {
    let run_of = Run {
        id: RunId::random(),
        occurrence: Occurrence(1_772_334_000_000),
        attempt: 2,
        trigger: Trigger::Takeover,
        key: None,
        instance: InstanceId::new("host-1"),
        host: "host".into(),
        lease: 15_000,
        definition: String::new(),
        granted_at: 1_772_334_000_001,
    };
    let job = job(config::Command::Shell("env; pwd".into()));
    let spec = Spec::new(
        &job,
        &run_of,
        "00-1-2-01".to_owned(),
        Boottime::now() + HOUR,
        serde_json::Value::Null,
    );
    let end = run(spec).await;
    let text = end.output_text();
    let run_id = format!("SOLOIST_RUN_ID={}", run_of.id);
    for line in [
        "COLOUR=blue",
        "SOLOIST_JOB=report",
        "SOLOIST_OCCURRENCE=2026-03-01T03:00:00.000Z",
        "SOLOIST_OCCURRENCE_MS=1772334000000",
        &run_id,
        "SOLOIST_ATTEMPT=2",
        "SOLOIST_FENCING_TOKEN=1772334000000002",
        "SOLOIST_INSTANCE=host-1",
        "SOLOIST_TRIGGER=takeover",
        "TRACEPARENT=00-1-2-01",
        "/usr",
    ] {
        assert!(
            text.lines().any(|l| l == line),
            "{line} is missing:\n{text}"
        );
    }
    assert!(
        std::env::var_os("PATH").is_none() || text.contains("PATH="),
        "{text}"
    );
}

/// What the command of `spec` writes to stdout under the guard that `command` starts.
fn output_of_guard(mut command: Command, spec: &Spec) -> String {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let mut child = command
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::piped())
        .spawn()
        .expect("a guard");
    let mut line = serde_json::to_vec(spec).expect("JSON");
    line.push(b'\n');
    (&ours).write_all(&line).expect("written");
    let mut text = String::new();
    let mut stdout = child.stdout.take().expect("a pipe");
    stdout.read_to_string(&mut text).expect("text");
    drop(ours);
    child.wait().expect("it ends");
    text
}

#[test]
fn what_is_for_the_daemon_alone_is_not_inherited() {
    let mut command = Command::new(EXE);
    command
        .arg(guard::ARGUMENT)
        .env("NOTIFY_SOCKET", "/run/x")
        .env("WATCHDOG_USEC", "1")
        .env("LISTEN_FDS", "1")
        .env("CREDENTIALS_DIRECTORY", "/run/x")
        .env("SOLOIST_STORE_PASSWORD", "hunter2")
        .env("TRACEPARENT", "00-1-2-01")
        .env("TRACESTATE", "vendor=1")
        .env("BAGGAGE", "user=ann")
        .env("OTEL_SERVICE_NAME", "nightly")
        .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hunter2")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
        .env("KEPT", "yes");
    let text = output_of_guard(command, &spec(&["env"]));
    for kept in [
        "KEPT=yes",
        "OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318",
    ] {
        assert!(text.contains(kept), "{text}");
    }
    for name in [
        "TRACEPARENT",
        "TRACESTATE",
        "BAGGAGE",
        "OTEL_SERVICE_NAME",
        "_HEADERS",
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "LISTEN_FDS",
        "CREDENTIALS_DIRECTORY",
        "hunter2",
    ] {
        assert!(!text.contains(name), "{name} leaked:\n{text}");
    }
}

#[tokio::test]
async fn a_command_runs_as_the_user_and_group_it_names() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can become another user");
    }
    let as_user = |user: Option<&str>, group: Option<&str>| Spec {
        user: user.map(Into::into),
        group: group.map(Into::into),
        ..shell("id -un; id -gn; id -Gn; echo $HOME $USER")
    };
    let end = run(as_user(Some("nobody"), None)).await;
    assert_eq!(
        end.output_text(),
        "nobody\nnogroup\nnogroup\n/nonexistent nobody\n",
        "{end:?}"
    );
    let end = run(as_user(Some("nobody"), Some("daemon"))).await;
    assert!(
        end.output_text().starts_with("nobody\ndaemon\ndaemon"),
        "{end:?}"
    );
    let end = run(as_user(None, Some("daemon"))).await;
    assert!(
        end.output_text().starts_with("root\ndaemon\ndaemon\n"),
        "{end:?}"
    );
    // Groups of the daemon's own are not passed on.
    for (user, group, expected) in [
        (Some("nobody"), None, "nogroup\n"),
        (None, Some("daemon"), "daemon\n"),
    ] {
        let spec = Spec {
            user: user.map(Into::into),
            group: group.map(Into::into),
            ..spec(&["id", "-Gn"])
        };
        let mut command = Command::new("setpriv");
        command.args(["--groups", "tty,disk", EXE, guard::ARGUMENT]);
        assert_eq!(output_of_guard(command, &spec), expected);
    }
    // Nor by a daemon without root: a group alone needs only CAP_SETGID.
    let mut child = Command::new("setpriv");
    child.args(["--reuid=nobody", "--regid=nogroup", "--groups=tty,disk"]);
    child.args([
        "--inh-caps=+setgid",
        "--ambient-caps=+setgid",
        EXE,
        guard::ARGUMENT,
    ]);
    let daemon = Spec {
        group: Some("daemon".into()),
        ..spec(&["id", "-Gn"])
    };
    assert_eq!(output_of_guard(child, &daemon), "daemon\n");
    // A guard that is killed takes it along: that is set after setuid, which would undo it.
    let nobody = Spec {
        user: Some("nobody".into()),
        walk_only: true,
        ..spec(&["sleep", "1000"])
    };
    let mut guard = RawGuard::start(&nobody);
    let pid = started(guard.report());
    let command = [("command", pid, stat(pid).expect("alive").1)];
    guard.child.kill().expect("killed");
    guard.child.wait().expect("reaped");
    until("the command is dead", || alive(&command).is_empty());
}

#[tokio::test]
async fn a_command_of_another_user_opens_its_output_by_name() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can become another user");
    }
    let end = run(Spec {
        user: Some("nobody".into()),
        ..shell("echo out >/dev/stdout && echo err >/dev/stderr && echo more >>/dev/stderr")
    })
    .await;
    assert_eq!(end.exit_code, Some(0), "{end:?}: {}", end.output_text());
    let text = end.output_text();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["err", "more", "out"]);
}

#[tokio::test]
async fn a_command_of_another_user_has_a_session_keyring_of_its_own() {
    const GET_KEYRING_ID: i32 = 0;
    const SESSION: i32 = -3;
    if !rustix::process::geteuid().is_root() {
        return skip("only root can become another user");
    }
    // SAFETY: takes no pointers. Made if there is none.
    let ours = unsafe { libc::syscall(libc::SYS_keyctl, GET_KEYRING_ID, SESSION, 1) };
    if ours <= 0 {
        return skip("no keyrings here");
    }
    let call = libc::SYS_keyctl;
    let tell = format!("print syscall({call}, {GET_KEYRING_ID}, {SESSION}, 0)");
    let keyring = async |user: Option<&str>| {
        let end = run(Spec {
            user: user.map(Into::into),
            ..spec(&["perl", "-e", &tell])
        })
        .await;
        let id = end.output_text().parse::<i64>();
        id.unwrap_or_else(|e| panic!("{e}: {end:?}"))
    };
    assert_eq!(keyring(None).await, ours);
    let theirs = [keyring(Some("nobody")).await, keyring(Some("nobody")).await];
    assert!(theirs.iter().all(|id| *id > 0 && *id != ours), "{theirs:?}");
    assert_ne!(theirs[0], theirs[1]);
}

// ---- starts that take their time ----

/// A start that waits for one call for longer than any test looks, unless `ms` says otherwise.
struct SlowStart {
    dir: tempfile::TempDir,
    call: &'static str,
    ms: u64,
}

impl SlowStart {
    /// The slow calls, and the message about a start that was ended meanwhile.
    const CALLS: [(&str, &str); 2] = [
        (
            "getpwnam_r",
            "before the command could be started: soloist was still looking up user `root`",
        ),
        (
            "execve",
            "before the command could be started: soloist was still opening `touch`",
        ),
    ];

    fn of(call: &'static str) -> Self {
        Self {
            dir: tempfile::tempdir().expect("a directory"),
            call,
            ms: 100_000,
        }
    }

    /// A command that leaves a witness.
    fn spec(&self) -> Spec {
        Spec {
            user: rustix::process::geteuid().is_root().then(|| "root".into()),
            ..spec(&["touch", self.witness().to_str().expect("UTF-8")])
        }
    }

    fn witness(&self) -> PathBuf {
        self.dir.path().join("ran")
    }

    fn begin(&self, spec: &Spec) -> RawGuard {
        let pair = UnixStream::pair().expect("a socket pair");
        let slow = slow(self.call, self.ms, &self.dir.path().join("slow"));
        let mut guard = RawGuard::with(spec, pair, |command| {
            command.envs(slow);
        });
        guard.send(spec);
        guard
    }

    /// Of guards that start like this.
    fn runner(&self) -> Runner {
        let script = self.dir.path().join("guard.sh");
        let mut text = "#!/bin/sh\n".to_owned();
        for (name, value) in slow(self.call, self.ms, &self.dir.path().join("slow")) {
            text += &format!("export {name}='{value}'\n");
        }
        text += &format!("exec {EXE} \"$@\"\n");
        fs::write(&script, text).expect("written");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("executable");
        Runner::with_exe(script).expect("a runner")
    }

    /// Waits until a process of the start is in the call, and returns that process.
    fn entered(&self, guard: &RawGuard) -> i32 {
        until("it waits", || self.dir.path().join("slow").exists());
        let children = process::children(guard.child.id());
        assert_eq!(children.len(), 1, "not in the guard itself");
        children[0].cast_signed()
    }

    /// Asserts that nothing of the start is left, and that it did nothing.
    #[track_caller]
    fn assert_ended(&self, mut guard: RawGuard, expected: Cause, error_ends: &str) -> Boottime {
        let report = guard.report();
        let Report::StartFailed { error, cause, .. } = &report else {
            panic!("{report:?}")
        };
        assert_eq!(*cause, Some(expected), "{error}");
        assert!(error.ends_with(error_ends), "{error}");
        assert_eq!(process::children(guard.child.id()), [] as [u32; 0]);
        let (_, at) = gone(guard.report());
        guard.finish();
        assert!(!self.witness().exists());
        at
    }
}

/// Only root can be looked up and become somebody.
fn slow_calls() -> impl Iterator<Item = (SlowStart, &'static str)> {
    let root = rustix::process::geteuid().is_root();
    SlowStart::CALLS
        .into_iter()
        .filter(move |(call, _)| root || *call == "execve")
        .map(|(call, error)| (SlowStart::of(call), error))
}

#[test]
fn a_start_ends_with_the_lease() {
    for (slow, error) in slow_calls() {
        let spec = Spec {
            deadline: Boottime::now() + Duration::from_secs(5),
            grace: HOUR,
            kill_budget: Duration::from_secs(30),
            ..slow.spec()
        };
        let guard = slow.begin(&spec);
        let at = slow.assert_ended(guard, Cause::Deadline, error);
        assert!(at >= spec.deadline);
        let late = at.since(spec.deadline);
        assert!(late <= spec.kill_budget, "{late:?} late");
    }
}

#[test]
fn the_timeout_counts_from_the_begin_of_the_start() {
    for (slow, error) in slow_calls() {
        let spec = Spec {
            timeout: Some(Duration::from_secs(5)),
            grace: HOUR,
            ..slow.spec()
        };
        slow.assert_ended(slow.begin(&spec), Cause::Timeout, error);
    }
}

#[test]
fn a_stop_ends_a_start() {
    for (slow, error) in slow_calls() {
        let mut guard = slow.begin(&slow.spec());
        slow.entered(&guard);
        guard.send(&Control::Stop {
            reason: Stop::Cancelled,
            grace: Some(HOUR),
        });
        slow.assert_ended(guard, Cause::Stopped(Stop::Cancelled), error);
    }
}

#[test]
fn the_end_of_the_daemon_ends_a_start() {
    for (slow, error) in slow_calls() {
        let tree = Tree::new();
        let guard = slow.begin(&Spec {
            settle_exe: Some(tree.hand_over_script()),
            grace: HOUR,
            ..slow.spec()
        });
        let child = slow.entered(&guard);
        let mut guard = guard.die();
        let end = tree.handed_over().end;
        assert!(stat(child).is_none(), "it is gone before that is told");
        assert_eq!((end.outcome, end.started), (Outcome::Crashed, None));
        let said = end.error.expect("a reason");
        assert!(said.ends_with(error), "{said}");
        guard.wait().expect("it ends");
        assert!(!slow.witness().exists());
    }
}

#[test]
fn a_start_may_take_longer_than_the_lease_that_it_began_with() {
    for (slow, _) in slow_calls() {
        let slow = SlowStart { ms: 7000, ..slow };
        let spec = Spec {
            deadline: Boottime::now() + Duration::from_secs(5),
            ..slow.spec()
        };
        let mut guard = slow.begin(&spec);
        slow.entered(&guard);
        guard.send(&Control::Deadline(Boottime::now() + HOUR));
        started(guard.report());
        assert_eq!(exited(guard.report()), (Some(0), None, None));
        gone(guard.report());
        guard.finish();
        assert!(Boottime::now() > spec.deadline && slow.witness().exists());
    }
}

/// The child looks at the deadline itself, last of all: nothing else could while its guard is stopped.
#[test]
fn a_start_that_goes_on_after_its_deadline_executes_nothing_even_if_its_guard_is_stopped() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can become another user");
        return;
    }
    let slow = SlowStart {
        ms: 7000,
        ..SlowStart::of("getpwnam_r")
    };
    let spec = Spec {
        deadline: Boottime::now() + Duration::from_secs(5),
        ..slow.spec()
    };
    let mut guard = slow.begin(&spec);
    let child = slow.entered(&guard);
    kill(guard.pid(), Signal::STOP);
    until("the child is over", || {
        stat(child).is_none_or(|(state, _)| state == 'Z')
    });
    assert!(Boottime::now() > spec.deadline && !slow.witness().exists());
    kill(guard.pid(), Signal::CONT);
    let Report::StartFailed { error, cause, .. } = guard.report() else {
        panic!("it was started")
    };
    assert_eq!(cause, Some(Cause::Deadline), "{error}");
    gone(guard.report());
    guard.finish();
}

#[test]
fn a_start_that_somebody_kills_is_told_as_what_it_is() {
    let slow = SlowStart::of("execve");
    let mut guard = slow.begin(&slow.spec());
    kill(slow.entered(&guard), Signal::KILL);
    let report = guard.report();
    let Report::StartFailed {
        error,
        cause: None,
        errno: None,
        signal: Some(9),
    } = report
    else {
        panic!("{report:?}")
    };
    assert_eq!(
        error,
        "the start of the command ended before the command was executed: signal 9"
    );
    gone(guard.report());
    guard.finish();
}

#[test]
fn a_start_for_which_no_process_can_be_forked_says_why() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can become another user");
        return;
    }
    let spec = spec(&["true"]);
    let pair = UnixStream::pair().expect("a socket pair");
    let mut guard = RawGuard::with(&spec, pair, |command| {
        // The only process of a user who may have one.
        let user = 2_000_000_000 + std::process::id();
        command.uid(user).gid(user);
        let one = Rlimit {
            current: Some(1),
            maximum: Some(1),
        };
        // SAFETY: a system call, and nothing is allocated.
        unsafe { command.pre_exec(move || Ok(rustix::process::setrlimit(Resource::Nproc, one)?)) };
    });
    guard.send(&spec);
    let Report::StartFailed { error, cause, .. } = guard.report() else {
        panic!("it was started")
    };
    assert_eq!(cause, None, "{error}");
    assert!(
        error.starts_with("cannot start a process (fork)"),
        "{error}"
    );
    assert!(error.contains("a limit on processes is reached"), "{error}");
    gone(guard.report());
    guard.finish();
}

#[tokio::test]
async fn a_start_dies_with_its_guard() {
    // Of a guard that is executed, and of one that is forked.
    let forked = [false, true].into_iter();
    for (forked, (slow, _)) in forked.flat_map(|f| slow_calls().map(move |slow| (f, slow))) {
        let runner = slow.runner();
        if forked {
            zygote_of(&runner).await;
        }
        let spec = slow.spec();
        let run = spec.run_id;
        let mut running = runner.start(spec, OUTPUT).expect("a guard");
        let guard = running.guard_pid().expect("a pid");
        until_async("it waits", || slow.dir.path().join("slow").exists()).await;
        let child = process::children(guard)[0].cast_signed();
        kill(guard.cast_signed(), Signal::KILL);
        let end = running.wait().await;
        assert!(
            stat(child).is_none_or(|(state, _)| state == 'Z'),
            "told before it was gone"
        );
        assert_eq!(
            (end.outcome, end.started),
            (Outcome::Crashed, None),
            "{end:?}"
        );
        running.settled().await;
        assert!(!slow.witness().exists());
        // The guard had not said yet that there is one.
        let cgroup = TestCgroup::new().map(|ours| ours.0.with_file_name(format!("soloist-{run}")));
        assert!(cgroup.is_none_or(|cgroup| !cgroup.exists()), "{run}");
    }
}

/// It may have executed the command just before it was stopped: that the lease lapsed is not all that is known.
#[tokio::test]
async fn a_stopped_guard_that_has_not_told_of_its_start_counts_as_dead() {
    let slow = SlowStart::of("execve");
    let spec = Spec {
        timeout: Some(Duration::from_secs(5)),
        grace: Duration::from_millis(100),
        ..slow.spec()
    };
    let mut running = slow.runner().start(spec, OUTPUT).expect("a guard");
    until_async("it waits", || slow.dir.path().join("slow").exists()).await;
    let guard = running.guard_pid().expect("a pid");
    kill(guard.cast_signed(), Signal::STOP);
    let end = running.wait().await;
    assert_eq!(
        (end.outcome, end.cause, end.started),
        (Outcome::Crashed, Some(Cause::GuardGone), None),
        "{end:?}"
    );
    running.settled().await;
    assert!(!slow.witness().exists());
}

#[test]
fn a_cgroup_whose_lock_somebody_keeps_does_not_hold_up_a_start() {
    let spec = spec(&["true"]);
    let Some(parent) = TestCgroup::new() else {
        return skip("no cgroup v2 that we may write to");
    };
    let ours = parent.below(&format!("soloist-{}", spec.run_id));
    let directory = fs::File::open(&ours.0).expect("our own cgroup");
    directory.lock().expect("our own lock");
    let pair = UnixStream::pair().expect("a socket pair");
    let mut guard = RawGuard::with(&spec, pair, |command| parent.holds(command));
    guard.send(&spec);
    let report = guard.report();
    let Report::Started { cgroup, .. } = &report else {
        panic!("{report:?}")
    };
    assert_eq!(*cgroup, None, "it would look abandoned later");
    assert_eq!(exited(guard.report()), (Some(0), None, None));
    gone(guard.report());
    drop(directory);
    guard.finish();
}

#[tokio::test]
async fn where_clone3_is_refused_a_command_still_gets_its_cgroup() {
    if TestCgroup::new().is_none() {
        skip("no cgroup v2 that we may write to");
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let script = dir.path().join("guard.sh");
    let library = refuse_clone3().display();
    let text = format!("#!/bin/sh\nexport LD_PRELOAD='{library}'\nexec {EXE} \"$@\"\n");
    fs::write(&script, text).expect("written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("executable");
    let spec = spec(&["grep", "^0::", "/proc/self/cgroup"]);
    let own = format!("/soloist-{}\n", spec.run_id);
    let runner = Runner::with_exe(script).expect("a runner");
    let mut running = runner.start(spec, OUTPUT).expect("a guard");
    let end = running.wait().await;
    assert_eq!(end.outcome, Outcome::Succeeded, "{end:?}");
    assert!(end.output_text().ends_with(&own), "{end:?}");
}

#[test]
fn nobody_else_can_lock_the_cgroup_of_a_run() {
    if TestCgroup::new().is_none() {
        skip("no cgroup v2 that we may write to");
        return;
    }
    let mut guard = RawGuard::start(&spec(&["sleep", "1000"]));
    let report = guard.report();
    let Report::Started {
        cgroup: Some(cgroup),
        ..
    } = &report
    else {
        panic!("{report:?}")
    };
    let mode = fs::metadata(cgroup).expect("it is there").permissions();
    // Others may look up files in it, as a command does that looks at its limits. They may not open the directory
    // itself, so they cannot lock it.
    assert_eq!(mode.mode() & 0o777 & !0o011, 0o700, "{mode:?}");
    guard.send(&Control::Stop {
        reason: Stop::Cancelled,
        grace: None,
    });
    exited(guard.report());
    gone(guard.report());
    guard.finish();
}

#[test]
fn a_daemon_that_does_not_read_misses_nothing_that_matters() {
    let null = fs::File::open("/dev/null").expect("a file");
    rustix::io::fcntl_setfd(&null, rustix::io::FdFlags::empty()).expect("a descriptor");
    let dir = tempfile::tempdir().expect("a directory");
    let mut spec = shell("until [ -e go ]; do sleep 0.01; done; exit 3");
    spec.working_dir = Some(dir.path().into());
    (spec.walk_only, spec.transparent) = (true, Some(guard::Transparent::default()));
    let pair = UnixStream::pair().expect("a socket pair");
    rustix::net::sockopt::set_socket_send_buffer_size(&pair.1, 1).expect("a small buffer");
    let mut guard = RawGuard::with(&spec, pair, |command| {
        command.arg(std::os::fd::AsRawFd::as_raw_fd(&null).to_string());
    });
    guard.send(&spec);
    let command = started(guard.report());
    // How often the guard has gone to sleep: it sees each stop before that.
    let status = format!("/proc/{}/status", guard.pid());
    let slept = || {
        let text = fs::read_to_string(&status).expect("the guard lives");
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
        line.and_then(|n| n.trim().parse::<u64>().ok())
            .expect("a number")
    };
    for _ in 0..100 {
        for (signal, stopped) in [(Signal::STOP, true), (Signal::CONT, false)] {
            let before = slept();
            kill(command, signal);
            until("the guard has seen it", || {
                let (state, _) = stat(command).expect("it lives");
                (state == 'T') == stopped && slept() > before
            });
        }
    }
    fs::write(dir.path().join("go"), "").expect("written");
    // All messages are sent before the first of them is read.
    until("the guard waits to be told that all is settled", || {
        stat(command).is_none() && stat(guard.pid()).is_some_and(|(state, _)| state == 'S')
    });
    let mut stops = 0;
    let end = loop {
        match guard.report() {
            Report::Stopped { .. } => stops += 1,
            other => break other,
        }
    };
    assert!((2..100).contains(&stops), "never full: {stops}");
    assert_eq!(exited(end), (Some(3), None, None));
    gone(guard.report());
    guard.finish();
}

// ---- what goes wrong at the start ----

#[tokio::test]
async fn a_command_that_cannot_be_started_says_why() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: &str, mode: u32| {
        let path = dir.path().join(name);
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("mode");
        path.to_str().expect("UTF-8").to_owned()
    };
    let plain = file("plain", "echo hi", 0o644);
    let no_interpreter = file("lost", "#!/no/such/interpreter\n", 0o755);
    let no_first_line = file("bare", "echo hi\n", 0o755);
    let in_dir = |d: &str| Spec {
        working_dir: Some(d.into()),
        ..spec(&["true"])
    };
    let as_user = |user: &str| Spec {
        user: Some(user.into()),
        ..spec(&["true"])
    };
    // Not only the last directory counts.
    let in_path = |name: &str| {
        let path = format!("/no/such:{}:/no/such/either", dir.path().display());
        let mut spec = spec(&[name]);
        spec.env.push(("PATH".into(), path));
        spec
    };
    let cases = [
        (
            spec(&["no-such-command"]),
            "command `no-such-command` not found in PATH (",
        ),
        (spec(&["/no/such"]), "command `/no/such` does not exist"),
        (spec(&[]), "the command is empty"),
        (spec(&["tr\0ue"]), "NUL byte"),
        (spec(&[&plain]), "is not executable: Permission denied"),
        (spec(&["/usr"]), "is not executable: Permission denied"),
        (
            in_path("plain"),
            "command `plain` is not executable: Permission denied",
        ),
        (
            spec(&[&no_interpreter]),
            "the interpreter named in its first line",
        ),
        (spec(&[&no_first_line]), "does a script lack its `#!` line?"),
        (
            in_dir("/no/such/dir"),
            "working directory `/no/such/dir` does not exist",
        ),
        (in_dir(&plain), "is not a directory"),
        (
            as_user("nobody-knows"),
            "user `nobody-knows` is not known on this host",
        ),
        (
            Spec {
                group: Some("no-group".into()),
                ..spec(&["true"])
            },
            "group `no-group` is not known on this host",
        ),
    ];
    for (spec, expected) in cases {
        let end = run(spec).await;
        let error = end.error.unwrap_or_default();
        assert!(
            error.contains(expected),
            "{error:?} does not say {expected:?}"
        );
        assert_eq!(
            (end.outcome, end.exit_code, end.signal, end.started),
            (Outcome::Failed, None, None, None)
        );
    }
}

#[tokio::test]
async fn a_bare_name_is_looked_up_in_the_jobs_own_path() {
    let dir = tempfile::tempdir().expect("a directory");
    let tool = dir.path().join("own-tool");
    fs::write(&tool, "#!/bin/sh\necho found\n").expect("written");
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).expect("mode");
    let mut spec = spec(&["own-tool"]);
    spec.env
        .push(("PATH".into(), format!("/no/such:{}", dir.path().display())));
    assert_eq!(run(spec).await.output_text(), "found\n");
}

/// Not a test of its own: a daemon without descriptors, for the test below.
#[tokio::test]
async fn stand_in_without_descriptors() {
    if std::env::var_os("SOLOIST_TEST_EMFILE").is_none() {
        return;
    }
    let runner = runner();
    let mut held = Vec::new();
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    limit.current = Some(64);
    rustix::process::setrlimit(Resource::Nofile, limit).expect("a lower limit");
    while let Ok(file) = fs::File::open("/dev/null") {
        held.push(file);
    }
    // At each number of free descriptors: an error or a run, and nothing left over.
    let mut errors = 0;
    loop {
        match runner.start(spec(&["true"]), OUTPUT) {
            Ok(mut running) => {
                assert_eq!(running.wait().await.outcome, Outcome::Succeeded);
                running.settled().await;
                break;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains("guard of `backup`")
                        && text.contains("raise the limit on open files"),
                    "{text}"
                );
                errors += 1;
            }
        }
        held.pop().expect("it works with enough descriptors");
    }
    assert!(errors > 3, "{errors}");
}

#[test]
fn without_descriptors_a_start_fails_with_a_clear_error_and_the_next_one_works() {
    let status = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "guard::stand_in_without_descriptors"])
        .env("SOLOIST_TEST_EMFILE", "1")
        .stdout(Stdio::null())
        .status()
        .expect("a stand-in");
    assert!(status.success(), "{status}");
}

// ---- output ----

fn peak_memory_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("/proc");
    let line = status
        .lines()
        .find(|l| l.starts_with("VmHWM:"))
        .expect("VmHWM");
    line.split_ascii_whitespace()
        .nth(1)
        .expect("a number")
        .parse()
        .expect("a number")
}

#[tokio::test]
async fn a_flood_without_newline_costs_bounded_memory_and_is_counted() {
    let before = peak_memory_kib();
    let bytes = 256u64 << 20;
    let spec = shell(&format!("head -c {bytes} /dev/zero; printf end"));
    let end = run_with(
        spec,
        config::Output {
            keep: 1000,
            log: true,
        },
    )
    .await;
    assert_eq!(end.output_bytes, bytes + 3);
    assert_eq!(end.output_tail.len(), 1000);
    assert!(end.output_tail.ends_with(b"\0\0end") && end.output_truncated());
    let grown = peak_memory_kib() - before;
    assert!(grown < 64 << 10, "{grown} KiB more");
}

#[tokio::test]
async fn an_endless_flood_of_lines_does_not_keep_a_command_from_being_stopped() {
    let mut spec = shell("yes & yes >&2");
    spec.timeout = None;
    let mut running = runner()
        .start(
            spec,
            config::Output {
                keep: 10,
                log: true,
            },
        )
        .expect("a guard");
    let output = running.output();
    until_async("it floods", || output.total() > 10 << 20).await;
    assert_eq!(output.since(0).bytes.len(), 10);
    running.stop(Stop::Cancelled, Some(Duration::ZERO));
    let end = tokio::time::timeout(PATIENCE, running.wait())
        .await
        .expect("an end");
    assert_eq!(
        (end.outcome, end.cause),
        (Outcome::Cancelled, Some(Cause::Stopped(Stop::Cancelled)))
    );
    running.settled().await;
}

#[test]
fn each_line_goes_to_the_log_and_the_tail_can_be_followed() {
    // In a process of its own: a subscriber for one thread and other tests' events do not go together.
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "guard::stand_in_with_a_log"])
        .env("SOLOIST_TEST_LOG", "1")
        .output()
        .expect("a stand-in");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

/// Not a test of its own: the body of the test above.
#[tokio::test]
async fn stand_in_with_a_log() {
    if std::env::var_os("SOLOIST_TEST_LOG").is_none() {
        return;
    }
    use std::sync::{Arc, Mutex};
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);
    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("a lock").extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _default = tracing::subscriber::set_default(subscriber);

    let dir = tempfile::tempdir().expect("a directory");
    let mut spec = shell(
        r"printf 'first\nsec'; until [ -e go ]; do sleep 0.01; done; printf 'ond\nbad \377\n'; printf last >&2",
    );
    spec.working_dir = Some(dir.path().into());
    let run_id = spec.run_id;
    let mut running = runner()
        .start(
            spec,
            config::Output {
                keep: 1000,
                log: true,
            },
        )
        .expect("a guard");
    let output = running.output();
    until_async("the first half is there", || output.total() == 9).await;
    let first = output.since(0);
    assert_eq!(
        (first.bytes.as_slice(), first.next()),
        (b"first\nsec".as_slice(), 9)
    );
    fs::write(dir.path().join("go"), "").expect("written");
    let end = running.wait().await;
    assert_eq!(
        output.since(first.next()).bytes.len(),
        14,
        "{}",
        end.output_text()
    );
    running.settled().await;

    let text = String::from_utf8(log.0.lock().expect("a lock").clone()).expect("UTF-8");
    for line in ["first", "second", "bad \u{fffd}", "last"] {
        let stream = if line == "last" { "stderr" } else { "stdout" };
        let expected =
            format!("soloist::output: {line} job=\"backup\" run=\"{run_id}\" stream=\"{stream}\"");
        assert!(text.contains(&expected), "{expected} is not in\n{text}");
    }
}
