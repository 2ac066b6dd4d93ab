"""Files that come and go: by rsync, by SFTP where there is none, and what a cut leaves behind."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.cluster import USERS, Testbed, wait_until

from launcher.contract.errors import NoSpace, Refused, Unreachable, UsageError, ZerunError
from launcher.transports import rsync
from launcher.transports.fabric import FabricTransport
from launcher.transports.local import LocalTransport
from launcher.transports.master import Master
from launcher.transports.openssh import OpenSshTransport
from launcher.transports.protocol import Transport
from launcher.transports.target import SshTarget

NAMES = ("a.log", "deep/er/with blank.txt", "it's.bin", "é.txt", "empty")


def _content(name: str) -> bytes:
    return b"" if name == "empty" else (name.encode() + b"\0\n") * 20_000


def _by_openssh(testbed: Testbed, user: str, *, by_rsync: bool) -> OpenSshTransport:
    transport = OpenSshTransport("login", Master("login", SshTarget("login", config=str(testbed.ssh_config_of(user)))))
    if not by_rsync:
        transport._rsync_works = False
    return transport


def _open(testbed: Testbed, user: str, *, by_rsync: bool, jump: bool = False) -> FabricTransport:
    host = "node02" if jump else "login"
    transport = FabricTransport(host, SshTarget(host, config=str(testbed.ssh_config_of(user, jump=jump))))
    if jump:
        target = SshTarget(host, config=str(testbed.ssh_config), jump="login")
        gateway = FabricTransport("login", SshTarget("login", config=str(testbed.ssh_config)))
        transport = FabricTransport(host, target, gateway=gateway)
    if not by_rsync:
        transport._rsync_works = False
    return transport


BY_OPENSSH = [
    "trainer-rsync-openssh", "nora-sftp-openssh",
    *(pytest.param(f"{user}-rsync-openssh", marks=pytest.mark.full) for user in USERS[1:]),
]  # fmt: skip
BY_FABRIC = [f"{user}-{way}" for user in USERS for way in ("rsync", "sftp")]


@pytest.fixture(params=["here", *BY_FABRIC, "trainer-jump", *BY_OPENSSH])
def transport(request: pytest.FixtureRequest, logins: None) -> Iterator[Transport]:
    if request.param == "here":
        yield LocalTransport()
        return
    user, way, *by = request.param.split("-")
    if by:
        yield _by_openssh(request.getfixturevalue("testbed"), user, by_rsync=way != "sftp")
        return
    opened = _open(request.getfixturevalue("testbed"), user, by_rsync=way != "sftp", jump=way == "jump")
    yield opened
    opened.close()
    if opened._gateway is not None:
        opened._gateway.close()


@pytest.fixture
def folder(transport: Transport) -> Iterator[str]:
    name = transport.run(["mktemp", "-d"]).stdout.decode().strip()
    yield name
    transport.run(["rm", "-rf", name])


def test_there_and_back(transport: Transport, folder: str, tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(_content(name))
    (tmp_path / "out" / "not asked for").write_bytes(b"x")
    total = sum(len(_content(n)) for n in NAMES)
    moved: list[int] = []
    transport.push(NAMES, tmp_path / "out", f"{folder}/new/place", progress=moved.append)
    assert sum(moved) == total
    transport.fetch(NAMES, f"{folder}/new/place", tmp_path / "back", progress=moved.append)
    assert sum(moved) == 2 * total
    assert {n: (tmp_path / "back" / n).read_bytes() for n in NAMES} == {n: _content(n) for n in NAMES}
    assert sorted(p.name for p in (tmp_path / "back").rglob("*") if p.is_file()) == sorted(Path(n).name for n in NAMES)


def test_what_was_rewritten_within_the_second_is_copied(transport: Transport, folder: str, tmp_path: Path) -> None:
    """Sizes and times are equal to the nanosecond; a job's number of two digits takes the room of a ``null``."""
    for at, content in enumerate((b'{"job_id": null}', b'{"job_id": "17"}')):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "launch.json").write_bytes(content)
        os.utime(tmp_path / "out" / "launch.json", ns=(0, 1_700_000_000_250_000_000))
        transport.push(["launch.json"], tmp_path / "out", folder)
        assert transport.run(["cat", f"{folder}/launch.json"]).stdout == content, f"push {at}"
        transport.fetch(["launch.json"], folder, tmp_path / "back")
        assert (tmp_path / "back" / "launch.json").read_bytes() == content, f"fetch {at}"
    assert not [p for p in (tmp_path / "back").iterdir() if p.name != "launch.json"]


def test_names_that_leave_the_folder_are_refused(transport: Transport, folder: str, tmp_path: Path) -> None:
    for bad in ("../x", "/etc/passwd", "a/../../b", ""):
        with pytest.raises(Refused):
            transport.fetch([bad], folder, tmp_path)
        with pytest.raises(Refused):
            transport.push([bad], tmp_path, folder)


