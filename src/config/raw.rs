//! The configuration as written: reads each key by itself and combines nothing. Finds the problems of single values.

use std::{
    ops::{Range, RangeInclusive},
    time::Duration,
};

use toml::de::DeTable;

use super::{
    Command, Listen, Sends,
    keys::{DstWords, Http, Job, JobRetry, Keys, Limits, Notify, Store, StoreRetry},
    notify::KINDS,
    report::Place,
    tree::{At, Field, Given, Node, Reader, Table, clipped},
    url::{self, Kind},
};
use crate::{
    logic::{notify::Kind as Told, schedule::Dst},
    model::{JobName, is_dots},
};

#[derive(Default)]
pub(super) struct File<'t> {
    pub store: Store,
    pub limits: Limits,
    /// None: there is no `[http]`. With the place of its header.
    pub http: Option<At<Http>>,
    /// Not read yet.
    pub channels: Vec<(&'t str, Range<usize>, Node<'t>)>,
    pub defaults: Job,
    /// Not read yet: jobs are read one at a time, because ten thousand would need much memory.
    pub jobs: Vec<(&'t str, Range<usize>, Node<'t>)>,
}

/// The expanded text of a store's URL, which is known to be valid.
#[derive(Clone)]
pub(super) struct Url {
    pub text: String,
    pub kind: Kind,
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
    if let Some(field) = top.field("http")
        && let Some(mut table) = Table::open(r, field, "")
    {
        table.place_at(Place::Http);
        let value = http(r, table);
        let span = field.node.span();
        file.http = Some(At { value, span });
    }
    if let Some(table) = section(r, &mut top, "notify", Place::Notify) {
        file.channels = table.names().collect();
    }
    if let Some(table) = section(r, &mut top, "defaults", Place::Defaults) {
        file.defaults = job(r, table);
    }
    if let Some(table) = section(r, &mut top, "jobs", Place::Jobs) {
        file.jobs = table.names().collect();
    }
    top.later(r, &["calendars", "include"]);
    top.finish(r, |key| {
        Job::NAMES
            .contains(&key)
            .then_some("job keys belong below `[jobs.NAME]` or `[defaults]`")
    });
    file
}

/// The job of this name. None: it is not a table, which is reported.
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

/// The keys of a channel that say where its messages go, and with which keys and passwords.
const WHERE: [&str; 8] = [
    "url",
    "url_file",
    "routing_key",
    "routing_key_file",
    "smtp",
    "from",
    "to",
    "command",
];

