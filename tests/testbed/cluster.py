"""Stands the real cluster up for tests (tests/testbed/testbed) and talks to it. See tests/conftest.py."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("testbed")
USERS = ("trainer", "tess", "nora")
"""bash; tcsh with a .tcshrc that prints; bash with a .bashrc that prints (on both streams)."""
STATE_ROOT = Path(os.environ.get("ZERUN_TESTBED_ROOT", "/var/tmp"))
NODE_PACKAGES = ("torch", "safetensors", "numpy", "xxhash")


def why_not() -> str | None:
    """Why no cluster can stand here; None when one can."""
    if sys.platform != "linux":
        return "the real-cluster tests need Linux"
    if os.geteuid() != 0:
        return "the real-cluster tests need root (network namespaces, Slurm, sshd)"
    if not shutil.which("apt-get") and not shutil.which("slurmctld"):
        return "the real-cluster tests need Slurm, or apt-get to install it"
    return None


def required() -> bool:
    """Whether a missing cluster is a failure rather than a skip."""
    return any(os.environ.get(name, "").lower() in {"1", "true", "yes"} for name in ("CI", "ZERUN_REQUIRE_TESTBED"))


@dataclass(frozen=True)
class Testbed:
    """A cluster that stands. The machine that runs the tests is the laptop; ``login`` and ``nodes`` are hosts.

    /home is shared by all hosts and lies at ``home(user)`` for the laptop's root; /scratch is each node's own.
    """

    __test__ = False

    state: Path
    environment: Mapping[str, str]
    nodes: tuple[str, ...]
    accounting: bool
    user: str = "trainer"

    @property
    def ssh_config(self) -> Path:
        """Reaches ``login`` and every node directly as ``user`` (host keys known, key set)."""
        return self.ssh_config_of(self.user)

    def ssh_config_of(self, user: str, *, jump: bool = False) -> Path:
        """The same for another user of USERS; ``jump``: nodes only through the login node."""
        path = self.state / f"ssh_config.{user}{'.jump' if jump else ''}"
        if not path.exists():
            path.write_bytes(self._script("ssh-config", user, *(["jump"] if jump else [])).stdout)
        return path

    def address(self, host: str) -> str:
        """The IP address of a host."""
        for line in (self.state / "hosts").read_text().splitlines():
            address, name = line.split()
            if name == host:
                return address
        raise KeyError(host)

    def home(self, user: str | None = None) -> Path:
        """Where the laptop's root sees /home/USER of the cluster. Give files made there to the user."""
        return self.state / "home" / (user or self.user)

    def exec(
        self,
        host: str,
        argv: Sequence[str],
        *,
        user: str | None = "trainer",
        check: bool = True,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs ``argv`` on a host, by nsenter and not by ssh; ``user=None`` is root."""
        verb = ["exec", host] if user is None else ["as", user, host]
        done = self._script(*verb, *argv, stdin=stdin, timeout_s=timeout_s, check=False)
        if check and done.returncode:
            raise AssertionError(
                f"{list(argv)} on {host} exited {done.returncode}\n"
                f"{done.stdout.decode(errors='replace')}\n{done.stderr.decode(errors='replace')}"
            )
        return done

    def processes(self, host: str, needle: str) -> list[str]:
        """Lines ``pid user args`` of the host's processes whose command line has ``needle``."""
        lines = self.exec(host, ["ps", "-eo", "pid=,user=,args=", "ww"], user=None).stdout.decode(errors="replace")
        return [line.strip() for line in lines.splitlines() if needle in line and "ps -eo" not in line]

    def kill(self, host: str) -> None:
        """A power cut. Raise the host again with ``start``."""
        self._script("kill", host)

    def start(self, host: str) -> None:
        """Power again; returns when ssh gets in and Slurm, where it is, has the node back."""
        before = self._slurms_word(host)
        self._script("start", host)
        wait_until(lambda: self._answers(host), 60.0, f"{host} has no sshd")
        if before:
            wait_until(lambda: self._is_back(host, before["SlurmdStartTime"]), 60.0, f"Slurm does not take {host} back")

    def cut(self, host: str) -> None:
        """Pulls the cable; ``mend`` plugs it in again."""
        self._script("cut", host)

    def mend(self, host: str) -> None:
        self._script("mend", host)

    def shape(self, host: str, rate: str) -> None:
        """Limits what the host sends, e.g. ``200mbit``; ``none`` lifts it."""
        self._script("shape", host, rate)

    def _slurms_word(self, node: str) -> dict[str, str]:
        """What slurmctld knows of a node; empty where none is, or it is no node."""
        shown = self.exec("login", ["scontrol", "-o", "show", "node", node], user=None, check=False).stdout.decode()
        return dict(word.split("=", 1) for word in shown.split() if "=" in word) if "SlurmdStartTime=" in shown else {}

    def _is_back(self, node: str, earlier: str) -> bool:
        now = self._slurms_word(node)
        state = now.get("State", "DOWN")
        return now.get("SlurmdStartTime", earlier) != earlier and "DOWN" not in state and "NOT_RESPONDING" not in state

    def _answers(self, host: str) -> bool:
        probe = f": </dev/tcp/{self.address(host)}/22"
        return subprocess.run(["timeout", "2", "bash", "-c", probe], capture_output=True).returncode == 0

    def _script(
        self, *arguments: str, stdin: bytes = b"", timeout_s: float = 120.0, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [str(SCRIPT), *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"testbed {arguments[0]} failed: {done.stderr.decode(errors='replace')}")
        return done


def wait_until(true: Callable[[], object], timeout_s: float, message: str, every_s: float = 0.2) -> None:
    """Waits for a condition; fails with ``message``."""
    end = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"{message} (waited {timeout_s:g} s)")
        time.sleep(every_s)


@contextmanager
def standing(
    label: str, *, nodes: int = 4, accounting: bool = True, slurm: bool = True, options: Sequence[str] = ()
) -> Iterator[Testbed]:
    """A cluster for the length of a with-block. Names come from this process's pid, so none can clash.

    ``label`` (one lower-case letter) tells the clusters of one process apart.
    """
    _end_orphans()
    state = STATE_ROOT / f"zerun-testbed-{os.getpid()}-{label}"
    state.mkdir(mode=0o755)
    (state / "owner").write_text(f"{os.getpid()} {_started(os.getpid())} {_pid_space()}\n{label}\n")
    environment = {**os.environ, **_names(os.getpid(), label), "TESTBED_STATE": str(state)}
    arguments = [str(SCRIPT), "up", "--nodes", str(nodes), *options]
    arguments += [] if accounting else ["--no-dbd"]
    arguments += [] if slurm else ["--no-slurm"]
    try:
        # Installing Debian's packages on a machine that never saw them is part of this.
        up = subprocess.run(arguments, env=environment, capture_output=True, timeout=600, check=False)
        if up.returncode:
            logs = "".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in state.glob("log/*"))
            said = up.stderr.decode(errors="replace")
            raise AssertionError(f"the cluster did not stand (exit {up.returncode}): {said}\n{logs}")
        names = tuple(f"node{i:02d}" for i in range(1, nodes + 1))
        yield Testbed(state=state, environment=environment, nodes=names, accounting=accounting)
    finally:
        subprocess.run([str(SCRIPT), "down"], env=environment, capture_output=True, timeout=120, check=False)


