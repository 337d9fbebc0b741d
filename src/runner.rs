//! The daemon's side of a run: starts its guard, talks to it, collects the output, and ends the process tree itself if
//! the guard is killed. The guard itself is in [`crate::guard`].
//!
//! At the end of a run the holder waits until the tree is gone ([`Running::wait`]), settles in the store, and then
//! calls [`Running::settled`].

mod children;
mod orphans;
mod output;
#[cfg(test)]
mod simulated;
mod supervisor;
mod zygote;

use std::{
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot, watch},
};

#[cfg(test)]
pub(crate) use self::simulated::{Behaviour, Guards, Seen};
use self::{children::OwnChild, supervisor::Supervisor, zygote::Keeper};
pub use self::{
    children::{childless, reap_strangers},
    output::{LOG_TARGET, LONGEST_LOG_LINE, Piece, Tail},
};
use crate::{
    clock::Boottime,
    config::Output,
    guard::{self, Control, HandOver, Moment, Proc, Spec},
    last_will::LastWill,
    logic::guard_life::{Cause, Overdue, Stop},
    model::{JobName, Marks, Outcome, RunId, Usage},
};

/// How long the runner reads the pipe of a command that is no run of a job, after its end.
#[cfg(feature = "notify")]
const DRAIN: Duration = Duration::from_millis(500);

/// Runs a command that is no run of a job: without a guard, with `input` as its stdin. After its end, at the latest
/// after `limit`, it is killed with all that it started. Returns how it ended (None: it was killed), and the end of
/// what it wrote to stderr, at most [`SAID_MOST`] bytes.
///
/// What it started is known as that of a killed guard is: see [`Orphans`]. For that, this process becomes a subreaper.
///
/// # Errors
/// It cannot be started.
#[cfg(feature = "notify")]
pub(crate) async fn plain(
    mut command: std::process::Command,
    input: &[u8],
    limit: Duration,
) -> io::Result<(Option<std::process::ExitStatus>, Vec<u8>)> {
    let stdin = rustix::fs::memfd_create("message", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut stdin = std::fs::File::from(stdin);
    stdin.write_all(input)?;
    io::Seek::rewind(&mut stdin)?;
    command
        .stdin(stdin)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0);
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let mark = RunId::random().to_string();
    command.env(COMMAND_ID, &mark);
    let mut child = OwnChild::spawn(command)?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let (_, mut stderr) = child.take_output();
    let mut said = Vec::new();
    let ending = async {
        let waiting = child.wait();
        tokio::pin!(waiting);
        tokio::select! {
            status = &mut waiting => status,
            () = end_of(&mut stderr, &mut said) => waiting.await,
        }
    };
    let ended = tokio::time::timeout(limit, ending).await;
    // Kill now: detached children are traceable only through a live parent.
    let orphans = orphans::Orphans::of_command(format!("{COMMAND_ID}={mark}"), pid);
    crate::blocking::run(move || orphans.kill(guard::PATIENCE)).await;
    // What it wrote right before its end. A process that left the group may keep the pipe open.
    let _ = tokio::time::timeout(DRAIN, end_of(&mut stderr, &mut said)).await;
    match ended {
        Ok(status) => Ok((Some(status?), said)),
        Err(_) => Ok((None, said)),
    }
}

/// The variable by which [`plain`] knows what a command started.
#[cfg(feature = "notify")]
const COMMAND_ID: &str = "SOLOIST_COMMAND_ID";

/// See [`plain`].
#[cfg(feature = "notify")]
const SAID_MOST: usize = 4096;

/// Reads to the end, and keeps the last [`SAID_MOST`] bytes. The caller may drop the future at any time.
#[cfg(feature = "notify")]
async fn end_of(stderr: &mut Option<tokio::process::ChildStderr>, said: &mut Vec<u8>) {
    use tokio::io::AsyncReadExt as _;
    let Some(stderr) = stderr else {
        return;
    };
    let mut piece = [0; 1024];
    while let Ok(n @ 1..) = stderr.read(&mut piece).await {
        said.extend_from_slice(piece.get(..n).unwrap_or_default());
        let excess = said.len().saturating_sub(SAID_MOST);
        said.drain(..excess);
    }
}

