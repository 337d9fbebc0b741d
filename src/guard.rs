//! The guard: a small process of its own for each run, which ends the command when its lease or its daemon ends.
//!
//! The guard is this same binary, started again as `soloist __guard`, before any runtime or argument parser exists; or
//! it is forked from a process that was started so (`guard::zygote`). It has one thread and depends on nothing that the
//! daemon does later: the daemon may be killed, be stopped or hang.
//! [`crate::logic::guard_life`] has its rules. Here are its messages ([`Spec`], [`Control`], [`Report`], [`HandOver`])
//! and the loop that carries out the rules. The daemon's side is [`crate::runner`].
//!
//! Descriptor 0 is a socket to the daemon: one JSON line each way per message. Descriptors 1 and 2 are the pipes for
//! the command's output; the guard closes its copies, so that end-of-file means that the process tree is gone.
//!
//! A transparent command (`soloist exec`) has the descriptors, the session and the process group of the program that
//! started it, as if a shell had started the command in that program's place. Once the command has been forked into
//! that group, the guard leaves the group, so that a signal to the whole group (Ctrl-Z, `kill -9 -PGID`) does not reach
//! the guard. The guard also leaves the session: a parent in the same session but another group keeps a group from
//! being orphaned, so the end of the command would orphan the group, and the kernel sends SIGHUP to all members of an
//! orphaned group that has a stopped member.
//!
//! The guard's one thread waits for nothing but the next event, and checks the deadline after every step that may take
//! time. The forked child does everything in a start that may block (`guard::spawn`).
//!
//! A run is over when its process tree is gone. Processes that the command left behind get SIGTERM, and then SIGKILL
//! after the grace, but at most [`LEFTOVER_GRACE`](crate::logic::guard_life::LEFTOVER_GRACE) later.

mod cgroup;
mod control;
mod message;
mod privileges;
mod spawn;
mod sweep;
mod tree;
mod urgent;
mod zygote;

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use nix::sys::{
    signal,
    signalfd::{SfdFlags, SignalFd},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{Pid, Signal, WaitOptions},
    time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec},
};

#[cfg(any(test, fuzzing))]
pub(crate) use self::control::understood;
pub(crate) use self::spawn::unknown as unknown_user;
#[cfg(feature = "notify")]
pub(crate) use self::sweep::PATIENCE;
pub(crate) use self::{
    cgroup::{Cgroup, frozen, helpless, helpless_again, of_run as cgroup_of_run},
    message::{EXEC_ID, RUN_ID, is_of_store},
    sweep::{end_helpless, sweep},
    tree::{Proc, below, descend, kill_pass, soon_below},
    zygote::padding as zygote_padding,
};
use self::{control::ControlSocket, spawn::reset_signals, tree::kill_children, urgent::Urgent};
pub use self::{
    message::{Control, HandOver, KnownEnd, Moment, Report, Spec, Transparent},
    zygote::{ZYGOTE_ARGUMENT, main as zygote},
};
use crate::{
    clock::Boottime,
    guard::spawn::{Failed, Start},
    logic::guard_life::{Again, Cause, Kills, Life, Step, Stop, outcome},
    model::Usage,
};

/// The hidden first argument that makes this binary a guard. Job and run id follow it, so that `ps` shows them, and the
/// process that it belongs to (`of=PID`).
pub const ARGUMENT: &str = "__guard";

/// Before the pid of the process that a guard belongs to.
const OF: &str = "of=";

/// The argument that says which process a guard belongs to. If the guard's parent has another pid, that one is dead.
pub(crate) fn of_this_process() -> String {
    format!("{OF}{}", std::process::id())
}

/// The hidden first argument with which the guard of a dead daemon executes this binary; see [`HandOver`].
pub const SETTLE_ARGUMENT: &str = "__settle";

/// A wait that is shorter is exact enough.
const SHORT: Duration = Duration::from_millis(20);

/// How long, each time, the guard kills new children as they appear.
const CHASE: Duration = Duration::from_millis(5);

/// How many ended children the guard reaps before it checks the deadline again: some trees make children faster than a
/// parent can reap them.
const REAPED_AT_ONCE: usize = 256;

/// The longest first line that the guard accepts.
const LONGEST_SPEC: usize = 64 << 20;

/// The whole guard process. Call it first in `main`, while the process has one thread.
pub fn main() -> ! {
    reset_signals();
    let inherited = Inherited::take(std::env::args_os().nth(5));
    if matches!(inherited, Ok(None)) {
        // Ctrl-C in the daemon's terminal is meant neither for the guard nor for the command.
        let _ = rustix::process::setsid();
    }
    run(inherited.and_then(Guard::prepare))
}

