#!/usr/bin/env bash
# ruff, mypy, and that what runs on the nodes still parses as Python 3.9.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/vermin --quiet --no-tips --eval-annotations --violations --target=3.9- launcher/contract launcher/agent zerun.py
if command -v shellcheck >/dev/null; then
    shellcheck scripts/*.sh .ci/run
else
    echo 'lint: shellcheck is not installed, shell scripts were not checked' >&2
fi
