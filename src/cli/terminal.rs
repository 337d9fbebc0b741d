//! The daemon's log on a terminal, made for eyes: the local time without a date, each job with a colour of its own, its
//! name as a column before what its command writes. Machines get the other formats.

use std::{
    collections::hash_map::DefaultHasher,
    fmt,
    hash::{Hash as _, Hasher as _},
    sync::Arc,
};

use anstyle::{Ansi256Color, AnsiColor, Style};
use parking_lot::Mutex;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    registry::LookupSpan,
};

use super::show::STDERR;
use crate::{clock, runner::LOG_TARGET, text, words};

/// A longer name moves its line.
const COLUMN: usize = 14;
/// A longer name loses its middle, so that 80 columns have room for the message.
const LONGEST: usize = 20;
/// Colours that are told apart on a dark and on a light ground, and that no level has.
const COLOURS: [u8; 10] = [33, 36, 64, 71, 98, 133, 135, 166, 172, 205];
const DIM: Style = Style::new().dimmed();
/// Fields that a person needs to look nothing up with.
const UNSHOWN: [&str; 3] = ["run", "job", "stream"];

/// Writes events for a person who looks.
#[derive(Debug, Clone)]
pub(super) struct ForEyes {
    pub colours: bool,
    /// The terminal shows more than ASCII.
    pub unicode: bool,
    pub zone: jiff::tz::TimeZone,
    /// The job that has each of the colours.
    pub jobs: Jobs,
}

pub(super) type Jobs = Arc<Mutex<[Option<String>; COLOURS.len()]>>;

impl<S, N> FormatEvent<S, N> for ForEyes
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut said = Said::default();
        event.record(&mut Each(|name, value| said.keep(name, value)));
        let now = jiff::Timestamp::from_millisecond(clock::wall_us() / 1000).unwrap_or_default();
        let now = now.to_zoned(self.zone.clone());
        let meta = event.metadata();
        let line = self.line(
            &now.strftime("%H:%M:%S").to_string(),
            *meta.level(),
            meta.target(),
            &said,
        );
        writeln!(out, "{line}")
    }
}

/// Hands on the name and the value of each field.
pub(super) struct Each<F>(pub F);

impl<F: FnMut(&'static str, String)> Visit for Each<F> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        (self.0)(field.name(), format!("{value:?}"));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        (self.0)(field.name(), value.to_owned());
    }
}

/// What one event says.
#[derive(Debug, Clone, Default)]
pub(super) struct Said {
    message: String,
    job: Option<String>,
    stream: Option<String>,
    fields: Vec<(&'static str, String)>,
}

impl Said {
    pub(super) fn keep(&mut self, name: &'static str, value: String) {
        let value = text::line(&value);
        match name {
            "message" => self.message = value,
            "job" => self.job = Some(value),
            "stream" => self.stream = Some(value),
            name if UNSHOWN.contains(&name) => {}
            name => self.fields.push((name, value)),
        }
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.fields.iter().position(|(n, _)| *n == name)?;
        Some(self.fields.remove(at).1)
    }

    /// All in one line, for readers who see nothing else: ``ended `backup`: failed (exit 3) after 2.10 s``.
    pub(super) fn whole(mut self, target: &str) -> String {
        let job = self.job.clone();
        if let (Some(job), LOG_TARGET) = (&job, target) {
            let stderr = self.stream.as_deref() == Some("stderr");
            return format!("{job} {} {}", ["|", "!"][usize::from(stderr)], self.message);
        }
        let sentence = self.sentence(job.as_deref(), |at| at.replace(".000Z", "Z"));
        let rest = self.rest().map_or(String::new(), |rest| format!(" {rest}"));
        sentence + &rest
    }

