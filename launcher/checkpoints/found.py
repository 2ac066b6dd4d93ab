"""Which checkpoints a run has, and which of them are whole: the answers of all places, joined.

Without a shared filesystem each node keeps its own ranks' shards, and a checkpoint is whole only when
every shard that its manifest names lies somewhere in its full size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..contract.errors import UsageError, VerificationFailed
from ..contract.folder import RunFolder
from ..contract.holdings import checkpoints_here, said_shared
from ..contract.lineage import left_behind, resumed_from, why_left

HOME = "home"
_MANY = 10
"""More checkpoints than these are counted, not told one by one."""


@dataclass(frozen=True)
class Candidate:
    """One checkpoint. ``attempt`` wrote it (0: not known); ``where`` names the nodes that wrote shards of it;
    ``problem`` is empty when it is whole, which says nothing about bytes that nobody has read. ``left`` says why it
    is not on the line that the run is on: a resume from an earlier step left it behind."""

    step: int
    whole: bool
    problem: str = ""
    bytes: int = 0
    attempt: int = 0
    ranks: int = 0
    where: tuple[str, ...] = ()
    from_replicas: str = ""  # whole by copies: "node03's shards from node04's replica"
    left: str = ""
    state: Literal["whole", "damaged", "unfinished", "let go"] = "unfinished"
    """damaged: it was whole when it was written. let go: on purpose, but by nodes that the attempt since left out."""
    at_home: bool = False  # whole at home, and not where the run runs
    name: str = ""  # of a program's own: its path below the run's folder; ``step`` is the last number in it, or 0
    written_at: float = 0.0  # of a program's own

    def sentence(self) -> str:
        left = f", but left behind: {self.left}" if self.left else ""
        copied = f" ({self.from_replicas})" if self.from_replicas else " at home" if self.at_home else ""
        return f"{self.name or f'step {self.step}'}: {f'whole{copied}' if self.whole else self.problem}{left}"


def candidates(
    about: Sequence[Mapping[str, Any]], home: Path | None = None, *, sends_back: bool = False
) -> list[Candidate]:
    """Every checkpoint, oldest first. ``about``: each place's answer about this run (the ``state`` verb's
    ``runs[D]``); ``home``: the run's folder here. Where nothing is shared its shards count too, because they can
    be staged to a node; what a shared scratch disk has lost is lost to the ranks, unless ``sends_back``: then what is
    whole at home counts in its place."""
    from .foreign import foreign_candidates

    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for answer, left_out in zip(about, _left_out(about), strict=True):
        for checkpoint in answer.get("checkpoints", ()):
            by_step.setdefault(int(checkpoint["step"]), []).append({**checkpoint, "left_out": left_out})
    counts = home is not None and by_step and said_shared(str(home)) is not True
    for checkpoint in checkpoints_here(str(home)) if counts else ():
        if checkpoint["step"] in by_step:
            by_step[checkpoint["step"]].append({**checkpoint, "at_home": True})
    found = [_let_go(_join(step, by_step[step]), by_step[step]) for step in sorted(by_step)]
    found = _with_home(found, home) if sends_back and home is not None else found
    resumed = {} if home is None else resumed_from(str(home))
    for answer in about:
        resumed.update({int(k): step for k, step in answer.get("resumed", {}).items()})
    behind = left_behind({c.step: c.attempt for c in found if c.attempt}, resumed)
    found = [replace(c, left=why_left(c.step, c.attempt, resumed)) if c.step in behind else c for c in found]
    return found + foreign_candidates(about)


def _left_out(about: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of each place: the newest attempt, where that does not run there; else 0."""
    attempts = [max((int(k) for k in answer.get("attempts", ())), default=0) for answer in about]
    newest = max(attempts, default=0)
    return [newest if number < newest else 0 for number in attempts]


def _let_go(candidate: Candidate, parts: Sequence[Mapping[str, Any]]) -> Candidate:
    """A checkpoint of which only nodes have parts that the newest attempt left out: the others keep newer ones."""
    newest = min(int(part.get("left_out", 0)) for part in parts)
    if candidate.whole or not newest or candidate.attempt >= newest:
        return candidate
    said = f"only nodes that attempt {newest} left out still have parts of it; zerun ckpt prune --remote frees them"
    return replace(candidate, state="let go", problem=said)


def _with_home(found: Sequence[Candidate], home: Path) -> list[Candidate]:
    by_step = {candidate.step: candidate for candidate in found}
    for checkpoint in checkpoints_here(str(home)):
        mine = _join(int(checkpoint["step"]), [checkpoint])
        theirs = by_step.get(mine.step)
        if mine.whole and (theirs is None or (not theirs.whole and theirs.attempt <= mine.attempt)):
            by_step[mine.step] = replace(mine, at_home=True)
    return [by_step[step] for step in sorted(by_step)]


