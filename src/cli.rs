//! The command line: subcommands, their help, exit codes, and how errors are printed. Each command has a file of its
//! own.

mod act;
mod check;
mod drain;
mod exec;
mod failure;
pub(crate) mod history;
#[cfg(feature = "http")]
mod http;
mod log;
mod logs;
#[cfg(feature = "notify")]
mod notify;
mod show;
pub(crate) mod status;
mod terminal;
mod top;
mod trigger;
mod upcoming;
pub(crate) mod why;

use std::{
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use clap::{Args, CommandFactory, Parser, Subcommand};
use serde::Serialize;

pub use self::failure::{Exit, Failure};
use crate::{
    acts::{self, Refusal},
    clock::{self, StoreClock},
    config::{self, Config, Job, Sends, StoreUrl, nearest},
    daemon,
    log_queue::{self, To},
    logic::{belief, claim::State},
    model::{JobName, Outcome, is_name},
    startup,
    store::{self, Fleet, Reply, Store},
    text::instant,
    view,
};

const EXIT_CODES: &str = "\
Exit codes:
  0   fine
  64  wrong usage: options, names of jobs and instances
  69  the store cannot be reached, or refuses the request
  70  internal error
  75  not possible now, try again later
  78  the configuration is invalid
  79  `exec`, `trigger --wait`: the lock or lease was lost, and the command was ended
`exec` and `trigger --wait` exit with the code of the command: see their help.";

const GLOBAL: &str = "Global options";

const PLACES: [&str; 2] = ["jobs.toml", "/etc/soloist/jobs.toml"];

/// cron for replicated hosts: every planned instant of every job runs on exactly one of them
#[derive(Debug, Parser)]
#[command(name = "soloist", bin_name = "soloist", version, after_help = EXIT_CODES, max_term_width = 100)]
struct Cli {
    /// Configuration file [default: ./jobs.toml, then /etc/soloist/jobs.toml]
    #[arg(
        long,
        global = true,
        help_heading = GLOBAL,
        value_name = "PATH",
        env = "SOLOIST_CONFIG",
        hide_env_values = true
    )]
    config: Option<PathBuf>,

    /// What to log: a level, or levels by module, as in `info,soloist::store=debug`
    #[arg(
        long,
        global = true,
        help_heading = GLOBAL,
        value_name = "FILTER",
        env = "SOLOIST_LOG",
        hide_env_values = true
    )]
    log: Option<log::Filter>,

    /// How to log to stderr
    #[arg(
        long,
        global = true,
        help_heading = GLOBAL,
        value_enum,
        value_name = "FORMAT",
        default_value = "auto",
        env = "SOLOIST_LOG_FORMAT",
        hide_env_values = true
    )]
    log_format: log::Format,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run jobs in the foreground: SIGTERM and SIGINT drain, SIGHUP reloads the configuration
    Run(Run),
    /// Check the configuration: its jobs and their next occurrences, or every problem found; with advice
    Check(check::Check),
    /// Show upcoming occurrences, and which of them will not run
    Next(upcoming::Next),
    /// Show the fleet: instances, jobs, active runs and next occurrences
    Status(Json),
    /// Watch and control the fleet on a terminal, as the page of the API does
    Top(top::Top),
    /// Show runs, newest first
    History(history::History),
    /// Show the output of a run, from any host
    Logs(logs::Logs),
    /// Explain why an occurrence ran, or why it did not
    Why(why::Why),
    /// Run a job once now, on exactly one instance
    Trigger(trigger::Trigger),
    /// Stop occurrences of a job from starting, on the whole fleet
    Pause(act::Pause),
    /// End a pause
    Resume(act::JobOnly),
    /// Skip the next occurrences of a job, on the whole fleet
    Skip(act::Skip),
    /// Correct a job that counts future occurrences as decided because the store's clock was wrong
    Rewind(act::Rewind),
    /// End the active runs of a job, on all instances
    Cancel(act::JobOnly),
    /// Make an instance claim nothing more and finish its active runs
    Drain(drain::Drain),
    /// Make a drained instance claim again
    Undrain(drain::Drain),
    /// Run any command under a distributed lock, for crontabs and scripts
    Exec(exec::Exec),
    /// Make tokens for the API and the page over HTTP
    #[cfg(feature = "http")]
    Http(http::Http),
    /// Test the channels of notifications, and show undelivered messages
    #[cfg(feature = "notify")]
    Notify(notify::Notify),
}

