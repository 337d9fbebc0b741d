//! All that can be done to the fleet, and the choice of what is done next.

use std::time::Duration;

use super::{
    clocks, commands, data, network, processes, resources,
    stage::{Begun, Busy, Stage},
};
use crate::support::process::boottime_ns;

/// What a fault strikes, so that two faults do not strike the same at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    Instance,
    Server,
    Commands,
    /// The files of the instances.
    File,
    Nothing,
}

/// A fault that can be chosen. Its function gets the instance that it strikes (any, if it needs none), and returns
/// None if there is nothing that it could strike.
pub struct Fault {
    pub name: &'static str,
    weight: u32,
    needs: Needs,
    strike: fn(&mut Stage, usize) -> Option<Begun>,
}

impl Fault {
    pub const fn new(
        name: &'static str,
        weight: u32,
        needs: Needs,
        strike: fn(&mut Stage, usize) -> Option<Begun>,
    ) -> Self {
        Self {
            name,
            weight,
            needs,
            strike,
        }
    }
}

pub fn all() -> impl Iterator<Item = &'static Fault> + Clone {
    [
        processes::FAULTS,
        network::FAULTS,
        clocks::FAULTS,
        data::FAULTS,
        resources::FAULTS,
        commands::FAULTS,
    ]
    .into_iter()
    .flatten()
}

/// When faults strike: in rounds, with a calm time after each, in which what was disturbed has to be well again.
pub struct Weather {
    /// At most so many faults at one time.
    most: usize,
    next_ns: i64,
    calm_from_ns: i64,
    /// From one fault to the next, without calm.
    every: Option<Duration>,
    only: Vec<String>,
}

const ROUND: Duration = Duration::from_secs(25);
const CALM: Duration = Duration::from_secs(8);

fn ns(d: Duration) -> i64 {
    i64::try_from(d.as_nanos()).expect("a short time")
}

impl Weather {
    /// `only`: parts of the names of the faults that may strike, more often if one is named more often; none: all may.
    pub fn new(most: usize, every: Option<Duration>, only: Vec<String>) -> Self {
        let now = boottime_ns();
        Self {
            most,
            next_ns: now,
            calm_from_ns: now + ns(ROUND),
            every,
            only,
        }
    }

    /// Begins a fault, if it is time for one.
    pub fn blow(&mut self, stage: &mut Stage) {
        let now = boottime_ns();
        if self.every.is_none() && now >= self.calm_from_ns {
            if stage.active() > 0 {
                return;
            }
            self.next_ns = now + ns(CALM);
            self.calm_from_ns = now + ns(CALM) + ns(ROUND);
            stage.say("calm");
        }
        if now < self.next_ns || stage.active() >= self.most {
            return;
        }
        let pause = || stage.rng.i64(200..1800) * 1_000_000;
        self.next_ns = now + self.every.map_or_else(pause, ns);
        let times = |f: &Fault| match &*self.only {
            [] => 1,
            only => only.iter().filter(|part| f.name.contains(*part)).count() as u32,
        };
        let all = all().map(|f| (f, f.weight * times(f)));
        let total: u32 = all.clone().map(|(_, weight)| weight).sum();
        if total == 0 {
            return;
        }
        let mut at = stage.rng.u32(0..total);
        for (fault, weight) in all {
            match at.checked_sub(weight) {
                Some(left) => at = left,
                None => return strike(stage, fault),
            }
        }
    }
}

/// Does nothing if what the fault needs is struck by another one.
fn strike(stage: &mut Stage, fault: &'static Fault) {
    let free = stage.free();
    let busy = match fault.needs {
        Needs::Instance if free.is_empty() => return,
        Needs::Instance => Busy::Instance(free[stage.rng.usize(0..free.len())]),
        Needs::Server => Busy::Server,
        Needs::Commands => Busy::Commands,
        Needs::File => Busy::File,
        Needs::Nothing => return begin(stage, fault, 0, vec![]),
    };
    if stage.is_busy(busy) {
        return;
    }
    let instance = if let Busy::Instance(i) = busy { i } else { 0 };
    begin(stage, fault, instance, vec![busy]);
}

fn begin(stage: &mut Stage, fault: &'static Fault, instance: usize, busy: Vec<Busy>) {
    let from_ns = boottime_ns();
    if let Some(mut begun) = (fault.strike)(stage, instance) {
        begun.keeps_busy.extend(busy);
        stage.begin(fault.name, begun, from_ns);
    }
}