/// The channel of this name. None: it is not a table, which is reported.
pub(super) fn named_channel<'t>(
    r: &mut Reader<'t>,
    name: &'t str,
    span: Range<usize>,
    node: Node<'t>,
) -> Option<Notify> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 100 || !name.chars().all(fits) {
        let message = format!("`{}` cannot be the name of a channel", clipped(name));
        let hint = "use letters, digits, `-`, `_` and `.`, 1 to 100 of them";
        r.problems
            .add(Place::Notify, span, message, Some(hint.into()));
    }
    let field = Field {
        place: Place::Notify,
        prefix: "",
        key: name,
        node,
    };
    let mut table = Table::open(r, field, "")?;
    table.place_at(Place::Channel(name));
    if !r.sends.over(name) {
        table.pass(r, &WHERE);
    }
    let channel = Notify::take(r, &mut table);
    table.finish(r, |key| match key {
        "webhook" | "webhook_url" | "endpoint" => Some("did you mean `url`?"),
        "server" | "host" | "relay" => Some("did you mean `smtp`?"),
        "cmd" | "exec" => Some("did you mean `command`?"),
        "events" | "when" => Some("did you mean `on`?"),
        "username" | "password" => Some(MAIL_LOGIN),
        _ => None,
    });
    Some(channel)
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
    if is_dots(name) {
        return Err((
            format!(
                "`{name}` cannot be the name of a job: in an address it stands for a directory"
            ),
            "choose another name",
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
    let store = Store::take(r, &mut t);
    // Not one of the keys that a hint names.
    if let Some(field) = t.refused("urls") {
        let message = "this version does not support `urls` (quorum mode) yet".into();
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

pub(super) fn store_url(r: &mut Reader<'_>, field: Field<'_>) -> Option<Url> {
    let text = r.string(field)?;
    let kind = match url::parse(&text) {
        Ok(kind) => kind,
        Err(error) => {
            // After an expansion, positions in the text are not positions in the file.
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

pub(super) fn namespace(r: &mut Reader<'_>, field: Field<'_>) -> Option<String> {
    let text = r.filled(field)?;
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    if text.len() > 100 || !text.chars().all(good) {
        // Braces would change the hash tag that keeps a job's keys on one server.
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
    let limits = Limits::take(r, &mut t);
    t.finish(r, |_| None);
    limits
}

fn http<'t>(r: &mut Reader<'t>, mut t: Table<'t>) -> Http {
    let http = Http::take(r, &mut t);
    t.finish(r, |key| match key {
        "address" | "bind" | "port" | "host" | "socket" => Some("did you mean `listen`?"),
        "token" | "tokens" | "password" => {
            Some("put the hashes of tokens into a file and name it in `tokens_file`")
        }
        _ => None,
    });
    http
}

/// Longer paths do not fit into the address of a socket; bytes.
const SOCKET_PATH_MOST: usize = 107;

pub(super) fn listen(r: &mut Reader<'_>, field: Field<'_>) -> Option<Listen> {
    let text = r.filled(field)?;
    if let Some(path) = text.strip_prefix("unix:") {
        // Joined to the folder of the configuration, nothing would name that folder.
        let names_file = !path.is_empty() && !path.ends_with('/');
        // The socket is made beside its place, under a longer name.
        let path = r.dir.join(path);
        let length = path.as_os_str().len() + Listen::WHILE_MADE;
        if !names_file || path.file_name().is_none() || length > SOCKET_PATH_MOST {
            let most = SOCKET_PATH_MOST - Listen::WHILE_MADE;
            let message =
                format!("the path of a socket must name a file, and have at most {most} bytes");
            r.wrong(
                field,
                message,
                "use a shorter path, as `unix:/run/soloist/http.sock`".to_owned(),
            );
            return None;
        }
        return Some(Listen::Unix(path));
    }
    let named = text
        .strip_prefix("localhost:")
        .map(|port| format!("127.0.0.1:{port}"));
    match named.as_deref().unwrap_or(&text).parse() {
        Ok(address) => Some(Listen::Tcp(address)),
        Err(_) => {
            let message = "not an address with a port, and not `unix:PATH`".to_owned();
            let hint = match text.strip_prefix(':').map(str::parse::<u16>) {
                Some(Ok(port)) => format!("write `127.0.0.1:{port}` for this host alone, or `[::]:{port}`"),
                _ => "write `127.0.0.1:7878`, `[::1]:7878`, `[::]:7878` or `unix:/run/soloist/http.sock`".to_owned(),
            };
            r.wrong(field, message, hint);
            None
        }
    }
}

pub(super) fn public_url(r: &mut Reader<'_>, field: Field<'_>) -> Option<String> {
    let text = r.filled(field)?;
    let rest = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"));
    let bad = |c: char| c.is_whitespace() || c.is_control() || "@?#\\\"'<>".contains(c);
    match rest.and_then(|rest| rest.split('/').next()) {
        Some(host) if !host.is_empty() && !text.contains(bad) => {
            Some(text.trim_end_matches('/').to_owned())
        }
        _ => {
            let message = "not the address of a page".to_owned();
            r.wrong(
                field,
                message,
                "write `https://soloist.example.org`".to_owned(),
            );
            None
        }
    }
}

/// `text` is the address of a server that speaks HTTP: its host is not empty.
pub(crate) fn is_http_url(text: &str) -> bool {
    let rest = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"));
    let host = rest.and_then(|rest| rest.split(['/', '?', '#']).next());
    let bad =
        // A brace would be a placeholder that nobody filled in.
        |c: char| c.is_whitespace() || c.is_control() || !c.is_ascii() || "\"<>\\^`{}".contains(c);
    host.is_some_and(|host| !host.is_empty() && !host.contains('@')) && !text.contains(bad)
}

const HTTP_URL: &str = "write `https://host/path`";
const ESCAPED: &str = "write `https://USER:PASSWORD@host/path`, and escape `@`, `:`, `/` and `%` in user and password, \
                       as in `%40`";
const MAIL_SERVER: &str = "write `smtps://USER:PASSWORD@HOST`, `smtp+starttls://…` or, without encryption, \
                           `smtp://HOST:25`; escape `@`, `:` and `/` in user and password, as in `%40`";
const MAIL_LOGIN: &str =
    "write them into `smtp`, from the environment: `smtps://${USER}:${PASSWORD}@HOST`";

const NO_PORT: &str = "the port of the address is no number from 1 to 65535";

/// This host is followed by a port that cannot be one.
fn odd_port(host: &str) -> bool {
    let possible = |port: &str| {
        port.is_empty()
            || port.bytes().all(|b| b.is_ascii_digit())
                && port.parse::<std::num::NonZeroU16>().is_ok()
    };
    let port = host.rsplit_once(':').map(|(_, port)| port);
    port.is_some_and(|port| !port.ends_with(']') && !possible(port))
}

/// Checks the address of an HTTP server; an error says what to write instead. The address may have user and password.
/// The texts repeat no part of it.
pub(super) fn address(text: &str) -> Result<(), (&'static str, &'static str)> {
    let wrong = "not the address of a server";
    let Some((scheme, rest)) = text.split_once("://") else {
        return Err((wrong, HTTP_URL));
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let host = match authority.rsplit_once('@') {
        None => authority,
        Some((login, _)) if login.contains('@') => {
            return Err(("user or password of the address has a bare `@`", ESCAPED));
        }
        Some((login, _)) if login.is_empty() || login.starts_with(':') => {
            return Err(("the address has a password and no user", ESCAPED));
        }
        Some((_, host)) => host,
    };
    if odd_port(host) {
        return Err(match path.contains('@') {
            true => (
                "user or password of the address has a bare `/`, `?` or `#`",
                ESCAPED,
            ),
            false => (NO_PORT, HTTP_URL),
        });
    }
    match is_http_url(&format!("{scheme}://{host}{path}")) && is_http_url(&text.replace('@', "")) {
        true => Ok(()),
        false => Err((wrong, HTTP_URL)),
    }
}

pub(super) fn channel_url(r: &mut Reader<'_>, field: Field<'_>) -> Option<String> {
    let text = r.filled(field)?;
    if let Err((message, hint)) = address(&text) {
        r.wrong(field, message.to_owned(), hint.to_owned());
        return None;
    }
    Some(text)
}

/// As written, with the variables expanded: `{job}` is filled in for each job.
pub(super) fn heartbeat_url(r: &mut Reader<'_>, field: Field<'_>) -> Option<String> {
    if r.sends != Sends::All
        && let Some(text) = field.node.get_ref().as_str()
    {
        r.note_variables(field.node.get_ref());
        return Some(text.to_owned());
    }
    let text = r.expanded(field)?;
    if let Err((message, hint)) = address(&text.replace("{job}", "job")) {
        r.wrong(field, message.to_owned(), hint.to_owned());
        return None;
    }
    Some(text)
}

pub(super) fn smtp(r: &mut Reader<'_>, field: Field<'_>) -> Option<String> {
    let text = r.filled(field)?;
    let rest = ["smtps://", "smtp+starttls://", "smtp://"]
        .iter()
        .find_map(|scheme| text.strip_prefix(scheme));
    let bad = |c: char| c.is_whitespace() || c.is_control();
    let host = rest.map(|rest| rest.rsplit('@').next().unwrap_or_default());
    let (host, rest) = match host {
        Some(host) => host.split_at(host.find(['/', '?', '#']).unwrap_or(host.len())),
        None => ("", ""),
    };
    if host.is_empty() || host.starts_with(':') || !["", "/"].contains(&rest) || text.contains(bad)
    {
        r.wrong(
            field,
            "not the address of a mail server".to_owned(),
            MAIL_SERVER.to_owned(),
        );
        return None;
    }
    if odd_port(host) {
        r.wrong(field, NO_PORT.to_owned(), MAIL_SERVER.to_owned());
        return None;
    }
    Some(text)
}

pub(super) fn mailbox(r: &mut Reader<'_>, field: Field<'_>) -> Option<String> {
    let text = r.filled(field)?;
    // What stands in angle brackets, or all.
    let address = match text.split_once('<') {
        Some((_, rest)) => rest.strip_suffix('>').unwrap_or_default(),
        None => &text,
    };
    let bad = |c: char| c.is_whitespace() || c.is_control() || "<>,;\"".contains(c);
    let sound = address
        .rsplit_once('@')
        .is_some_and(|(user, host)| !user.is_empty() && !host.is_empty() && !address.contains(bad));
    if !sound || text.contains(char::is_control) {
        let hint = "write `ann@example.org` or `Ann <ann@example.org>`";
        r.wrong(field, "not a mail address".to_owned(), hint.to_owned());
        return None;
    }
    Some(text)
}

pub(super) fn mailboxes<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<String>> {
    let all = r.one_or_more(field, mailbox)?;
    if all.is_empty() {
        r.wrong(field, "must not be empty".into(), None);
        return None;
    }
    Some(all.into_iter().map(|at| at.value).collect())
}

pub(super) fn channel_command<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<String>> {
    let argv = r.list(field, "a list of strings", Reader::argument)?;
    let argv: Vec<String> = argv.into_iter().map(|at| at.value).collect();
    if argv.first().is_none_or(String::is_empty) {
        let hint = "write `[\"/usr/bin/program\", \"argument\"]`";
        r.wrong(
            field,
            "the program to run is missing".into(),
            hint.to_owned(),
        );
        return None;
    }
    Some(argv)
}

pub(super) fn kinds<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<Told>> {
    let kinds = r.list(field, "a list of strings", |r, f| r.word(f, KINDS))?;
    if kinds.is_empty() {
        let hint = "leave the key out, or the channel out of `notify`";
        r.wrong(
            field,
            "must not be empty: nothing would be told".into(),
            hint.to_owned(),
        );
        return None;
    }
    Some(kinds.into_iter().map(|at| at.value).collect())
}

/// Whether there are such channels is checked with the job.
pub(super) fn channels<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<String>> {
    let names = r.list(field, "a list of names of channels", Reader::filled)?;
    let mut names: Vec<String> = names.into_iter().map(|at| at.value).collect();
    names.sort();
    names.dedup();
    Some(names)
}

/// A table within a table.
pub(super) fn sub<'t, T: Keys>(
    r: &mut Reader<'t>,
    field: Field<'t>,
    prefix: &'static str,
) -> Option<T> {
    let mut t = Table::open(r, field, prefix)?;
    let sub = T::take(r, &mut t);
    t.finish(r, |_| None);
    Some(sub)
}

pub(super) const DRIFT: RangeInclusive<f64> = 0.0..=0.2;

pub(super) fn clock_drift(r: &mut Reader<'_>, field: Field<'_>) -> Option<f64> {
    let drift = r.number(field)?;
    if !DRIFT.contains(&drift) {
        let hint = "it is the share by which the rates of two clocks differ: 0.01 is one percent";
        let message = format!("must be between 0 and {}, not {drift}", DRIFT.end());
        r.wrong(field, message, hint.to_owned());
        return None;
    }
    Some(drift)
}

pub(super) fn store_retry<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<StoreRetry> {
    let retry: StoreRetry = sub(r, field, "retry.")?;
    pauses(r, field, &retry.interval, &retry.max_interval);
    Some(retry)
}

pub(super) fn job_retry<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<JobRetry> {
    let retry: JobRetry = sub(r, field, "retry.")?;
    pauses(r, field, &retry.interval, &retry.max_interval);
    Some(retry)
}

fn pauses(r: &mut Reader<'_>, field: Field<'_>, first: &Given<Duration>, most: &Given<Duration>) {
    if let (Some(first), Some(most)) = (first.value(), most.read())
        && *first > most.value
    {
        let message = "`retry.max_interval` is shorter than `retry.interval`".into();
        r.problems
            .add(field.place, most.span.clone(), message, None);
    }
}

fn job<'t>(r: &mut Reader<'t>, mut t: Table<'t>) -> Job {
    let job = Job::take(r, &mut t);
    t.later(r, &["http", "hosts", "prefer", "exclude", "only"]);
    // The names that other schedulers use.
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

/// An element that is not a string does not keep the others from being checked.
pub(super) fn schedules<'t>(
    r: &mut Reader<'t>,
    field: Field<'t>,
) -> Option<Vec<At<Option<String>>>> {
    r.one_or_more(field, |r, f| Some(r.string(f)))
}

pub(super) fn tags<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<String>> {
    let tags = r.list(field, "a list of strings", Reader::filled)?;
    Some(tags.into_iter().map(|tag| tag.value).collect())
}

pub(super) fn env_names<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<String>> {
    let names = r.list(field, "a list of strings", |r, f| {
        let name = r.string(f)?;
        if let Err((message, hint)) = env_name(&name) {
            r.wrong(f, message, hint.to_owned());
            return None;
        }
        Some(name)
    })?;
    Some(names.into_iter().map(|name| name.value).collect())
}

pub(super) fn dst<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Dst> {
    let words: DstWords = sub(r, field, "dst.")?;
    Some(Dst {
        gap: words.gap.optional()?,
        overlap: words.overlap.optional()?,
    })
}

pub(super) fn command<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Command> {
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

pub(super) fn env<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<(String, String)>> {
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

/// Whether this can be the name of an environment variable of a command.
pub(super) fn env_name(name: &str) -> Result<(), (String, &'static str)> {
    if name.is_empty()
        || name.contains(['=', '\0'])
        || name.chars().any(|c| c.is_whitespace() || c.is_control())
    {
        // What follows `=` is a value, which may be secret.
        let shown = match name.split_once('=') {
            Some((name, _)) => format!("{}=...", clipped(name)),
            None => clipped(name),
        };
        let message = format!("`{shown}` cannot be the name of an environment variable");
        return Err((message, "use letters, digits and `_`"));
    }
    if name.starts_with("SOLOIST_") {
        let message = format!("`{}` is set by soloist itself", clipped(name));
        return Err((message, "use a name that does not start with `SOLOIST_`"));
    }
    Ok(())
}

pub(super) fn success_codes<'t>(r: &mut Reader<'t>, field: Field<'t>) -> Option<Vec<i32>> {
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
