"""``~`` and ``$NAME`` in paths: expanded once, on the node, in the environment that is told; all else is literal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launcher.agent import expand
from launcher.agent.expand import expand_path

INSIDE = {"SLURM_TMPDIR": "/tmp/job.7", "TWICE": "/x/$HOME/~", "EMPTY": "", "SPACE": "/a b"}


@pytest.mark.parametrize(
    ("path", "becomes"),
    [
        ("$SLURM_TMPDIR/zerun", "/tmp/job.7/zerun"),
        ("${SLURM_TMPDIR}x", "/tmp/job.7x"),
        ("$TWICE", "/x/$HOME/~"),  # a value is not expanded again
        ("/a/~/b", "/a/~/b"),
        ("/a/$(id)/`id`/*/{b,c}/$1", "/a/$(id)/`id`/*/{b,c}/$1"),
        ("/a//b/../c", "/a/c"),
        ("$SPACE/ü", "/a b/ü"),
    ],
)
def test_names_come_from_the_jobs_environment_and_all_else_is_literal(path: str, becomes: str) -> None:
    assert expand_path(path, INSIDE) == becomes


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("$NO_SUCH/x", r"\$NO_SUCH is not set"),
        ("$EMPTY/x", "not set"),
        ("~bob/x", "one's own home"),
        ("a/b", "absolute"),
    ],
)
def test_what_cannot_become_a_path_is_said(path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expand_path(path, INSIDE)


def test_the_login_nodes_own_environment_where_none_is_told() -> None:
    code = "from launcher.agent import expand; print(expand.expand({'paths': ['~/z', '$USER']})['paths'])"
    environment = {"HOME": "/home/ann", "USER": "/odd"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(str(expand.__file__))))
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "['/home/ann/z', '/odd']", done.stderr
