//! Streams to a Redis server: over TCP, TLS, or a Unix socket.

use std::{
    io,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::select_ok;
use redis::{ConnectionAddr, ConnectionInfo, aio::AsyncStream, io::tcp::socket2::SockRef};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream, lookup_host},
};
#[cfg(feature = "tls")]
use {
    rustls::{
        ClientConfig, RootCertStore,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
    },
    std::path::Path,
};

use crate::config;

/// Of a server that does not answer the begin of TLS.
pub(super) const NO_HANDSHAKE: &str = "no answer to the begin of TLS";

pub(super) type Peer = Option<IpAddr>;
type Inner = Pin<Box<dyn AsyncStream + Send + Sync>>;

/// A stream to a server, which others can end.
pub(super) struct Stream(Inner, Ended);

/// Whether nothing more is to leave over a connection.
#[derive(Clone)]
pub(super) struct Ended(Arc<AtomicBool>);

impl Ended {
    #[cfg(feature = "daemon")]
    pub(super) fn end(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// The connection is there.
    pub(super) fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl Stream {
    pub(super) fn new(stream: Inner) -> (Self, Ended) {
        let ended = Ended(Arc::default());
        (Self(stream, ended.clone()), ended)
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.as_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.1.0.load(Ordering::Relaxed) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        self.0.as_mut().poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.as_mut().poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.as_mut().poll_shutdown(cx)
    }
}

/// The authorities and the certificate that the files of `tls` name; without them, the host's authorities and none.
#[derive(Clone, Default)]
pub(super) struct Certificates {
    #[cfg(feature = "tls")]
    authorities: Option<Arc<RootCertStore>>,
    #[cfg(feature = "tls")]
    own: Option<(Vec<CertificateDer<'static>>, Arc<PrivateKeyDer<'static>>)>,
}

/// `peer` gets the address that it leads to, if it has one; `limit` is how long TLS may take to begin.
///
/// # Errors
/// No address of the server can be reached, or its certificate is not trusted.
pub(super) async fn open(
    info: &ConnectionInfo,
    tls: &Certificates,
    peer: &mut Peer,
    limit: Duration,
) -> io::Result<Inner> {
    Ok(match info.addr() {
        ConnectionAddr::Unix(path) => Box::pin(UnixStream::connect(path).await?),
        ConnectionAddr::Tcp(host, port) => Box::pin(tcp(info, (host, *port), peer).await?),
        ConnectionAddr::TcpTls { host, port, .. } => {
            tls.over(tcp(info, (host, *port), peer).await?, host, limit)
                .await?
        }
        _ => return Err(io::ErrorKind::Unsupported.into()),
    })
}

/// A connection to whichever address of the host answers first: one of them may be unreachable from here.
async fn tcp(info: &ConnectionInfo, to: (&str, u16), peer: &mut Peer) -> io::Result<TcpStream> {
    let addresses = lookup_host(to).await?;
    let tries: Vec<_> = addresses.map(|a| Box::pin(TcpStream::connect(a))).collect();
    if tries.is_empty() {
        return Err(io::Error::other("the host has no address"));
    }
    let (stream, _) = select_ok(tries).await?;
    *peer = Some(stream.peer_addr()?.ip().to_canonical());
    let settings = info.tcp_settings();
    stream.set_nodelay(settings.nodelay())?;
    let socket = SockRef::from(&stream);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    socket.set_tcp_user_timeout(settings.user_timeout())?;
    Ok(stream)
}

#[cfg(not(feature = "tls"))]
impl Certificates {
    pub(super) fn read(_: &config::Tls) -> Result<Self, String> {
        Ok(Self::default())
    }

    async fn over(&self, _: TcpStream, _: &str, _: Duration) -> io::Result<Inner> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(feature = "tls")]
impl Certificates {
    /// # Errors
    /// A file cannot be read or used, in words.
    pub(super) fn read(tls: &config::Tls) -> Result<Self, String> {
        let authorities = tls.ca.as_deref().map(|path| {
            let mut all = RootCertStore::empty();
            for one in certificates(path)? {
                all.add(one)
                    .map_err(|e| format!("{}: {e}", path.display()))?;
            }
            Ok::<_, String>(Arc::new(all))
        });
        let own = match (&tls.cert, &tls.key) {
            (Some(cert), Some(key)) => {
                let read = PrivateKeyDer::from_pem_slice(&file(key)?);
                let private =
                    read.map_err(|_| format!("{} contains no private key", key.display()))?;
                Some((certificates(cert)?, Arc::new(private)))
            }
            _ => None,
        };
        let this = Self {
            authorities: authorities.transpose()?,
            own,
        };
        // Whether the key fits to the certificate.
        this.client().map(|_| this).map_err(|e| e.to_string())
    }

    /// The host's authorities are read for each connection, because they may change.
    fn client(&self) -> io::Result<ClientConfig> {
        let authorities = match &self.authorities {
            Some(named) => named.clone(),
            None => {
                let mut all = RootCertStore::empty();
                all.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                Arc::new(all)
            }
        };
        let client = ClientConfig::builder().with_root_certificates(authorities);
        match &self.own {
            Some((chain, key)) => client.with_client_auth_cert(chain.clone(), key.clone_key()),
            None => Ok(client.with_no_client_auth()),
        }
        .map_err(io::Error::other)
    }

    async fn over(&self, stream: TcpStream, host: &str, limit: Duration) -> io::Result<Inner> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let connector = tokio_rustls::TlsConnector::from(Arc::new(self.client()?));
        let connected = tokio::time::timeout(limit, connector.connect(name, stream)).await;
        // A server without TLS waits for the end of what it takes for a command.
        let silent = || io::Error::new(io::ErrorKind::TimedOut, NO_HANDSHAKE);
        Ok(Box::pin(connected.map_err(|_| silent())??))
    }
}

#[cfg(feature = "tls")]
fn file(path: &Path) -> Result<Vec<u8>, String> {
    config::rights::trusted(path).map_err(|f| format!("{}: {}", f.message, f.fix))?;
    config::named::read(path).map_err(|why| format!("cannot read {}: {why}", path.display()))
}

/// At least one: without this check, a file without certificates would trust no server, and no error would say why.
#[cfg(feature = "tls")]
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = file(path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    // Leave out the cause: it quotes the line, which may be part of a key.
    let all = all.map_err(|_| format!("{} is not a PEM file", path.display()))?;
    match all.is_empty() {
        true => Err(format!("{} contains no certificate", path.display())),
        false => Ok(all),
    }
}
