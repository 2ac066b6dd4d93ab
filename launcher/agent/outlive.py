"""How an agent outlives the connection that started it, and the logout of its user.

A session of its own (setsid) is enough nearly everywhere. Where logind ends what a user leaves behind
(``KillUserProcesses=yes``) it is not; then the agent goes into a scope of the user's own systemd, which lives
on if the user *lingers*. Without lingering that systemd ends with the last logout and takes its scopes along, so a
scope is made for lingering users alone: for all others setsid is the better of the two.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from .leases import user_name

_LIMIT_S = 5.0
SCOPE, SETSID = "scope", "setsid"


class Way(NamedTuple):
    """``by``: scope or setsid; ``argv`` stands before the agent's own, ``environment`` is what it needs for that."""

    by: str
    argv: List[str]
    environment: Dict[str, str]


def way() -> Way:
    """The best that this machine has."""
    runtime_dir = f"/run/user/{os.geteuid()}"
    runtime_dir = runtime_dir if os.path.isdir(runtime_dir) else os.environ.get("XDG_RUNTIME_DIR", "")
    found = shutil.which("systemd-run")
    if found and runtime_dir and lingers():
        argv = [found, "--user", "--scope", "--quiet", "--collect", "--description=zerun agent", "--"]
        environment = {"XDG_RUNTIME_DIR": runtime_dir}
        # It registers a scope and becomes the command itself: same pid. Tried first, because it may not be answered.
        if _said([*argv, "true"], environment) is not None:
            return Way(SCOPE, argv, environment)
    return Way(SETSID, [], {})


def facts() -> Dict[str, Any]:
    """``by``; ``lingers`` and ``ended_at_logout`` (logind ends what is left behind), null where nobody says."""
    return {
        "by": way().by,
        "lingers": lingers(),
        "ended_at_logout": _flag(["show-session", "--property=KillUserProcesses", "--value"]),
        "user": user_name(os.geteuid()),
    }


def lingers() -> Optional[bool]:
    user = user_name(os.geteuid())
    if os.path.exists(f"/var/lib/systemd/linger/{user}"):
        return True
    return _flag(["show-user", user, "--property=Linger", "--value"])


def _flag(question: Sequence[str]) -> Optional[bool]:
    program = shutil.which("loginctl")
    said = _said([program, *question], {}) if program else None
    return {"yes": True, "no": False}.get((said or "").strip())


def _said(argv: Sequence[str], environment: Dict[str, str]) -> Optional[str]:
    """What a command that succeeded wrote."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            timeout=_LIMIT_S,
            universal_newlines=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
