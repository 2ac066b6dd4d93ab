"""ZeRO: data parallelism whose model state is partitioned over the ranks instead of copied.

A step, in phases (``stage`` says what is partitioned, see ``flat.Stage``)::

    forward    stage 3 gathers each unit before use and releases it after            Ψ elements
    backward   stage 3 gathers again; gradients leave autograd one by one, fill
               buckets, and each full bucket is summed to the ranks that own it      Ψ (stage 3: 2Ψ)
    step       global norm, clipping, the optimizer on what this rank owns
               stages 1 and 2 gather the updated parameters (``overlap_gather``: they
               arrive during the next forward); stage 0 has gathered the gradients   Ψ (stages 0–2)

Losses are means over a micro-batch; they are divided by micro-steps × ranks once, in :meth:`step`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..contract import partition
from ..contract.errors import UsageError
from ..contract.train import TrainConfig
from .agreement import agree_on_settings, settings_of
from .attached import Attached
from .build import Builder, device_of, refuse_device
from .comm import Comm
from .config import ConfigLike, EngineConfig, checked_rate
from .each_step import unused_by_all
from .gather.arriving import Arriving, may_outlive_a_step, read_by_forward
from .gather.elsewhere import guard_state
from .gather.gathering import Gathering
from .heap import keep_freed
from .kept import kept, nbytes
from .model.flat import STAGES
from .model.groups import Groups, of_config
from .model.precision import LossScale, gradient_dtype
from .ranks import Ranks
from .reduce.flow import GradientFlow
from .reduce.nonfinite import Losses, look
from .reduce.nonfinite import NonFinite as NonFinite
from .reduce.norm import NormPlan
from .saving import checkpoint
from .saving.background import Background
from .saving.weights import load_weights
from .unchanged import Unchanged, not_free
from .update.counts import Counted
from .update.elementwise import Choice, Chosen


@dataclass(frozen=True)
class StepInfo:
    """``grad_norm`` before clipping; ``skipped`` when the update was left out (non-finite gradients). ``why`` then says
    which parameter and whose, unless it was fp16's loss scale, which has been halved."""

    grad_norm: float
    skipped: bool = False
    why: str = ""


