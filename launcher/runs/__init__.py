"""Runs at home: the store, and what a run is now."""

from __future__ import annotations

from .fold import fold
from .state import EXITS, Observation, Progress, RunState, State
from .store import Event, Run, RunStore

__all__ = ["EXITS", "Event", "Observation", "Progress", "Run", "RunState", "RunStore", "State", "fold"]
