//! Turns the configuration as written into the checked one: defaults, contradictions, other files, schedules.

use std::{
    borrow::Borrow,
    collections::{BTreeMap, HashMap, HashSet},
    hash::Hash,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use super::{
    Alarms, Channel, Channels, Config, HiddenUrl, Http, HttpTls, Job, JobRetry, Lease, Limits,
    Listen, Output, Secret, Store, StoreRetry, StoreUrl, Tls, Way,
    advice::{Places, Spots},
    digest,
    keys::{self, Backoff, Keys},
    named, nearest,
    notify::{PAGERDUTY, Type},
    raw,
    report::Place,
    rights, tokens,
    tree::{At, Given, Reader, Zone, inside},
    url::Kind,
};
use crate::{
    logic::{
        claim::OnCrash,
        notify::Rules,
        schedule::{Dst, Schedule},
    },
    model::JobName,
};

/// A message does not show a longer path: most likely it is the content of a file; bytes.
const LONGEST_PATH: usize = 1000;

/// Variables that are never secret, and that every command needs.
const LOGIN: [&str; 6] = ["HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG"];

/// The data that all jobs share while they are checked.
struct Shared<'t> {
    defaults: &'t keys::Job,
    store_timeout: &'t Given<Duration>,
    clock_drift: &'t Given<f64>,
    /// The names of the channels, sound or not.
    channels: Vec<&'t str>,
    /// `env_file` and `env` of the defaults.
    env: Option<Arc<BTreeMap<String, String>>>,
    utc: Zone,
    schedules: HashMap<ScheduleKey, Arc<Schedule>>,
    /// Shared lists, by the addresses of their schedules; `schedules` keeps these schedules alive.
    lists: HashMap<Vec<usize>, Parsed>,
    texts: HashSet<Arc<[String]>>,
    codes: HashSet<Arc<[i32]>>,
    words: HashSet<Arc<str>>,
    paths: HashSet<Arc<Path>>,
    leases: HashSet<Arc<Lease>>,
    retries: HashSet<Arc<JobRetry>>,
    alarms: HashSet<Arc<Alarms>>,
    envs: HashSet<Arc<BTreeMap<String, String>>>,
    /// Each file is checked once.
    env_files: HashMap<PathBuf, Option<Variables>>,
}

/// The text, the zone, the rules for daylight saving, and the job's name if the schedule depends on it.
type ScheduleKey = (String, Arc<str>, Dst, Option<String>);
/// The schedules of one job.
type Parsed = Arc<[Arc<Schedule>]>;
type Variables = Arc<[(String, String)]>;

/// The checked configuration. None: there is a problem, which `r` has.
// Long: each table of the file in turn.
pub(super) fn config<'t>(
    r: &mut Reader<'t>,
    file: raw::File<'t>,
    mut places: Option<&mut Spots>,
) -> Option<Config> {
    let store = store(r, &file.store);
    let limits = limits(&file.limits);
    let http = http(r, file.http.as_ref());
    let channels = channels(r, &file.channels);
    if let Some(places) = places.as_deref_mut() {
        let spans = file.channels.iter();
        places.channels = spans
            .map(|(name, span, _)| ((*name).to_owned(), span.clone()))
            .collect();
    }
    let mut shared = Shared {
        defaults: &file.defaults,
        store_timeout: &file.store.timeout,
        clock_drift: &file.limits.clock_drift,
        channels: file.channels.iter().map(|(name, ..)| *name).collect(),
        env: None,
        utc: Zone {
            name: "UTC".into(),
            tz: jiff::tz::TimeZone::UTC,
        },
        schedules: HashMap::new(),
        lists: HashMap::new(),
        texts: HashSet::new(),
        codes: HashSet::new(),
        words: HashSet::new(),
        paths: HashSet::new(),
        leases: HashSet::new(),
        retries: HashSet::new(),
        alarms: HashSet::new(),
        envs: HashSet::new(),
        env_files: HashMap::new(),
    };
    shared.env = environment(
        r,
        &mut shared.env_files,
        Place::Defaults,
        &file.defaults,
        BTreeMap::new(),
    )
    .map(Arc::new);
    if let Given::Read(default) = &file.defaults.schedule {
        // UTC and no job will do: only `@at` depends on more than the text.
        let utc = shared.utc.clone();
        schedules(
            r,
            &mut shared,
            Place::Defaults,
            "",
            &default.value,
            &utc,
            Dst::default(),
        );
    }
    let mut jobs = BTreeMap::new();
    for (name, span, node) in &file.jobs {
        let Some(raw) = raw::named_job(r, name, span.clone(), node) else {
            continue;
        };
        let name = At {
            value: *name,
            span: span.clone(),
        };
        if let Some(job) = job(r, &mut shared, &name, &raw) {
            if let Some(places) = places.as_deref_mut() {
                let of_job = Places::of(&name, &raw, &file.defaults);
                places.jobs.insert(job.name.clone(), of_job);
            }
            jobs.insert(job.name.clone(), Arc::new(job));
        }
    }
    // Check the defaults even if no job uses them.
    if file.jobs.is_empty() {
        alarms(r, &mut shared, Place::Defaults, "", &keys::Job::default());
        let nobody = At {
            value: "",
            span: 0..0,
        };
        lease(r, &shared, Place::Defaults, &keys::Job::default(), &nobody);
    }
    let mut config = Config {
        store: store?,
        limits: limits?,
        http: http?,
        channels,
        default_channels: file.defaults.notify.or_usual(&keys::Job::usual().notify)?,
        jobs,
        store_variables: r
            .variables
            .iter()
            .filter(|name| !LOGIN.contains(&name.as_str()))
            .cloned()
            .collect(),
        digest: String::new(),
    };
    let url = file.store.url.value();
    let url = url.or(keys::Store::usual().url.value());
    let sqlite = url.and_then(|url| url.text.strip_prefix("sqlite:"));
    config.digest = digest::config(&config, sqlite.unwrap_or_default());
    Some(config)
}

