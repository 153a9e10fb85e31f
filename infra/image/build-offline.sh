#!/usr/bin/env bash
# Build the image without a container registry, engine or daemon: a Debian base by debootstrap, then the Dockerfile by
# buildah, which needs root for its chroot. Packages still come from Debian's index and from where the PIP_* variables
# point, PyPI if nowhere; torch from TORCH_INDEX if that is set. Python is copied from this machine's python3.11 (PYTHON
# names another one): Debian's own is too old for idletrain. Usage:
#
#     idletrain infra image --to image
#     sudo bash image/build-offline.sh [ARCHIVE.tar]      # keeps the image as an OCI archive, if a file is named
#
# Storage, base and containers are in a temporary directory, which takes about 6 GB and goes at the end.
set -euo pipefail

readonly SUITE=bookworm
readonly BASE=localhost/debian-python IMAGE=localhost/idletrain
archive=${1:+$(realpath "$1")}
cd "$(dirname "$0")"

compgen -G "idletrain-*.whl" >/dev/null ||
    { echo "there is no wheel beside this script; run the one that \`idletrain infra image --to image\` writes" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "buildah's chroot isolation needs root; run this with sudo" >&2; exit 1; }

python=${PYTHON:-python3.11}
prefix=$("$python" -c 'import sys; print(sys.base_prefix if sys.version_info[:2] == (3, 11) and sys.version_info >= (3, 11, 4) else "")')
[ -n "$prefix" ] || { echo "$python is no Python 3.11.4 or newer of 3.11; name one by PYTHON=" >&2; exit 1; }

missing=()
for tool in buildah debootstrap; do
    command -v "$tool" >/dev/null || missing+=("$tool")
done
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || { echo "install ${missing[*]} first" >&2; exit 1; }
    echo "== installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/idletrain-image.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT # debootstrap mounts the machine's /proc while it works
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
store() { buildah --root "$work/storage" --runroot "$work/run" "$@"; }

echo "== base: Debian $SUITE with Python"
packages=ca-certificates,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libsqlite3-0,libssl3,libuuid1,zlib1g
debootstrap --variant=minbase --include=$packages "$SUITE" "$work/base" >"$work/log" ||
    { tail "$work/log" >&2; exit 1; }
rm -rf "$work"/base/var/cache/apt/* "$work"/base/var/lib/apt/lists/* "$work"/base/usr/share/{doc,locale,man}/*
tar -C "$prefix" --exclude=__pycache__ --exclude='*.a' --exclude=lib/python3.11/site-packages --exclude=lib/python3.11/test \
    -cf - bin/python3.11 lib/python3.11 $(cd "$prefix" && ls -d lib/libpython3.11.so* 2>/dev/null) | tar -C "$work/base/usr/local" -xf -
ln -s python3.11 "$work/base/usr/local/bin/python3"
chroot "$work/base" sh -c 'ldconfig && python3 -c "import bz2, ctypes, lzma, sqlite3, ssl, venv, zlib"'
tar -C "$work/base" --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' -cf "$work/base.tar" .
rm -rf --one-file-system "$work/base"
container=$(store from scratch)
store add --quiet "$container" "$work/base.tar" / >/dev/null
store commit --quiet --rm "$container" "$BASE" >/dev/null
rm "$work/base.tar"

# What pip is told here, it is told there; the files and directories that it is told of are there, too.
options=(--volume "$work/pip.conf:/etc/pip.conf:ro")
echo "[global]" >"$work/pip.conf"
for name in "${!PIP_@}"; do
    key=${name#PIP_} value=${!name}
    key=${key,,}
    echo "${key//_/-} = $value" >>"$work/pip.conf"
    [[ $value != /* || ! -e $value ]] || options+=(--volume "$(realpath "$value"):$value:ro")
done

echo "== image"
options+=(--build-arg "BASE=$BASE" --build-arg "TORCH_INDEX=${TORCH_INDEX-}")
store build --pull-never --tag "$IMAGE" "${options[@]}" .

echo "== what came out"
container=$(store from --pull-never "$IMAGE")
in_image() { store run "$container" -- "$@"; }
in_image idletrain --help
in_image python -c 'import idletrain.rounds.coordinator, sklearn.datasets, torch; print("torch", torch.__version__)'
[ "$(in_image id -u)" != 0 ] || { echo "the image runs as root" >&2; exit 1; }
in_image sh -c '! { command -v cc || command -v gcc || command -v make; }' ||
    { echo "the image holds a compiler" >&2; exit 1; }
store images "$IMAGE"
[ -z "$archive" ] || store push --quiet "$IMAGE" "oci-archive:$archive:idletrain"
