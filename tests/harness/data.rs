//! The server: killed, stopped, restarted; its data flushed, rolled back, replaced.

use std::time::Duration;

use soloist::clock::wall_us;

use super::{
    effect::Effect,
    faults::{Fault, Needs},
    judge::SECOND,
    stage::{Begun, Busy, Stage},
};
use crate::support::{
    GENEROUS, process::boottime_ns, proxy::Fault as Proxied, server::RedisServer, wait_until,
};

pub const FAULTS: &[Fault] = &[
    Fault::new("stop the server", 3, Needs::Server, stop),
    Fault::new("kill the server", 3, Needs::Server, kill),
    Fault::new("flush the data", 2, Needs::Server, flush),
    Fault::new("restart the server empty", 2, Needs::Server, restart_empty),
    Fault::new("lose the data twice", 1, Needs::Server, lose_twice),
    Fault::new("lose the data at a start", 2, Needs::Server, lose_at_start),
    Fault::new("roll the data back", 3, Needs::Server, roll_back),
    Fault::new("replace the data", 2, Needs::Server, replace),
    Fault::new(
        "lose the data of one cut off",
        6,
        Needs::Server,
        lose_of_cut,
    ),
    Fault::new("flush the scripts", 1, Needs::Server, flush_scripts),
    Fault::new("close all connections", 1, Needs::Server, close_all),
];

fn stop(stage: &mut Stage, _: usize) -> Option<Begun> {
    stage.fleet.server().stop();
    Some(Begun {
        effects: vec![Effect::Silenced],
        whom: "the server".into(),
        lasts: stage.some_time(100, 6000),
        keeps_busy: vec![],
        undo: Box::new(|stage| stage.fleet.server().cont()),
    })
}

/// All that it acknowledged is there when it starts again.
fn kill(stage: &mut Stage, _: usize) -> Option<Begun> {
    stage.look();
    stage.fleet.server().kill();
    Some(Begun {
        effects: vec![Effect::Silenced, Effect::Renamed],
        whom: "the server".into(),
        lasts: stage.some_time(50, 6000),
        keeps_busy: vec![],
        undo: Box::new(|stage| stage.fleet.server().revive(None)),
    })
}

fn flush(stage: &mut Stage, _: usize) -> Option<Begun> {
    stage.look();
    stage.fleet.server().flush();
    Some(Begun::once(Effect::LosesAll, "the server"))
}

fn restart_empty(stage: &mut Stage, _: usize) -> Option<Begun> {
    stage.look();
    stage.fleet.server().replace_data(None);
    Some(Begun::once(Effect::LosesAll, "the server"))
}

/// Once more as soon as some holder has put its lease back, most often before a heartbeat finds the first loss.
fn lose_twice(stage: &mut Stage, _: usize) -> Option<Begun> {
    let (_, run, _) = stage.live_runs().pop()?;
    stage.look();
    let row = stage.note("lose the data twice", Effect::LosesAll);
    stage.fleet.server().flush();
    let key = format!("soloist:{{{}}}:state", run.job);
    let until = boottime_ns() + SECOND;
    while stage.fleet.server().command::<i64>(&["EXISTS", &key]) == 0 && boottime_ns() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
    stage.fleet.server().replace_data(None);
    stage.over(row);
    Some(Begun::once(Effect::LosesAll, "the server"))
}

/// Between the first heartbeat of an instance and its first registration, while a holder is cut off: if the instance
/// adopts without another look at the epoch, nothing keeps others from the holder's lease.
fn lose_at_start(stage: &mut Stage, _: usize) -> Option<Begun> {
    let (holder, run, _) = stage.live_runs().pop()?;
    let free = stage.free().into_iter();
    let starter = free
        .filter(|&i| i != holder)
        .max_by_key(|_| stage.rng.u32(..))?;
    stage.look();
    stage.note_once(
        "lose the data at a start",
        Effect::Killed { instance: starter },
    );
    stage.fleet.instances[starter].kill();
    let by = Duration::from_millis(stage.rng.u64(30..100));
    stage.fleet.proxies[starter].set(Proxied::DelayReplies(by));
    stage.start_instance(starter);
    let id = stage.fleet.instances[starter].id.clone();
    let pid = format!("\"pid\":{}", stage.fleet.instances[starter].pid());
    let until = boottime_ns() + SECOND;
    let words = ["HGET", "soloist:instances", &id];
    let here = |stage: &mut Stage| {
        let entry = stage.fleet.server().command::<Option<String>>(&words);
        entry.is_some_and(|entry| entry.contains(&pid))
    };
    while !here(stage) && boottime_ns() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
    stage.fleet.proxies[holder].set(Proxied::Stall);
    let row = stage.note("lose the data at a start", Effect::LosesAll);
    stage.fleet.server().flush();
    stage.over(row);
    Some(Begun {
        effects: vec![
            Effect::Hindered { instance: starter },
            Effect::Cut { instance: holder },
        ],
        whom: format!(
            "i{}, and i{} is cut off with {run}",
            starter + 1,
            holder + 1
        ),
        lasts: Duration::from_secs(2),
        keeps_busy: vec![Busy::Instance(starter), Busy::Instance(holder)],
        undo: Box::new(move |stage| {
            for i in [starter, holder] {
                stage.fleet.proxies[i].set(Proxied::None);
            }
        }),
    })
}

