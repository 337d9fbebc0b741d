//! Starts the command of a run, with its own session, user, directory and environment, and with no descriptors but 0, 1
//! and 2.
//!
//! The forked child, which can be killed, does everything that may block: looking up names (LDAP, NIS), entering the
//! directory and opening the command (a network file system). The guard never waits for the child; it checks
//! ([`Start::look`]) when the report pipe becomes readable. The pipe closes by itself when the command is executed.

use std::{
    ffi::{CString, OsString},
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    path::Path,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
};

use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal},
};
use serde::{Deserialize, Serialize};

use super::{
    Inherited, Spec, cgroup::Cgroup, is_of_store, privileges, tree::Proc, unblock_signals,
};
use crate::clock::Boottime;

/// Where to search for a command if its environment has no PATH.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Variables that no job inherits, because they are meant for the daemon alone.
const STRIPPED: [&str; 14] = [
    "NOTIFY_SOCKET",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "CREDENTIALS_DIRECTORY",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    // The trace in which the daemon was started.
    "TRACEPARENT",
    "TRACESTATE",
    "BAGGAGE",
    // The name of the daemon in traces, and what it may need to send them.
    "OTEL_SERVICE_NAME",
    "OTEL_EXPORTER_OTLP_HEADERS",
];

/// Variables of the daemon that the command of another user keeps.
const LOGIN_KEEPS: &str = "LANG";

/// Why the command was not executed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Failed {
    /// The error for people, with the failed step and its object; the history has it unchanged.
    pub error: String,
    /// The kernel's error for exec itself, if the start got that far.
    pub errno: Option<i32>,
    /// The child did not report this itself: something ended it.
    #[serde(skip)]
    pub silent: bool,
}

impl From<String> for Failed {
    fn from(error: String) -> Self {
        Self {
            error,
            errno: None,
            silent: false,
        }
    }
}

impl From<&str> for Failed {
    fn from(error: &str) -> Self {
        error.to_owned().into()
    }
}

/// Reported by the guard, or by a child that notices that it is too late.
pub(super) const TOO_LATE: &str = "the lease ran out before the command could be started";

/// Reported for a child that was ended by the kernel (out of memory), or by a signal meant for the command.
const SILENT: &str = "the start of the command ended before the command was executed";

/// From linux/sched.h; libc's constant is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// The user and groups of the command; None in a field: the same as soloist's.
#[derive(Default)]
struct Identity {
    uid: Option<u32>,
    gid: Option<u32>,
    groups: Option<Vec<libc::gid_t>>,
    /// The uid is not soloist's, so the guard needs the right to signal the command.
    changes: bool,
    /// HOME and so on, as a login would set them.
    env: Vec<(OsString, OsString)>,
}

/// The child's steps up to exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    Session,
    LookUp,
    Groups,
    Group,
    User,
    Keyring,
    Privileges,
    Directory,
    Exec,
}

/// The memory that guard and child share during the start. It stays mapped: a guard has one start.
struct Shared(std::ptr::NonNull<Page>);

struct Page {
    /// Until when the command may be executed; zero: never.
    deadline: AtomicU64,
    /// A [`Stage`].
    stage: AtomicU8,
    /// The child is in the cgroup that was offered.
    in_cgroup: AtomicBool,
}