#[derive(Debug, Args)]
struct Run {
    /// Name of this instance, unique in the fleet [default: host name and a random part]
    #[arg(
        long,
        value_name = "NAME",
        env = "SOLOIST_INSTANCE",
        hide_env_values = true,
        value_parser = instance_name
    )]
    instance: Option<String>,
    /// Skip the first-start wait on a new store; only if no other instance ran within the longest lease. Refused if the
    /// store knows an instance or a job
    #[arg(long)]
    new_fleet: bool,
}

#[derive(Debug, Args)]
struct Json {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn instance_name(text: &str) -> Result<String, String> {
    if !is_name(text) {
        return Err(
            "use letters, digits, `-`, `_` and `.`, at most 100 of them, and not `.` or `..` alone"
                .to_owned(),
        );
    }
    Ok(text.to_owned())
}

impl Command {
    fn json(&self) -> bool {
        match self {
            Self::Run(_) | Self::Exec(_) | Self::Top(_) => false,
            Self::Check(c) => c.json,
            Self::Status(c) => c.json,
            #[cfg(feature = "http")]
            Self::Http(c) => c.json(),
            #[cfg(feature = "notify")]
            Self::Notify(c) => c.json(),
            Self::Next(c) => c.json,
            Self::History(c) => c.json,
            Self::Logs(c) => c.json,
            Self::Why(c) => c.json,
            Self::Trigger(c) => c.json,
            Self::Pause(c) => c.json,
            Self::Resume(c) | Self::Cancel(c) => c.json,
            Self::Skip(c) => c.json,
            Self::Rewind(c) => c.json,
            Self::Drain(c) | Self::Undrain(c) => c.json,
        }
    }
}

/// The whole command line, for completions and the manual.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Call this before Rust's runtime begins: it keeps the environment and signal settings that this process was started
/// with for `main`, and keeps early signals from ending the process.
pub fn before_main() {
    startup::hide();
    exec::signals::before_main();
    startup::hold();
}

/// Reads the arguments, runs the command, and prints an error as one chain of causes and one hint.
pub fn main() -> ExitCode {
    // SIGHUP stays held until the arguments show whether this process is a daemon.
    startup::release_all_but_hangup();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return failure::usage(e).into(),
    };
    let daemon = matches!(cli.command, Command::Run(_));
    if !daemon {
        startup::restore();
    }
    let _last = log_queue::Last;
    if daemon {
        log_queue::by_a_thread();
    }
    log::init(
        cli.log_format,
        cli.log
            .clone()
            .and_then(|filter| filter.0)
            .unwrap_or_else(|| {
                let default = match &cli.command {
                    Command::Run(_) => log::DAEMON,
                    // Log lines would stand in the middle of the screen.
                    Command::Top(_) if io::stderr().is_terminal() => "off",
                    _ => log::COMMAND,
                };
                default.parse().unwrap_or_default()
            }),
        daemon,
    );
    let mut out = Out::new(cli.command.json());
    out.raw |= matches!(&cli.command, Command::Logs(args) if args.raw);
    match dispatch(cli, out) {
        Ok(exit) => exit.into(),
        Err(failure) => failure
            .tell(show::colours(io::stderr().is_terminal()))
            .into(),
    }
}

fn dispatch(cli: Cli, out: Out) -> Result<Exit, Failure> {
    if let Command::Exec(args) = &cli.command {
        return exec::exec(cli.config, args);
    }
    #[cfg(feature = "http")]
    if let Command::Http(args) = &cli.command {
        return http::http(args, &out);
    }
    let path = find(cli.config)?;
    if let Command::Check(args) = &cli.command {
        return check::check(&path, args, clock::wall_us() / 1000, &out);
    }
    let config = config::load(&path, sends(&cli.command)).map_err(Failure::Config)?;
    #[cfg(feature = "notify")]
    if let Command::Notify(args) = &cli.command
        && let Some(args) = args.test()
    {
        return notify::test(args, &config, &out);
    }
    let mut command = cli.command;
    if let Command::Why(args) = &mut command {
        args.read(&config)?;
    }
    match command {
        Command::Next(args) => upcoming::next(&path, &config, &args, clock::wall_us() / 1000, &out),
        Command::Run(args) => {
            startup::share_heap();
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .map_err(|e| Failure::internal("cannot start the runtime", e))?;
            let ended = runtime.block_on(daemon::run(daemon::Options {
                config_path: path,
                config,
                instance: args.instance,
                new_fleet: args.new_fleet,
            }));
            // A thread that reads /proc or kills orphans may hang: do not wait for it.
            runtime.shutdown_background();
            match ended {
                Err(e) if e.is::<daemon::NotNew>() => Err(Failure::TryAgain {
                    message: e.to_string(),
                    hint: Some(daemon::NotNew::HINT.to_owned()),
                }),
                ended => {
                    ended?;
                    Ok(Exit::Ok)
                }
            }
        }
        command => {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|e| Failure::internal("cannot start the runtime", e))?;
            let unplanned = match &command {
                Command::Why(args) if !out.json => args.unplanned(&config, clock::wall_us() / 1000),
                _ => None,
            };
            let ended = runtime.block_on(with_store(command, path, config, out.clone()));
            if let (Err(Failure::Store(..) | Failure::Absent { .. }), Some(why)) =
                (&ended, unplanned)
            {
                // Without the store, too.
                out.text(&why)?;
            }
            ended
        }
    }
}

