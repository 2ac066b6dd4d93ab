"""Ports are bound before they are told; addresses are ones that others can reach."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from agent_job import MakeJob

from launcher.agent import environment, rendezvous
from launcher.contract.errors import UsageError, ZerunError
from launcher.contract.launch import LaunchSpec, Node

SPEC = LaunchSpec("r", 1, "/r", "/z", (Node("localhost", 1),), True, "t", "python", "python")


def test_candidates_are_an_attempts_own_and_not_ephemeral() -> None:
    def first(run: str, attempt: int, allowed: tuple[int, int] | None = None) -> list[int]:
        return list(islice(rendezvous.candidates(run, attempt, allowed, (32768, 60999)), 50))

    assert first("a", 1) == first("a", 1)
    assert len({first(run, k)[0] for run in "abcde" for k in (1, 2)}) == 10
    assert not any(32768 <= port <= 60999 for port in first("a", 1))
    assert sorted(first("a", 1, (20000, 20003))) == [20000, 20001, 20002, 20003]
    assert first("a", 1, (40000, 40000)) == [40000]  # the site allows no other


def test_a_taken_port_is_passed_over() -> None:
    base = next(rendezvous.candidates("x", os.getpid(), None, rendezvous.ephemeral_range()))
    spec = replace(SPEC, ports=(base, base + 5))
    one = rendezvous.open_meeting(spec, "localhost", "")
    two = rendezvous.open_meeting(spec, "localhost", "")
    try:
        ports = {one.announcement.port, one.announcement.control_port}
        assert len(ports | {two.announcement.port, two.announcement.control_port}) == 4
        assert two.ranks.getsockname() == ("127.0.0.1", two.announcement.port)
        with socket.create_connection(("127.0.0.1", two.announcement.port)):
            pass  # it listens before anybody is told
        with pytest.raises(ZerunError, match="no port could be bound") as problem:
            rendezvous.open_meeting(replace(spec, ports=(one.announcement.port, one.announcement.port)), "x", "")
        assert problem.value.hint and "network.ports" in problem.value.hint
    finally:
        for meeting in (one, two):
            meeting.ranks.close()
            meeting.control.close()


def test_own_address() -> None:
    def own(name: str, address: str = "", others: tuple[str, ...] = (), *, alone: bool = False) -> str:
        return rendezvous.own_address(name, address, others, alone=alone)

    assert own("whatever", alone=True) == own("localhost") == own("n1", "localhost") == "127.0.0.1"
    assert own("n1", "10.1.2.3") == "10.1.2.3"
    if any(name != "lo" for name, _ in rendezvous.interfaces()):
        assert not own("no-such-name.invalid").startswith("127.")


def test_the_interface_towards_loopback() -> None:
    assert rendezvous.interface_towards("127.0.0.1") == "lo"
    assert ("lo", "127.0.0.1") in rendezvous.interfaces()


ENGINE = """
import os, socket, sys
if sys.argv[1:2] == ["engine"]:
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.socket(fileno=int(os.environ["ZERUN_LISTEN_FD"])) as listener:
            assert listener.getsockname()[1] == port
            listener.accept()[0].sendall(b"met")
    else:
        assert "ZERUN_LISTEN_FD" not in os.environ
        print(socket.create_connection((os.environ["MASTER_ADDR"], port)).recv(3).decode(), sys.argv[1:])
    os._exit(0) if sys.stdout.flush() is None else None
"""


def test_an_engines_rank_0_inherits_the_listening_socket(job: MakeJob) -> None:
    one = job("unused", nodes=(Node("localhost", 2),))
    main = Path(one.spec.runtime) / "__main__.py"
    main.write_text(ENGINE + main.read_text())
    one.write(program=None)
    assert one.run() == 0, one.log(0) + one.log(1)
    assert one.log(1).decode() == f"met ['engine', '--run-dir', '{one.spec.run_dir}', '--attempt', '1']\n"


def test_a_program_binds_the_port_itself(job: MakeJob) -> None:
    bind = 'import os, socket; socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))'
    one = job(sys.executable, "-W", "ignore", "-c", bind)
    assert one.run() == 0, one.log(0)


def test_the_named_interface_is_where_all_meet() -> None:
    two = replace(SPEC, nodes=(Node("", 1), Node("", 1)), interface="lo")
    meeting = rendezvous.open_meeting(two, "n1", "")
    meeting.ranks.close()
    meeting.control.close()
    assert meeting.announcement.address == "127.0.0.1"
    with pytest.raises(UsageError, match=r"node n1: network.interface is ib7, which is not up here.* lo \(127.0.0.1\)"):
        rendezvous.open_meeting(replace(two, interface="ib7"), "n1", "")
    env = environment.of_rank({}, replace(two, interface="ib7"), environment.Seat(0, 0, "n1", "h", 1, "ib7"))
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("ib7", "=ib7")
    env = environment.of_rank({}, SPEC, environment.Seat(0, 0, "n1", "h", 1, "eth0"))
    assert env["GLOO_SOCKET_IFNAME"] == "eth0" and "NCCL_SOCKET_IFNAME" not in env


def test_a_first_node_that_knows_its_own_name_as_loopback_stays_off_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes ``127.0.1.1 NAME`` into /etc/hosts, where only the node itself reads it."""
    known = socket.getaddrinfo

    def trap(host: str, *rest: object, **more: object) -> object:
        return known("127.0.1.1" if host == "first" else host, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", trap)
    real = [name for name, address in rendezvous.interfaces() if not address.startswith("127.")]
    spec = replace(SPEC, nodes=(Node("first", 1, "first"), Node("192.0.2.7", 1)))
    assert rendezvous.interface_towards("first") == "lo"
    if real:
        assert rendezvous.interface_of(spec, "first") in real
        assert not rendezvous.own_address("first", "", ["192.0.2.7"], alone=False).startswith("127.")
    assert rendezvous.interface_of(replace(spec, nodes=spec.nodes[:1]), "first") == "lo"