/// Starts commands under guards. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Runner {
    exe: Arc<PathBuf>,
    /// Variables of this process that guards and commands do not get.
    hidden: Arc<[String]>,
    /// What guards are forked from.
    zygote: Arc<Mutex<Keeper>>,
    /// Where starts and ends of commands are written down.
    /// What the zygote executes if this process is killed.
    last_will: Option<Arc<LastWill>>,
    /// See [`Runner::for_one_run`].
    sole: bool,
}

/// The guard could not be started: the run failed before it began.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the guard of `{job}` ({}): {source}{}", exe.display(), guard::hint(source))]
pub struct StartError {
    job: JobName,
    exe: PathBuf,
    source: io::Error,
}

/// What connects this process with a guard: this end, and the guard's.
fn socket() -> io::Result<(StdUnixStream, StdUnixStream)> {
    let (ours, theirs) = StdUnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((ours, theirs))
}

impl Runner {
    /// Starts guards from this binary. Makes this process a subreaper, so that it becomes the parent of processes that
    /// killed guards leave behind.
    ///
    /// # Errors
    /// The kernel refuses to make this process a subreaper.
    pub fn new() -> io::Result<Self> {
        Self::with_exe("/proc/self/exe".into())
    }

    /// Like [`Runner::new`], with guards from another binary: tests are not the soloist binary themselves.
    ///
    /// # Errors
    /// As [`Runner::new`].
    pub fn with_exe(exe: PathBuf) -> io::Result<Self> {
        // Any pid means true.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        Ok(Self {
            exe: Arc::new(exe),
            hidden: Arc::default(),
            zygote: Arc::default(),
            last_will: None,
            sole: false,
        })
    }

    /// The process id of the zygote, once it is ready.
    pub fn zygote_pid(&self) -> Option<u32> {
        self.zygote.lock().ready()?.pid()
    }

    /// One that makes no process: for simulated hosts.
    #[cfg(test)]
    pub(crate) fn simulated() -> Self {
        Self {
            exe: Arc::default(),
            hidden: Arc::default(),
            zygote: Arc::default(),
            last_will: None,
            sole: false,
        }
    }

    /// Hides these variables of this process, which have secrets of the store, from guards and commands.
    pub fn hiding(self, variables: Arc<[String]>) -> Self {
        Self {
            hidden: variables,
            // It has the variables with which it was started.
            zygote: Arc::default(),
            ..self
        }
    }

    /// Has its zygote execute this will if this process is killed. Call it before the zygote is started.
    pub fn leaving(self, last_will: Option<Arc<LastWill>>) -> Self {
        Self { last_will, ..self }
    }

    /// The will, if there is one.
    pub fn last_will(&self) -> Option<&Arc<LastWill>> {
        self.last_will.as_ref()
    }

    /// For a program that starts one run and no other process: all that become children of it are of that run. Only if
    /// `childless`, which is what [`childless`] said before the runner was made.
    pub fn for_one_run(self, childless: bool) -> Self {
        // The first process of a container becomes the parent of what others leave behind.
        let sole = childless && std::process::id() != 1;
        Self { sole, ..self }
    }

    /// The command that starts this binary, as a guard or as `__settle`.
    fn command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(&*self.exe);
        command.arg0("soloist");
        let of_store = std::env::vars_os().map(|(name, _)| name);
        let of_store = of_store.filter(|name| guard::is_of_store(name));
        for name in of_store.chain(self.hidden.iter().map(Into::into)) {
            command.env_remove(name);
        }
        command
    }

    /// Prepares a guard: it is started, and waits until it is told what to run. It ends if the result is dropped.
    /// Needs a Tokio runtime, and blocks its thread for a fraction of a millisecond, whatever the size of this process.
    ///
    /// # Errors
    /// No descriptor, process or memory is left for a guard.
    pub fn prepare(&self, job: &JobName, run: RunId) -> Result<Prepared, StartError> {
        self.launch(job, run, false)
            .map_err(|source| self.failed(job, source))
    }

    /// Starts the guard of `spec`, which starts the command; [`Running::started`] waits for that. Like
    /// [`Runner::prepare`], needs a Tokio runtime and blocks its thread.
    ///
    /// # Errors
    /// No descriptor, process or memory is left for a guard. Later errors are part of [`RunEnd`].
    pub fn start(&self, spec: Spec, output: Output) -> Result<Running, StartError> {
        self.start_prepared(spec, output, None)
    }

    /// Like [`Runner::start`], with the guard that was prepared for this run, if there is one.
    ///
    /// # Errors
    /// As [`Runner::start`].
    pub fn start_prepared(
        &self,
        spec: Spec,
        output: Output,
        prepared: Option<Prepared>,
    ) -> Result<Running, StartError> {
        let job = spec.job.clone();
        self.spawn(spec, output, prepared)
            .map_err(|source| self.failed(&job, source))
    }

    fn failed(&self, job: &JobName, source: io::Error) -> StartError {
        StartError {
            job: job.clone(),
            exe: self.exe.to_path_buf(),
            source,
        }
    }

    fn launch(&self, job: &JobName, run: RunId, transparent: bool) -> io::Result<Prepared> {
        if !transparent && let Some(forked) = self.fork(job, run)? {
            return Ok(forked);
        }
        let (ours, theirs) = socket()?;
        // Use nothing here that makes std fork instead of posix_spawn: a fork copies the page tables of the whole
        // daemon. The guard sets user, session and so on.
        let mut command = self.command();
        command
            .args([guard::ARGUMENT, job.as_str(), &run.to_string()])
            .arg(guard::of_this_process())
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // Not closed on exec, so that the guard has it under this number. This process closes its copy after the guard
        // has started.
        let mut stdin = None;
        if transparent {
            let ours = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?;
            rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::empty())?;
            command
                .arg(ours.as_raw_fd().to_string())
                .stdout(Stdio::inherit())
                .stderr(Stdio::inherit());
            stdin = Some(ours);
        }
        let child = OwnChild::spawn(command)?;
        drop(stdin);
        Ok(Prepared {
            child,
            socket: ours,
        })
    }

    /// Starts the zygote, from which guards are forked once it is ready, if there is none. Needs a Tokio runtime; does
    /// not wait.
    pub fn start_zygote(&self) {
        let will = self.last_will();
        self.zygote.lock().start(|| self.command(), will);
    }

    /// The zygote's pid, if somebody keeps it stopped or frozen. Blocks.
    pub fn helpless_zygote(&self) -> Option<u32> {
        self.zygote_pid()
            .filter(|pid| guard::helpless_again(pid.cast_signed()))
    }

    /// As [`Runner::start_zygote`], and replaces a zygote that was helpless at this look and the one before.
    pub fn keep_zygote(&self, helpless: Option<u32>) {
        let will = self.last_will();
        (self.zygote.lock()).keep(helpless, || self.command(), will);
    }

    /// Has a guard forked by the zygote. None: that is not possible now, so a guard is to be executed. The zygote may
    /// have been killed, stopped or frozen: then a later start finds another one.
    fn fork(&self, job: &JobName, run: RunId) -> io::Result<Option<Prepared>> {
        let (run, of) = (run.to_string(), guard::of_this_process());
        let words = ["soloist", guard::ARGUMENT, job.as_str(), &run, &of];
        let mut zygote = self.zygote.lock();
        zygote.start(|| self.command(), self.last_will());
        let Some(asked) = zygote.ready() else {
            return Ok(None);
        };
        // Of its own, and not that of a guard which is executed in its place: a zygote that does not answer may have
        // forked all the same, and two guards must not read the same messages. The one that nobody knows sees this
        // socket closed, and ends.
        let (socket, theirs) = socket()?;
        match asked.fork(&words, theirs.as_fd()) {
            Ok(child) => Ok(Some(Prepared { child, socket })),
            Err(zygote::Failed::Guard(error)) => Err(error),
            Err(zygote::Failed::Zygote) => {
                zygote.give_up();
                Ok(None)
            }
        }
    }

    /// From here on the guard is the one who knows whether the command was executed.
    fn strike_out(&self, run: RunId) -> io::Result<()> {
        (self.last_will.as_ref()).map_or(Ok(()), |will| will.strike_out(run))
    }

    fn spawn(&self, spec: Spec, output: Output, prepared: Option<Prepared>) -> io::Result<Running> {
        #[cfg(test)]
        if crate::simulation::simulated() {
            self.strike_out(spec.run_id)?;
        }
        #[cfg(test)]
        if let Some(running) = simulated::start(&spec, output.keep) {
            return Ok(running);
        }
        let mut first_line = serde_json::to_vec(&spec)?;
        first_line.push(b'\n');
        let launch = || self.launch(&spec.job, spec.run_id, spec.transparent.is_some());
        let mut prepared = prepared.map_or_else(launch, Ok)?;
        self.strike_out(spec.run_id)?;
        let written = match prepared.tell(&first_line) {
            Ok(written) => written,
            // If somebody killed the waiting guard, nothing was started yet, and a new guard replaces it.
            Err(_) => {
                prepared = launch()?;
                prepared.tell(&first_line)?
            }
        };
        // The supervisor sends the rest later.
        first_line.drain(..written);
        let Prepared { mut child, socket } = prepared;
        let ours = UnixStream::from_std(socket)?;

        let tail = Arc::new(Tail::new(output.keep));
        let mut drains = tokio::task::JoinSet::new();
        let (stdout, stderr) = child.take_output();
        let (kept, job, run) = (tail.clone(), spec.job.clone(), spec.run_id.to_string());
        drains.spawn(async move {
            output::drain(stdout, stderr, &kept, output.log, job.as_str(), &run).await;
        });
        let (orders, order_queue) = mpsc::unbounded_channel();
        let (state, state_seen) = watch::channel(State::default());
        let guard_pid = child.id();
        let supervisor = Supervisor {
            job: spec.job,
            run_id: spec.run_id,
            success_codes: spec.success_codes,
            transparent: spec.transparent.is_some(),
            child,
            drains,
            tail: tail.clone(),
            state,
            pending: first_line,
            overdue: Overdue::new(
                Boottime::now(),
                spec.deadline,
                spec.timeout,
                spec.grace,
                spec.kill_budget,
            ),
            kill_budget: spec.kill_budget,
            sole: self.sole,
            killed_guard: None,
        };
        tokio::spawn(supervisor.run(ours, order_queue));
        Ok(Running {
            orders,
            state: state_seen,
            tail,
            guard_pid,
        })
    }

    /// Starts a process that keeps trying to record an outcome after this process has ended: for runs without a guard
    /// that could do so.
    ///
    /// # Errors
    /// No descriptor, process or memory is left for it.
    pub fn hand_over(&self, hand_over: &HandOver) -> io::Result<()> {
        #[cfg(test)]
        if simulated::hand_over(hand_over) {
            return Ok(());
        }
        self.command()
            .arg(guard::SETTLE_ARGUMENT)
            .stdin(hand_over.to_file()?)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map(drop)
    }

    /// Ends the runs of other daemons that were killed together with their guards, and returns how many such runs there
    /// were. It finds only trees in a cgroup below that of this process. Blocks; costs almost nothing while every run
    /// has its guard.
    pub fn sweep() -> usize {
        guard::sweep()
    }

    /// Ends the runs of guards of this user that somebody keeps stopped or frozen and whose daemon (or `soloist exec`)
    /// is dead. Returns how many it has ended. Blocks, and looks at each process of the host.
    pub fn end_helpless() -> usize {
        guard::end_helpless()
    }
}

