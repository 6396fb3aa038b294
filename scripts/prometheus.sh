#!/bin/sh
# Gets Prometheus and its promtool for the tests of the dashboard and the alerts, unless the machine
# has them: Debian's package (20 MB), unpacked into .venv-clients/prometheus and not installed.
set -eu
cd "$(dirname "$0")/.."
folder=.venv-clients/prometheus

if command -v prometheus >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1; then
    exit 0
fi
[ ! -x $folder/usr/bin/promtool ] || exit 0
rm -rf $folder
mkdir -p $folder
echo "clients: unpacking Prometheus into $folder"
if ! (cd $folder && apt-get download --quiet=2 prometheus && dpkg-deb --extract prometheus_*.deb .) 2>$folder/log.txt; then
    echo "clients: there is no Prometheus here, and apt-get does not have it; its tests will be skipped"
    exit 0
fi
rm -f $folder/prometheus_*.deb
