//! Tests that start what stands around the library: programs, servers, files.

mod cli;
mod commands;
mod conformance;
mod contender;
mod dependencies;
mod exec;
mod faults;
mod fleet;
mod guard;
#[path = "../harness/mod.rs"]
mod harness;
mod holder;
mod http;
mod keys;
mod layers;
mod locks;
mod lottery;
mod model;
mod newfleet;
mod notify;
mod options;
mod oracle;
mod readme;
mod rights;
mod sqlite;
mod support;
mod terminal;
mod top;
mod traces;
mod unreadable;

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn before_main() {
        support::process::leave_nothing_behind();
    }
    before_main
};