/// The one of `set` that is equal to `value`.
fn interned<T: Hash + Eq + ?Sized, V: Borrow<T> + Into<Arc<T>>>(
    set: &mut HashSet<Arc<T>>,
    value: V,
) -> Arc<T> {
    match set.get(value.borrow()) {
        Some(one) => one.clone(),
        None => {
            let one: Arc<T> = value.into();
            set.insert(one.clone());
            one
        }
    }
}

fn store(r: &mut Reader<'_>, raw: &keys::Store) -> Option<Store> {
    let place = Place::Store;
    let usual = keys::Store::usual();
    let url = raw.url.or_usual(&usual.url);
    if let Some(url) = &url {
        only_for(r, url.kind, raw);
    }
    let password = match &raw.password_file {
        Given::Read(file) => password(r, file).map(Some),
        Given::Absent => Some(None),
        Given::Wrong(_) => None,
    };
    let tls = match raw.tls.optional() {
        Some(Some(tls)) => {
            if let (Some(at), true) = (
                raw.tls.read(),
                matches!(
                    (&tls.cert, &tls.key),
                    (Given::Read(_), Given::Absent) | (Given::Absent, Given::Read(_))
                ),
            ) {
                let message = "`tls.cert` and `tls.key` belong together".into();
                r.problems.add(
                    place,
                    at.span.clone(),
                    message,
                    Some("give both, or none".into()),
                );
            }
            let ca = pem(r, place, "tls.ca", &tls.ca);
            let cert = pem(r, place, "tls.cert", &tls.cert);
            let key = pem(r, place, "tls.key", &tls.key);
            match (ca, cert, key) {
                (Some(ca), Some(cert), Some(key)) => Some(Some(Tls { ca, cert, key })),
                _ => None,
            }
        }
        Some(None) => Some(None),
        None => None,
    };
    let url = url.and_then(|url| {
        Some(match url.kind {
            Kind::Sqlite => StoreUrl::Sqlite(r.dir.join(url.text.strip_prefix("sqlite:")?)),
            Kind::Memory => StoreUrl::Memory,
            Kind::Redis { .. } => StoreUrl::Redis(Secret::new(url.text)),
        })
    })?;
    Some(Store {
        url,
        namespace: raw.namespace.or_usual(&usual.namespace)?,
        username: raw.username.optional()?,
        password: password?,
        tls: tls?,
        timeout: raw.timeout.or_usual(&usual.timeout)?,
        pool_size: raw.pool_size.or_usual(&usual.pool_size)?,
        min_replicas: raw.min_replicas.or_usual(&usual.min_replicas)?,
        retry: store_retry(&raw.retry)?,
    })
}

/// Reports keys that have no meaning for the kind of store, or that repeat another one.
fn only_for(r: &mut Reader<'_>, kind: Kind, raw: &keys::Store) {
    let mut refuse = |span: Option<Range<usize>>, message: &str, hint: &str| {
        if let Some(span) = span {
            r.problems
                .add(Place::Store, span, message.into(), Some(hint.into()));
        }
    };
    let username = raw.username.span();
    let password = raw.password_file.span();
    let tls = raw.tls.span();
    match kind {
        Kind::Redis {
            tls: over_tls,
            user,
            password: in_url,
        } => {
            if user {
                refuse(
                    username.clone(),
                    "`username` is also given in `url`",
                    "remove one of them",
                );
            }
            if in_url {
                refuse(
                    password.clone(),
                    "`password_file` is given, and `url` has a password too",
                    "remove the one in `url`",
                );
            }
            if !over_tls {
                refuse(
                    tls,
                    "`tls` is only used with a `rediss://` URL",
                    "write `rediss://` in `url`, or remove `tls`",
                );
            }
            if !in_url && password.is_none() {
                refuse(
                    username,
                    "`username` needs a password",
                    "name the file that contains it in `password_file`",
                );
                if user {
                    refuse(
                        raw.url.span(),
                        "`url` has a user name but no password",
                        "name the file that contains it in `password_file`",
                    );
                }
            }
        }
        Kind::Sqlite | Kind::Memory => {
            let hint = "remove it, or name a Redis server in `url`";
            refuse(username, "`username` is only used with Redis", hint);
            refuse(password, "`password_file` is only used with Redis", hint);
            refuse(tls, "`tls` is only used with Redis", hint);
            let replicas = raw
                .min_replicas
                .read()
                .filter(|at| at.value > 0)
                .map(|at| at.span.clone());
            refuse(replicas, "`min_replicas` is only used with Redis", hint);
        }
    }
}

