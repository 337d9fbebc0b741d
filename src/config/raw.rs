//! The configuration as written: every key read by itself, nothing combined yet. What is wrong with one value
//! alone is found here.

use std::{ops::Range, time::Duration};

use toml::de::DeTable;

use super::{
    CatchUp, OnStateLoss,
    report::Place,
    tree::{At, Field, Given, Node, Reader, Table, Zone, clipped},
    url::{self, Kind},
};
use crate::{
    logic::{
        claim::{OnCrash, Overlap},
        schedule::{Dst, Fold, Gap},
    },
    model::JobName,
};

/// More is a log, not a history: it is held in memory while the command runs, and in the store afterwards.
const MOST_OUTPUT: u64 = 16 << 20;

const BACKOFF: [(&str, bool); 2] = [("exponential", true), ("fixed", false)];

#[derive(Default)]
pub(super) struct File<'t> {
    pub store: Store,
    pub limits: Limits,
    pub defaults: Job,
    /// Not read yet: one at a time is enough, and ten thousand would be large.
    pub jobs: Vec<(&'t str, Range<usize>, Node<'t>)>,
}

#[derive(Default)]
pub(super) struct Store {
    /// The expanded text; already known to be good.
    pub url: Given<Url>,
    pub namespace: Given<String>,
    pub username: Given<String>,
    pub password_file: Given<String>,
    pub tls: Given<Tls>,
    pub timeout: Given<Duration>,
    pub pool_size: Given<u32>,
    pub min_replicas: Given<u32>,
    pub retry: Given<Retry>,
}

#[derive(Clone)]
pub(super) struct Url {
    pub text: String,
    pub kind: Kind,
}

#[derive(Clone)]
pub(super) struct Tls {
    pub ca: Given<String>,
    pub cert: Given<String>,
    pub key: Given<String>,
}

#[derive(Default)]
pub(super) struct Limits {
    pub max_parallel: Given<u32>,
    pub drain: Given<Duration>,
    pub clock_drift: Given<f64>,
}

/// Of a store or of a job.
#[derive(Clone)]
pub(super) struct Retry {
    pub attempts: Given<u32>,
    pub interval: Given<Duration>,
    pub exponential: Given<bool>,
    pub max_interval: Given<Duration>,
    pub jitter: Given<bool>,
}

#[derive(Clone)]
pub(super) struct Output {
    pub keep: Given<u64>,
    pub log: Given<bool>,
}

#[derive(Clone)]
pub(super) enum Command {
    Argv(Vec<String>),
    Shell(String),
}

/// Under `[jobs]` or `[defaults]`.
#[derive(Default)]
pub(super) struct Job {
    pub description: Given<String>,
    pub tags: Given<Vec<String>>,
    pub enabled: Given<bool>,
    /// None: not a string.
    pub schedule: Given<Vec<At<Option<String>>>>,
    pub timezone: Given<Zone>,
    pub dst: Given<Dst>,
    pub jitter: Given<Duration>,
    pub command: Given<Command>,
    pub env: Given<Vec<(String, String)>>,
    pub env_file: Given<String>,
    pub pass_env: Given<Vec<String>>,
    pub working_dir: Given<String>,
    pub user: Given<String>,
    pub group: Given<String>,
    pub new_privileges: Given<bool>,
    pub timeout: Given<Duration>,
    pub grace: Given<Duration>,
    pub lease: Given<Duration>,
    pub renew_every: Given<Duration>,
    pub overlap: Given<Overlap>,
    pub on_crash: Given<OnCrash>,
    pub on_state_loss: Given<OnStateLoss>,
    pub max_attempts: Given<u32>,
    pub retry: Given<Retry>,
    pub start_within: Given<Duration>,
    pub catch_up: Given<CatchUp>,
    pub success_codes: Given<Vec<i32>>,
    pub output: Given<Output>,
}

pub(super) fn file<'t>(r: &mut Reader<'t>, root: &'t DeTable<'t>) -> File<'t> {
    let mut top = Table::of(Place::Top, "", root);
    let mut file = File::default();
    if let Some(table) = section(r, &mut top, "store", Place::Store) {
        file.store = store(r, table);
    }
    if let Some(table) = section(r, &mut top, "limits", Place::Limits) {
        file.limits = limits(r, table);
    }
    if let Some(table) = section(r, &mut top, "defaults", Place::Defaults) {
        file.defaults = job(r, table);
    }
    if let Some(table) = section(r, &mut top, "jobs", Place::Jobs) {
        file.jobs = table.names().collect();
    }
    top.later(r, &["http", "notify", "calendars", "include"]);
    top.finish(r, |key| {
        JOB_KEYS
            .contains(&key)
            .then_some("job keys belong below `[jobs.NAME]` or `[defaults]`")
    });
    file
}

