//! The program's own log: to stderr, or straight to the journal if stderr is connected to it.

use std::io::{self, IsTerminal};

use super::terminal::{self, Each, ForEyes, Said};
use crate::{
    log_queue::{self, To},
    text,
};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::{
    Layer,
    field::MakeExt as _,
    filter::Targets,
    fmt::{MakeWriter, format::debug_fn},
    layer::{Context, SubscriberExt},
    registry,
    registry::LookupSpan,
    util::SubscriberInitExt,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// The journal if stderr is connected to it, else text; of `run` on a terminal: for eyes
    // An empty variable is none.
    #[value(alias = "")]
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

/// The levels to log; None: an empty text, which counts as none.
#[derive(Debug, Clone)]
pub(super) struct Filter(pub(super) Option<Targets>);

impl std::str::FromStr for Filter {
    type Err = String;

    /// A bare word is a level here: as the name of a module, a misspelled level would silence everything.
    fn from_str(text: &str) -> Result<Self, String> {
        const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
        if text.trim().is_empty() {
            return Ok(Self(None));
        }
        for part in text.split(',').map(str::trim) {
            let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
            if !LEVELS.contains(&level.to_ascii_lowercase().as_str()) {
                let near = crate::config::nearest(level, LEVELS);
                let hint = near.map_or_else(
                    || format!("write one of {}, or MODULE=LEVEL", LEVELS.join(", ")),
                    |near| format!("did you mean `{near}`?"),
                );
                return Err(format!("`{}` is not a level; {hint}", level.escape_debug()));
            }
        }
        match text.replace(char::is_whitespace, "").parse() {
            Ok(targets) => Ok(Self(Some(targets))),
            Err(e) => Err(e.to_string()),
        }
    }
}

/// Call this once, before anything is logged. `eyes`: a person who starts a daemon on a terminal looks at it.
pub(super) fn init(format: Format, filter: Targets, eyes: bool) {
    let journal = match format {
        Format::Journald => true,
        Format::Auto => stderr_is_journal(std::env::var("JOURNAL_STREAM").ok().as_deref()),
        Format::Text | Format::Json => false,
    };
    if journal && log_queue::open_journal().is_ok() {
        registry().with(Journal.with_filter(filter)).init();
        return;
    }
    if format == Format::Json {
        let layer = tracing_subscriber::fmt::layer()
            .json()
            .flatten_event(true)
            .with_writer(|| Json(To::Stderr));
        registry().with(layer.with_filter(filter)).init();
        return;
    }
    let terminal = io::stderr().is_terminal();
    let colours = super::show::colours(terminal);
    if eyes && terminal && format == Format::Auto {
        let layer = for_eyes(colours, || Lines(To::Stderr));
        registry().with(layer.with_filter(filter)).init();
        return;
    }
    let layer = for_people(colours, || Lines(To::Stderr));
    registry().with(layer.with_filter(filter)).init();
}

/// Only the layer's own colours act: control sequences in a message are escaped.
fn for_people<S, W>(colours: bool, writer: W) -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + 'static,
{
    let fields = debug_fn(|out, field, value| {
        let value = text::line(&format!("{value:?}"));
        match field.name() {
            "message" => write!(out, "{value}"),
            name => write!(out, "{name}={value}"),
        }
    });
    tracing_subscriber::fmt::layer()
        .fmt_fields(fields.delimited(" "))
        .with_ansi(colours)
        .with_writer(writer)
}

fn for_eyes<S, W>(colours: bool, writer: W) -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + 'static,
{
    tracing_subscriber::fmt::layer()
        .event_format(ForEyes {
            colours,
            unicode: terminal::unicode(|name| std::env::var(name).ok()),
            zone: jiff::tz::TimeZone::system(),
            jobs: terminal::Jobs::default(),
        })
        .with_ansi(colours)
        .with_writer(writer)
}

/// Each event as an entry of the journal. Most readers see nothing but its message, which says what its fields say.
struct Journal;

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let (meta, mut entry, mut said) = (event.metadata(), vec![], Said::default());
        let mut put = |name: &str, value: &str| {
            entry.extend_from_slice(format!("{name}\n").as_bytes());
            entry.extend_from_slice(&(value.len() as u64).to_le_bytes());
            entry.extend_from_slice(format!("{value}\n").as_bytes());
        };
        event.record(&mut Each(|name: &'static str, value: String| {
            if name != "message" {
                let name = name.to_uppercase().replace('.', "_");
                put(&format!("F_{name}"), &value);
            }
            said.keep(name, value);
        }));
        put("MESSAGE", &said.whole(meta.target()));
        let levels = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG];
        let level = levels.iter().position(|level| level == meta.level());
        put("PRIORITY", &(3 + level.unwrap_or(4)).to_string());
        put("SYSLOG_IDENTIFIER", "soloist");
        put("TARGET", meta.target());
        log_queue::write(To::Journal, entry);
    }
}

/// Each write is one whole event.
impl io::Write for To {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        log_queue::write(*self, event.to_vec());
        Ok(event.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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

/// The same for events that are JSON.
struct Json<W>(W);

impl<W: io::Write> io::Write for Json<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = text::json(&String::from_utf8_lossy(event));
        self.0.write_all(text.as_bytes())?;
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
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panic").extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn no_colour_of_what_is_logged_acts() {
        for colours in [false, true] {
            let written = Written::default();
            let writer = written.clone();
            let layer = for_people(colours, move || Lines(writer.clone()));
            tracing::subscriber::with_default(registry().with(layer), || {
                let evil = "\x1b[30;40mhidden";
                tracing::warn!(error = %evil, word = evil, "said \x1b[31m\nforged");
            });
            let bytes = written.0.lock().expect("no panic").clone();
            let text = String::from_utf8(bytes).expect("UTF-8");
            assert_eq!(text.matches('\n').count(), 1, "{text:?}");
            assert_eq!(text.contains('\x1b'), colours, "{text:?}");
            for acts in ["\x1b[30;40m", "\x1b[31m"] {
                assert!(!text.contains(acts), "{text:?}");
            }
            for shown in [
                "said \\x1b[31m\\nforged",
                "error=\\x1b[30;40mhidden",
                "word=\"\\u{1b}[30;40mhidden\"",
            ] {
                assert!(text.contains(shown), "{text:?}");
            }
        }
    }

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
    fn a_word_that_is_no_level_is_refused_and_an_empty_one_is_none() {
        let parse = |text: &str| text.parse::<Filter>();
        let error = |text: &str| parse(text).unwrap_err();
        assert_eq!(error("wran"), "`wran` is not a level; did you mean `warn`?");
        for text in ["info,bogus", "soloist=5", "trace=5", ","] {
            assert!(error(text).contains("is not a level"), "{text}");
        }
        assert!(parse("").unwrap().0.is_none() && parse(" ").unwrap().0.is_none());
        let some = parse("WARN, soloist::store=debug").unwrap().0.unwrap();
        assert!(some.would_enable("soloist::store", &tracing::Level::DEBUG));
        assert!(!some.would_enable("soloist", &tracing::Level::INFO));
    }

    #[test]
    fn the_default_filters_are_understood() {
        for filter in [DAEMON, COMMAND] {
            let targets: Targets = filter.parse().unwrap();
            assert!(targets.would_enable("soloist", &tracing::Level::WARN));
        }
    }
}
