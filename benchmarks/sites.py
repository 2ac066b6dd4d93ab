"""A project folder on a laptop and a testbed to reach from it: the real cluster of tests/testbed/."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import ROOT

if TYPE_CHECKING:
    from testbed.cluster import Testbed

RACK = """\
name: rack
backend: direct
nodes: {{names: "node[01-{nodes:02d}]", slots: 2}}
ssh: {{config: {config}}}
paths: {{runs: /scratch/$USER/zerun, shared: false}}
python: {python}
agent_python: /usr/bin/python3
"""
UNI = """\
name: uni
backend: slurm
login: {{host: login}}
ssh: {{config: {config}}}
slurm: {{partition: train, extra: {{hold: null}}}}
nodes: {{names: "node[01-{nodes:02d}]", slots: 2, cpus_per_slot: 1, memory_per_slot: 1GiB}}
paths: {{runs: ~/zerun}}
python: {python}
agent_python: /usr/bin/python3
"""


@dataclass(frozen=True)
class Site:
    """``folder`` has clusters/ and jobs/; run ``zerun`` in it, with ``environment``."""

    folder: Path
    testbed: Testbed
    environment: dict[str, str]


@contextmanager
def folder() -> Iterator[tuple[Path, dict[str, str]]]:
    """A user's project in a temporary folder, and an environment without that user's own settings."""
    with tempfile.TemporaryDirectory(prefix="zerun-bench-", dir="/var/tmp") as made:
        root = Path(made)
        for name in ("clusters", "jobs", "config"):
            (root / name).mkdir()
        yield root, {"XDG_CONFIG_HOME": str(root / "config"), "ZERUN_RUNS": "", "ZERUN_CLUSTER": ""}


@contextmanager
def site(label: str, description: str, *, nodes: int, slurm: bool) -> Iterator[Site]:
    """A testbed for the length of a with-block, described as clusters/NAME.yaml. Needs root, as the tests do."""
    sys.path.insert(0, str(ROOT / "tests"))
    from testbed import cluster

    why_not = cluster.why_not()
    if why_not is not None:
        raise SystemExit(why_not.replace("the real-cluster tests need", "this benchmark needs"))
    python = cluster.make_node_python()
    with folder() as (root, environment), cluster.standing(label, nodes=nodes, slurm=slurm) as testbed:
        text = description.format(nodes=nodes, config=testbed.ssh_config, python=python)
        name = text.split()[1]
        (root / "clusters" / f"{name}.yaml").write_text(text)
        yield Site(root, testbed, environment)