impl Shared {
    fn new(deadline: Boottime) -> io::Result<Self> {
        // SAFETY: a new mapping of our own; nothing is replaced.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                std::mem::size_of::<Page>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Zeroed by the kernel, which is valid for all fields.
        let page = std::ptr::NonNull::new(page.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let shared = Self(page);
        shared.page().deadline.store(deadline.0, Ordering::Relaxed);
        Ok(shared)
    }

    fn page(&self) -> &Page {
        // SAFETY: mapped for ever, page-aligned, and changed through atomics only.
        unsafe { self.0.as_ref() }
    }

    fn enter(&self, stage: Stage) {
        self.page().stage.store(stage as u8, Ordering::Relaxed);
    }

    fn note_in_cgroup(&self) {
        self.page().in_cgroup.store(true, Ordering::Relaxed);
    }
}

/// A start under way.
pub(super) struct Start {
    pub pid: Pid,
    report: File,
    /// The child's report so far: nothing, or one [`Failed`] as JSON.
    said: Vec<u8>,
    shared: Shared,
}

/// Begins to start the command of `spec`; with `inherited`, in the place of the program that started soloist. The child
/// does not execute the command after `deadline`.
///
/// # Errors
/// The child could not be forked.
pub(super) fn start(
    spec: &Spec,
    deadline: Boottime,
    cgroup: Option<&Cgroup>,
    inherited: Option<&Inherited>,
) -> Result<Start, Failed> {
    let null = super::null().map_err(|e| format!("cannot open /dev/null: {e}"))?;
    let null = OwnedFd::from(null);
    let (ours, theirs) =
        pipe_with(PipeFlags::CLOEXEC).map_err(|e| format!("cannot start a process (pipe): {e}"))?;
    rustix::io::ioctl_fionbio(&ours, true)
        .map_err(|e| format!("cannot start a process (pipe): {e}"))?;
    let shared =
        Shared::new(deadline).map_err(|e| format!("cannot start a process (memory): {e}"))?;
    let guard = rustix::process::getpid();

    // Signals to the child stay blocked, as they are in the guard, until it executes the command.
    let pid = fork(cgroup, &shared);
    if pid == 0 {
        let child = Child {
            spec,
            stdin: inherited.map_or(&null, |i| &i.stdin),
            report: theirs,
            guard,
            shared: &shared,
        };
        child.run();
    }
    let error = io::Error::last_os_error();
    match Pid::from_raw(pid.max(0)) {
        Some(pid) => Ok(Start {
            pid,
            report: ours.into(),
            said: Vec::new(),
            shared,
        }),
        None => {
            let hint = super::hint(&error);
            Err(format!("cannot start a process (fork): {error}{hint}").into())
        }
    }
}

impl Start {
    /// Becomes readable when [`Start::look`] may have a result.
    pub(super) fn readable(&self) -> BorrowedFd<'_> {
        self.report.as_fd()
    }

    /// The result: the command was executed, or why it was not. None: the start is still under way. Do not reap the
    /// child before this returns a result: its zombie shows whether it was executed.
    pub(super) fn look(&mut self) -> Option<Result<(), Failed>> {
        let child = Proc::read(self.pid.as_raw_nonzero().get());
        let closed = match self.report.read_to_end(&mut self.said) {
            Ok(_) => true,
            Err(e) => e.kind() != io::ErrorKind::WouldBlock,
        };
        let Some(child) = child else {
            // Without /proc, a pipe that closed without a report is the only sign.
            return closed.then(|| self.verdict().map_or(Ok(()), Err));
        };
        if !closed && child.alive() && !child.executed() {
            return None;
        }
        match self.verdict() {
            Some(failed) => Some(Err(failed)),
            // Check again: the command may have been executed meanwhile.
            None if child.executed() || self.executed() => Some(Ok(())),
            None => Some(Err(Failed {
                silent: true,
                ..SILENT.into()
            })),
        }
    }

    /// True: the child is in the offered cgroup; final once the command was executed.
    pub(super) fn in_cgroup(&self) -> bool {
        self.shared.page().in_cgroup.load(Ordering::Relaxed)
    }

    fn executed(&self) -> bool {
        Proc::read(self.pid.as_raw_nonzero().get()).is_some_and(|p| p.executed())
    }

    fn verdict(&self) -> Option<Failed> {
        serde_json::from_slice(&self.said).ok()
    }

    /// Sets until when the command may be executed.
    pub(super) fn extend(&self, deadline: Boottime) {
        self.shared
            .page()
            .deadline
            .store(deadline.0, Ordering::Relaxed);
    }

    /// What the child is doing, as the end of the message "... before the command could be started: ...".
    pub(super) fn doing(&self, spec: &Spec) -> String {
        let stage = self.shared.page().stage.load(Ordering::Relaxed);
        let is = |s: Stage| stage == s as u8;
        let quoted = |name: &Option<String>| name.as_deref().unwrap_or("?").to_owned();
        if is(Stage::LookUp) {
            return match (&spec.user, &spec.group) {
                (None, None) => "soloist was still preparing the start".to_owned(),
                (None, group) => format!("soloist was still looking up group `{}`", quoted(group)),
                (user, _) => format!("soloist was still looking up user `{}`", quoted(user)),
            };
        }
        if is(Stage::Directory)
            && let Some(directory) = &spec.working_dir
        {
            let directory = directory.display();
            return format!("soloist was still entering working directory `{directory}`");
        }
        if is(Stage::Exec) {
            let program = spec.argv.first().map_or("", String::as_str);
            return format!("soloist was still opening `{program}`");
        }
        "soloist was still preparing the start".to_owned()
    }
}

