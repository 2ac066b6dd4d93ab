"""Names whose bytes are no text: shown escaped, as text and as JSON, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_what_is_no_text_is_shown_escaped() -> None:
    said = (
        "import sys; from launcher.cli import main, show; main._stand_on_streams();"
        "show.data('name \\udcff'); show.data_json({'name': '\\udcff'})"
    )
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", said], cwd=root, env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, 'name \\udcff\n{\n "name": "\\udcff"\n}\n'), done.stderr
