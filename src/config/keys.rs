//! Every key of `jobs.toml`: its name, the form of its value, its default, and its meaning. The reader, the defaults,
//! the hints of the report and the tables of docs/configuration.md all come from here.

use std::{path::Path, sync::LazyLock, time::Duration};

use toml::de::DeTable;

use super::{
    CatchUp, Command, Listen, OnStateLoss,
    form::{BOOLEAN, Bytes, Count, FILLED, Form, PATH, Plain, Shape, Span, TEXT, Word},
    notify::Type,
    raw::{self, Url},
    report::{Collector, Place},
    tree::{At, Given, Reader, Table, Zone},
};
use crate::logic::{
    claim::{OnCrash, Overlap},
    lease,
    notify::Kind,
    schedule::{Dst, Fold, Gap},
};

/// A key, for people.
pub(super) struct Key {
    pub name: &'static str,
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "for docs/configuration.md, which a test compares")
    )]
    pub shape: Shape,
    pub absent: Absent,
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "for docs/configuration.md, which a test compares")
    )]
    pub meaning: &'static str,
}

/// The default of a key.
pub(super) enum Absent {
    /// This value, in TOML.
    Is(&'static str),
    /// No value; the text says what that means.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "for docs/configuration.md, which a test compares")
    )]
    Means(&'static str),
}
use Absent::{Is, Means};

/// A table of the file with its keys.
pub(super) trait Keys: Sized + 'static {
    const NAMES: &'static [&'static str];
    fn keys() -> Vec<Key>;
    /// Takes the keys out of the table. Keys that are left there are unknown.
    fn take<'t>(r: &mut Reader<'t>, t: &mut Table<'t>) -> Self;
    /// The defaults.
    fn usual() -> &'static Self;
}

macro_rules! keys {
    ($(#[$doc:meta])* $table:ident { $($key:ident: $type:ty = $form:expr, $absent:expr, $meaning:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Default)]
        pub(super) struct $table {
            $(pub $key: Given<$type>,)*
        }

        impl Keys for $table {
            const NAMES: &'static [&'static str] = &[$(plain(stringify!($key))),*];
            fn keys() -> Vec<Key> {
                vec![$(Key {
                    name: plain(stringify!($key)),
                    shape: shape::<$type>(&$form),
                    absent: $absent,
                    meaning: $meaning,
                }),*]
            }
            fn take<'t>(r: &mut Reader<'t>, t: &mut Table<'t>) -> Self {
                Self { $($key: t.take(r, plain(stringify!($key)), |r, f| Form::read(&$form, r, f)),)* }
            }
            fn usual() -> &'static Self {
                static USUAL: LazyLock<$table> = LazyLock::new(defaults);
                &USUAL
            }
        }
    };
}

