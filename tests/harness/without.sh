#!/bin/sh
# without.sh [NAME...]: takes out one mechanism of soloist at a time, and says after how long the harness misses it.
#
# NAME is a file of tests/harness/without, without `.patch`; all if none is given. The patched programs are built in a
# worktree below target/without. SEED and MINUTES may be set. A mechanism that is not missed is an error.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD work=$PWD/target/without
seed=${SEED-1} minutes=${MINUTES-5}
[ $# -gt 0 ] || set -- $(cd tests/harness/without && ls | sed 's/\.patch$//')

cargo build --locked --bin soloist
mkdir -p "$work"
git worktree add --force --detach "$work/tree" HEAD >/dev/null 2>&1 || git -C "$work/tree" checkout -q --detach "$(git rev-parse HEAD)"
trap 'git worktree remove --force "$work/tree"' EXIT
found=yes
for name; do
    (cd "$work/tree" && git checkout -q . && git apply "$root/tests/harness/without/$name.patch" &&
        cargo build -q --locked --bin soloist --target-dir "$work/target" 2>/dev/null)
    log=$work/$name.out more=
    case $name in absence | epoch) more=--come-and-go ;; esac
    SOLOIST_TEST_BINARY=$work/target/debug/soloist cargo test -q --locked --test harness -- --for "${minutes}m" \
        --seed "$seed" --instances 3 --until-broken $more --out "$work/$name" >"$log" 2>&1 || true
    line=$(grep -m1 BROKEN "$log") || { line='not missed' found=; }
    printf '%-12s %s\n' "$name" "$line"
done
[ -n "$found" ]
