"""Logins through the system's ssh: one master a machine, second factors by hand, servers that shed load."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from testbed.cluster import Testbed, wait_until
from testbed.second_factor import PASSWORD, PORT, at_terminal, second_factor

from launcher.contract.errors import Exit, Refused, Unreachable
from launcher.transports.fabric import FabricTransport
from launcher.transports.master import Master, socket_folder
from launcher.transports.openssh import OpenSshTransport
from launcher.transports.target import SshTarget, resolve

BY_HAND = """
import sys
from launcher.transports.master import Master
from launcher.transports.target import SshTarget
Master("login", SshTarget("login", config=sys.argv[1])).open_by_hand(60)
"""
COMMAND = "zerun login uni"


def _opened(host: str, config: Path, gateway: Master | None = None) -> OpenSshTransport:
    target, settings = resolve(SshTarget(host, config=str(config)))
    return OpenSshTransport(host, Master(host, target, settings=settings, gateway=gateway, login_command=COMMAND))


def test_a_second_factor_and_few_sessions(testbed: Testbed, tmp_path: Path, logins: None, project: Path) -> None:
    with second_factor(testbed, tmp_path, sessions=2) as guard:
        by_fabric = FabricTransport("login", SshTarget("login", config=str(guard.config)), login_command=COMMAND)
        with pytest.raises(Unreachable, match="second factor") as told:
            by_fabric.run(["true"])
        assert told.value.hint is not None and "via: openssh" in told.value.hint and COMMAND in told.value.hint
        knocks = "Connection closed by authenticating user"

        def knocked(times: int) -> None:  # the server tells of each a moment after the client is gone
            wait_until(lambda: guard.log.read_text().count(knocks) == times, 30.0, f"{times} refusals are not told")

        knocked(1)
        transport = _opened("login", guard.config)
        with pytest.raises(Unreachable, match="nobody is asked") as told:
            transport.run(["true"])
        assert told.value.exit_code == Exit.UNREACHABLE and COMMAND in str(told.value.hint)
        knocked(2)
        with pytest.raises(Unreachable, match="nobody is asked"):  # not by knocking again: that locks people out
            transport.run(["true"])
        time.sleep(0.3)
        assert guard.log.read_text().count(knocks) == 2

        def by_hand(password: str) -> int:
            typed = [("password:", password)] + [("password:", "no")] * 2
            argv = [sys.executable, "-c", BY_HAND, str(guard.config)]
            return at_terminal(argv, typed, cwd=project, env={"PYTHONWARNINGS": "ignore"})[0]

        assert by_hand(PASSWORD) == 0
        assert not transport.master.open_by_hand(30)  # it stands already, and asks nobody

        def one(number: int) -> bytes:
            return transport.run(["/bin/sh", "-c", "sleep 0.3; echo $0", str(number)]).stdout

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(one, range(6))) == [b"%d\n" % i for i in range(6)]
        (tmp_path / "f").write_bytes(b"both take a session")
        with transport.stream(["sleep", "60"]), ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(transport.push, ["f"], tmp_path, f"/home/trainer/full-{i}") for i in range(2)]
            assert [job.result() for job in jobs] == [None, None]
        assert guard.log.read_text().count("Accepted password") == 1

        with transport.stream(["/bin/sh", "-c", "echo on; sleep 60"]) as stream:
            chunks = iter(stream)
            assert next(chunks) == b"on\n"
            words = ["ssh", *transport.master.batch_options(), "-O", "check", "login"]
            pid = subprocess.run(words, capture_output=True, text=True).stderr.partition("pid=")[2].partition(")")[0]
            os.kill(int(pid), signal.SIGKILL)
            with pytest.raises(Unreachable, match="connection was lost"):
                list(chunks)
        with pytest.raises(Unreachable) as told:  # a socket that nobody listens at is left behind
            transport.run(["true"])
        assert COMMAND in str(told.value.hint)


def test_status_255_is_the_commands_and_a_jump_host_is_one_login(testbed: Testbed, logins: None) -> None:
    log = testbed.state / "log" / "sshd.login.log"
    target, settings = resolve(SshTarget("login", config=str(testbed.ssh_config)))
    gate = Master("login", target, settings=settings)
    gate.close()  # of the tests before
    before = log.read_text().count("Accepted publickey")
    behind = [_opened(node, testbed.ssh_config_of("trainer", jump=True), gate) for node in testbed.nodes]
    try:
        with ThreadPoolExecutor(4) as pool:
            script = ["/bin/sh", "-c", "hostname; echo ${SSH_CONNECTION%% *}; exit 255"]
            said = list(pool.map(lambda transport: transport.run(script), behind))
        address = testbed.address("login")
        assert [s[:2] for s in said] == [(255, f"{node}\n{address}\n".encode()) for node in testbed.nodes]
        assert log.read_text().count("Accepted publickey") - before == 1
        # A master of a node that is lost is made again through the gate, by key.
        assert behind[0].master.close()
        assert behind[0].run(["hostname"]).stdout == b"node01\n"
    finally:
        for transport in behind:
            transport.master.close()
        assert gate.close() and not gate.alive()


def test_an_unknown_host_key_is_refused_here_too(testbed: Testbed, tmp_path: Path, logins: None) -> None:
    config = tmp_path / "config"
    (tmp_path / "known").write_text("")
    text = testbed.ssh_config.read_text().replace(str(testbed.state / "known_hosts"), str(tmp_path / "known"))
    config.write_text(text)
    with pytest.raises(Refused, match="its host key is unknown") as told:
        _opened("login", config).run(["true"])
    assert "StrictHostKeyChecking=ask" in str(told.value.hint)
    other = (testbed.state / "hostkey.node01.pub").read_text().split()
    (tmp_path / "known").write_text(f"{testbed.address('login')} {other[0]} {other[1]}\n")
    with pytest.raises(Refused, match="CHANGED"):
        _opened("login", config).run(["true"])


def test_logins_that_sshd_sheds_are_tried_again(testbed: Testbed, tmp_path: Path) -> None:
    with second_factor(testbed, tmp_path, methods="publickey", startups="2:100:2") as guard:
        made = [FabricTransport("login", SshTarget("login", config=str(guard.config))) for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            with contextlib.ExitStack() as strangers:  # who say nothing, and are all that this sshd takes at a time
                for _ in range(2):
                    strangers.enter_context(socket.create_connection((testbed.address("login"), PORT))).recv(1)
                done = [pool.submit(transport.run, ["true"]) for transport in made]
                wait_until(lambda: "drop connection" in guard.log.read_text(), 30.0, "nobody was dropped", every_s=0.05)
            assert {job.result().returncode for job in done} == {0}
        for transport in made:
            transport.close()


def test_sockets_lie_in_a_folder_of_the_users_own_and_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Path(tempfile.mkdtemp(prefix="z"))  # pytest's own folder is too deep for a socket
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    folder = socket_folder()
    assert folder == short / "zerun" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setenv("XDG_CACHE_HOME", str(deep))
    monkeypatch.setenv("TMPDIR", str(deep))
    assert len(os.fsencode(Master("h", SshTarget("h", config="/dev/null")).socket)) <= 104 - 18
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    folder.rmdir()
    folder.symlink_to(deep)
    with pytest.raises(Refused, match="not yours"):
        socket_folder()
