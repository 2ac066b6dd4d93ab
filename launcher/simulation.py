"""Starts the engine on nothing, in a process of its own: the launcher itself never loads torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .bundles import runtime_bundle
from .contract.errors import Exit, JobFailed, UsageError
from .contract.plain import PlainError, dumps, from_plain
from .contract.simulation import Simulation, SimulationRequest
from .planning.plan import Plan

_TIMEOUT_S = 900.0


def request_of(plan: Plan, rank: int, code: Path | None, device_kind: str) -> SimulationRequest:
    """Rank ``rank`` of ``plan``. Raises UsageError for a program of the user's own, or a rank that is none."""
    if plan.train is None:
        raise UsageError(
            f"job {plan.job_name} runs a program of its own: there is no engine to simulate",
            hint="--simulate is for jobs with a model",
        )
    if not 0 <= rank < plan.topology.world_size:
        raise UsageError(
            f"rank {rank} is not in a world of {plan.topology.world_size}",
            hint=f"ranks are 0 to {plan.topology.world_size - 1}",
        )
    return SimulationRequest(
        plan.train, rank, plan.topology.slots, device_kind, code=None if code is None else str(code)
    )


def with_its_line(problem: UsageError, job: Path) -> UsageError:
    """The same, beginning with where the job names the function that failed."""
    what, _, rest = problem.message.partition("\n")
    for number, line in enumerate(job.read_text(encoding="utf-8").splitlines(), 1):
        named = line.partition("factory:")[2].strip(" \"'").split(",")[0].strip(" \"'}")
        if named and named in what:
            return UsageError(f"{job}:{number}: {what}\n{rest}", hint=problem.hint)
    return problem


def run_simulation(request: SimulationRequest, env: Mapping[str, str]) -> Simulation:
    """What the engine process answers; ``env`` is the job's own. Its words go to stderr as they come.

    ``ZERUN_TORCH_PYTHON`` names a Python that has torch, where the one that runs this has none.
    """
    python = os.environ.get("ZERUN_TORCH_PYTHON") or sys.executable
    with tempfile.TemporaryDirectory(prefix="zerun-simulate-") as folder:
        runtime = Path(folder) / "runtime.zip"
        runtime.write_bytes(runtime_bundle().data)
        try:
            done = subprocess.run(
                [python, str(runtime), "simulate"],
                input=dumps(request),
                capture_output=True,
                env={**os.environ, **env},
                timeout=_TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError as problem:
            raise UsageError(f"ZERUN_TORCH_PYTHON: {python} is not there") from problem
        except subprocess.TimeoutExpired as problem:
            raise JobFailed(f"the simulation took longer than {_TIMEOUT_S:.0f} s and was ended") from problem
    return _answer(done)


def _answer(done: subprocess.CompletedProcess[bytes]) -> Simulation:
    words = done.stderr.decode(errors="replace").strip()
    try:
        answer = json.loads(done.stdout)
        if isinstance(answer, dict) and "error" in answer:
            kind = UsageError if done.returncode == int(Exit.USAGE) else JobFailed
            raise kind(str(answer["error"]), hint=answer.get("hint"))
        return from_plain(Simulation, answer)
    except (ValueError, PlainError) as problem:
        killed = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        last = "\n".join(words.splitlines()[-12:])
        raise JobFailed(f"the simulation ended with {killed} and no answer:\n{last}") from problem
