"""A simulated step taken into a plan: its lines instead of arithmetic's, and the verdict that follows."""

from __future__ import annotations

from dataclasses import replace

from ..contract.simulation import Simulation
from .memory import readable
from .plan import Alive, Plan, StepLine
from .step import SLACK_PER_MILLE
from .verdict import judge

NAMES = {
    "gathered": "gathered parameters",
    "buckets": "communication buckets",
    "norm": "norm of the gradient",
    "recomputed": "activations computed again",
}
_KEPT = {"parameters", "gradients", "optimizer", "buckets", "norm"}  # allocated once, so that nothing is lost to holes


def with_simulation(plan: Plan, simulation: Simulation) -> Plan:
    """``plan`` with what ``simulation`` saw. The three moments of a line are those of the largest total in forward,
    in backward and in the update, so that they add up to the three peaks."""
    lines = tuple(step_lines(simulation))
    state = plan.state
    if state.parameters is None:
        state = replace(state, parameters=simulation.parameters)
    return replace(plan, state=state, step=lines, simulation=simulation, judgement=judge(state, lines))


def step_lines(simulation: Simulation) -> list[StepLine]:
    held = {peak.phase: {h.what: h.bytes for h in peak.holds} for peak in simulation.peaks}
    lines = []
    for what in simulation.timeline.categories:
        forward, backward, update = (held.get(phase, {}).get(what, 0) for phase in ("forward", "backward", "update"))
        alive = Alive(forward, backward, update)
        lines.append(StepLine.of(NAMES.get(what, what), alive, "simulated"))
    return [line for line in lines if line.bytes] + [_slack(simulation, held)]


def _slack(simulation: Simulation, held: dict[str, dict[str, int]]) -> StepLine:
    def part(phase: str) -> int:
        return sum(n for what, n in held.get(phase, {}).items() if what not in _KEPT) * SLACK_PER_MILLE // 1000

    note = f"{SLACK_PER_MILLE / 10:g} % of what comes and goes; {'; '.join(simulation.assumed)}"
    return StepLine.of("allocator slack", Alive(part("forward"), part("backward"), part("update")), "assumed", note)


def sentence(simulation: Simulation) -> str:
    """One line for whoever asks what was simulated."""
    kinds = {"peer": "messages as the engine sends them over gloo", "native": "the library's collectives"}
    how = kinds.get(simulation.collectives, "no communication")
    return (
        f"rank {simulation.rank} of {simulation.world_size}, {how}: at most {readable(simulation.peak_bytes)} "
        f"({simulation.peak_bytes:,} bytes), in {simulation.peak_phase}; simulated in {simulation.took_s:.1f} s"
    )
