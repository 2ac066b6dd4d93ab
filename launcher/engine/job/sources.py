"""Where a job's model, loss and batches come from: the reference GPT over token files, or a user's own.

A user's functions are ``module:function`` of the job's shipped code:

- model ``factory(**options) -> nn.Module``;
- ``loss(model, batch) -> scalar`` (default: ``model(*batch)`` or ``model(**batch)``, which returns a
  scalar, an output with ``.loss``, or a mapping with ``"loss"``);
- ``data(split, start_sample, **options) -> iterator`` of single samples of the global stream, from
  ``start_sample`` on (``split`` is "train" or "heldout"); a rank keeps those that are its own. A training iterator
  with ``state_dict()`` and ``load_state_dict(state)`` has its state (what JSON can hold) saved in checkpoints, taken
  where the next step's samples begin, so that it holds at any world size; on resume it is loaded after the call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ...contract.errors import UsageError
from ...contract.train import TrainConfig
from ..comm import Comm
from ..gpt import GPT
from ..resolve import resolve
from ..tensor.by_name import split_layers
from ..tensor.gpt import TensorGPT
from .data import HeldOut, Samples, TokenFile, bigram_entropy

Loss = Callable[[nn.Module, Any], Tensor]


class Batches(Protocol):
    """Batches by global sample index."""

    tokens_per_sample: int
    heldout_batches: int  # held-out samples altogether

    def train(self, first: int, count: int) -> Any:
        """Samples [first, first + count) of the global stream; ``first`` never falls from call to call."""

    def heldout(self, numbers: list[int]) -> Any:
        """These held-out samples."""

    def bigram(self) -> float | None:
        """The bigram entropy of the held-out text, where that means anything."""

    def state(self, samples: int) -> dict[str, Any] | None:
        """The stream's own state where ``samples`` global samples are past, the same on every rank; or None."""

    def restore(self, samples: int, state: dict[str, Any] | None) -> None:
        """Goes on from ``samples`` with what :meth:`state` gave there; called before the first batch of a resume."""


