"""The model on this rank: described, agreed on with the others, and laid into flat units.

A module is there already: rank 0's values become everyone's. A function that builds one runs without memory for its
large parameters (``engine.model.deferred``); each is then made whole, sliced and dropped with its unit.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..contract.errors import UsageError
from ..contract.partition import Layout
from .activations.recompute import make_store, recompute
from .activations.stored import Store
from .agreement import agree_on_model, agree_on_recording
from .comm import gather_bytes
from .config import EngineConfig
from .heap import apart
from .model.deferred import NotDeferred, Recording, built_whole, memory_told, record, refuse_meta
from .model.flat import FlatUnit, Stage
from .model.groups import Group, Groups
from .model.precision import gradient_dtype, working_dtype
from .model.units import Model, describe, names_in
from .ranks import Ranks
from .reduce.flow import DENSE
from .saving.shardfile import as_bytes
from .tensor.layers import split_of
from .together import by_all
from .unchanged import not_free

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """``units`` are those of ``layout``, in its order; ``store`` is where recomputed blocks keep their inputs."""

    model: nn.Module
    layout: Layout
    groups: list[Group]
    units: list[FlatUnit]
    store: Store | None
    device: torch.device


@dataclass(frozen=True)
class Builder:
    """``lr`` is the rate that those of ``groups`` are held against; ``every_micro_step`` says when gradients are
    reduced; ``device`` None is where the model's parameters are."""

    config: EngineConfig
    ranks: Ranks
    stage: Stage
    lr: float
    groups: Groups
    every_micro_step: bool
    device: torch.device | None

    def build(self, model: nn.Module | Callable[[], nn.Module]) -> Built:
        """Raises :class:`UsageError` where ranks have other models, or this one cannot be partitioned."""
        if isinstance(model, nn.Module):
            described = self._describe(refuse_meta(model))
            self._agree(model, described)
            self._synchronise(described.tensors)
            return self._flatten(model, described, None)
        own = self._same_random_state()
        try:
            with apart():
                return self._build_by(model)
        finally:
            if own is not None:
                torch.set_rng_state(own)

    def _build_by(self, factory: Callable[[], nn.Module]) -> Built:
        recorded, why = None, None
        try:
            recorded = record(factory)
        except NotDeferred as problem:
            why = str(problem)
        agree_on_recording(self.ranks.world, why, self.device or torch.device("cpu"))
        if recorded is None:
            _log.warning("the model is built whole, a rank at a time: %s", why)
            with memory_told(lambda: f"the model was built whole, since it cannot be recorded: {why}"):
                return self._in_turn(factory)
        built, recording = recorded
        described = self._describe(built)
        self._agree(built, described)
        self._synchronise(described.tensors)  # the small ones, which may come from elsewhere than torch's generator
        return self._flatten(built, described, recording)

    def _in_turn(self, factory: Callable[[], nn.Module]) -> Built:
        ranks, device = self.ranks, self.device or torch.device("cpu")
        digest = b""
        for turn in range(ranks.data.size):
            with by_all(ranks.world, f"data-parallel rank {turn} builds its model", device):
                if turn == ranks.data.rank:
                    whole = built_whole(factory)
                    digest = _digest_of(whole)
                    described = self._describe(whole)
                    mine = self._flatten(whole, described, None)
        self._agree(mine.model, described)
        # By all, so that all raise: each against the first rank that holds the same slices.
        digests = gather_bytes(ranks.world, digest, "comparing first values", device)
        other = next((rank for rank, found in enumerate(digests) if found != digests[rank % ranks.degree]), None)
        if other is not None:
            first = other % ranks.degree
            raise UsageError(
                f"the function that builds the model gave rank {other} other first values than rank {first}",
                hint="seed everything it draws from (numpy, random, a GPU's generator) alike on all ranks",
            )
        return mine

    def _describe(self, model: nn.Module) -> Model:
        problem = not_free(model)
        if problem is not None:
            raise problem
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        if unknown := sorted(set(names_in(model, "zero_keep_dtype")) - buffers):
            raise UsageError(f"zero_keep_dtype: the model has no buffer {unknown[0]}")
        zero = self.config.zero
        return describe(
            model,
            ranks=self.ranks.shard.size,
            replicas=self.ranks.replica.size,
            bucket_bytes=zero.bucket_bytes,
            groups=self.groups,
            lr=self.lr,
            precision=self.config.precision,
            tensor=self.ranks.degree,
            rule=zero.unit,
        )

    def _agree(self, model: nn.Module, described: Model) -> None:
        """That all ranks have one model, and that it can be trained here."""
        device = self.device or device_of(model)
        agree_on_model(self.ranks.world, described.layout, model, described.groups, device)
        if not any(unit.trainable for unit in described.layout.units):
            raise UsageError(
                "the model has nothing to train: all of its parameters are frozen",
                hint="requires_grad_(True) before ZeroEngine on what is to be trained; to evaluate needs no engine",
            )
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
                raise UsageError(f"module {name or type(module).__name__} makes sparse gradients", hint=DENSE)

    def _same_random_state(self) -> torch.Tensor | None:
        """Deferred parameters are made by every rank for itself: all must draw rank 0's numbers. Returns this rank's
        own state where it was another, to go on with once the model is built; None where building is what moves it on,
        as in an undistributed run."""
        state = torch.get_rng_state()
        message = state.to(self.device, copy=True) if self.device is not None else state.clone()
        self.ranks.world.broadcast(message, 0, "random state")
        first = message.cpu()
        torch.set_rng_state(first)
        return None if torch.equal(first, state) else state

    @torch.no_grad()
    def _synchronise(self, tensors: Mapping[str, nn.Parameter]) -> None:
        """Rank 0's parameters are everyone's; a slice is that of the first rank which has it."""
        for tensor in tensors.values():
            if tensor.device.type != "meta":
                if split_of(tensor) is None:
                    self.ranks.tensor.broadcast(tensor.data, 0, "first replicated parameters")
                self.ranks.data.broadcast(tensor.data, 0, "first parameters")

    def _flatten(self, model: nn.Module, described: Model, recording: Recording | None) -> Built:
        """Every unit's storages, and the model on them."""
        config, device = self.config, self.device or device_of(model)
        store = make_store(model, config, self.ranks.tensor, device)
        recompute(model, config.recompute, store)
        units: list[FlatUnit] = []
        made: dict[int, nn.Parameter] = {}
        for unit in described.layout.units:
            tensors = [described.tensors[p.name] for p in unit.parameters]
            with memory_told(lambda name=unit.name: f"unit {name} was made"):  # type: ignore[misc]
                flat = FlatUnit(
                    unit,
                    tensors,
                    self.stage,
                    self.ranks.shard,
                    whole_gradient=not (self.stage.shards_gradients and self.every_micro_step),
                    gradient_dtype=gradient_dtype(config.zero.gradient_dtype, config.precision),
                    recording=recording,
                    device=device,
                )
                flat.release()
            made.update({id(old): new for old, new in zip(tensors, flat.tensors) if old is not new})  # noqa: B905
            units.append(flat)
        _replace(model, made)
        self._hold_buffers(model, recording, device)
        return Built(model, described.layout, described.groups, units, store, device)

    def _hold_buffers(self, model: nn.Module, recording: Recording | None, device: torch.device) -> None:
        """Buffers in the working precision, as ``model.to(dtype)`` has them, but those that a module names in
        ``zero_keep_dtype``. What rounding changes is said: nothing else would tell."""
        kept = set(names_in(model, "zero_keep_dtype"))
        rounded: list[str] = []
        for prefix, module in model.named_modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    value = recording.whole(buffer).to(device) if recording else buffer
                    full = f"{prefix}.{name}" if prefix else name
                    held = value if full in kept else value.to(working_dtype(self.config.precision, value.dtype))
                    module._buffers[name] = held
                    if held.dtype != value.dtype and not torch.equal(held.to(value.dtype), value):
                        rounded.append(full)
        if rounded and self.ranks.world.rank == 0:
            _log.warning(
                "%s rounds the buffers %s; a module keeps them by zero_keep_dtype = (name, …), relative to it",
                self.config.precision,
                ", ".join(rounded),
            )


def _digest_of(model: nn.Module) -> bytes:
    """Of the parameters' bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        digest.update(as_bytes(parameter.detach().cpu().contiguous()))
    return digest.digest()


def _replace(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Deferred parameters by those that were made of them; ``made`` is by the deferred ones' identity."""
    for module in model.modules() if made else ():
        for name, old in list(module._parameters.items()):
            if id(old) in made:
                module._parameters[name] = made[id(old)]


def device_of(model: object) -> torch.device:
    """Where the parameters of a module are; the CPU for those that are nowhere yet, and for a function."""
    tensors = model.parameters() if isinstance(model, nn.Module) else ()
    return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))


def refuse_device(device: torch.device) -> None:
    """Raises :class:`UsageError` where the library that carries messages has no way to ``device``."""
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl" and device.type == "cpu":
        raise UsageError(
            "the ranks communicate by NCCL, which moves the memory of GPUs, but the model is on the CPU",
            hint="model.cuda() before ZeroEngine; for a function that builds it device=torch.device('cuda', rank)",
        )
