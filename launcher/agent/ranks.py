"""The ranks of one node: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

from ..contract.errors import UsageError
from ..contract.folder import AttemptFolder
from ..contract.launch import LaunchSpec
from ..contract.records import RankRecord
from ..contract.topology import Topology
from . import container, environment, processes
from .capture import Capture
from .environment import Environment, Seat
from .loop import Loop

OK_STATUS = (0, 75)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def stop_signal_of(spec: LaunchSpec) -> signal.Signals:
    """Raises :class:`UsageError` for a name that is no signal."""
    name = spec.stop_signal.upper()
    try:
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except KeyError:
        raise UsageError(f"stop_signal: {spec.stop_signal!r} is no signal (USR1, USR2, TERM, INT)") from None


@dataclass
class Rank:
    """One process a slot. ``signalled``: we told it to end, so how it ended is no cause of anything."""

    rank: int
    local_rank: int
    process: subprocess.Popen[bytes]
    capture: Capture
    started_at: float
    started: float
    ended_at: Optional[float] = None
    ran_s: Optional[float] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None
    signalled: bool = False
    warned: bool = False

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    @property
    def ended_well(self) -> bool:
        return self.exit_code in OK_STATUS

    @property
    def told_to_end(self) -> bool:
        """Whether SIGTERM ended it: perhaps ours is on its way too, when Slurm tells the whole step."""
        return self.signal == signal.SIGTERM or self.exit_code == 128 + signal.SIGTERM

    def record(self) -> RankRecord:
        return RankRecord(
            rank=self.rank,
            local_rank=self.local_rank,
            pid=self.process.pid,
            started_at=self.started_at,
            ended_at=self.ended_at,
            ran_s=self.ran_s,
            exit_code=self.exit_code,
            signal=self.signal,
            stopped_by_us=self.ended and self.signalled,
            log_bytes_lost=self.capture.lost_bytes,
        )

    def end(self, wait_status: int) -> None:
        self.ended_at = time.time()
        self.ran_s = time.monotonic() - self.started
        if os.WIFSIGNALED(wait_status):
            self.signal = os.WTERMSIG(wait_status)
            self.process.returncode = -self.signal
        else:
            self.exit_code = self.process.returncode = os.WEXITSTATUS(wait_status)

    def ask_to_end(self) -> None:
        """SIGTERM to everything in its process group. Not yet reaped, so the pid is still its own."""
        self.signalled = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGTERM)


class Ranks:
    """``on_end`` is called for each rank that ended."""

    def __init__(self, loop: Loop, spec: LaunchSpec, attempt: AttemptFolder, on_end: Callable[[Rank], None]) -> None:
        self._loop, self._spec, self._attempt, self._on_end = loop, spec, attempt, on_end
        self._topology = Topology(tuple(node.slots for node in spec.nodes), spec.tensor)
        self.all: List[Rank] = []
        self.heirloom: Tuple[int, ...] = ()  # descriptors that every rank inherits

    @property
    def living(self) -> List[Rank]:
        return [rank for rank in self.all if not rank.ended]

    def records(self) -> Tuple[RankRecord, ...]:
        return tuple(rank.record() for rank in self.all)

    def start(self, base: Environment, seat: Seat, folder: Path, listener: Optional[int]) -> str:
        """Starts all ranks of the node and returns the program they run. ``seat`` is that of any of them;
        ``listener`` the descriptor that an engine's rank 0 inherits.

        Raises ZerunError or OSError when one cannot be started; what stands by then is in ``all``.
        """
        spec = self._spec
        secrets = environment.read_secrets(spec)
        first = environment.of_rank(base, spec, seat)
        argv = self._argv(first, str(folder))
        for rank in self._topology.ranks_on(seat.node_rank):
            own = environment.of_rank(base, spec, Seat(rank, *seat[1:]))
            own.update(secrets)
            inherited: Tuple[int, ...] = ()
            if rank == 0 and listener is not None:
                own["ZERUN_LISTEN_FD"] = str(listener)
                inherited = (listener,)
            words = argv if spec.container is None else container.argv_in(spec, own, str(folder), argv)
            self._start_one(rank, words, folder, own, inherited)
        return argv[0]

    def _argv(self, own: Environment, folder: str) -> List[str]:
        """``python`` as the first word of a program is the cluster's ``python:``, like the engine's."""
        spec = self._spec
        if spec.container is not None:  # what PATH means out here means nothing in there
            program = [] if spec.program is None else list(spec.program.argv)
            engine = [spec.python, spec.runtime, "engine", "--run-dir", spec.run_dir, "--attempt", str(spec.attempt)]
            return [spec.python if word == "python" else word for word in program[:1]] + program[1:] or engine
        if spec.program is None:
            python = environment.resolve(spec.python, own, folder)
            return [python, spec.runtime, "engine", "--run-dir", spec.run_dir, "--attempt", str(spec.attempt)]
        word, *rest = spec.program.argv
        return [environment.resolve(spec.python if word == "python" else word, own, folder), *rest]

    def _start_one(
        self, rank: int, argv: List[str], folder: Path, own: Dict[str, str], inherited: Tuple[int, ...]
    ) -> None:
        capture = Capture(self._loop, Path(self._attempt.log(rank)), Path(self._attempt.arrivals(rank)))
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=capture.write_end,
                stderr=capture.write_end,
                cwd=folder,
                env=environment.encoded(own),
                pass_fds=(*inherited, *self.heirloom),
                start_new_session=True,
                preexec_fn=processes.bind_to_parent(os.getpid()),
            )
        except BaseException:
            capture.close()
            raise
        capture.started()
        started = Rank(rank, self._topology.local_rank(rank), process, capture, time.time(), time.monotonic())
        self.all.append(started)
        self._loop.on_exit(process.pid, lambda status: self._ended(started, status))

    def _ended(self, rank: Rank, wait_status: int) -> None:
        rank.end(wait_status)
        self._on_end(rank)

    def ask_to_end(self) -> None:
        """SIGTERM to every living rank's process group."""
        for rank in self.living:
            rank.ask_to_end()

    def warn(self) -> None:
        """The stop signal, once to every rank that listens for it. Who does not yet is asked again at the
        next call; who never does is not killed by a request, and may look for the stop file."""
        number = stop_signal_of(self._spec)
        for rank in self.living:
            if not rank.warned:
                for stat in self._listeners(rank, number):
                    rank.warned = processes.send(stat, number) or rank.warned

    def _listeners(self, rank: Rank, number: int) -> List[processes.Stat]:
        """Whoever of a rank handles the signal. A container's client hands on any signal, also to who does not: there
        the processes inside are asked."""
        if self._spec.container is None:
            return processes.listeners(rank.process.pid, number)
        return container.listeners(self._spec.token, rank.rank, rank.process.pid, number)

    def close(self) -> None:
        for rank in self.all:
            rank.capture.close()
