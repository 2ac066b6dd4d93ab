"""Where templates come from, what a mistake in one says, and what rendering needs: nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from render_cases import ROOT, load, script

from launcher.contract.errors import UsageError
from launcher.render import TEMPLATES, packaged_templates


def _template(folder: Path, text: str, name: str = "slurm/job.sh.j2") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_folder_overrides_the_users_which_overrides_ours(tmp_path: Path) -> None:
    slurm, ssh = load("slurm", "slurm-site"), load("ssh", "ssh-lab")
    mine = _template(tmp_path / "mine", "#!/bin/sh\n# mine\n")
    user = _template(tmp_path / "user", "#!/bin/sh\n# the user's\n")
    assert script(*slurm, user_templates=user) == b"#!/bin/sh\n# the user's\n"
    assert script(*slurm, templates=mine, user_templates=user) == b"#!/bin/sh\n# mine\n"
    # One file is overridden, the other stays; a config folder that does not exist is nobody's mistake.
    assert script(*ssh, templates=mine, user_templates=tmp_path / "none") == script(*ssh)


def test_an_included_part_can_be_overridden_alone(tmp_path: Path) -> None:
    folder = _template(tmp_path, "agent_python=/opt/python\nruntime={{ runtime }}\n", "common/paths.sh.j2")
    assert b"\nagent_python=/opt/python\n" in script(*load("slurm", "slurm-site"), templates=folder)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("#!/bin/sh\n\necho {{ nonesuch }}\n", 3, "'nonesuch' is undefined"),
        ("#!/bin/sh\n{% if nonesuch %}x{% endif %}\n", 2, "'nonesuch' is undefined"),
        ("#!/bin/sh\n{{ slurm.nonesuch }}\n", 2, "nonesuch"),
        ("#!/bin/sh\n#SBATCH --x={{ nonesuch | sbatch }}\n", 2, "'nonesuch' is undefined"),
        ("#!/bin/sh\n# {{ nonesuch | comment }}\n", 2, "'nonesuch' is undefined"),
        ("#!/bin/sh\n{{ nonesuch | raw }}\n", 2, "'nonesuch' is undefined"),
        ("#!/bin/sh\n\n{% if %}\n", 3, "Expected an expression"),
        ("#!/bin/sh\n{{ slurm.reservation }}\n", 2, "None"),
        ("#!/bin/sh\n{{ slurm }}\n", 2, "a template writes a Slurm"),
        ("#!/bin/sh\n\n{{ 1 + 'a' }}\n", 3, "unsupported operand"),
        ("#!/bin/sh\n{{ 'x' | nofilter }}\n", 2, "No filter named 'nofilter'"),
    ],
)
def test_a_mistake_in_a_template_names_its_place(text: str, line: int, words: str, tmp_path: Path) -> None:
    folder = _template(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        script(*load("slurm", "slurm-site"), templates=folder)
    assert f"{tmp_path}/slurm/job.sh.j2:{line}: " in caught.value.message
    assert words in caught.value.message


def test_every_expression_is_quoted_unless_it_says_otherwise(tmp_path: Path) -> None:
    folder = _template(tmp_path, "#!/bin/sh\necho {{ 'a b' }} {{ 'x' ~ ' y' }} {{ 3 }} {{ '$z' | raw }} {{ '' }}\n")
    assert script(*load("slurm", "slurm-site"), templates=folder) == b"#!/bin/sh\necho 'a b' 'x y' 3 $z ''\n"


def test_a_folder_without_templates_is_refused(tmp_path: Path) -> None:
    case = load("slurm", "slurm-site")
    with pytest.raises(UsageError, match="no such folder"):
        script(*case, templates=tmp_path / "none")
    with pytest.raises(UsageError, match="holds no template"):
        script(*case, templates=tmp_path)
    _template(tmp_path, "echo\n")
    with pytest.raises(UsageError, match="begin with #!"):
        script(*case, templates=tmp_path)
    (tmp_path / "slurm/job.sh.j2").write_bytes(b"#!/bin/sh\n\xff\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        script(*case, templates=tmp_path)


def test_the_packaged_templates_are_those_of_the_tree() -> None:
    for name in TEMPLATES.values():
        assert (packaged_templates() / name).read_bytes() == (ROOT / "templates" / name).read_bytes()


PROBE = """
import sys
sys.path.insert(0, {tests!r})
sys.modules["torch"] = None  # importing it fails
import socket
def refuse(*_, **__): raise RuntimeError("rendering opens no connection")
socket.socket.connect = refuse
from render_cases import load, script
for case in (("slurm", "slurm-site"), ("ssh", "ssh-lab"), ("quickstart", "laptop")):
    assert script(*load(*case)).startswith(b"#!")
loaded = sorted(name for name in sys.modules if name.partition(".")[0] in ("paramiko", "fabric", "rich", "typer"))
assert not loaded, loaded
assert "launcher.engine" not in sys.modules
"""


def test_rendering_needs_neither_torch_nor_slurm_nor_a_network() -> None:
    probe = PROBE.format(tests=str(Path(__file__).parent))
    environment = {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", probe], check=True, env=environment, timeout=60)


def test_the_readme_names_every_value_and_filter(tmp_path: Path) -> None:
    readme = (ROOT / "templates/README.md").read_text(encoding="utf-8")
    folder = _template(tmp_path, "#!/bin/sh\n{{ nonesuch }}\n")
    _template(tmp_path, "#!/bin/sh\n{{ nonesuch }}\n", "ssh/start.sh.j2")
    for case in (("slurm", "slurm-site"), ("ssh", "ssh-lab")):
        with pytest.raises(UsageError) as caught:
            script(*load(*case), templates=folder)
        assert caught.value.hint is not None
        for name in caught.value.hint.removeprefix("templates know: ").split(", "):
            assert f"`{name}`" in readme, name
