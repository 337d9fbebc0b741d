//! Connections: accepts them, over TCP, TLS or a socket, and bounds what each may cost.

use std::{
    convert::Infallible,
    future::Future,
    io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body, extract::Request, http::StatusCode, response::IntoResponse as _};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, Sleep},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;
use tower_service::Service as _;
use tracing::{debug, error, info, warn};

use super::{App, certificate::Certificate, headers, problem::Problem};
use crate::{
    clock::Boottime,
    config::{Config, HttpTls, Listen},
    logic::backoff::Throttle,
};

/// The most connections at one time.
const CONNECTIONS: usize = 256;
/// The head of a request must arrive within this time, and have no more bytes than [`HEAD_MOST`]. A connection without
/// a request ends after it.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
const HEAD_MOST: usize = 16 << 10;
/// An answer must be ready within this time; streams only begin within it.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// A client must take bytes within this time.
const TAKE_WITHIN: Duration = Duration::from_secs(30);
/// How often to try to listen again.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);
/// After the instance was told to end, answers may take this much longer.
const FINISH_WITHIN: Duration = Duration::from_millis(500);

/// Tries until it can listen. None: the instance ends.
async fn listen(app: &App) -> Option<Listener> {
    let mut told = Throttle::default();
    loop {
        match Listener::open(&app.http.listen, app.http.tls.as_ref()).await {
            Ok(listener) => return Some(listener),
            Err(why) => {
                if told.lets(Boottime::now(), Duration::from_secs(60)) {
                    error!(
                        "cannot serve HTTP at {}: {why}; trying again, and jobs run without it",
                        app.http.listen
                    );
                }
            }
        }
        let pause = tokio::time::sleep(LISTEN_AGAIN);
        app.finish.run_until_cancelled(pause).await?;
    }
}