def _join(step: int, parts: Sequence[Mapping[str, Any]]) -> Candidate:
    with_manifest = [p for p in parts if p.get("shards") is not None]
    if not with_manifest:
        problems = [str(p["problem"]) for p in parts if p.get("problem")]
        bytes_there = sum(int(p["bytes"]) for p in parts)
        return Candidate(step, False, problems[0] if problems else "no manifest", bytes_there)
    # An attempt that was resumed from before may have written the same step again: its word is the newer.
    newest = max(with_manifest, key=lambda p: int(p.get("attempt", 0)))
    shards, attempt = newest["shards"], int(newest.get("attempt", 0))
    mine = [p for p in parts if p.get("shards") in (None, shards) and (not p["attempt"] or p["attempt"] == attempt)]
    wrong = []
    for rank, node, size in shards:
        found = [p["sizes"][str(rank)] for p in mine if str(rank) in p["sizes"]]
        if size in found:
            continue
        unfit = [p["unfit"][str(rank)] for p in mine if str(rank) in p.get("unfit", {})]
        if unfit:
            wrong.append(f"rank {rank}'s shard on {node} {unfit[0]}")
        elif found:
            wrong.append(f"rank {rank}'s shard on {node} has {found[0]} bytes of {size}")
        else:
            wrong.append(f"rank {rank}'s shard is missing on {node}")
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Candidate(
        step=step,
        whole=not wrong,
        state="damaged" if wrong else "whole",
        problem="; ".join(wrong[:3]) + more,
        bytes=sum(int(size) for _, _, size in shards),
        attempt=attempt,
        ranks=len(shards),
        where=tuple(dict.fromkeys(str(node) for _, node, _ in shards)),
        from_replicas=_from_replicas(shards, mine),
    )


def _from_replicas(shards: Sequence[tuple[int, str, int]], parts: Sequence[Mapping[str, Any]]) -> str:
    """Whose shards lie nowhere but in copies, and whose copies those are."""
    only: dict[tuple[str, str], None] = {}
    for rank, node, size in shards:
        having = [p for p in parts if p["sizes"].get(str(rank)) == size and "at_home" not in p]
        keepers = [p.get("replicas", {}).get(str(rank)) for p in having]
        if keepers and all(keepers):
            only[str(node), str(keepers[0])] = None
    return "; ".join(f"{node}'s shards from {keeper}'s replica" for node, keeper in only)


def newest_whole(found: Sequence[Candidate]) -> Candidate | None:
    """On the line that the run is on; where none is whole there, of those that were left behind."""
    return max((c for c in found if c.whole), key=lambda c: (not c.left, c.step, c.written_at), default=None)


def choose(found: Sequence[Candidate], step: int | None = None) -> Candidate:
    """The checkpoint to go on from: the one of ``step``, or the newest whole one.

    UsageError when there is none, VerificationFailed when the one that was asked for is not whole.
    """
    have = _steps([c.step for c in found if c.whole])
    if step is not None:
        named = next((c for c in found if c.step == step), None)
        if named is None:
            raise UsageError(f"there is no checkpoint of step {step}", hint=f"whole ones: {have}")
        if not named.whole:
            raise VerificationFailed(f"the checkpoint is not whole: {named.sentence()}", hint=f"whole ones: {have}")
        return named
    newest = newest_whole(found)
    if newest is not None:
        return newest
    if not found:
        raise UsageError("there is no checkpoint yet", hint="submit the job again; nothing of it can be resumed")
    looked = "; ".join(c.sentence() for c in reversed(found))
    raise VerificationFailed(f"no checkpoint is whole: {looked}", hint="submit the job again")


def explain(found: Sequence[Candidate], chosen: Candidate | None) -> list[str]:
    """What was looked at, newest first, which was taken and why: a line each; of many that were passed over, one."""
    lines: list[str] = []
    passed: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: -c.step):
        if chosen is not None and candidate.step < chosen.step:
            if chosen.left and not candidate.left:
                lines.append(candidate.sentence())
                continue
            break
        if chosen is not None and candidate.step == chosen.step:
            lines.append(f"{candidate.sentence()}, taken")
        elif candidate.whole and chosen is not None and not (candidate.left and not chosen.left):
            passed.append(candidate)
            lines.append(f"{candidate.sentence()}, but step {chosen.step} was asked for")
        else:
            lines.append(candidate.sentence())
    if chosen is None or len(passed) <= _MANY:
        return lines
    told = f"{len(passed)} whole ones between step {passed[-1].step} and {passed[0].step}, but step {chosen.step} was"
    single = {f"{c.sentence()}, but step {chosen.step} was asked for" for c in passed}
    return [f"{told} asked for", *(line for line in lines if line not in single)]


def _steps(steps: Sequence[int]) -> str:
    """Of many steps the newest, and how many more there are."""
    newest = sorted(set(steps))[-_MANY:]
    more = len(set(steps)) - len(newest)
    return (f"{more} older ones, " if more else "") + ", ".join(map(str, newest)) if newest else "none"


def local_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a run's folder here, oldest first: those that have a manifest, damaged or not."""
    steps = [int(c["step"]) for c in checkpoints_here(str(folder))]
    run = RunFolder.at(str(folder.parent), folder.name)
    return [step for step in steps if os.path.lexists(run.checkpoint(step).manifest)]
