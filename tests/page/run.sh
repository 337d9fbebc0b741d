#!/bin/sh
# Runs click.mjs, with its modules in the target folder: sh tests/page/run.sh [URL]. Without URL against a fleet of its own,
# of the program that `cargo test` built, or $SOLOIST; this is part of test.sh. sh tests/page/run.sh speed URL measures
# (speed.mjs) for `cargo bench`; SHOTS=FOLDER sh tests/page/run.sh pictures makes the pictures of docs/pictures.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

skip() {
    case ${CI-} in '' | 0 | false) ;; *) echo "tests/page/run.sh: must not be skipped in CI: $*" >&2; exit 1 ;; esac
    echo "skipped: $*"
    [ -z "${SOLOIST_TEST_SKIPPED-}" ] || echo "the page in a browser: $*" >>"$SOLOIST_TEST_SKIPPED"
    exit 0
}
CHROMIUM=${CHROMIUM:-/usr/bin/chromium}
export CHROMIUM
for program in "$CHROMIUM" node npm redis-server; do
    command -v "$program" >/dev/null 2>&1 || skip "$program is not installed (./test.sh --all does that)"
done
script=click.mjs
[ "${1-}" != speed ] || script=speed.mjs
case ${1-} in '' | speed | pictures)
    target=${CARGO_TARGET_DIR:-$here/../../target}
    SOLOIST=$(realpath "${SOLOIST:-$target/debug/soloist}")
    export SOLOIST
    [ -x "$SOLOIST" ] || { echo "tests/page/run.sh: no $SOLOIST: run cargo test first" >&2; exit 1; }
    ;;
esac
modules=${SOLOIST_PAGE_MODULES:-${CARGO_TARGET_DIR:-$here/../../target}/page-test}
mkdir -p "$modules"
cd "$modules"
if ! cmp -s "$here/package-lock.json" installed; then
    cp "$here/package.json" "$here/package-lock.json" .
    timeout 300 npm ci --no-audit --no-fund --silent
    cp package-lock.json installed
fi
cp "$here"/*.toml "$here"/*.mjs .
case ${1-} in '') node "$here/timeline.mjs" ${PAGE_FILES:+"$PAGE_FILES"} ;; esac
exec node $script "$@"
