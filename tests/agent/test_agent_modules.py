"""What sites ask of ``setup``: modules, and environments that a script activates; whose line fails is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent_job import MakeJob

from launcher.agent import environment
from launcher.agent.probe import probe
from launcher.contract.launch import SetupPart
from launcher.planning.launch import joined_setup
from launcher.specs.load import parse_text

WRITE = "import json, os, sys; json.dump([dict(os.environ), sys.prefix], open(sys.argv[1], 'w'))"
MODULES = Path("/etc/profile.d/modules.sh")  # scripts/setup.sh installs it where it may

MODULEFILE = """\
#%Module
prepend-path PATH {bin}
setenv LOADED cuda-12.4
"""
# As conda does it: a function that a sourced file defines, unset variables read bare, failures on the way.
CONDA = """\
false
__conda_was=$CONDA_PREFIX
conda() {{
    local wanted=$2
    [ -n "$CONDA_SHLVL" ]
    PS1="($wanted) $PS1"
    export CONDA_PREFIX={envs}/$wanted
    . "$CONDA_PREFIX/bin/activate"
}}
"""


@pytest.fixture
def load(tmp_path: Path) -> str:
    """The beginning of a ``module load`` of a site's CUDA, of which 12.4 is there."""
    if not MODULES.exists():
        pytest.skip("environment-modules is not installed (scripts/setup.sh does, as root)")
    tool = tmp_path / "bin" / "site-tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho tool\n")
    tool.chmod(0o755)
    (tmp_path / "modulefiles" / "cuda").mkdir(parents=True)
    (tmp_path / "modulefiles" / "cuda" / "12.4").write_text(MODULEFILE.format(bin=tool.parent))
    return f"module use {tmp_path}/modulefiles\nmodule load cuda/"


def test_what_a_module_loads_reaches_the_ranks(job: MakeJob, tmp_path: Path, load: str) -> None:
    one = job("sh", "-c", f'site-tool > {tmp_path}/out; echo "$LOADED" >> {tmp_path}/out', setup=f"{load}12.4\n")
    assert one.run() == 0
    assert (tmp_path / "out").read_text() == "tool\ncuda-12.4\n"


def test_a_module_that_is_not_there_is_named_with_its_file_and_line(job: MakeJob, load: str) -> None:
    parts = (SetupPart("cluster", 1, 2, "clusters/uni.yaml", 31),)
    wrong = job("true", setup=f"{load}99\n", setup_parts=parts)
    assert wrong.run() == 1
    failure = wrong.record().failure
    assert failure is not None and "clusters/uni.yaml:32 failed with status 1: module load cuda/99" in failure.message
    assert b"cuda/99" in (wrong.folder / "logs" / "setup-localhost.log").read_bytes()


def test_an_environment_that_a_script_activates(job: MakeJob, tmp_path: Path) -> None:
    """A real virtual environment behind a conda-like function, which ``set -u`` or ``set -e`` would break."""
    envs = tmp_path / "envs"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", envs / "zero"], check=True)
    (tmp_path / "conda.sh").write_text(CONDA.format(envs=envs))
    strict = subprocess.run(
        ["bash", "--norc", "-uc", f". {tmp_path}/conda.sh; conda activate zero"], capture_output=True, env={}
    )
    assert strict.returncode, "the script must be one that set -u breaks"
    setup = f"source {tmp_path}/conda.sh\nconda activate zero\n"
    one = job("python", "-c", WRITE, str(tmp_path / "env"), setup=setup, python="python")
    assert one.run() == 0
    assert str(envs / "zero") in (tmp_path / "env").read_text()
    said = probe({"python": "python", "modules": ["json"], "resolve": [], "path": str(tmp_path), "setup": setup})
    assert said["executable"] == str(envs / "zero" / "bin" / "python"), "cluster check sees what a job sees"


def test_the_shell_of_a_question_is_that_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "leaks")
    argv = [*environment.shell_after_setup("export A=$PLANTED; false"), "sh", "-c", 'echo "<$A$PLANTED>"']
    done = subprocess.run(argv, capture_output=True, text=True, env=environment.site(os.environ))
    assert done.stdout == "<>\n"


def test_the_jobs_setup_follows_the_clusters_and_each_line_knows_its_file() -> None:
    cluster = parse_text(
        "cluster",
        "name: a\nbackend: direct\nnodes: {names: n}\npaths: {runs: /r}\nsetup: |  # first\n  one\n\n  three\n",
        "c.yaml",
    )
    job = parse_text("job", "name: j\nprogram: {argv: [x]}\nsetup: four\n", "jobs/j.yaml")
    text, parts = joined_setup(cluster.setup, job.setup)
    assert text == "one\n\nthree\nfour\n"
    assert parts == (SetupPart("cluster", 1, 3, "c.yaml", 6), SetupPart("job", 4, 1, "jobs/j.yaml", 3))
    told = [environment._place_of(parts, line) for line in (1, 3, 4, 9)]
    assert told == ["c.yaml:6", "c.yaml:8", "jobs/j.yaml:3", "line 9"]
    folded = parse_text("job", "name: j\nprogram: {argv: [x]}\nsetup: >\n  a\n  b\n\n  c\n", "f.yaml")
    text, parts = joined_setup("", folded.setup)
    assert environment._place_of(parts, 2) == "line 2 of the job's setup (f.yaml)"
    given = parse_text("job", "name: j\nprogram: {argv: [x]}\n", "f.yaml", ["setup=false"])
    assert environment._place_of(joined_setup("", given.setup)[1], 1) == "line 1 of the job's setup (--set setup)"
    assert joined_setup("", "  \n") == ("", ())
