//! Faults on the whole daemon: processes, clocks of leases, stores, networks, resources, bad input.

mod clock;
mod input;
mod network;
mod processes;
mod resources;
mod store;

/// L of the fleets here, unless a test says otherwise, in nanoseconds.
pub const LEASE_NS: i64 = 2_000_000_000;