/// Forks a child in `cgroup`, or if that fails, in the guard's own cgroup; `shared` says which. Returns what `fork`
/// returns: 0 in the child, negative after an error.
///
/// The child is forked into the cgroup if possible: moving a process makes the kernel wait for all processors,
/// sometimes for 20 ms.
fn fork(cgroup: Option<&Cgroup>, shared: &Shared) -> libc::pid_t {
    if let Some(directory) = cgroup.and_then(Cgroup::directory) {
        // SAFETY: all zeroes is a valid clone_args.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.flags = CLONE_INTO_CGROUP;
        args.exit_signal = libc::SIGCHLD.cast_unsigned().into();
        args.cgroup = directory.as_raw_fd().cast_unsigned().into();
        // SAFETY: without CLONE_VM this is fork; this process has one thread, so the child is a full copy of it.
        let pid = unsafe {
            libc::syscall(
                libc::SYS_clone3,
                &raw const args,
                std::mem::size_of_val(&args),
            )
        };
        if pid >= 0 {
            shared.note_in_cgroup();
            return libc::pid_t::try_from(pid).unwrap_or(-1);
        }
    }
    // SAFETY: as above.
    let pid = unsafe { libc::fork() };
    // A seccomp filter cannot inspect the arguments of clone3 and may refuse it: systemd's RestrictNamespaces=,
    // containers.
    if pid == 0 && cgroup.is_some_and(Cgroup::enter) {
        shared.note_in_cgroup();
    }
    pid
}

/// The forked child. The guard has one thread, so the child may use any function.
struct Child<'a> {
    spec: &'a Spec,
    stdin: &'a OwnedFd,
    report: OwnedFd,
    guard: Pid,
    shared: &'a Shared,
}

impl Child<'_> {
    /// Becomes the command. If a step fails, reports why and exits.
    fn run(self) -> ! {
        let failed =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.become_command()))
                .unwrap_or_else(|_| "starting the command failed in soloist itself".into());
        if let Ok(note) = serde_json::to_vec(&failed) {
            let mut note = &note[..];
            while let Ok(n @ 1..) = rustix::io::write(&self.report, note) {
                note = &note[n..];
            }
        }
        // SAFETY: leaves without running anything of the guard's, which belongs to the parent.
        unsafe { libc::_exit(127) }
    }

    /// Returns only when a step fails.
    fn become_command(&self) -> Failed {
        self.die_with_guard();
        match self.prepare() {
            Err(failed) => failed,
            Ok(command) => {
                self.shared.enter(Stage::Exec);
                // The guard has reset all of them.
                for signal in self.spec.transparent.iter().flat_map(|t| &t.ignored) {
                    set_signal(*signal, libc::SIG_IGN);
                }
                unblock_signals();
                // The last check: the steps before took time, and the lease may have ended.
                if Boottime::now().0 >= self.shared.page().deadline.load(Ordering::Relaxed) {
                    return TOO_LATE.into();
                }
                let errno = command.exec();
                Failed {
                    error: explain_exec(errno, self.spec, &command.path),
                    errno: Some(errno),
                    silent: false,
                }
            }
        }
    }

    /// The guard has one thread, so this fires only when the guard itself ends.
    fn die_with_guard(&self) {
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        if rustix::process::getppid() != Some(self.guard) {
            // The guard died before that line; no process is left to report to. SAFETY: see `run`.
            unsafe { libc::_exit(127) }
        }
    }

    /// Everything up to exec.
    fn prepare(&self) -> Result<Command, Failed> {
        let failed = |stage, errno| Failed::from(explain(stage, errno, self.spec));
        // A transparent command was forked into the right session and group.
        if self.spec.transparent.is_none() {
            rustix::process::setsid().map_err(|e| failed(Stage::Session, e.raw_os_error()))?;
        }
        // stdout and stderr are already in place. dup2 clears CLOEXEC. SAFETY: plain descriptor numbers; 0 is the
        // control socket, which this process must not keep.
        unsafe { libc::dup2(self.stdin.as_raw_fd(), 0) };
        self.shared.enter(Stage::LookUp);
        let id = identity(self.spec.user.as_deref(), self.spec.group.as_deref())?;
        let command = Command::new(self.spec, &id)?;
        self.shared.enter(Stage::User);
        self.become_user(&id)?;
        // Set it again: setuid clears it.
        self.die_with_guard();
        if let Some(directory) = &self.spec.working_dir {
            self.shared.enter(Stage::Directory);
            rustix::process::chdir(directory)
                .map_err(|e| failed(Stage::Directory, e.raw_os_error()))?;
        }
        // Close the descriptors that looking up names left open.
        if self.spec.transparent.is_none() {
            let report = self.report.as_raw_fd().cast_unsigned();
            // SAFETY: none of these descriptors is used any more; the report pipe closes itself.
            unsafe {
                libc::syscall(libc::SYS_close_range, 3, report - 1, 0);
                libc::syscall(libc::SYS_close_range, report + 1, libc::c_uint::MAX, 0);
            }
        }
        Ok(command)
    }

    /// Changes user and groups, and drops the daemon's privileges for another user; root keeps its own.
    fn become_user(&self, id: &Identity) -> Result<(), Failed> {
        let spec = self.spec;
        let at = |stage| {
            move |e: io::Error| Failed::from(explain(stage, e.raw_os_error().unwrap_or(0), spec))
        };
        if let Some(groups) = &id.groups {
            // SAFETY: pointer and length come from a live vector.
            done(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) })
                .map_err(at(Stage::Groups))?;
        }
        if let Some(gid) = id.gid {
            // SAFETY: takes no pointers.
            done(unsafe { libc::setgid(gid) }).map_err(at(Stage::Group))?;
        }
        if id.changes && !privileges::may_signal_others() {
            let user = spec.user.as_deref().unwrap_or("?");
            return Err(format!(
                "the command would run as user `{user}`, and soloist could not end it: CAP_KILL is missing"
            )
            .into());
        }
        let another = id.changes && id.uid != Some(0);
        if another {
            privileges::own_keyring().map_err(at(Stage::Keyring))?;
            privileges::open_output();
            if !spec.new_privileges {
                privileges::bound();
            }
        }
        if let Some(uid) = id.uid {
            // SAFETY: takes no pointers.
            done(unsafe { libc::setuid(uid) }).map_err(at(Stage::User))?;
        }
        if another {
            privileges::give_up_all().map_err(at(Stage::Privileges))?;
            if !spec.new_privileges {
                privileges::no_new().map_err(at(Stage::Privileges))?;
            }
        } else if spec.transparent.is_none() {
            privileges::keep_to_ourselves().map_err(at(Stage::Privileges))?;
        }
        Ok(())
    }
}

