"""What a person is told to do next about checkpoints."""

from __future__ import annotations

from typing import Any

from launcher.cli.state_text import next_steps
from launcher.runs import RunState
from launcher.runs.diagnosis import Cause


def _state(**more: Any) -> RunState:
    return RunState(**{"run": "r", "job": "j", "cluster": "laptop", "attempt": 1, "nodes": ("localhost",), **more})


def test_a_program_that_kept_nothing_has_nothing_to_verify() -> None:
    assert next_steps(_state(state="done")) == ["zerun logs r"]
    assert next_steps(_state(state="done", checkpoints=(4, 8))) == ["zerun ckpt verify r"]


def test_a_refused_checkpoint_is_not_suggested_again() -> None:
    """The damaged one is no longer among the whole ones: the newest other one is named."""
    lines = ("rank 1: shard …/step-00000008/rank-00001.safetensors of rank 1: block 0 is damaged",)
    refused = Cause("rank", "localhost", rank=1, exit_code=7, last_lines=lines)
    assert next_steps(_state(state="failed", cause=refused, checkpoints=(4, 6)))[-1] == "zerun resume r --step 6"
    assert next_steps(_state(state="failed", cause=refused))[-1] == "zerun ckpt ls r"
    own = Cause("rank", "localhost", rank=1, exit_code=7, last_lines=("a program's own 7",))
    assert next_steps(_state(state="failed", cause=own, checkpoints=(4,)))[-1] == "zerun resume r"
