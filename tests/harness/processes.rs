//! Daemons, guards and jobs that are killed, stopped and frozen.

use rustix::process::Signal;

use super::{
    effect::Effect,
    faults::{Fault, Needs},
    judge::SECOND,
    stage::{Begun, Busy, Stage},
};
use crate::support::{
    process::{self, boottime_ns},
    trace::Run,
};

pub const FAULTS: &[Fault] = &[
    Fault::new("kill a daemon", 6, Needs::Instance, kill_daemon),
    Fault::new("kill all daemons", 2, Needs::Instance, kill_all),
    Fault::new("kill a guard", 6, Needs::Nothing, kill_guard),
    Fault::new("kill daemon and guards", 5, Needs::Nothing, kill_both),
    Fault::new("kill a job", 2, Needs::Nothing, kill_job),
    Fault::new("stop a daemon", 6, Needs::Instance, stop_daemon),
    Fault::new("stop a guard", 2, Needs::Instance, stop_guard),
    Fault::new("stop a job", 2, Needs::Instance, stop_job),
    Fault::new("freeze an instance", 3, Needs::Instance, freeze_instance),
    Fault::new("freeze a job", 2, Needs::Instance, freeze_job),
    Fault::new("shut a daemon down", 3, Needs::Instance, shut_down),
];

fn name(i: usize) -> String {
    format!("i{}", i + 1)
}

fn kill_daemon(stage: &mut Stage, i: usize) -> Option<Begun> {
    stage.fleet.instances[i].kill();
    Some(Begun {
        effects: vec![Effect::Killed { instance: i }],
        whom: name(i),
        lasts: stage.some_time(50, 6000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| stage.start_instance(i)),
    })
}

/// All that no other fault strikes.
fn kill_all(stage: &mut Stage, _: usize) -> Option<Begun> {
    let all = stage.free();
    for &i in &all {
        stage.fleet.instances[i].kill();
    }
    let effect = |&instance: &usize| Effect::Killed { instance };
    Some(Begun {
        effects: all.iter().map(effect).collect(),
        whom: format!("{all:?}"),
        lasts: stage.some_time(50, 3000),
        keeps_busy: all.iter().map(|&i| Busy::Instance(i)).collect(),
        undo: Box::new(move |stage| all.iter().for_each(|&i| stage.start_instance(i))),
    })
}

/// A run of an instance that no fault strikes; more often than not one with children.
fn some_run(stage: &mut Stage) -> Option<(usize, Run, u32)> {
    let mut all = stage.live_runs();
    if stage.rng.u32(0..3) > 0 && all.iter().any(|(_, run, _)| run.pids.len() > 1) {
        all.retain(|(_, run, _)| run.pids.len() > 1);
    }
    let n = all.len();
    (n > 0).then(|| all.swap_remove(stage.rng.usize(0..n)))
}

/// A run of this instance.
fn run_of(stage: &mut Stage, i: usize) -> Option<(Run, u32)> {
    let mut all = stage.live_runs();
    all.retain(|(of, ..)| *of == i);
    let n = all.len();
    let (_, run, guard) = (n > 0).then(|| all.swap_remove(stage.rng.usize(0..n)))?;
    Some((run, guard))
}

fn kill_guard(stage: &mut Stage, _: usize) -> Option<Begun> {
    let (_, run, guard) = some_run(stage)?;
    process::signal(guard, Signal::KILL);
    let whom = format!("guard {guard} of {run}");
    Some(Begun::once(Effect::GuardKilled { run: run.run }, whom))
}

/// Neither sees the other die. What the command left is ended by the next start.
fn kill_both(stage: &mut Stage, _: usize) -> Option<Begun> {
    let (i, run, _) = some_run(stage)?;
    let daemon = stage.fleet.instances[i].pid();
    process::signal(daemon, Signal::STOP);
    for guard in process::children(daemon) {
        process::signal(guard, Signal::KILL);
    }
    stage.fleet.instances[i].kill();
    Some(Begun {
        effects: vec![Effect::BothKilled { instance: i }],
        whom: format!("{} with {run}", name(i)),
        lasts: stage.some_time(50, 4000),
        keeps_busy: vec![Busy::Instance(i)],
        undo: Box::new(move |stage| stage.start_instance(i)),
    })
}

