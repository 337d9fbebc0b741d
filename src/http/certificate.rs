//! The server's certificate and key, which are read again when their files have changed.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tokio_rustls::TlsAcceptor;
use tracing::{error, info, warn};
use x509_cert::der::Decode as _;

use crate::{
    clock::{Boottime, wall_us},
    config::{HttpTls, named, rights},
    words,
};

/// The files are looked at no more often than this.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Whoever renews certificates by hand has so much time after the warning.
const EXPIRES_SOON_MS: i64 = 14 * 86_400_000;
/// The warning is repeated so often.
const WARN_AGAIN: Duration = Duration::from_secs(86_400);

/// The pair that new connections get. Those that are open keep the one that they began with.
pub(super) struct Certificate {
    files: HttpTls,
    /// When the certificate that is served expires, Unix ms; 0: not known.
    expires: Arc<AtomicI64>,
    read: Mutex<Read>,
}

struct Read {
    looked: Boottime,
    /// Of the certificate's file and the key's; None: a file is not there.
    versions: [Option<named::Version>; 2],
    acceptor: TlsAcceptor,
    warned: Option<Boottime>,
}

impl Certificate {
    /// `expires` is told when the certificate that is served expires.
    ///
    /// # Errors
    /// As [`pair`].
    pub(super) fn open(files: &HttpTls, expires: Arc<AtomicI64>) -> Result<Self, String> {
        let versions = versions(files);
        let pair = pair(files)?;
        let certificate = Self {
            files: files.clone(),
            expires,
            read: Mutex::new(Read {
                looked: Boottime::now(),
                versions,
                acceptor: TlsAcceptor::from(pair.config.clone()),
                warned: None,
            }),
        };
        certificate.serves(&pair, &mut certificate.read.lock());
        Ok(certificate)
    }

    /// From now on this pair is served.
    fn serves(&self, pair: &Pair, read: &mut Read) {
        self.expires
            .store(pair.expires.unwrap_or(0), Ordering::Relaxed);
        read.warned = None;
        self.warn_of_expiry(read);
    }