/// The name without the mark that makes a keyword of Rust a name.
const fn plain(name: &'static str) -> &'static str {
    match name.as_bytes() {
        [b'r', b'#', ..] => name.split_at(2).1,
        _ => name,
    }
}

/// The shape of a form whose values are of type `T`.
fn shape<T>(form: &impl Form<Value = T>) -> Shape {
    form.shape()
}

/// Reads the defaults in the same way as a file that contains them.
fn defaults<T: Keys>() -> T {
    let mut text = String::new();
    for key in T::keys() {
        if let Is(value) = key.absent {
            text.push_str(&format!("{} = {value}\n", key.name));
        }
    }
    let (tree, _) = DeTable::parse_recoverable(&text);
    let problems = Collector::new(Path::new("defaults"), &text);
    let mut r = Reader::new(&text, &|_| None, "/".into(), problems);
    let mut table = Table::of(Place::Defaults, "", tree.get_ref());
    let usual = T::take(&mut r, &mut table);
    debug_assert!(r.problems.is_empty(), "{text}");
    usual
}

keys! {
    /// `[store]`
    Store {
        url: Url = Plain(|| Shape::Text, raw::store_url), Is("'sqlite:soloist.db'"),
            "`sqlite:PATH`: one host. `redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, `rediss://…` (TLS), \
            `redis+unix:///PATH[?db=N&user=U&pass=P]`: a fleet. `memory:`: one process, for tests. soloist creates a \
            SQLite file with mode 600; it uses an existing file unchanged, and the daemon warns if other users may \
            open it";
        namespace: String = Plain(|| Shape::Text, raw::namespace), Is("'soloist'"),
            "prefix of every key: letters, digits, `-`, `_`, `.`, `:`, up to 100";
        username: String = FILLED, Means(""),
            "Redis user, unless `url` has it; needs a password";
        password_file: String = PATH, Means(""),
            "file with the Redis password (without a final newline). soloist looks for a relative name first in \
            `$CREDENTIALS_DIRECTORY` (systemd credentials)";
        tls: Tls = Plain(|| Shape::Table(Tls::keys()), |r, f| raw::sub(r, f, "tls.")), Means(""),
            "with `rediss://`";
        timeout: Duration = Span::from(SHORTEST_PATIENCE, "no store can always answer that soon, so commands would \
        time out"), Is("'500ms'"),
            "time limit of each command";
        pool_size: u32 = Count(1..=1000), Is("8"),
            "connections";
        min_replicas: u32 = Count(0..=100), Is("0"),
            "Redis replicas that must have a grant or renewal before it counts";
        retry: StoreRetry = Plain(|| Shape::Table(StoreRetry::keys()), raw::store_retry), Means("see below"),
            "how soloist repeats a command after a transport error";
    }
}

/// Whether a table of the file has a key of this name.
pub(super) fn is_known(name: &str) -> bool {
    let of_inner = [
        Tls::NAMES,
        StoreRetry::NAMES,
        Output::NAMES,
        DstWords::NAMES,
    ];
    let tables = [
        Store::NAMES,
        Limits::NAMES,
        Http::NAMES,
        HttpTls::NAMES,
        Notify::NAMES,
        Job::NAMES,
        JobRetry::NAMES,
    ];
    tables
        .iter()
        .chain(&of_inner)
        .any(|names| names.contains(&name))
}

/// The keys of the table at `path` whose values may be quoted, because they hold no secret. None: no table of soloist
/// has this path.
pub(super) fn quotable(path: &[String]) -> Option<Vec<&'static str>> {
    const SECRET: [&str; 11] = [
        "command",
        "pass_env",
        "url",
        "username",
        "password_file",
        "env",
        "url_file",
        "routing_key",
        "routing_key_file",
        "smtp",
        "heartbeat_url",
    ];
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let names = match *path {
        ["store"] => Store::NAMES,
        ["store", "tls"] => Tls::NAMES,
        ["store", "retry"] => StoreRetry::NAMES,
        ["limits"] => Limits::NAMES,
        ["http"] => Http::NAMES,
        ["http", "tls"] => HttpTls::NAMES,
        ["notify", _] => Notify::NAMES,
        ["defaults"] | ["jobs", _] => Job::NAMES,
        ["defaults", inner] | ["jobs", _, inner] => match inner {
            "output" => Output::NAMES,
            "dst" => DstWords::NAMES,
            "retry" => JobRetry::NAMES,
            _ => return None,
        },
        _ => return None,
    };
    let quotable = names.iter().filter(|name| !SECRET.contains(name));
    Some(quotable.copied().collect())
}

/// With a shorter `timeout` no store could answer in time.
const SHORTEST_PATIENCE: Duration = Duration::from_millis(10);

keys! {
    /// `tls` of `[store]`
    Tls {
        ca: String = PATH, Means("the system's"),
            "PEM file with the certificate authorities to trust";
        cert: String = PATH, Means(""),
            "PEM file with the client's certificate; together with `key`";
        key: String = PATH, Means(""),
            "PEM file with its key";
    }
}

keys! {
    /// `retry` of `[store]`
    StoreRetry {
        attempts: u32 = Count(RETRIES), Is("3"),
            "attempts after the first";
        interval: Duration = Span::ANY, Is("'100ms'"),
            "pause before the second attempt";
        backoff: Backoff = BACKOFF, Is("'exponential'"),
            "whether each further pause is twice as long";
        max_interval: Duration = Span::ANY, Is("'2s'"),
            "longest pause";
        jitter: bool = BOOLEAN, Is("true"),
            "whether each pause is shortened at random, so that instances do not all retry at the same time";
    }
}

