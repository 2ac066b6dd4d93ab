"""One training step on nothing: the engine and the loop as they are, as one rank of a world that does not exist.

``python RUNTIME simulate`` reads one ``contract.simulation.SimulationRequest`` as JSON on stdin and writes one
``Simulation`` on stdout. The job's own model runs, with its own loss; a batch has the shapes of a real one.
Where a run would read a value (a norm, a flag), see ``engine.rehearsal.nothing``.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...contract.errors import Exit, UsageError, ZerunError
from ...contract.plain import from_plain, to_plain
from ...contract.simulation import Held, Peak, Simulation, SimulationRequest, Timeline
from ...contract.topology import Topology
from ...contract.train import Checkpointing, TrainConfig
from ..comm import Alone, Comm, NativeComm, PeerComm
from ..comm.choose import READ
from ..comm.host import room_for_pieces
from ..job import sources
from ..job.loop import Progress, Trainer, traffic_of
from ..job.place import Place
from ..ranks import Ranks
from ..resolve import resolve
from ..watching.track import BACKWARD, CATEGORIES, FORWARD, UPDATE, FirstSteps, Ledger, Recorded, claim
from ..zero import StepInfo, ZeroEngine
from . import nothing

_SHORT = 6  # frames of a user's own traceback that are shown


class Watched:
    """The engine as the loop's policy, telling the ledger which phase it is in."""

    def __init__(self, engine: ZeroEngine, ledger: Ledger) -> None:
        self.engine, self.ledger = engine, ledger
        self.model, self.ranks, self.comm, self.device = engine.model, engine.ranks, engine.comm, engine.device
        self.lr = engine.lr

    def backward(self, loss: Tensor) -> None:
        self.ledger.begin(BACKWARD)
        self.engine.backward(loss)
        self.ledger.begin(FORWARD)

    def step(self) -> StepInfo:
        self.engine.lr = self.lr
        self.ledger.begin(UPDATE)
        return self.engine.step()


class Shapes:
    """Batches without values: what ``sources.Batches`` gives, in shapes and dtypes."""

    heldout_batches = 0

    def __init__(self, config: TrainConfig, sample: Any) -> None:
        self.tokens_per_sample = config.gpt.seq_len if config.gpt else 1
        self._sample = sample

    def train(self, first: int, count: int) -> Any:
        return tree_map(lambda t: torch.zeros(t[0], dtype=t[1]) if isinstance(t, _Shape) else t, self._sample)


class _Shape(tuple):  # type: ignore[type-arg]
    """(shape, dtype) of a tensor."""


class Rehearsal(Trainer):
    """The loop's own step, on batches and a policy that are given."""

    def __init__(self, config: TrainConfig, place: Place, policy: Watched, batches: Shapes) -> None:
        self.config, self.place = config, place
        self.batches = batches  # type: ignore[assignment]
        self.loss = sources.make_loss(config)
        self.policy = policy  # type: ignore[assignment]
        self.world, self.comm = policy.ranks.world, policy.comm
        self.global_batch = config.batch.global_batch(self.comm.size)
        self.progress = Progress()
        self.first_steps = FirstSteps(None)  # the ledger sees all
        self.background = None  # nothing is saved
        self.stop_asked = False
        self.background = None

    def _save(self) -> None:
        return

    def one_step(self) -> None:
        self._one_step(_Silent())  # type: ignore[arg-type]


class _Silent:
    """A reporter that says nothing."""

    def step(self, *_: Any) -> None:
        return


