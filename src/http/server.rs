//! Connections: accepts them, over TCP, TLS or a socket, and bounds what each may cost.

use std::{
    convert::Infallible,
    io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{Router, body::Body, extract::Request, http::StatusCode, response::IntoResponse as _};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{Semaphore, watch},
    time::timeout,
};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_util::either::Either;
use tower_service::Service as _;
use tracing::{debug, error, info, warn};

use super::{App, certificate, headers, problem::Problem};
use crate::{
    clock::Boottime,
    config::{Config, Listen},
    logic::backoff::Throttle,
};

/// The most connections at one time.
const CONNECTIONS: usize = 256;
/// So many more, each for a short time, learn that there are too many, or how the instance is.
const SPARE: usize = 64;
const SPARE_WITHIN: Duration = Duration::from_secs(1);
/// What is answered on a spare connection, too.
const ALWAYS: [&str; 3] = ["/healthz", "/readyz", "/metrics"];
/// The head of a request must arrive within this time, and have no more bytes than [`HEAD_MOST`]. A connection without
/// a request ends after it.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
const HEAD_MOST: usize = 16 << 10;
/// An answer must be ready within this time; streams only begin within it.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// A client must take bytes within this time: without a limit, clients that do not read would hold connections for
/// ever.
const TAKE_WITHIN: Duration = Duration::from_secs(30);
/// How often to try to listen again.
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

/// Serves until the instance ends. `reloads` changes whenever the daemon was asked to read its configuration again.
pub(super) async fn serve(
    app: Arc<App>,
    router: Router,
    mut reloads: watch::Receiver<Arc<Config>>,
) {
    let Some(mut listener) = listen(&app).await else {
        return;
    };
    info!("serving HTTP at {}", listener.shown);
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let spare = Arc::new(Semaphore::new(SPARE));
    let open = GracefulShutdown::new();
    let mut warned = Throttle::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Ok(()) = reloads.changed() => {
                listener.reload(&app);
                continue;
            }
            () = app.finish.cancelled() => break,
        };
        let stream = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                // Most likely there are too many open files: the connection stays in the queue.
                if warned.lets(Boottime::now(), Duration::from_secs(10)) {
                    warn!(error = %e, "cannot accept a connection for HTTP");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let mut connection = Connection {
            app: app.clone(),
            router: router.clone(),
            open: open.watcher(),
            answers: Answers::All,
        };
        let tls = listener.tls.clone();
        match places.clone().try_acquire_owned() {
            Ok(place) => {
                tokio::spawn(async move {
                    let _place = place;
                    connection.serve(stream, tls).await;
                });
            }
            Err(_) => {
                if warned.lets(Boottime::now(), Duration::from_secs(10)) {
                    warn!("{CONNECTIONS} connections for HTTP are open: others are refused");
                }
                connection.answers = Answers::Always;
                // They end soon: the others wait in the queue.
                let Ok(spare) = spare.clone().acquire_owned().await else {
                    break;
                };
                tokio::spawn(async move {
                    let _spare = spare;
                    let _ = timeout(SPARE_WITHIN, connection.serve(stream, tls)).await;
                });
            }
        }
    }
    drop(listener);
    let _ = timeout(FINISH_WITHIN, open.shutdown()).await;
}

/// What a connection is for.
#[derive(Clone, Copy)]
enum Answers {
    All,
    /// Too many others are open.
    Always,
    /// The client speaks plain HTTP where HTTPS is spoken: a browser would show bytes of TLS, or nothing.
    SpeakTls,
}

struct Connection {
    app: Arc<App>,
    router: Router,
    open: Watcher,
    answers: Answers,
}

