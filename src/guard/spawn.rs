//! Starts the command of a run: its own session, user, directory and environment, no descriptor but 0, 1, 2.
//!
//! All that can be looked up is looked up before the fork; every step after it that fails is reported by name,
//! through a pipe that closes by itself when the command is running.

use std::{
    ffi::{CStr, CString, OsString},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    path::Path,
};

use rustix::{
    fs::{Mode, OFlags},
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal},
};

use super::{Inherited, Spec, cgroup::Cgroup};

/// Where a command is looked for when its environment has no PATH.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What no job inherits from the daemon's environment: it is meant for the daemon alone.
const STRIPPED: [&str; 9] = [
    "NOTIFY_SOCKET",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "CREDENTIALS_DIRECTORY",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
];

/// Neither the store's address nor its password belong into a job.
const STRIPPED_PREFIX: &str = "SOLOIST_STORE";

/// A command that runs, or ran.
pub struct Command {
    pub pid: Pid,
    /// It is in the cgroup that was offered.
    pub in_cgroup: bool,
}

/// Why there is no command.
pub struct Failed {
    /// In words, naming the step and the thing: goes into the history as it is.
    pub error: String,
    /// What the kernel said to exec itself, if it came to that.
    pub errno: Option<i32>,
}

impl From<String> for Failed {
    fn from(error: String) -> Self {
        Self { error, errno: None }
    }
}

impl From<&str> for Failed {
    fn from(error: &str) -> Self {
        error.to_owned().into()
    }
}

/// From linux/sched.h; libc's constant is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Whom the command runs as; None in a field: as we are.
#[derive(Default)]
struct Identity {
    uid: Option<u32>,
    gid: Option<u32>,
    groups: Option<Vec<libc::gid_t>>,
    /// HOME and so on, as a login would set them.
    env: Vec<(OsString, OsString)>,
}

/// The step that failed between fork and exec; its number travels through the pipe.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    Session = 1,
    Groups,
    Group,
    User,
    Directory,
    Exec,
}

