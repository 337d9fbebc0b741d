//! Connections between instances and server that are cut, delayed and garbled.

use std::time::Duration;

use soloist::clock::wall_us;

use super::{
    effect::Effect,
    faults::{Fault as Kind, Needs},
    stage::{Begun, Busy, Stage},
};
use crate::support::proxy::Fault;

pub const FAULTS: &[Kind] = &[
    Kind::new("cut an instance off", 7, Needs::Instance, cut),
    Kind::new("delay an instance", 3, Needs::Instance, delay),
    Kind::new("disturb connections", 3, Needs::Instance, disturb),
    Kind::new("lose a reply", 10, Needs::Instance, lose_reply),
    Kind::new("forget connections", 2, Needs::Instance, forget),
    Kind::new("garble replies", 1, Needs::Instance, garble),
    Kind::new("a wrong time in a reply", 1, Needs::Instance, wrong_time),
];

/// Sets a fault of the proxy of one instance, and no fault afterwards.
fn proxied(stage: &mut Stage, i: usize, fault: Fault, effect: Effect, lasts: Duration) -> Begun {
    let whom = format!("i{} {fault:?}", i + 1);
    stage.fleet.proxies[i].set(fault);
    Begun {
        effects: vec![effect],
        whom,
        lasts,
        keeps_busy: vec![],
        undo: Box::new(move |stage| stage.fleet.proxies[i].set(Fault::None)),
    }
}

fn cut(stage: &mut Stage, i: usize) -> Option<Begun> {
    let ways = [
        Fault::BlackHoleUp,
        Fault::BlackHoleDown,
        Fault::Stall,
        Fault::Refuse,
    ];
    let fault = ways[stage.rng.usize(0..ways.len())].clone();
    let lasts = stage.some_time(300, 9000);
    Some(proxied(stage, i, fault, Effect::Cut { instance: i }, lasts))
}

fn delay(stage: &mut Stage, i: usize) -> Option<Begun> {
    let by = Duration::from_millis(stage.rng.u64(20..700));
    let fault = match stage.rng.u32(0..3) {
        0 => Fault::DelayRequests(by),
        1 => Fault::DelayReplies(by),
        _ => Fault::Slow(stage.rng.u32(2_000..60_000)),
    };
    let lasts = stage.some_time(500, 8000);
    let effect = Effect::Hindered { instance: i };
    Some(proxied(stage, i, fault, effect, lasts))
}

fn disturb(stage: &mut Stage, i: usize) -> Option<Begun> {
    let fault = match stage.rng.u32(0..3) {
        0 => Fault::Reset,
        1 => Fault::Lossy(stage.rng.u32(5..60)),
        _ => Fault::HalfClose,
    };
    let lasts = stage.some_time(500, 6000);
    let effect = Effect::Hindered { instance: i };
    Some(proxied(stage, i, fault, effect, lasts))
}

/// One reply to a claim, a renewal or a settlement: asking again gives the same answer, so that nothing is lost.
fn lose_reply(stage: &mut Stage, i: usize) -> Option<Begun> {
    // A first claim is granted with the number 1 alone, behind the name of the data.
    let name = |stage: &mut Stage| {
        let words = ["INFO", "replication"];
        let info: String = stage.fleet.server().try_command(&words).ok()?;
        let id = info
            .lines()
            .find_map(|l| l.strip_prefix("master_replid:"))?;
        Some(&*format!("{}\r\n:1\r\n", id.trim()).leak())
    };
    let texts = ["granted", "renewed", "done"];
    let text = match stage.rng.usize(0..7) {
        0..4 if stage.is_busy(Busy::Server) => return None,
        0..4 => {
            let text = name(stage)?;
            // Most replies of this form are grants in the moment at which occurrences are due.
            let to_second = 1_000_000 - wall_us().rem_euclid(1_000_000);
            let wait = u64::try_from(to_second - 10_000).unwrap_or(0);
            std::thread::sleep(Duration::from_micros(wait));
            text
        }
        n => texts[n - 4],
    };
    let begun = proxied(
        stage,
        i,
        Fault::LoseReply(text),
        Effect::Harmless,
        Duration::from_secs(3),
    );
    Some(Begun {
        undo: Box::new(move |stage| {
            let lost = stage.fleet.proxies[i].fault() == Fault::None;
            stage.fleet.proxies[i].set(Fault::None);
            stage.say(if lost {
                "a reply was lost"
            } else {
                "no such reply came"
            });
        }),
        ..begun
    })
}

fn forget(stage: &mut Stage, i: usize) -> Option<Begun> {
    stage.fleet.proxies[i].forget_connections();
    Some(Begun {
        effects: vec![Effect::Hindered { instance: i }],
        whom: format!("i{}", i + 1),
        lasts: Duration::from_secs(2),
        keeps_busy: vec![],
        undo: Box::new(|_| {}),
    })
}

fn garble(stage: &mut Stage, i: usize) -> Option<Begun> {
    let fault = Fault::Garble(stage.rng.u32(1..30));
    let lasts = stage.some_time(300, 2000);
    let effect = Effect::Garbled { instance: i };
    Some(proxied(stage, i, fault, effect, lasts))
}

/// In one reply: nobody believes it.
fn wrong_time(stage: &mut Stage, i: usize) -> Option<Begun> {
    let seconds = [40, 3600, -3600, 86_400 * 3650];
    let by = seconds[stage.rng.usize(0..seconds.len())] * 1_000_000;
    let lasts = Duration::from_secs(2);
    let effect = Effect::Hindered { instance: i };
    Some(proxied(stage, i, Fault::WrongTime(by, 1), effect, lasts))
}
