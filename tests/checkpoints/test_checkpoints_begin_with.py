"""A job's weights are looked at where they lie, before the job queues: real headers, read by the agent's verb."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_places import local_backend
from written import launch

from launcher.attempts.begin_with import check_weights
from launcher.contract.errors import UsageError
from launcher.contract.partition import gpt_parameters
from launcher.contract.weights import Tensor, lay_out


def _write(folder: Path, hidden: int, *, most_bytes: int = 2000, tag: str = "F32") -> None:
    folder.mkdir(parents=True)
    tensors = [Tensor(p.name, tag, p.shape) for _, row in gpt_parameters(1, hidden, 8, 16) for p in row]
    files, index = lay_out(tensors, most_bytes)
    for file in files:
        with open(folder / file.name, "wb") as out:
            out.write(file.header)
            out.truncate(file.size)
    if index is not None:
        (folder / "model.safetensors.index.json").write_bytes(index)


def test_weights_are_looked_at_on_every_node_before_the_job_queues(tmp_path: Path) -> None:
    backend = local_backend(tmp_path / "cluster", ["node01", "node02", "node03"])
    spec = launch("/x", ["node01", "node02"], 2, shared=False)
    assert spec.train is not None

    def check(weights: str | None) -> list[str]:
        plan: Any = SimpleNamespace(train=replace(spec.train, weights=weights), nodes=spec.nodes)  # type: ignore[type-var]
        code: Any = SimpleNamespace(root=str(tmp_path), holds=lambda path: "lost" not in path)
        return check_weights(backend, plan, code)  # type: ignore[arg-type]

    assert check(None) == []
    _write(tmp_path / "fits", 8)
    assert len(list((tmp_path / "fits").iterdir())) > 2
    for name in (str(tmp_path / "fits"), "fits"):
        assert check(name) == [f"weights: 16 tensors in {name}"]
    _write(tmp_path / "wide", 16)
    with pytest.raises(
        UsageError, match=r"on node01 are not this model's:\n(.*\n)*  shape       embedding.weight: \[16, 16\]"
    ):
        check(str(tmp_path / "wide"))
    (tmp_path / "fits" / "model-00001-of-00002.safetensors").unlink(missing_ok=True)
    sorted((tmp_path / "fits").glob("*.safetensors"))[0].unlink()
    with pytest.raises(UsageError, match=r"of model.safetensors.index.json is missing"):
        check(str(tmp_path / "fits"))
    _write(tmp_path / "quantized", 8, tag="I32")
    with pytest.raises(UsageError, match=r"dtype       embedding\.weight: I32 there, floating point in the model"):
        check(str(tmp_path / "quantized"))
    _write(tmp_path / "lost", 8)
    with pytest.raises(UsageError, match="is not in the code that is shipped"):
        check("lost")