/// Starts the command of `spec`; with `inherited`, in the place of our starter.
///
/// # Errors
/// With the step that failed.
pub(super) fn start(
    spec: &Spec,
    cgroup: Option<&Cgroup>,
    inherited: Option<Inherited>,
) -> Result<Command, Failed> {
    let program = spec.argv.first().ok_or("the command is empty")?;
    let identity = identity(spec)?;
    let env = environment(spec, &identity);
    let path = env.iter().find(|(name, _)| name == "PATH").map_or_else(
        || DEFAULT_PATH.to_owned(),
        |(_, value)| value.to_string_lossy().into_owned(),
    );

    let c_string = |text: Vec<u8>, what: &str| {
        CString::new(text)
            .map_err(|_| format!("{what} contains a NUL byte, which no program can be given"))
    };
    let candidates: Vec<CString> = if program.contains('/') {
        vec![c_string(program.clone().into_bytes(), "the command")?]
    } else {
        // An empty part of PATH means the working directory.
        let at = |dir: &str| {
            if dir.is_empty() {
                format!("./{program}")
            } else {
                format!("{dir}/{program}")
            }
        };
        // No name is no file of any directory.
        path.split(':')
            .filter(|_| !program.is_empty())
            .map(|dir| c_string(at(dir).into_bytes(), "the command"))
            .collect::<Result<_, _>>()?
    };
    let argv: Vec<CString> = spec
        .argv
        .iter()
        .map(|a| c_string(a.clone().into_bytes(), "the command"))
        .collect::<Result<_, _>>()?;
    let env: Vec<CString> = env
        .into_iter()
        .map(|(name, value)| {
            let what = format!("environment variable `{}`", name.display());
            c_string([name.into_vec(), value.into_vec()].join(&b'='), &what)
        })
        .collect::<Result<_, _>>()?;
    let directory = match &spec.working_dir {
        Some(dir) => Some(c_string(
            dir.clone().into_os_string().into_vec(),
            "the working directory",
        )?),
        None => None,
    };
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        list.iter()
            .map(|s| s.as_ptr())
            .chain([std::ptr::null()])
            .collect()
    };
    let (argv_pointers, env_pointers) = (pointers(&argv), pointers(&env));

    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| format!("cannot open /dev/null: {e}"))?;
    let (failed, report) =
        pipe_with(PipeFlags::CLOEXEC).map_err(|e| format!("cannot start a process (pipe): {e}"))?;
    let guard = rustix::process::getpid();

    let (pid, in_cgroup) = fork(cgroup);
    if pid == 0 {
        let child = Child {
            stdin: inherited.as_ref().map_or(&null, |i| &i.stdin),
            group: inherited.as_ref().map(|i| i.group),
            ignored: spec.transparent.as_ref().map_or(&[], |t| &t.ignored),
            report,
            guard,
            identity: &identity,
            directory: directory.as_deref(),
            candidates: &candidates,
            argv: &argv_pointers,
            env: &env_pointers,
        };
        child.run();
    }
    drop(report);
    let Some(pid) = (pid > 0).then(|| Pid::from_raw(pid)).flatten() else {
        let error = io::Error::last_os_error();
        let hint = match error.raw_os_error() {
            Some(libc::EAGAIN) => {
                "; a limit on processes is reached (ulimit -u, TasksMax, pids.max, kernel.pid_max)"
            }
            Some(libc::ENOMEM) => "; the host is out of memory",
            _ => "",
        };
        return Err(format!("cannot start a process (fork): {error}{hint}").into());
    };

    let mut notes = Vec::new();
    // Ends when the command runs or the child is gone: both close the other end.
    let read = io::Read::read_to_end(&mut std::fs::File::from(failed), &mut notes);
    let mut error = read
        .err()
        .map(|e| format!("cannot learn whether the command started: {e}").into());
    for note in notes.chunks_exact(5) {
        let errno = i32::from_ne_bytes([note[1], note[2], note[3], note[4]]);
        error = Some(Failed {
            error: explain(note[0], errno, spec, &path),
            errno: (note[0] == Stage::Exec as u8).then_some(errno),
        });
    }
    match error {
        None => Ok(Command { pid, in_cgroup }),
        Some(error) => {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            Err(error)
        }
    }
}

/// A child that is born in `cgroup`, or if that cannot be, in ours; the second value says which. As `fork`, the first
/// is 0 in the child and negative if there is none.
///
/// Not by writing to cgroup.procs: moving a process makes the kernel wait for all processors, some 20 ms now and then.
fn fork(cgroup: Option<&Cgroup>) -> (libc::pid_t, bool) {
    if let Some(directory) = cgroup.and_then(|c| std::fs::File::open(c.path()).ok()) {
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
            return (libc::pid_t::try_from(pid).unwrap_or(-1), true);
        }
    }
    // SAFETY: as above.
    (unsafe { libc::fork() }, false)
}

/// All that the child needs, made before the fork.
struct Child<'a> {
    stdin: &'a OwnedFd,
    /// None: a session of its own.
    group: Option<Pid>,
    ignored: &'a [i32],
    report: OwnedFd,
    guard: Pid,
    identity: &'a Identity,
    directory: Option<&'a CStr>,
    candidates: &'a [CString],
    argv: &'a [*const libc::c_char],
    env: &'a [*const libc::c_char],
}