fn store_retry(raw: &Given<keys::StoreRetry>) -> Option<StoreRetry> {
    let usual = keys::StoreRetry::usual();
    let raw = raw.optional()?.unwrap_or_default();
    let interval = raw.interval.or_usual(&usual.interval)?;
    Some(StoreRetry {
        attempts: raw.attempts.or_usual(&usual.attempts)?,
        interval,
        exponential: raw.backoff.or_usual(&usual.backoff)? == Backoff::Exponential,
        max_interval: most(interval, &raw.max_interval, &usual.max_interval)?,
        jitter: raw.jitter.or_usual(&usual.jitter)?,
    })
}

/// The longest pause; without one in the file, at least the first pause.
fn most(first: Duration, given: &Given<Duration>, usual: &Given<Duration>) -> Option<Duration> {
    let most = given.or_usual(usual)?;
    Some(match given {
        Given::Absent => most.max(first),
        _ => most,
    })
}

fn limits(raw: &keys::Limits) -> Option<Limits> {
    let usual = keys::Limits::usual();
    Some(Limits {
        max_parallel: raw.max_parallel.optional()?,
        drain: raw.drain.or_usual(&usual.drain)?,
        clock_drift: raw.clock_drift.or_usual(&usual.clock_drift)?,
    })
}

/// None: there is a problem. Some(None): the file has no `[http]`.
fn http(r: &mut Reader<'_>, raw: Option<&At<keys::Http>>) -> Option<Option<Http>> {
    let Some(At { value: raw, span }) = raw else {
        return Some(None);
    };
    let usual = keys::Http::usual();
    let listen = raw.listen.or_usual(&usual.listen);
    let tokens_file = match &raw.tokens_file {
        Given::Read(file) => tokens_file(r, file).map(Some),
        Given::Absent => Some(None),
        Given::Wrong(_) => None,
    };
    let mut refuse = |span: &Range<usize>, message: &str, hint: &str| {
        let (span, hint) = (span.clone(), Some(hint.to_owned()));
        r.problems.add(Place::Http, span, message.to_owned(), hint);
    };
    if let Some(listen) = &listen
        && listen.is_reached_by_others()
        && matches!(raw.tokens_file, Given::Absent)
    {
        refuse(
            &raw.listen.span().unwrap_or(span.clone()),
            "`listen`: other hosts reach this address, and there is no `tokens_file`",
            "name a file of tokens in `tokens_file`; or listen on 127.0.0.1, [::1] or a socket (`unix:PATH`)",
        );
    }
    if let (Some(Listen::Unix(_)), Some(tls)) = (&listen, raw.tls.span()) {
        refuse(&tls, "`tls` is not used with a socket", "remove it");
    }
    let tls = match raw.tls.optional()? {
        None => None,
        Some(tls) => {
            for (name, given) in [("cert", &tls.cert), ("key", &tls.key)] {
                if let (Given::Absent, Some(at)) = (given, raw.tls.read()) {
                    let message = format!("`tls.{name}` is missing");
                    let hint = Some(
                        "name the PEM files of both: `tls = { cert = \"…\", key = \"…\" }`".into(),
                    );
                    r.problems.add(Place::Http, at.span.clone(), message, hint);
                }
            }
            // The files are read by who serves, again at a reload, and by `soloist check`: a certificate that cannot be
            // used now keeps no job from running.
            let path = |file: &Given<String>| Some(r.dir.join(&file.read()?.value));
            Some(HttpTls {
                cert: path(&tls.cert)?,
                key: path(&tls.key)?,
            })
        }
    };
    Some(Some(Http {
        listen: listen?,
        tokens_file: tokens_file?,
        tls,
        public_url: raw.public_url.optional()?,
        read_only: raw.read_only.or_usual(&usual.read_only)?,
    }))
}

/// The path of the file of tokens, which the server reads again whenever it changes: here it must be one.
fn tokens_file(r: &mut Reader<'_>, file: &At<String>) -> Option<PathBuf> {
    let path = r.dir.join(&file.value);
    let understood = |bytes: Vec<u8>| {
        tokens::parse(&text(bytes)?)
            .map(drop)
            .map_err(|e| e.to_string())
    };
    let hint = "`soloist http token NAME ROLE` prints a line for it";
    content(r, Place::Http, "tokens_file", file, &path, hint, understood)?;
    Some(path)
}

fn password(r: &mut Reader<'_>, file: &At<String>) -> Option<Secret> {
    secret_file(r, Place::Store, "password_file", file, |_| Ok(()))
}

