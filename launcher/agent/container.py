"""Ranks in containers: the words that start one, and what ends it. Standard library only.

The agent stays outside: it needs nothing of the image, keeps logs and records as ever, and finds the processes of a
container by their token, since they are processes of this machine like any other (the container shares its process
tree, its network and its shared memory, which NCCL and gloo need between the ranks of a node).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from ..contract.container import RUNTIMES, Container, Mount
from ..contract.errors import UsageError
from ..contract.launch import LaunchSpec
from . import processes
from .environment import STAGED

# What describes the machine outside, not the job: inside, the image has its own.
_OUTSIDE = frozenset(
    [
        *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "HOME", "SHELL", "TMPDIR", "OLDPWD", "PWD", "SHLVL", "_"),
        *("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "MANPATH", "INFOPATH"),
        *("LOADEDMODULES", "_LMFILES_", "MODULEPATH"),
    ]
)
_LOOK_S = 30.0


def argv_in(spec: LaunchSpec, own: Mapping[str, str], folder: str, argv: Sequence[str]) -> List[str]:
    """``argv`` as a rank in a container of its own; ``own`` is the rank's environment, which reaches it by name: values
    stand on no command line. Call only with ``spec.container``."""
    box = spec.container
    assert box is not None
    mounts = mounts_of(spec, box, own)
    gpu = spec.device_kind == "gpu"
    if box.runtime == "apptainer":
        return _apptainer(box, mounts, gpu, folder, argv)
    if box.runtime == "pyxis":
        return _pyxis(box, mounts, own, folder, argv)
    return _engine(box, mounts, gpu, spec, own, folder, argv)


def mounts_of(spec: LaunchSpec, box: Container, own: Mapping[str, str]) -> List[Mount]:
    """What was asked for, and what every rank needs: the runs' folder, its data (to be read), a node's own disk, and
    what was copied to it (``$SLURM_TMPDIR`` is known here alone)."""
    runs = os.path.dirname(spec.run_dir)
    found = [*box.mounts, Mount(runs, runs)]
    found += [Mount(folder, folder, read_only=True) for folder in _data_folders(spec)]
    if spec.node_local and spec.node_local.startswith("/"):
        found.append(Mount(spec.node_local, spec.node_local))
    staged = json.loads(own.get(STAGED) or "{}") if spec.stage else {}
    found += [Mount(folder, folder, read_only=True) for folder in sorted({os.path.dirname(p) for p in staged.values()})]
    return _without_repeats(found)


def _data_folders(spec: LaunchSpec) -> List[str]:
    paths: List[Optional[str]] = []
    if spec.train is not None:
        paths += [spec.train.data.tokens, spec.train.data.heldout]
    if spec.program is not None:
        paths += spec.program.data.values()
    return [os.path.dirname(path) for path in paths if path and path.startswith("/")]


def _without_repeats(mounts: Iterable[Mount]) -> List[Mount]:
    """The first that says something about a target holds; what lies in a folder that is there already is there."""
    kept: List[Mount] = []
    for mount in mounts:
        around = [other for other in kept if (mount.target + "/").startswith(other.target.rstrip("/") + "/")]
        nearest = max(around, key=lambda other: len(other.target), default=None)
        if nearest is None or not (nearest.target == mount.target or _same_below(mount, nearest)):
            kept.append(mount)
    return kept


def _same_below(mount: Mount, other: Mount) -> bool:
    rest = mount.target[len(other.target.rstrip("/")) :]
    return mount.source == other.source.rstrip("/") + rest and (mount.read_only or not other.read_only)


def environment_in(spec: LaunchSpec, own: Mapping[str, str]) -> List[str]:
    """The names of the variables that go in: the job's and ours, not those that describe the machine outside."""
    return sorted(name for name in own if name not in _OUTSIDE or name in spec.env)


def _apptainer(box: Container, mounts: Sequence[Mount], gpu: bool, folder: str, argv: Sequence[str]) -> List[str]:
    words = ["apptainer", "exec"]
    if gpu:
        words.append("--nv")
    for mount in mounts:
        words += ["--bind", f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "")]
    return [*words, "--pwd", folder, *box.arguments, box.image, *argv]


