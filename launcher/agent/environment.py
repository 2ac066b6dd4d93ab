"""The environment of a rank: site < setup's exports < launch.env < what the launcher owns.

The environment in which the agent itself was started is never passed on: under ``direct`` on this
machine it would be the submitter's. What Slurm says to a step is the one exception.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
from pathlib import PurePosixPath
from typing import BinaryIO, Dict, List, Mapping, NamedTuple, Optional, Sequence

from ..contract.errors import Refused, UsageError, ZerunError
from ..contract.folder import RunFolder
from ..contract.launch import LaunchSpec, SetupPart
from ..contract.topology import Topology

Environment = Dict[str, str]

STAGED = "ZERUN_STAGED"
"""Data on the node's own disk, as JSON: path as the launch specification has it → copy."""

_PATH = "/usr/local/bin:/usr/bin:/bin"
_ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEPT_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_", "PMI2_", "CUDA_MPS_")
_KEPT = (
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "NVIDIA_VISIBLE_DEVICES",
    "TMPDIR",
    "KRB5CCNAME",
    "XDG_RUNTIME_DIR",
)
_REMOVED_PREFIXES = ("SLURM_NTASKS",)
_REMOVED = ("SLURM_PROCID", "SLURM_LOCALID")
_OF_THE_SHELL = ("_", "SHLVL", "PWD", "OLDPWD", "BASH_ENV")

# SAID and TEXT are descriptors: what the shell has to tell, and the user's text. A depth of 0 is this
# prelude itself (the text did not parse), 1 the user's text; failures inside what that sources are its own affair.
_PRELUDE = r"""
[ -r /etc/profile ] && . /etc/profile
set +eu
__d='${#BASH_SOURCE[@]}'
trap "__z=\$?; [ $__d -gt 1 ] || { echo line \$LINENO \$__z $__d >&SAID; exit \$__z; }" ERR
. /dev/fd/TEXT
trap - ERR
printf 'whole\n' >&SAID
exec TEXT<&-
/usr/bin/env -0 >&SAID
"""


class Seat(NamedTuple):
    """Where one rank sits, and where all meet."""

    rank: int
    node_rank: int
    node: str
    address: str
    port: int
    interface: Optional[str] = None


def site(inherited: Mapping[str, str]) -> Environment:
    """The clean environment of this machine and user; of ``inherited`` only what Slurm says."""
    uid = os.getuid()
    try:
        entry = pwd.getpwuid(uid)
        home, user, shell = entry.pw_dir, entry.pw_name, entry.pw_shell or "/bin/sh"
    except KeyError:  # a container's user without an entry
        home, user, shell = "/", str(uid), "/bin/sh"
    found = {
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": shell,
        "PATH": _ROOT_PATH if uid == 0 else _PATH,
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
    }
    if "SLURM_JOB_ID" in inherited:
        found.update({k: v for k, v in inherited.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)})
    return found


def setup_argv(said: int, text: int) -> List[str]:
    """The shell that runs ``setup``, whose text is read from the descriptor ``text``; ``said`` takes the
    input of :func:`after_setup`.

    The site's ``/etc/profile`` is read first, because that is where ``module`` and its like come from;
    the user's own start files are not.
    """
    prelude = _PRELUDE.replace("SAID", str(said)).replace("TEXT", str(text))
    return [shutil.which("bash") or "/bin/bash", "--noprofile", "--norc", "-c", prelude, "setup"]


def shell_after_setup(setup: str) -> List[str]:
    """A shell that reads the site's profile and ``setup`` as a job's does, then runs the words that follow. Give it
    :func:`site`'s environment."""
    # On one line with the first of setup: bash counts the lines of what it complains of.
    script = f'[ -r /etc/profile ] && . /etc/profile; set +eu; {setup}\nexec "$0" "$@"'
    return [shutil.which("bash") or "/bin/bash", "--noprofile", "--norc", "-c", script]


def after_setup(said: BinaryIO, status: int, text: str, parts: Sequence[SetupPart] = ()) -> Environment:
    """The environment that ``setup`` left behind. ``status`` is the shell's exit status (128 + signal).

    Raises :class:`ZerunError` naming the line that failed, when bash could tell.
    """
    said.seek(0)
    head, _, rest = said.read().partition(b"\n")
    words = head.decode("utf-8", "replace").split()
    if words[:1] == ["line"] and len(words) == 4:
        lines = text.splitlines()
        number = int(words[1])
        if words[3] == "0" or not 0 < number <= len(lines):
            raise ZerunError(f"setup failed with status {words[2]}: bash could not read it to its end")
        where = _place_of(parts, number)
        raise ZerunError(f"setup: {where} failed with status {words[2]}: {lines[number - 1].strip()}")
    if words != ["whole"]:
        raise ZerunError(f"setup ended with status {status} before its last line")
    if status:
        raise ZerunError(f"setup: its environment could not be read (status {status})")
    found = {}
    for entry in rest.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            found[_text(name)] = _text(value)
    return {k: v for k, v in found.items() if k not in _OF_THE_SHELL}


def _place_of(parts: Sequence[SetupPart], number: int) -> str:
    """``clusters/uni.yaml:12`` where that is known, else whose line it is."""
    part = next((p for p in parts if p.first <= number < p.first + p.lines), None)
    if part is None:
        return f"line {number}"
    own = number - part.first + 1
    if part.line is not None:
        return f"{part.file}:{part.line + own - 1}"
    return f"line {own} of the {part.of}'s setup" + (f" ({part.file})" if part.file else "")


