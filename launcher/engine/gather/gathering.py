"""When the units of stage 3 are gathered and released.

A block, what uses a unit alone, is gathered before its modules' forward and before their backward, and released after
each. Those that come next are fetched meanwhile, ``prefetch`` of them: in forward by the order that the first one
showed (``engine.gather.order``), in backward by what this forward did. Units that no module uses alone (embeddings,
the last norm) stay gathered from forward to backward, and with them what ``reshard`` says: the block that was used last
(``keep_last``), none (``after_forward``), or all (``keep``). What was fetched and not used goes when the next block
begins. In activation recomputation a forward runs inside backward: it gathers, and leaves releasing to that backward.

Backward runs the operations of a forward strictly from the last to the first. So when it comes to what went into a
block, or to what came out of an earlier one, it is through with the block, whatever of it was used. When it comes to
what came out of a block, that is gathered. What a block computes beside what it returns (a loss kept as an attribute)
may come first: where autograd's numbers leave that open, the graph is walked before backward, and each such block is
gathered with the last one that says in time that backward comes to it, or at once.

Nothing here depends on time: ranks that run the same modules post the same messages in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ...contract.errors import UsageError
from ..model.flat import FlatUnit
from ..model.released import is_missed, missed, refuse_second_backward
from .elsewhere import FirstForward
from .order import NOTHING, Order, Use, Uses, made_by, now, reached


class Gathering:
    """Hooks on a module that gather each unit in time."""

    def __init__(self, module: nn.Module, units: Sequence[FlatUnit], *, prefetch: int, reshard: str) -> None:
        self.units = units
        self.prefetch, self.reshard = prefetch, reshard
        self.in_backward = False
        self.pinned = 0  # > 0 inside ``gathered()``: nothing is released
        blocks: dict[tuple[str, ...], list[int]] = {}
        for number, flat in enumerate(units):
            if flat.unit.modules:
                blocks.setdefault(flat.unit.modules, []).append(number)
        self._blocks = list(blocks.values())
        self._root = [i for i, flat in enumerate(units) if not flat.unit.modules]
        self._position = {number: at for at, row in enumerate(self._blocks) for number in row}
        called = [[m for name in names for m in _called(module.get_submodule(name))] for names in blocks]
        self.order = Order([at for at, members in enumerate(called) for _ in members])
        # A forward.
        self._running = False  # inside the model's own forward, which has an end
        self._graph = False  # since the last backward there was a forward that another may go through
        self._held: set[int] = set()  # blocks that are gathered or on their way
        self._kept: set[int] = set()  # those of them that stay until backward
        self._idle: int | None = None  # the block used last, if backward will use it
        self._open: list[Use] = []  # blocks whose forward runs
        self._uses = Uses(prefetch)
        # A backward.
        self._before: list[Uses] = []  # of this step, whose backward may come yet
        self._walks = True  # whether graphs are walked that look as if there were no need
        self._looked = False  # whether one was
        self._twice = False  # whether a second backward will go through what a first one made: nothing is released
        self._trainable = [sum(len(units[i].tensors) for i in row if units[i].unit.trainable) for row in self._blocks]
        self._owed = list(self._trainable)  # gradients of each block that backward has not come to
        self._by_input: set[int] = set()  # blocks of which the gradient of the input says that backward is through
        for at, members in enumerate(called):
            for member in members:
                member.register_forward_pre_hook(self._before_forward(at), with_kwargs=True)
                member.register_forward_hook(self._after_forward(at))
        self._first = FirstForward(module, units, self)
        weakref.finalize(self, self._first.stop).atexit = False
        module.register_forward_pre_hook(self._before_model, prepend=True)
        module.register_forward_hook(self._after_model)
        module.register_forward_hook(self._model_ended, always_call=True)
        shared = {id(tensor) for number in self._root for tensor in units[number].tensors}
        for member in module.modules():  # a module may be called without the model's own forward
            if member is not module and any(id(p) in shared for p in member._parameters.values()):
                member.register_forward_pre_hook(self._before_member)

    @property
    def kept(self) -> list[int]:
        """Units that stay gathered from forward to backward, if forward is as it was."""
        rows = {"keep": self._blocks, "keep_last": self._blocks and [self._blocks[self.order.last]]}
        return self._root + [number for row in rows.get(self.reshard, []) for number in row]

    # --- the model and what no block uses alone ----------------------------------------------------------

    def _before_model(self, *_: Any) -> None:
        _refuse_transforms()
        for number in self._root:
            self.units[number].gather()
        if not self.in_backward:
            self._running = True
            self._open.clear()
            self.order.begin()
            if self.prefetch and self.order.agreed:
                self._fetch(self.order.ahead(NOTHING, 1))
        self._need_root()

    def _before_member(self, *_: Any) -> None:
        if not (self._running or self.in_backward):
            self._need_root()

    def _need_root(self) -> None:
        self._graph |= torch.is_grad_enabled()
        for number in self._root:
            self.units[number].gather()
        for number in self._root:
            self.units[number].wait()

    def _after_model(self, *_: Any) -> None:
        if not self.in_backward:
            self.settle()
            if not self.pinned:  # one rank may do so alone
                self._agree()

    def _model_ended(self, *_: Any) -> None:
        self._running &= self.in_backward  # where it failed, nothing is waited for

    def _agree(self) -> None:
        if self._blocks:
            self.order.agree(self.units[0].comm, self.units[0].full.device)

    # --- a block's forward -----------------------------------------------------------------------------

    def _before_forward(self, at: int) -> Any:
        def hook(_module: nn.Module, inputs: Any, named: Any) -> None:
            _refuse_transforms()
            if self.in_backward:
                self._fetch([at])
                self._watch_recomputation(at, tensors_in((inputs, named), deep=False))
            elif self._running or torch.is_grad_enabled():
                tensors = tensors_in((inputs, named), deep=False)
                self._begin(at, fed=bool(tensors))
                self._watch_inputs(at, tensors)
            else:
                self._fetch([at])
            self._wait(at)

        return hook

    def _begin(self, at: int, *, fed: bool) -> None:
        if not self.pinned:
            self.order.use(at)
        wanted = [at, *self.order.ahead(at, self.prefetch)]
        for other in self._held.difference(wanted, self._kept, (use.block for use in self._open)):
            self._release(other)
        self._fetch(wanted)
        self._idle = None
        self._open.append(Use(at, len(self._uses), now(), fed=fed))

    def _watch_inputs(self, at: int, tensors: list[Tensor]) -> None:
        """Backward is through with a block when it comes to what made the inputs. Those that nothing made get their
        gradients earlier, maybe: then the block goes with the next one's beginning."""
        if tensors and torch.is_grad_enabled():
            self._by_input.add(at)
            uses, begin = self._uses, len(self._uses)
            made = [t for t in tensors if t.grad_fn is not None]
            if made and uses.last != at:
                _when_all(made, lambda _: self._through(uses, begin))

    def _watch_recomputation(self, at: int, tensors: list[Tensor]) -> None:
        """In a backward inside backward (``use_reentrant=True``) the inputs' gradients count as a parameter's."""
        if tensors and at not in self._by_input and torch.is_grad_enabled():
            self._owed[at] += 1
            _when_all(tensors, lambda _: self._paid(at))

    def _after_forward(self, at: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if self.in_backward:
                return  # recomputation: backward of this block follows at once
            stop = now()
            use = self._open.pop() if self._open else Use(at, len(self._uses), stop)
            tensors = tensors_in(outputs) if torch.is_grad_enabled() else []
            backward = bool(tensors) or (torch.is_grad_enabled() and stop > use.first)
            if tensors:
                register_multi_grad_hook(tensors, self._before_backward(self._uses, len(self._uses)), mode="any")
            if backward:
                self._graph = True
                self._uses.add(use._replace(block=at, stop=stop, outputs=made_by(tensors), told=bool(tensors)))
                if self.reshard == "keep":
                    self._kept.add(at)
            if at not in self._kept and not any(use.block == at for use in self._open):
                self._used(at, backward=backward)

        return hook

    def _used(self, at: int, *, backward: bool) -> None:
        """Releases a block, unless it comes next again, or stays as the last one, or that is not known yet."""
        after = self.order.next()
        if not (self._running or backward):
            self._release(at)  # no end will come
        elif after is None or after == at or (after == NOTHING and backward and self.reshard == "keep_last"):
            self._idle = at if backward else None
        else:
            self._release(at)

    # --- a block's backward ----------------------------------------------------------------------------

    def _before_backward(self, uses: Uses, number: int) -> Any:
        def hook(_gradient: Tensor) -> None:
            self._through(uses, number + 1)
            blocks = uses.next(number) if uses.ahead_of(number) else []
            if early := uses.early(number):
                self._fetch([*blocks, *early])
                self._wait(*blocks[:1], *early)
            elif blocks:
                self._fetch(blocks)
                self._wait(blocks[0])

        return hook

    def _through(self, uses: Uses, first: int) -> None:
        if torch.is_grad_enabled():  # in backward: it makes a graph of its own
            self._second_backward()
        for at in uses.through(first):
            self._release(at)

    def _second_backward(self) -> None:
        """A backward through this one is to come, in whatever order, maybe after the engine's own has begun."""
        if self.reshard != "keep":
            raise refuse_second_backward()
        self._twice = True

    def _paid(self, at: int) -> None:
        self._owed[at] -= 1
        if self._owed[at] == 0 and at not in self._by_input:
            self._release(at)

    # --- what the engine says --------------------------------------------------------------------------

    def begin_backward(self, loss: Tensor) -> None:
        self._first.stop()
        self._agree()  # training that never calls the model's own forward
        self.settle()
        self.in_backward = True
        self._need_root()  # it is there, but for a second backward
        self._fetch(early := self._plan(loss))
        self._wait(*early)

    def _plan(self, loss: Tensor) -> list[int]:
        """The blocks that backward from ``loss`` may come to before anything says so."""
        left = [*self._before, self._uses]
        if not (self._walks or any(uses.unsure for uses in left)):
            return []
        numbers = reached(loss, min((uses.first for uses in left if uses.first is not None), default=0))
        at_once = [block for uses in left for block in uses.plan(numbers)]
        if not self._looked:  # once, whatever it looks like; and on, where it was not what it looked like
            self._looked = True
            self._walks = any(uses.any_early for uses in left)
        return at_once

    def explain(self, error: RuntimeError) -> UsageError | None:
        """What is said instead of torch's ``error``, raised in backward."""
        return missed() if is_missed(error) else None

    def arrived(self, number: int) -> None:
        """A gradient of unit ``number`` is complete; the last one of a block without inputs' gradients releases it."""
        at = self._position.get(number)
        if at is not None:
            self._paid(at)

    def end_backward(self, *, failed: bool) -> None:
        self.in_backward = self._running = self._graph = False
        if self._uses.unsure:
            self._before.append(self._uses)
        self._uses = Uses(self.prefetch)
        self._owed = list(self._trainable)
        self.order.begin()
        if not failed:  # else others may never answer the messages that would be waited for
            self.release_all()

    def release_all(self) -> None:
        """What is gathered is of no use any more."""
        self._idle = None
        self._twice = False
        self._kept.clear()
        if not self.pinned:
            self._held.clear()
            for unit in self.units:
                unit.release()

    def over(self) -> None:
        """A step's backwards are: what they were computed from is gone."""
        self._before.clear()
        self.release_all()

    def changed(self) -> None:
        """The shards are not what they were, and what was computed before has no backward any more."""
        self.over()
        if self.pinned:
            for unit in self.units:
                unit.renew()
            for unit in self.units:
                unit.wait()

    def settle(self) -> None:
        """A forward is over: what stays until backward does, and nothing else."""
        self._open.clear()
        if self._idle is not None and self.reshard == "keep_last":
            self._kept.add(self._idle)
        self._idle = None
        for at in self._held - self._kept:
            self._release(at)
        if not (self._graph or self.pinned):
            for number in self._root:
                self.units[number].release()

    def gather_all(self) -> None:
        self._held.update(range(len(self._blocks)))
        for unit in self.units:
            unit.gather()
        for unit in self.units:
            unit.wait()

    def stays(self, number: int) -> bool:
        """Whether what is done with unit ``number`` now will find it in backward too."""
        at = self._position.get(number)
        stays = at == self._idle == self.order.last and self.reshard == "keep_last"
        return at is None or self.pinned > 0 or stays or at in self._kept or any(u.block == at for u in self._open)

    # --- one block -------------------------------------------------------------------------------------

    def _fetch(self, blocks: Sequence[int]) -> None:
        for at in blocks:
            self._held.add(at)
            for number in self._blocks[at]:
                self.units[number].gather()

    def _wait(self, *blocks: int) -> None:
        for at in blocks:
            for number in self._blocks[at]:
                self.units[number].wait()

    def _release(self, at: int) -> None:
        if not (self.pinned or self._twice):
            self._held.discard(at)
            self._kept.discard(at)
            for number in self._blocks[at]:
                self.units[number].release()


def _refuse_transforms() -> None:
    if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise UsageError(
            "the model is called inside a transform of torch.func (vmap, grad, …) while its parameters are partitioned "
            "(stage 3), and backward through that cannot be followed",
            hint="call it plainly, or vmap under torch.no_grad(); else train with zero.stage 2",
        )


def _called(module: nn.Module) -> list[nn.Module]:
    """The module, or what of it has a forward: a list of modules is never called itself."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [inner for child in module.children() for inner in _called(child)]


def _when_all(tensors: Sequence[Tensor], call: Callable[[Any], None]) -> None:
    """Calls when all gradients are there. torch's own way for several keeps the operations that made them in a cycle
    until the collector runs, and what lies between a step's large pieces keeps the next step's from their places."""
    if len(tensors) == 1:
        tensors[0].register_hook(call)  # type: ignore[no-untyped-call]
    else:
        register_multi_grad_hook(tensors, call, mode="all")


def tensors_in(value: Any, *, deep: bool = True) -> list[Tensor]:
    """The tensors with gradients in nested lists, tuples and mappings, ``deep``: and in dataclass-like outputs."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v, deep=deep)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v, deep=deep)]
    if deep and hasattr(value, "__dict__"):
        return [t for v in vars(value).values() for t in tensors_in(v)]
    return []
