"""What an error says where none of our commands prints it."""

from __future__ import annotations

import sys
import traceback

import pytest

from launcher.contract.errors import UsageError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_a_traceback_shows_the_way_out() -> None:
    shown = traceback.format_exception(UsageError("it cannot be so", hint="do it thus"))
    assert shown[-1].rstrip().endswith("hint: do it thus") and "".join(shown).count("do it thus") == 1
    assert "hint" not in "".join(traceback.format_exception(UsageError("it cannot be so")))