fn run(guard: io::Result<Guard>) -> ! {
    let code = match guard {
        Ok(guard) => guard.run(),
        Err(error) => {
            eprintln!("soloist: guard: {}", crate::text::line(&error.to_string()));
            70
        }
    };
    // SAFETY: leaves at once. Nothing here needs what a program does at its end, and that costs the guard of a short
    // command a twentieth of its time.
    unsafe { libc::_exit(code) }
}

/// The state of the loop between two events.
struct Guard {
    control: ControlSocket,
    children: SignalFd,
    timer: OwnedFd,
    daemon: Option<Pid>,
    inherited: Option<Inherited>,
}

/// What a transparent command inherits; it is forked into the guard's process group.
struct Inherited {
    stdin: OwnedFd,
}

impl Inherited {
    /// `argument` names the descriptor that becomes the command's stdin.
    fn take(argument: Option<std::ffi::OsString>) -> io::Result<Option<Self>> {
        let Some(argument) = argument else {
            return Ok(None);
        };
        let fd = argument
            .to_str()
            .and_then(|text| text.parse::<i32>().ok())
            .filter(|fd| *fd > 2)
            .ok_or_else(|| {
                io::Error::other("the argument after the daemon's pid must be a descriptor")
            })?;
        // SAFETY: the process that started this one left it open for it, and nothing else here uses it. If it is not
        // open, the next line returns an error.
        let stdin = unsafe { OwnedFd::from_raw_fd(fd) };
        rustix::io::fcntl_setfd(&stdin, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Some(Self { stdin }))
    }
}

impl Guard {
    /// Gives up everything that ties this process to its daemon, except the socket.
    fn prepare(inherited: Option<Inherited>) -> io::Result<Self> {
        let daemon = rustix::process::getppid();
        if inherited.is_none() {
            // SAFETY: nothing here has opened a descriptor above 2 yet, so no code uses any of these.
            unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
        }
        // Any pid means success.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        block_signals();
        let children = ended_children()?;
        // If somebody has stopped the guard by then, no other process could end the tree.
        rustix::process::set_parent_process_death_signal(Some(Signal::CONT))?;
        // Nothing reads it: each wait sets it anew.
        let timer = rustix::time::timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)?;
        // SAFETY: descriptor 0 is open (std ensures that) and nothing else in this process uses it.
        let socket = unsafe { OwnedFd::from_raw_fd(0) };
        rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Self {
            control: ControlSocket::new(socket)?,
            children,
            timer,
            daemon,
            inherited,
        })
    }

    /// Returns the exit code.
    fn run(mut self) -> i32 {
        let Some(spec) = self.read_spec() else {
            // The daemon died before it said what to run: nothing was started, and there is nothing to record.
            return 0;
        };
        let (ended, settle, exe) = GuardedRun::begin(&mut self, spec).until_gone();
        while !self.control.settled && !self.control.closed {
            let _ = poll(&mut [self.control.poll_fd()], None);
            self.control.flush();
            while self.control.next().is_some() {}
        }
        if self.control.settled {
            return 0;
        }
        let error = self.hand_over(&HandOver { settle, end: ended }, exe.as_deref());
        eprintln!(
            "soloist: guard: cannot hand over to {SETTLE_ARGUMENT}: {}",
            crate::text::line(&error.to_string())
        );
        70
    }

    fn read_spec(&mut self) -> Option<Spec> {
        loop {
            if let Some(line) = self.control.next_line(LONGEST_SPEC) {
                return serde_json::from_slice(&line).ok();
            }
            if self.control.closed {
                return None;
            }
            let _ = poll(&mut [self.control.poll_fd()], None);
        }
    }

    /// Executes `soloist __settle`; returns only the error that prevented it.
    fn hand_over(self, hand_over: &HandOver, exe: Option<&Path>) -> io::Error {
        match hand_over.to_file() {
            // SIGTERM stays ignored: systemd sends it to every process that a dead daemon left behind.
            Ok(file) => {
                ignore_signals();
                unblock_signals();
                std::process::Command::new(exe.unwrap_or(Path::new("/proc/self/exe")))
                    .arg0("soloist")
                    .arg(SETTLE_ARGUMENT)
                    .stdin(file)
                    .exec()
            }
            Err(error) => error,
        }
    }

    /// Waits for a message, the end of a child, the report of `start`, or `until` (None: for ever).
    fn wait(&self, until: Option<Boottime>, start: Option<&Start>) {
        let zero = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let left = until.map(|until| to_wait(until.since(Boottime::now())));
        let value = left.map_or(zero, |left| Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        });
        let timer = Itimerspec {
            it_interval: zero,
            it_value: value,
        };
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &timer);
        let mut fds = vec![
            PollFd::new(&self.children, PollFlags::IN),
            PollFd::new(&self.timer, PollFlags::IN),
        ];
        if !self.control.closed {
            fds.push(self.control.poll_fd());
        }
        let said = start.map(Start::readable);
        if let Some(said) = &said {
            fds.push(PollFd::new(said, PollFlags::IN));
        }
        let _ = poll(&mut fds, None);
        // Only empties the descriptor: one signal, and there is never more than one, stands for several ended children.
        let _ = self.children.read_signal();
    }

    /// Whether the daemon is dead or dying. A dying daemon's pipes may be closed already and have ended the command
    /// (SIGPIPE), although its socket to the guard is still open.
    fn daemon_is_dying(&self) -> bool {
        if rustix::process::getppid() != self.daemon {
            return true;
        }
        self.daemon
            .is_some_and(|pid| Proc::read(pid.as_raw_nonzero().get()).is_none_or(|p| p.exiting()))
    }
}