/// A command that sends nothing needs none of the addresses and keys of `[notify]`, which a user's shell may not have.
fn sends(command: &Command) -> Sends<'_> {
    match command {
        Command::Run(_) => Sends::All,
        #[cfg(feature = "notify")]
        Command::Notify(args) => args.test().map_or(Sends::Nothing, notify::Test::over),
        _ => Sends::Nothing,
    }
}

async fn with_store(
    command: Command,
    path: PathBuf,
    config: Config,
    out: Out,
) -> Result<Exit, Failure> {
    match &config.store.url {
        // A command that only reads must not create the file: the daemon's user might be unable to write to it.
        StoreUrl::Sqlite(file) if !file.exists() => {
            return Err(Failure::Absent {
                message: format!(
                    "there is no store at {}: no instance has run yet",
                    file.display()
                ),
                hint: format!(
                    "`soloist run` creates the store that {} names",
                    path.display()
                ),
            });
        }
        StoreUrl::Memory => {
            return Err(Failure::Absent {
                message: "a `memory:` store exists only inside the one process that runs jobs"
                    .to_owned(),
                hint: format!("set another `[store] url` in {}", path.display()),
            });
        }
        _ => {}
    }
    // Opened inside the runtime, because a pool starts its connections in the background.
    let store = store::open(&config.store).map_err(|e| Failure::Store(e, path.clone()))?;
    let ctx = Context {
        path,
        config,
        store,
        out,
    };
    match command {
        Command::Status(_) => status::status(&ctx).await,
        Command::Top(args) => top::top(&ctx, &args).await,
        Command::History(args) => history::history(&ctx, &args).await,
        Command::Logs(args) => logs::logs(&ctx, &args).await,
        Command::Why(args) => why::why(&ctx, &args).await,
        Command::Trigger(args) => trigger::trigger(&ctx, &args).await,
        Command::Pause(args) => act::pause(&ctx, &args).await,
        Command::Resume(args) => act::resume(&ctx, &args).await,
        Command::Skip(args) => act::skip(&ctx, &args).await,
        Command::Rewind(args) => act::rewind(&ctx, &args).await,
        Command::Cancel(args) => act::cancel(&ctx, &args).await,
        Command::Drain(args) => drain::drain(&ctx, &args, true).await,
        Command::Undrain(args) => drain::drain(&ctx, &args, false).await,
        Command::Run(_) | Command::Check(_) | Command::Next(_) | Command::Exec(_) => Ok(Exit::Ok),
        #[cfg(feature = "http")]
        Command::Http(_) => Ok(Exit::Ok),
        #[cfg(feature = "notify")]
        Command::Notify(_) => notify::undelivered(&ctx).await,
    }
}

