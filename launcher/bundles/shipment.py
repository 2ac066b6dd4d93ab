"""The job's tree as it goes to a machine: only what is not there."""

from __future__ import annotations

import gzip
import io
import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..contract.bundle import SUFFIX, copy_content, decode, is_content, keep_content, sweep
from ..contract.errors import UsageError, VerificationFailed
from ..contract.folder import content
from ..contract.shipped import touch
from .code import CodeBundle

GONE = "the run's cluster has it too, in .blobs/ below paths.runs; or submit the job again"


@dataclass(frozen=True)
class Shipment:
    """``name`` and bytes of a listing, whose contents are kept below ``runs``, the folder of all runs at home."""

    name: str
    listing: bytes = field(repr=False)
    runs: Path
    _last: dict[tuple[str, frozenset[str]], bytes] = field(default_factory=dict, repr=False, compare=False)
    _packing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes by SHA-256. Raises UsageError for what is no listing of that name."""
        try:
            return decode(self.listing, self.name).sizes
        except VerificationFailed as problem:
            raise UsageError(problem.message, hint=GONE) from problem

    def packed(self, runs: str, lacking: Collection[str]) -> bytes:
        """What the agent's ``receive`` reads at a place whose folder of runs is ``runs``; packed once for all machines
        that lack the same.

        Raises UsageError when one that is lacking there is damaged here.
        """
        wanted = (runs, frozenset(lacking))
        with self._packing:
            if wanted not in self._last:
                data = self._pack(*wanted)
                self._last.clear()
                self._last[wanted] = data
            return self._last[wanted]

    def _pack(self, runs: str, lacking: Collection[str]) -> bytes:
        digests = [digest for digest in self.sizes if digest in lacking]
        head = {"runs": runs, "name": self.name, "bytes": len(self.listing), "contents": digests}
        buffer = io.BytesIO(json.dumps(head).encode("ascii") + b"\n")
        buffer.seek(0, io.SEEK_END)
        try:
            with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as packed:
                packed.write(self.listing)
                for digest in digests:
                    copy_content(self.runs, digest, packed.write)
        except VerificationFailed as problem:
            raise UsageError(problem.message, hint=GONE) from problem
        return buffer.getvalue()


def is_listing(name: str) -> bool:
    return name.endswith(SUFFIX)


def keep(code: CodeBundle, runs: Path) -> None:
    """Keeps the contents that are not below ``runs`` yet. The listing is kept like any blob, after them."""
    sweep(str(runs))
    for digest, data in code.contents.items():
        touch(str(content(str(runs), digest)))  # first: what a removal takes meanwhile is not there when it is read
        if not is_content(runs, digest):
            keep_content(runs, digest, [data])
