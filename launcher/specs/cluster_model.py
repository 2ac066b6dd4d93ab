"""What every key of a cluster's description means. Bytes and bytes a second are integers, times seconds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from ..contract.folder import is_safe_name
from . import nodelist, values
from .container_model import Container
from .dataset_model import Datasets
from .description import Description
from .device_model import Device
from .environment import Env
from .mistakes import Mistake, wrong
from .pool_model import Pools, pool_mistakes
from .setup_text import Setup
from .slurm_model import SLURM_KEYS, Login, Slurm, Via
from .values import LIST, Bytes, Count, Flag, Line, PortRange, Rate, Slots, Whole, Word, choice

LOCAL_NAME = "localhost"


def name_problem(name: str) -> str | None:
    if is_safe_name(name) and "\n" not in name:
        return None
    return f"name {name!r} is not safe; accepted: up to 128 letters, digits, '.', '_', '-', first a letter or digit"


Name = Annotated[str, BeforeValidator(values.checked(name_problem))]


def _no_repeats(devices: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(devices)) != len(devices):
        raise wrong("a device is named twice")
    return devices


class NodeEntry(Description):
    name: values.Host
    address: values.Address | None = None  # what to connect to; the name itself when left out
    ssh: values.Address | None = None  # what ssh alone connects to, where that is another network or name
    slots: Slots = 1
    devices: Annotated[tuple[Whole, ...], LIST, AfterValidator(_no_repeats)] | None = None
    device: Device | None = None  # where nodes differ; left out: the cluster's

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        devices = given.get("devices")
        if isinstance(devices, (list, tuple)) and devices and "slots" not in given:
            return {**given, "slots": len(devices)}
        return given

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        devices, slots = given.get("devices"), str(given.get("slots"))
        if (
            isinstance(devices, (list, tuple))
            and slots is not None
            and slots.isdecimal()
            and len(slots) <= 18
            and int(slots) != len(devices)
        ):
            yield Mistake(("devices",), f"devices lists {len(devices)}, slots says {slots}; a slot has one device")


class Nodes(Description):
    """``names`` in Slurm's node-list syntax, or ``hostfile``; the rest holds for every node.

    Under Slurm ``names`` may be left out: Slurm chooses. ``slots`` is 1 when left out; in a hostfile
    it stands for the lines without ``slots=N``. ``entries`` is what the hostfile held.
    """

    LOADER_ONLY: ClassVar[frozenset[str]] = frozenset({"entries"})

    names: values.NodeList | None = None
    hostfile: Line | None = None
    slots: Slots | None = None
    cpus_per_slot: Count | None = None
    memory_per_slot: Bytes | None = None
    time_max: values.SlurmTime | None = None
    entries: tuple[NodeEntry, ...] | None = None

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if "names" in given and "hostfile" in given:
            yield Mistake(("hostfile",), "write names or hostfile, not both", at_key=True)


class Network(Description):
    inside: Rate | None = None  # per slot
    between: Rate | None = None  # per node and direction, shared by its slots
    interface: Word | None = None
    ports: PortRange | None = None  # written 20000-29999, both ends included


def _python_problem(program: str) -> str | None:
    if program.startswith("-"):
        return f"{program!r} begins with '-' and would be read as an option"
    if program.startswith(("~", "$")):
        return f"{program!r} is not expanded; accepted: a name found on PATH after setup, or an absolute path"
    return None


Python = Annotated[str, BeforeValidator(values.checked(_python_problem))]


def _runs_problem(path: str) -> str | None:
    if path.startswith(("/", "~", "$")):
        return None
    return f"{path!r} is a relative path; accepted: an absolute one, or one beginning with ~ or $NAME"


class Paths(Description):
    """``runs``: empty (on the laptop cluster alone) means the home runs folder. ``node_local`` is expanded by the
    agent, inside the job and after ``setup``: only there ``$SLURM_TMPDIR`` and its like are set."""

    runs: Annotated[str, BeforeValidator(lambda v: "" if v == "" else values.checked(_runs_problem)(v))] = ""
    node_local: Annotated[str, BeforeValidator(values.checked(_runs_problem))] | None = None
    shared: Flag = True


class Ssh(Description):
    config: Line | None = None  # an OpenSSH client configuration, relative to the cluster's file
    jump: values.Jump | None = None
    user: values.User | None = None
    port: values.Port | None = None
    key: Line | None = None
    connections: Count = 32  # logins at once
    via: Via = "fabric"  # direct; with Slurm it stands under login


def _nodes_form(value: Any) -> str:
    return "<list>" if isinstance(value, (list, tuple)) else "<mapping>"


def _distinct(nodes: tuple[NodeEntry, ...]) -> tuple[NodeEntry, ...]:
    if not nodes:
        raise wrong("the list of nodes is empty")
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise wrong(f"node {node.name!r} is named twice")
        seen.add(node.name)
    return nodes


NodesField = Annotated[
    Annotated[Nodes, Tag("<mapping>")]
    | Annotated[tuple[NodeEntry, ...], LIST, AfterValidator(_distinct), Tag("<list>")],
    Discriminator(_nodes_form),
]


@functools.lru_cache(maxsize=16)
def _entries(names: str, slots: int) -> tuple[NodeEntry, ...]:
    return tuple(NodeEntry(name=name, slots=slots) for name in nodelist.expand(names))


class Cluster(Description):
    """``python`` starts the ranks (looked up after ``setup``), ``agent_python`` the agent (before it).

    Left out they are ``python3``, and on the laptop cluster the very interpreter that runs zerun.
    """

    name: Name
    backend: Annotated[Literal["slurm", "direct"], choice("slurm", "direct", same={"ssh": "direct"})]
    login: Login | None = None
    slurm: Slurm = Slurm()
    nodes: NodesField = Nodes()
    device: Device = Device()
    pools: Pools | None = None
    pool: Word | None = None  # of a job that names none; left out: the first
    network: Network = Network()
    paths: Paths = Paths()
    datasets: Datasets = Field(default_factory=lambda: values.freeze({}))
    setup: Setup = ""
    python: Python = "python3"
    agent_python: Python = "python3"
    container: Container | None = None  # python is then the container's own
    env: Env = Field(default_factory=lambda: values.freeze({}))
    ssh: Ssh = Ssh()
    leases: Flag = True  # direct: slots that another run holds are refused

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        given = {k: v for k, v in given.items() if not (k in {"python", "agent_python"} and v == "")}
        if _is_local(given):
            if not given.get("container"):
                given.setdefault("python", sys.executable)
            given.setdefault("agent_python", sys.executable)
        return given

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        backend = {"ssh": "direct"}.get(str(given.get("backend")), str(given.get("backend")))
        nodes = given.get("nodes")
        if given.get("pools") is not None:
            yield from pool_mistakes(given, backend)
        elif given.get("pool") is not None:
            yield Mistake(("pool",), "pool names one of pools, and there are none", at_key=True)
        if backend == "direct":
            yield from _direct_mistakes(given)
        if backend == "slurm":
            if isinstance(nodes, (list, tuple)):
                yield Mistake(
                    ("nodes",), "a list of nodes is for backend: direct; with Slurm write {slots: N, names: …}"
                )
            if isinstance(nodes, Mapping) and nodes.get("hostfile") is not None:
                yield Mistake(
                    ("nodes", "hostfile"), "hostfile is for backend: direct; with Slurm write names", at_key=True
                )
            ssh = given.get("ssh")
            if isinstance(ssh, Mapping) and ssh.get("via", "fabric") != "fabric":
                yield Mistake(("ssh", "via"), "with Slurm it stands under login: {via: openssh}", at_key=True)
            if _filled(given.get("ssh"), Ssh) and given.get("login") is None:
                yield Mistake(("ssh",), "ssh says how a login node is reached, and there is no login", at_key=True)
        paths = given.get("paths")
        runs = paths.get("runs") if isinstance(paths, Mapping) else getattr(paths, "runs", None)
        if not runs and backend in {"slurm", "direct"} and not _is_local(given):
            yield Mistake(
                ("paths",) if isinstance(paths, Mapping) else (),
                "paths.runs is missing: the folder on the cluster that runs live in (~ and $NAME are expanded there)",
            )
        shared = paths.get("shared") if isinstance(paths, Mapping) else getattr(paths, "shared", None)
        if backend == "slurm" and str(shared).lower() == "false":
            yield Mistake(("paths", "shared"), "with Slurm, runs must be shared: nobody reaches a node after the job")

    def unsaid(self) -> frozenset[str]:
        """Sections that do not go with the backend."""
        said_nothing = {"slurm"} if self.backend == "direct" else {"leases"}
        said_by_pool = {"nodes", "device"} if self.pools else set()
        return frozenset(said_nothing | said_by_pool | ({"ssh"} if self.ssh == Ssh() else set()))

    def unsaid_of_slurm(self) -> frozenset[str]:
        """What each of the pools says for itself."""
        return frozenset(SLURM_KEYS) if self.pools else frozenset()

    @property
    def node_list(self) -> tuple[NodeEntry, ...]:
        """Every node with its slots, in the order named; empty when Slurm chooses among nodes not named."""
        if isinstance(self.nodes, tuple):
            return self.nodes
        if self.nodes.entries is not None:
            return self.nodes.entries
        if self.nodes.names is None:
            return ()
        return _entries(self.nodes.names, self.nodes.slots or 1)

    def device_of(self, node: str) -> Device:
        """What stands behind each slot of ``node``; the cluster's device for a node that says nothing of its own."""
        return next((e.device for e in self.node_list if e.name == node and e.device is not None), self.device)

    @property
    def local(self) -> bool:
        """Direct on this very machine: one node named ``localhost``, and nothing said about ssh."""
        if self.backend != "direct" or self.ssh != Ssh():
            return False
        nodes = self.node_list
        return len(nodes) == 1 and nodes[0].name == LOCAL_NAME and nodes[0].address is None

    @property
    def slots(self) -> int | None:
        """Slots of each node, or None where nodes differ."""
        counts = {node.slots for node in self.node_list}
        if not counts and isinstance(self.nodes, Nodes):
            return self.nodes.slots or 1
        return counts.pop() if len(counts) == 1 else None

    @property
    def cpus_per_slot(self) -> int | None:
        return self.nodes.cpus_per_slot if isinstance(self.nodes, Nodes) else None

    @property
    def memory_per_slot(self) -> int | None:
        return self.nodes.memory_per_slot if isinstance(self.nodes, Nodes) else None

    @property
    def time_max(self) -> int | None:
        return self.nodes.time_max if isinstance(self.nodes, Nodes) else None


