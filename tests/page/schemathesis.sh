#!/bin/sh
# schemathesis.sh [OPTIONS of schemathesis]: asks an instance of its own all that its OpenAPI document allows, and what it
# does not, with a token that may operate, and looks at each answer: no server error, nothing that the document does not
# describe. Not part of test.sh: schemathesis (PyPI) is installed into a temporary folder first. $SOLOIST names the program.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
soloist=$(realpath "${SOLOIST:-${CARGO_TARGET_DIR:-$here/../../target}/debug/soloist}")
venv=${SOLOIST_SCHEMATHESIS:-${TMPDIR:-/tmp}/soloist-schemathesis}
if ! [ -x "$venv/bin/schemathesis" ]; then
    python3 -m venv "$venv"
    timeout 300 "$venv/bin/pip" install --quiet 'schemathesis>=4,<5'
fi
dir=$(mktemp -d)
cd "$dir"
"$soloist" http token test operate >new 2>/dev/null
tail -1 new >tokens
sed 's/127.0.0.1:7878/127.0.0.1:0/' "$here/jobs.toml" >jobs.toml
"$soloist" run >log 2>&1 &
pid=$!
trap 'kill $pid 2>/dev/null; sleep 1; kill -9 $pid 2>/dev/null; wait; rm -rf "$dir" 2>/dev/null || { sleep 5; rm -rf "$dir"; }' EXIT
trap 'exit 1' INT TERM HUP
until url=$(sed -n 's/.*serving HTTP at \(http:[^ ]*\).*/\1/p' log) && [ -n "$url" ]; do
    kill -0 $pid || { cat log >&2; exit 1; }
    sleep 0.1
done
"$soloist" trigger quick --wait >/dev/null
failed=
# Which time zones there are, which instants are to come, which of two is earlier, and which cursors were given out for a
# list, the document cannot say. In sequences of requests schemathesis asks for the run `None`, where the answer before has
# no run's id.
cat >schemathesis.toml <<'END'
[phases.stateful.checks.positive_data_acceptance]
enabled = false
[[operations]]
include-operation-id = ["load", "pause", "runs", "runs_of_job"]
checks.positive_data_acceptance.enabled = false
END
timeout 900 "$venv/bin/schemathesis" run "$url/api/v1/openapi.json" -H "Authorization: Bearer $(head -1 new)" \
    --request-timeout 60 --no-color "$@" || failed=yes
if ! kill -0 $pid || grep -q panicked log; then
    echo "the instance did not survive it:" >&2
    tail -20 log >&2
    failed=yes
fi
[ -z "$failed" ]
