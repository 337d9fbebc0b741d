//! The description of the API, made from its handlers.

use std::sync::LazyLock;

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use utoipa::{
    Modify, OpenApi, PartialSchema, ToSchema,
    openapi::{
        KnownFormat, ObjectBuilder, Ref, RefOr, Schema, SchemaFormat, Type,
        schema::AnyOfBuilder,
        security::{Http, HttpAuthScheme, SecurityScheme},
    },
};

use super::problem::ProblemView;
use crate::text::INSTANTS;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "soloist",
        description = "The state of a fleet of soloist, from any of its instances. Times are RFC 3339 in UTC. Errors are \
            problem documents (RFC 9457). Changes are POSTs with `Content-Type: application/json`.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0"),
        contact(),
    ),
    modifiers(&Token),
    components(schemas(Instant, OccurrenceName)),
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

/// An instant as clients may write it: what [`crate::text::instant`] reads.
pub(super) struct Instant;

impl PartialSchema for Instant {
    fn schema() -> RefOr<Schema> {
        let format = |known| Some(SchemaFormat::KnownFormat(known));
        let written = ObjectBuilder::new()
            .schema_type(Type::String)
            .format(format(KnownFormat::DateTime));
        let ms = ObjectBuilder::new()
            .schema_type(Type::Integer)
            .format(format(KnownFormat::Int64))
            .minimum(Some(*INSTANTS.start() as f64))
            .maximum(Some(*INSTANTS.end() as f64));
        let either = AnyOfBuilder::new().item(written).item(ms);
        let said = "An instant: RFC 3339, or Unix milliseconds.";
        either.description(Some(said)).into()
    }
}

impl ToSchema for Instant {}

/// An occurrence as clients may name it in a path.
pub(super) struct OccurrenceName;

impl PartialSchema for OccurrenceName {
    fn schema() -> RefOr<Schema> {
        let latest = ObjectBuilder::new()
            .schema_type(Type::String)
            .enum_values(Some(["latest"]));
        let at = Ref::from_schema_name(Instant::name());
        let either = AnyOfBuilder::new().item(latest).item(at);
        let said = "An occurrence: its instant, or the latest one that is due or decided.";
        either.description(Some(said)).into()
    }
}

impl ToSchema for OccurrenceName {}

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
