//! The server's certificate and key.

use std::{path::Path, sync::Arc};

use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tokio_rustls::TlsAcceptor;

use crate::config::{HttpTls, named, rights};

/// Reads both files.
///
/// # Errors
/// A file cannot be used, or the key is not that of the certificate, in words.
pub(crate) fn acceptor(tls: &HttpTls) -> Result<TlsAcceptor, String> {
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
        rustls::Error::InvalidCertificate(_) => {
            format!("{} contains a certificate that cannot be read", tls.cert.display())
        }
        _ => format!(
            "{} contains a key that cannot be used: make one for ECDSA (P-256 or P-384), Ed25519, or RSA (2048 bits or \
            more)",
            tls.key.display()
        ),
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
