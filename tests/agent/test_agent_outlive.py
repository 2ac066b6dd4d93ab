"""What lets an agent outlive a logout. setsid is the real one; systemd cannot run in these tests, so what stands for
``systemd-run`` and ``loginctl`` are programs that take the same words: they show what is asked and what is believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent_job import MakeJob, until

from launcher.agent import outlive
from launcher.backends.check_slots import logout_warning, outlives

SYSTEMD_RUN = """#!/bin/sh
echo "$XDG_RUNTIME_DIR $*" >>LOG
[ -e LOG.refuse ] && { echo 'Failed to connect to bus' >&2; exit 1; }
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""
LOGINCTL = """#!/bin/sh
case "$*" in
  "show-user "*" --property=Linger --value") cat LINGER ;;
  "show-session --property=KillUserProcesses --value") cat KILLS ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in (("systemd-run", SYSTEMD_RUN), ("loginctl", LOGINCTL)):
        for word in ("LOG", "LINGER", "KILLS"):
            text = text.replace(word, str(tmp_path / word.lower()))
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "kills").write_text("no\n")
    (tmp_path / "linger").write_text("no\n")
    return tmp_path


def test_a_lingering_user_gets_a_scope(site: Path, job: MakeJob) -> None:
    (site / "linger").write_text("yes\n")
    one = job("sleep", "60")
    code, answer = one.verb("start", node="localhost")
    assert code == 0, answer
    until(lambda: one.state() == "running")
    assert one.record().kept_by == "scope"
    assert one.record().agent.pid == answer["pid"]["pid"]  # the scope is joined by the agent itself
    asked = (site / "log").read_text().splitlines()
    assert all("--user --scope --quiet --collect" in line for line in asked) and len(asked) == 2
    assert asked[0].endswith("-- true") and " agent --kept-by scope " in asked[1]
    assert one.verb("stop", grace_s=2)[1] == {"stopped": 2}


def test_everybody_else_a_session_of_its_own(site: Path, job: MakeJob) -> None:
    """Without lingering the user's systemd ends with the last logout, and all its scopes: setsid is the better one."""
    one = job("sleep", "60")
    assert one.verb("start", node="localhost")[0] == 0
    until(lambda: one.state() == "running")
    assert one.record().kept_by == "setsid" and not (site / "log").exists()
    assert os.getsid(one.record().agent.pid) == one.record().agent.pid
    one.verb("stop", grace_s=2)
    # Lingering, but the user's systemd does not answer.
    (site / "linger").write_text("yes\n")
    (site / "log.refuse").touch()
    assert outlive.way().by == "setsid"


def test_what_check_says(site: Path) -> None:
    said = outlive.facts()
    assert said["by"] == "setsid" and said["ended_at_logout"] is False and outlives(said) == "setsid"
    assert logout_warning(said) == []
    (site / "kills").write_text("yes\n")
    (told,) = logout_warning(outlive.facts())
    assert "KillUserProcesses=yes" in told and f"loginctl enable-linger {said['user']}" in told
    (site / "linger").write_text("yes\n")
    said = outlive.facts()
    assert said["by"] == "scope" and logout_warning(said) == [] and "lingering is on" in outlives(said)
    (site / "bin" / "loginctl").unlink()
    assert outlive.facts()["ended_at_logout"] in (None, False)
