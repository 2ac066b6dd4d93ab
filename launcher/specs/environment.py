"""Names and values of environment variables, and which of them the launcher keeps for itself."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from .mistakes import Mistake, raise_together, wrong
from .values import FREEZE, LIST, mapped, text

OWNED = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "NODE_RANK",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
    }
)
OWNED_PREFIXES = ("ZERUN_", "TORCHELASTIC_", "SLURM_NTASKS")


def env_name_problem(name: str) -> str | None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
        return f"{name!r} is not a variable's name; accepted: letters, digits, '_', not beginning with a digit"
    if name in OWNED or name.startswith(OWNED_PREFIXES):
        return f"{name} is set by the launcher and cannot be given"
    return None


def _env(value: Any) -> dict[str, str]:
    given = mapped(value)
    found = []
    for name, content in given.items():
        complaint = env_name_problem(name)
        if complaint:
            found.append(Mistake((name,), complaint, at_key=True))
            continue
        try:
            text(content)
        except PydanticCustomError as problem:
            found.append(Mistake((name,), problem.message()))
    raise_together(found)
    return {str(name): str(content) for name, content in given.items()}


def _secret(value: Any) -> str:
    name = text(value)
    complaint = env_name_problem(name)
    if complaint:
        raise wrong(complaint)
    return name


Env = Annotated[dict[str, str], BeforeValidator(_env), FREEZE]
Secrets = Annotated[tuple[Annotated[str, BeforeValidator(_secret)], ...], LIST]
