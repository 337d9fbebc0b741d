//! Disks that are full, descriptors and processes that are used up, memory that is.

use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use super::{
    effect::Effect,
    faults::{Fault, Needs},
    stage::{Begun, Stage},
};

pub const FAULTS: &[Fault] = &[
    Fault::new("fill the server's disk", 2, Needs::Server, fill_server),
    Fault::new("fill the disk of the logs", 1, Needs::Nothing, fill_logs),
    Fault::new(
        "use up the server's memory",
        2,
        Needs::Server,
        use_up_memory,
    ),
    Fault::new("use up descriptors", 2, Needs::Instance, use_up_descriptors),
    Fault::new("use up processes", 2, Needs::Instance, use_up_processes),
];

fn fill_server(stage: &mut Stage, _: usize) -> Option<Begun> {
    stage.server_disk.as_ref()?.fill();
    // Until a write to its file has failed, which takes a moment, the server accepts what it is told.
    let begun = std::time::Instant::now();
    let refuses = |stage: &mut Stage| {
        let words = ["SET", "of-the-harness", "x", "PX", "1000"];
        let answer = stage.fleet.server().try_command::<()>(&words);
        answer.is_err_and(|e| e.code() == Some("MISCONF"))
    };
    while !refuses(stage) && begun.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(10));
    }
    Some(Begun {
        effects: vec![Effect::Silenced],
        whom: "the server".into(),
        lasts: stage.some_time(500, 6000),
        keeps_busy: vec![],
        undo: Box::new(|stage| {
            if let Some(disk) = &stage.server_disk {
                disk.free();
            }
            stage.fleet.server().rewrite();
        }),
    })
}

fn fill_logs(stage: &mut Stage, _: usize) -> Option<Begun> {
    stage.logs_disk.as_ref()?.fill();
    Some(Begun {
        effects: vec![Effect::Harmless],
        whom: "all instances".into(),
        lasts: stage.some_time(500, 6000),
        keeps_busy: vec![],
        undo: Box::new(|stage| {
            if let Some(disk) = &stage.logs_disk {
                disk.free();
            }
        }),
    })
}

/// Nothing is granted; what runs is renewed and settled.
fn use_up_memory(stage: &mut Stage, _: usize) -> Option<Begun> {
    let set = |stage: &mut Stage, bytes: &str| {
        let words = ["CONFIG", "SET", "maxmemory", bytes];
        stage.fleet.server().command::<()>(&words);
    };
    set(stage, "1");
    Some(Begun {
        effects: vec![Effect::GrantsNothing],
        whom: "the server".into(),
        lasts: stage.some_time(500, 6000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| set(stage, "0")),
    })
}

fn use_up_descriptors(stage: &mut Stage, i: usize) -> Option<Begun> {
    let pid = stage.fleet.instances[i].pid();
    let used = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
    let pid = Pid::from_raw(i32::try_from(pid).ok()?);
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = move |current| {
        // It may have ended meanwhile.
        prlimit(pid, Resource::Nofile, Rlimit { current, maximum }).ok()
    };
    limit(Some(used + stage.rng.u64(0..6)))?;
    Some(Begun {
        effects: vec![Effect::Starved { instance: i }],
        whom: format!("i{}", i + 1),
        lasts: stage.some_time(500, 6000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| {
            limit(maximum);
            again(stage, i);
        }),
    })
}

fn use_up_processes(stage: &mut Stage, i: usize) -> Option<Begun> {
    let more = stage.rng.u64(0..4);
    stage.pids[i].as_ref()?.limit(Some(more));
    Some(Begun {
        effects: vec![Effect::Starved { instance: i }],
        whom: format!("i{}", i + 1),
        lasts: stage.some_time(500, 6000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| {
            if let Some(pids) = &stage.pids[i] {
                pids.limit(None);
            }
            again(stage, i);
        }),
    })
}

/// A daemon that ended for want of them is started again, as its supervisor would.
fn again(stage: &mut Stage, i: usize) {
    if stage.fleet.instances[i].ended().is_some() {
        stage.say(&format!("i{} ended by itself", i + 1));
        stage.fleet.instances[i].kill();
        stage.start_instance(i);
    }
}
