#!/bin/sh
# Installs what builds and tries the page: frontend/node_modules, and Chromium where apt can install
# it. Quick when nothing has changed.
set -eu
cd "$(dirname "$0")/.."

if ! command -v npm >/dev/null 2>&1; then
    echo "page: there is no npm here, so the page can't be built; its tests will be skipped"
    exit 0
fi
stamp="$PWD $(node --version) $(cat frontend/package-lock.json frontend/.npmrc | cksum)"
if [ "$(cat frontend/node_modules/.setup 2>/dev/null || true)" != "$stamp" ]; then
    echo "page: installing into frontend/node_modules"
    (cd frontend && npm ci --silent)
    printf '%s\n' "$stamp" >frontend/node_modules/.setup
fi
for browser in chromium chromium-browser google-chrome; do
    ! command -v "$browser" >/dev/null 2>&1 || exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "page: installing Chromium"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
        chromium >/dev/null || echo "page: Chromium could not be installed; its tests will be skipped"
else
    echo "page: there is no Chromium here; the tests that drive it will be skipped"
fi
