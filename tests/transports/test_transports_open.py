"""Transports are made side by side: OpenSSH is asked about many machines at once, about each only once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher import specs
from launcher.contract.errors import UsageError
from launcher.transports.open import Connector

CLUSTER = """\
name: lab
backend: direct
nodes: {{names: "node[01-04]", slots: 1}}
ssh: {{config: {config}}}
paths: {{runs: /scratch/runs}}
"""


def connector(folder: Path, config: str) -> Connector:
    (folder / "config").write_text(config)
    (folder / "lab.yaml").write_text(CLUSTER.format(config=folder / "config"))
    return Connector(specs.load_cluster(folder / "lab.yaml"))


def test_ssh_is_asked_about_several_nodes_at_once(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    # Each answer waits until another one is under way too: one after the other they would never meet.
    met = f"set -- {seen}/came.*; [ $# -ge 2 ] && touch {seen}/met.%n && exit 0"
    wait = f"for i in $(seq 100); do {met}; sleep 0.1; done"
    opened = connector(tmp_path, f'Match exec "touch {seen}/came.%n; {wait}; exit 1"\n  User somebody\n')
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(opened.transport, ["node01", "node02"]))
    assert {path.name for path in seen.glob("met.*")} == {"met.node01", "met.node02"}


def test_of_one_node_there_is_one_transport_and_of_a_jump_host_too(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    opened = connector(
        tmp_path, f'Match exec "echo %n >> {asked}; true"\n  User somebody\nHost node*\n  ProxyJump gate\n'
    )
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(opened.transport, ["node01", "node02"] * 4))
    assert len({id(transport) for transport in made}) == 2
    assert sorted(asked.read_text().split()) == ["gate", "node01", "node02"]


def test_logins_by_the_systems_ssh_list_their_jump_hosts_first_and_once(tmp_path: Path) -> None:
    config = "Host node*\n  ProxyJump inner\nHost inner\n  ProxyJump outer\n"
    (tmp_path / "config").write_text(config)
    text = CLUSTER.format(config=f"{tmp_path / 'config'}, via: openssh")
    (tmp_path / "lab.yaml").write_text(text)
    masters = Connector(specs.load_cluster(tmp_path / "lab.yaml")).masters()
    assert [master.name for master in masters] == ["outer", "inner", *(f"node0{i}" for i in range(1, 5))]
    inner, node = masters[1], masters[2]
    assert node._gateway is inner and inner._gateway is masters[0] and masters[0]._gateway is None
    with pytest.raises(UsageError, match="keeps no login open"):
        connector(tmp_path, config).masters()
