//! The fault harness: a fleet of real daemons on a real Redis, everything around it going wrong, and a judge.
//! docs/faults.md says how to use it; `judge::Kind` has the rows of its table.

mod cgroup;
mod clocks;
mod comings;
mod commands;
mod data;
mod disk;
mod effect;
mod faults;
mod jobs;
mod judge;
mod network;
mod processes;
mod resources;
mod stage;
mod table;
#[cfg(test)]
#[allow(unused, reason = "there are no tests in the harness's own program")]
mod tests;

use std::{
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::Duration,
};

use self::{faults::Weather, judge::Verdict, stage::Stage};
use crate::support::{GENEROUS, process::boottime_ns, wait_until};

/// What is to be done.
pub struct Options {
    pub lasts: Duration,
    /// It lasts longer where less has struck by then, which a slow host may need: up to [`GENEROUS`].
    pub least_faults: usize,
    /// How long all is left alone at the end, so that what is due gets decided.
    pub calm: Duration,
    pub seed: u64,
    pub instances: usize,
    /// Most faults at one time.
    pub at_once: usize,
    /// For the log, the trace and what the daemons wrote.
    pub out: PathBuf,
    /// Parts of the names of the faults that may strike; none: all.
    pub only: Vec<String>,
    /// Jobs come and go, and nothing else goes wrong but what [`commands::WHILE_JOBS_COME_AND_GO`] names.
    pub come_and_go: bool,
    /// So many jobs, all due at one instant; None: the usual ones.
    pub bursts: Option<usize>,
    /// The time from one fault to the next; None: rounds of many, and calm between.
    pub every: Option<Duration>,
    /// End at the first broken promise.
    pub until_broken: bool,
    pub quiet: bool,
}

/// Set: no more faults, and an orderly end.
pub static STOP: AtomicBool = AtomicBool::new(false);

/// What came of it.
pub struct Report {
    pub verdict: Verdict,
    pub table: String,
    pub faults: usize,
    /// When the first broken promise was seen.
    pub first_broken: Option<Duration>,
}

/// # Panics
/// If the fleet cannot be started or ended.
pub fn run(options: &Options) -> Report {
    std::fs::create_dir_all(&options.out).expect("the directory for the log");
    let log = std::fs::File::create(options.out.join("log")).expect("the log");
    let mut stage = Stage::new(options, log);
    stage.say(&format!(
        "seed {}, {} instances",
        options.seed, options.instances
    ));
    wait_until("the fleet runs its jobs", GENEROUS, || {
        stage.look();
        stage.runs() >= 5
    });
    let mut only = options.only.clone();
    if options.come_and_go && only.is_empty() {
        let names = commands::WHILE_JOBS_COME_AND_GO.iter();
        only.extend(names.map(|&name| name.to_owned()));
    }
    let mut weather = Weather::new(options.at_once, options.every, only);
    let mut printed = table::Printed::new(options);
    let (mut next_look, mut next_judgement) = (0, 0);
    let too_few = |stage: &Stage| {
        let struck: usize = stage.faults.values().sum();
        struck < options.least_faults && stage.elapsed() < options.lasts + GENEROUS
    };
    while (stage.elapsed() < options.lasts || too_few(&stage)) && !STOP.load(SeqCst) {
        std::thread::sleep(Duration::from_millis(20));
        let before = boottime_ns();
        stage.tick();
        weather.blow(&mut stage);
        let now = boottime_ns();
        // No fault takes so long to begin and to end, unless even the end of a killed process does.
        if now - before > 2 * judge::SECOND {
            stage.stood_still(before, now);
        }
        if now >= next_look && !stage.is_busy(stage::Busy::Server) {
            stage.look();
            next_look = now + judge::SECOND;
        }
        if now >= next_judgement {
            let verdict = stage.judge_lately();
            printed.found(&mut stage, &verdict);
            printed.minute(&mut stage);
            if options.until_broken && verdict.broken().next().is_some() {
                break;
            }
            next_judgement = now + 3 * judge::SECOND;
        }
    }
    // At the first broken promise nothing more is waited for, so that not all has an outcome.
    let over = !options.until_broken || printed.first_broken.is_none();
    end(&mut stage, if over { options.calm } else { Duration::ZERO });
    // The guard of a run tells its outcome if its daemon could not before it ended.
    let until = stage.elapsed() + GENEROUS;
    let mut verdict = stage.judge(over);
    while over && stage.elapsed() < until && verdict.broken().any(|f| f.kind == judge::Kind::Missed)
    {
        std::thread::sleep(Duration::from_millis(200));
        stage.look();
        verdict = stage.judge(over);
    }
    printed.found(&mut stage, &verdict);
    stage.keep_files(&options.out);
    let table = table::table(&stage, &verdict);
    stage.say(&table);
    Report {
        faults: stage.faults.values().sum(),
        first_broken: printed.first_broken,
        verdict,
        table,
    }
}

/// Undoes all faults, waits until what is due is decided, and stops the fleet.
fn end(stage: &mut Stage, calm: Duration) {
    stage.say("the end: no more faults");
    stage.undo(true);
    let until = stage.elapsed() + calm;
    while stage.elapsed() < until {
        std::thread::sleep(Duration::from_millis(200));
        stage.tick();
        stage.look();
    }
    stage.stop_all();
    stage.look();
}
