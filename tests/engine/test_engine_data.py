"""Samples are a function of (seed, global index); the held-out set does not depend on the world size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.contract.errors import UsageError
from launcher.engine.chance import mix
from launcher.engine.job.data import HeldOut, Samples, TokenFile, bigram_entropy, permuted


def _file(tmp_path: Path, tokens: list[int], vocab: int = 256) -> TokenFile:
    width = 1 if vocab <= 256 else 2 if vocab <= 65536 else 4
    path = tmp_path / f"{vocab}.bin"
    path.write_bytes(b"".join(t.to_bytes(width, "little") for t in tokens))
    return TokenFile.open(path, vocab)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_permutation_of_any_length(count: int, key: int) -> None:
    assert sorted(permuted(i, count, key) for i in range(count)) == list(range(count))


def test_mixing_is_stable() -> None:
    """Samples of runs that were made must stay the samples of runs that go on."""
    assert mix(1, 2, 3) == mix(1, 2, 3)
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500
    assert mix(7) == 0x63CBE1E459320DD7


@pytest.mark.parametrize(("vocab", "top"), [(256, 255), (50000, 49999), (200000, 199999)])
def test_every_width_of_token(tmp_path: Path, vocab: int, top: int) -> None:
    file = _file(tmp_path, [0, 1, top, 2, top], vocab)
    assert file.window(0, 5).tolist() == [0, 1, top, 2, top]
    assert len(file) == 5


def test_an_epoch_visits_every_window_once_and_targets_are_one_further(tmp_path: Path) -> None:
    file = _file(tmp_path, [i % 251 for i in range(1000)])
    samples = Samples(file, seq_len=9, seed=3)
    count = (1000 - 1) // 9 - 1
    for epoch in (0, 1):
        starts = [samples.start(epoch * count + i) for i in range(count)]
        assert len({s // 9 for s in starts}) == count
        assert all(s >= 0 and s + 10 <= 1000 for s in starts)
    inputs, targets = samples.batch(5, 4)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.shape == targets.shape == (4, 9)
    assert torch.equal(samples.batch(6, 1)[0][0], inputs[1])


def test_the_same_samples_at_every_world_size(tmp_path: Path) -> None:
    """As the loop deals them out: rank r of N takes micro-batches r, r + N, … of a step."""
    samples = Samples(_file(tmp_path, list(range(250)) * 8), seq_len=5, seed=1)

    def of_step(step: int, world: int, micro: int) -> list[list[int]]:
        rows = []
        for number in range(16 // (world * micro)):
            for rank in range(world):
                first = step * 16 + (number * world + rank) * micro
                rows += samples.batch(first, micro)[0].tolist()
        return sorted(rows)

    for step in range(3):
        assert of_step(step, 1, 2) == of_step(step, 2, 4) == of_step(step, 4, 1) == of_step(step, 4, 4)


def test_held_out_windows_spread_over_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, [i % 256 for i in range(5000)])
    held = HeldOut(file, seq_len=10, tokens=200)
    assert held.windows == 20
    inputs, targets = held.batch(list(range(20)))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert HeldOut(file, seq_len=10, tokens=10**9).windows == 499


def test_bigram_entropy_by_hand(tmp_path: Path) -> None:
    file = _file(tmp_path, [0, 1, 0, 2, 0, 1, 0, 2, 0])  # after 0: 1 or 2; after 1 and 2: 0
    assert bigram_entropy(file) == pytest.approx(0.5 * math.log(2))
    assert bigram_entropy(_file(tmp_path, [1, 2], 2000)) is None


def test_what_a_token_file_can_be_wrong_in(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        TokenFile.open(tmp_path / "no.bin", 256)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(UsageError, match="3 bytes: vocab 50000 takes 2 bytes a token"):
        TokenFile.open(tmp_path / "odd.bin", 50000)
    with pytest.raises(UsageError, match="too few for windows of 100"):
        Samples(_file(tmp_path, [1] * 50), seq_len=100, seed=0)
    with pytest.raises(UsageError, match="token 90, but the vocabulary has 64"):
        Samples(TokenFile.open(_file(tmp_path, [90] * 50).path, 64), seq_len=5, seed=0).batch(0, 1)
