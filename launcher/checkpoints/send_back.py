"""A checkpoint that is whole at home and no more on the cluster's shared disk: sent back, for a resume.

Only by the resume that goes on from it, and only after every block of it was proven here. What the cluster has of the
same checkpoint in the right size stays; the manifest goes last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract.errors import NoSpace
from ..contract.folder import RunFolder
from ..contract.launch import LaunchSpec
from .found import Candidate
from .moving import SPARE_BYTES, checked_files, name_of, run_dir, size, step_folder
from .moving import total as bytes_of
from .verify import read_manifest, verify

if TYPE_CHECKING:
    from ..backends.protocol import Backend


def send_back(
    backend: Backend, run: str, home: Path, chosen: Candidate, launch: LaunchSpec, notice: Callable[[str], None]
) -> str | None:
    """Makes ``chosen`` whole on the one disk that all nodes of ``launch`` share, from home. A sentence says what went.

    Bytes are told before anything moves. Raises VerificationFailed when it is damaged at home, NoSpace.
    """
    if not chosen.at_home or not launch.shared:
        return None
    folder = step_folder(home, chosen.step)
    place = backend.places()[0]
    there = RunFolder.at(place.runs, run).checkpoint(chosen.step)
    verify(folder).require()
    manifest = read_manifest(folder / "manifest.json", chosen.step)
    data = (folder / "manifest.json").read_bytes()
    answer = backend.call(place, "inventory", {"run_dir": run_dir(place, run), "checkpoint": chosen.step})
    held = checked_files(place, (answer.get("checkpoint") or {}).get("files"), of_checkpoint=True)
    if place.transport.run(["cat", str(there.manifest)]).stdout != data:
        held = {}  # another attempt's, or cut short
    coming = [shard for shard in manifest.shards if held.get(shard.file) != shard.bytes]
    told = f"{len(coming)} shard{'' if len(coming) == 1 else 's'} ({size(bytes_of(coming))})"
    free = backend.call(place, "state", {"run_dirs": [run_dir(place, run)], "attempt": 0}).get("free_bytes")
    if isinstance(free, int) and bytes_of(coming) + SPARE_BYTES > free:
        raise NoSpace(f"{name_of(place)}: {size(bytes_of(coming))} are to come, {size(free)} are free")
    notice(f"step {chosen.step}, which is whole here and not on the cluster: {told} go to {name_of(place)}")
    place.transport.run(["rm", "-f", "--", str(there.manifest)])
    place.transport.push([shard.file for shard in coming], folder, str(there.root))
    place.transport.put(data, str(there.manifest), mode=0o644)
    return f"step {chosen.step} was sent back from here: {told}"
