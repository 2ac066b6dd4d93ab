"""Global batch = micro × accumulation × data-parallel ranks: derived one way, kept the other way round.

A job says its global batch, or micro and accumulation. A run that goes on with another number of ranks
keeps the global batch by changing accumulation, so that a step stays the same sum over the same samples.
"""

from __future__ import annotations

from dataclasses import replace

from ..contract.errors import UsageError
from ..contract.train import Batch, TrainConfig
from .reasons import Reason


def derive(
    *, micro: int, accumulation: int | None, global_batch: int | None, data_parallel: int
) -> tuple[Batch, Reason | None]:
    """The batch of one rank. With a reason the returned batch is only a stand-in."""
    if global_batch is None:
        return Batch(micro, accumulation or 1), None
    at_once = micro * data_parallel
    steps, rest = divmod(global_batch, at_once)
    if rest or not steps:
        return Batch(micro, 1), Reason("batch", unreachable(global_batch, micro, data_parallel))
    if accumulation is not None and accumulation != steps:
        made = at_once * accumulation
        message = f"batch: micro {micro} × accumulation {accumulation} × {data_parallel} ranks is {made}"
        return Batch(micro, steps), Reason("batch", f"{message}, not the global batch {global_batch}")
    return Batch(micro, steps), None


def unreachable(global_batch: int, micro: int, data_parallel: int) -> str:
    """Why no accumulation makes the global batch, and what is nearest on both sides."""
    at_once = micro * data_parallel
    below = global_batch // at_once * at_once
    nearest = f"the nearest that are: {below} and {below + at_once}" if below else f"the nearest that is: {at_once}"
    message = (
        f"a global batch of {global_batch} is no multiple of micro {micro} × {data_parallel} data-parallel "
        f"ranks = {at_once}; {nearest}"
    )
    keeps = [m for m in range(1, micro) if global_batch % (m * data_parallel) == 0]
    return message + (f"; or keep it with micro {keeps[-1]}" if keeps else "")


def replan(train: TrainConfig, *, global_batch: int, data_parallel: int) -> TrainConfig:
    """The same training on ``data_parallel`` ranks: the global batch kept by changing accumulation.

    Raises UsageError naming the nearest numbers of data-parallel ranks that can keep it.
    """
    micro = train.batch.micro
    steps, rest = divmod(global_batch, micro * data_parallel)
    if rest or not steps:
        raise UsageError(
            cannot_keep(global_batch, micro, data_parallel),
            hint="resume on a number of ranks that divides the global batch; it is part of what is trained",
        )
    return replace(train, batch=Batch(micro, steps))


def cannot_keep(global_batch: int, micro: int, data_parallel: int, *, ranks_a_node: int | None = None) -> str:
    """Why a run's global batch cannot be kept on this many ranks, and which numbers of ranks can."""
    message = f"the run's global batch {global_batch} cannot be kept on {data_parallel} data-parallel ranks"
    below, above = nearest_ranks(global_batch, micro, data_parallel)
    fit = [_ranks(n, ranks_a_node) for n in (below, above) if n is not None]
    if not fit:
        return f"{message}: it is no multiple of micro {micro}"
    return f"{message} with micro {micro}; the nearest that can: {' and '.join(fit)}"


def nearest_ranks(global_batch: int, micro: int, data_parallel: int) -> tuple[int | None, int | None]:
    """The nearest numbers of ranks below and above that keep the global batch at this micro batch."""
    if global_batch % micro:
        return None, None
    micros = global_batch // micro
    below = next((n for n in range(min(data_parallel, micros), 0, -1) if micros % n == 0), None)
    above = next((n for n in range(data_parallel + 1, micros + 1) if micros % n == 0), None)
    return below, above


def _ranks(count: int, ranks_a_node: int | None) -> str:
    text = "1 rank" if count == 1 else f"{count} ranks"
    if ranks_a_node and count % ranks_a_node == 0:
        nodes = count // ranks_a_node
        return f"{text} ({nodes} node{'s' if nodes > 1 else ''})"
    return text
