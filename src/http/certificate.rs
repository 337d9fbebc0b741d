//! The server's certificate and key, which are read again when their files have changed.

use std::{path::Path, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tokio_rustls::TlsAcceptor;
use tracing::{error, info};

use crate::{
    clock::Boottime,
    config::{HttpTls, named, rights},
};

/// The files are looked at no more often than this.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The pair that new connections get. Those that are open keep the one that they began with.
pub(super) struct Certificate {
    files: HttpTls,
    read: Mutex<Read>,
}

struct Read {
    looked: Boottime,
    /// Of the certificate's file and the key's; None: a file is not there.
    versions: [Option<named::Version>; 2],
    acceptor: TlsAcceptor,
}

impl Certificate {
    /// # Errors
    /// As [`pair`].
    pub(super) fn open(files: &HttpTls) -> Result<Self, String> {
        let versions = versions(files);
        Ok(Self {
            files: files.clone(),
            read: Mutex::new(Read {
                looked: Boottime::now(),
                versions,
                acceptor: acceptor(files)?,
            }),
        })
    }

    /// For a new connection. Reads the files again if they have changed.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let mut read = self.read.lock();
        let now = Boottime::now();
        if now.since(read.looked) >= LOOK_AGAIN {
            read.looked = now;
            let versions = versions(&self.files);
            if versions != read.versions {
                self.read_again(&mut read, versions);
            }
        }
        read.acceptor.clone()
    }

    /// Reads the files again, whether they have changed or not: somebody asked for it, and wants to know.
    pub(super) fn reload(&self) {
        let mut read = self.read.lock();
        let versions = versions(&self.files);
        self.read_again(&mut read, versions);
    }

    fn read_again(&self, read: &mut Read, versions: [Option<named::Version>; 2]) {
        read.versions = versions;
        match acceptor(&self.files) {
            Ok(acceptor) => {
                read.acceptor = acceptor;
                info!(
                    "the TLS certificate was read again: new connections get it, open ones go on"
                );
            }
            Err(why) => error!(
                "the TLS certificate cannot be read again: {why}; new connections still get the old one. Put a \
                certificate and its key there: soloist reads both again when a file changes, or at a reload"
            ),
        }
    }
}

fn versions(files: &HttpTls) -> [Option<named::Version>; 2] {
    [named::version(&files.cert), named::version(&files.key)]
}

fn acceptor(files: &HttpTls) -> Result<TlsAcceptor, String> {
    pair(files).map(|config| TlsAcceptor::from(Arc::new(config)))
}

/// What a server needs to serve with this certificate and key.
///
/// # Errors
/// A file cannot be used, or the key is not that of the certificate, in words.
pub(crate) fn pair(tls: &HttpTls) -> Result<ServerConfig, String> {
    crate::store::redis::install_crypto();
    let file = |path: &Path| {
        rights::trusted(path).map_err(|f| format!("{}: {}", f.message, f.fix))?;
        named::read(path).map_err(|why| format!("cannot read {}: {why}", path.display()))
    };
    let pem = file(&tls.cert)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let chain = chain.map_err(|_| format!("{} is not a PEM file", tls.cert.display()))?;
    if chain.is_empty() {
        return Err(format!("{} contains no certificate", tls.cert.display()));
    }
    let key = PrivateKeyDer::from_pem_slice(&file(&tls.key)?);
    let key = key.map_err(|_| format!("{} contains no private key", tls.key.display()))?;
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key);
    let mut config = config.map_err(|e| match e {
        rustls::Error::InconsistentKeys(_) => {
            let (cert, key) = (tls.cert.display(), tls.key.display());
            format!("{key} is not the key of the first certificate in {cert}")
        }
        e => format!("{} and {}: {e}", tls.cert.display(), tls.key.display()),
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