/// Asks the store for what a command can do without, for so long at most. None: there is no store yet.
///
/// # Errors
/// Why there is no answer.
fn ask_briefly<T: Send + 'static, F>(
    config: &Config,
    most: Duration,
    ask: impl FnOnce(Arc<dyn Store>) -> F + Send + 'static,
) -> Result<Option<T>, String>
where
    F: Future<Output = Result<T, store::Error>> + Send,
{
    match &config.store.url {
        // Only a daemon creates it.
        StoreUrl::Sqlite(file) if !file.exists() => return Ok(None),
        StoreUrl::Memory => {
            return Err(
                "a `memory:` store exists only inside the one process that runs jobs".into(),
            );
        }
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start the runtime: {e}"))?;
    let settings = config.store.clone();
    let asking = runtime.spawn(async move {
        // Another process may have locked the file.
        let opened = tokio::task::spawn_blocking(move || store::open(&settings)).await;
        let store = opened.map_err(|e| e.to_string())?;
        let store = store.map_err(|e| e.to_string())?;
        ask(store).await.map_err(|e| e.to_string())
    });
    let asked = runtime.block_on(async { tokio::time::timeout(most, asking).await });
    runtime.shutdown_background();
    let late = |_| {
        format!(
            "the store does not answer within {}",
            show::span(millis(most))
        )
    };
    asked.map_err(late)?.map_err(|e| e.to_string())?.map(Some)
}

/// The configuration file that the user named, or the first default that exists.
fn find(named: Option<PathBuf>) -> Result<PathBuf, Failure> {
    if let Some(path) = named {
        return Ok(path);
    }
    PLACES
        .iter()
        .map(Path::new)
        // A link to nothing is meant, too: the error names what is missing.
        .find(|p| p.symlink_metadata().is_ok())
        .map(Into::into)
        .ok_or_else(|| Failure::Missing {
            message: format!(
                "there is no configuration file: neither {} nor {} exists",
                PLACES[0], PLACES[1]
            ),
            hint: "name it with `--config PATH` or SOLOIST_CONFIG".to_owned(),
        })
}

/// Writes to stdout: only data goes there.
#[derive(Debug, Clone)]
struct Out {
    json: bool,
    color: bool,
    /// The output of jobs is written unchanged: stdout is a file or a pipe, or the user asked for it.
    raw: bool,
}

impl Out {
    fn new(json: bool) -> Self {
        let terminal = io::stdout().is_terminal();
        Self {
            json,
            color: show::colours(terminal),
            raw: !terminal,
        }
    }

    fn bytes(&self, data: &[u8]) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        stdout
            .write_all(data)
            .and_then(|()| stdout.flush())
            .map_err(Failure::Output)
    }

    /// Writes text that may have colours; all other control sequences are escaped.
    fn text(&self, text: &str) -> Result<(), Failure> {
        let text = crate::text::coloured(text);
        if self.color {
            self.bytes(text.as_bytes())
        } else {
            self.bytes(anstream::adapter::strip_str(&text).to_string().as_bytes())
        }
    }

    fn object<T: Serialize>(&self, value: &T) -> Result<(), Failure> {
        self.document(serde_json::to_string_pretty(value))
    }

    /// Writes one line of JSON.
    fn line<T: Serialize>(&self, value: &T) -> Result<(), Failure> {
        self.document(serde_json::to_string(value))
    }

    fn document(&self, text: serde_json::Result<String>) -> Result<(), Failure> {
        let text = text.map_err(|e| Failure::internal("cannot write JSON", e))?;
        self.bytes((crate::text::json(&text) + "\n").as_bytes())
    }

    /// Writes the object with --json, else the text.
    fn say<T: Serialize>(&self, value: &T, text: impl FnOnce() -> String) -> Result<(), Failure> {
        if self.json {
            self.object(value)
        } else {
            self.text(&text())
        }
    }
}

/// Prints a remark for the user on stderr, so that stdout has only data.
fn remark(text: &str) {
    let text = format!("soloist: {}\n", show::line(text));
    log_queue::write(To::Stderr, text.into_bytes());
}

/// What the commands that use the store need.
struct Context {
    path: PathBuf,
    config: Config,
    store: Arc<dyn Store>,
    out: Out,
}

impl Context {
    /// Asks the store, and repeats the request after transport errors as `[store] retry` says. Each request must be
    /// safe to repeat.
    async fn ask<T>(&self, f: impl AsyncFn() -> Result<T, store::Error>) -> Result<T, Failure> {
        let retry = &self.config.store.retry;
        for failures in 1..=retry.attempts {
            match f().await {
                Err(e) if e.is_transient() => tracing::debug!(error = %e, "asking again"),
                other => return other.map_err(|e| self.store_failed(e)),
            }
            tokio::time::sleep(retry.pause(failures, fastrand::f64())).await;
        }
        f().await.map_err(|e| self.store_failed(e))
    }

