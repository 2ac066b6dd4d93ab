"""The container that ranks run in, as a launch specification carries it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

RUNTIMES = ("apptainer", "pyxis", "docker", "podman")


@dataclass(frozen=True)
class Mount:
    """A folder of the node, seen in the container at ``target``."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Container:
    """``image``: a file (apptainer, pyxis) or a name that the runtime knows; ``arguments`` go to the runtime as they
    are.

    ``mounts`` hold what the site and the user asked for; the run's folder and its data are added where ranks start.
    """

    runtime: str
    image: str
    mounts: Tuple[Mount, ...] = ()
    arguments: Tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        return self.image.startswith("/")
