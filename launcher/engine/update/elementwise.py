"""Any element-wise optimizer of ``torch.optim`` on flat shards.

An update that treats every element alike gives the same numbers wherever a shard begins. One that looks at a
whole matrix or model (factors, orthogonalises, searches a line) does not, so only what is listed here is taken,
and the rest is refused by name. The optimizer's tensors of a parameter's shape become views of flat buffers,
allocated once, and are saved and resharded like AdamW's; its scalars go into the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...contract.errors import UsageError
from ...contract.train import SGD, AdamW
from ..model.flat import Run
from ..model.groups import Group
from .optim import LANES, Done, FlatAdamW, FlatOptimizer, FlatSGD, Pieces, nothing, sgd_moments

ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Names in ``torch.optim`` whose every update is element-wise. Not here: Adafactor (factored), Muon (matrices),
LBFGS (the whole model), SparseAdam (sparse gradients), and whatever is not torch's own."""

Factory = Callable[[list[dict[str, Any]]], Optimizer]
Choice = Union[type[Optimizer], Factory, None]


class Chosen:
    """Which optimizer an engine uses, known before its state is allocated: ``moments`` are that state's names.

    ``choice`` is a class of ``torch.optim``, which gets the config's ``lr`` and ``weight_decay`` and is otherwise left
    at its own defaults; or a function of parameter groups that returns an optimizer, whose settings are all its own.
    None is the config's AdamW or SGD. Raises :class:`UsageError` naming an optimizer that is not element-wise.
    """

    def __init__(self, config: AdamW | SGD, choice: Choice = None) -> None:
        self.config = config
        self.lr = config.lr
        self.name = type(config).__name__
        self._make: Factory | None = None
        if choice is None:
            self.moments = FlatAdamW.moments if isinstance(config, AdamW) else sgd_moments(config)
            return
        if not callable(choice):
            raise UsageError(_not_a_choice(choice))
        self._make = _of_class(choice, config) if isinstance(choice, type) else choice
        probe = torch.zeros(LANES)
        optimizer = _checked(self._make, [{"params": [probe]}])
        self.lr = float(optimizer.param_groups[0]["lr"])
        self.name = type(optimizer).__name__
        probe.grad = torch.ones(LANES)
        optimizer.step()
        state = {k: v for k, v in optimizer.state[probe].items() if isinstance(v, Tensor)}
        self.moments = tuple(k for k, v in state.items() if v.shape == probe.shape)
        self.scalars = {k: v for k, v in state.items() if k not in self.moments}

    def on(self, runs: Sequence[Run], groups: Sequence[Group]) -> FlatOptimizer:
        """The optimizer of these runs, whose moments are there, zero."""
        if self._make is not None:
            return FlatTorch(runs, groups, self)
        if isinstance(self.config, AdamW):
            return FlatAdamW(runs, self.config, groups)
        return FlatSGD(runs, self.config, groups)

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        assert self._make is not None
        return _checked(self._make, groups)


def _not_a_choice(given: object) -> str:
    if not isinstance(given, Optimizer):
        return f"optimizer is {given!r:.80}; accepted are a class of torch.optim and a function of parameter groups"
    name = type(given).__name__
    return (
        f"optimizer is an instance of {name}, made of the model's parameters; the engine's has shards of them, so give "
        f"the class (optimizer=torch.optim.{name}, with the config's lr and weight_decay) or a function "
        f"(optimizer=lambda groups: torch.optim.{name}(groups, lr=1e-3))"
    )


def _of_class(kind: type[Optimizer], config: AdamW | SGD) -> Factory:
    _check_class(kind)
    if kind.__name__ != "Rprop":
        return lambda groups: kind(groups, lr=config.lr, weight_decay=config.weight_decay)  # type: ignore[call-arg]
    if config.weight_decay:
        raise UsageError(f"optimizer Rprop has no weight decay, but weight_decay is {config.weight_decay}")
    return lambda groups: kind(groups, lr=config.lr)  # type: ignore[call-arg]


def _check_class(kind: type) -> None:
    if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__, None):
        raise UsageError(
            f"optimizer {kind.__name__} cannot be partitioned: it is not known to update every element by itself",
            hint=f"accepted are these of torch.optim: {', '.join(ELEMENTWISE)}",
        )


def _checked(make: Factory, groups: list[dict[str, Any]]) -> Optimizer:
    """What the user's function makes of the groups, if the engine can use it."""
    given = [p for g in groups for p in g["params"]]
    optimizer = make(groups)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"the optimizer function returned {type(optimizer).__name__}, not a torch.optim.Optimizer")
    _check_class(type(optimizer))
    held = [p for g in optimizer.param_groups for p in g["params"]]
    if len(optimizer.param_groups) != len(groups) or {id(p) for p in held} != {id(p) for p in given}:
        raise UsageError(
            "the optimizer function made an optimizer of other parameters than it was given",
            hint="lambda groups: torch.optim.RMSprop(groups, lr=1e-3); give groups of parameters to ZeroEngine",
        )
    for settings in optimizer.param_groups:
        if settings.get("dampening"):
            raise UsageError(
                "optimizer SGD with dampening cannot be used: its first step differs", hint="leave dampening at 0"
            )
    return optimizer


