//! `top`: the fleet on a terminal, kept up to date, with what can be done about it. It asks the store itself, so that
//! it needs no HTTP. Here are its effects; what is shown, and what keys mean, is in `state` and `draw`.

mod draw;
mod keys;
mod screen;
mod state;
mod watch;

use std::io::{self, IsTerminal as _, Read as _};

use clap::Args;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch as watching},
    time::{Duration, Instant, sleep_until},
};

use self::{
    keys::Key,
    screen::Held,
    state::{Act, State},
    watch::Wanted,
};
use super::{Context, Exit, Failure, show, terminal};
use crate::{
    acts,
    clock::{self, Boottime},
    failpoint,
    logic::claim::{Control, Controlled},
};

/// What has changed in the store is drawn at most so often; the time goes on once a second.
const AT_MOST: Duration = Duration::from_millis(250);
const AT_LEAST: Duration = Duration::from_secs(1);
/// Keys that come together are drawn together.
const AFTER_KEY: Duration = Duration::from_millis(10);

#[derive(Debug, Args)]
#[command(after_help = "\
Keys: 1 overview, 2 timeline, 3 instances, Enter a job with its history and output; t trigger, p pause, r resume, \
s skip, c cancel, d drain, u undrain, each after a question; / finds, ? lists all keys, q quits.

It uses no colours with NO_COLOR, and only ASCII without UTF-8 in LC_ALL, LC_CTYPE or LANG. Times are local: TZ.")]
pub(super) struct Top {
    /// Begin with this job
    job: Option<String>,
}

/// How the person, or whoever sent a signal, ended it.
enum End {
    Quit,
    Signal(i32),
}

pub(super) async fn top(ctx: &Context, args: &Top) -> Result<Exit, Failure> {
    let terminals = io::stdin().is_terminal() && io::stdout().is_terminal();
    if !terminals || std::env::var_os("TERM").is_none_or(|t| t.is_empty() || t == "dumb") {
        return Err(Failure::usage(
            "`top` needs a terminal that can move its cursor, for input and output",
            "`soloist status` prints the same for a pipe or a file; on a terminal, set TERM",
        ));
    }
    let mut state = State::new(
        &ctx.config,
        ctx.store.address(),
        local_ms(),
        clock::wall_us() / 1000,
    );
    state.unicode = terminal::unicode(|name| std::env::var(name).ok());
    state.colours = show::colours(true);
    state.zone = jiff::tz::TimeZone::system();
    if let Some(name) = &args.job {
        state.selected = Some(ctx.job(name)?.name.clone());
        let _ = state.key(Key::Enter);
    }
    let (news, come) = mpsc::unbounded_channel();
    let (want, wanted) = watching::channel(Wanted::default());
    let signals = Signals::new().map_err(|e| Failure::internal("cannot handle signals", e))?;
    let held = Held::take().map_err(|e| Failure::internal("cannot set up the terminal", e))?;
    let ended = tokio::select! {
        ended = interact(ctx, &mut state, signals, come, want) => ended,
        () = watch::fleet(ctx, &news) => Ok(End::Quit),
        () = watch::jobs(ctx, &news, wanted.clone()) => Ok(End::Quit),
        () = watch::job(ctx, &news, wanted) => Ok(End::Quit),
    };
    drop(held);
    match ended.map_err(Failure::Output)? {
        End::Quit => Ok(Exit::Ok),
        End::Signal(signal) => Ok(Exit::Command(128 + signal as u8)),
    }
}

fn local_ms() -> i64 {
    (Boottime::now().0 / 1_000_000) as i64
}

/// The signals that end, suspend or change it.
struct Signals {
    term: Signal,
    hup: Signal,
    int: Signal,
    quit: Signal,
    stop: Signal,
    cont: Signal,
    size: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            hup: signal(SignalKind::hangup())?,
            int: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            stop: signal(SignalKind::from_raw(libc::SIGTSTP))?,
            cont: signal(SignalKind::from_raw(libc::SIGCONT))?,
            size: signal(SignalKind::window_change())?,
        })
    }
}

