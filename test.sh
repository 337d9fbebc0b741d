#!/bin/sh
# test.sh [--all | --checks]: install what the tests need, then run all that must pass. Works from any directory.
# --checks: only what reads the code (format, clippy, documentation).
#
# On Debian with Rust, a C compiler and apt it needs nothing else. Servers are installed as programs only: the tests
# start their own, on Unix sockets or free ports, and end them. What one test alone needs and is large is installed with
# --all or in CI (CI=true): PostgreSQL and MariaDB, promtool, Chromium and Node. What cannot be tested here (no root, no writable cgroup v2,
# no databases) is skipped, and listed at the end with the reason; in CI a test that would be skipped fails.
set -eu
cd "$(dirname "$0")"

all='' checks=''
case ${CI-} in '' | 0 | false) ;; *) all=yes ;; esac
case ${1-} in
    '') ;;
    --all) all=yes ;;
    --checks) checks=yes ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "test.sh: unknown option \`$1\`; usage: test.sh [--all | --checks]" >&2; exit 64 ;;
esac

title() { printf '\n== %s\n' "$*"; }
fail() { printf 'test.sh: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }
exists() { [ -e "$1" ]; }

title "what the tests need"
if ! has cargo && [ -x "$HOME/.cargo/bin/cargo" ]; then PATH=$HOME/.cargo/bin:$PATH; fi
has cargo || fail "no cargo: install Rust, see https://rustup.rs"
has cc || fail "no C compiler: apt-get install gcc libc6-dev"
for component in fmt:rustfmt clippy:clippy; do
    if ! cargo "${component%:*}" --version >/dev/null 2>&1; then
        has rustup || fail "no cargo ${component%:*}: install the Rust component ${component#*:}"
        rustup component add "${component#*:}"
    fi
done

work=$(mktemp -d)
page='' reading=''
end() {
    for pid in $page $reading; do kill -- "-$pid" 2>/dev/null || kill "$pid" 2>/dev/null || true; done
    rm -rf "$work"
}
trap end EXIT
trap 'exit 130' INT TERM HUP
: >"$work/summary"
step() { # step NAME COMMAND...: goes on after a failure, so that one run shows all of them
    name=$1
    shift
    title "$name: $*"
    began=$(date +%s)
    if "$@"; then result=ok; else result=FAILED; fi
    printf '%-7s %4ss  %s\n' "$result" "$(($(date +%s) - began))" "$name" >>"$work/summary"
}

finish() {
    title summary
    cat "$work/summary"
    if grep -q FAILED "$work/summary"; then
        # Repeat the reason at the end of the output.
        grep -hE '^(failed|trouble): ' "$work/page" 2>/dev/null | cut -c1-300 || true
        fail "not everything passed"
    fi
    echo "everything passed"
    exit
}

if [ -n "$checks" ]; then
    step format cargo fmt --check
    # First what keeps one processor busy: what comes last may have all of them.
    step features tests/features.sh
    step clippy cargo clippy --locked --all-targets -- -D warnings
    # --examples: of crates with the features that clippy has just checked them with; there are no examples.
    step rustdoc env RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --lib --examples
    # What they do is tried as a test; the programs themselves are for `cargo fuzz` (docs/testing.md).
    step lines python3 tests/lines.py
    step "fuzz/Cargo.lock" cargo tree --locked --manifest-path fuzz/Cargo.toml --edges normal --depth 0
    finish
fi

packages=
has redis-server || packages="$packages redis-server"
has sqlite3 || packages="$packages sqlite3"
has faketime || packages="$packages faketime"
has openssl || packages="$packages openssl"
has ps || packages="$packages procps"
has python3 || packages="$packages python3"
exists /usr/share/zoneinfo/Europe/Berlin || packages="$packages tzdata"
if [ -n "$all" ]; then
    exists "$(echo /usr/lib/postgresql/*/bin/initdb | cut -d' ' -f1)" || has initdb || packages="$packages postgresql"
    has mariadbd || exists /usr/sbin/mariadbd || packages="$packages mariadb-server"
    has promtool || packages="$packages prometheus"
    exists /usr/bin/chromium || packages="$packages chromium"
    has npm || packages="$packages nodejs npm"
fi
installer=
if [ -n "$packages" ]; then
    echo "missing:$packages"
    has apt-get || fail "no apt-get here: install these in this system's way, then start again"
    as_root=
    if [ "$(id -u)" != 0 ]; then
        has sudo || fail "apt-get needs root and there is no sudo; as root: apt-get install --no-install-recommends$packages"
        as_root=sudo
    fi
    install() {
        # RUNLEVEL=1: the packages' own servers are not started.
        # shellcheck disable=SC2086
        $as_root apt-get update -q && $as_root env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
            apt-get install -q -y --no-install-recommends $packages
    }
    if [ -n "$as_root" ]; then
        install # sudo may ask for a password
    else
        # Nothing before the tests needs them.
        installed=$(mktemp)
        install >"$installed" 2>&1 </dev/null &
        installer=$!
        echo "they are installed meanwhile"
    fi
else
    echo "all there"
fi

tests() { # tests SUITE TARGET ARGUMENTS...: those of each list of arguments beside those of the others
    said="$work/$1" target=$2 running='' n=0
    shift 2
    for arguments in "$@"; do
        n=$((n + 1))
        # shellcheck disable=SC2086
        { cargo test --locked $target -- $arguments 2>&1 || touch "$said.failed"; } | tee "$said.$n.said" &
        running="$running $!"
    done
    # shellcheck disable=SC2086
    wait $running
    touch "$said.over"
    ! exists "$said.failed"
}

# What is done beside the integration tests begins once half of them are over.
after_half() { # after_half COMMAND...: in a session of its own
    until exists "$work/integration.over" || half_is_over; do sleep 1; done
    exec setsid "$@"
}
half_is_over() {
    cat "$work"/integration.*.said 2>/dev/null |
        awk '/^running [0-9]+ tests$/ { all += $2 } / \.\.\. ok$/ { ok++ } END { exit !(2 * ok > all) }'
}
# The weight of a session (autogroup) counts before that of its processes. The checks take what nothing else needs.
# shellcheck disable=SC2016
last='echo 19 2>/dev/null >/proc/self/autogroup; exec nice -n 19 "$0" "$@"'

step build cargo test --locked --no-run
if [ -n "$installer" ]; then
    if wait "$installer"; then echo "the packages are installed"; else cat "$installed"; fail "apt-get failed, see above"; fi
    rm -f "$installed"
fi
# The random tests try the same cases each time here, so that a failure is one everywhere; `cargo test` alone tries new ones.
export PROPTEST_RNG_SEED="${PROPTEST_RNG_SEED-20261121}"
export SOLOIST_TEST_SKIPPED="$work/skipped"
: >"$SOLOIST_TEST_SKIPPED"
step unit tests unit --lib ""
step examples cargo test --locked --doc
# It uses the program that the tests use.
after_half timeout 420 sh tests/page/run.sh >"$work/page" 2>&1 &
page=$!
after_half sh -c "$last" ./test.sh --checks >"$work/checks" 2>&1 &
reading=$!
# Most of them wait, for leases and for seconds to pass: more run at one time than there are cores. These wait most, so
# some of them run all the time.
step integration tests integration "--test it" "--test-threads=8 faults:: fleet:: guard::" \
    "--test-threads=11 --skip faults:: --skip fleet:: --skip guard::"
step page wait "$page"
cat "$work/page"
step checks wait "$reading"
cat "$work/checks"
page='' reading=''

if [ -s "$SOLOIST_TEST_SKIPPED" ]; then
    title "skipped, with the reason"
    sort -u "$SOLOIST_TEST_SKIPPED"
fi
finish
