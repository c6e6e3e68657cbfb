#!/bin/bash
# Everything the benchmarks need beyond penstock itself: Debian packages (only if missing, only as root) and one venv for each peer, whose pins conflict.
#   bench/setup.sh [python]      idempotent; a venv is rebuilt only when its requirements file changed
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${1:-${PYTHON:-python3}}
PACKAGES="nginx libnginx-mod-http-lua lua-resty-core wrk gcc libc6-dev openssl rclone fuse3 s3fs"

missing=$(for package in $PACKAGES; do dpkg -s "$package" 2>/dev/null | grep -q '^Status: install ok' || echo "$package"; done)
if [ -n "$missing" ]; then
  if [ "$(id -u)" != 0 ]; then echo "missing Debian packages: run as root: apt-get install --no-install-recommends" $missing >&2; exit 1; fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q
  printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d.bench && chmod +x /usr/sbin/policy-rc.d.bench   # keeps the package from starting its own nginx
  [ -e /usr/sbin/policy-rc.d ] || ln -s policy-rc.d.bench /usr/sbin/policy-rc.d
  apt-get install -q -y --no-install-recommends $missing
  [ "$(readlink /usr/sbin/policy-rc.d)" = policy-rc.d.bench ] && rm /usr/sbin/policy-rc.d
  rm -f /usr/sbin/policy-rc.d.bench
fi

for requirements in peers/*.txt; do
  name=$(basename "$requirements" .txt) venv=.venvs/$(basename "$requirements" .txt)
  cmp -s "$requirements" "$venv/installed.txt" && continue
  echo "bench: installing peer $name"
  rm -rf "$venv"
  "$PYTHON" -m venv "$venv"
  "$venv/bin/pip" install -q --disable-pip-version-check -r "$requirements"
  unwanted=$(sed -n 's/^# without //p' "$requirements")
  [ -z "$unwanted" ] || "$venv/bin/pip" uninstall -q -y $unwanted
  cp "$requirements" "$venv/installed.txt"
done
