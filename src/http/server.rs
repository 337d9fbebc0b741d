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

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Request,
    http::StatusCode,
    response::IntoResponse as _,
};
use hyper::{
    body::{Body as _, Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{Semaphore, watch},
    time::{Instant, MissedTickBehavior, Sleep},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::task::TaskTracker;
use tower_service::Service as _;
use tracing::{debug, error, info, warn};

use super::{
    App, auth,
    certificate::Certificate,
    headers,
    places::{Answering, Place, Places},
    problem::Problem,
};
use crate::{
    clock::Boottime,
    config::{Config, Listen},
    logic::backoff::Throttle,
};

/// The most connections at one time: see [`Places`].
const CONNECTIONS: usize = 256;
/// So many of those that are refused are told why, at one time. The others just end.
const REFUSALS: usize = 64;
const REFUSE_WITHIN: Duration = Duration::from_secs(1);
/// So many new connections are accepted before the first of them is looked at.
const FRESH: usize = 32;
/// The head of a request must arrive within this time, and have no more bytes than [`HEAD_MOST`]. A connection without
/// a request ends after it.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
const HEAD_MOST: usize = 16 << 10;
/// An answer must be ready within this time; streams only begin within it.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// A client must take bytes within this time.
const TAKE_WITHIN: Duration = Duration::from_secs(30);
/// How often to try to listen again, and to look whether the path of a socket still leads to it.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);
/// After the instance was told to end, answers may take this much longer.
const FINISH_WITHIN: Duration = Duration::from_millis(500);

/// Tries until it can listen. None: the instance ends.
async fn listen(app: &App) -> Option<Listener> {
    let mut told = Throttle::default();
    loop {
        match Listener::open(app).await {
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
    let mut server = Server {
        app: app.clone(),
        router,
        places: Places::new(CONNECTIONS),
        refusals: Arc::new(Semaphore::new(REFUSALS)),
        connections: TaskTracker::new(),
        refused: Throttle::default(),
        full: Throttle::default(),
        fresh: 0,
    };
    while let Some(listener) = listen(&app).await {
        info!("serving HTTP at {}", listener.shown);
        match server.accept_from(&listener, &mut reloads).await {
            Over::Ends => break,
            Over::Lost => warn!(
                "nobody can reach HTTP at {} any more: somebody removed or replaced the socket; making a new one",
                listener.shown
            ),
        }
    }
    server.connections.close();
    let _ = tokio::time::timeout(FINISH_WITHIN, server.connections.wait()).await;
}

/// Why an instance accepts no more connections from a listener.
enum Over {
    /// The instance ends.
    Ends,
    /// The path of its socket leads there no more.
    Lost,
}

/// What all connections share, whichever listener they came by.
struct Server {
    app: Arc<App>,
    router: Router,
    places: Arc<Places>,
    refusals: Arc<Semaphore>,
    connections: TaskTracker,
    refused: Throttle,
    full: Throttle,
    /// So many connections were accepted since one was looked at.
    fresh: usize,
}

impl Server {
    async fn accept_from(
        &mut self,
        listener: &Listener,
        reloads: &mut watch::Receiver<Arc<Config>>,
    ) -> Over {
        let mut look = tokio::time::interval_at(Instant::now() + LISTEN_AGAIN, LISTEN_AGAIN);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                Ok(()) = reloads.changed() => {
                    if let Some(certificate) = &listener.tls {
                        certificate.reload();
                    }
                    continue;
                }
                _ = look.tick() => match listener.is_lost() {
                    true => return Over::Lost,
                    false => continue,
                },
                () = self.app.finish.cancelled() => return Over::Ends,
            };
            match accepted {
                Ok(stream) => self.take(stream, listener).await,
                Err(e) => {
                    // Most likely there are too many open files: the connection stays in the queue.
                    if self.refused.lets(Boottime::now(), Duration::from_secs(10)) {
                        warn!(error = %e, "cannot accept a connection for HTTP");
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn take(&mut self, stream: Accepted, listener: &Listener) {
        match self.places.take(Instant::now()) {
            Some((place, made_room)) => {
                if made_room && self.full.lets(Boottime::now(), Duration::from_secs(60)) {
                    warn!(
                        "{CONNECTIONS} connections for HTTP are open: each new one ends the one that has waited longest \
                        for a request"
                    );
                }
                let tls = listener.tls.as_ref().map(Certificate::acceptor);
                let (app, router) = (self.app.clone(), self.router.clone());
                let connection = connection(app, router, stream, tls, place);
                drop(self.connections.spawn(connection));
                // What has arrived on these connections counts before the next one may take the place of one of them.
                // Not after each: a turn of another client's lists comes in between.
                self.fresh += 1;
                if self.fresh == FRESH || self.places.are_taken() {
                    self.fresh = 0;
                    tokio::task::yield_now().await;
                }
            }
            None => {
                if self.refused.lets(Boottime::now(), Duration::from_secs(10)) {
                    warn!("refused a connection: {CONNECTIONS} others are being answered");
                }
                if let Ok(permit) = self.refusals.clone().try_acquire_owned() {
                    let plain = listener.tls.is_none();
                    tokio::spawn(async move {
                        let _permit = permit;
                        let _ = tokio::time::timeout(REFUSE_WITHIN, refuse(stream, plain)).await;
                    });
                }
            }
        }
    }
}

/// Says that there are too many connections, where that can be said without a handshake.
async fn refuse(stream: Accepted, plain: bool) {
    let problem = Problem::unavailable(format!("{CONNECTIONS} requests are being answered"))
        .hint("try again in a moment; close streams that nobody reads");
    end_with(stream, plain.then_some(&problem)).await;
}

/// Ends a connection, with an answer to whatever was asked.
async fn end_with<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, problem: Option<&Problem>) {
    if let Some(problem) = problem {
        let _ = stream.write_all(&problem.to_bytes()).await;
    }
    let _ = stream.shutdown().await;
    // To close with unread bytes would reset the connection, and may destroy the answer on its way.
    let mut unread = [0; 1024];
    while stream.read(&mut unread).await.is_ok_and(|n| n > 0) {}
}

async fn connection(
    app: Arc<App>,
    router: Router,
    stream: Accepted,
    tls: Option<TlsAcceptor>,
    place: Place,
) {
    let place = Arc::new(place);
    let stream = Patient::new(stream, place.clone());
    let spoken = async {
        match tls {
            None => speak(app, router, stream, &place).await,
            Some(tls) => match tokio::time::timeout(HEAD_WITHIN, handshake(tls, stream)).await {
                Ok(Ok(stream)) => speak(app, router, stream, &place).await,
                Ok(Err(error)) => debug!(%error, "no TLS handshake"),
                Err(_) => debug!("no TLS handshake in time"),
            },
        }
    };
    tokio::select! {
        () = spoken => {}
        () = place.given_away() => debug!("a connection without a whole request made room for another one"),
    }
}

/// A client that speaks plain HTTP is told so: a browser would show bytes of TLS, or nothing.
async fn handshake(tls: TlsAcceptor, stream: Patient) -> io::Result<TlsStream<Patient>> {
    if let Accepted::Tcp(tcp) = &stream.stream {
        let mut first = [0];
        let n = tcp.peek(&mut first).await?;
        // Each method of HTTP begins with a letter, and no handshake does.
        if n == 1 && first[0].is_ascii_alphabetic() {
            let problem = Problem::bad("this port speaks https").hint("ask for `https://…`");
            let _ = tokio::time::timeout(REFUSE_WITHIN, end_with(stream, Some(&problem))).await;
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    tls.accept(stream).await
}

async fn speak<S: AsyncRead + AsyncWrite + Unpin + 'static>(
    app: Arc<App>,
    router: Router,
    stream: S,
    place: &Arc<Place>,
) {
    let finish = app.finish.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let answering = Arc::new(place.asked(request.body().is_end_stream()));
        let (app, router) = (app.clone(), router.clone());
        async move {
            let request = request.map(|body| {
                let answering = answering.clone();
                Body::new(Asked { body, answering })
            });
            let response = answer(&app, router, request, &answering).await;
            // An answer that does not need the body has not waited for it.
            answering.whole();
            Ok::<_, Infallible>(response.map(|body| Answer {
                body,
                _answering: answering,
            }))
        }
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

/// The body of a request. Only once it is read to its end, the connection keeps its place.
struct Asked {
    body: Incoming,
    answering: Arc<Answering>,
}

impl hyper::body::Body for Asked {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(frame, Poll::Ready(None)) {
            self.answering.whole();
        }
        frame
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer. While it lives, its connection keeps its place.
struct Answer {
    body: Body,
    _answering: Arc<Answering>,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Answers one request: who it is, what it may do, and then what it asks for.
async fn answer(
    app: &App,
    mut router: Router,
    mut request: Request<Body>,
    answering: &Answering,
) -> axum::response::Response {
    let path = request.uri().path().to_owned();
    let mut response = match app.gate.judge(&request) {
        Err(problem) => problem.into_response(),
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            let answered = async {
                if !auth::is_public(&path) {
                    app.turns.mine().await;
                }
                router.call(request).await
            };
            match tokio::time::timeout(ANSWER_WITHIN, answered).await {
                Ok(Ok(response)) => response,
                Err(_) if !answering.is_whole() => {
                    let detail = format!("the body did not arrive within {ANSWER_WITHIN:?}");
                    Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
                        .hint("send as many bytes as `Content-Length` has")
                        .into_response()
                }
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
    /// With the [`number`] of its file: by that the listener knows whether its path still leads to it, and at its end
    /// removes its own socket, and no other.
    Unix(UnixListener, PathBuf, (u64, u64)),
}

impl Listener {
    /// # Errors
    /// Why this address cannot be used, and what to do about it.
    async fn open(app: &App) -> Result<Self, String> {
        let listen = &app.http.listen;
        let tls = app.http.tls.as_ref();
        let tls = tls
            .map(|files| Certificate::open(files, app.certificate_expires.clone()))
            .transpose()?;
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

    /// Nobody can reach this socket: its file was removed, or another one has its name. A path that cannot be looked at
    /// says nothing.
    fn is_lost(&self) -> bool {
        let Socket::Unix(_, path, own) = &self.socket else {
            return false;
        };
        match std::fs::metadata(path) {
            Ok(there) => number(&there) != *own,
            Err(e) => e.kind() == io::ErrorKind::NotFound,
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Socket::Unix(_, path, own) = &self.socket
            && std::fs::symlink_metadata(path).is_ok_and(|there| number(&there) == *own)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Device and inode. While a socket is bound to a file, no other file gets them.
fn number(file: &std::fs::Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
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
        // What refuses is dead. One that is busy, or that lets only others in, is not.
        let listens = match UnixStream::connect(path).await {
            Ok(_) => true,
            Err(e) => !matches!(
                e.kind(),
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
            ),
        };
        if listens {
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
        // Before it has the name that others may take, too.
        let own = number(&std::fs::symlink_metadata(&made)?);
        std::fs::rename(&made, path)?;
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
    place: Arc<Place>,
    /// Since a write waits.
    until: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(stream: Accepted, place: Arc<Place>) -> Self {
        Self {
            stream,
            place,
            until: None,
        }
    }

    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            if self.until.take().is_some() {
                self.place.stuck(None);
            }
            return written;
        }
        let until = self.until.get_or_insert_with(|| {
            let now = Instant::now();
            self.place.stuck(Some(now));
            Box::pin(tokio::time::sleep_until(now + TAKE_WITHIN))
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
    /// Called only once all that was written before has left.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        if flushed.is_ready() {
            self.place.flushed();
        }
        flushed
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