/// The content of the file that `key` names, which is one secret. A relative name is first looked for among systemd's
/// credentials.
fn secret_file(
    r: &mut Reader<'_>,
    place: Place<'_>,
    key: &str,
    file: &At<String>,
    sound: impl Fn(&str) -> Result<(), String>,
) -> Option<Secret> {
    let credential = (r.env)("CREDENTIALS_DIRECTORY")
        .filter(|dir| !dir.is_empty() && Path::new(&file.value).is_relative())
        .map(|dir| Path::new(&dir).join(&file.value))
        .filter(|path| path.exists());
    let path = credential.unwrap_or_else(|| r.dir.join(&file.value));
    let password = |bytes| {
        let text = text(bytes)?;
        let line = text.strip_suffix('\n').unwrap_or(&text);
        let line = line.strip_suffix('\r').unwrap_or(line);
        match line {
            "" => Err("the file is empty".to_owned()),
            line if line.contains('\0') => {
                Err("it contains a NUL byte, which no password has".to_owned())
            }
            line => sound(line).map(|()| Secret::new(line)),
        }
    };
    let hint = "name a file relative to the configuration file, or a systemd credential";
    content(r, place, key, file, &path, hint, password)
}

const RELATIVE: &str = "a relative path is taken from the directory of the configuration file";

/// The path of a file for TLS, which is read once it is needed: here it must only be possible. None: it is not.
fn pem(
    r: &mut Reader<'_>,
    place: Place<'_>,
    key: &str,
    file: &Given<String>,
) -> Option<Option<PathBuf>> {
    let Some(file) = file.read() else {
        return file.optional().map(|_| None);
    };
    let path = r.dir.join(&file.value);
    content(r, place, key, file, &path, RELATIVE, |_| Ok(()))?;
    Some(Some(path))
}

/// Reads the file at `path`, which the value of `key` names, by `understood`. None: the file cannot be used, which is
/// reported.
fn content<T>(
    r: &mut Reader<'_>,
    place: Place<'_>,
    key: &str,
    file: &At<String>,
    path: &Path,
    hint: &str,
    understood: impl FnOnce(Vec<u8>) -> Result<T, String>,
) -> Option<T> {
    let (message, hint) = match rights::trusted(path) {
        Err(f) => (format!("`{key}`: {}", f.message), f.fix),
        Ok(()) => match named::read(path).and_then(understood) {
            Ok(understood) => return Some(understood),
            Err(why) => {
                // What a variable has may be a secret, and in the wrong place.
                let expanded = place.expands()
                    && r.text
                        .get(file.span.clone())
                        .is_some_and(|s| s.contains("${"));
                let shown = path.display().to_string();
                let path = match expanded {
                    true => "the file, after its variables are expanded".to_owned(),
                    // No name of a file: most likely its content, such as a key.
                    false if shown.contains('\n') || shown.len() > LONGEST_PATH => {
                        "the file: the value is no path".to_owned()
                    }
                    false => format!("`{}`", shown.escape_debug()),
                };
                (
                    format!("`{key}`: cannot read {path}: {why}"),
                    hint.to_owned(),
                )
            }
        },
    };
    r.problems
        .add(place, file.span.clone(), message, Some(hint));
    None
}

fn text(bytes: Vec<u8>) -> Result<String, String> {
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_owned())
}

/// `base`, then the variables of `env_file`, then those of `env`; later ones win.
fn environment(
    r: &mut Reader<'_>,
    files: &mut HashMap<PathBuf, Option<Variables>>,
    place: Place<'_>,
    raw: &keys::Job,
    mut base: BTreeMap<String, String>,
) -> Option<BTreeMap<String, String>> {
    let mut sound = !raw.env.is_wrong() && !raw.env_file.is_wrong();
    if let Some(file) = raw.env_file.read() {
        let path = r.dir.join(&file.value);
        // What cannot be read is reported at each place that names the file.
        if !files.contains_key(&path)
            && let Some(text) = content(r, place, "env_file", file, &path, RELATIVE, text)
        {
            let variables = variables(r, file, &path, &text);
            files.insert(path.clone(), variables);
        }
        match files.get(&path) {
            Some(Some(variables)) => base.extend(variables.iter().cloned()),
            _ => sound = false,
        }
    }
    if let Some(env) = raw.env.value() {
        base.extend(env.iter().cloned());
    }
    sound.then_some(base)
}

