#!/usr/bin/env bash
# Installs the headless browser that the report's page is tested in, where apt-get can; elsewhere its test says so.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null && exit 0
root=""
[ "$(id -u)" -eq 0 ] || root="sudo -n"
printf '[%3d s] chromium\n' "$SECONDS"
{
    $root apt-get update &&
        $root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium
} >>.venv/setup.log 2>&1 </dev/null || echo "  not installed; one test needs it: apt-get install chromium"
