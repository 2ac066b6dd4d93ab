"""A plan as plain values, under the names that ``--json`` promises (docs/plan.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..contract.plain import to_plain
from ..contract.simulation import Simulation
from .memory import Count
from .plan import Plan, StatePlan, TableRow

WORLDS = (1, 4, 16, 64, 256, 1024)
"""The world sizes of the ZeRO paper's Table 1."""


def told_plan(plan: Plan) -> dict[str, Any]:
    """Everything about a job's plan. ``peak_bytes`` and ``peak_holds`` are a simulation's, or null."""
    simulation = plan.simulation
    train, topology, judgement, bounds = plan.train, plan.topology, plan.judgement, plan.bounds
    return {
        "job": plan.job_name,
        "cluster": plan.cluster_name,
        "backend": plan.backend,
        "pool": plan.pool,
        "ranks": topology.world_size,
        "nodes": to_plain(plan.nodes),
        "tensor": topology.tensor,
        "data_parallel": topology.data_parallel,
        "replicas": topology.replicas,
        "time_s": plan.time_s,
        "program": to_plain(plan.program),
        "train": to_plain(train),
        "zero_stage": plan.state.chosen,
        "global_batch": plan.global_batch,
        "micro_batch": train.batch.micro if train else None,
        "accumulation": train.batch.accumulation if train else None,
        **told_state(plan.state),
        "step": [
            {"what": s.what, "bytes": s.bytes, "source": s.source, "alive": to_plain(s.alive), "note": s.note}
            for s in plan.step
        ],
        "peak_bytes": simulation.peak_bytes if simulation else None,
        "peak_holds": to_plain(simulation.peak_holds) if simulation else None,
        "simulation": told_simulation(simulation) if simulation else None,
        "communication": None if plan.traffic is None else to_plain(plan.traffic),
        "sent_bytes_per_step": plan.sent_bytes_per_step,
        "bounds_s": {
            "compute": bounds.compute_s if bounds else None,
            "inside": bounds.inside_s if bounds else None,
            "between": bounds.between_s if bounds else None,
            "step": bounds.step_s if bounds else None,
        },
        "bounded_by": bounds.bounded_by if bounds else None,
        "bounds_missing": list(bounds.missing) if bounds else [],
        "flops_per_step": bounds.flops if bounds else None,
        "needs_bytes": judgement.needs_bytes,
        "verdict": judgement.verdict,
        "because": judgement.because,
        "try": " ".join(judgement.best) or None,
        "tried": to_plain(judgement.tried),
        "checkpoint_bytes": plan.disk.checkpoint_bytes if plan.disk else None,
        "checkpoints_at_once": plan.disk.at_once if plan.disk else None,
        "checkpoint_copies": plan.disk.copies if plan.disk else None,
        "disk_bytes": plan.disk.all_bytes if plan.disk else None,
        "not_built": list(plan.not_built),
        "remarks": list(plan.remarks),
    }


def told_simulation(simulation: Simulation) -> dict[str, Any]:
    """Everything but the timeline, which is a picture's."""
    told: dict[str, Any] = to_plain(simulation)
    del told["timeline"]
    return told


def told_state(state: StatePlan) -> dict[str, Any]:
    return {
        "parameters": state.parameters,
        "device_bytes": state.device_bytes,
        "stages": to_plain(state.stages),
        "largest_parameters": list(state.largest) or None,
    }


def told_count(count: Count, state: StatePlan) -> dict[str, Any]:
    """A count without a job: state alone."""
    return {
        "ranks": count.ranks,
        "tensor": count.tensor,
        "precision": count.precision,
        "gradient_dtype": count.gradient_dtype or count.precision,
        "optimizer": count.optimizer,
        "frozen": count.frozen,
        **told_state(state),
        "verdict": state.verdict,
        "because": state.because,
    }


def told_table(rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    return [{"ranks": row.ranks, "stages": to_plain(row.stages)} for row in rows]