def _filled(section: Any, model: type[Description]) -> bool:
    """Whether a section says anything, as it was given or as a model."""
    if isinstance(section, Mapping):
        return any(value is not None for value in section.values())
    return isinstance(section, model) and section != model()


def _is_local(given: Mapping[str, Any]) -> bool:
    if str(given.get("backend")) not in {"direct", "ssh"} or _filled(given.get("ssh"), Ssh):
        return False
    nodes = given.get("nodes")
    if isinstance(nodes, (list, tuple)):
        only = nodes[0] if len(nodes) == 1 else None
        named = only.get("name") if isinstance(only, Mapping) else getattr(only, "name", None)
        address = only.get("address") if isinstance(only, Mapping) else getattr(only, "address", None)
        return named == LOCAL_NAME and address is None
    names = nodes.get("names") if isinstance(nodes, Mapping) else getattr(nodes, "names", None)
    return names == LOCAL_NAME


def _direct_mistakes(given: Mapping[str, Any]) -> Iterator[Mistake]:
    if given.get("login") is not None:
        yield Mistake(
            ("login",), "login is for backend: slurm; behind a gate nodes are reached by ssh: {jump: …}", True
        )
    if _filled(given.get("slurm"), Slurm):
        yield Mistake(("slurm",), "slurm is for backend: slurm", at_key=True)
    container = given.get("container")
    runtime = container.get("runtime") if isinstance(container, Mapping) else getattr(container, "runtime", None)
    if runtime == "pyxis":
        yield Mistake(("container", "runtime"), "pyxis is a plugin of srun: it is for backend: slurm")
    nodes = given.get("nodes")
    if nodes is None and given.get("pools") is not None:
        return
    if nodes is None:
        yield Mistake((), "'nodes' is missing: backend: direct needs names, a hostfile or a list of nodes")
    elif isinstance(nodes, Mapping) and nodes.get("names") is None and nodes.get("hostfile") is None:
        yield Mistake(("nodes",), "backend: direct needs names (node[01-04]) or hostfile here")