    /// The message in words, with the job if it is not named beside it; takes the fields that it uses.
    fn sentence(&mut self, job: Option<&str>, time: impl Fn(&str) -> String) -> String {
        let message = std::mem::take(&mut self.message);
        if self.job.is_none() {
            return message;
        }
        let at = |said: &mut Self| {
            let at = said.take("occurrence");
            at.map_or(String::new(), |at| format!(" for {}", time(&at)))
        };
        let before = |words| job.map_or(String::new(), |job| format!("{words}`{job}`"));
        match message.as_str() {
            "started" => {
                let trigger = self.take("trigger").filter(|t| t != "schedule");
                let trigger = trigger.map_or(String::new(), |t| format!(" ({t})"));
                let attempt = self.take("attempt").filter(|n| n != "1");
                let attempt = attempt.map_or(String::new(), |n| format!(" attempt {n}"));
                format!("started{}{}{trigger}{attempt}", before(" "), at(self))
            }
            "ended" => {
                let _ = self.take("occurrence");
                let outcome = self.take("outcome").unwrap_or_else(|| message.clone());
                let code = self.take("exit_code").map(|code| format!(" (exit {code})"));
                let signal = self.take("signal").and_then(|n| n.parse().ok());
                let signal = signal.map(|n| format!(" ({})", crate::view::signal_name(n)));
                let took = self.take("duration_ms").and_then(|ms| ms.parse().ok());
                let took = took.map(|ms| format!(" after {}", words::took(ms)));
                let error = self.take("error").map(|e| format!(": {e}"));
                let how: String = [code, signal, took, error].into_iter().flatten().collect();
                let job = job.map_or(String::new(), |job| format!("ended `{job}`: "));
                format!("{job}{}{how}", outcome.replace('_', " "))
            }
            "not run" => {
                let outcome = self.take("outcome").unwrap_or_default();
                let reason = self.take("reason").unwrap_or_default();
                format!("not run{}{} ({outcome}): {reason}", before(": "), at(self))
            }
            _ => job.map_or(String::new(), |job| format!("`{job}`: ")) + &message,
        }
    }

    /// The fields that no sentence has used.
    fn rest(&self) -> Option<String> {
        let fields = self.fields.iter();
        let fields: Vec<String> = fields
            .map(|(name, value)| format!("{name} {value}"))
            .collect();
        (!fields.is_empty()).then(|| format!("({})", fields.join(", ")))
    }
}

impl ForEyes {
    /// `12:30:05  backup          | 3 files copied`
    fn line(&self, time: &str, level: Level, target: &str, said: &Said) -> String {
        let job = said.job.as_deref();
        let (name, style) = match job {
            Some(job) => (self.short(job), self.colour(job)),
            None => ("soloist".to_owned(), DIM),
        };
        let pad = " ".repeat(COLUMN.saturating_sub(name.chars().count()));
        let column = format!("{}{pad}", self.paint(style, &name));
        let time = self.paint(DIM, time);
        if target == LOG_TARGET {
            let mark = match (said.stream.as_deref(), self.unicode) {
                (Some("stderr"), true) => self.paint(STDERR, "┃"),
                (Some("stderr"), false) => self.paint(STDERR, "!"),
                (_, true) => self.paint(style, "│"),
                (_, false) => self.paint(style, "|"),
            };
            return format!("{time}  {column}  {mark} {}", said.message);
        }
        let mut said = said.clone();
        let what = said.sentence(None, |at| self.local(at));
        let what = self.with_local_times(&what);
        let what = match level {
            Level::ERROR => self.paint(
                AnsiColor::Red.on_default().bold(),
                &format!("error: {what}"),
            ),
            Level::WARN => self.paint(AnsiColor::Yellow.on_default(), &what),
            Level::INFO => what,
            _ => self.paint(DIM, &what),
        };
        let fields = said.rest().map_or(String::new(), |rest| {
            self.paint(DIM, &format!("  {}", self.with_local_times(&rest)))
        });
        format!("{time}  {column}  {what}{fields}")
    }

