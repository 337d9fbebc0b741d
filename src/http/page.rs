//! The page: files in `page/`, embedded in the program. Whoever adds a file there touches this one, so that the
//! compiler looks at the folder again.

use std::{collections::HashMap, sync::LazyLock};

use axum::{
    body::Body,
    extract::Path,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use include_dir::{Dir, include_dir};
use ring::digest;

use super::problem::Problem;

static FILES: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/src/http/page");

/// The ETag of each file: the beginning of its hash.
static TAGS: LazyLock<HashMap<&'static str, String>> = LazyLock::new(|| {
    let mut all = HashMap::new();
    let mut left = vec![&FILES];
    while let Some(dir) = left.pop() {
        left.extend(dir.dirs());
        for file in dir.files() {
            let hash = digest::digest(&digest::SHA256, file.contents());
            let hex: String = hash
                .as_ref()
                .iter()
                .take(8)
                .map(|b| format!("{b:02x}"))
                .collect();
            if let Some(path) = file.path().to_str() {
                all.insert(path, format!("\"{hex}\""));
            }
        }
    }
    all
});

pub(super) async fn index(headers: HeaderMap) -> Response {
    file("index.html", &headers)
}

pub(super) async fn asset(Path(path): Path<String>, headers: HeaderMap) -> Response {
    file(&path, &headers)
}

/// Only files that were embedded have a path here, so none leads out of the folder.
fn file(path: &str, headers: &HeaderMap) -> Response {
    let (Some(file), Some(tag)) = (FILES.get_file(path), TAGS.get(path)) else {
        return Problem::missing("there is no such file").into_response();
    };
    let known = headers
        .get(header::IF_NONE_MATCH)
        .and_then(|v| v.to_str().ok());
    let same = known.is_some_and(|all| {
        let mut all = all.split(',').map(|t| t.trim().trim_start_matches("W/"));
        all.any(|t| t == tag || t == "*")
    });
    let mut response = match same {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => Response::new(Body::from(file.contents())),
    };
    let headers = response.headers_mut();
    if !same {
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static(media_type(path)),
        );
    }
    if let Ok(tag) = HeaderValue::from_str(tag) {
        headers.insert(header::ETAG, tag);
    }
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn media_type(path: &str) -> &'static str {
    match path.rsplit('.').next().unwrap_or_default() {
        "html" => "text/html; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "ico" => "image/x-icon",
        "json" | "map" => "application/json",
        "webmanifest" => "application/manifest+json",
        "woff2" => "font/woff2",
        "txt" | "md" => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Outcome;

    #[test]
    fn the_page_calls_those_outcomes_bad_that_the_program_does() {
        let judge = FILES.get_file("judge.js").and_then(|f| f.contents_utf8());
        let mut lines = judge.expect("a text").lines();
        let bad = lines.find(|line| line.starts_with("export const BAD ="));
        let bad = bad.expect("its list");
        for outcome in Outcome::ALL {
            let listed = bad.contains(&format!("'{outcome}'"));
            assert_eq!(listed, outcome.is_bad(), "{outcome}");
        }
    }
}
