#!/bin/sh
# Installs what backend/tests/clients tries: .venv-clients/NAME for each in Python,
# node_modules for those in JavaScript; and Prometheus. Quick when nothing has changed.
#
#   scripts/clients.sh             all, and .venv; the largest where MLX_TEST_ALL=1
#   scripts/clients.sh FOLDER...   those in these folders of backend/tests/clients; needs .venv
#
# Each Python client has an environment of its own: they disagree on the versions of what they share.
set -eu
cd "$(dirname "$0")/.."

install_python() {
    venv=.venv-clients/${folder##*/}
    stamp="$PWD $(.venv/bin/python --version) $(cat "$folder"/*.txt scripts/clients.sh | cksum)"
    [ "$(cat "$venv/.setup" 2>/dev/null || true)" != "$stamp" ] || return 0
    echo "clients: installing into $venv"
    .venv/bin/python -m venv --clear --without-pip "$venv"
    # Python compiles what it imports; to compile all that there is takes longer.
    .venv/bin/python -m pip --python "$venv/bin/python" install --quiet --no-input --no-compile \
        --disable-pip-version-check --constraint "$folder/constraints.txt" \
        --requirement "$folder/requirements.txt"
    printf '%s\n' "$stamp" >"$venv/.setup"
}

install_node() {
    stamp="$PWD $(node --version 2>/dev/null || true) $(cat "$folder/package.json" "$folder/.npmrc" | cksum)"
    [ "$(cat "$folder/node_modules/.setup" 2>/dev/null || true)" != "$stamp" ] || return 0
    if ! command -v npm >/dev/null 2>&1; then
        echo "clients: there is no npm here, which $folder needs; its tests will be skipped"
        return 0
    fi
    echo "clients: installing into $folder/node_modules"
    (cd "$folder" && npm install --silent --no-audit --no-fund)
    printf '%s\n' "$stamp" >"$folder/node_modules/.setup"
}

if [ $# = 0 ]; then
    # To install is one process's work each time, so .venv gets the rest while its pip is at work.
    scripts/setup.sh pip
    scripts/setup.sh &
    setup=$!
    scripts/page.sh &
    page=$!
    status=0
    scripts/prometheus.sh
    # The largest, 3 GB together, are tried only where all tests run.
    left='/(phoenix|lm_eval|litellm|more_agents|aider)/'
    [ "${MLX_TEST_ALL:-}" != 1 ] || left=none
    # Some at once, those with most to install first; one that fails does not stop the others.
    ls -S backend/tests/clients/*/constraints.txt backend/tests/clients/*/package.json |
        grep -Ev "$left" | xargs -n 1 dirname | xargs -n 1 -P 3 scripts/clients.sh || status=$?
    wait $setup || status=$?
    wait $page || status=$?
    exit $status
fi
for folder; do
    if [ -f "$folder/package.json" ]; then install_node; else install_python; fi
done