    /// The name, with its begin and its end if it is too long: jobs that belong together often begin alike.
    fn short(&self, name: &str) -> String {
        let chars: Vec<char> = name.chars().collect();
        if chars.len() <= LONGEST {
            return name.to_owned();
        }
        let mark = if self.unicode { "…" } else { "~" };
        let kept = LONGEST - 1;
        let (begin, end) = (kept.div_ceil(2), kept / 2);
        let begin: String = chars[..begin].iter().collect();
        let end: String = chars[chars.len() - end..].iter().collect();
        format!("{begin}{mark}{end}")
    }

    /// The text with each instant of UTC in it as local time, with the date if that is not today's.
    fn with_local_times(&self, text: &str) -> String {
        let wall = jiff::Timestamp::from_millisecond(clock::wall_us() / 1000).unwrap_or_default();
        let today = wall.to_zoned(self.zone.clone()).date();
        let word = |word: &str| {
            let bare = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
            let at: jiff::Timestamp = bare.ends_with('Z').then(|| bare.parse().ok())??;
            let at = at.to_zoned(self.zone.clone());
            let local = match at.date() == today {
                true => at.strftime("%H:%M:%S"),
                false => at.strftime("%Y-%m-%d %H:%M:%S"),
            };
            Some(word.replacen(bare, &local.to_string(), 1))
        };
        let words = text.split(' ');
        let words: Vec<String> = words
            .map(|w| word(w).unwrap_or_else(|| w.to_owned()))
            .collect();
        words.join(" ")
    }

    /// The local time of an instant, as short as it may be.
    fn local(&self, at: &str) -> String {
        match at.parse::<jiff::Timestamp>() {
            Ok(at) => {
                let at = at.to_zoned(self.zone.clone());
                at.strftime("%H:%M:%S").to_string()
            }
            Err(_) => at.to_owned(),
        }
    }

    /// The same for a job in each start, unless another one had it before: no two jobs share one while others are free.
    fn colour(&self, job: &str) -> Style {
        let mut hash = DefaultHasher::new();
        job.hash(&mut hash);
        let wanted = (hash.finish() % COLOURS.len() as u64) as usize;
        let mut jobs = self.jobs.lock();
        let own = jobs.iter().position(|j| j.as_deref() == Some(job));
        let mut all = (0..COLOURS.len()).map(|n| (wanted + n) % COLOURS.len());
        let at = own.unwrap_or_else(|| match all.find(|at| jobs[*at].is_none()) {
            Some(free) => {
                jobs[free] = Some(job.to_owned());
                free
            }
            None => wanted,
        });
        Ansi256Color(COLOURS[at]).on_default()
    }

