#!/usr/bin/env bash
# Prints the directory in which a Linux guest for Arm lies, which `slat boot --backend metal` boots:
#   Image    Debian's kernel for arm64
#   initrd   busybox, its shell as init, and memory-check (guest-linux/memory-check.rs)
#   version  which packages they are from
#
# Fetched from Debian's archive by apt, from package lists of its own: nothing is installed, and the architecture arm64
# stays unknown to the system. What is kept is 35 MB.
#
# GUEST_LINUX_DIR: where the cache is, ~/.cache/slat/guest-linux otherwise.
# GUEST_LINUX_SUITE: which release of Debian, the machine's own otherwise.
set -euo pipefail

here=$(dirname "$(readlink -f "$0")")
cache=${GUEST_LINUX_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/slat/guest-linux}

say() { echo "guest-linux: $*" >&2; }
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

# What is there is of this script and this program, or it is made anew.
made_by=$(cat "$here/guest-linux.sh" "$here/guest-linux/memory-check.rs" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$cache/made-by" 2>/dev/null)" = "$made_by" ]; then
  echo "$cache"
  exit
fi

command -v apt-get >/dev/null || die "needs apt-get, to fetch a kernel from Debian's archive"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keyring ] || die "needs $keyring: apt-get install debian-archive-keyring"
suite=${GUEST_LINUX_SUITE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-stable}")}

mkdir -p "$(dirname "$cache")"
tmp=$(mktemp -d "$cache.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp"/{apt/lists/partial,apt/cache/archives/partial,debs,root,made}

# An apt that knows arm64 and nothing else.
cat >"$tmp/apt/conf" <<CONF
Dir::State::lists "$tmp/apt/lists";
Dir::State::status "$tmp/apt/status";
Dir::Cache "$tmp/apt/cache";
Dir::Etc::sourcelist "$tmp/apt/sources.list";
Dir::Etc::sourceparts "-";
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
CONF
touch "$tmp/apt/status"
echo "deb [signed-by=$keyring] http://deb.debian.org/debian $suite main" >"$tmp/apt/sources.list"
export APT_CONFIG=$tmp/apt/conf
say "fetching Debian's kernel for arm64 ($suite)"
again apt-get update -qq || die "cannot fetch package lists"
kernel=$(apt-cache depends linux-image-arm64 | awk '$1 == "Depends:" { print $2; exit }')
[ -n "$kernel" ] || die "no kernel for arm64 in $suite"
cd "$tmp/debs"
again apt-get download -qq "$kernel" busybox-static || die "cannot download $kernel and busybox-static"
unset APT_CONFIG

cd "$tmp"
dpkg-deb --fsys-tarfile debs/linux-image-*.deb | tar -x -C root --wildcards './boot/vmlinuz-*'
dpkg-deb --fsys-tarfile debs/busybox-static*.deb | tar -x -C root ./bin/busybox
for deb in debs/*.deb; do
  dpkg-deb --show --showformat='${Package} ${Version}\n' "$deb"
done >made/version

# An Image says what it is at byte 56. Kernels were packed once, and may be again.
image=$(echo root/boot/vmlinuz-*)
gzip -dc <"$image" >made/Image 2>/dev/null || cp "$image" made/Image
[ "$(head -c 60 made/Image | tail -c 4)" = ARMd ] || die "$kernel has no Image in a form that is known here"

RUSTC=$("$here/metal-toolchain.sh")
mkdir -p root/{dev,proc,sys,tmp}
"$RUSTC" --edition 2024 --target aarch64-unknown-none -Copt-level=2 -Cpanic=abort -Cstrip=symbols \
  -o root/bin/memory-check "$here/guest-linux/memory-check.rs"
cat >root/init <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
echo "guest: init"
export PATH=/bin PS1='guest#\n'
exec sh
INIT
chmod 755 root/init

# initrd: an archive in cpio's format newc, of a header, a name and a content for each, all of them in fours of bytes.
entry() {
  local name=$1 file=$2 mode=$3 size=0
  [ -z "$file" ] || size=$(stat -Lc %s "$file")
  printf '070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\0' \
    $((++inode)) $((8#$mode)) 0 0 1 0 "$size" 0 0 0 0 $((${#name} + 1)) 0 "$name"
  pad $((110 + ${#name} + 1))
  [ -z "$file" ] || cat "$file"
  pad "$size"
}
pad() { head -c $((-$1 & 3)) /dev/zero; }
inode=0
{
  for directory in bin dev proc sys tmp; do
    entry $directory '' 040755
  done
  for program in init bin/busybox bin/memory-check; do
    entry $program root/$program 100755
  done
  entry 'TRAILER!!!' '' 0
} >made/initrd

echo "$made_by" >made/made-by
rm -rf "$cache"
mv -T made "$cache"
echo "$cache"
