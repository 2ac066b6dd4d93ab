"""The verb ``runs`` over folders of others: whatever stands in them, the answer has the shape that was agreed on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.agent.listing import runs


@pytest.mark.parametrize("agent", [{"pid": "x", "started_ticks": 1, "boot": ""}, {"pid": 1}, {}, [], None, "x"])
def test_an_agent_that_is_none_is_left_out(tmp_path: Path, agent: object) -> None:
    nodes = tmp_path / "evil" / "attempts" / "1" / "nodes"
    nodes.mkdir(parents=True)
    (nodes / "n1.json").write_text(json.dumps({"node": "n1", "agent": agent}))
    own = {"pid": 5, "started_ticks": 1, "boot": ""}
    (nodes / "n2.json").write_text(json.dumps({"node": "n2", "agent": own}))
    (nodes / "n3.json").write_text("[]")
    (run,) = runs({"runs": str(tmp_path), "written": str(tmp_path)})["runs"]
    assert run["attempts"]["1"]["agents"] == {"n2": own}