    fn paint(&self, style: Style, text: &str) -> String {
        match self.colours {
            true => super::show::paint(style, text),
            false => text.to_owned(),
        }
    }
}

/// Whether the terminal is set up for UTF-8, by the variables that decide it.
pub(super) fn unicode(var: impl Fn(&str) -> Option<String>) -> bool {
    let set = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(var);
    let mut set = set.filter(|value| !value.is_empty());
    set.next().is_some_and(|value| {
        let value = value.to_ascii_lowercase();
        value.contains("utf-8") || value.contains("utf8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::JobName;

    fn eyes(colours: bool, unicode: bool) -> ForEyes {
        ForEyes {
            colours,
            unicode,
            zone: jiff::tz::TimeZone::get("Europe/Berlin").unwrap(),
            jobs: Jobs::default(),
        }
    }

    fn said(job: Option<&str>, message: &str, fields: &[(&'static str, &str)]) -> Said {
        let mut said = Said::default();
        said.keep("message", message.to_owned());
        if let Some(job) = job {
            said.keep("job", job.to_owned());
        }
        for (name, value) in fields {
            said.keep(name, (*value).to_owned());
        }
        said
    }

    #[test]
    fn each_line_has_its_time_its_job_and_no_ids() {
        let plain = eyes(false, true);
        let line = |level, target: &str, said: &Said| plain.line("12:30:05", level, target, said);
        let run = ("run", "019aa1c4-0000-7000-8000-000000000000");
        let out = said(
            Some("backup"),
            "3 files copied",
            &[run, ("stream", "stdout")],
        );
        assert_eq!(
            line(Level::INFO, LOG_TARGET, &out),
            "12:30:05  backup          │ 3 files copied"
        );
        let err = said(Some("backup"), "disk is slow", &[run, ("stream", "stderr")]);
        assert_eq!(
            line(Level::INFO, LOG_TARGET, &err),
            "12:30:05  backup          ┃ disk is slow"
        );
        let started = said(
            Some("backup"),
            "started",
            &[
                ("occurrence", "2026-11-20T11:30:00.000Z"),
                run,
                ("attempt", "2"),
                ("trigger", "retry"),
            ],
        );
        assert_eq!(
            line(Level::INFO, "soloist::holder", &started),
            "12:30:05  backup          started for 12:30:00 (retry) attempt 2"
        );
        let ended = said(
            Some("a-job-with-a-long-name"),
            "ended",
            &[
                ("occurrence", "2026-11-20T11:30:00.000Z"),
                ("outcome", "timed_out"),
                ("signal", "15"),
                ("duration_ms", "4002"),
            ],
        );
        assert_eq!(
            line(Level::WARN, "soloist::holder", &ended),
            "12:30:05  a-job-with…long-name  timed out (SIGTERM) after 4.00 s"
        );
        let other = said(None, "the store does not answer", &[("error", "timeout")]);
        assert_eq!(
            line(Level::ERROR, "soloist", &other),
            "12:30:05  soloist         error: the store does not answer  (error timeout)"
        );
    }

    #[test]
    fn one_line_alone_names_the_job_the_outcome_and_the_reason() {
        let at = ("occurrence", "2026-11-20T11:30:00.000Z");
        let run = ("run", "019aa1c4-0000-7000-8000-000000000000");
        for (message, fields, want) in [
            (
                "started",
                vec![at, run, ("attempt", "2"), ("trigger", "retry")],
                "started `backup` for 2026-11-20T11:30:00Z (retry) attempt 2",
            ),
            (
                "ended",
                vec![
                    at,
                    ("outcome", "failed"),
                    ("exit_code", "3"),
                    ("duration_ms", "2100"),
                ],
                "ended `backup`: failed (exit 3) after 2.10 s",
            ),
            (
                "not run",
                vec![at, ("outcome", "missed"), ("reason", "too late")],
                "not run: `backup` for 2026-11-20T11:30:00Z (missed): too late",
            ),
            (
                "cannot renew the lease; retrying",
                vec![run, ("error", "no answer")],
                "`backup`: cannot renew the lease; retrying (error no answer)",
            ),
        ] {
            assert_eq!(said(Some("backup"), message, &fields).whole(""), want);
        }
        let output = said(Some("backup"), "disk is slow", &[("stream", "stderr"), run]);
        assert_eq!(output.whole(LOG_TARGET), "backup ! disk is slow");
        let none = said(None, "stopping", &[("signal", "SIGTERM")]);
        assert_eq!(none.whole(""), "stopping (signal SIGTERM)");
    }

    #[test]
    fn the_longest_name_leaves_room_for_what_is_said_at_80_columns() {
        let name = format!("{}-eu", "x".repeat(JobName::LONGEST - 3));
        for unicode in [true, false] {
            let out = said(Some(&name), "copied", &[("stream", "stdout")]);
            let line = eyes(false, unicode).line("12:30:05", Level::INFO, LOG_TARGET, &out);
            let column = line.strip_suffix(" copied").expect("what is said");
            assert!(column.chars().count() <= 34, "{line}");
            assert!(column.contains("xxx-eu  "), "{line}");
            assert_eq!(line.is_ascii(), !unicode);
        }
        let whole = "x".repeat(LONGEST);
        let out = said(Some(&whole), "copied", &[("stream", "stdout")]);
        let line = eyes(false, true).line("12:30:05", Level::INFO, LOG_TARGET, &out);
        assert!(line.contains(&whole), "{line}");
    }

    #[test]
    fn instants_in_a_message_are_local() {
        let eyes = eyes(false, true);
        assert_eq!(
            eyes.with_local_times(
                "waits until 2001-02-03T23:30:00.500Z (in 3 s), as `a Z`; 2001-07-01T00:00:00Z."
            ),
            "waits until 2001-02-04 00:30:00 (in 3 s), as `a Z`; 2001-07-01 02:00:00."
        );
        // The test may run around midnight: one of two moments has the date of today.
        let now = jiff::Timestamp::from_millisecond(clock::wall_us() / 1000).expect("a time");
        let zoned = now.to_zoned(eyes.zone.clone());
        let shown = eyes.with_local_times(&format!("until {now},"));
        let time = zoned.strftime("%H:%M:%S").to_string();
        let dated = zoned.strftime("%Y-%m-%d %H:%M:%S").to_string();
        assert!(
            shown == format!("until {time},") || shown == format!("until {dated},"),
            "{shown}"
        );
        let waits = said(None, "nothing starts", &[("until", "2001-02-03T23:30:00Z")]);
        assert_eq!(
            eyes.line("12:30:05", Level::INFO, "soloist", &waits),
            "12:30:05  soloist         nothing starts  (until 2001-02-04 00:30:00)"
        );
        // What a job writes stays as it is.
        let out = said(Some("a"), "2001-02-03T23:30:00Z", &[("stream", "stdout")]);
        let line = eyes.line("12:30:05", Level::INFO, LOG_TARGET, &out);
        assert!(line.ends_with("2001-02-03T23:30:00Z"), "{line}");
    }

    #[test]
    fn without_utf8_and_colours_only_ascii_is_written_and_nothing_acts() {
        let evil = said(
            Some("a\x1b[2J"),
            "b\x1b]0;x\x07\nforged",
            &[("stream", "stderr")],
        );
        let shown = eyes(false, false).line("12:30:05", Level::INFO, LOG_TARGET, &evil);
        assert!(
            shown.is_ascii() && !shown.contains(['\x1b', '\n', '\x07']),
            "{shown:?}"
        );
        assert!(shown.contains(" ! b"), "{shown:?}");
        let coloured = eyes(true, true).line("12:30:05", Level::INFO, LOG_TARGET, &evil);
        assert!(
            !coloured.contains("\x1b[2J") && !coloured.contains('\n'),
            "{coloured:?}"
        );
    }

    #[test]
    fn a_job_keeps_its_colour() {
        let eyes = eyes(true, true);
        assert_eq!(eyes.colour("backup"), eyes.colour("backup"));
        let colour = |n: usize| format!("{}", eyes.colour(&format!("job-{n}")));
        let first: Vec<String> = (1..COLOURS.len()).map(colour).collect();
        let all: std::collections::BTreeSet<&String> = first.iter().collect();
        assert_eq!(all.len(), COLOURS.len() - 1, "as long as some are free");
        let later: Vec<String> = (0..50).map(colour).collect();
        assert_eq!(later[1..COLOURS.len()], first, "each keeps its own");
    }

    #[test]
    fn the_variables_of_the_locale_decide() {
        let with = |all: &'static [(&str, &str)]| {
            unicode(|name| {
                let found = all.iter().find(|(n, _)| *n == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(with(&[("LANG", "en_US.UTF-8")]));
        assert!(!with(&[("LANG", "en_US.UTF-8"), ("LC_ALL", "C")]));
        assert!(with(&[("LC_ALL", ""), ("LC_CTYPE", "C.utf8")]));
        assert!(!with(&[]));
    }
}