def simulate(request: SimulationRequest) -> Simulation:
    """Rank ``request.rank``'s last step. Raises UsageError where the job cannot be built, with its own traceback."""
    try:
        return _simulate(request)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _simulate(request: SimulationRequest) -> Simulation:
    started = time.perf_counter()
    config = replace(request.train, evaluate=None, checkpoint=Checkpointing())
    topology = Topology(request.slots, config.tensor, config.zero.replicas)
    world = topology.world_size
    if not 0 <= request.rank < world:
        raise UsageError(f"rank {request.rank} is not in a world of {world}", hint=f"ranks are 0 to {world - 1}")
    with _own_modules(request.code), _said_of(config, "data"):
        sample = sample_of(config)
    ranks = _connect(request.rank, topology, request.device_kind, config.zero.same_host)
    ledger = Ledger(nothing=True)
    with ledger.resizes_watched(), nothing.Nothing(ledger), _own_modules(request.code):
        with _said_of(config, "model"):
            model = sources.make_model(config, ranks.tensor)
        rehearsal = _rehearse(config, model, ranks, ledger, sample)
        with _said_of(config, "step"):
            for _ in range(request.steps):
                start = len(ledger.log)
                before = traffic_of(ranks)
                ledger.begin(FORWARD)
                rehearsal.one_step()
        engine = rehearsal.policy.engine  # type: ignore[attr-defined]
        claim(ledger, engine)  # some of what it keeps is made in the first step
        memory = engine.memory()
    without = "host" if request.device_kind == "gpu" else ""
    recorded = Recorded(ledger, start, request.points, without)
    sent = {name: count - before[name] for name, count in traffic_of(ranks).items()}
    peak = max(recorded.peaks.items(), key=lambda item: item[1].total)
    return Simulation(
        rank=request.rank,
        world_size=world,
        peak_bytes=peak[1].total,
        peak_phase=peak[0],
        peak_holds=_holds(peak[1].holds),
        peaks=tuple(Peak(p, m.total, _holds(m.holds)) for p, m in recorded.peaks.items()),
        timeline=Timeline(CATEGORIES, tuple(recorded.points), _marks(recorded)),
        parameters=engine.layout.psi,
        state_bytes={kind: memory[kind] for kind in ("parameters", "gradients", "optimizer")},
        volume_elements=sum(count for name, count in sent.items() if name.endswith("volume_elements")),
        sent_bytes=sum(count for name, count in sent.items() if name.endswith("sent_bytes")),
        collectives="none" if world == 1 else "peer" if isinstance(ranks.world, PeerComm) else "native",
        torch=torch.__version__,
        took_s=time.perf_counter() - started,
        memory_bytes=most_resident_bytes(),
        assumed=_assumed(request.device_kind),
    )


def most_resident_bytes() -> int:
    """The most memory that this process has held since it was started.

    Not getrusage's ``ru_maxrss`` where there is a choice: on Linux that one survives exec, so that a child begins
    with what its parent had held when it forked.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    if found is not None:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _connect(rank: int, topology: Topology, device_kind: str, same_host: str) -> Ranks:
    """This rank's groups, as ``Ranks.connect`` would make them, and nobody else's."""
    if topology.world_size == 1:
        return Ranks.connect()
    nothing.join(rank, topology.world_size)

    def make(members: range, group: dist.ProcessGroup | None = None) -> Comm:
        if device_kind != "cpu":
            return NativeComm(group)
        return _OneHost(group) if same_host == READ and topology.on_one_node(members) else PeerComm(group)

    world = make(range(topology.world_size))

    def group(members: range) -> Comm:
        if len(members) == 1:
            return Alone()
        return world if len(members) == world.size else make(members, dist.new_group(list(members)))

    data, tensor = group(topology.data_group(rank)), group(topology.tensor_group(rank))
    if topology.replicas == 1:
        return Ranks(world, data, tensor)
    return Ranks(world, data, tensor, group(topology.shard_group(rank)), group(topology.replica_group(rank)))


class _OneHost(PeerComm):
    """What ranks of one host need room for, without the ranks."""

    def scratch_numel(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        return room_for_pieces(numel, dtype, self.size)


def _rehearse(config: TrainConfig, model: nn.Module, ranks: Ranks, ledger: Ledger, sample: Any) -> Rehearsal:
    engine = ZeroEngine(model, config, ranks=ranks)
    claim(ledger, engine)
    place = Place(ranks.world.rank, 0, ranks.world.size, 1, "", 0, "nowhere", torch.device("cpu"))
    return Rehearsal(config, place, Watched(engine, ledger), Shapes(config, sample))


def sample_of(config: TrainConfig) -> Any:
    """A micro-batch of the job's data as :class:`_Shape` leaves: known for token files, else one is drawn."""
    data, micro = config.data, config.batch.micro
    if data.factory:
        function = resolve(data.factory, "data.factory")
        batch = sources.FactoryBatches(function, data.options, 0).train(0, micro)
        return tree_map(lambda t: _Shape((tuple(t.shape), t.dtype)) if isinstance(t, Tensor) else t, batch)
    seq_len = config.gpt.seq_len if config.gpt else data.options.get("seq_len")
    if not isinstance(seq_len, int):
        raise UsageError("a factory model over token files needs data.options.seq_len (and vocab, default 256)")
    tokens = _Shape(((micro, seq_len), torch.int64))
    return [tokens, tokens]


