//! The description of the API, made from its handlers.

use std::sync::LazyLock;

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use utoipa::{
    Modify, OpenApi,
    openapi::security::{Http, HttpAuthScheme, SecurityScheme},
};

use super::problem::ProblemView;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "soloist",
        description = "The state of a fleet of soloist, from any of its instances. Times are RFC 3339 in UTC; arguments may also be Unix milliseconds. Errors are \
            problem documents (RFC 9457). Changes are POSTs with `Content-Type: application/json`.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0"),
        contact(),
    ),
    modifiers(&Token),
    security(("token" = [])),
    tags(
        (name = "health", description = "Whether this instance is well, and what the caller may do"),
        (name = "jobs", description = "Jobs"),
        (name = "runs", description = "Runs and their output"),
        (name = "fleet", description = "Instances, and what happens"),
        (name = "plan", description = "What the schedules say"),
    )
)]
pub(super) struct Api;

struct Token;

impl Modify for Token {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let mut scheme = Http::new(HttpAuthScheme::Bearer);
        scheme.description =
            Some("a token of the file that `tokens_file` in [http] names".to_owned());
        let components = api.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
        let mut scheme = Http::new(HttpAuthScheme::Basic);
        scheme.description = Some("such a token as the password, with any user name".to_owned());
        components.add_security_scheme("password", SecurityScheme::Http(scheme));
    }
}

static DOCUMENT: LazyLock<Bytes> = LazyLock::new(|| {
    let (_, api) = super::routes().split_for_parts();
    let mut api = serde_json::to_value(&api).unwrap_or_default();
    // What an event says is not told apart by its shape, but by its kind: it may look like several of these.
    if let Some(data) = api
        .pointer_mut("/components/schemas/Data")
        .and_then(|d| d.as_object_mut())
        && let Some(parts) = data.remove("oneOf")
    {
        data.insert("anyOf".to_owned(), parts);
    }
    let document = api.to_string().into();
    drop(api);
    // The way to it took twenty times its size.
    crate::config::trim_memory();
    document
});

/// The description of this API
#[utoipa::path(
    get,
    path = "/api/v1/openapi.json",
    tag = "health",
    responses(
        (status = 200, description = "an OpenAPI document", content_type = "application/json"),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn document() -> Response {
    let mut response = Response::new(Body::from(DOCUMENT.clone()));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
