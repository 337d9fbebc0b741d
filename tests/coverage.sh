#!/bin/sh
# tests/coverage.sh [FILTER...]: which lines and branches of src/logic the unit tests run (the simulation and the tests
# beside the rules). Prints what was not taken, and a table. Not part of test.sh.
#
# It needs the llvm-profdata and llvm-cov of rustc's own LLVM (`rustc -vV` says which): in Debian the package llvm-NN.
set -eu
cd "$(dirname "$0")/.."

version=$(rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
for tool in llvm-profdata llvm-cov; do
    command -v "$tool-$version" >/dev/null || {
        echo "tests/coverage.sh: no $tool-$version: apt-get install llvm-$version" >&2
        exit 1
    }
done

out=target/coverage
rm -rf "$out/raw"
mkdir -p "$out/raw"
# Only soloist itself is instrumented. Branches are not stable yet.
printf '#!/bin/sh\nexec "$@" -C instrument-coverage -Z coverage-options=branch\n' >"$out/rustc"
chmod +x "$out/rustc"
export RUSTC_BOOTSTRAP=1 RUSTC_WORKSPACE_WRAPPER="$PWD/$out/rustc" LLVM_PROFILE_FILE="$PWD/$out/raw/%8m.profraw"
cargo test --locked --lib --no-run --target-dir "$out/target"
test=$(cargo test --locked --lib --no-run --target-dir "$out/target" --message-format json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
"$test" "$@" || echo "tests/coverage.sh: a test failed; the figures are those of the tests that ran" >&2
"llvm-profdata-$version" merge -sparse -o "$out/all" "$out"/raw/*.profraw
export_() { # export_ OPTION...
    "llvm-cov-$version" export -instr-profile "$out/all" "$test" "$@" src/logic
}
export_ >"$out/all.json"
export_ -format=lcov >"$out/all.lcov"
python3 tests/coverage.py rust "$out/all.json" "$out/all.lcov"
