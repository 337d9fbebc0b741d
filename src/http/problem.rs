//! Errors as problem documents (RFC 9457).

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

use crate::store;

/// Why a request cannot be answered, and what to do about it.
#[derive(Debug, Clone)]
pub(super) struct Problem {
    pub(super) status: StatusCode,
    pub(super) detail: String,
    pub(super) hint: Option<String>,
    /// When to try again, in seconds.
    pub(super) retry_after: Option<u64>,
    /// A 401 says that a password will do, too.
    pub(super) basic: bool,
}

/// A problem document.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct ProblemView<'a> {
    /// `about:blank`: the status says it all.
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'a str>,
}

pub(super) const MEDIA_TYPE: &str = "application/problem+json";

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            status,
            detail: detail.into(),
            hint: None,
            retry_after: None,
            basic: false,
        }
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(super) fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    pub(super) fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(super) fn missing(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, detail)
    }

    pub(super) fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, detail).retry_after(2)
    }

    pub(super) fn internal(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
    }

    fn document(&self) -> Vec<u8> {
        let view = ProblemView {
            r#type: "about:blank",
            title: self.status.canonical_reason().unwrap_or("Error"),
            status: self.status.as_u16(),
            detail: &self.detail,
            hint: self.hint.as_deref(),
        };
        serde_json::to_vec(&view).unwrap_or_default()
    }
}

impl From<store::Error> for Problem {
    fn from(e: store::Error) -> Self {
        match e {
            store::Error::Corrupt { .. } => Self::internal(e.to_string())
                .hint("another program, or another version of soloist, wrote to the store"),
            e => Self::unavailable(e.to_string())
                .hint("until the store answers, nothing starts; what is shown may be old"),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.document()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer realm=\"soloist\"");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
            if self.basic {
                let scheme = HeaderValue::from_static("Basic realm=\"soloist\", charset=\"UTF-8\"");
                headers.append(header::WWW_AUTHENTICATE, scheme);
            }
        }
        response
    }
}
