"""What has to be there before ranks can start: the job's code, and the environment after ``setup``.

Unpacking runs in a thread, the setup shell as a child of the event loop: heartbeats and a cancel go on
in the meantime.
"""

from __future__ import annotations

import errno
import os
import subprocess
import tarfile
import tempfile
import threading
import zlib
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Mapping, Optional, cast

from ..contract.errors import NoSpace, ZerunError
from ..contract.launch import LaunchSpec
from . import code, environment, handed, processes, staging
from .loop import Loop
from .state import last_lines

Done = Callable[[Path, Dict[str, str]], None]
Failed = Callable[[str, str], None]


def exit_status(wait_status: int) -> int:
    """As a shell tells it: the code, or 128 + signal."""
    if os.WIFSIGNALED(wait_status):
        return 128 + os.WTERMSIG(wait_status)
    return os.WEXITSTATUS(wait_status)


def _kind_of(problem: Exception) -> str:
    full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return "no_space" if full or isinstance(problem, NoSpace) else "start_failed"


class Preparation:
    """Calls ``done(folder, environment)`` or ``failed(kind, message)``, once, from the loop."""

    def __init__(self, loop: Loop, spec: LaunchSpec, node_rank: int, done: Done, failed: Failed) -> None:
        self._loop, self._spec, self._node_rank = loop, spec, node_rank
        self._done, self._failed = done, failed
        self._given_up = False
        self._shell: Optional[subprocess.Popen[bytes]] = None

    def begin(self, marks: Mapping[str, str], setup_log: Path) -> None:
        """``marks`` are the variables by which processes of this attempt are known."""
        self._marks = dict(marks)
        self._setup_log = setup_log
        if self._spec.code is None:
            self._run_setup(Path(self._spec.run_dir))
        else:
            threading.Thread(target=self._fetch_code, args=(self._spec.code,), daemon=True).start()

    def give_up(self) -> Optional[int]:
        """The attempt is being stopped. Returns the setup shell's pid (and process group) if it runs."""
        self._given_up = True
        return self._shell.pid if self._shell is not None else None

    def _fetch_code(self, bundle: str) -> None:
        mine = self._node_rank == 0 or not self._spec.shared
        try:
            if mine:
                folder = code.unpack(bundle, self._spec.run_dir)
                handed.place(self._spec)
            else:
                folder = code.wait_for(bundle, self._spec.run_dir, lambda: self._given_up)
        except (ZerunError, OSError, tarfile.TarError, EOFError, zlib.error, ValueError) as problem:
            kind, message = _kind_of(problem), f"the job's code could not be unpacked: {problem}"
            self._loop.from_thread(lambda: self._fail(kind, message))
            return
        self._loop.from_thread(lambda: self._run_setup(folder))

    def _fail(self, kind: str, message: str) -> None:
        if not self._given_up:
            self._failed(kind, message)

    def _run_setup(self, folder: Path) -> None:
        if self._given_up:
            return
        base = environment.site(os.environ)
        if not self._spec.setup.strip():
            self._stage(folder, base)
            return
        try:
            said = cast(BinaryIO, tempfile.TemporaryFile(prefix="zerun-"))  # noqa: SIM115 (closed when the shell ended)
            with tempfile.TemporaryFile(prefix="zerun-") as text, open(self._setup_log, "ab") as output:
                text.write(self._spec.setup.encode("utf-8", "surrogateescape"))
                text.flush()
                shell = subprocess.Popen(
                    environment.setup_argv(said.fileno(), text.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env=environment.encoded({**base, **self._marks}),
                    pass_fds=(said.fileno(), text.fileno()),
                    start_new_session=True,
                    preexec_fn=processes.bind_to_parent(os.getpid()),
                )
        except (OSError, subprocess.SubprocessError, ZerunError) as problem:
            self._fail("setup_failed", f"setup could not be run: {problem}")
            return
        self._shell = shell
        self._loop.on_exit(shell.pid, lambda status: self._setup_ended(folder, said, exit_status(status)))

    def _setup_ended(self, folder: Path, said: BinaryIO, status: int) -> None:
        if self._shell is not None:
            self._shell.returncode = status
            self._shell = None
        with said:
            if self._given_up:
                return
            try:
                found = environment.after_setup(said, status, self._spec.setup, self._spec.setup_parts)
            except ZerunError as problem:
                said_last = "".join(f"; it said: {line.strip()}" for line in last_lines(str(self._setup_log))[-1:])
                self._fail("setup_failed", f"{problem}{said_last} (see {self._setup_log.name})")
                return
        self._stage(folder, found)

    def _stage(self, folder: Path, base: Dict[str, str]) -> None:
        """Data that is to lie on the node's own disk is copied in a thread, like the code."""
        if self._spec.stage:
            threading.Thread(target=self._copy_data, args=(folder, base), daemon=True).start()
        else:
            self._done(folder, base)

    def _copy_data(self, folder: Path, base: Dict[str, str]) -> None:
        try:
            with open(self._setup_log, "a", encoding="utf-8", errors="surrogateescape") as log:
                told = staging.stage(self._spec, base, str(folder), lambda line: log.write(f"{line}\n"))
        except (ZerunError, OSError) as problem:
            kind, message = _kind_of(problem), str(problem)
            self._loop.from_thread(lambda: self._fail(kind, message))
            return
        self._loop.from_thread(lambda: None if self._given_up else self._done(folder, {**base, **told}))
