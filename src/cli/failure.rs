//! Errors of the command line: their messages, hints and exit codes.

use std::{
    io::{self, IsTerminal as _, Write},
    path::PathBuf,
    process::ExitCode,
};

use clap::error::ContextValue;

use super::show;
use crate::{
    acts::Refusal,
    config::Report,
    log_queue::{self, To},
    store, text,
};

/// How a command ended, with the numbers of sysexits.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Ok,
    Usage,
    StoreUnreachable,
    Internal,
    TryAgain,
    Config,
    /// A lock, or the lease of a run, was lost: the command was ended, and nobody can say how far it came.
    LeaseLost,
    /// The exit code of the job's command.
    Command(u8),
}

impl Exit {
    pub fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Usage => 64,
            Self::StoreUnreachable => 69,
            Self::Internal => 70,
            Self::TryAgain => 75,
            Self::Config => 78,
            Self::LeaseLost => 79,
            Self::Command(code) => code,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(e: Exit) -> Self {
        e.code().into()
    }
}

#[derive(Debug)]
pub enum Failure {
    /// A name that does not exist, an argument that makes no sense.
    Usage {
        message: String,
        hint: Option<String>,
    },
    /// All problems of the configuration.
    Config(Report),
    /// There is no configuration.
    Missing {
        message: String,
        hint: String,
    },
    /// There is no store yet, or none that another process can use.
    Absent {
        message: String,
        hint: String,
    },
    /// The path is that of the configuration that names the store.
    Store(store::Error, PathBuf),
    /// Not now.
    TryAgain {
        message: String,
        hint: Option<String>,
    },
    /// Stdout cannot be written to.
    Output(io::Error),
    Internal(anyhow::Error),
}

