#!/usr/bin/env bash
# Unpacks an aarch64 Python of Debian, with NumPy and ml_dtypes, below a folder, for an emulator; the machine stays as it
# is. Arguments: the folder, the interpreter that runs here (the same minor version is taken).
set -euo pipefail
root=$1 python=$2
version=$("$python" -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$root" "$work"/{state/lists/partial,cache/archives/partial,packages}
: > "$work/state/status"
apt=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$work/state" -o Dir::Cache="$work/cache"
     -o Dir::State::status="$work/state/status" -o APT::Sandbox::User=root)
apt-get "${apt[@]}" update
(cd "$work/packages" && apt-get "${apt[@]}" download "python$version-minimal" "libpython$version-minimal" \
  "libpython$version-stdlib" libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 \
  libcrypt1 libuuid1 libsqlite3-0)
for package in "$work"/packages/*.deb; do dpkg -x "$package" "$root"; done
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$work/wheels" \
  --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --python-version "$version" --implementation cp \
  $("$python" -c 'from importlib.metadata import version as v; print(*(f"{n}=={v(n)}" for n in ("numpy", "ml_dtypes")))')
for wheel in "$work"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$root/site"; done
