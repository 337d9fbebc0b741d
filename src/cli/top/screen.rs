//! The terminal while `soloist top` has it: taken, given back however the process ends, and drawn on.

use std::{
    io::{self, Stdout, Write as _},
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
};

use ratatui::{
    Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor,
        style::ResetColor,
        terminal::{
            Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
            enable_raw_mode,
        },
    },
};

use super::{draw::draw, state::State};

static HELD: AtomicBool = AtomicBool::new(false);

/// As long as it exists the terminal is ours. A panic gives it back, too, before its message is written.
#[derive(Debug)]
pub(super) struct Held(());

impl Held {
    pub(super) fn take() -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |what| {
                Self::leave();
                before(what);
            }));
        });
        let held = Self(());
        Self::enter()?;
        Ok(held)
    }

    pub(super) fn enter() -> io::Result<()> {
        HELD.store(true, Ordering::SeqCst);
        enable_raw_mode()?;
        let mut out = io::stdout();
        ratatui::crossterm::execute!(out, EnterAlternateScreen, cursor::Hide)
    }

    /// Gives it back, if we have it. A terminal that is gone needs nothing.
    pub(super) fn leave() {
        if HELD.swap(false, Ordering::SeqCst) {
            let mut out = io::stdout();
            let _ =
                ratatui::crossterm::execute!(out, ResetColor, LeaveAlternateScreen, cursor::Show);
            let _ = disable_raw_mode();
            let _ = out.flush();
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        Self::leave();
    }
}

/// What was drawn, so that only what has changed is written.
pub(super) struct Screen(Terminal<CrosstermBackend<io::BufWriter<Stdout>>>);

impl Screen {
    /// Draws all anew the next time.
    pub(super) fn new() -> io::Result<Self> {
        let mut out = io::BufWriter::with_capacity(64 << 10, io::stdout());
        // The terminal itself would be asked for its cursor by ratatui's way to clear, and its answer taken for keys.
        ratatui::crossterm::execute!(out, Clear(ClearType::All))?;
        Terminal::new(CrosstermBackend::new(out)).map(Self)
    }

    pub(super) fn draw(&mut self, state: &State) -> io::Result<()> {
        self.0.draw(|frame| draw(state, frame)).map(drop)
    }
}
