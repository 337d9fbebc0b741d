//! What a message says: a title, a text, and the same as JSON. Made from facts when it is sent.

use std::{collections::BTreeMap, fmt::Write as _};

use serde_json::{Value as Json, json};

use crate::{
    config::{Config, Job},
    logic::{
        claim::State,
        coming::Coming,
        notify::{About, Item, Kind, Message, Now, Standstill, Verdict},
    },
    model::{InstanceId, JobName, Outcome, RunRecord, Trigger, Wait, rfc3339_ms},
    text,
    view::signal_name,
    words,
};

/// The end of an output that a message has: lines, and characters.
const OUTPUT_LINES: usize = 15;
const OUTPUT_MOST: usize = 1500;
/// With several jobs in one message each has fewer.
const OUTPUT_OF_MANY: usize = 3;
/// How many jobs the title of a message about several names, and how much of a name.
const TITLE_NAMES: usize = 3;
const TITLE_NAME_MOST: usize = 40;

/// What a message says of where it comes from.
pub(super) struct Surroundings {
    namespace: String,
    public_url: Option<String>,
    from: InstanceId,
    now: i64,
}

impl Surroundings {
    pub(super) fn of(config: &Config, from: &InstanceId, now: i64) -> Self {
        let http = config.http.as_ref();
        Self {
            namespace: config.store.namespace.clone(),
            public_url: http.and_then(|http| http.public_url.clone()),
            from: from.clone(),
            now,
        }
    }

    fn link(&self, item: &Item) -> Option<String> {
        let url = self.public_url.as_ref()?;
        let job = &item.job;
        Some(match &item.run {
            Some(run) => format!("{url}/#/job/{job}?o={}", run.occurrence),
            None => format!("{url}/#/job/{job}"),
        })
    }
}

/// A message, ready to be sent.
pub(super) struct Text {
    /// The same for each try.
    pub(super) id: String,
    /// One line.
    pub(super) title: String,
    pub(super) body: Body,
    pub(super) json: Json,
    pub(super) bad: bool,
    /// The instance that sends it.
    pub(super) source: String,
    pub(super) subjects: Vec<Subject>,
}

/// A text that may have to be cut: what it begins and ends with stays.
#[derive(Default)]
pub(super) struct Body {
    pub(super) intro: String,
    /// The jobs of which it tells by their names, if the title does not name all, and how many more there are: by what
    /// happened to them.
    pub(super) names: Vec<(&'static str, Vec<JobName>)>,
    pub(super) unnamed: u64,
    pub(super) details: String,
    /// Says which command shows more.
    pub(super) closing: String,
}

impl Body {
    pub(super) fn whole(&self) -> String {
        let (names, gap) = (self.names(usize::MAX), self.gap());
        format!("{}{names}{gap}{}{}", self.intro, self.details, self.closing)
    }

    /// At most as much as `most` allows, by `count`; `cut` cuts a text to that.
    pub(super) fn within(
        &self,
        most: usize,
        count: fn(&str) -> usize,
        cut: fn(&str, usize) -> String,
    ) -> String {
        let whole = self.whole();
        if count(&whole) <= most {
            return whole;
        }
        // With the names first, nobody has to open the page to see which jobs it is about.
        let head = format!("{}{}{}", self.intro, self.names(most / 2), self.gap());
        let closing = match self.closing.is_empty() {
            true => String::new(),
            false => format!("\n{}", self.closing),
        };
        let room = most.saturating_sub(count(&head) + count(&closing));
        cut(
            &format!("{head}{}{closing}", cut(&self.details, room)),
            most,
        )
    }

    fn gap(&self) -> &'static str {
        if self.names.is_empty() { "" } else { "\n" }
    }

    /// As many names as this number of characters has room for.
    fn names(&self, most: usize) -> String {
        let mut out = String::new();
        let (mut left, mut rest) = (most, self.unnamed);
        for (what, jobs) in &self.names {
            let mut line = format!("{what}: ");
            let mut shown = 0;
            for job in jobs {
                let length = job.as_str().len() + 2;
                // The counts of what is left out, too.
                if left < length + 2 * what.len() + 20 {
                    break;
                }
                left -= length;
                line += if shown > 0 { ", " } else { "" };
                line += job.as_str();
                shown += 1;
            }
            left = left.saturating_sub(what.len() + 2);
            match jobs.len() - shown {
                0 => {}
                more if shown > 0 => line += &format!(", and {more} more"),
                more => {
                    rest += more as u64;
                    continue;
                }
            }
            out += &line;
            out.push('\n');
        }
        if rest > 0 {
            let _ = writeln!(out, "and {rest} more");
        }
        out
    }
}

/// What is said of one job.
pub(super) struct Subject {
    pub(super) job: String,
    pub(super) kind: &'static str,
    pub(super) bad: bool,
    pub(super) title: String,
    pub(super) text: String,
    pub(super) link: Option<String>,
    /// Names the trouble of this job in this fleet.
    pub(super) key: String,
}

/// The number of characters.
pub(super) fn letters(text: &str) -> usize {
    text.chars().count()
}