impl Child<'_> {
    /// Becomes the command, or reports why not and exits.
    fn run(self) -> ! {
        let (stage, errno) = self.become_command();
        self.note(stage, errno);
        // SAFETY: leaves without running anything of the guard's, which belongs to the parent.
        unsafe { libc::_exit(127) }
    }

    fn note(&self, stage: Stage, errno: i32) {
        let mut note = [stage as u8; 5];
        note[1..].copy_from_slice(&errno.to_ne_bytes());
        let _ = rustix::io::write(&self.report, &note);
    }

    /// Returns only when a step fails.
    fn become_command(&self) -> (Stage, i32) {
        let placed = match self.group {
            None => rustix::process::setsid().map(drop),
            Some(group) => rustix::process::setpgid(None, Some(group)),
        };
        if let Err(e) = placed {
            return (Stage::Session, e.raw_os_error());
        }
        // stdout and stderr are in place already. dup2 clears CLOEXEC.
        // SAFETY: plain descriptor numbers; 0 is the control socket, which this process must not keep.
        unsafe { libc::dup2(self.stdin.as_raw_fd(), 0) };
        let id = self.identity;
        // SAFETY: each pointer and length comes from a live vector; the calls have no other preconditions.
        unsafe {
            if let Some(groups) = &id.groups
                && libc::setgroups(groups.len(), groups.as_ptr()) < 0
            {
                return (Stage::Groups, errno());
            }
            if let Some(gid) = id.gid
                && libc::setgid(gid) < 0
            {
                return (Stage::Group, errno());
            }
            if let Some(uid) = id.uid
                && libc::setuid(uid) < 0
            {
                return (Stage::User, errno());
            }
        }
        // After setuid, which clears it. The guard has one thread, so this fires when the guard ends and only then.
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        if rustix::process::getppid() != Some(self.guard) {
            // The guard died before that line; nobody is left to tell.
            // SAFETY: see `run`.
            unsafe { libc::_exit(127) }
        }
        if let Some(directory) = self.directory
            && let Err(e) = rustix::process::chdir(directory)
        {
            return (Stage::Directory, e.raw_os_error());
        }
        reset_signals(self.ignored);
        (Stage::Exec, self.exec())
    }

    /// As execvp, with the PATH of the job. Returns the most telling error of all candidates.
    fn exec(&self) -> i32 {
        let mut told = libc::ENOENT;
        for candidate in self.candidates {
            // SAFETY: NUL-terminated strings in NULL-terminated lists, all alive.
            unsafe { libc::execve(candidate.as_ptr(), self.argv.as_ptr(), self.env.as_ptr()) };
            match errno() {
                libc::ENOENT | libc::ENOTDIR | libc::ENODEV | libc::ESTALE | libc::ETIMEDOUT => {}
                // A directory of PATH that this user may not look into says nothing about the command.
                libc::EACCES if self.candidates.len() > 1 && !exists(candidate) => {}
                libc::EACCES => told = libc::EACCES,
                other => return other,
            }
        }
        told
    }
}