def test_a_missing_file_is_an_error(transport: Transport, folder: str, tmp_path: Path) -> None:
    with pytest.raises(ZerunError, match="nothing-here"):
        transport.fetch(["nothing-here"], folder, tmp_path / "in")
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_rsync_really_is_used_where_it_can_be(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    real = rsync.run

    def spy(name: str, *rest: object) -> None:
        real(name, *rest)  # type: ignore[arg-type]
        used.append(name)

    monkeypatch.setattr(rsync, "run", spy)
    (tmp_path / "f").write_bytes(b"f")
    for user, works in (("trainer", True), ("tess", False), ("nora", False)):
        transport = _open(testbed, user, by_rsync=True)
        transport.push(["f"], tmp_path, f"/home/{user}/into")
        assert transport.run(["cat", f"/home/{user}/into/f"]).stdout == b"f"
        assert (used.pop() if used else None) == ("login" if works else None)
        transport.close()


def test_without_rsync_on_the_other_side(testbed: Testbed, tmp_path: Path) -> None:
    testbed.exec("node03", ["mount", "--bind", "/dev/null", "/usr/bin/rsync"], user=None)
    try:
        transport = FabricTransport("node03", SshTarget("node03", config=str(testbed.ssh_config)))
        (tmp_path / "f").write_bytes(b"sftp then")
        transport.push(["f"], tmp_path, "/scratch/into")
        assert testbed.exec("node03", ["cat", "/scratch/into/f"]).stdout == b"sftp then"
        assert transport._rsync_works is False
        transport.close()
    finally:
        testbed.exec("node03", ["umount", "/usr/bin/rsync"], user=None)


@pytest.mark.parametrize("by_rsync", [True, False])
def test_a_cut_leaves_no_part_under_the_final_name_and_a_rerun_goes_on(
    testbed: Testbed, tmp_path: Path, by_rsync: bool
) -> None:
    size = 24 * 2**20
    data = os.urandom(size)
    (testbed.home() / "big").write_bytes(data)
    testbed.shape("node01", "16mbit")  # 13 s for all of it: the cut must come before its end
    transport = FabricTransport("node01", SshTarget("node01", config=str(testbed.ssh_config)))
    transport._rsync_works = by_rsync
    try:
        failure: list[BaseException] = []
        moved: list[int] = []

        def copy() -> None:
            try:
                transport.fetch(["big"], "/home/trainer", tmp_path / "in", progress=moved.append)
            except ZerunError as problem:
                failure.append(problem)

        thread = threading.Thread(target=copy)
        thread.start()
        wait_until(lambda: sum(moved) >= size // 4, 60.0, "nothing comes", every_s=0.05)
        # The sshd processes that serve trainer on node01 die (it is a host of its own); the listener stays.
        testbed.exec("node01", ["sh", "-c", "kill -9 $(pgrep -x -u trainer sshd)"], user=None)
        thread.join(60)
        assert not thread.is_alive() and len(failure) == 1 and isinstance(failure[0], Unreachable), failure
        assert not (tmp_path / "in" / "big").exists()
        testbed.shape("node01", "none")
        again: list[int] = []
        transport.fetch(["big"], "/home/trainer", tmp_path / "in", progress=again.append)
        assert (tmp_path / "in" / "big").read_bytes() == data
        if not by_rsync:  # rsync counts what it matched in the part as well
            assert sum(again) < size - size // 8
    finally:
        testbed.exec("node01", ["sh", "-c", "tc qdisc del dev eth0 root || true"], user=None)
        transport.close()


def test_put_that_is_cut_leaves_nothing(testbed: Testbed) -> None:
    # The connection's end looks like the end of stdin to the command: the size says what is missing.
    from launcher.transports.files import put_argv

    transport = _open(testbed, "trainer", by_rsync=True)
    argv = put_argv("/home/trainer/cut/file", 100, 0o600)
    done = transport.run(argv, stdin=b"only a part")
    transport.close()
    assert done.returncode != 0
    assert testbed.exec("login", ["ls", "-A", "/home/trainer/cut"]).stdout == b""


@pytest.mark.parametrize("by_rsync", [True, False])
def test_no_space_is_told(testbed: Testbed, tmp_path: Path, by_rsync: bool) -> None:
    testbed.exec(
        "node04",
        ["sh", "-c", "mkdir -p /scratch/small && mount -t tmpfs -o size=1m,mode=1777 s /scratch/small"],
        user=None,
    )
    transport = FabricTransport("node04", SshTarget("node04", config=str(testbed.ssh_config)))
    transport._rsync_works = by_rsync
    try:
        (tmp_path / "f").write_bytes(os.urandom(3 * 2**20))
        with pytest.raises(NoSpace):
            transport.push(["f"], tmp_path, "/scratch/small/into")
        with pytest.raises(NoSpace):
            transport.put(os.urandom(3 * 2**20), "/scratch/small/f")
    finally:
        transport.close()
        testbed.exec("node04", ["umount", "-l", "/scratch/small"], user=None)


def test_the_systems_ssh_goes_where_fabric_goes(testbed: Testbed) -> None:
    target = SshTarget("node02", config=str(testbed.ssh_config), jump="login", user="tess")
    shown = subprocess.run(["ssh", *target.batch_options(), "node02", "whoami"], capture_output=True)
    assert shown.stdout.splitlines()[-1] == b"tess"


@pytest.mark.parametrize("by_rsync", [True, False], ids=["rsync", "sftp"])
def test_what_may_not_be_written_or_read_there_is_one_kind_of_error(
    testbed: Testbed, logins: None, tmp_path: Path, by_rsync: bool
) -> None:
    transport = _open(testbed, "trainer", by_rsync=by_rsync)
    (tmp_path / "a").write_bytes(b"x")
    try:
        for work in (
            lambda: transport.put(b"x", "/root/zerun/x"),
            lambda: transport.push(["a"], tmp_path, "/root/zerun"),
            lambda: transport.push(["a"], tmp_path, "/etc"),
            lambda: transport.fetch(["shadow"], "/etc", tmp_path / "o"),
        ):
            with pytest.raises(UsageError, match=r"(?s)^login: .*Permission denied") as told:
                work()
            assert told.value.hint is not None and "paths.runs" in told.value.hint
    finally:
        transport.close()
