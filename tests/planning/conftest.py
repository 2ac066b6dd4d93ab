"""Where the tests of planning find what other rooms keep: the engine's ranks, the scripts of the documents."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests" / "engine")]