/// `KEY=VALUE` lines. Blank lines and lines that start with `#` are skipped, `export ` before the name is
/// allowed, and one pair of quotes around the value is taken away; nothing is expanded.
fn variables(r: &mut Reader<'_>, file: &At<String>, path: &Path, text: &str) -> Option<Variables> {
    let mut variables = Vec::new();
    let mut sound = true;
    for (n, line) in super::file::unmarked(text).lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let line = line.strip_prefix("export ").unwrap_or(line).trim_start();
        let (message, hint) = match line.split_once('=') {
            // Do not show the line: it may be a piece of a secret.
            None => (
                "expected KEY=VALUE".to_owned(),
                "one variable on each line; `#` starts a comment",
            ),
            Some((name, value)) => match raw::env_name(name.trim_end()) {
                // The same here, unless the name is a possible one.
                Err((message, hint)) if name.starts_with("SOLOIST_") => (message, hint),
                Err((_, hint)) => (
                    "expected KEY=VALUE, and this KEY cannot be the name of a variable".to_owned(),
                    hint,
                ),
                Ok(()) if value.contains('\0') => (
                    "a value must not contain a NUL character".to_owned(),
                    "remove it",
                ),
                Ok(()) => {
                    let value = value.trim_start();
                    let unquoted = ['"', '\'']
                        .into_iter()
                        .find_map(|quote| value.strip_prefix(quote)?.strip_suffix(quote))
                        .unwrap_or(value);
                    variables.push((name.trim_end().to_owned(), unquoted.to_owned()));
                    continue;
                }
            },
        };
        sound = false;
        r.problems.elsewhere(
            file.span.clone(),
            path.into(),
            n + 1,
            format!("`env_file`: {message}"),
            hint,
        );
    }
    sound.then(|| variables.into())
}

// Long: one line for each key.
fn job(
    r: &mut Reader<'_>,
    shared: &mut Shared<'_>,
    name: &At<&str>,
    raw: &keys::Job,
) -> Option<Job> {
    let place = Place::Job(name.value);
    let defaults = shared.defaults;
    let usual = keys::Job::usual();
    // The key of the job, or otherwise of the defaults.
    macro_rules! pick {
        ($key:ident) => {
            raw.$key.or(&defaults.$key)
        };
    }
    // The same, or otherwise the usual default.
    macro_rules! value {
        ($key:ident) => {
            pick!($key).or_usual(&usual.$key)
        };
    }
    let command = match pick!(command) {
        Given::Read(at) => Some(at.value.clone()),
        Given::Wrong(_) => None,
        Given::Absent => {
            let hint =
                "write `command = [\"/usr/bin/program\", \"argument\"]`, or a string for the shell";
            r.problems.absent(
                place,
                name.span.clone(),
                "`command` is missing".into(),
                hint.into(),
            );
            None
        }
    };
    let zone = value!(timezone);
    let dst = pick!(dst).optional().map(Option::unwrap_or_default);
    let utc = shared.utc.clone();
    let schedule = match pick!(schedule) {
        Given::Wrong(_) => None,
        Given::Absent => schedules(r, shared, place, name.value, &[], &utc, Dst::default()),
        // If the zone or `dst` is wrong, check the text anyway, with a zone and `dst` that accept most texts.
        Given::Read(at) => schedules(
            r,
            shared,
            place,
            name.value,
            &at.value,
            zone.as_ref().unwrap_or(&utc),
            dst.unwrap_or_default(),
        ),
    };
    let alarms = alarms(r, shared, place, name.value, raw);
    let lease = lease(r, shared, place, raw, name);
    let on_crash = value!(on_crash);
    let max_attempts = max_attempts(r, place, raw, defaults, on_crash);
    let retry = retry(pick!(retry));
    let own = !matches!((&raw.env, &raw.env_file), (Given::Absent, Given::Absent));
    let env = match (shared.env.clone(), own) {
        (base, false) => base,
        (base, true) => {
            let variables = base.as_deref().cloned().unwrap_or_default();
            let env = environment(r, &mut shared.env_files, place, raw, variables);
            // If the variables of the defaults are wrong, the job's own are only checked.
            base.and(env).map(|env| interned(&mut shared.envs, env))
        }
    };
    let output = output(pick!(output));
    let (schedules, schedule_text) = schedule?;
    let (zone, dst) = (zone?, dst?);
    let jitter = value!(jitter)?;
    let written_dir = pick!(working_dir).optional()?;
    let schedule_digest = digest::schedule(&schedule_text, &zone.name, &format!("{dst:?}"));
    let mut job = Job {
        name: JobName::new(name.value),
        description: pick!(description).optional()?.map(Into::into),
        tags: interned(&mut shared.texts, value!(tags)?),
        enabled: value!(enabled)?,
        schedules,
        schedule_text,
        timezone: zone.name,
        jitter,
        command: command?,
        env: env?,
        pass_env: interned(&mut shared.texts, value!(pass_env)?),
        working_dir: written_dir
            .as_ref()
            .map(|dir| interned(&mut shared.paths, r.dir.join(dir))),
        user: pick!(user)
            .optional()?
            .map(|user| interned(&mut shared.words, user)),
        group: pick!(group)
            .optional()?
            .map(|group| interned(&mut shared.words, group)),
        new_privileges: value!(new_privileges)?,
        timeout: pick!(timeout).optional()?,
        grace: value!(grace)?,
        lease: interned(&mut shared.leases, lease?),
        overlap: value!(overlap)?,
        on_crash: on_crash?,
        on_state_loss: value!(on_state_loss)?,
        max_attempts: max_attempts?,
        retry: retry?.map(|retry| interned(&mut shared.retries, retry)),
        start_within: value!(start_within)?,
        catch_up: value!(catch_up)?,
        success_codes: interned(&mut shared.codes, value!(success_codes)?),
        output: output?,
        alarms: alarms?,
        digest: String::new(),
        schedule_digest: interned(&mut shared.words, schedule_digest),
    };
    job.digest = digest::job(&job, written_dir.as_deref());
    Some(job)
}

