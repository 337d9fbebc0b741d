#!/bin/sh
# Runs click.mjs against the daemon at URL, with its modules outside the clone: sh tests/page/run.sh URL
set -eu
here=$(cd "$(dirname "$0")" && pwd)
modules=${SOLOIST_PAGE_MODULES:-${TMPDIR:-/tmp}/soloist-page-test}
mkdir -p "$modules"
cp "$here"/package.json "$here"/package-lock.json "$here"/*.mjs "$modules"/
cd "$modules"
[ -d node_modules/axe-core ] && [ -d node_modules/puppeteer-core ] || npm ci --no-audit --no-fund --silent
exec node click.mjs "$@"
