"""Ranks that stand ready: each policy has processes of its own, which wait on a pipe while others are measured.

They are forked from a server that has torch loaded, meet by a file on this machine, speak gloo on loopback, and have
one thread each. Nothing of one policy (allocator, threads, patches to torch) is then in another's way.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import policies
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MEMORY_STEPS = 4
ANSWER_S = 600.0
SMALL = 64  # elements: what is shorter is a norm or a flag, no one's gradients
_SERVER = multiprocessing.get_context("forkserver")
_PRELOAD = ["torch", "torch.distributed", "torch.distributed.fsdp", "torch._dynamo", "policies"]


@dataclass(frozen=True)
class Stepped:
    """Of some steps: seconds a step of the slowest rank, and the mean over ranks of the last step's loss."""

    seconds: float
    loss: float


@dataclass(frozen=True)
class Memory:
    """Peaks of the rank that has the largest, above what stood before the model was made; messages of one step."""

    peak_storage_bytes: int
    peak_resident_bytes: int
    volume_elements: int


class Company:
    """The ranks of one policy. ``kind``: ``steps`` (to be timed), or ``storages`` or ``resident`` (to be weighed)."""

    def __init__(self, policy: str, world: int, size: str, kind: str = "steps") -> None:
        self.policy = policy
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        self._pipes: list[Any] = []
        self._ranks: list[Any] = []
        for rank in range(world):
            ours, theirs = _SERVER.Pipe()
            process = _SERVER.Process(
                target=_stand, args=((rank, world, store), (policy, size, kind), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._ranks.append(process)

    def answers(self) -> list[Any]:
        """What every rank said. Raises SystemExit when one failed, which has said why on stderr."""
        said = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(ANSWER_S):
                raise SystemExit(f"{self.policy}: rank {rank} did not answer within {ANSWER_S:.0f} s")
            try:
                said.append(pipe.recv())
            except EOFError:
                raise SystemExit(f"{self.policy}: rank {rank} failed; its traceback stands above") from None
        return said

    def steps(self, count: int) -> Stepped:
        for pipe in self._pipes:
            pipe.send(count)
        said = self.answers()
        return Stepped(max(seconds for seconds, _ in said) / count, sum(loss for _, loss in said) / len(said))

    def end(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it is gone already
                pipe.send(0)
        for process in self._ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


@contextlib.contextmanager
def standing(names: Sequence[str], world: int, size: str) -> Iterator[Mapping[str, Company]]:
    """A company a policy, built and ready; all are gone after."""
    prepare()
    found: dict[str, Company] = {}
    try:
        for name in names:
            found[name] = Company(name, world, size)
        for company in found.values():
            company.answers()
        yield found
    finally:
        for company in found.values():
            company.end()


def weigh(policy: str, world: int, size: str) -> Memory:
    """Memory and messages of a policy, untimed; two companies, because counting storages costs memory itself."""
    prepare()
    said: dict[str, list[Any]] = {}
    for kind in ("storages", "resident"):
        company = Company(policy, world, size, kind)
        try:
            said[kind] = company.answers()
        finally:
            company.end()
    peaks, volumes = zip(*said["storages"], strict=True)
    return Memory(max(peaks), max(said["resident"]), max(volumes))


def prepare() -> None:
    """One thread, and no malloc setting: before the server starts."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", KINETO_LOG_LEVEL="99")
    _SERVER.set_forkserver_preload(_PRELOAD)


# --- inside a rank ---------------------------------------------------------------------------------------


def _stand(place: tuple[int, int, str], what: tuple[str, str, str], pipe: Any) -> None:
    rank, world, store = place
    policy, size, kind = what
    os.dup2(2, 1)  # libraries that print do not do so into the answer
    warnings.simplefilter("ignore")  # of the libraries compared
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=ANSWER_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    if kind == "steps":
        _steps(policy, size, rank, pipe)
    else:
        pipe.send((_storages if kind == "storages" else _resident)(policy, size, rank))
        pipe.recv()
    os._exit(0)  # no destructor that waits for the others


def _steps(policy: str, size: str, rank: int, pipe: Any) -> None:
    training = policies.POLICIES[policy](policies.make_model(size))
    pipe.send(None)
    number = 0
    while count := pipe.recv():
        batches = [policies.batch(size, number + i, rank) for i in range(count)]
        number += count
        dist.barrier()
        began = time.perf_counter()
        for tokens in batches:
            loss = training.step(tokens)
        _finish(training)
        pipe.send((time.perf_counter() - began, float(loss)))


def _finish(training: policies.Training) -> None:
    if training.finish is not None:
        training.finish()


def _storages(policy: str, size: str, rank: int) -> tuple[int, int]:
    """The peak by the CPU allocator's own events, and the elements of one more step's messages."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        training = policies.POLICIES[policy](policies.make_model(size))
        for number in range(MEMORY_STEPS):
            training.step(policies.batch(size, number, rank))
        _finish(training)  # torch's profiler does not outlive a message under way
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    before = training.comm.traffic.volume_elements if training.comm else 0
    with _Messages() as messages:
        training.step(policies.batch(size, MEMORY_STEPS, rank))
        _finish(training)
    return peak, training.comm.traffic.volume_elements - before if training.comm else messages.elements


def _resident(policy: str, size: str, rank: int) -> int:
    """The high-water mark of the process less what stood before its model was made."""
    training = policies.POLICIES["alone"](policies.make_model("tiny"))
    training.step(policies.batch("tiny", 0, rank))  # libraries have made what they keep
    del training
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
    before = _status("VmRSS")
    training = policies.POLICIES[policy](policies.make_model(size))
    for number in range(MEMORY_STEPS):
        training.step(policies.batch(size, number, rank))
    _finish(training)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class _Messages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by whole messages, as the ZeRO paper does: an all-reduce is two."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function.__name__.split(".")[0]
            times = 2 if "allreduce" in name else 1
            largest = max((sum(_numels(value)) for value in args[:2]), default=0)  # the whole, not the part
            if largest > SMALL and name != "barrier":
                self.elements += times * largest
        return function(*args, **(kwargs or {}))


def _numels(value: Any) -> Iterator[int]:
    if isinstance(value, Tensor):
        yield value.numel()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numels(item)