/// Reads the terminal in a thread of its own: a read from a terminal cannot be given up. Its end closes the channel.
fn read_keys() -> mpsc::UnboundedReceiver<Vec<u8>> {
    let (send, receive) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 1024];
        loop {
            match io::stdin().lock().read(&mut bytes) {
                Ok(0) => return,
                Ok(n) if send.send(bytes[..n].to_vec()).is_err() => return,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
    receive
}

// Long: one arm for each thing that wakes it.
async fn interact(
    ctx: &Context,
    state: &mut State,
    mut signals: Signals,
    mut news: mpsc::UnboundedReceiver<state::News>,
    want: watching::Sender<Wanted>,
) -> io::Result<End> {
    let mut screen = screen::Screen::new()?;
    let mut typed = read_keys();
    let mut begun = vec![];
    let mut acting = futures_util::stream::FuturesUnordered::new();
    let mut last = Instant::now();
    let mut due = last;
    loop {
        tokio::select! {
            biased;
            _ = signals.term.recv() => return Ok(End::Signal(libc::SIGTERM)),
            _ = signals.hup.recv() => return Ok(End::Signal(libc::SIGHUP)),
            _ = signals.int.recv() => return Ok(End::Signal(libc::SIGINT)),
            _ = signals.quit.recv() => return Ok(End::Signal(libc::SIGQUIT)),
            _ = signals.stop.recv() => {
                suspend(&mut signals.cont).await?;
                screen = screen::Screen::new()?;
                due = Instant::now();
            }
            _ = signals.cont.recv() => {
                // The shell, or whoever stopped it, may have changed the terminal.
                Held::leave();
                Held::enter()?;
                screen = screen::Screen::new()?;
                due = Instant::now();
            }
            _ = signals.size.recv() => due = Instant::now(),
            bytes = typed.recv() => {
                let Some(bytes) = bytes else { return Ok(End::Signal(libc::SIGHUP)) };
                for key in keys::keys(&mut begun, &bytes) {
                    match state.key(key) {
                        None => {}
                        Some(Act::Quit) => return Ok(End::Quit),
                        Some(Act::Suspend) => {
                            suspend(&mut signals.cont).await?;
                            screen = screen::Screen::new()?;
                        }
                        Some(Act::Redraw) => {
                            failpoint::panics("top_redraws");
                            screen = screen::Screen::new()?;
                        }
                        Some(act) => {
                            state.said = Some(("asking the store ...".to_owned(), true));
                            acting.push(perform(ctx, act));
                        }
                    }
                }
                let now = Wanted { job: state.watched().cloned(), run: state.output.run, at: state.output.at };
                want.send_if_modified(|was| {
                    let other = was.job != now.job || was.run != now.run;
                    if other {
                        *was = now;
                    }
                    other
                });
                due = due.min(Instant::now() + AFTER_KEY);
            }
            Some(done) = futures_util::StreamExt::next(&mut acting), if !acting.is_empty() => {
                state.said = Some(match done {
                    Ok(text) => (text, true),
                    Err(failure) => (failure.in_a_line(), false),
                });
                want.send_modify(|w| w.at = state.output.at);
                due = due.min(Instant::now() + AFTER_KEY);
            }
            Some(one) = news.recv() => {
                state.take(one);
                // A run may have begun or ended, so that another output is shown.
                want.send_if_modified(|w| {
                    let other = w.job.is_some() && w.run != state.output.run;
                    if other {
                        (w.run, w.at) = (state.output.run, state.output.at);
                    }
                    other
                });
                due = due.min(last + AT_MOST);
            }
            () = sleep_until(due) => {
                state.tick(local_ms());
                screen.draw(state)?;
                last = Instant::now();
                due = last + AT_LEAST;
            }
        }
    }
}

/// Gives the terminal back and stops this process and those around it, as Ctrl-Z does to other programs; goes on when
/// it is continued.
async fn suspend(continued: &mut Signal) -> io::Result<()> {
    Held::leave();
    // A group of which some go on would not be stopped in the eyes of the shell.
    // SAFETY: takes no pointers.
    unsafe { libc::kill(0, libc::SIGSTOP) };
    // It may take a moment until it is stopped; the terminal must not be taken before.
    let _ = tokio::time::timeout(Duration::from_millis(500), continued.recv()).await;
    Held::enter()
}

/// Does what was asked and confirmed; returns what came of it in words.
async fn perform(ctx: &Context, act: Act) -> Result<String, Failure> {
    let (fleet, clock) = ctx.fleet().await?;
    let (asker, by) = (ctx.asker(), acts::me());
    let refused = |r| ctx.refused(r);
    let defined = |name| ctx.config.jobs.get(name).map(|job| &**job);
    match act {
        Act::Quit | Act::Suspend | Act::Redraw => Ok(String::new()),
        Act::Trigger(job) => {
            let asked = asker.trigger(&job, &acts::own_key(), true, &by).await;
            asked.map_err(refused)?;
            let config = defined(&job).map(|_| ctx.config.digest.clone());
            Ok(format!(
                "`{job}` is triggered; {}",
                acts::who(&fleet, clock, config.as_deref())
            ))
        }
        Act::Pause { job, until, reason } => {
            let zone = defined(&job).map_or("UTC", |job| &*job.timezone);
            let until = match until.as_str() {
                "" => None,
                text => Some(acts::until("until", text, zone, clock.now).map_err(refused)?),
            };
            let reason = (!reason.is_empty()).then_some(reason);
            let what = Control::Pause { until, reason }.by(&by);
            asker.control(&job, &what).await.map_err(refused)?;
            Ok(acts::paused(&job, until, clock.now))
        }
        Act::Resume(job) => {
            let reply = asker.control(&job, &Control::Resume.by(&by)).await;
            let changed = reply.map_err(refused)?.value == Controlled::Done;
            Ok(acts::resumed(&job, defined(&job), changed, clock))
        }
        Act::Skip { job, count } => {
            acts::skippable(&job, defined(&job), count).map_err(refused)?;
            let what = Control::Skip { count }.by(&by);
            asker.control(&job, &what).await.map_err(refused)?;
            let first = acts::planned(defined(&job), clock.now, (count as usize).min(3));
            Ok(acts::skips(&job, count, &first))
        }
        Act::Cancel(job) => {
            let reply = asker.control(&job, &Control::Cancel.by(&by)).await;
            Ok(match reply.map_err(refused)?.value {
                Controlled::Stopping(runs) if !runs.is_empty() => {
                    let runs = show::count(runs.len(), "run");
                    format!("{runs} of `{job}` asked to end; attempts that wait are dropped")
                }
                _ => format!("no run of `{job}` is active; attempts that wait are dropped"),
            })
        }
        Act::Drain(id, on) => {
            asker.drain(&id, on, &by).await.map_err(refused)?;
            let info = fleet.instances.get(&id);
            let running: Vec<_> =
                info.map_or(vec![], |i| i.running.iter().map(|(job, _)| job).collect());
            Ok(acts::drained(
                &id,
                on,
                &running,
                &acts::others(&fleet, &id, clock),
            ))
        }
    }
}