/// The job of this name. None when it is not a table, which is reported.
pub(super) fn named_job<'t>(
    r: &mut Reader<'t>,
    name: &'t str,
    span: Range<usize>,
    node: Node<'t>,
) -> Option<Job> {
    if let Err((message, hint)) = job_name(name) {
        r.problems
            .add(Place::Jobs, span, message, Some(hint.into()));
    }
    let field = Field {
        place: Place::Jobs,
        prefix: "",
        key: name,
        node,
    };
    let mut table = Table::open(r, field, "")?;
    table.place_at(Place::Job(name));
    Some(job(r, table))
}

fn section<'t>(
    r: &mut Reader<'t>,
    top: &mut Table<'t>,
    name: &'static str,
    place: Place<'t>,
) -> Option<Table<'t>> {
    let field = top.field(name)?;
    let mut table = Table::open(r, field, "")?;
    table.place_at(place);
    Some(table)
}

fn job_name(name: &str) -> Result<(), (String, &'static str)> {
    const LONGEST: usize = JobName::LONGEST;
    const HINT: &str = "use letters, digits, `-`, `_` and `.`, 1 to 100 of them";
    const { assert!(LONGEST == 100, "the hint says so") };
    if name.is_empty() {
        return Err(("the name of a job must not be empty".into(), HINT));
    }
    if name.len() > LONGEST {
        return Err((
            format!(
                "the name of a job must not have more than {LONGEST} characters, `{}` has {}",
                clipped(name),
                name.chars().count()
            ),
            HINT,
        ));
    }
    match name.chars().find(|c| !JobName::allows(*c)) {
        Some(c) => Err((
            format!(
                "`{}` cannot be the name of a job: it contains `{}`",
                clipped(name),
                c.escape_debug()
            ),
            HINT,
        )),
        None => Ok(()),
    }
}

fn store<'t>(r: &mut Reader<'t>, mut t: Table<'t>) -> Store {
    let store = Store {
        url: t.take(r, "url", store_url),
        namespace: t.take(r, "namespace", namespace),
        username: t.take(r, "username", Reader::filled),
        password_file: t.take(r, "password_file", Reader::filled),
        tls: t.take(r, "tls", |r, field| {
            let mut t = Table::open(r, field, "tls.")?;
            let tls = Tls {
                ca: t.take(r, "ca", Reader::filled),
                cert: t.take(r, "cert", Reader::filled),
                key: t.take(r, "key", Reader::filled),
            };
            t.finish(r, |_| None);
            Some(tls)
        }),
        timeout: t.take(r, "timeout", Reader::patience),
        pool_size: t.take(r, "pool_size", |r, f| r.count(f, 1..=1000)),
        min_replicas: t.take(r, "min_replicas", |r, f| r.count(f, 0..=100)),
        retry: t.take(r, "retry", |r, f| retry(r, f, true)),
    };
    if let Some(field) = t.field("urls") {
        let message = "`urls` (quorum mode) is not supported yet by this version".into();
        r.problems.add(
            Place::Store,
            field.node.span(),
            message,
            Some("name one store with `url`".into()),
        );
    }
    t.finish(r, |key| match key {
        "password" => Some("put the password into a file and name it in `password_file`"),
        "max_parallel" | "drain" | "clock_drift" => Some("this key belongs below `[limits]`"),
        _ => None,
    });
    store
}

fn store_url(r: &mut Reader<'_>, field: Field<'_>) -> Option<Url> {
    let text = r.string(field)?;
    let kind = match url::parse(&text) {
        Ok(kind) => kind,
        Err(error) => {
            // After an expansion the place in the file is not the place in the text.
            let expanded = field.node.get_ref().as_str() != Some(text.as_str());
            let span = if expanded {
                field.node.span()
            } else {
                r.inside(field.node, &error.span)
            };
            r.problems.add(
                field.place,
                span,
                format!("`{field}`: {}", error.message),
                error.hint,
            );
            return None;
        }
    };
    Some(Url { text, kind })
}

fn namespace(r: &mut Reader<'_>, field: Field<'_>) -> Option<String> {
    let text = r.filled(field)?;
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    if text.len() > 100 || !text.chars().all(good) {
        // Braces would move the hash tag that keeps a job's keys together.
        let hint = "use letters, digits, `-`, `_`, `.` and `:`, up to 100 of them";
        r.wrong(
            field,
            "cannot be the prefix of keys".into(),
            hint.to_owned(),
        );
        return None;
    }
    Some(text)
}

