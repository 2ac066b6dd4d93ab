#!/usr/bin/env bash
# Lint, types, tests. As root it first installs what the real-cluster tests need; without root those tests are
# skipped by name and counted in the summary. With CI set, a skipped cluster test is a failure (tests/conftest.py).
#   scripts/test.sh [--all] [pytest arguments…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(slurm-wlm slurmdbd mariadb-server munge openssh-server openssh-client tini iproute2 rsync shellcheck tcsh
    python3 python3-venv git procps util-linux podman runc)

installed() { dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }

install_packages() {
    local missing=() package
    for package in "${packages[@]}"; do
        installed "$package" || missing+=("$package")
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    printf 'test: installing %s\n' "${missing[*]}" >&2
    # The testbed starts its own daemons inside namespaces: those of the packages must not start on this machine.
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

marks=(-m 'not full')
if [ "${1:-}" = --all ]; then
    marks=()
    shift
fi

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    install_packages
fi
# The libraries of other people's scripts that tests run under zerun; `make run` needs none of them.
if ! .venv/bin/python -c 'from importlib.metadata import version; list(map(version, ("transformers", "accelerate", "lightning")))' \
    2>/dev/null; then
    printf 'test: installing the extras hf and frameworks\n' >&2
    .venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[hf,frameworks]' >&2
fi
scripts/lint.sh
# Two processes: the real-cluster tests mostly wait. Each process raises a cluster of its own for them.
.venv/bin/python -m pytest -n 2 --dist loadgroup "${marks[@]}" "$@"
