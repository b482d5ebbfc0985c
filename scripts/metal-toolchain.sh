#!/usr/bin/env bash
# Prints the path of a rustc that can build for the bare-metal targets:
#   RUSTC=$(scripts/metal-toolchain.sh) cargo build -p slat --target aarch64-unknown-none
#
# Where the toolchain in use has the targets (`rustup target add aarch64-unknown-none x86_64-unknown-none`) that is its
# own rustc. Where it has not and nothing can be added, and the machine is a Debian of x86-64, it is Debian's rustc-web:
# unpacked into a cache and not installed, with core and alloc for the targets built once from rust-web-src and put into
# its sysroot (two minutes, and half a gigabyte).
#
# With --present it prints the path of one that is here already, or fails.
#
# METAL_TOOLCHAIN_DIR: where the cache is, ~/.cache/slat/metal-toolchain otherwise.
set -euo pipefail

targets=(aarch64-unknown-none x86_64-unknown-none)
host=x86_64-unknown-linux-gnu
cache=${METAL_TOOLCHAIN_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/slat/metal-toolchain}

say() { echo "metal-toolchain: $*" >&2; }
die() { say "$*"; exit 1; }
again() {
  local n
  for n in 1 2 3; do
    "$@" >&2 && return
    say "failed, attempt $n of 3: $*"
    sleep $((n * 5))
  done
  return 1
}

sysroot=$(rustc --print sysroot)
has_all_targets() {
  local target
  for target in "${targets[@]}"; do
    compgen -G "$sysroot/lib/rustlib/$target/lib/libcore-*.rlib" >/dev/null || return 1
  done
}
if has_all_targets; then
  echo "$sysroot/bin/rustc"
  exit
fi
for complete in "$cache"/*/complete; do
  if [ -e "$complete" ]; then
    echo "${complete%/complete}/bin/rustc"
    exit
  fi
done

[ "${1-}" != --present ] || die "no ${targets[*]} here"
[ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] ||
  die "no ${targets[*]} here: rustup target add ${targets[*]}"
say "no ${targets[*]} in this toolchain: taking Debian's rustc-web"
again apt-get update -qq || say "going on with the package lists that are here"
version=$(apt-cache policy rustc-web | awk '$1 == "Candidate:" && $2 != "(none)" { print $2 }')
[ -n "$version" ] || die "no rustc-web in these package lists"
upstream=${version%%+*}
std=libstd-rust-web-${upstream%.*}
llvm=$(apt-cache depends "$std=$version" | awk '$1 == "Depends:" && $2 ~ /^libllvm/ { print $2 }')

mkdir -p "$cache"
tmp=$(mktemp -d "$cache/unfinished.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp"/{bin,debs,crate}

# Unpack the compiler, what it links to, and the sources of core and alloc.
cd "$tmp/debs"
again apt-get download -qq -o APT::Sandbox::User=root \
  "$llvm" {rustc-web,libstd-rust-web-dev,rust-web-src,"$std"}="$version" || die "cannot download rustc-web"
for deb in *.deb; do
  case $deb in
    rust-web-src*) only=(--wildcards './usr/src/*/library/*') ;;
    *) only=(--exclude ./usr/share) ;;
  esac
  dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$tmp" "${only[@]}"
done
# The one tool that rustc-web lacks is rust-lld; the toolchain in use has it.
tools=usr/lib/rustlib/$host/bin
mkdir -p "$tmp/$tools"
ln -s "$sysroot/lib/rustlib/$host/bin/rust-lld" "$tmp/$tools/"
cat >"$tmp/bin/rustc" <<'WRAPPER'
#!/bin/sh
root=$(dirname "$(dirname "$(readlink -f "$0")")")
libraries=$root/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
LD_LIBRARY_PATH=$libraries exec "$root/usr/bin/rustc" "$@"
WRAPPER
chmod +x "$tmp/bin/rustc"

# Build core and alloc for the targets, from the sources and their own vendored dependencies.
cd "$tmp/crate"
cat >Cargo.toml <<'MANIFEST'
[package]
name = "nothing"
edition = "2024"
[lib]
path = "nothing.rs"
[profile.release]
panic = "abort"
[workspace]
MANIFEST
echo '#![no_std]' >nothing.rs
library=$tmp/usr/src/rustc-$upstream/library
env -u RUSTFLAGS -u CARGO_ENCODED_RUSTFLAGS -u CARGO_TARGET_DIR -u CARGO_BUILD_TARGET \
  RUSTC="$tmp/bin/rustc" RUSTC_BOOTSTRAP=1 CARGO_HOME="$tmp/cargo" __CARGO_TESTS_ONLY_SRC_ROOT="$library" \
  cargo build -q --release --offline -Zbuild-std=core,alloc "${targets[@]/#/--target=}" --target-dir "$tmp/target" \
  --config 'source.crates-io.replace-with="vendored"' --config "source.vendored.directory=\"$library/vendor\"" >&2
for target in "${targets[@]}"; do
  mkdir -p "$tmp/usr/lib/rustlib/$target/lib"
  cp "$tmp/target/$target/release/deps"/lib{core,alloc,compiler_builtins}-*.rlib "$tmp/usr/lib/rustlib/$target/lib/"
done

cd "$cache"
rm -rf "${tmp:?}"/{target,cargo,crate,debs,usr/src,usr/share,usr/lib/rustlib/src} "${cache:?}/$version"
touch "$tmp/complete"
mv "$tmp" "$cache/$version"
trap - EXIT
echo "$cache/$version/bin/rustc"
