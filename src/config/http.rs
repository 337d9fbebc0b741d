//! `[http]`: where the API and the page are served, and to whom.

use std::{fmt, net::SocketAddr, path::PathBuf};

/// `[http]`, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Http {
    pub listen: Listen,
    /// None: who reaches the address may read, and who may use the socket may write.
    pub tokens_file: Option<PathBuf>,
    /// None: plain HTTP.
    pub tls: Option<HttpTls>,
    /// Without a final slash.
    pub public_url: Option<String>,
    /// Nobody may change anything over HTTP.
    pub read_only: bool,
}

/// The PEM files of the server's certificate and key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpTls {
    pub cert: PathBuf,
    pub key: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    Tcp(SocketAddr),
    /// The absolute path of a socket.
    Unix(PathBuf),
}

impl Listen {
    /// By so many bytes the name of a socket is longer while it is made: see [`Listen::made_at`].
    pub(super) const WHILE_MADE: usize = 8;

    /// Programs on other hosts reach it.
    pub fn is_reached_by_others(&self) -> bool {
        match self {
            Self::Tcp(address) => !address.ip().to_canonical().is_loopback(),
            Self::Unix(_) => false,
        }
    }

    /// Where a socket is made before it is moved to its place: by then only those may use it who shall.
    pub fn made_at(path: &std::path::Path) -> PathBuf {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{:07}", std::process::id() % 10_000_000));
        name.into()
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