/// The number of attempts in all is one more, and must fit into a fencing token.
const RETRIES: std::ops::RangeInclusive<u32> = 0..=998;

/// Whether each pause is twice as long as the previous one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Backoff {
    Exponential,
    Fixed,
}

const BACKOFF: Word<Backoff> = Word(&[
    ("exponential", Backoff::Exponential),
    ("fixed", Backoff::Fixed),
]);

keys! {
    /// `[limits]`
    Limits {
        max_parallel: u32 = Count(1..=1_000_000), Means("no limit"),
            "most runs at the same time. Waiting for a free slot counts as lateness";
        drain: Duration = Span::ANY, Is("'60s'"),
            "how long active runs may continue after SIGTERM before soloist ends them";
        clock_drift: f64 = Plain(|| Shape::Number(raw::DRIFT), raw::clock_drift), Is("0.01"),
            "how much the rates of two hosts' monotonic clocks may differ; 0.01 is one percent. See [Lease](#lease)";
    }
}

keys! {
    /// `[http]`
    Http {
        listen: Listen = Plain(|| Shape::Text, raw::listen), Is("'127.0.0.1:7878'"),
            "address and port, as `127.0.0.1:7878` or `[::]:7878`; or `unix:PATH`, a socket that its owner and group \
            may use. An address that other hosts reach needs `tokens_file`";
        tokens_file: String = PATH, Means("none"),
            "file with a line `NAME ROLE sha256:HEX` for each token (`soloist http token` prints one); `ROLE` is `read` \
            or `operate`. Without it everybody who reaches the address may read, and who may use the socket may also \
            write. soloist reads the file again when it changes";
        tls: HttpTls = Plain(|| Shape::Table(HttpTls::keys()), |r, f| raw::sub(r, f, "tls.")),
            Means("none: plain HTTP"), "certificate for HTTPS";
        public_url: String = Plain(|| Shape::Text, raw::public_url), Means(""),
            "the address that people use, if another server stands in front, as `https://soloist.example.org`";
        read_only: bool = BOOLEAN, Is("false"),
            "whether nobody may trigger, pause, cancel or drain over HTTP";
    }
}

keys! {
    /// `tls` of `[http]`
    HttpTls {
        cert: String = PATH, Means("required"),
            "PEM file with the server's certificate, and those that lead from it to its authority";
        key: String = PATH, Means("required"),
            "PEM file with its key";
    }
}

keys! {
    /// `[notify.NAME]`
    Notify {
        r#type: Type = Word(Type::WORDS), Means("required"),
            "how a message leaves, see [notifications](notifications.md)";
        url: String = Plain(|| Shape::Text, raw::channel_url), Means("required for webhook, slack, discord and teams"),
            "where a message is sent, as `https://HOST/PATH` or `https://USER:PASSWORD@HOST/PATH`. For \
            pagerduty: another address than `https://events.pagerduty.com/v2/enqueue`";
        url_file: String = PATH, Means(""),
            "file with that address, instead of `url`. soloist looks for a relative name first in \
            `$CREDENTIALS_DIRECTORY` (systemd credentials)";
        routing_key: String = FILLED, Means("required for pagerduty"),
            "the key of the service's integration";
        routing_key_file: String = PATH, Means(""),
            "file with that key, instead of `routing_key`";
        smtp: String = Plain(|| Shape::Text, raw::smtp), Means("required for email"),
            "mail server: `smtps://[USER:PASSWORD@]HOST[:PORT]` (TLS), `smtp+starttls://…` (STARTTLS) or `smtp://…` \
            (neither)";
        from: String = Plain(|| Shape::Text, raw::mailbox), Means("required for email"),
            "sender, as `soloist@example.org` or `soloist <soloist@example.org>`";
        to: Vec<String> = Plain(|| Shape::TextOrTexts, raw::mailboxes), Means("required for email"),
            "receivers";
        command: Vec<String> = Plain(|| Shape::Texts, raw::channel_command), Means("required for command"),
            "program and arguments, without a shell: gets the message as JSON on stdin and as text in \
            `SOLOIST_TEXT`. The message counts as delivered if it exits with 0";
        on: Vec<Kind> = Plain(|| Shape::Texts, raw::kinds),
            Is("['failed', 'timed_out', 'crashed', 'unknown', 'lease_lost', 'missed', 'recovered']"),
            "what is told: outcomes of runs, and `late`, `too_long`, `too_short`, `recovered`";
        after: u32 = Count(1..=1000), Is("1"),
            "how many bad ends in a row make a job bad";
        late_after: Duration = Span::ANY, Is("'10s'"),
            "with `late` in `on`: a run that starts so much later than planned is bad";
        timeout: Duration = Span::from(Duration::from_millis(100), "no server can always answer that soon"), Is("'10s'"),
            "time limit of each try to deliver a message";
    }
}

