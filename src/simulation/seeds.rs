//! Runs each seed in a process of its own, because tokio's random choices depend on how many runtimes the process has
//! already made.

use std::{collections::BTreeSet, process::Command};

use super::fleet::{Options, Outcome, run};

const OPTIONS: &str = "SOLOIST_SIMULATE";
const OUTCOME: &str = "SOLOIST_SIMULATED";

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |n| n.parse().expect("a number"))
}

fn options(seed: u64) -> Options {
    Options {
        seed,
        hosts: 3,
        stormy: number("SOLOIST_STORMY", 12),
        calm: number("SOLOIST_CALM", 30),
        without: BTreeSet::new(),
    }
}

/// The process of [`simulated`].
#[test]
#[ignore = "only for the other tests here"]
fn one() {
    let options = std::env::var(OPTIONS).expect("options");
    let options: Options = serde_json::from_str(&options).expect("options");
    let outcome = run(&options);
    super::lua::write_lines();
    let file = std::env::var(OUTCOME).expect("a file");
    std::fs::write(file, serde_json::to_vec(&outcome).expect("JSON")).expect("a file");
}

fn simulated(options: &Options) -> Outcome {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let output = Command::new(std::env::current_exe().expect("a path"))
        .args([
            "simulation::seeds::one",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .env(OPTIONS, serde_json::to_string(options).expect("JSON"))
        .env(OUTCOME, file.path())
        .output()
        .expect("this program");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{options:?}: {text}");
    let outcome = std::fs::read(file.path()).expect("the outcome");
    serde_json::from_slice(&outcome).expect("an outcome")
}

/// With as few faults as break it.
fn shrunk(mut options: Options, outcome: Outcome) -> (Options, Outcome) {
    let mut least = outcome;
    for fault in (0..least.last_fault).rev() {
        let mut fewer = options.clone();
        fewer.without.insert(fault);
        let outcome = simulated(&fewer);
        if !outcome.broken.is_empty() {
            (options, least) = (fewer, outcome);
        }
    }
    (options, least)
}

#[test]
fn a_seed_gives_the_same_trace_each_time() {
    let short = Options {
        stormy: 20,
        calm: 15,
        ..options(4)
    };
    let [a, b] = [(); 2].map(|()| simulated(&short));
    assert_eq!(a, b);
    assert!(a.starts > 20 && a.faults > 3, "{}", a.trace);
}

/// Seeds from SOLOIST_SEED (default 0), SOLOIST_SEEDS of them (default 30), two at a time, each with
/// SOLOIST_STORMY seconds of faults (default 12) and SOLOIST_CALM seconds after them (default 30).
#[test]
fn the_promises_hold_for_each_seed() {
    let (first, seeds) = (number("SOLOIST_SEED", 0), number("SOLOIST_SEEDS", 30));
    let begun = std::time::Instant::now();
    let next = std::sync::atomic::AtomicU64::new(first);
    let work = || {
        let (mut sum, mut broken) = ((0, 0, 0, 0), vec![]);
        loop {
            let seed = next.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            if seed >= first + seeds {
                return (sum, broken);
            }
            let outcome = simulated(&options(seed));
            sum.0 += outcome.faults;
            sum.1 += outcome.starts;
            sum.2 += outcome.questions;
            sum.3 += usize::from(outcome.rewound > 0);
            if !outcome.broken.is_empty() {
                println!("seed {seed}: {:?}", outcome.broken);
                broken.push((seed, outcome));
            }
        }
    };
    let (mut sum, mut broken) = ((0, 0, 0, 0), vec![]);
    std::thread::scope(|s| {
        for worker in [s.spawn(work), s.spawn(work)] {
            let (part, found) = worker.join().expect("a worker");
            sum = (
                sum.0 + part.0,
                sum.1 + part.1,
                sum.2 + part.2,
                sum.3 + part.3,
            );
            broken.extend(found);
        }
    });
    let of = options(0);
    let hours = (seeds * (of.stormy + of.calm)) as f64 / 3600.0;
    let took = begun.elapsed();
    println!(
        "{seeds} seeds, {hours:.1} simulated hours in {took:?} ({:.1} a minute): {} faults, {} starts, {} questions; jobs were rewound in {} seeds",
        hours / took.as_secs_f64() * 60.0,
        sum.0,
        sum.1,
        sum.2,
        sum.3
    );
    broken.sort_by_key(|(seed, _)| *seed);
    if let Some((seed, outcome)) = broken.into_iter().next() {
        let (options, outcome) = shrunk(options(seed), outcome);
        panic!("{options:?}: {:#?}\n{}", outcome.broken, outcome.trace);
    }
}