/// How long to wait if so much time is left. A little less while that is long, so that the wait is right even if this
/// process's clock runs at another rate than the kernel's (in tests it does). Never zero, which would be for ever.
fn to_wait(left: Duration) -> Duration {
    if left < SHORT {
        left.max(Duration::from_nanos(1))
    } else {
        left - left / 16
    }
}

/// One run, from the beginning of its start until its process tree is gone.
struct GuardedRun<'g> {
    guard: &'g mut Guard,
    spec: Spec,
    life: Life,
    cgroup: Option<Cgroup>,
    /// The start, while it is under way.
    start: Option<Start>,
    /// Why the start failed, if that is not reported yet.
    failed: Option<Failed>,
    /// When the start began, which is part of the run. Taken before the fork, because a short command may end before
    /// this process runs again.
    begun: Moment,
    /// The same time, once the command was executed.
    started: Option<Moment>,
    /// The pid of the command, or of the process that is to become it, until the guard has reaped it.
    command: Option<Pid>,
    /// Set when the command has ended and the guard has not handled that yet: whether the daemon was dying at that
    /// moment.
    ended: Option<bool>,
    /// Signals that came before the command existed.
    signals: Vec<i32>,
    exit_code: Option<i32>,
    signal: Option<i32>,
    error: Option<String>,
    /// What the command left when it ended by itself.
    leftover: Option<u32>,
    /// More children may have ended than were reaped.
    more_ended: bool,
    /// Once the tree was killed.
    kills: Option<Kills>,
    /// While the command runs.
    urgent: Option<Urgent>,
}

impl<'g> GuardedRun<'g> {
    fn new(guard: &'g mut Guard, spec: Spec) -> Self {
        let begun = Moment::now();
        let life = Life::new(
            begun.boottime,
            spec.deadline,
            spec.timeout,
            spec.grace,
            spec.kill_budget,
        );
        Self {
            guard,
            life,
            cgroup: None,
            start: None,
            failed: None,
            begun,
            started: None,
            command: None,
            ended: None,
            signals: Vec::new(),
            exit_code: None,
            signal: None,
            error: None,
            leftover: None,
            more_ended: false,
            kills: None,
            urgent: None,
            spec,
        }
    }

    fn begin(guard: &'g mut Guard, spec: Spec) -> Self {
        let mut run = Self::new(guard, spec);
        if !run.ended_early() {
            if !run.spec.walk_only {
                run.cgroup = Cgroup::create(&run.spec.run_id.to_string());
            }
            // Making the cgroup may have taken a while.
            run.read_control();
            if !run.ended_early() {
                run.fork();
            }
        }
        if run.start.is_none()
            && let Some(cgroup) = run.cgroup.take()
        {
            cgroup.remove();
        }
        // From here on only the command has the pipes.
        give_away_output();
        if run.guard.inherited.take().is_some() {
            let _ = rustix::process::setsid();
        }
        if run.start.is_none() {
            run.report_failure();
        }
        run
    }

    /// Ends a start that is under way: the command must not be executed any more.
    fn ended_early(&mut self) -> bool {
        let _ = self.life.on_time(Boottime::now());
        self.life.killing()
    }

