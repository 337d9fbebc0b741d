//! The program's own log: to stderr, or straight to the journal if stderr is connected to it.

use std::io::{self, IsTerminal};

use crate::text;
use tracing_subscriber::{
    Layer, filter::Targets, layer::SubscriberExt, registry, util::SubscriberInitExt,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// The journal if stderr is connected to it, else text
    Auto,
    /// For people
    Text,
    /// One JSON object per line.
    Json,
    /// With fields, straight to systemd's journal.
    Journald,
}

/// The daemon's default; the other commands log only warnings.
pub(super) const DAEMON: &str = "info,tokio_cron_scheduler=warn,rustls=warn,redis=warn";
pub(super) const COMMAND: &str = "warn";

/// Call this once, before anything is logged.
pub(super) fn init(format: Format, filter: Targets) {
    let journal = match format {
        Format::Journald => true,
        Format::Auto => stderr_is_journal(std::env::var("JOURNAL_STREAM").ok().as_deref()),
        Format::Text | Format::Json => false,
    };
    if journal && let Ok(layer) = tracing_journald::layer() {
        registry().with(layer.with_filter(filter)).init();
        return;
    }
    if format == Format::Json {
        let layer = tracing_subscriber::fmt::layer()
            .json()
            .flatten_event(true)
            .with_writer(io::stderr);
        registry().with(layer.with_filter(filter)).init();
        return;
    }
    let layer = tracing_subscriber::fmt::layer()
        .with_ansi(super::show::colours(io::stderr().is_terminal()))
        .with_writer(|| Lines(io::stderr()));
    registry().with(layer.with_filter(filter)).init();
}

/// Writes each event as one line, and escapes all control sequences but our colours. Each write is one whole event.
struct Lines<W>(W);

impl<W: io::Write> io::Write for Lines<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        let line = text::coloured(text).replace('\n', "\\n") + "\n";
        self.0.write_all(line.as_bytes())?;
        Ok(event.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// `journal_stream` is the `device:inode` of the stream that systemd connected to the journal.
fn stderr_is_journal(journal_stream: Option<&str>) -> bool {
    let (Some(wanted), Ok(have)) = (journal_stream, rustix::fs::fstat(io::stderr())) else {
        return false;
    };
    wanted == format!("{}:{}", have.st_dev, have.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_recognised_by_device_and_inode() {
        let st = rustix::fs::fstat(io::stderr()).unwrap();
        let ours = format!("{}:{}", st.st_dev, st.st_ino);
        assert!(stderr_is_journal(Some(&ours)));
        assert!(!stderr_is_journal(Some(&format!("{ours}0"))));
        assert!(!stderr_is_journal(Some("")));
        assert!(!stderr_is_journal(None));
    }

    #[test]
    fn the_default_filters_are_understood() {
        for filter in [DAEMON, COMMAND] {
            let targets: Targets = filter.parse().unwrap();
            assert!(targets.would_enable("soloist", &tracing::Level::WARN));
        }
    }
}
