//! Clocks that are stepped: the server's, and the wall clocks of instances.

use super::{
    effect::Effect,
    faults::{Fault, Needs},
    stage::{Begun, Stage},
};

pub const FAULTS: &[Fault] = &[
    Fault::new("step the server's clock", 3, Needs::Server, step_server),
    Fault::new("step an instance's clock", 4, Needs::Instance, step_wall),
];

const STEPS_MS: [i64; 8] = [300, -300, 900, -900, 5000, -5000, 3_600_000, -3_600_000];

fn some_step(stage: &mut Stage) -> i64 {
    STEPS_MS[stage.rng.usize(0..STEPS_MS.len())] * 1000
}

/// For less time than after which a wrong clock is believed.
fn step_server(stage: &mut Stage, _: usize) -> Option<Begun> {
    let us = some_step(stage);
    stage.fleet.server().set_clock(us);
    Some(Begun {
        effects: vec![Effect::ServerClock { us }],
        whom: format!("by {} ms", us / 1000),
        lasts: stage.some_time(500, 8000),
        keeps_busy: vec![],
        undo: Box::new(|stage| stage.fleet.server().set_clock(0)),
    })
}

fn step_wall(stage: &mut Stage, i: usize) -> Option<Begun> {
    let us = some_step(stage);
    stage.set_wall(i, us);
    Some(Begun {
        effects: vec![Effect::Wall { instance: i }],
        whom: format!("i{} by {} ms", i + 1, us / 1000),
        lasts: stage.some_time(1000, 15_000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| stage.set_wall(i, 0)),
    })
}
