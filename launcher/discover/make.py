"""Asks a cluster, and writes its description: what was found, and what a person has to fill in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.calls import Caller, first_error, side_by_side
from ..backends.outside import ask, words
from ..contract.errors import Refused, Unreachable, UsageError, ZerunError
from ..specs import nodelist
from ..specs.cluster_model import LOCAL_NAME
from ..specs.load import cluster_from_plain, parse_text
from ..transports.open import Connector
from ..transports.refusals import SECOND_FACTOR
from . import machines
from .pools import pools_lines, slurm_lines
from .slurm_facts import SINFO_FIELDS, Facts, accounts_of, config_of, kinds_of, partitions_of
from .text import entry, section, to_fill

if TYPE_CHECKING:
    from ..specs.models import Cluster
    from ..transports.protocol import Transport

_OURS = ("slurm", "pools", "pool", "nodes", "device", "name", "backend")
_RUNS = "~/zerun"


def discover(cluster: Cluster, runtime: tuple[str, bytes], source: str, written: Path | None) -> str:
    """The description of ``cluster``, which may say no more than how it is reached (:func:`of_host`).

    ``source`` is what it was called; ``written`` the file that the text is for, whose folder its paths are relative
    to. Raises Unreachable, Refused, and UsageError where Slurm is not to be found.
    """
    connector = Connector(cluster)
    try:
        lines = (
            _of_slurm(cluster, connector) if cluster.backend == "slurm" else _of_machines(cluster, connector, runtime)
        )
    finally:
        connector.close()
    said = cluster.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    kept = {key: value for key, value in said.items() if key not in _OURS}
    paths = kept.pop("paths", {})
    text = "\n".join(
        [
            f"# What zerun found on {source}. Lines with FILL IN are for a person; nothing else has to be changed.",
            entry("name", cluster.name),
            entry("backend", cluster.backend),
            *section(_of_login(kept)),
            *lines,
            *section({"paths": paths}),
            *_fill_paths(cluster),
            *section({k: v for k, v in kept.items() if k not in ("login", "ssh")}),
            "",
        ]
    )
    parse_text("cluster", text, str(written or Path("discovered.yaml")))  # what it writes, it can read
    return text


def of_host(target: str, ssh_config: Path | None) -> Cluster:
    """A cluster of which no more is known than a host's name (``localhost``: this machine), or a list of them.

    Connects to a single host: with Slurm it is a login node. A login that ``zerun login HOST`` opened is gone through.
    Raises Unreachable, Refused; UsageError for no name.
    """
    names = _names(target)
    via = "openssh" if target != LOCAL_NAME and _login_stands(target, ssh_config) else "fabric"
    plain = _plain(names, via, ssh_config)
    if len(names) == 1:
        login = {} if target == LOCAL_NAME else {"login": {"host": target, "via": via}}
        slurm = cluster_from_plain({**plain, "ssh": {**plain["ssh"], "via": "fabric"}, "backend": "slurm", **login})
        try:
            if _has_slurm(slurm):
                return slurm
        except Unreachable as problem:
            if SECOND_FACTOR not in problem.message:
                raise
            raise Unreachable(problem.message, hint=f"log in once, by hand: zerun login {target}; then again") from None
    return cluster_from_plain({**plain, "backend": "direct", "nodes": {"names": target}})


def by_hand(target: str, ssh_config: Path | None = None) -> Cluster:
    """A host, or a list of them, as the system's ssh logs in to it: for ``zerun login HOST``. Connects to nothing."""
    plain = _plain(_names(target), "openssh", ssh_config)
    return cluster_from_plain({**plain, "backend": "direct", "nodes": {"names": target}})


def _names(target: str) -> tuple[str, ...]:
    try:
        return tuple(nodelist.expand(target))
    except ValueError as problem:
        raise UsageError(f"{target!r} is neither a cluster nor a host: {problem}") from None


def _plain(names: Sequence[str], via: str, ssh_config: Path | None) -> dict[str, Any]:
    config = {"config": str(ssh_config.resolve())} if ssh_config is not None else {}
    return {"name": names[0].partition(".")[0], "paths": {"runs": _RUNS}, "ssh": {"via": via, **config}}


def _login_stands(target: str, ssh_config: Path | None) -> bool:
    connector = Connector(by_hand(target, ssh_config))
    try:
        return any(master.alive() for master in connector.masters())
    finally:
        connector.close()


def _has_slurm(cluster: Cluster) -> bool:
    connector = Connector(cluster)
    try:
        ask(connector.transport(), "sinfo", "--version")
    except UsageError:
        return False
    finally:
        connector.close()
    return True


