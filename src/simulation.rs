//! Whole fleets in simulated time: the daemon's own tasks, its Redis store and the Lua scripts, on hosts whose clocks,
//! network, processes and server go wrong. A seed decides everything, and a seed gives the same trace each time.
//! docs/faults.md.

mod data;
mod fleet;
mod host;
mod judge;
mod lua;
mod network;
mod seeds;
mod server;

pub(crate) use self::host::{connect, gettime, guards, simulated};