def _names(pid: int, label: str) -> dict[str, str]:
    taken = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    seed = pid * 7 + ord(label)
    net = next(
        net
        for i in range(20000)
        if f" {(net := f'10.{100 + (seed + i) // 250 % 100}.{(seed + i) % 250}')}." not in taken
    )
    tag = f"{label}{pid:x}"[:7]  # "v-" + tag + "node01" is an interface's name: 15 characters at most
    return {"TESTBED_NET": net, "TESTBED_BRIDGE": f"zb-{tag}", "TESTBED_PREFIX": tag}


def _started(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _pid_space() -> str:
    return os.readlink("/proc/self/ns/pid")


def _end_orphans() -> None:
    """Takes down clusters whose owner was killed before it could: only those, found by the owner's own record."""
    for owner in STATE_ROOT.glob("zerun-testbed-*/owner"):
        try:
            identity, label = owner.read_text().splitlines()
            pid, ticks, space = identity.split()
        except (OSError, ValueError):
            continue
        if space != _pid_space() or _started(int(pid)) == ticks:
            continue
        tag = f"{label}{int(pid):x}"[:7]
        names = {"TESTBED_BRIDGE": f"zb-{tag}", "TESTBED_PREFIX": tag, "TESTBED_STATE": str(owner.parent)}
        subprocess.run(
            [str(SCRIPT), "down"], env={**os.environ, **names}, capture_output=True, timeout=120, check=False
        )


def make_node_python() -> str:
    """A Python with torch that every user of the cluster can run: built once, then reused.

    ``ZERUN_TEST_PYTHON`` names one that stands already. Versions are those of the Python that runs the tests.
    """
    given = os.environ.get("ZERUN_TEST_PYTHON")
    if given:
        return given
    wanted = [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in NODE_PACKAGES]
    system = subprocess.run(["/usr/bin/python3", "-V"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\n".join([system, *wanted]).encode()).hexdigest()[:12]
    folder = STATE_ROOT / f"zerun-test-venv-{key}"
    if not (folder / "ready").exists():
        beside = STATE_ROOT / f"zerun-test-venv-{key}.{os.getpid()}"
        try:
            _build_venv(beside, wanted)
            # A venv's own path is written into its scripts; only bin/python is used, which finds itself.
            if not folder.exists():
                beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return str(folder / "bin" / "python")


def _build_venv(folder: Path, wanted: Sequence[str]) -> None:
    made = subprocess.run(["/usr/bin/python3", "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-qq", "python3-venv"], capture_output=True, check=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["/usr/bin/python3", "-m", "venv", str(folder)], capture_output=True, check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise AssertionError(f"no Python for the nodes: {done.stderr}")
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    (folder / "ready").touch()