fn done(result: libc::c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The arguments of exec.
struct Command {
    candidates: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    /// Where to search for the program.
    path: String,
}

impl Command {
    fn new(spec: &Spec, identity: &Identity) -> Result<Self, Failed> {
        let program = spec.argv.first().ok_or("the command is empty")?;
        let env = environment(spec, identity);
        let path = env.iter().find(|(name, _)| name == "PATH").map_or_else(
            || DEFAULT_PATH.to_owned(),
            |(_, value)| value.to_string_lossy().into_owned(),
        );
        let c_string = |text: Vec<u8>, what: &str| {
            CString::new(text).map_err(|_| {
                format!("{what} contains a NUL byte, which cannot be passed to a program")
            })
        };
        let candidates = if program.contains('/') {
            vec![c_string(program.clone().into_bytes(), "the command")?]
        } else {
            // An empty entry of PATH means the working directory.
            let at = |dir: &str| {
                if dir.is_empty() {
                    format!("./{program}")
                } else {
                    format!("{dir}/{program}")
                }
            };
            // An empty name is not a file of any directory.
            path.split(':')
                .filter(|_| !program.is_empty())
                .map(|dir| c_string(at(dir).into_bytes(), "the command"))
                .collect::<Result<_, _>>()?
        };
        let argv = spec
            .argv
            .iter()
            .map(|a| c_string(a.clone().into_bytes(), "the command"))
            .collect::<Result<_, _>>()?;
        let env = env
            .into_iter()
            .map(|(name, value)| {
                let what = format!("environment variable `{}`", name.display());
                c_string([name.into_vec(), value.into_vec()].join(&b'='), &what)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            candidates,
            argv,
            env,
            path,
        })
    }

    /// Like execvp, with the PATH of the job. Returns the most informative error of all candidates.
    fn exec(&self) -> i32 {
        let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
            list.iter()
                .map(|s| s.as_ptr())
                .chain([std::ptr::null()])
                .collect()
        };
        let (argv, env) = (pointers(&self.argv), pointers(&self.env));
        let mut told = libc::ENOENT;
        for candidate in &self.candidates {
            // SAFETY: NUL-terminated strings in NULL-terminated lists, all alive.
            unsafe { libc::execve(candidate.as_ptr(), argv.as_ptr(), env.as_ptr()) };
            match errno() {
                libc::ENOENT | libc::ENOTDIR | libc::ENODEV | libc::ESTALE | libc::ETIMEDOUT => {}
                // A directory of PATH that this user may not read does not show whether the command exists.
                libc::EACCES if self.candidates.len() > 1 && !exists(candidate) => {}
                libc::EACCES => told = libc::EACCES,
                other => return other,
            }
        }
        told
    }
}