class TokenBatches:
    """(inputs, targets), each (count, seq_len), of token files."""

    def __init__(self, train: Path, heldout: Path | None, *, seq_len: int, vocab: int, seed: int, tokens: int) -> None:
        self.tokens_per_sample = seq_len
        self._samples = Samples(TokenFile.open(train, vocab), seq_len, seed)
        self._heldout = HeldOut(TokenFile.open(heldout, vocab), seq_len, tokens) if heldout else None
        self.heldout_batches = self._heldout.windows if self._heldout else 0

    def train(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        return self._samples.batch(first, count)

    def heldout(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        assert self._heldout is not None
        return self._heldout.batch(numbers)

    def bigram(self) -> float | None:
        return bigram_entropy(self._heldout.file) if self._heldout else None

    def state(self, samples: int) -> None:
        return None

    def restore(self, samples: int, state: dict[str, Any] | None) -> None:
        return  # a sample is a function of its number


class FactoryBatches:
    """Samples of a user's iterator, collated. Held-out samples are the first ones of its held-out split."""

    def __init__(self, factory: Callable[..., Iterator[Any]], options: Mapping[str, Any], heldout: int) -> None:
        self.tokens_per_sample = int(options.get("tokens_per_sample", 1))
        self.heldout_batches = heldout
        self._factory, self._options = factory, dict(options)
        self._options.pop("tokens_per_sample", None)
        self._at = -1
        self._begin = 0  # where an attempt begins: every rank opens its stream there, so that all are in one state
        self._stream: Iterator[Any] = iter(())
        self._held: list[Any] = []

    def train(self, first: int, count: int) -> Any:
        self._go_to(first)
        samples = [self._take(self._stream, "train") for _ in range(count)]
        self._at = first + count
        return default_collate(samples)

    def _go_to(self, first: int) -> None:
        if self._at < 0 or first < self._at:
            self._at = min(self._begin, first)
            self._stream = self._factory("train", self._at, **self._options)
        for _ in range(first - self._at):
            self._take(self._stream, "train")
        self._at = first

    def state(self, samples: int) -> dict[str, Any] | None:
        self._go_to(samples)  # what is skipped here, the next step would have skipped
        if not hasattr(self._stream, "state_dict"):
            return None
        state = self._stream.state_dict()
        try:
            plain: Any = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the state_dict() of the data factory's stream cannot be saved: {error}",
                hint="it may hold mappings, lists, strings, finite numbers, booleans and None",
            ) from error
        if not isinstance(plain, dict):
            raise UsageError(f"the data factory's state_dict() returned {type(state).__name__}, not a mapping")
        return plain

    def restore(self, samples: int, state: dict[str, Any] | None) -> None:
        self._begin, self._at = samples, -1
        if state is None:
            return
        self._go_to(samples)
        if not hasattr(self._stream, "load_state_dict"):
            raise UsageError(
                "the checkpoint holds a state of the data, but the data factory's stream has no load_state_dict()",
                hint="resume with the code that saved it, or give the stream both methods",
            )
        self._stream.load_state_dict(state)

    def heldout(self, numbers: list[int]) -> Any:
        if not self._held:
            stream = self._factory("heldout", 0, **self._options)
            self._held = [self._take(stream, "heldout") for _ in range(self.heldout_batches)]
        return default_collate([self._held[n] for n in numbers])

    def bigram(self) -> float | None:
        return None

    @staticmethod
    def _take(stream: Iterator[Any], split: str) -> Any:
        try:
            return next(stream)
        except StopIteration:
            raise UsageError(
                f"the data factory's {split} stream ended", hint="an iterator for training goes on for ever"
            ) from None


def make_model(config: TrainConfig, tensor: Comm) -> nn.Module:
    """The model, from a generator seeded by the job: the same on every rank, or this rank's slices of it."""
    torch.manual_seed(config.seed)
    if config.gpt is not None:
        try:
            return GPT(config.gpt) if tensor.size == 1 else TensorGPT(config.gpt, tensor)
        except ValueError as error:
            raise UsageError(str(error)) from error
    assert config.factory is not None
    model = resolve(config.factory.factory, "model.factory")(**config.factory.options)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model.factory {config.factory.factory} returned {type(model).__name__}, not an nn.Module")
    if tensor.size > 1:
        split_layers(model, config.split, tensor)
    return model


def make_loss(config: TrainConfig) -> Loss:
    if config.factory is not None and config.factory.loss:
        return resolve(config.factory.loss, "model.loss")
    return default_loss


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The scalar that the model makes of a batch: itself, its ``.loss`` or its ``["loss"]``."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, (tuple, list)):
        out = model(*batch)
    else:
        out = model(batch)
    loss = out["loss"] if isinstance(out, Mapping) and "loss" in out else getattr(out, "loss", out)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            "the model's output is no scalar and has no .loss", hint="give model.loss: module:function(model, batch)"
        )
    return loss.reshape(())


def make_batches(config: TrainConfig, run_dir: Path) -> Batches:
    """Where the job's samples come from. ``text`` has been written to RUN/data before."""
    data = config.data
    held = config.evaluate.tokens if config.evaluate else 65536
    if data.factory:
        return FactoryBatches(resolve(data.factory, "data.factory"), data.options, held if config.evaluate else 0)
    seq_len, vocab = data.options.get("seq_len"), data.options.get("vocab", 256)
    if config.gpt is not None:
        seq_len, vocab = config.gpt.seq_len, config.gpt.vocab
    if not isinstance(seq_len, int) or not isinstance(vocab, int):
        raise UsageError("a factory model over token files needs data.options.seq_len (and vocab, default 256)")
    if data.text:
        train, heldout = run_dir / "data" / "train.bin", run_dir / "data" / "heldout.bin"
    else:
        assert data.tokens is not None
        train = token_path(run_dir, data.tokens)
        heldout = token_path(run_dir, data.heldout) if data.heldout else None  # type: ignore[assignment]
    return TokenBatches(train, heldout, seq_len=seq_len, vocab=vocab, seed=config.seed, tokens=held)


def token_path(run_dir: Path, path: str) -> Path:
    """Where a token file lies for this rank: the copy on its node's own disk if the agent made one."""
    staged = json.loads(os.environ.get("ZERUN_STAGED") or "{}")
    return Path(staged[path]) if path in staged else run_dir / "code" / path


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(to_device(v, device) for v in batch)
    return batch
