"""The order in which a model's forward uses its blocks and backward comes to them: stage 3 fetches ahead by it.

The first forward follows the order in which blocks are defined for as long as that is what happens; where it is not,
nothing is expected of the rest of it. What it used, each use of it, is then every rank's order (rank 0's is
broadcast: ranks that expected different things would post their messages crosswise). A forward that later takes
another way is found again at its next block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

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
        self.agreed = False
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self._at = 0  # uses that are behind
        self._seen: set[int] = set()
        self._known = True  # whether the last use was expected at all
        self._astray = False  # a block came again, or late: what was seen is not expected any more
        if not self.agreed:
            self._recorded = []
            self._expected = self._defined

    def use(self, block: int) -> None:
        """``block`` is used now."""
        self._seen.add(block)
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
    """A block that backward will come to; ``begin``: how many such uses had ended when it began; ``early``: it computed
    something after what it returned, to which backward may come first."""

    block: int
    begin: int
    early: bool = False


class Uses:
    """What backward comes to, in forward's order. One use within another ends before that, and has begun after it."""

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._uses: list[Use] = []
        self._task = -1  # the backward that goes through them
        self._left = 0  # what it is not through with

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def last(self) -> int | None:
        """The block that was used last."""
        return self._uses[-1].block if self._uses else None

    def add(self, use: Use) -> None:
        """``use`` has ended."""
        self._uses.append(use)

    def through(self, first: int) -> list[int]:
        """Backward is through with all uses that began when ``first`` had ended: blocks of those that it does not come
        to soon again."""
        task = torch._C._current_graph_task_id()
        if self._task != task:
            self._task, self._left = task, len(self._uses)
        wanted, found = self.next(first - 1), []
        while self._left and self._uses[self._left - 1].begin >= first:
            self._left -= 1
            if self._uses[self._left].block not in wanted:
                found.append(self._uses[self._left].block)
        return found

    def ahead_of(self, number: int) -> bool:
        """Whether backward has not been through with this use."""
        return number < self._left

    def early(self, number: int) -> list[int]:
        """The block of use ``number``, if backward may come to it before what it returned."""
        return [self._uses[number].block] if number >= 0 and self._uses[number].early else []

    def next(self, number: int) -> list[int]:
        """The block of use ``number``, and those that backward comes to then."""
        found: list[int] = []
        while number >= 0 and len(found) <= self._prefetch:
            if self._uses[number].block not in found:
                found.append(self._uses[number].block)
            number -= 1
        return found


def goes_on(tensors: Sequence[Tensor]) -> bool:
    """Whether there is an operation after those that made ``tensors``."""
    made = [t.grad_fn._sequence_nr() for t in tensors if t.grad_fn is not None]
    return bool(made) and torch.autograd._get_sequence_nr() > max(made) + 1  # type: ignore[attr-defined]


def _runs(uses: list[int]) -> list[int]:
    """Without immediate repetitions, for which nothing is gathered."""
    return [block for block, before in zip(uses, [NOTHING, *uses]) if block != before]  # noqa: B905 (Python 3.9)


def _of_first(own: list[int], comm: Comm, device: torch.device) -> list[int]:
    """Rank 0's numbers, as many as everyone has; one's own where they are equal (a simulation has no others)."""
    mine = torch.tensor(own, dtype=torch.int32).to(device)
    first = mine.clone()
    comm.broadcast(first, 0, "the order in which units are used")
    return [int(n) for n in first.tolist()] if bool((first != mine).any()) else own
