//! `cargo test --release --test harness -- --for 1h --seed 7 --instances 5 --out DIR`: see docs/faults.md.

#[path = "mod.rs"]
mod harness;
#[allow(dead_code, unused_imports, reason = "shared with the other tests")]
#[path = "../it/support/mod.rs"]
mod support;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;

/// Does everything to a fleet that may go wrong, and judges what it does.
#[derive(Parser)]
#[command(name = "harness")]
struct Args {
    /// How long: 30s, 5m, 1h
    #[arg(long = "for", default_value = "5m", value_parser = span)]
    lasts: Duration,
    /// Chooses the faults and their order; a random one if not given
    #[arg(long)]
    seed: Option<u64>,
    #[arg(long, default_value_t = 3)]
    instances: usize,
    /// Most faults at one time
    #[arg(long, default_value_t = 3)]
    at_once: usize,
    /// For the log, the trace and what the daemons wrote
    #[arg(long, default_value = "target/harness")]
    out: PathBuf,
    /// Only faults whose names have this in them; can be given again
    #[arg(long)]
    only: Vec<String>,
    /// Jobs with jitter are removed, disabled and brought back; only what bears on that goes wrong besides
    #[arg(long)]
    come_and_go: bool,
    /// So many jobs that are all due at one instant, each ten seconds, in place of the others
    #[arg(long, conflicts_with = "come_and_go")]
    bursts: Option<usize>,
    /// A fault strikes each time after so long, with no calm between; not if not given
    #[arg(long, value_parser = span)]
    every: Option<Duration>,
    /// Ends at the first broken promise
    #[arg(long)]
    until_broken: bool,
}

/// Late starts, a quarantine and a wrong clock are over by then.
const CALM: Duration = Duration::from_secs(25);

fn span(text: &str) -> Result<Duration, String> {
    soloist::model::duration::parse(text).map_err(|wrong| wrong.message)
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn before_main() {
        support::process::leave_nothing_behind();
    }
    before_main
};

/// Disks are to be unmounted, and processes to be ended.
fn end_in_good_order() {
    extern "C" fn stop(_: libc::c_int) {
        harness::STOP.store(true, std::sync::atomic::Ordering::SeqCst);
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let handler = stop as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: the handler only writes to an atomic.
        unsafe { libc::signal(signal, handler) };
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    end_in_good_order();
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
    println!("seed {seed}");
    let report = harness::run(&harness::Options {
        lasts: args.lasts,
        least_faults: 0,
        calm: CALM,
        seed,
        instances: args.instances,
        at_once: args.at_once,
        // Those whom it starts have other working directories.
        out: std::path::absolute(&args.out).expect("a working directory"),
        only: args.only,
        come_and_go: args.come_and_go,
        bursts: args.bursts,
        every: args.every,
        until_broken: args.until_broken,
        quiet: false,
    });
    println!("\n{}", report.table);
    println!("the log is {}", args.out.join("log").display());
    let broken = report.verdict.broken().count();
    println!("{} faults, {broken} broken promises", report.faults);
    if let Some(at) = report.first_broken {
        println!("the first after {:.1} s", at.as_secs_f64());
    }
    match broken == 0 {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
