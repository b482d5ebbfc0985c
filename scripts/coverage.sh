#!/usr/bin/env bash
# How much of the crates the tests run: prints a line a crate, and fails if fewer than so many of 100 lines are run.
#   scripts/coverage.sh [FLOOR]
#
# Takes llvm-profdata and llvm-cov of the compiler's LLVM: from the toolchain (`rustup component add llvm-tools`), or
# Debian's llvm-N. Tests that run for their count of cases take few of them.
set -euo pipefail
cd "$(dirname "$0")/.."

floor=${1:-0}
version=$(rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
host=$(rustc -vV | sed -n 's/^host: //p')
tool() {
  local own
  own=$(rustc --print sysroot)/lib/rustlib/$host/bin/$1
  if [ -x "$own" ]; then echo "$own"; else command -v "$1-$version"; fi
}
profdata=$(tool llvm-profdata) && cov=$(tool llvm-cov) ||
  { echo "coverage: no llvm-profdata and llvm-cov of LLVM $version" >&2; exit 1; }

export CARGO_TARGET_DIR=$PWD/target/coverage RUSTFLAGS=-Cinstrument-coverage
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_INCREMENTAL=0
profiles=$CARGO_TARGET_DIR/profiles
export LLVM_PROFILE_FILE=$profiles/%m.profraw
rm -rf "$profiles"
export PROPTEST_CASES=${PROPTEST_CASES:-16} SLAT_RANDOM_OPERATIONS=${SLAT_RANDOM_OPERATIONS:-20000}
cargo test --workspace --tests

objects=("$CARGO_TARGET_DIR/debug/slat")
while read -r object; do
  objects+=(-object "$object")
done < <(cargo test --workspace --tests --no-run 2>&1 | sed -n 's/^ *Executable.*(\(.*\))$/\1/p')
"$profdata" merge -sparse "$profiles"/*.profraw -o "$profiles/all.profdata"
"$cov" export -summary-only -instr-profile "$profiles/all.profdata" "${objects[@]}" \
  -ignore-filename-regex '/(registry|rustc|tests|benches)/' -format lcov >"$profiles/lines"
awk -F: -v here="$PWD/" -v floor="$floor" '
  $1 == "SF" { file = $2; sub(here, "", file); split(file, parts, "/"); crate = parts[2] }
  $1 == "LF" { all[crate] += $2; total += $2 }
  $1 == "LH" { hit[crate] += $2; run += $2 }
  END {
    for (crate in all) printf "coverage: %-10s %5.1f %% of %5d lines\n", crate, 100 * hit[crate] / all[crate], all[crate] | "sort"
    close("sort")
    printf "coverage: %-10s %5.1f %% of %5d lines, floor %s %%\n", "all", 100 * run / total, total, floor
    exit 100 * run / total < floor
  }' "$profiles/lines"