fn kill_job(stage: &mut Stage, _: usize) -> Option<Begun> {
    let (_, run, _) = some_run(stage)?;
    process::signal(run.root, Signal::KILL);
    let whom = format!("{run}");
    Some(Begun::once(Effect::JobKilled { run: run.run }, whom))
}

fn stop_daemon(stage: &mut Stage, i: usize) -> Option<Begun> {
    stage.fleet.instances[i].signal(Signal::STOP);
    Some(Begun {
        effects: vec![Effect::Stopped { instance: i }],
        whom: name(i),
        lasts: stage.some_time(300, 9000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| stage.fleet.instances[i].signal(Signal::CONT)),
    })
}

/// Continues a process if it is still the same.
fn go_on(pid: u32, line: &str) {
    if process::command_line(pid) == line {
        process::signal(pid, Signal::CONT);
    }
}

fn stop_guard(stage: &mut Stage, i: usize) -> Option<Begun> {
    let (run, guard) = run_of(stage, i)?;
    let line = process::command_line(guard);
    process::signal(guard, Signal::STOP);
    Some(Begun {
        whom: format!("guard {guard} of {run}"),
        effects: vec![Effect::GuardHalted {
            run: run.run,
            instance: i,
        }],
        lasts: stage.some_time(300, 5000),
        keeps_busy: vec![],
        undo: Box::new(move |_| go_on(guard, &line)),
    })
}

fn stop_job(stage: &mut Stage, i: usize) -> Option<Begun> {
    let (run, _) = run_of(stage, i)?;
    let line = process::command_line(run.root);
    process::signal(run.root, Signal::STOP);
    Some(Begun {
        effects: vec![Effect::JobHalted],
        whom: format!("{run}"),
        lasts: stage.some_time(300, 5000),
        keeps_busy: vec![],
        undo: Box::new(move |_| go_on(run.root, &line)),
    })
}

fn freeze_instance(stage: &mut Stage, i: usize) -> Option<Begun> {
    stage.cgroups[i].as_ref()?.freeze(true);
    Some(Begun {
        effects: vec![Effect::Frozen { instance: i }],
        whom: name(i),
        lasts: stage.some_time(300, 7000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| {
            if let Some(cgroup) = &stage.cgroups[i] {
                cgroup.freeze(false);
            }
        }),
    })
}

fn freeze_job(stage: &mut Stage, i: usize) -> Option<Begun> {
    let (run, _) = run_of(stage, i)?;
    stage.cgroups[i].as_ref()?.freeze_run(&run.run, true);
    Some(Begun {
        effects: vec![Effect::JobHalted],
        whom: format!("{run}"),
        lasts: stage.some_time(300, 5000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| {
            if let Some(cgroup) = &stage.cgroups[i] {
                cgroup.freeze_run(&run.run, false);
            }
        }),
    })
}

/// SIGTERM. It must end within drain, grace and three seconds, and two more on a busy host.
fn shut_down(stage: &mut Stage, i: usize) -> Option<Begun> {
    const MOST: i64 = 10 * SECOND;
    let pid = stage.fleet.instances[i].pid();
    if !process::catches(pid, Signal::TERM) {
        return None;
    }
    stage.fleet.instances[i].signal(Signal::TERM);
    let from = boottime_ns();
    Some(Begun {
        effects: vec![Effect::ToldToEnd { instance: i }],
        whom: name(i),
        lasts: stage.some_time(500, 9000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| {
            while stage.fleet.instances[i].ended().is_none() {
                if boottime_ns() - from > MOST {
                    stage.note_once("shut a daemon down", Effect::NotEnded { instance: i });
                    stage.fleet.instances[i].kill();
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            stage.fleet.instances[i].kill();
            stage.start_instance(i);
        }),
    })
}
