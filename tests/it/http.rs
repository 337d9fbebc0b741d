//! The API over HTTP, on real fleets: what it answers, to whom, and what bad clients and a lost store do to it.

mod answers;
pub(crate) mod client;
mod clients;
mod contrib;
mod schema;
mod stream;
mod tls;
mod who;