    fn fork(&mut self) {
        self.begun = Moment::now();
        let deadline = self.life.deadline();
        let inherited = self.guard.inherited.as_ref();
        match spawn::start(&self.spec, deadline, self.cgroup.as_ref(), inherited) {
            Ok(start) => {
                self.command = Some(start.pid);
                self.start = Some(start);
                for signal in std::mem::take(&mut self.signals) {
                    self.pass_on(signal);
                }
            }
            Err(failed) => self.failed = Some(failed),
        }
    }

    /// Handles the result of the start, if there is one. True: the start is still under way.
    fn starting(&mut self) -> bool {
        let Some(start) = &mut self.start else {
            return false;
        };
        let Some(result) = start.look() else {
            return true;
        };
        let now = Boottime::now();
        match result {
            Ok(()) => {
                if !start.in_cgroup()
                    && let Some(cgroup) = self.cgroup.take()
                {
                    cgroup.remove();
                }
                self.start = None;
                self.life.on_started();
                self.be_urgent();
                self.started = Some(self.begun);
                self.guard.control.report(&Report::Started {
                    pid: self.command.map_or(0, |c| c.as_raw_nonzero().get()),
                    at: self.begun,
                    cgroup: self.cgroup.as_ref().map(|c| c.path().to_owned()),
                });
            }
            Err(failed) => {
                // The child may have noticed first that it is too late.
                let step = self.life.on_time(now);
                self.act(step);
                self.failed = Some(match self.life.cause() {
                    Some(cause) => self.ended_start(cause).into(),
                    None => failed,
                });
                self.start = None;
                // A later reason to end the run did not end the start; nor did the death of the daemon, because a child
                // that writes nothing does not notice closed pipes.
                let step = self.life.on_command_end(now, false);
                self.act(step);
            }
        }
        false
    }

    /// Why a start was ended, and what it was waiting for.
    fn ended_start(&self, cause: Cause) -> String {
        let why = match cause {
            Cause::Timeout => "the job's timeout has passed",
            Cause::Stopped(Stop::Cancelled) => "it was cancelled",
            Cause::Stopped(Stop::Replaced) => "a newer occurrence replaced it",
            Cause::Stopped(Stop::Shutdown) => "the instance stopped",
            Cause::Stopped(Stop::LeaseLost) => "the lease was lost",
            Cause::Deadline => "the lease ran out",
            Cause::DaemonGone => "the soloist daemon died",
            Cause::GuardGone => "the guard died",
        };
        let why = format!("{why} before the command could be started");
        match &self.start {
            Some(start) => format!("{why}: {}", start.doing(&self.spec)),
            None => why,
        }
    }

    /// Reports that the start failed. Call it when all processes of the start are gone.
    fn report_failure(&mut self) {
        let failed = self.failed.take().unwrap_or_else(|| {
            let cause = self.life.cause().unwrap_or(Cause::Deadline);
            self.ended_start(cause).into()
        });
        let (cause, signal) = (self.life.cause(), self.signal.filter(|_| failed.silent));
        let error = match signal {
            Some(signal) => format!("{}: signal {signal}", failed.error),
            None => failed.error,
        };
        self.guard.control.report(&Report::StartFailed {
            error: error.clone(),
            cause,
            errno: failed.errno,
            signal,
        });
        self.error = Some(error);
    }

    /// Waits until the tree is gone; returns the hand-over if the daemon is gone too.
    fn until_gone(mut self) -> (KnownEnd, serde_json::Value, Option<PathBuf>) {
        loop {
            let children = self.reap_and_report();
            if !children && self.command.is_none() && !self.cgroup_populated() {
                break;
            }
            // The deadline is checked before renewals are read, and again for each renewal.
            let step = self.life.on_time(Boottime::now());
            self.act(step);
            self.read_control();
            self.kill_again_if_due();
            let wake_at = [
                self.life.wake_at(),
                self.kills.as_ref().map(Kills::again_at),
            ];
            let now = self.more_ended.then(Boottime::now);
            let wake_at = wake_at.into_iter().flatten().chain(now).min();
            self.guard.wait(wake_at, self.start.as_ref());
            self.guard.control.flush();
        }
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove();
        }
        let ended = Moment::now();
        self.urgent = None;
        let usage = match self.started {
            Some(_) => Usage {
                left_processes: self.leftover,
                ..usage()
            },
            None => Usage::default(),
        };
        let gone = Report::Gone { at: ended, usage };
        self.guard.control.report(&gone);

