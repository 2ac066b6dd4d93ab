"""A rank: ``python ZIP engine --run-dir D --attempt K``. Exit status as ``contract.errors.Exit``.

An error ends this process at once with a traceback or a clear line; the agent then stops the others.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NoReturn

import torch.distributed as dist

from ...contract import text
from ...contract.errors import Exit, UsageError, ZerunError
from ...contract.folder import RunFolder
from ...contract.launch import LaunchSpec
from ...contract.plain import PlainError, from_plain
from ...contract.records import Outcome
from ..comm import Alone, Comm, connect, gather_bytes
from ..comm.choose import SEND
from .data import file_digest
from .loop import Trainer, say, write_outcome
from .place import Place, meet


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs this rank to its end and ends its process: see :func:`_leave` for why it never returns."""
    parser = argparse.ArgumentParser(prog="engine")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args(argv)
    try:
        outcome = run(Path(args.run_dir), args.attempt)
    except ZerunError as error:
        hint = f"\n  {error.hint}" if error.hint else ""
        _die(int(error.exit_code), f"rank {os.environ.get('RANK', '?')}: {error.message}{hint}\n")
    except Exception:  # noqa: BLE001 (the border of the process: said in full, then it ends)
        _die(int(Exit.JOB_FAILED), f"rank {os.environ.get('RANK', '?')} failed:\n{traceback.format_exc()}")
    if dist.is_initialized():
        dist.destroy_process_group()
    _leave(int(Exit.STOPPED if outcome.outcome == "stopped" else Exit.DONE))


def _leave(code: int) -> NoReturn:
    """Ends a rank that is through as multiprocessing ends its children: hooks run, the interpreter is left standing.

    gloo answers ``wait`` before its own thread has let go of the message's tensors. If that thread comes to it while
    the interpreter is being taken down, it finds no interpreter to give them back to, and the whole process aborts
    ("terminate called without an active exception") after its work was done and saved.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # a user's own threads come to their end first
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die(code: int, words: str) -> NoReturn:
    """Ends at once: hooks may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.write(words)
    sys.stderr.flush()
    os._exit(code)


def run(run_dir: Path, attempt: int) -> Outcome:
    """One attempt on this rank, from its launch specification to its outcome."""
    folder = RunFolder(PurePosixPath(run_dir)).attempt(attempt)
    spec = read_spec(Path(folder.launch))
    if spec.train is None:
        raise UsageError(f"{folder.launch} describes a program, not a training job")
    code = str(run_dir / "code")
    if code not in sys.path:
        sys.path.append(code)  # behind everything: nothing of the user's hides torch or ours
    place = Place.of(spec, os.environ)
    meet(place, os.environ)
    comm = connect(same_host=SEND) if dist.is_initialized() else Alone()
    if spec.train.data.text:
        _make_text(spec.train.data.text, spec, place, comm)
    outcome = Trainer(spec, spec.train, place).train()
    write_outcome(Path(folder.outcome), outcome, place)
    say(place, f"{outcome.outcome} at step {outcome.step}, checkpoint {outcome.checkpoint}")
    return outcome


def read_spec(path: Path) -> LaunchSpec:
    try:
        return from_plain(LaunchSpec, json.loads(path.read_bytes()))
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing: the agent writes it before it starts a rank") from error
    except (PlainError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _make_text(corpus: str, spec: LaunchSpec, place: Place, comm: Comm) -> None:
    """RUN/data, made once where files are shared, else by the first rank of every node; the same on all."""
    data = Path(spec.run_dir) / "data"
    files = [data / "train.bin", data / "heldout.bin"]
    writes = place.rank == 0 if spec.shared else place.local_rank == 0
    if writes and not all(f.is_file() for f in files):
        text.write_split(text.corpus(corpus), data)
    gather_bytes(comm, b"", "text prepared", place.device)
    digest = "\n".join(file_digest(f) for f in files).encode()
    digests = gather_bytes(comm, digest, "comparing texts", place.device)
    if digest != digests[0]:
        raise UsageError(
            f"node {place.node} has another text than rank 0's node: its Python's standard library differs",
            hint="use the same Python on every node, or give data.tokens a file",
        )