class FlatTorch:
    """A ``torch.optim`` optimizer on runs of elements."""

    def __init__(self, runs: Sequence[Run], groups: Sequence[Group], chosen: Chosen) -> None:
        self.updates = 0
        self.moments = chosen.moments
        self.counts = bool(chosen.scalars)
        self._groups = groups
        self._runs = runs
        self._sets = Pieces.of(runs)
        self._pieces: list[list[Tensor]] = []
        settings: list[dict[str, Any]] = []
        for chosen_set in self._sets:
            group = groups[chosen_set.group]
            self._pieces.append([*chosen_set.main[0], chosen_set.scratch[0].view(-1)])
            more = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
            settings.append({"params": self._pieces[-1], **more})
        # Without a trainable parameter there is nothing to make; a name is all that a checkpoint asks.
        self._optimizer = chosen.make(settings) if settings else None
        self.name = type(self._optimizer).__name__ if self._optimizer else ""
        if self._optimizer is not None:
            self._adopt(self._optimizer, chosen)

    def _adopt(self, optimizer: Optimizer, chosen: Chosen) -> None:
        """Gives the optimizer its state: the moments' own memory, and scalars as they are before the first step."""
        optimizer.state.clear()
        for pieces, parameters in zip(self._sets, self._pieces):  # noqa: B905 (Python 3.9 on the nodes)
            for at, parameter in enumerate(parameters):
                rest = at == len(parameters) - 1
                state: dict[str, Any] = {k: v.clone() for k, v in chosen.scalars.items()}
                for kind, name in enumerate(self.moments, start=2):
                    state[name] = pieces.scratch[kind].view(-1) if rest else pieces.main[kind][at]
                if state:
                    optimizer.state[parameter] = state

    def _begin(self, optimizer: Optimizer) -> None:
        """State before the first update; some of it depends on the learning rate of that moment."""
        for settings in optimizer.param_groups:
            first = {"mu_product": 1.0, "mu": 1.0, "eta": settings["lr"]}
            for parameter in settings["params"]:
                for name, value in optimizer.state.get(parameter, {}).items():
                    if name not in self.moments:
                        value.fill_(first.get(name, 0.0))
        for run in self._runs:
            number = next(i for i, s in enumerate(self._sets) if s.group == run.group)
            settings = optimizer.param_groups[number]
            first = {"step_size": settings["lr"], "sum": settings.get("initial_accumulator_value", 0.0)}
            for name, moment in zip(self.moments, run.moments):  # noqa: B905 (Python 3.9 on the nodes)
                moment.fill_(first.get(name, 0.0))

    def step(self, lr: float, factor: float, done: Done = nothing) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            return
        for pieces, settings in zip(self._sets, optimizer.param_groups):  # noqa: B905 (Python 3.9 on the nodes)
            settings["lr"] = lr * self._groups[pieces.group].lr_scale
        if self.updates == 0:
            self._begin(optimizer)
        self.updates += 1
        for pieces, parameters in zip(self._sets, self._pieces):  # noqa: B905 (Python 3.9 on the nodes)
            # Scalars count on where this rank has no element of theirs too: another may write the checkpoint.
            gradients = pieces.enter()[1] or [pieces.scratch[1].view(-1)]
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            for parameter, gradient in zip(parameters, gradients):  # noqa: B905 (Python 3.9 on the nodes)
                parameter.grad = gradient
        optimizer.step()
        for pieces, parameters in zip(self._sets, self._pieces):  # noqa: B905 (Python 3.9 on the nodes)
            for parameter in parameters:
                parameter.grad = None
            pieces.leave()
        for unit in dict.fromkeys(run.unit for run in self._runs):
            done(unit)

    def storages(self) -> list[Tensor]:
        scratch = [rows for pieces in self._sets for rows in pieces.scratch]
        states = self._optimizer.state.values() if self._optimizer else ()
        return scratch + [v for s in states for k, v in s.items() if k not in self.moments]

    def scalars(self) -> dict[str, Any]:
        """Of each group, since a group's learning rate takes part in them."""
        found: dict[str, Any] = {}
        for pieces, parameters in zip(self._sets, self._pieces):  # noqa: B905 (Python 3.9 on the nodes)
            assert self._optimizer is not None
            for name, value in self._optimizer.state.get(parameters[0], {}).items():
                if name not in self.moments:
                    found[f"{name}.{pieces.group}"] = float(value)
        return found

    def restore(self, scalars: Mapping[str, Any]) -> None:
        for pieces, parameters in zip(self._sets, self._pieces):  # noqa: B905 (Python 3.9 on the nodes)
            assert self._optimizer is not None
            for parameter in parameters:
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    if name not in self.moments:
                        # Our own AdamW counts its steps for all groups at once.
                        value.fill_(scalars.get(f"{name}.{pieces.group}", float(self.updates)))
