"""The wheel, installed in a fresh venv, renders: templates travel in it, and nothing is read from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sources() -> list[str]:
    """What a clone holds, with what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [name for name in os.fsdecode(listed.stdout).split("\0") if name and os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh venv with the wheel in it; what zerun depends on is lent by this venv."""
    base = tmp_path_factory.mktemp("wheel")
    for name in sources():
        (base / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, base / "source" / name, follow_symlinks=False)  # launcher/_templates is a link
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--wheel-dir", str(base / "dist"), str(base / "source")],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    shutil.rmtree(base / "source")
    venv.create(base / "venv", with_pip=False, symlinks=True)
    (wheel,) = (base / "dist").glob("zerun-*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(base / "venv"), "install", "--quiet", "--no-deps", "--no-index",
         str(wheel)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (site,) = (base / "venv").glob("lib/python*/site-packages")
    # Lines of a .pth file go to the end of sys.path, and .pth files over there (an editable zerun) are not read.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return base / "venv" / "bin"


def run(installed: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ZERUN"))}
    return subprocess.run(
        [str(installed / "zerun"), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=60, env={**kept, "HOME": str(folder)},
    )  # fmt: skip


@pytest.mark.parametrize(("cluster", "sign"), [("slurm-site", "#SBATCH"), ("ssh-lab", "")])
def test_the_wheel_renders(installed: Path, tmp_path: Path, cluster: str, sign: str) -> None:
    for name in (f"clusters/{cluster}.yaml", "jobs/quickstart.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    done = run(installed, "render", "jobs/quickstart.yaml", "--cluster", cluster, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sign in done.stdout and done.stdout
    assert str(ROOT) not in done.stdout


def test_the_wheel_is_the_one_that_runs(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(installed / "python"), "-c", "import launcher, zerun; print(launcher.__file__, zerun.__file__)"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert all(str(installed.parent) in path for path in done.stdout.split())
