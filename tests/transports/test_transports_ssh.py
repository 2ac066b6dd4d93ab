"""Host keys, logins, jump hosts and lost connections, on a real sshd."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.cluster import Testbed, wait_until

from launcher.contract.errors import Exit, Refused, Unreachable, UsageError
from launcher.transports.fabric import FabricTransport
from launcher.transports.hostkeys import known_keys
from launcher.transports.open import Connector
from launcher.transports.target import SshTarget, hops


class _Cluster:
    """The part of a description that transports read."""

    def __init__(self, **keys: object) -> None:
        from launcher.specs.models import NodeEntry, Ssh

        self.name, self.backend, self.login, self.local = "lab", "direct", None, False
        self.ssh = Ssh(**keys)  # type: ignore[arg-type]
        self.node_list = tuple(NodeEntry(name=f"node{i:02d}", slots=1) for i in range(1, 5))


@pytest.fixture
def config_with(testbed: Testbed, tmp_path: Path) -> Iterator[object]:
    """An ssh configuration whose known_hosts holds the lines given."""

    def make(known: str) -> str:
        file = tmp_path / "known"
        file.write_text(known)
        text = testbed.ssh_config.read_text().replace(str(testbed.state / "known_hosts"), str(file))
        config = tmp_path / "config"
        config.write_text(text)
        return str(config)

    yield make


def test_an_unknown_host_key_is_refused_with_the_command_that_accepts_it(config_with, testbed: Testbed) -> None:  # type: ignore[no-untyped-def]
    transport = FabricTransport("login", SshTarget("login", config=config_with("")))
    with pytest.raises(Refused, match="its host key is unknown") as refused:
        transport.run(["true"])
    transport.close()
    assert refused.value.exit_code == Exit.REFUSED
    assert refused.value.hint is not None
    command = refused.value.hint.partition("accept it: ")[2].split()
    shown = subprocess.run(["ssh-keygen", "-lf", testbed.state / "hostkey.login.pub"], capture_output=True, text=True)
    assert shown.stdout.split()[1] in refused.value.message  # the very fingerprint that ssh would show
    # What a person answers with "yes", said by an option here.
    command[command.index("StrictHostKeyChecking=ask")] = "StrictHostKeyChecking=accept-new"
    assert subprocess.run(command, capture_output=True).returncode == 0
    again = FabricTransport("login", SshTarget("login", config=command[command.index("-F") + 1]))
    assert again.run(["true"]).returncode == 0
    again.close()


@pytest.mark.parametrize("target", ["login", "node[01-02]"])
def test_discover_refuses_unknown_host_keys_of_machines_as_of_a_login_node(  # type: ignore[no-untyped-def]
    config_with, target: str
) -> None:
    from launcher.app import App

    config = Path(config_with(""))
    with pytest.raises(Refused, match="its host key is unknown"):
        App(config.parent).discover_cluster(target, ssh_config=config)


def test_a_changed_host_key_is_refused(config_with, testbed: Testbed) -> None:  # type: ignore[no-untyped-def]
    other = (testbed.state / "hostkey.node01.pub").read_text().split()
    transport = FabricTransport(
        "login", SshTarget("login", config=config_with(f"{testbed.address('login')} {other[0]} {other[1]}\n"))
    )
    with pytest.raises(Refused, match="CHANGED") as refused:
        transport.run(["true"])
    transport.close()
    assert refused.value.hint is not None and "ssh-keygen -f" in refused.value.hint


def test_a_revoked_key_and_a_wrong_login_are_told(config_with, testbed: Testbed) -> None:  # type: ignore[no-untyped-def]
    kind, text = (testbed.state / "hostkey.login.pub").read_text().split()[:2]
    address = testbed.address("login")
    config = config_with(f"{address} {kind} {text}\n@revoked {address} {kind} {text}\n")
    transport = FabricTransport("login", SshTarget("login", config=config))
    with pytest.raises(Refused, match="revoked"):
        transport.run(["true"])
    transport.close()
    stranger = FabricTransport("login", SshTarget("login", user="nobody", config=str(testbed.ssh_config)))
    with pytest.raises(Unreachable, match="login as nobody") as refused:
        stranger.run(["true"])
    stranger.close()
    assert refused.value.hint is not None and "-l nobody" in refused.value.hint


def test_hashed_and_patterned_known_hosts(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    kind, text = (tmp_path / "key.pub").read_text().split()[:2]
    file = tmp_path / "known"
    file.write_text(f"10.9.8.7 {kind} {text}\n[10.9.8.7]:2222 {kind} {text}\n")
    subprocess.run(["ssh-keygen", "-H", "-f", file], capture_output=True, check=True)
    assert "10.9.8.7" not in file.read_text()
    file.write_text(file.read_text() + "*.uni.edu,!bad.uni.edu,[far.edu]:22* ssh-ed25519 CCCC\n# 10.9.8.7 x y\n")
    assert known_keys([file], ["10.9.8.7"]).keys == ((kind, text),)
    assert known_keys([tmp_path / "none", file], ["[10.9.8.7]:2222"]).keys == ((kind, text),)
    assert known_keys([file], ["[10.9.8.7]:22"]).keys == ()
    for name, found in (("a.uni.edu", True), ("bad.uni.edu", False), ("uni.edu", False), ("[far.edu]:2200", True)):
        assert bool(known_keys([file], [name]).keys) is found


def test_a_jump_host_is_logged_into_once_for_all_behind_it(testbed: Testbed) -> None:
    log = testbed.state / "log" / "sshd.login.log"
    connector = Connector(_Cluster(config=str(testbed.ssh_config_of("trainer", jump=True))))  # type: ignore[arg-type]
    before = log.read_text().count("Accepted publickey") if log.exists() else 0
    threads = []
    said: dict[str, bytes] = {}

    def one(node: str) -> None:
        said[node] = connector.transport(node).run(["/bin/sh", "-c", "hostname; echo ${SSH_CONNECTION%% *}"]).stdout

    for node in testbed.nodes:
        threads.append(threading.Thread(target=one, args=(node,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    connector.close()
    assert said == {node: f"{node}\n{testbed.address('login')}\n".encode() for node in testbed.nodes}
    assert log.read_text().count("Accepted publickey") - before == 1


def test_a_jump_host_from_the_description(testbed: Testbed) -> None:
    connector = Connector(_Cluster(config=str(testbed.ssh_config), jump="login"))  # type: ignore[arg-type]
    said = connector.transport("node03").run(["/bin/sh", "-c", "echo ${SSH_CONNECTION%% *}"]).stdout
    connector.close()
    assert said.decode().strip() == testbed.address("login")
    with pytest.raises(UsageError, match="no node 'node09'"):
        connector.transport("node09")


def test_an_address_is_used_where_the_configuration_names_none(testbed: Testbed, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(testbed.ssh_config.read_text().partition("\nHost login\n")[0].replace("node*", "rack-*") + "\n")
    transport = FabricTransport("rack-2", SshTarget("rack-2", config=str(config), address=testbed.address("node02")))
    assert transport.run(["hostname"]).stdout == b"node02\n"
    transport.close()


def test_a_machine_that_does_not_answer(testbed: Testbed) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        closed = FabricTransport("gone", SshTarget("127.0.0.1", port=taken.getsockname()[1], config="/dev/null"))
        with pytest.raises(Unreachable):
            closed.run(["true"])
    unknown = FabricTransport("nowhere", SshTarget("no-such-host.invalid", config="/dev/null"))
    with pytest.raises(Unreachable, match="not known here"):
        unknown.run(["true"])


def test_a_lost_connection_is_made_again(testbed: Testbed) -> None:
    transport = FabricTransport("node04", SshTarget("node04", config=str(testbed.ssh_config)))
    assert transport.run(["hostname"]).returncode == 0
    kill = "kill -9 $(ps -o ppid= -p $(ps -o ppid= -p $PPID))"  # the sshd that serves this connection
    with pytest.raises(Unreachable):
        transport.run(["/bin/sh", "-c", f"{kill}; ps -o ppid= -p $PPID | xargs kill -9; sleep 5"])
    wait_until(lambda: not transport._connection or not transport._connection.is_connected, 20.0, "it is still there")
    assert transport.run(["hostname"]).stdout == b"node04\n"
    transport.close()


def test_unsafe_names_never_reach_ssh() -> None:
    for bad in ("-oProxyCommand=x", "a b", "x;id", "$(id)", "a'b", "x\ny"):
        with pytest.raises(Refused):
            SshTarget(bad)
        with pytest.raises(Refused):
            SshTarget("fine", jump=bad)
    assert [(h.user, h.host, h.port) for h in hops(SshTarget("x"), "a@one:22,ssh://two,[::1]:9")] == [
        ("a", "one", 22), (None, "two", None), (None, "::1", 9),
    ]  # fmt: skip


def test_a_bad_ssh_configuration_is_told(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Hots login\n  User x\n")
    with pytest.raises(UsageError, match="Bad configuration option"):
        FabricTransport("login", SshTarget("login", config=str(config))).run(["true"])