        let cause = self.life.cause();
        let error = self.error.or_else(|| {
            (cause == Some(Cause::DaemonGone)).then(|| {
                "the soloist daemon died while the command ran; its guard ended the command"
                    .to_owned()
            })
        });
        let end = KnownEnd {
            outcome: outcome(cause, self.exit_code, &self.spec.success_codes),
            cause,
            exit_code: self.exit_code,
            signal: self.signal,
            error,
            started: self.started,
            ended,
            usage,
        };
        (end, self.spec.settle, self.spec.settle_exe)
    }

    /// Reaps ended children, and handles the end of the command. Returns true if any child is left.
    fn reap_and_report(&mut self) -> bool {
        if self.starting() {
            return true;
        }
        let children = self.reap();
        if let Some(daemon_is_dying) = self.ended.take() {
            // Most commands leave no process behind; then the guard need not walk /proc.
            let left = children || self.cgroup.as_ref().is_some_and(Cgroup::populated);
            let members = if left { self.members() } else { vec![] };
            let step = self.life.on_command_end(Boottime::now(), daemon_is_dying);
            if self.life.cause().is_none() {
                let alive = members.iter().filter(|p| p.alive()).count();
                self.leftover = u32::try_from(alive).ok().filter(|n| *n > 0);
            }
            if self.started.is_some() {
                self.guard.control.report(&Report::Exited {
                    exit_code: self.exit_code,
                    signal: self.signal,
                    cause: self.life.cause(),
                    at: Moment::now(),
                });
            } else {
                self.report_failure();
                (self.exit_code, self.signal) = (None, None);
            }
            if left {
                self.act(step);
            }
        }
        children
    }

    /// Reaps ended children: the command, and orphans of its tree. Returns true if any child is left.
    fn reap(&mut self) -> bool {
        let mut options = WaitOptions::NOHANG;
        if self.spec.transparent.is_some() {
            options |= WaitOptions::UNTRACED;
        }
        self.more_ended = false;
        for _ in 0..REAPED_AT_ONCE {
            match rustix::process::wait(options) {
                Ok(Some((pid, status))) if status.stopped() => {
                    if Some(pid) == self.command
                        && let Some(signal) = status.stopping_signal()
                    {
                        self.guard.control.report(&Report::Stopped { signal });
                    }
                }
                Ok(Some((pid, status))) if Some(pid) == self.command => {
                    self.ended = Some(self.guard.daemon_is_dying());
                    self.command = None;
                    self.exit_code = status.exit_status();
                    self.signal = status.terminating_signal();
                }
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
        self.more_ended = true;
        true
    }

    fn read_control(&mut self) {
        let was_open = !self.guard.control.closed;
        while let Some(control) = self.guard.control.next() {
            // Take the time after reading the message: this process may have been stopped in between.
            let now = Boottime::now();
            let step = match control {
                Control::Deadline(deadline) => {
                    let step = self.life.on_renewal(now, deadline);
                    if let Some(start) = &self.start {
                        start.extend(self.life.deadline());
                    }
                    step
                }
                Control::Stop { reason, grace } => self.life.on_stop(now, reason, grace),
                Control::Signal(signal) => {
                    self.pass_on(signal);
                    Step::Nothing
                }
                Control::Settled => Step::Nothing,
            };
            self.act(step);
        }
        if was_open && self.guard.control.closed {
            // Its lease still lasts, and all guards of the daemon end their trees now: together they must not keep the
            // CPUs from what they end.
            self.urgent = None;
            let step = self.life.on_daemon_gone(Boottime::now());
            self.act(step);
        }
    }

    /// Sends a signal to the command. That is safe because its pid belongs to it until the guard reaps it.
    fn pass_on(&mut self, signal: i32) {
        match self.command {
            Some(command) => {
                // SAFETY: a plain system call; the kernel refuses a number that is not a signal.
                unsafe { libc::kill(command.as_raw_nonzero().get(), signal) };
            }
            None => self.signals.push(signal),
        }
    }

    fn act(&mut self, step: Step) {
        match step {
            Step::Nothing => {}
            Step::Terminate => {
                for process in self.members().iter().filter(|p| p.alive()) {
                    process.signal(Signal::TERM);
                    // A stopped process could not handle SIGTERM.
                    process.signal(Signal::CONT);
                }
            }
            Step::Kill => {
                let now = Boottime::now();
                self.kill();
                self.kills = Some(Kills::begin(now, self.spec.kill_budget));
            }
        }
    }

    fn kill_again_if_due(&mut self) {
        let Some(kills) = &mut self.kills else {
            return;
        };
        let now = Boottime::now();
        let Some(Again { report }) = kills.on_time(now) else {
            return;
        };
        // Without its daemon it gave the priority up, but after the deadline another host may start the job.
        if now >= self.life.deadline() {
            self.be_urgent();
        }
        self.kill();
        if report {
            let members = self.members();
            let pids = members.iter().filter(|p| p.alive()).map(|p| p.pid);
            let pids: Vec<_> = pids.collect();
            // Zombies only need to be reaped.
            if !pids.is_empty() {
                self.guard.control.report(&Report::Stuck { pids });
            }
        }
    }

    fn be_urgent(&mut self) {
        if self.urgent.is_none() {
            self.urgent = Urgent::new();
        }
    }

    fn kill(&mut self) {
        if let Some(cgroup) = &self.cgroup {
            cgroup.kill();
        }
        // Look for processes even with a cgroup: root may move one out of it.
        if self.chase(Boottime::now() + CHASE) {
            kill_pass(|| soon_below(std::process::id().cast_signed()));
        }
    }

    /// Kills children as they appear, and reaps them: a process that forks and ends all the time is gone before a look
    /// into /proc finds it, and its child is then a child of the guard. Not for longer than until `end`. True:
    /// processes may be left for such a look. Without children the guard has no descendants, because every orphan
    /// becomes its child.
    fn chase(&mut self, end: Boottime) -> bool {
        // Read the result of a start before reaping its child.
        if self.start.is_some() {
            return true;
        }
        let over = || Boottime::now() >= end;
        while kill_children() {
            let mut left = self.reap();
            while self.more_ended && !over() {
                left = self.reap();
            }
            if !left || over() {
                // Reap zombies first: a walk over too many of them takes too long.
                return left && !self.more_ended;
            }
        }
        true
    }

    /// All processes of the run, zombies included.
    fn members(&self) -> Vec<Proc> {
        let tree = soon_below(std::process::id().cast_signed());
        joined(tree, self.cgroup.iter().flat_map(Cgroup::members))
    }

    /// Asked only when no descendant is left: processes in the cgroup then came from elsewhere, and are killed too.
    fn cgroup_populated(&mut self) -> bool {
        let populated = self.cgroup.as_ref().is_some_and(Cgroup::populated);
        if !populated {
            return false;
        }
        if self.kills.is_none() {
            self.act(Step::Kill);
        }
        true
    }
}

/// These processes, and those of `pids` that are not among them.
fn joined(mut processes: Vec<Proc>, pids: impl Iterator<Item = i32>) -> Vec<Proc> {
    for pid in pids {
        if !processes.iter().any(|p| p.pid == pid) {
            processes.extend(Proc::read(pid));
        }
    }
    processes
}

/// What the guard's children have taken, with the children that they waited for. All of a run's processes are among
/// them: those that nobody waited for became the guard's own.
fn usage() -> Usage {
    // SAFETY: all zeroes is a valid rusage, and the kernel writes no more than that.
    let (done, all) = unsafe {
        let mut all: libc::rusage = std::mem::zeroed();
        (libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut all), all)
    };
    match done {
        0 => taken(&all),
        _ => Usage::default(),
    }
}

