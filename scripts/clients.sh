#!/bin/sh
# Installs what backend/tests/clients tries: .venv-clients/NAME for each in Python,
# node_modules for those in JavaScript; and Prometheus. Needs .venv. Quick when nothing has changed.
#
# Each Python client has an environment of its own: they disagree on the versions of what they share.
set -eu
cd "$(dirname "$0")/.."
clients=backend/tests/clients

scripts/prometheus.sh

for requirements in "$clients"/*/requirements.txt; do
    folder=${requirements%/*}
    venv=.venv-clients/${folder##*/}
    stamp="$PWD $(.venv/bin/python --version) $(cat "$folder"/*.txt scripts/clients.sh | cksum)"
    [ "$(cat "$venv/.setup" 2>/dev/null || true)" != "$stamp" ] || continue
    echo "clients: installing into $venv"
    .venv/bin/python -m venv --clear --without-pip "$venv"
    .venv/bin/python -m pip --python "$venv/bin/python" install --quiet --no-input \
        --disable-pip-version-check --constraint "$folder/constraints.txt" --requirement "$requirements"
    printf '%s\n' "$stamp" >"$venv/.setup"
done

for manifest in "$clients"/*/package.json; do
    folder=${manifest%/*}
    stamp="$PWD $(node --version 2>/dev/null || true) $(cat "$manifest" "$folder/.npmrc" | cksum)"
    [ "$(cat "$folder/node_modules/.setup" 2>/dev/null || true)" != "$stamp" ] || continue
    if ! command -v npm >/dev/null 2>&1; then
        echo "clients: there is no npm here, which $manifest needs; its tests will be skipped"
        continue
    fi
    echo "clients: installing into $folder/node_modules"
    (cd "$folder" && npm install --silent --no-audit --no-fund)
    printf '%s\n' "$stamp" >"$folder/node_modules/.setup"
done