def read_secrets(spec: LaunchSpec) -> Environment:
    """The values of ``spec.secrets``, from a file that nobody else can read.

    Raises :class:`Refused` when others can, :class:`UsageError` when a value is missing.
    """
    if not spec.secrets:
        return {}
    if not spec.secrets_file:
        raise UsageError(f"secrets {', '.join(spec.secrets)} are asked for, but no file with them was sent")
    with open(spec.secrets_file, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise Refused(f"the secrets file {spec.secrets_file} is not this user's alone (mode 0600)")
        values = json.loads(file.read())
    lacking = [name for name in spec.secrets if not isinstance(values.get(name), str)]
    if lacking:
        raise UsageError(f"secret {lacking[0]} has no value: it was not set where the job was submitted")
    return {name: values[name] for name in spec.secrets}


def of_rank(base: Mapping[str, str], spec: LaunchSpec, seat: Seat) -> Environment:
    """``base`` (site and setup), then the job's own values, then the launcher's: everything a rank sees.

    Secrets are not in it; they are laid over it right before the start.
    """
    result = {
        k: v for k, v in base.items() if k not in _REMOVED and not any(k.startswith(p) for p in _REMOVED_PREFIXES)
    }
    result.update(spec.env)
    slots = spec.nodes[seat.node_rank].slots
    result.setdefault("OMP_NUM_THREADS", str(spec.cpus_per_slot or max(1, _cores() // slots)))
    if seat.interface:
        result.setdefault("GLOO_SOCKET_IFNAME", seat.interface)
    if spec.interface:
        result.setdefault("NCCL_SOCKET_IFNAME", f"={spec.interface}")  # without = it would mean any that begins so
    if spec.program is not None:
        # `from zerun import ZeroEngine` works in a script that nothing was installed for; behind all else.
        result["PYTHONPATH"] = os.pathsep.join(p for p in (result.get("PYTHONPATH"), spec.runtime) if p)
    devices = spec.nodes[seat.node_rank].devices
    if devices is not None and spec.device_kind == "gpu":
        # Every rank sees all devices of the job on its node, and LOCAL_RANK counts them, as under torchrun.
        result["CUDA_VISIBLE_DEVICES"] = ",".join(str(d) for d in devices)
        result.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's numbers, not CUDA's "fastest first"
    result.update(_data_of_program(spec, base))
    result.update(_owned(spec, seat))
    result.pop("ZERUN_LISTEN_FD", None)
    return result


def _data_of_program(spec: LaunchSpec, base: Mapping[str, str]) -> Environment:
    """Where a program finds its data on this node: the staged copy where there is one, always an absolute path."""
    if spec.program is None:
        return {}
    staged = json.loads(base.get(STAGED) or "{}") if spec.stage else {}
    code = str(RunFolder(PurePosixPath(spec.run_dir)).code)
    return {name: os.path.join(code, staged.get(path, path)) for name, path in spec.program.data.items()}


def _owned(spec: LaunchSpec, seat: Seat) -> Environment:
    topology = Topology(tuple(node.slots for node in spec.nodes), spec.tensor)
    run = RunFolder(PurePosixPath(spec.run_dir))
    owned = {
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(topology.local_rank(seat.rank)),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(spec.nodes[seat.node_rank].slots),
        "GROUP_RANK": str(seat.node_rank),
        "GROUP_WORLD_SIZE": str(len(spec.nodes)),
        "NODE_RANK": str(seat.node_rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": str(topology.world_size),
        "MASTER_ADDR": seat.address,
        "MASTER_PORT": str(seat.port),
        "TORCHELASTIC_RUN_ID": spec.run,
        "TORCHELASTIC_RESTART_COUNT": str(spec.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "ZERUN_RUN_DIR": spec.run_dir,
        "ZERUN_ATTEMPT": str(spec.attempt),
        "ZERUN_STOP_FILE": str(run.attempt(spec.attempt).stop),
        "ZERUN_TOKEN": spec.token,
        "ZERUN_NODE": seat.node,
        "PYTHONUNBUFFERED": "1",
    }
    if spec.resume_step is not None:
        owned["ZERUN_RESUME_FROM"] = str(run.checkpoint(spec.resume_step).root)
    elif spec.resume_from is not None:
        owned["ZERUN_RESUME_FROM"] = str(PurePosixPath(spec.run_dir) / spec.resume_from)
    return owned


def resolve(program: str, environment: Mapping[str, str], folder: str) -> str:
    """The file that ``program`` names for a rank whose environment this is; ``folder`` is its cwd."""
    if "/" in program:
        path = os.path.normpath(os.path.join(folder, program))
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
        raise UsageError(f"{path} is not a program that can be run on this node")
    found = shutil.which(program, path=environment.get("PATH", _PATH))
    if found is None:
        raise UsageError(
            f"`{program}` is not on this node's PATH after setup ({environment.get('PATH', '')})",
            hint="give `python:` as an absolute path, or load it in `setup:`",
        )
    return os.path.join(folder, found)


def encoded(environment: Mapping[str, str]) -> Dict[bytes, bytes]:
    """The bytes that ``execve`` gets: UTF-8 whatever the agent's own locale is.

    Raises :class:`UsageError` for what no environment can hold.
    """
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise UsageError(f"no environment can hold {name!r}: an empty name, `=` in a name, or a zero byte")
    return {k.encode("utf-8", "surrogateescape"): v.encode("utf-8", "surrogateescape") for k, v in environment.items()}


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _cores() -> int:
    return len(os.sched_getaffinity(0))
