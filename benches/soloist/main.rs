//! What soloist costs, measured side by side with the floor in the same run: ratios, not times, are what to keep.
//!
//! `cargo bench` runs everything, `cargo bench -- claim idle` a part. Parts: claim, wakeups, instant, lateness, idle,
//! start, takeover, runs, held, http, page, notify. `SOLOIST_BENCH_SECONDS` is how long each lateness, idle, runs, held
//! and notify measurement takes (default 30). docs/performance.md says what each row means and keeps the figures. Redis
//! is a server of our own on a Unix socket; nothing is left running.

mod claim;
mod daemon;
mod http;
mod idle;
mod instant;
mod lateness;
mod notify;
mod page;
mod program;
mod runs;
mod support;
mod takeover;

use support::{Redis, Table};

type Part = fn(&mut Table, &Redis);

const PARTS: [(&str, Part); 12] = [
    ("claim", claim::run),
    ("wakeups", instant::wakeups),
    ("instant", instant::run),
    ("lateness", lateness::run),
    ("idle", idle::run),
    ("start", idle::start),
    ("takeover", takeover::run),
    ("runs", runs::run),
    ("held", runs::held),
    ("http", http::run),
    ("page", page::run),
    ("notify", notify::run),
];

fn main() {
    // The commands that the measured daemons run are this program too.
    if program::main() {
        return;
    }
    // Cargo adds `--bench`.
    let asked: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    for name in &asked {
        if !PARTS.iter().any(|(part, _)| part == name) {
            let parts = PARTS.map(|(part, _)| part).join(", ");
            eprintln!("no part is called `{name}`; there are: {parts}");
            std::process::exit(64);
        }
    }
    let mut table = Table::default();
    let mut machine = support::machine();
    for (name, part) in PARTS {
        if asked.is_empty() || asked.iter().any(|a| a == name) {
            eprintln!("{name} ...");
            // A server of its own for each part: none measures what another left behind.
            let redis = Redis::start();
            machine.redis = redis.version();
            part(&mut table, &redis);
        }
    }
    println!("{machine}");
    println!("{table}");
}
