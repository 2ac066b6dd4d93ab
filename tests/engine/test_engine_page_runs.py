"""Every snippet of Python on docs/zero.md runs as it is printed, on two ranks, and does what the page says of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import digest, whole_state
from engine_ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "zero.md"
_FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def _snippets() -> list[str]:
    """Each with as many empty lines before it as make its lines the page's."""
    page = PAGE.read_text(encoding="utf-8")
    return ["\n" * (page.count("\n", 0, found.start()) + 1) + found[1] for found in _FENCE.finditer(page)]


def _state(names: dict[str, Any]) -> str:
    return digest(whole_state(names["zero"]))


def _without_reseeding(names: dict[str, Any]) -> str:
    first, _ = names["zero"].load("checkpoints")
    seeded, torch.manual_seed = torch.manual_seed, lambda seed: None
    try:
        names["train"](first, first + 2)
    finally:
        torch.manual_seed = seeded
    return _state(names)


def _read(rank: int, world: int, folder: str) -> tuple[list[str], list[float]]:
    os.chdir(folder)
    dist.init_process_group = lambda backend: None  # there is one
    names: dict[str, Any] = {"__name__": "page"}
    bits = []
    for number, code in enumerate(_snippets()):
        exec(compile(code, str(PAGE), "exec"), names)
        if number == 0:  # it has saved: what an uninterrupted run comes to
            names["train"](5, 7)
            bits = [_state(names)]
        if "zero.load(" in code:
            bits += [_state(names), _without_reseeding(names)]
    of = names["EngineConfig"].of
    assert of(names["mapping"]) == names["objects"] and of(names["momentum"]) == of(names["same"])
    torch.manual_seed(names["seed"])
    whole, words = names["Words"](), names["words"]
    loss = torch.nn.functional.cross_entropy(whole(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    parameters = [sum(p.numel() for p in whole.parameters()), sum(u.padded for u in names["tensor_zero"].layout.units)]
    assert parameters[1] < 0.7 * parameters[0], "the layers are cut"
    return bits, [float(loss), float(names["split_loss"])]


def test_the_page_runs_as_printed(tmp_path: Path) -> None:
    for bits, losses in run_ranks(2, _read, str(tmp_path)):
        uninterrupted, resumed, without = bits
        assert uninterrupted == resumed, "a resume with dropout, by the page's two lines"
        assert uninterrupted != without
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), "cut layers and whole ones"
    assert (tmp_path / "checkpoints" / "step-00000005" / "manifest.json").exists()
    assert (tmp_path / "whole.pt").exists() and (tmp_path / "step.json").exists()
