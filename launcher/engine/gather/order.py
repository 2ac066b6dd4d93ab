"""The order in which a model's forward uses its blocks and backward comes to them: stage 3 fetches ahead by it.

The first forward follows the order in which blocks are defined for as long as that is what happens; where it is not,
nothing is expected of the rest of it. What it used, each use of it, is then every rank's order (rank 0's is
broadcast: ranks that expected different things would post their messages crosswise). A forward that later takes
another way is found again at its next block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract.errors import UsageError
from ..comm import Comm

NOTHING = -1  # comes after the last use
NONE: frozenset[int] = frozenset()


class Order:
    """Where a pass stands; blocks are numbers. ``defined``: one entry for each module of each block."""

    def __init__(self, defined: Sequence[int]) -> None:
        self._defined = list(defined)
        self._expected = list(defined)
        self._recorded: list[int] = []
        self._digest = 0  # of all uses since it was told
        self.agreed = False
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self._at = 0  # uses that are behind
        self._last = NOTHING
        self._seen: set[int] = set()
        self._known = True  # whether the last use was expected at all
        self._astray = False  # a block came again, or late: what was seen is not expected any more
        if not self.agreed:
            self._recorded = []
            self._expected = self._defined

    def use(self, block: int) -> None:
        """``block`` is used now."""
        self._seen.add(block)
        if block != self._last:  # for immediate repetitions nothing is gathered
            self._last = block
            self._digest = (self._digest * 1_000_003 + block + 1) % 2_147_483_647
        if not self.agreed:
            self._recorded.append(block)
            if block not in self._expected[self._at : self._at + 1]:
                self._expected, self._at, self._known = [], 0, False
                return
            self._at += 1
            return
        self._known = block in self._expected
        if self._known:
            try:
                found = self._expected.index(block, self._at)
            except ValueError:
                self._astray = True
                found = self._expected.index(block)
            self._at = found + 1

    def digest(self) -> int:
        """A number below 2^31 of what was used in which order since it was asked for last: ranks compare it."""
        told, self._digest = self._digest, 0
        return told

    def ahead(self, block: int, count: int) -> list[int]:
        """At most ``count`` other blocks that come after this use of ``block``."""
        found: list[int] = []
        if count:
            past = self._seen if self._astray else NONE
            for other in islice(self._expected, self._at, None):
                if other != block and other not in found and other not in past:
                    found.append(other)
                    if len(found) == count:
                        break
        return found

    def next(self) -> int | None:
        """The block that comes next, maybe the same again; ``NOTHING`` behind the last; None: not known."""
        if not self._known:
            return None
        if self._at < len(self._expected):
            return self._expected[self._at]
        return NOTHING if self.agreed else None

    @property
    def last(self) -> int:
        """The block that is used last, as far as is known."""
        return (self._expected or self._defined or [NOTHING])[-1]

    def agree(self, comm: Comm, device: torch.device) -> None:
        """After the first pass, by all ranks: rank 0's is everyone's from now on.

        Raises :class:`UsageError` on all of them where some rank did not use the same blocks.
        """
        if self.agreed or not self._recorded:
            return
        own = self._recorded
        (count,) = _of_first([len(own)], comm, device)
        first = _of_first((own + [0] * count)[:count], comm, device)
        other = torch.tensor([_runs(first) != _runs(own)], dtype=torch.uint8, device=device)
        others = comm.gather_small(other, "comparing the order in which units are used")
        if bool(others.ne(0).any()):  # of booleans: what a simulation answers is no
            raise UsageError(
                f"rank {int(others.flatten().nonzero()[0])} of those that share the parameters used other blocks than "
                "rank 0, or in another order: they have answered each other's messages crosswise",
                hint="stage 3: all ranks use the same blocks in the same order; what is random must be so on all alike",
            )
        self._expected = first
        self.agreed = True
        self.begin()


class Use(NamedTuple):
    """A block that backward may come to; ``begin``: how many such uses had ended when it began.

    ``first`` and ``stop`` say which of autograd's operations were made meanwhile, by their numbers, ``outputs`` those
    that made what it returned: not its own where it hands on what came in. ``fed``: what came in has a gradient.
    """

    block: int
    begin: int
    first: int = 0
    stop: int = 0
    outputs: tuple[int, ...] = ()
    fed: bool = True
    told: bool = True  # backward says when it comes to what it returned

    @property
    def aside(self) -> bool:
        """Whether backward may come to a part of it before it comes to what it returned."""
        own = [number for number in self.outputs if number >= self.first]
        return self.stop > self.first and (not own or min(own) < self.stop - 1)


class Uses:
    """What backward comes to, in forward's order. One use within another ends before that, and has begun after it."""

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._uses: list[Use] = []
        self._task = -1  # the backward that goes through them
        self._left = 0  # what it is not through with
        self.unsure = False
        """Whether backward may come to a part of a use before it comes to what that returned."""
        self._planned = False  # for the next backward
        self._early: dict[int, list[int]] = {}  # of a use's number: those gathered with it
        self._begun: list[int] = []  # of those: the ones that are gathered

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def last(self) -> int | None:
        """The block that was used last."""
        return self._uses[-1].block if self._uses else None

    @property
    def first(self) -> int | None:
        """The number of the first operation of them all."""
        return min((use.first for use in self._uses), default=None)

    def add(self, use: Use) -> None:
        """``use`` has ended."""
        self._uses.append(use)
        # Where nothing goes on into the next one, backward may never come to what the one before returned.
        self.unsure |= use.aside or (not use.fed and len(self._uses) > 1)

    def plan(self, reached: Sequence[int] | None) -> list[int]:
        """Where backward comes to a part of a use before what that returned, which then is not the sign to gather it:
        the last sign before is. Returns the blocks that no sign comes before, to be gathered at once.

        ``reached``: the numbers of the operations that the next backward runs, rising; None: of all.
        """
        self._planned, self._early, self._begun = reached is not None, {}, []
        there = None if reached is None else set(reached)
        signs = []
        for number, use in enumerate(self._uses):
            told = [made for made in use.outputs if there is None or made in there]
            if told:
                signs.append((max(told), number))
        sign_of = {number: sign for sign, number in signs}
        signs.sort()
        for number in reversed(range(len(self._uses))):
            use = self._uses[number]
            highest = use.stop - 1
            if reached is not None:
                at = bisect_left(reached, use.stop)
                highest = reached[at - 1] if at else -1
            if highest < use.first or sign_of.get(number, -1) >= highest:
                continue  # it is not reached, or its own sign comes in time
            after = bisect_left(signs, (highest, -1))
            if after < len(signs):
                self._early.setdefault(signs[after][1], []).append(number)
            else:
                self._begun.append(number)
        return [self._uses[number].block for number in self._begun]

    @property
    def any_early(self) -> bool:
        """Whether the last plan had any."""
        return bool(self._early or self._begun)

    def through(self, first: int) -> list[int]:
        """Backward is through with all uses that began when ``first`` had ended: blocks of those that it does not come
        to soon again."""
        task = torch._C._current_graph_task_id()
        if self._task != task:
            self._task, self._left = task, len(self._uses)
            if self.unsure and not self._planned:
                self.plan(None)  # not the engine's own backward
            self._planned = False
        wanted, found = self.next(first - 1), []
        wanted += [self._uses[number].block for number in self._begun if number < first]
        while self._left and self._uses[self._left - 1].begin >= first:
            self._left -= 1
            if self._uses[self._left].block not in wanted:
                found.append(self._uses[self._left].block)
        return found

    def ahead_of(self, number: int) -> bool:
        """Whether backward has not been through with this use."""
        return number < self._left

    def early(self, number: int) -> list[int]:
        """Blocks that backward may come to before the sign for them, after that of use ``number``."""
        numbers = self._early.get(number, [])
        self._begun += numbers
        return [self._uses[early].block for early in numbers]

    def next(self, number: int) -> list[int]:
        """The block of use ``number``, and those that backward comes to then."""
        found: list[int] = []
        while number >= 0 and len(found) <= self._prefetch:
            use = self._uses[number]
            if use.told and use.block not in found:
                found.append(use.block)
            number -= 1
        return found