keys! {
    /// `[jobs.NAME]` and `[defaults]`
    Job {
        command: Command = Plain(|| Shape::TextOrTexts, raw::command), Means("required"),
            "a list runs without a shell; `/bin/sh -c` runs a string. A relative path counts from `working_dir`";
        env: Vec<(String, String)> = Plain(|| Shape::TextTable, raw::env), Means(""),
            "variables for the command. Names that start with `SOLOIST_` are reserved";
        env_file: String = PATH, Means(""),
            "file of `KEY=VALUE` lines, read together with the configuration. soloist skips blank lines and lines \
            that start with `#`, allows `export ` before the name, removes one pair of quotes around the value, and \
            expands nothing. Order, later wins: the defaults' `env_file`, the defaults' `env`, the job's `env_file`, \
            the job's `env`";
        pass_env: Vec<String> = Plain(|| Shape::Texts, raw::env_names), Is("[]"),
            "variables of the daemon that the command gets although soloist would otherwise remove them, see \
            [Environment](#environment)";
        working_dir: String = PATH, Means("the daemon's"), "";
        user: String = FILLED, Means("the daemon's"),
            "user that the command runs as, by name or by number. Another user gets none of the daemon's privileges \
            ([security](security.md#users-of-a-host))";
        group: String = FILLED, Means("that of `user`, or the daemon's"),
            "group that the command runs as";
        new_privileges: bool = BOOLEAN, Is("false"),
            "for another user: whether setuid programs (`sudo`, `su`, `ping`) and file capabilities may give the \
            command more rights than that user has";
        timeout: Duration = Span::SOME, Means("none"),
            "time after which soloist ends the command and records `timed_out`; counted from the moment at which its \
            start begins";
        grace: Duration = Span::ANY, Is("'10s'"),
            "time from SIGTERM to SIGKILL";
        success_codes: Vec<i32> = Plain(|| Shape::Integers(0..=255), raw::success_codes), Is("[0]"),
            "exit codes that mean success";
        output: Output = Plain(|| Shape::Table(Output::keys()), |r, f| raw::sub(r, f, "output.")), Means("see below"),
            "what soloist does with its output";

        schedule: Vec<At<Option<String>>> = Plain(|| Shape::TextOrTexts, raw::schedules), Means("none"),
            "cron expressions, see [schedules](schedules.md). Without one, or with `[]`, the job runs only on \
            `soloist trigger`";
        timezone: Zone = Plain(|| Shape::Text, |r, f| r.zone(f)), Is("'UTC'"),
            "IANA name, from the database inside the binary";
        dst: Dst = Plain(|| Shape::Table(DstWords::keys()), raw::dst), Means("as Vixie cron"),
            "rules for occurrences when clocks go forward and back";
        jitter: Duration = Span::ANY, Is("'0s'"),
            "longest delay of an occurrence; the same on every instance";
        start_within: Duration = Span::SOME, Is("'1m'"),
            "how late an occurrence may still start; later it is recorded as `missed`";
        catch_up: CatchUp = Word(&[("latest", CatchUp::Latest), ("all", CatchUp::All), ("none", CatchUp::None)]),
            Is("'latest'"),
            "which of several overdue occurrences run";
        enabled: bool = BOOLEAN, Is("true"),
            "false: schedule off; waiting occurrences do not start";

        overlap: Overlap = Word(&[("skip", Overlap::Skip), ("queue", Overlap::Queue), ("replace", Overlap::Replace),
            ("allow", Overlap::Allow)]), Is("'skip'"),
            "if the previous run is still active: `skip` this one, `queue` it, `replace` the active one, or `allow` \
            both";
        on_crash: OnCrash = Word(&[("fail", OnCrash::Fail), ("rerun", OnCrash::Rerun)]), Is("'fail'"),
            "if the instance dies during the run: `fail` records that (at most once), `rerun` lets another instance \
            take the run over (at least once)";
        on_state_loss: OnStateLoss = Word(&[("skip", OnStateLoss::Skip), ("rerun", OnStateLoss::Rerun)]), Is("'skip'"),
            "if the store loses its data: `skip` or `rerun` earlier occurrences of which no record says whether they \
            ran";
        retry: JobRetry = Plain(|| Shape::Table(JobRetry::keys()), raw::job_retry), Means("none"),
            "how soloist repeats a failed command, on any instance";
        max_attempts: u32 = Count(1..=999), Means("see below"),
            "most attempts of one occurrence, counting crashes and retries; at least `retry.attempts` + 1. Default: \
            1; with `retry` or `on_crash = \"rerun\"` 3, or `retry.attempts` + 1 if that is more";
        lease: Duration = Span::from(lease::SHORTEST, "a shorter one leaves no time to end a command before another \
        instance may start it"), Is("'15s'"),
            "how long other instances wait before one takes over from a dead instance; see [Lease](#lease)";
        renew_every: Duration = Span::from(lease::SHORTEST_RENEWAL, "leave it out: soloist derives it from \
        `lease`"), Means("`lease` / 5"),
            "see [Lease](#lease)";

        notify: Vec<String> = Plain(|| Shape::Texts, raw::channels), Is("[]"),
            "names of the channels ([notify](notifications.md)) that are told when the job's state changes; `[]` for a \
            job cancels the `notify` of the defaults";
        heartbeat_url: String = Plain(|| Shape::Text, raw::heartbeat_url), Means("none"),
            "address that the instance asks when a run starts (with `/start` at its end), succeeds (as it is) and ends \
            otherwise (with `/fail`, or `/` and the exit code), for services that watch whether jobs run. `{job}` \
            stands for the name of the job, `${NAME}` for a variable of the environment";
        expect_success_within: Duration = Span::SOME, Means("none"),
            "longest time between two successes: the channels of `notify` are told when it has passed, also if no \
            instance runs the job any more";

        description: String = TEXT, Means(""), "";
        tags: Vec<String> = Plain(|| Shape::Texts, raw::tags), Is("[]"), "";
    }
}

