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
    url::{self as store_urls, Kind},
};
use crate::{
    logic::{notify::Kind as Told, schedule::Dst},
    model::is_name,
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
    if !is_name(name) {
        let message = format!("`{}` cannot be the name of a job", clipped(name));
        let hint = "use letters, digits, `-`, `_` and `.`, 1 to 100 of them, and not `.` or `..`";
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
    table.finish(r, |_| None);
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

fn store<'t>(r: &mut Reader<'t>, mut t: Table<'t>) -> Store {
    let store = Store::take(r, &mut t);
    t.finish(r, |key| match key {
        "password" => Some("put the password into a file and name it in `password_file`"),
        _ => None,
    });
    store
}

pub(super) fn store_url(r: &mut Reader<'_>, field: Field<'_>) -> Option<Url> {
    let text = r.string(field)?;
    let kind = match store_urls::parse(&text) {
        Ok(kind) => kind,
        Err(error) => {
            r.wrong(field, error.message, error.hint);
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
    let page = http_url(&text).filter(|url| {
        url.username().is_empty() && url.query().is_none() && url.fragment().is_none()
    });
    if page.is_none() {
        let hint = "write `https://soloist.example.org`".to_owned();
        r.wrong(field, "not the address of a page".to_owned(), hint);
        return None;
    }
    Some(text.trim_end_matches('/').to_owned())
}

/// The address of a server that speaks HTTP; it may have user and password.
fn http_url(text: &str) -> Option<url::Url> {
    let rest = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"))?;
    // `url` would encode these, and its reader would not. A brace would be a placeholder that nobody filled in.
    let odd = |c: char| !c.is_ascii_graphic() || "\"<>\\^`{}".contains(c);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if text.contains(odd) || authority.is_empty() || authority.matches('@').count() > 1 {
        return None;
    }
    let url = url::Url::parse(text).ok()?;
    (url.password().is_none() || !url.username().is_empty()).then_some(url)
}

/// `text` is the address of a server that speaks HTTP, without user and password.
pub(crate) fn is_http_url(text: &str) -> bool {
    http_url(text).is_some_and(|url| url.username().is_empty())
}

const MAIL_SERVER: &str = "write `smtps://USER:PASSWORD@HOST`, `smtp+starttls://…` or, without encryption, \
                           `smtp://HOST:25`; escape `@`, `:` and `/` in user and password, as in `%40`";

/// What is wrong with the address of a server that speaks HTTP, and what to write. The texts repeat no part of it.
pub(super) fn address(text: &str) -> Result<(), (&'static str, &'static str)> {
    let hint = "write `https://host/path` or `https://USER:PASSWORD@host/path`, and escape `@`, `:`, `/` and `%` in user \
                and password, as in `%40`";
    http_url(text)
        .map(drop)
        .ok_or(("not the address of a server", hint))
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
    let server = url::Url::parse(&text).ok().filter(|url| {
        ["smtps", "smtp+starttls", "smtp"].contains(&url.scheme())
            && url.host_str().is_some_and(|host| !host.is_empty())
            && ["", "/"].contains(&url.path())
            && url.query().is_none()
            && url.fragment().is_none()
    });
    if server.is_none() {
        let message = "not the address of a mail server".to_owned();
        r.wrong(field, message, MAIL_SERVER.to_owned());
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
    t.finish(r, |_| None);
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
