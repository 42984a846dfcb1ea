#!/usr/bin/env bash
# What only tests need, where apt-get can give it: a headless browser for the report's page, and Prometheus' own tools
# for the alerts, unpacked beside the environment so that no service starts. Elsewhere the tests say what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.venv/tools
root=""
[ "$(id -u)" -eq 0 ] || root="sudo -n"

have() { command -v "$1" >/dev/null || [ -x "$tools/usr/bin/$1" ]; }

quietly() {
    printf '[%3d s] %s\n' "$SECONDS" "$1"
    "${@:2}" >>.venv/setup.log 2>&1 </dev/null || echo "  not installed; some tests need it: apt-get install $1"
}

install_chromium() {
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium
}

unpack_prometheus() {
    mkdir -p "$tools" && (cd "$tools" && apt-get download prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb)
}

have chromium && have promtool && exit
$root apt-get update >>.venv/setup.log 2>&1 </dev/null || true
have chromium || quietly chromium install_chromium
have promtool || quietly prometheus unpack_prometheus
