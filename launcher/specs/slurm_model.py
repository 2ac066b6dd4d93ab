"""What is said to Slurm itself: where its login node is, and the options of a submission."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from . import values
from .description import Description
from .mistakes import Mistake, raise_together
from .values import FREEZE, Flag, Word, choice

Via = Annotated[Literal["fabric", "openssh"], choice("fabric", "openssh")]


class Login(Description):
    """The Slurm login node; left out where zerun runs on it."""

    host: values.Address
    user: values.User | None = None
    port: values.Port | None = None
    via: Via = "fabric"


# What the launcher sets itself, and where its value comes from.
OWNED_OPTIONS: Mapping[str, str] = {
    "account": "slurm.account",
    "array": "",
    "chdir": "",
    "constraint": "slurm.constraint",
    "cpus-per-task": "nodes.cpus_per_slot",
    "error": "",
    "exclusive": "slurm.exclusive",
    "export": "env",
    "export-file": "env",
    "gpus-per-node": "slurm.gpus_by",
    "gres": "slurm.gpus_by",
    "help": "",
    "input": "",
    "job-name": "the job's name",
    "mem": "nodes.memory_per_slot",
    "no-requeue": "",
    "nodes": "the job's nodes",
    "ntasks": "",
    "ntasks-per-node": "",
    "open-mode": "",
    "output": "",
    "parsable": "",
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "quiet": "",
    "requeue": "",
    "reservation": "slurm.reservation",
    "signal": "",
    "test-only": "",
    "time": "the job's time",
    "usage": "",
    "verbose": "",
    "version": "",
    "wait": "",
    "wrap": "",
}


def _extra(value: Any) -> dict[str, str | None]:
    given = values.mapped(value)
    raise_together(m for m in (_extra_mistake(name, v) for name, v in given.items()) if m)
    return {str(k): None if v is None else str(v) for k, v in given.items()}


def _extra_mistake(name: str, value: Any) -> Mistake | None:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name, re.ASCII):
        return Mistake(
            (name,), f"{name!r} is not an option of sbatch; accepted: names like mail-type, without '--'", True
        )
    # sbatch takes any unambiguous beginning of an option for the option itself.
    owned = name if name in OWNED_OPTIONS else next((o for o in OWNED_OPTIONS if o.startswith(name)), None)
    if owned is not None:
        instead = OWNED_OPTIONS[owned]
        return Mistake(
            (name,), f"option {name!r} is set by the launcher" + (f"; write {instead}" if instead else ""), True
        )
    if value is not None:
        try:
            values.line(value)
        except PydanticCustomError as problem:
            return Mistake((name,), problem.message())
    return None


class SlurmOptions(Description):
    """What a submission asks Slurm for: of a cluster under ``slurm``, of each pool where there are pools."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    reservation: Word | None = None
    exclusive: Flag = False
    gpus_by: Annotated[Literal["gres", "gpus-per-node", "none"], choice("gres", "gpus-per-node", "none")] = "none"
    gpu_type: Word | None = None


SLURM_KEYS = tuple(SlurmOptions.model_fields)


class Slurm(SlurmOptions):
    extra: Annotated[dict[str, str | None], BeforeValidator(_extra), FREEZE] = Field(
        default_factory=lambda: values.freeze({}),
        description="any other sbatch option; null: one without a value",
    )

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if "gpu_type" in given and given.get("gpus_by", "none") == "none":
            yield Mistake(("gpu_type",), "gpu_type needs gpus_by: gres or gpus_by: gpus-per-node")