    fn asker(&self) -> acts::Asker<'_> {
        acts::Asker {
            store: &*self.store,
            retry: &self.config.store.retry,
        }
    }

    fn refused(&self, r: Refusal) -> Failure {
        match r {
            Refusal::Store(e) => self.store_failed(e),
            other => other.into(),
        }
    }

    fn store_failed(&self, e: store::Error) -> Failure {
        Failure::Store(e, self.path.clone())
    }

    /// The store's problems. None without an answer: the command shows the rest all the same.
    async fn problems(&self) -> Vec<String> {
        let problems = self.store.check().await.unwrap_or_default();
        problems.into_iter().map(|p| p.text).collect()
    }

    /// The state of one job, with the store's clock.
    async fn state(&self, job: &JobName) -> Result<Reply<Option<State>>, Failure> {
        let reply = self
            .ask(async || self.store.observe(std::slice::from_ref(job)).await)
            .await?;
        Ok(reply.map(|mut states| states.pop().flatten()))
    }

    /// The fleet, and the time that it uses. If instances do not believe the store's clock, later requests of this
    /// process carry the time that the instances use.
    async fn fleet(&self) -> Result<(Fleet, view::Clock), Failure> {
        let reply = self.ask(async || self.store.heartbeat(None).await).await?;
        let clock = view::Clock::of(&reply.value, reply.now_us.div_euclid(1000));
        if let Some(ahead) = clock.doubt_ms {
            let believed = StoreClock::default();
            let now_us = reply.now_us.saturating_sub(ahead.saturating_mul(1000));
            let _ = believed.sample(now_us, reply.sent, reply.received);
            self.store.believe(Arc::new(believed));
        }
        Ok((reply.value, clock))
    }

    /// How far the store's clock is ahead of this host's (ms), if it differs by more than synchronised clocks do.
    fn apart(&self, clock: view::Clock) -> Option<i64> {
        let ahead = clock.now.saturating_sub(clock::wall_us() / 1000);
        (ahead.unsigned_abs() > belief::NEAR.as_millis() as u64).then_some(ahead)
    }

    /// Warns if a clock is wrong, because then `--until` may not mean what the user expects.
    fn doubted(&self, clock: view::Clock) {
        let said = match (clock.doubt_ms, self.apart(clock)) {
            (Some(ahead), _) => format!(
                "the store's clock is {}, and instances do not believe it: --until counts by the time that they use \
                instead; correct the clock of the store's host",
                show::apart(ahead)
            ),
            (None, Some(ahead)) => format!(
                "the store's clock is {}, compared with this host's: --until is read by the store's clock; correct \
                the wrong clock, and repeat the command",
                show::apart(ahead)
            ),
            (None, None) => return,
        };
        remark(&said);
    }

    /// A job of the configuration.
    fn job(&self, name: &str) -> Result<&Job, Failure> {
        job(&self.config, &self.path, name)
    }

    /// A job of the configuration, or one that only the store still has.
    async fn known_job(&self, name: &str) -> Result<(JobName, Option<&Job>), Failure> {
        let configured = self.job(name);
        if let Ok(job) = configured {
            return Ok((job.name.clone(), Some(job)));
        }
        let name = JobName::new(name);
        match self.state(&name).await?.value {
            Some(_) => Ok((name, None)),
            None => configured.map(|job| (name, Some(job))),
        }
    }
}

/// # Errors
/// Has the nearest name as its hint.
fn job<'c>(config: &'c Config, path: &Path, name: &str) -> Result<&'c Job, Failure> {
    config
        .jobs
        .get(&JobName::new(name))
        .map(|j| &**j)
        .ok_or_else(|| {
            let names = || config.jobs.keys().map(JobName::as_str);
            let hint = match nearest(name, names()) {
                Some(near) => format!("did you mean `{near}`?"),
                None if config.jobs.is_empty() => "it has no jobs".to_owned(),
                None if config.jobs.len() <= 20 => {
                    format!("its jobs are {}", names().collect::<Vec<_>>().join(", "))
                }
                None => "`soloist check` lists its jobs".to_owned(),
            };
            Failure::usage(
                format!("no job `{}` in {}", show::line(name), path.display()),
                hint,
            )
        })
}

/// Parses the name of an outcome; the error lists the names.
fn outcome(text: &str) -> Result<Outcome, String> {
    text.parse()
}

fn millis(d: Duration) -> i64 {
    i64::try_from(d.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
        // clap wraps a line that is too long; lines that were broken by hand would be broken twice.
        for c in command().get_subcommands() {
            let text = c
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let twice = lines
                .windows(2)
                .find(|w| w[0].len() > 100 && !w[1].is_empty());
            assert_eq!(twice, None, "{}", c.get_name());
        }
    }

    #[test]
    fn instants_are_rfc3339_or_milliseconds() {
        assert_eq!(instant("2026-11-21T12:00:00+08:00"), Ok(1_795_233_600_000));
        assert_eq!(instant("1795233600000"), Ok(1_795_233_600_000));
        // Before it, so that what comes after it is not lost.
        assert_eq!(instant("1969-12-31T23:59:59.9999Z"), Ok(-1));
        for bad in [
            "",
            "noon",
            "2026-11-21",
            "2026-11-21T12:00:00",
            "9223372036854775807",
        ] {
            assert!(instant(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn instance_names_are_plain() {
        assert!(instance_name("web-1.example_2").is_ok());
        assert!(instance_name("...").is_ok());
        for bad in ["", "a b", "a/b", "ä", ".", "..", &"x".repeat(101)] {
            assert!(instance_name(bad).is_err(), "{bad}");
        }
    }
}
