#!/usr/bin/env bash
# Makes .venv: the locked versions of everything, and this checkout installed editable (`make setup`).
# An existing .venv is brought up to date in place.
#
# PYTHON=/path/to/python overrides the choice of interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

supported='import sys; raise SystemExit(sys.version_info < (3, 11))'

# A name on PATH isn't enough (version managers leave shims that only print an error): each is run.
choose_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if "$candidate" -c "$supported" >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    echo "Covey needs Python 3.11 or newer; tried: ${PYTHON:-python3.13 python3.12 python3.11 python3}." >&2
    echo "On Debian 12 or Ubuntu 24.04: sudo apt-get install -y python3 python3-venv" >&2
    echo "Elsewhere: install it and run: make setup PYTHON=/path/to/python3" >&2
    return 1
}

# Debian keeps ensurepip in a package of its own, without which venv makes an environment without pip.
make_venv() {
    local python=$1
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        local version
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        tools/apt_install.sh "python$version-venv"
    fi
    rm -rf .venv
    "$python" -m venv .venv
}

if ! .venv/bin/python -c "$supported; import pip" >/dev/null 2>&1; then
    python=$(choose_python)
    echo "creating .venv with $python ($("$python" -V))"
    make_venv "$python"
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check)

# uv installs the lock in a seventh of pip's time. It doesn't read pip's settings, so where the registry is
# reached only through those, pip does the work.
install_lock() {
    local bootstrap
    bootstrap=$(mktemp)
    awk '/^uv==/ {on = 1} on {print} on && !/\\$/ {exit}' requirements.lock >"$bootstrap"
    if "${pip[@]}" install --quiet --require-hashes --no-deps -r "$bootstrap" &&
        .venv/bin/uv pip install --quiet --system-certs --python .venv/bin/python --require-hashes --no-deps -r requirements.lock; then
        rm -f "$bootstrap"
        return
    fi
    rm -f "$bootstrap"
    echo "uv couldn't install the lock: trying with pip"
    "${pip[@]}" install --quiet --no-compile --require-hashes --no-deps -r requirements.lock
}

install_lock
"${pip[@]}" install --quiet --no-deps --no-build-isolation -e .
"${pip[@]}" check >/dev/null || { "${pip[@]}" check >&2; exit 1; }
touch .venv/.ready
echo "ready: .venv ($(.venv/bin/python -V))"