def _holds(holds: dict[str, int]) -> tuple[Held, ...]:
    return tuple(Held(what, count) for what, count in sorted(holds.items(), key=lambda item: -item[1]))


def _assumed(device_kind: str) -> tuple[str, ...]:
    if device_kind == "cpu":
        return ("what kernels and gloo hold inside a call is not counted",)
    return (
        "operations are those of CPU tensors: a GPU's attention may keep other statistics",
        "workspaces of kernels and of the collectives' library are not counted, nor is the allocator's rounding",
    )


def _marks(recorded: Recorded) -> tuple[tuple[int, str], ...]:
    last = len(recorded.points) - 1
    return tuple((min(at, last), phase) for at, phase in recorded.marks)


# --- a user's own code --------------------------------------------------------------------------------


@contextmanager
def _own_modules(code: str | None) -> Iterator[None]:
    """The job's modules are found behind everything else, as on the cluster."""
    if code is None or code in sys.path:
        yield
        return
    sys.path.append(code)
    try:
        yield
    finally:
        sys.path.remove(code)


@contextmanager
def _said_of(config: TrainConfig, what: str) -> Iterator[None]:
    """What a user's code raises is told with its own lines, and where the job names it."""
    try:
        yield
    except ZerunError:
        raise
    except Exception as problem:
        if not user_frames(problem):
            raise  # our own mistake: said in full
        name = {"data": config.data.factory, "model": config.factory and config.factory.factory}.get(what)
        line = f"{what}.factory: {name}" if name else "the job's model"
        where = "in a simulated step" if what == "step" else "in a simulation"
        raise UsageError(
            f"{line} failed {where}:\n{own_lines(problem)}",
            hint="values do not exist in a simulation: what reads files or branches on values must not do so when "
            "it is imported or called",
        ) from problem


def own_lines(problem: BaseException) -> str:
    """The traceback without torch's and our own frames, the last few of what stays."""
    frames = user_frames(problem)
    shown = traceback.format_list(frames[-_SHORT:])
    left = [f"  … {len(frames) - _SHORT} more\n"] if len(frames) > _SHORT else []
    return "".join([*left, *shown, *traceback.format_exception_only(type(problem), problem)]).rstrip()


def user_frames(problem: BaseException) -> list[traceback.FrameSummary]:
    """The frames that are neither torch's nor ours, nor those of the import itself."""
    own = str(Path(__file__).parent.parent)
    return [
        frame
        for frame in traceback.extract_tb(problem.__traceback__)
        if not frame.filename.startswith((own, "<", importlib.__path__[0]))
        and "site-packages/torch" not in frame.filename
    ]


# --- the process --------------------------------------------------------------------------------------


def main(read: Callable[[], str] = sys.stdin.read) -> int:
    """One request on stdin, one answer on stdout; what else prints goes to stderr."""
    answer_to, sys.stdout = sys.stdout, sys.stderr
    try:
        torch.set_num_threads(1)
        answer: Any = to_plain(simulate(from_plain(SimulationRequest, json.loads(read()))))
        code = int(Exit.DONE)
    except ZerunError as problem:
        answer, code = {"error": problem.message, "hint": problem.hint}, int(problem.exit_code)
    except Exception:  # noqa: BLE001 (the border of the process: said in full, then it ends)
        answer = {"error": f"the simulation failed:\n{traceback.format_exc()}", "hint": None}
        code = int(Exit.JOB_FAILED)
    finally:
        sys.stdout = answer_to
    sys.stdout.write(json.dumps(answer, separators=(",", ":")))
    sys.stdout.flush()
    return code