fn limits<'t>(r: &mut Reader<'t>, mut t: Table<'t>) -> Limits {
    let limits = Limits {
        max_parallel: t.take(r, "max_parallel", |r, f| r.count(f, 1..=1_000_000)),
        drain: t.take(r, "drain", Reader::duration),
        clock_drift: t.take(r, "clock_drift", |r, f| {
            let drift = r.number(f)?;
            if !(0.0..=0.2).contains(&drift) {
                let hint =
                    "it is the share by which the rates of two clocks differ: 0.01 is one percent";
                r.wrong(
                    f,
                    format!("must be between 0 and 0.2, not {drift}"),
                    hint.to_owned(),
                );
                return None;
            }
            Some(drift)
        }),
    };
    t.finish(r, |_| None);
    limits
}

fn retry<'t>(r: &mut Reader<'t>, field: Field<'t>, of_store: bool) -> Option<Retry> {
    let mut t = Table::open(r, field, "retry.")?;
    let retry = Retry {
        // One more than these is the number of attempts, and that must fit into a fencing token.
        attempts: t.take(r, "attempts", |r, f| r.count(f, 0..=998)),
        interval: t.take(r, "interval", Reader::duration),
        exponential: t.take(r, "backoff", |r, f| r.word(f, &BACKOFF)),
        max_interval: t.take(r, "max_interval", Reader::duration),
        jitter: if of_store {
            t.take(r, "jitter", Reader::boolean)
        } else {
            Given::Absent
        },
    };
    t.finish(r, |_| None);
    if let (Some(interval), Some(most)) = (retry.interval.value(), retry.max_interval.read())
        && *interval > most.value
    {
        let message = "`retry.max_interval` is shorter than `retry.interval`".into();
        r.problems
            .add(field.place, most.span.clone(), message, None);
    }
    Some(retry)
}

/// All that [`job`] takes.
pub(super) const JOB_KEYS: [&str; 28] = [
    "description",
    "tags",
    "enabled",
    "schedule",
    "timezone",
    "dst",
    "jitter",
    "command",
    "env",
    "env_file",
    "pass_env",
    "working_dir",
    "user",
    "group",
    "new_privileges",
    "timeout",
    "grace",
    "lease",
    "renew_every",
    "overlap",
    "on_crash",
    "on_state_loss",
    "max_attempts",
    "retry",
    "start_within",
    "catch_up",
    "success_codes",
    "output",
];

fn job<'t>(r: &mut Reader<'t>, mut t: Table<'t>) -> Job {
    let job = Job {
        description: t.take(r, "description", Reader::string),
        tags: t.take(r, "tags", |r, f| {
            let tags = r.list(f, "a list of strings", Reader::filled)?;
            Some(tags.into_iter().map(|tag| tag.value).collect())
        }),
        enabled: t.take(r, "enabled", Reader::boolean),
        // One that is not a string does not keep the others from being judged.
        schedule: t.take(r, "schedule", |r, f| {
            r.one_or_more(f, |r, f| Some(r.string(f)))
        }),
        timezone: t.take(r, "timezone", Reader::zone),
        dst: t.take(r, "dst", dst),
        jitter: t.take(r, "jitter", Reader::duration),
        command: t.take(r, "command", command),
        env: t.take(r, "env", env),
        env_file: t.take(r, "env_file", Reader::filled),
        pass_env: t.take(r, "pass_env", |r, f| {
            let names = r.list(f, "a list of strings", |r, f| {
                let name = r.string(f)?;
                if let Err((message, hint)) = env_name(&name) {
                    r.wrong(f, message, hint.to_owned());
                    return None;
                }
                Some(name)
            })?;
            Some(names.into_iter().map(|name| name.value).collect())
        }),
        working_dir: t.take(r, "working_dir", Reader::filled),
        user: t.take(r, "user", Reader::filled),
        group: t.take(r, "group", Reader::filled),
        new_privileges: t.take(r, "new_privileges", Reader::boolean),
        timeout: t.take(r, "timeout", Reader::span_of_time),
        grace: t.take(r, "grace", Reader::duration),
        lease: t.take(r, "lease", |r, f| {
            let why = "a shorter one leaves no time to end a command before another instance may start it";
            r.at_least(f, crate::logic::lease::SHORTEST, why)
        }),
        renew_every: t.take(r, "renew_every", |r, f| {
            let why = "leave it out: it follows from `lease`";
            r.at_least(f, crate::logic::lease::SHORTEST_RENEWAL, why)
        }),
        overlap: t.take(r, "overlap", |r, f| {
            let words = [
                ("skip", Overlap::Skip),
                ("queue", Overlap::Queue),
                ("replace", Overlap::Replace),
                ("allow", Overlap::Allow),
            ];
            r.word(f, &words)
        }),
        on_crash: t.take(r, "on_crash", |r, f| {
            r.word(f, &[("fail", OnCrash::Fail), ("rerun", OnCrash::Rerun)])
        }),
        on_state_loss: t.take(r, "on_state_loss", |r, f| {
            r.word(
                f,
                &[("skip", OnStateLoss::Skip), ("rerun", OnStateLoss::Rerun)],
            )
        }),
        max_attempts: t.take(r, "max_attempts", |r, f| r.count(f, 1..=999)),
        retry: t.take(r, "retry", |r, f| retry(r, f, false)),
        start_within: t.take(r, "start_within", Reader::span_of_time),
        catch_up: t.take(r, "catch_up", |r, f| {
            r.word(
                f,
                &[
                    ("latest", CatchUp::Latest),
                    ("all", CatchUp::All),
                    ("none", CatchUp::None),
                ],
            )
        }),
        success_codes: t.take(r, "success_codes", success_codes),
        output: t.take(r, "output", |r, f| {
            let mut t = Table::open(r, f, "output.")?;
            let output = Output {
                keep: t.take(r, "keep", |r, f| r.size(f, MOST_OUTPUT)),
                log: t.take(r, "log", Reader::boolean),
            };
            t.finish(r, |_| None);
            Some(output)
        }),
    };
    t.later(r, &["http", "notify", "hosts", "prefer", "exclude", "only"]);
    // What other schedulers call it.
    t.finish(r, |key| match key {
        "cmd" | "exec" | "run" | "script" | "shell" => Some("did you mean `command`?"),
        "cron" | "crontab" | "at" | "every" => Some("did you mean `schedule`?"),
        "tz" => Some("did you mean `timezone`?"),
        "cwd" | "dir" | "workdir" => Some("did you mean `working_dir`?"),
        "concurrency" => Some("did you mean `overlap`?"),
        "retries" => Some("did you mean `retry`?"),
        _ => None,
    });
    job
}