/// Resets all signals to their defaults, as programs expect: whoever started this process may have left some ignored.
/// With SIGCHLD ignored, children would vanish without a status.
pub(super) fn reset_signals() {
    for signal in 1..=64 {
        set_signal(signal, libc::SIG_DFL);
    }
}

/// Ignores a signal, or resets it. posix_spawn, which starts guards, ignores two signals that libc's own functions
/// leave alone; so this asks the kernel. The kernel refuses SIGKILL and SIGSTOP.
pub(super) fn set_signal(signal: i32, handler: libc::sighandler_t) {
    let mut action = [0_usize; 8];
    action[0] = handler;
    // SAFETY: the kernel's struct is shorter than this on all architectures and begins with the handler, which is no
    // function of ours; the rest of it is zero.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            signal,
            action.as_ptr(),
            std::ptr::null_mut::<u8>(),
            8_usize,
        )
    };
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Describes the error for people, and says what to do.
fn explain(stage: Stage, errno: i32, spec: &Spec) -> String {
    let error = io::Error::from_raw_os_error(errno);
    let user = spec.user.as_deref().unwrap_or("?");
    let group = spec.group.as_deref().unwrap_or("?");
    let root = if errno == libc::EPERM {
        "; soloist must run as root for this, or have CAP_SETUID, CAP_SETGID and CAP_KILL"
    } else {
        ""
    };
    let limit = if errno == libc::EDQUOT {
        "; soloist's user has reached its limit of keys (kernel.keys.maxkeys)"
    } else {
        ""
    };
    match stage {
        Stage::Groups if spec.user.is_none() => {
            format!("cannot limit the command to group `{group}`: {error}{root}")
        }
        Stage::Groups => format!("cannot set the groups of user `{user}`: {error}{root}"),
        Stage::Group => format!("cannot become group `{group}`: {error}{root}"),
        Stage::User => format!("cannot become user `{user}`: {error}{root}"),
        Stage::Keyring => format!("cannot get a session keyring for user `{user}`: {error}{limit}"),
        Stage::Privileges => format!("cannot drop soloist's privileges for the command: {error}"),
        Stage::Directory => {
            let directory = spec
                .working_dir
                .as_deref()
                .unwrap_or(Path::new("?"))
                .display();
            match errno {
                libc::ENOENT => format!("working directory `{directory}` does not exist"),
                libc::ENOTDIR => format!("working directory `{directory}` is not a directory"),
                _ => format!("cannot enter working directory `{directory}`: {error}"),
            }
        }
        Stage::Session | Stage::LookUp | Stage::Exec => format!("cannot start a session: {error}"),
    }
}

/// Describes an error of exec. Call it in the child, in its directory and as its user, because it inspects the file.
fn explain_exec(errno: i32, spec: &Spec, path: &str) -> String {
    let error = io::Error::from_raw_os_error(errno);
    let program = spec.argv.first().map_or("", String::as_str);
    let mut places = match program.contains('/') {
        true => "",
        false => path,
    }
    .split(':')
    .map(|directory| Path::new(directory).join(program));
    match errno {
        libc::ENOENT => match places.find(|file| file.is_file()) {
            Some(file) if ends_with_a_carriage_return(&file) => format!(
                "the first line of `{file}` ends with a carriage return, which counts as part of the interpreter's name: \
                 convert the file with `sed -i 's/\\r$//' {file}`",
                file = file.display()
            ),
            Some(file) => format!(
                "command `{}` exists, but the interpreter named in its first line, or its loader, does not",
                file.display()
            ),
            None if program.contains('/') => format!("command `{program}` does not exist"),
            None => format!("command `{program}` not found in PATH ({path})"),
        },
        libc::EACCES => {
            format!(
                "command `{program}` is not executable: {error}; is it a file, with `chmod +x`, not on a noexec mount?"
            )
        }
        libc::ENOEXEC => format!(
            "command `{program}` is not a program: {error}; does a script lack its `#!` line?"
        ),
        _ => format!("cannot execute `{program}`: {error}"),
    }
}

/// A script as an editor of Windows writes it.
fn ends_with_a_carriage_return(file: &Path) -> bool {
    let mut begin = Vec::new();
    let read = File::open(file).and_then(|file| file.take(256).read_to_end(&mut begin));
    let line = begin.split(|b| *b == b'\n').next().unwrap_or_default();
    read.is_ok() && line.starts_with(b"#!") && line.ends_with(b"\r")
}