/// The channels and the time limit of a job's notifications.
fn alarms(
    r: &mut Reader<'_>,
    shared: &mut Shared<'_>,
    place: Place<'_>,
    job: &str,
    raw: &keys::Job,
) -> Option<Arc<Alarms>> {
    let usual = keys::Job::usual();
    let notify = raw.notify.or(&shared.defaults.notify);
    let place = match raw.notify {
        Given::Absent => Place::Defaults,
        _ => place,
    };
    let mut sound = true;
    if let Some(At { value, span }) = notify.read() {
        for name in value {
            if shared.channels.contains(&name.as_str()) {
                continue;
            }
            sound = false;
            let hint = match nearest(name, shared.channels.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => "a channel is a table `[notify.NAME]`".to_owned(),
            };
            let name = super::tree::clipped(name);
            let message = format!("`notify`: there is no channel `{name}`");
            r.problems.add(place, span.clone(), message, Some(hint));
        }
    }
    let url = raw.heartbeat_url.or(&shared.defaults.heartbeat_url);
    let alarms = Alarms {
        notify: notify.or_usual(&usual.notify)?,
        heartbeat: url
            .optional()?
            .map(|url| HiddenUrl::new(&url.replace("{job}", job))),
        expect_success_within: raw
            .expect_success_within
            .or(&shared.defaults.expect_success_within)
            .optional()?,
    };
    sound.then(|| interned(&mut shared.alarms, alarms))
}

/// The sound ones; problems are reported.
fn channels<'t>(
    r: &mut Reader<'t>,
    raw: &[(&'t str, Range<usize>, super::tree::Node<'t>)],
) -> Channels {
    let mut all = Channels::new();
    for (name, span, node) in raw {
        let Some(raw) = raw::named_channel(r, name, span.clone(), node) else {
            continue;
        };
        let at = At {
            value: *name,
            span: span.clone(),
        };
        if let Some(channel) = channel(r, &at, &raw) {
            all.insert((*name).to_owned(), Arc::new(channel));
        }
    }
    all
}

fn channel(r: &mut Reader<'_>, name: &At<&str>, raw: &keys::Notify) -> Option<Channel> {
    let usual = keys::Notify::usual();
    let Some(kind) = raw.r#type.optional()? else {
        let hint =
            "write `type = \"webhook\"`, or slack, discord, teams, pagerduty, email, command";
        r.problems.absent(
            Place::Channel(name.value),
            name.span.clone(),
            "`type` is missing".into(),
            hint.into(),
        );
        return None;
    };
    let way = match r.sends.over(name.value) {
        true => way(r, name, kind, raw),
        false => Some(Way::Unread),
    };
    let on = raw.on.or_usual(&usual.on);
    Some(Channel {
        name: name.value.to_owned(),
        kind: kind.word(),
        way: way?,
        rules: Rules {
            on: on?.into_iter().collect(),
            after: raw.after.or_usual(&usual.after)?,
            late_after_ms: raw.late_after.or_usual(&usual.late_after)?.as_millis() as i64,
        },
        timeout: raw.timeout.or_usual(&usual.timeout)?,
    })
}

