#!/bin/sh
# tests/lua-coverage.sh [FILTER...]: which branches of lua/ the tests on a real Redis take. Not part of test.sh.
#
# A copy of the sources has scripts that tell the server's log what each of their conditions was (tests/coverage.py).
# Prints each condition that was never true, or never false, and a table. FILTER: of tests/it, some instead of those below.
set -eu
cd "$(dirname "$0")/.."

out=$PWD/target/coverage/lua
rm -rf "$out"
mkdir -p "$out/tree" "$out/logs"
git ls-files -z | xargs -0 cp --parents -t "$out/tree"
python3 tests/coverage.py instrument "$out/tree/lua"
[ $# -gt 0 ] || set -- cases::redis conformance::redis model:: locks:: rights:: unreadable:: newfleet:: record::
(
    cd "$out/tree"
    export SOLOIST_TEST_REDIS_LOGS="$out/logs"
    cargo test --locked --test it --target-dir "$out-target" -- "$@"
) || echo "tests/lua-coverage.sh: a test failed; the figures are those of the tests that ran" >&2
find "$out/logs" -type f -exec cat {} + | python3 tests/coverage.py lua lua /dev/stdin