fn taken(all: &libc::rusage) -> Usage {
    let us = |t: libc::timeval| t.tv_sec * 1_000_000 + t.tv_usec;
    let cpu_us = us(all.ru_utime) + us(all.ru_stime);
    Usage {
        cpu_ms: u64::try_from(cpu_us / 1000).ok(),
        peak_memory_bytes: u64::try_from(all.ru_maxrss).ok().map(|kib| kib * 1024),
        output_bytes: None,
        left_processes: None,
    }
}

fn null() -> io::Result<File> {
    File::options().read(true).write(true).open("/dev/null")
}

/// Closes the guard's copies of the pipes: from here on end-of-file means that the command's tree is gone.
fn give_away_output() {
    let null = null();
    for fd in [1, 2] {
        // SAFETY: 1 and 2 belong to this process and nothing here keeps them as owned descriptors.
        unsafe {
            match &null {
                Ok(null) => libc::dup2(null.as_raw_fd(), fd),
                Err(_) => libc::close(fd),
            }
        };
    }
}

/// The signals that the kernel sends for an error of this program itself.
const ERRORS: [i32; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
    libc::SIGTRAP,
];

/// Blocks every signal that could end or stop this process and can be blocked, so that only SIGKILL, SIGSTOP and a
/// frozen cgroup can do so. They are not ignored, because the command would inherit that, and each would have to be
/// reset.
fn block_signals() {
    let errors: u64 = ERRORS.iter().map(|signal| 1 << (signal - 1)).sum();
    set_blocked(!errors);
}

