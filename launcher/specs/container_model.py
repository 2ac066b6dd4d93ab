"""The container that a cluster's ranks run in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from ..contract.container import RUNTIMES, Mount
from . import values
from .description import Description
from .mistakes import Mistake
from .values import LIST, Line, choice


def mount_problem(text: str) -> str | None:
    """``/data``, ``/data:/in`` or ``/data:/in:ro``: absolute paths, ``$NAME`` and ``~`` are not expanded."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if any(not path.startswith("/") or "," in path for path in (source, *([target] if rest else []))):
        return f"{text!r} is not accepted; accepted: /folder, /folder:/inside, /folder:/inside:ro (absolute, no comma)"
    return None if mode in ("", "ro", "rw") else f"{text!r} ends with {mode!r}; accepted: ro, rw"


def mount_of(text: str) -> Mount:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    return Mount(source, target or source, mode == "ro")


def _image_problem(text: str) -> str | None:
    if text.startswith(("-", "~", "$")) or any(c.isspace() for c in text):
        return f"{text!r} is not accepted; accepted: an absolute path, or a name that the runtime knows"
    return None


class Container(Description):
    """``image`` is a file of the cluster (``/lustre/img/torch.sif``) or a name that the runtime knows on every node.

    The agent stays outside; each rank is one container with the node's network, shared memory, GPUs and this user.
    """

    runtime: Annotated[
        Literal["apptainer", "pyxis", "docker", "podman"], choice(*RUNTIMES, same={"singularity": "apptainer"})
    ]
    image: Annotated[str, BeforeValidator(values.checked(_image_problem))]
    mounts: Annotated[tuple[Annotated[str, BeforeValidator(values.checked(mount_problem))], ...], LIST] = ()
    arguments: Annotated[tuple[Line, ...], LIST] = ()

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        image = given.get("image")
        if given.get("runtime") in ("docker", "podman") and isinstance(image, str) and image.startswith("/"):
            yield Mistake(
                ("image",), f"{image!r} is a file; {given['runtime']} takes the name of an image on the nodes"
            )
