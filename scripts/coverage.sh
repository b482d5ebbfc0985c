#!/usr/bin/env bash
# How much of the crates the tests run: a line a crate, and a failure if fewer than so many of 100 lines are run.
#   scripts/coverage.sh [FLOOR]          runs the tests with counters, then reports
#   scripts/coverage.sh report [FLOOR]   reports on the tests that were run with counters before
#   eval "$(scripts/coverage.sh counters)"   makes `cargo test --workspace` run with counters
#
# Takes llvm-profdata and llvm-cov of the compiler's LLVM: from the toolchain (`rustup component add llvm-tools`), or
# Debian's llvm-N.
set -euo pipefail
cd "$(dirname "$0")/.."

counters() {
  echo "export CARGO_TARGET_DIR='$PWD/target/coverage' LLVM_PROFILE_FILE='$PWD/target/coverage/profiles/%m.profraw'"
  echo "export RUSTFLAGS=-Cinstrument-coverage RUSTDOCFLAGS=-Cinstrument-coverage"
  echo "export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0"
  echo "rm -rf '$PWD/target/coverage/profiles'"
}

tool() {
  local host own
  host=$(rustc -vV | sed -n 's/^host: //p')
  own=$(rustc --print sysroot)/lib/rustlib/$host/bin/$1
  if [ -x "$own" ]; then echo "$own"; else command -v "$1-$version"; fi
}

report() {
  local floor=${1:-0} version profdata cov objects object
  version=$(rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
  profdata=$(tool llvm-profdata) && cov=$(tool llvm-cov) ||
    { echo "coverage: no llvm-profdata and llvm-cov of LLVM $version" >&2; exit 1; }
  eval "$(counters | grep export)"
  local profiles=$CARGO_TARGET_DIR/profiles
  compgen -G "$profiles/*.profraw" >/dev/null ||
    { echo "coverage: no test has run with counters yet: scripts/coverage.sh runs them" >&2; exit 1; }
  objects=("$CARGO_TARGET_DIR/debug/slat")
  while read -r object; do
    objects+=(-object "$object")
  done < <(cargo test --workspace --tests --no-run 2>&1 | sed -n 's/^ *Executable.*(\(.*\))$/\1/p')
  "$profdata" merge -sparse "$profiles"/*.profraw -o "$profiles/all.profdata"
  local ignored='/(registry|rustc|tests|benches)/'
  # Where there is no KVM, nothing that drives it is run.
  [ -w /dev/kvm ] ||
    { ignored+='|/src/kvm/|/on_kvm\.rs$'; echo "coverage: no /dev/kvm, so that what drives it is left out"; }
  "$cov" export -summary-only -instr-profile "$profiles/all.profdata" "${objects[@]}" \
    -ignore-filename-regex "$ignored" -format lcov >"$profiles/lines"
  awk -F: -v here="$PWD/" -v floor="$floor" '
    $1 == "SF" { file = $2; sub(here, "", file); split(file, parts, "/"); crate = parts[2] }
    $1 == "LF" { all[crate] += $2; total += $2 }
    $1 == "LH" { hit[crate] += $2; run += $2 }
    END {
      for (crate in all) printf "coverage: %-11s %5.1f %% of %5d lines\n", crate, 100 * hit[crate] / all[crate], all[crate] | "sort"
      close("sort")
      printf "coverage: %-11s %5.1f %% of %5d lines, floor %s %%\n", "all", 100 * run / total, total, floor
      exit 100 * run / total < floor
    }' "$profiles/lines"
}

case ${1-} in
  counters) counters ;;
  report) report "${2-}" ;;
  *)
    eval "$(counters)"
    cargo test --workspace
    report "${1-}"
    ;;
esac
