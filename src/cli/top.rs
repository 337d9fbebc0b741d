//! `top`: what `status`, `history`, `logs` and `why` say, on a terminal and kept up to date, with what can be done
//! about it. It asks the store itself, so that it needs no HTTP. Here are its effects; what is shown, and what keys
//! mean, is in `draw` and `state`.

mod draw;
mod state;
#[cfg(test)]
mod tests;

use std::{
    io::{self, IsTerminal as _, stdout},
    time::{Duration, Instant},
};

use clap::Args;
use ratatui::{
    DefaultTerminal, Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor::Show,
        event::{self, Event as Typed},
        execute,
        terminal::{
            Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
            enable_raw_mode,
        },
    },
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch as watching},
    time::{sleep, timeout},
};

use self::state::{Act, News, State, Text, Wanted};
use super::{
    Context, Exit, Failure, act, drain,
    logs::Printer,
    show,
    status::{self, Known},
    terminal, why,
};
use crate::{
    acts,
    clock::Boottime,
    failpoint,
    logic::claim::{Control, Controlled},
    model::JobName,
    store::{Output, records_each},
};

/// The least time from one look at the fleet to the next. A large fleet is looked at for 5 % of the time.
const AGAIN: Duration = Duration::from_secs(1);
const AT_MOST: u32 = 20;
/// So long without an answer, and it is said.
const PATIENCE: Duration = Duration::from_secs(3);
/// How many records of the job that is looked at.
const HISTORY: usize = 100;

#[derive(Debug, Args)]
#[command(after_help = "\
Keys: 1 jobs, 2 timeline, 3 instances, Enter a job with its history and output, w why a run came about; t trigger, \
p pause, r resume, s skip, c cancel, d drain, u undrain, each after a question; / finds, ? lists all keys, q quits.

It uses no colours with NO_COLOR, and only ASCII without UTF-8 in LC_ALL, LC_CTYPE or LANG.")]
pub(super) struct Top {
    /// Begin with this job
    job: Option<String>,
}

/// What wakes it.
enum Event {
    Typed(Typed),
    Signal(i32),
    News(Box<News>),
    /// Why there is no answer, and since when by this host's clock.
    Away(String, i64),
    Done(Act, Result<String, Failure>),
}

type To = mpsc::UnboundedSender<Event>;

pub(super) async fn top(ctx: &Context, args: &Top) -> Result<Exit, Failure> {
    let terminals = io::stdin().is_terminal() && stdout().is_terminal();
    if !terminals || std::env::var_os("TERM").is_none_or(|t| t.is_empty() || t == "dumb") {
        return Err(Failure::usage(
            "`top` needs a terminal that can move its cursor, for input and output",
            "`soloist status` prints the same for a pipe or a file; on a terminal, set TERM",
        ));
    }
    let mut state = State::new(&ctx.config, ctx.store.address());
    state.unicode = terminal::unicode(|name| std::env::var(name).ok());
    state.colours = show::colours(true);
    if let Some(name) = &args.job {
        state.open(ctx.job(name)?.name.clone());
    }
    let (to, events) = mpsc::unbounded_channel();
    signals(&to).map_err(|e| Failure::internal("cannot handle signals", e))?;
    let (want, wanted) = watching::channel(state.wanted());
    let (act, acts) = mpsc::unbounded_channel();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |what| {
        leave();
        hook(what);
    }));
    let terminal = enter().map_err(|e| Failure::internal("cannot set up the terminal", e));
    let ended = match terminal {
        Ok(terminal) => {
            read_keys(&to);
            tokio::select! {
                ended = interact(&mut state, terminal, events, &want, &act) => ended.map_err(Failure::Output),
                () = ask(ctx, wanted, acts, &to) => Ok(Exit::Ok),
            }
        }
        Err(failure) => Err(failure),
    };
    leave();
    ended
}

fn enter() -> io::Result<DefaultTerminal> {
    enable_raw_mode()?;
    execute!(stdout(), EnterAlternateScreen, Clear(ClearType::All))?;
    Terminal::new(CrosstermBackend::new(stdout()))
}