impl From<Refusal> for Failure {
    fn from(r: Refusal) -> Self {
        match r {
            Refusal::Usage { message, hint } => Self::usage(message, hint),
            Refusal::NotNow { message, hint } => Self::TryAgain { message, hint },
            Refusal::Store(e) => Self::Store(e, "the configuration".into()),
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(e: anyhow::Error) -> Self {
        match e.downcast::<Report>() {
            Ok(report) => Self::Config(report),
            Err(e) => Self::Internal(e),
        }
    }
}

impl Failure {
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage {
            message: message.into(),
            hint: Some(hint.into()),
        }
    }

    pub fn internal(
        what: &'static str,
        cause: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::Internal(anyhow::Error::new(cause).context(what))
    }

    pub fn exit(&self) -> Exit {
        match self {
            Self::Usage { .. } => Exit::Usage,
            Self::Config(_) | Self::Missing { .. } => Exit::Config,
            Self::Store(store::Error::Corrupt { .. }, _) => Exit::Internal,
            Self::Store(..) | Self::Absent { .. } => Exit::StoreUnreachable,
            Self::TryAgain { .. } => Exit::TryAgain,
            // The reader of our output has closed it.
            Self::Output(e) if e.kind() == io::ErrorKind::BrokenPipe => Exit::Ok,
            Self::Output(_) => Exit::Internal,
            Self::Internal(e) => match e.downcast_ref::<store::Error>() {
                Some(store::Error::Corrupt { .. }) | None => Exit::Internal,
                Some(_) => Exit::StoreUnreachable,
            },
        }
    }

    /// The message, which is one chain of causes, and the hint. `store`: what to call it.
    fn words(&self, store: &str) -> (String, Option<String>) {
        match self {
            Self::Usage { message, hint } | Self::TryAgain { message, hint } => {
                (message.clone(), hint.clone())
            }
            Self::Missing { message, hint } | Self::Absent { message, hint } => {
                (message.clone(), Some(hint.clone()))
            }
            Self::Store(e, _) => (e.to_string(), remedy(e, store)),
            Self::Config(report) => (report.render(false), None),
            Self::Output(e) => (format!("cannot write to stdout: {e}"), None),
            Self::Internal(e) => {
                let hint = e.downcast_ref::<store::Error>();
                (format!("{e:#}"), hint.and_then(|e| remedy(e, store)))
            }
        }
    }

    /// The message and the hint in one line, for a screen.
    pub(super) fn in_a_line(&self) -> String {
        let (message, hint) = self.words("the store");
        let hint = hint.map_or(String::new(), |hint| format!("; {hint}"));
        text::line(&format!("{message}{hint}"))
    }

    /// Prints the chain of causes on one line, then one hint; to stderr.
    pub fn tell(&self, color: bool) -> Exit {
        let store = match self {
            Self::Config(report) => {
                let report = text::coloured(&report.render(color)) + "\n";
                log_queue::write(To::Stderr, report.into_bytes());
                return self.exit();
            }
            Self::Output(e) if e.kind() == io::ErrorKind::BrokenPipe => return self.exit(),
            Self::Store(_, path) => format!("the store that {} names", path.display()),
            _ => "the store".to_owned(),
        };
        let (chain, hint) = self.words(&store);
        let mut text = format!("soloist: {}\n", text::line(&chain));
        if let Some(hint) = hint {
            text.push_str(&format!("hint: {}\n", text::line(&hint)));
        }
        log_queue::write(To::Stderr, text.into_bytes());
        self.exit()
    }
}

/// Prints what the parser of the arguments says: an error, to stderr, or the help that was asked for. The parser quotes
/// arguments and variables as they are, so what acts on a terminal is written out here. Its own colours stay.
pub(super) fn usage(mut e: clap::Error) -> Exit {
    // What the reader of one argument says about it. The parser has no other way to change that.
    let reason = std::error::Error::source(&e).map(ToString::to_string);
    let quoted: Vec<String> = e.context().flat_map(|(_, value)| texts(value)).collect();
    let suggested = |text: &clap::builder::StyledStr| {
        let safe = quoted.iter().fold(text.ansi().to_string(), |text, quoted| {
            text.replace(quoted, &text::line(quoted))
        });
        clap::builder::StyledStr::from(safe)
    };
    let context: Vec<_> = e
        .context()
        .filter_map(|(kind, value)| {
            let safe = match value {
                ContextValue::String(text) => ContextValue::String(text::line(text)),
                ContextValue::Strings(all) => {
                    ContextValue::Strings(all.iter().map(|text| text::line(text)).collect())
                }
                ContextValue::StyledStrs(all) => {
                    ContextValue::StyledStrs(all.iter().map(suggested).collect())
                }
                _ => return None,
            };
            Some((kind, safe))
        })
        .collect();
    for (kind, safe) in context {
        e.insert(kind, safe);
    }
    let (stderr, exit) = match e.use_stderr() {
        true => (true, Exit::Usage),
        false => (false, Exit::Ok),
    };
    let mut said = e.render().ansi().to_string();
    if let Some(reason) = reason.filter(|reason| !reason.is_empty()) {
        said = said.replace(&reason, &text::line(&reason));
    }
    let said = text::coloured(&said);
    let said = |terminal| match show::colours(terminal) {
        true => said.clone(),
        false => anstream::adapter::strip_str(&said).to_string(),
    };
    let _ = match stderr {
        true => io::stderr().write_all(said(io::stderr().is_terminal()).as_bytes()),
        false => io::stdout().write_all(said(io::stdout().is_terminal()).as_bytes()),
    };
    exit
}

/// The texts of a value, without those that suggest something.
fn texts(value: &ContextValue) -> Vec<String> {
    let all = match value {
        ContextValue::String(text) => vec![text.clone()],
        ContextValue::Strings(all) => all.clone(),
        _ => vec![],
    };
    all.into_iter()
        .filter(|text| *text != text::line(text))
        .collect()
}

/// The hint for a store error, in one line.
fn remedy(e: &store::Error, store: &str) -> Option<String> {
    Some(match e {
        // The message says what to do.
        store::Error::Unreachable { reason, .. } | store::Error::Refused { reason, .. }
            if store::connection::explains(reason) =>
        {
            "while this lasts no job starts".to_owned()
        }
        store::Error::Unreachable { address, .. } if address.starts_with("sqlite:") => {
            "while this lasts no job starts".to_owned()
        }
        store::Error::Unreachable { .. } => {
            format!("check that {store} is up, and that this host can reach it")
        }
        store::Error::Refused { address, .. } if address.starts_with("sqlite:") => return None,
        store::Error::Refused { .. } => {
            format!("these are the words of {store}: its manual and its log say more")
        }
        store::Error::NotReplicated { .. } => {
            format!("check that the replicas of {store} are connected")
        }
        store::Error::Corrupt { .. } => {
            format!("another program, or another version of soloist, wrote to {store}")
        }
    })
}