    fn warn_of_expiry(&self, read: &mut Read) {
        let now = Boottime::now();
        if read.warned.is_some_and(|at| now.since(at) < WARN_AGAIN) {
            return;
        }
        let at = Some(self.expires.load(Ordering::Relaxed)).filter(|at| *at != 0);
        if let Some(words) = expiry_in_words(&self.files, at, wall_us().div_euclid(1000)) {
            read.warned = Some(now);
            warn!("{words}");
        }
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
            self.warn_of_expiry(&mut read);
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
        match pair(&self.files) {
            Ok(pair) => {
                read.acceptor = TlsAcceptor::from(pair.config.clone());
                self.serves(&pair, read);
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

/// What a server needs to serve with a certificate and its key.
pub(crate) struct Pair {
    config: Arc<ServerConfig>,
    /// Unix ms; None: not known.
    expires: Option<i64>,
}

impl Pair {
    /// What to say about the certificate's end, if that has come, or comes soon.
    pub(crate) fn expiry_in_words(&self, files: &HttpTls) -> Option<String> {
        expiry_in_words(files, self.expires, wall_us().div_euclid(1000))
    }
}

fn expiry_in_words(files: &HttpTls, expires: Option<i64>, now: i64) -> Option<String> {
    let at = expires.filter(|at| at.saturating_sub(now) < EXPIRES_SOON_MS)?;
    let (verb, then) = match at <= now {
        true => ("expired", "clients refuse it"),
        false => ("expires", "then clients refuse it"),
    };
    Some(format!(
        "the TLS certificate in {} {verb} {} ({}), and {then}: put a new one there",
        files.cert.display(),
        words::relative(at, now),
        words::instant(at)
    ))
}

/// Until when a certificate is valid, Unix ms; None: it cannot be read. rustls does not tell a server that of its own.
fn expires(der: &[u8]) -> Option<i64> {
    let read = x509_cert::Certificate::from_der(der).ok()?;
    let end = read.tbs_certificate().validity().not_after;
    i64::try_from(end.to_unix_duration().as_millis()).ok()
}

/// Reads both files.
///
/// # Errors
/// A file cannot be used, or the key is not that of the certificate, in words.
pub(crate) fn pair(tls: &HttpTls) -> Result<Pair, String> {
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
    let expires = chain.iter().filter_map(|c| expires(c)).min();
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
    Ok(Pair {
        config: Arc::new(config),
        expires,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_is_near_is_said() {
        const DAY: i64 = 86_400_000;
        let files = HttpTls {
            cert: "server.pem".into(),
            key: "server.key".into(),
        };
        let now = 1_795_176_000_000; // 2026-11-20T12:00:00Z
        let said = |at| expiry_in_words(&files, Some(at), now);
        assert_eq!(said(now + EXPIRES_SOON_MS), None);
        assert_eq!(expiry_in_words(&files, None, now), None);
        let soon = said(now + 2 * DAY).expect("soon");
        assert!(soon.contains("server.pem expires in 2 d"), "{soon}");
        let over = said(now - 2 * DAY).expect("over");
        assert!(over.contains("server.pem expired 2 d ago"), "{over}");
    }

    /// With the forms of a time before and after 2050.
    #[test]
    fn a_certificate_says_until_when_it_is_valid() {
        use base64::Engine as _;
        let soon = "MIIBLDCB36ADAgECAhRtp0hASuZqk+/nimgCzsXtic49iDAFBgMrZXAwDDEKMAgGA1UEAwwBYTAeFw0yNjExMjYxMTI2NDdaFw0y\
            NzExMjYxMTI2NDdaMAwxCjAIBgNVBAMMAWEwKjAFBgMrZXADIQAztXK9IZiHTpFiMAMjocCIkYjCPdCdRLeceNcRmCO7n6NTMFEw\
            HQYDVR0OBBYEFCo/N4PAmKwr/9zJoVYFFQHHLhxyMB8GA1UdIwQYMBaAFCo/N4PAmKwr/9zJoVYFFQHHLhxyMA8GA1UdEwEB/wQF\
            MAMBAf8wBQYDK2VwA0EATNzzRFRUDMlERqph85xYir/3xRqXgGEPXwPsNcvgdevgeYW8RshT64zhhbraujnySm2kCUFferiNMO0/\
            gnrMDA==";
        let late = "MIIBLjCB4aADAgECAhQmmCTfyNhq8ksCJb0JgnYevceJXDAFBgMrZXAwDDEKMAgGA1UEAwwBYTAgFw0yNjExMjYxMTI2NDdaGA8y\
            MDc2MTExMzExMjY0N1owDDEKMAgGA1UEAwwBYTAqMAUGAytlcAMhANGfuwDAsxJef09Sp1Gf+dE+lLrLdWR+3nEAr5tvdHxDo1Mw\
            UTAdBgNVHQ4EFgQUuODkoLlvcfp3n37j0MzOSeyNZUEwHwYDVR0jBBgwFoAUuODkoLlvcfp3n37j0MzOSeyNZUEwDwYDVR0TAQH/\
            BAUwAwEB/zAFBgMrZXADQQBlTswcB+phJdvnM2i5L0aoOHTAWX4Te/erGr8dScy99jZjHQcqTMSGm1BOfiQw1/ZeWXegOhN//AgF\
            wIinMU0N";
        for (text, end) in [
            (soon, "2027-11-26T11:26:47Z"),
            (late, "2076-11-13T11:26:47Z"),
        ] {
            let der = base64::prelude::BASE64_STANDARD
                .decode(text)
                .expect("base64");
            let end: jiff::Timestamp = end.parse().expect("a time");
            assert_eq!(expires(&der), Some(end.as_millisecond()));
            // Whatever is cut off, it only cannot be read.
            for n in 0..der.len() {
                assert_eq!(expires(&der[..n]), None);
            }
        }
    }
}
