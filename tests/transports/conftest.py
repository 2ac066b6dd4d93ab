"""Logins of the system's ssh lie in a folder of the tests' own, and none outlives them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def logins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("logins")
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    yield
    for socket in (folder / "zerun").glob("*"):
        if not socket.suffix:
            subprocess.run(["ssh", "-F", "none", "-S", str(socket), "-O", "exit", "login"], capture_output=True)
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