impl Connection {
    async fn serve(mut self, stream: Accepted, tls: Option<TlsAcceptor>) {
        let (tls, stream) = match (tls, stream) {
            (Some(tls), Either::Left(tcp)) => {
                let mut first = [0];
                let n = timeout(HEAD_WITHIN, tcp.peek(&mut first)).await;
                // Each method of HTTP begins with a letter, and no handshake does.
                let plain = matches!(n, Ok(Ok(1))) && first[0].is_ascii_alphabetic();
                if plain {
                    self.answers = Answers::SpeakTls;
                }
                ((!plain).then_some(tls), Either::Left(tcp))
            }
            other => other,
        };
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(TAKE_WITHIN));
        let stream = Box::pin(stream);
        let Some(tls) = tls else {
            return self.speak(stream).await;
        };
        match timeout(HEAD_WITHIN, tls.accept(stream)).await {
            Ok(Ok(stream)) => self.speak(stream).await,
            Ok(Err(error)) => debug!(%error, "no TLS handshake"),
            Err(_) => debug!("no TLS handshake in time"),
        }
    }

    async fn speak<S: AsyncRead + AsyncWrite + Unpin + 'static>(self, stream: S) {
        let Self {
            app,
            router,
            open,
            answers,
        } = self;
        let service = service_fn(move |request: Request<Incoming>| {
            let (app, router) = (app.clone(), router.clone());
            async move {
                let request = request.map(Body::new);
                Ok::<_, Infallible>(answer(&app, router, request, answers).await)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_WITHIN)
            .max_buf_size(HEAD_MOST)
            .keep_alive(matches!(answers, Answers::All))
            .serve_connection(TokioIo::new(stream), service);
        if let Err(error) = open.watch(connection).await {
            debug!(%error, "a connection for HTTP ended");
        }
    }
}

/// Answers one request: who it is, what it may do, and then what it asks for.
async fn answer(
    app: &App,
    mut router: Router,
    mut request: Request<Body>,
    answers: Answers,
) -> axum::response::Response {
    let path = request.uri().path().to_owned();
    let answered = async {
        match answers {
            Answers::Always if !ALWAYS.contains(&&*path) => {
                let detail = format!("{CONNECTIONS} connections are open");
                let hint = "try again in a moment; close streams that nobody reads";
                return Err(Problem::unavailable(detail).hint(hint));
            }
            Answers::SpeakTls => {
                return Err(Problem::bad("this port speaks https").hint("ask for `https://…`"));
            }
            Answers::All | Answers::Always => {}
        }
        let caller = app.gate.judge(&request)?;
        request.extensions_mut().insert(caller);
        match router.call(request).await {
            Ok(response) => Ok(response),
            Err(never) => match never {},
        }
    };
    let mut response = match timeout(ANSWER_WITHIN, answered).await {
        Ok(answered) => answered.into_response(),
        Err(_) => Problem::new(StatusCode::GATEWAY_TIMEOUT, "no answer in time")
            .hint("the store may be slow; try again")
            .into_response(),
    };
    headers::add(
        response.headers_mut(),
        path.starts_with("/api/") || path == "/metrics",
    );
    response
}

type Accepted = Either<TcpStream, UnixStream>;

struct Listener {
    socket: Socket,
    tls: Option<TlsAcceptor>,
    /// The address, with the port that the system chose for port 0.
    shown: String,
}

enum Socket {
    Tcp(TcpListener),
    /// With its path, and the number of its file.
    Unix(UnixListener, PathBuf, u64),
}

impl Listener {
    /// # Errors
    /// Why this address cannot be used, and what to do about it.
    async fn open(app: &App) -> Result<Self, String> {
        let listen = &app.http.listen;
        let tls = app.http.tls.as_ref().map(certificate::acceptor);
        let tls = tls.transpose()?;
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
                Either::Left(stream)
            }
            Socket::Unix(listener, ..) => Either::Right(listener.accept().await?.0),
        })
    }

    /// Reads the certificate and its key again. Connections that are open keep the one that they began with.
    fn reload(&mut self, app: &App) {
        let Some(files) = &app.http.tls else { return };
        match certificate::acceptor(files) {
            Ok(acceptor) => {
                self.tls = Some(acceptor);
                info!(
                    "the TLS certificate was read again: new connections get it, open ones go on"
                );
            }
            Err(why) => error!(
                "the TLS certificate cannot be read again: {why}; new connections still get the old one. Put a \
                certificate and its key there, and reload"
            ),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another daemon may have taken the name since.
        if let Socket::Unix(_, path, file) = &self.socket
            && std::fs::symlink_metadata(path).is_ok_and(|meta| meta.ino() == *file)
        {
            let _ = std::fs::remove_file(path);
        }
    }
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
        let file = std::fs::symlink_metadata(&made)?.ino();
        std::fs::rename(&made, path)?;
        Ok(Socket::Unix(listener, path.to_owned(), file))
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