/// How its messages leave: what its type needs is there, and nothing that it does not use.
// Long: one arm for each type.
fn way(r: &mut Reader<'_>, name: &At<&str>, kind: Type, raw: &keys::Notify) -> Option<Way> {
    let place = Place::Channel(name.value);
    let given = [
        ("url", raw.url.span()),
        ("url_file", raw.url_file.span()),
        ("routing_key", raw.routing_key.span()),
        ("routing_key_file", raw.routing_key_file.span()),
        ("smtp", raw.smtp.span()),
        ("from", raw.from.span()),
        ("to", raw.to.span()),
        ("command", raw.command.span()),
    ];
    let used: &[&str] = match kind {
        Type::Http(_) => &["url", "url_file"],
        Type::PagerDuty => &["url", "url_file", "routing_key", "routing_key_file"],
        Type::Email => &["smtp", "from", "to"],
        Type::Command => &["command"],
    };
    let mut sound = true;
    for (key, span) in given {
        if let (Some(span), false) = (span, used.contains(&key)) {
            sound = false;
            let message = format!("`{key}` is not used with the type `{}`", kind.word());
            r.problems
                .add(place, span, message, Some("remove it".into()));
        }
    }
    let missing = |r: &mut Reader<'_>, what: &str, hint: &str| {
        let (message, span) = (format!("{what} is missing"), name.span.clone());
        r.problems.absent(place, span, message, hint.into());
    };
    let url = one_secret(
        r,
        place,
        ("url", &raw.url),
        ("url_file", &raw.url_file),
        true,
    );
    let key = one_secret(
        r,
        place,
        ("routing_key", &raw.routing_key),
        ("routing_key_file", &raw.routing_key_file),
        false,
    );
    let way = match kind {
        Type::Http(form) => match url? {
            Some(url) => Some(Way::Http { form, url }),
            None => {
                missing(
                    r,
                    "`url`",
                    "write `url = \"https://…\"`, or name a file in `url_file`",
                );
                None
            }
        },
        Type::PagerDuty => match (url?, key?) {
            (url, Some(routing_key)) => Some(Way::PagerDuty {
                url: url.unwrap_or_else(|| Secret::new(PAGERDUTY)),
                routing_key,
            }),
            (_, None) => {
                missing(
                    r,
                    "`routing_key`",
                    "give the key of the service's integration, or name a file in \
                    `routing_key_file`",
                );
                None
            }
        },
        Type::Email => {
            let (smtp, from, to) = (
                raw.smtp.optional()?,
                raw.from.optional()?,
                raw.to.optional()?,
            );
            for (what, absent) in [
                ("`smtp`", smtp.is_none()),
                ("`from`", from.is_none()),
                ("`to`", to.is_none()),
            ] {
                if absent {
                    missing(
                        r,
                        what,
                        "a channel of the type `email` needs `smtp`, `from` and `to`",
                    );
                }
            }
            Some(Way::Email {
                smtp: Secret::new(smtp?),
                from: from?,
                to: to?,
            })
        }
        Type::Command => match raw.command.optional()? {
            Some(argv) => Some(Way::Command(argv)),
            None => {
                missing(
                    r,
                    "`command`",
                    "write `command = [\"/usr/bin/program\", \"argument\"]`",
                );
                None
            }
        },
    };
    way.filter(|_| sound)
}

/// A text that is written in one key, or in the file that another names. None: it is wrong. Some(None): neither is
/// there.
fn one_secret(
    r: &mut Reader<'_>,
    place: Place<'_>,
    (key, text): (&str, &Given<String>),
    (file_key, file): (&str, &Given<String>),
    url: bool,
) -> Option<Option<Secret>> {
    if let (Some(_), Some(span)) = (text.span(), file.span()) {
        let message = format!("`{key}` and `{file_key}` are both given");
        r.problems
            .add(place, span, message, Some("remove one of them".into()));
        return None;
    }
    if let Some(file) = file.read() {
        let understood = |line: &str| match raw::address(line) {
            Err((message, hint)) if url => Err(format!("{message}; {hint}")),
            _ => Ok(()),
        };
        return secret_file(r, place, file_key, file, understood).map(Some);
    }
    file.optional()?;
    Some(text.optional()?.map(Secret::new))
}

fn output(raw: &Given<keys::Output>) -> Option<Output> {
    let usual = keys::Output::usual();
    let raw = raw.optional()?.unwrap_or_default();
    Some(Output {
        keep: usize::try_from(raw.keep.or_usual(&usual.keep)?).ok()?,
        log: raw.log.or_usual(&usual.log)?,
    })
}

/// The only place that parses schedules: equal ones are parsed once and shared.
fn schedules(
    r: &mut Reader<'_>,
    shared: &mut Shared<'_>,
    place: Place<'_>,
    job: &str,
    texts: &[At<Option<String>>],
    zone: &Zone,
    dst: Dst,
) -> Option<(Parsed, Arc<[String]>)> {
    let mut parsed = Vec::with_capacity(texts.len());
    let mut written = Vec::with_capacity(texts.len());
    let mut sound = true;
    for At { value, span } in texts {
        let Some(text) = value else {
            sound = false;
            continue;
        };
        let of_job = depends_on_the_job(text).then(|| job.to_owned());
        let key: ScheduleKey = (text.clone(), zone.name.clone(), dst, of_job);
        if let Some(schedule) = shared.schedules.get(&key) {
            parsed.push(schedule.clone());
        } else {
            match Schedule::parse(text, &zone.tz, dst, job) {
                Ok(schedule) => {
                    let schedule = Arc::new(schedule);
                    parsed.push(schedule.clone());
                    shared.schedules.insert(key, schedule);
                }
                // Report this at each place that has the text.
                Err(error) => {
                    sound = false;
                    let whole = 0..text.len();
                    let marked = error.span.as_ref().unwrap_or(&whole);
                    let span = inside(r.text, span.clone(), text, marked);
                    let message = format!("`schedule`: {}", error.message);
                    r.problems.add(place, span, message, error.hint);
                }
            }
        }
        written.push(text.clone());
    }
    if !sound {
        return None;
    }
    let addresses = parsed
        .iter()
        .map(|schedule| Arc::as_ptr(schedule) as usize)
        .collect();
    let list = shared
        .lists
        .entry(addresses)
        .or_insert_with(|| parsed.into())
        .clone();
    Some((list, interned(&mut shared.texts, written)))
}

