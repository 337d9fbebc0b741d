//! The jobs of the fleet: all overlap rules, both crash policies, retries, runs that are shorter and longer than a
//! lease, and one with children.

use super::judge::{Job, MS, Repeats};

/// The lease of the fleet, and of the job that has a longer one.
pub const LEASE_MS: i64 = 2000;
const LONG_LEASE_MS: i64 = 5000;

/// For all jobs: how late an occurrence may start.
pub const START_WITHIN_MS: i64 = 20_000;

/// A job that is removed from the files and comes back.
pub const OPTIONAL: &str = "optional";
/// A job that only triggers start.
pub const TRIGGERED: &str = "triggered";

/// A job as the judge sees it, and the lines of its table.
pub struct Planned {
    pub judged: Job,
    pub lines: String,
}

fn job(name: &'static str, seconds: i64, witness: &str, lines: &str) -> Planned {
    let schedule = match seconds {
        0 => "[]".into(),
        n => format!("\"*/{n} * * * * *\""),
    };
    let options: String = witness
        .split_whitespace()
        .map(|o| format!(", {o:?}"))
        .collect();
    let lease = if lines.contains("lease =") {
        LONG_LEASE_MS
    } else {
        LEASE_MS
    };
    let repeats = if lines.contains("rerun") {
        Repeats::AfterCrash
    } else if lines.contains("retry") {
        Repeats::AfterFailure
    } else {
        Repeats::Never
    };
    Planned {
        judged: Job {
            name,
            period_ms: (seconds > 0).then_some(seconds * 1000),
            lease_ns: lease * MS,
            may_overlap: lines.contains("\"allow\""),
            repeats,
            succeeds: !witness.contains("exit="),
            start_within_ms: millis(lines, "start_within").unwrap_or(START_WITHIN_MS),
            jitter_ms: millis(lines, "jitter").unwrap_or(0),
            comes_and_goes: name == OPTIONAL || lines.contains("start_within"),
        },
        lines: format!(
            "schedule = {schedule}\ncommand = [\"{{witness}}\", \"{{trace}}\", \"beat=50\"{options}]\n{lines}"
        ),
    }
}

/// The value of a key, if it is written as `"300ms"`.
fn millis(lines: &str, key: &str) -> Option<i64> {
    let value = lines.split(&format!("{key} = \"")).nth(1)?;
    value.split("ms\"").next()?.parse().ok()
}

/// Jobs that come and go: with and without jitter, with each rule for what is overdue, and one that runs most of the
/// time.
pub fn that_come_and_go() -> Vec<Planned> {
    let lines = |overlap, jitter, catch_up| {
        format!(
            "overlap = \"{overlap}\"\nstart_within = \"3000ms\"\njitter = \"{jitter}ms\"\ncatch_up = \"{catch_up}\"\n"
        )
    };
    vec![
        job("prompt", 1, "for=100", &lines("queue", 0, "all")),
        job("jitters", 1, "for=100", &lines("queue", 300, "latest")),
        job("jitters-more", 2, "for=300", &lines("queue", 900, "all")),
        job("lasts", 1, "for=2700", &lines("skip", 0, "latest")),
    ]
}

/// So many jobs that are due at the same instants, ten seconds apart.
pub fn that_start_at_once(n: usize) -> Vec<Planned> {
    let lines = "overlap = \"queue\"\ncatch_up = \"all\"\n";
    let name = |i| -> &'static str { format!("burst-{i}").leak() };
    (0..n).map(|i| job(name(i), 10, "for=20", lines)).collect()
}

pub fn all() -> Vec<Planned> {
    vec![
        job(
            "quick",
            1,
            "for=20",
            "overlap = \"queue\"\ncatch_up = \"all\"\n",
        ),
        job("skips", 2, "for=1700", "overlap = \"skip\"\n"),
        job(
            "queues",
            3,
            "for=1200",
            "overlap = \"queue\"\ncatch_up = \"all\"\non_crash = \"rerun\"\nmax_attempts = 9\n",
        ),
        job(
            "replaces",
            5,
            "for=6500 ignore-term",
            "overlap = \"replace\"\n",
        ),
        job("allows", 4, "for=5000", "overlap = \"allow\"\n"),
        job(
            "long",
            10,
            "for=8500",
            "overlap = \"skip\"\non_crash = \"rerun\"\nmax_attempts = 9\n",
        ),
        job(
            "tree",
            5,
            "for=3500 life=60000 ignore-term setsid daemon",
            "overlap = \"queue\"\ncatch_up = \"all\"\non_crash = \"rerun\"\nmax_attempts = 9\n",
        ),
        job(
            "retries",
            4,
            "for=100 exit=3",
            "overlap = \"queue\"\ncatch_up = \"all\"\nretry = { attempts = 2, interval = \"300ms\" }\n",
        ),
        job(
            "patient",
            10,
            "for=9000 life=60000 ignore-term daemon",
            "overlap = \"skip\"\nlease = \"5s\"\n",
        ),
        job(OPTIONAL, 3, "for=300", "overlap = \"skip\"\n"),
        job(TRIGGERED, 0, "for=200", "overlap = \"queue\"\n"),
    ]
}