/// At most `most` characters; what is cut is marked.
pub(super) fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some(_) => {
            let mut out: String = text.chars().take(most.saturating_sub(1)).collect();
            out.push('…');
            out
        }
    }
}

/// The facts of a record that a message may tell. `output` is the end of the run's output.
pub(super) fn about(r: &RunRecord, output: &str) -> About {
    About {
        id: r.run_id,
        occurrence: r.occurrence,
        trigger: r.trigger,
        attempt: r.attempt,
        outcome: r.outcome,
        exit_code: r.exit_code,
        signal: r.signal,
        error: r.error.as_deref().map(words::line),
        instance: r.instance.clone(),
        host: r.host.as_deref().map(words::line),
        started_at: r.started_at,
        duration_ms: r.duration_ms,
        // A later attempt was planned anew.
        lateness_ms: r.lateness_ms.filter(|_| r.attempt <= 1),
        waited: r.waited,
        count: r.count,
        output: last_lines(output),
    }
}

/// The last lines, safe to show.
fn last_lines(output: &str) -> String {
    // Before it is made safe, which takes time for each character.
    let from = output.len().saturating_sub(4 * OUTPUT_MOST);
    let from = (from..=output.len())
        .find(|at| output.is_char_boundary(*at))
        .unwrap_or(0);
    let safe = text::lines(output.get(from..).unwrap_or_default());
    let lines: Vec<&str> = safe.trim_end().lines().collect();
    let kept = lines.get(lines.len().saturating_sub(OUTPUT_LINES)..);
    let kept = kept.unwrap_or_default().join("\n");
    let many = letters(&kept).saturating_sub(OUTPUT_MOST);
    match many {
        0 => kept,
        many => format!("…{}", kept.chars().skip(many + 1).collect::<String>()),
    }
}

/// When the job is to run next, Unix ms.
fn next(job: &Job, state: Option<&State>, now: i64) -> Option<i64> {
    Some(Coming::of(job, state, now).next?.0)
}

/// The message as it is sent now: in its order, and with what is true of its jobs only now, because it may have waited.
/// `states`: of those jobs of which the store says anything.
pub(super) fn refreshed(
    message: &Message,
    config: &Config,
    states: &BTreeMap<JobName, State>,
    now: i64,
) -> Message {
    let mut message = message.clone();
    message.arrange();
    for item in &mut message.items {
        let state = states.get(&item.job);
        item.now = state.map_or_else(Now::default, |st| Now::of(st, item.since, now));
        let job = config.jobs.get(&item.job);
        item.next = job.and_then(|job| next(job, state, now));
    }
    message
}

/// What is told of a job because of a verdict. `job`: None if this configuration lacks it.
pub(super) fn item(
    name: &JobName,
    job: Option<&Job>,
    verdict: &Verdict,
    run: Option<About>,
    now: i64,
) -> Item {
    Item {
        job: name.clone(),
        kind: verdict.kind,
        bad: verdict.bad,
        streak: verdict.streak,
        since: verdict.since,
        changes: verdict.changes,
        zone: job.map_or("UTC", |job| &*job.timezone).to_owned(),
        next: job.and_then(|job| next(job, None, now)),
        expected: None,
        never: false,
        lacked: job.is_none(),
        run,
        now: Now::default(),
    }
}

pub(super) fn test_message(channel: &str, now: i64) -> Message {
    let verdict = Verdict {
        channel: channel.to_owned(),
        kind: Kind::Test,
        bad: false,
        streak: 0,
        since: now,
        changes: 0,
    };
    let item = Item {
        job: JobName::new("test"),
        kind: verdict.kind,
        bad: false,
        streak: 0,
        since: now,
        changes: 0,
        zone: "UTC".to_owned(),
        next: None,
        expected: None,
        never: false,
        lacked: false,
        run: None,
        now: Now::default(),
    };
    Message::new(item, channel, now)
}

/// `Sat 2026-11-21 12:00:00 +08:00`, in the job's zone.
fn local(ms: i64, zone: &str) -> String {
    let zone = jiff::tz::TimeZoneDatabase::bundled()
        .get(zone)
        .unwrap_or(jiff::tz::TimeZone::UTC);
    match jiff::Timestamp::from_millisecond(ms) {
        Ok(t) => t
            .to_zoned(zone)
            .strftime("%a %Y-%m-%d %H:%M:%S %:z")
            .to_string(),
        Err(_) => rfc3339_ms(ms),
    }
}

fn kind_words(kind: Kind) -> &'static str {
    match kind {
        Kind::Failed => "failed",
        Kind::TimedOut => "timed out",
        Kind::Crashed => "crashed",
        Kind::Unknown => "ended in an unknown way",
        Kind::LeaseLost => "lost its lease",
        Kind::Missed => "was missed",
        Kind::Late => "started late",
        Kind::TooLong => "took unusually long",
        Kind::TooShort => "ended unusually soon",
        Kind::Recovered => "recovered",
        Kind::Overdue => "has had no success for too long",
        Kind::Flapping => "keeps changing",
        Kind::Test => "test",
    }
}