/// A prepared guard, which waits until it is told what to run; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "it ends when dropped"]
pub struct Prepared {
    child: OwnChild,
    socket: StdUnixStream,
}

impl Prepared {
    /// The guard's process id.
    pub fn guard_pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Returns how many bytes the socket accepted.
    fn tell(&mut self, line: &[u8]) -> io::Result<usize> {
        // The kernel may close the socket of a guard that was killed a while after its end.
        if self.child.ended() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        (&self.socket).write(line)
    }
}

/// How a run ended. Its process tree is gone.
#[derive(Debug, Clone)]
pub struct RunEnd {
    pub outcome: Outcome,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    /// Why soloist ended it; None: it ended by itself, or could not start.
    pub cause: Option<Cause>,
    /// Why it failed, for people, if code and signal do not say so.
    pub error: Option<String>,
    /// The kernel's error for the exec; None also if the start did not get that far.
    pub errno: Option<i32>,
    /// When its start began; None: the command could not start.
    pub started: Option<Moment>,
    /// When the last process of its tree was gone: that is the end of the run.
    pub ended: Moment,
    /// The last bytes of stdout and stderr, at most [`Output::keep`].
    pub output_tail: Vec<u8>,
    /// How many bytes the run wrote.
    pub output_bytes: u64,
    /// Which bytes came from stderr.
    pub stderr: Marks,
    /// What it took, but for its output.
    pub usage: Usage,
}

