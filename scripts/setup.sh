#!/usr/bin/env bash
# Creates .venv with vLLM and LMCache for the CPU and this package, and installs what they need of the system.
# `make` calls it. PYTHON names the interpreter; PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS say where torch's CPU build is.
set -euo pipefail
cd "$(dirname "$0")/.."
log=.venv/setup.log
ready=.venv/ready
pins=requirements/cpu.txt

fail() {
    printf '%s\n' "set-up failed: $1" "${@:2}" >&2
    exit 1
}

# step TITLE HINT COMMAND...: runs the command; if it fails, shows the end of its output and the hint.
step() {
    local title=$1 hint=$2
    shift 2
    printf '[%3d s] %s\n' "$SECONDS" "$title"
    ("$@") >>"$log" 2>&1 </dev/null && return
    tail -n 8 "$log" >&2
    fail "$hint" "The whole output is in $log."
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "vLLM 0.32 needs Python 3.11, 3.12 or 3.13, and '${PYTHON:-PATH}' has none." \
        "Install one (for example: apt-get install python3.11) or name it: PYTHON=/path/to/python make setup"
}

missing_system_packages() {
    local version
    version=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip' 2>/dev/null || echo "$version-venv"
    # vLLM compiles kernels when a server starts: that takes a compiler and Python's headers.
    command -v "${CXX:-g++}" >/dev/null || echo g++
    [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || echo "$version-dev"
    "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || echo libnuma1
}

apt_install() {
    local root=""
    [ "$(id -u)" -eq 0 ] || root="sudo -n"
    # Closes the lock (9): a service that a package starts would hold it for ever.
    $root apt-get update 9<&- &&
        $root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" 9<&-
}

create_environment() {
    { [ -x .venv/bin/python ] || "$python" -m venv .venv; } && .venv/bin/python -m pip install --upgrade pip
}

# --no-deps: the pins are the whole resolution. --no-compile: most bytecode is never used, compiling it takes a minute.
pip_install() { .venv/bin/python -m pip install --progress-bar off --no-deps --no-compile "$@"; }

trap 'fail "interrupted; the next make starts it anew."' INT TERM
exec 9<scripts/setup.sh && flock 9 # of two `make` at once, the second waits
[ -e "$ready" ] || rm -rf .venv    # what an interrupted set-up left
rm -f "$ready"
mkdir -p .venv
: >"$log"

python=$(find_python)
mapfile -t packages < <(missing_system_packages)
if [ ${#packages[@]} -gt 0 ]; then
    step "system packages: ${packages[*]}" "Install these and try again: ${packages[*]}" apt_install "${packages[@]}"
fi
if ! command -v redis-server >/dev/null; then
    printf '[%3d s] redis-server\n' "$SECONDS"
    apt_install redis-server >>"$log" 2>&1 </dev/null ||
        echo "  not installed; the demo does not need it, some tests do: apt-get install redis-server"
fi
step "virtual environment, $("$python" --version)" "Is $python complete, and PyPI reachable?" create_environment

torch=$(grep '^torch==' "$pins")
step "$torch, 190 MB" "$torch not installed. If pip found no such version, tell it where PyTorch's CPU build is:
  export PIP_EXTRA_INDEX_URL=...   PyTorch's index of CPU wheels (vLLM's CPU installation page names it), or
  export PIP_FIND_LINKS=...        a folder that holds the wheel
PyPI has only the CUDA build, which takes several GB and is not used here." pip_install "$torch"
step "vLLM, LMCache and what they need, $(grep -c '^[a-z]' "$pins") packages, 1 to 3 minutes" "Is PyPI reachable?" \
    pip_install --requirement "$pins"
step "efficient-lmcache, editable" "Is pyproject.toml valid?" pip_install --no-build-isolation --editable .
step "check: vLLM, LMCache and transformers import" "The environment is not usable." \
    .venv/bin/python -c 'import efficient_lmcache, lmcache, transformers, vllm'
touch "$ready"
printf '[%3d s] ready: .venv/bin/efficient-lmcache\n' "$SECONDS"
