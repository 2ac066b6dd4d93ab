"""Proving the bytes of a checkpoint that lies here: sizes, whole digests, and a digest for each 16 MiB."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import xxhash

from ..contract.damage import forget_damage, note_damage
from ..contract.errors import VerificationFailed
from ..contract.folder import CheckpointFolder, step_of
from ..contract.manifest import BLOCK_BYTES, Manifest, ShardFile
from ..contract.plain import open_file, read_file

READ_BYTES = 2**20


@dataclass(frozen=True)
class ShardProblem:
    """What is wrong with one rank's file; ``blocks`` counts from 0, BLOCK_BYTES each."""

    rank: int
    node: str
    file: str
    what: str
    blocks: tuple[int, ...] = ()

    def sentence(self) -> str:
        return f"rank {self.rank}'s shard {self.file} (from {self.node}): {self.what}"


@dataclass(frozen=True)
class Report:
    """What ``verify`` found. ``problems`` holds a sentence for everything that is wrong."""

    folder: str
    step: int | None
    bytes: int = 0
    num_shards: int = 0
    shards: tuple[ShardProblem, ...] = field(default=())
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self) -> None:
        """Raises VerificationFailed naming rank, file and block when anything is wrong."""
        if self.problems:
            more = f"\n… and {len(self.problems) - 5} more" if len(self.problems) > 5 else ""
            raise VerificationFailed(
                "\n".join(self.problems[:5]) + more, hint="zerun collect brings what is wrong once more"
            )


def verify(folder: Path) -> Report:
    """Reads every shard of ``RUN/checkpoints/step-*`` and holds it against the manifest. What is damaged is noted
    beside it, so that it is not taken for whole again."""
    try:
        manifest = read_manifest(folder / "manifest.json", step_of(folder.name))
    except VerificationFailed as problem:
        return Report(str(folder), step_of(folder.name), problems=(problem.message,))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        checked = pool.map(lambda shard: check_shard(folder / shard.file, shard), manifest.shards)
        shards = tuple(problem for problem in checked if problem is not None)
    wrong = {problem.rank: problem for problem in shards}
    for shard in manifest.shards:
        if shard.rank not in wrong:
            forget_damage(str(folder), shard.rank)
        elif wrong[shard.rank].blocks:
            note_damage(str(folder), shard.rank, shard.file, f"is damaged: {wrong[shard.rank].what}")
    return Report(
        folder=str(folder),
        step=manifest.step,
        bytes=manifest.bytes,
        num_shards=len(manifest.shards),
        shards=shards,
        problems=tuple(p.sentence() for p in shards),
    )


def read_manifest(path: Path, step: int | None = None) -> Manifest:
    """The manifest in a file; VerificationFailed when it cannot be read or contradicts itself."""
    try:
        manifest = Manifest.from_bytes(read_file(path))
    except FileNotFoundError:
        raise VerificationFailed(f"{path}: there is no manifest, so no checkpoint") from None
    except (OSError, ValueError) as problem:
        raise VerificationFailed(f"{path}: the manifest cannot be read: {problem}") from problem
    if step is not None and manifest.step != step:
        raise VerificationFailed(f"{path}: the manifest is of step {manifest.step}, its folder of step {step}")
    world = manifest.layout.ranks * manifest.layout.tensor
    # As many first: a damaged number of ranks must not cost more than it takes to read it.
    if len(manifest.shards) != world or sorted(s.rank for s in manifest.shards) != list(range(world)):
        raise VerificationFailed(f"{path}: the manifest does not name one shard for each of {world} ranks")
    layout, folder = manifest.layout, CheckpointFolder(PurePosixPath())
    for unit in layout.units:
        if (unit.ranks, unit.tensor, unit.replicas) != (layout.ranks, layout.tensor, layout.replicas):
            raise VerificationFailed(f"{path}: unit {unit.name} is cut for other ranks than the whole")
    for shard in manifest.shards:
        # A name from elsewhere: nothing but a rank's own file name is ever opened or asked for.
        if shard.file != folder.shard(shard.rank).name:
            raise VerificationFailed(f"{path}: the manifest names {shard.file!r} as rank {shard.rank}'s file")
        if shard.bytes < 0 or len(shard.blocks) != -(-shard.bytes // BLOCK_BYTES):
            what = f"{len(shard.blocks)} digests for the {shard.bytes} bytes of rank {shard.rank}"
            raise VerificationFailed(f"{path}: the manifest has {what}")
    return manifest


def check_shard(path: Path, shard: ShardFile, *, durable: bool = False) -> ShardProblem | None:
    """None when the file at ``path`` is what the manifest says; ``durable`` also syncs it to its disk."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            return _problem(shard, "is no plain file")
        if about.st_size != shard.bytes:
            return _problem(shard, f"has {about.st_size} bytes of {shard.bytes}")
        whole, blocks = digests(path)
        if durable:
            with open_file(path) as file:
                os.fsync(file.fileno())
    except FileNotFoundError:
        return _problem(shard, "is missing")
    except OSError as problem:
        return _problem(shard, f"cannot be read: {problem.strerror}")
    wrong = tuple(i for i, (found, right) in enumerate(zip(blocks, shard.blocks, strict=False)) if found != right)
    if wrong:
        first = wrong[0] * BLOCK_BYTES
        named = ", ".join(map(str, wrong[:8])) + (", …" if len(wrong) > 8 else "")
        many = f"blocks {named}" if len(wrong) > 1 else f"block {named}"
        what = f"{many} of {len(shard.blocks)} damaged (16 MiB each, counted from 0; the first at byte {first})"
        return _problem(shard, what, wrong)
    if whole != shard.digest:
        return _problem(shard, "its whole digest is wrong, although every block's is right: the manifest is damaged")
    return None


def digests(path: Path) -> tuple[str, tuple[str, ...]]:
    """xxh3-128 in hex: of the whole file, and of each BLOCK_BYTES of it."""
    whole = xxhash.xxh3_128()
    blocks = []
    buffer = memoryview(bytearray(READ_BYTES))
    with open_file(path) as file:
        block, filled = xxhash.xxh3_128(), 0
        while count := file.readinto(buffer):
            data = buffer[:count]
            whole.update(data)
            while data:
                part = data[: BLOCK_BYTES - filled]
                block.update(part)
                filled += len(part)
                data = data[len(part) :]
                if filled == BLOCK_BYTES:
                    blocks.append(block.hexdigest())
                    block, filled = xxhash.xxh3_128(), 0
        if filled:
            blocks.append(block.hexdigest())
    return whole.hexdigest(), tuple(blocks)


def _problem(shard: ShardFile, what: str, blocks: tuple[int, ...] = ()) -> ShardProblem:
    return ShardProblem(shard.rank, shard.node, shard.file, what, blocks)