/// Whether the text may have an `H`, which depends on the job's name. In names of days and months an H has letters
/// beside it (`THU`, `MARCH`).
fn depends_on_the_job(text: &str) -> bool {
    let bytes = text.as_bytes();
    let letter = |at: Option<usize>| {
        at.and_then(|at| bytes.get(at))
            .is_some_and(u8::is_ascii_alphabetic)
    };
    bytes.iter().enumerate().any(|(at, b)| {
        b.eq_ignore_ascii_case(&b'h') && !letter(at.checked_sub(1)) && !letter(at.checked_add(1))
    })
}

/// Checks length and renewal separately; a value that is wrong by itself is replaced by one that fits most others, so
/// that no problem hides another.
fn lease(
    r: &mut Reader<'_>,
    shared: &Shared<'_>,
    place: Place<'_>,
    raw: &keys::Job,
    name: &At<&str>,
) -> Option<Lease> {
    let lease = raw.lease.or(&shared.defaults.lease);
    let renewal = raw.renew_every.or(&shared.defaults.renew_every);
    let length = lease.or_usual(&keys::Job::usual().lease)?;
    let drift = shared
        .clock_drift
        .or_usual(&keys::Limits::usual().clock_drift);
    let timeout = shared.store_timeout.or_usual(&keys::Store::usual().timeout);
    let with = |timeout| Lease::for_store(length, drift.unwrap_or(0.0), timeout);
    let fitting = match with(timeout.unwrap_or(Duration::ZERO)) {
        Ok(lease) => Some(lease),
        Err(message) => {
            // Report it at the lease, if the file has one. Otherwise the timeout does not fit the default lease.
            let (place, span) = match (&raw.lease, lease.span(), shared.store_timeout.span()) {
                (Given::Read(own), ..) => (place, own.span.clone()),
                (_, Some(default), _) => (Place::Defaults, default),
                (_, None, Some(timeout)) => (Place::Store, timeout),
                (_, None, None) => (place, name.span.clone()),
            };
            let hint = "set a longer `lease`, or a shorter `timeout` in `[store]`";
            r.problems.add(place, span, message, Some(hint.into()));
            None
        }
    };
    let Given::Read(renewal) = renewal else {
        return renewal.optional().and(drift).and(timeout).and(fitting);
    };
    match fitting
        .or_else(|| with(Duration::ZERO).ok())?
        .renewed_every(renewal.value)
    {
        Ok(lease) => drift.and(timeout).and(fitting).and(Some(lease)),
        Err(message) => {
            let (place, span) = match (&raw.renew_every, &raw.lease) {
                (Given::Absent, Given::Absent) => (Place::Defaults, renewal.span.clone()),
                (Given::Absent, _) => (place, raw.lease.span().unwrap_or_default()),
                _ => (place, renewal.span.clone()),
            };
            let hint = "leave `renew_every` out: soloist derives it from `lease`";
            r.problems.add(place, span, message, Some(hint.into()));
            None
        }
    }
}

/// `attempts = 0` cancels the retry of the defaults. None: wrong.
fn retry(raw: &Given<keys::JobRetry>) -> Option<Option<JobRetry>> {
    let Some(raw) = raw.optional()? else {
        return Some(None);
    };
    let usual = keys::JobRetry::usual();
    let attempts = raw.attempts.or_usual(&usual.attempts)?;
    let interval = raw.interval.or_usual(&usual.interval)?;
    let retry = JobRetry {
        attempts,
        interval,
        exponential: raw.backoff.or_usual(&usual.backoff)? == Backoff::Exponential,
        max_interval: most(interval, &raw.max_interval, &usual.max_interval)?,
    };
    Some((attempts > 0).then_some(retry))
}

/// None: wrong. Reads only what it needs of `on_crash` and `retry`, which may have other problems.
fn max_attempts(
    r: &mut Reader<'_>,
    place: Place<'_>,
    raw: &keys::Job,
    defaults: &keys::Job,
    on_crash: Option<OnCrash>,
) -> Option<u32> {
    let retry = raw.retry.or(&defaults.retry);
    let again = match retry {
        Given::Absent => Some(0),
        Given::Wrong(_) => None,
        Given::Read(retry) => {
            let usual = keys::JobRetry::usual();
            retry.value.attempts.or_usual(&usual.attempts)
        }
    };
    let needed = again.unwrap_or(0) + 1;
    match raw.max_attempts.or(&defaults.max_attempts) {
        Given::Wrong(_) => None,
        Given::Absent => Some(match (on_crash?, again?) {
            (OnCrash::Fail, 0) => 1,
            _ => needed.max(3),
        }),
        Given::Read(at) if at.value < needed => {
            let message = format!(
                "`max_attempts` ({}) is too small for the first attempt and {} more (`retry.attempts`)",
                at.value,
                needed - 1
            );
            let (place, span) = match (&raw.max_attempts, &raw.retry) {
                (Given::Absent, Given::Absent) => (Place::Defaults, at.span.clone()),
                (Given::Absent, own) => (place, own.span().unwrap_or_default()),
                _ => (place, at.span.clone()),
            };
            let hint = format!("set `max_attempts` to {needed} or more");
            r.problems.add(place, span, message, Some(hint));
            None
        }
        Given::Read(at) => Some(at.value),
    }
}
