"""Unpacks the job's bundle into ``RUN/code``, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, List, Sequence, Tuple

from ..contract.bundle import SUFFIX, File, copy_content, read_listing
from ..contract.errors import Refused, Unreachable
from ..contract.plain import write_atomically

WAIT_S = 120.0
_AT_ONCE = 8


def unpack(bundle: str, run_dir: str) -> Path:
    """Makes ``run_dir/code`` hold what ``bundle`` names: a listing, or an archive of an older launcher's (.tar.gz).

    A tree of another bundle (an earlier attempt's) steps aside as ``.code-…``; the same bundle is not
    unpacked twice. Raises :class:`Refused` for anything that could leave the folder,
    VerificationFailed for a file that is not what the listing says.
    """
    target = Path(run_dir) / "code"
    if _is_there(bundle, run_dir):
        return target
    beside = Path(run_dir) / f".code.{os.getpid()}.part"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        if bundle.endswith(SUFFIX):
            _lay_out(bundle, beside)
        else:
            with tarfile.open(bundle, "r:gz") as archive:
                _extract(archive, beside)
        if target.exists():
            os.replace(target, Path(run_dir) / f".code-{time.time_ns()}")
        os.replace(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    write_atomically(_marker(run_dir), Path(bundle).name.encode("utf-8"))
    return target


def wait_for(bundle: str, run_dir: str, given_up: Callable[[], bool]) -> Path:
    """Waits until node rank 0's agent has unpacked ``bundle`` on the shared filesystem."""
    end = time.monotonic() + WAIT_S
    while not _is_there(bundle, run_dir):
        if time.monotonic() > end or given_up():
            raise Unreachable(f"the first node has not unpacked the job's code into {run_dir}/code in {WAIT_S:.0f} s")
        # A listing makes an NFS client look again instead of trusting that the file is absent.
        with contextlib.suppress(OSError):
            os.listdir(run_dir)
        time.sleep(0.1)
    return Path(run_dir) / "code"


def _marker(run_dir: str) -> Path:
    return Path(run_dir) / ".code-bundle"


def _is_there(bundle: str, run_dir: str) -> bool:
    try:
        return _marker(run_dir).read_text(encoding="utf-8") == Path(bundle).name
    except OSError:
        return False


def _lay_out(bundle: str, root: Path) -> None:
    """The files of a listing out of the contents beside it, several at once: on a cluster's disk opening one is mostly
    waiting for it."""
    listing = read_listing(bundle)
    runs = Path(bundle).parents[1]
    places = [(root / _inside(file.name), file) for file in listing.files]
    for folder in sorted({path.parent for path, _ in places}):
        folder.mkdir(parents=True, exist_ok=True)

    def lay(place: Tuple[Path, File]) -> None:
        path, file = place
        with open(path, "xb") as target:
            copy_content(runs, file.digest, target.write)
        path.chmod(0o755 if file.executable else 0o644)
        # As it was shipped: what the job makes itself is younger. Scratch disks purge by when a file was read last.
        os.utime(path, (time.time(), 0))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(lay, places):
            pass
    _link([(root / _inside(link.name), link.name, link.target) for link in listing.links], root)


def _extract(archive: tarfile.TarFile, root: Path) -> None:
    """Files and folders first, symbolic links last: nothing is ever written through a link."""
    links: List[Tuple[Path, str, str]] = []
    for member in archive:
        path = root / _inside(member.name)
        if member.issym():
            links.append((path, member.name, member.linkname))
        elif member.isdir():
            path.mkdir(parents=True, exist_ok=True)
        elif member.isreg():
            path.parent.mkdir(parents=True, exist_ok=True)
            source = archive.extractfile(member)
            if source is None:
                raise Refused(f"the code bundle has no bytes for {member.name!r}")
            with source, open(path, "xb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            path.chmod(0o755 if member.mode & 0o111 else 0o644)
            os.utime(path, (member.mtime, member.mtime))
        elif member.islnk():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(root / _inside(member.linkname), path)
        else:
            raise Refused(f"the code bundle holds {member.name!r}, which is neither a file, a folder nor a link")
    _link(links, root)


def _link(links: Sequence[Tuple[Path, str, str]], root: Path) -> None:
    """Path, name and target of each; none leads out of ``root``, by way of others either, and none is made through
    another."""
    taken = {path for path, _, _ in links}
    for path, name, _ in links:
        if any(folder in taken for folder in path.parents):
            raise Refused(f"the code bundle holds {name!r}, which lies behind a link")
    for path, _, target in links:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    real = os.path.realpath(root)
    for path, name, target in links:
        end = os.path.realpath(path)
        if os.path.isabs(target) or (end != real and not end.startswith(real + os.sep)):
            raise Refused(f"the code bundle's link {name!r} leaves its folder ({target})")


def _inside(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name or (not parts and name.strip("./")):
        raise Refused(f"the code bundle holds a path that leaves its folder: {name!r}")
    return "/".join(parts)