class ZeroEngine:
    """Trains ``model`` with its state partitioned over the ranks of the default process group.

    ``model`` may be a function that builds it: its large parameters are then made one by one, sliced and
    dropped, so that no rank ever holds the whole (``engine.model.deferred``); ``device`` says where to.

    ``config`` is an :class:`EngineConfig`, a ``TrainConfig`` or a mapping. ``groups`` gives parameters settings of
    their own (``engine.model.groups``): ``[{"match": ["*.bias"], "weight_decay": 0.0, "lr": 1e-4}]``. ``lr`` may be set
    before any step; where it is x times the config's, every group trains at x times its own.
    ``comm`` replaces the way to communicate, for tests. ``ranks`` names the groups of a tensor-parallel
    model, whose layers were built with ``ranks.tensor``: ZeRO partitions over ``ranks.shard``. ``optimizer``, an
    element-wise class of ``torch.optim`` or a function of parameter groups, takes the place of the config's
    (``engine.update.elementwise``), of which clipping then remains, and ``lr`` and ``weight_decay`` for a class. The
    model's parameters become views of flat buffers and must not be replaced; their ``.grad`` stays None.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        config: ConfigLike,
        groups: Groups = None,
        *,
        comm: Comm | None = None,
        device: torch.device | None = None,
        ranks: Ranks | None = None,
        optimizer: Choice = None,
    ) -> None:
        self.config = EngineConfig.of(config)
        chosen = Chosen(self.config.optimizer, optimizer)
        if comm is None:
            refuse_device(device or device_of(model))
        self.ranks = ranks or (Ranks.of_data(comm) if comm is not None else Ranks.of_config(self.config))
        told = settings_of(self.config, chosen, model, self.ranks.degree)
        held = not_free(model) if isinstance(model, nn.Module) else None
        told["model.held_by_an_engine"] = held is not None
        agree_on_settings(self.ranks.world, told, device or device_of(model))
        if held is not None:
            raise held
        self.ranks.check(config.tensor if isinstance(config, TrainConfig) else None, self.config.zero.replicas)
        self.comm, self.shard = self.ranks.data, self.ranks.shard
        # On one rank nothing is partitioned, whatever the stage: the whole is the shard.
        alone = self.shard.size == 1
        self.stage = STAGES[0 if alone else self.config.zero.stage]
        self._every_micro_step = self.config.reduces_every_micro_step and not alone
        self.lr = chosen.lr
        built = Builder(
            self.config,
            self.ranks,
            self.stage,
            self.lr,
            of_config(config) if groups is None else groups,
            self._every_micro_step,
            device,
        ).build(model)
        self.model, self.layout, self.units = built.model, built.layout, built.units
        self.store, self.device = built.store, built.device
        self._synchronise_buffers("first buffers")
        attached = Attached(self.model)
        weakref.finalize(self, attached.remove).atexit = False
        self.gathering: Gathering | None = None
        if self.stage.shards_parameters:
            zero = self.config.zero
            self.gathering = Gathering(self.model, self.units, prefetch=zero.prefetch, reshard=zero.reshard)
        self.arriving: Arriving | None = None
        wanted = self.config.zero.overlap_gather
        if self._hands_out and (read_by_forward(self.model) if wanted is None else wanted):
            self.arriving = Arriving(self.model, self.units)
            attached.under_way = self.arriving
        # None of the hooks holds the engine: it goes when nobody else holds it, and takes them along.
        before = _nothing if self.arriving is None else self.arriving.wait
        guard_state(self.model, self.units, self.gathering, before=before)
        for flat in self.units:
            flat.make_moments(len(chosen.moments))
        self.optimizer = Counted(chosen, self.units, built.groups)
        self.flow = GradientFlow(
            self.units,
            self.shard,
            every_micro_step=self._every_micro_step,
            replica=self.ranks.replica,
            native=self.config.zero.reduce_with == "native",
        )
        self.norm = NormPlan(self.units, self.shard, self.ranks.tensor)
        self.loss_scale = LossScale.of(self.config.precision)
        self.micro_step = 0
        self.skipped = 0  # steps whose update was left out, those before the checkpoint that was loaded too
        self.losses = Losses()
        self.background: Background | None = None
        self.half_loaded = ""  # what was being read when a load failed
        attached.handles += [
            tensor.register_post_accumulate_grad_hook(self._hook(number, index))  # type: ignore[no-untyped-call]
            for number, flat in enumerate(self.units)
            if flat.unit.trainable
            for index, tensor in enumerate(flat.tensors)
        ]
        attached.complete()
        self._unchanged = Unchanged(self.model, self.units)
        keep_freed(self.device)
        self._in_backward = self._broken = False
        _living.add(self)

    @property
    def lr(self) -> float:
        """The rate of the next step, of parameters in no group; the same on every rank."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        """Raises :class:`UsageError` for what is no finite number from 0 on."""
        self._lr = checked_rate("zero.lr", value)

    def _synchronise_buffers(self, what: str) -> None:
        if self.comm.size > 1:
            for buffer in self.model.buffers():
                self.comm.broadcast(buffer, 0, what)

    def _hook(self, number: int, index: int) -> Any:
        engine = weakref.ref(self)

        def arrived(tensor: Tensor) -> None:
            zero = engine()
            if zero is None:
                return  # it goes at this moment
            if not zero._in_backward:
                raise zero._of_another(number, index)
            gradient, tensor.grad = tensor.grad, None
            assert gradient is not None
            zero.flow.arrived(zero.flow.places[number][index], gradient)
            if zero.gathering is not None:
                zero.gathering.arrived(number)

        return arrived

    def _of_another(self, number: int, index: int) -> UsageError:
        """What is said of a gradient that no backward of this engine made."""
        name = self.units[number].unit.parameters[index].name
        if any(other._in_backward for other in _living):
            return UsageError(
                f"backward of another ZeroEngine came to parameter {name} of this one's model",
                hint="freeze this one while the other's loss is computed: model.requires_grad_(False), then (True)",
            )
        return UsageError("loss.backward() was called; the engine's is zero.backward(loss)")

    # --- a step ----------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Gradients of one micro-batch's mean loss; the ``accumulation``-th call completes a step."""
        self._refuse_after_failure()
        if self.micro_step == self.config.accumulation:
            raise UsageError(
                f"backward was called {self.micro_step + 1} times, but accumulation is {self.config.accumulation}",
                hint="call step() after every accumulation-th backward",
            )
        self.losses.keep(loss)
        self.micro_step += 1
        self._broken = True
        try:
            self.flow.begin(loss, first=self.micro_step == 1, last=self.micro_step == self.config.accumulation)
            if self.gathering is not None:
                self.gathering.begin_backward(loss)
            if self.loss_scale.value != 1.0:
                loss = loss * self.loss_scale.value
            self._in_backward = True
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                self.flow.finish()
            self._broken = False
        except RuntimeError as error:
            told = self.gathering.explain(error) if self.gathering is not None else None
            if told is None:
                raise
            raise told from error
        finally:
            self._in_backward = False
            if self.gathering is not None:
                self.gathering.end_backward(failed=self._broken)

    def _refuse_after_failure(self) -> None:
        if self.half_loaded:
            raise UsageError(
                f"{self.half_loaded}: reading it failed after it had begun; what the model holds is half of it",
                hint="load another checkpoint, or make the model and its engine anew",
            )
        if self._broken:
            raise UsageError(
                "an earlier backward raised an error: its gradients are incomplete, its messages maybe under way",
                hint="end all ranks and go on from the last checkpoint; that error is the cause",
            )

    @torch.no_grad()
    def step(self) -> StepInfo:
        """Clips, updates what this rank owns, and gives every rank the updated parameters.

        Raises :class:`UsageError` off the accumulation boundary and where ranks were given other rates,
        :class:`NonFinite` when gradients are not finite and the policy is to stop.
        """
        self._refuse_after_failure()
        if self.micro_step != self.config.accumulation:
            raise UsageError(
                f"step was called after {self.micro_step} of {self.config.accumulation} micro-steps",
                hint="a step needs one backward per micro-step",
            )
        self._unchanged.check()
        self.finish_gathering()  # a backward without the model's forward
        if self.gathering is not None:
            self.gathering.over()  # with a forward between backward and step
        self.micro_step = 0
        scale = 1.0 / (self.config.accumulation * self.comm.size * self.loss_scale.value)
        norm = math.sqrt(self.norm.sum_of_squares()) * scale
        if not math.isfinite(norm):
            return self._skip(norm)
        self.losses.forget()
        clip = self.config.optimizer.clip
        factor = scale if clip is None else scale * min(1.0, clip / (norm + 1e-6))
        # A unit's new parameters are on their way while the next one is updated.
        order = 0 if self.gathering is None else self.gathering.order.digest()
        unused = unused_by_all(self.ranks, self.flow, self.lr, order, self.device)
        self.optimizer.step(self.lr, factor, self._hand_out, unused)
        if self.gathering is not None:
            self.gathering.changed()
        self.loss_scale.went_well()
        if self.arriving is not None:
            self.arriving.begin()
            if not may_outlive_a_step():
                self.arriving.arrive()
        else:
            for flat in self.units:
                flat.wait()
        self._synchronise_buffers("buffers")
        return StepInfo(norm)

    def _hand_out(self, number: int) -> None:
        """Every rank gets what this one has just updated of a unit, unless they gather it themselves (stage 3)."""
        flat = self.units[number]
        flat.master_to_parameters()
        if self._hands_out:
            flat.gather_updated()

    @property
    def _hands_out(self) -> bool:
        return self.stage.shards_optimizer and not self.stage.shards_parameters

    def finish_gathering(self) -> None:
        """Waits for updated parameters that are still on their way (``zero.overlap_gather``). Every rank calls it
        before its process ends; ``gathered``, ``save``, ``load`` and the model's ``state_dict`` do so themselves."""
        if self.arriving is not None:
            self.arriving.wait()

    def _skip(self, norm: float) -> StepInfo:
        """The step whose gradient is not finite, by all ranks: they judge by one norm."""
        why, hint = "", None
        if not self.loss_scale.overflowed():
            why, hint = look(self, norm)
        self.losses.forget()
        if why and self.config.nonfinite == "stop":
            raise NonFinite(why, hint=hint)
        self.skipped += 1
        return StepInfo(norm, skipped=True, why=why)

    # --- looking at it -----------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, every parameter is whole on every rank; changes made to them are not kept at stage 3."""
        if self.gathering is None:
            self.finish_gathering()
            yield
            return
        self.gathering.pinned += 1
        try:
            self.gathering.gather_all()
            yield
        finally:
            self.gathering.pinned -= 1
            self.gathering.settle()

    def memory(self) -> dict[str, int]:
        """Live bytes of all that is kept, by kind (``engine.kept``), summed over the storages that exist now."""
        return {kind: nbytes(tensors) for kind, tensors in kept(self).items()}

    def state_bytes(self) -> partition.StateBytes:
        """What ``memory()`` must show of the first three kinds, in closed form."""
        whole = bool(self.units) and all(u.whole_gradient for u in self.units)
        dtype = gradient_dtype(self.config.zero.gradient_dtype, self.config.precision)
        return partition.state_bytes(
            self.layout,
            self.config.zero.stage,
            whole=whole,
            moments=len(self.optimizer.moments),
            gradient_bytes=dtype.itemsize if dtype else None,
        )

    # --- checkpoints ---------------------------------------------------------------------------------------

    def save(
        self, folder: str | Path, step: int, extra: Mapping[str, Any] | None = None, *, background: bool = False
    ) -> Path:
        """Writes ``folder/step-N``: this rank's shard, then, once all are durable, the manifest. Every rank calls it
        with the same folder and step, between two steps; ``extra`` is rank 0's, JSON, and :meth:`load` returns it.

        With ``background`` it returns when the state is copied; the manifest comes with the next save, or with
        :meth:`finish_saving`, which has to be called before the process ends.
        """
        about = checkpoint.About(extra=dict(extra or {}))
        if background:
            return self.saves_in_background().begin(Path(folder), step, about)
        self.finish_saving()
        return checkpoint.save(self, Path(folder), step, about)

    def check_between_steps(self) -> None:
        """Raises :class:`UsageError` where what is held is not the state between two steps: nothing to save."""
        self._refuse_after_failure()
        if self.micro_step:
            raise UsageError(
                f"save was called after {self.micro_step} of {self.config.accumulation} micro-steps of a step: "
                "no checkpoint holds their gradient",
                hint="save after step(), or before the step's first backward",
            )

    def saves_in_background(self) -> Background:
        """What saves in the background; its copy is allocated at the first call."""
        if self.background is None:
            self.background = Background(self)
        return self.background

    def finish_saving(self) -> int | None:
        """Waits for a save in the background, until its manifest is there; every rank calls it. Returns its step, None
        where none was under way."""
        return None if self.background is None else self.background.finish()

    def load_weights(self, path: str | Path) -> int:
        """Begins with safetensors (``engine.saving.weights``), each rank reading its part; returns the bytes read."""
        return load_weights(self, Path(path))

    def load(self, folder: str | Path, step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Reads the newest whole checkpoint below ``folder`` (or that of ``step``); returns (step, extra). Micro-steps
        of a step that had begun are forgotten. After a load that failed on its way only another one helps."""
        manifest = checkpoint.load(self, Path(folder), step)
        return manifest.step, manifest.extra or {}


_living: weakref.WeakSet[ZeroEngine] = weakref.WeakSet()


def _nothing() -> None:
    """Where no updated parameters are ever under way."""
