//! The store's configuration for a guard, with all secrets. Every other serialisation leaves secrets out.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use super::{Secret, Store, StoreRetry, StoreUrl, Tls};

impl Serialize for Secret {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str("***")
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d).map(Self::new)
    }
}

/// A [`Store`] with its secrets, for the socket to a guard. It has the same fields.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Store")]
pub(crate) struct Handed {
    #[serde(with = "HandedUrl")]
    url: StoreUrl,
    namespace: String,
    username: Option<String>,
    #[serde(serialize_with = "handed_password")]
    password: Option<Secret>,
    tls: Option<Tls>,
    timeout: Duration,
    pool_size: u32,
    min_replicas: u32,
    retry: StoreRetry,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "StoreUrl")]
enum HandedUrl {
    Sqlite(PathBuf),
    Redis(#[serde(serialize_with = "handed_url")] Secret),
    Memory,
}

fn handed_url<S: serde::Serializer>(url: &Secret, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(url.expose())
}

#[expect(clippy::ref_option, reason = "serde gives the field as it is")]
fn handed_password<S: serde::Serializer>(p: &Option<Secret>, s: S) -> Result<S::Ok, S::Error> {
    p.as_ref().map(Secret::expose).serialize(s)
}
