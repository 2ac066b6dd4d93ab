"""Samples as a function of (seed, global sample index), over memory-mapped token files.

No rank keeps a place of its own in the data: sample ``i`` is the same window of tokens at any world
size, so that a change of world size repeats and skips nothing. Every epoch visits every window once, in
a pseudo-random order that is computed, not stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...contract.errors import UsageError
from ..chance import mix


def permuted(index: int, count: int, key: int) -> int:
    """Where a pseudo-random permutation of ``range(count)`` sends ``index``: a Feistel network, walked
    until it lands inside."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (mix(key, turn, right) & mask)
        index = left << half | right
        if index < count:
            return index


def token_dtype(vocab: int) -> torch.dtype:
    """How a token file of this vocabulary stores a token, as the signed type of that width."""
    if vocab <= 2**8:
        return torch.uint8
    return torch.int16 if vocab <= 2**16 else torch.int32


@dataclass(frozen=True)
class TokenFile:
    """A flat file of tokens: uint8 for a vocabulary of at most 256, else uint16, else uint32."""

    path: Path
    vocab: int
    tokens: Tensor  # memory-mapped

    @classmethod
    def open(cls, path: Path, vocab: int) -> TokenFile:
        dtype = token_dtype(vocab)
        width = torch.empty(0, dtype=dtype).element_size()
        try:
            size = path.stat().st_size
        except OSError as error:
            raise UsageError(
                f"token file {path} cannot be read: {error.strerror}",
                hint="relative names are inside the shipped code; absolute ones on the cluster",
            ) from error
        if size == 0 or size % width:
            raise UsageError(f"token file {path} has {size} bytes: vocab {vocab} takes {width} bytes a token")
        return cls(path, vocab, torch.from_file(str(path), shared=False, size=size // width, dtype=dtype))

    def __len__(self) -> int:
        return self.tokens.numel()

    def window(self, start: int, length: int) -> Tensor:
        """Tokens [start, start + length) as int64."""
        window = self.tokens[start : start + length].to(torch.int64)
        if self.tokens.dtype != torch.uint8:
            window &= 2 ** (8 * self.tokens.element_size()) - 1
        return window

    def checked(self, batch: Tensor) -> Tensor:
        top = int(batch.max())
        if top >= self.vocab:
            raise UsageError(f"token file {self.path} has token {top}, but the vocabulary has {self.vocab}")
        return batch


@dataclass(frozen=True)
class Samples:
    """Training samples: windows of ``seq_len + 1`` tokens (inputs, and targets one further)."""

    file: TokenFile
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.file) < 2 * (self.seq_len + 1):
            raise UsageError(
                f"token file {self.file.path} has {len(self.file)} tokens: too few for windows of {self.seq_len}"
            )

    def start(self, index: int) -> int:
        """Where sample ``index`` begins in the file. Each epoch shifts the windows by an offset of its own."""
        count = (len(self.file) - 1) // self.seq_len - 1
        epoch, place = divmod(index, count)
        offset = mix(self.seed, epoch, 1) % self.seq_len
        return offset + permuted(place, count, mix(self.seed, epoch, 2)) * self.seq_len

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples [first, first + count): inputs and targets, each (count, seq_len)."""
        rows = [self.file.window(self.start(first + i), self.seq_len + 1) for i in range(count)]
        both = self.file.checked(torch.stack(rows))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@dataclass(frozen=True)
class HeldOut:
    """Windows spread evenly over the held-out file; how many does not depend on the world size."""

    file: TokenFile
    seq_len: int
    tokens: int

    @property
    def windows(self) -> int:
        return max(1, min(self.tokens, len(self.file) - 1) // self.seq_len)

    @property
    def _stride(self) -> int:
        return (len(self.file) - 1) // self.windows

    def batch(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """The windows of these numbers: inputs and targets, each (len(numbers), seq_len)."""
        rows = [self.file.window(n * self._stride, self.seq_len + 1) for n in numbers]
        both = self.file.checked(torch.stack(rows))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def bigram_entropy(file: TokenFile) -> float | None:
    """H(next | previous) in nats a token, from the counts of the file itself; None above 1024 tokens."""
    if file.vocab > 1024 or len(file) < 2:
        return None
    vocab = file.vocab
    pairs = torch.zeros(vocab * vocab, dtype=torch.int64)
    chunk = 2**20
    for start in range(0, len(file) - 1, chunk):
        window = file.checked(file.window(start, min(chunk + 1, len(file) - start)))
        pairs += torch.bincount(window[:-1] * vocab + window[1:], minlength=vocab * vocab)
    joint = pairs.view(vocab, vocab).double()
    previous = joint.sum(1, keepdim=True)
    return float(-(joint * torch.log((joint / previous).clamp_min(1e-300)).nan_to_num()).sum() / joint.sum())


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()