fn title(item: &Item, now: i64) -> String {
    let job = &item.job;
    let exit = item.run.as_ref().and_then(|run| {
        let code = run.exit_code.filter(|_| run.outcome == Outcome::Failed);
        code.map(|code| format!(" (exit code {code})")).or(run
            .signal
            .map(|signal| format!(" ({})", signal_name(signal))))
    });
    let took = item.run.as_ref().and_then(|run| run.duration_ms);
    let took = took.map(words::took).zip(item.expected.map(words::took));
    match item.kind {
        Kind::Test => "soloist: a test".to_owned(),
        Kind::Overdue if item.never => {
            format!(
                "{job}: no success so far, for {}",
                words::span(now - item.since)
            )
        }
        Kind::Overdue => format!("{job}: no success for {}", words::span(now - item.since)),
        Kind::Flapping => format!(
            "{job} keeps changing: {} in {}, {} now",
            words::count(
                usize::try_from(item.changes).unwrap_or(usize::MAX),
                "change"
            ),
            words::span(now - item.since),
            if item.bad { "bad" } else { "good" },
        ),
        Kind::Recovered => format!("{job} recovered"),
        Kind::Late
            if item
                .run
                .as_ref()
                .is_some_and(|run| run.lateness_ms.is_some()) =>
        {
            let late = item.run.as_ref().and_then(|run| run.lateness_ms);
            format!("{job} started {} late", words::took(late.unwrap_or(0)))
        }
        kind @ (Kind::TooLong | Kind::TooShort) => {
            let took = took.map(|(took, usual)| format!(": after {took}, usually {usual}"));
            format!("{job} {}{}", kind_words(kind), took.unwrap_or_default())
        }
        kind => format!("{job} {}{}", kind_words(kind), exit.unwrap_or_default()),
    }
}

fn outcome(run: &About) -> String {
    let mut out = run.outcome.to_string().replace('_', " ");
    if let Some(code) = run.exit_code {
        let _ = write!(out, ", exit code {code}");
    }
    if let Some(signal) = run.signal {
        let _ = write!(out, ", {}", signal_name(signal));
    }
    if let Some(ms) = run.duration_ms {
        let _ = write!(out, ", after {}", words::took(ms));
    }
    if let Some(ms) = run.lateness_ms.filter(|ms| *ms >= 1000) {
        let _ = write!(out, ", started {} late", words::took(ms));
    }
    if run.count > 1 {
        let _ = write!(out, ", {} occurrences", run.count);
    }
    out
}

/// What is said of one job. `alone`: the message tells of no other.
// Long: one line of the text after the other.
fn describe(item: &Item, s: &Surroundings, alone: bool) -> String {
    let mut out = String::new();
    let mut line = |name: &str, text: &str| {
        let name = if name.is_empty() {
            String::new()
        } else {
            format!("{name}:")
        };
        let _ = writeln!(out, "{name:<12} {text}");
    };
    if item.kind == Kind::Test {
        line("sent by", &format!("{} ({})", s.from, s.namespace));
        line("at", &words::instant(s.now));
        return out + "Nothing is wrong: somebody ran `soloist notify test`.\n";
    }
    line("job", item.job.as_str());
    let both = |ms: i64| match item.zone.as_str() {
        "UTC" => local(ms, "UTC"),
        zone => format!("{} ({})", local(ms, zone), words::instant(ms)),
    };
    if let Some(run) = &item.run {
        line("occurrence", &both(run.occurrence.0));
        line("outcome", &outcome(run));
        if let Some(error) = &run.error {
            line("error", error);
        }
        if run.attempt > 0 {
            let why = match run.trigger {
                Trigger::Schedule => String::new(),
                other => format!(" ({})", other.as_str().replace('_', " ")),
            };
            line("attempt", &format!("{}{why}", run.attempt));
        }
        if let Some(instance) = &run.instance {
            let host = run.host.as_ref().filter(|h| !h.is_empty());
            let host = host.map(|h| format!(" on {h}")).unwrap_or_default();
            line(
                "instance",
                &format!("{}{host}", words::line(instance.as_str())),
            );
        }
    }
    match item.kind {
        Kind::Overdue if item.never => {
            let text = format!(
                "so far, as far as the fleet knows; the job has been watched since {}",
                both(item.since)
            );
            line("no success", &text);
        }
        Kind::Overdue => line("no success", &format!("since {}", both(item.since))),
        Kind::Recovered if item.streak > 0 => line(
            "was bad",
            &format!(
                "since {}, {} in a row",
                both(item.since),
                words::count(usize::try_from(item.streak).unwrap_or(usize::MAX), "end")
            ),
        ),
        Kind::Flapping => line(
            "changes",
            &format!("{} since {}", item.changes, both(item.since)),
        ),
        _ if item.bad && item.streak > 0 => line(
            "bad since",
            &format!("{}, {} in a row", both(item.since), item.streak),
        ),
        _ => {}
    }
    for (name, text) in expectation(item) {
        line(name, &text);
    }
    if let (Kind::Overdue, Some(why)) = (item.kind, &item.now.standstill) {
        line("why", &standstill(why, s.now, both));
    }
    if let Some((since, until, reason)) = &item.now.paused {
        let until = until.map_or("somebody resumes it".to_owned(), both);
        let reason = reason.as_ref().map(|r| format!(": {}", words::line(r)));
        let reason = reason.unwrap_or_default();
        line(
            "paused",
            &format!("since {}, until {until}{reason}", both(*since)),
        );
    }
    if item.now.skip > 0 {
        let many = words::count(item.now.skip as usize, "occurrence");
        line("skipped", &format!("the next {many}, on request"));
    }
    if let Some(next) = item.next {
        let text = match next.saturating_sub(s.now) {
            ..=-1000 => format!("due since {}", both(next)),
            _ => format!("{}, {}", both(next), words::relative(next, s.now)),
        };
        line("next", &text);
    }
    if item.lacked {
        let text = format!(
            "the configuration of {}, which tells this, lacks the job: `soloist status` says more",
            s.from
        );
        line("note", &text);
    }
    let job = item.job.as_str();
    let say = |name: &str, more: &[&str]| words::command(name, &[&[job], more].concat());
    let at = item
        .run
        .as_ref()
        .map(|run| words::instant(run.occurrence.0));
    let why = say("why", &at.iter().map(String::as_str).collect::<Vec<_>>());
    match item.run.as_ref() {
        Some(run) if run.id.is_none() => line("more", &why),
        Some(run) if alone => {
            line("more", &say("history", &[]));
            if let Some(id) = run.id {
                line("", &say("logs", &[&id.to_string()]));
            }
            if item.kind == Kind::Late {
                line("", &why);
            }
        }
        None if alone && item.kind == Kind::Overdue => {
            line("more", &why);
            line("", &say("history", &[]));
        }
        _ => line("more", &say("history", &[])),
    }
    if let Some(link) = s.link(item) {
        line("link", &link);
    }
    let output = item.run.as_ref().map_or("", |run| run.output.as_str());
    let lines: Vec<&str> = output.lines().collect();
    let most = if alone { OUTPUT_LINES } else { OUTPUT_OF_MANY };
    let lines = lines
        .get(lines.len().saturating_sub(most)..)
        .unwrap_or_default();
    if !lines.is_empty() && item.bad {
        out += "the end of its output:\n";
        for line in lines {
            let _ = writeln!(out, "  {line}");
        }
    }
    out
}