fn dst<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Dst> {
    let mut t = Table::open(r, field, "dst.")?;
    let gap = t.take(r, "gap", |r, f| {
        r.word(f, &[("shift", Gap::Shift), ("skip", Gap::Skip)])
    });
    let overlap = t.take(r, "overlap", |r, f| {
        r.word(
            f,
            &[
                ("first", Fold::First),
                ("second", Fold::Second),
                ("both", Fold::Both),
            ],
        )
    });
    t.finish(r, |_| None);
    Some(Dst {
        gap: gap.optional()?,
        overlap: overlap.optional()?,
    })
}

fn command<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Command> {
    if field.node.get_ref().as_str().is_some() {
        let line = r.argument(field)?;
        if line.trim().is_empty() {
            r.wrong(field, "must not be empty".into(), None);
            return None;
        }
        return Some(Command::Shell(line));
    }
    let argv = r.list(
        field,
        "a string (for the shell) or a list of strings",
        Reader::argument,
    );
    let written = field.node.get_ref().as_array();
    if written.is_some_and(|argv| {
        argv.first()
            .is_none_or(|first| first.get_ref().as_str() == Some(""))
    }) {
        r.wrong(
            field,
            "the program to run is missing".into(),
            Some("write `[\"/usr/bin/program\", \"argument\"]`".into()),
        );
        return None;
    }
    Some(Command::Argv(
        argv?.into_iter().map(|arg| arg.value).collect(),
    ))
}

fn env<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<(String, String)>> {
    let table = Table::open(r, field, "env.")?;
    let read: Vec<_> = table
        .names()
        .map(|(name, span, node)| {
            if let Err((message, hint)) = env_name(name) {
                r.problems.add(
                    field.place,
                    span,
                    format!("`{field}`: {message}"),
                    Some(hint.into()),
                );
                return None;
            }
            let value = r.argument(Field {
                place: field.place,
                prefix: "env.",
                key: name,
                node,
            })?;
            Some((name.to_owned(), value))
        })
        .collect();
    read.into_iter().collect()
}

/// What may be the name of an environment variable of a command.
pub(super) fn env_name(name: &str) -> Result<(), (String, &'static str)> {
    if name.is_empty()
        || name.contains(['=', '\0'])
        || name.chars().any(|c| c.is_whitespace() || c.is_control())
    {
        let message = format!(
            "`{}` cannot be the name of an environment variable",
            clipped(name)
        );
        return Err((message, "use letters, digits and `_`"));
    }
    if name.starts_with("SOLOIST_") {
        let message = format!("`{}` is set by soloist itself", clipped(name));
        return Err((message, "use a name that does not start with `SOLOIST_`"));
    }
    Ok(())
}

fn success_codes<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<i32>> {
    let codes = r.list(field, "a list of exit codes", |r, f| r.integer(f, 0..=255))?;
    if codes.is_empty() {
        r.wrong(
            field,
            "must not be empty: no run could succeed".into(),
            Some("write `[0]`".into()),
        );
        return None;
    }
    let mut codes: Vec<i32> = codes
        .into_iter()
        .filter_map(|code| i32::try_from(code.value).ok())
        .collect();
    codes.sort_unstable();
    codes.dedup();
    Some(codes)
}