/// Serves until the instance ends. What cannot be served now is tried again: jobs run without it. `reloads` changes
/// whenever the daemon was asked to read its configuration again.
pub(super) async fn serve(
    app: Arc<App>,
    router: Router,
    mut reloads: watch::Receiver<Arc<Config>>,
) {
    let Some(listener) = listen(&app).await else {
        return;
    };
    info!("serving HTTP at {}", listener.shown);
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    let tracker = TaskTracker::new();
    let mut refused = Throttle::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Ok(()) = reloads.changed() => {
                if let Some(certificate) = &listener.tls {
                    certificate.reload();
                }
                continue;
            }
            () = app.finish.cancelled() => break,
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(e) => {
                // Most likely there are too many open files: the connection stays in the queue.
                if refused.lets(Boottime::now(), Duration::from_secs(10)) {
                    warn!(error = %e, "cannot accept a connection for HTTP");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        match connections.clone().try_acquire_owned() {
            Ok(permit) => {
                let connection = connection(
                    app.clone(),
                    router.clone(),
                    stream,
                    listener.tls.as_ref().map(Certificate::acceptor),
                    permit,
                );
                drop(tracker.spawn(connection));
            }
            Err(_) => {
                if refused.lets(Boottime::now(), Duration::from_secs(10)) {
                    warn!("refused a connection: {CONNECTIONS} are open already");
                }
                let plain = listener.tls.is_none();
                tokio::spawn(async move {
                    let _ =
                        tokio::time::timeout(Duration::from_secs(1), refuse(stream, plain)).await;
                });
            }
        }
    }
    drop(listener);
    tracker.close();
    let _ = tokio::time::timeout(FINISH_WITHIN, tracker.wait()).await;
}

/// Says that there are too many connections, where that can be said without a handshake.
async fn refuse(mut stream: Accepted, plain: bool) {
    const FULL: &[u8] =
        b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 2\r\n\
        Content-Length: 0\r\n\r\n";
    if plain {
        let _ = stream.write_all(FULL).await;
    }
    let _ = stream.shutdown().await;
}

async fn connection(
    app: Arc<App>,
    router: Router,
    stream: Accepted,
    tls: Option<TlsAcceptor>,
    permit: OwnedSemaphorePermit,
) {
    let _permit = permit;
    let stream = Patient::new(stream);
    match tls {
        None => speak(app, router, stream).await,
        Some(tls) => match tokio::time::timeout(HEAD_WITHIN, tls.accept(stream)).await {
            Ok(Ok(stream)) => speak(app, router, stream).await,
            Ok(Err(error)) => debug!(%error, "no TLS handshake"),
            Err(_) => debug!("no TLS handshake in time"),
        },
    }
}

async fn speak<S: AsyncRead + AsyncWrite + Unpin + 'static>(
    app: Arc<App>,
    router: Router,
    stream: S,
) {
    let finish = app.finish.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let (app, router) = (app.clone(), router.clone());
        async move { Ok::<_, Infallible>(answer(&app, router, request.map(Body::new)).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(HEAD_MOST)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let mut finishing = false;
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    debug!(%error, "a connection for HTTP ended");
                }
                return;
            }
            () = finish.cancelled(), if !finishing => {
                finishing = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Answers one request: who it is, what it may do, and then what it asks for.
async fn answer(
    app: &App,
    mut router: Router,
    mut request: Request<Body>,
) -> axum::response::Response {
    let path = request.uri().path().to_owned();
    let mut response = match app
        .gate
        .judge(request.method(), request.uri(), request.headers())
    {
        Err(problem) => problem.into_response(),
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            match tokio::time::timeout(ANSWER_WITHIN, router.call(request)).await {
                Ok(Ok(response)) => response,
                Err(_) => Problem::new(StatusCode::GATEWAY_TIMEOUT, "no answer in time")
                    .hint("the store may be slow; try again")
                    .into_response(),
            }
        }
    };
    headers::add(
        response.headers_mut(),
        path.starts_with("/api/") || path == "/metrics",
    );
    response
}

struct Listener {
    socket: Socket,
    tls: Option<Certificate>,
    /// The address, with the port that the system chose for port 0.
    shown: String,
}

enum Socket {
    Tcp(TcpListener),
    /// With the file's device and inode: at its end the listener removes its own socket, and no other.
    Unix(UnixListener, PathBuf, (u64, u64)),
}

impl Listener {
    /// # Errors
    /// Why this address cannot be used, and what to do about it.
    async fn open(listen: &Listen, tls: Option<&HttpTls>) -> Result<Self, String> {
        let tls = tls.map(Certificate::open).transpose()?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let (socket, shown) = match listen {
            Listen::Tcp(address) => {
                let socket = TcpListener::bind(address)
                    .await
                    .map_err(|e| match e.kind() {
                        io::ErrorKind::AddrInUse => {
                            "another program listens there; choose another port in [http]"
                                .to_owned()
                        }
                        _ => e.to_string(),
                    })?;
                let address = socket.local_addr().map_err(|e| e.to_string())?;
                (Socket::Tcp(socket), format!("{scheme}://{address}"))
            }
            Listen::Unix(path) => (bind(path).await?, format!("{listen}")),
        };
        Ok(Self { socket, tls, shown })
    }

    async fn accept(&self) -> io::Result<Accepted> {
        Ok(match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Accepted::Tcp(stream)
            }
            Socket::Unix(listener, ..) => Accepted::Unix(listener.accept().await?.0),
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Socket::Unix(_, path, own) = &self.socket
            && file_of(path) == Some(*own)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn file_of(path: &Path) -> Option<(u64, u64)> {
    let m = std::fs::symlink_metadata(path).ok()?;
    Some((m.dev(), m.ino()))
}

/// Makes a socket that its owner and group may use.
async fn bind(path: &Path) -> Result<Socket, String> {
    if let Ok(meta) = std::fs::symlink_metadata(path) {
        if !meta.file_type().is_socket() {
            return Err(
                "there is a file of that name; remove it, or choose another name in [http]"
                    .to_owned(),
            );
        }
        if UnixStream::connect(path).await.is_ok() {
            return Err("another program listens there; choose another name in [http]".to_owned());
        }
    }
    // Under another name first: nobody may use it before its mode is set. To rename it also takes the place of one that
    // a dead process left behind.
    let made = Listen::made_at(path);
    let _ = std::fs::remove_file(&made);
    let bound = || -> io::Result<Socket> {
        let listener = UnixListener::bind(&made)?;
        std::fs::set_permissions(&made, std::fs::Permissions::from_mode(0o660))?;
        std::fs::rename(&made, path)?;
        let own = file_of(path).unwrap_or_default();
        Ok(Socket::Unix(listener, path.to_owned(), own))
    };
    bound().map_err(|e| {
        let _ = std::fs::remove_file(&made);
        match e.kind() {
            io::ErrorKind::NotFound => "its directory does not exist; create it".to_owned(),
            io::ErrorKind::PermissionDenied => {
                "this user may not create files in its directory; change that, or choose another one".to_owned()
            }
            _ => e.to_string(),
        }
    })
}

enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsyncRead for Accepted {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_read(cx, buf),
            Self::Unix(s) => Pin::new(s).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_write(cx, bytes),
            Self::Unix(s) => Pin::new(s).poll_write(cx, bytes),
        }
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_flush(cx),
            Self::Unix(s) => Pin::new(s).poll_flush(cx),
        }
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_shutdown(cx),
            Self::Unix(s) => Pin::new(s).poll_shutdown(cx),
        }
    }
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_write_vectored(cx, bytes),
            Self::Unix(s) => Pin::new(s).poll_write_vectored(cx, bytes),
        }
    }
    fn is_write_vectored(&self) -> bool {
        true
    }
}

/// A stream whose other end must take what is written within [`TAKE_WITHIN`]: without a limit, clients that do not read
/// would hold connections for ever.
struct Patient {
    stream: Accepted,
    /// Since a write waits.
    until: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(stream: Accepted) -> Self {
        Self {
            stream,
            until: None,
        }
    }

    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.until = None;
            return written;
        }
        let until = self.until.get_or_insert_with(|| {
            Box::pin(tokio::time::sleep_until(Instant::now() + TAKE_WITHIN))
        });
        match until.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, written)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.watch(cx, written)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
