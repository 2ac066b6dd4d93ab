"""A real step of the real engine on real ranks, with every storage counted: what the planner is held against.

Runs in a rank's process (tests/engine/engine_ranks.py); needs torch.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from launcher.contract.train import GPT, AdamW, Zero
from launcher.engine.comm import Alone
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT as Model
from launcher.engine.job.loop import traffic_of
from launcher.engine.zero import ZeroEngine


class Storages(TorchDispatchMode):
    """Live bytes of the storages that tensors have; ``resize_`` is watched, views count once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.total = self.peak = 0
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Storages:
        plain, mode = self._resize, self

        def resize(storage: Any, size: int) -> Any:
            done = plain(storage, size)
            mode.seen(storage)
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def seen(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.live:
            weakref.finalize(storage, self._gone, key)
            self.live[key] = 0
        self.total += storage.nbytes() - self.live[key]
        self.live[key] = storage.nbytes()
        self.peak = max(self.peak, self.total)

    def _gone(self, key: int) -> None:
        self.total -= self.live.pop(key, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.seen(value.untyped_storage())
        return result


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Two steps; of the second: peaks of forward with backward and of the update, and what the engine says itself."""
    config = GPT(**case["model"])
    settings = EngineConfig(
        Zero(case["stage"], case["bucket"], **case.get("zero", {})),
        AdamW(1e-3, clip=1.0),
        accumulation=case["accumulation"],
    )
    torch.manual_seed(1)
    with Storages() as storages:
        model = Model(config)
        engine = ZeroEngine(model, settings, comm=Alone() if case["world"] == 1 else None)
        found: dict[str, Any] = {}
        for _ in range(2):
            before = traffic_of(engine.ranks)
            storages.peak = storages.total
            for _ in range(case["accumulation"]):
                tokens = torch.randint(0, config.vocab, (case["micro"], config.seq_len + 1))
                loss = model(tokens[:, :-1], tokens[:, 1:])
                engine.backward(loss)
                del loss, tokens
            found["backward"] = storages.peak
            storages.peak = storages.total
            engine.step()
            found["update"] = storages.peak
        sent = {name: count - before[name] for name, count in traffic_of(engine.ranks).items()}
        found["sent"] = sent
        found["sent_bytes"] = sum(count for name, count in sent.items() if name.endswith("sent_bytes"))
        found["volume_elements"] = sum(count for name, count in sent.items() if name.endswith("volume_elements"))
        found["memory"] = engine.memory()
        found["parameters"] = sum(p.numel() for p in model.parameters())
    return found


def measure_all(_rank: int, _world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case in turn; one of ``world`` 1 is a rank for itself beside the other."""
    return [measure(case) for case in cases]
