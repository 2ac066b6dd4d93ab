#!/usr/bin/env bash
# Makes .venv and installs zerun into it with the versions of constraints.txt. Cheap when nothing changed.
#   PYTHON=python3.12 scripts/setup.sh    chooses the Python of a new .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
stamp=$venv/.installed

say() { printf 'setup: %s\n' "$*" >&2; }
give_up() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 2; }

# 3.11 or newer, and not newer than the newest that the pinned torch has wheels for. The program is really
# started: what a version manager puts into PATH may be a name with nothing behind it.
suitable() { "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if suitable "$name"; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
    say "installing $* (Debian packages)"
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

# What tests of `setup:` load: `module`, as sites have it.
if [ ! -r /etc/profile.d/modules.sh ] && can_install; then apt_install environment-modules; fi

fingerprint() {
    { cat pyproject.toml constraints.txt; pwd; "$venv/bin/python" -c 'import sys; print(sys.version)'; } | sha256sum
}

if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(fingerprint)" = "$(cat "$stamp")" ]; then
    exit 0
fi

if ! suitable "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! python=$(find_python); then
        can_install || give_up "no Python from 3.11 to 3.14 was found" \
            "install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv), or name it: PYTHON=/path/to/python3.12 make setup"
        apt_install python3 python3-venv
        python=$(find_python) || give_up "this system's python3 is older than 3.11" "name a newer one: PYTHON=/path/to/python3.12 make setup"
    fi
    # Debian splits the standard library: without python3-venv there is no ensurepip.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        package=$("$python" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")')
        can_install || give_up "$python cannot make virtual environments" "sudo apt-get install $package"
        apt_install "$package"
    fi
    say "making $venv with $python"
    "$python" -m venv --clear "$venv"
fi

say "installing zerun, its engine and its test tools into $venv (torch is large: minutes the first time)"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[engine,dev]' >&2
fingerprint >"$stamp"
say "done: $venv/bin/zerun --help"