impl RunEnd {
    /// For [`crate::model::RunRecord::output_tail`].
    pub fn output_text(&self) -> String {
        String::from_utf8_lossy(&self.output_tail).into_owned()
    }

    /// For [`crate::model::RunRecord::output_truncated`].
    pub fn output_truncated(&self) -> bool {
        self.output_bytes > self.output_tail.len() as u64
    }
}

#[derive(Debug, Default)]
struct State {
    started: Option<Moment>,
    end: Option<RunEnd>,
    /// Counts how often the command was stopped, with its process id and the last signal that did it.
    stopped: (u64, i32, i32),
}

/// Waits for events of one run; see [`Running::watch`].
#[derive(Debug)]
pub struct RunEvents(watch::Receiver<State>, u64);

impl RunEvents {
    /// As [`Running::started`].
    pub async fn started(&mut self) -> Option<Moment> {
        match self
            .0
            .wait_for(|s| s.started.is_some() || s.end.is_some())
            .await
        {
            Ok(state) => state.started,
            Err(_) => None,
        }
    }

    /// Waits for the next stop of the command, and returns its signal. Skips a stop if the command was continued
    /// meanwhile. Never returns after the end of the run.
    ///
    /// # Cancel safety
    /// Dropping the future loses no stop: the next call returns it.
    pub async fn stopped(&mut self) -> i32 {
        loop {
            let seen = self.1;
            let Ok((count, pid, signal)) = self
                .0
                .wait_for(|s| s.stopped.0 > seen)
                .await
                .map(|s| s.stopped)
            else {
                return std::future::pending().await;
            };
            self.1 = count;
            if Proc::read(pid).is_some_and(|p| p.stopped()) {
                return signal;
            }
        }
    }
}

