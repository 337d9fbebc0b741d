//! What people do meanwhile: reload, pause, skip, drain, trigger, cancel.

use std::time::Duration;

use rustix::process::Signal;

use super::{
    effect::Effect,
    faults::{Fault, Needs},
    jobs::{self, TRIGGERED},
    stage::{Begun, Stage},
};
use crate::support::process;

pub const FAULTS: &[Fault] = &[
    Fault::new("reload", 3, Needs::Nothing, reload),
    Fault::new("remove jobs", 4, Needs::File, remove),
    Fault::new("trigger", 8, Needs::Nothing, trigger),
    Fault::new("give a key again", 4, Needs::Nothing, trigger_again),
    Fault::new("pause", 3, Needs::Commands, pause),
    Fault::new("skip", 1, Needs::Commands, skip),
    Fault::new("cancel", 2, Needs::Nothing, cancel),
    Fault::new("drain", 2, Needs::Commands, drain),
];

/// What strikes a fleet whose jobs come and go: mostly just that.
pub const WHILE_JOBS_COME_AND_GO: &[&str] = &[
    "remove jobs",
    "remove jobs",
    "remove jobs",
    "remove jobs",
    "reload",
    "give a key again",
    "pause",
    "skip",
    "stop the server",
    "flush the data",
    "restart the server empty",
    "lose the data twice",
    "lose the data at a start",
    "lose the data at a start",
    "lose the data at a start",
    "stop a daemon",
    "kill a daemon",
    "kill all daemons",
    "shut a daemon down",
];

fn some_job(stage: &mut Stage) -> &'static str {
    let n = stage.rng.usize(0..stage.jobs.len());
    stage.jobs[n].judged.name
}

/// SIGHUP to all that are ready for it.
fn hup(stage: &Stage) {
    for i in stage.fleet.instances.iter().filter(|i| i.runs()) {
        if process::catches(i.pid(), Signal::HUP) {
            i.signal(Signal::HUP);
        }
    }
}

fn reload(stage: &mut Stage, _: usize) -> Option<Begun> {
    hup(stage);
    Some(Begun::once(Effect::Harmless, "all instances"))
}

/// Takes some of the jobs that come and go out of the files, or disables them. Some instances are told at once, the
/// others later; and the same when the jobs come back.
fn remove(stage: &mut Stage, _: usize) -> Option<Begun> {
    let all: Vec<(&'static str, String)> = stage.jobs.iter().filter_map(comes_and_goes).collect();
    let mut gone: Vec<(&'static str, String)> = vec![];
    for job in &all {
        if stage.rng.bool() {
            gone.push(job.clone());
        }
    }
    if gone.is_empty() {
        gone.extend(all.first().cloned());
    }
    let mut whom = vec![];
    for (name, lines) in &gone {
        let disabled = format!("{lines}enabled = false\n");
        let without = stage.rng.bool().then_some(&*disabled);
        whom.push(format!(
            "{name}{}",
            if without.is_some() { " disabled" } else { "" }
        ));
        stage.set_job(name, without, false);
    }
    stage.write_configs();
    let effect = |(name, _): &(&'static str, String)| Effect::Steered {
        job: (*name).into(),
    };
    Some(Begun {
        effects: gone.iter().map(effect).collect(),
        whom: whom.join(", "),
        lasts: stage.some_time(500, 8000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| {
            for (name, lines) in &gone {
                stage.set_job(name, Some(lines), true);
            }
            stage.write_configs();
        }),
    })
}

fn comes_and_goes(job: &jobs::Planned) -> Option<(&'static str, String)> {
    let judged = &job.judged;
    judged
        .comes_and_goes
        .then(|| (judged.name, job.lines.clone()))
}

/// One of a few keys, which change slowly.
fn trigger_again(stage: &mut Stage, _: usize) -> Option<Begun> {
    let job = some_job(stage);
    let key = format!("{}-{}", stage.elapsed().as_secs() / 60, stage.rng.u32(0..3));
    stage.give_few(job, &key);
    stage.operate(&["trigger", job, "--key", &key], |_, _| {});
    Some(Begun::once(Effect::Harmless, format!("{job}, key {key}")))
}

/// A key, often twice.
fn trigger(stage: &mut Stage, _: usize) -> Option<Begun> {
    stage.jobs.iter().find(|j| j.judged.name == TRIGGERED)?;
    let key = format!("k{}", stage.rng.u32(..));
    stage.give_key(&key);
    for _ in 0..stage.rng.u32(1..3) {
        let given = key.clone();
        stage.operate(
            &["trigger", TRIGGERED, "--key", &key],
            move |stage, done| {
                if done {
                    stage.accepted(given);
                }
            },
        );
    }
    Some(Begun::once(Effect::Harmless, format!("key {key}")))
}

fn pause(stage: &mut Stage, _: usize) -> Option<Begun> {
    const NAME: &str = "pause";
    let job = some_job(stage);
    // It would take this pause back, not the one before.
    if stage.is_under_way(&["resume", job]) {
        return None;
    }
    let lasts = stage.some_time(1000, 9000);
    // What it does to the fleet begins when the command has succeeded, and ends before it is taken back.
    stage.operate(&["pause", job], move |stage, done| {
        let still = stage.pauses.contains(job);
        if done && still {
            stage.note(NAME, Effect::Paused { job: job.into() });
        } else if !still {
            // It came after the end.
            resume(stage, job, 5);
        }
    });
    stage.pauses.insert(job);
    Some(Begun {
        effects: vec![Effect::Steered { job: job.into() }],
        whom: job.into(),
        lasts,
        keeps_busy: vec![],
        undo: Box::new(move |stage| {
            stage.pauses.remove(job);
            stage.end_pause(job);
            resume(stage, job, 5);
        }),
    })
}

/// Again and again, because the store may be away.
fn resume(stage: &mut Stage, job: &'static str, times: u32) {
    let row = stage.note("resume", Effect::Steered { job: job.into() });
    stage.operate(&["resume", job], move |stage, done| {
        stage.over(row);
        if !done && times > 0 {
            resume(stage, job, times - 1);
        }
    });
}

fn skip(stage: &mut Stage, _: usize) -> Option<Begun> {
    let job = some_job(stage);
    let row = stage.note("skip", Effect::Steered { job: job.into() });
    stage.operate(&["skip", job], move |stage, _| stage.over(row));
    Some(Begun {
        effects: vec![Effect::Steered { job: job.into() }],
        whom: job.into(),
        lasts: Duration::from_secs(3),
        keeps_busy: vec![],
        undo: Box::new(|_| {}),
    })
}

fn cancel(stage: &mut Stage, _: usize) -> Option<Begun> {
    let job = some_job(stage);
    stage.operate(&["cancel", job], |_, _| {});
    Some(Begun::once(Effect::Steered { job: job.into() }, job))
}

fn drain(stage: &mut Stage, _: usize) -> Option<Begun> {
    let i = stage.rng.usize(0..stage.size);
    let name: &'static str = stage.fleet.instances[i].id.clone().leak();
    stage.operate(&["drain", name], |_, _| {});
    Some(Begun {
        effects: vec![Effect::Drained],
        whom: name.into(),
        lasts: stage.some_time(1000, 8000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| undrain(stage, name, 5)),
    })
}

fn undrain(stage: &mut Stage, name: &'static str, times: u32) {
    stage.operate(&["undrain", name], move |stage, done| {
        if !done && times > 0 {
            undrain(stage, name, times - 1);
        }
    });
}
