#!/bin/sh
# tests/features.sh: the locks without the daemon build without a warning, over either store, both and none, and bring
# none of the daemon's crates with them. Part of test.sh.
set -eu
cd "$(dirname "$0")/.."

# What is used with one store is used with both.
for features in redis sqlite ''; do
    cargo clippy --locked --quiet --lib --no-default-features --features "$features" -- -D warnings
done
# As docs.rs shows them: with both stores.
RUSTDOCFLAGS="-D warnings" cargo doc --locked --quiet --no-deps --no-default-features --features sqlite,tls

lacks() { # lacks FEATURE CRATE...
    feature=$1
    shift
    tree=$(cargo tree --locked --edges normal --prefix none --no-default-features --features "$feature")
    for crate in "$@"; do
        if printf '%s\n' "$tree" | grep -q "^$crate v"; then
            echo "tests/features.sh: the feature \`$feature\` alone brings the crate $crate" >&2
            exit 1
        fi
    done
}
daemon="annotate-snippets anstream anstyle anyhow bb8 bb8-redis clap nix sd-notify tokio-cron-scheduler toml
    tracing-subscriber axum base64 http-body-util hyper hyper-rustls hyper-util include_dir lettre prometheus-client
    ratatui crossterm tokio-io-timeout utoipa utoipa-axum"
# shellcheck disable=SC2086
lacks redis $daemon rusqlite libsqlite3-sys jiff serde serde_json rustls ring
# shellcheck disable=SC2086
lacks tls $daemon rusqlite libsqlite3-sys jiff serde serde_json
# shellcheck disable=SC2086
lacks sqlite $daemon redis rustls ring
