//! Opens the store that the configuration names.

use std::sync::Arc;

use super::{
    Error, Store, connection::install_crypto, memory::MemoryStore, redis::RedisStore,
    sqlite::SqliteStore,
};
use crate::config::{self, StoreUrl};

/// Opens the store that the configuration names. Redis is connected by the first request, so a server that is down is
/// an error of that request.
///
/// # Errors
/// The store cannot be opened at all: for example a certificate that cannot be read, or a database file in a missing
/// directory.
pub fn open(store: &config::Store) -> Result<Arc<dyn Store>, Error> {
    install_crypto();
    Ok(match &store.url {
        StoreUrl::Redis(url) => Arc::new(RedisStore::open(url.expose(), store)?),
        StoreUrl::Sqlite(path) => Arc::new(SqliteStore::open(path)?),
        StoreUrl::Memory => Arc::new(MemoryStore::new()),
    })
}