/// While a holder is cut off, so that nobody tells the store of its lease: only the quarantine keeps others from it.
fn lose_of_cut(stage: &mut Stage, _: usize) -> Option<Begun> {
    let mut runs = stage.live_runs();
    // One whose job is due again soon, because the holder ends the run when its trust is over.
    let jobs: Vec<_> = stage.jobs.iter().map(|j| j.judged.clone()).collect();
    let soon = |job: &str| {
        let period = jobs.iter().find(|j| j.name == job)?.period_ms?;
        Some(period - wall_us().div_euclid(1000).rem_euclid(period) < 1200)
    };
    if runs.iter().any(|(_, run, _)| soon(&run.job) == Some(true)) {
        runs.retain(|(_, run, _)| soon(&run.job) == Some(true));
    }
    if runs.is_empty() {
        return None;
    }
    let (i, run, _) = &runs[stage.rng.usize(0..runs.len())];
    let i = *i;
    stage.look();
    let back = stage.rng.bool().then(|| stage.fleet.server().snapshot());
    stage.fleet.proxies[i].set(Proxied::Stall);
    let (row, how) = match &back {
        None => {
            let row = stage.note("lose the data of one cut off", Effect::LosesAll);
            stage.fleet.server().flush();
            (row, "all is lost")
        }
        Some(snapshot) => {
            let row = stage.note("lose the data of one cut off", Effect::GoesBack);
            stage.fleet.server().replace_data(Some(snapshot));
            (row, "an older copy")
        }
    };
    stage.over(row);
    Some(Begun {
        effects: vec![Effect::Cut { instance: i }],
        whom: format!("i{} with {run}: {how}", i + 1),
        lasts: stage.some_time(1000, 8000),
        keeps_busy: vec![Busy::Instance(i)],
        undo: Box::new(move |stage| stage.fleet.proxies[i].set(Proxied::None)),
    })
}

/// To what it was some seconds ago.
fn roll_back(stage: &mut Stage, _: usize) -> Option<Begun> {
    let old = stage.fleet.server().snapshot();
    Some(Begun {
        effects: vec![Effect::Harmless],
        whom: "to now, later".into(),
        lasts: stage.some_time(500, 12_000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| {
            stage.look();
            let row = stage.note("roll the data back", Effect::GoesBack);
            stage.fleet.server().replace_data(Some(&old));
            stage.over(row);
        }),
    })
}

/// The server becomes the replica of another one for a moment: of an empty one, or of one with an older copy.
fn replace(stage: &mut Stage, _: usize) -> Option<Begun> {
    let empty = stage.rng.bool();
    let mut other = RedisServer::start();
    if !empty {
        let old = stage.fleet.server().snapshot();
        other.kill();
        other.revive(Some(&old));
    }
    Some(Begun {
        effects: vec![Effect::Harmless],
        whom: format!("by {} data, later", if empty { "no" } else { "older" }),
        lasts: stage.some_time(200, 5000),
        keeps_busy: vec![],
        undo: Box::new(move |stage| {
            stage.look();
            let row = stage.note(
                "replace the data",
                match empty {
                    true => Effect::LosesAll,
                    false => Effect::GoesBack,
                },
            );
            let port = other.port().to_string();
            let server = stage.fleet.server();
            server.command::<()>(&["REPLICAOF", "127.0.0.1", &port]);
            wait_until("the data is replaced", GENEROUS, || {
                let info: String = server.command(&["INFO", "replication"]);
                info.contains("master_link_status:up")
            });
            server.command::<()>(&["REPLICAOF", "NO", "ONE"]);
            stage.over(row);
        }),
    })
}

fn flush_scripts(stage: &mut Stage, _: usize) -> Option<Begun> {
    stage.fleet.server().command::<()>(&["SCRIPT", "FLUSH"]);
    Some(Begun::once(Effect::Harmless, "the server"))
}

fn close_all(stage: &mut Stage, _: usize) -> Option<Begun> {
    let server = stage.fleet.server();
    server.command::<i64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    Some(Begun {
        effects: vec![Effect::Harmless],
        whom: "the server".into(),
        lasts: Duration::from_secs(1),
        keeps_busy: vec![],
        undo: Box::new(|_| {}),
    })
}