def _pyxis(
    box: Container, mounts: Sequence[Mount], own: Mapping[str, str], folder: str, argv: Sequence[str]
) -> List[str]:
    """A step beside the agent's own, on this node, in the container that Slurm's plugin makes."""
    node = own.get("SLURMD_NODENAME") or own.get("ZERUN_NODE", "")
    listed = ",".join(f"{m.source}:{m.target}" + (":ro" if m.read_only else "") for m in mounts)
    words = [
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--export=ALL",
        "--kill-on-bad-exit=1",
    ]
    words += [f"--container-image={box.image}", f"--container-mounts={listed}", f"--container-workdir={folder}"]
    return [*words, "--no-container-mount-home", *box.arguments, *argv]


def _engine(
    box: Container,
    mounts: Sequence[Mount],
    gpu: bool,
    spec: LaunchSpec,
    own: Mapping[str, str],
    folder: str,
    argv: Sequence[str],
) -> List[str]:
    """docker and podman speak alike, but for who the user inside is and how GPUs are named."""
    words = [box.runtime, "run", "--rm", "--name", name_of(spec, own), "--log-driver", "none"]
    words += ["--network", "host", "--ipc", "host", "--pid", "host"]
    if box.runtime == "podman":
        if os.geteuid():
            words.append("--userns=keep-id")
        if gpu:
            words += ["--device", "nvidia.com/gpu=all"]
    else:
        words += ["--user", f"{os.geteuid()}:{os.getegid()}"]
        if gpu:
            words += ["--gpus", "all"]
    if gpu:
        words += ["--ulimit", "memlock=-1"]
    for mount in mounts:
        words += ["--volume", f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "")]
    for name in environment_in(spec, own):
        words += ["--env", name]
    return [*words, "--workdir", folder, *box.arguments, box.image, *argv]


def name_of(spec: LaunchSpec, own: Mapping[str, str]) -> str:
    return f"zerun-{spec.run}-{spec.attempt}-rank-{own['RANK']}"


def end(spec: LaunchSpec, ranks: Iterable[int]) -> None:
    """Removes what the runtime still has of these ranks' containers: a killed client leaves its container behind."""
    box = spec.container
    if box is None or box.runtime not in ("docker", "podman"):
        return
    names = [name_of(spec, {"RANK": str(rank)}) for rank in ranks]
    if box.runtime == "podman":  # where one of the names is gone, podman 4.3 leaves all the others without a word
        names.insert(0, "--ignore")
    try:
        subprocess.run(
            [box.runtime, "rm", "--force", *names],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=_LOOK_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return  # the runtime itself is gone: what it started is found by its token


def listeners(token: str, rank: int, client: int, number: int) -> List[processes.Stat]:
    """The topmost processes of rank ``rank`` that handle the signal, but not the runtime's client before them."""
    mine = [stat for stat in processes.marked(token) if stat.pid != client and _rank_of(stat.pid) == rank]
    heard = [stat for stat in mine if processes.catches(stat.pid, number)]
    pids = {stat.pid for stat in heard}
    return [stat for stat in heard if stat.parent not in pids]


def _rank_of(pid: int) -> Optional[int]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    found = next((entry[5:] for entry in entries if entry.startswith(b"RANK=")), b"")
    return int(found) if found.isdigit() else None


def image(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb ``image``: ``{runtime, image, login}`` → ``{problem, note}``, asked before a job is queued.

    ``login``: this is a login node, which need not have the runtime; a file is looked for all the same.
    """
    box = Container(str(request["runtime"]), str(request["image"]))
    if box.runtime not in RUNTIMES:
        raise UsageError(f"container.runtime {box.runtime!r} is none of {', '.join(RUNTIMES)}")
    if box.is_file:
        return _said("" if os.access(box.image, os.R_OK) else f"the image {box.image} is not there, or may not be read")
    if request.get("login"):
        return _said(note=f"the image {box.image} is looked for on the nodes, when the job starts there")
    program = "srun" if box.runtime == "pyxis" else box.runtime
    if shutil.which(program) is None:
        return _said(f"{program} is not there")
    if box.runtime in ("apptainer", "pyxis"):
        return _said(note=f"the image {box.image} is fetched when the job starts; a file would be checked now")
    try:
        done = subprocess.run(
            [box.runtime, "image", "inspect", "--format", "{{.Id}}", box.image],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOOK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _said(f"{box.runtime} did not answer within {_LOOK_S:.0f} s")
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return _said(f"{box.runtime} has no image {box.image}" + (f": {words[-1]}" if words else ""))
    return _said()


def _said(problem: str = "", note: str = "") -> Dict[str, Any]:
    return {"problem": problem, "note": note}