/// All signals but these at their default and none blocked, as a program may expect.
fn reset_signals(ignored: &[i32]) {
    for signal in 1..=64 {
        let action = if ignored.contains(&signal) {
            libc::SIG_IGN
        } else {
            libc::SIG_DFL
        };
        // SAFETY: both are valid for all; for SIGKILL, SIGSTOP and libc's own the call is refused.
        unsafe { libc::signal(signal, action) };
    }
    // posix_spawn, which started the guard, ignores these two, and libc's functions leave them alone.
    for signal in [32, 33] {
        let mut action = [0_usize; 8];
        if ignored.contains(&signal) {
            action[0] = libc::SIG_IGN;
        }
        // SAFETY: the kernel's struct is shorter than this on all architectures and begins with the handler; all else of it is
        // empty.
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
    // SAFETY: an all-zero sigset_t is what sigemptyset makes of it; the pointers are valid.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// What went wrong, in words that say what to do.
fn explain(stage: u8, errno: i32, spec: &Spec, path: &str) -> String {
    let error = io::Error::from_raw_os_error(errno);
    let user = spec.user.as_deref().unwrap_or("?");
    let group = spec.group.as_deref().unwrap_or("?");
    let root = if errno == libc::EPERM {
        "; soloist must run as root for this"
    } else {
        ""
    };
    match stage {
        s if s == Stage::Session as u8 => match spec.transparent {
            None => format!("cannot start a session: {error}"),
            Some(_) => format!("cannot join our process group: {error}"),
        },
        s if s == Stage::Groups as u8 => {
            format!("cannot take the groups of user `{user}`: {error}{root}")
        }
        s if s == Stage::Group as u8 => format!("cannot become group `{group}`: {error}{root}"),
        s if s == Stage::User as u8 => format!("cannot become user `{user}`: {error}{root}"),
        s if s == Stage::Directory as u8 => {
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
        _ => explain_exec(errno, &error, spec, path),
    }
}

fn explain_exec(errno: i32, error: &io::Error, spec: &Spec, path: &str) -> String {
    let program = spec.argv.first().map_or("", String::as_str);
    let place = match &spec.working_dir {
        Some(dir) => dir.join(program),
        None => program.into(),
    };
    match errno {
        libc::ENOENT if !program.contains('/') => {
            format!("command `{program}` not found in PATH ({path})")
        }
        libc::ENOENT if place.exists() => {
            format!(
                "command `{program}` exists, but the interpreter named in its first line, or its loader, does not"
            )
        }
        libc::ENOENT => format!("command `{program}` does not exist"),
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

/// Looks up `user` and `group`; a number that is nobody's name is taken as an id.
fn identity(spec: &Spec) -> Result<Identity, String> {
    use nix::unistd::{Gid, Group, Uid, User};

    let mut id = Identity::default();
    let named_group = match &spec.group {
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
    if let Some(name) = &spec.user {
        let failed = |e| format!("cannot look up user `{name}`: {e}");
        let mut found = User::from_name(name).map_err(failed)?;
        if found.is_none()
            && let Ok(uid) = name.parse()
        {
            found = User::from_uid(Uid::from_raw(uid)).map_err(failed)?;
        }
        let user = found.ok_or_else(|| format!("user `{name}` is not known on this host"))?;
        let gid = named_group.unwrap_or(user.gid);
        let c_name = CString::new(user.name.as_str())
            .map_err(|_| format!("user `{name}` is not a valid name"))?;
        let groups = nix::unistd::getgrouplist(&c_name, gid)
            .map_err(|e| format!("cannot look up the groups of user `{name}`: {e}"))?;
        id.gid = Some(gid.as_raw());
        id.uid = Some(user.uid.as_raw());
        id.groups = Some(groups.into_iter().map(Gid::as_raw).collect());
        id.env = vec![
            ("HOME".into(), user.dir.into_os_string()),
            ("SHELL".into(), user.shell.into_os_string()),
            ("USER".into(), user.name.clone().into()),
            ("LOGNAME".into(), user.name.into()),
        ];
    }
    // Already who we shall be: then no privilege is needed, and none must be missed.
    if !rustix::process::geteuid().is_root() {
        if id
            .uid
            .is_none_or(|uid| uid == rustix::process::geteuid().as_raw())
            && id
                .gid
                .is_none_or(|gid| gid == rustix::process::getegid().as_raw())
        {
            (id.uid, id.gid, id.groups) = (None, None, None);
        }
    } else if id.gid.is_some() && id.groups.is_none() {
        id.groups = id.gid.map(|gid| vec![gid]);
    }
    Ok(id)
}

/// The daemon's environment without what is the daemon's alone, then that of the user, then that of the job, then
/// ours: later ones win.
/// A transparent command gets all of it.
fn environment(spec: &Spec, identity: &Identity) -> Vec<(OsString, OsString)> {
    let mut env: std::collections::BTreeMap<OsString, OsString> = std::env::vars_os()
        .filter(|(name, _)| {
            let name = name.to_string_lossy();
            spec.transparent.is_some()
                || !STRIPPED.contains(&name.as_ref()) && !name.starts_with(STRIPPED_PREFIX)
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