/// Why a command cannot run as this user and group.
pub(crate) fn unknown(user: Option<&str>, group: Option<&str>) -> Option<String> {
    identity(user, group).err()
}

/// Looks up `user` and `group`. A number that is not the name of a user or group is an id, as in a container.
fn identity(user: Option<&str>, group: Option<&str>) -> Result<Identity, String> {
    use nix::unistd::{Gid, Group, Uid, User};

    let mut id = Identity::default();
    let named_group = match group {
        None => None,
        Some(name) => {
            let found = Group::from_name(name)
                .map_err(|e| format!("cannot look up group `{name}`: {e}"))?;
            let gid = found
                .map(|g| g.gid)
                .or_else(|| name.parse().ok().map(Gid::from_raw));
            Some(gid.ok_or_else(|| format!("group `{name}` is not known on this host"))?)
        }
    };
    id.gid = named_group.map(Gid::as_raw);
    if let Some(name) = user {
        let failed = |e| format!("cannot look up user `{name}`: {e}");
        let mut found = User::from_name(name).map_err(failed)?;
        if found.is_none()
            && let Ok(uid) = name.parse()
        {
            found = User::from_uid(Uid::from_raw(uid)).map_err(failed)?;
        }
        let nameless = |uid| User {
            name: name.to_owned(),
            passwd: CString::default(),
            uid: Uid::from_raw(uid),
            gid: Gid::from_raw(0),
            gecos: CString::default(),
            dir: "/".into(),
            shell: "/bin/sh".into(),
        };
        let user = found
            .or_else(|| name.parse().ok().map(nameless))
            .ok_or_else(|| format!("user `{name}` is not known on this host"))?;
        let gid = named_group.unwrap_or(user.gid);
        let c_name = CString::new(user.name.as_str())
            .map_err(|_| format!("user `{name}` is not a valid name"))?;
        let groups = nix::unistd::getgrouplist(&c_name, gid)
            .map_err(|e| format!("cannot look up the groups of user `{name}`: {e}"))?;
        id.gid = Some(gid.as_raw());
        id.uid = Some(user.uid.as_raw());
        id.groups = Some(groups.into_iter().map(Gid::as_raw).collect());
        id.env = vec![
            ("PATH".into(), DEFAULT_PATH.into()),
            ("HOME".into(), user.dir.into_os_string()),
            ("SHELL".into(), user.shell.into_os_string()),
            ("USER".into(), user.name.clone().into()),
            ("LOGNAME".into(), user.name.into()),
        ];
    }
    // The guard already runs as that user: it needs no privilege.
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    if !uid.is_root()
        && id.uid.is_none_or(|id| id == uid.as_raw())
        && id.gid.is_none_or(|id| id == gid.as_raw())
    {
        (id.uid, id.gid, id.groups) = (None, None, None);
    }
    if id.groups.is_none() {
        id.groups = id.gid.map(|gid| vec![gid]);
    }
    id.changes = id.uid.is_some_and(|id| id != uid.as_raw());
    Ok(id)
}

/// The command's environment: the daemon's without the variables for the daemon alone (or that of a login, for another
/// user); then the job's variables, then soloist's. Later ones win. A transparent command gets everything but the
/// store's address and secrets.
fn environment(spec: &Spec, identity: &Identity) -> Vec<(OsString, OsString)> {
    let mut env: std::collections::BTreeMap<OsString, OsString> = std::env::vars_os()
        .filter(|(name, _)| {
            let of_store = is_of_store(name);
            let name = name.to_string_lossy();
            match (&spec.transparent, &spec.user) {
                _ if of_store => false,
                (Some(_), _) => true,
                (None, Some(_)) => name == LOGIN_KEEPS,
                (None, None) => !STRIPPED.contains(&name.as_ref()),
            }
        })
        .collect();
    env.extend(identity.env.iter().cloned());
    env.extend(
        spec.env
            .iter()
            .map(|(name, value)| (name.into(), value.into())),
    );
    env.into_iter().collect()
}

