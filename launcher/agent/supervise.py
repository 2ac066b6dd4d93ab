"""One agent: starts this node's ranks, keeps their logs, and ends them all for the first failure anywhere.

Its life::

    starting   take the node's place · meet (node rank 0 binds and announces) · prepare (code, setup)
    running    ranks run; a beat every 2 s into the record; a rank that fails is reported to all
    stopping   SIGTERM to the ranks' groups, after the grace SIGKILL to every descendant, again until none
    ended      the record has its last word; the agent leaves when no other needs it

Everything happens in one event loop, so each method below runs to its end undisturbed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import time
from pathlib import Path, PurePosixPath
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from ..contract.errors import Busy, Refused, ZerunError
from ..contract.folder import RunFolder
from ..contract.launch import LaunchSpec
from ..contract.records import Announcement, Failure, ProcessId
from . import container, leases, processes, rendezvous, replicas
from .control import Council, Peer
from .coordinator import Coordinator
from .environment import Environment, Seat
from .leftovers import end_leftovers, is_superseded
from .loop import Loop
from .notes import AgentLog, Keeper, Ready, leave_place, own_files, take_place
from .prepare import Preparation
from .ranks import OK_STATUS, Rank, Ranks, signal_name, stop_signal_of

_BEAT_S = 2.0
_DOWN_WITHIN_S = 13.0  # of the failure: then SIGKILL, so that all is down within 15 s
_LEFTOVER_S = 2.0  # for what ranks that ended well left running
_KILLING_S = 8.0
_ORDER_ON_ITS_WAY_S = 0.5

TAKEN = 17  # exit status: another agent has this node's place


class Options(NamedTuple):
    """Where this agent stands. ``meeting`` is what node rank 0 announced, if it was told."""

    node: str
    node_rank: int
    meeting: Optional[Announcement] = None
    ready: Optional[int] = None
    kept_by: str = ""


class Agent:
    def __init__(self, spec: LaunchSpec, options: Options) -> None:
        own = processes.process_id(os.getpid())
        self._spec, self._me = spec, options
        self._folder = RunFolder(PurePosixPath(spec.run_dir)).attempt(spec.attempt)
        self._own = own if own is not None else ProcessId(os.getpid(), 0, "")
        self._ready = Ready(options.ready)
        self._meeting = options.meeting
        self._listener: Optional[socket.socket] = None
        self._prepared: Optional[Tuple[Path, Environment]] = None
        self._welcome = options.node_rank == 0
        self._stopping = self._down = self._warned = self._reported = False
        self._settled = self._started = False
        self._held: Optional[leases.Held] = None
        # Else no rank starts before every node's slots are held, and every node serves its shards.
        self._gathered = spec.nodes[0].among is None and not spec.replicas
        self._replicas: Optional[replicas.Replicas] = None
        self._killing_since: Optional[float] = None

    def run(self) -> int:
        """The agent's exit status: 0, 75, 124, or that of the first failure."""
        own_files(self._folder)
        self._log = AgentLog(Path(self._folder.agent_log(self._me.node)))
        before = take_place(self._folder, self._me.node, self._own)
        if before is not None:
            self._log(f"another agent has this node's place: pid {before.get('pid')}")
            self._ready.say(True, taken=before)
            return TAKEN
        ended = end_leftovers(self._spec, self._me.node, self._log)  # first: it would keep the slots
        try:
            self._spec, self._held = leases.hold(self._spec, self._me.node_rank, self._me.node, self._own)
        except Refused as problem:
            leave_place(self._folder, self._me.node)
            self._log(f"refused: {problem.message}")
            self._ready.say(True, refused=problem.message, busy=isinstance(problem, Busy), hint=problem.hint)
            return int(problem.exit_code)
        self._ready.say(placed=True)
        self._log(f"agent {self._own.pid} of {self._spec.run} attempt {self._spec.attempt}, node {self._me.node}")
        self._keeper = self._new_keeper()
        self._keeper.notes += ended
        processes.become_subreaper()
        self._loop = Loop()
        try:
            self._ranks = Ranks(self._loop, self._spec, self._folder, self._rank_ended)
            self._ranks.heirloom = self._held.handles if self._held is not None else ()
            self._preparation = Preparation(
                self._loop, self._spec, self._me.node_rank, self._has_prepared, self._fail_here
            )
            self._begin()
            self._loop.run()
        finally:
            self._loop.close()
        self._log(f"agent leaves with status {self._status()}")
        self._log.close()
        return self._status()

    def _new_keeper(self) -> Keeper:
        keeper = Keeper(self._folder, self._me.node, self._me.node_rank, self._own, self._log)
        keeper.host = socket.gethostname()
        keeper.python = platform.python_version()
        keeper.job_id = self._spec.job_id or os.environ.get("SLURM_JOB_ID")
        keeper.restart_count = self._spec.restart_count
        keeper.leased = self._held.slots if self._held is not None else None
        keeper.kept_by = self._me.kept_by
        keeper.write(())
        return keeper

    # -- starting ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.on_signal(number, self._cancelled)
        self._loop.on_signal(signal.SIGQUIT, self._cancelled_now)
        self._loop.on_signal(signal.SIGUSR2, self._warn_all)
        self._loop.on_signal(signal.SIGHUP, lambda: None)
        try:
            stop_signal_of(self._spec)
            self._replicas = replicas.of_node(self._spec, self._me.node_rank, self._me.node, self._log)
            self._council = self._meet()
        except (ZerunError, OSError) as problem:
            self._alone_with(f"the rendezvous could not be opened: {problem}")
            return
        self._loop.every(_BEAT_S, self._beat)
        if self._spec.time_s:
            warn_at = max(self._spec.time_s - self._spec.warn_s, self._spec.time_s / 2)
            if self._spec.warn_s > 0:
                self._loop.after(warn_at, self._warn_all)
            self._loop.after(self._spec.time_s, self._time_is_up)
        marks = {"ZERUN_TOKEN": self._spec.token, "ZERUN_NODE": self._me.node, "ZERUN_RUN_DIR": self._spec.run_dir}
        self._preparation.begin(marks, Path(self._folder.setup_log(self._me.node)))

    def _meet(self) -> Council:
        if self._me.node_rank == 0:
            return self._host()
        hello: Dict[str, Any] = {"token": self._spec.token, "node": self._me.node, "node_rank": self._me.node_rank}
        hello["server"] = self._replicas.where if self._replicas else None
        peer = Peer(self._loop, self._find_first, hello, self, self._log)
        peer.on_welcome = self._welcomed
        return peer

    def _host(self) -> Council:
        entry = self._spec.nodes[0]
        meeting = rendezvous.open_meeting(self._spec, self._me.node, entry.address)
        self._meeting, self._listener = meeting.announcement, meeting.ranks
        rendezvous.announce(meeting.announcement, Path(self._folder.rendezvous))
        found = meeting.announcement
        self._log(f"announced {found.address}, ports {found.port} (ranks) and {found.control_port} (agents)")
        self._ready.say(announced=[found.address, found.port, found.control_port])
        names = [self._me.node, *(node.name for node in self._spec.nodes[1:])]
        coordinator = Coordinator(self._loop, meeting.control, self._spec.token, names, self, self._log)
        coordinator.servers[0] = self._replicas.where if self._replicas else None
        return coordinator

    def _find_first(self) -> Optional[Tuple[str, int]]:
        if self._meeting is None:
            self._meeting = rendezvous.read_announcement(Path(self._folder.rendezvous))
        return (self._meeting.address, self._meeting.control_port) if self._meeting else None

    def _alone_with(self, message: str) -> None:
        """Before there is any channel: the others find out by waiting in vain."""
        self._log(message)
        self._keeper.failure = self._failure("start_failed", message)
        self._keeper.state, self._keeper.ended_at = "ended", time.time()
        self._keeper.write(())
        self._ready.say(True, failed=message)
        self._loop.stop()

    def _welcomed(self) -> None:
        self._welcome = True
        self._start_if_ready()

    def gathered(self, servers: Mapping[int, replicas.Where]) -> None:
        """Every node's agent is there, and holds its slots."""
        self._gathered = True
        if self._replicas is not None:
            self._replicas.begin(servers)
        self._start_if_ready()

    def _has_prepared(self, folder: Path, base: Environment) -> None:
        self._prepared = (folder, base)
        self._start_if_ready()

    def _start_if_ready(self) -> None:
        if self._started or self._stopping or self._prepared is None or self._meeting is None:
            return
        if not (self._welcome and self._gathered):
            return
        self._started = True
        folder, base = self._prepared
        interface = rendezvous.interface_of(self._spec, self._meeting.address)
        first = sum(node.slots for node in self._spec.nodes[: self._me.node_rank])
        seat = Seat(first, self._me.node_rank, self._me.node, self._meeting.address, self._meeting.port, interface)
        listener = self._listener
        if listener is not None and (self._spec.program is not None or self._spec.container is not None):
            # A program binds the port itself, and nothing is inherited by a container: let it go in the last moment.
            listener.close()
            listener = None
        try:
            program = self._ranks.start(base, seat, folder, listener.fileno() if listener else None)
        except (ZerunError, OSError, ValueError, subprocess.SubprocessError) as problem:
            self._fail_here("start_failed", f"node {self._me.node}: {problem}")
            return
        finally:
            if self._listener is not None:
                self._listener.close()
                self._listener = None
        if self._held is not None:
            self._held.note_processes()
        self._keeper.state, self._keeper.python = "running", program
        self._log(f"{len(self._ranks.all)} ranks started with {program}, interface {interface}")
        self._write()
        self._ready.say(True, ready=True)

    # -- running -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._loop.reap()  # in case a signal was lost
        if not (self._stopping or self._reported) and is_superseded(self._spec):
            self._report(self._failure("cancelled", "the run's next attempt has begun elsewhere"), time.monotonic())
        if self._held is not None:
            self._held.beat()
        if self._warned and not self._stopping:
            self._ranks.warn()
        self._write()

    def _write(self) -> None:
        self._keeper.write(self._ranks.records())

    def _failure(self, kind: str, message: str, rank: Optional[Rank] = None) -> Failure:
        return Failure(
            kind,
            self._me.node,
            message,
            rank=rank.rank if rank else None,
            exit_code=rank.exit_code if rank else None,
            signal=rank.signal if rank else None,
            at=(rank.ended_at if rank else None) or time.time(),
        )

    def _fail_here(self, kind: str, message: str) -> None:
        self._ready.say(True, failed=message)
        self._report(self._failure(kind, message), time.monotonic())

    def _report(self, failure: Failure, died_at: float) -> None:
        self._log(f"{failure.kind}: {failure.message}")
        self._council.report(failure, died_at)
        self.stop_now(time.monotonic() - died_at)

    def _rank_ended(self, rank: Rank) -> None:
        how = f"killed by {signal_name(rank.signal)}" if rank.signal else f"exited with {rank.exit_code}"
        self._log(f"rank {rank.rank} {how}{', as we asked' if rank.signalled else ''}")
        if not (rank.signalled or rank.ended_well):
            died_at = time.monotonic()
            if rank.told_to_end:
                # Under Slurm a cancel reaches ranks and agent at once: perhaps ours is still on its way.
                self._loop.after(_ORDER_ON_ITS_WAY_S, lambda: self._judge(rank, died_at))
            else:
                self._judge(rank, died_at)
        self._write()
        self._see_whether_all_ended()

    def _judge(self, rank: Rank, died_at: float) -> None:
        if rank.signalled:
            return
        place = f"rank {rank.rank} on {self._me.node}"
        if rank.signal is not None:
            failure = self._failure("rank_signal", f"{place} was killed by {signal_name(rank.signal)}", rank)
        else:
            failure = self._failure("rank_exit", f"{place} exited with {rank.exit_code}", rank)
        self._report(failure, died_at)

    def _see_whether_all_ended(self) -> None:
        if not self._started or self._ranks.living or not self._ranks.all:
            return
        if self._stopping:
            self._kill()
        elif not self._reported and all(rank.ended_well for rank in self._ranks.all):
            self._reported = True
            if self._replicas is None:
                self._council.ended()
            else:
                self._replicas.finish(lambda: self._loop.from_thread(self._copied))

    def _copied(self) -> None:
        if self._replicas is not None:
            self._keeper.notes += self._replicas.problems
        self._council.ended()

    def _excuse_ended(self) -> None:
        """Ranks that SIGTERM ended just before we were told of the cancel: it meant them too."""
        for rank in self._ranks.all:
            rank.signalled = rank.signalled or rank.told_to_end

    def _cancelled(self) -> None:
        self._excuse_ended()
        self._ready.say(True, failed="cancelled")
        self._report(self._failure("cancelled", f"the agent on {self._me.node} was told to stop"), time.monotonic())

    def _cancelled_now(self) -> None:
        """The grace is over for whoever asked. (A second SIGTERM is no hurry: Slurm sends several.)"""
        self._cancelled()
        self._kill()

    def _time_is_up(self) -> None:
        if self._reported and self._replicas is not None:  # the ranks were in time, the last copies are on their way
            return
        self._report(self._failure("time_limit", f"the time limit of {self._spec.time_s} s is over"), time.monotonic())

    def _warn_all(self) -> None:
        if not self._warned:
            self._council.warn()
            self.warned()

    # -- what the others say (control.Events) ----------------------------------------------------------

    def warned(self) -> None:
        if self._warned or self._stopping:
            return
        self._warned = True
        self._log(f"warning: stop file, and {self._spec.stop_signal} to the ranks")
        with contextlib.suppress(OSError):
            Path(self._folder.stop).touch()
        self._ranks.warn()
        self._keeper.stop_sent_at = time.time()
        self._keeper.notes.append(f"stop signal sent at {self._keeper.stop_sent_at:.3f}")
        self._write()

    def stop_now(self, late_s: float = 0.0) -> None:
        self._loop.reap()  # who is dead already was not ended by us
        if self._stopping:
            return
        self._stopping = True
        self._keeper.state = "stopping"
        shell = self._preparation.give_up()
        if shell is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(shell, signal.SIGTERM)
        self._ranks.ask_to_end()
        self._write()
        grace_s = max(0.0, min(float(self._spec.grace_s), _DOWN_WITHIN_S - late_s))
        if self._ranks.living:
            self._log(f"stopping: SIGTERM to {len(self._ranks.living)} ranks, SIGKILL in {grace_s:.1f} s")
            self._loop.after(grace_s, self._kill)
        else:
            self._kill()

    def decided(self, failure: Failure) -> None:
        self._settled = True
        self._keeper.failure = failure
        if failure.kind == "cancelled":
            self._excuse_ended()
        if self._down:
            self._end()

    def finish(self) -> None:
        self._settled = True
        for stat in processes.descendants([os.getpid()]):
            processes.send(stat, signal.SIGTERM)
        self._await_leftovers(time.monotonic() + _LEFTOVER_S)

    def _await_leftovers(self, until: float) -> None:
        if time.monotonic() < until and processes.descendants([os.getpid()]):
            self._loop.after(0.05, lambda: self._await_leftovers(until))
        else:
            self._kill()

    # -- ending --------------------------------------------------------------------------------------

    def _kill(self) -> None:
        """SIGKILL to every descendant, again until none is left."""
        if self._killing_since is None:
            self._killing_since = time.monotonic()
            self._round()

    def _round(self) -> None:
        left = processes.descendants([os.getpid()])
        if self._spec.container is not None:  # a daemon's children are not ours, and still this attempt's
            left += [stat for stat in processes.marked(self._spec.token) if stat not in left]
        if left and time.monotonic() - (self._killing_since or 0.0) < _KILLING_S:
            for rank in self._ranks.living:
                rank.signalled = True
            for stat in left:
                processes.send(stat, signal.SIGKILL)
            self._loop.after(0.02, self._round)
            return
        self._loop.reap()
        if left:
            pids = ", ".join(str(stat.pid) for stat in left)
            self._log(f"could not be ended: {pids}")
            self._keeper.notes.append(f"processes that could not be ended: {pids}")
        self._all_down(immortal=bool(left))

    def _all_down(self, *, immortal: bool) -> None:
        self._down = True
        self._ranks.close()
        container.end(self._spec, [rank.rank for rank in self._ranks.all if rank.signalled or rank.signal])
        if self._held is not None:  # before the record says so: whoever reads it may start the next attempt
            self._held.release(but_for_heirs=immortal)
        if self._settled:
            self._end()
        else:
            self._write()
        self._council.leave(self._loop.stop)

    def _end(self) -> None:
        self._keeper.state = "ended"
        self._keeper.ended_at = self._keeper.ended_at or time.time()
        self._delete_secrets()
        self._write()
        failure = self._keeper.failure
        self._log(f"ended: {failure.message if failure else 'every rank ended well'}")

    def _delete_secrets(self) -> None:
        """The node that unpacked for all deletes for all; without a shared disk each deletes its own. What Slurm may
        begin again (it told us to stop, a node was lost, ranks saved and stopped) keeps them: whoever sees the job's
        end, or cancels it, deletes them then."""
        failure = self._keeper.failure
        again = failure.kind in ("cancelled", "node_lost") if failure else any(r.exit_code for r in self._ranks.all)
        if again and os.environ.get("SLURM_JOB_ID"):
            return
        if self._spec.secrets_file and (self._me.node_rank == 0 or not self._spec.shared):
            with contextlib.suppress(OSError):
                os.unlink(self._spec.secrets_file)

    def _status(self) -> int:
        failure = self._keeper.failure
        if failure is None:
            return max((rank.exit_code or 0 for rank in self._ranks.all if rank.exit_code in OK_STATUS), default=0)
        if failure.kind in ("time_limit", "cancelled"):
            return 124 if failure.kind == "time_limit" else 128 + signal.SIGTERM
        if failure.signal is not None:
            return 128 + failure.signal
        return failure.exit_code or 1
