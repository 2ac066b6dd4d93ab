"""Checkpoints exported and started from: the bytes that training had, whatever cut them, read by others' readers."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import batches, engine_of, gpt, odd, train, whole_state
from engine_ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

from launcher.app.keeping import collect_weights
from launcher.checkpoints import Collected
from launcher.checkpoints.convert import export_dcp
from launcher.checkpoints.export import Wish, converted, export
from launcher.contract.errors import NoSpace, Refused, UsageError, VerificationFailed
from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.ranks import Ranks
from launcher.engine.saving.convert import from_torch
from launcher.engine.tensor.gpt import TensorGPT
from launcher.engine.tensor.layers import joined, split_of
from launcher.engine.zero import ZeroEngine
from launcher.runs import Event, Run
from launcher.runs.locks import hold

CONFIG = GPTConfig(layers=2, hidden=16, heads=4, seq_len=7, vocab=37)


def _keep(rank: int, folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """Not through a pipe: tensors travel there as handles that die with their process."""
    if rank == 0:
        save_file({n: t.contiguous() for n, t in tensors.items()}, f"{folder}.expected")


def _trained(rank: int, world: int, name: str, stage: int, folder: str, precision: str) -> None:
    engine = ZeroEngine(
        gpt() if name == "gpt" else odd(), EngineConfig(Zero(stage, 1000), AdamW(lr=1e-2), precision=precision)
    )
    train(engine, batches(1, 2 * world, 37 if name == "gpt" else 13))
    for buffer in engine.model.buffers():
        buffer += 1.5
    engine.save(folder, 7)
    _keep(rank, folder, {**whole_state(engine), **{n: b.clone() for n, b in engine.model.named_buffers()}})


def _trained_tensor(rank: int, world: int, folder: str) -> None:
    ranks = Ranks.connect(2)
    torch.manual_seed(3)
    engine = ZeroEngine(TensorGPT(CONFIG, ranks.tensor), EngineConfig(Zero(3, 900), AdamW(lr=1e-2)), ranks=ranks)
    batch = batches(1, 2, 37)[0]
    engine.backward(engine.model(batch[:, :-1], batch[:, 1:]))
    engine.step()
    engine.save(folder, 7)
    with engine.gathered():
        whole = {
            n: p.detach().clone() if split_of(p) is None else joined(p, split_of(p), ranks.tensor)  # type: ignore[arg-type]
            for n, p in engine.model.named_parameters()
        }
    _keep(rank, folder, whole)


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_an_export_is_what_training_had_to_the_byte(tmp_path: Path) -> None:
    """Stage 3 on 3 ranks with everything odd: tied, frozen, a scalar, a buffer; in many files and in one."""
    run_ranks(3, _trained, "odd", 3, str(tmp_path / "c"), "fp32")
    expected = load_file(f"{tmp_path}/c.expected")
    said: list[str] = []
    made = export(tmp_path / "c/step-00000007", tmp_path / "many", Wish(most_bytes=500), said.append)
    assert "free there" in said[0] and made.step == 7
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == expected.keys() and set(index["weight_map"].values()) == set(made.files)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
    found = {}
    for file in made.files:
        found.update(load_file(tmp_path / "many" / file))
        biggest = max(t.numel() * t.element_size() for t in load_file(tmp_path / "many" / file).values())
        assert (tmp_path / "many" / file).stat().st_size < max(500, biggest) + 1000
    _same(found, expected)
    export(tmp_path / "c/step-00000007", tmp_path / "one", Wish())
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "one/model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "table.weight"}
    model = odd()
    load_model(model, tmp_path / "one/model.safetensors")  # safetensors' own way of tied weights
    _same(dict(model.state_dict()), {**expected, "head.weight": expected["table.weight"]})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "c.expected", "many", "one"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensor_cuts_and_padded_words_are_undone_and_dcp_reads_back(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    run_ranks(4, _trained_tensor, str(tmp_path / "c"))
    expected = load_file(f"{tmp_path}/c.expected")
    assert expected["embedding.weight"].shape == (37, 16)
    export(tmp_path / "c/step-00000007", tmp_path / "plain", Wish())
    _same(load_file(tmp_path / "plain/model.safetensors"), expected)
    made = export_dcp(tmp_path / "c/step-00000007", tmp_path / "dcp", Wish(), lambda _: None)
    assert (
        made.form == "dcp"
        and ".metadata" in made.files
        and sorted(made.files) == sorted(p.name for p in (tmp_path / "dcp").iterdir())
    )
    found = {name: torch.full_like(value, float("nan")) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    _same(found, expected)


def test_16_bits(tmp_path: Path) -> None:
    """The master as it is, or rounded to what the ranks computed with."""
    run_ranks(2, _trained, "gpt", 2, str(tmp_path / "c"), "bf16")
    expected = load_file(f"{tmp_path}/c.expected")
    step = tmp_path / "c/step-00000007"
    export(step, tmp_path / "bf16", Wish("bf16"))
    _same(load_file(tmp_path / "bf16/model.safetensors"), expected)
    export(step, tmp_path / "own", Wish())
    own = load_file(tmp_path / "own/model.safetensors")
    assert {t.dtype for t in own.values()} == {torch.float32}
    assert any(not torch.equal(own[n], v.float()) for n, v in expected.items())
    _same({n: t.to(torch.bfloat16) for n, t in own.items()}, expected)
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-45, 1.00390625, 1.01171875]
    )
    bits = torch.cat(
        [special, torch.randn(5000), torch.randint(-(2**31), 2**31, (5000,)).to(torch.int32).view(torch.float32)]
    )
    made = torch.frombuffer(bytearray(converted(bits.numpy().tobytes(), "F32", "BF16")), dtype=torch.bfloat16)
    right = bits.to(torch.bfloat16)
    assert torch.equal(made.isnan(), right.isnan())
    assert torch.equal(made[~made.isnan()].view(torch.int16), right[~right.isnan()].view(torch.int16))


def _one(folder: Path) -> Path:
    engine = engine_of("gpt", stage=0)
    return engine.save(folder, 5)


def test_damage_and_a_full_disk_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = _one(tmp_path / "c")
    shard = step / "rank-00000.safetensors"
    whole = shard.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    shard.write_bytes(damaged)
    for form in (export, export_dcp):
        with pytest.raises(
            VerificationFailed, match=r"rank 0's shard .*rank-00000.safetensors .*block 0 of 1 is damaged"
        ):
            form(step, tmp_path / "out", Wish(), lambda _: None)
    shard.write_bytes(whole)
    # A digit of the manifest that makes another model of the same shard.
    about = (step / "manifest.json").read_bytes()
    value = json.loads(about)
    value["layout"]["units"][0]["parameters"][0]["shape"][0] -= 1
    (step / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(VerificationFailed, match="by the manifest beside it"):
        export(step, tmp_path / "out", Wish())
    (step / "manifest.json").write_bytes(about)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").touch()
    with pytest.raises(Refused, match="there already"):
        export(step, tmp_path / "full", Wish())
    real = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: real._replace(free=2**26))
        with pytest.raises(NoSpace, match="are to be written"):
            export(step, tmp_path / "out", Wish())

    def slower(_: str) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/model.safetensors").touch()

    with pytest.raises(Refused, match="there already"):  # two exports at once to one folder
        export(step, tmp_path / "out", Wish(), slower)
    shutil.rmtree(tmp_path / "out")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            export(step, tmp_path / "out", Wish())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "full"]


def test_a_torch_file_becomes_safetensors_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    model = odd()
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": t for n, t in model.state_dict().items()}}, tmp_path / "m.pt")
    (tmp_path / "out").mkdir()
    made = from_torch(tmp_path / "m.pt", tmp_path / "out", 10**9)
    assert made["prefix"] == "module." and made["tensors"] == len(model.state_dict()) - 1  # the tied one once
    again = odd()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    load_model(again, tmp_path / "out/model.safetensors")
    _same(dict(again.state_dict()), dict(model.state_dict()))

    # A transpose lies in the bytes of its original, in another order; it is neither tied to it nor lost.
    square = torch.arange(40_000.0).view(200, 200)
    views = {"a": square, "b": square.t(), "c": square[::2, 1:], "d": square, "e": torch.tensor(3.0)}
    torch.save(views, tmp_path / "views.pt")
    (tmp_path / "views").mkdir()
    assert from_torch(tmp_path / "views.pt", tmp_path / "views", 10**9)["tensors"] == 4
    found = load_file(tmp_path / "views/model.safetensors")
    assert all(torch.equal(found[name], views[name]) for name in "abce")
    for odd_one, kind, said in [
        ({"a": torch.eye(2).to_sparse()}, UsageError, "only dense"),
        ({"a": torch.empty(2, device="meta")}, UsageError, "device meta"),
        ({1: torch.zeros(1), "1": torch.ones(1)}, UsageError, "equal as text"),
        ({"__metadata__": torch.zeros(1)}, UsageError, "is no name"),
        ({"\ud800": torch.zeros(1)}, UsageError, "is no name"),
        ({"a": torch.zeros(1).expand(10**14)}, NoSpace, "are free"),
    ]:
        torch.save(odd_one, tmp_path / "odd.pt")
        with pytest.raises(kind, match=said):
            from_torch(tmp_path / "odd.pt", tmp_path / "views", 10**9)

    torch.save({"weight": torch.zeros(1), "trap": Trap(tmp_path)}, tmp_path / "trap.pt")
    with pytest.raises(UsageError, match="cannot be read as plain tensors: it holds more than tensors"):
        from_torch(tmp_path / "trap.pt", tmp_path / "out", 10**9)
    assert not (tmp_path / "run").exists()
    torch.save({"a": torch.zeros(1), "b": 3}, tmp_path / "odd.pt")
    with pytest.raises(UsageError, match="b is a int"):
        from_torch(tmp_path / "odd.pt", tmp_path / "out", 10**9)


def test_collected_weights_stay_until_newer_ones_are_whole(tmp_path: Path) -> None:
    """A collect of weights that fails, or meets another collect, takes nothing away."""
    run = tmp_path / "job-1"
    step = _one(run / "checkpoints")
    events: list[Event] = []

    class Brought:
        """The app's part in it: the shards are there once it was asked."""

        class store:
            @staticmethod
            def load(name: str) -> Run:
                return Run(run, {}, tuple(events))

        @staticmethod
        def collect(*_: object) -> Collected:
            if not step.exists():
                (run / "away").rename(step)
            events.append(Event(0.0, "collected", 1, {"checkpoint": 5}))
            return Collected("job-1", str(run), 5, str(step), 0, 0, 0, 0, 1)

    app: Any = Brought()
    kept = run / "weights/step-00000005"
    assert collect_weights(app, "job-1", "newest", lambda _: None)[1] is not None and step.exists()
    before = (kept / "model.safetensors").read_bytes()
    damaged = bytearray((step / "rank-00000.safetensors").read_bytes())
    damaged[-1] ^= 1
    whole = bytes((step / "rank-00000.safetensors").read_bytes())
    (step / "rank-00000.safetensors").write_bytes(damaged)
    kept.rename(run / "weights/.step-00000005.old")  # as a kill between two renames leaves it
    with pytest.raises(VerificationFailed):
        collect_weights(app, "job-1", "newest", lambda _: None)
    assert (kept / "model.safetensors").read_bytes() == before
    (step / "rank-00000.safetensors").write_bytes(whole)

    with hold(run / ".weighing"), pytest.raises(UsageError, match="by another command"):
        collect_weights(app, "job-1", "newest", lambda _: None)
    step.rename(run / "away")

    def meanwhile(_: str) -> None:
        events.append(Event(0.0, "collected", 1, {"checkpoint": 5}))

    got, made = collect_weights(app, "job-1", "newest", meanwhile)
    assert made is not None and made.folder == str(kept) and step.exists() and got.checkpoint
    step.rename(run / "away")
    assert collect_weights(app, "job-1", "newest", lambda _: None)[0].checkpoint is None and not step.exists()
    assert sorted(p.name for p in (run / "weights").iterdir()) == [kept.name]


class Trap:
    """What an unpickler that runs code falls into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.folder}/run",))
