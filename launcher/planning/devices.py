"""What a device can hold and compute, as far as its description and its name say."""

from __future__ import annotations

import re

from ..specs.models import Cluster, Job
from .reasons import Reason

# bf16 arithmetic came with compute capability 8.0; these are the widespread names from before it.
_BEFORE_BF16 = re.compile(
    r"(?<![A-Za-z0-9])(?:[VP]100|P40|P4|T4|[KM][0-9]{2}|GTX|TITAN|RTX[ _-]?20[0-9]{2}|Quadro[ _-]RTX)(?![0-9])",
    re.IGNORECASE,
)


def device_bytes(cluster: Cluster) -> int | None:
    """What a rank may own: the device's memory less its reserve; for CPUs the memory a slot is given.

    None when the description says neither.
    """
    device = cluster.device
    if device.memory is not None:
        return device.memory - device.reserve
    if device.kind == "cpu":
        memory = cluster.memory_per_slot
        return None if memory is None else memory - device.reserve
    return None


def check_precision(job: Job, cluster: Cluster) -> list[Reason]:
    """A description's own ``precisions`` decide; where it lists none, the name of the model may tell."""
    device = cluster.device
    if job.model is None:
        return []
    if device.computes(job.precision):
        known = device.precisions is not None or job.precision != "bf16"
        if known or not _BEFORE_BF16.search(device.model or ""):
            return []
    works = device.precisions or ("fp32", "fp16")
    message = f"precision {job.precision} is not supported by the device {device.model or device.kind}"
    return [Reason("precision", message, f"precision: {' or '.join(works)}")]


def not_built(job: Job) -> tuple[str, ...]:
    """What can be planned, but not trained by the engine as it is: ``submit`` refuses these by name."""
    if job.model is None or job.zero is None or job.zero.gradient_dtype in ("fp32", job.precision):
        return ()
    dtype = job.zero.gradient_dtype
    return (f"zero.gradient_dtype: {dtype} is planned, but at precision {job.precision} the engine sums in fp32 only",)
