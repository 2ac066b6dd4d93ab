"""P_a and P_a+cpu: bits as without, bytes as the arithmetic says, one all-gather a block."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from engine_models import batches, digest
from engine_ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from launcher.contract.errors import UsageError
from launcher.contract.train import GPT as GPTConfig
from launcher.engine.activations.lane import Lane
from launcher.engine.activations.recompute import recompute
from launcher.engine.activations.stored import Rows, Store
from launcher.engine.comm import Alone, connect, ending
from launcher.engine.tensor.gpt import TensorGPT

CONFIG = GPTConfig(layers=3, hidden=16, heads=4, seq_len=9, vocab=37, dropout=0.2)
STREAM = 3 * 9 * 16  # elements of a block's input


class Live(TorchDispatchMode):
    """Bytes of the storages that were made inside and still live: shares no code with the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in given and key not in self._known:
                    self._known.add(key)
                    self.bytes += size
                    self.most = max(self.most, self.bytes)
                    weakref.finalize(storage, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def _model(comm: Any, kind: str, which: Any = "block") -> tuple[TensorGPT, Store | None]:
    torch.manual_seed(3)
    model = TensorGPT(CONFIG, comm)
    count = CONFIG.layers if which == "block" else len(which)
    store = None
    if kind in ("partitioned", "host"):
        store = Store(comm, blocks=count, device=torch.device("cpu"), host=kind == "host")
    if kind != "none":
        recompute(model, which, store)
    return model, store


def _train(model: TensorGPT, live: Live | None = None) -> tuple[str, list[int]]:
    """Gradients of three micro-steps, and what lived after each forward."""
    seen = []
    for number, batch in enumerate(batches(3, 3, 37, length=9)):
        torch.manual_seed(number)
        before = live.bytes if live else 0
        loss = model(batch[:, :-1], batch[:, 1:])
        ending.wait_until_at_rest(30.0)  # gloo's thread may hold a small message a moment longer
        seen.append(live.bytes - before if live else 0)
        loss.backward()
        del loss
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return digest(found), seen


def _bits(rank: int, world: int) -> None:
    comm = connect()
    expected = None
    volume: dict[str, int] = {}
    for kind in ("none", "whole", "partitioned", "host"):
        for which in ("block", (0, 2)):
            model, store = _model(comm, kind, which)
            before = comm.traffic.volume_elements
            bits, _ = _train(model)
            expected = expected or bits
            assert bits == expected, (kind, which)
            volume[f"{kind} {which}"] = comm.traffic.volume_elements - before
            if store is not None:
                assert store.rows.allocations == 1, "one buffer, made once"
                blocks = 3 if which == "block" else 2
                assert store.rows.bytes == blocks * -(-STREAM // world) * 4
    # The sums of the blocks are computed again (the last one of a block too: dropout follows it), three times.
    assert volume["whole block"] - volume["none block"] == 3 * CONFIG.layers * 2 * 2 * STREAM
    for kind in ("partitioned", "host"):
        for which, blocks in (("block", 3), ((0, 2), 2)):
            more = volume[f"{kind} {which}"] - volume[f"whole {which}"]
            assert more == 3 * blocks * -(-STREAM // world) * world, "one all-gather a block and micro-step"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_what_is_stored_where_changes_no_bit(world: int) -> None:
    run_ranks(world, _bits)


def _memory(rank: int, world: int) -> None:
    comm = connect(passing=True)
    found = {}
    gc.disable()  # nothing may need the collector
    try:
        for kind in ("none", "whole", "partitioned", "host"):
            model, store = _model(comm, kind)
            live = Live()
            with live:
                _train(model)  # rows are made, gradients too
                _, seen = _train(model, live)
            found[kind] = min(seen) + (store.rows.bytes if store else 0)
    finally:
        gc.enable()
    part = -(-STREAM // world)
    assert found["none"] > found["whole"] + 3 * 10 * STREAM * 4
    assert found["whole"] - found["partitioned"] == 3 * (STREAM - part) * 4, "1/T of every block's input"
    assert found["host"] == found["partitioned"]  # the same bytes; on a GPU they are elsewhere


def test_stored_bytes_follow_the_arithmetic() -> None:
    run_ranks(2, _memory)


def test_host_memory_without_a_tensor_group() -> None:
    expected, _ = _train(_model(Alone(), "none")[0])
    model, store = _model(Alone(), "host")
    assert _train(model)[0] == expected
    assert store is not None and store.rows.bytes == 3 * STREAM * 4


# --- copies beside what is computed ---------------------------------------------------------------------------


@dataclasses.dataclass
class _Asked:
    """A copy that was asked for; its source only by a weak reference, unless it is ``held``."""

    target: Tensor
    source: tuple[Any, int, int]  # storage, weakly; offset, elements
    was: Tensor
    from_device: bool = False
    held: Tensor | None = None

    def make(self) -> None:
        storage, offset, numel = self.source
        assert storage() is not None, "memory was given away before it was copied"
        source = torch.empty(0, dtype=self.was.dtype).set_(storage(), offset, (numel,))
        assert not self.from_device or torch.equal(source, self.was), "memory was written before it was copied"
        self.target.copy_(source)


class _Slow(Lane):
    """A lane whose copies are made as late as its rules allow: when computation waits for them."""

    pinned = False

    def __init__(self, log: list[str] | None = None, *, holds: bool = True) -> None:
        super().__init__(torch.device("cpu"))
        self.log = [] if log is None else log
        self.holds = holds
        self._asked: list[_Asked] = []

    def _made(self) -> None:
        return None

    def _wait_for_computation(self) -> None:
        self.log.append("lane waits")

    def _start(self, target: Tensor, source: Tensor) -> None:
        self.log.append("copy")
        place = (weakref.ref(source.untyped_storage()), source.storage_offset(), source.numel())
        self._asked.append(_Asked(target, place, source.clone()))

    def _hold(self, on_device: Tensor) -> None:
        asked = self._asked[-1]
        asked.from_device = on_device is not asked.target
        asked.held = on_device if self.holds else None

    def _computation_waits(self) -> None:
        self.log.append("computation waits")
        for asked in self._asked:
            asked.make()
        self._asked = []


class _Quick(_Slow):
    """A lane whose copies are made at once, so that nothing has to be held."""

    def _start(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def _hold(self, on_device: Tensor) -> None:
        pass


def _beside(lane: Lane, layers: int = 3, log: list[str] | None = None) -> TensorGPT:
    torch.manual_seed(3)
    model = TensorGPT(dataclasses.replace(CONFIG, layers=layers), Alone())
    for number, block in enumerate(model.blocks if log is not None else ()):
        block.forward = _told(block.forward, f"block {number}", log)
    recompute(model, "block", Store(Alone(), blocks=layers, device=torch.device("cpu"), host=True, lane=lane))
    return model


def _told(forward: Any, name: str, log: Any) -> Any:
    def told(*given: Any) -> Any:
        log.append(name)
        return forward(*given)

    return told


@pytest.mark.parametrize("kind", [_Slow, _Quick])
def test_copies_may_be_made_at_any_moment_that_the_lane_allows(kind: type[_Slow]) -> None:
    expected, _ = _train(_model(Alone(), "none")[0])
    model = _beside(kind())
    (batch,) = batches(1, 3, 37, length=9, seed=1)
    model(batch[:, :-1], batch[:, 1:])  # never backward: its rows are taken anew while their copies are under way
    gc.collect()
    assert _train(model)[0] == expected


def test_a_lane_that_does_not_hold_memory_is_seen() -> None:
    with pytest.raises(AssertionError, match="given away before it was copied"):
        _train(_beside(_Slow(holds=False)))


def test_the_next_input_comes_back_while_a_block_is_computed_again() -> None:
    log: list[str] = []
    model = _beside(_Slow(log), log=log)
    (batch,) = batches(1, 3, 37, length=9)
    loss = model(batch[:, :-1], batch[:, 1:])
    away = ["lane waits", "copy"]
    assert log == [*away, "block 0", *away, "block 1", *away, "block 2"]
    log.clear()
    loss.backward()
    assert log == [
        *("lane waits", "copy", "computation waits"),  # block 2's own: there was nothing to overlap it with
        *("lane waits", "copy", "block 2"),  # block 1's is under way
        *("computation waits", "lane waits", "copy", "block 1"),
        *("computation waits", "block 0"),
    ]


def _standing_and_peak(kind: str, layers: int) -> tuple[int, int]:
    """Bytes after forward, and at most until the end of backward, of memory that is not the host's: of inputs that are
    kept as they are (``whole``), moved to the host, or copied into ``rows`` of one buffer."""
    torch.manual_seed(3)
    model = TensorGPT(dataclasses.replace(CONFIG, layers=layers), Alone())
    store, cpu = None, torch.device("cpu")
    if kind != "whole":
        lane = _Quick() if kind == "host" else None
        store = Store(Alone(), blocks=layers, device=cpu, host=kind == "host", lane=lane)
    recompute(model, "block", store)
    _train(model)  # rows are made, gradients too
    live = Live()
    (batch,) = batches(1, 3, 37, length=9)
    with live:
        loss = model(batch[:, :-1], batch[:, 1:])
        standing = live.bytes
        live.most = 0
        loss.backward()
    rows = store.rows.bytes if store is not None and kind == "rows" else 0
    return standing + rows, live.most + rows


def test_blocks_inputs_are_away_but_for_two() -> None:
    gc.disable()  # nothing may need the collector
    try:
        whole, host, rows = (_standing_and_peak(kind, 6) for kind in ("whole", "host", "rows"))
    finally:
        gc.enable()
    assert whole[0] - host[0] == 6 * STREAM * 4
    assert whole[1] - host[1] == (6 - 2) * STREAM * 4
    # Why plain recomputation keeps what it was given: constant addresses would cost a copy and one input more.
    assert rows[0] == whole[0] and rows[1] - whole[1] == STREAM * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: host memory is not pinned, copies not async")
def test_host_memory_of_a_gpu() -> None:
    """Against recomputation with whole inputs: all of them are away after forward, all but two in backward."""
    device, layers, length = torch.device("cuda", 0), 6, 256
    each = 8 * length * 256 * 4
    gradients, standing, peaks = [], [], []
    for kind in ("whole", "host"):
        torch.manual_seed(3)
        model = TensorGPT(dataclasses.replace(CONFIG, layers=layers, hidden=256, seq_len=length), Alone()).to(device)
        recompute(model, "block", Store(Alone(), blocks=layers, device=device, host=True) if kind == "host" else None)
        for number, batch in enumerate(batches(3, 8, 37, length=length)):
            torch.manual_seed(number)
            words = batch.to(device)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            loss = model(words[:, :-1], words[:, 1:])
            after = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            torch.cuda.synchronize()
            peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
            del loss
        gradients.append({n: p.grad for n, p in model.named_parameters()})
        standing.append(after)
        peaks.append(peak)
        del model
    for name, gradient in gradients[0].items():
        assert gradient is not None and torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-6), name
    assert standing[0] - standing[1] == layers * each
    assert abs(peaks[0] - peaks[1] - (layers - 2) * each) <= each // 2


def test_a_dropped_loss_gives_its_rows_back_and_a_second_backward_is_named() -> None:
    model, store = _model(Alone(), "host")
    assert store is not None
    (batch,) = batches(1, 3, 37, length=9)
    for _ in range(4):
        model(batch[:, :-1], batch[:, 1:])  # never backward
        gc.collect()
    assert store.rows.allocations == 1 and len(store.rows._free) == 3
    loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="backward twice"):
        loss.backward()


def test_rows_grow_only_when_none_is_out() -> None:
    rows = Rows(2, pinned=False)
    cpu = torch.device("cpu")
    first = rows.take(4, torch.float32, cpu)
    wide = rows.take(6, torch.float32, cpu)
    assert rows.allocations == 1 and wide.numel() == 6
    rows.give(wide)  # not one of ours
    rows.give(first)
    assert rows.take(6, torch.float32, cpu).numel() == 6 and rows.allocations == 2
    small = rows.take(3, torch.float32, cpu)
    assert small.numel() == 3 and rows.bytes == 2 * 6 * 4
    lone = rows.take(3, torch.float32, cpu)
    assert lone.untyped_storage()._cdata != small.untyped_storage()._cdata


class _Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


@pytest.mark.parametrize("host", [False, True])
def test_running_statistics_are_updated_once(host: bool) -> None:
    states = []
    for again in (False, True):
        torch.manual_seed(0)
        model = _Normed()
        if again:
            recompute(model, "block", Store(Alone(), blocks=2, device=torch.device("cpu"), host=True) if host else None)
        for _ in range(3):
            model(torch.randn(5, 4)).backward()
        states.append({**dict(model.named_buffers()), **{n: p.grad for n, p in model.named_parameters()}})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_dropout_is_on_in_these_tests() -> None:
    assert dataclasses.asdict(CONFIG)["dropout"] > 0