fn exists(path: &std::ffi::CStr) -> bool {
    // SAFETY: a NUL-terminated string.
    unsafe { libc::access(path.as_ptr(), libc::F_OK) == 0 }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::spec, *};

    /// What the message says, and what it does not say.
    #[test]
    fn a_step_that_fails_is_named_with_its_object_and_what_to_do() {
        let (root, keys) = ("CAP_SETUID", "kernel.keys.maxkeys");
        for (stage, errno, user, said, not_said) in [
            (
                Stage::Groups,
                libc::EPERM,
                None,
                "limit the command to group `staff`: ",
                keys,
            ),
            (Stage::Groups, libc::EPERM, None, root, keys),
            (
                Stage::Groups,
                libc::EINVAL,
                Some("ann"),
                "set the groups of user `ann`: ",
                root,
            ),
            (Stage::Group, libc::EPERM, Some("ann"), root, keys),
            (
                Stage::User,
                libc::EAGAIN,
                Some("ann"),
                "become user `ann`: ",
                root,
            ),
            (Stage::Keyring, libc::EDQUOT, Some("ann"), keys, root),
            (
                Stage::Keyring,
                libc::ENOMEM,
                Some("ann"),
                "keyring for user `ann`: ",
                keys,
            ),
            (
                Stage::Privileges,
                libc::EPERM,
                Some("ann"),
                "drop soloist's privileges",
                root,
            ),
            (
                Stage::Directory,
                libc::ENOENT,
                None,
                "`/srv` does not exist",
                "os error",
            ),
            (
                Stage::Directory,
                libc::ENOTDIR,
                None,
                "`/srv` is not a directory",
                "os error",
            ),
            (
                Stage::Directory,
                libc::EACCES,
                None,
                "enter working directory `/srv`: ",
                root,
            ),
            (Stage::Session, libc::EPERM, None, "start a session: ", root),
        ] {
            let text = explain(stage, errno, &spec(user, "true"));
            assert!(text.contains(said) && !text.contains(not_said), "{text}");
        }
    }

    #[test]
    fn an_exec_that_fails_says_what_is_wrong_with_the_program() {
        for (errno, program, said) in [
            (libc::ENOENT, "backup", "`backup` not found in PATH (/bin)"),
            (libc::ENOENT, "/no/such", "`/no/such` does not exist"),
            (
                libc::ENOENT,
                "/bin/sh",
                "`/bin/sh` exists, but the interpreter",
            ),
            (libc::ENOENT, "sh", "`/bin/sh` exists, but the interpreter"),
            (libc::EACCES, "/bin/sh", "is not executable"),
            (libc::ENOEXEC, "/bin/sh", "is not a program"),
            (
                libc::E2BIG,
                "/bin/sh",
                "cannot execute `/bin/sh`: Argument list too long",
            ),
        ] {
            let text = explain_exec(errno, &spec(None, program), "/bin");
            assert!(text.contains(said), "{text}");
        }
    }

    #[test]
    fn a_script_whose_first_line_ends_with_a_carriage_return_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("backup");
        std::fs::write(&file, "#!/bin/sh\r\necho\r\n").expect("written");
        let path = format!("/bin:{}", dir.path().display());
        for program in [&file.display().to_string(), "backup"] {
            let text = explain_exec(libc::ENOENT, &spec(None, program), &path);
            let convert = format!("`sed -i 's/\\r$//' {}`", file.display());
            assert!(
                text.contains("a carriage return") && text.ends_with(&convert),
                "{text}"
            );
        }
    }

    #[test]
    fn a_call_of_the_kernel_that_fails_is_an_error() {
        assert!(done(0).is_ok() && done(-1).is_err());
    }

    #[test]
    fn a_start_under_way_says_what_it_is_doing() {
        let start = Start {
            pid: rustix::process::getpid(),
            report: File::open("/dev/null").expect("there"),
            said: vec![],
            shared: Shared::new(Boottime(7)).expect("memory"),
        };
        let (mut ann, mut staff, nobody) = (
            spec(Some("ann"), "backup"),
            spec(None, "backup"),
            Spec {
                group: None,
                working_dir: None,
                ..spec(None, "backup")
            },
        );
        (ann.group, staff.argv[0]) = (None, "mail".to_owned());
        let preparing = "still preparing the start";
        for (stage, spec, doing) in [
            (Stage::Session, &ann, preparing),
            (Stage::User, &ann, preparing),
            (Stage::LookUp, &ann, "looking up user `ann`"),
            (Stage::LookUp, &staff, "looking up group `staff`"),
            (Stage::LookUp, &nobody, preparing),
            (Stage::Directory, &ann, "entering working directory `/srv`"),
            (Stage::Directory, &nobody, preparing),
            (Stage::Exec, &ann, "opening `backup`"),
            (Stage::Exec, &staff, "opening `mail`"),
        ] {
            start.shared.enter(stage);
            let said = start.doing(spec);
            assert!(said.ends_with(doing), "{stage:?}: {said}");
        }
        let deadline = || start.shared.page().deadline.load(Ordering::Relaxed);
        assert_eq!(deadline(), 7);
        start.extend(Boottime(9));
        assert_eq!(deadline(), 9);
        assert!(!start.in_cgroup());
        start.shared.note_in_cgroup();
        assert!(start.in_cgroup());
    }

    #[test]
    fn a_program_is_searched_for_where_its_job_says() {
        let candidates = |user, program: &str, path: Option<&str>| {
            let mut spec = spec(user, program);
            let path = path.map(|path| ("PATH".to_owned(), path.to_owned()));
            spec.env = [("A".to_owned(), "/no".to_owned())]
                .into_iter()
                .chain(path)
                .collect();
            let command = Command::new(&spec, &Identity::default());
            let command = command.map_err(|failed| failed.error).expect("arguments");
            let all = command.candidates.into_iter();
            all.map(|c| c.into_string().expect("text"))
                .collect::<Vec<_>>()
        };
        let path = Some("/a::/b");
        assert_eq!(candidates(None, "x", path), ["/a/x", "./x", "/b/x"]);
        assert_eq!(candidates(None, "./x", path), ["./x"]);
        assert_eq!(candidates(None, "", path), [""; 0]);
        // Another user has none of soloist's own PATH.
        let usual: Vec<_> = DEFAULT_PATH.split(':').map(|d| format!("{d}/x")).collect();
        assert_eq!(candidates(Some("ann"), "x", None), usual);
        let refused = |spec: &Spec| {
            let command = Command::new(spec, &Identity::default());
            command.map_or_else(|failed| failed.error, |_| String::new())
        };
        let mut bad = spec(None, "/bin/true");
        assert_eq!(refused(&bad), "");
        bad.env = vec![("A".to_owned(), "\0".to_owned())];
        assert!(refused(&bad).starts_with("environment variable `A` contains a NUL"));
        let mut bad = spec(None, "/bin/true");
        bad.argv.push("\0".to_owned());
        assert!(refused(&bad).starts_with("the command contains a NUL"));
        bad.argv.clear();
        assert_eq!(refused(&bad), "the command is empty");
    }

    #[test]
    fn a_user_and_a_group_are_known_by_name_and_by_number() {
        let of = |user: Option<&str>, group: Option<&str>| identity(user, group);
        let ours = rustix::process::geteuid();
        for name in ["root", "0"] {
            let id = of(Some(name), Some("4242")).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!((id.uid, id.gid), (Some(0), Some(4242)), "{name}");
            assert!(id.groups.is_some_and(|groups| groups.contains(&4242)));
            assert_eq!(id.changes, !ours.is_root());
            let get = |name: &str| {
                let found = id.env.iter().find(|(n, _)| n == name);
                found.map(|(_, value)| value.to_str().unwrap_or("?"))
            };
            assert_eq!(get("USER"), Some("root"));
            assert_eq!(get("LOGNAME"), Some("root"));
            assert_eq!(get("PATH"), Some(DEFAULT_PATH));
            assert!(get("HOME").is_some() && get("SHELL").is_some());
        }
        // A number needs no entry, and has the group 0 unless the job has another one.
        for (group, gid) in [(None, 0), (Some("77"), 77)] {
            let id = of(Some("4000000"), group).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!((id.uid, id.gid), (Some(4_000_000), Some(gid)));
            assert_eq!(id.groups, Some(vec![gid]));
            assert!(
                id.env.contains(&("HOME".into(), "/".into())),
                "{:?}",
                id.env
            );
        }
        // Without a user there is nothing of a login, and the group is the only one.
        let id = of(None, Some("4242")).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((id.uid, id.gid, id.changes), (None, Some(4242), false));
        assert_eq!((id.groups, id.env), (Some(vec![4242]), vec![]));
        let id = of(None, None).unwrap_or_else(|e| panic!("{e}"));
        let none = (id.uid, id.gid, id.groups, id.changes);
        assert_eq!(none, (None, None, None, false));
        // Who is that user already needs no right, and has the groups that it has.
        let id = of(Some(&ours.as_raw().to_string()), None);
        let id = id.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((id.uid.is_some(), id.changes), (ours.is_root(), false));
        for (user, group, said) in [
            (Some("nobody such"), None, "user `nobody such` is not known"),
            (None, Some("none such"), "group `none such` is not known"),
        ] {
            let refused = of(user, group).map(|id| id.uid);
            assert!(
                matches!(&refused, Err(e) if e.starts_with(said)),
                "{refused:?}"
            );
        }
    }
}
