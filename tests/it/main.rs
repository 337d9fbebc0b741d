//! Tests that start what stands around the library: programs, servers, files.

mod cli;
mod conformance;
mod elector;
mod exec;
mod faults;
mod fleet;
mod guard;
mod locks;
mod lottery;
mod model;
mod options;
mod oracle;
mod sqlite;
mod support;