/// Why an overdue job has no success. `both`: a time in words.
fn standstill(why: &Standstill, now: i64, both: impl Fn(i64) -> String) -> String {
    match why {
        Standstill::Runs { since, on } => format!(
            "it has been running for {}, since {}, on {}, and has not ended",
            words::span(now - since),
            both(*since),
            words::line(on.as_str()),
        ),
        Standstill::Nobody => "no instance has the job".to_owned(),
        Standstill::Ended { outcome, at } => {
            let outcome = outcome.to_string().replace('_', " ");
            format!("its last run ended {} ({outcome})", both(*at))
        }
        Standstill::Idle => "no run of it has started since then".to_owned(),
    }
}

/// The one reason for which a run started late.
fn reason(wait: Wait, ms: u64) -> String {
    let time = words::took(i64::try_from(ms).unwrap_or(i64::MAX));
    match wait {
        Wait::Jitter => format!("its `jitter` delayed it by {time}"),
        Wait::Slot => {
            format!(
                "it waited {time} for a free slot: as many runs as `max_parallel` allows went on"
            )
        }
        Wait::Overlap => format!("it waited {time} for the run before it, or for a pause to end"),
        Wait::StoreAway => format!("it waited {time} for the store to answer"),
        Wait::Overdue => format!("no instance could start it for {time}; then it was caught up"),
        Wait::Host => format!("its host took {time} to start it, after the store had granted it"),
    }
}

/// What was expected of the job, and for a late start why it was late.
fn expectation(item: &Item) -> Vec<(&'static str, String)> {
    let Some(expected) = item.expected else {
        return vec![];
    };
    let of_successes = "the median of its last successes";
    match (item.kind, &item.run) {
        (Kind::TooLong, _) => vec![(
            "usually",
            format!(
                "{}, {of_successes}; more than three times that is told",
                words::took(expected)
            ),
        )],
        (Kind::TooShort, _) => vec![(
            "usually",
            format!(
                "{}, {of_successes}; less than a third of that is told",
                words::took(expected)
            ),
        )],
        (Kind::Late, Some(run)) => {
            let why = match run.waited {
                Some((wait, ms)) => reason(wait, ms),
                // An older version ran it, or its daemon died.
                None => "nobody noted what it waited for".to_owned(),
            };
            vec![
                (
                    "late",
                    format!(
                        "{} after its planned time; from {} on it is told (`late_after`)",
                        words::took(run.lateness_ms.unwrap_or(0)),
                        words::took(expected)
                    ),
                ),
                ("why", why),
            ]
        }
        (Kind::Overdue, _) => vec![(
            "expected",
            format!(
                "a success within {} (`expect_success_within`)",
                words::span(expected)
            ),
        )],
        _ => vec![],
    }
}