def now() -> int:
    """The number that the next operation of a graph will have: autograd goes from the highest to the lowest."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def made_by(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The numbers of the operations that made ``tensors``."""
    return tuple(t.grad_fn._sequence_nr() for t in tensors if t.grad_fn is not None)


def reached(loss: Tensor, lowest: int) -> list[int]:
    """The numbers, rising, of the operations from ``lowest`` on that backward from ``loss`` comes to."""
    found = {loss.grad_fn} - {None}
    ahead: list[Any] = list(found)
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is not None and node not in found and node._sequence_nr() >= lowest:
                found.add(node)
                ahead.append(node)
    return sorted(node._sequence_nr() for node in found)  # type: ignore[union-attr]


def _runs(uses: list[int]) -> list[int]:
    """Without immediate repetitions, for which nothing is gathered."""
    return [block for block, before in zip(uses, [NOTHING, *uses]) if block != before]  # noqa: B905 (Python 3.9)


def _of_first(own: list[int], comm: Comm, device: torch.device) -> list[int]:
    """Rank 0's numbers, as many as everyone has; one's own where they are equal (a simulation has no others)."""
    mine = torch.tensor(own, dtype=torch.int32).to(device)
    first = mine.clone()
    comm.broadcast(first, 0, "the order in which units are used")
    return [int(n) for n in first.tolist()] if bool((first != mine).any()) else own
