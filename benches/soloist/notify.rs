//! Planned instant to the first line of the command, while messages and heartbeats go to a server that never answers.

use std::net::TcpListener;

use crate::{
    lateness,
    support::{Redis, Table, establish, runtime},
};

/// Fails and succeeds in turn, at the same instants as the measured job: there is always something to tell.
const FLAPS: &str = "[jobs.flaps]\nschedule = \"*/2 * * * * *\"\n\
    command = \"exit $((SOLOIST_OCCURRENCE_MS / 2000 % 2))\"\n";

pub fn run(table: &mut Table, server: &Redis) {
    let port = hang();
    let channel = format!(
        "[notify.hangs]\ntype = \"webhook\"\nurl = \"http://127.0.0.1:{port}/\"\ntimeout = \"10m\"\n"
    );
    let beats = format!("heartbeat_url = \"http://127.0.0.1:{port}/{{job}}\"\n");
    for (name, defaults, tables) in [
        ("no channel", "", ""),
        ("a channel that hangs", "notify = [\"hangs\"]\n", &*channel),
        ("heartbeats that hang", &*beats, ""),
    ] {
        server.flush();
        runtime().block_on(async { establish(&*server.store()).await });
        let more = format!("{defaults}{tables}{FLAPS}");
        let store = format!("Redis, {name}");
        lateness::one(table, &server.url(), &store, 1, &more);
    }
}

/// A server that takes connections, and says nothing. Returns its port.
fn hang() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        let mut kept = vec![];
        // Each stays open as long as this program runs.
        for stream in listener.incoming() {
            kept.push(stream);
        }
    });
    port
}
