//! The API, the page and the metrics, over HTTP: every instance shows the whole fleet.
//!
//! HTTP has a thread of its own, with its own runtime: whatever a client does, the tasks that claim and renew do not
//! wait for it. Requests to the store go from the daemon's runtime, to which its connections belong. Reads are answered
//! from the [`board`].

mod api;
pub(crate) mod auth;
mod board;
mod calendar;
pub(crate) mod certificate;
mod events;
mod headers;
mod jobs;
mod metrics;
mod openapi;
mod page;
mod plan;
mod problem;
mod runs;
mod server;
mod why;
mod writes;

use std::{future::Future, sync::Arc};

use axum::{Router, extract::DefaultBodyLimit, routing::get};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, oneshot, watch},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::error;
use utoipa::OpenApi as _;
use utoipa_axum::{router::OpenApiRouter, routes};

use self::{auth::Gate, board::Board, problem::Problem};
use crate::{
    config::{self, Config},
    health::Health,
    model::InstanceId,
    store::{self, Asking, Store},
};

/// The most bytes of a request's body.
const BODY_MOST: usize = 64 << 10;

/// What the server needs of the daemon.
pub(crate) struct Parts {
    pub(crate) http: config::Http,
    /// As reloads change it.
    pub(crate) config: watch::Receiver<Arc<Config>>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) health: Arc<Health>,
    pub(crate) instance: InstanceId,
    pub(crate) finish: CancellationToken,
}

/// What requests use.
struct App {
    http: config::Http,
    gate: Gate,
    store: Arc<dyn Store>,
    retry: config::StoreRetry,
    health: Arc<Health>,
    instance: InstanceId,
    board: Board,
    /// The daemon's runtime.
    daemon: Handle,
    /// A permit for each stream of events.
    streams: Arc<Semaphore>,
    finish: CancellationToken,
}

/// Serves until `finish`.
pub(crate) async fn serve(p: Parts) {
    let config = p.config.borrow().clone();
    let app = Arc::new(App {
        gate: Gate::new(p.http.clone()),
        http: p.http,
        retry: config.store.retry.clone(),
        health: p.health.clone(),
        board: Board::new(config, p.store.address(), p.instance.clone()),
        instance: p.instance,
        store: p.store.clone(),
        daemon: Handle::current(),
        streams: Arc::new(Semaphore::new(events::STREAMS)),
        finish: p.finish.clone(),
    });
    // Here, because the task that receives them belongs to the daemon's runtime.
    let (changes, pulse) = (p.store.changes(), p.health.pulse());
    let asking = Asking::new(p.store);
    let (ended, end) = oneshot::channel::<()>();
    let body = move || {
        let _ended = ended;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => return error!(%error, "cannot serve HTTP: no runtime"),
        };
        let router = router(&app);
        let reloads = p.config.clone();
        let keeper = app.clone();
        runtime.spawn(async move {
            let board = &keeper.board;
            board.keep(asking, changes, pulse, p.config, p.finish).await;
        });
        runtime.block_on(server::serve(app, router, reloads));
        runtime.shutdown_background();
    };
    if let Err(error) = std::thread::Builder::new()
        .name("http".to_owned())
        .spawn(body)
    {
        error!(%error, "cannot serve HTTP: no thread");
    }
    let _ = end.await;
}

/// What is where, with its description.
fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(openapi::Api::openapi())
        .routes(routes!(api::healthz))
        .routes(routes!(api::readyz))
        .routes(routes!(api::session))
        .routes(routes!(openapi::document))
        .routes(routes!(api::jobs))
        .routes(routes!(jobs::job))
        .routes(routes!(runs::of_job))
        .routes(routes!(why::why))
        .routes(routes!(why::latest))
        .routes(routes!(calendar::of_job))
        .routes(routes!(writes::trigger))
        .routes(routes!(writes::pause))
        .routes(routes!(writes::resume))
        .routes(routes!(writes::skip))
        .routes(routes!(writes::cancel))
        .routes(routes!(runs::all))
        .routes(routes!(runs::one))
        .routes(routes!(runs::output))
        .routes(routes!(api::instances))
        .routes(routes!(writes::drain))
        .routes(routes!(writes::undrain))
        .routes(routes!(events::events))
        .routes(routes!(plan::plan))
        .routes(routes!(plan::load))
        .routes(routes!(calendar::all))
        .routes(routes!(metrics::metrics))
}

/// What is where, with the page, which needs no description.
fn router(app: &Arc<App>) -> Router {
    let (router, _) = routes().split_for_parts();
    router
        .route("/", get(page::index))
        .route("/static/{*path}", get(page::asset))
        .fallback(api::nothing)
        .method_not_allowed_fallback(api::not_allowed)
        .layer(DefaultBodyLimit::max(BODY_MOST))
        .with_state(app.clone())
}

impl App {
    /// Asks the store, from the daemon's runtime, and repeats the request after transport errors as `[store] retry`
    /// says. The request must be safe to repeat.
    async fn ask<T, F>(
        &self,
        f: impl Fn(Arc<dyn Store>) -> F + Send + 'static,
    ) -> Result<T, Problem>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, store::Error>> + Send + 'static,
    {
        if let Some(away) = &self.board.read().pulse().away {
            return Err(Problem::unavailable(away.why.to_string())
                .hint("until the store answers, nothing starts"));
        }
        let (store, retry) = (self.store.clone(), self.retry.clone());
        let asked = self.daemon.spawn(async move {
            for failures in 1..=retry.attempts {
                match f(store.clone()).await {
                    Err(e) if e.is_transient() => {}
                    other => return other,
                }
                tokio::time::sleep(retry.pause(failures, fastrand::f64())).await;
            }
            f(store).await
        });
        // If the client goes away, so does the request.
        match AbortOnDropHandle::new(asked).await {
            Ok(answer) => answer.map_err(Problem::from),
            Err(_) => Err(Problem::unavailable("the instance ends")),
        }
    }
}