#[derive(Debug)]
enum Order {
    Tell(Control),
    /// Tells the guard that the run is settled, and answers when the message is sent.
    Settled(oneshot::Sender<()>),
}

/// A run whose guard was started.
///
/// Dropping it before [`Running::settled`] has the same effect as the death of the daemon: the guard ends the command
/// and settles.
#[derive(Debug)]
#[must_use = "dropping it ends the command and leaves the settling to the guard"]
pub struct Running {
    orders: mpsc::UnboundedSender<Order>,
    state: watch::Receiver<State>,
    tail: Arc<Tail>,
    guard_pid: Option<u32>,
}

impl Running {
    /// Tells the guard that the holder trusts the lease until `deadline`. Never waits. Has no effect if the previous
    /// deadline has passed.
    pub fn extend(&self, deadline: Boottime) {
        let _ = self.orders.send(Order::Tell(Control::Deadline(deadline)));
    }

    /// Ends the command: SIGTERM, and after `grace` (None: the job's) SIGKILL. Never waits. A second, shorter
    /// grace shortens the first.
    pub fn stop(&self, reason: Stop, grace: Option<Duration>) {
        let _ = self
            .orders
            .send(Order::Tell(Control::Stop { reason, grace }));
    }

    /// Sends a signal to the command itself. Never waits; a signal that comes before the start is delivered after it.
    pub fn signal(&self, signal: i32) {
        let _ = self.orders.send(Order::Tell(Control::Signal(signal)));
    }

