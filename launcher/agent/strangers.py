"""Who computes on this node's GPUs, as nvidia-smi tells it."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from typing import Dict, List, NamedTuple, Optional

_LIMIT_S = 15.0
_SHARED_SERVERS = ("nvidia-cuda-mps-server",)  # hands the device on to others' processes, computes nothing itself


class Stranger(NamedTuple):
    """A process on a device that no lease covers."""

    device: int
    pid: int
    user: str
    program: str

    def sentence(self) -> str:
        return f"GPU {self.device} in use by pid {self.pid} of {self.user} ({self.program}), which has no lease"


def strangers() -> List[Stranger]:
    """Every compute process of every device; none where there is no nvidia-smi or it does not answer."""
    gpus = _ask("--query-gpu=index,uuid")
    apps = _ask("--query-compute-apps=gpu_uuid,pid,process_name") if gpus else None
    if not gpus or not apps:
        return []
    numbers: Dict[str, int] = {row[1]: int(row[0]) for row in gpus if len(row) == 2 and row[0].isdigit()}
    found = []
    for row in apps:
        if len(row) < 3 or row[0] not in numbers or not row[1].isdigit():
            continue
        program = os.path.basename(", ".join(row[2:])) or "?"
        if program not in _SHARED_SERVERS:
            found.append(Stranger(numbers[row[0]], int(row[1]), _user_of(int(row[1])), program))
    return found


def _user_of(pid: int) -> str:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "a user that cannot be seen here"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _ask(question: str) -> Optional[List[List[str]]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, question, "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            universal_newlines=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