/// A terminal that is gone needs nothing.
fn leave() {
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

/// Reads the terminal in a thread of its own: a read from a terminal cannot be given up.
fn read_keys(to: &To) {
    let to = to.clone();
    std::thread::spawn(move || {
        while let Ok(typed) = event::read() {
            if to.send(Event::Typed(typed)).is_err() {
                return;
            }
        }
        let _ = to.send(Event::Signal(libc::SIGHUP));
    });
}

fn signals(to: &To) -> io::Result<()> {
    for number in [
        libc::SIGTERM,
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTSTP,
        libc::SIGCONT,
    ] {
        let (to, mut signal) = (to.clone(), signal(SignalKind::from_raw(number))?);
        tokio::spawn(async move {
            while signal.recv().await.is_some() && to.send(Event::Signal(number)).is_ok() {}
        });
    }
    Ok(())
}

async fn interact(
    state: &mut State,
    terminal: DefaultTerminal,
    mut events: mpsc::UnboundedReceiver<Event>,
    want: &watching::Sender<Wanted>,
    ask: &mpsc::UnboundedSender<Act>,
) -> io::Result<Exit> {
    // None: suspended.
    let mut terminal = Some(terminal);
    loop {
        state.tick(local_ms());
        if let Some(terminal) = &mut terminal {
            terminal.draw(|frame| draw::draw(state, frame))?;
        }
        // The time goes on while nothing else does.
        let mut next = timeout(AGAIN, events.recv()).await.ok().flatten();
        while let Some(event) = next {
            let mut act = None;
            match event {
                Event::Typed(Typed::Key(key)) => act = state.key(key),
                Event::Typed(_) => {}
                Event::Signal(libc::SIGTSTP) => act = Some(Act::Suspend),
                // The shell, or whoever stopped it, may have changed the terminal.
                Event::Signal(libc::SIGCONT) => act = Some(Act::Redraw),
                Event::Signal(signal) => return Ok(Exit::Command(128 + signal as u8)),
                Event::News(news) => state.take(*news, local_ms()),
                Event::Away(why, since) => state.away(why, since),
                Event::Done(Act::Why(..), Ok(text)) => {
                    (state.why, state.said) = (Some(text), None);
                }
                Event::Done(_, Ok(text)) => state.said = Some((text, true)),
                Event::Done(_, Err(failure)) => state.said = Some((failure.in_a_line(), false)),
            }
            match act {
                None => {}
                Some(Act::Quit) => return Ok(Exit::Ok),
                Some(Act::Suspend) => {
                    terminal = None;
                    leave();
                    // A group of which some go on would not be stopped in the eyes of the shell.
                    // SAFETY: takes no pointers.
                    unsafe { libc::kill(0, libc::SIGSTOP) };
                }
                Some(Act::Redraw) => {
                    failpoint::panics("top_redraws");
                    leave();
                    terminal = Some(enter()?);
                }
                Some(act) => {
                    state.said = Some(("asking the store ...".to_owned(), true));
                    let _ = ask.send(act);
                }
            }
            // What comes together is drawn together.
            next = events.try_recv().ok();
        }
        let now = state.wanted();
        want.send_if_modified(|was| std::mem::replace(was, now.clone()) != now);
    }
}

fn local_ms() -> i64 {
    (Boottime::now().0 / 1_000_000) as i64
}

/// Looks at the store, and does what was confirmed, for as long as it is polled.
async fn ask(
    ctx: &Context,
    mut wanted: watching::Receiver<Wanted>,
    mut acts: mpsc::UnboundedReceiver<Act>,
    to: &To,
) {
    let mut looks = Looks::default();
    loop {
        let (begun, since) = (Instant::now(), local_ms());
        let want = wanted.borrow_and_update().clone();
        let mut look = std::pin::pin!(looks.look(ctx, &want));
        let news = match timeout(PATIENCE, &mut look).await {
            Ok(news) => news,
            Err(_) => {
                let _ = to.send(Event::Away("it is still asked".to_owned(), since));
                look.await
            }
        };
        let _ = to.send(match news {
            Ok(news) => Event::News(Box::new(news)),
            Err(failure) => Event::Away(failure.in_a_line(), since),
        });
        tokio::select! {
            biased;
            Some(act) = acts.recv() => {
                let done = perform(ctx, &act).await;
                let _ = to.send(Event::Done(act, done));
            }
            Ok(()) = wanted.changed() => {}
            () = sleep(AGAIN.max(begun.elapsed() * AT_MOST)) => {}
        }
    }
}

/// What was read before.
#[derive(Default)]
struct Looks {
    known: Known,
    /// The job whose whole history was read.
    history: Option<JobName>,
    text: Text,
    at: u64,
    printer: Option<Printer>,
}

impl Looks {
    async fn look(&mut self, ctx: &Context, want: &Wanted) -> Result<News, Failure> {
        let (status, changed) = status::look(ctx, &mut self.known).await?;
        let again =
            want.job != self.history || want.job.as_ref().is_some_and(|j| changed.contains(j));
        let read = |job: JobName| Some((job.clone(), self.known.records.get(&job)?.clone()));
        let mut records: Vec<_> = changed.into_iter().filter_map(read).collect();
        if let Some(job) = want.job.as_ref().filter(|_| again) {
            let job = std::slice::from_ref(job);
            let all = ctx
                .ask(async || records_each(&*ctx.store, job, HISTORY).await)
                .await?;
            records.extend(all.into_iter().map(|(of, all)| (job[of].clone(), all)));
        }
        self.history.clone_from(&want.job);
        if self.text.run != want.run {
            (self.at, self.printer) = (0, None);
            self.text = Text {
                run: want.run,
                ..Text::default()
            };
        }
        while let (Some(job), Some(run), false) = (&want.job, want.run, self.text.done) {
            let o = match ctx
                .ask(async || ctx.store.output(job, run, self.at).await)
                .await
            {
                // It hides nothing else.
                Err(Failure::Store(e, _)) if !e.is_transient() => Output {
                    data: format!("it cannot be read: {e}").into_bytes(),
                    done: true,
                    ..Output::default()
                },
                output => output?.unwrap_or_default(),
            };
            self.at = o.from.max(self.at).saturating_add(o.data.len() as u64);
            let printer = self.printer.get_or_insert_with(|| Printer::new(None));
            self.text.add(&printer.for_eyes(false, &o, o.done), &o);
            if !o.more {
                break;
            }
        }
        Ok(News {
            status,
            records,
            text: self.text.clone(),
        })
    }
}

/// Does what was asked and confirmed; returns what came of it in words.
async fn perform(ctx: &Context, act: &Act) -> Result<String, Failure> {
    match act {
        Act::Quit | Act::Suspend | Act::Redraw | Act::Find(_) => Ok(String::new()),
        Act::Why(job, at) => {
            let (view, now) = why::explain(ctx, job.as_str(), Some(at.0)).await?;
            Ok(anstream::adapter::strip_str(&why::render(&view, now)).to_string())
        }
        Act::Trigger(job) => {
            let (fleet, clock) = ctx.fleet().await?;
            let asked = ctx
                .asker()
                .trigger(job, &acts::own_key(), true, &acts::me())
                .await;
            asked.map_err(|r| ctx.refused(r))?;
            let who = acts::who(&fleet, clock, Some(&ctx.config.digest));
            Ok(format!("`{job}` is triggered; {who}"))
        }
        Act::Pause(job, reason, until) => {
            let until = (!until.is_empty()).then_some(("until", &**until));
            let reason = (!reason.is_empty()).then(|| reason.clone());
            Ok(act::paused(ctx, job.as_str(), until, reason).await?.1)
        }
        Act::Resume(job) => Ok(act::resumed(ctx, job.as_str()).await?.1),
        Act::Skip(job, count) => Ok(act::skipped(ctx, job.as_str(), *count).await?.1),
        Act::Cancel(job) => Ok(match act::control(ctx, job, Control::Cancel).await? {
            Controlled::Stopping(runs) if !runs.is_empty() => {
                let runs = show::count(runs.len(), "run");
                format!("{runs} of `{job}` asked to end; attempts that wait are dropped")
            }
            _ => format!("no run of `{job}` is active; attempts that wait are dropped"),
        }),
        Act::Drain(id, on) => Ok(drain::drained(ctx, Some(id.as_str()), *on).await?.1),
    }
}