fn unblock_signals() {
    set_blocked(0);
}

/// Bit 0 is signal 1. libc's function would leave out the two signals that libc keeps to itself.
fn set_blocked(signals: u64) {
    // SAFETY: the kernel reads the eight bytes of its own set of signals, and writes nothing.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const signals,
            std::ptr::null_mut::<u64>(),
            8_usize,
        )
    };
}

/// Ignores every signal that could end or stop this process, for a program that is executed next; what was blocked and
/// waits is dropped.
fn ignore_signals() {
    let kept =
        |signal| ERRORS.contains(&signal) || [libc::SIGCHLD, libc::SIGCONT].contains(&signal);
    for signal in (1..=64).filter(|signal| !kept(*signal)) {
        spawn::set_signal(signal, libc::SIG_IGN);
    }
}

/// A descriptor that becomes readable when a child ends. SIGCHLD must be blocked.
fn ended_children() -> io::Result<SignalFd> {
    // All flags: it is closed on exec, and a read does not wait.
    let ended = SignalFd::with_flags(&signal::SIGCHLD.into(), SfdFlags::all());
    ended.map_err(io::Error::from)
}

/// What to do about an error of the kernel that starts no process, as the end of a message.
pub(crate) fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            "; raise the limit on open files of the soloist process (ulimit -n, LimitNOFILE)"
        }
        Some(libc::ENFILE) => "; the host's limit on open files is reached (fs.file-max)",
        Some(libc::EAGAIN) => {
            "; a limit on processes is reached (ulimit -u, TasksMax, pids.max, kernel.pid_max)"
        }
        Some(libc::ENOMEM) => "; the host is out of memory",
        _ => "",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(super) fn spec(user: Option<&str>, program: &str) -> Spec {
        let second = Duration::from_secs(1);
        Spec {
            job: crate::model::JobName::new("a"),
            run_id: crate::model::RunId::random(),
            argv: vec![program.to_owned()],
            env: vec![],
            working_dir: Some("/srv".into()),
            user: user.map(str::to_owned),
            group: Some("staff".to_owned()),
            new_privileges: false,
            timeout: None,
            grace: second,
            kill_budget: second,
            success_codes: vec![0],
            deadline: Boottime(0),
            settle: serde_json::Value::Null,
            settle_exe: None,
            walk_only: false,
            transparent: None,
        }
    }

    /// Runs the test of this name in a process of its own. False: this is that process.
    pub(crate) fn ran_elsewhere(test: &str) -> bool {
        const ROLE: &str = "SOLOIST_TEST_ALONE";
        if std::env::var_os(ROLE).is_some() {
            return false;
        }
        let status = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", test])
            .env(ROLE, "1")
            .stdout(std::process::Stdio::null())
            .status();
        let status = status.expect("it starts");
        assert!(status.success(), "{status}");
        true
    }

    /// With the daemon's end of its socket.
    fn guard() -> (std::os::unix::net::UnixStream, Guard) {
        let (daemon, socket) = std::os::unix::net::UnixStream::pair().expect("a socket");
        daemon.set_nonblocking(true).expect("a socket");
        let timer = rustix::time::timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC);
        let guard = Guard {
            control: ControlSocket::new(socket.into()).expect("a guard's end"),
            children: ended_children().expect("a descriptor"),
            timer: timer.expect("a timer"),
            daemon: None,
            inherited: None,
        };
        (daemon, guard)
    }

    /// In another process, because it is killed again what it started, and what it has not the right to kill survives.
    #[test]
    #[expect(clippy::zombie_processes, reason = "it ends with this process")]
    fn what_survives_is_reported_and_after_the_deadline_killed_with_priority() {
        let name = "what_survives_is_reported_and_after_the_deadline_killed_with_priority";
        if ran_elsewhere(&format!("guard::tests::{name}")) {
            return;
        }
        let (mut daemon, mut guard) = guard();
        let may_be_urgent = Urgent::new().is_some();
        let told = |daemon: &mut std::os::unix::net::UnixStream| {
            let mut text = String::new();
            let _ = io::Read::read_to_string(daemon, &mut text);
            text
        };
        let past = Boottime(1);
        for (deadline, urgent) in [
            (past, may_be_urgent),
            (Boottime::now() + Duration::from_secs(3600), false),
        ] {
            let mut run = GuardedRun::new(&mut guard, spec(None, "sleep"));
            run.life = Life::new(past, deadline, None, Duration::ZERO, Duration::ZERO);
            run.kills = Some(Kills::begin(past, Duration::ZERO));
            run.kill_again_if_due();
            assert_eq!(run.urgent.is_some(), urgent);
            assert_eq!(told(&mut daemon), "", "nobody is there");
        }
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root has what it may not kill as another user");
        }
        let mut cat = std::process::Command::new("cat");
        let cat = cat.stdin(std::process::Stdio::piped()).spawn();
        let cat = cat.expect("a child");
        nix::unistd::setuid(54_321.into()).expect("another user");
        let mut run = GuardedRun::new(&mut guard, spec(None, "sleep"));
        assert!(run.chase(past), "it is left");
        for (budget, reported) in [(Duration::from_secs(3600), false), (Duration::ZERO, true)] {
            let begun = Boottime::now();
            run.kills = Some(Kills::begin(begun, budget));
            while Boottime::now() < begun + Duration::from_millis(3) {}
            run.kill_again_if_due();
            let stuck = format!("{{\"stuck\":{{\"pids\":[{}]}}}}\n", cat.id());
            let said = if reported { &*stuck } else { "" };
            assert_eq!(told(&mut daemon), said);
        }
    }

    #[test]
    fn a_process_is_counted_once() {
        let me = Proc::read(std::process::id().cast_signed()).expect("us");
        let (this, parent) = (me.pid, me.parent);
        let all = joined(vec![me], [this, parent, parent].into_iter());
        let pids: Vec<i32> = all.iter().map(|p| p.pid).collect();
        assert_eq!(pids, [this, parent]);
    }

    /// In another process, because whatever children it has are killed.
    #[test]
    #[expect(clippy::zombie_processes, reason = "the guard reaps them")]
    fn children_are_killed_and_reaped_without_a_walk_of_all_processes() {
        let name = "children_are_killed_and_reaped_without_a_walk_of_all_processes";
        if ran_elsewhere(&format!("guard::tests::{name}")) {
            return;
        }
        if !std::fs::exists("/proc/thread-self/children").expect("an answer") {
            return eprintln!("skipped: this kernel lists no children");
        }
        let (_daemon, mut guard) = guard();
        let mut run = GuardedRun::new(&mut guard, spec(None, "sleep"));
        for _ in 0..2 {
            let mut sleeps = std::process::Command::new("sleep");
            sleeps.arg("100").spawn().expect("a child");
        }
        let left = run.chase(Boottime::now() + Duration::from_secs(3600));
        assert!(!left, "they are left to a walk");
        let none = rustix::process::wait(WaitOptions::NOHANG);
        assert!(matches!(none, Err(Errno::CHILD)), "{none:?}");
    }

    #[test]
    fn a_wait_is_never_for_ever_and_a_long_one_ends_a_little_early() {
        let ms = Duration::from_millis;
        for (left, wait) in [
            (Duration::ZERO, Duration::from_nanos(1)),
            (ms(19), ms(19)),
            (ms(20), Duration::from_micros(18_750)),
            (ms(1600), ms(1500)),
        ] {
            assert_eq!(to_wait(left), wait);
        }
    }

    #[test]
    fn a_run_took_the_time_of_program_and_kernel_and_its_highest_memory() {
        // SAFETY: all zeroes is a valid rusage.
        let mut all: libc::rusage = unsafe { std::mem::zeroed() };
        (all.ru_utime.tv_sec, all.ru_utime.tv_usec) = (2, 345_000);
        (all.ru_stime.tv_sec, all.ru_stime.tv_usec) = (1, 5_000);
        all.ru_maxrss = 70;
        let taken = taken(&all);
        assert_eq!(taken.cpu_ms, Some(3_350));
        assert_eq!(taken.peak_memory_bytes, Some(71_680));
        assert_eq!(taken.output_bytes, None);
    }

    #[test]
    fn what_the_host_has_no_more_of_is_named() {
        for (errno, what) in [
            (libc::EMFILE, "LimitNOFILE"),
            (libc::ENFILE, "fs.file-max"),
            (libc::EAGAIN, "pids.max"),
            (libc::ENOMEM, "out of memory"),
        ] {
            let said = hint(&io::Error::from_raw_os_error(errno));
            assert!(said.contains(what), "{said}");
        }
        assert_eq!(hint(&io::Error::from_raw_os_error(libc::EIO)), "");
    }
}
