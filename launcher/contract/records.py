"""What agents and the engine write about a run, so that the launcher can fold it into a state.

An agent writes only its own node's record; rank 0 alone writes the outcome. Wall-clock times are
seconds since the epoch on that node's clock; durations come from its monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional, Tuple


@dataclass(frozen=True)
class ProcessId:
    """A process for ever: a pid can be used again, a pid with its start time cannot.

    ``started_ticks`` is field 22 of /proc/PID/stat; ``boot`` is the kernel's boot id.
    """

    pid: int
    started_ticks: int
    boot: str


@dataclass(frozen=True)
class RankRecord:
    """``stopped_by_us``: this rank was ended by the agent, so how it ended is no cause of anything."""

    rank: int
    local_rank: int
    pid: int
    started_at: float
    ended_at: Optional[float] = None
    ran_s: Optional[float] = None
    exit_code: Optional[int] = None  # exactly one of exit_code and signal, once ended
    signal: Optional[int] = None
    stopped_by_us: bool = False
    log_bytes_lost: int = 0  # what the log could not take (no space), while the rank went on

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    @property
    def status(self) -> Optional[int]:
        """The exit status as a shell tells it: the code, or 128 + signal; None while it runs."""
        if self.signal is not None:
            return 128 + self.signal
        return self.exit_code


@dataclass(frozen=True)
class Failure:
    """The first failure that the agents of an attempt agreed on.

    ``kind``: rank_exit · rank_signal · node_lost · setup_failed · start_failed · no_space · time_limit ·
    cancelled
    """

    kind: str
    node: str
    message: str
    rank: Optional[int] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None
    at: Optional[float] = None


@dataclass(frozen=True)
class NodeRecord:
    """``attempts/K/nodes/NODE.json``. ``state``: starting · running · stopping · ended."""

    node: str
    node_rank: int
    agent: ProcessId
    state: str
    started_at: float
    beat_at: float  # rewritten every few seconds while the agent lives
    host: str = ""
    python: str = ""
    ranks: Tuple[RankRecord, ...] = ()
    failure: Optional[Failure] = None  # what this agent stopped for
    ended_at: Optional[float] = None
    job_id: Optional[str] = None
    restart_count: int = 0
    notes: Tuple[str, ...] = ()
    leased: Optional[Tuple[int, ...]] = None  # the slots (devices) that it holds, where no scheduler gave them
    kept_by: str = ""  # what lets it outlive a logout: scope · setsid; nothing under Slurm
    cores: Optional[int] = None  # that the agent and its ranks are bound to, together
    cpus: str = ""  # which: 0-3,8
    memory_bytes: Optional[int] = None  # that they may use, together
    memory_by: str = ""  # what limits it: machine, cgroup v1, cgroup v2, RLIMIT_AS, RLIMIT_DATA
    stop_sent_at: Optional[float] = None  # when the ranks were asked to save and end: a limit, or a graceful stop


@dataclass(frozen=True)
class Announcement:
    """``rendezvous.json``: where ranks meet, and where agents do. Both ports were bound before."""

    address: str
    port: int
    control_port: int


@dataclass(frozen=True)
class Outcome:
    """The engine's last word. ``outcome``: done · stopped (saved, resumable)."""

    outcome: str
    step: int
    checkpoint: Optional[int] = None
    train_loss: Optional[float] = None
    heldout_loss: Optional[float] = None
    bigram_entropy: Optional[float] = None  # nats a token of the same held-out text
    tokens_per_s: Optional[float] = None
    trained_s: Optional[float] = None
    parameters: Optional[int] = None
    state_bytes: Dict[str, int] = field(default_factory=dict)  # a rank: parameters, gradients, optimizer
    reason: str = ""
    skipped: int = 0  # steps whose update was left out: gradients that were no numbers, or too large for fp16