def _of_login(kept: dict[str, Any]) -> dict[str, Any]:
    return {key: kept[key] for key in ("login", "ssh") if key in kept}


def _fill_paths(cluster: Cluster) -> list[str]:
    if cluster.paths.runs != _RUNS:
        return []
    where = "a folder that every node and the login node see" if cluster.backend == "slurm" else "a folder on each node"
    lines = [to_fill(f"runs: {where}, with room for checkpoints; a home often has a small quota", indent=2)]
    if cluster.backend == "direct" and len(cluster.node_list) > 1:
        lines.append(to_fill("shared: false, unless all of them see the same folder there", indent=2))
    return lines


def _of_slurm(cluster: Cluster, connector: Connector) -> list[str]:
    login = connector.transport()
    facts = _facts(login)
    version = facts.config.get("SLURM_VERSION", "of unknown version")
    enforced = facts.config.get("EnforcePartLimits", "NO")
    lines = [f"# Slurm {version}, cluster {facts.config.get('ClusterName', '?')}"]
    if enforced == "NO":
        lines.append("# EnforcePartLimits is NO: sbatch queues jobs that can never start; submit asks before")
    found = slurm_lines(facts)
    if cluster.slurm.extra:
        found = [*(found or ["slurm:"]), *section({"extra": dict(cluster.slurm.extra)}, 2)]
    return [*lines, *found, *pools_lines(facts), *_python_of(cluster, login)]


def _facts(login: Transport) -> Facts:
    def told(*argv: str) -> str:
        done = ask(login, *argv)
        if done.returncode:
            raise Unreachable(f"{login.name}: {argv[0]}: {words(done.stderr)}")
        return done.stdout.decode("utf-8", "replace")

    user = login.run(["id", "-un"]).stdout.decode("utf-8", "replace").strip()
    form = "format=defaultaccount,account"
    assoc = _if_there(lambda: told("sacctmgr", "-nP", "show", "user", user, "withassoc", form))
    return Facts(
        config=config_of(told("scontrol", "show", "config")),
        partitions=partitions_of(told("scontrol", "-o", "show", "partition")),
        kinds=kinds_of(told("sinfo", "-h", "-N", "-o", SINFO_FIELDS)),
        accounts=accounts_of(assoc, user),
    )


def _if_there(call: Callable[[], str]) -> str:
    try:
        return call()
    except ZerunError:  # no accounting: it has no accounts to tell of
        return ""


def _python_of(cluster: Cluster, login: Transport) -> list[str]:
    done = login.run([cluster.agent_python, "-c", "import sys; print(sys.version.split()[0])"])
    if done.returncode == 0:
        version = done.stdout.decode("utf-8", "replace").strip().splitlines()[-1]
        lines = [f"# {cluster.agent_python} on the login node is Python {version}"]
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < (3, 9):
            lines.append(to_fill("agent_python: one of 3.9 or newer, on every node"))
        return [*lines, *_torch_of(cluster, login)]
    return [to_fill(f"agent_python: a Python of 3.9 or newer on every node ({cluster.agent_python} is not there)")]


def _torch_of(cluster: Cluster, login: Transport) -> list[str]:
    """Where neither ``setup:`` nor ``python:`` says which Python has torch, and the one that is there has none."""
    if cluster.setup or cluster.python != "python3":
        return []
    find = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    there = login.run([cluster.python, "-c", find]).returncode == 0
    return [] if there else [to_fill("setup: and python: so that a Python with torch is found, on every node")]


def _told(problem: ZerunError) -> str:
    return f"{problem.message}; {problem.hint}" if problem.hint else problem.message


def _of_machines(cluster: Cluster, connector: Connector, runtime: tuple[str, bytes]) -> list[str]:
    caller = Caller(cluster.paths.runs, cluster.agent_python, runtime)

    def look(name: str) -> dict[str, Any]:
        at = connector.transport(name)
        request = {"python": cluster.python, "modules": ["torch"], "resolve": [], "setup": cluster.setup}
        return dict(caller.call(at, "probe", {**request, "path": caller.ready(at)}))

    names = [entry.name for entry in cluster.node_list]
    looked = side_by_side(look, names, cluster.ssh.connections)
    found = [machines.Machine(name, said, _told(problem) if problem else "") for name, said, problem in looked]
    if not any(machine.said is not None for machine in found):
        worst = first_error(looked)  # a host key that is not known is refused here as on a login node
        kind = Refused if isinstance(worst, Refused) else Unreachable
        raise kind("; ".join(machine.problem for machine in found))
    return [*machines.nodes_lines(found), *machines.python_lines(found)]