keys! {
    /// `output` of a job
    Output {
        keep: u64 = Bytes { most: MOST_OUTPUT }, Is("'64KiB'"),
            "how much of the end of the output the store keeps";
        log: bool = BOOLEAN, Is("true"),
            "whether each line also goes to the log";
    }
}

/// The daemon keeps the output in memory while the command runs, and the store keeps it afterwards: for more output,
/// people should use a log.
const MOST_OUTPUT: u64 = 16 << 20;

keys! {
    /// `dst` of a job
    DstWords {
        gap: Gap = Word(&[("shift", Gap::Shift), ("skip", Gap::Skip)]), Means("as Vixie cron"),
            "occurrences in the skipped hour";
        overlap: Fold = Word(&[("first", Fold::First), ("second", Fold::Second), ("both", Fold::Both)]),
            Means("as Vixie cron"),
            "occurrences in the repeated hour";
    }
}

keys! {
    /// `retry` of a job
    JobRetry {
        attempts: u32 = Count(RETRIES), Is("2"),
            "attempts after the first; 0 cancels the `retry` of the defaults";
        interval: Duration = Span::ANY, Is("'10s'"),
            "pause before the second attempt";
        backoff: Backoff = BACKOFF, Is("'exponential'"),
            "whether each further pause is twice as long";
        max_interval: Duration = Span::ANY, Is("'5m'"),
            "longest pause";
    }
}