    /// Reports the start of the command and, if it is transparent, its stops (SIGSTOP, SIGTSTP, ...).
    pub fn watch(&self) -> RunEvents {
        RunEvents(self.state.clone(), 0)
    }

    /// Waits for the start of the command, and returns its time. None: it could not start; [`Running::wait`] says why.
    ///
    /// # Cancel safety
    /// The caller may drop the future at any time, and call again.
    pub async fn started(&self) -> Option<Moment> {
        self.watch().started().await
    }

    /// Waits until every process of the run is gone, and returns how the run ended. Later calls return the same.
    ///
    /// # Cancel safety
    /// The caller may drop the future at any time, and call again.
    pub async fn wait(&mut self) -> RunEnd {
        if let Ok(state) = self.state.wait_for(|s| s.end.is_some()).await
            && let Some(end) = &state.end
        {
            return end.clone();
        }
        // This happens only if the runtime shuts down: the guard notices that its socket closes, and takes over.
        std::future::pending().await
    }

    /// The output so far. It stays readable after the end.
    pub fn output(&self) -> Arc<Tail> {
        self.tail.clone()
    }

    /// The guard's process id.
    pub fn guard_pid(&self) -> Option<u32> {
        self.guard_pid
    }

    /// Call it once the outcome is recorded, or need not be recorded because the lease was lost: the guard then ends
    /// without settling. Returns when the message to the guard is sent.
    ///
    /// # Cancel safety
    /// After its first poll, dropping the future changes nothing: the guard gets the message. Before that, it has the
    /// same effect as dropping the [`Running`].
    pub async fn settled(self) {
        let (told, wait) = oneshot::channel();
        if self.orders.send(Order::Settled(told)).is_ok() {
            let _ = wait.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In another process, whose children are all of the command.
    #[cfg(feature = "notify")]
    #[tokio::test]
    async fn a_plain_command_has_its_input_and_ends_with_all_that_it_started() {
        let name = "a_plain_command_has_its_input_and_ends_with_all_that_it_started";
        if guard::tests::ran_elsewhere(&format!("runner::tests::{name}")) {
            return;
        }
        let run = async |script: &str, input: &[u8], limit| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", script]);
            let (status, said) = plain(command, input, limit).await.expect("it starts");
            let said = String::from_utf8(said).expect("text");
            (status.map(|status| status.code()), said)
        };
        let hour = Duration::from_secs(3600);
        let (code, said) = run("read x; echo \"got $x\" >&2; exit 3", b"it\n", hour).await;
        assert_eq!((code, &*said), (Some(Some(3)), "got it\n"));
        let (code, said) = run("seq 9999 >&2", b"", hour).await;
        assert_eq!((code, said.len()), (Some(Some(0)), SAID_MOST));
        assert!(said.ends_with("9998\n9999\n"));
        let (code, said) = run("sleep 100 2> /dev/null & echo $! >&2", b"", hour).await;
        assert_eq!(code, Some(Some(0)));
        let left = said.trim().parse().expect("a pid");
        assert!(!Proc::read(left).is_some_and(|p| p.alive()));
        let (code, _) = run("exec sleep 100", b"", Duration::from_millis(50)).await;
        assert_eq!(code, None);
    }
}