/// `3 jobs (a, b, c): 2 failed, 1 recovered`.
fn heading(message: &Message, now: i64) -> String {
    if let ([item], 0) = (&message.items[..], message.more) {
        return title(item, now);
    }
    let mut kinds: Vec<(Kind, u64)> = vec![];
    let named = message.items.iter().map(|i| i.kind);
    let mut told = 0;
    for kind in named.chain(message.others.iter().map(|(_, kind)| *kind)) {
        told += 1;
        match kinds.iter_mut().find(|(k, _)| *k == kind) {
            Some((_, n)) => *n += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let mut jobs: Vec<&JobName> = message.items.iter().map(|i| &i.job).collect();
    jobs.extend(message.others.iter().map(|(job, _)| job));
    jobs.sort();
    jobs.dedup();
    let all = message.items.len() as u64 + message.more;
    let parts: Vec<String> = kinds
        .iter()
        .map(|(kind, n)| format!("{n} {}", kind_words(*kind)))
        .collect();
    let unnamed = all.saturating_sub(told);
    let more = match unnamed {
        0 => String::new(),
        n => format!(", {n} more"),
    };
    let jobs = jobs.len() + usize::try_from(unnamed).unwrap_or(usize::MAX);
    format!(
        "{} ({}): {}{more}",
        words::count(jobs, "job"),
        first_names(message, jobs),
        parts.join(", ")
    )
}

/// The first jobs of a message: `a, b, c, …`.
fn first_names(message: &Message, jobs: usize) -> String {
    let mut names: Vec<String> = vec![];
    for item in &message.items {
        let name = cut(item.job.as_str(), TITLE_NAME_MOST);
        if names.len() < TITLE_NAMES && !names.contains(&name) {
            names.push(name);
        }
    }
    if names.len() < jobs {
        names.push("…".to_owned());
    }
    names.join(", ")
}

impl Text {
    pub(super) fn of(message: &Message, id: &str, s: &Surroundings) -> Self {
        let title = heading(message, s.now);
        let alone = message.items.len() == 1 && message.more == 0;
        let mut body = Body::default();
        if message.perhaps_sent {
            body.intro += "This may be a repetition: an earlier try to send this message may have succeeded.\n\n";
        }
        if s.now - message.at > 60_000 && message.tries > 0 {
            let late = words::span(s.now - message.at);
            let _ = write!(
                body.intro,
                "This message is {late} late: earlier tries failed.\n\n"
            );
        }
        let mut subjects = vec![];
        for (n, item) in message.items.iter().enumerate() {
            let text = describe(item, s, alone);
            let title = self::title(item, s.now);
            if !alone {
                let gap = if n > 0 { "\n" } else { "" };
                let _ = writeln!(body.details, "{gap}{title}");
            }
            body.details += &text;
            subjects.push(Subject {
                job: item.job.to_string(),
                kind: item.kind.as_str(),
                bad: item.bad,
                title,
                text,
                link: s.link(item),
                key: key(item, s),
            });
        }
        if message.items.len() > TITLE_NAMES || message.more > 0 {
            let told = message.items.iter().map(|i| (&i.job, i.kind));
            for (job, kind) in told.chain(message.others.iter().map(|(job, kind)| (job, *kind))) {
                let what = kind_words(kind);
                match body.names.iter_mut().find(|(w, _)| *w == what) {
                    Some((_, jobs)) => jobs.push(job.clone()),
                    None => body.names.push((what, vec![job.clone()])),
                }
            }
            body.unnamed = message.more - message.others.len() as u64;
        }
        if !alone {
            body.closing = "\nmore:        soloist status\n".to_owned();
        }
        let items: Vec<Json> = message.items.iter().map(|i| item_json(i, s)).collect();
        let bad = message.items.iter().any(|i| i.bad);
        let json = json!({
            "id": id,
            "title": title,
            "text": body.whole(),
            "bad": bad,
            "channel": message.channel,
            "namespace": s.namespace,
            "sent_by": s.from,
            "at": rfc3339_ms(message.at),
            "perhaps_sent": message.perhaps_sent,
            "tries": message.tries,
            "items": items,
            "others": message.others.iter().map(|(job, kind)| json!({"job": job, "kind": kind})).collect::<Vec<_>>(),
            "more": message.more,
        });
        Self {
            id: id.to_owned(),
            title,
            body,
            json,
            bad,
            source: s.from.to_string(),
            subjects,
        }
    }
}

/// What names the incident of a job.
fn key(item: &Item, s: &Surroundings) -> String {
    match item.kind {
        // No job has this name: a test must not resolve the incident of one that is called `test`.
        Kind::Test => format!("soloist/{}//test", s.namespace),
        _ => format!("soloist/{}/{}", s.namespace, item.job),
    }
}

fn item_json(item: &Item, s: &Surroundings) -> Json {
    let run = item.run.as_ref().map(|run| {
        json!({
            "run_id": run.id,
            "occurrence": run.occurrence.to_string(),
            "local": local(run.occurrence.0, &item.zone),
            "trigger": run.trigger,
            "attempt": run.attempt,
            "outcome": run.outcome,
            "exit_code": run.exit_code,
            "signal": run.signal,
            "error": run.error,
            "instance": run.instance,
            "host": run.host,
            "started_at": run.started_at.map(rfc3339_ms),
            "duration_ms": run.duration_ms,
            "lateness_ms": run.lateness_ms,
            "waited_for": run.waited.map(|(wait, _)| wait),
            "count": run.count,
            "output": run.output,
        })
    });
    json!({
        "job": item.job,
        "kind": item.kind,
        "bad": item.bad,
        "streak": item.streak,
        "since": rfc3339_ms(item.since),
        "changes": item.changes,
        "next": item.next.map(rfc3339_ms),
        "paused": item.now.paused.is_some(),
        "expected_ms": item.expected,
        "never": item.never,
        "link": s.link(item),
        "run": run,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config,
        model::{Occurrence, RunId},
    };

    const NOW: i64 = 1_795_233_605_000;

    fn surroundings() -> Surroundings {
        Surroundings {
            namespace: "soloist".to_owned(),
            public_url: Some("https://soloist.example.org".to_owned()),
            from: InstanceId::new("web2-9c41"),
            now: NOW,
        }
    }

    fn job() -> std::sync::Arc<Job> {
        let text = "[jobs.lottery-draw]\ncommand = 'x'\nschedule = '0 12 * * *'\ntimezone = 'Asia/Shanghai'\n";
        let config = config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
        let config = config.expect("sound");
        config.jobs.values().next().expect("a job").clone()
    }

    fn record(outcome: Outcome) -> RunRecord {
        let job = JobName::new("lottery-draw");
        let at = Occurrence(1_795_233_600_000);
        let r = RunRecord::without_run(&job, at, Trigger::Schedule, outcome);
        if outcome == Outcome::Missed {
            return r;
        }
        RunRecord {
            run_id: Some(RunId(uuid::Uuid::from_u128(
                0x01a2_1348_253a_71b7_825a_4d60_e547_2a9e,
            ))),
            attempt: 2,
            trigger: Trigger::Retry,
            instance: Some(InstanceId::new("web1-a1b2")),
            host: Some("web1".to_owned()),
            exit_code: (outcome == Outcome::Failed).then_some(3),
            ..r.lasting(Some(at.0 + 12), Some(at.0 + 1252))
        }
    }

    fn one(kind: Kind, bad: bool, run: Option<(Outcome, &str)>) -> Item {
        let verdict = Verdict {
            channel: "ops".to_owned(),
            kind,
            bad,
            streak: u64::from(bad && run.is_some()),
            since: 1_795_233_601_252,
            changes: 0,
        };
        let run = run.map(|(outcome, output)| about(&record(outcome), output));
        let job = job();
        item(&job.name, Some(&job), &verdict, run, NOW)
    }

    /// A run that was planned and succeeded, with the time that it took, and its lateness, ms.
    fn planned(kind: Kind, took: i64, late: i64, expected: i64) -> Item {
        let mut item = one(kind, true, Some((Outcome::Succeeded, "")));
        if let Some(run) = &mut item.run {
            (run.attempt, run.trigger) = (1, Trigger::Schedule);
            (run.duration_ms, run.lateness_ms) = (Some(took), Some(late));
        }
        item.expected = Some(expected);
        item
    }

    fn late() -> Item {
        let mut item = planned(Kind::Late, 1240, 43_000, 10_000);
        if let Some(run) = &mut item.run {
            run.waited = Some((Wait::Slot, 41_000));
        }
        item
    }

    fn shown(item: Item) -> String {
        let message = Message::new(item, "ops", NOW);
        let text = Text::of(&message, "1", &surroundings());
        format!("{}\n\n{}", text.title, text.body.whole())
    }

    /// Every kind of message, once. `SOLOIST_WRITE_DOCS=1 cargo test --lib the_page_has_each` writes them.
    #[test]
    fn the_page_has_each_kind_of_message() {
        let output =
            "reading 1423 entrants\nentrant 77 has no address\ndraw: cannot pick 10 winners\n";
        let failed = one(Kind::Failed, true, Some((Outcome::Failed, output)));
        let mut killed = one(Kind::Failed, true, Some((Outcome::Failed, "")));
        if let Some(run) = &mut killed.run {
            (run.exit_code, run.signal) = (None, Some(libc::SIGTERM));
        }
        let mut recovered = one(Kind::Recovered, false, Some((Outcome::Succeeded, "")));
        recovered.streak = 3;
        recovered.since -= 3 * 86_400_000;
        let mut overdue = one(Kind::Overdue, true, None);
        overdue.since = NOW - 26 * 3_600_000;
        overdue.expected = Some(26 * 3_600_000);
        let mut never = overdue.clone();
        never.never = true;
        never.now.standstill = Some(Standstill::Idle);
        let mut hangs = overdue.clone();
        hangs.now.standstill = Some(Standstill::Runs {
            since: NOW - 25 * 3_600_000,
            on: InstanceId::new("web1-a1b2"),
        });
        overdue.now.standstill = Some(Standstill::Ended {
            outcome: Outcome::Failed,
            at: NOW - 2 * 3_600_000,
        });
        let mut paused = failed.clone();
        paused.now.paused = Some((NOW - 60_000, None, Some("disks".to_owned())));
        paused.next = None;
        let mut lacked = failed.clone();
        (lacked.lacked, lacked.zone, lacked.next) = (true, "UTC".to_owned(), None);
        let mut flapping = one(Kind::Flapping, true, None);
        flapping.since = NOW - 120_000;
        flapping.changes = 37;
        let mut many = Message::new(failed.clone(), "ops", NOW);
        for n in 1..1000 {
            let job = JobName::new(&format!("report-{n}"));
            many.join(
                Item {
                    job,
                    ..failed.clone()
                },
                NOW,
            );
        }
        // Of so many the page shows two.
        many.items.truncate(2);
        many.others.truncate(2);
        let many = Text::of(&many, "1", &surroundings());
        let test = Text::of(&test_message("ops", NOW), "test", &surroundings());
        // A job may be called `test`.
        assert_eq!(test.subjects[0].key, "soloist/soloist//test");
        let all = [
            ("A run failed", shown(failed)),
            ("A signal ended a run", shown(killed)),
            (
                "A run reached its time limit",
                shown(one(Kind::TimedOut, true, Some((Outcome::TimedOut, output)))),
            ),
            (
                "The daemon of a run died",
                shown(one(Kind::Crashed, true, Some((Outcome::Crashed, "")))),
            ),
            (
                "The host of a run vanished",
                shown(one(Kind::Unknown, true, Some((Outcome::Unknown, "")))),
            ),
            (
                "A run lost its lease",
                shown(one(Kind::LeaseLost, true, Some((Outcome::LeaseLost, "")))),
            ),
            (
                "An occurrence was missed",
                shown(one(Kind::Missed, true, Some((Outcome::Missed, "")))),
            ),
            ("A run started late", shown(late())),
            (
                "A run took unusually long",
                shown(planned(Kind::TooLong, 1_264_000, 12, 41_000)),
            ),
            (
                "A run ended unusually soon",
                shown(planned(Kind::TooShort, 1240, 12, 41_000)),
            ),
            ("The job recovered", shown(recovered)),
            ("No success for too long", shown(overdue)),
            ("No success for too long: it hangs", shown(hangs)),
            ("No success so far", shown(never)),
            ("A job that keeps changing", shown(flapping)),
            ("A job that is paused now", shown(paused)),
            ("A job that the sender's configuration lacks", shown(lacked)),
            (
                "Several jobs at once (shortened)",
                format!("{}\n\n{}", many.title, many.body.whole()),
            ),
            ("A test", format!("{}\n\n{}", test.title, test.body.whole())),
        ];
        let mut written = String::new();
        for (what, text) in all {
            let _ = write!(
                written,
                "### {what}\n\n```text\n{}\n```\n\n",
                text.trim_end()
            );
        }
        let page = include_str!("../../docs/notifications.md");
        let (before, rest) = page.split_once("<!-- messages -->\n").expect("a mark");
        let (_, after) = rest.split_once("<!-- end of messages -->").expect("a mark");
        let new = format!("{before}<!-- messages -->\n{written}<!-- end of messages -->{after}");
        if std::env::var_os("SOLOIST_WRITE_DOCS").is_some() {
            std::fs::write("docs/notifications.md", &new).expect("write");
        }
        assert!(
            new == page,
            "docs/notifications.md is old: write it with SOLOIST_WRITE_DOCS=1"
        );
    }

    /// Whoever reads a message may be woken by it: times are said as they are when it is sent.
    #[test]
    fn a_message_that_waited_says_when_the_job_comes_next_from_now_on() {
        let job = job();
        let text = "[jobs.lottery-draw]\ncommand = 'x'\nschedule = '* * * * *'\n[jobs.off]\ncommand = 'x'\n";
        let config = config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
        let config = config.expect("sound");
        let mut failed = one(Kind::Failed, true, Some((Outcome::Failed, "")));
        failed.next = Some(NOW - 2000);
        let mut gone = failed.clone();
        gone.job = JobName::new("gone");
        let mut message = Message::new(failed.clone(), "ops", NOW - 60_000);
        message.join(gone, NOW - 60_000);
        let none = BTreeMap::new();
        let fresh = refreshed(&message, &config, &none, NOW);
        assert_eq!(fresh.items[1].next, Some(NOW - NOW % 60_000 + 60_000));
        assert_eq!(fresh.items[0].next, None, "nobody plans it here");
        assert_eq!(job.name, fresh.items[1].job);
        // What is due says so.
        let mut next = |at: i64| {
            failed.next = Some(at);
            let text = shown(failed.clone());
            let line = text.lines().find(|l| l.starts_with("next:"));
            line.expect("a line").to_owned()
        };
        assert!(next(NOW - 2000).contains("due since Sat 2026-11-21"));
        assert!(next(NOW + 500).ends_with(", now"));
        assert!(next(NOW + 2000).ends_with(", in 2 s"));
    }

    #[test]
    fn a_message_says_that_its_job_is_paused_when_it_is_sent() {
        let text = "[jobs.lottery-draw]\ncommand = 'x'\nschedule = '0 * * * *'\n";
        let config = config::parse(text, std::path::Path::new("jobs.toml"), &|_| None);
        let config = config.expect("sound");
        let failed = one(Kind::Failed, true, Some((Outcome::Failed, "")));
        let message = Message::new(failed.clone(), "ops", NOW - 60_000);
        let said = |state: State| {
            let states = BTreeMap::from([(failed.job.clone(), state)]);
            let fresh = refreshed(&message, &config, &states, NOW);
            let of = Text::of(&fresh, "1", &surroundings());
            assert_eq!(
                of.json["items"][0]["paused"],
                fresh.items[0].now.paused.is_some()
            );
            of.body.whole()
        };
        let pause = |until: Option<i64>| {
            Some(crate::logic::claim::Pause {
                until,
                reason: Some("disks\nare full".to_owned()),
                at: NOW - 5000,
            })
        };
        let at_rest = said(State::default());
        assert!(!at_rest.contains("paused:"), "{at_rest}");
        assert!(
            at_rest.contains("next:        Sat 2026-11-21 13:00:00 +08:00"),
            "{at_rest}"
        );
        let mut state = State {
            pause: pause(None),
            ..State::default()
        };
        let for_ever = said(state.clone());
        let line = "until somebody resumes it: disks\\nare full\n";
        assert!(
            for_ever.contains("paused:      since Sat 2026-11-21 12:00:00"),
            "{for_ever}"
        );
        assert!(
            for_ever.contains(line) && !for_ever.contains("next:"),
            "{for_ever}"
        );
        // The pause ends at 14:00: what is planned then runs.
        state.pause = pause(Some(NOW - NOW % 3_600_000 + 2 * 3_600_000));
        let later = said(state.clone());
        assert!(
            later.contains("next:        Sat 2026-11-21 14:00:00 +08:00"),
            "{later}"
        );
        (state.pause, state.skip) = (None, 2);
        let skipped = said(state);
        assert!(
            skipped.contains("skipped:     the next 2 occurrences, on request"),
            "{skipped}"
        );
        assert!(
            skipped.contains("next:        Sat 2026-11-21 15:00:00 +08:00"),
            "{skipped}"
        );
    }

    /// Whoever reads a text that was cut sees which jobs it is about, and which command says more.
    #[test]
    fn the_names_and_the_last_line_survive_a_cut() {
        let failed = one(
            Kind::Failed,
            true,
            Some((Outcome::Failed, &"x\n".repeat(100))),
        );
        for length in [1, 90] {
            let mut m = Message::new(failed.clone(), "ops", NOW);
            for n in 0..1000 {
                let job = JobName::new(&format!("j{n}-{}", "x".repeat(length)));
                let kind = if n % 7 == 0 {
                    Kind::Missed
                } else {
                    Kind::Failed
                };
                let item = Item {
                    job,
                    kind,
                    ..failed.clone()
                };
                m.join(item, NOW);
            }
            m.arrange();
            let text = Text::of(&m, "1", &surroundings());
            for most in [1700, 3500, 26_000] {
                let cut = text.body.within(most, letters, cut);
                assert!(letters(&cut) <= most, "{}", letters(&cut));
                assert!(cut.ends_with("\nmore:        soloist status\n"), "{cut}");
                let first = cut.lines().next().expect("a line");
                assert!(first.starts_with("was missed: j0-x"), "{cut}");
                // All are accounted for.
                let names = cut.split("\n\n").next().expect("names");
                let named = names.matches("-x").count() + names.matches("lottery-draw").count();
                let words = names.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
                let words: Vec<&str> = words.collect();
                let left: usize = (words.windows(2))
                    .filter(|pair| pair[1] == "more")
                    .map(|pair| pair[0].parse::<usize>().expect("a number"))
                    .sum();
                assert_eq!(named + left, 1001, "{most}: {names}");
                assert!(named > 5, "{names}");
            }
        }
    }

    #[test]
    fn output_is_cut_at_its_begin_and_acts_on_nothing() {
        let long = "é".repeat(5000) + "\n\x1b[2J\u{202e}last\r\n";
        let cut = last_lines(&long);
        assert!(cut.ends_with("\n\\x1b[2J\\u{202e}last"), "{cut}");
        assert_eq!(cut.chars().count(), OUTPUT_MOST);
        assert!(cut.starts_with('…'));
        let many: String = (0..100).map(|n| format!("{n}\n")).collect();
        assert_eq!(last_lines(&many).lines().count(), OUTPUT_LINES);
        assert_eq!(last_lines(""), "");
        assert_eq!(super::cut("ééé", 2), "é…");
    }

    #[test]
    fn the_heading_of_many_counts_them() {
        let failed = one(Kind::Failed, true, Some((Outcome::Failed, "")));
        let mut m = Message::new(failed.clone(), "ops", NOW);
        for n in 1..1000 {
            let job = JobName::new(&format!("j{n}"));
            let kind = if n == 5 { Kind::Missed } else { Kind::Failed };
            m.join(
                Item {
                    job,
                    kind,
                    ..failed.clone()
                },
                NOW,
            );
        }
        let text = Text::of(&m, "1", &surroundings());
        assert_eq!(
            text.title,
            "1000 jobs (lottery-draw, j1, j2, …): 119 failed, 1 was missed, 880 more"
        );
        let length = text.body.whole().len();
        assert!(length < 30_000, "{length}");
        m.perhaps_sent = true;
        assert!(
            Text::of(&m, "1", &surroundings())
                .body
                .intro
                .starts_with("This may be a repetition")
        );
    }
}
