"""Networks that are not as they should be, for the length of a with-block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .cluster import Testbed


@contextmanager
def cut_between(testbed: Testbed, one: str, other: str) -> Iterator[None]:
    """``one`` sends nothing to ``other`` any more; everybody else reaches both."""
    address = f"{testbed.address(other)}/32"
    testbed.exec(one, ["ip", "route", "add", "blackhole", address], user=None)
    try:
        yield
    finally:
        testbed.exec(one, ["ip", "route", "del", "blackhole", address], user=None)


@contextmanager
def knows_itself_as_loopback(testbed: Testbed, node: str) -> Iterator[None]:
    """As Debian sets a machine up: its own name stands in /etc/hosts as 127.0.1.1, for itself alone."""
    lines = [line for line in (testbed.state / "hosts").read_text().splitlines() if line.split()[1] != node]
    own = testbed.state / f"hosts.{node}"
    own.write_text("\n".join([*lines, f"127.0.1.1 {node}"]) + "\n")
    testbed.exec(node, ["mount", "--bind", str(own), "/etc/hosts"], user=None)
    try:
        assert b"127.0.1.1" in testbed.exec(node, ["getent", "ahosts", node]).stdout
        yield
    finally:
        testbed.exec(node, ["umount", "/etc/hosts"], user=None)
