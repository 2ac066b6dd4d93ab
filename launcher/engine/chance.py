"""Chance that depends on nothing but a few integers: the same on every rank, at any world size, after any resume."""

from __future__ import annotations

_MASK = 2**64 - 1


def mix(*values: int) -> int:
    """64 well-mixed bits of some integers (splitmix64, chained): the one source of chance in the loop."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state
